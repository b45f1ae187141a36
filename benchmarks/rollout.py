"""What scheduling each sample by itself is worth, on the torch engine and this machine.

    python benchmarks/rollout.py [--samples 2048] [--slots 16] [--repeats 2] [--output FILE]
    python benchmarks/rollout.py --parts sizes --sizes 768    # part of it; the file keeps the rest

So many samples are drawn on so many slots, with log-normal lengths (sigma 1.2) that are the same
for every contender, token by token from a real decoder. Contenders, in the same process:

- `batches`: the baseline. A batch-synchronous rollout that takes as many samples as there are
  slots, drops finished rows from its batch, and begins the next batch when the last row has ended.
- `per_sample`: the rollout scheduler; a freed slot takes the next sample at once.

Ratios are of samples a second, each within one repetition; the median of them is told. The
contenders run by turns of half a second, the one that is less far first, so that what slows the
machine down for a while slows both. Seconds are of the processor: engine and scheduler work in one
thread and wait for nothing, so they are those of the clock where nothing else runs. Decode steps
are calls of the decoder for one token of every running row. No schedule that never leaves a slot
empty while a sample waits needs more than `sum(lengths) / slots + max(lengths)` of them (Graham,
1966).

The second part repeats this over decoders of several sizes, with fewer and shorter samples, beside
what a step of 1, 4 and 16 rows of equal length costs. A step of many rows costs as much as one of
few where it is bound by reading the weights, as steps of large decoders are; the less it costs, the
more it is worth to have no slot empty.

The third part is of lengths that can be predicted: those of a prompt's answers differ by up to 5
percent from its own usual one, and from epoch to epoch alike. One epoch teaches the predictor;
steps of the next one are compared with longest-first by lengths that are known (list scheduling by
falling length, computed), and with the order of the prompts.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from arguments import json_file
from flowrl.backend.protocols import Finished, GenerateRequest, PolicyContext, Progress
from flowrl.files import write_result
from flowrl.ids import EngineId, GroupId, RoleName, SampleId, group_id, sample_id
from flowrl.rollout.actions import Abort, Action, Deliver, Score, Submit
from flowrl.rollout.events import (
    BatchAsked,
    EngineJoined,
    Event,
    Progressed,
    PromptsOffered,
    SampleEnd,
    SamplesFinished,
    SamplesScored,
)
from flowrl.rollout.policies.engines import FirstOffered, LongestFirst, OrderPolicy
from flowrl.rollout.scheduler import RolloutScheduler
from flowrl.rollout.settings import SchedulerSettings
from flowrl.specs import Sampling
from flowrl_backends.torch.engine import TorchEngine

GROUP_SIZE = 8
SIGMA = 1.2
PROMPT_TOKENS = 4
VOCABULARY = 2048
ENGINE = EngineId("engine[0]")
TURN_S = 0.5
PARTS = ("scheduling", "sizes", "orders")

Lengths: TypeAlias = Mapping[SampleId, int]
"""Response tokens of each sample, in the order of the prompts."""


class CountingEngine(TorchEngine):
    """Counts its decode steps.

    Args:
        hidden: Width of its Qwen2 of four layers; 256 are 3.3 million parameters.
    """

    def __init__(self, slots: int, max_length: int, hidden: int) -> None:
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=2,
            intermediate_size=11 * hidden // 4,
            max_position_embeddings=max_length,
            tie_word_embeddings=True,
        )
        context = PolicyContext(
            role=RoleName("actor"),
            model=Path(),
            fresh=True,
            device="cpu",
            dtype="float32",
            seed=0,
            num_slots=slots,
            max_length=max_length,
            trainable=False,
            stop_token_ids=(),
        )
        model = Qwen2ForCausalLM(config).eval()
        super().__init__(context, model, shares_weights=False)
        self.num_steps = 0
        self.num_parameters = model.num_parameters()

    def _step(self) -> None:
        self.num_steps += 1
        super()._step()


def request(sample: SampleId, attempt: int, length: int) -> GenerateRequest:
    """A request for exactly so many tokens."""
    group = sample.rpartition("/")[0]
    number = int(group.rpartition("/")[2])
    prompt = np.random.default_rng(number).integers(0, VOCABULARY, PROMPT_TOKENS)
    return GenerateRequest(
        sample=sample,
        attempt=attempt,
        prompt=prompt.astype(np.int64),
        response=np.zeros(0, np.int64),
        sampling=Sampling(max_tokens=length),
        seed=number,
        shares_prompt=group,
    )


# Contenders


def run_batches(engine: CountingEngine, lengths: Lengths) -> Iterator[float]:
    """A batch after the other, each until its longest sample has ended; the share that has."""
    names, done = list(lengths), 0
    for begin in range(0, len(names), engine.num_slots):
        batch = names[begin : begin + engine.num_slots]
        engine.submit([request(sample, 0, lengths[sample]) for sample in batch])
        left = len(batch)
        while left:
            ended = sum(isinstance(output, Finished) for output in engine.poll(60.0))
            left, done = left - ended, done + ended
            yield done / len(names)


class PerSample:
    """The rollout scheduler over one engine; epochs follow each other, one batch each."""

    def __init__(self, engine: CountingEngine, order: OrderPolicy) -> None:
        self._engine = engine
        self._scheduler = RolloutScheduler(SchedulerSettings(group_size=GROUP_SIZE, order=order))
        self._event = 0
        self._lengths: Lengths = {}
        self._delivered: list[Deliver] = []
        # Twice the slots, as the executor gives, so that a freed one is filled within the engine.
        self._tell(lambda n: EngineJoined(id=n, engine=ENGINE, capacity=2 * engine.num_slots))

    def run(self, lengths: Lengths) -> Iterator[float]:
        """Draws one batch of all these samples; the share that has ended."""
        self._lengths = lengths
        groups = tuple(dict.fromkeys(GroupId(name.rpartition("/")[0]) for name in lengths))
        batch = len(self._delivered)
        self._tell(lambda n: PromptsOffered(id=n, groups=groups))
        self._tell(lambda n: BatchAsked(id=n, batch=batch, groups=len(groups)))
        done = 0
        while len(self._delivered) == batch:
            outputs = self._engine.poll(60.0)
            self._report(outputs)
            done += sum(isinstance(output, Finished) for output in outputs)
            yield done / len(lengths)
        assert sum(len(group.samples) for group in self._delivered[-1].groups) == len(lengths)

    def _report(self, outputs: Sequence[Progress | Finished]) -> None:
        progress = tuple(
            (o.sample, o.attempt, o.num_tokens) for o in outputs if isinstance(o, Progress)
        )
        if progress:
            self._tell(lambda n: Progressed(id=n, engine=ENGINE, progress=progress))
        ends = tuple(
            SampleEnd(
                sample=o.sample,
                attempt=o.attempt,
                reason=o.reason,
                num_tokens=len(o.tokens),
                versions=o.versions,
            )
            for o in outputs
            if isinstance(o, Finished)
        )
        if ends:
            self._tell(lambda n: SamplesFinished(id=n, engine=ENGINE, ends=ends))

    def _tell(self, make: Callable[[int], Event]) -> None:
        event = make(self._event)
        self._event += 1
        for action in self._scheduler.step(event):
            self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case Submit(samples=dispatches):
                self._engine.submit(
                    [request(d.sample, d.attempt, self._lengths[d.sample]) for d in dispatches]
                )
            case Score(samples=samples):
                scores = tuple((sample, 1.0) for sample in samples)
                self._tell(lambda n: SamplesScored(id=n, scores=scores))
            case Deliver():
                self._delivered.append(action)
            case Abort():
                raise AssertionError("nothing is to be aborted here")


# Lengths


def independent_lengths(num: int, median: float, rng: random.Random) -> Lengths:
    """Log-normal, whatever the prompt."""
    return {
        sample_id(group_id(0, n // GROUP_SIZE), n % GROUP_SIZE): max(
            1, round(median * rng.lognormvariate(0.0, SIGMA))
        )
        for n in range(num)
    }


def predictable_lengths(num: int, median: float, rng: random.Random) -> list[Lengths]:
    """Two epochs of the same prompts: log-normal over prompts, and within 5 percent for each."""
    usual = [median * rng.lognormvariate(0.0, SIGMA) for _ in range(num // GROUP_SIZE)]
    return [
        {
            sample_id(group_id(epoch, prompt), member): max(
                1, round(length * rng.uniform(0.95, 1.05))
            )
            for prompt, length in enumerate(usual)
            for member in range(GROUP_SIZE)
        }
        for epoch in range(2)
    ]


def bound(lengths: Lengths, slots: int) -> float:
    """The most decode steps that a schedule without needless gaps takes."""
    return sum(lengths.values()) / slots + max(lengths.values())


def known_longest_first(lengths: Lengths, slots: int) -> int:
    """Decode steps of list scheduling in falling order of length."""
    ends = [0] * slots
    for length in sorted(lengths.values(), reverse=True):
        heapq.heappush(ends, heapq.heappop(ends) + length)
    return max(ends)


# Measuring


def timed(engine: CountingEngine, act: Callable[[], None]) -> tuple[float, int]:
    """Seconds and decode steps."""
    steps, began = engine.num_steps, time.process_time()
    act()
    return time.process_time() - began, engine.num_steps - steps


def by_turns(contenders: Mapping[str, Iterator[float]]) -> dict[str, float]:
    """Seconds of each contender, run to its end."""
    seconds, done = dict.fromkeys(contenders, 0.0), dict.fromkeys(contenders, 0.0)
    while min(done.values()) < 1.0:
        name = min(done, key=lambda name: done[name])
        spent, began = 0.0, time.process_time()
        while spent < TURN_S and done[name] < 1.0:
            done[name] = next(contenders[name])
            spent = time.process_time() - began
        seconds[name] += spent
    for contender in contenders.values():
        assert next(contender, None) is None
    return seconds


def compare(
    slots: int, hidden: int, num: int, median: float, repeats: int
) -> tuple[CountingEngine, dict[str, int | float | list[float]]]:
    """Both contenders on independent lengths; one of their engines."""
    lengths = independent_lengths(num, median, random.Random(0))
    batches, per_sample = (CountingEngine(slots, 4096, hidden) for _ in range(2))
    print(f"{batches.num_parameters} parameters", flush=True)
    for engine in (batches, per_sample):  # warm
        exhaust(run_batches(engine, dict(list(lengths.items())[: 2 * slots])))
    seconds: dict[str, list[float]] = {"batches": [], "per_sample": []}
    steps: dict[str, int] = {}
    for _ in range(repeats):
        before = batches.num_steps, per_sample.num_steps
        spent = by_turns(
            {
                "batches": run_batches(batches, lengths),
                "per_sample": PerSample(per_sample, FirstOffered()).run(lengths),
            }
        )
        steps["batches"] = batches.num_steps - before[0]
        steps["per_sample"] = per_sample.num_steps - before[1]
        for name, times in seconds.items():
            times.append(spent[name])
            print(f"{name}: {spent[name]:.1f} s, {steps[name]} decode steps", flush=True)
    ratios = [b / p for b, p in zip(seconds["batches"], seconds["per_sample"], strict=True)]
    limit = bound(lengths, slots)
    assert steps["per_sample"] <= limit
    return batches, {
        "batches_samples_per_s": round(num / statistics.median(seconds["batches"]), 1),
        "per_sample_samples_per_s": round(num / statistics.median(seconds["per_sample"]), 1),
        "ratio": round(statistics.median(ratios), 2),
        "ratios": [round(ratio, 2) for ratio in ratios],
        "tokens": sum(lengths.values()),
        "longest": max(lengths.values()),
        "batches_decode_steps": steps["batches"],
        "per_sample_decode_steps": steps["per_sample"],
        "bound_decode_steps": round(limit),
    }


def exhaust(contender: Iterator[float]) -> None:
    """Runs it to its end."""
    for _ in contender:
        pass


def step_ms(engine: CountingEngine, rows: int) -> float:
    """Milliseconds of a decode step of so many rows of 4 to 68 tokens; the least of five."""
    lengths = {sample_id(group_id(0, n // GROUP_SIZE), n % GROUP_SIZE): 65 for n in range(rows)}

    def decode() -> None:
        engine.submit([request(sample, 0, length) for sample, length in lengths.items()])
        while sum(isinstance(output, Finished) for output in engine.poll(60.0)) == 0:
            pass

    return min(
        1e3 * seconds / steps for seconds, steps in (timed(engine, decode) for _ in range(5))
    )


def compare_sizes(
    widths: Sequence[int], slots: int, num: int, median: float
) -> dict[str, dict[str, object]]:
    """The comparison over decoders of several widths, by their parameters."""
    found: dict[str, dict[str, object]] = {}
    for width in widths:
        engine, result = compare(slots, width, num, median, 1)
        found[str(engine.num_parameters)] = {
            "hidden": width,
            "samples": num,
            "median_tokens": median,
            "step_ms": {str(rows): round(step_ms(engine, rows), 2) for rows in (1, 4, slots)},
            **{
                name: result[name]
                for name in (
                    "ratio",
                    "batches_samples_per_s",
                    "per_sample_samples_per_s",
                    "batches_decode_steps",
                    "per_sample_decode_steps",
                )
            },
        }
    return found


def compare_orders(engine: CountingEngine, num: int, median: float) -> dict[str, int | float]:
    """Decode steps of a batch whose lengths one epoch has taught."""
    first, second = predictable_lengths(num, median, random.Random(1))
    learned = PerSample(engine, LongestFirst())
    exhaust(learned.run(first))
    _, steps = timed(engine, lambda: exhaust(learned.run(second)))
    in_turn = PerSample(engine, FirstOffered())
    _, in_order = timed(engine, lambda: exhaust(in_turn.run(second)))
    known = known_longest_first(second, engine.num_slots)
    assert max(steps, in_order) <= bound(second, engine.num_slots)
    return {
        "longest_first_decode_steps": steps,
        "known_lengths_decode_steps": known,
        "over_known_lengths": round(steps / known, 4),
        "order_of_prompts_decode_steps": in_order,
        "bound_decode_steps": round(bound(second, engine.num_slots)),
    }


def main() -> None:
    """Prints and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--predictable", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--median", type=float, default=16.0, help="of the lengths, in tokens")
    parser.add_argument("--hidden", type=int, default=256, help="width of the decoder")
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 512, 768], help="its widths")
    parser.add_argument("--size-samples", type=int, default=256)
    parser.add_argument("--size-median", type=float, default=8.0, help="of their lengths")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    results = Path(__file__).parent / "results"
    parser.add_argument("--output", type=json_file, default=str(results / "rollout.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, object] = {}
    if set(options.parts) != set(PARTS) and options.output.exists():
        result = json.loads(options.output.read_text())
    result["machine"] = {
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "threads": 1,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if "scheduling" in options.parts:
        engine, compared = compare(
            options.slots, options.hidden, options.samples, options.median, options.repeats
        )
        result["workload"] = {
            "samples": options.samples,
            "slots": options.slots,
            "sigma": SIGMA,
            "median_tokens": options.median,
            "prompt_tokens": PROMPT_TOKENS,
            "group_size": GROUP_SIZE,
            "parameters": engine.num_parameters,
        }
        result["per_sample_over_batches"] = compared
    if "sizes" in options.parts:
        sizes = result.setdefault("sizes", {})
        assert isinstance(sizes, dict)
        sizes |= compare_sizes(
            options.sizes, options.slots, options.size_samples, options.size_median
        )
    if "orders" in options.parts:
        small = CountingEngine(options.slots, 4096, 64)  # decode steps are those of any decoder
        result["predictable_lengths"] = {
            str(num): compare_orders(small, num, options.median) for num in options.predictable
        }
    text = json.dumps(result, indent=2)
    print(text)
    write_result(options.output, text + "\n")


if __name__ == "__main__":
    main()
