"""Advantages of turns within episodes, for rollouts against an environment. numpy only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flowrl.algo.advantages.batch import (
    AdvantageBatch,
    AdvantageResult,
    Turns,
    check_scores,
    field_of,
)
from flowrl.algo.advantages.group import standardise
from flowrl.specs.advantage import AdvantageSpec, GroupRelative
from flowrl.specs.token_advantage import GroupInGroup

__all__ = ["group_in_group", "turn_returns"]

Array = npt.NDArray[np.float64]


def group_in_group(batch: AdvantageBatch, spec: AdvantageSpec) -> AdvantageResult:
    """GiGPO (Feng et al., "Group-in-Group Policy Optimization for LLM Agent Training", 2025).

    Episodes of a prompt form a group, and within it all turns that began in the same state of the
    environment (an anchor state) form a group of their own::

        A_E(i)    = (score_i - mean_g) / F(g)                 over episodes        section 4.1
        R_(i,m)   = sum over later turns k >= m of gamma^(k-m) r_(i,k)             section 4.2
        A_S(i,m)  = (R_(i,m) - mean of R in its state) / F    over turns of the state
        A_(i,m)   = A_E(i) + weight A_S(i,m)                                       section 4.3

    F is the standard deviation plus eps, or 1 with `std="none"`; with `std="batch"`, that of all
    episodes and of all turns. A turn whose state no other turn of its group has gets A_S = 0 (or
    its R, with `singleton="raw"`). Every token of a turn gets the turn's advantage; a response
    token of no turn gets the episode's.
    """
    assert isinstance(spec, GroupInGroup)
    scores = check_scores(batch.scores, batch.groups)
    mask = field_of(batch, "mask", spec.kind)
    turns = batch.turns
    if turns is None:
        raise ValueError(f"the advantage {spec.kind} needs turns, which the batch does not hold")
    relative = GroupRelative(std=spec.std, ddof=spec.ddof, eps=spec.eps, singleton=spec.singleton)
    episode = standardise(scores, batch.groups, relative)
    samples = np.asarray(turns.samples)
    keys = np.stack([np.asarray(batch.groups)[samples], np.asarray(turns.states)], axis=1)
    _, states = np.unique(keys, axis=0, return_inverse=True)
    step = standardise(turn_returns(turns, spec.gamma), states.reshape(-1), relative)
    # Tokens of no turn have the number -1, which reads the 0 at the end.
    of_turn = np.append(step, 0.0)[np.asarray(turns.tokens)]
    advantages = np.where(mask > 0, episode[:, None] + spec.weight * of_turn, 0.0)
    return AdvantageResult(advantages=advantages.astype(np.float32))


def turn_returns(turns: Turns, gamma: float) -> Array:
    """R_m = r_m + gamma R_{m+1} within each sample; float64 `[M]`.

    Raises:
        ValueError: turns are not in ascending order of their samples.
    """
    samples = np.asarray(turns.samples)
    if (np.diff(samples) < 0).any():
        raise ValueError("turns must be ordered by sample, and by time within a sample")
    returns = np.array(turns.rewards, np.float64)
    for m in reversed(range(len(returns) - 1)):
        if samples[m] == samples[m + 1]:
            returns[m] += gamma * returns[m + 1]
    return returns
