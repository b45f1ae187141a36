"""Loading weights from a folder into an existing model.

A folder holds the names that `save_pretrained` writes. For most architectures these are the model's
own; for some (experts of mixtures, GPT-NeoX) Transformers keeps other names and shapes in memory
and translates when it saves and loads. Only Transformers knows how, so it loads such a folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from flowrl.errors import BackendError
from flowrl_backends.torch.model import quiet_transformers

__all__ = ["Average", "load_weights"]


class Average:
    """An exponential moving average of weights: `decay * own + (1 - decay) * loaded`, in float32.

    A parameter in float32 is the average itself. For another type the average is kept here, on the
    host, and rounded into the parameter: a 16-bit one would lose steps smaller than its rounding.

    Attributes:
        kept: float32 averages of parameters of other types, by name.
    """

    def __init__(self, kept: Mapping[str, torch.Tensor] | None = None) -> None:
        self.kept: dict[str, torch.Tensor] = dict(kept or {})
        self._decay = 0.0
        self._taken: set[int] = set()

    def begin(self, decay: float) -> None:
        """Begins to load weights, with the share of the own ones."""
        self._decay, self._taken = decay, set()

    @torch.no_grad()
    def take(
        self, targets: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Averages tensors with the targets of their names; two names of one tensor count once."""
        for name, tensor in tensors.items():
            target = targets[name]
            if target.data_ptr() in self._taken:
                continue
            self._taken.add(target.data_ptr())
            if not target.is_floating_point():
                target.copy_(tensor)
            elif target.dtype == torch.float32:
                loaded = tensor.to(target.device, torch.float32)
                target.mul_(self._decay).add_(loaded, alpha=1 - self._decay)
            else:
                own = self.kept.get(name)
                own = self.kept[name] = target.cpu().float() if own is None else own
                own.mul_(self._decay).add_(tensor.cpu().float(), alpha=1 - self._decay)
                target.copy_(own)


def load_weights(
    model: PreTrainedModel, folder: Path, *, role: str, average: Average | None = None
) -> None:
    """Copies every tensor of `folder/*.safetensors` into `model`, in place.

    Names and shapes must match exactly; a tensor that shares storage with a loaded one (tied
    embeddings) may be absent. Nothing is changed unless everything matches.

    Args:
        average: Where given, the tensors are averaged with the model's instead of copied.

    Raises:
        BackendError: Files are missing or unreadable, or names or shapes differ.
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
    take = _copy if average is None else average.take
    try:
        shapes = _shapes(files)
        if not set(shapes) <= set(targets):
            translated = _translated(model, folder)
            if translated is not None:
                take(targets, translated)
                return
        _check(targets, shapes, folder, role)
        for path in files:
            with safe_open(path, framework="pt") as file:
                # One tensor at a time: a second copy of the model may not fit.
                for name in file.keys():  # noqa: SIM118, an object that is no mapping
                    take(targets, {name: file.get_tensor(name)})
    except SafetensorError as error:
        raise BackendError(
            "a weights file cannot be read", where=f"role {role}", found=f"{folder}: {error}"
        ) from error


def _shapes(files: list[Path]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                found[name] = tuple(file.get_slice(name).get_shape())
    return found


@torch.no_grad()
def _copy(targets: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        targets[name].copy_(tensor)


def _translated(model: PreTrainedModel, folder: Path) -> dict[str, torch.Tensor] | None:
    """Returns the folder's tensors under the model's names; None for another model."""
    if not (folder / "config.json").is_file():
        return None  # not written by `export`
    try:
        # Tensors that the folder lacks would be drawn at random, before they are refused here.
        with quiet_transformers(reports=False), torch.random.fork_rng(devices=[]):
            other, report = type(model).from_pretrained(
                folder,
                config=model.config,
                dtype=model.dtype,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, RuntimeError):
        return None
    if any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        return None
    found: dict[str, torch.Tensor] = other.state_dict()
    return found


def _check(
    targets: Mapping[str, torch.Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    folder: Path,
    role: str,
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
