"""Signatures: the inputs, outputs and attributes of each operation, which the verifier checks.

Data, not code: a new operation is a new row. Conditions between arguments (a KL penalty needs
reference logprobs) are in `flowrl.graph.conditions`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

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
    Spec,
)
from flowrl.specs.attributes import NodeCost
from flowrl.specs.cut import CutLeastLikely


def _field(name: str, dtype: DType, unit: Unit) -> Field:
    return Field(name=name, dtype=dtype, unit=unit)


PROMPT = _field("prompt", DType.INT64, Unit.PROMPTS)
TOKENS = _field("tokens", DType.INT64, Unit.TOKENS)
RESPONSE_MASK = _field("response_mask", DType.BOOL, Unit.TOKENS)
ROLLOUT_LOGPROBS = _field("rollout_logprobs", DType.FLOAT32, Unit.TOKENS)
SCORE = _field("score", DType.FLOAT32, Unit.SAMPLES)
LOGPROBS = _field("logprobs", DType.FLOAT32, Unit.TOKENS)
ADVANTAGE = _field("advantage", DType.FLOAT32, Unit.SAMPLES)
TOKEN_ADVANTAGE = _field("advantage", DType.FLOAT32, Unit.TOKENS)
VALUES = _field("values", DType.FLOAT32, Unit.TOKENS)
"""A critic's value of the state before each response token."""
RETURNS = _field("returns", DType.FLOAT32, Unit.TOKENS)
"""The targets that a critic learns."""
PART = _field("source", DType.INT64, Unit.SAMPLES)
"""The place of a sample's set among those that were joined, from 0."""
PREFERRED = _field("preferred", DType.BOOL, Unit.SAMPLES)
"""Marks the preferred sample of a pair."""
OBSERVATION = _field("observation", DType.INT64, Unit.TOKENS)
"""The observations of an environment, as tokens."""
TURN = _field("turn", DType.INT64, Unit.TOKENS)
"""The turn that a response token belongs to, from 0; -1 off the responses."""
TOKEN_REWARD = _field("token_reward", DType.FLOAT32, Unit.TOKENS)
"""Reward that is given at a token; a turn's lies on its last response token."""
STATE = _field("state", DType.INT64, Unit.TOKENS)
"""A number of the environment's state before the token's turn: equal numbers, equal states."""
WEIGHTS = _field("weights", DType.MODEL, Unit.ROLES)

SAMPLING_OPTIONS: Mapping[str, tuple[type, ...]] = {
    option.name: (float, int) if isinstance(option.default, float) else (type(option.default),)
    for option in fields(Sampling)
    if option.name != "logprobs"
}
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


def _attr(
    name: str,
    *types: type,
    filled: Level | None = None,
    since: Level = Level.TRACED,
    until: Level = Level.PLACED,
) -> AttrRule:
    return AttrRule(name=name, types=types, filled=filled, since=since, until=until)


def _placed(name: str, *types: type) -> AttrRule:
    return _attr(name, *types, filled=Level.PLACED, since=Level.PLACED)


def _spec(kind: type[Spec]) -> AttrRule:
    return _attr("spec", kind, filled=Level.TRACED)


