"""What kinds of statement a text holds, by PostgreSQL's own grammar.

1. Asked only when a server was lost: the grammar is loaded when the first text is to be read.
2. Whatever is not surely recognized is taken for the worst: a read is one that changes nothing wherever it runs.
3. Text is bytes, in the client's encoding; all that is looked for is ASCII.

Called by fate. See gram.y of PostgreSQL, and pg_proc.dat for which functions are volatile.
"""

from __future__ import annotations

import enum
import re
from typing import Any


class Kind(enum.Enum):
    """What a statement does to the transaction that it runs in."""

    BEGIN = "begin"
    COMMIT = "commit"  # PREPARE TRANSACTION too: what was done may outlive the session
    ROLLBACK = "rollback"
    SAVEPOINT = "savepoint"  # and RELEASE, ROLLBACK TO: the last one revives an aborted transaction
    READ = "read"
    WRITE = "write"  # whatever is not surely a read


ANYTHING = (Kind.SAVEPOINT, Kind.WRITE, Kind.COMMIT, Kind.BEGIN)
"""What a text may do that nobody can read."""

_TRANSACTION = {
    "TRANS_STMT_BEGIN": (Kind.BEGIN,),
    "TRANS_STMT_START": (Kind.BEGIN,),
    "TRANS_STMT_COMMIT": (Kind.COMMIT,),
    "TRANS_STMT_PREPARE": (Kind.COMMIT,),
    "TRANS_STMT_ROLLBACK": (Kind.ROLLBACK,),
    "TRANS_STMT_SAVEPOINT": (Kind.SAVEPOINT,),
    "TRANS_STMT_RELEASE": (Kind.SAVEPOINT,),
    "TRANS_STMT_ROLLBACK_TO": (Kind.SAVEPOINT,),
}

_CHANGES = frozenset(("DeleteStmt", "InsertStmt", "IntoClause", "LockingClause", "MergeStmt", "UpdateStmt"))
"""What makes a SELECT more than a read."""

_FUNCTIONS = frozenset(
    b"""abs age array_agg array_length array_to_string avg bool_and bool_or btrim cardinality ceil ceiling
    char_length character_length concat concat_ws count current_database current_schema current_setting date_bin
    date_part date_trunc dense_rank every extract first_value floor format generate_series initcap isfinite
    json_agg json_array_length json_build_array json_build_object json_object_agg jsonb_agg jsonb_array_elements
    jsonb_array_elements_text jsonb_array_length jsonb_build_array jsonb_build_object jsonb_object_agg lag
    last_value lead left length like_escape lower lpad ltrim make_date make_interval make_timestamp max md5 min
    mod now ntile octet_length overlay percentile_cont percentile_disc position power rank repeat replace
    reverse right round row_number row_to_json rpad rtrim sign similar_to_escape split_part sqrt stddev
    string_agg string_to_array strpos substr substring sum timezone to_char to_date to_json to_jsonb to_number
    to_timestamp translate trunc unnest upper variance version""".split()
)
"""Built-in functions that are immutable or stable, by the names that one meets; any other may change something."""

_PLAIN = frozenset((b"copy", b"delete", b"insert", b"merge", b"select", b"table", b"update", b"values", b"with"))
"""First words of statements that are nothing but themselves."""

_FIRST_WORD = re.compile(rb"(?: \s | -- [^\n]* \n | /\* (?: [^*/] | \*(?!/) | /(?!\*) )* \*/ | \( )* (\w+)", re.VERBOSE)
_BEGINS = re.compile(rb"\b(?:begin|start)\b", re.IGNORECASE)


def kinds(text: bytes) -> tuple[Kind, ...]:
    """Return what the statements of a text are, in their order."""
    tree = _parsed(text)
    if tree is None:
        return kinds_of_part(text)
    return tuple(kind for raw in tree.stmts for kind in _kinds_of(raw.stmt))


def kinds_of_part(text: bytes, *, is_single: bool = False) -> tuple[Kind, ...]:
    """Return what a text may be of which the end is missing, or that cannot be read; *is_single*: of one statement."""
    word = _FIRST_WORD.match(text)
    if word is None or word[1].lower() not in _PLAIN:
        return ANYTHING
    if is_single:
        return (Kind.WRITE,)
    return ANYTHING if _BEGINS.search(text) else (Kind.WRITE, Kind.COMMIT)


def _parsed(text: bytes) -> Any:
    from postgast import parse

    try:
        decoded = text.decode()
    except UnicodeDecodeError:
        decoded = text.decode("latin-1")  # what is looked for stands at the same place in every encoding
    try:
        return parse(decoded)
    except Exception:  # a syntax error, or another's version of the grammar, or a text nested too deeply
        return None


def _kinds_of(node: Any) -> tuple[Kind, ...]:
    from postgast.pg_query_pb2 import TransactionStmtKind

    which = node.WhichOneof("node")
    if which == "transaction_stmt":
        statement = node.transaction_stmt
        found = _TRANSACTION.get(TransactionStmtKind.Name(statement.kind), (Kind.WRITE,))
        return (*found, Kind.BEGIN) if statement.chain else found
    return (Kind.READ,) if which == "select_stmt" and _is_read(node.select_stmt) else (Kind.WRITE,)


def _is_read(select: Any) -> bool:
    from postgast import walk

    for _, part in walk(select):
        name = type(part).__name__
        if name in _CHANGES or (name == "FuncCall" and not _is_known(part)):
            return False
    return True


def _is_known(call: Any) -> bool:
    *schema, name = [part.string.sval.encode() for part in call.funcname]
    return schema in ([], [b"pg_catalog"]) and name in _FUNCTIONS
