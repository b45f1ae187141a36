"""Episodes of a real model: what was drawn is what the trainer sees, token by token."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from flowrl.backend.environment import (
    Action,
    Environment,
    EnvironmentContext,
    EpisodeStart,
    Observation,
    Outcome,
)
from flowrl.backend.protocols import GenerateBackend, TrainBackend
from flowrl.config.roles import CharTokenizer, FreshModel, RoleConfig
from flowrl.data import PromptItem, Tokenizer
from flowrl.data.model_folder import prepare_model_folder
from flowrl.ids import EngineId, RoleName, SampleId
from flowrl.rollout.scheduler import RolloutScheduler
from flowrl.rollout.settings import SchedulerSettings
from flowrl.runtime.driver.collected_batch import FailureBudget
from flowrl.runtime.driver.payloads import Payload, PayloadStore, behaviour_logprobs, sequence_batch
from flowrl.runtime.driver.rollout_driver import RolloutDriver
from flowrl.runtime.environments.episodes import EpisodeEngine
from flowrl.runtime.environments.pool import EnvironmentPool
from flowrl.runtime.setup.policies import derive_seed
from flowrl.specs import AdamW, Sampling
from flowrl_backends.environment import plugin as environments
from flowrl_backends.torch import plugin as torch_plugin
from tests.policy_contexts import policy_context
from tests.runtime.episode_worlds import ALPHABET, item

TEMPERATURE = 1.5
"""An untrained model of this size is nearly sure of its tokens without."""


class Shuffled:
    """An environment that answers in an order of its own."""

    def __init__(self, inner: Environment, seed: int) -> None:
        self._inner = inner
        self._order = random.Random(seed)

    async def _dawdle(self) -> None:
        for _ in range(self._order.randint(0, 30)):
            await asyncio.sleep(0)

    async def reset(self, episode: EpisodeStart) -> Observation:
        await self._dawdle()
        return await self._inner.reset(episode)

    async def step(self, sample: SampleId, action: Action) -> Outcome:
        await self._dawdle()
        return await self._inner.step(sample, action)

    async def close_episode(self, sample: SampleId) -> None:
        await self._inner.close_episode(sample)

    async def close(self) -> None:
        await self._inner.close()


@dataclass(frozen=True)
class Model:
    trainer: TrainBackend
    engine: GenerateBackend
    tokenizer: Tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    role = RoleConfig(
        model=FreshModel(
            hidden_size=32, num_heads=4, intermediate_size=64, max_length=48, initializer_range=0.2
        ),
        tokenizer=CharTokenizer(kind="char", alphabet=ALPHABET),
    )
    folder = prepare_model_folder(role, tmp_path_factory.mktemp("model") / "actor", ())
    tokenizer = Tokenizer.load(folder)
    context = policy_context(
        folder,
        seed=11,
        num_slots=5,
        max_length=48,
        trainable=True,
        stop_token_ids=tokenizer.stop_ids,
    )
    trainer = torch_plugin.open_train(context)
    trainer.begin(AdamW(learning_rate=1e-3), num_updates=4)
    engine = torch_plugin.open_generate(context, trainer)
    yield Model(trainer=trainer, engine=engine, tokenizer=tokenizer)
    engine.close()
    trainer.close()


def rolled_out(
    model: Model,
    opening: Callable[[EnvironmentContext], Environment],
    *,
    environment: str,
    max_tokens: int,
    prompts: int = 8,
) -> list[tuple[SampleId, Payload]]:
    """Two episodes a prompt, through scheduler and driver; more of them than the engine holds."""
    store = PayloadStore()
    context = EnvironmentContext(role=RoleName("game"), environment=environment, timeout_s=60.0)
    with EnvironmentPool(opening, context) as pool:
        engine = EpisodeEngine(
            engines=[model.engine],
            environments=pool,
            tokenizer=model.tokenizer,
            item_of=lambda sample: store[sample].item,
            seed_of=lambda group: derive_seed(0, "game", group),
            max_turns=4,
            max_length=48,
            max_observation_tokens=8,
            patience_s=0.0,
        )
        driver = RolloutDriver(
            scheduler=RolloutScheduler(SchedulerSettings(group_size=2), validate=True),
            engines={EngineId("actor[0]"): engine},
            scorers={},
            tokenizer=model.tokenizer,
            sampling=Sampling(max_tokens=max_tokens, temperature=TEMPERATURE),
            group_size=2,
            seed_of=lambda sample: derive_seed(0, sample),
            judge=None,
            failures=FailureBudget(0),
            beat=lambda: None,
            stop=lambda: False,
            stall_timeout_s=60.0,
            reported=None,
            store=store,
        )
        items: list[PromptItem] = [item(index) for index in range(prompts)]
        driver.offer(items)
        collected = driver.collect(0, prompts)
        engine.close()
    assert collected.dropped == []
    return [member for _, members in collected.groups for member in members]


@pytest.fixture(scope="module")
def guess(model: Model) -> str:
    return f"{Path(__file__).parents[2] / 'examples' / 'guess.py'}:Guess"


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_the_trainer_sees_what_was_drawn(model: Model, guess: str, max_tokens: int):
    rows = rolled_out(
        model, environments.open_environment, environment=guess, max_tokens=max_tokens
    )
    batch = sequence_batch(rows, [payload.item.group for _, payload in rows])
    mask = batch.response_mask
    assert batch.turn is not None
    assert (batch.turn >= 0).tolist() == mask.tolist()
    behaviour = behaviour_logprobs(batch, rows)
    trained = model.trainer.logprobs(batch, TEMPERATURE)
    np.testing.assert_allclose(trained, behaviour, atol=2e-5)
    assert (behaviour[mask] < 0).all()
    assert (behaviour[~mask] == 0).all()


def test_tokens_turns_and_rewards_are_those_of_the_game(model: Model, guess: str):
    rows = rolled_out(model, environments.open_environment, environment=guess, max_tokens=1)
    turns = []
    for sample, payload in rows:
        assert payload.turn is not None
        assert payload.mask is not None
        assert payload.token_reward is not None
        hidden = payload.item.row.fields["number"]
        said, replies, rewards = "", "", []
        for token in payload.tokens[payload.mask]:
            text = model.tokenizer.decode([token])
            number = ALPHABET[:16].find(text) if text else -1
            if number < 0:
                replies += "?"
            else:
                replies += "=" if number == hidden else "<" if hidden < number else ">"
            said += text + replies[-1]
            rewards.append({"=": 1.0, "?": -0.1}.get(replies[-1], 0.0))
        assert payload.text + payload.last_words == said, sample
        # The last reply is for people alone.
        heard = model.tokenizer.decode(payload.tokens[~payload.mask])
        assert heard == replies[:-1]
        np.testing.assert_allclose(
            payload.token_reward[payload.mask], np.array(rewards, np.float32)
        )
        assert payload.score == payload.scores[RoleName("game")] == pytest.approx(sum(rewards))
        turns.append(payload.terms["turns"])
    assert max(turns) == 4
    assert min(turns) < 4  # some number was found early


def test_the_order_of_answers_changes_nothing(model: Model, guess: str):
    def shuffled(seed: int) -> Callable[[EnvironmentContext], Environment]:
        return lambda context: Shuffled(environments.open_environment(context), seed)

    one, *others = (
        rolled_out(model, shuffled(seed), environment=guess, max_tokens=2) for seed in range(3)
    )
    for other in others:
        assert [sample for sample, _ in other] == [sample for sample, _ in one]
        for (_, left), (_, right) in zip(one, other, strict=True):
            assert left.tokens.tolist() == right.tokens.tolist()
            assert left.text == right.text
            assert left.score == right.score
            np.testing.assert_allclose(left.logprobs, right.logprobs, atol=1e-5)
