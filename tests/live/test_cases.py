"""Cases that broke other poolers: who an error, a name and a limit belong to, whatever server there is.

Manual: "Extended Query", SET, PREPARE, DEALLOCATE.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from . import player
from .client import Client, count, error, eventually, login, types, value
from .endpoints import Endpoint
from .messages import (
    Message,
    bind,
    close_statement,
    describe_portal,
    describe_statement,
    execute,
    parse,
    query,
    run,
    sync,
)
from .player import normalised

OWN: dict[str, Any] = {"ignore": "FLRP", "reason": "the gateway knows the client's names, and answers in its own place"}
FLOAT8 = 701


def use(name: str, *values: int | str) -> bytes:
    """Bind, Describe and Execute a statement that was parsed before, with its Sync."""
    return bind(*values, statement=name) + describe_portal() + execute() + sync()


def answered(seen: list[Message]) -> list[list[bytes | None]]:
    """The rows of an answer that must not be an error."""
    assert count(seen, "E") == 0, list(map(str, seen))
    return [one.values for one in seen if one.type == "D"]


def replace_servers(database) -> None:
    """End all servers of the user postgres and wait until they are gone: whatever comes next gets a new one."""
    database.execute(
        "select pg_terminate_backend(pid, 5000) from pg_stat_activity"
        " where backend_type = 'client backend' and application_name <> all(%s) and usename = 'postgres'",
        (["bench", "gateway probe"],),
    )


# Who an error belongs to.

GONE = {
    "role": ("create role passing", "drop role passing", {"role": "passing"}),
    "tablespace": (
        "set allow_in_place_tablespaces to on; create tablespace passing location ''",
        "drop tablespace passing",
        {"default_tablespace": "passing"},
    ),
    "schema": ("create schema passing", "drop schema passing", {"search_path": "passing, pg_catalog"}),
}


@contextmanager
def made(database, make: str, drop: str) -> Iterator[None]:
    """Something in the database for as long as it lasts."""
    for command in make.split("; "):
        database.execute(command)
    try:
        yield
    finally:
        database.execute(drop)


@pytest.mark.parametrize(("make", "drop", "startup"), GONE.values(), ids=GONE)
def test_setting_that_is_refused_by_then_concerns_its_own_client_only(pool_of_one, database, make, drop, startup):
    # A setting that is replayed late: its error reached whoever came next.
    (name,) = startup
    clean = value(pool_of_one.port, f"show {name}")
    with made(database, make, drop):
        one, two = login(pool_of_one.port, **startup), login(pool_of_one.port)
        kept = one.value(f"show {name}")
        assert two.value(f"show {name}") == clean
    look = f"select current_setting('{name}')"
    for request, ready in ((query(look), 1), (run(look) + sync(), 1), (query(look) * 3, 3)):
        seen = one.ask(request, ready)
        assert (count(seen, "D") + count(seen, "E"), count(seen, "Z")) == (ready, ready), types(seen)
        assert {refused.fields["C"] for refused in seen if refused.type == "E"} <= {"22023", "42704"}
        assert {row.values[0] for row in seen if row.type == "D"} <= {str(kept).encode()}
        assert two.rows(f"{look}, current_user") == [(clean, "postgres")]
        assert answered(two.ask(run("select 'unharmed'") + sync())) == [[b"unharmed"]]
    assert value(pool_of_one.port, f"show {name}") == clean
    with made(database, make, drop):
        assert (one.value(f"show {name}"), two.value(f"show {name}")) == (kept, clean)
        one.close()
        two.close()
        replace_servers(database)


@pytest.mark.parametrize(("make", "drop", "startup"), list(GONE.values())[:2], ids=list(GONE)[:2])
def test_setting_that_was_good_once_is_refused_when_it_is_no_more(relay, database, make, drop, startup):
    # What was tried for an earlier client is not true for ever: the first to come finds out, and is told by its query.
    with made(database, make, drop):
        assert value(relay.port, "select 1", **startup) == "1"
    replace_servers(database)  # one that is set so already goes on
    with login(relay.port, **startup) as late:
        assert "passing" in error(late.ask(query("select 1")))["M"]
    with pytest.raises(AssertionError, match=r"login refused.*passing"):
        login(relay.port, **startup)


@pytest.mark.parametrize("command", ["set timezone to 'No/Where'", "set role nobody"])
def test_set_that_fails_is_told_at_once_and_to_nobody_else(pool_of_one, command):
    with login(pool_of_one.port, TimeZone="Asia/Tokyo") as one, login(pool_of_one.port) as two:
        clean = two.value("show timezone")
        for request in (query(command), run(command) + sync()):
            assert error(one.ask(request))["C"] == "22023"
            assert two.rows("select current_setting('timezone'), current_user") == [(clean, "postgres")]
            assert one.rows("select current_setting('timezone'), current_user") == [("Asia/Tokyo", "postgres")]


def test_parse_that_fails_on_another_server_is_told_to_its_own_client_only(pool_of_one, database):
    # A statement is prepared again on a new server, where its table is gone.
    database.execute("drop table if exists passing; create table passing as select 7 as n")
    with login(pool_of_one.port) as one, login(pool_of_one.port) as two:
        for client in (one, two):
            client.ask(parse("select n from passing", "s") + parse("select 'other'", "o") + sync())
            assert answered(client.ask(use("s") + use("o"), 2)) == [[b"7"], [b"other"]]
        replace_servers(database)
        database.execute("drop table passing")
        for _ in range(2):
            seen = one.ask(use("o") + use("s") + use("o"), 3)
            assert (types(seen), error(seen)["C"]) == ("2TDCZEZ2TDCZ", "42P01")
            assert answered(two.ask(use("o") + query("select 1"), 2)) == [[b"other"], [b"1"]]
        assert types(one.ask(query("begin") + use("s") + use("o") + query("commit"), 4)) == "CZEZEZCZ"
        assert types(two.ask(use("o"))) == "2TDCZ"
        database.execute("create table passing as select 8 as n")
        for client in (two, one):
            assert answered(client.ask(use("s") + use("o"), 2)) == [[b"8"], [b"other"]]
    database.execute("drop table passing")


READ_BY = {
    "DateStyle": ("select '1/2/2000'::date - date '2000-01-01'", "ISO, DMY", "ISO, MDY"),
    "TimeZone": ("select extract(epoch from '2000-01-01 00:00'::timestamptz)", "UTC", "Asia/Tokyo"),
    "IntervalStyle": ("select extract(epoch from interval '-1 2:00')", "postgres", "sql_standard"),
    "standard_conforming_strings": (r"select '\\'", "on", "off"),
    "client_encoding": ("select length('é')", "UTF8", "LATIN1"),
    "search_path": ("select * from same", "one", "two"),
    "search_path, other columns": ("select * from other", "one", "two"),
}


@pytest.mark.parametrize("name", READ_BY)
def test_same_text_under_other_settings_is_another_statement(relay, postgres, database, name):
    # What a text means is settled when it is parsed: clients that share a statement must read it alike.
    database.execute("drop schema if exists one, two cascade; create schema one; create schema two")
    database.execute("create table one.same as select 1; create table two.same as select 2")
    database.execute("create table one.other as select 1 as a; create table two.other as select 'two' as a, 2 as b")
    text, here, there = READ_BY[name]
    setting = name.split(",")[0]
    answers = []
    for port in (postgres.port, relay.port):
        clients = [login(port, **{setting: given}) for given in (here, there)]  # type: ignore[arg-type]
        seen = [client.ask(parse(text, "s") + use("s")) for client in clients]
        seen += [client.ask(use("s")) for client in clients * 2]
        answers.append([list(map(normalised, one)) for one in seen])
        for client in clients:
            client.close()
    database.execute("drop schema one, two cascade")
    assert answers[1] == answers[0]


# Who a name belongs to.


def names_on_server(client: Client) -> dict[str, str]:
    """What the statements on the server that a client gets now are called, by their texts."""
    return {str(text): str(name) for text, name in client.rows("select statement, name from pg_prepared_statements")}


@pytest.fixture
def shared(pooler, gateway) -> Iterator[tuple[Client, Client, str]]:
    """Two clients on one server, and what one could guess that the gateway calls the other's "s": select 'mine'."""
    relay = gateway()
    with login(relay.port) as one, login(relay.port) as two:
        one.ask(parse("select 'mine'", "s") + sync())
        yield one, two, "gateway_1"


