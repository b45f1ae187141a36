"""A workflow's own staleness counts where it is lowered without a configuration, too."""

from __future__ import annotations

import pytest

import flowrl as fl
from flowrl.compiler import lower
from flowrl.errors import GraphError


def imitation(*, max_staleness: int) -> fl.Workflow:
    @fl.workflow(max_staleness=max_staleness)
    def plain(prompts: fl.Prompts, *, actor: fl.Policy, judge: fl.Reward):
        rollout = actor.generate(prompts)
        actor.update(rollout, judge.score(rollout), loss=fl.loss.reinforce())

    return plain


def test_stale_samples_are_refused_without_a_correction():
    with pytest.raises(GraphError, match="up to 2 publications old"):
        lower(imitation(max_staleness=2))


def test_fresh_samples_need_none():
    lower(imitation(max_staleness=0))
