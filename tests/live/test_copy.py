"""COPY in both directions: the one state in which messages stream without requests.

Manual: "COPY Operations".
"""

from __future__ import annotations

from contextlib import suppress

import pytest

from .client import count, error, eventually, login, types
from .messages import (
    bind,
    copy_data,
    copy_done,
    copy_fail,
    describe_portal,
    execute,
    flush,
    parse,
    query,
    run,
    sync,
)
from .player import AtOnce, Quiet, binary_copy, ready, until

COPY_IN = "copy item from stdin"
COPY_OUT = "copy (select generate_series(1, 1000), repeat('x', 100)) to stdout"


@pytest.mark.both
def test_copy_in_rows_arrive_and_connection_goes_on(same, item, items):
    same(
        [
            [query(COPY_IN), until("G")],
            [copy_data("1\tone\n"), copy_data("2\ttw"), copy_data("o\n3\tthree\n"), copy_done(), ready()],
            [query("select count(*) from item")],
        ],
        before=item,
        after=items,
    )


def test_copy_in_all_in_one_write_without_waiting(same, item, items):
    script = [[query(COPY_IN), copy_data("1\tone\n"), copy_done(), query("select 1")]]
    same(script, before=item, after=items)
    same([[query("begin"), *script[0]], [query("commit")]], before=item, after=items)


def test_copy_in_without_rows(same, item):
    same([[query(COPY_IN), until("G")], [copy_done(), ready()]], before=item)


@pytest.mark.both
@pytest.mark.parametrize("begin", [False, True])
def test_copy_in_bad_row_first_then_megabytes_more_is_drained(same, item, items, begin):
    # The server ends COPY at the first row, the client goes on sending: its data must be dropped, and the server
    # released after all (#1470, #57).
    script = [
        [query(COPY_IN), until("G")],
        [copy_data("wrong row\n"), ready()],
        [*(copy_data("5\tfive\n" * 10_000) for _ in range(60)), copy_done(), AtOnce()],
        [query("select 1")],
    ]
    if begin:
        script = [[query("begin")], *script, [query("rollback")]]
    same(script, before=item, after=items, ways=["whole", "at random, seed 1"])


def test_copy_in_error_while_client_still_streams_releases_the_server(relay, item):
    # The client never noticed the error and stays silent for a while: COPY is over, others must get the server.
    with login(relay.port) as one, login(relay.port) as two:
        one.write(query(COPY_IN))
        one.until(lambda seen: count(seen, "G") == 1)
        one.mark()
        one.write(copy_data("x\ty\n"))
        one.until(lambda seen: count(seen, "Z") == 1)
        assert two.value("select 1") == "1"
        one.mark()
        one.write(copy_data("1\tone\n") + copy_done() + query("select 2"))
        assert types(one.until(lambda seen: count(seen, "Z") == 1)) == "TDCZ"


def test_copy_in_failed_by_client_reports_its_reason(same, item, items):
    same(
        [
            [query(COPY_IN), until("G")],
            [copy_data("1\tone\n"), copy_fail("changed my mind"), ready()],
            [query("select 1")],
        ],
        before=item,
        after=items,
    )


def test_copy_in_failed_inside_transaction_keeps_the_transaction(same, item, items):
    # The connection must live on, in an aborted transaction.
    same(
        [
            [query("begin"), query("insert into item values (9, 'nine')"), query("savepoint s")],
            [query(COPY_IN), until("G")],
            [copy_data("1\tone\nbad\n"), copy_done(), ready()],
            [query("select 1"), query("rollback to s"), query("commit")],
        ],
        before=item,
        after=items,
    )


def test_copy_in_flush_and_sync_are_ignored_while_copying(same, item, items):
    same(
        [
            [query(COPY_IN), until("G")],
            [copy_data("1\tone\n"), flush(), sync(), copy_data("2\ttwo\n"), sync(), flush(), Quiet()],
            [copy_done(), ready()],
            [sync()],
        ],
        before=item,
        after=items,
    )


