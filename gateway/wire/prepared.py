"""Prepared statements in transaction mode: who calls a statement what, and which server has it.

1. A statement is its text with its parameter types and the settings under which the text is parsed; every client and
   every server that has the same one shares one `Statement`. On a server it is called gateway_TAG_N, with a tag that no
   client can guess, so that nobody calls another's statement by its name; a client keeps its own names.
2. A map is changed when the request goes out, because the next message of a pipeline builds on it; the `Change` that
   stays with the request puts it back when PostgreSQL refuses or skips it (cycle.py).
3. A server holds `max_prepared_statements` of them; the least recently used one is closed first.

Called by the rewriter. See "Extended Query" in PostgreSQL's protocol chapter, and prepare.c for what is an error.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

Names = dict[bytes, "Statement"]
"""A client's statements by the names it gave them."""

Held = dict["Statement", bool]
"""A server's statements, the least recently used first; False: to be prepared again before its next use."""


class Statement:
    """One prepared statement: what follows the name in its Parse message, its name on servers, how it is read."""

    def __init__(self, body: bytes, name: bytes, meaning: bytes = b"") -> None:
        self.body = body
        self.name = name
        self.meaning = meaning  # Parameters.meaning of those who parse it


class Statements:
    """All statements that some client or some server holds, by their body and meaning."""

    def __init__(self, tag: str) -> None:
        self._prefix = b"gateway_%b_" % tag.encode()
        self._known: WeakValueDictionary[tuple[bytes, bytes], Statement] = WeakValueDictionary()
        self._last = 0

    def of(self, body: bytes, meaning: bytes) -> Statement:
        """Return the one statement with this body (text, zero byte, number of types, types), read with this meaning."""
        statement = self._known.get((body, meaning))
        if statement is None:
            self._last += 1
            name = self._prefix + b"%d" % self._last
            statement = self._known[body, meaning] = Statement(body, name, meaning)
        return statement


class Named:
    """A client's Parse gave a statement a name; the server got it too, unless it had it (*held* None)."""

    __slots__ = ("held", "name", "names", "statement")

    def __init__(self, names: Names, name: bytes, statement: Statement, held: Held | None) -> None:
        self.names, self.name, self.statement, self.held = names, name, statement, held
        self.redo()

    def redo(self) -> None:
        """Make the change (again, after a DEALLOCATE ALL that stood before it in the pipeline)."""
        self.names[self.name] = self.statement
        if self.held is not None:
            self.held[self.statement] = True

    def undo(self) -> None:
        """The Parse failed: neither the client nor the server has the statement."""
        if self.names.get(self.name) is self.statement:
            del self.names[self.name]
        if self.held is not None:
            self.held.pop(self.statement, None)


class Injected:
    """A server got a statement that its new client had prepared elsewhere."""

    __slots__ = ("held", "statement")
    name = b""  # no client's

    def __init__(self, held: Held, statement: Statement) -> None:
        self.held, self.statement = held, statement
        self.redo()

    def redo(self) -> None:
        """Make the change."""
        self.held[self.statement] = True

    def undo(self) -> None:
        """The server does not have it."""
        self.held.pop(self.statement, None)


class Evicted:
    """A server was told to close a statement: an old one, or the one least recently used."""

    __slots__ = ("held", "statement")
    name = b""  # no client's

    def __init__(self, held: Held, statement: Statement) -> None:
        self.held, self.statement = held, statement
        self.redo()

    def redo(self) -> None:
        """Make the change."""
        self.held.pop(self.statement, None)

    def undo(self) -> None:
        """The server skipped the Close and still has the statement."""
        self.held[self.statement] = False


class Closed:
    """A client closed one of its names, by Close or by DEALLOCATE; with DEALLOCATE the server loses it too."""

    __slots__ = ("held", "name", "names", "statement")

    def __init__(self, names: Names, name: bytes, held: Held | None = None) -> None:
        self.names, self.name, self.held = names, name, held
        self.statement = names[name]
        self.redo()

    def redo(self) -> None:
        """Make the change."""
        self.names.pop(self.name, None)
        if self.held is not None:
            self.held.pop(self.statement, None)

    def undo(self) -> None:
        """The request was skipped: the name stays."""
        self.names[self.name] = self.statement
        if self.held is not None:
            self.held[self.statement] = True


class AllClosed:
    """DEALLOCATE ALL or DISCARD ALL: the client has no names left and the server no statements."""

    __slots__ = ("held", "names", "old_held", "old_names")
    name = None  # every name
    statement = None

    def __init__(self, names: Names, held: Held) -> None:
        self.names, self.held = names, held
        self.old_names, self.old_held = dict(names), dict(held)
        self.redo()

    def redo(self) -> None:
        """Make the change."""
        self.names.clear()
        self.held.clear()

    def undo(self) -> None:
        """It failed (DISCARD ALL does inside a transaction): all that was there is there."""
        self.names.update({**self.old_names, **self.names})
        self.held.update({**self.old_held, **self.held})
