"""A role whose trainer and engine are of two plug-ins: weights go from one to the other."""

from __future__ import annotations

from pathlib import Path

import pytest

import flowrl as fl
from flowrl.errors import BackendError
from tests.runtime.tiny_runs import WatchedDisplay, outcome, tiny_config

OTHER = """
from dataclasses import replace

from pathlib import Path

from pydantic import BaseModel

from flowrl_backends.torch.plugin import TorchPlugin


class Options(BaseModel, frozen=True, extra="forbid"):
    opened: str = ""


class Other(TorchPlugin):
    name = "other"
    capabilities = replace(TorchPlugin.capabilities, services=frozenset({"generate"}))
    options = Options

    def open_generate(self, context, shared):
        options = Options(**context.options)
        if options.opened:
            found = f"{context.options} {context.devices} {context.layout['tp']}"
            Path(f"{options.opened}.{context.replica}").write_text(found)
        return super().open_generate(context, shared)


plugin = Other()
"""


@pytest.fixture(autouse=True)
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs the torch plug-in's engine under another name."""
    site = tmp_path / "site"
    info = site / "other-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[flowrl.backends]\nother = other_engine:plugin\n")
    (site / "other_engine.py").write_text(OTHER)
    monkeypatch.syspath_prepend(str(site))


@pytest.mark.parametrize("engines", ["roles.actor.num_engines=1", "roles.actor.num_engines=2"])
def test_a_run_with_another_engine_learns_what_it_learns_with_its_own(tmp_path: Path, engines: str):
    own, pair = (
        outcome(fl.run(None, tiny_config(tmp_path / name), overrides=given, display=display).folder)
        for name, given, display in (
            ("own", [engines], WatchedDisplay()),
            ("pair", [engines, "roles.actor.engine=other"], WatchedDisplay()),
        )
    )
    assert own.weights
    assert pair.weights == own.weights
    assert pair.samples == own.samples


def test_an_engine_gets_its_own_options_and_what_the_plan_gives_it(tmp_path: Path):
    opened = tmp_path / "opened"
    options = [f"roles.actor.engine_options.opened={opened}", "roles.actor.engine=other"]
    short = [*options, "train.steps=1", "stages=[grpo]"]
    fl.run(None, tiny_config(tmp_path / "run"), overrides=short, display=WatchedDisplay())
    found = f"{{'opened': '{opened}'}} ('cpu:0',) 1"
    assert {path.name: path.read_text() for path in tmp_path.glob("opened*")} == {"opened.0": found}
    two = [*short, "roles.actor.num_engines=2"]
    fl.run(None, tiny_config(tmp_path / "two"), overrides=two, display=WatchedDisplay())
    assert {path.name for path in tmp_path.glob("opened*")} == {
        "opened.0",
        "opened.1",
        "opened.2",
    }


def test_an_engine_that_does_not_generate_is_refused_with_its_key(tmp_path: Path):
    with pytest.raises(BackendError, match="backend 'verify' cannot generate") as caught:
        fl.run(None, tiny_config(tmp_path), overrides=["roles.actor.engine=verify"])
    assert "roles.actor.engine" in str(caught.value.where)
