r"""Compares short answers in LaTeX by text, as MATH and PRM800K do, and then by sympy.

`hendrycks_normal_form` is the normal form of MATH (Hendrycks et al. 2021, `math_equivalence`).
`Grader.is_equal` is PRM800K's comparison (Lightman et al. 2023, `grading/grader.py`): equal normal
forms; else equal texts without units; else, element by element, a difference that sympy simplifies
to 0. Fractions must be reduced, and an integer is equal to itself only.

sympy's parser evaluates its text as Python. As in PRM800K, it is given only texts of at most two
distinct letters, in which hardly a name of Python can be written, and no large powers. Unlike there
it is given no text with quotation marks, underscores, attributes, brackets or assignments: sympy's
`re('...')` evaluates the text in the marks, which escapes can write without letters, and a response
could run any program.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from typing import Protocol, cast

_ENCLOSING_TEXT = re.compile(r"^\\text\{(?P<text>.+?)\}$")
_UNITS = (
    *("degree", "cm", "centimeter", "meter", "mile", "second", "minute", "hour", "day", "week"),
    *("month", "year", "foot", "feet", "inch", "yard"),
)
_REFUSED = re.compile(
    r"""['"_\\:;=@\[\]{}]|\.\s*[^\W\d]"""  # strings, attributes, and Python's other syntax
    r"|\^\{|\^\(|\^[0-9]+\^|\^[0-9][0-9]+"  # large powers
)
"""What sympy's parser is not given: all that no sum, product, power or root needs."""
_FRACTION = re.compile(r"^-?[0-9]+.?/0*[1-9][0-9]*.?$")
_THOUSANDS = re.compile(r"(\d)(,)(\d\d\d)($|\D)")
_MAX_LETTERS = 2


def hendrycks_normal_form(answer: str, *, percent: str = r"\%") -> str:
    r"""Returns an answer of MATH in its normal form.

    Args:
        answer: An answer in LaTeX.
        percent: Percent sign that is removed: `\%`, or `%` with or without a backslash.

    Raises:
        ValueError: The text has several units, or a command at its end.
    """
    text = answer.replace("\n", "").replace(r"\!", "").replace("\\\\", "\\")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac")
    for removed in (r"\left", r"\right", r"^{\circ}", r"^\circ", r"\$"):
        text = text.replace(removed, "")
    if r"\text{ " in text:
        text, *units = text.split(r"\text{ ")
        if len(units) != 1:
            raise ValueError("several units")
    text = text.replace(r"\%", "").replace(percent, "")
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    if text[0] == ".":
        text = f"0{text}"
    sides = text.split("=")
    if len(sides) == 2 and len(sides[0]) <= 2:
        text = sides[1]
    text = _with_braces_after_roots(text).replace(" ", "")
    text = _with_braces_in_fractions(text)
    if text == "0.5":
        text = r"\frac{1}{2}"
    return _as_fraction(text)


def _with_braces_after_roots(text: str) -> str:
    first, *others = text.split(r"\sqrt")
    if not all(others):
        raise ValueError("a root of nothing")
    return first + "".join(
        rf"\sqrt{part}" if part[0] == "{" else rf"\sqrt{{{part[0]}}}{part[1:]}" for part in others
    )


def _with_braces_in_fractions(text: str) -> str:
    first, *others = text.split(r"\frac")
    parts = [first]
    for part in others:
        if not part:
            raise ValueError("a fraction of nothing")
        if part[0] == "{":
            parts.append(rf"\frac{part}")
        elif len(part) < 2:
            return text
        elif part[1] == "{":
            parts.append(rf"\frac{{{part[0]}}}{part[1:]}")
        else:
            parts.append(rf"\frac{{{part[0]}}}{{{part[1]}}}{part[2:]}")
    return "".join(parts)


def _as_fraction(text: str) -> str:
    parts = text.split("/")
    if len(parts) != 2:
        return text
    try:
        top, bottom = map(int, parts)
    except ValueError:
        return text
    return rf"\frac{{{top}}}{{{bottom}}}" if text == f"{top}/{bottom}" else text


def is_hendrycks_equal(answer: str, truth: str) -> bool:
    """True if two answers have the same normal form; where one has none, if they are the same."""
    try:
        return hendrycks_normal_form(answer) == hendrycks_normal_form(truth)
    except ValueError:
        return answer == truth


