"""Policy losses, importance weights and masks under the names that other libraries give them.

Every recorded loss is computed by a loss of `flowrl.specs.loss`, resolved as the trainer does; the
library's options choose its fields (`policy_recipes`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from flowrl.algo.corrections import Segments, importance_weights, rejection_mask, sequence_mask
from flowrl.algo.losses import TokenBatch, TokenLoss, policy_weights
from flowrl.algo.resolve import resolve_loss
from flowrl.specs.loss import CISPO, GMPO, KLCov, PolicyClip, PolicyLoss
from flowrl.specs.loss.policy import Estimator, Outside, RejectionLevel, WeightLevel
from tests.proofs.oracles.case import Case, NotOffered, Result, Value, choose
from tests.proofs.oracles.kl_estimators import weighted_estimate
from tests.proofs.oracles.loss_aggregation import reduced
from tests.proofs.oracles.policy_recipes import RECIPES, KLTerm, Recipe

__all__ = ["compute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokens:
    """The response tokens of a case, end to end.

    Attributes:
        mask: `[B, T]`.
        grid: `[B, T]` logprobs, the leaf of the gradient.
        batch: `[R]` fields; `samples` are row numbers.
    """

    mask: torch.Tensor
    grid: torch.Tensor
    batch: TokenBatch

    @classmethod
    def of(cls, case: Case) -> _Tokens:
        mask = torch.tensor(case.mask)
        if "sample_mask" in case.inputs:
            mask = mask * torch.tensor(case.array("sample_mask"))[:, None]
        live = mask > 0

        def pick(name: str) -> torch.Tensor | None:
            return torch.tensor(case.array(name))[live] if name in case.inputs else None

        rows = torch.arange(len(mask))[:, None].expand_as(mask)
        batch = TokenBatch(
            advantages=pick("advantages"),
            old_logprobs=pick("old_log_probs"),
            behaviour_logprobs=pick("rollout_log_probs"),
            reference_logprobs=pick("ref_log_probs"),
            entropy=pick("entropy"),
            samples=rows[live],
        )
        # Weights and masks compare the old policy with the engine's; the trained one is not read.
        grid = torch.tensor(
            case.array("log_probs" if "log_probs" in case.inputs else "old_log_probs")
        )
        return cls(mask=mask, grid=grid.requires_grad_(), batch=batch)

    @property
    def logprobs(self) -> torch.Tensor:
        return self.grid[self.mask > 0]

    @property
    def segments(self) -> Segments:
        assert self.batch.samples is not None
        return Segments.of(self.batch.samples)

    def spread(self, values: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """`[R]` to `[B, T]`."""
        grid = torch.full_like(self.mask, fill, dtype=values.dtype)
        return grid.masked_scatter(self.mask > 0, values)

    def at_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """`[R]` from a metric `[R]` or `[S]`."""
        return values if len(values) == len(self.logprobs) else values[self.segments.of_token]

    def mean(self, values: torch.Tensor | None) -> float:
        """The mean over tokens; 0 without any."""
        return 0.0 if values is None or not len(values) else float(values.detach().double().mean())


def compute(case: Case) -> Result:
    """Loss, gradient and metrics; or weights, or a mask, where the case holds only these."""
    tokens = _Tokens.of(case)
    if case.option("loss_type") == "luspo" and not _same_in_samples(case, tokens):
        return NotOffered("TRL's LUSPO averages over padding where the tokens of a sample differ")
    if "rejection" in case.options and "loss" not in case.options:
        return _rejected(case, tokens)
    if "delta" in case.options:
        return _sequence_masked(case, tokens)
    if "mode" in case.options:
        return _weights_of_trl(case, tokens)
    if "low" in case.options:
        return _weights_of_slime(case, tokens)
    recipe = choose(RECIPES, case.library, "library")(case)
    logprobs = tokens.logprobs
    terms = resolve_loss(recipe.spec)(logprobs, tokens.batch)
    if case.option("reduction") == "none":
        return _per_token(tokens, recipe)
    # Without any token on an empty batch every library returns 0.
    loss = reduced(tokens.spread(terms.values), tokens.mask, recipe.denominators)
    kl = None
    if recipe.kl is not None:
        kl = _penalty(recipe.kl, logprobs, tokens.batch)
        penalty = reduced(tokens.spread(kl), tokens.mask, recipe.denominators)
        loss = loss + recipe.kl.coefficient * penalty
    (gradient,) = torch.autograd.grad(loss, tokens.grid, allow_unused=True)
    found: dict[str, Value] = {
        "loss": float(loss.detach()),
        "grad_log_probs": np.zeros(tokens.grid.shape) if gradient is None else gradient.numpy(),
        "metrics": _metrics(case, tokens, recipe, terms, kl),
    }
    if isinstance(recipe.spec, PolicyLoss) and recipe.spec.weights != "none":
        weights = policy_weights(tokens.batch, recipe.spec)
        assert weights is not None
        found["weights"] = tokens.spread(weights).numpy()
    return found


def _penalty(term: KLTerm, logprobs: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """The KL term `[R]`, without its coefficient."""
    assert batch.reference_logprobs is not None
    weights = None
    if term.weight == "score":
        weights = (logprobs - logprobs.detach()).exp()
    elif term.weight == "behaviour":
        assert batch.behaviour_logprobs is not None
        weights = (logprobs - batch.behaviour_logprobs).exp()
    return weighted_estimate(
        logprobs,
        batch.reference_logprobs,
        term.estimator,
        weights,
        term.clamp_input,
        term.clamp_output,
    )


def _metrics(
    case: Case, tokens: _Tokens, recipe: Recipe, terms: TokenLoss, kl: torch.Tensor | None
) -> Mapping[str, float]:
    """Metrics under every library's name for them."""
    batch = tokens.batch
    means = {name: tokens.at_tokens(values) for name, values in terms.means.items()}
    if case.library == "areal":  # counts clipped tokens where no mask removed them
        means |= {name: means[name] * _kept(means) for name in _CLIPPED if name in means}
    by_sample = case.library == "trl" and _same_in_samples(case, tokens)
    share = _share_of_trl if by_sample else _Tokens.mean
    low, high, dual = (share(tokens, means.get(name)) for name in _CLIPPED)
    verl_gmpo = isinstance(recipe.spec, GMPO) and case.library == "verl"
    found = {
        "ppo_kl": -tokens.mean(_log_ratio(case, tokens, recipe)),
        "pg_clipfrac": high if verl_gmpo else low + high,
        "pg_clipfrac_lower": low if verl_gmpo else dual,
        "clip_ratio": low + high,
        "clip_frac": low + high,
        "clipfrac": low + high,
        "dual_clip_frac": dual,
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low + high,
        "vespo/phi_seq_mean": tokens.mean(terms.means.get("phi_mean")),
        "kl": tokens.mean(kl),
        "kl_loss": tokens.mean(kl),
        "kl_penalty": _reduced_kl(tokens, recipe, kl),
        "entropy": tokens.mean(batch.entropy),
    }
    if isinstance(recipe.spec, CISPO) and batch.advantages is not None:
        above = means["clip_fraction_high"] * (batch.advantages > 0)
        found["cispo_clip_ratio"] = share(tokens, above)
    if batch.behaviour_logprobs is not None:
        assert batch.old_logprobs is not None
        found["vllm_kl"] = tokens.mean(batch.behaviour_logprobs - batch.old_logprobs)
    return found | _ratios(case, tokens, recipe, terms)


