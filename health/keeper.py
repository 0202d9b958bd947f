"""Keeps a primary in a cluster: watches for the moment to act, and does step by step what health.failover decides.

1. One plan at a time, whether a probe or an operator brought it about.
2. Before a node is told to promote, the state file says which: who starts again in the middle goes on from there.
3. While no plan runs, the standbys that do not follow the primary are repaired, and those who came back rejoined.

Called by who serves the cluster, beside its watch. Manual: "Failover".
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from math import inf

import anyio
from anyio.abc import TaskGroup
from anyio.to_thread import run_sync
from msgspec import Struct
from msgspec.structs import replace
from tenacity import (
    AsyncRetrying,
    RetryError,
    retry_if_exception_type,
    stop_after_attempt,
    wait_exponential,
    wait_random,
)

from health import execute, failover
from health.execute import StepError
from health.failover import AbandonedError, Action, FailoverRules, Plan, Step, World
from health.memory import MemoryFile, MemoryFileError
from health.view import Admin, Memory, Mode, Outcome, Status
from health.watch import Watch

log = logging.getLogger(__name__)

_LOOK = 0.01  # seconds between two looks at what is about to change
_PATIENCE = 30.0  # seconds between two failovers that fail, at most
_REJOINED = "rejoined"
_REST = 3.0  # seconds from one try to mend a node to the next


class Commands(Struct, frozen=True):
    """The operator's commands and the limits of all steps, in seconds."""

    fence: str | None = None
    demote: str | None = None
    failover: str | None = None
    rejoin: str | None = None
    command_timeout: float = 30.0
    promote_timeout: float = 60.0
    switchover_timeout: float = 5.0
    step_timeout: float = 5.0


class RefusedError(Exception):
    """What an operator asked for is not done; the text says why, in one sentence."""


