"""A model and a job whose bytes one can add up by hand."""

from __future__ import annotations

from flowrl.cost import ModelShape, Workload

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
