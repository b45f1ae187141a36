"""Maps and reward shaping by name: functions of a batch's fields that give further fields.

    @fl.map(reads=("score", "response_mask"), gives="score", per_sample=True)
    def per_token(batch, *, scale=1.0):
        return scale * batch["score"] / np.maximum(batch.lengths, 1)

A map reads fields of its arguments by *key*: the field's name for the first argument that has it,
the name with `_2` for the second one, and so on (`score`, `score_2`). Of samples it may read what
the driver knows of them too: `text`, `prompt_text`, and `row.NAME` for a field of the data row. It
gives fields of its own: `score`, `advantage`, `logprobs` and `token_reward` are read by other
operations, anything else goes to logs and, as `extra=`, to own losses. Reward shaping is
a map from scores to scores: penalties are added to the score, the others replace it. The operations
of `fl.shaping` are made of these classes: a field is an argument, and documented here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Self, TypeAlias

from flowrl.specs.base import (
    USER_OPTIONS,
    Count,
    Finite,
    Range,
    Spec,
    Wrong,
    format_list,
    list_of,
    option,
)
from flowrl.specs.user_functions import Options
from flowrl.user_lines import trace_error
from flowrl.wording import suggestion

Gives: TypeAlias = tuple[str, str, str]
"""The name, dtype and unit of a field: `("score", "float32", "samples")`."""

UNITS = ("samples", "tokens")
"""The units of a map's fields: one number a sample, or one a token."""

DTYPES = ("float32", "int64", "bool")

HELD_TEXTS = ("text", "prompt_text")
"""Keys of texts of a sample: the response as rewards read it, and the prompt."""

ROW_PREFIX = "row."
"""Keys of fields of a sample's data row begin with this; `row.meta.topic` is a field in another."""

