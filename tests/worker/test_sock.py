"""Buffers and system calls: both twins, the compiled one and the plain one, do the same."""

from __future__ import annotations

import errno
import importlib.util
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gateway
from gateway.worker import sock as loaded


def plain() -> ModuleType:
    """The plain twin, whichever one the package runs."""
    spec = importlib.util.spec_from_file_location("plain_sock", Path(gateway.__file__).parent / "worker/sock.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TWINS = {"pure": plain()} | {gateway.variant(): loaded}

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture(params=list(TWINS.values()), ids=list(TWINS))
def sock(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.settimeout(5.0)
        yield ours, theirs


def fill(sock: Any, ours: socket.socket) -> int:
    """Send until the kernel takes no more; return how many bytes it took."""
    buffer, total = sock.Buffer(), 0
    buffer.extend(b"x" * 65536)
    while (count := buffer.send(ours.fileno(), 0, 65536)) > 0:
        total += count
    assert count == sock.AGAIN
    return total


def test_twins_agree_on_constants():
    assert {(twin.AGAIN, twin.READ, twin.WRITE, twin.ENDED) for twin in TWINS.values()} == {
        (-errno.EAGAIN, 0x001, 0x004, 0x2018)
    }


OPERATIONS = st.one_of(
    st.tuples(st.just("extend"), st.binary(max_size=40)),
    st.tuples(st.just("put_int32"), st.integers(0, 2**32 - 1)),
    st.tuples(st.just("put_byte"), st.integers(0, 255)),
    st.tuples(st.just("take"), st.integers(0, 30)),
    st.tuples(st.just("reserve"), st.integers(0, 60)),
    st.tuples(st.just("compact")),
)


@given(st.sampled_from(list(TWINS.values())), st.integers(1, 16), st.lists(OPERATIONS, max_size=30))
def test_buffer_after_any_operations_holds_what_was_put_in_and_not_taken(sock, size, operations):
    buffer, model = sock.Buffer(size), b""
    for operation, *arguments in operations:
        if operation == "take":
            count = min(*arguments, len(model))
            buffer.start += count
            model = model[count:]
        else:
            getattr(buffer, operation)(*arguments)
            if operation == "extend":
                model += arguments[0]
            elif operation == "put_int32":
                model += arguments[0].to_bytes(4, "big")
            elif operation == "put_byte":
                model += bytes(arguments)
            elif operation == "reserve":
                assert buffer.size - buffer.end >= arguments[0]
            elif operation == "compact":
                assert buffer.start == 0
        assert len(buffer) == len(model)
        assert buffer.slice(buffer.start, buffer.end) == model
        assert buffer.end <= buffer.size


def test_buffer_append_copies_a_part_of_another(sock):
    source, target = sock.Buffer(8), sock.Buffer(2)
    source.extend(b"0123456789")
    target.extend(b"a")
    target.append(source, 3, 7)
    target.append(source, 5, 5)
    assert target.slice(0, target.end) == b"a3456"


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"\0\0\0\0", 0),
        (b"\0\0\1\2", 258),
        (b"\x7f\xff\xff\xff", 2**31 - 1),
        (b"\x80\0\0\0", -(2**31)),
        (b"\xff\xff\xff\xff", -1),
    ],
)
def test_buffer_int32_is_signed_and_big_endian(sock, data, value):
    buffer = sock.Buffer()
    buffer.extend(b"." + data)
    assert buffer.int32(1) == value
    assert buffer.byte(0) == ord(".")
    buffer.put_int32(value)
    assert buffer.slice(5, 9) == data


def test_buffer_find_zero_looks_within_its_bounds(sock):
    buffer = sock.Buffer()
    buffer.extend(b"ab\0cd\0")
    assert [buffer.find_zero(start, 6) for start in range(7)] == [2, 2, 2, 5, 5, 5, -1]
    assert buffer.find_zero(0, 2) == -1
    assert buffer.find_zero(3, 3) == buffer.find_zero(4, 3) == -1


def test_buffer_equals_compares_length_and_bytes(sock):
    buffer = sock.Buffer()
    buffer.extend(b"DISCARD ALL\0")
    assert buffer.equals(0, 12, b"DISCARD ALL\0")
    assert not buffer.equals(0, 11, b"DISCARD ALL\0")
    assert not buffer.equals(1, 12, b"DISCARD ALL")
    assert buffer.equals(3, 3, b"")


def test_buffer_receives_and_sends_what_there_is(sock, pair):
    ours, theirs = pair
    buffer = sock.Buffer(4)
    buffer.extend(b">")
    assert buffer.recv(ours.fileno(), 100) == sock.AGAIN
    theirs.sendall(b"hello, world")
    assert buffer.recv(ours.fileno(), 5) == 5
    assert buffer.recv(ours.fileno(), 100) == 7
    assert buffer.slice(0, buffer.end) == b">hello, world"
    assert buffer.send(ours.fileno(), 1, 6) == 5
    assert sock.send_bytes(ours.fileno(), b"!") == 1
    assert theirs.recv(100) == b"hello!"


