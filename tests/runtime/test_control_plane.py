"""What the driver sends and keeps: it grows with batches, and not with samples or steps."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import numpy as np

from flowrl.backend.protocols import Finished, GenerateRequest, Progress
from flowrl.ids import SampleId
from flowrl.rollout.scheduler import RolloutScheduler
from flowrl.rollout.settings import SchedulerSettings
from flowrl.runtime.local.engine_worker import pack_ends, pack_requests
from flowrl.runtime.local.processes import pack
from flowrl.runtime.spans import SPANS
from flowrl.specs import FinishReason, Sampling
from tests.runtime.test_rollouts import World, driver_of, prompts

GROUP_SIZE = 8


class Engine:
    """Ends everything that it has at the next poll, with so many tokens."""

    num_slots = 4096

    def __init__(self, num_tokens: int = 4) -> None:
        self.num_submits = 0
        self._num_tokens = num_tokens
        self._requests: list[GenerateRequest] = []

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        self.num_submits += 1
        self._requests += requests

    def poll(self, timeout_s: float) -> list[Progress | Finished]:
        requests, self._requests = self._requests, []
        return [finished(request.sample, self._num_tokens) for request in requests]


def finished(sample: SampleId, num_tokens: int) -> Finished:
    return Finished(
        sample=sample,
        attempt=0,
        reason=FinishReason.LENGTH,
        tokens=np.zeros(num_tokens, np.int64),
        logprobs=np.zeros(num_tokens, np.float32),
        versions=((0, num_tokens),),
    )


def driver(engine: Any) -> Any:
    scheduler = RolloutScheduler(SchedulerSettings(group_size=GROUP_SIZE))
    changes = {"scheduler": scheduler, "group_size": GROUP_SIZE, "scorers": {}, "reported": None}
    return driver_of(World(), engine, **changes)


def test_a_step_of_1024_samples_is_sent_to_an_engine_in_one_message():
    engine = Engine()
    driven = driver(engine)
    driven.offer(prompts(1024 // GROUP_SIZE))
    driven.collect(0, 1024 // GROUP_SIZE)
    assert engine.num_submits == 1


def test_a_sample_crosses_in_a_few_hundred_bytes_besides_its_tokens():
    sampling = Sampling(max_tokens=64)
    requests = [
        GenerateRequest(
            sample=SampleId(f"0/{number // 8}/{number % 8}"),
            attempt=0,
            prompt=np.zeros(64, np.int64),
            response=np.zeros(0, np.int64),
            sampling=sampling,
            seed=number,
            shares_prompt=f"0/{number // 8}",
        )
        for number in range(1024)
    ]
    sent = len(pack(("submit", pack_requests(requests)))) / len(requests)
    ends = [finished(request.sample, 64) for request in requests]
    answered = len(pack(("outputs", *pack_ends(ends), (), 0.0))) / len(requests)
    assert sent - 64 * 8 < 300
    assert answered - 64 * (8 + 4) < 100


def test_the_driver_keeps_nothing_of_steps_that_are_over():
    engine = Engine(num_tokens=400)
    driven = driver(engine)
    numbers = []
    for step in range(40):
        driven.offer(prompts(4, first=4 * step))
        driven.collect(step, 4)
        SPANS.take()
        gc.collect()
        numbers.append(len(gc.get_objects()))
    assert len(driven.store) == 0
    assert numbers[-1] - numbers[10] < 30  # it had 960 samples since
