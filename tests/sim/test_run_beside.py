"""A simulation beside a run of another configuration says what differs, and the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from flowrl import api
from flowrl.compiler import CompiledStage
from flowrl.config.load import LoadedConfig, load_config
from flowrl.errors import ConfigError
from flowrl.observe.run_folder import RunFolder
from flowrl.plan import load_plan
from flowrl.sim.run_beside import check_run, differences, differences_text
from tests.runtime.tiny_runs import tiny_config
from tests.sim.test_choose_plan import two_cores


def loaded_from(folder: Path, *words: str, **changes: Any) -> LoadedConfig:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny_config(folder / "runs") | changes))
    return load_config(path, words)


def stage_of(loaded: LoadedConfig, name: str = "grpo") -> CompiledStage:
    compiled = api.compile(None, loaded, pool=two_cores())
    return next(stage for stage in compiled.stages if stage.name == name)


def run_of(loaded: LoadedConfig) -> Path:
    """The folder of a run that has not made a step."""
    with RunFolder.create(loaded.config.runtime.runs, loaded.config.name) as folder:
        folder.write_config(yaml.safe_dump(loaded.config.model_dump(mode="json")))
        for stage in api.compile(None, loaded, pool=two_cores()).stages:
            folder.write_plan(stage.name, stage.plan.to_dict(), stage.plan.to_yaml())
        return folder.path


def test_an_equal_run_has_no_differences(tmp_path: Path) -> None:
    loaded = loaded_from(tmp_path, "train.steps=9")
    run = run_of(loaded_from(tmp_path))
    assert differences(loaded, stage_of(loaded), run) == []
    assert differences(loaded, stage_of(loaded, "sft"), run) == []


def test_what_differs_is_told_with_the_words_that_make_it_alike(tmp_path: Path) -> None:
    ran = loaded_from(tmp_path, "train.max_staleness=2", "train.prompts_per_step=4", "args.kl=0.1")
    run = run_of(ran)
    loaded = loaded_from(tmp_path)
    found = differences(loaded, stage_of(loaded), run)
    assert [one.what for one in found] == [
        "train.max_staleness is 2 there and 0 here",
        "train.prompts_per_step is 4 there and 8 here",
        "args.kl is 0.1 there and 0.05 here",
        "it is asynchronous (1 engine process) there and temporal (generated in the main process) "
        "here",
    ]
    words = [word for one in found for word in one.words]
    assert words[:-1] == ["train.max_staleness=2", "train.prompts_per_step=4", "args.kl=0.1"]
    assert words[-1] == f"--plan {run / 'plan.grpo.json'}"
    text = differences_text(found, run)
    assert text.startswith(f"warning: --against {run}: ")
    assert text.endswith(f"{' '.join(words)} makes these equal")
    alike = loaded_from(tmp_path, *words[:-1])
    stage = stage_of(alike).with_plan(load_plan(run / "plan.grpo.json"))
    assert differences(alike, stage, run) == []
    # Whoever names that many engines has chosen.
    assert len(differences(alike, stage_of(alike, "grpo"), run, engines=1)) == 0


def test_an_earlier_stage_and_another_model_have_their_keys(tmp_path: Path) -> None:
    ran = loaded_from(tmp_path, "stage.sft.train.prompts_per_step=4")
    run = run_of(ran)
    loaded = loaded_from(tmp_path, "roles.actor.model.hidden_size=32")
    found = differences(loaded, stage_of(loaded, "sft"), run)
    assert [one.words for one in found] == [
        ("stage.sft.train.prompts_per_step=4",),
        ("roles.actor.model.hidden_size=16",),
    ]


def test_a_run_of_another_program_is_refused(tmp_path: Path) -> None:
    run = run_of(loaded_from(tmp_path))
    loaded = loaded_from(
        tmp_path, "stage.sft.workflow=grpo", "stage.sft.train.sampling.max_tokens=6"
    )
    with pytest.raises(ConfigError, match="another workflow") as caught:
        check_run(run, stage_of(loaded, "sft"))
    assert (caught.value.found, caught.value.expected) == ("sft", "grpo")
