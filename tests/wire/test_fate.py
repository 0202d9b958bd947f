"""Fate: what is told of requests whose server is gone, for each place at which it may have gone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.wire.fate import Fate, Loss, Outcome, fate
from gateway.wire.messages import (
    FAILED_TRANSACTION,
    IDLE,
    IN_TRANSACTION,
    PORTAL,
    STATEMENT,
    CopyDone,
    Flush,
    Sync,
    bind,
    close,
    describe,
    execute,
    message,
    parse,
    query,
)
from gateway.wire.owed import (
    OWES_BIND,
    OWES_CLOSE,
    OWES_DESCRIBE,
    OWES_EXECUTE,
    OWES_FUNCTION_CALL,
    OWES_PARSE,
    OWES_QUERY,
    OWES_SYNC,
)

I, T, E = IDLE, IN_TRANSACTION, FAILED_TRANSACTION  # noqa: E741  the letters of the protocol
UNKNOWN, LOST, READ = Outcome
KINDS = {
    ord("Q"): OWES_QUERY,
    ord("F"): OWES_FUNCTION_CALL,
    ord("S"): OWES_SYNC,
    ord("P"): OWES_PARSE,
    ord("B"): OWES_BIND,
    ord("D"): OWES_DESCRIBE,
    ord("E"): OWES_EXECUTE,
    ord("C"): OWES_CLOSE,
}
WRITING = "insert into item values (1)"
FUNCTION_CALL = message(ord("F"), b"\0\0\0\1\0\0\0\0\0\0")


def run(text: str, name: str = "") -> bytes:
    """Parse, Bind, Describe and Execute."""
    return parse(name, text) + bind("", name) + describe(PORTAL, "") + execute("")


def owed_of(record: bytes) -> list[int]:
    """Every request of a record."""
    found = []
    while record:
        if record[0] in KINDS:
            found.append(KINDS[record[0]])
        record = record[1 + int.from_bytes(record[1:5], "big") :]
    return found


def lost(record: bytes, status: int = I, *, texts: Mapping[bytes, bytes] | None = None, **more: Any) -> Fate:
    """What becomes of a record of which nothing was answered, unless more is said."""
    known = texts or {}
    loss = Loss(status, owed_of(record), record, False, 0, False, False, False, known.get)
    return fate(loss._replace(**more))


def test_nothing_asked_in_a_transaction_is_lost_with_it():
    assert lost(b"", T) == (LOST, E)
    assert lost(b"", E) == (LOST, E)


REQUESTS = [
    (WRITING, I, (UNKNOWN, I)),
    (WRITING, T, (LOST, E)),
    (WRITING, E, (LOST, E)),
    ("select 1", T, (LOST, E)),
    ("begin", I, (LOST, E)),
    ("commit", T, (UNKNOWN, I)),
    ("end", T, (UNKNOWN, I)),
    ("commit", E, (LOST, I)),
    ("commit", I, (LOST, I)),
    ("rollback", T, (LOST, I)),
    ("commit and chain", T, (UNKNOWN, E)),
    ("rollback and chain", T, (LOST, E)),
    ("prepare transaction 'x'", T, (UNKNOWN, I)),
    ("savepoint a", T, (LOST, E)),
    ("rollback to a; commit", E, (UNKNOWN, E)),
    (f"{WRITING}; commit", T, (UNKNOWN, E)),
    (f"begin; {WRITING}", I, (LOST, E)),
    (f"begin; {WRITING}; commit", I, (UNKNOWN, E)),
    (f"begin; {WRITING}; rollback", I, (LOST, E)),
    (f"rollback; {WRITING}", T, (UNKNOWN, E)),
    ("select 1; select 2", I, (LOST, I)),
    ("select nextval('s')", I, (UNKNOWN, I)),
    ("", I, (LOST, I)),
    ("no such statement", I, (UNKNOWN, E)),
    ("no such statement", T, (UNKNOWN, E)),
    ("call p()", I, (UNKNOWN, I)),
]


@pytest.mark.parametrize(("text", "status", "expected"), REQUESTS)
def test_query_that_was_not_answered(text, status, expected):
    assert lost(query(text), status) == expected


@pytest.mark.parametrize(("text", "status", "expected"), [request for request in REQUESTS if ";" not in request[0]])
def test_extended_group_that_was_not_answered(text, status, expected):
    assert lost(run(text) + Sync, status) == expected


@pytest.mark.parametrize(
    "record",
    [
        query("select 1"),
        run("select count(*) from item") + Sync,
        run("select 1", "s") + Sync,
        parse("", "select $1") + bind("", "", ["1"]) + execute("") + Sync,
        bind("", "known") + execute("") + Sync,
        bind("", "") + describe(PORTAL, "") + execute("", 5) + Sync,
    ],
)
def test_lone_read_may_run_again_and_only_while_nothing_is_told(record):
    texts = {b"known": b"select 1", b"": b"select 2"}
    assert lost(record, texts=texts) == (READ, I)
    assert lost(record, texts=texts, told=True) == (LOST, I)
    assert lost(record, texts=texts, failed=True, told=True) == (LOST, I)
    assert lost(record, T, texts=texts) == (LOST, E)
    assert lost(record, texts=texts, is_fatal=True) == (READ, I)
    assert lost(record + record, texts=texts) == (LOST, I)
    assert lost(record, texts=texts, is_cut=True).outcome is not READ


@pytest.mark.parametrize(
    "record",
    [
        run("select 1"),
        run("select 1") + Flush,
        run("select 1") + run("select 2") + Sync,
        parse("s", "select 1") + describe(STATEMENT, "s") + Sync,
        run("select 1") + close(STATEMENT, "s") + Sync,
        query("select 1") + query("begin"),
        FUNCTION_CALL,
    ],
)
def test_what_is_not_one_read_does_not_run_again(record):
    assert lost(record).outcome is not READ


def test_read_of_which_an_answer_came_that_was_not_passed_on_may_run_again_unless_a_name_was_given():
    owed = [OWES_EXECUTE, OWES_SYNC]
    assert lost(run("select 1") + Sync, owed=owed) == (READ, I)
    assert lost(run("select 1", "s") + Sync, owed=owed) == (LOST, I)


def test_read_of_a_statement_that_nobody_knows_does_not_run_again():
    assert lost(bind("", "gone") + execute("") + Sync) == (UNKNOWN, E)


def test_group_whose_sync_was_not_sent_is_not_committed():
    assert lost(run(WRITING)) == (LOST, I)
    assert lost(run(WRITING) + Flush) == (LOST, I)
    assert lost(run(WRITING) + Sync) == (UNKNOWN, I)


def test_group_that_was_answered_but_for_its_sync_may_have_been_committed():
    assert lost(run(WRITING) + Flush + Sync, owed=[OWES_SYNC], told=True) == (UNKNOWN, I)
    assert lost(run(WRITING) + Flush + Sync, T, owed=[OWES_SYNC], told=True) == (LOST, E)


def test_group_that_has_failed_is_not_committed():
    assert lost(run(WRITING) + Sync, owed=[OWES_SYNC], told=True, failed=True) == (LOST, I)
    assert lost(run("begin") + run("select 1/0") + run(WRITING), owed=[], told=True, failed=True) == (LOST, E)


def test_begin_in_a_group_that_is_open_leaves_the_client_inside():
    assert lost(run("begin") + Flush, owed=[], told=True) == (LOST, E)
    assert lost(run("begin") + run(WRITING) + Sync) == (LOST, E)


def test_pipeline_is_judged_from_its_first_group_that_was_not_answered():
    record = query(WRITING) + query("select 1") + run("select 2") + Sync
    assert lost(record) == (UNKNOWN, I)
    assert lost(record, owed=owed_of(record)[1:], answered=1, told=True) == (LOST, I)
    assert lost(record, owed=[OWES_SYNC], answered=2, told=True) == (LOST, I)


def test_pipeline_of_a_whole_transaction_is_unknown_and_told_as_open():
    groups = [query("begin"), query(WRITING), query("commit")]
    assert lost(b"".join(groups)) == (UNKNOWN, E)
    assert lost(b"".join(groups[:2])) == (UNKNOWN, E), "the BEGIN may have been cancelled"
    assert lost(b"".join(groups[:2]), E) == (LOST, E)
    assert lost(groups[2], T) == (UNKNOWN, I)


def test_write_behind_a_begin_that_may_have_been_skipped_may_have_been_committed():
    # Where the first of the group fails the second is skipped, and the next group is no part of a block.
    assert lost(run("select 1") + run("begin") + Sync + run(WRITING) + Sync) == (UNKNOWN, E)
    assert lost(run("begin") + run("select 1") + Sync + run(WRITING) + Sync) == (UNKNOWN, E)
    assert lost(run("begin") + run(WRITING) + Sync) == (LOST, E)


def test_last_words_say_that_what_ran_was_aborted_and_the_rest_not_begun():
    assert lost(query(WRITING), is_fatal=True) == (LOST, I)
    assert lost(query("commit"), T, is_fatal=True) == (LOST, I)
    assert lost(run(WRITING) + Sync, is_fatal=True) == (LOST, I)
    assert lost(query("select 1") + query(WRITING) + query("commit"), T, is_fatal=True) == (LOST, E)
    assert lost(b"", T, is_fatal=True) == (LOST, E)


def test_last_words_say_nothing_of_a_commit_before_the_statement_that_ran():
    assert lost(query(f"{WRITING}; commit; select pg_sleep(9)"), T, is_fatal=True) == (UNKNOWN, E)
    assert lost(run("commit") + run("select 1") + Sync, T, is_fatal=True) == (UNKNOWN, E)


def test_function_call_outside_of_a_block_may_have_been_committed():
    assert lost(FUNCTION_CALL) == (UNKNOWN, I)
    assert lost(FUNCTION_CALL, T) == (LOST, E)


def test_portal_of_an_earlier_group_is_fetched_from():
    assert lost(execute("cursor", 10) + Sync, T) == (LOST, E)


def test_text_of_a_pipeline_s_own_parse_is_the_one_that_counts():
    texts = {b"s": b"select 1"}
    record = parse("s", WRITING) + bind("", "s") + execute("") + Sync
    assert lost(record, texts=texts) == (UNKNOWN, I)
    assert lost(bind("p", "s") + bind("", "t") + execute("p") + Sync, texts=texts | {b"t": b"commit"}) == (READ, I)


# Records that are not whole.


def cut(record: bytes, size: int, status: int = I, **more: Any) -> Fate:
    return lost(record[:size], status, owed=owed_of(record), is_cut=True, **more)


def test_simple_query_that_was_cut_is_unknown():
    text = f"insert into item values ('{'x' * 9000}')"
    assert cut(query(text), 4096) == (UNKNOWN, I)
    assert cut(query(text), 4096, T) == (UNKNOWN, E)
    assert cut(query(f"begin; {text}"), 4096) == (UNKNOWN, E)
    assert cut(query(f"/* {text} */ begin"), 4096) == (UNKNOWN, E)


def test_parse_that_was_cut_holds_one_statement():
    record = run(f"insert into item values ('{'x' * 9000}')") + Sync
    assert cut(record, 4096) == (UNKNOWN, I)
    assert cut(record, 4096, T) == (LOST, E)
    assert cut(parse("", "commit") + bind("p", "") + record, 4096, T) == (UNKNOWN, E), (
        "which of two portals was executed is not seen"
    )


@pytest.mark.parametrize("size", [60, 61, 100, 4096])
def test_bind_whose_values_were_cut_is_judged_by_its_statement(size):
    record = parse("", WRITING) + bind("", "", ["x" * 9000]) + describe(PORTAL, "") + execute("") + Sync
    assert cut(record, size, T) == (LOST, E)
    assert cut(record, size) == (UNKNOWN, I)


def test_values_of_a_read_that_were_cut_do_not_run_again():
    record = parse("", "select $1") + bind("", "", ["x" * 9000]) + execute("") + Sync
    assert cut(record, 4096) == (LOST, I)


def test_commit_that_may_stand_behind_the_cut_is_unknown():
    record = query(f"insert into item values ('{'x' * 3000}')") * 2 + query("commit")
    assert cut(record, 4096, T) == (UNKNOWN, E)


def test_data_of_a_copy_in_a_block_is_lost_with_it():
    copying = query("copy item from stdin")
    record = copying + message(ord("d"), b"1\n" * 4000)
    assert lost(record, T, told=True) == (LOST, E)
    assert cut(record, 4096, T, told=True) == (LOST, E)
    assert lost(record + CopyDone, told=True) == (UNKNOWN, I)


def test_sync_that_a_copy_swallows_ends_no_group():
    record = parse("", "copy item from stdin") + bind("", "") + execute("") + Sync
    data = message(ord("d"), b"1\n") + CopyDone
    assert lost(record + data, T, owed=[OWES_EXECUTE], told=True) == (LOST, E)
    assert lost(record + data, owed=[OWES_EXECUTE], told=True) == (LOST, I)
    assert lost(record + data + Sync, owed=[OWES_EXECUTE, OWES_SYNC], told=True) == (UNKNOWN, I)


@settings(deadline=None)  # the grammar is loaded when it is used first
@given(st.binary(max_size=200), st.sampled_from([I, T, E]), st.booleans(), st.booleans())
def test_any_bytes_have_a_fate(record, status, is_cut, told):
    found = lost(record, status, owed=[OWES_QUERY], is_cut=is_cut, told=told)
    assert found.status in (I, E)


TEXTS = ("begin", "commit", "rollback", "savepoint a", "rollback to a", "select 1", WRITING, "bad", "")


@settings(deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=4), min_size=1, max_size=4),
    st.sampled_from([I, T, E]),
    st.data(),
)
def test_what_is_lost_was_never_committed_wherever_the_server_died(groups, status, data):
    # A server that follows PostgreSQL's rules, fails where it likes and dies where it likes.
    backend = Blocks(status)
    done = data.draw(st.integers(0, sum(map(len, groups)) + len(groups)))
    for group in groups:
        backend.serve(group, min(done, len(group)), done > len(group), data.draw(st.integers(0, 4)))
        done -= len(group) + 1
        if done < 0:
            break
    record = b"".join(b"".join(map(run, group)) + Sync for group in groups)
    found = lost(record, status)
    if found.outcome is not UNKNOWN:
        assert not backend.committed
    if found.status == I:
        assert status == I or [text for group in groups for text in group if text] in (["commit"], ["rollback"])


class Blocks:
    """The transactions of one server: which of its writes are committed."""

    def __init__(self, status: int) -> None:
        self.in_block, self.aborted = status != I, status == E
        self.wrote = status == T  # what was written before counts
        self.committed = False

    def serve(self, group: list[str], count: int, synced: bool, fails_at: int) -> None:
        """Run *count* statements of a group, of which one may fail, and its Sync."""
        failed = False
        for at, text in enumerate(group[:count]):
            if failed:
                break
            refused = self.aborted and text not in ("commit", "rollback", "rollback to a", "")
            if text == "bad" or refused or (at == fails_at and text not in ("", "rollback")):
                failed = True
                self.aborted = self.in_block
                if not self.in_block:
                    self.wrote = False
                elif text == "commit":
                    self.in_block = self.aborted = self.wrote = False
            else:
                self._run(text)
        if synced and not self.in_block:
            self._commit(not failed)

    def _run(self, text: str) -> None:
        if text == "begin":
            self.in_block = True
        elif text == "commit":
            self._commit(not self.aborted)
            self.in_block = self.aborted = False
        elif text == "rollback":
            self.in_block = self.aborted = self.wrote = False
        elif text == "rollback to a":
            self.aborted = False
        elif text == WRITING:
            self.wrote = True

    def _commit(self, is_good: bool) -> None:
        self.committed = self.committed or (self.wrote and is_good)
        self.wrote = False