@pytest.mark.parametrize("command", ["execute {}", "deallocate {}", 'deallocate prepare "{}"'])
def test_name_that_the_gateway_gave_is_unknown_in_sql(shared, command):
    # It names somebody else's statement.
    one, two, name = shared
    for request in (query(command.format(name)), run(command.format(name)) + sync()):
        seen = two.ask(request)
        assert answered(one.ask(use("s"))) == [[b"mine"]]
        assert error(seen)["C"] == "26000"


def test_name_that_the_gateway_gave_is_unknown_in_the_protocol(shared):
    one, two, name = shared
    for request in (use(name), describe_statement(name) + sync(), close_statement(name) + sync()):
        seen = two.ask(request)
        assert answered(one.ask(use("s"))) == [[b"mine"]]
        assert types(seen) == "3Z" or error(seen)["C"] == "26000", types(seen)


def test_name_as_the_gateway_gives_them_may_be_a_clients_own(shared):
    one, two, name = shared
    for client in (two, one):
        assert answered(client.ask(parse("select 'yours'", name) + use(name))) == [[b"yours"]]
        assert error(client.ask(parse("select 'again'", name) + use(name)))["C"] == "42P05"
        assert answered(client.ask(use(name))) == [[b"yours"]]
        assert answered(one.ask(use("s"))) == [[b"mine"]]
        assert types(client.ask(query(f"deallocate {name}"))) == "CZ"
        assert answered(one.ask(use("s"))) == [[b"mine"]]


