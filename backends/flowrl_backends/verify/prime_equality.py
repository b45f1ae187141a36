r"""The comparison of PRIME's math reward as it is in verl: the parts that decide a score there.

Its last resort, sympy on LaTeX, always fails in verl (a decorator is used as a context manager), so
that it is left out here. Products with `\pi` are computed by a small evaluator of arithmetic where
verl evaluates the text as Python.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import TypeAlias

from flowrl_backends.verify.boxed_equality import PRIME
from flowrl_backends.verify.final_answers import last_box

Value: TypeAlias = "str | float | tuple[Value, ...]"

_BEFORE = ("answer:", "answer is", "answers are")
_AFTER = ("is answer", "is the answer", "are answers", "are the answers")
_VERBS = ("be ", "is ", "are ", "=", ": ", "get ", "be\n", "is\n", "are\n", ":\n", "get\n")
_TOLERANCE = 1e-4
_MAX_LENGTH = 1000
_MAX_EXPONENT = 1000


def prime_math(response: str, truth: str) -> float:
    """Returns 1 if the response's final answer is equal to the reference answer, else 0."""
    answer = _final_answer(response)
    if PRIME.is_equal(answer, truth):
        return 1.0
    pis = (math.pi, 3.14) if r"\pi" in answer or r"\pi" in truth else (math.pi,)
    try:
        return float(any(_is_equal(answer, truth, pi) for pi in pis))
    # Texts that none of the readings expects raise, and count as different there.
    except (ValueError, IndexError, OverflowError):
        return 0.0


def _final_answer(response: str) -> str:
    """Returns the text of the last box, or the end of the sentence that names the answer."""
    for marker in _BEFORE:
        at = response.lower().rfind(marker)
        if at >= 0:
            response = response[at + len(marker) :].strip()
    for marker in _AFTER:
        at = response.lower().rfind(marker)
        if at >= 0:
            response = response[:at].strip()
    box = last_box(response, other=r"\fbox")
    if box is not None and (content := box[box.index("{") + 1 : -1].strip()):
        response = content
    at = response.rfind(". ")
    if at >= 0:
        response = response[:at].strip()
    for marker in _VERBS:
        at = response.lower().rfind(marker)
        if at >= 0:
            response = response[at + len(marker) :].strip()
    return response


def _is_equal(prediction: Value, truth: Value, pi: float = math.pi) -> bool:
    prediction, truth = _with_pi(prediction, pi), _with_pi(truth, pi)
    if isinstance(prediction, str):
        prediction = prediction[:_MAX_LENGTH]
    if isinstance(prediction, str) and isinstance(truth, str):
        if prediction.strip().lower() == truth.strip().lower():
            return True
        if prediction.replace(" ", "") == truth.replace(" ", ""):
            return True
    number, expected = _number(prediction), _number(truth)
    if number is not None and expected is not None:
        scaled = (expected / 100, expected, expected * 100)
        return any(math.isclose(each, number, rel_tol=_TOLERANCE) for each in scaled)
    if not prediction and prediction != 0:
        return False
    return _is_equal_text(_as_interval(str(prediction).strip()), str(truth).strip())


def _is_equal_text(text: str, other: str) -> bool:
    first, second = text, other
    square = text.startswith("[") and text.endswith("]") and not other.startswith("(")
    round_ = text.startswith("(") and text.endswith(")") and not other.startswith("[")
    if square or round_:
        first, second = first.strip("[]()"), second.strip("[]()")
    brackets = re.compile("[{}()]")
    if brackets.sub("", first) == brackets.sub("", second):
        return True
    if (
        text
        and other
        and text[0] in "(["
        and text[-1] in ")]"
        and text[0] == other[0]
        and text[-1] == other[-1]
        and _all_equal(text[1:-1].split(","), other[1:-1].split(","))
    ):
        return True
    if "," in text and "," in other:
        parts = [part.strip() for part in text.split(",")]
        others = [part.strip() for part in other.split(",")]
        if len(parts) == len(others):
            return _all_equal(parts, others)
    if text.startswith("Point") and other[0] == "(" and other[-1] == ")":
        return _all_equal(text[text.find("(") + 1 : -1].split(","), other[1:-1].split(","))
    return False


def _all_equal(parts: list[str], others: list[str]) -> bool:
    return len(parts) == len(others) and all(map(_is_equal, parts, others))


def _as_interval(text: str) -> str:
    """Returns sympy's intervals in brackets: `Interval.open(0, 1)` is `(0, 1)`."""
    for name, (left, right) in (
        ("Interval", "[]"),
        ("Interval.Ropen", "[)"),
        ("Interval.Lopen", "(]"),
        ("Interval.open", "()"),
    ):
        match = re.match(rf"^{re.escape(name)}\((.*)\)$", text)
        if match:
            return f"{left}{match[1]}{right}"
    return text


def _number(value: Value) -> float | None:
    text = str(value)
    try:
        return float(text.replace("{,}" if "{,}" in text else ",", ""))
    except ValueError:
        return None


def _with_pi(value: Value, pi: float) -> Value:
    """Returns a number without its sign of money or percent, and products with pi computed."""
    if not isinstance(value, str):
        return value
    if re.match(r"\$\d+(\.\d+)?", value):
        return value[1:]
    if re.match(r"^\d+(\.\d+)?\\?%$", value):
        return value.replace(r"\%", "").replace("%", "")
    if "_" in value:  # the base of a number
        return int(float(value.split("_")[0]))
    if r"\pi" not in value:
        return value
    text = re.sub(r"(\d?)\\pi", lambda match: f"{match[1] or 1}*{pi}", value)
    try:
        return _evaluated(ast.parse(text.strip(), mode="eval").body)
    except (ValueError, SyntaxError, TypeError, ArithmeticError, RecursionError, MemoryError):
        return text


_OPERATORS: dict[type[ast.operator], Callable[..., Value]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitXor: operator.xor,
    ast.Pow: operator.pow,
}


def _evaluated(node: ast.expr) -> Value:
    """Returns the value of an arithmetic expression; raises an error for any other text."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            return tuple(map(_evaluated, elements))
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_scalar(_evaluated(inner))
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            return _scalar(_evaluated(inner))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            first, second = _scalar(_evaluated(left)), _scalar(_evaluated(right))
            if isinstance(op, ast.Pow) and not abs(second) <= _MAX_EXPONENT:
                raise ValueError("a large power")
            return _OPERATORS[type(op)](first, second)
        case _:
            raise ValueError("not arithmetic")


def _scalar(value: Value) -> float:
    if isinstance(value, int | float):
        return value
    raise ValueError("not a number")
