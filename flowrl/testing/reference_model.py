"""The plain forward pass of Transformers, against which backends are checked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from flowrl.backend.batch import Ints

_OLD_NAME = "past_key_values"

Doubles = npt.NDArray[np.float64]


class ReferenceModel:
    """A causal language model in float32 on the CPU, one sequence at a time and without a cache.

    Args:
        folder: A Hugging Face model folder with weights.
    """

    def __init__(self, folder: Path) -> None:
        transformers.utils.logging.disable_progress_bar()
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, attn_implementation="eager"
        ).eval()

    def logits(self, tokens: Ints, *, older: ReferenceModel | None = None, kept: int = 0) -> Any:
        """float32 `[T, V]`, the logits after each token.

        Args:
            tokens: int64 `[T]`, prompt and response.
            older: The model whose keys and values the first `kept` tokens have: that of an engine
                that got this model's weights after them and kept its cache.
        """
        ids = torch.from_numpy(np.asarray(tokens, np.int64))[None]
        with torch.no_grad():
            if older is None or kept == 0:
                return self.model(input_ids=ids, use_cache=False).logits[0]
            before = older.model(input_ids=ids[:, :kept], use_cache=True)
            # Transformers 5 renamed the argument and the field.
            name = "cache" if "cache" in signature(self.model.forward).parameters else _OLD_NAME
            stored = {name: before[name] if name in before else before[_OLD_NAME]}
            after = self.model(input_ids=ids[:, kept:], use_cache=True, **stored)
            return torch.cat([before.logits[0], after.logits[0]])

    def logprobs(self, tokens: Ints, start: int, temperature: float = 1.0, **cache: Any) -> Doubles:
        """float64 `[T - start]`, logprobs of the tokens from `start` on.

        Args:
            tokens: int64 `[T]`, prompt and response.
            start: The first token whose logprob is wanted, at least 1.
            temperature: The divisor of the logits; 0 is greedy, whose logprobs are those at 1.
            cache: `older` and `kept` of `logits`.
        """
        logits = self.logits(tokens, **cache)[start - 1 : -1].double() / (temperature or 1.0)
        chosen = torch.from_numpy(np.asarray(tokens[start:], np.int64))[:, None]
        found: Doubles = logits.log_softmax(-1).gather(-1, chosen)[:, 0].numpy()
        return found


@cache
def reference_of(folder: Path) -> ReferenceModel:
    """Returns the reference of a folder, which is loaded once."""
    return ReferenceModel(folder)


def make_model(folder: Path, *, vocab_size: int = 256, tied: bool = False, **shape: int) -> Path:
    """Writes a small random Qwen2 model with a tokenizer, and returns its folder.

    Its weights have a standard deviation of 0.25, so that its choices differ clearly.
    """
    config = transformers.Qwen2Config(
        **{
            "vocab_size": vocab_size,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            **shape,
        },
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.25)
    model.tie_weights()
    model.save_pretrained(folder)
    # A token of one byte each, the first one and those above 255 aside.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<0>", *letters[1:], *(f"<{number}>" for number in range(256, vocab_size))]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<0>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


def change_weights(source: Path, folder: Path) -> Path:
    """Writes a model whose weights differ from those of `source` by a tenth of their spread."""
    model = ReferenceModel(source).model
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.1 * parameter.std().nan_to_num() * noise)
    model.save_pretrained(folder)
    for file in _others(source):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def _others(source: Path) -> Sequence[Path]:
    weights = (".safetensors", ".bin", ".index.json")
    return [f for f in source.iterdir() if f.is_file() and not f.name.endswith(weights)]
