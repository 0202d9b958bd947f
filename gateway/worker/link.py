"""The relay: what one end has sent becomes what the other end receives, message by message, without waiting.

1. Bytes go from the receive buffer straight to the other end's socket. Only what must be rewritten goes through the
   assembly, and only what the other end does not take now is kept (its `out`), while its source is not read.
2. A message is looked at as far as somebody needs: its header, a statement's name, a transaction status, a tag.
   Of a message that is not whole yet either nothing is passed on or, once it is large, all that came.
3. A server is linked from the first whole message of a transaction until the cycle says that it is free.

Called by the reactor (readable, writable) and the front (join, resume, hand_on). All that is not the daily path
of a message is the front's. See "Message Flow" in PostgreSQL's protocol chapter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.wire.cycle import Cycle
from gateway.wire.kinds import is_known, is_small, needs_no_server
from gateway.wire.messages import (
    BIND,
    CLOSE,
    COMMAND_COMPLETE,
    COPY_DATA,
    COPY_DONE,
    COPY_FAIL,
    DATA_ROW,
    DESCRIBE,
    ERROR_RESPONSE,
    EXECUTE,
    FLUSH,
    FUNCTION_CALL,
    IDLE,
    NOTICE_RESPONSE,
    PARAMETER_STATUS,
    PARSE,
    QUERY,
    READY_FOR_QUERY,
    SYNC,
    TERMINATE,
    CloseComplete,
    ParseComplete,
    ready_for_query,
)
from gateway.wire.owed import (
    LOST_PARSE,
    OWES_COPY_END,
    OWES_DESCRIBE,
    OWES_EXECUTE,
    OWES_FUNCTION_CALL,
    OWES_PARSE,
    OWES_QUERY,
    OWES_SYNC,
    SKIP,
)
from gateway.worker.endpoint import (
    CLIENT_ACTIVE,
    CLIENT_GONE,
    CLIENT_IDLE,
    CLIENT_WAITING,
    DISCARD,
    SERVER_ACTIVE,
    SERVER_IDLE,
    Client,
    Endpoint,
    Server,
)
from gateway.worker.inboxes import Inboxes
from gateway.worker.pool import POOL_SESSION, POOL_STATEMENT, Pool
from gateway.worker.rewrite import PASS_ON, PUT_OUT, STALL, Rewriter, may_mention
from gateway.worker.sock import AGAIN, READ, WRITE, Buffer

if TYPE_CHECKING:
    from gateway.worker.front import Front
    from gateway.worker.reactor import Reactor

STREAM = 16384  # bytes of an unfinished message from which on it is passed on in parts
LONGEST_ANSWER = 0x40000000  # of a server's messages: PostgreSQL makes none above 1 GB
LONGEST_ERROR = 1 << 20  # an ErrorResponse that is looked into
SMALL = 10000  # the longest message of a kind that has no data in it, as PostgreSQL limits it


class Link:
    """Passes messages between clients and servers."""

    def __init__(
        self,
        reactor: Reactor,
        front: Front,
        high_water: int,
        max_packet: int,
        capacity: int,
        tag: str,
        chunk: int = 65536,
    ) -> None:
        self.reactor = reactor
        self.front = front
        self.chunk = chunk  # bytes read at once
        self.scratch = Buffer(2 * chunk)  # what is being received
        self.assembly = Buffer(chunk)  # what is being sent, where it differs
        self.inboxes = Inboxes()
        self.rewriter = Rewriter(self.assembly, capacity, tag)
        self.high_water = high_water  # bytes kept for a slow reader, from which on its source is not read
        self.max_packet = max_packet  # the longest message of a client

    def client_readable(self, client: Client) -> int:
        """Take what a client has sent."""
        buf = client.inbox
        if buf is None:
            buf = self.scratch
            buf.start = buf.end = 0
        count = buf.recv(client.fd, self.chunk)
        if count <= 0:
            if count != AGAIN:
                self.front.client_gone(client, count)
            return 0
        if count == self.chunk:
            self.reactor.again.append(client)
        if (client.state == CLIENT_ACTIVE or client.state == CLIENT_IDLE) and not client.stalled:
            pool = client.pool
            pool.received += count
            return self.from_client(client, buf)
        if client.state == CLIENT_WAITING or client.stalled:
            if buf.end - buf.start > self.high_water:
                self.reactor.want(client, client.interest & ~READ)
            return self.inboxes.keep(client, buf, buf.start)
        buf.start = self.front.client_bytes(client, buf)
        if client.state == CLIENT_ACTIVE or client.state == CLIENT_IDLE:
            return self.from_client(client, buf)  # logged in, and the first query came along
        return self.inboxes.keep(client, buf, buf.start)

    def resume(self, client: Client) -> int:
        """Go on with what a client sent while it could not be served."""
        buf = client.inbox
        if not client.interest & READ and client.state != CLIENT_GONE:
            self.reactor.want(client, client.interest | READ)
        if buf is not None:
            if client.status != IDLE and client.state == CLIENT_ACTIVE:
                self.front.abort_again(client)
            return self.from_client(client, buf)
        return 0

    def from_client(self, client: Client, buf: Buffer) -> int:
        """Pass on the messages in buf[start:end], as far as they can be now; keep the rest for later."""
        data = buf.data
        pos = run = first = buf.start  # first: of what this server gets
        end = buf.end
        server = client.server
        pool = client.pool
        kind = 0
        length = 4
        faulty = False
        while pos < end:
            if client.passing:
                size = min(client.passing, end - pos)
                client.passing -= size
                pos += size
                if client.discarding:
                    run = first = pos
                    if client.passing == 0:
                        self.front.discarded(client)
                        if client.fd < 0:
                            return 0  # it did not take its answer, and is gone
                continue
            kind = data[pos]
            if end - pos < 5:
                faulty = not is_known(kind)
                break
            length = data[pos + 1] << 24 | data[pos + 2] << 16 | data[pos + 3] << 8 | data[pos + 4]
            size = length + 1
            if length < 4 or length > self.max_packet or (length > SMALL and is_small(kind)):
                faulty = True
                break
            whole = end - pos >= size
            if not whole and (end - pos < STREAM or kind == PARSE or kind == DESCRIBE or kind == CLOSE):
                faulty = not is_known(kind)
                break
            if client.skip_to_sync and kind != TERMINATE:
                if not whole:
                    break  # a large one: nothing is passed on, so it has to come in whole
                if kind == SYNC:
                    client.skip_to_sync = False
                    status = client.status if server is None else server.cycle.status
                    self.front.clients.reply(client, ready_for_query(status))
                    if client.fd < 0:
                        return 0
                pos += size
                run = first = pos
                continue
            if kind == TERMINATE:
                at_once = server is not None and (run < pos or self.assembly.end > 0)
                if server is not None and at_once:
                    self.to_server(server, buf, run, pos)
                self.front.client_left(client, at_once)
                return 0
            if server is None:
                run = first = pos
                if whole and needs_no_server(kind, size):
                    pos += size
                    if kind == SYNC:
                        self.front.clients.reply(client, ready_for_query(client.status))
                        if client.fd < 0:
                            return 0
                    run = pos
                    continue
                if kind == COPY_DATA:  # a large one, of a COPY that failed
                    client.passing = size
                    client.discarding = DISCARD
                    continue
                server = self.acquire(client)
                if client.fd < 0:
                    return 0
                if server is None:
                    break
            cycle = server.cycle
            if kind == QUERY:
                if not cycle.ignoring:
                    client.unnamed_serial = server.unnamed_serial = 0
                verdict = PASS_ON
                if whole and client.statements is not None and may_mention(data[pos + 5]):
                    self.spill(buf, run, pos)
                    run = pos
                    verdict = self.rewriter.query(client, server, buf, pos + 5, pos + size)
                    if verdict == STALL:
                        client.stalled = True
                        break
                    if verdict == PUT_OUT:
                        run = pos + size
                if verdict == PASS_ON:
                    cycle.request(OWES_QUERY)
            elif kind == SYNC:
                cycle.request(OWES_SYNC)
                if server.foreign is not None:
                    self.spill(buf, run, pos + size)
                    run = pos + size
                    self.rewriter.close_foreign(server)
            elif kind == BIND:
                pool.binds += 1
                run = self.rewriter.bind(client, server, buf, run, pos, size, whole)
                if run < 0:
                    run = -1 - run
                    break
            elif kind == EXECUTE:
                verdict = PASS_ON
                if client.deallocation is not None and data[pos + 5] == 0:
                    verdict = self.rewriter.execute(client, server)
                if verdict == PASS_ON:
                    cycle.request(OWES_EXECUTE)
            elif kind == PARSE:
                pool.client_parses += 1
                verdict = PASS_ON
                if (pool.rewrites or client.statements is not None) and not client.replication:
                    self.spill(buf, run, pos)
                    run = pos
                    verdict = self.rewriter.parse(client, server, buf, pos + 5, pos + size)
                    if verdict == STALL:
                        client.stalled = True
                        break
                if verdict == PUT_OUT:
                    run = pos + size
                else:
                    cycle.request(OWES_PARSE)
            elif kind == DESCRIBE or kind == CLOSE:
                run = self.rewriter.describe_or_close(client, server, buf, run, pos, size, kind)
                if run < 0:
                    run = -1 - run
                    break
            elif kind == FLUSH:
                if cycle.special and cycle.fake_is_next():
                    self.front.flush_fakes(client, server)
                    if client.fd < 0:
                        return 0
                if size != 5:
                    cycle.request(OWES_DESCRIBE)  # PostgreSQL will complain of it, and skip to the next Sync
            elif kind == COPY_DATA:
                pass
            elif kind == COPY_DONE or kind == COPY_FAIL:
                cycle.request(OWES_COPY_END)
            elif kind == FUNCTION_CALL:
                cycle.request(OWES_FUNCTION_CALL)
            else:
                faulty = True
                break
            if whole:
                pos += size
            else:
                client.passing = size - (end - pos)
                pos = end
        if client.state == CLIENT_ACTIVE and server is not None:
            server.note(buf, first, pos)
            if run < pos or self.assembly.end:
                if client.query_since == 0:
                    client.query_since = self.reactor.now
                    client.idle_since = 0
                self.to_server(server, buf, run, pos)
        if faulty:  # told behind what came before it
            self.front.violation(client, kind, length)
            return 0
        if pos < end or client.inbox is not None:
            self.inboxes.keep(client, buf, pos)
        return 0

    def acquire(self, client: Client) -> Server | None:
        """Link a client to a server, or let it wait for one."""
        pool: Pool = client.pool
        if client.doom is not None:
            self.front.fulfil(client)
            return None
        while pool.top is not None and not client.replication:
            server = pool.acquire(self.reactor.now)
            if server is None:
                break
            if server.state == SERVER_IDLE:
                self.front.check(server)  # idle for too long to be trusted unseen
                continue
            if not self.join(client, server):
                return None
            return server
        pool.enqueue(client, self.reactor.now)
        self.front.grow(pool)
        return None

    def join(self, client: Client, server: Server) -> bool:
        """Make the two ends one; return False when the server must be prepared for the client first."""
        pool: Pool = server.pool
        client.server = server
        server.client = client
        client.state = CLIENT_ACTIVE
        if server.state != SERVER_ACTIVE:
            pool.move(server, SERVER_ACTIVE, self.reactor.now)
        pool.assignments += 1
        client.transaction_since = self.reactor.now
        if client.parameters is not server.parameters or client.status != IDLE:
            return bool(self.front.adapt(client, server))
        return True

    def server_readable(self, server: Server) -> int:
        """Take what a server has sent."""
        buf = server.inbox
        if buf is None:
            buf = self.scratch
            buf.start = buf.end = 0
        count = buf.recv(server.fd, self.chunk)
        if count <= 0:
            if count != AGAIN:
                self.front.server_gone(server, count)
            return 0
        if count == self.chunk:
            self.reactor.again.append(server)
        if server.client is not None and server.login is None:
            return self.from_server(server, buf)
        buf.start = self.front.server_bytes(server, buf)
        return self.inboxes.keep(server, buf, buf.start)

    def from_server(self, server: Server, buf: Buffer) -> int:
        """Pass on the messages in buf[start:end] to the server's client; release the server when it is free."""
        data = buf.data
        pos = run = buf.start
        end = buf.end
        client: Client = server.client  # type: ignore[assignment]  # it has one, or the front would be asked
        cycle = server.cycle
        pool: Pool = server.pool
        while pos < end:
            if server.passing:
                size = min(server.passing, end - pos)
                server.passing -= size
                if server.discarding:
                    self.spill(buf, run, pos)
                    run = pos + size
                pos += size
                continue
            if end - pos < 5:
                break
            kind = data[pos]
            size = (data[pos + 1] << 24 | data[pos + 2] << 16 | data[pos + 3] << 8 | data[pos + 4]) + 1
            whole = end - pos >= size
            if size < 5 or size > LONGEST_ANSWER or (kind == READY_FOR_QUERY and size != 6):
                if run < pos or self.assembly.end:
                    server.told = True
                    self.to_client(client, buf, run, pos)
                if server.client is not None:
                    self.front.server_gone(server, 0)
                return 0
            # What has to be understood is waited for; of the longest errors only that they are errors.
            is_needed = kind == PARAMETER_STATUS or (kind == ERROR_RESPONSE and size <= LONGEST_ERROR)
            if not whole and kind != DATA_ROW and kind != COPY_DATA and (is_needed or end - pos < STREAM):
                break
            verdict = 0
            if cycle.special:
                if cycle.fake_is_next():
                    self.spill(buf, run, pos)
                    run = pos
                    self.put_fakes(cycle)
                if cycle.skip_is_next():
                    verdict = SKIP
            if kind != DATA_ROW:
                if kind == COMMAND_COMPLETE:
                    if data[pos + 5] == 0x44 and (
                        buf.equals(pos + 5, pos + size, b"DEALLOCATE ALL\0")
                        or buf.equals(pos + 5, pos + size, b"DISCARD ALL\0")
                    ):
                        self.rewriter.dropped_all(client, server)
                elif kind == PARAMETER_STATUS:
                    self.front.parameter_status(server, buf.slice(pos + 5, pos + size), verdict == SKIP)
                elif (kind == ERROR_RESPONSE or kind == NOTICE_RESPONSE) and whole and not cycle.is_muted():
                    other = self.front.server_said(server, buf.slice(pos, pos + size))
                    if other is not None:
                        self.spill(buf, run, pos)
                        run = pos + size
                        if not other:  # its last words: told when it has gone
                            self.front.hush(server)
                            pos += size
                            continue
                        self.assembly.extend(other)
                verdict = cycle.answer(kind)
                if cycle.lost:
                    server.unnamed_serial = -1
                    if cycle.lost & LOST_PARSE:
                        client.unnamed_serial = 0
                    cycle.lost = 0
                if kind == READY_FOR_QUERY:
                    cycle.status = data[pos + 5]
                    if verdict != SKIP:
                        server.answered += 1
                        self.ready(client, cycle)
                    elif server.adapting is not None:
                        self.front.adapted(client, server)
                        if server.client is None:
                            run = pos + size
                            pos = run
                            break
            if verdict == SKIP:
                self.spill(buf, run, pos)
                run = min(pos + size, end)
            if whole:
                pos += size
            else:
                server.passing = size - (end - pos)
                server.discarding = verdict == SKIP
                pos = end
        if run < pos or self.assembly.end:
            server.told = True
            self.to_client(client, buf, run, pos)
        if pos < end or server.inbox is not None:
            self.inboxes.keep(server, buf, pos)
        if server.client is None:
            return 0  # the client did not take it and is gone
        if client.stalled and (cycle.boundaries == 0 or not cycle.changes):
            client.stalled = False
            self.reactor.soon.append(client)
        if cycle.owed() == 0 and not cycle.group_open:
            server.forget()
        if cycle.is_free() and server.foreign is None and pool.mode != POOL_SESSION and not client.replication:
            self.part(client, server)
        elif cycle.owed() == 0:
            client.idle_since = self.reactor.now
            if pool.mode == POOL_STATEMENT and cycle.status != IDLE:
                self.front.statement_only(client)
        if client.out is not None and server.client is client and client.out.end - client.out.start > self.high_water:
            self.reactor.want(server, server.interest & ~READ)
        return 0

    def ready(self, client: Client, cycle: Cycle) -> int:
        """Count a query that is done, and a transaction with it."""
        pool: Pool = client.pool
        now = self.reactor.now
        pool.query_count += 1
        client.losses = 0
        if client.query_since:
            pool.query_time += now - client.query_since
        client.query_since = now if cycle.owed() else 0
        if cycle.status == IDLE:
            pool.xact_count += 1
            pool.xact_time += now - client.transaction_since
            client.transaction_since = now
        return 0

    def part(self, client: Client, server: Server) -> int:
        """End a link between two transactions, and give the server to whom it is due."""
        client.server = None
        server.client = None
        client.state = CLIENT_IDLE
        client.transaction_since = 0
        client.idle_since = self.reactor.now
        if server.interest != READ:
            self.reactor.want(server, READ)
        pool: Pool = server.pool
        return self.hand_on(server, pool)

    def hand_on(self, server: Server, pool: Pool) -> int:
        """Give a free server to the client that has waited longest, or let it idle."""
        if server.retiring or server.cancels or server.cycle.desynced or server.broken:
            self.front.set_aside(server)
            return 0
        waiting = pool.next_waiting(self.reactor.now)
        if waiting is None:
            pool.move(server, SERVER_IDLE, self.reactor.now)
            return 0
        server.state_since = self.reactor.now
        if self.join(waiting, server):
            self.resume(waiting)
        return 0

    def put_fakes(self, cycle: Cycle) -> int:
        """Put the answers into the assembly that are due and that the server was not asked for."""
        while cycle.fake_is_next():
            self.assembly.extend(self.fake(cycle))
        return 0

    def fake(self, cycle: Cycle) -> bytes:
        """Settle the request at the head of the cycle, and return the answer that PostgreSQL would give."""
        return ParseComplete if cycle.take_fake() == OWES_PARSE else CloseComplete

    def spill(self, buf: Buffer, start: int, end: int) -> int:
        """Put bytes into the assembly that would have been sent as they are, because something else follows them."""
        if start < end:
            self.assembly.append(buf, start, end)
        return 0

    def to_server(self, server: Server, buf: Buffer, start: int, end: int) -> int:
        """Send the assembly and buf[start:end]; keep what the server does not take, and stop reading its client."""
        if self.assembly.end:
            if start < end:
                self.assembly.append(buf, start, end)
            buf = self.assembly
            start = 0
            end = buf.end
        if server.broken:
            start = end
        elif server.out is None:
            count = buf.send(server.fd, start, end)
            if count >= 0:
                start += count
            elif count != AGAIN:
                server.broken = True  # its last words are still to be read
                start = end
        if start < end:
            if server.out is None:
                server.out = Buffer(max(end - start, 4096))
                self.reactor.want(server, server.interest | WRITE)
            server.out.append(buf, start, end)
            if server.client is not None and server.client.interest & READ:
                self.reactor.want(server.client, server.client.interest & ~READ)
        self.assembly.start = self.assembly.end = 0
        return 0

    def to_client(self, client: Client, buf: Buffer, start: int, end: int) -> int:
        """Send the assembly and buf[start:end]; keep what the client does not take."""
        if self.assembly.end:
            if start < end:
                self.assembly.append(buf, start, end)
            buf = self.assembly
            start = 0
            end = buf.end
        pool: Pool = client.pool
        pool.sent += end - start
        if client.out is None:
            count = buf.send(client.fd, start, end)
            if count >= 0:
                start += count
            elif count != AGAIN:
                self.assembly.start = self.assembly.end = 0
                self.front.client_gone(client, count)
                return 0
        if start < end:
            if client.out is None:
                client.out = Buffer(max(end - start, 4096))
                self.reactor.want(client, client.interest | WRITE)
            client.out.append(buf, start, end)
        self.assembly.start = self.assembly.end = 0
        return 0

    def writable(self, endpoint: Endpoint) -> int:
        """Send what was kept; read the source again when all is gone."""
        out = endpoint.out
        if out is None:
            self.reactor.want(endpoint, endpoint.interest & ~WRITE)
            return 0
        count = out.send(endpoint.fd, out.start, out.end)
        if count < 0:
            if count != AGAIN:
                self.front.unwritable(endpoint, count)
            return 0
        out.start += count
        if out.start == out.end:
            endpoint.out = None
            self.reactor.want(endpoint, endpoint.interest & ~WRITE)
            self.front.drained(endpoint)
        return 0
