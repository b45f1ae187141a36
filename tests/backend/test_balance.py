"""Balance of samples over ranks, against the partitions of other libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl.backend.balance import balanced, rows_of_ranks
from flowrl.backend.batch import SequenceBatch
from flowrl.ids import SampleId

# Of the reference file: lengths and the largest part of the best of six libraries.
_UNIFORM_16 = [871, 443, 244, 1571, 123, 349, 1756, 1089, 361, 1362, 212, 785, 1299, 748, 325, 419]


def _largest(costs: list[int], parts: list[list[int]]) -> int:
    assert sorted(item for part in parts for item in part) == list(range(len(costs)))
    return max(sum(costs[item] for item in part) for part in parts)


@pytest.mark.parametrize(
    ("costs", "num_parts", "bound"),
    [
        (_UNIFORM_16, 4, 3001),
        ([512] * 24, 5, 2560),
        ([20000, 100, 200, 300], 2, 20000),
        ([4, 5, 6, 7, 8], 2, 16),
        ([5, 5], 3, 5),
        ([], 2, 0),
    ],
)
def test_parts_are_of_nearly_equal_cost(costs: list[int], num_parts: int, bound: int) -> None:
    parts = balanced(costs, num_parts)
    assert len(parts) == num_parts
    assert _largest(costs, parts) <= bound


def test_no_library_of_the_reference_data_has_a_smaller_largest_part(reference_data: Path) -> None:
    text = (reference_data / "oracles/seq_balancing.json").read_text(encoding="utf-8")
    cases: list[dict[str, Any]] = json.loads(text)["cases"]
    cases = [case for case in cases if case["name"].startswith("partition")]
    assert len(cases) == 35
    for case in cases:
        costs, num_parts = case["inputs"]["lengths"], case["options"]["k"]
        parts = balanced(costs, num_parts)
        assert all(parts), case["name"]
        # Also where the libraries make parts of equally many samples, which these are not.
        assert _largest(costs, parts) <= case["expected"]["best_max_sum"], case["name"]


def _batch(prompts: list[int], responses: list[list[int]]) -> SequenceBatch:
    lengths = [prompt + n for prompt, ns in zip(prompts, responses, strict=True) for n in ns]
    mask = [
        token >= prompt
        for prompt, ns in zip(prompts, responses, strict=True)
        for n in ns
        for token in range(prompt + n)
    ]
    return SequenceBatch(
        samples=tuple(SampleId(f"s{i}") for i in range(len(lengths))),
        tokens=np.zeros(sum(lengths), np.int64),
        offsets=np.cumsum([0, *lengths]),
        response_mask=np.array(mask),
        groups=np.repeat(np.arange(len(prompts)), [len(ns) for ns in responses]),
    )


def test_groups_stay_whole_where_a_shared_prompt_saves_more_than_balance_would() -> None:
    batch = _batch([50, 50], [[4, 6], [5, 5]])
    parts = rows_of_ranks(batch, np.arange(4), 2)
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3]]


def test_a_long_group_is_divided_unless_groups_must_stay_whole() -> None:
    batch = _batch([2, 2], [[90, 80], [5, 6]])
    divided = rows_of_ranks(batch, np.arange(4), 2)
    assert sorted(part.tolist() for part in divided) == [[0], [1, 2, 3]]
    whole = rows_of_ranks(batch, np.arange(4), 2, whole_groups=True)
    assert sorted(part.tolist() for part in whole) == [[0, 1], [2, 3]]


def test_rows_of_a_part_of_the_batch_are_those_of_the_batch() -> None:
    batch = _batch([2, 2, 2], [[1, 9], [5, 6], [9, 1]])
    parts = rows_of_ranks(batch, np.array([5, 4, 1]), 2)
    assert sorted(row for part in parts for row in part.tolist()) == [1, 4, 5]
    assert [part.tolist() for part in parts] == [sorted(part.tolist()) for part in parts]
