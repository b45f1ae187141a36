"""Atomic writes: a file is either complete or does not exist.

A run writes all its files through this module, so that a crash at any moment (kill -9, a full disk,
a power failure) leaves the previous file or the new one, never a part of one:

- single files are written next to their target, synced and renamed;
- folders are written next to their target, every file synced, then renamed;
- logs are JSON lines: whole lines are appended, and an incomplete last line is cut on reopening.

JSON has no NaN. A float that is not finite is written as the string `"NaN"`, `"Infinity"` or
`"-Infinity"`: any JSON reader accepts the file, nothing is lost, and `float(...)` reads it back.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import mmap
import numbers
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from flowrl.errors import DataError

_log = logging.getLogger(__name__)

_TEMPORARY = ".writing-"
_PREVIOUS = ".previous-"
_BLOCK = 1 << 20
"""The number of bytes per read, from the end, to find the last newline of a file."""


def _plain(value: object) -> object:
    """Converts values that json does not support: numpy scalars, paths, mappings, sorted sets."""
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _without_nonfinite(value: object) -> object:
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, Mapping):
        return {key: _without_nonfinite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nonfinite(item) for item in value]
    if value is None or isinstance(value, (str, int)):
        return value
    return _without_nonfinite(_plain(value))


# Shared encoders: json.dumps with options makes a new one at each call, slower than encoding a row.
_COMPACT = json.JSONEncoder(
    allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=_plain
)
_INDENTED = json.JSONEncoder(allow_nan=False, ensure_ascii=False, indent=2, default=_plain)


def _encode(encoder: json.JSONEncoder, value: object) -> str:
    try:
        return encoder.encode(value)
    except ValueError:  # a float that is not finite; rare, so only then is the value traversed
        return encoder.encode(_without_nonfinite(value))


def decode_json(text: str | bytes) -> object:
    """Returns the value of `json.loads`.

    Raises:
        ValueError: The text is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def encode_json(value: object) -> str:
    """Returns indented JSON with a final newline; floats that are not finite become strings."""
    return _encode(_INDENTED, value) + "\n"


def _to_bytes(text: str) -> bytes:
    # A lone surrogate becomes the escape \udcxx, which has the same meaning in a JSON string.
    return text.encode("utf-8", errors="backslashreplace")


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Adds the name of the file to errors of file descriptors."""
    try:
        yield
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from error


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_file(path: Path) -> None:
    """Forces a file's content to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Forces a folder's entries (names, not contents) to the disk."""
    sync_file(path)


def sync_tree(folder: Path) -> None:
    """Forces every file and folder below `folder`, and itself, to the disk."""
    for current, _, names in os.walk(folder):
        for name in names:
            sync_file(Path(current) / name)
        sync_folder(Path(current))


def _beside(target: Path, mark: str) -> Path:
    return target.with_name(f".{target.name}{mark}{os.getpid()}-{secrets.token_hex(4)}")


def _write_atomic(path: Path, data: bytes) -> None:
    temporary = _beside(path, _TEMPORARY)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        try:
            with _naming(path):
                _write_all(descriptor, data)
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
    except BaseException:
        with suppress(FileNotFoundError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def write_text_atomic(path: Path, text: str) -> None:
    """Writes UTF-8 `text`; `path` always has its old content or the new one."""
    _write_atomic(path, _to_bytes(text))


def write_json_atomic(path: Path, value: object) -> None:
    """Writes `value` as indented JSON; see the module for floats that are not finite."""
    write_text_atomic(path, encode_json(value))


def require_writable(path: Path) -> None:
    """Checks that `write_result` can write `path`, before the work that computes the result.

    The check makes a temporary file, because permission bits do not show read-only mounts; an
    existing file is unchanged.

    Raises:
        OSError: It cannot be written: its folder does not exist, it is a folder itself, ...
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and _is_written_through(path):
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return
    file = path.resolve() if path.is_symlink() else path
    temporary = _beside(file, _TEMPORARY)
    with _naming(path):
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        temporary.unlink()


