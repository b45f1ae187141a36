"""Tracing: what a program may not do; each mistake is told with its line and the way out."""

from __future__ import annotations

import pytest

import flowrl as fl
from flowrl.errors import GraphError, TraceError
from tests.program.refusals import line_with, refused

HERE = "test_trace_refusals.py"


@fl.workflow
def three(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward):
    """The docstring."""
    responses = actor.generate(prompts)
    rewards = reward.score(responses)
    actor.update(responses, rewards)


def test_an_unknown_operation_is_told_the_nearest_one():
    @fl.workflow
    def mine(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward):
        actor.genrate(prompts)

    with pytest.raises(TraceError) as caught:
        mine.trace()
    assert caught.value.expected == "one of generate, logprobs, sync, update"
    assert caught.value.hint == "did you mean 'generate'?"


def test_an_unknown_function_of_flowrl_is_told_those_that_exist():
    @fl.workflow
    def mine(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward):
        fl.advantage.gpo(reward.score(actor.generate(prompts)))

    with pytest.raises(TraceError) as caught:
        mine.trace()
    assert caught.value.expected.startswith("one of distill, gae, gpg, group_in_group, ")
    assert caught.value.hint == "did you mean 'gpg'?"


def test_an_unknown_attribute_of_ones_own_object_gets_no_advice():
    @fl.workflow
    def mine(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward):
        "text".genrate()  # type: ignore[attr-defined]

    with pytest.raises(TraceError) as caught:
        mine.trace()
    assert caught.value.expected is None
    assert "correct this line" in str(caught.value.hint)


def test_a_handle_of_the_wrong_kind_is_told_what_makes_the_right_one():
    @fl.workflow
    def swapped(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward):
        rollout = actor.generate(prompts)
        actor.update(reward.score(rollout), rollout)

    @fl.workflow
    def unnamed(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward):
        rollout = actor.generate(prompts)
        actor.update(rollout, fl.advantage.group_relative(reward.score(rollout)))

    with pytest.raises(TraceError) as caught:
        swapped.trace()
    assert caught.value.hint == "samples come from actor.generate(prompts)"
    with pytest.raises(TraceError) as caught:
        unnamed.trace()
    assert caught.value.hint == "pass it by name: advantages=..."


# What handles refuse.

USES = {
    "truth": lambda x: bool(x),
    "len": lambda x: len(x),
    "iter": lambda x: list(x),
    "unpack": lambda x: (lambda a, b: None)(*x),
    "in": lambda x: 1 in x,
    "item": lambda x: x[0],
    "float": lambda x: float(x),
    "int": lambda x: int(x),
    "index": lambda x: range(x),
    "equal": lambda x: x == 1,
    "unequal": lambda x: x != 1,
    "less": lambda x: x < 1,
    "greater": lambda x: x > 1,
    "plus": lambda x: x + 1,
    "rplus": lambda x: 1 + x,
    "minus": lambda x: -x,
    "times": lambda x: x * 0.5,
    "power": lambda x: x**2,
    "abs": lambda x: abs(x),
    "round": lambda x: round(x),
    "sum": lambda x: sum([x]),
    "format": lambda x: f"{x}",
    "array": lambda x: __import__("numpy").asarray(x),
    "attribute": lambda x: x.mean(),
}


@pytest.mark.parametrize("use", USES)
def test_a_handle_is_no_number_and_no_truth_value(use):
    @fl.workflow
    def mine(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward):
        rollout = actor.generate(prompts)
        scores = reward.score(rollout)
        USES[use](scores)
        actor.update(rollout, scores)

    error = refused(mine)
    assert "the scores of 'reward.score'" in error.what
    assert HERE in error.where
    assert error.hint
    assert 1 <= len(str(error).splitlines()) <= 4


def test_an_if_on_data_names_the_line_and_what_to_use():
    @fl.workflow
    def mine(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward):
        rollout = actor.generate(prompts)
        scores = reward.score(rollout)
        if scores:  # if-on-data
            actor.update(rollout, scores)

    error = refused(mine)
    assert error.where.endswith(f"{HERE}:{line_with(__file__, 'if-on-data')}")
    assert "truth value" in error.what
    assert "fl.filter.zero_variance(rollout, scores)" in error.hint


def test_a_handle_can_be_printed_and_compared_with_is():
    seen = []

    @fl.workflow
    def mine(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward):
        rollout = actor.generate(prompts)
        seen.append((repr(rollout), str(rollout), rollout is None, {rollout}))
        actor.update(rollout, reward.score(rollout))

    mine.trace()
    shown, text, is_none, _ = seen[0]
    assert shown == text
    assert shown.startswith("<Rollout of actor.generate: tokens: int64/tokens")
    assert not is_none


# Wrong arguments.

