"""Sets of samples: data rows of a step's prompts, and pairs of two sets.

solutions = fl.Examples.of(prompts)                       # of the very rows of these prompts
pairs = fl.pair(preferred=solutions, other=rollout)       # what SPIN learns from
"""

from __future__ import annotations

from typing import ClassVar, Self

from flowrl.graph.ir import Field, Op
from flowrl.graph.signatures import PREFERRED, RESPONSE_MASK, ROLLOUT_LOGPROBS, TOKENS
from flowrl.program.handles import Prompts, Samples
from flowrl.program.operation import current_tracer, operation, reads_of, refuse_argument
from flowrl.program.tracer import Read

__all__ = ["Examples", "Pairs", "pair"]


class RowSamples(Samples):
    """Base of samples that come with data rows.

    Attributes:
        data: The kind of data.
        produces: Its fields.
    """

    __slots__ = ()
    data: ClassVar[str]
    produces: ClassVar[tuple[Field, ...]]

    @classmethod
    def _of(cls, prompts: Prompts) -> Self:
        name = f"fl.{cls.__name__}.of"
        reads = reads_of(name, {"prompts": (prompts, Prompts)})
        tracer = current_tracer(name)
        if tracer.graph().node(prompts.node).op is Op.PROMPTS_OF:
            raise refuse_argument(
                name,
                "prompts",
                prompts,
                "prompts of the data, which have rows, and these are made of samples",
                "pass the prompts that the samples answer",
            )
        node = tracer.add(
            Op.SOURCE, name=cls.data, reads=reads, outputs=cls.produces, attrs={"data": cls.data}
        )
        return cls(tracer, node, cls.produces)


class Examples(RowSamples):
    """Prompts with solutions, as samples whose response is the solution: supervised stages."""

    __slots__ = ()
    kind = "the examples"
    comes_from = "examples are a parameter of the workflow, or come from fl.Examples.of(prompts)"
    data: ClassVar[str] = "examples"
    produces: ClassVar[tuple[Field, ...]] = (TOKENS, RESPONSE_MASK)

    @classmethod
    @operation
    def of(cls, prompts: Prompts) -> Self:
        """The solutions of the very rows of a step's prompts.

        A parameter `examples: fl.Examples` takes rows of its own. Rows whose solution does not fit
        the model are then left out of the prompts too.

        Args:
            prompts: Prompts of the step.
        """
        return cls._of(prompts)


class Pairs(RowSamples):
    """Two answers to each prompt, the preferred one first: preference learning, reward models."""

    __slots__ = ()
    kind = "the pairs"
    comes_from = (
        "pairs are a parameter of the workflow, or come from fl.select.best_and_worst or fl.pair"
    )
    _one_thing = (
        "write pairs = ...; the preferred sample of each pair and the other one stay together: "
        "reference.logprobs(pairs), actor.update(pairs, reference=..., loss=fl.loss.dpo(0.1))"
    )
    data: ClassVar[str] = "pairs"
    produces: ClassVar[tuple[Field, ...]] = (TOKENS, RESPONSE_MASK, PREFERRED)

    @classmethod
    @operation
    def of(cls, prompts: Prompts) -> Self:
        """The pairs of the very rows of a step's prompts, as `fl.Examples.of` gives solutions."""
        return cls._of(prompts)


@operation
def pair(*, preferred: Samples, other: Samples) -> Pairs:
    """Pairs of two sets of samples of the same prompts, for `fl.loss.dpo` and reward models.

    Sample k of a prompt in one set is paired with its sample k in the other. A set with one sample
    for a prompt has it paired with each of the other's. A prompt that one of the sets lacks (a
    filter took it out) makes no pair.

    Args:
        preferred: The samples that are preferred: solutions, or those of a better policy.
        other: The samples that they are preferred to.
    """
    given = {"preferred": preferred, "other": other}
    reads = reads_of("fl.pair", {name: (samples, Samples) for name, samples in given.items()})
    for name, samples in given.items():
        if isinstance(samples, Pairs):
            raise refuse_argument(
                "fl.pair",
                name,
                samples,
                "samples that are not paired yet",
                "pass a rollout or fl.Examples.of(prompts)",
            )
    both = ROLLOUT_LOGPROBS in preferred.fields and ROLLOUT_LOGPROBS in other.fields
    fields = (TOKENS, RESPONSE_MASK, *((ROLLOUT_LOGPROBS,) if both else ()))
    reads = {name: Read(read.node, fields) for name, read in reads.items()}
    outputs = (*fields, PREFERRED)
    tracer = current_tracer("fl.pair")
    return Pairs(tracer, tracer.add(Op.PAIR, name="pair", reads=reads, outputs=outputs), outputs)
