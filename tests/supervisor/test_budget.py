"""Budgets: a fair split, and a ledger that never promises more than there is, whatever is late, lost or dead."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.control import first_share
from gateway.supervisor.budget import Ledger, allocate

WANTED = st.lists(st.integers(0, 40), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("budget", "wanted", "shares"),
    [
        (20, [], []),
        (20, [7], [20]),
        (20, [0, 0], [10, 10]),
        (21, [0, 0], [11, 10]),
        (20, [20, 0], [20, 0]),
        (20, [15, 2], [17, 3]),
        (20, [30, 30], [10, 10]),
        (20, [30, 5, 30], [8, 5, 7]),
        (5, [9, 9, 9], [2, 2, 1]),
        (2, [1, 1, 1], [1, 1, 0]),
        (0, [3, 0], [0, 0]),
    ],
)
def test_allocate_known_wishes_gives_known_shares(budget, wanted, shares):
    assert allocate(budget, wanted) == shares


@given(budget=st.integers(0, 200), wanted=WANTED)
def test_allocate_any_wishes_spends_the_budget_fairly(budget, wanted):
    shares = allocate(budget, wanted)
    assert sum(shares) == budget
    assert min(shares) >= 0
    poor = [index for index, share in enumerate(shares) if share < wanted[index]]
    for index in poor:
        # Nobody has more than it wants, nor two more than one who wants more.
        assert all(share <= min(wanted[other], shares[index] + 1) for other, share in enumerate(shares))
    if not poor:
        spare = [share - want for share, want in zip(shares, wanted, strict=True)]
        assert max(spare) - min(spare) <= 1


def test_allocate_more_budget_takes_from_nobody():
    tables = [allocate(budget, [3, 17, 0, 8]) for budget in range(60)]
    for less, more in pairwise(tables):
        assert all(a <= b for a, b in zip(less, more, strict=True))


def test_ledger_share_that_another_has_is_taken_back_before_it_is_given():
    ledger = Ledger(20, 2)
    assert ledger.report(0, 10, 10, 20) == [(1, 0)]
    assert ledger.report(1, 0, 4, 4) == [(0, 16), (1, 4)]  # it still uses four, and wants them
    assert ledger.report(0, 16, 16, 20) == []


def test_ledger_share_in_use_by_another_is_given_as_it_becomes_free():
    ledger = Ledger(20, 2)
    ledger.report(0, 10, 10, 20)
    assert ledger.report(1, 0, 4, 0) == [(0, 16)]
    assert ledger.report(0, 16, 16, 20) == []
    assert ledger.report(1, 0, 1, 0) == [(0, 19)]
    assert ledger.report(1, 0, 0, 0) == []  # its grant is not acknowledged yet
    assert ledger.report(0, 19, 19, 20) == [(0, 20)]


def test_ledger_grant_that_was_not_heard_is_sent_again():
    ledger = Ledger(20, 2)
    assert ledger.report(0, 10, 10, 20) == [(1, 0)]
    assert ledger.report(1, 10, 0, 0) == [(1, 0)]
    assert ledger.report(1, 0, 0, 0) == [(0, 20)]


def test_ledger_of_one_worker_grants_nothing():
    assert Ledger(20, 1).report(0, 20, 20, 35) == []


def test_ledger_worker_that_died_frees_what_it_used():
    ledger = Ledger(20, 2)
    ledger.report(0, 10, 10, 20)
    ledger.report(1, 10, 10, 20)
    assert ledger.restart(1) == [(1, 10), (1, 0)]
    assert ledger.report(1, 0, 0, 0) == [(0, 20)]


def test_ledger_worker_that_died_while_others_had_its_first_share_gets_the_rest():
    ledger = Ledger(20, 2)
    ledger.report(0, 10, 10, 18)
    ledger.report(1, 2, 2, 2)
    ledger.report(0, 18, 18, 18)
    assert ledger.restart(1)[0] == (1, 2)


def test_ledger_budget_that_grows_is_given_out():
    ledger = Ledger(10, 2)
    assert ledger.report(0, 5, 5, 20) == [(1, 0)]
    assert ledger.report(1, 0, 0, 0) == [(0, 10)]
    assert ledger.report(0, 10, 10, 20) == []
    assert ledger.resize(30) == [(0, 25), (1, 5)]


def test_ledger_budget_that_shrinks_is_taken_back():
    ledger = Ledger(10, 2)
    ledger.report(0, 5, 5, 6)
    assert ledger.report(1, 2, 2, 4) == [(1, 4), (0, 6)]  # the neediest first
    assert ledger.resize(4) == []  # the grants that are under way come first
    assert ledger.report(0, 6, 5, 5) == [(0, 2)]
    assert ledger.report(1, 4, 2, 4) == [(1, 2)]
    assert ledger.report(0, 2, 2, 5) == []


def test_ledger_budget_that_changes_before_any_grant_is_what_workers_go_by():
    ledger = Ledger(10, 2)
    assert ledger.resize(6) == []
    assert ledger.report(0, 3, 3, 3) == []
    assert ledger.report(1, 3, 3, 3) == []


class Worker:
    """A worker as it really is, and the two streams that join it to the supervisor."""

    def __init__(self, share: int) -> None:
        self.share = share
        self.used = 0
        self.wanted = 0  # beyond what it uses
        self.told = False
        self.grants: deque[tuple[str, int]] = deque()
        self.reports: deque[tuple[int, int, int]] = deque()


@settings(max_examples=100, stateful_step_count=40, deadline=None)
class Limits(RuleBasedStateMachine):
    """A ledger and its workers, each record as late as it likes."""

    @initialize(budget=st.integers(0, 30), count=st.integers(1, 4))
    def begin(self, budget, count):
        self.ledger = Ledger(budget, count)
        self.workers = [Worker(first_share(budget, count, index)) for index in range(count)]
        self.most = budget  # what the sum may be: more than the budget only after the budget fell

    def send(self, grants: list[tuple[int, int]]) -> None:
        for index, share in grants:
            assert share >= 0
            self.workers[index].grants.append(("grant", share))

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.workers) - 1))

    @rule(data=st.data())
    def work(self, data):
        worker = self.workers[self.pick(data)]
        worker.used = data.draw(st.integers(0, max(worker.used, worker.share)))
        worker.wanted = data.draw(st.integers(0, 30))

    @rule(data=st.data())
    def tell(self, data):
        worker = self.workers[self.pick(data)]
        worker.reports.append((worker.share, worker.used, worker.used + worker.wanted))

    @rule(data=st.data())
    def hear_report(self, data):
        self.deliver_report(self.pick(data))

    @rule(data=st.data())
    def hear_grant(self, data):
        self.deliver_grant(self.pick(data))

    @rule(data=st.data())
    def lose_grant(self, data):
        # What is sent to a process that has just been started may be lost; shares are taken back all the same.
        worker = self.workers[self.pick(data)]
        if worker.grants and worker.grants[-1][0] == "grant":
            worker.grants.pop()

    @rule(data=st.data())
    def die(self, data):
        index = self.pick(data)
        grants = self.ledger.restart(index)
        self.workers[index] = Worker(-1)
        self.send(grants)
        # A new process hears the last of them before it serves.
        worker = self.workers[index]
        worker.share, worker.told = worker.grants[-1][1], True
        worker.grants.clear()

    @rule(budget=st.integers(0, 30))
    def configure(self, budget):
        self.come_to_rest()
        for index, worker in enumerate(self.workers):
            worker.grants.append(("budget", first_share(budget, len(self.workers), index)))
        self.most = max(budget, self.reserved())
        self.send(self.ledger.resize(budget))

    def deliver_report(self, index: int) -> None:
        reports = self.workers[index].reports
        if reports:
            self.send(self.ledger.report(index, *reports.popleft()))

    def deliver_grant(self, index: int) -> None:
        worker = self.workers[index]
        if worker.grants:
            kind, share = worker.grants.popleft()
            if kind == "grant" or not worker.told:
                worker.share = share
            worker.told |= kind == "grant"

    def reserved(self) -> int:
        return sum(entry.reserved for entry in self.ledger._workers)

    @precondition(lambda self: hasattr(self, "ledger"))
    @invariant()
    def no_more_is_promised_than_there_is(self):
        assert self.reserved() <= self.most
        self.most = max(self.ledger.budget, self.reserved())
        for worker, entry in zip(self.workers, self.ledger._workers, strict=True):
            assert worker.used <= entry.reserved
            assert worker.share <= entry.reserved

    def teardown(self):
        if not hasattr(self, "ledger"):
            return
        wanted = self.come_to_rest()
        fair = allocate(self.ledger.budget, wanted)
        for worker, want, share in zip(self.workers, wanted, fair, strict=True):
            assert worker.share >= min(want, share)

    def come_to_rest(self) -> list[int]:
        """Let everything arrive, while the workers' wishes stay and what stands above a share is given back."""
        wanted = [worker.used + worker.wanted for worker in self.workers]
        for _ in range(10):
            for index, worker in enumerate(self.workers):
                while worker.grants:
                    self.deliver_grant(index)
                worker.used = min(worker.used, worker.share)
                worker.reports.append((worker.share, worker.used, wanted[index]))
                while worker.reports:
                    self.deliver_report(index)
            self.no_more_is_promised_than_there_is()
        return wanted


TestLimits = Limits.TestCase


def test_ledger_that_was_lowered_below_what_is_in_use_gives_nothing_until_that_is_free() -> None:
    ledger = Ledger(4, 2)
    for worker in (0, 1):
        ledger.report(worker, 2, 2, 2)
    ledger.resize(1)
    ledger.report(0, 1, 1, 0)
    for worker, share in ledger.report(1, 0, 1, 1):
        assert (worker, share) != (1, 1), "worker 0 still has the one that there is"
