"""The fields of a training batch as a loss reads them, and checks that the batch has them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from flowrl.algo.losses import TokenBatch
from flowrl.backend.batch import Floats, Ints, TrainBatch
from flowrl.backend.protocols import UpdateSpec
from flowrl.errors import BackendError
from flowrl.specs import LossSpec
from flowrl_backends.torch.predict import closed


def token_batch(batch: TrainBatch, source: Ints, sample: Ints, device: torch.device) -> TokenBatch:
    """Returns the fields of a loss at R tokens, by their places and their batch rows."""
    preferred = batch.preferred
    return TokenBatch(
        advantages=_optional(batch.advantages, source, device),
        behaviour_logprobs=_optional(batch.behaviour_logprobs, source, device),
        old_logprobs=_optional(batch.old_logprobs, source, device),
        reference_logprobs=_optional(batch.reference_logprobs, source, device),
        returns=_optional(batch.returns, source, device),
        old_values=_optional(batch.old_values, source, device),
        samples=torch.from_numpy(sample).to(device),
        preferred=None if preferred is None else torch.from_numpy(preferred[sample]).to(device),
        pairs=None if preferred is None else torch.from_numpy(sample // 2).to(device),
        extra={name: gathered(values, source, device) for name, values in batch.extra.items()},
    )


def gathered(values: npt.NDArray[np.floating], index: Ints, device: torch.device) -> torch.Tensor:
    """Returns float32 `[R]`, the values at `index`."""
    return torch.from_numpy(values[index].astype(np.float32)).to(device)


def _optional(values: Floats | None, index: Ints, device: torch.device) -> torch.Tensor | None:
    return None if values is None else gathered(values, index, device)


def check_fields(batch: TrainBatch, spec: UpdateSpec, where: str) -> None:
    """Raises a `BackendError` if the batch does not have a field that the update reads."""
    whole = spec.kl is not None and spec.kl.estimator == "full"
    penalty = ("reference_distributions" if whole else "reference_logprobs",) if spec.kl else ()
    own = ("old_logprobs",) if spec.old_policy == "own" else ()
    if own and len(spec.mini_batches) > 1:
        raise BackendError(
            "only the first update's forward pass is by the old policy",
            where=where,
            found=f"{len(spec.mini_batches)} mini-batches, and no old_logprobs of their own",
            hint="compute old_logprobs before the update",
        )
    for name in (*spec.loss.needs, *spec.loss.extra_fields, *penalty):
        if name in own:
            continue
        if batch.extra.get(name, getattr(batch, name, None)) is None:
            raise BackendError(
                f"the batch has no {name}, which the update reads",
                found=f"loss {spec.loss}" + (f", kl {spec.kl}" if spec.kl else ""),
                where=where,
            )


def check_distributions(batch: TrainBatch, vocabulary: int, where: str) -> None:
    """Raises a `BackendError` if the reference's distributions do not fit the batch."""
    assert batch.reference_distributions is not None
    wanted = (int(batch.sequences.response_mask.sum()), vocabulary)
    if batch.reference_distributions.shape != wanted:
        raise BackendError(
            "the reference's distributions are not of these tokens and this vocabulary",
            where=where,
            found=f"{list(batch.reference_distributions.shape)}",
            expected=f"{list(wanted)}: response tokens, vocabulary",
            hint="take a reference with the policy's vocabulary",
        )


def check_score_fields(loss: LossSpec, where: str) -> None:
    """Raises a `BackendError` if a loss on scores reads fields of tokens, but for those of maps."""
    of_tokens = sorted({*loss.needs} - {*loss.extra_fields, "preferred"})
    if of_tokens:
        raise BackendError(
            "a loss on scores reads one number a sample, and fields of tokens have no place in it",
            where=where,
            found=", ".join(of_tokens),
            expected="preferred, fields of maps, or nothing",
        )


def score_batch(batch: TrainBatch, loss: LossSpec) -> TrainBatch:
    """Returns the batch of a loss on scores: with one more token a sample.

    A score is predicted at the token that follows: behind the sample, or behind each of its
    response tokens. Fields of maps stand there, those of a sample with the value that its last
    response token has.

    Raises:
        BackendError: A sample has no response token, and a field has no value for it.
    """
    sequences = batch.sequences
    places = np.flatnonzero(sequences.response_mask)
    if loss.predicts == "token_scores":
        longer = closed(sequences, places)
    else:
        longer = closed(sequences)
        ends = np.cumsum(sequences.response_lengths)
        empty = np.flatnonzero(sequences.response_lengths == 0)
        if batch.extra and len(empty):
            raise BackendError(
                "a sample without a response has no outcome to learn",
                found=str(sequences.samples[int(empty[0])]),
            )
        places = places[ends - 1] if batch.extra else places
    extra = {}
    for name, values in batch.extra.items():
        extra[name] = np.zeros(len(longer.tokens), np.float32)
        extra[name][longer.response_mask] = values[places]
    return TrainBatch(sequences=longer, preferred=batch.preferred, extra=extra)


def check_pairs(batch: TrainBatch, mini_batches: Sequence[Sequence[int]], where: str) -> None:
    """Checks that rows 2k and 2k + 1 are a pair, the preferred one first, in one mini-batch.

    Raises:
        BackendError: They are not.
    """
    assert batch.preferred is not None
    preferred, groups = batch.preferred, batch.sequences.groups
    expected = "adjacent samples of one prompt, the preferred one first"
    if len(batch) % 2:
        raise BackendError(
            "the loss reads pairs, but a sample has no partner",
            where=where,
            found=f"{len(batch)} samples",
            expected=expected,
        )
    first, second = slice(0, None, 2), slice(1, None, 2)
    bad = ~preferred[first] | preferred[second] | (groups[first] != groups[second])
    if bad.any():
        row = 2 * int(np.argmax(bad))
        names = " and ".join(str(sample) for sample in batch.sequences.samples[row : row + 2])
        raise BackendError(
            f"the loss reads pairs, but the samples {names} are none",
            where=where,
            found=f"preferred {preferred[row : row + 2].tolist()}, "
            f"groups {groups[row : row + 2].tolist()}",
            expected=expected,
        )
    for number, rows in enumerate(mini_batches):
        chosen, samples = set(rows), batch.sequences.samples
        for row in rows:
            if row ^ 1 not in chosen:
                raise BackendError(
                    f"mini-batch {number} separates a pair",
                    where=where,
                    found=f"sample {samples[row]} without sample {samples[row ^ 1]}",
                    expected="mini-batches of whole pairs",
                )
