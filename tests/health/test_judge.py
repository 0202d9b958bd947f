"""What a row of probes makes of one node, what is news in a view, and when the next probe is due."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from health import judge
from health.view import Admin, ClusterView, Epoch, Memory, Node, Outcome, ProbeResult, Role, Rules, Status

from .worlds import RULES, answered, failed, primary, rejected, roles, standby

NODE = Node("pg1", "10.0.0.1")
GOOD, BAD = answered(), failed()
UP, DOWN, STARTING, SATURATED, MISCONFIGURED = (
    Status.UP,
    Status.DOWN,
    Status.STARTING,
    Status.SATURATED,
    Status.MISCONFIGURED,
)


def after(*results: ProbeResult, rules: Rules = RULES) -> judge.NodeState:
    state = judge.first_state(NODE, rules, 0.0)
    for now, result in enumerate(results, start=1):
        state = judge.judge(state, result, rules, float(now))
    return state


@pytest.mark.parametrize(
    ("results", "status"),
    [
        ([], UP),
        ([GOOD], UP),
        ([BAD], DOWN),  # the first probe decides
        ([GOOD, BAD, BAD], UP),
        ([GOOD, BAD, BAD, BAD], DOWN),
        ([GOOD, BAD, BAD, GOOD, BAD, BAD], UP),  # fall counts failures in a row
        ([BAD, GOOD], DOWN),
        ([BAD, GOOD, GOOD], UP),
        ([BAD, GOOD, BAD, GOOD], DOWN),  # rise too
        ([GOOD, rejected("53300")], SATURATED),
        ([GOOD, rejected("53300"), GOOD], UP),  # it was never down, so it need not rise
        ([GOOD, rejected("57P03")], STARTING),
        ([GOOD, BAD, BAD, rejected("57P03"), BAD, BAD], STARTING),  # an answer breaks the silence
        ([GOOD, BAD, BAD, rejected("57P03"), BAD, BAD, BAD], DOWN),
        ([BAD, rejected("57P03")], STARTING),
        ([BAD, rejected("57P03"), GOOD], STARTING),  # it was down, so it has to rise
        ([BAD, rejected("57P03"), GOOD, GOOD], UP),
        ([GOOD, failed(Outcome.LOCAL), failed(Outcome.LOCAL), failed(Outcome.LOCAL), failed(Outcome.LOCAL)], UP),
        ([BAD, failed(Outcome.LOCAL)], DOWN),
        ([GOOD, *[rejected("53300")] * 9], SATURATED),
    ],
)
def test_judge_row_of_probes_gives_status(results, status):
    assert after(*results).status is status


@pytest.mark.parametrize(
    ("result", "status"),
    [
        (rejected("53300", "sorry, too many clients already"), SATURATED),
        (rejected("53200"), SATURATED),
        (rejected("57P01"), STARTING),
        (rejected("57P02"), STARTING),
        (rejected("57P03", "the database system is starting up"), STARTING),
        (rejected("57P04"), MISCONFIGURED),
        (rejected("28P01"), MISCONFIGURED),
        (rejected("28000"), MISCONFIGURED),
        (rejected("3D000"), MISCONFIGURED),
        (rejected("42501"), MISCONFIGURED),
        (rejected("P0001", "disk is nearly full"), MISCONFIGURED),  # an operator's own check raises it
        (rejected("08P01"), MISCONFIGURED),
        (rejected(""), MISCONFIGURED),
        (rejected("57014"), DOWN),
        (failed(Outcome.UNRESOLVED), MISCONFIGURED),
        (failed(Outcome.LOCAL), None),
        (failed(Outcome.SILENT), DOWN),
        (failed(Outcome.REFUSED), DOWN),
        (failed(Outcome.RESET), DOWN),
        (failed(Outcome.UNREACHABLE), DOWN),
        (answered(), UP),
    ],
)
def test_evidence_one_result_speaks_for_status(result, status):
    assert judge.evidence(result) is status


@pytest.mark.parametrize("fall", [1, 2, 5])
@pytest.mark.parametrize("rise", [1, 2, 5])
def test_judge_any_rise_and_fall_are_counted_exactly(fall, rise):
    rules = Rules(fall=fall, rise=rise)
    assert after(GOOD, *[BAD] * (fall - 1), rules=rules).status is UP
    assert after(GOOD, *[BAD] * fall, rules=rules).status is DOWN
    assert after(BAD, *[GOOD] * rise, rules=rules).status is UP
    if rise > 1:
        assert after(BAD, *[GOOD] * (rise - 1), rules=rules).status is DOWN


def test_judge_reason_follows_what_is_wrong():
    assert after().reason == "not probed yet"
    assert after(GOOD).reason == ""
    assert after(GOOD, BAD).reason == "no answer within 2 s"
    assert after(BAD, GOOD).reason == "no answer within 2 s"  # still down, for the old reason
    assert after(BAD, GOOD, GOOD).reason == ""


def test_judge_since_is_when_status_changed():
    assert after(GOOD, BAD, BAD, BAD, BAD, BAD).since == 4.0


def test_judge_rejected_probe_that_told_the_role_renews_the_answer():
    told = replace(rejected("53300"), in_recovery=True, timeline=2)
    assert after(GOOD, told).answer == told
    assert after(GOOD, rejected("53300")).answer == GOOD


def test_administer_node_in_maintenance_shows_it_and_is_judged_all_the_same():
    state = judge.judge(judge.administer(after(GOOD), Admin.MAINT), GOOD, RULES, 9.0)
    assert state.status is UP
    choice = judge.choose_primary([state], Memory())
    (view,) = judge.draw_view("main", 1, [state], choice).nodes
    assert (view.status, view.role) == (Status.MAINT, Role.PRIMARY)


def draw(*states: judge.NodeState, epoch: Epoch | None = None) -> ClusterView:
    return judge.draw_view("main", 1, states, judge.choose_primary(states, Memory(epoch=epoch or Epoch())))


def test_view_lag_is_written_less_replayed_and_unknown_is_not_zero():
    view = draw(
        primary("pg1"), standby("pg2", replayed=400), standby("pg3", replayed=None), standby("pg4", replayed=2000)
    )
    assert [node.lag_bytes for node in view.nodes] == [None, 600, None, 0]
    assert [node.lag_bytes for node in draw(standby("pg1"), standby("pg2")).nodes] == [None, None]


def test_view_as_message_comes_back_the_same():
    view = draw(primary("pg1"), standby("pg2"))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(view), type=ClusterView) == view
    assert view.node("pg2").role is Role.STANDBY
    with pytest.raises(KeyError):
        view.node("pg9")


def test_changes_first_view_tells_all():
    assert judge.changes(None, draw(primary("pg1"), standby("pg2"))) == [
        "primary is pg1 on timeline 1",
        "pg1 is primary, up",
        "pg2 is standby, up",
    ]


def test_changes_of_figures_alone_are_none():
    old = draw(primary("pg1"), standby("pg2"))
    nodes = tuple(replace(node, latency=0.5, lag_bytes=77) for node in old.nodes)
    assert judge.changes(old, replace(old, nodes=nodes)) == []


def test_changes_promotion_tells_primary_and_both_nodes():
    old = draw(primary("pg1"), standby("pg2"))
    new = draw(primary("pg1"), primary("pg2", 2), epoch=old.epoch)
    assert judge.changes(old, new) == [
        "primary is pg2 on timeline 2",
        "pg1 is false primary, up: says that it is primary on timeline 1, but the cluster is on 2",
        "pg2 is primary, up",
    ]


def test_changes_address_moved_is_news():
    old = draw(primary("pg1"))
    new = replace(old, nodes=(replace(old.nodes[0], addresses=("10.0.0.9",)),))
    assert judge.changes(old, new) == ["pg1 has address 10.0.0.9"]


@pytest.mark.parametrize(
    ("state", "seconds"),
    [
        (after(GOOD), RULES.probe_interval),
        (after(GOOD, BAD), RULES.probe_interval_fast),  # up, but silent
        (after(BAD, GOOD), RULES.probe_interval_fast),  # down, but answers
        (after(GOOD, BAD, BAD, BAD), RULES.probe_interval_fast),  # no primary at work
        (after(GOOD, rejected("53300")), RULES.probe_interval),
        (after(GOOD, rejected("57P03")), RULES.probe_interval_fast),
        (after(GOOD, failed(Outcome.LOCAL)), RULES.probe_interval),
    ],
)
def test_pause_is_short_while_in_doubt(state, seconds):
    assert judge.pause(state, [state], draw(state).primary, RULES, 9.0, 0.5) == seconds


def test_pause_wrong_password_is_tried_ever_less_often():
    state = after(rejected("28P01"))
    pauses = [
        judge.pause(state, [state], draw(state).primary, RULES, state.since + age, 0.5)
        for age in (0.0, 6.0, 20.0, 3600.0)
    ]
    assert pauses == [1.0, 3.0, 10.0, 15.0]


def test_pause_jitter_spreads_either_way():
    rules = replace(RULES, jitter=0.1)
    state = after(GOOD)
    pauses = [judge.pause(state, [state], draw(state).primary, rules, 9.0, chance) for chance in (0.0, 0.5, 1.0)]
    assert pauses == pytest.approx([0.9, 1.0, 1.1])


def test_roles_of_nodes_that_never_answered_are_unknown():
    states = [after(GOOD), judge.first_state(Node("pg2", "10.0.0.2"), RULES, 0.0)]
    assert roles(states, judge.choose_primary(states, Memory()))["pg2"] is Role.UNKNOWN
