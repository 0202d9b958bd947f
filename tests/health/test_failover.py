"""The steps of a failover and of a switchover, and what is mended between them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from health import failover, judge
from health.failover import AbandonedError, Action, FailoverRules, Plan, Step, World
from health.view import Admin, Memory, Mode, Outcome, Status

from .situations import (
    BOTH,
    FROZEN,
    MEMORY,
    OTHER,
    PROMOTED,
    SATURATED,
    died,
    frozen,
    make,
    prioritized,
    with_memory,
)
from .worlds import dead, follower, primary, refusing, seen_again, silent

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
        ("lead", "pg3"),
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
    assert actions(steps) == [("hold",), ("adopt", "pg2"), ("release",), ("lead", "pg3")]


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


UNSEEN = make(
    primary("pg1"), silent("pg2"), follower("pg3", receiver_streaming=True), memory=with_memory(promoting="pg2")
)


def test_failover_begun_before_by_who_may_have_ended_it_is_not_given_up_while_the_node_was_not_seen():
    # pg2 may have taken commits that pg1, which is back, knows nothing of.
    steps, said = play(failover.failover(UNSEEN), UNSEEN)
    assert actions(steps) == [("hold",), ("release",)]
    assert said == (
        "abandoned: pg2 may have been promoted before the gateway started, and is not seen: PROMOTE pg1 if it was not"
    )
    assert failover.hindrance(UNSEEN) == said.removeprefix("abandoned: ")


def test_failover_operator_says_that_the_node_that_was_not_seen_was_never_promoted():
    assert failover.hindrance(UNSEEN, "pg1") is None
    assert failover.hindrance(UNSEEN, "pg3") == failover.hindrance(UNSEEN)
    chosen = replace(UNSEEN, memory=with_memory(promoting="pg1"))
    froze = replace(UNSEEN, states=(primary("pg1"), silent("pg2"), frozen("pg3")))
    steps, said = play(failover.failover(UNSEEN, "pg1"), UNSEEN, froze, chosen)
    assert actions(steps) == [("hold",), ("freeze", "pg3"), ("remember", "pg1"), ("adopt", "pg1"), ("release",)]
    assert said == "pg1 is the primary on timeline 1"


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
        ("lead", "pg3"),
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
