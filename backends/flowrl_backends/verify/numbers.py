"""Numbers in text, as exact fractions.

What counts as a number, in this order of characters: a sign; a currency sign ($ € £ ¥), before or
after the sign; digits, with commas between groups of three or none; decimals; a power of ten
(`1.5e3`); and, after a slash, a second number that divides it (`3/4`). A percent sign after it is
read over: `25%` is 25. `+`, `-` and the Unicode minus are signs where no digit, letter or closing
bracket stands in front of them (`16-7` ends in 7, `= -7` in -7).

`1,5` is two numbers: the comma is no decimal point. A dot that ends a sentence is not part of the
number before it.
"""

from __future__ import annotations

import re
from collections import deque
from fractions import Fraction

__all__ = ["after_hashes", "close", "first_number", "last_number"]

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_PLAIN = rf"(?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]{{1,3}}(?![0-9]))?"
_NUMBER = re.compile(
    rf"""(?P<sign>(?<![\w)\]}}])[+\-\u2212])?
         [$\u20ac\u00a3\u00a5]?
         (?P<inner>(?<=[$\u20ac\u00a3\u00a5])[+\-\u2212])?
         (?P<number>{_PLAIN})
         (?:\ ?/\ ?[$\u20ac\u00a3\u00a5]?(?P<divisor>{_PLAIN}))?""",
    re.VERBOSE,
)
_HASHES = re.compile(r"#{4}([^\n]*)")

# Longer than any answer; Python refuses to convert strings of over 4300 digits, and slowly before.
_MAX_DIGITS = 1000


def last_number(text: str) -> Fraction | None:
    """The last number in `text`; None where there is none, or it divides by zero."""
    last = deque(_NUMBER.finditer(text), maxlen=1)
    return _value(last[0]) if last else None


def first_number(text: str) -> Fraction | None:
    """The first number in `text`; None where there is none, or it divides by zero."""
    match = _NUMBER.search(text)
    return _value(match) if match is not None else None


def after_hashes(text: str) -> Fraction | None:
    """The first number after the last `####`, on the same line: GSM8K's final answer.

    None where there is no `####` or no number follows it.
    """
    lines = _HASHES.findall(text)
    return first_number(lines[-1]) if lines else None


def close(value: Fraction, answer: Fraction, tolerance: float) -> bool:
    """Whether |value - answer| <= tolerance * |answer|."""
    return abs(value - answer) <= Fraction(tolerance) * abs(answer)


def _value(match: re.Match[str]) -> Fraction | None:
    if len(match.group()) > _MAX_DIGITS:
        return None
    number = _fraction(match["number"])
    if match["divisor"] is not None:
        divisor = _fraction(match["divisor"])
        if divisor == 0:
            return None
        number /= divisor
    signs = (match["sign"], match["inner"])
    negative = sum(s in ("-", "\u2212") for s in signs if s) % 2 == 1
    return -number if negative else number


def _fraction(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))
