"""Fixtures of the live tests: a PostgreSQL for each xdist worker, gateways in front of it, and a player between them.

`relay` is one gateway shared by the tests of an xdist worker, transaction mode, one server per pool, so that a server
kept too long stops the next test. `gateway` makes one with settings of its own. Both must be at rest after each test.
"""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

from gateway.embedded import Cluster, PostgresNode, free_ports

from . import player
from .client import Client
from .endpoints import ADMIN_PASSWORD, Direct, Endpoint, Gateway, PgBouncer, Pooler
from .hostile import PASSWORD, PROBES, SETTINGS, USER, Bench
from .servers import Impostor

Sql = psycopg.Connection[Any]
LIMITS = {"call": 13.0, "teardown": 7.0}  # seconds for a test and for what follows it, whatever they wait for
PATIENT = 90.0  # the same for a test marked patient
SOAK = 3600.0  # the same for a test marked soak
USERS = {"alice": "wonderland", "bob": "builder"}

SCHEMA = """
create role alice login superuser password 'wonderland';
create role bob login password 'builder';
create role carol login;
create role dave login;
create role erin login;
create role frank login;
create table item (id int primary key, name text not null check (name <> 'wrong'));
grant all on item to bob;
create database shop;
create function shout(text) returns text language sql immutable as $$ select upper($1) $$;
create function noisy() returns int language plpgsql as $$ begin raise notice 'heard'; return 1; end $$;
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("live")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    with _limited(item, "call"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    with _limited(item, "teardown"):
        return (yield)


@contextmanager
def _limited(item: pytest.Item, phase: str) -> Iterator[None]:
    limit = SOAK if item.get_closest_marker("soak") else LIMITS[phase]
    if item.get_closest_marker("patient"):
        limit = max(limit, PATIENT)

    def too_long(*_: object) -> None:
        pytest.fail(f"{phase} not done within {limit} s")

    signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.fixture(scope="session")
def postgres(request: pytest.FixtureRequest) -> Iterator[PostgresNode]:
    """A primary; its version from --postgres, or by `parametrize(..., indirect=True)`."""
    version = getattr(request, "param", request.config.getoption("--postgres"))
    with Cluster(version=version, standbys=0) as cluster:
        cluster.primary.psql(SCHEMA)
        yield cluster.primary


@pytest.fixture
def database(postgres: PostgresNode) -> Iterator[Sql]:
    """A connection past the gateway, in autocommit: prepares tables and looks at the truth.

    Each test has its own, as some of them end PostgreSQL or all its connections.
    """
    with psycopg.connect(Direct(postgres).dsn(application_name="bench"), autocommit=True) as connection:
        yield connection


@pytest.fixture
def gateway(
    postgres: PostgresNode, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Any]]:
    """Make an endpoint with settings of its own; it must be at rest and end well after the test."""
    make_endpoint = _maker(postgres, request.config.getoption("--endpoint"), tmp_path_factory)
    with ExitStack() as made:  # the last first, as one may stand before another

        def make(**settings: Any) -> Endpoint:
            endpoint = make_endpoint(**settings)
            made.callback(_finish, endpoint)
            return endpoint

        yield make
        Client.close_all()


@pytest.fixture(scope="session")
def _shared(
    postgres: PostgresNode, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Any]]:
    """The maker of the shared endpoint and, behind it, the one that runs; a broken one is replaced."""
    slot: list[Any] = [_maker(postgres, request.config.getoption("--endpoint"), tmp_path_factory)]
    yield slot
    for endpoint in slot[1:]:
        _finish(endpoint)


@pytest.fixture
def relay(_shared: list[Any], request: pytest.FixtureRequest) -> Iterator[Any]:
    """The shared gateway: trust, transaction mode, one worker, one server per pool."""
    if len(_shared) == 1:
        _shared.append(_shared[0]())
    endpoint = _shared[1]
    yield endpoint
    Client.close_all()
    try:
        endpoint.assert_no_leak()
    except BaseException:
        _shared.remove(endpoint)
        endpoint.kill()
        raise


@pytest.fixture
def pooler(request: pytest.FixtureRequest) -> None:
    """For tests of what PostgreSQL alone does not do: they are skipped when it stands in the gateway's place."""
    if request.config.getoption("--endpoint") == "postgres":
        pytest.skip("PostgreSQL does not pool")


