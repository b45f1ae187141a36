"""Evaluations: samples of the policy for held-out prompts, and the means of their scores.

The sets are `data.eval`, which has no name, and those of `eval.sets`. A set's sampling is that of
the policy's last rollout but for the temperature; for an `interact`, a sample is an episode, and
its score is that of the environment. The same random streams are used at every evaluation, so that
two of them differ by the policy alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb

import numpy as np

from flowrl.compiler import sampling_of
from flowrl.config.schema import EvalConfig, StageConfig
from flowrl.data import PromptItem
from flowrl.errors import RewardError
from flowrl.ids import RoleName
from flowrl.observe.rows import EvaluationRow
from flowrl.runtime.driver.graph_parts import GraphParts, RolloutPart, role_of
from flowrl.runtime.driver.payloads import Payload
from flowrl.runtime.setup.rollouts import RolloutSpec, rollout_spec
from flowrl.specs import FinishReason

__all__ = ["HeldOutSet", "evaluated_spec", "evaluation_row", "held_out_sets", "rollouts_of"]


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


def rollouts_of(
    policy: RoleName | None, stages: Sequence[GraphParts]
) -> list[tuple[GraphParts, RolloutPart]]:
    """Returns the evaluated policy's rollouts of the last stage that has any."""
    for parts in reversed(stages):
        own = [part for part in parts.rollouts if role_of(part.generate_node) == policy]
        if own:
            return [(parts, part) for part in own]
    return []


def evaluated_spec(
    policy: RoleName,
    rollouts: Sequence[tuple[GraphParts, RolloutPart]],
    stage: StageConfig,
    held_out: HeldOutSet,
) -> RolloutSpec:
    """Returns the rollout that samples a set.

    Args:
        rollouts: The policy's rollouts; without any it is sampled by `train.sampling`.
        stage: The last stage.
    """
    purpose = f"eval/{held_out.name}" if held_out.name else "eval"
    if rollouts:
        spec = rollout_spec(*rollouts[-1], purpose=purpose)
    else:
        spec = RolloutSpec(role=policy, sampling=sampling_of(stage), group_size=1, purpose=purpose)
    sampling = replace(spec.sampling, temperature=held_out.temperature, logprobs="model")
    return replace(spec, sampling=sampling, group_size=held_out.samples, needs_states=False)


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


def _pass_sizes(samples: int) -> list[int]:
    """Returns 2, 4, 8, ... up to `samples`, and `samples` itself."""
    sizes = [2**power for power in range(1, samples.bit_length()) if 2**power < samples]
    return [*sizes, samples] if samples > 1 else []


def _pass_at(k: int, n: int, correct: int) -> float:
    return 1.0 - comb(n - correct, k) / comb(n, k)
