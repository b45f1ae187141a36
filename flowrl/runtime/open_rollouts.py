"""Makes rollout drivers: an engine, scorers and random streams for each rollout of a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from flowrl.backend.environment import EnvironmentContext
from flowrl.backend.protocols import GenerateBackend, Service
from flowrl.config.schema import RunConfig
from flowrl.data import Tokenizer
from flowrl.graph import Node
from flowrl.ids import EngineId, GroupId, RoleName, SampleId
from flowrl.rollout import Event, RolloutScheduler
from flowrl.runtime.checkpoint.unused_samples import UnusedSamples
from flowrl.runtime.driver.filters import GroupJudge
from flowrl.runtime.driver.graph_parts import RolloutPart, role_of
from flowrl.runtime.driver.payloads import PayloadStore
from flowrl.runtime.driver.rollout_driver import FailureBudget, RolloutDriver, Scorers
from flowrl.runtime.driver.sources import PromptSupply
from flowrl.runtime.environments.episodes import EpisodeEngine
from flowrl.runtime.environments.pool import EnvironmentPool
from flowrl.runtime.open_policies import OpenPolicies
from flowrl.runtime.seeds import derive_seed
from flowrl.runtime.workers import require
from flowrl.specs import Grammar, Sampling

__all__ = ["DriverMaker", "RolloutSpec", "open_environment", "sampling_of_rollout"]


def sampling_of_rollout(part: RolloutPart) -> Sampling:
    """How a rollout's tokens are drawn; of episodes, `max_tokens` is of one turn."""
    sampling = part.player.attr("sampling")
    assert isinstance(sampling, Sampling)  # lowering fills it
    return sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """One rollout to be driven.

    Attributes:
        role: The policy that draws tokens.
        episodes: The `interact` whose turns they are; None for plain responses.
        sampling: Of every request.
        grammar: What every response, or every turn, is held to.
        group_size: Samples for each prompt.
        purpose: Names the random streams of its samples.
        reported: The role whose score is told of a sample; None takes the first that scores.
        needs_states: Whether an environment must tell its states.
    """

    role: RoleName
    episodes: Node | None = None
    sampling: Sampling
    group_size: int
    purpose: str
    reported: RoleName | None = None
    needs_states: bool = False
    grammar: Grammar | None = None


class DriverMaker:
    """Makes the drivers of a run, and opens the environments that they need.

    Args:
        max_length: Tokens of the longest sample.
        failures: Rewards and episodes that may fail.
        beat: Called whenever something moved.
        stop: A true value ends a collection.
    """

    def __init__(
        self,
        config: RunConfig,
        policies: OpenPolicies,
        *,
        max_length: int,
        failures: FailureBudget,
        beat: Callable[[], None],
        stop: Callable[[], bool],
    ) -> None:
        self._config = config
        self._policies = policies
        self._max_length = max_length
        self._failures = failures
        self._beat = beat
        self._stop = stop
        self._environments: dict[tuple[RoleName, str], EnvironmentPool] = {}

    def make(
        self,
        spec: RolloutSpec,
        scheduler: RolloutScheduler,
        scorers: Mapping[RoleName, Scorers],
        judge: GroupJudge | None = None,
        *,
        kind: Callable[..., RolloutDriver] = RolloutDriver,
        supply: PromptSupply | None = None,
        engines: Mapping[EngineId, GenerateBackend] | None = None,
        unused: UnusedSamples | None = None,
        journal: Callable[[Event], None] | None = None,
    ) -> RolloutDriver:
        """A driver that goes on where its scheduler stands.

        Args:
            kind: Makes the driver.
            supply: Further prompts, where batches are refilled.
            engines: What draws; by default the policy's engine in this process.
            unused: Samples that the scheduler knows of already, where it was written before.
            journal: Is told of every event.
        """
        worker = self._policies[spec.role]
        seed, purpose = self._config.seed, spec.purpose
        tokenizer = self._policies.tokenizer(spec.role)
        store = PayloadStore()
        drawing = {worker.engine_id: worker.engine} if engines is None else dict(engines)
        if spec.episodes is not None:
            for name, engine in drawing.items():
                # Each has an environment of its own, and so has an evaluation beside them.
                owner = "" if engines is None else name
                drawing[name] = self._episodes(
                    *(spec, spec.episodes, engine, tokenizer, store), owner
                )

        def seed_of(sample: SampleId) -> int:
            return derive_seed(seed, purpose, sample)

        driver = kind(
            scheduler=scheduler,
            engines=drawing,
            scorers=scorers,
            tokenizer=tokenizer,
            sampling=spec.sampling,
            grammar=spec.grammar,
            group_size=spec.group_size,
            seed_of=seed_of,
            judge=judge,
            failures=self._failures,
            beat=self._beat,
            stop=self._stop,
            stall_timeout_s=self._config.runtime.stall_timeout_s,
            reported=spec.reported,
            store=store,
            supply=supply,
            unused=unused,
            journal=journal,
        )
        if worker.version > scheduler.version:
            driver.publish(worker.version)
        return driver

    def _episodes(
        self,
        spec: RolloutSpec,
        node: Node,
        engine: GenerateBackend,
        tokenizer: Tokenizer,
        store: PayloadStore,
        owner: str,
    ) -> EpisodeEngine:
        turns, observed = node.attr("max_turns"), node.attr("max_observation_tokens")
        assert isinstance(turns, int)
        assert isinstance(observed, int)
        seed, purpose = self._config.seed, f"{spec.purpose}/episode"

        def seed_of(group: GroupId) -> int:
            return derive_seed(seed, purpose, group)

        return EpisodeEngine(
            engine=engine,
            environments=self._environment(role_of(node), owner),
            tokenizer=tokenizer,
            item_of=lambda sample: store[sample].item,
            seed_of=seed_of,
            max_turns=turns,
            max_length=self._max_length,
            max_observation_tokens=observed,
            needs_states=spec.needs_states,
        )

    def _environment(self, role: RoleName, owner: str) -> EnvironmentPool:
        """The environment of a role for one user, opened when it is first needed."""
        if (role, owner) not in self._environments:
            self._environments[role, owner] = open_environment(self._config, role)
        return self._environments[role, owner]

    def close(self) -> None:
        """Ends every environment; idempotent."""
        with ExitStack() as stack:
            for pool in self._environments.values():
                stack.callback(pool.close)
            self._environments.clear()


def open_environment(config: RunConfig, role: RoleName) -> EnvironmentPool:
    """Opens the environment that plays a role.

    Raises:
        BackendError: its backend cannot be used, or the user's class cannot be loaded.
    """
    own = config.roles[role]
    plugin = require(own.backend, Service.ENVIRONMENT, role)
    context = EnvironmentContext(
        role=role,
        environment=own.environment or "",
        options=dict(own.options),
        seed=derive_seed(config.seed, "environment", role),
        timeout_s=own.timeout_s,
    )
    return EnvironmentPool(plugin.open_environment, context)
