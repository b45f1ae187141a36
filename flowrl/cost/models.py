"""The sizes of a dense decoder-only model, from its Hugging Face `config.json`.

No weights are read and nothing is built: the counts follow from the shape. Missing keys take the
values that Transformers gives them, so that a shape equals the module made from the same config
(the tests compare the two).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from flowrl.errors import PlanError

__all__ = ["FAMILIES", "ModelShape", "ParameterCounts"]


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
    """

    qkv_bias: bool | None
    qk_norm: bool = False
    mlp_bias: bool = False
    default_kv_heads: int | None = None
    default_head_dim: int | None = None


FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(qkv_bias=None, mlp_bias=True),
    "mistral": _Family(qkv_bias=False, default_kv_heads=8),
    "qwen2": _Family(qkv_bias=True, default_kv_heads=32),
    "qwen3": _Family(qkv_bias=None, qk_norm=True, default_kv_heads=32, default_head_dim=128),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCounts:
    """Numbers of parameters, by the class that decides how a layout shards them.

    `head` is 0 where the output layer is tied to the embedding.
    """

    embedding: int
    attention: int
    mlp: int
    norm: int
    head: int

    @property
    def total(self) -> int:
        """All parameters, tied ones once."""
        return self.embedding + self.attention + self.mlp + self.norm + self.head


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The shape of a dense decoder with RMSNorm, rotary positions and a gated MLP.

    Attributes:
        tied: The output layer is the embedding, transposed.
        qkv_bias: Queries, keys and values have a bias.
        output_bias: The projection out of attention has one.
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

    @classmethod
    def from_hf_config(
        cls, config: Mapping[str, object], *, where: str | None = None
    ) -> ModelShape:
        """The shape that a `config.json` describes.

        Args:
            where: Names the config in messages, for example its path.

        Raises:
            PlanError: an unknown family, a missing or impossible size, or quantised weights.
        """
        reader = _Reader(config=config, where=where)
        name = reader.family()
        family = FAMILIES[name]
        hidden, heads = reader.size("hidden_size"), reader.size("num_attention_heads")
        kv_heads = reader.size_or("num_key_value_heads", family.default_kv_heads or heads, heads)
        if heads % kv_heads:
            raise PlanError(
                f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}",
                where=where,
            )
        head_dim = config.get("head_dim", family.default_head_dim)
        if head_dim is None and hidden % heads:
            raise PlanError(
                f"hidden_size {hidden} is no multiple of num_attention_heads {heads}",
                where=where,
                hint="give head_dim where the two are independent",
            )
        attention_bias = config.get("attention_bias") is True
        return cls(
            family=name,
            vocab_size=reader.size("vocab_size"),
            hidden_size=hidden,
            intermediate_size=reader.size("intermediate_size"),
            num_layers=reader.size("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=hidden // heads if head_dim is None else reader.check("head_dim", head_dim),
            tied=config.get("tie_word_embeddings") is True,
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            output_bias=attention_bias and family.qkv_bias is None,
            mlp_bias=family.mlp_bias and config.get("mlp_bias") is True,
            qk_norm=family.qk_norm,
        )

    @property
    def query_size(self) -> int:
        """Elements of all query heads of a token."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of all key heads (or value heads) of a token."""
        return self.num_kv_heads * self.head_dim

    @property
    def parameters(self) -> ParameterCounts:
        """Counted from the shape.

        Per layer: attention `h(q + 2k) + qh`, MLP `3hf`, norms `2h`, with h hidden, f intermediate,
        q and k the sizes of all query and key heads; biases and query/key norms where there are.
        """
        h, f, q, k = self.hidden_size, self.intermediate_size, self.query_size, self.kv_size
        attention = h * (q + 2 * k) + q * h
        attention += (q + 2 * k) * self.qkv_bias + h * self.output_bias
        mlp = 3 * h * f + (2 * f + h) * self.mlp_bias
        norm = 2 * h + 2 * self.head_dim * self.qk_norm
        return ParameterCounts(
            embedding=self.vocab_size * h,
            attention=self.num_layers * attention,
            mlp=self.num_layers * mlp,
            norm=self.num_layers * norm + h,
            head=0 if self.tied else self.vocab_size * h,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    config: Mapping[str, object]
    where: str | None

    def family(self) -> str:
        name = self.config.get("model_type")
        if "quantization_config" in self.config:
            raise PlanError(
                "the weights are quantised, and their memory is not known from the shape",
                where=self.where,
                hint="give a folder with float32, bfloat16 or float16 weights",
            )
        if not isinstance(name, str) or name not in FAMILIES:
            near = difflib.get_close_matches(str(name), FAMILIES, n=1)
            raise PlanError(
                "no memory model for this model family",
                where=self.where,
                found=f"model_type {name!r}",
                expected=f"one of {', '.join(FAMILIES)}"
                + (f" (nearest {near[0]})" if near else ""),
                hint="a new family needs its parameter counts (embedding, attention, mlp, norm, "
                "head; for experts, how many there are and how many are active), its KV bytes a "
                "token and its activations a token",
            )
        return name

    def size(self, key: str) -> int:
        if key not in self.config:
            raise PlanError(
                f"the model's config has no {key!r}", where=self.where, expected="a whole number"
            )
        return self.check(key, self.config[key])

    def size_or(self, key: str, absent: int, null: int) -> int:
        value = self.config.get(key, absent)
        return null if value is None else self.check(key, value)

    def check(self, key: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PlanError(
                f"{key} must be a whole number of at least 1", where=self.where, found=repr(value)
            )
        return value
