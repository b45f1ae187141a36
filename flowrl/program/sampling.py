"""Sampling options as a program gives them: checked, and merged into one specification."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from flowrl.graph.ir import Attr
from flowrl.graph.signatures import SAMPLING_OPTIONS
from flowrl.program.operation import refuse_argument
from flowrl.specs import Grammar, Sampling
from flowrl.specs.sampling import MIN_TEMPERATURE

__all__ = ["sampling_attrs"]

_BOUNDS: dict[str, tuple[float, float, str]] = {
    "temperature": (0.0, float("inf"), f"0 (greedy) or a number from {MIN_TEMPERATURE:g} up"),
    "top_p": (1e-12, 1.0, "a number above 0, at most 1 (keeps all)"),
    "top_k": (0, float("inf"), "a whole number from 0 (keeps all) up"),
    "min_p": (0.0, 1.0, "a number from 0 (keeps all) to 1"),
    "repetition_penalty": (1e-12, float("inf"), "a number above 0; 1 changes nothing"),
    "min_tokens": (0, float("inf"), "a whole number from 0 up"),
    "max_tokens": (1, float("inf"), "a whole number from 1 up"),
}


def sampling_attrs(
    name: str,
    n: int | None,
    sampling: Sampling | None,
    grammar: Grammar | None,
    given: Mapping[str, float | int | None],
) -> dict[str, Attr]:
    """The attributes of a `generate` node.

    Args:
        name: Of the operation, for messages.
        n: Samples for each prompt; None leaves it to the config.
        sampling: All options; None leaves them to the config.
        grammar: What a response may look like.
        given: Single options, which come before those of `sampling`; None is not given.

    Raises:
        TraceError: a value of the wrong type or out of its bounds.
    """
    if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 1):
        raise refuse_argument(name, "n", n, "a whole number from 1 up, or None for the config's")
    if sampling is not None and not isinstance(sampling, Sampling):
        raise refuse_argument(name, "sampling", sampling, "fl.Sampling(...), or None")
    if grammar is not None and not isinstance(grammar, Grammar):
        raise refuse_argument(
            name, "grammar", grammar, "a grammar, or None", 'write grammar=fl.grammar.regex("...")'
        )
    for option in SAMPLING_OPTIONS if sampling is not None else ():
        _option(name, option, getattr(sampling, option))
    options = {k: _option(name, k, v) for k, v in given.items() if v is not None}
    attrs: dict[str, Attr] = {"n": n, "sampling": sampling}
    if sampling is not None:
        attrs["sampling"] = replace(sampling, **options)  # type: ignore[arg-type]
    else:
        attrs |= options
    return attrs | ({"grammar": grammar} if grammar is not None else {})


def _option(name: str, option: str, value: object) -> float | int:
    low, high, expected = _BOUNDS[option]
    types = SAMPLING_OPTIONS[option]
    if (
        isinstance(value, bool)
        or not isinstance(value, types)
        or not isinstance(value, int | float)
    ):
        raise refuse_argument(name, option, value, expected)
    too_cold = option == "temperature" and 0 < value < MIN_TEMPERATURE
    if not low <= value <= high or not math.isfinite(value) or too_cold:
        raise refuse_argument(name, option, value, expected)
    return float(value) if float in types else value
