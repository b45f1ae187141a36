"""Lowering changes how a graph is written and never what it computes.

Random programs are traced and run by an interpreter for some steps, before and after the passes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.graph import Level, Op, format_graph, graph_from_json, graph_to_json
from flowrl.passes import PASSES, Context, run_passes
from flowrl.specs import GroupRelative, PolicyClip, Sampling
from tests.graph_text import parse
from tests.passes.interpreter import run_steps
from tests.passes.random_programs import COPIES, Lesson, contexts, programs, traced

NUM_STEPS = 3

refreshes = st.sampled_from([None, 1, 2])


@settings(max_examples=80, deadline=None)
@given(lessons=programs, context=contexts, refresh=refreshes)
def test_a_lowered_graph_computes_what_the_program_says(
    lessons: list[Lesson], context: Context, refresh: int | None
) -> None:
    graph = traced(lessons, refresh)
    lowered = run_passes(graph, context)
    assert lowered.level is Level.LOWERED
    assert run_steps(lowered, context, NUM_STEPS) == run_steps(graph, context, NUM_STEPS)


@settings(max_examples=30, deadline=None)
@given(lessons=programs, context=contexts, refresh=refreshes)
def test_passes_are_idempotent_and_their_graphs_read_back_equal(
    lessons: list[Lesson], context: Context, refresh: int | None
) -> None:
    graph = traced(lessons, refresh)
    for pass_ in PASSES:
        graph = pass_(graph, context)
        assert pass_(graph, context) == graph
        assert format_graph(parse(format_graph(graph))) == format_graph(graph)
        assert graph_from_json(graph_to_json(graph)) == graph
    lowered = run_passes(traced(lessons, refresh), context)
    assert run_passes(lowered, context) == lowered


LESSON = Lesson(learner="actor", n=5)
EXAMPLE = Context(group_size=3)


@pytest.mark.parametrize(
    ("change", "lesson"),
    [
        ({"group_size": 4}, replace(LESSON, n=None)),
        ({"sampling": Sampling(temperature=0.3)}, LESSON),
        ({"loss": PolicyClip(clip_low=0.4, clip_high=0.4)}, LESSON),
        ({"advantage": GroupRelative(std="none")}, LESSON),
        ({"mini_batches": 2}, LESSON),
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
    whole = run_steps(graph, EXAMPLE, 2)
    generate = graph.node("actor.generate")
    never_synced = replace(
        graph.replacing(replace(generate, inputs=("prompts",))),
        edges=tuple(edge for edge in graph.edges if not edge.carried),
    )
    assert run_steps(never_synced, EXAMPLE, 1) == whole[:1]
    assert run_steps(never_synced, EXAMPLE, 2) != whole
    (update,) = graph.of_op(Op.UPDATE)
    assert run_steps(graph.replacing(update.with_attrs(kl=None)), EXAMPLE, 1) != whole[:1]
    with pytest.raises(KeyError):
        run_steps(graph.replacing(update.with_attrs(behaviour_logprobs=None)), EXAMPLE, 1)


def test_the_interpreter_notices_an_old_policy_that_is_not_the_old_one() -> None:
    """Old logprobs of the update's own pass are right in the first of its updates alone."""
    lesson, twice = replace(LESSON, loss="old"), replace(EXAMPLE, mini_batches=2)
    own = run_passes(traced([lesson]), EXAMPLE)
    assert own.node("actor.update").attr("old_logprobs") == "own"
    assert run_steps(own, EXAMPLE, 1) == run_steps(traced([lesson]), EXAMPLE, 1)
    assert run_steps(own, twice, 1) != run_steps(traced([lesson]), twice, 1)


def test_the_interpreter_notices_models_that_are_not_one() -> None:
    lesson = replace(LESSON, kl=0.2, references=("reference", "twin"))
    copies = replace(EXAMPLE, copies=COPIES)
    merged = run_passes(traced([lesson]), copies)
    assert [node.id for node in merged.of_op(Op.LOGPROBS)] == ["reference.logprobs"]
    assert run_steps(merged, copies, 1) == run_steps(traced([lesson]), copies, 1)
    assert run_steps(merged, EXAMPLE, 1) != run_steps(traced([lesson]), EXAMPLE, 1)
