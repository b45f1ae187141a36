"""Evaluations: samples of the policy for held-out prompts, and the means of their scores.

The sets are `data.eval`, which has no name, and those of `eval.sets`. A set's sampling is that of
the policy's last rollout that is scored as it is generated, but for the temperature; for an
`interact`, a sample is an episode. The same random streams are used at every evaluation, so that
two of them differ by the policy alone.

The score of a held-out sample is that of the reward or the environment from whose scores the policy
learns, before any map of the program (`scoring_roles`). Where these are several, `eval.score` says
which one it is; without it the run is refused.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb

import numpy as np

from flowrl.backend.batch import Floats
from flowrl.compiler import sampling_of
from flowrl.config.schema import (
    PAIR_ACCURACY,
    REWARD_MARGIN,
    EvalConfig,
    RunConfig,
    StageConfig,
)
from flowrl.data import PromptItem
from flowrl.errors import ConfigError, RewardError
from flowrl.graph import Node, Op, scoring_nodes
from flowrl.graph.streaming import is_rule_score, scores_at_once
from flowrl.ids import RoleName
from flowrl.observe.rows import EvaluationRow
from flowrl.runtime.driver.graph_parts import GraphParts, RolloutPart, role_of
from flowrl.runtime.driver.payloads import Payload
from flowrl.runtime.driver.sources import split_rows
from flowrl.runtime.setup.rollouts import RolloutSpec, rollout_spec
from flowrl.specs import FinishReason
from flowrl.wording import listing


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutSet:
    """One held-out set and how it is sampled.

    Attributes:
        name: Its name in `eval.sets`; empty for `data.eval`.
        items: Its prompts.
        samples: Samples of each prompt.
        temperature: Sampling temperature; 0 is greedy.
    """

    name: str
    items: tuple[PromptItem, ...]
    samples: int
    temperature: float


def held_out_sets(
    config: EvalConfig, held_out: Mapping[str, tuple[PromptItem, ...]]
) -> list[HeldOutSet]:
    """Returns the sets that have prompts, that of `data.eval` first.

    Args:
        held_out: Prompts by the name of the set.
    """
    sets = []
    for name, items in held_out.items():
        own = config.sets.get(name)
        num, samples, temperature = config.num, config.samples, config.temperature
        if own is not None:
            num = num if own.num is None else own.num
            samples = samples if own.samples is None else own.samples
            temperature = temperature if own.temperature is None else own.temperature
        if items:
            kept = items[: num or len(items)]
            sets.append(HeldOutSet(name=name, items=kept, samples=samples, temperature=temperature))
    return sets


def evaluated_rollout(
    policy: RoleName | None, stages: Sequence[GraphParts]
) -> tuple[GraphParts, RolloutPart] | None:
    """Returns the rollout as which held-out samples are generated; None if the policy has none.

    It is the last of the policy's rollouts from prompts of the data, in the last stage that has
    any, that is scored as it is generated; of such that are not, the last.
    """
    for parts in reversed(stages):
        own = [
            part
            for part in parts.rollouts
            if part.parent is None and any(role_of(node) == policy for node in part.turn_nodes)
        ]
        scored = [part for part in own if part.scorers or part.node.op is Op.INTERACT]
        if own:
            return parts, (scored or own)[-1]
    return None


def rows_of_rollout(
    sets: Sequence[HeldOutSet], parts: GraphParts, part: RolloutPart
) -> list[HeldOutSet]:
    """Returns the sets with the rows whose prompts a rollout answers; `fl.where` leaves some out.

    A set without such a row is left out.

    Raises:
        DataError: a row does not have the field by which prompts are split.
    """
    found = []
    for own in sets:
        split = split_rows(parts.graph, {parts.data_of(part.source): own.items})
        if items := tuple(split[part.source]):
            found.append(replace(own, items=items))
    return found


def scoring_roles(policy: RoleName, parts: GraphParts, part: RolloutPart) -> list[RoleName]:
    """Returns the roles that score a rollout as it is generated and from which the policy learns.

    They are those behind the policy's updates, or else behind filters and selections, or else all
    that score the rollout. Models that score whole batches are none of them.
    """
    graph = parts.graph

    def roles(nodes: Sequence[Node]) -> list[RoleName]:
        own = [n for n in nodes if scores_at_once(n) and parts.origin(n.id) == part.node.id]
        return list(dict.fromkeys(role_of(node) for node in own))

    updates = [node for node in graph.of_op(Op.UPDATE) if node.role == policy]
    for readers in (updates, graph.of_op(Op.FILTER, Op.SELECT)):
        if found := roles([node for reader in readers for node in scoring_nodes(graph, reader.id)]):
            return found
    return roles(graph.of_op(Op.SCORE, Op.INTERACT))


def held_out_score(
    config: RunConfig, policy: RoleName, stages: Sequence[GraphParts]
) -> RoleName | None:
    """Returns the role whose score is that of a held-out sample; None for that of `rewards.terms`.

    Raises:
        ConfigError: it is one of several, and `eval.score` does not say which.
    """
    evaluated = evaluated_rollout(policy, stages)
    roles = scoring_roles(policy, *evaluated) if evaluated is not None else []
    if not roles and not config.rewards.terms:
        # Nothing scores the rollout; what scores another one of the run can score this one too.
        scores = [node for parts in stages for node in parts.graph.of_op(Op.SCORE)]
        roles = list(dict.fromkeys(role_of(node) for node in scores if is_rule_score(node)))
    asked = None if config.eval.score is None else RoleName(config.eval.score)
    if asked in roles:
        return asked
    if asked is None and all(_score_alike(config, roles[0], role) for role in roles):
        return roles[0] if roles else None
    if asked is None:
        raise ConfigError(
            "the score of held-out samples may be that of several roles",
            where="eval.score",
            found=f"{listing(roles)}, from which {policy!r} learns",
            hint=f"set eval.score={roles[0]}, or another of them",
        )
    raise ConfigError(
        "the held-out score is to be that of a role from whose scores the policy does not learn",
        where="eval.score",
        found=repr(asked),
        expected=listing(roles) if roles else "nothing: rewards.terms score the samples",
    )


def _score_alike(config: RunConfig, first: RoleName, other: RoleName) -> bool:
    """True if two roles give every sample the same score."""
    one, two = config.roles[first], config.roles[other]
    same_terms = config.terms_of(first)[0] == config.terms_of(other)[0]
    return first == other or (
        same_terms and one.backend == two.backend and one.environment is two.environment is None
    )


def evaluated_spec(
    policy: RoleName,
    evaluated: tuple[GraphParts, RolloutPart] | None,
    stage: StageConfig,
    held_out: HeldOutSet,
    reported: RoleName | None,
) -> RolloutSpec:
    """Returns the rollout that samples a set.

    Args:
        evaluated: The policy's rollout; without any it is sampled by `train.sampling`.
        stage: The last stage.
        reported: The role whose score is that of a sample.
    """
    purpose = f"eval/{held_out.name}" if held_out.name else "eval"
    if evaluated is not None:
        spec = rollout_spec(*evaluated, purpose=purpose)
    else:
        spec = RolloutSpec(role=policy, sampling=sampling_of(stage), group_size=1, purpose=purpose)
    sampling = replace(spec.sampling, temperature=held_out.temperature, logprobs="model")
    return replace(
        spec,
        sampling=sampling,
        group_size=held_out.samples,
        reported=reported,
        needs_states=False,
    )


def evaluation_row(
    stage: str, step: int, held_out: HeldOutSet, groups: Sequence[Sequence[Payload]], started: float
) -> EvaluationRow:
    """Returns the measurement of one set.

    `metrics` has the mean over prompts, and for each prompt over its samples, of each reward term
    by name, of `score`, of `length` in response tokens, and of `truncated`, which is 1 for a
    sample that met max_tokens (or an episode that ended before it was done). With several samples
    of each prompt and a term whose values are all 0 or 1 there is `pass@k/TERM` for k = 2, 4, ...
    up to their number: the probability that one of k samples is right, by the unbiased estimator
    1 - C(n - c, k) / C(n, k) of Chen et al., 2021, "Evaluating Large Language Models Trained on
    Code", equation 1, with c right ones of n. `errors` has the standard error of each mean, with
    prompts as the independent units.

    Args:
        groups: The scored samples of each prompt.
        started: When the measurement began, by the monotonic clock.

    Raises:
        RewardError: no sample has a score.
    """
    if not any(groups):
        raise RewardError(
            "no held-out sample was scored: the reward failed for all of them",
            where="eval",
            hint="fix the reward function; with rewards.max_failures=0 the run stops at the first",
        )
    groups = [group for group in groups if group]
    names = sorted({name for group in groups for payload in group for name in payload.terms})
    values = {
        name: [
            # An environment counts what happens; what never happened in an episode is no term of
            # it. A reward's term that does not apply to a sample has no value.
            [p.terms.get(name, 0.0) for p in group if name in p.terms or p.is_episode]
            for group in groups
        ]
        for name in names
    }
    by_prompt = {name: [float(np.mean(group)) for group in values[name] if group] for name in names}
    by_prompt["score"] = [float(np.mean([p.score for p in group])) for group in groups]
    by_prompt["length"] = [float(np.mean([p.num_sampled for p in group])) for group in groups]
    by_prompt["truncated"] = [
        float(np.mean([p.finish is FinishReason.LENGTH for p in group])) for group in groups
    ]
    for name in names:
        if all(value in (0.0, 1.0) for group in values[name] for value in group):
            for k in _pass_sizes(held_out.samples):
                by_prompt[f"pass@{k}/{name}"] = [
                    _pass_at(k, len(group), int(sum(group)))
                    for group in values[name]
                    if len(group) >= k
                ]
    by_prompt = {name: means for name, means in by_prompt.items() if means}
    return EvaluationRow(
        stage=stage,
        step=step,
        name=held_out.name,
        num=len(groups),
        samples=held_out.samples,
        temperature=held_out.temperature,
        metrics={name: float(np.mean(means)) for name, means in by_prompt.items()},
        errors={
            name: float(np.std(means, ddof=1) / np.sqrt(len(means)))
            for name, means in by_prompt.items()
            if len(means) > 1
        },
        seconds=time.monotonic() - started,
    )


def with_pairs(
    row: EvaluationRow, margins: Mapping[RoleName, Floats], started: float
) -> EvaluationRow:
    """Adds the metrics of held-out pairs to a measurement.

    They are `pair_accuracy`, the share of pairs whose preferred response the model prefers, and
    `reward_margin`, by how much; of several models each with its role as a prefix.

    Args:
        margins: The margins of each pair, by the role that was measured.
        started: When the measurement began, by the monotonic clock.
    """
    metrics, errors = dict(row.metrics), dict(row.errors)
    for role, values in margins.items():
        prefix = f"{role}/" if len(margins) > 1 else ""
        for name, each in ((PAIR_ACCURACY, values > 0), (REWARD_MARGIN, values)):
            metrics[f"{prefix}{name}"] = float(np.mean(each))
            if len(each) > 1:
                errors[f"{prefix}{name}"] = float(np.std(each, ddof=1) / np.sqrt(len(each)))
    return replace(row, metrics=metrics, errors=errors, seconds=time.monotonic() - started)


def _pass_sizes(samples: int) -> list[int]:
    """Returns 2, 4, 8, ... up to `samples`, and `samples` itself."""
    sizes = [2**power for power in range(1, samples.bit_length()) if 2**power < samples]
    return [*sizes, samples] if samples > 1 else []


def _pass_at(k: int, n: int, correct: int) -> float:
    return 1.0 - comb(n - correct, k) / comb(n, k)
