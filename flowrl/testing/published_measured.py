"""What a published row says was measured: stages, steps and rates, by any of their usual names.

A key is a name and a unit: `generate_s`, `step_time_s`, `timing_s/gen`, `train_ms`, `total_min`; a
name without a unit is taken for seconds, and told. Rates of tokens count as steps. What is none of
these is told, and nothing is predicted for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from flowrl.testing.published_rows import Row, is_positive
from flowrl.testing.published_words import as_number

__all__ = ["Measured", "MeasuredStage", "StageName", "read_measured", "runs_of"]

StageName: TypeAlias = Literal["generate", "logprobs", "train", "sync"]

_STAGES: dict[str, StageName] = {
    **dict.fromkeys(("generate", "generation", "rollout", "gen"), "generate"),
    **dict.fromkeys(
        (
            *("logprob", "logprobs", "log_prob", "log_probs", "old_logprob", "old_logprobs"),
            *("old_log_prob", "actor_logprob", "policy_logprobs", "inference", "ref_logprob"),
            *("ref_logprobs", "ref_log_prob", "ref", "reference", "reference_logprobs"),
        ),
        "logprobs",
    ),
    **dict.fromkeys(
        ("train", "training", "update", "update_actor", "actor", "actor_train", "policy_training"),
        "train",
    ),
    **dict.fromkeys(
        ("sync", "weight_sync", "sync_weights", "update_weights", "weight_update", "refit"), "sync"
    ),
}
_STEPS = ("step", "total", "iteration", "e2e", "total_step")
_RATES = ("tok_s_per_device", "e2e_tok_s_per_device", "tok_s", "e2e_tok_s")
"""Of all devices together where no device is named."""

_UNITS = {
    "s": 1.0,
    "sec": 1.0,
    "secs": 1.0,
    "seconds": 1.0,
    "ms": 1e-3,
    "min": 60.0,
    "minutes": 60.0,
}
_KEY = re.compile(
    r"(?:timing(?:_s)?/)?(?P<name>.+?)(?:_time)?(?:_(?P<unit>s|secs?|seconds|ms|min|minutes))?"
)
_STATISTICS = {
    "mean",
    "avg",
    "average",
    "std",
    "stdev",
    "min",
    "max",
    "median",
    "p50",
    "p90",
    "num",
}
_MEANS = ("mean", "avg", "average")
_PARTS = ("stages", "stage_times", "timing", "timings")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStage:
    """A stage, under the key that its row has for it."""

    key: str
    stage: StageName
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run.

    Attributes:
        step_s: Seconds of a step; None where a rate or nothing stands for it.
        rate: Tokens a second.
        per_device: Whether the rate is that of one device.
        notes: What was passed over or assumed.
        rest: Keys of the run that are nothing measured: they hold in place of those of its row.
    """

    stages: tuple[MeasuredStage, ...]
    step_s: float | None
    rate: float | None
    per_device: bool
    notes: tuple[str, ...]
    rest: dict[str, object]


def runs_of(measured: object) -> dict[str, Row]:
    """What was measured, by run; '' where there is only one."""
    if isinstance(measured, list) and all(isinstance(run, Mapping) for run in measured):
        named = {str(run.get("name", number)): run for number, run in enumerate(measured, 1)}
        measured = {
            name: {key: value for key, value in run.items() if key != "name"}
            for name, run in named.items()
        }
    if not isinstance(measured, Mapping):
        return {"": {}}
    runs: dict[str, Row] = {}
    single: dict[str, object] = {}
    for key, value in measured.items():
        if not isinstance(value, Mapping) or _STATISTICS.issuperset(map(str, value)):
            single[str(key)] = value
        elif str(key).lower() in _PARTS:
            single.update({str(name): part for name, part in value.items()})
        else:
            runs[str(key)] = value
    return runs if runs and not single else {"": single, **runs}


def read_measured(given: Row) -> Measured:
    """Of one run."""
    stages: list[MeasuredStage] = []
    notes: list[str] = []
    steps: list[float] = []
    rates: dict[bool, float] = {}
    rest: dict[str, object] = {}
    for key, value in given.items():
        found = _KEY.fullmatch(str(key).strip().lower().replace("-", "_"))
        name, unit = (found["name"], found["unit"]) if found else (str(key), None)
        rate = _rate(str(key))
        if name not in _STAGES and name not in _STEPS and rate not in _RATES:
            if unit is not None:
                notes.append(f"measured.{key} is no stage that is predicted")
            else:
                rest[str(key)] = value
            continue
        number = _mean(value)
        if not is_positive(number):
            notes.append(f"measured.{key} is no number above 0: {value!r}")
        elif rate in _RATES:
            rates.setdefault(rate.endswith("device"), float(number))
        else:
            if unit is None and "timing_s/" not in str(key):
                notes.append(f"measured.{key} taken for seconds")
            seconds = float(number) * _UNITS[unit or "s"]
            if name in _STEPS:
                steps.append(seconds)
            else:
                stages.append(MeasuredStage(key=str(key), stage=_STAGES[name], seconds=seconds))
    if len(set(steps)) > 1:
        notes.append(f"measured: {steps[0]:g} s taken of several steps")
    return Measured(
        stages=tuple(stages),
        step_s=steps[0] if steps else None,
        rate=next(iter(rates.values()), None),
        per_device=next(iter(rates), False),
        notes=tuple(notes),
        rest=rest,
    )


def _rate(key: str) -> str:
    """A rate's name in one form.

    >>> _rate("tokens_per_second_per_gpu"), _rate("tokens/s/gpu"), _rate("e2e_tok_s_per_device")
    ('tok_s_per_device', 'tok_s_per_device', 'e2e_tok_s_per_device')
    """
    found = key.strip().lower().replace("-", "_").replace("/", "_per_")
    found = re.sub(r"tokens|toks", "tok", found)
    found = re.sub(r"_per_(second|sec|s)(?=_|$)", "_s", found)
    return re.sub(r"_per_(gpu|npu|die)$", "_per_device", found)


def _mean(value: object) -> object:
    """A number, or that of a mean with other statistics beside it."""
    if isinstance(value, Mapping):
        value = next((value[key] for key in _MEANS if key in value), value)
    return as_number(value)
