r"""Verifiers of other libraries, by name: each gives the score that the named function gives.

    gsm8k_strict     verl_gsm8k_strict, skyrl_gsm8k_strict
    gsm8k_flexible   verl_gsm8k_flexible, skyrl_gsm8k_flexible, mindrlhf_accuracy
    boxes            verl_math_boxed, verl_prime_math, slime_boxed_grade, msrl_math_17k_acc
    dapo             verl_math_dapo, nemo_dapo, skyrl_aime, msrl_acc_for_dapo, slime_math_dapo
    math-verify      verl_math_verify, math_verify_default, trl_accuracy_gold_dollar,
                     areal_math_verify
    format           msrl_format, mindrlhf_format, trl_think_format, msrl_strict_format

`PEERS` maps each name to a function of the response and the reference answer. Where the named
function raises an error on a reference answer, so does the one here, and the sample fails.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeAlias

from flowrl.errors import RewardError
from flowrl_backends.verify import math_verify_calls as math_verify
from flowrl_backends.verify.boxed_equality import MATHRULER, SLIME, is_hendrycks_equal
from flowrl_backends.verify.final_answers import (
    boxed_content,
    last_box,
    minerva_normal_form,
    parse_answer_line,
)
from flowrl_backends.verify.prime_equality import prime_math

PeerVerifier: TypeAlias = Callable[[str, str], float]
"""A function of a response and a reference answer."""

_HASHES = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")
_SIGNED_NUMBER = re.compile(r"[-+]?\d+\.?\d*")
_THINK_ANSWER = re.compile(r"^<think>.*?</think>\s*<answer>.*?</answer>$", re.DOTALL | re.MULTILINE)
_THINK = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL | re.MULTILINE)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_LAST = 300
"""Characters at the end of a response in which verl looks for an answer."""


def verl_gsm8k_strict(response: str, truth: str) -> float:
    """Compares the number after the last `####`."""
    numbers = _HASHES.findall(response[-_LAST:])
    return float(bool(numbers) and numbers[-1].replace(",", "") == truth)


def skyrl_gsm8k_strict(response: str, truth: str) -> float:
    """Compares the number after the first `####`."""
    first = _HASHES.search(response)
    return float(first is not None and first[1].replace(",", "") == truth)


def verl_gsm8k_flexible(response: str, truth: str) -> float:
    """Compares the last number, with its commas and full stops."""
    return skyrl_gsm8k_flexible(response[-_LAST:], truth)


def skyrl_gsm8k_flexible(response: str, truth: str) -> float:
    """Compares the last number of the whole response, with its commas and full stops."""
    numbers = _NUMBER.findall(response)
    found = [number for number in numbers if number != "."] or numbers[:1]
    return float(bool(found) and found[-1] == truth)


def mindrlhf_accuracy(response: str, truth: str) -> float:
    """Compares the last number of the response with the first one of the reference answer."""
    response, truth = (re.sub(r"(\d),(\d)", r"\1\2", text) for text in (response, truth))
    expected = _SIGNED_NUMBER.search(truth)
    if expected is None:
        raise RewardError("the reference answer has no number", found=repr(truth[:60]))
    numbers = _SIGNED_NUMBER.findall(response) or [response]
    return float(numbers[-1].lower() == expected.group())


def verl_math_boxed(response: str, truth: str) -> float:
    """Compares the last box in MATH's normal form."""
    if "\\boxed " in response:
        answer: str | None = response.split("\\boxed ")[-1].split("$")[0]
    else:
        answer = boxed_content(last_box(response, other=r"\fbox"))
    return float(answer is not None and is_hendrycks_equal(answer, truth))


def slime_boxed_grade(response: str, truth: str) -> float:
    """Compares the last box in MATH's normal form, then by sympy."""
    expected: str | None = truth
    if r"\boxed" in truth:
        expected = boxed_content(last_box(truth))
    answer = boxed_content(last_box(response))
    if not expected or answer is None:
        return 0.0
    return float(SLIME.is_equal(answer, expected))


def msrl_math_17k_acc(response: str, truth: str) -> float:
    """Compares the last box by MathRuler's rules."""
    answer = boxed_content(last_box(response, command=r"\boxed{"))
    return float(MATHRULER.is_equal("None" if answer is None else answer.strip(), truth))


def verl_math_dapo(response: str, truth: str) -> float:
    """Compares the last line `Answer: ...` in Minerva's normal form; 1 or -1."""
    answer = minerva_normal_form(parse_answer_line(response[-_LAST:]))
    return 1.0 if answer == minerva_normal_form(truth) else -1.0


def nemo_dapo(response: str, truth: str) -> float:
    """As `verl_math_dapo`; 1 or 0."""
    return max(0.0, verl_math_dapo(response, truth))


def slime_math_dapo(response: str, truth: str) -> float:
    """As `verl_math_dapo`, for whole numbers."""
    ends = ("<|im_end|>", "<|endoftext|>")
    answer = minerva_normal_form(parse_answer_line(response[-_LAST:]), ends=ends)
    try:
        expected = str(int(float(minerva_normal_form(truth, ends=ends))))
    except (ValueError, OverflowError):
        raise RewardError("the reference answer is not a number", found=repr(truth[:60])) from None
    return 1.0 if answer == expected else -1.0


def msrl_format(response: str, truth: str) -> float:
    """1 if a line begins the response with reasoning and an answer in their tags."""
    return float(_THINK_ANSWER.match(response) is not None)


def trl_think_format(response: str, truth: str) -> float:
    """1 if the response begins with its only reasoning in tags."""
    return float(_THINK.match(response) is not None)


def msrl_strict_format(response: str, truth: str) -> float:
    """1 if each tag and one box are there once and in order, else -0.5."""
    boxes = [match.start() for match in re.finditer(r"\\boxed\{.*?\}", response)]
    places = [response.find(tag) for tag in _TAGS[:3]] + boxes + [response.find(_TAGS[3])]
    is_right = (
        len(boxes) == 1
        and all(response.count(tag) == 1 for tag in _TAGS)
        and places == sorted(places)
        and response.startswith(_TAGS[0])
        and response.endswith(_TAGS[3])
    )
    return 1.0 if is_right else -0.5


PEERS: dict[str, PeerVerifier] = {
    "verl_gsm8k_strict": verl_gsm8k_strict,
    "skyrl_gsm8k_strict": skyrl_gsm8k_strict,
    "verl_gsm8k_flexible": verl_gsm8k_flexible,
    "skyrl_gsm8k_flexible": skyrl_gsm8k_flexible,
    "mindrlhf_accuracy": mindrlhf_accuracy,
    "verl_math_boxed": verl_math_boxed,
    "verl_prime_math": prime_math,
    "slime_boxed_grade": slime_boxed_grade,
    "msrl_math_17k_acc": msrl_math_17k_acc,
    "verl_math_dapo": verl_math_dapo,
    "msrl_acc_for_dapo": verl_math_dapo,
    "skyrl_aime": verl_math_dapo,
    "nemo_dapo": nemo_dapo,
    "slime_math_dapo": slime_math_dapo,
    "verl_math_verify": math_verify.in_box,
    "math_verify_default": math_verify.by_default,
    "trl_accuracy_gold_dollar": math_verify.box_first,
    "areal_math_verify": math_verify.as_written,
    "msrl_format": msrl_format,
    "mindrlhf_format": msrl_format,
    "trl_think_format": trl_think_format,
    "msrl_strict_format": msrl_strict_format,
}
