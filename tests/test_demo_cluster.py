"""Embedded clusters do what the demo and the live tests trust them to do, and leave nothing behind.

Called by pytest; needs PostgreSQL's programs, from the system or from the `demo` extra.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from gateway import embedded
from gateway.demo import run_demo, topology
from gateway.embedded import Cluster, EmbeddedError, PostgresNode, find_binaries, free_ports, wait_until
from gateway.topology import check

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(standbys=1) as cluster:
        yield cluster


def test_cluster_when_started_streams_what_the_primary_commits() -> None:
    with Cluster() as cluster:
        cluster.primary.psql("create table t as select 1 as a")
        assert wait_until(lambda: all(has_table(node) for node in cluster.standbys), 10)
        assert [node.psql("show cluster_name") for node in cluster.nodes] == ["pg1", "pg2", "pg3"]
        directory = cluster.directory
    assert not directory.exists()
    assert not any(node.is_running for node in cluster.nodes)


def has_table(node: PostgresNode) -> bool:
    return node.psql("select to_regclass('t')") == "t"


def test_node_when_killed_leaves_no_process_and_starts_again(cluster: Cluster) -> None:
    node = cluster.primary
    node.psql("create table t as select 1 as a")
    processes = embedded._tree(node.pid)
    assert len(processes) > 1
    node.kill()
    assert not node.is_running
    assert not any(embedded._is_alive(pid) for pid in processes)
    node.start()
    assert node.psql("select a from t") == "1"


def test_node_when_paused_accepts_tcp_and_answers_only_once_resumed(cluster: Cluster) -> None:
    node = cluster.primary
    node.pause()
    with socket.create_connection(("127.0.0.1", node.port), 5) as client:
        client.sendall(b"\0\0\0\x08\x04\xd2\x16\x2f")  # SSLRequest
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.recv(1)
        node.resume()
        client.settimeout(10)
        assert client.recv(1) in (b"N", b"S")


def test_standby_when_promoted_takes_writes_and_the_old_primary_follows_it() -> None:
    with Cluster(standbys=1) as cluster:
        old, new = cluster.nodes
        old.kill()
        new.promote()
        new.psql("create table t as select 1 as a")
        old.basebackup(new)
        old.start()
        assert old.psql("select pg_is_in_recovery()") == "t"
        assert has_table(old)


def test_node_when_configured_while_running_takes_settings_and_hba_over(cluster: Cluster) -> None:
    node = cluster.primary
    node.configure(work_mem="3MB", search_path="a'b\\c", log_connections=True)
    node.hba(["host all all 127.0.0.1/32 reject"])
    assert wait_until(lambda: node.psql("show search_path") == "a'b\\c", 10)
    with pytest.raises(psycopg.OperationalError, match=r"pg_hba\.conf rejects"):
        psycopg.connect(host="127.0.0.1", port=node.port, user="postgres", connect_timeout=10)
    node.hba(["host all all 127.0.0.1/32 trust"])


def test_node_when_a_statement_fails_raises_the_servers_message(cluster: Cluster) -> None:
    with pytest.raises(EmbeddedError, match="division by zero"):
        cluster.primary.psql("select 1; select 1/0; select 2")


def test_node_when_it_cannot_start_raises_the_end_of_its_log(cluster: Cluster) -> None:
    node = cluster.standbys[0]
    node.stop()
    node.configure(shared_buffers="many")
    with pytest.raises(EmbeddedError, match=r"pg2 did not start(.|\n)*shared_buffers"):
        node.start()
    node.configure(shared_buffers="64MB")
    node.start()


def test_cluster_in_a_given_directory_starts_again_and_is_kept(cluster: Cluster) -> None:
    directory = cluster.directory / "inner"
    with Cluster(directory, standbys=1, work_mem="3MB") as inner:
        inner.primary.psql("create table t as select 1 as a")
        inner.stop()
        inner.start()
        assert inner.primary.psql("select a from t; show work_mem") == "1\n3MB"
    assert (directory / "pg2" / "PG_VERSION").exists()


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_parent_when_it_dies_takes_running_and_paused_servers_along(end: signal.Signals) -> None:
    script = """
