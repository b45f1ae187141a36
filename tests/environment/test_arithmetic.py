"""The calculator: what it gives, what it refuses, and that it agrees with Python."""

from __future__ import annotations

import ast
import operator
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl_backends.environment import ToolError, calculate


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12+7", "19"),
        (" 12 + 7 ", "19"),
        ("2+3*4", "14"),
        ("(2+3)*4", "20"),
        ("10-4-3", "3"),
        ("64/4/2", "8"),
        ("-3*-(2-5)", "-9"),
        ("--2", "2"),
        ("1/4", "0.25"),
        ("-1/8", "-0.125"),
        ("0.1+0.2", "0.3"),
        (".5*4", "2"),
        ("10.00", "10"),
        ("1/3", "1/3"),
        ("-2/6", "-1/3"),
        ("1/4096", "0.000244140625"),
        ("1/8192", "1/8192"),
        ("007", "7"),
        ("99999999999999999999*99999999999999999999", "9999999999999999999800000000000000000001"),
    ],
)
def test_values_are_exact(text: str, value: str):
    assert calculate(text) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a number is missing at column 1"),
        ("1+", "a number is missing at column 3"),
        ("1 + *2", "a number is missing at column 5"),
        ("(1+2", r"a '\)' is missing at column 5"),
        ("1+2)", r"'\)' at column 4"),
        ("1 2", "'2' at column 3"),
        ("1/0", "division by zero at column 3"),
        ("1/(2-2)", "division by zero at column 3"),
        ("two", "'t' at column 1"),
        ("1+x", "'x' at column 3"),
        ("1 + 1 = 2", "'=' at column 7"),
        ("2**3", "a number is missing at column 3"),
        ("1e9", "'e' at column 2"),
        ("٣+1", "'٣' at column 1"),
        ("__import__('os')", "'_' at column 1"),
        ("(" * 41 + "1" + ")" * 41, "more than 40 parentheses"),
        ("1" * 201, "more than 200 characters"),
    ],
)
def test_what_is_no_sum_is_refused_with_its_place(text: str, message: str):
    with pytest.raises(ToolError, match=message):
        calculate(text)


def test_as_many_signs_and_parentheses_as_fit_are_no_harm():
    assert calculate("-" * 199 + "1") == "-1"
    assert calculate("(" * 40 + "1" + ")" * 40) == "1"


NUMBERS = st.integers(0, 999).map(str)
SUMS = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/"), inner).map("".join),
        inner.map(lambda text: f"({text})"),
        inner.map(lambda text: f"-{text}"),
    ),
    max_leaves=8,
)

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def by_python(text: str) -> Fraction:
    """The value by Python's own parser, in exact fractions."""

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.BinOp():
                return OPERATORS[type(node.op)](value(node.left), value(node.right))
            case ast.UnaryOp():
                return -value(node.operand)
            case ast.Constant():
                return Fraction(node.value)
        raise AssertionError(ast.dump(node))

    # Python knows no numbers such as 007.
    return value(ast.parse(text, mode="eval").body)


@given(SUMS.filter(lambda text: "00" not in text))
def test_it_agrees_with_python(text: str):
    try:
        wanted = by_python(text)
    except (ZeroDivisionError, SyntaxError):
        return
    assert Fraction(calculate(text)) == wanted


@given(st.text("0123456789+-*/(). x", max_size=40))
def test_no_text_gives_anything_but_a_number_or_a_tool_error(text: str):
    try:
        value = calculate(text)
    except ToolError:
        return
    assert calculate(value) == value  # in its shortest form already
