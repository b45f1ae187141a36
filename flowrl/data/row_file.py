"""A data file as a sequence of rows, whatever its format.

`scan` goes through a file from its beginning and holds one row or one batch of rows at a time;
`read` returns a row again. A row that cannot be read is a `DataError` in its place, so that the
rows after it are read; a file that cannot be read any further raises. A file that changes after it
was scanned is not read by places that were of another content.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from flowrl.errors import DataError

Fields: TypeAlias = dict[str, object]


@dataclass(frozen=True, slots=True)
class Record:
    """A row of a file as it was read.

    Attributes:
        place: The argument with which `DataFile.read` returns it again.
        number: Its line, or its row in formats without lines, counted from 1.
        fields: Its fields, or why it cannot be read.
    """

    place: int
    number: int
    fields: Fields | DataError


class DataFile(ABC):
    """A data file of one format; see the module."""

    _unit = ""  # before the number of a row

    def __init__(self, path: Path) -> None:
        self.path = path
        self._identity: tuple[int, int] | None = None

    def scan(self) -> Iterator[Record]:
        """Yields the rows in their order.

        Raises:
            DataError: The file cannot be read, cannot be read any further, or has changed.
        """
        self._require_unchanged()
        return self._scan()

    def read(self, place: int) -> Fields:
        """Returns the row that `scan` found at a place.

        Raises:
            DataError: The file is not the one that was scanned.
        """
        self._require_unchanged()
        fields = self._read(place)
        if isinstance(fields, DataError):
            raise fields
        return fields

    def where(self, number: int) -> str:
        """Returns the place of a row for messages."""
        return f"{self.path}:{self._unit}{number}"

    def _require_unchanged(self) -> None:
        stat = self.path.stat()
        identity = stat.st_size, stat.st_mtime_ns
        if self._identity not in (None, identity):
            raise DataError(
                "the data file changed while it was in use",
                where=str(self.path),
                hint="start again, and write new data into a new file",
            )
        self._identity = identity

    @abstractmethod
    def _scan(self) -> Iterator[Record]: ...

    @abstractmethod
    def _read(self, place: int) -> Fields | DataError: ...
