"""A cluster and its gateway as a model: what PostgreSQL does with WAL, and what health.keeper does with steps.

WAL is a tuple: a row's number for each row, a text for each promotion. A standby may receive from whom has all that it
has itself, as PostgreSQL has it. A commit that waits for k standbys is acknowledged once k have it, even if they no
longer receive: what they replied may still be under way. So the model is harsher than the world.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from health import conninfo, failover, judge, synchronous
from health.failover import AbandonedError, Action, FailoverRules, Plan, Step, World
from health.view import Memory, Mode, Node, Outcome, ProbeResult, Rules

from .worlds import SYSTEM

GATEWAY = "gateway"
RULES = Rules(fall=2, rise=2, jitter=0.0, mode=Mode.PROMOTE)
PROMOTES = FailoverRules(mode=Mode.PROMOTE, quorum=2, cool_off=2.0, startup_grace=1.0, demotes=True)
TICK = 0.5

Wal = tuple[int | str, ...]


class Machine:
    """One PostgreSQL server."""

    def __init__(self, name: str, upstream: str | None) -> None:
        self.name = name
        self.is_alive = True
        self.is_stopped = False  # SIGSTOP: its connections stay, and nothing moves
        self.in_recovery = upstream is not None
        self.wal: Wal = ()
        self.conninfo = f"host={upstream} application_name={name}" if upstream else ""
        self.source: str | None = None  # whom it receives from
        self.by_hand = False  # promoted by an operator, past the gateway

    @property
    def works(self) -> bool:
        return self.is_alive and not self.is_stopped

    @property
    def timeline(self) -> int:
        return 1 + sum(isinstance(record, str) for record in self.wal)


class Cluster:
    """Servers, the network between them and the gateway, and what clients were told."""

    def __init__(self, size: int, synchronous_standby_names: str) -> None:
        names = [f"pg{i}" for i in range(1, size + 1)]
        self.machines = {name: Machine(name, "pg1" if name != "pg1" else None) for name in names}
        self.names = synchronous_standby_names
        self.rule = synchronous.parse(synchronous_standby_names)
        self.cuts: set[frozenset[str]] = set()
        self.rows = 0
        self.unanswered: dict[int, tuple[str, set[str]]] = {}  # row -> where it was written, who has it
        self.acknowledged: set[int] = set()
        self.loses_answers = False  # the next promotion is done, and nobody hears of it
        self.connect()

    def linked(self, one: str, other: str) -> bool:
        return frozenset((one, other)) not in self.cuts

    def reaches(self, name: str) -> bool:
        return self.linked(GATEWAY, name) and self.machines[name].works

    def connect(self) -> None:
        """Let every standby that receives from nobody find its upstream."""
        for machine in self.machines.values():
            upstream = self.machines.get((conninfo.upstream(machine.conninfo) or ("", 0))[0])
            if machine.source is not None or upstream is None or upstream is machine:
                continue
            if conninfo.is_frozen(machine.conninfo) or not machine.in_recovery:
                continue
            is_possible = machine.works and upstream.works and self.linked(machine.name, upstream.name)
            if is_possible and upstream.wal[: len(machine.wal)] == machine.wal:
                machine.source = upstream.name

    def replicate(self, name: str) -> None:
        """Let a standby receive all that its source has."""
        machine = self.machines[name]
        source = self.machines.get(machine.source or "")
        if source is None or not (machine.works and source.works and self.linked(name, source.name)):
            return
        if source.wal[: len(machine.wal)] != machine.wal:
            machine.source = None
            return
        machine.wal = source.wal
        for row, (origin, holders) in self.unanswered.items():
            if origin == source.name and row in machine.wal:
                holders.add(name)
        self.answer()

    def answer(self) -> None:
        """Let primaries tell their clients what is committed."""
        count = self.rule.count if self.rule else 0
        for row, (origin, holders) in list(self.unanswered.items()):
            if self.machines[origin].works and len(holders) >= count:
                self.acknowledged.add(row)
                del self.unanswered[row]

    def write(self, name: str) -> None:
        machine = self.machines[name]
        if self.reaches(name) and not machine.in_recovery:
            self.rows += 1
            machine.wal = (*machine.wal, self.rows)
            self.unanswered[self.rows] = (name, set())
            self.answer()

    def kill(self, name: str) -> None:
        machine = self.machines[name]
        machine.is_alive = machine.is_stopped = False
        self.drop(name)

    def drop(self, name: str) -> None:
        """End all connections of a server."""
        self.machines[name].source = None
        for machine in self.machines.values():
            if machine.source == name:
                machine.source = None
        self.unanswered = {row: where for row, where in self.unanswered.items() if where[0] != name}

    def time_out(self, name: str) -> None:
        """Let a receiver notice that its source is gone."""
        machine = self.machines[name]
        if machine.source and not (self.machines[machine.source].works and self.linked(name, machine.source)):
            machine.source = None

    def promote(self, name: str, *, by_hand: bool) -> None:
        machine = self.machines[name]
        if machine.in_recovery:
            machine.wal = (*machine.wal, f"{name} is primary on {machine.timeline + 1}")
            machine.in_recovery, machine.source, machine.by_hand = False, None, by_hand

    def follow(self, name: str, primary: str) -> None:
        """Make a server a standby that has what the primary has, as pg_rewind does."""
        self.drop(name)
        machine = self.machines[name]
        machine.wal, machine.in_recovery, machine.by_hand = self.machines[primary].wal, True, False
        machine.conninfo = f"host={primary} application_name={name}"


class Gateway:
    """Probes, decides and acts on a cluster as health.watch and health.keeper do."""

    def __init__(self, cluster: Cluster, memory: Memory, now: float) -> None:
        self.cluster = cluster
        self.memory = self.saved = memory
        self.now = self.started_at = now
        self.states = {name: judge.first_state(Node(name, name), RULES, now) for name in cluster.machines}
        self.primary: str | None = None
        self.held = False
        self.is_disk_full = False
        self.plan: Plan | None = None
        self.step: Step | None = None
        self.not_before = 0.0
        self.said = ""
        self.usurpers: set[str] = set(memory.usurpers)  # as far as it is on disk

    @property
    def routed(self) -> str | None:
        """Where writes go."""
        return None if self.held else self.primary

    def again(self) -> Gateway:
        """Die, and begin with what was saved."""
        return Gateway(self.cluster, self.saved, self.now)

    def world(self, failures: dict[str, str] | None = None) -> World:
        return World(
            tuple(self.states.values()),
            self.memory,
            PROMOTES,
            self.now,
            1e9 + self.now,
            self.started_at,
            failures or {},
        )

    def observe(self, names: Iterable[str] | None = None) -> None:
        """Probe nodes, all of them when none are named, and judge."""
        for name in self.states if names is None else names:
            self.states[name] = judge.judge(self.states[name], self._probe(name), RULES, self.now)
            self._judge()

    def _judge(self) -> None:
        states = list(self.states.values())
        if any(state.result is None for state in states):
            return
        before, promoting = self.memory.epoch.primary, self.memory.promoting
        choice = judge.choose_primary(states, self.memory, follow=False)
        self.memory = judge.remember(self.memory, states, choice)
        self.primary = choice.primary
        after = self.memory.epoch.primary
        self.usurpers = {name for name in self.usurpers if not self.states[name].tells(in_recovery=True)}
        if before is not None and after is not None and after != before:
            assert after not in self.usurpers or after == promoting
            if self.cluster.machines[after].by_hand:  # an operator has decided what is lost
                self.cluster.unanswered.clear()
                self.cluster.acknowledged &= set(self.cluster.machines[after].wal)
        if promoting == self.memory.epoch.primary:
            self.usurpers.discard(after or "")

    def _probe(self, name: str) -> ProbeResult:
        machine = self.cluster.machines[name]
        result = ProbeResult(name, self.now, Outcome.SILENT)
        if not self.cluster.linked(GATEWAY, name) or machine.is_stopped:
            return result
        if not machine.is_alive:
            return replace(result, outcome=Outcome.REFUSED)
        result = replace(
            result,
            outcome=Outcome.ANSWERED,
            in_recovery=machine.in_recovery,
            timeline=machine.timeline,
            system_identifier=SYSTEM,
            receiver_streaming=machine.source is not None,
        )
        position = len(machine.wal)
        if machine.in_recovery:
            return replace(result, received_lsn=position, conninfo=machine.conninfo, application_name=name)
        standbys = sum(other.source == name for other in self.cluster.machines.values())
        return replace(
            result,
            current_lsn=position,
            synchronous_standby_names=self.cluster.names,
            synchronous_standbys=standbys if self.cluster.rule else 0,
        )

    def advance(self) -> None:
        """Do the next step of the plan under way, or see whether it is time for one."""
        self.now += TICK
        if self.plan is None:
            self._tend()
        else:
            assert self.step is not None
            failures = self._do(self.step)
            self._next(self.world(failures))

    def begin(self, plan: Plan) -> None:
        self.plan = plan
        self._next(None)

    def _next(self, world: World | None) -> None:
        assert self.plan is not None
        try:
            self.step = next(self.plan) if world is None else self.plan.send(world)
            if self.step.action is Action.PROMOTE:
                self.examine_promotion()
            return
        except StopIteration as end:
            self.said = end.value
        except AbandonedError as error:
            self.said = f"abandoned: {error}"
            self.not_before = self.now + TICK
        self.plan = self.step = None
        self.held = False

    def _tend(self) -> None:
        if any(state.result is None for state in self.states.values()):
            return
        world, cluster = self.world(), self.cluster
        for name in failover.rousable(world):
            if cluster.reaches(name):
                cluster.machines[name].source = None
                cluster.connect()
        why = failover.hindrance(world)
        if why is None or world.memory.promoting is not None:
            if self.now >= self.not_before:
                self.begin(failover.failover(world))
            return
        to = self.memory.epoch.primary
        for name in failover.repairs(world):
            self._lead(name)
        for name in failover.strays(world):
            if cluster.reaches(name) and to is not None and cluster.reaches(to):
                cluster.follow(name, to)
                self.observe([name])
        self._save()

    def _lead(self, name: str) -> None:
        if self.cluster.reaches(name):
            machine = self.cluster.machines[name]
            machine.source = None
            machine.conninfo = conninfo.lead(machine.conninfo, self.memory.epoch.primary or "", 5432)

    def _save(self) -> bool:
        if not self.is_disk_full:
            self.saved = self.memory
            self.usurpers |= set(self.memory.usurpers)
        return not self.is_disk_full

    def _do(self, step: Step) -> dict[str, str]:
        cluster, machines = self.cluster, self.cluster.machines
        match step.action, step.nodes:
            case Action.CHECKPOINT, _:
                pass
            case Action.HOLD, _:
                self.held = True
            case Action.RELEASE, _:
                self.held = False
            case Action.LEAD, nodes:
                for name in nodes:
                    self._lead(name)
            case Action.FREEZE, nodes:
                failures = {}
                for name in nodes:
                    if cluster.reaches(name):
                        machines[name].conninfo = conninfo.freeze(machines[name].conninfo)
                        machines[name].source = None
                    else:
                        failures[name] = "no answer"
                self.observe(nodes)
                return failures
            case Action.REMEMBER, nodes:
                node = nodes[0] if nodes else None
                self.memory = replace(self.memory, promoting=node)
                if node is not None:
                    self.memory = replace(self.memory, promoted_at=1e9 + self.now)
                self._judge()
                if not self._save():
                    return {node or "": "disk is full"}
            case Action.PROMOTE, (name,):
                if not cluster.reaches(name):
                    return {name: "no answer"}
                cluster.promote(name, by_hand=False)
                lost, cluster.loses_answers = cluster.loses_answers, False
                if lost:
                    return {name: "the connection broke"}
                self.observe([name])
            case Action.ADOPT, (name,):
                self.observe([name])
                self.memory = replace(self.memory, promoting=None)
                self._judge()
                if not self._save():
                    return {name: "disk is full"}
            case Action.DRAIN, _:
                if cluster.unanswered:
                    return {"": "transactions still run"}
            case Action.CATCH_UP, (name,):
                cluster.replicate(name)
                if machines[name].wal != machines[self.memory.epoch.primary or ""].wal:
                    return {name: "not done"}
            case Action.DEMOTE, (old, name):
                if not cluster.reaches(old) or machines[old].in_recovery:
                    return {old: "no answer"}
                for other in machines.values():
                    if other.source == old:
                        cluster.replicate(other.name)
                cluster.kill(old)
                machines[old].in_recovery = True
                machines[old].conninfo = f"host={name} application_name={old}"
                self.observe([old])
            case never:
                raise AssertionError(never)
        return {}

    def examine_promotion(self) -> None:
        """No node is promoted while one that we see receives from the old primary and that lives."""
        old = self.memory.epoch.primary
        for state in self.world().standbys():
            if state.result is None or state.result.at < self.now - TICK:
                continue  # we do not know yet
            machine = self.cluster.machines[state.node.name]
            assert machine.source != old or not self.cluster.machines[old or ""].is_alive or _is_standby(self, old)

    def examine(self) -> None:
        """What has to be so after every step."""
        machine = self.cluster.machines.get(self.routed or "")
        if machine is not None and machine.works and not machine.in_recovery and self.cluster.rule is not None:
            assert self.cluster.acknowledged <= set(machine.wal), (machine.name, self.said)

    def heal(self, rounds: int = 120) -> None:
        """Mend everything that is broken, and let time pass until the cluster is well again."""
        cluster, machines = self.cluster, self.cluster.machines
        cluster.cuts.clear()
        cluster.loses_answers = self.is_disk_full = False
        for machine in machines.values():
            machine.is_alive, machine.is_stopped = True, False
        for _ in range(rounds):
            for machine in machines.values():
                machine.is_alive = True
            cluster.connect()
            for name in machines:
                cluster.replicate(name)
            self.observe()
            self.advance()
            self.examine()
            self._operate()
            if self.is_well():
                return
        raise AssertionError((self.said, failover.hindrance(self.world()), self.memory, vars(machines["pg1"])))

    def _operate(self) -> None:
        """Do what is left to an operator: a standby that has what nobody else has is made anew, PROMOTE."""
        machines, primary = self.cluster.machines, self.primary
        if self.plan is not None:
            return
        if primary is not None and not machines[primary].in_recovery:
            for machine in machines.values():
                if machine.in_recovery and machines[primary].wal[: len(machine.wal)] != machine.wal:
                    self.cluster.follow(machine.name, primary)
        elif self.memory.promoting is None and all(state.result for state in self.states.values()):
            standbys = [machine for machine in machines.values() if machine.in_recovery]
            best = max(standbys, key=lambda machine: (machine.timeline, len(machine.wal)), default=machines["pg1"])
            if failover.hindrance(self.world(), best.name) is None:
                self.begin(failover.failover(self.world(), best.name))

    def is_well(self) -> bool:
        machines, primary = self.cluster.machines, self.routed
        if primary is None or self.plan is not None or self.memory.promoting is not None or self.saved != self.memory:
            return False
        return not machines[primary].in_recovery and all(
            machine.name == primary or (machine.source is not None and machine.wal == machines[primary].wal)
            for machine in machines.values()
        )


def _is_standby(gateway: Gateway, name: str | None) -> bool:
    return gateway.cluster.machines[name or ""].in_recovery
