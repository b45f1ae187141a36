"""A run stops where an engine's logprobs are not those of its trainer."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flowrl as fl
from flowrl.backend.protocols import Finished, OptimizerStep
from flowrl.config.schema import TrainConfig
from flowrl.errors import BackendError
from flowrl.ids import EngineId, GroupId, NodeId, RoleName, SampleId, engine_id
from flowrl.runtime.driver.mismatch_guard import MismatchGuard
from flowrl.runtime.driver.payloads import Payload, SampleSet, sample_set
from flowrl.runtime.workers import PolicyWorker
from flowrl.specs import FinishReason
from tests.runtime.test_rollouts import prompts
from tests.runtime.tiny_runs import WatchedDisplay, tiny_config

ACTOR = RoleName("actor")
FIRST, SECOND = engine_id(ACTOR, 0), engine_id(ACTOR, 1)


def worker(version: int, *, stale: bool = False) -> PolicyWorker:
    none: Any = None
    return PolicyWorker(
        role=ACTOR, context=none, train=none, generate=none, version=version, stale=stale
    )


def samples(*made: tuple[EngineId | None, int, float]) -> SampleSet:
    """Samples of two tokens, by engine, version and the logprob of both."""
    (item,) = prompts(1)
    rows = []
    for number, (engine, version, logprob) in enumerate(made):
        sample = SampleId(f"0/0/{number}")
        payload = Payload(item=item)
        end = Finished(
            sample=sample,
            attempt=0,
            reason=FinishReason.STOP,
            tokens=np.array([2, 3], np.int64),
            logprobs=np.full(2, logprob, np.float32),
            versions=((version, 2),),
        )
        payload.extend(end, engine)
        rows.append((sample, payload))
    return sample_set(NodeId("rollout"), [(GroupId("0/0"), rows)])


class Scores:
    """A trainer that finds a logprob of -1 at every response token."""

    def __init__(self) -> None:
        self.compared: list[tuple[SampleId, ...]] = []

    def __call__(self, chosen: SampleSet) -> np.ndarray:
        self.compared.append(chosen.samples)
        return np.where(chosen.sequences.response_mask, np.float32(-1), np.float32(0))


def test_the_engine_whose_logprobs_differ_is_named_with_its_version_and_the_gap():
    guard = MismatchGuard(TrainConfig())
    found = samples((FIRST, 3, -1.05), (SECOND, 3, -1.0), (SECOND, 3, -1.5), (SECOND, 2, 9.0))
    with pytest.raises(BackendError) as caught:
        guard.check(worker(3), found, Scores(), is_measured=True)
    error = caught.value
    assert error.where == "actor.generate[1], weights of version 3"
    assert str(error.found).startswith("a mean difference of 0.25, at most 0.5, over 4 tokens")
    assert error.expected == "at most train.mismatch_limit=0.1 in the mean"


def test_logprobs_that_are_no_numbers_stop_a_run():
    with pytest.raises(BackendError, match=r"actor\.generate\[0\]"):
        MismatchGuard(TrainConfig()).check(
            worker(0), samples((FIRST, 0, math.nan)), Scores(), is_measured=True
        )


def test_a_few_samples_of_the_weights_of_now_are_compared_after_publications():
    guard, scores = MismatchGuard(TrainConfig(mismatch_every=2)), Scores()
    for version in (4, 4, 5, 6):
        of_now = [(FIRST, version, -1.0)] * 6
        guard.check(worker(version), samples((FIRST, 3, -9.0), *of_now), scores, is_measured=True)
    guard.check(worker(9, stale=True), samples((FIRST, 9, -9.0)), scores, is_measured=False)
    passed = samples((FIRST, 8, -9.0), (None, 9, -9.0))
    guard.check(worker(9), passed, scores, is_measured=False)
    first_four = tuple(SampleId(f"0/0/{number}") for number in range(1, 5))
    assert scores.compared == [first_four, first_four]


def test_a_step_of_one_engine_and_version_is_measured_by_its_update():
    guard, scores = MismatchGuard(TrainConfig()), Scores()
    for version in (0, 1):
        guard.check(worker(version), samples((FIRST, version, -1.0)), scores, is_measured=True)
    assert len(scores.compared) == 1  # before anything is learned, and then no more
    measured = {"mismatch/abs_mean": 0.3, "mismatch/abs_max": 2.0}
    step = partial(OptimizerStep, loss=0.0, grad_norm=0.0, learning_rate=0.0, num_tokens=7)
    with pytest.raises(BackendError) as caught:
        guard.check_update(worker(1), step(metrics=measured))
    assert caught.value.where == "actor.generate[0], weights of version 1"
    assert str(caught.value.found).startswith("a mean difference of 0.3, at most 2, over 7 tokens")
    guard.check_update(worker(1), step(metrics=measured))  # which nothing waits for
    guard.check(worker(2), samples((FIRST, 2, -1.0)), scores, is_measured=True)
    guard.check_update(worker(2), step())
    guard.check(worker(2), samples((FIRST, 2, -1.0)), scores, is_measured=False)
    assert len(scores.compared) == 2


STALE = """
from dataclasses import replace

from flowrl.backend.protocols import Finished, OptimizerStep
from flowrl_backends.torch.engine import TorchEngine
from flowrl_backends.torch.model import load_model
from flowrl_backends.torch.plugin import TorchPlugin


class Stale(TorchEngine):
    \"\"\"Reports new versions, and goes on with the weights that it began with.\"\"\"

    def load(self, weights):
        before = {name: value.clone() for name, value in self._model.state_dict().items()}
        super().load(weights)
        if weights.version:
            self._model.load_state_dict(before)
            self._decoder.refresh()


class StalePlugin(TorchPlugin):
    name = "stale"
    capabilities = replace(
        TorchPlugin.capabilities, services=frozenset({"generate"}), shares_weights=False
    )

    def open_generate(self, context, shared):
        return Stale(context, load_model(context), shares_weights=False)


plugin = StalePlugin()
"""


@pytest.fixture
def stale_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    info = site / "stale-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stale\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[flowrl.backends]\nstale = stale_engine:plugin\n")
    (site / "stale_engine.py").write_text(STALE)
    monkeypatch.syspath_prepend(str(site))


def test_an_engine_that_reports_a_version_and_serves_the_one_before_stops_the_run(
    tmp_path: Path, stale_engine: None
):
    overrides = ["roles.actor.engine=stale", "stages=[grpo]", "train.mismatch_limit=0.001"]
    with pytest.raises(BackendError, match="logprobs that actor") as caught:
        fl.run(None, tiny_config(tmp_path), overrides=overrides, display=WatchedDisplay())
    assert caught.value.where == "actor.generate[0], weights of version 1"
