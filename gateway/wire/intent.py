"""What the text of a statement means for the one who carries it.

1. Only what the gateway itself must know is looked for; whatever is not surely recognized is None and passes untouched.
2. Text is bytes, in the client's encoding; everything looked for is ASCII.

Called by the rewriter, only for texts that begin with D. See DEALLOCATE and DISCARD in PostgreSQL's SQL reference.
"""

from __future__ import annotations

import re

ALL = b""
"""The name that stands for all names; no statement that has to be deallocated by name has an empty one."""

_DROPS = re.compile(
    rb"""[\s;]* (?: (?P<all> discard\s+all | deallocate\s+(?:prepare\s+)?all )
    | deallocate\s+ (?:prepare\s+)?
        (?: (?P<plain> [a-z_\x80-\xff] [\w$\x80-\xff]* ) | "(?P<quoted> (?: [^"] | "" )+ )" )
    ) [\s;]* \Z""",
    re.IGNORECASE | re.VERBOSE,
)


def deallocated(text: bytes) -> bytes | None:
    """Return the name of the prepared statement that this statement deallocates, ALL, or None."""
    found = _DROPS.match(text)
    if found is None:
        return None
    if found["all"]:
        return ALL
    if found["quoted"]:
        return found["quoted"].replace(b'""', b'"')
    return found["plain"].lower()
