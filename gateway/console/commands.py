"""What can be said to the console: the commands, and how a query is split into them.

1. COMMANDS is all there is: the parser and SHOW HELP are made from it.
2. Names and strings are quoted as in SQL; without quotes a name may hold whatever is no space and no `;='"`.

Called by console.session (parse) and console.console (help).
Manual: "Admin console" in PgBouncer's usage page; "Lexical Structure" of PostgreSQL's.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from gateway import errors
from gateway.console.tables import FAKES, TABLES, Table

_LINE = 8  # names in a line of SHOW HELP

_TOKEN = re.compile(
    r"""\s+ | --[^\n]* | /\*.*?\*/
    | (?P<end> ; )
    | "(?P<name> (?: [^"] | "" )+ )" | '(?P<string> (?: [^'] | '' )* )'
    | (?P<word> = | [^\s;='"]+ )""",
    re.VERBOSE | re.DOTALL,
)


class Verb(enum.StrEnum):
    """The first word of a command."""

    SHOW = "SHOW"
    SELECT = "SELECT"  # what drivers ask of any server
    SET = "SET"
    RELOAD = "RELOAD"
    SWITCHOVER = "SWITCHOVER"
    PROMOTE = "PROMOTE"
    ATTACH = "ATTACH"
    DETACH = "DETACH"
    PAUSE = "PAUSE"
    RESUME = "RESUME"


class Takes(enum.Enum):
    """What follows the first word."""

    NOTHING = enum.auto()
    TABLE = enum.auto()
    ASSIGNMENT = enum.auto()
    NODE = enum.auto()  # with an option
    ANY_NODE = enum.auto()  # which need not be named
    FAILOVER = enum.auto()  # of a cluster, of the only one where none is named


class Command(NamedTuple):
    """How a command is written, and who may give it; usage is what SHOW HELP says, one string a line."""

    takes: Takes
    usage: tuple[str, ...]
    admin: bool = True
    option: str = ""


class Statement(NamedTuple):
    """One command as it was given.

    argument is the name that it is about: of a table or a parameter in lower case, of a node or a cluster as it is.
    """

    text: str
    verb: Verb
    argument: str = ""
    has_option: bool = False

    @property
    def is_help(self) -> bool:
        """Is it SHOW HELP?"""
        return self.verb is Verb.SHOW and self.argument == "help"

    @property
    def table(self) -> Table | None:
        """What it shows, if it shows a table."""
        if self.verb is Verb.SELECT:
            return FAKES.get(f"select {self.argument}")
        if self.verb is Verb.SHOW:
            return TABLES.get(self.argument) or FAKES.get(self.argument)
        return None


def _lines(names: Sequence[str]) -> tuple[str, ...]:
    upper = [name.upper() for name in names]
    return tuple("SHOW " + "|".join(upper[at : at + _LINE]) for at in range(0, len(upper), _LINE))


COMMANDS: Final[dict[Verb, Command]] = {
    Verb.SHOW: Command(Takes.TABLE, _lines(["help", *TABLES]), admin=False),
    Verb.SELECT: Command(Takes.TABLE, (), admin=False),
    Verb.SET: Command(Takes.ASSIGNMENT, (), admin=False),
    Verb.RELOAD: Command(Takes.NOTHING, ("RELOAD",)),
    Verb.SWITCHOVER: Command(Takes.ANY_NODE, ("SWITCHOVER [[<cluster>.]<node>] [FORCE]",), option="force"),
    Verb.PROMOTE: Command(Takes.NODE, ("PROMOTE [<cluster>.]<node>",)),
    Verb.ATTACH: Command(Takes.NODE, ("ATTACH [<cluster>.]<node>",)),
    Verb.DETACH: Command(Takes.NODE, ("DETACH [<cluster>.]<node> [NOW]",), option="now"),
    Verb.PAUSE: Command(Takes.FAILOVER, ("PAUSE FAILOVER [<cluster>]",)),
    Verb.RESUME: Command(Takes.FAILOVER, ("RESUME FAILOVER [<cluster>]",)),
}


def usage() -> str:
    """Return the text of SHOW HELP."""
    return "".join(f"\n\t{line}" for command in COMMANDS.values() for line in command.usage)


def parse(text: str) -> list[Statement]:
    """Split a query into its commands, none for one that is empty; raises 42601."""
    statements = []
    words: list[str] = []
    start = at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:  # a quote that is not closed
            raise errors.CONSOLE_COMMAND(command=text[start:].strip())
        at = found.end()
        match found.lastgroup:
            case "end":
                statements += _statement(text[start : found.start()].strip(), words)
                words, start = [], at
            case "name":
                words.append(found["name"].replace('""', '"'))
            case "string":
                words.append(found["string"].replace("''", "'"))
            case "word":
                words.append(found["word"])
    return statements + _statement(text[start:].strip(), words)


def _statement(text: str, words: Sequence[str]) -> list[Statement]:
    if not words:
        return []
    if (verb := words[0].upper()) in COMMANDS:
        command = COMMANDS[Verb(verb)]
        has_option = len(words) > 1 and bool(command.option) and words[-1].lower() == command.option
        match command.takes, words[1 : -1 if has_option else None]:
            case Takes.NOTHING, []:
                return [Statement(text, Verb(verb))]
            case Takes.TABLE, [name]:
                statement = Statement(text, Verb(verb), name.lower())
                if statement.table or statement.is_help:
                    return [statement]
            case Takes.ASSIGNMENT, [name, sign, _, *_] if sign.lower() in ("=", "to"):
                return [Statement(text, Verb(verb), name.lower())]
            case Takes.NODE, [name]:
                return [Statement(text, Verb(verb), name, has_option)]
            case Takes.ANY_NODE, [*names] if len(names) < 2:
                return [Statement(text, Verb(verb), "".join(names), has_option)]
            case Takes.FAILOVER, [word, *names] if word.lower() == "failover" and len(names) < 2:
                return [Statement(text, Verb(verb), "".join(names))]
    raise errors.CONSOLE_COMMAND(command=text)
