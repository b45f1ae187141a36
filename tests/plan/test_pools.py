"""Pools of any size: nodes with odd numbers of free devices, and one device with pins."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import flowrl as fl
from flowrl.cluster.hardware import device_spec
from flowrl.cluster.pool import ResourcePool
from flowrl.cost.analytic import AnalyticCost
from flowrl.errors import PlanError
from flowrl.graph import Graph
from flowrl.plan import load_plan, make_plan
from flowrl.plan.many import SIMPLE, GroupJob
from flowrl.plan.node_parts import even_parts
from flowrl.plan.posed_search import search_posed
from flowrl.plan.request import PlanRequest
from flowrl.plan.sizing import Job, Size, fewest, pool_of_devices, sizes
from flowrl.plan.ways.plain_ways import PLAIN
from tests.plan.many_cases import h100, pinned, posed_alone, request
from tests.plan.workflows import lowered
from tests.sizes import small_or_large


@fl.workflow
def drawn_twice(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
    samples = actor.generate(prompts, n=8)
    other = actor.generate(prompts, n=1, temperature=0.0)
    fl.log("greedy", verifier.score(other))
    best, _ = fl.select.top(samples, verifier.score(samples), k=1)
    actor.update(best, loss=fl.loss.cross_entropy())


SLACK = 1 + PLAIN + SIMPLE
"""What a plainer plan may take longer than the fastest."""


def with_free(*free: int) -> ResourcePool:
    """Nodes of eight H100 with so many of them free."""
    nodes = []
    for node, number in zip(h100(8 * len(free)).nodes, free, strict=True):
        host, *cards = node.devices
        kept = tuple(replace(card, reserved=i >= number) for i, card in enumerate(cards))
        nodes.append(replace(node, devices=(host, *kept)))
    return ResourcePool(nodes=tuple(nodes))


def pool_of(number: int) -> ResourcePool:
    whole, rest = divmod(number, 8)
    return with_free(*[8] * whole, *([rest] if rest else []))


def step_s(graph: Graph, pool: ResourcePool, **changes: object) -> float:
    plan = make_plan(graph, request(alternatives=0, **changes), pool)
    assert plan.prediction.step_s is not None
    return plan.prediction.step_s


@pytest.mark.parametrize(
    "numbers",
    small_or_large(
        [2, 3, 4, 7, 8, 9, 12, 16, 23, 24, 64],
        [2, 5, 6, 8, 11, 12, 13, 15, 16, 20, 25, 31, 32, 40, 48, 63, 64],
    ),
)
def test_a_larger_pool_is_never_slower_than_one_that_it_contains(grpo: Graph, numbers: list[int]):
    best = float("inf")
    for number in numbers:
        seconds = step_s(grpo, pool_of(number))
        assert seconds <= best * SLACK, number
        best = min(best, seconds)


def test_five_free_devices_of_each_node_are_used_as_four_where_that_is_faster(grpo: Graph):
    five, four = with_free(5, 5, 5, 5), with_free(4, 4, 4, 4)
    assert step_s(grpo, five) <= step_s(grpo, four) * SLACK
    assert [one.node_size for one in even_parts(five.groups())] == [4]
    # A node with one card less is no reason to leave the others' eighth idle, or to be left out.
    groups = with_free(8, 8, 7).groups()
    assert [one.node_size for one in groups] == [8, 7]
    assert [(one.node_size, len(one.addresses)) for one in even_parts(groups)] == [(7, 21), (4, 12)]


def test_a_job_that_minds_devices_more_than_time_takes_no_more_of_a_larger_pool(grpo: Graph):
    plans = [
        make_plan(grpo, request(alternatives=0, objective="device_time"), pool_of(number))
        for number in (8, 64)
    ]
    small, large = (plan.prediction.device_s or 0.0 for plan in plans)
    assert large <= small * SLACK


@pytest.mark.parametrize("kind", ["temporal", "spatial", "asynchronous"])
def test_a_kind_that_is_asked_for_is_the_kind_of_the_plan(grpo: Graph, kind: str):
    plan = make_plan(grpo, request(kind=kind, max_staleness=1), h100(16))
    assert plan.kind == kind


def test_nothing_runs_ahead_where_no_sample_may_be_stale(grpo: Graph):
    with pytest.raises(PlanError, match="no sample may be generated ahead") as caught:
        make_plan(grpo, request(kind="asynchronous"), h100(16))
    assert caught.value.hint is not None
    assert "train.max_staleness" in caught.value.hint


def test_disjoint_devices_far_from_the_best_plan_are_found(grpo: Graph):
    # Of hundreds of schedules with these numbers most do not stand there.
    asked = pinned(
        request(), "rollout.devices=0-15", "reference.devices=16-19", "actor.devices=24-31"
    )
    plan = make_plan(grpo, asked, h100(32))
    assert plan.operation("reference.logprobs").devices == tuple(
        f"node-2/cuda:{i}" for i in range(4)
    )
    assert plan.operation("actor.update").devices == tuple(f"node-3/cuda:{i}" for i in range(8))


# One device


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        (["rollout.tp=2"], "for one device, where tp is always 1"),
        (["actor.offload=all"], "for one device, where offload is always none"),
        (["actor.micro_tokens=4096"], "for one device, where micro_tokens follows from"),
        (["actor.devices=0-1"], "no device 1"),
        (["rollout.devices=0", "actor.devices=1"], "no device 1"),
        (["actor.recompute=selective"], "has no selective recompute"),
        (["critic.tp=1"], "nothing in the plan is called 'critic'"),
    ],
)
def test_pins_that_one_device_cannot_keep_are_refused(grpo: Graph, pins: list[str], said: str):
    with pytest.raises(PlanError) as caught:
        make_plan(grpo, pinned(request(), *pins), h100(1))
    assert said in str(caught.value)


def test_what_one_device_can_keep_is_kept_and_recorded(grpo: Graph, cases: Any):
    pool = cases.pool_of(cases.cpu(64))
    asked = pinned(cases.request_for(max_response_tokens=512), "rollout.tp=1", "actor.devices=0")
    plan = make_plan(grpo, asked, pool)
    assert [(pin.field, pin.value) for pin in plan.pins] == [("tp", "1"), ("devices", "0")]


def test_what_one_device_holds_only_with_its_host_is_planned_as_the_fewest_devices_are(grpo: Graph):
    """28 GiB each of master weights, gradients and parameters, and 57 of an optimizer: not all."""
    asked = request()
    plan = make_plan(grpo, asked, h100(1))
    assert plan.schedule is not None
    assert plan.schedule.devices == 1
    assert "optimizer" in plan.operation("actor.update").offload
    h100_spec = device_spec("H100-SXM-80GB")
    smallest = fewest(Job(graph=grpo, request=asked, spec=h100_spec, cost=AnalyticCost()))
    assert smallest.devices == 1
    assert plan.prediction.step_s == pytest.approx(smallest.step_s)


def test_a_host_that_is_too_small_for_one_device_is_told_what_it_lacks(grpo: Graph):
    pool = h100(1)
    (node,) = pool.nodes
    small = replace(node, memory_bytes=64 << 30)
    with pytest.raises(PlanError, match="only with more in the memory of its host") as told:
        make_plan(grpo, request(), replace(pool, nodes=(small,)))
    # Four fifths of 64 GiB. States of the optimizer and master weights: 12 bytes for each of 7.6
    # billion parameters are 85 GiB, and four fifths of 128 are 102.
    assert "found: 51.2 GiB of its host for each device" in str(told.value)
    assert "take hosts with 128 GiB of memory" in str(told.value)


def test_reserved_accelerators_are_why_nothing_fits(grpo: Graph):
    with pytest.raises(PlanError, match="all accelerators of the cluster are reserved") as told:
        make_plan(grpo, request(), with_free(0, 0))
    assert "take `reserved: true` off" in str(told.value)


def test_devices_of_unknown_speed_are_told_what_would_make_them_a_cluster(grpo: Graph):
    pool = h100(8)
    (node,) = pool.nodes
    cards = tuple(
        replace(one, name="FooChip", spec=None) if one.type == "cuda" else one
        for one in node.devices
    )
    with pytest.raises(PlanError) as told:
        make_plan(grpo, request(), replace(pool, nodes=(replace(node, devices=cards),)))
    assert "divide the models over all 8 FooChip" in str(told.value)
    assert "tflops, memory_tb_per_s" in str(told.value)


def test_engines_that_a_role_asks_for_are_replicas_of_its_rollouts(
    repository: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(repository)
    asked = ["cluster=configs/clusters/h100_1x8.yaml", "roles.actor.num_engines=2"]
    plan = fl.compile(None, "configs/grpo_qwen25_7b.yaml", overrides=asked).plan
    assert plan.operation("actor.generate").layout.dp == 2
    with pytest.raises(PlanError, match="contradict each other") as told:
        fl.compile(
            None, "configs/grpo_qwen25_7b.yaml", overrides=[*asked, "plan.pins.rollout.dp=4"]
        )
    assert "roles.actor.num_engines=2" in str(told.value)
    with pytest.raises(PlanError, match="dp=100 needs 100 devices, and there are 8") as told:
        fl.compile(
            None,
            "configs/grpo_qwen25_7b.yaml",
            overrides=[asked[0], "roles.actor.num_engines=100"],
        )
    assert told.value.found == "roles.actor.num_engines=100"
    hint = told.value.hint or ""
    assert re.fullmatch(
        r"set roles\.actor\.num_engines to \d or \d, or leave roles\.actor\.num_engines=100 out",
        hint,
    )


def test_pins_are_for_the_stages_that_have_what_they_name(
    repository: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(repository)
    pins = ["plan.pins.rollout.tp=1", "plan.pins.actor.devices=0"]
    stages = fl.compile(None, "configs/quickstart.yaml", overrides=pins).stages
    assert [[pin.subject for pin in stage.plan.pins] for stage in stages] == [
        ["actor"],
        ["rollout", "actor"],
    ]
    with pytest.raises(PlanError, match="nothing in the plan is called 'critic'"):
        fl.compile(None, "configs/quickstart.yaml", overrides=["plan.pins.critic.tp=1"])


def test_edits_of_one_of_two_places_name_the_other(grpo: Graph, tmp_path: Path):
    plan = make_plan(grpo, request(), h100(8))
    number = [one.node for one in plan.operations].index("actor.generate")

    def read(*changes: tuple[str, str, int]) -> None:
        """A file with `operations|placements|weight_routes.N.KEY` at other values."""
        raw = plan.to_dict()
        for part, key, value in changes:
            node = raw
            for step in part.split("."):
                node = node[int(step) if step.isdecimal() else step]
            node[key] = value
        path = tmp_path / "edited.plan.json"
        path.write_text(json.dumps(raw))
        load_plan(path)

    for place, key in (("placements.0", "num_slots"), (f"operations.{number}", "chunk")):
        with pytest.raises(PlanError, match="decodes at once are said differently") as told:
            read((place, key, 16))
        assert f"{place}.{key}=16" in str(told.value)
    with pytest.raises(PlanError, match=r"by another layout than actor\.generate has"):
        read(("weight_routes.0.destination_layout", "tp", 2))


def test_several_rollouts_are_not_offered_ahead() -> None:
    graph = lowered(drawn_twice)
    stale = request(max_staleness=1, alternatives=3)
    plan, same_step = (make_plan(graph, one, h100(16)) for one in (stale, request(alternatives=3)))
    assert plan.prediction.step_s == same_step.prediction.step_s
    assert "asynchronous" not in {plan.kind, *(one.kind for one in plan.alternatives)}
    assert any(
        note.startswith(
            "plans of many devices have a single rollout run ahead of the trainer, and here are 2, "
        )
        for note in plan.notes
    )
    with pytest.raises(PlanError, match="plans of many devices have a single rollout run ahead"):
        make_plan(graph, request(kind="asynchronous", max_staleness=1), h100(16))


@pytest.mark.parametrize("number", [8, 32])
def test_a_kind_for_fresh_samples_takes_no_longer_where_they_may_be_stale(
    grpo: Graph, number: int
) -> None:
    for kind in ("temporal", "spatial"):
        fresh, stale = (step_s(grpo, h100(number), kind=kind, max_staleness=old) for old in (0, 2))
        assert stale <= fresh * (1 + 1e-9)


def as_job(graph: Graph, asked: PlanRequest) -> Job:
    spec = device_spec("H100-SXM-80GB")
    return Job(graph=graph, request=asked, spec=spec, cost=AnalyticCost())


def test_a_sweep_tells_of_each_number_of_devices_what_its_plan_takes(grpo: Graph):
    plainer = False
    for staleness, number in product((0, 1), (4, 8, 32)):
        asked = request(max_staleness=staleness, alternatives=0)
        plan = make_plan(grpo, asked, h100(number))
        (size,) = sizes(as_job(grpo, asked), [number])
        assert isinstance(size, Size)
        told = (plan.prediction.step_s, plan.prediction.device_s, plan.prediction.idle_share)
        assert (size.step_s, size.device_s, size.idle_share) == pytest.approx(told, rel=1e-12)
        assert size.kind == plan.kind
        layouts = {one.node: one.layout.describe() for one in plan.operations}
        assert all(layouts[node] == layout for node, layout in size.layouts)
        best = search_posed(posed_alone(as_job(grpo, asked), number)).best[0]
        plainer |= best.evaluation.step_s < 0.999 * size.step_s
    assert plainer  # in one of them at least, the fastest ways are not the plan's


def test_what_would_help_is_looked_for_only_where_nothing_has_a_plan(
    grpo: Graph, monkeypatch: pytest.MonkeyPatch
):
    """On the small cards it does not fit, whatever the large ones do."""
    tried: list[GroupJob] = []
    has_plan = GroupJob.has_plan

    def counted(job: GroupJob) -> bool:
        tried.append(job)
        return has_plan(job)

    monkeypatch.setattr(GroupJob, "has_plan", counted)
    small = pool_of_devices(replace(device_spec("A100-SXM-80GB"), memory_bytes=8 << 30), 2)
    large = h100(8)
    nodes = [replace(node, name=name) for name, (node,) in (("a", small.nodes), ("b", large.nodes))]
    plan = make_plan(grpo, request(), replace(large, nodes=tuple(nodes)))
    used = plan.operation("actor.update").devices
    assert {address.split("/")[0] for address in used} == {"b"}
    (told,) = (one for one in plan.reasons if one.subject == "devices")
    assert any("does not fit" in one.constraint for one in told.rejected)
    assert not tried
    with pytest.raises(PlanError) as caught:
        make_plan(grpo, request(), replace(large, nodes=(nodes[0],)))
    assert tried
    assert caught.value.hint
