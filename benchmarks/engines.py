"""Decoding speed of an engine's plug-in and of torch's, in turns, through the same protocol.

Responses have `--tokens` tokens each; the model has about a million parameters and random weights.
A ratio is the median over repetitions of ratios within one.

    python benchmarks/engines.py sglang --options '{"python": "ENVIRONMENT/bin/python"}'
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from flowrl.backend.protocols import Finished, GenerateBackend, GenerateRequest, PolicyContext
from flowrl.backend.registry import find
from flowrl.ids import RoleName, SampleId
from flowrl.specs import Sampling
from flowrl.testing.reference_model import make_model


def open_engine(
    plugin: str, model: Path, options: dict[str, object], slots: int, length: int
) -> GenerateBackend:
    """Opens an engine that serves the weights of a folder."""
    context = PolicyContext(
        role=RoleName("actor"),
        model=model,
        fresh=False,
        device="cpu",
        dtype="float32",
        seed=0,
        num_slots=slots,
        max_length=length,
        trainable=False,
        stop_token_ids=(),
        options=options,
    )
    return find(plugin).open_generate(context, None)


def tokens_per_s(engine: GenerateBackend, first: int, batch: int, num_tokens: int) -> float:
    """Generates a batch of prompts of 16 tokens that the engine has not seen."""
    rng = np.random.default_rng(first)
    began = time.perf_counter()
    engine.submit(
        [
            GenerateRequest(
                sample=SampleId(f"0/{first + i}/0"),
                attempt=0,
                prompt=rng.integers(16, 2048, 16),
                response=np.zeros(0, np.int64),
                sampling=Sampling(max_tokens=num_tokens),
                seed=first + i,
                shares_prompt=f"0/{first + i}",
            )
            for i in range(batch)
        ]
    )
    num_done = ended = 0
    while ended < batch:
        for output in engine.poll(1.0):
            if isinstance(output, Finished):
                ended += 1
                num_done += len(output.tokens)
    return num_done / (time.perf_counter() - began)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plugin")
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    shape = {"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 352}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model", vocab_size=2048, **shape)
        length = 16 + arguments.tokens
        for batch in arguments.batches:
            began = time.perf_counter()
            other = open_engine(arguments.plugin, model, arguments.options, batch, length)
            open_s = time.perf_counter() - began
            engines = {"torch": open_engine("torch", model, {}, batch, length), "other": other}
            rates: dict[str, list[float]] = {name: [] for name in engines}
            for repetition in range(arguments.repetitions + 1):
                for name, engine in engines.items():
                    rate = tokens_per_s(engine, repetition * batch, batch, arguments.tokens)
                    if repetition:  # the first warms up
                        rates[name].append(rate)
            for engine in engines.values():
                engine.close()
            ratio = statistics.median(
                b / a for a, b in zip(rates["torch"], rates["other"], strict=True)
            )
            torch_rate, other_rate = (statistics.median(rates[name]) for name in engines)
            print(
                f"batch {batch}: torch {torch_rate:,.0f} tokens/s, {arguments.plugin} "
                f"{other_rate:,.0f}, ratio {ratio:.2f}; opened in {open_s:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
