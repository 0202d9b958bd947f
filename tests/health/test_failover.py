"""When a standby takes over, which, and by what steps: one reason at a time, each beside the world that lacks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from health import conninfo, failover, judge
from health.failover import AbandonedError, Action, FailoverRules, Plan, Step, World
from health.judge import NodeState
from health.view import Admin, Epoch, Memory, Mode, Node, Outcome, ProbeResult, Status

from .worlds import RULES, SYSTEM, dead, follower, primary, refusing, seen_again, silent, standby

OTHER = SYSTEM + 1
P1 = Epoch("pg1", SYSTEM, 1, 1)
MEMORY = Memory(epoch=P1)
PROMOTE = FailoverRules(mode=Mode.PROMOTE)
TWO = FailoverRules(mode=Mode.PROMOTE, quorum=2)
BOTH = FailoverRules(mode=Mode.PROMOTE, fences=True, demotes=True)
FROZEN = conninfo.freeze("host=pg1.example port=5432 application_name=x")


def make(*states: NodeState, memory: Memory = MEMORY, rules: FailoverRules = PROMOTE, **facts: object) -> World:
    """A world an hour after the gateway's start, when nothing was promoted for long."""
    facts = {"now": 3600.0, "wall": 1e9, "started_at": 0.0} | facts
    return World(states, memory, rules, **facts)  # type: ignore[arg-type]


def died(*standbys: NodeState, **facts: object) -> World:
    """The primary is silent, and so it is for all who received from it."""
    return make(dead(primary("pg1")), *(standbys or (follower("pg2"), follower("pg3"))), **facts)  # type: ignore[arg-type]


def prioritized(state: NodeState, priority: int) -> NodeState:
    return replace(state, node=Node(state.node.name, state.node.host, priority=priority))


def with_memory(**facts: object) -> Memory:
    return replace(MEMORY, **facts)


def frozen(name: str, **facts: object) -> NodeState:
    return follower(name, conninfo=conninfo.freeze(f"host=pg1.example application_name={name}"), **facts)  # type: ignore[arg-type]


def test_hindrance_dead_primary_and_two_standbys_there_is_none():
    assert failover.hindrance(died()) is None


@dataclass(frozen=True)
class Case:
    """A world that forbids a failover for one reason, and why."""

    name: str
    world: World
    why: str


SATURATED = refusing(primary("pg1"), "53300", "too many clients already", Status.SATURATED)
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


# Receivers started anew.


@pytest.mark.parametrize(
    ("moved_at", "names"),
    [(None, ["pg2"]), (3599.0, []), (3594.9, ["pg2"]), (3595.1, [])],
)
def test_rousable_is_who_received_nothing_since_the_primary_was_doubted(moved_at, names):
    receiving = replace(follower("pg2", receiver_streaming=True), moved_at=moved_at)
    old = replace(dead(primary("pg1")), doubted_at=3595.0)
    assert failover.rousable(make(old, receiving, follower("pg3"))) == names


def test_rousable_again_after_ten_seconds():
    receiving = replace(follower("pg2", receiver_streaming=True), moved_at=3589.0)
    old = replace(dead(primary("pg1")), doubted_at=100.0)
    assert failover.rousable(make(old, receiving)) == ["pg2"]
    assert failover.rousable(make(old, replace(receiving, moved_at=3591.0))) == []


@pytest.mark.parametrize(
    "world",
    [
        make(primary("pg1"), follower("pg2", receiver_streaming=True)),
        died(follower("pg2", receiver_streaming=True), rules=FailoverRules(mode=Mode.FOLLOW)),
        died(follower("pg2"), follower("pg3", of="pg2", receiver_streaming=True)),
        make(follower("pg2", receiver_streaming=True), memory=Memory()),
    ],
)
def test_rousable_is_nobody_while_there_is_no_doubt_or_it_is_not_our_business(world):
    assert failover.rousable(world) == []


# Repairs.

P2 = Epoch("pg2", SYSTEM, 2, 2)
PROMOTED = with_memory(epoch=P2, former=("pg1",))


