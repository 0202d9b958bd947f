"""Links between the nodes of a cluster, and from the gateway to them, that can be cut as a network is.

A link stands before a node: the gateway and the other nodes reach it there. What is cut swallows bytes and answers
nothing, new connections included, until it is healed; connections that lived through it then break.
The gateway and the standbys are told apart by their first packet: a walreceiver asks for replication.

Called by tests/live/stage.py. Manual: "Message Flow", StartupMessage.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Self

EVERYBODY = frozenset({"gateway", "standbys"})


class Link:
    """A port in front of another one; both ways are one thing."""

    def __init__(self, port: int, target: int, host: str = "127.0.0.1") -> None:
        self.host = host
        self.port = port
        self.cut: frozenset[str] = frozenset()
        self._target = target
        self._through: set[tuple[str, asyncio.StreamWriter]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._call(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def partition(self, who: frozenset[str] = EVERYBODY) -> None:
        """Let nobody of these through, either way."""
        self.cut = who

    def heal(self) -> None:
        """Let everybody through; what was under way is lost."""
        cut, self.cut = self.cut, frozenset()
        self._call(self._break(cut))

    def _call(self, task: object) -> None:
        asyncio.run_coroutine_threadsafe(task, self._loop).result(5)  # type: ignore[arg-type]

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, self.host, self.port)

    async def _close(self) -> None:
        self._server.close()
        await self._break(EVERYBODY)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def _break(self, cut: frozenset[str]) -> None:
        for who, writer in list(self._through):
            if who in cut:
                writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await self._pass(reader, writer)
        writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = await reader.readexactly(4)
        opening = size + await reader.readexactly(int.from_bytes(size) - 4)
        who = "standbys" if b"\0replication\0" in opening else "gateway"
        entry = (who, writer)
        self._through.add(entry)
        try:
            await self._healed(who)  # a host that is away says nothing at all
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
            try:
                back.write(opening)
                ways = [self._copy(who, reader, back), self._copy(who, there, writer)]
                _, left = await asyncio.wait([*map(asyncio.ensure_future, ways)], return_when=asyncio.FIRST_COMPLETED)
                for way in left:
                    way.cancel()
            finally:
                back.transport.abort()
        finally:
            self._through.discard(entry)

    async def _copy(self, who: str, source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(65536):
                if who not in self.cut:
                    to.write(data)
                    await to.drain()
            await self._healed(who)  # nor does its end get through

    async def _healed(self, who: str) -> None:
        while who in self.cut:  # noqa: ASYNC110  it is set by another thread
            await asyncio.sleep(0.01)