class Keeper:
    """Keeps one cluster for as long as run() runs."""

    def __init__(
        self,
        watch: Watch,
        rules: FailoverRules,
        commands: Commands,
        file: MemoryFile | None,
        running: Callable[[], Awaitable[int]],  # how many transactions run, once no further one begins
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.watch = watch
        self._rules = rules
        self._commands = commands
        self._file = file
        self._running = running
        self._clock = clock
        self._wall_clock = wall_clock
        self._busy = anyio.Lock()
        self._nodes = {name: anyio.Lock() for name in watch.probes}  # what is done to a node is done one by one
        self._saved: Memory | None = None  # what is on disk; who watched before us may not have got that far
        self._trouble = ""  # with the state file, as it was told
        self._saving = anyio.Lock()
        self._failures = 0
        self._not_before = 0.0
        self._work: dict[tuple[str, str], float] = {}  # what is done to which node; when it may be done again
        self._mending: dict[anyio.CancelScope, anyio.Event] = {}  # what changes where a standby receives from
        self._tasks: TaskGroup

    async def run(self) -> None:
        """Act whenever it is time, until cancelled."""
        async with anyio.create_task_group() as self._tasks:
            while True:
                await self._tend()
                await self.watch.probed()

    # What an operator may ask for.

    async def switchover(self, target: str | None = None, *, force: bool = False) -> str:
        """Let a standby and the primary change places; return what came of it. Raises RefusedError.

        Transactions that do not end in time make it fail, or, by *force*, are ended.
        """
        async with self._alone():
            await self.watch.look(self.watch.probes)
            target = target or failover.successor(self.world())
            if target is None:
                raise RefusedError("there is no standby to switch to that receives from the primary")
            return await self._ordered(failover.switchover(self.world(), target, force=force))

    async def promote(self, target: str) -> str:
        """Make a standby the primary, whatever forbids it that is a matter of rules. Raises RefusedError."""
        async with self._alone():
            if target not in self.watch.probes:
                raise RefusedError(f"there is no node {target}")
            await self.watch.look([target])
            if why := failover.hindrance(self.world(), target):
                raise RefusedError(why)
            return await self._ordered(failover.failover(self.world(), target))

    async def pause(self, paused: bool) -> None:
        """Let the gateway fail over by itself no more, or again; kept when it ends. Raises RefusedError."""
        self.watch.note(replace(self.watch.memory, paused=paused))
        try:
            await self._save()
        except MemoryFileError as error:
            raise RefusedError(str(error)) from None

    def administer(self, node: str, admin: Admin) -> None:
        """Take a node out, or give it back. Raises RefusedError."""
        if node not in self.watch.probes:
            raise RefusedError(f"there is no node {node}")
        if node == self.watch.view.primary and admin is not Admin.READY:
            raise RefusedError(f"{node} is the primary: use SWITCHOVER first")
        self.watch.administer(node, admin)

    def world(self, failures: dict[str, str] | None = None) -> World:
        """Return the cluster as it is now."""
        return World(
            self.watch.states,
            self.watch.memory,
            self._rules,
            self._clock(),
            self._wall_clock(),
            self.watch.started_at,
            failures or {},
        )

    # Acting.

    def _alone(self) -> anyio.Lock:
        if self._busy.locked():
            raise RefusedError("a failover or a switchover is under way")
        return self._busy

    async def _ordered(self, plan: Plan) -> str:
        try:
            done = await self._play(plan)
        except AbandonedError as error:
            raise RefusedError(str(error)) from None
        log.warning("%s: %s", self.watch.view.name, done)
        return done

    async def _tend(self) -> None:
        if not self.watch.is_complete or self._busy.locked():
            return
        world = self.world()
        for node in failover.rousable(world):
            self._begin("roused", node, partial(execute.rouse, self._open(node), self._commands.step_timeout))
        why = failover.hindrance(world)
        is_needed = world.primary is not None and (
            world.primary.status is Status.DOWN or self.watch.view.primary is None
        )
        self.watch.tell(why if is_needed and why else "")
        if (why is None or world.memory.promoting is not None) and self._clock() >= self._not_before:
            async with self._busy:
                await self._fail_over()
            return
        if why is not None:
            self._failures = 0
        for node in failover.repairs(world):
            if node == world.memory.epoch.primary:
                self._begin("thawed", node, partial(execute.thaw, self._open(node), self._commands.step_timeout))
            else:
                self._lead(node, world.memory.epoch.primary)
        if self._commands.rejoin is not None:
            for node in failover.strays(world):
                self._rejoin(node, world.memory.epoch.primary)
        if self.watch.memory != self._saved:
            self._tasks.start_soon(self._save_quietly)

    async def _fail_over(self) -> None:
        try:
            done = await self._play(failover.failover(self.world()))
            log.warning("%s: failover: %s", self.watch.view.name, done)
            self._failures = 0
        except AbandonedError as error:
            self.watch.tell(str(error))
            self._failures += 1
            self._not_before = self._clock() + min(_PATIENCE, 0.1 * 2 ** min(self._failures, 10))

    async def _play(self, plan: Plan) -> str:
        """Do a plan to its end; return what it says."""
        await self._rest()
        try:
            step = next(plan)
            while True:
                try:
                    failures = await self._do(step)
                except (StepError, MemoryFileError) as error:
                    failures = {step.nodes[0] if step.nodes else "": str(error)}
                for node, why in failures.items():
                    log.warning("%s: %s %s: %s", self.watch.view.name, step.action.value, node, why)
                step = plan.send(self.world(failures))
        except StopIteration as end:
            return str(end.value)
        finally:
            self.watch.hold(False)

    async def _rest(self) -> None:
        """End the repairs under way: one that is tried again would undo what a plan has just done."""
        mending = dict(self._mending)
        for scope in mending:
            scope.cancel()
        for ended in mending.values():
            await ended.wait()

    async def _do(self, step: Step) -> dict[str, str]:
        """Do one step; return what went wrong, by node."""
        watch, commands = self.watch, self._commands
        if step.nodes:
            log.info("%s: %s %s", watch.view.name, step.action.value, ", ".join(step.nodes))
        old = watch.node(watch.memory.epoch.primary)
        match step.action, step.nodes:
            case Action.HOLD, _:
                watch.hold(True)
            case Action.RELEASE, _:
                watch.hold(False)
            case Action.DRAIN, _:
                await self._drain()
            case Action.LEAD, nodes:
                for node in nodes:
                    self._lead(node, watch.memory.epoch.primary)
            case Action.CATCH_UP, (node,):
                assert old is not None
                await execute.caught_up(self._open(old.name), self._open(node), commands.switchover_timeout)
            case Action.CHECKPOINT, nodes:
                return await self._each(nodes, execute.checkpoint)
            case Action.FREEZE, nodes:
                failures = await self._each(nodes, execute.freeze)
                await watch.look(nodes)
                return failures
            case Action.FENCE, _:
                assert commands.fence is not None
                await execute.command(commands.fence, "fence_command", old, None, commands.command_timeout)
            case Action.DEMOTE, (node, target):
                await self._demote(node, target)
            case Action.REMEMBER, nodes:
                await self._remember(nodes[0] if nodes else None)
            case Action.PROMOTE, (node,):
                await self._promote(node)
            case Action.ADOPT, (node,):
                await watch.look([node])
                await self._remember(None)
        return {}

    async def _drain(self) -> None:
        left = 0
        with anyio.move_on_after(self._commands.switchover_timeout):
            while left := await self._running():  # noqa: ASYNC110  the workers do not tell when it is so
                await anyio.sleep(_LOOK)
        if left:
            limit = self._commands.switchover_timeout
            raise StepError(f"{left} transactions still run after {limit:g} s (failover.switchover_timeout)")

    async def _each(
        self, nodes: tuple[str, ...], step: Callable[[execute.Open, float], Awaitable[None]]
    ) -> dict[str, str]:
        """Do a step on each of these nodes at once; return what went wrong, by node."""
        failures: dict[str, str] = {}

        async def do(node: str) -> None:
            try:
                async with self._nodes[node]:
                    await step(self._open(node), self._commands.step_timeout)
            except StepError as error:
                failures[node] = str(error)

        async with anyio.create_task_group() as tasks:
            for node in nodes:
                tasks.start_soon(do, node)
        return failures

    async def _demote(self, node: str, target: str) -> None:
        """Run demote_command until the old primary is none any more; the rest of the command goes on by itself."""
        old, new = self.watch.node(node), self.watch.node(target)
        assert self._commands.demote is not None
        ended = anyio.Event()
        trouble: list[StepError] = []

        async def run(line: str) -> None:
            try:
                await execute.command(line, "demote_command", old, new, self._commands.command_timeout)
            except StepError as error:
                trouble.append(error)
                log.warning("%s: %s", self.watch.view.name, error)
            finally:
                ended.set()

        self._tasks.start_soon(run, self._commands.demote)
        while True:
            is_over = ended.is_set()
            await self.watch.look([node])
            if self._is_no_primary(node):
                return
            if is_over:
                raise trouble[0] if trouble else StepError(f"demote_command ended, and {node} still is the primary")
            await anyio.sleep(_LOOK)

    def _is_no_primary(self, node: str) -> bool:
        """Has it ended, or is it a standby? One that shuts down has clients until it has ended."""
        state = self.world().state(node)
        if state is None or state.result is None:
            return False
        has_ended = state.result.outcome is Outcome.REFUSED or state.status is Status.DOWN
        return has_ended or state.tells(in_recovery=True)

    async def _remember(self, node: str | None) -> None:
        memory = self.watch.memory
        if node is not None:
            memory = replace(memory, promoted_at=self._wall_clock())
        self.watch.note(replace(memory, promoting=node))
        await self._save()

    async def _promote(self, node: str) -> None:
        commands, watch = self._commands, self.watch
        if self._rules.mode is Mode.COMMAND and commands.failover is not None:
            old = watch.node(watch.memory.epoch.primary)
            await execute.command(
                commands.failover, "failover_command", old, watch.node(node), commands.command_timeout
            )
            await execute.promoted(self._open(node), commands.promote_timeout)
        else:
            await execute.promote(self._open(node), commands.promote_timeout)

    # Repairs, beside everything else.

    def _lead(self, node: str, to: str | None) -> None:
        primary = self.watch.node(to)
        assert primary is not None
        limit = self._commands.step_timeout
        step = partial(execute.repoint, self._open(node), primary, self._open(primary.name), limit)
        self._begin(f"led to {primary.name}", node, step)

    def _rejoin(self, node: str, to: str | None) -> None:
        assert self._commands.rejoin is not None
        old, new, limit = self.watch.node(node), self.watch.node(to), self._commands.command_timeout
        step = partial(execute.command, self._commands.rejoin, "rejoin_command", old, new, limit)
        self._begin(_REJOINED, node, step)

    def _begin(self, what: str, node: str, step: Callable[[], Awaitable[None]]) -> None:
        if self._clock() >= self._work.get((what, node), 0.0):
            self._work[what, node] = inf
            self._tasks.start_soon(self._try, what, node, step)

    async def _try(self, what: str, node: str, step: Callable[[], Awaitable[None]]) -> None:
        """Do a step on one node, a few times when it fails; whether it is still needed is then judged anew."""
        scope = anyio.CancelScope()
        if what != _REJOINED:  # a node that is half rewound is worse than one that is not
            self._mending[scope] = anyio.Event()
        try:
            with scope:
                await self._mend(what, node, step)
        finally:
            self._work[what, node] = self._clock() + _REST
            if ended := self._mending.pop(scope, None):
                ended.set()
        await self.watch.look([node])

    async def _mend(self, what: str, node: str, step: Callable[[], Awaitable[None]]) -> None:
        cluster = self.watch.view.name
        try:
            async for attempt in AsyncRetrying(
                retry=retry_if_exception_type(StepError),
                stop=stop_after_attempt(3),
                wait=wait_exponential(multiplier=0.2, max=2.0) + wait_random(0.0, 0.2),
            ):
                with attempt:
                    async with self._nodes[node]:
                        await step()
            log.info("%s: %s was %s", cluster, node, what)
        except RetryError as error:
            log.warning("%s: %s was not %s: %s", cluster, node, what, error.last_attempt.exception())

    def _open(self, node: str) -> execute.Open:
        return self.watch.probes[node].open

    async def _save(self) -> None:
        """Bring the memory to disk. Raises MemoryFileError."""
        async with self._saving:
            memory = self.watch.memory
            if self._file is not None and memory != self._saved:
                await run_sync(self._file.save, memory)
            self._saved = memory

    async def _save_quietly(self) -> None:
        try:
            await self._save()
            self._trouble = ""
        except MemoryFileError as error:
            if str(error) != self._trouble:  # tried again with each probe, told once
                log.error("%s: %s", self.watch.view.name, error)
            self._trouble = str(error)
