"""What the text of a statement means for the one who carries it.

1. Only what the gateway itself must know is looked for; whatever is not surely recognized is None and passes untouched.
2. Text is bytes, in the client's encoding; everything looked for is ASCII.

Called by the rewriter, for clients that have prepared statements. See DEALLOCATE, DISCARD and EXECUTE in PostgreSQL's
SQL reference.
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


def mention(text: bytes) -> Mention | None:
    """Return which prepared statement a text of one statement deallocates or executes, or None."""
    found = _MENTION.match(text)
    if found is None or (found["deallocate"] and found["rest"]):
        return None
    if found["all"]:
        return Mention(Verb.DEALLOCATE_ALL, b"", 0, 0)
    quoted = found["quoted"]
    name = found["plain"].lower() if quoted is None else quoted.replace(b'""', b'"')
    return Mention(Verb.DEALLOCATE if found["deallocate"] else Verb.EXECUTE, name, *found.span("name"))
