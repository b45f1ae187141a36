"""Episodes that fail, are aborted or lost, and the rest of the protocol of engines."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from flowrl.backend.environment import (
    Action,
    EpisodeStart,
    Observation,
    Outcome,
)
from flowrl.backend.protocols import Finished, GenerateRequest, Progress
from flowrl.data import Tokenizer
from flowrl.errors import BackendError, WorkerDied
from flowrl.ids import NodeId, SampleId
from flowrl.runtime.driver.sharing import SharedWorkers
from flowrl.runtime.environments.episodes import EpisodeEngine
from flowrl.runtime.environments.transcript import FinishedEpisode
from flowrl.runtime.scoring.pool import FailureKind
from flowrl.specs import FinishReason, Sampling
from tests.data.tokenizer_kinds import VOCABULARY, llama_2, saved
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
    done_with,
    end_game,
    ends,
    episodes,
    failure_of,
    never_done,
    only,
)
from tests.runtime.shifted_clock import ShiftedClock


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_in(tmp_path_factory.mktemp("characters"))


# Failures


def test_what_a_step_raises_ends_its_episode_and_no_other(tokenizer: Tokenizer):
    async def step(sample: SampleId, action: Action) -> Outcome:
        if sample == "0/1/0" and action.turn == 1:
            raise KeyError("number")
        return Outcome(observation="<", reward=1.0, done=action.turn == 2)

    game = Saying(step)
    with episodes(RuleEngine(), game, tokenizer) as engine:
        engine.submit([request(1, 0), request(1, 1)])
        found = ends(engine, 2)
    broken, whole = found[SampleId("0/1/0")], found[SampleId("0/1/1")]
    assert isinstance(broken, FinishedEpisode)
    assert isinstance(whole, FinishedEpisode)
    assert broken.failure is not None
    assert broken.failure.message.startswith("raised KeyError: 'number' in turn 1 (")
    assert (broken.failure.turn, broken.failure.kind) == (1, FailureKind.RAISED)
    assert broken.terms["turns"] == 2.0  # what was said is kept, for people
    assert sum(count for _, count in broken.versions) == len(broken.tokens) > 0
    assert (whole.failure, whole.score) == (None, 3.0)
    assert game.live == set()


def test_a_step_that_hangs_ends_its_episode(tokenizer: Tokenizer):
    async def step(sample: SampleId, action: Action) -> Outcome:
        await asyncio.Event().wait()
        return Outcome()

    with episodes(RuleEngine(), Saying(step), tokenizer, timeout_s=0.05) as engine:
        engine.submit([request(1)])
        failure = failure_of(engine)
    assert failure.kind is FailureKind.TIMEOUT
    assert failure.message.startswith("took longer than 0.05 s in turn 0")


def test_episodes_whose_environment_is_lost_come_back_to_begin_anew(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    clock = ShiftedClock(monkeypatch)
    release = threading.Event()

    async def step(sample: SampleId, action: Action) -> Outcome:
        if sample == "0/1/0":
            clock.ahead_s += 21.0
            release.wait()  # blocks the environment's thread
        return Outcome(observation="<")

    with episodes(
        RuleEngine(), Saying(step), tokenizer, timeout_s=20.0, grace_s=0.0, again=[RuleGame()]
    ) as engine:
        engine.submit([request(1, 0), request(1, 1)])
        found = ends(engine, 2)
        release.set()
        broken, lost = found[SampleId("0/1/0")], found[SampleId("0/1/1")]
        assert isinstance(broken, FinishedEpisode)
        assert broken.failure is not None
        assert (lost.reason, lost.tokens.tolist(), lost.versions) == (FinishReason.ABORT, [], ())
        again = request(1, 1, attempt=1)
        engine.submit([again])
        assert_equal(only(engine), expected(again, Limits()))


@pytest.mark.parametrize(
    ("game", "message"),
    [
        (Saying(content="x"), "says what cannot be tokenised: .* [(]'x'[)]"),
        (Saying(never_done("x")), "says what cannot be tokenised"),
        (Saying(never_done(np.array([0, 24]))), "says token ids 0 to 24, of a vocabulary of 24"),
        (Saying(never_done(np.array([-1, 2]))), "says token ids -1 to 2, of a vocabulary of 24"),
        (Saying(done_with(np.array([-1]))), "says token ids -1 to -1, of a vocabulary of 24"),
        (Saying(done_with(np.array([24]))), "says token ids 24 to 24, of a vocabulary of 24"),
        (Saying(content=np.array([-1])), "says token ids -1 to -1, of a vocabulary of 24"),
        (Saying(never_done(np.array([1, STOP]))), "ends with a stop token after turn 0"),
        (Saying(content="<" * 9), "opens with 9 tokens behind a prompt of 1, of at most 8"),
    ],
)
def test_what_cannot_be_gone_on_with_is_a_failure(
    tokenizer: Tokenizer, game: RuleGame, message: str
):
    with episodes(RuleEngine(), game, tokenizer) as engine:
        engine.submit([request(1)])
        failure = failure_of(engine)
    assert failure.kind is FailureKind.INVALID
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(failure.message)


def test_what_is_said_between_turns_gets_nothing_that_begins_a_text(tmp_path):
    game = Saying(never_done("3"), content=" x")
    llama = Tokenizer.load(saved(tmp_path, llama_2()))
    with episodes(RuleEngine(), game, llama) as engine:
        engine.submit([request(1)])
        end = only(engine)
    opening, *between = end.tokens[~end.mask].tolist()
    assert opening == VOCABULARY["▁x"]
    assert set(between) == {VOCABULARY["3"]}
    assert end.text.startswith(" x")


def test_an_opening_that_leaves_no_room_is_a_failure(tokenizer: Tokenizer):
    with episodes(
        RuleEngine(), Saying(content="<>"), tokenizer, limits=Limits(max_length=3)
    ) as engine:
        engine.submit([request(1)])
        failure = failure_of(engine)
    assert failure.turn is None
    assert "leave space for a turn (max_length=3)" in failure.message


def test_silence_is_an_answer_only_where_the_turn_did_not_stop(tokenizer: Tokenizer):
    """An engine takes tokens that end with a stop token as complete: nothing would be drawn."""
    with episodes(RuleEngine(), Saying(never_done("")), tokenizer) as engine:
        engine.submit([request(1)])
        end = only(engine)
    assert end.failure is not None
    assert end.failure.message.startswith("says nothing after turn")
    *before, last = [action for _, action in end_game(engine)]
    assert last.finish is FinishReason.STOP
    assert all(action.finish is FinishReason.LENGTH for action in before)
    assert before  # there was a turn that met silence and was followed by another


def test_episodes_without_states_fail_where_states_are_needed(tokenizer: Tokenizer):
    with episodes(RuleEngine(), Saying(), tokenizer, needs_states=True) as engine:
        engine.submit([request(1)])
        assert "returned no state" in failure_of(engine).message
    with episodes(RuleEngine(), RuleGame(), tokenizer, needs_states=True) as engine:
        engine.submit([request(1)])
        assert only(engine).failure is None


def test_states_that_are_not_told_are_equal_to_none(tokenizer: Tokenizer):
    with episodes(RuleEngine(), Saying(never_done()), tokenizer) as engine:
        engine.submit([request(1, 0), request(1, 1)])
        found = [end for end in ends(engine, 2).values() if isinstance(end, FinishedEpisode)]
    told = [set(end.state[end.mask].tolist()) for end in found]
    assert [len(states) for states in told] == [end.terms["turns"] for end in found]
    assert not told[0] & told[1]
    assert all(min(states) >= 0 for states in told)


# Aborts


def polled(engine: EpisodeEngine, until: Callable[[], bool]) -> None:
    """Polls until something holds; no episode ends meanwhile."""
    while not until():
        assert not any(isinstance(output, Finished) for output in engine.poll(0.05))


def assert_aborted(engine: EpisodeEngine, one: GenerateRequest) -> None:
    end = ends(engine)[one.sample]
    assert (end.reason, end.attempt) == (FinishReason.ABORT, one.attempt)
    assert (len(end.tokens), len(end.logprobs), end.versions) == (0, 0, ())
    assert not isinstance(end, FinishedEpisode)
    again = replace(one, attempt=one.attempt + 1)
    engine.submit([again])
    assert_equal(only(engine), expected(again, Limits()))


def test_an_episode_that_is_aborted_while_it_draws_begins_anew(tokenizer: Tokenizer):
    def second_turn(index: int) -> int:
        """Its tokens; of one token, it has ended before anybody could abort it."""
        return int((expected(request(index), Limits()).turn == 1).sum())

    one = request(next(index for index in range(100) if second_turn(index) > 1))
    inner = RuleEngine()
    with episodes(inner, RuleGame(), tokenizer) as engine:
        engine.submit([one])
        polled(engine, lambda: len(inner.submitted) == 2 and one.sample in inner.requests)
        engine.abort([one.sample])
        engine.abort([one.sample, SampleId("0/9/9")])  # twice, and one that nobody knows
        assert inner.log.count(f"abort {one.sample}") == 1
        assert_aborted(engine, one)


class Waiting(RuleGame):
    """Answers nothing before it is released."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.inside = threading.Event()
        self._at = at
        self._held = True

    async def _hold(self, at: str) -> None:
        if self._held and at == self._at:
            self._held = False
            self.inside.set()
            await asyncio.Event().wait()

    async def reset(self, episode: EpisodeStart) -> Observation:
        await self._hold("reset")
        return await super().reset(episode)

    async def step(self, sample: SampleId, action: Action) -> Outcome:
        await self._hold("step")
        return await super().step(sample, action)


