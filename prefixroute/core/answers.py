"""What an instance answered, as the next turn's key will have it. Read from the events of a stream, or one document.

An engine's prefix cache holds an answer behind its prompt, and the client's next turn carries both. So an answer
becomes the messages that a client appends, and `canonical` renders them as it will render them then.

Some answers give None, and then only their prompt is worth remembering:
- What broke off, ended in an error, or is of an unknown form: who knows what the client makes of it.
- Thoughts without a call of a tool. The cache holds them between prompt and words; of earlier turns, chat templates
  leave them out, so that the words are not found there. As long as tools are being called, templates keep them, if
  the client sends them back: then the key has them too, and that of a client who does not parts at once.

Of several choices the first one counts. Nothing raises, whatever the bytes.
"""

from collections.abc import Iterable
from typing import Any

from orjson import loads

from prefixroute.core.answer_reader import DONE, AnswerReader, first_choice
from prefixroute.core.canonical import turns_key
from prefixroute.core.prompt import Api

# Thoughts within the text: the engine runs without a reasoning parser.
_THOUGHT_END = "</think>"


class _TextReader(AnswerReader):
    """/v1/completions: text that goes on where the prompt ends."""

    def __init__(self) -> None:
        super().__init__()
        self._texts: list[str] = []

    def _event(self, event: Any) -> None:
        for choice in first_choice(event):
            self._texts.append(choice["text"])
            self.is_whole = self.is_whole or bool(choice.get("finish_reason"))

    def _document(self, document: Any) -> None:
        self._texts = [choice["text"] for choice in first_choice(document)]

    def _material(self, prompt_key: bytes) -> bytes | None:
        # Some give the prompt back in front of the answer: `echo`, and always the plain server of vLLM.
        return "".join(self._texts).encode().removeprefix(prompt_key) or None


class _GenerateReader(_TextReader):
    """/generate of vLLM, SGLang and Text Generation Inference. What each of them streams last has the whole text."""

    by_deltas = False

    def events(self, payloads: Iterable[bytes]) -> None:
        last = [payload for payload in payloads if payload != DONE][-1:]
        super().events(last)

    def _event(self, event: Any) -> None:
        self._document(event)
        self.is_whole = True

    def document(self, data: bytes) -> None:
        super().document(data)
        if self.is_odd:  # a stream of documents, one a line?
            self.is_odd = False
            super().document(data.rstrip().rpartition(b"\n")[2])

    def _document(self, document: Any) -> None:
        first = document[0] if isinstance(document, list) else document
        text = first["text"] if "text" in first else first["generated_text"]
        self._texts = [text[0] if isinstance(text, list) else text]


class _ChatReader(AnswerReader):
    """/v1/chat/completions: one message of the assistant."""

    def __init__(self) -> None:
        super().__init__()
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, tuple[str, list[str]]] = {}
        self._message: dict[str, Any] | None = None

    def _event(self, event: Any) -> None:
        for choice in first_choice(event):
            delta = choice["delta"]
            content = delta.get("content")
            if content:
                self._content.append(content)
            if not content or len(delta) > 1:
                self._more(delta)
            if choice.get("finish_reason"):
                self.is_whole = True

    def _more(self, delta: dict[str, Any]) -> None:
        if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
            self._reasoning.append(reasoning)
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            _, arguments = self._calls.setdefault(call["index"], (function.get("name"), []))
            arguments.append(function.get("arguments") or "")

    def _document(self, document: Any) -> None:
        (choice,) = first_choice(document)
        self._message = {**choice["message"], "role": "assistant"}

    def _material(self, prompt_key: bytes) -> bytes | None:
        message = self._message
        if message is None:
            message = {
                "role": "assistant",
                "content": "".join(self._content),
                "reasoning": "".join(self._reasoning),
                "tool_calls": [
                    {"function": {"name": name, "arguments": "".join(arguments)}}
                    for _, (name, arguments) in sorted(self._calls.items())
                ],
            }
        content = message.get("content")
        is_thoughtful = bool(message.get("reasoning_content") or message.get("reasoning")) or _thinks(content)
        is_calling = bool(message.get("tool_calls") or message.get("function_call"))
        if not (content or is_calling) or (is_thoughtful and not is_calling):
            return None
        return turns_key([message])


