"""Model folders: the check of one that the user brings, and the files of a new model.

A new model's folder has `config.json`, `generation_config.json` and the tokenizer's files, and no
weights: the backend that opens it draws them from the run's seed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from flowrl.config.roles import RoleConfig, fresh_config_json, vocabulary_of
from flowrl.data.rows import Row
from flowrl.data.vocabulary import build_tokenizer
from flowrl.errors import ConfigError, DataError
from flowrl.files import folder_atomically

__all__ = ["check_model_folder", "prepare_model_folder"]


def prepare_model_folder(
    role: RoleConfig, folder: Path, rows: Iterable[Row], *, name: str = "actor"
) -> Path:
    """A folder with `config.json` and tokenizer files for the model of `role`.

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
    """Whether a Hugging Face model folder can be used, without importing any library.

    Raises:
        ConfigError: It is missing, lacks files, or holds its weights as pickles only.
    """
    if not folder.is_dir():
        raise ConfigError(
            "no such model folder",
            where=where,
            found=str(folder),
            hint=f"paths are taken from the working folder, {Path.cwd()}; "
            "models are not downloaded",
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
