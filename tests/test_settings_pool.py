"""What holds for a client of a pool: user before database before front, for each value."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.pool_settings import pool_settings
from gateway.settings import Cluster, Database, Front, Listen, Node, PoolMode, PoolSettings, Reads, Settings, User

FRONT = Front(listen=(Listen(host="127.0.0.1", port=6432),), query_wait_timeout=9.0, server_lifetime=8.0)


def _settings(database: dict[str, Database], user: dict[str, User] | None = None, front: Front = FRONT) -> Settings:
    cluster = Cluster(node=(Node(name="a", host="10.0.0.1"),), reads=Reads.BALANCED)
    return Settings(front=front, cluster={"main": cluster}, database=database, user=user or {})


def _resolve(settings: Settings, database: str = "shop", user: str = "app") -> PoolSettings:
    found = pool_settings(settings, database, user)
    assert found is not None
    return found


def test_database_without_entry_is_unknown():
    assert pool_settings(_settings({"shop": Database(cluster="main")}), "other", "app") is None


def test_database_without_entry_but_star_keeps_its_own_name():
    found = _resolve(_settings({"*": Database(cluster="main")}))
    assert (found.database, found.dbname, found.cluster, found.server_user) == ("shop", "shop", "main", "app")


def test_database_with_entry_and_star_takes_its_entry():
    settings = _settings({"*": Database(cluster="main"), "shop": Database(cluster="main", dbname="sales")})
    assert _resolve(settings).dbname == "sales"


@pytest.mark.parametrize("name", ["gateway", "pgbouncer"])
def test_console_database_under_star_is_no_pool(name):
    assert pool_settings(_settings({"*": Database(cluster="main")}), name, "app") is None


def test_front_alone_gives_every_value():
    found = _resolve(_settings({"shop": Database(cluster="main")}))
    for name in set(PoolSettings.__struct_fields__) & set(Front.__struct_fields__):
        assert getattr(found, name) == getattr(FRONT, name), name
    assert (found.pool_size, found.reads, found.password, found.node) == (20, Reads.BALANCED, None, None)
    assert (found.startup, found.connect_query, found.forced_user) == ((), None, False)


def test_database_value_wins_over_front():
    own: dict[str, Any] = {
        "pool_mode": PoolMode.SESSION,
        "pool_size": 1,
        "min_pool_size": 2,
        "reserve_pool_size": 3,
        "max_db_connections": 4,
        "max_db_client_connections": 5,
        "query_wait_timeout": 6.0,
        "server_lifetime": 7.0,
        "connect_query": "select 8",
        "node": "a",
    }
    found = _resolve(_settings({"shop": Database(cluster="main", **own)}))
    assert {name: getattr(found, name) for name in own} == own


def test_user_value_wins_over_database_and_front():
    own: dict[str, Any] = {
        "pool_mode": PoolMode.STATEMENT,
        "pool_size": 11,
        "reserve_pool_size": 12,
        "max_user_connections": 13,
        "max_user_client_connections": 14,
        "query_timeout": 15.0,
        "query_wait_timeout": 16.0,
        "transaction_timeout": 17.0,
        "idle_transaction_timeout": 18.0,
        "client_idle_timeout": 19.0,
        "reads": Reads.STANDBY,
    }
    database = Database(
        cluster="main", pool_mode=PoolMode.SESSION, pool_size=1, reserve_pool_size=2, query_wait_timeout=3.0
    )
    found = _resolve(_settings({"shop": database}, {"app": User(**own)}))
    assert {name: getattr(found, name) for name in own} == own


def test_zero_of_a_user_means_off_and_not_unset():
    database = Database(cluster="main", pool_size=5, query_wait_timeout=5.0)
    found = _resolve(_settings({"shop": database}, {"app": User(pool_size=0, query_wait_timeout=0.0)}))
    assert (found.pool_size, found.query_wait_timeout) == (0, 0.0)


def test_forced_user_gives_what_concerns_servers_and_the_client_keeps_the_rest():
    settings = _settings(
        {"shop": Database(cluster="main", user="owner", password="secret")},
        {
            "owner": User(pool_size=1, max_user_connections=2, query_timeout=3.0, max_user_client_connections=4),
            "app": User(pool_size=5, max_user_connections=6, query_wait_timeout=7.0, max_user_client_connections=8),
        },
    )
    found = _resolve(settings)
    assert (found.user, found.server_user, found.password, found.forced_user) == ("app", "owner", "secret", True)
    assert (found.pool_size, found.max_user_connections, found.query_timeout) == (1, 2, 3.0)
    assert (found.query_wait_timeout, found.max_user_client_connections) == (7.0, 8)


def test_startup_parameters_of_a_database_bear_the_names_that_the_server_reports():
    database = Database(
        cluster="main", client_encoding="UTF8", datestyle="ISO", timezone="UTC", application_name="shop"
    )
    assert _resolve(_settings({"shop": database})).startup == (
        ("client_encoding", "UTF8"),
        ("DateStyle", "ISO"),
        ("TimeZone", "UTC"),
        ("application_name", "shop"),
    )


def test_equal_clients_of_a_pool_have_equal_hashable_settings():
    settings = _settings({"shop": Database(cluster="main", timezone="UTC")})
    assert len({_resolve(settings), _resolve(settings)}) == 1


@given(*[st.none() | st.integers(0, 9)] * 2, st.integers(0, 9))
def test_pool_size_under_any_mixture_is_the_first_that_is_set(of_user, of_database, of_front):
    settings = _settings(
        {"shop": Database(cluster="main", pool_size=of_database)},
        {"app": User(pool_size=of_user)},
        Front(default_pool_size=of_front),
    )
    expected = next(size for size in (of_user, of_database, of_front) if size is not None)
    assert _resolve(settings).pool_size == expected
