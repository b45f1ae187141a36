"""Truncated rollouts that the trainer repeats: engine and trainer speak of one distribution."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.backend.batch import KeptTokens, Sampler, SequenceBatch, TrainBatch
from flowrl.backend.protocols import Finished, GenerateRequest
from flowrl.errors import BackendError
from flowrl.ids import SampleId
from flowrl.specs import AdamW, PolicyClip, Sampling
from flowrl.specs import kl as penalties
from flowrl.specs.loss import Reinforce
from flowrl_backends.torch.engine import TorchEngine
from flowrl_backends.torch.packing import pack
from flowrl_backends.torch.predict import predict
from flowrl_backends.torch.trainer import TorchTrainer
from tests.torch_backend.trainer_fixtures import (
    VOCABULARY,
    Watch,
    assert_equal,
    context,
    folder_of,
    padded,
    update_spec,
)

STOP = 1
"""The stop token of the tests' models."""

OPTIONS: dict[str, tuple[float, ...]] = {
    "top_k": (0, 4),
    "top_p": (1.0, 0.8),
    "min_p": (0.0, 0.1),
    "repetition_penalty": (1.0, 1.4),
    "min_tokens": (0, 3),
}
EVERYTHING: dict[str, Any] = {name: values[1] for name, values in OPTIONS.items()}
COMBINATIONS = [
    dict(zip(OPTIONS, values, strict=True)) for values in itertools.product(*OPTIONS.values())
]


def sharpened(folder: Path, *, seed: int = 1, **changes: Any) -> TorchTrainer:
    """A random model whose distributions are far from uniform, and whose stop token is likely."""
    trainer = TorchTrainer(context(folder, **changes))
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.5, generator=draw)
    return trainer


def drawn(
    trainer: TorchTrainer, sampling: Sampling, *, groups: int = 2, size: int = 4
) -> list[tuple[GenerateRequest, Finished]]:
    """Groups of responses by the trainer's own engine, `logprobs="sampler"`."""
    engine = TorchEngine(context(Path()), trainer.model, shares_weights=True)
    rng = np.random.default_rng(0)
    requests = []
    for group in range(groups):
        prompt = rng.integers(2, VOCABULARY, group + 2)
        requests += [
            GenerateRequest(
                sample=SampleId(f"0/{group}/{member}"),
                attempt=0,
                prompt=prompt,
                response=np.zeros(0, np.int64),
                sampling=replace(sampling, logprobs="sampler"),
                seed=10 * group + member,
                shares_prompt=f"0/{group}",
            )
            for member in range(size)
        ]
    engine.submit(requests)
    ended: dict[SampleId, Finished] = {}
    while len(ended) < len(requests):
        ended |= {e.sample: e for e in engine.poll(60.0) if isinstance(e, Finished)}
    engine.close()
    return [(request, ended[request.sample]) for request in requests]


def batch_of(
    pairs: Sequence[tuple[GenerateRequest, Finished]], sampler: Sampler | None = None
) -> tuple[SequenceBatch, np.ndarray[Any, np.dtype[np.float32]]]:
    """The samples, and the engine's logprobs `[T]`."""
    tokens, mask, logprobs, offsets, groups = [], [], [], [0], []
    kept = []
    for request, end in pairs:
        tokens += [request.prompt, end.tokens]
        mask += [np.zeros(len(request.prompt), bool), np.ones(len(end.tokens), bool)]
        logprobs += [np.zeros(len(request.prompt), np.float32), end.logprobs]
        offsets.append(offsets[-1] + len(request.prompt) + len(end.tokens))
        groups.append(int(request.shares_prompt.split("/")[1]))
        if end.kept is not None:
            assert len(end.kept) == len(end.tokens)
            kept += [KeptTokens.everything(len(request.prompt)), end.kept]
    batch = SequenceBatch(
        samples=tuple(request.sample for request, _ in pairs),
        tokens=np.concatenate(tokens).astype(np.int64),
        offsets=np.array(offsets, np.int64),
        response_mask=np.concatenate(mask),
        groups=np.array(groups, np.int64),
        kept=KeptTokens.joined(kept) if kept else None,
        sampler=sampler or Sampler(sampling=pairs[0][0].sampling, stop_token_ids=(STOP,)),
    )
    return batch, np.concatenate(logprobs)


