"""The watch over one cluster: a task for each node that probes it, and the view that comes of their results.

1. Nothing is published before every node was probed once: the first to answer may be a primary of yesterday. A single
   node is believed at once.
2. A view is published when something in it is news, and its version then grows; the figures in `view` are always new.
3. A hint has a node probed at once, on a new connection, but no more often than four times in probe_interval_fast,
   and once while it does not answer.

Called by whoever serves the cluster, and by health.keeper. Manual: "Failover".
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence

import anyio
from msgspec.structs import replace

from health import judge
from health.judge import NodeState
from health.patroni import Managed
from health.probe import Probe
from health.view import Admin, ClusterView, Memory, Node, Rules, Status

log = logging.getLogger(__name__)


class Watch:
    """Watches one cluster for as long as run() runs; after is the last view of the watch that it replaces."""

    def __init__(
        self,
        cluster: str,
        probes: Sequence[Probe],
        rules: Rules,
        publish: Callable[[ClusterView], None],
        *,
        memory: Memory | None = None,
        after: ClusterView | None = None,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.probes = {probe.node.name: probe for probe in probes}
        self.started_at = clock()
        self._rules = rules
        self._publish = publish
        self._clock = clock
        self._chance = chance
        known = {(old.node.host, old.node.port): old.addresses for old in after.nodes} if after else {}
        admins = {old.node.name: old.admin for old in after.nodes} if after else {}
        self._states = {
            probe.node.name: judge.administer(
                judge.first_state(probe.node, rules, clock(), known.get((probe.node.host, probe.node.port), ())),
                admins.get(probe.node.name, Admin.READY),
            )
            for probe in probes
        }
        self._wakes: dict[str, anyio.Event] = {}
        self._locks = {name: anyio.Lock() for name in self._states}
        self._hinted: set[str] = set()
        self._tick = anyio.Event()
        self._published = False
        self._held = False
        self._hindrance = ""
        self._managed: Managed | None = None
        self._trouble = ""  # of the manager
        self.memory = memory or Memory(epoch=after.epoch if after else Memory().epoch)
        choice = judge.Choice(None, self.memory.epoch, {})
        self._view = judge.draw_view(cluster, after.version if after else 0, self.states, choice)

    @property
    def view(self) -> ClusterView:
        """The cluster as it is known now, with figures that were not worth publishing."""
        return self._view

    @property
    def states(self) -> tuple[NodeState, ...]:
        """What is known of each node."""
        return tuple(self._states.values())

    @property
    def is_complete(self) -> bool:
        """Was every node probed?"""
        return all(state.result is not None for state in self._states.values())

    def node(self, name: str | None) -> Node | None:
        """Return a node as it is configured."""
        state = self._states.get(name or "")
        return state.node if state else None

    async def run(self) -> None:
        """Probe all nodes until cancelled."""
        self._draw()
        async with anyio.create_task_group() as tasks:
            for name, probe in self.probes.items():
                tasks.start_soon(self._tend, probe, name=f"probe of {name}")

    async def probed(self) -> None:
        """Wait for the next result of a probe, or the next change by an operator."""
        await self._tick.wait()

    def hint(self, node: str) -> None:
        """Have a node probed at once: it refused a connect, sent 57P01 or 25006, changed in_hot_standby."""
        if node in self._states:
            self._hinted.add(node)
            self._wake(node)

    async def look(self, nodes: Iterable[str]) -> None:
        """Probe nodes now, all at once, and wait for their answers."""
        async with anyio.create_task_group() as tasks:
            for node in nodes:
                tasks.start_soon(self._probe, self.probes[node], False)

    def administer(self, node: str, admin: Admin) -> None:
        """Take a node out, or give it back; raises KeyError."""
        self._states[node] = judge.administer(self._states[node], admin)
        self._draw()

    def hold(self, held: bool) -> None:
        """Let no transaction begin, or let them begin again."""
        if held != self._held:
            self._held = held
            self._draw()

    def tell(self, hindrance: str) -> None:
        """Show why there is no failover; empty while there need be none."""
        if hindrance != self._hindrance:
            self._hindrance = hindrance
            self._draw()

    def follow(self, managed: Managed | None, trouble: str) -> None:
        """Take what a manager says of the nodes, or why it says nothing."""
        if (managed, trouble) == (self._managed, self._trouble):
            return
        self._managed, self._trouble = managed, trouble
        for name, state in self._states.items():
            node, member = self.probes[name].node, managed.members.get(name) if managed else None
            if member is not None:
                weight = 0 if member.noloadbalance else node.weight
                node = replace(node, weight=weight, priority=0 if member.nofailover else node.priority)
            self._states[name] = replace(state, node=node)
        self._draw()

    def note(self, memory: Memory) -> None:
        """Take a memory that somebody has changed."""
        self.memory = memory
        self._draw()

    async def _tend(self, probe: Probe) -> None:
        node = probe.node.name
        try:
            while True:
                # Made before the round, so that what is hinted while it runs leads to another one.
                wake = self._wakes[node] = anyio.Event()
                fresh = node in self._hinted
                self._hinted.discard(node)
                started = self._clock()
                await self._probe(probe, fresh)
                states, primary = self.states, self._view.primary
                now = self._clock()
                seconds = judge.pause(self._states[node], states, primary, self._rules, now, self._chance())
                # From start to start: a probe that was waited for in vain is followed by the next at once.
                seconds = max(seconds - (now - started), 0.001)
                # To a hint there is an answer at once; but what failed is given the time that the rules give it.
                fast = self._rules.probe_interval_fast
                deaf = min(seconds, fast if self._states[node].doubted_at is not None else fast / 4)
                await anyio.sleep(deaf)
                with anyio.move_on_after(seconds - deaf):
                    await wake.wait()
        finally:
            await probe.close()

    async def _probe(self, probe: Probe, fresh: bool) -> None:
        node = probe.node.name
        async with self._locks[node]:
            result = await probe.round(fresh=fresh)
            before = self._states[node]
            self._states[node] = judge.judge(before, result, self._rules, self._clock())
        if before.doubted_at is None and self._states[node].doubted_at is not None and node == self._view.primary:
            for other in self._states:
                self._wake(other)  # what the others see of it is wanted now
        self._draw()

    def _wake(self, node: str) -> None:
        if wake := self._wakes.get(node):
            wake.set()

    def _draw(self) -> None:
        """Draw the view and publish what is news; all nodes are then probed soon, for one change brings another."""
        tick, self._tick = self._tick, anyio.Event()
        tick.set()
        states = self.states
        if len(states) > 1 and not self.is_complete:
            return
        leader = self._managed.leader if self._managed else None
        if self._rules.gateways:
            choice = judge.choose_gateway(states, self.memory)
        else:
            choice = judge.choose_primary(states, self.memory, follow=self._rules.follow, leader=leader)
        self.memory = judge.remember(self.memory, states, choice)
        view = judge.draw_view(
            self._view.name, self._view.version, states, choice, former=self.memory.former, held=self._held
        )
        said = "; ".join(self._managed.mismatches) if self._managed else ""
        view = replace(
            view,
            mode=self._rules.mode,
            paused=self.memory.paused or (self._managed is not None and self._managed.paused),
            hindrance=self._hindrance or self._trouble or said,
        )
        news = judge.changes(self._view if self._published else None, view)
        if news:
            view = replace(view, version=view.version + 1)
        self._view = view
        if news:
            self._published = True
            is_well = view.primary is not None and all(node.status is Status.UP for node in view.nodes)
            for line in news:
                log.log(logging.INFO if is_well else logging.WARNING, "%s: %s", view.name, line)
            self._publish(view)
            for node in self._states:
                self._wake(node)
