"""The tables that the console shows: their columns, known before anything is asked, and how their rows are made.

1. PgBouncer's columns come first, in its order, with its types and meaning; what it does not have follows.
2. A row is made from plain facts: the settings, the views, and what the workers said of themselves, added up.
3. No secret is shown.

Called by console.console; the columns also by console.session.
Manual: "Admin console" in PgBouncer's usage page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from enum import Enum
from functools import partial
from typing import Any, Final, NamedTuple

from msgspec import Struct

from gateway.pool_settings import pool_settings
from gateway.settings import PARAMETERS, Database, Parameter, Settings, User, bare, keys
from gateway.wire.messages import INT4, INT8, NUMERIC, TEXT
from health.view import ClusterView

_SECOND = 1_000_000  # in the workers' unit of time
_TYPES = {"s": TEXT, "i": INT4, "q": INT8, "N": NUMERIC}

Row = Mapping[str, Any]  # as a worker sends it, with the number of that worker
Cells = Sequence[str | int | None]
Columns = tuple[tuple[str, int], ...]

# What a pool counts, in the order of STATS: by the workers' name, by that in TOTALS, and what an average of it is over.
_COUNTED = (
    ("assignments", "server_assignment_count", "seconds"),
    ("xact_count", "xact_count", "seconds"),
    ("query_count", "query_count", "seconds"),
    ("received", "client_bytes", "seconds"),
    ("sent", "server_bytes", "seconds"),
    ("xact_time", "xact_time", "xact_count"),
    ("query_time", "query_time", "query_count"),
    ("wait_time", "wait_time", "assignments"),
    ("client_parses", "ps_client_parse_count", "seconds"),
    ("server_parses", "ps_server_parse_count", "seconds"),
    ("binds", "ps_bind_count", "seconds"),
    ("logins", "client_login_count", "seconds"),
)
_CLIENT_STATES = {"login": "waiting", "leaving": "active"}  # of ours that PgBouncer does not have
_SERVER_STATES = {"login": "new", "cleanup": "tested", "closing": "idle"}
_REPLICATION = {False: "none", "": "none", "database": "logical"}


class Averages:
    """What the pools did in the last whole stats_period; nothing until the first one is over."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._totals: dict[tuple[str, ...], Counter[str]] = {}
        self._changes: dict[str, Counter[str]] = {}
        self._seconds = 1.0

    def tick(self, now: float, rows: Iterable[Row], period: float) -> None:
        """Take the rows of all pools at the end of a period; period is how long the first one was, in seconds."""
        self._seconds = max(now - self._at, 1.0) if self._at is not None else period
        self._at = now
        self._changes = {}
        for key, found in _groups(rows, "worker", "database", "user"):
            totals, old = _sum(found), self._totals.get(key, Counter())
            self._totals[key] = totals
            # A worker that was started again counts from zero.
            change = {name: totals[name] - (old[name] if old[name] <= totals[name] else 0) for name, *_ in _COUNTED}
            self._changes.setdefault(key[1], Counter()).update(change)

    def of(self, database: str | None = None) -> list[int]:
        """Return the averages of a database, or of all: times in microseconds per event, others per second."""
        change: Counter[str] = Counter()
        for name, found in self._changes.items():
            if database in (None, name):
                change.update(found)
        events: dict[str, float] = {**change, "seconds": self._seconds}
        return [int(change[name] / (events.get(over) or 1)) for name, _, over in _COUNTED]


class Facts(NamedTuple):
    """What is known when a table is asked for."""

    version: str
    settings: Settings
    views: Mapping[str, ClusterView]
    averages: Averages
    started_at: float  # both in seconds since 1970
    time: float
    now: float  # by the clock of the views
    rows: Sequence[Row]  # those that the table asks the workers for


class Table(NamedTuple):
    """A table: asks is the one of the workers' that its rows are made of, if any."""

    columns: Columns
    rows: Callable[[Facts], Iterable[Cells]]
    asks: str = ""


def _columns(types: str, names: str) -> Columns:
    """Build the columns of a table from PgBouncer's letters for their types, and their names."""
    return tuple((name, _TYPES[letter]) for letter, name in zip(types, names.split(), strict=True))


