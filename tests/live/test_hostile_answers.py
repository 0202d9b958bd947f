"""Answers of servers that break the protocol: what is broken concerns the client that asked, and it alone.

Manual: "Message Flow", "Message Formats", "SASL Authentication".
"""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest

from .client import DEADLINE, count, error, types
from .hostile import (
    ANSWER,
    DONE,
    ERRORS,
    KEY,
    NO_LOGIN,
    NOTICE,
    NOTIFICATION,
    OK,
    READY,
    ROW,
    STATUS,
    STRANGE,
    answering,
    close,
    data_row,
    error_response,
    is_strange,
    notice,
    once,
    row_description,
    settled,
)
from .messages import (
    close_statement,
    copy_data,
    cstring,
    message,
    parse,
    query,
    run,
    sync,
)
from .servers import Visit, authentication, honest, parameter_status

# Answers. What is broken concerns the client that asked, and it alone.


@pytest.mark.parametrize("body", ERRORS)
@pytest.mark.parametrize("request_", [query(STRANGE), run(STRANGE) + sync()], ids=["simple", "extended"])
def test_query_refused_by_a_strange_error_response_gives_it_and_goes_on(bench, body, request_):
    # It says ERROR, or nothing: the server goes on.
    said = message("E", ERRORS[body].replace(b"FATAL", b"ERROR"))
    with bench.playing(answering(said, READY)), bench.login() as client:
        seen = client.ask(request_)
        assert [message(*one) for one in seen] == [said, READY]
        assert client.value("select 'in step'") == "in step"


@pytest.mark.parametrize("body", [name for name, body in ERRORS.items() if b"FATAL" in body])
def test_strange_last_words_of_a_server_are_told_once(bench, body):
    with bench.playing(answering(message("E", ERRORS[body]), then=close)), bench.login() as client:
        seen = client.ask(query(STRANGE))
        assert types(seen) == "EZ", list(map(str, seen))
        assert client.value("select 'kept'") == "kept"


def test_last_words_that_come_in_two_parts_are_told_once(bench):
    more = threading.Event()
    said = message("E", b"SFATAL\0VFATAL\0C57P01\0" + cstring("M" + "x" * 40_000) + b"\0")

    def then(visit: Visit) -> None:
        assert more.wait(DEADLINE)
        visit.send(said[20_000:])

    with bench.playing(answering(said[:20_000], then=then)), bench.login() as client:
        client.mark()
        client.write(query(STRANGE))
        client.flush()
        client.pump(0.1)
        more.set()
        assert types(settled(client)) == "EZ"
        assert client.value("select 'kept'") == "kept"


@pytest.mark.parametrize("before", [b"", row_description(), ROW, ROW + DONE], ids=["first", "T", "TD", "TDC"])
@pytest.mark.parametrize("length", [0, 3, 0xFFFFFFFF])
@pytest.mark.parametrize("kind", "DZ~")
def test_answer_with_a_message_of_impossible_length_ends_in_one_error(bench, before, kind, length):
    # The server stays: it is the gateway that has to end it.
    broken = message(kind, b"abc\0", length)
    with bench.playing(answering(before + broken, then=Visit.wait_closed)), bench.login() as client:
        seen = client.ask(query(STRANGE))
        assert error(seen)["C"] == "08006"
        assert types(seen).endswith("EZ"), list(map(str, seen))
        assert client.value("select 'kept'") == "kept"


@pytest.mark.parametrize("kind", "TDZE~")
def test_answer_with_a_message_of_2_gb_that_does_not_come_ends_with_the_server(bench, kind):
    said = ROW + message(kind, b"abc\0", 0x7FFFFFFF)
    with bench.playing(answering(said, then=close)), bench.login() as client:
        seen = client.ask(query(STRANGE))
        if client.closed:
            assert kind == "D", "only a row is passed on before it is whole"
            assert "E" not in types(seen)
        else:
            assert types(seen)[-2:] == "EZ"
            error(seen)
            assert client.value("select 'kept'") == "kept"


def test_answer_broken_behind_a_whole_one_leaves_the_whole_one(bench):
    # Two queries in one write, their answers in one segment: the first one's has to be told.
    def script(visit: Visit) -> None:
        visit.send(*visit.welcome())
        visit.relay(is_strange)
        visit.receive("Q")
        visit.send(ANSWER + message("T", b"", 0))
        visit.wait_closed()

    with bench.playing(script), bench.login() as client:
        seen = client.ask(query(STRANGE) + query("select 2"), ready=2)
        assert types(seen) == "TDCZEZ", list(map(str, seen))


