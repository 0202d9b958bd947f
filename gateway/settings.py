"""The settings as plain frozen values, and the one table that documents every one of them.

A setting is declared once, as a field: type, range, unit, default and words together; PARAMETERS is read off them.
Nothing here opens a file or looks at the machine; 0 means off or unlimited wherever a number may be 0.
The structs travel to the workers as msgpack, so they hold only what msgpack holds.

Used by everything; built by gateway.topology. Names are PgBouncer's where the meaning is the same:
https://www.pgbouncer.org/config.html
"""

from collections.abc import Iterator
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Meta, Struct, inspect
from msgspec.structs import FieldInfo

from health.view import Mode

LIMIT = 2**31 - 1  # what PostgreSQL's and PgBouncer's own integer settings hold
UNIX_PORT = 6432
CONSOLE_DATABASES = ("gateway", "pgbouncer")
LISTEN_FORMS = '"host:port", "[address]:port" or "unix:/directory"'

Seconds = Annotated[float, Meta(ge=0, le=LIMIT, extra={"unit": "s"})]
Interval = Annotated[float, Meta(ge=0.01, le=3600, extra={"unit": "s"})]
Keepalive = Annotated[int, Meta(ge=0, le=32767, extra={"unit": "s"})]  # the kernel's MAX_TCP_KEEPIDLE
Count = Annotated[int, Meta(ge=0, le=LIMIT)]
Times = Annotated[int, Meta(ge=1, le=1000)]
Port = Annotated[int, Meta(ge=1, le=65535)]
# The protocol ends its texts with a NUL, which TOML can write and PostgreSQL cannot hold.
Text = Annotated[str, Meta(pattern=r"^[^\x00]*$")]
Name = Annotated[str, Meta(pattern=r"^[^\x00]+$", extra={"type": "text, not empty"})]
Path = Annotated[str, Meta(pattern=r"^[^\x00]+$", extra={"type": "path", "path": True})]
Secret = Annotated[str, Meta(pattern=r"^[^\x00]+$", extra={"type": "text, not empty", "secret": True})]
# A directory, an IPv6 address (which has two colons, unlike "host:port"), or a name or IPv4 address.
Host = Annotated[
    str,
    Meta(
        pattern=r"^(/[^\x00]*|[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*(%\w+)?|[^\s\x00/,:*\[\]]+)$",
        extra={"type": 'host name, address or "/directory"'},
    ),
]


def about(text: str, *, reloadable: bool = True, pgbouncer: str = "", type: str = "") -> Meta:
    """Describe a field: `pgbouncer` holds the names that PgBouncer has for it when they differ, split by spaces."""
    extra: dict[str, object] = {"reloadable": reloadable, "pgbouncer": tuple(pgbouncer.split())}
    return Meta(description=text, extra=extra | ({"type": type} if type else {}))


class PoolMode(StrEnum):
    """When a server goes back to its pool."""

    SESSION = "session"
    TRANSACTION = "transaction"
    STATEMENT = "statement"


class AuthType(StrEnum):
    """How a client proves who it is."""

    TRUST = "trust"
    PASSWORD = "password"
    MD5 = "md5"
    SCRAM_SHA_256 = "scram-sha-256"
    CERT = "cert"
    HBA = "hba"


class TlsMode(StrEnum):
    """libpq's sslmode, with the same meaning on both sides."""

    DISABLE = "disable"
    ALLOW = "allow"
    PREFER = "prefer"
    REQUIRE = "require"
    VERIFY_CA = "verify-ca"
    VERIFY_FULL = "verify-full"


class Reads(StrEnum):
    """Which nodes answer statements that only read."""

    PRIMARY = "primary"
    STANDBY = "standby"
    BALANCED = "balanced"


class Consistency(StrEnum):
    """Whose writes a read on a standby must see: nobody's, this session's, or everybody's."""

    NONE = "none"
    SESSION = "session"
    GLOBAL = "global"


