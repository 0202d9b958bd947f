"""Startup and negotiation: versions, parameters, requests for encryption, and what is refused.

Manual: "Start-up", "SSL Session Encryption", "StartupMessage".
"""

from __future__ import annotations

import struct

import pytest

from . import messages
from .client import Client, count, error, login, types, value
from .messages import WHO, gssenc_request, packet, query, ssl_request, startup
from .player import ready


def opened(port: int, data: bytes) -> Client:
    """A client that has sent `data` and was answered until ReadyForQuery or the end."""
    client = Client(port)
    client.write(data)
    client.until(lambda seen: count(seen, "Z") > 0)
    return client


@pytest.mark.both
def test_login_reports_the_parameters_that_postgres_reports(postgres, relay):
    with login(postgres.port) as direct, login(relay.port) as through:
        assert through.parameters == direct.parameters
        assert types(through.messages).replace("S", "") == "RKZ"


@pytest.mark.parametrize(
    "parameters",
    [
        {"TimeZone": "Asia/Kathmandu", "DateStyle": "German, DMY"},
        {"client_encoding": "latin1", "IntervalStyle": "iso_8601"},
        {"application_name": ""},
        {"application_name": 'it\'s "quoted" \\ and ünïcode'},
        {"application_name": "x" * 200},
        {"search_path": 'a, "B c", pg_catalog'},
        {"extra_float_digits": "0", "statement_timeout": "5s"},
        {"options": "-c statement_timeout=7s -c search_path=a,b"},
        {"options": r"-c application_name=a\ b\\c --work-mem=5MB --lock_timeout=3s"},
        {"options": "-c geqo=off"},
        {"options": ""},
        {"default_transaction_read_only": "on"},
    ],
    ids=str,
)
def test_startup_parameters_hold_as_on_postgres(same, postgres, relay, parameters):
    # options with -c, --name and escapes (#1064, #908), an empty application_name (#999).
    names = "TimeZone DateStyle client_encoding IntervalStyle application_name search_path extra_float_digits"
    names += " statement_timeout work_mem lock_timeout geqo default_transaction_read_only"
    same([[query("begin"), query("commit")], [query(f"show {name}") for name in names.split()]], **parameters)
    with login(postgres.port, **parameters) as direct, login(relay.port, **parameters) as through:
        assert through.parameters == direct.parameters


def test_startup_parameters_of_one_client_do_not_reach_another(relay):
    with login(relay.port, TimeZone="Asia/Kathmandu", statement_timeout="7s") as one, login(relay.port) as two:
        for _ in range(3):
            assert (one.value("show timezone"), one.value("show statement_timeout")) == ("Asia/Kathmandu", "7s")
            assert two.value("show timezone") != "Asia/Kathmandu"
            assert two.value("show statement_timeout") == "0"


def test_user_without_database_gets_the_database_of_its_name(same_opening):
    same_opening(startup(user="postgres"))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(startup(database="postgres"), id="no user"),
        pytest.param(startup(user="", database="postgres"), id="empty user"),
        pytest.param(packet(struct.pack("!HH", 3, 0) + b"user\0postgres\0"), id="no terminator"),
        pytest.param(packet(struct.pack("!HH", 3, 0)), id="nothing but the version"),
        pytest.param(
            packet(struct.pack("!HH", 3, 0) + b"user\0postgres\0\0trailing"), id="bytes behind the terminator"
        ),
        pytest.param(startup(user="postgres", database="nowhere"), id="unknown database"),
        pytest.param(startup(user="p" * 70, database="postgres"), id="user longer than a name"),
        pytest.param(startup(**WHO, TimeZone="Nowhere/Land"), id="bad value"),
        pytest.param(startup(**WHO, no_such_setting="1"), id="unknown parameter"),
        pytest.param(startup(**WHO, options="-c no_such_setting=1"), id="unknown parameter in options"),
        pytest.param(startup(**WHO, options="-c"), id="options cut short"),
        pytest.param(startup(**WHO, replication="perhaps"), id="replication of no sense"),
    ],
)
def test_refused_startup_answers_as_postgres(same_opening, relay, data):
    # One ErrorResponse with PostgreSQL's SQLSTATE; its words may be the gateway's where users are not the server's.
    same_opening(data, ignore="FLRMDH")
    assert value(relay.port, "select 1") == "1"


@pytest.mark.parametrize("version", [(4, 0), (1234, 1)])
def test_unknown_major_version_is_refused_with_0a000(relay, version):
    with opened(relay.port, startup(version, **WHO)) as client:
        fields = error(client.messages)
        assert (fields["C"], fields["S"]) == ("0A000", "FATAL")
        assert fields["M"].startswith(f"unsupported frontend protocol {version[0]}.{version[1]}: server supports ")


@pytest.mark.parametrize("version", [(2, 0), (1, 0)])
def test_version_before_3_is_refused(relay, version):
    # PostgreSQL answers in that version's own form, which nobody understands any more.
    with opened(relay.port, startup(version, **WHO)) as client:
        assert client.closed
        assert not count(client.messages, "Z")


