"""Tokens that stay in a store: the driver names them, and a trainer lays out the same batch."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from flowrl.backend.batch import KeptTokens, Sampler, TrainBatch
from flowrl.backend.protocols import Finished
from flowrl.data import PromptItem
from flowrl.data.rows import Row
from flowrl.ids import GroupId, NodeId, SampleId
from flowrl.runtime.channels import Bulk
from flowrl.runtime.driver.payloads import Payload, SampleSet, StepBatch, sample_set
from flowrl.runtime.groups import DataRef, PerSample, Stored, resolved
from flowrl.runtime.local.engine_worker import pack_ends, unpack_ends
from flowrl.specs import FinishReason, Sampling

PROMPTS = [1, 2, 3], [7]


def end(sample: str, attempt: int, tokens: list[int], *, kept: bool) -> Finished:
    ids = [np.array([token, 50 + token], np.int32) for token in tokens]
    return Finished(
        sample=SampleId(sample),
        attempt=attempt,
        reason=FinishReason.STOP,
        tokens=np.array(tokens, np.int64),
        logprobs=-np.array(tokens, np.float32) / 10,
        versions=((0, len(tokens)),),
        kept=KeptTokens.of_places(ids) if kept else None,
    )


def payloads(reports: Sequence[Sequence[Finished]], handles: Sequence[str | None]) -> SampleSet:
    """The set of samples whose attempts ended in reports; those with a handle are in a store."""
    row = Row(index=0, prompt="", answer="", solution="", fields={}, where="rows:1")
    found: dict[str, Payload] = {}
    for ends, handle in zip(reports, handles, strict=True):
        packed, bulk = pack_ends(ends)
        for each in unpack_ends(packed, Bulk(bulk.value, handle)):
            group = GroupId(each.sample.rpartition("/")[0])
            ids = np.array(PROMPTS[int(group[-1])], np.int64)
            item = PromptItem(epoch=0, index=0, group=group, row=row, prompt_ids=ids)
            found.setdefault(each.sample, Payload(item=item)).extend(each)
    groups = [
        (GroupId(group), [(SampleId(s), p) for s, p in sorted(found.items()) if s[:3] == group])
        for group in ("0/0", "0/1")
    ]
    return sample_set(NodeId("rollout"), groups)


def reports(*, kept: bool = False) -> list[list[Finished]]:
    """The second sample was stopped and continued; the last one has no token."""
    return [
        [end("0/0/0", 0, [4, 5], kept=kept), end("0/0/1", 0, [6], kept=kept)],
        [end("0/0/1", 1, [8, 9], kept=kept), end("0/1/0", 0, [5, 5, 5], kept=kept)],
        [end("0/1/1", 0, [], kept=kept)],
    ]


def assert_equal_arrays(found: object, expected: object) -> None:
    """Checks that two values of a class with arrays are equal, bit for bit."""
    if isinstance(expected, np.ndarray):
        assert isinstance(found, np.ndarray)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
    elif hasattr(expected, "__dataclass_fields__"):
        for field in fields(expected):  # type: ignore[arg-type]
            assert_equal_arrays(getattr(found, field.name), getattr(expected, field.name))
    else:
        assert found == expected


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("handles", [("a", "b", "c"), ("a", None, None), (None, "b", "c")])
def test_a_trainer_lays_out_what_a_store_has_as_the_driver_would(
    handles: tuple[str | None, ...], kept: bool
):
    made = reports(kept=kept)
    store = {h: pack_ends(ends)[1].value for h, ends in zip(handles, made, strict=True)}
    samples, local = payloads(made, handles), payloads(made, (None, None, None))
    assert local.stored(None) is None
    sampler = Sampler(sampling=Sampling(max_tokens=4), stop_token_ids=(2,))
    rows = samples.stored(sampler)
    assert rows is not None
    assert samples.lengths.tolist() == [5, 6, 4, 1]
    batch, logprobs = rows.batch(store.__getitem__)
    expected = StepBatch()
    expected.values.add_sampled(local.origin, "rollout_logprobs", local)
    assert batch.sampler == sampler
    assert_equal_arrays(logprobs, expected.values[local.origin, "rollout_logprobs"])
    for name in ("samples", "tokens", "offsets", "response_mask", "groups", "kept"):
        assert_equal_arrays(getattr(batch, name), getattr(local.sequences, name))


def test_a_request_for_a_trainer_has_each_prompt_once_and_no_stored_token():
    samples = payloads(reports(), ("a", "b", "c"))
    item = samples.payloads[0].item
    for payload in samples.payloads[:2]:
        payload.item = item  # as prompts of a group are one object
    rows = samples.stored(None)
    assert rows is not None
    assert rows.prompt_of == (0, 0, 1, 2)
    assert {part.handle for each in rows.attempts for part in each} == {"a", "b", "c"}  # type: ignore[union-attr]
    chosen = samples.select(np.array([2, 0]))
    picked = chosen.stored(None)
    assert picked is not None
    assert (picked.samples, picked.groups.tolist()) == (("0/1/0", "0/0/0"), [1, 0])
    assert "sequences" not in samples.__dict__  # nothing was laid out here


def test_fields_of_a_batch_that_a_store_has_are_found_there_and_those_of_samples_are_repeated():
    samples = payloads(reports(), (None, None, None))
    sequences = samples.sequences
    named: dict[str, Any] = {
        "sequences": DataRef(handle="sequences", lengths=sequences.lengths),
        "behaviour_logprobs": Stored("logprobs"),
        "advantages": PerSample(np.array([1.0, 2.0, 3.0, 4.0])),
    }
    batch = TrainBatch(**named)
    logprobs: npt.NDArray[np.float32] = np.arange(len(sequences.tokens), dtype=np.float32)
    store = {"batch": batch, "sequences": sequences, "logprobs": logprobs}
    put: DataRef[TrainBatch] = DataRef(handle="batch", lengths=sequences.lengths)
    found = resolved(put.select([1, 2]), store.__getitem__)
    assert isinstance(found, TrainBatch)
    assert found.behaviour_logprobs is not None
    assert found.behaviour_logprobs.tolist() == list(range(5, 15))
    assert found.advantages is not None
    assert found.advantages.tolist() == [0, 0, 0, 2, 2, 2, 0, 3, 3, 3]
    assert copy(Stored("logprobs", logprobs)).here is None  # as it is sent
