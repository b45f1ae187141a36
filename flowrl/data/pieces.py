"""Text in the middle of a sample, encoded and decoded without what is done where a text begins.

Tokenizers that come from SentencePiece put a space in front of a text: by a normalizer (Llama 2,
Mistral 0.1), by the pre-tokenizer, or both ways; GPT-2's can do so too. Their decoders take that
space away again. A response or an environment's words follow other tokens, so that this space would
be one that nobody wrote, or one that was written would be lost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders

__all__ = ["tokenizer_of_pieces"]

_LISTS = ("normalizers", "pretokenizers", "decoders")
"""Where sequences of normalizers, pre-tokenizers and decoders hold their parts."""


def tokenizer_of_pieces(fast: FastTokenizer) -> FastTokenizer:
    """A tokenizer of the same tokens for text that others precede; `fast` where it is no other.

    With it, the texts of pieces and of what precedes them are joined by joining their tokens.
    """
    parts = {
        "normalizer": fast.normalizer,
        "pre_tokenizer": fast.pre_tokenizer,
        "decoder": fast.decoder,
    }
    changed: dict[str, object] = {}
    for name, part in parts.items():
        if part is None or isinstance(part, decoders.ByteLevel):
            continue  # that decoder has the option of its pre-tokenizer, and does not read it
        before = json.loads(part.__getstate__())
        after = _within_text(before)
        if after != before:
            changed[name] = after
    if not changed:
        return fast
    return FastTokenizer.from_str(json.dumps({**json.loads(fast.to_str()), **changed}))


def _within_text(part: Mapping[str, object]) -> Mapping[str, object] | None:
    """A part of a tokenizer.json without what it does at a text's ends; None where that is all."""
    kind = part.get("type")
    if kind in ("Prepend", "Strip"):
        return None
    if kind == "Replace" and _is_anchored(part.get("pattern")):
        return None
    if kind == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    if kind == "ByteLevel" and part.get("add_prefix_space"):
        return {**part, "add_prefix_space": False}
    for name in _LISTS:
        listed = part.get(name)
        if isinstance(listed, list):
            return {**part, name: [p for p in map(_within_text, listed) if p is not None]}
    return part


def _is_anchored(pattern: object) -> bool:
    """Whether a pattern holds at the beginning of a text only."""
    expression = pattern.get("Regex") if isinstance(pattern, Mapping) else None
    return isinstance(expression, str) and expression.startswith(("^", r"\A"))