def test_copy_in_query_while_copying_fails_the_copy(same, item, items):
    # Any other message fails the COPY: as PostgreSQL does it, not as we would.
    same([[query(COPY_IN), until("G")], [copy_data("1\tone\n"), query("select 1"), ready()]], before=item, after=items)


def test_copy_data_outside_copy_is_ignored(same):
    # Late CopyData, CopyDone and CopyFail are dropped without an answer.
    same([[copy_data("1\tone\n"), copy_done(), copy_fail("late"), Quiet(), query("select 1"), ready()]])
    same([[run("select 1"), copy_done(), sync(), copy_data("x"), query("select 2")]])
    same([[query("begin")], [copy_data("x"), copy_done(), query("select 1")], [query("rollback")]])


@pytest.mark.both
def test_copy_in_by_extended_protocol_first_sync_is_ignored(same, item, items):
    # Parse, Bind, Execute, Sync, CopyData, CopyDone, Sync: PostgreSQL ignores the first Sync.
    opening = parse(COPY_IN) + bind() + describe_portal() + execute() + sync()
    same(
        [[opening, until("G")], [copy_data("1\tone\n"), copy_done(), sync(), ready()], [query("select 1")]],
        before=item,
        after=items,
    )
    same(
        [[opening, copy_data("1\tone\n"), copy_done(), sync(), ready()], [query("select 1")]], before=item, after=items
    )
    same(
        [[parse(COPY_IN) + bind() + execute() + flush(), until("G")], [copy_data("1\tone\n"), copy_done(), sync()]],
        before=item,
        after=items,
    )


def test_copy_in_by_extended_protocol_error_skips_to_sync(same, item, items):
    opening = parse(COPY_IN) + bind() + execute() + sync()
    same(
        [
            [opening, until("G")],
            [copy_data("bad\n"), until("E")],
            [copy_data("1\tone\n"), copy_done(), sync(), Quiet()],
            [query("select 1"), until("C", 1)],
        ],
        before=item,
        after=items,
    )
    same([[opening, until("G")], [copy_fail("no"), sync(), ready()], [query("select 1")]], before=item, after=items)


def test_copy_in_pipelined_between_queries(same, item, items):
    same(
        [
            [run("select 1"), sync(), AtOnce()],
            [query(COPY_IN), copy_data("1\tone\n"), copy_done(), AtOnce()],
            [run("select count(*) from item"), sync()],
        ],
        before=item,
        after=items,
    )


def test_copy_in_several_statements_of_one_query(same, item, items):
    same(
        [
            [
                query(f"select 1; {COPY_IN}; select 2; {COPY_IN}"),
                copy_data("1\tone\n"),
                copy_done(),
                copy_data("2\ttwo\n"),
                copy_done(),
                ready(),
            ]
        ],
        before=item,
        after=items,
    )


def test_copy_in_binary_unique_violation_while_streaming(same, item, items):
    # The violation comes while the client still streams; its late CopyDone must not hold the server.
    rows = [(n.to_bytes(4, "big"), b"x" * 100) for n in range(1, 5001)]
    data = binary_copy(*rows)
    command = [query("copy item from stdin (format binary)"), until("G")]
    same([command, [copy_data(binary_copy(*rows[:200])), copy_done(), ready()]], before=item, after=items)
    same(
        [
            [query("insert into item values (3, 'three')")],
            command,
            [
                *(copy_data(data[at : at + 8192]) for at in range(0, len(data), 8192)),
                copy_done(),
                ready(),
            ],
            [query("select 1")],
        ],
        before=item,
        after=items,
        ways=["whole", "at random, seed 1"],
    )


def test_copy_in_one_large_copydata_and_many_tiny_ones(same, item, items):
    text = "".join(f"{n}\trow {n}\n" for n in range(20_000))
    same(
        [[query(COPY_IN), until("G")], [copy_data(text), copy_done(), ready()]],
        before=item,
        after=items,
        ways=["whole", "at random, seed 2"],
    )
    tiny = [copy_data(text[at : at + 1]) for at in range(3000)]
    same(
        [[query(COPY_IN), until("G")], [*tiny, copy_data("\n" if text[2999] != "\n" else ""), copy_done(), ready()]],
        before=item,
        after=items,
    )


