"""Whether a chat template wants content as a list of parts: vLLM's "openai" format, else "string".

The engine looks for a loop over a message's content in the template's syntax tree, and so does this. A template for
text gets text; one that iterates would otherwise take it letter by letter.
"""

from collections.abc import Iterator

from jinja2 import nodes


def iterates_over_content(template: nodes.Template) -> bool:
    """Whether a loop in the template runs over the content of a message."""
    messages = _message_names(template)
    in_macros, parameters = _macro_loops(template, messages)
    for loop in template.find_all(nodes.For):
        if any(_is_content(loop.iter, name) for name in messages):
            return True
        if not isinstance(loop.iter, nodes.Name):
            continue
        if loop.iter.name in parameters.get(id(loop), ()):
            return True
        # `{% set content = message.content %}` before the loop, whatever comes in between.
        if loop.iter.name == "content" and id(loop) not in in_macros:
            return True
    return False


def _message_names(template: nodes.Template) -> list[str]:
    """What loops over the messages call a message."""
    lists = set(_aliases(template, "messages"))
    return [
        loop.target.name
        for loop in template.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and any(_is_access(loop.iter, name, None) for name in lists)
    ]


def _aliases(template: nodes.Template, name: str) -> Iterator[str]:
    """`name`, and what is assigned from it, from that, and so on."""
    known, waiting = {name}, [name]
    while waiting:
        current = waiting.pop()
        yield current
        for assignment in template.find_all(nodes.Assign):
            target = assignment.target
            if not isinstance(target, nodes.Name) or target.name in known:
                continue
            if _is_access(assignment.node, current, None):
                known.add(target.name)
                waiting.append(target.name)


def _macro_loops(template: nodes.Template, messages: list[str]) -> tuple[set[int], dict[int, set[str]]]:
    """Loops in macros, and for each the parameters of its macro that are given a message's content somewhere."""
    in_macros: set[int] = set()
    parameters: dict[int, set[str]] = {}
    for macro in template.find_all(nodes.Macro):
        names = [argument.name for argument in macro.args]
        given = {
            name
            for call in template.find_all(nodes.Call)
            if isinstance(call.node, nodes.Name) and call.node.name == macro.name
            for name, value in (
                *zip(names, call.args, strict=False),
                *((keyword.key, keyword.value) for keyword in call.kwargs),
            )
            if name in names and any(_is_content(value, message) for message in messages)
        }
        for loop in macro.find_all(nodes.For):
            in_macros.add(id(loop))
            if given:
                parameters[id(loop)] = given
    return in_macros, parameters


def _is_content(node: nodes.Node | None, message: str) -> bool:
    return _is_access(node, message, "content")


def _is_access(node: nodes.Node | None, name: str, key: str | None) -> bool:
    """Whether `node` is the variable, or its `key`, perhaps sliced, filtered or tested."""
    match node:
        case nodes.Filter(node=inner) | nodes.Test(node=inner):
            return _is_access(inner, name, key)
        case nodes.Getitem(node=inner, arg=nodes.Slice()):
            return _is_access(inner, name, key)
        case nodes.Getitem(node=inner, arg=nodes.Const(value=value)) if key is not None:
            return value == key and _is_access_of_name(inner, name)
        case nodes.Getattr(node=inner, attr=value) if key is not None:
            return value == key and _is_access_of_name(inner, name)
        case nodes.Name() if key is None:
            return _is_access_of_name(node, name)
        case _:
            return False


def _is_access_of_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
