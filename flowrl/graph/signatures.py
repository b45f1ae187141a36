"""Signatures: the inputs, outputs and attributes of each operation, which the verifier checks.

Data, not code: a new operation is a new row. Conditions between arguments (a KL penalty needs
reference logprobs) are in `flowrl.graph.conditions` and `flowrl.graph.update_conditions`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from flowrl.graph.ir import DType, Field, Level, Op, Unit
from flowrl.specs import (
    KL,
    AdvantageSpec,
    FilterSpec,
    Grammar,
    LossSpec,
    MapSpec,
    PromptsSpec,
    Replay,
    RowCondition,
    Sampling,
    SelectSpec,
)
from flowrl.specs.attributes import NodeCost
from flowrl.specs.cut import CutLeastLikely

__all__ = [
    "ADVANTAGE",
    "CARRIED",
    "COMMON_ATTRS",
    "FORWARD_PASSES",
    "LOGPROBS",
    "OBSERVATION",
    "PART",
    "PREFERRED",
    "PROMPT",
    "RESPONSE_MASK",
    "RETURNS",
    "ROLE_ATTRS",
    "ROLLOUT_LOGPROBS",
    "SAMPLING_OPTIONS",
    "SCORE",
    "SIGNATURES",
    "STATE",
    "TOKENS",
    "TOKEN_ADVANTAGE",
    "TOKEN_REWARD",
    "TURN",
    "VALUES",
    "WEIGHTS",
    "Argument",
    "AttrRule",
    "Signature",
    "advantage_outputs",
    "map_outputs",
    "prompt_fields",
    "score_outputs",
]

PROMPT = Field(name="prompt", dtype=DType.INT64, unit=Unit.PROMPTS)
TOKENS = Field(name="tokens", dtype=DType.INT64, unit=Unit.TOKENS)
RESPONSE_MASK = Field(name="response_mask", dtype=DType.BOOL, unit=Unit.TOKENS)
ROLLOUT_LOGPROBS = Field(name="rollout_logprobs", dtype=DType.FLOAT32, unit=Unit.TOKENS)
SCORE = Field(name="score", dtype=DType.FLOAT32, unit=Unit.SAMPLES)
LOGPROBS = Field(name="logprobs", dtype=DType.FLOAT32, unit=Unit.TOKENS)
ADVANTAGE = Field(name="advantage", dtype=DType.FLOAT32, unit=Unit.SAMPLES)
TOKEN_ADVANTAGE = Field(name="advantage", dtype=DType.FLOAT32, unit=Unit.TOKENS)
VALUES = Field(name="values", dtype=DType.FLOAT32, unit=Unit.TOKENS)
"""A critic's value of the state before each response token."""
RETURNS = Field(name="returns", dtype=DType.FLOAT32, unit=Unit.TOKENS)
"""The targets that a critic learns."""
PART = Field(name="source", dtype=DType.INT64, unit=Unit.SAMPLES)
"""The place of a sample's set among those that were joined, from 0."""
PREFERRED = Field(name="preferred", dtype=DType.BOOL, unit=Unit.SAMPLES)
"""Marks the preferred sample of a pair."""
OBSERVATION = Field(name="observation", dtype=DType.INT64, unit=Unit.TOKENS)
"""The observations of an environment, as tokens."""
TURN = Field(name="turn", dtype=DType.INT64, unit=Unit.TOKENS)
"""The turn that a response token belongs to, from 0; -1 off the responses."""
TOKEN_REWARD = Field(name="token_reward", dtype=DType.FLOAT32, unit=Unit.TOKENS)
"""Reward that is given at a token; a turn's lies on its last response token."""
STATE = Field(name="state", dtype=DType.INT64, unit=Unit.TOKENS)
"""A number of the environment's state before the token's turn: equal numbers, equal states."""
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
        optional_fields: Further fields that it may carry.
        also: Fields, each called as one of `fields`, that may come in its place.
        required: True if an edge must feed it.
        until: The last level that knows it.
        carried: True if its value is of the step before.
        inner: True if only an edge within a region feeds it.
        many: True if there may be several: `input`, `input_2`, `input_3`, ...
        any_fields: True if it takes whatever fields it is given.
    """

    name: str
    fields: tuple[Field, ...] = ()
    optional_fields: tuple[Field, ...] = ()
    also: tuple[Field, ...] = ()
    required: bool = True
    until: Level = Level.PLACED
    carried: bool = False
    inner: bool = False
    many: bool = False
    any_fields: bool = False

    def is_named(self, name: str) -> bool:
        """True if `name` is this argument, or a numbered repetition of it."""
        if name == self.name:
            return True
        number = name.removeprefix(f"{self.name}_")
        return self.many and number != name and number.isdecimal()

    def field(self, name: str) -> Field | None:
        """Returns the field of that name that the argument takes."""
        return next((f for f in self.fields + self.optional_fields if f.name == name), None)

    def takes(self, field: Field) -> bool:
        """True if it takes this very field: name, type and unit."""
        return self.any_fields or field in self.fields + self.optional_fields + self.also


@dataclass(frozen=True, slots=True, kw_only=True)
class AttrRule:
    """An attribute of an operation.

    Attributes:
        types: Types of its value.
        filled: The first level at which it must be there and not null; None lets it be null.
        since: The first level that knows it.
        until: The last level that knows it.
    """

    name: str
    types: tuple[type, ...]
    filled: Level | None = None
    since: Level = Level.TRACED
    until: Level = Level.PLACED


def _placed(name: str, *types: type) -> AttrRule:
    return AttrRule(name=name, types=types, filled=Level.PLACED, since=Level.PLACED)


COMMON_ATTRS: tuple[AttrRule, ...] = (
    AttrRule(name="cost", types=(NodeCost,)),
    _placed("start", str),
    _placed("chunk", int),
)
"""Attributes that every operation may have in addition to its own."""

ROLE_ATTRS: tuple[AttrRule, ...] = (
    _placed("devices", str),
    _placed("process", str),
    _placed("replicas", int),
    _placed("samples", int),
    _placed("samples_per_replica", int),
)
"""Attributes of operations that a role performs; `samples` counts those of a step, over all
replicas, and is 0 where weights travel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """The specification of an operation.

    Attributes:
        has_role: True if a role performs it.
        arguments: What it reads.
        outputs: What it produces, exactly; None where that depends on the data, on what is passed
            on, or on its attributes: `flowrl.graph.verify` says how.
        attrs: The attributes that it takes.
    """

    has_role: bool
    arguments: tuple[Argument, ...] = ()
    outputs: tuple[Field, ...] | None = None
    attrs: tuple[AttrRule, ...] = ()

    def argument(self, name: str) -> Argument | None:
        """Returns the argument of that name."""
        return next((a for a in self.arguments if a.is_named(name)), None)

    @property
    def rules(self) -> tuple[AttrRule, ...]:
        """Returns all attributes: its own, and those that every operation may have."""
        return (*self.attrs, *COMMON_ATTRS, *(ROLE_ATTRS if self.has_role else ()))

    def attr(self, name: str) -> AttrRule | None:
        """Returns the rule of the attribute of that name."""
        return next((a for a in self.rules if a.name == name), None)


