"""Jobs of a 7B model on pools of H100, for the tests of plans over many devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flowrl.backend.protocols import Capabilities, Service
from flowrl.cluster.hardware import device_spec
from flowrl.cluster.pool import ResourcePool
from flowrl.cost.analytic import AnalyticCost
from flowrl.cost.lengths import LognormalLengths
from flowrl.cost.models import ModelShape
from flowrl.graph import Graph
from flowrl.plan import PlanRequest, RoleRequest
from flowrl.plan.elsewhere import Part
from flowrl.plan.groups import host_share
from flowrl.plan.many import GroupJob, Searched, search_group
from flowrl.plan.one_pins import device_numbers
from flowrl.plan.options import Pin, PlanOptions
from flowrl.plan.pins import read_pins
from flowrl.plan.problem_of import Posed
from flowrl.plan.sizing import Job, pool_of_devices
from flowrl.plan.ways.tasks import tasks_of
from tests.plan.conftest import VERIFY

QWEN25_7B = ModelShape(
    family="qwen2",
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    tied=False,
    qkv_bias=True,
)

TORCH = Capabilities(
    services=frozenset({Service.GENERATE, Service.TRAIN}),
    devices=frozenset({"cpu", "cuda", "npu"}),
    dtypes=frozenset({"float32", "bfloat16"}),
    sleep=True,
    shares_weights=True,
)


def options(**changes: Any) -> PlanOptions:
    given = {
        "lengths": LognormalLengths(mean=600.0, sigma=0.7, maximum=2048.0),
        "prompt_tokens": 200.0,
        "alternatives": 1,
    }
    return PlanOptions(**(given | changes))


def request(
    shape: ModelShape = QWEN25_7B, *, max_staleness: int = 0, **changes: Any
) -> PlanRequest:
    roles = (
        RoleRequest(name="actor", backend="torch", capabilities=TORCH, shape=shape, num_slots=64),
        RoleRequest(name="reference", backend="torch", capabilities=TORCH, copy_of="actor"),
        RoleRequest(name="verifier", backend="verify", capabilities=VERIFY),
    )
    return PlanRequest(
        roles=roles,
        prompts_per_step=64,
        group_size=8,
        mini_batches=4,
        micro_batch=8,
        max_prompt_tokens=512,
        max_response_tokens=2048,
        max_length=2560,
        max_staleness=max_staleness,
        options=options(**changes),
    )


def pinned(asked: PlanRequest, *pins: str) -> PlanRequest:
    """The request with pins as a command line writes them."""
    found = []
    for pin in pins:
        name, _, value = pin.partition("=")
        subject, _, field = name.rpartition(".")
        found.append(Pin(subject=subject, field=field, value=value, where=f"--pin {pin}"))
    return replace(asked, options=replace(asked.options, pins=tuple(found)))


def h100(num_devices: int) -> ResourcePool:
    return pool_of_devices(device_spec("H100-SXM-80GB"), num_devices)


def parts_of(pool: ResourcePool) -> list[Part]:
    """The groups of equal devices of a pool."""
    order = device_numbers(pool)
    return [
        Part(
            group=group,
            host=host_share(pool, group),
            numbering=tuple(order[address] for address in group.addresses),
        )
        for group in pool.groups()
    ]


def searched(graph: Graph, wanted: PlanRequest, pool: ResourcePool) -> Searched:
    """What the search of the only group of a pool gives."""
    (part,) = parts_of(pool)
    pins = read_pins(wanted.options, tasks_of(graph, wanted), part.numbering)
    job = GroupJob(graph=graph, request=wanted, cost=AnalyticCost(), part=part, pins=pins)
    return search_group(job)


def posed_alone(job: Job, number: int) -> Posed:
    """So many devices in whole nodes."""
    pins = job.pins(number)
    return job.posed(job.parts(number, pins)[0], pins=pins)
