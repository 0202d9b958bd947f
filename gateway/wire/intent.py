"""What the text of a statement means for the one who carries it.

1. Only what the gateway itself must know is looked for; whatever is not surely recognized is None and passes untouched.
2. Text is bytes, in the client's encoding; everything looked for is ASCII.

Called by the rewriter, for clients that have prepared statements, and by failing. See DEALLOCATE, DISCARD, EXECUTE,
COMMIT and ROLLBACK in PostgreSQL's SQL reference.
"""

from __future__ import annotations

import enum
import re
from typing import NamedTuple


class Verb(enum.Enum):
    """What a statement does to prepared statements."""

    DEALLOCATE = "deallocate"
    DEALLOCATE_ALL = "deallocate all"  # DISCARD ALL does it too
    EXECUTE = "execute"


class Mention(NamedTuple):
    """A single statement that names a prepared one, and where in the text the name stands."""

    verb: Verb
    name: bytes
    start: int
    end: int


_RESERVED = frozenset(
    b"""all analyse analyze and any array as asc asymmetric authorization binary both case cast check collate collation
    column concurrently constraint create cross current_catalog current_date current_role current_schema current_time
    current_timestamp current_user default deferrable desc distinct do else end except false fetch for foreign freeze
    from full grant group having ilike in initially inner intersect into is isnull join lateral leading left like limit
    localtime localtimestamp natural not notnull null offset on only or order outer overlaps placing primary references
    returning right select session_user similar some symmetric system_user table tablesample then to trailing true union
    unique user using variadic verbose when where window with""".split()
)
"""Words that PostgreSQL takes for a name only in double quotes: categories R and T of pg_get_keywords(), 15 to 18."""

_SPACE = rb"(?: \s | -- [^\n]* (?:\n|\Z) | /\* (?: [^*/] | \*(?!/) | /(?!\*) )* \*/ )"
_MENTION = re.compile(
    rb"(?: %b | ; )*"
    rb"(?: (?P<all> discard %b+ all | deallocate %b+ (?: prepare %b+ )? all )"
    rb"  | (?: (?P<deallocate> deallocate %b+ (?: prepare %b+ )? ) | execute %b+ )"
    rb'    (?P<name> (?P<plain> [a-z_\x80-\xff] [\w$\x80-\xff]* ) | "(?P<quoted> (?: [^"] | "" )+ )" )'
    rb"    (?P<rest> %b* \( [^;]* \) )? )"
    rb"(?: %b | ; )* \Z" % ((_SPACE,) * 9),
    re.IGNORECASE | re.VERBOSE,
)

_END = re.compile(
    rb"(?: %b | ; )* (?: commit | end | rollback | abort ) (?: %b+ (?: work | transaction ) )? (?: %b | ; )* \Z"
    % ((_SPACE,) * 3),
    re.IGNORECASE | re.VERBOSE,
)


def ends_transaction(text: bytes) -> bool:
    """Is a text one COMMIT or ROLLBACK, and leaves no transaction open?"""
    return _END.match(text) is not None


def mention(text: bytes) -> Mention | None:
    """Return which prepared statement a text of one statement deallocates or executes, or None."""
    found = _MENTION.match(text)
    if found is None or (found["deallocate"] and found["rest"]):
        return None
    if found["all"]:
        return Mention(Verb.DEALLOCATE_ALL, b"", 0, 0)
    quoted = found["quoted"]
    if quoted is None and found["plain"].lower() in _RESERVED:
        return None
    name = found["plain"].lower() if quoted is None else quoted.replace(b'""', b'"')
    return Mention(Verb.DEALLOCATE if found["deallocate"] else Verb.EXECUTE, name, *found.span("name"))
