"""A request's body → the engine's token ids: files, templates and encoder put together. Synchronous, for one thread."""

import sys
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from prefixroute.core.prompt import Api
from prefixroute.errors import ConfigError
from prefixroute.exact_tokens.conversation import NotExactError, read_conversation
from prefixroute.exact_tokens.encode import Encoder, cut_tokens
from prefixroute.exact_tokens.equality import proven_library
from prefixroute.exact_tokens.libraries import Library, Tokenizers
from prefixroute.exact_tokens.load import read_files
from prefixroute.exact_tokens.options import Options
from prefixroute.exact_tokens.probes import CONVERSATIONS
from prefixroute.exact_tokens.template import ChatTemplates

__all__ = ["ExactTokenizer", "NotExactError", "Options"]


class ExactTokenizer:
    """A model's tokenizer and chat template. Making one takes seconds: it proves the fast library on a sample.

    `on_fault(what)`: called when a live check fails. Raises ConfigError when the files cannot be used.
    """

    def __init__(
        self,
        options: Options,
        on_fault: Callable[[str], None] = lambda _what: None,
    ) -> None:
        files = read_files(options.path, options.chat_template)
        self._defaults = options.chat_template_kwargs or {}
        try:
            self._templates = ChatTemplates(files.templates, files.special_tokens)
        except Exception as error:  # jinja's own, and Python's for what it compiles to
            raise ConfigError(
                f"tokenizer.chat_template: the chat template cannot be read ({template_fault(error)}: {error})"
            ) from error
        self._reference = reference = Tokenizers(files.tokenizer_json)
        self._added = reference.added_tokens()
        library: Library = reference
        self.remark = "as configured"
        """Why this library is used."""
        if options.library == "auto":
            contents = (token.content for token in self._added)
            library, self.remark = proven_library(reference, files.tokenizer_json, contents)
        self._encoder = Encoder(
            library,
            reference,
            cache_bytes=options.cache_bytes,
            check_every=options.check_every,
            on_fault=on_fault,
        )

    def learn_cuts(self) -> None:
        """Finds where prompts may be cut, by rendering some; until then they are encoded whole."""
        self._encoder.cut(cut_tokens(self._added, self._samples(), self._reference))

    @property
    def library(self) -> str:
        """Name of the library in use."""
        return self._encoder.library.name

    @property
    def n_checks(self) -> int:
        """Live prompts that were checked."""
        return self._encoder.n_checks

    def encode(self, api: Api, body: bytes) -> bytes:
        """Ids of the prompt in a request's body, four bytes each, little-endian; of a batch, the first prompt's.

        Raises NotExactError for what cannot be told exactly, and whatever the chat template raises.
        """
        try:
            fields = orjson.loads(body)
        except orjson.JSONDecodeError:
            raise NotExactError("body") from None
        if not isinstance(fields, dict):
            raise NotExactError("body")
        if api is Api.INVOCATIONS:
            api = Api.CHAT if isinstance(fields.get("messages"), list) else Api.COMPLETIONS
        if api is Api.CHAT:
            return self._chat(fields)
        if api is Api.COMPLETIONS:
            return self._completion(fields)
        raise NotExactError("api")

    def render(self, fields: Mapping[str, Any]) -> str:
        """Text of a chat body's prompt. Raises as `encode` does."""
        return self._templates.render(read_conversation(fields, self._defaults))

    def _chat(self, fields: Mapping[str, Any]) -> bytes:
        conversation = read_conversation(fields, self._defaults)
        try:
            return self._encoder.encode(self._templates.render(conversation), special=conversation.add_special_tokens)
        except UnicodeEncodeError:  # half a surrogate pair, out of the JSON in a call's arguments
            raise NotExactError("messages") from None

    def _completion(self, fields: Mapping[str, Any]) -> bytes:
        if fields.get("prompt_embeds") is not None or fields.get("truncate_prompt_tokens") is not None:
            raise NotExactError("prompt")
        prompt = fields.get("prompt")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, list):
            return _packed(prompt)
        special = fields.get("add_special_tokens", True)
        if not isinstance(prompt, str) or not isinstance(special, bool):
            raise NotExactError("prompt")
        return self._encoder.encode(prompt, special=special)

    def _samples(self) -> list[str]:
        """Prompts that show which tokens the template puts between messages."""
        rendered = []
        for fields in CONVERSATIONS.values():
            try:
                rendered.append(self.render(fields))
            except Exception:  # noqa: BLE001, S112  a template that knows no tools, say: others show as much
                continue
        return rendered


def template_fault(error: BaseException) -> str:
    """What an error of a template may be called where prompts must not show: its kind, and the line if it has one."""
    line = getattr(error, "lineno", None)
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == "<template>":
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return type(error).__name__ if line is None else f"{type(error).__name__} in line {line}"


def _packed(ids: list[Any]) -> bytes:
    if not ids or set(map(type, ids)) != {int}:
        raise NotExactError("prompt")
    try:
        packed = array("I", ids)
    except OverflowError:
        raise NotExactError("prompt") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
