"""What single kernels take on one device: a start, and the longer of operations and bytes.

The roofline (Williams, Waterman and Patterson 2009), with starts and shares of
`flowrl.cost.efficiency`. `w` bytes an element, `m` tokens. Times add up: kernels of one stream run
one after the other.
"""

from __future__ import annotations

from flowrl.cost import efficiency
from flowrl.cost.efficiency import Rates


def matmul_s(rates: Rates, tokens: float, inputs: float, outputs: float, width: int) -> float:
    """`(m x k) (k x n)`: `2 m k n` operations, `w (k n + m k + m n)` bytes."""
    operations = 2.0 * tokens * inputs * outputs
    nbytes = width * (inputs * outputs + tokens * (inputs + outputs))
    return rates.start_scale * efficiency.MATMUL_S + max(
        operations / rates.flops, nbytes / rates.nbytes
    )


def elementwise_s(rates: Rates, nbytes: float) -> float:
    """Work that only reads and writes."""
    return rates.start_scale * efficiency.ELEMENTWISE_S + nbytes / rates.nbytes


def decode_attention_s(rates: Rates, *, nbytes: float, operations: float) -> float:
    """One token of each row over what it has cached, in one layer."""
    return rates.start_scale * efficiency.DECODE_ATTENTION_S + max(
        nbytes / rates.decode_attention_bytes, operations / rates.prefill_attention_flops
    )


def prefill_attention_s(rates: Rates, *, operations: float, nbytes: float, training: bool) -> float:
    """Whole sequences over themselves, in one layer, of an engine or of a trainer."""
    start_s = efficiency.MATMUL_S if training else efficiency.PREFILL_ATTENTION_S
    flops = rates.trainer_attention_flops if training else rates.prefill_attention_flops
    return rates.start_scale * start_s + operations / flops + nbytes / rates.nbytes


def experts_s(
    rates: Rates, *, operations: float, weight_bytes: float, token_bytes: float, start_s: float
) -> float:
    """A layer's routed experts: grouped products, and tokens copied into their order and back.

    Args:
        weight_bytes: Of the experts that are hit.
        token_bytes: Of every token for each expert that it is sent to.
    """
    products = max(operations / rates.expert_flops, weight_bytes / rates.expert_bytes)
    return (
        rates.start_scale * start_s
        + products
        + efficiency.EXPERT_PASSES * token_bytes / rates.expert_bytes
    )
