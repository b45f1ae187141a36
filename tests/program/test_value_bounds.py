"""The bounds of every number of a specification: the bound itself, and the values beside it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from flowrl.specs import KL, GroupRelative, Sampling, Spec, maps
from flowrl.specs.advantage import (
    GAE,
    GPG,
    Distill,
    GroupInGroup,
    NormaliseThenSum,
    ReinforcePP,
    ReMax,
)
from flowrl.specs.base import wrong_fields
from flowrl.specs.filters import BestAndWorst, Difficulty, RandomK, Top, ZeroVariance
from flowrl.specs.loss import (
    CISPO,
    DPO,
    DPPO,
    GMPO,
    SAPO,
    TOPR,
    VESPO,
    BradleyTerry,
    ImplicitReward,
    Kimi,
    KLCov,
    PolicyClip,
    ValueClip,
)
from flowrl.specs.maps import CosineLength, Repetition, SoftOverlong, StopProperly

TINY, INF = 1e-9, math.inf
NOT_NEGATIVE = ((0.0, 9.0), (-TINY, -INF))
"""Values that are taken, and values that are not."""
FINITE_FROM_0 = ((0.0, 9.0), (-TINY, INF))
POSITIVE = ((TINY, 9.0), (0.0, -1.0))
SHARE = ((0.0, 1.0), (-TINY, 1 + TINY))
COUNT = ((1, 9), (0, -1))
FINITE = ((-9.0, 0.0, 9.0), (INF, -INF, math.nan))

BOUNDS: dict[Spec, dict[str, tuple[tuple[float, ...], tuple[float, ...]]]] = {
    PolicyClip(): {
        **dict.fromkeys(("clip_low", "clip_high", "weights_low", "weights_high"), NOT_NEGATIVE),
        "dual_clip": ((1 + TINY, 3.0), (1.0, 0.5)),
        "ratio_cap": POSITIVE,
        "entropy": FINITE,
    },
    CISPO(ratio_high=None): {"ratio_low": NOT_NEGATIVE},
    CISPO(): {"ratio_high": NOT_NEGATIVE},
    TOPR(positive_low=0.0): {
        **dict.fromkeys(("positive_high", "negative_high"), NOT_NEGATIVE),
        **dict.fromkeys(("positive_low", "negative_low"), ((0.0, 1.0), (-TINY, 1 + TINY))),
    },
    VESPO(): dict.fromkeys(
        ("k_positive", "k_negative", "lambda_positive", "lambda_negative"), POSITIVE
    ),
    GMPO(): dict.fromkeys(("clip_low", "clip_high"), NOT_NEGATIVE),
    SAPO(): dict.fromkeys(("tau_positive", "tau_negative"), POSITIVE),
    KLCov(): {"fraction": ((TINY, 1.0), (0.0, 1 + TINY)), "coefficient": NOT_NEGATIVE},
    DPPO(): {"limit": NOT_NEGATIVE},
    Kimi(): {"tau": NOT_NEGATIVE},
    ValueClip(form="huber"): {"clip": NOT_NEGATIVE, "delta": POSITIVE},
    DPO(): {"beta": POSITIVE, "label_smoothing": ((0.0, 0.5), (-TINY, 0.5 + TINY))},
    BradleyTerry(): {"centering": NOT_NEGATIVE},
    ImplicitReward(): {"beta": POSITIVE},
    maps.ImplicitReward(): {"beta": FINITE},
    GroupRelative(): {
        "ddof": ((0, 1), (-1, 2)),
        **dict.fromkeys(("eps", "variance_floor"), FINITE_FROM_0),
    },
    NormaliseThenSum(): {"ddof": ((0, 1), (-1, 2)), "batch_eps": FINITE_FROM_0},
    GPG(): {"norm": POSITIVE},
    GAE(): {
        **dict.fromkeys(("gamma", "lam", "lam_value"), SHARE),
        **dict.fromkeys(("length_alpha", "kl_coefficient", "whiten_eps"), FINITE_FROM_0),
        "whiten_ddof": ((0, 1), (-1, 2)),
    },
    ReinforcePP(): {"gamma": SHARE, "kl_coefficient": FINITE_FROM_0},
    ReMax(): {"kl_coefficient": FINITE_FROM_0},
    GroupInGroup(): {"gamma": SHARE, "weight": FINITE},
    Distill(): {"discount": SHARE, **dict.fromkeys(("coefficient", "score_weight"), FINITE)},
    KL(estimator="k3", coefficient=0.1): {
        "coefficient": FINITE_FROM_0,
        **dict.fromkeys(("clamp_input", "clamp_output", "target", "step_clip"), POSITIVE),
        "horizon": COUNT,
    },
    Sampling(): {
        "temperature": ((0.0, 1e-3, 9.0), (-TINY, 1e-4, INF, math.nan)),
        "top_p": ((TINY, 1.0), (0.0, 1 + TINY)),
        "min_p": SHARE,
        "repetition_penalty": ((TINY, 9.0), (0.0, INF)),
        **dict.fromkeys(("top_k", "min_tokens"), ((0, 9), (-1, 0.5))),
        "max_tokens": COUNT,
    },
    ZeroVariance(): {"tolerance": NOT_NEGATIVE},
    Difficulty(low=-1.0): {"high": ((-1 + TINY, 9.0), (-1.0, -2.0, INF))},
    Difficulty(high=1.0): {"low": ((1 - TINY, -9.0), (1.0, 2.0, -INF))},
    BestAndWorst(): {"tolerance": NOT_NEGATIVE},
    Top(k=1): {"k": COUNT},
    RandomK(k=1): {"k": COUNT},
    SoftOverlong(max_tokens=8, buffer=1): {
        "max_tokens": COUNT,
        "buffer": ((0, 8), (-1, 9)),
        "factor": FINITE,
    },
    StopProperly(): {"coefficient": FINITE},
    CosineLength(max_tokens=8): dict.fromkeys(
        ("wrong_short", "wrong_long", "correct_short", "correct_long", "correct_above"), FINITE
    ),
    Repetition(): {"ngram": COUNT, "max_penalty": ((0.0, -1.0), (TINY,))},
}


@pytest.mark.parametrize(
    ("spec", "name"),
    [(spec, name) for spec, fields in BOUNDS.items() for name in fields],
    ids=[f"{spec.kind}-{name}" for spec, fields in BOUNDS.items() for name in fields],
)
def test_a_bound_and_what_lies_within_is_taken_and_what_lies_beyond_is_not(
    spec: Spec, name: str
) -> None:
    inside, outside = BOUNDS[spec][name]
    assert list(wrong_fields(spec)) == []
    for value in inside:
        assert list(wrong_fields(replace(spec, **{name: value}))) == []  # type: ignore[type-var]
    for value in outside:
        wrong = [each[0] for each in wrong_fields(replace(spec, **{name: value}))]  # type: ignore[type-var]
        assert wrong, value


@pytest.mark.parametrize(
    ("spec", "low", "high"),
    [
        (PolicyClip(weights="token"), "weights_low", "weights_high"),
        (PolicyClip(rejection="token"), "rejection_low", "rejection_high"),
        (PolicyClip(), "min_log_ratio", "max_log_ratio"),
        (CISPO(), "ratio_low", "ratio_high"),
        (TOPR(), "positive_low", "positive_high"),
        (TOPR(), "negative_low", "negative_high"),
    ],
)
def test_a_lower_bound_may_be_the_upper_one_and_no_more(spec: Spec, low: str, high: str) -> None:
    def wrong(one: float, other: float) -> list[str]:
        changed = replace(spec, **{low: one, high: other})  # type: ignore[type-var]
        return [each[0] for each in wrong_fields(changed)]

    assert wrong(0.7, 0.7) == wrong(0.7, 0.8) == []
    assert wrong(0.7, 0.7 - TINY) == [low]
