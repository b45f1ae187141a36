"""Advantages: which of flowrl's functions and options each recorded convention is.

Most are a specification by another name. Composed here, because only one library has them: a
recursion over padding that ignores the mask, an advantage that is left unmasked, a KL estimate that
comes as an input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import get_args

import numpy as np
import numpy.typing as npt

from flowrl.algo.advantages import AdvantageBatch, rewards_to_go, token_rewards, whiten
from flowrl.algo.advantages.group import (
    centre_scores,
    gpg,
    leave_one_out,
    length_weighted,
    max_rl,
    normalise_then_sum,
    pass_at_k,
    standardise,
    weighted_sum,
)
from flowrl.algo.advantages.token import estimate, length_lambda, optimal_baseline
from flowrl.algo.kl import estimate as estimate_kl
from flowrl.specs.advantage import (
    GPG,
    Centre,
    GroupRelative,
    LeaveOneOut,
    LengthWeighted,
    Masking,
    MaxRL,
    NormaliseThenSum,
    OptimalTokenBaseline,
    PassAtK,
    Scale,
    Singleton,
)
from flowrl.specs.base import format_list
from flowrl.specs.kl import Estimator
from tests.proofs.oracles.case import Case, Result, choose
from tests.proofs.oracles.kl_estimators import estimator_of

__all__ = ["compute"]


Array = npt.NDArray[np.float64]


def compute(case: Case) -> Result:
    """Advantages, returns and rewards of a case."""
    return choose(_ALGORITHMS, case.option("algorithm", "kl_in_reward"), "algorithm")(case)


def _groups(case: Case) -> npt.NDArray[np.int64]:
    """int `[N]`; libraries with a fixed group size take consecutive samples for a group."""
    size = case.option("group_size")
    if size is not None:
        first = next(iter(case.inputs.values()))
        return np.arange(len(first)) // int(size)
    return np.unique(case.inputs["group_ids"], return_inverse=True)[1].astype(np.int64)


def _singleton(case: Case) -> Singleton:
    """`A=0` is zero; `A=r`, `mean=0` and `baseline=0` leave the score as it is."""
    return "zero" if str(case.option("singleton", "A=0")).startswith("A=0") else "raw"


def _spread(case: Case, advantages: npt.ArrayLike) -> Result:
    """One number a sample, and repeated over its tokens; NeMo-RL repeats it over padding too."""
    a = np.asarray(advantages, np.float64)
    found: dict[str, npt.ArrayLike] = {"sequence_advantages": a}
    if "response_mask" in case.inputs:
        mask = case.mask
        if case.library == "nemo":
            mask = np.ones_like(mask)
        found["advantages"] = found["returns"] = a[:, None] * mask
    return found


_SCALES: Mapping[str, Scale] = {"group": "group", "batch": "batch", "none": "none"}
_CENTRES: Mapping[str, Centre] = {
    "group": "group",
    "batch": "batch",
    "group_others": "group_others",
    "batch_others": "batch_others",
}
_MASKINGS: Mapping[str, Masking] = {name: name for name in get_args(Masking)}


def _scale(case: Case) -> Scale:
    named = case.option("std_norm", case.option("normalize_rewards", True))
    if isinstance(named, str):
        return choose(_SCALES, named, "std_norm")
    if not named:
        return "none"
    return "group_others" if case.option("use_leave_one_out_baseline", False) else "group"


def _grpo(case: Case) -> Result:
    spec = GroupRelative(
        std=_scale(case),
        ddof=int(case.option("ddof", 1)),
        eps=float(case.option("eps", 1e-6)),
        singleton=_singleton(case),
        mean="group_others" if case.option("use_leave_one_out_baseline", False) else "group",
        variance_floor=float(case.option("variance_floor", 0.0)),
    )
    groups = _groups(case)
    if "rewards_per_func" in case.inputs:
        scores = weighted_sum(case.array("rewards_per_func"), case.option("weights"))
    else:
        scores = case.array("rewards")
    # A sample without any reward is no member of its group.
    has = ~np.isnan(scores)
    advantages = np.zeros(len(scores))
    advantages[has] = standardise(scores[has], groups[has], spec)
    return _spread(case, advantages)


def _passk(case: Case) -> Result:
    spec = PassAtK(
        std="group" if case.option("std_norm") else "none",
        ddof=int(case.option("ddof", 1)),
        eps=float(case.option("eps", 1e-6)),
        singleton=_singleton(case),
    )
    return _spread(case, pass_at_k(case.array("rewards"), _groups(case), spec))


def _rloo(case: Case) -> Result:
    if "kl" in case.inputs:
        return _placed(case)
    spec = LeaveOneOut(
        singleton=_singleton(case),
        batch_std=bool(case.option("batch_normalize", False)),
        eps=float(case.option("eps", 1e-4)),
    )
    return _spread(case, leave_one_out(case.array("rewards"), _groups(case), spec))


def _opo(case: Case) -> Result:
    batch = AdvantageBatch(scores=case.array("rewards"), groups=_groups(case), mask=case.mask)
    spec = LengthWeighted(singleton=_singleton(case))
    return _spread(case, length_weighted(batch, spec).advantages)


def _gpg(case: Case) -> Result:
    spec = GPG(norm=float(case.option("f_norm", 1.0)), singleton=_singleton(case))
    return _spread(case, gpg(case.array("rewards"), _groups(case), spec))


def _maxrl(case: Case) -> Result:
    spec = MaxRL(eps=float(case.option("eps", 1e-6)), singleton=_singleton(case))
    return _spread(case, max_rl(case.array("rewards"), _groups(case), spec))


def _gdpo(case: Case) -> Result:
    if "rewards_per_func" in case.inputs:
        rewards = case.array("rewards_per_func")
    else:
        names = sorted(name for name in case.inputs if name.startswith("rewards_"))
        rewards = np.stack([case.array(name) for name in names], axis=1)
    others = bool(case.option("leave_one_out", False))
    nemo = case.library == "nemo"
    eps = float(case.option("eps", 1e-6))
    spec = NormaliseThenSum(
        mean="group_others" if others else "group",
        std="group_others" if others else "group",
        eps=eps,
        batch_eps=0.0 if nemo else eps,
        reward_weights=format_list(float(weight) for weight in case.option("weights")),
    )
    batch = AdvantageBatch(
        scores=np.zeros(len(rewards)),
        groups=_groups(case),
        rewards=rewards,
    )
    return _spread(case, normalise_then_sum(batch, spec).advantages)


def _reward_norm(case: Case) -> Result:
    """AReaL measures deviations from what it subtracted; ROLL from the mean of the scores."""
    others = "_others" if case.option("leave_one_out", False) else ""
    mean, std = case.option("mean"), case.option("std")
    centre: Centre = "none" if mean is None else choose(_CENTRES, f"{mean}{others}", "mean")
    spec = GroupRelative(
        mean=centre,
        std="none" if std is None else choose(_SCALES, std, "std"),
        ddof=int(case.option("ddof", 1)),
        eps=float(case.option("eps", 1e-6)),
        std_about="centre" if case.library == "areal" else "mean",
        zero_std="divide",
        singleton="raw" if others else "zero",
    )
    return _spread(case, standardise(case.array("rewards"), _groups(case), spec))


def _whitened(case: Case, values: Array, mask: Array) -> Array:
    """Over valid tokens; `var_clamp` is a floor, `whiten_eps` stands beside the variance."""
    floor = case.option("var_clamp")
    if floor is None and case.option("whiten_eps") is None and case.library != "verl":
        floor = 1e-8  # NeMo-RL and OpenRLHF, where the options name neither
    if floor is not None:
        ddof = int(case.option("whiten_ddof", 0))
        return whiten(values, mask, ddof=ddof, eps=float(floor), place="floor")
    ddof = int(case.option("whiten_ddof", 1))
    return whiten(values, mask, ddof=ddof, eps=float(case.option("whiten_eps", 1e-8)))


def _kl(case: Case, default: Estimator = "k1") -> Array:
    """The KL estimate of a case; NeMo-RL clamps every estimator."""
    clamps = (20.0, 10.0) if case.library == "nemo" else (None, None)
    policy = "log_probs" if "log_probs" in case.inputs else "old_log_probs"
    return estimate_kl(
        case.array(policy),
        case.array("ref_log_probs"),
        estimator_of(case.option("kl_type", default)),
        clamp_input=case.option("input_clamp", clamps[0]),
        clamp_output=case.option("output_clamp", clamps[1]),
    )


def _reinforce_pp(case: Case) -> Result:
    mask = case.mask
    if "token_level_rewards" in case.inputs:
        gamma = float(case.option("gamma", 1.0))
        returns = rewards_to_go(case.array("token_level_rewards"), mask, gamma, "reset")
        return {"advantages": _whitened(case, returns, mask), "returns": returns}
    scores = case.array("rewards")
    if case.option("minus_baseline", False):
        scores = centre_scores(scores, _groups(case), "group", _singleton(case))
    credit = scores[:, None] - float(case.option("kl_coef", 0.0)) * _kl(case)
    return {"advantages": _whitened(case, credit, mask)}


def _reinforce_pp_baseline(case: Case) -> Result:
    mask = case.mask
    centred = centre_scores(case.array("rewards"), _groups(case), "group", _singleton(case))
    credit = np.broadcast_to(centred[:, None], mask.shape).astype(np.float64)
    if "ref_log_probs" in case.inputs:
        credit = credit - float(case.option("kl_coef", 0.0)) * _kl(case)
    advantages = _whitened(case, credit, mask)
    return {"advantages": advantages, "returns": advantages}


def _clipped(case: Case, scores: Array) -> Array:
    clip = case.option("clip_range")
    return scores if clip is None else np.clip(scores, float(clip[0]), float(clip[1]))


def _placed(case: Case) -> Result:
    """OpenRLHF: shaped scores on the last token, a KL penalty, rewards-to-go, whitening of some."""
    algorithm = str(case.option("algorithm"))
    scores, groups, mask = case.array("rewards"), _groups(case), case.mask
    if algorithm == "group_norm":
        eps = float(case.option("eps", 1e-9))
        scores = standardise(scores, groups, GroupRelative(eps=eps))
    else:
        means: dict[str, Centre] = {
            "rloo": "group_others",
            "reinforce_baseline": "group",
            "dr_grpo": "group",
            "reinforce": "none",
        }
        scores = centre_scores(scores, groups, means[algorithm], _singleton(case))
    kl = case.array("kl") if "kl" in case.inputs else None
    coefficient = float(case.option("kl_coef", 0.0))
    rewards = token_rewards(_clipped(case, scores), mask, kl, kl_coefficient=coefficient)
    returns = rewards_to_go(rewards, mask, float(case.option("gamma", 1.0)), "zero")
    whitened = algorithm in {"reinforce", "reinforce_baseline"}
    advantages = _whitened(case, returns, mask) if whitened else returns
    return {"advantages": advantages, "returns": returns}


def _unwhitened_returns(case: Case) -> Result:
    mask = case.mask
    coefficient = float(case.option("kl_coef", 0.0))
    kl = case.array("kl") * mask
    rewards = token_rewards(case.array("rewards"), mask, kl, kl_coefficient=coefficient)
    returns = rewards_to_go(rewards, mask, float(case.option("gamma", 1.0)), "zero")
    return {"returns": returns, "advantages": returns}


def _unwhitened_baseline(case: Case) -> Result:
    penalty = float(case.option("kl_coef", 0.0)) * case.array("kl")
    advantages = case.array("rewards")[:, None] - penalty
    return {"advantages": advantages, "returns": advantages}


def _remax(case: Case) -> Result:
    mask = case.mask
    returns = rewards_to_go(case.array("token_level_rewards"), mask, 1.0, "zero")
    baselines = case.array("reward_baselines")
    return {"advantages": returns - baselines[:, None] * mask, "returns": returns}


def _optimal_token_baseline(case: Case) -> Result:
    mask = case.mask
    returns = rewards_to_go(case.array("token_level_rewards"), mask, 1.0, "zero")
    spec = OptimalTokenBaseline(
        eps=float(case.option("eps", 1e-8)),
        lone_tail="zero" if case.option("handle_zero_tail", False) else "baseline",
        singleton="raw",
    )
    weights = case.inputs.get("rollout_is_weights")
    baseline = optimal_baseline(
        returns,
        mask,
        _groups(case),
        case.array("old_log_probs"),
        case.array("sum_pi_squared"),
        spec,
        None if weights is None else case.array("rollout_is_weights"),
    )
    return {"advantages": (returns - baseline) * mask, "returns": returns}


def _advantage_norm(case: Case) -> Result:
    advantages = whiten(
        case.array("values"),
        case.mask,
        ddof=int(case.option("ddof", 1)),
        eps=float(case.option("eps", 1e-5)),
        place="outside",
    )
    return {"advantages": advantages}


def _gae(case: Case) -> Result:
    mask, values = case.mask, case.array("values")
    gamma, lam = float(case.option("gamma", 1.0)), float(case.option("lam", 1.0))
    masking = choose(_MASKINGS, case.option("masking", "carry"), "masking")
    if "token_level_rewards" in case.inputs:
        rewards = case.array("token_level_rewards")
    else:
        penalised = "ref_log_probs" in case.inputs
        rewards = token_rewards(
            case.array("rewards"),
            mask,
            _kl(case, "k3") if penalised else None,
            kl_coefficient=float(case.option("kl_coef", 0.0)),
        )
    alpha = float(case.option("length_adaptive_alpha") or 0.0)
    policy_lam = length_lambda((mask > 0).sum(1), alpha) if alpha > 0 else lam
    advantages, returns = estimate(rewards, values, mask, gamma, policy_lam, masking)
    lam_value = case.option("lam_value")
    if lam_value is not None or alpha > 0:
        value_lam = lam if lam_value is None else float(lam_value)
        _, returns = estimate(rewards, values, mask, gamma, value_lam, masking)
    if case.option("whiten", False):
        advantages = whiten(
            advantages,
            mask,
            ddof=int(case.option("whiten_ddof", 1)),
            eps=float(case.option("whiten_eps", 1e-8)),
        )
    return {"advantages": advantages, "returns": returns}


def _kl_in_reward(case: Case) -> Result:
    coefficient = float(case.option("kl_coef", 0.0))
    if "token_level_scores" in case.inputs:
        rewards = case.array("token_level_scores") - coefficient * _kl(case)
    else:
        scores = _clipped(case, case.array("rewards"))
        rewards = token_rewards(scores, case.mask, case.array("kl"), kl_coefficient=coefficient)
    return {"token_level_rewards": rewards}


_ALGORITHMS: dict[str, Callable[[Case], Result]] = {
    "grpo": _grpo,
    "grpo_passk": _passk,
    "rloo": _rloo,
    "opo": _opo,
    "gpg": _gpg,
    "maxrl": _maxrl,
    "gdpo": _gdpo,
    "reward_norm": _reward_norm,
    "reinforce_plus_plus": _reinforce_pp,
    "reinforce_plus_plus_baseline": _reinforce_pp_baseline,
    "reinforce_plus_plus_returns": _unwhitened_returns,
    "reinforce_plus_plus_baseline_unwhitened": _unwhitened_baseline,
    "reinforce": _placed,
    "reinforce_baseline": _placed,
    "dr_grpo": _placed,
    "group_norm": _placed,
    "remax": _remax,
    "optimal_token_baseline": _optimal_token_baseline,
    "advantage_norm": _advantage_norm,
    "gae": _gae,
    "kl_in_reward": _kl_in_reward,
}
