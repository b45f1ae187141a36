"""A model of a family that is not known, or that says none, is refused with what to write where."""

from __future__ import annotations

import pytest

from flowrl.cost.models import FAMILIES, ModelShape
from flowrl.errors import PlanError


def refusal(config: dict[str, object]) -> PlanError:
    with pytest.raises(PlanError) as caught:
        ModelShape.from_hf_config(config)
    return caught.value


def test_a_family_that_is_not_known_is_answered_with_models_to_take_and_no_file_to_edit():
    error = refusal({"model_type": "mamba2", "hidden_size": 64})
    assert error.found == "model_type 'mamba2'"
    assert error.hint is not None
    assert "flowrl/" not in error.hint


def test_a_config_without_a_family_is_told_that_it_is_missing():
    error = refusal({"hidden_size": 64})
    assert error.what == "the config says no model family: model_type is missing"
    assert error.expected == f"one of {', '.join(FAMILIES)}"
    assert "None" not in str(error)


def test_a_family_that_is_no_text_is_told_as_it_stands():
    assert refusal({"model_type": None}).found == "model_type None"