def test_buffer_receives_nothing_at_the_end_of_the_stream(sock, pair):
    ours, theirs = pair
    theirs.close()
    assert sock.Buffer().recv(ours.fileno(), 10) == 0


def test_send_to_a_reader_that_is_slow_takes_a_part_and_then_says_again(sock, pair):
    ours, theirs = pair
    total = fill(sock, ours)
    assert sock.send_bytes(ours.fileno(), b"x") == sock.AGAIN
    ours.close()
    received = 0
    while count := len(theirs.recv(65536)):
        received += count
    assert received == total


def test_send_to_a_reader_that_has_gone_is_an_error_code_and_no_signal(sock, pair):
    ours, theirs = pair
    theirs.close()
    buffer = sock.Buffer()
    buffer.extend(b"x")
    assert buffer.send(ours.fileno(), 0, 1) == -errno.EPIPE
    assert sock.send_bytes(ours.fileno(), b"x") == -errno.EPIPE


def test_receive_from_a_connection_that_was_reset_is_an_error_code(sock):
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as ours:
        theirs, _ = listener.accept()
        ours.sendall(b"unread")
        theirs.recv(6, socket.MSG_PEEK)  # it is there, and is thrown away by the close
        theirs.close()
        assert sock.Buffer().recv(ours.fileno(), 10) == -errno.ECONNRESET


@pytest.mark.parametrize("fd", [-1, 2**20 - 1])
def test_descriptor_that_is_none_is_an_error_code(sock, fd):
    buffer = sock.Buffer()
    buffer.extend(b"x")
    assert buffer.recv(fd, 10) == -errno.EBADF
    assert buffer.send(fd, 0, 1) == -errno.EBADF
    assert sock.send_bytes(fd, b"x") == -errno.EBADF
    assert sock.accept(fd) == -errno.EBADF


def test_accept_takes_one_connection_that_never_blocks(sock):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        assert sock.accept(listener.fileno()) == sock.AGAIN
        with socket.create_connection(listener.getsockname()):
            fd = sock.accept(listener.fileno())
            assert fd >= 0
            with socket.socket(fileno=fd):
                assert sock.Buffer().recv(fd, 10) == sock.AGAIN
                assert not os.get_inheritable(fd)
            assert sock.accept(listener.fileno()) == sock.AGAIN


def test_poller_tells_a_change_once(sock, pair):
    ours, theirs = pair
    poller = sock.Poller()
    poller.watch(ours.fileno(), sock.READ)
    assert poller.wait(0) == 0
    theirs.sendall(b"x")
    assert poller.wait(1000) == 1
    assert poller.wait(0) == 0, "it was told"
    theirs.sendall(b"x")
    assert poller.wait(1000) == 1, "there is more"


def test_poller_tells_again_what_is_watched_anew(sock, pair):
    ours, theirs = pair
    poller = sock.Poller()
    theirs.sendall(b"x")
    poller.watch(ours.fileno(), 0)
    assert poller.wait(0) == 0
    poller.change(ours.fileno(), sock.READ)
    assert poller.wait(0) == 1
    assert poller.wait(0) == 0
    poller.change(ours.fileno(), sock.READ)
    assert poller.wait(0) == 1


def test_poller_tells_when_there_is_room_to_write(sock, pair):
    ours, theirs = pair
    poller = sock.Poller()
    total = fill(sock, ours)
    poller.watch(ours.fileno(), sock.WRITE)
    assert poller.wait(0) == 0
    while total:
        total -= len(theirs.recv(65536))
    assert poller.wait(1000) == 1


def test_poller_tells_the_end_to_whoever_asks_for_nothing(sock, pair):
    ours, theirs = pair
    poller = sock.Poller()
    poller.watch(ours.fileno(), 0)
    theirs.close()
    assert poller.wait(1000) == 1


def test_poller_forgets_and_refuses_to_do_so_twice(sock, pair):
    ours, theirs = pair
    poller = sock.Poller()
    poller.watch(ours.fileno(), sock.READ)
    with pytest.raises(FileExistsError):
        poller.watch(ours.fileno(), sock.READ)
    poller.forget(ours.fileno())
    theirs.sendall(b"x")
    assert poller.wait(0) == 0
    for refused in (poller.forget, lambda fd: poller.change(fd, sock.READ)):
        with pytest.raises(FileNotFoundError):
            refused(ours.fileno())


def test_poller_interrupted_by_a_signal_goes_on(sock):
    poller = sock.Poller()
    hits: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: hits.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        deadline = time.monotonic() + 5
        while not hits and time.monotonic() < deadline:
            assert poller.wait(50) == 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert hits


def test_clock_is_monotonic_in_microseconds(sock):
    before = time.monotonic_ns() // 1000
    now = sock.clock()
    assert before <= now <= time.monotonic_ns() // 1000
    poller = sock.Poller()
    poller.wait(0)
    assert poller.now >= now