@pytest.mark.parametrize(
    ("states", "memory", "names"),
    [
        ([primary("pg1"), follower("pg2", conninfo=FROZEN)], MEMORY, ["pg2"]),
        ([dead(primary("pg1")), follower("pg2", conninfo=FROZEN)], MEMORY, ["pg2"]),
        ([primary("pg1"), follower("pg2", receiver_streaming=True)], MEMORY, []),
        ([primary("pg1"), follower("pg2")], MEMORY, []),  # it comes back by itself
        ([primary("pg2", 2), follower("pg3")], PROMOTED, []),  # the node that it follows is not configured
        ([dead(primary("pg1")), primary("pg2", 2), follower("pg3")], PROMOTED, ["pg3"]),
        ([dead(primary("pg1")), primary("pg2", 2), follower("pg3", of="pg4"), follower("pg4")], PROMOTED, ["pg4"]),
        ([dead(primary("pg1")), dead(primary("pg2", 2)), follower("pg3")], PROMOTED, []),
        (
            [follower("pg1", of="pg2"), primary("pg2", 2), follower("pg3", timeline=2, receiver_streaming=True)],
            PROMOTED,
            [],
        ),
        # A ring: pg1 receives from pg3, and pg3 from pg1.
        (
            [
                follower("pg1", of="pg3", receiver_streaming=True),
                primary("pg2", 2),
                follower("pg3", receiver_streaming=True),
            ],
            PROMOTED,
            ["pg3"],
        ),
        ([primary("pg2", 2), follower("pg3", conninfo=None)], PROMOTED, []),
        ([primary("pg1"), follower("pg2", conninfo=FROZEN)], with_memory(promoting="pg2"), []),
        ([primary("pg1"), dead(follower("pg2", conninfo=FROZEN))], MEMORY, []),
    ],
)
def test_repairs_lead_the_frozen_and_who_follows_a_former_primary(states, memory, names):
    assert failover.repairs(make(*states, memory=memory)) == names
    assert failover.repairs(make(*states, memory=memory, rules=FailoverRules(mode=Mode.FOLLOW))) == []


@pytest.mark.parametrize(
    ("states", "names"),
    [
        ([primary("pg1"), primary("pg2", 2)], ["pg1"]),
        ([primary("pg1"), primary("pg2", 2), primary("pg3", 3)], ["pg1", "pg3"]),
        ([dead(primary("pg1")), primary("pg2", 2)], []),
        ([primary("pg1", 2), primary("pg2", 1)], []),  # pg2 is of yesterday: nobody is to be made like it
        ([primary("pg1", system=OTHER), primary("pg2", 2)], []),  # not ours to be made anew
        ([primary("pg1"), dead(primary("pg2", 2))], []),
        ([primary("pg1"), primary("pg2", 2, status=Status.SATURATED)], []),
        ([follower("pg1"), primary("pg2", 2)], []),
    ],
)
def test_strays_are_primaries_beside_the_one_at_work(states, names):
    assert failover.strays(make(*states, memory=PROMOTED)) == names
    assert failover.strays(make(*states, memory=replace(PROMOTED, promoting="pg3"))) == []
    assert failover.strays(make(*states, memory=PROMOTED, rules=FailoverRules(mode=Mode.FOLLOW))) == []


# Steps.


def play(plan: Plan, *worlds: World) -> tuple[list[Step], str]:
    """Hand worlds to a plan, the last one for as long as it goes on; return its steps and how it ended."""
    steps, at = [], iter(worlds)
    world = worlds[-1]
    try:
        steps.append(next(plan))
        while True:
            world = next(at, world)
            steps.append(plan.send(world))
    except StopIteration as end:
        return steps, end.value
    except AbandonedError as error:
        return steps, f"abandoned: {error}"


def actions(steps: list[Step]) -> list[tuple[str, ...]]:
    return [(step.action.value, *step.nodes) for step in steps]


