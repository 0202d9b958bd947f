"""Servers that are not PostgreSQL, or stop being it: clients get one clean error, and nobody else notices.

An impostor stands between the gateway and PostgreSQL. After each case the workers are the same processes, at rest and
without a traceback, and once PostgreSQL is back in its place a fresh client is served.

Manual: "Message Flow", "Message Formats", "SASL Authentication".
"""

from __future__ import annotations

import base64
import itertools
import random
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from gateway.embedded import free_ports

from .client import DEADLINE, Client, cancel, count, error, eventually, login, types, value
from .endpoints import ADMIN_PASSWORD, Gateway, PgBouncer
from .messages import (
    TEXT,
    Message,
    bind,
    close_statement,
    copy_data,
    cstring,
    execute,
    message,
    parse,
    query,
    run,
    startup,
    sync,
)
from .player import at_random
from .servers import Impostor, Scram, Script, Visit, authentication, honest, parameter_status

USER, PASSWORD = "alice", "wonderland"
PROBES = "frank"  # a role that needs no password and that no other test logs in as
STRANGE = "select 'strange'"  # the query that the impostor answers itself
SETTINGS: dict[str, Any] = {
    "query_wait_timeout": 1.5,
    "server_login_retry": 0.2,
    "database": {"*": {"dbname": "postgres"}, "session": {"dbname": "postgres", "pool_mode": "session"}},
    "cluster": {"probe_user": PROBES, "fall": 1000},
}

OK = authentication(0)
READY = message("Z", b"I")
KEY = message("K", struct.pack("!I", 4711) + b"key!")


def row_description(name: str = "text", oid: int = TEXT) -> bytes:
    return message("T", struct.pack("!H", 1) + cstring(name) + struct.pack("!IHIhih", 0, 0, oid, -1, -1, 0))


def data_row(data: bytes) -> bytes:
    return message("D", struct.pack("!HI", 1, len(data)) + data)


def error_response(**fields: str) -> bytes:
    return message("E", b"".join(cstring(letter + text) for letter, text in fields.items()) + b"\0")


def notice(text: str) -> bytes:
    return message("N", b"SNOTICE\0VNOTICE\0C00000\0" + cstring("M" + text) + b"\0")


NOTICE = notice("by the way")
NOTIFICATION = message("A", struct.pack("!I", 4711) + b"channel\0payload\0")
STATUS = parameter_status("application_name", "impostor")
ROW = row_description() + data_row(b"strange")
DONE = message("C", b"SELECT 1\0")
ANSWER = ROW + DONE + READY


class Bench:
    """A gateway with an impostor behind it. Each case has a database, and so a pool, that nobody has asked for yet."""

    numbers = itertools.count(1)

    def __init__(self, gateway: Gateway | PgBouncer, impostor: Impostor) -> None:
        self.gateway, self.impostor = gateway, impostor
        self.port = gateway.port
        self.database = ""
        self.is_sound = True  # did every case end well?

    @contextmanager
    def playing(self, script: Script) -> Iterator[None]:
        """Play a script to the gateway's server connections; then examine the gateway, and put PostgreSQL back."""
        self.is_sound = False
        workers, logged = self.gateway.workers(), len(self.gateway.log)
        self.new_pool()
        visits = len(self.impostor.visits)
        self.impostor.script = script
        yield
        Client.close_all()
        assert len(self.impostor.visits) > visits, "the gateway has not come to the impostor"
        self.heal()
        assert self.gateway.workers() == workers, "a worker died"
        for word in ("Traceback", "internal error"):
            assert word not in self.gateway.log[logged:], self.gateway.log[logged:][-3000:]
        eventually(self.serves, "a fresh client served by a healed server")
        eventually(self.is_asleep, "the workers to sleep")
        self.gateway.assert_no_leak()
        self.impostor.hang_up()
        assert not self.impostor.faults, self.impostor.faults
        self.is_sound = True

    def new_pool(self) -> None:
        """Go on in a database that nobody has asked for yet."""
        self.database = f"pool_{next(self.numbers)}"

    def heal(self) -> None:
        """Put PostgreSQL back in its place, for new connections and instead of the old ones."""
        self.impostor.script, self.impostor.on_accept = honest, None
        self.impostor.hang_up()

    def login(self) -> Client:
        return login(self.port, user=USER, database=self.database)

    def value(self, sql: str) -> str | None:
        return value(self.port, sql, user=USER, database=self.database)

    def serves(self) -> bool:
        try:
            return self.value("select 'healed'") == "healed"
        except AssertionError:
            return False

    def refused(self) -> dict[str, str]:
        """Log in and be refused: the fields of the one error that is told before the end."""
        with Client(self.port) as client:
            client.write(startup(user=USER, database=self.database))
            seen = client.wait_closed()
            assert types(seen).lstrip("R") == "E", list(map(str, seen))
            return error(seen)

    def is_asleep(self) -> bool:
        """Do the workers wait for something to happen, instead of using the processor? proc(5)."""
        stats = [Path(f"/proc/{pid}/stat").read_text() for pid in self.gateway.workers()]
        return all(stat.rpartition(")")[2].split()[0] == "S" for stat in stats)


