"""A Patroni that is no more than its REST API, on a real socket, and documents as its versions write them."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread

# Patroni 2.1: every member that works is running.
PATRONI_2 = """\
{"members": [{"name": "pg1", "role": "leader", "state": "running", "api_url": "http://10.0.0.1:8008/patroni",
  "host": "10.0.0.1", "port": 5432, "timeline": 3},
 {"name": "pg2", "role": "sync_standby", "state": "running", "api_url": "http://10.0.0.2:8008/patroni",
  "host": "10.0.0.2", "port": 5432, "timeline": 3, "lag": 0},
 {"name": "pg3", "role": "replica", "state": "starting", "api_url": "http://10.0.0.3:8008/patroni",
  "host": "10.0.0.3", "port": 5432, "tags": {"nofailover": true, "noloadbalance": true, "clonefrom": true},
  "lag": "unknown"}],
 "pause": true,
 "scheduled_switchover": {"at": "2022-06-08T12:30:00+00:00", "from": "pg1"}}"""

# Patroni 3: a standby that streams says so.
PATRONI_3 = """\
{"members": [{"name": "pg1", "role": "replica", "state": "streaming", "api_url": "https://10.0.0.1:8008/patroni",
  "host": "10.0.0.1", "port": 5432, "timeline": 4, "lag": 16777216, "tags": {"failover_priority": 0}},
 {"name": "pg2", "role": "leader", "state": "running", "api_url": "https://10.0.0.2:8008/patroni",
  "host": "10.0.0.2", "port": 5432, "timeline": 4, "pending_restart": true},
 {"name": "pg3", "role": "replica", "state": "in archive recovery", "api_url": "https://10.0.0.3:8008/patroni",
  "host": "10.0.0.3", "port": 5432, "timeline": 4, "lag": 0, "tags": {"failover_priority": 2}}],
 "scope": "main",
 "scheduled_switchover": {"at": "2024-02-01T03:00:00+01:00", "from": "pg2", "to": "pg3"}}"""

# Patroni 4.1: quorum commit, and two kinds of lag.
PATRONI_4 = """\
{"members": [{"name": "pg1", "role": "quorum_standby", "state": "streaming",
  "api_url": "http://10.0.0.1:8008/patroni", "host": "10.0.0.1", "port": 5432, "timeline": 5,
  "receive_lag": 0, "receive_lsn": "0/5000148", "replay_lag": 4096, "replay_lsn": "0/4FFF148",
  "lag": 0, "lsn": "0/5000148"},
 {"name": "pg2", "role": "leader", "state": "running", "api_url": "http://10.0.0.2:8008/patroni",
  "host": "10.0.0.2", "port": 5432, "timeline": 5,
  "pending_restart": true, "pending_restart_reason": {"max_connections": {"old_value": "100", "new_value": "200"}}},
 {"name": "pg3", "role": "replica", "state": "creating replica", "api_url": "http://10.0.0.3:8008/patroni",
  "receive_lag": "unknown", "receive_lsn": "unknown", "replay_lag": "unknown", "replay_lsn": "unknown",
  "lag": "unknown", "lsn": "unknown", "tags": {"noloadbalance": false, "nofailover": false, "sync_priority": 3}}],
 "scope": "main"}"""


def document(leader: str | None = "pg1", **more: object) -> bytes:
    """A document of pg1 to pg3 on 10.0.0.1 to 10.0.0.3."""
    members = [
        {"name": f"pg{n}", "role": "leader" if f"pg{n}" == leader else "replica", "host": f"10.0.0.{n}", "port": 5432}
        for n in (1, 2, 3)
    ]
    return json.dumps({"members": members, **more}).encode()


class Patroni:
    """One member's REST API: what it answers, whether it hangs, and how often it was asked."""

    def __init__(self, body: bytes, tls: ssl.SSLContext | None = None) -> None:
        self.body = body
        self.tls = tls
        self.status = 200
        self.headers: dict[str, str] = {}
        self.asked: list[str] = []
        self.port = 0
        self._answers = Event()
        self._answers.set()
        self._server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    def hang(self) -> None:
        """Take requests and answer none."""
        self._answers.clear()

    def start(self) -> None:
        """Listen, at the same port as before."""
        patroni = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                patroni.asked.append(self.path)
                patroni._answers.wait()
                self.send_response(patroni.status)
                for name, value in patroni.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(patroni.body)

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = False  # so that closing waits for them

            def handle_error(self, *_: object) -> None:
                """Say nothing of a client that has gone."""

        self._server = Server(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_port
        if self.tls:
            self._server.socket = self.tls.wrap_socket(self._server.socket, server_side=True)
        Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Refuse connections."""
        self._answers.set()
        if self._server:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


@contextmanager
def patronis(*bodies: bytes, tls: ssl.SSLContext | None = None) -> Iterator[list[Patroni]]:
    """Run a Patroni for each document."""
    made = [Patroni(body, tls) for body in bodies]
    try:
        for patroni in made:
            patroni.start()
        yield made
    finally:
        for patroni in made:
            patroni.stop()
