"""Steps of an inference engine: one decode step, and a pass in which prompts enter.

With a pipeline of p stages an engine keeps p parts of its batch in flight, so that each stage
always has one; every row gets its next token once in p stage times, each of a part of `batch / p`
rows, which is one pass of such a part through all layers:

    decode step = pass(batch / p) + p sends + host

A prefill of c chunks fills and drains the pipeline: `(c + p - 1) / p` passes (Huang et al. 2019,
GPipe, arXiv 1811.06965, section 2.3).
"""

from __future__ import annotations

import math

from flowrl.cluster.hardware import Machine
from flowrl.cost import collectives
from flowrl.cost.forward_pass import PassParts, Tokens, dtype_bytes, forward_parts
from flowrl.cost.layout import Layout
from flowrl.cost.models import ModelShape


def decode_parts(
    shape: ModelShape, layout: Layout, machine: Machine, *, batch: float, context: float
) -> PassParts:
    """Seconds of a decode step by part, without the host.

    Args:
        batch: Rows of the replica.
        context: Mean tokens of a row so far.
    """
    rows = max(1.0, batch / layout.pp)
    tokens = Tokens(count=rows, pairs=rows * (context + 1), cached=True, num_logits=rows)
    # Context ranks divide what is cached, not the rows: each computes all of them.
    whole = Layout(tp=layout.tp, ep=layout.ep, dp=layout.dp * layout.cp)
    divided = Tokens(
        count=rows, pairs=tokens.pairs / layout.cp, cached=True, num_logits=tokens.num_logits
    )
    parts = forward_parts(shape, whole, machine, divided)
    if layout.cp > 1:
        nbytes = rows * shape.attention_size / layout.tp * dtype_bytes(machine)
        ranks = collectives.Ranks(size=layout.cp, stride=layout.tp)
        once = collectives.all_reduce_s(nbytes, ranks, machine)
        parts["context parallel"] = shape.num_layers * once
    parts["pipeline"] = sends_s(shape, layout, machine, rows)
    return parts


def prefill_parts(
    shape: ModelShape,
    layout: Layout,
    machine: Machine,
    *,
    rows: float,
    tokens: float,
    chunk_tokens: int | None = None,
) -> PassParts:
    """Seconds in which `rows` prompts of `tokens` each enter, by part.

    Args:
        chunk_tokens: Of a pass; None takes all in one, and with a pipeline one a row.
    """
    total = rows * tokens
    chunks = 1 if chunk_tokens is None else math.ceil(total / chunk_tokens)
    if layout.pp > 1:
        chunks = max(chunks, min(int(rows), layout.pp))
    share = 1.0 / chunks
    work = Tokens(
        count=total * share,
        pairs=rows * tokens * (tokens + 1) / 2 * share,
        cached=False,
        num_logits=rows * share,
    )
    passes = (chunks + layout.pp - 1) / layout.pp
    parts = {
        name: seconds * passes
        for name, seconds in forward_parts(shape, layout, machine, work).items()
    }
    if layout.cp > 1:
        parts["context parallel"] = passes * ring_s(shape, layout, machine, work.count)
    parts["pipeline"] = passes * sends_s(shape, layout, machine, work.count)
    return parts


def ring_s(shape: ModelShape, layout: Layout, machine: Machine, count: float) -> float:
    """Keys and values of `count` tokens around the context ranks, in all layers.

    Each rank gets those of all others once a layer (Liu et al. 2023, Ring Attention, arXiv
    2310.01889), as in an all-gather.
    """
    kv_heads = -(-shape.num_kv_heads // layout.tp)
    size = kv_heads * (shape.head_dim + shape.value_head_dim)
    if shape.latent is not None:
        size = shape.cache_size
    ranks = collectives.Ranks(size=layout.cp, stride=layout.tp)
    nbytes = count * size * dtype_bytes(machine)
    return shape.num_layers * collectives.all_gather_s(nbytes, ranks, machine)


def sends_s(
    shape: ModelShape,
    layout: Layout,
    machine: Machine,
    count: float,
    apart: int | None = None,
) -> float:
    """Hidden states of `count` tokens from each stage to the next.

    Args:
        apart: Devices between a rank and the same one of the next stage; None takes an engine's,
            whose replica is a server of its own: `tp cp`. The sends that leave a node take longer.
    """
    if layout.pp == 1:
        return 0.0
    nbytes = count * shape.hidden_size * dtype_bytes(machine) / (layout.tp * layout.cp)
    apart = layout.tp * layout.cp if apart is None else apart
    # Stage s begins in node `s apart // node_size`, which grows by one at most where apart is less.
    across = min(layout.pp - 1, (layout.pp - 1) * apart // machine.node_size)
    near = collectives.send_s(nbytes, machine, across=False)
    far = collectives.send_s(nbytes, machine, across=True)
    return across * far + (layout.pp - 1 - across) * near
