"""The primary dies, or seems to: who takes over, who must not, and what the clients see of it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psycopg
import pytest

from .client import eventually
from .stage import Stage, Writers

pytestmark = pytest.mark.patient  # a failover under load on two busy cores


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    """Make a stage with settings of its own."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(Stage(tmp_path, **settings))


@pytest.mark.parametrize("fault", ["kill", "pause"])
def test_primary_that_dies_is_replaced_and_nobody_is_dropped(stage, fault):
    made = stage(failover={"rejoin_command": ""})
    idle = [made.gateway.connect() for _ in range(5)]
    inside = [psycopg.connect(made.gateway.dsn()) for _ in range(3)]
    for number, connection in enumerate(inside):
        connection.execute("insert into seen values (-1, %s)", (number,))
    with Writers(made) as writers:
        getattr(made.node("pg1"), fault)()
        new = made.until_primary("pg2", "pg3")
        writers.advance(20)
        if fault == "pause":
            made.node("pg1").resume()
            made.until(lambda view: view["nodes"]["pg1"]["role"] == "false primary", "the old one is found out")
            writers.advance(20)
    assert writers.acknowledged <= made.rows(new)
    assert [len(writers.took_turns()), writers.dropped] == [2, 0]
    assert all(connection.execute("select 1").fetchone() == (1,) for connection in idle)
    for connection in inside:
        with pytest.raises(psycopg.OperationalError) as caught:
            connection.execute("select 1")
        assert caught.value.sqlstate in ("08006", "57P01")
        connection.rollback()
        assert connection.execute("select count(*) from seen where who = -1").fetchone() == (0,)
    for connection in [*idle, *inside]:
        connection.close()
    other = made.node(({"pg2", "pg3"} - {new}).pop())
    eventually(lambda: made.rows(other.name) >= writers.acknowledged, "the other standby follows")
    assert made.view()["epoch"] == 2


def test_old_primary_that_returns_is_rejoined_and_all_of_it_can_happen_again(stage):
    made = stage()
    with Writers(made) as writers:
        for _ in range(2):
            old = made.until_whole()
            made.node(old).kill()
            made.until_primary(*{"pg1", "pg2", "pg3"} - {old})
            made.node(old).start()
        primary = made.until_whole()
        writers.advance()
    assert writers.acknowledged <= made.rows(primary)
    assert len(writers.took_turns()) == 3
    assert writers.dropped == 0


def test_gateway_that_is_killed_in_the_middle_goes_on_when_it_starts_again(stage):
    made = stage()
    made.node("pg1").kill()
    eventually(lambda: "promote pg" in made.gateway.log, "the promotion has begun", 20)
    made.gateway.kill()
    made.start_gateway()
    new = made.until_primary("pg2", "pg3")
    with Writers(made) as writers:
        made.node("pg1").start()
        assert made.until_whole() == new
    assert writers.acknowledged <= made.rows(new)


def test_gateway_that_starts_when_the_primary_is_dead_fails_over_by_what_it_knew(stage):
    made = stage()
    made.gateway.kill()
    made.node("pg1").kill()
    made.start_gateway()
    assert made.until_primary("pg2", "pg3")


def test_gateway_that_never_knew_a_primary_promotes_nobody(stage):
    made = stage()
    made.gateway.stop()
    (made.gateway.config.parent / "topology.toml.main.state").unlink()
    made.node("pg1").kill()
    with pytest.raises(AssertionError, match="a primary"):
        made.start_gateway(deadline=2.0)
    assert [made.node(name).psql("select pg_is_in_recovery()") for name in ("pg2", "pg3")] == ["t", "t"]


# Never a failover.


def terminate_all(made: Stage) -> None:
    made.node("pg1").psql("select pg_terminate_backend(pid) from pg_stat_activity where pid <> pg_backend_pid()")


def terminate_one(made: Stage) -> None:
    made.node("pg1").psql("select pg_terminate_backend(pid) from pg_stat_activity where query like 'insert%' limit 1")


def crash(made: Stage) -> None:
    pid = int(made.node("pg1").psql("select pid from pg_stat_activity where backend_type = 'client backend' limit 1"))
    made.signal(pid, signal.SIGKILL)


