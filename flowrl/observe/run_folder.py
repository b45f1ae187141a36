"""The folder of a run: its inputs, its logs and its results.

    config.yaml             the resolved config
    inputs.json             fingerprints of the user's files (flowrl.runtime.checkpoint.run_files)
    graph.STAGE.txt, .json  the graph of a stage
    plan.STAGE.json, .yaml  the plan of a stage
    metrics.jsonl           a row a step
    evaluations.jsonl       a row a measurement on held-out data
    samples.jsonl           a row a sample, with the end it had
    checkpoints/            see flowrl.runtime.checkpoint.store
    model/                  the exported model, a Hugging Face folder
    trained/ROLE/           the same of other roles that the run updated
    best/                   with eval.keep_best: the model with the highest held-out metric
    models/ROLE/            config and tokenizer of a new model
    copies/                 the weights with which copies of roles began a stage
    summary.json            written last: a run without it did not end
    status.json             what the run does now (flowrl.observe.run_status)
    logs/                   what each worker printed (flowrl.runtime.worker_logs)
    trace.json              what each worker did and when (flowrl.observe.trace)
    requests/               requests of `flowrl scale`, and answers (flowrl.observe.scale_requests)
    lock                    held by the process that writes here

One process writes at a time; its lock is freed by the system when the process dies. A
resumed run first cuts its logs back to the checkpoint, so that they end up equal, but for the
measured times, to those of a run that never stopped.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from flowrl.errors import CheckpointError, ConfigError, DataError
from flowrl.files import (
    JsonLines,
    filter_json_lines,
    find_in_lines,
    find_json_lines,
    folder_atomically,
    read_json_lines,
    remove_leftovers,
    write_json_atomic,
    write_text_atomic,
)
from flowrl.observe.rows import EvaluationRow, SampleRow, StepMetrics, Summary
from flowrl.wording import listing, nearest

_log = logging.getLogger(__name__)

_READERS_S = 1.0
_RETRY_S = 0.02
_CONFIG = "config.yaml"
_PLACE = re.compile(rb'\{"stage": ?"([^"]*)", ?"step": ?(\d+)')
_LOGS = ("metrics.jsonl", "evaluations.jsonl", "samples.jsonl")


class RunFolder:
    """A run folder, open for reading (`open`) or held for writing (`create`, `resume`).

        create ----> held: write_*, truncate_after, export_model ----> close
        resume --/
        open ------> read_* only

    >>> import tempfile
    >>> with RunFolder.create(Path(tempfile.mkdtemp()), "quickstart") as folder:
    ...     folder.write_config("seed: 0\\n")
    ...     folder.write_step(StepMetrics(stage="grpo", step=1, loss=0.5))
    >>> [row.loss for row in RunFolder.open(folder.path).steps()]
    [0.5]
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None
        self._logs: dict[str, JsonLines] = {}

    @classmethod
    def create(cls, parent: Path, name: str) -> RunFolder:
        """Makes and holds a folder `parent/name`, or `name-2`, `name-3` ... where that exists.

        Raises:
            ConfigError: `name` is no folder name, or the folder cannot be made.
        """
        if not name or name in (".", "..") or "/" in name or "\0" in name:
            raise ConfigError(
                "a run's name becomes a folder", where="name", found=repr(name), expected="a name"
            )
        try:
            parent.mkdir(parents=True, exist_ok=True)
            folder = cls(_new_folder(parent, name))
        except OSError as error:
            raise ConfigError(
                "cannot make the run folder",
                where=str(parent / name),
                found=error.strerror or str(error),
                hint="set runtime.runs to a folder that you may write to",
            ) from error
        folder._acquire()
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Opens an existing run for reading; another process may be writing it.

        Raises:
            CheckpointError: no run is there.
        """
        if not (path / _CONFIG).is_file():
            missing = f"a folder without {_CONFIG}" if path.is_dir() else "no such folder"
            raise CheckpointError(
                "this is no run folder",
                where=str(path),
                found="a file" if path.is_file() else missing,
                expected="a folder that `flowrl run` made, such as runs/quickstart",
                hint=_nearest_run(path),
            )
        return cls(path)

    @classmethod
    def resume(cls, path: Path) -> RunFolder:
        """Opens an existing run for writing and removes what a killed writer left half done.

        Raises:
            CheckpointError: no run is there.
            ConfigError: another process holds it.
        """
        folder = cls.open(path)
        folder._acquire()
        remove_leftovers(path)
        return folder

    def _acquire(self) -> None:
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock_alone(lock)
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(lock)
            raise ConfigError(
                "another process writes this run folder",
                where=str(self.path),
                found=f"process {holder}",
                hint="wait for it to end, or stop it, before resuming the run",
            ) from None
        except OSError as error:
            _log.warning(
                "%s: its file system has no locks (%s), so nothing keeps a second writer out",
                self.path,
                error.strerror or error,
            )
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        self._lock = lock

    def holder(self) -> int | None:
        """Returns the process that writes here; None if there is none."""
        try:
            lock = os.open(self.path / "lock", os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            # Shared, and for a moment only: several may ask at the same time.
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(lock, 32, 0).decode(errors="replace").strip()
            return int(pid) if pid.isdecimal() else 0
        finally:
            os.close(lock)
        return None

    def close(self) -> None:
        """Syncs and closes the logs and releases the folder; idempotent."""
        with ExitStack() as stack:  # whatever cannot be synced, the rest is closed
            if self._lock is not None:
                stack.callback(os.close, self._lock)  # frees the lock
                self._lock = None
            for log in self._logs.values():
                stack.callback(log.close)
                stack.callback(log.sync)
            self._logs.clear()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __str__(self) -> str:
        return _short(self.path)

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """The folder of the exported model."""
        return self.path / "model"

    @property
    def best(self) -> Path:
        """The folder of the model with the highest held-out metric."""
        return self.path / "best"

    def _held(self) -> None:
        assert self._lock is not None, f"{self.path} is open for reading only"

    def write_config(self, text: str) -> None:
        """Writes the resolved config; from then on the folder counts as a run."""
        self._held()
        write_text_atomic(self.path / _CONFIG, text)

    @property
    def config_path(self) -> Path:
        """The file of the resolved config."""
        return self.path / _CONFIG

    def write_graph(self, stage: str, text: str, data: object) -> None:
        """Writes a stage's graph in its canonical text form and as JSON."""
        self._held()
        write_text_atomic(self.path / f"graph.{stage}.txt", text)
        write_json_atomic(self.path / f"graph.{stage}.json", data)

    def write_plan(self, stage: str, data: object, yaml: str) -> None:
        """Writes a stage's plan as JSON (`data`) and as YAML text."""
        self._held()
        write_json_atomic(self.path / f"plan.{stage}.json", data)
        write_text_atomic(self.path / f"plan.{stage}.yaml", yaml)

    def _log(self, name: str) -> JsonLines:
        self._held()
        if name not in self._logs:
            self._logs[name] = JsonLines(self.path / name)
        return self._logs[name]

    def write_step(self, row: StepMetrics) -> None:
        """Adds a row to metrics.jsonl."""
        self._log("metrics.jsonl").append([row.to_json()])

    def write_evaluation(self, row: EvaluationRow) -> None:
        """Adds a row to evaluations.jsonl; measure before the checkpoint of the same step."""
        self._log("evaluations.jsonl").append([row.to_json()])

    def write_samples(self, rows: Iterable[SampleRow]) -> None:
        """Adds a step's rows to samples.jsonl with one write."""
        self._log("samples.jsonl").append([row.to_json() for row in rows])

    def sync(self) -> None:
        """Syncs the logs to the disk; call it before a checkpoint is made."""
        for log in self._logs.values():
            log.sync()

    def write_summary(self, summary: Summary) -> None:
        """Writes summary.json."""
        self._held()
        write_json_atomic(self.path / "summary.json", summary.to_json())

    def read_summary(self) -> Summary | None:
        """Returns the summary; None while the run has not ended.

        Raises:
            CheckpointError: summary.json is no summary.
        """
        path = self.path / "summary.json"
        if not path.exists():
            return None
        try:
            return Summary.from_json(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                "this summary cannot be read", where=str(path), found=str(error)
            ) from error

    def export_model(self, write: Callable[[Path], None]) -> Path:
        """Calls `write` on a new folder, replaces `model/` by it and returns `model/`."""
        self._held()
        with folder_atomically(self.model) as folder:
            write(folder)
        return self.model

    def steps(self) -> Iterator[StepMetrics]:
        """Yields the rows of metrics.jsonl."""
        return map(StepMetrics.from_json, read_json_lines(self.path / "metrics.jsonl"))

    def evaluations(self) -> Iterator[EvaluationRow]:
        """Yields the rows of evaluations.jsonl."""
        return map(EvaluationRow.from_json, read_json_lines(self.path / "evaluations.jsonl"))

    def samples(self) -> Iterator[SampleRow]:
        """Yields the rows of samples.jsonl."""
        return map(SampleRow.from_json, read_json_lines(self.path / "samples.jsonl"))

    def sample_steps(self) -> list[tuple[str, int]]:
        """Returns the stages and steps that have rows in samples.jsonl, in order; parses no row."""
        path = self.path / "samples.jsonl"
        if not path.exists():
            return []
        with path.open("rb") as lines:
            return list(dict.fromkeys(place for line in lines if (place := _place(line))))

    def samples_at(self, steps: Collection[tuple[str, int]]) -> Iterator[SampleRow]:
        """Yields the rows of samples.jsonl of these stages and steps; no others are parsed."""
        path = self.path / "samples.jsonl"
        rows = read_json_lines(path, lambda line: _place(line) in steps)
        return map(SampleRow.from_json, rows)

    def samples_of(self, group: str, member: str | None = None) -> Iterator[SampleRow]:
        """Yields the rows of a group, or of one member, of samples.jsonl; no others are parsed."""
        text = f'"{group}/' if member is None else f'"{group}/{member}"'
        for row in map(SampleRow.from_json, find_json_lines(self.path / "samples.jsonl", text)):
            of, _, name = row.sample.rpartition("/")
            if of == group and member in (None, name):  # not a text that quotes another's id
                yield row

    def groups(self) -> set[str]:
        """Returns the groups with a row in samples.jsonl."""
        return find_in_lines(self.path / "samples.jsonl", rb'"sample": ?"(\d+/\d+(?:/\d+)*)/\d+"')

    def truncate_after(self, stages: Sequence[str], stage: str, step: int) -> int:
        """Cuts the logs back to a checkpoint and removes the summary of an earlier end.

        Args:
            stages: All stages, in the order they run.
            stage: The checkpoint's stage.
            step: Steps of that stage that the checkpoint holds.

        Returns:
            The number of rows removed. Each log is replaced atomically; a second cut changes
            nothing.
        """
        self._held()
        order = {name: index for index, name in enumerate(stages)}
        last = (order[stage], step)
        removed = 0
        for name in _LOGS:
            if name in self._logs:
                self._logs.pop(name).close()
            path = self.path / name
            removed += filter_json_lines(path, lambda row: _position(row, order, path) <= last)  # noqa: B023
        with suppress(FileNotFoundError):
            (self.path / "summary.json").unlink()
        return removed


