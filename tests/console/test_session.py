"""The protocol of a console client, byte for byte as PostgreSQL speaks it."""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import errors
from gateway.console.commands import Statement
from gateway.console.session import Result, Session
from gateway.wire import messages
from tests.console.gateways import split

READY = (messages.READY_FOR_QUERY, b"I")
COLUMN = (messages.ROW_DESCRIPTION, messages.row_description([("version", messages.TEXT)])[5:])
ROW = (messages.DATA_ROW, messages.data_row(["7"])[5:])
SHOWN = (messages.COMMAND_COMPLETE, b"SHOW\0")
RELOADED = (messages.COMMAND_COMPLETE, b"RELOAD\0")
PARSED, BOUND, CLOSED = (messages.PARSE_COMPLETE, b""), (messages.BIND_COMPLETE, b""), (messages.CLOSE_COMPLETE, b"")
NO_DATA, NO_PARAMETERS = (messages.NO_DATA, b""), (messages.PARAMETER_DESCRIPTION, b"\0\0")
EMPTY, SUSPENDED = (messages.EMPTY_QUERY_RESPONSE, b""), (messages.PORTAL_SUSPENDED, b"")
Answer = list[tuple[int, bytes]]


class Talk:
    """A session whose SHOW comes to `rows` rows, and whose RELOAD fails."""

    def __init__(self, rows: int = 1) -> None:
        self.session = Session()
        self.rows = rows
        self.run: list[str] = []

    def say(self, *data: bytes) -> Answer:
        sent = b""
        for piece in data:
            self.session.feed(piece)
            for step in self.session.steps():
                if isinstance(step, Statement):
                    self.run.append(step.text)
                    failed = step.text == "reload"
                    self.session.outcome = errors.CONSOLE_RELOAD() if failed else Result("SHOW", [("7",)] * self.rows)
                else:
                    sent += step
        return split(sent)


def error(kind_: type[errors.GatewayError], detail: str = "", **values: Any) -> tuple[int, bytes]:
    return messages.ERROR_RESPONSE, kind_(detail=detail, **values).encode()[5:]


def extended(text: str, name: str = "", max_rows: int = 0) -> bytes:
    return (
        messages.parse(name, text)
        + messages.describe(messages.STATEMENT, name)
        + messages.bind("", name)
        + messages.describe(messages.PORTAL, "")
        + messages.execute("", max_rows)
    )


def test_query_is_answered_by_its_rows():
    assert Talk().say(messages.query("show version")) == [COLUMN, ROW, SHOWN, READY]


def test_query_that_says_nothing_is_answered_as_empty():
    assert Talk().say(messages.query(" ; ")) == [EMPTY, READY]


def test_query_with_several_commands_has_one_ready():
    assert Talk().say(messages.query("show version; show version")) == [COLUMN, ROW, SHOWN] * 2 + [READY]


def test_query_with_a_command_that_fails_ends_there():
    talk = Talk()
    answer = talk.say(messages.query("show version; reload; show version"))
    assert answer == [COLUMN, ROW, SHOWN, error(errors.CONSOLE_RELOAD), READY]
    assert talk.run == ["show version", "reload"]


def test_query_with_what_is_no_command_runs_nothing():
    talk = Talk()
    answer = talk.say(messages.query("show version; nonsense"))
    assert answer == [error(errors.CONSOLE_COMMAND, command="nonsense"), READY]
    assert talk.run == []


@pytest.mark.parametrize(
    ("body", "kind"), [(b"show version", errors.MESSAGE_STRING), (b"show version\0x", errors.MESSAGE_FORMAT)]
)
def test_query_that_is_malformed_is_an_error_and_the_connection_stays(body, kind):
    talk = Talk()
    assert talk.say(messages.message(messages.QUERY, body)) == [error(kind), READY]
    assert talk.say(messages.query("show version")) == [COLUMN, ROW, SHOWN, READY]


def test_query_in_another_encoding_comes_back_as_it_came():
    answer = Talk().say(messages.query(b"show \xff{0}"))
    assert answer == [error(errors.CONSOLE_COMMAND, command="show \udcff{0}"), READY]


