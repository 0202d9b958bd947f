"""How the supervisor speaks to its workers."""

from __future__ import annotations

from typing import Any, cast

import anyio

from gateway.control import Ask, encode
from gateway.supervisor.workers import Worker, Workers


class Deaf:
    """The way to a worker that does not read."""

    async def send(self, data: bytes) -> None:
        await anyio.sleep_forever()


class Attentive:
    """The way to one that does."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []

    async def send(self, data: bytes) -> None:
        self.heard.append(data)


def test_worker_that_does_not_read_keeps_nothing_from_the_others():
    others = [Attentive(), Attentive()]
    nobody: Any = None
    workers = Workers.__new__(Workers)
    workers.all = [Worker(index, nobody, nobody) for index in range(3)]
    for worker, way in zip(workers.all, [Deaf(), *others], strict=True):
        worker.stream = cast(Any, way)
    record = Ask(1, "pools")

    async def tell() -> None:
        for worker in workers.all:
            worker.lock = anyio.Lock()
        async with anyio.create_task_group() as tasks:
            workers.tell_all(record, tasks)
            with anyio.fail_after(5):
                while not all(way.heard == [encode(record)] for way in others):
                    await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()

    anyio.run(tell)
