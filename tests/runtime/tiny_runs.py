"""Whole runs that take a fraction of a second: their config, and what they leave to compare."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.numpy import load_file

import flowrl as fl
from flowrl import api
from flowrl.cluster.discover import discover
from flowrl.cluster.pool import ResourcePool
from flowrl.files import read_json_lines
from flowrl.observe.display import SilentDisplay
from flowrl.observe.rows import StepMetrics, Summary

# About half of all responses of an untrained model begin with a digit, so that every step has
# groups to learn from.
REWARD = {"kind": "format", "name": "digit", "pattern": "[0-9].*"}


def tiny_config(runs: Path) -> dict[str, Any]:
    """Two stages of four steps, with everything on that a resumed run must take up again.

    Stop checks in the first stage, that never reach what they ask; evaluations, a reference that
    is a copy, and groups that are filtered, in the last.
    """
    optimizer = {"learning_rate": 3e-3, "warmup_updates": 2, "schedule": "cosine"}
    return {
        "name": "tiny",
        "seed": 7,
        "stages": ["sft", "grpo"],
        "roles": {
            "actor": {
                "backend": "torch",
                "model": {
                    "hidden_size": 16,
                    "num_layers": 1,
                    "num_heads": 2,
                    "intermediate_size": 16,
                    "max_length": 16,
                },
                "tokenizer": {"kind": "char", "alphabet": "0123456789+="},
                "num_slots": 8,
            },
            "reference": {"backend": "torch", "copy_of": "actor"},
            "verifier": {"backend": "verify"},
        },
        "data": {
            # A hundred sums each, for a run reads and tokenises all of its data when it begins.
            "train": {"kind": "arithmetic", "split": "train", "held_out": 9900},
            "eval": {"kind": "arithmetic", "split": "eval", "held_out": 100},
            "max_prompt_tokens": 8,
        },
        "rewards": {"terms": [REWARD], "timeout_s": 60.0},
        "stage": {
            "sft": {
                "train": {"steps": 4, "prompts_per_step": 8, "optimizer": optimizer},
                "stop": {"metric": "digit", "at_least": 2.0, "check_every": 2, "num": 8},
            }
        },
        "train": {
            "steps": 4,
            "prompts_per_step": 8,
            "group_size": 4,
            "mini_batches": 2,
            "micro_batch": 16,
            "optimizer": optimizer,
            "sampling": {"max_tokens": 6},
        },
        "args": {"kl": 0.05},
        "eval": {"every": 2, "num": 16, "metric": "digit"},
        "runtime": {"runs": str(runs)},
    }


def write_config(folder: Path, **changes: Any) -> Path:
    """`tiny_config` as a file in `folder`, with runs beside it; top-level keys replaced."""
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({**tiny_config(folder / "runs"), **changes}))
    return path


def just_too_small(config: dict[str, Any]) -> fl.Compiled:
    """A config compiled for a CPU that is a byte short of holding all models at once."""
    (node,) = discover().nodes
    (cpu, *_) = node.devices

    def compiled(budget: int) -> fl.Compiled:
        device = replace(cpu, memory_bytes=budget, available_bytes=budget)
        pool = ResourcePool(nodes=(replace(node, devices=(device,)),))
        return fl.compile(None, config, pool=pool)

    peaks = [stage.plan.prediction.peak("cpu:0") for stage in compiled(1 << 40).stages]
    return compiled(max(peak.memory.total for peak in peaks if peak is not None) - 1)


class WatchedDisplay(SilentDisplay):
    """Shows nothing and remembers what it was told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self.steps: list[tuple[str, int]] = []
        self.summary: Summary | None = None

    def step(self, metrics: StepMetrics, eta_s: float | None = None) -> None:
        self.steps.append((metrics.stage, metrics.step))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def end(self, summary: Summary) -> None:
        self.summary = summary


