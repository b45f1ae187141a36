"""A stage whose steps call the user's function again and carry out its lines one by one.

`EagerTracer` records the program's operations and carries each one out. Every operation must be the
one that the program was compiled with: weights, plan and results are those of the compiled graph. A
program that takes another way is stopped at its line.
"""

from __future__ import annotations

import time
from bdb import BdbQuit
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from flowrl.compiler import CompiledStage
from flowrl.errors import FlowError, TraceError
from flowrl.graph import Edge, Field, Graph, Node
from flowrl.ids import NodeId
from flowrl.observe.rows import SampleRow, StepMetrics
from flowrl.program.tracer import Tracer
from flowrl.runtime.driver.payloads import StepBatch
from flowrl.runtime.driver.stage import Stage, StageResources
from flowrl.runtime.driver.step_report import StepResult
from flowrl.runtime.eager.rollout import EagerRollout, TwoPhaseDriver, VisibleResults
from flowrl.runtime.eager.step import EagerStep, node_mapping_of

_HINT = (
    "let no operation hang on what changes between calls (random numbers, the clock, .value); "
    "decide on data with fl.filter, fl.select or fl.map"
)


class EagerTracer(Tracer):
    """See the module. Handles keep their values when the step is over.

    Args:
        traced: The graph that the program was compiled to.
        step: Carries operations out.
    """

    executes: ClassVar[bool] = True

    def __init__(self, traced: Graph, step: EagerStep) -> None:
        super().__init__(traced.name)
        self._expected = traced
        self._step = step
        self._num_called = 0

    def completed(self, nodes: tuple[Node, ...]) -> None:
        """Carries an operation out.

        Raises:
            TraceError: it is not the one that the compiled program has here.
        """
        for node in nodes:
            self._check(node)
        for node in nodes:
            self._step.run(node.id)

    def ended(self) -> None:
        """Checks the end of the function.

        Raises:
            TraceError: the compiled program goes on.
        """
        left = self._expected.nodes[self._num_called :]
        if left:
            last = self._expected.nodes[self._num_called - 1]
            raise _deviation(last, "the end of the program", f"{left[0].id} ({left[0].source})")

    def value_of(self, node_id: NodeId, fields: tuple[Field, ...]) -> object:
        return self._step.value(node_id, fields)

    def described_values(self, node_id: NodeId, fields: tuple[Field, ...]) -> str | None:
        return self._step.text_of_value(node_id, fields)

    def _check(self, node: Node) -> None:
        if self._num_called == len(self._expected.nodes):
            raise _deviation(node, node.id, "the end of the program")
        expected = self._expected.nodes[self._num_called]
        at = f" ({expected.source})" if expected.source is not None else ""
        if (node.id, node.op, node.role) != (expected.id, expected.op, expected.role):
            raise _deviation(node, node.id, f"{expected.id}{at}")
        actual, compiled = (
            _attributes(node, self.edges_into(node.id)),
            self._expected_attributes(expected),
        )
        if actual != compiled:
            changed = [k for k in (*actual, *compiled) if actual.get(k) != compiled.get(k)]
            keys = dict.fromkeys(changed)
            found, wanted = (
                ", ".join(f"{key}={values.get(key, 'nothing')}" for key in keys)
                for values in (actual, compiled)
            )
            raise _deviation(node, f"{node.id} with {found}", f"{wanted}{at}")
        self._num_called += 1

    def _expected_attributes(self, expected: Node) -> dict[str, str]:
        return _attributes(expected, self._expected.in_edges(expected.id))


def _attributes(node: Node, edges: Sequence[Edge]) -> dict[str, str]:
    """Returns the inputs, attributes and outputs of a node, by name."""
    reads = {edge.argument: f"{edge.src}{{{','.join(edge.fields)}}}" for edge in edges}
    outputs = ",".join(map(str, node.outputs))
    return {**reads, **{key: repr(value) for key, value in node.attrs}, "outputs": outputs}


