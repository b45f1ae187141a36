"""The shape of a decoder-only model, from its Hugging Face `config.json`.

No weights are read and nothing is built: the counts follow from the shape. Missing keys take the
values that Transformers gives them, so that a shape equals the module made from the same config
(the tests compare the two).

Families that share the Llama layer (RMSNorm, rotary positions, grouped-query attention, gated MLP)
differ in a row of `FAMILIES`. Qwen3-MoE has `Experts` in the place of the MLP; DeepSeek-V3 has them
too, with shared ones and dense first layers, and `LatentAttention` (DeepSeek-V2, arXiv 2405.04434,
section 2.1; DeepSeek-V3, arXiv 2412.19437, section 2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from flowrl.cost.models.counts import ParameterCounts, count_parameters
from flowrl.cost.models.reader import MOST_LAYERS, ConfigReader
from flowrl.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in the place of the MLP of some layers.

    Attributes:
        num_experts: Routed experts of a layer.
        num_active: Of them, those that work on each token.
        expert_size: Intermediate size of a routed expert.
        shared_size: Intermediate size of the experts that work on every token, added up; 0 without.
        num_dense_layers: Layers that keep a plain MLP of `ModelShape.intermediate_size`.
    """

    num_experts: int
    num_active: int
    expert_size: int
    shared_size: int = 0
    num_dense_layers: int = 0

    @property
    def active_size(self) -> int:
        """Intermediate elements that one token passes in a layer with experts."""
        return self.num_active * self.expert_size + self.shared_size


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention: keys and values are expanded from one small vector a token.

    Attributes:
        query_rank: Of the latent that queries are expanded from; None projects them directly.
        kv_rank: Of the latent that keys and values are expanded from; it is what is cached.
        plain_dim: Of a query or key head, without position.
        rope_dim: Of a query head with rotary position, and of the one key that all heads share.
        value_dim: Of a value head.
    """

    query_rank: int | None
    kv_rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What distinguishes the families that share the Llama layer.

    Attributes:
        qkv_bias: The projections to queries, keys and values have a bias: always (True), never
            (False) or by the key `attention_bias` (None).
        qk_norm: Queries and keys are normalised per head, with `2 x head_dim` parameters a layer.
        mlp_bias: The key `mlp_bias` counts.
        default_kv_heads: Where `num_key_value_heads` is absent; None takes the number of heads.
        default_head_dim: Where `head_dim` is absent; None takes `hidden_size / num_heads`.
        experts: Which keys describe experts, if any.
        latent: Attention is `LatentAttention`.
    """

    qkv_bias: bool | None
    qk_norm: bool = False
    mlp_bias: bool = False
    default_kv_heads: int | None = None
    default_head_dim: int | None = None
    experts: str | None = None
    latent: bool = False


