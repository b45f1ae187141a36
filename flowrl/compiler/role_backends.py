"""The backends of a run's roles: plug-ins, and models by shape and vocabulary. Reads no weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from flowrl.backend.plugin import Plugin, options_of
from flowrl.backend.registry import find
from flowrl.config.load import LoadedConfig
from flowrl.config.roles import (
    BpeTokenizer,
    CharTokenizer,
    FreshModel,
    RoleConfig,
    fresh_config_json,
    vocabulary_of,
)
from flowrl.cost.models import ModelShape
from flowrl.cost.models.reader import ConfigReader
from flowrl.errors import ConfigError, PlanError
from flowrl.files import decode_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The meaning of token ids to a model.

    Attributes:
        size: Rows of its embedding.
        origin: The file or key that says so.
        folder: The model's folder; None for a new model.
        tokenizer: Of a new model; None for a folder.
    """

    size: int
    origin: str
    folder: Path | None = None
    tokenizer: CharTokenizer | BpeTokenizer | None = None

    def agrees_with(self, other: Vocabulary) -> bool:
        """True if a token id means the same to both.

        Models of one family may have more rows than tokens, and not the same number of them; their
        tokenizers decide. Of a folder and a new model the sizes are all that can be compared.
        """
        if self.tokenizer is not None and other.tokenizer is not None:
            return self.tokenizer == other.tokenizer
        if self.folder is None or other.folder is None:
            return self.size == other.size
        if self.folder == other.folder:
            return True
        mine, theirs = (_bytes(v.folder / "tokenizer.json") for v in (self, other) if v.folder)
        if mine is None or theirs is None:
            return self.size == other.size
        return mine == theirs or _words(mine) == _words(theirs)


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None  # a missing tokenizer is reported where it is opened


def _words(text: bytes) -> object:
    """The part of a tokenizer.json that says which id a word has."""
    try:
        read = json.loads(text)
        added = {entry["content"]: entry["id"] for entry in read.get("added_tokens") or []}
        return read["model"]["vocab"], added
    except (ValueError, KeyError, TypeError):
        return text


