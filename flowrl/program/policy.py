"""`fl.Policy`: a role with a language model, which generates, gives logprobs, and learns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from flowrl.errors import TraceError
from flowrl.graph.ir import Attr
from flowrl.graph.signatures import SAMPLING_OPTIONS, WEIGHTS
from flowrl.graph.types import Op
from flowrl.program.data import Prompts
from flowrl.program.handles import Advantages, Logprobs, Mapped, Rollout, Samples, Scores
from flowrl.program.operation import check_handle, operation, refuse_argument
from flowrl.program.roles import Role, add_update, begin, outputs_of
from flowrl.program.source import user_line
from flowrl.program.tracer import Read
from flowrl.specs import KL, Grammar, LossSpec, Sampling
from flowrl.specs.attributes import MIN_TEMPERATURE

__all__ = [
    "Policy",
    "sampling_attrs",
]


class Policy(Role):
    """A role with a language model: it generates, gives logprobs, and learns."""

    kind = "a policy"
    learns = True

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
        grammar: Grammar | None = None,
    ) -> Rollout:
        """`n` samples for each prompt.

        Args:
            prompts: What is answered.
            n: Samples for each prompt; `train.group_size` of the config where it is None.
            sampling: Sampling options; `train.sampling` of the config where it is None.
            temperature: This option alone; the others too, each with the meaning that
                `fl.Sampling` gives it. What is not given comes from `sampling` or the config.
            grammar: What a response may look like (`fl.grammar`), where the role's backend can.
        """
        tracer = begin(self, Op.GENERATE)
        tracer.refuse_after_update(self.name, Op.GENERATE)
        name = f"{self.name}.generate"
        source = check_handle(prompts, Prompts, operation=name, argument="prompts")
        given: dict[str, float | int | None] = {
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "min_tokens": min_tokens,
            "max_tokens": max_tokens,
        }
        node = tracer.add(
            Op.GENERATE,
            name=name,
            role=self.name,
            reads={"prompts": source.read()},
            attrs=sampling_attrs(name, n, sampling, grammar, given),
        )
        return Rollout(tracer, node, outputs_of(Op.GENERATE))

    @operation
    def logprobs(self, rollout: Samples) -> Logprobs:
        """This policy's logprob of each response token, at the rollout's temperature."""
        tracer = begin(self, Op.LOGPROBS)
        tracer.refuse_after_update(self.name, Op.LOGPROBS)
        name = f"{self.name}.logprobs"
        samples = check_handle(rollout, Samples, operation=name, argument="rollout")
        node = tracer.add(Op.LOGPROBS, name=name, role=self.name, reads={"rollout": samples.read()})
        return Logprobs(tracer, node, outputs_of(Op.LOGPROBS))

    @operation
    def update(
        self,
        rollout: Samples,
        rewards: Scores | None = None,
        *,
        advantages: Advantages | None = None,
        reference: Logprobs | None = None,
        old: Logprobs | None = None,
        loss: LossSpec | None = None,
        kl: KL | None = None,
        extra: Mapped | Sequence[Mapped] | None = (),
    ) -> None:
        """Learns from samples: `train.mini_batches` optimizer updates a step.

        Args:
            rollout: Samples: a rollout, the examples of a supervised workflow, or pairs.
            rewards: Scores; the config says which advantage is made of them (`algorithm`).
            advantages: The weight of each sample or token, in place of `rewards`.
            reference: Logprobs of the reference policy, for `kl` or for a loss that compares.
            old: Logprobs of this policy at the start of the step, for a loss whose anchor is the
                old policy. Where it is None they are computed when they are needed.
            loss: What is minimised. None takes the config's for rollouts, and cross-entropy for
                examples.
            kl: Penalty on the distance from `reference`; None, or a coefficient of 0, is none.
            extra: Fields of maps that a loss of your own reads.
        """
        name = f"{self.name}.update"
        samples = check_handle(rollout, Samples, operation=name, argument="rollout")
        reads: dict[str, Read] = {}
        if rewards is not None:
            scores = check_handle(rewards, Scores, operation=name, argument="rewards")
            reads["rewards"] = scores.read()
        if advantages is not None:
            weights = check_handle(advantages, Advantages, operation=name, argument="advantages")
            reads["advantages"] = weights.read()
        for argument, value in (("reference", reference), ("old", old)):
            if value is not None:
                logprobs = check_handle(value, Logprobs, operation=name, argument=argument)
                reads[argument] = logprobs.read()
        add_update(self, samples, reads, loss=loss, kl=kl, extra=extra)

    @operation
    def sync(self, source: Policy, *, every: int = 1) -> None:
        """Takes the weights of `source`, as its update leaves them, at the end of a step.

        Args:
            source: A policy that this step updates; its model is of the same shape.
            every: Steps between refreshes: after steps `every`, `2 * every`, ...
        """
        tracer = begin(self, Op.SYNC)
        name = f"{self.name}.sync"
        if not isinstance(source, Policy) or source.name == self.name:
            raise refuse_argument(name, "source", source, "another policy of the workflow")
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise refuse_argument(name, "every", every, "a number of steps, from 1 up")
        before = [n for n in tracer.nodes if n.op is Op.SYNC and n.role == self.name]
        if before:
            raise TraceError(
                f"{self.name} takes over weights twice in a step",
                where=str(user_line()),
                found=f"{before[0].id} ({before[0].source})",
                expected="one sync of a role, with the number of steps between refreshes: every=50",
                hint="leave one of the two syncs out",
            )
        update = tracer.last_update(source.name)
        if update is None:
            reversed_ = tracer.last_update(self.name) is not None
            raise TraceError(
                f"{name} takes the weights of '{source.name}', which nothing has updated yet",
                where=str(user_line()),
                hint=f"the role that takes weights comes first: {source.name}.sync({self.name})"
                if reversed_
                else f"write it after {source.name}.update(...); the role that takes weights comes "
                f"first, so that {source.name}.sync({self.name}) is the other way round",
            )
        tracer.add(
            Op.SYNC,
            name=name,
            role=self.name,
            reads={"weights": Read(update.id, (WEIGHTS,))},
            attrs={"in_place": False, "every": every},
        )


# Sampling options of a program: checked, and merged into one specification.

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