def restart_receivers(made: Stage) -> None:
    for name in ("pg2", "pg3"):
        made.signal(int(made.node(name).psql("select pid from pg_stat_wal_receiver")), signal.SIGTERM)


def checkpoint(made: Stage) -> None:
    made.node("pg1").psql("create table big as select g from generate_series(1, 300000) g; checkpoint")


def idle_timeout(made: Stage) -> None:
    made.node("pg1").configure(idle_session_timeout="50ms")


@pytest.mark.parametrize(
    "trouble",
    [terminate_one, terminate_all, crash, restart_receivers, checkpoint, idle_timeout],
    ids=lambda f: f.__name__,
)
def test_trouble_that_is_no_death_is_no_failover(stage, trouble):
    made = stage()
    with Writers(made) as writers:
        trouble(made)
        writers.advance(20)
    assert writers.dropped == 0
    assert made.until_whole() == "pg1"
    assert made.view()["epoch"] == 1


def test_primary_that_is_slow_within_the_limit_is_no_failover(stage):
    made = stage(cluster={"probe_timeout": 10.0})
    with Writers(made, 2) as writers:
        made.node("pg1").pause()
        with pytest.raises(psycopg.errors.ConnectionTimeout):
            psycopg.connect(f"host=127.0.0.1 port={made.node('pg1').port} user=postgres", connect_timeout=2)
        made.node("pg1").resume()
        writers.advance(20)
    assert [writers.errors, writers.dropped, made.view()["epoch"]] == [[], 0, 1]


def test_primary_without_a_free_connection_is_saturated(stage):
    made = stage(front={"min_pool_size": 1})
    with Writers(made, 2) as writers:
        crowd = []
        with suppress(psycopg.OperationalError):
            while True:
                crowd.append(psycopg.connect(f"host=127.0.0.1 port={made.node('pg1').port} user=postgres"))
        made.until(lambda view: view["nodes"]["pg1"]["status"] == "saturated", "it is found to be full")
        writers.advance(20)
        for connection in crowd:
            connection.close()
        assert made.until_whole() == "pg1"
    assert made.view()["epoch"] == 1


def test_password_of_the_probe_that_changes_is_told_and_no_failover(stage):
    made = stage(cluster={"probe_user": "prober", "probe_password": "before"})
    for node in made.cluster.nodes:
        node.hba(["host all prober 127.0.0.1/32 scram-sha-256", "host all all 127.0.0.1/32 trust"])
    made.node("pg1").psql("alter role prober password 'after'")
    made.node("pg1").psql("select pg_terminate_backend(pid) from pg_stat_activity where usename = 'prober'")
    view = made.until(lambda view: view["nodes"]["pg1"]["status"] == "misconfigured", "it is told")
    assert "password" in view["nodes"]["pg1"]["reason"]
    with Writers(made, 2) as writers:
        writers.advance(20)
    assert made.view()["epoch"] == 1


def test_standby_that_dies_disturbs_nobody(stage):
    made = stage()
    with Writers(made) as writers:
        made.node("pg3").kill()
        made.until(lambda view: view["nodes"]["pg3"]["status"] == "down", "it is found dead")
        writers.advance(20)
    assert [writers.errors, made.view()["primary"]] == [[], "pg1"]


# Partitions.


def test_primary_that_only_the_gateway_does_not_reach_stays(stage):
    made = stage(links=True)
    with Writers(made) as writers:
        made.links["pg1"].partition(frozenset({"gateway"}))
        view = made.until(lambda view: "receive from pg1" in view["hindrance"], "it is told why nobody is promoted")
        assert view["nodes"]["pg1"]["status"] == "down"
        made.links["pg1"].heal()
        assert made.until_whole() == "pg1"
        writers.advance(5)
    assert len(writers.took_turns()) == 1


def test_primary_that_nobody_reaches_is_replaced_and_found_out_when_it_is_back(stage):
    made = stage(links=True)
    with Writers(made) as writers:
        made.links["pg1"].partition()
        new = made.until_primary("pg2", "pg3")
        writers.advance(5)
        made.links["pg1"].heal()
        assert made.until_whole() == new
        writers.advance(5)
    assert writers.acknowledged <= made.rows(new)
    assert len(writers.took_turns()) == 2


