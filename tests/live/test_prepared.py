"""Prepared statements: names belong to a client, whatever server it gets.

Manual: "Extended Query", PREPARE, DEALLOCATE.
"""

from __future__ import annotations

import itertools
from typing import Any

import psycopg
import pytest

from . import player
from .client import count, error, login, types
from .messages import (
    INT4,
    INT8,
    TEXT,
    bind,
    close_statement,
    describe_portal,
    describe_statement,
    execute,
    flush,
    parse,
    query,
    run,
    sync,
    terminate,
)
from .player import Quiet, until
from .unbuilt import session_state

OWN: dict[str, Any] = {
    "ignore": "FLR",
    "reason": "the gateway knows the client's names and answers these errors itself",
}


def use(name: str, *values: int | str | None) -> bytes:
    """Bind, Describe and Execute a statement that was parsed before."""
    return bind(*values, statement=name) + describe_portal() + execute()


@pytest.mark.both
def test_duplicate_name_is_42p05_and_keeps_connection(same):
    # PgBouncer disconnects (#1118).
    same([[parse("select 1", "a"), sync()], [parse("select 2", "a"), sync()], [use("a"), sync()]], **OWN)
    same([[parse("select 1", "a"), parse("select 1", "a"), use("a"), sync()], [use("a"), sync()]], **OWN)


@pytest.mark.both
def test_unknown_name_is_26000_and_keeps_connection(same):
    same(
        [[bind(statement="nobody"), execute(), sync()], [describe_statement("nobody"), sync()], [query("select 1")]],
        **OWN,
    )


def test_duplicate_name_in_transaction_aborts_it(same, item, items):
    # The error belongs to the transaction: what came before it is rolled back, what follows is 25P02.
    script = [
        [parse("select 1", "a"), sync(), query("begin"), query("insert into item values (1, 'x')")],
        [parse("select 2", "a"), sync()],
        [query("select 1"), query("commit")],
    ]
    same(script, before=item, after=items, **OWN)


def test_unknown_name_in_transaction_aborts_it(same, item, items):
    script = [
        [query("begin"), query("insert into item values (1, 'x')")],
        [use("nobody"), sync()],
        [query("select 1"), query("commit")],
    ]
    same(script, before=item, after=items, **OWN)


def test_unknown_name_in_pipeline_rolls_its_group_back(same, item, items):
    # All up to the Sync is one implicit transaction: the insert before the error must not stay.
    insert = run("insert into item values (1, 'x')")
    same([[insert, use("nobody"), run("select 1"), sync()], [query("select 1")]], before=item, after=items, **OWN)
    same(
        [[insert, parse("select 1", "a"), parse("select 1", "a"), sync()], [use("a"), sync()]],
        before=item,
        after=items,
        **OWN,
    )


def test_error_before_unknown_name_reports_only_the_first(same):
    same([[run("select 1/0"), use("nobody"), parse("x", "a"), sync(), use("a"), sync()]], **OWN)


def test_close_then_reuse_of_the_name(same):
    same(
        [
            [parse("select 1", "a"), use("a"), sync()],
            [close_statement("a"), sync(), use("a"), sync()],
            [parse("select 'two'", "a"), use("a"), sync()],
            [
                close_statement("a"),
                parse("select 3.0", "a"),
                use("a"),
                close_statement("a"),
                close_statement("a"),
                sync(),
            ],
        ],
        **OWN,
    )


def test_close_in_aborted_group_is_skipped(same):
    # Close after an error is skipped: the statement stays.
    same([[parse("select 1", "a"), sync()], [run("select 1/0"), close_statement("a"), sync()], [use("a"), sync()]])


def test_failed_parse_leaves_the_name_free(same):
    # Bad SQL as "a", then good SQL as "a"; and Bind to the one that failed.
    same(
        [[parse("nonsense", "a"), use("a"), sync()], [use("a"), sync()], [parse("select 1", "a"), use("a"), sync()]],
        **OWN,
    )
    same([[parse("nonsense", "a"), sync(), parse("select 1", "a"), sync(), use("a"), sync()]], **OWN)


