"""Measurements find the times that pretended backends take, through the protocols alone."""

from __future__ import annotations

import numpy as np
import pytest

from flowrl import api
from flowrl.backend.protocols import GenerateBackend
from flowrl.errors import BackendError
from flowrl.graph import Op
from flowrl.sim.engine import PollRule
from flowrl.sim.measure import EngineQuestion, after_other_work, measure_engine, repeated
from flowrl.sim.measure_train import TrainQuestion, measure_op
from flowrl.specs import Sampling
from tests.policy_contexts import weights_of
from tests.runtime.tiny_runs import tiny_config
from tests.sim.pretend import PretendEngine, PretendTrainer, Timer

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, 9, n) for n in (20, 30, 40, 25, 35) * 10]


def question(timer: Timer, **changes) -> EngineQuestion:
    asked = {
        "prompts": PROMPTS,
        "sampling": Sampling(max_tokens=120),
        "group_size": 4,
        "max_rows": 64,
        "max_length": 160,
        "budget_s": 1e9,
        "resumes": True,
        "polled": True,
        "timer": timer,
    }
    return EngineQuestion(**(asked | changes))


def measured(**changes):
    engine = PretendEngine(timer=Timer(), **changes)
    assert isinstance(engine, GenerateBackend)
    profile = measure_engine(engine, question(engine.timer), "actor")
    assert not engine.rows
    assert not engine.waiting
    return engine, profile


def test_decode_and_prefill_times_of_an_engine_are_found():
    engine, profile = measured()
    for point in profile.decode:
        per_row = engine.step_row_s + engine.context_s * point.context
        # Every other row is a token shorter, as rows of a run are never all alike.
        assert point.seconds == pytest.approx(engine.step_s + point.batch * per_row, rel=0.01)
    assert {p.batch for p in profile.decode} == {1, 4, 16, 64}
    assert len({p.context for p in profile.decode}) == 3
    assert profile.prefill.token_s == pytest.approx(engine.token_s, rel=0.03)
    assert profile.prefill.row_s == pytest.approx(engine.row_s, rel=0.2)
    assert profile.prefill.call_s == pytest.approx(engine.call_s, rel=0.05)


def test_how_a_driven_engine_returns_is_found():
    _, profile = measured(steps=24, after_end=5)
    assert profile.poll == PollRule(steps=24, after_end=5)
    engine = PretendEngine(timer=Timer())
    server = measure_engine(engine, question(engine.timer, polled=False), "actor")
    assert server.poll is None


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_whether_the_longest_row_decides_is_found(share):
    _, profile = measured(longest_share=share, context_s=0.00001)
    assert profile.longest_share == pytest.approx(share, abs=0.05)


def test_what_rows_cost_that_end_one_after_the_other_is_found():
    engine, profile = measured(leave_s=0.004)
    assert profile.leave_s == pytest.approx(engine.leave_s, rel=0.1)


def test_the_first_step_after_a_publication_is_found_to_take_longer():
    engine = PretendEngine(timer=Timer(), load_s=0.05)
    asked = question(engine.timer, publish=lambda: engine.load(weights_of(0)))
    assert measure_engine(engine, asked, "actor").load_s == pytest.approx(0.05, rel=0.01)


def test_short_responses_are_measured_from_the_prompt_alone():
    engine = PretendEngine(timer=Timer())
    asked = question(engine.timer, sampling=Sampling(max_tokens=4), max_length=44)
    profile = measure_engine(engine, asked, "actor")
    assert len({p.context for p in profile.decode}) == 1


def test_prompts_that_leave_no_room_are_told():
    engine = PretendEngine(timer=Timer())
    with pytest.raises(BackendError, match="no response fits"):
        measure_engine(engine, question(engine.timer, max_length=31), "actor")


def test_slow_measurements_are_made_once_and_fast_ones_often():
    timer, calls = Timer(), []

    def takes(seconds: float):
        def call() -> float:
            calls.append(seconds)
            return seconds

        return call

    assert repeated(takes(2.0)) == 2.0
    assert calls.count(2.0) == 2
    assert repeated(takes(0.01)) == 0.01
    assert calls.count(0.01) == 10
    assert after_other_work(timer, lambda: setattr(timer, "now", 3.0)) == 3.0


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    config = tiny_config(tmp_path_factory.mktemp("runs"))
    return api.compile(None, config).stages[-1]


def trainer_question(timer: Timer, node, **changes) -> TrainQuestion:
    asked = {
        "node": node,
        "prompts": PROMPTS,
        "group_size": 4,
        "max_rows": 48,
        "micro_batch": 16,
        "max_tokens": 40,
        "vocab_size": 9,
        "temperature": 1.0,
        "budget_s": 1e9,
        "timer": timer,
    }
    return TrainQuestion(**(asked | changes))


@pytest.mark.parametrize("shares", [True, False])
def test_what_an_update_costs_is_found_by_call_pass_row_and_token(stage, shares):
    trainer = PretendTrainer(timer=Timer(), shares=shares)
    [node] = stage.graph.of_op(Op.UPDATE)
    found = measure_op(trainer, trainer_question(trainer.timer, node), "actor")
    cost = found.cost
    assert found.fit < 0.01
    assert cost.call_s == pytest.approx(trainer.call_s, rel=0.05)
    assert cost.pass_s == pytest.approx(trainer.pass_s, rel=0.05)
    assert cost.row_s == pytest.approx(trainer.row_s, rel=0.1)
    of_tokens = (0.0, trainer.token_s) if shares else (trainer.token_s, 0.0)
    assert (cost.token_s, cost.distinct_s) == pytest.approx(of_tokens, rel=0.05, abs=1e-7)
    assert trainer.updates > 10


def test_what_a_pass_over_a_batch_costs_is_found(stage):
    trainer = PretendTrainer(timer=Timer())
    [node] = stage.graph.of_op(Op.LOGPROBS)
    found = measure_op(trainer, trainer_question(trainer.timer, node), "reference")
    assert (found.role, found.op) == ("reference", "logprobs")
    assert found.cost.token_s == pytest.approx(trainer.token_s, rel=0.02)
    assert found.cost.call_s + found.cost.pass_s == pytest.approx(trainer.call_s, rel=0.05)


def test_measuring_ends_when_its_time_is_over(stage):
    trainer = PretendTrainer(timer=Timer(), call_s=50.0)
    [node] = stage.graph.of_op(Op.UPDATE)
    asked = trainer_question(trainer.timer, node, budget_s=1.0)
    measure_op(trainer, asked, "actor")
    assert trainer.updates == 6  # three shapes, each with a call that is thrown away
