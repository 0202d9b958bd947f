"""The watch over one cluster: a task for each node that probes it, and the view that comes of their results.

1. Nothing is published before every node was probed once: the first to answer may be a primary of yesterday. A single
   node is believed at once.
2. A view is published when something in it is news, and its version then grows; the figures in `view` are always new.
3. A hint has a node probed at once, on a new connection, but no more often than each probe_interval_fast.

Called by whoever serves the cluster.
Manual: "Failover".
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence

import anyio
from msgspec.structs import replace

from health import judge
from health.probe import Probe
from health.view import Admin, ClusterView, Epoch, Rules, Status

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
        after: ClusterView | None = None,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._probes = probes
        self._rules = rules
        self._publish = publish
        self._clock = clock
        self._chance = chance
        known = {(old.node.host, old.node.port): old.addresses for old in after.nodes} if after else {}
        self._states = {
            probe.node.name: judge.first_state(
                probe.node, rules, clock(), known.get((probe.node.host, probe.node.port), ())
            )
            for probe in probes
        }
        self._wakes: dict[str, anyio.Event] = {}
        self._hinted: set[str] = set()
        self._published = False
        epoch, version = (after.epoch, after.version) if after else (Epoch(), 0)
        self._view = judge.draw_view(cluster, version, list(self._states.values()), judge.Choice(None, epoch, {}))

    @property
    def view(self) -> ClusterView:
        """The cluster as it is known now, with figures that were not worth publishing."""
        return self._view

    async def run(self) -> None:
        """Probe all nodes until cancelled."""
        self._draw()
        async with anyio.create_task_group() as tasks:
            for probe in self._probes:
                tasks.start_soon(self._tend, probe, name=f"probe of {probe.node.name}")

    def hint(self, node: str) -> None:
        """Have a node probed at once: it refused a connect, sent 57P01 or 25006, changed in_hot_standby."""
        if node in self._states:
            self._hinted.add(node)
            self._wake(node)

    def administer(self, node: str, admin: Admin) -> None:
        """Take a node out, or give it back; raises KeyError."""
        self._states[node] = judge.administer(self._states[node], admin)
        self._draw()

    async def _tend(self, probe: Probe) -> None:
        node = probe.node.name
        try:
            while True:
                # Made before the round, so that what is hinted while it runs leads to another one.
                wake = self._wakes[node] = anyio.Event()
                fresh = node in self._hinted
                self._hinted.discard(node)
                result = await probe.round(fresh=fresh)
                self._states[node] = judge.judge(self._states[node], result, self._rules, self._clock())
                self._draw()
                seconds = judge.pause(self._states[node], self._view, self._rules, self._clock(), self._chance())
                deaf = min(seconds, self._rules.probe_interval_fast)
                await anyio.sleep(deaf)
                with anyio.move_on_after(seconds - deaf):
                    await wake.wait()
        finally:
            await probe.close()

    def _wake(self, node: str) -> None:
        if wake := self._wakes.get(node):
            wake.set()

    def _draw(self) -> None:
        """Draw the view and publish what is news; all nodes are then probed soon, for one change brings another."""
        states = list(self._states.values())
        if len(states) > 1 and any(state.result is None for state in states):
            return
        choice = judge.choose_primary(states, self._view.epoch, follow=self._rules.follow)
        view = judge.draw_view(self._view.name, self._view.version, states, choice)
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
