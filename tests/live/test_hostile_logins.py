"""Logins at servers that are not PostgreSQL: one clean error for who waits, and no harm to others.

Manual: "Message Flow", "Message Formats", "SASL Authentication".
"""

from __future__ import annotations

import base64
import random
import struct
import threading
from collections.abc import Callable, Sequence

import psycopg
import pytest

from .client import DEADLINE, Client, cancel, count, error, eventually, types
from .hostile import (
    ERRORS,
    KEY,
    NO_LOGIN,
    NOTICE,
    NOTIFICATION,
    OK,
    PASSWORD,
    STATUS,
    USER,
    close,
    notice,
    settled,
)
from .messages import (
    Message,
    cstring,
    message,
    query,
    run,
    startup,
    sync,
)
from .player import at_random
from .servers import Scram, Script, Visit, authentication, honest, parameter_status

# What PostgreSQL might say in a login, but does not say there.

UNUSUAL = {
    "NoticeResponse": NOTICE,
    "NoticeResponse of 100 kB": notice("x" * 100_000),
    "ParameterStatus": STATUS,
    "ParameterStatus of 100 kB": parameter_status("application_name", "x" * 100_000),
    "NotificationResponse": NOTIFICATION,
    "NegotiateProtocolVersion": message("v", struct.pack("!II", 3 << 16, 0)),
    "NegotiateProtocolVersion with options": message("v", struct.pack("!II", 3 << 16, 1) + cstring("_pq_.strange")),
}


@pytest.mark.parametrize("place", ["before AuthenticationOk", "behind AuthenticationOk", "before ReadyForQuery"])
@pytest.mark.parametrize("unusual", UNUSUAL)
def test_login_with_an_unusual_message_in_it_is_a_login(bench, unusual, place):
    def script(visit: Visit) -> None:
        said: list[bytes | Message] = [*visit.welcome()]
        said.insert({"before AuthenticationOk": 0, "behind AuthenticationOk": 1}.get(place, -1), UNUSUAL[unusual])
        visit.send(*said)
        visit.relay()

    with bench.playing(script), bench.login() as client:
        assert client.value("select 'in step'") == "in step"
        if unusual.startswith("ParameterStatus") and place == "before ReadyForQuery":
            assert parameter_status("application_name", client.parameters["application_name"]) == UNUSUAL[unusual]


@pytest.mark.parametrize("way", ["whole", "byte by byte", "at random", "with what is told later"])
def test_login_cut_in_any_way_is_a_login(bench, way):
    def script(visit: Visit) -> None:
        said = b"".join(message(*one) for one in visit.welcome())
        cut: dict[str, Sequence[bytes]] = {
            "whole": [said],
            "byte by byte": [said[at : at + 1] for at in range(len(said))],
            "at random": [*at_random(said, random.Random(5))],
            "with what is told later": [said + STATUS + NOTICE + NOTIFICATION],
        }
        for piece in cut[way]:
            visit.send(piece)
        visit.relay()

    with bench.playing(script), bench.login() as client:
        assert client.value("select 'in step'") == "in step"


def test_login_of_endless_notices_takes_no_memory(bench):
    said, seen = threading.Event(), threading.Event()

    def script(visit: Visit) -> None:
        welcome = visit.welcome()
        for _ in range(300):
            visit.send(notice("x" * 500_000))
        said.set()
        assert seen.wait(DEADLINE)
        visit.send(*welcome)
        visit.relay()

    before = bench.gateway.memory()
    with bench.playing(script), Client(bench.port) as client:
        client.write(startup(user=USER, database=bench.database))
        client.flush()
        assert said.wait(DEADLINE)
        taken = bench.gateway.memory() - before
        seen.set()
        assert types(settled(client)).replace("S", "") == "RKZ"
        assert taken < 64 << 20


def without_key(visit: Visit) -> None:
    """Be PostgreSQL without BackendKeyData, as RDS Proxy and other poolers are."""
    visit.send(*(one for one in visit.welcome() if one.type != "K"))
    visit.relay()


def test_login_without_backend_key_data_gives_clients_keys_of_ours(bench):
    with bench.playing(without_key), bench.login() as one, bench.login() as two:
        assert len(one.key) == len(two.key) == 4
        assert (one.pid, one.key) != (two.pid, two.key)
        assert one.value("select 1") == two.value("select 1") == "1"


def test_cancel_at_a_server_without_key_does_nothing(bench):
    with bench.playing(without_key), bench.login() as client:
        client.write(query("select pg_sleep(0.3), 'done'"))
        client.flush()
        cancel(bench.port, client.pid, client.key)
        seen = settled(client)
        assert types(seen) == "TDCZ", list(map(str, seen))
        assert bench.impostor.cancels == []