def _place(line: bytes) -> tuple[str, int] | None:
    """Returns the stage and the step of a line of samples.jsonl; None of a torn one."""
    found = _PLACE.match(line)
    return (found[1].decode(), int(found[2])) if found and line.endswith(b"\n") else None


def _position(row: dict[str, object], order: dict[str, int], path: Path) -> tuple[int, int]:
    # A stage that the run does not have any more comes after everything: its rows go.
    stage, step = row.get("stage"), row.get("step")
    if not isinstance(stage, str) or not isinstance(step, int):
        raise DataError(
            "this row of a log is damaged",
            where=str(path),
            found=f"stage {stage!r}, step {step!r}",
            expected="the name of a stage and a whole number",
            hint="remove the row, or move the file away",
        )
    return (order.get(stage, len(order)), step)


def _lock_alone(lock: int) -> None:
    """Locks a file, for which it waits until those have read it who ask for the run's process.

    Raises:
        BlockingIOError: another process has locked it.
    """
    end = time.monotonic() + _READERS_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise
            time.sleep(_RETRY_S)
        else:
            return


def _new_folder(parent: Path, name: str) -> Path:
    number = 1
    while True:
        path = parent / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()  # fails where it exists, also when another process is a moment faster
        except FileExistsError:
            number += 1
        else:
            return path


def _short(path: Path) -> str:
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _nearest_run(path: Path) -> str:
    """Returns a hint for a folder that is no run: the run that it is in, one inside or next."""
    for parent in path.parents:
        if (parent / _CONFIG).is_file():
            return f"did you mean {parent}?"
    for folder, name in ((path, ""), (path.parent, path.name), (Path("runs"), path.name)):
        runs = runs_in(folder)
        match = nearest(name, [run.name for run in runs])
        if match is not None:
            return f"did you mean {folder / match}?"
        if runs:
            return f"name one of the runs in {folder}: {listing(run.name for run in runs)}"
    return "make a run first: `flowrl run CONFIG` says where its folder is"


def runs_in(folder: Path) -> list[Path]:
    """Returns the folders of the runs in a folder, by their names."""
    try:
        return sorted(one for one in folder.iterdir() if (one / _CONFIG).is_file())
    except OSError:
        return []


def installed_versions(names: Sequence[str]) -> dict[str, str]:
    """Returns the versions of those of `names` that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
