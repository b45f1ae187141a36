"""The rows of a run's logs, and the summary that it ends with.

Steps are counted from 1: row `step=s` describes the s-th step, and a checkpoint at step s holds the
state after it. Step 0 is the time before the first.

A float that is None does not apply (a supervised stage has no reward); one that is NaN was computed
and is not a number, and stays visible as `"NaN"`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Self

from flowrl.config.schema import PAIR_ACCURACY, REWARD_MARGIN
from flowrl.errors import DataError
from flowrl.files import read_json_lines

DRIVER_WORK = ("dispatch", "collect", "assemble")
"""Kinds of work of a rollout's driver: requests, finished samples, scores and batches."""

_RENAMED = {"offer": "dispatch", "drive": "collect", "answer": "assemble"}
"""Kinds of work in rows of before their names, by what they were called."""


def overlapping_work(seconds: Mapping[str, float]) -> tuple[str, ...]:
    """Returns the kinds of work that overlap with the steps and are no part of them."""
    return ("generate", *DRIVER_WORK) if "wait" in seconds else ()


def seconds_by_kind(value: object) -> dict[str, float]:
    """Returns the seconds by kind of work that a file has."""
    return {_RENAMED.get(kind, kind): spent for kind, spent in _numbers(value).items()}


def _number(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, (int, float, str)):
        return float(value)
    raise TypeError(f"{value!r} is no number")