_CLIPPED = ("clip_fraction_low", "clip_fraction_high", "dual_clip_fraction")


def _share_of_trl(tokens: _Tokens, values: torch.Tensor | None) -> float:
    """The mean over samples; one without response tokens counts as not clipped."""
    if values is None:
        return 0.0
    return float(tokens.segments.averages(values.double()).sum()) / len(tokens.mask)


def _reduced_kl(tokens: _Tokens, recipe: Recipe, kl: torch.Tensor | None) -> float:
    """NeMo-RL's KL is aggregated as the loss is."""
    if kl is None:
        return 0.0
    return float(reduced(tokens.spread(kl.detach()), tokens.mask, recipe.denominators))


def _kept(means: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """1 at tokens whose weight is not 0 and which no mask removed."""
    kept = torch.ones_like(means["clip_fraction_low"])
    if "kept_fraction" in means:
        kept = kept * means["kept_fraction"]
    if "weight_mean" in means:
        kept = kept * (means["weight_mean"] != 0)
    return kept


def _log_ratio(case: Case, tokens: _Tokens, recipe: Recipe) -> torch.Tensor:
    """What `ppo_kl` is the negative mean of."""
    assert tokens.batch.old_logprobs is not None
    gap = tokens.logprobs.detach() - tokens.batch.old_logprobs
    if case.library != "verl":
        return gap
    if isinstance(recipe.spec, KLCov):
        return -gap.abs()
    clamped = isinstance(recipe.spec, PolicyLoss) and recipe.spec.min_log_ratio is not None
    return gap.clamp(-20, 20) if clamped else gap


def _ratios(case: Case, tokens: _Tokens, recipe: Recipe, terms: TokenLoss) -> dict[str, float]:
    """NeMo-RL's: of the ratio that the loss uses, before and after its clip; of the weights."""
    if case.library != "nemo":
        return {}
    spec = recipe.spec
    ratio = clamped = tokens.logprobs.detach()  # what it reports where there is no ratio
    if isinstance(spec, PolicyClip):
        ratio = tokens.at_tokens(terms.means["ratio_mean"])
        clamped = ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high)
    elif isinstance(spec, CISPO):
        ratio = tokens.at_tokens(terms.means["ratio_mean"])
        clamped = ratio.clamp(spec.ratio_low, spec.ratio_high)
    return {
        "probs_ratio": tokens.mean(ratio),
        "probs_ratio_clamped": tokens.mean(clamped),
        "sampling_importance_ratio": _sampling_ratio(case, tokens, recipe, terms),
    }


