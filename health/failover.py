"""When a standby takes over, which, and in what steps: decisions alone, from a world that is handed in.

1. hindrance() holds every reason not to promote. What is not known is a reason.
2. failover() and switchover() yield one step at a time and are handed the world that came of it. Nothing is kept
   between two steps but what the world shows (Memory included): begun again in the middle, they go on.
3. No step is taken unless what the one before it was for is seen to be true.

Called by health.keeper. Manual: "Failover", "Synchronous Replication". When not to promote was learnt from Patroni
(ha.py), repmgr (standby_disconnect_on_failover, primary_visibility_consensus) and pg_auto_failover.
"""

from __future__ import annotations

import enum
from collections.abc import Generator, Iterable, Sequence
from typing import Final

from msgspec import Struct

from health import conninfo, judge, synchronous
from health.judge import NodeState
from health.view import Admin, Memory, Mode, Outcome, Status

_ROUSE_EVERY: Final = 10.0  # seconds: a primary that is idle, and that we alone do not reach, is left alone between


class FailoverRules(Struct, frozen=True):
    """What an operator allows; times in seconds, positions in bytes."""

    mode: Mode = Mode.FOLLOW
    quorum: int = 0  # nodes that have to be seen; 0: the majority
    max_lag_bytes: int = 1 << 20  # behind what the primary was seen to have written
    cool_off: float = 30.0  # between two failovers
    startup_grace: float = 10.0  # from our own start on, for a primary that we have not seen at work
    fences: bool = False  # there is a command that stops the old primary
    demotes: bool = False  # there is a command that makes it a standby


class World(Struct, frozen=True):
    """A cluster as it is now: what all probes said, what is remembered, and what became of the last step."""

    states: tuple[NodeState, ...]
    memory: Memory
    rules: FailoverRules
    now: float  # monotonic, as in the states
    wall: float  # seconds since 1970
    started_at: float  # monotonic: when watching began
    failures: dict[str, str] = {}  # of the last step, by node: what went wrong there

    @property
    def primary(self) -> NodeState | None:
        """The last primary, dead or alive."""
        return self.state(self.memory.epoch.primary)

    def state(self, name: str | None) -> NodeState | None:
        """Return a node by its name."""
        return next((state for state in self.states if state.node.name == name), None)

    def seen(self) -> list[NodeState]:
        """Return the nodes that answered when asked last, but for those of another cluster."""
        return [
            state
            for state in self.states
            if state.result is not None and state.result.outcome is Outcome.ANSWERED and self.is_ours(state)
        ]

    def is_ours(self, state: NodeState) -> bool:
        """Is the node of this cluster, by what it said last?"""
        identity = self.memory.epoch.system_identifier
        return identity is None or state.result is None or state.result.system_identifier in (None, identity)

    def standbys(self) -> list[NodeState]:
        """Return those among them that are in recovery."""
        return [state for state in self.seen() if state.tells(in_recovery=True)]


class Action(enum.Enum):
    """What a step does."""

    CHECKPOINT = "checkpoint"  # write what is dirty on these nodes now, so that a shutdown has little to write
    HOLD = "hold"  # let no transaction begin
    DRAIN = "drain"  # wait for those that run to end
    CATCH_UP = "catch up"  # wait until the node has replayed what the primary has written
    FREEZE = "freeze"  # let the nodes receive from nobody, and see that they do not
    FENCE = "fence"  # run fence_command
    DEMOTE = "demote"  # run demote_command, until the old primary is none any more
    REMEMBER = "remember"  # note on disk that the node is to be promoted; no node: that none is
    PROMOTE = "promote"  # make the node a primary, and see that it is one
    ADOPT = "adopt"  # send the clients there, and note that on disk
    RELEASE = "release"  # let transactions begin
    LEAD = "lead"  # begin to let the nodes receive from the new primary


class Step(Struct, frozen=True):
    """One thing to do, to these nodes."""

    action: Action
    nodes: tuple[str, ...] = ()


class AbandonedError(Exception):
    """Nothing was promoted; the text says why."""


Plan = Generator[Step, World, str]