@pytest.fixture
def pool_of_one(pooler: None, relay: Endpoint) -> Endpoint:
    """The shared gateway, for tests in which clients must wait for its one server."""
    return relay


@pytest.fixture
def same(postgres: PostgresNode, relay: Endpoint) -> Callable[..., None]:
    """`player.compare` between PostgreSQL and the shared gateway: `same([[query("select 1")]])`."""
    return partial(player.compare, postgres.port, relay.port)


@pytest.fixture
def same_opening(postgres: PostgresNode, relay: Endpoint) -> Callable[..., None]:
    """`player.compare_opening` between PostgreSQL and the shared gateway: `same_opening(ssl_request() + ...)`."""
    return partial(player.compare_opening, postgres.port, relay.port)


@pytest.fixture
def item(database: Sql) -> Callable[[], None]:
    """Empty the table item (id int primary key, name text, not 'wrong'); use as `before` of a comparison."""

    def empty() -> None:
        database.execute("truncate item")

    empty()
    return empty


@pytest.fixture
def items(database: Sql) -> Callable[[], list[tuple[Any, ...]]]:
    """Read the table item; use as `after` of a comparison."""
    return lambda: database.execute("select id, left(name, 20), length(name) from item order by id").fetchall()


@pytest.fixture(scope="module")
def _benches(postgres) -> Iterator[dict[str, tuple[ExitStack, Bench]]]:
    """Those that run, by their settings: a start takes longer than most cases."""
    made: dict[str, tuple[ExitStack, Bench]] = {}
    yield made
    with ThreadPoolExecutor() as executor:
        stopped = [executor.submit(bench.gateway.stop) for _, bench in made.values()]
    for stack, _ in made.values():
        stack.close()
    for one in stopped:
        one.result()


@pytest.fixture
def bench_with(
    _benches, postgres, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Bench]]:
    """Make a bench with settings of its own, or find it; one that a case has failed on goes with its test."""
    kind = request.config.getoption("--endpoint")
    if kind == "postgres":
        pytest.skip("PostgreSQL has no servers behind it")
    build = Gateway if kind == "gateway" else PgBouncer
    secrets = {"postgres": ADMIN_PASSWORD, USER: PASSWORD}

    def make(**settings: Any) -> Bench:
        if repr(settings) not in _benches:
            with ExitStack() as stack:
                impostor = stack.enter_context(Impostor(postgres.port, PROBES))
                directory, (port,) = tmp_path_factory.mktemp("hostile"), free_ports(1)
                gateway = build(impostor, port, directory, secrets, **{**SETTINGS, **settings})
                stack.callback(gateway.kill)
                _benches[repr(settings)] = stack.pop_all(), Bench(gateway, impostor)
        bench: Bench = _benches[repr(settings)][1]
        return bench

    yield make
    Client.close_all()
    for settings, (stack, bench) in list(_benches.items()):
        if not bench.is_sound:
            print(bench.gateway.log[-4000:])
            del _benches[settings]
            stack.close()


@pytest.fixture
def bench(bench_with) -> Bench:
    """The gateway that most tests of hostile servers share."""
    shared: Bench = bench_with()
    return shared


def _maker(postgres: PostgresNode, kind: str, paths: pytest.TempPathFactory) -> Callable[..., Endpoint]:
    def make(userlist: dict[str, str] | None = None, **settings: Any) -> Endpoint:
        if kind == "postgres":
            if settings.keys() - {"default_pool_size", "max_prepared_statements", "max_client_conn", "workers"}:
                pytest.skip("PostgreSQL has no such settings")
            return Direct(postgres)
        build = Gateway if kind == "gateway" else PgBouncer
        directory = Path(tempfile.mkdtemp(prefix="gateway-live-")) if kind == "pgbouncer" else paths.mktemp("gateway")
        secrets = {"postgres": ADMIN_PASSWORD, **(USERS if userlist is None else userlist)}
        try:
            return build(postgres, free_ports(1)[0], directory, secrets, **settings)
        except AssertionError as error:
            if "in use" not in str(error):
                raise
            # Another run of the tests took the port since it was free.
            return build(postgres, free_ports(1)[0], directory, secrets, **settings)

    return make


def _finish(endpoint: Any) -> None:
    if not isinstance(endpoint, Pooler):
        return
    try:
        if endpoint.is_running:
            endpoint.assert_no_leak()
        endpoint.stop()
    finally:
        print(endpoint.log[-4000:])
        endpoint.kill()