CALLS = {
    "unknown name": (lambda v: v.actor.generate(v.prompts, m=3), "unexpected keyword", "arguments"),
    "near name": (lambda v: v.actor.generate(v.prompts, temprature=1), "", "'temperature'"),
    "n": (lambda v: v.actor.generate(v.prompts, n=0), "'n'", "whole number"),
    "n float": (lambda v: v.actor.generate(v.prompts, n=2.5), "'n'", "2.5 (float)"),
    "cold": (lambda v: v.actor.generate(v.prompts, temperature=1e-4), "'temperature'", "0.001 up"),
    "top_p": (lambda v: v.actor.generate(v.prompts, top_p=1.5), "'top_p'", "at most 1"),
    "top_k": (lambda v: v.actor.generate(v.prompts, top_k=True), "'top_k'", "True (bool)"),
    "sampling": (lambda v: v.actor.generate(v.prompts, sampling=1), "'sampling'", "fl.Sampling"),
    "role as prompts": (lambda v: v.actor.generate(v.actor), "takes the prompts", "role 'actor'"),
    "role as rollout": (
        lambda v: v.reward.score(v.actor),
        "takes samples",
        "actor.generate(prompts)",
    ),
    "prompts as rollout": (
        lambda v: v.reward.score(v.prompts),
        "samples",
        "the prompts of 'prompts'",
    ),
    "number as rollout": (lambda v: v.actor.update(3), "samples", "3 (int)"),
    "role as rewards": (
        lambda v: v.actor.update(v.rollout, v.reward),
        "scores",
        "reward.score(rollout)",
    ),
    "role as reference": (
        lambda v: v.actor.update(v.rollout, v.scores, reference=v.actor),
        "logprobs",
        "reference.logprobs(rollout)",
    ),
    "scores as advantages": (
        lambda v: v.actor.update(v.rollout, advantages=v.scores),
        "takes the advantages",
        "the scores of 'reward.score'",
    ),
    "kl number": (lambda v: v.actor.update(v.rollout, v.scores, kl=0.01), "'kl'", "fl.kl.k3(0.01)"),
    "kl text": (lambda v: v.actor.update(v.rollout, v.scores, kl="k3"), "'kl'", "fl.kl.k3(0.001)"),
    "loss text": (
        lambda v: v.actor.update(v.rollout, v.scores, loss="ppo"),
        "'loss'",
        "policy_clip",
    ),
    "kl coefficient": (
        lambda v: v.actor.update(v.rollout, v.scores, kl=fl.kl.k3(-0.1)),
        "'kl'",
        "from 0 up",
    ),
    "kl coefficient as text": (
        lambda v: v.actor.update(v.rollout, v.scores, kl=fl.kl.k3("0.1")),
        "'kl'",
        "'0.1' (str)",
    ),
    "clip": (
        lambda v: v.actor.update(v.rollout, v.scores, loss=fl.loss.policy_clip(-1.0)),
        "'loss'",
        "from 0 up",
    ),
    "clip nan": (
        lambda v: v.actor.update(v.rollout, v.scores, loss=fl.loss.policy_clip(0.2, float("nan"))),
        "'loss'",
        "nan (float)",
    ),
    "aggregation": (
        lambda v: v.actor.update(v.rollout, loss=fl.loss.cross_entropy(aggregation="token_mean")),
        "'loss'",
        "'token-mean'",
    ),
    "sampling value": (
        lambda v: v.actor.generate(v.prompts, sampling=fl.Sampling(top_p=0.0)),
        "'top_p'",
        "above 0",
    ),
    "temperature": (
        lambda v: v.actor.generate(v.prompts, temperature=float("inf")),
        "'temperature'",
        "inf (float)",
    ),
    "eps nan": (
        lambda v: fl.advantage.group_relative(v.scores, eps=float("nan")),
        "'eps'",
        "from 0 up",
    ),
    "std": (lambda v: fl.advantage.group_relative(v.scores, std="groups"), "'std'", "'group'"),
    "ddof": (lambda v: fl.advantage.group_relative(v.scores, ddof=2), "'ddof'", "from 0 to 1"),
    "eps": (lambda v: fl.advantage.group_relative(v.scores, eps=-1), "'eps'", "from 0 up"),
    "tolerance": (
        lambda v: fl.filter.zero_variance(v.rollout, v.scores, tolerance=-1),
        "'tolerance'",
        "from 0 up",
    ),
    "filter of nothing": (
        lambda v: fl.filter.zero_variance(v.scores),
        "'scores'",
        "rollout, scores",
    ),
}


class Values:
    """Everything that a call may be given."""

    def __init__(self, prompts, actor, reward) -> None:
        self.prompts, self.actor, self.reward = prompts, actor, reward
        self.rollout = actor.generate(prompts)
        self.scores = reward.score(self.rollout)


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_argument_is_refused_with_line_and_way_out(call):
    function, what, way_out = CALLS[call]

    @fl.workflow
    def mine(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward):
        function(Values(prompts, actor, reward))

    error = refused(mine)
    assert what in error.what
    assert way_out in str(error)
    assert HERE in error.where
    assert len(str(error).splitlines()) <= 4


def test_a_kl_of_zero_is_none_however_it_is_written():
    @fl.workflow
    def mine(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward, plain: bool = True):
        rollout = actor.generate(prompts)
        actor.update(rollout, reward.score(rollout), kl=0 if plain else fl.kl.k3(0.0))

    assert mine.trace().node("actor.update").attr("kl") is None
    assert mine.trace({"plain": False}).node("actor.update").attr("kl").coefficient == 0


