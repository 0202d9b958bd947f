"""The opening packets: what PostgreSQL 18 takes, and its errors for the rest."""

import contextlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway import errors
from gateway.wire import messages, startup
from gateway.wire.startup import CancelRequest, GSSENCRequest, Replication, SSLRequest, StartupMessage

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


def packet(code: int, body: bytes) -> bytes:
    return (len(body) + 8).to_bytes(4, "big") + code.to_bytes(4, "big") + body


def session(version: int = messages.PROTOCOL_3_0, /, **parameters: str) -> StartupMessage:
    """Parse a StartupMessage of user app with these parameters."""
    parsed = startup.parse(messages.startup_message({"user": "app", **parameters}, version))
    assert isinstance(parsed, StartupMessage)
    return parsed


def protocol(minor: int) -> int:
    return messages.PROTOCOL_3_0 + minor


def test_startup_message_is_taken_apart():
    parsed = session(database="main", client_encoding="UTF8", application_name="psql")
    assert parsed == StartupMessage(
        protocol=messages.PROTOCOL_3_0,
        user="app",
        database="main",
        parameters={"client_encoding": "UTF8", "application_name": "psql"},
        replication=Replication.NONE,
        negotiation=b"",
    )


@pytest.mark.parametrize("named", [{}, {"database": ""}])
def test_startup_message_without_database_means_that_of_the_user(named):
    assert session(**named).database == "app"


@pytest.mark.parametrize(
    ("minor", "spoken", "negotiated"), [(0, 0, False), (1, 0, False), (2, 2, False), (3, 2, True), (9999, 2, True)]
)
def test_startup_message_of_a_minor_version_is_served_as_postgresql_does(minor, spoken, negotiated):
    parsed = session(protocol(minor))
    assert parsed.protocol == protocol(spoken)
    assert parsed.negotiation == (messages.negotiate_protocol_version(protocol(2), []) if negotiated else b"")


def test_startup_message_with_protocol_options_is_told_that_they_are_unknown():
    parsed = session(**{"_pq_.a": "1", "_pq_.b": "2", "geqo": "off"})
    assert parsed.negotiation == messages.negotiate_protocol_version(protocol(0), ["_pq_.a", "_pq_.b"])
    assert parsed.parameters == {"geqo": "off"}


@pytest.mark.parametrize(
    ("code", "version"), [(2 << 16, "2.0"), (4 << 16, "4.0"), (0, "0.0"), (0xFFFFFFFF, "65535.65535")]
)
def test_startup_message_of_another_major_version_is_refused(code, version):
    with pytest.raises(errors.PROTOCOL_VERSION, match=f"unsupported frontend protocol {version}: server supports 3.0"):
        startup.parse(packet(code, b"user\0app\0\0"))


@pytest.mark.parametrize(
    "body", [b"", b"\0\0", b"user\0app\0", b"user\0app", b"user\0\0", b"user\0app\0\0\0", b"user\0app\0\0x\0"]
)
def test_startup_message_without_terminator_as_last_byte_is_refused(body):
    with pytest.raises(errors.STARTUP_LAYOUT):
        startup.parse(packet(messages.PROTOCOL_3_0, body))


@pytest.mark.parametrize("body", [b"\0", b"database\0main\0\0", b"user\0\0\0"])
def test_startup_message_without_user_is_refused(body):
    with pytest.raises(errors.NO_USER):
        startup.parse(packet(messages.PROTOCOL_3_0, body))


def test_startup_message_with_long_names_cuts_them_between_characters():
    parsed = session(user="u" * 200, database="d" * 62 + "é")
    assert parsed.user == "u" * 63
    assert parsed.database == "d" * 62


@pytest.mark.parametrize("name", ["user", "database"])
def test_startup_message_with_a_name_that_is_not_utf_8_is_refused(name):
    # Such a name could not be asked for in any other process, and would end this one where it is encoded.
    with pytest.raises(errors.STARTUP_ENCODING, match=f"{name} name in startup packet is not valid UTF-8"):
        session(**{name: "\udcff"})


def test_startup_message_with_other_values_in_any_encoding_keeps_their_bytes():
    assert session(search_path="\udce9t\udce9").parameters["search_path"] == "\udce9t\udce9"


@pytest.mark.parametrize(
    ("value", "cleaned"), [("psql", "psql"), ("", ""), ("a b~", "a b~"), ("é\n\x7f\udcff", r"\xc3\xa9\x0a\x7f\xff")]
)
def test_application_name_is_cleaned_to_printable_ascii(value, cleaned):
    assert session(application_name=value).parameters["application_name"] == cleaned
    assert startup.clean(value) == cleaned


@pytest.mark.parametrize(
    ("value", "replication"),
    [
        ("true", Replication.PHYSICAL),
        ("t", Replication.PHYSICAL),
        ("ON", Replication.PHYSICAL),
        ("ye", Replication.PHYSICAL),
        ("1", Replication.PHYSICAL),
        ("database", Replication.LOGICAL),
        ("false", Replication.NONE),
        ("of", Replication.NONE),
        ("n", Replication.NONE),
        ("0", Replication.NONE),
    ],
)
def test_replication_value_is_read_as_a_boolean_or_database(value, replication):
    assert session(replication=value).replication is replication


