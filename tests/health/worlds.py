"""Nodes, results and states for the tests of health, in few words."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from health import judge
from health.judge import NodeState
from health.view import Node, Outcome, ProbeResult, Role, Rules, Status

RULES = Rules(fall=3, rise=2, jitter=0.0)
SYSTEM = 7_000_000_000_000_000_001  # a system identifier


def answered(node: str = "pg1", **facts: object) -> ProbeResult:
    """A probe that went well; a primary on timeline 1 unless facts say otherwise."""
    facts = {"in_recovery": False, "timeline": 1, "system_identifier": SYSTEM, "addresses": ("10.0.0.1",)} | facts
    return ProbeResult(node, 0.0, Outcome.ANSWERED, **facts)  # type: ignore[arg-type]


def rejected(sqlstate: str, message: str = "no") -> ProbeResult:
    """A probe that was answered with an error."""
    return ProbeResult("pg1", 0.0, Outcome.REJECTED, sqlstate=sqlstate, message=message)


def failed(outcome: Outcome = Outcome.SILENT, message: str = "no answer within 2 s") -> ProbeResult:
    """A probe that was not answered."""
    return ProbeResult("pg1", 0.0, outcome, message=message)


def primary(
    name: str, timeline: int | None = 1, *, system: int | None = SYSTEM, status: Status = Status.UP
) -> NodeState:
    """A node whose last answer was that it is not in recovery."""
    return _state(name, status, answered(name, timeline=timeline, system_identifier=system, current_lsn=1000))


def standby(
    name: str,
    timeline: int | None = 1,
    *,
    system: int | None = SYSTEM,
    status: Status = Status.UP,
    streaming: bool | None = True,
    replayed: int | None = 900,
) -> NodeState:
    """A node whose last answer was that it is in recovery."""
    facts = {"in_recovery": True, "timeline": timeline, "system_identifier": system, "receiver_streaming": streaming}
    return _state(name, status, answered(name, **facts, replayed_lsn=replayed))


def silent(name: str, status: Status = Status.DOWN) -> NodeState:
    """A node that never told what it is."""
    return _state(name, status, None)


def roles(states: Sequence[NodeState], choice: judge.Choice) -> dict[str, Role]:
    """The role of each node in the view."""
    return {view.node.name: view.role for view in judge.draw_view("main", 1, states, choice).nodes}


def _state(name: str, status: Status, answer: ProbeResult | None) -> NodeState:
    result = answer or ProbeResult(name, 0.0, Outcome.SILENT)
    return NodeState(Node(name, f"{name}.example"), RULES.rise, status, 0.0, "", result=result, answer=answer)


def follower(name: str, of: str | None = "pg1", *, status: Status = Status.UP, **facts: object) -> NodeState:
    """A standby as a probe that may see everything finds it: it got all of timeline 1, and receives no more."""
    place = "" if of is None else f"host={of}.example port=5432 application_name={name}"
    facts = {"conninfo": place, "application_name": name, "receiver_streaming": False, "received_lsn": 1000} | facts
    return _state(name, status, answered(name, in_recovery=True, **facts))


def dead(state: NodeState, outcome: Outcome = Outcome.SILENT) -> NodeState:
    """A node that has not answered for long enough; what it told before is still known."""
    result = ProbeResult(state.node.name, 1.0, outcome, message="no answer within 2 s")
    return replace(state, status=Status.DOWN, reason=result.message, health=0, result=result, doubted_at=1.0)


def refusing(state: NodeState, sqlstate: str, message: str, status: Status) -> NodeState:
    """A node that answers with an error."""
    result = ProbeResult(state.node.name, 1.0, Outcome.REJECTED, sqlstate=sqlstate, message=message)
    return replace(state, status=status, reason=message, result=result)


def seen_again(state: NodeState) -> NodeState:
    """A node that was down and has answered once: that is not enough to be up."""
    return replace(dead(state), result=state.answer, health=1, doubted_at=None)
