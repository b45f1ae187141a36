"""Plans over many devices: they fit, are whole, keep what is pinned, and say why."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace

import pytest

from flowrl.cluster.hardware import device_spec
from flowrl.cluster.pool import ResourcePool, split_cpus
from flowrl.cost.analytic import AnalyticCost
from flowrl.errors import PlanError
from flowrl.graph import Graph, Op
from flowrl.plan import PlacementPlan, make_plan
from flowrl.plan.fit import RUNTIME_BYTES
from flowrl.plan.names import device_names
from flowrl.plan.routes import expand_plan_route
from flowrl.plan.show.diff import diff_plans
from flowrl.plan.show.many import device_seconds
from flowrl.plan.show.plan import plan_text
from flowrl.plan.sizing import Job, fewest, pool_of_devices, sizes
from flowrl.plan.ways.tasks import tasks_of
from flowrl.plan.write.held import held_memory
from tests.plan.conftest import GraphBuilder
from tests.plan.many_cases import QWEN25_7B, h100, options, pinned, request, searched

GIB = 1 << 30


@pytest.fixture(scope="module")
def sixteen() -> ResourcePool:
    return h100(16)


@pytest.fixture
def plan(grpo: Graph, sixteen: ResourcePool) -> PlacementPlan:
    return make_plan(grpo, request(), sixteen)


def test_every_device_holds_what_it_may_in_every_phase(plan: PlacementPlan):
    assert plan.prediction.memory
    for entry in plan.prediction.memory:
        assert entry.memory.total <= plan.pool.device(entry.device).budget_bytes
    shown = Counter[str]()
    for entry in plan.prediction.memory:
        shown[entry.device] = entry.num_devices
    used = {device for placement in plan.placements for device in placement.devices}
    assert sum(shown.values()) == len({device for device in used if "cuda" in device})


def test_the_named_parts_are_what_the_search_proved(grpo: Graph, sixteen: ResourcePool):
    # Of pipelines the fullest stage of each phase is shown, which may be another one.
    found = searched(grpo, pinned(request(), "actor.pp=1"), sixteen)
    peak = max(entry.memory.total for entry in held_memory(found.best))
    assert peak == found.best.peak + RUNTIME_BYTES["cuda"]


def test_a_plan_survives_json_and_yaml(plan: PlacementPlan):
    assert PlacementPlan.from_json(plan.to_json()) == plan
    assert PlacementPlan.from_yaml(plan.to_yaml()) == plan


def test_operations_schedule_and_layouts_agree(plan: PlacementPlan):
    assert plan.schedule is not None
    waiting, leaves = [plan.schedule], {}
    while waiting:
        step = waiting.pop()
        waiting += step.parts
        if step.node is not None:
            leaves[step.node] = step.devices
    assert set(leaves) == {"actor.generate", "reference.logprobs", "actor.update"}
    for node, devices in leaves.items():
        operation = plan.operation(node)
        assert len(operation.devices) == devices == operation.layout.num_devices
        assert operation.seconds is not None


def test_tokens_for_each_device_are_those_of_prompts_and_responses_of_all_samples(
    plan: PlacementPlan,
):
    sizes, prediction = plan.sizes, plan.prediction
    samples = sizes.prompts_per_step * sizes.group_size
    used = {one for operation in plan.operations for one in operation.devices if "cuda" in one}
    # 200 tokens of a prompt and 600 of a response on average, as the job says.
    expected = samples * 800 / (prediction.step_s or 0.0) / len(used)
    assert prediction.tokens_per_device_s == pytest.approx(expected)
    told = f"  {expected:,.0f} tokens/s per device, prompts and responses of all samples"
    lines = plan_text(plan).splitlines()
    assert told in lines
    assert f"  {device_seconds(prediction.device_s or 0.0)}" in lines


def test_the_timeline_ends_with_the_step(plan: PlacementPlan):
    assert plan.prediction.timeline is not None
    assert plan.prediction.step_s == pytest.approx(
        max(span.end_s for span in plan.prediction.timeline)
    )
    assert plan.prediction.bottleneck == "actor.generate"
    assert {one.source for one in plan.prediction.confidence} == {"analytic"}


def test_parts_of_a_time_add_up_with_the_way_from_the_host(grpo: Graph):
    plan = make_plan(grpo, pinned(request(), "reference.offload=all"), h100(16))
    (passed,) = (one for one in plan.operations if one.node == "reference.logprobs")
    for one in plan.prediction.confidence:
        parts = {name: seconds for name, seconds in one.parts if name != "tail of it"}
        assert sum(parts.values()) == pytest.approx(one.seconds, rel=1e-3)
        if one.node == passed.node:
            assert parts["to the host and back"] == passed.move_s > 0


def test_operations_that_take_turns_in_a_stream_are_shown_until_their_last_chunk(
    grpo: Graph, sixteen: ResourcePool
):
    pins = ("rollout.devices=0-7", "reference.devices=8-15", "actor.devices=8-15")
    plan = make_plan(grpo, pinned(request(), *pins), sixteen)
    assert plan.schedule is not None
    assert plan.schedule.chunks > 1
    assert plan.schedule.parts[1].kind == "temporal"
    spans = {span.node: span for span in plan.prediction.timeline or ()}
    drawn, scored, learned = (
        spans[node] for node in ("actor.generate", "reference.logprobs", "actor.update")
    )
    first_s = plan.schedule.ready[0] * drawn.end_s
    assert scored.begin_s == pytest.approx(first_s, rel=0.01)
    # The last chunk is there when the rollout ends, and is scored before it is learned from.
    assert scored.begin_s < learned.begin_s < drawn.end_s < scored.end_s < learned.end_s
    for span in (scored, learned):
        assert plan.operation(span.node).seconds < span.end_s - span.begin_s
    assert PlacementPlan.from_json(plan.to_json()) == plan


def test_an_edited_plan_whose_layout_is_of_other_devices_is_refused(plan: PlacementPlan):
    raw = plan.to_dict()
    raw["operations"][1]["layout"]["dp"] *= 2
    with pytest.raises(PlanError, match="has 16 devices and a layout of 32"):
        PlacementPlan.from_json(json.dumps(raw))


def test_pins_are_kept_recorded_and_checked(grpo: Graph, sixteen: ResourcePool):
    asked = pinned(request(), "rollout.tp=2", "actor.devices=8-15", "actor.recompute=full")
    plan = make_plan(grpo, asked, sixteen)
    generate, update = plan.operation("actor.generate"), plan.operation("actor.update")
    assert generate.layout.tp == 2
    assert update.devices == tuple(f"node-1/cuda:{i}" for i in range(8))
    assert update.recompute == "full"
    assert [pin.nodes for pin in plan.pins] == [
        ("actor.generate",),
        ("actor.update",),
        ("actor.update",),
    ]
    raw = plan.to_dict()
    place = [operation["node"] for operation in raw["operations"]].index("actor.update")
    raw["operations"][place]["recompute"] = "none"
    with pytest.raises(PlanError, match=r"actor.recompute=full is pinned, but actor.update has"):
        PlacementPlan.from_json(json.dumps(raw))


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        (["rollout.tp=2", "actor.generate.tp=4"], "rollout.tp=2 and actor.generate.tp=4"),
        (["actor.devices=0-7", "actor.tp=3"], "actor.devices=0-7 and actor.tp=3"),
        (["rollout.tp=8"], "tp=8 does not divide 28 query heads"),
        (["actor.devices=0-10"], "devices=11 is neither part of a node of 8 nor whole nodes"),
        (["actor.devices=0-99"], "there is no device 99 to be used"),
        (["actors.tp=2"], "nothing in the plan is called 'actors'"),
        (["actor.colour=2"], "'colour' cannot be pinned"),
        (["actor.recompute=some"], "there is no such way of recompute"),
        (["rollout.devices=4-11"], "these 8 devices lie in 2 nodes of 8"),
    ],
)
def test_pins_that_cannot_be_kept_say_why(
    grpo: Graph, sixteen: ResourcePool, pins: list[str], said: str
):
    with pytest.raises(PlanError) as caught:
        make_plan(grpo, pinned(request(), *pins), sixteen)
    assert said in str(caught.value)


def test_kinds_and_pins_that_leave_no_schedule_are_named_where_they_are_written(
    grpo: Graph, sixteen: ResourcePool
):
    asked = pinned(request(kind="spatial", kind_where="job.yaml:9"), "rollout.devices=0-15")
    with pytest.raises(PlanError, match="do not fit together") as caught:
        make_plan(grpo, asked, sixteen)
    assert caught.value.where == "--pin rollout.devices=0-15 and job.yaml:9"
    assert caught.value.found == "rollout.devices=0-15 and plan.kind=spatial"


def number_in(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found is not None, text
    return float(found[1])


def share_to_set(grpo: Graph, share: float) -> float | None:
    """What a refusal says that the share should be; None where it is enough."""
    try:
        make_plan(grpo, request(memory_share=share), h100(16))
    except PlanError as error:
        return number_in(r"set plan.memory_share to ([0-9.]+)", error.hint or "")
    return None


def test_too_small_a_share_of_the_memory_is_what_is_to_be_changed(grpo: Graph):
    shares = [0.01]
    while (more := share_to_set(grpo, shares[-1])) is not None:
        assert more > shares[-1]
        shares.append(more)
    assert 2 <= len(shares) <= 4  # said of one task, then of several at once
    assert shares[-1] < 0.3


def test_reserved_devices_are_left_alone(grpo: Graph):
    pool = h100(16)
    first = pool.nodes[0]
    kept = tuple(replace(device, reserved=device.type == "cuda") for device in first.devices)
    pool = replace(pool, nodes=(replace(first, devices=kept), *pool.nodes[1:]))
    plan = make_plan(grpo, request(), pool)
    on = {device for operation in plan.operations for device in operation.devices}
    assert {device.partition("/")[0] for device in on if "cuda" in device} == {"node-1"}
    name = first.devices[1].name
    kept_note = f"8 x {name} (node-0/cuda:[0-7]): left idle, for the cluster reserves them"
    assert kept_note in plan.notes


def test_a_stage_that_may_be_stale_may_run_its_rollouts_ahead(grpo: Graph):
    pool = h100(64)
    asked = request(max_staleness=1)
    plan = make_plan(grpo, asked, pool)
    strict = make_plan(grpo, request(), pool)
    assert plan.prediction.step_s is not None
    assert strict.prediction.step_s is not None
    assert plan.kind == "asynchronous"
    assert plan.prediction.step_s < strict.prediction.step_s
    assert "asynchronous" not in {one.kind for one in strict.alternatives}
    generate, update = plan.operation("actor.generate"), plan.operation("actor.update")
    assert not set(generate.devices) & set(update.devices)


def test_a_reference_does_not_hold_the_weights_of_an_actor_that_learns(grpo: Graph):
    weights = {task.id: task.weights for task in tasks_of(grpo, request())}
    assert weights == {
        "actor.generate": None,
        "reference.logprobs": "actor at the start (lm)",
        "actor.update": "actor",
    }


def test_frozen_copies_of_one_model_hold_the_same_weights(grpo: Graph):
    nodes = tuple(
        replace(node, role="judge", id="judge.logprobs") if node.id == "actor.update" else node
        for node in grpo.nodes
        if node.id != "actor.sync"
    )
    names = {node.id for node in nodes}
    edges = tuple(edge for edge in grpo.edges if {edge.src, edge.dst} <= names)
    graph = replace(grpo, nodes=nodes, edges=edges)
    asked = request()
    judge = replace(asked.role("reference"), name="judge")
    asked = replace(asked, roles=(*asked.roles, judge))
    logprobs = tuple(
        replace(node, op=Op.LOGPROBS) if node.id == "judge.logprobs" else node
        for node in graph.nodes
    )
    found = {t.id: t.weights for t in tasks_of(replace(graph, nodes=logprobs), asked)}
    assert found["judge.logprobs"] == found["reference.logprobs"] == found["actor.generate"]


def test_the_plan_says_what_it_assumes_and_what_cannot_run_here(plan: PlacementPlan):
    said = "\n".join(plan.notes)
    assert "backend torch declares no parallel layouts, and the plan takes sglang" in said
    assert "rules score on the hosts" in said
    assumed = make_plan_with_assumption()
    assert "assumed: responses of 1 token" in "\n".join(assumed.notes)


def make_plan_with_assumption() -> PlacementPlan:

    graph = (
        GraphBuilder()
        .node("prompts", Op.SOURCE)
        .node("actor.generate", Op.GENERATE, "actor")
        .edge("prompts", "actor.generate", "prompt")
        .graph("draw")
    )
    return make_plan(graph, request(assumptions=("responses of 1 token",)), h100(8))


def test_each_choice_has_its_runner_up_and_each_impossible_size_its_constraint(
    plan: PlacementPlan,
):
    text = plan_text(plan, explain=True)
    assert "not tp=3, 5-6, 8-13, 15-16: do not divide 28 query heads; possible 1, 2, 4" in text
    assert "not tp=7, 14: do not divide 4 key heads, and are no multiples of them; pos" in text
    pieces = "into too short pieces (at least 256 tokens a piece); possible 1, 2, 4"
    assert f"not cp=8, 16: cut the longest sample of 2560 tokens {pieces}" in text
    reason = next(one for one in plan.reasons if one.subject == "actor.generate")
    assert "slower" in reason.rejected[0].constraint
    assert "tp=3" not in plan_text(plan)
    assert "schedule: temporal" in text or "schedule: hybrid" in text


@pytest.mark.parametrize("dimension", ["tp", "pp"])
def test_each_size_is_possible_or_told_with_its_constraint(plan: PlacementPlan, dimension: str):
    for task in ("actor.generate", "actor.update"):
        reason = next(one for one in plan.reasons if one.subject == task)
        told = [one for one in reason.rejected if one.choice.startswith(f"{dimension}=")]
        ranges = [part.split("-") for one in told for part in one.choice[3:].split(", ")]
        impossible = [size for ends in ranges for size in range(int(ends[0]), int(ends[-1]) + 1)]
        possible = {
            size
            for size in range(1, 17)
            if 28 % size == 0 and (dimension == "pp" or size in (1, 2, 4))
        }
        assert sorted([*impossible, *possible]) == list(range(1, 17))


def test_engines_get_the_flags_of_their_servers(plan: PlacementPlan, grpo: Graph):
    (flags,) = plan.engine_flags
    assert flags.engine == "sglang"
    given = dict(flags.flags)
    generate = plan.operation("actor.generate")
    assert given["--tp-size"] == str(generate.layout.tp)
    assert given["--max-total-tokens"] == str(generate.kv_tokens)
    assert 0 < float(given["--mem-fraction-static"]) < 1
    other = make_plan(grpo, request(engine="vllm"), h100(8)).engine_flags[0]
    assert {"--tensor-parallel-size", "--gpu-memory-utilization", "--max-num-seqs"} <= {
        name for name, _ in other.flags
    }


def test_routes_of_a_plan_are_written_out_to_devices(plan: PlacementPlan):
    (route,) = plan.weight_routes
    assert (route.source, route.node, route.after) == ("actor", "actor.generate", "actor.sync")
    small = replace(QWEN25_7B, num_layers=4)
    if 4 % route.source_layout.pp:
        pytest.skip("the plan has more stages than the small model layers")
    moved = Counter[str]()
    for _, there, transfer in expand_plan_route(plan, route, small):
        moved[there] += transfer.elements
    generate = plan.operation("actor.generate")
    assert set(moved) == set(generate.devices)
    # Norms, and key heads that are copied, are whole on every rank.
    assert min(moved.values()) >= small.parameters.total // generate.layout.tp


def test_a_plan_fills_no_more_of_its_devices_than_it_may(grpo: Graph):
    peaks = {}
    for share in (0.5, 0.9):
        changed = replace(request(), options=options(memory_share=share))
        plan = make_plan(grpo, changed, h100(8))
        (device,) = {plan.pool.device(one.device).name for one in plan.prediction.memory}
        whole = device_spec(device).memory_bytes
        peaks[share] = max(entry.memory.total for entry in plan.prediction.memory)
        assert peaks[share] <= share * whole
        assert f"(usable: {100 * share:.0f} % of 79.1 GiB)" in plan_text(plan)
    assert peaks[0.5] < peaks[0.9]


def two_kinds(slow: int, fast: int) -> ResourcePool:
    """Nodes of A100 and of H100."""
    others = pool_of_devices(device_spec("A100-SXM-80GB"), slow)
    nodes = tuple(replace(node, name=f"slow-{i}") for i, node in enumerate(others.nodes))
    return ResourcePool(nodes=(*nodes, *h100(fast).nodes))


def test_rollouts_and_training_may_be_on_two_kinds_of_devices(grpo: Graph):
    plan = make_plan(grpo, request(), two_kinds(8, 4))
    alone = make_plan(grpo, request(), h100(4))
    assert plan.prediction.step_s is not None
    assert alone.prediction.step_s is not None
    assert plan.prediction.step_s < alone.prediction.step_s
    names = {
        node: {plan.pool.device(device).name for device in plan.operation(node).devices}
        for node in ("actor.generate", "reference.logprobs", "actor.update")
    }
    assert all(len(kinds) == 1 for kinds in names.values())
    assert names["actor.generate"] != names["actor.update"]
    for entry in plan.prediction.memory:
        assert entry.memory.total <= plan.pool.device(entry.device).budget_bytes
    assert PlacementPlan.from_json(plan.to_json()) == plan
    assert plan.reasons[0].subject == "devices"
    rejected = [one.choice for one in plan.reasons[0].rejected]
    assert any(choice.startswith("4 x H100-SXM-80GB") for choice in rejected)


def test_pinned_devices_choose_the_kind_and_are_numbered_in_the_whole_cluster(grpo: Graph):
    asked = pinned(request(), "rollout.devices=8-15", "actor.devices=8-15")
    plan = make_plan(grpo, asked, two_kinds(8, 8))
    assert plan.operation("actor.update").devices == tuple(f"node-0/cuda:{i}" for i in range(8))
    assert plan.reasons[0].choice.startswith("8 x H100-SXM-80GB")
    mixed = pinned(request(), "rollout.devices=4-11")
    with pytest.raises(PlanError, match="on devices of several kinds") as caught:
        make_plan(grpo, mixed, two_kinds(8, 8))
    assert "4-7 are A100-SXM-80GB, 8-11 are H100-SXM-80GB" in str(caught.value)


@pytest.mark.parametrize("drawing", ["0-7", "8-15"])
def test_pinned_devices_may_be_of_two_kinds_rollouts_on_one_and_training_on_the_other(
    grpo: Graph, drawing: str
):
    training = "8-15" if drawing == "0-7" else "0-7"
    asked = pinned(request(), f"rollout.devices={drawing}", f"actor.devices={training}")
    plan = make_plan(grpo, asked, two_kinds(8, 8))
    name = {"0-7": "A100-SXM-80GB", "8-15": "H100-SXM-80GB"}
    for node, numbers in (("actor.generate", drawing), ("actor.update", training)):
        kinds = {plan.pool.device(device).name for device in plan.operation(node).devices}
        assert kinds == {name[numbers]}
        assert len(plan.operation(node).devices) == 8
    assert [pin.value for pin in plan.pins] == [drawing, training]


def test_a_pin_on_one_part_of_a_mixed_cluster_leaves_plans_over_both_kinds(grpo: Graph):
    best = make_plan(grpo, request(), two_kinds(8, 8))
    devices = best.operation("actor.generate").devices
    first = int(devices[0].rpartition(":")[2]) + (0 if devices[0].startswith("slow") else 8)
    asked = pinned(request(), f"rollout.devices={first}-{first + len(devices) - 1}")
    plan = make_plan(grpo, asked, two_kinds(8, 8))
    assert plan.prediction.step_s == best.prediction.step_s
    assert plan.operation("actor.generate").devices == devices


def test_what_does_not_fit_names_its_parts_and_a_pool_on_which_it_fits(grpo: Graph):
    big = replace(
        QWEN25_7B,
        num_layers=80,
        hidden_size=16384,
        num_heads=128,
        num_kv_heads=8,
        intermediate_size=53248,
    )
    with pytest.raises(PlanError) as caught:
        make_plan(grpo, request(big), h100(8))
    said = str(caught.value)
    assert "parameters" in said
    assert "of 71.2 GiB" in said
    number = int(said.partition("take ")[2].partition(" devices")[0])
    assert number > 8
    asked = replace(request(big), roles=request(big).roles)
    assert make_plan(grpo, asked, h100(4 * number)).prediction.step_s is not None


def test_the_fewest_devices_fit_and_fewer_do_not(grpo: Graph):
    spec, cost = device_spec("A100-SXM-80GB"), AnalyticCost()
    big = replace(QWEN25_7B, num_layers=80, hidden_size=8192, num_heads=64, num_kv_heads=8)
    asked = request(replace(big, intermediate_size=28672))
    job = Job(graph=grpo, request=asked, spec=spec, cost=cost)
    least = fewest(job)
    assert 4 <= least.devices <= 32
    fits, halved = sizes(job, [least.devices, least.devices // 2])
    assert fits == least
    assert halved == least.devices // 2


def test_more_devices_never_take_longer(grpo: Graph):
    spec, cost = device_spec("H100-SXM-80GB"), AnalyticCost()
    job = Job(graph=grpo, request=request(), spec=spec, cost=cost)
    found = sizes(job, [8, 16, 32, 64])
    seconds = [one.step_s for one in found if not isinstance(one, int)]
    assert len(seconds) == 4
    assert seconds == sorted(seconds, reverse=True)


def test_the_difference_of_two_plans_is_told(grpo: Graph, plan: PlacementPlan):
    assert diff_plans(plan, plan) == ()
    other = make_plan(grpo, pinned(request(), "rollout.tp=1"), h100(8))
    lines = diff_plans(plan, other)
    assert "devices: 16 x H100-SXM-80GB -> 8 x H100-SXM-80GB" in lines
    assert "pinned: - -> rollout.tp=1" in lines
    assert any(line.startswith("actor.generate layout: ") for line in lines)
    assert any(line.startswith("step: ") for line in lines)


@pytest.mark.parametrize(
    ("addresses", "shown"),
    [
        (["cpu:0"], "cpu:0"),
        (["cuda:0", "cuda:1", "cuda:3"], "cuda:[0-1,3]"),
        ([f"a-{i}/cuda:{j}" for i in (0, 1, 2) for j in range(8)], "a-[0-2]/cuda:[0-7]"),
        (["a-0/cuda:0", "a-1/cuda:0", "a-1/cuda:1"], "a-0/cuda:0, a-1/cuda:[0-1]"),
        ([], ""),
    ],
)
def test_many_devices_have_a_short_name(addresses: list[str], shown: str):
    assert device_names(addresses) == shown


def test_two_cpus_are_planned_for_with_what_runs_on_them(grpo: Graph):
    pool = split_cpus(
        ResourcePool(nodes=(replace(h100(1).nodes[0], devices=h100(1).nodes[0].devices[:1]),)), 2
    )
    small = replace(QWEN25_7B, num_layers=2, hidden_size=64, vocab_size=512, intermediate_size=128)
    small = replace(small, num_heads=4, head_dim=16)
    together = make_plan(grpo, request(small), pool)
    assert together.operation("actor.update").layout.num_devices == 1
    assert together.operation("actor.update").library == ""
    assert together.engine_flags == ()
    assert not any("cannot run here" in note for note in together.notes)
    (route,) = together.weight_routes
    if together.operation("actor.generate").devices == together.operation("actor.update").devices:
        assert route.transport == "in_place"
    pinned_apart = pinned(request(small, max_staleness=1), "rollout.devices=1", "actor.devices=0")
    apart = make_plan(grpo, pinned_apart, pool)
    assert apart.kind == "asynchronous"
    assert apart.operation("actor.generate").devices == ("cpu:1",)
    assert apart.operation("actor.update").devices == ("cpu:0",)