def test_parse_skipped_after_error_does_not_exist(same):
    same(
        [
            [run("select 1/0"), parse("select 1", "a"), sync(), use("a"), sync()],
            [parse("select 2", "a"), use("a"), sync()],
        ],
        **OWN,
    )


def test_parse_before_error_in_the_same_group_survives(same):
    # Prepared statements are not transactional.
    same([[parse("select 1", "a"), run("select 1/0"), sync(), use("a"), sync()]])
    same([[query("begin")], [parse("select 1", "a"), sync()], [query("rollback")], [use("a"), sync()]])


def test_parse_in_aborted_transaction_is_refused_unless_it_ends_it(same):
    same(
        [
            [query("begin"), query("select 1/0")],
            [parse("select 1", "a"), sync(), parse("rollback", "b"), use("b"), sync()],
            [use("a"), sync(), use("b"), sync()],
        ],
        **OWN,
    )


def test_bind_of_known_statement_in_aborted_transaction_is_25p02(same):
    same(
        [
            [parse("select 1", "a"), sync(), query("begin"), query("select 1/0")],
            [use("a"), sync()],
            [query("rollback"), use("a")],
            [sync()],
        ]
    )


def test_same_text_other_parameter_types_are_two_statements(same):
    text = "select $1 as v, pg_typeof($1)"
    same(
        [
            [parse(text, "a", [INT4]), parse(text, "b", [INT8]), parse(text, "c", [TEXT]), sync()],
            [part for n in "abc" for part in (describe_statement(n), use(n, 1))] + [sync()],
        ]
    )


def test_same_text_many_names_each_answers(same):
    same(
        [
            [*(parse("select 7", f"n{n}") for n in range(9)), sync()],
            [*(use(f"n{n}") for n in range(9)), sync()],
            [close_statement("n3"), use("n4"), sync()],
        ]
    )


def test_known_and_new_parse_and_describe_in_one_batch_keep_order(same):
    # The number and place of each ParseComplete.
    same(
        [
            [parse("select 1", "a"), describe_statement("a"), sync()],
            [
                parse("select 1", "b"),
                describe_statement("a"),
                parse("select 'new'", "c"),
                describe_statement("c"),
                use("a"),
                use("b"),
                use("c"),
                sync(),
            ],
        ]
    )


def test_describe_statement_shows_parameters_and_columns(same):
    same(
        [
            [
                parse("select $1::int + $2::int as sum", "a"),
                describe_statement("a"),
                parse("begin", "b"),
                describe_statement("b"),
                sync(),
            ]
        ]
    )


@pytest.mark.parametrize(
    "forget",
    [
        "deallocate all",
        "discard all",
        "DEALLOCATE PREPARE ALL",
        "deallocate a",
        'deallocate prepare "a"',
        "/* x */ deallocate a",
    ],
)
def test_forgotten_by_sql_then_name_is_unknown_and_free(same, forget):
    # #991, #1535: the gateway must see DEALLOCATE by either protocol.
    for command in (query(forget), run(forget) + sync()):
        same(
            [
                [parse("select 1", "a"), use("a"), sync()],
                [command],
                [use("a"), sync()],
                [parse("select 2", "a"), use("a"), sync()],
            ],
            **OWN,
        )


def test_deallocate_all_pipelined_with_following_parse_keeps_the_new_name(same):
    # #1535: the new statement was forgotten with the old ones.
    same(
        [
            [parse("select 1", "a"), sync()],
            [run("deallocate all"), parse("select 2", "a"), use("a"), sync()],
            [use("a"), sync()],
        ],
        **OWN,
    )
    same(
        [
            [parse("select 1", "a"), sync()],
            [query("deallocate all"), parse("select 2", "a"), use("a"), sync()],
            [use("a"), sync()],
        ],
        **OWN,
    )


def test_deallocate_unknown_is_26000(same):
    same([[query("deallocate nobody")], [query("select 1")]], **OWN)


