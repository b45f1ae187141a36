"""Programs whose lines are looked at one by one, and the rewards that they are scored with.

The rewards are in a file of their own: `eager_rewards.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import flowrl as fl
from flowrl.runtime.eager.session import EagerSession
from tests.runtime.many_programs import config_of
from tests.runtime.tiny_runs import WatchedDisplay

REWARDS = Path(__file__).with_name("eager_rewards.py")
SEEN: list[tuple[str, object]] = []
"""What programs and rewards say of themselves, in order; cleared by each test that reads it."""

TROUBLE: list[BaseException] = []
"""What `troubled` raises at its next line, once each."""


def rewarded(program: str, runs: Path, reward: str = "digits", **changes: Any) -> dict[str, Any]:
    """The configuration of a program of this file, scored by a function of `eager_rewards.py`."""
    config = config_of(program, runs)
    config["workflow"] = f"{__file__}:{program}"
    config["data"] = {**config["data"], "eval": None}
    config["rewards"] = {
        "terms": [{"kind": "python", "name": "digit", "function": f"{REWARDS}:{reward}"}],
        "timeout_s": 60.0,
    }
    return {**config, **changes}


def session_of(program: str, runs: Path, reward: str = "digits", **changes: Any) -> EagerSession:
    """A session of a program of this file."""
    config = rewarded(program, runs, reward, **changes)
    return fl.eager(globals()[program], config, display=WatchedDisplay())


@fl.map(reads=("score",), gives="score", per_sample=True)
def halved(batch):
    """Half of each score."""
    SEEN.append(("halved", len(batch["score"])))
    return batch["score"] / 2


@fl.map(reads=("score", "response_mask"), gives=("rank/samples", "long/samples"))
def ranked(batch):
    """A sample's place in the whole batch, and how long it is."""
    SEEN.append(("ranked", len(batch["score"])))
    return {"rank": np.argsort(np.argsort(batch["score"])) / 8.0, "long": batch.lengths / 4.0}


@fl.advantage.own(per="sample")
def centred(batch):
    """The score less the batch's mean."""
    return batch.scores - batch.scores.mean()


@fl.loss.own(
    needs=("advantages", "behaviour_logprobs"), extra=("rank", "long"), corrects_behaviour=True
)
def ratio_loss(logprobs, batch):
    """A plain importance-weighted loss, weighted by fields of a map."""
    ratio = torch.exp(logprobs - batch.behaviour_logprobs)
    weights = 1.0 + batch.extra["rank"] + batch.extra["long"]
    return -ratio * batch.advantages * weights


@fl.map(reads="score", gives="score", per_sample=True)
def place_in_batch(batch):
    """Says that it looks at each sample alone, and does not."""
    return batch["score"] - len(batch.groups)


@fl.workflow
def looking_aside(prompts: fl.Prompts, *, actor: fl.Policy, verifier: fl.Reward) -> None:
    """A map that breaks its word."""
    rollout = actor.generate(prompts)
    actor.update(rollout, place_in_batch(verifier.score(rollout)))


@fl.workflow
def own_functions(prompts: fl.Prompts, *, actor: fl.Policy, verifier: fl.Reward) -> None:
    """Maps before and behind a filter, an advantage and a loss of one's own, a second filter."""
    rollout = actor.generate(prompts)
    scores = halved(verifier.score(rollout))
    fl.log("halved", scores)
    rollout, scores = fl.filter.zero_variance(rollout, scores)
    rollout, scores = fl.filter.difficulty(rollout, halved(scores), low=-1.0, high=0.2)
    extra = ranked(scores, rollout)
    actor.update(rollout, advantages=centred(scores), loss=ratio_loss(), extra=extra)


@fl.map(
    reads=("score", "text", "prompt_text", "row.answer", "row.a"), gives="score", per_sample=True
)
def begun_right(batch):
    """Half a point for the first digit, one for an even first summand; truncation costs half."""
    first = np.array([text[:1] for text in batch["text"]])
    digits = first == np.array([answer[:1] for answer in batch["row.answer"]])
    even = np.array(["+" in prompt for prompt in batch["prompt_text"]]) & (batch["row.a"] % 2 == 0)
    SEEN.append(("begun_right", len(batch["score"])))
    return batch["score"] + 0.5 * digits + even - 0.5 * batch.truncated


@fl.map(reads=("text", "response_mask"), gives="digits/samples", per_sample=True)
def spoken(batch):
    """How many characters a response has, less its tokens."""
    return np.array([len(text) for text in batch["text"]]) - batch.lengths - batch.truncated


