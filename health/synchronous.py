"""synchronous_standby_names: who may have acknowledged a commit, and how many of them have to be seen to be sure.

A commit that its client was told of is on `count` of the standbys that the names fit, whichever they are. So each set
of all but count - 1 of them holds it, and one that is smaller may not.

Called by health.failover. Manual: "synchronous_standby_names", and syncrep_gram.y for its grammar.
"""

from __future__ import annotations

import re

from msgspec import Struct

_TOKEN = re.compile(r'\s*(?:"(?P<quoted>(?:[^"]|"")+)"|(?P<word>[\w$-]+)|(?P<sign>[*(),]))', re.ASCII)


class Synchronous(Struct, frozen=True):
    """How many standbys of which names acknowledge a commit; names are in lower case, as PostgreSQL compares them."""

    count: int
    names: tuple[str, ...]

    @property
    def is_for_all(self) -> bool:
        """Does every standby fit?"""
        return "*" in self.names

    def fits(self, application_name: str | None) -> bool:
        """May a standby of this name acknowledge a commit? One whose name is not known might."""
        return self.is_for_all or application_name is None or application_name.lower() in self.names

    def needed(self, known: int, own: str | None = None) -> int:
        """Return how many of the standbys that fit have to be seen, *known* being the number there may be of them.

        The primary's *own* name may stand in a list that is the same on all nodes; it is no standby of itself.
        """
        others = set(self.names) - {(own or "").lower()}
        members = known if self.is_for_all else max(known, len(others))
        return max(1, members - self.count + 1)


def parse(text: str) -> Synchronous | None:
    """Read the parameter; None when commits wait for nobody. Raises ValueError."""
    words: list[tuple[str, bool]] = []  # with whether it was quoted
    at = 0
    while text[at:].strip():
        token = _TOKEN.match(text, at)
        if token is None:
            raise ValueError(f"synchronous_standby_names is not understood: {text}")
        quoted = token["quoted"]
        words.append((quoted.replace('""', '"'), True) if quoted else (token["word"] or token["sign"], False))
        at = token.end()
    if not words:
        return None
    count = 1
    if ("(", False) in words:
        opening = words.index(("(", False))
        head = [word for word, _ in words[:opening]]
        if head[:1] and head[0].lower() in ("any", "first"):
            head = head[1:]
        if len(head) != 1 or not head[0].isdigit() or words[-1] != (")", False):
            raise ValueError(f"synchronous_standby_names is not understood: {text}")
        count, words = int(head[0]), words[opening + 1 : -1]
    names = tuple(word.lower() for word, quoted in words if quoted or word != ",")
    if not names or any(not quoted and word in "()" for word, quoted in words):
        raise ValueError(f"synchronous_standby_names is not understood: {text}")
    return Synchronous(count, names)
