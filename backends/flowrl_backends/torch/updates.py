"""One optimizer update: a mini-batch, forward and backward, micro-batch by micro-batch.

Invariants:

- The gradient is that of the padded, unpacked computation; it depends on the split of the
  mini-batch into micro-batches only by rounding, because every denominator counts the whole
  mini-batch.
- If the loss reads pairs, no micro-batch separates the samples of a pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from flowrl.algo.kl import mismatch
from flowrl.algo.logprobs import full_in_chunks, sampler_logits
from flowrl.algo.losses import LossFunction, TokenBatch, aggregate, prepare, prepares
from flowrl.algo.losses_supervised import explained_variance
from flowrl.algo.resolve import KLFunction, resolve_kl, resolve_loss
from flowrl.backend.batch import Ints, TrainBatch
from flowrl.backend.protocols import OptimizerStep, UpdateSpec
from flowrl.errors import BackendError
from flowrl_backends.torch.metrics import Metrics
from flowrl_backends.torch.optimizer import Optimizer, StepResult
from flowrl_backends.torch.packing import micro_batches, pack
from flowrl_backends.torch.predict import Predicted, predict, predict_all
from flowrl_backends.torch.ranks import Ranks
from flowrl_backends.torch.token_fields import (
    check_distributions,
    check_fields,
    check_pairs,
    check_score_fields,
    gathered,
    score_batch,
    token_batch,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _Gradients(NamedTuple):
    """What a term of an update has added to the gradients: its metrics and its rows."""

    metrics: Metrics
    chosen: Ints
    live: Ints


def update_together(
    optimizer: Optimizer, terms: Sequence[tuple[Objective, Sequence[int]]]
) -> list[OptimizerStep]:
    """Makes one update of the sum of several objectives, each on rows of its own batch.

    Raises:
        BackendError: The rows of one have no response token, or a sample of a pair has none.
    """
    optimizer.zero_grad()
    added = [objective.add_gradients(optimizer, rows) for objective, rows in terms]
    outcome = optimizer.step()
    return [
        objective.result(gradients, outcome)
        for (objective, _), gradients in zip(terms, added, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The objective of the updates on one batch, checked against that batch.

        objective = Objective.of(batch, spec, model, where="roles.actor", skip_zero=True,
            ranks=ranks)
        steps = [update_together(optimizer, [(objective, rows)]) for rows in spec.mini_batches]

    Attributes:
        batch: The caller's batch; for losses on scores, that of `score_batch`.
        kl: The estimator of the KL term; None without one, or for the exact divergence.
        order: int64 `[T]`, the index of each response token among those of the batch.
        num_tokens: int64 `[N]`, the number of response tokens of each sample of the caller.
        skip_zero: True to skip samples whose advantages are all 0, if that changes no gradient.
        ranks: The ranks that compute the updates together.
    """

    model: PreTrainedModel
    batch: TrainBatch
    spec: UpdateSpec
    loss: LossFunction
    kl: KLFunction | None
    order: Ints
    num_tokens: Ints
    skip_zero: bool
    ranks: Ranks

    @classmethod
    def of(
        cls,
        batch: TrainBatch,
        spec: UpdateSpec,
        model: PreTrainedModel,
        *,
        where: str,
        skip_zero: bool,
        ranks: Ranks,
    ) -> Objective:
        """Resolves loss and KL term.

        Raises:
            BackendError: A field that they read is missing, the samples are not the pairs that the
                loss reads, or a KL term is set although no logprobs are trained.
        """
        check_fields(batch, spec, where)
        if spec.loss.pairs:
            check_pairs(batch, spec.mini_batches, where)
        if spec.kl is not None and spec.loss.predicts != "logprobs":
            raise BackendError(
                "a KL term needs a policy; a value head has no logprobs",
                where=where,
                found=f"loss {spec.loss}, kl {spec.kl}",
                hint="leave kl out",
            )
        num_tokens = batch.sequences.response_lengths
        if spec.kl is not None and spec.kl.estimator == "full":
            check_distributions(batch, int(model.config.vocab_size), where)
        if spec.loss.predicts in ("scores", "token_scores"):
            check_score_fields(spec.loss, where)
            batch = score_batch(batch, spec.loss)
        return cls(
            model=model,
            batch=batch,
            spec=spec,
            loss=resolve_loss(spec.loss),
            kl=resolve_kl(spec.kl) if spec.kl and spec.kl.estimator != "full" else None,
            order=np.cumsum(batch.sequences.response_mask) - 1,
            num_tokens=num_tokens,
            skip_zero=skip_zero,
            ranks=ranks,
        )

    def add_gradients(self, optimizer: Optimizer, rows: Sequence[int]) -> _Gradients:
        """Adds the gradient of the rows of one mini-batch to the optimizer's.

        Raises:
            BackendError: The mini-batch has no response token, or a sample of a pair has none.
        """
        chosen = np.asarray(rows, np.int64)
        weights, live = self._weights(chosen)
        known = self._known(live)
        if self._may_skip():
            live = live[_has_advantage(self.batch, live)]
        metrics = Metrics(self.model.device)
        for part, counts in self.ranks.passes(self._micro_batches(live), live):
            if counts:
                self._accumulate(part, weights, known, metrics)
            else:
                self._accumulate_nothing(part)
            optimizer.accumulate()
        return _Gradients(self.ranks.joined(metrics), chosen, live)

    def result(self, gradients: _Gradients, outcome: StepResult) -> OptimizerStep:
        """Returns what is reported of an update to which the objective added its gradient."""
        metrics, chosen, live = gradients
        return OptimizerStep(
            loss=metrics.loss(),
            grad_norm=outcome.grad_norm,
            learning_rate=outcome.learning_rate,
            num_tokens=int(self.num_tokens[chosen].sum()),
            skipped=outcome.skipped,
            metrics={
                **metrics.result(),
                **self._measured(metrics),
                "num_samples": float(len(chosen)),
                "samples_computed": float(len(live)),
                "samples_skipped": float(len(chosen) - len(live)),
            },
        )

    def _weights(self, chosen: Ints) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], Ints]:
        """Returns the weight of each sample's tokens, float64 `[N]`, and the rows with tokens."""
        sequences = self.batch.sequences
        lengths = sequences.response_lengths[chosen]
        empty = chosen[lengths == 0]
        if len(empty) == len(chosen) or (self.spec.loss.pairs and len(empty)):
            whose = "a sample of a pair" if self.spec.loss.pairs else "a mini-batch"
            named = f", such as {sequences.samples[int(empty[0])]}" if len(empty) else ""
            raise BackendError(
                f"{whose} has no response token",
                found=f"{len(empty)} of {len(chosen)} samples without{named}",
            )
        weights = np.zeros(len(sequences))
        weights[chosen] = self.loss.sample_weights(
            lengths, sequences.groups[chosen], max_tokens=self.spec.max_tokens
        )
        return weights, chosen[lengths > 0]

    def _may_skip(self) -> bool:
        pulled = self.spec.kl is not None and bool(self.spec.kl.coefficient)
        return self.skip_zero and self.loss.proportional and not pulled

    def _micro_batches(self, rows: Ints) -> list[Ints]:
        """Returns the micro-batches of this rank."""
        sequences, limit = self.batch.sequences, self.spec.micro_batch
        if self.spec.loss.pairs:
            # A group that fits is never cut, so pairs are the groups here, and the smallest part.
            sequences = replace(sequences, groups=np.arange(len(self.batch)) // 2)
            limit = max(limit, 2)
        own = self.ranks.part(sequences, rows, whole_groups=self.spec.loss.pairs)
        return micro_batches(sequences, own, limit)

    def _accumulate(
        self,
        part: Ints,
        weights: np.ndarray[tuple[int], np.dtype[np.float64]],
        known: TokenBatch,
        metrics: Metrics,
    ) -> None:
        """Runs forward and backward of one micro-batch."""
        packed = pack(self.batch.sequences, part)
        predicted = predict(
            self.model,
            self.batch.sequences,
            packed,
            self.spec.loss.predicts,
            self.spec.temperature,
        )
        inputs = replace(
            token_batch(self.batch, packed.source, packed.sample, self.model.device),
            entropy=predicted.entropy,
            weight_scale=known.weight_scale,
            penalised=None if known.penalised is None else known.penalised[packed.source],
        )
        if self.spec.old_policy == "own":
            inputs = replace(inputs, old_logprobs=predicted.values.detach())
        terms = self.loss(predicted.values, inputs)
        means = {**terms.means, **_spread(predicted)}
        values = terms.values
        if self.spec.kl is not None:
            penalty = self._divergence(predicted, inputs, packed.source)
            values = values + self.spec.kl.coefficient * penalty
            means["kl"] = penalty.detach()
        metrics.keep(predicted.values.detach(), packed.source, packed.sample)
        total = aggregate(values, gathered(weights, packed.sample, self.model.device))
        # The logits are the largest tensor of all; backward drops them as soon as it can.
        del predicted
        weight = self.spec.weight
        (total if weight == 1 else weight * total).backward()  # type: ignore[no-untyped-call]
        metrics.add(total.detach(), means, terms.maxima, len(packed.tokens))

    def _accumulate_nothing(self, part: Ints) -> None:
        """Takes part in the passes of the other ranks."""
        sequences, loss = self.batch.sequences, self.spec.loss
        packed = pack(sequences, part)
        predicted = predict(self.model, sequences, packed, loss.predicts, self.spec.temperature)
        (0.0 * predicted.values.sum()).backward()  # type: ignore[no-untyped-call]

    def _divergence(self, predicted: Predicted, inputs: TokenBatch, source: Ints) -> torch.Tensor:
        """KL(policy || reference) at each token of a micro-batch, `[R]`."""
        if self.kl is not None:
            assert inputs.reference_logprobs is not None
            return self.kl(predicted.values, inputs.reference_logprobs)
        reference = self.batch.reference_distributions
        assert reference is not None
        assert predicted.logits is not None
        repeat = predicted.repeat
        if repeat is not None:
            left = sampler_logits(
                predicted.logits,
                predicted.node[repeat.order],
                self.spec.temperature,
                repeat.transform,
            )
            other = gathered(reference, self.order[source], self.model.device)
            return full_in_chunks(left[repeat.back], other, 1.0)
        # Tokens that follow one prefix have one distribution, so any of them gives the node's.
        node = predicted.node.cpu().numpy()
        _, first = np.unique(node, return_index=True)
        other = gathered(reference, self.order[source[first]], self.model.device)
        found = full_in_chunks(predicted.logits, other, self.spec.temperature)
        return found[predicted.node]

    def _known(self, rows: Ints) -> TokenBatch:
        """Returns the inputs of the loss from the whole mini-batch; `penalised` is `[T]`."""
        wanted = prepares(self.spec.loss)
        if wanted == "nothing":
            return TokenBatch()
        sequences, device = self.batch.sequences, self.model.device
        row = np.repeat(np.arange(len(sequences)), sequences.lengths)
        source = np.flatnonzero(sequences.response_mask & np.isin(row, rows))
        own = self.spec.old_policy == "own" and "old_logprobs" in self.spec.loss.needs
        logprobs = None
        if wanted == "logprobs" or own:
            found = predict_all(
                self.model,
                sequences,
                rows,
                "logprobs",
                self.spec.temperature,
                ranks=self.ranks,
            )
            logprobs = gathered(found, source, device)
        fields = token_batch(self.batch, source, row[source], device)
        if own:
            fields = replace(fields, old_logprobs=logprobs)
        known = prepare(logprobs, fields, self.spec.loss)
        if known.penalised is None:
            return known
        penalised = torch.zeros(len(sequences.tokens), dtype=torch.bool, device=device)
        penalised[torch.from_numpy(source).to(device)] = known.penalised
        return replace(known, penalised=penalised)

    def _measured(self, metrics: Metrics) -> dict[str, float]:
        """Returns the metrics that need all predictions of the mini-batch at once."""
        values, source, sample = metrics.kept()
        behaviour, returns = self.batch.behaviour_logprobs, self.batch.returns
        if self.spec.loss.predicts == "logprobs" and behaviour is not None:
            drawn = self.batch.sampled
            if drawn is None:
                return mismatch(values.numpy(), behaviour[source], sample)
            kept = drawn[sample]
            if not kept.any():
                return {}
            return mismatch(values.numpy()[kept], behaviour[source][kept], sample[kept])
        if self.spec.loss.predicts == "values" and returns is not None:
            explained = explained_variance(values, torch.from_numpy(returns[source]))
            return {} if explained is None else {"value_explained_variance": explained}
        return {}


def _spread(predicted: Predicted) -> dict[str, torch.Tensor]:
    """The entropy of a policy, and its estimate from the drawn tokens; nothing of a value head."""
    if predicted.entropy is None:
        return {}
    return {
        "entropy": predicted.entropy.detach(),
        "entropy_estimate": -predicted.values.detach(),
    }


def _has_advantage(
    batch: TrainBatch, rows: Ints
) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """bool `[len(rows)]`: samples with an advantage that is not 0 (NaN counts as such)."""
    assert batch.advantages is not None
    nonzero = (batch.advantages != 0) & batch.sequences.response_mask
    counted = np.concatenate([[0], np.cumsum(nonzero)])
    offsets = batch.sequences.offsets
    found: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] = (
        counted[offsets[rows + 1]] > counted[offsets[rows]]
    )
    return found
