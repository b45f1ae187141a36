"""`check_map`: proves of a map what it declares, on small random batches.

    from flowrl.testing import check_map

    def test_my_map():
        check_map(my_map)
        check_map(my_map.spec(scale=0.5))

What is checked:

- it works with the fields that it declares alone, and reads each of them;
- it gives the fields that it declares, of their dtype and one number a sample or a token, finite,
  also for a single sample and for samples without a response;
- it gives the same numbers when it is asked again, and leaves its batch as it was;
- its numbers do not depend on the order of samples, nor on the numbers of groups;
- where it says `per_sample`, its numbers of a sample are the same whatever other samples stand in
  the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from flowrl.algo.maps import Array, MapBatch, MapResult
from flowrl.algo.resolve import resolve_map
from flowrl.data.templates import field_value
from flowrl.errors import FlowError, TraceError
from flowrl.graph.ir import DType, Field, Unit, held_field
from flowrl.graph.signatures import (
    ADVANTAGE,
    LOGPROBS,
    PREFERRED,
    RESPONSE_MASK,
    RETURNS,
    ROLLOUT_LOGPROBS,
    SCORE,
    STATE,
    TOKEN_REWARD,
    TOKENS,
    TURN,
    VALUES,
)
from flowrl.program.formulas import UserMap
from flowrl.specs.maps import ROW_PREFIX, MapSpec, split_key
from flowrl.testing.failed_checks import failed_checks

_PROMPTS = (3, 1, 2, 3, 4, 1, 2, 2)
_RESPONSES = (5, 1, 4, 7, 0, 3, 2, 6)
"""Tokens of each sample: one has no response, one a single token of it."""
_GROUPS = (0, 0, 0, 0, 1, 1, 1, 2)

_FIELDS = {
    field.name: field
    for field in (
        TOKENS,
        RESPONSE_MASK,
        ROLLOUT_LOGPROBS,
        SCORE,
        LOGPROBS,
        ADVANTAGE,
        VALUES,
        RETURNS,
        PREFERRED,
        TURN,
        TOKEN_REWARD,
        STATE,
    )
}


_TEXTS = ("no", "12", "the answer is 12", "First.\n\nThen 3.")

_RTOL, _ATOL = 1e-4, 1e-6
"""Where the same numbers are computed among other samples; maps give float32."""


def check_map(
    checked: MapSpec | UserMap[Any],
    *,
    seeds: Sequence[int] = (0, 1, 2),
    fields: Mapping[str, str] | None = None,
    rows: Sequence[Mapping[str, object]] = (),
    texts: Sequence[str] = _TEXTS,
    adjust: Callable[[MapBatch], MapBatch] | None = None,
) -> None:
    """Raises unless the map is what it declares.

    Args:
        checked: One of the library's, or one of `fl.map`, with its default options or others
            (`my_map.spec(scale=0.5)`).
        seeds: One random batch of 8 samples in 3 groups is drawn for each. Scores, values and the
            like are drawn from a normal distribution, logprobs below 0.
        fields: Of fields that other maps of yours give, by name what they have one number for:
            `samples` or `tokens`.
        rows: Data rows to draw from, where the map reads `row.NAME`: `[{"topic": "maths"}]`.
        texts: Texts to draw responses and prompts from; a sample without tokens has none.
        adjust: Changes a drawn batch, where the map takes numbers of a certain kind alone.

    Raises:
        TraceError: it is not; all failures are listed.
    """
    spec = checked.spec() if isinstance(checked, UserMap) else checked
    held = _Held(rows=rows, texts=texts)
    draws = [_draw(spec, seed, fields or {}, held, adjust) for seed in seeds]
    try:
        _given(spec, draws[0])
    except (FlowError, ValueError) as error:
        raise failed_checks(spec, [f"it raises: {error}"]) from error
    failures: list[str] = []
    for check in (_check_repeats, _check_alone, _check_order, _check_groups, _check_reads):
        try:
            failures += list(check(spec, draws))
        except (FlowError, ValueError) as error:
            failures.append(f"it raises: {error}")
    if failures:
        raise failed_checks(spec, failures)


# Batches.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """The rows and texts from which samples are drawn."""

    rows: Sequence[Mapping[str, object]]
    texts: Sequence[str]

    def draw(self, key: str, random: np.random.Generator) -> Array:
        """Returns objects `[N]`; samples of a group have one row and one prompt."""
        name, _ = split_key(key)
        if name == "text":
            texts = [self.texts[i] for i in random.integers(0, len(self.texts), len(_GROUPS))]
            found: list[object] = [t if n else "" for t, n in zip(texts, _RESPONSES, strict=True)]
        elif name == "prompt_text":
            found = [self.texts[group % len(self.texts)] for group in _GROUPS]
        elif not self.rows:
            raise TraceError(
                f"the map reads '{name}', and there is no data row to draw it from",
                hint=f"check_map(..., rows=[{{'{name.removeprefix(ROW_PREFIX)}': ...}}, ...])",
            )
        else:
            rows = [self.rows[group % len(self.rows)] for group in _GROUPS]
            path = name.removeprefix(ROW_PREFIX)
            found = [field_value(row, path, key="the map") for row in rows]
        values = np.empty(len(found), np.object_)
        values[:] = found
        return values


def _draw(
    spec: MapSpec,
    seed: int,
    units: Mapping[str, str],
    held: _Held,
    adjust: Callable[[MapBatch], MapBatch] | None,
) -> MapBatch:
    random = np.random.default_rng(seed)
    spans = list(zip(_PROMPTS, _RESPONSES, strict=True))
    mask = np.concatenate([np.repeat([False, True], span) for span in spans])
    fields = {
        key: _values(_field(key, units), mask, random)
        if held_field(split_key(key)[0]) is None
        else held.draw(key, random)
        for key in spec.reads
    }
    batch = MapBatch(
        fields=fields,
        groups=np.array(_GROUPS, np.int64),
        offsets=np.concatenate([[0], np.cumsum([sum(span) for span in spans])]).astype(np.int64),
        lengths=np.array(_RESPONSES, np.int64),
        truncated=random.random(len(spans)) < 0.5,
    )
    return batch if adjust is None else adjust(batch)


def _field(key: str, units: Mapping[str, str]) -> Field:
    name, _ = split_key(key)
    if name in units:
        return Field(name=name, dtype=DType.FLOAT32, unit=Unit(units[name]))
    if name not in _FIELDS:
        raise TraceError(
            f"'{name}' is a field of another map, and may be of samples or tokens",
            hint=f"check_map(..., fields={{'{name}': 'samples'}})",
        )
    return _FIELDS[name]


def _values(field: Field, mask: npt.NDArray[np.bool_], random: np.random.Generator) -> Array:
    """Numbers as a run has them: of tokens, 0 off the responses."""
    if field.name == RESPONSE_MASK.name:
        return mask
    size = len(_GROUPS) if field.unit is Unit.SAMPLES else len(mask)
    if field.dtype is DType.BOOL:
        return random.random(size) < 0.5
    if field.name == TURN.name:
        return np.where(mask, random.integers(0, 3, size), -1).astype(np.int64)
    if field.dtype is DType.INT64:
        return random.integers(1, 3, size).astype(np.int64)  # few, so that some repeat
    drawn = random.normal(size=size)
    drawn = -np.abs(drawn) - 0.01 if field.name.endswith("logprobs") else drawn
    return (
        np.where(mask, drawn, 0.0).astype(np.float32)
        if size == len(mask)
        else drawn.astype(np.float32)
    )


def _given(spec: MapSpec, batch: MapBatch) -> MapResult:
    return resolve_map(spec)(batch)


def _in_places(spec: MapSpec, given: MapResult, batch: MapBatch, samples: Array) -> MapResult:
    """What a map gave of some samples, in their order, cut out of what it gave of all."""
    tokens = [np.arange(*batch.offsets[i : i + 2]) for i in samples]
    chosen = {"samples": samples, "tokens": np.concatenate(tokens)}
    return {name: given[name][chosen[unit]] for name, _, unit in spec.gives}


def _same(left: MapResult, right: MapResult) -> bool:
    return all(
        np.allclose(left[name].astype(float), right[name].astype(float), rtol=_RTOL, atol=_ATOL)
        for name in left
    )


# Checks. Each gives a sentence for each failure.


def _check_repeats(spec: MapSpec, draws: Sequence[MapBatch]) -> Iterator[str]:
    for batch in draws:
        before = {key: values.copy() for key, values in batch.fields.items()}
        if not _same(_given(spec, batch), _given(spec, batch)):
            yield "it gives other numbers when it is asked again: it must not draw random numbers"
        if any((before[key] != values).any() for key, values in batch.fields.items()):
            yield "it writes into the fields of its batch, which others read too"


def _check_alone(spec: MapSpec, draws: Sequence[MapBatch]) -> Iterator[str]:
    """One sample, with and without a response; each is to be as among others, where it says so."""
    for batch in draws:
        whole = _given(spec, batch)
        for place in range(len(batch.groups)):
            sample = np.array([place], np.int64)
            alone = _given(spec, batch.part(sample))
            if spec.per_sample and not _same(alone, _in_places(spec, whole, batch, sample)):
                yield (
                    "it says per_sample=True, but what it gives for a sample depends on the others "
                    "of its batch: leave per_sample out, or compute with the sample's own numbers"
                )
                return


def _check_order(spec: MapSpec, draws: Sequence[MapBatch]) -> Iterator[str]:
    for batch in draws:
        turned = np.arange(len(batch.groups))[::-1].astype(np.int64)
        expected = _in_places(spec, _given(spec, batch), batch, turned)
        if not _same(_given(spec, batch.part(turned)), expected):
            yield "its numbers depend on the order of samples, which means nothing"
            return


def _check_groups(spec: MapSpec, draws: Sequence[MapBatch]) -> Iterator[str]:
    for batch in draws:
        renumbered = replace(batch, groups=97 - 3 * batch.groups)
        if not _same(_given(spec, batch), _given(spec, renumbered)):
            yield "its numbers depend on the numbers of groups: these only say what is equal"
            return


def _check_reads(spec: MapSpec, draws: Sequence[MapBatch]) -> Iterator[str]:
    read: set[str] = set()
    for batch in draws:
        parts = {each.name: getattr(batch, each.name) for each in dataclasses.fields(batch)}
        _given(spec, _Watched(**{**parts, "fields": _WatchedFields(batch.fields, read)}))
    for key in spec.reads:
        if key not in read:
            yield f"it declares '{key}', which it does not read"


class _WatchedFields(Mapping[str, Array]):
    """Fields that note which of them are taken."""

    def __init__(self, fields: Mapping[str, Array], read: set[str]) -> None:
        self._fields = fields
        self.read = read

    def __getitem__(self, key: str) -> Array:
        self.read.add(key)
        return self._fields[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


class _Watched(MapBatch):
    """A batch that notes which fields are read; lengths and truncation go by the mask."""

    fields: _WatchedFields

    def __getattribute__(self, name: str) -> Any:
        if name in ("lengths", "truncated"):
            self.fields.read.add(RESPONSE_MASK.name)
        return object.__getattribute__(self, name)
