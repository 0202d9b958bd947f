"""Pipelines and the extended protocol: what a driver may send, in any order and cut anywhere.

Manual: "Extended Query", "Pipelining".
"""

from __future__ import annotations

import psycopg
import pytest

from .client import count, error, login, types
from .messages import (
    INT4,
    INT8,
    TEXT,
    bind,
    close_portal,
    close_statement,
    describe_portal,
    describe_statement,
    execute,
    flush,
    function_call,
    message,
    parse,
    query,
    run,
    sync,
)
from .player import AtOnce, Quiet, until


@pytest.mark.both
def test_pipeline_two_syncs_in_one_write_answers_in_order(same):
    # Two syncs in one write: the server was given away after the first (#52).
    same([[run("select 1"), sync(), run("select 2"), sync()]])


@pytest.mark.both
def test_pipeline_five_syncs_third_fails_fourth_and_fifth_run(same):
    # The error of one group must not swallow the next groups.
    groups = [part for n in (1, 2, 0, 4, 5) for part in (run(f"select 1 / {n}"), sync())]
    same([groups])


def test_pipeline_first_query_fails_rest_of_its_group_is_skipped(same):
    # After an error everything up to the next Sync is skipped, including a Parse that would fail itself.
    same([[run("select 1/0"), run("select 2"), parse("nonsense"), sync(), run("select 3"), sync()]])


def test_pipeline_error_with_and_without_begin_keeps_transaction_state(same):
    same(
        [
            [query("begin")],
            [run("select 1"), sync(), run("select 1/0"), sync(), run("select 2"), sync()],
            [query("rollback")],
        ]
    )


def test_pipeline_messages_between_error_and_ready_are_skipped(same):
    # Parse and Describe that arrive after the error and before its Sync must not let the server go (#759).
    same(
        [
            [run("select 1/0"), flush(), until("E")],
            [parse("select 1", "a"), describe_statement("a"), flush(), Quiet()],
            [sync()],
        ]
    )


def test_describe_after_flush_then_execute_keeps_server(same, relay):
    # Parse, Bind, Describe, Flush without Sync: the portal must still be there a round trip later.
    same([[parse("select 1"), bind(), describe_portal(), flush(), until("T")], [execute(), sync()]])


def test_flush_without_sync_other_client_waits_for_the_server(relay):
    # The server belongs to the client that has not sent Sync; a second client must not get it in between.
    with login(relay.port) as one, login(relay.port) as two:
        one.write(parse("select 1") + bind() + describe_portal() + flush())
        one.until(lambda seen: count(seen, "T") == 1)
        two.write(query("select 2"))
        one.mark()
        assert types(one.ask(execute() + sync())) == "DCZ"
        assert types(two.until(lambda seen: count(seen, "Z") == 1)) == "TDCZ"


def test_parse_describe_flush_then_bind_execute_flush_then_sync_commits_before_ready(same, item, items):
    # ReadyForQuery must follow the real commit: the row is visible elsewhere when it arrives.
    sql = "insert into item values ($1, $2) returning id"
    same(
        [
            [parse(sql, "put", [INT4, TEXT]), describe_statement("put"), flush(), until("T")],
            [bind("1", "one", statement="put"), execute(), flush(), until("C")],
            [sync()],
        ],
        before=item,
        after=items,
    )


def test_ready_for_query_row_visible_to_others_when_it_arrives(relay, item, database):
    with login(relay.port) as client:
        for number in range(50):
            client.ask(run("insert into item values ($1, 'x')", number, oids=[INT4]) + sync())
            assert database.execute("select count(*) from item").fetchone() == (number + 1,)


def test_execute_row_limit_suspends_portal_inside_and_outside_transaction(same):
    # The portal lives until Sync; after it, outside of BEGIN, it is gone: 34000.
    series = "select generate_series(1, 5)"
    limited = [
        parse(series),
        bind(portal="p"),
        execute("p", 2),
        execute("p", 2),
        execute("p", 2),
        execute("p", 2),
        sync(),
    ]
    same([limited, [execute("p", 1), sync()]])
    same(
        [
            [query("begin")],
            limited,
            [parse(series), bind(portal="q"), execute("q", 2), sync()],
            [execute("q"), sync()],
            [query("commit")],
        ]
    )


def test_portal_suspended_then_flush_then_next_rows(same):
    same(
        [
            [parse("select generate_series(1, 5)"), bind(), execute(rows=2), flush(), until("s")],
            [execute(rows=2), flush(), until("s", 1)],
            [execute(), sync()],
        ]
    )


