"""The commands: how a query is split, and what is no command."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.console.commands import COMMANDS, Statement, Verb, parse, usage
from gateway.console.tables import FAKES, TABLES
from gateway.errors import CONSOLE_COMMAND


@pytest.mark.parametrize(
    ("text", "verb", "argument"),
    [
        ("show pools", Verb.SHOW, "pools"),
        ("SHOW Pools;", Verb.SHOW, "pools"),
        ('  show\n"pools" ;; ', Verb.SHOW, "pools"),
        ("/* who asks */ show -- what\n pools", Verb.SHOW, "pools"),
        ("show help", Verb.SHOW, "help"),
        ("show TimeZone", Verb.SHOW, "timezone"),
        ("select 1", Verb.SELECT, "1"),
        ("SELECT version();", Verb.SELECT, "version()"),
        ("set client_encoding to 'UTF8'", Verb.SET, "client_encoding"),
        ("SET extra_float_digits=3", Verb.SET, "extra_float_digits"),
        ("set DateStyle TO ISO, MDY", Verb.SET, "datestyle"),
        ("set x = 'a;b''c'", Verb.SET, "x"),
        ("reload", Verb.RELOAD, ""),
        ("switchover", Verb.SWITCHOVER, ""),
        ("switchover force", Verb.SWITCHOVER, ""),
        ('SWITCHOVER "Pg-2" FORCE;', Verb.SWITCHOVER, "Pg-2"),
        ("promote main.pg2", Verb.PROMOTE, "main.pg2"),
        ("attach pg2", Verb.ATTACH, "pg2"),
        ("detach pg2 now", Verb.DETACH, "pg2"),
        ("pause failover", Verb.PAUSE, ""),
        ("RESUME Failover Main", Verb.RESUME, "Main"),
    ],
)
def test_parse_command_in_any_spelling_is_understood(text, verb, argument):
    [statement] = parse(text)
    assert (statement.verb, statement.argument) == (verb, argument)


@pytest.mark.parametrize("text", ["", " ", ";", " ;\n; ", "-- nothing", "/* nothing */"])
def test_parse_query_that_says_nothing_has_no_command(text):
    assert parse(text) == []


def test_parse_query_with_several_commands_keeps_their_order_and_text():
    assert parse("show pools; Reload ;show version") == [
        Statement("show pools", Verb.SHOW, "pools"),
        Statement("Reload", Verb.RELOAD),
        Statement("show version", Verb.SHOW, "version"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "show",
        "show nothing",
        "show pools pools",
        "show 'pools",
        "select pools",
        "select 2",
        "set x",
        "set x =",
        "set x y z",
        "reload now",
        "switchover pg1 pg2",
        "promote",
        "attach pg2 now",
        "pause",
        "resume failover a b",
        "begin",
        "drop table pools",
    ],
)
def test_parse_what_is_no_command_is_told_back(text):
    with pytest.raises(CONSOLE_COMMAND) as caught:
        parse(f"  {text} ")
    assert str(caught.value) == f"invalid command '{text}', use SHOW HELP;"


@given(st.text(alphabet="show pols;'\"=-*/\n\\{}1é", max_size=30))
def test_parse_any_text_is_commands_or_an_error(text):
    with suppress(CONSOLE_COMMAND):
        assert all(statement.text in text for statement in parse(text))


def test_usage_names_every_command_and_table():
    words = set(usage().replace("|", " ").split())
    assert words >= {name.upper() for name in TABLES}
    assert words >= {verb for verb, command in COMMANDS.items() if command.usage}
    assert not words & {name.upper() for name in FAKES}


def test_commands_that_change_something_are_for_admins():
    assert {verb for verb, command in COMMANDS.items() if not command.admin} == {Verb.SHOW, Verb.SELECT, Verb.SET}
