"""The console: who may do what, in which order, and what becomes of what fails."""

from __future__ import annotations

import logging

import pytest

from gateway import __version__
from gateway.console.console import Console
from gateway.wire import messages
from health.view import Admin
from tests.console.gateways import ADMIN, LOOKER, Gateway, pool, run, split

READY = (messages.READY_FOR_QUERY, b"I")
RELOADED = (messages.COMMAND_COMPLETE, b"RELOAD\0")


class Slow(Gateway):
    """A gateway whose workers answer when `answer` lets them."""

    def __init__(self) -> None:
        super().__init__(pools=[pool()])
        self.started: list[object] = []

    async def ask(self, table: str) -> list[dict[str, object]]:
        await Pause()
        return await super().ask(table)

    def begin(self, client: tuple[int, int], data: bytes) -> None:
        task = self.console.received(client, data)
        try:
            task.send(None)
        except StopIteration:
            return
        self.started.append(task)

    def answer(self, which: int = 0) -> None:
        task = self.started.pop(which)
        try:
            task.send(None)  # type: ignore[attr-defined]
        except StopIteration:
            return
        self.started.insert(which, task)

    def types(self, client: tuple[int, int]) -> list[int]:
        return [type_ for type_, _ in split(self.sent[client])]


class Pause:
    """Something to wait for."""

    def __await__(self):
        yield


def test_client_that_opens_is_told_what_drivers_ask_for():
    gateway = Gateway()
    *parameters, ready = split(gateway.sent[ADMIN])
    assert {messages.PARAMETER_STATUS} == {type_ for type_, _ in parameters}
    assert dict(messages.cstrings(body) for _, body in parameters) == {
        "server_version": f"{__version__}/gateway",
        "server_encoding": "UTF8",
        "client_encoding": "UTF8",
        "standard_conforming_strings": "on",
        "is_superuser": "on",
        "DateStyle": "ISO",
        "TimeZone": "GMT",
        "integer_datetimes": "on",
    }
    assert ready == READY


def test_help_is_a_notice_that_names_the_commands():
    notice, *rest = Gateway().say(messages.query("show help"))
    assert rest == [(messages.COMMAND_COMPLETE, b"SHOW\0"), READY]
    fields = messages.error_fields(notice[1])
    assert notice[0] == messages.NOTICE_RESPONSE
    assert (fields["severity"], fields["sqlstate"], fields["message"]) == ("NOTICE", "00000", "Console usage")
    assert fields["detail"].startswith("\n\tSHOW HELP|CONFIG|DATABASES|POOLS|")


def test_reload_reads_the_settings_again():
    gateway = Gateway()
    assert gateway.say(messages.query("reload")) == [RELOADED, READY]
    assert gateway.reloads == 1


def test_reload_with_a_fault_is_an_error():
    gateway = Gateway()
    gateway.faulty = True
    assert gateway.error("reload") == ("ERROR", "F0000", "RELOAD failed, see logs for additional details")


@pytest.mark.parametrize(
    ("text", "order", "tag"),
    [
        ("switchover", ("switchover", None, False), b"SWITCHOVER"),
        ("switchover pg2 force", ("switchover", "pg2", True), b"SWITCHOVER"),
        ("promote pg2", ("promote", "pg2"), b"PROMOTE"),
        ("detach pg2", ("administer", "pg2", Admin.DRAIN), b"DETACH"),
        ("detach pg2 now", ("administer", "pg2", Admin.MAINT), b"DETACH"),
        ("attach pg2", ("administer", "pg2", Admin.READY), b"ATTACH"),
        ("pause failover", ("pause", True), b"PAUSE"),
        ("resume failover main", ("pause", False), b"RESUME"),
    ],
)
def test_order_about_a_cluster_is_its_keepers(text, order, tag):
    gateway = Gateway()
    *_, done, ready = gateway.say(messages.query(text))
    assert (done, ready) == ((messages.COMMAND_COMPLETE, tag + b"\0"), READY)
    assert gateway.kept["main"].orders == [order]


def test_what_a_switchover_came_to_is_a_notice():
    notice = Gateway().say(messages.query("switchover"))[0]
    assert messages.error_fields(notice[1])["message"] == "pg2 is the primary on timeline 2"


@pytest.mark.parametrize("text", ["switchover", "promote pg2", "detach pg1", "pause failover"])
def test_order_that_is_refused_is_one_error_with_the_reason(text):
    gateway = Gateway()
    gateway.kept["main"].refusal = "pg1 is up"
    verb = text.split()[0].upper()
    assert gateway.error(text) == ("ERROR", "55000", f"{verb} is not done: pg1 is up")


