"""Several updates of a role: one trainer does them, wherever and however a plan has it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import flowrl as fl
from flowrl.cluster.pool import ResourcePool
from flowrl.cost.analytic import AnalyticCost
from flowrl.errors import PlanError
from flowrl.graph import Graph
from flowrl.plan import PlacementPlan, PlanRequest, make_plan
from flowrl.plan.many_form import ScheduleStep
from flowrl.plan.priced.anew import priced
from flowrl.plan.search import leaves
from flowrl.plan.show.plan import plan_text
from flowrl.plan.ways.layouts import LayoutRules, why_none
from flowrl.plan.ways.tasks import tasks_of
from flowrl.plan.write.held import held_memory
from flowrl.sim.rollouts_of_plan import waits_for
from tests.plan.many_cases import QWEN25_7B, h100, pinned, request, searched
from tests.plan.test_mixed import cluster
from tests.plan.workflows import lowered

Change = Callable[[dict[str, Any]], object]

BOTH = ("actor.update", "actor.update.2")


@fl.workflow
def twice(prompts: fl.Prompts, actor: fl.Policy, reference: fl.Policy, verifier: fl.Reward) -> None:
    """The first update waits for a reference, the second one for scores alone."""
    rollout = actor.generate(prompts, n=8)
    scores = verifier.score(rollout)
    best, _ = fl.select.top(rollout, scores, k=3)
    actor.update(
        rollout,
        advantages=fl.advantage.leave_one_out(scores),
        reference=reference.logprobs(rollout),
        loss=fl.loss.cispo(1.0, 0.2),
        kl=fl.kl.k3(0.01),
    )
    actor.update(best, loss=fl.loss.cross_entropy())


@pytest.fixture(scope="module")
def graph() -> Graph:
    return lowered(twice, mini_batches=4)


@pytest.fixture(scope="module")
def plan(graph: Graph) -> PlacementPlan:
    return make_plan(graph, request(), h100(16))


def layout_of(plan: PlacementPlan, node: str) -> object:
    one = plan.operation(node)
    return (one.devices, one.layout, one.recompute, one.offload, one.micro_tokens)


def around(step: ScheduleStep, nodes: tuple[str, ...]) -> ScheduleStep:
    """The smallest step of a schedule that runs some operations."""
    inner = [part for part in step.parts if set(nodes) <= set(part.nodes())]
    return around(inner[0], nodes) if inner else step


@pytest.mark.parametrize(
    ("pool", "changes"),
    [
        (h100(2), {}),
        (h100(8), {}),
        (h100(24), {}),
        (h100(16), {"kind": "spatial"}),
        (h100(16), {"kind": "temporal"}),
        (h100(16), {"max_staleness": 1}),
        (h100(16), {"max_staleness": 2, "kind": "asynchronous"}),
        (h100(16), {"objective": "device_time"}),
        (h100(16), {"trainer": "fsdp"}),
        (cluster(16, 8), {}),
        (cluster(8, 16), {"max_staleness": 1}),
    ],
)
def test_updates_of_a_role_are_on_the_same_devices_in_the_same_form_in_turn(
    graph: Graph, pool: ResourcePool, changes: dict[str, Any]
) -> None:
    plan = make_plan(graph, request(alternatives=3, **changes), pool)
    assert layout_of(plan, BOTH[0]) == layout_of(plan, BOTH[1])
    kept = [plan.schedule, *(one.schedule for one in plan.alternatives)]
    for schedule in kept:
        assert schedule is not None
        both = around(schedule, BOTH)
        assert (both.kind, both.nodes()) == ("temporal", BOTH)
    assert PlacementPlan.from_json(plan.to_json()) == plan
    first, second = (
        next(span for span in plan.prediction.timeline or () if span.node == node) for node in BOTH
    )
    assert first.end_s == pytest.approx(second.begin_s)


def test_a_trainer_holds_no_more_for_its_second_update(graph: Graph) -> None:
    """Against the same step without it, in the layout that it has."""
    wanted = pinned(
        request(), "actor.update.tp=2", "actor.update.pp=1", "actor.update.offload=none"
    )
    once = lowered(only_once, mini_batches=4)
    held = []
    for program in (once, graph):
        best = searched(program, wanted, h100(16)).best
        way = best.ways["actor.update"]
        memory = next(one.memory for one in held_memory(best) if one.memory.phase == "update")
        kept = ("parameters", "master weights", "optimizer", "gradients")
        held.append(
            (
                way.layout,
                sum(p.nbytes for p in memory.parts if p.role == "actor" and p.name in kept),
            )
        )
    assert held[0] == held[1]


@fl.workflow
def only_once(
    prompts: fl.Prompts, actor: fl.Policy, reference: fl.Policy, verifier: fl.Reward
) -> None:
    rollout = actor.generate(prompts, n=8)
    actor.update(
        rollout,
        advantages=fl.advantage.leave_one_out(verifier.score(rollout)),
        reference=reference.logprobs(rollout),
        loss=fl.loss.cispo(1.0, 0.2),
        kl=fl.kl.k3(0.01),
    )


def test_what_both_take_is_told_of_each_and_decides_the_layout(graph: Graph) -> None:
    """64 prompts x 8 are 512 samples, in 4 updates of 128; the best 3 of 8 are 192, in 4 of 48."""
    (trainer,) = (task for task in tasks_of(graph, request()) if task.updates)
    assert [(one.node, one.samples, one.rows) for one in trainer.updated] == [
        ("actor.update", 512, 128),
        ("actor.update.2", 192, 48),
    ]
    assert trainer.even_rows == 16  # of 128 and 48
    found = searched(graph, request(), h100(16))
    posed = found.posed
    made, cost = posed.candidates, AnalyticCost()
    for option in posed.problem.task("actor.update").options:
        way = posed.candidate("actor.update", option)
        assert 16 % way.layout.dp == 0
        alone = [
            cost.train(
                trainer.shape,
                way.layout,
                made.machine,
                samples=samples,
                prompt_tokens=200.0,
                lengths=made.options.lengths,
                mini_batches=4,
                micro_tokens=way.micro_tokens,
                recompute=way.recompute,
                shard=trainer.library.shard,
                offload_optimizer="optimizer" in way.offload,
            ).seconds
            for samples in (512, 192)
        ]
        assert option.seconds == pytest.approx(sum(alone) + way.move_s)
    assert {leaf.task for leaf in leaves(found.best.schedule)} == {
        "actor.generate",
        "reference.logprobs",
        "actor.update",
    }


def test_the_seconds_of_operations_add_up_to_the_trainers(graph: Graph) -> None:
    """Whose way from the host begins the first and ends the last."""
    wanted = pinned(request(), "actor.update.offload=all")
    best = searched(graph, wanted, h100(8)).best
    plan = make_plan(graph, wanted, h100(8))
    way, (one, two) = best.ways["actor.update"], map(plan.operation, BOTH)
    assert one.seconds is not None
    assert two.seconds is not None
    assert one.seconds + two.seconds == pytest.approx(way.seconds)
    assert one.move_s == two.move_s == pytest.approx(way.move_s / 2)
    assert way.move_s > 0
    told = {source.node: source.seconds for source in plan.prediction.confidence}
    assert told[BOTH[0]] == one.seconds
    assert told[BOTH[1]] == two.seconds


@fl.workflow
def in_a_loop(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward) -> None:
    """Three updates, of the best 2, 4 and 6 of 8."""
    rollout = actor.generate(prompts, n=8)
    scores = verifier.score(rollout)
    for k in (2, 4, 6):
        best, _ = fl.select.top(rollout, scores, k=k)
        actor.update(best, loss=fl.loss.cross_entropy())


def test_three_updates_of_a_loop_are_in_the_order_of_the_program() -> None:
    """The way from the host begins the first and ends the last; 32, 64 and 96 rows share 32."""
    program, wanted = lowered(in_a_loop, mini_batches=4), pinned(request(), "update.offload=all")
    nodes = ("actor.update", "actor.update.2", "actor.update.3")
    plan = make_plan(program, wanted, h100(24))
    assert plan.schedule is not None
    assert plan.schedule.nodes()[-3:] == nodes
    first, middle, last = map(plan.operation, nodes)
    assert middle.move_s == 0.0
    assert first.move_s == last.move_s > 0.0
    assert len({layout_of(plan, node) for node in nodes}) == 1
    assert 32 % first.layout.dp == 0
    (trainer,) = (task for task in tasks_of(program, wanted) if task.updates)
    assert trainer.even_rows == 32
    assert priced(program, wanted, plan, AnalyticCost()) == plan


def test_new_weights_leave_after_the_last_update(graph: Graph, plan: PlacementPlan) -> None:
    assert {route.after for route in plan.weight_routes} == {"actor.sync"}
    assert plan.operation("actor.sync").after == ("actor.update.2",)


@fl.workflow
def with_old_logprobs(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward) -> None:
    rollout = actor.generate(prompts, n=8)
    scores = verifier.score(rollout)
    best, _ = fl.select.top(rollout, scores, k=4)
    actor.update(
        rollout,
        advantages=fl.advantage.leave_one_out(scores),
        loss=fl.loss.policy_clip(0.2, anchor="old"),
    )
    actor.update(best, loss=fl.loss.cross_entropy())


def test_a_trained_roles_own_logprobs_get_the_weights_of_its_last_update() -> None:
    """They may have another layout than its trainer; in the same one they read its weights."""
    program = lowered(with_old_logprobs, mini_batches=4)
    apart = make_plan(
        program, pinned(request(), "actor.logprobs.tp=2", "actor.update.tp=4"), h100(8)
    )
    (route,) = (one for one in apart.weight_routes if one.node == "actor.logprobs")
    assert route.after == "actor.update.2"
    assert (route.source_layout.tp, route.destination_layout.tp) == (4, 2)
    wanted = pinned(request(), *(f"actor.{name}.tp=2" for name in ("logprobs", "update")))
    alike = make_plan(program, wanted, h100(8))
    one, other = map(alike.operation, ("actor.logprobs", "actor.update"))
    assert (one.devices, one.layout.pp) == (other.devices, other.layout.pp)
    assert all(route.node != "actor.logprobs" for route in alike.weight_routes)


def test_a_pin_on_one_update_is_one_on_the_trainer(graph: Graph) -> None:
    plan = make_plan(graph, pinned(request(), "actor.update.2.tp=4"), h100(16))
    assert [plan.operation(node).layout.tp for node in BOTH] == [4, 4]
    assert plan.pins[0].nodes == BOTH
    by_op = make_plan(graph, pinned(request(), "update.tp=4"), h100(16))
    assert by_op.pins[0].nodes == BOTH


def test_pins_on_two_updates_that_contradict_each_other_are_named(graph: Graph) -> None:
    wanted = pinned(request(), "actor.update.tp=2", "actor.update.2.tp=4")
    with pytest.raises(PlanError) as caught:
        make_plan(graph, wanted, h100(16))
    assert "actor.update.tp=2 and actor.update.2.tp=4 contradict each other" in caught.value.what


def test_a_plan_that_nobody_edited_is_priced_as_the_planner_did(
    graph: Graph, plan: PlacementPlan
) -> None:
    assert priced(graph, request(), plan, AnalyticCost()) == plan


def test_an_edited_recomputation_of_both_is_priced(graph: Graph, plan: PlacementPlan) -> None:
    raw = json.loads(plan.to_json())
    for one in raw["operations"]:
        if one["op"] == "update":
            one["recompute"] = "full"
    edited = PlacementPlan.from_json(json.dumps(raw))
    new = priced(graph, request(), edited, AnalyticCost())
    for node in BOTH:
        assert (new.operation(node).seconds or 0) > (plan.operation(node).seconds or 0)
    assert (new.prediction.step_s or 0) > (plan.prediction.step_s or 0)


def operation(raw: dict[str, Any], node: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in raw["operations"] if one["node"] == node)
    return found


def other_layout(raw: dict[str, Any]) -> None:
    """The second update divided over as many devices, with twice as many replicas or half."""
    last = operation(raw, BOTH[1])
    layout = last["layout"]
    if layout["dp"] % 2:
        (split, size), *_ = (one for one in layout.items() if one[1] % 2 == 0)
        layout |= {"dp": 2 * layout["dp"], split: size // 2}
    else:
        layout |= {"dp": layout["dp"] // 2, "tp": 2 * layout["tp"]}
    last["replicas"] = layout["dp"]


def swapped(raw: dict[str, Any]) -> None:
    """The second update first."""
    names = dict(zip(BOTH, reversed(BOTH), strict=True))
    waiting = [raw["schedule"]]
    while waiting:
        step = waiting.pop()
        step["node"] = names.get(step["node"], step["node"])
        waiting += step["parts"]


def torn_apart(raw: dict[str, Any]) -> None:
    """The second update before the reference."""

    def without(step: dict[str, Any]) -> dict[str, Any]:
        if step["node"] is not None:
            return step
        kept = [part for part in step["parts"] if part["node"] != BOTH[1]]
        if len(kept) == 1:
            return without(kept[0])
        return {**step, "parts": [without(part) for part in kept]}

    rest, devices = without(raw["schedule"]), raw["schedule"]["devices"]
    last = operation(raw, BOTH[1])
    leaf = {"kind": "run", "devices": len(last["devices"]), "node": BOTH[1], "chunks": 1}
    raw["schedule"] = {
        "kind": "temporal",
        "devices": devices,
        "node": None,
        "chunks": 1,
        "ready": [],
        "parts": [{**leaf, "ready": [], "parts": []}, rest],
    }


@pytest.mark.parametrize(
    ("change", "where", "what"),
    [
        (
            lambda raw: operation(raw, BOTH[1]).update(recompute="full"),
            ".recompute",
            "actor.update and actor.update.2 are one trainer's",
        ),
        (
            lambda raw: operation(raw, BOTH[1]).update(micro_tokens=10 * 2560),
            ".micro_tokens",
            "actor.update and actor.update.2 are one trainer's",
        ),
        (
            lambda raw: operation(raw, BOTH[1]).update(offload=["all"]),
            ".offload",
            "actor.update and actor.update.2 are one trainer's",
        ),
        (
            lambda raw: operation(raw, BOTH[1])["devices"].reverse(),
            ".devices",
            "actor.update and actor.update.2 are one trainer's",
        ),
        (
            other_layout,
            ".layout",
            "actor.update and actor.update.2 are one trainer's",
        ),
        (swapped, "schedule", "follow each other in the order of the program"),
        (torn_apart, "schedule", "follow each other in the order of the program"),
    ],
)
def test_a_file_that_makes_two_trainers_of_one_is_refused(
    plan: PlacementPlan, change: Change, where: str, what: str
) -> None:
    raw = json.loads(plan.to_json())
    change(raw)
    with pytest.raises(PlanError) as caught:
        PlacementPlan.from_json(json.dumps(raw))
    assert where in str(caught.value.where)
    assert what in caught.value.what


def test_a_schedule_that_lacks_one_of_two_updates_is_told_so(plan: PlacementPlan) -> None:
    raw = json.loads(plan.to_json().replace(f'"node": "{BOTH[1]}"', '"node": "actor.other"'))
    for one in raw["operations"]:
        one["node"] = one["node"].replace("actor.other", BOTH[1])
    with pytest.raises(PlanError, match="runs what is no operation"):
        PlacementPlan.from_json(json.dumps(raw))


def test_updates_of_two_roles_are_two_trainers(graph: Graph) -> None:
    ppo = lowered(two_policies, mini_batches=4)
    plan = make_plan(ppo, with_second_policy(request()), h100(16))
    assert plan.schedule is not None
    assert {"actor.update", "second.update"} <= set(plan.schedule.nodes())


@fl.workflow
def two_policies(
    prompts: fl.Prompts, actor: fl.Policy, second: fl.Policy, verifier: fl.Reward
) -> None:
    rollout = actor.generate(prompts, n=8)
    best, _ = fl.select.top(rollout, verifier.score(rollout), k=4)
    actor.update(best, loss=fl.loss.cross_entropy())
    second.update(best, loss=fl.loss.cross_entropy())
    actor.update(rollout, loss=fl.loss.cross_entropy())


def with_second_policy(asked: PlanRequest) -> PlanRequest:
    actor = asked.role("actor")
    return replace(asked, roles=(*asked.roles, replace(actor, name="second")))


def test_the_simulator_does_the_updates_in_the_order_of_the_program(plan: PlacementPlan) -> None:
    """Though the second one's samples are there first: it reads no reference."""
    names = {operation.node for operation in plan.operations}
    second = plan.operation("actor.update.2")
    assert "actor.update" not in second.after
    assert "actor.update" in waits_for(second, plan, names)
    assert "actor.update.2" not in waits_for(plan.operation("actor.update"), plan, names)
    logprobs = plan.operation("reference.logprobs")
    assert waits_for(logprobs, plan, names) == logprobs.after