def distributions_by_hand(model: Any, rows: SequenceBatch) -> torch.Tensor:
    """Log-distributions `[R, V]` over a padded batch, one token after the other, with gradient."""
    assert rows.sampler is not None
    sampling = rows.sampler.sampling
    temperature = sampling.temperature or 1.0
    _, (_, _, logits) = padded(model, rows, 1.0)
    tables = []
    for i in range(len(rows)):
        begin, end = int(rows.offsets[i]), int(rows.offsets[i + 1])
        sample, mask = rows.tokens[begin:end], rows.response_mask[begin:end]
        start = int(np.argmax(mask))
        for t in np.flatnonzero(mask).tolist():
            x = logits[i, t - 1] / temperature
            seen = torch.zeros(VOCABULARY, dtype=torch.bool)
            seen[torch.from_numpy(sample[:t])] = True
            penalty = sampling.repetition_penalty
            x = torch.where(seen, torch.where(x > 0, x / penalty, x * penalty), x)
            gone = torch.zeros(VOCABULARY, dtype=torch.bool)
            gone[STOP] = t - start < sampling.min_tokens
            if rows.kept is not None and rows.kept.counts[begin + t]:
                left = rows.kept.ids[rows.kept.offsets[begin + t] :][: rows.kept.counts[begin + t]]
                gone |= ~torch.isin(torch.arange(VOCABULARY), torch.from_numpy(left))
            tables.append(x.masked_fill(gone, -torch.inf).log_softmax(-1))
    return torch.stack(tables)


def entropies(tables: torch.Tensor) -> torch.Tensor:
    return -(tables.exp() * tables.clamp(min=-1e30)).sum(-1)


def chosen(tables: torch.Tensor, rows: SequenceBatch) -> torch.Tensor:
    """`[R]`, at the tokens of the batch."""
    tokens = torch.from_numpy(rows.tokens[rows.response_mask])
    return tables.gather(-1, tokens[:, None])[:, 0]


@pytest.mark.parametrize("options", COMBINATIONS, ids=str)
def test_the_trainer_gives_the_logprobs_of_the_engine_under_every_combination_of_options(
    options: dict[str, Any], qwen: Path
) -> None:
    trainer = sharpened(qwen)
    sampling = Sampling(max_tokens=8, temperature=0.9, **options)
    rows, logprobs = batch_of(drawn(trainer, sampling))
    assert (rows.kept is not None) == sampling.cuts
    got = trainer.logprobs(rows, sampling.temperature)
    np.testing.assert_allclose(got, logprobs, atol=2e-5)
    plain = trainer.logprobs(replace(rows, sampler=None), sampling.temperature)
    # Whatever truncates makes drawn tokens likelier than they were, but a penalty of what was seen.
    moved = float(np.abs(got - plain).max())
    assert (moved > 1e-2) == sampling.truncates


@settings(max_examples=25, deadline=None)
@given(
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_k=st.integers(0, VOCABULARY + 2),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.9),
    repetition_penalty=st.floats(0.5, 2.0),
    min_tokens=st.integers(0, 9),
    seed=st.integers(0, 50),
)
def test_engine_and_trainer_agree_whatever_the_options(
    models_of_the_module: Path, seed: int, **options: Any
) -> None:
    trainer = sharpened(models_of_the_module, seed=seed)
    sampling = Sampling(max_tokens=7, **options)
    rows, logprobs = batch_of(drawn(trainer, sampling, size=2))
    got = trainer.logprobs(rows, sampling.temperature)
    np.testing.assert_allclose(got, logprobs, atol=5e-5)


@pytest.fixture(scope="module")
def models_of_the_module(models: Path) -> Path:
    return folder_of("qwen2", models)


