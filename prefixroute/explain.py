"""`prefixroute explain`: asks a running router's admin port where a request would go, or why so little is cached."""

import json
import ssl
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote, urlsplit
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from prefixroute.errors import PrefixRouteError

_TIMEOUT_S = 10


class ExplainError(PrefixRouteError):
    """The router could not be asked."""

    code = "explain_failed"


def ask(
    admin_url: str,
    body: bytes,
    *,
    path: str | None,
    headers: Mapping[str, str],
    tls: ssl.SSLContext | None = None,
) -> dict[str, Any]:
    """The router's explanation of a request body. `path`: the data-plane path; None lets the router guess.

    `tls`: what its certificate is checked by; None: the machine's authorities.

    Raises ExplainError when the admin port does not answer as one.
    """
    target = "/explain" + (f"?path={quote(path)}" if path is not None else "")
    return _asked(admin_url, target, body, headers, "candidates", tls)


def ask_ladder(admin_url: str, headers: Mapping[str, str] = {}, *, tls: ssl.SSLContext | None = None) -> dict[str, Any]:
    """The router's ladder. `tls`, and ExplainError, as `ask` has them."""
    return _asked(admin_url, "/ladder", None, headers, "gaps", tls)


def _asked(
    admin_url: str,
    target: str,
    body: bytes | None,
    headers: Mapping[str, str],
    field: str,
    tls: ssl.SSLContext | None,
) -> dict[str, Any]:
    """The answer, known by `field` to be one."""
    if not _is_url(admin_url):
        raise ExplainError(f"{admin_url}: not a URL of an admin port (it looks like http://127.0.0.1:9190)")
    url = admin_url.rstrip("/") + target
    request = Request(url, body, {"Content-Type": "application/json", **headers})  # noqa: S310  http(s): checked
    try:
        with build_opener(ProxyHandler({}), HTTPSHandler(context=tls)).open(request, timeout=_TIMEOUT_S) as response:
            answer = json.loads(response.read())
    except HTTPError as error:
        with error:
            raise ExplainError(f"{admin_url} answered {error.code}: {_message(error.read())}") from error
    except OSError as error:  # URLError is one, around the cause
        # Of an error of TLS it is a word, and the error is its own cause.
        reason = error if isinstance(error, ssl.SSLError) else getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise ExplainError(
                f"the certificate of {admin_url} was refused: {reason.verify_message} "
                "(--ca-file names a file with the authority that it is to be checked against)"
            ) from error
        if isinstance(reason, ssl.SSLError):
            raise ExplainError(f"no TLS with {admin_url}: {reason.reason} (is it an http:// port?)") from error
        why = getattr(reason, "strerror", None) or reason
        raise ExplainError(f"no router answers at {admin_url}: {why} (--admin says where it is)") from error
    except (HTTPException, ValueError) as error:
        raise _not_ours(admin_url) from error
    if not isinstance(answer, dict) or field not in answer:
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
        f"model {answer['model'] or '-'}: {answer['prompt_tokens']} tokens{_exactly(answer)} in {answer['blocks']} "
        f"blocks{no_key}; "
        f"strategy {answer['strategy']}",
        markup=False,
        highlight=False,
    )
    if answer["candidates"]:
        console.print(_table(answer))
    first = ", held first: it is busy" if answer.get("held") else ""
    console.print(f"→ {answer['chosen'] or 'nobody'} ({answer['reason']}{first})", markup=False, highlight=False)


def _exactly(told: Mapping[str, Any]) -> str:
    """Of a prompt or a candidate: whether its number of tokens is the engine's, and no estimate."""
    return " (exact)" if told.get("exact_tokens") or told.get("exact") else ""


def _table(answer: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE)
    table.add_column("instance", overflow="fold")
    table.add_column("state")
    for title in ("matched tokens", "in flight", "pending tokens", "held tokens", "cost"):
        table.add_column(title, justify="right")
    for candidate in sorted(
        answer["candidates"], key=lambda c: (c["instance"] != answer["chosen"], c["cost_s"] or 0.0)
    ):
        cost_s = candidate["cost_s"]
        table.add_row(
            Text(candidate["instance"]),
            candidate["state"],
            f"{candidate['matched_tokens']}{_exactly(candidate)}",
            str(candidate["in_flight"]),
            str(candidate["pending_prefill_tokens"]),
            str(candidate.get("held_prefill_tokens", 0)),
            "-" if cost_s is None else f"{cost_s * 1000:.1f} ms",
            style="bold" if candidate["instance"] == answer["chosen"] else None,
        )
    return table


_STEPS = {
    "ideal": ("seen before", "workload"),
    "pooled": ("… that one cache of the fleet's size would hold", "capacity"),
    "reachable": ("… that one instance held, at the decision", "spread"),
    "chosen": ("… that the chosen instance held, as predicted", "spill"),
    "reported": ("… that it reported as cached", "engine"),
}
_REMEDIES = {
    "workload": "The workload: most of what is not cached was never sent before. Put what requests share first in the "
    "prompt, and what differs (dates, ids, retrieved text) last; see prefixroute_prompts_without_key_total for prompts "
    "that could not be read.",
    "capacity": "Capacity: what was seen before is evicted before it is asked for again. More KV cache helps: more "
    "instances, more memory for each, an 8-bit KV cache, or a cache beside the engine.",
    "spread": "Routing: prefixes are spread over instances and held by each only in part. It passes while maps fill "
    "after a start; else compare strategies with routing.shadow or prefixroute simulate.",
    "spill": "Routing: requests go past the instance that holds their prefix because it is busy. More instances help; "
    "with few, long prompts that all want the same one, it is as it should be.",
    "engine": "The engine: it caches less than was sent to it. Is prefix caching on, is its KV cache as large as told "
    "(kv_capacity_tokens), do others send to it? prefixroute_upstream_prediction tells which instance.",
}
# Gaps below this share of the prompt tokens are not worth a sentence.
_MENTIONED = 0.01


def show_ladder(answer: Mapping[str, Any], console: Console) -> None:
    """The rungs as a table, the gap under each, and what to do about the largest."""
    tokens, gaps = answer["tokens"], answer["gaps"]
    prompt, others = tokens["prompt"], answer["unreported"]
    if gaps:
        table = Table(box=box.SIMPLE)
        table.add_column("prompt tokens")
        for title in ("tokens", "share", "lost", "to"):
            table.add_column(title, justify="left" if title == "to" else "right")
        table.add_row("all", str(prompt), "100.0 %", "", "")
        for rung, (meaning, gap) in _STEPS.items():
            table.add_row(meaning, str(tokens[rung]), _share(tokens[rung] / prompt), _share(gaps[gap]), gap)
        console.print(table)
        console.print(f"of {answer['requests']} requests whose instance reported cached tokens", highlight=False)
        first, *rest = sorted(gaps, key=lambda gap: -gaps[gap])
        for gap in [first, *(rest[:1] if first == "workload" else [])]:
            if gaps[gap] >= _MENTIONED:
                console.print(f"{_share(gaps[gap]).strip()} – {_REMEDIES[gap]}", markup=False, highlight=False)
    if others["requests"]:
        console.print(
            f"{others['requests']} more requests are not in it: their instances reported no cached tokens "
            "(vLLM: --enable-prompt-tokens-details; streams: stream_options.include_usage)",
            highlight=False,
        )
    elif not gaps:
        console.print("nothing to tell yet: no prompt of a block and more has been answered", highlight=False)


def _share(share: float) -> str:
    return f"{100 * share:.1f} %"


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "no explanation given"