def test_sql_prepare_of_a_name_as_the_gateway_gives_them_hits_nobody_else(shared):
    # The next statement that the gateway prepares would have this name: 42P05 on whoever needs it.
    one, two, name = shared
    head, number = name.rsplit("_", 1)
    for later in range(1, 4):
        two.ask(query(f"prepare {head}_{int(number) + later} as select 'taken'"))
    for later in range(1, 4):
        seen = one.ask(parse(f"select 'new {later}'", f"n{later}") + use(f"n{later}"))
        assert answered(seen) == [[f"new {later}".encode()]]


def test_sql_prepare_and_protocol_statement_of_one_name_are_one_name(gateway, postgres):
    script = [
        [query("prepare p as select 'by SQL'"), query("prepare p as select 'twice'")],
        [parse("select 'by protocol'", "p"), sync()],
        [use("p"), query("execute p"), query("deallocate p")],
        [parse("select 'by protocol'", "p"), use("p"), query("prepare p as select 'by SQL'"), query("execute p")],
        [query("deallocate p"), use("p"), query("execute p")],
    ]
    player.compare(postgres.port, gateway(pool_mode="session").port, script)


def test_sql_prepare_and_protocol_statements_of_other_names_mix(gateway, postgres):
    script = [
        [query("prepare p as select 'by SQL'"), query("prepare p as select 'twice'")],
        [parse("select 'by protocol'", "s"), use("s"), query("execute p"), query("execute s")],
        [run("execute p"), sync(), run("execute s"), sync(), use("s")],
        [query("deallocate p"), query("prepare p as select 'again'"), query("execute p"), use("s")],
        [query("deallocate all"), query("execute p"), use("s"), query("prepare p as select 3"), query("deallocate p")],
    ]
    player.compare(postgres.port, gateway().port, script, **OWN)


@pytest.mark.parametrize("mode", ["session", "transaction"])
@pytest.mark.parametrize("name", ["a", "A", "A b", 'q"q', "ü", "gateway_1", "select", "x" * 63])
def test_deallocate_by_any_spelling_of_the_name_answers_as_postgres(gateway, postgres, mode, name):
    script = []
    for spelled in ('"' + name.replace('"', '""') + '"', name, name.upper()):
        for request in (query(f"deallocate {spelled}"), run(f"DEALLOCATE PREPARE {spelled} ;") + sync()):
            script += [[parse("select 1", name), use(name), request, use(name), query("deallocate all")]]
    relay = gateway(pool_mode=mode)
    player.compare(postgres.port, relay.port, script, ways=["whole", "at random, seed 1"], **OWN)


@pytest.mark.parametrize(
    ("mode", "text"),
    [  # In transaction mode a name is recognized in a statement that comes alone.
        ("session", "deallocate a; deallocate b"),
        ("session", "select 1; deallocate all; select 2"),
        ("transaction", "select 1; deallocate all; select 2"),
    ],
)
def test_deallocate_among_other_statements_answers_as_postgres(gateway, postgres, mode, text):
    script = [
        [parse("select 1", "a"), parse("select 2", "b"), parse("select 3", "c"), sync()],
        [query(text)],
        [use("a"), use("b"), use("c")],
        [query("deallocate all"), parse("select 4", "c"), use("c")],
    ]
    player.compare(postgres.port, gateway(pool_mode=mode).port, script, **OWN)


# Pool modes side by side, and servers that are replaced.


