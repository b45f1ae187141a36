"""Places of one message that are of one file or the command line are told together."""

from __future__ import annotations

from pathlib import Path

from flowrl.config.load import load_config, places_together

QUICKSTART = Path(__file__).parents[2] / "configs/quickstart.yaml"
KEYS = ("tp=2", "pp=4", "cp=2")


def test_settings_of_the_command_line_name_it_and_their_section_once():
    pins = [f"command line (plan.pins.actor.update.{key})" for key in KEYS]
    together = "command line (plan.pins.actor.update: tp=2, pp=4, cp=2"
    assert places_together(pins) == f"{together})"
    other = "command line (train.steps=3)"
    assert places_together([*pins, other]) == f"{together}; train.steps=3)"
    assert places_together([other]) == other
    assert places_together(["mine.py:3", *pins]) == f"mine.py:3 and {together})"


def test_of_a_file_each_line_is_told():
    lines = [f"job.yaml:{7 + i} (plan.pins.actor.{key[:2]})" for i, key in enumerate(KEYS)]
    assert places_together(lines) == "job.yaml:7, 8, 9 (plan.pins.actor: tp, pp, cp)"
    assert places_together(lines[:2]) == f"{lines[0]} and {lines[1]}"
    assert places_together([*lines[:2], lines[0]]) == f"{lines[0]} and {lines[1]}"


def test_keys_that_messages_name_are_found_and_told_together():
    loaded = load_config(QUICKSTART, ["train.steps=3", "train.group_size=2", "seed=4"])
    where = loaded.located("train.steps and train.group_size and seed")
    assert where == "command line (train: steps=3, group_size=2; seed=4)"
    two = loaded.located("train.steps and seed")
    assert two == "command line (train.steps=3) and command line (seed=4)"
