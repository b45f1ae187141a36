"""Roles and data of a workflow: the annotations of its parameters, and what they are inside it.

    @fl.workflow
    def mine(prompts: fl.Prompts, *, actor: fl.Policy, reward: fl.Reward): ...

A parameter annotated `fl.Policy` or `fl.Reward` is a role: its name is the key under `roles` in the
config. One annotated `fl.Prompts` or `fl.Examples` is data. All others are arguments.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar, get_args

from flowrl.config.nearest import suggestion
from flowrl.graph.ir import Attr
from flowrl.graph.signatures import PROMPT, RESPONSE_MASK, SAMPLING_OPTIONS, SIGNATURES, TOKENS
from flowrl.graph.types import Field, Op
from flowrl.ids import RoleName
from flowrl.program.handles import Advantages, Handle, Logprobs, Rollout, Samples, Scores
from flowrl.program.operation import (
    check_handle,
    current_tracer,
    is_number,
    operation,
    refuse_argument,
)
from flowrl.program.tracer import Tracer
from flowrl.specs import KL, Aggregation, LossSpec, PolicyClip, Sampling

__all__ = ["Examples", "Policy", "Prompts", "Reward", "Role"]

_SAMPLING_BOUNDS: dict[str, tuple[float, float, str]] = {
    "temperature": (0.0, float("inf"), "a number from 0 (greedy) up"),
    "top_p": (1e-12, 1.0, "a number above 0, at most 1 (keeps all)"),
    "top_k": (0, float("inf"), "a whole number from 0 (keeps all) up"),
    "min_p": (0.0, 1.0, "a number from 0 (keeps all) to 1"),
    "repetition_penalty": (1e-12, float("inf"), "a number above 0; 1 changes nothing"),
    "min_tokens": (0, float("inf"), "a whole number from 0 up"),
    "max_tokens": (1, float("inf"), "a whole number from 1 up"),
}


class Prompts(Handle):
    """The prompts of a step: one row of the training data each."""

    __slots__ = ()
    kind = "the prompts"
    data: ClassVar[str] = "prompts"
    produces: ClassVar[tuple[Field, ...]] = (PROMPT,)


class Examples(Samples):
    """Prompts with solutions, as samples whose response is the solution: supervised stages."""

    __slots__ = ()
    kind = "the examples"
    data: ClassVar[str] = "examples"
    produces: ClassVar[tuple[Field, ...]] = (TOKENS, RESPONSE_MASK)


class Role:
    """Base of role handles.

    Attributes:
        name: The parameter's name.
    """

    kind: ClassVar[str] = "a role"

    def __init__(self, tracer: Tracer, name: RoleName) -> None:
        self._tracer = tracer
        self.name = name

    @property
    def described(self) -> str:
        """For messages."""
        return f"the role '{self.name}'"

    def __repr__(self) -> str:
        return f"<fl.{type(self).__name__} {self.name}>"

    def _open(self, op: Op) -> Tracer:
        """The trace to add to; refuses a role of another one."""
        tracer = current_tracer(f"{self.name}.{op}")
        if self._tracer is not tracer:
            raise refuse_argument(
                f"{self.name}.{op}",
                "role",
                self,
                "a role of the workflow that is being traced",
                "do not keep roles between calls; use the workflow's parameter",
            )
        return tracer


class Reward(Role):
    """A role that scores samples."""

    kind = "a reward"

    @operation
    def score(self, rollout: Samples) -> Scores:
        """One score for each sample.

        Args:
            rollout: Samples, as `actor.generate` returned them.
        """
        tracer = self._open(Op.SCORE)
        name = f"{self.name}.score"
        samples = check_handle(rollout, Samples, operation=name, argument="rollout")
        node = tracer.add(Op.SCORE, name=name, role=self.name, reads={"rollout": samples.read()})
        return Scores(tracer, node, _outputs(Op.SCORE))


class Policy(Role):
    """A role with a language model: it generates, gives logprobs, and learns."""

    kind = "a policy"

    @operation
    def generate(
        self,
        prompts: Prompts,
        n: int | None = None,
        *,
        sampling: Sampling | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        min_tokens: int | None = None,
        max_tokens: int | None = None,
    ) -> Rollout:
        """`n` samples for each prompt.

        Args:
            prompts: What is answered.
            n: Samples for each prompt; `train.group_size` of the config where it is None.
            sampling: How tokens are drawn; `train.sampling` of the config where it is None.
            temperature: This option alone; likewise the others, each with the meaning that
                `fl.Sampling` gives it. What is not given comes from `sampling` or the config.
        """
        tracer = self._open(Op.GENERATE)
        tracer.refuse_after_update(self.name, Op.GENERATE)
        name = f"{self.name}.generate"
        source = check_handle(prompts, Prompts, operation=name, argument="prompts")
        if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 1):
            raise refuse_argument(
                name, "n", n, "a whole number from 1 up, or None for the config's"
            )
        if sampling is not None and not isinstance(sampling, Sampling):
            raise refuse_argument(name, "sampling", sampling, "fl.Sampling(...), or None")
        for option in SAMPLING_OPTIONS if sampling is not None else ():
            _sampling_option(name, option, getattr(sampling, option))
        given: dict[str, float | int | None] = {
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "min_tokens": min_tokens,
            "max_tokens": max_tokens,
        }
        options = {k: _sampling_option(name, k, v) for k, v in given.items() if v is not None}
        attrs: dict[str, Attr] = {"n": n, "sampling": sampling}
        if sampling is not None:
            attrs["sampling"] = replace(sampling, **options)  # type: ignore[arg-type]
        else:
            attrs |= options
        node = tracer.add(
            Op.GENERATE, name=name, role=self.name, reads={"prompts": source.read()}, attrs=attrs
        )
        return Rollout(tracer, node, _outputs(Op.GENERATE))

    @operation
    def logprobs(self, rollout: Samples) -> Logprobs:
        """This policy's logprob of each response token, at the rollout's temperature."""
        tracer = self._open(Op.LOGPROBS)
        tracer.refuse_after_update(self.name, Op.LOGPROBS)
        name = f"{self.name}.logprobs"
        samples = check_handle(rollout, Samples, operation=name, argument="rollout")
        node = tracer.add(Op.LOGPROBS, name=name, role=self.name, reads={"rollout": samples.read()})
        return Logprobs(tracer, node, _outputs(Op.LOGPROBS))

    @operation
    def update(
        self,
        rollout: Samples,
        rewards: Scores | None = None,
        *,
        advantages: Advantages | None = None,
        reference: Logprobs | None = None,
        loss: LossSpec | None = None,
        kl: KL | None = None,
    ) -> None:
        """Learns from samples: `train.mini_batches` optimizer updates a step.

        Args:
            rollout: Samples: a rollout, or the examples of a supervised workflow.
            rewards: Scores; the config says which advantage is made of them (`algorithm`).
            advantages: The weight of each sample, in place of `rewards`.
            reference: Logprobs of the reference policy, for `kl`.
            loss: What is minimised. None takes the config's for rollouts, and cross-entropy for
                examples.
            kl: Penalty on the distance from `reference`; None, or a coefficient of 0, is none.
        """
        tracer = self._open(Op.UPDATE)
        name = f"{self.name}.update"
        reads = {
            "rollout": check_handle(rollout, Samples, operation=name, argument="rollout").read()
        }
        if rewards is not None:
            scores = check_handle(rewards, Scores, operation=name, argument="rewards")
            reads["rewards"] = scores.read()
        if advantages is not None:
            weights = check_handle(advantages, Advantages, operation=name, argument="advantages")
            reads["advantages"] = weights.read()
        if reference is not None:
            logprobs = check_handle(reference, Logprobs, operation=name, argument="reference")
            reads["reference"] = logprobs.read()
        if loss is not None and not isinstance(loss, LossSpec):
            raise refuse_argument(
                name, "loss", loss, "a loss of fl.loss", "write loss=fl.loss.policy_clip(0.2)"
            )
        _check_loss(name, loss)
        tracer.add(
            Op.UPDATE,
            name=name,
            role=self.name,
            reads=reads,
            attrs={"loss": loss, "kl": _penalty(name, kl)},
        )


def _penalty(name: str, kl: object) -> KL | None:
    # A plain 0 says "none" without a doubt; any other number leaves the estimator open.
    if kl is None or (isinstance(kl, int | float) and kl == 0):
        return None
    if not isinstance(kl, KL):
        number = kl if isinstance(kl, int | float) else 0.001
        raise refuse_argument(
            name, "kl", kl, "a penalty of fl.kl, or None", f"write kl=fl.kl.k3({number})"
        )
    if not is_number(kl.coefficient):
        raise refuse_argument(name, "kl", kl.coefficient, "a coefficient from 0 up")
    return kl


def _check_loss(name: str, loss: LossSpec | None) -> None:
    if isinstance(loss, PolicyClip):
        for bound in (loss.clip_low, loss.clip_high):
            if not is_number(bound):
                raise refuse_argument(name, "loss", bound, "clip_low and clip_high from 0 up")
    aggregation = getattr(loss, "aggregation", None)
    if aggregation is not None and aggregation not in get_args(Aggregation):
        choices = [str(choice) for choice in get_args(Aggregation)]
        raise refuse_argument(
            name,
            "loss",
            aggregation,
            f"an aggregation of {', '.join(choices)}",
            suggestion(str(aggregation), choices),
        )


def _sampling_option(name: str, option: str, value: object) -> float | int:
    low, high, expected = _SAMPLING_BOUNDS[option]
    types = SAMPLING_OPTIONS[option]
    if (
        isinstance(value, bool)
        or not isinstance(value, types)
        or not isinstance(value, int | float)
    ):
        raise refuse_argument(name, option, value, expected)
    if not low <= value <= high or not math.isfinite(value):
        raise refuse_argument(name, option, value, expected)
    return float(value) if float in types else value


def _outputs(op: Op) -> tuple[Field, ...]:
    return SIGNATURES[op].outputs or ()