def test_error_without_flush_or_sync_reaches_client_at_once(same):
    # An ErrorResponse must not be held back until Sync.
    same([[parse("nonsense"), until("E")], [sync()]])


def test_function_call_answers_and_counts_ready(same, database):
    # FunctionCall brings its own ReadyForQuery; a miscount keeps the server for ever.
    (oid,) = database.execute("select 'shout'::regproc::oid::int").fetchone()
    same([[function_call(oid, "abc"), function_call(oid, None), query("select 1")]])
    same([[query("begin")], [function_call(oid, "abc")], [function_call(1, "x")], [query("rollback")]])


def test_function_call_between_extended_groups_keeps_order(same, database):
    (oid,) = database.execute("select 'shout'::regproc::oid::int").fetchone()
    same([[run("select 1"), sync(), function_call(oid, "abc"), run("select 2"), sync()]])


def test_simple_queries_without_waiting_all_answered(same):
    # Two simple queries in one write: the server is free only after both ReadyForQuery.
    same([[query("select 1"), query("select 2"), query("select 1/0"), query("select 3")]])


def test_simple_query_several_statements_error_in_the_middle(same):
    same([[query("select 1; select 2; select 1/0; select 3")], [query("begin; select 1; commit; select 2")]])


def test_simple_query_before_sync_of_extended_batch(same):
    # A Query inside an unfinished extended group.
    same([[run("select 1"), query("select 2"), sync()]])


def test_empty_query_answers_as_postgres(same):
    same(
        [[query("")], [query(" ; ")], [parse(""), bind(), describe_portal(), execute(), sync()], [query("-- nothing")]]
    )


def test_sync_alone_and_many_syncs_answer_each(same):
    same([[sync()], [sync(), sync(), sync()], [flush(), sync()]])


def test_flush_alone_is_not_answered(same):
    same([[flush(), Quiet()], [query("select 1")]])


def test_close_portal_with_name_of_a_statement_keeps_the_statement(same):
    # Close of portal "x" must not remove statement "x".
    same([[parse("select 1", "x"), sync()], [close_portal("x"), sync()], [bind(statement="x"), execute(), sync()]])


def test_bind_portal_with_name_of_a_statement_is_another_thing(same):
    same(
        [
            [
                parse("select 1", "x"),
                bind(portal="x", statement="x"),
                close_statement("x"),
                execute("x"),
                close_portal("x"),
                sync(),
            ],
            [bind(statement="x"), sync()],
        ]
    )


def test_close_unknown_names_is_no_error(same):
    same([[close_statement("nowhere"), close_portal("nowhere"), sync()], [query("select 1")]])


def test_execute_unknown_portal_is_34000_and_keeps_connection(same):
    same([[execute("nowhere"), sync()], [describe_portal("nowhere"), sync()], [query("select 1")]])


def test_bind_wrong_number_of_parameters_is_reported_as_postgres_does(same):
    same([[parse("select $1::int", "a"), bind(statement="a"), sync()], [bind("1", "2", statement="a"), sync()]])


def test_bind_bad_value_then_same_statement_works(same):
    same(
        [
            [parse("select $1::int", "a"), sync()],
            [bind("x", statement="a"), execute(), sync()],
            [bind("7", statement="a"), execute(), sync()],
        ]
    )


def test_bind_binary_formats_pass_unchanged(same):
    same(
        [
            [
                parse("select $1::int8, $2::text", oids=[INT8, TEXT]),
                bind(b"\0" * 7 + b"\5", b"Z\0"[:1], formats=[1, 1], results=[1]),
                execute(),
                sync(),
            ]
        ]
    )
    same(
        [
            [
                parse("select $1::int8, $2::text"),
                bind(b"\0" * 7 + b"\5", None, formats=[1, 0], results=[1, 0]),
                describe_portal(),
                execute(),
                sync(),
            ]
        ]
    )


def test_begin_extended_select_rollback_simple_mixed(same):
    # lib/pq: BEGIN simple, SELECT extended, ROLLBACK simple.
    same([[query("begin")], [run("select $1::int", 3), sync()], [query("rollback")]])


def test_begin_twice_and_commit_without_begin_warn_as_postgres(same):
    same([[query("begin")], [query("begin")], [query("commit")], [query("commit")], [query("rollback")]])


def test_begin_by_extended_protocol_holds_the_server_until_commit(same, item, items):
    same(
        [
            [run("begin"), sync()],
            [run("insert into item values (1, 'a')"), sync()],
            [run("commit"), sync()],
            [run("begin"), run("insert into item values (2, 'b')"), run("rollback"), sync()],
        ],
        before=item,
        after=items,
    )