def _sampling_ratio(case: Case, tokens: _Tokens, recipe: Recipe, terms: TokenLoss) -> float:
    """The mean weight that is used, or would be; sequence ratios are summed over all samples."""
    assert isinstance(recipe.spec, PolicyLoss)
    used = policy_weights(tokens.batch, recipe.spec)
    old, behaviour = _both(tokens)
    if case.option("sequence_level_importance_ratios", False):
        raw = importance_weights(old, behaviour, tokens.segments, level="sequence")
        grid = tokens.spread(raw if used is None else used, fill=1.0)
        first = (tokens.mask > 0).to(torch.int64).argmax(1)
        return float(grid[torch.arange(len(grid)), first].sum())
    if used is None:
        return tokens.mean(importance_weights(old, behaviour, tokens.segments, level="token"))
    if recipe.spec.rejection != "none":
        used = used * terms.means["kept_fraction"]
    return tokens.mean(used)


def _same_in_samples(case: Case, tokens: _Tokens) -> bool:
    """Whether all tokens of each sample have one ratio and one advantage."""
    if case.option("importance_sampling_level") != "sequence":
        return False
    advantages = tokens.batch.advantages
    assert advantages is not None
    differ = (tokens.segments.means(advantages) - advantages).abs() > 1e-9
    return not bool(differ.any())


