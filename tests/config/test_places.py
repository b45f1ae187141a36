"""Places of one message that are in one file or on the command line are joined."""

from __future__ import annotations

from pathlib import Path

from flowrl.config.load import LoadedConfig, load_config

QUICKSTART = Path(__file__).parents[2] / "configs/quickstart.yaml"
PINS = [f"plan.pins.actor.update.{key}" for key in ("tp", "pp", "cp")]
FILE = """\
extends: {parent}
plan:
  pins:
    actor:
      update:
        tp: 2
        pp: 4
        cp: 2
"""


def located(loaded: LoadedConfig, *keys: str) -> str | None:
    return loaded.located(" and ".join(keys))


def test_settings_of_the_command_line_name_it_and_their_section_once():
    loaded = load_config(QUICKSTART, [*(f"{key}=2" for key in PINS), "train.steps=3", "seed=4"])
    together = "command line (plan.pins.actor.update: tp=2, pp=2, cp=2"
    assert located(loaded, *PINS) == f"{together})"
    assert located(loaded, *PINS, "train.steps") == f"{together}; train.steps=3)"
    assert located(loaded, *PINS, "seed") == f"{together}; seed=4)"
    assert located(loaded, "train.steps") == "command line (train.steps=3)"
    assert located(loaded, "mine.py:3", *PINS) == f"mine.py:3 and {together})"
    two = located(loaded, "train.steps", "seed")
    assert two == "command line (train.steps=3) and command line (seed=4)"


def test_each_line_of_a_file_is_named(tmp_path: Path):
    job = tmp_path / "job.yaml"
    job.write_text(FILE.format(parent=QUICKSTART))
    loaded = load_config(job)
    settings = "(plan.pins.actor.update: tp, pp, cp)"
    assert located(loaded, *PINS) == f"{job}:6, 7, 8 {settings}"
    first, second = f"{job}:6 ({PINS[0]})", f"{job}:7 ({PINS[1]})"
    assert located(loaded, *PINS[:2]) == f"{first} and {second}"
    assert located(loaded, *PINS[:2], PINS[0]) == f"{first} and {second}"


def test_one_override_of_several_keys_is_named_once():
    loaded = load_config(QUICKSTART, ["plan.pins={actor: {tp: 2, pp: 4, cp: 2}}"])
    keys = [f"plan.pins.actor.{key}" for key in ("tp", "pp", "cp")]
    place = "command line (plan.pins={actor: {tp: 2, pp: 4, cp: 2}})"
    assert located(loaded, *keys) == place
