"""Maps and reward shaping: functions of a batch's fields that give further fields. numpy only.

The shaping functions (`soft_overlong`, `stop_properly`, `cosine_length`, `repetition`) work on
arrays of N responses, their lengths in response tokens, and return float64 `[N]`; those whose names
end in `_map` apply them to a batch. A penalty is at most 0 and is added to a score; `stop_properly`
and `cosine_length` return the score.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from flowrl.errors import DataError, RewardError
from flowrl.specs.maps import (
    CosineLength,
    FirstWins,
    ImplicitReward,
    Parse,
    Repetition,
    SoftOverlong,
    StopProperly,
    WeightedSum,
    WinRate,
)
from flowrl.wording import suggestion

_log = logging.getLogger(__name__)

Array: TypeAlias = npt.NDArray[Any]

Floats: TypeAlias = npt.NDArray[np.float64]

MapResult: TypeAlias = Mapping[str, Array]
"""Fields by name, `[N]` or `[T]` by their unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MapBatch:
    """The input of a map: N samples with T tokens in total, concatenated.

        def brief(batch, *, scale=0.01):
            return batch["score"] - scale * batch.lengths
        def surprise(batch):                                   # [T] to [N]
            return -batch.sums(batch["rollout_logprobs"])
        def in_french(batch, *, bonus=0.1):                    # texts and rows: arrays of objects
            said = np.array(["oui" in text for text in batch["text"]])
            return batch["score"] + bonus * (said & (batch["row.language"] == "fr"))

    Attributes:
        fields: Arrays by key, `[N]` for fields of samples and `[T]` for fields of tokens; an own
            map gets those that it declares. `flowrl.specs.maps` defines keys. `text`,
            `prompt_text` and `row.NAME` are arrays of Python objects: texts, and whatever the data
            row has in its field.
        groups: int64 `[N]`; samples with equal numbers answer the same prompt.
        offsets: int64 `[N + 1]`; the tokens of sample i are `offsets[i]:offsets[i + 1]`, its prompt
            first.
        lengths: int64 `[N]`, the number of response tokens.
        truncated: bool `[N]`, true for responses truncated at `max_tokens`, and false for samples
            that no role generated.
    """

    fields: Mapping[str, Array]
    groups: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    truncated: npt.NDArray[np.bool_]

    def __getitem__(self, key: str) -> Array:
        if key not in self.fields:
            near = suggestion(key, self.fields)
            raise DataError(
                f"the map reads no field '{key}'",
                expected=", ".join(self.fields) or "no fields",
                hint=f"add it to reads=, or {near}" if near else "add it to reads=",
            )
        return self.fields[key]

    def sums(self, values: npt.ArrayLike) -> Floats:
        """Returns `[N]` from `[T]`: the sum over each sample's tokens."""
        # Separate sums: differences of a running sum would carry NaN from one sample to the next.
        sample = np.repeat(np.arange(len(self.groups)), np.diff(self.offsets))
        weights = np.asarray(values, np.float64)
        return np.bincount(sample, weights, len(self.groups)).astype(np.float64)

    def spread(self, values: npt.ArrayLike) -> Array:
        """Returns `[T]` from `[N]`: each sample's value at all of its tokens."""
        return np.repeat(np.asarray(values), np.diff(self.offsets))

    def part(self, samples: npt.NDArray[np.int64]) -> MapBatch:
        """Returns the batch of the samples with these indices, in that order."""
        lengths = np.diff(self.offsets)
        tokens = np.concatenate(
            [np.zeros(0, np.int64), *(np.arange(*self.offsets[i : i + 2]) for i in samples)]
        )
        # A sample has at least one token, so N and T are equal only if both index arrays are.
        chosen = {int(self.offsets[-1]): tokens, len(self.groups): samples}
        return MapBatch(
            fields={key: values[chosen[len(values)]] for key, values in self.fields.items()},
            groups=self.groups[samples],
            offsets=np.concatenate([[0], np.cumsum(lengths[samples])]).astype(np.int64),
            lengths=self.lengths[samples],
            truncated=self.truncated[samples],
        )


