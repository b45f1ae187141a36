"""What is simulated, as data: lanes, engines, rollouts and the operations of a step.

`flowrl.sim.of_plan` makes it of a compiled stage; tests and benchmarks write their own. `simulate`
of `flowrl.sim.run` runs it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flowrl.rollout.settings import SchedulerSettings
from flowrl.sim.costs import HostCost, LinearCost
from flowrl.sim.engine import PollRule
from flowrl.sim.episodes import EnvironmentTimes, EpisodeShape
from flowrl.sim.scorers import ScoreTimes
from flowrl.sim.sharing import Beside
from flowrl.sim.step_time import StepTime


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneModel:
    """What does one thing at a time; see `flowrl.sim.lanes`.

    Attributes:
        num_devices: Accelerators that it stands for; 0 of a process.
        in_use: The plan puts something on them.
        parts: Lanes, named before, that this one is a group of.
    """

    name: str
    device: str
    num_devices: int = 0
    in_use: bool = True
    parts: tuple[str, ...] = ()
    process: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """One replica of a generating role.

    Attributes:
        lane: Name of what it computes on.
        num_slots: Rows at once.
        capacity: Samples that the scheduler gives it at once; those above `num_slots` wait in it.
        kv_tokens: Tokens whose keys and values it holds; None where slots are the limit.
        admit_at: Free slots that are awaited before waiting samples are prefilled together.
        load_s: Seconds in which it loads new weights, and generates nothing.
        poll: Set where a driver polls it.
        keeps_prefixes: It does not compute again what an episode has drawn and heard, and holds a
            prompt once for all of its samples.
        reserve: Tokens that each row has to find free when another is let in.
    """

    name: str
    role: str
    lane: str
    times: StepTime
    num_slots: int
    capacity: int
    kv_tokens: int | None = None
    admit_at: int = 1
    load_s: float = 0.0
    poll: PollRule | None = None
    keeps_prefixes: bool = False
    reserve: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerModel:
    """A reward's processes, one lane each."""

    name: str
    lanes: tuple[str, ...]
    times: ScoreTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentModel:
    """What episodes are played with: its thread has a lane."""

    lane: str
    times: EnvironmentTimes
    shape: EpisodeShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildPrompt:
    """The length of a prompt that is made of a sample.

    Attributes:
        texts: Tokens of the template's texts.
        prompts: How often the tokens that the sample answers are in it.
        responses: How often the sample's own are.
    """

    texts: int
    prompts: int
    responses: int

    def tokens(self, prompt: int, response: int) -> int:
        """Tokens of the prompt that is made of a sample."""
        return self.texts + self.prompts * prompt + self.responses * response


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutModel:
    """A node that draws samples.

    Attributes:
        role: Whose engines draw them; of several policies, the one with most.
        turns: Of policies that take turns in its episodes, whose engines draw them, in order.
        groups: Of a step.
        settings: Of its scheduler.
        scorers: What scores its samples as they end.
        environment: Where its samples are episodes; None where they are responses.
        tells_lengths: Prompts are offered with the mean length of their responses, as if somebody
            knew it.
        after: Rollouts that it waits for, beside those that draw on lanes of its engines.
        parent: The rollout whose samples its prompts are made of, each as it ends; it then waits
            for none of that rollout's tree. None where prompts are offered to it.
        of_kept: They are made of what a filter of that rollout keeps, when its batch is there.
        child_prompt: Their lengths.
    """

    name: str
    role: str
    groups: int
    settings: SchedulerSettings
    scorers: tuple[ScorerModel, ...] = ()
    environment: EnvironmentModel | None = None
    tells_lengths: bool = False
    after: tuple[str, ...] = ()
    parent: str | None = None
    of_kept: bool = False
    turns: tuple[str, ...] = ()
    child_prompt: ChildPrompt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpModel:
    """An operation on whole batches.

    Attributes:
        op: `logprobs`, `update`, `sync` ...; the kind that seconds are added up by.
        lanes: What it computes on, all of them at once.
        cost: Of its work.
        after: Operations of this model that it waits for.
        rollout: The rollout whose samples it works on; None for a batch of data, or for none.
        share: Of the samples of that rollout, those it works on (a selection makes it less).
        kept_only: It works on what the filters kept.
        calls: Into how many calls its work is cut (mini-batches).
        micro_batch: Rows of one pass of a call; 0 takes all at once.
        fixed_s: Seconds beside its cost: of residency switches before it.
        rows: Of a batch of data, where there is no rollout.
        tokens_per_row: Likewise.
        publishes: Roles whose engines serve new weights when it ends.
        every: Steps between two times that it is done.
        chunk: Groups that it takes at once, as soon as they are complete; 0 waits for the batch.
        by_sample: A chunk is of samples, whatever becomes of the others of their groups.
        piece_s: Seconds that every piece but the first of a batch costs beside.
        whole: It begins when its batch is there and the trainer comes to it, and not before; it
            takes it in chunks, if it has some, and hands on each when that is done.
        ahead: It begins when its batch is there, while the trainer waits for others or is at the
            batch before.
        beside: Further rollouts that it reads: of each group, the samples of the same prompt.
        threads: What it loses to another thread of its process, and leaves that.
    """

    name: str
    op: str
    lanes: tuple[str, ...] = ()
    cost: LinearCost = field(default_factory=LinearCost)
    after: tuple[str, ...] = ()
    rollout: str | None = None
    share: float = 1.0
    kept_only: bool = False
    calls: int = 1
    micro_batch: int = 0
    fixed_s: float = 0.0
    rows: int = 0
    tokens_per_row: float = 0.0
    publishes: tuple[str, ...] = ()
    every: int = 1
    chunk: int = 0
    by_sample: bool = False
    piece_s: float = 0.0
    whole: bool = False
    ahead: bool = False
    beside: tuple[str, ...] = ()
    threads: Beside = field(default_factory=Beside)

    @property
    def streams(self) -> bool:
        """It takes what it reads in pieces, or ahead; see `flowrl.sim.streams`."""
        return self.ahead or self.chunk > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimModel:
    """A stage.

    Attributes:
        driver: Lane of what drives rollouts: a step's samples cost it time.
        trainer: Lane of what makes the batches: steps and rows cost it time. Often the same.
        rollouts: In the order in which they are collected.
        ops: In an order in which each comes after those that it waits for.
        num_cores: That all lanes share, as processes and threads of one machine; 0 where each has
            what it needs to itself.
        ahead: Batches of prompts that are offered beyond the one that is asked for; 0 where a step
            begins with its prompts.
        times: Where its times come from, for people.
    """

    name: str
    lanes: tuple[LaneModel, ...]
    engines: tuple[EngineModel, ...]
    rollouts: tuple[RolloutModel, ...]
    ops: tuple[OpModel, ...]
    driver: str
    trainer: str = ""
    host: HostCost = field(default_factory=HostCost)
    num_cores: int = 0
    ahead: int = 0
    times: str = "given"
    notes: tuple[str, ...] = ()