def test_pool_mode_of_user_decides_whose_statements_are_renamed(gateway):
    # The override of a user was not seen by what renames prepared statements.
    relay = gateway(
        pool_mode="session",
        default_pool_size=2,
        user={"alice": {"pool_mode": "session"}, "bob": {"pool_mode": "transaction", "pool_size": 1}},
        database={"shop": {"pool_mode": "transaction"}},
    )
    clients = {
        (user, number): login(relay.port, user=user, database="shop") for user in ("alice", "bob") for number in (1, 2)
    }
    for (user, number), client in clients.items():
        assert types(client.ask(parse(f"select '{user} {number}'", "s") + sync())) == "1Z"
    for _ in range(3):
        for (user, number), client in clients.items():
            expected = [[f"{user} {number}".encode()]]
            assert answered(client.ask(use("s"))) == expected
            assert answered(client.ask(query("execute s"))) == expected
            assert (names_on_server(client)[f"select '{user} {number}'"] == "s") == (user == "alice")
    for user in ("alice", "bob"):
        assert types(clients[user, 1].ask(query("deallocate s"))) == "CZ"
        assert error(clients[user, 1].ask(use("s")))["C"] == "26000"
        assert answered(clients[user, 2].ask(use("s"))) == [[f"{user} 2".encode()]]
    for client in clients.values():
        client.close()
    with login(relay.port, user="alice", database="shop") as new:
        assert error(new.ask(use("s")))["C"] == "26000"


def is_mode(relay: Endpoint, user: str, mode: str) -> bool:
    """Are all pools of a user in a mode now?"""
    return {row["pool_mode"] for row in relay.console("show pools") if row["user"] == user} == {mode}


def test_pool_mode_changed_by_reload_leaves_statements_usable_and_state_apart(gateway):
    settings = {"default_pool_size": 2, "user": {"bob": {"pool_mode": "session"}}}
    relay = gateway(**settings)
    with login(relay.port, user="bob") as early:
        early.ask(parse("select 'early'", "s") + use("s") + query("set statement_timeout to '7s'"), 2)
        settings["user"] = {"bob": {"pool_mode": "transaction"}}
        relay.configure(**settings)
        eventually(lambda: is_mode(relay, "bob", "transaction"), "the reload")
        assert answered(early.ask(use("s"))) == [[b"early"]]
        with login(relay.port, user="bob") as late:
            for client in (late, early):
                client.ask(parse("select 'text'", "t") + sync())
            for _ in range(2):
                assert late.value("show statement_timeout") == "0"
                assert error(late.ask(use("s")))["C"] == "26000"
                assert answered(early.ask(use("t"))) == answered(late.ask(use("t"))) == [[b"text"]]


def test_statement_is_prepared_again_on_each_new_server(pooler, gateway, database):
    # A new server has none of the statements, and other clients' on it have other names.
    relay = gateway(default_pool_size=1)
    with login(relay.port) as one, login(relay.port) as two:
        texts = {client: [f"select '{who} {n}'" for n in range(3)] for client, who in ((one, "one"), (two, "two"))}
        for client, own in texts.items():
            client.ask(b"".join(parse(text, f"s{n}") for n, text in enumerate(own)) + sync())
        for number, client in itertools.product(range(3), (one, two, two, one)):
            replace_servers(database)
            text = texts[client][number]
            assert answered(client.ask(use(f"s{number}") * 2, 2)) == [[text.split("'")[1].encode()]] * 2
            assert client.rows("select statement from pg_prepared_statements") == [(text,)]
        replace_servers(database)
        # In a transaction the first use is behind BEGIN; what fails there is undone, and prepared again after it.
        failing = query("begin") + run("select 1/0") + sync() + use("s1") + query("rollback") + use("s1") + use("s2")
        assert types(one.ask(failing, 6)) == "CZ1EZEZCZ2TDCZ2TDCZ"
        assert len(one.rows("select statement from pg_prepared_statements")) == 2


def test_statement_on_a_server_that_is_ended_at_any_moment_is_never_another(pooler, gateway, database):
    relay = gateway(default_pool_size=2)
    clients = [login(relay.port) for _ in range(3)]
    for number, client in enumerate(clients):
        client.ask(parse(f"select 'client {number}'", "s") + sync())
    for _ in range(12):
        for client in clients:
            client.mark()
            client.write(use("s") * 3)
            client.flush()
        replace_servers(database)
        for number, client in enumerate(clients):
            seen = client.until(lambda seen: count(seen, "Z") == 3)
            assert {one.fields["C"] for one in seen if one.type == "E"} <= {"57P01", "08006"}
            assert {one.body[6:] for one in seen if one.type == "D"} <= {f"client {number}".encode()}
            assert count(seen, "D") + count(seen, "E") == 3
    for client in clients:
        client.close()


