"""Chat templates, rendered as `transformers` renders them: the engine leaves it to that library.

The same sandbox, options, filters and functions. Nothing here bounds time or memory: see `worker`.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from prefixroute.exact_tokens.content_format import iterates_over_content
from prefixroute.exact_tokens.conversation import Conversation, NotExactError, with_content, without_developer
from prefixroute.exact_tokens.load import DEFAULT, TOOL_USE

# Appended to the final message, so that what the template puts behind it can be cut off.
_CUT = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplates:
    """A model's templates: the default, and perhaps one for requests with tools.

    Raises TemplateError for a source that is no template.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._by_name = {name: _Template(source, special_tokens) for name, source in sources.items()}

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def render(self, conversation: Conversation) -> str:
        """Text of the prompt. Raises NotExactError without a template, and whatever the template raises."""
        if not self._by_name:
            raise NotExactError("there is no chat template")
        template = self._by_name[DEFAULT]
        if conversation.tools is not None:
            template = self._by_name.get(TOOL_USE, template)
        return template.render(conversation)


class _Template:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        self._compiled = environment.from_string(source)
        self._as_parts = iterates_over_content(environment.parse(source))
        self._knows_developer = '"developer"' in source or "'developer'" in source
        self._source = source
        self._special_tokens = dict(special_tokens)

    def render(self, conversation: Conversation) -> str:
        messages = with_content(conversation.messages, as_parts=self._as_parts)
        if not self._knows_developer:
            messages = without_developer(messages)
        final = ""
        if conversation.continue_final_message:
            final, messages = self._open(conversation, messages)
        text: str = self._compiled.render(
            # As arguments, later names win: a request's variables may stand above the special tokens.
            self._special_tokens | conversation.variables,
            messages=messages,
            tools=conversation.tools,
            documents=conversation.documents,
            add_generation_prompt=conversation.add_generation_prompt,
        )
        return _cut(text, final) if conversation.continue_final_message else text

    def _open(self, conversation: Conversation, messages: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
        """The final message's text, and the messages with the mark behind it."""
        if conversation.add_generation_prompt or "content" not in self._source:
            raise NotExactError("continue_final_message")
        last = dict(messages[-1])
        content = last["content"]
        if isinstance(content, list):
            if not content:
                raise NotExactError("continue_final_message")
            final = content[-1]["text"]
            last["content"] = [*content[:-1], {**content[-1], "text": final + _CUT}]
        else:
            final = content
            last["content"] = content + _CUT
        return final, [*messages[:-1], last]


def _cut(text: str, final: str) -> str:
    mark = _CUT.strip()
    if final.strip() not in text or mark not in text:
        raise NotExactError("continue_final_message")
    at = text.rindex(mark)
    # A template that strips its messages has taken the mark's space, and what stood before the mark goes too.
    return text[:at] if text.startswith(_CUT, at) else text[:at].rstrip()


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(Extension):
    """`{% generation %}` marks what the model wrote, for training; here only its body counts."""

    tags = {"generation"}  # noqa: RUF012  jinja's own name and type

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return str(caller())


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes what HTML would read.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # noqa: DTZ005  the engine's local time, too