FORWARD_PASSES = (Op.LOGPROBS, Op.VALUES, Op.SCORE)
"""Operations that run a role's model on samples; a score may be by rules."""

_SAMPLES = (TOKENS, RESPONSE_MASK)
_EPISODE = (TURN, TOKEN_REWARD, STATE)
_ROLLOUT = Argument(
    name="rollout", fields=_SAMPLES, optional_fields=(ROLLOUT_LOGPROBS, PREFERRED, PART, *_EPISODE)
)
CARRIED: tuple[Argument, ...] = (
    Argument(name="scores", fields=(SCORE,), required=False, many=True),
    Argument(name="logprobs", fields=(LOGPROBS,), required=False, many=True),
    Argument(
        name="advantages", fields=(ADVANTAGE,), also=(TOKEN_ADVANTAGE,), required=False, many=True
    ),
)
"""Values of samples that go with them where `fl.where` and `fl.concat` make another set."""
_RECEIVERS = Argument(name="rollout", fields=(RESPONSE_MASK,))
_WEIGHTS_OF_LAST_STEP = Argument(name="weights", fields=(WEIGHTS,), required=False, carried=True)
_WEIGHTS_OF_UPDATE = Argument(name="weights", fields=(WEIGHTS,), required=False)
"""The weights that a forward pass runs with: those after an update of the same step. Without it,
they are those that the step began with."""

