"""Cases that broke other poolers: transaction blocks, notices, openings, and volume.

Full sizes run with --soak. Manual: "Message Flow", "Start-up", BEGIN, LISTEN.
"""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Sequence
from typing import Any

import pytest

from . import player
from .client import Client, count, error, login, types, value
from .endpoints import Endpoint
from .messages import (
    Message,
    bind,
    close_statement,
    cstring,
    describe_portal,
    describe_statement,
    execute,
    flush,
    packet,
    parse,
    query,
    run,
    sync,
)
from .unbuilt import session_state

MB = 1 << 20


def use(name: str, *values: int | str) -> bytes:
    """Bind and Execute a statement that was parsed before."""
    return bind(*values, statement=name) + execute()


def rows(seen: list[Message]) -> list[str]:
    """The first column of each row of an answer without an error."""
    assert count(seen, "E") == 0, str(next(one for one in seen if one.type == "E"))
    return [(one.values[0] or b"").decode() for one in seen if one.type == "D"]


# Transaction blocks.

BEGIN = {
    "simple": query("begin"),
    "extended": run("begin") + sync(),
    "prepared": parse("start transaction isolation level serializable", "b") + use("b") + sync(),
}
INSIDE = [
    b"",
    query("insert into item values (1, 'x')"),
    run("insert into item values (1, 'x')") + sync(),
    query("begin"),
    run("begin") + sync(),
    run("select 1/0") + sync(),
]
END = [query("commit"), run("commit") + sync(), run("rollback") + sync(), query("commit and chain") + query("end")]


@pytest.fixture
def two_servers(gateway) -> Endpoint:
    """A gateway that takes its two servers in turn: who is given away too early meets the other one."""
    relay: Endpoint = gateway(default_pool_size=2, server_round_robin=True)
    with login(relay.port) as one, login(relay.port) as two:
        for client in (one, two):
            client.mark()
            client.write(query("select pg_sleep(0.1)"))
            client.flush()
        for client in (one, two):
            client.until(lambda seen: count(seen, "Z") == 1)
    return relay


@pytest.mark.parametrize("begin", BEGIN)
def test_block_begun_and_ended_in_any_way_answers_as_postgres(postgres, two_servers, item, items, begin):
    # BEGIN that is answered before a server has it: COMMIT without a query, BEGIN twice, extended behind simple.
    ways = ["whole", "at random, seed 1"]
    for inside, end in itertools.product(INSIDE, END):
        for script in ([[BEGIN[begin]], [inside], [end]], [[BEGIN[begin] + inside + end]]):
            player.compare(postgres.port, two_servers.port, script, before=item, after=items, ways=ways)


def test_two_requests_without_waiting_and_a_client_that_waits_each_get_their_own(pool_of_one):
    # The server was given away at the first ReadyForQuery, and the second answer went with it.
    with login(pool_of_one.port) as one, login(pool_of_one.port) as two:
        for ask in (query, lambda sql: run(sql) + sync()):
            for _ in range(20):
                for client in (one, two):
                    client.mark()
                one.write(ask("select 'a'") + ask("select 'b'"))
                two.write(ask("select 'c'"))
                one.flush()
                two.flush()
                assert rows(one.until(lambda seen: count(seen, "Z") == 2)) == ["a", "b"]
                assert rows(two.until(lambda seen: count(seen, "Z") == 1)) == ["c"]


def test_insert_by_flushed_steps_is_committed_exactly_when_ready_comes(relay, item, database):
    # Parse, Describe, Flush, Bind, Execute, Flush, and Sync later: ReadyForQuery came before the commit.
    visible = "select count(*) from item where id = %s"
    with login(relay.port) as client:
        for number in range(20):
            client.mark()
            client.write(parse("insert into item values ($1, 'x')", "put") + describe_statement("put") + flush())
            client.until(lambda seen: count(seen, "n") == 1)
            client.write(use("put", number) + flush())
            client.until(lambda seen: count(seen, "C") == 1)
            assert database.execute(visible, (number,)).fetchone() == (0,)
            assert types(client.ask(sync())) == "Z"
            assert database.execute(visible, (number,)).fetchone() == (1,)
            client.ask(close_statement("put") + sync())


@pytest.mark.parametrize("more", [b"", run("select 'skipped'") + flush()], ids=["sync alone", "more before it"])
def test_pool_exhausted_before_the_sync_gives_one_error_then_one_ready(pooler, gateway, more):
    # What came late was answered to the next query.
    relay = gateway(query_wait_timeout=0.5)
    with login(relay.port) as holder, login(relay.port) as other:
        holder.ask(query("begin"))
        other.write(parse("select 'late'", "s") + bind(statement="s") + describe_portal() + execute() + flush())
        assert error(other.until(lambda seen: count(seen, "E") > 0))["C"] == "53300"
        holder.ask(query("commit"))
        assert types(other.ask(more + sync())) == "Z"
        assert types(other.ask(use("s") + sync() + query("select 'next'"), 2)) == "EZTDCZ"
        assert rows(other.ask(parse("select 'now'", "s") + use("s") + sync())) == ["now"]