def test_commit_in_the_middle_of_a_pipeline_keeps_order(same, item, items):
    same(
        [
            [
                run("begin"),
                run("insert into item values (1, 'a')"),
                run("commit"),
                run("select count(*) from item"),
                run("begin"),
                sync(),
            ],
            [query("rollback")],
        ],
        before=item,
        after=items,
    )


def test_aborted_transaction_refuses_reads_and_savepoint_restores(same):
    # In an aborted transaction reads answer 25P02, empty queries pass, ROLLBACK TO works.
    same(
        [
            [query("begin"), query("savepoint s"), query("select 1/0")],
            [query("select 1"), query(""), query("rollback to s"), query("select 1"), query("commit")],
        ]
    )


def test_set_with_wrong_value_fails_on_the_set_itself(same):
    # A SET replayed late shows its error on another query.
    same([[run("select 1"), sync()], [query("set lock_timeout to sdfs")], [query("select 1")]])
    same([[run("set timezone to 'Nowhere/Land'"), sync()], [query("show timezone")]])


def test_notice_in_pipeline_keeps_its_place(same):
    same([[run("select noisy()"), sync(), query("select noisy()"), run("select 1"), sync()]])


def test_large_pipeline_of_small_queries_is_answered_completely(same):
    same([[part for n in range(300) for part in (run(f"select {n}"), sync())]], ways=["whole", "at random, seed 1"])


def test_deep_pipeline_behind_one_sync_is_answered_completely(same):
    same(
        [[*(run("select $1::int", n, statement=f"s{n % 7}" if n < 7 else "") for n in range(500)), sync()]],
        ways=["whole", "at random, seed 1"],
    )


def test_pipeline_continues_while_earlier_groups_are_answered(same):
    same(
        [
            [run("select 1"), sync(), AtOnce()],
            [run("select pg_sleep(0.05)"), sync(), AtOnce()],
            [run("select 3"), sync()],
        ]
    )


def test_protocol_violations_in_a_message_body_answered_as_postgres(same):
    # A Describe of neither S nor P, a Bind cut short: 08P01, and the connection lives on after Sync.
    same([[message("D", b"Xname\0"), sync()], [query("select 1")]])
    same([[message("C", b"Xname\0"), sync()], [query("select 1")]])
    same([[message("B", b"\0\0\0\1"), sync()], [query("select 1")]])
    same([[message("E", b"p\0\0"), sync()], [query("select 1")]])


@pytest.mark.parametrize("size", [16379, 16384, 32763, 65531, 65536, 131072, 1_000_000])
def test_message_of_buffer_size_and_around_passes(same, size):
    # Messages that fill a buffer exactly, and one more or less (1.3.1, #98).
    for length in (size - 1, size, size + 1):
        same(
            [[parse("select length($1::text), $1::text"), bind("Z" * length), execute(), sync()]],
            ways=["whole", "at random, seed 1"],
        )


def test_payload_full_of_message_letters_is_not_taken_for_messages(same):
    # Data that looks like ReadyForQuery at the start of a chunk.
    body = b"Z\0\0\0\5I" * 30_000
    same(
        [[parse("select $1::bytea"), bind(body, formats=[1], results=[1]), execute(), sync()]],
        ways=["whole", "at random, seed 1"],
    )


def test_pool_exhausted_inside_pipeline_gives_one_error_and_one_ready(gateway):
    # Waiting too long for a server: one error for the group, then a usable connection without stale answers.
    relay = gateway(query_wait_timeout=1.0)
    with login(relay.port) as holder, login(relay.port) as other:
        holder.ask(query("begin"))
        other.write(run("select 'late'") + run("select 'later'") + sync())
        seen = other.until(lambda seen: count(seen, "E") > 0)
        assert error(seen)["C"] in ("57014", "53300", "57P03"), seen
        holder.ask(query("commit"))
        if not other.closed and error(seen)["S"] != "FATAL":
            other.until(lambda seen: count(seen, "Z") == 1)
            assert other.value("select 'next'") == "next"


def test_client_cursor_psycopg_pipeline_third_fails_connection_usable(relay):
    with relay.connect() as connection, connection.pipeline() as pipeline:
        cursors = [connection.execute("select 1 / %s", (n,)) for n in (1, 2)]
        bad = connection.execute("select 1 / %s", (0,))
        with pytest.raises(psycopg.errors.DivisionByZero):
            bad.fetchall()
        pipeline.sync()
        assert [cursor.fetchone() for cursor in cursors] == [(1,), (0,)]
        assert connection.execute("select 5").fetchone() == (5,)