BEFORE = died()
FREEZES = died(frozen("pg2"), frozen("pg3", received_lsn=900))
CHOSEN = died(frozen("pg2"), frozen("pg3", received_lsn=900), memory=with_memory(promoting="pg2"))
DONE = make(dead(primary("pg1")), primary("pg2", 2), frozen("pg3"), memory=replace(PROMOTED, promoting="pg2"))
ADOPTED = replace(DONE, memory=PROMOTED)


def test_failover_takes_every_step_once():
    steps, said = play(failover.failover(BEFORE), BEFORE, FREEZES, CHOSEN, DONE, ADOPTED)
    assert actions(steps) == [
        ("hold",),
        ("freeze", "pg2", "pg3"),
        ("remember", "pg2"),
        ("promote", "pg2"),
        ("adopt", "pg2"),
        ("release",),
    ]
    assert said == "pg2 is the primary on timeline 2"


def test_failover_with_a_fence_runs_it_before_it_chooses():
    worlds = [replace(world, rules=BOTH) for world in (BEFORE, FREEZES, FREEZES, CHOSEN, DONE, ADOPTED)]
    steps, _ = play(failover.failover(worlds[0]), *worlds)
    assert actions(steps)[:4] == [("hold",), ("freeze", "pg2", "pg3"), ("fence", "pg1"), ("remember", "pg2")]


@pytest.mark.parametrize(
    ("worlds", "steps", "why"),
    [
        (
            [BEFORE, replace(FREEZES, failures={"pg3": "no"})],
            ["hold", "freeze", "release"],
            "pg3 cannot be kept from receiving: no",
        ),
        # Seen again after the others were frozen: it may receive at any moment.
        (
            [died(follower("pg2"), dead(follower("pg3")), follower("pg4")), died(frozen("pg2"), follower("pg3"))],
            ["hold", "freeze", "release"],
            "pg3 cannot be kept from receiving: it was not seen before",
        ),
        (
            [BEFORE, make(primary("pg1"), frozen("pg2"), frozen("pg3"))],
            ["hold", "freeze", "release"],
            "pg1 is up",
        ),
        (
            [BEFORE, make(seen_again(primary("pg1")), frozen("pg2"), frozen("pg3"))],
            ["hold", "freeze", "release"],
            "pg1 answers again",
        ),
        (
            [BEFORE, FREEZES, replace(CHOSEN, failures={"pg2": "disk is full"})],
            ["hold", "freeze", "remember", "remember", "release"],
            "disk is full",
        ),
        # It came back while we wrote down what was to be done.
        (
            [BEFORE, FREEZES, replace(CHOSEN, states=(primary("pg1"), *CHOSEN.states[1:]))],
            ["hold", "freeze", "remember", "remember", "release"],
            "pg2 cannot be promoted any more: pg1 is up",
        ),
        (
            [BEFORE, FREEZES, replace(CHOSEN, states=(seen_again(primary("pg1")), *CHOSEN.states[1:]))],
            ["hold", "freeze", "remember", "remember", "release"],
            "pg2 cannot be promoted any more: pg1 answers again",
        ),
        (
            [BEFORE, FREEZES, replace(CHOSEN, states=(SATURATED, *CHOSEN.states[1:]))],
            ["hold", "freeze", "remember", "remember", "release"],
            "pg2 cannot be promoted any more: pg1 is saturated (too many clients already)",
        ),
        (
            [BEFORE, FREEZES, replace(CHOSEN, states=(*CHOSEN.states, follower("pg4", receiver_streaming=True)))],
            ["hold", "freeze", "remember", "remember", "release"],
            "pg2 cannot be promoted any more: pg4 still receives from pg1",
        ),
        (
            [BEFORE, FREEZES, CHOSEN, replace(CHOSEN, failures={"pg2": "not done within 60 s"})],
            ["hold", "freeze", "remember", "promote", "remember", "release"],
            "pg2 was not promoted: not done within 60 s",
        ),
        (
            [BEFORE, FREEZES, CHOSEN, DONE, make(dead(primary("pg1")), dead(follower("pg2")), frozen("pg3"))],
            ["hold", "freeze", "remember", "promote", "adopt", "release"],
            "pg2 was promoted, but is not taken for the primary: see its reason in SHOW NODES",
        ),
    ],
)
def test_failover_is_abandoned_when_a_step_is_not_seen_to_be_done(worlds, steps, why):
    taken, said = play(failover.failover(worlds[0]), *worlds)
    assert [step.action.value for step in taken] == steps
    assert said == f"abandoned: {why}"


