"""One node's probe against a server that is a dictionary: every way in which a round can end."""

from __future__ import annotations

import errno
import re
from functools import partial

import anyio
import pytest

from health.probe import Probe
from health.view import Node, Outcome, ProbeResult

from .servers import PRIMARY, STANDBY, Names, RefusalError, Server


def probing(server: Server, names: Names | None = None, timeout: float = 5.0) -> Probe:
    names = names or Names("10.0.0.1")
    return Probe(Node("pg1", "pg1.example"), server.connect, names.resolve, timeout=timeout, clock=lambda: 42.0)


def rounds(probe: Probe, count: int = 1, **how: bool) -> ProbeResult:
    """Run count rounds and return the last result."""

    async def run() -> ProbeResult:
        for _ in range(count):
            result = await probe.round(**how)
        return result

    return anyio.run(run)


def test_probe_of_primary_reads_timeline_of_walfile_and_position():
    assert rounds(probing(Server())) == ProbeResult(
        "pg1",
        42.0,
        Outcome.ANSWERED,
        addresses=("10.0.0.1",),
        latency=0.0,
        in_recovery=False,
        timeline=3,
        system_identifier=7714020726602855821,
        current_lsn=0x1A0000028,
        receiver_streaming=False,
    )


def test_probe_of_standby_reads_timeline_of_receiver_and_positions():
    server = Server()
    server.row = STANDBY
    result = rounds(probing(server))
    assert (result.in_recovery, result.timeline, result.receiver_streaming) == (True, 3, True)
    assert (result.current_lsn, result.received_lsn, result.replayed_lsn) == (None, 0x1A0000000, 0x19FFFFFF8)


@pytest.mark.parametrize(
    ("receivers", "status", "received_timeline", "streaming", "timeline"),
    [
        ("1", "streaming", "3", True, 3),
        ("1", "waiting", "3", False, 2),
        ("1", None, None, None, 2),  # without pg_read_all_stats
        ("0", None, None, False, 2),
    ],
)
def test_probe_of_standby_receiver_state_is_told_or_unknown(receivers, status, received_timeline, streaming, timeline):
    server = Server()
    server.row = (*STANDBY[:7], receivers, status, received_timeline)
    result = rounds(probing(server))
    assert (result.receiver_streaming, result.timeline) == (streaming, timeline)


@pytest.mark.parametrize("sqlstate", ["42501", "42883"])
def test_probe_without_permission_asks_for_less(sqlstate):
    server = Server()
    server.telling["pg_control_system"] = RefusalError(sqlstate)
    probe = probing(server)
    result = rounds(probe)
    assert (result.outcome, result.in_recovery, result.timeline) == (Outcome.ANSWERED, False, 3)
    assert (result.system_identifier, result.receiver_streaming) == (None, None)
    server.queries.clear()
    assert rounds(probe).outcome is Outcome.ANSWERED
    assert not any("pg_control_system" in sql for sql in server.queries)  # and remembers


def test_probe_with_no_permission_at_all_is_rejected():
    server = Server()
    server.telling["pg_is_in_recovery"] = RefusalError("42501", "permission denied for function pg_is_in_recovery")
    result = rounds(probing(server))
    assert (result.outcome, result.sqlstate, result.in_recovery) == (Outcome.REJECTED, "42501", None)


