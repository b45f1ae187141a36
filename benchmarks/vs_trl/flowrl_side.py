"""flowrl's side: an ordinary run through the public API, held between steps by its display.

python flowrl_side.py SPEC.json      (started by vs_trl_cpu.py)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from gate import Gate

import flowrl as fl
from flowrl.observe.display import SilentDisplay
from flowrl.observe.rows import StepMetrics


class _Turns(SilentDisplay):
    """A display that returns from a step when it is this side's turn."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def stage(self, name: str, steps: int, logged: Sequence[str] = ()) -> None:
        self._gate.ready()

    def step(self, metrics: StepMetrics, eta_s: float | None = None) -> None:
        kinds = {"generate": ("generate",), "score": ("score",), "update": ("update", "sync")}
        stages = {
            stage: sum(metrics.seconds.get(kind, 0.0) for kind in of) for stage, of in kinds.items()
        }
        self._gate.step(
            stages,
            samples=metrics.num_samples,
            tokens=metrics.num_tokens,
            longest=metrics.length_max or 0,
            reward=metrics.reward_mean or 0.0,
            grad_norm=metrics.grad_norm or 0.0,
        )


def config_of(spec: dict[str, object]) -> dict[str, object]:
    """The run's configuration, as YAML would hold it."""
    reward = Path(__file__).with_name("reward.py")
    return {
        "name": "vs-trl",
        "stages": ["grpo"],
        "args": {"drop_zero_variance": False},
        "roles": {
            "actor": {
                "backend": "torch",
                "model": spec["model"],
                "num_slots": spec["num_slots"],
                "dtype": "float32",
            },
            "verifier": {"backend": "verify"},
        },
        "data": {"train": spec["data"], "chat_template": "never"},
        "rewards": {"terms": [{"kind": "python", "function": f"{reward}:flowrl_reward"}]},
        "train": {
            "steps": spec["steps"],
            "prompts_per_step": spec["prompts"],
            "group_size": spec["group_size"],
            "mini_batches": 1,
            "micro_batch": spec["flowrl_micro_batch"],
            "optimizer": {"learning_rate": spec["learning_rate"]},
            "sampling": {"temperature": 1.0, "max_tokens": spec["max_tokens"]},
        },
        "runtime": {"runs": spec["runs"], "num_threads": 1},
    }


def main() -> None:
    """Runs the steps that the driver asks for."""
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    gate = Gate()
    fl.compile("grpo", config_of(spec)).run(display=_Turns(gate))


if __name__ == "__main__":
    main()
