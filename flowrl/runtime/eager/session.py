"""A run that a person makes step by step, in a notebook or at a prompt.

    session = fl.eager(mine, "config.yaml")
    made = session.step()               # calls mine(...), line by line
    made.metrics.reward_mean, made["verifier.score"], made.returned
    session.close()

It is the run that `fl.run(..., executor="eager")` makes, with its folder, stages, evaluations and
checkpoints, but it pauses between steps. Errors of the user's own code are raised unchanged, so
that
`%debug` and `pdb.pm()` stop at their lines, with flowrl's message as a note.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from flowrl.compiler import CompiledStage
from flowrl.config.schema import RunConfig
from flowrl.errors import ConfigError, FlowError, RewardError, TraceError
from flowrl.observe.display import Display
from flowrl.observe.rows import Summary
from flowrl.runtime.eager.stage import EagerStage, EagerStepResult
from flowrl.runtime.run import Turn, new_run, opened_run


class EagerSession:
    """See the module. Workers are open until `close`, or the end of a `with` block.

    A step that fails before it has changed weights is repeated by the next call, with the same
    prompts; after a failure later in a step the session cannot continue.

    Args:
        config: Its executor is `eager`.
        display: Shows the run; by default lines on standard output.

    Attributes:
        folder: The run folder.
        made: The last step; None before the first.

    Raises:
        FlowError: whatever is wrong with data, models or rewards.
    """

    def __init__(
        self,
        config: RunConfig,
        stages: Sequence[CompiledStage],
        *,
        display: Display | None = None,
    ) -> None:
        self._names = [stage.name for stage in stages]
        self.made: EagerStepResult | None = None
        self._turn: Turn | None = None
        self._failed: str | None = None
        self._stack = ExitStack()
        with ExitStack() as stack:  # of what is open where something fails
            folder, inputs = stack.enter_context(new_run(config, stages))
            self._run = stack.enter_context(opened_run(folder, inputs, display=display))
            self.folder: Path = folder.path
            self._turns: Iterator[Turn] = self._run.turns()
            self._turn = next(self._turns, None)
            self._stack = stack.pop_all()

    def __repr__(self) -> str:
        turn = self._turn
        at = "at its end" if turn is None else f"before step {turn.number} of {self.stage}"
        return f"<EagerSession in {self.folder}: {self._failed or at}>"

    @property
    def stage(self) -> str | None:
        """The stage of the next step; None where all are made."""
        return None if self._turn is None else self._names[self._turn.index]

    @property
    def summary(self) -> Summary | None:
        """Returns the summary of the run, once all steps are made."""
        return self._run.summary

    def step(self) -> EagerStepResult:
        """Makes the next step.

        Behind it come the evaluations, checkpoints and stage ends that belong there, and after the
        last step the export of the model and the summary.

        Raises:
            ConfigError: all steps are made, the session is closed, or an earlier step failed when
                it had changed weights already.
            Exception: whatever the program or a function of the user's own raises.
        """
        if self._failed is not None or self._turn is None:
            raise ConfigError(
                f"this session makes no more steps: {self._failed or 'all of them are made'}",
                where=str(self.folder),
                hint="open another one with fl.eager(...)",
            )
        turn = self._turn
        theirs: Exception | None = None
        try:
            turn.make()
        except BaseException as error:
            self._give_up(turn)
            theirs = _of_the_user(error)
            if theirs is None:
                raise
        if theirs is not None:  # outside the block, so that its chain stays the user's
            raise theirs
        loop = self._run.loop
        assert isinstance(loop, EagerStage)
        self.made = loop.made
        assert self.made is not None
        self._turn = None
        try:
            self._turn = next(self._turns, None)
        except BaseException:
            self._failed = f"it failed behind step {turn.number}"
            raise
        return self.made

    def finish(self) -> Summary:
        """Makes all steps that are left."""
        while self._turn is not None:
            self.step()
        if self.summary is None:
            self.step()  # raises the error that there are no more
        assert self.summary is not None
        return self.summary

    def close(self) -> None:
        """Ends every worker; what the folder holds stays. Idempotent."""
        self._failed = self._failed or "it is closed"
        self._stack.close()

    def __enter__(self) -> EagerSession:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def _give_up(self, turn: Turn) -> None:
        """Goes back to the boundary before a step that failed, where that can be."""
        loop = self._run.loop
        assert isinstance(loop, EagerStage)
        if loop.has_learned:
            self._failed = f"step {turn.number} failed when it had changed weights already"
            return
        try:
            loop.abandon()
            self._run.begin_step_again(turn.index)
        except BaseException:
            self._failed = f"step {turn.number} failed, and could not be taken back"
            raise


def _of_the_user(error: BaseException) -> Exception | None:
    """Returns the exception that a user's function raised, with flowrl's message as a note."""
    cause = error.__cause__
    if not isinstance(error, TraceError | RewardError) or not isinstance(cause, Exception):
        return None
    if isinstance(cause, FlowError):
        return None
    cause.add_note(f"flowrl: {error}")
    return cause
