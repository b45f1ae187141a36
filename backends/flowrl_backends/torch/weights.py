"""Loading weights into an existing model.

Files of weights hold the names that `save_pretrained` writes. For most architectures these are the
model's own; for some (experts of mixtures, GPT-NeoX) Transformers keeps other names and shapes in
memory and translates when it saves and loads. Only Transformers knows how, so it loads those.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from flowrl.backend.weights import Bytes, checksum_of
from flowrl.errors import BackendError
from flowrl_backends.torch.model import quiet_transformers
from flowrl_backends.torch.ranks import placed


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
            if address(target) in self._taken:
                continue
            self._taken.add(address(target))
            tensor = placed(tensor, target)
            if not target.is_floating_point():
                target.copy_(tensor)
            elif target.dtype == torch.float32:
                loaded = tensor.to(target.device, torch.float32)
                target.mul_(self._decay).add_(loaded, alpha=1 - self._decay)
            else:
                own = self.kept.get(name)
                own = target.cpu().float() if own is None else placed(own, target)
                self.kept[name] = own
                own.mul_(self._decay).add_(tensor.cpu().float(), alpha=1 - self._decay)
                target.copy_(own)


def load_weights(
    model: PreTrainedModel, buckets: Iterable[Bytes], *, role: str, average: Average | None = None
) -> str:
    """Copies every tensor of the buckets into `model`, in place; returns the bytes' checksum.

    Names and shapes must match exactly; a tensor that shares storage with a loaded one (tied
    embeddings) may be absent. Nothing is changed unless everything matches. One bucket at a time is
    in memory, unless Transformers has to translate names.

    Args:
        buckets: Files of safetensors, which are iterated over twice.
        average: Where given, the tensors are averaged with the model's instead of copied.

    Raises:
        BackendError: Files are missing or unreadable, or names or shapes differ.
    """
    targets = model.state_dict()
    take = _copy if average is None else average.take
    try:
        shapes = {name: shape for bucket in buckets for name, shape in _shapes(bucket)}
        if not shapes:
            raise BackendError(
                "no weights to load",
                where=f"role {role}",
                found=str(buckets),
                expected="*.safetensors files",
            )
        if not set(shapes) <= set(targets):
            translated = _translated(model, buckets)
            if translated is not None:
                take(targets, translated)
                return checksum_of(buckets)
        _check(targets, shapes, str(buckets), role)
        checksum = ""
        for bucket in buckets:
            checksum = checksum_of([bucket], checksum)
            take(targets, load(bucket.tobytes()))
        return checksum
    except (SafetensorError, ValueError) as error:
        raise BackendError(
            "a weights file cannot be read", where=f"role {role}", found=f"{buckets}: {error}"
        ) from error


def _shapes(bucket: Bytes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields names and shapes, of which safetensors have a JSON object behind its length."""
    end = 8 + int.from_bytes(bucket[:8].tobytes(), "little")
    for name, entry in json.loads(bucket[8:end].tobytes()).items():
        if name != "__metadata__":
            yield name, tuple(entry["shape"])


@torch.no_grad()
def _copy(targets: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        targets[name].copy_(placed(tensor, targets[name]))


def _translated(model: PreTrainedModel, buckets: Iterable[Bytes]) -> dict[str, torch.Tensor] | None:
    """Returns the tensors under the model's names; None for those of another model."""
    tensors = {name: tensor for b in buckets for name, tensor in load(b.tobytes()).items()}
    try:
        # Tensors that are missing would be drawn at random, before they are refused here.
        with quiet_transformers(reports=False), torch.random.fork_rng(devices=[]):
            other, report = type(model).from_pretrained(
                None,
                config=model.config,
                dtype=model.dtype,
                state_dict=tensors,
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
    source: str,
    role: str,
) -> None:
    unexpected = sorted(set(shapes) - set(targets))
    loaded = {address(targets[name]) for name in shapes if name in targets}
    missing = sorted(
        name
        for name, tensor in targets.items()
        if name not in shapes and address(tensor) not in loaded
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
            found=f"{source}: {'; '.join(parts)}",
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


def address(tensor: torch.Tensor) -> int:
    """Returns where a tensor is in memory; that of a rank's part, which may be empty."""
    if isinstance(tensor, DTensor):
        return tensor.to_local().untyped_storage().data_ptr()
    return tensor.data_ptr()


def _list(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
