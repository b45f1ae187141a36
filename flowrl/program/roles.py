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
from inspect import isfunction
from typing import ClassVar

from flowrl.errors import TraceError
from flowrl.graph.ir import called
from flowrl.graph.signatures import SIGNATURES
from flowrl.graph.types import Field, Op
from flowrl.ids import NodeId, RoleName
from flowrl.program.data import Pairs
from flowrl.program.handles import Handle, Mapped, Returns, Samples, Scores, Values
from flowrl.program.operation import (
    check_handle,
    current_tracer,
    is_number,
    operation,
    refuse_argument,
)
from flowrl.program.source import user_line
from flowrl.program.tracer import Read, Tracer, active_tracer
from flowrl.specs import KL, LossSpec
from flowrl.specs import loss as losses
from flowrl.specs.check import wrong_fields
from flowrl.specs.loss import BradleyTerry, Prediction, ValueClip
from flowrl.wording import suggestion

__all__ = [
    "Critic",
    "Environment",
    "Reward",
    "RewardModel",
    "Role",
    "add_update",
    "begin",
    "outputs_of",
]


class Role:
    """Base of role handles."""

    kind: ClassVar[str] = "a role"
    learns: ClassVar[bool] = False
    """True if it has a model that an update may train."""
    predicts: ClassVar[Prediction] = "logprobs"
    """The output of its model, for losses to read."""

    def __init__(self, tracer: Tracer, name: RoleName) -> None:
        self._tracer = tracer
        self._name = name

    @property
    def name(self) -> RoleName:
        """The parameter's name, or that of the role that it is bound to."""
        return self._name

    @property
    def described(self) -> str:
        """For messages."""
        return f"the role '{self.name}'"

    def __repr__(self) -> str:
        return f"<fl.{type(self).__name__} {self.name}>"

    @property
    def tracer(self) -> Tracer:
        """The trace that the role belongs to."""
        return self._tracer


def begin(role: Role, op: Op) -> Tracer:
    """The trace that an operation of `role` is added to.

    Raises:
        TraceError: no workflow is being traced, or another one than the role's.
    """
    what = f"{role.name}.{op}"
    if active_tracer() is None and not role.tracer.closed:
        raise TraceError(
            f"{what} is used in another thread than the one that runs the workflow",
            where=str(user_line()),
            hint="a workflow only says what happens; flowrl runs operations concurrently",
        )
    tracer = current_tracer(what)
    if role.tracer is not tracer:
        raise refuse_argument(
            what,
            "role",
            role,
            "a role of the workflow that is being traced",
            "do not keep roles between calls; use the workflow's parameter",
        )
    return tracer


class Reward(Role):
    """A role that scores samples by rules, or by a service."""

    kind = "a reward"

    @operation
    def score(self, rollout: Samples) -> Scores:
        """One score for each sample.

        Args:
            rollout: Samples, as `actor.generate` returned them.
        """
        return _score(self, rollout, {})


class RewardModel(Role):
    """A model that scores samples, and learns to from pairs."""

    kind = "a reward model"
    learns = True
    predicts = "scores"

    @operation
    def score(self, rollout: Samples) -> Scores:
        """One score for each sample: the model's number at its last token.

        Args:
            rollout: Samples, as `actor.generate` returned them.
        """
        begin(self, Op.SCORE).refuse_after_update(self.name, Op.SCORE)
        return _score(self, rollout, {"by": "model"})

    @operation
    def update(self, pairs: Pairs, *, loss: LossSpec | None = None) -> None:
        """Learns to score the preferred sample of each pair higher.

        Args:
            pairs: Pairs of samples: data, or what `fl.select.best_and_worst` returned.
            loss: What is minimised; `fl.loss.bradley_terry()` where it is None.
        """
        name = f"{self.name}.update"
        samples = check_handle(pairs, Samples, operation=name, argument="pairs")
        add_update(self, samples, {}, loss=BradleyTerry() if loss is None else loss)


class Critic(Role):
    """A model that says what a state is worth, for advantages per token: PPO."""

    kind = "a critic"
    learns = True
    predicts = "values"

    @operation
    def values(self, rollout: Samples) -> Values:
        """The value of the state before each response token."""
        tracer = begin(self, Op.VALUES)
        tracer.refuse_after_update(self.name, Op.VALUES)
        name = f"{self.name}.values"
        samples = check_handle(rollout, Samples, operation=name, argument="rollout")
        node = tracer.add(Op.VALUES, name=name, role=self.name, reads={"rollout": samples.read()})
        return Values(tracer, node, outputs_of(Op.VALUES))

    @operation
    def update(
        self,
        rollout: Samples,
        *,
        returns: Returns,
        values: Values | None = None,
        loss: LossSpec | None = None,
    ) -> None:
        """Learns the returns.

        Args:
            rollout: The samples that were valued.
            returns: Targets, as `fl.advantage.gae` returned them with the advantages.
            values: The critic's values before the update, which a clipped loss stays near to.
            loss: What is minimised; None takes `fl.loss.value_clip(0.2)` with values, and without
                them the same without its clip.
        """
        name = f"{self.name}.update"
        reads = {
            "returns": check_handle(returns, Returns, operation=name, argument="returns").read()
        }
        if values is not None:
            before = check_handle(values, Values, operation=name, argument="values")
            reads["values"] = before.read()
        if loss is None:
            loss = ValueClip(clip=0.2 if values is not None else None)
        samples = check_handle(rollout, Samples, operation=name, argument="rollout")
        add_update(self, samples, reads, loss=loss)


