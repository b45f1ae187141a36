"""Chat templates: a prompt becomes a conversation, rendered as Transformers renders it.

The templates are Jinja programs of unknown origin, so they run in Jinja's immutable sandbox with
the same filters and globals as `transformers.utils.chat_template_utils`
(`apply_chat_template(..., add_generation_prompt=True)` is the reference; a test compares the two).

The only difference is that `strftime_now` is not the day of the run but a fixed one. Llama 3.1's
template and others print the date, and prompts that change overnight would be other data: a run
could not be repeated, nor resumed on the next day.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from flowrl.data.conversations import Message, message_text
from flowrl.errors import DataError

_DAY = datetime(2024, 7, 26)
"""The date that Llama 3.1's own template prints where none is given."""


class ChatTemplate:
    """A model's own chat template.

    Args:
        source: The Jinja text.
        special_tokens: `bos_token` and its like by name; templates may print them.
        where: The file it comes from, for messages.
        with_tools: The text for conversations with tools, where the model has one of its own.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        where: Path,
        with_tools: str | None = None,
    ) -> None:
        self._special_tokens = dict(special_tokens)
        self._where = where
        try:
            self._template = _environment().from_string(source)
            self._with_tools = _environment().from_string(with_tools or source)
        except jinja2.TemplateError as reason:
            raise self._error(f"{type(reason).__name__}: {reason}") from reason

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[object] = (),
        args: Mapping[str, object] | None = None,
    ) -> str:
        """Returns the text of a conversation up to the model's turn.

        Args:
            args: Further variables of the template, such as `enable_thinking`.

        Raises:
            DataError: The template refuses the conversation or fails, or leaves a message out.
        """
        text = self._render(messages, tools, args)
        for place, message in enumerate(messages):
            content = message_text(message)
            # Templates may trim or escape a text, or leave out what was thought in earlier turns:
            # what is left out as a whole is found by another text in its place.
            if content and content not in text:
                other = {**message, "content": f"{content}, and more"}
                changed = [*messages[:place], other, *messages[place + 1 :]]
                if text == self._render(changed, tools, args):
                    what = f"it leaves out the message of {message['role']!r}"
                    same = "it prints the same text for every prompt"
                    raise self._error(same if place == len(messages) - 1 else what)
        return text

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[object],
        args: Mapping[str, object] | None,
    ) -> str:
        try:
            return (self._with_tools if tools else self._template).render(
                **{
                    **self._special_tokens,
                    **(args or {}),
                    "messages": messages,
                    "tools": list(tools) or None,
                    "documents": None,
                    "add_generation_prompt": True,
                }
            )
        # A template may raise what any expression raises: TypeError, KeyError, OverflowError.
        except Exception as reason:
            raise self._error(f"{type(reason).__name__}: {reason}") from reason

    def _error(self, reason: str) -> DataError:
        return DataError(
            "the chat template fails",
            where=str(self._where),
            found=reason,
            hint="set data.chat_template=never to give the model the prompt as it is",
        )


class _Generation(Extension):
    """`{% generation %}` marks the model's own turns for training masks; it prints its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own convention

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return str(caller())


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _DAY.strftime
    return environment


def _tojson(value: object, ensure_ascii: bool = False, **options: Any) -> str:
    # Jinja's own filter escapes HTML, which no chat format wants.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
