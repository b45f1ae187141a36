"""Sources of prompts that take turns by their shares."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.data import Prompt, PromptCursor, PromptMixture, PromptSet, Row, source_field
from flowrl.errors import CheckpointError, ConfigError

SHARES = {"math": 3.0, "code": 1.0}


def prompts(*sources: object) -> PromptSet:
    def row(i: int, source: object) -> Row:
        return Row(
            index=i,
            prompt=f"p{i}",
            answer="",
            solution="",
            fields={} if source is None else {"topic": source},
            where=f"d.jsonl:{i + 1}",
        )

    return PromptSet(
        prompts=tuple(
            Prompt.of(row(i, source), np.array([i], np.int64)) for i, source in enumerate(sources)
        ),
        source="d.jsonl",
    )


DATA = prompts("math", "code", "math", "math", "code", "math", "math")


def mixture(data: PromptSet = DATA, seed: int = 3, **shares: float) -> PromptMixture:
    return PromptMixture(data, seed, shares or SHARES, source_field("topic"))


def test_every_prefix_has_the_shares_within_one():
    sources = [item.source for item in mixture().take(40)]
    for num in range(1, 41):
        of_math = sources[:num].count("math")
        assert abs(of_math - 0.75 * num) <= 1
    assert Counter(sources) == {"math": 30, "code": 10}


def test_each_source_has_epochs_of_its_own():
    items = mixture().take(40)
    groups = [item.group for item in items]
    assert len(set(groups)) == 40
    assert max(item.epoch for item in items if item.source == "math") == 5  # 30 of 5
    assert max(item.epoch for item in items if item.source == "code") == 4  # 10 of 2
    assert all(item.row.fields["topic"] == item.source for item in items)


def test_prompts_of_a_named_source_count_towards_its_share():
    cursor = mixture(math=1.0, code=1.0)
    assert {item.source for item in cursor.take_of("math", 4)} == {"math"}
    assert [item.source for item in cursor.take(6)] == ["code"] * 4 + ["code", "math"]


def test_the_order_of_a_source_does_not_depend_on_the_others():
    alone = mixture(prompts("math", "math", "math", "math"), math=1.0)
    beside = mixture(prompts("math", "math", "math", "math", "code"), math=1.0, code=1.0)
    mine = [item.index for item in beside.take(8) if item.source == "math"]
    assert mine == [item.index for item in alone.take(4)]


@given(sizes=st.lists(st.integers(0, 6), max_size=6), cut=st.integers(0, 6), seed=st.integers(0, 5))
def test_a_resumed_mixture_gives_what_the_first_would_have_given(sizes, cut, seed):
    whole = mixture(seed=seed)
    expected = [item.group for size in sizes for item in whole.take(size)]
    first = mixture(seed=seed)
    got = [item.group for size in sizes[:cut] for item in first.take(size)]
    second = mixture(seed=seed)
    second.restore(json.loads(json.dumps(first.to_json())))
    got += [item.group for size in sizes[cut:] for item in second.take(size)]
    assert got == expected


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (mixture(prompts("math"), math=1.0).to_json(), "sources of prompts are others"),
        (PromptCursor(DATA, seed=3).to_json(), "sources of prompts are others"),
        (
            mixture(prompts("math", "code")).to_json(),
            "training data changed",
        ),
    ],
)
def test_a_checkpoint_of_other_sources_or_data_is_refused(written, message):
    with pytest.raises(CheckpointError, match=message):
        mixture().restore(written)


@pytest.mark.parametrize(
    ("data", "shares", "message"),
    [
        (DATA, {"math": 1.0}, "without a share: code"),
        (DATA, {**SHARES, "cod": 1.0}, "without rows: cod"),
        (prompts("math", None), SHARES, "does not say its source"),
        (prompts("math", 3), SHARES, "does not say its source"),
    ],
)
def test_shares_and_rows_must_name_the_same_sources(data, shares, message):
    with pytest.raises(ConfigError, match=message):
        mixture(data, **shares)


def test_another_seed_is_another_order_of_each_source():
    data = prompts(*["math", "code"] * 30)
    first, second = (mixture(data, seed, math=1.0, code=1.0).take(40) for seed in (0, 1))
    for topic in ("math", "code"):
        orders = [[i.index for i in drawn if i.source == topic] for drawn in (first, second)]
        assert orders[0] != orders[1]
        assert len(orders[0]) == len(orders[1]) == 20


def test_sources_of_one_size_are_not_in_the_same_order():
    data = prompts(*["math"] * 20, *["code"] * 20)
    drawn = mixture(data, math=1.0, code=1.0).take(40)
    orders = [[i.index % 20 for i in drawn if i.source == topic] for topic in ("math", "code")]
    assert orders[0] != orders[1]
