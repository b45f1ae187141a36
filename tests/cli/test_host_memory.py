"""What a plan puts into the memory of hosts is told, with how much of it a device takes."""

from __future__ import annotations

import json

import pytest

from flowrl.cost.memory import format_bytes
from tests.cli.command_line import ROOT, runner

SMALL = "configs/grpo_qwen25_7b.yaml"
PARAMETERS = 7_615_616_512
"""Of Qwen2.5-7B, as its model card has them: 7.61 billion."""


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    code, out, _ = runner(capsys)(*arguments)
    assert code == 0
    return out


def test_the_fewest_devices_come_with_what_is_computed_again_and_what_hosts_hold(
    capsys: pytest.CaptureFixture[str],
):
    words = ["size", SMALL, "--cluster", "configs/clusters/h100_8x8.yaml"]
    lines = [line.strip() for line in told(words, capsys).splitlines()]
    # In bfloat16 the reference; and besides the trainer's optimizer, 12 bytes of each parameter.
    reference, update = 2 * PARAMETERS, 14 * PARAMETERS
    assert (
        f"a device fills up to {format_bytes(reference + update)} of its host's memory "
        f"(reference.logprobs {format_bytes(reference)}, actor.update {format_bytes(update)})"
    ) in lines
    assert "actor.generate: one device" in lines
    assert "reference.logprobs: one device, all on the host between turns" in lines
    away = "optimizer always on the host, weights between turns"
    assert f"actor.update: one device, full recompute, {away}" in lines
    found = json.loads(told([*words, "--json"], capsys))
    assert f"a device fills up to {found['host']}" in lines
    assert {f"{node}: {way}" for node, way in found["ways"]} <= set(lines)


def test_a_plan_tells_what_it_takes_of_the_memory_of_hosts(capsys: pytest.CaptureFixture[str]):
    words = ["plan", SMALL, "--cluster", "configs/clusters/h100_1x8.yaml"]
    pinned = ["update.offload=all", "update.tp=4", "update.dp=2", "reference.offload=none"]
    text = told([*words, *(word for one in pinned for word in ("--pin", one))], capsys)
    # 12 bytes of a parameter are the optimizer's, an eighth of which each device has; 2 are the
    # parameter, of which it has a fourth.
    share = format_bytes(16 * PARAMETERS // 8)
    assert f"a device fills up to {share} of its host's memory (actor.update {share})" in text


def test_a_plan_that_takes_nothing_of_hosts_says_nothing_of_them(
    capsys: pytest.CaptureFixture[str],
):
    words = ["plan", SMALL, "--cluster", "configs/clusters/h100_8x8.yaml"]
    assert "host's memory" not in told(words, capsys)
