"""From settings to what tells exact tokens: the one place that `app` needs to know."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec

from prefixroute.config.settings import TokenizerSettings
from prefixroute.core.fleet import Instance
from prefixroute.errors import ConfigError
from prefixroute.exact_tokens.options import Options
from prefixroute.exact_tokens.service import ExactTokens
from prefixroute.exact_tokens.verify import Post, Verifier

_NEEDED = ("tokenizers", "jinja2")


def make_exact_tokens(settings: TokenizerSettings) -> ExactTokens | None:
    """What tells exact tokens, not yet running; None when prompts are counted by bytes.

    Raises ConfigError when the extra is not installed. Files that cannot be used are told when it runs, and cost no
    request: a router without them still routes.
    """
    if settings.kind == "bytes":
        return None
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"tokenizer.kind: huggingface needs {' and '.join(missing)} (pip install 'prefixroute[tokenizers]')"
        )
    return ExactTokens(
        _options(settings),
        models=settings.models,
        budget_s=settings.budget_ms / 1000,
        n_processes=settings.processes,
        verify=settings.verify,
    )


def check_files(settings: TokenizerSettings) -> None:
    """Reads the tokenizer and its chat template, here and now. Raises ConfigError when they cannot be used."""
    if settings.kind == "bytes":
        return
    from prefixroute.exact_tokens.exact import ExactTokenizer

    # Without the proof of the faster library, which takes seconds and decides nothing about the files.
    ExactTokenizer(replace(_options(settings), library="tokenizers"))


def _options(settings: TokenizerSettings) -> Options:
    return Options(
        path=settings.path or "",
        chat_template=settings.chat_template,
        chat_template_kwargs=settings.chat_template_kwargs,
        library=settings.library,
        cache_bytes=settings.cache_bytes,
        check_every=settings.check_every,
    )


def make_verifier(
    settings: TokenizerSettings,
    tokens: ExactTokens,
    candidates: Callable[[str | None], Sequence[Instance]],
    post: Post,
) -> Verifier:
    """Compares `tokens` with the instances that `candidates` gives for a model (None: any)."""
    model = None if settings.models is None else settings.models[0]
    return Verifier(tokens, lambda: candidates(model), post, model=model)
