"""Programs with every kind of role, lowered, and what plays them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import flowrl as fl
from flowrl.backend.protocols import Capabilities, Service
from flowrl.graph import Graph
from flowrl.passes import Context, run_passes
from flowrl.plan import PlanRequest, RoleRequest
from flowrl.user_lines import SourceRef

__all__ = ["lowered", "request_of", "requested"]


@fl.workflow
def ppo(
    prompts: fl.Prompts,
    pairs: fl.Pairs,
    actor: fl.Policy,
    critic: fl.Critic,
    judge: fl.RewardModel,
    rule: fl.Reward,
    reference: fl.Policy,
):
    rollout = actor.generate(prompts, n=8, max_tokens=4)
    scores = fl.weighted_sum((judge.score(rollout), 1.0), (rule.score(rollout), 0.5))
    values = critic.values(rollout)
    reference_logprobs = reference.logprobs(rollout)
    advantages, returns = fl.advantage.gae(
        scores, values, rollout, reference=reference_logprobs, kl=0.1
    )
    critic.update(rollout, returns=returns, values=values)
    actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip(0.2, anchor="old"))
    judge.update(pairs)
    reference.sync(actor, every=50)
    fl.log("score", scores)


@fl.workflow
def play(prompts: fl.Prompts, actor: fl.Policy, game: fl.Environment):
    rollout, scores = fl.interact(
        actor, game, prompts, n=4, max_turns=3, max_observation_tokens=5, max_tokens=2
    )
    rollout, scores = fl.filter.zero_variance(rollout, scores)
    actor.update(rollout, scores)


@fl.workflow
def two_rollouts(prompts: fl.Prompts, actor: fl.Policy, teacher: fl.Policy, rule: fl.Reward):
    mine = actor.generate(prompts, n=8, max_tokens=4)
    greedy = actor.generate(prompts, n=1, temperature=0.0, max_tokens=4)
    theirs = teacher.generate(prompts, n=2, max_tokens=2)
    best, _ = fl.select.top(mine, rule.score(mine), k=1)
    fl.log("greedy", rule.score(greedy))
    actor.update(best, loss=fl.loss.cross_entropy())
    actor.update(theirs, loss=fl.loss.cross_entropy())


def lowered(workflow: fl.Workflow, mini_batches: int = 2) -> Graph:
    """With the lines of a file of its own, so that golden files do not move."""
    context = Context(mini_batches=mini_batches, shares_weights={"actor": True})
    graph = run_passes(workflow.trace(), context)
    return graph.with_nodes(
        replace(node, source=SourceRef(file="program.py", line=i + 1))
        for i, node in enumerate(graph.nodes)
    )


def request_of(cases: Any, **sizes: int) -> PlanRequest:
    """For any of the programs: roles that a graph does not have are not asked for."""
    trains: Capabilities = replace(cases.TORCH, heads=frozenset({"lm", "value"}))
    plays = Capabilities(
        services=frozenset({Service.ENVIRONMENT}), devices=frozenset({"cpu"}), dtypes=frozenset()
    )

    def model(name: str, **more: Any) -> RoleRequest:
        return RoleRequest(name=name, backend="torch", capabilities=trains, **more)

    given = {
        "prompts_per_step": 64,
        "group_size": 8,
        "mini_batches": 2,
        "micro_batch": 32,
        "max_prompt_tokens": 6,
        "max_response_tokens": 4,
        "max_length": 10,
        **sizes,
    }
    return PlanRequest(
        roles=(
            model("actor", shape=cases.TINY),
            model("critic", head="value", copy_of="actor"),
            model("judge", head="value", shape=cases.TINY),
            model("reference", copy_of="actor"),
            model("teacher", shape=cases.TINY),
            RoleRequest(name="rule", backend="verify", capabilities=cases.VERIFY, num_workers=2),
            RoleRequest(name="game", backend="environment", capabilities=plays),
        ),
        **given,
    )


def requested(cases: Any, graph: Graph, **sizes: int) -> Any:
    """The plan of a graph on one CPU."""
    from flowrl.plan import make_plan

    return make_plan(graph, request_of(cases, **sizes), cases.pool_of(cases.cpu()))
