"""What each operation reads, produces and may be told: the specification that the verifier holds.

Data, not code: a new operation is a new row. Conditions between arguments (a KL penalty needs
reference logprobs) stand in `flowrl.graph.verify`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from flowrl.graph.types import DType, Field, Level, Op, Unit
from flowrl.specs import KL, AdvantageSpec, FilterSpec, LossSpec, Sampling
from flowrl.specs.cost import NodeCost

__all__ = [
    "ADVANTAGE",
    "COMMON_ATTRS",
    "LOGPROBS",
    "PROMPT",
    "RESPONSE_MASK",
    "ROLLOUT_LOGPROBS",
    "SAMPLING_OPTIONS",
    "SCORE",
    "SIGNATURES",
    "TOKENS",
    "TOKEN_ADVANTAGE",
    "WEIGHTS",
    "Argument",
    "AttrRule",
    "Signature",
    "advantage_outputs",
]

PROMPT = Field(name="prompt", dtype=DType.INT64, unit=Unit.PROMPTS)
TOKENS = Field(name="tokens", dtype=DType.INT64, unit=Unit.TOKENS)
RESPONSE_MASK = Field(name="response_mask", dtype=DType.BOOL, unit=Unit.TOKENS)
ROLLOUT_LOGPROBS = Field(name="rollout_logprobs", dtype=DType.FLOAT32, unit=Unit.TOKENS)
SCORE = Field(name="score", dtype=DType.FLOAT32, unit=Unit.SAMPLES)
LOGPROBS = Field(name="logprobs", dtype=DType.FLOAT32, unit=Unit.TOKENS)
ADVANTAGE = Field(name="advantage", dtype=DType.FLOAT32, unit=Unit.SAMPLES)
TOKEN_ADVANTAGE = Field(name="advantage", dtype=DType.FLOAT32, unit=Unit.TOKENS)
WEIGHTS = Field(name="weights", dtype=DType.MODEL, unit=Unit.ROLES)

SAMPLING_OPTIONS: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        "temperature": (float, int),
        "top_p": (float, int),
        "top_k": (int,),
        "min_p": (float, int),
        "repetition_penalty": (float, int),
        "min_tokens": (int,),
        "max_tokens": (int,),
    }
)
"""Single sampling options that a program may give; lowering merges them into `sampling`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """An argument of an operation.

    Attributes:
        fields: What the edge that feeds it must carry.
        optional_fields: What it may carry beside.
        also: Fields, each called as one of `fields`, that may come in its place.
        required: Whether an edge must feed it.
        until: The last level that knows it.
        carried: Whether its value is of the step before.
    """

    name: str
    fields: tuple[Field, ...]
    optional_fields: tuple[Field, ...] = ()
    also: tuple[Field, ...] = ()
    required: bool = True
    until: Level = Level.PLACED
    carried: bool = False

    def field(self, name: str) -> Field | None:
        """The field of that name that the argument takes."""
        return next((f for f in self.fields + self.optional_fields if f.name == name), None)

    def takes(self, field: Field) -> bool:
        """Whether it takes this very field: name, type and unit."""
        return field in self.fields + self.optional_fields + self.also


@dataclass(frozen=True, slots=True, kw_only=True)
class AttrRule:
    """An attribute of an operation.

    Attributes:
        types: Types of its value.
        filled: The first level at which it must be there and not null; None lets it be null.
        until: The last level that knows it.
    """

    name: str
    types: tuple[type, ...]
    filled: Level | None = None
    until: Level = Level.PLACED


