"""Tiny tokenizers of each kind that does something where a text begins, and folders of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

__all__ = ["KINDS", "VOCABULARY", "byte_level", "llama_2", "saved", "with_bos"]

SPECIAL = {"<unk>": 0, "<s>": 1, "</s>": 2}
PIECES = ["▁", *"x3+=42a\né", "▁3", "▁x", "▁▁"]
VOCABULARY = SPECIAL | {piece: len(SPECIAL) + i for i, piece in enumerate(PIECES)}
MERGES = [("▁", "3"), ("▁", "x"), ("▁", "▁")]


def bpe() -> FastTokenizer:
    return FastTokenizer(models.BPE(VOCABULARY, MERGES, unk_token="<unk>", fuse_unk=True))


def llama_2() -> FastTokenizer:
    """A normalizer puts the space in front, after every special token too; Mistral 0.1 has it."""
    fast = bpe()
    fast.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return with_bos(fast)


def llama_2_metaspace() -> FastTokenizer:
    """The same, with both parts at once."""
    fast = llama_2()
    fast.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first", split=False)
    return fast


def metaspace_first() -> FastTokenizer:
    fast = bpe()
    fast.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first", split=False)
    fast.decoder = decoders.Metaspace("▁", "first")
    return with_bos(fast)


def unigram() -> FastTokenizer:
    """As a SentencePiece model with add_dummy_prefix becomes one."""
    scores = {piece: -1.0 - (len(piece) == 1) for piece in VOCABULARY}
    fast = FastTokenizer(models.Unigram(list(scores.items()), 0))
    fast.normalizer = normalizers.Strip(left=False, right=True)
    fast.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace("▁", "always")])
    fast.decoder = decoders.Sequence([decoders.Metaspace("▁", "always")])
    return fast


def anchored() -> FastTokenizer:
    """A pattern puts the space in front."""
    fast = bpe()
    fast.normalizer = normalizers.Sequence(
        [normalizers.Replace(Regex("^"), " "), normalizers.Replace(" ", "▁")]
    )
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Replace(Regex("^ "), "")]
    )
    return fast


def byte_level(prefix: bool) -> FastTokenizer:
    """GPT-2's, which may put a space in front too."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = SPECIAL | {symbol: 3 + i for i, symbol in enumerate(alphabet)} | {"Ġ3": 259}
    fast = FastTokenizer(models.BPE(vocabulary, [("Ġ", "3")]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    fast.decoder = decoders.ByteLevel()
    return fast


def with_bos(fast: FastTokenizer) -> FastTokenizer:
    fast.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return fast


KINDS: dict[str, Callable[[], FastTokenizer]] = {
    "llama 2": llama_2,
    "llama 2, both ways": llama_2_metaspace,
    "metaspace, first": metaspace_first,
    "unigram": unigram,
    "anchored pattern": anchored,
    "byte level": lambda: byte_level(prefix=False),
    "byte level, prefix": lambda: byte_level(prefix=True),
    "byte level, BOS": lambda: with_bos(byte_level(prefix=True)),
}


def saved(folder: Path, fast: FastTokenizer, **config: object) -> Path:
    fast.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    folder.mkdir(exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    base = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(base | config))
    return folder
