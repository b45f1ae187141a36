"""From a specification to its function, by table.

A row of the table is `(family, kind) -> "module:function"`; the module is imported when the
function is first asked for, so that the torch-free part of the engine can resolve advantages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from flowrl.algo.advantages.batch import AdvantageBatch, AdvantageResult
from flowrl.algo.maps import MapBatch, MapResult
from flowrl.errors import GraphError
from flowrl.specs import KL, AdvantageSpec, FilterSpec, LossSpec, MapSpec, OwnLoss, SelectSpec, Spec
from flowrl.specs.advantage import OwnAdvantage

if TYPE_CHECKING:
    import torch

    from flowrl.algo.losses import LossFunction

AdvantageFunction: TypeAlias = Callable[[AdvantageBatch], AdvantageResult]
"""`batch -> advantages [N] or [N, T], and returns`."""

FilterFunction: TypeAlias = Callable[[npt.ArrayLike, npt.ArrayLike], npt.NDArray[np.bool_]]
"""`(scores [N], groups [N]) -> kept [N]`."""

MapFunction: TypeAlias = Callable[[MapBatch], MapResult]
"""`batch -> fields by name`."""

SelectFunction: TypeAlias = Callable[
    [npt.ArrayLike, npt.ArrayLike, Sequence[str]], npt.NDArray[np.int64]
]
"""`(scores [N], groups [N], sample ids) -> row numbers [K]`, in the order of the result."""

KLFunction: TypeAlias = "Callable[[torch.Tensor, torch.Tensor], torch.Tensor]"
"""`(logprobs [R], reference logprobs [R]) -> KL [R]`, without its coefficient."""


_TABLE: dict[tuple[str, str], str] = {
    ("advantage", "distill"): "flowrl.algo.advantages.token:distill",
    ("advantage", "gae"): "flowrl.algo.advantages.token:gae",
    ("advantage", "gpg"): "flowrl.algo.advantages.group:gpg",
    ("advantage", "group_in_group"): "flowrl.algo.advantages.token:group_in_group",
    ("advantage", "group_relative"): "flowrl.algo.advantages.group:group_relative",
    ("advantage", "leave_one_out"): "flowrl.algo.advantages.group:leave_one_out",
    ("advantage", "length_weighted"): "flowrl.algo.advantages.group:length_weighted",
    ("advantage", "max_rl"): "flowrl.algo.advantages.group:max_rl",
    ("advantage", "normalise_then_sum"): "flowrl.algo.advantages.group:normalise_then_sum",
    ("advantage", "optimal_token_baseline"): "flowrl.algo.advantages.token:optimal_token_baseline",
    ("advantage", "own"): "flowrl.algo.user_functions:own_advantage",
    ("advantage", "pass_at_k"): "flowrl.algo.advantages.group:pass_at_k",
    ("advantage", "reinforce_pp"): "flowrl.algo.advantages.token:reinforce_pp",
    ("advantage", "remax"): "flowrl.algo.advantages.token:remax",
    ("filter", "difficulty"): "flowrl.algo.filters:difficulty",
    ("filter", "zero_variance"): "flowrl.algo.filters:zero_variance",
    ("kl", "kl"): "flowrl.algo.kl:estimate",
    ("map", "cosine_length"): "flowrl.algo.maps:cosine_length_map",
    ("map", "first_wins"): "flowrl.algo.maps:first_wins",
    ("map", "implicit_reward"): "flowrl.algo.maps:implicit_reward",
    ("map", "own"): "flowrl.algo.user_functions:own_map",
    ("map", "parse"): "flowrl.algo.maps:parse",
    ("map", "repetition"): "flowrl.algo.maps:repetition_map",
    ("map", "soft_overlong"): "flowrl.algo.maps:soft_overlong_map",
    ("map", "stop_properly"): "flowrl.algo.maps:stop_properly_map",
    ("map", "weighted_sum"): "flowrl.algo.maps:weighted_sum",
    ("map", "win_rate"): "flowrl.algo.maps:win_rate",
    ("select", "best_and_worst"): "flowrl.algo.filters:best_and_worst",
    ("select", "parsed"): "flowrl.algo.filters:parsed",
    ("select", "random"): "flowrl.algo.filters:random_k",
    ("select", "threshold"): "flowrl.algo.filters:threshold",
    ("select", "top"): "flowrl.algo.filters:top",
    ("loss", "cross_entropy"): "flowrl.algo.losses:cross_entropy",
    ("loss", "policy_clip"): "flowrl.algo.surrogates:policy_clip",
    ("loss", "gmpo"): "flowrl.algo.surrogates:gmpo",
    ("loss", "sapo"): "flowrl.algo.surrogates:sapo",
    ("loss", "dppo"): "flowrl.algo.surrogates:dppo",
    ("loss", "reinforce"): "flowrl.algo.surrogates:reinforce",
    ("loss", "cispo"): "flowrl.algo.surrogates:cispo",
    ("loss", "topr"): "flowrl.algo.surrogates:topr",
    ("loss", "vespo"): "flowrl.algo.surrogates:vespo",
    ("loss", "kl_cov"): "flowrl.algo.surrogates:kl_cov",
    ("loss", "kimi"): "flowrl.algo.surrogates:kimi",
    ("loss", "value_clip"): "flowrl.algo.losses_supervised:value_clip",
    ("loss", "dpo"): "flowrl.algo.losses_supervised:dpo",
    ("loss", "bradley_terry"): "flowrl.algo.losses_supervised:bradley_terry",
    ("loss", "implicit_reward"): "flowrl.algo.losses_supervised:implicit_reward",
    ("loss", "outcome"): "flowrl.algo.losses_supervised:outcome",
    ("loss", "token_outcome"): "flowrl.algo.losses_supervised:outcome",
}

_PROPORTIONAL = frozenset(
    {"policy_clip", "gmpo", "sapo", "dppo", "reinforce", "cispo", "topr", "vespo"}
)
"""Losses whose value and gradient at a token are 0 if all advantages of its sample are 0."""


def resolve_advantage(spec: AdvantageSpec) -> AdvantageFunction:
    """Returns the function of an advantage; `spec.needs` names the fields that it reads."""
    function = _lookup(spec)
    if spec.needs or isinstance(spec, OwnAdvantage):
        return lambda batch: function(batch, spec)
    return lambda batch: AdvantageResult(advantages=function(batch.scores, batch.groups, spec))


def resolve_filter(spec: FilterSpec) -> FilterFunction:
    """Returns the function of a filter."""
    function = _lookup(spec)
    return lambda scores, groups: function(scores, groups, spec)


def resolve_map(spec: MapSpec) -> MapFunction:
    """Returns the function of a map."""
    function = _lookup(spec)
    return lambda batch: function(batch, spec)


def resolve_select(spec: SelectSpec) -> SelectFunction:
    """Returns the function of a selection."""
    function = _lookup(spec)
    return lambda scores, groups, ids: function(scores, groups, ids, spec)


def resolve_loss(spec: LossSpec) -> LossFunction:
    """Returns the function of a loss. Imports torch, and the user's module of an own loss."""
    from flowrl.algo.losses import LossFunction

    if isinstance(spec, OwnLoss):
        from flowrl.algo.losses_supervised import own_loss

        return LossFunction(spec, own_loss(spec), spec.proportional)
    bonus = bool(getattr(spec, "entropy", 0.0))
    return LossFunction(spec, _lookup(spec), spec.kind in _PROPORTIONAL and not bonus)


def resolve_kl(spec: KL) -> KLFunction:
    """Returns the estimator of a KL term; the caller multiplies by `spec.coefficient`.

    Imports torch.

    Raises:
        GraphError: The term is the exact divergence, which `flowrl.algo.logprobs.full_in_chunks`
            computes from distributions instead of logprobs.
    """
    if spec.estimator == "full":
        raise GraphError("the full divergence is not computed from logprobs", found=str(spec))
    estimator, function = spec.estimator, _lookup(spec)
    return lambda logprobs, other: function(
        logprobs,
        other,
        estimator,
        clamp_input=spec.clamp_input,
        clamp_output=spec.clamp_output,
    )


def _lookup(spec: Spec) -> Callable[..., Any]:
    place = _TABLE.get((spec.family, spec.kind))
    if place is None:
        known = sorted(kind for family, kind in _TABLE if family == spec.family)
        raise GraphError(
            f"no function for the {spec.family} {spec.kind!r}", expected=", ".join(known)
        )
    module, name = place.split(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function
