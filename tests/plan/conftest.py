"""Small graphs, their requests and fixed pools, for the planner's tests."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from flowrl.backend.protocols import Capabilities, Service
from flowrl.cluster import ClusterNode, Device, ResourcePool
from flowrl.cost import ModelShape
from flowrl.graph import Edge, Graph, Level, Node, Op
from flowrl.ids import NodeId, RoleName
from flowrl.plan import PlanRequest, RoleRequest

GIB = 1 << 30

TINY = ModelShape(
    family="qwen2",
    vocab_size=16,
    hidden_size=64,
    intermediate_size=160,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    tied=True,
    qkv_bias=True,
)
"""The model of the quickstart."""

QWEN25_05B = ModelShape(
    family="qwen2",
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_layers=24,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    tied=True,
    qkv_bias=True,
)

TORCH = Capabilities(
    services=frozenset({Service.GENERATE, Service.TRAIN}),
    devices=frozenset({"cpu", "cuda", "npu"}),
    dtypes=frozenset({"float32", "bfloat16"}),
    abort=True,
    shares_weights=True,
)

VERIFY = Capabilities(services=frozenset({Service.SCORE}), devices=frozenset({"cpu"}))


def cpu(gib: float = 16, cores: int = 8) -> Device:
    return Device(
        id="cpu:0", type="cpu", name="test CPU", memory_bytes=int(gib * GIB), num_cores=cores
    )


def gpu(index: int, gib: float = 80, *, reserved: bool = False, bfloat16: bool = True) -> Device:
    return Device(
        id=f"cuda:{index}",
        type="cuda",
        name="test GPU",
        memory_bytes=int(gib * GIB),
        bfloat16=bfloat16,
        reserved=reserved,
    )


def pool_of(*devices: Device) -> ResourcePool:
    host = devices[0]
    node = ClusterNode(
        name="here", devices=devices, memory_bytes=host.memory_bytes, num_cores=host.num_cores
    )
    return ResourcePool(nodes=(node,))


@dataclass(frozen=True)
class GraphBuilder:
    """Nodes and edges by short names."""

    nodes: list[Node] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)

    def node(self, name: str, op: Op, role: str | None = None) -> GraphBuilder:
        self.nodes.append(Node(id=NodeId(name), op=op, role=RoleName(role) if role else None))
        return self

    def edge(self, src: str, dst: str, *fields: str, carried: bool = False) -> GraphBuilder:
        self.edges.append(
            Edge(
                src=NodeId(src),
                dst=NodeId(dst),
                argument=fields[0],
                fields=fields,
                carried=carried,
            )
        )
        return self

    def graph(self, name: str = "grpo") -> Graph:
        return Graph(
            name=name, level=Level.LOWERED, nodes=tuple(self.nodes), edges=tuple(self.edges)
        )


@pytest.fixture(scope="session")
def grpo() -> Graph:
    return (
        GraphBuilder()
        .node("prompts", Op.SOURCE)
        .node("actor.generate", Op.GENERATE, "actor")
        .node("verifier.score", Op.SCORE, "verifier")
        .node("reference.logprobs", Op.LOGPROBS, "reference")
        .node("advantage", Op.ADVANTAGE)
        .node("actor.update", Op.UPDATE, "actor")
        .node("actor.sync", Op.SYNC, "actor")
        .edge("prompts", "actor.generate", "prompt")
        .edge("actor.generate", "verifier.score", "tokens", "response_mask")
        .edge("actor.generate", "reference.logprobs", "tokens", "response_mask")
        .edge("verifier.score", "advantage", "score")
        .edge("actor.generate", "actor.update", "tokens", "response_mask")
        .edge("advantage", "actor.update", "advantage")
        .edge("reference.logprobs", "actor.update", "logprobs")
        .edge("actor.update", "actor.sync", "weights")
        .edge("actor.sync", "actor.generate", "weights", carried=True)
        .graph()
    )


@pytest.fixture
def sft() -> Graph:
    return (
        GraphBuilder()
        .node("examples", Op.SOURCE)
        .node("actor.update", Op.UPDATE, "actor")
        .edge("examples", "actor.update", "tokens", "response_mask")
        .graph("sft")
    )


def request_for(
    shape: ModelShape = TINY,
    *,
    capabilities: Capabilities = TORCH,
    dtype: str = "auto",
    num_slots: int = 256,
    prompts_per_step: int = 64,
    group_size: int = 8,
    mini_batches: int = 4,
    micro_batch: int = 32,
    max_prompt_tokens: int = 6,
    max_response_tokens: int = 4,
    evaluated: bool = False,
) -> PlanRequest:
    return PlanRequest(
        roles=(
            RoleRequest(
                name="actor",
                backend="torch",
                capabilities=capabilities,
                shape=shape,
                dtype=dtype,
                num_slots=num_slots,
                evaluated=evaluated,
            ),
            RoleRequest(
                name="reference", backend="torch", capabilities=capabilities, copy_of="actor"
            ),
            RoleRequest(name="verifier", backend="verify", capabilities=VERIFY, num_workers=2),
        ),
        prompts_per_step=prompts_per_step,
        group_size=group_size,
        mini_batches=mini_batches,
        micro_batch=micro_batch,
        max_prompt_tokens=max_prompt_tokens,
        max_response_tokens=max_response_tokens,
        max_length=max_prompt_tokens + max_response_tokens,
    )


class Cases:
    """What the tests build plans from."""

    GIB = GIB
    TINY = TINY
    QWEN25_05B = QWEN25_05B
    TORCH = TORCH
    VERIFY = VERIFY
    cpu = staticmethod(cpu)
    gpu = staticmethod(gpu)
    pool_of = staticmethod(pool_of)
    request_for = staticmethod(request_for)


@pytest.fixture
def cases() -> type[Cases]:
    return Cases