class LogFormat(StrEnum):
    """How a log line is written."""

    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    """The least severe log line that is written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Listen(Struct, frozen=True, kw_only=True):
    """An address to listen on: a host and a port, or as in libpq a directory (it starts with "/") and a port."""

    host: Host
    port: Port

    @property
    def unix_path(self) -> str | None:
        """The file of a unix socket, None for TCP (PostgreSQL manual, unix_socket_directories)."""
        return f"{self.host}/.s.PGSQL.{self.port}" if self.host.startswith("/") else None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.unix_path or f"{host}:{self.port}"


class Auth(Struct, frozen=True, kw_only=True):
    """How clients log in."""

    type: Annotated[AuthType, about("Method; cert and hba are not available yet", pgbouncer="auth_type")] = (
        AuthType.SCRAM_SHA_256
    )
    file: Annotated[Path | None, about("Users and their secrets, in PgBouncer's format", pgbouncer="auth_file")] = None
    scram_iterations: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)],
        about("Rounds of PBKDF2 for a SCRAM secret that is made from a plain password"),
    ] = 4096


class Tls(Struct, frozen=True, kw_only=True):
    """TLS to the clients, or to the servers of a cluster."""

    mode: Annotated[
        TlsMode,
        about("When to use TLS; only disable is available yet", pgbouncer="client_tls_sslmode server_tls_sslmode"),
    ] = TlsMode.DISABLE
    cert: Annotated[
        Path | None,
        about("Certificate chain, PEM (not available yet)", pgbouncer="client_tls_cert_file server_tls_cert_file"),
    ] = None
    key: Annotated[
        Path | None,
        about("Private key, PEM (not available yet)", pgbouncer="client_tls_key_file server_tls_key_file"),
    ] = None
    ca: Annotated[
        Path | None,
        about(
            "Certificates that vouch for the peer (not available yet)",
            pgbouncer="client_tls_ca_file server_tls_ca_file",
        ),
    ] = None


class Front(Struct, frozen=True, kw_only=True):
    """The endpoint that applications connect to."""

    listen: Annotated[
        tuple[Listen, ...],
        about("Addresses to listen on", reloadable=False, pgbouncer="listen_addr listen_port unix_socket_dir"),
    ] = ()
    listen_backlog: Annotated[
        Annotated[int, Meta(ge=1, le=65535)], about("Connections the kernel holds until accepted", reloadable=False)
    ] = 4096
    unix_port: Annotated[Port, about("Port in the file name of a unix socket, .s.PGSQL.PORT", reloadable=False)] = (
        UNIX_PORT
    )
    unix_socket_mode: Annotated[
        Annotated[str, Meta(pattern="^0?[0-7]{3}$")],
        about("Permissions of a unix socket", reloadable=False, type='octal mode as text, such as "0770"'),
    ] = "0777"
    workers: Annotated[
        Literal["auto"] | Annotated[int, Meta(ge=1, le=64)],
        about("Processes that carry traffic; auto is one per core", reloadable=False, pgbouncer="so_reuseport"),
    ] = "auto"
    auth: Auth = Auth()
    tls: Tls = Tls()

    pool_mode: Annotated[PoolMode, about("When a server goes back to its pool")] = PoolMode.TRANSACTION
    max_client_conn: Annotated[Count, about("Client connections in all")] = 5000
    default_pool_size: Annotated[Count, about("Server connections of a pool")] = 20
    min_pool_size: Annotated[Count, about("Server connections that a pool in use keeps open")] = 0
    warm_pool_size: Annotated[
        Count, about("Connections of a pool in use ready on each standby, so that a promotion needs no reconnect")
    ] = 1
    reserve_pool_size: Annotated[Count, about("Further server connections for clients that wait long")] = 0
    reserve_pool_timeout: Annotated[Seconds, about("Wait after which a client may use the reserve")] = 5.0
    max_db_connections: Annotated[Count, about("Server connections of a database, whatever the user")] = 0
    max_user_connections: Annotated[Count, about("Server connections of a user, whatever the database")] = 0
    max_db_client_connections: Annotated[Count, about("Client connections of a database")] = 0
    max_user_client_connections: Annotated[Count, about("Client connections of a user")] = 0

    max_prepared_statements: Annotated[Count, about("Prepared statements kept per server connection")] = 200
    max_packet_size: Annotated[
        Annotated[int, Meta(ge=1024, le=LIMIT, extra={"unit": "B"})], about("Largest message taken from a client")
    ] = LIMIT
    max_startup_packet: Annotated[
        Annotated[int, Meta(ge=512, le=2**20, extra={"unit": "B"})],
        about("Largest message taken from a client that has not logged in"),
    ] = 10000
    ignore_startup_parameters: Annotated[
        tuple[Name, ...], about("Startup parameters that are dropped instead of refused")
    ] = ()

    server_lifetime: Annotated[Seconds, about("Age at which an unused server connection is closed")] = 3600.0
    server_idle_timeout: Annotated[Seconds, about("Idle time after which a server connection is closed")] = 600.0
    server_connect_timeout: Annotated[Seconds, about("Time to connect and log in to a server")] = 15.0
    server_login_retry: Annotated[Seconds, about("Pause after a failed login to a server")] = 1.0
    server_check_query: Annotated[Text, about("Query that tests an idle server connection; empty: no test")] = (
        "select 1"
    )
    server_check_delay: Annotated[Seconds, about("Idle time after which a server is tested before use")] = 30.0
    server_reset_query: Annotated[Text, about("Query that cleans a server after a session; empty: none")] = (
        "DISCARD ALL"
    )
    server_reset_query_always: Annotated[bool, about("Reset after every transaction, not only after sessions")] = False
    server_round_robin: Annotated[bool, about("Use the server idle longest, not the one used last")] = False
    server_cleanup_timeout: Annotated[Seconds, about("Time to roll back what a vanished client left running")] = 5.0

    query_wait_timeout: Annotated[Seconds, about("Longest wait of a client for a server")] = 120.0
    query_wait_notify: Annotated[Seconds, about("Wait after which a client is sent a notice")] = 5.0
    query_timeout: Annotated[Seconds, about("Longest run of a query")] = 0.0
    transaction_timeout: Annotated[Seconds, about("Longest transaction")] = 0.0
    idle_transaction_timeout: Annotated[Seconds, about("Longest pause of a client inside a transaction")] = 0.0
    client_idle_timeout: Annotated[Seconds, about("Longest pause of a client outside a transaction")] = 0.0
    client_login_timeout: Annotated[Seconds, about("Time for a client to log in")] = 60.0
    cancel_wait_timeout: Annotated[Seconds, about("Longest wait of a cancel request for a connection")] = 10.0
    failover_sqlstate: Annotated[
        Annotated[str, Meta(pattern="^([0-9A-Z]{5})?$")],
        about(
            "SQLSTATE of a transaction lost with its server; empty: 57P01 or 08006",
            type='five digits or capitals, such as "40001"',
        ),
    ] = ""

    tcp_keepalive: Annotated[bool, about("Use TCP keepalive, on both sides")] = True
    tcp_keepidle: Annotated[Keepalive, about("Idle time before the first keepalive; 0: the kernel's")] = 0
    tcp_keepintvl: Annotated[Keepalive, about("Time between keepalives; 0: the kernel's")] = 0
    tcp_keepcnt: Annotated[
        Annotated[int, Meta(ge=0, le=127)], about("Keepalives unanswered before the end; 0: the kernel's")
    ] = 0
    # The upper bound catches a value copied from PgBouncer, whose unit is the millisecond.
    tcp_user_timeout: Annotated[
        Annotated[float, Meta(ge=0, le=3600, extra={"unit": "s"})],
        about("Time that sent data may stay unacknowledged; 0: the kernel's"),
    ] = 0.0
    read_buffer_size: Annotated[
        Annotated[int, Meta(ge=4096, le=2**24, extra={"unit": "B"})],
        about("Bytes read from a socket at once", reloadable=False, pgbouncer="pkt_buf"),
    ] = 65536
    high_water_mark: Annotated[
        Annotated[int, Meta(ge=4096, le=2**30, extra={"unit": "B"})],
        about("Bytes queued to a slow reader before its source is no longer read"),
    ] = 65536

    resolv_conf: Annotated[
        Path | None, about("Names are resolved as this file says, as in resolv.conf(5); unset: the system's")
    ] = None

    log_level: Annotated[LogLevel, about("Least severe line that is logged", pgbouncer="verbose")] = LogLevel.INFO
    log_format: Annotated[LogFormat, about("How a log line is written")] = LogFormat.TEXT
    log_connections: Annotated[bool, about("Log every login")] = False
    log_disconnections: Annotated[bool, about("Log every disconnection with its reason")] = False
    log_pooler_errors: Annotated[bool, about("Log every error sent to a client")] = True
    stats_period: Annotated[
        Annotated[float, Meta(ge=1, le=86400, extra={"unit": "s"})], about("Time over which averages are taken")
    ] = 60.0
    shutdown_timeout: Annotated[Seconds, about("Time for clients to finish when the gateway is told to stop")] = 60.0


class Node(Struct, frozen=True, kw_only=True):
    """A PostgreSQL server."""

    name: Annotated[Name, about("Name in the console, the logs and the metrics")]
    host: Annotated[Host, about("Host name, address, or directory of a unix socket")]
    port: Annotated[Port, about("Port")] = 5432
    kind: Annotated[
        Literal["postgres", "gateway"], about("A server, or a further gateway, of which one that answers is used")
    ] = "postgres"
    weight: Annotated[Annotated[int, Meta(ge=0, le=1000)], about("Share of the reads; 0: none")] = 1
    priority: Annotated[
        Annotated[int, Meta(ge=0, le=1000)],
        about("Of two standbys that got equally far the higher one is promoted; 0: never"),
    ] = 100


class Failover(Struct, frozen=True, kw_only=True):
    """What happens when the primary dies. Commands are lines for /bin/sh."""

    mode: Annotated[Mode, about("Who promotes a standby: somebody else, the gateway, or failover_command")] = (
        Mode.FOLLOW
    )
    quorum: Annotated[Count, about("Nodes that have to answer before one is promoted; 0: the majority")] = 0
    max_lag_on_failover: Annotated[
        Annotated[int, Meta(ge=0, le=2**40, extra={"unit": "B"})],
        about("Written by the primary and lacking on a standby, above which it is not promoted"),
    ] = 2**20
    cool_off: Annotated[Seconds, about("Time from one failover or switchover to the next failover")] = 30.0
    startup_grace: Annotated[
        Seconds, about("Time from the start on for a primary that is known from an earlier run alone")
    ] = 10.0
    fence_command: Annotated[Name | None, about("Stops the old primary before a standby is promoted")] = None
    demote_command: Annotated[Name | None, about("Makes the primary a standby of another node, for a switchover")] = (
        None
    )
    failover_command: Annotated[Name | None, about("Promotes a standby, in mode command")] = None
    rejoin_command: Annotated[Name | None, about("Makes an old primary that came back a standby")] = None
    command_timeout: Annotated[Seconds, about("Time for a command, then it is killed")] = 30.0
    step_timeout: Annotated[Seconds, about("Time for a step on a node, such as to stop its receiver")] = 5.0
    promote_timeout: Annotated[Seconds, about("Time for a standby to become a primary")] = 60.0
    switchover_timeout: Annotated[Seconds, about("Time for transactions to end before a switchover")] = 5.0


class Cluster(Struct, frozen=True, kw_only=True):
    """One primary and its standbys; which is which is found by asking them."""

    node: tuple[Node, ...] = ()
    discover: Annotated[
        Name | None, about("Instead of nodes, a name in DNS that lists them: srv:NAME or dns:NAME:PORT")
    ] = None
    manager: Annotated[Literal["patroni"] | None, about("Who else promotes, and is asked which node is the leader")] = (
        None
    )
    patroni_urls: Annotated[tuple[Name, ...], about("REST API of Patroni, of one member or more")] = ()
    failover: Failover = Failover()
    state_file: Annotated[
        Path | None, about("What a failover must not forget; unset: beside the topology file, .CLUSTER.state added")
    ] = None
    tls: Tls = Tls()
    server_check_query: Annotated[Text, about("Query that a healthy node answers")] = "select 1"
    probe_interval: Annotated[Interval, about("Time between two probes of a healthy node")] = 1.0
    probe_interval_fast: Annotated[Interval, about("Time between two probes while a node is in doubt")] = 0.1
    probe_timeout: Annotated[Interval, about("Time for a probe to be answered")] = 2.0
    fall: Annotated[Times, about("Failed probes in a row that make a node down")] = 3
    rise: Annotated[Times, about("Good probes in a row that make a node up")] = 2
    probe_user: Annotated[Name, about("User of the probes")] = "postgres"
    probe_password: Annotated[Secret | None, about("Password of the probes; unset: the one in front.auth.file")] = None
    probe_database: Annotated[Name, about("Database of the probes")] = "postgres"
    reads: Annotated[Reads, about("Who answers reads; only primary is available yet")] = Reads.PRIMARY
    consistency: Annotated[Consistency, about("Whose writes a read on a standby must see")] = Consistency.SESSION
    max_lag: Annotated[Seconds, about("Lag above which a standby answers no reads")] = 0.0


def is_of_gateways(cluster: Cluster) -> bool:
    """Are the nodes of a cluster further gateways?"""
    return any(node.kind == "gateway" for node in cluster.node)


class Database(Struct, frozen=True, kw_only=True):
    """What a client gets when it asks for this database; "*" stands for every other name."""

    cluster: Annotated[Name, about("Cluster that holds the database")]
    node: Annotated[Name | None, about("Node to stay on; unset: whichever fits", pgbouncer="host")] = None
    dbname: Annotated[Name | None, about("Name on the server; unset: the name asked for")] = None
    user: Annotated[Name | None, about("User on the server for every client; unset: the client's own")] = None
    password: Annotated[Secret | None, about("Password of that user; unset: the one in front.auth.file")] = None
    pool_mode: Annotated[PoolMode | None, about("Instead of front.pool_mode")] = None
    pool_size: Annotated[Count | None, about("Instead of front.default_pool_size")] = None
    min_pool_size: Annotated[Count | None, about("Instead of front.min_pool_size")] = None
    reserve_pool_size: Annotated[
        Count | None, about("Instead of front.reserve_pool_size", pgbouncer="reserve_pool")
    ] = None
    max_db_connections: Annotated[Count | None, about("Instead of front.max_db_connections")] = None
    max_db_client_connections: Annotated[Count | None, about("Instead of front.max_db_client_connections")] = None
    query_wait_timeout: Annotated[Seconds | None, about("Instead of front.query_wait_timeout")] = None
    server_lifetime: Annotated[Seconds | None, about("Instead of front.server_lifetime")] = None
    connect_query: Annotated[Name | None, about("Query to run on every new server connection")] = None
    client_encoding: Annotated[Text | None, about("Parameter of every new server connection")] = None
    datestyle: Annotated[Text | None, about("Parameter of every new server connection")] = None
    timezone: Annotated[Text | None, about("Parameter of every new server connection")] = None
    application_name: Annotated[Text | None, about("Parameter of every new server connection")] = None


class User(Struct, frozen=True, kw_only=True):
    """What differs for one user."""

    pool_mode: Annotated[PoolMode | None, about("Instead of the database's")] = None
    pool_size: Annotated[Count | None, about("Instead of the database's")] = None
    reserve_pool_size: Annotated[Count | None, about("Instead of the database's")] = None
    max_user_connections: Annotated[Count | None, about("Instead of front.max_user_connections")] = None
    max_user_client_connections: Annotated[Count | None, about("Instead of front.max_user_client_connections")] = None
    query_timeout: Annotated[Seconds | None, about("Instead of front.query_timeout")] = None
    query_wait_timeout: Annotated[Seconds | None, about("Instead of the database's")] = None
    transaction_timeout: Annotated[Seconds | None, about("Instead of front.transaction_timeout")] = None
    idle_transaction_timeout: Annotated[Seconds | None, about("Instead of front.idle_transaction_timeout")] = None
    client_idle_timeout: Annotated[Seconds | None, about("Instead of front.client_idle_timeout")] = None
    reads: Annotated[Reads | None, about("Instead of the cluster's; only primary is available yet")] = None


class Console(Struct, frozen=True, kw_only=True):
    """Who may use the admin console, the databases "gateway" and "pgbouncer"."""

    admin_users: Annotated[tuple[Name, ...], about("Users who may give every command")] = ()
    stats_users: Annotated[tuple[Name, ...], about("Users who may only look")] = ()


class Metrics(Struct, frozen=True, kw_only=True):
    """Where measurements are served."""

    listen: Annotated[Listen | None, about("Address of the metrics page (not served yet)", reloadable=False)] = None


class Settings(Struct, frozen=True, kw_only=True):
    """One topology file: `path` is where it was read, `warnings` are for the operator."""

    front: Front = Front()
    cluster: dict[str, Cluster] = {}
    database: dict[str, Database] = {}
    user: dict[str, User] = {}
    console: Console = Console()
    metrics: Metrics = Metrics()
    path: str = ""
    warnings: tuple[str, ...] = ()


class PoolSettings(Struct, frozen=True, kw_only=True):
    """Everything that holds for one client of one pool.

    What concerns its servers (pool_mode, the sizes, max_user_connections, and query_timeout, transaction_timeout and
    idle_transaction_timeout) is taken from the user that logs in to them; what concerns the client alone
    (query_wait_timeout, client_idle_timeout, max_user_client_connections, reads) from the user it logged in as.
    Without a forced user the two are one. Either wins over the database, and that over the front.
    """

    database: str
    user: str
    cluster: str
    node: str | None
    dbname: str
    server_user: str
    forced_user: bool
    password: str | None
    startup: tuple[tuple[str, str], ...]
    connect_query: str | None
    pool_mode: PoolMode
    pool_size: int
    min_pool_size: int
    warm_pool_size: int
    reserve_pool_size: int
    reserve_pool_timeout: float
    max_db_connections: int
    max_user_connections: int
    max_db_client_connections: int
    max_user_client_connections: int
    max_prepared_statements: int
    server_lifetime: float
    server_idle_timeout: float
    server_connect_timeout: float
    server_login_retry: float
    server_check_query: str
    server_check_delay: float
    server_reset_query: str
    server_reset_query_always: bool
    server_round_robin: bool
    server_cleanup_timeout: float
    query_wait_timeout: float
    query_wait_notify: float
    query_timeout: float
    transaction_timeout: float
    idle_transaction_timeout: float
    client_idle_timeout: float
    cancel_wait_timeout: float
    reads: Reads


class Parameter(Struct, frozen=True, kw_only=True):
    """One setting as an operator sees it; `section` is its table, with NAME where the file has a name of its own."""

    section: str
    name: str
    type: str
    unit: str
    default: Any
    required: bool
    reloadable: bool
    pgbouncer: tuple[str, ...]
    doc: str


def bare(kind: Any) -> tuple[Any, dict[str, Any]]:
    """Strip a field's type of Annotated and of "or None"; return it with all that the annotations say."""
    notes: dict[str, Any] = {}
    while True:
        if get_origin(kind) is Annotated:
            kind, *metas = get_args(kind)
            for meta in metas:
                notes |= (meta.extra or {}) | ({"doc": meta.description} if meta.description else {})
        elif type(None) in get_args(kind):
            kind = Union[tuple(arm for arm in get_args(kind) if arm is not type(None))]  # noqa: UP007
        else:
            return kind, notes


