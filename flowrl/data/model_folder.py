"""Model folders: the check of one that the user brings, and the files of a new model.

A new model's folder has `config.json`, `generation_config.json` and the tokenizer's files, and no
weights: the backend that opens it initialises them from the run's seed.

A new tokenizer has one token a character, or is byte-level BPE trained on the data. Its files are
those of a Hugging Face folder that `AutoTokenizer.from_pretrained` loads. Its vocabulary is filled
with tokens `<unused0>`, `<unused1>`, ... that decode to their own names. An untrained policy can
generate any id of its output layer; were there ids without a text, a response that holds one would
decode to the same text as a right answer and be rewarded for it. For the same reason padding, which
decodes to nothing, has no token of its own: it is `<eos>`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

from flowrl.config.roles import (
    BpeTokenizer,
    CharTokenizer,
    RoleConfig,
    fresh_config_json,
    vocabulary_of,
)
from flowrl.data.rows import Row
from flowrl.errors import ConfigError, DataError
from flowrl.files import folder_atomically


def prepare_model_folder(
    role: RoleConfig, folder: Path, rows: Iterable[Row], *, name: str = "actor"
) -> Path:
    """Returns a folder with `config.json` and tokenizer files for the model of `role`.

    A folder that the user brings is checked and returned as it is. A new model's files are written
    into `folder` in one step; where they are there already, they are kept, so that a resumed run
    keeps its vocabulary.

    Args:
        rows: The training rows, for a new tokenizer.
        name: The role's name, for messages.

    Raises:
        ConfigError: No model, no tokenizer, or a folder that lacks files.
        DataError: A row that the new tokenizer cannot take.
    """
    key = f"roles.{name}"
    if isinstance(role.model, str):
        check_model_folder(Path(role.model), where=f"{key}.model")
        return Path(role.model)
    if role.model is None:
        raise ConfigError(
            "the role has no model",
            where=f"{key}.model",
            expected="a Hugging Face model folder, or the fields of a new model",
        )
    if role.tokenizer is None:
        raise ConfigError(
            "a new model needs a tokenizer",
            where=f"{key}.tokenizer",
            expected="{kind: char, alphabet: ...} or {kind: bpe, vocab_size: ...}",
        )
    if (folder / "config.json").is_file():
        return folder
    vocab_size, eos_id = vocabulary_of(role.tokenizer)
    dtype = "float32" if role.dtype == "auto" else role.dtype
    config = fresh_config_json(role.model, vocab_size, eos_id, dtype)
    generation = {"eos_token_id": eos_id, "pad_token_id": eos_id, "do_sample": True}
    files = build_tokenizer(role.tokenizer, rows, max_length=role.model.max_length)
    files["config.json"] = json.dumps(config, indent=2) + "\n"
    files["generation_config.json"] = json.dumps(generation, indent=2) + "\n"
    _write_folder(folder, files)
    return folder


def check_model_folder(folder: Path, *, where: str) -> None:
    """Checks that a Hugging Face model folder can be used, without importing any library.

    Raises:
        ConfigError: It is missing, lacks files, or holds its weights as pickles only.
    """
    if not folder.is_dir():
        raise ConfigError(
            "this is a file, without tokenizer and weights"
            if folder.is_file()
            else "no such model folder",
            where=where,
            found=str(folder),
            hint=f"set {where}=FOLDER to a Hugging Face model folder; paths are taken from the "
            f"working folder, {Path.cwd()}, and models are not downloaded",
        )
    missing = [n for n in ("config.json", "tokenizer.json") if not (folder / n).is_file()]
    if missing:
        convert = "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        raise ConfigError(
            f"the model folder lacks {' and '.join(missing)}",
            where=where,
            found=str(folder),
            hint=f"write a fast tokenizer once: {convert}"
            if missing == ["tokenizer.json"]
            else "point it at a folder that save_pretrained wrote",
        )
    if not any(folder.glob("*.safetensors")):
        pickles = sorted(p.name for p in folder.glob("*.bin"))
        raise ConfigError(
            "the model folder has no safetensors weights",
            where=where,
            found=f"{folder}" + (f" with {', '.join(pickles[:3])}" if pickles else ""),
            hint="save the model again with save_pretrained; pickled weights are never loaded"
            if pickles
            else None,
        )


def _write_folder(folder: Path, files: Mapping[str, str]) -> None:
    """Writes `files` so that `folder` appears whole or not at all."""
    try:
        if folder.is_dir():
            folder.rmdir()  # an empty one that the caller made; a foreign one is refused
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder_atomically(folder) as temporary:
            for name, text in files.items():
                (temporary / name).write_text(text, encoding="utf-8")
    except OSError as reason:
        raise DataError(
            "cannot write the model folder", where=str(folder), found=str(reason)
        ) from reason


EOS = "<eos>"

# transformers, models/qwen2/tokenization_qwen2.py, PRETOKENIZE_REGEX.
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build_tokenizer(
    spec: CharTokenizer | BpeTokenizer, rows: Iterable[Row], *, max_length: int
) -> dict[str, str]:
    """Returns the files of a new tokenizer, by name.

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
    texts = (*row.texts, row.solution)
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
    """Returns a tokenizer that splits text as Qwen2's does: words, single digits, runs of signs.

    `AutoTokenizer` takes Qwen2's own splitting for every Qwen2 model, whatever its tokenizer.json
    says, so any other would give other ids there. Single digits also suit sums.
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
    """Returns an ASCII character as byte-level vocabularies write it, with a symbol for a space."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return str(split.pre_tokenize_str(character)[0][0])


def _fill(fast: FastTokenizer, size: int) -> FastTokenizer:
    """Adds `<unused>` words up to `size`, because a small text yields fewer merges."""
    described = json.loads(fast.to_str())
    vocab: dict[str, int] = described["model"]["vocab"]
    number = 0
    while len(vocab) < size:
        word = f"<unused{number}>"
        number += 1
        if word not in vocab:
            vocab[word] = len(vocab)
    return FastTokenizer.from_str(json.dumps(described))
