"""Maps: functions of a batch's fields that give further fields. numpy only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from flowrl.algo import shaping
from flowrl.algo.user_function import UserFunction, shape_of
from flowrl.errors import DataError, RewardError
from flowrl.specs.function import nearest_hint
from flowrl.specs.maps import Gives, MapSpec, OwnMap, WeightedSum
from flowrl.specs.shaping import CosineLength, Repetition, SoftOverlong, StopProperly

__all__ = [
    "Array",
    "MapBatch",
    "MapResult",
    "check_alone",
    "cosine_length",
    "own",
    "repetition",
    "soft_overlong",
    "stop_properly",
    "weighted_sum",
]

Array: TypeAlias = npt.NDArray[Any]

MapResult: TypeAlias = Mapping[str, Array]
"""Fields by name, `[N]` or `[T]` by their unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MapBatch:
    """What a map reads: N samples of T tokens, end to end.

        def brief(batch, *, scale=0.01):
            return batch["score"] - scale * batch.lengths
        def surprise(batch):                                   # [T] to [N]
            return -batch.sums(batch["rollout_logprobs"])

    Attributes:
        fields: Arrays by key, `[N]` for fields of samples and `[T]` for fields of tokens; of an own
            map, those that it declares. `flowrl.specs.maps` says what a key is.
        groups: int64 `[N]`; samples with equal numbers answer the same prompt.
        offsets: int64 `[N + 1]`; tokens of sample i are `offsets[i]:offsets[i + 1]`, its prompt
            first.
        lengths: int64 `[N]`, response tokens.
        truncated: bool `[N]`, whether the response was cut off at its greatest length; None where
            nobody knows.
    """

    fields: Mapping[str, Array]
    groups: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    truncated: npt.NDArray[np.bool_] | None = None

    def __getitem__(self, key: str) -> Array:
        if key not in self.fields:
            near = nearest_hint(key, self.fields)
            raise DataError(
                f"the map reads no field '{key}'",
                expected=", ".join(self.fields) or "no fields",
                hint=f"name it in reads=, or {near}" if near else "name it in reads=",
            )
        return self.fields[key]

    def sums(self, values: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """`[N]` from `[T]`: the sum over each sample's tokens."""
        # Each by itself: differences of a running sum would carry NaN from one sample to the next.
        sample = np.repeat(np.arange(len(self.groups)), np.diff(self.offsets))
        weights = np.asarray(values, np.float64)
        return np.bincount(sample, weights, len(self.groups)).astype(np.float64)

    def spread(self, values: npt.ArrayLike) -> Array:
        """`[T]` from `[N]`: each sample's number at all of its tokens."""
        return np.repeat(np.asarray(values), np.diff(self.offsets))

    def part(self, samples: npt.NDArray[np.int64]) -> MapBatch:
        """The batch of some of its samples, by their places, in that order."""
        lengths = np.diff(self.offsets)
        tokens = np.concatenate(
            [np.zeros(0, np.int64), *(np.arange(*self.offsets[i : i + 2]) for i in samples)]
        )
        # A sample has at least one token, so that N and T are equal only where places are too.
        chosen = {int(self.offsets[-1]): tokens, len(self.groups): samples}
        return MapBatch(
            fields={key: values[chosen[len(values)]] for key, values in self.fields.items()},
            groups=self.groups[samples],
            offsets=np.concatenate([[0], np.cumsum(lengths[samples])]).astype(np.int64),
            lengths=self.lengths[samples],
            truncated=None if self.truncated is None else self.truncated[samples],
        )


def weighted_sum(batch: MapBatch, spec: MapSpec) -> MapResult:
    """score = sum over k of weight_k score_k."""
    assert isinstance(spec, WeightedSum)
    parts = [w * _floats(batch, key) for w, key in zip(spec.factors, spec.reads, strict=True)]
    return _scores(np.sum(parts, axis=0))


def soft_overlong(batch: MapBatch, spec: MapSpec) -> MapResult:
    """The score plus `flowrl.algo.shaping.soft_overlong` of the response's length."""
    assert isinstance(spec, SoftOverlong)
    return _scores(_floats(batch, "score") + shaping.soft_overlong(batch.lengths, spec))


def stop_properly(batch: MapBatch, spec: MapSpec) -> MapResult:
    """`flowrl.algo.shaping.stop_properly` of the score.

    Raises:
        DataError: nobody knows which responses were cut off.
    """
    assert isinstance(spec, StopProperly)
    if batch.truncated is None:
        raise DataError("stop_properly must know which responses were cut off, and nobody does")
    return _scores(shaping.stop_properly(_floats(batch, "score"), batch.truncated, spec))


def cosine_length(batch: MapBatch, spec: MapSpec) -> MapResult:
    """`flowrl.algo.shaping.cosine_length`; correct is what scores above `correct_above`."""
    assert isinstance(spec, CosineLength)
    correct = _floats(batch, "score") > spec.correct_above
    return _scores(shaping.cosine_length(batch.lengths, correct, spec))


def repetition(batch: MapBatch, spec: MapSpec) -> MapResult:
    """The score plus `flowrl.algo.shaping.repetition` of the response's token ids."""
    assert isinstance(spec, Repetition)
    tokens, mask = batch["tokens"], np.asarray(batch["response_mask"], np.bool_)
    spans = [slice(a, b) for a, b in pairwise(batch.offsets)]
    responses = [tokens[span][mask[span]].tolist() for span in spans]
    return _scores(_floats(batch, "score") + shaping.repetition(responses, spec))


def own(batch: MapBatch, spec: MapSpec) -> MapResult:
    """What the user's function gives, checked.

    It is called with a batch of the fields that it declares. It returns an array where it gives one
    field, or a mapping from names to arrays.

    Raises:
        TraceError: it raises, or does not give what it declares; the message names its line.
    """
    assert isinstance(spec, OwnMap)
    function = UserFunction.load("map", spec.function, spec.options, spec.reads)
    found = function(batch)
    if not isinstance(found, Mapping):
        found = {spec.gives[0][0]: found}
    names = [name for name, _, _ in spec.gives]
    if set(found) != set(names):
        raise function.refuse(
            "does not give the fields that it declares",
            found=", ".join(map(str, found)) or "nothing",
            expected=", ".join(names),
            hint="return a mapping from each name to its array" if len(names) > 1 else None,
        )
    return {field[0]: _checked(function, found[field[0]], field, batch) for field in spec.gives}


def check_alone(batch: MapBatch, spec: OwnMap, given: MapResult) -> None:
    """Compares what a map gave with what it gives the first half of the samples by themselves.

    Raises:
        TraceError: other numbers, though it says `per_sample`; with the function's line.
    """
    half = np.arange((len(batch.groups) + 1) // 2)
    alone = own(batch.part(half), spec)
    for name, _, unit in spec.gives:
        end = len(half) if unit == "samples" else int(batch.offsets[len(half)])
        whole, part = given[name][:end], alone[name]
        same = np.isclose(whole.astype(np.float64), part.astype(np.float64), rtol=1e-4, atol=1e-6)
        if not same.all():
            place = int(np.flatnonzero(~same)[0])
            function = UserFunction.load("map", spec.function, spec.options, spec.reads)
            raise function.refuse(
                "says per_sample=True, but what it gives of a sample depends on the others of its "
                "batch, or on chance",
                found=f"'{name}' of {unit[:-1]} {place} is {whole[place]:.6g} among "
                f"{len(batch.groups)} samples, {part[place]:.6g} among {len(half)}",
                expected="numbers of a sample that depend on that sample alone",
                hint="leave per_sample out; flowrl.testing.check_map tries it without a run",
            )


def _checked(function: UserFunction, found: object, field: Gives, batch: MapBatch) -> Array:
    name, dtype, unit = field
    shape = (len(batch.groups) if unit == "samples" else int(batch.offsets[-1]),)
    expected = f"{dtype} {shape_of(shape)}, one a {unit[:-1]}"
    try:
        values = np.asarray(found)
        # Numbers stay numbers of their kind: a float is no truth value, and 0.5 no int64.
        values = values.astype(dtype, casting="same_kind")
    except (TypeError, ValueError):
        given = getattr(found, "dtype", type(found).__name__)
        raise function.refuse(
            f"gives '{name}' of another type", found=str(given), expected=expected
        ) from None
    if values.shape != shape:
        raise function.refuse(
            f"gives '{name}' of the wrong shape", found=shape_of(values.shape), expected=expected
        )
    if dtype == "float32" and not np.isfinite(values).all():
        place = int(np.flatnonzero(~np.isfinite(values))[0])
        raise function.refuse(
            f"gives '{name}' that is not finite",
            found=f"{values[place]} at {unit[:-1]} {place}",
            expected=expected,
        )
    return values


def _floats(batch: MapBatch, key: str) -> npt.NDArray[np.float64]:
    return np.asarray(batch[key], np.float64)


def _scores(values: npt.NDArray[np.float64]) -> MapResult:
    if not np.isfinite(values).all():
        row = int(np.flatnonzero(~np.isfinite(values))[0])
        raise RewardError("a score is not finite", where=f"sample {row}", found=str(values[row]))
    return {"score": values.astype(np.float32)}
