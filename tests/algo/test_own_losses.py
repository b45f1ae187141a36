"""Losses of the user's own: specifications, what they see, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from flowrl.algo.losses import TokenBatch
from flowrl.algo.resolve import resolve_loss
from flowrl.errors import TraceError
from flowrl.graph.ir import format_attr
from flowrl.graph.serialization import parse_attr
from flowrl.specs import OwnLoss, loss, spec_from_json
from tests.algo import own_functions as own
from tests.algo.loss_cases import draw


@pytest.mark.parametrize(
    "spec",
    [
        own.clipped,
        own.clipped(low=1e-3, high=float("inf")),
        own.with_bonus,
        own.with_bonus(scale=2, mode='a, b="c"\\\n\u2028)'),
        own.likelier(beta=0.5),
        own.absolute,
        own.hinge,
    ],
)
def test_an_own_loss_reads_back_from_its_text_and_its_json(spec: OwnLoss) -> None:
    text = format_attr(spec)
    assert text.splitlines() == [text]
    assert parse_attr(text) == spec
    assert spec_from_json("loss", spec.to_json()) == spec


def test_options_travel_as_fields_of_their_own() -> None:
    assert str(own.clipped(high=0.28)) == (
        'own(function="tests.algo.own_functions:clipped", '
        'reads="advantages, behaviour_logprobs", aggregation="token-mean", '
        "corrects=true, proportional=true, high=0.28, low=0.2)"
    )
    assert own.with_bonus(scale=2).to_json()["scale"] == 2.0
    assert own.clipped(high=0.2) == own.clipped
    assert hash(own.clipped(high=0.3)) != hash(own.clipped)


def test_numbers_of_numpy_become_plain_numbers() -> None:
    spec = own.clipped(low=np.float64(0.1), high=np.float64(0.5))
    assert str(spec).endswith("high=0.5, low=0.1)")
    assert parse_attr(format_attr(spec)) == spec


def test_what_was_declared_can_be_asked() -> None:
    assert own.clipped.needs == ("advantages", "behaviour_logprobs")
    assert own.clipped.corrects_behaviour
    assert own.with_bonus.needs == ("advantages", "bonus")
    assert own.with_bonus.extra_fields == ("bonus",)
    assert not own.with_bonus.corrects_behaviour
    assert own.likelier.pairs
    assert own.likelier.predicts == "logprobs"
    assert own.absolute.predicts == "values"
    assert own.hinge.pairs
    assert own.hinge.predicts == "scores"
    assert resolve_loss(own.clipped).proportional
    assert resolve_loss(own.with_bonus).aggregation == "constant"


def test_an_own_loss_computes_what_ours_does() -> None:
    at, batch = draw()
    got = resolve_loss(own.clipped(high=0.28))(at, batch).values
    want = resolve_loss(loss.policy_clip(0.2, 0.28))(at, batch).values
    torch.testing.assert_close(got, want)


def test_a_loss_reads_fields_of_maps_and_reports_metrics() -> None:
    batch = TokenBatch(
        advantages=torch.tensor([1.0, 2.0]), extra={"bonus": torch.tensor([0.5, -1.0])}
    )
    logprobs = torch.tensor([-1.0, -2.0])
    terms = resolve_loss(own.with_bonus(scale=2.0))(logprobs, batch)
    assert terms.values.tolist() == [2.0, 0.0]
    assert terms.means["weight"].tolist() == [2.0, 0.0]
    other = resolve_loss(own.with_bonus(mode="leave"))(logprobs, batch)
    assert other.values.tolist() == [1.0, 4.0]


def test_metrics_carry_no_gradient() -> None:
    logprobs = torch.tensor([-2.0, -0.5, -3.0], requires_grad=True)
    terms = resolve_loss(own.measured)(logprobs, TokenBatch())
    assert terms.values.requires_grad
    for found in (terms.means["unlikely"], terms.maxima["unlikely_max"]):
        assert found.tolist() == [-2.0, -3.0]
        assert not found.requires_grad


@pytest.mark.parametrize(("what", "found"), [("mean", "[]"), ("number", "float")])
def test_a_metric_that_is_reduced_already_is_refused(what: str, found: str) -> None:
    with pytest.raises(TraceError, match=f"gives a metric '{what}' of the wrong shape") as caught:
        resolve_loss(own.measured(what=what))(torch.tensor([-2.0, -0.5]), TokenBatch())
    assert caught.value.found == found
    assert caught.value.where == f"tests/algo/own_functions.py:{line_of('measured')}"


def test_what_is_declared_must_be_there() -> None:
    with pytest.raises(ValueError, match=r"own_functions:with_bonus needs advantages and bonus"):
        resolve_loss(own.with_bonus)(torch.zeros(1), TokenBatch())


def line_of(function: str) -> int:
    """The line of a function's `def` in `own_functions.py`."""
    with open(own.__file__) as file:  # noqa: PTH123
        lines = list(file)
    return next(i for i, text in enumerate(lines, 1) if text.startswith(f"def {function}("))


