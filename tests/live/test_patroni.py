"""Patroni owns the cluster: who leads is what it says, once the node says so too. Patroni is its REST API, played."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from .stage import Stage, Writers

pytestmark = pytest.mark.patient


class Patroni:
    """GET /cluster on a port, for the nodes of a stage."""

    def __init__(self) -> None:
        self.leader = "pg1"
        self.tags: dict[str, dict[str, bool]] = {}
        self.pause = False
        self.stage: Stage | None = None
        patroni = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.dumps(patroni.document()).encode()
                self.send_response(200 if self.path == "/cluster" else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def document(self) -> dict[str, Any]:
        nodes = self.stage.cluster.nodes if self.stage is not None else []
        return {
            "members": [
                {
                    "name": node.name,
                    "role": "leader" if node.name == self.leader else "replica",
                    "state": "running" if node.name == self.leader else "streaming",
                    "host": "127.0.0.1",
                    "port": node.port,
                    "timeline": 1,
                    "tags": self.tags.get(node.name, {}),
                }
                for node in nodes
            ],
            "pause": self.pause,
        }


@pytest.fixture
def patroni(tmp_path) -> Iterator[tuple[Patroni, Stage]]:
    """A stage whose gateway asks Patroni."""
    api = Patroni()
    settings = {"manager": "patroni", "patroni_urls": ["http://127.0.0.1:9", api.url]}
    made = Stage(tmp_path, synchronous="", failover={"mode": "follow"}, cluster=settings)
    api.stage = made
    with made:
        yield api, made
    api.server.shutdown()
    api.server.server_close()


def test_leader_that_patroni_names_is_followed_and_nobody_else(patroni):
    api, made = patroni
    with Writers(made, 4) as writers:
        made.node("pg2").promote()  # it has the newer timeline, and no lock
        made.until(lambda view: view["nodes"]["pg2"]["role"] == "false primary", "it is found out")
        writers.advance()
        assert made.view()["primary"] == "pg1"
        made.node("pg1").stop()
        api.leader = "pg2"
        made.until_primary("pg2")
        writers.advance()
    assert writers.dropped == 0


def test_pause_and_tags_of_patroni_are_shown(patroni):
    api, made = patroni
    api.pause, api.tags = True, {"pg3": {"noloadbalance": True}}
    view = made.until(lambda view: view["paused"] == "yes", "it is shown")
    assert [view["nodes"][name]["weight"] for name in ("pg2", "pg3")] == [1, 0]


def test_patroni_that_does_not_answer_is_told_and_the_nodes_speak_for_themselves(patroni):
    api, made = patroni
    api.server.shutdown()
    api.server.server_close()
    made.until(lambda view: "Patroni does not answer" in view["hindrance"], "it is told")
    with Writers(made, 4) as writers:
        writers.advance()
    assert made.view()["primary"] == "pg1"
