"""What a view of the cluster does to clients and servers: another primary, none, one that is held.

The worker runs without a supervisor, so that the test decides what it believes; the two PostgreSQL behind it are no
cluster, and their table tells which one a client has reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from gateway.control import Met
from gateway.embedded import Cluster, PostgresNode
from health.view import Status

from .alone import WorkerAlone
from .client import Client, count, error, eventually, login, types
from .hostile import PROBES
from .messages import WHO, Message, query, run, startup, sync
from .servers import Impostor, Visit
from .test_lost_servers import COUNTING, is_aborted, simple, status

pytestmark = pytest.mark.usefixtures("pooler")


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest) -> Iterator[list[PostgresNode]]:
    """Two PostgreSQL that know nothing of each other: the first is called one, the second two."""
    if request.config.getoption("--endpoint") != "gateway":
        pytest.skip("only the gateway has such workers")
    version = request.config.getoption("--postgres")
    with Cluster(version=version, standbys=0) as first, Cluster(version=version, standbys=0) as second:
        for cluster in (first, second):
            cluster.primary.psql("create table item (id int primary key, name text)")
        yield [first.primary, second.primary]


@pytest.fixture
def worker_of(tmp_path_factory, pair) -> Iterator[Callable[..., WorkerAlone]]:
    """Make a worker that sees pg1 as the primary; it must end well after the test."""
    made: list[WorkerAlone] = []

    def make(*nodes: Any, **settings: Any) -> WorkerAlone:
        worker = WorkerAlone(tmp_path_factory.mktemp("worker"), list(nodes or pair), **settings)
        made.append(worker)
        worker.see("pg1")
        return worker

    yield make
    Client.close_all()
    for worker in made:
        with worker:
            pass


@pytest.fixture
def standstill(pair) -> Iterator[Impostor]:
    """The first PostgreSQL behind an impostor, which can be made to stand still: what it is sent stays there."""
    with Impostor(pair[0].port, PROBES) as impostor:
        yield impostor


def silent(words: str) -> Callable[[Visit], None]:
    """Be PostgreSQL until these words come, which are never answered."""

    def script(visit: Visit) -> None:
        visit.send(*visit.welcome())
        visit.relay(lambda seen: words.encode() in seen.body)
        visit.asked = True
        visit.wait_closed()

    return script


def asked(impostor: Impostor) -> None:
    eventually(lambda: any(visit.asked for visit in impostor.visits), "the request to have come")


def is_waiting(worker: WorkerAlone, clients: int) -> bool:
    return worker.rows("pools")[0]["waiting"] == clients


def answer(client: Client, ready: int = 1) -> list[Message]:
    return client.until(lambda seen: count(seen, "Z") >= ready)


# Another primary.


def test_primary_is_another_idle_servers_of_the_old_one_are_closed_at_once(worker_of, pair):
    worker = worker_of(warm_pool_size=0, default_pool_size=3)
    clients = [login(worker.port) for _ in range(3)]
    for client in clients:
        client.write(query("select pg_sleep(0.05)"))
        client.flush()
    for client in clients:
        answer(client)
    old = {pid for _, pid in worker.servers()}
    worker.see("pg2")
    assert not old & {pid for _, pid in worker.servers()}
    for client in clients:
        client.mark()
        assert client.value("select inet_server_port()") == str(pair[1].port)


def test_primary_is_another_a_client_in_a_transaction_is_told_once_and_rolls_back_there(worker_of, pair):
    worker = worker_of(warm_pool_size=0)
    with login(worker.port) as client:
        client.ask(query("begin"))
        client.ask(query("insert into item values (1, 'lost')"))
        worker.see("pg2")
        seen = client.ask(query("select 1"))
        assert (types(seen), error(seen)["C"], status(seen)) == ("EZ", "08006", "E")
        is_aborted(client, simple)
        assert client.value("select inet_server_port()") == str(pair[1].port)
    eventually(lambda: pair[0].psql(COUNTING) == "0", "the old node to roll back")


@pytest.mark.parametrize(
    ("sql", "told", "sqlstate", "after"),
    [
        ("insert into item values (2, 'perhaps')", "EZ", "08007", "I"),
        ("begin; insert into item values (3, 'lost')", "EZ", "08006", "E"),
    ],
)
def test_primary_is_another_what_ran_on_the_old_one_gets_one_error(
    worker_of, pair, standstill, sql, told, sqlstate, after
):
    standstill.script = silent("insert")
    worker = worker_of(standstill, pair[1], warm_pool_size=0)
    with login(worker.port) as client:
        client.mark()
        client.write(query(sql))
        client.flush()
        asked(standstill)
        worker.see("pg2")
        seen = answer(client)
        assert (types(seen), error(seen)["C"], status(seen)) == (told, sqlstate, after)


def test_primary_is_another_a_commit_under_way_is_told_as_unknown(worker_of, pair, standstill):
    standstill.script = silent("commit")
    worker = worker_of(standstill, pair[1], warm_pool_size=0)
    with login(worker.port) as client:
        client.ask(query("begin"))
        client.mark()
        client.write(query("commit"))
        client.flush()
        asked(standstill)
        worker.see("pg2")
        seen = answer(client)
        assert (types(seen), error(seen)["C"], status(seen)) == ("EZ", "08007", "I")


@pytest.mark.parametrize("request_", [query(COUNTING), run(COUNTING) + sync()], ids=["simple", "extended"])
def test_primary_is_another_a_read_under_way_is_answered_by_it(worker_of, pair, standstill, request_):
    standstill.script = silent("count")
    worker = worker_of(standstill, pair[1], warm_pool_size=0)
    with login(worker.port) as client:
        client.mark()
        client.write(request_)
        client.flush()
        asked(standstill)
        worker.see("pg2")
        assert types(answer(client)).lstrip("12") == "TDCZ"


def test_primary_is_another_a_server_that_does_not_answer_at_login_is_dropped(worker_of, pair, standstill):
    # A stopped host: the connect succeeds, and nothing follows. Who waits for it goes to the new primary.
    standstill.script = Visit.wait_closed
    worker = worker_of(standstill, pair[1], warm_pool_size=0)
    with Client(worker.port) as client:
        client.write(startup(**WHO))
        client.flush()
        eventually(lambda: len(standstill.visits) > 0, "the connect")
        worker.see("pg2")
        client.until(lambda seen: count(seen, "Z") > 0)
        assert client.value("select inet_server_port()") == str(pair[1].port)


def test_primary_is_another_a_session_that_holds_a_server_ends(worker_of):
    worker = worker_of(pool_mode="session", warm_pool_size=0)
    with login(worker.port) as client:
        assert client.value("select 1") == "1"
        worker.see("pg2")
        client.mark()
        seen = client.wait_closed()
        assert (types(seen), error(seen)["S"], error(seen)["C"]) == ("E", "FATAL", "08006")


def test_primary_is_another_clients_that_wait_are_served_first_in_first_out(worker_of, pair):
    worker = worker_of(warm_pool_size=0, query_wait_timeout=8.0)
    clients = [login(worker.port) for _ in range(30)]
    worker.see(None)
    pair[1].psql("create table if not exists queue (id serial, number int)")
    clients[0].ask(query("begin"))  # it has the one server, of the old node
    for number, client in enumerate(clients[1:]):
        client.mark()
        client.write(query(f"insert into queue (number) values ({number})"))
        client.flush()
        eventually(partial(is_waiting, worker, number + 1), "the client to wait")
    worker.see("pg2")
    for client in clients[1:]:
        assert types(answer(client)) == "CZ"
    numbers = ",".join(map(str, range(29)))
    assert pair[1].psql("select string_agg(number::text, ',' order by id) from queue") == numbers


def test_primary_is_another_behind_a_connect_that_failed_nobody_waits_for_the_retry(worker_of, pair, standstill):
    # The pause after a failed login is about the node where it failed.
    standstill.on_accept = lambda _: None
    worker = worker_of(standstill, pair[1], warm_pool_size=0, server_login_retry=60.0)
    with Client(worker.port) as client:
        client.write(startup(**WHO))
        client.flush()
        eventually(lambda: [one for one in worker.heard if isinstance(one, Met)], "the connect to fail")
        worker.see("pg2")
        client.until(lambda seen: count(seen, "Z") > 0)
        assert client.value("select inet_server_port()") == str(pair[1].port)


# No primary, and one that is down.


@pytest.mark.parametrize("view", [(None, {}), ("pg1", {"pg1": Status.DOWN})], ids=["none", "down"])
def test_without_a_primary_servers_are_left_alone_and_new_ones_wait(worker_of, view):
    primary, states = view
    worker = worker_of(warm_pool_size=0, default_pool_size=2, query_wait_timeout=0.3)
    with login(worker.port) as client, login(worker.port) as other:
        client.ask(query("begin"))
        worker.see(primary, **states)
        assert client.value("select 'unharmed'") == "unharmed"
        seen = other.ask(query("select 1"))
        assert (types(seen), error(seen)["C"], status(seen)) == ("EZ", "57P03", "I")
        assert status(client.ask(query("commit"))) == "I"
        other.mark()
        assert other.value("select 'served by what there is'") == "served by what there is"
        worker.see("pg1")
        assert other.value("select 1") == "1"


# Held.


def test_held_what_runs_ends_and_nothing_begins_until_it_is_over(worker_of):
    worker = worker_of(warm_pool_size=0, default_pool_size=3)
    with login(worker.port) as client, login(worker.port) as other, login(worker.port) as late:
        client.ask(query("begin"))
        worker.see("pg1", held=True)
        for waiting in (other, late):
            waiting.mark()
            waiting.write(query("select 'begun'"))
            waiting.flush()
        eventually(partial(is_waiting, worker, 2), "both to wait")
        assert client.value("select 'goes on'") == "goes on"
        assert status(client.ask(query("commit"))) == "I"
        assert is_waiting(worker, 2), "the server that is free is for nobody"
        worker.see("pg1")
        for waiting in (other, late):
            assert types(answer(waiting)) == "TDCZ"


def test_held_until_another_node_is_primary_nobody_gets_an_error(worker_of, pair):
    worker = worker_of(warm_pool_size=0, default_pool_size=3)
    clients = [login(worker.port) for _ in range(5)]
    for client in clients:
        assert client.value("select 1") == "1"
    worker.see("pg1", held=True)
    for client in clients:
        client.mark()
        client.write(query("select inet_server_port()"))
        client.flush()
    eventually(partial(is_waiting, worker, 5), "all to wait")
    worker.see("pg2", held=True)
    assert worker.servers() == [], "those of the old primary are closed, and none is launched"
    worker.see("pg2")
    for client in clients:
        seen = answer(client)
        assert [one.values for one in seen if one.type == "D"] == [[str(pair[1].port).encode()]]


def test_held_too_long_is_told_as_no_primary(worker_of):
    worker = worker_of(warm_pool_size=0, query_wait_timeout=0.3)
    with login(worker.port) as client:
        worker.see("pg1", held=True)
        seen = client.ask(query("select 1"))
        assert (types(seen), error(seen)["C"]) == ("EZ", "57P03")


# What is met in passing.


def met(worker: WorkerAlone) -> list[tuple[str, str]]:
    return [(record.node, record.what) for record in worker.heard if isinstance(record, Met)]


def test_server_that_ends_is_told_of_once_for_its_node(worker_of, pair):
    worker = worker_of(warm_pool_size=0, default_pool_size=3)
    clients = [login(worker.port) for _ in range(3)]
    for client in clients:
        client.ask(query("begin"))
    pair[0].psql("select pg_terminate_backend(pid, 5000) from pg_stat_activity where state = 'idle in transaction'")
    for client in clients:
        assert error(client.ask(query("select 1")))["C"] == "57P01"
    eventually(lambda: met(worker), "the worker to tell")
    assert set(met(worker)) == {("pg1", "57P01")}


def test_server_that_ends_while_it_idles_is_told_of(worker_of, pair):
    worker = worker_of(warm_pool_size=0)
    with login(worker.port) as client:
        assert client.value("select 1") == "1"
        pair[0].psql("select pg_terminate_backend(pid, 5000) from pg_stat_activity where query = 'select 1'")
        eventually(lambda: met(worker), "the worker to tell")
        assert met(worker)[0][0] == "pg1"


def test_server_that_is_read_only_is_told_of(worker_of):
    worker = worker_of(warm_pool_size=0)
    with login(worker.port) as client:
        client.ask(query("begin read only"))
        assert error(client.ask(query("insert into item values (9, 'x')")))["C"] == "25006"
        eventually(lambda: met(worker) == [("pg1", "25006")], "the worker to tell")


# Warm servers.


def test_standby_that_becomes_the_primary_serves_on_the_session_that_was_ready(worker_of, pair):
    worker = worker_of()
    with login(worker.port) as client:
        assert client.value("select 1") == "1"
        eventually(lambda: [state for state, _ in worker.servers()] == ["idle", "warm"], "a warm server")
        ((_, old), (_, ready)) = worker.servers()
        worker.see("pg2")
        assert client.value("select pg_backend_pid()") == str(ready)
        assert old not in [pid for _, pid in worker.servers()]
        # The old primary is a standby now, and made ready in its turn.
        eventually(lambda: [state for state, _ in worker.servers()] == ["idle", "warm"], "a warm server")


def test_standby_that_becomes_the_primary_serves_who_waits_with_the_session_that_was_ready(worker_of):
    worker = worker_of()
    with login(worker.port) as client, login(worker.port) as waiting:
        client.ask(query("begin"))
        eventually(lambda: "warm" in dict(worker.servers()), "a warm server")
        ready = dict(worker.servers())["warm"]
        waiting.mark()
        waiting.write(query("select pg_backend_pid()"))
        waiting.flush()
        eventually(partial(is_waiting, worker, 1), "the client to wait")
        worker.see("pg2")
        seen = answer(waiting)
        assert [one.values for one in seen if one.type == "D"] == [[str(ready).encode()]]
        assert error(client.ask(query("select 1")))["C"] == "08006"


def test_warm_servers_are_closed_when_their_standby_is_down(worker_of):
    worker = worker_of()
    with login(worker.port) as client:
        assert client.value("select 1") == "1"
        eventually(lambda: "warm" in dict(worker.servers()), "a warm server")
        worker.see("pg1", pg2=Status.DOWN)
        assert "warm" not in dict(worker.servers())


def test_standby_that_refuses_is_nobody_s_trouble(worker_of, pair, standstill):
    standstill.on_accept = lambda _: None
    worker = worker_of(pair[1], standstill)
    with login(worker.port) as client:
        assert client.value("select 1") == "1"
        eventually(lambda: len(standstill.visits) > 0, "the attempt")
        assert client.value("select 'unharmed'") == "unharmed"
        assert [state for state, _ in worker.servers()] == ["idle"]
