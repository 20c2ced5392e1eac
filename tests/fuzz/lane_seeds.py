"""What cases of both lanes begin with: plain requests, each doubt about one, and connections with several of them."""

from random import Random

from tests.fuzz import seeds

# Of the routers whose port is guarded.
KEYS = (b"key-of-alice-0123456789", b"key-of-bob-9876543210")
KEYS_FILE = b"alice: %s\nbob: %s\n" % KEYS
ORIGIN = b"https://page.example"

# Longest body that the routers take, and longest line of a head.
MAX_BODY_BYTES = 2_048
MAX_HEADER_BYTES = 1_024

_ALICE = b"Authorization: Bearer %s\r\n" % KEYS[0]
_BOB = b"x-api-key: %s\r\n" % KEYS[1]
_LONG = b'{"model":"m","prompt":"' + b"long " * 380 + b'"}'


def plain(
    body: bytes = seeds.CHAT,
    more: bytes = b"",
    *,
    before: bytes = b"",
    path: bytes = b"/v1/chat/completions",
    length: bytes | None = None,
) -> bytes:
    """A plain request. `before` and `more`: lines in front of and behind its length."""
    length = b"Content-Length: %d\r\n" % len(body) if length is None else length
    return b"POST %s HTTP/1.1\r\nHost: a\r\n%s%s%s\r\n%s" % (path, before, length, more, body)


