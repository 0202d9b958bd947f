"""Buffers and system calls, plain: what sock.pyx does with pointers, for machines and tests without a compiler.

1. The twin of sock.pyx: same names, same meaning; this file says what each of them does.
2. An error of a system call is a negative errno in the return value, never an exception: EAGAIN is not news.
3. A buffer's bytes are data[start:end]; whoever takes bytes out moves start, whoever puts bytes in moves end.

Called by the reactor, the link and the front; see epoll(7), recv(2), send(2), accept4(2).
"""

import errno
import os
import select
import socket
import time

AGAIN = -errno.EAGAIN
READ = select.EPOLLIN
WRITE = select.EPOLLOUT
ENDED = select.EPOLLERR | select.EPOLLHUP | select.EPOLLRDHUP
DEAD = select.EPOLLERR | select.EPOLLHUP  # both ways: nothing can be sent any more
_EDGE = select.EPOLLET | select.EPOLLRDHUP
_EVENTS = 512


class Buffer:
    """Bytes that wait to be understood or to be sent: a block that grows and never shrinks."""

    __slots__ = ("data", "end", "start")

    def __init__(self, size: int = 4096) -> None:
        self.data = bytearray(size)
        self.start = 0
        self.end = 0

    @property
    def size(self) -> int:
        return len(self.data)

    def __len__(self) -> int:
        return self.end - self.start

    def reserve(self, room: int) -> int:
        """Make room for *room* more bytes after end, moving the bytes to the front or growing the block."""
        if len(self.data) - self.end < room:
            self.compact()
            missing = self.end + room - len(self.data)
            if missing > 0:
                self.data.extend(bytes(max(missing, len(self.data))))
        return 0

    def append(self, source: "Buffer", start: int, end: int) -> int:
        """Copy source.data[start:end] behind the last byte."""
        self.reserve(end - start)
        self.data[self.end : self.end + end - start] = source.data[start:end]
        self.end += end - start
        return 0

    def extend(self, source: bytes) -> int:
        """Copy *source* behind the last byte."""
        self.reserve(len(source))
        self.data[self.end : self.end + len(source)] = source
        self.end += len(source)
        return 0

    def put_int32(self, value: int) -> int:
        """Put one big-endian 32-bit number behind the last byte."""
        return self.extend((value & 0xFFFFFFFF).to_bytes(4, "big"))

    def put_byte(self, value: int) -> int:
        """Put one byte behind the last one."""
        return self.extend(bytes((value,)))

    def compact(self) -> int:
        """Move the bytes to the front of the block."""
        size = self.end - self.start
        self.data[:size] = self.data[self.start : self.end]
        self.start, self.end = 0, size
        return 0

    def slice(self, start: int, end: int) -> bytes:
        """Return a copy of data[start:end]."""
        return bytes(self.data[start:end])

    def byte(self, at: int) -> int:
        """Read one byte."""
        return self.data[at]

    def int32(self, at: int) -> int:
        """Read a signed big-endian 32-bit number."""
        return int.from_bytes(self.data[at : at + 4], "big", signed=True)

    def find_zero(self, start: int, end: int) -> int:
        """Return where the first zero byte of data[start:end] stands, or -1."""
        return self.data.find(0, start, end) if start < end else -1

    def equals(self, start: int, end: int, other: bytes) -> bool:
        """Is data[start:end] the same as *other*?"""
        return self.data[start:end] == other

    def recv(self, fd: int, room: int) -> int:
        """Receive at most *room* bytes; return how many, 0 at the end of the stream, or -errno."""
        self.reserve(room)
        try:
            with memoryview(self.data) as view:
                count = os.readv(fd, [view[self.end : self.end + room]])
        except OSError as error:
            return -(error.errno or errno.EIO)
        self.end += count
        return count

    def send(self, fd: int, start: int, end: int) -> int:
        """Send data[start:end]; return how many bytes were taken, or -errno."""
        return send_bytes(fd, self.slice(start, end))


class Poller:
    """An epoll set: it tells what has become ready, by default *once* (EPOLLET); change() makes it tell again."""

    __slots__ = ("_epoll", "now", "ready_events", "ready_fds")

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self.ready_fds: list[int] = []  # what the last wait found, valid until the next
        self.ready_events: list[int] = []  # EPOLLIN, EPOLLOUT, EPOLLERR, EPOLLHUP, EPOLLRDHUP of each
        self.now = clock()  # at the end of the last wait

    def watch(self, fd: int, interest: int, once: bool = True) -> int:
        """Begin to watch *fd* for READ, WRITE, both, or (0) only for its end."""
        self._epoll.register(fd, interest | (_EDGE if once else select.EPOLLRDHUP))
        return 0

    def change(self, fd: int, interest: int, once: bool = True) -> int:
        """Watch *fd* for something else from now on."""
        self._epoll.modify(fd, interest | (_EDGE if once else select.EPOLLRDHUP))
        return 0

    def forget(self, fd: int) -> int:
        """Stop watching *fd*."""
        self._epoll.unregister(fd)
        return 0

    def wait(self, timeout_ms: int) -> int:
        """Wait at most *timeout_ms* (-1: for ever) and return how many descriptors are ready."""
        found = self._epoll.poll(timeout_ms / 1000 if timeout_ms >= 0 else -1, _EVENTS)
        self.ready_fds = [fd for fd, _ in found]
        self.ready_events = [events for _, events in found]
        self.now = clock()
        return len(found)


def accept(fd: int) -> int:
    """Accept one connection, non-blocking and close-on-exec; return its descriptor or -errno."""
    try:
        listener = socket.socket(fileno=fd)
    except (OSError, ValueError):
        return -errno.EBADF
    try:
        client, _ = listener.accept()
    except OSError as error:
        return -(error.errno or errno.EIO)
    finally:
        listener.detach()
    client.setblocking(False)
    return client.detach()


def send_bytes(fd: int, data: bytes) -> int:
    """Send *data*; return how many bytes were taken, or -errno."""
    try:
        return os.write(fd, data)  # Python ignores SIGPIPE: EPIPE is an error code
    except OSError as error:
        return -(error.errno or errno.EIO)


def finish(fd: int) -> int:
    """Send the end of the stream, and go on receiving; return 0 or -errno."""
    stream = socket.socket(fileno=fd)
    try:
        stream.shutdown(socket.SHUT_WR)
    except OSError as error:
        return -(error.errno or errno.EIO)
    finally:
        stream.detach()
    return 0


def end(fd: int) -> int:
    """Close a descriptor; return 0 or -errno."""
    try:
        os.close(fd)
    except OSError as error:
        return -(error.errno or errno.EIO)
    return 0


def clock() -> int:
    """Return the monotonic clock in microseconds."""
    return time.monotonic_ns() // 1000
