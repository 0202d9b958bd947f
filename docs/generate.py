"""The reference pages, written from the tables that the program itself goes by.

1. What a table holds is not said a second time here; what it does not hold stands here and nowhere else.
2. `python docs/generate.py` writes the pages beside this file; a test asserts that they are current.

Called by hand after a change of settings or console, and by tests/test_docs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Final, get_origin

from msgspec import Struct

from gateway.console.commands import COMMANDS, Verb
from gateway.console.tables import DRIVER_PARAMETERS, TABLES, Columns
from gateway.settings import PARAMETERS, Parameter, Settings, bare, keys, table
from gateway.wire import messages

FOLDER: Final = Path(__file__).parent

WITHOUT_EFFECT: Final = frozenset(
    (
        "cluster.NAME.consistency",
        "cluster.NAME.max_lag",
        "cluster.NAME.node.weight",
    )
)
"""Settings that are read from the file and used nowhere yet, beside those whose own words say so."""

CONFIGURATION: Final = """\
# Configuration

One file in TOML describes everything: `gateway serve topology.toml`. The file in the root of the project,
[topology.toml](../topology.toml), shows every setting with its default.

- `gateway check topology.toml` reports every fault with the path of its key. An unknown key is a fault, and the nearest
  known one is named.
- Times are in seconds, sizes in bytes. Where a number may be 0, 0 means off or unlimited.
- Paths are relative to the file.
- A path of a key is written with NAME where the file has a name of its own: `[database.shop]` is `database.NAME`.
- `[database."*"]` stands for every database without a table of its own.
- What is said for a user wins over the database, and that over `[front]`. Where a database forces its user
  (`database.NAME.user`), what concerns server connections is taken from that user, what concerns the client alone
  (`query_wait_timeout`, `client_idle_timeout`, `max_user_client_connections`) from the user who logged in.
- SIGHUP, or RELOAD on the console, reads the file again. Settings with "no" under "Reload" need a new start. A faulty
  file changes nothing.
- "PgBouncer" is the name that PgBouncer has for a setting, where it is another one.
"""

CONSOLE: Final = f"""\
# Console

The databases `gateway` and `pgbouncer` are the console: `psql -h HOST -p 6432 -U USER gateway`. One console answers for
all workers, whichever of them a client is connected to. Who may use it is set by `console.admin_users` (every command)
and `console.stats_users` (all but those marked). Users log in as they do to any database.

Both protocols are understood, so drivers work; statements take no parameters and values are text. Names and columns are
PgBouncer's; columns that it does not have come last in a table. The times of SHOW STATS are in microseconds; `wait` and
`maxwait` are whole seconds, and what is left of them is in `wait_us` and `maxwait_us`.

