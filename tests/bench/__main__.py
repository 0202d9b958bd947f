"""Measure the gateway beside its peers, on this machine, in one run, in turns.

It starts a PostgreSQL of its own and, in front of it, the gateway and whichever of PgBouncer and pgpool-II is on PATH.
Each scenario runs in rounds, one target after the other, so that a noisy machine is noisy for all; medians are told.
cpu_us is the CPU time of all processes of a proxy for one transaction; the last columns are gateway / target.

    python -m tests.bench                                  every scenario, 3 rounds of 4 s
    python -m tests.bench simple idle --rounds 5 --json result.json

Called by `make bench`. See pgbench in PostgreSQL's manual, proc(5) for the measures.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich import box
from rich.console import Console
from rich.table import Table

from gateway.embedded import Cluster, EmbeddedError, free_ports, release, start_guarded, wait_until
from gateway.wire import messages

PASSWORD = "bench password"
IDLE_CLIENTS = 2000
PATIENCE = 15.0  # seconds for a process to start or to stop, or for a connection
PGBENCH_GRACE = 60.0  # seconds beyond its run, to connect and to finish
HBA = ("host all bench 127.0.0.1/32 scram-sha-256", "host all all 127.0.0.1/32 trust")

TRUST, SCRAM = "trust", "scram-sha-256"
SCENARIOS = {
    "simple": ("-M", "simple", "-c", "10"),
    "prepared": ("-M", "prepared", "-c", "10"),
    "extended": ("-M", "extended", "-c", "10"),
    "simple50": ("-M", "simple", "-c", "50"),
    "many": ("-M", "simple", "-c", "1000"),
    "connect": ("-M", "simple", "-c", "10", "-C"),
    "scram-connect": ("-M", "simple", "-c", "10", "-C", "-U", "bench"),
}

TOPOLOGY = """\
[front]
listen = ["127.0.0.1:{port}"]
workers = 1
shutdown_timeout = 1.0

[front.auth]
type = "{auth}"
file = "userlist.txt"

[[cluster.main.node]]
name = "pg1"
host = "127.0.0.1"
port = {upstream}

