"""The values of configuration parameters that a session has, as one shared, immutable object.

1. Equal sets are the same object (interned), so "has this server what that client wants?" is one pointer comparison.
2. A set holds what the server reported (ParameterStatus) and what the client asked for at its start beyond that.
3. Only settable parameters are ever applied to a server; the others are facts of the server.

Called by the front when it links a client to a server, and by the link for each ParameterStatus; see "Asynchronous
Operations" in PostgreSQL's protocol chapter and guc_tables.c (GUC_REPORT).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import ClassVar, NamedTuple
from weakref import WeakValueDictionary

from gateway.wire import messages

FACTS = frozenset(
    (
        "in_hot_standby",
        "integer_datetimes",
        "is_superuser",
        "server_encoding",
        "server_version",
        "session_authorization",
    )
)
"""Reported parameters that no SET changes: a client is told of them, a server is never asked for them."""

SAFE = frozenset(
    (
        "DateStyle",
        "IntervalStyle",
        "TimeZone",
        "application_name",
        "client_encoding",
        "default_transaction_read_only",
        "standard_conforming_strings",
    )
)
"""Parameters whose value, once reported by a server, no server of that version refuses and which take a plain SET."""

UNREAD = FACTS | {"application_name", "default_transaction_read_only", "scram_iterations"}
"""Parameters that change nothing of what a statement's text means. Those of its literals (DateStyle, TimeZone), its
names (search_path) and its bytes (client_encoding, standard_conforming_strings) do, when it is parsed."""

_CANONICAL = {name.lower(): name for name in (*SAFE, *FACTS, "search_path", "scram_iterations")}
_LONGEST_NAME = 63  # NAMEDATALEN - 1
_MOST_NEIGHBOURS = 64  # cached steps from one set to others; drivers differ in a few values, not in hundreds


def canonical(name: str) -> str:
    """Return a parameter's name as PostgreSQL reports it: names are compared without regard to case."""
    return _CANONICAL.get(name.lower(), name.lower())


class Step(NamedTuple):
    """What it takes to make a server that has one set serve a client that has another."""

    sql: bytes  # a simple Query message, or b""
    certain: bool  # no server can refuse it, so that the client's own message may follow at once
    facts: bytes  # ParameterStatus messages that the client has to see first
    parameters: Parameters  # what both have afterwards


class Parameters:
    """An interned, immutable set of parameter values."""

    __slots__ = ("__weakref__", "_steps", "_welcome", "meaning", "values")

    _interned: ClassVar[WeakValueDictionary[frozenset[tuple[str, str]], Parameters]] = WeakValueDictionary()

    values: Mapping[str, str]
    meaning: bytes  # equal in sets under which every text is parsed to the same statement

    @classmethod
    def of(cls, values: Mapping[str, str]) -> Parameters:
        """Return the one set with these values."""
        key = frozenset(values.items())
        found = cls._interned.get(key)
        if found is None:
            found = cls()
            found.values = dict(values)
            read = sorted((name, value) for name, value in values.items() if name not in UNREAD)
            found.meaning = "\0".join(chain.from_iterable(read)).encode("utf-8", "surrogateescape")
            found._welcome = None
            found._steps = {}
            cls._interned[key] = found
        return found

    _welcome: bytes | None
    _steps: dict[Parameters, Step]

    def having(self, name: str, value: str) -> Parameters:
        """Return the set that differs from this one in one value."""
        if self.values.get(name) == value:
            return self
        return Parameters.of({**self.values, name: value})

    def welcome(self, reported: frozenset[str]) -> bytes:
        """Return the ParameterStatus messages with which a login ends."""
        if self._welcome is None:
            self._welcome = b"".join(
                messages.parameter_status(name, value) for name, value in self.values.items() if name in reported
            )
        return self._welcome

    def step_to(self, wanted: Parameters, reported: frozenset[str]) -> Step:
        """Return how a server with this set becomes one for a client with *wanted*; cached, for pairs recur."""
        step = self._steps.get(wanted)
        if step is None:
            if len(self._steps) >= _MOST_NEIGHBOURS:
                self._steps.clear()
            step = self._steps[wanted] = _step(self.values, wanted.values, reported)
        return step


def _step(has: Mapping[str, str], wants: Mapping[str, str], reported: frozenset[str]) -> Step:
    commands, facts, certain = [], [], True
    result = dict(wants)
    for name, value in wants.items():
        if has.get(name) == value:
            continue
        if name in FACTS:
            if name in has:
                result[name] = has[name]
                facts.append(messages.parameter_status(name, has[name]))
            continue
        commands.append(set_command(name, value))
        certain = certain and (name in SAFE or name in reported)
    for name in has:
        if name not in wants:
            if name in reported or name in FACTS:
                result[name] = has[name]
                facts.append(messages.parameter_status(name, has[name]))
            else:
                commands.append(f"RESET {quote_identifier(name)}")
    sql = messages.query(";".join(commands)) if commands else b""
    return Step(sql, certain, b"".join(facts), Parameters.of(result))


def set_command(name: str, value: str) -> str:
    """Return the SQL that gives a parameter a value, whatever the value and standard_conforming_strings."""
    if name == "application_name" and len(value) > _LONGEST_NAME:
        # A name that was cut and then cleaned: set from its bytes (\\xc3\\xa9), or it would be cut a second time.
        return "SET application_name TO E'" + value.replace("'", "''") + "'"
    if name in SAFE:
        return f"SET {name} TO {quote_literal(value)}"
    # SET would take a list such as search_path for one quoted name; set_config takes it as it is reported.
    return f"SELECT pg_catalog.set_config({quote_literal(name)}, {quote_literal(value)}, false)"


def quote_literal(text: str) -> str:
    """Quote a string so that it reads the same with standard_conforming_strings on and off."""
    quoted = text.replace("'", "''")
    if "\\" in quoted:
        return "E'" + quoted.replace("\\", "\\\\") + "'"
    return f"'{quoted}'"


def quote_identifier(name: str) -> str:
    """Quote a parameter's name, of which a dotted one has two parts."""
    return ".".join('"' + part.replace('"', '""') + '"' for part in name.split("."))