@pytest.mark.parametrize("end", ["server ended", "query timeout"])
def test_pipeline_behind_a_statement_prepared_again_goes_on_when_its_server_is_lost(gateway, database, end):
    # What follows waits until PostgreSQL has taken the Parse that was put in; it must not wait for ever.
    relay = gateway(query_timeout=0.5 if end == "query timeout" else 0)
    with login(relay.port) as client:
        client.ask(parse("select pg_sleep($1)", "s", [FLOAT8]) + sync())
        replace_servers(database)
        client.mark()
        client.write(use("s", 30) + use("s", 0) + query("select 'last'"))
        client.flush()
        if end == "server ended":
            sleeping = "select count(*) from pg_stat_activity where query = 'select pg_sleep($1)' and state = 'active'"
            eventually(lambda: database.execute(sleeping).fetchone() == (1,), "the statement to run")
            replace_servers(database)
        seen = client.until(lambda seen: count(seen, "Z") == 3)
        kept = [one for one in seen if one.type in "EDZ"]
        if end == "query timeout":
            assert (types(kept), error(seen)["C"]) == ("EZDZDZ", "57014")
        else:  # what its server had got already is lost with it
            assert types(kept).replace("D", "E") == "EZEZEZ"
            assert {one.fields["C"] for one in kept if one.type == "E"} == {"57P01"}


# Two names for one thing.


def test_forced_user_and_that_user_itself_share_a_pool_and_stay_two(gateway):
    relay = gateway(database={"store": {"dbname": "shop", "user": "alice"}})
    with (
        login(relay.port, database="store", user="bob", TimeZone="Asia/Tokyo") as forced,
        login(relay.port, database="store", user="alice") as own,
        login(relay.port, database="shop", user="alice") as elsewhere,
    ):
        clients = {"forced": forced, "own": own, "elsewhere": elsewhere}
        for name, client in clients.items():
            client.ask(parse(f"select '{name}', current_user, current_database()", "s") + sync())
        for _ in range(3):
            for name, client in clients.items():
                assert answered(client.ask(use("s"))) == [[name.encode(), b"alice", b"shop"]]
        assert forced.value("show timezone") == "Asia/Tokyo" != own.value("show timezone")
        pids = [client.value("select pg_backend_pid()") for client in clients.values()]
        assert pids[0] == pids[1] != pids[2]
        own.ask(query("begin"))
        forced.write(query("select 'patient'"))
        forced.flush()
        forced.mark()
        own.ask(query("commit"))
        assert types(forced.until(lambda seen: count(seen, "Z") > 0)) == "TDCZ"


@pytest.mark.parametrize("first", ["alice", "bob"])
def test_limit_of_a_client_user_holds_for_that_user_alone_in_a_shared_pool(gateway, first):
    # Both are one user on the server, whoever came first.
    relay = gateway(
        default_pool_size=2,
        database={"store": {"dbname": "shop", "user": "postgres"}},
        user={"bob": {"max_user_client_connections": 1}},
    )
    opened = [login(relay.port, database="store", user=first)]
    if first != "bob":
        opened.append(login(relay.port, database="store", user="bob"))
    with pytest.raises(AssertionError, match="max_user_client_connections"):
        login(relay.port, database="store", user="bob")
    opened += [login(relay.port, database="store", user="alice") for _ in range(3)]
    assert {client.value("select current_user") for client in opened} == {"postgres"}
    for client in opened:
        client.close()


def test_databases_that_are_one_on_the_server_keep_their_users_apart(gateway, database):
    database.execute("drop role if exists ann, ben; create role ann login; create role ben login")
    relay = gateway(
        database={"first": {"dbname": "shop", "user": "ann"}, "second": {"dbname": "shop", "user": "ben"}},
    )
    with login(relay.port, database="first") as one, login(relay.port, database="second") as two:
        for client in (one, two):
            client.ask(parse("select current_user, current_database()", "s") + sync())
        for _ in range(3):
            assert answered(one.ask(use("s"))) == [[b"ann", b"shop"]]
            assert answered(two.ask(use("s"))) == [[b"ben", b"shop"]]
