"""The packet that opens a connection: StartupMessage, CancelRequest, SSLRequest or GSSENCRequest.

1. A packet is what PostgreSQL 18 would take it for, or else the error that PostgreSQL would give.
2. User and database are valid UTF-8 and at most 63 bytes long; other values are whatever the client sent, with bytes
   that are not UTF-8 as surrogates.

Called by worker.front, which waits for `packet_length` bytes first and answers SSLRequest and GSSENCRequest itself.
Manual: "Message Flow", "Start-up", and "Protocol Versions"; source: backend_startup.c, postgres.c.
"""

from __future__ import annotations

import enum
import struct
from typing import Final, NamedTuple

from gateway import errors
from gateway.wire import messages

HEADER_SIZE: Final = 4
TLS_HANDSHAKE: Final = 0x16  # the first byte of a ClientHello, when TLS is begun without SSLRequest

_MAX_PACKET_SIZE = 10_000  # MAX_STARTUP_PACKET_LENGTH in pqcomm.h, without the length word
_MAX_NAME_SIZE = 63  # NAMEDATALEN - 1
_MAX_KEY_SIZE = 256
_FIXED = ("in_hot_standby", "integer_datetimes", "is_superuser", "server_encoding", "server_version")
_word = struct.Struct("!i")
_words = struct.Struct("!ii")


class Replication(enum.StrEnum):
    """What kind of walsender is asked for, as the value to pass on; false when none is."""

    NONE = ""
    PHYSICAL = "true"
    LOGICAL = "database"


class StartupMessage(NamedTuple):
    """A session is asked for."""

    protocol: int  # that is spoken from now on: PROTOCOL_3_0 or PROTOCOL_3_2
    user: str
    database: str
    parameters: dict[str, str]  # settings to start with, those in `options` first, names as the client wrote them
    replication: Replication
    negotiation: bytes  # NegotiateProtocolVersion, due before any other message, or nothing
    fault: errors.GatewayError | None = None  # of `options` or a parameter: told after the login, as PostgreSQL does


class CancelRequest(NamedTuple):
    """The query that runs for somebody else is to be stopped."""

    pid: int
    key: bytes


class SSLRequest:
    """TLS is asked for."""

    __slots__ = ()


class GSSENCRequest:
    """Encryption by GSSAPI is asked for."""

    __slots__ = ()


Packet = StartupMessage | CancelRequest | SSLRequest | GSSENCRequest

_SSL = SSLRequest()
_GSSENC = GSSENCRequest()


def packet_length(header: bytes, limit: int = _MAX_PACKET_SIZE) -> int:
    """Return the length of the packet that begins with these four bytes, the four included.

    Raises 08P01 when it is shorter than a version or longer than limit bytes, so that nobody makes us wait for more.
    """
    length = int.from_bytes(header[:HEADER_SIZE], "big")
    if not 2 * HEADER_SIZE <= length <= limit + HEADER_SIZE:
        raise errors.STARTUP_LENGTH
    return length


def parse(packet: bytes, *, ssl_asked: bool = False, gss_asked: bool = False) -> Packet:
    """Say what a whole packet asks for, its length word included.

    Encryption may be asked for once of each kind; the second time it is an unsupported protocol, as in PostgreSQL.
    Raises 08P01, 0A000, 22021, 22023, 28000 and 42601.
    """
    if len(packet) < 2 * HEADER_SIZE:
        raise errors.STARTUP_LENGTH
    code: int = _words.unpack_from(packet)[1]
    if code == messages.CANCEL_REQUEST:
        return _cancel_request(packet)
    if code == messages.SSL_REQUEST and not ssl_asked:
        return _SSL
    if code == messages.GSSENC_REQUEST and not gss_asked:
        return _GSSENC
    if code >> 16 != 3:
        raise errors.PROTOCOL_VERSION(major=code >> 16 & 0xFFFF, minor=code & 0xFFFF)
    return _startup_message(code, packet[2 * HEADER_SIZE :].decode("utf-8", "surrogateescape"))


def _cancel_request(packet: bytes) -> CancelRequest:
    if len(packet) < 3 * HEADER_SIZE:
        raise errors.CANCEL_LENGTH
    key = packet[3 * HEADER_SIZE :]
    if not 0 < len(key) <= _MAX_KEY_SIZE:
        raise errors.CANCEL_KEY_LENGTH
    return CancelRequest(_word.unpack_from(packet, 2 * HEADER_SIZE)[0], key)


