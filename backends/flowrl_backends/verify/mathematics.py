r"""`math`: compares the final answer of a response with the reference answer, as mathematics.

1. The final answer is the last box; else the text after the last `####`; else the sentence after
   the last `answer is` or `Answer:`; else the last formula or number. Reasoning up to `</think>` is
   left out if text follows it, and an `<answer>` is read alone.
2. Both answers lose what does not change their value: markup, units, signs of money, separators of
   thousands, a full stop, the name of a variable (`x = 5`).
3. They are compared as text, as choices (`(B)`), as exact numbers, and last by math-verify.

Numbers are equal if they are exactly equal, or if one is not whole and both agree to six decimal
places. A percentage is equal to its number and to its value.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

from flowrl.algo.numbers import last_number
from flowrl_backends.verify import math_verify_calls as math_verify
from flowrl_backends.verify.final_answers import last_box

_MAX_TAIL = 20_000
"""Characters at the end of a response that are searched for an answer."""
_MAX_ANSWER = 1_000
"""Longer answers are compared as text only."""

_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_BOX = re.compile(r"\\f?boxed?\s*(?:\{([^\n]*)|([^\s{$][^\n$]*))")
_HASHES = re.compile(r"####([^\n]*)")
_PHRASE = re.compile(
    r"\b(?:answers?|answer\s+to[^.\n:]{0,80})(?:\*\*)?\s*(?::|(?:is|are)\b:?)(?:\*\*)?\s*([^\n]+)"
    r"|答案[是为]?[:：]?\s*([^\n。]+)",
    re.IGNORECASE,
)
_FORMULA = re.compile(
    r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|(?<!\\)\$([^$\n]+)(?<!\\)\$", re.DOTALL
)
_CLAUSE = re.compile(
    r"(?:[,;]\s+(?=(?!and\b|or\b)[A-Za-z]{2,}\b(?!\s*=))|\.\s+(?=[A-Z])|\s+(?:because|since|so)\b).*",
    re.DOTALL,
)
"""The rest of a sentence, after the answer in it."""

_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("−–‐‑﹣－", "-"),
        "×": r"\times ",
        "÷": "/",
        "π": r"\pi ",
        "∞": r"\infty ",
        "°": "",
        "⁄": "/",
        "≤": r"\le ",
        "≥": r"\ge ",
        "∪": r"\cup ",
        "∈": r"\in ",
        "±": r"\pm ",
        "·": r"\cdot ",
        "√": r"\sqrt ",
        "´": "'",
    }
)
_ROW = "\x00"
"""Stands for the end of a row of a matrix while other commands are removed."""
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+")
_VULGAR = re.compile("([\u00bc-\u00be\u2150-\u215e])")
_STEPS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\\(?:begin|end)\s*\{(?:equation|align|gather|aligned)\*?\}"), ""),
    (re.compile(r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits)(?![A-Za-z])\.?"), ""),
    (re.compile(r"(?<=\d)(?:\{,\}|,\\!|\\,|\\!|\\ |[\u2009\u202f\u00a0])(?=\d{3}(?!\d))"), ""),
    (re.compile(r"\\[,;:!]|\\ |\\quad|\\qquad|~|[\u2009\u202f\u00a0]"), " "),
    (re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)"), ""),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\frac\s*(\d)\s*(\d)(?!\d)"), r"\\frac{\1}{\2}"),
    (
        re.compile(r"\\(?:text|textbf|textit|textrm|mbox|mathrm|mathbf|rm|bf)\s*\{([^{}]*)\}"),
        r" \1",
    ),
    (re.compile(r"\\[\[\]()]|\$|\\\$|[€£¥]|\*\*"), ""),
    (re.compile(r"\\?%"), r"\\%"),
    (re.compile(r"\\le(?:q|qslant)?(?![A-Za-z])"), r"\\le"),
    (re.compile(r"\\ge(?:q|qslant)?(?![A-Za-z])"), r"\\ge"),
    (re.compile(r"bmatrix|Bmatrix"), "pmatrix"),
    (re.compile(r"(?<=\w|[)}\]])\s*,?\s+(?:or|and)\s+(?=[\w({\[\\-])"), ", "),
)
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d)")
_UNIT_WORD = r"(?:[A-Za-z]{2,}|[mgshL])(?:\s*/\s*[A-Za-z]+)?(?:\s*\^\s*\{?\s*[23]\s*\}?)?"
_UNITS = re.compile(rf"(?<=[\d}})\]%])\s*(?:\s(?<![A-Za-z\\]){_UNIT_WORD}\.?)+\s*$")
_ASSIGNED = re.compile(
    r"(^|,\s*)[A-Za-z](?:_\{?\w+\}?)?(?:\([A-Za-z]\))?\s*(?:=|\\in(?![A-Za-z]))\s*"
)
_CHOICE = re.compile(r"^(?:option|choice)?\s*\(?([A-Ja-j])(?:[).:]|\s*$)", re.IGNORECASE)
_WORDS = re.compile(r"(?<!\\)[A-Za-z]{2,}")


def mathematics(response: str, answer: str) -> float:
    """Returns 1 if the response's final answer is the reference answer, else 0."""
    found = final_answer(response)
    return float(found is not None and is_equal(found, final_answer(answer) or answer))