@pytest.mark.parametrize("mode", ["session", pytest.param("transaction", marks=session_state)])
def test_listen_same_channel_in_two_databases_each_hears_its_own(gateway, mode):
    relay = gateway(pool_mode=mode, default_pool_size=2)
    with (
        login(relay.port) as here,
        login(relay.port, database="shop") as there,
        login(relay.port) as notifier,
        login(relay.port, database="shop") as other,
    ):
        for client in (here, there):
            client.ask(query("listen news"))
            client.mark()
        notifier.ask(query("begin; notify news, 'never'; rollback"))
        notifier.ask(query("begin") + run("notify news, 'never'") + run("select 1/0") + sync() + query("commit"), 3)
        notifier.ask(query("begin; savepoint s; notify news, 'never'; rollback to s; notify news, 'here'; commit"))
        other.ask(query("notify news, 'there'"))
        for client, expected in ((here, b"here"), (there, b"there")):
            seen = client.until(lambda seen: count(seen, "A") > 0)
            assert [one.body[4:] for one in seen] == [b"news\0" + expected + b"\0"]
            assert types(client.ask(query("select 1"))) == "TDCZ"
        assert count(notifier.messages, "A") + count(other.messages, "A") == 0


def test_notice_that_looks_like_an_error_is_passed_on_as_what_it_is(gateway, postgres):
    script = [[parse("select 1", "a"), use("a"), sync()]]
    for code in ("57P01", "0A000", "26000", "08P01", "00000"):
        text = f"do $$ begin raise notice 'FATAL \"gateway_1\"' using errcode = '{code}', hint = 'ERROR'; end $$"
        script += [[query(text), use("a"), sync()], [run(text), run("select 1"), sync(), use("a"), sync()]]
        script += [[query("begin"), query(text), run("select 1"), sync(), query("commit")]]
    player.compare(postgres.port, gateway().port, script, ways=["whole", "at random, seed 1"])


# What a session was begun with.


def opening(*pairs: tuple[str, str]) -> bytes:
    """A StartupMessage with these parameters, in this order, a name more than once perhaps."""
    pairs = (("user", "postgres"), ("database", "postgres"), *pairs)
    return packet(struct.pack("!HH", 3, 0) + b"".join(cstring(key) + cstring(value) for key, value in pairs) + b"\0")


SHOWN = "TimeZone DateStyle client_encoding application_name search_path work_mem statement_timeout geqo role a.b"
MANY = [(f"many.p{number}", f"v{number}") for number in range(20)]
MANY += [("work_mem", "5MB"), ("TimeZone", "Asia/Tokyo"), ("search_path", "x"), ("application_name", "many")]
MANY += [("statement_timeout", "9s"), ("geqo", "off"), ("lock_timeout", "8s"), ("extra_float_digits", "1")]
MANY += [("client_min_messages", "error"), ("DateStyle", "German")]

OPENINGS = {
    "empty TimeZone": [("TimeZone", "")],
    "empty DateStyle": [("DateStyle", "")],
    "empty client_encoding": [("client_encoding", "")],
    "empty search_path": [("search_path", "")],
    "empty work_mem": [("work_mem", "")],
    "empty role": [("role", "")],
    "empty options and application_name": [("options", ""), ("application_name", "")],
    "empty database": [("database", "")],
    "empty replication": [("replication", "")],
    "empty unknown": [("no_such_setting", "")],
    "empty of one's own": [("a.b", "")],
    "user twice": [("user", "nobody"), ("user", "postgres")],
    "database twice": [("database", "nowhere"), ("database", "shop")],
    "TimeZone twice": [("TimeZone", "UTC"), ("TimeZone", "Asia/Tokyo")],
    "TimeZone twice, second one wrong": [("TimeZone", "Asia/Tokyo"), ("TimeZone", "No/Where")],
    "TimeZone twice, other case": [("timezone", "Asia/Tokyo"), ("TIMEZONE", "Asia/Kathmandu")],
    "options twice": [("options", "-c work_mem=5MB"), ("options", "-c statement_timeout=5s")],
    "options and plain": [("work_mem", "6MB"), ("options", "-c work_mem=5MB")],
    "options twice within": [("options", "-c work_mem=5MB -c work_mem=6MB --statement-timeout=5s")],
    "two unknown": [("no_such_setting", "1"), ("nor_this", "1")],
    "of one's own": [("a.b", 'it\'s \\ "own"')],
    "no name for a setting": [("a.b-c", "x")],
    "wrong isolation": [("default_transaction_isolation", "nonsense")],
    "isolation": [("default_transaction_isolation", "serializable")],
    "role": [("role", "bob")],
    "unknown role": [("role", "nobody")],
    "session_authorization": [("session_authorization", "bob")],
    "number too large": [("work_mem", "99999999999999999999")],
    "unit": [("work_mem", "5 MB"), ("statement_timeout", "0.5min")],
    "fixed": [("server_version", "9.6")],
    "needs a restart": [("port", "1")],
    "needs a reload": [("fsync", "off")],
    "thirty": MANY,
    "thirty, the last one wrong": [*MANY, ("work_mem", "nonsense")],
}