# Lines that make a request doubtful, or nearly do.
LINES = (
    b"Content-Length: 72\r\n",
    b"Content-Length: 5\r\n",
    b"content-length:5\r\n",
    b"Content-Length: 0\r\n",
    b"Content-Length: 05\r\n",
    b"Content-Length: +5\r\n",
    b"Content-Length: 72, 72\r\n",
    b"Content-Length: 4294967295\r\n",
    b"Content-Length : 72\r\n",
    b"Content-Length\t: 72\r\n",
    b"Content_Length: 5\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: identity\r\n",
    b"Transfer-Encoding:\r\n",
    b"TE: trailers\r\n",
    b"Trailer: X-Sum\r\n",
    b"Expect: 100-continue\r\n",
    b"Expect: 200-ok\r\n",
    b"Upgrade: h2c\r\n",
    b"Upgrade: websocket\r\nConnection: Upgrade\r\n",
    b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAARAAAAA\r\n",
    b"HTTP2-Settings: AAMAAABkAARAAAAA\r\n",
    b"Keep-Alive: timeout=5\r\n",
    b"Proxy-Connection: close\r\n",
    b"Proxy-Authorization: Basic YTpi\r\n",
    b"Proxy-Authenticate: Basic\r\n",
    b"Connection: keep-alive\r\n",
    b"Connection: Keep-Alive\r\n",
    b"Connection:keep-alive \r\n",
    b"Connection: close\r\n",
    b"Connection: keep-alive, x-hop\r\nX-Hop: 1\r\n",
    b"Connection: keep-alive\r\nConnection: close\r\n",
    b"Connection:\r\n",
    b"Content-Encoding: gzip\r\n",
    b"Content-Encoding: identity\r\n",
    b"Content-Type: application/json\r\n",
    b"Content-Type: multipart/form-data; boundary=b\r\n",
    b"Content-Type:\tMultipart/mixed\r\n",
    b"Content-Type:\r\n",
    b"Host: b\r\n",
    b"Host:\r\n",
    b"HOST: a,b\r\n",
    b"X-Request-Id: abc\r\n",
    b"x-request-id:abc\r\n",
    b"X-REQUEST-ID: \tabc\t \r\n",
    b"x-request-id: a b\r\n",
    b"x-request-id: \r\n",
    b"x-request-id: \xc3\xa9\r\n",
    b"x-request-id: " + b"i" * 128 + b"\r\n",
    b"x-request-id: " + b"i" * 129 + b"\r\n",
    b"x-request-id: a\r\nx-request-id: b\r\n",
    b"x-request-id: a\r\nX-Request-Id: a\r\n",
    b"X-Session-Id: s\r\n",
    b"X-Amzn-SageMaker-Prefix-Aware-Id: p\r\n",
    _ALICE,
    _BOB,
    _ALICE + _BOB,
    b"api-key:%s\r\n" % KEYS[0],
    b"Authorization: bearer  %s \r\n" % KEYS[0],
    b"Authorization: Bearer\t%s\r\n" % KEYS[1],
    b"Authorization: Bearer %sx\r\n" % KEYS[0],
    b"Authorization: Basic YTpi\r\n",
    b"Authorization:\r\n",
    b"Origin: %s\r\n" % ORIGIN,
    b"Origin: https://other.example\r\n",
    b"Access-Control-Request-Method: POST\r\n",
    b"X-Tab:\ta\tb\t\r\n",
    b"X-Obs: \x80\xff\r\n",
    b"X-Trail: a  \r\n",
    b"X-Empty:\r\n",
    b"X-Blank: \t \r\n",
    b"X-Twice: 1\r\nx-twice: 2\r\n",
    b"X-Bare: a\rb\r\n",
    b"X-Bare: a\nb\r\n",
    b"X-Nul: a\x00b\r\n",
    b"X-Del: a\x7fb\r\n",
    b"X-Esc: a\x1bb\r\n",
    b"X-Fold: a\r\n b\r\n",
    b"X-Fold: a\r\n\tb\r\n",
    b"no colon\r\n",
    b": no name\r\n",
    b"X Space: a\r\n",
    b"X-Space : a\r\n",
    b"X(1): a\r\n",
    b"!#$%&'*+-.^_`|~: a\r\n",
    b"Cookie: a=b; c=d\r\n",
    b"Cookie: a=b\r\nCookie: c=d\r\n",
    b"X-Forwarded-For: 1.2.3.4\r\n",
    b"X-Long: " + b"l" * 900 + b"\r\n",
    b"X-Long: " + b"l" * 1_100 + b"\r\n",
    b"".join(b"X-%d: y\r\n" % i for i in range(80)),
    b"".join(b"X-%d: y\r\n" % i for i in range(300)),
)
_STARTS = (
    b"POST /v1/chat/completions HTTP/1.0\r\n",
    b"POST /v1/chat/completions HTTP/1.2\r\n",
    b"POST /v1/chat/completions  HTTP/1.1\r\n",
    b"POST\t/v1/chat/completions HTTP/1.1\r\n",
    b"POST /v1/chat/completions HTTP/1.1\n",
    b"POST /v1/chat/completions?a=b HTTP/1.1\r\n",
    b"POST /v1/messages?beta=true HTTP/1.1\r\n",
    b"POST /v1/messages? HTTP/1.1\r\n",
    b"POST /v1/messages?a=b?c HTTP/1.1\r\n",
    b"POST /v1/messages?a=%2e%2E HTTP/1.1\r\n",
    b"POST /v1/messages?a=b#c HTTP/1.1\r\n",
    b"POST /v1/messages?a=../../sleep HTTP/1.1\r\n",
    b"POST /v1/responses?a=/v1/responses/resp_1 HTTP/1.1\r\n",
    b"POST /sleep?/v1/messages HTTP/1.1\r\n",
    b"POST /v1/messages?a=http://b//c HTTP/1.1\r\n",
    b"POST /v1/messages?\xc3\xa9 HTTP/1.1\r\n",
    b"POST /v1/messages?" + b"a" * 300 + b" HTTP/1.1\r\n",
    b"POST /v1/chat/completions#a HTTP/1.1\r\n",
    b"POST /v1/chat/completions/ HTTP/1.1\r\n",
    b"POST //v1/chat/completions HTTP/1.1\r\n",
    b"POST /v1/chat/%63ompletions HTTP/1.1\r\n",
    b"POST /v1/chat/../chat/completions HTTP/1.1\r\n",
    b"POST http://a/v1/chat/completions HTTP/1.1\r\n",
    b"post /v1/chat/completions HTTP/1.1\r\n",
    b"PUT /v1/chat/completions HTTP/1.1\r\n",
    b"GET /v1/chat/completions HTTP/1.1\r\n",
    b"POST /v1/chat/completions http/1.1\r\n",
    b"\r\nPOST /v1/chat/completions HTTP/1.1\r\n",
    b"\r\n\r\nPOST /v1/chat/completions HTTP/1.1\r\n",
    b"\nPOST /v1/chat/completions HTTP/1.1\r\n",
    b" POST /v1/chat/completions HTTP/1.1\r\n",
    b"POST /v1/embeddings HTTP/1.1\r\n",
    b"POST /sleep HTTP/1.1\r\n",
    b"POST /v1/models HTTP/1.1\r\n",
    b"POST /health HTTP/1.1\r\n",
    b"POST /v1/audio/transcriptions HTTP/1.1\r\n",
    b"POST /v1/responses HTTP/1.1\r\n",
    b"POST /v1/messages HTTP/1.1\r\n",
    b"POST /v1/messages/count_tokens HTTP/1.1\r\n",
)
_HOSTS = (
    b"",
    b"a:",
    b"a:80",
    b"[::1]:80",
    b"a,b",
    b"a b",
    b"a/b",
    b"http://a",
    b"user@a",
    b"\xc3\xa9",
    b"a:b",
    b"A.b_c~",
)
_LINE = b"POST /v1/chat/completions HTTP/1.1\r\n"


def _chunked(more: bytes = b"", trailers: bytes = b"") -> bytes:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n%s\r\n" % more
    return head + b"%x\r\n%s\r\n0\r\n%s\r\n" % (len(seeds.CHAT), seeds.CHAT, trailers)