def test_client_gone_from_a_server_without_key_frees_it_when_its_query_ends(bench):
    with bench.playing(without_key):
        client = bench.login()
        client.write(query("select pg_sleep(0.3)"))
        client.flush()
        client.reset()
        assert bench.value("select 'next'") == "next"
        assert bench.impostor.cancels == []


# SCRAM: a server that asks for a password and is none of ours.


def scram(
    *,
    then: Callable[[Scram], object] = lambda scram: scram.visit.send(authentication(12, scram.signature())),
    nonce: Callable[[Scram], bytes] = lambda scram: scram.nonce + b"server",
    **challenge: bytes,
) -> Script:
    """Ask for SCRAM before being PostgreSQL, with one thing other than it should be."""

    def script(visit: Visit) -> None:
        exchange = Scram(visit, PASSWORD)
        exchange.challenge(nonce=nonce(exchange), **challenge)
        then(exchange)
        visit.send(*visit.welcome())
        visit.relay()

    return script


def final(data: bytes) -> Callable[[Scram], None]:
    """Read the gateway's proof, and answer it by this server-final-message."""

    def then(scram: Scram) -> None:
        scram.signature()
        scram.visit.send(authentication(12, data))

    return then


def challenge_again(scram: Scram) -> None:
    scram.signature()
    scram.challenge()


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(scram(), id="as it should be"),
        pytest.param(scram(nonce=lambda scram: scram.nonce + b"x" * 900), id="nonce of 900 bytes"),
        pytest.param(scram(iterations=b"1"), id="one iteration"),
        pytest.param(scram(salt=base64.b64encode(b"s" * 500)), id="salt of 500 bytes"),
    ],
)
def test_scram_server_that_is_merely_odd_is_logged_in_to(bench, script):
    with bench.playing(script), bench.login() as client:
        assert client.value("select 'in step'") == "in step"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        # CVE-2026-6665: the nonce was copied to where it had no room.
        pytest.param(scram(nonce=lambda scram: scram.nonce + b"x" * 1_000_000), "nonce", id="nonce of 1 MB"),
        pytest.param(scram(nonce=lambda scram: scram.nonce + b"x" * 1_000), "nonce", id="nonce of 1 kB"),
        pytest.param(scram(nonce=lambda _: b"another's" * 4), "nonce", id="nonce of another"),
        pytest.param(scram(nonce=lambda scram: scram.nonce), "nonce", id="nonce without the server's part"),
        pytest.param(scram(nonce=lambda _: b""), "nonce", id="no nonce"),
        pytest.param(scram(iterations=b"0"), "malformed", id="no iterations"),
        pytest.param(scram(iterations=b"-1"), "malformed", id="less than no iterations"),
        pytest.param(scram(iterations=b"1000000000"), "malformed", id="1,000,000,000 iterations"),
        pytest.param(scram(iterations=b"9" * 5000), "malformed", id="iterations of 5,000 digits"),
        pytest.param(scram(iterations=b"many"), "malformed", id="iterations in words"),
        pytest.param(scram(salt=b"not base64!"), "malformed", id="salt that is no base64"),
        pytest.param(scram(then=final(b"v=" + base64.b64encode(bytes(32)))), "signature", id="wrong signature"),
        pytest.param(scram(then=final(b"")), "signature", id="empty signature"),
        pytest.param(scram(then=final(b"e=other-error")), "signature", id="error for a signature"),
        pytest.param(scram(then=Scram.signature), "signature", id="no AuthenticationSASLFinal"),
        pytest.param(scram(then=lambda _: None), "signature", id="no proof asked for"),
        pytest.param(scram(then=challenge_again), "second", id="a second challenge"),
    ],
)
def test_scram_server_that_proves_nothing_is_told_to_the_client(bench, script, reason):
    with bench.playing(script):
        fields = bench.refused()
        assert fields["C"] == "28000", fields
        assert reason in fields["M"], fields


def test_scram_server_that_asks_for_endless_work_costs_other_clients_nothing(bench):
    # They are of another pool, and of the same worker.
    with bench.playing(honest), bench.login() as bystander:
        bench.new_pool()
        bench.impostor.script = scram(iterations=b"1000000000")
        with Client(bench.port) as client:
            client.write(startup(user=USER, database=bench.database))
            client.flush()
            for number in range(100):
                assert bystander.value(f"select {number}") == str(number)
            client.wait_closed()


# Authentication that is not supported, or is not authentication.


@pytest.mark.parametrize(
    ("request_", "name"),
    [
        pytest.param(authentication(2), "Kerberos V5", id="Kerberos V5"),
        pytest.param(authentication(7), "GSSAPI", id="GSSAPI"),
        pytest.param(authentication(9), "SSPI", id="SSPI"),
        pytest.param(authentication(99), "99", id="99"),
        pytest.param(authentication(0xFFFFFFFF), "4294967295", id="4294967295"),
        pytest.param(authentication(10, b"SCRAM-SHA-512\0OAUTHBEARER\0\0"), "SCRAM-SHA-512", id="SCRAM-SHA-512"),
        pytest.param(authentication(10, b"SCRAM-SHA-256-PLUS\0\0"), "SCRAM-SHA-256-PLUS", id="channel binding"),
    ],
)
def test_authentication_method_that_is_not_supported_is_named_to_the_client(bench, request_, name):
    with bench.playing(lambda visit: (visit.send(request_), visit.wait_closed())):
        fields = bench.refused()
        assert fields["C"] == "0A000", fields
        assert name in fields["M"], fields


