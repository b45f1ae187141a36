"""The files of a model folder's tokenizer: special tokens, end tokens, ids, and text in a sample.

Every token id that the files name must be a row of the model's embedding. An id past the last row,
or a negative one, would otherwise silently be the id of another token: -1 is that of the last row.

Tokenizers that come from SentencePiece put a space in front of a text: by a normalizer (Llama 2,
Mistral 0.1), by the pre-tokenizer, or both ways; GPT-2's can do so too. Their decoders remove that
space again. A response or an observation follows other tokens, so this space would be one that
nobody wrote, or one that was written would be lost. `tokenizer_of_pieces` leaves it out.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as FastTokenizer

from flowrl.errors import DataError

_SUFFIXES = ("_token_id", "_token_ids")


def model_vocabulary(config: Mapping[str, object], path: Path) -> int | None:
    """Returns the rows of the embedding that a `config.json` describes; None where it has none.

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
    """Returns the ids that a file has under `name`: one, several, or none where it is null.

    Raises:
        DataError: The value is something else.
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
    """Checks that every token id in a folder's JSON files is a token of the model.

    Args:
        configs: The contents of the files.
        size: Rows of the model's embedding; None where it is not known.
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
    """Checks that every token of a folder's tokenizer is one of the model.

    Args:
        path: The path of tokenizer.json.
        described: The contents of tokenizer.json.
        fast: The tokenizer made from it, which numbers added tokens itself.
        added: Tokens that only tokenizer_config.json has.
        size: Rows of the model's embedding; None where it is not known.
    """
    hint = (
        "take the tokenizer that came with the model, or save the model again with an embedding "
        "that has all tokens of the tokenizer"
    )
    for entry in described.get("added_tokens") or ():
        _check(path, f"the token {entry['content']!r}", entry["id"], size, hint)
    for token in _put_around(described.get("post_processor") or {}):
        _check(path, "a token of post_processor", token, size, hint)
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


def _in_configs(
    configs: Mapping[Path, Mapping[str, object]],
) -> Iterator[tuple[Path, str, int]]:
    """Yields ids with their file and their name in it."""
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


def _put_around(part: Mapping[str, Any]) -> Iterator[int]:
    """Yields the ids that a post-processor puts around a text."""
    for processor in part.get("processors") or ():
        yield from _put_around(processor)
    for entry in (part.get("special_tokens") or {}).values():
        yield from entry["ids"]
    for name in ("cls", "sep"):
        if name in part:
            yield int(part[name][1])


_LISTS = ("normalizers", "pretokenizers", "decoders")
"""The keys under which sequences of normalizers, pre-tokenizers and decoders list their parts."""


def tokenizer_of_pieces(fast: FastTokenizer) -> FastTokenizer:
    """Returns a tokenizer of the same tokens for text in the middle of a sample.

    The texts of pieces are joined by joining their tokens. Returns `fast` where it does so already.
    """
    parts = {
        "normalizer": fast.normalizer,
        "pre_tokenizer": fast.pre_tokenizer,
        "decoder": fast.decoder,
    }
    changed: dict[str, object] = {}
    for name, part in parts.items():
        if part is None or isinstance(part, decoders.ByteLevel):
            continue  # that decoder has the option of its pre-tokenizer, and does not read it
        before = json.loads(part.__getstate__())
        after = _within_text(before)
        if after != before:
            changed[name] = after
    if not changed:
        return fast
    return FastTokenizer.from_str(json.dumps({**json.loads(fast.to_str()), **changed}))


def _within_text(part: Mapping[str, object]) -> Mapping[str, object] | None:
    """Returns a part of a tokenizer.json without its effect at a text's ends; None where it has no
    other."""
    match part:
        case {"type": "Prepend" | "Strip"}:
            return None
        case {"type": "Replace", "pattern": {"Regex": str(anchored)}} if anchored.startswith(
            ("^", r"\A")
        ):
            return None
        case {"type": "Metaspace"}:
            return {**part, "prepend_scheme": "never"}
        case {"type": "ByteLevel", "add_prefix_space": True}:
            return {**part, "add_prefix_space": False}
    for name in _LISTS:
        listed = part.get(name)
        if isinstance(listed, list):
            return {**part, name: [p for p in map(_within_text, listed) if p is not None]}
    return part


_SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


def missing_tokenizer(folder: Path) -> DataError:
    """Returns the error for a folder without tokenizer.json."""
    if not folder.is_dir():
        return DataError("no such model folder", where=str(folder))
    names = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
    slow = [name for name in names if (folder / name).is_file()]
    return DataError(
        "the model folder has no tokenizer.json",
        where=str(folder),
        found=f"only {', '.join(slow)}" if slow else None,
        expected="a fast tokenizer",
        hint="convert it once: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
    )


def read_object(path: Path) -> dict[str, object]:
    """Returns the object in a JSON file; an empty one where there is no file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as reason:
        raise DataError("cannot be read as JSON", where=str(path), found=str(reason)) from reason
    if not isinstance(value, dict):
        raise DataError("holds no JSON object", where=str(path))
    return value


def special_tokens(*sources: Mapping[str, object]) -> dict[str, str]:
    """Returns the special tokens by name, from the first source that has each."""
    by_name: dict[str, str] = {}
    for name in _SPECIAL:
        values = (source.get(name) for source in sources)
        texts = (v.get("content") if isinstance(v, dict) else v for v in values)
        text = next((text for text in texts if isinstance(text, str)), None)
        if text is not None:
            by_name[name] = text
    return by_name


def add_missing_tokens(
    fast: FastTokenizer, config: Mapping[str, object], special: Mapping[str, str]
) -> frozenset[str]:
    """Adds the tokens that only tokenizer_config.json declares, in the order of Transformers.

    Returns:
        The texts of these tokens.
    """
    known = set(fast.get_vocab(with_added_tokens=True))
    listed = config.get("added_tokens_decoder")
    tokens: list[AddedToken] = []
    if isinstance(listed, dict):
        for _, entry in sorted(listed.items(), key=lambda item: int(item[0])):
            if isinstance(entry, dict) and entry.get("content") not in known:
                options = {
                    k: bool(entry[k])
                    for k in ("single_word", "lstrip", "rstrip", "normalized", "special")
                    if k in entry
                }
                tokens.append(AddedToken(str(entry["content"]), **options))
                known.add(str(entry["content"]))
    for text in special.values():
        if text not in known:
            tokens.append(AddedToken(text, special=True))
            known.add(text)
    if tokens:
        fast.add_tokens(tokens)
    return frozenset(token.content for token in tokens)


def end_tokens(
    fast: FastTokenizer,
    special: Mapping[str, str],
    configs: Mapping[Path, Mapping[str, object]],
    folder: Path,
) -> tuple[int, tuple[int, ...]]:
    """Returns the token that ends supervised responses, and all that end a generated one.

    Raises:
        DataError: No file names one.
    """
    model_ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        config = configs[folder / name]
        nested = config.get("text_config")
        value = config.get("eos_token_id")
        if value is None and isinstance(nested, dict):
            value = nested.get("eos_token_id")
        model_ids = token_ids_of(value, "eos_token_id", folder / name)
        if model_ids:
            break
    own = special.get("eos_token")
    own_id = fast.token_to_id(own) if own is not None else None
    ids = ([own_id] if own_id is not None else []) + model_ids
    if not ids:
        raise DataError(
            "nothing says which token ends a response",
            where=str(folder),
            expected="eos_token in tokenizer_config.json, or eos_token_id in config.json",
        )
    return ids[0], tuple(dict.fromkeys(ids))
