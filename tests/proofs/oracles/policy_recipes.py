"""Which of flowrl's losses a library computes, by the library's own options.

A recipe is all that differs between libraries: the loss, the denominators, a KL term. Numbers that
a library fixes in its code and does not name among its options are read from the case's convention.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flowrl.specs.kl import Estimator
from flowrl.specs.loss import (
    CISPO,
    DPPO,
    GMPO,
    SAPO,
    VESPO,
    Correction,
    KLCov,
    LossSpec,
    Reinforce,
    Rejection,
    gspo,
    mask_outside,
    policy_clip,
    reject,
    truncate,
)
from flowrl.specs.loss.policy import Estimator as GapEstimator
from flowrl.specs.loss.policy import (
    PolicyOptions,
    RatioLevel,
    RejectionLevel,
    WeightLevel,
    correction_fields,
)
from tests.proofs.oracles.case import Case, UnknownConvention, choose
from tests.proofs.oracles.kl_estimators import estimator_of
from tests.proofs.oracles.loss_aggregation import Denominators, name_of

__all__ = ["RECIPES", "KLTerm", "Recipe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KLTerm:
    """A KL penalty on the reference policy inside a loss.

    Attributes:
        estimator: Its name here.
        coefficient: Its factor.
        clamp_input, clamp_output: Clamps.
        weight: Factor of each token: none, the detached-value ratio exp(lp - sg(lp)) whose gradient
            is the score function's, or the ratio to the behaviour policy.
    """

    estimator: Estimator
    coefficient: float
    clamp_input: float | None = None
    clamp_output: float | None = None
    weight: str = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to compute a library's loss with flowrl."""

    spec: LossSpec
    denominators: Denominators
    kl: KLTerm | None = None


_LEVELS: Mapping[str, RatioLevel] = {"token": "token", "sequence": "sequence"}
_TWENTY: PolicyOptions = {"min_log_ratio": -20.0, "max_log_ratio": 20.0}
_LEAST_WEIGHT = math.exp(-20)
"""verl and SkyRL clamp the logarithm of a weight to 20 on both sides before truncating it."""


def _verl(case: Case) -> Recipe:
    o: Mapping[str, Any] = case.options
    loss = str(o["loss"])
    both = o.get("clip_ratio", 0.2)
    low, high = o.get("clip_ratio_low", both), o.get("clip_ratio_high", both)
    extra: Mapping[str, Any] = o.get("global_batch_info") or {}
    by_sample = loss in {"gspo", "sapo", "gmpo"}
    mode = str(o.get("agg") or ("seq-mean-token-mean" if by_sample else "token-mean"))
    denominators = Denominators(
        name_of(mode),
        count_empty=loss == "gmpo",
        num_tokens=extra.get("batch_num_tokens"),
        num_samples=extra.get("global_batch_size"),
        dp_size=int(extra.get("dp_size") or 1),
    )
    if denominators.aggregation == "constant":
        scale = extra.get("loss_scale_factor") or case.mask.shape[1]
        denominators = denominators._replace(max_tokens=scale, num_samples=1, dp_size=1)
    clamp: dict[str, Any] = {"anchor": "old", **_TWENTY}
    spec: LossSpec
    if loss.startswith("ppo_clip"):
        correction = None
        if "level" in o:
            correction = _verl_weights(o)
        spec = policy_clip(
            low, high, dual_clip=o.get("clip_ratio_c"), correction=correction, **clamp
        )
    elif loss == "gspo":
        spec = gspo(low, high, ratio="sequence-token", anchor="old", max_log_ratio=10.0)
    elif loss == "cispo":
        spec = CISPO(ratio_low=1 - low, ratio_high=1 + high, **clamp)
    elif loss == "gmpo":
        spec = GMPO(clip_low=low, clip_high=high, anchor="old")
    elif loss == "sapo":
        spec = SAPO(
            tau_positive=o.get("tau_pos", 1.0), tau_negative=o.get("tau_neg", 1.05), **clamp
        )
    elif loss == "gpg":
        spec = Reinforce()
    elif loss == "kl_cov":
        spec = KLCov(fraction=o["kl_cov_ratio"], coefficient=o["ppo_kl_coef"], anchor="old")
    else:
        raise UnknownConvention(f"the loss {loss!r} of verl is not known here")
    return Recipe(spec=spec, denominators=denominators)


def _verl_weights(o: Mapping[str, Any]) -> Correction:
    """A threshold of two numbers drops what lies outside; a single one truncates."""
    bounds = [float(part) for part in str(o["threshold"]).split("_")]
    normalise = bool(o.get("batch_normalize"))
    if len(bounds) == 2:
        return mask_outside(*bounds, level=o["level"], normalise=normalise)
    return truncate(bounds[0], low=_LEAST_WEIGHT, level=o["level"], normalise=normalise)