def test_failover_fence_that_fails_promotes_nobody():
    worlds = [replace(world, rules=BOTH) for world in (BEFORE, FREEZES, replace(FREEZES, failures={"pg1": "exit 1"}))]
    steps, said = play(failover.failover(worlds[0]), *worlds)
    assert actions(steps)[-1] == ("release",)
    assert said == "abandoned: fence_command failed: exit 1"


@pytest.mark.parametrize(
    ("world", "target"),
    [
        (make(follower("pg2"), memory=Memory(), rules=BOTH), "pg2"),  # there is nobody to be fenced
        (make(follower("pg1"), frozen("pg2"), rules=BOTH), "pg1"),  # nor the one that is to be the primary
    ],
)
def test_failover_fences_no_node_that_it_must_not(world, target):
    steps, _ = play(failover.failover(world, target), world)
    assert Action.FENCE not in [step.action for step in steps]


def test_failover_begun_again_goes_on_where_it_was():
    steps, said = play(failover.failover(CHOSEN), CHOSEN, CHOSEN, CHOSEN, DONE, ADOPTED)
    assert actions(steps) == actions(play(failover.failover(BEFORE), BEFORE, FREEZES, CHOSEN, DONE, ADOPTED)[0])
    assert said == "pg2 is the primary on timeline 2"
    steps, said = play(failover.failover(DONE), DONE, ADOPTED)
    assert actions(steps) == [("hold",), ("adopt", "pg2"), ("release",)]


@pytest.mark.parametrize(
    "states",
    [
        (primary("pg1"), frozen("pg2"), follower("pg3", receiver_streaming=True)),
        (seen_again(primary("pg1")), frozen("pg2"), frozen("pg3")),
        (dead(primary("pg1")), dead(frozen("pg2")), frozen("pg3")),
        (dead(primary("pg1")), frozen("pg3")),
        # Answers are not silence, for one who begins again neither.
        (SATURATED, frozen("pg2"), frozen("pg3")),
        (refusing(silent("pg1"), "57P03", "starting up", Status.STARTING), frozen("pg2"), frozen("pg3")),
        (refusing(silent("pg1"), "28P01", "no", Status.MISCONFIGURED), frozen("pg2"), frozen("pg3")),
        (dead(primary("pg1")), frozen("pg2"), follower("pg3", receiver_streaming=True)),
    ],
)
def test_failover_begun_again_is_given_up_when_it_is_too_late(states):
    world = make(*states, memory=with_memory(promoting="pg2"))
    steps, said = play(failover.failover(world), world)
    assert actions(steps) == [("hold",), ("remember",), ("release",)]
    assert said.startswith("abandoned: pg2 cannot be promoted any more")


def test_failover_that_an_operator_wants_is_not_the_one_begun_before():
    world = died(frozen("pg2"), frozen("pg3"), memory=with_memory(promoting="pg2"))
    steps, _ = play(failover.failover(world, "pg3"), world, world, replace(world, memory=with_memory(promoting="pg3")))
    assert ("promote", "pg3") in actions(steps)


WORKS = make(primary("pg1"), follower("pg2", receiver_streaming=True), follower("pg3", receiver_streaming=True))
SWITCHABLE = replace(WORKS, rules=BOTH)
SWITCHED = make(
    follower("pg1", of="pg2"), follower("pg2"), follower("pg3"), memory=with_memory(promoting="pg2"), rules=BOTH
)