[database."*"]
cluster = "main"
"""

PGBOUNCER = """\
[databases]
* = host=127.0.0.1 port={upstream}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = {auth}
auth_file = {directory}/userlist.txt
pool_mode = transaction
max_client_conn = 5000
log_connections = 0
{more}
"""

PGPOOL = """\
backend_clustering_mode = 'streaming_replication'
listen_addresses = '127.0.0.1'
port = {port}
socket_dir = '{directory}'
pcp_socket_dir = '{directory}'
pcp_port = {pcp}
backend_hostname0 = '127.0.0.1'
backend_port0 = {upstream}
backend_weight0 = 1
load_balance_mode = off
num_init_children = 60
max_pool = 2
sr_check_period = 0
health_check_period = 0
pid_file_name = '{directory}/pgpool.pid'
logdir = '{directory}'
work_dir = '{directory}'
"""

Measures = dict[str, float]


class BenchError(Exception):
    """A measurement is impossible; the text is one sentence for the user."""


class Target:
    """Something that listens; a proxy has a process, PostgreSQL itself has none that counts."""

    def __init__(self, name: str, port: int, pid: int | None = None, startup: float = 0.0) -> None:
        self.name, self.port, self.startup = name, port, startup
        self._root = psutil.Process(pid) if pid is not None else None

    def _sum(self, measure: Callable[[psutil.Process], float]) -> float:
        total = 0.0
        for process in [self._root, *self._root.children(recursive=True)] if self._root is not None else []:
            with suppress(psutil.NoSuchProcess):
                total += measure(process)
        return total

    def cpu_seconds(self) -> float:
        """Return the time that its processes have used, and theirs that ended (user and system of both)."""
        return self._sum(lambda process: sum(process.cpu_times()[:4]))

    def resident(self) -> float:
        """Return the bytes of memory that its processes hold."""
        return self._sum(lambda process: process.memory_info().rss)


class Bench:
    """A cluster, and what can be started in front of it."""

    def __init__(self, cluster: Cluster) -> None:
        self.directory = cluster.directory
        self.upstream = cluster.primary.port
        self.pgbench_program = str(cluster.primary.bin / "pgbench")
        owner = self.directory.stat()
        # A peer refuses to run as root, just as PostgreSQL does.
        self.account = {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []} if os.geteuid() == 0 else {}
        cluster.primary.hba(HBA)
        cluster.primary.psql(f"create role bench login password '{PASSWORD}'; grant pg_read_all_data to bench")
        self._run_pgbench(self.upstream, "-i", "-q", "-s", "5", timeout=PGBENCH_GRACE)
        (self.directory / "userlist.txt").write_text(f'"postgres" ""\n"bench" "{PASSWORD}"\n')

    def write(self, name: str, text: str, values: dict[str, Any]) -> Path:
        """Fill in a file and put it where the peers may read it."""
        path = self.directory / name
        path.write_text(text.format(port=self.ports.get(path.stem.replace("topology", "gateway")), **values))
        return path

    def commands(self, auth: str) -> dict[str, list[str | Path]]:
        """Return what starts each proxy that is here; pgpool-II would need a password file of its own for SCRAM."""
        found: dict[str, list[str | Path]] = {}
        self.ports = dict(zip(("pgbouncer", "pgpool", "gateway", "pcp"), free_ports(4), strict=True))
        values = {"auth": auth, "directory": self.directory, "upstream": self.upstream, "pcp": self.ports["pcp"]}
        if program := shutil.which("pgbouncer"):
            version = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10, check=False)
            known = re.search(r"PgBouncer (\d+)\.(\d+)", version.stdout)
            new = known is not None and (int(known[1]), int(known[2])) >= (1, 21)
            values["more"] = "max_prepared_statements = 200" if new else ""
            found["pgbouncer"] = [program, self.write("pgbouncer.ini", PGBOUNCER, values)]
        if auth == TRUST and (program := shutil.which("pgpool")):
            found["pgpool"] = [program, "-n", "-f", self.write("pgpool.conf", PGPOOL, values)]
        topology = self.write("topology.toml", TOPOLOGY, values)
        return {**found, "gateway": [sys.executable, "-m", "gateway", "serve", topology]}

    @contextmanager
    def running(self, name: str, command: list[str | Path]) -> Iterator[Target]:
        """Run a proxy and wait until it accepts a connection."""
        port, log = self.ports[name], self.directory / f"{name}.log"
        account = {} if name == "gateway" else self.account
        with log.open("wb") as output:
            process = start_guarded(command, signal.SIGKILL, stdout=output, stderr=output, **account)
        began = time.monotonic()
        try:
            wait_until(lambda: process.poll() is not None or _accepts(port), PATIENCE)
            took = time.monotonic() - began
            if process.poll() is not None or not _accepts(port):
                raise BenchError(f"{name} does not accept connections: {log.read_text(errors='replace')[-300:]!r}")
            yield Target(name, port, process.pid, took)
        finally:
            process.send_signal(signal.SIGINT)
            if not wait_until(lambda: process.poll() is not None, PATIENCE):
                process.kill()
            process.wait()
            release(process)

    def pgbench(self, target: Target, arguments: tuple[str, ...], seconds: float) -> Measures:
        """Run pgbench's select-only script."""
        before = target.cpu_seconds()
        options = ("-S", "-n", "-j", "1", "-T", str(round(seconds)), *arguments)
        text = self._run_pgbench(target.port, *options, timeout=seconds + PGBENCH_GRACE)
        tps, done = re.search(r"tps = ([\d.]+)", text), re.search(r"actually processed: (\d+)", text)
        if tps is None or done is None or done[1] == "0":
            raise BenchError("no transaction was done")
        used = target.cpu_seconds() - before
        return {"tps": float(tps[1]), "cpu_us": used / int(done[1]) * 1e6}

    def _run_pgbench(self, port: int, *arguments: str, timeout: float) -> str:
        environment = {**os.environ, "PGPASSWORD": PASSWORD, "PGUSER": "postgres"}
        command = [self.pgbench_program, "-h", "127.0.0.1", "-p", str(port), *arguments, "postgres"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, check=True)
        except subprocess.TimeoutExpired:
            raise BenchError(f"pgbench did not end within {timeout:.0f} s") from None
        except subprocess.CalledProcessError as error:
            raise BenchError(error.stderr.strip().partition("\n")[0] or "pgbench failed") from None
        return done.stdout

    def idle(self, target: Target) -> Measures:
        """Let many clients log in and rest."""
        hello = messages.startup_message({"user": "postgres", "database": "postgres"})
        ready = messages.ready_for_query(messages.IDLE)
        before, began = target.resident(), time.monotonic()
        with ExitStack() as clients:
            for _ in range(IDLE_CLIENTS):
                client = clients.enter_context(_connect(target.port))
                client.sendall(hello)
                answer = b""
                while not answer.endswith(ready):
                    if not (data := client.recv(8192)):
                        raise BenchError("it closed an idle client")
                    answer += data
            logins_per_s = IDLE_CLIENTS / (time.monotonic() - began)
            return {"bytes_per_client": (target.resident() - before) / IDLE_CLIENTS, "logins_per_s": logins_per_s}

    def rounds(self, scenario: str, targets: list[Target], rounds: int, seconds: float) -> dict[str, Measures]:
        """Run a scenario on each target in turn; who cannot is told and left out."""
        idle = scenario == "idle"
        # PostgreSQL and pgpool-II have a process for each client.
        few = scenario not in ("many", "idle")
        able = [target for target in targets if few or target.name not in ("postgresql", "pgpool")]
        found: dict[str, list[Measures]] = {}
        for _ in range(1 if idle else rounds):  # memory that was touched stays: only the first round counts
            for target in list(able):
                try:
                    measures = self.idle(target) if idle else self.pgbench(target, SCENARIOS[scenario], seconds)
                    found.setdefault(target.name, []).append(measures)
                except (BenchError, OSError) as error:
                    say(f"{scenario}: {target.name} is left out: {error}")
                    able.remove(target)
        return {name: _medians(measures) for name, measures in found.items() if measures}

    def run(self, scenarios: list[str], rounds: int, seconds: float) -> dict[str, dict[str, Measures]]:
        """Run scenarios, those that ask for a password last; return medians by scenario and target."""
        results: dict[str, dict[str, Measures]] = {}
        started: dict[str, list[Measures]] = {}
        for _ in range(rounds if "startup" in scenarios else 0):
            for name, command in self.commands(TRUST).items():
                with self.running(name, command) as target:
                    started.setdefault(name, []).append({"seconds": target.startup})
        if started:
            results["startup"] = {name: _medians(measures) for name, measures in started.items()}
        for auth in (TRUST, SCRAM):
            wanted = [name for name in scenarios if name != "startup" and ("scram" in name) == (auth == SCRAM)]
            wanted.sort(key="idle".__ne__)  # while no memory was needed for anything else
            with ExitStack() as stack:
                targets = [Target("postgresql", self.upstream)]
                for name, command in self.commands(auth).items() if wanted else ():
                    targets.append(stack.enter_context(self.running(name, command)))
                for scenario in wanted:
                    say(f"{scenario} ...")
                    results[scenario] = self.rounds(scenario, targets, rounds, seconds)
        return results


