"""Each pass: what it changes, shown as a golden difference; and that it changes nothing twice."""

from __future__ import annotations

import difflib
import itertools

import pytest

import flowrl as fl
from flowrl.errors import ConfigError, GraphError
from flowrl.graph import Graph, Level, format_graph, verify
from flowrl.passes import PASSES, Context, PassRecord, pass_names, run_passes
from flowrl.passes.bind_behaviour_logprobs import bind_behaviour_logprobs
from flowrl.passes.drop_dead_nodes import drop_dead_nodes
from flowrl.passes.drop_zero_kl import drop_zero_kl
from flowrl.passes.fill_defaults import fill_defaults
from flowrl.passes.insert_weight_sync import insert_weight_sync
from flowrl.specs import CrossEntropy, GroupRelative, PolicyClip, Sampling

CONTEXT = Context(
    group_size=6,
    sampling=Sampling(temperature=0.8, max_tokens=32),
    advantage=GroupRelative(std="none"),
    loss=PolicyClip(clip_low=0.1, clip_high=0.3),
    shares_weights={"actor": True},
)


@fl.workflow
def short(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward):
    rollout = actor.generate(prompts)
    actor.update(rollout, reward.score(rollout))


@fl.workflow
def long(
    prompts: fl.Prompts,
    actor: fl.Policy,
    reference: fl.Policy,
    reward: fl.Reward,
    kl: float = 0.0,
):
    rollout = actor.generate(prompts, n=4, temperature=0.5)
    scores = reward.score(rollout)
    rollout, scores = fl.filter.zero_variance(rollout, scores)
    ref = reference.logprobs(rollout)
    actor.update(rollout, scores, reference=ref, kl=fl.kl.k3(kl))


@fl.workflow
def supervised(examples: fl.Examples, actor: fl.Policy):
    actor.update(examples)


@fl.workflow
def imitation(prompts: fl.Prompts, teacher: fl.Policy, actor: fl.Policy):
    actor.update(teacher.generate(prompts), loss=fl.loss.cross_entropy())


@fl.workflow
def twice(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward):
    one = actor.generate(prompts, n=2, temperature=0.0)
    two = actor.generate(prompts, n=6)
    actor.update(one, reward.score(one))
    actor.update(two, reward.score(two))


ALL = {
    "short": {},
    "long": {},
    "long_kl": {"kl": 0.1},
    "supervised": {},
    "imitation": {},
    "twice": {},
}


def traced(name: str) -> Graph:
    return globals()[name.removesuffix("_kl")].trace(ALL[name])


def changes(before: Graph, after: Graph) -> str:
    lines = difflib.unified_diff(
        format_graph(before).splitlines(), format_graph(after).splitlines(), lineterm="", n=1
    )
    return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@"))) + "\n"


@pytest.mark.parametrize("pass_", PASSES, ids=pass_names())
def test_what_each_pass_changes_is_as_it_was(golden, pass_):
    shown = []
    for name in ALL:
        records: list[PassRecord] = []
        run_passes(traced(name), CONTEXT, observer=records.append)
        record = next(r for r in records if r.name == pass_.__name__)
        shown.append(f"# {name}\n{changes(record.before, record.after)}")
    golden(f"{pass_.__name__}.txt", "\n".join(shown))


@pytest.mark.parametrize("name", ALL)
def test_lowering_is_idempotent_pass_by_pass_and_as_a_whole(name):
    graph = traced(name)
    for pass_ in PASSES:
        graph = pass_(graph, CONTEXT)
        assert pass_(graph, CONTEXT) == graph
    lowered = run_passes(traced(name), CONTEXT)
    assert lowered.level is Level.LOWERED
    assert run_passes(lowered, CONTEXT) == lowered


@pytest.mark.parametrize("name", ALL)
def test_passes_do_not_change_the_graph_they_are_given(name):
    graph = traced(name)
    before = format_graph(graph, sources=True)
    run_passes(graph, CONTEXT)
    assert format_graph(graph, sources=True) == before


