"""Rollouts from rollouts: prompts made of samples, and values between parents and children.

    draft = actor.generate(prompts)
    critique = critic.generate(fl.prompts_of(draft, template="{prompt}{response}\\nCritique:"), n=1)
    draft_scores = fl.mean_of_children(judge.score(critique))
    actor.update(draft, draft_scores)
    critic.update(critique, advantages=fl.parent(fl.advantage.group_relative(draft_scores),
                                                 of=critique))

A sample of `critique` is a child of the sample of `draft` whose prompt it answers. Children of one
sample are a group, so an advantage or a filter on them compares them with each other alone. To
compare children of different parents, take their mean to the parents, compute there, and return
with `fl.parent`.
"""

from __future__ import annotations

from typing import TypeVar

from flowrl.graph.ir import Op
from flowrl.graph.sample_sets import parents_of, sample_sets
from flowrl.graph.signatures import PROMPT, TURN, prompt_fields
from flowrl.program.handles import Advantages, Handle, Mapped, Prompts, Rollout, Scores
from flowrl.program.operation import Call
from flowrl.program.tracer import Read
from flowrl.specs.base import Count
from flowrl.specs.cut import CutSpec
from flowrl.specs.names import operation
from flowrl.specs.prompts import PromptsSpec, PromptTemplate
from flowrl.specs.user_functions import MarkedFunction
from flowrl.user_lines import trace_error

_Values = TypeVar("_Values", Scores, Advantages, Mapped)


@operation
def prompts_of(
    rollout: Rollout,
    *,
    template: str | None = None,
    opponent: int | None = None,
    cut: CutSpec | None = None,
) -> Prompts:
    """One prompt of each sample: what another rollout, or the next of the same policy, answers.

        fl.prompts_of(draft, template="{prompt}{response}\\nCritique:")
        fl.prompts_of(answers, template="{response}\\n{opponent}\\nThe better one is", opponent=1)
        fl.prompts_of(trunk, cut=fl.cut.share(0.5))

    Args:
        rollout: The samples, of a policy's `generate` or of a filter of that.
        template: The text of a prompt. `{prompt}`, at the beginning, are the tokens that the
            sample answered; `{response}` its own tokens, without the stop token at their end;
            `{answer}` and `{row.FIELD}` are texts of the data row. Tokens of samples stay as they
            are; the text between them is encoded by itself.
        opponent: Puts the tokens of another sample of the group in the place of `{opponent}`: of
            the one so many places further, the first one following the last. `fl.win_rate` reads
            the verdicts.
        cut: In place of a template: the prompt is the sample's own with the beginning of its
            response, up to the cut. What is generated continues the response. Rewards and
            `fl.parse` read both as one text; no loss counts the tokens before the cut, for they
            belong to the prompt.
    """
    call = Call("fl.prompts_of")
    tracer = call.trace()
    read = call.handle("rollout", rollout, Rollout).read()
    if TURN in read.fields:
        raise call.refuse(
            "rollout",
            rollout,
            "a rollout of plain responses, and these are episodes",
            "let the environment say what comes next, or use actor.generate(prompts)",
        )
    spec = _rule(call, template, opponent, cut)
    read = Read(read.node, tuple(f for f in read.fields if f in prompt_fields(spec)))
    node = tracer.add(
        Op.PROMPTS_OF, name="prompts_of", reads={"rollout": read}, attrs={"spec": spec}
    )
    return Prompts(tracer, node, (PROMPT,))


def _rule(call: Call, template: str | None, opponent: int | None, cut: object) -> PromptsSpec:
    """Returns what makes the prompts."""
    if cut is None:
        call.check("opponent", opponent, Count | None)
        text = PromptTemplate(text=template, opponent=opponent)  # type: ignore[arg-type]
        return call.spec(text)
    if not isinstance(cut, CutSpec):
        expected = "fl.cut.at(tokens), fl.cut.share(share) or fl.cut.least_likely()"
        raise call.refuse("cut", cut, expected, _cut_hint(cut))
    if template is not None or opponent is not None:
        expected = "alone: it continues the sample's own tokens, without a template"
        raise call.refuse("cut", cut, expected, "make two sets of prompts")
    return call.spec(cut, argument="cut")


def _cut_hint(cut: object) -> str | None:
    """Returns the cut that a number or the name of a rule stands for."""
    match cut:
        case bool():
            return None
        case int():
            return f"write cut=fl.cut.at({cut})"
        case float() if 0 < cut <= 1:
            return f"write cut=fl.cut.share({cut})"
        case str():
            return "write cut=fl.cut.least_likely(), a cut before the most surprising token"
        case Handle() | MarkedFunction():
            return (
                "a map cannot choose the cut: write one of these rules, which hold for all samples"
            )
    return "call it: cut=fl.cut.least_likely()" if callable(cut) else None


@operation
def parent(values: _Values, *, of: Rollout) -> _Values:
    """The value of each sample's parent.

    Args:
        values: One number for each sample that prompts were made of: scores, advantages, or what a
            map gave.
        of: What was generated for these prompts, or what a filter or selection kept of it.
    """
    call = Call("fl.parent")
    tracer, given = call.trace(), _numbers(call, values)
    children = call.handle("of", of, Rollout)
    node = tracer.add(
        Op.PARENT,
        name="parent",
        reads={"rollout": children.read(), "input": given},
        outputs=given.fields,
    )
    return type(values)(tracer, node, given.fields)


@operation
def mean_of_children(values: _Values) -> _Values:
    """The mean of the values of each sample's children.

    A sample without children has none, so its group is dropped (`no_children`).

    Args:
        values: One number for each child: scores, advantages, or what a map gave. They are of all
            children; of what a filter leaves there is no mean.
    """
    call = Call("fl.mean_of_children")
    tracer, given = call.trace(), _numbers(call, values)
    graph = tracer.graph()
    parents = parents_of(graph, graph.node(sample_sets(graph)[given.node]))
    if parents is None:
        raise trace_error(
            f"{call.name} gets {values.kind} of samples that have no parents",
            found=f"'{given.node}'",
            expected="values of samples that answer the prompts of fl.prompts_of",
            hint="generate them for fl.prompts_of(rollout, template=...)",
        )
    node = tracer.add(
        Op.MEAN_OF_CHILDREN,
        name="mean_of_children",
        reads={"rollout": Read(parents.id, parents.outputs), "input": given},
        outputs=given.fields,
    )
    return type(values)(tracer, node, given.fields)


def _numbers(call: Call, values: object) -> Read:
    """Returns values that samples may hand on."""
    if not isinstance(values, Scores | Advantages | Mapped):
        raise call.refuse(
            "values",
            values,
            "scores, advantages, or what a map gave",
            "make one number a sample of it first, with a function marked @fl.map",
        )
    return call.handle("values", values, type(values)).read()
