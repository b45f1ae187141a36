"""Conversations of data rows: messages in the forms of published data sets, in one form.

A message has a `role` and, as a rule, a text as `content`; chat templates are given it as it is
here. Of OpenAI's form, parts of text are joined, and the arguments of tool calls, which are JSON
text there, are read, as templates expect them. Fields that are null are left out: columns of
Parquet have every field in every message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from flowrl.errors import DataError
from flowrl.wording import excerpt

Message: TypeAlias = Mapping[str, object]

_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""The fields in which published data have what an assistant thought before an answer."""


def conversation_of(value: object, turns: Mapping[str, str], *, key: str) -> list[Message] | None:
    """Returns the messages of a field; None where it holds none.

    Args:
        value: The field.
        turns: The texts that begin the turns of a conversation in one text, by role.
        key: The config key that reads it, for messages.

    Raises:
        DataError: A message without role or content, with images, or in no known form.
    """
    if isinstance(value, str) and turns:
        return _transcript(value, turns, key=key)
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        return None
    if not value:
        raise DataError(f"the conversation that {key} reads is empty")
    return [_message(item, key=key) for item in value]


def before_answer(messages: Sequence[Message]) -> list[Message]:
    """Returns a conversation without the assistant's answer at its end, if it has one."""
    return list(messages[:-1] if messages[-1]["role"] == "assistant" else messages)


def answer_of(messages: Sequence[Message], *, key: str) -> str:
    """Returns the text of the assistant's answer at the end of a conversation.

    Raises:
        DataError: It ends with another role.
    """
    last = messages[-1]
    if last["role"] != "assistant" or not isinstance(last.get("content"), str):
        raise DataError(
            f"the conversation that {key} reads does not end with an answer of the assistant",
            found=f"a last message of {last['role']!r}",
            hint=f"set {key} to the field of the response",
        )
    return message_text(last)


def message_text(message: Message) -> str:
    """Returns the text of a message; empty where it has none."""
    content = message.get("content")
    return content if isinstance(content, str) else ""


def tools_of(value: object, *, key: str) -> tuple[object, ...]:
    """Returns the tools in a field: a list, JSON text of a list, or nothing.

    Raises:
        DataError: It is something else.
    """
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError:
            value = (value,)
    if not value:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(
            f"the field that {key} reads is no list of tools",
            found=excerpt(repr(value)),
            expected="JSON schemas of functions, as a list or as its JSON text",
        )
    return tuple(_without_nulls(tool) for tool in value)


def _message(item: Mapping[str, object], *, key: str) -> Message:
    role, content = item.get("role"), item.get("content")
    if not isinstance(role, str) or not role:
        raise DataError(
            f"a message of the conversation that {key} reads has no role",
            found=f"fields {', '.join(map(str, item))}",
            expected="messages {role: user, content: text}",
            hint="rename `from` to role and `value` to content, human to user, gpt to assistant"
            if "from" in item and "value" in item
            else None,
        )
    message = {str(k): _without_nulls(v) for k, v in item.items() if v is not None}
    if isinstance(content, list):
        message["content"] = "".join(_part(part, key=key) for part in content)
    elif not isinstance(content, str) and not item.get("tool_calls"):
        raise DataError(
            f"a message of the conversation that {key} reads has no text",
            found=f"content {excerpt(repr(content))} of {role!r}",
        )
    thoughts = [message[name] for name in _THOUGHTS if name in message]
    if thoughts:  # as Transformers does, for templates read one name or the other
        message = {"thinking": thoughts[0], **message, "reasoning_content": thoughts[0]}
    if isinstance(calls := message.get("tool_calls"), list):
        message["tool_calls"] = [_tool_call(call) for call in calls]
    return message


def _part(part: object, *, key: str) -> str:
    if isinstance(part, Mapping) and isinstance(text := part.get("text"), str):
        return text
    kind = part.get("type") if isinstance(part, Mapping) else part
    raise DataError(
        f"a message of the conversation that {key} reads has a part that is no text",
        found=excerpt(repr(kind)),
        expected="{type: text, text: ...}; images and audio are not read",
    )


def _tool_call(call: object) -> object:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (KeyError, TypeError, ValueError):
        return call  # there are none, they are no text, or templates print them as they are
    return {**call, "function": {**function, "arguments": arguments}}


def _without_nulls(value: object) -> object:
    match value:
        case dict():
            return {key: _without_nulls(item) for key, item in value.items() if item is not None}
        case list():
            return [_without_nulls(item) for item in value]
        case _:
            return value


def _transcript(text: str, turns: Mapping[str, str], *, key: str) -> list[Message]:
    roles = {marker: role for role, marker in turns.items()}
    marks = list(re.finditer("|".join(re.escape(marker) for marker in roles), text))
    if not marks or text[: marks[0].start()].strip():
        raise DataError(
            f"the text that {key} reads begins with no turn",
            found=excerpt(repr(text)),
            expected=f"one of {', '.join(map(repr, roles))} (data.turns)",
        )
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    return [
        {"role": roles[mark.group()], "content": text[mark.end() : end].strip()}
        for mark, end in zip(marks, ends, strict=True)
    ]