# Whole requests that connections are made of.
ATOMS = (
    plain(),
    plain(),
    plain(seeds.STREAM),
    plain(seeds.CHAT, b"x-request-id: first\r\n"),
    plain(seeds.STREAM, b"x-request-id: second\r\n"),
    plain(seeds.CHAT, before=b"X-Request-ID: in-front\r\n"),
    plain(seeds.STREAM, before=b"X-Request-ID: in-front-too\r\n"),
    plain(seeds.CHAT, before=b"x-request-id: a b\r\n"),
    plain(seeds.CHAT, before=b"x-request-id: ab\r\n"),
    plain(seeds.CHAT, before=b"x-request-id:ab\r\n"),
    plain(seeds.CHAT, _ALICE),
    plain(seeds.STREAM, _ALICE + b"x-request-id: hers\r\n"),
    plain(seeds.CHAT, _BOB),
    plain(seeds.STREAM, _ALICE.replace(b"alice", b"alicf")),
    plain(seeds.CHAT, _ALICE + b"Origin: %s\r\n" % ORIGIN),
    plain(seeds.CHAT, b"X-Session-Id: s\r\nContent-Type: application/json\r\nUser-Agent: u\r\n"),
    plain(seeds.STREAM, b"X-Session-Id: t\r\nContent-Type: application/json\r\nUser-Agent: u\r\n"),
    plain(seeds.CHAT, b"x-session-id: s\r\nContent-Type: application/json\r\nUser-Agent: u\r\n"),
    plain(seeds.CHAT, length=b"content-length:%d\r\n" % len(seeds.CHAT)),
    plain(seeds.CHAT, length=b"Content-Length:  %d\r\n" % len(seeds.CHAT)),
    plain(seeds.CHAT, length=b"Content-Length: %d \r\n" % len(seeds.CHAT)),
    plain(b'{"model":"m","input":"hi","stream":true}', path=b"/v1/responses"),
    plain(b'{"model":"m","messages":[]}', path=b"/v1/messages"),
    plain(b'{"model":"none","prompt":"x"}', path=b"/v1/completions"),
    plain(b"{", path=b"/v1/completions"),
    plain(_LONG, _ALICE),
    plain(b"x" * (MAX_BODY_BYTES + 1), _ALICE),
    plain(seeds.CHAT, length=b"Content-Length: 0\r\n")[: -len(seeds.CHAT)],
    plain(seeds.CHAT, b"Connection: close\r\n"),
    plain(seeds.CHAT, b"Expect: 100-continue\r\n"),
    plain(seeds.CHAT, b"Connection: Upgrade\r\nUpgrade: h2c\r\n"),
    plain(b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--", _BOB, path=b"/v1/audio/transcriptions"),
    _chunked(),
    _chunked(_ALICE),
    _chunked(trailers=b"X-Sum: 1\r\n"),
    b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: a\r\n%s\r\n" % _BOB,
    b"HEAD /v1/models HTTP/1.1\r\nHost: a\r\n\r\n",
    b"OPTIONS /v1/models HTTP/1.1\r\nHost: a\r\nOrigin: %s\r\nAccess-Control-Request-Method: POST\r\n\r\n" % ORIGIN,
    b"DELETE /v1/responses/resp_1 HTTP/1.1\r\nHost: a\r\n%s\r\n" % _ALICE,
    b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    b"rubbish",
    b"\r\n",
)
_ALIKE = tuple(
    plain(before=line, more=_ALICE)
    for line in (
        *(b"x-request-id: ab\r\n", b"x-request-id: cd\r\n", b"x-request-id: a b\r\n", b"x-request-id:ab\r\n"),
        *(b"X-request-id: ab\r\n", b"x-request-id: \r\n", b"x-request-id: ab \r\n", b""),
    )
)
# What ends a connection, mostly.
_LAST = (
    plain()[:-7],
    plain(_LONG)[:-700],
    plain(b"x" * (MAX_BODY_BYTES + 1))[:-700],
    plain()[:60],
    _chunked()[:-9],
    b"rubbish\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"",
)


def _connections(n: int) -> list[bytes]:
    """Several requests on one connection, the same ones each time."""
    rng = Random(0)
    return [b"".join(rng.choices(ATOMS, k=rng.randint(2, 6))) + rng.choice(_LAST) for _ in range(n)]


CORPUS = (
    *seeds.REQUESTS,
    *ATOMS,
    *(plain(more=line) for line in LINES),
    *(plain(before=line) for line in LINES),
    *(plain(more=line) + plain(seeds.STREAM, line) for line in LINES),
    *(plain().replace(_LINE, start) for start in _STARTS),
    *(plain().replace(b"Host: a", b"Host: " + host) for host in _HOSTS),
    # What is recognised, or nearly is: an id after none that is fit, a length after one written oddly.
    *(first + second for first in _ALIKE for second in _ALIKE),
    *(plain() * n for n in (2, 3, 8)),
    *_connections(60),
)
WORDS = (*seeds.REQUEST_WORDS, *LINES, *ATOMS, b"\r\n\r\n" + plain(), *KEYS, b"POST ", b"Content-Length: 71\r\n")
