"""Prompts that are made of samples, by name: the templates of `fl.prompts_of`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from flowrl.specs.base import Count, Spec, Wrong, option

_PIECE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")

_OF_SAMPLES = ("prompt", "response", "opponent")

_NAMES = "{prompt}, {response}, {opponent}, {answer} or {row.FIELD}; {{ and }} for braces"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptsSpec(Spec):
    """The base of rules that make a prompt of each sample."""

    family: ClassVar[str] = "prompts_of"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTemplate(PromptsSpec):
    """Text around the tokens of a sample; `fl.prompts_of` says what may be in it.

    Text between tokens is encoded by itself, so that no token of the sample changes.
    """

    kind: ClassVar[str] = "template"

    text: str
    opponent: Count | None = option(None)

    @property
    def pieces(self) -> tuple[str, ...]:
        """Alternating literal texts and names; even positions are literals."""
        pieces = [""]
        position = 0
        for match in _PIECE.finditer(self.text):
            pieces[-1] += self.text[position : match.start()]
            position = match.end()
            if match.group() in ("{{", "}}"):
                pieces[-1] += match.group()[0]
            else:
                pieces += [match.group(1) or "", ""]
        pieces[-1] += self.text[position:]
        return tuple(pieces)

    @property
    def names(self) -> tuple[str, ...]:
        """What the template reads, in order."""
        return self.pieces[1::2]

    @property
    def begins_with_prompt(self) -> bool:
        """True if the sample's own prompt comes first."""
        return self.text.startswith("{prompt}")

    def conflicts(self) -> Iterator[Wrong]:
        """Yields a text that is no template, or whose prompts would not depend on the sample."""
        for name in self.names:
            known = name in (*_OF_SAMPLES, "answer")
            if not known and not re.fullmatch(r"row\.\S.*", name):
                yield "text", self.text, f"a template with {_NAMES}"
                return
        if "response" not in self.names:
            yield "text", self.text, "a template with the {response} of each sample"
        elif ("opponent" in self.names) != (self.opponent is not None):
            if self.opponent is None:
                yield "opponent", None, "opponent=1, since the template has an {opponent}"
            else:
                yield "text", self.text, "a template with the {opponent} of each sample"
        elif "prompt" in self.names[1 if self.begins_with_prompt else 0 :]:
            yield (
                "text",
                self.text,
                "a template with {prompt} at its beginning only, for these are the tokens of a "
                "whole prompt; {row.FIELD} has a text of the data row",
            )
