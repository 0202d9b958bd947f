"""The sockets that clients connect to: opened once, by the supervisor, and lent to the workers.

1. Each worker has a socket of its own on each TCP address (SO_REUSEPORT), so that the kernel spreads the clients; it
   outlives the worker, so that those in its backlog are served by the next one. A unix socket is shared by all.
2. What cannot be listened on is one sentence that names the address, before any worker is started.
3. TCP_NODELAY and keep-alive are set here: accepted sockets inherit them (tcp(7)).

Called by supervisor.main.
"""

from __future__ import annotations

import contextlib
import os
import socket

from gateway.settings import Front, Listen
from gateway.tcp import keep_alive


class ListenError(Exception):
    """An address cannot be listened on; the text says which and why."""


class Listeners:
    """All listening sockets, by worker."""

    def __init__(self, front: Front, workers: int) -> None:
        self.addresses = front.listen
        self._own: list[list[socket.socket]] = [[] for _ in range(workers)]
        self._shared: list[socket.socket] = []
        self._paths: list[str] = []
        try:
            for listen in front.listen:
                if listen.unix_path is not None:
                    self._shared.append(self._unix(listen, front))
                else:
                    for worker, sockets in enumerate(self._own):
                        sockets.append(_tcp(listen, front, alone=worker == 0))
        except BaseException:
            self.close()
            raise

    def of(self, worker: int) -> list[int]:
        """Return the descriptors that a worker is to listen on."""
        return [sock.fileno() for sock in (*self._own[worker], *self._shared)]

    def close(self) -> None:
        """Close all, and remove the files of unix sockets."""
        for sock in (*self._shared, *(sock for sockets in self._own for sock in sockets)):
            sock.close()
        for path in self._paths:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _unix(self, listen: Listen, front: Front) -> socket.socket:
        path = listen.unix_path
        assert path is not None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            if _answers(path):
                raise ListenError(f"cannot listen on {path}: another server listens on it")
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            sock.bind(path)
            self._paths.append(path)
            os.chmod(path, int(front.unix_socket_mode, 8))
            sock.listen(front.listen_backlog)
        except OSError as error:
            sock.close()
            raise ListenError(f"cannot listen on {path}: {error.strerror}") from None
        return sock


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


def _tcp(listen: Listen, front: Front, *, alone: bool) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            listen.host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind | socket.SOCK_NONBLOCK)
    except OSError as error:
        raise ListenError(f"cannot listen on {listen}: {error.strerror}") from None
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # "0.0.0.0" may be listened on beside "[::]"
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if alone:
            _refuse_company(family, address)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 1)  # clients speak first: wait for that, 1 s
        keep_alive(sock, front)
        sock.bind(address)
        sock.listen(front.listen_backlog)
    except OSError as error:
        sock.close()
        raise ListenError(f"cannot listen on {listen}: {error.strerror}") from None
    return sock


def _refuse_company(family: int, address: tuple[object, ...]) -> None:
    """Raise OSError when somebody listens there: with SO_REUSEPORT the kernel would give him half of the clients."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