@fl.workflow
def texts_and_rows(
    prompts: fl.Prompts, examples: fl.Examples, *, actor: fl.Policy, verifier: fl.Reward
) -> None:
    """Maps of texts and rows: before a filter, behind it, and of examples."""
    rollout = actor.generate(prompts)
    scores = begun_right(verifier.score(rollout), rollout)
    rollout, scores = fl.filter.zero_variance(rollout, scores)
    fl.log("spoken", spoken(rollout))
    fl.log("taught", spoken(examples))
    actor.update(rollout, scores)
    actor.update(examples)


@fl.map(reads=("token_reward", "token_reward_2"), gives="token_reward", per_sample=True)
def both(batch):
    """The rewards of steps, squashed where there are some, and a little of those of tokens."""
    steps = np.where(batch["token_reward"] != 0, np.tanh(batch["token_reward"]), 0.0)
    return steps + 0.1 * batch["token_reward_2"]


@fl.map(reads=("logprobs", "rollout_logprobs"), gives="logprobs", per_sample=True)
def halfway(batch):
    """Logprobs between two policies."""
    return (batch["logprobs"] + batch["rollout_logprobs"]) / 2


@fl.map(reads="score", per_sample=True)
def passed(batch):
    """1 for a score of a half or more, else 0."""
    return (batch["score"] >= 0.5).astype(np.float32)


@fl.workflow
def dense_rewards(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    rival: fl.Policy,
    reference: fl.Policy,
    model: fl.RewardModel,
    critic: fl.Critic,
    verifier: fl.Reward,
) -> None:
    """Rewards of tokens and steps, of models that learn outcomes before they score, and of maps."""
    rollout = actor.generate(prompts)
    scores = passed(verifier.score(rollout))
    ref = reference.logprobs(rollout)
    rival = rival.update(rollout, scores, reference=ref, loss=fl.loss.implicit_reward(0.5))
    model = model.update(rollout, scores)
    model = model.update(rollout, scores, loss=fl.loss.outcome(per="token"))
    implicit = fl.shaping.implicit_reward(rival.logprobs(rollout), ref, beta=0.5)
    steps = both(model.score(rollout, per="step", separator="1"), implicit)
    fl.log("rewards", steps)
    values = critic.values(rollout)
    advantages, returns = fl.advantage.gae(scores, values, rollout, token_rewards=steps)
    alone = fl.advantage.reinforce_pp(None, rollout, mean="group_others", token_rewards=implicit)
    critic.update(rollout, returns=returns, values=values)
    actor.update(rollout, advantages=advantages, reference=halfway(ref, rollout), kl=fl.kl.k3(0.1))
    actor.update(rollout, advantages=alone, loss=fl.loss.policy_clip(0.2))


@fl.workflow
def second_thoughts(prompts: fl.Prompts, *, actor: fl.Policy, verifier: fl.Reward) -> None:
    """Samples that are selected behind an update, whose old logprobs are of before it."""
    rollout = actor.generate(prompts)
    scores = verifier.score(rollout)
    actor.update(rollout, scores)
    best, best_scores = fl.select.top(rollout, scores, k=2)
    loss = fl.loss.policy_clip(anchor="old")
    actor.update(best, best_scores, loss=loss)
    good, _ = fl.select.threshold(rollout, scores, at_least=0.5)
    actor.update(good, loss=fl.loss.cross_entropy())


@fl.workflow
def out_of_order(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    rival: fl.Policy,
    reference: fl.Policy,
    verifier: fl.Reward,
    judge: fl.Reward,
) -> None:
    """Logs and forward passes before the last rollout is drawn, scores behind a filter."""
    mine = actor.generate(prompts)
    scores = verifier.score(mine)
    fl.log("mine", scores)
    kept, kept_scores = fl.filter.zero_variance(mine, scores)
    logprobs = reference.logprobs(kept)
    fl.log("judged", judge.score(kept))
    theirs = rival.generate(prompts, n=2)
    fl.log("theirs", verifier.score(theirs))
    actor.update(kept, kept_scores, reference=logprobs, kl=fl.kl.k3(0.05))


@fl.workflow
def nothing_left(
    prompts: fl.Prompts, *, actor: fl.Policy, verifier: fl.Reward, judge: fl.Reward
) -> object:
    """Filters that keep no sample, and lines behind them."""
    rollout = actor.generate(prompts)
    kept, scores = fl.filter.difficulty(rollout, verifier.score(rollout), low=5.0, high=6.0)
    kept, scores = fl.filter.difficulty(kept, halved(scores), low=5.0, high=6.0)
    fl.log("judged", judge.score(kept))
    best, best_scores = fl.select.top(kept, scores, k=2)
    actor.update(best, best_scores)
    return kept, scores, best


