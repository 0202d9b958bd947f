"""The gateway under load and loss: whatever clients, workers and probes do, nothing is lost and nothing is stuck.

Full sizes run with --soak.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import psutil
import psycopg
import pytest

from .client import Client, cancel, count, eventually, login, types, value
from .endpoints import frozen
from .messages import (
    bind,
    cancel_request,
    close_statement,
    copy_data,
    describe_portal,
    execute,
    flush,
    parse,
    password,
    query,
    run,
    ssl_request,
    startup,
    sync,
    terminate,
)
from .test_limits import sampled

pytestmark = pytest.mark.usefixtures("pooler")

ALICE: dict[str, Any] = {"user": "alice", "database": "postgres"}
TABLES = ["pools", "clients", "servers", "stats"]
ALL_TABLES = [*TABLES, "databases", "users", "nodes", "config", "lists", "state", "totals", "version"]
MANY_ROWS = "select repeat('x', 1000) from generate_series(1, 100000)"


# The console.


@pytest.mark.parametrize("transactions", [50, pytest.param(10_000, marks=pytest.mark.soak)])
def test_console_asked_all_the_time_while_pgbench_runs_answers_and_nobody_fails(gateway, postgres, transactions):
    bench = [postgres.bin / "pgbench", "-h", "127.0.0.1", "-U", "alice"]
    run_program([*bench, "-p", str(postgres.port), "-i", "-q", "shop"])
    relay = gateway(workers=2, default_pool_size=4)
    command = [*bench, "-p", str(relay.port), "-n", "-c", "20", "-j", "2", "-M", "extended", "-t", str(transactions)]
    rounds = 0
    with (
        relay.connect(relay.console_database) as console,
        subprocess.Popen([*command, "shop"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process,
    ):
        cursor = psycopg.ClientCursor(console, row_factory=psycopg.rows.dict_row)
        while process.poll() is None:
            shown = {table: of_shop(cursor.execute(f"show {table}").fetchall()) for table in TABLES}
            rounds += 1
            assert len(shown["clients"]) <= 21  # pgbench has one more connection at its start
            assert len([row for row in shown["servers"] if row["gateway_state"] != "closing"]) <= 4
            assert all(row["sv_active"] <= 4 for row in shown["pools"])
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
        told = process.stdout.read() if process.stdout else ""
        assert process.returncode == 0, told
        assert f"actually processed: {20 * transactions}/{20 * transactions}" in told
        assert "number of failed transactions: 0 " in told
        assert rounds > 1
        (stats,) = of_shop(cursor.execute("show stats").fetchall())
        assert stats["total_xact_count"] >= 20 * transactions
        assert stats["total_client_login_count"] >= 20


def run_program(command: list[Any]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def of_shop(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["database"] == "shop"]


# Workers.


def process_of(relay, client: Client) -> Any:
    """The process id of the worker that serves a client."""
    (_, port) = client.socket.getsockname()
    for pid in relay.workers():
        for connection in psutil.Process(pid).net_connections("tcp"):
            if connection.raddr and connection.raddr.port == port:
                return pid
    raise AssertionError("no worker has the client's connection")


def one_in_each(relay, **who: Any) -> list[Client]:
    """A client in each of two workers."""
    found: dict[int, Client] = {}

    def another() -> bool:
        client = login(relay.port, **who)
        if found.setdefault(process_of(relay, client), client) is not client:
            client.close()
        return len(found) == 2

    eventually(another, "a client in each worker")
    return list(found.values())


def test_worker_killed_others_keep_their_transactions_and_the_console_answers(gateway):
    relay = gateway(workers=2, default_pool_size=12)
    survivor, lost = one_in_each(relay, database="gateway")
    victim = process_of(relay, lost)
    clients = [*one_in_each(relay, **ALICE), *(login(relay.port, **ALICE) for _ in range(8))]
    for client in clients:
        client.ask(query("begin"))
    doomed = [client for client in clients if process_of(relay, client) == victim]
    os.kill(victim, signal.SIGKILL)
    for table in ALL_TABLES:
        survivor.rows(f"show {table}")
    for client in clients:
        if client in doomed:
            assert not count(client.wait_closed(), "E")
        else:
            assert client.value("select 'unharmed'") == "unharmed"
            assert types(client.ask(query("commit"))) == "CZ"
        client.socket.close()
    lost.wait_closed()
    for _ in range(20):
        assert value(relay.port, "select 1", **ALICE) == "1"
    eventually(lambda: len(relay.workers() - {victim}) == 2, "another worker")
    relay.expected_workers = relay.workers()
    for table in ALL_TABLES:
        survivor.rows(f"show {table}")
    survivor.close()


def test_worker_killed_again_and_again_its_share_comes_back_each_time(gateway):
    # The survivor holds one of four servers; the other three are for whoever is there, as soon as PostgreSQL knows.
    relay = gateway(workers=2, default_pool_size=4)
    holder, other = one_in_each(relay, **ALICE)
    holder.ask(query("begin"))
    other.close()
    for _ in range(3):
        (victim,) = relay.workers() - {process_of(relay, holder)}
        assert_room(relay, 3, then=lambda: os.kill(victim, signal.SIGKILL))  # noqa: B023
        assert_room(relay, 3)
        assert holder.value("select 'unharmed'") == "unharmed"
        eventually(lambda: len(relay.workers() - {victim}) == 2, "another worker")  # noqa: B023
    assert types(holder.ask(query("commit"))) == "CZ"
    holder.close()
    relay.expected_workers = relay.workers()


@pytest.mark.parametrize("workers", [1, 2])
def test_sigterm_while_a_dead_worker_is_to_be_started_again_ends_well(gateway, workers):
    # It was started after the pause, with listening sockets that were closed meanwhile.
    relay = gateway(workers=workers)
    for deaths in range(1, 5):  # each makes the pause before the next start longer
        eventually(lambda: len(relay.workers()) == workers, "all workers")
        value(relay.port, "select 1", **ALICE)
        os.kill(max(relay.workers()), signal.SIGKILL)
        eventually(lambda: relay.log.count("it is started again in") == deaths, "the death to be seen")  # noqa: B023
    assert relay.terminate() == 0
    assert "Traceback" not in relay.log


def assert_room(relay, size: int, user: str = "alice", then: Callable[[], None] = lambda: None) -> None:
    """So many clients can be in transactions at once; `then` is done while they are."""
    clients = [login(relay.port, user=user) for _ in range(size)]
    for client in clients:
        assert types(client.ask(query("begin"))) == "CZ"
    pids = {client.value("select pg_backend_pid()") for client in clients}
    assert len(pids) == size
    then()
    for client in clients:
        client.socket.close()


# The probe.


PROBE = "select pid from pg_stat_activity where application_name = 'gateway probe' and query ~ 'in_recovery'"


def probe_sessions(database) -> Any:
    """The process ids of the probe's sessions, once they have been asked what the node is."""
    return database.execute(f"{PROBE} and state = 'idle'").fetchall()


