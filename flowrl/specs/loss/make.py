"""Policy losses as a program spells them: `fl.loss.policy_clip(0.2)`, `fl.loss.gspo()`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict, Unpack

from flowrl.errors import TraceError
from flowrl.specs.function import caller
from flowrl.specs.loss.base import Aggregation, LossSpec
from flowrl.specs.loss.correction import Anchor, Correction, Outside, Rejection
from flowrl.specs.loss.policy import (
    CISPO,
    DPPO,
    GMPO,
    SAPO,
    TOPR,
    VESPO,
    Kimi,
    KLCov,
    PolicyClip,
    RatioLevel,
    Reinforce,
    correction_fields,
)
from flowrl.specs.names import argument_hint, arguments_of

__all__ = [
    "PolicyOptions",
    "cispo",
    "dppo",
    "gmpo",
    "gspo",
    "kimi",
    "kl_cov",
    "luspo",
    "policy_clip",
    "reinforce",
    "sapo",
    "topr",
    "vespo",
]


class PolicyOptions(TypedDict, total=False):
    """What every policy loss takes beside its own numbers; `PolicyLoss` explains each.

    `correction` and `rejection` make the old policy the anchor, unless `anchor` says otherwise.
    """

    aggregation: Aggregation
    anchor: Anchor
    correction: Correction | None
    rejection: Rejection | None
    sequence_mask: float | None
    entropy: float
    min_log_ratio: float | None
    max_log_ratio: float | None
    count_empty: bool


def _fields(function: Callable[..., LossSpec], options: PolicyOptions) -> dict[str, Any]:
    found: dict[str, Any] = dict(options)
    for name in found:
        if name not in PolicyOptions.__annotations__:
            names = arguments_of(function)
            raise TraceError(
                f"fl.loss.{function.__name__} does not have the option '{name}'",
                where=caller(),
                expected=", ".join(names),
                hint=argument_hint(function.__name__, name, names),
            )
    correction, rejection = found.pop("correction", None), found.pop("rejection", None)
    for name, value, kind, made_by in (
        ("correction", correction, Correction, "fl.loss.truncate() or fl.loss.mask_outside()"),
        ("rejection", rejection, Rejection, "fl.loss.reject(high=...)"),
    ):
        if value is not None and not isinstance(value, kind):
            raise TraceError(
                f"this is no {name} of a policy loss",
                where=caller(),
                found=repr(value),
                expected=f"what {made_by} gives, or None",
            )
    if correction is not None and found.get("anchor") == "behaviour":
        raise TraceError(
            "a ratio to the behaviour policy needs no importance weights: they would count twice",
            where=caller(),
            found="anchor='behaviour' with a correction",
            hint="leave anchor out: with a correction it is the old policy",
        )
    if correction is not None or rejection is not None:
        found.setdefault("anchor", "old")
    return found | correction_fields(correction, rejection)


def policy_clip(
    clip_low: float = 0.2,
    clip_high: float | None = None,
    *,
    dual_clip: float | None = None,
    ratio_cap: float | None = None,
    ratio: RatioLevel = "token",
    average_advantages: bool = False,
    **options: Unpack[PolicyOptions],
) -> PolicyClip:
    """The clipped objective of PPO; `clip_high` is `clip_low` where it is not given."""
    if isinstance(dual_clip, int | float) and dual_clip <= 1:
        raise TraceError(
            "dual_clip is at most 1", where=caller(), found=repr(dual_clip), expected="more than 1"
        )
    return PolicyClip(
        clip_low=clip_low,
        clip_high=clip_low if clip_high is None else clip_high,
        dual_clip=dual_clip,
        ratio_cap=ratio_cap,
        ratio=ratio,
        average_advantages=average_advantages,
        **_fields(policy_clip, options),
    )


def gspo(
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    *,
    ratio: RatioLevel = "sequence",
    **options: Unpack[PolicyOptions],
) -> PolicyClip:
    """Group sequence policy optimization: the clipped objective of a sample's ratio.

    The bounds are those of the paper's experiments (Zheng et al., 2025, section 5.1).
    """
    options.setdefault("aggregation", "sequence-mean-token-mean")
    return policy_clip(clip_low, clip_high, ratio=ratio, **options)


def luspo(
    clip_low: float = 3e-4, clip_high: float = 4e-4, **options: Unpack[PolicyOptions]
) -> PolicyClip:
    """Length-unbiased GSPO: each sample's objective times its length (LUSPO, arXiv 2602.05261)."""
    options.setdefault("aggregation", "sequence-mean-token-sum")
    return policy_clip(clip_low, clip_high, ratio="sequence", **options)


def reinforce(**options: Unpack[PolicyOptions]) -> Reinforce:
    """The plain policy gradient, REINFORCE and GPG. It corrects for no other policy by itself."""
    return Reinforce(**_fields(reinforce, options))


def cispo(
    eps_low: float = 1.0,
    eps_high: float = 0.2,
    *,
    cap: float | None = None,
    outside: Outside = "truncate",
    **options: Unpack[PolicyOptions],
) -> CISPO:
    """Clipped importance-sampling weights: the ratio within [1 - eps_low, 1 + eps_high], detached.

    Args:
        cap: The upper bound itself, in place of 1 + eps_high.
    """
    return CISPO(
        ratio_low=max(0.0, 1 - eps_low),
        ratio_high=1 + eps_high if cap is None else cap,
        outside=outside,
        **_fields(cispo, options),
    )


def topr(**options: Unpack[PolicyOptions]) -> TOPR:
    """Tapered off-policy REINFORCE with the paper's bounds; `TOPR` takes others."""
    return TOPR(**_fields(topr, options))


def vespo(**options: Unpack[PolicyOptions]) -> VESPO:
    """Variational sequence-level soft policy optimization; `VESPO` takes other shapes."""
    return VESPO(**_fields(vespo, options))


def gmpo(
    clip_low: float = 0.4, clip_high: float | None = None, **options: Unpack[PolicyOptions]
) -> GMPO:
    """Geometric-mean policy optimization; `clip_high` is `clip_low` where it is not given."""
    high = clip_low if clip_high is None else clip_high
    return GMPO(clip_low=clip_low, clip_high=high, **_fields(gmpo, options))


def sapo(
    tau_positive: float = 1.0, tau_negative: float = 1.05, **options: Unpack[PolicyOptions]
) -> SAPO:
    """Soft adaptive policy optimization."""
    return SAPO(tau_positive=tau_positive, tau_negative=tau_negative, **_fields(sapo, options))


def kl_cov(
    fraction: float = 0.0002, coefficient: float = 1.0, **options: Unpack[PolicyOptions]
) -> KLCov:
    """The policy gradient with a penalty on the tokens of largest covariance."""
    return KLCov(fraction=fraction, coefficient=coefficient, **_fields(kl_cov, options))


def dppo(limit: float = 0.1, **options: Unpack[PolicyOptions]) -> DPPO:
    """The policy gradient within a trust region of total variation."""
    return DPPO(limit=limit, **_fields(dppo, options))


def kimi(tau: float = 0.1, **options: Unpack[PolicyOptions]) -> Kimi:
    """The policy gradient with a squared log-ratio, as of Kimi k1.5."""
    return Kimi(tau=tau, **_fields(kimi, options))