@pytest.mark.parametrize(
    ("error", "outcome", "message"),
    [
        (RefusalError("53300", "sorry, too many clients already"), Outcome.REJECTED, "sorry, too many clients already"),
        (RefusalError("28P01", "password authentication failed"), Outcome.REJECTED, "password authentication failed"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed"), Outcome.REFUSED, "connection refused"),
        (FileNotFoundError(errno.ENOENT, "x"), Outcome.REFUSED, "no such file or directory"),
        (ConnectionResetError(errno.ECONNRESET, "x"), Outcome.RESET, "connection reset by peer"),
        (ConnectionResetError("server closed the connection"), Outcome.RESET, "server closed the connection"),
        (BrokenPipeError(errno.EPIPE, "x"), Outcome.RESET, "broken pipe"),
        (TimeoutError(errno.ETIMEDOUT, "x"), Outcome.SILENT, "no answer within 5 s"),
        (BlockingIOError(errno.EAGAIN, "x"), Outcome.SILENT, "no answer within 5 s"),
        (OSError(errno.EHOSTUNREACH, "x"), Outcome.UNREACHABLE, "no route to host"),
        (OSError(errno.EMFILE, "x"), Outcome.LOCAL, "cannot probe: too many open files"),
        (OSError(errno.ENETUNREACH, "x"), Outcome.LOCAL, "cannot probe: network is unreachable"),
        (PermissionError(errno.EACCES, "x"), Outcome.LOCAL, "cannot probe: PermissionError: permission denied"),
        (ValueError("whatever"), Outcome.LOCAL, "cannot probe: ValueError: whatever"),
    ],
)
def test_probe_whatever_happens_is_a_result_in_words(error, outcome, message):
    server = Server()
    server.connecting = error
    result = rounds(probing(server))
    assert (result.outcome, result.message, result.sqlstate) == (outcome, message, getattr(error, "sqlstate", ""))
    assert result.addresses == ("10.0.0.1",)


def test_probe_answered_with_nonsense_is_our_own_trouble():
    server = Server()
    server.row = ("f", "no walfile", *PRIMARY[2:])
    assert rounds(probing(server)).outcome is Outcome.LOCAL


@pytest.mark.parametrize("connected", [False, True])
def test_probe_of_hanging_server_ends_in_time_and_starts_anew(connected):
    server = Server()
    probe = probing(server, timeout=0.02)
    if connected:
        rounds(probe)
    server.gate = anyio.Event()
    assert rounds(probe).outcome is Outcome.SILENT
    assert server.connected == []
    server.gate = None
    assert rounds(probe).outcome is Outcome.ANSWERED


@pytest.mark.parametrize("error", [ConnectionResetError("server closed the connection"), RefusalError("57P01")])
def test_probe_whose_connection_was_ended_asks_again_on_a_new_one(error):
    server = Server()
    probe = probing(server)
    rounds(probe)
    server.sessions[0].broken = error
    assert rounds(probe).outcome is Outcome.ANSWERED
    assert [session.closed for session in server.sessions] == [True, False]


def test_probe_keeps_its_connection_and_makes_a_new_one_now_and_then():
    server = Server()
    probe = probing(server)
    rounds(probe, 10)
    assert len(server.sessions) == 1
    rounds(probe, 10)
    assert len(server.sessions) == 2
    rounds(probe, fresh=True)
    assert len(server.sessions) == 3
    assert server.connected == ["10.0.0.1"]


def test_probe_of_saturated_server_still_tells_its_role_on_the_kept_connection():
    server = Server()
    probe = probing(server)
    rounds(probe)
    server.connecting = RefusalError("53300", "sorry, too many clients already")
    server.row = STANDBY
    result = rounds(probe, fresh=True)
    assert (result.outcome, result.sqlstate, result.in_recovery) == (Outcome.REJECTED, "53300", True)
    assert server.connected == ["10.0.0.1"]
    server.connecting = None
    assert rounds(probe).outcome is Outcome.ANSWERED


def test_probe_of_hanging_postmaster_is_silent_although_the_kept_connection_works():
    server = Server()
    probe = probing(server)
    rounds(probe)
    server.connecting = TimeoutError()
    assert rounds(probe, fresh=True).outcome is Outcome.SILENT


def test_probe_failed_check_query_is_rejected_on_a_connection_that_is_kept():
    server = Server()
    server.checking = RefusalError("P0001", "disk is nearly full")
    result = rounds(probing(server), 3)
    assert (result.outcome, result.message) == (Outcome.REJECTED, "disk is nearly full")
    assert len(server.sessions) == 1


def test_probe_without_check_query_asks_one_thing():
    server = Server()
    anyio.run(partial(Probe(Node("pg1", "x"), server.connect, Names("::1").resolve, check_query="").round))
    assert len(server.queries) == 1
    assert re.match(r"select pg_is_in_recovery\(\)", server.queries[0])


def test_probe_of_unknown_name_is_unresolved():
    names = Names()
    names.error = OSError("name does not exist")
    result = rounds(probing(Server(), names))
    assert (result.outcome, result.message) == (Outcome.UNRESOLVED, "pg1.example: name does not exist")


def test_probe_while_name_service_fails_goes_where_the_node_was():
    server, names = Server(), Names("10.0.0.1")
    probe = probing(server, names)
    rounds(probe)
    names.error = TimeoutError()
    assert rounds(probe).outcome is Outcome.ANSWERED


def test_probe_after_address_moved_follows_it():
    server, names = Server(), Names("10.0.0.1")
    probe = probing(server, names)
    rounds(probe)
    names.addresses = ("10.0.0.2",)
    assert rounds(probe).addresses == ("10.0.0.2",)
    assert server.connected == ["10.0.0.2"]


def test_probe_of_several_addresses_puts_the_one_that_works_in_front():
    server = Server()
    server.where["10.0.0.1"] = ConnectionRefusedError(errno.ECONNREFUSED, "x")
    probe = probing(server, Names("10.0.0.1", "fd00::1"))
    rounds(probe)
    assert server.connected == ["fd00::1"]
    assert rounds(probe).addresses == ("fd00::1", "10.0.0.1")


def test_probe_of_several_dead_addresses_tells_the_first_failure():
    server = Server()
    server.where = {
        "10.0.0.1": ConnectionRefusedError(errno.ECONNREFUSED, "x"),
        "fd00::1": OSError(errno.ENETUNREACH, "x"),
    }
    assert rounds(probing(server, Names("10.0.0.1", "fd00::1"))).outcome is Outcome.REFUSED
