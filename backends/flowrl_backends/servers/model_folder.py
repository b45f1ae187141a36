"""A model folder for a server: links to the files of another, and the run's own stop tokens.

A server ends a response at the end tokens of the model's own configuration too, whatever a request
says. So it gets a folder whose configuration names the stop tokens of the run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

__all__ = ["linked_model"]

_CONFIGURATIONS = ("config.json", "generation_config.json")


def linked_model(
    folder: Path, model: Path, stop_token_ids: Sequence[int], weights: Path | None = None
) -> Path:
    """Makes a folder with the files of a model, and returns it.

    Args:
        folder: The new folder.
        model: The folder whose configuration and tokenizer it has.
        stop_token_ids: The end tokens in the configuration.
        weights: The folder whose `*.safetensors` it has; None for those of the model.
    """
    folder.mkdir(parents=True)
    files = {path.name: path for path in model.iterdir()}
    if weights is not None:
        files = {name: path for name, path in files.items() if ".safetensors" not in name}
        files |= {path.name: path for path in weights.glob("*.safetensors*")}
    for name, path in files.items():
        if name in _CONFIGURATIONS:
            values = json.loads(path.read_text())
            values["eos_token_id"] = list(stop_token_ids) or None
            (folder / name).write_text(json.dumps(values))
        else:
            (folder / name).symlink_to(path.resolve())
    return folder