class CtrlC(WatchedDisplay):
    """Presses Ctrl-C once: after a step is recorded, or at the first scoring that follows it.

    Step 0 stands for the beginning of a stage.

    Args:
        after: Samples of the following scorings that are let through before.
        times: How often it is pressed at that moment.
        number: The signal: Ctrl-C's, or another that asks a run to stop.
    """

    def __init__(
        self,
        stage: str,
        step: int,
        *,
        in_scoring: bool = False,
        after: int = 0,
        times: int = 1,
        number: signal.Signals = signal.SIGINT,
    ) -> None:
        super().__init__()
        self._moment = (stage, step)
        self._in_scoring = in_scoring
        self._left = after
        self._times = times
        self._number = number
        self.armed = False

    def stage(self, name: str, steps: int, logged: Sequence[str] = ()) -> None:
        self._passed((name, 0))

    def step(self, metrics: StepMetrics, eta_s: float | None = None) -> None:
        super().step(metrics, eta_s)
        self._passed((metrics.stage, metrics.step))

    def _passed(self, moment: tuple[str, int]) -> None:
        if moment == self._moment:
            self.armed = True
            if not self._in_scoring:
                self.press()

    def press(self, samples: int = 0) -> None:
        """A real SIGINT in this thread.

        Args:
            samples: That go to the scorers now.
        """
        if not self.armed:
            return
        self._left -= samples
        if self._left < 0 or not self._in_scoring:
            self.armed = False
            for _ in range(self._times):
                signal.raise_signal(self._number)


@dataclass(frozen=True)
class Outcome:
    """All that a run leaves, without measured times and paths."""

    weights: bytes
    trainer: dict[str, bytes]
    metrics: list[dict[str, object]]
    evaluations: list[dict[str, object]]
    samples: bytes
    counts: Mapping[str, object]
    state: Mapping[str, Any]


def ages_of(extra: Mapping[str, float]) -> dict[int, int]:
    """The histogram of ages in a step's further numbers: samples by publications behind."""
    return {
        int(name.removeprefix("age/")): round(number)
        for name, number in extra.items()
        if name.startswith("age/")
    }


def outcome(run: Path) -> Outcome:
    """What the finished run in folder `run` left."""
    summary = json.loads((run / "summary.json").read_text())
    last = max((run / "checkpoints").iterdir(), key=lambda path: path.name)
    samples = run / "samples.jsonl"  # a run that draws none has no such file
    model = run / "model" / "model.safetensors"  # and one that trains nothing has no model
    return Outcome(
        weights=model.read_bytes() if model.exists() else b"",
        # Without the state of the process's own random stream, which no step draws from.
        trainer={
            f"{path.relative_to(last)}.{name}": tensor.tobytes()
            for path in sorted(last.rglob("*.safetensors"))
            for name, tensor in load_file(path).items()
            if not name.startswith("random.")
        },
        metrics=_without(run / "metrics.jsonl", "wall_s", "seconds"),
        evaluations=_without(run / "evaluations.jsonl", "seconds"),
        samples=samples.read_bytes() if samples.exists() else b"",
        counts={
            key: summary[key]
            for key in (
                "before",
                "after",
                "steps",
                "samples",
                "num_tokens",
                "num_example_tokens",
                "num_held_out",
            )
        },
        state=_state(last),
    )


def _state(checkpoint: Path) -> dict[str, object]:
    """All that the driver carries on: cursors, schedulers, versions, counts, failed rewards."""
    state: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())
    for measured in ("wall_s", "seconds"):
        del state["ledger"][measured]
    for scheduler in state["stage"]["schedulers"].values():
        # Of the clock, whose ticks are events too, and of engines that joined anew.
        for own in ("timers", "last_event_id", "engines", "num_joins"):
            del scheduler[own]
    return state


def _without(path: Path, *keys: str) -> list[dict[str, object]]:
    return [
        {key: value for key, value in row.items() if key not in keys}
        for row in read_json_lines(path)
    ]


def resumed(
    run: Path,
    *overrides: str,
    display: WatchedDisplay | None = None,
    accept_changes: bool = False,
) -> api.RunResult:
    compiled = api.compile(None, run / "config.yaml", overrides=overrides)
    shown = display or WatchedDisplay()
    return api.resume(compiled, run, display=shown, accept_changes=accept_changes)


def stopped(runs: Path, ctrl_c: CtrlC, **changes: Any) -> Path:
    """The folder of a tiny run that Ctrl-C has ended."""
    config = {**tiny_config(runs), **changes}
    with pytest.raises(KeyboardInterrupt):
        api.run(None, config, display=ctrl_c)
    return runs / "tiny"
