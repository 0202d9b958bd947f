"""Sets of parameter values: one object for equal ones, and the SQL from one to another for every kind of value."""

from __future__ import annotations

import gc
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.wire import messages
from gateway.wire.parameters import FACTS, Parameters, canonical, quote_identifier, quote_literal, set_command

REPORTED = frozenset(("DateStyle", "TimeZone", "application_name", "in_hot_standby", "search_path"))
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
VALUES = st.dictionaries(st.sampled_from([*REPORTED, "server_version", "work_mem", "my.own"]), st.sampled_from("ab"))


def sql(has: dict[str, str], wants: dict[str, str]) -> str:
    """The statements that make a server with one set serve a client with another."""
    step = Parameters.of(has).step_to(Parameters.of(wants), REPORTED)
    if not step.sql:
        return ""
    assert step.sql[0] == messages.QUERY
    (text,) = messages.cstrings(step.sql[5:])
    return text


def test_parameters_of_equal_values_are_one_object():
    one = Parameters.of({"a": "1", "b": "2"})
    assert Parameters.of({"b": "2", "a": "1"}) is one
    assert Parameters.of({"a": "1"}) is not one
    assert Parameters.of({"a": "1"}).having("b", "2") is one
    assert one.having("a", "1") is one
    assert dict(one.values) == {"a": "1", "b": "2"}


def test_parameters_keep_their_values_when_the_source_changes():
    source = {"a": "1"}
    parameters = Parameters.of(source)
    source["a"] = "2"
    assert dict(parameters.values) == {"a": "1"}
    assert Parameters.of(source) is not parameters


def test_parameters_nobody_has_are_forgotten():
    forgotten = weakref.ref(Parameters.of({"forgotten": "soon"}))
    gc.collect()
    assert forgotten() is None


def test_welcome_tells_what_is_reported_in_order():
    parameters = Parameters.of({"TimeZone": "UTC", "work_mem": "4MB", "application_name": ""})
    told = messages.parameter_status("TimeZone", "UTC") + messages.parameter_status("application_name", "")
    assert parameters.welcome(REPORTED) == told


@pytest.mark.parametrize(
    ("name", "value", "statement"),
    [
        ("application_name", "", "SET application_name TO ''"),
        ("application_name", "it's", "SET application_name TO 'it''s'"),
        ("application_name", "'; drop table t; --", "SET application_name TO '''; drop table t; --'"),
        ("application_name", r"a\b", r"SET application_name TO E'a\\b'"),
        ("application_name", r"\'", r"SET application_name TO E'\\'''"),
        ("DateStyle", "ISO, MDY", "SET DateStyle TO 'ISO, MDY'"),
        ("TimeZone", "<+03>-03", "SET TimeZone TO '<+03>-03'"),
        ("client_encoding", "UTF8", "SET client_encoding TO 'UTF8'"),
        # A list as SHOW gives it: SET would take it for one name in quotes.
        (
            "search_path",
            '"$user", public, "a""b"',
            """SELECT pg_catalog.set_config('search_path', '"$user", public, "a""b"', false)""",
        ),
        ("my.own", "é\n", "SELECT pg_catalog.set_config('my.own', 'é\n', false)"),
        ("work'mem", "\\", r"SELECT pg_catalog.set_config('work''mem', E'\\', false)"),
    ],
)
def test_value_of_any_kind_is_set_as_it_is(name, value, statement):
    assert set_command(name, value) == statement
    assert sql({}, {name: value}) == statement


def test_step_to_the_same_set_takes_nothing():
    parameters = Parameters.of({"a": "1"})
    assert parameters.step_to(parameters, REPORTED) == (b"", True, b"", parameters)


def test_step_sets_what_differs_and_nothing_else():
    has = {"TimeZone": "UTC", "DateStyle": "ISO", "work_mem": "1"}
    assert sql(has, {**has, "TimeZone": "PST", "work_mem": "2"}) == (
        "SET TimeZone TO 'PST';SELECT pg_catalog.set_config('work_mem', '2', false)"
    )


