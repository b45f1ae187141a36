"""Files, folders, patterns, saved data sets and mixtures as sources of rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flowrl.config.data import DataConfig, FileData, HubData
from flowrl.data import Rows, load_rows
from flowrl.data.sources import files_of_path, files_of_source
from flowrl.errors import DataError

HERE = Path(__file__).parent


def rows_of(*prompts: str) -> list[dict[str, object]]:
    return [{"prompt": prompt, "answer": "1"} for prompt in prompts]


def write_lines(path: Path, *prompts: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of(*prompts)))
    return path


def read(source: object, **options: object) -> Rows:
    data = DataConfig(train=source, **options)
    return load_rows(data.train, data, split="train")


def save_to_disk(folder: Path, *shards: list[dict[str, object]]) -> None:
    """Writes what `datasets.Dataset.save_to_disk` writes (datasets, arrow_dataset.py)."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{len(shards):05d}.arrow" for i in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_stream(folder / name, table.schema) as writer:
            writer.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_format_type": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def test_shards_in_a_folder_or_of_a_pattern_are_one_source_in_the_order_of_names(tmp_path):
    write_lines(tmp_path / "data" / "train-00001-of-00002.jsonl", "c")
    write_lines(tmp_path / "data" / "train-00000-of-00002.jsonl", "a", "b")
    for path in (tmp_path, tmp_path / "data", tmp_path / "data" / "train-*.jsonl"):
        rows = read(str(path))
        assert [(row.index, row.prompt) for row in rows] == [(0, "a"), (1, "b"), (2, "c")]
    assert rows[2].where == f"{tmp_path / 'data' / 'train-00001-of-00002.jsonl'}:1"


def test_a_folder_of_several_splits_is_refused_with_the_pattern_of_each(tmp_path):
    write_lines(tmp_path / "train-00000-of-00001.jsonl", "a")
    write_lines(tmp_path / "test-00000-of-00001.jsonl", "b")
    with pytest.raises(DataError, match="files of several data sets or splits") as caught:
        read(str(tmp_path))
    assert f"{tmp_path}/test*.jsonl or {tmp_path}/train*.jsonl" in str(caught.value)


def test_a_saved_dataset_is_read_and_a_saved_dict_names_its_splits(tmp_path):
    save_to_disk(tmp_path / "train", rows_of("a", "b"), rows_of("c"))
    save_to_disk(tmp_path / "test", rows_of("d"))
    assert [row.prompt for row in read(str(tmp_path / "train"))] == ["a", "b", "c"]
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match="several splits of a data set") as caught:
        read(str(tmp_path))
    assert f"set data.train={tmp_path / 'test'}" in str(caught.value)


def test_a_broken_folder_of_a_saved_dataset_says_so(tmp_path):
    save_to_disk(tmp_path / "d", rows_of("a"))
    (tmp_path / "d" / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(DataError, match="lacks files"):
        read(str(tmp_path / "d"))
    (tmp_path / "d" / "state.json").write_text('{"_data_files": 3}')
    with pytest.raises(DataError, match="the folder of this data set is broken"):
        read(str(tmp_path / "d"))


def test_what_holds_no_data_is_named(tmp_path):
    with pytest.raises(DataError, match="no file fits the pattern"):
        files_of_path(tmp_path / "*.parquet", key="data.train")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(DataError, match="a folder without data files") as caught:
        files_of_path(tmp_path, key="data.train")
    assert "notes.txt" in str(caught.value)


def test_a_dataset_of_the_hub_is_read_from_its_parquet_files(tmp_path, monkeypatch):
    asked: list[dict[str, object]] = []

    def snapshot_download(**options: object) -> str:
        asked.append(options)
        return str(tmp_path)

    library = SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", library)
    (tmp_path / "main" / "train").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows_of("a")), tmp_path / "main" / "train" / "0000.parquet")
    source = {"kind": "hub", "name": "openai/gsm8k", "subset": "main"}
    (row,) = read(source)
    assert row.prompt == "a"
    assert asked[0] == {
        "repo_id": "openai/gsm8k",
        "repo_type": "dataset",
        "revision": "refs/convert/parquet",
        "allow_patterns": ["main/train/*.parquet"],
    }
    with pytest.raises(DataError, match="no such subset and split"):
        read({**source, "split": "dev"})


def test_a_hub_that_cannot_be_reached_is_a_data_error(monkeypatch):
    def snapshot_download(**options: object) -> str:
        raise ConnectionError("no route to host")

    library = SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", library)
    with pytest.raises(DataError, match="cannot be downloaded") as caught:
        files_of_source(HubData(kind="hub", name="a/b"), key="data.train")
    assert "no route to host" in str(caught.value)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DataError, match=r"pip install 'flowrl\[data\]'"):
        files_of_source(HubData(kind="hub", name="a/b"), key="data.train")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    pq.write_table(pa.Table.from_pylist(rows_of("a")), tmp_path / "d")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match=r"pip install 'flowrl\[data\]'"):
        read(str(tmp_path / "d"))


def test_a_mixture_has_the_rows_of_its_sources_with_their_names(tmp_path):
    math = write_lines(tmp_path / "math.jsonl", "a", " ", "b")
    code = FileData(
        kind="file", path=write_lines(tmp_path / "code.jsonl", "c"), prompt="<{prompt}>"
    )
    rows = read(
        {"kind": "mixture", "sources": {"math": str(math), "code": code.model_dump()}},
        max_bad_rows=1,
    )
    assert [(row.index, row.source, row.prompt) for row in rows] == [
        (0, "math", "a"),
        (2, "math", "b"),
        (3, "code", "<c>"),
    ]
    assert [problem.where for problem in rows.problems] == [f"{math}:2"]


def test_bad_rows_of_all_sources_of_a_mixture_count_together(tmp_path):
    sources = {name: str(write_lines(tmp_path / f"{name}.jsonl", "a", " ")) for name in "xy"}
    with pytest.raises(DataError, match="at most 1 bad rows"):
        read({"kind": "mixture", "sources": sources}, max_bad_rows=1)


def test_gsm8k_is_the_same_from_json_lines_and_from_parquet(tmp_path):
    lines = HERE / "gsm8k_train.jsonl"
    table = pa.Table.from_pylist([json.loads(line) for line in lines.read_text().splitlines()])
    path = tmp_path / "train-00000-of-00001.parquet"
    pq.write_table(table, path, row_group_size=7)
    from_lines, from_parquet = (read(str(p), preset="gsm8k") for p in (lines, path))
    assert len(from_lines) == 60
    for one, other in zip(from_lines, from_parquet, strict=True):
        assert (one.index, one.prompt, one.answer, one.solution) == (
            other.index,
            other.prompt,
            other.answer,
            other.solution,
        )
    assert from_parquet[41].where == f"{path}:row 42"
