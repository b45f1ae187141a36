"""A workflow's own staleness counts where it is lowered without a configuration, too."""

from __future__ import annotations

import pytest

import flowrl as fl
from flowrl.compiler import lower
from flowrl.errors import ConfigError, GraphError
from tests.compiler import programs


def imitation(*, max_staleness: int) -> fl.Workflow:
    @fl.workflow(max_staleness=max_staleness)
    def plain(prompts: fl.Prompts, *, actor: fl.Policy, judge: fl.Reward):
        rollout = actor.generate(prompts)
        actor.update(rollout, judge.score(rollout), loss=fl.loss.reinforce())

    return plain


@pytest.mark.parametrize(("staleness", "old"), [(1, "1 publication"), (2, "2 publications")])
def test_stale_samples_are_refused_without_a_correction(staleness: int, old: str):
    with pytest.raises(GraphError, match=f"up to {old} old"):
        lower(imitation(max_staleness=staleness))


def test_fresh_samples_need_none():
    loss = lower(imitation(max_staleness=0)).node("actor.update").attr("loss")
    assert loss == fl.loss.reinforce()
    assert not loss.corrects_behaviour


def correcting(*, max_staleness: int | None) -> fl.Workflow:
    @fl.workflow(max_staleness=max_staleness)
    def clipped(prompts: fl.Prompts, *, actor: fl.Policy, judge: fl.Reward):
        rollout = actor.generate(prompts)
        actor.update(rollout, judge.score(rollout))

    return clipped


def bound(*, program: int | None, config: int) -> int:
    settings = programs.config()
    settings["train"]["max_staleness"] = config
    compiled = fl.compile(correcting(max_staleness=program), settings)
    return compiled.stages[-1].context.max_staleness


def test_a_program_that_declares_no_bound_leaves_it_to_the_config():
    assert bound(program=None, config=2) == 2
    assert bound(program=2, config=0) == 2
    assert bound(program=2, config=2) == 2


def test_a_program_and_a_config_that_declare_two_bounds_are_refused():
    for program in (0, 3):
        with pytest.raises(ConfigError) as caught:
            bound(program=program, config=2)
        assert f"declares max_staleness={program}, and the config asks for 2" in caught.value.what
        assert "test_staleness.py" in caught.value.where
        assert "the given configuration (train.max_staleness)" in caught.value.where