@pytest.mark.parametrize(
    ("name", "message", "more"),
    [
        ("summed", "returns the wrong shape", "found: []; expected: a tensor [3]"),
        ("undefined", "returns NaN", "at 1 of 3 tokens, first token 1, where the logprob is -0.5"),
        ("detached", "has no gradient", "without detach"),
        ("counted", "does not return a tensor", "found: int"),
    ],
)
def test_a_result_of_no_use_is_told_with_the_functions_line(
    name: str, message: str, more: str
) -> None:
    logprobs = torch.tensor([-2.0, -0.5, -3.0], requires_grad=True)
    with pytest.raises(TraceError) as caught:
        resolve_loss(getattr(own, name))(logprobs, TokenBatch())
    text = str(caught.value)
    assert text.startswith(f"tests/algo/own_functions.py:{line_of(name)}: loss {name} {message}")
    assert more in text


def test_what_is_not_declared_is_not_seen() -> None:
    at, batch = draw()
    with pytest.raises(TraceError, match="loss undeclared raised TypeError") as caught:
        resolve_loss(own.undeclared)(at, batch)
    assert caught.value.where == f"tests/algo/own_functions.py:{line_of('undeclared') + 2}"
    assert "a field that is not declared is None" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "what", "hint"),
    [
        ("near_miss", "reads batch.advantage, which does not exist", "did you mean 'advantages'?"),
        ("beside", "reads batch.surprise, which", 'write batch.extra["surprise"]'),
        ("other_key", "raised KeyError: 'surprises'", "did you mean 'surprise'?"),
    ],
)
def test_a_field_that_there_is_not_is_told_the_nearest(name: str, what: str, hint: str) -> None:
    at, batch = draw()
    batch = replace(batch, extra={"surprise": torch.ones_like(at)})
    with pytest.raises(TraceError) as caught:
        resolve_loss(getattr(own, name))(at, batch)
    assert caught.value.where == f"tests/algo/own_functions.py:{line_of(name) + 1}"
    assert f"loss {name} {what}" in caught.value.what
    assert caught.value.found == "it declares advantages, surprise"
    assert caught.value.hint == hint
    if "asks" in what:
        assert "advantages, behaviour_logprobs, entropy, extra" in str(caught.value.expected)


def two(logprobs: Any, batch: Any, *, beta: float = 0.1, name: str = "x") -> Any:
    return logprobs


def one(logprobs: Any) -> Any:
    return logprobs


def asks(logprobs: Any, batch: Any, *, beta: float) -> Any:
    return logprobs


def listed(logprobs: Any, batch: Any, *, betas: Any = (1, 2)) -> Any:
    return logprobs


def anything(logprobs: Any, batch: Any, **options: Any) -> Any:
    return logprobs


def taken(logprobs: Any, batch: Any, *, aggregation: str = "x") -> Any:
    return logprobs


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (one, "one does not take logprobs and batch"),
        (asks, "every option has a default"),
        (listed, "option 'betas' must be a number"),
        (anything, "must know its options by name"),
        (taken, "the name 'aggregation' is reserved"),
    ],
)
def test_a_signature_that_no_trainer_can_call_is_refused(function: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        loss.own()(function)
    assert "test_own_losses.py:" in str(caught.value.where)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bta": 0.1}, "did you mean 'beta'"),
        ({"beta": [1]}, "option 'beta' must be a number"),
        ({"beta": float("nan")}, "option 'beta' must be a number"),
    ],
)
def test_options_that_the_function_does_not_have_are_refused(
    options: dict[str, Any], message: str
) -> None:
    mine = loss.own()(two)
    with pytest.raises(TraceError, match=message) as caught:
        mine(**options)
    assert "test_own_losses.py:" in str(caught.value.where)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"needs": ("advantage",)}, "did you mean 'advantages'"),
        ({"extra": ("advantages",)}, "advantages goes into needs="),
        ({"extra": ("a b",)}, "cannot be the name of a field"),
        ({"aggregation": "token-meen"}, "did you mean 'token-mean'"),
        ({"corrects_behaviour": True}, "without its logprobs"),
        ({"predicts": "logits"}, "no prediction .* is called 'logits'"),
        ({"predicts": "scores"}, "a loss on scores must be a loss on pairs"),
        (
            {"predicts": "values", "needs": "preferred"},
            "a loss on values cannot be a loss on pairs",
        ),
    ],
)
def test_a_declaration_that_makes_no_sense_is_refused(
    declared: dict[str, Any], message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        loss.own(**declared)
