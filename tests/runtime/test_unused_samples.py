"""Samples that no step has used come back from a checkpoint as they were, bit for bit."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from flowrl.backend.batch import KeptTokens
from flowrl.data import PromptItem
from flowrl.data.rows import Row
from flowrl.errors import CheckpointError
from flowrl.ids import GroupId, NodeId, RoleName, SampleId, group_id
from flowrl.runtime.checkpoint.unused_samples import UnusedSamples, read_unused, write_unused
from flowrl.runtime.driver.collected_batch import CollectedBatch
from flowrl.runtime.driver.payloads import Payload
from flowrl.specs import FinishReason


def item_of(group: GroupId) -> PromptItem:
    epoch, index = map(int, group.split("/"))
    row = Row(index=index, prompt=f"p{index}", answer="", solution="", fields={}, where="rows:1")
    return PromptItem(
        epoch=epoch,
        index=index,
        group=group,
        row=row,
        prompt_ids=np.array([index], np.int64),
    )


def unused() -> UnusedSamples:
    first, second, third = (item_of(group_id(0, i)) for i in range(3))
    plain = Payload(
        item=first,
        attempt=2,
        tokens=np.array([4, 5, 6], np.int64),
        logprobs=np.array([-0.1, -1e-30, -np.float32(1 / 3)], np.float32),
        versions=((3, 1), (4, 2)),
        kept=KeptTokens(ids=np.array([4, 9, 6], np.int32), counts=np.array([2, 0, 1], np.int32)),
        finish=FinishReason.LENGTH,
        text="4 \u2028 5",
        score=1 / 3,
        scores={RoleName("verifier"): 1 / 3, RoleName("judge"): math.nan},
        judged={NodeId("filter"): -0.0},
        terms={"format": math.inf},
    )
    episode = Payload(
        item=second,
        tokens=np.array([7, 8], np.int64),
        logprobs=np.array([0.0, -0.5], np.float32),
        versions=((4, 2),),
        finish=FinishReason.STOP,
        mask=np.array([False, True]),
        turn=np.array([-1, 0], np.int64),
        token_reward=np.array([0.0, 0.25], np.float32),
        state=np.array([-1, 77], np.int64),
        text="<7",
        last_words="=",
        score=0.25,
        scores={RoleName("game"): 0.25},
    )
    fresh = Payload(item=third)
    dropped = Payload(item=third, tokens=np.array([1], np.int64), failure="raised KeyError")
    dropped.failed_term = "verifier/format"
    dropped.logprobs = np.array([-2.0], np.float32)
    return UnusedSamples(
        payloads={
            SampleId("0/0/0"): plain,
            SampleId("0/1/0"): episode,
            SampleId("0/2/0"): fresh,
        },
        verdicts={GroupId("0/1"): "zero_variance"},
        judged={GroupId("0/1"): (SampleId("0/1/0"),)},
        dropped=[(SampleId("0/2/1"), dropped, "reward_failed: raised KeyError")],
        batches={7: batch()},
    )


def batch() -> CollectedBatch:
    """A delivered batch with samples of every end."""
    payloads = [
        Payload(
            item=item_of(group_id(1, i)),
            tokens=np.array([i], np.int64),
            logprobs=np.array([-float(i)], np.float32),
            versions=((3, 1),),
            score=float(i),
        )
        for i in range(3)
    ]
    return CollectedBatch(
        groups=[(GroupId("1/0"), [(SampleId("1/0/0"), payloads[0])])],
        filtered=[(SampleId("1/1/0"), payloads[1], "zero_variance")],
        num_filtered_groups=1,
        dropped=[(SampleId("1/2/0"), payloads[2], "aged")],
        version=4,
        ready=5,
        under_way=6,
    )


def facts(payload: Payload) -> dict[str, object]:
    """Every field as something that compares exactly."""
    return {
        "group": payload.item.group,
        "prompt": payload.item.prompt_ids.tolist(),
        "arrays": {
            name: None if value is None else (value.dtype.str, value.tobytes())
            for name in ("tokens", "logprobs", "mask", "turn", "token_reward", "state")
            for value in [getattr(payload, name)]
        },
        "kept": None
        if payload.kept is None
        else (payload.kept.ids.tolist(), payload.kept.counts.tolist()),
        "rest": repr(
            (
                payload.attempt,
                payload.versions,
                payload.finish,
                payload.text,
                payload.last_words,
                payload.score,
                payload.scores,
                payload.judged,
                payload.terms,
                payload.failure,
                payload.failed_term,
            )
        ),
    }


def test_everything_comes_back_as_it_was(tmp_path: Path):
    written = unused()
    write_unused(tmp_path / "samples", written)
    read = read_unused(tmp_path / "samples", item_of)
    assert list(read.payloads) == list(written.payloads)
    for sample, payload in written.payloads.items():
        assert facts(read.payloads[sample]) == facts(payload)
    assert (read.verdicts, read.judged) == (written.verdicts, written.judged)
    ((sample, payload, reason),) = read.dropped
    assert (sample, reason) == ("0/2/1", "reward_failed: raised KeyError")
    assert facts(payload) == facts(written.dropped[0][1])
    (found,) = read.batches.values()
    assert list(read.batches) == [7]
    for field in ("num_filtered_groups", "version", "ready", "under_way"):
        assert getattr(found, field) == getattr(batch(), field)
    for ended, same in ((found.filtered, batch().filtered), (found.dropped, batch().dropped)):
        assert [(s, facts(p), r) for s, p, r in ended] == [(s, facts(p), r) for s, p, r in same]
    ((group, members),) = found.groups
    assert (group, [sample for sample, _ in members]) == ("1/0", ["1/0/0"])
    assert facts(members[0][1]) == facts(batch().groups[0][1][0][1])


def test_nothing_at_all_comes_back_too(tmp_path: Path):
    assert not UnusedSamples()
    write_unused(tmp_path / "samples", UnusedSamples())
    assert not read_unused(tmp_path / "samples", item_of)


def test_a_copy_does_not_follow_what_becomes_of_the_samples():
    live = unused()
    copy = live.copy()
    payload = live.payloads[SampleId("0/0/0")]
    payload.scores[RoleName("late")] = 1.0
    payload.tokens = np.zeros(9, np.int64)
    live.payloads.clear()
    live.verdicts.clear()
    assert len(copy.payloads) == 3
    assert "late" not in copy.payloads[SampleId("0/0/0")].scores
    assert len(copy.payloads[SampleId("0/0/0")].tokens) == 3
    assert copy.verdicts


@pytest.mark.parametrize("name", ["samples.json", "samples.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, name: str):
    write_unused(tmp_path / "samples", unused())
    (tmp_path / "samples" / name).unlink()
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        read_unused(tmp_path / "samples", item_of)
    assert str(tmp_path / "samples") in str(caught.value)


def test_rows_and_arrays_that_do_not_belong_together_are_refused(tmp_path: Path):
    write_unused(tmp_path / "samples", unused())
    rows = tmp_path / "samples" / "samples.json"
    value = json.loads(rows.read_text())
    value["samples"][0]["num_tokens"] = 2
    rows.write_text(json.dumps(value))
    with pytest.raises(CheckpointError, match="more than the rows say"):
        read_unused(tmp_path / "samples", item_of)
    value["samples"][0]["num_tokens"] = 300
    rows.write_text(json.dumps(value))
    with pytest.raises(CheckpointError, match="less than the rows say"):
        read_unused(tmp_path / "samples", item_of)
