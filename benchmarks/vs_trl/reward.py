"""The reward that both sides call: a number that differs between almost any two responses."""

from __future__ import annotations

import zlib


def score(text: str) -> float:
    """In [0, 1), from the text alone."""
    return zlib.crc32(text.encode()) % 9973 / 9973


def flowrl_reward(prompt: str, response: str, answer: str, row: dict[str, object]) -> float:
    """As flowrl calls it."""
    return score(response)


def trl_reward(completions: list[str], **_: object) -> list[float]:
    """As TRL calls it."""
    return [score(text) for text in completions]