def test_switchover_takes_every_step_once():
    steps, said = play(failover.switchover(SWITCHABLE, "pg2"), *[SWITCHABLE] * 4, SWITCHABLE, SWITCHED, DONE, ADOPTED)
    assert actions(steps) == [
        ("checkpoint", "pg1", "pg2"),
        ("hold",),
        ("drain",),
        ("catch up", "pg2"),
        ("remember", "pg2"),
        ("demote", "pg1", "pg2"),
        ("promote", "pg2"),
        ("adopt", "pg2"),
        ("release",),
    ]
    assert said == "pg2 is the primary on timeline 2"


@pytest.mark.parametrize("at", range(2, 6))
@pytest.mark.parametrize("force", [False, True])
def test_switchover_step_that_fails_leaves_everything_as_it_was(at, force):
    bad = replace(SWITCHABLE, failures={"pg1": "no"})
    steps, said = play(failover.switchover(SWITCHABLE, "pg2", force=force), *[SWITCHABLE] * at, bad)
    if at == 2 and force:
        assert actions(steps)[3] == ("catch up", "pg2")
        return
    assert said == "abandoned: no"
    assert actions(steps)[-1] == ("release",)
    # What is noted before a save that fails would be gone on with at the first silence of the primary.
    assert (("remember",) in actions(steps)) == (at >= 4)


def test_switchover_begun_again_waits_for_the_old_primary_to_be_one_no_more():
    memory = with_memory(promoting="pg2")
    starting = refusing(silent("pg1"), "57P03", "shutting down", Status.STARTING)
    world = make(starting, follower("pg2"), follower("pg3"), memory=memory, rules=BOTH)
    steps, said = play(failover.failover(world), world)
    assert actions(steps) == [("hold",), ("release",)]
    assert said == "abandoned: pg1 is starting (shutting down)"
    refused = replace(dead(silent("pg1"), Outcome.REFUSED), status=Status.UP)
    for state in (dead(silent("pg1")), refused, follower("pg1", of="pg2")):
        world = replace(world, states=(state, *world.states[1:]))
        steps, _ = play(failover.failover(world), world)
        assert len(steps) > 2


@pytest.mark.parametrize(
    ("world", "target", "why"),
    [
        (SWITCHABLE, "pg2", None),
        (WORKS, "pg2", "failover.demote_command is not set: it makes the old primary a standby"),
        (SWITCHABLE, "pg9", "there is no node pg9"),
        (SWITCHABLE, "pg1", "pg1 is the primary"),
        (died(rules=BOTH), "pg2", "there is no primary at work: PROMOTE makes a standby one"),
        (
            make(SATURATED, follower("pg2"), rules=BOTH),
            "pg2",
            "there is no primary at work: PROMOTE makes a standby one",
        ),
        (make(primary("pg1"), dead(follower("pg2")), rules=BOTH), "pg2", "pg2 is no standby that answers"),
        (make(primary("pg1"), primary("pg2", 2), rules=BOTH), "pg2", "pg2 is no standby that answers"),
        (make(primary("pg1"), follower("pg2"), rules=BOTH), "pg2", "pg2 does not receive from pg1"),
        (
            make(primary("pg1"), follower("pg2", of="pg3", receiver_streaming=True), follower("pg3"), rules=BOTH),
            "pg2",
            "pg2 does not receive from pg1",
        ),
    ],
)
def test_switchover_is_refused_in_words(world, target, why):
    assert failover.cannot_switch(world, target) == why
    if why is not None:
        with pytest.raises(AbandonedError, match=why[:20]):
            next(failover.switchover(world, target))


@pytest.mark.parametrize(
    ("standbys", "name"),
    [
        (
            [follower("pg2", receiver_streaming=True), follower("pg3", receiver_streaming=True, received_lsn=1001)],
            "pg3",
        ),
        ([follower("pg2"), follower("pg3", receiver_streaming=True, received_lsn=1)], "pg3"),
        ([prioritized(follower("pg2", receiver_streaming=True), 0)], None),
        ([judge.administer(follower("pg2", receiver_streaming=True), Admin.DRAIN)], None),
        ([follower("pg2")], None),
    ],
)
def test_successor_is_the_standby_that_got_farthest(standbys, name):
    assert failover.successor(make(primary("pg1"), *standbys, rules=BOTH)) == name