@dataclass(frozen=True, slots=True, kw_only=True)
class Grader:
    r"""A variant of PRM800K's comparison.

    Attributes:
        percent: See `hendrycks_normal_form`.
        units: Words that are removed from answers, with their plurals and powers.
        keeps_spaces: Spaces and braces stay in the text that is compared.
    """

    percent: str = r"\%"
    units: tuple[str, ...] = _UNITS
    keeps_spaces: bool = False

    def is_equal(self, answer: str, truth: str) -> bool:
        """True if an answer is equal to the reference answer."""
        if self._normal_form(answer) == self._normal_form(truth):
            return True
        given, expected = self._plain(answer), self._plain(truth)
        if given == expected:
            return True
        if not given:
            return False
        elements, others = _elements(expected), _elements(given)
        if len(elements) != len(others) or (
            len(elements) > 1 and (expected[0] != given[0] or expected[-1] != given[-1])
        ):
            return False
        return all(_same_element(*pair) for pair in zip(elements, others, strict=True))

    def _normal_form(self, answer: str) -> str:
        answer = answer.strip()
        enclosed = _ENCLOSING_TEXT.search(answer)
        if enclosed is not None:
            answer = enclosed["text"].strip()
        try:
            return hendrycks_normal_form(answer, percent=self.percent)
        except ValueError:
            return answer

    def _plain(self, text: str) -> str:
        """Returns an answer as plain text, in lower case and without units."""
        enclosed = _ENCLOSING_TEXT.search(text)
        if enclosed is not None:
            text = enclosed["text"]
        for before, after in (
            *((r"\%", "%"), (r"\$", "$"), ("$", ""), ("%", "")),
            *((" or ", " , "), (" and ", " , ")),
            *(("million", "*10^6"), ("billion", "*10^9"), ("trillion", "*10^12")),
        ):
            text = text.replace(before, after)
        for unit in self.units:
            text = re.sub(rf"{unit}(es)?(s)? *(\^[0-9]+)?", "", text)
        text = re.sub(r"\^ *\\circ", "", text)
        if text.startswith("{") and text.endswith("}"):
            text = text[1:-1]
        text = re.sub(r",\\! *", "", text)
        number = _whole(text)
        if number is not None:
            text = str(number)
        if "\\" in text:
            text = _without_latex(text)
        text = re.sub("- *", "-", text)
        text = re.sub(r"([0-9]) +([0-9])", r"\1+\2", text)  # 7 3/4 is 7+3/4
        if not self.keeps_spaces:
            text = re.sub("[ {}]", "", text)
        text = text.lower()
        number = _whole(_without_thousands(text))
        if number is not None:
            with contextlib.suppress(ValueError):
                text = str(int(float(text.replace(",", ""))))
        return text


SLIME = Grader()
MATHRULER = Grader(percent="%")
PRIME = Grader(units=(*_UNITS, "liter"), keeps_spaces=True)


def _whole(text: str) -> int | None:
    try:
        number = float(text)
        whole = round(number)
    except (ValueError, OverflowError):
        return None
    return whole if abs(number - whole) <= 1e-7 else None


def _without_thousands(text: str) -> str:
    while (shorter := _THOUSANDS.sub(r"\1\3\4", text)) != text:
        text = shorter
    return text


class _LatexReader(Protocol):
    def latex_to_text(self, latex: str) -> str: ...


def _without_latex(text: str) -> str:
    from pylatexenc import latex2text

    latex = text.replace(r"\tfrac", r"\frac").replace(r"\dfrac", r"\frac")
    latex = latex.replace(r"\frac", r" \frac")
    try:
        text = cast(_LatexReader, latex2text.LatexNodes2Text()).latex_to_text(latex)
    except Exception:  # a text that is no LaTeX stays as it is
        return text
    for before, after in zip("√π∞∪·×", ("sqrt", "pi", "inf", "U", "*", "*"), strict=True):
        text = text.replace(before, after)
    return text.strip()


def _elements(text: str) -> list[str]:
    text = _without_thousands(text)
    if not text:
        return []
    inner = text[1:-1]
    if len(text) > 2 and text[0] in "()[]" and text[-1] in "()[]" and not set(inner) & set("()[]"):
        return [element.strip() for element in inner.split(",")]
    return [text]


def _same_element(expected: str, given: str) -> bool:
    if _FRACTION.search(expected) and _FRACTION.search(given):
        return expected == given
    if _is_whole(expected) != _is_whole(given):
        return False
    return _is_zero(f"({expected})-({given})")


def _is_whole(text: str) -> bool:
    return _whole(_without_thousands(text)) is not None


def _is_zero(expression: str) -> bool:
    letters = {c for c in expression.replace("sqrt", "").replace("frac", "") if c.isalpha()}
    if len(letters) > _MAX_LETTERS or _REFUSED.search(expression):
        return False
    import sympy
    from sympy.parsing import sympy_parser as parser

    transformations = (
        *parser.standard_transformations,
        parser.implicit_multiplication_application,
    )
    try:
        parsed = parser.parse_expr(expression.replace("^", "**"), transformations=transformations)
        return bool(sympy.simplify(parsed) == 0)
    # sympy raises anything on texts that are no mathematics.
    except Exception:
        return False
