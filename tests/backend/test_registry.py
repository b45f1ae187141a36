"""Backends are found by entry point; a broken one is named and leaves the others usable.

The distributions here are real ones to `importlib.metadata`: a metadata folder on `sys.path`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flowrl.backend.plugin import Plugin
from flowrl.backend.registry import available, find, require_usable
from flowrl.errors import BackendError

GOOD = """
from flowrl.backend.protocols import BackendStatus, Capabilities, Service


class Good:
    name = "good"
    capabilities = Capabilities(services=frozenset({Service.SCORE}), devices=frozenset({"cpu"}))

    def check(self):
        return BackendStatus(usable=True)

    def open_generate(self, context, shared): ...
    def open_train(self, context): ...
    def open_score(self, context): ...
    def open_environment(self, context): ...


plugin = Good()
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a distribution that declares one backend, for this test only."""

    def add(distribution: str, name: str, code: str, attribute: str = "plugin") -> None:
        module = f"{distribution.replace('-', '_')}_module"
        site = tmp_path / distribution
        info = site / f"{distribution.replace('-', '_')}-1.5.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.5\n"
        )
        (info / "entry_points.txt").write_text(
            f"[flowrl.backends]\n{name} = {module}:{attribute}\n"
        )
        (site / f"{module}.py").write_text(code)
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.delitem(sys.modules, module, raising=False)

    return add


def error_of(name: str) -> str:
    with pytest.raises(BackendError) as caught:
        find(name)
    message = str(caught.value)
    assert 1 <= len(message.splitlines()) <= 4
    return message


def test_a_third_party_plugin_is_found_by_its_name(install: Install) -> None:
    install("acme-engine", "good", GOOD)
    plugin = find("good")
    assert isinstance(plugin, Plugin)
    assert plugin.name == "good"


def test_options_of_a_plugin_that_no_file_can_be_checked_against_are_refused(
    install: Install,
) -> None:
    no_model = GOOD.replace("def check", "options = dict\n\n    def check", 1)
    install("acme-engine", "good", no_model)
    assert "its options are <class 'dict'>, not a pydantic model" in error_of("good")
    lax = GOOD.replace("def check", "options = BaseModel\n\n    def check", 1)
    install("lax-engine", "lax", "from pydantic import BaseModel\n" + lax.replace("good", "lax"))
    assert "its options (BaseModel) accept unknown keys: set extra='forbid'" in error_of("lax")


def test_a_plugin_that_is_installed_while_flowrl_runs_is_found(
    install: Install, tmp_path: Path
) -> None:
    install("acme-engine", "other", GOOD)
    assert "good" not in {item.name for item in available()}
    declared = tmp_path / "acme-engine" / "acme_engine-1.5.dist-info" / "entry_points.txt"
    declared.write_text(declared.read_text() + "good = acme_engine_module:plugin\n")
    assert find("good").name == "good"


def test_available_reports_distribution_and_version(install: Install) -> None:
    install("acme-engine", "good", GOOD)
    (found,) = [item for item in available() if item.name == "good"]
    assert (found.distribution, found.version) == ("acme-engine", "1.5")
    assert found.plugin is not None
    assert found.error is None


def test_an_unknown_name_is_answered_with_the_nearest_and_all_others(install: Install) -> None:
    install("acme-engine", "good", GOOD)
    with pytest.raises(BackendError) as caught:
        find("goood", where="roles.actor.backend")
    message = str(caught.value)
    assert message.startswith("roles.actor.backend: no backend is called 'goood'")
    assert "did you mean 'good'?" in message
    assert "torch" in message
    assert "verify" in message


@pytest.mark.parametrize(
    ("code", "attribute", "complaint"),
    [
        ("import a_library_nobody_has", "plugin", "ModuleNotFoundError: No module named"),
        ("raise RuntimeError('driver too old\\nsecond line')", "plugin", "driver too old"),
        ("raise SystemExit(3)", "plugin", "SystemExit: 3"),
        ("this is no Python", "plugin", "SyntaxError"),
        ("", "plugin", "AttributeError"),
        ("plugin = object()", "plugin", "it lacks name, capabilities, check"),
        (GOOD, "Good", "is the class Good, not an instance"),
        (GOOD + "\nGood.name = 'other'", "plugin", "it calls itself 'other'"),
        (GOOD + "\nGood.capabilities = {}", "plugin", "its capabilities are a dict"),
        (GOOD + "\nGood.name = property(lambda s: 1 / 0)", "plugin", "raises ZeroDivisionError"),
        (GOOD + "\nGood.protocol = 2", "plugin", "it is written for protocol 2, and this flowrl"),
    ],
)
def test_a_broken_plugin_is_named_with_its_distribution(
    install: Install, code: str, attribute: str, complaint: str
) -> None:
    install("broken-engine", "good", code, attribute)
    message = error_of("good")
    assert "broken-engine 1.5" in message
    assert complaint in message
    assert "second line" not in message


def test_a_broken_plugin_does_not_break_the_rest(install: Install) -> None:
    install("broken-engine", "broken", "1 / 0")
    install("acme-engine", "good", GOOD)
    found = {item.name: item for item in available()}
    assert found["broken"].plugin is None
    assert "ZeroDivisionError" in str(found["broken"].error)
    assert found["good"].plugin is not None


def test_finding_one_plugin_imports_no_other(install: Install) -> None:
    install("broken-engine", "broken", "raise KeyboardInterrupt")
    install("acme-engine", "good", GOOD)
    assert find("good").name == "good"


def test_a_name_declared_twice_is_refused_and_both_owners_named(install: Install) -> None:
    install("acme-engine", "good", GOOD)
    install("other-engine", "good", GOOD)
    message = error_of("good")
    assert "acme-engine 1.5 and other-engine 1.5" in message
    twice = [item for item in available() if item.name == "good"]
    assert [item.distribution for item in twice] == ["acme-engine", "other-engine"]
    assert all(item.plugin is None and item.error is not None for item in twice)


def test_the_first_party_backends_are_declared() -> None:
    names = {item.name: item.distribution for item in available()}
    assert names["torch"] == "flowrl"
    assert names["verify"] == "flowrl"


def test_a_plugin_may_say_the_version_of_its_protocol(install: Install) -> None:
    install("acme-engine", "good", GOOD + "\nGood.protocol = 1")
    assert find("good").name == "good"


def test_a_trainer_with_another_engine_has_what_both_can(install: Install) -> None:
    engine = GOOD.replace("Service.SCORE", "Service.GENERATE").replace(
        'devices=frozenset({"cpu"})',
        'devices=frozenset({"cpu"}), abort=True, sleep=True, seeds=False',
    )
    install("acme-engine", "good", engine)
    pair = find("torch+good")
    assert isinstance(pair, Plugin)
    assert pair.name == "torch+good"
    can = pair.capabilities
    assert can.services == {"generate", "train"}
    assert not can.seeds
    assert (can.devices, can.dtypes) == ({"cpu"}, {"float32"})
    assert (can.abort, can.sleep, can.resume, can.shares_weights) == (True, True, False, False)
    assert can.heads == find("torch").capabilities.heads


def test_a_pair_of_which_one_lacks_its_service_is_refused(install: Install) -> None:
    install("acme-engine", "good", GOOD)
    with pytest.raises(BackendError, match="backend 'good' cannot generate") as caught:
        find("torch+good", where="roles.actor.engine")
    assert caught.value.where == "roles.actor.engine"
    assert caught.value.found == "it offers score"


PICKY = """
from flowrl.backend.protocols import BackendStatus, BasePlugin, Capabilities, Service


class Picky(BasePlugin):
    name = "picky"
    capabilities = Capabilities(services=frozenset({Service.GENERATE}), devices=frozenset({"cpu"}))

    def check(self, options={}):
        if options.get("python") == "none":
            return BackendStatus(usable=False, problem="no such python", hint="name another")
        return BackendStatus(usable=True)


plugin = Picky()
"""


def test_whether_a_plugin_can_be_used_is_asked_with_the_options_of_its_role(
    install: Install,
) -> None:
    install("acme-engine", "picky", PICKY)
    install("older-engine", "good", GOOD)
    require_usable("good", "judge", {"python": "none"})  # its check knows no options
    require_usable("torch+picky", "actor", {"python": "none"}, {})
    with pytest.raises(BackendError, match="'picky' cannot be used here: no such python") as caught:
        require_usable("torch+picky", "actor", {}, {"python": "none"})
    assert caught.value.where == "roles.actor.engine"
    assert caught.value.hint == "name another"
    assert find("torch+picky").check().usable
