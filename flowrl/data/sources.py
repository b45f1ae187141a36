"""Finds the files of a source: a file, a folder, a pattern, or a data set on the Hugging Face Hub.

A source in several files (shards) has the rows of all of them, in the order of their names. What
`datasets.Dataset.save_to_disk` writes is read as it is: `state.json` names its Arrow files, and
`dataset_dict.json` its splits, each in a folder of its own.
"""

from __future__ import annotations

import glob
import json
import re
from pathlib import Path

from flowrl.config.data import FileData, HubData
from flowrl.errors import DataError
from flowrl.wording import listing

_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")

_SHARD = re.compile(r"[-_.]?\d+(-of-\d+)?$")
"""The number of a shard at the end of a file's stem: `train-00000-of-00002`, `0000`."""


def files_of_source(source: str | FileData | HubData, *, key: str) -> list[Path]:
    """Returns the data files of a source, or of a path.

    Args:
        key: Its config key, for messages.

    Raises:
        DataError: There are none, or they are of several data sets.
    """
    if isinstance(source, HubData):
        return _downloaded(source, key=key)
    return files_of_path(Path(source) if isinstance(source, str) else source.path, key=key)


def files_of_path(path: Path, *, key: str) -> list[Path]:
    """Returns the data files that a path names; see `files_of_source`."""
    if path.is_file():
        return [path]
    if path.is_dir():
        return _files_in(path, key=key)
    matches = sorted(Path(name) for name in glob.glob(str(path)) if Path(name).is_file())  # noqa: PTH207
    if not matches:
        pattern = glob.has_magic(str(path))
        raise DataError(
            "no file fits the pattern" if pattern else "no such data file",
            where=key,
            found=str(path),
            hint=f"paths are taken from the working folder, {Path.cwd()}",
        )
    return matches


def _files_in(folder: Path, *, key: str) -> list[Path]:
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(entry.parent.name for entry in folder.glob("*/state.json"))
        raise DataError(
            "this folder has several splits of a data set",
            where=key,
            found=f"{folder} with {listing(splits)}",
            expected="one of them",
            hint=f"set {key}={folder / splits[0]}" if splits else None,
        )
    if (folder / "state.json").is_file():
        return _saved_files(folder, key=key)
    files = _data_files(folder) or _data_files(folder / "data")
    names = sorted({_SHARD.sub("", file.stem) for file in files})
    if len(names) > 1:
        patterns = [str(files[0].parent / f"{name}*{files[0].suffix}") for name in names]
        raise DataError(
            "this folder has files of several data sets or splits",
            where=key,
            found=f"{folder} with {listing([file.name for file in files])}",
            expected="a file, or a pattern for the shards of one",
            hint=f"set {key} to {' or '.join(patterns)}",
        )
    if not files:
        inside = [entry.name for entry in sorted(folder.iterdir())]
        raise DataError(
            "this is a folder without data files",
            where=key,
            found=f"{folder} with {listing(inside) if inside else 'nothing in it'}",
            expected=f"files that end in {', '.join(_SUFFIXES)}",
        )
    return files


def _data_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if p.suffix in _SUFFIXES and p.is_file())


def _saved_files(folder: Path, *, key: str) -> list[Path]:
    path = folder / "state.json"
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        files = [folder / Path(entry["filename"]).name for entry in state["_data_files"]]
    except (ValueError, TypeError, KeyError) as reason:
        raise DataError(
            "the folder of this data set is broken",
            where=str(path),
            found=f"{type(reason).__name__}: {reason}",
            hint="save it again with Dataset.save_to_disk",
        ) from reason
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise DataError(
            "the folder of this data set lacks files",
            where=key,
            found=f"{folder} without {listing(missing) if missing else 'any Arrow file'}",
        )
    return files


def _downloaded(source: HubData, *, key: str) -> list[Path]:
    """Returns the Parquet files of a data set, downloaded or from the Hub library's cache."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as reason:
        raise DataError(
            "data sets of the Hub need huggingface_hub, which is not installed",
            where=key,
            hint="pip install 'flowrl[data]', or give the path of a file",
        ) from reason
    pattern = f"{source.subset}/{source.split}/*.parquet"
    try:
        folder = snapshot_download(
            repo_id=source.name,
            repo_type="dataset",
            revision=source.revision,
            allow_patterns=[pattern],
        )
    # Its errors are of several libraries: no network, no such name, no permission.
    except Exception as reason:
        raise DataError(
            "the data set cannot be downloaded",
            where=key,
            found=f"{source.name}: {str(reason).strip().splitlines()[0][:200]}"
            if str(reason).strip()
            else f"{source.name}: {type(reason).__name__}",
            hint="check the name and the network, or download the files elsewhere and give "
            "their path",
        ) from reason
    files = sorted(Path(folder).glob(pattern))
    if not files:
        raise DataError(
            "the data set has no such subset and split",
            where=key,
            found=f"{source.name}, subset {source.subset}, split {source.split}",
            hint=f"https://huggingface.co/datasets/{source.name} lists them; set {key}.subset "
            f"and {key}.split",
        )
    return files
