"""`check_backend`: proves of a plug-in what it declares.

    from flowrl.testing import check_backend

    def test_my_engine():
        check_backend("mine")

Engines are compared with a plain forward pass of Transformers on the CPU, trainers with plain
torch.
`flowrl backends check NAME` runs the same checks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Unpack

from flowrl.backend.plugin import Plugin, Service, options_of, status_of
from flowrl.backend.registry import check_options, find
from flowrl.errors import BackendError
from flowrl.testing.checked_engine import CheckedEngine, CheckFailed, CheckSettings, Models
from flowrl.testing.engine_checks import ENGINE_CHECKS, FIRST, NotDeclared, check_tied
from flowrl.testing.processes import check_processes
from flowrl.testing.trainer_checks import TRAINER_CHECKS


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The result of one check.

    Attributes:
        name: Its name.
        status: `not declared` if the plug-in does not claim what it is about.
        found: What was seen, with figures.
        meaning: What a failure does to a run; empty otherwise.
    """

    name: str
    status: Literal["passed", "failed", "not declared"]
    found: str
    meaning: str = ""


def check_backend(backend: str | Plugin, **settings: Unpack[CheckSettings]) -> None:
    """Raises unless a plug-in keeps the promises of `flowrl.backend.protocols`.

    Args:
        backend: The name of an installed plug-in, or a plug-in.
        settings: `model`, `device`, `dtype`, `tolerance`, `timeout_s` and `options`; see
            `CheckSettings`.

    Raises:
        BackendError: It does not; all failures are listed, with what they do to a run.
    """
    results = run_checks(backend, **settings)
    failures = [result for result in results if result.status == "failed"]
    if failures:
        name = backend if isinstance(backend, str) else backend.name
        lines = (f"\n  - {one.name}: {one.found}; {one.meaning}" for one in failures)
        raise BackendError(
            f"backend {name!r} fails {len(failures)} checks", where=name, found="".join(lines)
        )


def run_checks(backend: str | Plugin, **settings: Unpack[CheckSettings]) -> Iterator[CheckResult]:
    """Yields the result of each check that the plug-in's services have; see `check_backend`.

    Raises:
        BackendError: The plug-in is not found or cannot be used here, or neither generates nor
            trains.
        ConfigError: It does not have such options.
    """
    plugin = find(backend) if isinstance(backend, str) else backend
    options = settings.get("options", {})
    check_options(plugin.name, options_of(plugin), options, at="options", where=str)
    status, services = status_of(plugin, options), plugin.capabilities.services
    if not status.usable:
        raise BackendError(
            f"backend {plugin.name!r} cannot be used here", found=status.problem, hint=status.hint
        )
    if not services & {Service.GENERATE, Service.TRAIN}:
        raise BackendError(
            f"backend {plugin.name!r} neither generates nor trains",
            found=" ".join(sorted(services)),
            hint="engines and trainers are checked; test scorers and environments by their methods",
        )
    with tempfile.TemporaryDirectory(prefix="flowrl-check-") as name:
        models = Models.make(Path(name), **settings)
        if Service.GENERATE in services:
            yield from _engine(plugin, models)
            by_name = backend if isinstance(backend, str) else None
            yield _result("processes", partial(check_processes, plugin, models, by_name))
        if Service.TRAIN in services:
            for check, run in TRAINER_CHECKS.items():
                yield _result(check, partial(run, plugin, models))


def _engine(plugin: Plugin, models: Models) -> Iterator[CheckResult]:
    engine: CheckedEngine | None = None

    def run(check: Callable[[CheckedEngine], str]) -> str:
        nonlocal engine
        if engine is None:
            engine = CheckedEngine(plugin, models)
            engine.load(FIRST, models.first)
        return check(engine)

    for name, check in ENGINE_CHECKS.items():
        result = _result(name, partial(run, check))
        yield result
        if result.status == "failed" and engine is not None:
            # What it left running would fail others.
            with suppress(Exception):
                engine.engine.close()
            engine = None
    if engine is not None:
        engine.engine.close()
    if models.tied is not None:
        yield _result("tied embeddings", partial(check_tied, plugin, models))


def _result(name: str, run: Callable[[], str]) -> CheckResult:
    try:
        return CheckResult(name=name, status="passed", found=run())
    except NotDeclared as reason:
        return CheckResult(name=name, status="not declared", found=str(reason))
    except CheckFailed as failure:
        return CheckResult(name=name, status="failed", found=failure.found, meaning=failure.meaning)
    except Exception as error:  # of the plug-in, which may raise anything
        return CheckResult(
            name=name,
            status="failed",
            found=f"it raises {type(error).__name__}: {error}",
            meaning="the run ends with this error",
        )
