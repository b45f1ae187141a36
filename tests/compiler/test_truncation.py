"""Rollouts of another distribution than their logprobs are of: refused, accepted or repeated."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

import flowrl_backends.torch
from flowrl import api
from flowrl.errors import GraphError

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"

CHANGES = ["top_p=0.9", "top_k=5", "min_p=0.1", "repetition_penalty=1.2", "min_tokens=2"]
NEUTRAL = ["top_p=1.0", "top_k=0", "min_p=0.0", "repetition_penalty=1.0", "min_tokens=0"]


def compiled(*overrides: str) -> api.Compiled:
    return api.compile(None, CONFIG, overrides=overrides)


@pytest.fixture
def repeats(monkeypatch):
    """Says which options the torch backend repeats."""

    def say(*options: str) -> None:
        plugin = type(flowrl_backends.torch.plugin)
        capabilities = replace(
            flowrl_backends.torch.plugin.capabilities, repeats_truncation=frozenset(options)
        )
        monkeypatch.setattr(plugin, "capabilities", capabilities)

    return say


@pytest.mark.parametrize(("option", "neutral"), list(zip(CHANGES, NEUTRAL, strict=True)))
def test_each_option_that_changes_the_distribution_is_refused_with_its_neutral_value(
    option, neutral
):
    with pytest.raises(GraphError) as caught:
        compiled(f"train.sampling.{option}")
    assert f"actor.generate samples with {option}, but its logprobs are" in caught.value.what
    assert "grpo.py:" in caught.value.where
    assert caught.value.expected == neutral
    assert "train.truncated=ignore trains with the bias" in caught.value.hint


def test_several_options_are_told_at_once():
    with pytest.raises(GraphError) as caught:
        compiled("train.sampling.top_k=5", "train.sampling.min_p=0.1")
    assert "samples with top_k=5, min_p=0.1, but" in caught.value.what
    assert caught.value.expected == "top_k=0, min_p=0.0"


@pytest.mark.parametrize(("able", "offered"), [(["top_p"], True), (["top_k"], False), ([], False)])
def test_repeating_is_offered_where_the_backend_can(repeats, able, offered):
    repeats(*able)
    with pytest.raises(GraphError) as caught:
        compiled("train.sampling.top_p=0.9")
    assert ("train.truncated=repeat" in caught.value.hint) == offered


def test_an_accepted_bias_is_warned_of(caplog):
    with caplog.at_level(logging.WARNING, logger="flowrl.compiler"):
        compiled("train.sampling.top_p=0.9", "train.truncated=ignore")
    [record] = caplog.records
    assert "actor.generate samples with top_p=0.9, and its update" in record.getMessage()
    assert "Without bias: top_p=1.0" in record.getMessage()


def test_a_repeated_truncation_is_said_in_the_graph_and_warned_of_no_more(caplog, repeats):
    repeats("top_p")
    with caplog.at_level(logging.WARNING, logger="flowrl.compiler"):
        run = compiled("train.sampling.top_p=0.9", "train.truncated=repeat")
    assert caplog.records == []
    assert run.graph.node("actor.generate").attr("sampling").logprobs == "sampler"


def test_a_backend_that_cannot_repeat_is_not_asked_to(repeats):
    repeats("top_k")
    with pytest.raises(GraphError, match="the backend of actor cannot include") as caught:
        compiled("train.sampling.top_p=0.9", "train.sampling.top_k=5", "train.truncated=repeat")
    assert "samples with top_p=0.9" in caught.value.what
    assert caught.value.found == "train.truncated=repeat, and it repeats top_k"
    assert caught.value.expected == "top_p=1.0"


def test_temperature_is_corrected_for_and_refused_by_nothing(caplog):
    with caplog.at_level(logging.WARNING, logger="flowrl.compiler"):
        run = compiled("train.sampling.temperature=0.7", "train.truncated=repeat")
    assert caplog.records == []
    assert run.graph.node("actor.generate").attr("sampling").logprobs == "model"


def test_a_supervised_run_has_nothing_to_correct(caplog):
    config = {
        "stages": ["sft"],
        "roles": {
            "actor": {"model": {}, "tokenizer": {"kind": "char", "alphabet": "0123456789+="}}
        },
        "data": {"train": {"kind": "arithmetic", "split": "train"}},
        "train": {"sampling": {"top_p": 0.9}},
    }
    with caplog.at_level(logging.WARNING, logger="flowrl.compiler"):
        api.compile(None, config)
    assert caplog.records == []


def test_scores_that_can_never_differ_within_a_group_are_warned_of(caplog):
    with caplog.at_level(logging.WARNING, logger="flowrl.compiler"):
        compiled("train.sampling.temperature=0")
    [record] = caplog.records
    assert "the same sample to all of a group" in record.getMessage()
    assert "nothing will be learnt" in record.getMessage()
