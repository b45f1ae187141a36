"""A model folder whose head is a tensor of its own where it was that of the embeddings."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from flowrl.errors import BackendError

__all__ = ["add_head", "is_tied", "link_untied"]

_EMBEDDINGS = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_HEAD_FILE = "lm_head.safetensors"
_INDEX = "model.safetensors.index.json"


def is_tied(model: Path) -> bool:
    """True if a model's head is its embeddings."""
    return bool(json.loads((model / "config.json").read_text()).get("tie_word_embeddings", False))


def link_untied(folder: Path, weights: Path) -> None:
    """Fills an empty folder with links to the weights of another, and a head."""
    for path in weights.glob("*.safetensors"):
        (folder / path.name).symlink_to(path.resolve())
    add_head(folder)


def add_head(folder: Path) -> None:
    """Adds the embeddings as a head, in a file of its own, and says so in the configuration if any.

    The format of the files is <https://github.com/huggingface/safetensors#format>.

    Raises:
        BackendError: No file has embeddings.
    """
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            entry = json.loads(file.read(length)).get(_EMBEDDINGS)
            if entry is None:
                continue
            start, end = entry["data_offsets"]
            file.seek(8 + length + start)
            tensor = file.read(end - start)
        header = json.dumps({_HEAD: entry | {"data_offsets": [0, len(tensor)]}}).encode()
        (folder / _HEAD_FILE).write_bytes(struct.pack("<Q", len(header)) + header + tensor)
        break
    else:
        raise BackendError(
            "a model with tied embeddings has none in its files",
            where=str(folder),
            expected=f"a tensor {_EMBEDDINGS}",
        )
    # An index would hide the new file.
    (folder / _INDEX).unlink(missing_ok=True)
    config = folder / "config.json"
    if config.exists():
        values = json.loads(config.read_text()) | {"tie_word_embeddings": False}
        config.write_text(json.dumps(values))