def test_extended_statement_is_described_before_it_runs():
    talk = Talk()
    describes = messages.parse("", "show version") + messages.describe(messages.STATEMENT, "")
    assert talk.say(describes) == [PARSED, NO_PARAMETERS, COLUMN]
    assert talk.run == []


def test_extended_statement_runs_once_for_its_portal():
    talk = Talk()
    answer = talk.say(extended("show version"), messages.Flush, messages.Sync)
    assert answer == [PARSED, NO_PARAMETERS, COLUMN, BOUND, COLUMN, ROW, SHOWN, READY]
    assert talk.run == ["show version"]


def test_extended_statement_that_was_named_runs_again():
    talk = Talk()
    talk.say(messages.parse("s", "show version") + messages.Sync)
    again = messages.bind("p", "s") + messages.execute("p") + messages.Sync
    assert talk.say(again) + talk.say(again) == [BOUND, ROW, SHOWN, READY] * 2


def test_extended_rows_are_limited_and_go_on():
    fetch = messages.execute("", 2)
    answer = Talk(rows=3).say(extended("show version", max_rows=2), fetch, fetch, messages.Sync)
    assert answer[-8:] == [COLUMN, ROW, ROW, SUSPENDED, ROW, SHOWN, SHOWN, READY]


def test_extended_statement_without_rows_has_no_data():
    answer = Talk().say(extended("show help"), messages.Sync)
    assert answer[:5] == [PARSED, NO_PARAMETERS, NO_DATA, BOUND, NO_DATA]


def test_extended_statement_that_says_nothing_is_empty():
    assert Talk().say(extended(""), messages.Sync) == [PARSED, NO_PARAMETERS, NO_DATA, BOUND, NO_DATA, EMPTY, READY]


def test_extended_error_skips_to_sync():
    talk = Talk()
    answer = talk.say(extended("reload"), extended("show version"), messages.query("show version"), messages.Sync)
    assert answer == [PARSED, NO_PARAMETERS, NO_DATA, BOUND, NO_DATA, error(errors.CONSOLE_RELOAD), READY]
    assert talk.say(extended("show version"), messages.Sync)[-2:] == [SHOWN, READY]


BINARY = messages.message(messages.BIND, b"\0\0\0\0\0\0\0\x01\0\x01")
CUT = messages.message(messages.BIND, b"\0\0\0\0\0\0\0\x02\0\0")


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (messages.parse("", "nonsense"), error(errors.CONSOLE_COMMAND, command="nonsense")),
        (messages.parse("", "reload;reload"), error(errors.CONSOLE_COMMAND, command="reload;reload")),
        (messages.parse("s", "reload"), error(errors.STATEMENT_EXISTS, name="s")),
        (messages.message(messages.PARSE, b"\0reload\0"), error(errors.MESSAGE_FORMAT)),
        (messages.message(messages.PARSE, b"\0reload\0\0\x01"), error(errors.MESSAGE_FORMAT)),
        (messages.message(messages.PARSE, b"reload\0"), error(errors.MESSAGE_STRING)),
        (messages.bind("", "", ["1"]), error(errors.CONSOLE_PROTOCOL, detail="There are no parameters.")),
        (BINARY, error(errors.CONSOLE_PROTOCOL, detail="Values are sent as text only.")),
        (CUT, error(errors.MESSAGE_FORMAT)),
        (messages.message(messages.BIND, b"\0\0\0"), error(errors.MESSAGE_FORMAT)),
        (messages.bind("", "x"), error(errors.STATEMENT_MISSING, name="x")),
        (messages.describe(messages.STATEMENT, "x"), error(errors.STATEMENT_MISSING, name="x")),
        (messages.describe(ord("x"), "s"), error(errors.DESCRIBE_KIND, kind=ord("x"))),
        (messages.message(messages.DESCRIBE, b""), error(errors.MESSAGE_STRING)),
        (messages.close(ord("x"), "s"), error(errors.CLOSE_KIND, kind=ord("x"))),
        (messages.message(messages.CLOSE, b"S"), error(errors.MESSAGE_STRING)),
        (messages.execute("x"), error(errors.CONSOLE_VALUE, reason='portal "x" does not exist')),
        (messages.message(messages.EXECUTE, b"\0"), error(errors.MESSAGE_FORMAT)),
    ],
)
def test_extended_request_that_cannot_be_is_one_error(request_, answer):
    talk = Talk()
    talk.say(messages.parse("s", "show version") + messages.parse("", "show version") + messages.Sync)
    assert talk.say(request_, request_, messages.Sync) == [answer, READY]
    assert talk.run == []