def _numbers(value: object) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{value!r} is no mapping")
    return {str(key): float(item) for key, item in value.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """The name, the folder and the stages of a run."""

    name: str
    folder: Path
    stages: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One step of a stage: a row of metrics.jsonl.

    Attributes:
        version: Weight publications before this step's rollouts.
        num_samples: Samples that reached the update, or were consumed in a stage without one.
        num_tokens: Response tokens produced for the step.
        length_mean: Response tokens a sample.
        truncated: Share of samples that ended at `max_tokens`.
        filtered_groups: Groups that a filter or a selection removed.
        filtered_by: How many of them each one removed, by its text in the graph, such as
            `filter:difficulty(low=0.5, high=1.0)`.
        dropped_samples: Samples that ended as dropped.
        skipped_updates: Optimizer updates not made because the gradient was not finite.
        seconds: Wall time by kind of work: `generate`, `score`, `logprobs`, `update`, `sync` ...,
            which are parts of `wall_s`. A step that waits for a batch of engines that generate all
            the time has `wait`; its `generate` (of all engines together), `dispatch`, `collect` and
            `assemble` overlap with it, in other processes and a thread, since the previous batch.
        wall_s: Seconds of the whole step.
        extra: Further numbers of losses and rewards, by name. `staleness/max` and `staleness/mean`
            are those of the samples that reached an update: versions since the oldest weights that
            generated one of their tokens. `terms/NAME/mean`, `/std` and `/failures`
            are of each reward term, before its weight: mean and standard deviation over all
            samples that were scored, filtered ones too, and samples that were dropped because the
            term raised, hung or gave no number. `failed_rewards` counts these of all terms.
            `entropy` is that of the trained policy at the response tokens of the updates.
    """

    stage: str
    step: int
    version: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    reward_mean: float | None = None
    reward_std: float | None = None
    length_mean: float | None = None
    length_max: int | None = None
    truncated: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    kl: float | None = None
    clip_fraction_low: float | None = None
    clip_fraction_high: float | None = None
    filtered_groups: int = 0
    filtered_by: Mapping[str, int] = field(default_factory=dict)
    dropped_samples: int = 0
    skipped_updates: int = 0
    wall_s: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, float] = field(default_factory=dict)

    def tokens_per_second(self, kind: str) -> float | None:
        """Returns the response tokens of the step over the seconds of a kind of work."""
        spent = self.seconds.get(kind, 0.0)
        return self.num_tokens / spent if spent > 0 and self.num_tokens else None

    def to_json(self) -> dict[str, object]:
        """Returns the row as it is written, in the order of definition."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @classmethod
    def from_json(cls, row: Mapping[str, object]) -> Self:
        """Returns the row that `to_json` wrote.

        Raises:
            TypeError, ValueError: The value is not such a row.
        """
        known = {item.name for item in fields(cls)}
        values: dict[str, object] = {}
        for key, value in row.items():
            if key not in known:
                raise TypeError(f"{key!r} is no field of a step")
            if key == "seconds":
                values[key] = seconds_by_kind(value)
            elif key == "extra":
                values[key] = _numbers(value)
            elif key == "filtered_by":
                values[key] = {name: int(count) for name, count in _numbers(value).items()}
            elif key == "stage" or isinstance(value, int):
                values[key] = value
            else:
                values[key] = _number(value)
        return cls(**values)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRow:
    """One measurement on held-out data: a row of evaluations.jsonl.

    Attributes:
        step: Steps of the stage made before it.
        name: The held-out set, by its name in `eval.sets`; empty for `data.eval`.
        num: Held-out prompts.
        samples: Samples of each prompt.
        temperature: 0 is greedy.
        metrics: Means by name: `accuracy`, `format`, `score`, `length`, `pass@4/accuracy` ...
        errors: Standard errors of the means, by name.
        seconds: Wall time.
    """

    stage: str
    step: int
    name: str = ""
    num: int
    samples: int = 1
    temperature: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def named_metrics(self) -> dict[str, float]:
        """Returns the means, those of a named set as `SET/METRIC`."""
        prefix = f"{self.name}/" if self.name else ""
        return {f"{prefix}{name}": value for name, value in self.metrics.items()}

    def to_json(self) -> dict[str, object]:
        """Returns the row as it is written, in the order of definition."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @classmethod
    def from_json(cls, row: Mapping[str, object]) -> Self:
        """Returns the row that `to_json` wrote."""
        values = {
            **row,
            "metrics": _numbers(row["metrics"]),
            "errors": _numbers(row.get("errors", {})),
        }
        return cls(**values)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """One sample and the one end it had: a row of samples.jsonl.

    Attributes:
        step: The step that consumed it, or in which it was filtered or dropped.
        rollout: The node of the graph that generated it; ids of samples are unique within one.
        score: None where it was never scored.
        terms: The value of each term, before its weight.
        num_tokens: Response tokens that the policy generated.
        finish: How the response ended: `stop`, `length`, `abort`; empty where it never did.
        versions: `((version, num_tokens), ...)`, the weights that generated the sample's tokens,
            in order; observations are not counted, so the counts add up to `num_tokens`.
        end: `consumed`, `filtered` or `dropped`.
        reason: Why it was filtered or dropped; empty where it was consumed.
    """

    stage: str
    step: int
    rollout: str = ""
    sample: str
    prompt: str
    response: str
    answer: str
    score: float | None
    terms: Mapping[str, float]
    num_tokens: int
    finish: str
    versions: tuple[tuple[int, int], ...]
    end: str
    reason: str = ""

    def to_json(self) -> dict[str, object]:
        """Returns the row as it is written; spelled out because hundreds are written every step."""
        return {
            "stage": self.stage,
            "step": self.step,
            "rollout": self.rollout,
            "sample": self.sample,
            "prompt": self.prompt,
            "response": self.response,
            "answer": self.answer,
            "score": self.score,
            "terms": self.terms,
            "num_tokens": self.num_tokens,
            "finish": self.finish,
            "versions": self.versions,
            "end": self.end,
            "reason": self.reason,
        }

    @classmethod
    def from_json(cls, row: Mapping[str, object]) -> Self:
        """Returns the row that `to_json` wrote."""
        versions = row["versions"]
        if not isinstance(versions, list):
            raise TypeError(f"{versions!r} is no list of versions")
        values = {
            **row,
            "score": _number(row["score"]),
            "terms": _numbers(row["terms"]),
            "versions": tuple((int(version), int(count)) for version, count in versions),
        }
        return cls(**values)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The end of a run: summary.json and the last lines on the terminal.

    Attributes:
        metric: The held-out metric of the last line.
        temperature: The sampling temperature of the measurement; 0 is greedy.
        before: The metric before the last stage; None where it was not measured.
        after: The metric at the end; None where it was not measured.
        num_held_out: Prompts of the measurement.
        wall_s: Seconds of the whole run, over all its resumptions.
        seconds: Wall time by stage, then by kind of work.
        steps: The number of steps by stage.
        samples: The number of samples by the end that they had.
        num_tokens: Response tokens that the samples are made of.
        num_example_tokens: Response tokens of the examples of stages without a rollout.
        libraries: Versions of installed libraries by distribution.
    """

    name: str
    folder: str
    seed: int
    metric: str
    temperature: float
    before: float | None
    after: float | None
    num_held_out: int = 0
    wall_s: float = 0.0
    seconds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)
    samples: Mapping[str, int] = field(default_factory=dict)
    num_tokens: int = 0
    num_example_tokens: int = 0
    libraries: Mapping[str, str] = field(default_factory=dict)

    @property
    def headline(self) -> str:
        """`held-out sampled accuracy: before 0.41 after 0.94`, the last line of a run."""
        if self.before is None and self.after is None:
            return f"held-out {self.metric}: not measured"
        how = "sampled " if self.temperature > 0 else "greedy "
        if self.metric in (PAIR_ACCURACY, REWARD_MARGIN):
            how = ""
        before, after = (
            "not measured" if value is None else f"{value:.2f}"
            for value in (self.before, self.after)
        )
        return f"held-out {how}{self.metric}: before {before} after {after}"

    def to_json(self) -> dict[str, object]:
        """Returns the contents of summary.json."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @classmethod
    def from_json(cls, value: Mapping[str, object]) -> Self:
        """Returns the summary that `to_json` wrote."""
        seconds = value["seconds"]
        if not isinstance(seconds, Mapping):
            raise TypeError(f"{seconds!r} is no mapping")
        values = {
            **value,
            "before": _number(value["before"]),
            "after": _number(value["after"]),
            "seconds": {stage: seconds_by_kind(kinds) for stage, kinds in seconds.items()},
        }
        return cls(**values)  # type: ignore[arg-type]


def lengths_in(path: Path, text: str) -> list[int]:
    """Returns the lengths in a file, in tokens: a number a line, or rows such as samples.jsonl's.

    Args:
        path: The file.
        text: Its contents.

    Raises:
        DataError: A row has no `num_tokens`; the error names its line.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if all(line.isdecimal() for line in lines):
        return [int(line) for line in lines]
    found = []
    for number, row in enumerate(read_json_lines(path), start=1):
        tokens = row.get("num_tokens")
        if not isinstance(tokens, int) or tokens < 0:
            raise DataError(
                "this row has no length",
                where=f"{path}:{number}",
                found=repr(tokens),
                expected="num_tokens, a whole number",
                hint="fix or remove the line; samples.jsonl of a run is such a file",
            )
        found.append(tokens)
    return found