def node(relay) -> dict[str, Any]:
    (row,) = relay.console("show nodes")
    return {name: row[name] for name in ("name", "role", "status", "reason", "addresses")}


def test_probe_while_the_only_server_is_busy_uses_none_of_the_pool(gateway, database):
    # The probe's user is the pool's, so that a connection of one could serve the other.
    relay = gateway(cluster={"probe_interval": 0.05, "probe_user": "alice"})
    activity = "select query, state, xact_start::text from pg_stat_activity where pid = %s"
    with login(relay.port, **ALICE) as holder, login(relay.port, **ALICE) as waiting:
        holder.ask(query("begin"))
        pid = holder.value("select pg_backend_pid()")
        before, shown, told = database.execute(activity, [pid]).fetchone(), node(relay), relay.log
        waiting.write(query("select 'served'"))
        waiting.flush()
        for _ in range(3):  # each session of the probe is many rounds long
            session = eventually(lambda: probe_sessions(database), "a probe")
            eventually(lambda: probe_sessions(database) not in ([], session), "the next session")  # noqa: B023
        assert database.execute(activity, [pid]).fetchone() == before
        assert not waiting.pump()
        assert (node(relay), relay.log) == (shown, told)
        assert (shown["role"], shown["status"]) == ("primary", "up")
        assert types(holder.ask(query("commit"))) == "CZ"
        waiting.mark()
        assert count(waiting.until(lambda seen: count(seen, "Z") > 0), "D") == 1


