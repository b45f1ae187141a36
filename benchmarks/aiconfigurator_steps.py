"""Writes engine steps of AIConfigurator's database, in the form that `predict_published.py` reads.

    pip install 'flowrl[aiconfigurator]'
    python benchmarks/aiconfigurator_steps.py OUT.json [--systems ...] [--models ...]

Rows are those that no constant was calibrated on unless they are asked for: other devices, other
models, other layouts. A row is left out where weights and cache would not fit 85 % of the device,
and where the database has no such point.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from arguments import json_file
from flowrl.cluster.hardware import Machine, device_spec
from flowrl.cost.aiconfigurator import SYSTEMS, AIConfiguratorCost, packaged_models
from flowrl.cost.analytic import AnalyticCost
from flowrl.cost.layout import Layout
from flowrl.cost.models import ModelShape
from flowrl.cost.role_memory import kv_bytes_per_token
from flowrl.cost.sharding import stage_parameters
from flowrl.files import write_result

BATCHES = (1, 8, 32, 64, 128, 256, 512)
CONTEXTS = (512, 2048, 8192, 16384)
PROMPTS = ((1, 512), (1, 2048), (1, 8192), (8, 2048))
MODELS = (
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-32B",
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-235B-A22B",
    "meta-llama/Meta-Llama-3.1-8B",
    "meta-llama/Meta-Llama-3.1-70B",
)
PUBLISHED = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B")
"""Whose steps on H100 are published already."""


def layouts(shape: ModelShape) -> Iterator[Layout]:
    """Up to 8 devices: divided by tensor ranks, and with whole experts on ranks."""
    for tp in (1, 2, 4, 8):
        yield Layout(tp=tp)
        if shape.experts is not None and tp > 1:
            yield Layout(tp=tp, ep=tp)


def rows_of(
    cost: AIConfiguratorCost, shape: ModelShape, name: str, device: str, layout: Layout
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Decode and prefill rows of one engine."""
    machine = Machine(spec=device_spec(device), node_size=8)
    (stage,) = stage_parameters(shape, layout.tp, 1, layout.ep)
    room = machine.spec.memory_bytes * 0.85 - 2 * stage.total
    token = kv_bytes_per_token(shape, layout, "bfloat16")
    moe = {"moe_tp": layout.tp // layout.ep, "moe_ep": layout.ep}
    head = {
        "system": SYSTEMS[device],
        "model": name.removeprefix("meta-llama/Meta-"),
        "tp": layout.tp,
        "moe": None if shape.experts is None else moe,
    }
    decode, prefill = [], []
    for batch in BATCHES:
        for context in CONTEXTS:
            if batch * context * token > room:
                continue
            step = cost.decode_step(shape, layout, machine, batch=batch, context=context)
            if step.source == "aiconfigurator":
                row = {"batch": batch, "context": context, "step_ms": round(step.seconds * 1e3, 4)}
                decode.append({**head, **row})
    for rows, tokens in PROMPTS if room > 0 else ():
        found = cost.prefill(shape, layout, machine, rows=rows, tokens=tokens)
        if found.source == "aiconfigurator":
            row = {"batch": rows, "input_len": tokens, "prefill_ms": round(found.seconds * 1e3, 4)}
            prefill.append({**head, **row})
    return decode, prefill


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the file."""
    parser = argparse.ArgumentParser(description="Engine steps of AIConfigurator's database.")
    parser.add_argument("output", type=json_file)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--published-too", action="store_true", help="rows of H100 that are known")
    options = parser.parse_args(argv)
    names = packaged_models()
    shapes = {name: shape for shape, name in names.items()}
    cost = AIConfiguratorCost(AnalyticCost(), names=names, host_s=0.0)
    decode: list[dict[str, Any]] = []
    prefill: list[dict[str, Any]] = []
    for device in options.systems:
        for name in options.models:
            if device.startswith("H100") and name in PUBLISHED and not options.published_too:
                continue
            for layout in layouts(shapes[name]):
                more, prompts = rows_of(cost, shapes[name], name, device, layout)
                decode += more
                prefill += prompts
    source = "AIConfigurator, from measured kernels"
    document = {"source": source, "decode": decode, "prefill": prefill}
    write_result(options.output, json.dumps(document, indent=1) + "\n")
    print(f"{options.output}: {len(decode)} decode steps, {len(prefill)} prefills")
    return 0


if __name__ == "__main__":
    sys.exit(main())
