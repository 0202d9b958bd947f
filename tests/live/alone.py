"""A worker without its supervisor: the test says what the cluster is, and hears what the worker has met.

So a failover happens when the test says so, and where no probe would see one: both nodes may be primaries of their own.

Called by tests. See gateway/control.py for what is said.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from gateway.control import Answer, Ask, Configure, Drain, Records, Up, View, encode
from gateway.topology import load
from health.view import ClusterView, Epoch, Node, NodeView, Role, Status

from .client import eventually
from .endpoints import ROOT, Server, topology, write_userlist

STOP = 5.0


class WorkerAlone:
    """One worker process that listens on `port` for a cluster of the nodes pg1, pg2, ..."""

    def __init__(self, directory: Path, nodes: list[Server], **settings: Any) -> None:
        self.nodes = {f"pg{number}": node.port for number, node in enumerate(nodes, start=1)}
        self.heard: list[Up] = []
        self._version = 0
        self._asked = 0
        listener = socket.create_server(("127.0.0.1", 0), backlog=100)
        listener.setblocking(False)
        self.port: int = listener.getsockname()[1]
        self._ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        write_userlist(directory, {"postgres": ""})
        config = directory / "topology.toml"
        places = [{"name": name, "host": "127.0.0.1", "port": port} for name, port in self.nodes.items()]
        config.write_text(topology(0, self.port, nodes=places, **settings))
        self._log = directory / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gateway.worker.main", str(theirs.fileno()), str(listener.fileno())],
                pass_fds=[theirs.fileno(), listener.fileno()],
                stdout=log,
                stderr=log,
                cwd=directory,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
        theirs.close()
        listener.close()
        self._tell(Configure(load(config), None, 0, 1, b"", 1000))
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._tell(Drain(0.0))
            code = self._process.wait(STOP)
            print(self.log[-4000:])
            assert (code, "Traceback" in self.log, "internal error" in self.log) == (0, False, False), self.log[-4000:]
        finally:
            self._process.kill()
            self._process.wait(STOP)
            self._reader.join(STOP)
            self._ours.close()

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def see(self, primary: str | None, *, held: bool = False, **status: Status) -> None:
        """Tell the worker a view, and wait until it has taken it; nodes are up unless their status is given."""
        self._version += 1
        views = [
            NodeView(
                Node(name, "127.0.0.1", port),
                ("127.0.0.1",),
                Role.PRIMARY if name == primary else Role.STANDBY,
                status.get(name, Status.UP),
                "",
                0.0,
            )
            for name, port in self.nodes.items()
        ]
        self._tell(View(ClusterView("main", self._version, Epoch(primary), primary, tuple(views), held)))
        self.rows("pools")

    def rows(self, table: str) -> list[dict[str, object]]:
        """Ask the worker for a table, behind what it was told before."""
        self._asked += 1
        self._tell(Ask(self._asked, table))

        def answered() -> list[Answer]:
            assert self._process.poll() is None, self.log
            return [record for record in self.heard if isinstance(record, Answer) and record.number == self._asked]

        return eventually(answered, f"the worker to tell its {table}")[0].rows

    def servers(self) -> list[tuple[str, int]]:
        """State and process id of each server connection."""
        return sorted((str(row["state"]), int(str(row["remote_pid"]))) for row in self.rows("servers"))

    def _tell(self, record: Any) -> None:
        self._ours.sendall(encode(record))

    def _listen(self) -> None:
        records = Records(Up)
        with suppress(OSError):
            while data := self._ours.recv(65536):
                self.heard += records.feed(data)  # type: ignore[arg-type]
