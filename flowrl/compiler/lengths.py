"""The lengths of prompts and responses that a plan is made for.

They decide most of a step's time, and no configuration has to name them: the plan reports what is
assumed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from flowrl.config.load import LoadedConfig
from flowrl.config.schema import PlanConfig
from flowrl.cost.lengths import (
    ConstantLengths,
    EmpiricalLengths,
    Lengths,
    LognormalLengths,
    mean_by_share_cut,
)
from flowrl.errors import ConfigError, DataError
from flowrl.observe.rows import lengths_in
from flowrl.wording import counted, percent

_ASSUMED_SHARE = 0.5
"""The mean length of prompts and responses that the configuration does not give, as a share of the
longest."""

_ASSUMED_SIGMA = 0.7
"""The standard deviation of the logarithm of response lengths where the configuration has none: the
longest of a thousand is then some seven times the mean, before it is cut."""

_MANY_CUT = 0.3
"""The share of responses that are cut at the longest from which on a plan has a note."""

_FEW_CUT = 0.2
"""The share that is cut at the mean that the note suggests."""


def mean_prompt(plan: PlanConfig, longest: int) -> float:
    """Returns the mean tokens of a prompt: the configuration's, or else half of the longest."""
    return plan.mean_prompt_tokens or max(1.0, _ASSUMED_SHARE * longest)


def lengths_of(plan: PlanConfig, longest: int, *, where: str = "plan.lengths") -> Lengths:
    """Returns the distribution of response lengths that a plan is made for.

    Args:
        longest: Tokens that a response has at most.
        where: Names the file of lengths in messages.

    Raises:
        ConfigError, DataError: lengths that cannot be, or that cannot be read.
    """
    if plan.lengths is not None:
        return _read_lengths(plan.lengths, longest, where)
    mean = plan.mean_response_tokens or max(1.0, _ASSUMED_SHARE * longest)
    mean = min(mean, float(longest))  # a node may generate shorter ones than the longest of a run
    sigma = _ASSUMED_SIGMA if plan.sigma is None else plan.sigma
    if not sigma or mean == longest:
        return ConstantLengths(tokens=mean)
    return LognormalLengths(mean=mean, sigma=sigma, maximum=float(longest))


def _read_lengths(path: Path, longest: int, where: str) -> Lengths:
    """Reads lengths from a file or a run's folder; none is above `longest`."""
    if path.is_dir():
        path /= "samples.jsonl"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"lengths cannot be read: {reason}",
            where=where,
            found=str(path),
            expected="the folder of a run, or a file of JSON lines such as its samples.jsonl",
            hint="name one of them, or set plan.mean_response_tokens in its place",
        ) from error
    values = lengths_in(path, text)
    if not any(values):
        raise DataError(
            "there are no lengths",
            where=str(path),
            found="no line with a length above 0",
            expected="one JSON value a line: a number, or an object with num_tokens",
            hint="name samples.jsonl of a run, or set plan.mean_response_tokens in its place",
        )
    return EmpiricalLengths(values=tuple(float(min(max(1, v), longest)) for v in values))


def check_mean(
    loaded: LoadedConfig, key: str, mean: float | None, longest: int, limit: str
) -> None:
    """Checks that a mean length of the configuration is at most the longest.

    Args:
        key: The key of the mean.
        limit: The key that limits the longest.

    Raises:
        ConfigError: it is above it.
    """
    if mean is None or mean <= longest:
        return
    whole = "prompt" in key or longest == loaded.config.train.sampling.max_tokens
    raise ConfigError(
        f"a mean of {counted(mean, 'token')} is longer than the longest",
        where=loaded.where(key),
        found=f"{mean:g}",
        expected=f"at most {longest} "
        f"({limit}{'' if whole else ' of every turn, and the observations'})",
        hint=f"set {key} to at most {longest}, or raise {limit}",
    )


def assumed_lengths(plan: PlanConfig, longest: int) -> list[str]:
    """Returns what is assumed about response lengths, a clause for each assumption."""
    if plan.lengths is not None:
        return []
    assumptions = []
    mean = plan.mean_response_tokens
    if mean is None:
        mean = max(1.0, _ASSUMED_SHARE * longest)
        assumptions.append(
            f"responses of {counted(mean, 'token')} on average, half of the longest; "
            "plan.mean_response_tokens says better, or plan.lengths=RUN/samples.jsonl"
        )
    if plan.sigma is None and mean < longest:
        assumptions.append(
            f"response lengths spread lognormally with sigma {_ASSUMED_SIGMA:g}; "
            "plan.sigma says better"
        )
    return [*assumptions, *_spread_lost(plan, mean, longest)]


def _spread_lost(plan: PlanConfig, mean: float, longest: int) -> Iterator[str]:
    """Yields a note about lengths of which many are cut at the longest."""
    sigma = _ASSUMED_SIGMA if plan.sigma is None else plan.sigma
    if not sigma:
        return
    lengths = lengths_of(plan, longest)
    key = "a mean of " if plan.mean_response_tokens is None else "plan.mean_response_tokens="
    suggested = mean_by_share_cut(_FEW_CUT, sigma=sigma, maximum=float(longest))
    two_digits = max(1, int(float(f"{suggested:.1e}")))
    better = f"a mean of {two_digits:,} would cut {percent(_FEW_CUT)}"
    if not isinstance(lengths, LognormalLengths):
        if plan.sigma is not None and longest > 1:
            yield (
                f"every response has the {longest:,} tokens of the longest, as {key}{mean:g} says, "
                f"so plan.sigma={sigma:g} says nothing; {better}"
            )
    elif lengths.share_cut >= _MANY_CUT:
        yield (
            f"{percent(lengths.share_cut)} of responses are cut at the longest, {longest:,} "
            f"tokens, for {key}{mean:g} with sigma {sigma:g} is a mean of "
            f"{lengths.before_cut:,.0f} before the cut; {better}"
        )
