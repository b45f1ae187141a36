"""KL estimators: which clamps each library has, and whether it applies the mask."""

from __future__ import annotations

import torch

from flowrl.algo.kl import estimate
from flowrl.specs.kl import Estimator
from tests.proofs.oracles.case import Case, Json, Result, choose

__all__ = ["compute", "estimator_of", "weighted_estimate"]


_NAMES: dict[str, Estimator] = {
    "k1": "k1",
    "kl": "k1",
    "abs": "abs",
    "k2": "k2",
    "mse": "k2",
    "k3": "k3",
    "low_var_kl": "k3",
}


def estimator_of(name: Json) -> Estimator:
    """Our name of a library's estimator."""
    return choose(_NAMES, name, "kl_type")


def weighted_estimate(
    logprobs: torch.Tensor,
    reference: torch.Tensor,
    estimator: Estimator,
    weights: torch.Tensor | None,
    clamp_input: float | None,
    clamp_output: float | None,
) -> torch.Tensor:
    """The estimate times weights, which libraries apply before they clamp the result."""
    kl = estimate(logprobs, reference, estimator, clamp_input=clamp_input)
    if weights is not None:
        kl = weights * kl
    return kl if clamp_output is None else kl.clamp(-clamp_output, clamp_output)


def compute(case: Case) -> Result:
    """`kl` per token, and the gradient of its sum with respect to the policy's logprobs."""
    estimator = estimator_of(case.option("kl_type"))
    clamp_input, clamp_output = _clamps(case, estimator)
    logprobs = torch.tensor(case.inputs["log_probs"], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor(case.inputs["ref_log_probs"], dtype=torch.float64)
    ratio = case.inputs.get("importance_ratio")
    kl = weighted_estimate(
        logprobs,
        reference,
        estimator,
        None if ratio is None else torch.tensor(ratio, dtype=torch.float64),
        clamp_input,
        clamp_output,
    )
    if case.library == "skyrl" or case.variant.endswith("_masked"):
        # What padding holds must not reach the product: inf times 0 is no number.
        mask = torch.tensor(case.inputs["response_mask"], dtype=torch.float64)
        kl = torch.where(mask > 0, kl, 0.0) * mask
    kl.sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    return {"kl": kl.detach().numpy(), "grad_log_probs": logprobs.grad.numpy()}


def _clamps(case: Case, estimator: Estimator) -> tuple[float | None, float | None]:
    """As the options say; verl and SkyRL clamp k3 alone, and their options do not say so."""
    unsaid = estimator == "k3" and case.library in {"verl", "skyrl"}
    default = (20.0, 10.0) if unsaid else (None, None)
    return case.option("input_clamp", default[0]), case.option("output_clamp", default[1])
