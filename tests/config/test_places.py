"""A message names the line or the override of each key that it is about, and each once."""

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


def test_each_key_has_its_line_or_its_override(tmp_path: Path):
    job = tmp_path / "job.yaml"
    job.write_text(FILE.format(parent=QUICKSTART))
    loaded = load_config(job, ["train.steps=3"])
    first, second = f"{job}:6 ({PINS[0]})", f"{job}:7 ({PINS[1]})"
    assert located(loaded, *PINS[:2]) == f"{first} and {second}"
    assert located(loaded, *PINS[:2], PINS[0]) == f"{first} and {second}"
    steps = "command line (train.steps=3)"
    assert located(loaded, "mine.py:3", "train.steps") == f"mine.py:3 and {steps}"
    loaded = load_config(job, ["train.steps=3", "seed=4"])
    both = "command line (train.steps=3, seed=4)"
    assert located(loaded, "train.steps", "seed", PINS[0]) == f"{both} and {first}"


def test_one_override_of_several_keys_is_named_once():
    loaded = load_config(QUICKSTART, ["plan.pins={actor: {tp: 2, pp: 4, cp: 2}}"])
    keys = [f"plan.pins.actor.{key}" for key in ("tp", "pp", "cp")]
    place = "command line (plan.pins={actor: {tp: 2, pp: 4, cp: 2}})"
    assert located(loaded, *keys) == place