@pytest.mark.parametrize("at", ["reset", "step"])
def test_an_episode_that_is_aborted_in_the_environment_begins_anew(tokenizer: Tokenizer, at: str):
    game, one = Waiting(at), request(2)
    with episodes(RuleEngine(), game, tokenizer) as engine:
        engine.submit([one])
        polled(engine, game.inside.is_set)
        assert f"1 {'opening' if at == 'reset' else 'stepping'}" in engine.describe()
        assert f"sample {one.sample}" in engine.describe()
        engine.abort([one.sample])
        engine.abort([one.sample])
        assert_aborted(engine, one)
        assert engine.describe() == ""


def test_a_turn_that_ends_while_it_is_aborted_is_aborted(tokenizer: Tokenizer):
    class Late(RuleEngine):
        """Ends its requests at once, whatever is asked of it."""

        def abort(self, samples: Sequence[SampleId]) -> None:
            for sample in samples:
                self._ended.append(self._end(sample, FinishReason.STOP))

    inner, one = Late(), request(2)
    with episodes(inner, RuleGame(), tokenizer) as engine:
        engine.submit([one])
        polled(engine, lambda: one.sample in inner.requests)
        engine.abort([one.sample])
        assert ends(engine)[one.sample].reason is FinishReason.ABORT


def test_an_engine_that_aborts_by_itself_ends_the_episode_so(tokenizer: Tokenizer):
    inner, one = RuleEngine(), request(2)
    with episodes(inner, RuleGame(), tokenizer) as engine:
        engine.submit([one])
        polled(engine, lambda: one.sample in inner.requests)
        inner.abort([one.sample])
        end = ends(engine)[one.sample]
    assert (end.reason, len(end.tokens)) == (FinishReason.ABORT, 0)


