"""Calls of the library math-verify, with the settings that other libraries give it.

Its own time limits are off: they take the alarm of the process, which is the scorer's. Its regular
expressions are compiled once for each setting; the library keeps those of one setting only.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from flowrl.errors import ConfigError

if TYPE_CHECKING:
    from math_verify.parser import ExtractionTarget

# The library warns of every call without its own time limit.
for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).setLevel(logging.ERROR)


_DOUBLED = re.compile(r"\(\(([^()]*)\)\)")
"""Parentheses around parentheses."""

Setting = Literal["default", "latex", "expression first", "box first"]


@contextmanager
def required(where: str) -> Iterator[None]:
    """Turns the failed import of an optional library into an error with the way out.

    Args:
        where: The config key that asks for the library.
    """
    try:
        yield
    except ImportError as reason:
        raise ConfigError(
            f"this reward needs a library that is not installed: {reason}",
            where=where,
            hint="pip install 'flowrl[math]'",
        ) from None


@cache
def _patterns(setting: Setting) -> Any:
    from latex2sympy2_extended import NormalizationConfig
    from latex2sympy2_extended.antlr_parser import PSParser
    from math_verify import parser

    atom = PSParser.AtomContext
    if not hasattr(atom, "FUNC_GAMMA"):
        # Version 1.11 asks its parser for antlr 4.9 for a rule that this parser does not have, and
        # would read no percentage with it.
        atom.FUNC_GAMMA = lambda self: None
    latex, expression = parser.LatexExtractionConfig(), parser.ExprExtractionConfig()
    targets: tuple[ExtractionTarget, ...]
    match setting:
        case "default":
            targets = (latex, expression)
        case "latex":
            targets = (latex,)
        case "expression first":
            targets = (expression, latex)
        case "box first":
            box_first = parser.LatexExtractionConfig(
                boxed_match_priority=0,
                normalization_config=NormalizationConfig(units=True),
                try_extract_without_anchor=False,
            )
            targets = (box_first,)
    return parser.get_extraction_regexes(targets)


def parsed(text: str, setting: Setting = "default", *, first: bool = False) -> list[Any]:
    """Returns the expressions that math-verify finds in a text, as sympy's objects and as text.

    Args:
        text: A response or a reference answer.
        setting: What it looks for.
        first: Only the first match is read.
    """
    from math_verify import parser

    # The library's parser takes twice as long for each pair around an expression.
    while (shorter := _DOUBLED.sub(r"(\1)", text)) != text:
        text = shorter
    try:
        found: list[Any] = parser.extract_target_from_pred(
            text,
            _patterns(setting),
            fallback_mode="first_match",
            extraction_mode="first_match" if first else "any_match",
        )
    # As in the library: a text that its parser cannot read has no expression.
    except Exception:
        return []
    return found


def equal(truth: list[Any], answer: list[Any]) -> bool:
    """True if math-verify finds an expression of the answer equal to one of the truth.

    A percentage is equal to its value (50% and 0.5) and to no other number, as in math-verify
    before 0.9, of which other libraries' scores are; since then, 50% is equal to 50.
    """
    from math_verify import verify

    # The text of what was read comes last.
    if any("%" in each for each in (*truth, *answer) if isinstance(each, str)):
        truth, answer = _with_values_of_percentages(truth), _with_values_of_percentages(answer)
    return bool(verify(truth, answer, timeout_seconds=None))


def _with_values_of_percentages(expressions: list[Any]) -> list[Any]:
    from sympy import Basic, Rational, UnevaluatedExpr

    percent = UnevaluatedExpr(Rational(1, 100))
    return [
        each.subs(percent, percent.args[0]) if isinstance(each, Basic) else each
        for each in expressions
    ]


def in_box(response: str, truth: str) -> float:
    r"""Puts the reference answer in `\boxed{}`."""
    gold = parsed(rf"\boxed{{{truth}}}", "latex")
    return float(bool(gold) and equal(gold, parsed(response, "expression first")))


def by_default(response: str, truth: str) -> float:
    """Puts the reference answer in dollar signs, and reads it as it is if that fails."""
    return float(equal(parsed(f"${truth}$") or parsed(truth), parsed(response)))


def box_first(response: str, truth: str) -> float:
    """Puts the reference answer in dollar signs; reads boxes first and nothing without LaTeX.

    A sample whose reference answer cannot be read has no score there, which is an error here.
    """
    return float(equal(parsed(f"${truth}$"), parsed(response, "box first", first=True)))


def as_written(response: str, truth: str) -> float:
    """Reads both as they are."""
    gold, answer = parsed(truth, "expression first"), parsed(response, "expression first")
    return float(bool(gold) and bool(answer) and equal(gold, answer))