SIGNATURES: Mapping[Op, Signature] = MappingProxyType(
    {
        Op.SOURCE: Signature(
            has_role=False,
            # The rows of these prompts in place of rows that are taken for itself.
            arguments=(Argument(name="prompts", fields=(PROMPT,), required=False),),
            attrs=(AttrRule(name="data", types=(str,), filled=Level.TRACED),),
        ),
        Op.GENERATE: Signature(
            has_role=True,
            arguments=(
                Argument(name="prompts", fields=(PROMPT,), required=False),
                Argument(name="observation", fields=(OBSERVATION,), required=False, inner=True),
                _WEIGHTS_OF_LAST_STEP,
            ),
            outputs=(TOKENS, RESPONSE_MASK, ROLLOUT_LOGPROBS),
            attrs=(
                AttrRule(name="n", types=(int,), filled=Level.LOWERED),
                AttrRule(name="sampling", types=(Sampling,), filled=Level.LOWERED),
                AttrRule(name="grammar", types=(Grammar,)),
                *(
                    AttrRule(name=name, types=types, until=Level.TRACED)
                    for name, types in SAMPLING_OPTIONS.items()
                ),
            ),
        ),
        Op.INTERACT: Signature(
            has_role=True,
            arguments=(
                Argument(name="prompts", fields=(PROMPT,)),
                Argument(
                    name="turns",
                    fields=(TOKENS, RESPONSE_MASK, ROLLOUT_LOGPROBS),
                    inner=True,
                    many=True,
                ),
            ),
            outputs=(OBSERVATION, *_SAMPLES, ROLLOUT_LOGPROBS, *_EPISODE, SCORE),
            attrs=(
                AttrRule(name="max_turns", types=(int,), filled=Level.TRACED),
                AttrRule(name="max_observation_tokens", types=(int,), filled=Level.TRACED),
            ),
        ),
        Op.SCORE: Signature(
            has_role=True,
            arguments=(Argument(name="rollout", fields=_SAMPLES), _WEIGHTS_OF_UPDATE),
            attrs=(
                AttrRule(name="by", types=(str,)),
                AttrRule(name="per", types=(str,)),
                AttrRule(name="separator", types=(str,)),
            ),
        ),
        Op.LOGPROBS: Signature(
            has_role=True,
            arguments=(Argument(name="rollout", fields=_SAMPLES), _WEIGHTS_OF_UPDATE),
            outputs=(LOGPROBS,),
        ),
        Op.VALUES: Signature(
            has_role=True,
            arguments=(Argument(name="rollout", fields=_SAMPLES), _WEIGHTS_OF_UPDATE),
            outputs=(VALUES,),
        ),
        Op.ADVANTAGE: Signature(
            has_role=False,
            arguments=(
                Argument(name="scores", fields=(SCORE,), required=False, many=True),
                Argument(
                    name="rollout",
                    fields=(RESPONSE_MASK,),
                    optional_fields=(ROLLOUT_LOGPROBS, PART, *_EPISODE),
                    required=False,
                ),
                Argument(name="reference", fields=(LOGPROBS,), required=False),
                Argument(name="values", fields=(VALUES,), required=False),
                Argument(name="baseline", fields=(SCORE,), required=False),
                Argument(name="token_rewards", fields=(TOKEN_REWARD,), required=False),
                Argument(name="policy", fields=(LOGPROBS,), required=False),
            ),
            attrs=(AttrRule(name="spec", types=(AdvantageSpec,), filled=Level.TRACED),),
        ),
        Op.FILTER: Signature(
            has_role=False,
            arguments=(_ROLLOUT, Argument(name="scores", fields=(SCORE,))),
            attrs=(AttrRule(name="spec", types=(FilterSpec,), filled=Level.TRACED),),
        ),
        Op.SELECT: Signature(
            has_role=False,
            arguments=(_ROLLOUT, Argument(name="scores", fields=(SCORE,))),
            attrs=(AttrRule(name="spec", types=(SelectSpec,), filled=Level.TRACED),),
        ),
        Op.REPLAY: Signature(
            has_role=False,
            arguments=(_ROLLOUT, Argument(name="scores", fields=(SCORE,))),
            attrs=(AttrRule(name="spec", types=(Replay,), filled=Level.TRACED),),
        ),
        Op.WHERE: Signature(
            has_role=False,
            arguments=(
                Argument(name="prompts", fields=(PROMPT,), required=False),
                replace(_ROLLOUT, required=False),
                *CARRIED,
            ),
            attrs=(AttrRule(name="spec", types=(RowCondition,), filled=Level.TRACED),),
        ),
        Op.CONCAT: Signature(
            has_role=False,
            arguments=(
                Argument(
                    name="rollout",
                    fields=_SAMPLES,
                    optional_fields=(ROLLOUT_LOGPROBS, *_EPISODE),
                    many=True,
                ),
                *CARRIED,
            ),
            # The logprob of tokens that no policy sampled, where a loss is to read one.
            attrs=(AttrRule(name="missing_logprob", types=(float, int)),),
        ),
        Op.PAIR: Signature(
            has_role=False,
            arguments=tuple(
                Argument(name=name, fields=_SAMPLES, optional_fields=(ROLLOUT_LOGPROBS,))
                for name in ("preferred", "other")
            ),
        ),
        Op.MAP: Signature(
            has_role=False,
            arguments=(Argument(name="input", many=True, any_fields=True),),
            attrs=(AttrRule(name="spec", types=(MapSpec,), filled=Level.TRACED),),
        ),
        Op.PROMPTS_OF: Signature(
            has_role=False,
            arguments=(
                Argument(name="rollout", fields=_SAMPLES, optional_fields=(ROLLOUT_LOGPROBS,)),
            ),
            outputs=(PROMPT,),
            attrs=(AttrRule(name="spec", types=(PromptsSpec,), filled=Level.TRACED),),
        ),
        # Their first argument says for which samples there is a value; the second has the values.
        Op.PARENT: Signature(
            has_role=False,
            arguments=(_RECEIVERS, Argument(name="input", any_fields=True)),
        ),
        Op.MEAN_OF_CHILDREN: Signature(
            has_role=False,
            arguments=(_RECEIVERS, Argument(name="input", any_fields=True)),
        ),
        Op.UPDATE: Signature(
            has_role=True,
            arguments=(
                Argument(
                    name="rollout",
                    fields=_SAMPLES,
                    optional_fields=(ROLLOUT_LOGPROBS, PREFERRED, PART),
                ),
                Argument(name="rewards", fields=(SCORE,), required=False, until=Level.TRACED),
                Argument(
                    name="advantages",
                    fields=(ADVANTAGE,),
                    also=(TOKEN_ADVANTAGE,),
                    required=False,
                ),
                Argument(name="reference", fields=(LOGPROBS,), required=False),
                Argument(name="old", fields=(LOGPROBS,), required=False),
                Argument(name="values", fields=(VALUES,), required=False),
                Argument(name="returns", fields=(RETURNS,), required=False),
                Argument(name="extra", required=False, many=True, any_fields=True),
            ),
            outputs=(WEIGHTS,),
            attrs=(
                AttrRule(name="loss", types=(LossSpec,), filled=Level.LOWERED),
                AttrRule(name="kl", types=(KL,)),
                AttrRule(name="behaviour_logprobs", types=(str,)),
                AttrRule(name="old_logprobs", types=(str,)),
                AttrRule(name="every", types=(int,)),
                # Of a term of a sum: the sum's name, and the factor of its loss and penalty.
                AttrRule(name="sum", types=(str,)),
                AttrRule(name="weight", types=(float,)),
                _placed("micro_batch", int),
                # Of packed micro-batches; others hold so many samples.
                AttrRule(name="micro_tokens", types=(int,), since=Level.PLACED),
            ),
        ),
        Op.SYNC: Signature(
            has_role=True,
            arguments=(Argument(name="weights", fields=(WEIGHTS,)),),
            outputs=(WEIGHTS,),
            attrs=(
                AttrRule(name="in_place", types=(bool,), filled=Level.LOWERED),
                AttrRule(name="every", types=(int,)),
                AttrRule(name="decay", types=(float,)),
                AttrRule(name="reset_optimizer", types=(bool,)),
                _placed("transport", str),
            ),
        ),
        Op.LOG: Signature(
            has_role=False,
            arguments=(Argument(name="value", any_fields=True),),
            outputs=(),
            attrs=(AttrRule(name="name", types=(str,), filled=Level.TRACED),),
        ),
    }
)


def advantage_outputs(spec: AdvantageSpec) -> tuple[Field, ...]:
    """Returns the outputs of an advantage: a value per sample or token, and a critic's targets."""
    advantage = TOKEN_ADVANTAGE if spec.per_token else ADVANTAGE
    return (advantage, RETURNS) if spec.gives_returns else (advantage,)


def score_outputs(per: object) -> tuple[Field, ...]:
    """Returns the output of a score: one number a sample, or rewards of `per` token or step."""
    return (SCORE,) if per is None else (TOKEN_REWARD,)


def map_outputs(spec: MapSpec) -> tuple[Field, ...]:
    """Returns the outputs of a map: the fields that its specification declares."""
    return tuple(
        Field(name=name, dtype=DType(dtype), unit=Unit(unit)) for name, dtype, unit in spec.gives
    )


def prompt_fields(spec: PromptsSpec) -> tuple[Field, ...]:
    """Returns the fields of a rollout of which prompts are made."""
    return (*_SAMPLES, ROLLOUT_LOGPROBS) if isinstance(spec, CutLeastLikely) else _SAMPLES
