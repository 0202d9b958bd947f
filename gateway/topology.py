"""A topology file read into Settings, or the list of everything that is wrong with it.

All faults are told at once: where a value is faulty its default stands in, so that the rest is judged too.
A file that promises what the gateway does not do is a fault where silence could harm, else a warning.
No secret is ever shown.

Called by the supervisor at start and at reload, and by `gateway check`. Format: https://toml.io/en/v1.0.0
"""

import difflib
import json
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Iterator
from ipaddress import ip_address
from typing import Any, get_args, get_origin

import msgspec
from msgspec import Struct, structs

from gateway.settings import (
    CONSOLE_DATABASES,
    LISTEN_FORMS,
    PARAMETERS,
    UNIX_PORT,
    AuthType,
    Cluster,
    Database,
    Listen,
    Node,
    Reads,
    Settings,
    TlsMode,
    bare,
    expected,
    is_of_gateways,
    keys,
)
from gateway.supervisor.discovery import parse_discover
from health.view import Mode

# "unix:/run/gateway", "[::1]:6432", "localhost:6432"
LISTEN = re.compile(r"unix:(?P<folder>.+)|(?:\[(?P<v6>[\w:.%]+)\]|(?P<host>[^:/]+)):(?P<port>\d{1,5})", re.ASCII)
UNITS = {"": "", "s": ", in seconds", "B": ", in bytes"}
FOLLOW = "two who promote end in two primaries: use follow"
SUN_PATH = 107  # bytes of a unix socket's file name on Linux, unix(7)


class Fault(Struct, frozen=True):
    """One thing that is wrong, where, and what to write instead.

    `path` is a key path as in `cluster.main.node[0].port` (lists count from 0), a line of the file, or the file itself.
    """

    path: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" + (f" ({self.hint})" if self.hint else "")


class SettingsError(Exception):
    """A topology file that cannot be used, with every reason why."""

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__("\n".join(map(str, faults)))
        self.faults = faults


def load(path: str | os.PathLike[str]) -> Settings:
    """Read the topology file at `path`, whose own paths are relative to it; raise SettingsError with every fault."""
    settings, faults = _read(os.path.abspath(path))
    if settings is None or faults:
        raise SettingsError(faults)
    return structs.replace(settings, warnings=tuple(_warnings(settings)))


def check(path: str | os.PathLike[str]) -> list[Fault]:
    """Find every fault of the topology file at `path`."""
    return _read(os.path.abspath(path))[1]


def _read(path: str) -> tuple[Settings | None, list[Fault]]:
    try:
        with open(path, "rb") as file:
            document = tomllib.loads(file.read().decode("utf-8-sig"))
    except OSError as error:
        return None, [Fault(path, (error.strerror or str(error)).lower())]
    except UnicodeDecodeError as error:
        return None, [Fault(path, f"byte {error.start} is not UTF-8")]
    except tomllib.TOMLDecodeError as error:
        message, _, place = str(error).removesuffix(")").rpartition(" (at ")
        return None, [Fault(place, message[:1].lower() + message[1:])]
    except (ValueError, RecursionError):  # tomllib lets int()'s limit on digits and the depth of the stack through
        return None, [Fault(path, "holds a number too long or a list too deep")]
    reader = _Reader(os.path.dirname(path))
    settings: Settings = reader.table(Settings, document, "")
    front = settings.front
    listen = tuple(structs.replace(a, port=front.unix_port) if a.unix_path else a for a in front.listen)
    settings = structs.replace(
        settings,
        path=path,
        cluster=_with_state_files(settings.cluster, path),
        front=structs.replace(front, listen=listen),
    )
    # A value that stands in for a faulty one, or a list that lacks it, is not to be blamed again.
    told = {place for fault in reader.faults for place in (fault.path, fault.path.partition("[")[0])}
    return settings, reader.faults + [fault for fault in _contradictions(settings) if fault.path not in told]


