"""What is tokenised here and by an instance, to see whether both do it alike.

Together they show what usually differs: the template and its version, special tokens in front, how tools and calls
are rendered, scripts and white space, and whether completions begin with a special token.
"""

from typing import Any

_TEXT = (
    "Größe 1.234,5 – naïve café?\n\n  def f(x):\n\treturn x ** 2  # 'tis\n"
    "中文字符，日本語のテキスト。 العربية עברית हिन्दी 👩\u200d👩\u200d👧 \u00a0!"  # noqa: RUF001  as it is written
)

_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'Tells the "weather" in a place.',
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "description": "City, such as Zürich"},
                    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                },
                "required": ["place"],
            },
        },
    }
]

_PLAIN = [
    {"role": "user", "content": "Say hello."},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": _TEXT},
]

CONVERSATIONS: dict[str, dict[str, Any]] = {
    "chat": {"messages": _PLAIN},
    "system": {"messages": [{"role": "system", "content": "You are terse."}, *_PLAIN]},
    "tools": {
        "messages": [{"role": "user", "content": "What is the weather in Zürich?"}],
        "tools": _TOOLS,
    },
    "calls": {
        "messages": [
            {"role": "user", "content": "What is the weather in Zürich?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "id": "abc123def",
                        "type": "function",
                        "function": {"name": "get_weather", "arguments": '{"place": "Zürich", "unit": "celsius"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "abc123def", "content": '{"degrees": 21.5}'},
        ],
        "tools": _TOOLS,
    },
}
"""Chat bodies, by name."""

COMPLETION: dict[str, Any] = {"prompt": _TEXT}
