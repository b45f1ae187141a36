"""Reward terms by kind: each is a function of a sample.

    kind            value 1 if ...; else 0
    exact_match     the stripped response is the stripped answer
    numeric_match   the response's last number is the answer's last number, to a tolerance
    gsm8k           the number after the response's last `####` is exactly the answer's; with
                    `flexible`, its last number where it has no `####`
    math            the response's final answer is the answer, as mathematics
    choice          the letter that the response chooses is the answer's
    regex           the last match of a pattern is the answer
    format          the whole response matches a pattern; the dot matches newlines
    tags            the response is its tags, such as `<think>` and `<answer>`, each once
    json_schema     the response is JSON that a schema allows
    code            the response's program passes its unit tests
    http, judge     (the score of a service, or of a language model that is asked)
    python          (any number that the user's function returns)
    others          (of installed packages: entry points of the group flowrl.rewards)
    verl_gsm8k_strict, ...   (the score of another library's function)

`flowrl.algo.numbers` defines numbers: text that cannot be read as one number matches nothing. A
reference answer that cannot be read, if a number is needed, is a mistake in the data: rows are
refused when they are read, and here it raises `RewardError`; it is never scored 0.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Protocol, TypeAlias, cast, runtime_checkable

from flowrl.algo.numbers import after_hashes, answer_number, close, last_number
from flowrl.backend.protocols import ScoreRequest
from flowrl.entry_points import entries
from flowrl.errors import ConfigError, RewardError
from flowrl.wording import listing, one_of_them
from flowrl_backends.verify import math_verify_calls
from flowrl_backends.verify.code_tests import CodeTests
from flowrl_backends.verify.mathematics import final_answer, mathematics
from flowrl_backends.verify.options import TermOptions
from flowrl_backends.verify.peers import PEERS
from flowrl_backends.verify.remote import HttpReward, JudgeReward
from flowrl_backends.verify.shaping import PENALTIES, TRANSFORMATIONS
from flowrl_backends.verify.user_function import UserFunction

Rule: TypeAlias = Callable[[ScoreRequest], float | None]
"""Returns the value of a sample; None if the term does not apply to it."""


@runtime_checkable
class BatchRule(Protocol):
    """A rule that may be called with several samples at once."""

    batch_size: int

    def __call__(self, request: ScoreRequest) -> float | None: ...

    def score_batch(self, requests: Sequence[ScoreRequest]) -> Sequence[float | None]: ...


def open_rule(kind: object, options: TermOptions) -> Rule | BatchRule:
    """Returns the rule of a term.

    Raises:
        ConfigError: There is no such kind, or an option is wrong.
        RewardError: The user's function cannot be loaded.
    """
    opener = _OPENERS.get(str(kind)) or PENALTIES.get(str(kind))
    if opener is not None:
        return opener(options)
    if kind in PEERS:
        return _peer(str(kind), options)
    installed = [entry.name for entry in entries("flowrl.rewards")]
    if kind in installed:
        return _installed(str(kind), options)
    kinds = (*_OPENERS, *PENALTIES, *TRANSFORMATIONS, *PEERS, *installed)
    raise ConfigError(
        "no such reward term",
        where=f"{options.where}.kind",
        found=repr(kind),
        expected=f"one of {listing(kinds)}",
        hint=one_of_them(str(kind), kinds),
    )


def _installed(kind: str, options: TermOptions) -> Rule | BatchRule:
    """Returns the rule of a kind that a package adds."""
    from flowrl.config.rewards import INSTALLED_TERMS  # pydantic, which scorers else do without

    return INSTALLED_TERMS.find(kind).model_validate(options.values).open()


def _exact_match(options: TermOptions) -> Rule:
    return lambda request: float(request.response.strip() == request.answer.strip())


def _numeric_match(options: TermOptions) -> Rule:
    tolerance = options.number("tolerance", 1e-6)

    def score(request: ScoreRequest) -> float:
        answer = _answer_number(request)
        value = last_number(request.response)
        return float(value is not None and close(value, answer, tolerance))

    return score


def _gsm8k(options: TermOptions) -> Rule:
    flexible = options.truth("flexible", False)

    def score(request: ScoreRequest) -> float:
        answer = _answer_number(request)
        if flexible and "####" not in request.response:
            return float(last_number(request.response) == answer)
        return float(after_hashes(request.response) == answer)

    return score


def _answer_number(request: ScoreRequest) -> Fraction:
    number = answer_number(request.answer)
    if number is None:
        raise RewardError(
            "the reference answer cannot be read as one number",
            where=f"sample {request.sample}",
            found=repr(request.answer[-60:]),
            hint="set data.answer to the field with the answer, or use exact_match",
        )
    return number


def _math(options: TermOptions) -> Rule:
    # Imports and compiles what the first sample would otherwise wait for.
    with math_verify_calls.required(f"{options.where}.kind"):
        mathematics(r"\boxed{\sqrt{2}}", r"\sqrt{3}")
    return lambda request: mathematics(request.response, request.answer)


def _peer(name: str, options: TermOptions) -> Rule:
    verifier = PEERS[name]
    # Imports and compiles what the first sample would otherwise wait for.
    with math_verify_calls.required(f"{options.where}.kind"):
        verifier(r"\boxed{\sqrt{2}}", "3")
    return lambda request: verifier(request.response, request.answer)


def _choice(options: TermOptions) -> Rule:
    letters = options.text("letters", "ABCDEFGHIJ")
    one = f"[{re.escape(letters)}{re.escape(letters.lower())}]"
    # `(C)`, `C.`, `C) the cat`, and not the article or the pronoun.
    alone = re.compile(rf"^\W*({one})(?:\W*$|[).:])")
    last = re.compile(rf"(?<![\w'])({one.upper()})(?=[).:,]|\s*$)")

    def chosen(text: str) -> str | None:
        answer = final_answer(text) or ""
        answer = re.sub(r"\\(?:text|mathrm|textbf|mbox)\s*|[{}$]", "", answer)
        first = alone.match(answer)
        found = [first] if first else list(last.finditer(answer)) or list(last.finditer(text))
        return found[-1][1].upper() if found else None

    def score(request: ScoreRequest) -> float:
        right = chosen(request.answer)
        if right is None:
            raise RewardError(
                "the reference answer is not a choice",
                where=f"sample {request.sample}",
                found=repr(request.answer[-60:]),
                expected=f"one of the letters {letters}",
            )
        return float(chosen(request.response) == right)

    return score


def _pattern(options: TermOptions) -> re.Pattern[str]:
    pattern = options.text("pattern")
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as reason:
        raise ConfigError(
            f"the pattern is not a regular expression: {reason}",
            where=f"{options.where}.pattern",
            found=repr(pattern),
        ) from None


def _format(options: TermOptions) -> Rule:
    pattern = _pattern(options)
    return lambda request: float(pattern.fullmatch(request.response) is not None)


def _regex(options: TermOptions) -> Rule:
    pattern = _pattern(options)

    def score(request: ScoreRequest) -> float:
        found = [
            match[min(1, pattern.groups)] or "" for match in pattern.finditer(request.response)
        ]
        return float(bool(found) and found[-1].strip() == request.answer.strip())

    return score


def _tags(options: TermOptions) -> Rule:
    names = options.texts("tags", ("think", "answer"))
    pattern = re.compile(
        r"\s*" + r"\s*".join(f"<{re.escape(n)}>.*?</{re.escape(n)}>" for n in names) + r"\s*",
        re.DOTALL,
    )
    tags = [tag for name in names for tag in (f"<{name}>", f"</{name}>")]

    def score(request: ScoreRequest) -> float:
        once = all(request.response.count(tag) == 1 for tag in tags)
        return float(once and pattern.fullmatch(request.response) is not None)

    return score


_BLOCK = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)


def _json_schema(options: TermOptions) -> Rule:
    is_allowed: Callable[[object], bool] = lambda value: True  # noqa: E731
    file = options.text("schema_file", "")
    if file:
        is_allowed = _schema(Path(file), f"{options.where}.schema_file")

    def score(request: ScoreRequest) -> float:
        blocks = _BLOCK.findall(request.response)
        try:
            return float(is_allowed(json.loads(blocks[-1] if blocks else request.response)))
        except (ValueError, RecursionError):
            return 0.0

    return score


class _Schema(Protocol):
    def is_valid(self, value: object) -> bool: ...


def _schema(path: Path, where: str) -> Callable[[object], bool]:
    try:
        import jsonschema
    except ImportError as reason:
        raise ConfigError(
            f"this reward needs jsonschema: {reason}",
            where=where,
            hint="pip install 'flowrl[math]'",
        ) from None
    try:
        schema = json.loads(path.read_text(encoding="utf-8"))
        validator = jsonschema.validators.validator_for(schema)
        validator.check_schema(schema)
    except (OSError, ValueError, jsonschema.SchemaError) as reason:
        raise ConfigError(
            f"the file is not a JSON schema: {str(reason).splitlines()[0]}",
            where=where,
            found=str(path),
        ) from None
    return cast(_Schema, validator(schema)).is_valid


def _python(options: TermOptions) -> BatchRule:
    return UserFunction(
        options.text("function"),
        where=f"{options.where}.function",
        chat=options.truth_or_none("chat"),
    )


_OPENERS: dict[str, Callable[[TermOptions], Rule | BatchRule]] = {
    "exact_match": _exact_match,
    "numeric_match": _numeric_match,
    "gsm8k": _gsm8k,
    "math": _math,
    "choice": _choice,
    "regex": _regex,
    "format": _format,
    "tags": _tags,
    "json_schema": _json_schema,
    "code": CodeTests,
    "http": HttpReward,
    "judge": JudgeReward,
    "python": _python,
}