def test_a_plan_says_that_one_trainer_does_both(plan: PlacementPlan) -> None:
    text = plan_text(plan, explain=True)
    assert "one trainer does actor.update and actor.update.2, one after the other" in text
    heads = [line.split() for line in text.splitlines()]
    assert ["actor", "rollout", "reference", "logprobs", "actor", "update"] in heads


def test_several_operations_of_a_role_in_one_phase_have_columns_by_their_names() -> None:
    plan = make_plan(lowered(two_draws, mini_batches=4), request(kind="temporal"), h100(8))
    heads = [line.split() for line in plan_text(plan).splitlines()]
    assert ["actor.generate", "actor.generate.2", "actor", "update"] in heads


@fl.workflow
def two_draws(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward) -> None:
    rollout = actor.generate(prompts, n=8)
    greedy = actor.generate(prompts, n=1, temperature=0.0)
    fl.log("greedy", verifier.score(greedy))
    best, _ = fl.select.top(rollout, verifier.score(rollout), k=4)
    actor.update(best, loss=fl.loss.cross_entropy())


@pytest.mark.parametrize(
    ("devices", "rows", "said"),
    [
        # 24 devices: tp 1, 2, 4 and cp, pp of 1, 2, 4, 7, 14 leave a factor of 3.
        (24, 512, "dp 3, 6, 12 or 24, whatever else is divided, and none of these divides 512"),
        (96, 512, "dp 3, 6, 12, 24, 48 or 96, whatever else is divided, and none of these"),
        (192, 512, "dp 3, 6, 12, 24, 48, 96 and so on to 192, whatever else is divided"),
        (5, 4, "dp 5, where dp=5 does not divide 4 samples of an update"),
    ],
)
def test_a_number_of_devices_without_layout_is_refused_with_all_that_is_left_of_it(
    devices: int, rows: int, said: str
) -> None:
    kinds = frozenset({"tp", "pp", "dp", "cp"})
    rules = LayoutRules(kinds=kinds, node_size=8, rows=rows, samples=2048, kv_copies=False)
    why = why_none(QWEN25_7B, devices, rules)
    assert why is not None
    assert why.startswith(said)


