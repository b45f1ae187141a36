"""The loss of LUFFY: clipped ratios of own answers, shaped ratios of demonstrations."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flowrl.algo.losses import TokenBatch
from flowrl.algo.losses_supervised import own_loss
from flowrl_graphs.luffy import DEMONSTRATION, mixed_policy


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_own_answers_are_clipped_and_demonstrations_shaped(advantage: float):
    clip, gamma = 0.2, 0.1
    logprobs = np.log([0.01, 0.5, 0.9, 0.01, 0.5, 0.9])
    source = np.array([0, 0, 0, 1, 1, 1])
    behaviour = np.where(source == DEMONSTRATION, 0.0, np.log([0.02, 0.5, 0.6] * 2))
    ratio = np.exp(logprobs - behaviour)
    own = np.minimum(ratio * advantage, np.clip(ratio, 1 - clip, 1 + clip) * advantage)
    shaped = ratio / (ratio + gamma) * advantage
    values = torch.tensor(logprobs, requires_grad=True)
    batch = TokenBatch(
        advantages=torch.full((6,), advantage, dtype=torch.float64),
        behaviour_logprobs=torch.tensor(behaviour),
        extra={"source": torch.tensor(source, dtype=torch.float32)},
    )
    spec = mixed_policy(clip=clip, gamma=gamma)
    found = own_loss(spec)(values, batch, spec).values
    wanted = -np.where(source == DEMONSTRATION, shaped, own)
    assert found.detach().numpy() == pytest.approx(wanted)
    # An unlikely token of a demonstration is pulled at more than by its plain ratio, which is its
    # probability here: d f(p) / d log p = gamma p / (p + gamma)^2.
    (gradient,) = torch.autograd.grad(found.sum(), values)
    p = ratio[3]
    assert gradient[3].item() == pytest.approx(-advantage * gamma * p / (p + gamma) ** 2)
    assert abs(gradient[3].item()) > p
