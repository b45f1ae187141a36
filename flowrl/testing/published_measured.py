"""What a published row says was measured: stages, steps and rates, by any of their usual names.

A key is a name and a unit: `generate_s`, `step_time_s`, `timing_s/gen`, `train_ms`, `total_min`, or
a value has the unit: `59.5 s`, `5m46s`; a name without one is taken for seconds, and told. Rates of
tokens or samples count as steps, and those of a stage (`generate_tok_s_per_device`) as the stage:
of the tokens that it makes or takes in, on the devices that it has. Runs may stand below each stage
instead of around them: `step_s: {ours: 346, theirs: 364}`. What is none of these is told, and
nothing is predicted for it.

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

__all__ = [
    "Measured",
    "MeasuredRate",
    "MeasuredStage",
    "StageName",
    "read_measured",
    "runs_of",
    "unread",
]

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
_WHOLE = ("", "e2e", "end_to_end", "overall", "throughput", "effective", *_STEPS)
"""What a rate is called that is the step's."""

_RATE = re.compile(r"(?:(?P<name>.+?)_)?(?P<what>tok|samples)_s(?P<device>_per_device)?")
_THROUGHPUT = re.compile(r"^throughput_|_throughput(?=_tok|_samples|$)")

_UNITS = {
    "s": 1.0,
    "sec": 1.0,
    "secs": 1.0,
    "seconds": 1.0,
    "ms": 1e-3,
    "min": 60.0,
    "minutes": 60.0,
    **dict.fromkeys(("h", "hours"), 3600.0),
}
_UNIT = "s|secs?|seconds|ms|min|minutes|h|hours"
_KEY = re.compile(
    rf"(?:(?:timings?(?:_s)?|times?|perf)/)?(?P<name>.+?)(?:_time)?(?:_(?P<unit>{_UNIT}))?"
)
_VALUE = re.compile(rf"(?P<number>[\d.,e+]+)\s*(?P<unit>{_UNIT})", re.IGNORECASE)
_CLOCK = re.compile(r"(?:(\d+)\s*h)?\s*(?:(\d+)\s*m(?:in)?)?\s*(?:(\d+(?:\.\d+)?)\s*s)?")
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
class MeasuredRate:
    """What a stage or a step does in a second.

    Attributes:
        stage: None for the step.
        samples: They are counted, not their tokens.
        per_device: The rate is that of one device, not of all that take part.
    """

    key: str
    stage: StageName | None
    rate: float
    samples: bool
    per_device: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run.

    Attributes:
        step_s: Seconds of a step; None where a rate or nothing stands for it.
        rate: Of the step, where it has one.
        stage_rates: Of stages.
        notes: What was passed over or assumed.
        rest: Keys of the run that are nothing measured: they hold in place of those of its row.
    """

    stages: tuple[MeasuredStage, ...]
    step_s: float | None
    rate: MeasuredRate | None
    stage_rates: tuple[MeasuredRate, ...]
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
    for key, value in _by_run(measured).items():
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


def _by_run(measured: Row) -> Row:
    """Runs around their stages, where they stand below them.

    >>> _by_run({"step_s": {"ours": 3, "theirs": 4}, "train_s": {"ours": 1}})
    {'ours': {'step_s': 3, 'train_s': 1}, 'theirs': {'step_s': 4}}
    """
    below = all(
        isinstance(value, Mapping)
        and value
        and (_rate_of(str(key), 1.0) or _named(str(key))[0] in (*_STAGES, *_STEPS))
        and not _STATISTICS.issuperset(map(str, value))
        and not any(isinstance(part, Mapping) for part in value.values())
        for key, value in measured.items()
    )
    if not below:
        return measured
    runs: dict[str, dict[str, object]] = {}
    for key, value in measured.items():
        for run, part in value.items():
            runs.setdefault(str(run), {})[str(key)] = part
    return runs


def read_measured(given: Row) -> Measured:
    """Of one run."""
    stages: list[MeasuredStage] = []
    notes: list[str] = []
    steps: list[float] = []
    rates: list[MeasuredRate] = []
    rest: dict[str, object] = {}
    for key, value in given.items():
        name, unit = _named(str(key))
        number = _mean(value)
        rate = _rate_of(str(key), number)
        if name not in _STAGES and name not in _STEPS and rate is None:
            if unit is not None:
                notes.append(f"measured.{key} is no stage that is predicted")
            else:
                rest[str(key)] = value
            continue
        if rate is None:
            number, unit = _with_unit(number, unit)
        if not is_positive(number):
            notes.append(f"measured.{key} is no number above 0: {value!r}")
        elif rate is not None:
            rates.append(rate)
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
        rate=next((rate for rate in rates if rate.stage is None), None),
        stage_rates=tuple(rate for rate in rates if rate.stage is not None),
        notes=tuple(notes),
        rest=rest,
    )


def _named(key: str) -> tuple[str, str | None]:
    """A key's name and unit."""
    found = _KEY.fullmatch(key.strip().lower().replace("-", "_"))
    return (found["name"], found["unit"]) if found else (key, None)