def test_step_resets_extras_and_takes_over_what_is_reported():
    step = Parameters.of({"work_mem": "1", "my.own": "2", "search_path": "s"}).step_to(Parameters.of({}), REPORTED)
    assert step.sql == messages.query('RESET "work_mem";RESET "my"."own"')
    assert step.facts == messages.parameter_status("search_path", "s")
    assert step.parameters is Parameters.of({"search_path": "s"})


@pytest.mark.parametrize("name", sorted(FACTS))
def test_step_tells_the_client_a_fact_and_asks_nothing_of_the_server(name):
    has, wants = Parameters.of({name: "new"}), Parameters.of({name: "old"})
    told = messages.parameter_status(name, "new")
    assert has.step_to(wants, REPORTED) == (b"", True, told, has)
    assert has.step_to(Parameters.of({}), REPORTED) == (b"", True, told, has)
    assert Parameters.of({}).step_to(wants, REPORTED) == (b"", True, b"", wants)


@pytest.mark.parametrize(
    ("name", "certain"), [("TimeZone", True), ("search_path", True), ("work_mem", False), ("my.own", False)]
)
def test_step_is_certain_where_no_server_can_refuse(name, certain):
    assert Parameters.of({}).step_to(Parameters.of({name: "1"}), REPORTED).certain is certain


def test_steps_to_very_many_sets_stay_right():
    start = Parameters.of({"TimeZone": "UTC"})
    others = [start.having("application_name", str(number)) for number in range(200)]
    for _ in range(2):
        for number, other in enumerate(others):
            assert start.step_to(other, REPORTED).sql == messages.query(f"SET application_name TO '{number}'")


@given(VALUES, VALUES)
def test_step_between_any_sets_leaves_client_and_server_with_the_same(has, wants):
    step = Parameters.of(has).step_to(Parameters.of(wants), REPORTED)
    after = dict(step.parameters.values)
    told = {name: has[name] for name in has if messages.parameter_status(name, has[name]) in step.facts}
    for name in {*has, *wants}:
        if name in FACTS and name in has:
            assert after[name] == has[name]  # the server's
        elif name in wants:
            assert after[name] == wants[name]  # the client's
        else:
            assert after.get(name) == (has[name] if name in REPORTED else None)
        # A client of a server that reports it knows the value: it had it, or was told it.
        if name in REPORTED and name in after:
            assert told.get(name, wants.get(name)) == after[name]
    again = step.parameters.step_to(Parameters.of({**wants, **told}), REPORTED)
    assert (again.sql, again.parameters) == (b"", step.parameters)


def read_literal(text: str, conforming: bool) -> str:
    """Read a string constant as PostgreSQL's scanner does, with standard_conforming_strings on or off."""
    escapes = text.startswith("E") or not conforming
    body = text.removeprefix("E")
    assert body[0] == body[-1] == "'"
    body, value, at = body[1:-1], "", 0
    while at < len(body):
        if body[at] == "'" or (body[at] == "\\" and escapes):
            assert body[at + 1] == body[at], "the constant ends, or an escape begins"
            at += 1
        value += body[at]
        at += 1
    return value


@given(st.text(st.sampled_from("'\\aE$é"), max_size=8) | TEXT, st.booleans())
def test_literal_of_any_text_is_read_back(text, conforming):
    assert read_literal(quote_literal(text), conforming) == text


@pytest.mark.parametrize(
    ("name", "quoted"), [("work_mem", '"work_mem"'), ("my.own", '"my"."own"'), ('a"b.c', '"a""b"."c"')]
)
def test_identifier_is_quoted_part_by_part(name, quoted):
    assert quote_identifier(name) == quoted


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("timezone", "TimeZone"),
        ("DATESTYLE", "DateStyle"),
        ("Search_Path", "search_path"),
        ("Work_Mem", "work_mem"),
        ("My.Own", "my.own"),
    ],
)
def test_name_in_any_case_is_the_one_that_postgresql_reports(name, known):
    assert canonical(name) == known
