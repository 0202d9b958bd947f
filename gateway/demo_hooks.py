"""The demo's demote_command and rejoin_command: what an operator's scripts would do, done by the demo itself.

1. The demo owns its servers, so that nothing outlives it; a command only asks it, over a unix socket, and waits.
2. A server that has ended by itself is started again after a while, as systemd would do.

gateway.demo_command is the command; Hooks is its other end. Called by gateway.demo.
Manual: "pg_rewind", "Log-Shipping Standby Servers".
"""

from __future__ import annotations

import shlex
import socketserver
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from gateway import demo_command
from gateway.embedded import Cluster, EmbeddedError, PostgresNode

_RESTART = 5.0


class Hooks:
    """Serves the commands of one demo, and watches over its servers, from __enter__ to __exit__."""

    def __init__(
        self,
        cluster: Cluster,
        restart: float | None = _RESTART,  # seconds after which a server that has ended is started again
        place: Callable[[PostgresNode], int | None] = lambda _: None,  # the port by which others reach a node
    ) -> None:
        self.path = cluster.directory / "hooks.sock"
        self._nodes = {node.name: node for node in cluster.nodes}
        self._restart = restart
        self._place = place
        self.lock = threading.Lock()  # one thing at a time is done to the servers
        self._ended = threading.Event()
        hooks = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                words = self.rfile.readline().decode().split()
                self.wfile.write(hooks.obey(*words).encode())

        self._server = socketserver.ThreadingUnixStreamServer(str(self.path), Handler)
        self._server.daemon_threads = True
        self._threads = [
            threading.Thread(target=self._server.serve_forever, daemon=True),
            threading.Thread(target=self._watch, daemon=True),
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
        self.lock.acquire(timeout=_RESTART)  # what is being done may end; nothing begins any more

    def command(self, what: str) -> str:
        """Return the line that asks for demote or rejoin, as a topology file has it."""
        script = shlex.quote(demo_command.__file__)
        return f"{sys.executable} -SE {script} {self.path} {what} {{name}} {{new_name}}"

    def obey(self, what: str, old: str, new: str) -> str:
        """Demote or rejoin a node; return what went wrong, nothing when nothing did."""
        node, other = self._nodes[old], self._nodes[new]
        with self.lock:
            try:
                node.stop("fast")
                if what == "rejoin":
                    _rewind(node, other)
                node.follow(other, self._place(other))
                node.start()
            except (EmbeddedError, OSError) as error:
                return str(error)
        return ""

    def _watch(self) -> None:
        missed: dict[str, int] = {}
        while self._restart is not None and not self._ended.wait(1):
            with self.lock:
                for node in self._nodes.values():
                    missed[node.name] = 0 if node.is_running else missed.get(node.name, 0) + 1
                    if missed[node.name] >= self._restart:
                        with suppress(EmbeddedError, OSError):  # what a kill left behind may have to end first
                            node.start()


def _rewind(old: PostgresNode, new: PostgresNode) -> None:
    try:
        old.rewind(new)
    except EmbeddedError:  # too far apart
        old.basebackup(new)