def _startup_message(version: int, text: str) -> StartupMessage:
    strings = text.split("\0")
    names, values = strings[:-2:2], strings[1:-2:2]
    if strings[-2:] != ["", ""] or len(strings) % 2 or "" in names:
        raise errors.STARTUP_LAYOUT
    user = database = options = ""
    replication = Replication.NONE
    parameters: dict[str, str] = {}
    unknown = []
    for name, value in zip(names, values, strict=True):
        match name:
            case "user":
                user = _name(name, value)
            case "database":
                database = _name(name, value)
            case "options":
                options = value
            case "replication":
                replication = _replication(value)
            case "application_name":
                parameters[name] = clean(value)
            case _ if name.startswith("_pq_."):
                unknown.append(name)
            case _:
                parameters[name] = value
    if not user:
        raise errors.NO_USER
    fault = None
    if options:
        try:
            parameters = parse_options(options) | parameters
        except errors.GatewayError as error:
            fault = error
    for name in parameters:
        if name.lower() in _FIXED and fault is None:
            fault = errors.PARAMETER_FIXED(name=name.lower())
    # 3.1 was never released: PostgreSQL takes it, and serves it as 3.0.
    newest = min(version, messages.PROTOCOL_3_2)
    return StartupMessage(
        messages.PROTOCOL_3_2 if newest == messages.PROTOCOL_3_2 else messages.PROTOCOL_3_0,
        user,
        database or user,
        parameters,
        replication,
        messages.negotiate_protocol_version(newest, unknown) if unknown or version > newest else b"",
        fault,
    )


def parse_options(text: str) -> dict[str, str]:
    """Parse the settings in the startup parameter `options`: -c name=value, -cname=value, --name=value.

    A backslash keeps the next character as it is (pg_split_opts), a dash in a name is an underscore (ParseLongOption).
    Raises 42601 for anything else, as the other switches of postgres are not for clients.
    """
    parameters = {}
    arguments = iter(_split_options(text))
    for argument in arguments:
        if argument == "-c":
            flag, setting = "-c ", next(arguments, "")
        elif argument.startswith("-c"):
            flag, setting = "-c ", argument[2:]
        elif argument.startswith("--"):
            flag, setting = "--", argument[2:]
        else:
            flag = setting = ""
        if not setting:
            raise errors.OPTION_INVALID(argument=argument)
        name, assigned, value = setting.partition("=")
        if not assigned:
            raise errors.OPTION_WITHOUT_VALUE(argument=flag + setting)
        parameters[name.replace("-", "_")] = value
    if "application_name" in parameters:
        parameters["application_name"] = clean(parameters["application_name"])
    return parameters


def clean(text: str) -> str:
    r"""Return a name of at most 63 bytes, those that are not printable ASCII as \x and two digits (pg_clean_ascii)."""
    data = text.encode("utf-8", "surrogateescape")
    if len(data) > _MAX_NAME_SIZE:  # the value is a name (GUC_IS_NAME): it is cut before it is cleaned
        data = data[:_MAX_NAME_SIZE].decode("utf-8", "ignore").encode()
    elif text.isascii() and text.isprintable():
        return text
    return "".join([chr(byte) if 32 <= byte <= 126 else f"\\x{byte:02x}" for byte in data])


def _split_options(text: str) -> list[str]:
    arguments = []
    argument = None  # None between two arguments, so that an escaped blank may begin one
    characters = iter(text)
    for character in characters:
        if character in " \t\n\v\f\r":
            if argument is not None:
                arguments.append(argument)
            argument = None
        elif character == "\\":
            argument = (argument or "") + next(characters, "")
        else:
            argument = (argument or "") + character
    if argument is not None:
        arguments.append(argument)
    return arguments


def _name(kind: str, value: str) -> str:
    try:
        data = value.encode()
    except UnicodeEncodeError:
        raise errors.STARTUP_ENCODING(name=kind) from None
    # PostgreSQL cuts at the byte and CREATE ROLE at the character: the latter, so that the role is found.
    return value if len(data) <= _MAX_NAME_SIZE else data[:_MAX_NAME_SIZE].decode(errors="ignore")


def _replication(value: str) -> Replication:
    if value == Replication.LOGICAL:
        return Replication.LOGICAL
    # As parse_bool: the beginning of a word is enough, where it tells on from off.
    word = value.lower()
    if word == "1" or (word and ("true".startswith(word) or "yes".startswith(word))) or word == "on":
        return Replication.PHYSICAL
    if word == "0" or (word and ("false".startswith(word) or "no".startswith(word))) or word in ("of", "off"):
        return Replication.NONE
    raise errors.REPLICATION_VALUE(value=value)
