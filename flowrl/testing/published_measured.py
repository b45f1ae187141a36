"""What a published row says was measured: stages, steps and rates, by any of their usual names.

A key is a name and a unit: `generate_s`, `step_time_s`, `timing_s/gen`, `train_ms`, `total_min`, or
a value has the unit: `59.5 s`; a name without one is taken for seconds, and told. Rates of tokens
count as steps. What is none of these is told, and nothing is predicted for it.

Two stages are more than one part of a prediction. `all_logprobs` are those of policy and reference
together, by names that say so, or where a row has more passes than names for them; `refit` is what
NeMo RL calls so on shared devices: the trainer's state goes to the host and engines get weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from flowrl.testing.published_rows import Row, is_positive
from flowrl.testing.published_words import as_number

__all__ = ["Measured", "MeasuredStage", "StageName", "read_measured", "runs_of", "unread"]

StageName: TypeAlias = Literal["generate", "logprobs", "all_logprobs", "train", "sync", "refit"]

_STAGES: dict[str, StageName] = {
    **dict.fromkeys(("generate", "generation", "rollout", "gen"), "generate"),
    **dict.fromkeys(
        (
            *("logprob", "logprobs", "log_prob", "log_probs", "old_logprob", "old_logprobs"),
            *("old_log_prob", "actor_logprob", "policy_logprobs", "inference", "ref_logprob"),
            *("ref_logprobs", "ref_log_prob", "ref_log_probs", "ref", "reference"),
            *("reference_logprobs", "reference_model", "old_log_p", "get_logprobs"),
        ),
        "logprobs",
    ),
    **dict.fromkeys(
        ("policy_and_reference_logprobs", "fwd_logprobs_values_reward"), "all_logprobs"
    ),
    **dict.fromkeys(
        (
            *("train", "training", "update", "update_actor", "actor", "actor_train"),
            *("policy_training", "policy_train"),
        ),
        "train",
    ),
    **dict.fromkeys(
        ("sync", "weight_sync", "sync_weights", "update_weights", "weight_update"), "sync"
    ),
    **dict.fromkeys(("refit", "prepare_for_generation"), "refit"),
}
_JOINT = ("logprob", "logprobs", "log_prob", "log_probs", "inference", "get_logprobs")
"""Names of logprobs that do not say whose."""

_STEPS = ("step", "total", "iteration", "e2e", "total_step", "all")
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
_UNIT = "s|secs?|seconds|ms|min|minutes"
_KEY = re.compile(
    rf"(?:(?:timings?(?:_s)?|times?|perf)/)?(?P<name>.+?)(?:_time)?(?:_(?P<unit>{_UNIT}))?"
)
_VALUE = re.compile(rf"(?P<number>[\d.,e+]+)\s*(?P<unit>{_UNIT})", re.IGNORECASE)
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
    """A stage, under the key that its row has for it.

    Attributes:
        joint: Logprobs by a name that does not say whose.
    """

    key: str
    stage: StageName
    seconds: float
    joint: bool = False


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
    if isinstance(measured, list):
        kept = [run for run in measured if isinstance(run, Mapping)]
        named = {str(run.get("name", number)): run for number, run in enumerate(kept, 1)}
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


def unread(measured: object) -> str:
    """What of a row's `measured` is passed over, in words; '' for nothing.

    >>> unread("about 100 s"), unread([{"step_s": 9}, 3])
    ("measured is no object: 'about 100 s'", 'measured: 3 is no object')
    """
    if measured is None or isinstance(measured, Mapping):
        return ""
    if not isinstance(measured, list):
        return f"measured is no object: {measured!r}"
    return ", ".join(
        f"measured: {run!r} is no object" for run in measured if not isinstance(run, Mapping)
    )


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
        if found is not None and (text := _VALUE.fullmatch(str(number).strip())):
            number, unit = as_number(text["number"]), text["unit"].lower()
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
                continue
            stage = MeasuredStage(
                key=str(key), stage=_STAGES[name], seconds=seconds, joint=name in _JOINT
            )
            stages.append(stage)
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
