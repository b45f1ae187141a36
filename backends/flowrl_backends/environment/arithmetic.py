"""A calculator for text that a policy wrote: exact, bounded, and without `eval`.

    sum     = product { ("+" | "-") product }
    product = signed { ("*" | "/") signed }
    signed  = { "+" | "-" } ( number | "(" sum ")" )
    number  = digits [ "." digits ] | "." digits

Spaces are allowed between all of these. Time and memory are bounded by the length of the text:
there are no powers, and a result has at most as many digits as all numbers together.
"""

from __future__ import annotations

import re
from fractions import Fraction

from flowrl_backends.environment.tools import ToolError

_MAX_LENGTH = 200
"""The maximum number of characters of a calculation."""
_MAX_DEPTH = 40
"""The maximum depth of nested parentheses."""
_MAX_PLACES = 12
"""The maximum number of decimals of a result; a result with more is written as a fraction."""
_TOKEN = re.compile(r"\s*(?:(?P<number>\d+(?:\.\d+)?|\.\d+)|(?P<sign>[-+*/()]))", re.ASCII)


def calculate(text: str) -> str:
    """Computes a sum, product or quotient of numbers.

    A value with at most 12 decimal places is written as a decimal number; any other as a fraction
    in lowest terms.

    Raises:
        ToolError: The text is not a calculation, or divides by zero; with the column.

    >>> calculate("12+7"), calculate("2*(3.5-1)/4"), calculate("1/3")
    ('19', '1.25', '1/3')
    """
    if len(text) > _MAX_LENGTH:
        raise ToolError(f"more than {_MAX_LENGTH} characters")
    parser = _Parser(text)
    value = parser.sum(0)
    parser.end()
    return _written(value)


class _Parser:
    """A parser that reads from left to right; `column` is the next token's, counted from 1."""

    def __init__(self, text: str) -> None:
        self._text = text.rstrip()
        self._place = 0
        self._token = ""
        self._column = 1
        self._next()

    def _next(self) -> None:
        if self._place == len(self._text):
            self._token, self._column = "", self._place + 1
            return
        match = _TOKEN.match(self._text, self._place)
        if match is None:
            strange = self._text[self._place :].lstrip()[0]
            column = self._text.index(strange, self._place) + 1
            raise ToolError(f"{strange!r} at column {column}")
        kind = match.lastgroup or "sign"
        self._token, self._column = match[kind], match.start(kind) + 1
        self._place = match.end()

    def _take(self, signs: str) -> str:
        """Returns and consumes the next token if it is one of these signs; else returns ""."""
        if not self._token or self._token not in signs:
            return ""
        sign = self._token
        self._next()
        return sign

    def sum(self, depth: int) -> Fraction:
        value = self._product(depth)
        while sign := self._take("+-"):
            term = self._product(depth)
            value = value + term if sign == "+" else value - term
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._signed(depth)
        while sign := self._take("*/"):
            column = self._column
            factor = self._signed(depth)
            if sign == "/" and not factor:
                raise ToolError(f"division by zero at column {column}")
            value = value * factor if sign == "*" else value / factor
        return value

    def _signed(self, depth: int) -> Fraction:
        negative = False
        while sign := self._take("+-"):
            negative ^= sign == "-"
        value = self._number_or_parentheses(depth)
        return -value if negative else value

    def _number_or_parentheses(self, depth: int) -> Fraction:
        if self._take("("):
            if depth == _MAX_DEPTH:
                raise ToolError(f"more than {_MAX_DEPTH} parentheses within one another")
            value = self.sum(depth + 1)
            if not self._take(")"):
                raise ToolError(f"a ')' is missing at column {self._column}")
            return value
        if not self._token or self._token in "+-*/()":
            raise ToolError(f"a number is missing at column {self._column}")
        value = Fraction(self._token)
        self._next()
        return value

    def end(self) -> None:
        """Raises an error if there is another token."""
        if self._token:
            raise ToolError(f"{self._token!r} at column {self._column}")


def _written(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    for places in range(1, _MAX_PLACES + 1):
        scaled = value * 10**places
        if scaled.denominator == 1:
            digits = f"{abs(scaled.numerator):0{places + 1}d}"
            return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"
    return f"{value.numerator}/{value.denominator}"