@cache
def keys(struct: type[Struct]) -> dict[str, FieldInfo]:
    """Find the fields that a topology file may set: those that are described, and those that are tables."""
    return {
        field.name: field
        for field in msgspec.structs.fields(struct)
        if table(field.type) or "doc" in bare(field.type)[1]
    }


def table(kind: Any) -> type[Struct] | None:
    """Find the struct that one table of a field of this type is read into, None if the field holds no tables."""
    kind, _ = bare(kind)
    if get_origin(kind) in (dict, tuple):
        kind, _ = bare(get_args(kind)[get_origin(kind) is dict])
    return kind if isinstance(kind, type) and issubclass(kind, Struct) and kind is not Listen else None


def expected(kind: Any) -> str:
    """Say in words which values a field of this type takes."""
    return _words(inspect.type_info(kind))


def _words(info: inspect.Type) -> str:
    match info:
        case inspect.Metadata(extra={"type": str(words)}):
            return words
        case inspect.Metadata(type=inner):
            return _words(inner)
        case inspect.UnionType(types=arms):
            return " | ".join(_words(arm) for arm in arms if not isinstance(arm, inspect.NoneType))
        case inspect.LiteralType(values=values):
            return " | ".join(str(value) for value in values)
        case inspect.EnumType(cls=cls):
            return " | ".join(member.value for member in cls)
        case inspect.IntType(ge=low, le=high):
            return f"integer ({low} .. {high})"
        case inspect.FloatType(ge=low, le=high):
            return f"number ({low} .. {high})"
        case inspect.BoolType():
            return "true | false"
        case inspect.VarTupleType(item_type=item):
            return f"list of {_words(item)}"
        case inspect.StructType():
            return LISTEN_FORMS
        case _:
            return "text"


def _parameters(section: str, struct: type[Struct]) -> Iterator[Parameter]:
    for name, field in keys(struct).items():
        kind, notes = bare(field.type)
        if inner := table(kind):
            yield from _parameters(f"{section}.{name}{'.NAME' if get_origin(kind) is dict else ''}".lstrip("."), inner)
            continue
        yield Parameter(
            section=section,
            name=name,
            type=expected(field.type),
            unit=notes.get("unit", ""),
            default=None if field.required else field.default,
            required=field.required,
            reloadable=notes["reloadable"],
            pgbouncer=notes["pgbouncer"],
            doc=notes["doc"],
        )


PARAMETERS = tuple(_parameters("", Settings))


def schema() -> dict[str, Any]:
    """Build the JSON schema of a topology file, for editors."""
    schema = msgspec.json.schema(Settings)
    definitions = schema["$defs"]
    for name in ("path", "warnings"):
        del definitions["Settings"]["properties"][name]
    for definition in definitions.values():
        if "properties" in definition:
            definition["additionalProperties"] = False
    definitions["Listen"] = {"type": "string", "description": LISTEN_FORMS}
    return schema
