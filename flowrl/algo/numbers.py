r"""Numbers in text, as exact fractions: an expression is read as one number, or not at all.

One number is a sign (`-`, `+`, the Unicode minus, `minus`, with or without a space before the
digits), a currency sign, and one of

    12   1,250.00   .5   1.5e3                  commas between groups of three digits, or none
    3/4   \frac{3}{4}   \dfrac34   3 1/2   3½   also as mixed numbers; the fraction below 1
    1.5 × 10^3   10^{-2}   3.5 million          powers of ten, and their names

and, after it, a percent sign (`25%` is 25) or a unit (`9.8 m/s^2`). LaTeX around it (`\boxed`,
`\text`, `\left(`), Markdown around it and a full stop after it are read over, and so are digits in
names (`H2O`, `x_1`).

Text without one definite number gives None, never a part of it: calculations (`16-7`, `2^3`,
`2\sqrt{3}`, `2x`), lists and ranges (`3, 5`, `3 or 5`, `5-7`), quantities of two units (`1 hour 30
minutes`), inequalities, a number next to a token without a text (`12<unused0>`), and ambiguous
notation (`1.5.2`, `1,5`, `3:30`, `1 000`).
"""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from collections.abc import Callable
from fractions import Fraction

# Longer than any answer; Python refuses to convert strings of over 4300 digits, and slowly before.
_MAX_DIGITS = 1000
_MAX_CONTEXT = 80
"""The number of characters before and after a number that are examined."""

_WORDS_OF_SCALE = {
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}
_SCALE = rf"(?i:(?:{'|'.join(_WORDS_OF_SCALE)})s?)(?![A-Za-z])"
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_PLAIN = rf"(?:{_DIGITS}(?:\.[0-9]+)?|(?<![\w.)}}])\.[0-9]+)(?:[eE][+-]?[0-9]{{1,3}}(?![0-9]))?"
_POWER = r"10\ ?\^\ ?\{?\ ?(?P<power>[+-]?[0-9]{1,3})(?![0-9])\ ?\}?"
_TOKEN = re.compile(
    rf"""(?:(?P<whole>{_DIGITS})\ (?P<part>[0-9]+)\ ?/\ ?(?P<parts>[0-9]+)
         | (?:(?P<mantissa>{_PLAIN})\ ?[×xX*]\ ?)?{_POWER}
         | (?P<number>{_PLAIN})(?:\ ?/\ ?(?P<divisor>{_PLAIN}))?)
         (?:\ ?(?P<scale>{_SCALE}))?
         # Words, with the digits in them and the powers of units.
         | [^\W\d]\w*(?:(?<=[0-9])\.[0-9]+)*(?:\ ?\^\{{?-?[0-9]+\}}?)?""",
    re.VERBOSE,
)
_VULGAR = "\u00bc-\u00be\u2150-\u215e"
_DIGIT = re.compile(f"[0-9{_VULGAR}]")
_HASHES = re.compile(r"#{4}([^\n]*)")

_BETWEEN = re.compile(r"[-+ ({\[\"']*$")
"""The characters allowed between a number and the text before it."""

_OPEN = r"[({\[\"' ]*"
_CLOSED = r"[)\]}]*\ ?"
_VARIABLE = r"(?<![A-Za-z])[A-Za-z]"
_JOINT = (
    r"(?:\ ?[;~—&]\ ?|,?\ (?:and|or|to|through)\ |"
    r"\ (?:plus|times|over|(?:out\ )?of|divided\ by|mod)\ )"
)
_NAMED = r"(?:(?:[A-Za-z]\w?\ ?)?=\ ?)?"
_UNIT = (
    r"(?:hours?|hrs?|h|minutes?|mins?|min|days?|weeks?|months?|years?|feet|foot|ft|yards?|miles?|"
    r"pounds?|lbs?|dollars?|euros?|degrees|km|m|meters?|metres?|kg)"
)
_FUNCTION = r"\\?\b(?:sqrt|log|ln|exp|(?:arc)?(?:sin|cos|tan)|root\ of|mod)|\\(?:over|binom|choose)"

