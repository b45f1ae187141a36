"""Settings and policies as data: they print, travel in JSON, and refuse what cannot work."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.errors import SchedulerError
from flowrl.rollout.actions import Deliver
from flowrl.rollout.events import BatchAsked, WeightsPublished
from flowrl.rollout.policies import engines, limits, prompts
from flowrl.rollout.policies.engines import AbortRunning, LongestFirst
from flowrl.rollout.policies.limits import DropStragglers, WaitForStragglers
from flowrl.rollout.policies.prompts import AgeBudget, WeightedShares
from flowrl.rollout.settings import SchedulerSettings
from flowrl.specs.base import Spec
from tests.proofs.scheduler_episodes import draw_settings

KINDS = sorted(
    (
        value
        for value in (vars(engines) | vars(limits) | vars(prompts)).values()
        if isinstance(value, type) and issubclass(value, Spec) and hasattr(value, "kind")
    ),
    key=lambda kind: kind.__name__,
)


@given(seed=st.integers(0, 2**32))
def test_settings_survive_json_unchanged(seed):
    settings = draw_settings(random.Random(seed))
    written = json.dumps(settings.to_json(), allow_nan=False)
    assert SchedulerSettings.from_json(json.loads(written)) == settings


def test_what_is_written_holds_every_option_and_names_each_policy():
    written = SchedulerSettings(
        group_size=4,
        admission=AgeBudget(groups=2),
        fairness=WeightedShares(shares=(("math", 2.0), ("code", 0.5))),
    ).to_json()
    assert written["group_size"] == 4
    assert written["admission"] == {
        "kind": "age_budget",
        "groups": 2,
        "batches_per_version": 1,
        "slack": 0,
        "queue": 0,
    }
    assert written["fairness"] == {
        "kind": "weighted_shares",
        "math": 2.0,
        "code": 0.5,
        "other": 1.0,
    }
    assert written["order"] == {"kind": "first_offered"}


def test_an_unknown_policy_is_an_error():
    written = SchedulerSettings(group_size=4).to_json()
    written["order"] = {"kind": "shortest_first"}
    with pytest.raises(KeyError, match="shortest_first"):
        SchedulerSettings.from_json(written)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_policy_is_frozen_hashable_and_says_what_it_is(kind):
    policy = kind(groups=1) if kind is AgeBudget else kind()
    assert str(policy).startswith(f"{kind.kind}(")
    assert hash(policy) == hash(kind(groups=1) if kind is AgeBudget else kind())
    assert kind.__dataclass_params__.frozen
    assert kind.__doc__
    assert not kind.__doc__.startswith(kind.__name__)


def test_each_policy_stands_in_the_module_of_its_subject():
    families: dict[str, set[str]] = {}
    for kind in KINDS:
        families.setdefault(kind.__module__.rpartition(".")[2], set()).add(kind.family)
    assert families == {
        "engines": {"order", "publication", "quarantine", "repack", "routing"},
        "limits": {"patience", "retries", "stragglers"},
        "prompts": {"admission", "fairness", "over_sampling", "refill"},
    }


def test_the_defaults_are_a_synchronous_run_that_waits_for_what_it_began():
    settings = SchedulerSettings(group_size=2)
    assert (settings.max_staleness, settings.refill, settings.num_members) == (0, False, 2)
    assert settings.budget is None
    assert settings.stragglers == WaitForStragglers()


@pytest.mark.parametrize(
    "make",
    [
        lambda: AgeBudget(groups=0),
        lambda: AgeBudget(groups=1, batches_per_version=0),
        lambda: AgeBudget(groups=1, slack=-1),
        lambda: LongestFirst(shrinkage=0.0),
        lambda: LongestFirst(window=0),
        lambda: prompts.OverSampling(members=-1),
        lambda: prompts.AskByKeepRate(prior=0.0),
        lambda: prompts.AskByKeepRate(prior=1.5),
        lambda: prompts.AskByKeepRate(most=0.5),
    ],
)
def test_options_out_of_range_are_refused(make):
    with pytest.raises(SchedulerError, match="out of range"):
        make()


def test_dropping_stragglers_needs_batches_that_can_do_without_them():
    with pytest.raises(SchedulerError, match="a synchronous batch waits"):
        SchedulerSettings(group_size=1, stragglers=DropStragglers())


def test_a_batch_goes_on_without_stragglers_where_they_may_be_dropped(play, only):
    def run(**rules):
        p = play(group_size=1, max_staleness=1, publication=AbortRunning(), **rules)
        p.join()
        p.offer("0/0", "0/1")
        p(WeightsPublished, version=1)
        p.finish("0/0/0", "0/1/0", tokens=1, version=0, reason="abort")
        p.join("e1", 8)
        p.offer("0/2")
        p(BatchAsked, batch=0, groups=1)
        return p, p.finish_and_score("0/2/0", version=1)

    p, actions = run()
    assert not any(isinstance(action, Deliver) for action in actions)
    p, actions = run(stragglers=DropStragglers())
    assert only(actions, Deliver).groups[0].group == "0/2"
    p(WeightsPublished, version=2)
    assert p.drops() == {"0/0/0": "aged", "0/1/0": "aged"}
