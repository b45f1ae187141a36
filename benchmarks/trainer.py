"""One update of the torch trainer against a plain padded training loop, alternately.

    python benchmarks/trainer.py [--rounds 5]

Both see the same weights, samples and loss, on one thread. The plain loop is what a careful person
writes: samples sorted by length, 32 a micro-batch, padded on the right, Transformers' forward, no
mask. Case a: hidden 64, 2 layers, prompts of 6 and answers of 4 tokens; `a-repeats` draws each
group's answers from few, as a trained model does. Case b: hidden 128, 4 layers, prompts of 8 and
answers of about 32 tokens, at most 128. 512 samples in groups of 8 in each. The machine may be
shared: read the ratios.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
import transformers

from flowrl.backend.batch import SequenceBatch, TrainBatch
from flowrl.backend.protocols import PolicyContext, UpdateSpec
from flowrl.ids import RoleName, SampleId
from flowrl.specs import AdamW, PolicyClip
from flowrl_backends.torch.trainer import TorchTrainer


@dataclass(frozen=True, slots=True)
class Case:
    """A model's size and a batch's shape; `entropy` is the share of answers that are random."""

    hidden: int
    layers: int
    inner: int
    vocabulary: int
    prompt: int
    mean: int
    longest: int
    entropy: float
    micro_batch: int


CASES = {
    "a": Case(64, 2, 160, 16, 6, 4, 4, 1.0, 128),
    "a-repeats": Case(64, 2, 160, 16, 6, 4, 4, 0.3, 128),
    "b": Case(128, 4, 344, 64, 8, 32, 128, 1.0, 64),
}


def make_batch(case: Case) -> SequenceBatch:
    """512 samples in 64 groups."""
    draw = np.random.default_rng(0)
    tokens, mask, lengths = [], [], []
    for _ in range(64):
        prompt = draw.integers(2, case.vocabulary, case.prompt)
        usual = draw.integers(2, case.vocabulary, case.longest)
        for _ in range(8):
            fixed = case.mean == case.longest
            drawn = case.mean if fixed else int(draw.exponential(1.05 * case.mean))
            length = min(max(drawn, 1), case.longest)
            answer = usual[:length]
            if draw.random() < case.entropy:
                answer = draw.integers(2, case.vocabulary, length)
            tokens += [prompt, answer]
            mask += [np.zeros(len(prompt), bool), np.ones(length, bool)]
            lengths.append(len(prompt) + length)
    return SequenceBatch(
        samples=tuple(SampleId(f"0/{i // 8}/{i % 8}") for i in range(512)),
        tokens=np.concatenate(tokens),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        response_mask=np.concatenate(mask),
        groups=np.repeat(np.arange(64), 8),
    )


def plain_update(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: TrainBatch
) -> None:
    """The plain loop: length-sorted, right-padded micro-batches of 32."""
    rows = batch.sequences
    assert batch.advantages is not None
    assert batch.behaviour_logprobs is not None
    order = np.argsort(rows.lengths, kind="stable")
    total = float(rows.response_mask.sum())
    for begin in range(0, len(order), 32):
        part = order[begin : begin + 32]
        width = int(rows.lengths[part].max())
        column = np.arange(width)
        valid = column < rows.lengths[part][:, None]
        places = np.where(valid, rows.offsets[part][:, None] + column, 0)
        ids, advantage, old, live = (
            torch.from_numpy(np.where(valid, values[places], 0))
            for values in (
                rows.tokens,
                batch.advantages,
                batch.behaviour_logprobs,
                rows.response_mask,
            )
        )
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        new = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        ratio = (new - old[:, 1:]).exp()
        gain = torch.minimum(ratio * advantage[:, 1:], ratio.clamp(0.8, 1.2) * advantage[:, 1:])
        (-(gain * live[:, 1:]).sum() / total).backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def open_trainers(case: Case) -> tuple[TorchTrainer, TorchTrainer]:
    """Two of one new model: flowrl's trainer, and the one whose model is trained plainly."""
    config = transformers.Qwen2Config(
        vocab_size=case.vocabulary,
        hidden_size=case.hidden,
        num_hidden_layers=case.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=case.inner,
        tie_word_embeddings=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        context = PolicyContext(
            role=RoleName("actor"),
            model=Path(folder),
            fresh=True,
            device="cpu",
            dtype="float32",
            seed=0,
            num_slots=1,
            max_length=256,
            trainable=True,
            stop_token_ids=(1,),
        )
        return TorchTrainer(context), TorchTrainer(context)


def compare(name: str, case: Case, rounds: int) -> None:
    """Times both on one case and prints a line."""
    trainer, other = open_trainers(case)
    trainer.begin(AdamW(learning_rate=0.0), 1000)
    optimizer = torch.optim.AdamW(other.model.parameters(), lr=0.0)
    rows = make_batch(case)
    advantages = np.repeat(np.random.default_rng(1).normal(size=512), rows.lengths)
    batch = TrainBatch(
        sequences=rows,
        behaviour_logprobs=trainer.logprobs(rows, 1.0),
        advantages=(advantages * rows.response_mask).astype(np.float32),
    )
    spec = UpdateSpec(
        loss=PolicyClip(),
        kl=None,
        temperature=1.0,
        mini_batches=(tuple(range(512)),),
        micro_batch=case.micro_batch,
        max_tokens=case.longest,
    )
    runs: dict[str, Callable[[], object]] = {
        "flowrl": lambda: trainer.update(batch, spec),
        "plain": lambda: plain_update(other.model, optimizer, batch),
        "logprobs": lambda: trainer.logprobs(rows, 1.0),
    }
    times: dict[str, list[float]] = {run: [] for run in runs}
    for round_ in range(rounds + 1):
        for run, function in runs.items():
            begin = time.perf_counter()
            function()
            if round_:  # the first one warms up
                times[run].append(time.perf_counter() - begin)
    positions = int(trainer.update(batch, spec)[0].metrics["positions"])
    ratio = median(p / f for p, f in zip(times["plain"], times["flowrl"], strict=True))
    print(
        f"{name:10} {len(rows.tokens):6} tokens, {positions:6} positions: "
        f"flowrl {min(times['flowrl']):.3f} s, plain {min(times['plain']):.3f} s, "
        f"ratio {ratio:.2f}; logprobs {min(times['logprobs']):.3f} s"
    )


def main() -> None:
    """Runs every case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds: int = parser.parse_args().rounds
    torch.set_num_threads(1)
    for name, case in CASES.items():
        compare(name, case, rounds)


if __name__ == "__main__":
    main()