def test_answer_broken_behind_one_of_ours_leaves_nothing_for_others(bench):
    # The gateway answers the Close itself; that answer must not go to whoever is served next, nor to a server.
    said = message("1") + message("2", b"", 0)
    with bench.playing(answering(said, then=Visit.wait_closed)), bench.login() as client:
        client.ask(parse("select 1", "a") + sync())
        seen = client.ask(close_statement("a") + run(STRANGE) + sync())
        assert error(seen)["C"] == "08006"
        assert types(seen).endswith("EZ"), list(map(str, seen))
        with bench.login() as other:
            assert types(other.ask(query("select 1"))) == "TDCZ"


@pytest.mark.parametrize("behind", [b"", DONE + READY], ids=["and nothing", "and the end"])
def test_answer_with_an_unknown_message_type_does_not_put_the_client_out_of_step(bench, behind):
    # It may be passed on, as by PostgreSQL's own word only the two ends need to know it.
    said = row_description() + message("~", b"what") + behind
    with bench.playing(answering(said, then=Visit.relay if behind else close)), bench.login() as client:
        seen = client.ask(query(STRANGE))
        assert types(seen).replace("~", "") == ("TCZ" if behind else "TEZ"), list(map(str, seen))
        assert client.value("select 'in step'") == "in step"


@pytest.mark.parametrize("status", [b"", b"X", b"\0", b"II"])
def test_ready_for_query_with_an_unknown_status_keeps_the_pool_whole(bench, status):
    with bench.playing(answering(ROW + DONE + message("Z", status))), bench.login() as client:
        assert types(client.ask(query(STRANGE))) in ("TDCZ", "TDCEZ")
        assert client.value("select 'in step'") == "in step"
        client.close()
        assert bench.value("select 'next'") == "next"


def test_ready_for_query_with_an_unknown_status_then_the_client_leaves(bench):
    with bench.playing(answering(ROW + DONE + message("Z", b"X"))):
        with bench.login() as client:
            assert types(client.ask(query(STRANGE))) == "TDCZ"
        assert bench.value("select 'next'") == "next"


def test_ready_for_query_unasked_behind_an_answer_shifts_nothing(bench):
    with bench.playing(answering(ANSWER + READY)), bench.login() as client, bench.login() as other:
        seen = client.ask(query(STRANGE))
        assert types(seen) == "TDCZ", list(map(str, seen))
        for number in range(3):
            assert client.value(f"select {number}") == str(number)
            assert other.value(f"select {-number}") == str(-number)
        assert count(client.messages, "Z") == 5  # and the one of its login


UNASKED = {
    "ReadyForQuery": READY,
    "rows": ROW,
    "an answer": ANSWER,
    "NoticeResponse": NOTICE,
    "NotificationResponse": NOTIFICATION,
    "ParameterStatus": STATUS,
    "ErrorResponse": error_response(S="ERROR", V="ERROR", C="XX000", M="unasked"),
    "ErrorResponse of one NUL": message("E", b"\0"),
    "last words": error_response(S="FATAL", V="FATAL", C="57P01", M="unasked"),
    "unknown type": message("~", b"what"),
    "length of 0": message("N", b"", 0),
    "length of -1": message("N", b"", 0xFFFFFFFF),
    "ParameterStatus without value": message("S", b"name\0"),
    "ParameterStatus without end": message("S", b"name\0value"),
    "ParameterStatus of nothing": message("S"),
    "CopyInResponse": message("G", b"\0\0\0"),
    "BindComplete": message("2"),
    "Authentication": authentication(99),
    "BackendKeyData": KEY,
    "HTTP": NO_LOGIN["HTTP"],
}


@pytest.mark.parametrize("said", UNASKED)
def test_idle_server_that_speaks_unasked_disturbs_nobody(bench, said):
    with bench.playing(answering()), bench.login() as client, bench.login() as other:
        assert client.value("select 1") == "1"
        bench.impostor.visits[-1].send(UNASKED[said])
        for number, one in enumerate((other, client)):
            seen = [message.type for message in one.ask(query(f"select {number}")) if message.type not in "NSA"]
            assert seen == ["T", "D", "C", "Z"], list(map(str, one.messages))
        assert count(client.messages, "Z") == count(other.messages, "Z") + 1