@pytest.mark.both
def test_version_3_2_is_spoken_with_a_long_key(relay, postgres):
    with opened(relay.port, startup((3, 2), **WHO)) as client:
        assert count(client.messages, "v") == 0
        assert len(client.key) == 32
        assert client.value("select 1") == "1"


@pytest.mark.parametrize(("version", "answer"), [((3, 3), (3, 2)), ((3, 9999), (3, 2)), ((3, 0), None), ((3, 2), None)])
@pytest.mark.parametrize("options", [[], ["_pq_.test_protocol_negotiation"], ["_pq_.one", "_pq_.two"]], ids=len)
def test_version_negotiation_is_answered_once(relay, version, answer, options):
    # NegotiateProtocolVersion came twice when the login had to wait for a server (#1459).
    with opened(relay.port, startup(version, **WHO, **dict.fromkeys(options, "x"))) as client:
        negotiation = [seen for seen in client.messages if seen.type == "v"]
        assert len(negotiation) == (1 if answer or options else 0)
        for seen in negotiation:
            major, minor, unknown = struct.unpack_from("!HHI", seen.body)
            assert (major, minor) == (answer or version)
            assert seen.body[8:].split(b"\0")[:-1] == [name.encode() for name in options]
            assert unknown == len(options)
        assert client.value("select 1") == "1"


def test_version_negotiation_while_waiting_for_a_server_is_answered_once(gateway):
    # A fresh gateway has no server yet: the login waits for one.
    relay = gateway()
    clients = [Client(relay.port) for _ in range(5)]
    for client in clients:
        client.write(startup((3, 9999), **WHO, **{"_pq_.grease": "1"}))
        client.flush()
    for client in clients:
        with client:
            assert count(client.until(lambda seen: count(seen, "Z") > 0), "v") == 1


def test_version_3_1_that_never_was_is_served(relay):
    with opened(relay.port, startup((3, 1), **WHO)) as client:
        assert count(client.messages, "v") <= 1
        assert client.value("select 1") == "1"


ENCRYPTION = {"ssl": [ssl_request()], "gss": [gssenc_request()], "gss, ssl": [gssenc_request(), ssl_request()]}


@pytest.mark.parametrize("requests", ENCRYPTION.values(), ids=ENCRYPTION)
def test_encryption_requests_are_declined_and_plain_startup_follows(relay, requests):
    with Client(relay.port) as client:
        for request in requests:
            client.single_bytes = 1
            client.mark()
            client.write(request)
            assert types(client.until(lambda seen: count(seen, "N") == 1)) == "N"
        client.write(startup(**WHO))
        client.until(lambda seen: count(seen, "Z") > 0)
        assert client.value("select 1") == "1"


@pytest.mark.parametrize("request_", [ssl_request(), gssenc_request()], ids=["ssl", "gss"])
def test_encryption_request_repeated_is_an_unknown_version(relay, request_):
    with Client(relay.port) as client:
        client.single_bytes = 1
        client.write(request_)
        client.until(lambda seen: count(seen, "N") > 0)
        client.mark()
        client.write(request_)
        assert error(client.wait_closed())["C"] == "0A000"


@pytest.mark.parametrize("requests", ENCRYPTION.values(), ids=ENCRYPTION)
def test_startup_in_the_write_of_an_encryption_request_is_answered_or_refused(relay, requests):
    # Bytes that came before the answer may be an attacker's (CVE-2021-3935). Newer PostgreSQL refuses them.
    with Client(relay.port) as client:
        client.single_bytes = 1
        client.write(b"".join(requests) + startup(**WHO))
        seen = client.until(lambda seen: count(seen, "Z") > 0)
        assert count(seen, "Z") == 1 or error(seen)["C"] in ("08P01", "0A000") or types(seen) == "NN"


def test_first_query_in_the_write_of_the_startup_message(same_opening, relay):
    # The client knows that it needs no password sends all at once.
    with Client(relay.port) as client:
        client.write(startup(**WHO) + query("select 'early'") + query("select 'second'"))
        seen = client.until(lambda seen: count(seen, "Z") >= 3)
        assert [row.values for row in seen if row.type == "D"] == [[b"early"], [b"second"]]


def test_startup_in_single_bytes_by_many_clients_at_once(relay):
    data = startup(**WHO, application_name="slow")
    clients = [Client(relay.port) for _ in range(20)]
    for at in range(len(data)):
        for client in clients:
            client.write(data[at : at + 1])
            client.flush()
    for client in clients:
        with client:
            assert count(client.until(lambda seen: count(seen, "Z") > 0), "Z") == 1


def test_terminate_instead_of_anything_else_closes(relay):
    for data in (b"", messages.terminate(), ssl_request()):
        client = Client(relay.port)
        client.write(data)
        client.flush()
        client.socket.close()
    assert value(relay.port, "select 1") == "1"


def test_ready_after_login_then_nothing_then_terminate_is_clean(same):
    same([[messages.flush(), query("select 1"), ready()]])