def test_a_zero_kl_drops_the_reference_and_its_role():
    graph = drop_dead_nodes(drop_zero_kl(long.trace(), CONTEXT), CONTEXT)
    assert graph.roles == ("actor", "reward")
    assert graph.node("actor.update").attr("kl") is None
    assert "reference.logprobs" in [n.id for n in run_passes(traced("long_kl"), CONTEXT).nodes]


def test_what_the_program_says_wins_over_the_config():
    graph = fill_defaults(long.trace(), CONTEXT)
    assert graph.node("actor.generate").attr("n") == 4
    assert graph.node("actor.generate").attr("sampling") == Sampling(temperature=0.5, max_tokens=32)
    assert graph.node("actor.update").attr("loss") == CONTEXT.loss
    assert graph.node("advantage").attr("spec") == CONTEXT.advantage


def test_examples_are_learned_by_cross_entropy_where_nothing_is_said():
    graph = fill_defaults(supervised.trace(), CONTEXT)
    assert graph.node("actor.update").attr("loss") == CrossEntropy()


def test_each_update_gets_its_own_advantage():
    graph = fill_defaults(twice.trace(), CONTEXT)
    assert graph.feeding("actor.update", "advantages").src == "advantage"
    assert graph.feeding("actor.update.2", "advantages").src == "advantage.2"
    assert graph.node("advantage").source == graph.node("actor.update").source
    verify(graph)


def test_a_loss_that_reads_no_behaviour_logprobs_does_not_carry_them():
    graph = bind_behaviour_logprobs(imitation.trace(), CONTEXT)
    assert graph.feeding("actor.update", "rollout").fields == ("tokens", "response_mask")
    assert graph.node("actor.update").attr("behaviour_logprobs") is None
    bound = bind_behaviour_logprobs(fill_defaults(short.trace(), CONTEXT), CONTEXT)
    assert bound.node("actor.update").attr("behaviour_logprobs") == "rollout_logprobs"


def test_stale_samples_need_a_loss_that_corrects_for_them():
    stale = Context(max_staleness=2)
    with pytest.raises(GraphError) as caught:
        bind_behaviour_logprobs(imitation.trace(), stale)
    assert "up to 2 publications old" in caught.value.what
    assert "test_passes.py" in caught.value.where
    run_passes(short.trace(), stale)
    run_passes(supervised.trace(), stale)


def test_a_sync_feeds_every_generation_of_the_role_it_updates():
    graph = insert_weight_sync(twice.trace(), CONTEXT)
    sync = graph.node("actor.sync")
    assert sync.attr("in_place") is True
    assert graph.feeding("actor.sync", "weights").src == "actor.update.2"
    carried = [edge.dst for edge in graph.edges if edge.carried]
    assert carried == ["actor.generate", "actor.generate.2"]


def test_no_sync_where_the_learner_does_not_generate():
    ids = [node.id for node in run_passes(imitation.trace(), CONTEXT).nodes]
    assert ids == ["prompts", "teacher.generate", "actor.update"]


def test_the_observer_sees_every_pass_in_order():
    records: list[PassRecord] = []
    run_passes(short.trace(), CONTEXT, observer=records.append)
    assert tuple(record.name for record in records) == pass_names()
    assert all(a.after == b.before for a, b in itertools.pairwise(records))


def test_print_after_writes_the_graph_as_it_was_then():
    written: list[str] = []
    run_passes(short.trace(), CONTEXT, print_after=["fill_defaults"], write=written.append)
    assert len(written) == 1
    assert written[0].startswith("# after fill_defaults\n\ngraph short traced")
    assert "actor.sync" not in written[0]


def test_a_graph_that_misses_a_pass_is_not_called_lowered():
    left_out = run_passes(short.trace(), CONTEXT, disable=["insert_weight_sync"])
    assert left_out.level is Level.TRACED
    assert run_passes(short.trace(), CONTEXT, disable=["drop_zero_kl"]).level is Level.LOWERED


@pytest.mark.parametrize("option", ["print_after", "disable"])
def test_an_unknown_pass_gets_the_nearest_name(option):
    with pytest.raises(ConfigError) as caught:
        run_passes(short.trace(), CONTEXT, **{option: ["fill_default"]})
    assert "did you mean 'fill_defaults'?" in str(caught.value)
