"""Every builder against the manual's layout, every parser against its builder and against garbage."""

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.wire import messages

# What can stand in a zero-terminated string: any bytes but zero, as the str that messages makes of them.
TEXT = st.binary(max_size=40).map(lambda data: data.replace(b"\0", b"").decode("utf-8", "surrogateescape"))
VALUE = st.none() | st.binary(max_size=40).map(lambda data: data.decode("utf-8", "surrogateescape"))
INT4 = st.integers(-(2**31), 2**31 - 1)


def body(message: bytes, kind: int) -> bytes:
    """Check type and length of a message and return the rest."""
    assert message[0] == kind
    assert int.from_bytes(message[1:5], "big") == len(message) - 1
    return message[5:]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (messages.AuthenticationOk, b"R\0\0\0\x08\0\0\0\0"),
        (messages.AuthenticationCleartextPassword, b"R\0\0\0\x08\0\0\0\x03"),
        (messages.authentication_md5_password(b"salt"), b"R\0\0\0\x0c\0\0\0\x05salt"),
        (messages.authentication_sasl(["A", "B"]), b"R\0\0\0\x0d\0\0\0\nA\0B\0\0"),
        (messages.authentication_sasl_continue(b"r=1"), b"R\0\0\0\x0b\0\0\0\x0br=1"),
        (messages.authentication_sasl_final(b"v=1"), b"R\0\0\0\x0b\0\0\0\x0cv=1"),
        (messages.BindComplete, b"2\0\0\0\x04"),
        (messages.CloseComplete, b"3\0\0\0\x04"),
        (messages.CopyDone, b"c\0\0\0\x04"),
        (messages.EmptyQueryResponse, b"I\0\0\0\x04"),
        (messages.Flush, b"H\0\0\0\x04"),
        (messages.NoData, b"n\0\0\0\x04"),
        (messages.ParseComplete, b"1\0\0\0\x04"),
        (messages.PortalSuspended, b"s\0\0\0\x04"),
        (messages.Sync, b"S\0\0\0\x04"),
        (messages.Terminate, b"X\0\0\0\x04"),
        (messages.SSLRequest, b"\0\0\0\x08\x04\xd2\x16\x2f"),
        (messages.GSSENCRequest, b"\0\0\0\x08\x04\xd2\x16\x30"),
        (messages.cancel_request(7, b"key!"), b"\0\0\0\x10\x04\xd2\x16\x2e\0\0\0\x07key!"),
        (messages.startup_message({"user": "u"}), b"\0\0\0\x10\0\x03\0\0user\0u\0\0"),
        (messages.startup_message({}, messages.PROTOCOL_3_2), b"\0\0\0\x09\0\x03\0\x02\0"),
        (messages.password_message("pw"), b"p\0\0\0\x07pw\0"),
        (messages.sasl_initial_response("M", b"n,,"), b"p\0\0\0\x0dM\0\0\0\0\x03n,,"),
        (messages.sasl_response(b"c=1"), b"p\0\0\0\x07c=1"),
        (messages.query("select 1"), b"Q\0\0\0\x0dselect 1\0"),
        (messages.query(b"\xff"), b"Q\0\0\0\x06\xff\0"),
        (messages.parse("s", "q", [23, 0]), b"P\0\0\0\x12s\0q\0\0\x02\0\0\0\x17\0\0\0\0"),
        (messages.bind("", "s", ["1", None]), b"B\0\0\0\x16\0s\0\0\0\0\x02\0\0\0\x011\xff\xff\xff\xff\0\0"),
        (messages.describe(messages.STATEMENT, "s"), b"D\0\0\0\x07Ss\0"),
        (messages.describe(messages.PORTAL, ""), b"D\0\0\0\x06P\0"),
        (messages.close(messages.STATEMENT, b"s"), b"C\0\0\0\x07Ss\0"),
        (messages.execute("p", 5), b"E\0\0\0\x0ap\0\0\0\0\x05"),
        (
            messages.negotiate_protocol_version(messages.PROTOCOL_3_2, ["_pq_.a"]),
            b"v\0\0\0\x13\0\x03\0\x02\0\0\0\x01_pq_.a\0",
        ),
        (messages.backend_key_data(7, b"key!"), b"K\0\0\0\x0c\0\0\0\x07key!"),
        (messages.ready_for_query(messages.IDLE), b"Z\0\0\0\x05I"),
        (messages.ready_for_query(messages.IN_TRANSACTION), b"Z\0\0\0\x05T"),
        (messages.ready_for_query(messages.FAILED_TRANSACTION), b"Z\0\0\0\x05E"),
        (messages.command_complete("SHOW"), b"C\0\0\0\x09SHOW\0"),
        (messages.error_response({"severity": "FATAL", "hint": "h"}), b"E\0\0\0\x0fSFATAL\0Hh\0\0"),
        (messages.notice_response({"message": "m"}), b"N\0\0\0\x08Mm\0\0"),
    ],
)
def test_builder_of_a_message_gives_the_layout_in_the_manual(message, expected):
    assert message == expected


