"""A name service on a real socket, for the tests of resolver and discovery."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import dns.asyncresolver
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

SILENT = object()


@asynccontextmanager
async def dns_server(
    answers: dict[tuple[str, str], Any], host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[Callable[[], dns.asyncresolver.Resolver]]:
    """Serve (name, type) -> (ttl, record...), a response code, or SILENT; what is not there is NXDOMAIN.

    What is in answers may change while it is served.
    """

    async def serve() -> None:
        async for packet, (asker, back) in udp:
            query = dns.message.from_wire(packet)
            response = dns.message.make_response(query)
            name, kind = query.question[0].name, dns.rdatatype.to_text(query.question[0].rdtype)
            answer = answers.get((name.to_text(), kind), dns.rcode.NXDOMAIN)
            if answer is SILENT:
                continue
            if isinstance(answer, dns.rcode.Rcode):
                response.set_rcode(answer)
            elif answer:
                ttl, *records = answer
                response.answer.append(dns.rrset.from_text(name, ttl, "IN", kind, *records))
            await udp.sendto(response.to_wire(), asker, back)

    def made() -> dns.asyncresolver.Resolver:
        client = dns.asyncresolver.Resolver(configure=False)
        client.nameservers = [host]
        client.port = udp.extra_attributes[anyio.abc.SocketAttribute.local_port]()
        return client

    async with (
        await anyio.create_udp_socket(local_host=host, local_port=port) as udp,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(serve)
        yield made
        tasks.cancel_scope.cancel()
