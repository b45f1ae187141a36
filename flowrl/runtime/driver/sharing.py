"""Engines and scorers that several rollouts use at the same time: each sees its own samples.

Rollouts of one tree go on together, and may be of one policy or be scored by one reward. Sample ids
are unique within a rollout, so a view adds the rollout's name to them on the way in, and takes it
away on the way out.

When an engine breaks, every view of it breaks, since it has lost the samples of all; the first view
that restarts it restarts it for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from flowrl.backend.protocols import (
    Finished,
    GenerateBackend,
    GenerateRequest,
    Loaded,
    Progress,
    ScoreRequest,
    ScoreResult,
    Weights,
)
from flowrl.errors import WorkerDied
from flowrl.ids import NodeId, SampleId
from flowrl.runtime.driver.collected_batch import Scorers
from flowrl.runtime.local.engine_restarts import Monitored, Restartable
from flowrl.runtime.scoring.pool import ScoreFailure
from flowrl.runtime.workers import Waitable

_MARK = ":"

_Named = TypeVar("_Named", GenerateRequest, ScoreRequest)
_Output = TypeVar("_Output", bound=Progress | Finished | ScoreResult | ScoreFailure)


class SharedWorkers:
    """Makes the views of a stage."""

    def __init__(self) -> None:
        self._engines: dict[int, _SharedEngine] = {}
        self._scorers: dict[int, _SharedScorers] = {}

    def engine(self, engine: GenerateBackend, rollout: NodeId) -> GenerateBackend:
        """Returns the engine as a rollout sees it."""
        shared = self._engines.setdefault(id(engine), _SharedEngine(engine))
        return shared.view(rollout)

    def scorers(self, scorers: Scorers, rollout: NodeId) -> Scorers:
        """Returns scorers as a rollout sees them."""
        shared = self._scorers.setdefault(id(scorers), _SharedScorers(scorers))
        return shared.view(rollout)


def _named(request: _Named, rollout: NodeId) -> _Named:
    return replace(request, sample=_name(rollout, request.sample))


def _name(rollout: NodeId, sample: SampleId) -> SampleId:
    return SampleId(f"{rollout}{_MARK}{sample}")


def _owner(output: _Output) -> tuple[NodeId, _Output]:
    """Returns the rollout of an output, and the output with the sample's own id."""
    rollout, _, sample = output.sample.rpartition(_MARK)
    return NodeId(rollout), replace(output, sample=SampleId(sample))


class _SharedEngine:
    """An engine with the outputs that each view has not taken.

    Attributes:
        is_broken: It failed, and no view has restarted it yet.
    """

    def __init__(self, engine: GenerateBackend) -> None:
        self.engine = engine
        self.is_broken = False
        self._views: dict[NodeId, _EngineView] = {}

    def view(self, rollout: NodeId) -> _EngineView:
        kind = _ProcessView if isinstance(self.engine, Waitable) else _EngineView
        view = self._views[rollout] = kind(self, rollout)
        return view

    def poll(self, timeout_s: float) -> None:
        for output in self.engine.poll(timeout_s):
            if isinstance(output, Loaded):
                continue
            rollout, own = _owner(output)
            self._views[rollout].outputs.append(own)

    def fail(self, error: Exception) -> None:
        self.is_broken = True
        for view in self._views.values():
            view.lost = error

    def restart(self) -> None:
        if self.is_broken:
            assert isinstance(self.engine, Restartable)
            self.engine.restart()
            self.is_broken = False

    def end(self) -> None:
        if self.is_broken and isinstance(self.engine, Restartable):
            self.engine.end()


class _EngineView:
    """A `GenerateBackend`, and `Restartable`."""

    def __init__(self, shared: _SharedEngine, rollout: NodeId) -> None:
        self._shared = shared
        self._rollout = rollout
        self.outputs: list[Progress | Finished] = []
        self.lost: Exception | None = None

    @property
    def num_slots(self) -> int:
        return self._shared.engine.num_slots

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        self._require_alive()
        named = [
            replace(_named(request, self._rollout), shares_prompt=self._own(request.shares_prompt))
            for request in requests
        ]
        try:
            self._shared.engine.submit(named)
        except Exception as error:
            self._shared.fail(error)
            raise

    def abort(self, samples: Sequence[SampleId]) -> None:
        self._require_alive()
        self._shared.engine.abort([_name(self._rollout, sample) for sample in samples])

    def poll(self, timeout_s: float) -> list[Progress | Finished]:
        self._require_alive()
        if not self.outputs:
            try:
                self._shared.poll(timeout_s)
            except Exception as error:
                self._shared.fail(error)
                raise
        outputs, self.outputs = self.outputs, []
        return outputs

    def restart(self) -> None:
        self.outputs.clear()
        self._shared.restart()
        self.lost = None

    def end(self) -> None:
        self._shared.end()

    def load(self, weights: Weights) -> None:
        self._shared.engine.load(weights)

    def sleep(self) -> None:
        self._shared.engine.sleep()

    def wake(self) -> None:
        self._shared.engine.wake()

    def close(self) -> None:
        self._shared.engine.close()

    def _own(self, group: str) -> str:
        return f"{self._rollout}{_MARK}{group}"

    def _require_alive(self) -> None:
        if self.lost is not None:
            raise WorkerDied(
                "the engine broke under another rollout that uses it too", found=str(self.lost)
            )


class _ProcessView(_EngineView):
    """A view of an engine in a process of its own."""

    def fileno(self) -> int:
        assert isinstance(self._shared.engine, Waitable)
        return self._shared.engine.fileno()

    def seconds_to_limit(self) -> float:
        assert isinstance(self._shared.engine, Waitable)
        return 0.0 if self.outputs else self._shared.engine.seconds_to_limit()

    def silent_s(self) -> float:
        assert isinstance(self._shared.engine, Monitored)
        return self._shared.engine.silent_s()


class _SharedScorers:
    """Scorers with the answers that each view has not taken."""

    def __init__(self, scorers: Scorers) -> None:
        self.scorers = scorers
        self._views: dict[NodeId, _ScorersView] = {}

    def view(self, rollout: NodeId) -> _ScorersView:
        kind = _PoolView if isinstance(self.scorers, Waitable) else _ScorersView
        view = self._views[rollout] = kind(self, rollout)
        return view

    def poll(self) -> None:
        for answer in self.scorers.poll():
            rollout, own = _owner(answer)
            self._views[rollout].answers.append(own)


class _ScorersView:
    """See `Scorers`; closing it does nothing, since others use the scorers too."""

    def __init__(self, shared: _SharedScorers, rollout: NodeId) -> None:
        self._shared = shared
        self._rollout = rollout
        self.answers: list[ScoreResult | ScoreFailure] = []

    def submit(self, requests: Sequence[ScoreRequest]) -> None:
        self._shared.scorers.submit([_named(request, self._rollout) for request in requests])

    def poll(self) -> list[ScoreResult | ScoreFailure]:
        self._shared.poll()
        answers, self.answers = self.answers, []
        return answers

    def wait(self, timeout_s: float) -> bool:
        return bool(self.answers) or self._shared.scorers.wait(timeout_s)

    def close(self) -> None:
        pass


class _PoolView(_ScorersView):
    """A view of scorers in processes of their own."""

    def fileno(self) -> int:
        assert isinstance(self._shared.scorers, Waitable)
        return self._shared.scorers.fileno()

    def seconds_to_limit(self) -> float:
        assert isinstance(self._shared.scorers, Waitable)
        return 0.0 if self.answers else self._shared.scorers.seconds_to_limit()
