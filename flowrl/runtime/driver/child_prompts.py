"""Prompts that are made of samples: tokens of a sample between texts of a template, or up to a cut.

Tokens of the sample, and of the prompt that it answers, stay as they are; the texts between them
are encoded one by one, as the texts between the turns of an episode are. So a prompt may differ
from the tokens that its whole text would have, at the borders of its pieces alone. The stop token
that ended a response is left out. A text at the beginning gets what the tokenizer puts in front of
a prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from flowrl.algo.cuts import prefix_length
from flowrl.backend.batch import Ints
from flowrl.data import PromptItem, Row, Tokenizer
from flowrl.data.templates import field_text
from flowrl.errors import DataError
from flowrl.graph import Node
from flowrl.ids import GroupId, SampleId
from flowrl.runtime.driver.payloads import Payload
from flowrl.specs.cut import CutSpec, most_before
from flowrl.specs.prompts import PromptTemplate

_TOKENS = ("prompt", "response", "opponent")


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestPrompt:
    """Bounds of a prompt and its response, in tokens.

    Attributes:
        asked: Of the prompt, without a response that is continued.
        continued: Of that response.
        sampled: Of what is generated.
    """

    asked: int
    continued: int = 0
    sampled: int = 0


class ChildPrompts:
    """Makes the prompts of one `prompts_of` node.

    Args:
        node: The node.
        tokenizer: Encodes texts; of the policy that answers the prompts.
    """

    def __init__(self, node: Node, tokenizer: Tokenizer) -> None:
        spec = node.attr("spec")
        assert isinstance(spec, PromptTemplate | CutSpec)
        self._source = str(node.source or node.id)
        self._key = f"template of {node.id} ({node.source})"
        self._tokenizer = tokenizer
        self._cut = spec if isinstance(spec, CutSpec) else None
        self._further = None if isinstance(spec, CutSpec) else spec.opponent
        self._parts = [] if isinstance(spec, CutSpec) else _parts(spec)
        self._encoded: dict[tuple[str, bool], Ints] = {}

    @property
    def reads_groups(self) -> bool:
        """True if a prompt is made of two samples of a group, and `items` needs whole groups."""
        return self._further is not None

    def require_known_template(self) -> None:
        """Checks that the tokenizer knows the characters of the template itself.

        Raises:
            DataError: it has a character that the tokenizer does not know.
        """
        literals = [each for part in self._parts if isinstance(part, tuple) for each in part[::2]]
        remedy = "write the template with characters that it knows"
        text = "".join(literals)
        require_known(self._tokenizer, text, "the template has", remedy, self._source)

    def items(self, rows: Sequence[tuple[SampleId, Payload]]) -> list[PromptItem]:
        """Returns the prompts of samples' children, whose groups have the samples' ids.

        Args:
            rows: Samples; where groups are read, whole ones in member order, one after the other.

        Raises:
            DataError: the data row lacks a field, or the tokenizer cannot encode a text.
        """
        if self._further is None:
            return [self._item(sample, payload, None) for sample, payload in rows]
        found: list[PromptItem] = []
        for _, group in groupby(rows, key=lambda row: row[1].item.group):
            members = list(group)
            for place, (sample, payload) in enumerate(members):
                _, opponent = members[(place + self._further) % len(members)]
                found.append(self._item(sample, payload, opponent))
        return found

    def _item(self, sample: SampleId, payload: Payload, opponent: Payload | None) -> PromptItem:
        continued = 0
        if self._cut is not None:
            before = prefix_length(self._cut, payload.logprobs)
            continued = payload.item.num_continued + before
            ids = np.concatenate([payload.item.prompt_ids, payload.tokens[:before]])
        else:
            said = self._tokenizer.without_end
            tokens = {"prompt": payload.asked, "response": said(payload.response)}
            if opponent is not None:
                tokens["opponent"] = said(opponent.response)
            pieces = self._pieces(payload.item.row)
            ids = np.concatenate([tokens[p] if isinstance(p, str) else p for p in pieces])
        return PromptItem(
            epoch=payload.item.epoch,
            index=payload.item.index,
            group=GroupId(sample),
            row=payload.item.row,
            prompt_ids=ids,
            num_continued=continued,
        )

    def longest(self, row: Row, parents: LongestPrompt) -> LongestPrompt:
        """Returns the tokens that a prompt made for a row has at most.

        Args:
            parents: The same of the samples that it is made of.

        Raises:
            DataError: as `items`.
        """
        if self._cut is not None:
            before = parents.continued + most_before(self._cut, parents.sampled)
            return replace(parents, continued=before)
        said = parents.continued + parents.sampled
        sizes = {"prompt": parents.asked, "response": said, "opponent": said}
        asked = sum(sizes[p] if isinstance(p, str) else len(p) for p in self._pieces(row))
        return LongestPrompt(asked=asked)

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
            remedy = "take the row out of the data, or the field out of the template"
            what = "a field of the row that the template names has"
            require_known(self._tokenizer, text, what, remedy, self._source)
            known = (
                self._tokenizer.encode_prompt(text, "never")
                if first
                else self._tokenizer.encode(text)
            )
            if len(self._encoded) >= _REMEMBERED:
                self._encoded.clear()
            self._encoded[text, first] = known
        return known


def require_known(tokenizer: Tokenizer, text: str, what: str, remedy: str, where: str) -> None:
    """Checks that the tokenizer knows the characters of a text of the program or of a row.

    Raises:
        DataError: it has a character that the tokenizer does not know.
    """
    strange, key = tokenizer.unknown(text), tokenizer.alphabet_key
    if strange:
        raise DataError(
            f"{what} characters that the tokenizer does not know",
            where=where,
            found=" ".join(map(repr, strange[:8])),
            hint=(f"add them to {key}, or " if key else "") + remedy,
        )


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
