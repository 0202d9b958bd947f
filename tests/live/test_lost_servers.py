"""Servers that are lost while a client has one: what it is told, and where its transaction is afterwards.

PostgreSQL itself ends, so the answers are told here and not compared. What a client must never hear is that something
was undone which was not; what it must always be able to do is to roll back and go on, on the same connection.

Manual: "Message Flow", "Transactions" of libpq's status functions, appendix "PostgreSQL Error Codes".
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg
import pytest
from psycopg.pq import TransactionStatus

from .client import DEADLINE, Client, count, error, eventually, login, types
from .hostile import ROW, STRANGE, answering, close, error_response, once
from .messages import (
    Message,
    bind,
    copy_data,
    describe_portal,
    execute,
    function_call,
    message,
    parse,
    query,
    run,
    sync,
)
from .servers import Script, Visit
from .test_faults import SLEEP, terminate_backends

pytestmark = pytest.mark.usefixtures("pooler")

PATIENT = {"server_login_retry": 0.1, "query_wait_timeout": 10.0}
OURS = "backend_type = 'client backend' and application_name <> 'bench' and pid <> pg_backend_pid()"


@pytest.fixture(params=["terminated", "killed", "stopped"])
def lose(request: pytest.FixtureRequest, postgres) -> Callable[[int], None]:
    """End a server process, alone or with its PostgreSQL, which then starts again."""

    def terminated(pid: int) -> None:
        postgres.psql(f"select pg_terminate_backend({pid}, 5000)")

    def killed(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def stopped(pid: int) -> None:
        postgres.stop("immediate")
        postgres.start()

    return {"terminated": terminated, "killed": killed, "stopped": stopped}[request.param]


def simple(sql: str) -> bytes:
    return query(sql)


def extended(sql: str) -> bytes:
    return run(sql) + sync()


PROTOCOLS = pytest.mark.parametrize("ask", [simple, extended])


def status(seen: list[Message]) -> str:
    """The transaction status of the last ReadyForQuery."""
    return [one.body.decode() for one in seen if one.type == "Z"][-1]


def tags(seen: list[Message]) -> list[str]:
    """The tags of what was completed."""
    return [one.body[:-1].decode() for one in seen if one.type == "C"]


def pid_of(client: Client) -> int:
    return int(client.value("select pg_backend_pid()") or 0)


def is_aborted(client: Client, ask: Callable[[str], bytes]) -> None:
    """The client is in a transaction that is aborted, and comes out of it by ROLLBACK."""
    seen = client.ask(ask("select 'refused'"))
    assert (types(seen)[-2:], error(seen)["C"], status(seen)) == ("EZ", "25P02", "E")
    seen = client.ask(ask("rollback"))
    assert (tags(seen), status(seen)) == (["ROLLBACK"], "I")
    assert client.value("select 'a new transaction'") == "a new transaction"


def eventually_running(postgres, text: str, more: str = "true") -> int:
    """Wait for a query, and return the process that runs it."""
    found = f"select pid from pg_stat_activity where {OURS} and query like '%{text}%' and state = 'active' and {more}"
    return int(eventually(lambda: postgres.psql(found), f"{text} to run"))


# Within a transaction block.


@PROTOCOLS
def test_server_lost_while_its_client_idles_in_a_transaction_is_told_once_and_leaves_it_aborted(
    gateway, lose, ask, item, items
):
    relay = gateway(**PATIENT)
    with login(relay.port) as client:
        client.ask(ask("begin"))
        client.ask(ask("insert into item values (1, 'lost')"))
        lose(pid_of(client))
        seen = client.ask(ask("select 2"))
        assert (types(seen), status(seen)) == ("EZ", "E"), list(map(str, seen))
        assert error(seen)["C"] in ("57P01", "08006")
        is_aborted(client, ask)
        assert client.value("select count(*) from item") == "0"


@PROTOCOLS
@pytest.mark.parametrize("sql", ["commit", "ROLLBACK WORK;"])
def test_transaction_lost_while_its_client_idles_is_over_when_that_ends_it(gateway, database, item, ask, sql):
    with login(gateway(**PATIENT).port) as client:
        client.ask(ask("begin"))
        client.ask(ask("insert into item values (1, 'lost')"))
        terminate_backends(database)
        seen = client.ask(ask(sql))
        assert (types(seen), error(seen)["C"], status(seen)) == ("EZ", "57P01", "I")
        assert client.value("select count(*) from item") == "0"


def test_transaction_lost_while_its_client_idles_is_over_by_a_prepared_commit(gateway, database, item):
    with login(gateway(**PATIENT).port) as client:
        client.ask(parse("commit", name="end") + sync())
        client.ask(simple("begin"))
        terminate_backends(database)
        seen = client.ask(bind(statement="end") + execute() + sync())
        assert (types(seen), error(seen)["C"], status(seen)) == ("EZ", "57P01", "I")


@PROTOCOLS
def test_server_lost_during_a_query_of_a_transaction_leaves_it_aborted(gateway, postgres, lose, ask):
    relay = gateway(**PATIENT)
    with login(relay.port) as client:
        client.ask(ask("begin"))
        client.mark()
        client.write(ask(SLEEP))
        client.flush()
        lose(eventually_running(postgres, "pg_sleep(30)"))
        seen = client.until(lambda seen: count(seen, "Z") > 0)
        # A server that says why it ends says first what it was about to say.
        assert (types(seen).lstrip("12T"), status(seen)) == ("EZ", "E"), list(map(str, seen))
        assert error(seen)["C"] in ("57P01", "08006")
        is_aborted(client, ask)


@PROTOCOLS
@pytest.mark.parametrize(
    ("sql", "answer"),
    [("commit", "ROLLBACK I"), ("rollback", "ROLLBACK I"), ("savepoint a", "25P02 E"), ("rollback to a", "3B001 E")],
)
def test_aborted_transaction_answers_as_postgresql_does(gateway, database, ask, sql, answer):
    with login(gateway().port) as client:
        client.ask(ask("begin"))
        terminate_backends(database)
        assert types(client.ask(ask("select 1"))) == "EZ"
        seen = client.ask(ask(sql))
        told = tags(seen) or [error(seen)["C"]]
        assert f"{told[0]} {status(seen)}" == answer


def test_extended_group_fails_once_and_the_rest_of_it_is_discarded(gateway, database):
    with login(gateway().port) as client:
        client.ask(query("begin"))
        terminate_backends(database)
        client.mark()
        client.write(run("select 1"))
        seen = client.until(lambda seen: count(seen, "E") > 0)
        assert types(seen) == "E"
        client.write(run("select 2") + query("select 3") + copy_data("x"))
        seen = client.ask(sync())
        assert (types(seen), status(seen)) == ("Z", "E")
        is_aborted(client, extended)


def test_sync_alone_tells_that_the_transaction_is_aborted(gateway, database):
    with login(gateway().port) as client:
        client.ask(query("begin"))
        terminate_backends(database)
        error(client.ask(query("select 1")))
        assert status(client.ask(sync())) == "E"
        is_aborted(client, simple)


def test_function_call_in_a_transaction_that_was_lost_gets_its_error_and_ready_for_query(gateway, database):
    version = 89  # pg_proc.dat: version()
    with login(gateway().port) as client:
        client.ask(query("begin"))
        terminate_backends(database)
        seen = client.ask(function_call(version))
        assert (types(seen), status(seen)) == ("EZ", "E")
        seen = client.ask(function_call(version))
        assert (types(seen), error(seen)["C"], status(seen)) == ("EZ", "25P02", "E")
        is_aborted(client, simple)


def test_begin_that_was_not_answered_leaves_the_client_in_a_transaction(bench):
    with bench.playing(dying_at("begin")), bench.login() as client:
        seen = client.ask(query("begin"))
        assert (types(seen), error(seen)["C"], status(seen)) == ("EZ", "08006", "E")
        bench.heal()
        is_aborted(client, simple)


def test_pipeline_of_a_transaction_fails_group_by_group(gateway, postgres, lose):
    with login(gateway(**PATIENT).port) as client:
        client.mark()
        groups = ["begin", SLEEP, "select 2", "select 3"]
        client.write(b"".join(map(extended, groups)))
        client.flush()
        lose(eventually_running(postgres, "pg_sleep(30)"))
        seen = client.until(lambda seen: count(seen, "Z") == len(groups))
        assert types(seen).replace("12T", "") == "12nCZEZEZEZ", list(map(str, seen))
        assert [one.body for one in seen if one.type == "Z"] == [b"T", b"E", b"E", b"E"]
        is_aborted(client, extended)


def test_transaction_lost_again_before_it_was_rolled_back_stays_aborted(gateway, database):
    with login(gateway().port) as client:
        client.ask(query("begin"))
        for _ in range(3):
            terminate_backends(database)
            error(client.ask(query("select 1")))
            seen = client.ask(query("select 2"))
            assert (error(seen)["C"], status(seen)) == ("25P02", "E")
        is_aborted(client, simple)


def test_transaction_of_a_client_with_parameters_of_its_own_is_aborted_behind_them(gateway, database):
    # One is reported by every server; the other only a server can tell whether it is good.
    relay = gateway()
    with login(relay.port, TimeZone="Asia/Tokyo", statement_timeout="7s") as client, login(relay.port) as other:
        client.ask(query("begin"))
        terminate_backends(database)
        error(client.ask(query("select 1")))
        assert other.value("select 'in between'") == "in between"
        is_aborted(client, simple)
        assert client.value("show timezone") == "Asia/Tokyo"
        assert client.value("show statement_timeout") == "7s"


def test_statements_of_a_client_are_what_they_were(gateway, database):
    with login(gateway().port) as client:
        client.ask(parse("select 'kept'", "kept") + parse("rollback", "back") + sync())
        client.ask(query("begin"))
        terminate_backends(database)
        # It was not answered: so the name is free.
        assert types(client.ask(parse("select 'new'", "new") + sync())) == "EZ"
        seen = client.ask(bind(statement="kept") + execute() + sync())
        assert error(seen)["C"] == "25P02"
        assert tags(client.ask(bind(statement="back") + execute() + sync())) == ["ROLLBACK"]
        assert types(client.ask(parse("select 'new'", "new") + sync())) == "1Z"
        for name in (b"kept", b"new"):
            seen = client.ask(bind(statement=name.decode()) + execute() + sync())
            assert [one.values for one in seen if one.type == "D"] == [[name]]


def test_parse_that_was_not_answered_leaves_its_name_free(bench):
    with bench.playing(dying_at("'new'")), bench.login() as client:
        assert types(client.ask(parse("select 'new'", "new") + sync())) == "EZ"
        bench.heal()
        assert types(client.ask(parse("select 'newer'", "new") + sync())) == "1Z"
        seen = client.ask(bind(statement="new") + execute() + sync())
        assert [one.values for one in seen if one.type == "D"] == [[b"newer"]]


def test_others_of_the_pool_do_not_notice(gateway, database):
    relay = gateway(default_pool_size=3)
    with login(relay.port) as client, login(relay.port) as busy, login(relay.port) as idle:
        client.ask(query("begin"))
        pid = pid_of(client)
        busy.ask(query("begin"))
        terminate_backends(database, f"pid = {pid}")
        error(client.ask(query("select 1")))
        assert busy.value("select 'unharmed'") == "unharmed"
        assert idle.value("select 'unharmed'") == "unharmed"
        assert status(busy.ask(query("commit"))) == "I"
        is_aborted(client, simple)


def test_warning_with_which_a_crashed_server_ends_is_not_passed_on(gateway, postgres):
    # It comes as a notice of a query that another server will answer, or that fails with the same words.
    relay = gateway(default_pool_size=2, **PATIENT)
    with login(relay.port) as client, login(relay.port) as other:
        client.ask(query("begin"))
        client.mark()
        client.write(query(SLEEP))
        client.flush()
        eventually_running(postgres, "pg_sleep(30)")
        other.ask(query("begin"))
        os.kill(pid_of(other), signal.SIGKILL)
        seen = client.until(lambda seen: count(seen, "Z") > 0)
        assert types(seen).lstrip("T") == "EZ"
        assert "crash of another server process" in error(seen)["M"]


def test_failover_sqlstate_stands_for_what_was_lost_and_not_for_what_is_unknown(bench_with, gateway, database, item):
    with login(gateway(failover_sqlstate="40001").port) as client:
        client.ask(query("begin"))
        terminate_backends(database)
        assert error(client.ask(query("select 1")))["C"] == "40001"
        is_aborted(client, simple)
    bench = bench_with(failover_sqlstate="40001")
    with bench.playing(dying_at("commit", "insert")), bench.login() as client:
        client.ask(query("begin"))
        assert error(client.ask(query("commit")))["C"] == "08007"
        assert error(client.ask(query("insert into item values (1, 'a')")))["C"] == "08007"
        client.ask(query("begin"))
        assert error(client.ask(query("insert into item values (1, 'a')")))["C"] == "40001"
        client.ask(query("rollback"))


# Where the outcome is not known.


def dying_at(*words: str) -> Script:
    """Be PostgreSQL, but end at the first request with one of these words, which PostgreSQL does not get."""

    def script(visit: Visit) -> None:
        visit.send(*visit.welcome())
        last = visit.relay(lambda seen: seen.type in "PQ" and any(word.encode() in seen.body for word in words))
        while last.type not in "QS":
            last = visit.receive()

    return script


@PROTOCOLS
def test_commit_that_was_not_answered_may_have_been_done(bench, ask, item):
    with bench.playing(dying_at("commit")), bench.login() as client:
        client.ask(ask("begin"))
        client.ask(ask("insert into item values (1, 'perhaps')"))
        seen = client.ask(ask("commit"))
        assert (types(seen), error(seen)["C"], status(seen)) == ("EZ", "08007", "I")
        assert "run again" in error(seen)["H"]
        assert client.value("select 'the next'") == "the next"


@PROTOCOLS
def test_rollback_that_was_not_answered_is_done(bench, ask):
    with bench.playing(dying_at("rollback")), bench.login() as client:
        client.ask(ask("begin"))
        seen = client.ask(ask("rollback"))
        assert (types(seen), error(seen)["C"], status(seen)) == ("EZ", "08006", "I")


@PROTOCOLS
@pytest.mark.parametrize("sql", ["insert into item values (1, 'a')", "select nextval('s')", "vacuum", "call p()"])
def test_statement_alone_that_was_not_answered_may_have_been_done(bench, ask, sql):
    with bench.playing(dying_at(sql)), bench.login() as client:
        seen = client.ask(ask(sql))
        assert (types(seen), error(seen)["C"], status(seen)) == ("EZ", "08007", "I")
        assert client.value("select 'the next'") == "the next"


def test_long_query_that_was_not_answered_may_have_been_done(bench):
    with bench.playing(dying_at("insert")), bench.login() as client:
        seen = client.ask(query(f"insert into item values (1, '{'x' * 100_000}')"))
        assert (types(seen), error(seen)["C"]) == ("EZ", "08007")


def test_long_values_in_a_transaction_are_lost_with_it(bench):
    with bench.playing(dying_at("insert")), bench.login() as client:
        client.ask(query("begin"))
        seen = client.ask(run("insert into item values (1, $1)", "x" * 100_000) + sync())
        assert (types(seen), error(seen)["C"], status(seen)) == ("EZ", "08006", "E")
        client.ask(query("rollback"))


@pytest.mark.parametrize("how", ["terminated", "killed"])
def test_commit_that_waits_for_a_standby_is_done_and_told_as_unknown(gateway, postgres, item, items, how):
    # PostgreSQL has committed it already: an error that says otherwise would be a lie.
    postgres.configure(synchronous_standby_names="nobody")
    try:
        eventually(lambda: postgres.psql("show synchronous_standby_names") == "nobody", "the setting")
        with login(gateway(**PATIENT).port) as client:
            client.ask(query("begin; insert into item values (1, 'done')"))
            client.mark()
            client.write(query("commit"))
            client.flush()
            pid = eventually_running(postgres, "commit", "wait_event = 'SyncRep'")
            if how == "terminated":
                postgres.psql(f"select pg_terminate_backend({pid}, 5000)")
            else:
                os.kill(pid, signal.SIGKILL)
            seen = client.until(lambda seen: count(seen, "Z") > 0)
            assert (types(seen), error(seen)["C"], status(seen)) == ("EZ", "08007", "I"), list(map(str, seen))
            assert client.value("select name from item") == "done"
    finally:
        postgres.configure(synchronous_standby_names="")
        eventually(lambda: postgres.psql("show synchronous_standby_names") == "", "the setting")


def test_insert_whose_server_says_that_it_ends_is_lost(gateway, postgres, database, item, items):
    with login(gateway().port) as client, locked(postgres):
        client.mark()
        client.write(query("insert into item values (1, 'a')"))
        client.flush()
        pid = eventually_running(postgres, "insert into item", "wait_event_type = 'Lock'")
        database.execute("select pg_terminate_backend(%s, 5000)", (pid,))
        seen = client.until(lambda seen: count(seen, "Z") > 0)
        assert (types(seen), error(seen)["C"], status(seen)) == ("EZ", "57P01", "I")
    assert items() == []


# Reads.


@contextmanager
def locked(postgres) -> Iterator[Callable[[], None]]:
    """Nobody can read the table item until the block ends, or what is yielded is called."""
    connection = psycopg.connect(f"host=127.0.0.1 port={postgres.port} dbname=postgres user=postgres")
    with closing(connection):
        connection.execute("set application_name to 'bench'")
        connection.execute("lock table item in access exclusive mode")
        yield connection.rollback


COUNTING = "select count(*) from item"


@pytest.mark.parametrize(
    "request_",
    [
        query(COUNTING),
        run(COUNTING) + sync(),
        bind(statement="counting") + describe_portal() + execute() + sync(),
        run(f"{COUNTING} where id > $1", 0, oids=[23]) + sync(),
    ],
    ids=["simple", "extended", "named", "with a value"],
)
def test_read_that_was_told_nothing_is_run_again_and_nobody_notices(gateway, postgres, item, request_):
    with login(gateway().port) as client:
        client.ask(parse(COUNTING, "counting") + sync())
        with locked(postgres) as unlock:
            client.mark()
            client.write(request_)
            client.flush()
            for _ in range(2):
                pid = eventually_running(postgres, "from item", "wait_event_type = 'Lock'")
                postgres.psql(f"select pg_terminate_backend({pid}, 5000)")
            eventually_running(postgres, "from item", "wait_event_type = 'Lock'")
            unlock()
        seen = client.until(lambda seen: count(seen, "Z") > 0)
        assert types(seen).lstrip("12") == "TDCZ", list(map(str, seen))
        assert status(seen) == "I"
        # Names mean what they meant, and the next loss is the first again.
        assert types(client.ask(bind(statement="counting") + execute() + sync())) == "2DCZ"


def test_read_of_a_crashed_postgresql_waits_for_it_and_is_run_again(gateway, postgres, item):
    with login(gateway(**PATIENT).port) as client:
        with locked(postgres):
            client.mark()
            client.write(query(COUNTING))
            client.flush()
            os.kill(eventually_running(postgres, "from item", "wait_event_type = 'Lock'"), signal.SIGKILL)
            seen = client.until(lambda seen: count(seen, "Z") > 0, 10)
        assert types(seen) == "TDCZ", list(map(str, seen))


@PROTOCOLS
def test_read_that_its_server_had_begun_to_answer_when_it_said_that_it_ends_is_run_again(bench, ask):
    # PostgreSQL sends what it had kept, RowDescription and some rows, together with its last words.
    begun = (message("1") + message("2") if ask is extended else b"") + ROW
    for words in (error_response(S="FATAL", V="FATAL", C="57P01", M="no"), warning("57P02")):
        with bench.playing(once(answering(begun, words, then=close))), bench.login() as client:
            seen = client.ask(ask(STRANGE))
            assert types(seen).lstrip("12") == "TDCZ", list(map(str, seen))
            assert [one.values for one in seen if one.type == "D"] == [[b"strange"]]


def test_read_that_ended_its_server_itself_is_not_run_again(bench):
    words = error_response(S="FATAL", V="FATAL", C="XX000", M="no")
    with bench.playing(once(answering(words, then=close))), bench.login() as client:
        assert error(client.ask(query(STRANGE)))["C"] == "XX000"
        assert client.value("select 'kept'") == "kept"


def warning(sqlstate: str) -> bytes:
    return message("N", b"SWARNING\0VWARNING\0C%b\0Mit ends\0Rquickdie\0\0" % sqlstate.encode())


def test_read_within_a_transaction_is_not_run_again(gateway, postgres, item):
    with login(gateway().port) as client, locked(postgres):
        client.ask(query("begin"))
        client.mark()
        client.write(query(COUNTING))
        client.flush()
        pid = eventually_running(postgres, "from item", "wait_event_type = 'Lock'")
        postgres.psql(f"select pg_terminate_backend({pid}, 5000)")
        seen = client.until(lambda seen: count(seen, "Z") > 0)
        assert (types(seen), error(seen)["C"], status(seen)) == ("EZ", "57P01", "E")
        is_aborted(client, simple)


def test_read_that_ends_each_server_ends_three_and_no_more(bench):
    with bench.playing(answering(b"", then=close)), bench.login() as client:
        earlier = len(bench.impostor.visits)
        seen = client.ask(query(STRANGE))
        assert (types(seen), error(seen)["C"], status(seen)) == ("EZ", "08006", "I")
        assert sum(visit.asked for visit in bench.impostor.visits[earlier - 1 :]) == 3
        assert client.value("select 'kept'") == "kept"


def test_read_of_which_something_was_told_is_not_run_again(bench):
    with bench.playing(answering(ROW, then=close)), bench.login() as client:
        seen = client.ask(query(STRANGE))
        assert (types(seen), error(seen)["C"], status(seen)) == ("TDEZ", "08006", "I")
        assert sum(visit.asked for visit in bench.impostor.visits) >= 1


def test_two_reads_in_a_pipeline_are_not_run_again(bench):
    with bench.playing(dying_at("strange")), bench.login() as client:
        seen = client.ask(query(STRANGE) + query("select 2"), ready=2)
        assert types(seen) == "EZEZ" or types(seen) == "EZTDCZ", list(map(str, seen))


def test_what_a_client_sends_behind_a_read_that_is_run_again_comes_behind_it(gateway, postgres, item):
    with login(gateway().port) as client:
        with locked(postgres) as unlock:
            client.mark()
            client.write(query(COUNTING))
            client.flush()
            pid = eventually_running(postgres, "from item", "wait_event_type = 'Lock'")
            postgres.psql(f"select pg_terminate_backend({pid}, 5000)")
            eventually_running(postgres, "from item", "wait_event_type = 'Lock'")
            client.write(query("select 'behind'"))
            client.flush()
            unlock()
        seen = client.until(lambda seen: count(seen, "Z") == 2)
        assert [one.values for one in seen if one.type == "D"] == [[b"0"], [b"behind"]]


# Drivers.


def test_psycopg_is_told_of_the_aborted_transaction_and_rolls_back(gateway, database, item):
    def fails(connection: psycopg.Connection[Any]) -> None:
        with connection.transaction():
            connection.execute("insert into item values (1, 'lost')")
            terminate_backends(database)
            connection.execute("select 1")

    with gateway().connect() as connection:
        with pytest.raises(psycopg.OperationalError) as caught:
            fails(connection)
        assert caught.value.sqlstate == "57P01"
        assert not connection.broken
        assert connection.info.transaction_status == TransactionStatus.IDLE
        assert connection.execute(COUNTING).fetchone() == (0,)


def test_psycopg_without_autocommit_is_in_error_until_it_rolls_back(gateway, database):
    with gateway().connect() as connection:
        connection.autocommit = False
        connection.execute("select 1")
        terminate_backends(database)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("select 2")
        assert connection.info.transaction_status == TransactionStatus.INERROR
        with pytest.raises(psycopg.errors.InFailedSqlTransaction):
            connection.execute("select 3")
        connection.rollback()
        assert connection.execute("select 4").fetchone() == (4,)


def test_psycopg_pipeline_in_a_transaction_fails_and_the_connection_goes_on(gateway, database, item):
    def fails(connection: psycopg.Connection[Any]) -> None:
        with connection.transaction(), connection.pipeline() as pipeline:
            connection.execute("insert into item values (1, 'lost')")
            pipeline.sync()
            terminate_backends(database)
            connection.execute("select 1")

    with gateway().connect() as connection:
        with pytest.raises(psycopg.Error):
            fails(connection)
        assert not connection.broken
        assert connection.execute(COUNTING).fetchone() == (0,)


def test_psycopg_read_is_run_again_without_an_error(gateway, postgres, item):
    with gateway().connect() as connection, locked(postgres) as unlock:
        answers: list[Any] = []
        reading = threading.Thread(target=lambda: answers.append(connection.execute(COUNTING).fetchone()), daemon=True)
        reading.start()
        pid = eventually_running(postgres, "from item", "wait_event_type = 'Lock'")
        postgres.psql(f"select pg_terminate_backend({pid}, 5000)")
        unlock()
        reading.join(DEADLINE)
        assert answers == [(0,)]
