"""Texts that end a response, looked for in the bytes of its tokens as they are sampled."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flowrl.backend.protocols import GenerateRequest
from flowrl_backends.torch.grammar import token_bytes


class StopTexts:
    """Those of the tokenizer of one model folder.

    Raises:
        BackendError: The bytes of its tokens are not known.
    """

    def __init__(self, folder: Path) -> None:
        self._bytes, _ = token_bytes(folder)

    def begin(self, request: GenerateRequest) -> StopText | None:
        """Returns the state of a response; None where no text ends it."""
        return StopText(request, self._bytes) if request.sampling.stop else None


class StopText:
    """The end of one response's text."""

    def __init__(self, request: GenerateRequest, words: Mapping[int, bytes]) -> None:
        self._stops = tuple(text.encode() for text in request.sampling.stops)
        self._least = request.sampling.min_tokens
        self._num_tokens = len(request.response)
        self._words = words
        self._kept = max(map(len, self._stops)) - 1
        own = request.response[request.grammar_from :].tolist()
        self._tail = self._last(b"".join(words.get(token, b"") for token in own))

    def take(self, token: int) -> bool:
        """Takes the next token; returns True if a text is complete with it."""
        tail, self._num_tokens = self._tail, self._num_tokens + 1
        text = tail + self._words.get(token, b"")
        self._tail = self._last(text)
        return self._num_tokens >= self._least and any(
            # Not within what was there before.
            text.find(stop, max(0, len(tail) - len(stop) + 1)) >= 0
            for stop in self._stops
        )

    def _last(self, text: bytes) -> bytes:
        return text[max(0, len(text) - self._kept) :]