def test_deallocate_in_rolled_back_transaction_still_counts(same):
    same(
        [
            [parse("select 1", "a"), sync(), query("begin"), query("deallocate a"), query("rollback")],
            [use("a"), sync()],
        ],
        **OWN,
    )


def test_deallocate_by_one_client_leaves_others_alone(relay):
    with login(relay.port) as one, login(relay.port) as two:
        for client in (one, two):
            client.ask(parse("select 'shared'", "s") + sync())
        for command in ("deallocate s", "deallocate all", "discard all"):
            one.ask(query(command))
            assert types(two.ask(use("s") + sync())) == "2TDCZ", command
            assert error(one.ask(use("s") + sync()))["C"] == "26000", command
            one.ask(parse("select 'shared'", "s") + sync())


def test_sql_prepare_execute_deallocate_answer_as_postgres(same):
    same(
        [
            [query("prepare p as select 1")],
            [query("execute p"), query("prepare p as select 2")],
            [query("deallocate p"), query("execute p")],
        ]
    )
    same([[query("prepare p(int) as select $1")], [use("p", 5), sync()], [query("deallocate p")]])


@session_state
def test_sql_prepare_same_name_on_two_clients_do_not_meet(gateway):
    relay = gateway(default_pool_size=2)
    with login(relay.port) as one, login(relay.port) as two:
        assert types(one.ask(query("prepare p as select 'one'"))) == "CZ"
        assert types(two.ask(query("prepare p as select 'two'"))) == "CZ"
        assert (one.value("execute p"), two.value("execute p")) == ("one", "two")
        for client in (one, two):
            client.ask(query("deallocate p"))


def test_sql_execute_of_protocol_statement(same):
    same([[parse("select 'x'", "a"), sync()], [query("execute a")]])


def test_two_clients_same_name_other_text_each_gets_its_own(relay):
    # Driver counters: every psycopg connection has a _pg3_0, every JDBC one an S_1.
    with login(relay.port) as one, login(relay.port) as two:
        one.ask(parse("select 'one'", "_pg3_0") + sync())
        two.ask(parse("select 'two', 2", "_pg3_0") + sync())
        for _ in range(3):
            assert [row.values for row in one.ask(use("_pg3_0") + sync()) if row.type == "D"] == [[b"one"]]
            assert [row.values for row in two.ask(use("_pg3_0") + sync()) if row.type == "D"] == [[b"two", b"2"]]


def test_unnamed_statement_is_never_another_clients(relay):
    with login(relay.port) as one, login(relay.port) as two:
        one.ask(parse("select 'one'") + sync())
        two.ask(parse("select 'two'") + sync())
        seen = one.ask(use("") + sync())
        assert b"two" not in b"".join(message.body for message in seen)


def test_unnamed_statement_outlives_the_sync_of_its_parse(same):
    same([[parse("select 'kept'"), sync()], [bind(), execute(), sync()], [bind(), execute(), sync()]])
    same([[parse("select 'lost'"), sync()], [query("select 1"), bind(), execute(), sync()]])


def test_parse_without_sync_then_disconnect_does_not_poison_the_text(relay):
    # The second client uses the same SQL: no 26000.
    for _ in range(3):
        with login(relay.port) as one:
            one.write(parse("select 'poison'", "p") + terminate())
            one.flush()
            one.wait_closed()
        with login(relay.port) as two:
            assert types(two.ask(parse("select 'poison'", "q") + use("q") + sync())) == "12TDCZ"


def test_statements_work_on_every_server_of_the_pool(pooler, gateway):
    # A client prepares on one server and executes on another.
    relay = gateway(default_pool_size=3)
    with login(relay.port) as client, login(relay.port) as one, login(relay.port) as two:
        client.ask(parse("select pg_backend_pid()", "a") + sync())
        seen = set()
        for held in ((), (one,), (one, two)):
            for holder in held:
                holder.ask(query("begin"))
            seen |= {row.values[0] for row in client.ask(use("a") + sync()) if row.type == "D"}
            for holder in held:
                holder.ask(query("rollback"))
        assert len(seen) >= 2, "the statement was never run on a second server"


