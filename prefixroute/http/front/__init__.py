"""Clients' connections: where requests come in.

`server` makes and ends them; `full` is one that takes all of HTTP/1 (aiohttp's), `fast` one that takes the plain case
itself and leaves everything else to a full one; `plain` is what that case is, and `coming` a body of it in pieces.
`adapter` stands between aiohttp's server and the rest. `pacing` holds back what is faster than a client; `presence`
sees who has gone; `listening` opens ports; `malformed` and `parser_gaps` are about aiohttp's parser.
"""

from prefixroute.http.front.limits import ClientLimits, Handler
from prefixroute.http.front.listening import address, listen
from prefixroute.http.front.server import FrontServer, has_fast_parser

__all__ = ["ClientLimits", "FrontServer", "Handler", "address", "has_fast_parser", "listen"]