def weighted_sum(batch: MapBatch, spec: WeightedSum) -> MapResult:
    """Computes score = sum over k of weight_k score_k."""
    parts = [w * _floats(batch, key) for w, key in zip(spec.factors, spec.reads, strict=True)]
    return _scores(np.sum(parts, axis=0))


def implicit_reward(batch: MapBatch, spec: ImplicitReward) -> MapResult:
    """Computes beta (logprob - reference logprob) at each token (Cui et al., arXiv 2502.01456,
    equation 3)."""
    gap = np.asarray(batch["logprobs"], np.float64) - np.asarray(batch["logprobs_2"], np.float64)
    return {"token_reward": (spec.beta * gap).astype(np.float32)}


PARSE_LIMIT_S = 1.0
"""Seconds that the search in one response may take: some expressions take years on some texts."""


_LARGEST = float(np.finfo(np.float32).max)


def parse(batch: MapBatch, spec: Parse) -> MapResult:
    """Finds the number that each response states: the first group of the expression's last match.

    Where the expression has no group, the whole match is the number. It is a number if Python's
    `float` reads it and float32 holds it. A search that takes longer than `PARSE_LIMIT_S` finds
    nothing, and a warning says so.
    """
    import regex

    pattern = regex.compile(spec.regex)
    group = min(1, pattern.groups)
    otherwise = math.nan if spec.otherwise is None else spec.otherwise
    numbers = np.full(len(batch.groups), np.nan, np.float32)
    slow = 0
    for row, text in enumerate(batch["text"]):
        try:
            matches = list(pattern.finditer(text, timeout=PARSE_LIMIT_S))
            numbers[row] = _number(matches[-1][group]) if matches else math.nan
        except TimeoutError:
            slow += 1
    if slow:
        _log.warning(
            "the search of %d of %d responses for %r took longer than %g s each and was given up, "
            "as if they had no number; an expression with fewer nested repetitions is faster",
            *(slow, len(numbers), spec.regex, PARSE_LIMIT_S),
        )
    stated = np.isfinite(numbers)
    return {"score": np.where(stated, numbers, np.float32(otherwise)), "parsed": stated}


def _number(text: str | None) -> np.float32:
    """Returns a number as float32; NaN for text that is none, and for one that is too large."""
    try:
        number = float(text or "")
    except ValueError:
        return np.float32(math.nan)
    return np.float32(number if abs(number) <= _LARGEST else math.nan)


def first_wins(batch: MapBatch, spec: FirstWins) -> MapResult:
    """Computes 1 for the verdict 1, 0 for the verdict 2 and 1/2 for every other number."""
    verdict = _floats(batch, "score")
    return _scores(np.where(verdict == 1, 1.0, np.where(verdict == 2, 0.0, 0.5)))


def win_rate(batch: MapBatch, spec: WinRate) -> MapResult:
    """Computes the share of comparisons that each sample wins within its group::

        score(i) = mean over opponents k of (V_k(i) + 1 - V_k(i - k)) / 2

    V_k(i) is the share that sample i wins against the sample k places further in its group, the
    first one following the last: `score`, `score_2`, ... for the opponents in order. Where k is a
    multiple of the group's size, a sample met itself, and the score of that comparison is 1/2.
    """
    won = np.zeros(len(batch.groups), np.float64)
    for rows in (np.flatnonzero(batch.groups == group) for group in np.unique(batch.groups)):
        for k, key in zip(spec.places, spec.reads, strict=True):
            first = _floats(batch, key)[rows]
            won[rows] += (first + 1.0 - np.roll(first, k)) / 2.0
    return _scores(won / len(spec.places))


def soft_overlong_map(batch: MapBatch, spec: SoftOverlong) -> MapResult:
    """Adds `soft_overlong` of the response's length to the score."""
    return _scores(_floats(batch, "score") + soft_overlong(batch.lengths, spec))


def stop_properly_map(batch: MapBatch, spec: StopProperly) -> MapResult:
    """Applies `stop_properly` to the score."""
    return _scores(stop_properly(_floats(batch, "score"), batch.truncated, spec))