def test_least_recently_used_statements_are_evicted_and_come_back(gateway, postgres, database):
    relay = gateway(max_prepared_statements=5)
    names = [f"s{n}" for n in range(12)]
    script = [[*(parse(f"select {n}", name) for n, name in enumerate(names)), sync()]]
    script += [[*(use(name) for name in order), sync()] for order in (names, names[::-1], names[::2] + names[1::2])]
    player.compare(postgres.port, relay.port, script)


def test_eviction_inside_a_pipeline_with_failures_keeps_order(gateway, postgres):
    # Injected Close and Parse inside groups that fail.
    relay = gateway(max_prepared_statements=2)
    good = [parse(f"select {n}", f"s{n}") for n in range(6)]
    script = [
        [*good, sync()],
        [
            use("s0"),
            parse("nonsense", "x"),
            use("s1"),
            sync(),
            use("s2"),
            use("s3"),
            run("select 1/0"),
            use("s4"),
            sync(),
            use("s5"),
            sync(),
        ],
        [*(part for n in range(6) for part in (use(f"s{n}"), sync()))],
    ]
    player.compare(postgres.port, relay.port, script)


def test_eviction_in_an_aborted_transaction_answers_25p02(gateway, postgres):
    # PostgreSQL refuses the Bind, or the Parse that was put in before it: the same words from another function.
    relay = gateway(max_prepared_statements=2)
    script = [
        [*(parse(f"select {n}", f"s{n}") for n in range(6)), sync()],
        [query("begin"), query("select 1/0")],
        [use("s0"), sync(), use("s3"), sync()],
        [query("rollback")],
        [*(part for n in range(6) for part in (use(f"s{n}"), sync()))],
    ]
    player.compare(postgres.port, relay.port, script, ignore="FLR", reason="it may be Parse that is refused")


def test_prepared_statements_off_passes_them_through(gateway, postgres):
    relay = gateway(max_prepared_statements=0, pool_mode="session")
    player.compare(
        postgres.port,
        relay.port,
        [[parse("select 1", "a"), sync()], [use("a"), sync()], [query("deallocate a"), use("a"), sync()]],
    )


def test_session_mode_named_statements_and_sql_agree(gateway, postgres):
    relay = gateway(pool_mode="session")
    script = [
        [parse("select 1", "a"), sync()],
        [query("execute a"), query("deallocate a"), query("execute a")],
        [query("discard all"), use("a"), sync()],
    ]
    player.compare(postgres.port, relay.port, script, **OWN)


@pytest.mark.parametrize("length", [62, 300, 5000])
def test_long_statement_names_work(same, length):
    # Names longer than a buffer; PostgreSQL looks at the first 63 bytes.
    same(
        [
            [parse("select 1", "n" * length), describe_statement("n" * length), use("n" * length), sync()],
            [use("n" * length), close_statement("n" * length), sync()],
        ],
        ways=["whole", "at random, seed 1"],
    )


def test_statement_name_too_long_to_describe_ends_the_connection(relay):
    # PostgreSQL takes no Describe of more than 10,000 bytes, and closes without a word; the gateway may tell why.
    with login(relay.port) as client:
        client.write(parse("select 1", "n" * 70_000) + describe_statement("n" * 70_000) + sync())
        seen = client.wait_closed()
        assert types(seen) in ("", "E")
        assert not seen or (error(seen)["S"], error(seen)["C"]) == ("FATAL", "08P01")


@pytest.mark.parametrize("megabytes", [1, pytest.param(100, marks=pytest.mark.soak)])
def test_parse_and_bind_of_many_megabytes_pass(same, megabytes):
    text = "x" * (megabytes << 20)
    ways = ["whole", "byte by byte", "at random, seed 1"]
    same(
        [[parse(f"select length('{text}')", "big"), use("big"), sync()], [use("big"), close_statement("big"), sync()]],
        ways=ways,
    )
    same(
        [[parse("select length($1), left($1, 5)", "big", [TEXT]), use("big", text), sync()], [use("big", "s"), sync()]],
        ways=ways,
    )