class RoleBackends:
    """The backends of roles before any is opened. Each fact is looked up once.

    Args:
        here: They run on this machine; else only their needs are looked up.

    Attributes:
        loaded: The configuration.
        roles: Its section of each role.
    """

    def __init__(self, loaded: LoadedConfig, *, here: bool = True) -> None:
        self.loaded = loaded
        self.roles: Mapping[str, RoleConfig] = loaded.config.roles
        self._here = here
        self._plugins: dict[str, Plugin] = {}
        self._files: dict[str, Mapping[str, object]] = {}
        self._shapes: dict[str, ModelShape] = {}

    def plugin(self, role: str) -> Plugin:
        """Returns the plug-in of a role.

        Raises:
            BackendError: no such backend, or a broken one.
        """
        key = "engine" if self.roles[role].engine else "backend"
        return self._find(self.roles[role].plugin, f"roles.{role}.{key}")

    def option_models(self, role: str) -> dict[str, tuple[str, type[BaseModel] | None]]:
        """Returns whose options each key of a role holds: the name of the plug-in, and its model.

        Raises:
            BackendError: no such backend, or a broken one.
        """
        config = self.roles[role]
        owners = {"options": ("backend", config.backend)}
        if config.own_engine is not None:
            owners["engine_options"] = ("engine", config.own_engine)
        return {
            key: (name, options_of(self._find(name, f"roles.{role}.{named_by}")))
            for key, (named_by, name) in owners.items()
        }

    def _find(self, backend: str, key: str) -> Plugin:
        if backend not in self._plugins:
            self._plugins[backend] = find(backend, where=self.loaded.where(key))
        return self._plugins[backend]

    def suggest_model(self, role: str) -> str:
        """Suggests a model for a role: that of another role, or a folder."""
        with_model = [name for name, config in self.roles.items() if config.model is not None]
        folder = f"roles.{role}.model=FOLDER"
        return (
            f"set roles.{role}.copy_of={with_model[0]}, or {folder}"
            if with_model
            else f"set {folder}"
        )

    def source(self, role: str) -> str:
        """Returns the role whose model a role begins as: itself, or the last of its `copy_of`s."""
        seen = [role]
        while (other := self.roles[seen[-1]].copy_of) is not None and other not in seen:
            seen.append(other)
        return seen[-1]

    def shape(self, role: str) -> ModelShape:
        """Returns the shape of the language model that a role begins as.

        Raises:
            ConfigError: no model, no tokenizer for a new one, a config.json that cannot be read.
            PlanError: a model of a kind that is not known.
        """
        source = self.source(role)
        if source not in self._shapes:
            self._shapes[source] = self._read_shape(source, self.roles[source])
        return self._shapes[source]

    def origin(self, role: str) -> str:
        """Returns the file, or the key of the config, that describes the model of a role."""
        source = self.source(role)
        model = self.roles[source].model
        return str(config_file(model)) if isinstance(model, str) else f"roles.{source}"

    def vocabulary(self, role: str) -> Vocabulary:
        """Returns the vocabulary of a role's model; raises as `shape` does."""
        source, size = self.source(role), self.shape(role).vocab_size
        config = self.roles[source]
        if isinstance(config.model, str):
            file = config_file(config.model)
            folder = None if config.model.endswith(".json") else file.parent
            return Vocabulary(size=size, origin=str(file), folder=folder)
        key = f"roles.{source}.tokenizer"
        return Vocabulary(size=size, origin=key, tokenizer=config.tokenizer)

    def longest(self, role: str) -> int | None:
        """Returns the tokens of the longest sample that a role's model takes; None if unknown."""
        source = self.source(role)
        match self.roles[source].model:
            case FreshModel() as fresh:
                return fresh.max_length
            case str() as folder:
                where = f"{config_file(folder)} and roles.{source}.model"
                reader = ConfigReader(config=self._read(folder, source), where=where)
                return reader.size_or_none("max_position_embeddings", absent=None)
            case None:
                return None

    def _read_shape(self, role: str, config: RoleConfig) -> ModelShape:
        if config.model is None:
            raise ConfigError(
                "the role has no model",
                where=f"roles.{role}.model",
                expected="a Hugging Face model folder, the fields of a new model, or copy_of",
                hint=self.suggest_model(role),
            )
        if isinstance(config.model, str):
            known, file = self._read(config.model, role), config_file(config.model)
            shape = ModelShape.from_hf_config(known, where=f"{file} and roles.{role}.model")
            if self._here and (shape.experts is not None or shape.latent is not None):
                raise PlanError(
                    "experts and latent attention can be counted, but no backend here is known to "
                    "need the memory that is counted for them",
                    where=f"roles.{role}.model",
                    found=f"model_type {shape.family!r}",
                    expected="llama, mistral, qwen2 or qwen3",
                    hint="with --cluster FILE it is planned for other machines",
                )
            return shape
        if config.tokenizer is None:
            raise ConfigError(
                "a new model needs a tokenizer",
                where=f"roles.{role}.tokenizer",
                expected="{kind: char, alphabet: ...} or {kind: bpe, vocab_size: ...}",
                hint=f"set roles.{role}.tokenizer; a model folder brings its own",
            )
        vocab_size, eos_id = vocabulary_of(config.tokenizer)
        return ModelShape.from_hf_config(fresh_config_json(config.model, vocab_size, eos_id))

    def _read(self, folder: str, role: str) -> Mapping[str, object]:
        if folder not in self._files:
            self._files[folder] = _read_json(config_file(folder), role)
        return self._files[folder]


def config_file(model: str) -> Path:
    """Returns the `config.json` of a model: the file itself, or that of its folder."""
    return Path(model) if model.endswith(".json") else Path(model) / "config.json"


def _read_json(path: Path, role: str) -> Mapping[str, object]:
    try:
        value = decode_json(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError("it holds no JSON object")
    except (OSError, ValueError) as error:
        raise ConfigError(
            "the model's config.json cannot be read",
            where=f"roles.{role}.model",
            found=f"{path}: {error}",
            hint="take the config.json that came with the model: alone (FILE.json) to plan, or in "
            "its folder",
        ) from error
    return value