_KNOWN: dict[str, tuple[Gives, ...]] = {
    "score": (("score", "float32", "samples"),),
    "advantage": (("advantage", "float32", "samples"), ("advantage", "float32", "tokens")),
    "logprobs": (("logprobs", "float32", "tokens"),),
    "token_reward": (("token_reward", "float32", "tokens"),),
}
"""The forms of fields that operations read; a map declares the first one by the name alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MapSpec(Spec):
    """The base of maps. By default, a map reads and gives scores."""

    family: ClassVar[str] = "map"
    _reads: ClassVar[tuple[str, ...]] = ("score",)
    _gives: ClassVar[tuple[Gives, ...]] = _KNOWN["score"]
    _per_sample: ClassVar[bool] = False

    @property
    def reads(self) -> tuple[str, ...]:
        """The keys of the fields that the map reads."""
        return self._reads

    @property
    def gives(self) -> tuple[Gives, ...]:
        """The name, dtype and unit of each field that the map gives."""
        return self._gives

    @property
    def per_sample(self) -> bool:
        """True if the map's result for a sample depends on that sample alone.

        Such a map may precede a filter that judges each group as soon as it is scored.
        """
        return self._per_sample


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedSum(MapSpec):
    """The weighted sum of several scores.

    Attributes:
        weights: The weights of the scores in the order of arguments, comma-separated.
    """

    kind: ClassVar[str] = "weighted_sum"
    _per_sample: ClassVar[bool] = True

    weights: str

    @classmethod
    def of(cls, weights: Iterable[float]) -> Self:
        """Returns the sum with these weights."""
        return cls(weights=format_list([float(weight) for weight in weights]))

    @property
    def factors(self) -> tuple[float, ...]:
        """The weights as numbers."""
        return tuple(float(weight) for weight in list_of(self.weights))

    @property
    def reads(self) -> tuple[str, ...]:
        """The keys `score`, `score_2`, ..., one for each weight."""
        return tuple(_key("score", place) for place in range(len(self.factors)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Parse(MapSpec):
    """The number that an expression finds in a response as `score`, and as `parsed` if it does.

    Without `otherwise`, the score is NaN where it finds none, which only the selection `parsed`
    reads.
    """

    kind: ClassVar[str] = "parse"
    _reads: ClassVar[tuple[str, ...]] = ("text",)
    _gives: ClassVar[tuple[Gives, ...]] = (*_KNOWN["score"], ("parsed", "bool", "samples"))
    _per_sample: ClassVar[bool] = True

    regex: str
    otherwise: Finite | None = None

    def conflicts(self) -> Iterator[Wrong]:
        """Yields an expression that cannot be read, or that matches the empty text."""
        import regex  # here: only programs that parse need it

        try:
            pattern = regex.compile(self.regex)
        except (regex.error, RecursionError, OverflowError, ValueError) as error:
            yield "regex", self.regex, f"a regular expression ({error})"
            return
        if pattern.search("") is not None:
            yield "regex", self.regex, "an expression that does not match the empty text"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstWins(MapSpec):
    """1 for the verdict 1 (the first response of a pair wins), 0 for 2, 1/2 for others: ties."""

    kind: ClassVar[str] = "first_wins"
    _per_sample: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class WinRate(MapSpec):
    """The share of comparisons that a sample wins against others of its group.

    Attributes:
        opponents: For each score that the map reads, comma-separated: how many places further in
            the group the second sample of a pair is.
    """

    kind: ClassVar[str] = "win_rate"

    opponents: str

    @classmethod
    def of(cls, opponents: Iterable[int]) -> Self:
        """Returns the rate of these comparisons."""
        return cls(opponents=format_list([str(number) for number in opponents]))

    @property
    def places(self) -> tuple[int, ...]:
        """The opponents as numbers."""
        return tuple(int(number) for number in list_of(self.opponents))

    @property
    def reads(self) -> tuple[str, ...]:
        """The keys `score`, `score_2`, ..., one for each opponent."""
        return tuple(_key("score", place) for place in range(len(list_of(self.opponents))))

    def conflicts(self) -> Iterator[Wrong]:
        """Yields opponents that are no numbers from 1 up."""
        numbers = list_of(self.opponents)
        if not numbers or not all(n.isdecimal() and int(n) > 0 for n in numbers):
            yield "opponents", self.opponents, "whole numbers from 1 up, comma-separated"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnMap(MapSpec):
    """A map that a function of the user's own computes.

    Attributes:
        function: The reference to the function.
        keys: The keys of the fields that it reads, comma-separated.
        fields: The fields that it gives, comma-separated, each as `name: dtype/unit`.
        alone: True if its result for a sample depends on that sample alone.
        options: All options of the function.
    """

    kind: ClassVar[str] = "own"

    function: str
    keys: str
    fields: str = "score: float32/samples"
    alone: bool = option(False)
    options: Options = field(default=(), metadata=USER_OPTIONS)

    @property
    def reads(self) -> tuple[str, ...]:
        """The declared keys."""
        return list_of(self.keys)

    @property
    def gives(self) -> tuple[Gives, ...]:
        """The declared fields."""
        return tuple(_field(text) for text in list_of(self.fields))

    @property
    def per_sample(self) -> bool:
        """True if the function declares `per_sample`."""
        return self.alone


def declared_fields(reads: str | Iterable[str], gives: str | Iterable[str]) -> dict[str, str]:
    """Returns the fields `keys` and `fields` of an `OwnMap` from the declarations of its function.

    Raises:
        TraceError: A key or a field cannot be, or there is none.
    """
    keys = (reads,) if isinstance(reads, str) else tuple(dict.fromkeys(reads))
    texts = (gives,) if isinstance(gives, str) else tuple(gives)
    if not keys or not texts:
        raise trace_error("a map needs at least one field in reads= and gives=")
    _check_keys(keys)
    given = [_field(text) for text in texts]
    _check_given(given)
    return {"keys": format_list(keys), "fields": format_list(map(_format_field, given))}


_FIELD = re.compile(r"(?P<name>[A-Za-z_]\w*)\s*(?::\s*(?P<dtype>\w+)\s*)?/\s*(?P<unit>\w+)")


def _field(text: str) -> Gives:
    """Reads a field from `name`, `name/unit` or `name: dtype/unit`."""
    if text in _KNOWN:
        return _KNOWN[text][0]
    match = _FIELD.fullmatch(text.strip())
    if match is None:
        raise trace_error(
            f"{text!r} has no unit",
            expected=", ".join(_KNOWN) + f", or name/unit with {' or '.join(UNITS)}",
            hint=f'write "{text}/samples" or "{text}/tokens"' if text.isidentifier() else None,
        )
    name, dtype, unit = match["name"], match["dtype"] or "float32", match["unit"]
    for value, allowed, what in ((dtype, DTYPES, "dtype"), (unit, UNITS, "unit")):
        if value not in allowed:
            raise trace_error(
                f"a map cannot give the {what} {value!r}",
                found=text,
                expected=", ".join(allowed),
                hint=suggestion(value, allowed),
            )
    return name, dtype, unit


_ROW_KEY = re.compile(r"row(\.-?\w+)+")


def _check_keys(keys: Sequence[str]) -> None:
    for key in keys:
        if not isinstance(key, str) or not (key.isidentifier() or _ROW_KEY.fullmatch(key)):
            raise trace_error(
                f"{key!r} is not the key of a field",
                hint="a field of the data row is row.NAME, one inside another row.NAME.NAME",
            )
        name, place = split_key(key)
        # Edges carry only the fields that are read, so keys without a gap identify arguments.
        if place > 0 and _key(name, place - 1) not in keys:
            raise trace_error(
                f"a map reads {key!r}, but not {_key(name, place - 1)!r}",
                found=", ".join(keys),
                hint=f"{name!r} is the field of the first argument that has it, '{name}_2' of the "
                "second",
            )


def _check_given(given: Sequence[Gives]) -> None:
    names = [name for name, _, _ in given]
    for each in given:
        name, dtype, unit = each
        if names.count(name) > 1:
            raise trace_error(f"a map gives {name!r} twice")
        if name in HELD_TEXTS:
            raise trace_error(
                f"a map cannot give {name!r}: a map gives numbers, and samples keep their texts",
                hint="choose another name",
            )
        known = _KNOWN.get(name, (each,))
        if each not in known:
            raise trace_error(
                f"a map cannot give {name!r} as {dtype}/{unit}: operations read it by this name",
                expected=" or ".join(map(_format_field, known)),
                hint="choose another name",
            )


def _format_field(field: Gives) -> str:
    name, dtype, unit = field
    return f"{name}: {dtype}/{unit}"


def _key(name: str, place: int) -> str:
    return name if place == 0 else f"{name}_{place + 1}"


def split_key(key: str) -> tuple[str, int]:
    """Returns the field of a key, and the index of its argument among those that have the field.

    A row's field has no number: all samples that meet in a map answer the same prompts.

    >>> split_key("score_2"), split_key("response_mask"), split_key("row.level_2")
    (('score', 1), ('response_mask', 0), ('row.level_2', 0))
    """
    if key.startswith(ROW_PREFIX):
        return key, 0
    name, _, number = key.rpartition("_")
    return (name, int(number) - 1) if name and number.isdigit() and int(number) > 1 else (key, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapingSpec(MapSpec):
    """The base of reward shaping, which reads scores and lengths of responses and gives scores."""

    _reads: ClassVar[tuple[str, ...]] = ("score", "response_mask")
    _per_sample: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftOverlong(ShapingSpec):
    """Takes off a penalty that grows over the last `buffer` tokens before `max_tokens`: DAPO.

    Attributes:
        max_tokens: The length at which the penalty is `factor`.
        buffer: Tokens over which it grows; 0 takes all off at once, beyond `max_tokens`.
        factor: The penalty at `max_tokens`.
        cap: True if it stays at `factor` beyond `max_tokens`, as in the paper; else it grows on.
    """

    kind: ClassVar[str] = "soft_overlong"

    max_tokens: Count
    buffer: Annotated[int, Range(low=0.0, at_most="max_tokens")]
    factor: Finite = 1.0
    cap: bool = option(True)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopProperly(ShapingSpec):
    """Multiplies the score of truncated responses; below 0, the coefficient is their score."""

    kind: ClassVar[str] = "stop_properly"

    coefficient: Finite = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CosineLength(ShapingSpec):
    """Replaces scores by half a cosine of the length: falling from right, rising from wrong.

    Attributes:
        max_tokens: Length at which the cosine ends.
        wrong_short: Score of a wrong response of no tokens; the other bounds follow the same
            scheme.
        correct_above: A response is right where its score is above this.
    """

    kind: ClassVar[str] = "cosine_length"

    max_tokens: Count
    wrong_short: Finite = -1.0
    wrong_long: Finite = -0.5
    correct_long: Finite = 0.5
    correct_short: Finite = 1.0
    correct_above: Finite = option(0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition(ShapingSpec):
    """Adds `max_penalty` times the share of token n-grams that occurred before in the response.

    Attributes:
        ngram: Length of an n-gram.
        max_penalty: At most 0.
    """

    kind: ClassVar[str] = "repetition"
    _reads: ClassVar[tuple[str, ...]] = ("score", "tokens", "response_mask")

    ngram: Count = 3
    max_penalty: Annotated[float, Range(high=0.0)] = -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ImplicitReward(MapSpec):
    """`beta` times the log-ratio of a policy to a reference, as the reward of each token: PRIME."""

    kind: ClassVar[str] = "implicit_reward"
    _reads: ClassVar[tuple[str, ...]] = ("logprobs", "logprobs_2")
    _gives: ClassVar[tuple[Gives, ...]] = _KNOWN["token_reward"]
    _per_sample: ClassVar[bool] = True

    beta: Finite = 0.05
