"""`fl.Policy`: a role with a language model, which generates, gives logprobs, and learns."""

from __future__ import annotations

from collections.abc import Sequence

from flowrl.errors import TraceError
from flowrl.graph.signatures import WEIGHTS
from flowrl.graph.types import Op
from flowrl.program.data import Prompts
from flowrl.program.handles import Advantages, Logprobs, Mapped, Rollout, Samples, Scores
from flowrl.program.operation import check_handle, operation, refuse_argument
from flowrl.program.roles import Role, add_update, begin, outputs_of
from flowrl.program.sampling import sampling_attrs
from flowrl.program.source import user_line
from flowrl.program.tracer import Read
from flowrl.specs import KL, Grammar, LossSpec, Sampling

__all__ = ["Policy"]


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
            sampling: How tokens are drawn; `train.sampling` of the config where it is None.
            temperature: This option alone; likewise the others, each with the meaning that
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