def _with_state_files(clusters: dict[str, Cluster], path: str) -> dict[str, Cluster]:
    return {
        name: structs.replace(cluster, state_file=cluster.state_file or f"{path}.{name.replace('/', '_')}.state")
        for name, cluster in clusters.items()
    }


class _Reader:
    """Turns the parsed file into structs, and keeps the faults of the values that do not fit their fields."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.faults: list[Fault] = []

    def put(self, values: dict[Any, Any], key: object, kind: Any, found: object, path: str) -> None:
        """Add to `values` what the file holds at `path`, if it fits."""
        try:
            values[key] = self.value(kind, found, path)
        except SettingsError as error:
            self.faults += error.faults

    def value(self, kind: Any, found: object, path: str) -> Any:
        """Convert what the file holds at `path` to the type of a field; raise SettingsError if it does not fit."""
        plain, notes = bare(kind)
        values: dict[Any, Any] = {}
        if get_origin(plain) is dict:
            for name, item in _table(found, path).items():
                self.put(values, name, get_args(plain)[1], item, _join(path, name))
            return values
        if get_origin(plain) is tuple:
            (item_kind, _) = get_args(plain)
            if not isinstance(found, list):
                hint = f"write [[{path}]]" if item_kind is Node else f"expected {expected(plain)}"
                raise SettingsError([Fault(path, "is not a list", hint)])
            for number, item in enumerate(found):
                self.put(values, number, item_kind, item, f"{path}[{number}]")
            return tuple(values.values())
        if plain is Listen:
            return self.listen(found, path)
        if isinstance(plain, type) and issubclass(plain, Struct):
            return self.table(plain, _table(found, path), path)
        try:
            value = msgspec.convert(found, kind)
        except msgspec.ValidationError:
            shown = "its value" if "secret" in notes else _shown(found)
            hint = f"expected {expected(kind)}{UNITS[notes.get('unit', '')]}"
            raise SettingsError([Fault(path, f"{shown} is not valid", hint)]) from None
        return os.path.normpath(os.path.join(self.folder, value)) if "path" in notes else value

    def table(self, struct: type[Struct], found: dict[str, Any], path: str) -> Any:
        """Build a struct from its table; what is missing or unknown there is a fault."""
        known = keys(struct)
        required = [name for name, field in known.items() if field.required]
        values: dict[str, Any] = dict.fromkeys(required, "")
        for name in required:
            if name not in found:
                self.faults.append(Fault(_join(path, name), "is missing", f"expected {expected(known[name].type)}"))
        for key, item in found.items():
            where = _join(path, key)
            if key in known:
                self.put(values, key, known[key].type, item, where)
            else:
                self.faults.append(Fault(where, "is unknown", _nearest(key, known)))
        return struct(**values)

    def listen(self, found: object, path: str) -> Listen:
        """Take an address to listen on apart."""
        match = LISTEN.fullmatch(found) if isinstance(found, str) else None
        if match:
            folder = match["folder"] and os.path.normpath(os.path.join(self.folder, match["folder"]))
            host, port = folder or match["v6"] or match["host"], int(match["port"] or UNIX_PORT)
            try:
                return msgspec.convert({"host": host, "port": port}, Listen)
            except msgspec.ValidationError:
                pass
        raise SettingsError([Fault(path, f"{_shown(found)} is not valid", f"expected {LISTEN_FORMS}")])


def _table(found: object, path: str) -> dict[str, Any]:
    if isinstance(found, dict):
        return found
    raise SettingsError([Fault(path, "is not a table", f"write [{path}]")])


def _join(path: str, key: str) -> str:
    """Add a key to a path, quoted where TOML asks for it."""
    key = key if re.fullmatch(r"[\w-]+", key, re.ASCII) else json.dumps(key)
    return f"{path}.{key}" if path else key


def _shown(value: object) -> str:
    """Write a value as the file does, short, and with nothing in it that could steer a terminal."""
    return "a table" if isinstance(value, dict) else json.dumps(value, default=str)[:60]


def _nearest(key: str, known: dict[str, structs.FieldInfo]) -> str:
    """Guess what an unknown key was meant to be: PgBouncer's name, a key of another table, or a slip of the pen."""
    for name, field in known.items():
        if key in bare(field.type)[1].get("pgbouncer", ()):
            return f"did you mean {name}?"
    elsewhere = dict.fromkeys(f"{p.name} in [{p.section}]" for p in PARAMETERS if key in (p.name, *p.pgbouncer))
    if elsewhere:
        return "did you mean " + " or ".join(elsewhere) + "?"
    near = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {near[0]}?" if near else ""