@pytest.mark.parametrize("text", ["reload", "set pool_mode = session", "switchover", "pause failover"])
def test_command_of_who_may_only_look_is_refused(text):
    gateway = Gateway()
    assert gateway.error(text, LOOKER) == ("ERROR", "42501", "admin access needed")
    assert gateway.reloads == 0


def test_command_of_who_may_only_look_is_refused_in_the_extended_protocol():
    gateway = Gateway()
    request = messages.parse("", "reload") + messages.bind("", "") + messages.execute("") + messages.Sync
    assert [type_ for type_, _ in gateway.say(request, LOOKER)] == [
        messages.PARSE_COMPLETE,
        messages.BIND_COMPLETE,
        messages.ERROR_RESPONSE,
        messages.READY_FOR_QUERY,
    ]
    assert gateway.reloads == 0


@pytest.mark.parametrize("client", [ADMIN, LOOKER])
@pytest.mark.parametrize("text", ["set client_encoding to 'LATIN1'", "SET DateStyle = ISO, MDY"])
def test_set_of_what_drivers_set_is_ignored(text, client):
    notice, *rest = Gateway().say(messages.query(text), client)
    assert messages.error_fields(notice[1])["message"] == "SET ignored"
    assert rest == [(messages.COMMAND_COMPLETE, b"SET\0"), READY]


def test_set_of_a_setting_is_refused_with_the_way_to_do_it():
    assert Gateway().error("set pool_mode = session") == (
        "ERROR",
        "22023",
        "cannot set pool_mode: use the topology file and RELOAD",
    )


def test_show_by_who_may_only_look_is_answered():
    assert Gateway(pools=[pool()]).say(messages.query("show pools"), LOOKER)[-1] == READY


def test_command_that_fails_within_is_one_error_without_traceback(caplog):
    gateway = Gateway()  # has no pools to show: KeyError
    with caplog.at_level(logging.ERROR):
        assert gateway.error("show pools") == ("FATAL", "XX000", "internal error")
    assert "KeyError" in caplog.text
    assert gateway.closed == {ADMIN}


def test_terminate_closes_the_connection():
    gateway = Gateway()
    assert gateway.say(messages.Terminate) == []
    assert gateway.closed == {ADMIN}


def test_garbage_is_a_fatal_error_and_closes_the_connection():
    gateway = Gateway()
    [(type_, body)] = gateway.say(b"\0garbage")
    assert (type_, messages.error_fields(body)["sqlstate"]) == (messages.ERROR_RESPONSE, "08P01")
    assert gateway.closed == {ADMIN}


def test_client_that_is_not_known_is_not_answered():
    gateway = Gateway()
    run(gateway.console.received((5, 5), messages.query("show version")))
    gateway.console.closed((5, 5))
    assert (5, 5) not in gateway.sent


def test_client_that_waits_is_answered_in_order():
    gateway = Slow()
    gateway.sent[ADMIN] = b""
    gateway.begin(ADMIN, messages.query("show pools"))
    gateway.begin(ADMIN, messages.query("reload"))
    assert gateway.types(ADMIN) == []
    gateway.answer()
    assert gateway.types(ADMIN) == [
        messages.ROW_DESCRIPTION,
        messages.DATA_ROW,
        messages.COMMAND_COMPLETE,
        messages.READY_FOR_QUERY,
        messages.COMMAND_COMPLETE,
        messages.READY_FOR_QUERY,
    ]
    assert gateway.started == []


def test_client_that_waits_keeps_no_other_waiting():
    gateway = Slow()
    gateway.begin(ADMIN, messages.query("show pools"))
    assert gateway.say(messages.query("show version"), LOOKER)[-1] == READY


def test_client_that_goes_while_it_waits_is_sent_nothing_and_orders_nothing():
    gateway = Slow()
    gateway.sent[ADMIN] = b""
    gateway.begin(ADMIN, messages.query("show pools") + messages.query("reload"))
    gateway.console.closed(ADMIN)
    gateway.answer()
    assert gateway.sent[ADMIN] == b""
    assert gateway.reloads == 0


def test_console_takes_its_clocks_from_the_machine_unless_told_otherwise():
    gateway = Gateway()
    gateway.console = Console(gateway)
    gateway.console.opened(ADMIN, "somebody", True)
    [row, _] = gateway.table("show nodes")
    assert str(row["since"]).endswith(" UTC")