# Who is the primary when only we promote.


class Judged:
    """A cluster whose nodes are probed one after the other, and what is remembered of it."""

    def __init__(self, *names: str, memory: Memory | None = None, follow: bool = False) -> None:
        self.memory = memory or Memory()
        self.follow = follow
        self.now = 0.0
        self.states = {name: judge.first_state(Node(name, f"{name}.example"), RULES, 0.0) for name in names}

    def probe(self, *states: NodeState, times: int = 1) -> str | None:
        for state in states * times:
            self.now += 1.0
            name, result = state.node.name, state.result
            assert result is not None
            self.states[name] = judge.judge(self.states[name], replace(result, at=self.now), RULES, self.now)
        known = list(self.states.values())
        choice = judge.choose_primary(known, self.memory, follow=self.follow)
        self.memory = judge.remember(self.memory, known, choice)
        return choice.primary

    def again(self) -> Judged:
        """The gateway dies, and comes back with what it has saved."""
        return Judged(*self.states, memory=self.memory, follow=self.follow)


GONE = silent("pg1")
LIVES, STANDS, RISEN = primary("pg1"), follower("pg2", receiver_streaming=True), primary("pg2", 2)
THIRD = follower("pg3", receiver_streaming=True)


def usurped() -> Judged:
    judged = Judged("pg1", "pg2", "pg3")
    judged.probe(LIVES, STANDS, THIRD)
    assert judged.probe(RISEN) == "pg1"
    assert judged.probe(LIVES) == "pg1"
    assert judged.memory.usurpers == ("pg2",)
    return judged


def test_usurper_is_not_adopted_when_the_primary_dies_afterwards():
    judged = usurped()
    assert judged.probe(GONE, times=3) == "pg1"
    assert judged.probe(RISEN, THIRD, times=3) == "pg1"
    assert judged.memory.epoch.timeline == 1


def test_usurper_is_not_adopted_by_a_gateway_that_starts_again():
    judged = usurped().again()
    assert judged.probe(GONE, RISEN, THIRD) == "pg1"
    assert judged.memory.usurpers == ("pg2",)


def test_usurper_that_is_silent_while_a_gateway_starts_is_not_forgotten():
    judged = usurped().again()
    assert judged.probe(LIVES, silent("pg2"), THIRD) == "pg1"
    assert judged.memory.usurpers == ("pg2",)
    assert judged.probe(GONE, times=3) == "pg1"
    assert judged.probe(RISEN, times=2) == "pg1"


def test_usurper_with_a_standby_of_its_own_does_not_change_the_timeline():
    # Else the primary would be one of yesterday after its first silence, and that standby the one to be promoted.
    judged = usurped()
    follows = follower("pg3", of="pg2", receiver_streaming=True, timeline=2, received_lsn=5000)
    assert judged.probe(LIVES, follows) == "pg1"
    assert judged.probe(GONE, times=3) == "pg1"
    assert judged.probe(follows) == "pg1"
    assert judged.memory.epoch.timeline == 1
    assert judged.probe(LIVES, times=2) == "pg1"


def test_usurper_that_becomes_a_standby_is_one():
    judged = usurped()
    assert judged.probe(STANDS, LIVES) == "pg1"
    assert not judged.memory.usurpers
    judged.probe(GONE, times=3)
    assert judged.probe(RISEN) == "pg2"


def test_usurper_that_an_operator_promotes_is_adopted():
    judged = usurped()
    judged.probe(GONE, times=3)
    judged.memory = replace(judged.memory, promoting="pg2")
    assert judged.probe(RISEN) == "pg2"
    assert not judged.memory.usurpers


