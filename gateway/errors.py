"""Every error that a client can see: its SQLSTATE, severity, text and hint, each defined once.

1. Each is a class of its own, so it can be raised, caught and counted by its name: `raise errors.MAX_CLIENT_CONN`,
   `raise errors.NO_SUCH_DATABASE(database=name)`.
2. Where PostgreSQL has a text for it, it is that text; else PgBouncer's. The hint names the setting that changes it.
3. FATAL means that the connection ends after the message; ERROR, that it goes on and that ReadyForQuery is still owed.

Called by whoever refuses something to a client.
Manual: appendix "PostgreSQL Error Codes", chapter "Error Message Style Guide".
"""

from __future__ import annotations

import enum
from typing import ClassVar, Final

from gateway.wire import messages


class Severity(enum.StrEnum):
    """What becomes of the connection, or NOTICE for what is no error."""

    NOTICE = "NOTICE"
    ERROR = "ERROR"
    FATAL = "FATAL"
    PANIC = "PANIC"


class GatewayError(Exception):
    """An error to send to a client; the kinds of it are what define() returns, below."""

    name: ClassVar[str]  # labels it in the log and in the metrics
    sqlstate: ClassVar[str]
    template: ClassVar[str]
    hint: ClassVar[str]
    severity: Severity

    def __init__(self, *, detail: str = "", fatal: bool = False, **values: object) -> None:
        """Fill the braces of the text with values.

        Set fatal where the connection cannot go on although it usually does, as before the login is done.
        """
        self.message = self.template.format_map(values)
        self.detail = detail
        if fatal:
            self.severity = Severity.FATAL
        super().__init__(self.message)

    def encode(self) -> bytes:
        """Build the ErrorResponse, or NoticeResponse, with the fields in PostgreSQL's order."""
        fields = {
            "severity": self.severity,
            "severity_nonlocalized": self.severity,
            "sqlstate": self.sqlstate,
            "message": self.message,
        }
        if self.detail:
            fields["detail"] = self.detail
        if self.hint:
            fields["hint"] = self.hint
        if self.severity is Severity.NOTICE:
            return messages.notice_response(fields)
        return messages.error_response(fields)


KINDS: Final[dict[str, type[GatewayError]]] = {}


def define(name: str, severity: Severity, sqlstate: str, template: str, hint: str = "") -> type[GatewayError]:
    """Add a kind of error to KINDS; raises ValueError for a name, or a SQLSTATE and text, that is there already."""
    for other in KINDS.values():
        if other.name == name or (other.sqlstate, other.template) == (sqlstate, template):
            raise ValueError(f"error {name} is defined twice, first as {other.name}")
    attributes = {"name": name, "severity": severity, "sqlstate": sqlstate, "template": template, "hint": hint}
    kind = KINDS[name] = type(name, (GatewayError,), attributes)
    return kind


NOTICE, ERROR, FATAL = Severity.NOTICE, Severity.ERROR, Severity.FATAL

# The start of a connection.

STARTUP_LENGTH = define("startup_length", FATAL, "08P01", "invalid length of startup packet")
STARTUP_LAYOUT = define(
    "startup_layout", FATAL, "08P01", "invalid startup packet layout: expected terminator as last byte"
)
STARTUP_ENCODING = define("startup_encoding", FATAL, "22021", "{name} name in startup packet is not valid UTF-8")
PROTOCOL_VERSION = define(
    "protocol_version",
    FATAL,
    "0A000",
    "unsupported frontend protocol {major}.{minor}: server supports 3.0 to 3.2",
)
NO_USER = define("no_user", FATAL, "28000", "no PostgreSQL user name specified in startup packet")
CANCEL_LENGTH = define("cancel_length", FATAL, "08P01", "invalid length of cancel request packet")
CANCEL_KEY_LENGTH = define("cancel_key_length", FATAL, "08P01", "invalid length of cancel key in cancel request packet")
REPLICATION_VALUE = define(
    "replication_value",
    FATAL,
    "22023",
    'invalid value for parameter "replication": "{value}"',
    'valid values are: "false", 0, "true", 1, "database"',
)
OPTION_INVALID = define(
    "option_invalid",
    FATAL,
    "42601",
    "invalid command-line argument for server process: {argument}",
    "options may hold -c name=value and --name=value",
)
PARAMETER_FIXED = define("parameter_fixed", FATAL, "55P02", 'parameter "{name}" cannot be changed')
OPTION_WITHOUT_VALUE = define("option_without_value", FATAL, "42601", "{argument} requires a value")

# Encryption of the client's connection.