_GOES_BEFORE = re.compile(
    rf"""(?:
        [0-9]%?\ ?{_OPEN}                                             # 3 5, 3-5, 3(5)
        | [)\]}}](?:[({{\[]|\ \{{)*                                   # (3)5, (3)-5, {{a}}{{5}}
        | [0-9][.,:'_]+\(? | [0-9]\ :\  | \w\.                        # 1.5.2, 3:30, No.5, 0.(3)
        | [A-Za-z]\( | \\[A-Za-z]+[({{\[]{_OPEN}                       # f(5), \overline{{5}}
        | [\w)\]}}%]\ ?[/÷×]{{1,2}}\ ?{_OPEN}| [\^±]\ ?{_OPEN}              # x/5, 2^5, ± 5
        | (?:[0-9)\]}}π]|{_VARIABLE})\ ?\*{{1,2}}\ ?{_OPEN}           # 3 * 5
        | [0-9]\ ?[xX]\ ?{_OPEN}                                      # 3 x 5
        | [0-9]%?[)\]}}]*{_JOINT}{_NAMED}{_OPEN}                       # 3 or 5, 3 or x = 5
        | (?:[0-9]%?,\ ?[A-Za-z]\w?\ ?=|(?:∞|…|\.\.)\ ?,)\ ?{_OPEN}     # x = 3, y = 5; (-∞, 5)
        | [0-9]\ ?{_UNIT},?\ (?:and\ )?                               # 1 hour 5 minutes
        | (?:[≠≤≥]|[!<>]=|\w\ >|(?<!<)<|(?<![A-Za-z/<])[A-Za-z]>)\ ?{_OPEN}  # x > 5
        | (?:[√⌊⌈]|{_FUNCTION}|\\l(?:floor|ceil))\ ?{_OPEN}            # sqrt(5)
        | <unused[0-9]+>\ ?{_OPEN}                                    # a token without a text
    )$""",
    re.VERBOSE,
)
"""The text before a number, without its sign, if the number is only a part of an expression."""

_SUBTRACTED = re.compile(
    rf"(?:{_VARIABLE}\ ?|[^\W\d](?=[-+])|[)\]}}]\ (?=[-+]\ )|\|(?=[-+]))[-+ ({{\[\"']*$"
)
"""The text before a number whose sign is that of a calculation: `x - 5`, `|-5|`."""

_LISTED = re.compile(rf"[0-9]%? ?, ?{_OPEN}$")
_NOUN = re.compile(r" (?!(?:and|or)\b)[^\W\d]{2}")

_GOES_ON = re.compile(
    rf"""[0-9_^] | [.,:']+[0-9] | \.[(\\] | \ :\ [0-9]                           # 2^x, 1.5.2, 3:30
        | {_CLOSED}[/×÷*]{{1,2}}\ ?[-+({{]*(?:[0-9π√]|[A-Za-z](?![A-Za-z])) | \ ?±
        | \ ?[xyzπ√](?![A-Za-z]) | [a-ceijknp-rBKMT](?!\.?[A-Za-z])   # 5x, 5i, 5k
        | [^\W\d_][0-9] | \([0-9] | \ ?\}}\ ?\{{                      # 1e1000, 5(3), {{5}}{{a}}
        | {_CLOSED}[-+—]\ ?[({{]*(?:[0-9√π]|[xyz](?![A-Za-z]))        # 5-7, 5 + x
        | [%)\]}}]*(?:{_JOINT}{_NAMED}{_OPEN}|\ ?,\ ?|\ )-?[0-9∞]        # 5 or 7, [5, ∞)
        | \ ?,\ ?[A-Za-z]\w?\ ?=\ ?-?[0-9]                             # x = 5, y = 7
        | \ ?(?:[≠≤≥]|[<>]=?)\ ?[A-Za-z](?![A-Za-z>])                 # 5 < x
        | {_CLOSED}[-+/×÷]\ ?$                                         # 5 +
        | \ ?{_SCALE} | \ ?\(?(?:{_FUNCTION})
        | \ {_UNIT},?\ (?:and\ )?[0-9] | [.)\]}}]*\ ?<unused[0-9]""",
    re.VERBOSE,
)
"""The text after a number if the number is only a part of an expression."""