@fl.workflow
def compared(prompts: fl.Prompts, *, actor: fl.Policy, verifier: fl.Reward) -> None:
    """Two rollouts side by side: a prompt that one of them loses is lost to the other."""
    rollout = actor.generate(prompts)
    scores = verifier.score(rollout)
    greedy = actor.generate(prompts, n=1, temperature=0)
    advantages = fl.advantage.remax(scores, rollout, baseline=verifier.score(greedy))
    actor.update(rollout, advantages=advantages, loss=fl.loss.reinforce())


@fl.workflow
def left_out(
    prompts: fl.Prompts, *, actor: fl.Policy, reference: fl.Policy, verifier: fl.Reward
) -> object:
    """Logprobs that nobody needs, and logprobs that are there twice."""
    rollout = actor.generate(prompts)
    scores = verifier.score(rollout)
    unread = actor.logprobs(rollout)
    first, second = reference.logprobs(rollout), reference.logprobs(rollout)
    actor.update(rollout, scores, reference=unread, kl=fl.kl.k3(0.0))
    actor.update(rollout, scores, reference=first, kl=fl.kl.k3(0.1))
    actor.update(rollout, scores, reference=second, kl=fl.kl.k3(0.2))
    return unread, first, second


@fl.workflow
def stopping_often(prompts: fl.Prompts, *, actor: fl.Policy, verifier: fl.Reward) -> None:
    """A breakpoint before and behind every line."""
    breakpoint()
    rollout = actor.generate(prompts)
    breakpoint()
    scores = verifier.score(rollout)
    breakpoint()
    rollout, scores = fl.filter.zero_variance(rollout, scores)
    breakpoint()
    actor.update(rollout, scores)
    breakpoint()


@fl.workflow
def looking(prompts: fl.Prompts, *, actor: fl.Policy, verifier: fl.Reward) -> object:
    """Reads values between its lines, and returns its handles."""
    rollout = actor.generate(prompts)
    if fl.is_eager():
        SEEN.append(("drawn", rollout.value.texts))
    scores = verifier.score(rollout)
    if fl.is_eager():
        SEEN.append(("scored", scores.value.tolist()))
    actor.update(rollout, scores)
    return prompts, rollout, scores


@fl.workflow
def least_variance(prompts: fl.Prompts, *, actor: fl.Policy, verifier: fl.Reward) -> object:
    """An advantage that reads sums of squared probabilities."""
    rollout = actor.generate(prompts, n=4)
    scores = verifier.score(rollout)
    policy = actor.logprobs(rollout)
    advantages = fl.advantage.optimal_token_baseline(scores, rollout, policy=policy)
    actor.update(rollout, advantages=advantages, loss=fl.loss.reinforce())
    return rollout, scores, policy, advantages


@fl.workflow
def hasty(prompts: fl.Prompts, *, actor: fl.Policy, verifier: fl.Reward) -> None:
    """Asks for a value while it is traced."""
    rollout = actor.generate(prompts)
    scores = verifier.score(rollout)
    print(scores.value.mean())
    actor.update(rollout, scores)


@fl.workflow
def wayward(prompts: fl.Prompts, *, actor: fl.Policy, verifier: fl.Reward, way: str = "") -> None:
    """Takes another way, of several, when it has values."""
    other = way if fl.is_eager() else ""
    rollout = actor.generate(prompts, temperature=0.5 if other == "attribute" else 0.75)
    scores = verifier.score(rollout)
    if other == "operation":
        rollout, scores = fl.filter.zero_variance(rollout, scores)
    kept, kept_scores = fl.filter.difficulty(rollout, scores, low=-9.0, high=9.0)
    actor.update(rollout if other == "edge" else kept, kept_scores)
    if other != "end":
        fl.log("scores", kept_scores)
    if other == "more":
        fl.log("more", kept_scores)


@fl.workflow
def troubled(prompts: fl.Prompts, *, actor: fl.Policy, verifier: fl.Reward) -> None:
    """Raises what `TROUBLE` holds, before it learns; behind it where that is a LookupError."""
    rollout = actor.generate(prompts)
    scores = verifier.score(rollout)
    if fl.is_eager() and TROUBLE and not isinstance(TROUBLE[0], LookupError):
        raise TROUBLE.pop(0)
    rollout, scores = fl.filter.zero_variance(rollout, scores)
    actor.update(rollout, scores)
    if fl.is_eager() and TROUBLE:
        raise TROUBLE.pop(0)


EQUAL: Mapping[str, Mapping[str, Any]] = {
    "own_functions": {},
    "texts_and_rows": {},
    "dense_rewards": {},
    "second_thoughts": {},
    "out_of_order": {},
    "left_out": {},
    "least_variance": {},
    "nothing_left": {},
    "compared": {"rewards": {"max_failures": 100}, "reward": "picky"},
    "troubled": {"rewards": {"max_failures": 100}, "reward": "picky"},
}
"""Programs that must give the same in both executors; with failing rewards where those say so."""
