"""Roles of a workflow: the annotations of its parameters, and what they are inside it.

    @fl.workflow
    def mine(prompts: fl.Prompts, *, actor: fl.Policy, reward: fl.Reward): ...

A parameter annotated with a role is one: its name is the key under `roles` in the config. All
policies, critics and reward models have a model of their own; `fl.Policy` is in
`flowrl.program.policy`. One annotated `fl.Prompts`, `fl.Examples` or `fl.Pairs` is data. All others
are arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, Literal, Self, TypeVar, overload

from flowrl.graph.ir import Attr, Op
from flowrl.graph.signatures import SCORE, SIGNATURES, WEIGHTS, score_outputs
from flowrl.ids import NodeId, RoleName
from flowrl.program.handles import Handle, Mapped, Returns, Samples, Scores, TokenRewards, Values
from flowrl.program.operation import Call
from flowrl.program.tracer import Read, Tracer, active_tracer
from flowrl.specs import KL, LossSpec
from flowrl.specs.base import Count
from flowrl.specs.loss import BradleyTerry, Outcome, Prediction, ValueClip
from flowrl.specs.names import operation
from flowrl.user_lines import SourceRef, trace_error

_H = TypeVar("_H", bound=Handle)


class Role:
    """Base of role handles."""

    kind: ClassVar[str] = "a role"
    learns: ClassVar[bool] = False
    """True if it has a model that an update may train."""
    predicts: ClassVar[tuple[Prediction, ...]] = ("logprobs",)
    """The outputs of its model, for losses to read."""

    def __init__(self, tracer: Tracer, name: RoleName, version: NodeId | None = None) -> None:
        """Makes the role of a parameter, or the version of it that an update returns.

        Args:
            version: The update after which its weights are; None for those that a step begins with.
        """
        self._tracer = tracer
        self._name = name
        self._version = version

    @property
    def name(self) -> RoleName:
        """The parameter's name, or that of the role that it is bound to."""
        return self._name

    @property
    def version(self) -> NodeId | None:
        """The update after which its weights are; None for those that a step begins with."""
        return self._version

    @property
    def described(self) -> str:
        """The role in messages."""
        after = "" if self._version is None else f" after {self._version}"
        return f"the role '{self.name}'{after}"

    @classmethod
    def operations(cls) -> list[str]:
        """Returns the names of what a program may ask of such a role."""
        return [name for name in dir(cls) if hasattr(getattr(cls, name), "is_operation")]

    @property
    def tracer(self) -> Tracer:
        """The trace that the role belongs to."""
        return self._tracer

    def __repr__(self) -> str:
        after = "" if self._version is None else f" after {self._version}"
        return f"<fl.{type(self).__name__} {self.name}{after}>"

    def _begin(self, op: Op) -> Tracer:
        """Returns the trace that an operation of the role is added to."""
        call = Call(f"{self.name}.{op}")
        if active_tracer() is None and not self._tracer.closed:
            raise trace_error(
                f"{call.name} is used in another thread than the one that runs the workflow",
                hint="a workflow only says what happens; flowrl runs operations concurrently",
            )
        tracer = call.trace()
        if self._tracer is not tracer:
            expected = "a role of the workflow that is being traced"
            hint = "do not keep roles between calls; use the workflow's parameter"
            raise call.refuse("role", self, expected, hint)
        newest = tracer.last_update(self.name)
        if self._version is not None and newest is not None and newest.id != self._version:
            hint = f"use what {self.name}.update ({newest.source}) returned"
            raise call.refuse("role", self, f"the newest version of {self.name}", hint)
        return tracer

    def _evaluate(self, op: Op, kind: type[_H], rollout: Samples, **attrs: Attr) -> _H:
        """Adds a node that computes something of samples; returns the handle of its outputs."""
        tracer, call = self._begin(op), Call(f"{self.name}.{op}")
        reads = call.reads({"rollout": (rollout, Samples)})
        if self._version is not None:
            reads["weights"] = Read(self._version, (WEIGHTS,))
        outputs = SIGNATURES[op].outputs or score_outputs(attrs.get("per"))
        node = tracer.add(
            op, name=call.name, role=self.name, reads=reads, outputs=outputs, attrs=attrs
        )
        return kind(tracer, node, outputs)

    def _learn(
        self,
        reads: Mapping[str, Read],
        *,
        loss: LossSpec | None,
        kl: KL | float | None = None,
        extra: Mapped | Sequence[Mapped] | None = (),
        every: int = 1,
        attrs: Mapping[str, Attr] = MappingProxyType({}),
        source: SourceRef | None = None,
    ) -> Self:
        """Adds the node of an update; returns the role with the weights after it.

        Args:
            attrs: Further attributes of the node.
            source: The user's line, where it is another than that of the call.
        """
        tracer, call = self._begin(Op.UPDATE), Call(f"{self.name}.update")
        if loss is not None:
            _check_loss(self, call, loss)
        several = extra if isinstance(extra, tuple | list) else () if extra is None else (extra,)
        fields = [call.reads({"extra": (handle, Handle)})["extra"] for handle in several]
        reads = dict(reads)
        if "rewards" in reads and loss is not None and SCORE.name in loss.extra_fields:
            fields.append(reads.pop("rewards"))  # the scores themselves, and no advantages of them
        more = {
            "extra" if number == 1 else f"extra_{number}": read
            for number, read in enumerate(fields, 1)
        }
        call.check("every", every, Count)
        attrs = {"loss": loss, "kl": _penalty(call, kl), **attrs}
        if every > 1:
            attrs["every"] = every
        node = tracer.add(
            Op.UPDATE,
            name=call.name,
            role=self.name,
            reads={**reads, **more},
            attrs=attrs,
            source=source,
        )
        return type(self)(tracer, self.name, node)


