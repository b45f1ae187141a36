"""Engines, some of whose devices have other work too: flags, words and numbers say it as it is."""

from __future__ import annotations

import re

import pytest

from flowrl.graph import Graph
from flowrl.plan import PlacementPlan, make_plan
from flowrl.plan.names import device_names
from flowrl.plan.show.plan import plan_text
from tests.plan.many_cases import h100, pinned, request

SWITCH = {"sglang": "--enable-memory-saver", "vllm": "--enable-sleep-mode"}


def sleeps(plan: PlacementPlan) -> bool:
    (flags,) = plan.engine_flags
    return SWITCH[flags.engine] in dict(flags.flags)


def numbers(first: int, last: int) -> str:
    return device_names([f"node{n // 8}/cuda:{n % 8}" for n in range(first, last + 1)])


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize(
    ("pins", "is_shared"),
    [
        (("rollout.devices=0-15", "actor.devices=0-15", "reference.devices=0-15"), True),
        (("rollout.devices=0-15", "actor.devices=0-7", "reference.devices=0-7"), True),
        (("rollout.devices=0-15", "actor.devices=8-15", "reference.devices=0-3"), True),
        (("rollout.devices=0-7", "actor.devices=0-15", "reference.devices=0-15"), True),
        (("rollout.devices=0-7", "actor.devices=8-15", "reference.devices=0-3"), True),
        (("rollout.devices=0-7", "actor.devices=8-15", "reference.devices=8-15"), False),
    ],
)
def test_engines_sleep_where_some_of_their_devices_have_other_work(
    grpo: Graph, engine: str, pins: tuple[str, ...], is_shared: bool
) -> None:
    plan = make_plan(grpo, pinned(request(engine=engine), *pins), h100(16))
    assert sleeps(plan) == is_shared
    assert bool(plan.residency) == is_shared


def test_engines_that_run_ahead_sleep_where_a_reference_has_some_of_their_devices(
    grpo: Graph,
) -> None:
    asked = request(max_staleness=1, kind="asynchronous")
    pins = ("rollout.devices=0-7", "reference.devices=0-3", "actor.devices=8-15")
    plan = make_plan(grpo, pinned(asked, *pins, "rollout.tp=1"), h100(16))
    assert plan.kind == "asynchronous"
    assert sleeps(plan)
    devices = plan.operation("reference.logprobs").devices
    assert {switch.device for switch in plan.residency} == {device_names(devices)}


def test_engines_alone_on_their_devices_do_not_sleep_ahead_of_a_trainer(grpo: Graph) -> None:
    asked = request(max_staleness=1, kind="asynchronous")
    pins = ("rollout.devices=0-7", "reference.devices=8-15", "actor.devices=8-15")
    plan = make_plan(grpo, pinned(asked, *pins), h100(16))
    assert not sleeps(plan)
    assert not plan.residency


def test_only_servers_with_something_behind_them_give_their_devices_back(grpo: Graph) -> None:
    """Two servers of four devices; the update is on half of the first one's."""
    pins = ("rollout.devices=0-7", "rollout.tp=4", "actor.devices=0-1", "reference.devices=0-1")
    plan = make_plan(grpo, pinned(request(), *pins), h100(8))
    draws = plan.operation("actor.generate")
    assert (draws.layout.tp, draws.layout.dp) == (4, 2)
    (server,) = {switch.device for switch in plan.residency if "kv cache" in switch.what}
    assert server == device_names(draws.devices[:4])


def test_each_server_gives_its_devices_back_before_what_follows_there(grpo: Graph) -> None:
    pins = ("rollout.devices=0-7", "rollout.tp=1", "reference.devices=0-3", "actor.devices=0-7")
    plan = make_plan(grpo, pinned(request(), *pins), h100(8))
    devices = plan.operation("actor.generate").devices
    engines = [switch for switch in plan.residency if "kv cache" in switch.what]
    assert [(one.action, one.before, one.device) for one in engines] == [
        ("release", "reference.logprobs", device_names(devices[:4])),
        ("release", "actor.update", device_names(devices[4:])),
        ("take", "actor.generate", device_names(devices)),
    ]


@pytest.mark.parametrize("pins", [(), ("rollout.devices=0-15", "actor.devices=0-7")])
def test_the_bytes_of_a_cache_are_those_of_the_memory_table(
    grpo: Graph, pins: tuple[str, ...]
) -> None:
    text = plan_text(make_plan(grpo, pinned(request(), *pins), h100(16)))
    found = re.search(
        r"actor.generate kv cache: .* because: (.* GiB) of each device, whose peak is (.* GiB) "
        r"while it generates",
        text,
    )
    assert found is not None
    rows = [line.split("  ") for line in text.splitlines()]
    cells = {row[1]: [cell.strip() for cell in row[2:] if cell] for row in rows if len(row) > 2}
    caches = {cells["actor kv cache"][0]}
    totals = [
        line.split("total")[1].split("  ") for line in text.splitlines() if "  total " in line
    ]
    assert found[1] in caches
    assert found[2] in {next(cell.strip() for cell in one if cell.strip()) for one in totals}


def test_devices_that_a_task_leaves_idle_beside_others_have_a_reason(grpo: Graph) -> None:
    """24 devices are divided by 3, and 128 samples of an update are not."""
    plan = make_plan(grpo, request(kind="temporal"), h100(24))
    assert len(plan.operation("actor.update").devices) == 16
    reason = next(one for one in plan.reasons if one.subject == "actor.update")
    (idle,) = [one for one in reason.rejected if one.choice == "24 devices"]
    assert idle.constraint.startswith("leave dp 3, 6, 12 or 24, whatever else is divided, and none")
    assert "128 samples of an update" in idle.constraint


def test_pinned_devices_that_no_layout_divides_are_refused_with_the_reason(grpo: Graph) -> None:
    with pytest.raises(Exception, match="none of these divides 128 samples of an update"):
        make_plan(grpo, pinned(request(), "actor.devices=0-23"), h100(24))