_CLIPPED = ("ppo_clip", "dual_clip", "drgrpo", "tis")
"""How the names of SkyRL's cases of the clipped objective begin."""


def _skyrl(case: Case) -> Recipe:
    o = case.options
    name = str(o["loss"])
    low, high = o["eps_clip_low"], o["eps_clip_high"]
    reduction = name_of(str(o["reduction"]))
    denominators = Denominators(reduction, max_tokens=o.get("max_seq_len") or 0)
    clamp: dict[str, Any] = {"anchor": "old", **_TWENTY}
    behaviour: dict[str, Any] = {**clamp, "anchor": "behaviour"}
    spec: LossSpec
    if name.startswith("gspo"):
        spec = gspo(low, high, ratio="sequence-token", anchor="old", max_log_ratio=10.0)
    elif name.startswith("cispo"):
        spec = CISPO(
            ratio_low=1 - o["cispo_eps_clip_low"],
            ratio_high=1 + o["cispo_eps_clip_high"],
            **(behaviour if "rollout" in name else clamp),
        )
    elif name.startswith("sapo"):
        spec = SAPO(tau_positive=o["tau_pos"], tau_negative=o["tau_neg"], **clamp)
    elif name.startswith("rollout_is"):
        spec = CISPO(ratio_low=1 - low, ratio_high=1 + high, outside="zero", **behaviour)
    elif name.startswith("dppo"):
        spec = DPPO(limit=_number(r"more than (\S+)", case, 0.1), **behaviour)
    elif name.startswith(_CLIPPED) or name.endswith("mask"):
        spec = policy_clip(
            low,
            high,
            dual_clip=o.get("clip_ratio_c"),
            correction=_skyrl_weights(case, name),
            rejection=_skyrl_mask(case, name),
            **clamp,
        )
    else:
        raise UnknownConvention(f"the loss {name!r} of SkyRL is not known here")
    return Recipe(spec=spec, denominators=denominators)


def _skyrl_weights(case: Case, name: str) -> Correction | None:
    if not name.startswith("tis"):
        return None
    cap = _number(r"min\(exp\(.*?\),([\d.]+)\)", case, 2.0)
    return truncate(cap, low=_LEAST_WEIGHT, level="sequence" if "seq" in name else "token")


def _skyrl_mask(case: Case, name: str) -> Rejection | None:
    if not name.endswith("mask"):
        return None
    low, high = _bounds(case)
    level: RejectionLevel = "token"
    if "seq" in name:
        level = "sequence-mean" if "geo" in name else "sequence-sum"
    return reject(low=-math.log(high), high=-math.log(low), level=level, estimator="k1")


def _nemo(case: Case) -> Recipe:
    o = case.option
    low, high = o("ratio_clip_min"), o("ratio_clip_max")
    valid = float(case.array("sample_mask").sum())
    token_level = o("token_level_loss", True)
    denominators = Denominators("token-mean" if token_level else "sequence-mean-token-mean")
    denominators = denominators._replace(num_samples=valid)
    sequence = bool(o("sequence_level_importance_ratios", False))
    correction, rejection = _nemo_correction(case, sequence)
    extra: dict[str, Any] = {"anchor": "old"}
    spec: LossSpec
    if o("disable_ppo_ratio", False):
        spec = Reinforce(**extra, **correction_fields(correction, rejection))
    elif o("use_cispo", False):
        fields: Any = correction_fields(correction, rejection)
        spec = CISPO(ratio_low=1 - low, ratio_high=1 + high, **extra, **fields)
    else:
        spec = policy_clip(
            low,
            high,
            dual_clip=o("ratio_clip_c"),
            ratio="sequence" if sequence else "token",
            correction=correction,
            rejection=rejection,
            **extra,
        )
    coefficient = o("reference_policy_kl_penalty", 0.0)
    kl = None
    if coefficient:
        kl = KLTerm(
            estimator=estimator_of(o("reference_policy_kl_type", "k3")),
            coefficient=coefficient,
            clamp_input=o("kl_input_clamp_value", 20.0),
            clamp_output=o("kl_output_clamp_value", 10.0),
            weight="behaviour" if o("use_on_policy_kl_approximation", False) else "score",
        )
    return Recipe(spec=spec, denominators=denominators, kl=kl)