class Reward(Role):
    """A role that scores samples by rules, or by a service."""

    kind = "a reward"

    @operation
    def score(self, rollout: Samples) -> Scores:
        """One score for each sample.

        Args:
            rollout: Samples, as `actor.generate` returned them.
        """
        return self._evaluate(Op.SCORE, Scores, rollout)


class RewardModel(Role):
    """A model that scores samples, and learns to from pairs."""

    kind = "a reward model"
    learns = True
    predicts = ("scores", "token_scores")

    @overload
    def score(self, rollout: Samples) -> Scores: ...

    @overload
    def score(
        self, rollout: Samples, *, per: Literal["token", "step"], separator: str | None = None
    ) -> TokenRewards: ...

    @operation
    def score(
        self,
        rollout: Samples,
        *,
        per: Literal["token", "step"] | None = None,
        separator: str | None = None,
    ) -> Scores | TokenRewards:
        """One score for each sample: the model's number at its last token.

        Args:
            rollout: Samples, as `actor.generate` returned them.
            per: `token` gives the model's number at each response token instead, `step` that at
                the last token of each step and 0 at all others: a process reward model.
            separator: The text that ends a step, which is part of it; the end of the response ends
                the last one.
        """
        if per is None and separator is None:
            return self._evaluate(Op.SCORE, Scores, rollout, by="model")
        call = Call(f"{self.name}.score")
        call.check("per", per, Literal["token", "step"])
        if (per == "step") != bool(separator):
            expected = 'the text that ends a step with per="step", and only then'
            raise call.refuse("separator", separator, expected)
        steps: dict[str, Attr] = {} if separator is None else {"separator": separator}
        return self._evaluate(Op.SCORE, TokenRewards, rollout, by="model", per=per, **steps)

    @operation
    def update(
        self,
        pairs: Samples,
        scores: Scores | None = None,
        *,
        loss: LossSpec | None = None,
        every: int = 1,
    ) -> Self:
        """Learns to score the preferred sample of each pair higher, or to tell the outcome.

        Args:
            pairs: Pairs of samples: data, or what `fl.select.best_and_worst` returned; or samples
                with scores.
            scores: The outcome of each sample, from 0 to 1.
            loss: What is minimised. None takes `fl.loss.bradley_terry()` for pairs, and with scores
                `fl.loss.outcome()`.
            every: Steps between updates, as of `Policy.update`.

        Returns:
            The new version.
        """
        reads = Call(f"{self.name}.update").reads(
            {"pairs": (pairs, Samples)},
            optional={"scores": (scores, Scores)},
        )
        if loss is None:
            loss = BradleyTerry() if scores is None else Outcome()
        named = {"pairs": "rollout", "scores": "rewards"}
        given = {named[argument]: read for argument, read in reads.items()}
        return self._learn(given, loss=loss, every=every)


class Critic(Role):
    """A model that says what a state is worth, for advantages per token: PPO."""

    kind = "a critic"
    learns = True
    predicts = ("values",)

    @operation
    def values(self, rollout: Samples) -> Values:
        """The value of the state before each response token."""
        return self._evaluate(Op.VALUES, Values, rollout)

    @operation
    def update(
        self,
        rollout: Samples,
        *,
        returns: Returns,
        values: Values | None = None,
        loss: LossSpec | None = None,
        every: int = 1,
    ) -> Self:
        """Learns the returns; returns the new version.

        Args:
            rollout: The samples that were valued.
            returns: Targets, as `fl.advantage.gae` returned them with the advantages.
            values: The critic's values before the update, which a clipped loss stays near to.
            loss: What is minimised; None takes `fl.loss.value_clip(0.2)` with values, and without
                them the same without its clip.
            every: Steps between updates, as of `Policy.update`.
        """
        reads = Call(f"{self.name}.update").reads(
            {"rollout": (rollout, Samples), "returns": (returns, Returns)},
            optional={"values": (values, Values)},
        )
        if loss is None:
            loss = ValueClip(clip=0.2 if values is not None else None)
        return self._learn(reads, loss=loss, every=every)


class Environment(Role):
    """The partner of a policy in `fl.interact`."""

    kind = "an environment"


def _penalty(call: Call, kl: object) -> KL | None:
    # A plain 0 says "none" without a doubt; any other number leaves the estimator open.
    is_number = isinstance(kl, int | float)
    if kl is None or (is_number and kl == 0):
        return None
    if not isinstance(kl, KL):
        hint = f"write kl=fl.kl.k3({kl if is_number else 0.001})"
        raise call.refuse("kl", kl, "a penalty of fl.kl, or None", hint)
    call.spec(kl, argument="kl")
    return kl


_LOSSES: Mapping[Prediction, str] = {
    "logprobs": "fl.loss.policy_clip(0.2)",
    "values": "fl.loss.value_clip(0.2)",
    "scores": "fl.loss.bradley_terry()",
}
"""A loss for each output of a model."""


def _check_loss(role: Role, call: Call, loss: object) -> None:
    predicts = role.predicts[0]
    expected = f"a loss of {predicts}, which is what {role.kind} gives"
    hint = f"write loss={_LOSSES[predicts]}"
    if not isinstance(loss, LossSpec):
        hint += ", or mark a function of a module of yours: @fl.loss.own(needs=...)"
        raise call.refuse("loss", loss, expected, hint)
    if loss.predicts not in role.predicts:
        expected += f"; this one reads {loss.predicts}"
        raise call.refuse("loss", loss, expected, hint)
    call.spec(loss, argument="loss")