def _per_token(tokens: _Tokens, recipe: Recipe) -> Result:
    """Values and clips of single tokens, whose advantages may differ within a sample."""
    spec = recipe.spec
    if isinstance(spec, PolicyClip) and spec.ratio == "sequence":
        spec = replace(spec, ratio="sequence-token")
    terms = resolve_loss(spec)(tokens.logprobs, tokens.batch)
    low, high = terms.means["clip_fraction_low"], terms.means["clip_fraction_high"]
    found: dict[str, Value] = {
        "token_losses": tokens.spread(terms.values.detach()).numpy(),
        "token_clipfrac": tokens.spread(low + high).numpy(),
    }
    if isinstance(recipe.spec, PolicyClip) and recipe.spec.ratio == "sequence":
        assert tokens.batch.old_logprobs is not None
        gap = tokens.batch.old_logprobs - tokens.logprobs.detach()
        found["seq_kl_per_token"] = tokens.spread(tokens.segments.means(gap)).numpy()
    return found


def _both(tokens: _Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    old, behaviour = tokens.batch.old_logprobs, tokens.batch.behaviour_logprobs
    assert old is not None
    assert behaviour is not None
    return old, behaviour


_REJECTIONS: Mapping[str, RejectionLevel] = {
    "token": "token",
    "seq_mean": "sequence-mean",
    "seq_sum": "sequence-sum",
    "seq_max": "sequence-max",
}
_ESTIMATORS: Mapping[str, Estimator] = {"k1": "k1", "k2": "k2", "k3": "k3"}


def _rejected(case: Case, tokens: _Tokens) -> Result:
    """verl's `response_mask` after rejection; its bounds of k1 are ratios, behaviour / old."""
    place, _, rest = str(case.options["rejection"]).rpartition("_")
    level = choose(_REJECTIONS, place, "rejection")
    estimator = choose(_ESTIMATORS, rest, "rejection")
    bounds = [float(part) for part in str(case.options["threshold"]).split("_")]
    low, high = (None, bounds[0]) if len(bounds) == 1 else (bounds[0], bounds[1])
    if estimator == "k1":
        low = 1 / high if low is None else low
        low, high = math.log(low), math.log(high)
    old, behaviour = _both(tokens)
    kept = rejection_mask(
        old, behaviour, tokens.segments, level=level, estimator=estimator, low=low, high=high
    )
    return {"response_mask": tokens.spread(kept.double()).numpy()}


def _sequence_masked(case: Case, tokens: _Tokens) -> Result:
    old, advantages = tokens.batch.old_logprobs, tokens.batch.advantages
    assert old is not None
    assert advantages is not None
    kept = sequence_mask(
        tokens.logprobs.detach(), old, advantages, tokens.segments, float(case.options["delta"])
    )
    return {"mask": tokens.spread(kept.double(), fill=1.0).numpy()}


def _weights_of_trl(case: Case, tokens: _Tokens) -> Result:
    """One weight a token, 1 at padding; or one a sample, 1 for an empty one."""
    place, _, action = str(case.options["mode"]).partition("_")
    level: WeightLevel = choose({"token": "token", "sequence": "sequence"}, place, "mode")
    outside: Outside = choose({"truncate": "truncate", "mask": "zero"}, action, "mode")
    low, high = case.options.get("clip_min"), case.options.get("clip_max")
    old, behaviour = _both(tokens)
    weights = importance_weights(
        old,
        behaviour,
        tokens.segments,
        level=level,
        outside=outside,
        low=low or 0.0,
        high=high,
    )
    grid: npt.NDArray[np.float64] = tokens.spread(weights, fill=1.0).numpy()
    if level == "token":
        return {"weights": grid}
    live = tokens.mask.numpy() > 0
    first = live.argmax(1)
    return {"weights": grid[np.arange(len(grid)), first][:, None]}


def _weights_of_slime(case: Case, tokens: _Tokens) -> Result:
    low, high = float(case.options["low"]), float(case.options["high"])
    old, behaviour = _both(tokens)
    raw = importance_weights(old, behaviour, tokens.segments, level="token")
    zero = "icepop" in case.variant
    weights = importance_weights(
        old,
        behaviour,
        tokens.segments,
        level="token",
        outside="zero" if zero else "truncate",
        low=low,
        high=high,
    )
    return {
        "weights": tokens.spread(weights).numpy(),
        "token_clipfrac": tokens.spread((raw != weights).double()).numpy(),
    }
