"""synchronous_standby_names: its grammar, and the proof that who has to be seen cannot miss a commit."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from health.synchronous import Synchronous, parse


@pytest.mark.parametrize(
    ("text", "count", "names"),
    [
        ("pg2", 1, ("pg2",)),
        ("pg2, pg3", 1, ("pg2", "pg3")),
        ("pg2,pg3", 1, ("pg2", "pg3")),
        ("*", 1, ("*",)),
        ("pg2, *", 1, ("pg2", "*")),
        ("2 (pg2, pg3, pg4)", 2, ("pg2", "pg3", "pg4")),
        ("2(pg2,pg3)", 2, ("pg2", "pg3")),
        ("FIRST 2 (pg2, pg3)", 2, ("pg2", "pg3")),
        ("first 1 (pg2)", 1, ("pg2",)),
        ("ANY 2 (pg2, pg3, pg4)", 2, ("pg2", "pg3", "pg4")),
        ("aNy 1 (*)", 1, ("*",)),
        ("\tANY\n2\r(\fpg2\v, pg3 ) ", 2, ("pg2", "pg3")),
        ("ANY 1 (PG2, Pg3)", 1, ("pg2", "pg3")),
        ('"pg-2", "Pg 3"', 1, ("pg-2", "pg 3")),
        ('"a""b"', 1, ('a"b',)),
        ('"any", "first"', 1, ("any", "first")),
        ('ANY 1 (",", "(", ")")', 1, (",", "(", ")")),
        ("_pg$2", 1, ("_pg$2",)),
        ("22, 3", 1, ("22", "3")),
        ("ANY 1 (2)", 1, ("2",)),
        ("größe", 1, ("größe",)),  # bytes above 127 are letters to the scanner
    ],
)
def test_parse_each_form_of_the_grammar_is_read(text, count, names):
    assert parse(text) == Synchronous(count, names)


@pytest.mark.parametrize("text", ["", " ", "\t\n"])
def test_parse_of_nothing_is_nobody_to_wait_for(text):
    assert parse(text) is None


@pytest.mark.parametrize(
    "text",
    [
        ",",
        "pg2,",
        ",pg2",
        "pg2,,pg3",
        "pg2 pg3",
        "()",
        "2 ()",
        "ANY (pg2)",
        "ANY 2",
        "ANY 2 (pg2",
        "ANY 2 pg2)",
        "ANY 2 (pg2,)",
        "ANY 2 (pg2))",
        "ANY 2 ((pg2))",
        "ANY 2 (pg2), pg3",
        "ANY x (pg2)",
        "SOME 2 (pg2)",
        "ANY 2 3 (pg2)",
        "any, pg2",
        "ANY 1 (first)",
        '"ANY" 1 (pg2)',
        'ANY "1" (pg2)',
        "pg-2",
        "2pg",
        '"pg2',
        "pg2; pg3",
        "0 (pg2)",
        "ANY \u00b2 (pg2)",
    ],
)
def test_parse_garbage_is_refused(text):
    with pytest.raises(ValueError, match="synchronous_standby_names is not understood"):
        parse(text)


@settings(max_examples=100, deadline=None)
@given(st.text('ANYfirst129(),*"_ -$\n'))
def test_parse_random_text_is_read_or_refused(text):
    try:
        rule = parse(text)
    except ValueError:
        return
    assert (rule is None) == (not text.strip())
    assert rule is None or (rule.names and all(rule.names))


NAMES = st.lists(st.text(st.characters(codec="ascii", min_codepoint=32), min_size=1), min_size=1, max_size=4)


@settings(max_examples=100, deadline=None)
@given(NAMES, st.integers(1, 9), st.sampled_from(["", "ANY", "FIRST", "first"]))
def test_parse_any_names_in_quotes_are_read(names, count, method):
    quoted = ", ".join('"' + name.replace('"', '""') + '"' for name in names)
    assert parse(f"{method} {count} ({quoted})") == Synchronous(count, tuple(name.lower() for name in names))


@pytest.mark.parametrize(
    ("text", "name", "fits"),
    [
        ("pg2", "pg2", True),
        ("pg2", "PG2", True),
        ("Pg2", "pG2", True),
        ('"Pg 2"', "pg 2", True),
        ("pg2", "pg3", False),
        ("pg2", "", False),
        ("*", "whoever", True),
        ("pg2, *", "pg3", True),
        ("pg2", None, True),
    ],
)
def test_fits_compares_as_postgres_does_and_takes_unknown_for_fitting(text, name, fits):
    rule = parse(text)
    assert rule is not None
    assert rule.fits(name) is fits


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6), st.integers(1, 7), st.booleans(), st.data())
def test_needed_any_so_many_members_hold_every_commit_and_fewer_may_not(size, count, is_for_all, data):
    members = [f"pg{i}" for i in range(size)]
    rule = Synchronous(count, ("*",) if is_for_all else tuple(members))
    known = size if is_for_all else data.draw(st.integers(0, size))  # names count as well
    needed = rule.needed(known)
    if count > size:
        assert needed == 1  # a commit waits for more than there are: none was acknowledged
        return
    placements = [set(placement) for placement in combinations(members, count)]
    for seen in combinations(members, needed):
        assert all(placement & set(seen) for placement in placements)
    if needed > 1:
        assert any(not placement & set(members[: needed - 1]) for placement in placements)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.integers(0, 3), st.integers(1, 4))
def test_needed_standbys_that_share_a_name_are_all_members(names, more, count):
    # Two standbys may have one application_name: then there are more members than names.
    members = range(names + more)
    needed = Synchronous(count, tuple(f"pg{i}" for i in range(names))).needed(len(members))
    for placement in combinations(members, count):
        assert all(set(placement) & set(seen) for seen in combinations(members, needed))
