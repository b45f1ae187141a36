"""flowrl and TRL side by side: the same GRPO step on one CPU thread each, in turns.

    make bench-trl                                       # both cases, figures in benchmarks/results
    python benchmarks/vs_trl_cpu.py --cases b --blocks 2 --steps 1

Both start from the same weights and make the same number of updates on the same prompts, 64 a step
in groups of 8, one update of 512 samples a step, no KL term, temperature 1, every group trained
(the reward differs between almost any two responses). The learning rate is so small that lengths
stay as they are. flowrl runs as a user's run does, through the public API, with its scheduler,
scoring process and sample log. Each side is a process of its own, in its own environment; they make
blocks of steps in turns, the other one waiting, so that a machine's moods reach both.

- Case a: hidden 64, 2 layers, at most 4 tokens.
- Case b: hidden 128, 4 layers, a vocabulary of 32 with end of text, so that random weights end a
  response with probability 1/32 at each token: mean about 31 tokens, at most 128.

A step's wall time runs from the end of the last step to the end of this one, with everything in
between. `update` is forward, backward and optimizer; `rest` is what no other stage holds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import IO, Any

from arguments import result_file, result_folder
from flowrl.backend.protocols import PolicyContext
from flowrl.config.roles import CharTokenizer, FreshModel, RoleConfig
from flowrl.data import prepare_model_folder
from flowrl.ids import RoleName

HERE = Path(__file__).parent
_ABOUT = """\
Machine: {machine}. One update of 512 samples a step; milliseconds, medians over steps.
CPU is the processor time of the process, which other work on the machine disturbs less (that of
flowrl's scoring process is not in it). The ratio is TRL's median over flowrl's, with the quartiles
of the ratios of neighbouring turns.

| case | | step | CPU | {stages} | samples/s | tokens a sample | ratio | of CPU |
|---|---|---|---|---|---|---|---|---|---|---|---|""".replace(
    "{stages}", "generate | score | update | rest"
)
STAGES = ("generate", "score", "update", "rest")
PROMPTS, GROUP_SIZE, LEARNING_RATE = 64, 8, 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, a length of responses, and the settings that were found best for each side."""

    about: str
    model: FreshModel
    alphabet: str
    prompt_tokens: int
    max_tokens: int
    flowrl_micro_batch: int
    num_slots: int
    trl_micro_batch: int
    trl_options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "a": Case(
        about="hidden 64, 2 layers, at most 4 tokens",
        model=FreshModel(
            hidden_size=64, num_layers=2, num_heads=4, intermediate_size=160, max_length=32
        ),
        alphabet="0123456789+=abc",
        prompt_tokens=6,
        max_tokens=4,
        flowrl_micro_batch=256,
        num_slots=512,
        trl_micro_batch=512,
    ),
    "b": Case(
        about="hidden 128, 4 layers, lengths by end of text, at most 128 tokens",
        model=FreshModel(
            hidden_size=128, num_layers=4, num_heads=4, intermediate_size=344, max_length=160
        ),
        alphabet="abcdefghijklmnopqrstuvwxyz01234",
        prompt_tokens=8,
        max_tokens=128,
        flowrl_micro_batch=64,
        num_slots=512,
        trl_micro_batch=64,
    ),
}