def test_alter_table_heals_a_shared_plan(relay, database):
    # cached plan must not change result type (0A000) must not stick to the clients that share the statement (#1038).
    database.execute("drop table if exists shape; create table shape (a int); insert into shape values (1)")
    text = parse("select * from shape", "s")
    with login(relay.port) as one, login(relay.port) as two:
        for client in (one, two):
            assert types(client.ask(text + use("s") + sync())) == "12TDCZ"
        database.execute("alter table shape add b int default 2")
        for client in (one, two):
            seen = client.ask(use("s") + sync())
            assert count(seen, "E") == 0 or error(seen)["C"] == "0A000"
        with login(relay.port) as new:
            assert [row.values for row in new.ask(text + use("s") + sync()) if row.type == "D"] == [[b"1", b"2"]]
        for client in (one, two):
            seen = client.ask(close_statement("s") + text + use("s") + sync())
            assert [row.values for row in seen if row.type == "D"] == [[b"1", b"2"]]
    database.execute("drop table shape")


def test_alter_table_in_transaction_answers_0a000_as_postgres(same, database):
    # Inside a transaction nothing can be run again: the error is the client's.
    database.execute("drop table if exists shape; create table shape (a int)")
    same(
        [
            [parse("select * from shape", "s"), use("s"), sync()],
            [query("begin"), query("alter table shape add b int")],
            [use("s"), sync()],
            [query("rollback")],
        ]
    )
    database.execute("drop table shape")


def test_statements_without_end_keep_memory_bounded(gateway):
    # A client that prepares, runs and closes new texts for ever.
    relay = gateway(max_prepared_statements=20)
    with login(relay.port) as client:

        def churn(rounds: range) -> None:
            for number in rounds:
                client.messages.clear()
                client.ask(
                    b"".join(
                        parse(f"select {number * 50 + n}", f"s{n}") + use(f"s{n}") + close_statement(f"s{n}")
                        for n in range(50)
                    )
                    + sync()
                )

        churn(range(40))
        before = relay.memory()
        churn(range(40, 240))
        assert relay.memory() - before < 8 << 20


def test_psycopg_prepares_after_threshold_on_two_connections(relay):
    with relay.connect() as one, relay.connect() as two:
        for connection in (one, two):
            connection.prepare_threshold = 1
        for n in range(10):
            for connection in (one, two):
                assert connection.execute("select %s::int + 1", (n,)).fetchone() == (n + 1,)


def test_psycopg_deallocate_all_reset_then_prepares_again(relay):
    with relay.connect() as connection:
        for command in ("deallocate all", "discard all"):
            for _ in range(8):
                assert connection.execute("select %s::text", ("x",)).fetchone() == ("x",)
            connection.execute(command)


def test_statement_flushed_in_two_steps_then_other_client_prepares_the_same(relay):
    # Parse with Flush on one client, the same text on a second one right after its Sync.
    with login(relay.port) as one, login(relay.port) as two:
        one.write(parse("select 'twin'", "a") + flush())
        one.until(lambda seen: count(seen, "1") == 1)
        one.ask(use("a") + sync())
        for client, name in itertools.product((two, one), "bcd"):
            assert types(client.ask(parse("select 'twin'", name) + use(name) + sync())) == "12TDCZ"


def test_describe_then_nothing_then_execute_after_flush(same):
    # Drivers that describe first and bind later, with a round trip between.
    same(
        [
            [parse("select $1::int", "a"), describe_statement("a"), flush(), until("T")],
            [Quiet(0.05)],
            [use("a", 1), sync()],
        ]
    )


def test_pipeline_psycopg_prepared_twice_in_flight(relay):
    with relay.connect() as connection:
        connection.prepare_threshold = 0
        with connection.pipeline():
            cursors = [connection.execute("select %s::int", (n,)) for n in range(20)]
        assert [cursor.fetchone() for cursor in cursors] == [(n,) for n in range(20)]
        with pytest.raises(psycopg.errors.UndefinedTable):
            connection.execute("select * from nowhere where x = %s", (1,))
        assert connection.execute("select %s::int", (1,)).fetchone() == (1,)
