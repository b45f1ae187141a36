"""Runs a torch computation a second time with its detached factors held at their first values.

A loss may contain factors that carry no gradient by definition: a clipped ratio that is detached, a
mask computed under `torch.no_grad()`. Its gradient is then not the slope of its value, but the
slope with these factors held constant, which finite differences can only see if the factors really
stay as they were:

    with FrozenFactors() as first:
        value = loss(x)
    with FrozenFactors(first) as second:
        nearby = loss(x + step)           # factors are those of x
    second.moved                          # whether a decision fell differently: a kink lies between

What leaves torch (`item`, `tolist`, `numpy`) and comes back as a constant is not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
"""Runs the forward pass of a custom function, which torch does without gradient too."""


@dataclass(frozen=True, slots=True)
class _Step:
    """What one call of torch gave that was a factor or a decision."""

    name: str
    outputs: tuple[torch.Tensor, ...]


class FrozenFactors(TorchFunctionMode):
    """Records factors and decisions, or holds the factors of an earlier run and compares decisions.

    A factor is what `detach`, `.data` or any call under `no_grad` gives. A decision is a tensor of
    truth values or integers: a comparison, a rank.

    Args:
        known: The run whose factors are held; None records.

    Attributes:
        moved: Whether a decision differed from that run, or other calls were made.
    """

    def __init__(self, known: FrozenFactors | None = None) -> None:
        super().__init__()
        self.moved = False
        self._known = None if known is None else known._steps
        self._steps: list[_Step] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        outputs = tuple(_tensors(found))
        factor = _gives_factors(func)
        if not outputs or not (factor or not outputs[0].is_floating_point()):
            return found
        place = len(self._steps)
        self._steps.append(_Step(_name(func), tuple(t.detach().clone() for t in outputs)))
        if self._known is None or self.moved:
            return found
        if place >= len(self._known) or not _alike(self._known[place], self._steps[place]):
            self.moved = True
            return found
        return self._held(found, outputs, self._known[place], args) if factor else found

    def _held(
        self, found: Any, outputs: tuple[torch.Tensor, ...], known: _Step, args: Sequence[Any]
    ) -> Any:
        """The result with the recorded numbers in it."""
        watched = [t.untyped_storage().data_ptr() for t in _tensors(args) if t.requires_grad]
        with torch.no_grad():
            for value, kept in zip(outputs, known.outputs, strict=True):
                if value.untyped_storage().data_ptr() in watched:
                    break
                # In place, so that a view stays one and what was changed through it is changed.
                value.copy_(kept)
            else:
                return found
        # A detached tensor shares its numbers with one that has a gradient: that one stays.
        return known.outputs[0].clone() if isinstance(found, torch.Tensor) else found


def _gives_factors(func: Callable[..., Any]) -> bool:
    if _name(func) in ("detach", "detach_") or getattr(func, "__self__", None) is torch.Tensor.data:
        return True
    return not torch.is_grad_enabled() and not _in_custom_function()


def _in_custom_function() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _APPLY:
            return True
        frame = frame.f_back
    return False


def _name(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", repr(func))


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)


def _alike(known: _Step, now: _Step) -> bool:
    """Whether the same call was made, and all its decisions fell the same way."""
    if known.name != now.name or len(known.outputs) != len(now.outputs):
        return False
    for before, after in zip(known.outputs, now.outputs, strict=True):
        if before.shape != after.shape or before.dtype != after.dtype:
            return False
        if not before.is_floating_point() and not torch.equal(before, after):
            return False
    return True
