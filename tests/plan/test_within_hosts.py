"""Where the fastest schedules put too much into the memory of hosts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowrl.plan import posed_search
from flowrl.plan.ways import plain_ways
from flowrl.plan.within_hosts import fullest_host, host_bytes
from tests.cli.command_line import ROOT, runner


@pytest.fixture
def step_of(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Any:
    monkeypatch.chdir(ROOT)
    cluster = tmp_path / "cluster.yaml"

    def plan(memory_gib: int, *words: str) -> tuple[float, list[int], list[str]]:
        """Seconds of a step, how many schedules were asked of each search, and notes."""
        node = f"name: n, count: 4, memory_gib: {memory_gib}, cores: 192"
        cluster.write_text(
            f"nodes: [{{{node}, devices: [{{name: A100-SXM-80GB, count: 8}}]}}]", encoding="utf-8"
        )
        tops = []

        def search(problem: Any, top: int = 1) -> Any:
            tops.append(top)
            return known(problem, top=top)

        with monkeypatch.context() as patched:
            known = posed_search.search
            patched.setattr(posed_search, "search", search)
            code, out, err = runner(capsys, "plan")(
                "configs/grpo_qwen25_32b.yaml", "--cluster", str(cluster), "--json", *words
            )
        assert (code, err) == (0, "")
        found = json.loads(out)
        return found["prediction"]["step_s"], tops, found["notes"]

    return plan


@pytest.mark.parametrize("memory_gib", [200, 350])
def test_less_on_hosts_leads_to_the_schedule_that_many_of_the_best_lead_to(
    step_of: Any, monkeypatch: pytest.MonkeyPatch, memory_gib: int
):
    step_s, tops, notes = step_of(memory_gib)
    assert set(tops) == {1}
    assert f"looked at {posed_search.LESS_ON_HOSTS}" in notes
    monkeypatch.setattr(posed_search, "FEW_DEVICES", 1 << 20)
    looked_through_s, tops, notes = step_of(memory_gib)
    assert max(tops) > 1  # the best by itself puts too much there
    assert not any(posed_search.LESS_ON_HOSTS in note for note in notes)
    assert step_s == pytest.approx(looked_through_s, rel=1e-12)


def test_more_on_hosts_is_never_slower(step_of: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plain_ways, "PLAIN", 0.0)  # a plainer one may take a hundredth more
    steps = [step_of(gib)[0] for gib in (160, 200, 350, 2048)]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > steps[-1]


def test_the_fullest_host_is_that_of_the_device_whose_tasks_have_most_there():
    numbers = {"draw": (0, 1, 2), "refer": (0, 1), "train": (1, 2, 3)}
    ways: Any = {
        "draw": SimpleNamespace(host=0),
        "refer": SimpleNamespace(host=3),
        "train": SimpleNamespace(host=5),
    }
    assert fullest_host(numbers, ways) == {"refer": 3, "train": 5}
    assert host_bytes(numbers, ways) == 8
    assert fullest_host(numbers, {"draw": ways["draw"]}) == {}