def test_promotion_by_hand_after_the_primary_died_is_adopted():
    judged = Judged("pg1", "pg2", "pg3")
    judged.probe(LIVES, STANDS, THIRD)
    judged.probe(GONE, times=3)
    assert judged.probe(RISEN) == "pg2"
    assert judged.probe(LIVES, times=3) == "pg2"  # it came back too late


def test_promotion_by_hand_beside_a_living_primary_is_followed_where_others_promote():
    judged = Judged("pg1", "pg2", follow=True)
    judged.probe(LIVES, STANDS)
    assert judged.probe(RISEN) == "pg2"
    assert judged.probe(LIVES) == "pg2"
    assert not judged.memory.usurpers


def test_promotion_of_ours_is_adopted_beside_a_living_primary():
    judged = Judged("pg1", "pg2")
    judged.probe(LIVES, STANDS)
    judged.memory = replace(judged.memory, promoting="pg2")
    assert judged.probe(RISEN) == "pg2"


def test_promotion_that_is_heard_of_late_is_adopted_though_the_old_primary_is_back_as_well():
    # Both were down and rise together: the newer timeline was noted, so the older one has nothing to defend.
    judged = Judged("pg1", "pg2", "pg3")
    judged.probe(LIVES, STANDS, THIRD)
    judged.probe(GONE, silent("pg2"), times=3)
    judged.probe(RISEN, LIVES)
    assert judged.probe(RISEN, LIVES) == "pg2"
    assert judged.memory.epoch.timeline == 2


# What is remembered.


def test_remember_former_primary_until_it_receives_from_the_new_one():
    judged = Judged("pg1", "pg2", "pg3", follow=True)
    judged.probe(LIVES, STANDS, THIRD)
    judged.probe(GONE, times=3)
    judged.probe(RISEN)
    assert judged.memory.former == ("pg1",)
    judged.probe(follower("pg1", of="pg2"))
    assert judged.memory.former == ("pg1",)
    judged.probe(follower("pg1", of="pg2", receiver_streaming=True))  # still on its old timeline
    assert judged.memory.former == ("pg1",)
    judged.probe(follower("pg1", of="pg2", receiver_streaming=True, timeline=2))
    assert not judged.memory.former


def test_remember_primary_is_no_former_one():
    judged = Judged("pg1", "pg2", memory=with_memory(former=("pg2",)))
    judged.probe(GONE, RISEN)
    assert (judged.memory.epoch.primary, judged.memory.former) == ("pg2", ("pg1",))


def synchronous(names: str | None, standbys: int) -> NodeState:
    answer = replace(LIVES.answer, synchronous_standby_names=names, synchronous_standbys=standbys)  # type: ignore[type-var]
    return replace(LIVES, result=answer, answer=answer)


def test_remember_synchronous_standbys_as_many_as_there_ever_were():
    # One that is away may have acknowledged the last commit.
    judged = Judged("pg1", "pg2")

    def known() -> tuple[str, int]:
        return judged.memory.synchronous_standby_names, judged.memory.synchronous_standbys

    judged.probe(synchronous("ANY 1 (*)", 2), STANDS)
    assert known() == ("ANY 1 (*)", 2)
    judged.probe(synchronous("ANY 1 (*)", 1))
    assert known() == ("ANY 1 (*)", 2)
    judged.probe(synchronous(None, 0))  # the probe may no longer see it
    assert known() == ("ANY 1 (*)", 2)
    judged.probe(GONE, times=3)
    assert known() == ("ANY 1 (*)", 2)
    judged.probe(synchronous("ANY 1 (pg2)", 1), times=2)
    assert known() == ("ANY 1 (pg2)", 1)
    judged.probe(synchronous("", 0))
    assert known() == ("", 0)


def test_remember_keeps_what_an_operator_and_a_failover_have_noted():
    memory = with_memory(paused=True, promoting="pg2", promoted_at=5.0)
    judged = Judged("pg1", "pg2", memory=memory)
    judged.probe(LIVES, STANDS)
    assert (judged.memory.paused, judged.memory.promoting, judged.memory.promoted_at) == (True, "pg2", 5.0)


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
