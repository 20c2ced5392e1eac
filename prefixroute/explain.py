"""`prefixroute explain`: asks a running router's admin port where a request would go, and shows the answer."""

import json
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote, urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from prefixroute.errors import PrefixRouteError

_TIMEOUT_S = 10


class ExplainError(PrefixRouteError):
    """The router could not be asked."""

    code = "explain_failed"


def ask(admin_url: str, body: bytes, *, path: str | None, headers: Mapping[str, str]) -> dict[str, Any]:
    """The router's explanation of a request body. `path`: the data-plane path; None lets the router guess.

    Raises ExplainError when the admin port does not answer as one.
    """
    if not _is_url(admin_url):
        raise ExplainError(f"{admin_url}: not a URL of an admin port (it looks like http://127.0.0.1:9190)")
    url = f"{admin_url.rstrip('/')}/explain" + (f"?path={quote(path)}" if path is not None else "")
    request = Request(url, body, {"Content-Type": "application/json", **headers})  # noqa: S310  http(s): checked
    try:
        with build_opener(ProxyHandler({})).open(request, timeout=_TIMEOUT_S) as response:
            answer = json.loads(response.read())
    except HTTPError as error:
        with error:
            raise ExplainError(f"{admin_url} answered {error.code}: {_message(error.read())}") from error
    except OSError as error:  # URLError is one, around the cause
        reason = getattr(error, "reason", error)
        why = getattr(reason, "strerror", None) or reason
        raise ExplainError(f"no router answers at {admin_url}: {why} (--admin says where it is)") from error
    except (HTTPException, ValueError) as error:
        raise _not_ours(admin_url) from error
    if not isinstance(answer, dict) or "candidates" not in answer:
        raise _not_ours(admin_url)
    return answer


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _not_ours(admin_url: str) -> ExplainError:
    return ExplainError(f"{admin_url} is not the admin port of a PrefixRoute router")


def show(answer: Mapping[str, Any], console: Console) -> None:
    """The explanation as a table, best candidate first."""
    no_key = f", no key ({answer['no_key']})" if answer["no_key"] else ""
    console.print(
        f"model {answer['model'] or '-'}: {answer['prompt_tokens']} tokens in {answer['blocks']} blocks{no_key}; "
        f"strategy {answer['strategy']}",
        markup=False,
        highlight=False,
    )
    if answer["candidates"]:
        console.print(_table(answer))
    console.print(f"→ {answer['chosen'] or 'nobody'} ({answer['reason']})", markup=False, highlight=False)


def _table(answer: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE)
    table.add_column("instance", overflow="fold")
    table.add_column("state")
    for title in ("matched tokens", "in flight", "pending tokens", "cost"):
        table.add_column(title, justify="right")
    for candidate in sorted(
        answer["candidates"], key=lambda c: (c["instance"] != answer["chosen"], c["cost_s"] or 0.0)
    ):
        cost_s = candidate["cost_s"]
        table.add_row(
            Text(candidate["instance"]),
            candidate["state"],
            str(candidate["matched_tokens"]),
            str(candidate["in_flight"]),
            str(candidate["pending_prefill_tokens"]),
            "-" if cost_s is None else f"{cost_s * 1000:.1f} ms",
            style="bold" if candidate["instance"] == answer["chosen"] else None,
        )
    return table


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "no explanation given"
