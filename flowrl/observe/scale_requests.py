"""Requests to change the number of engines of a run that goes on: files of its folder.

    flowrl scale                                  the run
    requests/ID.json -------------------------->  taken (the file is removed), refused or done
    waits <-------------------------------------  requests/ID.answer.json, which stays as a record

The run makes `requests/` so that nobody but its user may write there, and reads no file of another
user. A request that was not taken within the time that its sender waits is withdrawn.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from flowrl.errors import ConfigError
from flowrl.files import write_json_atomic
from flowrl.observe.run_status import report_of

_log = logging.getLogger(__name__)

_FOLDER = "requests"
_ANSWER = ".answer.json"
_TARGET = re.compile(r"(?P<role>\w+)\.generate=(?P<sign>[+-]?)(?P<number>\d{1,4})")
_LOOK_S = 0.25
_MAX_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRequest:
    """What is asked for.

    Attributes:
        role: The role whose engines are meant.
        number: Engines to be added (below 0: to leave), or with `relative=False` to have then.
        schema: Version of this form.
    """

    role: str
    number: int
    relative: bool
    schema: Literal[1] = 1

    def target(self, present: int) -> int:
        """Returns the number of engines that it asks for, where there are `present`."""
        return present + self.number if self.relative else self.number


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleAnswer:
    """What came of a request.

    Attributes:
        done: False where it was refused or failed.
        text: What happened, or why nothing did.
        engines: Names of the engines of the role, after it.
    """

    done: bool
    text: str
    engines: tuple[str, ...] = ()
    schema: Literal[1] = 1


_REQUEST, _ANSWERED = TypeAdapter(ScaleRequest), TypeAdapter(ScaleAnswer)


def read_target(text: str) -> ScaleRequest:
    """Reads `ROLE.generate=+N`, `-N` or `=N`.

    Raises:
        ConfigError: it is none of them.
    """
    match = _TARGET.fullmatch(text)
    if match is None:
        raise ConfigError(
            "this does not say how many engines are wanted",
            where="command line",
            found=repr(text),
            expected="ROLE.generate=+N, ROLE.generate=-N or ROLE.generate=N",
            hint="for example `flowrl scale runs/quickstart actor.generate=+1`",
        )
    sign = match["sign"]
    return ScaleRequest(role=match["role"], number=int(sign + match["number"]), relative=bool(sign))


def ask_to_scale(
    folder: Path,
    request: ScaleRequest,
    timeout_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> ScaleAnswer:
    """Asks a run for another number of engines, and waits for its answer.

    Raises:
        CheckpointError: the folder has no run.
        ConfigError: the run does not go on, belongs to another user, or has not answered in time.
    """
    _require_running(folder)
    box = folder / _FOLDER
    name = f"{time.time_ns()}-{secrets.token_hex(4)}"
    asked, answered = box / f"{name}.json", box / f"{name}{_ANSWER}"
    try:
        write_json_atomic(asked, asdict(request))
    except OSError as error:
        raise ConfigError(
            "the run takes no requests",
            where=str(box),
            found=error.strerror or str(error),
            expected="a folder that the run has made and its user may write to",
        ) from error
    end = clock() + timeout_s
    while not answered.exists():
        if clock() >= end:
            raise _unanswered(folder, asked, timeout_s)
        sleep(_LOOK_S)
        if not report_of(folder).is_alive and not answered.exists():
            asked.unlink(missing_ok=True)
            _require_running(folder)
    return _ANSWERED.validate_json(answered.read_bytes())


def _require_running(folder: Path) -> None:
    report = report_of(folder)
    if not report.is_alive:
        raise ConfigError(
            "only a run that goes on can be scaled",
            where=str(folder),
            found=report.verdict,
            hint="another number of engines for a new run: roles.ROLE.num_engines",
        )


def _unanswered(folder: Path, asked: Path, timeout_s: float) -> ConfigError:
    try:
        asked.unlink()
    except FileNotFoundError:
        found = "it has taken the request and is still at it"
        hint = f"`flowrl status {folder}` shows its engines"
    else:
        found = "it has not taken the request, which is withdrawn"
        hint = "a run looks for requests while it collects samples; --timeout S waits longer"
    return ConfigError(
        f"the run has not answered for {timeout_s:g} s", where=str(folder), found=found, hint=hint
    )


class RequestBox:
    """The run's end. Made by the process that holds the run folder; older requests are removed.

    Args:
        folder: Folder of the run.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder / _FOLDER
        self._clock = clock
        self._looked_s = float("-inf")
        self._folder.mkdir(mode=0o700, exist_ok=True)
        for path in self._waiting():
            path.unlink(missing_ok=True)

    def take(self) -> tuple[str, ScaleRequest] | None:
        """Takes the oldest request, with its id; looks a few times a second at most."""
        now = self._clock()
        if now - self._looked_s < _LOOK_S:
            return None
        self._looked_s = now
        for path in self._waiting():
            name = path.name.removesuffix(".json")
            try:
                content = _read_own(path)
                path.unlink()
                return name, _REQUEST.validate_json(content)
            except FileNotFoundError:
                continue  # withdrawn
            except (OSError, ValidationError) as error:
                path.unlink(missing_ok=True)
                _log.warning("%s is no request: %s", path, str(error).splitlines()[0])
        return None

    def answer(self, name: str, answer: ScaleAnswer) -> None:
        """Answers a request that was taken."""
        _log.info("request %s: %s", name, answer.text)
        try:
            write_json_atomic(self._folder / f"{name}{_ANSWER}", asdict(answer))
        except OSError as error:  # it ends no run
            _log.warning("request %s cannot be answered: %s", name, error)

    def _waiting(self) -> list[Path]:
        found = (
            path
            for path in self._folder.glob("*.json")
            if not (path.name.startswith(".") or path.is_dir())
        )
        return sorted(path for path in found if not path.name.endswith(_ANSWER))


def _read_own(path: Path) -> bytes:
    """Reads a small file of this user, and no link."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if os.fstat(descriptor).st_uid != os.getuid():
            raise PermissionError("it belongs to another user")
        return os.read(descriptor, _MAX_BYTES)
    finally:
        os.close(descriptor)
