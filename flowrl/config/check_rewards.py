"""Checks of reward terms and of the metrics that they measure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from flowrl.config.check_files import function_exists
from flowrl.config.load import LoadedConfig
from flowrl.config.nearest import listing, suggestion
from flowrl.config.problems import Problems
from flowrl.config.schema import (
    CosineLengthTerm,
    EvalConfig,
    FormatMatch,
    PythonReward,
    RewardTerm,
    StopProperlyTerm,
)
from flowrl.config.user_functions import reward_problems
from flowrl.errors import ConfigError

__all__ = [
    "calls_end_before_a_stall",
    "metrics_are_measured",
    "stops_are_measured",
    "terms_are_whole",
]

_OTHER_METRICS = {
    "length": "mean number of response tokens",
    "truncated": "share of responses that met max_tokens",
}
"""What an evaluation measures beside the reward's terms and their weighted sum, `score`."""


def terms_are_whole(loaded: LoadedConfig) -> Problems:
    """Of `rewards.terms` and of roles with terms of their own."""
    terms = loaded.config.rewards.terms
    yield from _terms(terms, "rewards.terms", loaded)
    yield from _metric_names(terms, loaded)
    for name, role in loaded.config.roles.items():
        if role.terms is None:
            continue
        key = f"roles.{name}.terms"
        if not role.terms:
            yield ConfigError(
                f"{name} has a list of reward terms with nothing in it",
                where=loaded.where(key),
                hint=f"add a term, or leave {key} out to score with rewards.terms",
            )
        yield from _terms(role.terms, key, loaded)


def _terms(terms: Sequence[RewardTerm], terms_key: str, loaded: LoadedConfig) -> Problems:
    names: list[str] = []
    transformed: dict[str, str] = {}
    for index, term in enumerate(terms):
        key = f"{terms_key}.{index}"
        if term.name in names:
            yield ConfigError(
                f"two reward terms are called {term.name!r}",
                where=loaded.where(key),
                hint="give each its own `name`",
            )
        match term:
            case PythonReward():
                where = loaded.where(f"{key}.function")
                problems = list(
                    function_exists(
                        term.function, "function", where, example="rewards/mine.py:score"
                    )
                )
                yield from problems or reward_problems(term.function, where)
            case FormatMatch():
                yield from _pattern(term, loaded.where(f"{key}.pattern"))
            case StopProperlyTerm() | CosineLengthTerm():
                others = [other.name for other in terms]
                yield from _transformation(
                    term, names, others, transformed, loaded.where(f"{key}.of")
                )
            case _:
                pass
        names.append(term.name)


def _transformation(
    term: StopProperlyTerm | CosineLengthTerm,
    before: Sequence[str],
    terms: Sequence[str],
    transformed: dict[str, str],
    where: str,
) -> Problems:
    """Whether `of` names a term that stands before and that no other one transforms.

    Args:
        before: Names of the terms before this one.
        terms: Names of all.
        transformed: What transforms each term so far; this one is added.
    """
    if term.of not in before:
        known = term.of in terms
        yield ConfigError(
            f"{term.name} is of {term.of!r}, which "
            + ("does not stand before it" if known else "is no reward term"),
            where=where,
            expected=f"one of {listing(before)}" if before else "a term before it",
            hint=None if known else suggestion(term.of, before),
        )
    elif (first := transformed.setdefault(term.of, term.name)) != term.name:
        yield ConfigError(
            f"{first} and {term.name} both take the place of {term.of}",
            where=where,
            hint=f"let the second transform the first: of: {first}",
        )


def _metric_names(terms: Sequence[RewardTerm], loaded: LoadedConfig) -> Problems:
    for index, term in enumerate(terms):
        meaning = _OTHER_METRICS.get(term.name)
        if meaning is not None or (term.name == "score" and not _is_the_score(terms)):
            yield ConfigError(
                f"a reward term is called {term.name!r}, which names another metric of evaluations",
                where=loaded.where(f"rewards.terms.{index}.name"),
                found=f"{term.name}: {meaning or 'the weighted sum of all terms'}",
                hint="give the term a `name` of its own",
            )


def _is_the_score(terms: Sequence[RewardTerm]) -> bool:
    """Whether the weighted sum of the terms is the one term itself."""
    return len(terms) == 1 and getattr(terms[0], "weight", None) == 1


def _pattern(term: FormatMatch, where: str) -> Problems:
    try:
        re.compile(term.pattern)
    except re.error as error:
        yield ConfigError(
            f"pattern is no regular expression: {error}",
            where=where,
            found=repr(term.pattern),
            hint="mend it, or put a backslash before characters that stand for themselves",
        )


def calls_end_before_a_stall(loaded: LoadedConfig) -> Problems:
    """A reward or an environment that uses its time must not look like a run that hangs."""
    config, stall_s = loaded.config, loaded.config.runtime.stall_timeout_s
    limits = [("a reward", "rewards.timeout_s", config.rewards.timeout_s)]
    limits += [
        ("an environment", f"roles.{name}.timeout_s", role.timeout_s)
        for name, role in config.roles.items()
        if role.environment is not None
    ]
    for who, limit_key, limit_s in limits:
        if limit_s < stall_s:
            continue
        key = limit_key if loaded.is_set(limit_key) else "runtime.stall_timeout_s"
        yield ConfigError(
            f"{who} may take {limit_s:g} s ({limit_key}), but the run stops when nothing "
            f"moves for {stall_s:g} s (runtime.stall_timeout_s)",
            where=loaded.where(key),
            expected="a longer runtime.stall_timeout_s",
            hint=f"set runtime.stall_timeout_s={2 * limit_s:g}",
        )


def metrics_are_measured(loaded: LoadedConfig) -> Problems:
    """Metrics that evaluations show and that stages stop at."""
    config = loaded.config
    terms = config.rewards.terms
    # Without terms the metric comes from the scorer that plays the role, which is not known here.
    if not terms:
        return
    measured = sorted({term.name for term in terms} | {"score"})
    asked = []
    # The default is a name that runs without such a term need not know; a resolved config writes
    # it out, so that being written says nothing. Where it stops a stage it has to be measured.
    if config.eval.metric != EvalConfig().metric:
        asked.append(("eval.metric", config.eval.metric))
    for name, prefix in loaded.stage_prefixes():
        stop = config.stage_config(name).stop
        if stop is not None:
            asked.append((f"{prefix}stop.metric", stop.metric))
    for key, metric in asked:
        if metric not in measured:
            yield ConfigError(
                f"{key} is {metric!r}, which no reward term measures",
                where=loaded.where(key),
                expected=f"one of {listing(measured)}",
                hint=suggestion(metric, measured) or f"set {key}={measured[0]}",
            )


def stops_are_measured(loaded: LoadedConfig) -> Problems:
    """Stages that stop at a metric need held-out data and something that scores it."""
    config = loaded.config
    missing = [
        key
        for key, value in (("data.eval", config.data.eval), ("rewards.terms", config.rewards.terms))
        if not value
    ]
    for name, prefix in loaded.stage_prefixes():
        if missing and config.stage_config(name).stop is not None:
            yield ConfigError(
                f"stage {name!r} is to stop at a held-out metric, which nothing measures",
                where=loaded.where(f"{prefix}stop"),
                found=f"no {' and no '.join(missing)}",
                hint=f"set {missing[0]}, or {prefix}stop=null",
            )