FAMILIES: Mapping[str, _Family] = {
    "deepseek_v3": _Family(qkv_bias=None, experts="deepseek", latent=True),
    "llama": _Family(qkv_bias=None, mlp_bias=True),
    "mistral": _Family(qkv_bias=False, default_kv_heads=8),
    "qwen2": _Family(qkv_bias=True, default_kv_heads=32),
    "qwen3": _Family(qkv_bias=None, qk_norm=True, default_kv_heads=32, default_head_dim=128),
    "qwen3_moe": _Family(qkv_bias=None, qk_norm=True, default_kv_heads=4, experts="qwen"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The shape of a decoder with RMSNorm, rotary positions and gated MLPs.

    Attributes:
        intermediate_size: Of a dense MLP.
        num_layers: Of the main model, without those that predict further tokens.
        head_dim: Of a query and key head, with latent attention its two parts together.
        tied: The output layer is the embedding, transposed.
        qkv_bias: Queries, keys and values have a bias; with latent attention the projections to
            the latents have.
        output_bias: The projection out of attention has one.
        experts: Where some layers have them.
        latent: Where attention is latent.
        num_mtp_layers: Layers that predict further tokens while a model is trained first. They are
            counted apart, because engines and trainers leave them out.
        head: What the model ends in: logits of the next token (`lm`), or one number a position
            (`value`: critics and reward models), which is a matrix of its own and never tied.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tied: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: Experts | None = None
    latent: LatentAttention | None = None
    num_mtp_layers: int = 0
    head: Literal["lm", "value"] = "lm"

    def __hash__(self) -> int:
        # Costs are looked up by shape: these tell most shapes apart, and cost less than all.
        return hash((self.hidden_size, self.num_layers, self.head))

    @classmethod
    def from_hf_config(
        cls,
        config: Mapping[str, object],
        *,
        where: str | None = None,
        allow_quantised: bool = False,
    ) -> ModelShape:
        """The shape that a `config.json` describes.

        Args:
            where: Names the config in messages, for example its path.
            allow_quantised: Take a model with quantised weights too. Its numbers of parameters and
                FLOPs are right, the bytes that follow from a parameter type are not.

        Raises:
            PlanError: an unknown family, a missing or impossible size, or quantised weights.
        """
        reader = ConfigReader(config=config, where=where)
        if not allow_quantised:
            reader.refuse_quantised()
        name = reader.family(FAMILIES)
        family = FAMILIES[name]
        num_layers = reader.size("num_hidden_layers", most=MOST_LAYERS)
        latent = _latent(reader) if family.latent else None
        num_heads, num_kv_heads, head_dim = _heads(reader, family, latent)
        biased = reader.flag("attention_bias")
        return cls(
            family=name,
            vocab_size=reader.size("vocab_size"),
            hidden_size=reader.size("hidden_size"),
            intermediate_size=reader.size("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            tied=reader.flag("tie_word_embeddings"),
            qkv_bias=biased if family.qkv_bias is None else family.qkv_bias,
            output_bias=biased and family.qkv_bias is None,
            mlp_bias=family.mlp_bias and reader.flag("mlp_bias"),
            qk_norm=family.qk_norm,
            experts=_experts(reader, family, num_layers),
            latent=latent,
            num_mtp_layers=reader.count("num_nextn_predict_layers", 0) if family.latent else 0,
        )

    def with_value_head(self) -> ModelShape:
        """The same body that ends in one number a position."""
        return replace(self, head="value")

    @property
    def output_size(self) -> int:
        """Numbers that the model gives at a position."""
        return self.vocab_size if self.head == "lm" else 1

    @property
    def query_size(self) -> int:
        """Elements of all query heads of a token."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of all key heads of a token, as attention reads them.

        Of all value heads too, except with latent attention: see `value_head_dim`.
        """
        return self.num_kv_heads * self.head_dim

    @property
    def value_head_dim(self) -> int:
        """Elements of a value head."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def attention_size(self) -> int:
        """Elements that attention gives for a token, before its output projection."""
        return self.num_heads * self.value_head_dim

    @property
    def cache_size(self) -> int:
        """Elements that a KV cache keeps for a token in a layer.

        With latent attention an engine keeps the latent and the shared rotary key, and expands
        them anew; an engine that keeps the expanded heads instead needs more.
        """
        if self.latent is not None:
            return self.latent.kv_rank + self.latent.rope_dim
        return 2 * self.kv_size

    @property
    def num_expert_layers(self) -> int:
        """Layers of the main model with experts."""
        return 0 if self.experts is None else self.num_layers - self.experts.num_dense_layers

    @property
    def parameters(self) -> ParameterCounts:
        """Counted from the shape; `flowrl.cost.models.counts` writes the formulas out."""
        return count_parameters(self)


def _heads(
    reader: ConfigReader, family: _Family, latent: LatentAttention | None
) -> tuple[int, int, int]:
    """Query heads, key heads, and the elements of one."""
    heads = reader.size("num_attention_heads")
    if latent is not None:
        # Every head has keys of its own; num_key_value_heads only says the same again.
        return heads, heads, latent.plain_dim + latent.rope_dim
    kv_heads = reader.size_or_null("num_key_value_heads", family.default_kv_heads, heads)
    if heads % kv_heads:
        raise PlanError(
            f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}",
            where=reader.where,
            hint="correct one of them in the model's config; equal numbers mean no grouping",
        )
    head_dim = reader.config.get("head_dim", family.default_head_dim)
    if head_dim is not None:
        return heads, kv_heads, reader.check("head_dim", head_dim)
    hidden = reader.size("hidden_size")
    if hidden % heads:
        raise PlanError(
            f"hidden_size {hidden} is no multiple of num_attention_heads {heads}",
            where=reader.where,
            hint="give head_dim where the two are independent",
        )
    return heads, kv_heads, hidden // heads


def _latent(reader: ConfigReader) -> LatentAttention:
    return LatentAttention(
        query_rank=reader.size_or_none("q_lora_rank", absent=1536),
        kv_rank=reader.size("kv_lora_rank", absent=512),
        plain_dim=reader.size("qk_nope_head_dim", absent=128),
        rope_dim=reader.size("qk_rope_head_dim", absent=64),
        value_dim=reader.size("v_head_dim", absent=128),
    )


def _experts(reader: ConfigReader, family: _Family, num_layers: int) -> Experts | None:
    match family.experts:
        case None:
            return None
        case "deepseek":
            size = reader.size("moe_intermediate_size", absent=2048)
            experts = Experts(
                num_experts=reader.size("n_routed_experts", absent=256),
                num_active=reader.size("num_experts_per_tok", absent=8),
                expert_size=size,
                shared_size=size * reader.count("n_shared_experts", absent=1),
                num_dense_layers=min(reader.count("first_k_dense_replace", absent=3), num_layers),
            )
        case _:
            experts = Experts(
                num_experts=reader.size("num_experts", absent=128),
                num_active=reader.size("num_experts_per_tok", absent=8),
                expert_size=reader.size("moe_intermediate_size", absent=768),
                num_dense_layers=_qwen_dense_layers(reader, num_layers),
            )
    if experts.num_active > experts.num_experts:
        raise PlanError(
            f"{experts.num_active} experts are active, but a layer has {experts.num_experts}",
            where=reader.where,
            expected=f"num_experts_per_tok of at most {experts.num_experts}",
            hint="correct one of the two in the model's config",
        )
    return experts


def _qwen_dense_layers(reader: ConfigReader, num_layers: int) -> int:
    """Layers named by `mlp_only_layers`, and those that `decoder_sparse_step` leaves dense."""
    step = reader.size("decoder_sparse_step", absent=1)
    named = reader.layers("mlp_only_layers")
    return sum(layer in named or (layer + 1) % step != 0 for layer in range(num_layers))