def final_answer(response: str) -> str | None:
    """Returns the text of a response's final answer; None if there is none."""
    text = response[-_MAX_TAIL:]
    _, closed, after = text.rpartition("</think>")
    if closed and after.strip():
        text = after
    tagged = _ANSWER_TAG.findall(text)
    if tagged and tagged[-1].strip():
        text = tagged[-1]
    box = _box(text)
    if box is not None:
        return box
    for pattern in (_HASHES, _PHRASE):
        matches = list(pattern.finditer(text))
        if matches:
            return _first_clause(next(group for group in matches[-1].groups() if group is not None))
    if len(text.strip()) <= _MAX_ANSWER // 10 and "\n" not in text.strip():
        return _first_clause(text)
    formulas = list(_FORMULA.finditer(text))
    if formulas:
        return next(group for group in formulas[-1].groups() if group is not None)
    lines = [line for line in text.splitlines() if line.strip()]
    return _first_clause(lines[-1]) if lines else None


def _box(text: str) -> str | None:
    """Returns the content of the last box, also of one without braces or without an end."""
    start = max(text.rfind(r"\boxed"), text.rfind(r"\fbox"))
    if start < 0:
        return None
    box = last_box(text, command=text[start : start + len(r"\fbox")])
    opened = _BOX.match(text, start)
    if opened is None:
        return None
    if opened[1] is None:  # \boxed 42
        return _first_clause(opened[2])
    return opened[1] if box is None else box[box.index("{") + 1 : -1]


def _first_clause(sentence: str) -> str:
    formula = _FORMULA.match(sentence.strip())
    if formula is not None:
        return next(group for group in formula.groups() if group is not None)
    return _CLAUSE.sub("", sentence.strip(), count=1)


def is_equal(answer: str, truth: str) -> bool:
    """True if two final answers have the same value."""
    found, expected = normalized(answer), normalized(truth)
    if not found or not expected:
        return False
    number, true_number = _number(found), _number(expected)
    found, expected = _without_units(found, expected)
    if _as_text(found) == _as_text(expected):
        return True
    if re.fullmatch(r"\(?[A-J]\)?", expected):
        choice, right = _CHOICE.match(found), _CHOICE.match(expected)
        if choice is not None and right is not None:
            return choice[1].upper() == right[1].upper()
    if max(len(found), len(expected)) > _MAX_ANSWER:
        return False
    if number is not None and true_number is not None:
        return _same_number(number, true_number, "%" in found, "%" in expected)
    if not (_is_formula(found) and _is_formula(expected)):
        return False
    gold = math_verify.parsed(f"${expected}$", "latex")
    return math_verify.equal(gold, math_verify.parsed(f"${found}$", "latex"))


def _is_formula(text: str) -> bool:
    """True if a text is more than words, which math-verify reads as products of letters."""
    return bool(re.search(r"[\d\\=<>+*/^()\[\]-]", text)) or not _WORDS.search(text)


def _number(text: str) -> Fraction | None:
    """Returns the number that a text is; None for any other, and for a factorial."""
    return last_number(text) if re.search(r"\d", text) and "!" not in text else None


def _same_number(number: Fraction, truth: Fraction, percent: bool, true_percent: bool) -> bool:
    if percent != true_percent:
        scaled = number / 100 if percent else number * 100
        if scaled == truth:
            return True
    if number == truth:
        return True
    is_decimal = number.denominator != 1 and truth.denominator != 1
    return is_decimal and round(number, 6) == round(truth, 6)


def normalized(answer: str) -> str:
    """Returns an answer without markup, separators of thousands and the signs of money."""
    text = _VULGAR.sub(r" \1", answer.strip().replace("\\\\", _ROW))
    text = _RAISED.sub(lambda match: f"^{{{match.group().translate(_SUPERSCRIPTS)}}}", text)
    text = unicodedata.normalize("NFKC", text.translate(_CHARACTERS)).translate(_CHARACTERS)
    for pattern, replacement in _STEPS:
        text = pattern.sub(replacement, text)
    text = text.replace(_ROW, r" \\ ").strip().rstrip(".,;:").strip()
    while text.startswith("{") and text.endswith("}") and _is_enclosed(text):
        text = text[1:-1].strip()
    while text.startswith("((") and text.endswith("))") and _is_enclosed(text):
        text = text[1:-1].strip()
    if _is_enclosed(text) and text.startswith("(") and re.fullmatch(r"[^,]*\d[^,]*", text):
        text = text[1:-1].strip()
    if _THOUSANDS.match(text):
        text = _THOUSANDS.sub(lambda match: match.group().replace(",", ""), text, count=1)
    return text


def _is_enclosed(text: str) -> bool:
    """True if the first bracket of a text is closed by its last one."""
    depth = 0
    pairs = {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}
    for place, character in enumerate(text):
        depth += pairs.get(character, 0)
        if depth <= 0:
            return depth == 0 and place == len(text) - 1 and place > 0
    return False


def _without_units(found: str, expected: str) -> tuple[str, str]:
    """Removes a variable's name and units that the other answer does not have."""
    if ("=" in found or r"\in" in found) != ("=" in expected or r"\in" in expected):
        found, expected = _ASSIGNED.sub(r"\1", found), _ASSIGNED.sub(r"\1", expected)
        if "=" in found and "=" not in expected and "," not in found:
            found = found.rpartition("=")[2].strip()
    bare = _UNITS.sub("", found), _UNITS.sub("", expected)
    if not _WORDS.search(expected) or not _WORDS.search(found):
        return bare
    return (found, expected) if bare[0] != bare[1] else bare


def _as_text(answer: str) -> str:
    text = re.sub(r"\s+", "", answer)
    return text.lower() if _WORDS.search(answer) else text
