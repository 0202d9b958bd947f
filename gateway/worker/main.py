"""The composition root of a worker: `python -m gateway.worker.main CHANNEL LISTENER...`, all of them descriptors.

Started by the supervisor only, with a socket pair and the sockets to listen on already open. It serves until it has
drained, which it begins when it is told to or when the supervisor is gone.
"""

from __future__ import annotations

import gc
import logging
import signal
import sys

from gateway.control import Configure
from gateway.logs import set_up
from gateway.worker.channel import Channel
from gateway.worker.front import Front
from gateway.worker.reactor import Reactor

log = logging.getLogger("gateway.worker")


def main(channel_fd: int, listeners: list[int]) -> None:
    """Serve clients until drained."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the supervisor's to act on: a terminal sends them to us as well
    reactor = Reactor()
    channel = Channel(reactor, channel_fd)
    first, *rest = channel.wait()
    assert isinstance(first, Configure)
    set_up(first.settings.front, f"worker {first.index}")
    front = Front(reactor, channel, listeners, first)
    reactor.front, reactor.link = front, front.link
    front.start()
    for record in rest:
        front.obey(record)
    gc.freeze()  # what is there now stays
    reactor.run()


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(argument) for argument in sys.argv[2:]])
