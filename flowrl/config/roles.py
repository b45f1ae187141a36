"""Sections of roles: models, tokenizers and optimizers; and a new model's `config.json`."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from flowrl.config.rewards import Terms
from flowrl.config.section import Float, Int, Options, Refusal, Section
from flowrl.entry_points import entries, find_entry
from flowrl.errors import ConfigError
from flowrl.wording import listing


class OptimizerConfig(Section):
    """AdamW; see `flowrl.specs.AdamW` for the meaning of each field."""

    learning_rate: Float = Field(default=1e-6, gt=0)
    beta1: Float = Field(default=0.9, ge=0, lt=1)
    beta2: Float = Field(default=0.95, ge=0, lt=1)
    eps: Float = Field(default=1e-8, gt=0)
    weight_decay: Float = Field(default=0.0, ge=0)
    warmup_updates: Int = Field(default=0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    final_fraction: Float = Field(default=0.1, ge=0, le=1)
    max_grad_norm: Float = Field(default=1.0, ge=0)


class OptimizerChanges(Section):
    """The fields in which a role's optimizer differs from the stage's `train.optimizer`."""

    learning_rate: Annotated[Float, Field(gt=0)] | None = None
    beta1: Annotated[Float, Field(ge=0, lt=1)] | None = None
    beta2: Annotated[Float, Field(ge=0, lt=1)] | None = None
    eps: Annotated[Float, Field(gt=0)] | None = None
    weight_decay: Annotated[Float, Field(ge=0)] | None = None
    warmup_updates: Annotated[Int, Field(ge=0)] | None = None
    schedule: Literal["constant", "linear", "cosine"] | None = None
    final_fraction: Annotated[Float, Field(ge=0, le=1)] | None = None
    max_grad_norm: Annotated[Float, Field(ge=0)] | None = None

    def applied_to(self, optimizer: OptimizerConfig) -> OptimizerConfig:
        """Returns the optimizer of the role."""
        return optimizer.model_copy(update=self.model_dump(exclude_none=True))


class FreshModel(Section):
    """A new model with random weights, as fields of a Hugging Face `config.json`.

    The vocabulary size and the special token ids come from the tokenizer.
    """

    architecture: Literal["qwen2", "qwen3", "llama"] = "qwen2"
    hidden_size: Int = Field(default=64, ge=1, le=1 << 20)
    num_layers: Int = Field(default=2, ge=1, le=10_000)
    num_heads: Int = Field(default=4, ge=1, le=1 << 16)
    num_kv_heads: Annotated[Int, Field(ge=1, le=1 << 16)] | None = None
    intermediate_size: Int = Field(default=160, ge=1, le=1 << 24)
    max_length: Int = Field(default=512, ge=2, le=1 << 31)
    tie_embeddings: bool = True
    initializer_range: Float = Field(default=0.02, gt=0)

    @model_validator(mode="after")
    def _heads_divide(self) -> FreshModel:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}"
            )
        if self.hidden_size // self.num_heads % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} over num_heads {self.num_heads} gives heads of "
                f"{self.hidden_size // self.num_heads} dimensions; rotary positions turn pairs, so "
                "the number must be even"
            )
        if self.num_kv_heads and self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        return self


class CharTokenizer(Section):
    """One token for each character of `alphabet`, then one for the end of the text."""

    kind: Literal["char"]
    alphabet: str = Field(min_length=1)

    @field_validator("alphabet")
    @classmethod
    def _differing_ascii_characters(cls, alphabet: str) -> str:
        twice = sorted({character for character in alphabet if alphabet.count(character) > 1})
        if twice:
            raise ValueError(f"{', '.join(map(repr, twice))} is more than once in the alphabet")
        if foreign := sorted({character for character in alphabet if not character.isascii()}):
            raise ValueError(
                f"{', '.join(map(repr, foreign[:8]))} is no ASCII character; use tokenizer kind bpe"
            )
        return alphabet


class BpeTokenizer(Section):
    """Byte-level BPE that is trained once, on the prompts and solutions of the training data."""

    kind: Literal["bpe"]
    vocab_size: Int = Field(default=1024, ge=300)


def _model_form(value: object) -> str:
    return "fresh" if isinstance(value, dict | FreshModel) else "folder"


ModelSource: TypeAlias = Annotated[
    Annotated[str, Tag("folder")] | Annotated[FreshModel, Tag("fresh")],
    Discriminator(_model_form),
]


ENVIRONMENTS = "flowrl.environments"
"""The entry points by which packages add environments: each names a class as `module:NAME`."""


def _environment_target(written: str) -> str:
    """Returns `module:NAME` of an environment that a package adds; anything else as it is."""
    if written not in {entry.name for entry in entries(ENVIRONMENTS)}:
        return written
    try:
        return find_entry(ENVIRONMENTS, written, kind="environment", error=ConfigError).target
    except ConfigError as problem:
        raise Refusal(problem) from problem


class RoleConfig(Section):
    """The backend, model and limits of one role."""

    backend: str = "torch"
    engine: str | None = None
    model: ModelSource | None = None
    copy_of: str | None = None
    tokenizer: Annotated[CharTokenizer | BpeTokenizer, Field(discriminator="kind")] | None = None
    optimizer: OptimizerChanges | None = None
    num_slots: Int = Field(default=256, ge=1, le=1 << 20)
    num_engines: Annotated[Int, Field(ge=1, le=1024)] | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    recompute: Literal["auto", "none", "full"] = "auto"
    ranks: Int = Field(default=1, ge=1, le=1024)
    terms: Annotated[Terms, Field(min_length=1)] | None = None
    environment: Annotated[str, AfterValidator(_environment_target)] | None = None
    options: Options = Field(default_factory=dict)
    engine_options: Options = Field(default_factory=dict)
    timeout_s: Float = Field(default=60.0, gt=0)

    @property
    def own_engine(self) -> str | None:
        """The name of the plug-in that generates where it is not the one that trains."""
        return None if self.engine == self.backend else self.engine

    @property
    def plugin(self) -> str:
        """The name of the plug-in that trains and generates: `backend`, or `backend+engine`."""
        return self.backend if self.own_engine is None else f"{self.backend}+{self.engine}"

    @model_validator(mode="after")
    def _one_plug_in_has_one_set_of_options(self) -> RoleConfig:
        if self.engine_options and self.own_engine is None:
            raise Refusal(
                ConfigError(
                    f"{self.backend} trains and generates, and has one set of options",
                    where="engine_options",
                    found=f"engine_options with {listing(self.engine_options)}",
                    hint="write them under options, or name another plug-in as engine",
                )
            )
        return self

    @model_validator(mode="after")
    def _environments_have_no_model(self) -> RoleConfig:
        for key in ("engine", "model", "copy_of", "tokenizer", "optimizer"):
            if self.environment is not None and getattr(self, key) is not None:
                raise ValueError(f"a role with an environment has no {key}")
        return self


_CLASSES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}

# Rows of embedding and output matrices; sizes that are no multiple of 8 are slow on every device.
_MULTIPLE = 8


def vocabulary_of(spec: CharTokenizer | BpeTokenizer) -> tuple[int, int]:
    """Returns `(vocab_size, eos_id)` of the tokenizer that `spec` makes, before data is read."""
    if isinstance(spec, BpeTokenizer):
        return spec.vocab_size, 0
    used = len(spec.alphabet) + 1
    return -(-used // _MULTIPLE) * _MULTIPLE, len(spec.alphabet)


def fresh_config_json(
    model: FreshModel, vocab_size: int, eos_id: int, dtype: str = "float32"
) -> dict[str, object]:
    """Returns the Hugging Face `config.json` of a new model.

    Args:
        vocab_size: Number of token ids, which `vocabulary_of` knows before any data is read.
        eos_id: Token id of the end of the text; `vocabulary_of` knows it too.
        dtype: Parameter type.
    """
    config: dict[str, object] = {
        "architectures": [_CLASSES[model.architecture]],
        "model_type": model.architecture,
        "vocab_size": vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads or model.num_heads,
        "head_dim": model.hidden_size // model.num_heads,
        "max_position_embeddings": model.max_length,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "initializer_range": model.initializer_range,
        "attention_dropout": 0.0,
        "tie_word_embeddings": model.tie_embeddings,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": eos_id,
        "pad_token_id": eos_id,
        "dtype": dtype,
    }
    if model.architecture != "llama":
        config["use_sliding_window"] = False
    else:
        config |= {"attention_bias": False, "mlp_bias": False}
    return config
