"""Servers that die in the middle of something: one error where one is owed, and never a success that was none.

Manual: "Message Flow", "Message Formats", "SASL Authentication".
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from .client import DEADLINE, count, error, eventually, types
from .hostile import (
    ANSWER,
    DONE,
    NO_LOGIN,
    NOTICE,
    READY,
    ROW,
    STRANGE,
    answering,
    close,
    data_row,
    error_response,
    is_strange,
    once,
    row_description,
    settled,
)
from .messages import (
    Message,
    bind,
    copy_data,
    execute,
    message,
    query,
    run,
    sync,
)
from .servers import Script, Visit, honest

# Servers that die.

ENDS = pytest.mark.parametrize("end", [close, Visit.reset], ids=["fin", "reset"])


def framed(data: bytes) -> tuple[list[Message], bytes]:
    """The whole messages that data begins with, and what is left."""
    seen, at = [], 0
    while at + 5 <= len(data) and at + 1 + (size := int.from_bytes(data[at + 1 : at + 5], "big")) <= len(data):
        seen.append(Message(chr(data[at]), data[at + 5 : at + 1 + size]))
        at += 1 + size
    return seen, data[at:]


@ENDS
@pytest.mark.parametrize("kind", ["simple", "extended", "error"])
def test_server_that_dies_within_an_answer_gives_one_error_wherever_that_is(bench, kind, end):
    rows = row_description() + data_row(b"one") + NOTICE + data_row(b"two") + DONE
    failed = message("E", b"SERROR\0VERROR\0C22012\0Mno\0\0")
    answer = {"simple": rows, "extended": message("1") + message("2") + rows, "error": row_description() + failed}[kind]
    answer += READY
    request_ = run(STRANGE) + sync() if kind == "extended" else query(STRANGE)
    offsets = sorted({0, 5, len(answer) - 1, len(answer), *random.Random(9).sample(range(len(answer)), 8)})
    for offset in offsets:
        whole, rest = framed(answer[:offset])
        with bench.playing(answering(answer[:offset], then=end)), bench.login() as client:
            seen = client.ask(request_)
            where = f"after {offset} bytes: {types(seen)} {client.closed}"
            if offset == len(answer):
                assert seen == whole, where
                assert bench.impostor.visits[-1].ended.wait(DEADLINE)
            elif client.closed:
                # Half of a row is out: the stream is not whole, and an error would be read as part of the row.
                assert rest[:1] == b"D", where
                assert len(rest) >= 5, where
                assert seen == whole, where
            else:
                assert types(seen)[-2:] == "EZ", where
                assert (types(seen).count("E"), types(seen).count("Z")) == (1, 1), where
            if not client.closed:
                assert client.value("select 'kept'") == "kept", where


@ENDS
@pytest.mark.parametrize(
    ("request_", "answered"),
    [
        (query("select 2"), "EZ"),
        (run("select 2") + sync(), "EZ"),
        (run("select 2") + sync() + run("select 3") + sync(), "EZEZ"),
        (query("select 2") + query("select 3"), "EZEZ"),
        (query("rollback"), "EZ"),
    ],
    ids=["simple", "extended", "two groups", "two queries", "rollback"],
)
def test_server_that_dies_while_its_client_idles_in_a_transaction_is_told_with_the_next_request(
    bench, request_, answered, end
):
    # Nothing is told before; what follows the failed request stands in the aborted transaction, unless that ends it.
    die = threading.Event()

    def script(visit: Visit) -> None:
        visit.send(*visit.welcome())
        visit.relay(is_strange)
        visit.send(ROW, DONE, message("Z", b"T"))
        assert die.wait(DEADLINE)
        end(visit)

    with bench.playing(script), bench.login() as client:
        client.ask(query("begin"))
        assert types(client.ask(query(STRANGE))) == "TDCZ"
        die.set()
        assert bench.impostor.visits[-1].ended.wait(DEADLINE)
        assert not client.pump(0.1)
        seen = client.ask(request_, ready=answered.count("Z"))
        assert types(seen) == answered, list(map(str, seen))
        assert [one.fields["C"] for one in seen if one.type == "E"] == ["08006", "25P02"][: answered.count("E")]
        assert {one.body for one in seen if one.type == "Z"} == {b"I" if request_ == query("rollback") else b"E"}
        client.ask(query("rollback"))
        assert client.value("select 'kept'") == "kept"


@ENDS
def test_server_that_dies_between_two_queries_is_not_noticed(bench, end):
    with bench.playing(answering(ANSWER, then=end)), bench.login() as client:
        assert types(client.ask(query(STRANGE))) == "TDCZ"
        assert bench.impostor.visits[-1].ended.wait(DEADLINE)
        assert client.value("select 'unharmed'") == "unharmed"
        assert count(client.messages, "E") == 0


@ENDS
@pytest.mark.parametrize("sent", [6, 1000, 300_000])
def test_server_that_dies_within_a_row_ends_the_connection_without_a_word(bench, sent, end):
    # An error would be read as the rest of the row.
    row = data_row(b"x" * 400_000)
    with bench.playing(answering(row_description() + row[:sent], then=end)), bench.login() as client:
        client.mark()
        client.write(query(STRANGE))
        seen = client.wait_closed()
        assert types(seen) == "T"
        assert client.closed.startswith("closed inside a message after b'D")


@ENDS
@pytest.mark.parametrize("sent", [b"", message("1"), message("1") + message("2"), message("1") + message("2") + ROW])
def test_server_that_dies_within_a_pipeline_fails_each_group_that_is_owed(bench, sent, end):
    # One error and one ReadyForQuery for each Sync: libpq counts them.
    request_ = run(STRANGE) + sync() + run("select 2") + sync() + query("select 3")
    with bench.playing(until_query(sent, end)), bench.login() as client:
        seen = client.ask(request_, ready=3)
        assert types(seen) == types(framed(sent)[0]) + "EZEZEZ", list(map(str, seen))
        assert client.value("select 'kept'") == "kept"


def until_query(sent: bytes, end: Callable[[Visit], object]) -> Script:
    """Be PostgreSQL until STRANGE, read all up to a Query, answer by this and die."""

    def script(visit: Visit) -> None:
        visit.send(*visit.welcome())
        visit.relay(is_strange)
        while visit.receive().type != "Q":
            pass
        visit.send(sent)
        end(visit)

    return script


@ENDS
def test_server_that_dies_before_the_commit_of_a_sync_is_not_told_as_success(bench, item, items, end):
    # CommandComplete has come already, but the transaction of the group ends with its Sync.
    def script(visit: Visit) -> None:
        visit.send(*visit.welcome())
        visit.relay(lambda seen: seen.type == "S")
        end(visit)

    with bench.playing(script), bench.login() as client:
        client.mark()
        client.write(run("insert into item values (1, 'lost')") + message("H"))
        client.until(lambda seen: count(seen, "C") > 0)
        seen = client.ask(sync())
        assert types(seen) == "EZ", list(map(str, seen))
        assert items() == []


@ENDS
def test_server_that_dies_before_a_sync_fails_the_group_once(bench, end):
    def script(visit: Visit) -> None:
        visit.send(*visit.welcome())
        visit.relay(is_strange)
        while visit.receive().type != "H":
            pass
        end(visit)

    with bench.playing(script), bench.login() as client:
        client.mark()
        client.write(run(STRANGE) + message("H"))
        client.until(lambda seen: count(seen, "E") > 0)
        client.write(bind() + execute() + sync())
        assert types(settled(client)) == "EZ"
        assert client.value("select 'kept'") == "kept"


@ENDS
def test_server_that_dies_while_it_takes_a_client_s_parameters_fails_the_query_once(bench, end):
    # The SET goes out in the same write as the query.
    def script(visit: Visit) -> None:
        visit.send(*visit.welcome())
        visit.relay(lambda seen: seen.type == "Q" and b"Tokyo" in seen.body)
        visit.receive("Q")
        end(visit)

    with bench.playing(honest), bench.login() as client, bench.login() as other:
        client.ask(query("set timezone to 'Asia/Tokyo'"))
        bench.heal()
        bench.impostor.script = script
        assert other.value("show timezone") != "Asia/Tokyo"
        assert types(client.ask(query("select 1"))) == "EZ"
        bench.impostor.script = honest
        assert client.value("show timezone") == "Asia/Tokyo"


@ENDS
@pytest.mark.parametrize("sent", [b"", copy_data("1\n"), copy_data("1\n") + copy_data("2\n")[:6]])
def test_server_that_dies_in_copy_out_gives_one_error_where_the_stream_is_whole(bench, sent, end):
    with bench.playing(answering(message("H", b"\0\0\1\0\0"), sent, then=end)), bench.login() as client:
        seen = client.ask(query("copy (select 'strange') to stdout"))
        if client.closed:
            assert len(framed(sent)[1]) > 0
            assert count(seen, "E") == 0
        else:
            assert types(seen) == "H" + types(framed(sent)[0]) + "EZ"
            assert client.value("select 'kept'") == "kept"


@ENDS
def test_server_that_dies_in_copy_in_gives_one_error_and_swallows_the_rest(bench, end):
    with bench.playing(answering(message("G", b"\0\0\1\0\0"), then=end)), bench.login() as client:
        client.mark()
        client.write(query("copy strange from stdin"))
        seen = settled(client)
        assert types(seen) == "GEZ", list(map(str, seen))
        client.write(copy_data("1\n") * 100 + message("c"))
        assert client.value("select 'kept'") == "kept"


@ENDS
def test_server_of_a_session_that_dies_ends_the_session(bench, end):
    with bench.playing(answering(row_description(), then=end)):
        bench.database = "session"
        with bench.login() as client:
            client.mark()
            client.write(query(STRANGE))
            seen = client.wait_closed()
            assert (types(seen), error(seen)["S"]) == ("TE", "FATAL")


# Queries of our own, between two clients.

STRANGE_ANSWERS = {
    "nothing": b"",
    "an error": error_response(S="ERROR", V="ERROR", C="XX000", M="no") + READY,
    "an error of one NUL": message("E", b"\0") + READY,
    "last words": error_response(S="FATAL", V="FATAL", C="57P01", M="no"),
    "a transaction": DONE + message("Z", b"T"),
    "ReadyForQuery without status": DONE + message("Z"),
    "an unknown status": DONE + message("Z", b"X"),
    "ReadyForQuery alone": READY,
    "length of 0": message("Z", b"", 0),
    "length of 2 GB": message("N", b"", 0x7FFFFFFF),
    "ParameterStatus without value": message("S", b"name\0") + DONE + READY,
    "CopyInResponse": message("G", b"\0\0\0"),
    "HTTP": NO_LOGIN["HTTP"],
}


def until_terminate(visit: Visit) -> None:
    """Say nothing until the gateway says that it leaves."""
    while visit.receive().type != "X":
        pass


@pytest.mark.parametrize("said", STRANGE_ANSWERS)
@pytest.mark.parametrize("which", ["connect_query", "server_check_query"])
def test_strange_answer_to_a_query_of_ours_is_not_told_to_clients(bench_with, which, said):
    # The server is of no use then, or still is; clients get their answers from one that is.
    settings: dict[str, Any] = {"server_check_query": STRANGE, "server_check_delay": 0.001}
    if which == "connect_query":
        settings = {"database": {"*": {"dbname": "postgres", "connect_query": STRANGE}}}
    bench = bench_with(server_connect_timeout=0.5, query_wait_timeout=5, **settings)
    script = answering(STRANGE_ANSWERS[said], then=Visit.relay if said != "nothing" else until_terminate)
    earlier = len(bench.impostor.visits)
    with bench.playing(once(script)), bench.login() as client:

        def is_asked() -> bool:
            assert client.value("select 'mine'") == "mine"
            return any(visit.asked for visit in bench.impostor.visits[earlier:])

        eventually(is_asked, "our query to be answered strangely")
        assert client.value("select 'mine'") == "mine"
        assert count(client.messages, "E") == 0
