"""The tracker prometheus serves what a run does, and nothing to other machines."""

from __future__ import annotations

import json
import os
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from flowrl.errors import ConfigError
from flowrl.observe.rows import StepMetrics
from flowrl.observe.run_folder import RunFolder
from flowrl.observe.run_status import EngineStatus, RolloutStatus, RunStatus, write_status
from flowrl.observe.trackers import TrackerContext
from flowrl_backends.trackers.prometheus import Prometheus


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with RunFolder.create(tmp_path, "run") as made:
        made.write_config("seed: 0\n")
        yield made.path


def opened(folder: Path, **options: object) -> Prometheus:
    return Prometheus(TrackerContext(name="run", folder=folder, config={}, options=options))


def scrape(tracker: Prometheus) -> dict[tuple[str, ...], float]:
    """Returns each value by the name of its metric and its labels' values, in the labels' order."""
    url = f"http://127.0.0.1:{tracker.port}/metrics"
    with urllib.request.urlopen(url, timeout=20) as answer:
        text = answer.read().decode()
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_scrape_has_the_last_step_and_the_samples_of_now(folder: Path):
    tracker = opened(folder, port=0)
    try:
        assert scrape(tracker) == {}
        row = StepMetrics(
            stage="grpo",
            step=3,
            wall_s=4.0,
            num_tokens=100,
            seconds={"generate": 1.0, "wait": 2.0},
        )
        (folder / "metrics.jsonl").write_text(json.dumps(row.to_json()) + "\n")
        engine = EngineStatus(
            name="actor.generate[0]", weights=2, samples=5, capacity=8, state="ready"
        )
        rollout = RolloutStatus(
            name="rollout",
            samples={"queued": 7, "running": 5},
            staleness={0: 4, 1: 1},
            engines=[engine],
            waits=[],
        )
        write_status(folder, RunStatus(pid=os.getpid(), stage="grpo", rollouts=[rollout]))
        tracker.log("grpo", 3, {"reward_mean": 0.5})
        tracker.log("grpo", 3, {"held-out/accuracy": 0.75})
        engine_at = ("actor.generate[0]", "rollout")
        assert scrape(tracker) == {
            ("flowrl_metric", "reward_mean", "grpo"): 0.5,
            ("flowrl_metric", "held-out/accuracy", "grpo"): 0.75,
            ("flowrl_step", "grpo"): 3,
            ("flowrl_tokens_per_second", "grpo", "generate"): 100,
            ("flowrl_work_ratio", "grpo", "generate"): 0.25,
            ("flowrl_work_ratio", "grpo", "wait"): 0.5,
            ("flowrl_samples", "rollout", "queued"): 7,
            ("flowrl_samples", "rollout", "running"): 5,
            ("flowrl_stale_samples", "rollout", "0"): 4,
            ("flowrl_stale_samples", "rollout", "1"): 1,
            ("flowrl_engine_samples", *engine_at): 5,
            ("flowrl_engine_capacity", *engine_at): 8,
            ("flowrl_engine_weights", *engine_at): 2,
        }
    finally:
        tracker.close()


def test_only_this_machine_reaches_it_and_its_end_frees_the_port(folder: Path):
    tracker = opened(folder, port=0)
    assert tracker._server.server_address[0] == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"port \d+ cannot be opened") as caught:
        opened(folder, port=tracker.port)
    assert caught.value.where == "tracking.options.prometheus.port"
    tracker.close()
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", tracker.port))


@pytest.mark.parametrize("options", [{"port": "9464"}, {"port": 70_000}, {"host": "0.0.0.0"}])
def test_another_option_is_refused(folder: Path, options):
    with pytest.raises(ConfigError, match="one option, its port"):
        opened(folder, **options)
