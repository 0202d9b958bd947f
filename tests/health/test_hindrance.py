"""Whether a standby takes over, and which: one reason at a time, each beside the world that lacks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from health import failover, judge
from health.failover import FailoverRules, World
from health.view import Admin, Epoch, Memory, Mode, Outcome, ProbeResult, Status

from .situations import (
    GONE,
    LIVES,
    OTHER,
    SATURATED,
    TWO,
    Judged,
    died,
    frozen,
    make,
    prioritized,
    with_memory,
)
from .worlds import SYSTEM, dead, follower, primary, refusing, seen_again, silent, standby


def test_hindrance_dead_primary_and_two_standbys_there_is_none():
    assert failover.hindrance(died()) is None


@dataclass(frozen=True)
class Case:
    """A world that forbids a failover for one reason, and why."""

    name: str
    world: World
    why: str


ONE_OF_TWO = with_memory(synchronous_standby_names="ANY 1 (pg2, pg3)", synchronous_standbys=2)
CASES = [
    Case("no_primary_known", make(follower("pg2"), memory=Memory()), "no primary was ever seen"),
    Case("alive", make(primary("pg1"), follower("pg2"), follower("pg3")), "pg1 is up"),
    Case("saturated", make(SATURATED, follower("pg2"), follower("pg3")), "pg1 is saturated (too many clients already)"),
    Case(
        "starting",
        make(refusing(primary("pg1"), "57P03", "starting up", Status.STARTING), follower("pg2"), follower("pg3")),
        "pg1 is starting (starting up)",
    ),
    Case(
        "wrong_password",
        make(refusing(primary("pg1"), "28P01", "no", Status.MISCONFIGURED), follower("pg2"), follower("pg3")),
        "pg1 is misconfigured (no)",
    ),
    # The first answer after a silence does not make a node up yet, but it is one.
    Case(
        "answers_again",
        make(seen_again(primary("pg1")), follower("pg2"), follower("pg3")),
        "pg1 answers again",
    ),
    Case("demoted", make(follower("pg1"), follower("pg2"), follower("pg3")), "pg1 is up"),
    Case(
        "receiver_alive", died(follower("pg2", receiver_streaming=True), follower("pg3")), "pg2 still receives from pg1"
    ),
    Case(
        "receivers_alive",
        died(follower("pg2", receiver_streaming=True), follower("pg3", receiver_streaming=True)),
        "pg2, pg3 still receive from pg1",
    ),
    Case(
        "receiver_hidden",
        died(follower("pg2", receiver_streaming=None), follower("pg3")),
        "whether pg2 receive from pg1 is not to be seen: grant pg_monitor to probe_user",
    ),
    # It takes no further connection, and told on the old one what it does.
    Case(
        "receiver_of_saturated_standby",
        died(
            follower("pg2"),
            follower("pg3"),
            replace(
                follower("pg4", receiver_streaming=True),
                status=Status.SATURATED,
                result=replace(follower("pg4", receiver_streaming=True).result, outcome=Outcome.REJECTED),  # type: ignore[type-var]
            ),
        ),
        "pg4 still receives from pg1",
    ),
    # What it receives comes from pg2, and that we do not see pg2 does not mean that it receives from nobody.
    Case(
        "receiver_below_an_unseen_standby",
        died(
            dead(follower("pg2")), follower("pg3", of="pg2", receiver_streaming=True), follower("pg4"), follower("p5")
        ),
        "pg3 still receives from pg1",
    ),
    Case("follow", died(rules=FailoverRules(mode=Mode.FOLLOW)), "somebody else promotes (failover.mode is follow)"),
    Case("paused", died(memory=with_memory(paused=True)), "failover is paused"),
    Case(
        "maintenance",
        make(judge.administer(dead(primary("pg1")), Admin.MAINT), follower("pg2"), follower("pg3")),
        "an operator has taken pg1 out",
    ),
    Case(
        "drained",
        make(judge.administer(dead(primary("pg1")), Admin.DRAIN), follower("pg2"), follower("pg3")),
        "an operator has taken pg1 out",
    ),
    Case(
        "startup_grace",
        make(silent("pg1"), follower("pg2"), follower("pg3"), started_at=3595.0),
        "the gateway has just started (failover.startup_grace 10 s)",
    ),
    Case(
        "stale_file",
        make(silent("pg1"), follower("pg2", timeline=2), follower("pg3", timeline=2)),
        "pg1 is known from an earlier run alone, and no standby confirms it",
    ),
    Case(
        "cool_off",
        died(memory=with_memory(promoted_at=1e9 - 20)),
        "the last failover was 20 s ago (failover.cool_off 30 s)",
    ),
    Case(
        "no_majority",
        died(follower("pg2"), dead(follower("pg3")), dead(follower("pg4"))),
        "1 of 4 nodes are seen, 3 have to be (failover.quorum)",
    ),
    Case("half_is_no_majority", died(follower("pg2")), "1 of 2 nodes are seen, 2 have to be (failover.quorum)"),
    Case(
        "quorum",
        died(rules=FailoverRules(mode=Mode.PROMOTE, quorum=3)),
        "2 of 3 nodes are seen, 3 have to be (failover.quorum)",
    ),
    Case(
        "refusing_standby_is_not_seen",
        died(follower("pg2"), refusing(follower("pg3"), "53300", "full", Status.SATURATED)),
        "1 of 3 nodes are seen, 2 have to be (failover.quorum)",
    ),
    Case(
        "other_cluster_is_not_seen",
        died(follower("pg2"), follower("pg3", system_identifier=OTHER)),
        "1 of 3 nodes are seen, 2 have to be (failover.quorum)",
    ),
    Case(
        "synchronous_not_all_seen",
        died(follower("pg2"), dead(follower("pg3")), follower("pg4"), memory=ONE_OF_TWO, rules=TWO),
        "1 standbys of synchronous_standby_names are seen, only 2 of them together are sure to have every "
        "acknowledged commit",
    ),
    # They share a name, which fits, and no probe of the primary met both of them connected.
    Case(
        "synchronous_of_one_name",
        died(
            follower("pg2", application_name="walreceiver"),
            dead(follower("pg3", application_name="walreceiver")),
            follower("pg4", application_name="other"),
            memory=with_memory(synchronous_standby_names="walreceiver", synchronous_standbys=1),
            rules=TWO,
        ),
        "1 standbys of synchronous_standby_names are seen, only 2 of them together are sure to have every "
        "acknowledged commit",
    ),
    Case(
        "synchronous_unreadable",
        died(memory=with_memory(synchronous_standby_names="ANY ANY")),
        "synchronous_standby_names is not understood: ANY ANY",
    ),
    Case(
        "synchronous_last_commit_on_one_that_may_not",
        died(prioritized(follower("pg2", received_lsn=1000), 0), follower("pg3", received_lsn=900), memory=ONE_OF_TWO),
        "the standby that may have the last commit may not be promoted",
    ),
    Case(
        "not_in_the_sync_set",
        died(prioritized(follower("pg2"), 0), follower("pg3"), memory=with_memory(synchronous_standby_names="pg2")),
        "the standby that may have the last commit may not be promoted",
    ),
    Case(
        "timeline_older",
        died(
            follower("pg2"),
            follower("pg3"),
            memory=with_memory(epoch=Epoch("pg1", SYSTEM, 2, 2)),
        ),
        "no standby is known to be on timeline 2",
    ),
    # Somebody was a primary there whom we have not seen, or do not want.
    Case(
        "timeline_newer",
        died(follower("pg2", timeline=2), follower("pg3", timeline=2)),
        "no standby is known to be on timeline 1",
    ),
    Case(
        "timeline_unknown",
        died(follower("pg2", timeline=None), follower("pg3", timeline=None)),
        "no standby is known to be on timeline 1",
    ),
    Case(
        "position_unknown",
        died(follower("pg2", received_lsn=None), follower("pg3", received_lsn=None)),
        "no standby is known to be on timeline 1",
    ),
    Case(
        "lag",
        make(
            dead(replace(primary("pg1"), answer=replace(primary("pg1").answer, current_lsn=(1 << 20) + 1001))),  # type: ignore[type-var]
            follower("pg2"),
            follower("pg3"),
        ),
        "pg2 lacks 1048577 bytes that were written (failover.max_lag_on_failover)",
    ),
    Case(
        "nobody_may",
        died(prioritized(follower("pg2"), 0), prioritized(follower("pg3"), 0)),
        "no standby is up that may be promoted",
    ),
    Case(
        "standbys_taken_out",
        died(judge.administer(follower("pg2"), Admin.MAINT), judge.administer(follower("pg3"), Admin.DRAIN)),
        "no standby is up that may be promoted",
    ),
    Case(
        "standbys_rising",
        died(follower("pg2", status=Status.DOWN), follower("pg3", status=Status.DOWN)),
        "no standby is up that may be promoted",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_hindrance_each_reason_alone_forbids(case):
    assert failover.hindrance(case.world) == case.why


@pytest.mark.parametrize(
    "world",
    [
        died(memory=with_memory(promoted_at=1e9 - 31)),
        make(silent("pg1"), follower("pg2"), follower("pg3"), started_at=3589.0),
        make(silent("pg1"), frozen("pg2"), frozen("pg3"), started_at=3599.0, memory=with_memory(promoting="pg2")),
        died(follower("pg2"), dead(follower("pg3")), follower("pg4"), follower("pg5")),
        died(follower("pg2"), rules=FailoverRules(mode=Mode.PROMOTE, quorum=1)),
        died(rules=FailoverRules(mode=Mode.COMMAND)),
        died(memory=ONE_OF_TWO),
        # With two of three there may be one less.
        died(
            follower("pg2"),
            follower("pg3"),
            dead(follower("pg4")),
            memory=with_memory(synchronous_standby_names="ANY 2 (pg2, pg3, pg4)"),
            rules=TWO,
        ),
        died(follower("pg2"), follower("pg3", timeline=2)),
        died(follower("pg2"), follower("pg3", timeline=None)),
        died(prioritized(follower("pg2"), 0), follower("pg3")),
        make(
            dead(replace(primary("pg1"), answer=replace(primary("pg1").answer, current_lsn=(1 << 20) + 1000))),  # type: ignore[type-var]
            follower("pg2"),
            follower("pg3"),
        ),
        # A cascade tells nothing about the primary as long as the one above it is seen.
        died(follower("pg2"), follower("pg3", of="pg2", receiver_streaming=True)),
    ],
)
def test_hindrance_world_that_just_lacks_the_reason_has_none(world):
    assert failover.hindrance(world) is None


@pytest.mark.parametrize(
    "world",
    [
        died(rules=FailoverRules(mode=Mode.FOLLOW)),
        died(memory=with_memory(paused=True)),
        died(memory=with_memory(promoted_at=1e9)),
        died(follower("pg2"), dead(follower("pg3")), dead(follower("pg4"))),
        died(follower("pg2"), dead(follower("pg3")), memory=ONE_OF_TWO),
        died(follower("pg2", received_lsn=None), follower("pg3")),
        make(follower("pg1"), follower("pg2"), follower("pg3")),
        # The old primary is a standby, and others receive from it: it commits nothing.
        make(follower("pg1"), follower("pg2", receiver_streaming=True), follower("pg3", receiver_streaming=True)),
        make(follower("pg2"), memory=Memory()),
    ],
)
def test_hindrance_operator_decides_what_is_a_matter_of_rules(world):
    assert failover.hindrance(world, "pg2") is None


@pytest.mark.parametrize(
    ("world", "why"),
    [
        (make(primary("pg1"), follower("pg2")), "pg1 is up"),
        (make(SATURATED, follower("pg2")), "pg1 is saturated (too many clients already)"),
        (make(seen_again(primary("pg1")), follower("pg2")), "pg1 answers again"),
        (died(follower("pg2", receiver_streaming=True)), "pg2 still receives from pg1"),
        (died(dead(follower("pg2")), follower("pg3")), "pg2 does not answer"),
        (died(follower("pg3")), "pg2 does not answer"),
        (died(follower("pg2", system_identifier=OTHER)), "pg2 does not answer"),
        (make(dead(follower("pg2")), memory=Memory()), "pg2 does not answer"),
    ],
)
def test_hindrance_operator_does_not_decide_what_is_so(world, why):
    assert failover.hindrance(world, "pg2") == why


def chosen(world: World) -> str:
    state = failover.candidate(world)
    return state if isinstance(state, str) else state.node.name


@pytest.mark.parametrize(
    ("standbys", "names", "name"),
    [
        ([follower("pg2", received_lsn=900), follower("pg3")], "", "pg3"),
        # What was received counts as well as what was replayed.
        ([follower("pg2", received_lsn=950, replayed_lsn=900), follower("pg3", received_lsn=940)], "", "pg2"),
        ([follower("pg2", received_lsn=None, replayed_lsn=960), follower("pg3", received_lsn=950)], "", "pg2"),
        ([follower("pg2"), prioritized(follower("pg3"), 200)], "", "pg3"),
        ([follower("pg2"), prioritized(follower("pg3", received_lsn=999), 200)], "", "pg2"),
        ([prioritized(follower("pg2"), 0), follower("pg3", received_lsn=900)], "", "pg3"),
        ([follower("pg2", received_lsn=900), follower("pg3")], "pg2", "pg2"),  # pg3 is ahead, and asynchronous
        ([follower("pg2", received_lsn=900), follower("pg3"), follower("pg4")], "ANY 1 (pg2, pg4)", "pg4"),
        ([follower("pg2", application_name=None), follower("pg3", received_lsn=900)], "pg3", "pg2"),
        # Positions on two timelines cannot be compared.
        ([follower("pg2", timeline=2, received_lsn=5000), follower("pg3", received_lsn=900)], "", "pg3"),
        ([follower("pg2", timeline=None, received_lsn=5000), follower("pg3", received_lsn=900)], "", "pg3"),
        ([follower("pg2", system_identifier=OTHER, received_lsn=5000), follower("pg3")], "", "pg3"),
        ([judge.administer(follower("pg2"), Admin.MAINT), follower("pg3", received_lsn=900)], "", "pg3"),
    ],
)
def test_candidate_is_the_one_that_lacks_least(standbys, names, name):
    assert chosen(died(*standbys, memory=with_memory(synchronous_standby_names=names))) == name


def test_candidate_of_two_that_are_equal_is_the_one_that_may_have_been_told_already():
    standbys = (prioritized(follower("pg2"), 200), follower("pg3"))
    assert chosen(died(*standbys, memory=with_memory(promoting="pg3"))) == "pg3"


def test_candidate_is_never_the_primary_that_was_demoted():
    assert chosen(make(follower("pg1", received_lsn=2000), follower("pg2"))) == "pg2"


def test_candidate_is_not_barred_by_what_a_former_primary_wrote():
    # pg1 was started as a standby with what nobody else had; it has nothing of the timeline that counts.
    memory = with_memory(epoch=Epoch("pg4", SYSTEM, 2, 2), synchronous_standby_names="ANY 1 (pg1, pg2, pg3)")
    states = (follower("pg1", received_lsn=9000), follower("pg2", timeline=2), follower("pg3", timeline=2))
    assert chosen(make(dead(primary("pg4", 2)), *states, memory=memory)) == "pg2"


def test_world_sees_who_answered_last_and_belongs():
    world = make(
        primary("pg1"),
        standby("pg2"),
        standby("pg3", system=None),
        standby("pg4", system=OTHER),
        dead(standby("pg5")),
        silent("pg6"),
    )
    assert [state.node.name for state in world.seen()] == ["pg1", "pg2", "pg3"]
    assert [state.node.name for state in world.standbys()] == ["pg2", "pg3"]
    assert make(replace(primary("pg1"), result=ProbeResult("pg1", 0.0, Outcome.LOCAL))).seen() == []


REFUSALS: list[Callable[[World], str | None]] = [failover.hindrance, lambda world: failover.hindrance(world, "pg2")]


@pytest.mark.parametrize("ask", REFUSALS)
@pytest.mark.parametrize("sqlstate", ["53300", "57P01", "57P02", "57P03", "28000", "28P01", "3D000", "42501"])
def test_hindrance_a_silence_that_ends_in_an_error_ends(ask, sqlstate):
    judged = Judged("pg1", "pg2", "pg3")
    judged.probe(LIVES, follower("pg2"), follower("pg3"))
    judged.probe(GONE, times=3)
    assert ask(make(*judged.states.values(), memory=judged.memory)) is None
    judged.probe(refusing(LIVES, sqlstate, "no", Status.UP))
    assert ask(make(*judged.states.values(), memory=judged.memory)) is not None