def test_standbys_that_lose_the_primary_do_not_matter_while_it_answers(stage):
    made = stage(links=True, synchronous="")
    with Writers(made) as writers:
        made.links["pg1"].partition(frozenset({"standbys"}))
        made.until(lambda view: "does not receive" in view["nodes"]["pg2"]["reason"], "it is seen")
        writers.advance(20)
        made.links["pg1"].heal()
        assert made.until_whole() == "pg1"


# Split brain.


def test_node_that_is_promoted_by_hand_while_the_primary_lives_gets_no_write_even_later(stage):
    made = stage(failover={"rejoin_command": ""})
    with Writers(made) as writers:
        made.node("pg2").promote()
        made.until(lambda view: view["nodes"]["pg2"]["role"] == "false primary", "it is found out")
        writers.advance(20)
        made.gateway.kill()
        made.start_gateway()
        made.until_primary("pg1")
        made.until(lambda view: view["nodes"]["pg2"]["role"] == "false primary", "it is found out again")
        writers.advance(5)
        made.node("pg1").kill()
        view = made.until(lambda view: view["hindrance"] != "", "it is told why nobody is promoted")
        assert view["primary"] == "pg1"
        made.node("pg1").start()
        made.until_primary("pg1")
        writers.advance(5)
    assert len(writers.took_turns()) == 1
    assert not writers.acknowledged & made.rows("pg2") - made.rows("pg1")


# Rules and orders.


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"failover": {"mode": "follow"}}, "somebody else promotes"),
        ({"failover": {"quorum": 3}}, "2 of 3 nodes are seen, 3 have to be"),
        ({"failover": {"fence_command": "exit 3"}}, "fence_command failed"),
        ({"failover": {"fence_command": "sleep 60", "command_timeout": 0.5}}, "did not end within 0.5 s"),
    ],
)
def test_failover_that_is_not_allowed_parks_the_clients_until_their_limit(stage, settings, reason):
    made = stage(front={"query_wait_timeout": 1.0}, **settings)
    client = made.gateway.connect()
    made.node("pg1").kill()
    made.until(lambda view: view["nodes"]["pg1"]["status"] == "down", "it is found dead")
    if settings["failover"].get("mode") != "follow":
        made.until(lambda view: reason in view["hindrance"], "it is told why")
    with pytest.raises(psycopg.OperationalError) as caught:
        client.execute("insert into seen values (0, 0)")
    assert caught.value.sqlstate == "57P03"
    made.node("pg1").start()
    made.until_primary("pg1")
    assert client.execute("insert into seen values (0, 0)").rowcount == 1
    client.close()


def test_fence_command_runs_first_and_knows_the_old_primary(stage, tmp_path):
    said = tmp_path / "said"
    made = stage(failover={"fence_command": f"echo {{name}} {{host}} {{port}} > {said}"})
    made.node("pg1").kill()
    made.until_primary("pg2", "pg3")
    assert said.read_text() == f"pg1 127.0.0.1 {made.node('pg1').port}\n"


def test_mode_command_promotes_by_the_command(stage):
    made = stage(failover={"mode": "command", "failover_command": "true", "promote_timeout": 20.0})
    made.node("pg1").kill()
    eventually(lambda: "failover_command: true" in made.gateway.log, "it is run", 20)
    chosen = "pg2" if "promote pg2" in made.gateway.log else "pg3"
    made.node(chosen).promote()
    assert made.until_primary("pg2", "pg3") == chosen


def test_paused_failover_waits_until_it_goes_on_again_over_a_restart(stage):
    made = stage()
    made.console("pause failover")
    made.gateway.kill()
    made.start_gateway()
    made.node("pg1").kill()
    made.until(lambda view: view["hindrance"] == "failover is paused", "it is told why")
    made.console("resume failover main")
    made.until_primary("pg2", "pg3")


def test_detached_standby_is_not_promoted(stage):
    made = stage()
    made.console("detach pg2")
    made.node("pg1").kill()
    assert made.until_primary("pg2", "pg3") == "pg3"


def test_priority_decides_between_standbys_that_got_equally_far(stage):
    made = stage(nodes={"pg3": {"priority": 200}})
    made.node("pg1").kill()
    assert made.until_primary("pg2", "pg3") == "pg3"


