"""Public names of `fl.`, and the names that papers and other libraries have for them.

The error for an unknown name suggests a public one: by its name in papers and other libraries
(`fl.loss.ppo`, `fl.Actor`), else by its spelling (`fl.loss.polcy_clip`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Unpack, get_args, get_origin, get_type_hints

from flowrl.wording import nearest

__all__ = [
    "MODULES",
    "Missing",
    "argument_hint",
    "arguments_of",
    "kind_called",
    "missing_name",
    "raise_missing",
]

MODULES: Mapping[str, str] = {
    "flowrl": "fl",
    "flowrl.specs.loss": "fl.loss",
    "flowrl.specs.kl": "fl.kl",
    "flowrl.specs.grammar": "fl.grammar",
    "flowrl.program.advantage": "fl.advantage",
    "flowrl.program.filter": "fl.filter",
    "flowrl.program.select": "fl.select",
    "flowrl.program.shaping": "fl.shaping",
}
"""The public name of each module."""

_SYNONYMS: Mapping[str, Mapping[str, str]] = {
    "fl": {
        "actor": "fl.Policy",
        "agent": "fl.Policy",
        "dataset": "fl.Prompts (or fl.Examples, fl.Pairs)",  # fl.data is a package of flowrl
        "demonstrations": "fl.Examples",
        "env": "fl.Environment",
        "flow": "fl.workflow",
        "generator": "fl.Policy",
        **dict.fromkeys(("grader", "judge", "scorer"), "fl.Reward"),
        "lm": "fl.Policy",
        "llm": "fl.Policy",
        "model": "fl.Policy",
        "policymodel": "fl.Policy",
        "preferences": "fl.Pairs",
        **dict.fromkeys(("problems", "questions", "tasks"), "fl.Prompts"),
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
        # Families of functions.
        "advantages": "fl.advantage",
        "filters": "fl.filter",
        "losses": "fl.loss",
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
"""Names in papers and other libraries (in lower case), by module, and the code to suggest."""

_CLIPS = {
    **dict.fromkeys(("clip", "clip_range", "cliprange", "clip_ratio", "eps_clip"), "clip_low"),
    **dict.fromkeys(("eps", "epsilon", "eps_low", "epsilon_low", "clip_ratio_low"), "clip_low"),
    **dict.fromkeys(("eps_high", "epsilon_high", "clip_ratio_high"), "clip_high"),
    **dict.fromkeys(
        ("beta", "kl", "kl_coef", "kl_coefficient"), "kl=fl.kl.k3(0.001) of the update"
    ),
    **dict.fromkeys(("entropy_coef", "entropy_coefficient", "entropy_coeff"), "entropy"),
    **dict.fromkeys(("loss_agg_mode", "loss_type", "reduction"), "aggregation"),
}
_SAMPLING = {
    **dict.fromkeys(("t", "temp"), "temperature"),
    **dict.fromkeys(("max_length", "max_new_tokens", "max_completion_length"), "max_tokens"),
    **dict.fromkeys(("max_response_length", "max_generation_length"), "max_tokens"),
    **dict.fromkeys(("do_sample", "greedy"), "temperature=0, which takes the likeliest token"),
    "seed": "seed=... in the config",
}
_SHORTEST = dict.fromkeys(("min_length", "min_new_tokens"), "min_tokens")
_GENERATE = _SAMPLING | {
    **dict.fromkeys(("num_generations", "num_return_sequences", "num_samples"), "n"),
    **dict.fromkeys(("group_size", "rollouts", "samples"), "n"),
    **dict.fromkeys(("regex", "guided_regex"), 'grammar=fl.grammar.regex("...")'),
    **dict.fromkeys(("json", "schema", "json_schema"), "grammar=fl.grammar.json_schema({...})"),
}
_RATE = "train.optimizer.learning_rate in the config, or roles.NAME.optimizer for one role"
_ARGUMENT_SYNONYMS: Mapping[str, Mapping[str, str]] = {
    "Sampling": _SAMPLING | _SHORTEST,
    "generate": _GENERATE | _SHORTEST,
    "interact": _GENERATE | {"env": "environment", "turns": "max_turns"},
    "update": {
        **dict.fromkeys(("lr", "learning_rate"), _RATE),
        **dict.fromkeys(("beta", "kl_coef", "kl_coefficient"), "kl=fl.kl.k3(0.001)"),
        **dict.fromkeys(("clip", "epsilon", "clip_range"), "loss=fl.loss.policy_clip(0.2)"),
        **dict.fromkeys(("score", "scores", "reward"), "rewards"),
        **dict.fromkeys(("adv", "weights"), "advantages"),
        **dict.fromkeys(("ref", "ref_logprobs", "reference_logprobs"), "reference"),
        **dict.fromkeys(("old_logprobs", "logprobs", "behaviour"), "old"),
        **dict.fromkeys(("epochs", "mini_batches", "steps"), "train.mini_batches in the config"),
    },
    "sync": dict.fromkeys(("interval", "steps", "frequency", "period"), "every"),
    "weighted_sum": dict.fromkeys(
        ("weight", "weights", "coefficients"),
        "each weight next to its scores: fl.weighted_sum((accuracy, 1.0), (style, 0.2))",
    ),
    "difficulty": {
        **dict.fromkeys(("min", "lower", "at_least", "above", "minimum"), "low"),
        **dict.fromkeys(("max", "upper", "at_most", "below", "maximum"), "high"),
    },
    "zero_variance": dict.fromkeys(("eps", "epsilon", "threshold", "tol"), "tolerance"),
    "group_relative": {
        **dict.fromkeys(("normalise", "normalize", "scale", "scale_rewards"), "std"),
        **dict.fromkeys(("epsilon", "delta"), "eps"),
    },
    "gae": {
        **dict.fromkeys(("lambda_", "lamda", "lmbda", "lambd", "gae_lambda"), "lam"),
        **dict.fromkeys(("discount", "discount_factor"), "gamma"),
    },
    "soft_overlong": {
        **dict.fromkeys(("max_length", "max_response_length", "max_len"), "max_tokens"),
        **dict.fromkeys(("cache", "buffer_len", "margin"), "buffer"),
        **dict.fromkeys(("penalty", "weight"), "factor"),
    },
    "top": dict.fromkeys(("n", "num", "number", "count"), "k"),
    "random": dict.fromkeys(("n", "num", "number", "count"), "k"),
    **dict.fromkeys(("policy_clip", "gspo", "luspo", "gmpo"), _CLIPS),
    "value_clip": dict.fromkeys(("epsilon", "eps", "clip_range", "cliprange_value"), "clip"),
    **dict.fromkeys(
        ("k1", "k2", "k3", "kl_abs", "full"),
        dict.fromkeys(("beta", "coef", "kl_coef", "weight"), "coefficient"),
    ),
    "dpo": dict.fromkeys(("coefficient", "tau"), "beta"),
}
"""Names of arguments in papers and other libraries, by function, and the code to suggest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A name that a module of flowrl does not have.

    Attributes:
        what: The error in one sentence.
        names: The public names of the module.
        hint: The suggestion; None if no name is similar.
    """

    what: str
    names: tuple[str, ...]
    hint: str | None


def missing_name(module: str, name: str, own: Collection[str]) -> Missing:
    """Describes the error of `module.name`.

    Args:
        own: The module's `__all__`, including names that programs do not write.
    """
    called = MODULES.get(module, module)
    names = tuple(each for each in own if _is_written(called, each))
    meant = _SYNONYMS.get(called, {}).get(_form(name, called))
    hint = f"write {meant}" if meant is not None else None
    if hint is None:
        forms = {_form(each, called): each for each in names}
        match = nearest(_form(name, called), forms)
        hint = None if match is None else f"did you mean '{forms[match]}'?"
    return Missing(what=f"{called} has no '{name}'", names=names, hint=hint)


def kind_called(name: str, kinds: Collection[str]) -> str | None:
    """Returns the usual kind of role or data of a parameter with this name: `fl.Prompts`.

    Args:
        name: The name of the parameter.
        kinds: The kinds that a parameter may have: `Policy`, `Prompts`, ...
    """
    words = name.lower().split("_")
    for part in (name, *reversed(words)):
        called = _SYNONYMS["fl"].get(part.lower().replace("_", ""), "").split(" ")[0]
        if called.removeprefix("fl.") in kinds:
            return called
        meant = nearest(part.replace("_", ""), kinds, cutoff=0.85)
        if meant is not None:
            return f"fl.{meant}"
    return None


def arguments_of(function: Callable[..., Any]) -> list[str]:
    """Returns the names of a function's arguments, including those in an unpacked `**options`."""
    names: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            hint = get_type_hints(function)[name]
            is_unpacked = get_origin(hint) is Unpack
            names += get_args(hint)[0].__annotations__ if is_unpacked else [name]
        elif name != "self":
            names.append(name)
    return names


