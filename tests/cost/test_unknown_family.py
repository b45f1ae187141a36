"""A model of a family that is not known, or that says none, is refused with what to write where."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flowrl.cost.models import FAMILIES, ModelShape
from flowrl.errors import PlanError


def refusal(config: dict[str, object]) -> PlanError:
    with pytest.raises(PlanError) as caught:
        ModelShape.from_hf_config(config)
    return caught.value


def test_what_a_new_family_needs_is_told_with_the_files_that_hold_it_for_others():
    error = refusal({"model_type": "mamba2", "hidden_size": 64})
    assert error.found == "model_type 'mamba2'"
    assert error.hint is not None
    named = re.findall(r"flowrl/[\w/]+\.py", error.hint)
    assert len(named) == 4
    root = Path(__file__).parents[2]
    shape, counts, memory, activations = ((root / one).read_text("utf-8") for one in named)
    assert "FAMILIES: " in shape
    assert "def count_parameters" in counts
    assert "kv cache" in memory
    assert "kept for the backward pass" in activations


def test_a_config_without_a_family_is_told_that_it_is_missing():
    error = refusal({"hidden_size": 64})
    assert error.what == "the config says no model family: model_type is missing"
    assert error.expected == f"one of {', '.join(FAMILIES)}"
    assert "None" not in str(error)


def test_a_family_that_is_no_text_is_told_as_it_stands():
    assert refusal({"model_type": None}).found == "model_type None"
