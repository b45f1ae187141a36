"""Mistakes in pins that are read together are told together."""

from __future__ import annotations

import pytest

from flowrl.cli.files import machine_words
from flowrl.errors import ConfigError, PlanError, combine
from tests.cli.command_line import ROOT, runner

CONFIG = "configs/grpo_qwen25_7b.yaml"
NODE = ["--cluster", "configs/clusters/h100_1x8.yaml"]


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)

    def plan(config: str, *words: str, cluster: list[str] = NODE) -> str:
        pins = [word for pin in words for word in ("--pin", pin)]
        code, out, err = runner(capsys, "plan")(
            config, *(cluster if config == CONFIG else []), *pins
        )
        assert (code, out) == (2, "")
        assert len(err.splitlines()) <= 4
        return err

    return plan


def test_pins_that_are_none_are_all_told():
    with pytest.raises(ConfigError) as caught:
        machine_words(None, ["rollout", "actor.tp", "a.tp=2", "a.tp=4", "actor.pp=2"])
    text = str(caught.value)
    assert text.startswith("--pin rollout: a pin says")
    assert "and 2 more mistakes" in text
    assert "--pin actor.tp: a pin says" in text
    assert "a.tp=2 and a.tp=4 contradict each other" in text


def test_a_pin_contradicts_the_same_key_in_another_form():
    assert machine_words(None, ["a.tp=2"], ["plan.pins.a.tp=2", "seed=1"]) == ["plan.pins.a.tp=2"]
    with pytest.raises(ConfigError, match=r"a\.tp=4 and a\.tp=2 contradict each other"):
        machine_words(None, ["a.tp=2"], ["plan.pins.a.tp=4"])


def test_devices_of_several_kinds_are_told_of_all_tasks(told):
    cluster = ["--cluster", "configs/clusters/h100_2x8_h20_4x8.yaml"]
    text = told(CONFIG, "rollout.devices=8-23", "actor.devices=12-31", cluster=cluster)
    assert "actor.generate cannot be on devices of several kinds" in text
    assert "and 1 more mistake: command line (plan.pins.actor.devices=12-31)" in text


def test_values_without_a_field_are_all_told(told):
    text = told(CONFIG, "rollout.tp=[2]", "actor.dp=true", "reference.tp=2")
    assert "tp is a whole number from 1 up" in text
    assert "and 1 more mistake: command line (plan.pins.actor.dp=true)" in text
    assert "dp is a whole number from 1 up" in text


def test_pins_of_nothing_or_of_no_value_are_told_with_those_that_contradict(told):
    text = told(
        CONFIG,
        "rolout.tp=2",
        "actor.tpp=3",
        "actor.dp=0",
        "rollout.recompute=full",
        "reference.devices=0-99",
        "actor.pp=4",
        "actor.update.pp=2",
    )
    for part in (
        "nothing in the plan is called 'rolout'",
        "and 5 more mistakes",
        "'tpp' cannot be pinned",
        "(plan.pins.actor.dp=0): dp is a whole number",
        "actor.generate has no backward pass",
        "there is no device 99 to be used",
        "actor.pp=4 and actor.update.pp=2 contradict each other",
    ):
        assert part in text


def test_all_pairs_that_contradict_each_other_are_named(told):
    text = told(
        CONFIG,
        *("rollout.devices=0-3", "rollout.tp=8", "actor.tp=2", "update.tp=4"),
        *("reference.tp=1", "reference.logprobs.tp=2"),
    )
    for pair in (
        "actor.tp=2 and update.tp=4",
        "reference.tp=1 and reference.logprobs.tp=2",
        "rollout.devices=0-3 and rollout.tp=8",
    ):
        assert text.count(f"{pair} contradict each other") == 1


def test_sizes_that_models_of_several_tasks_do_not_have_are_told_together(told):
    text = told(CONFIG, "rollout.tp=8", "actor.tp=3", "reference.tp=5")
    for size in ("tp=8", "tp=3", "tp=5"):
        assert f"{size} does not divide 28 query heads" in text


def test_pins_that_one_device_cannot_keep_are_told_together_whatever_stage_they_are_of(told):
    text = told(
        "configs/quickstart.yaml", "rollout.tp=2", "actor.devices=7", "verifier.tp=3", "update.pp=2"
    )
    assert text.count("there is no device 7") == 1
    for part in ("tp is always 1", "verifier has nothing to pin", "pp is always 1"):
        assert text.count(part) == 1


def test_mistakes_that_were_combined_are_combined_anew_and_none_is_told_twice():
    one, two, three = (PlanError(f"mistake {name}", where=name) for name in "abc")
    again = PlanError("mistake b", where="b")
    first = combine([combine([one, two]), combine([again, three])])
    assert first is one
    assert str(first).splitlines() == [
        "a: mistake a",
        "  to fix: fix this first",
        "  and 2 more mistakes: b: mistake b; c: mistake c",
    ]
    assert str(combine([PlanError("alone", hint="so")])) == "alone\n  to fix: so"


def test_of_very_many_mistakes_some_are_told():
    first = combine([PlanError(f"mistake {number}") for number in range(10)])
    assert str(first).endswith("mistake 6; and 3 more")


def test_many_pins_name_the_command_line_once(told):
    pins = ["tp=2", "pp=4", "cp=2", "recompute=none", "offload=none"]
    err = told(CONFIG, *(f"actor.update.{pin}" for pin in pins))
    some = ", ".join(pins[:3])
    keys = ", ".join(f"plan.pins.actor.update.{pin}" for pin in pins[:3])
    assert err.startswith(f"error: command line ({keys}")
    assert err.count("command line") == 1
    assert f"  found: actor.update ({some}" in err