def _deviation(node: Node, found: str, expected: str) -> TraceError:
    return TraceError(
        "the program goes another way than it was compiled with",
        where=str(node.source) if node.source is not None else None,
        found=found,
        expected=expected,
        hint=_HINT,
    )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class EagerStepResult:
    """A step that was made line by line.

    >>> made = session.step()   # doctest: +SKIP
    >>> made["verifier.score"].mean(), made.metrics.loss   # doctest: +SKIP

    Attributes:
        metrics: Its row of metrics.jsonl.
        samples: Its rows of samples.jsonl.
        returned: The return value of the user's function; handles in it keep their values.
    """

    metrics: StepMetrics
    samples: Sequence[SampleRow]
    returned: object
    line: EagerStep

    def __repr__(self) -> str:
        numbers_by_name = {"reward": self.metrics.reward_mean, "loss": self.metrics.loss}
        numbers = ", ".join(
            f"{name} {x:.4g}" for name, x in numbers_by_name.items() if x is not None
        )
        at = f"{self.metrics.stage} {self.metrics.step}"
        return f"<EagerStepResult {at}: {numbers or 'no update'}; {', '.join(self.nodes)}>"

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """Names that can be asked for: the nodes of the lowered graph, in order."""
        return self.line.nodes

    def __getitem__(self, node: str) -> object:
        """Returns the value of a node of the lowered graph: `made["actor.generate"]`.

        Of an update, what its optimizer reported of each mini-batch; of a log, the number.

        Raises:
            KeyError: no such node.
            TraceError: a pass left it out.
        """
        found = self.line.node(node)
        return self.line.value(found.id, found.outputs)


class EagerStage(Stage):
    """See the module. Everything else is as in a compiled stage.

    Args:
        stage: The compiled stage; its workflow is called with its arguments.
        visible: Holds rollouts until the hand-over; the judges of `rollouts` read it.
        stop: A true value ends a step that has changed no weights.

    Attributes:
        made: The last step.
    """

    def __init__(
        self,
        resources: StageResources,
        *,
        stage: CompiledStage,
        visible: VisibleResults,
        stop: Callable[[], bool],
    ) -> None:
        super().__init__(resources)
        self._stage = stage
        self._node_mapping = node_mapping_of(stage)
        self._visible = visible
        self._stop = stop
        self.made: EagerStepResult | None = None

    def step(self, number: int) -> StepResult:
        """Makes step `number`.

        Raises:
            TraceError: the program goes another way than it was compiled with, or raises.
        """
        started = time.monotonic()
        failed = self._failures.failed
        batch, items = StepBatch(number=number), self._take(self._sources)
        self._give_rows(batch, items)
        self._visible.begin(number)
        budget = replace(self._failures)
        rollouts: dict[NodeId, EagerRollout] = {}
        for tree in self._trees:
            tree.begin()
            for rollout in tree.rollouts:
                root, parent = tree.root.part, rollout.part.parent
                rollouts[rollout.node] = EagerRollout(
                    rollout=rollout,
                    tree=tree,
                    parent=None if parent is None else rollouts[parent],
                    program=self._program,
                    visible=self._visible,
                    number=number,
                    budget=budget,
                    items=items[root.source] if parent is None else (),
                )
        line = EagerStep(
            program=self._program,
            traced=self._stage.traced,
            node_mapping=self._node_mapping,
            rollouts=[rollouts[rollout.node] for rollout in self._rollouts],
            visible=self._visible,
            batch=batch,
            items=items,
            stop=self._stop,
        )
        try:
            returned = self._perform(EagerTracer(self._stage.traced, line))
            generated = line.finish()
        except BaseException:
            # The step is given up. When it is repeated, its rewards fail again.
            self._failures.failed = failed
            self.has_learned = line.has_learned
            raise
        result = self._end(batch, generated, started)
        self.made = EagerStepResult(
            metrics=result.metrics, samples=result.samples, returned=returned, line=line
        )
        return result

    def abandon(self) -> None:
        """Empties the engines of a step that was given up; this stage makes no other."""
        for rollout in self._rollouts:
            assert isinstance(rollout.driver, TwoPhaseDriver)
            rollout.driver.abandon()

    def _perform(self, tracer: EagerTracer) -> object:
        workflow = self._stage.workflow
        try:
            returned = workflow.perform(tracer, self._stage.config.args)
            tracer.ended()
        except Exception as error:
            if _left_the_debugger(error):
                raise KeyboardInterrupt("the debugger was left") from None
            if isinstance(error, FlowError):
                raise
            raise workflow.raised(error) from error
        return returned


def _left_the_debugger(error: BaseException | None) -> bool:
    """True if an error comes from `quit` at a debugger's prompt."""
    while error is not None:
        if isinstance(error, BdbQuit):
            return True
        error = error.__cause__ or error.__context__
    return False