@fl.workflow
def twice_scored(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward) -> None:
    """Its logprobs are computed again before the update."""
    rollout = actor.generate(prompts, n=8)
    scores = verifier.score(rollout)
    old = actor.logprobs(rollout)
    actor.update(
        rollout,
        advantages=fl.advantage.leave_one_out(scores),
        reference=old,
        loss=fl.loss.policy_clip(),
        kl=fl.kl.k3(0.01),
    )


def test_copies_of_a_roles_weights_have_names_of_their_own() -> None:
    wanted = pinned(
        request(),
        *("rollout.tp=4", "actor.update.tp=2", "actor.update.pp=1", "actor.update.offload=none"),
        *("actor.logprobs.tp=1", "actor.logprobs.pp=4"),
    )
    best = searched(lowered(twice_scored, mini_batches=4), wanted, h100(8)).best
    whole = 2 * QWEN25_7B.parameters.total
    for entry in held_memory(best):
        parts = {part.name: part.nbytes for part in entry.memory.parts if part.role == "actor"}
        assert len(parts) == sum(part.role == "actor" for part in entry.memory.parts)
        assert parts["parameters"] == pytest.approx(whole / 2, rel=0.01)
        draws = entry.memory.phase == "rollout"
        assert parts.get("engine weights", 0) == pytest.approx(draws * whole / 4, rel=0.01)
        scores = entry.memory.phase == "logprobs"
        if scores or "copy for logprobs" in parts:  # its fullest stage has a table too
            assert whole / 4 < parts["copy for logprobs"] < whole / 3


