"""Lowering changes how a graph is written and never what it computes.

Random programs are traced and run by an interpreter for some steps, before and after the passes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flowrl as fl
from flowrl.graph import Graph, Level, Op, format_graph, parse
from flowrl.passes import PASSES, Context, run_passes
from flowrl.specs import GroupRelative, PolicyClip, Sampling
from tests.passes.interpreter import run_steps

NUM_STEPS = 3


@dataclass(frozen=True)
class Lesson:
    """One rollout and the update on it, or an update on examples.

    Attributes:
        judged: `rewards` leaves the advantage to the config, `advantages` gives one a sample,
            `tokens` one a token, with or without a KL penalty in the reward.
        kl: Coefficient of a penalty; None without one.
    """

    learner: str
    generator: str | None = None
    n: int | None = None
    temperature: float | None = None
    sampling: Sampling | None = None
    filtered: bool = False
    judged: str = "rewards"
    std: str = "group"
    loss: str | None = None
    kl: float | None = None
    reference: str = "reference"


supervised = st.builds(Lesson, learner=st.sampled_from(["actor", "student"]))
on_rollouts = st.builds(
    Lesson,
    learner=st.sampled_from(["actor", "student"]),
    generator=st.sampled_from(["actor", "student", "teacher"]),
    n=st.sampled_from([None, 1, 2, 5]),
    temperature=st.sampled_from([None, 0.5]),
    sampling=st.sampled_from([None, Sampling(top_p=0.5, max_tokens=3)]),
    filtered=st.booleans(),
    judged=st.sampled_from(["rewards", "advantages", "tokens", "penalised tokens"]),
    std=st.sampled_from(["group", "none"]),
    loss=st.sampled_from([None, "policy_clip", "cross_entropy"]),
    kl=st.sampled_from([None, 0.0, 0.2]),
    reference=st.sampled_from(["reference", "teacher"]),
)
programs = st.lists(st.one_of(supervised, on_rollouts), min_size=1, max_size=4)
contexts = st.builds(
    Context,
    group_size=st.integers(2, 4),
    sampling=st.builds(Sampling, temperature=st.sampled_from([0.7, 1.0])),
    advantage=st.builds(GroupRelative, std=st.sampled_from(["group", "batch", "none"])),
    loss=st.builds(PolicyClip, clip_low=st.just(0.2), clip_high=st.sampled_from([0.2, 0.3])),
)


def traced(lessons: list[Lesson]) -> Graph:
    """The graph of a workflow that generates for all lessons, and then gives them in order.

    It has the parameters that it uses, because others are refused.
    """

    def teach(prompts, examples, actor, student, teacher, reference, judge):
        roles = {"actor": actor, "student": student, "teacher": teacher, "reference": reference}
        prepared = [prepare(lesson, roles, prompts, examples, judge) for lesson in lessons]
        for lesson, (batch, arguments) in zip(lessons, prepared, strict=True):
            roles[lesson.learner].update(batch, **arguments)

    @fl.workflow
    def prompted(
        prompts: fl.Prompts,
        *,
        actor: fl.Policy,
        student: fl.Policy,
        teacher: fl.Policy,
        reference: fl.Policy,
        judge: fl.Reward,
    ):
        teach(prompts, None, actor, student, teacher, reference, judge)

    @fl.workflow
    def shown(examples: fl.Examples, *, actor: fl.Policy, student: fl.Policy):
        teach(None, examples, actor, student, None, None, None)

    @fl.workflow
    def both(
        prompts: fl.Prompts,
        examples: fl.Examples,
        *,
        actor: fl.Policy,
        student: fl.Policy,
        teacher: fl.Policy,
        reference: fl.Policy,
        judge: fl.Reward,
    ):
        teach(prompts, examples, actor, student, teacher, reference, judge)

    generates = {lesson.generator is not None for lesson in lessons}
    if len(generates) == 2:
        return both.trace()
    return prompted.trace() if generates == {True} else shown.trace()


def prepare(lesson, roles, prompts, examples, judge):
    """What the learner is given."""
    if lesson.generator is None:
        return examples, {}
    options = {} if lesson.temperature is None else {"temperature": lesson.temperature}
    if lesson.sampling is not None:
        options = {"sampling": lesson.sampling}
    rollout = roles[lesson.generator].generate(prompts, n=lesson.n, **options)
    imitates = lesson.loss == "cross_entropy"
    arguments = {}
    if not imitates or lesson.filtered:
        scores = judge.score(rollout)
        if lesson.filtered:
            rollout, scores = fl.filter.zero_variance(rollout, scores)
        if not imitates and lesson.judged == "rewards":
            arguments["rewards"] = scores
        elif not imitates and "tokens" in lesson.judged:
            penalty = {}
            if lesson.judged == "penalised tokens":
                penalty = {"reference": roles[lesson.reference].logprobs(rollout), "kl": 0.1}
            arguments["advantages"] = fl.advantage.reinforce_pp(scores, rollout, **penalty)
        elif not imitates:
            arguments["advantages"] = fl.advantage.group_relative(scores, std=lesson.std)
    if lesson.kl is not None:
        arguments["reference"] = roles[lesson.reference].logprobs(rollout)
        arguments["kl"] = fl.kl.k3(lesson.kl)
    if lesson.loss is not None:
        arguments["loss"] = fl.loss.cross_entropy() if imitates else fl.loss.policy_clip(0.1)
    return rollout, arguments


@settings(max_examples=150, deadline=None)
@given(lessons=programs, context=contexts)
def test_a_lowered_graph_computes_what_the_program_says(
    lessons: list[Lesson], context: Context
) -> None:
    graph = traced(lessons)
    lowered = run_passes(graph, context)
    assert lowered.level is Level.LOWERED
    assert run_steps(lowered, None, NUM_STEPS) == run_steps(graph, context, NUM_STEPS)


@settings(max_examples=60, deadline=None)
@given(lessons=programs, context=contexts)
def test_passes_are_idempotent_and_their_graphs_read_back_equal(
    lessons: list[Lesson], context: Context
) -> None:
    graph = traced(lessons)
    for pass_ in PASSES:
        graph = pass_(graph, context)
        assert pass_(graph, context) == graph
        assert parse(format_graph(graph, sources=True)) == graph
    lowered = run_passes(traced(lessons), context)
    assert run_passes(lowered, context) == lowered


LESSON = Lesson(learner="actor", generator="actor", n=5)
EXAMPLE = Context(group_size=3)


@pytest.mark.parametrize(
    ("change", "lesson"),
    [
        ({"group_size": 4}, replace(LESSON, n=None)),
        ({"sampling": Sampling(temperature=0.3)}, LESSON),
        ({"loss": PolicyClip(clip_low=0.4, clip_high=0.4)}, LESSON),
        ({"advantage": GroupRelative(std="none")}, LESSON),
    ],
)
def test_the_interpreter_notices_each_thing_that_is_filled_in(
    change: dict[str, object], lesson: Lesson
) -> None:
    graph = traced([lesson])
    other = replace(EXAMPLE, **change)
    assert run_steps(graph, EXAMPLE, 1) != run_steps(graph, other, 1)


def test_the_interpreter_notices_a_sync_a_penalty_and_logprobs_that_are_missing() -> None:
    graph = run_passes(traced([replace(LESSON, kl=0.2)]), EXAMPLE)
    whole = run_steps(graph, None, 2)
    generate = graph.node("actor.generate")
    never_synced = replace(
        graph.replacing(replace(generate, inputs=("prompts",))),
        edges=tuple(edge for edge in graph.edges if not edge.carried),
    )
    assert run_steps(never_synced, None, 1) == whole[:1]
    assert run_steps(never_synced, None, 2) != whole
    (update,) = graph.of_op(Op.UPDATE)
    assert run_steps(graph.replacing(update.with_attrs(kl=None)), None, 1) != whole[:1]
    with pytest.raises(KeyError):
        run_steps(graph.replacing(update.with_attrs(behaviour_logprobs=None)), None, 1)
