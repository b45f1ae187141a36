"""Programs whose rollouts answer what other rollouts made, and their configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flowrl as fl
from tests.runtime.many_programs import config_of

REINFORCE = fl.loss.reinforce()
"""Reads no logprobs of the engine, whose last bit depends on which samples share a batch."""


def tree_of(program: str, runs: Path, **changes: Any) -> dict[str, Any]:
    """The configuration of a program of this file: longer samples of shorter responses."""
    config = config_of(program, runs, **changes)
    config["workflow"] = f"{__file__}:{program}"
    used = ("actor", "rival", "verifier", "judge")
    config["roles"] = {name: config["roles"][name] for name in used}
    config["roles"]["actor"]["model"]["max_length"] = 128
    config["train"] = {**config["train"], "sampling": {"max_tokens": 4}}
    return config


@fl.workflow
def refinement(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    rival: fl.Policy,
    verifier: fl.Reward,
    ahead: bool = False,
) -> None:
    """Drafts, critiques of each, and revisions; critiques and drafts by what comes of them."""
    loss = fl.loss.policy_clip(0.2) if ahead else REINFORCE
    draft = actor.generate(prompts)
    critique = rival.generate(fl.prompts_of(draft, template="{prompt}{response}="), n=2)
    revision = actor.generate(fl.prompts_of(critique, template="{prompt}{response}={answer}+"), n=1)
    better = fl.mean_of_children(verifier.score(revision))
    fl.log("revised", better)
    advantages = fl.advantage.group_relative(better, std="none")
    rival.update(critique, advantages=advantages, loss=loss)
    actor.update(revision, advantages=fl.parent(advantages, of=revision), loss=loss)
    scores = fl.weighted_sum((verifier.score(draft), 1.0), (fl.mean_of_children(better), 0.5))
    draft, scores = fl.filter.zero_variance(draft, scores)
    actor.update(draft, scores, loss=loss)


@fl.workflow
def kept_drafts(
    prompts: fl.Prompts, *, actor: fl.Policy, verifier: fl.Reward, ahead: bool = False
) -> None:
    """Second answers to what a filter keeps, themselves filtered; of one policy and reward."""
    loss = fl.loss.policy_clip(0.2) if ahead else REINFORCE
    draft = actor.generate(prompts)
    drafts = verifier.score(draft)
    fl.log("drafts", drafts)
    kept, scores = fl.filter.zero_variance(draft, drafts)
    second = actor.generate(fl.prompts_of(kept, template="{prompt}{response}+"))
    seconds = verifier.score(second)
    second, seconds = fl.filter.zero_variance(second, seconds)
    fl.log("before", fl.parent(drafts, of=second))
    actor.update(kept, scores, loss=loss)
    actor.update(second, seconds, loss=loss)


@fl.workflow
def chain_of_one(prompts: fl.Prompts, *, actor: fl.Policy, verifier: fl.Reward) -> None:
    """A policy that answers twice."""
    draft = actor.generate(prompts)
    second = actor.generate(fl.prompts_of(draft, template="{prompt}{response}="), n=1)
    scores = fl.mean_of_children(verifier.score(second))
    advantages = fl.advantage.group_relative(scores)
    actor.update(draft, advantages=advantages)
    actor.update(second, advantages=fl.parent(advantages, of=second))


@fl.workflow
def two_answers(
    prompts: fl.Prompts, *, actor: fl.Policy, verifier: fl.Reward, judge: fl.Reward
) -> None:
    """Two rollouts of one policy for the same prompts made of samples, whose ids are equal."""
    draft = actor.generate(prompts, n=2)
    again = fl.prompts_of(draft, template="{prompt}{response}=")
    answers = actor.generate(again, n=2)
    greedy = actor.generate(again, n=1, temperature=0)
    advantages = fl.advantage.remax(
        verifier.score(answers), answers, baseline=verifier.score(greedy)
    )
    fl.log("both", fl.mean_of_children(judge.score(answers)))
    actor.update(answers, advantages=advantages, loss=REINFORCE)


@fl.workflow
def tournament(
    prompts: fl.Prompts, *, actor: fl.Policy, rival: fl.Policy, ahead: bool = False
) -> None:
    """Answers by the share of comparisons that they win, of two verdicts on each pair."""
    loss = fl.loss.policy_clip(0.2) if ahead else REINFORCE
    answers = actor.generate(prompts)
    asked = [fl.prompts_of(answers, template="{response}+{opponent}=", opponent=k) for k in (1, 3)]
    verdicts = [rival.generate(each, n=2) for each in asked]
    stated = [fl.parse(each, regex="^[1-9]", otherwise=0.0) for each in verdicts]
    actor.update(answers, fl.win_rate(*stated), loss=loss)


@fl.workflow
def branching(
    prompts: fl.Prompts, *, actor: fl.Policy, verifier: fl.Reward, ahead: bool = False
) -> None:
    """Trunks that are continued from a cut, branches that are continued from another."""
    loss = fl.loss.policy_clip(0.2) if ahead else REINFORCE
    trunk = actor.generate(prompts, n=2)
    branches = actor.generate(fl.prompts_of(trunk, cut=fl.cut.share(0.5)), n=2)
    twigs = actor.generate(fl.prompts_of(branches, cut=fl.cut.at(1)), n=1)
    again = actor.generate(fl.prompts_of(branches, template="{prompt}{response}="), n=1)
    values = fl.mean_of_children(verifier.score(twigs))
    fl.log("stated", fl.parse(twigs, regex=r"\d", otherwise=0.0))
    advantages = fl.advantage.group_relative(values, std="none")
    actor.update(branches, advantages=advantages, loss=loss)
    actor.update(again, advantages=fl.parent(advantages, of=again), loss=loss)


@fl.workflow
def preferred_revisions(prompts: fl.Prompts, *, actor: fl.Policy, rival: fl.Policy) -> None:
    """DPO on revisions and the drafts that they are made of."""
    draft = actor.generate(prompts, n=2)
    critique = rival.generate(fl.prompts_of(draft, template="{prompt}{response}="), n=1)
    revision = actor.generate(fl.prompts_of(critique, template="{prompt}{response}+"), n=2)
    pairs = fl.pair(preferred=revision, other=draft)
    actor.update(pairs, reference=rival.logprobs(pairs), loss=fl.loss.dpo(0.1))


@fl.workflow
def parts_of_the_data(
    prompts: fl.Prompts,
    *,
    actor: fl.Policy,
    rival: fl.Policy,
    verifier: fl.Reward,
    judge: fl.Reward,
    ahead: bool = False,
) -> None:
    """Two kinds of rows, one of which two policies answer, and the other has second answers."""
    loss = fl.loss.policy_clip(0.2) if ahead else REINFORCE
    low = fl.where(prompts, row="a", one_of=range(50))
    high = fl.where(prompts, row="a", none_of=range(50))
    mine, theirs, others = actor.generate(low), rival.generate(low, n=1), actor.generate(high)
    second = actor.generate(fl.prompts_of(others, template="{prompt}{response}="), n=1)
    baseline = fl.advantage.remax(verifier.score(mine), mine, baseline=judge.score(theirs))
    actor.update(mine, advantages=baseline, loss=loss)
    actor.update(others, fl.mean_of_children(verifier.score(second)), loss=loss)
    actor.update(fl.Examples.of(low))


def whole(response: str) -> float:
    """Returns the length of a response."""
    return float(len(response))


def picky(response: str) -> float:
    """Raises for responses that begin with some digits."""
    if response[:1] in ("9", "4"):
        raise ValueError(f"not this one: {response}")
    return float(response[:1].isdigit())