def hindrance(world: World, wanted: str | None = None) -> str | None:
    """Say why no standby is to be promoted now; None when one is.

    An operator who names the one that is *wanted* has decided what else is left to rules: when, and how much is lost.
    """
    memory, rules, primary = world.memory, world.rules, world.primary
    if primary is None:
        return "no primary was ever seen" if wanted is None else _unfit(world, wanted)
    name = primary.node.name
    if why := _unsure_of_promotion(world):
        return None if wanted == name and primary.claims else why
    if primary.status is not Status.DOWN and not (wanted and primary.tells(in_recovery=True)):
        return f"{name} is {primary.status}" + (f" ({primary.reason})" if primary.reason else "")
    if primary in world.seen() and primary.tells(in_recovery=False):
        return f"{name} answers again"  # once; it takes more to be up
    # One that is a standby itself commits nothing, whoever receives from it.
    receiving = [] if primary in world.standbys() else _receiving(world)
    if receiving:
        return _still_receive(receiving, name)
    if wanted is None:
        if rules.mode is Mode.FOLLOW:
            return "somebody else promotes (failover.mode is follow)"
        if memory.paused:
            return "failover is paused"
        if primary.admin is not Admin.READY:
            return f"an operator has taken {name} out"
        if primary.answer is None and (why := _mistrust(world)):
            return why
        if memory.promoting is None and world.wall - memory.promoted_at < rules.cool_off:
            ago = world.wall - memory.promoted_at
            return f"the last failover was {ago:.0f} s ago (failover.cool_off {rules.cool_off:g} s)"
        needed = rules.quorum or len(world.states) // 2 + 1
        if len(world.seen()) < needed:
            return f"{len(world.seen())} of {len(world.states)} nodes are seen, {needed} have to be (failover.quorum)"
        if why := _unsure_of_commits(world):
            return why
        chosen = candidate(world)
        return chosen if isinstance(chosen, str) else None
    return _unfit(world, wanted)


def _unsure_of_promotion(world: World) -> str | None:
    """Say why a primary that is back may be one of yesterday, although nobody is seen on a newer timeline."""
    primary, begun = world.primary, world.state(world.memory.promoting)
    if primary is None or begun in (None, primary) or primary.status is Status.DOWN or begun.answer is not None:
        return None
    name, chosen = primary.node.name, begun.node.name
    return f"{chosen} may have been promoted before the gateway started, and is not seen: PROMOTE {name} if it was not"


def _still_receive(states: Sequence[NodeState], primary: str) -> str:
    if any(state.answer and state.answer.receiver_streaming is None for state in states):
        return f"whether {_names(states)} receive from {primary} is not to be seen: grant pg_monitor to probe_user"
    return f"{_names(states)} still receive{'s' * (len(states) == 1)} from {primary}"


def _unfit(world: World, wanted: str) -> str | None:
    return None if world.state(wanted) in world.seen() else f"{wanted} does not answer"


def _mistrust(world: World) -> str | None:
    """Say why a primary that only the state file knows is not given up yet."""
    primary, epoch, rules = world.primary, world.memory.epoch, world.rules
    assert primary is not None
    # A failover that was under way had waited long enough before.
    if world.memory.promoting is None and world.now - world.started_at < rules.startup_grace:
        return f"the gateway has just started (failover.startup_grace {rules.startup_grace:g} s)"
    if not any(_timeline(state) == epoch.timeline and state.result.system_identifier for state in world.standbys()):  # type: ignore[union-attr]
        return f"{primary.node.name} is known from an earlier run alone, and no standby confirms it"
    return None


def _unsure_of_commits(world: World) -> str | None:
    """Say why a commit that was acknowledged may be on none of the standbys that are seen."""
    memory = world.memory
    try:
        rule = synchronous.parse(memory.synchronous_standby_names)
    except ValueError as error:
        return str(error)
    if rule is None:
        return None
    fitting = [state for state in world.standbys() if rule.fits(_application_name(state))]
    members = [state for state in world.states if state.tells(in_recovery=True) and rule.fits(_application_name(state))]
    known = max(memory.synchronous_standbys, len(members), len(world.states) - 1 if rule.is_for_all else 0)
    needed = rule.needed(known, memory.application_name)
    if len(fitting) < needed:
        return (
            f"{len(fitting)} standbys of synchronous_standby_names are seen, only {needed} of them together are sure "
            "to have every acknowledged commit"
        )
    return None


