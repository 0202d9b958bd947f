"""Which node is the primary: the situations that split other systems' brains, and random worlds."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from health import judge
from health.judge import NodeState
from health.view import Epoch, Memory, Node, Outcome, ProbeResult, Role, Status

from .worlds import RULES, SYSTEM, primary, roles, silent, standby

OTHER = SYSTEM + 1
P1 = Epoch("pg1", SYSTEM, 1, 1)  # pg1 was primary on timeline 1
P2 = Epoch("pg2", SYSTEM, 2, 2)  # pg2 was promoted
FALSE = Role.FALSE_PRIMARY


@dataclass(frozen=True)
class Case:
    """What the nodes last said, what was known before, and who is the primary of it."""

    name: str
    states: list[NodeState]
    epoch: Epoch
    primary: str | None
    roles: dict[str, Role] = field(default_factory=dict)
    follow: bool = True


CASES = [
    Case("start", [primary("pg1"), standby("pg2"), standby("pg3")], Epoch(), "pg1"),
    Case("start_other_order", [standby("pg1"), standby("pg2"), primary("pg3")], Epoch(), "pg3"),
    Case("start_no_primary", [standby("pg1"), standby("pg2")], Epoch(), None),
    Case("start_primary_never_seen", [silent("pg1"), standby("pg2")], Epoch(), None, {"pg1": Role.UNKNOWN}),
    Case("primary_down_stays", [primary("pg1", status=Status.DOWN), standby("pg2")], P1, "pg1", {"pg1": Role.PRIMARY}),
    Case("primary_restarts_stays", [primary("pg1", status=Status.STARTING), standby("pg2")], P1, "pg1"),
    Case("primary_saturated_stays", [primary("pg1", status=Status.SATURATED), standby("pg2")], P1, "pg1"),
    Case("primary_misconfigured_stays", [primary("pg1", status=Status.MISCONFIGURED), standby("pg2")], P1, "pg1"),
    Case("promoted", [primary("pg1", status=Status.DOWN), primary("pg2", 2)], P1, "pg2", {"pg1": Role.UNKNOWN}),
    Case("old_primary_returns", [primary("pg1", 1), primary("pg2", 2)], P2, "pg2", {"pg1": FALSE}),
    Case("old_primary_returns_new_one_down", [primary("pg1", 1), primary("pg2", 2, status=Status.DOWN)], P2, "pg2"),
    # The gateway itself restarted meanwhile: the timeline decides, not the order.
    Case("no_memory_two_primaries", [primary("pg1", 1), primary("pg2", 2)], Epoch(), "pg2", {"pg1": FALSE}),
    Case("no_memory_other_order", [primary("pg1", 2), primary("pg2", 1)], Epoch(), "pg1", {"pg2": FALSE}),
    # Nor does it help that the new primary cannot be seen, if a standby streams from it.
    Case(
        "no_memory_new_one_unseen", [primary("pg1", 1), silent("pg2"), standby("pg3", 2)], Epoch(), None, {"pg1": FALSE}
    ),
    Case("unseen_promotion", [primary("pg1", 1), silent("pg2"), standby("pg3", 2)], P1, None, {"pg1": FALSE}),
    # A standby that does not stream from anybody proves nothing.
    Case("standby_astray", [primary("pg1", 1), standby("pg2", 2, streaming=False)], P1, "pg1"),
    Case("standby_hidden_receiver", [primary("pg1", 1), standby("pg2", 2, streaming=None)], P1, "pg1"),
    Case("promoted_beside_living", [primary("pg1", 1), primary("pg2", 2)], P1, "pg2", {"pg1": FALSE}),
    Case("promoted_by_nobody", [primary("pg1", 1), primary("pg2", 2)], P1, "pg1", {"pg2": FALSE}, follow=False),
    Case(
        "promoted_by_nobody_old_down", [primary("pg1", status=Status.DOWN), primary("pg2", 2)], P1, "pg2", follow=False
    ),
    Case("old_returns_not_following", [primary("pg1", 1), primary("pg2", 2)], P2, "pg2", {"pg1": FALSE}, follow=False),
    Case("two_on_one_timeline", [primary("pg1"), primary("pg2")], Epoch(), None, {"pg1": FALSE, "pg2": FALSE}),
    Case("two_on_one_timeline_known", [primary("pg1"), primary("pg2")], P1, "pg1", {"pg2": FALSE}),
    # A hiccup of the true primary must not hand its place to a false one.
    Case("known_one_down", [primary("pg1", status=Status.DOWN), primary("pg2")], P1, "pg1", {"pg2": FALSE}),
    Case(
        "two_promoted", [standby("pg1"), primary("pg2", 2), primary("pg3", 2)], P1, None, {"pg2": FALSE, "pg3": FALSE}
    ),
    Case("demoted", [standby("pg1"), standby("pg2")], P1, None, {"pg1": Role.STANDBY}),
    Case("switchover", [standby("pg1", 2), primary("pg2", 2)], P1, "pg2", {"pg1": Role.STANDBY}),
    Case("promoted_itself", [primary("pg1", 2), standby("pg2")], P1, "pg1"),
    Case("behind_its_own_epoch", [primary("pg2", 1), standby("pg1", 1)], P2, None, {"pg2": FALSE}),
    Case(
        "claim_of_a_dead_node", [standby("pg1"), primary("pg2", 2, status=Status.DOWN)], P1, None, {"pg2": Role.UNKNOWN}
    ),
    Case("claim_before_restart", [standby("pg1"), primary("pg2", 2, status=Status.STARTING)], P1, None),
    Case("other_cluster", [primary("pg1"), primary("pg2", 9, system=OTHER)], P1, "pg1", {"pg2": FALSE}),
    Case("other_cluster_standby", [primary("pg1"), standby("pg2", 9, system=OTHER)], P1, "pg1", {"pg2": Role.UNKNOWN}),
    Case("made_anew", [primary("pg1", system=OTHER), standby("pg2")], P1, None, {"pg1": FALSE}),
    Case(
        "no_memory_majority",
        [primary("pg1", 9, system=OTHER), primary("pg2", 1), standby("pg3")],
        Epoch(),
        "pg2",
        {"pg1": FALSE},
    ),
    Case("no_memory_even", [primary("pg1", system=OTHER), primary("pg2")], Epoch(), None, {"pg1": FALSE, "pg2": FALSE}),
    Case("identity_hidden", [primary("pg1", system=None), standby("pg2", system=None)], Epoch(), "pg1"),
    Case("watch_replaced_primary_silent", [silent("pg1"), standby("pg2")], P1, "pg1", {"pg1": Role.PRIMARY}),
    Case("watch_replaced_promoted_meanwhile", [silent("pg1"), primary("pg2", 2)], P1, "pg2"),
    Case("watch_replaced_primary_removed", [standby("pg2"), primary("pg3", 1)], P1, "pg3"),
    Case("alone_never_probed", [silent("pg1", Status.UP)], Epoch(), "pg1", {"pg1": Role.PRIMARY}),
    Case("alone_wrong_password", [silent("pg1", Status.MISCONFIGURED)], Epoch(), "pg1"),
    Case("alone_down", [silent("pg1", Status.DOWN)], Epoch(), "pg1"),
    Case("alone_standby", [standby("pg1")], Epoch(), None, {"pg1": Role.STANDBY}),
    Case("alone_made_anew", [primary("pg1", 1, system=OTHER)], Epoch("pg1", SYSTEM, 5, 1), "pg1"),
    Case("alone_renamed", [silent("pg9")], P1, "pg9"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_primary_situation_is_decided(case):
    choice = judge.choose_primary(case.states, Memory(epoch=case.epoch), follow=case.follow)
    assert choice.primary == case.primary
    seen = roles(case.states, choice)
    assert {name: seen[name] for name in case.roles} == case.roles


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_primary_asked_again_stays(case):
    first = judge.choose_primary(case.states, Memory(epoch=case.epoch), follow=case.follow)
    assert judge.choose_primary(case.states, Memory(epoch=first.epoch), follow=case.follow) == first


def test_primary_unseen_promotion_is_remembered_when_its_standby_is_gone():
    old, new = primary("pg1", 1), silent("pg2")
    choice = judge.choose_primary([old, new, standby("pg3", 2)], Memory(epoch=P1))
    choice = judge.choose_primary([old, new, silent("pg3")], Memory(epoch=choice.epoch))
    assert (choice.primary, choice.epoch.timeline) == (None, 2)


def test_primary_is_not_trusted_while_one_that_may_have_been_promoted_was_never_seen():
    memory = Memory(epoch=P1, promoting="pg2")
    states = [primary("pg1"), silent("pg2"), standby("pg3")]
    choice = judge.choose_primary(states, memory, follow=False)
    assert (choice.primary, choice.epoch) == (None, P1)
    assert roles(states, choice)["pg1"] is FALSE
    choice = judge.choose_primary([primary("pg1"), standby("pg2"), standby("pg3")], memory, follow=False)
    assert choice.primary == "pg1"


def test_epoch_number_grows_with_each_primary_alone():
    states = [primary("pg1"), standby("pg2")]
    choice = judge.choose_primary(states, Memory())
    assert choice.epoch == Epoch("pg1", SYSTEM, 1, 1)
    assert judge.choose_primary([standby("pg1"), standby("pg2")], Memory(epoch=choice.epoch)).epoch.number == 1
    assert judge.choose_primary([standby("pg1"), primary("pg2", 2)], Memory(epoch=choice.epoch)).epoch.number == 2


def test_false_primary_reason_tells_both_timelines():
    choice = judge.choose_primary(
        [primary("pg1", 1), primary("pg2", 2), primary("pg3", 2, system=OTHER)], Memory(epoch=P2)
    )
    assert choice.strangers == {
        "pg1": "says that it is primary on timeline 1, but the cluster is on 2",
        "pg3": f"system identifier {OTHER} is not that of the cluster",
    }


NAMES = ("pg1", "pg2", "pg3")
FACTS = st.fixed_dictionaries(
    {
        "in_recovery": st.booleans(),
        "timeline": st.sampled_from([None, 1, 2, 3]),
        "system_identifier": st.sampled_from([None, SYSTEM, SYSTEM, SYSTEM, OTHER]),
        "receiver_streaming": st.sampled_from([None, True, False]),
    }
)
RESULTS = st.one_of(
    st.builds(lambda name, facts: ProbeResult(name, 0.0, Outcome.ANSWERED, **facts), st.sampled_from(NAMES), FACTS),
    st.builds(ProbeResult, st.sampled_from(NAMES), st.just(0.0), st.sampled_from([Outcome.SILENT, Outcome.REFUSED])),
    st.builds(
        ProbeResult,
        st.sampled_from(NAMES),
        st.just(0.0),
        st.just(Outcome.REJECTED),
        st.just(()),
        st.sampled_from(["53300", "57P03", "28P01"]),
    ),
)


@given(st.integers(1, 3), st.lists(RESULTS, max_size=40), st.booleans())
def test_primary_random_world_never_has_two_nor_an_older_one(size, results, follow):
    states = {name: judge.first_state(Node(name, name), RULES, 0.0) for name in NAMES[:size]}
    epoch = Epoch()
    for now, result in enumerate(results):
        if result.node not in states:
            continue
        states[result.node] = judge.judge(states[result.node], result, RULES, float(now))
        choice = judge.choose_primary(list(states.values()), Memory(epoch=epoch), follow=follow)
        view = judge.draw_view("main", 1, list(states.values()), choice)

        assert [node.node.name for node in view.nodes if node.role is Role.PRIMARY] == (
            [] if view.primary is None else [view.primary]
        )
        assert view.epoch.number >= epoch.number
        if view.primary not in (None, epoch.primary):
            assert states[view.primary].status is not Status.DOWN or size == 1
            assert view.epoch.number == epoch.number + 1
        if view.primary and size > 1:
            answer = states[view.primary].answer
            assert answer is not None
            assert answer.in_recovery is False
            assert view.epoch.timeline == (answer.timeline or 0) >= epoch.timeline
            assert answer.system_identifier in (None, view.epoch.system_identifier)
        if size > 1:
            assert view.epoch.timeline >= epoch.timeline
            assert epoch.system_identifier in (None, view.epoch.system_identifier)
        epoch = choice.epoch
