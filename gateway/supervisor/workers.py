"""The worker processes: started, spoken with, started again when they die.

1. A worker is a fresh interpreter that inherits its listening sockets and one end of a socket pair, nothing else.
2. One that dies takes only its own clients with it, and is started again after a pause that grows with each death.
3. What a worker is told first is its settings, its shares, and the views; so one that comes back knows all.

Called by supervisor.main.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable

import anyio
from anyio.abc import SocketStream, TaskGroup

from gateway.control import Down, Records, Up, encode
from gateway.supervisor.listeners import Listeners

log = logging.getLogger("gateway.supervisor")

_LONGEST_PAUSE = 10.0
_HEALTHY_AFTER = 10.0  # seconds of life after which a death counts as the first again
_CHUNK = 65536


class Worker:
    """One worker process and the way to it."""

    def __init__(self, index: int, process: subprocess.Popen[bytes], end: socket.socket) -> None:
        self.index = index
        self.process = process
        self.end = end
        self.stream: SocketStream | None = None
        self.lock: anyio.Lock | None = None
        self.backlog = bytearray()  # what it was told before there was a stream
        self.ready = False


class Workers:
    """All workers of a gateway."""

    def __init__(self, count: int, listeners: Listeners, first_words: Callable[[int], Iterable[Down]]) -> None:
        self.listeners = listeners
        self.first_words = first_words
        self.stopping = False
        self._ended = 0
        self._all_ended = anyio.Event()
        self.all = [self._start(index) for index in range(count)]

    def _start(self, index: int) -> Worker:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        descriptors = self.listeners.of(index)
        command = [sys.executable, "-m", "gateway.worker.main", str(theirs.fileno()), *map(str, descriptors)]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno(), *descriptors], stdin=subprocess.DEVNULL)
        theirs.close()
        ours.sendall(b"".join(encode(record) for record in self.first_words(index)))
        return Worker(index, process, ours)

    async def tend(self, index: int, heard: Callable[[int, Up], None], died: Callable[[int], None]) -> None:
        """Listen to one worker, and start it again whenever it dies, until `stopping`."""
        pause = 0.0
        while True:
            worker = self.all[index]
            born = anyio.current_time()
            try:
                await self._listen(worker, heard)
            finally:
                worker.ready = False
            with anyio.CancelScope(shield=True):
                code = await anyio.to_thread.run_sync(worker.process.wait)
            if self.stopping:
                return self._end()
            died(index)
            pause = 0.0 if anyio.current_time() - born > _HEALTHY_AFTER else min(max(0.1, 2 * pause), _LONGEST_PAUSE)
            log.error("worker %d died (exit code %d); it is started again in %.1f s", index, code, pause)
            await anyio.sleep(pause)
            if self.stopping:  # the listeners are closed
                return self._end()
            self.all[index] = self._start(index)

    def _end(self) -> None:
        self._ended += 1
        if self._ended == len(self.all):
            self._all_ended.set()

    async def _listen(self, worker: Worker, heard: Callable[[int, Up], None]) -> None:
        records = Records(Up)
        worker.end.setblocking(False)
        stream = await SocketStream.from_socket(worker.end)
        worker.lock, worker.stream = anyio.Lock(fast_acquire=True), stream
        async with stream:
            try:
                async with worker.lock:
                    await stream.send(bytes(worker.backlog))
                while True:
                    for record in records.feed(await stream.receive(_CHUNK)):
                        heard(worker.index, record)  # type: ignore[arg-type]
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                return

    async def tell(self, index: int, record: Down) -> None:
        """Send a record to one worker; one that is gone is told when it comes back."""
        worker = self.all[index]
        if worker.stream is None or worker.lock is None:
            worker.backlog += encode(record)
            return
        try:
            async with worker.lock:
                await worker.stream.send(encode(record))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return

    def tell_all(self, record: Down, tasks: TaskGroup) -> None:
        """Send a record to every worker, soon; one that does not read keeps it from nobody else."""
        for worker in self.all:
            tasks.start_soon(self.tell, worker.index, record)

    async def ended(self) -> None:
        """Wait until every worker has ended, once they are stopping."""
        await self._all_ended.wait()

    def kill(self) -> None:
        """End all workers now."""
        for worker in self.all:
            if worker.process.poll() is None:
                worker.process.kill()
        for worker in self.all:
            worker.process.wait()