@pytest.mark.parametrize("size", [20, 20_000, 3 << 20])
def test_notice_cut_in_two_while_the_server_idles_does_not_reach_an_answer(bench, size):
    # The first half comes when nobody is there, the second when somebody has asked; a large one may end the server.
    said = notice("x" * size)

    def script(visit: Visit) -> None:
        visit.send(*visit.welcome())
        visit.relay(is_strange)
        visit.send(said[size // 2 :], ANSWER)
        visit.relay()

    with bench.playing(once(script)), bench.login() as client:
        with suppress(OSError):  # the gateway may end it within the large one
            bench.impostor.visits[-1].send(said[: size // 2])
        seen = client.ask(query(STRANGE))
        assert types(seen).replace("N", "") == "TDCZ", list(map(str, seen))
        assert client.value("select 'in step'") == "in step"


@pytest.mark.parametrize("body", [b"", b"\0", b"name\0", b"name\0value", b"name\0value\0more\0"], ids=repr)
def test_parameter_status_that_is_none_within_an_answer_harms_nobody(bench, body):
    said = row_description() + message("S", body) + data_row(b"strange") + DONE + READY
    with bench.playing(answering(said)), bench.login() as client:
        try:
            seen = client.ask(query(STRANGE))
        except ValueError:
            return  # passed on as it is, which the client that is used here does not take
        assert client.closed or types(seen).replace("S", "").endswith(("TDCZ", "EZ")), list(map(str, seen))
        if not client.closed:
            assert client.value("select 'in step'") == "in step"


@pytest.mark.parametrize("size", [20_000, 1_000_000])
def test_parameter_status_that_comes_in_parts_is_told_as_it_is(bench, size):
    # Long enough to be passed on in parts; of what has not come yet nothing must be read.
    more = threading.Event()
    said = parameter_status("strange.parameter", "x" * size)

    def then(visit: Visit) -> None:
        assert more.wait(DEADLINE)
        visit.send(said[17_000:], DONE, READY)
        visit.relay()

    with bench.playing(answering(row_description(), said[:17_000], then=then)), bench.login() as client:
        client.mark()
        client.write(query(STRANGE))
        client.flush()
        client.pump(0.1)
        more.set()
        assert types(settled(client)) == "TSCZ"
        assert client.parameters["strange.parameter"] == "x" * size
        assert client.value("select 'in step'") == "in step"


def test_parameter_status_of_1_mb_from_postgres_itself_harms_nobody(bench):
    # From version 18 on it reports search_path, which has no limit.
    with bench.playing(honest), bench.login() as client:
        seen = client.ask(query("select set_config('search_path', repeat('x', 1000000), false)"))
        assert types(seen).replace("S", "") == "TDCZ", list(map(str, seen))
        assert client.value("select length(current_setting('search_path'))") == "1000000"


STRAY = {
    "ParseComplete": message("1"),
    "BindComplete": message("2"),
    "CloseComplete": message("3"),
    "PortalSuspended": message("s"),
    "NoData": message("n"),
    "ParameterDescription": message("t", b"\0\0"),
    "EmptyQueryResponse": message("I"),
    "FunctionCallResponse": message("V", b"\0\0\0\0"),
    "CommandComplete of nothing": message("C"),
    "DataRow of nothing": message("D"),
    "RowDescription of nothing": message("T"),
    "NotificationResponse of nothing": message("A"),
    "NoticeResponse of nothing": message("N"),
    "BackendKeyData": KEY,
    "AuthenticationOk": OK,
    "CopyOutResponse": message("H", b"\0\0\0"),
    "CopyDone": message("c"),
}


@pytest.mark.parametrize("request_", [query(STRANGE), run(STRANGE) + sync()], ids=["simple", "extended"])
@pytest.mark.parametrize("stray", STRAY)
def test_stray_message_before_an_answer_still_ends_in_ready_for_query(bench, stray, request_):
    # The client must not wait for ever: it gets the rest of the answer, an error, or the end of the connection.
    told = threading.Event()
    answer = ANSWER if request_[:1] == b"Q" else message("1") + message("2") + ANSWER

    def then(visit: Visit) -> None:
        assert told.wait(DEADLINE)
        visit.send(answer)
        visit.relay()

    with bench.playing(answering(STRAY[stray], then=then)), bench.login() as client:
        client.mark()
        client.write(request_)
        client.flush()
        client.until(lambda seen: len(seen) > 0)
        told.set()
        seen = settled(client)
        if not client.closed:
            assert types(seen).count("Z") == 1
            assert client.value("select 'in step'") == "in step"


@pytest.mark.parametrize("said", [b"G\0\0\0\7\0\0\0", b"W\0\0\0\7\0\0\0"], ids=["CopyInResponse", "CopyBothResponse"])
def test_copy_response_to_a_query_that_is_no_copy_frees_the_server_with_the_client(bench, said):
    with bench.playing(answering(said)):
        with bench.login() as client:
            client.mark()
            client.write(query(STRANGE))
            client.until(lambda seen: len(seen) > 0)
            client.write(copy_data("1\n"))
            client.flush()
        bench.heal()
        assert bench.value("select 'next'") == "next"