class Environment(Role):
    """The partner of a policy in `fl.interact`."""

    kind = "an environment"


def _score(role: Role, rollout: Samples, attrs: Mapping[str, str]) -> Scores:
    tracer = begin(role, Op.SCORE)
    name = f"{role.name}.score"
    samples = check_handle(rollout, Samples, operation=name, argument="rollout")
    reads = {"rollout": samples.read()}
    node = tracer.add(Op.SCORE, name=name, role=role.name, reads=reads, attrs=attrs)
    return Scores(tracer, node, outputs_of(Op.SCORE))


def add_update(
    role: Role,
    samples: Samples,
    reads: Mapping[str, Read],
    *,
    loss: LossSpec | None,
    kl: KL | float | None = None,
    extra: Mapped | Sequence[Mapped] | None = (),
) -> NodeId:
    """The node of an update, of whatever role.

    Raises:
        TraceError: a loss or a penalty that is none, or is out of its bounds.
    """
    tracer = begin(role, Op.UPDATE)
    tracer.refuse_after_sync(role.name)
    name = f"{role.name}.update"
    if loss is not None and not isinstance(loss, LossSpec):
        raise refuse_argument(name, "loss", loss, "a loss of fl.loss", _loss_meant(role, loss))
    if loss is not None:
        _check_loss(role, name, loss)
    more: dict[str, Read] = {}
    several = extra if isinstance(extra, tuple | list) else () if extra is None else (extra,)
    for number, handle in enumerate(several, 1):
        given = check_handle(handle, Handle, operation=name, argument="extra")
        more["extra" if number == 1 else f"extra_{number}"] = given.read()
    return tracer.add(
        Op.UPDATE,
        name=name,
        role=role.name,
        reads={"rollout": samples.read(), **reads, **more},
        attrs={"loss": loss, "kl": _penalty(name, kl)},
    )


def _penalty(name: str, kl: object) -> KL | None:
    # A plain 0 says "none" without a doubt; any other number leaves the estimator open.
    if kl is None or (isinstance(kl, int | float) and kl == 0):
        return None
    if not isinstance(kl, KL):
        number = kl if is_number(kl) else 0.001
        raise refuse_argument(
            name, "kl", kl, "a penalty of fl.kl, or None", f"write kl=fl.kl.k3({number})"
        )
    if not is_number(kl.coefficient):
        raise refuse_argument(name, "kl", kl.coefficient, "a coefficient from 0 up")
    return kl


def _loss_meant(role: Role, value: object) -> str:
    """Returns how to write what was given in the place of a loss."""
    name = getattr(value, "__name__", "")
    if getattr(losses, name, None) is value:
        return f"call it: loss=fl.loss.{name}()"
    if isfunction(value) and name.isidentifier():
        return f"mark it: @fl.loss.own(needs=...) above `def {name}`"
    if isfunction(value):
        return "write it as a function of a module, marked @fl.loss.own(needs=...)"
    return f"write loss={_LOSSES[role.predicts]}"


_LOSSES: Mapping[Prediction, str] = {
    "logprobs": "fl.loss.policy_clip(0.2)",
    "values": "fl.loss.value_clip(0.2)",
    "scores": "fl.loss.bradley_terry()",
}
"""For what a model gives, a loss that reads it."""


def _check_loss(role: Role, name: str, loss: LossSpec) -> None:
    if loss.predicts != role.predicts:
        prefers = loss.pairs and role.predicts == "logprobs"
        raise refuse_argument(
            name,
            "loss",
            loss,
            f"a loss of {role.predicts}, which is what {role.kind} gives; this one reads "
            f"{loss.predicts}",
            f"write loss={'fl.loss.dpo(0.1)' if prefers else _LOSSES[role.predicts]}",
        )
    for field, value, expected in wrong_fields(loss):
        choices = [choice.strip("' ") for choice in expected.removeprefix("one of ").split(",")]
        raise refuse_argument(
            name,
            "loss",
            value,
            f"{field} of {called(loss)} to be {expected}",
            suggestion(str(value), choices) if isinstance(value, str) else None,
        )


def outputs_of(op: Op) -> tuple[Field, ...]:
    """Returns the outputs of an operation, whatever it reads."""
    return SIGNATURES[op].outputs or ()
