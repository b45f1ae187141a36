"""AdamW over float32 numbers, whatever type the model's parameters have.

A parameter in float32 is updated in place and its `.grad` accumulates. For a parameter in a 16-bit
type a float32 master copy is kept and updated; the gradient of each micro-batch is added to a
float32 buffer, and after an update the master is rounded into the parameter. Small updates are
therefore never lost to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from flowrl.errors import CheckpointError
from flowrl.specs import AdamW
from flowrl_backends.torch.model import move_tensor
from flowrl_backends.torch.ranks import placed

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of an update: gradient norm before clipping, rate, and if it was skipped."""

    grad_norm: float
    learning_rate: float
    skipped: bool


def learning_rate(spec: AdamW, update: int, num_updates: int) -> float:
    """Returns the rate of `update` (counted from 0) in a schedule of `num_updates`.

    With w warm-up updates the rate is `learning_rate * (update + 1) / w` while update < w, so that
    no update is made at 0 and update w - 1 has the full rate. From there to the last update it
    stays (`constant`) or falls to `final_fraction` of it, along a line or half a cosine period
    (Loshchilov & Hutter, SGDR, 2017, equation 5); after the last it stays.
    """
    peak = max(spec.warmup_updates - 1, 0)
    if update < peak:
        return spec.learning_rate * (update + 1) / spec.warmup_updates
    span = max(num_updates - 1 - peak, 1)
    progress = min((update - peak) / span, 1.0)
    falls = {
        "constant": 0.0,
        "linear": progress,
        "cosine": 0.5 * (1.0 - math.cos(math.pi * progress)),
    }[spec.schedule]
    return spec.learning_rate * (1.0 - (1.0 - spec.final_fraction) * falls)


class Optimizer:
    """AdamW with its schedule, clipping and master weights.

    Lifecycle of an update: `zero_grad`; for each micro-batch `loss.backward()` and `accumulate`;
    `step`, which drops the gradients.

    Weight decay applies to parameters of two or more dimensions, not to biases and norm weights
    (the usual convention; torch's AdamW alone would decay all).
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], spec: AdamW, num_updates: int
    ) -> None:
        self.spec = spec
        self.num_updates = num_updates
        self.updates = 0
        self._parameters = {n: p for n, p in parameters.items() if p.requires_grad}
        self._masters = {
            name: p if p.dtype == torch.float32 else torch.nn.Parameter(p.detach().float())
            for name, p in self._parameters.items()
        }
        self._low = [n for n, p in self._parameters.items() if p is not self._masters[n]]
        matrices = [m for m in self._masters.values() if m.dim() >= 2]
        vectors = [m for m in self._masters.values() if m.dim() < 2]
        self._adamw = torch.optim.AdamW(
            [
                {"params": group, "weight_decay": decay}
                for group, decay in ((matrices, spec.weight_decay), (vectors, 0.0))
                if group
            ],
            lr=spec.learning_rate,
            betas=(spec.beta1, spec.beta2),
            eps=spec.eps,
            **_implementation(next(iter(self._masters.values())).device),
        )

    def zero_grad(self) -> None:
        """Drops all gradients."""
        for tensor in (*self._parameters.values(), *self._masters.values()):
            tensor.grad = None

    def accumulate(self) -> None:
        """Adds the gradients of 16-bit parameters to their float32 buffers; call after backward."""
        for name in self._low:
            parameter, master = self._parameters[name], self._masters[name]
            if parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad += parameter.grad
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> StepResult:
        """Clips and applies the gradients, or drops them all if any is not finite.

        A parameter that received no gradient counts as having gradient 0: its moments decay. The
        schedule counts skipped updates too.
        """
        rate = learning_rate(self.spec, self.updates, self.num_updates)
        self.updates += 1
        grads = []
        for master in self._masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            grads.append(master.grad)
        norm = torch.nn.utils.get_total_norm(grads)
        grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        finite = math.isfinite(grad_norm)
        if finite:
            limit = self.spec.max_grad_norm
            if limit > 0 and grad_norm > limit:
                torch._foreach_mul_(grads, limit / (grad_norm + 1e-6))
            for group in self._adamw.param_groups:
                group["lr"] = rate
            self._adamw.step()
            for name in self._low:
                self._parameters[name].copy_(self._masters[name])
        self.zero_grad()
        return StepResult(grad_norm=grad_norm, learning_rate=rate, skipped=not finite)

    def reset(self) -> None:
        """Forgets the moments and their counts of updates; the schedule and the masters go on."""
        self._adamw.state.clear()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything to save beside the parameters: moments and masters, by parameter name."""
        found: dict[str, torch.Tensor] = {}
        for name, master in self._masters.items():
            state = self._adamw.state.get(master, {})
            found |= {f"{key}.{name}": state[key] for key in _MOMENTS if key in state}
        return found | {f"master.{name}": self._masters[name].detach() for name in self._low}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor], updates: int) -> None:
        """Takes what `tensors` gave, after `updates` updates.

        Raises:
            CheckpointError: a tensor is missing or has another shape.
        """
        self.updates = updates
        self._adamw.state.clear()
        for name, master in self._masters.items():
            if name in self._low:
                master.copy_(_checked(tensors, f"master.{name}", master))
            # Before its first applied update a parameter has no moments.
            if f"step.{name}" not in tensors:
                continue
            steps = tensors[f"step.{name}"].float()
            on_device = self._adamw.defaults.get("fused") and master.device.type != "cpu"
            self._adamw.state[master] = {
                "step": steps.to(master.device) if on_device else steps.clone(),
                **{
                    key: _checked(tensors, f"{key}.{name}", master).to(master.device, copy=True)
                    for key in ("exp_avg", "exp_avg_sq")
                },
            }

    @torch.no_grad()
    def take_parameters(self) -> None:
        """Makes the masters equal to the parameters, whose owner has overwritten them."""
        for name in self._low:
            self._masters[name].copy_(self._parameters[name])

    def to(self, device: torch.device) -> None:
        """Moves moments and masters; parameters are moved by their owner."""
        for name in self._low:
            move_tensor(self._masters[name], device)
        for state in self._adamw.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = state[key].to(device)


def _implementation(device: torch.device) -> dict[str, bool]:
    """Returns the fastest AdamW of a known device; for others, torch chooses."""
    return {"fused": True} if device.type in ("cpu", "cuda") else {}


def _checked(tensors: Mapping[str, torch.Tensor], name: str, like: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of a checkpoint, divided over ranks as `like` is."""
    tensor = tensors.get(name)
    if tensor is None or tensor.shape != like.shape:
        raise CheckpointError(
            f"the checkpoint's tensor {name} does not belong to this model",
            found="nothing" if tensor is None else str(tuple(tensor.shape)),
            expected=str(tuple(like.shape)),
        )
    return placed(tensor, like)