def test_probe_terminated_again_and_again_no_client_notices_and_the_node_stays(gateway, database):
    relay = gateway(cluster={"probe_interval": 0.1}, default_pool_size=2)
    with login(relay.port, **ALICE) as holder, login(relay.port, **ALICE) as other:
        holder.ask(query("begin"))
        pids = [client.value("select pg_backend_pid()") for client in (holder, other)]
        shown, told = node(relay), relay.log
        for number in range(5):
            ((pid,), *_) = eventually(lambda: probe_sessions(database), "a probe")
            database.execute("select pg_terminate_backend(%s, 5000)", [pid])
            eventually(lambda: probe_sessions(database) not in ([], [(pid,)]), "another")  # noqa: B023
            assert holder.value(f"select {number}") == other.value(f"select {number}") == str(number)
        assert [client.value("select pg_backend_pid()") for client in (holder, other)] == pids
        assert (node(relay), relay.log) == (shown, told)
        assert types(holder.ask(query("commit"))) == "CZ"


# Clients that vanish.


class Door(NamedTuple):
    """Where a client comes in, and as whom."""

    port: int
    user: str = "alice"

    @property
    def startup(self) -> bytes:
        return startup(user=self.user, database="postgres")


def opened(door: Door, data: bytes) -> Client:
    client = Client(door.port)
    client.write(data)
    client.flush()
    return client


def asking(door: Door, data: bytes, seen: str = "") -> Client:
    """A client that has sent a request, and got the first message of a type in its answer."""
    client = login(door.port, user=door.user)
    client.write(data)
    client.flush(reading=False)
    if seen:
        client.until(lambda messages: count(messages, seen) > 0)
    return client


def canceling(door: Door) -> Client:
    client = asking(door, query("select pg_sleep(0.05)"))
    cancel(door.port, client.pid, client.key)
    return client


STATES: dict[str, Callable[[Door], Client]] = {
    "connected": lambda door: opened(door, b""),
    "half a startup packet": lambda door: opened(door, door.startup[:9]),
    "waiting for a login": lambda door: opened(door, door.startup),
    "asking for tls": lambda door: opened(door, ssl_request()),
    "wrong startup": lambda door: opened(door, door.startup + password("what for")),
    "idle": lambda door: login(door.port, user=door.user),
    "in a query": lambda door: asking(door, query("select pg_sleep(0.05)")),
    "in a query of a transaction": lambda door: asking(door, query("begin; select pg_sleep(0.05)")),
    "in a transaction": lambda door: asking(door, query("begin"), "Z"),
    "in a failed transaction": lambda door: asking(door, query("begin; select 1/0"), "E"),
    "half a query": lambda door: asking(door, query("select 1")[:-3]),
    "half a large query": lambda door: asking(door, query(f"select '{'x' * 200_000}'")[:100_000]),
    "parsed": lambda door: asking(door, parse("select 1", "s")),
    "no sync": lambda door: asking(door, run("select 1") + flush(), "D"),
    "no sync in a transaction": lambda door: asking(door, query("begin") + run("select 1") + flush(), "D"),
    "portal": lambda door: asking(
        door, parse("select generate_series(1, 9)") + bind() + describe_portal() + execute(rows=2) + flush(), "s"
    ),
    "pipeline": lambda door: asking(door, (run("select 1") + sync()) * 50),
    "failed group": lambda door: asking(door, run("select 1/0") + flush(), "E"),
    "rows unread": lambda door: asking(door, query(MANY_ROWS), "D"),
    "copy in": lambda door: asking(door, query("copy item from stdin") + copy_data("1\tlost\n"), "G"),
    "half copy in": lambda door: asking(
        door, query("copy item from stdin") + copy_data("2\t" + "x" * 100_000)[:50_000], "G"
    ),
    "copy out": lambda door: asking(door, query(f"copy ({MANY_ROWS}) to stdout"), "d"),
    "after cancel": canceling,
    "insert in a transaction": lambda door: asking(
        door, query("begin; insert into item select random() * 1e9, 'lost'"), "Z"
    ),
}
WAYS = ("reset", "fin", "terminate")


def vanish(client: Client, how: str) -> None:
    if how == "reset":
        client.reset()
    else:
        client.close(polite=how == "terminate")


@pytest.mark.parametrize("state", STATES)
def test_client_reset_in_each_state_gives_everything_back(relay, item, items, state):
    for _ in range(3):
        STATES[state](Door(relay.port, "postgres")).reset()
        at_rest(relay)
    assert_room(relay, 1, "postgres")
    assert items() == []