COMMON_ATTRS: tuple[AttrRule, ...] = (
    _attr("cost", NodeCost),
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

    has_role: bool = False
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


def _takes(name: str, *fields: Field, **more: Any) -> Argument:
    return Argument(name=name, fields=fields, **more)


def _may_take(name: str, *fields: Field, **more: Any) -> Argument:
    return Argument(name=name, fields=fields, required=False, **more)


_SAMPLES = (TOKENS, RESPONSE_MASK)
_EPISODE = (TURN, TOKEN_REWARD, STATE)
_ROLLOUT = _takes(
    "rollout", *_SAMPLES, optional_fields=(ROLLOUT_LOGPROBS, PREFERRED, PART, *_EPISODE)
)
_ADVANTAGES = _may_take("advantages", ADVANTAGE, also=(TOKEN_ADVANTAGE,))
CARRIED: tuple[Argument, ...] = (
    _may_take("scores", SCORE, many=True),
    _may_take("logprobs", LOGPROBS, many=True),
    replace(_ADVANTAGES, many=True),
)
"""Values of samples that go with them where `fl.where` and `fl.concat` make another set."""
_OF_RECEIVERS = (_takes("rollout", RESPONSE_MASK), _takes("input", any_fields=True))
"""The samples for which there is a value, and the values."""
_OF_MODEL = (_takes("rollout", *_SAMPLES), _may_take("weights", WEIGHTS))
"""The arguments of a forward pass. The weights are those after an update of the same step; without
them, it runs with those that the step began with."""

SIGNATURES: Mapping[Op, Signature] = MappingProxyType(
    {
        Op.SOURCE: Signature(
            # The rows of these prompts in place of rows that are taken for itself.
            arguments=(_may_take("prompts", PROMPT),),
            attrs=(_attr("data", str, filled=Level.TRACED),),
        ),
        Op.GENERATE: Signature(
            has_role=True,
            arguments=(
                _may_take("prompts", PROMPT),
                _may_take("observation", OBSERVATION, inner=True),
                _may_take("weights", WEIGHTS, carried=True),
            ),
            outputs=(*_SAMPLES, ROLLOUT_LOGPROBS),
            attrs=(
                _attr("n", int, filled=Level.LOWERED),
                _attr("sampling", Sampling, filled=Level.LOWERED),
                _attr("grammar", Grammar),
                *(_attr(name, *t, until=Level.TRACED) for name, t in SAMPLING_OPTIONS.items()),
            ),
        ),
        Op.INTERACT: Signature(
            has_role=True,
            arguments=(
                _takes("prompts", PROMPT),
                _takes("turns", *_SAMPLES, ROLLOUT_LOGPROBS, inner=True, many=True),
            ),
            outputs=(OBSERVATION, *_SAMPLES, ROLLOUT_LOGPROBS, *_EPISODE, SCORE),
            attrs=(
                _attr("max_turns", int, filled=Level.TRACED),
                _attr("max_observation_tokens", int, filled=Level.TRACED),
            ),
        ),
        Op.SCORE: Signature(
            has_role=True,
            arguments=_OF_MODEL,
            attrs=(_attr("by", str), _attr("per", str), _attr("separator", str)),
        ),
        Op.LOGPROBS: Signature(has_role=True, arguments=_OF_MODEL, outputs=(LOGPROBS,)),
        Op.VALUES: Signature(has_role=True, arguments=_OF_MODEL, outputs=(VALUES,)),
        Op.ADVANTAGE: Signature(
            arguments=(
                _may_take("scores", SCORE, many=True),
                _may_take(
                    "rollout", RESPONSE_MASK, optional_fields=(ROLLOUT_LOGPROBS, PART, *_EPISODE)
                ),
                _may_take("reference", LOGPROBS),
                _may_take("values", VALUES),
                _may_take("baseline", SCORE),
                _may_take("token_rewards", TOKEN_REWARD),
                _may_take("policy", LOGPROBS),
            ),
            attrs=(_spec(AdvantageSpec),),
        ),
        **{
            op: Signature(arguments=(_ROLLOUT, _takes("scores", SCORE)), attrs=(_spec(kind),))
            for op, kind in (
                (Op.FILTER, FilterSpec),
                (Op.SELECT, SelectSpec),
                (Op.REPLAY, Replay),
            )
        },
        Op.WHERE: Signature(
            arguments=(_may_take("prompts", PROMPT), replace(_ROLLOUT, required=False), *CARRIED),
            attrs=(_spec(RowCondition),),
        ),
        Op.CONCAT: Signature(
            arguments=(
                _takes(
                    "rollout", *_SAMPLES, optional_fields=(ROLLOUT_LOGPROBS, *_EPISODE), many=True
                ),
                *CARRIED,
            ),
            # The logprob of tokens that no policy sampled, where a loss is to read one.
            attrs=(_attr("missing_logprob", float, int),),
        ),
        Op.PAIR: Signature(
            arguments=(
                _takes("preferred", *_SAMPLES, optional_fields=(ROLLOUT_LOGPROBS,)),
                _takes("other", *_SAMPLES, optional_fields=(ROLLOUT_LOGPROBS,)),
            ),
        ),
        Op.MAP: Signature(
            arguments=(_takes("input", many=True, any_fields=True),), attrs=(_spec(MapSpec),)
        ),
        Op.PROMPTS_OF: Signature(
            arguments=(_takes("rollout", *_SAMPLES, optional_fields=(ROLLOUT_LOGPROBS,)),),
            outputs=(PROMPT,),
            attrs=(_spec(PromptsSpec),),
        ),
        Op.PARENT: Signature(arguments=_OF_RECEIVERS),
        Op.MEAN_OF_CHILDREN: Signature(arguments=_OF_RECEIVERS),
        Op.UPDATE: Signature(
            has_role=True,
            arguments=(
                _takes("rollout", *_SAMPLES, optional_fields=(ROLLOUT_LOGPROBS, PREFERRED, PART)),
                _may_take("rewards", SCORE, until=Level.TRACED),
                _ADVANTAGES,
                _may_take("reference", LOGPROBS),
                _may_take("old", LOGPROBS),
                _may_take("values", VALUES),
                _may_take("returns", RETURNS),
                _may_take("extra", many=True, any_fields=True),
            ),
            outputs=(WEIGHTS,),
            attrs=(
                _attr("loss", LossSpec, filled=Level.LOWERED),
                _attr("kl", KL),
                _attr("behaviour_logprobs", str),
                _attr("old_logprobs", str),
                _attr("every", int),
                # Of a term of a sum: the sum's name, and the factor of its loss and penalty.
                _attr("sum", str),
                _attr("weight", float),
                _placed("micro_batch", int),
                # Of packed micro-batches; others hold so many samples.
                _attr("micro_tokens", int, since=Level.PLACED),
            ),
        ),
        Op.SYNC: Signature(
            has_role=True,
            arguments=(_takes("weights", WEIGHTS),),
            outputs=(WEIGHTS,),
            attrs=(
                _attr("in_place", bool, filled=Level.LOWERED),
                _attr("every", int),
                _attr("decay", float),
                _attr("reset_optimizer", bool),
                _placed("transport", str),
            ),
        ),
        Op.LOG: Signature(
            arguments=(_takes("value", any_fields=True),),
            outputs=(),
            attrs=(_attr("name", str, filled=Level.TRACED),),
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
