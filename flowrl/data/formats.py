"""Recognises the format of a data file by its content.

The name of a file decides only between text that could be either CSV or broken JSON lines.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from pathlib import Path

from flowrl.config.data import Format
from flowrl.data.column_files import ArrowFile, ParquetFile
from flowrl.data.row_file import DataFile
from flowrl.data.text_files import CsvFile, JsonArrayFile, JsonLinesFile, delimiter_of
from flowrl.errors import DataError

_HEAD = 1 << 16
"""Bytes from which the format of a file is recognised."""


def open_data_file(path: Path, format: Format | None = None) -> DataFile:  # noqa: A002
    """Opens a data file.

    Args:
        format: The format that the user insists on; None recognises it.

    Raises:
        DataError: The file is of no format that can be read, or is not of the given one.
        OSError: It cannot be opened.
    """
    return _FILES[format_of(path, format)](path)


_FILES: dict[Format, Callable[[Path], DataFile]] = {
    "jsonl": JsonLinesFile,
    "json": JsonArrayFile,
    "csv": CsvFile,
    "parquet": ParquetFile,
    "arrow": ArrowFile,
}

_MAGIC: tuple[tuple[bytes, Format], ...] = (
    (b"PAR1", "parquet"),
    (b"ARROW1", "arrow"),
    (b"\xff\xff\xff\xff", "arrow"),  # the stream that `datasets` writes
)

_FOREIGN: tuple[tuple[bytes, str, str], ...] = (
    (b"\x1f\x8b", "a file compressed by gzip", "gunzip {}"),
    (b"\x28\xb5\x2f\xfd", "a file compressed by zstd", "unzstd {}"),
    (b"BZh", "a file compressed by bzip2", "bunzip2 {}"),
    (b"\xfd7zXZ", "a file compressed by xz", "unxz {}"),
    (b"PK\x03\x04", "a zip archive or an Excel sheet", "unzip it, or save the sheet as CSV"),
    (b"\x80", "a Python pickle, which may run code", "write the rows as Parquet or JSON lines"),
    (b"version https://git-lfs", "a pointer of Git LFS, not the data", "git lfs pull"),
    (b"\xff\xfe", "text in UTF-16", "iconv -f UTF-16 -t UTF-8 {} > NEW"),
    (b"\xfe\xff", "text in UTF-16", "iconv -f UTF-16 -t UTF-8 {} > NEW"),
    (b"SQLite format 3", "an SQLite database", "write the table as CSV"),
    (b"%PDF", "a PDF", "give a data file"),
    (b"<", "HTML or XML, often the page about a file", "download the file itself"),
)

_NAMES: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
}

_READ = "JSON lines, a JSON array, CSV, Parquet or Arrow"


def format_of(path: Path, wanted: Format | None = None) -> Format:
    """Returns the format of a file.

    Args:
        wanted: The format that the user insists on, which must not contradict the content.

    Raises:
        DataError: It is another one, or none that can be read; says what the file is.
    """
    with path.open("rb") as file:
        head = file.read(_HEAD)
    recognised = next((kind for magic, kind in _MAGIC if head.startswith(magic)), None)
    text = head.removeprefix(codecs.BOM_UTF8).lstrip()
    if recognised is None and wanted not in ("parquet", "arrow"):
        _refuse_foreign(path, head, text)
        return wanted or _text_format(path, text)
    if recognised is None or wanted not in (None, recognised):
        is_text = recognised is None and b"\0" not in head
        raise DataError(
            f"the file is not of the format {wanted}",
            where=str(path),
            found=recognised or ("text" if is_text else "other binary data"),
            hint="leave the key `format` out; the content of a file says its format",
        )
    return recognised


def _refuse_foreign(path: Path, head: bytes, text: bytes) -> None:
    for magic, what, hint in _FOREIGN:
        if head.startswith(magic) or text.startswith(magic):
            raise DataError(
                f"this is {what}", where=str(path), expected=_READ, hint=hint.format(path)
            )
    if b"\0" in head:
        raise DataError(
            "this is binary data of an unknown format",
            where=str(path),
            found=repr(head[:16]),
            expected=_READ,
            hint="write its rows as JSON lines, CSV or Parquet, and name that file",
        )


def _text_format(path: Path, text: bytes) -> Format:
    first, _, rest = text.partition(b"\n")
    named = _NAMES.get(path.suffix.lower())
    if text.startswith(b"["):
        return "json"
    if text.startswith(b"{"):
        if first.strip() == b"{" or (first.rstrip().endswith(b"[") and rest.strip()):
            raise DataError(
                "this is one JSON object over several lines, and a row is an object on one line",
                where=str(path),
                found=repr(text[:40].decode(errors="replace")),
                expected=_READ,
                hint=f"jq -c '.[]' {path} > rows.jsonl; where the rows are under a key, "
                "'.KEY[]' in place of '.[]'",
            )
        return "jsonl"
    if named == "csv" or (delimiter_of(first) and b"\n{" not in text):
        return "csv"
    if named is not None or not text:
        return "jsonl"
    raise DataError(
        "the format of this file cannot be recognised",
        where=str(path),
        found=repr(first[:60].decode(errors="replace")),
        expected=_READ,
        hint="set data.format to one of jsonl, json, csv, parquet, arrow",
    )
