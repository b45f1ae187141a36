r"""Reads final answers: the last box, the line after `Answer:`, a number, as other libraries do.

The functions are exact in their odd cases too (an unclosed box, a number with a full stop), because
a verifier with another library's name must give that library's score.
"""

from __future__ import annotations

import re

_ANSWER_LINE = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")

# Minerva's normal form (Lewkowycz et al. 2022, appendix D.1), in the order of its steps.
_MINERVA_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    (r"\$", ""),
    (r"\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (r",\text{and}", ","),
    (r"\text{and}", ","),
    (r"\text{m}", r"\text{}"),
)
_MINERVA_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units"),
    *(r"\ldots", "sue", "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm"),
    *("pounds", "meters", "meals", "edges", "students", "childrentickets", "multiples"),
    *(r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}"),
    *(r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
)
_MINERVA_LATEX = (
    (re.compile(r".*?\$(.*?)\$.*"), r"$\1$"),
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    (re.compile(r"\\textbf\{(.*?)\}"), r"\1"),
    (re.compile(r"\\overline\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


def last_box(text: str, *, command: str = r"\boxed", other: str | None = None) -> str | None:
    r"""Returns the last box with its command, such as `\boxed{42}`; None if it is not closed.

    Args:
        text: A response.
        command: The command that is searched for; with its brace, only boxes with one count.
        other: A command that is searched for if the first one is absent.
    """
    start = text.rfind(command)
    if start < 0 and other is not None:
        start = text.rfind(other)
    if start < 0:
        return None
    depth = 0
    for match in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if match.group() == "{" else -1
        if depth == 0 and match.group() == "}":
            return text[start : match.end()]
    return None


def boxed_content(box: str | None) -> str | None:
    r"""Returns the content of `\boxed{...}`; None for anything else."""
    if box is None or not box.startswith(r"\boxed{") or not box.endswith("}"):
        return None
    return box[len(r"\boxed{") : -1]


def parse_answer_line(text: str) -> str:
    """Returns the text after the last `Answer:`, up to the end of its line; without one, a text
    that no answer has."""
    lines = _ANSWER_LINE.findall(text)
    return str(lines[-1]) if lines else "[INVALID]"


def minerva_normal_form(answer: str, *, ends: tuple[str, ...] = ()) -> str:
    """Returns an answer in Minerva's normal form.

    Args:
        answer: An answer, or a line with one.
        ends: Tokens of a chat template that are removed as well.
    """
    answer = answer.split("=")[-1]
    for before, after in _MINERVA_REPLACED:
        answer = answer.replace(before, after)
    for removed in (*_MINERVA_REMOVED, *ends):
        answer = answer.replace(removed, "")
    for pattern, replacement in _MINERVA_LATEX:
        answer = pattern.sub(replacement, answer)
    answer = answer.replace("$", "")
    if answer.replace(",", "").isdigit():
        answer = answer.replace(",", "")
    return answer.strip()
