"""Seeds of samples, episodes and environments follow from the run's seed and logical names."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flowrl.ids import GroupId, RoleName, SampleId
from flowrl.runtime.setup import rollouts
from flowrl.runtime.setup.policies import derive_seed
from flowrl.runtime.setup.rollouts import DriverMaker, RolloutSpec, open_environment
from flowrl.specs import Sampling


class Policies(dict):
    def tokenizer(self, role):
        return None


def maker(seed, executor=None):
    worker = SimpleNamespace(engine_id="e0", engine=None, version=0)
    config = SimpleNamespace(
        seed=seed,
        runtime=SimpleNamespace(stall_timeout_s=1.0),
        roles={"game": SimpleNamespace(backend="b", environment=None, options={}, timeout_s=1.0)},
    )
    return DriverMaker(
        config,
        Policies(actor=worker),
        executor,
        max_length=8,
        failures=None,
        beat=lambda: None,
        stop=lambda: False,
    )


def sample_seed(seed, purpose, sample):
    spec = RolloutSpec(
        role=RoleName("actor"),
        purpose=purpose,
        sampling=Sampling(),
        grammar=None,
        group_size=2,
        reported=None,
    )
    made = {}

    def driver(**arguments):
        made.update(arguments)
        return SimpleNamespace(publish=lambda version: None)

    maker(seed).make(spec, SimpleNamespace(version=0), {}, kind=driver)
    return made["seed_of"](SampleId(sample))


def test_a_samples_seed_depends_on_the_runs_seed_the_rollout_and_the_sample_alone():
    one = sample_seed(3, "rollout/grpo", "0/1/0")
    assert one == sample_seed(3, "rollout/grpo", "0/1/0") == derive_seed(3, "rollout/grpo", "0/1/0")
    others = [
        sample_seed(4, "rollout/grpo", "0/1/0"),
        sample_seed(3, "eval/grpo", "0/1/0"),
        sample_seed(3, "rollout/grpo", "0/1/1"),
        sample_seed(3, "rollout/grpo", "1/1/0"),
    ]
    assert len({one, *others}) == 5


@pytest.mark.parametrize("seed", [3, 4])
def test_an_environment_gets_the_seed_of_its_role_in_the_run(seed):
    opened = []
    executor = SimpleNamespace(open_environment=lambda backend, context: opened.append(context))
    open_environment(executor, maker(seed)._config, RoleName("game"))
    assert [context.seed for context in opened] == [derive_seed(seed, "environment", "game")]


@pytest.mark.parametrize("seed", [3, 4])
def test_the_episodes_of_a_group_begin_with_one_seed(seed, monkeypatch):
    made = {}
    monkeypatch.setattr(rollouts, "EpisodeEngine", lambda **arguments: made.update(arguments))
    monkeypatch.setattr(rollouts, "open_environment", lambda executor, config, role: None)
    monkeypatch.setattr(rollouts, "role_of", lambda node: RoleName("game"))
    node = SimpleNamespace(attr=lambda name: 4)
    spec = SimpleNamespace(
        role=RoleName("actor"), others=(), purpose="rollout/grpo", needs_states=False
    )
    maker(seed)._episodes(spec, node, None, None, {}, "")
    seeds = [made["seed_of"](GroupId(group)) for group in ("0/1", "0/2")]
    assert seeds == [derive_seed(seed, "rollout/grpo/episode", group) for group in ("0/1", "0/2")]
