"""The promises of a `TrainBackend`, each as a check that says what a broken one does to a run."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

from flowrl.backend.batch import SequenceBatch, TrainBatch
from flowrl.backend.plugin import Plugin, Service
from flowrl.backend.protocols import OptimizerStep, TrainBackend, UpdateSpec
from flowrl.ids import SampleId
from flowrl.specs import AdamW
from flowrl.specs.loss import cross_entropy
from flowrl.testing.checked_engine import CheckedEngine, CheckFailed, Models
from flowrl.testing.engine_checks import NotDeclared
from flowrl.testing.reference_model import ReferenceModel, make_model, reference_of

_ADAMW = AdamW(learning_rate=1e-3, eps=1e-3, max_grad_norm=0.0)
"""A large `eps`, so that a first update is not the sign of the gradient."""

_LARGE_VOCABULARY, _MANY_TOKENS = 151_936, 6144


@contextmanager
def _opened(plugin: Plugin, models: Models, folder: Path | None = None) -> Iterator[TrainBackend]:
    context = replace(models.context, trainable=True, model=folder or models.first)
    trainer = plugin.open_train(context)
    try:
        trainer.begin(_ADAMW, 8)
        yield trainer
    finally:
        trainer.close()
        trainer.close()


def _batch(vocab_size: int, *, samples: int = 8, most: int = 40) -> SequenceBatch:
    """Samples in groups of 2 with equal prompts; one response has a hole in its mask."""
    rng = np.random.default_rng(3)
    tokens, mask, offsets = [], [], [0]
    for sample in range(samples):
        prompt = np.random.default_rng(sample // 2).integers(16, vocab_size, 5 + sample // 2)
        response = rng.integers(16, vocab_size, rng.integers(1, most + 1))
        counted = np.ones(len(response), np.bool_)
        counted[2:4] = sample != 1
        tokens += [prompt, response]
        mask += [np.zeros(len(prompt), np.bool_), counted]
        offsets.append(offsets[-1] + len(prompt) + len(response))
    return SequenceBatch(
        samples=tuple(SampleId(f"0/{i // 2}/{i % 2}") for i in range(samples)),
        tokens=np.concatenate(tokens).astype(np.int64),
        offsets=np.array(offsets, np.int64),
        response_mask=np.concatenate(mask),
        groups=np.arange(samples, dtype=np.int64) // 2,
    )


def _rows(batch: SequenceBatch) -> Iterator[tuple[slice, np.ndarray]]:
    for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        yield slice(int(start), int(end)), batch.tokens[start:end]


def _update(trainer: TrainBackend, batch: SequenceBatch, *, micro_batch: int = 4) -> OptimizerStep:
    spec = UpdateSpec(
        loss=cross_entropy(),
        kl=None,
        temperature=1.0,
        mini_batches=(tuple(range(len(batch))),),
        micro_batch=micro_batch,
        max_tokens=64,
    )
    (step,) = trainer.update(TrainBatch(sequences=batch), spec)
    return step


def _weights(trainer: TrainBackend) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as name:
        trainer.export(Path(name))
        return dict(ReferenceModel(Path(name)).model.state_dict())


def _logprobs(plugin: Plugin, models: Models) -> str:
    batch, worst = _batch(reference_of(models.first).model.config.vocab_size), 0.0
    with _opened(plugin, models) as trainer:
        for temperature in (1.0, 0.7):
            worst = max(worst, _require_close(trainer, models, batch, models.first, temperature))
    return f"8 samples at two temperatures, largest difference {worst:.1g}"


def _require_close(
    trainer: TrainBackend, models: Models, batch: SequenceBatch, folder: Path, temperature: float
) -> float:
    """Returns the largest difference of a trainer's logprobs from those of the model in `folder`.

    Raises:
        CheckFailed: It exceeds the tolerance.
    """
    reference, worst = ReferenceModel(folder), 0.0
    found = trainer.logprobs(batch, temperature)
    if found.dtype != np.float32 or found[~batch.response_mask].any():
        raise CheckFailed(
            f"logprobs are {found.dtype}, and not 0 off the responses",
            "sums over samples count tokens that the policy did not produce",
        )
    for where, tokens in _rows(batch):
        expected = reference.logprobs(tokens, 1, temperature)
        differs = np.abs(found[where][1:] - expected)[batch.response_mask[where][1:]]
        worst = max(worst, float(differs.max(initial=0.0)))
    if worst > models.tolerance:
        raise CheckFailed(
            f"logprobs differ by up to {worst:.2g} from a plain forward pass (at most "
            f"{models.tolerance:g} expected)",
            "the trainer's policy is not the one that generates: importance ratios are wrong",
        )
    return worst


def _gradients(plugin: Plugin, models: Models) -> str:
    model = ReferenceModel(models.first).model
    batch = _batch(model.config.vocab_size)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    total = torch.zeros(())
    for where, tokens in _rows(batch):
        ids = torch.from_numpy(tokens)[None]
        table = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        mask = torch.from_numpy(batch.response_mask[where][1:])
        total = total - table.gather(-1, ids[0, 1:, None])[:, 0][mask].sum()
    loss = total / int(batch.response_mask.sum())
    loss.backward()  # type: ignore[no-untyped-call]
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")))
    optimizer.step()
    with _opened(plugin, models) as trainer:
        step = _update(trainer, batch)
        after = _weights(trainer)
    close = 1e-4 if models.context.dtype == "float32" else 0.05
    for name, found, expected in (
        ("loss", step.loss, float(loss.detach())),
        ("gradient norm", step.grad_norm, norm),
    ):
        if abs(found - expected) > close * abs(expected):
            raise CheckFailed(
                f"the {name} of an update is {found:.6g}, and {expected:.6g} in plain torch",
                "the policy is not updated as the workflow says",
            )
    moved = _distance(after, before)
    wrong = _distance(after, dict(model.state_dict()))
    if wrong > 20 * close * moved:
        raise CheckFailed(
            f"weights after one AdamW update differ by {wrong:.2g} (norm) from plain torch's, "
            f"after moving by {moved:.2g}",
            "the policy is not updated as the workflow says",
        )
    return f"loss {step.loss:.4g}, gradient norm {step.grad_norm:.4g}, as plain torch"


def _distance(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    squares = (float((left[n].double() - right[n].double()).square().sum()) for n in left)
    return math.sqrt(sum(squares))


def _micro_batches(plugin: Plugin, models: Models) -> str:
    norms = []
    batch = _batch(reference_of(models.first).model.config.vocab_size)
    for micro_batch in (1, 3, 8):
        with _opened(plugin, models) as trainer:
            norms.append(_update(trainer, batch, micro_batch=micro_batch).grad_norm)
    spread = (max(norms) - min(norms)) / max(norms)
    if spread > (1e-4 if models.context.dtype == "float32" else 0.05):
        raise CheckFailed(
            f"gradient norms with micro-batches of 1, 3 and 8 samples differ by {spread:.2g} "
            "(relative)",
            "what is learned depends on the memory that a plan happens to have",
        )
    return f"micro-batches of 1, 3 and 8 samples, gradient norms within {spread:.1g}"


def _restore(plugin: Plugin, models: Models) -> str:
    batch = _batch(reference_of(models.first).model.config.vocab_size)
    with tempfile.TemporaryDirectory() as name:
        with _opened(plugin, models) as trainer:
            _update(trainer, batch)
            trainer.save(Path(name))
            _update(trainer, batch)
            expected = _weights(trainer)
        with _opened(plugin, models, models.second) as trainer:
            trainer.restore(Path(name))
            _update(trainer, batch)
            found = _weights(trainer)
    differs = [key for key, value in expected.items() if not torch.equal(value, found[key])]
    if differs:
        raise CheckFailed(
            f"{len(differs)} of {len(found)} weights differ after save, restore and one update: "
            f"{differs[0]}",
            "a resumed run is another run",
        )
    return "the update after save and restore is bit-identical"


def _export(plugin: Plugin, models: Models) -> str:
    with tempfile.TemporaryDirectory() as name, _opened(plugin, models) as trainer:
        batch = _batch(reference_of(models.first).model.config.vocab_size)
        _update(trainer, batch)
        folder = Path(name)
        trainer.export(folder)
        worst = _require_close(trainer, models, batch, folder, 1.0)
        if Service.GENERATE not in plugin.capabilities.services:
            return f"8 samples of the exported model, largest difference {worst:.1g}"
        served = _served(CheckedEngine(plugin, models), models, folder)
    return f"16 samples of exported weights, largest difference {max(worst, served):.1g}"


def _in_place(plugin: Plugin, models: Models) -> str:
    if not plugin.capabilities.shares_weights:
        raise NotDeclared("Capabilities.shares_weights is False")
    with tempfile.TemporaryDirectory() as name, _opened(plugin, models) as trainer:
        engine = CheckedEngine(plugin, models, shared=trainer)
        _update(trainer, _batch(engine.vocab_size))
        trainer.export(Path(name))
        worst = _served(engine, models, Path(name), in_place=True)
    return f"8 samples of the trainer's parameters, largest difference {worst:.1g}"


def _served(engine: CheckedEngine, models: Models, folder: Path, in_place: bool = False) -> float:
    """Returns the difference of samples that an engine generates with weights that it loads."""
    try:
        engine.load(1, None if in_place else folder)
        requests = [engine.request(i) for i in range(8)]
        return engine.require_served(
            requests,
            engine.finish(requests),
            folder,
            "the engine does not serve what the trainer learned",
            instead={"the weights before the update": models.first},
        )
    finally:
        engine.engine.close()


def _peak_bytes(action: Callable[[], object]) -> int:
    """Returns the most that torch had allocated in this process during `action`, in bytes."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler says when it begins
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, profile_memory=True) as profile:
        action()
    found = profile.profiler.kineto_results.events()
    events = sorted((e for e in found if e.name() == "[memory]"), key=lambda e: e.start_ns())
    return int(max(accumulate((event.nbytes() for event in events), initial=0)))