@pytest.mark.parametrize("value", ["", "o", "maybe", "2", "Database", "trues"])
def test_replication_value_of_another_kind_is_refused(value):
    with pytest.raises(errors.REPLICATION_VALUE, match=f'invalid value for parameter "replication": "{value}"'):
        session(replication=value)


@pytest.mark.parametrize(
    ("text", "parameters"),
    [
        ("", {}),
        ("  \t\n ", {}),
        ("-c work_mem=1MB", {"work_mem": "1MB"}),
        ("-cwork_mem=1MB  --enable-seqscan=off", {"work_mem": "1MB", "enable_seqscan": "off"}),
        (r"-c a=b -c c=d\ e", {"a": "b", "c": "d e"}),
        (r"-c a=\\\b\ ", {"a": "\\b "}),
        ("-c a=1 -c a=2", {"a": "2"}),
        ("-c a=", {"a": ""}),
        ("-c a=b=c", {"a": "b=c"}),
        ("--application-name=é", {"application_name": r"\xc3\xa9"}),
        ("-c a=1\\", {"a": "1"}),
    ],
)
def test_options_are_split_and_read_as_postgresql_does(text, parameters):
    assert startup.parse_options(text) == parameters


@pytest.mark.parametrize("text", ["-c", "-c a=1 -c", "--", "-x", "-", "a=1", "-S 100", r"\ -c a=1", "-fi"])
def test_options_of_another_kind_are_refused(text):
    with pytest.raises(errors.OPTION_INVALID, match="invalid command-line argument for server process: "):
        startup.parse_options(text)


@pytest.mark.parametrize(("text", "named"), [("-c a", "-c a"), ("-ca", "-c a"), ("--a", "--a")])
def test_options_without_value_are_refused(text, named):
    with pytest.raises(errors.OPTION_WITHOUT_VALUE, match=f"^{named} requires a value$"):
        startup.parse_options(text)


def test_options_give_way_to_parameters_of_their_own():
    assert session(geqo="on", options="-c geqo=off -c a.b=1").parameters == {"geqo": "on", "a.b": "1"}


def test_cancel_request_is_taken_apart():
    assert startup.parse(messages.cancel_request(7, b"k" * 32)) == CancelRequest(7, b"k" * 32)
    assert startup.parse(messages.cancel_request(-1, b"k" * 256)) == CancelRequest(-1, b"k" * 256)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", errors.CANCEL_LENGTH),
        (b"\0\0\0", errors.CANCEL_LENGTH),
        (b"\0\0\0\x07", errors.CANCEL_KEY_LENGTH),
        (b"\0\0\0\x07" + b"k" * 257, errors.CANCEL_KEY_LENGTH),
    ],
)
def test_cancel_request_with_a_key_of_no_possible_length_is_refused(body, error):
    with pytest.raises(error):
        startup.parse(packet(messages.CANCEL_REQUEST, body))


def test_encryption_is_asked_for_once_of_each_kind():
    assert isinstance(startup.parse(messages.SSLRequest), SSLRequest)
    assert isinstance(startup.parse(messages.SSLRequest, gss_asked=True), SSLRequest)
    assert isinstance(startup.parse(messages.GSSENCRequest), GSSENCRequest)
    assert isinstance(startup.parse(messages.GSSENCRequest, ssl_asked=True), GSSENCRequest)
    with pytest.raises(errors.PROTOCOL_VERSION, match=r"unsupported frontend protocol 1234\.5679"):
        startup.parse(messages.SSLRequest, ssl_asked=True)
    with pytest.raises(errors.PROTOCOL_VERSION, match=r"unsupported frontend protocol 1234\.5680"):
        startup.parse(messages.GSSENCRequest, gss_asked=True)


@pytest.mark.parametrize("length", [8, 9, 10_004])
def test_packet_length_within_bounds_is_returned(length):
    assert startup.packet_length(length.to_bytes(4, "big") + b"more") == length


@pytest.mark.parametrize("length", [0, 3, 4, 7, 10_005, 20_000_000, 0x7FFFFFFF, 0xFFFFFFFF])
def test_packet_length_out_of_bounds_is_refused(length):
    with pytest.raises(errors.STARTUP_LENGTH):
        startup.packet_length(length.to_bytes(4, "big"))


SPECIAL = {"user", "database", "options", "replication", "application_name"}


@given(st.dictionaries(TEXT.filter(lambda name: name not in {"", *SPECIAL} and not name.startswith("_pq_.")), TEXT))
def test_startup_message_of_any_parameters_is_read_back(parameters):
    assert session(**parameters).parameters == parameters


@given(
    st.sampled_from([messages.PROTOCOL_3_0, messages.PROTOCOL_3_2, messages.CANCEL_REQUEST, messages.SSL_REQUEST, 0]),
    st.one_of(
        st.binary(max_size=300),
        st.lists(st.sampled_from([b"user", b"options", b"replication", b"-c", b"a", b"\0", b"\0\0", b"\xff"])).map(
            b"".join
        ),
    ),
)
@example(messages.PROTOCOL_3_0, b"")
def test_packet_of_garbage_raises_nothing_but_gateway_error(code, body):
    with contextlib.suppress(errors.GatewayError):
        startup.parse(packet(code, body))


@given(st.binary(max_size=12))
def test_packet_cut_short_raises_nothing_but_gateway_error(data):
    with contextlib.suppress(errors.GatewayError):
        startup.parse(data)