def candidate(world: World) -> NodeState | str:
    """Return the standby to promote, or in words why there is none."""
    memory, primary = world.memory, world.primary
    fit = [state for state in world.standbys() if state.node.name != memory.epoch.primary]
    fit = [state for state in fit if state.admin is Admin.READY and state.status is Status.UP]
    fit = [state for state in fit if state.node.priority > 0]
    if not fit:
        return "no standby is up that may be promoted"
    # One on a newer timeline follows a primary that we have not seen, or do not want: its position says nothing.
    fit = [state for state in fit if _timeline(state) == memory.epoch.timeline and _position(state) is not None]
    if not fit:
        return f"no standby is known to be on timeline {memory.epoch.timeline}"
    rule = synchronous.parse(memory.synchronous_standby_names)
    if rule is not None:
        fit = [state for state in fit if rule.fits(_application_name(state))]
        members = [state for state in world.standbys() if rule.fits(_application_name(state))]
        # On an older timeline there is no commit of this one.
        members = [state for state in members if not 0 < _timeline(state) < memory.epoch.timeline]
        ahead = max((_position(state) or 0 for state in members), default=0)
        fit = [state for state in fit if (_position(state) or 0) >= ahead]
        if not fit:
            return "the standby that may have the last commit may not be promoted"
    # One that a gateway has chosen before it died may have been told already.
    begun = memory.promoting
    chosen = min(fit, key=lambda state: (-(_position(state) or 0), state.node.name != begun, _preference(state)))
    written = primary.answer.current_lsn if primary is not None and primary.answer is not None else None
    if written is not None and (lag := written - (_position(chosen) or 0)) > world.rules.max_lag_bytes:
        return f"{chosen.node.name} lacks {lag} bytes that were written (failover.max_lag_on_failover)"
    return chosen


def rousable(world: World) -> list[str]:
    """Return the standbys whose receiver is to start again, as its silence does not tell whether the primary lives.

    Who finds the primary there streams again at once, and that forbids a failover.
    """
    primary = world.primary
    if world.rules.mode is Mode.FOLLOW or primary is None or primary.doubted_at is None:
        return []
    if primary.result is None or primary.result.outcome is Outcome.REFUSED:
        return []  # who received from a process that has ended sees that by himself
    since = max(primary.doubted_at, world.now - _ROUSE_EVERY)
    return [state.node.name for state in _receiving(world) if state.moved_at is None or state.moved_at < since]


def failover(world: World, wanted: str | None = None) -> Plan:
    """Make a standby the primary after the one there was has died. Raises AbandonedError.

    Those who are seen and frozen are so many that the others are too few to acknowledge a commit: from then on none is
    that the one who is chosen among them does not have.
    """
    old = world.memory.epoch.primary
    begun = world.memory.promoting if wanted is None else None
    world = yield Step(Action.HOLD)
    if begun is not None:
        state = world.state(begun)
        if state is not None and (state.claims or (state in world.standbys() and world.primary in world.standbys())):
            return (yield from _take_over(world))
        # By a gateway that died, perhaps long ago: everything is asked anew.
        why = _unsure_of_promotion(world)
        if why is None and state is not None and not _is_frozen(state):
            why = _still_ends(world)
        if why is not None:
            yield Step(Action.RELEASE)
            raise AbandonedError(why)
        if why := hindrance(world):
            return (yield from _give_up(world, f"{begun} cannot be promoted any more: {why}"))
    world = yield Step(Action.FREEZE, tuple(state.node.name for state in _followers(world)))
    loose = world.failures
    if world.rules.fences and world.primary is not None and old not in (None, wanted):
        world = yield Step(Action.FENCE, (old,))
        if old in world.failures:
            return (yield from _give_up(world, f"fence_command failed: {world.failures[old]}"))
    late = [state.node.name for state in _followers(world) if not _is_frozen(state)]
    loose = dict.fromkeys(late, "it was not seen before") | loose
    loose = {name: why for name, why in loose.items() if world.state(name) in world.standbys()}
    why = f"{_names(loose)} cannot be kept from receiving: {next(iter(loose.values()))}" if loose else None
    if why := why or hindrance(world, wanted):
        return (yield from _give_up(world, why))
    if wanted is None:
        chosen = candidate(world)
        assert isinstance(chosen, NodeState)  # or there were a hindrance
        wanted = chosen.node.name
    world = yield Step(Action.REMEMBER, (wanted,))
    if world.failures:
        return (yield from _give_up(world, next(iter(world.failures.values()))))
    if (state := world.state(wanted)) and not state.claims and (why := hindrance(world, wanted)):
        # What was so when it was remembered is so no more.
        return (yield from _give_up(world, f"{wanted} cannot be promoted any more: {why}"))
    return (yield from _take_over(world))


