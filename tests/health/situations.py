"""Worlds in which a failover is due, or just not, for the tests of what is decided then."""

from __future__ import annotations

from msgspec.structs import replace

from health import conninfo, judge
from health.failover import FailoverRules, World
from health.judge import NodeState
from health.view import Epoch, Memory, Mode, Node, Status

from .worlds import RULES, SYSTEM, dead, follower, primary, refusing, silent

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


P2 = Epoch("pg2", SYSTEM, 2, 2)
PROMOTED = with_memory(epoch=P2, former=("pg1",))


SATURATED = refusing(primary("pg1"), "53300", "too many clients already", Status.SATURATED)
GONE = silent("pg1")
LIVES, STANDS, RISEN = primary("pg1"), follower("pg2", receiver_streaming=True), primary("pg2", 2)


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
