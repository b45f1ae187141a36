"""Weights on their way from a trainer to an engine.

    trainer.export -> folder -> buckets with one checksum -> engine.load -> Loaded from engine.poll

A bucket is one of the `*.safetensors` files of an export, in the order of their names, as bytes. It
is mapped where it lies, so that exporter and engine need memory for their weights and one bucket at
a time.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = ["Bytes", "FileBuckets", "Loaded", "Weights", "WeightsKind", "checksum_of", "weights_of"]

Bytes = npt.NDArray[np.uint8]


class WeightsKind(StrEnum):
    """Where weights are."""

    IN_PLACE = "in place"
    """In the trainer's parameters, which the engine reads too."""

    SHARED_MEMORY = "shared memory"
    """In files of a folder in memory of this node."""

    FOLDER = "folder"
    """In files of a folder on a disk."""

    RAY_OBJECTS = "Ray objects"
    """In Ray's object store, an object for each bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A version of weights that an engine is to load.

    Attributes:
        version: Counts the publications of a role's weights.
        handle: The buckets in order, which can be iterated over again and again; none in place.
            They last until the engine reports the version as loaded.
        checksum: That of all buckets, by `checksum_of`; empty in place.
    """

    version: int
    kind: WeightsKind
    handle: Iterable[Bytes] = ()
    checksum: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """An engine's report that it samples from a version.

    Attributes:
        checksum: What the engine computed over the bytes that it loaded; empty in place.
    """

    version: int
    checksum: str = ""


@dataclass(frozen=True, slots=True)
class FileBuckets:
    """The files of weights in a folder, each mapped into memory when it is its turn."""

    folder: Path

    def __iter__(self) -> Iterator[Bytes]:
        for path in sorted(self.folder.glob("*.safetensors")):
            yield np.asarray(np.memmap(path, np.uint8, mode="r"))

    def __str__(self) -> str:
        return str(self.folder)


def checksum_of(buckets: Iterable[Bytes], before: str = "") -> str:
    """Returns the CRC-32 of all bytes in order, as eight hexadecimal digits.

    Args:
        before: The checksum of the buckets before these.
    """
    value = int(before or "0", 16)
    for bucket in buckets:
        value = zlib.crc32(bucket.data, value)
    return f"{value:08x}"


def weights_of(folder: Path, version: int, kind: WeightsKind = WeightsKind.FOLDER) -> Weights:
    """Returns the weights that are in a folder, with their checksum."""
    buckets = FileBuckets(folder)
    return Weights(version=version, kind=kind, handle=buckets, checksum=checksum_of(buckets))
