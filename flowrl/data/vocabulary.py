"""New tokenizers for new models: one token a character, or byte-level BPE trained on the data.

Both are saved as the files of a Hugging Face folder that `AutoTokenizer.from_pretrained` loads.

The vocabulary is filled up with tokens `<unused0>`, `<unused1>`, ... that decode to their own
names. An untrained policy can produce any id of its output layer; were there ids without a text,
a response that holds one would decode to the same text as a right answer and be rewarded for it.
For the same reason padding, which decodes to nothing, gets no token of its own: it is `<eos>`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

from flowrl.config.roles import BpeTokenizer, CharTokenizer, vocabulary_of
from flowrl.data.rows import Row

__all__ = ["EOS", "build_tokenizer"]

EOS = "<eos>"

# transformers, models/qwen2/tokenization_qwen2.py, PRETOKENIZE_REGEX.
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build_tokenizer(
    spec: CharTokenizer | BpeTokenizer, rows: Iterable[Row], *, max_length: int
) -> dict[str, str]:
    """The tokenizer's files, by name.

    Args:
        rows: The training rows: BPE learns from their prompts and responses.
        max_length: Tokens that the model can take.
    """
    fast = _train_bpe(spec, rows) if isinstance(spec, BpeTokenizer) else _characters(spec)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": EOS,
        # Unused, but some tokenizer classes add a token of their own where none is named.
        "unk_token": EOS,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": fast.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
    }


def _texts(row: Row) -> tuple[str, ...]:
    texts = (row.prompt, row.solution)
    return texts if row.rejected is None else (*texts, row.rejected)


def _characters(spec: CharTokenizer) -> FastTokenizer:
    size, eos_id = vocabulary_of(spec)
    words = [*map(_byte_symbol, spec.alphabet), EOS]
    words += [f"<unused{i}>" for i in range(size - len(words))]
    fast = _byte_level(models.BPE({word: i for i, word in enumerate(words)}, []))
    fast.add_special_tokens([AddedToken(EOS, special=True, normalized=False)])
    assert fast.token_to_id(EOS) == eos_id
    return fast


def _train_bpe(spec: BpeTokenizer, rows: Iterable[Row]) -> FastTokenizer:
    fast = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=spec.vocab_size,
        special_tokens=[AddedToken(EOS, special=True, normalized=False)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    fast.train_from_iterator((text for row in rows for text in _texts(row)), trainer)
    return _fill(fast, spec.vocab_size)


def _byte_level(model: models.BPE) -> FastTokenizer:
    """A tokenizer that splits text as Qwen2's does: words, single digits, runs of signs.

    `AutoTokenizer` takes Qwen2's own splitting for every Qwen2 model, whatever its tokenizer.json
    says, so any other would give other ids there. Single digits suit sums besides.
    """
    fast = FastTokenizer(model)
    fast.normalizer = normalizers.NFC()
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    fast.decoder = decoders.ByteLevel()
    return fast


def _byte_symbol(character: str) -> str:
    """How byte-level vocabularies write an ASCII character: itself, or a stand-in for a space."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return str(split.pre_tokenize_str(character)[0][0])


def _fill(fast: FastTokenizer, size: int) -> FastTokenizer:
    """Adds `<unused>` words up to `size`: a small text yields fewer merges than were asked for."""
    described = json.loads(fast.to_str())
    vocab: dict[str, int] = described["model"]["vocab"]
    number = 0
    while len(vocab) < size:
        word = f"<unused{number}>"
        number += 1
        if word not in vocab:
            vocab[word] = len(vocab)
    return FastTokenizer.from_str(json.dumps(described))
