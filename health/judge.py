"""The judgement: what a node's answers make of it, which node is the primary, and what of that is news.

1. Silence kills, an answer never does: only probes that got none count against `fall`.
2. A false primary is worse than none. No node takes writes on an older timeline than one that was seen, nor with
   another system identifier; of two that could, neither does.
3. What is seen in passing (a refused connect, 57P01, 25006) is not judged here: it only has the node probed at once.

Called by health.watch after each probe.
Manual: "Timelines"; "PostgreSQL Error Codes". The counting of rise and fall is that of HAProxy's check-t.h.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, assert_never

from msgspec import Struct
from msgspec.structs import replace

from health import conninfo
from health.view import Admin, ClusterView, Epoch, Memory, Node, NodeView, Outcome, ProbeResult, Role, Rules, Status

# What an error says of the server that sent it: the first prefix of its SQLSTATE that fits. Everything else (28xxx,
# 3D000, 42501, what an operator's server_check_query raises) says that probe and server are not made for each other.
_ERRORS: Final = (
    ("53", Status.SATURATED),
    ("57P04", Status.MISCONFIGURED),
    ("57P", Status.STARTING),
    ("57014", Status.DOWN),  # statement_timeout of the probe's user: as good as no answer in time
)

# A login that fails writes a line to the server's log: it is tried ever less often, up to this many seconds apart.
_PATIENCE: Final = 15.0

# No cluster has this system identifier: what the nodes of two clusters in equal number have in common.
_NO_CLUSTER: Final = 0


class NodeState(Struct, frozen=True):
    """What is known about one node. health counts, as HAProxy's does, both ways in one integer:

        0 ... rise - 1              down: each good probe adds one, a failed one goes back to 0
        rise ... rise + fall - 1    up: each failed probe takes one, a good one goes to the top; below rise it is 0

    A node begins at rise: up, but its first probe decides.
    doubted_at is when the first probe of a run of silence ended, claimed_at when a node first said of itself that it
    is a primary, moved_at when a standby last received something; None is never.
    """

    node: Node
    health: int
    status: Status
    since: float
    reason: str = "not probed yet"
    addresses: tuple[str, ...] = ()  # until the first probe has found others
    admin: Admin = Admin.READY
    result: ProbeResult | None = None  # the last one
    answer: ProbeResult | None = None  # the last one that told what the node is
    doubted_at: float | None = None
    claimed_at: float | None = None
    moved_at: float | None = None

    @property
    def claims(self) -> bool:
        """Does the node hold itself to be a primary? One that was down or restarts has to say so again."""
        return self.tells(in_recovery=False) and self.status not in (Status.DOWN, Status.STARTING)

    def tells(self, *, in_recovery: bool) -> bool:
        """Was this the last word that the node said about itself?"""
        return self.answer is not None and self.answer.in_recovery is in_recovery


class Choice(Struct, frozen=True):
    """The primary or None, the epoch that it makes, and what is wrong with the nodes that do not belong.

    usurpers are those among them that became primaries while the one there was lived.
    """

    primary: str | None
    epoch: Epoch
    strangers: dict[str, str]
    usurpers: tuple[str, ...] = ()


def first_state(node: Node, rules: Rules, now: float, addresses: tuple[str, ...] = ()) -> NodeState:
    """Return the state of a node that was never probed, at the addresses that an earlier watch knew."""
    return NodeState(node, health=rules.rise, status=Status.UP, since=now, addresses=addresses)


def evidence(result: ProbeResult) -> Status | None:
    """Say which status one result alone speaks for; None when it says nothing about the node."""
    match result.outcome:
        case Outcome.ANSWERED:
            return Status.UP
        case Outcome.REFUSED | Outcome.RESET | Outcome.UNREACHABLE | Outcome.SILENT:
            return Status.DOWN
        case Outcome.REJECTED:
            fits = (status for prefix, status in _ERRORS if result.sqlstate.startswith(prefix))
            return next(fits, Status.MISCONFIGURED)
        case Outcome.UNRESOLVED:
            return Status.MISCONFIGURED
        case Outcome.LOCAL:
            return None
        case never:
            assert_never(never)


def judge(state: NodeState, result: ProbeResult, rules: Rules, now: float) -> NodeState:
    """Return the state of a node after one more probe.

    An answer that refuses takes effect at once and breaks a run of silence; a node that was down still has to rise.
    """
    top = rules.rise + rules.fall - 1
    health, status, reason = state.health, state.status, result.message
    match seen := evidence(result):
        case None:
            pass
        case Status.UP:
            health += 1
            if health < rules.rise:
                reason = state.reason
            else:
                health, status, reason = top, Status.UP, ""
        case Status.DOWN:
            health = health - 1 if health > rules.rise else 0
            if health == 0:
                status = Status.DOWN
        case _:
            health = top if health >= rules.rise else 0
            status = seen
    doubted_at, claimed_at, moved_at = state.doubted_at, state.claimed_at, state.moved_at
    if seen is Status.DOWN:
        doubted_at = now if doubted_at is None else doubted_at
    elif seen is not None:
        doubted_at = None
    if result.in_recovery is not None:
        before = state.answer
        claimed_at = None if result.in_recovery else now if claimed_at is None else claimed_at
        if before is None or (before.received_lsn, before.received_at) != (result.received_lsn, result.received_at):
            moved_at = now
    return replace(
        state,
        health=health,
        status=status,
        since=state.since if status is state.status else now,
        reason=reason,
        result=result,
        answer=state.answer if result.in_recovery is None else result,
        doubted_at=doubted_at,
        claimed_at=claimed_at,
        moved_at=moved_at,
    )


def administer(state: NodeState, admin: Admin) -> NodeState:
    """Return the state of a node that an operator takes out or gives back; it is probed all the same."""
    return replace(state, admin=admin)


def choose_primary(
    states: Sequence[NodeState], memory: Memory, *, follow: bool = True, leader: str | None = None
) -> Choice:
    """Decide which node is the primary, once every node was probed or is the only one.

    It is the node not in recovery on the newest timeline that anybody was seen on, a node that streams from elsewhere
    included. The last primary remains it while it is silent, until it says otherwise or a newer timeline appears. A new
    one is adopted only if it is alone in its claim. A single node has no rival: it is the primary until it says that it
    is in recovery.

    When nobody else may promote (not follow), the last primary yields to a newer timeline only once it is down, and not
    to a node that claimed to be one while it lived. It yields at once to the node that we promote.
    Where a manager names the *leader*, nobody else is the primary, and it is one once it says so itself.
    """
    epoch, first = memory.epoch, states[0]
    known = epoch
    if len(states) == 1 and (first.answer or first.node.name != epoch.primary):
        known = Epoch(primary=first.node.name)
    identity = known.system_identifier or _common_identity(states)
    own = [state for state in states if not _is_foreign(state, identity)]
    holder = next((state for state in own if state.node.name == known.primary), None)
    heir = next((state for state in own if state.node.name == memory.promoting), None)

    usurpers = () if follow else _usurpers(own, holder, memory)
    if leader is not None:
        own = [state for state in own if state.node.name == leader or not state.tells(in_recovery=False)]
        holder = holder if holder in own else None
    own = [state for state in own if state.node.name not in usurpers]
    proofs = [s for s in own if _is_proof(s) and not (usurpers and upstream(states, s) in usurpers)]
    newest = max([known.timeline, *(_timeline(state) for state in proofs)])
    if heir is not None and heir.claims and _timeline(heir) > known.timeline:
        holder, newest = heir, _timeline(heir)
    elif not follow and holder is not None and holder.claims and _timeline(holder) >= known.timeline:
        newest = _timeline(holder)
    top = [state for state in own if state.tells(in_recovery=False) and _timeline(state) == newest]
    alone = [state for state in top if state.claims]

    primary = None
    if heir is not None and heir is not holder and heir.answer is None:
        pass  # a gateway that died has perhaps promoted it: what its predecessor commits would be lost
    elif holder is not None and (holder in top or (holder.answer is None and newest == known.timeline)):
        primary = holder.node.name
    elif len(alone) == 1:
        primary = alone[0].node.name

    is_news = primary is not None and (primary, newest) != (epoch.primary, epoch.timeline)
    return Choice(
        primary,
        Epoch(
            primary=primary or epoch.primary,
            system_identifier=identity or epoch.system_identifier,
            timeline=newest,
            number=epoch.number + is_news,
        ),
        {
            state.node.name: _strangeness(state, identity, newest)
            for state in states
            if _is_foreign(state, identity) or (state.claims and state.node.name != primary)
        },
        usurpers,
    )


def choose_gateway(states: Sequence[NodeState], memory: Memory) -> Choice:
    """Decide which of several gateways is used: the one that was, while it can be; else the highest priority that can.

    A gateway behind this one knows the primary, so what tells nodes apart (timeline, system identifier) is not asked.
    """
    epoch = memory.epoch
    fit = [state for state in states if state.admin is Admin.READY and state.status.serves]
    if any(state.node.name == epoch.primary for state in fit):
        return Choice(epoch.primary, epoch, {})
    if not fit:
        return Choice(epoch.primary or states[0].node.name, epoch, {})
    chosen = max(fit, key=lambda state: state.node.priority).node.name
    return Choice(chosen, Epoch(primary=chosen, number=epoch.number + 1), {})


def _usurpers(own: Sequence[NodeState], holder: NodeState | None, memory: Memory) -> tuple[str, ...]:
    """Find who became a primary while the one there was lived: that one has answered since, and holds itself for it."""
    lives_since = None
    if holder is not None and holder.claims and holder.result is not None and holder.result.outcome is Outcome.ANSWERED:
        # One of yesterday has no place that could be taken.
        lives_since = holder.result.at if _timeline(holder) >= memory.epoch.timeline else None
    found = []
    for state in own:
        name = state.node.name
        if name in (memory.promoting, memory.epoch.primary) or state.tells(in_recovery=True):
            continue  # one that is silent, or was never heard, is what it was
        came_later = lives_since is not None and state.claimed_at is not None and state.claimed_at < lives_since
        if name in memory.usurpers or came_later:
            found.append(name)
    return tuple(found)


def draw_view(
    name: str,
    version: int,
    states: Sequence[NodeState],
    choice: Choice,
    *,
    former: Sequence[str] = (),
    held: bool = False,
) -> ClusterView:
    """Put states and choice together; lag is what the primary had written when last asked less what was replayed.

    A *former* primary is a standby only once it receives from the one there is.
    """
    written = next(
        (state.answer.current_lsn for state in states if state.node.name == choice.primary and state.answer), None
    )
    nodes = tuple(_draw_node(state, choice, written, state.node.name in former) for state in states)
    return ClusterView(name, version, choice.epoch, choice.primary, nodes, held)


def remember(memory: Memory, states: Sequence[NodeState], choice: Choice) -> Memory:
    """Return what is to be remembered of a choice."""
    before, after = memory.epoch.primary, choice.epoch.primary
    returned = [s.node.name for s in states if _has_returned(s, choice.epoch)]
    former = tuple(name for name in memory.former if name not in returned and name != after)
    if before is not None and before != after and before not in former:
        former = (*former, before)
    answer = next((state.answer for state in states if state.node.name == choice.primary and state.answer), None)
    if answer is not None and answer.synchronous_standby_names is not None:
        names, standbys = answer.synchronous_standby_names, answer.synchronous_standbys
        if names == memory.synchronous_standby_names and before == after:
            standbys = max(standbys, memory.synchronous_standbys)  # one that is away may have the last commit
        memory = replace(
            memory,
            synchronous_standby_names=names,
            synchronous_standbys=standbys,
            application_name=answer.application_name,
        )
    return replace(memory, epoch=choice.epoch, former=former, usurpers=choice.usurpers)


def _has_returned(state: NodeState, epoch: Epoch) -> bool:
    """Does a node that was a primary receive from the one there is, as far as the probe may see?"""
    if state.answer is None or not state.answer.in_recovery:
        return False
    streaming = state.answer.receiver_streaming
    return streaming is None or (streaming and _timeline(state) == epoch.timeline)


def changes(old: ClusterView | None, new: ClusterView) -> list[str]:
    """Say in words what is new in a view; nothing when only figures (lag, latency) moved."""
    news = []
    if old is None or old.primary != new.primary:
        news.append(f"primary is {new.primary or 'unknown'} on timeline {new.epoch.timeline}")
    elif old.epoch != new.epoch:
        news.append(f"timeline is {new.epoch.timeline}")
    if new.paused != (old is not None and old.paused):
        news.append("failover is paused" if new.paused else "failover goes on")
    if new.hindrance and (old is None or old.hindrance != new.hindrance):
        news.append(f"no failover: {new.hindrance}")
    if new.held != (old is not None and old.held):
        news.append("transactions wait for the primary to change" if new.held else "transactions go on")
    before = {view.node: view for view in old.nodes} if old else {}
    for view in new.nodes:
        was = before.get(view.node)
        if was is None or (was.role, was.status, was.reason) != (view.role, view.status, view.reason):
            news.append(f"{view.node.name} is {view.role}, {view.status}" + (f": {view.reason}" if view.reason else ""))
        if was is not None and was.addresses != view.addresses:
            news.append(f"{view.node.name} has address {', '.join(view.addresses)}")
    return news


def pause(
    state: NodeState, states: Sequence[NodeState], primary: str | None, rules: Rules, now: float, chance: float
) -> float:
    """Return the seconds until the next probe of a node; chance is random, 0 to 1.

    It is soon while the last probe contradicts the verdict, or while the primary is not known to be at work.
    """
    seen = evidence(state.result) if state.result else None
    holder = next((other for other in states if other.node.name == primary), None)
    in_doubt = holder is None or holder.doubted_at is not None or holder.status in (Status.DOWN, Status.STARTING)
    if state.status is Status.MISCONFIGURED:
        interval = max(rules.probe_interval, min(_PATIENCE, (now - state.since) / 2))
    elif seen not in (None, state.status) or in_doubt:
        interval = rules.probe_interval_fast
    else:
        interval = rules.probe_interval
    return interval * (1 + rules.jitter * (2 * chance - 1))


def upstream(states: Sequence[NodeState], state: NodeState) -> str | None:
    """Return the node that a standby receives from, None when it is none of ours or not known."""
    text = state.answer.conninfo if state.answer else None
    place = conninfo.upstream(text) if text else None
    if place is None:
        return None
    for other in states:
        addresses = other.result.addresses if other.result else other.addresses
        if other is not state and place[1] == other.node.port and place[0] in (other.node.host, *addresses):
            return other.node.name
    return None


def _timeline(state: NodeState) -> int:
    return (state.answer.timeline if state.answer else None) or 0


def _is_proof(state: NodeState) -> bool:
    """Does the node's timeline prove that a primary is, or was, on it? That of a standby gone astray does not."""
    return state.answer is not None and (not state.answer.in_recovery or state.answer.receiver_streaming is True)