def cosine_length_map(batch: MapBatch, spec: CosineLength) -> MapResult:
    """Replaces the score by `cosine_length`; scores above `correct_above` are correct."""
    correct = _floats(batch, "score") > spec.correct_above
    return _scores(cosine_length(batch.lengths, correct, spec))


def repetition_map(batch: MapBatch, spec: Repetition) -> MapResult:
    """Adds `repetition` of the response's token ids to the score."""
    tokens, mask = batch["tokens"], np.asarray(batch["response_mask"], np.bool_)
    spans = [slice(a, b) for a, b in pairwise(batch.offsets)]
    responses = [tokens[span][mask[span]].tolist() for span in spans]
    return _scores(_floats(batch, "score") + repetition(responses, spec))


def _floats(batch: MapBatch, key: str) -> Floats:
    return np.asarray(batch[key], np.float64)


def _scores(values: Floats) -> MapResult:
    if not np.isfinite(values).all():
        row = int(np.flatnonzero(~np.isfinite(values))[0])
        raise RewardError("a score is not finite", where=f"sample {row}", found=str(values[row]))
    return {"score": values.astype(np.float32)}


def soft_overlong(lengths: npt.ArrayLike, spec: SoftOverlong) -> Floats:
    """Computes the length penalty of DAPO (Yu et al., 2025, equation 13), times `factor`::

        0                                   L <= max - buffer
        factor (max - buffer - L) / buffer  L <= max
        -factor                             beyond; with `cap=False`, the second line

    With `buffer=0`, the penalty is -factor for L > max and else 0.
    """
    length = np.asarray(lengths, np.float64)
    if spec.buffer < 0:
        raise ValueError(f"buffer must be at least 0, not {spec.buffer}")
    if spec.buffer == 0:
        return np.where(length > spec.max_tokens, -spec.factor, 0.0)
    over = np.maximum(length - (spec.max_tokens - spec.buffer), 0.0) / spec.buffer
    if spec.cap:
        over = np.minimum(over, 1.0)
    # No -0 for responses within bounds.
    return np.where(over > 0, -spec.factor * over, 0.0)


def stop_properly(scores: npt.ArrayLike, truncated: npt.ArrayLike, spec: StopProperly) -> Floats:
    """Multiplies scores of truncated responses by the coefficient, or replaces them if it is < 0.

    A negative factor would turn a wrong answer's penalty into a reward, so a negative coefficient
    is not used as a factor (as in OpenRLHF).
    """
    r, cut = np.asarray(scores, np.float64), np.asarray(truncated, np.bool_)
    return np.where(cut, r * spec.coefficient if spec.coefficient >= 0 else spec.coefficient, r)


def cosine_length(lengths: npt.ArrayLike, correct: npt.ArrayLike, spec: CosineLength) -> Floats:
    """Computes the cosine reward of a response's length L::

        p     = min(L / max_tokens, 1)
        score = long + (short - long) (1 + cos(pi p)) / 2

    with short and long of correct or of wrong responses: correct answers score highest if short,
    wrong ones if long (Yeo et al., "Demystifying Long Chain-of-Thought Reasoning", 2025).
    """
    right = np.asarray(correct, np.bool_)
    progress = np.minimum(np.asarray(lengths, np.float64) / spec.max_tokens, 1.0)
    short = np.where(right, spec.correct_short, spec.wrong_short)
    long = np.where(right, spec.correct_long, spec.wrong_long)
    return np.asarray(long + 0.5 * (short - long) * (1.0 + np.cos(np.pi * progress)), np.float64)


def repetition(sequences: Iterable[Sequence[Hashable]], spec: Repetition) -> Floats:
    """Computes (1 - different n-grams / n-grams) * max_penalty (Yeo et al., 2025).

    It is 0 for fewer than n items. Responses are token ids or `words`.
    """
    shares = []
    for sequence in sequences:
        ngrams = list(zip(*(sequence[i:] for i in range(spec.ngram)), strict=False))
        shares.append(1.0 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0)
    return np.array(shares) * spec.max_penalty + 0.0


def words(text: str) -> list[str]:
    """Returns the words of a text for `repetition`: split at white space, in lower case."""
    return text.lower().split()
