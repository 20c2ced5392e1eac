"""The URL of an instance: what is accepted, and its one spelling.

Messages never quote what was given: it may hold a password.
"""

import ipaddress
import re
from urllib.parse import urlsplit

_DEFAULT_PORTS = {"http": 80, "https": 443}
_MAX_NAME = 64
_UNIX = "unix:"
_SOCKET = re.compile(r"(?:/[A-Za-z0-9._~+,@=-]+)+")
# What Linux takes; others take a little less, and say so.
_MAX_SOCKET_PATH = 107
_NO_SCHEME = re.compile(r"[A-Za-z0-9._-]+(:[0-9]{1,5})?(/[A-Za-z0-9._/-]*)?")
_AUTHORITY = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(?::([^:]*))?")
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")
_PORT = re.compile(r"0*[0-9]{1,5}")
_PATH = re.compile(r"(?:/[A-Za-z0-9._~!$&'()*+,;=:@%-]+)*")


def instance_url(text: str) -> str:
    """As `http_url`; or `unix:/PATH`, of a socket on this machine. Raises ValueError as `http_url` does."""
    if text[: len(_UNIX)].lower() != _UNIX:
        return http_url(text)
    path = text[len(_UNIX) :]
    # `unix:///run/x` means the same to many.
    if path.startswith("///"):
        path = path[2:]
    if _SOCKET.fullmatch(path) is None:
        raise ValueError("has no absolute path of a socket (write unix:/run/vllm.sock)")
    if len(path) > _MAX_SOCKET_PATH:
        raise ValueError(f"has a path of more than {_MAX_SOCKET_PATH} bytes, which sockets cannot have")
    return _UNIX + path


def http_url(text: str) -> str:
    """`text` in its one spelling: host in lower case, no default port, no trailing slash.

    Raises ValueError with what is wrong, to be read after the name of the setting.
    """
    scheme, separator, rest = text.partition("://")
    scheme = scheme.lower()
    if not separator:
        example = text if _NO_SCHEME.fullmatch(text) else "HOST:PORT"
        raise ValueError(f"has no scheme (write http://{example})")
    if scheme not in _DEFAULT_PORTS:
        raise ValueError("must begin with http:// or https://")
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if "@" in authority:
        raise ValueError(
            "holds a user name or password (remove it; put the key into an environment variable "
            "and name that in api_key_env)"
        )
    path = rest[len(authority) :]
    if "?" in path or "#" in path:
        raise ValueError("has a query or fragment (remove it, from ? or # on)")
    parts = _AUTHORITY.fullmatch(authority)
    if parts is None:
        raise ValueError("has a malformed host (an IPv6 address goes in brackets: http://[::1]:8000)")
    host = _host(parts[1])
    port = _port(parts[2])
    suffix = "" if port in (None, _DEFAULT_PORTS[scheme]) else f":{port}"
    return f"{scheme}://{host}{suffix}{_path(path)}"


def instance_name(url: str) -> str:
    """HOST:PORT of a URL that `instance_url` made; a long host loses its end, so that it fits a name.

    Of a socket unix:FILE, with - for what names cannot have.
    """
    if url.startswith(_UNIX):
        file = re.sub(r"[^A-Za-z0-9._-]", "-", url.rpartition("/")[2])
        return _UNIX + file[-(_MAX_NAME - len(_UNIX)) :]
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or ""
    port = f":{parts.port or _DEFAULT_PORTS[parts.scheme]}"
    return host[: _MAX_NAME - len(port)] + port


def instance_address(url: str) -> tuple[str, int]:
    """Host (no brackets) and port of a URL that `instance_url` made; of a socket none."""
    if url.startswith(_UNIX):
        return "", 0
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or _DEFAULT_PORTS[parts.scheme]


def _host(text: str) -> str:
    if not text:
        raise ValueError("has no host (write http://HOST:PORT)")
    if text.startswith("["):
        try:
            address = ipaddress.IPv6Address(text[1:-1])
        except ValueError:
            raise ValueError("has no valid IPv6 address in its brackets") from None
        if address.scope_id is not None:
            raise ValueError("has an IPv6 address with a zone (leave % and the zone out)")
        return f"[{address.compressed}]"
    if len(text) > 253 or _HOST.fullmatch(text) is None:
        raise ValueError("has a host name with characters that host names do not have")
    if re.split(r"\.", text.rstrip("."))[-1].isdigit():
        try:
            ipaddress.IPv4Address(text)
        except ValueError:
            raise ValueError("has no valid IPv4 address (four numbers from 0 to 255)") from None
    return text.lower()


def _port(text: str | None) -> int | None:
    if text is None:
        return None
    port = int(text) if _PORT.fullmatch(text) else 0
    if not 1 <= port <= 65_535:
        raise ValueError("has a bad port (a number from 1 to 65535)")
    return port


def _path(text: str) -> str:
    path = text.rstrip("/")
    if _PATH.fullmatch(path) is None or {".", ".."} & set(path.split("/")):
        raise ValueError("has a malformed path (plain segments such as /base; % for anything else)")
    if path.endswith("/v1"):
        # An OpenAI client's base URL; as a prefix it would make /v1/v1/chat/completions.
        raise ValueError("ends in /v1, which the paths of requests bring along (leave it out)")
    return path