def write_result(path: Path, content: str | bytes) -> None:
    """Writes a result to a file, atomically unless the path is a link, a device or a pipe."""
    data = content if isinstance(content, bytes) else _to_bytes(content)
    if _is_written_through(path):
        path.write_bytes(data)  # /dev/stdout must not be replaced by a file
    else:
        _write_atomic(path, data)


def _is_written_through(path: Path) -> bool:
    return path.is_symlink() or (path.exists() and not path.is_file())


def sha256_file(path: Path) -> str:
    """Returns the SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _whole_lines(descriptor: int) -> int:
    """Returns the number of bytes of the file up to its last newline, inclusive."""
    end = os.lseek(descriptor, 0, os.SEEK_END)
    while end > 0:
        start = max(0, end - _BLOCK)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


class JsonLines:
    """An append-only log of JSON objects, one a line.

    `append` passes whole lines to the system in one write, so they survive a crash of the process;
    after `sync`, they also survive a crash of the machine. Opening a log whose last line is
    incomplete after a crash cuts that line; `num_cut` is the number of bytes that were cut.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "log.jsonl"
    >>> with JsonLines(path) as log:
    ...     log.append([{"step": 1, "loss": float("nan")}])
    >>> path.read_text()
    '{"step":1,"loss":"NaN"}\\n'
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_cut = 0
        self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        size = os.fstat(self._descriptor).st_size
        whole = _whole_lines(self._descriptor)
        if whole < size:
            self.num_cut = size - whole
            os.ftruncate(self._descriptor, whole)
            _log.warning("%s: cut %d bytes of a line torn by a crash", path, self.num_cut)

    def append(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Appends rows, in order, with one write for all of them.

        Raises:
            OSError: The disk is full or failed; the next opening of the log cuts an incomplete
                line.
        """
        self.write("".join([_encode(_COMPACT, row) + "\n" for row in rows]))

    def write(self, text: str) -> None:
        """Appends whole lines that are JSON already; see `append`."""
        if self._descriptor is None:
            raise ValueError(f"{self.path} is closed")
        with _naming(self.path):
            _write_all(self._descriptor, _to_bytes(text))

    def sync(self) -> None:
        """Forces the appended rows to the disk.

        Raises:
            OSError: The disk failed, or the file was removed after it was opened.
        """
        if self._descriptor is not None:
            with _naming(self.path):
                os.fsync(self._descriptor)
                if not os.fstat(self._descriptor).st_nlink:
                    raise OSError(errno.ENOENT, "removed while it was being written")

    def close(self) -> None:
        """Closes the file; idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_json_lines(
    path: Path, keep: Callable[[bytes], bool] | None = None
) -> Iterator[dict[str, object]]:
    """Yields the rows of a log in order, without an incomplete last line; none for a missing file.

    Args:
        keep: Says of a line whether it is parsed at all; None parses every line.

    Raises:
        DataError: A complete line is not a JSON object; with its number.
    """
    if not path.exists():
        return
    with path.open("rb") as stream:
        for _, row in _rows(path, stream, keep):
            if row is not None:
                yield row


def find_json_lines(path: Path, text: str) -> Iterator[dict[str, object]]:
    """Yields the rows of a log whose line contains `text`, in order, without parsing the others.

    An incomplete last line is skipped, and a missing file has no rows. It takes a hundredth of the
    time of `read_json_lines` if few lines contain the text.

    Raises:
        DataError: A complete line with the text is not a JSON object.
    """
    needle = text.encode()
    with _mapped(path) as data:
        at = data.find(needle)
        while at >= 0:
            begin, end = data.rfind(b"\n", 0, at) + 1, data.find(b"\n", at)
            if end < 0:
                return
            line = data[begin : end + 1]
            try:
                row = decode_json(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                raise _bad_row(path, data[:begin].count(b"\n") + 1, line)
            yield row
            at = data.find(needle, end)


def find_in_lines(path: Path, pattern: bytes) -> set[str]:
    """Returns all matches of a pattern's only group in a log; none for a missing file."""
    with _mapped(path) as data:
        return {match.decode(errors="replace") for match in re.findall(pattern, data)}


@contextmanager
def _mapped(path: Path) -> Iterator[bytes | mmap.mmap]:
    """Opens the bytes of a file as a memory map, whose pages are read on access."""
    if not path.exists() or not path.stat().st_size:
        yield b""
        return
    with (
        path.open("rb") as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        yield data


def filter_json_lines(path: Path, keep: Callable[[dict[str, object]], bool]) -> int:
    """Replaces a log, atomically, by those of its rows for which `keep` is true, byte for byte.

    Returns:
        The number of removed rows, without an incomplete last line; if there is nothing to remove,
        the file is unchanged.

    Raises:
        DataError: A complete line is not a JSON object; with its number.
    """
    if not path.exists():
        return 0
    temporary = _beside(path, _TEMPORARY)
    removed = 0
    try:
        with path.open("rb") as source, temporary.open("xb") as kept:
            torn = False
            for line, row in _rows(path, source):
                if row is None:
                    torn = True
                elif keep(row):
                    kept.write(line)
                else:
                    removed += 1
            kept.flush()
            os.fsync(kept.fileno())
        if removed or torn:
            temporary.replace(path)
            sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return removed


def _rows(
    path: Path, stream: BinaryIO, keep: Callable[[bytes], bool] | None = None
) -> Iterator[tuple[bytes, dict[str, object] | None]]:
    """Yields each line that is kept with its row; None for an incomplete line."""
    for number, line in enumerate(stream, start=1):
        if keep is not None and not keep(line):
            continue
        if not line.endswith(b"\n"):
            yield line, None
            return
        try:
            row = decode_json(line)
        except ValueError as error:
            raise _bad_row(path, number, line) from error
        if not isinstance(row, dict):
            raise _bad_row(path, number, line)
        yield line, row


def _bad_row(path: Path, number: int, line: bytes) -> DataError:
    return DataError(
        "this row of a log is damaged",
        where=f"{path}:{number}",
        found=repr(line[:60])[1:],
        expected="a JSON object",
        hint="fix or remove the line, if this is a file of JSON lines; else name such a file",
    )


def _previous_of(target: Path) -> Sequence[Path]:
    return sorted(target.parent.glob(f".{target.name}{_PREVIOUS}*"))


@contextmanager
def folder_atomically(target: Path) -> Iterator[Path]:
    """Yields a new folder that becomes `target` when the block ends without an exception.

    An existing `target` is renamed, not emptied, and removed only after the new one has its name.
    POSIX cannot swap two folders in one call. If the process dies between the two renames, the
    earlier folder remains as `.NAME.previous-*` and gets its name again the next time `target` is
    written or `remove_leftovers` is called.

    Raises:
        OSError: The folder cannot be written; `target` is unchanged.
    """
    _restore_previous(target)
    temporary = _beside(target, _TEMPORARY)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        sync_tree(temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    previous = _beside(target, _PREVIOUS)
    replaces = target.exists()
    try:
        if replaces:
            target.replace(previous)
        temporary.replace(target)
    except BaseException:
        if replaces and previous.exists() and not target.exists():
            previous.replace(target)
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(target.parent)
    if replaces:
        shutil.rmtree(previous)


def _restore_previous(target: Path) -> None:
    for previous in _previous_of(target):
        if not target.exists():
            previous.replace(target)
            _log.warning("%s: restored the folder that a crash had left as %s", target, previous)
        else:
            shutil.rmtree(previous)


def remove_leftovers(parent: Path) -> None:
    """Removes from `parent` the temporary files of writers that were killed.

    It is only for folders that no other process writes to: incomplete files and folders are
    removed, and a renamed folder that was never replaced gets its name again.
    """
    for path in sorted(parent.iterdir()):
        if not path.name.startswith("."):
            continue
        if _PREVIOUS in path.name:
            _restore_previous(parent / path.name[1:].rpartition(_PREVIOUS)[0])
        elif _TEMPORARY in path.name:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
