"""Sampling that the update cannot correct for is said aloud when a run is compiled."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from flowrl import api

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"


def warnings_of(caplog: pytest.LogCaptureFixture, *overrides: str) -> list[str]:
    with caplog.at_level(logging.WARNING, logger="flowrl.compiler"):
        api.compile(None, CONFIG, overrides=overrides)
    return [record.getMessage() for record in caplog.records if "draws with" in record.getMessage()]


@pytest.mark.parametrize(
    "option", ["top_p=0.9", "top_k=5", "min_p=0.1", "repetition_penalty=1.2", "min_tokens=2"]
)
def test_each_option_that_changes_the_distribution_is_named(caplog, option):
    [message] = warnings_of(caplog, f"train.sampling.{option}")
    assert f"actor.generate draws with {option}, and" in message


def test_temperature_is_corrected_for_and_warns_of_nothing(caplog):
    assert warnings_of(caplog, "train.sampling.temperature=0.7") == []


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
        api.compile(None, CONFIG, overrides=["train.sampling.temperature=0"])
    [record] = caplog.records
    assert "the same sample for all of a group" in record.getMessage()
    assert "nothing will be learnt" in record.getMessage()