def _is_foreign(state: NodeState, identity: int | None) -> bool:
    seen = state.answer.system_identifier if state.answer else None
    return identity is not None and seen is not None and seen != identity


def _common_identity(states: Sequence[NodeState]) -> int | None:
    """Return the system identifier of most nodes that told one, None when no node did."""
    seen = Counter(s.answer.system_identifier for s in states if s.answer and s.answer.system_identifier is not None)
    if not seen:
        return None
    identity, count = seen.most_common(1)[0]
    return identity if 2 * count > seen.total() else _NO_CLUSTER


def _strangeness(state: NodeState, identity: int | None, newest: int) -> str:
    if _is_foreign(state, identity):
        assert state.answer is not None
        return f"system identifier {state.answer.system_identifier} is not that of the cluster"
    if _timeline(state) == newest:
        return f"says that it is primary too, on timeline {newest}"
    return f"says that it is primary on timeline {_timeline(state)}, but the cluster is on {newest}"


def _draw_node(state: NodeState, choice: Choice, written: int | None, was_primary: bool) -> NodeView:
    name = state.node.name
    reason = choice.strangers.get(name) or state.reason
    if name == choice.primary:
        role = Role.PRIMARY
    elif name in choice.strangers:
        role = Role.FALSE_PRIMARY if state.claims else Role.UNKNOWN
    else:
        role = Role.STANDBY if state.tells(in_recovery=True) and not was_primary else Role.UNKNOWN
        if state.tells(in_recovery=True) and state.answer.receiver_streaming is False:  # type: ignore[union-attr]
            reason = reason or "does not receive from a primary"
    replayed = state.answer.replayed_lsn if state.answer else None
    return NodeView(
        state.node,
        addresses=state.result.addresses if state.result else state.addresses,
        role=role,
        status=state.status if state.admin is Admin.READY else Status(state.admin.value),
        reason=reason,
        since=state.since,
        latency=state.result.latency if state.result else None,
        lag_bytes=None
        if written is None or replayed is None or role is not Role.STANDBY
        else max(0, written - replayed),
        admin=state.admin,
    )
