"""Responses end with the token that completes a stop text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import flowrl as fl
from flowrl.backend.protocols import GenerateRequest
from flowrl.errors import ConfigError
from flowrl.files import read_json_lines
from flowrl.ids import SampleId
from flowrl.specs import Sampling
from flowrl_backends.torch.stop_texts import StopText
from tests.runtime.tiny_runs import WatchedDisplay, tiny_config

WORDS = {1: b"a", 2: b"b</", 3: b"end>", 4: b"x</end>y", 5: b"</end", 6: b">"}


def state(*tokens: int, stop: object = "</end>", least: int = 0, turn_from: int = 0) -> StopText:
    request = GenerateRequest(
        sample=SampleId("0/0/0"),
        attempt=0,
        prompt=np.array([5]),
        response=np.array(tokens, np.int64),
        sampling=Sampling(max_tokens=9, min_tokens=least, stop=stop),  # type: ignore[arg-type]
        seed=1,
        shares_prompt="0/0",
        grammar_from=turn_from,
    )
    return StopText(request, WORDS)


def taken(text: StopText, *tokens: int) -> list[bool]:
    return [text.take(token) for token in tokens]


def test_a_text_is_found_over_tokens_and_within_one():
    assert taken(state(), 1, 2, 3) == [False, False, True]
    assert taken(state(), 4) == [True]
    assert taken(state(), 6, 5, 1) == [False, False, False]
    assert taken(state(stop=["zz", "a"]), 2, 1) == [False, True]


def test_a_response_that_goes_on_is_searched_with_its_own_tokens_alone():
    assert taken(state(1, 2), 3) == [True]
    assert taken(state(1, 2, turn_from=2), 3) == [False]  # those of an earlier turn


def test_a_text_before_min_tokens_does_not_end_a_response():
    assert taken(state(least=3), 4, 1, 4) == [False, False, True]
    assert taken(state(4, least=2), 1, 4) == [False, True]


def test_texts_are_held_as_one_value_that_is_read_back():
    one = Sampling(stop="[END]")
    assert one.stops == ("[END]",)
    assert replace(one, max_tokens=3).stops == ("[END]",)
    assert Sampling(stop=["a", '"b"']).stops == ("a", '"b"')  # type: ignore[arg-type]
    assert Sampling.from_json({"stop": one.stop}) == one
    assert Sampling().stops == ()


@pytest.mark.parametrize("engines", ["roles.actor.num_engines=1", "roles.actor.num_engines=2"])
def test_samples_of_a_run_end_with_their_stop_text(tmp_path: Path, engines: str):
    overrides = ["stages=[grpo]", "train.steps=1", "eval.every=0", engines]
    stop = ["train.sampling.stop=['+', '=']", *overrides]
    run = fl.run(None, tiny_config(tmp_path), overrides=stop, display=WatchedDisplay())
    samples = list(read_json_lines(run.folder / "samples.jsonl"))
    ended = [s for s in samples if set("+=") & set(s["response"])]
    assert len(ended) > 3
    for sample in ended:
        assert sample["finish"] == "stop"
        assert sample["response"][-1] in "+="
        assert not set("+=") & set(sample["response"][:-1])


def test_an_empty_stop_text_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"train\.sampling\.stop"):
        fl.compile(None, tiny_config(tmp_path), overrides=["train.sampling.stop=['']"])