@pytest.fixture(scope="module")
def _benches(postgres) -> Iterator[dict[str, tuple[ExitStack, Bench]]]:
    """Those that run, by their settings: a start takes longer than most cases."""
    made: dict[str, tuple[ExitStack, Bench]] = {}
    yield made
    with ThreadPoolExecutor() as executor:
        stopped = [executor.submit(bench.gateway.stop) for _, bench in made.values()]
    for stack, _ in made.values():
        stack.close()
    for one in stopped:
        one.result()


@pytest.fixture
def bench_with(
    _benches, postgres, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Bench]]:
    """Make a bench with settings of its own, or find it; one that a case has failed on goes with its test."""
    kind = request.config.getoption("--endpoint")
    if kind == "postgres":
        pytest.skip("PostgreSQL has no servers behind it")
    build = Gateway if kind == "gateway" else PgBouncer
    secrets = {"postgres": ADMIN_PASSWORD, USER: PASSWORD}

    def make(**settings: Any) -> Bench:
        if repr(settings) not in _benches:
            with ExitStack() as stack:
                impostor = stack.enter_context(Impostor(postgres.port, PROBES))
                directory, (port,) = tmp_path_factory.mktemp("hostile"), free_ports(1)
                gateway = build(impostor, port, directory, secrets, **{**SETTINGS, **settings})
                stack.callback(gateway.kill)
                _benches[repr(settings)] = stack.pop_all(), Bench(gateway, impostor)
        bench: Bench = _benches[repr(settings)][1]
        return bench

    yield make
    Client.close_all()
    for settings, (stack, bench) in list(_benches.items()):
        if not bench.is_sound:
            print(bench.gateway.log[-4000:])
            del _benches[settings]
            stack.close()


@pytest.fixture
def bench(bench_with) -> Bench:
    """The gateway that most tests of this file share."""
    shared: Bench = bench_with()
    return shared


def settled(client: Client) -> list[Message]:
    """What has come since the mark, up to ReadyForQuery or the end."""
    return client.until(lambda seen: count(seen, "Z") > 0)


def is_strange(seen: Message) -> bool:
    """Is it the query that the impostor answers itself?"""
    return seen.type in "QP" and b"strange" in seen.body


def answering(*parts: bytes, then: Callable[[Visit], object] = Visit.relay) -> Script:
    """Be PostgreSQL, but answer STRANGE by this, in one write, then do something else."""

    def script(visit: Visit) -> None:
        visit.send(*visit.welcome())
        if visit.relay(is_strange).type == "P":
            while visit.receive().type != "S":
                pass
        visit.asked = True
        visit.send(*parts)
        then(visit)

    return script


def once(script: Script) -> Script:
    """Play a script to the first connection, and be PostgreSQL to those that follow."""
    scripts = itertools.chain([script], itertools.repeat(honest))
    return lambda visit: next(scripts)(visit)


