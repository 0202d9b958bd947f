"""synchronous_standby_names: who may have acknowledged a commit, and how many of them have to be seen to be sure.

A commit that its client was told of is on `count` of the standbys that the names fit, whichever they are. So each set
of all but count - 1 of them holds it, and one that is smaller may not.

Called by health.failover. Manual: "synchronous_standby_names", and syncrep_gram.y for its grammar.
"""

from __future__ import annotations

import re

from msgspec import Struct

# As syncrep_scanner.l has it: every character above 127 is a letter.
_TOKEN = re.compile(
    r'[ \t\n\r\f\v]*(?:"(?P<quoted>(?:[^"]|"")+)"|(?P<word>[A-Za-z_\x80-\U0010ffff][\w$\x80-\U0010ffff]*)'
    r"|(?P<digits>[0-9]+)|(?P<star>\*)|(?P<sign>[(),]))",
    re.ASCII,
)
# A letter for each token: M is ANY or FIRST, d a number, n a name.
_FORM = re.compile(r"(?P<head>M?d\()?[nd](?:,[nd])*(?(head)\))")


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
    form, words = "", []
    at = 0
    while text[at:].strip(" \t\n\r\f\v"):
        token = _TOKEN.match(text, at)
        if token is None:
            raise ValueError(f"synchronous_standby_names is not understood: {text}")
        word = token.group(token.lastgroup or 0)
        match token.lastgroup:
            case "quoted":
                form, word = form + "n", word.replace('""', '"')
            case "word":
                form += "M" if word.lower() in ("any", "first") else "n"
            case "digits":
                form += "d"
            case "star":
                form += "n"
            case _:
                form += word
        words.append(word)
        at = token.end()
    if not words:
        return None
    fit = _FORM.fullmatch(form)
    head = fit.end("head") if fit and fit["head"] else 0
    count = int(words[head - 2]) if head else 1
    if fit is None or count < 1:
        raise ValueError(f"synchronous_standby_names is not understood: {text}")
    names = (word for word, kind in zip(words[head:], form[head:], strict=True) if kind in "nd")
    return Synchronous(count, tuple(name.lower() for name in names))
