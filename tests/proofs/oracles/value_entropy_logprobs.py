"""Value losses, and logprobs and entropies from logits."""

from __future__ import annotations

import torch

from flowrl.algo.logprobs import chosen_logprobs
from flowrl.algo.losses import TokenBatch
from flowrl.algo.losses_supervised import value_clip
from flowrl.specs.loss import ValueClip
from tests.proofs.oracles.case import Case, Result, choose
from tests.proofs.oracles.loss_aggregation import Denominators, name_of, reduced

__all__ = ["compute"]


def compute(case: Case) -> Result:
    """`loss` and `clipfrac` of values; `log_probs` and `entropy` of logits."""
    return _value_loss(case) if "values" in case.inputs else _from_logits(case)


def _value_loss(case: Case) -> Result:
    mask = torch.tensor(case.mask)
    if "sample_mask" in case.inputs:
        mask = mask * torch.tensor(case.array("sample_mask"))[:, None]
    live = mask > 0
    grid = torch.tensor(case.array("values")).requires_grad_()
    huber = choose({"mse": False, "huber": True}, case.option("loss_type", "mse"), "loss_type")
    spec = ValueClip(
        clip=case.option("cliprange_value"),
        form="huber" if huber else "square",
        delta=float(case.option("delta") or 10.0),
    )
    batch = TokenBatch(
        returns=torch.tensor(case.array("returns"))[live],
        old_values=torch.tensor(case.array("old_values"))[live],
    )
    terms = value_clip(grid[live], batch, spec)
    denominators = Denominators(
        name_of(str(case.option("agg", "token-mean"))),
        count_empty=bool(case.option("count_empty", False)),
        max_tokens=mask.shape[1],
    )
    loss = reduced(torch.zeros_like(mask).masked_scatter(live, terms.values), mask, denominators)
    if not case.option("half", True) and not huber:
        loss = 2 * loss
    (gradient,) = torch.autograd.grad(loss, grid)
    clipped = terms.means.get("value_clip_fraction")
    share = float(clipped.mean()) if clipped is not None and len(clipped) else 0.0
    return {"loss": float(loss.detach()), "clipfrac": share, "grad_values": gradient.numpy()}


def _from_logits(case: Case) -> Result:
    logits = torch.tensor(case.array("logits"))
    labels = torch.tensor(case.inputs["labels"], dtype=torch.int64)
    count, width = labels.numel(), logits.shape[-1]
    logprobs, entropy = chosen_logprobs(
        logits.reshape(count, width),
        torch.arange(count),
        labels.reshape(-1),
        float(case.option("temperature") or 1.0),
    )
    entropies = entropy.reshape(labels.shape)
    if case.option("agg") is not None:
        chosen = Denominators(name_of(str(case.option("agg"))), count_empty=False)
        return {"entropy": float(reduced(entropies, torch.tensor(case.mask), chosen))}
    return {"log_probs": logprobs.reshape(labels.shape).numpy(), "entropy": entropies.numpy()}
