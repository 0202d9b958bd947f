"""The life of a gateway: reload, drain, the death of a worker, the console's commands.

Nobody is dropped who need not be.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

import psycopg
import pytest

from .client import Client, count, error, eventually, login, types, value
from .endpoints import DEFAULTS, ROOT
from .messages import WHO, query, startup
from .unbuilt import console_command

pytestmark = pytest.mark.usefixtures("pooler")


@pytest.mark.both
def test_reload_changes_settings_and_drops_nobody(gateway):
    relay = gateway(default_pool_size=1)
    with login(relay.port) as one, login(relay.port) as two:
        one.ask(query("begin"))
        relay.configure(default_pool_size=2)
        eventually(lambda: _config(relay)["default_pool_size"] == "2", "the new setting")
        assert two.value("select 'second server'") == "second server"
        assert one.value("select 1") == "1"
        assert types(one.ask(query("commit"))) == "CZ"


def test_reload_of_a_faulty_file_keeps_the_running_settings(gateway):
    relay = gateway()
    with login(relay.port) as client:
        for text in ("[front\n", 'default_pool_size = "many"\n', "[front]\nno_such_setting = 1\n", ""):
            relay.config.write_text(text)
            relay.reload()
            assert client.value("select 1") == "1"
            assert value(relay.port, "select 1") == "1"
        assert _config(relay)["default_pool_size"] == "1"


def test_reload_a_hundred_times_with_clients_coming_and_going(gateway):
    relay = gateway(default_pool_size=3, workers=2)
    stop, failures = threading.Event(), list[BaseException]()

    def come_and_go() -> None:
        while not stop.is_set():
            try:
                assert value(relay.port, "select 1") == "1"
            except AssertionError as failure:
                failures.append(failure)
                return

    threads = [threading.Thread(target=come_and_go) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        relay.reload()
        value(relay.port, "select 1")
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.both
def test_sigterm_lets_open_transactions_finish(gateway):
    # Five open transactions of many queries each all commit; new clients are refused; exit code 0.
    relay = gateway(default_pool_size=5, shutdown_timeout=20)
    clients = [login(relay.port) for _ in range(5)]
    idle = login(relay.port)
    for client in clients:
        client.ask(query("begin"))
    relay.process.terminate()
    idle.until(lambda seen: count(seen, "E") > 0)
    assert error(idle.messages)["C"] == "57P01"
    for number in range(25):
        for client in clients:
            assert client.value(f"select {number}") == str(number)
    for client in clients:
        client.mark()
        client.write(query("commit"))
        assert types(client.until(lambda seen: count(seen, "Z") > 0)).startswith("CZ")
    assert relay.wait() == 0
    for client in (*clients, idle):
        client.wait_closed()
        client.socket.close()


def test_sigterm_new_client_is_refused_with_57p01_or_57p03(gateway):
    relay = gateway(shutdown_timeout=20)
    with login(relay.port) as holder:
        holder.ask(query("begin"))
        relay.process.terminate()
        eventually(lambda: _refused(relay.port), "new clients to be refused")
        holder.ask(query("commit"))
    assert relay.wait() == 0


def test_sigterm_twice_ends_now(gateway):
    relay = gateway(shutdown_timeout=60)
    with login(relay.port) as holder:
        holder.ask(query("begin"))
        relay.process.terminate()
        eventually(lambda: _refused(relay.port), "the drain to begin")
        relay.process.terminate()
        relay.wait()
        holder.wait_closed()


def test_sigterm_shutdown_timeout_ends_who_never_finishes(gateway):
    relay = gateway(shutdown_timeout=1.0)
    with login(relay.port) as holder:
        holder.ask(query("begin"))
        assert relay.terminate() == 0
        holder.wait_closed()
        assert count(holder.messages, "E") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_on_an_idle_gateway_ends_it_with_0(gateway, number):
    relay = gateway(workers=2)
    relay.process.send_signal(number)
    assert relay.wait() == 0


@pytest.mark.both
def test_worker_killed_is_restarted_and_others_are_undisturbed(gateway):
    relay = gateway(workers=2, default_pool_size=4)
    clients = [login(relay.port) for _ in range(20)]
    victim = min(relay.workers())
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: len(relay.workers() - {victim}) == 2, "a new worker")
    relay.expected_workers = relay.workers()
    survivors = 0
    for client in clients:
        client.mark()
        client.write(query("select 1"))
        seen = client.until(lambda seen: count(seen, "Z") > 0)
        survivors += count(seen, "D")
        client.socket.close()
    assert 0 < survivors < 20
    for _ in range(20):
        assert value(relay.port, "select 1") == "1"


def test_worker_killed_with_open_transactions_leaves_no_server_behind(gateway, database):
    relay = gateway(default_pool_size=4)
    clients = [login(relay.port, user="alice") for _ in range(3)]
    for client in clients:
        client.ask(query("begin"))
    for pid in relay.workers():
        os.kill(pid, signal.SIGKILL)
    for client in clients:
        client.wait_closed()
        client.socket.close()
    open_ = "select count(*) from pg_stat_activity where usename = 'alice' and state like 'idle in%'"
    eventually(lambda: database.execute(open_).fetchone() == (0,), "the transactions to end")
    eventually(lambda: relay.workers(), "a new worker")
    eventually(lambda: not _refused(relay.port), "service")
    relay.expected_workers = relay.workers()


def test_supervisor_killed_takes_its_workers_with_it(gateway):
    relay = gateway(workers=2, shutdown_timeout=1)
    workers = relay.workers()
    relay.process.kill()
    relay.process.wait(5)
    eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in workers), "the workers to end")


@console_command
@pytest.mark.both
def test_pause_holds_clients_and_resume_serves_them(gateway):
    relay = gateway(default_pool_size=2)
    with login(relay.port) as client:
        client.value("select 1")
        relay.console("pause postgres")
        client.mark()
        client.write(query("select 'resumed'"))
        client.flush()
        assert not client.pump(0.2)
        relay.console("resume postgres")
        seen = client.until(lambda seen: count(seen, "Z") > 0)
        assert [row.values for row in seen if row.type == "D"] == [[b"resumed"]]


@console_command
def test_pause_waits_for_open_transactions_and_resume_from_elsewhere_ends_it(gateway):
    # #715: PAUSE hung for ever when another session resumed.
    relay = gateway(default_pool_size=2)
    with login(relay.port) as holder:
        holder.ask(query("begin"))
        thread = threading.Thread(target=_ignoring_errors, args=[relay, "pause postgres"])
        thread.start()
        eventually(lambda: _database(relay)["paused"] == 1, "the pause to begin")
        assert holder.value("select 'goes on'") == "goes on"
        relay.console("resume postgres")
        thread.join(10)
        assert not thread.is_alive()
        holder.ask(query("commit"))
        assert holder.value("select 1") == "1"


@console_command
def test_kill_and_resume_serve_new_clients(gateway):
    # #310: nobody could connect after KILL.
    relay = gateway(default_pool_size=2)
    with login(relay.port) as client:
        client.ask(query("begin"))
        _ignoring_errors(relay, "kill postgres")
        client.wait_closed()
        _ignoring_errors(relay, "resume postgres")
    assert value(relay.port, "select 1") == "1"


@console_command
def test_reconnect_replaces_servers_without_dropping_clients(gateway):
    relay = gateway()
    with login(relay.port) as client:
        first = client.value("select pg_backend_pid()")
        relay.console("reconnect")
        eventually(lambda: client.value("select pg_backend_pid()") != first, "a new server")


@console_command
def test_disable_refuses_new_clients_and_enable_lets_them_in(gateway):
    relay = gateway(database={"shop": {}})
    relay.console("disable shop")
    with Client(relay.port) as client:
        client.write(startup(user="postgres", database="shop"))
        assert error(client.wait_closed())["S"] == "FATAL"
    relay.console("enable shop")
    assert value(relay.port, "select 1", database="shop") == "1"


def test_console_show_commands_all_answer_under_load(gateway):
    relay = gateway(default_pool_size=2, workers=2)
    begun, stop = threading.Event(), threading.Event()

    def load() -> None:
        with login(relay.port) as client:
            while not stop.is_set():
                client.value("select 1")
                begun.set()

    thread = threading.Thread(target=load)
    thread.start()
    try:
        assert begun.wait(10)
        for name in ["pools", "databases", "clients", "servers", "stats", "users", "config", "lists", "version"]:
            assert relay.console(f"show {name}"), name
    finally:
        stop.set()
        thread.join()


def test_console_wrong_command_is_an_error_and_the_session_goes_on(gateway):
    relay = gateway()
    with relay.connect(relay.console_database) as connection:
        cursor = psycopg.ClientCursor(connection)
        for text in ("nonsense", "show nonsense", "select 1 from pg_class", "pause nowhere"):
            with pytest.raises(psycopg.Error):
                cursor.execute(text)
        assert cursor.execute("show version").fetchall()


def test_console_answers_what_drivers_ask_at_the_start(gateway):
    # psycopg2 and pgcli send SET and SHOW of their own.
    relay = gateway()
    with relay.connect(relay.console_database) as connection:
        cursor = psycopg.ClientCursor(connection)
        cursor.execute("set datestyle to 'iso'")
        cursor.execute("show client_encoding")
        cursor.execute("set client_encoding to 'utf8'; ")


def test_port_in_use_is_one_clear_sentence_and_exit_1(gateway):
    relay = gateway()
    command = [sys.executable, "-m", "gateway", "serve", str(relay.config)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=10, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    if done.returncode == 0:
        pytest.fail("a second gateway took the same port")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr + done.stdout
    assert str(relay.port) in done.stderr + done.stdout


def test_log_of_a_quiet_life_has_no_warning(gateway):
    relay = gateway(**DEFAULTS)
    assert value(relay.port, "select 1") == "1"
    assert not [line for line in relay.log.splitlines() if "ERROR" in line or "CRITICAL" in line]


def _config(relay) -> dict[str, str]:
    return {row["key"]: str(row["value"]) for row in relay.console("show config")}


def _database(relay, name: str = "postgres") -> dict[str, object]:
    return next(row for row in relay.console("show databases") if name in (row["name"], row["database"]))


def _ignoring_errors(relay, command: str) -> None:
    with suppress(psycopg.Error):
        relay.console(command)


def _refused(port: int) -> bool:
    try:
        with Client(port) as client:
            client.write(startup(**WHO))
            return count(client.until(lambda seen: count(seen, "Z") + count(seen, "E") > 0), "Z") == 0
    except OSError:
        return True