def _contradictions(settings: Settings) -> Iterator[Fault]:
    """Find what is wrong with values that are each fine alone, and what is promised but would not be kept."""
    front = settings.front
    if not front.listen:
        yield Fault("front.listen", "is empty", f"expected {expected(tuple[Listen, ...])}")
    yield from _repeated(((f"front.listen[{number}]", str(address)) for number, address in enumerate(front.listen)))
    for number, address in enumerate(front.listen):
        if address.unix_path and len(os.fsencode(address.unix_path)) > SUN_PATH:
            yield Fault(f"front.listen[{number}]", f"the path of the socket is longer than {SUN_PATH} bytes")
    if front.auth.type in (AuthType.CERT, AuthType.HBA):
        yield Fault("front.auth.type", f"{front.auth.type} is not available yet", "use scram-sha-256")
    elif front.auth.type != AuthType.TRUST and front.auth.file is None:
        yield Fault("front.auth.file", "is missing", f"{front.auth.type} needs the users' secrets")
    elif front.auth.file and not (os.path.isfile(front.auth.file) and os.access(front.auth.file, os.R_OK)):
        yield Fault("front.auth.file", f"{front.auth.file} is not a file that can be read")
    if front.resolv_conf and not os.access(front.resolv_conf, os.R_OK):
        yield Fault("front.resolv_conf", f"{front.resolv_conf} is not a file that can be read")
    for path, mode in _tls(settings):
        if mode not in (TlsMode.DISABLE, TlsMode.ALLOW, TlsMode.PREFER):
            yield Fault(path, f"{mode} is not available yet", "use disable and a network that you trust")
    if not settings.cluster:
        yield Fault("cluster", "is missing", "write [cluster.main] and its [[cluster.main.node]]")
    for name, cluster in settings.cluster.items():
        yield from _cluster_faults(_join("cluster", name), cluster)
    if not settings.database:
        yield Fault("database", "is missing", 'write [database."*"] and its cluster')
    for name, database in settings.database.items():
        path = _join("database", name)
        if name in CONSOLE_DATABASES:
            yield Fault(path, "is the name of the console", "choose another name and set dbname")
        yield from _database_faults(path, database, settings.cluster)


def _cluster_faults(path: str, cluster: Cluster) -> Iterator[Fault]:
    if cluster.discover is not None:
        try:
            parse_discover(cluster.discover)
        except ValueError as error:
            yield Fault(f"{path}.discover", str(error))
        if cluster.node:
            yield Fault(f"{path}.discover", "is set beside nodes", f"remove either it or [[{path}.node]]")
    elif not cluster.node:
        yield Fault(f"{path}.node", "is missing", f"write [[{path}.node]] and its name and host")
    if len({node.kind for node in cluster.node}) > 1:
        yield Fault(f"{path}.node", "are of several kinds", "a cluster is of servers or of gateways")
    elif is_of_gateways(cluster) and (cluster.failover.mode is not Mode.FOLLOW or cluster.manager is not None):
        yield Fault(f"{path}.failover.mode", "is not for gateways", "those that are the nodes promote, or nobody")
    if cluster.manager is not None and cluster.failover.mode is not Mode.FOLLOW:
        yield Fault(f"{path}.failover.mode", f"{cluster.failover.mode} is not for a cluster that has a manager", FOLLOW)
    if (cluster.manager is None) != (not cluster.patroni_urls):
        yield Fault(f"{path}.patroni_urls", "is for manager patroni, which needs it", '"http://10.0.0.11:8008"')
    folder = os.path.dirname(cluster.state_file or "")
    if cluster.failover.mode is not Mode.FOLLOW and not os.access(folder, os.W_OK):
        yield Fault(f"{path}.state_file", f"cannot be written in {folder}", "choose a directory of the gateway's")
    if cluster.failover.mode is Mode.COMMAND and cluster.failover.failover_command is None:
        yield Fault(f"{path}.failover.failover_command", "is missing", "mode command promotes by it")
    nodes = [(f"{path}.node[{number}]", node) for number, node in enumerate(cluster.node)]
    yield from _repeated((f"{where}.name", node.name) for where, node in nodes)
    yield from _repeated((f"{where}.host", f"{node.host} port {node.port}") for where, node in nodes)