def test_extended_statement_without_name_is_gone_after_a_query():
    talk = Talk()
    talk.say(messages.parse("", "show version"), messages.Sync, messages.query("show version"))
    assert talk.say(messages.bind("", ""), messages.Sync) == [error(errors.UNNAMED_STATEMENT_MISSING), READY]


def test_extended_portal_is_gone_after_sync():
    talk = Talk()
    talk.say(messages.parse("", "show version"), messages.bind("p", ""), messages.Sync)
    assert talk.say(messages.execute("p"), messages.Sync)[0][0] == messages.ERROR_RESPONSE


def test_extended_statement_that_was_closed_may_be_parsed_again():
    talk = Talk()
    parse = messages.parse("s", "show version")
    answer = talk.say(parse, messages.close(messages.STATEMENT, "s"), messages.close(messages.PORTAL, "p"), parse)
    assert answer == [PARSED, CLOSED, CLOSED, PARSED]


def test_function_call_is_refused_and_the_connection_stays():
    talk = Talk()
    assert talk.say(messages.message(messages.FUNCTION_CALL, b"")) == [error(errors.CONSOLE_PROTOCOL), READY]
    assert not talk.session.ended


def test_copy_data_is_ignored():
    assert Talk().say(messages.message(messages.COPY_DATA, b"x"), messages.CopyDone, messages.Sync) == [READY]


@pytest.mark.parametrize("before", [b"", messages.parse("", "nonsense")])
def test_terminate_ends_without_a_word(before):
    talk = Talk()
    answer = talk.say(before, messages.Terminate, messages.query("show version"))
    assert [type_ for type_, _ in answer] == ([messages.ERROR_RESPONSE] if before else [])
    assert talk.session.ended


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        (b"Q\0\0\0\x03", error(errors.MESSAGE_LENGTH)),
        (b"Q\xff\xff\xff\xff", error(errors.MESSAGE_LENGTH)),
        (b"Q" + struct.pack("!I", 65537), error(errors.MESSAGE_LENGTH)),
        (b"\0\0\0\0\x04", error(errors.MESSAGE_TYPE, type=0)),
        (b"p", error(errors.MESSAGE_TYPE, type=ord("p"))),
    ],
)
def test_what_is_no_message_ends_the_connection(data, answer):
    talk = Talk()
    assert talk.say(messages.query("show version") + data + messages.Sync)[-1] == answer
    assert talk.session.ended
    assert talk.say(messages.Sync) == []


MESSAGES = b"".join(
    (
        messages.query("show version; show version"),
        extended("show version", "s", 1),
        messages.execute("", 1),
        messages.Sync,
        messages.parse("s", "show version"),
        messages.execute(""),
        messages.Sync,
        messages.query("nonsense"),
        messages.Terminate,
    )
)


@given(st.lists(st.integers(0, len(MESSAGES)), max_size=8).map(sorted))
def test_messages_split_anywhere_are_answered_alike(cuts):
    edges = [0, *cuts, len(MESSAGES)]
    pieces = [MESSAGES[start:end] for start, end in pairwise(edges)]
    assert Talk().say(*pieces) == Talk().say(MESSAGES)


def test_messages_byte_by_byte_are_answered_alike():
    assert Talk().say(*(MESSAGES[at : at + 1] for at in range(len(MESSAGES)))) == Talk().say(MESSAGES)


@given(st.binary(max_size=40), st.sampled_from(b"QPBDECHSdcfF"))
def test_message_with_any_body_leaves_the_connection_usable(body, type_):
    talk = Talk()
    talk.say(messages.message(type_, body), messages.Sync)
    assert talk.say(messages.query("show version")) == [COLUMN, ROW, SHOWN, READY]