COMMON_ATTRS: tuple[AttrRule, ...] = (AttrRule(name="cost", types=(NodeCost,)),)
"""Attributes that every operation may have beside its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """The specification of an operation.

    Attributes:
        has_role: Whether a role performs it.
        arguments: What it reads.
        outputs: What it produces, exactly; None for sources, filters and advantages, which the
            verifier compares with what they hold, pass on, or are told to compute.
        attrs: What it may be told.
    """

    has_role: bool
    arguments: tuple[Argument, ...] = ()
    outputs: tuple[Field, ...] | None = None
    attrs: tuple[AttrRule, ...] = ()

    def argument(self, name: str) -> Argument | None:
        """The argument of that name."""
        return next((a for a in self.arguments if a.name == name), None)

    def attr(self, name: str) -> AttrRule | None:
        """The rule of the attribute of that name."""
        return next((a for a in (*self.attrs, *COMMON_ATTRS) if a.name == name), None)


_SAMPLES = (TOKENS, RESPONSE_MASK)
_ROLLOUT = Argument(name="rollout", fields=_SAMPLES, optional_fields=(ROLLOUT_LOGPROBS,))

SIGNATURES: Mapping[Op, Signature] = MappingProxyType(
    {
        Op.SOURCE: Signature(
            has_role=False,
            attrs=(AttrRule(name="data", types=(str,), filled=Level.TRACED),),
        ),
        Op.GENERATE: Signature(
            has_role=True,
            arguments=(
                Argument(name="prompts", fields=(PROMPT,)),
                Argument(
                    name="weights",
                    fields=(WEIGHTS,),
                    required=False,
                    carried=True,
                ),
            ),
            outputs=(TOKENS, RESPONSE_MASK, ROLLOUT_LOGPROBS),
            attrs=(
                AttrRule(name="n", types=(int,), filled=Level.LOWERED),
                AttrRule(name="sampling", types=(Sampling,), filled=Level.LOWERED),
                *(
                    AttrRule(name=name, types=types, until=Level.TRACED)
                    for name, types in SAMPLING_OPTIONS.items()
                ),
            ),
        ),
        Op.SCORE: Signature(
            has_role=True,
            arguments=(Argument(name="rollout", fields=_SAMPLES),),
            outputs=(SCORE,),
        ),
        Op.LOGPROBS: Signature(
            has_role=True,
            arguments=(Argument(name="rollout", fields=_SAMPLES),),
            outputs=(LOGPROBS,),
        ),
        Op.ADVANTAGE: Signature(
            has_role=False,
            arguments=(
                Argument(name="scores", fields=(SCORE,)),
                Argument(
                    name="rollout",
                    fields=(RESPONSE_MASK,),
                    optional_fields=(ROLLOUT_LOGPROBS,),
                    required=False,
                ),
                Argument(name="reference", fields=(LOGPROBS,), required=False),
            ),
            attrs=(AttrRule(name="spec", types=(AdvantageSpec,), filled=Level.TRACED),),
        ),
        Op.FILTER: Signature(
            has_role=False,
            arguments=(_ROLLOUT, Argument(name="scores", fields=(SCORE,))),
            attrs=(AttrRule(name="spec", types=(FilterSpec,), filled=Level.TRACED),),
        ),
        Op.UPDATE: Signature(
            has_role=True,
            arguments=(
                _ROLLOUT,
                Argument(name="rewards", fields=(SCORE,), required=False, until=Level.TRACED),
                Argument(
                    name="advantages",
                    fields=(ADVANTAGE,),
                    also=(TOKEN_ADVANTAGE,),
                    required=False,
                ),
                Argument(name="reference", fields=(LOGPROBS,), required=False),
            ),
            outputs=(WEIGHTS,),
            attrs=(
                AttrRule(name="loss", types=(LossSpec,), filled=Level.LOWERED),
                AttrRule(name="kl", types=(KL,)),
                AttrRule(name="behaviour_logprobs", types=(str,)),
            ),
        ),
        Op.SYNC: Signature(
            has_role=True,
            arguments=(Argument(name="weights", fields=(WEIGHTS,)),),
            outputs=(WEIGHTS,),
            attrs=(AttrRule(name="in_place", types=(bool,), filled=Level.LOWERED),),
        ),
    }
)


def advantage_outputs(spec: AdvantageSpec) -> tuple[Field, ...]:
    """What an advantage of that specification produces: one number a sample, or one a token."""
    return (TOKEN_ADVANTAGE if spec.per_token else ADVANTAGE,)