class _MessagesReader(AnswerReader):
    """/v1/messages: one message of the assistant, of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks: list[dict[str, Any]] = []
        self._pieces: list[list[str]] = []

    def _event(self, event: Any) -> None:
        match event["type"]:
            case "content_block_delta":
                delta = event["delta"]
                # Signatures and citations leave no trace in a prompt.
                piece = delta.get("text") or delta.get("partial_json") or delta.get("thinking")
                if piece:
                    self._pieces[event["index"]].append(piece)
            case "content_block_start":
                self._blocks.append(event["content_block"])
                self._pieces.append([])
            case "message_stop":
                self.is_whole = True
            case "error":
                self.is_odd = True

    def _document(self, document: Any) -> None:
        self._blocks = document["content"]
        self._pieces = [[] for _ in self._blocks]

    def _material(self, prompt_key: bytes) -> bytes | None:
        blocks = [_grown(block, "".join(pieces)) for block, pieces in zip(self._blocks, self._pieces, strict=True)]
        kinds = {block["type"] for block in blocks}
        is_calling = "tool_use" in kinds
        is_thoughtful = not kinds.isdisjoint(("thinking", "redacted_thinking")) or _thinks(blocks)
        if not kinds or (is_thoughtful and not is_calling):
            return None
        return turns_key([{"role": "assistant", "content": blocks}])


class _ResponsesReader(AnswerReader):
    """/v1/responses: items, which clients append to their input. The last event has them all."""

    _ENDS = ("response.completed", "response.incomplete")

    def __init__(self) -> None:
        super().__init__()
        self._items: list[dict[str, Any]] = []

    def needs(self, data: bytes) -> bool:
        # In a text the quotes would be escaped.
        return b'"response.completed"' in data or b'"response.incomplete"' in data

    def events(self, payloads: Iterable[bytes]) -> None:
        super().events(filter(self.needs, payloads))

    def _event(self, event: Any) -> None:
        if event["type"] in self._ENDS:
            self._items = event["response"]["output"]
            self.is_whole = True

    def _document(self, document: Any) -> None:
        # Rather than to be made in the background, or failed.
        is_made = document.get("status") in (None, "completed", "incomplete")
        self._items = document["output"] if is_made else []

    def _material(self, prompt_key: bytes) -> bytes | None:
        kinds = {item["type"] for item in self._items}
        is_calling = not kinds.isdisjoint(("function_call", "custom_tool_call"))
        is_thoughtful = "reasoning" in kinds or any(_thinks(item.get("content")) for item in self._items)
        # Tools that the server runs by itself: what their items become in the next prompt is its own affair.
        if not kinds <= {"message", "reasoning", "function_call", "custom_tool_call"}:
            return None
        if not kinds or (is_thoughtful and not is_calling):
            return None
        return turns_key(self._items)


def reader_of(api: Api) -> AnswerReader | None:
    """A new reader for answers of `api`; None when they are no text."""
    match api:
        case Api.CHAT:
            return _ChatReader()
        case Api.COMPLETIONS:
            return _TextReader()
        case Api.MESSAGES:
            return _MessagesReader()
        case Api.RESPONSES:
            return _ResponsesReader()
        case Api.GENERATE:
            return _GenerateReader()
        case _:
            return None


def _thinks(content: object) -> bool:
    """Whether there are thoughts in a content's text."""
    if isinstance(content, str):
        return _THOUGHT_END in content
    parts = content if isinstance(content, list) else ()
    return any(isinstance(text := part.get("text"), str) and _THOUGHT_END in text for part in parts)


def _grown(block: dict[str, Any], text: str) -> dict[str, Any]:
    """A block with what its deltas added."""
    kind = block["type"]
    if not text:
        return block
    if kind == "tool_use":
        return {**block, "input": loads(text)}
    name = {"text": "text", "thinking": "thinking"}[kind]
    return {**block, name: block.get(name, "") + text}