@pytest.mark.parametrize(
    "script", [lambda visit: visit.send(authentication(7)), scram(iterations=b"0")], ids=["GSSAPI", "SCRAM"]
)
def test_login_that_ends_because_of_the_server_ends_by_a_fatal_error(bench, script):
    # The connection is closed: ERROR would say that it goes on.
    with bench.playing(script):
        assert bench.refused()["S"] == "FATAL"


# Logins that are refused, or are none: `clean` errors, one for each client.


@pytest.mark.parametrize("body", ERRORS)
def test_login_refused_by_a_strange_error_response_gives_one_error(bench, body):
    # CVE-2026-6666: an error without SQLSTATE ended the process.
    with bench.playing(lambda visit: visit.send(message("E", ERRORS[body]))):
        bench.refused()
        with pytest.raises(psycopg.OperationalError):
            bench.gateway.connect(bench.database, user=USER)


# Whether a client is told at once, or when query_wait_timeout is over because another try might go better, differs.
TOLD = ("0A000", "08006", "28000", "53300", "57P03")


@pytest.mark.parametrize("said", NO_LOGIN)
def test_server_that_does_not_speak_the_protocol_is_left_and_gives_one_error(bench, said):
    # It waits for an answer: it is the gateway that ends the connection.
    with bench.playing(lambda visit: (visit.send(NO_LOGIN[said]), visit.wait_closed())):
        first = len(bench.impostor.visits)
        fields = bench.refused()
        assert fields["C"] in TOLD, fields
        assert bench.impostor.visits[first].ended.wait(DEADLINE)


@pytest.mark.parametrize("said", [b"", STATUS[:3], OK, OK + STATUS[:3], OK + STATUS[:9], OK + KEY])
def test_server_that_closes_within_the_login_gives_one_error(bench, said):
    with bench.playing(lambda visit: visit.send(said)):
        fields = bench.refused()
        assert fields["C"] in TOLD, fields


@pytest.mark.parametrize(
    ("said", "told"),
    [
        pytest.param(message("E", ERRORS["without SQLSTATE"]), [None], id="error without SQLSTATE"),
        pytest.param(message("E", ERRORS["of one NUL"]), [None], id="error of one NUL"),
        pytest.param(authentication(99), ["0A000"], id="method 99"),
        pytest.param(NO_LOGIN["HTTP"], TOLD, id="HTTP"),
        pytest.param(b"", TOLD, id="closed"),
    ],
)
@pytest.mark.parametrize("request_", [query("select 1"), run("select 1") + sync()], ids=["simple", "extended"])
def test_client_that_waits_for_a_server_gets_one_error_and_stays(bench, said, told, request_):
    with bench.playing(honest), bench.login() as client:
        bench.heal()
        bench.impostor.script = lambda visit: visit.send(said)
        seen = client.ask(request_)
        assert types(seen) == "EZ", list(map(str, seen))
        assert error(seen).get("C") in told
        bench.heal()
        assert eventually(lambda: count(client.ask(query("select 'again'")), "D"), "an answer")


@pytest.mark.parametrize("how", [close, Visit.reset], ids=["fin", "reset"])
def test_server_that_closes_at_once_gives_one_error(bench, how):
    # All connections, the probes' too: what the node is was known before.
    with bench.playing(honest):
        bench.impostor.on_accept = how
        assert bench.refused()["S"] == "FATAL"


def test_server_that_never_speaks_is_given_up_after_server_connect_timeout(bench_with):
    # With a server that is silent for ever in its only place the client would wait for query_wait_timeout.
    bench = bench_with(server_connect_timeout=0.3, query_wait_timeout=60)
    silent = [True]

    def script(visit: Visit) -> None:
        (visit.wait_closed if silent else visit.be_postgres)()

    with bench.playing(script), Client(bench.port) as client:
        client.write(startup(user=USER, database=bench.database))
        client.flush()
        eventually(lambda: "server_connect_timeout" in bench.gateway.log, "the first try to be given up")
        silent.clear()
        assert types(settled(client)).replace("S", "") == "RKZ"


def test_login_that_failed_is_tried_again_after_server_login_retry_and_not_at_once(bench_with):
    bench = bench_with(server_login_retry=60, query_wait_timeout=1.0)
    with bench.playing(close):
        bench.refused()
        assert len(bench.impostor.visits) == 1
        bench.new_pool()  # as this one waits for a minute
