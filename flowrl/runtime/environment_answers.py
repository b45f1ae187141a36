"""What an environment returned, looked at before it is believed: it is foreign code."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real

import numpy as np

from flowrl.backend.environment import EnvironmentState, Observation, Outcome, Said
from flowrl.runtime.transcript import NUM_TURNS

__all__ = ["Unusable", "usable_observation", "usable_outcome"]

_RESERVED = frozenset({NUM_TURNS, "score", "length", "truncated"})
"""Names that evaluations report beside an environment's metrics."""
_MAX_REWARD = 1e30
"""Batches hold rewards in float32, whose largest number is 3.4e38; sums of them stay below it."""


class Unusable(Exception):
    """What an environment returned cannot be used; to follow "gave"."""


def usable_observation(value: object) -> Observation:
    """What a reset returned, with plain types.

    Raises:
        Unusable: it is no observation.
    """
    if not isinstance(value, Observation):
        raise Unusable(f"no Observation but {_shown(value)}")
    _check_said(value.content)
    return Observation(content=value.content, state=_usable_state(value.state))


def usable_outcome(value: object) -> Outcome:
    """What a step returned, with plain types.

    Raises:
        Unusable: it is no outcome, or a part of it cannot be used.
    """
    if not isinstance(value, Outcome):
        raise Unusable(f"no Outcome but {_shown(value)}")
    _check_said(value.observation)
    if not isinstance(value.done, bool | np.bool_):
        raise Unusable(f"done={_shown(value.done)}, which is no truth value")
    metrics = value.metrics
    if not isinstance(metrics, Mapping):
        raise Unusable(f"metrics={_shown(metrics)}, which is no mapping")
    if taken := sorted(_RESERVED & set(metrics)):
        raise Unusable(f"a metric called {taken[0]!r}, which is a name of flowrl's own")
    return Outcome(
        observation=value.observation,
        reward=_usable_number(value.reward, "reward"),
        done=bool(value.done),
        state=_usable_state(value.state),
        metrics={str(name): _usable_number(metrics[name], f"metric {name}") for name in metrics},
    )


def _usable_number(value: object, name: str) -> float:
    number = float(value) if isinstance(value, Real) else math.nan
    if not abs(number) <= _MAX_REWARD:
        raise Unusable(f"{name}={_shown(value)}, which is no number of at most {_MAX_REWARD:g}")
    return number


def _usable_state(value: object) -> EnvironmentState:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | np.integer):
        return int(value)
    raise Unusable(f"state={_shown(value)}, which is no text, whole number or None")


def _check_said(value: Said | object) -> None:
    ids = isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu"
    if not ids and not isinstance(value, str):
        raise Unusable(f"the observation {_shown(value)}, which is no text and no array of ids")


def _shown(value: object) -> str:
    try:
        text = repr(value)
    # repr of the user's own objects may raise anything.
    except Exception:
        text = f"an object of {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}... ({type(value).__name__})"
