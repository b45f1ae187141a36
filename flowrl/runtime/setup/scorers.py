"""The rule scorers of a run, one for each reward role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from flowrl.backend.protocols import ScoreContext
from flowrl.config.schema import RunConfig
from flowrl.graph import Graph, Op
from flowrl.graph.streaming import is_rule_score
from flowrl.ids import RoleName
from flowrl.runtime.driver.collected_batch import Scorers
from flowrl.runtime.driver.graph_parts import RolloutPart, role_of
from flowrl.runtime.executor import Executor

_VERIFIER = RoleName("verify")
"""The role that scores held-out samples where no workflow has a scoring role."""


class OpenScorers:
    """Opened once a run; `open` -> `of_rollout`, `of_evaluation` -> `close`.

    Args:
        executor: Opens them.
        workers: Processes of each role, by the plans; others have those of the configuration.
    """

    def __init__(
        self,
        config: RunConfig,
        graphs: Sequence[Graph],
        executor: Executor,
        workers: Mapping[str, int] | None = None,
    ) -> None:
        self._config = config
        self._executor = executor
        self._workers = workers or {}
        scores = [node for graph in graphs for node in graph.of_op(Op.SCORE) if is_rule_score(node)]
        self._roles = tuple(dict.fromkeys(role_of(node) for node in scores))
        self._pools: dict[RoleName, Scorers] = {}

    def open(self) -> None:
        """Opens all of them."""
        for role in self._roles:
            used = self._config.roles[role]
            self._open(role, used.backend, used.options)
        evaluates = self._config.data.eval is not None or bool(self._config.eval.sets)
        if evaluates and self._config.rewards.terms and self.observing is None:
            self._open(_VERIFIER, _VERIFIER, {})

    def _open(self, role: RoleName, backend: str, options: Mapping[str, object]) -> None:
        config = self._config.rewards
        configured, key = self._config.terms_of(role)
        terms = tuple(term.model_dump(mode="json") for term in configured)
        workers = self._workers.get(role, config.workers)
        context = ScoreContext(role=role, terms=terms, key=key, options=options)
        self._pools[role] = self._executor.open_scorers(backend, context, config, workers=workers)

    @property
    def observing(self) -> RoleName | None:
        """The last role that scores with `rewards.terms`."""
        found = [
            role
            for role in self._pools
            if role not in self._config.roles or self._config.roles[role].terms is None
        ]
        return found[-1] if found else None

    def of_rollout(self, part: RolloutPart) -> dict[RoleName, Scorers]:
        """Returns the scorers that its program names for a rollout's samples."""
        return {role_of(node): self._pools[role_of(node)] for node in part.scorers}

    def _observing(self) -> dict[RoleName, Scorers]:
        role = self.observing
        return {} if role is None else {role: self._pools[role]}

    def of_evaluation(
        self, part: RolloutPart | None, reported: RoleName | None
    ) -> dict[RoleName, Scorers]:
        """Returns the scorers of held-out samples.

        `rewards.terms` score what its program does not score by rules, episodes too.

        Args:
            part: The evaluated rollout, if there is one.
            reported: The role whose score is that of a sample, where it is known.
        """
        if part is not None and part.scorers:
            return self.of_rollout(part)
        if observing := self._observing():
            return observing
        return {reported: self._pools[reported]} if reported in self._pools else {}

    def close(self) -> None:
        """Ends every process; idempotent."""
        with ExitStack() as stack:
            for pool in self._pools.values():
                stack.callback(pool.close)
            self._pools.clear()

    @property
    def pools(self) -> Mapping[RoleName, Scorers]:
        """All that are open, by role."""
        return self._pools
