"""The pool: who gets a server and who waits, what a limit allows, and what time makes due, to the microsecond."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.settings import PoolMode
from gateway.wire import messages
from gateway.worker.endpoint import (
    SERVER_ACTIVE,
    SERVER_CANCELED,
    SERVER_CLOSING,
    SERVER_GONE,
    SERVER_IDLE,
    SERVER_LOGIN,
    SERVER_TESTED,
    Client,
    Server,
)
from gateway.worker.pool import POOL_SESSION, POOL_TRANSACTION, SECOND, Action, Pool, Share, Verb
from tests.worker.worlds import ADDRESS, idle_server, launch, linked, make_pool, seconds, settings_of


def waiting(pool: Pool, now: int = 0) -> Client:
    client = Client(-1, 1, now)
    pool.enqueue(client, now)
    return client


def acquired(pool: Pool, now: int = 0) -> Server:
    server = pool.acquire(now)
    assert server is not None
    return server


def test_acquire_takes_the_server_used_last():
    pool = make_pool()
    first, second = idle_server(pool, 1), idle_server(pool, 2)
    assert pool.idle() == [first, second]
    assert pool.acquire(3) is second
    assert (second.state, second.state_since) == (SERVER_ACTIVE, 3)
    assert pool.acquire(3) is first
    assert pool.acquire(3) is None


def test_acquire_with_round_robin_takes_the_server_idle_longest():
    pool = make_pool(server_round_robin=True)
    first, second, third = (idle_server(pool, now) for now in (1, 2, 3))
    assert pool.acquire(4) is first
    pool.move(first, SERVER_IDLE, 5)
    assert [pool.acquire(6) for _ in range(4)] == [second, third, first, None]


def test_acquire_of_a_server_idle_for_long_leaves_it_to_be_tested():
    pool = make_pool(server_check_query="select 1", server_check_delay=30.0)
    server = idle_server(pool, 5)
    assert acquired(pool, seconds(30) + 4).state == SERVER_ACTIVE
    pool.move(server, SERVER_IDLE, 5)
    assert acquired(pool, seconds(30) + 5).state == SERVER_IDLE
    assert pool.top is None


def test_acquire_without_check_query_or_delay_tests_nothing():
    for changes in ({"server_check_query": ""}, {"server_check_query": "select 1", "server_check_delay": 0.0}):
        pool = make_pool(**changes)
        idle_server(pool)
        assert acquired(pool, seconds(10_000)).state == SERVER_ACTIVE


def test_pool_that_is_paused_hands_out_nothing_and_launches_nothing():
    pool = make_pool()
    idle_server(pool)
    client = waiting(pool)
    pool.paused = True
    assert pool.acquire(0) is None
    assert pool.next_waiting(0) is None
    assert not pool.wants_server(0)
    assert pool.sweep(0) == []
    pool.paused = False
    assert pool.next_waiting(0) is client
    assert pool.acquire(0) is not None


def test_move_from_the_middle_of_the_idle_ones_leaves_the_others():
    pool = make_pool()
    first, second, third = (idle_server(pool, now) for now in (1, 2, 3))
    pool.move(second, SERVER_TESTED, 4)
    assert pool.idle() == [first, third]
    pool.move(second, SERVER_IDLE, 5)
    assert pool.idle() == [first, third, second]


def test_move_to_idle_while_a_cancel_request_is_under_way_keeps_it_aside():
    pool = make_pool()
    server = launch(pool)
    server.cancels = 1
    pool.move(server, SERVER_IDLE, 1)
    assert server.state == SERVER_CANCELED
    assert pool.idle() == []


def test_waiting_clients_are_served_in_their_order_and_their_wait_is_counted():
    pool = make_pool()
    clients = [waiting(pool, now) for now in (10, 20, 30)]
    clients[0].notified = True
    pool.leave(clients[1])
    assert [pool.next_waiting(100) for _ in range(3)] == [clients[0], clients[2], None]
    assert pool.wait_time == 90 + 70
    assert all(client.waiting_since == 0 and not client.notified for client in clients)


def test_server_counts_against_all_shares_until_it_is_removed():
    database, user = Share(9), Share(9)
    pool = make_pool(1, 5, (database, user))
    servers = [launch(pool) for _ in range(3)]
    assert (pool.share.used, pool.reserve.used, database.used, user.used, pool.connecting) == (1, 2, 3, 3, 3)
    assert [server.reserve for server in servers] == [False, True, True]
    pool.move(servers[0], SERVER_CLOSING, 1)
    assert (pool.share.used, pool.connecting) == (1, 2)
    for server in servers:
        pool.remove(server, SERVER_GONE, 2)
    assert (pool.share.used, pool.reserve.used, database.used, user.used, pool.connecting) == (0, 0, 0, 0, 0)
    assert pool.servers == []


def test_server_is_wanted_for_each_that_waits_up_to_the_connects_at_once():
    pool = make_pool()
    assert not pool.wants_server(0)
    for number in range(5):
        waiting(pool)
        assert pool.wants_server(0) == (number < 2)
        if pool.wants_server(0):
            launch(pool)
    pool.move(pool.servers[0], SERVER_ACTIVE, 0)
    assert pool.wants_server(0)


def test_server_is_wanted_for_any_number_of_newcomers_once():
    pool = make_pool()
    pool.newcomers = {Client(-1, number, 0): None for number in range(3)}
    assert pool.wants_server(0)
    launch(pool)
    assert not pool.wants_server(0)


def test_server_is_not_wanted_while_the_node_is_unknown_or_a_retry_is_due_later():
    pool = make_pool()
    waiting(pool)
    pool.retry_at = 7
    assert not pool.wants_server(6)
    assert pool.wants_server(7)
    pool.address = None
    assert not pool.wants_server(7)


@pytest.mark.parametrize("which", ["share", "database", "user"])
def test_server_is_not_wanted_at_any_limit(which):
    limits = {name: Share(1 if name == which else 2) for name in ("share", "database", "user")}
    pool = make_pool(limits["share"].limit, shares=(limits["database"], limits["user"]))
    launch(pool)
    waiting(pool)
    waiting(pool)
    assert not pool.wants_server(0)
    (pool.share if which == "share" else limits[which]).limit = 2
    assert pool.wants_server(0)


def test_reserve_is_for_those_who_have_waited_long_enough():
    pool = make_pool(1, 1, reserve_pool_timeout=5.0)
    pool.move(launch(pool), SERVER_ACTIVE, 0)
    waiting(pool, 3)
    waiting(pool, 4)
    assert not pool.wants_server(seconds(5) + 2)
    assert pool.wants_server(seconds(5) + 3)
    launch(pool)
    assert not pool.wants_server(seconds(60)), "the reserve is used up too"


def test_reserve_does_not_reach_past_the_limit_of_a_database():
    pool = make_pool(1, 1, (Share(1),))
    launch(pool)
    waiting(pool)
    waiting(pool)
    assert not pool.wants_server(seconds(60))


def test_configure_takes_mode_and_delays():
    pool = make_pool()
    assert (pool.mode, pool.rewrites) == (POOL_TRANSACTION, True)
    pool.configure(settings_of(pool_mode=PoolMode.SESSION, server_check_query="x", server_check_delay=0.5))
    assert (pool.mode, pool.rewrites, pool.check_delay) == (POOL_SESSION, False, 500_000)
    pool.configure(settings_of(max_prepared_statements=0))
    assert (pool.rewrites, pool.check_delay) == (False, 0)


# What time makes due: at the moment itself, not a microsecond before, and nothing while the limit is 0.

Setup = Callable[[Pool, int], Client | Server]


def in_a_query(pool: Pool, now: int) -> Client:
    client = linked(acquired(pool, now), now)
    client.query_since = client.transaction_since = now
    client.idle_since = 0
    return client


def in_a_transaction(pool: Pool, now: int) -> Client:
    client = linked(acquired(pool, now), now)
    client.transaction_since = client.idle_since = now
    assert client.server is not None
    client.server.cycle.status = messages.IN_TRANSACTION
    return client


@pytest.mark.parametrize(
    ("limit", "begin", "due"),
    [
        ("server_idle_timeout", lambda pool, now: pool.servers[0], (Verb.RETIRE, "server idle timeout")),
        ("server_lifetime", lambda pool, now: pool.servers[0], (Verb.RETIRE, "server lifetime over")),
        ("query_timeout", in_a_query, (Verb.FAIL, "query_timeout")),
        ("transaction_timeout", in_a_transaction, (Verb.FAIL, "transaction_timeout")),
        ("transaction_timeout", in_a_query, (Verb.FAIL, "transaction_timeout")),
        ("idle_transaction_timeout", in_a_transaction, (Verb.FAIL, "idle_transaction_timeout")),
        ("query_wait_timeout", waiting, (Verb.FAIL, "query_wait_timeout")),
        ("query_wait_notify", waiting, (Verb.NOTIFY, "query_wait_notify")),
    ],
)
@pytest.mark.parametrize("length", [0.5, 30.0])
def test_sweep_at_the_end_of_a_time_limit_tells_it(limit, begin, due, length):
    def sweep_at(length: float, after: int) -> tuple[list[Action], Client | Server]:
        pool = make_pool(1, **({"query_wait_timeout": 0.0} | {limit: length}))
        idle_server(pool, 7)
        who = begin(pool, 7)
        return pool.sweep(7 + after), who

    actions, who = sweep_at(length, seconds(length))
    assert actions == [Action(due[0], who, due[1])]
    assert sweep_at(length, seconds(length) - 1)[0] == []
    assert sweep_at(0.0, seconds(10**6))[0] == []


@pytest.mark.parametrize("state", [SERVER_LOGIN, SERVER_TESTED, SERVER_CLOSING])
def test_sweep_at_a_server_s_deadline_gives_it_up(state):
    pool = make_pool()
    server = launch(pool)
    pool.move(server, state, 0)
    assert pool.sweep(seconds(10**6)) == []
    server.deadline = 100
    assert pool.sweep(99) == []
    assert pool.sweep(100) == [Action(Verb.GIVE_UP, server, "timeout")]


def test_sweep_of_an_active_server_past_its_lifetime_retires_it_when_it_is_free():
    pool = make_pool(server_lifetime=60.0)
    server = idle_server(pool)
    linked(acquired(pool))
    assert pool.sweep(seconds(60) - 1) == []
    assert not server.retiring
    assert pool.sweep(seconds(60)) == []
    assert server.retiring


def test_sweep_of_idle_servers_keeps_the_smallest_size_and_those_used_last():
    pool = make_pool(min_pool_size=2, server_idle_timeout=10.0)
    first, second, third, fourth = (idle_server(pool, now) for now in (1, 2, 3, 4))
    assert [action.who for action in pool.sweep(seconds(10) + 1)] == [first]
    assert [action.who for action in pool.sweep(seconds(60))] == [first, second]
    assert pool.idle() == [first, second, third, fourth], "it only tells"


def test_sweep_of_an_idle_client_outside_a_transaction_ends_nothing():
    pool = make_pool(idle_transaction_timeout=1.0, pool_mode=PoolMode.SESSION)
    idle_server(pool)
    client = in_a_transaction(pool, 0)
    assert client.server is not None
    client.server.cycle.status = messages.IDLE
    assert pool.sweep(seconds(60)) == []


def test_sweep_notifies_each_that_waits_once():
    pool = make_pool(query_wait_notify=5.0, query_wait_timeout=9.0)
    pool.address = None
    first, second = waiting(pool, 0), waiting(pool, seconds(1))
    (action,) = pool.sweep(seconds(5))
    assert action == Action(Verb.NOTIFY, first, "query_wait_notify")
    first.notified = True
    assert [action.who for action in pool.sweep(seconds(6))] == [second]
    second.notified = True
    assert pool.sweep(seconds(9) - 1) == []
    assert [(action.verb, action.who) for action in pool.sweep(seconds(10))] == [
        (Verb.FAIL, first),
        (Verb.FAIL, second),
    ]


def test_sweep_ends_the_wait_of_newcomers_too():
    pool = make_pool(query_wait_timeout=9.0)
    pool.address = None
    client = Client(-1, 1, 0)
    pool.newcomers[client] = None
    assert pool.sweep(seconds(9) - 1) == []
    assert pool.sweep(seconds(9)) == [Action(Verb.FAIL, client, "query_wait_timeout")]


LAUNCH = [Action(Verb.LAUNCH, None, "needed")]


def test_sweep_launches_for_those_who_wait():
    pool = make_pool()
    waiting(pool)
    assert pool.sweep(0) == LAUNCH
    launch(pool)
    assert pool.sweep(0) == []


def test_sweep_fills_a_pool_in_use_up_to_its_smallest_size_one_by_one():
    pool = make_pool(min_pool_size=2)
    assert pool.sweep(0) == [], "nobody uses it"
    pool.clients = 1
    for _ in range(2):
        assert pool.sweep(0) == LAUNCH
        server = launch(pool)
        assert pool.sweep(0) == []
        pool.move(server, SERVER_IDLE, 0)
    assert pool.sweep(0) == []


def test_sweep_fills_a_pool_whose_user_is_set_before_anybody_comes():
    pool = make_pool(min_pool_size=1, forced_user=True)
    assert pool.sweep(0) == LAUNCH
    pool.retry_at = 1
    assert pool.sweep(0) == []
    pool.retry_at, pool.address = 0, None
    assert pool.sweep(0) == []


class Pools(RuleBasedStateMachine):
    """Two pools of one database under load, with a clock, an operator and servers that come and go."""

    @initialize(sizes=st.tuples(*[st.integers(0, 3)] * 4), limit=st.integers(1, 5), lifo=st.booleans())
    def begin(self, sizes, limit, lifo):
        self.now = 1
        self.count = 0
        self.database = Share(limit)
        changes: dict[str, Any] = {
            "server_check_query": "select 1",
            "server_check_delay": 5.0,
            "server_lifetime": 30.0,
            "server_idle_timeout": 10.0,
            "query_wait_timeout": 20.0,
            "reserve_pool_timeout": 2.0,
            "server_round_robin": not lifo,
        }
        self.pools = [
            make_pool(sizes[0], sizes[1], (self.database,), **changes),
            make_pool(sizes[2], sizes[3], (self.database,), user="eve", **changes),
        ]
        self.queues: list[list[Client]] = [[], []]  # what each pool's queue is to hold
        self.holder: dict[Server, Client] = {}
        self.used: dict[Share, int] = {}  # before this step

    def draw_server(self, data: st.DataObject, *states: int) -> Server | None:
        servers = [server for pool in self.pools for server in pool.servers if server.state in states]
        return data.draw(st.sampled_from(servers)) if servers else None

    def link(self, server: Server, client: Client) -> None:
        assert server.state == SERVER_ACTIVE
        assert server not in self.holder, "a server is linked twice"
        assert not server.retiring
        assert server.cancels == 0
        self.holder[server] = client
        server.client, client.server = client, server

    def grow(self, pool: Pool) -> None:
        if pool.wants_server(self.now):
            self.launch(pool)

    def launch(self, pool: Pool) -> None:
        assert pool.address is not None
        assert not pool.paused
        self.count += 1
        launch(pool, self.now, self.count)

    def hand_on(self, server: Server) -> None:
        pool = server.pool
        if server.retiring:
            pool.move(server, SERVER_CLOSING, self.now)
        elif server.cancels:
            pool.move(server, SERVER_CANCELED, self.now)
        elif (client := pool.next_waiting(self.now)) is None:
            pool.move(server, SERVER_IDLE, self.now)
        else:
            assert not pool.paused
            assert client is self.queues[self.pools.index(pool)].pop(0), "not first in, first out"
            if server.state != SERVER_ACTIVE:
                pool.move(server, SERVER_ACTIVE, self.now)
            self.link(server, client)

    @rule(which=st.integers(0, 1))
    def ask(self, which):
        pool = self.pools[which]
        client = Client(-1, 1, self.now)
        while pool.top is not None:
            server = pool.acquire(self.now)
            if server is None:
                assert pool.paused
                break
            if server.state == SERVER_IDLE:
                assert self.now - server.state_since >= seconds(5)
                pool.move(server, SERVER_TESTED, self.now)
                continue
            assert self.now - server.state_since < seconds(5)
            self.link(server, client)
            return
        pool.enqueue(client, self.now)
        self.queues[which].append(client)
        self.grow(pool)

    @rule(data=st.data())
    def finish(self, data):
        server = self.draw_server(data, SERVER_ACTIVE)
        if server is not None:
            self.holder.pop(server).server = None
            server.client = None
            self.hand_on(server)

    @rule(data=st.data())
    def log_in(self, data):
        server = self.draw_server(data, SERVER_LOGIN, SERVER_TESTED)
        if server is not None:
            self.hand_on(server)
            self.grow(server.pool)

    @rule(data=st.data())
    def lose(self, data):
        server = self.draw_server(data, SERVER_LOGIN, SERVER_IDLE, SERVER_ACTIVE, SERVER_TESTED, SERVER_CLOSING)
        if server is not None:
            self.holder.pop(server, None)
            server.pool.remove(server, SERVER_GONE, self.now)

    @rule(data=st.data())
    def leave(self, data):
        which = data.draw(st.integers(0, 1))
        if self.queues[which]:
            client = data.draw(st.sampled_from(self.queues[which]))
            self.queues[which].remove(client)
            self.pools[which].leave(client)

    @rule(data=st.data())
    def cancel(self, data):
        server = self.draw_server(data, SERVER_ACTIVE)
        if server is not None:
            server.cancels += 1

    @rule(data=st.data())
    def cancel_arrives(self, data):
        server = self.draw_server(data, SERVER_ACTIVE, SERVER_CANCELED)
        if server is not None and server.cancels:
            server.cancels -= 1
            if server.state == SERVER_CANCELED and not server.cancels:
                self.hand_on(server)

    @rule(which=st.integers(0, 1), paused=st.booleans())
    def pause(self, which, paused):
        pool = self.pools[which]
        pool.paused = paused
        for server in pool.idle():
            if pool.waiting and not paused:
                self.hand_on(server)

    @rule(which=st.integers(0, 1))
    def move_node(self, which):
        pool = self.pools[which]
        pool.address = None if pool.address else ADDRESS
        for server in pool.servers:
            server.retiring = True
        for server in pool.idle():
            pool.move(server, SERVER_CLOSING, self.now)

    @rule(which=st.integers(0, 2), limit=st.integers(0, 5))
    def grant(self, which, limit):
        share = self.database if which == 2 else self.pools[which].share
        share.limit = limit

    @rule(wait=st.sampled_from([1, SECOND, 5 * SECOND, 10 * SECOND, 20 * SECOND]))
    def sweep(self, wait):
        self.now += wait
        for which, pool in enumerate(self.pools):
            for verb, who, why in pool.sweep(self.now):
                if verb is Verb.LAUNCH:
                    self.launch(pool)
                elif isinstance(who, Server):
                    assert verb is Verb.RETIRE
                    assert who.state in (SERVER_IDLE, SERVER_CLOSING)  # closed by an action before
                    if who.state == SERVER_IDLE:
                        pool.move(who, SERVER_CLOSING, self.now)
                elif who is not None:
                    assert (verb, why) == (Verb.FAIL, "query_wait_timeout")
                    assert self.now - who.waiting_since >= seconds(20)
                    self.queues[which].remove(who)
                    pool.leave(who)
            assert not [client for client in pool.waiting if self.now - client.waiting_since >= seconds(20)]

    @precondition(lambda self: hasattr(self, "pools"))
    @invariant()
    def counts_add_up(self):
        for pool, queue in zip(self.pools, self.queues, strict=True):
            assert list(pool.waiting) == queue
            assert pool.connecting == len([server for server in pool.servers if server.state == SERVER_LOGIN])
            assert set(pool.idle()) == {server for server in pool.servers if server.state == SERVER_IDLE}
            assert len(pool.idle()) == len(set(pool.idle()))
            since = [server.state_since for server in pool.idle()]
            assert since == sorted(since)
            assert pool.reserve.used == len([server for server in pool.servers if server.reserve])
            assert pool.share.used + pool.reserve.used == len(pool.servers)
        assert self.database.used == sum(len(pool.servers) for pool in self.pools)
        active = {server for pool in self.pools for server in pool.servers if server.state == SERVER_ACTIVE}
        assert active == set(self.holder)
        assert len(set(map(id, self.holder.values()))) == len(self.holder), "a client has two servers"

    @precondition(lambda self: hasattr(self, "pools"))
    @invariant()
    def limits_hold(self):
        for share in (self.database, *[share for pool in self.pools for share in (pool.share, pool.reserve)]):
            # Above a limit that was lowered it only falls.
            assert 0 <= share.used <= max(share.limit, self.used.get(share, 0))
            self.used[share] = share.used

    @precondition(lambda self: hasattr(self, "pools"))
    @invariant()
    def nobody_waits_beside_an_idle_server(self):
        for pool in self.pools:
            assert pool.paused or not pool.waiting or not pool.idle()


TestPools = Pools.TestCase
TestPools.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