def test_standby_that_lacks_what_was_acknowledged_is_never_chosen(stage):
    made = stage(links=True, failover={"quorum": 1})
    with Writers(made, 4) as writers:
        made.node("pg2").configure(primary_conninfo="host=/nowhere")
        eventually(lambda: made.node("pg2").psql("select count(*) from pg_stat_wal_receiver") == "0", "it is cut off")
        writers.advance(5)
        made.node("pg1").kill()
        new = made.until_primary("pg2", "pg3")
        writers.advance(5)
    assert new == "pg3"
    assert writers.acknowledged <= made.rows("pg3")


def test_without_every_member_that_may_have_the_last_commit_nobody_is_promoted_but_by_order(stage):
    made = stage(failover={"quorum": 1})
    made.node("pg3").kill()
    made.node("pg1").kill()
    made.until(lambda view: "acknowledged commit" in view["hindrance"], "it is told why")
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="does not answer"):
        made.console("promote pg3")
    made.console("promote pg2")
    assert made.until_primary("pg2") == "pg2"


def test_switchover_is_seen_by_nobody(stage):
    made = stage()
    idle = [made.gateway.connect() for _ in range(5)]
    with Writers(made) as writers:
        made.console("switchover pg3")
        assert made.view()["primary"] == "pg3"
        writers.advance(5)
        assert made.until_whole() == "pg3"
        # Not below the old primary, which may be taken away now.
        eventually(lambda: str(made.node("pg3").port) in made.node("pg2").psql("show primary_conninfo"), "pg2 is led")
        made.console("switchover")
        new = made.until_whole()
        writers.advance(5)
    assert new != "pg3"
    assert [writers.errors, writers.dropped] == [[], 0]
    assert writers.acknowledged <= made.rows(new)
    for connection in idle:
        assert connection.execute("select 1").fetchone() == (1,)
        connection.close()


def test_switchover_waits_for_transactions_and_gives_up_at_its_limit(stage):
    made = stage(failover={"switchover_timeout": 0.5})
    inside = psycopg.connect(made.gateway.dsn())
    inside.execute("insert into seen values (-1, 0)")
    with Writers(made) as writers:
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="still run after"):
            made.console("switchover pg2")
        assert made.view()["primary"] == "pg1"
        writers.advance(5)
        inside.commit()
        inside.execute("insert into seen values (-1, 1)")
        made.console("switchover pg2 force")
        with pytest.raises(psycopg.OperationalError):
            inside.execute("select 1")
        inside.rollback()
        assert inside.execute("select n from seen where who = -1").fetchall() == [(0,)]
    inside.close()
    assert [writers.errors, writers.dropped] == [[], 0]


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ("switchover pg1", "pg1 is the primary"),
        ("switchover pg9", "pg9 is in no cluster"),
        ("promote pg2", "pg1 is up"),
        ("detach pg1", "use SWITCHOVER first"),
        ("pause failover other", "there is no cluster other"),
    ],
)
def test_order_that_cannot_be_followed_is_refused_with_the_reason(stage, order, reason):
    with pytest.raises(psycopg.Error, match=reason):
        stage().console(order)


def test_switchover_without_a_way_to_demote_is_refused(stage):
    made = stage(failover={"demote_command": ""})
    with pytest.raises(psycopg.Error, match="demote_command is not set"):
        made.console("switchover pg2")


def test_demote_command_that_fails_changes_nothing(stage):
    made = stage(failover={"demote_command": "echo no such host >&2; exit 1"})
    with Writers(made) as writers:
        with pytest.raises(psycopg.Error, match="demote_command ended with exit code 1"):
            made.console("switchover pg2")
        writers.advance(5)
    assert "demote_command: no such host" in made.gateway.log
    assert [made.view()["primary"], writers.errors] == ["pg1", []]


def test_cascade_is_left_alone(stage):
    made = stage(standbys=3, synchronous="")
    made.node("pg4").follow(made.node("pg3"))
    eventually(lambda: made.node("pg3").psql("select count(*) from pg_stat_replication") == "1", "pg4 follows pg3")
    made.node("pg1").kill()
    made.until_primary("pg2", "pg3")
    made.until(lambda view: view["nodes"]["pg4"]["reason"] == "", "pg4 receives")
    assert str(made.node("pg3").port) in made.node("pg4").psql("show primary_conninfo")