def _nemo_correction(case: Case, sequence: bool) -> tuple[Correction | None, Rejection | None]:
    if not case.option("use_importance_sampling_correction", False):
        return None, None
    kind = case.option("truncated_importance_sampling_type", "tis") or "tis"
    high = case.option("truncated_importance_sampling_ratio")
    low = case.option("truncated_importance_sampling_ratio_min") or 0.0
    level: Any = "sequence" if sequence else "token"
    if high is None:
        return truncate(None, level=level), None
    return _within(kind, low, high, level)


def _within(
    kind: str, low: float, high: float, level: WeightLevel = "token"
) -> tuple[Correction, Rejection | None]:
    """The three ways of NeMo-RL and OpenRLHF to hold a weight within bounds."""
    match kind:
        case "tis":
            return truncate(high, low=low, level=level), None
        case "icepop":
            return mask_outside(low, high, level=level), None
        case "seq-mask-tis":
            return truncate(None, level=level), _geometric(low, high)
        case _:
            raise UnknownConvention(f"the correction {kind!r} is not known here")


def _geometric(low: float, high: float) -> Rejection:
    """Samples are kept whose geometric mean of old / behaviour lies within the bounds."""
    most = -math.log(low) if low > 0 else None
    return reject(low=-math.log(high), high=most, level="sequence-mean", estimator="k1")


def _openrlhf(case: Case) -> Recipe:
    o = case.option
    gspo_loss = choose({"ppo": False, "gspo": True}, o("policy_loss_type", "ppo"), "loss")
    correction: Correction | None = None
    rejection: Rejection | None = None
    if o("enable_vllm_is_correction", False):
        low, high = o("vllm_is_truncated_threshold")
        correction, rejection = _within(o("vllm_is_correction_type", "tis"), low, high)
    clamp: dict[str, Any] = {"anchor": "old", **({} if gspo_loss else _TWENTY)}
    spec = policy_clip(
        o("clip_eps_low", 0.2),
        o("clip_eps_high", 0.2),
        dual_clip=o("dual_clip"),
        ratio="sequence" if gspo_loss else "token",
        correction=correction,
        rejection=rejection,
        **clamp,
    )
    by_token = o("token_level_loss", True) and not gspo_loss
    mode = "token-mean" if by_token else "seq-mean-token-mean"
    return Recipe(spec=spec, denominators=Denominators(name_of(mode), count_empty=False))


def _trl(case: Case) -> Recipe:
    o = case.option
    kind = str(o("loss_type"))
    low, high = o("epsilon_low"), o("epsilon_high")
    level = choose(_LEVELS, o("importance_sampling_level", "token"), "level")
    spec: LossSpec
    if kind == "cispo":
        spec = CISPO(ratio_high=high, ratio=level, anchor="old")
    elif kind == "sapo":
        spec = SAPO(
            tau_positive=o("sapo_temperature_pos", 1.0),
            tau_negative=o("sapo_temperature_neg", 1.05),
            ratio=level,
            anchor="old",
        )
    elif kind == "vespo":
        spec = VESPO(
            k_positive=_number(r"k\+=([\d.]+)", case, 2.0),
            lambda_positive=_number(r"lam\+=([\d.]+)", case, 3.0),
            k_negative=_number(r"k-=([\d.]+)", case, 3.0),
            lambda_negative=_number(r"lam-=([\d.]+)", case, 2.0),
            anchor="old",
            min_log_ratio=-20.0,
            max_log_ratio=20.0,
        )
    else:
        spec = policy_clip(low, high, ratio_cap=o("delta"), ratio=level, anchor="old")
    by_sample = Denominators("sequence-mean-token-mean")
    by_item = Denominators("token-mean", num_tokens=o("num_items_in_batch"))
    known = {
        "grpo": by_sample,
        "sapo": by_sample,
        "bnpo": Denominators("token-mean"),
        "dr_grpo": Denominators("constant", max_tokens=o("max_completion_length") or 0),
        "luspo": Denominators("sequence-mean-token-sum"),
        "dapo": by_item,
        "cispo": by_item,
        "vespo": by_item,
    }
    denominators = choose(known, kind, "loss_type")
    beta = o("beta", 0.0)
    kl = KLTerm(estimator="k3", coefficient=beta) if beta else None
    return Recipe(spec=spec, denominators=denominators, kl=kl)


def _slime(case: Case) -> Recipe:
    o = case.options
    both = o.get("eps_clip", 0.2)
    low, high = o.get("clip_ratio_low", both), o.get("clip_ratio_high", o.get("eps_clip_high"))
    high = low if high is None else high
    spec: LossSpec
    if o["loss"] == "cispo":
        spec = CISPO(ratio_low=1 - low, ratio_high=1 + high, anchor="old")
    else:
        names: Mapping[str, RatioLevel]
        names = {"ppo_clip": "token", "dual_clip": "token", "gspo": "sequence"}
        level = choose(names, o["loss"], "loss")
        spec = policy_clip(low, high, dual_clip=o.get("eps_clip_c"), ratio=level, anchor="old")
    return Recipe(spec=spec, denominators=Denominators("token-mean"))