def test_a_kl_without_reference_is_a_graph_error_with_the_line():
    @fl.workflow
    def mine(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward):
        rollout = actor.generate(prompts)
        actor.update(rollout, reward.score(rollout), kl=fl.kl.k3(0.1))  # no-reference

    with pytest.raises(GraphError) as caught:
        mine.trace()
    first, fix = str(caught.value).splitlines()
    assert first.endswith(
        f"{HERE}:{line_with(__file__, 'no-reference')}: update(kl=k3) needs 'reference' logprobs "
        "per token, but 'rollout' gives tokens, response_mask, rollout_logprobs"
    )
    assert "reference=reference.logprobs(rollout), or set kl=0" in fix


# The shape of a program.


def test_an_output_that_nobody_uses_is_refused():
    @fl.workflow
    def mine(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward):
        rollout = actor.generate(prompts)
        scores = reward.score(rollout)
        reward.score(rollout)  # unused
        actor.update(rollout, scores)

    error = refused(mine)
    assert error.what == "nothing uses what reward.score.2 makes"
    assert error.where.endswith(f":{line_with(__file__, 'unused')}")


def test_a_parameter_that_nobody_uses_is_refused():
    @fl.workflow
    def mine(examples: fl.Examples, prompts: fl.Prompts, actor: fl.Policy):
        actor.update(examples)

    assert refused(mine).what == "workflow 'mine' does not use its parameter 'prompts'"


def test_a_workflow_without_operations_is_refused():
    @fl.workflow
    def mine(actor: fl.Policy): ...

    assert "does nothing" in refused(mine).what


def test_without_an_update_numbers_that_are_not_written_down_need_a_reader():
    @fl.workflow
    def mine(prompts: fl.Prompts, actor: fl.Policy, judge: fl.Reward):
        rollout = actor.generate(prompts)
        fl.advantage.group_relative(judge.score(rollout))  # unread

    error = refused(mine)
    assert error.what == "nothing uses what advantage makes"
    assert error.where.endswith(f":{line_with(__file__, 'unread')}")


def test_generation_after_the_update_of_the_same_step_is_refused():
    @fl.workflow
    def mine(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward):
        rollout = actor.generate(prompts)
        actor.update(rollout, reward.score(rollout))
        actor.generate(prompts)  # after-update

    error = refused(mine)
    assert "actor.generate.2 comes after actor.update" in error.what
    assert error.where.endswith(f":{line_with(__file__, 'after-update')}")


def test_a_workflow_that_calls_itself_is_refused():
    @fl.workflow
    def mine(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward):
        mine(prompts, actor, reward)

    error = refused(mine)
    assert "calls itself" in error.what
    assert error.found == "mine -> mine"


def test_a_nested_workflow_checks_what_it_is_given():
    @fl.workflow
    def wrong_kind(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward):
        three(prompts, reward, actor)

    @fl.workflow
    def too_few(prompts: fl.Prompts, actor: fl.Policy):
        three(prompts, actor)

    assert "cannot take this as 'actor'" in refused(wrong_kind).what
    assert "missing a required argument: 'reward'" in refused(too_few).what


def test_a_workflow_is_not_called_like_a_function():
    with pytest.raises(TraceError, match="a program to compile"):
        three(1, 2, 3)


def test_operations_outside_a_workflow_are_refused():
    with pytest.raises(TraceError, match="outside a workflow"):
        fl.advantage.group_relative(None)


def test_handles_and_roles_do_not_outlive_their_trace():
    kept = {}

    @fl.workflow
    def first(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward):
        kept["rollout"] = rollout = actor.generate(prompts)
        kept["actor"] = actor
        actor.update(rollout, reward.score(rollout))

    @fl.workflow
    def handle(actor: fl.Policy, reward: fl.Reward):
        actor.update(kept["rollout"], reward.score(kept["rollout"]))

    @fl.workflow
    def role(prompts: fl.Prompts, actor: fl.Policy):
        kept["actor"].generate(prompts)

    first.trace()
    assert "has been traced already" in refused(handle).what
    assert "cannot take this 'role'" in refused(role).what
    with pytest.raises(TraceError, match="outside a workflow"):
        kept["actor"].generate(None)


def test_an_error_of_the_program_is_shown_with_its_own_frames_only():
    def helper(table: dict[str, int]) -> int:
        return table["missing"]  # key-error

    @fl.workflow
    def mine(prompts: fl.Prompts, actor: fl.Policy):
        actor.generate(prompts, n=helper({}))

    error = refused(mine)
    assert error.what == "workflow 'mine' raised KeyError: 'missing'"
    assert error.where.endswith(f":{line_with(__file__, 'key-error')}")
    assert "helper" in error.user_frames
    assert "in mine" in error.user_frames
    assert "workflow.py" not in error.user_frames
    assert error.user_frames.endswith("KeyError: 'missing'")
    assert isinstance(error.__cause__, KeyError)


# Arguments from the config.