def close(visit: Visit) -> None:
    """End the connection as a process does that has died."""


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

ERRORS = {
    "without SQLSTATE": b"SFATAL\0VFATAL\0Mno code\0\0",
    "without message": b"SFATAL\0VFATAL\0C28000\0\0",
    "without severity": b"C28000\0Mno severity\0\0",
    "with unknown fields": b"SFATAL\0VFATAL\0C28000\0Mno\0~what\0!is\0~this\0\0",
    "with empty fields": b"S\0V\0C\0M\0\0",
    "with a short SQLSTATE": b"SFATAL\0VFATAL\0C2\0Mno\0\0",
    "of one NUL": b"\0",
    "of nothing": b"",
    "without end": b"SFATAL\0VFATAL\0C28000\0Mno end",
    "that is not UTF-8": b"SFATAL\0VFATAL\0C28000\0M\xff\xfe\0\0",
}


@pytest.mark.parametrize("body", ERRORS)
def test_login_refused_by_a_strange_error_response_gives_one_error(bench, body):
    # CVE-2026-6666: an error without SQLSTATE ended the process.
    with bench.playing(lambda visit: visit.send(message("E", ERRORS[body]))):
        bench.refused()
        with pytest.raises(psycopg.OperationalError):
            bench.gateway.connect(bench.database, user=USER)


LENGTHS = [0, 3, 0xFFFFFFFF, 0x80000000, 0x7FFFFFFF]
NO_LOGIN = {
    "HTTP": b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\n\r\n400 Bad Request",
    "SSH": b"SSH-2.0-OpenSSH_9.2\r\n",
    "SMTP": b"220 mail.example.org ESMTP\r\n",
    "MySQL": bytes.fromhex("4a0000000a") + b"8.0.36\0" + bytes(60),
    "TLS alert": bytes.fromhex("15030100020228"),
    "zeroes": bytes(4096),
    "ones": b"\xff" * 4096,
    "NoticeResponse of 2 MB": notice("x" * (2 << 20)),
    "unknown type": message("~", b"what"),
    "unknown type behind AuthenticationOk": OK + message("~", b"what"),
    "answer to a query": OK + ROW,
    "ReadyForQuery before AuthenticationOk": READY,
    "ReadyForQuery without status": OK + message("Z"),
    "ReadyForQuery of two": OK + message("Z", b"II"),
    "AuthenticationOk twice": OK + OK,
    "Authentication without a method": message("R", b"\0\0"),
    "AuthenticationMD5Password with half a salt": authentication(5, b"sa"),
    "AuthenticationSASL of nothing": authentication(10),
    "AuthenticationSASL without end": authentication(10, b"SCRAM-SHA-256"),
    "AuthenticationSASLContinue unasked": authentication(11, b"r=a,s=b,i=1"),
    "AuthenticationSASLFinal unasked": authentication(12, b"v=a"),
    "ParameterStatus without value": OK + message("S", b"name\0"),
    "ParameterStatus without end": OK + message("S", b"name\0value"),
    "BackendKeyData without key": OK + message("K", b"\0\0\0\1"),
    "BackendKeyData of 300 bytes": OK + message("K", bytes(300)),
    **{f"{kind} of length {length:#x}": OK + message(kind, b"abc\0", length) for kind in "Z~" for length in LENGTHS},
    **{f"R of length {length:#x}": message("R", b"abc\0", length) for length in LENGTHS},
}


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
        (run("select 2") + sync() + run("select 3") + sync(), "EZ12TDCZ"),
        (query("select 2") + query("select 3"), "EZTDCZ"),
        (query("rollback"), "EZ"),
    ],
    ids=["simple", "extended", "two groups", "two queries", "rollback"],
)
def test_server_that_dies_while_its_client_idles_in_a_transaction_is_told_with_the_next_request(
    bench, request_, answered, end
):
    # Nothing is told before; what follows the failed request is a new transaction's.
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
        assert error(seen)["C"] == "08006"
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