class Side:
    """A process that makes steps when told to."""

    def __init__(self, name: str, python: Path, spec: Path, errors: IO[bytes]) -> None:
        self.name = name
        self.rows: list[dict[str, Any]] = []
        self._process = subprocess.Popen(
            [str(python), str(HERE / "vs_trl" / f"{name}_side.py"), str(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        self._hear()

    def steps(self, num: int, *, warm_up: bool = False) -> None:
        """Has it make `num` steps; those of the warm-up are not counted."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{num}\n")
        self._process.stdin.flush()
        message = self._hear()
        if not warm_up:
            self.rows += message["rows"]

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with code {self._process.wait()}; see its output")
        message: dict[str, Any] = json.loads(line)
        return message


def make_model(case: Case, folder: Path) -> Path:
    """A Hugging Face folder with random weights, which both sides load."""
    from flowrl_backends.torch.trainer import TorchTrainer

    role = RoleConfig(
        model=case.model, tokenizer=CharTokenizer(kind="char", alphabet=case.alphabet)
    )
    fresh = prepare_model_folder(role, folder / "fresh", [])
    context = PolicyContext(
        role=RoleName("actor"),
        model=fresh,
        fresh=True,
        device="cpu",
        dtype="float32",
        seed=0,
        num_slots=1,
        max_length=case.model.max_length,
        trainable=False,
        stop_token_ids=(),
        num_threads=1,
    )
    TorchTrainer(context).export(folder / "model")
    return folder / "model"


def make_prompts(case: Case, path: Path, num: int = 4096) -> Path:
    """Different prompts of equal length, so that TRL pads none."""
    draw = random.Random(0)
    texts = {"".join(draw.choices(case.alphabet, k=case.prompt_tokens)) for _ in range(num)}
    rows = [json.dumps({"prompt": text, "answer": ""}) for text in sorted(texts)]
    path.write_text("\n".join(rows), encoding="utf-8")
    return path


def measure(name: str, case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Both sides in turns; the case's part of the results file."""
    with tempfile.TemporaryDirectory() as temporary, args.output.open("ab") as errors:
        folder = Path(temporary)
        spec = asdict(case) | {
            "model": str(make_model(case, folder)),
            "data": str(make_prompts(case, folder / "prompts.jsonl")),
            "runs": str(folder / "runs"),
            "prompts": PROMPTS,
            "group_size": GROUP_SIZE,
            "learning_rate": LEARNING_RATE,
            "steps": args.warm_up + args.blocks * args.steps[name] + 1,
        }
        path = folder / "spec.json"
        path.write_text(json.dumps(spec), encoding="utf-8")
        pythons = {"flowrl": Path(sys.executable), "trl": args.trl_python.absolute()}
        sides = [Side(side, pythons[side], path, errors) for side in args.sides]
        for side in sides:
            side.steps(args.warm_up, warm_up=True)
        for _ in range(args.blocks):
            for side in sides:
                side.steps(args.steps[name])
        for side in sides:
            side.close()
    result: dict[str, Any] = {
        "about": case.about,
        "settings": {
            key: spec[key]
            for key in ("flowrl_micro_batch", "num_slots", "trl_micro_batch", "trl_options")
        },
        **{side.name: summary(side.rows) for side in sides},
    }
    if len(sides) == 2:
        ours, theirs = (block_walls(side.rows, args.steps[name]) for side in sides)
        ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
        result["ratio"] = result["trl"]["step_s"] / result["flowrl"]["step_s"]
        result["ratio_of_cpu"] = result["trl"]["step_cpu_s"] / result["flowrl"]["step_cpu_s"]
        result["ratio_of_blocks"] = quartiles(ratios)
    return result


def block_walls(rows: Sequence[dict[str, Any]], size: int) -> list[float]:
    """Median step of each block."""
    walls = [row["wall"] for row in rows]
    return [median(walls[i : i + size]) for i in range(0, len(walls), size)]


def quartiles(values: Sequence[float]) -> list[float]:
    """25 %, 50 %, 75 %."""
    return list(values) * 3 if len(values) == 1 else quantiles(values, n=4, method="inclusive")


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over steps."""
    walls = [row["wall"] for row in rows]
    return {
        "steps": len(rows),
        "step_s": median(walls),
        "step_cpu_s": median(row["cpu"] for row in rows),
        "quartiles_s": quartiles(walls),
        "stages_s": {s: median(row["stages"][s] for row in rows) for s in STAGES},
        "samples_per_s": median(row["samples"] / row["wall"] for row in rows),
        "tokens_per_s": median(row["tokens"] / row["wall"] for row in rows),
        "length_mean": sum(row["tokens"] for row in rows) / sum(row["samples"] for row in rows),
        "length_max": max(row["longest"] for row in rows),
        "reward_mean": sum(row["reward"] for row in rows) / len(rows),
    }


def table(results: dict[str, Any]) -> str:
    """What is printed and written beside the JSON."""
    lines = [_ABOUT.format(**results)]
    for name, case in results["cases"].items():
        for side in ("flowrl", "trl"):
            if side not in case:
                continue
            row = case[side]
            cells = [name, side]
            seconds = [row["step_s"], row["step_cpu_s"], *(row["stages_s"][s] for s in STAGES)]
            cells += [f"{1e3 * value:.1f}" for value in seconds]
            cells += [f"{row['samples_per_s']:.0f}", f"{row['length_mean']:.1f}"]
            if side == "flowrl" and "ratio" in case:
                low, _, high = case["ratio_of_blocks"]
                cells.append(f"**{case['ratio']:.2f}** ({low:.2f} to {high:.2f})")
                cells.append(f"{case['ratio_of_cpu']:.2f}")
            else:
                cells += ["", ""]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def machine() -> str:
    """What it ran on, without names."""
    from importlib.metadata import version

    model = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    return f"{os.cpu_count()} cores ({model}), one thread a side, torch {version('torch')}, fp32"


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", nargs="+", default=["a", "b"], choices=CASES)
    parser.add_argument("--blocks", type=int, default=9, help="turns of each side")
    parser.add_argument("--steps", type=int, help="steps a turn (10 in a, 1 in b)")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before the first turn")
    parser.add_argument("--sides", nargs="+", default=["flowrl", "trl"], choices=["flowrl", "trl"])
    parser.add_argument("--trl-python", type=Path, default=Path(".venv-trl/bin/python"))
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=JSON", help="of a case")
    parser.add_argument("--output", type=result_file, default=os.devnull, help="the sides' output")
    parser.add_argument("--results", type=result_folder, help="folder for vs_trl_cpu.json and .md")
    args = parser.parse_args()
    args.steps = {"a": args.steps or 10, "b": args.steps or 1}
    changes = {key: json.loads(text) for key, text in (x.split("=", 1) for x in args.set)}
    results: dict[str, Any] = {"machine": machine(), "cases": {}}
    for name in args.cases:
        case = CASES[name]
        values = {key: getattr(case, key) for key in case.__slots__} | changes
        results["cases"][name] = measure(name, Case(**values), args)
    print(table(results), end="")
    if args.results:
        text = json.dumps(results, indent=2) + "\n"
        (args.results / "vs_trl_cpu.json").write_text(text, encoding="utf-8")
        (args.results / "vs_trl_cpu.md").write_text(table(results), encoding="utf-8")


if __name__ == "__main__":
    main()