def test_copy_out_streams_and_connection_goes_on(same):
    same([[query(COPY_OUT)], [query("select 1")]])
    same([[run(COPY_OUT), sync()], [query(f"select 1; {COPY_OUT}; select 2")]])
    same([[query("begin"), query(COPY_OUT), query("copy (select 1/0) to stdout"), query("rollback")]])


def test_copy_out_error_in_the_middle_reaches_client_in_place(same):
    same([[query("copy (select 1 / (3000 - n) from generate_series(1, 5000) n) to stdout")], [query("select 1")]])


def test_copy_in_open_other_client_waits_for_the_server(pool_of_one, item):
    # The server stays linked between CopyInResponse and CopyDone.
    with login(pool_of_one.port) as one, login(pool_of_one.port) as two:
        one.write(query(COPY_IN))
        one.until(lambda seen: count(seen, "G") == 1)
        two.write(query("select count(*) from item"))
        one.mark()
        one.write(copy_data("1\tone\n"))
        one.flush()
        two.flush()
        assert not two.pump(0.1), "another client got the server in the middle of COPY"
        one.write(copy_done())
        assert types(one.until(lambda seen: count(seen, "Z") == 1)) == "CZ"
        seen = two.until(lambda seen: count(seen, "Z") == 1)
        assert [row.values for row in seen if row.type == "D"] == [[b"1"]]


@pytest.mark.parametrize("polite", [True, False], ids=["terminate", "reset"])
def test_client_gone_in_copy_in_rolls_back_and_frees_the_server(relay, item, items, polite):
    client = login(relay.port)
    client.write(query(COPY_IN) + copy_data("1\tone\n" * 100))
    client.until(lambda seen: count(seen, "G") == 1)
    if polite:
        client.close()
    else:
        client.reset()
    with login(relay.port) as other:
        assert other.value("select count(*) from item") == "0"
    assert items() == []


@pytest.mark.both
@pytest.mark.parametrize("polite", [True, False], ids=["terminate", "reset"])
def test_client_gone_in_copy_out_leaves_no_bytes_to_the_next(relay, polite):
    client = login(relay.port, receive_buffer=8192)
    client.write(query("copy (select repeat('x', 1000) from generate_series(1, 50000)) to stdout"))
    client.until(lambda seen: count(seen, "d") > 3)
    if polite:
        client.close()
    else:
        client.reset()
    with login(relay.port) as other:
        assert types(other.ask(query("select 1"))) == "TDCZ"


def test_client_gone_in_copy_ends_the_query_on_the_server(relay, database):
    client = login(relay.port, application_name="gone")
    client.write(query("copy (select repeat('x', 9000), pg_sleep(0.01) from generate_series(1, 100000)) to stdout"))
    client.until(lambda seen: count(seen, "H") == 1)
    client.reset()
    active = "select count(*) from pg_stat_activity where state = 'active' and query like 'copy (%pg_sleep%'"
    eventually(lambda: database.execute(active).fetchone() == (0,), "the end of a query that nobody waits for")


def test_copy_into_table_that_does_not_exist(same):
    same([[query("copy nowhere from stdin"), copy_data("1\n"), copy_done()], [query("select 1")]])


def test_copy_by_psycopg_in_and_out(relay, item):
    with relay.connect() as connection:
        with connection.cursor().copy("copy item from stdin") as copy:
            for number in range(1000):
                copy.write_row((number, f"row {number}"))
        with connection.cursor().copy("copy item to stdout") as copy:
            assert len(list(copy.rows())) == 1000
        with suppress(RuntimeError), connection.cursor().copy("copy item from stdin") as copy:
            copy.write_row((2000, "x"))
            raise RuntimeError("stopped by the test")
        assert connection.execute("select count(*) from item").fetchone() == (1000,)


def test_copy_error_reported_once(relay, item):
    with login(relay.port) as client:
        seen = client.ask(query(COPY_IN) + copy_data("1\twrong\n") + copy_data("2\ttwo\n" * 1000) + copy_done())
        assert error(seen)["C"] == "23514"
        assert client.value("select count(*) from item") == "0"
