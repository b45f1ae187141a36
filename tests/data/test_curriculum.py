"""The curriculum: what is drawn, how estimates move, what an epoch is, resume."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.config.data import CurriculumConfig
from flowrl.data import PromptCursor
from flowrl.data.row_order import Curriculum
from flowrl.errors import CheckpointError
from tests.data.test_cursor import prompts


def config(**options: object) -> CurriculumConfig:
    return CurriculumConfig(kind="solve_rate", **options)


def cursor(num: int, seed: int = 0, **options: object) -> PromptCursor:
    return PromptCursor(prompts(num), seed, curriculum=config(**options))


def train(cursor: PromptCursor, rate: Callable[[int], float], steps: int, batch: int) -> Counter:
    """How often each prompt is handed out over `steps`, where `rate` is how well it does."""
    counts: Counter[int] = Counter()
    for _ in range(steps):
        items = cursor.take(batch)
        counts.update(item.index for item in items)
        for item in items:
            cursor.observe(item.index, rate(item.index))
    return counts


def test_an_estimate_is_an_exponential_average_that_begins_at_the_prior():
    c = cursor(3, prior=0.5, smoothing=0.25)
    c.observe(1, 1.0)
    assert c.solve_rate(1) == 0.625
    c.observe(1, 0.0)
    assert c.solve_rate(1) == 0.46875
    assert c.solve_rate(0) == 0.5


def test_scores_are_read_on_the_scale_of_the_config_and_cut_off_beyond_it():
    c = cursor(4, smoothing=1.0, unsolved_score=-1.0, solved_score=3.0)
    for index, score in enumerate((-2.0, 0.0, 3.0, 9.0)):
        c.observe(index, score)
    assert [c.solve_rate(index) for index in range(4)] == [0.0, 0.25, 1.0, 1.0]


def test_learnability_prefers_prompts_that_are_sometimes_solved():
    c = cursor(30, smoothing=1.0, explore=0.1)
    counts = train(c, lambda i: (0.0, 0.5, 1.0)[i % 3], steps=200, batch=6)
    drawn = [sum(counts[i] for i in range(start, 30, 3)) for start in range(3)]
    assert drawn[1] > 5 * max(drawn[0], drawn[2])
    assert min(drawn) > 0  # explored


def test_unsolved_draws_in_proportion_to_the_share_of_failures():
    c = cursor(2, smoothing=1.0, explore=0.0, prefer="unsolved")
    c.observe(0, 0.25)
    c.observe(1, 0.75)
    counts = Counter(item.index for _ in range(2000) for item in c.take(1))
    # 2000 draws with p = 0.75 have a standard deviation of 19.4.
    assert abs(counts[0] - 1500) < 100


def test_prompts_outside_the_band_are_left_to_exploration():
    c = cursor(20, smoothing=1.0, explore=0.25, prefer="unsolved", low=0.1, high=0.9)
    train(c, lambda i: i % 2 / 2, steps=10, batch=8)  # even ones are never solved
    later = train(c, lambda i: i % 2 / 2, steps=40, batch=8)
    even = sum(later[i] for i in range(0, 20, 2))
    # A quarter of the batch is explored, half of which are even ones.
    assert even == 40 * 8 // 4 // 2


def test_a_share_of_the_prompts_comes_in_the_order_of_ordinary_epochs():
    plain = [item.index for item in PromptCursor(prompts(9), 3).take(27)]
    c = Curriculum(config(explore=0.25), 9, seed=3)
    asked: list[int] = []

    def following() -> int:
        asked.append(plain[len(asked)])
        return asked[-1]

    for num in (4, 1, 1, 1, 1, 4, 8):
        c.choose(num, following)
    assert len(asked) == 5  # of 20
    assert PromptCursor(prompts(9), 3, curriculum=config(explore=1.0)).take(0) == []
    every = PromptCursor(prompts(9), 3, curriculum=config(explore=1.0)).take(9)
    assert sorted(item.index for item in every) == list(range(9))


def test_without_a_preferred_prompt_the_order_of_the_epoch_gives_all():
    c = cursor(6, smoothing=1.0, explore=0.0)
    for index in range(6):
        c.observe(index, 1.0)  # all solved: nothing has a weight
    assert sorted(item.index for item in c.take(6)) == list(range(6))


def test_no_prompt_is_drawn_twice_into_a_batch_and_no_group_comes_twice():
    c = cursor(12, explore=0.25)
    groups = []
    for _ in range(30):
        items = c.take(8)
        groups += [item.group for item in items]
        for item in items:
            c.observe(item.index, 0.5)
    assert len(set(groups)) == len(groups)
    drawn = Curriculum(config(explore=0.0), 12, seed=0).choose(12, lambda: 0)
    assert sorted(drawn) == list(range(12))


def test_the_epoch_of_an_item_counts_how_often_its_prompt_was_handed_out():
    c = cursor(5, explore=0.5)
    seen: Counter[int] = Counter()
    for item in (item for _ in range(20) for item in c.take(3)):
        assert item.epoch == seen[item.index]
        assert item.group == f"{item.epoch}/{item.index}"
        seen[item.index] += 1


@given(
    num=st.integers(1, 9),
    steps=st.lists(
        st.tuples(st.integers(0, 12), st.lists(st.floats(-1, 2), min_size=12, max_size=12)),
        max_size=6,
    ),
    cut=st.integers(0, 6),
    prefer=st.sampled_from(["learnability", "unsolved"]),
    explore=st.sampled_from([0.0, 0.25, 0.1, 1.0]),
)
def test_a_resumed_curriculum_is_the_one_that_never_stopped(num, steps, cut, prefer, explore):
    data, options = prompts(num), config(prefer=prefer, explore=explore, smoothing=0.3)

    def run(cursor: PromptCursor, steps: list[tuple[int, list[float]]]) -> list[str]:
        groups = []
        for size, scores in steps:
            items = cursor.take(size)
            groups += [item.group for item in items]
            for item, score in zip(items, scores, strict=False):
                cursor.observe(item.index, score)
        return groups

    whole = PromptCursor(data, 1, curriculum=options)
    expected = run(whole, steps)
    first = PromptCursor(data, 1, curriculum=options)
    got = run(first, steps[:cut])
    text = json.dumps(first.to_json())
    second = PromptCursor.from_json(json.loads(text), data, options)
    assert json.dumps(second.to_json()) == text
    got += run(second, steps[cut:])
    assert got == expected
    assert second.to_json() == whole.to_json()
    assert len(set(got)) == len(got)


def test_observations_change_nothing_without_a_curriculum():
    c = PromptCursor(prompts(4), 0)
    before = c.to_json()
    c.observe(2, 1.0)
    assert c.to_json() == before
    assert c.solve_rate(2) is None


def test_what_is_no_number_is_no_observation():
    with pytest.raises(ValueError, match="prompt 1 has the mean score nan"):
        cursor(2).observe(1, float("nan"))


@pytest.mark.parametrize("written", [None, config()])
def test_a_curriculum_is_neither_taken_up_nor_left_in_the_middle_of_a_run(written):
    state = PromptCursor(prompts(3), 0, curriculum=written).to_json()
    other = None if written else config()
    with pytest.raises(CheckpointError, match=r"data\.curriculum: the order of prompts is another"):
        PromptCursor.from_json(state, prompts(3), other)


@pytest.mark.parametrize(
    "broken", [{}, {"taken": 1, "places": [9], "visits": [1], "rates": [0.5]}, {"taken": "x"}]
)
def test_a_broken_curriculum_is_a_checkpoint_error(broken):
    state = cursor(3).to_json() | {"curriculum": broken}
    with pytest.raises(CheckpointError, match=r"cursor\.curriculum: .*broken"):
        PromptCursor.from_json(state, prompts(3), config())


def test_changed_data_is_told_before_a_curriculum_that_does_not_fit_it():
    state = cursor(5).to_json()
    with pytest.raises(CheckpointError, match="the training data changed"):
        PromptCursor.from_json(state, prompts(4), config())


def test_draws_never_change_between_versions_of_anything():
    c = Curriculum(config(explore=0.25), 20, seed=0)
    places = iter(range(20))
    assert c.choose(8, lambda: next(places)) == DRAWN


DRAWN = [0, 11, 1, 12, 2, 3, 8, 16]


def test_another_seed_is_another_order_within_a_batch_and_another_draw():
    def order(seed: int) -> list[int]:
        return Curriculum(config(explore=1.0), 30, seed).choose(30, iter(range(30)).__next__)

    def draw(seed: int) -> list[int]:
        known = Curriculum(config(explore=0.0), 30, seed)
        for index in range(30):
            known.observe(index, 0.5)
        return known.choose(10, lambda: 0)

    assert order(0) == order(0) != order(1)
    assert draw(0) == draw(0) != draw(1)
    assert set(draw(0)) != set(draw(1))
