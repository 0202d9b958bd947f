"""Kinds of statement: what a text does to its transaction, and that only what surely changes nothing is a read."""

from __future__ import annotations

import pytest

from gateway.wire.grammar import ANYTHING, Kind, kinds, kinds_of_part

BEGIN, COMMIT, ROLLBACK, SAVEPOINT, READ, WRITE = Kind


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("begin", [BEGIN]),
        ("Start Transaction isolation level serializable", [BEGIN]),
        ("commit", [COMMIT]),
        ("END work;", [COMMIT]),
        ("/* a */ commit -- b", [COMMIT]),
        ("prepare transaction 'x'", [COMMIT]),
        ("commit prepared 'x'", [WRITE]),
        ("commit and chain", [COMMIT, BEGIN]),
        ("rollback and chain", [ROLLBACK, BEGIN]),
        ("abort", [ROLLBACK]),
        ("rollback to a", [SAVEPOINT]),
        ("savepoint a; release a", [SAVEPOINT, SAVEPOINT]),
        ("begin; insert into a values (1); end", [BEGIN, WRITE, COMMIT]),
        ("select case when true then 1 end", [READ]),
        ("select 'commit'", [READ]),
        ("", []),
        (" ; -- nothing", []),
        ("call p()", [WRITE]),
        ("set a to b", [WRITE]),
        ("copy a from stdin", [WRITE]),
        ("do $$ begin end $$", [WRITE]),
    ],
)
def test_kinds_of_a_text(text, found):
    assert list(kinds(text.encode())) == found


@pytest.mark.parametrize(
    "text",
    [
        "select 1",
        "select a, count(*) from t join u using (b) where c = $1 group by a having sum(d) > 0 order by 1 limit 9",
        "with recursive a as (select 1 union all select 2) select * from a",
        "values (1), (2)",
        "table t",
        "(select 1) union (select 2)",
        "select lower(a), pg_catalog.upper(b), extract(year from now()), substring(a from 2), trim(b), current_date",
        "select x at time zone 'utc', a::text, coalesce(b, 'c'), exists (select from t), row_number() over () from t",
        "select 'für'",
    ],
)
def test_select_of_known_functions_is_a_read(text):
    assert kinds(text.encode()) == (READ,)


@pytest.mark.parametrize(
    "text",
    [
        "select nextval('s')",
        "select 1 where 1 in (select setval('s', 1))",
        "select pg_advisory_lock(1)",
        "select set_config('a', 'b', false)",
        "select pg_sleep(1)",
        "select random()",
        "select * from dblink('x', 'delete from t') as (a int)",
        "select my_function()",
        "select my_schema.lower('a')",
        "select a.pg_catalog.lower('a')",
        "select 1 into t",
        "select * from t for update",
        "select * from t for key share",
        "with a as (delete from t returning *) select * from a",
        "with a as (insert into t values (1) returning *) select * from a",
        "with a as (update t set b = 1 returning *) select * from a",
        "explain analyze delete from t",
        "create table a as select 1",
    ],
)
def test_anything_that_may_change_something_is_a_write(text):
    assert kinds(text.encode()) == (WRITE,)


def test_text_in_another_encoding_is_read():
    assert kinds("select 'für'".encode("latin-1")) == (READ,)
    assert kinds("insert into t values ('für'); commit".encode("latin-1")) == (WRITE, COMMIT)


@pytest.mark.parametrize("text", [b"no such statement", b"select (" * 2000, b"\xff\xfe"])
def test_text_that_cannot_be_read_may_do_anything_that_its_first_word_allows(text):
    assert kinds(text) == ((WRITE, COMMIT) if text.startswith(b"select") else ANYTHING)


def test_part_of_a_text_may_go_on_with_what_is_not_seen():
    assert kinds_of_part(b"insert into t values ('") == (WRITE, COMMIT)
    assert kinds_of_part(b"/* why */ insert into t values ('", is_single=True) == (WRITE,)
    assert kinds_of_part(b"insert into t values (1); begin; insert") == ANYTHING
    assert kinds_of_part(b"/* it may begin with anything") == ANYTHING
    assert kinds_of_part(b"call p(") == ANYTHING