import time
from gateway.embedded import Cluster
with Cluster(standbys=1) as cluster:
    cluster.standbys[0].pause()
    print(cluster.directory, *(node.pid for node in cluster.nodes), flush=True)
    time.sleep(120)
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        assert parent.stdout is not None
        directory, *pids = parent.stdout.readline().split()
        assert len(pids) == 2
        parent.send_signal(end)
    # A stopped child is killed by its postmaster 5 s after SIGQUIT.
    assert wait_until(lambda: not any(embedded._is_alive(int(pid)) for pid in pids), 15)
    shutil.rmtree(directory, ignore_errors=True)


def test_binaries_of_an_unknown_version_raise_one_sentence() -> None:
    with pytest.raises(EmbeddedError, match=r"^no programs of PostgreSQL 8 found: pip install 'gateway\[demo\]' or "):
        find_binaries("8")


@pytest.mark.parametrize("version", ["16", "18"])
def test_binaries_of_the_demo_extra_tell_their_version(version: str) -> None:
    told = subprocess.run(
        [find_binaries(version) / "postgres", "--version"], capture_output=True, text=True, check=True
    )
    assert f"(PostgreSQL) {version}." in told.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can lock the unprivileged user out")
def test_binaries_in_a_closed_directory_are_copied_and_run(tmp_path: Path) -> None:
    # pytest's own directory is closed to others, as root's home is.
    package = find_binaries("18").parents[1]
    for part in (package, package.with_name(f"{package.name}.libs")):
        (tmp_path / part.name).symlink_to(part) if part.is_dir() else None
    programs = embedded._executable_by_account(tmp_path / package.name / "pginstall18" / "bin")
    assert not programs.is_relative_to(tmp_path)
    told = subprocess.run([programs / "initdb", "--version"], capture_output=True, text=True, check=True)
    assert "18." in told.stdout


def test_ports_when_asked_for_are_free_and_never_given_twice() -> None:
    ports = free_ports(20) + free_ports(20)
    assert len(set(ports)) == 40
    for port in ports:
        with socket.socket() as server:
            server.bind(("127.0.0.1", port))


def test_ports_are_never_given_twice_to_processes_that_run_at_once() -> None:
    ask = "import random; from gateway.embedded import free_ports; random.seed(7); print(*free_ports(20), flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", f"{ask}; input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None
        ports = first.stdout.readline().split()
        others = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout.split()
        first.communicate("\n")
    assert len({*ports, *others}) == 40


def test_demo_topology_is_valid(tmp_path: Path) -> None:
    file = tmp_path / "topology.toml"
    nodes = [PostgresNode(f"pg{i}", tmp_path / f"pg{i}", 5000 + i, tmp_path) for i in range(3)]
    file.write_text(topology(6432, nodes, "demote", "rejoin"))
    assert check(file) == []


def test_demo_when_the_port_is_taken_ends_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert run_demo(port) == 1
    expected = f"gateway demo: cannot listen on 127.0.0.1:{port}: address already in use; choose another port\n"
    assert capsys.readouterr() == ("", expected)


def test_demo_when_programs_are_missing_ends_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo(free_ports(1)[0], version="8") == 1
    assert re.fullmatch("gateway demo: no programs of PostgreSQL 8 found: .*\n", capsys.readouterr().err)


@pytest.mark.both
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_demo_when_told_to_stop_has_served_and_throws_its_data_away(end: signal.Signals) -> None:
    (port,) = free_ports(1)
    script = f"import sys; from gateway.demo import run_demo; sys.exit(run_demo({port}))"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        settings = next((line for line in demo.stdout if line.startswith("Settings: ")), "")
        file = Path(settings.removeprefix("Settings: ").strip())
        try:
            assert file.name == "topology.toml", demo.communicate()
            with psycopg.connect(host="127.0.0.1", port=port, user="demo", connect_timeout=10) as connection:
                assert connection.execute("select current_user, current_database()").fetchone() == ("demo", "demo")
        finally:
            demo.send_signal(end)
        _, errors = demo.communicate(timeout=60)
    assert demo.returncode == 0, errors
    assert "Traceback" not in errors
    assert not file.parent.exists()
