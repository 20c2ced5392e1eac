"""A request on its way through the server: its sequences, and where their tokens go."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable

import orjson

from prefixroute.demo.engine.request import FinishReason
from prefixroute.demo.server.prompts import JsonObject
from prefixroute.demo.server.tokens import TOKEN_BYTES, TextRequest


def named_event(data: JsonObject) -> bytes:
    """A server-sent event named after the data's `type`."""
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), orjson.dumps(data))


class ServedRequest(TextRequest):
    """One sequence of a job; `index` is its place among the choices of the answer."""

    __slots__ = ("index", "job", "n_sent")

    index: int
    job: "Job"
    # Output tokens that are on their way to the client.
    n_sent: int

    @property
    def answer(self) -> str:
        """What has been said so far."""
        return self.text[: self.n_output * TOKEN_BYTES].decode("ascii")


class Job:
    """What one HTTP request asks for: one or more sequences. `done` is set when all of them have ended."""

    def __init__(self, job_id: str, model: str, requests: list[ServedRequest], n_choices: int = 1) -> None:
        """`requests`: `n_choices` of them for each prompt, one prompt after the other."""
        self.id = job_id
        self.model = model
        self.created = int(time.time())
        self.requests = requests
        self.n_left = len(requests)
        self._prompts = requests[::n_choices]
        self.stream: TokenStream | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for index, request in enumerate(requests):
            request.index = index
            request.job = self
            request.n_sent = 0

    @property
    def n_prompt(self) -> int:
        """Tokens of all prompts, each counted once however many choices it has."""
        return sum(request.n_prompt for request in self._prompts)

    @property
    def n_cached(self) -> int:
        return sum(request.cached_tokens or 0 for request in self._prompts)

    @property
    def n_output(self) -> int:
        return sum(request.n_output for request in self.requests)

    def end_one(self) -> None:
        """Called for each sequence that ended, in whatever way."""
        self.n_left -= 1
        if self.n_left == 0 and not self.done.done():
            self.done.set_result(None)


class EventWriter:
    """Writes server-sent events straight to a connection whose head has been sent.

    One write a call, no task switch, no waiting: what a slow client has not taken stays in the transport's
    buffer, which the length of the answer bounds. `chunked`: frame each event as an HTTP chunk.
    """

    __slots__ = ("_chunked", "_transport")

    def __init__(self, transport: asyncio.Transport, *, chunked: bool) -> None:
        self._transport = transport
        self._chunked = chunked

    def send(self, event: bytes) -> None:
        # Between a reset and the handler's cancellation there may be tokens for nobody.
        if not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(event), event) if self._chunked else event)

    def send_all(self, events: Iterable[bytes]) -> None:
        """Several events with one write, each in a chunk of its own."""
        if not self._transport.is_closing():
            frames = (b"%x\r\n%b\r\n" % (len(event), event) if self._chunked else event for event in events)
            self._transport.write(b"".join(frames))


class TokenStream(ABC):
    """Turns the tokens of a job into the events of one dialect.

    `interval` (vLLM's --stream-interval): the first token goes out at once, then one event for so many tokens.
    """

    def __init__(self, job: Job, writer: EventWriter, interval: int) -> None:
        self.job = job
        self._writer = writer
        self._interval = interval

    def on_start(self) -> None:  # noqa: B027 - most dialects say nothing before the first token
        """The job was accepted; what goes out before there is any token."""

    def on_token(self, request: ServedRequest) -> None:
        """`request` got a token, or came to its end, or both."""
        n_output, n_sent = request.n_output, request.n_sent
        if request.finish_reason is not None:
            request.n_sent = n_output
            text = request.text[n_sent * TOKEN_BYTES : n_output * TOKEN_BYTES]
            events = self._first_events(request) if n_sent == 0 else []
            self._writer.send_all([*events, *self._last_events(request, text, request.finish_reason)])
        elif n_sent == 0:
            request.n_sent = n_output
            text = request.text[: n_output * TOKEN_BYTES]
            self._writer.send_all([*self._first_events(request), self._text_event(request, text)])
        elif n_output - n_sent >= self._interval:
            request.n_sent = n_output
            self._writer.send(self._text_event(request, request.text[n_sent * TOKEN_BYTES : n_output * TOKEN_BYTES]))

    @abstractmethod
    def _first_events(self, request: ServedRequest) -> list[bytes]:
        """What goes before the first text of `request`."""

    @abstractmethod
    def _text_event(self, request: ServedRequest, text: bytes) -> bytes:
        """The event for `text`, which is ASCII and needs no escaping in JSON. Called for each token."""

    @abstractmethod
    def _last_events(self, request: ServedRequest, text: bytes, reason: FinishReason) -> list[bytes]:
        """The rest of the text, which may be empty, and the end of `request`, perhaps of the whole stream."""