def _areal(case: Case) -> Recipe:
    o = case.option
    low = o("eps_clip")
    level = choose(_LEVELS, o("importance_sampling_level", "token"), "level")
    correction, rejection = _areal_correction(case)
    spec = policy_clip(
        low,
        o("eps_clip_higher"),
        dual_clip=o("c_clip"),
        ratio=level,
        average_advantages=level == "sequence",
        correction=correction,
        rejection=rejection,
        anchor="old",
    )
    return Recipe(spec=spec, denominators=Denominators("token-mean"))


def _areal_correction(case: Case) -> tuple[Correction | None, Rejection | None]:
    rule = case.option("rejection")
    if rule is None:
        return None, None
    low, high, metric = rule.get("lower"), rule.get("upper"), rule.get("metric", "ratio")
    by_sample = rule["level"] == "sequence"
    judged = choose(_AREAL_JUDGED, rule.get("agg", "mean"), "agg") if by_sample else "token"
    masks = choose({"clamp": False, "mask": True}, rule["action"], "action")
    if masks and not by_sample and case.option("importance_sampling_level") == "sequence":
        raise UnknownConvention("AReaL takes a sample's ratio over the tokens that its mask leaves")
    if metric == "ratio":
        weights: WeightLevel = "geometric" if by_sample else "token"
        if judged in ("token", "sequence-mean"):
            make = mask_outside if masks else truncate
            return make(low=low or 0.0, high=high, level=weights), None
        if not masks:
            raise UnknownConvention("AReaL clamps one ratio of a sample where another is too large")
        estimator: GapEstimator = "k1"
        low, high = math.log(low) if low else None, math.log(high)
    else:
        weights = "token"
        estimator = choose(_AREAL_ESTIMATORS, metric, "metric")
    rejection = reject(
        low=low, high=high, level=judged, estimator=estimator, divergence="old-behaviour"
    )
    return truncate(None, level=weights), rejection


_AREAL_JUDGED: Mapping[str, RejectionLevel] = {
    "sum": "sequence-sum",
    "mean": "sequence-mean",
    "max": "sequence-max",
}
_AREAL_ESTIMATORS: Mapping[str, GapEstimator] = {"kl_k1": "k1", "kl_k2": "k2", "kl_k3": "k3"}
"""Of KL(old || behaviour)."""


def _msrl(case: Case) -> Recipe:
    o = case.options
    both = o.get("clip_ratio", 0.2)
    entropy = o.get("entropy_coef", 0.0)
    spec = policy_clip(
        o.get("clip_ratio_low", both),
        o.get("clip_ratio_high", both),
        anchor="old",
        entropy=entropy,
    )
    kl = None
    if o.get("kl_coef"):
        name = estimator_of(o["kl_type"])
        clamp_input, clamp_output = (20.0, 10.0) if name == "k3" else (None, None)
        kl = KLTerm(
            estimator=name,
            coefficient=o["kl_coef"],
            clamp_input=clamp_input,
            clamp_output=clamp_output,
        )
    return Recipe(spec=spec, denominators=Denominators(name_of(o["agg"])), kl=kl)


def _roll(case: Case) -> Recipe:
    o = case.options
    level = choose({**_LEVELS, "seq": "sequence"}, o.get("ratio_level", "token"), "ratio_level")
    spec = policy_clip(
        o["clip_ratio_low"],
        o["clip_ratio_high"],
        dual_clip=o.get("clip_ratio_c"),
        ratio=level,
        anchor="old",
    )
    mode = o.get("agg", "seq-mean-token-mean")
    return Recipe(spec=spec, denominators=Denominators(name_of(mode)))


RECIPES: Mapping[str, Callable[[Case], Recipe]] = {
    "verl": _verl,
    "skyrl": _skyrl,
    "nemo": _nemo,
    "openrlhf": _openrlhf,
    "trl": _trl,
    "slime": _slime,
    "areal": _areal,
    "msrl": _msrl,
    "roll": _roll,
}


def _number(pattern: str, case: Case, default: float) -> float:
    found = re.search(pattern, case.convention)
    return float(found[1].rstrip(".,;")) if found else default


def _bounds(case: Case) -> tuple[float, float]:
    found = re.search(r"\[([\d.]+),\s*([\d.]+)\]", case.convention)
    if found is None:
        raise UnknownConvention("the case does not say within which bounds it keeps a sample")
    return float(found[1]), float(found[2])
