"""The memory of one device under a layout: equal to that of one device alone, divided by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from flowrl.cost import ModelShape, Phase, PhaseMemory, Workload
from flowrl.cost.layout import Layout
from flowrl.cost.memory import phase_memory, resident_memory
from flowrl.cost.role_memory import (
    MemoryOptions,
    resident_bytes,
    role_memory,
    role_peak,
)

SHAPE = ModelShape(
    family="llama",
    vocab_size=100,
    hidden_size=8,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    tied=True,
)
WORK = Workload(
    num_slots=3,
    max_length=10,
    max_prompt_tokens=6,
    max_response_tokens=4,
    micro_batch=5,
    num_samples=20,
    dtype="float32",
    trainable=True,
)
ON_CPU = MemoryOptions(device_type="cpu")


def named(memory: PhaseMemory) -> dict[str, int]:
    return {part.name: part.nbytes for part in memory.parts}


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shard", ["none", "optimizer", "full"])
def test_one_device_has_the_numbers_of_a_device_alone(phase: Phase, dtype: str, shard: str) -> None:
    options = replace(ON_CPU, shard=shard)
    settings = product(
        (True, False), (0, 3), ("sdpa", "eager"), (True, False), (SHAPE.with_value_head(), SHAPE)
    )
    for trainable, slots, attention, shares, shape in settings:
        work = replace(
            WORK,
            dtype=dtype,
            trainable=trainable,
            num_slots=slots,
            attention=attention,
            shares_weights=shares,
        )
        if phase is Phase.ROLLOUT and not slots:
            continue
        alone = phase_memory("actor", shape, work, phase)
        assert named(role_memory("actor", shape, Layout(), work, phase, options)) == named(alone)
        assert role_peak(shape, Layout(), work, phase, options) == alone.total
        resident = sum(part.nbytes for part in resident_memory("actor", shape, work))
        assert resident_bytes(shape, Layout(), work, options) == resident
