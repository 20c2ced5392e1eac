"""What was wrong with a request that could not be parsed, in words of the router's own.

aiohttp's message says so in its first words, and goes on with the line at fault, which may hold a credential. So only
its beginning is looked at, and nothing of it is repeated.
"""

from aiohttp.http_exceptions import InvalidURLError

_TEXT = "the request is not valid HTTP"

_REASONS = (
    ("Duplicate 'Content-Length'", "more than one Content-Length"),
    ("Duplicate Content-Length", "more than one Content-Length"),
    ("Duplicate 'Transfer-Encoding'", "more than one Transfer-Encoding"),
    ("Duplicate 'Host'", "more than one Host"),
    ("Duplicate '", "a header that may be there once is there twice"),
    ("Missing 'Host'", "no Host"),
    ("Content-Length can't be present with", "Content-Length together with Transfer-Encoding"),
    ("Transfer-Encoding can't be present with", "Content-Length together with Transfer-Encoding"),
    ("Invalid character in Content-Length", "a Content-Length that is no number"),
    ("Empty Content-Length", "a Content-Length that is no number"),
    ("Content-Length overflow", "a Content-Length that is too large"),
    ("Invalid `Transfer-Encoding`", "a Transfer-Encoding that cannot be taken"),
    ("Request has invalid `Transfer-Encoding`", "a Transfer-Encoding that cannot be taken"),
    ("Invalid header value char", "a character in a header's value"),
    ("Invalid HTTP header", "a character in a header's value"),
    ("Unexpected whitespace after header value", "a folded header"),
    ("Unexpected space after start line", "a space in front of the first header"),
    ("Invalid header token", "a header's name or the end of its line"),
    ("Invalid header field char", "a header's name or the end of its line"),
    ("Expected LF after headers", "the end of a line"),
    ("Missing expected LF", "the end of a line"),
    ("Missing expected CR", "the end of a line"),
    ("Received HTTPS traffic", "TLS on a port without it"),
    ("Invalid method", "a method that is not known"),
    ("Expected space after method", "a method that is not known"),
    ("Bad status line:\n  Invalid HTTP version", "the version of the protocol"),
    ("Bad status line:\n  Expected HTTP/", "the version of the protocol, or a space in the target"),
    ("Bad status line:\n  Expected dot", "the version of the protocol"),
    ("Bad status line:\n  Expected CRLF after version", "the end of the request line"),
)


def malformed_text(fault: BaseException | None) -> str:
    """What to tell the client, and the log: which part it was, as far as the parser lets us know."""
    if isinstance(fault, InvalidURLError):
        return f"{_TEXT}: the target"
    message = str(getattr(fault, "message", ""))
    reason = next((reason for start, reason in _REASONS if message.startswith(start)), None)
    return _TEXT if reason is None else f"{_TEXT}: {reason}"