@given(TEXT, TEXT)
def test_parameter_status_of_any_text_is_read_back(name, value):
    assert messages.cstrings(body(messages.parameter_status(name, value), messages.PARAMETER_STATUS)) == [name, value]


@given(st.lists(st.tuples(TEXT, st.sampled_from([messages.TEXT, messages.INT4, messages.INT8, messages.NUMERIC]))))
def test_row_description_of_any_columns_is_read_back(columns):
    assert messages.row_columns(body(messages.row_description(columns), messages.ROW_DESCRIPTION)) == columns


def test_row_description_of_integers_tells_their_size():
    described = body(messages.row_description([("n", messages.INT8)]), messages.ROW_DESCRIPTION)
    assert described == b"\0\x01n\0" + struct.pack("!ihihih", 0, 0, 20, 8, -1, 0)


@given(st.lists(VALUE))
def test_data_row_of_any_values_is_read_back(values):
    assert messages.row_values(body(messages.data_row(values), messages.DATA_ROW)) == values


@given(st.dictionaries(st.sampled_from(["severity", "sqlstate", "message", "detail", "hint", "position", "x"]), TEXT))
def test_error_response_of_any_fields_is_read_back(fields):
    read = messages.error_fields(body(messages.error_response(fields), messages.ERROR_RESPONSE))
    assert read == {"severity": "ERROR", "sqlstate": "XX000", "message": "", **fields}


def test_error_fields_without_sqlstate_have_one():
    # A server's error without a code ended another pooler's process (CVE-2026-6666).
    fields = messages.error_fields(b"SFATAL\0Mgone\0\0")
    assert fields == {"severity": "FATAL", "sqlstate": "XX000", "message": "gone"}


@given(st.binary(max_size=200))
def test_error_fields_of_garbage_are_complete(garbage):
    assert messages.error_fields(garbage).keys() >= {"severity", "sqlstate", "message"}


@pytest.mark.parametrize("parser", [messages.cstrings, messages.row_columns, messages.row_values])
@given(garbage=st.binary(max_size=200))
def test_parser_of_garbage_raises_value_error_or_nothing(parser, garbage):
    with contextlib.suppress(ValueError):
        parser(garbage)


@pytest.mark.parametrize(
    ("parser", "message"),
    [
        (messages.cstrings, messages.parameter_status("TimeZone", "UTC")),
        (messages.row_columns, messages.row_description([("one", messages.TEXT), ("two", messages.INT4)])),
        (messages.row_values, messages.data_row(["one", None, "three"])),
    ],
)
def test_parser_of_a_message_cut_anywhere_reads_no_more_than_is_there(parser, message):
    whole = parser(message[5:])
    for end in range(5, len(message)):
        with contextlib.suppress(ValueError):
            cut = parser(message[5:end])
            assert parser is messages.cstrings  # which alone may end early and yet be well formed
            assert cut == whole[: len(cut)]