def _give_up(world: World, why: str) -> Plan:
    if world.memory.promoting is not None:
        yield Step(Action.REMEMBER)
    yield Step(Action.RELEASE)
    raise AbandonedError(why)


def _still_ends(world: World) -> str | None:
    """Say why the primary that a switchover has told to be one no more cannot be taken for gone, nor for back, yet."""
    primary = world.primary
    if primary is None or primary in world.seen():
        return None
    name, receiving = primary.node.name, _receiving(world)
    if receiving:
        return _still_receive(receiving, name)
    if primary.status is Status.DOWN or (primary.result is not None and primary.result.outcome is Outcome.REFUSED):
        return None
    return f"{name} is {primary.status}" + (f" ({primary.reason})" if primary.reason else "")


def switchover(world: World, target: str, *, force: bool = False) -> Plan:
    """Let a standby and the primary change places while both live. Raises AbandonedError.

    By *force* transactions that do not end in time are ended by it, else they end the switchover.
    """
    primary = world.primary
    if why := cannot_switch(world, target):
        raise AbandonedError(why)
    assert primary is not None
    old = primary.node.name
    world = yield Step(Action.CHECKPOINT, (old, target))  # who may not need not
    for step in (
        Step(Action.HOLD),
        Step(Action.DRAIN),
        Step(Action.CATCH_UP, (target,)),
        Step(Action.REMEMBER, (target,)),
        Step(Action.DEMOTE, (old, target)),
    ):
        world = yield step
        if world.failures and not (force and step.action is Action.DRAIN):
            if step.action in (Action.REMEMBER, Action.DEMOTE):
                yield Step(Action.REMEMBER)
            yield Step(Action.RELEASE)
            raise AbandonedError("; ".join(world.failures.values()))
    return (yield from _take_over(world))


def cannot_switch(world: World, target: str) -> str | None:
    """Say why the primary and a standby cannot change places now."""
    primary, state = world.primary, world.state(target)
    if primary is None or primary.status is not Status.UP or not primary.claims:
        return "there is no primary at work: PROMOTE makes a standby one"
    if not world.rules.demotes:
        return "failover.demote_command is not set: it makes the old primary a standby"
    if state is None:
        return f"there is no node {target}"
    if state is primary:
        return f"{target} is the primary"
    if state not in world.standbys():
        return f"{target} is no standby that answers"
    if _upstream(world, state) not in (None, primary.node.name) or state.answer.receiver_streaming is not True:  # type: ignore[union-attr]
        return f"{target} does not receive from {primary.node.name}"
    return None


def successor(world: World) -> str | None:
    """Return the standby that a switchover goes to when none is named: the one that got farthest."""
    fit = [state for state in world.standbys() if state.node.priority > 0 and state.admin is Admin.READY]
    fit = [state for state in fit if cannot_switch(world, state.node.name) is None]
    if not fit:
        return None
    return min(fit, key=_preference).node.name