@pytest.mark.parametrize("seed", range(4))
def test_random_aborts_lose_nothing_and_change_nothing(tokenizer: Tokenizer, seed: int):
    """Every attempt ends once; those that are not aborted are what they are without any abort."""
    order = random.Random(seed)
    inner = RuleEngine(slots=3, order=random.Random(seed))
    game = RuleGame(random.Random(seed))
    attempts = {request(index).sample: 0 for index in range(12)}
    whole: dict[SampleId, Finished] = {}
    aborted = 0
    with episodes(inner, game, tokenizer, patience_s=0.0) as engine:
        engine.submit([request(index) for index in range(12)])
        while len(whole) < 12:
            live = [sample for sample in attempts if sample not in whole]
            if order.random() < 0.2 and aborted < 40:
                engine.abort(order.sample(live, min(2, len(live))))
            for output in engine.poll(1.0):
                if not isinstance(output, Finished):
                    continue
                assert output.attempt == attempts[output.sample]
                if output.reason is not FinishReason.ABORT:
                    whole[output.sample] = output
                    continue
                aborted += 1
                attempts[output.sample] += 1
                index, attempt = int(output.sample.split("/")[1]), attempts[output.sample]
                engine.submit([request(index, attempt=attempt)])
    assert aborted > 3
    for index in range(12):
        one = request(index, attempt=attempts[request(index).sample])
        assert_equal(whole[one.sample], expected(one, Limits()))