@pytest.mark.parametrize("kind", ["qwen2", "mistral-window", "gpt2-dropout", "gemma2-capped"])
def test_a_later_policy_is_truncated_to_what_the_engine_kept(kind: str, models: Path) -> None:
    behaviour = sharpened(folder_of("qwen2", models), seed=1)
    later = sharpened(folder_of(kind, models), seed=2)
    sampling = Sampling(max_tokens=8, temperature=0.8, **EVERYTHING)
    rows, before = batch_of(drawn(behaviour, sampling))
    with torch.no_grad():
        tables = distributions_by_hand(later.model.eval(), rows)
    got = later.logprobs(rows, 0.8)
    live = rows.response_mask
    np.testing.assert_allclose(got[live], chosen(tables, rows).numpy(), atol=2e-5)
    assert np.isfinite(got).all()
    assert float(np.abs(got - before).max()) > 0.1
    whole = later.distributions(rows, 0.8)
    np.testing.assert_allclose(np.exp(whole), tables.exp().numpy(), atol=2e-5)
    assert ((whole == -np.inf) == (tables == -torch.inf).numpy()).all()
    squares = later.squares(rows, 0.8)
    np.testing.assert_allclose(squares[live], tables.exp().square().sum(1).numpy(), atol=2e-5)
    assert (squares[~live] == 0).all()


def test_samples_that_share_a_prefix_keep_their_own_sets(qwen: Path) -> None:
    trainer = sharpened(qwen)
    rows, _ = batch_of(drawn(trainer, Sampling(max_tokens=4, top_k=3), groups=1, size=1))
    assert rows.kept is not None
    other = np.arange(VOCABULARY, dtype=np.int32)
    place = int(np.argmax(rows.response_mask))
    ids = [rows.kept.ids[b:e] for b, e in itertools.pairwise(rows.kept.offsets.tolist())]
    wider = KeptTokens.of_places([other if t == place else ids[t] for t in range(len(ids))])
    pair = SequenceBatch(
        samples=(SampleId("0/0/0"), SampleId("0/0/1")),
        tokens=np.tile(rows.tokens, 2),
        offsets=np.array([0, len(rows.tokens), 2 * len(rows.tokens)]),
        response_mask=np.tile(rows.response_mask, 2),
        groups=np.zeros(2, np.int64),
        kept=KeptTokens.joined([rows.kept, wider]),
        sampler=rows.sampler,
    )
    narrow, wide = trainer.logprobs(pair, 1.0).reshape(2, -1)
    plain = trainer.logprobs(replace(rows, sampler=None), 1.0)
    np.testing.assert_allclose(narrow, trainer.logprobs(rows, 1.0), atol=1e-6)
    assert wide[place] == pytest.approx(plain[place], abs=1e-6)
    assert narrow[place] > wide[place] + 1e-3
    np.testing.assert_allclose(narrow[place + 1 :], wide[place + 1 :], atol=1e-6)


def test_turns_of_an_episode_each_forbid_early_stops(qwen: Path) -> None:
    trainer = sharpened(qwen)
    #                 p  p  a  a  o  o  a  a
    tokens = np.array([3, 5, 4, 6, 7, 8, 2, 9])
    rows = SequenceBatch(
        samples=(SampleId("0/0/0"),),
        tokens=tokens,
        offsets=np.array([0, len(tokens)]),
        response_mask=np.array([0, 0, 1, 1, 0, 0, 1, 1], bool),
        groups=np.zeros(1, np.int64),
        turn=np.array([-1, -1, 0, 0, -1, -1, 1, 1]),
        sampler=Sampler(sampling=Sampling(min_tokens=1), stop_token_ids=(STOP,)),
    )
    whole = trainer.distributions(rows, 1.0)
    assert (whole[:, STOP] == -np.inf).tolist() == [True, False, True, False]
    # Without turns, all that stands behind the prompt is one response.
    whole = trainer.distributions(replace(rows, turn=None), 1.0)
    assert (whole[:, STOP] == -np.inf).tolist() == [True, False, False, False]


def training_batch(rows: SequenceBatch, logprobs: Any, seed: int = 0) -> TrainBatch:
    draw = np.random.default_rng(seed)
    advantages = np.repeat(draw.normal(size=len(rows)), rows.lengths) * rows.response_mask
    return TrainBatch(
        sequences=rows,
        behaviour_logprobs=logprobs,
        old_logprobs=logprobs,
        advantages=advantages.astype(np.float32),
    )


