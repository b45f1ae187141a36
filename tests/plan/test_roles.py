"""Critics, reward models, environments, several rollouts: where they live and what they take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flowrl.cost import Phase
from flowrl.errors import PlanError
from flowrl.graph import Graph
from flowrl.plan import PlacementPlan, make_plan, workload
from flowrl.plan.schema import StartUnit, Transport
from flowrl.plan.show.plan import plan_text, step_sentences
from tests.plan.workflows import lowered, play, ppo, request_of, requested, two_rollouts


@pytest.fixture
def plan_of_ppo(cases: Any) -> PlacementPlan:
    return requested(cases, lowered(ppo))


@pytest.mark.parametrize("program", [ppo, play, two_rollouts], ids=lambda program: program.name)
def test_the_text_of_each_plan_is_the_golden_one(golden: Any, cases: Any, program: Any) -> None:
    graph = lowered(program)
    plan = requested(cases, graph, max_response_tokens=21, max_length=27)
    golden(f"{program.name}.txt", plan_text(plan))


def test_a_critic_begins_as_a_copy_and_has_a_head_of_its_own(
    cases: Any, plan_of_ppo: PlacementPlan
) -> None:
    critic = plan_of_ppo.placement("critic")
    assert (critic.copy_of, critic.head, critic.trainable) == ("actor", "value", True)
    shape = request_of(cases).shape_of(request_of(cases).role("critic"))
    assert shape == cases.TINY.with_value_head()
    [held] = {
        part.nbytes
        for entry in plan_of_ppo.prediction.memory
        for part in entry.memory.parts
        if (part.role, part.name) == ("critic", "parameters")
    }
    # The language model's embedding is its output layer too; the critic adds a column and a bias.
    assert held == 4 * (cases.TINY.parameters.total + cases.TINY.hidden_size + 1)


def test_each_role_s_memory_is_proven_in_the_phases_that_it_has(
    plan_of_ppo: PlacementPlan,
) -> None:
    found = {(entry.active, entry.memory.phase) for entry in plan_of_ppo.prediction.memory}
    assert found == {
        ("actor", Phase.ROLLOUT),
        ("actor", Phase.LOGPROBS),
        ("actor", Phase.UPDATE),
        ("critic", Phase.VALUES),
        ("critic", Phase.UPDATE),
        ("judge", Phase.SCORES),
        ("judge", Phase.UPDATE),
        ("reference", Phase.LOGPROBS),
    }


def test_a_model_scores_batches_on_the_device_and_rules_score_samples_on_the_cpu(
    cases: Any,
) -> None:
    pool = cases.pool_of(cases.cpu(), cases.gpu(0))
    plan = make_plan(lowered(ppo), request_of(cases), pool)
    judge, rule = plan.operation("judge.score"), plan.operation("rule.score")
    assert (judge.devices, judge.start, judge.num_samples) == (("cuda:0",), StartUnit.BATCH, 512)
    assert (rule.devices, rule.start, rule.replicas) == (("cpu:0",), StartUnit.SAMPLE, 2)
    transports = {(c.source, c.destination): c.transport for c in plan.channels}
    assert transports["actor.generate", "judge.score"] is Transport.MEMORY
    assert transports["actor.generate", "rule.score"] is Transport.PIPE


def test_pairs_are_two_samples_a_prompt_whatever_rollouts_are(plan_of_ppo: PlacementPlan) -> None:
    update = plan_of_ppo.operation("judge.update")
    assert (update.num_samples, update.micro_batch) == (128, 32)
    assert plan_of_ppo.operation("actor.update").num_samples == 512


def test_weights_go_to_the_engine_in_place_and_to_the_reference_through_a_folder(
    plan_of_ppo: PlacementPlan,
) -> None:
    routes = {(r.source, r.destination): r for r in plan_of_ppo.weight_routes}
    assert routes["actor", "actor"].transport is Transport.IN_PLACE
    taken = routes["actor", "reference"]
    assert (taken.transport, taken.after, taken.every) == (Transport.FOLDER, "reference.sync", 50)
    assert set(routes) == {("actor", "actor"), ("actor", "reference")}


def test_an_environment_lives_on_the_cpu_and_holds_no_device_memory(cases: Any) -> None:
    pool = cases.pool_of(cases.cpu(), cases.gpu(0))
    plan = make_plan(lowered(play), request_of(cases), pool)
    game = plan.placement("game")
    assert (game.devices, game.process, game.head) == (("cpu:0",), "main", "none")
    assert {part.role for e in plan.prediction.memory for part in e.memory.parts} == {"", "actor"}
    episodes, turns = plan.operation("game.interact"), plan.operation("actor.generate")
    assert (episodes.max_turns, episodes.num_samples) == (3, 256)
    assert (turns.devices, turns.start) == (("cuda:0",), StartUnit.SAMPLE)
    assert episodes.region == turns.region == "interact"


def test_neither_side_of_an_episode_waits_for_the_other_to_end(cases: Any) -> None:
    plan = requested(cases, lowered(play))
    assert plan.operation("game.interact").after == ("prompts",)
    assert plan.operation("actor.generate").after == ()
    ends = {(c.source, c.destination) for c in plan.channels}
    assert {("game.interact", "actor.generate"), ("actor.generate", "game.interact")} <= ends


def test_slots_and_kv_cache_are_of_each_role_s_largest_rollout(cases: Any) -> None:
    plan = requested(cases, lowered(two_rollouts), prompts_per_step=4)
    assert plan.placement("actor").num_slots == 32
    assert plan.placement("teacher").num_slots == 8
    samples = {o.node: o.num_samples for o in plan.operations if o.op == "generate"}
    assert samples == {"actor.generate": 32, "actor.generate.2": 4, "teacher.generate": 8}
    # A selection of one of eight leaves four rows, in two mini-batches.
    assert plan.operation("actor.update").micro_batch == 2


def test_a_filter_that_reads_a_model_s_scores_waits_for_the_batch(cases: Any) -> None:
    graph = lowered(play)
    assert requested(cases, graph).operation("filter").start is StartUnit.GROUP
    judged = with_model_scores(graph)
    assert requested(cases, judged).operation("filter").start is StartUnit.BATCH


def with_model_scores(graph: Graph) -> Graph:
    """The same, filtered by what a reward model says."""
    from flowrl.graph import Edge, Node, Op
    from flowrl.graph.signatures import SCORE
    from flowrl.ids import NodeId, RoleName

    judge = Node(
        id=NodeId("judge.score"),
        op=Op.SCORE,
        role=RoleName("judge"),
        inputs=("rollout",),
        outputs=(SCORE,),
        attrs=(("by", "model"),),
    )
    nodes = list(graph.nodes)
    nodes.insert([node.id for node in nodes].index(NodeId("filter")), judge)
    edges = [
        replace(edge, src=judge.id) if (edge.dst, edge.argument) == ("filter", "scores") else edge
        for edge in graph.edges
    ]
    read = Edge(
        src=NodeId("game.interact"),
        dst=judge.id,
        argument="rollout",
        fields=("tokens", "response_mask"),
    )
    return replace(graph, nodes=tuple(nodes), edges=(*edges, read))


def test_a_copy_brings_the_model_that_it_copies(cases: Any) -> None:
    """A stage may use a copy alone; the original is held for it, and its memory is proven."""
    graph = lowered(two_rollouts)
    request = request_of(cases)
    roles = tuple(
        replace(role, shape=None, copy_of="judge") if role.name == "teacher" else role
        for role in request.roles
    )
    plan = make_plan(graph, replace(request, roles=roles), cases.pool_of(cases.cpu()))
    assert plan.placement("judge").num_slots == 0
    held = {part.role for part in plan.prediction.memory[0].memory.parts}
    assert "judge" in held


def test_a_backend_without_environments_cannot_play(cases: Any) -> None:
    request = request_of(cases)
    roles = tuple(
        replace(role, capabilities=cases.VERIFY) if role.name == "game" else role
        for role in request.roles
    )
    with pytest.raises(PlanError, match="cannot do interact") as caught:
        make_plan(lowered(play), replace(request, roles=roles), cases.pool_of(cases.cpu()))
    assert caught.value.expected == "a backend that offers environment"


def test_a_sleeping_engine_is_awake_in_its_own_rollouts_alone(cases: Any) -> None:
    request = request_of(cases)
    roles = tuple(
        replace(role, capabilities=replace(role.capabilities, sleep=True), num_slots=1 << 20)
        if role.name in ("actor", "teacher")
        else role
        for role in request.roles
    )
    sizes = {"prompts_per_step": 1 << 17, "max_length": 40, "max_prompt_tokens": 36}
    request = replace(request, roles=roles, **sizes)
    graph = lowered(two_rollouts)
    pool = cases.pool_of(cases.cpu(50))
    switches = [(s.role, s.action, s.before) for s in make_plan(graph, request, pool).residency]
    assert switches == [
        ("actor", "take", "actor.generate"),
        ("actor", "release", "teacher.generate"),
        ("teacher", "take", "teacher.generate"),
        ("teacher", "release", "actor.update"),
    ]


def test_a_step_says_what_each_role_does(cases: Any, plan_of_ppo: PlacementPlan) -> None:
    sentences = step_sentences(plan_of_ppo)
    assert "pairs are read: 64, 128 samples" in sentences
    assert "judge scores 512 samples on cpu:0" in sentences
    assert "critic computes values of 512 samples on cpu:0" in sentences
    assert "reference takes over the weights of actor every 50 steps" in sentences
    assert "map is computed over the batch" in sentences
    assert "game runs 64 prompts x 4 episodes of at most 3 turns on cpu:0" in step_sentences(
        requested(cases, lowered(play))
    )


def test_work_of_a_role_that_does_nothing_here_is_none(cases: Any) -> None:
    request = request_of(cases)
    work = workload(request.role("judge"), request, lowered(play), "float32")
    assert (work.num_slots, work.trainable, work.num_samples) == (0, False, 1)