def last_number(text: str) -> Fraction | None:
    """Returns the last number in `text`; None if there is none or it is part of an expression."""
    for line in reversed(text.split("\n")):
        plain = _plain(line) if _DIGIT.search(line) else ""
        last = deque((m for m in _TOKEN.finditer(plain) if _is_number(m)), maxlen=1)
        if last:
            return _value(plain, last[0])
    return None


def after_hashes(text: str) -> Fraction | None:
    """Returns the first number after the last `####`, on the same line: GSM8K's final answer.

    The result is None without a `####`, or without a number after it.
    """
    lines = _HASHES.findall(text)
    plain = _plain(lines[-1]) if lines else ""
    first = next((m for m in _TOKEN.finditer(plain) if _is_number(m)), None)
    return None if first is None else _value(plain, first)


def answer_number(text: str) -> Fraction | None:
    """Returns the number of a reference answer: after `####` if it has one, else the last one."""
    return after_hashes(text) if "####" in text else last_number(text)


def close(value: Fraction, answer: Fraction, tolerance: float) -> bool:
    """Returns True if |value - answer| <= tolerance * |answer|."""
    return abs(value - answer) <= Fraction(tolerance) * abs(answer)


def _is_number(match: re.Match[str]) -> bool:
    return any(match[name] is not None for name in ("part", "power", "number"))


def _value(plain: str, match: re.Match[str]) -> Fraction | None:
    """Returns the number of a token; None if it is part of an expression, or has no value."""
    begin = max(plain.rfind("\n", 0, match.start()) + 1, match.start() - _MAX_CONTEXT)
    before = plain[begin : match.start()]
    after = plain[match.end() : match.end() + _MAX_CONTEXT].partition("\n")[0]
    between = _BETWEEN.search(before)
    assert between is not None  # it also matches the empty string
    signs = [c for c in between.group() if c in "+-"]
    unsigned = before[: between.start()] + re.sub(r"[-+]", "", between.group())
    if (
        len(match.group()) > _MAX_DIGITS
        or len(signs) > 1
        or (signs and _SUBTRACTED.search(before))
        or _GOES_BEFORE.search(unsigned)
        or (_LISTED.search(unsigned) and not _NOUN.match(after))
        or _GOES_ON.match(after)
        or ("." in match.group() and after.startswith(("..", "…")))
    ):
        return None
    size = _size(match)
    return -size if size is not None and signs == ["-"] else size


def _size(match: re.Match[str]) -> Fraction | None:
    """Returns the absolute value of a number; None if it divides by zero."""
    if match["part"] is not None:
        part, parts = int(match["part"]), int(match["parts"])
        # `3 5/2` is not a mixed number.
        size = _fraction(match["whole"]) + Fraction(part, parts) if part < parts else None
    elif match["power"] is not None:
        size = _fraction(match["mantissa"] or "1") * Fraction(10) ** int(match["power"])
    else:
        divisor = _fraction(match["divisor"] or "1")
        size = _fraction(match["number"]) / divisor if divisor else None
    if size is None or match["scale"] is None:
        return size
    return size * _WORDS_OF_SCALE[match["scale"].lower().removesuffix("s")]


def _fraction(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))


_ARGUMENT = rf"(?:\{{\ ?([-+]?)\ ?({_PLAIN})\ ?\}}|([0-9]))"
_FRACTION = re.compile(rf"\ ?\\frac\ ?{_ARGUMENT}\ ?{_ARGUMENT}(?![0-9])", re.VERBOSE)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_CHARACTERS = str.maketrans(
    {**dict.fromkeys("\u2010\u2011\u2013\u2212\ufe63\uff0d", "-"), **dict.fromkeys("⁄∕", "/"),
     **dict.fromkeys("·⋅∙✕", "×"), "`": "", "°": " degrees"}
)  # fmt: skip


def _vulgar(match: re.Match[str]) -> str:
    """`3/4` for `¾`, apart from the digits around it."""
    sign, digit = match.groups()
    return f" {unicodedata.normalize('NFKC', sign)}{digit and ' ' + digit}"


