"""Settings and fixtures of every test: one thread of arithmetic, no network, reference data."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.comparisons import fails_in_ci, reference_folder, refuse_updates
from tests.warm_processes import WarmProcesses

# Before numpy or torch are imported by any test: results and times must not depend on how many
# cores the machine has, and child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Ray reads these once, when the first test module of a process imports it.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)

# Generated cases are the same in every run; `HYPOTHESIS_PROFILE=random` looks for others. Neither
# fails because a loaded machine is slow.
ANY_SPEED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", ANY_SPEED, derandomize=True, database=None)
settings.register_profile("random", ANY_SPEED)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

REPOSITORY = Path(__file__).resolve().parent.parent


def pytest_configure() -> None:
    refuse_updates(os.environ)
    # A shell starts a job in the background with Ctrl-C ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def sigterm_ends_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in this process leaves SIGTERM alone: it is for the tests, not for the run."""
    if "flowrl.api" in sys.modules:  # others start no run
        monkeypatch.setattr("flowrl.runtime.run.STOPS", (signal.SIGINT,))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if fails_in_ci(report, getattr(item, "fixturenames", ()), os.environ):
        report.outcome = "failed"
        report.longrepr = f"skipped, but its reference data is there: {report.longrepr}"
    return report


ALONE = (
    "tests/cluster/test_cpu.py",
    "tests/runtime/test_asynchronous_runs.py",
    "tests/runtime/test_engine_fleet.py",
    "tests/runtime/test_engine_process.py",
    "tests/runtime/test_local_plans.py",
    "tests/scoring/test_scoring_pool.py",
    "tests/sim/test_choose_plan.py",
    "tests/sim/test_commands.py",
    "tests/sim/test_measure.py",
)
"""Files whose tests pin cores, measure times or send signals: no two of them run at once."""


RAY = ("tests/runtime/test_ray_pool.py", "tests/proofs/test_chaos.py")
"""Files besides those of tests/ray that start Ray: one cluster at a time on a machine."""


EACH = "tests/docs/test_documents.py"
"""A file whose tests share nothing and take long: each is scheduled by itself."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Has a file's tests share a worker, with its fixtures, whatever `--dist` says.

    `--dist loadgroup` is no way to that: it writes groups into ids that pytest 9.2 computes anew.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.split("::", 1)[0]
            if path in RAY or path.startswith("tests/ray/"):
                return "ray"
            return "alone" if path in ALONE else nodeid if path == EACH else path

    return ByFile(config, log)


def pytest_collection_finish() -> None:
    """Keeps libraries and test modules, which stay to the end, out of every garbage collection.

    A full one walks over a million objects otherwise; each run in this process begins with one.
    """
    gc.collect()
    gc.freeze()


STARTER = "flowrl.runtime.local.process_channel.start_module"
WARM = pytest.StashKey[WarmProcesses]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Runs start their workers as forks of this process as it is now; see `warm_processes`."""
    if session.config.pluginmanager.hasplugin("dsession"):  # of xdist: others run the tests
        return (yield)
    with closing(WarmProcesses()) as warm, pytest.MonkeyPatch.context() as patch:
        session.config.stash[WARM] = warm
        patch.setattr(STARTER, warm.start_module)
        return (yield)


@pytest.fixture(scope="session")
def warm(pytestconfig: pytest.Config) -> WarmProcesses:
    """Starts processes that have all libraries loaded."""
    return pytestconfig.stash[WARM]


@pytest.fixture
def cold_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs start their workers as they do outside of tests."""
    from flowrl.runtime.local.processes import start_module

    monkeypatch.setattr(STARTER, start_module)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree."""
    return REPOSITORY


@pytest.fixture(scope="session")
def reference_data() -> Path:
    """Figures and oracle values of other libraries; `FLOWRL_REFERENCE` names another folder."""
    return reference_folder(os.environ)


Golden = Callable[[str, str], None]


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compares text with `golden/NAME` beside the test; FLOWRL_UPDATE_GOLDEN=1 rewrites it."""
    folder: Path = request.path.parent / "golden"

    def check(name: str, text: str) -> None:
        path = folder / name
        if os.environ.get("FLOWRL_UPDATE_GOLDEN") == "1":
            folder.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"no {path}; FLOWRL_UPDATE_GOLDEN=1 writes it"
        assert text == path.read_text(encoding="utf-8")

    return check
