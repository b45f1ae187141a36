"""Epochs in place of steps, and a run on Parquet in verl's layout from its rows to its logs."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from flowrl import api
from flowrl.files import read_json_lines
from tests.runtime.tiny_runs import WatchedDisplay, tiny_config


def verl_rows(path: Path, num: int) -> str:
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{i:02d}+01="}],
            "reward_model": {"style": "rule", "ground_truth": f"{i + 1:03d}"},
            "extra_info": {"index": i},
        }
        for i in range(num)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def test_a_run_takes_each_prompt_so_many_times_and_is_resumed_with_its_steps(tmp_path):
    config = {**tiny_config(tmp_path / "runs"), "stages": ["grpo"], "stage": {}}
    per_step = config["train"]["prompts_per_step"]
    data = {"train": verl_rows(tmp_path / "train.parquet", 3 * per_step), "preset": "verl_parquet"}
    config["data"] = {**config["data"], **data}
    config["rewards"] = {"terms": [{"kind": "exact_match", "name": "accuracy"}]}
    config["eval"] = {"metric": "accuracy", "num": 2}
    config["train"] = {**config["train"], "epochs": 1.1}
    del config["train"]["steps"]
    folder = api.run(None, config, display=WatchedDisplay()).folder
    train = yaml.safe_load((folder / "config.yaml").read_text())["train"]
    assert (train["steps"], train["epochs"]) == (4, None)
    assert len(list(read_json_lines(folder / "metrics.jsonl"))) == 4
    samples = list(read_json_lines(folder / "samples.jsonl"))
    groups = {row["sample"].rpartition("/")[0] for row in samples}
    assert {f"0/{i}" for i in range(3 * per_step)} <= groups
    assert len(groups) == 4 * per_step
    row = next(row for row in samples if row["sample"].startswith("0/2/"))
    assert (row["prompt"], row["answer"]) == ("02+01=", "003")
    again = api.resume(api.compile(None, folder / "config.yaml"), folder, display=WatchedDisplay())
    assert again.folder == folder