DATA_BEFORE_TLS = define("data_before_tls", FATAL, "08P01", "received unencrypted data after SSL request")
DATA_BEFORE_GSS = define("data_before_gss", FATAL, "08P01", "received unencrypted data after GSSAPI encryption request")

# Login.

# No hint here: it would tell whether the user exists.
INVALID_PASSWORD = define("invalid_password", FATAL, "28P01", 'password authentication failed for user "{user}"')
EMPTY_PASSWORD = define("empty_password", FATAL, "28P01", "empty password returned by client")
PASSWORD_EXPECTED = define("password_expected", FATAL, "08P01", "expected password response, got message type {type}")
PASSWORD_LENGTH = define("password_length", FATAL, "08P01", "invalid password packet size")
SASL_EXPECTED = define("sasl_expected", FATAL, "08P01", "expected SASL response, got message type {type}")
SASL_MECHANISM = define("sasl_mechanism", FATAL, "08P01", "client selected an invalid SASL authentication mechanism")
SCRAM_MALFORMED = define("scram_malformed", FATAL, "08P01", "malformed SCRAM message")
SCRAM_NONCE = define("scram_nonce", FATAL, "08P01", "non-printable characters in SCRAM nonce")
SCRAM_RESPONSE = define("scram_response", FATAL, "08P01", "invalid SCRAM response")
SCRAM_BINDING_ATTRIBUTE = define(
    "scram_binding_attribute",
    FATAL,
    "08P01",
    "unexpected SCRAM channel-binding attribute in client-final-message",
)
SCRAM_BINDING_CHECK = define("scram_binding_check", FATAL, "28000", "SCRAM channel binding check failed")
SCRAM_BINDING_DOWNGRADE = define("scram_binding_downgrade", FATAL, "28000", "SCRAM channel binding negotiation error")
SCRAM_BINDING_TYPE = define("scram_binding_type", FATAL, "08P01", 'unsupported SCRAM channel-binding type "{type}"')
SCRAM_AUTHORIZATION = define(
    "scram_authorization", FATAL, "0A000", "client uses authorization identity, but it is not supported"
)
SCRAM_EXTENSION = define("scram_extension", FATAL, "0A000", "client requires an unsupported SCRAM extension")
NO_SUCH_ROLE = define("no_such_role", FATAL, "28000", 'role "{user}" does not exist', "add it to front.auth.file")
NO_SUCH_DATABASE = define(
    "no_such_database",
    FATAL,
    "3D000",
    'database "{database}" does not exist',
    "add [database.NAME] to the topology",
)
CLIENT_LOGIN_TIMEOUT = define(
    "client_login_timeout", FATAL, "57014", "canceling authentication due to timeout", "raise client_login_timeout"
)

# Limits on clients.

MAX_CLIENT_CONN = define(
    "max_client_conn", FATAL, "53300", "no more connections allowed (max_client_conn)", "raise max_client_conn"
)
MAX_DB_CLIENT_CONNECTIONS = define(
    "max_db_client_connections",
    FATAL,
    "53300",
    "client connections exceeded (max_db_client_connections)",
    "raise max_db_client_connections",
)
MAX_USER_CLIENT_CONNECTIONS = define(
    "max_user_client_connections",
    FATAL,
    "53300",
    "client connections exceeded (max_user_client_connections)",
    "raise max_user_client_connections",
)
MAX_PACKET_SIZE = define(
    "max_packet_size", FATAL, "54000", "message of {size} bytes is too long", "raise max_packet_size"
)

# Waiting for a server. A full pool is too many connections (53300), as it would be in PostgreSQL; no node to go to
# is cannot_connect_now (57P03). Drivers try again after both. None of them closes a client that is logged in.

QUERY_WAIT_TIMEOUT = define(
    "query_wait_timeout",
    ERROR,
    "53300",
    "no server connection became free in time (query_wait_timeout)",
    "raise query_wait_timeout or pool_size, or shorten transactions",
)
NO_PRIMARY = define(
    "no_primary",
    ERROR,
    "57P03",
    "no primary is available",
    "see SHOW NODES on the admin console; query_wait_timeout is how long a failover is waited for",
)
SERVER_CONNECT = define(
    "server_connect",
    ERROR,
    "57P03",
    "cannot connect to a server: {reason}",
    "see SHOW NODES on the admin console; server_connect_timeout and server_login_retry apply",
)
SERVER_LOGIN_METHOD = define(
    "server_login_method",
    ERROR,
    "0A000",
    "server asks for an unsupported authentication method: {method}",
    "the server may ask for trust, password, md5 or scram-sha-256",
)
SERVER_LOGIN_SECRET = define(
    "server_login_secret",
    ERROR,
    "28000",
    'no password is known that the server would accept for user "{user}"',
    "store the plain password in front.auth.file, or use the same SCRAM secret here and on the server",
)
SERVER_PASSWORD_IN_CLEAR = define(
    "server_password_in_clear",
    ERROR,
    "28000",
    "server asks for a password in clear text on a connection that is not encrypted",
    "change the server's method to scram-sha-256, or set the cluster's tls.mode to require",
)
SERVER_UNPROVEN = define(
    "server_unproven",
    ERROR,
    "28000",
    "server does not prove that it knows the password: {reason}",
)
QUERY_WAIT_NOTIFY = define(
    "query_wait_notify",
    NOTICE,
    "00000",
    "No server connection available in postgres backend, client being queued",
    "query_wait_notify is the time before this notice",
)