def argument_hint(function: str, unknown: str, names: Sequence[str]) -> str | None:
    """Suggests what to write in place of an unknown argument; None without a suggestion.

    Args:
        function: The name of the function without its module: `generate`.
        unknown: The name of the unknown argument.
        names: The arguments of the function.
    """
    meant = _ARGUMENT_SYNONYMS.get(function, {}).get(unknown.lower())
    if meant is not None:
        return f"write {meant}=..." if meant in names else f"write {meant}"
    match = nearest(unknown, names, cutoff=0.7)
    return None if match is None else f"did you mean '{match}'?"


def raise_missing(module: str, name: str, own: Collection[str]) -> NoReturn:
    """Raises the error of a module's `__getattr__`.

    Raises:
        AttributeError: The error, with a suggestion.
    """
    owner = sys.modules.get(module)
    if name.startswith("_"):  # protocols that Python and libraries probe for
        raise AttributeError(f"module '{module}' has no attribute '{name}'", name=name, obj=owner)
    missing = missing_name(module, name, own)
    text = missing.what if missing.hint is None else f"{missing.what}: {missing.hint}"
    raise AttributeError(text, name=name, obj=owner)


def _is_written(called: str, name: str) -> bool:
    """Returns True for public names of programs: functions, and in `fl` all except errors."""
    if called == "fl":
        return not name.endswith(("Error", "Died")) and not name.startswith("_")
    return name.islower()


def _form(name: str, called: str) -> str:
    form = name.lower().replace("-", "_")
    return form.replace("_", "") if called == "fl" else form
