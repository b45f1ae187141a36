"""Samples that are generated, or begun, and not used by a step yet, as files of a checkpoint.

    samples.json           a row a sample; batches and ends that no step has reported yet, by its id
    samples.safetensors    tokens, logprobs and what else has a length, of all samples together

Prompts of the data are not written: a sample's group names the data row, and the data is checked by
the cursor. Prompts that were made of samples are.
Numbers come back bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from flowrl.backend.batch import KeptTokens
from flowrl.data import PromptItem
from flowrl.errors import CheckpointError
from flowrl.files import write_json_atomic
from flowrl.ids import GroupId, NodeId, RoleName, SampleId
from flowrl.runtime.driver.collected_batch import CollectedBatch
from flowrl.runtime.driver.payloads import Array, Payload
from flowrl.specs import FinishReason

UNUSED = "unused-samples"
"""The folder of a checkpoint that holds them, one folder a rollout; no role has this name."""

_ROWS, _ARRAYS = "samples.json", "samples.safetensors"

EndedSample: TypeAlias = tuple[SampleId, Payload, str]
"""A sample that ended unused, and the reason."""

_NUMBERS: Mapping[str, type[np.generic]] = {
    "tokens": np.int64,
    "logprobs": np.float32,
    "mask": np.bool_,
    "turn": np.int64,
    "token_reward": np.float32,
    "state": np.int64,
}
"""Fields of a payload that are arrays of one number a token, with their types."""


@dataclass(slots=True, kw_only=True)
class UnusedSamples:
    """The samples of a driver at a step boundary.

    Attributes:
        payloads: Payloads of every live sample, and of filtered ones that no batch has named yet.
        verdicts: Why those groups were filtered.
        judged: Their samples.
        dropped: Samples that were dropped since the last batch, with the reason.
        batches: Delivered ones that the trainer has not taken, by number.
    """

    payloads: dict[SampleId, Payload] = field(default_factory=dict)
    verdicts: dict[GroupId, str] = field(default_factory=dict)
    judged: dict[GroupId, tuple[SampleId, ...]] = field(default_factory=dict)
    dropped: list[EndedSample] = field(default_factory=list)
    batches: dict[int, CollectedBatch] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.payloads or self.dropped or self.batches)

    def copy(self) -> UnusedSamples:
        """Returns a copy: payloads are extended later, but their arrays never change."""
        return UnusedSamples(
            payloads={sample: _copy(payload) for sample, payload in self.payloads.items()},
            verdicts=dict(self.verdicts),
            judged=dict(self.judged),
            dropped=[(sample, _copy(payload), reason) for sample, payload, reason in self.dropped],
            batches=dict(self.batches),  # nothing in them changes any more
        )

    def rows(self) -> list[tuple[SampleId, Payload]]:
        """Returns every sample, once."""
        found = [
            *self.payloads.items(),
            *((sample, payload) for sample, payload, _ in self.dropped),
        ]
        for batch in self.batches.values():
            found += [row for _, members in batch.groups for row in members]
            found += [(s, payload) for s, payload, _ in (*batch.filtered, *batch.dropped)]
        return found


def _copy(payload: Payload) -> Payload:
    return replace(payload, scores=dict(payload.scores), judged=dict(payload.judged))


def write_unused(folder: Path, unused: UnusedSamples) -> None:
    """Writes them into a folder, which is made."""
    folder.mkdir(parents=True)
    rows = unused.rows()
    write_json_atomic(
        folder / _ROWS,
        {
            "samples": [_row(sample, payload) for sample, payload in rows],
            "live": list(unused.payloads),
            "dropped": _ends(unused.dropped),
            "verdicts": unused.verdicts,
            "judged": unused.judged,
            "batches": [_batch(number, batch) for number, batch in unused.batches.items()],
        },
    )
    payloads = [payload for _, payload in rows]
    arrays: dict[str, Array] = {}
    for name, kind in _NUMBERS.items():
        parts = [value for p in payloads if (value := getattr(p, name)) is not None]
        arrays[name] = np.concatenate([np.zeros(0, kind), *parts])
    kept = KeptTokens.joined([payload.kept for payload in payloads if payload.kept is not None])
    made = [payload.item.prompt_ids for payload in payloads if payload.item.answers_sample]
    arrays["prompts"] = np.concatenate([np.zeros(0, np.int64), *made])
    arrays |= {"kept.ids": kept.ids, "kept.counts": kept.counts}
    save_file(arrays, folder / _ARRAYS)


def _ends(ended: Sequence[EndedSample]) -> list[list[str]]:
    return [[sample, reason] for sample, _, reason in ended]


def _batch(number: int, batch: CollectedBatch) -> dict[str, object]:
    return {
        "batch": number,
        "groups": [[group, [sample for sample, _ in members]] for group, members in batch.groups],
        "filtered": _ends(batch.filtered),
        "num_filtered_groups": batch.num_filtered_groups,
        "dropped": _ends(batch.dropped),
        "version": batch.version,
        "ready": batch.ready,
        "under_way": batch.under_way,
    }


def _row(sample: SampleId, payload: Payload) -> dict[str, object]:
    return {
        "sample": sample,
        "group": payload.item.group,
        "prompt": [len(payload.item.prompt_ids), payload.item.num_continued]
        if payload.item.answers_sample
        else None,
        "attempt": payload.attempt,
        "num_tokens": len(payload.tokens),
        "has": [name for name in _NUMBERS if getattr(payload, name) is not None],
        "kept": None if payload.kept is None else [len(payload.kept), len(payload.kept.ids)],
        "versions": [list(span) for span in payload.versions],
        "finish": payload.finish,
        "text": payload.text,
        "last_words": payload.last_words,
        "score": _exact(payload.score),
        "scores": {role: _exact(score) for role, score in payload.scores.items()},
        "judged": {node: _exact(score) for node, score in payload.judged.items()},
        "terms": {name: _exact(value) for name, value in payload.terms.items()},
        "failure": payload.failure,
        "failed_term": payload.failed_term,
    }


def _exact(value: float | None) -> str | None:
    """Returns a float as text that is read back as the same float, whatever it is."""
    return None if value is None else float(value).hex()


def read_unused(folder: Path, item_of: Callable[[GroupId], PromptItem]) -> UnusedSamples:
    """Reads the files of `write_unused`.

    Args:
        item_of: The prompt of a group.

    Raises:
        CheckpointError: a file is missing, or is not what it should be.
    """
    try:
        value = json.loads((folder / _ROWS).read_text(encoding="utf-8"))
        rows = _Reader(load_file(folder / _ARRAYS), item_of).rows(value["samples"])
        payloads = dict(rows)
        return UnusedSamples(
            payloads={SampleId(sample): payloads[sample] for sample in value["live"]},
            verdicts={GroupId(group): str(reason) for group, reason in value["verdicts"].items()},
            judged={
                GroupId(group): tuple(map(SampleId, samples))
                for group, samples in value["judged"].items()
            },
            dropped=_read_ends(value["dropped"], payloads),
            batches={batch["batch"]: _read_batch(batch, payloads) for batch in value["batches"]},
        )
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(
            "the samples of this checkpoint cannot be read",
            where=str(folder),
            found=f"{type(error).__name__}: {error}",
        ) from error


def _read_ends(
    ended: Sequence[Sequence[str]], payloads: Mapping[SampleId, Payload]
) -> list[EndedSample]:
    return [(SampleId(name), payloads[SampleId(name)], reason) for name, reason in ended]


def _read_batch(value: dict[str, Any], payloads: Mapping[SampleId, Payload]) -> CollectedBatch:
    return CollectedBatch(
        groups=[
            (GroupId(group), [(SampleId(name), payloads[SampleId(name)]) for name in samples])
            for group, samples in value["groups"]
        ],
        filtered=_read_ends(value["filtered"], payloads),
        num_filtered_groups=value["num_filtered_groups"],
        dropped=_read_ends(value["dropped"], payloads),
        version=value["version"],
        ready=value["ready"],
        under_way=value["under_way"],
    )


class _Reader:
    """Takes rows off the arrays, one after the other."""

    def __init__(
        self, arrays: Mapping[str, Array], item_of: Callable[[GroupId], PromptItem]
    ) -> None:
        self._arrays = arrays
        self._item_of = item_of
        self._read = dict.fromkeys(arrays, 0)

    def rows(self, rows: Sequence[dict[str, Any]]) -> list[tuple[SampleId, Payload]]:
        found = [(SampleId(row["sample"]), self._payload(row)) for row in rows]
        left = [name for name, array in self._arrays.items() if self._read[name] != len(array)]
        if left:
            raise ValueError(f"{', '.join(left)} hold more than the rows say")
        return found

    def _payload(self, row: dict[str, Any]) -> Payload:
        arrays = {name: self._next(name, row["num_tokens"]) for name in row["has"]}
        kept = None
        if row["kept"] is not None:
            places, ids = row["kept"]
            kept = KeptTokens(
                ids=self._next("kept.ids", ids), counts=self._next("kept.counts", places)
            )
        return Payload(
            item=self._item(GroupId(row["group"]), row["prompt"]),
            attempt=row["attempt"],
            kept=kept,
            versions=tuple((version, count) for version, count in row["versions"]),
            finish=None if row["finish"] is None else FinishReason(row["finish"]),
            text=row["text"],
            last_words=row.get("last_words", ""),
            score=_float(row["score"]),
            scores={RoleName(role): float.fromhex(s) for role, s in row["scores"].items()},
            judged={NodeId(node): float.fromhex(s) for node, s in row["judged"].items()},
            terms={name: float.fromhex(value) for name, value in row["terms"].items()},
            failure=row["failure"],
            failed_term=row.get("failed_term", ""),
            **arrays,
        )

    def _item(self, group: GroupId, made: Sequence[int] | None) -> PromptItem:
        item = self._item_of(group)
        if made is None:
            return item
        length, continued = made
        return replace(item, prompt_ids=self._next("prompts", length), num_continued=continued)

    def _next(self, name: str, count: int) -> Any:
        begin = self._read[name]
        if begin + count > len(self._arrays[name]):
            raise ValueError(f"{name} holds less than the rows say")
        self._read[name] = begin + count
        return self._arrays[name][begin : begin + count].copy()


def _float(value: str | None) -> float | None:
    return None if value is None else float.fromhex(value)
