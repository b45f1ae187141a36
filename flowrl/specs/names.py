"""What a program may write behind `fl.`: public spellings, and the field's other names for them.

A name that is not there is answered with the one that was probably meant: by what it is called in
papers and other libraries (`fl.loss.ppo`, `fl.Actor`), else by its spelling (`fl.loss.polcy_clip`).
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NoReturn

__all__ = ["Missing", "missing_name", "raise_missing"]

_MODULES: Mapping[str, str] = {
    "flowrl": "fl",
    "flowrl.specs.loss": "fl.loss",
    "flowrl.specs.kl": "fl.kl",
    "flowrl.specs.grammar": "fl.grammar",
    "flowrl.program.advantage": "fl.advantage",
    "flowrl.program.filter": "fl.filter",
    "flowrl.program.select": "fl.select",
    "flowrl.program.shaping": "fl.shaping",
}
"""What a program calls each module."""

_CALLED: Mapping[str, Mapping[str, str]] = {
    "fl": {
        "actor": "fl.Policy",
        "agent": "fl.Policy",
        "dataset": "fl.Prompts (or fl.Examples, fl.Pairs)",
        "demonstrations": "fl.Examples",
        "env": "fl.Environment",
        "flow": "fl.workflow",
        "generator": "fl.Policy",
        "judge": "fl.Reward",
        "lm": "fl.Policy",
        "llm": "fl.Policy",
        "model": "fl.Policy",
        "policymodel": "fl.Policy",
        "preferences": "fl.Pairs",
        "ref": "fl.Policy",
        "reference": "fl.Policy",
        "referencepolicy": "fl.Policy",
        "responses": "fl.Rollout",
        "rewardfn": "fl.Reward",
        "rewardfunction": "fl.Reward",
        "rm": "fl.RewardModel",
        "student": "fl.Policy",
        "teacher": "fl.Policy",
        "train": "fl.run",
        "valuemodel": "fl.Critic",
        "value": "fl.Critic",
        "verifier": "fl.Reward",
        # Operations of roles.
        "generate": "actor.generate(prompts), an operation of a role",
        "sample": "actor.generate(prompts), an operation of a role",
        "score": "reward.score(rollout), an operation of a role",
        "logprobs": "reference.logprobs(rollout), an operation of a role",
        "values": "critic.values(rollout), an operation of a role",
        "update": "actor.update(rollout, rewards), an operation of a role",
        "sync": "reference.sync(actor), an operation of a role",
    },
    "fl.loss": {
        "bc": "fl.loss.cross_entropy()",
        "ce": "fl.loss.cross_entropy()",
        "clip": "fl.loss.policy_clip(0.2)",
        "clip_higher": "fl.loss.policy_clip(0.2, 0.28)",
        "dapo": "fl.loss.policy_clip(0.2, 0.28)",
        "dr_grpo": 'fl.loss.policy_clip(0.2, aggregation="constant")',
        "grpo": "fl.loss.policy_clip(0.2)",
        "icepop": "fl.loss.mask_outside(...), as correction= of a loss",
        "importance_sampling": "fl.loss.truncate(2.0), as correction= of a loss",
        "ipo": 'fl.loss.dpo(0.1, form="ipo")',
        "kl": "kl=fl.kl.k3(0.001) of the update",
        "mse": "fl.loss.value_clip(0.2)",
        "nll": "fl.loss.cross_entropy()",
        "pg": "fl.loss.reinforce()",
        "policy_gradient": "fl.loss.reinforce()",
        "policy_loss": "fl.loss.policy_clip(0.2)",
        "ppo": "fl.loss.policy_clip(0.2)",
        "ppo_clip": "fl.loss.policy_clip(0.2)",
        "ranking": "fl.loss.bradley_terry()",
        "reward_model": "fl.loss.bradley_terry()",
        "rm": "fl.loss.bradley_terry()",
        "sft": "fl.loss.cross_entropy()",
        "tis": "fl.loss.truncate(2.0), as correction= of a loss",
        "value_loss": "fl.loss.value_clip(0.2)",
        "vanilla": "fl.loss.reinforce()",
    },
    "fl.kl": {
        "abs": "fl.kl.kl_abs(...)",
        "adaptive": "fl.kl.k3(coefficient, target=...)",
        "exact": "fl.kl.full(...)",
        "kl": "fl.kl.k1(...)",
        "low_var": "fl.kl.k3(...)",
        "low_var_kl": "fl.kl.k3(...)",
        "mse": "fl.kl.k2(...)",
    },
    "fl.advantage": {
        "dr_grpo": 'fl.advantage.group_relative(scores, std="none")',
        "gdpo": "fl.advantage.normalise_then_sum(...)",
        "gigpo": "fl.advantage.group_in_group(...)",
        "grpo": "fl.advantage.group_relative(scores)",
        "group_norm": "fl.advantage.group_relative(scores)",
        "maxrl": "fl.advantage.max_rl(scores)",
        "opd": "fl.advantage.distill(...)",
        "opo": "fl.advantage.length_weighted(scores, rollout)",
        "otb": "fl.advantage.optimal_token_baseline(scores, rollout, policy=...)",
        "ppo": "fl.advantage.gae(scores, values, rollout)",
        "reinforce": "fl.advantage.reinforce_pp(scores, rollout)",
        "reinforce_plus_plus": "fl.advantage.reinforce_pp(scores, rollout)",
        "rloo": "fl.advantage.leave_one_out(scores)",
    },
    "fl.filter": {
        "curriculum": "fl.filter.difficulty(...)",
        "dapo": "fl.filter.zero_variance(rollout, scores)",
        "dynamic": "fl.filter.zero_variance(rollout, scores)",
        "dynamic_sampling": "fl.filter.zero_variance(rollout, scores)",
        "solve_rate": "fl.filter.difficulty(...)",
        "threshold": "fl.select.threshold(rollout, scores, at_least=...)",
        "zero_std": "fl.filter.zero_variance(rollout, scores)",
    },
    "fl.select": {
        "above": "fl.select.threshold(rollout, scores, at_least=...)",
        "at_least": "fl.select.threshold(rollout, scores, at_least=...)",
        "best": "fl.select.top(rollout, scores, k=1)",
        "best_of_n": "fl.select.top(rollout, scores, k=1)",
        "correct": "fl.select.threshold(rollout, scores, at_least=...)",
        "pairs": "fl.select.best_and_worst(rollout, scores)",
        "preferences": "fl.select.best_and_worst(rollout, scores)",
        "raft": "fl.select.threshold(rollout, scores, at_least=...)",
        "rejection": "fl.select.threshold(rollout, scores, at_least=...)",
        "rejection_sampling": "fl.select.threshold(rollout, scores, at_least=...)",
    },
    "fl.shaping": {
        "cosine": "fl.shaping.cosine_length(...)",
        "overlong": "fl.shaping.soft_overlong(...)",
    },
    "fl.grammar": {
        "json": "fl.grammar.json_schema(...)",
        "schema": "fl.grammar.json_schema(...)",
    },
}
"""By module, names of papers and other libraries without capitals, and what to write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A name that a module of flowrl lacks.

    Attributes:
        what: One sentence.
        names: Those that it has, as programs write them.
        hint: What was probably meant; None where nothing is alike.
    """

    what: str
    names: tuple[str, ...]
    hint: str | None


def missing_name(module: str, name: str, own: Collection[str]) -> Missing:
    """What to say of `module.name`.

    Args:
        own: Public names of the module, those that programs do not write included.
    """
    called = _MODULES.get(module, module)
    names = tuple(each for each in own if _is_written(called, each))
    meant = _CALLED.get(called, {}).get(_form(name, called))
    hint = f"write {meant}" if meant is not None else None
    if hint is None:
        forms = {_form(each, called): each for each in names}
        found = get_close_matches(_form(name, called), forms, n=1)
        hint = f"did you mean '{forms[found[0]]}'?" if found else None
    return Missing(what=f"{called} has no '{name}'", names=names, hint=hint)


def raise_missing(module: str, name: str, own: Collection[str]) -> NoReturn:
    """Raises what a module's `__getattr__` raises.

    Raises:
        AttributeError: with what was probably meant, where Python's own says nothing.
    """
    owner = sys.modules.get(module)
    if name.startswith("_"):  # protocols that Python and libraries probe for
        raise AttributeError(f"module '{module}' has no attribute '{name}'", name=name, obj=owner)
    missing = missing_name(module, name, own)
    text = missing.what if missing.hint is None else f"{missing.what}: {missing.hint}"
    raise AttributeError(text, name=name, obj=owner)


def _is_written(called: str, name: str) -> bool:
    """Whether programs write the name: of families their functions, of `fl` all but errors."""
    if called == "fl":
        return not name.endswith(("Error", "Died")) and not name.startswith("_")
    return name.islower()


def _form(name: str, called: str) -> str:
    form = name.lower().replace("-", "_")
    return form.replace("_", "") if called == "fl" else form