def _groups(rows: Iterable[Row], *names: str) -> list[tuple[tuple[Any, ...], list[Row]]]:
    """Put rows together that agree in these columns, sorted by them."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return sorted(groups.items(), key=lambda group: group[0])


def _sum(rows: Iterable[Row]) -> Counter[str]:
    """Add up every column that is a number."""
    sums: Counter[str] = Counter()
    for row in rows:
        sums.update({name: value for name, value in row.items() if isinstance(value, int)})
    return sums


def _connections(sums: Counter[str]) -> int:
    return sum(count for name, count in sums.items() if name.startswith("sv_"))


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


# Pools, clients and servers.


def _pools(facts: Facts) -> Iterator[Cells]:
    for (database, user), rows in _groups(facts.rows, "database", "user"):
        sums = _sum(rows)
        wait = max(row["maxwait_us"] for row in rows)
        yield (
            *(database, user, sums["clients"] - sums["waiting"], sums["waiting"], sums["cancels"], 0),
            *(sums["sv_active"], sums["cancels"], sums["sv_being_canceled"], sums["sv_idle"], 0),
            *(sums["sv_tested"], sums["sv_login"], wait // _SECOND, wait % _SECOND, rows[0]["pool_mode"], None),
            *(sums["sv_cleanup"], sums["sv_closing"], rows[0]["cluster"]),
        )


def _clients(facts: Facts) -> Iterator[Cells]:
    for row in facts.rows:
        link = f"s{row['worker']}.{row['link']}" if row["link"] else ""
        yield _connection(facts, row, "C", _CLIENT_STATES, f"c{row['id']}", link)


def _servers(facts: Facts) -> Iterator[Cells]:
    for row in facts.rows:
        link = f"c{row['link']}" if row["link"] else ""
        yield _connection(facts, row, "S", _SERVER_STATES, f"s{row['worker']}.{row['id']}", link)


def _connection(facts: Facts, row: Row, kind: str, states: Mapping[str, str], pointer: str, link: str) -> Cells:
    state, wait = row["state"], row["wait_us"]
    return (
        *(kind, row["user"], row["database"], _REPLICATION.get(row["replication"], "physical")),
        *(states.get(state, state), row["addr"], row["port"], row["local_addr"], row["local_port"]),
        _time(facts.time - row["connected_us"] / _SECOND),
        _time(facts.time - row["request_us"] / _SECOND),
        *(wait // _SECOND, wait % _SECOND, int(row["close_needed"] or state == "closing"), pointer, link),
        *(row["remote_pid"], "", row["application_name"], row["prepared_statements"], row["id"]),
        *(state, row["worker"]),
    )


# Statistics.


def _totals_of(rows: Iterable[Row]) -> list[int]:
    sums = _sum(rows)
    return [sums[name] for name, *_ in _COUNTED]


def _stats(facts: Facts) -> Iterator[Cells]:
    for (database,), rows in _groups(facts.rows, "database"):
        yield database, *_totals_of(rows), *facts.averages.of(database)


def _stats_totals(facts: Facts) -> Iterator[Cells]:
    for (database,), rows in _groups(facts.rows, "database"):
        yield database, *_totals_of(rows)


def _stats_averages(facts: Facts) -> Iterator[Cells]:
    for (database,), _ in _groups(facts.rows, "database"):
        yield database, *facts.averages.of(database)


def _totals(facts: Facts) -> Iterator[Cells]:
    for kind, values in (("total", _totals_of(facts.rows)), ("avg", facts.averages.of())):
        for (_, name, _), value in zip(_COUNTED, values, strict=True):
            yield f"{kind}_{name}", value


# What is configured.


def _databases(facts: Facts) -> Iterator[Cells]:
    settings = facts.settings
    used = {database: _sum(rows) for (database,), rows in _groups(facts.rows, "database")}
    for name in sorted((settings.database.keys() - {"*"}) | used.keys()):
        pool = pool_settings(settings, name, "")
        if pool is None:  # no longer configured
            continue
        entry = settings.database.get(name) or settings.database["*"]
        host, port = _place(facts, entry)
        sums = used.get(name, Counter())
        yield (
            *(name, host, port, pool.dbname, entry.user, pool.pool_size, pool.min_pool_size, pool.reserve_pool_size),
            *(int(pool.server_lifetime), entry.pool_mode, None),
            *(pool.max_db_connections, _connections(sums), pool.max_db_client_connections, sums["clients"], 0, 0),
            entry.cluster,
        )


def _place(facts: Facts, entry: Database) -> tuple[str | None, int | None]:
    """Say where writes for a database go, if anywhere."""
    view = facts.views.get(entry.cluster)
    name = entry.node or (view.primary if view else None)
    for node in facts.settings.cluster[entry.cluster].node:
        if node.name == name:
            return node.host, node.port
    return None, None


def _users(facts: Facts) -> Iterator[Cells]:
    settings, front = facts.settings, facts.settings.front
    used = {user: _sum(rows) for (user,), rows in _groups(facts.rows, "user")}
    forced = {entry.user for entry in settings.database.values() if entry.user is not None}
    for name in sorted(settings.user.keys() | forced | used.keys()):
        user = settings.user.get(name, User())
        sums = used.get(name, Counter())
        yield (
            *(name, _text(user.pool_size) or "", _text(user.reserve_pool_size) or "", user.pool_mode),
            front.max_user_connections if user.max_user_connections is None else user.max_user_connections,
            _connections(sums),
            front.max_user_client_connections
            if user.max_user_client_connections is None
            else user.max_user_client_connections,
            sums["clients"],
        )


def _lists(facts: Facts) -> Iterator[Cells]:
    sums = _sum(facts.rows)
    yield "databases", len(list(_databases(facts)))
    yield "users", len(list(_users(facts)))
    yield "peers", 0
    yield "pools", len(_groups(facts.rows, "database", "user"))
    yield "peer_pools", 0
    yield "free_clients", max(facts.settings.front.max_client_conn - sums["clients"], 0)
    yield "used_clients", sums["clients"]
    yield "login_clients", 0
    yield "free_servers", 0
    yield "used_servers", _connections(sums)
    for name in ("dns_names", "dns_zones", "dns_queries", "dns_pending"):
        yield name, 0


def _config(facts: Facts) -> list[Cells]:
    rows: list[Cells] = []
    for parameter in PARAMETERS:
        for path, table in _tables(facts.settings, "", parameter.section.split(".")):
            value = getattr(table, parameter.name)
            if value is None and "NAME" in parameter.section:
                continue  # what a cluster, a database or a user leaves to the defaults would bury the rest
            if value and bare(keys(type(table))[parameter.name].type)[1].get("secret"):
                value = "****"
            setting = f"{path}.{parameter.name}"
            changeable = _yes(parameter.reloadable)
            shown = (_text(value), _text(parameter.default), changeable)
            rows.append((_key(parameter, setting), *shown, setting, parameter.unit))
    return sorted(rows, key=lambda row: str(row[0]))


def _tables(found: Any, path: str, names: Sequence[str]) -> Iterator[tuple[str, Struct]]:
    """Find every table of a section of PARAMETERS below one that was found, with its key path."""
    if isinstance(found, tuple):
        for number, table in enumerate(found):
            yield from _tables(table, f"{path}[{number}]", names)
    elif not names:
        yield path, found
    elif names[0] == "NAME":
        for name, table in found.items():
            yield from _tables(table, f"{path}.{name}", names[1:])
    else:
        yield from _tables(getattr(found, names[0]), f"{path}.{names[0]}".lstrip("."), names[1:])


def _key(parameter: Parameter, setting: str) -> str:
    """Name a setting as PgBouncer does, where it is one for the whole gateway as it is there."""
    if parameter.pgbouncer and setting.startswith("front."):
        return parameter.pgbouncer[0]
    return setting.removeprefix("front.")


def _text(value: object) -> str | None:
    match value:
        case None:
            return None
        case bool():
            return str(int(value))
        case float():
            return str(int(value)) if value.is_integer() else str(value)
        case Enum():
            return str(value.value)
        case tuple():
            return ",".join(map(str, value))
    return str(value)


# The gateway itself and its nodes.


def _version(facts: Facts) -> Iterable[Cells]:
    return [(f"gateway {facts.version}",)]


def _constant(value: str, _: Facts) -> Iterable[Cells]:
    return [(value,)]


def _state(facts: Facts) -> Iterable[Cells]:
    return [("active", "yes"), ("paused", "no"), ("suspended", "no"), ("started_at", _time(facts.started_at))]


def _nodes(facts: Facts) -> Iterator[Cells]:
    for _, view in sorted(facts.views.items()):
        for found in view.nodes:
            latency = None if found.latency is None else int(found.latency * _SECOND)
            yield (
                *(found.node.name, found.node.host, found.node.port, found.role, found.status, found.reason),
                _time(facts.time - (facts.now - found.since)),
                *(latency, found.lag_bytes, found.node.weight, ",".join(found.addresses), view.name),
            )


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _clusters(facts: Facts) -> Iterator[Cells]:
    for name, view in sorted(facts.views.items()):
        epoch, identifier = view.epoch, view.epoch.system_identifier
        yield (
            *(name, view.primary, epoch.timeline, epoch.number, view.mode, _yes(view.held), _yes(view.paused)),
            *(view.hindrance, None if identifier is None else str(identifier)),
        )


_CONNECTION = _columns(
    "ssssssisissiiississiisi",
    "type user database replication state addr port local_addr local_port connect_time request_time wait wait_us "
    "close_needed ptr link remote_pid tls application_name prepared_statements id gateway_state worker",
)

TABLES: Final[dict[str, Table]] = {
    "config": Table(_columns("ssssss", "key value default changeable setting unit"), _config),
    "databases": Table(
        _columns(
            "ssissiiiissiiiiiis",
            "name host port database force_user pool_size min_pool_size reserve_pool_size server_lifetime pool_mode "
            "load_balance_hosts max_connections current_connections max_client_connections current_client_connections "
            "paused disabled cluster",
        ),
        _databases,
        asks="pools",
    ),
    "pools": Table(
        _columns(
            "ssiiiiiiiiiiiiissiis",
            "database user cl_active cl_waiting cl_active_cancel_req cl_waiting_cancel_req sv_active sv_active_cancel "
            "sv_being_canceled sv_idle sv_used sv_tested sv_login maxwait maxwait_us pool_mode load_balance_hosts "
            "sv_cleanup sv_closing cluster",
        ),
        _pools,
        asks="pools",
    ),
    "clients": Table(_CONNECTION, _clients, asks="clients"),
    "servers": Table(_CONNECTION, _servers, asks="servers"),
    "users": Table(
        _columns(
            "ssssiiii",
            "name pool_size reserve_pool_size pool_mode max_user_connections current_connections "
            "max_user_client_connections current_client_connections",
        ),
        _users,
        asks="pools",
    ),
    "nodes": Table(
        _columns(
            "ssissssqqiss",
            "name host port role status reason since latency_us lag_bytes weight addresses cluster",
        ),
        _nodes,
    ),
    "clusters": Table(
        _columns("ssiqsssss", "name primary timeline epoch mode held paused hindrance system_identifier"), _clusters
    ),
    "version": Table(_columns("s", "version"), _version),
    "state": Table(_columns("ss", "key value"), _state),
    "lists": Table(_columns("si", "list items"), _lists, asks="pools"),
    "stats": Table(
        _columns(
            "s" + 24 * "N",
            "database total_server_assignment_count total_xact_count total_query_count total_received total_sent "
            "total_xact_time total_query_time total_wait_time total_client_parse_count total_server_parse_count "
            "total_bind_count total_client_login_count "
            "avg_server_assignment_count avg_xact_count avg_query_count avg_recv avg_sent "
            "avg_xact_time avg_query_time avg_wait_time avg_client_parse_count avg_server_parse_count "
            "avg_bind_count avg_client_login_count",
        ),
        _stats,
        asks="pools",
    ),
    "stats_totals": Table(
        _columns(
            "s" + 12 * "N",
            "database server_assignment_count xact_count query_count bytes_received bytes_sent xact_time query_time "
            "wait_time client_parse_count server_parse_count bind_count client_login_count",
        ),
        _stats_totals,
        asks="pools",
    ),
    "stats_averages": Table(
        _columns(
            "s" + 12 * "N",
            "database server_assignment_count xact_count query_count bytes_received bytes_sent xact_time query_time "
            "wait_time avg_client_parse_count avg_server_parse_count avg_bind_count avg_client_login_count",
        ),
        _stats_averages,
        asks="pools",
    ),
    "totals": Table(_columns("sN", "name value"), _totals, asks="pools"),
}

DRIVER_PARAMETERS: Final = {
    "client_encoding": "UTF8",
    "datestyle": "ISO",
    "default_transaction_isolation": "read committed",
    "extra_float_digits": "2",
    "standard_conforming_strings": "on",
    "timezone": "GMT",
}
"""What drivers look up, or set without looking; the values never change."""

FAKES: Final[dict[str, Table]] = {
    **{name: Table(_columns("s", name), partial(_constant, value)) for name, value in DRIVER_PARAMETERS.items()},
    "select 1": Table(_columns("i", "?column?"), partial(_constant, "1")),
    "select version()": Table(_columns("s", "version"), _version),
}
"""What is shown only because any server shows it."""
