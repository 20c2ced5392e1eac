"""Whether a client is fit to be talked to, and still there."""

import asyncio
import select
import ssl

# Told whatever is still to be read.
_GONE = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)


def has_gone(transport: asyncio.Transport) -> bool:
    """Whether the other end of a connection that is not being read is closed: nobody is told of that."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), _GONE)
    return bool(poll.poll(0))


def is_unproven(transport: asyncio.BaseTransport) -> bool:
    """Whether who is asked for a certificate on each connection has shown none on this one.

    TLS 1.2 resumes sessions by their id, which no option turns off.
    """
    tls = transport.get_extra_info("ssl_object")
    return bool(tls is not None and tls.session_reused and tls.context.verify_mode is ssl.CERT_REQUIRED)
