"""Limits, users and faulty files under a running gateway: who is connected stays, and a fault changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest

from gateway.embedded import free_ports

from .client import Client, count, eventually, login, types, value
from .endpoints import topology, write_userlist
from .messages import query
from .test_faults import terminate_backends
from .test_limits import sampled, servers
from .test_logins import METHODS, scram_secret, server_asks, user_of
from .test_reload import ADMIN, answer, node, refusal, reload, text_of

pytestmark = pytest.mark.usefixtures("pooler")


# Limits and users.


@pytest.mark.parametrize("workers", [1, 2])
def test_pool_size_lowered_below_what_is_in_use_holds_once_they_are_free(gateway, postgres, database, workers):
    relay = gateway(default_pool_size=4, workers=workers)
    clients = [login(relay.port, user="alice") for _ in range(4)]
    for client in clients:
        client.ask(query("begin"))
    reload(relay, text_of(relay, postgres, "postgres", default_pool_size=1, workers=workers))
    for client in clients:
        assert client.value("select 'goes on'") == "goes on"
    for client in clients:
        assert types(client.ask(query("commit"))) == "CZ"
    each_is_served(clients)
    # None is left where the share of the one moved to another worker just then.
    eventually(lambda: servers(database, "alice") <= 1, "the end of the others")
    with sampled(postgres, "alice", fresh=False) as highest:
        for _ in range(3):
            each_is_served(clients)
    assert highest() == 1
    reload(relay, text_of(relay, postgres, "postgres", default_pool_size=4, workers=workers))
    for client in clients:
        client.mark()
        assert types(client.ask(query("begin"))) == "CZ"
    for client in clients:
        client.close()


def each_is_served(clients: list[Client]) -> None:
    """All at once."""
    for client in clients:
        client.mark()
        client.write(query("select 1"))
        client.flush()
    for client in clients:
        assert count(answer(client), "D") == 1


@pytest.mark.parametrize("method", METHODS)
def test_users_changed_new_logins_follow_the_file_and_the_connected_stay(gateway, postgres, method):
    relay = gateway(auth={"type": method}, userlist={"alice": "wonderland", "bob": "builder"}, default_pool_size=2)
    text = text_of(relay, postgres, "postgres", auth={"type": method}, default_pool_size=2)
    with (
        relay.connect(user="alice", password="wonderland") as alice,
        relay.connect(user="bob", password="builder") as bob,
    ):
        write_userlist(relay.directory, {**ADMIN, "alice": "changed", "carol": scram_secret("sing")})
        reload(relay, text)
        for user, wrong in (("alice", "wonderland"), ("bob", "builder"), ("carol", "changed")):
            with pytest.raises(psycopg.OperationalError, match=f'password authentication failed for user "{user}"'):
                user_of(relay, wrong, user)
        assert "alice" in user_of(relay, "changed")
        assert "carol" in user_of(relay, "sing", "carol")
        for connection, user in ((alice, "alice"), (bob, "bob")):
            assert connection.execute("select current_user").fetchone() == (user,)
        write_userlist(relay.directory, {**ADMIN, "alice": "changed", "bob": "back"})
        reload(relay, text)
        assert "bob" in user_of(relay, "back", "bob")
        with pytest.raises(psycopg.OperationalError, match='password authentication failed for user "carol"'):
            user_of(relay, "sing", "carol")
        assert bob.execute("select current_user").fetchone() == ("bob",)


def test_user_removed_under_trust_is_refused_and_the_connected_stay(gateway, postgres):
    relay = gateway()
    with login(relay.port, user="bob") as bob:
        write_userlist(relay.directory, {**ADMIN, "alice": "wonderland"})
        reload(relay, text_of(relay, postgres, "postgres"))
        assert refusal(relay.port, user="bob", database="postgres")["C"] == "28000"
        assert bob.value("select current_user") == "bob"
        write_userlist(relay.directory, {**ADMIN, "bob": ""})
        reload(relay, text_of(relay, postgres, "postgres"))
        assert value(relay.port, "select current_user", user="bob") == "bob"


def test_auth_type_changed_new_logins_follow_and_the_connected_stay(gateway, postgres):
    relay = gateway(auth={"type": "trust"})
    with login(relay.port, user="alice") as client:
        reload(relay, text_of(relay, postgres, "postgres", auth={"type": "scram-sha-256"}))
        with pytest.raises(psycopg.OperationalError):
            user_of(relay, "wrong")
        assert "alice" in user_of(relay, "wonderland")
        assert client.value("select 1") == "1"


@pytest.mark.parametrize("method", METHODS)
def test_password_changed_on_both_sides_who_is_connected_gets_a_new_server(gateway, postgres, database, method):
    # What an earlier login had shown was preferred to the new password in the file.
    with server_asks(postgres, "scram-sha-256"):
        relay = gateway(auth={"type": method})
        with relay.connect(user="alice", password="wonderland") as connection:
            connection.execute("select 1")
            postgres.psql("alter role alice password 'changed'")
            try:
                write_userlist(relay.directory, {**ADMIN, "alice": "changed"})
                reload(relay, text_of(relay, postgres, "postgres", auth={"type": method}))
                terminate_backends(database, "usename = 'alice'")
                assert connection.execute("select current_user").fetchone() == ("alice",)
            finally:
                postgres.psql("alter role alice password 'wonderland'")


def test_password_of_the_probe_changed_in_the_file_the_node_stays_up(gateway, postgres, database):
    # The probe went on with the password that it was born with.
    rules = {"probe_user": "alice", "probe_interval": 0.1}
    with server_asks(postgres, "scram-sha-256"):
        relay = gateway(cluster=rules)
        eventually(lambda: node(relay)["status"] == "up", "the first probe")
        postgres.psql("alter role alice password 'changed'")
        try:
            write_userlist(relay.directory, {**ADMIN, "alice": "changed"})
            reload(relay, text_of(relay, postgres, "postgres", cluster=rules))
            before = probes(database)
            terminate_backends(database, "application_name = 'gateway probe'")
            eventually(lambda: (new := probes(database)) and new != before, "a new probe")
            assert (node(relay)["status"], node(relay)["reason"] or "") == ("up", "")
        finally:
            postgres.psql("alter role alice password 'wonderland'")


def probes(database) -> set[int]:
    """Process ids of the backends that serve probes."""
    sql = "select pid from pg_stat_activity where application_name = 'gateway probe'"
    return {pid for (pid,) in database.execute(sql)}


# Files with faults.

FAULTS = {
    "toml": ("[front\n", "cannot declare"),
    "type": ('\n[user.x]\npool_size = "many"\n', "user.x.pool_size"),
    "key": ("\n[user.x]\nno_such_setting = 1\n", "user.x.no_such_setting"),
    "cluster": ('\n[database.x]\ncluster = "nowhere"\n', "database.x.cluster"),
    "console": ('\n[database.gateway]\ncluster = "main"\n', "database.gateway"),
    "twice": ('\n[[cluster.main.node]]\nname = "pg1"\nhost = "127.0.0.2"\n', "cluster.main.node[1].name"),
}
USERS_FAULTS = {
    "line": (b'"alice" wonderland\n', "line 1"),
    "twice": (b'"alice" "1"\n"alice" "2"\n', "line 2"),
    "bytes": (b'"alice" "gr\xfc\xdfe"\n', "userlist.txt"),
    "directory": (None, "userlist.txt"),
}


def refuses(relay, told: str) -> None:
    """A reload changes nothing: not by SIGHUP, not on the console, and the log tells why; clients do not notice."""
    config = config_of(relay)
    with login(relay.port) as client, relay.connect(relay.console_database) as console:
        client.ask(query("begin"))
        kept = relay.log.count("the running settings are kept")
        relay.reload()
        eventually(lambda: relay.log.count("the running settings are kept") > kept, "a word of it in the log")
        assert told in relay.log
        with pytest.raises(psycopg.Error, match="RELOAD failed"):
            psycopg.ClientCursor(console).execute("reload")
        assert types(client.ask(query("commit"))) == "CZ"
        assert value(relay.port, "select 1", user="alice") == "1"
    assert config_of(relay) == config
    assert relay.log.count("reloaded ") == 0


def config_of(relay) -> list[dict[str, Any]]:
    return list(relay.console("show config"))


@pytest.mark.parametrize("fault", FAULTS)
def test_topology_with_a_fault_changes_nothing_and_is_logged(gateway, postgres, fault):
    relay = gateway()
    more, told = FAULTS[fault]
    relay.config.write_text(topology(postgres.port, relay.port, default_pool_size=7) + more)
    refuses(relay, told)


def test_topology_that_is_gone_changes_nothing_and_is_logged(gateway):
    relay = gateway()
    relay.config.rename(relay.directory / "elsewhere")
    refuses(relay, "no such file")


@pytest.mark.parametrize("fault", USERS_FAULTS)
def test_users_file_with_a_fault_changes_nothing_and_is_logged(gateway, postgres, fault):
    # A byte that is not UTF-8 ended the supervisor.
    relay = gateway(auth={"type": "trust"})
    data, told = USERS_FAULTS[fault]
    users = Path(relay.directory / "userlist.txt")
    users.unlink()
    if data is None:
        users.mkdir()
    else:
        users.write_bytes(data)
    relay.config.write_text(topology(postgres.port, relay.port, default_pool_size=7))
    refuses(relay, told)


def test_settings_that_need_a_new_start_are_named_and_change_nothing(gateway, postgres):
    relay = gateway()
    with login(relay.port) as client:
        (port,) = free_ports(1)
        reload(relay, text_of(relay, postgres, "postgres", workers=3, listen=[f"127.0.0.1:{port}"]))
        for name in ("front.workers", "front.listen"):
            assert f"{name} has changed: it takes effect at the next start" in relay.log
        assert client.value("select 1") == "1"
        assert value(relay.port, "select 1") == "1"
        assert relay.workers() == relay.expected_workers
        with pytest.raises(ConnectionRefusedError):
            Client(port)