def _with_unit(number: object, unit: str | None) -> tuple[object, str | None]:
    """A number, and the unit that stands with it.

    >>> _with_unit("4.4 min", None), _with_unit("~5m46s", None), _with_unit(7, "ms")
    ((4.4, 'min'), (346.0, 's'), (7, 'ms'))
    """
    text = re.sub(r"^(~|≈|about)\s*", "", str(number).strip())
    if found := _VALUE.fullmatch(text):
        return as_number(found["number"]), found["unit"].lower()
    clock = _CLOCK.fullmatch(text)
    if clock is not None and any(clock.groups()):
        hours, minutes, seconds = (float(part or 0) for part in clock.groups())
        return hours * 3600 + minutes * 60 + seconds, "s"
    return (as_number(text) if isinstance(number, str) else number), unit


def _rate_of(key: str, number: object) -> MeasuredRate | None:
    """The rate that a key names, of a stage or of the step; None where it names none.

    >>> found = _rate_of("tokens_per_second_per_gpu", 220)
    >>> found.stage, found.per_device, found.samples
    (None, True, False)
    >>> _rate_of("generate/tokens/s", 1).stage, _rate_of("step_s", 1)
    ('generate', None)
    """
    found = _RATE.fullmatch(_rate(key))
    if found is None:
        return None
    name = found["name"] or ""
    stage = _STAGES.get(name)
    if (name not in _WHOLE and stage is None) or stage in ("sync", "refit", "all_logprobs"):
        return None
    return MeasuredRate(
        key=key,
        stage=stage,
        rate=float(number) if is_positive(number) else 0.0,
        samples=found["what"] == "samples",
        per_device=found["device"] is not None,
    )


def _rate(key: str) -> str:
    """A rate's name in one form.

    >>> _rate("tokens_per_second_per_gpu"), _rate("tokens/s/gpu"), _rate("e2e_tok_s_per_device")
    ('tok_s_per_device', 'tok_s_per_device', 'e2e_tok_s_per_device')
    >>> _rate("throughput_tok_s"), _rate("TGS"), _rate("generation throughput (tokens/s)")
    ('tok_s', 'tok_s_per_device', 'generation_tok_s')
    """
    found = re.sub(r"[\s()]+", "_", key.strip().lower()).strip("_").replace("-", "_")
    if found == "tgs":
        return "tok_s_per_device"
    found = re.sub(r"/(?=tok)", "_", found).replace("/", "_per_")
    found = re.sub(r"tokens|toks", "tok", found)
    found = re.sub(r"(samples|sequences|seqs)(?=_per_s|_s)", "samples", found)
    found = re.sub(r"_per_(second|sec|s)(?=_|$)", "_s", found)
    found = re.sub(r"_per_(gpu|npu|die)$", "_per_device", found)
    return _THROUGHPUT.sub("", found)


def _mean(value: object) -> object:
    """A number, or that of a mean with other statistics beside it."""
    if isinstance(value, Mapping):
        value = next((value[key] for key in _MEANS if key in value), value)
    return as_number(value)
