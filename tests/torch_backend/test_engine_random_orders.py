"""Random orders of submission, abort, resumption, publication and polling."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flowrl.backend.protocols import Finished, FinishReason
from tests.policy_contexts import load
from tests.torch_backend.engine_fixtures import make_engine, make_model, request, run

STOPS = (3, 4)


@pytest.mark.parametrize("seed", range(6))
def test_every_sample_gets_the_tokens_it_gets_alone_and_ends_once_per_attempt(seed):
    rng = np.random.default_rng(seed)
    model = make_model(["qwen2", "llama", "gpt2"][seed % 3])
    options = [{}, {"top_p": 0.8}, {"repetition_penalty": 1.3, "min_tokens": 6}, {"temperature": 0}]
    items = [
        request(
            i,
            prompt=np.random.default_rng(i // 3).integers(0, 61, 5 + i // 3),
            group=f"g{i // 3}",
            max_tokens=int(rng.integers(1, 90)),
            **options[int(rng.integers(len(options)))],
        )
        for i in range(15)
    ]
    engine = make_engine(model, slots=int(rng.integers(1, 7)), stop=STOPS)
    fresh, live, version = list(items), {}, 0
    tokens = {item.sample: [] for item in items}
    reasons, aborts = {}, 0
    while fresh or live:
        action = rng.integers(5)
        if action == 0 and fresh:
            count = int(rng.integers(1, 5))
            new, fresh = fresh[:count], fresh[count:]
            engine.submit(new)
            live |= {item.sample: item for item in new}
        elif action == 1 and live and aborts < 20:
            aborts += 1
            engine.abort([list(live)[int(rng.integers(len(live)))]])
        elif action == 2:
            version += 1
            load(engine, version)
        else:
            for event in engine.poll(float(rng.integers(2)) * 60.0):
                item = live[event.sample]
                assert event.attempt == item.attempt
                if not isinstance(event, Finished):
                    continue
                del live[event.sample]
                tokens[event.sample] += event.tokens.tolist()
                assert len(event.logprobs) == len(event.tokens)
                assert sum(count for _, count in event.versions) == len(event.tokens)
                assert [v for v, _ in event.versions] == sorted({v for v, _ in event.versions})
                if event.reason is FinishReason.ABORT:
                    kept = np.array(tokens[event.sample], np.int64)
                    fresh.append(replace(item, attempt=item.attempt + 1, response=kept))
                else:
                    reasons[event.sample] = event.reason
    assert engine.poll(0.0) == []
    for item in items:
        alone = run(make_engine(model, slots=1, stop=STOPS), [item])[item.sample]
        assert tokens[item.sample] == alone.tokens.tolist()
        assert reasons[item.sample] is alone.reason