def at_rest(relay) -> None:
    """Nobody is in a pool, and no server is in use."""

    def busy() -> list[Any]:
        names = ("cl_active", "cl_waiting", "sv_active", "sv_tested", "sv_cleanup", "sv_being_canceled", "sv_closing")
        pools = [row for row in relay.console("show pools") if row["database"] != relay.console_database]
        return [row for row in pools if any(row[name] for name in names)]

    eventually(lambda: not busy(), "pools at rest")
    assert [row for row in relay.console("show clients") if row["database"] != relay.console_database] == []


UNREAD = {
    "sync, terminate": sync() + terminate(),
    "sync, query": sync() + query("select 1"),
    "sync, group": sync() + run("select 1") + sync(),
    "group, sync": run("select 1") + sync() + sync(),
    "flush, terminate": close_statement("s") + flush() + terminate(),
    "flush, query": close_statement("s") + flush() + query("select 1"),
    "flush, group": close_statement("s") + flush() + run("select 1") + sync(),
}


@pytest.mark.parametrize("request_", UNREAD)
def test_client_reset_before_what_it_sent_was_read_harms_nobody(gateway, request_):
    # An answer of ours could not be sent, which removed the client, but its messages were gone on with: it was removed
    # twice, or had a server again that then owed what was never sent, or another client was blamed.
    relay = gateway()
    with login(relay.port, **ALICE) as other:
        client = login(relay.port, **ALICE)
        client.ask(parse("select 1", "s") + sync())
        with frozen(relay):
            client.write(UNREAD[request_])
            client.flush(reading=False)
            client.reset()
        for number in range(5):
            assert other.value(f"select {number}") == str(number)
    assert "internal error" not in relay.log


def test_client_canceled_while_it_waits_and_gone_by_then_does_not_end_the_worker(gateway):
    # The same, but where nobody caught it: the worker died, and all its clients with it.
    relay = gateway()
    with login(relay.port, **ALICE) as holder, login(relay.port, **ALICE) as client, Client(relay.port) as canceler:
        holder.ask(query("begin"))
        client.write(query("select 'never'"))
        client.flush()
        eventually(lambda: cl_waiting(relay) == 1, "the queue")
        with frozen(relay):
            client.close()
            canceler.write(cancel_request(client.pid, client.key))
            canceler.flush()
        assert holder.value("select 'unharmed'") == "unharmed"
        holder.ask(query("commit"))
    assert "internal error" not in relay.log


REQUESTS = {
    "simple": query("select 1"),
    "extended": run("select 1") + sync(),
    "no sync": run("select 1"),
    "large": query(f"select '{'x' * 200_000}'"),
}


@pytest.mark.parametrize("request_", REQUESTS)
def test_clients_reset_while_they_wait_leave_the_queue(gateway, request_):
    # One that had sent more than high_water_mark was not read any more, so its end was not seen.
    relay = gateway(query_wait_timeout=60, query_wait_notify=0)
    with login(relay.port, **ALICE) as holder:
        holder.ask(query("begin"))
        clients = [asking(Door(relay.port), REQUESTS[request_]) for _ in range(2)]
        eventually(lambda: cl_waiting(relay) == 2, "the queue")
        for client in clients:
            client.reset()
        eventually(lambda: cl_waiting(relay) == 0, "an empty queue")
        assert types(holder.ask(query("commit"))) == "CZ"
    at_rest(relay)
    assert_room(relay, 1)


def cl_waiting(relay) -> int:
    return sum(int(row["cl_waiting"]) for row in relay.console("show pools") if row["user"] == ALICE["user"])


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("rounds", [30, pytest.param(2000, marks=pytest.mark.soak)])
def test_storm_of_clients_that_vanish_in_all_states_leaves_nothing(
    gateway, postgres, database, item, items, workers, rounds
):
    size = 3
    relay = gateway(workers=workers, default_pool_size=size)
    failures = list[BaseException]()

    def storm(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(rounds):
                client = STATES[rng.choice(list(STATES))](Door(relay.port))
                vanish(client, rng.choice(WAYS))
                assert value(relay.port, "select 1", **ALICE) == "1"
        except BaseException as failure:
            failures.append(failure)

    with sampled(postgres, "alice") as highest:
        threads = [threading.Thread(target=storm, args=[seed]) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
        at_rest(relay)
        assert_room(relay, size)
    assert 1 <= highest() <= size
    unfinished = "select count(*) from pg_stat_activity where usename = 'alice' and state <> 'idle'"
    eventually(lambda: database.execute(unfinished).fetchone() == (0,), "all transactions to end")
    assert items() == []