def _database_faults(path: str, database: Database, clusters: dict[str, Cluster]) -> Iterator[Fault]:
    cluster = clusters.get(database.cluster)
    names = [node.name for node in cluster.node] if cluster and cluster.discover is None else []
    if cluster is None and clusters:
        yield Fault(f"{path}.cluster", f"there is no [{_join('cluster', database.cluster)}]", _one_of(clusters))
    if names and database.node is not None and database.node not in names:
        yield Fault(f"{path}.node", f"there is no node {json.dumps(database.node)} in its cluster", _one_of(names))
    if database.password is not None and database.user is None:
        yield Fault(f"{path}.password", "is set without user", "a password belongs to the user that it logs in")


def _repeated(values: Iterable[tuple[str, str]]) -> Iterator[Fault]:
    first: dict[str, str] = {}
    for path, value in values:
        if first.setdefault(value, path) != path:
            yield Fault(path, f"{value} is used already", f"by {first[value]}")


def _one_of(names: Iterable[str]) -> str:
    return f"expected {' | '.join(map(json.dumps, names))}"


def _tls(settings: Settings) -> Iterator[tuple[str, TlsMode]]:
    yield "front.tls.mode", settings.front.tls.mode
    for name, cluster in settings.cluster.items():
        yield f"{_join('cluster', name)}.tls.mode", cluster.tls.mode


def _warnings(settings: Settings) -> Iterator[str]:
    """Find what works but may not be what the operator believes."""
    front = settings.front
    if front.auth.type == AuthType.TRUST:
        for address in front.listen:
            if not _is_local(address):
                yield f"front.auth.type: trust lets whoever reaches {address} be any user"
    for path, mode in _tls(settings):
        if mode != TlsMode.DISABLE:
            yield f"{path}: {mode} is not available yet, connections are not encrypted"
    for name, cluster in settings.cluster.items():
        path = _join("cluster", name)
        if cluster.reads != Reads.PRIMARY:
            yield f"{path}.reads: {cluster.reads} is not available yet, the primary answers reads"
        failover, count = cluster.failover, len(cluster.node)
        needed = failover.quorum or count // 2 + 1
        if count and failover.mode != Mode.FOLLOW and needed > count - 1:
            yield f"{path}.failover.quorum: {needed} of {count} nodes never answer while the primary is down"
    for name, user in settings.user.items():
        if user.reads not in (None, Reads.PRIMARY):
            yield f"{_join('user', name)}.reads: {user.reads} is not available yet, the primary answers reads"
    if settings.metrics.listen is not None:
        yield "metrics.listen: is not served yet"
    passwords = [cluster.probe_password for cluster in settings.cluster.values()]
    passwords += [database.password for database in settings.database.values()]
    for file in (settings.path if any(passwords) else None, front.auth.file):
        if file is not None and _is_open_to_all(file):
            yield f"{file}: holds secrets and every user of this machine can read it"


def _is_local(address: Listen) -> bool:
    try:
        return address.host == "localhost" or address.unix_path is not None or ip_address(address.host).is_loopback
    except ValueError:
        return False


def _is_open_to_all(file: str) -> bool:
    try:
        return bool(os.stat(file).st_mode & stat.S_IROTH)
    except OSError:
        return False