@pytest.mark.parametrize("pairs", OPENINGS.values(), ids=OPENINGS)
def test_startup_with_unusual_parameters_is_answered_and_holds_as_on_postgres(same_opening, postgres, relay, pairs):
    # Hints are the gateway's own where it answers itself.
    same_opening(opening(*pairs), ignore="FLRH", ways=["whole", "at random, seed 1"])
    assert begun_with(relay.port, pairs) == begun_with(postgres.port, pairs)
    assert begun_with(relay.port, ()) == begun_with(postgres.port, ())


def begun_with(port: int, pairs: Any) -> list[str]:
    """What a session that these parameters open is told of its settings, and what it can ask of them."""
    names = [*SHOWN.split(), *(name for name, _ in pairs if name.startswith("many."))]
    with Client(port) as client:
        client.write(opening(*pairs))
        client.until(lambda seen: count(seen, "Z") > 0)
        if client.closed:
            return []
        told = [f"{name} = {client.parameters[name]}" for name in sorted(client.parameters)]
        for name in names:
            told += map(str, client.rows(f"select '{name}', coalesce(current_setting('{name}', true), '')"))
        told += map(str, client.rows("select current_user, session_user, current_database()"))
        client.close()
        return told


# Volume.


@pytest.mark.parametrize(
    ("pairs", "size"), [(2500, 0), (2500, 10_000), pytest.param(50_000, 0, marks=pytest.mark.soak)], ids=str
)
def test_inserts_and_selects_written_without_reading_are_all_answered_in_order(relay, item, pairs, size):
    # Both directions fill up: nothing is read before no more can be written.
    filling = "x" * size
    with login(relay.port, receive_buffer=8192) as client:
        insert = parse("insert into item values ($1, $2) returning id, name", "put")
        client.ask(insert + parse("select $1::int, $2::text", "get") + sync())
        client.mark()
        client.write(b"".join(use("put", n, filling) + use("get", n, filling) + sync() for n in range(pairs)))
        while client.unsent and client.pump(0.5, reading=False):
            pass
        assert client.unsent or not size, "the test is to fill all buffers"
        seen = client.until(lambda seen: count(seen[-1:], "Z") > 0 and count(seen, "Z") == pairs, 60)
        assert types(seen) == "2DC2DCZ" * pairs
        assert rows(seen) == [str(n) for n in range(pairs) for _ in range(2)]
        assert client.value("select count(*) from item") == str(pairs)


HELD = "select 'held ' || count(*) from pg_prepared_statements"


def churn(client: Client, numbers: Sequence[int], *, parsed: bool, closed: bool) -> int:
    """Run (and before it parse, behind it close) statements of so many names; how many the server held at most."""
    highest = 0
    for at in range(0, len(numbers), 100):
        batch = numbers[at : at + 100]
        requests = []
        for number in batch:
            name = f"statement number {number}"
            requests += [parse(f"select {number}", name)] if parsed else []
            requests += [use(name), close_statement(name) if closed else b""]
            requests += [run(HELD)] if number % 10 == 0 else []
        client.messages.clear()
        answers = rows(client.ask(b"".join(requests) + sync()))
        assert [answer for answer in answers if not answer.startswith("held")] == [str(number) for number in batch]
        highest = max([highest, *(int(answer.split()[1]) for answer in answers if answer.startswith("held"))])
    return highest


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "kept"])
def test_thousands_of_statement_names_never_exceed_what_a_server_may_hold(pooler, gateway, closed):
    relay = gateway(max_prepared_statements=50)
    with login(relay.port) as client:
        assert 0 < churn(client, range(3000), parsed=True, closed=closed) <= 50
        if not closed:
            shuffled = random.Random(1).sample(range(3000), 3000)
            assert churn(client, shuffled, parsed=False, closed=False) <= 50
    assert int(value(relay.port, "select count(*) from pg_prepared_statements") or 0) <= 50


@pytest.mark.soak
@pytest.mark.parametrize("closed", [True, False], ids=["closed", "kept"])
def test_hundreds_of_thousands_of_statement_names_keep_memory_bounded(pooler, gateway, closed):
    # What a client keeps costs what it has said and little more; when it has gone the next one costs nothing.
    relay = gateway(max_prepared_statements=50)
    memory = [relay.memory()]
    for _ in range(2):
        with login(relay.port) as client:
            for start in range(0, 200_000, 10_000):
                assert churn(client, range(start, start + 10_000), parsed=True, closed=closed) <= 50
            memory.append(relay.memory())
            client.close()
        relay.assert_no_leak()
    assert memory[1] - memory[0] < (8 * MB if closed else 200_000 * 512)
    assert memory[2] - memory[1] < 16 * MB
