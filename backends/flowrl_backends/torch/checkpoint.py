"""Trainer state on disk: safetensors and JSON, never a pickle.

The caller provides a temporary folder and renames it when it is complete; this module writes every
file and flushes it to the disk.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from flowrl.errors import CheckpointError


@contextmanager
def system_errors(path: Path) -> Iterator[None]:
    """Converts system errors of safetensors, such as a full disk, to an OSError."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes `tensors` as safetensors and flushes the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with system_errors(path):
        save_file({n: t.detach().to("cpu").contiguous() for n, t in tensors.items()}, path)
    _flush(path)


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Writes `value` as JSON and flushes the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    _flush(path)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Reads safetensors onto the CPU.

    Raises:
        CheckpointError: The file is missing or damaged.
    """
    try:
        tensors: dict[str, torch.Tensor] = load_file(path)
    except (OSError, SafetensorError) as err:
        raise CheckpointError(f"cannot read {path}", found=str(err)) from err
    return tensors


def read_json(path: Path) -> dict[str, object]:
    """Reads a JSON object.

    Raises:
        CheckpointError: The file is missing or damaged.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise CheckpointError(f"cannot read {path}", found=str(err)) from err
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object", found=type(value).__name__)
    return value


def copy_files(files: list[Path], folder: Path) -> None:
    """Copies `files` into `folder` under their own names."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        if file.parent.resolve() != folder.resolve():
            shutil.copyfile(file, folder / file.name)


def flush_folder(folder: Path) -> None:
    """Flushes every file directly in `folder`, and its directory entry, to the disk."""
    for path in sorted(folder.iterdir()):
        if path.is_file():
            _flush(path)
    _flush(folder)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
