"""Server-sent events in a copy of an answer's bytes.

A streamed text comes as hundreds of events that are alike but for one string. Where clients append those, they are put
together, unread, into one event with all of the text: reading JSON one by one would cost three times as much.
"""

from re import compile as re_compile

# Strings of deltas, in whichever dialect. Inside of another string their quotes would be escaped.
_GROWING = re_compile(rb'"(?:content|text|reasoning|reasoning_content|thinking|arguments|partial_json)": ?"')


def events_of(data: bytes, *, by_deltas: bool = True) -> tuple[list[bytes], bytes]:
    """The data of the events that end in `data`, and what is behind them, to be put in front of what comes next.

    `by_deltas`: of several that follow one another, one is made. Cut anywhere and read piece by piece, a stream says
    the same. Of the line ends that the standard knows, a lone CR is not taken for one: no server writes it.
    """
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n")
    found = []
    at = 0
    while (end := data.find(b"\n\n", at)) >= 0:
        block = data[at:end]
        at = end + 2
        growing = _GROWING.search(block) if by_deltas else None
        if growing is not None:
            block, at = _with_alike(block, growing.end(), data, at)
        if block.startswith(b"data: ") and b"\n" not in block:  # nearly all of OpenAI's
            found.append(block[6:])
            continue
        lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
        if lines:
            found.append(lines[0] if len(lines) == 1 else b"\n".join(lines))
    return found, data[at:]


def _with_alike(block: bytes, begin: int, data: bytes, at: int) -> tuple[bytes, int]:
    """`block`, its string at `begin` grown by those of the blocks alike that follow in `data`, and where they end."""
    close = block.find(b'"', begin)
    if close < 0 or block[close - 1] == 0x5C:  # a backslash: the string may go on
        return block, at
    head, tail = block[:begin], block[close:] + b"\n\n"
    n_tail = len(tail)
    texts = [block[:close]]
    while data.startswith(head, at):
        begins = at + begin
        ends = data.find(b"\n\n", begins) + 2 - n_tail
        if ends < begins or not data.startswith(tail, ends):
            break
        texts.append(data[begins:ends])
        at = ends + n_tail
    return b"".join(texts) + block[close:], at
