"""`flowrl run --dry-run` checks what would run, and opens nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl.cli import doctor, dry_run, main
from tests.runtime.tiny_runs import write_config

PICKY = """
from flowrl.backend.protocols import BackendStatus, BasePlugin, Capabilities, Service


class Picky(BasePlugin):
    name = "picky"
    capabilities = Capabilities(services=frozenset({Service.SCORE}), devices=frozenset({"cpu"}))

    def check(self, options={}):
        return BackendStatus(usable=False, problem="no such port", hint="name another")


plugin = Picky()
"""


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> list[doctor.Check]:
    """What `flowrl doctor` finds; it tries torch in a process of its own, which takes seconds."""
    checks = [doctor.Check(name="runs", status=doctor.Status.OK, found="can be written")]
    monkeypatch.setattr(dry_run, "check_machine", lambda runs: tuple(checks))
    return checks


def run(*words: str) -> object:
    with pytest.raises(SystemExit) as end:
        main(["run", "--dry-run", *words])
    return end.value.code


def test_a_run_that_can_begin_is_described_and_leaves_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    assert not run(str(write_config(tmp_path)))
    out, err = capfd.readouterr()
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[1] == "ok runs can be written"
    assert any(line.startswith("ok stage grpo 4 steps; up to ") for line in lines)
    assert any(line.startswith("ok role actor torch ") for line in lines)
    for line in (
        "ok role verifier verify",
        "ok model actor a new one",
        "ok data 100 prompts of up to 6 tokens, of arithmetic train, 2 digits",
        "ok held out 100 prompts",
        "ok rewards verifier digit (rewards.terms)",
    ):
        assert line in lines
    assert lines[-1] == "tiny can run here; nothing was opened"
    assert not err
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


def test_all_that_would_end_the_run_is_reported_at_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    site = tmp_path / "site"
    info = site / "picky-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: picky\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[flowrl.backends]\npicky = picky_plugin:plugin\n")
    (site / "picky_plugin.py").write_text(PICKY)
    monkeypatch.syspath_prepend(str(site))
    config = str(write_config(tmp_path))
    overrides = ("rewards.terms=[]", "stage.sft.stop=null", "roles.verifier.backend=picky")
    assert run(config, *overrides) == 2
    _, err = capfd.readouterr()
    assert "the rollouts of stage 'grpo' are scored, but the config has no reward" in err
    assert "backend 'picky' cannot be used here: no such port" in err


def test_missing_data_is_reported_after_the_other_checks_and_with_other_mistakes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    config = str(write_config(tmp_path))
    missing = ("data.train=none.jsonl", "data.eval=no.jsonl")
    assert run(config, *missing) == 2
    out, err = capfd.readouterr()
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[1] == "ok runs can be written"
    assert any(line.startswith("ok stage grpo 4 steps") for line in lines)
    assert "ok role verifier verify" in lines
    assert "can run here" not in out
    assert err.count("no such data file: none.jsonl") == 1
    assert err.count("no such data file: no.jsonl") == 1
    assert run(config, *missing, "args.kk=1") == 2
    _, err = capfd.readouterr()
    assert "no such data file: none.jsonl" in err
    assert "kk" in err


def test_a_machine_that_cannot_run_flowrl_is_no_success(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], machine: list[doctor.Check]
):
    problem = doctor.Status.PROBLEM
    machine.append(doctor.Check(name="python", status=problem, found="3.9", stops=True))
    assert run(str(write_config(tmp_path))) == 2
    assert capfd.readouterr().out.endswith("flowrl cannot run here: python\n")


def test_a_run_that_has_begun_is_not_checked_again(capfd: pytest.CaptureFixture[str]):
    assert run("--resume", "runs/a") == 2
    assert "--dry-run checks a run that has not begun" in capfd.readouterr().err