Drivers may SHOW, and SET without effect, {", ".join(f"`{name}`" for name in DRIVER_PARAMETERS)}.
"""

VERBS: Final = {
    Verb.SHOW: "Show a table, see below; `SHOW HELP` lists them.",
    Verb.SELECT: "`SELECT 1` and `SELECT version()`, which drivers and monitors ask of any server.",
    Verb.SET: "Taken for the parameters that drivers set, without effect. Settings are changed in the file.",
    Verb.SWITCHOVER: "Let a standby, the one that got farthest where none is named, and the primary change places. "
    "Transactions wait meanwhile; those that run may end within `failover.switchover_timeout`, else nothing is "
    "changed, or with FORCE they are ended.",
    Verb.PROMOTE: "Make a node the primary while the old one is down, whatever rule forbids it: quorum, lag, "
    "acknowledged commits that may be elsewhere, mode follow.",
    Verb.ATTACH: "Give a node back that was taken out.",
    Verb.DETACH: "Take a standby out: it is not promoted. Its clients may finish, or with NOW are cut.",
    Verb.PAUSE: "PAUSE FAILOVER: do not promote by itself, from now on, a restart of the gateway included.",
    Verb.RESUME: "RESUME FAILOVER: undo PAUSE FAILOVER.",
    Verb.RELOAD: "Read the topology file again, as SIGHUP does. An error says that the log tells the faults.",
}

SHOWN: Final = {
    "config": "Every setting with its value; `setting` is its path. Passwords are masked.",
    "databases": "Every configured database, and every one in use by way of `*`, with where its writes go.",
    "pools": "One row for each database and user on the server.",
    "clients": "One row for each client; `ptr` names it, `link` its server, `gateway_state` our own word for `state`.",
    "servers": "One row for each server connection; `remote_pid` is its process in PostgreSQL.",
    "users": "Every user with a table of its own, forced by a database, or in use.",
    "nodes": "Every node as the probes see it; `reason` says what is wrong with it.",
    "clusters": "Every cluster: its primary, what is under way, and why there is no failover where one is due.",
    "version": "The version of the gateway.",
    "state": "Whether the gateway is active, and since when.",
    "lists": "How many there are of each thing.",
    "stats": "Totals since the start, and averages over the last whole `front.stats_period`, for each database.",
    "stats_totals": "The totals of SHOW STATS alone.",
    "stats_averages": "The averages of SHOW STATS alone.",
    "totals": "The sums of SHOW STATS over all databases.",
}

TYPES: Final = {
    messages.TEXT: "text",
    messages.INT4: "integer",
    messages.INT8: "bigint",
    messages.NUMERIC: "numeric",
}


def configuration() -> str:
    """Write the page of all settings."""
    return CONFIGURATION + "".join(_section(name) for name in dict.fromkeys(p.section for p in PARAMETERS))


def console() -> str:
    """Write the page of the console's commands and tables."""
    commands = [
        (f"`{verb}`", "admin users" if command.admin else "all", VERBS[verb]) for verb, command in COMMANDS.items()
    ]
    tables = "".join(
        f"\n### SHOW {name.upper()}\n\n{SHOWN[name]}\n\n{_columns(shown.columns)}\n" for name, shown in TABLES.items()
    )
    return f"{CONSOLE}\n## Commands\n\n{_rows('Command | Who | What it does', commands)}\n## Tables\n{tables}"


PAGES: Final[dict[str, Callable[[], str]]] = {"configuration.md": configuration, "console.md": console}


def _section(name: str) -> str:
    struct, is_list = _struct(name)
    words = " ".join((struct.__doc__ or "").split())
    rows = [_row(parameter) for parameter in PARAMETERS if parameter.section == name]
    header = "Setting | Meaning | Values | Default | Reload | PgBouncer"
    return f"\n## {f'[[{name}]]' if is_list else f'[{name}]'}\n\n{words}\n\n{_rows(header, rows)}"


def _struct(section: str) -> tuple[type[Struct], bool]:
    """Find what a section is read into, and whether the file has a list of it."""
    struct: type[Struct] = Settings
    kind: Any = None
    for name in section.split("."):
        if name != "NAME":
            kind, _ = bare(keys(struct)[name].type)
            struct = table(kind) or struct
    return struct, get_origin(kind) is tuple


def _row(parameter: Parameter) -> tuple[str, ...]:
    unused = f"{parameter.section}.{parameter.name}" in WITHOUT_EFFECT
    return (
        f"`{parameter.name}`",
        parameter.doc + (" (no effect yet)" if unused else ""),
        parameter.type + (f", {parameter.unit}" if parameter.unit else ""),
        "required" if parameter.required else _literal(parameter.default),
        "yes" if parameter.reloadable else "no",
        ", ".join(f"`{name}`" for name in parameter.pgbouncer),
    )


def _literal(value: object) -> str:
    """Write a default as the file would."""
    match value:
        case None:
            return "unset"
        case bool():
            return f"`{str(value).lower()}`"
        case Enum():
            return f'`"{value.value}"`'
        case str():
            return f'`"{value}"`'
        case tuple():
            return f"`[{', '.join(map(str, value))}]`"
    return f"`{value}`"


def _columns(columns: Columns) -> str:
    return ", ".join(f"`{name}` {TYPES[type_]}" for name, type_ in columns) + "."


def _rows(header: str, rows: Sequence[tuple[str, ...]]) -> str:
    def lines() -> Iterator[str]:
        names = header.split(" | ")
        yield "| " + " | ".join(names) + " |"
        yield "|" + " --- |" * len(names)
        for row in rows:
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"

    return "\n".join(lines()) + "\n"


if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())
