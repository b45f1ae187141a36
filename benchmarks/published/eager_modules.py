"""The memory traffic of unfused modules, which trainers of published runs have.

Trainers of other frameworks that divide everything among data ranks (FSDP, ZeRO 3) mostly train
the modules of transformers as they stand, an operation a kernel; Megatron's are fused, and so are
compiled ones. `forward_pass` counts fused ones. Bytes of a token in a layer, forward, in bfloat16,
from `LlamaRMSNorm`, `apply_rotary_pos_emb` and `LlamaMLP` (transformers,
models/llama/modeling_llama.py; Qwen2 and Qwen3 have the same), r read and w written:

    norm        to float32 r2 w4, square r4 w4, mean r4, product r4 w4, back r4 w2, weight r2 w2:
                36 an element of the hidden size, its residual sum r4 w2: 6; fused 8. Two a layer.
    positions   two products r2 w2, halves exchanged r3 w3, sum r4 w2: 20 an element of queries and
                keys, in whole kernels of their own
    MLP         activation r2 w2, product r4 w2: 10 an element of the intermediate size; fused 6

Plans do not use this: there a layout says nothing of how a trainer's modules are implemented.
"""

from __future__ import annotations

from flowrl.cluster.hardware import Machine
from flowrl.cost import efficiency
from flowrl.cost.activations import Recompute
from flowrl.cost.layout import Layout
from flowrl.cost.models import ModelShape
from flowrl.cost.trainer_time import Batch, replica_tokens

__all__ = ["unfused_forward_s", "unfused_update_s"]

NORM_BYTES = 2 * (36 + 6 - 8)
POSITION_BYTES = 20
MLP_BYTES = 10 - 6


def unfused_forward_s(shape: ModelShape, layout: Layout, machine: Machine, batch: Batch) -> float:
    """Returns the seconds that unfused modules add to one forward pass over a batch."""
    keys = shape.num_kv_heads * shape.head_dim
    dense = (shape.num_layers - shape.num_expert_layers) * shape.intermediate_size
    nbytes = float(shape.num_layers * NORM_BYTES * shape.hidden_size)
    nbytes += shape.num_layers * POSITION_BYTES * (shape.query_size + keys) / layout.tp
    nbytes += MLP_BYTES * dense / layout.tp
    tokens = replica_tokens(layout, batch) / layout.cp
    return tokens * nbytes / layout.pp / efficiency.rates(machine.spec).nbytes


def unfused_update_s(
    shape: ModelShape, layout: Layout, machine: Machine, batch: Batch, recompute: Recompute
) -> float:
    """Returns the seconds they add to the update of a batch; a backward pass counts as two."""
    passes = 3 + (recompute == "full")
    return passes * unfused_forward_s(shape, layout, machine, batch)
