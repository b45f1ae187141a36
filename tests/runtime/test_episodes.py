"""Episodes as samples: exact tokens and masks, in any order, and how they end."""

from __future__ import annotations

import random

import numpy as np
import pytest

from flowrl.backend.environment import (
    Action,
    Outcome,
)
from flowrl.backend.protocols import GenerateBackend, Progress
from flowrl.data import Tokenizer
from flowrl.ids import SampleId
from flowrl.runtime.environments.transcript import FinishedEpisode
from flowrl.runtime.setup.policies import derive_seed
from flowrl.specs import FinishReason, Sampling
from tests.policy_contexts import weights_of
from tests.runtime.episode_worlds import (
    STOP,
    Limits,
    RuleEngine,
    RuleGame,
    assert_equal,
    expected,
    request,
    tokenizer_in,
)
from tests.runtime.played_episodes import (
    Saying,
    end_game,
    ends,
    episodes,
    never_done,
    only,
    tokens_of,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_in(tmp_path_factory.mktemp("characters"))


# Exactness


def test_it_is_a_generate_backend(tokenizer: Tokenizer):
    with episodes(RuleEngine(slots=3), RuleGame(), tokenizer) as engine:
        assert isinstance(engine, GenerateBackend)
        assert engine.num_slots == 3


@pytest.mark.parametrize("patience_s", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(6))
def test_episodes_are_exactly_what_the_rules_say_in_any_order(
    tokenizer: Tokenizer, seed: int, patience_s: float
):
    """More episodes than slots; engine and environment go on in the order that the seed gives."""
    order = random.Random(seed)
    limits = Limits(max_turns=5, max_length=20)
    requests = [request(index, member) for index in range(10) for member in range(2)]
    order.shuffle(requests)
    inner = RuleEngine(slots=3, order=random.Random(seed))
    game = RuleGame(random.Random(seed + 100))
    with episodes(inner, game, tokenizer, limits=limits, patience_s=patience_s) as engine:
        engine.submit(requests)
        found = ends(engine, len(requests))
    for one in requests:
        assert_equal(found[one.sample], expected(one, limits))
    assert game.live == set()


def test_the_episodes_of_these_tests_end_in_every_way_and_have_turns_of_every_kind():
    limits = Limits(max_turns=5, max_length=20)
    all_of_them = [
        expected(request(index, member), limits) for index in range(10) for member in range(2)
    ]
    turns = [episode.terms["turns"] for episode in all_of_them]
    lengths = [len(episode.tokens) for episode in all_of_them]
    assert {episode.reason for episode in all_of_them} == {FinishReason.STOP, FinishReason.LENGTH}
    assert min(turns) == 1
    assert max(turns) == 5
    assert any(length > 14 and turn < 5 for length, turn in zip(lengths, turns, strict=True))
    assert {episode.turn[0] for episode in all_of_them} == {-1, 0}
    assert any((np.diff(np.flatnonzero(episode.mask)) > 1).any() for episode in all_of_them)


def test_every_turn_goes_on_from_all_tokens_so_far(tokenizer: Tokenizer):
    inner = RuleEngine()
    one = request(2, 1, sampling=Sampling(max_tokens=3, temperature=0.5))
    with episodes(inner, RuleGame(), tokenizer) as engine:
        engine.submit([one])
        end = only(engine)
    first = inner.submitted[0]
    head = len(first.prompt) - 1
    assert first.prompt.tolist() == [*one.prompt, *end.tokens[:head]]
    assert not end.mask[:head].any()
    begins = np.flatnonzero(np.diff(end.turn, prepend=-1) > 0)
    assert len(begins) == len(inner.submitted) >= 2
    for turn, begin in zip(inner.submitted, begins, strict=True):
        assert turn.response.tolist() == end.tokens[head:begin].tolist()
        assert turn.sampling.max_tokens == len(turn.response) + 3
        assert (turn.seed, turn.sampling.temperature) == (one.seed, 0.5)
        assert turn.shares_prompt == "0/2"
    assert len({turn.attempt for turn in inner.submitted}) == len(inner.submitted)


def test_min_tokens_are_of_each_turn(tokenizer: Tokenizer):
    inner = RuleEngine()
    sampling = Sampling(max_tokens=4, min_tokens=2)
    with episodes(inner, RuleGame(), tokenizer) as engine:
        engine.submit([request(2, sampling=sampling)])
        only(engine)
    for turn in inner.submitted:
        assert turn.sampling.min_tokens == len(turn.response) + 2


def test_the_environment_gets_the_row_the_text_and_the_tokens_of_each_turn(tokenizer: Tokenizer):
    game = RuleGame()
    one = request(5)
    with episodes(RuleEngine(), game, tokenizer) as engine:
        engine.submit([one])
        end = only(engine)
    start = game.starts[one.sample]
    assert (start.prompt, start.answer, start.row["index"]) == ("#", "answer 5", 5)
    assert start.seed == derive_seed(7, "0/5")
    for number, (_, action) in enumerate(game.actions):
        drawn = end.tokens[end.turn == number]
        assert action.tokens.tolist() == drawn.tolist()
        assert action.turn == number
        stopped = drawn[-1] == STOP
        assert action.finish is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert tokens_of(action.text) == drawn[: len(drawn) - stopped].tolist()


def test_the_episodes_of_a_group_have_one_seed_and_other_groups_another(tokenizer: Tokenizer):
    game = RuleGame()
    with episodes(RuleEngine(), game, tokenizer) as engine:
        engine.submit([request(1, 0), request(1, 1), request(2, 0)])
        ends(engine, 3)
    seeds = {sample: start.seed for sample, start in game.starts.items()}
    assert seeds[SampleId("0/1/0")] == seeds[SampleId("0/1/1")] != seeds[SampleId("0/2/0")]


def test_progress_counts_all_tokens_behind_the_prompt(tokenizer: Tokenizer):
    one = request(2, attempt=4)
    seen = []
    with episodes(RuleEngine(), RuleGame(), tokenizer) as engine:
        engine.submit([one])
        end = None
        while end is None:
            for output in engine.poll(1.0):
                if isinstance(output, Progress):
                    seen.append(output.num_tokens)
                    assert (output.sample, output.attempt) == (one.sample, 4)
                else:
                    end = output
    assert seen == sorted(seen)
    assert 0 < seen[-1] <= len(end.tokens)


def test_weights_that_are_published_in_the_middle_are_told_for_every_token(tokenizer: Tokenizer):
    inner = RuleEngine()
    with episodes(inner, RuleGame(), tokenizer) as engine:
        engine.submit([request(2)])
        end, version = None, 0
        while end is None:
            outputs = engine.poll(1.0)
            version += 1
            engine.load(weights_of(version))
            end = next((o for o in outputs if isinstance(o, FinishedEpisode)), None)
    assert sum(count for _, count in end.versions) == len(end.tokens)
    versions = np.repeat(*np.array(end.versions).T)
    assert (np.diff(versions) >= 0).all()
    assert len(set(versions.tolist())) > 2
    # An observation counts to the turn before it, the opening to the turn behind it.
    places = np.flatnonzero(~end.mask)
    drawn = np.flatnonzero(end.mask)
    for place in places:
        before = drawn[drawn < place]
        neighbour = before[-1] if len(before) else drawn[0]
        assert versions[place] == versions[neighbour]


# Ends


def test_the_last_observation_is_for_people_and_neither_tokens_nor_text(tokenizer: Tokenizer):
    async def step(sample: SampleId, action: Action) -> Outcome:
        return Outcome(observation="=", reward=2.0, done=True)

    with episodes(RuleEngine(), Saying(step, "<"), tokenizer) as engine:
        engine.submit([request(1)])
        end = only(engine)
    (text,) = [action.text for _, action in end_game(engine)]
    assert (end.text, end.last_words) == (f"<{text}", "=")
    assert end.tokens[-1] == end.tokens[end.mask][-1]
    assert end.token_reward.tolist() == [0.0] * (len(end.tokens) - 1) + [2.0]


def test_an_episode_ends_with_length_after_its_last_turn(tokenizer: Tokenizer):
    with episodes(
        RuleEngine(), Saying(never_done()), tokenizer, limits=Limits(max_turns=3)
    ) as engine:
        engine.submit([request(1)])
        end = only(engine)
    assert end.reason is FinishReason.LENGTH
    assert end.terms == {"turns": 3.0}  # it had all its turns, and was not cut
    assert end.score == 0.75
    assert end.turn.max() == 2


def test_an_episode_ends_with_length_where_no_token_has_room(tokenizer: Tokenizer):
    with episodes(
        RuleEngine(),
        Saying(never_done("<>")),
        tokenizer,
        limits=Limits(max_turns=99, max_length=12),
    ) as engine:
        engine.submit([request(1)])
        end = only(engine)
    assert end.reason is FinishReason.LENGTH
    assert end.terms["cut_length"] == 1.0
    assert "cut_observation" not in end.terms
    assert 1 + len(end.tokens) <= 12 < 1 + len(end.tokens) + 2 + 1
    assert end.mask[-1]  # what nobody would have answered is left out


def test_a_long_observation_ends_the_episode(tokenizer: Tokenizer):
    limits = Limits(max_observation_tokens=3)
    with episodes(RuleEngine(), Saying(never_done("<<<<")), tokenizer, limits=limits) as engine:
        engine.submit([request(1)])
        end = only(engine)
    assert (end.reason, end.failure) == (FinishReason.LENGTH, None)
    assert end.terms == {"turns": 1.0, "cut_observation": 1.0}
    assert end.score == 0.25


def test_token_ids_are_taken_as_they_are(tokenizer: Tokenizer):
    ids = np.array([3, STOP, 5], np.int32)
    with episodes(
        RuleEngine(), Saying(never_done(ids)), tokenizer, limits=Limits(max_turns=2)
    ) as engine:
        engine.submit([request(1)])
        end = only(engine)
    assert end.tokens[~end.mask].tolist() == [3, STOP, 5]
    assert end.tokens.dtype == np.int64
