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

from flowrl.errors import TraceError
from flowrl.specs.user_functions import caller
from flowrl.wording import nearest

__all__ = [
    "MODULES",
    "Missing",
    "argument_hint",
    "arguments_of",
    "check_options",
    "kind_called",
    "missing_name",
    "raise_missing",
]

MODULES: Mapping[str, str] = {
    "flowrl": "fl",
    **{f"flowrl.specs.{name}": f"fl.{name}" for name in ("loss", "kl", "grammar")},
    **{
        f"flowrl.program.{name}": f"fl.{name}"
        for name in ("advantage", "filter", "select", "shaping")
    },
}
"""The public name of each module."""

_NAMES: Mapping[str, Mapping[str, str]] = {
    "fl": {
        "fl.Policy": "actor agent generator lm llm model policymodel ref reference referencepolicy "
        "student teacher",
        "fl.Prompts (or fl.Examples, fl.Pairs)": "dataset",  # fl.data is a package of flowrl
        "fl.Prompts": "problems questions tasks",
        "fl.Examples": "demonstrations",
        "fl.Pairs": "preferences",
        "fl.Rollout": "responses",
        "fl.Environment": "env",
        "fl.Reward": "grader judge scorer rewardfn rewardfunction verifier",
        "fl.RewardModel": "rm",
        "fl.Critic": "value valuemodel",
        "fl.workflow": "flow",
        "fl.run": "train",
        # Families of functions.
        "fl.advantage": "advantages",
        "fl.filter": "filters",
        "fl.loss": "losses",
        # Operations of roles.
        "actor.generate(prompts), an operation of a role": "generate sample",
        "reward.score(rollout), an operation of a role": "score",
        "reference.logprobs(rollout), an operation of a role": "logprobs",
        "critic.values(rollout), an operation of a role": "values",
        "actor.update(rollout, rewards), an operation of a role": "update",
        "reference.sync(actor), an operation of a role": "sync",
    },
    "fl.loss": {
        "fl.loss.cross_entropy()": "bc ce nll sft",
        "fl.loss.policy_clip(0.2)": "clip grpo policy_loss ppo ppo_clip",
        "fl.loss.policy_clip(0.2, 0.28)": "clip_higher dapo",
        'fl.loss.policy_clip(0.2, aggregation="constant")': "dr_grpo",
        "fl.loss.reinforce()": "pg policy_gradient vanilla",
        "fl.loss.mask_outside(...), as correction= of a loss": "icepop",
        "fl.loss.truncate(2.0), as correction= of a loss": "importance_sampling tis",
        'fl.loss.dpo(0.1, form="ipo")': "ipo",
        "fl.loss.bradley_terry()": "ranking reward_model rm",
        "fl.loss.value_clip(0.2)": "mse value_loss",
        "kl=fl.kl.k3(0.001) of the update": "kl",
    },
    "fl.kl": {
        "fl.kl.k1(...)": "kl",
        "fl.kl.kl_abs(...)": "abs",
        "fl.kl.k2(...)": "mse",
        "fl.kl.k3(...)": "low_var low_var_kl",
        "fl.kl.k3(coefficient, target=...)": "adaptive",
        "fl.kl.full(...)": "exact",
    },
    "fl.advantage": {
        "fl.advantage.group_relative(scores)": "grpo group_norm",
        'fl.advantage.group_relative(scores, std="none")': "dr_grpo",
        "fl.advantage.normalise_then_sum(...)": "gdpo",
        "fl.advantage.group_in_group(...)": "gigpo",
        "fl.advantage.max_rl(scores)": "maxrl",
        "fl.advantage.distill(...)": "opd",
        "fl.advantage.length_weighted(scores, rollout)": "opo",
        "fl.advantage.optimal_token_baseline(scores, rollout, policy=...)": "otb",
        "fl.advantage.gae(scores, values, rollout)": "ppo",
        "fl.advantage.reinforce_pp(scores, rollout)": "reinforce reinforce_plus_plus",
        "fl.advantage.leave_one_out(scores)": "rloo",
    },
    "fl.filter": {
        "fl.filter.difficulty(...)": "curriculum solve_rate",
        "fl.filter.zero_variance(rollout, scores)": "dapo dynamic dynamic_sampling zero_std",
        "fl.select.threshold(rollout, scores, at_least=...)": "threshold",
    },
    "fl.select": {
        "fl.select.threshold(rollout, scores, at_least=...)": "above at_least correct raft "
        "rejection rejection_sampling",
        "fl.select.top(rollout, scores, k=1)": "best best_of_n",
        "fl.select.best_and_worst(rollout, scores)": "pairs preferences",
    },
    "fl.shaping": {
        "fl.shaping.cosine_length(...)": "cosine",
        "fl.shaping.soft_overlong(...)": "overlong",
    },
    "fl.grammar": {"fl.grammar.json_schema(...)": "json schema"},
}
"""By module and by the code to suggest, its names in papers and other libraries in lower case,
separated by spaces."""

