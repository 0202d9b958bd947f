"""Which prepared statement a text names: what PostgreSQL's grammar takes, and nothing that is not surely it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.wire.intent import Mention, Verb, ends_transaction, mention
from gateway.worker.rewrite import may_mention

BLANKS = st.sampled_from(["", " ", "\n\t", "-- a comment\n", "/* b ** c */", ";"])
SPACES = st.sampled_from([" ", "\r\n", "/**/", " -- deallocate x\n"])


@pytest.mark.parametrize(
    ("text", "verb", "name"),
    [
        ("deallocate s", Verb.DEALLOCATE, "s"),
        ("DEALLOCATE PREPARE S;", Verb.DEALLOCATE, "s"),
        ('Deallocate "S"', Verb.DEALLOCATE, "S"),
        ('deallocate "a ""b"""', Verb.DEALLOCATE, 'a "b"'),
        ('deallocate "all"', Verb.DEALLOCATE, "all"),
        ("deallocate prepare", Verb.DEALLOCATE, "prepare"),
        ("deallocate allin", Verb.DEALLOCATE, "allin"),
        ("deallocate é_1$", Verb.DEALLOCATE, "é_1$"),
        ("deallocate all", Verb.DEALLOCATE_ALL, ""),
        ("DEALLOCATE PREPARE ALL ;", Verb.DEALLOCATE_ALL, ""),
        ("discard all", Verb.DEALLOCATE_ALL, ""),
        ("execute s", Verb.EXECUTE, "s"),
        ("execute s(1, 'a(b)', $$c$$)", Verb.EXECUTE, "s"),
        ('EXECUTE "S" (\n1)\n;', Verb.EXECUTE, "S"),
        ("/* tag */ execute /* of */ s -- the end", Verb.EXECUTE, "s"),
        ("-- first\nexecute s", Verb.EXECUTE, "s"),
        (" ;; deallocate s;; ", Verb.DEALLOCATE, "s"),
    ],
)
def test_mention_of_a_prepared_statement_is_found(text, verb, name):
    found = mention(text.encode())
    assert found is not None
    assert (found.verb, found.name) == (verb, name.encode())


@pytest.mark.parametrize(
    "text",
    [
        "",
        ";",
        "select 1",
        "deallocate",
        "deallocate s t",
        "deallocate s(1)",
        "deallocate 1s",
        "deallocates",
        "discard plans",
        "discard all plans",
        "execute",
        "execute s; select 1",
        "execute s(1); select 1",
        "execute a.b",
        'execute "s',
        'execute ""',
        "executes",
        "select 'execute s'",
        "-- execute s",
        "/* execute s */",
        "explain execute s",
        "prepare s as select 1",
        "create table t as execute s",
    ],
)
def test_mention_of_nothing_certain_is_none(text):
    assert mention(text.encode()) is None


@pytest.mark.parametrize("text", ["/* /* */ execute s -- */", "/* /* */ deallocate all -- */"])
def test_mention_within_a_nested_comment_is_none(text):
    assert mention(text.encode()) is None


@given(
    st.sampled_from(
        [("deallocate", Verb.DEALLOCATE), ("DEALLOCATE PREPARE", Verb.DEALLOCATE), ("Execute", Verb.EXECUTE)]
    ),
    st.sampled_from(["s", "S_1", '"S"', '"a""b"']),
    BLANKS,
    SPACES,
    BLANKS,
)
def test_mention_stands_where_it_says(statement, name, before, between, behind):
    words, verb = statement
    text = (before + words + between + name + behind).encode()
    found = mention(text)
    assert found is not None
    assert found.verb is verb
    assert text[found.start : found.end].decode() == name
    assert may_mention(text[0])


@given(st.text(st.sampled_from(list("deallocate execute all s\"(1);'/*-\n")), max_size=40) | st.text(max_size=20))
def test_mention_in_any_text_never_raises(text):
    found = mention(text.encode("utf-8", "surrogatepass"))
    assert found is None or isinstance(found, Mention)


@pytest.mark.parametrize(("text", "may"), [("select", False), ("insert", False), ("(select", False), ("Execute", True)])
def test_first_byte_tells_what_cannot_be_a_mention(text, may):
    assert may_mention(ord(text[0])) is may


@pytest.mark.parametrize(
    "text",
    ["commit", "COMMIT;", " rollback work ; ", "end", "abort -- it", "/* so */ end transaction", ";;commit/**/work"],
)
def test_text_that_ends_a_transaction(text):
    assert ends_transaction(text.encode())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "commitwork",
        "commit and chain",
        "commit; begin",
        "commit prepared 'a'",
        "rollback to savepoint a",
        "rollback to a",
        "select 'commit'",
        "ending",
        "commit work work",
    ],
)
def test_text_that_does_more_or_less_than_end_a_transaction(text):
    assert not ends_transaction(text.encode())
