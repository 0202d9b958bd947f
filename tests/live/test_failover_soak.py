"""Random faults, one upon another, under writers: no acknowledged row is lost, and in the end the cluster is whole.

A schedule is a few faults with random pauses between them, drawn from a seed that a failure names; then everything is
healed. `make soak` runs a hundred; what it measured is printed.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from gateway.embedded import EmbeddedError

from .links import EVERYBODY
from .stage import Stage, Writers

pytestmark = pytest.mark.patient

NAMES = ("pg1", "pg2", "pg3")


class Schedule:
    """The faults of one schedule, and what undoes them."""

    def __init__(self, stage: Stage, chance: random.Random) -> None:
        self.stage, self.chance = stage, chance
        self.done: list[str] = []

    def run(self) -> None:
        for _ in range(self.chance.randint(1, 3)):
            fault = self.chance.choice(FAULTS)
            target = self._target()
            self.done.append(f"{fault.__name__} {target}")
            with self.stage.hooks.lock:  # a node that is being rewound is nobody else's
                fault(self, target)
            time.sleep(self.chance.uniform(0.0, 2.0))  # the schedule's own: nothing is waited for
        self.heal()

    def _target(self) -> str:
        """Mostly the primary, for it matters most."""
        with suppress(Exception):
            view = self.stage.view()
            if self.chance.random() < 0.7 and view.get("primary"):
                return str(view["primary"])
        return self.chance.choice(NAMES)

    def heal(self) -> None:
        for name in NAMES:
            self.stage.links[name].heal()
            with self.stage.hooks.lock:
                node = self.stage.node(name)
                node.resume()
                node.start()
        if not self.stage.gateway.is_running:
            self.stage.start_gateway()

    def kill(self, target: str) -> None:
        self.stage.node(target).kill()

    def stop(self, target: str) -> None:
        self.stage.node(target).pause()

    def cont(self, target: str) -> None:
        self.stage.node(target).resume()

    def start(self, target: str) -> None:
        self.stage.node(target).start(wait=False)

    def partition(self, target: str) -> None:
        self.stage.links[target].partition(
            self.chance.choice([EVERYBODY, frozenset({"gateway"}), frozenset({"standbys"})])
        )

    def mend(self, target: str) -> None:
        self.stage.links[target].heal()

    def promote(self, target: str) -> None:
        with suppress(EmbeddedError):  # it is dead, or a primary
            self.stage.node(target).psql("select pg_promote(false)")

    def kill_gateway(self, _: str) -> None:
        self.stage.gateway.kill()
        self.chance.random()
        self.stage.start_gateway(deadline=None)


Fault = Callable[[Schedule, str], None]
FAULTS: list[Fault] = [
    Schedule.kill,
    Schedule.kill,
    Schedule.stop,
    Schedule.cont,
    Schedule.start,
    Schedule.partition,
    Schedule.mend,
    Schedule.promote,
    Schedule.kill_gateway,
]


@pytest.mark.parametrize("schedules", [3, pytest.param(100, marks=pytest.mark.soak)])
def test_acknowledged_rows_survive_random_faults(tmp_path: Path, schedules: int) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    faults: Counter[str] = Counter()
    with Stage(tmp_path, links=True) as stage, Writers(stage) as writers:
        for number in range(schedules):
            schedule = Schedule(stage, chance)
            try:
                schedule.run()
                primary = stage.until_whole(60.0)
                writers.advance(2)
            except BaseException:
                print(f"schedule {number} of seed {seed}: {schedule.done}\n{stage.gateway.log[-12000:]}")
                raise
            faults.update(fault.split()[0] for fault in schedule.done)
            lost = writers.acknowledged - stage.rows(primary)
            assert not lost, f"schedule {number} of seed {seed}: {schedule.done} lost {sorted(lost)[:5]}"
            turns, epoch = writers.took_turns(), stage.view()["epoch"]
            assert len(turns) <= epoch, f"schedule {number} of seed {seed}: two primaries took rows, {turns}"
    acks = sorted(ack for writer in writers.all for ack, _, _ in writer.acknowledged)
    gaps = sorted(later - sooner for sooner, later in pairwise(acks))
    print(
        f"{schedules} schedules, faults {dict(faults)}; {len(acks)} rows acknowledged, none lost; "
        f"{len(writers.took_turns()) - 1} changes of the primary; errors {dict(Counter(writers.errors))}; "
        f"clients dropped {writers.dropped}; longest pauses {[round(gap, 1) for gap in gaps[-5:]]} s, "
        f"median of those above 0.2 s {statistics.median([gap for gap in gaps if gap > 0.2] or [0.0]):.2f} s"
    )
