"""Who is at the other end of a client's connection: personal data, looked at only where settings ask for it."""

import asyncio


def client_address(transport: asyncio.BaseTransport | None) -> str | None:
    """The address that the connection comes from (a balancer's, where one is in front); None: it is gone."""
    name = None if transport is None else transport.get_extra_info("peername")
    return str(name[0]) if isinstance(name, tuple) else None
