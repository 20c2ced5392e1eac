"""Server-sent events in a copy of an answer's bytes.

A streamed text comes as hundreds of events that are alike but for one string. Where clients append those, they are put
together, unread, into one event with all of the text: reading JSON one by one would cost three times as much.
"""

from re import compile as re_compile

# Strings of deltas, in whichever dialect. Inside of another string their quotes would be escaped.
_GROWING = re_compile(rb'"(?:content|text|reasoning|reasoning_content|thinking|arguments|partial_json)": ?"')
_BACKSLASH = 0x5C
# The rest of such a string.
_STRING = re_compile(rb'[^"\\\x00-\x1f]*(?:\\.[^"\\\x00-\x1f]*)*')
# An event with a token of text in it has 100 bytes and more in most dialects, 47 in the shortest; comments that keep a
# connection open are few. Every event costs some 0.5 µs, an empty one as well, and 1 µs if it is read; a server may
# send 16 MB of empty ones: 5 s of the event loop.
_LEAST_EVENT_BYTES = 64
_ALWAYS_READ_EVENTS = 1_024


class FloodError(ValueError):
    """More events than anybody needs for so few bytes."""


def events_of(data: bytes, *, by_deltas: bool = True) -> tuple[list[bytes], bytes]:
    """The data of the events that end in `data`, and what is behind them, to be put in front of what comes next.

    Raises FloodError rather than to go through very many that are very short.

    `by_deltas`: of several that follow one another, one is made. Cut anywhere and read piece by piece, a stream says
    the same. Of the line ends that the standard knows, a lone CR is not taken for one: no server writes it.
    """
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n")
    found = []
    at = 0
    n_left = max(_ALWAYS_READ_EVENTS, len(data) // _LEAST_EVENT_BYTES)
    while (end := data.find(b"\n\n", at)) >= 0:
        block = data[at:end]
        at = end + 2
        n_left -= 1
        growing = _GROWING.search(block) if by_deltas else None
        if growing is not None:
            block, at, n_more = _with_alike(block, growing.end(), data, at)
            n_left -= n_more
        if n_left < 0:
            raise FloodError
        if block.startswith(b"data: ") and b"\n" not in block:  # nearly all of OpenAI's
            found.append(block[6:])
            continue
        lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
        if lines:
            found.append(lines[0] if len(lines) == 1 else b"\n".join(lines))
    return found, data[at:]


def _with_alike(block: bytes, begin: int, data: bytes, at: int) -> tuple[bytes, int, int]:
    """`block`, its string at `begin` grown by those of the blocks alike that follow in `data`; where they end, and
    how many they are."""
    close = block.find(b'"', begin)
    if close < 0 or block[close - 1] == _BACKSLASH:  # the string may go on
        return block, at, 0
    head, tail = block[:begin], block[close:] + b"\n\n"
    n_tail = len(tail)
    texts = []
    while data.startswith(head, at):
        begins = at + begin
        ends = data.find(b'"', begins)
        if data[ends - 1] == _BACKSLASH or not data.startswith(tail, ends):  # the quote may be an escaped one
            string = _STRING.match(data, begins)
            ends = string.end() if string else -1
            if not data.startswith(tail, ends):
                break
        # A line end in it would be no JSON, neither in one event nor in several.
        texts.append(data[begins:ends])
        at = ends + n_tail
    return b"".join([block[:close], *texts, block[close:]]), at, len(texts)
