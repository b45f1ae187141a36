"""Loading weights from a folder into a model that exists."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from flowrl.errors import BackendError

__all__ = ["load_weights"]


def load_weights(model: PreTrainedModel, folder: Path, *, role: str) -> None:
    """Copies every tensor of `folder/*.safetensors` into `model`, in place.

    Names and shapes must match exactly; a tensor that shares storage with a loaded one (tied
    embeddings) may be absent. Nothing is changed unless everything matches.

    Raises:
        BackendError: no or unreadable files, or names or shapes that differ.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BackendError(
            "no weights to load",
            where=f"role {role}",
            found=str(folder),
            expected="*.safetensors files",
        )
    targets = model.state_dict()
    places: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        for path in files:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118, an object that is no mapping
                    places[name] = path
                    shapes[name] = tuple(file.get_slice(name).get_shape())
        _check(targets, shapes, folder, role)
        with torch.no_grad():
            for path in files:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118
                        targets[name].copy_(file.get_tensor(name))
    except SafetensorError as error:
        raise BackendError(
            "a weights file cannot be read", where=f"role {role}", found=f"{folder}: {error}"
        ) from error


def _check(
    targets: dict[str, torch.Tensor], shapes: dict[str, tuple[int, ...]], folder: Path, role: str
) -> None:
    unexpected = sorted(set(shapes) - set(targets))
    loaded = {targets[name].data_ptr() for name in shapes if name in targets}
    missing = sorted(
        name
        for name, tensor in targets.items()
        if name not in shapes and tensor.data_ptr() not in loaded
    )
    if missing or unexpected:
        parts = [
            f"{label} {_list(names)}"
            for label, names in (("missing", missing), ("unexpected", unexpected))
            if names
        ]
        raise BackendError(
            "the weights do not belong to this model",
            where=f"role {role}",
            found=f"{folder}: {'; '.join(parts)}",
            expected=f"the {len(targets)} tensors of the model",
        )
    for name, shape in shapes.items():
        if tuple(targets[name].shape) != shape:
            raise BackendError(
                "the weights do not belong to this model",
                where=f"role {role}",
                found=f"{name} of shape {list(shape)}",
                expected=f"shape {list(targets[name].shape)}",
            )


def _list(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
