"""The token ids that a model folder's files name, against the rows of the model's embedding.

An id past them, or a negative one, would otherwise be another token's without a word: -1 is that of
the last row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from tokenizers import Tokenizer as FastTokenizer

from flowrl.errors import DataError

__all__ = ["check_config_ids", "check_tokenizer_ids", "model_vocabulary", "token_ids_of"]

_SUFFIXES = ("_token_id", "_token_ids")


def model_vocabulary(config: Mapping[str, object], path: Path) -> int | None:
    """Rows of the embedding of the model that a `config.json` describes; None where nothing says.

    Raises:
        DataError: `vocab_size` is no number of rows.
    """
    nested = config.get("text_config")
    size = config.get("vocab_size")
    if size is None and isinstance(nested, Mapping):
        size = nested.get("vocab_size")
    if size is None:
        return None
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise DataError(
            "vocab_size is no number of tokens",
            where=str(path),
            found=repr(size),
            expected="a whole number from 1 up",
        )
    return size


def token_ids_of(value: object, name: str, file: Path) -> list[int]:
    """The ids that a file has under `name`: one, several, or none where it is null.

    Raises:
        DataError: something else stands there.
    """
    ids: list[int] = []
    for item in value if isinstance(value, list) else [] if value is None else [value]:
        if not isinstance(item, int) or isinstance(item, bool):
            raise DataError(
                f"{name} is no token id",
                where=str(file),
                found=repr(value),
                expected="a whole number, a list of them, or null",
            )
        ids.append(item)
    return ids


def check_config_ids(configs: Mapping[Path, Mapping[str, object]], size: int | None) -> None:
    """Whether every token id in a folder's JSON files is a token of the model.

    Args:
        configs: What is in the files.
        size: Rows of the model's embedding; None where it is not known.

    Raises:
        DataError: one is not; with its file, the id and the limit.
    """
    hint = "set it to the id of a token, or take it out of the file"
    for file, name, token in _in_configs(configs):
        _check(file, name, token, size, hint)


def check_tokenizer_ids(
    path: Path,
    described: Mapping[str, Any],
    fast: FastTokenizer,
    added: Collection[str],
    size: int | None,
) -> None:
    """Whether every token of a folder's tokenizer is one of the model.

    Args:
        path: Of tokenizer.json.
        described: What is in it.
        fast: The tokenizer made of it. It numbers added tokens itself, whatever the file says.
        added: Tokens that tokenizer.json does not have, but tokenizer_config.json.
        size: As above.

    Raises:
        DataError: one is not; with its file, the id and the limit.
    """
    hint = (
        "take the tokenizer that came with the model, or save the model again with an embedding "
        "that has all tokens of the tokenizer"
    )
    for name, token in _in_tokenizer(described):
        _check(path, name, token, size, hint)
    vocabulary = fast.get_vocab(with_added_tokens=True)
    last = max(vocabulary, key=vocabulary.__getitem__, default=None)
    if last is None:
        raise DataError("the tokenizer has no tokens", where=str(path))
    owner = path.with_name("tokenizer_config.json") if last in added else path
    _check(owner, f"the token {last!r}", vocabulary[last], size, hint)


def _check(file: Path, name: str, token: int, size: int | None, hint: str) -> None:
    if token < 0 or (size is not None and token >= size):
        known = "" if size is None else f" to {size - 1} (vocab_size {size} in config.json)"
        raise DataError(
            f"{name} is no token of the model",
            where=str(file),
            found=f"id {token}",
            expected=f"an id from 0{known or ' up'}",
            hint=hint,
        )


_Named: TypeAlias = Iterator[tuple[Path, str, int]]
"""Ids with the file that they are in and what they are called there."""


def _in_configs(configs: Mapping[Path, Mapping[str, object]]) -> _Named:
    for file, config in configs.items():
        for at, part in (("", config), ("text_config.", config.get("text_config"))):
            if not isinstance(part, Mapping):
                continue
            for key, value in part.items():
                if key.endswith(_SUFFIXES):
                    yield from ((file, at + key, i) for i in token_ids_of(value, at + key, file))
        listed = config.get("added_tokens_decoder")
        for key in listed if isinstance(listed, Mapping) else ():
            name = f"added_tokens_decoder[{key!r}]"
            if not key.removeprefix("-").isdecimal():
                token_ids_of(key, name, file)
            yield file, name, int(key)


def _in_tokenizer(described: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for entry in described.get("added_tokens") or ():
        yield f"the token {entry['content']!r}", entry["id"]
    for token in _put_around(described.get("post_processor") or {}):
        yield "a token of post_processor", token


def _put_around(part: Mapping[str, Any]) -> Iterator[int]:
    """Ids that a post-processor puts around a text."""
    for one in part.get("processors") or ():
        yield from _put_around(one)
    for entry in (part.get("special_tokens") or {}).values():
        yield from entry["ids"]
    for name in ("cls", "sep"):
        if name in part:
            yield int(part[name][1])
