"""Prepared statements: one object for each text, and changes that PostgreSQL may fail or skip."""

from __future__ import annotations

import gc
import weakref

from hypothesis import given
from hypothesis import strategies as st

from gateway.wire.prepared import AllClosed, Closed, Evicted, Held, Injected, Named, Names, Statement, Statements

S, T = Statement(b"select 1\0\0\0", b"gateway_t_1"), Statement(b"select 2\0\0\0", b"gateway_t_2")


def test_statement_of_the_same_body_is_shared():
    statements = Statements("t")
    one = statements.of(b"select 1\0\0\0", b"")
    assert statements.of(b"select 1\0\0\0", b"") is one
    other = statements.of(b"select 1\0\0\1\0\0\0\x17", b"")  # another type of its parameter
    assert other is not one
    assert (one.name, other.name) == (b"gateway_t_1", b"gateway_t_2")


def test_statement_that_nobody_holds_is_forgotten_and_its_name_not_used_again():
    statements = Statements("t")
    forgotten = weakref.ref(statements.of(b"select 1\0\0\0", b""))
    gc.collect()
    assert forgotten() is None
    assert statements.of(b"select 1\0\0\0", b"").name == b"gateway_t_2"


def test_named_gives_the_name_to_client_and_server_until_undone():
    names: Names = {}
    held: Held = {T: False}
    change = Named(names, b"a", S, held)
    assert (names, held) == ({b"a": S}, {T: False, S: True})
    change.undo()
    assert (names, held) == ({}, {T: False})


def test_named_for_a_server_that_has_it_leaves_the_server():
    names: Names = {}
    change = Named(names, b"a", S, None)
    change.undo()
    assert names == {}


def test_injected_gives_it_to_the_server_until_undone():
    held: Held = {}
    change = Injected(held, S)
    assert held == {S: True}
    change.undo()
    assert held == {}


def test_evicted_that_was_skipped_is_to_be_prepared_again():
    held: Held = {S: True}
    change = Evicted(held, S)
    assert held == {}
    change.undo()
    assert held == {S: False}


def test_closed_takes_the_name_and_with_deallocate_the_server_s_too():
    names: Names = {b"a": S, b"b": S}
    held: Held = {S: True}
    by_close = Closed(names, b"a")
    assert (names, held) == ({b"b": S}, {S: True})
    by_deallocate = Closed(names, b"b", held)
    assert (names, held) == ({}, {})
    by_deallocate.undo()
    by_close.undo()
    assert (names, held) == ({b"a": S, b"b": S}, {S: True})


def test_all_closed_takes_everything_and_gives_it_back():
    names: Names = {b"a": S}
    held: Held = {S: True, T: False}
    change = AllClosed(names, held)
    assert (names, held) == ({}, {})
    change.undo()
    assert (names, held) == ({b"a": S}, {S: True, T: False})


def test_all_closed_that_fails_keeps_what_was_made_since():
    names: Names = {b"a": S, b"b": S}
    held: Held = {S: False}
    change = AllClosed(names, held)
    Named(names, b"a", T, held)
    held[S] = True
    change.undo()
    assert (names, held) == ({b"a": T, b"b": S}, {T: True, S: True})


STEPS = st.lists(st.tuples(st.sampled_from(["named", "closed", "all", "injected", "evicted"]), st.integers(0, 3)))


@given(STEPS, STEPS)
def test_changes_of_any_kind_undone_newest_first_leave_what_was_there(before, after):
    statements = Statements("t")
    pool = [statements.of(b"select %d\0\0\0" % number, b"") for number in range(4)]
    names: Names = {}
    held: Held = {}

    def change(kind: str, number: int) -> Named | Closed | AllClosed | Injected | Evicted | None:
        name, statement = b"n%d" % (number % 2), pool[number]
        if kind == "named" and name not in names and statement not in held:
            return Named(names, name, statement, held)
        if kind == "closed" and name in names:
            return Closed(names, name, held if number > 1 and held.get(names[name]) else None)
        if kind == "all":
            return AllClosed(names, held)
        if kind == "injected" and statement not in held:
            return Injected(held, statement)
        if kind == "evicted" and statement in held:
            return Evicted(held, statement)
        return None

    for step in before:
        change(*step)
    was = dict(names), set(held)
    for made in reversed([change(*step) for step in after]):
        if made is not None:
            made.undo()
    assert (names, set(held)) == was
