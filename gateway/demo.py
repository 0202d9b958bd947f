"""`gateway demo`: a throw-away primary with two streaming standbys, and the gateway serving them.

Everything lies in one temporary directory and is gone afterwards; nothing listens beyond this machine.
Ctrl-C, SIGTERM and a closed terminal all end it alike, and a failure ends in one sentence.
Called by gateway.cli. Manual: Log-Shipping Standby Servers.
"""

import contextlib
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from gateway.demo_hooks import Hooks
from gateway.embedded import Cluster, EmbeddedError, PostgresNode, release, start_guarded, wait_until

LISTEN_TIMEOUT = 30.0
DRAIN_TIMEOUT = 10.0

TOPOLOGY = """\
[front]
listen = ["127.0.0.1:{port}"]
shutdown_timeout = 1.0

[front.auth]
type = "trust"

[cluster.main]
probe_user = "postgres"
{nodes}
[cluster.main.failover]
mode = "promote"
demote_command = "{demote}"
rejoin_command = "{rejoin}"

[database."*"]
cluster = "main"

[console]
admin_users = ["postgres"]
"""

NODE = """
[[cluster.main.node]]
name = "{name}"
host = "127.0.0.1"
port = {port}
"""


def run_demo(listen_port: int = 6432, version: str | None = None) -> int:
    """Serve a fresh cluster on 127.0.0.1 until told to stop; return the exit code.

    It is 0 after Ctrl-C or SIGTERM; 1, with one sentence on standard error, when the port is taken, no programs of
    PostgreSQL are found, or the gateway ends by itself. `version` is a major version; without one the newest is taken.
    """
    try:
        with _interruptible():
            _check_port(listen_port)
            cluster = Cluster(version=version)
            print("Starting a primary and two standbys ...", flush=True)
            with cluster:
                return _serve(cluster, listen_port)
    except KeyboardInterrupt:
        return 0
    except EmbeddedError as error:
        print(f"gateway demo: {error}", file=sys.stderr)
        return 1


def topology(listen_port: int, nodes: Iterable[PostgresNode], demote: str, rejoin: str) -> str:
    """Write the topology file of a cluster on this machine whose users are all trusted."""
    return TOPOLOGY.format(
        port=listen_port,
        nodes="".join(NODE.format(name=node.name, port=node.port) for node in nodes),
        demote=demote,
        rejoin=rejoin,
    )


def _serve(cluster: Cluster, listen_port: int) -> int:
    cluster.primary.psql("create role demo login; create database demo owner demo;")
    file = cluster.directory / "topology.toml"
    with Hooks(cluster) as hooks:
        file.write_text(topology(listen_port, cluster.nodes, hooks.command("demote"), hooks.command("rejoin")))
        gateway = start_guarded([sys.executable, "-m", "gateway", "serve", file], signal.SIGTERM)
        try:
            _wait_listening(gateway, listen_port)
            print(_greeting(cluster, listen_port, file), flush=True)
            raise EmbeddedError(f"the gateway ended by itself with exit code {gateway.wait()}")
        finally:
            _stop(gateway)
            release(gateway)


def _stop(gateway: subprocess.Popen[bytes]) -> None:
    gateway.terminate()
    try:
        gateway.wait(DRAIN_TIMEOUT)
    except (KeyboardInterrupt, subprocess.TimeoutExpired):  # a second Ctrl-C does not wait for the clients
        gateway.kill()
        gateway.wait()


def _greeting(cluster: Cluster, listen_port: int, file: Path) -> str:
    psql = shlex.quote(shutil.which("psql") or str(cluster.primary.bin / "psql"))
    where = f"-h 127.0.0.1 -p {listen_port}"
    connection = f"psycopg.connect(host='127.0.0.1', port={listen_port}, user='demo')"
    python = f"import psycopg; print({connection}.execute('select version()').fetchone())"
    nodes = ", ".join(f"{node.name} on {node.port} (pid {node.pid})" for node in cluster.nodes)
    return f"""
The gateway serves PostgreSQL on 127.0.0.1:{listen_port}; every user is trusted, the database is demo.

  psql     {psql} {where} -U demo
  psycopg  {shlex.quote(sys.executable)} -c "{python}"
  console  {psql} {where} -U postgres gateway -c 'show pools'

Behind it: {nodes}; {cluster.primary.name} is the primary.
Try: kill -9 {cluster.primary.pid}, and watch a standby take over; what was killed is started again and rejoins.
     {shlex.quote(sys.executable)} -m gateway switchover --config {file}
Settings: {file}
Ctrl-C ends it all and throws the data away.
"""


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            reason = error.strerror.lower() if error.strerror else error
            raise EmbeddedError(f"cannot listen on 127.0.0.1:{port}: {reason}; choose another port") from None


def _wait_listening(gateway: subprocess.Popen[bytes], port: int) -> None:
    def is_listening() -> bool:
        if gateway.poll() is not None:
            raise EmbeddedError(f"the gateway did not start, it ended with exit code {gateway.returncode}")
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            return True
        return False

    if not wait_until(is_listening, LISTEN_TIMEOUT):
        raise EmbeddedError(f"the gateway does not listen on 127.0.0.1:{port} after {LISTEN_TIMEOUT:.0f} s")


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM and SIGHUP do what Ctrl-C does."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