def versions(*, between: bool) -> Graph:
    """A program that reads the new weights after both updates, or between them."""

    @fl.workflow
    def program(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward) -> None:
        rollout = actor.generate(prompts, n=8)
        scores = verifier.score(rollout)
        first = actor.update(rollout, scores)
        if between:
            fl.log("between", first.logprobs(rollout))
        second = first.update(rollout, loss=fl.loss.cross_entropy())
        if not between:
            fl.log("after", second.logprobs(rollout))

    return lowered(program, mini_batches=4)


def test_what_reads_new_weights_waits_for_the_trainer() -> None:
    graph = versions(between=False)
    (forward,) = [t for t in tasks_of(graph, request()) if t.id == "actor.logprobs"]
    assert set(forward.after) == {"actor.generate", "actor.update"}
    plan = make_plan(graph, request(), h100(8))
    spans = {span.node: span for span in plan.prediction.timeline or ()}
    assert spans["actor.logprobs"].begin_s >= spans["actor.update.2"].end_s
    assert not [c for c in plan.channels if "weights" in c.fields]


@pytest.mark.parametrize("pool", [h100(8), h100(24), cluster(8, 16)])
def test_a_forward_pass_between_two_updates_is_made_by_the_trainer_between_them(
    pool: ResourcePool,
) -> None:
    graph = versions(between=True)
    (trainer,) = [task for task in tasks_of(graph, request()) if task.updates]
    assert trainer.operations == ("actor.update", "actor.logprobs", "actor.update.2")
    plan = make_plan(graph, request(), pool)
    first, forward, second = map(plan.operation, trainer.operations)
    assert layout_of(plan, first.node) == layout_of(plan, forward.node)
    assert plan.schedule is not None
    assert around(plan.schedule, trainer.operations).nodes() == trainer.operations
    spans = {span.node: span for span in plan.prediction.timeline or ()}
    begins = [spans[node].begin_s for node in trainer.operations[1:]]
    assert begins == pytest.approx([spans[node].end_s for node in trainer.operations[:2]])
    # As many samples as the first update has: a pass of its three, without the optimizer.
    assert (forward.seconds or 0) < 0.5 * (first.seconds or 0)
    assert all(route.node != forward.node for route in plan.weight_routes)
    assert PlacementPlan.from_json(plan.to_json()) == plan
    assert priced(graph, request(), plan, AnalyticCost()) == plan
    names = {operation.node for operation in plan.operations}
    assert forward.node in waits_for(second, plan, names)


def test_a_pass_of_another_role_between_two_updates_is_planned_for_one_device_only() -> None:
    @fl.workflow
    def program(
        prompts: fl.Prompts, actor: fl.Policy, second: fl.Policy, verifier: fl.Reward
    ) -> None:
        rollout = actor.generate(prompts, n=8)
        scores = verifier.score(rollout)
        first = actor.update(rollout, scores)
        learned = fl.advantage.distill(rollout, teacher=first.logprobs(rollout))
        taught = second.update(rollout, advantages=learned)
        first.update(
            rollout,
            advantages=fl.advantage.leave_one_out(scores),
            reference=taught.logprobs(rollout),
            kl=fl.kl.k3(0.01),
        )

    graph = lowered(program, mini_batches=4)
    with pytest.raises(
        PlanError, match="must run between what the trainer of actor does"
    ) as caught:
        make_plan(graph, with_second_policy(request()), h100(8))
    assert caught.value.found == "actor.update, actor.logprobs, actor.update.2"
