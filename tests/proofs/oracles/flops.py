"""Model FLOPs, as other libraries count them.

All are forward passes (times 3 for training) of `flowrl.cost.flops`, with these conventions:

- verl: the embedding counts as a product.
- NeMo-RL: routers are omitted; its formulas of Llama and Qwen2 know no `head_dim`, that of Qwen2
  takes keys and values for as many heads as queries have, that of DeepSeek-V3 counts layers that
  predict further tokens.
- slime: routers are omitted, and the projection out of attention is taken for a square matrix.

What a case says in its options goes before what its library does by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flowrl.cost.flops import FlopsConvention, Work, model_flops
from flowrl.cost.models import ModelShape
from tests.proofs.oracles.case import Case, Json, NotOffered, Result, choose

__all__ = ["compute"]


_CONVENTIONS: Mapping[str, FlopsConvention] = {
    "verl": FlopsConvention(embedding="product"),
    "nemo": FlopsConvention(router="omitted"),
    "slime": FlopsConvention(router="omitted", output_projection="hidden"),
}

_WORK: Mapping[str, Work] = {
    "fwd": "forward",
    "fwd+bwd": "training",
    "fwd+bwd+recompute": "training_with_recompute",
}


def compute(case: Case) -> Result:
    """`flops` of a batch of sequences."""
    library = next((name for name in _CONVENTIONS if case.library.startswith(name)), None)
    if library is None:
        return NotOffered(f"no convention of {case.library} is known")
    convention, config = _CONVENTIONS[library], dict(case.inputs["config"])
    if library == "nemo":
        function = case.source.get("function")
        if function in ("llama", "qwen2"):
            config.pop("head_dim", None)
        if function == "qwen2":
            convention = replace(convention, key_value_heads="all_heads")
        convention = replace(convention, mtp="counted")
    default = "fwd" if library == "slime" else "fwd+bwd"
    return {
        "flops": model_flops(
            _shape(config),
            case.inputs["batch_seqlens"],
            work=choose(_WORK, case.option("pass", default), "pass"),
            convention=_told(convention, case),
        )
    }


def _told(convention: FlopsConvention, case: Case) -> FlopsConvention:
    """The convention, with what the options of the case say."""
    changes: dict[str, Any] = {}
    if (causal := case.option("causal")) is not None:
        changes["attention"] = "causal_half" if causal else "full"
    if (embedding := case.option("embedding_counted")) is not None:
        changes["embedding"] = "product" if embedding else "lookup"
    return replace(convention, **changes)


def _shape(config: Mapping[str, Json]) -> ModelShape:
    """The shape of a config; without `head_dim` all libraries divide the hidden size by heads."""
    values = dict(config)
    if values.get("head_dim") is None and values["model_type"] != "deepseek_v3":
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    return ModelShape.from_hf_config(values, allow_quantised=True)
