"""Prompts that are made of samples: tokens of a sample between texts of a template.

Tokens of the sample, and of the prompt that it answers, stay as they are; the texts between them
are encoded one by one, as the texts between the turns of an episode are. So a prompt may differ
from the tokens that its whole text would have, at the borders of its pieces alone. The stop token
that ended a response is left out. A text at the beginning gets what the tokenizer puts in front of
a prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from flowrl.backend.batch import Ints
from flowrl.data import PromptItem, Row, Tokenizer
from flowrl.data.templates import field_text
from flowrl.graph import Node
from flowrl.ids import GroupId, SampleId
from flowrl.runtime.driver.payloads import Payload
from flowrl.specs import FinishReason
from flowrl.specs.prompts import PromptTemplate

__all__ = ["ChildPrompts"]

_TOKENS = ("prompt", "response")


class ChildPrompts:
    """Makes the prompts of one `prompts_of` node.

    Args:
        node: The node.
        tokenizer: Encodes texts; of the policy that answers the prompts.
    """

    def __init__(self, node: Node, tokenizer: Tokenizer) -> None:
        spec = node.attr("spec")
        assert isinstance(spec, PromptTemplate)
        self._key = f"template of {node.id} ({node.source})"
        self._tokenizer = tokenizer
        self._parts = _parts(spec)
        self._encoded: dict[tuple[str, bool], Ints] = {}

    def item(self, sample: SampleId, payload: Payload) -> PromptItem:
        """Returns the prompt of a sample's children, whose group has the sample's id.

        Raises:
            DataError: the data row lacks a field, or the tokenizer cannot encode a text.
        """
        ended = payload.finish is FinishReason.STOP
        tokens = {
            "prompt": payload.item.prompt_ids,
            "response": payload.tokens[:-1] if ended else payload.tokens,
        }
        row = payload.item.row
        return PromptItem(
            epoch=payload.item.epoch,
            index=payload.item.index,
            group=GroupId(sample),
            row=row,
            prompt_ids=np.concatenate(
                [tokens[p] if isinstance(p, str) else p for p in self._pieces(row)]
            ),
        )

    def longest(self, row: Row, prompt: int, response: int) -> int:
        """Returns the tokens that a prompt made for a row has at most.

        Args:
            prompt: Tokens of the prompt that is answered.
            response: Tokens of a response at most.

        Raises:
            DataError: as `item`.
        """
        sizes = {"prompt": prompt, "response": response}
        return sum(sizes[p] if isinstance(p, str) else len(p) for p in self._pieces(row))

    def _pieces(self, row: Row) -> Iterator[str | Ints]:
        """Yields the pieces of a prompt: `prompt`, `response`, or the tokens of a text."""
        for number, part in enumerate(self._parts):
            if part in _TOKENS:
                assert isinstance(part, str)
                yield part
            else:
                yield self._encode("".join(self._texts(part, row)), first=number == 0)

    def _texts(self, part: str | Sequence[str], row: Row) -> Iterator[str]:
        """Yields the literals and the texts of the row that follow each other."""
        for place, piece in enumerate(part):
            if place % 2 == 0:
                yield piece
            elif piece == "answer":
                yield row.answer
            else:
                yield field_text(row.fields, piece.removeprefix("row."), key=self._key)

    def _encode(self, text: str, *, first: bool) -> Ints:
        known = self._encoded.get((text, first))
        if known is None:
            known = (
                self._tokenizer.encode_prompt(text, "never")
                if first
                else self._tokenizer.encode(text)
            )
            if len(self._encoded) >= _REMEMBERED:
                self._encoded.clear()
            self._encoded[text, first] = known
        return known


_REMEMBERED = 4096
"""Texts whose tokens are remembered: all samples of a row have the same."""


def _parts(spec: PromptTemplate) -> list[str | tuple[str, ...]]:
    """Returns the parts of a template: a name of tokens, or texts that are encoded together.

    Texts alternate: a literal, a name of the row, a literal.
    """
    parts: list[str | tuple[str, ...]] = []
    texts: list[str] = []
    for place, piece in enumerate(spec.pieces):
        if place % 2 == 1 and piece in _TOKENS:
            parts += [tuple(texts), piece]
            texts = []
        else:
            texts.append(piece)
    # No text has no tokens; at the beginning it has those that a tokenizer puts in front.
    first = [] if spec.begins_with_prompt else parts[:1]
    return [*first, *(part for part in [*parts[1:], tuple(texts)] if part != ("",))]
