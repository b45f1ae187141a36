"""The optimizer: schedules by hand, AdamW by hand, clipping, weight decay, 16-bit parameters."""

from __future__ import annotations

import math

import pytest
import torch

from flowrl.specs import AdamW
from flowrl_backends.torch.optimizer import Optimizer, learning_rate


def one(value: list[float], **options: float) -> tuple[torch.nn.Parameter, Optimizer]:
    parameter = torch.nn.Parameter(torch.tensor(value))
    spec = AdamW(learning_rate=0.1, beta1=0.9, beta2=0.99, **options)  # type: ignore[arg-type]
    return parameter, Optimizer({"p": parameter}, spec, num_updates=10)


def test_the_rate_rises_over_the_warm_up_and_stays() -> None:
    spec = AdamW(learning_rate=1.0, warmup_updates=4)
    rates = [learning_rate(spec, i, 10) for i in range(6)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_the_rate_falls_along_a_line_to_its_final_fraction() -> None:
    spec = AdamW(learning_rate=2.0, schedule="linear", final_fraction=0.5)
    rates = [learning_rate(spec, i, 5) for i in range(7)]
    assert rates == pytest.approx([2.0, 1.75, 1.5, 1.25, 1.0, 1.0, 1.0])


def test_the_rate_falls_along_a_cosine_after_the_warm_up() -> None:
    spec = AdamW(learning_rate=1.0, schedule="cosine", final_fraction=0.1, warmup_updates=2)
    rates = [learning_rate(spec, i, 6) for i in range(6)]
    # Updates 1 to 5 are 0, 1/4, 2/4, 3/4 and 4/4 of the fall from 1 to 0.1.
    fall = [1 - 0.9 * (1 - math.cos(math.pi * x / 4)) / 2 for x in range(5)]
    assert rates == pytest.approx([0.5, *fall])
    assert rates[-1] == pytest.approx(0.1)


def test_one_update_only_has_the_full_rate() -> None:
    assert learning_rate(AdamW(learning_rate=1.0, schedule="linear"), 0, 1) == 1.0


def test_two_updates_equal_adamw_by_hand() -> None:
    parameter, optimizer = one([1.0], max_grad_norm=0.0)
    m = v = 0.0
    want = 1.0
    for t, grad in enumerate((0.5, -2.0), start=1):
        parameter.grad = torch.tensor([grad])
        result = optimizer.step()
        assert result.grad_norm == pytest.approx(abs(grad))
        m, v = 0.9 * m + 0.1 * grad, 0.99 * v + 0.01 * grad * grad
        want -= 0.1 * (m / (1 - 0.9**t)) / (math.sqrt(v / (1 - 0.99**t)) + 1e-8)
        assert float(parameter.detach()) == pytest.approx(want, rel=1e-6)


def test_gradients_are_clipped_to_their_global_norm() -> None:
    parameter, optimizer = one([0.0, 0.0], max_grad_norm=1.0)
    seen = []
    original = optimizer._adamw.step

    def keep() -> None:
        assert parameter.grad is not None
        seen.append(parameter.grad.clone())
        original()

    optimizer._adamw.step = keep  # type: ignore[assignment, method-assign]
    for grad in ([3.0, 4.0], [0.3, 0.4]):
        parameter.grad = torch.tensor(grad)
        optimizer.step()
    torch.testing.assert_close(seen[0], torch.tensor([0.6, 0.8]))
    torch.testing.assert_close(seen[1], torch.tensor([0.3, 0.4]))


def test_weight_decay_spares_vectors() -> None:
    matrix, vector = (torch.nn.Parameter(torch.ones(shape)) for shape in ((1, 1), (1,)))
    spec = AdamW(learning_rate=0.1, weight_decay=0.5)
    optimizer = Optimizer({"m": matrix, "v": vector}, spec, 1)
    optimizer.step()
    assert float(matrix.detach()) == pytest.approx(1 - 0.1 * 0.5)
    assert float(vector.detach()) == 1.0


def test_a_skipped_update_changes_nothing_and_counts_in_the_schedule() -> None:
    parameter, optimizer = one([1.0], max_grad_norm=1.0)
    parameter.grad = torch.tensor([float("nan")])
    result = optimizer.step()
    assert result.skipped
    assert math.isnan(result.grad_norm)
    assert float(parameter.detach()) == 1.0
    assert optimizer.updates == 1
    assert optimizer.tensors() == {}


def test_small_updates_of_16_bit_parameters_are_not_lost() -> None:
    # Steps of 1e-4 from 1 are far below bfloat16's spacing of 2^-8 and vanish if made in it.
    parameter = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    spec = AdamW(learning_rate=1e-4)
    optimizer = Optimizer({"p": parameter}, spec, 200)
    for _ in range(200):
        parameter.grad = torch.ones(1, dtype=torch.bfloat16)
        optimizer.accumulate()
        optimizer.step()
    assert float(parameter.detach()) == pytest.approx(1 - 200 * 1e-4, abs=2**-8)


def test_gradients_of_16_bit_parameters_are_summed_in_float32() -> None:
    parameter = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = Optimizer({"p": parameter}, AdamW(), 1)
    for value in (1.0, *[2**-9] * 64):
        parameter.grad = torch.full((1,), value, dtype=torch.bfloat16)
        optimizer.accumulate()
    assert optimizer.step().grad_norm == pytest.approx(1 + 64 * 2**-9)