# The rest of the protocol


class Dying(RuleEngine):
    """Breaks when it is polled for the third time."""

    polls = 0

    def poll(self, timeout_s: float) -> list[Progress | Finished]:
        self.polls += 1
        if self.polls == 3:
            raise WorkerDied("killed")
        return super().poll(timeout_s)

    def restart(self) -> None:
        self.abort(tuple(self.requests))
        self._ended.clear()

    def end(self) -> None: ...


def test_where_policies_share_an_engine_one_that_breaks_costs_its_own_episodes_alone(
    tokenizer: Tokenizer,
):
    shared, con, breaks = SharedWorkers(), RuleEngine(slots=8), Dying()
    views = [shared.engine(con, NodeId(f"debate[{place}]")) for place in (0, 1)]
    asked = [[request(1), request(2)], [request(3), request(4)]]
    found: dict[SampleId, Finished] = {}
    with (
        episodes(breaks, RuleGame(), tokenizer, others=views[:1]) as first,
        episodes(RuleEngine(), RuleGame(), tokenizer, others=views[1:]) as second,
    ):
        for engine, requests in zip((first, second), asked, strict=True):
            engine.submit(requests)
        while len(found) < 4 and breaks.polls < 1000:
            for engine in (first, second):
                try:
                    outputs = engine.poll(1.0)
                except WorkerDied:
                    engine.restart()
                    lost = [one for one in asked[0] if one.sample not in found]
                    engine.submit([replace(one, attempt=1) for one in lost])
                    continue
                found |= {each.sample: each for each in outputs if isinstance(each, Finished)}
    assert breaks.polls > 3
    for one in (*asked[0], *asked[1]):
        end = found[one.sample]
        assert isinstance(end, FinishedEpisode)
        assert_equal(replace(end, attempt=0), expected(one, Limits()))


def test_what_cannot_be_submitted_is_refused_and_nothing_is_taken(tokenizer: Tokenizer):
    inner = RuleEngine()
    with episodes(inner, RuleGame(), tokenizer) as engine:
        resumed = GenerateRequest(
            sample=SampleId("0/1/0"),
            attempt=1,
            prompt=np.array([1]),
            response=np.array([2]),
            sampling=Sampling(),
            seed=0,
            shares_prompt="",
        )
        with pytest.raises(BackendError, match="cannot go on from tokens"):
            engine.submit([request(2), resumed])
        with pytest.raises(BackendError, match="is under way already"):
            engine.submit([request(2), request(2)])
        assert engine.describe() == ""
        engine.submit([request(2)])
        with pytest.raises(BackendError, match="is under way already"):
            engine.submit([request(2, attempt=1)])


def test_it_sleeps_only_when_nothing_is_under_way(tokenizer: Tokenizer):
    inner = RuleEngine()
    with episodes(inner, RuleGame(), tokenizer) as engine:
        engine.submit([request(2)])
        with pytest.raises(BackendError, match="while episodes are under way"):
            engine.sleep()
        only(engine)
        engine.sleep()
        engine.wake()
    assert inner.log[-2:] == ["sleep", "wake"]


def test_closing_ends_its_episodes_and_leaves_engine_and_environment_open(tokenizer: Tokenizer):
    inner, game = RuleEngine(), RuleGame()
    one = request(2)
    with episodes(inner, game, tokenizer) as engine:
        engine.submit([one])
        polled(engine, lambda: one.sample in inner.requests)
        engine.close()
        engine.close()
        assert "close" not in inner.log
        assert inner.requests == {}
        engine.submit([request(2, attempt=1)])
        assert_equal(only(engine), expected(request(2, attempt=1), Limits()))
