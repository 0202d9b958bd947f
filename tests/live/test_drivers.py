"""Real drivers and programs through the gateway: psycopg, asyncpg, pgbench, psql, pg_dump.

What they do by habit is the contract that matters most.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable, Coroutine
from decimal import Decimal
from typing import Any

import asyncpg
import psycopg
import pytest

from .endpoints import Endpoint


def program(postgres: Any, name: str, *arguments: object, text: str = "") -> str:
    """Run one of PostgreSQL's programs; what it printed."""
    done = subprocess.run(
        [postgres.bin / name, *map(str, arguments)],
        input=text,
        capture_output=True,
        text=True,
        timeout=12,
        check=False,
        env={**os.environ, "PGPASSWORD": "", "PGCONNECT_TIMEOUT": "10"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def where(relay: Endpoint) -> list[str]:
    return ["-h", "127.0.0.1", "-p", str(relay.port), "-U", "postgres"]


def with_asyncpg(relay: Endpoint, work: Callable[[Any], Coroutine[Any, Any, Any]], **more: Any) -> Any:
    async def run() -> Any:
        connection = await asyncpg.connect(
            host="127.0.0.1", port=relay.port, user="postgres", database="postgres", timeout=10, **more
        )
        try:
            return await work(connection)
        finally:
            await connection.close()

    return asyncio.run(run())


@pytest.mark.both
def test_psycopg_transactions_errors_and_types(relay, item):
    with relay.connect() as connection:
        with connection.transaction():
            connection.execute("insert into item values (%s, %s)", (1, "one"))
            with pytest.raises(psycopg.errors.UniqueViolation), connection.transaction():
                connection.execute("insert into item values (%s, %s)", (1, "again"))
        row = connection.execute(
            "select %s::numeric, %s::text, %s::bytea, null", (Decimal("1.50"), "ü", b"\0Z")
        ).fetchone()
        assert row == (Decimal("1.50"), "ü", b"\0Z", None)
        assert connection.execute("select count(*) from item").fetchone() == (1,)


@pytest.mark.parametrize("threshold", [None, 0, 5])
def test_psycopg_executemany_and_prepare_threshold(relay, item, threshold):
    with relay.connect() as one, relay.connect() as two:
        for start, connection in ((0, one), (100, two)):
            connection.prepare_threshold = threshold
            with connection.cursor() as cursor:
                cursor.executemany("insert into item values (%s, %s)", [(start + n, f"row {n}") for n in range(50)])
        assert one.execute("select count(*) from item").fetchone() == (100,)


def test_psycopg_server_side_cursor_in_transaction(relay):
    with relay.connect() as connection, connection.transaction(), connection.cursor("c") as cursor:
        cursor.execute("select generate_series(1, 1000)")
        assert cursor.fetchmany(10) == [(n,) for n in range(1, 11)]
        assert len(cursor.fetchall()) == 990


def test_psycopg_binary_results_and_stream(relay):
    with relay.connect() as connection:
        cursor = connection.cursor(binary=True)
        assert len(list(cursor.stream("select generate_series(1, 1000)"))) == 1000
        assert connection.execute("select 1").fetchone() == (1,)


def test_psycopg_async_pipeline_many_connections(relay):
    async def one(number: int) -> int:
        async with await psycopg.AsyncConnection.connect(relay.dsn(), autocommit=True) as connection:
            async with connection.pipeline():
                cursors = [await connection.execute("select %s::int", (number + n,)) for n in range(10)]
            rows = [await cursor.fetchone() for cursor in cursors]
            assert rows == [(number + n,) for n in range(10)]
        return number

    async def all_of_them() -> list[int]:
        return await asyncio.gather(*(one(number) for number in range(20)))

    assert asyncio.run(all_of_them()) == list(range(20))


def test_psycopg_pipeline_error_in_the_middle(relay, item):
    with relay.connect() as connection:

        def failing() -> None:
            with connection.pipeline():
                connection.execute("insert into item values (1, 'a')")
                connection.execute("insert into item values (1, 'b')")
                connection.execute("insert into item values (2, 'c')")

        with pytest.raises(psycopg.errors.UniqueViolation):
            failing()
        assert connection.execute("select count(*) from item").fetchone() in ((0,), (1,))


@pytest.mark.both
@pytest.mark.parametrize("cache", [0, 100])
def test_asyncpg_with_and_without_statement_cache(relay, item, cache):
    async def work(connection: Any) -> None:
        for number in range(30):
            assert await connection.fetchval("select $1::int + 1", number) == number + 1
        async with connection.transaction():
            await connection.executemany("insert into item values ($1, $2)", [(n, f"row {n}") for n in range(20)])
        with pytest.raises(asyncpg.UniqueViolationError):
            await connection.execute("insert into item values ($1, $2)", 1, "again")
        async with connection.transaction():
            rows = [row async for row in connection.cursor("select * from item order by id", prefetch=7)]
        assert len(rows) == 20
        await connection.copy_records_to_table("item", records=[(100 + n, "copied") for n in range(10)])
        await connection.reset()
        assert await connection.fetchval("select count(*) from item") == 30

    with_asyncpg(relay, work, statement_cache_size=cache)


def test_asyncpg_pool_of_many_on_one_server(relay):
    async def work() -> None:
        pool = await asyncpg.create_pool(
            host="127.0.0.1", port=relay.port, user="postgres", database="postgres", min_size=10, max_size=10
        )
        async with pool:
            answers = await asyncio.gather(*(pool.fetchval("select $1::int * 2", n) for n in range(200)))
            assert answers == [n * 2 for n in range(200)]

    asyncio.run(work())


def test_asyncpg_introspection_of_types_and_prepared_statement(relay):
    async def work(connection: Any) -> None:
        statement = await connection.prepare("select $1::int[], $2::jsonb, $3::timestamptz")
        assert len(statement.get_parameters()) == 3
        assert (await statement.fetchrow([1, 2], '{"a": 1}', None))[0] == [1, 2]
        assert await connection.fetchval("select array_agg(x) from unnest($1::text[]) x", ["a", "b"]) == ["a", "b"]

    with_asyncpg(relay, work)


@pytest.mark.both
@pytest.mark.parametrize("mode", ["simple", "extended", "prepared"])
def test_pgbench_in_every_protocol(gateway, postgres, mode):
    # A server for each client: pgbench prepares in the middle of a transaction, and its thread waits for the answer, so
    # that a client waiting for a server stops those that have one.
    relay = gateway(default_pool_size=8)
    program(postgres, "pgbench", *where(relay), "-i", "-q", "-s", "1", "shop")
    report = program(postgres, "pgbench", *where(relay), "-n", "-M", mode, "-c", "8", "-j", "2", "-t", "50", "shop")
    assert "number of transactions actually processed: 400/400" in report
    assert "number of failed transactions: 0" in report


def test_pgbench_with_a_connection_for_each_transaction(gateway, postgres):
    relay = gateway(default_pool_size=4, database={"shop": {}})
    program(postgres, "pgbench", *where(relay), "-i", "-q", "-s", "1", "shop")
    report = program(postgres, "pgbench", *where(relay), "-n", "-C", "-S", "-c", "8", "-t", "20", "shop")
    assert "160/160" in report


def test_pgbench_pipelines(gateway, postgres, tmp_path):
    relay = gateway(default_pool_size=6)  # as many as clients, see above
    script = tmp_path / "pipeline.sql"
    script.write_text("\\startpipeline\n" + "select 1;\n" * 10 + "\\endpipeline\n")
    report = program(
        postgres, "pgbench", *where(relay), "-n", "-M", "prepared", "-f", script, "-c", "6", "-t", "50", "postgres"
    )
    assert "300/300" in report


def test_psql_copy_both_ways_and_describe(relay, postgres, item):
    text = "\\copy item from stdin\n1\tone\n2\ttwo\n\\.\n\\copy item to stdout\n\\d item\n\\l\n"
    printed = program(postgres, "psql", *where(relay), "-X", "-v", "ON_ERROR_STOP=1", "-d", "postgres", text=text)
    assert "COPY 2" in printed
    assert "1\tone\n2\ttwo\n" in printed
    assert "item_pkey" in printed


def test_psql_single_transaction_and_gexec(relay, postgres, item):
    psql = [*where(relay), "-XAt", "-v", "ON_ERROR_STOP=1", "-d", "postgres"]
    text = "insert into item values (1, 'a');\nselect 'insert into item values (2, ''b'')' \\gexec\n"
    program(postgres, "psql", *psql, "-1", text=text)
    assert program(postgres, "psql", *psql, "-c", "select count(*) from item") == "2\n"


@pytest.mark.both
def test_pg_dump_in_session_mode_equals_a_direct_one(gateway, postgres, item):
    postgres.psql("insert into item select n, 'row ' || n from generate_series(1, 100) n")
    relay = gateway(pool_mode="session")

    def dump(port: int) -> list[str]:
        text = program(postgres, "pg_dump", "-h", "127.0.0.1", "-p", port, "-U", "postgres", "-d", "postgres")
        return [line for line in text.splitlines() if not line.startswith(("\\restrict", "\\unrestrict"))]

    assert dump(relay.port) == dump(postgres.port)


def test_pg_dump_in_transaction_mode_works(gateway, postgres, item):
    # It sets what it needs at the session's start; that binds it to a server.
    relay = gateway(default_pool_size=2)
    assert "CREATE TABLE public.item" in program(postgres, "pg_dump", *where(relay), "-d", "postgres")


def test_pg_isready_and_large_objects(relay, postgres, tmp_path):
    assert "accepting connections" in program(postgres, "pg_isready", *where(relay))
    file = tmp_path / "object"
    file.write_bytes(b"large" * 100_000)
    text = f"begin;\n\\lo_import {file}\nselect length(lo_get(:LASTOID));\n\\lo_unlink :LASTOID\ncommit;\n"
    assert "500000" in program(
        postgres, "psql", *where(relay), "-XAt", "-v", "ON_ERROR_STOP=1", "-d", "postgres", text=text
    )
