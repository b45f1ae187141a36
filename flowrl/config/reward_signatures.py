"""The forms of reward functions: flowrl's, verl's and TRL's, recognised by their parameters.

    f(prompt, response, answer, row)                                 flowrl
    f(data_source, solution_str, ground_truth, extra_info)           verl
    f(prompts, completions, completion_ids, **columns)               TRL

The first two may have the plural of each name instead (`f(responses, answers)`): they get lists
and return a list, as TRL's does. A function has any of its form's parameters, and others with a
default; TRL's also has columns of the data by name. It may be async.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The parameters of a user's function.

    Attributes:
        required: Parameters without a default.
        optional: Parameters with a default.
        takes_all: True if the function has `**kwargs`.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...]
    takes_all: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all parameters."""
        return (*self.required, *self.optional)

    def asks_for(self, name: str) -> bool:
        """True if the function receives the value of that name."""
        return self.takes_all or name in self.names


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """A form of reward functions.

    Attributes:
        library: The library whose form it is.
        offers: The parameters that a function of this form may have.
        answer: The parameter that receives the reference answer; empty for TRL's form.
        is_batched: True if parameters are lists, one element for each sample.
        takes_columns: True if other parameters are columns of the data.
    """

    library: str
    offers: tuple[str, ...]
    answer: str
    is_batched: bool = False
    takes_columns: bool = False

    def __str__(self) -> str:
        columns = ", **columns" if self.takes_columns else ""
        return f"f({', '.join(self.offers)}{columns}) as in {self.library}"


def _with_plural(library: str, offers: tuple[str, ...], answer: str) -> tuple[Signature, Signature]:
    plural = {name: f"{name}s" for name in offers}
    return (
        Signature(library=library, offers=offers, answer=answer),
        Signature(
            library=library,
            offers=tuple(plural.values()),
            answer=plural[answer],
            is_batched=True,
        ),
    )


_OURS, _OURS_BATCHED = _with_plural("flowrl", ("prompt", "response", "answer", "row"), "answer")
_VERL, _VERL_BATCHED = _with_plural(
    "verl", ("data_source", "solution_str", "ground_truth", "extra_info"), "ground_truth"
)
_TRL = Signature(
    library="TRL",
    offers=("prompts", "completions", "completion_ids"),
    answer="",
    is_batched=True,
    takes_columns=True,
)

SIGNATURES = (_OURS, _VERL, _TRL, _OURS_BATCHED, _VERL_BATCHED)
"""All forms; where several fit a function equally well, the first one is meant."""


def signature_of(parameters: Parameters) -> Signature:
    """Returns the form that a function is meant to have: the one with most of its parameters."""
    if {"completions", "completion_ids"} & set(parameters.names):
        return _TRL
    return max(SIGNATURES, key=lambda form: len(set(form.offers) & set(parameters.names)))


def missing_parameter(parameters: Parameters, signature: Signature) -> str | None:
    """Returns the first parameter that a function needs and its form does not have."""
    if signature.takes_columns:
        return None
    return next((name for name in parameters.required if name not in signature.offers), None)


def shown_signatures(signatures: Sequence[Signature] = (_OURS, _VERL, _TRL)) -> str:
    """Returns the forms as messages show them."""
    *most, last = map(str, signatures)
    return f"{', '.join(most)}, or {last}"