def say(text: str) -> None:
    """Tell how far it is, on standard error: the results may go to a file."""
    print(text, file=sys.stderr, flush=True)


def _connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), PATIENCE)


def _accepts(port: int) -> bool:
    with suppress(OSError), _connect(port):
        return True
    return False


def _medians(rounds: list[Measures]) -> Measures:
    return {name: median([measures[name] for measures in rounds]) for name in rounds[0]}


def show(scenario: str, measured: Mapping[str, Measures], console: Console, markdown: bool) -> None:
    """Print one scenario's table: values, then gateway / target."""
    names = list(dict.fromkeys(name for measures in measured.values() for name in measures))
    ours = measured.get("gateway", {})
    table = Table("target", box=box.MARKDOWN if markdown else box.SIMPLE_HEAD)
    for column in (*names, *[f"{name} gateway/target" for name in names]):
        table.add_column(column, justify="right")
    for target, measures in measured.items():
        values = [measures.get(name, 0.0) for name in names]
        pairs = zip(names, values, strict=True)
        ratios = [f"{ours[name] / value:.2f}" if value and name in ours else "" for name, value in pairs]
        shown = [f"{value:.{2 if value < 100 else 0}f}" if value else "" for value in values]
        table.add_row(target, *shown, *(ratios if target != "gateway" else []))
    console.print(f"\n### {scenario}\n" if markdown else f"\n{scenario}", highlight=False)
    console.print(table)


def main() -> int:
    """Run what the command line asks for; return the exit code."""
    known = [*SCENARIOS, "idle", "startup"]
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("scenarios", nargs="*", metavar="scenario", help=f"of {', '.join(known)}; none means all")
    parser.add_argument("--rounds", type=int, default=3, help="of each scenario on each target (default 3)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of one round (default 4)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--markdown", action="store_true", help="print Markdown instead of tables")
    options = parser.parse_args()
    if unknown := set(options.scenarios) - set(known):
        parser.error(f"unknown scenario: {', '.join(sorted(unknown))}")
    if min(options.rounds, options.seconds) < 1:
        parser.error("--rounds and --seconds are 1 or more")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # for the clients here, and handed down to the proxies
    for peer in ("pgbouncer", "pgpool"):
        if shutil.which(peer) is None:
            say(f"{peer} is left out: it is not on PATH")
    try:
        with Cluster(standbys=0) as cluster:
            results = Bench(cluster).run(options.scenarios or known, options.rounds, options.seconds)
    except (EmbeddedError, BenchError) as error:
        say(f"bench: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    for scenario, measured in results.items():
        show(scenario, measured, Console(width=200 if options.markdown else None), options.markdown)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
