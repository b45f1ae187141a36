"""What other libraries call arguments, fields and operations is answered with the right form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import flowrl as fl
from flowrl.errors import TraceError
from flowrl.program.registry import load_workflow
from flowrl.specs.names import arguments_of
from flowrl.synonyms import SYNONYMS
from flowrl.wording import nearest

Use = Callable[..., Any]


@fl.map(reads="lengths")
def lengths(batch):
    return batch["lengths"]


def refusal(use: Use) -> TraceError:
    """The error of a program that does something with its handles and roles."""

    @fl.workflow
    def tried(prompts: fl.Prompts, *, actor: fl.Policy, reward: fl.Reward, critic: fl.Critic):
        rollout = actor.generate(prompts)
        use(rollout, reward.score(rollout), actor, reward, critic)

    with pytest.raises(TraceError) as caught:
        tried.trace()
    return caught.value


@pytest.mark.parametrize(
    ("use", "hint"),
    [
        (lambda r, s, a, *_: a.generate(r, temp=0.7), "write temperature=..."),
        (lambda r, s, a, *_: a.generate(r, max_new_tokens=7), "write max_tokens=..."),
        (lambda r, s, a, *_: a.generate(r, num_generations=8), "write n=..."),
        (lambda r, s, a, *_: a.generate(r, topp=0.9), "did you mean 'top_p'?"),
        (lambda r, s, a, *_: a.generate(r, echo=True), "leave echo out"),
        (lambda r, s, a, *_: a.update(r, s, beta=0.1), "write kl=fl.kl.k3(0.001)"),
        (lambda r, s, a, *_: a.update(r, s, lr=1e-3), "write train.optimizer.learning_rate in"),
        (lambda r, s, a, *_: a.update(r, scores=s), "write rewards=..."),
        (lambda r, s, a, *_: a.update(samples=r), "leave samples out, and pass 'rollout'"),
        (lambda r, s, *_: fl.where(r, topic="maths"), "leave topic out, and pass 'row'"),
        (lambda r, *_: fl.pair(r, r), "pass each by its name: preferred=..., other=..."),
        (lambda r, s, *_: fl.where(r, s, row="topic"), "by position it takes given; the others"),
        (lambda r, s, a, *_: a.sync(a, interval=3), "write every=..."),
        (lambda r, s, a, *_: a.sync(a, ema=0.9), "write decay=..."),
        (lambda r, s, a, *_: a.update(a, decay=0.9), "write reference.sync(actor, decay=0.99) for"),
        (
            lambda r, s, a, v, c: c.update(r, returns=s, steps=3),
            "write train.mini_batches in the config, or a loop: for _ in range(3): role = ",
        ),
        (lambda r, s, a, v, *_: v.score(r, per="token"), "write prm: fl.RewardModel in the"),
        (lambda r, s, *_: fl.advantage.group_relative(s, token_rewards=s), "leave token_rewards"),
        (lambda r, *_: fl.filter.difficulty(r, r, min=0.1), "write low=..."),
        (lambda r, s, *_: fl.advantage.gae(s, s, r, lamda=0.9), "write lam=..."),
        (lambda *_: fl.loss.policy_clip(epsilon=0.2), "write clip_low=..."),
        (lambda *_: fl.loss.policy_clip(clip_hgih=0.3), "did you mean 'clip_high'?"),
        (lambda *_: fl.loss.dpo(bta=0.1), "did you mean 'beta'?"),
        (lambda *_: fl.kl.k3(beta=0.1), "write coefficient=..."),
        (
            lambda r, *_: fl.prompts_of(r, cut=fl.cut.at(2), n=4),
            "write actor.generate(fl.prompts_of(",
        ),
        (lambda r, *_: fl.prompts_of(r, format="{prompt}"), "write template=..."),
        (lambda *_: fl.grammar.regex(patern="a"), "did you mean 'pattern'?"),
    ],
)
def test_a_call_with_another_argument_says_what_to_write(use: Use, hint: str):
    error = refusal(use)
    assert "argument" in error.what
    assert (error.hint or "").startswith(hint)
    assert "test_other_words.py" in str(error.where)


@pytest.mark.parametrize(
    ("use", "hint"),
    [
        (lambda r: fl.where(r, row="row.topic", equals=1), 'write row="topic"; maps and templates'),
        (lambda r: fl.where(r, row="topic", equals=["a", "b"]), "write one_of=['a', 'b']"),
        (lambda _: fl.advantage.own(needs="groups"), "batch.groups is always there: leave it out"),
        (lambda _: fl.advantage.own(needs="lengths"), 'write needs="mask"'),
        (lambda _: fl.loss.own(needs="logprobs"), "logprobs are the function's first argument"),
        (lambda r: lengths(r), "batch.lengths is always there: leave it out of reads="),
        (lambda _: fl.workflow(2), "write it above a `def`; its option has a name: @fl.workflow("),
    ],
)
def test_a_name_that_is_written_elsewhere_otherwise_is_answered_with_the_one_of_here(
    use: Callable[[fl.Rollout], object], hint: str
):
    assert (refusal(lambda r, *_: use(r)).hint or "").startswith(hint)


@pytest.mark.parametrize(
    "use",
    [
        lambda s: fl.weighted_sum(s, s, weights=[1.0, 0.2]),
        lambda s: fl.weighted_sum(s, s),
        lambda s: fl.weighted_sum([(s, 1.0), (s, 0.2)]),
        lambda s: fl.weighted_sum(s, 1.0),
        lambda s: fl.weighted_sum((s, "1.0")),
    ],
)
def test_a_weighted_sum_of_another_form_is_shown_the_right_one(use: Use):
    error = refusal(lambda r, s, *_: use(s))
    assert "fl.weighted_sum((accuracy, 1.0), (style, 0.2))" in (error.hint or "")


@pytest.mark.parametrize(
    ("use", "hint"),
    [
        (lambda r, *_: r.logprobs, "write logprobs = reference.logprobs(rollout)"),
        (lambda r, *_: r.rewards, "write scores = reward.score(rollout)"),
        (lambda r, *_: r.advantages, "write advantages = fl.advantage.group_relative(scores)"),
        (lambda r, *_: r.values, "write values = critic.values(rollout)"),
        (lambda r, s, *_: s.mean(), "keep it in one variable and pass it whole"),
        (lambda r, s, *_: s.filter(0.5), "write rollout, scores = fl.filter.zero_variance("),
        (lambda r, *_: fl.cut.high_entropy(), "write fl.cut.least_likely(), which"),
        (lambda r, *_: fl.cut.fraction(0.5), "write fl.cut.share(share)"),
        (lambda r, s, a, *_: a.sample(r), "did you mean 'generate'?"),
        (lambda r, s, a, *_: a.train(r), "did you mean 'update'?"),
        (lambda r, s, a, w, *_: w.grade(r), "did you mean 'score'?"),
    ],
)
def test_what_a_handle_or_a_role_lacks_is_answered_with_what_to_write(use: Use, hint: str):
    assert (refusal(use).hint or "").startswith(hint)


@pytest.mark.parametrize("parameter", ["prompts", "kl=0.1", "prompts: list"])
def test_a_parameter_without_a_usable_annotation_is_told_all_that_there_are(
    parameter: str, tmp_path
):
    file = tmp_path / "mine.py"
    file.write_text(
        f"import flowrl as fl\n\n\n@fl.workflow\ndef mine({parameter}):\n    pass\n",
        encoding="utf-8",
    )
    with pytest.raises(TraceError) as caught:
        load_workflow(str(file), where="here")
    assert caught.value.expected.startswith("fl.Policy, fl.Reward, ")
    assert caught.value.hint.startswith("write actor: fl.Policy for a model")


def test_every_argument_that_is_offered_for_a_foreign_one_is_one_of_the_function():
    owners = (
        fl,
        fl.Policy,
        fl.Reward,
        fl.loss,
        fl.kl,
        fl.filter,
        fl.select,
        fl.advantage,
        fl.shaping,
    )
    for topics, others in SYNONYMS.items():
        for function in topics.replace("()", "").split() if "()" in topics else ():
            owner = next(owner for owner in owners if hasattr(owner, function))
            names = arguments_of(getattr(owner, function))
            assert not {*" ".join(others.values()).split()} & {*names}
            assert {meant for meant in others if meant.isidentifier()} <= {*names}, function


@pytest.mark.parametrize(
    ("name", "choices", "found"),
    [
        ("gpro", ["gspo", "ppo", "grpo"], "grpo"),
        ("stf", ["sft", "stuff"], "sft"),
        ("kl", ["k1", "lk"], "lk"),
        ("learning_raet", ["learning_rates", "learning_rate"], "learning_rate"),
        ("temp", ["top_p", "temperature"], "temperature"),
        ("Group-Size", ["group_sizes", "group_size"], "group_size"),
        ("ab", ["xb", "ay"], None),
        ("tem", ["temper", "temperature"], "temper"),
        ("reinf", ["reinforce_pp", "reinforce_baseline"], None),
        ("nothing", ["grpo", "ppo"], None),
    ],
)
def test_the_nearest_name_is_one_edit_away_where_one_is(
    name: str, choices: list[str], found: str | None
):
    assert nearest(name, choices) == found
