"""Options of TCP sockets that both sides of the gateway set alike.

Called by supervisor.listeners for the sockets that clients connect to, and by worker.servers. See tcp(7), socket(7).
"""

from __future__ import annotations

import socket

from gateway.settings import Front


def keep_alive(sock: socket.socket, front: Front) -> None:
    """Set the keep-alive options of a socket as the settings say; 0 leaves the kernel's value."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, int(front.tcp_keepalive))
    for option, value in (
        (socket.TCP_KEEPIDLE, front.tcp_keepidle),
        (socket.TCP_KEEPINTVL, front.tcp_keepintvl),
        (socket.TCP_KEEPCNT, front.tcp_keepcnt),
        (socket.TCP_USER_TIMEOUT, int(front.tcp_user_timeout * 1000)),  # milliseconds to the kernel
    ):
        if value:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
