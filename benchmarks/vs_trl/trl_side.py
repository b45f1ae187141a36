"""TRL's side: GRPOTrainer with plain generation, held between steps by a callback.

python trl_side.py SPEC.json      (started by vs_trl_cpu.py, in TRL's own environment)
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from gate import Gate
from reward import trl_reward
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class _Clock:
    """Seconds inside wrapped methods, by name, since the last `take`."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}

    def wrap(self, owner: object, method: str, name: str) -> None:
        """Times `owner.method`."""
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = inner(*args, **kwargs)
            self._spent[name] = self._spent.get(name, 0.0) + time.perf_counter() - started
            return result

        setattr(owner, method, timed)

    def take(self) -> dict[str, float]:
        """What was measured since the last call."""
        spent, self._spent = self._spent, {}
        return spent


class _Turns(TrainerCallback):
    """Returns from a step when it is this side's turn."""

    def __init__(self, gate: Gate, clock: _Clock) -> None:
        self._gate = gate
        self._clock = clock
        self.trainer: GRPOTrainer | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._gate.ready()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self.trainer is not None
        spent = self._clock.take()
        # The training step contains the preparation, which contains generation and rewards.
        stages = {
            "generate": spent["generate"],
            "score": spent["score"],
            "update": spent["training"] - spent["prepare"] + spent["optimizer"],
        }
        metrics = self.trainer._metrics["train"]
        samples = args.per_device_train_batch_size * args.gradient_accumulation_steps
        self._gate.step(
            stages,
            samples=samples,
            tokens=samples * metrics["completions/mean_length"][-1],
            longest=metrics["completions/max_length"][-1],
            reward=metrics["reward"][-1],
        )
        metrics.clear()


def main() -> None:
    """Runs the steps that the driver asks for."""
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    gate = Gate()
    torch.set_num_threads(1)
    micro_batch = spec["trl_micro_batch"]
    arguments = GRPOConfig(
        output_dir=str(Path(spec["runs"]) / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=spec["prompts"] * spec["group_size"] // micro_batch,
        num_generations=spec["group_size"],
        max_completion_length=spec["max_tokens"],
        temperature=1.0,
        beta=0.0,
        epsilon_high=0.28,
        learning_rate=spec["learning_rate"],
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        max_steps=spec["steps"],
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **spec["trl_options"],
    )
    clock = _Clock()
    turns = _Turns(gate, clock)
    rows = [json.loads(line) for line in Path(spec["data"]).read_text(encoding="utf-8").split("\n")]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(spec["model"], padding_side="left"),
        reward_funcs=trl_reward,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        callbacks=[turns],
    )
    turns.trainer = trainer
    clock.wrap(trainer, "_generate", "generate")
    clock.wrap(trainer, "_calculate_rewards", "score")
    clock.wrap(trainer, "_prepare_inputs", "prepare")
    clock.wrap(trainer, "training_step", "training")
    create = trainer.create_optimizer

    def create_timed(*args: Any, **kwargs: Any) -> Any:
        optimizer = create(*args, **kwargs)
        clock.wrap(optimizer, "step", "optimizer")
        return optimizer

    trainer.create_optimizer = create_timed
    trainer.train()


if __name__ == "__main__":
    main()