# Ends of a query, a transaction or a connection.

QUERY_TIMEOUT = define(
    "query_timeout", ERROR, "57014", "canceling statement due to query timeout", "raise query_timeout"
)
QUERY_CANCELED = define("query_canceled", ERROR, "57014", "canceling statement due to user request")
IDLE_TRANSACTION_TIMEOUT = define(
    "idle_transaction_timeout",
    FATAL,
    "25P03",
    "terminating connection due to idle-in-transaction timeout",
    "raise idle_transaction_timeout",
)
TRANSACTION_TIMEOUT = define(
    "transaction_timeout",
    FATAL,
    "25P04",
    "terminating connection due to transaction timeout",
    "raise transaction_timeout",
)
CLIENT_IDLE_TIMEOUT = define(
    "client_idle_timeout",
    FATAL,
    "57P05",
    "terminating connection due to idle-session timeout",
    "raise client_idle_timeout",
)
SHUTTING_DOWN = define("shutting_down", FATAL, "57P03", "pooler is shutting down")
ADMIN_SHUTDOWN = define("admin_shutdown", FATAL, "57P01", "terminating connection due to administrator command")
SERVER_LOST = define(
    "server_lost",
    ERROR,
    "08006",
    "server connection was lost: {reason}",
    "the transaction was rolled back and may be run again",
)
COMMIT_UNKNOWN = define(
    "commit_unknown",
    ERROR,
    "08007",
    "server connection was lost before it was known whether the transaction was committed: {reason}",
    "check what has become of the transaction before it is run again",
)

# What pooling does not allow.

STATEMENT_POOLING = define(
    "statement_pooling",
    FATAL,
    "0A000",
    "transaction blocks not allowed in statement pooling mode",
    "set pool_mode to transaction or session for this database or user",
)
STATEMENT_EXISTS = define("statement_exists", ERROR, "42P05", 'prepared statement "{name}" already exists')
STATEMENT_MISSING = define("statement_missing", ERROR, "26000", 'prepared statement "{name}" does not exist')
UNNAMED_STATEMENT_MISSING = define(
    "unnamed_statement_missing", ERROR, "26000", "unnamed prepared statement does not exist"
)

# The client's own violations of the protocol.

MESSAGE_LENGTH = define("message_length", FATAL, "08P01", "invalid message length")
MESSAGE_TYPE = define("message_type", FATAL, "08P01", "invalid frontend message type {type}")
MESSAGE_FORMAT = define("message_format", ERROR, "08P01", "invalid message format")
MESSAGE_STRING = define("message_string", ERROR, "08P01", "invalid string in message")
MESSAGE_CUT = define("message_cut", ERROR, "08P01", "insufficient data left in message")
CLOSE_KIND = define("close_kind", ERROR, "08P01", "invalid CLOSE message subtype {kind}")
DESCRIBE_KIND = define("describe_kind", ERROR, "08P01", "invalid DESCRIBE message subtype {kind}")

# The admin console.

CONSOLE_ADMIN = define("console_admin", ERROR, "42501", "admin access needed", "add the user to console.admin_users")
CONSOLE_ACCESS = define(
    "console_access",
    FATAL,
    "28000",
    'user "{user}" may not use the admin console',
    "add the user to console.admin_users or console.stats_users",
)
CONSOLE_COMMAND = define("console_command", ERROR, "42601", "invalid command '{command}', use SHOW HELP;")
CONSOLE_PROTOCOL = define("console_protocol", ERROR, "0A000", "extended query protocol not supported by admin console")
CONSOLE_VALUE = define("console_value", ERROR, "22023", "{reason}")
CONSOLE_REFUSED = define("console_refused", ERROR, "55000", "{command} is not done: {reason}")
CONSOLE_RELOAD = define("console_reload", ERROR, "F0000", "RELOAD failed, see logs for additional details")

# Ourselves.

INTERNAL = define("internal", FATAL, "XX000", "internal error", "the log of the gateway says more")
