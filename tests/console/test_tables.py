"""The tables: columns to the letter, and rows that add the workers up."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from gateway import __version__
from gateway.console.tables import FAKES, TABLES
from gateway.settings import PARAMETERS, Front, Settings
from tests.console.gateways import COUNTERS, NOW, SETTINGS, Gateway, connection, pool

# As PgBouncer 1.25 has them, s for text, i for int4, q for int8, N for numeric; after the bar, what is ours.
COLUMNS = {
    "config": "key:s value:s default:s changeable:s | setting:s unit:s",
    "databases": "name:s host:s port:i database:s force_user:s pool_size:i min_pool_size:i reserve_pool_size:i "
    "server_lifetime:i pool_mode:s load_balance_hosts:s max_connections:i current_connections:i "
    "max_client_connections:i current_client_connections:i paused:i disabled:i | cluster:s",
    "pools": "database:s user:s cl_active:i cl_waiting:i cl_active_cancel_req:i cl_waiting_cancel_req:i sv_active:i "
    "sv_active_cancel:i sv_being_canceled:i sv_idle:i sv_used:i sv_tested:i sv_login:i maxwait:i maxwait_us:i "
    "pool_mode:s load_balance_hosts:s | sv_cleanup:i sv_closing:i cluster:s",
    "clients": "type:s user:s database:s replication:s state:s addr:s port:i local_addr:s local_port:i connect_time:s "
    "request_time:s wait:i wait_us:i close_needed:i ptr:s link:s remote_pid:i tls:s application_name:s "
    "prepared_statements:i id:i | gateway_state:s worker:i",
    "servers": "type:s user:s database:s replication:s state:s addr:s port:i local_addr:s local_port:i connect_time:s "
    "request_time:s wait:i wait_us:i close_needed:i ptr:s link:s remote_pid:i tls:s application_name:s "
    "prepared_statements:i id:i | gateway_state:s worker:i",
    "users": "name:s pool_size:s reserve_pool_size:s pool_mode:s max_user_connections:i current_connections:i "
    "max_user_client_connections:i current_client_connections:i",
    "clusters": "| name:s primary:s timeline:i epoch:q mode:s held:s paused:s hindrance:s system_identifier:s",
    "nodes": "| name:s host:s port:i role:s status:s reason:s since:s latency_us:q lag_bytes:q weight:i addresses:s "
    "cluster:s",
    "version": "version:s",
    "state": "key:s value:s",
    "lists": "list:s items:i",
    "stats": "database:s total_server_assignment_count:N total_xact_count:N total_query_count:N total_received:N "
    "total_sent:N total_xact_time:N total_query_time:N total_wait_time:N total_client_parse_count:N "
    "total_server_parse_count:N total_bind_count:N total_client_login_count:N avg_server_assignment_count:N "
    "avg_xact_count:N avg_query_count:N avg_recv:N avg_sent:N avg_xact_time:N avg_query_time:N avg_wait_time:N "
    "avg_client_parse_count:N avg_server_parse_count:N avg_bind_count:N avg_client_login_count:N",
    "stats_totals": "database:s server_assignment_count:N xact_count:N query_count:N bytes_received:N bytes_sent:N "
    "xact_time:N query_time:N wait_time:N client_parse_count:N server_parse_count:N bind_count:N client_login_count:N",
    "stats_averages": "database:s server_assignment_count:N xact_count:N query_count:N bytes_received:N bytes_sent:N "
    "xact_time:N query_time:N wait_time:N avg_client_parse_count:N avg_server_parse_count:N avg_bind_count:N "
    "avg_client_login_count:N",
    "totals": "name:s value:N",
}
OIDS = {"s": 25, "i": 23, "q": 20, "N": 1700}


def listed(columns: str) -> list[tuple[str, int]]:
    pairs = [column.split(":") for column in columns.replace("|", "").split()]
    return [(name, OIDS[letter]) for name, letter in pairs]


@pytest.mark.parametrize("name", TABLES)
def test_table_has_its_columns_and_cells_for_each(name):
    gateway = Gateway(pools=[pool()], clients=[connection()], servers=[connection()])
    columns, rows = gateway.show(f"show {name}")
    assert columns == listed(COLUMNS[name])
    assert rows
    for row in rows:
        assert len(row) == len(columns)
        assert all(cell is None or oid == 25 or int(cell) >= 0 for cell, (_, oid) in zip(row, columns, strict=True))


@pytest.mark.parametrize(
    "name", [name for name, table in TABLES.items() if table.asks and name not in ("lists", "totals")]
)
def test_table_while_nobody_is_there_is_empty(name):
    gateway = Gateway(pools=[], clients=[], servers=[])
    gateway.settings = Settings()
    assert gateway.show(f"show {name}") == (listed(COLUMNS[name]), [])


def test_pools_are_added_up_over_workers():
    rows = [pool(0), pool(1, maxwait_us=2_000_003, sv_active=4), pool(1, user="bob", database="x")]
    shown = Gateway(pools=rows).table("show pools")
    assert [(row["database"], row["user"]) for row in shown] == [("app", "owner"), ("x", "bob")]
    assert shown[0] == {
        "database": "app",
        "user": "owner",
        "cl_active": "6",
        "cl_waiting": "4",
        "cl_active_cancel_req": "2",
        "cl_waiting_cancel_req": "0",
        "sv_active": "5",
        "sv_active_cancel": "2",
        "sv_being_canceled": "2",
        "sv_idle": "2",
        "sv_used": "0",
        "sv_tested": "2",
        "sv_login": "2",
        "maxwait": "2",
        "maxwait_us": "3",
        "pool_mode": "transaction",
        "load_balance_hosts": None,
        "sv_cleanup": "2",
        "sv_closing": "2",
        "cluster": "main",
    }


def test_clients_row_tells_what_the_worker_knows():
    [row] = Gateway(clients=[connection(id=2 << 24 | 5)]).table("show clients")
    assert row == {
        "type": "C",
        "user": "owner",
        "database": "app",
        "replication": "none",
        "state": "active",
        "addr": "10.1.0.1",
        "port": "40000",
        "local_addr": "10.1.0.2",
        "local_port": "6432",
        "connect_time": "2023-11-14 22:13:00 UTC",
        "request_time": "2023-11-14 22:13:19 UTC",
        "wait": "2",
        "wait_us": "3",
        "close_needed": "0",
        "ptr": "c33554437",
        "link": "s1.9",
        "remote_pid": "77",
        "tls": "",
        "application_name": "psql",
        "prepared_statements": "4",
        "id": "33554437",
        "gateway_state": "active",
        "worker": "1",
    }


def test_clients_and_servers_that_are_linked_name_each_other():
    gateway = Gateway(
        clients=[connection(id=5, link=9), connection(id=6, link=0)],
        servers=[connection(worker=0, id=9, link=0), connection(worker=1, id=9, link=5)],
    )
    clients = {row["ptr"]: row["link"] for row in gateway.table("show clients")}
    servers = {row["ptr"]: row["link"] for row in gateway.table("show servers")}
    assert clients == {"c5": "s1.9", "c6": ""}
    assert servers == {"s0.9": "", "s1.9": "c5"}


@pytest.mark.parametrize(
    ("table", "state", "shown"),
    [
        ("clients", "idle", "idle"),
        ("clients", "waiting", "waiting"),
        ("clients", "login", "waiting"),
        ("clients", "leaving", "active"),
        ("servers", "login", "new"),
        ("servers", "being_canceled", "being_canceled"),
        ("servers", "cleanup", "tested"),
        ("servers", "closing", "idle"),
    ],
)
def test_connection_in_a_state_of_ours_shows_the_nearest_of_pgbouncer(table, state, shown):
    [row] = Gateway(**{table: [connection(state=state)]}).table(f"show {table}")
    assert (row["state"], row["gateway_state"]) == (shown, state)
    assert row["close_needed"] == str(int(state == "closing"))


@pytest.mark.parametrize(
    ("value", "shown"),
    [(False, "none"), ("", "none"), ("database", "logical"), ("true", "physical"), (True, "physical")],
)
def test_connection_for_replication_tells_which(value, shown):
    [row] = Gateway(clients=[connection(replication=value)]).table("show clients")
    assert row["replication"] == shown


def test_stats_are_added_up_by_database():
    gateway = Gateway(pools=[pool(0), pool(1), pool(0, user="bob"), pool(0, database="x")])
    shown = gateway.table("show stats")
    assert [row["database"] for row in shown] == ["app", "x"]
    assert list(shown[0].values())[1:13] == [str(3 * count) for count in COUNTERS.values()]
    assert list(gateway.table("show stats_totals")[1].values())[1:] == [str(count) for count in COUNTERS.values()]
    assert gateway.table("show totals")[3] == {"name": "total_client_bytes", "value": "160"}


def test_totals_are_named_as_pgbouncers():
    names = [str(row["name"]) for row in Gateway(pools=[]).table("show totals")]
    assert [name.partition("_")[0] for name in names] == ["total"] * 12 + ["avg"] * 12
    assert [name.partition("_")[2] for name in names[12:]] == [name.partition("_")[2] for name in names[:12]]
    assert " ".join(names[:12]) == (
        "total_server_assignment_count total_xact_count total_query_count total_client_bytes total_server_bytes "
        "total_xact_time total_query_time total_wait_time total_ps_client_parse_count total_ps_server_parse_count "
        "total_ps_bind_count total_client_login_count"
    )


def averages(gateway: Gateway) -> list[str | None]:
    """Of the database "app": assignments, transactions, queries, received, sent, then the three times."""
    return next(row[1:9] for row in gateway.show("show stats_averages")[1] if row[0] == "app")


def test_averages_before_the_first_tick_are_zero():
    assert averages(Gateway(pools=[pool()])) == ["0"] * 8


def test_averages_are_those_of_the_last_whole_period():
    gateway = Gateway(pools=[pool(0), pool(1)])
    gateway.settings = replace(SETTINGS, front=Front(stats_period=5.0))
    gateway.console.tick(NOW, [pool(0), pool(1)])
    assert averages(gateway) == ["4", "8", "12", "16", "20", "300", "233", "80"]
    more: dict[str, Any] = {"xact_count": 40, "xact_time": 10000, "received": 1040}
    gateway.console.tick(NOW + 10, [pool(0), pool(1, **more)])
    assert averages(gateway) == ["0", "2", "0", "100", "0", "200", "0", "0"]
    gateway.console.tick(NOW + 20, [pool(0), pool(1, **more)])
    assert averages(gateway) == ["0"] * 8


def test_averages_of_a_worker_that_was_started_again_count_from_zero():
    gateway = Gateway(pools=[pool()])
    gateway.console.tick(NOW, [pool(0, xact_count=10**6), pool(1)])
    gateway.console.tick(NOW + 10, [pool(0, xact_count=50), pool(1)])
    assert averages(gateway)[1] == "5"


def test_averages_of_a_worker_that_did_not_answer_once_are_none_of_its_past():
    gateway = Gateway(pools=[pool()])
    for now, rows in ((0, [pool(0), pool(1)]), (10, [pool(0)]), (20, [pool(0), pool(1)])):
        gateway.console.tick(NOW + now, rows)
    assert averages(gateway) == ["0"] * 8


def test_averages_over_all_databases_are_weighed():
    gateway = Gateway(pools=[pool(database="x"), pool(database="y")])
    rows = [pool(database="x", xact_count=1, xact_time=1000), pool(database="y", xact_count=3, xact_time=1000)]
    gateway.console.tick(NOW, rows)
    shown = {row["name"]: row["value"] for row in gateway.table("show totals")}
    assert shown["avg_xact_time"] == "500"


def test_databases_are_those_configured_and_those_in_use():
    shown = Gateway(pools=[pool(0), pool(1), pool(database="other")]).table("show databases")
    assert [row["name"] for row in shown] == ["app", "other", "read"]
    app, other, read = shown
    assert app == {
        "name": "app",
        "host": "10.0.0.1",
        "port": "5432",
        "database": "app1",
        "force_user": "owner",
        "pool_size": "7",
        "min_pool_size": "0",
        "reserve_pool_size": "0",
        "server_lifetime": "3600",
        "pool_mode": None,
        "load_balance_hosts": None,
        "max_connections": "0",
        "current_connections": "14",
        "max_client_connections": "0",
        "current_client_connections": "10",
        "paused": "0",
        "disabled": "0",
        "cluster": "main",
    }
    assert (other["database"], other["force_user"], other["pool_size"]) == ("other", None, "20")
    assert (read["host"], read["port"], read["pool_mode"]) == ("10.0.0.2", "5433", "session")
    assert read["server_lifetime"] == "60"


def test_databases_without_a_primary_are_nowhere():
    gateway = Gateway(pools=[])
    gateway.views = {}
    [app, _] = gateway.table("show databases")
    assert (app["host"], app["port"]) == (None, None)


def test_databases_no_longer_configured_are_not_shown():
    gateway = Gateway(pools=[pool(database="gone")])
    gateway.settings = replace(SETTINGS, database={})
    assert gateway.table("show databases") == []


def test_users_are_those_configured_forced_and_at_work():
    shown = Gateway(pools=[pool(0), pool(1), pool(0, user="eve")]).table("show users")
    assert [row["name"] for row in shown] == ["bob", "eve", "owner"]
    assert list(shown[0].values()) == ["bob", "3", "", None, "5", "0", "0", "0"]
    assert list(shown[2].values()) == ["owner", "", "", None, "50", "14", "0", "10"]


def test_lists_count_what_is_there():
    gateway = Gateway(pools=[pool(0), pool(1), pool(0, user="eve")])
    shown = {str(row["list"]): row["items"] for row in gateway.table("show lists")}
    assert " ".join(shown) == (
        "databases users peers pools peer_pools free_clients used_clients login_clients free_servers used_servers "
        "dns_names dns_zones dns_queries dns_pending"
    )
    assert (shown["databases"], shown["users"], shown["pools"]) == ("2", "3", "2")
    assert (shown["used_clients"], shown["free_clients"], shown["used_servers"]) == ("15", "4985", "21")


def config() -> dict[str | None, tuple[str | None, ...]]:
    return {row[0]: tuple(row[1:]) for row in Gateway().show("show config")[1]}


@pytest.mark.parametrize(
    ("key", "row"),
    [
        ("pool_mode", ("transaction", "transaction", "yes", "front.pool_mode", "")),
        ("server_lifetime", ("3600", "3600", "yes", "front.server_lifetime", "s")),
        ("tcp_keepalive", ("1", "1", "yes", "front.tcp_keepalive", "")),
        ("pkt_buf", ("65536", "65536", "no", "front.read_buffer_size", "B")),
        ("auth_type", ("scram-sha-256", "scram-sha-256", "yes", "front.auth.type", "")),
        ("auth_file", ("/etc/users", None, "yes", "front.auth.file", "")),
        ("auth.scram_iterations", ("4096", "4096", "yes", "front.auth.scram_iterations", "")),
        ("client_tls_sslmode", ("disable", "disable", "yes", "front.tls.mode", "")),
        ("console.admin_users", ("", "", "yes", "console.admin_users", "")),
        ("cluster.main.probe_interval_fast", ("0.1", "0.1", "yes", "cluster.main.probe_interval_fast", "s")),
        ("cluster.main.node[1].port", ("5433", "5432", "yes", "cluster.main.node[1].port", "")),
        ("cluster.main.tls.mode", ("disable", "disable", "yes", "cluster.main.tls.mode", "")),
        ("database.app.pool_size", ("7", None, "yes", "database.app.pool_size", "")),
        ("user.bob.pool_size", ("3", None, "yes", "user.bob.pool_size", "")),
    ],
)
def test_config_row_tells_value_default_and_where_it_is_set(key, row):
    assert config()[key] == row


def test_config_has_every_setting_of_the_whole_gateway_once():
    settings = [row[3] for row in config().values()]
    assert len(set(settings)) == len(settings) == len(Gateway().show("show config")[1])
    assert set(settings) >= {f"{p.section}.{p.name}" for p in PARAMETERS if "NAME" not in p.section}


def test_config_shows_no_secret():
    shown = config()
    assert shown["cluster.main.probe_password"][0] == shown["database.app.password"][0] == "****"
    assert "hush" not in str(shown)


def test_config_leaves_out_what_an_entry_leaves_to_its_default():
    assert not [key for key in config() if str(key).startswith("database.*.") and key != "database.*.cluster"]


def test_clusters_are_those_of_the_views():
    assert Gateway().table("show clusters") == [
        {
            "name": "main",
            "primary": "pg1",
            "timeline": "1",
            "epoch": "1",
            "mode": "follow",
            "held": "no",
            "paused": "no",
            "hindrance": "",
            "system_identifier": "7",
        }
    ]


def test_nodes_are_those_of_the_views():
    primary, standby = Gateway().table("show nodes")
    assert primary == {
        "name": "pg1",
        "host": "10.0.0.1",
        "port": "5432",
        "role": "primary",
        "status": "up",
        "reason": "",
        "since": "2023-11-14 22:12:20 UTC",
        "latency_us": "1250",
        "lag_bytes": None,
        "weight": "1",
        "addresses": "10.0.0.1",
        "cluster": "main",
    }
    assert list(standby.values())[3:6] == ["unknown", "down", "refused"]
    assert list(standby.values())[7:11] == [None, "8192", "2", ""]


def test_version_names_the_gateway():
    assert Gateway().table("show version") == [{"version": f"gateway {__version__}"}]
    assert Gateway().table("select version()") == [{"version": f"gateway {__version__}"}]


def test_state_is_active():
    shown = {row["key"]: row["value"] for row in Gateway().table("show state")}
    assert shown == {"active": "yes", "paused": "no", "suspended": "no", "started_at": "2023-11-14 21:13:20 UTC"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("client_encoding", "UTF8"),
        ("datestyle", "ISO"),
        ("default_transaction_isolation", "read committed"),
        ("extra_float_digits", "2"),
        ("standard_conforming_strings", "on"),
        ("timezone", "GMT"),
    ],
)
def test_parameter_that_drivers_look_up_has_a_value(name, value):
    assert Gateway().show(f"SHOW {name}") == ([(name, 25)], [[value]])
    assert name in FAKES


def test_select_one_is_one():
    assert Gateway().show("select 1") == ([("?column?", 23)], [["1"]])