def _take_over(world: World) -> Plan:
    """Promote the node that is remembered, and let everybody know: the end of each way to a new primary."""
    name = world.memory.promoting
    chosen, old = world.state(name), world.primary
    assert name is not None
    gone_back = old is not None and old is not chosen and old.tells(in_recovery=False) and old in world.seen()
    if chosen is None or (gone_back and not chosen.claims) or chosen.status is Status.DOWN:
        # Begun by a gateway that died, or the node has died since: there is nothing to go on with.
        return (yield from _give_up(world, f"{name} cannot be promoted any more"))
    if not chosen.claims:
        world = yield Step(Action.PROMOTE, (name,))
        if name in world.failures:
            return (yield from _give_up(world, f"{name} was not promoted: {world.failures[name]}"))
    world = yield Step(Action.ADOPT, (name,))
    world = yield Step(Action.RELEASE)
    # Below an old primary they would be stranded when it ends.
    passed = {*world.memory.former, old.node.name if old is not None else None} - {name, None}
    left = [state.node.name for state in world.standbys() if _upstream(world, state) in passed]
    if left and world.memory.epoch.primary == name:
        world = yield Step(Action.LEAD, tuple(left))
    if world.memory.epoch.primary != name:
        raise AbandonedError(f"{name} was promoted, but is not taken for the primary: see its reason in SHOW NODES")
    return f"{name} is the primary on timeline {world.memory.epoch.timeline}"


def repairs(world: World) -> list[str]:
    """Return the nodes that have to be led to the primary, or be thawed if it is the primary, while no plan runs.

    Left alone is who receives from a node of an operator's choice, a cascade included.
    """
    primary = world.primary
    if world.rules.mode is Mode.FOLLOW or primary is None or world.memory.promoting is not None:
        return []
    is_well = _is_well(world)
    found = []
    for state in world.seen():
        if state.answer is None or state.answer.conninfo is None:
            continue
        # Standbys that receive from each other in a ring stream, and get nothing.
        is_behind = state.answer.receiver_streaming is False or _timeline(state) < world.memory.epoch.timeline
        is_lost = is_behind and _upstream(world, state) in world.memory.former
        if conninfo.is_frozen(state.answer.conninfo) or (is_well and is_lost and state in world.standbys()):
            found.append(state.node.name)
    return found


def strays(world: World) -> list[str]:
    """Return the nodes that came back as primaries of yesterday, or became primaries on their own, to be rejoined."""
    primary = world.primary
    if world.rules.mode is Mode.FOLLOW or primary is None or world.memory.promoting is not None:
        return []
    if not _is_well(world):
        return []
    return [state.node.name for state in world.seen() if state.claims and state is not primary]


def _is_well(world: World) -> bool:
    """Is the last primary at work, and no newer timeline known than its own?"""
    primary = world.primary
    if primary is None or primary.status is not Status.UP or not primary.claims:
        return False
    return _timeline(primary) >= world.memory.epoch.timeline


def _followers(world: World) -> list[NodeState]:
    """Return the standbys that may receive from the primary, now or when it comes back.

    One that receives from another standby does not, if that is seen and so tells for itself.
    """
    others = {state.node.name for state in world.seen()} - {world.memory.epoch.primary}
    return [state for state in world.standbys() if _upstream(world, state) not in others]


def _receiving(world: World) -> list[NodeState]:
    """Return those that do now, as far as they know; one that takes no further connection has told it as well."""
    others = {state.node.name for state in world.seen()} - {world.memory.epoch.primary}
    return [
        state
        for state in world.states
        if state.result is not None
        and state.result.in_recovery
        and state.result.receiver_streaming is not False
        and state is not world.primary
        and world.is_ours(state)
        and _upstream(world, state) not in others
    ]


def _is_frozen(state: NodeState) -> bool:
    return state.answer is not None and conninfo.is_frozen(state.answer.conninfo or "")


def _upstream(world: World, state: NodeState) -> str | None:
    return judge.upstream(world.states, state)


def _preference(state: NodeState) -> tuple[int, int, str]:
    """Order standbys, the best first; two gateways that look at the same nodes choose the same one."""
    return -(_position(state) or 0), -state.node.priority, state.node.name


def _application_name(state: NodeState) -> str | None:
    return state.answer.application_name if state.answer else None


def _timeline(state: NodeState) -> int:
    return (state.answer.timeline if state.answer else None) or 0


def _position(state: NodeState) -> int | None:
    """Return how far a standby got: what it received counts, for all of it is replayed before a promotion ends."""
    if state.answer is None:
        return None
    seen = [lsn for lsn in (state.answer.received_lsn, state.answer.replayed_lsn) if lsn is not None]
    return max(seen, default=None)


def _names(states: Iterable[NodeState | str]) -> str:
    return ", ".join(state if isinstance(state, str) else state.node.name for state in states)