def _large_vocabulary(plugin: Plugin, models: Models) -> str:
    if models.context.device != "cpu" or models.tied is None:
        return "not measured: only for the suite's own models on a CPU"
    whole = 4 * _LARGE_VOCABULARY * _MANY_TOKENS
    with tempfile.TemporaryDirectory() as name:
        folder = make_model(
            Path(name), vocab_size=_LARGE_VOCABULARY, hidden_size=16, num_hidden_layers=1
        )
        rng = np.random.default_rng(0)
        batch = SequenceBatch(
            samples=tuple(SampleId(f"0/{i}/0") for i in range(8)),
            tokens=rng.integers(16, _LARGE_VOCABULARY, _MANY_TOKENS),
            offsets=np.arange(9, dtype=np.int64) * (_MANY_TOKENS // 8),
            response_mask=np.arange(_MANY_TOKENS) % (_MANY_TOKENS // 8) > 0,
            groups=np.arange(8, dtype=np.int64),
        )
        with _opened(plugin, models, folder) as trainer:
            peak = _peak_bytes(partial(trainer.logprobs, batch, 1.0))
    if peak > whole * 3 // 4:
        raise CheckFailed(
            f"logprobs of {_MANY_TOKENS} tokens over {_LARGE_VOCABULARY} words took "
            f"{peak >> 20} MiB; all logits at once are {whole >> 20} MiB",
            "models of today's vocabularies run out of memory: logits are to be made in chunks",
        )
    return f"{_MANY_TOKENS} tokens over {_LARGE_VOCABULARY} words in {peak >> 20} MiB"


TRAINER_CHECKS: dict[str, Callable[[Plugin, Models], str]] = {
    "trainer logprobs": _logprobs,
    "gradients": _gradients,
    "micro-batches": _micro_batches,
    "save and restore": _restore,
    "export": _export,
    "weights in place": _in_place,
    "large vocabulary": _large_vocabulary,
}
"""By what `flowrl backends check` calls them, in their order."""