_TYPOGRAPHY: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(f"([{_VULGAR}])([0-9]?)"), _vulgar),
    (re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+"), lambda m: f"^{{{m.group().translate(_SUPERSCRIPTS)}}}"),
    # Separators that LaTeX and typesetters put between groups of digits.
    (re.compile(r"(?<=[0-9])(?:[\u00a0\u2009\u202f]|\{,\})(?=[0-9]{3}(?![0-9]))"), ","),
    (re.compile(r"\+ ?/ ?-"), "±"),
    (re.compile(r"_ ?\{ ?(\w+) ?\}"), r"_\1"),
    # Markdown's bold, but not Python's power.
    (re.compile(r"(?<![0-9)])\*\*|\*\*(?![0-9(])|__"), ""),
    (re.compile(r"(?<=\w)[$€£¥](?=\w)"), " "),
    (re.compile(r"[$€£¥]"), ""),
    (re.compile(r"[^\S\n]+"), " "),
    (re.compile(r"\b(?:[Nn]egative|[Mm]inus) (?=[0-9.\\])"), "-"),
)
_FORMATS = r"(?:text|math)[a-z]*|mbox|fbox|bm|boldsymbol|underline|emph|operatorname"
_LATEX: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"\\\\"), "\n"),
    (re.compile(r"(?<=[0-9])(?:,\\!|\\,)(?=[0-9]{3}(?![0-9]))"), ","),
    (re.compile(r"\\[,;:! ()\[\]]"), " "),
    (re.compile(r"\\([%$])"), r"\1"),
    (re.compile(r"\^ ?(?:\{ ?\\circ ?\}|\\circ)"), " degrees"),
    (re.compile(rf"\\(?:{_FORMATS}) ?\{{([^{{}}]*)\}}"), r" \1"),
    (re.compile(r"\\(?:left|right|[bB]igg?[lr]?|displaystyle)(?![A-Za-z])"), ""),
    (re.compile(r"(?<![-+])(?<![-+] )\\f?boxed(?![A-Za-z])"), "="),
    (re.compile(r"\\f?boxed(?![A-Za-z])"), ""),
    (re.compile(r"\\(?:times|cdot)(?![A-Za-z])"), "×"),
    (re.compile(r"\\div(?![A-Za-z])"), "÷"),
    (re.compile(r"\\pm(?![A-Za-z])"), "±"),
    (re.compile(r"\\pi(?![A-Za-z])"), "π"),
    (re.compile(r"\\infty(?![A-Za-z])"), "∞"),
    (re.compile(r"\\[bp]mod(?![A-Za-z])"), " mod "),
    (re.compile(r"\\[lr]?vert(?![A-Za-z]) ?"), "|"),
    (re.compile(r"\\[lc]?dots(?![A-Za-z])"), "..."),
    (re.compile(r"\\sqrt(?:\[[^\]]{0,9}\])?"), "√"),
    (re.compile(r"\\(?:n?eq?|n?[lg]eq?(?:q|slant)?|[lg]t)(?![A-Za-z])"), "≠"),
    (re.compile(r"\\[cdt]frac(?![A-Za-z])"), r"\\frac"),
)


def _plain(text: str) -> str:
    """Returns `text` without the markup of LaTeX, Markdown and typography in and around numbers."""
    latex = "\\" in text
    for pattern, by in _LATEX if latex else ():
        text = pattern.sub(by, text)
    for pattern, by in _TYPOGRAPHY:
        text = pattern.sub(by, text)
    text = text.translate(_CHARACTERS)
    return _FRACTION.sub(_with_slash, text) if latex else text


def _with_slash(match: re.Match[str]) -> str:
    """Returns `3/4` for a fraction of two numbers, after a space if a whole number precedes it."""
    sign, top, digit, other_sign, bottom, other_digit = match.groups()
    before = match.string[: match.start()].rstrip(" ")
    negative = ((sign or "") + (other_sign or "")).count("-") % 2
    apart = " " if before[-1:].isdigit() else ""
    return f"{apart}{'-' if negative else ''}{top or digit}/{bottom or other_digit}"