_CLIP_ARGUMENTS = {
    "clip_low": "clip clip_range cliprange clip_ratio eps_clip eps epsilon eps_low epsilon_low "
    "clip_ratio_low",
    "clip_high": "eps_high epsilon_high clip_ratio_high",
    "kl=fl.kl.k3(0.001) of the update": "beta kl kl_coef kl_coefficient",
    "entropy": "entropy_coef entropy_coefficient entropy_coeff",
    "aggregation": "loss_agg_mode loss_type reduction",
}
_SAMPLING_ARGUMENTS = {
    "temperature": "t temp",
    "temperature=0, which takes the likeliest token": "do_sample greedy",
    "max_tokens": "max_length max_new_tokens max_completion_length max_response_length "
    "max_generation_length",
    "seed=... in the config": "seed",
}
_SHORTEST = {"min_tokens": "min_length min_new_tokens"}
_GENERATE_ARGUMENTS = _SAMPLING_ARGUMENTS | {
    "n": "num_generations num_return_sequences num_samples group_size rollouts samples",
    'grammar=fl.grammar.regex("...")': "regex guided_regex",
    "grammar=fl.grammar.json_schema({...})": "json schema json_schema",
}
_KL_ARGUMENTS = {"coefficient": "beta coef kl_coef weight"}
_RATE = "train.optimizer.learning_rate in the config, or roles.NAME.optimizer for one role"
_PAIRS_OF_A_SUM = "each weight next to its scores: fl.weighted_sum((accuracy, 1.0), (style, 0.2))"
_ARGUMENTS: Mapping[str, Mapping[str, str]] = {
    "Sampling": _SAMPLING_ARGUMENTS | _SHORTEST,
    "generate": _GENERATE_ARGUMENTS | _SHORTEST,
    "interact": _GENERATE_ARGUMENTS | {"environment": "env", "max_turns": "turns"},
    "update": {
        _RATE: "lr learning_rate",
        "train.mini_batches in the config": "epochs mini_batches steps",
        "kl=fl.kl.k3(0.001)": "beta kl_coef kl_coefficient",
        "loss=fl.loss.policy_clip(0.2)": "clip epsilon clip_range",
        "rewards": "score scores reward",
        "advantages": "adv weights",
        "reference": "ref ref_logprobs reference_logprobs",
        "old": "old_logprobs logprobs behaviour",
    },
    "sync": {"every": "interval steps frequency period"},
    "weighted_sum": {_PAIRS_OF_A_SUM: "weight weights coefficients"},
    "difficulty": {
        "low": "min lower at_least above minimum",
        "high": "max upper at_most below maximum",
    },
    "zero_variance": {"tolerance": "eps epsilon threshold tol"},
    "group_relative": {"std": "normalise normalize scale scale_rewards", "eps": "epsilon delta"},
    "gae": {"lam": "lambda_ lamda lmbda lambd gae_lambda", "gamma": "discount discount_factor"},
    "soft_overlong": {
        "max_tokens": "max_length max_response_length max_len",
        "buffer": "cache buffer_len margin",
        "factor": "penalty weight",
    },
    "top": {"k": "n num number count"},
    "random": {"k": "n num number count"},
    **dict.fromkeys(("policy_clip", "gspo", "luspo", "gmpo"), _CLIP_ARGUMENTS),
    "value_clip": {"clip": "epsilon eps clip_range cliprange_value"},
    **dict.fromkeys(("k1", "k2", "k3", "kl_abs", "full"), _KL_ARGUMENTS),
    "dpo": {"beta": "coefficient tau"},
}
"""By function and by the argument or code to suggest, names of arguments in papers and other
libraries."""


def _by_name(table: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    return {
        owner: {name: meant for meant, names in suggested.items() for name in names.split()}
        for owner, suggested in table.items()
    }


_SYNONYMS = _by_name(_NAMES)
_ARGUMENT_SYNONYMS = _by_name(_ARGUMENTS)


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


def check_options(function: Callable[..., Any], options: Collection[str]) -> None:
    """Checks the names in `**options` of a function of `fl.loss` or `fl.kl`.

    Raises:
        TraceError: The function does not have one of the options.
    """
    names = arguments_of(function)
    for name in options:
        if name not in names:
            family = function.__module__.removeprefix("flowrl.specs.").partition(".")[0]
            raise TraceError(
                f"fl.{family}.{function.__name__} does not have the option '{name}'",
                where=caller(),
                expected=", ".join(names),
                hint=argument_hint(function.__name__, name, names),
            )


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