def test_the_first_update_finds_no_mismatch_and_reports_the_entropy_of_the_sampler(
    qwen: Path,
) -> None:
    trainer = sharpened(qwen)
    trainer.begin(AdamW(learning_rate=0.0), 1)
    sampling = Sampling(max_tokens=8, **EVERYTHING)
    rows, logprobs = batch_of(drawn(trainer, sampling))
    (step,) = trainer.update(
        training_batch(rows, logprobs), update_spec(TrainBatch(sequences=rows))
    )
    assert step.metrics["mismatch/abs_max"] < 2e-5
    assert step.metrics["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    with torch.no_grad():
        own = entropies(distributions_by_hand(trainer.model, rows))
    assert step.metrics["entropy"] == pytest.approx(float(own.mean()), abs=1e-5)
    # A trainer that does not truncate takes the same samples for draws of another policy.
    apart = training_batch(replace(rows, sampler=None), logprobs)
    (step,) = trainer.update(apart, update_spec(apart))
    assert step.metrics["mismatch/abs_max"] > 0.1


@pytest.mark.parametrize("micro_batch", [1, 3, 100])
def test_the_gradient_is_that_of_the_padded_computation_with_the_kept_sets_held_constant(
    micro_batch: int, qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    behaviour, trainer = sharpened(qwen, seed=1), sharpened(qwen, seed=2)
    trainer.begin(AdamW(learning_rate=0.0), 10)
    watch = Watch(trainer, monkeypatch)
    sampling = Sampling(max_tokens=6, temperature=0.8, **EVERYTHING)
    rows, logprobs = batch_of(drawn(behaviour, sampling))
    batch = training_batch(rows, logprobs)
    spec = update_spec(
        batch,
        loss=Reinforce(entropy=0.3),
        temperature=0.8,
        micro_batch=micro_batch,
    )
    trainer.update(batch, spec)
    got = watch.grads
    tables = distributions_by_hand(trainer.model, rows)
    assert batch.advantages is not None
    advantages = torch.from_numpy(batch.advantages[rows.response_mask])
    loss = -(advantages * chosen(tables, rows)).mean() - 0.3 * entropies(tables).mean()
    trainer.model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    assert_equal(got, {n: p.grad for n, p in trainer.model.named_parameters()}, 2e-5)


def test_the_expected_gradient_is_that_of_the_truncated_policys_expected_reward(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bandit: one prompt, one token. E over kept a of grad log p(a) R(a) = grad of E R."""
    trainer = sharpened(qwen)
    trainer.begin(AdamW(learning_rate=0.0), 10)
    watch = Watch(trainer, monkeypatch)
    sampling = Sampling(max_tokens=1, **{**EVERYTHING, "top_k": 6, "top_p": 0.97, "min_p": 0.01})
    pairs = drawn(trainer, sampling, groups=1, size=1)
    ((request, end),) = pairs
    assert end.kept is not None
    arms = end.kept.ids.astype(np.int64)
    assert 2 < len(arms) < VOCABULARY
    everyone = [
        (
            replace(request, sample=SampleId(f"0/0/{i}")),
            replace(end, tokens=arms[i : i + 1]),
        )
        for i in range(len(arms))
    ]
    rows, _ = batch_of(everyone)
    logprobs = trainer.logprobs(rows, 1.0)
    probability = np.exp(logprobs[rows.response_mask])
    assert probability.sum() == pytest.approx(1.0, abs=1e-5)
    reward = np.random.default_rng(3).normal(size=len(arms))
    # Each arm once, weighed by how often it is drawn: the mean is the expectation.
    weighed = np.zeros(len(rows.tokens), np.float32)
    weighed[rows.response_mask] = len(arms) * probability * reward

    def gradient_of(rows: SequenceBatch) -> dict[str, torch.Tensor]:
        old = trainer.logprobs(rows, 1.0)
        batch = TrainBatch(sequences=rows, advantages=weighed, behaviour_logprobs=old)
        loss = PolicyClip(clip_low=0.2, clip_high=0.28)
        trainer.update(batch, update_spec(batch, loss=loss))
        return watch.grads

    got = gradient_of(rows)
    tables = distributions_by_hand(trainer.model, rows)
    value = (tables[0, torch.from_numpy(arms)].exp() * torch.from_numpy(reward)).sum()
    trainer.model.zero_grad()
    (-value).backward()
    want = {n: p.grad.clone() for n, p in trainer.model.named_parameters()}
    assert_equal(got, want, 1e-4)  # they are of size 1 to 10
    # Logprobs before the truncation give another expectation: the bias that is refused by default.
    biased = gradient_of(replace(rows, sampler=None))
    assert max(float((biased[n] - want[n]).abs().max()) for n in want) > 1e-2


def test_a_later_mini_batch_is_weighed_to_the_later_policy_without_bias(qwen: Path) -> None:
    """E over the behaviour's draws of the ratio times R is E of R under the later policy."""
    behaviour, later = sharpened(qwen, seed=1), sharpened(qwen, seed=2)
    pairs = drawn(behaviour, Sampling(max_tokens=1, top_p=0.9), groups=1, size=1)
    ((request, end),) = pairs
    assert end.kept is not None
    arms = end.kept.ids.astype(np.int64)
    rows, _ = batch_of([(request, replace(end, tokens=arms[i : i + 1])) for i in range(len(arms))])
    live = rows.response_mask
    old, new = (trainer.logprobs(rows, 1.0)[live] for trainer in (behaviour, later))
    reward = np.arange(len(arms))
    weighed = float((np.exp(old) * np.exp(new - old) * reward).sum())
    assert float(np.exp(new).sum()) == pytest.approx(1.0, abs=1e-5)
    assert weighed == pytest.approx(float((np.exp(new) * reward).sum()), abs=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "full"])
def test_a_reference_is_truncated_alike_so_that_equal_policies_do_not_diverge(
    estimator: str, qwen: Path
) -> None:
    trainer, reference = sharpened(qwen), sharpened(qwen)
    trainer.begin(AdamW(learning_rate=0.0), 1)
    rows, logprobs = batch_of(drawn(trainer, Sampling(max_tokens=8, **EVERYTHING)))
    batch = training_batch(rows, logprobs)

    def divergence(rows: SequenceBatch) -> float:
        given = replace(
            batch,
            reference_logprobs=reference.logprobs(rows, 1.0),
            reference_distributions=reference.distributions(rows, 1.0),
        )
        kl = getattr(penalties, estimator)(1.0)
        (step,) = trainer.update(given, update_spec(given, kl=kl))
        return step.metrics["kl"]

    assert divergence(rows) == pytest.approx(0.0, abs=1e-5)
    # One that is not would be at a distance from itself.
    assert divergence(replace(rows, sampler=None)) > 1e-2


def test_k3_over_all_kept_tokens_averages_to_the_divergence_of_the_truncated_policies(
    qwen: Path,
) -> None:
    trainer, reference = sharpened(qwen, seed=1), sharpened(qwen, seed=2)
    pairs = drawn(trainer, Sampling(max_tokens=1, top_p=0.95), groups=1, size=1)
    ((request, end),) = pairs
    assert end.kept is not None
    arms = end.kept.ids.astype(np.int64)
    rows, _ = batch_of([(request, replace(end, tokens=arms[i : i + 1])) for i in range(len(arms))])
    live = rows.response_mask
    p, q = (each.logprobs(rows, 1.0)[live].astype(np.float64) for each in (trainer, reference))
    k3 = np.exp(q - p) - 1 - (q - p)
    exact = float((np.exp(p) * (p - q)).sum())
    assert float((np.exp(p) * k3).sum()) == pytest.approx(exact, abs=1e-5)
    trainer.begin(AdamW(learning_rate=0.0), 1)
    batch = replace(
        training_batch(rows, rows.response_mask.astype(np.float32)),
        reference_distributions=reference.distributions(rows, 1.0),
    )
    (step,) = trainer.update(batch, update_spec(batch, kl=penalties.full(1.0)))
    assert step.metrics["kl"] == pytest.approx(exact, abs=1e-5)


def test_the_full_divergence_trains_through_truncated_distributions(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, reference = sharpened(qwen, seed=1), sharpened(qwen, seed=2)
    trainer.begin(AdamW(learning_rate=0.0), 1)
    watch = Watch(trainer, monkeypatch)
    rows, logprobs = batch_of(drawn(trainer, Sampling(max_tokens=6, **EVERYTHING)))
    batch = replace(
        training_batch(rows, logprobs),
        advantages=np.zeros(len(rows.tokens), np.float32),
        reference_distributions=reference.distributions(rows, 1.0),
    )
    (step,) = trainer.update(batch, update_spec(batch, kl=penalties.full(1.0)))
    p = distributions_by_hand(trainer.model, rows)
    with torch.no_grad():
        q = distributions_by_hand(reference.model, rows)
    gap = torch.where(p == -torch.inf, 0.0, p - q)
    want = (p.exp() * gap).sum(-1).mean()
    trainer.model.zero_grad()
    want.backward()  # type: ignore[no-untyped-call]
    assert step.metrics["kl"] == pytest.approx(float(want.detach()), abs=1e-5)
    assert_equal(watch.grads, {n: v.grad for n, v in trainer.model.named_parameters()}, 2e-5)


def test_a_policy_learns_from_truncated_samples_in_several_mini_batches(qwen: Path) -> None:
    trainer = sharpened(qwen)
    trainer.begin(AdamW(learning_rate=3e-3), 120)
    sampling = Sampling(max_tokens=4, top_p=0.9, top_k=8)
    wanted: list[float] = []
    for _ in range(20):
        rows, logprobs = batch_of(drawn(trainer, sampling, groups=2, size=16))
        mask, groups = rows.response_mask, rows.groups
        row = np.repeat(np.arange(len(rows)), rows.lengths)
        score = np.bincount(row, weights=mask & (rows.tokens >= 6)) / rows.response_lengths
        mean = np.array([score[groups == g].mean() for g in range(2)])
        wanted.append(float(score.mean()))
        advantages = (np.repeat(score - mean[groups], rows.lengths) * mask).astype(np.float32)
        batch = TrainBatch(
            sequences=rows,
            behaviour_logprobs=logprobs,
            old_logprobs=trainer.logprobs(rows, 1.0),
            advantages=advantages,
        )
        halves = (tuple(range(16)), tuple(range(16, 32)))
        steps = trainer.update(batch, update_spec(batch, mini_batches=halves, micro_batch=32))
        assert steps[0].metrics["mismatch/abs_max"] < 5e-5
        assert all(np.isfinite(step.loss) for step in steps)
    assert np.mean(wanted[-3:]) > np.mean(wanted[:3]) + 0.2


def test_samples_are_selected_with_their_kept_tokens(qwen: Path) -> None:
    trainer = sharpened(qwen)
    rows, logprobs = batch_of(drawn(trainer, Sampling(max_tokens=8, **EVERYTHING)))
    chosen_rows = [5, 0, 3]
    got = trainer.logprobs(rows.select(chosen_rows), 1.0)
    np.testing.assert_allclose(got, logprobs[rows.places(chosen_rows)], atol=2e-5)


def test_a_batch_without_kept_tokens_is_refused(qwen: Path) -> None:
    trainer = sharpened(qwen)
    rows, _ = batch_of(drawn(trainer, Sampling(max_tokens=3, top_k=4)))
    with pytest.raises(
        BackendError, match="does not have the tokens that its sampler kept"
    ) as caught:
        trainer.logprobs(replace(rows, kept=None), 1.0)
    assert "top_k=4" in caught.value.found
    assert "Finished.kept" in caught.value.hint


def test_a_token_outside_of_what_it_was_drawn_from_is_refused(qwen: Path) -> None:
    trainer = sharpened(qwen)
    rows, _ = batch_of(drawn(trainer, Sampling(max_tokens=3, top_k=4)))
    place = int(np.flatnonzero(rows.response_mask)[1])
    assert rows.kept is not None
    left = rows.kept.ids[rows.kept.offsets[place] :][: rows.kept.counts[place]]
    tokens = rows.tokens.copy()
    tokens[place] = min(set(range(VOCABULARY)) - set(left.tolist()))
    with pytest.raises(BackendError, match="not among the tokens that its sampler kept") as caught:
        trainer.logprobs(replace(rows, tokens=tokens), 1.0)
    assert caught.value.where == f"sample 0/0/0, token {place}"
    assert caught.value.expected == "one of 4 kept tokens"


def test_without_a_sampler_nothing_is_repeated(qwen: Path) -> None:
    trainer = sharpened(qwen)
    rows, _ = batch_of(drawn(trainer, Sampling(max_tokens=3, top_k=4)))
    packed = pack(rows, np.arange(len(rows)))
    assert predict(trainer.model, rows, packed, "logprobs", 1.0).repeat is not None
    for plain in (
        replace(rows, sampler=None),
        replace(rows, sampler=Sampler(sampling=Sampling(temperature=0.3), stop_token_ids=(STOP,))),
    ):
        assert predict(trainer.model, plain, packed, "logprobs", 1.0).repeat is None
