"""From a specification to its function, by table.

The module of a function is imported when the function is first asked for, so that the torch-free
part of the engine can resolve advantages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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


_KINDS = {
    ("advantage", "advantages.group"): """gpg group_relative leave_one_out length_weighted max_rl
        normalise_then_sum pass_at_k""",
    ("advantage", "advantages.token"): """distill gae group_in_group optimal_token_baseline
        reinforce_pp remax""",
    ("advantage", "user_functions"): "own=own_advantage",
    ("filter", "filters"): "difficulty zero_variance",
    ("kl", "kl"): "kl=estimate",
    ("map", "maps"): """first_wins implicit_reward parse weighted_sum win_rate
        cosine_length=cosine_length_map repetition=repetition_map
        soft_overlong=soft_overlong_map stop_properly=stop_properly_map""",
    ("map", "user_functions"): "own=own_map",
    ("select", "filters"): "best_and_worst parsed random=random_k threshold top",
    ("loss", "losses"): "cross_entropy",
    ("loss", "losses_supervised"): """bradley_terry dpo implicit_reward outcome
        token_outcome=outcome value_clip""",
    ("loss", "surrogates"): "cispo dppo gmpo kimi kl_cov policy_clip reinforce sapo topr vespo",
}
"""Kinds by family and module of `flowrl.algo`: `kind`, or `kind=function` if the names differ."""

_TABLE = {
    (family, kind.partition("=")[0]): f"flowrl.algo.{module}:{kind.rpartition('=')[2]}"
    for (family, module), kinds in _KINDS.items()
    for kind in kinds.split()
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
    return partial(_lookup(spec), spec=spec)


def resolve_map(spec: MapSpec) -> MapFunction:
    """Returns the function of a map."""
    return partial(_lookup(spec), spec=spec)


def resolve_select(spec: SelectSpec) -> SelectFunction:
    """Returns the function of a selection."""
    return partial(_lookup(spec), spec=spec)


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
    return partial(
        _lookup(spec),
        estimator=spec.estimator,
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
