"""Each pass: what it changes, shown as a golden difference; and that it changes nothing twice."""

from __future__ import annotations

import difflib
import itertools
from dataclasses import replace

import pytest

import flowrl as fl
from flowrl.cost import ModelShape, Workload, model_flops
from flowrl.errors import ConfigError, GraphError
from flowrl.graph import Graph, Level, format_graph, graph_from_json, graph_to_json, verify
from flowrl.passes import PASSES, Context, PassRecord, RoleCost, pass_names, run_passes
from flowrl.passes.annotate_cost import annotate_cost
from flowrl.passes.insert_weight_sync import insert_weight_sync
from flowrl.passes.logprobs import bind_behaviour_logprobs
from flowrl.passes.simplify import drop_dead_nodes, drop_zero_kl, fill_defaults
from flowrl.specs import CrossEntropy, GroupRelative, PolicyClip, Sampling
from tests.graph_text import parse

_SHAPE = ModelShape.from_hf_config(
    {
        "model_type": "qwen2",
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "vocab_size": 100,
    }
)
_WORK = Workload(
    num_slots=16,
    max_length=40,
    max_prompt_tokens=8,
    max_response_tokens=32,
    micro_batch=4,
    num_samples=30,
    dtype="bfloat16",
    trainable=True,
)
CONTEXT = Context(
    prompts_per_step=5,
    costs={
        "actor": RoleCost(shape=_SHAPE, work=_WORK),
        "critic": RoleCost(shape=_SHAPE.with_value_head(), work=replace(_WORK, num_slots=0)),
        "judge": RoleCost(shape=_SHAPE.with_value_head(), work=replace(_WORK, num_slots=0)),
    },
    group_size=6,
    sampling=Sampling(temperature=0.8, max_tokens=32),
    advantage=GroupRelative(std="none"),
    loss=PolicyClip(clip_low=0.1, clip_high=0.3),
    shares_weights={"actor": True},
    truncated="repeat",
    repeats_truncation={"actor": frozenset({"top_p"})},
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


@fl.workflow
def decoupled(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward, reference: fl.Policy):
    rollout = actor.generate(prompts)
    loss = fl.loss.policy_clip(0.2, correction=fl.loss.truncate(2.0))
    ref = reference.logprobs(rollout)
    fl.log("kl", reference.logprobs(rollout))
    actor.update(rollout, reward.score(rollout), reference=ref, kl=fl.kl.k3(0.1), loss=loss)
    actor.update(rollout, reward.score(rollout), loss=loss)
    reference.sync(actor, every=10)


@fl.workflow
def episodes(prompts: fl.Prompts, actor: fl.Policy, game: fl.Environment, judge: fl.RewardModel):
    rollout, scores = fl.interact(actor, game, prompts, max_turns=3, max_tokens=8)
    judged = judge.score(rollout)
    fl.log("judged", judged)
    rollout, total = fl.select.top(rollout, fl.weighted_sum((scores, 1.0), (judged, 0.5)), k=2)
    advantages = fl.advantage.group_in_group(total, rollout)
    actor.update(rollout, advantages=advantages, loss=fl.loss.policy_clip(0.2, anchor="old"))


@fl.workflow
def critic_learns(prompts: fl.Prompts, actor: fl.Policy, critic: fl.Critic, reward: fl.Reward):
    rollout = actor.generate(prompts, n=1)
    values = critic.values(rollout)
    advantages, returns = fl.advantage.gae(reward.score(rollout), values, rollout)
    critic.update(rollout, returns=returns, values=critic.values(rollout))
    actor.update(rollout, advantages=advantages)


@fl.workflow
def preferences(pairs: fl.Pairs, judge: fl.RewardModel, actor: fl.Policy, reference: fl.Policy):
    judge.update(pairs)
    actor.update(pairs, reference=reference.logprobs(pairs), loss=fl.loss.dpo(0.1))


@fl.workflow
def nucleus(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward):
    rollout = actor.generate(prompts, top_p=0.9)
    actor.update(rollout, reward.score(rollout))


ALL = {
    "short": {},
    "long": {},
    "long_kl": {"kl": 0.1},
    "supervised": {},
    "imitation": {},
    "twice": {},
    "decoupled": {},
    "episodes": {},
    "critic_learns": {},
    "preferences": {},
    "nucleus": {},
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
    before = graph_to_json(graph)
    run_passes(graph, CONTEXT)
    assert graph_to_json(graph) == before


def test_a_zero_kl_drops_the_reference_and_its_role():
    graph = drop_dead_nodes(drop_zero_kl(long.trace(), CONTEXT), CONTEXT)
    assert graph.roles == ("actor", "reward")
    assert graph.node("actor.update").attr("kl") is None
    assert "reference.logprobs" in [n.id for n in run_passes(traced("long_kl"), CONTEXT).nodes]


def test_a_loss_that_compares_with_the_reference_keeps_it_without_a_penalty():
    @fl.workflow
    def preferred(pairs: fl.Pairs, actor: fl.Policy, reference: fl.Policy):
        ref = reference.logprobs(pairs)
        actor.update(pairs, reference=ref, loss=fl.loss.dpo(0.1), kl=fl.kl.k3(0.0))

    graph = run_passes(preferred.trace(), CONTEXT)
    assert graph.node("actor.update").attr("kl") is None
    assert graph.feeding("actor.update", "reference").src == "reference.logprobs"


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


def test_costs_are_those_of_a_whole_step_and_follow_the_samples_of_each_rollout():
    graph = run_passes(traced("twice"), CONTEXT)
    one, two = graph.node("actor.update").attr("cost"), graph.node("actor.update.2").attr("cost")
    each = model_flops(_SHAPE, [40], work="training", num_logits=32)
    assert (one.flops, two.flops) == (5 * 2 * each, 5 * 6 * each)
    assert one.output_bytes == 2 * _SHAPE.parameters.total
    assert (one.kv_bytes, one.activation_bytes > 0) == (0, True)
    generate = graph.node("actor.generate").attr("cost")
    assert 3 * generate.flops == one.flops
    # Two layers, two key and two value heads of 16 elements, 16 slots of 40 tokens, 2 bytes each.
    assert generate.kv_bytes == 2 * (2 + 2) * 16 * 16 * 40 * 2
    # A token, its mask and its logprob: 8 + 1 + 4 bytes.
    assert generate.output_bytes == 5 * 2 * 40 * 13
    score = graph.node("reward.score").attr("cost")
    assert (score.flops, score.output_bytes) == (0, 5 * 2 * 4)
    assert graph.node("prompts").attr("cost").output_bytes == 5 * 8 * 8


def test_a_node_whose_model_is_not_known_is_not_given_a_cost():
    graph = run_passes(traced("imitation"), CONTEXT)
    assert graph.node("teacher.generate").attr("cost") is None
    assert graph.node("actor.update").attr("cost").flops > 0
    bare = run_passes(traced("imitation"), replace(CONTEXT, costs={}))
    assert all(node.attr("cost") is None for node in bare.nodes)


def test_costs_survive_the_text_and_the_json_form():
    graph = run_passes(traced("long_kl"), CONTEXT)
    assert format_graph(parse(format_graph(graph))) == format_graph(graph)
    assert graph_from_json(graph_to_json(graph)) == graph
    assert annotate_cost(graph, replace(CONTEXT, costs={})) == graph


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


def test_a_pass_that_is_left_out_has_no_graph_to_print():
    with pytest.raises(ConfigError, match="no graph after pass 'drop_zero_kl'"):
        run_passes(short.trace(), CONTEXT, disable=["drop_zero_kl"], print_after=["drop_zero_kl"])


@pytest.mark.parametrize("option", ["print_after", "disable"])
def test_an_unknown_pass_gets_the_nearest_name(option):
    with pytest.raises(ConfigError) as caught:
        run_passes(short.trace(), CONTEXT, **{option: ["fill_default"]})
    assert "did you mean 'fill_defaults'?" in str(caught.value)
