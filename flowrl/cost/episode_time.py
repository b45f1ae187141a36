"""What a rollout of episodes takes: a policy that draws turns, and an environment that answers.

All episodes in flight go on together, a token of each at a time, as in `flowrl.cost.occupancy`: an
engine has two of them for each row that it decodes at once (`flowrl.rollout` gives it so many), and
those that wait for an answer or a row leave theirs to others. While b are in flight on each of R
replicas with `slots` rows, r = min(b, slots), a token of each takes the longest of

    policy       b / r decode steps with r rows, for the share of tokens that is drawn,
                 and the prefill of what is said
    environment  b R w / at_once, with w = (turns step_s + reset_s) / tokens of an episode: so many
                 seconds of calls come with each token
    an episode   one decode step, for what is drawn (by others, too, with whom the policy takes
                 turns, as fast as by itself), and (turns (step_s + wait_s) + reset_s +
                 wait_s) / tokens of waiting for its own answers

and where policy and environment take turns on the same devices, the sum of the first two in the
place of both. An episode longer than `most_turns` of mean length has longer turns and no more
calls. However calls come, a batch takes no less than the environment's work on all of them, in
turns with the policy's where they share devices. Where batches follow each other without a gap, as
many episodes as may be in flight are so all the time (`flowrl.cost.steady`), and calls come with
all of their tokens. Prompts enter once, before. What came before a turn is in the engine's cache
(prefix caching of SGLang and vLLM).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from flowrl.backend.plugin import GIVEN_PER_SLOT
from flowrl.cost.arrivals import clock_of
from flowrl.cost.episodes import CallSeconds, Episodes
from flowrl.cost.lengths import Lengths
from flowrl.cost.occupancy import EngineBatch
from flowrl.cost.replicas import on_replicas
from flowrl.cost.rollout_time import COMPUTED_AGAIN
from flowrl.cost.source import Estimate
from flowrl.cost.spread import Floats
from flowrl.cost.steady import full_engine

__all__ = [
    "CallSeconds",
    "Episodes",
    "Pace",
    "PlayedEstimate",
    "play",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedEstimate:
    """A rollout of episodes, with both sides.

    Attributes:
        estimate: All of it.
        policy_s: The engines' work.
        environment_s: The environment's work.
        bound: What decides for most of the time: `policy`, `environment`, `both in turns`, or
            `each episode's own way`.
    """

    estimate: Estimate
    policy_s: float
    environment_s: float
    bound: str


class Pace:
    """Seconds of decode steps at some rows and contexts, linear in between.

    Args:
        step_s: Of so many rows with a mean context; asked at doubling numbers of rows.
        most_rows: That are asked for.
        contexts: The least and the largest.
    """

    __slots__ = ("_contexts", "_rows", "_seconds")

    def __init__(
        self, step_s: Callable[[int, float], float], most_rows: int, contexts: tuple[float, float]
    ) -> None:
        sizes = [1 << power for power in range(most_rows.bit_length()) if 1 << power < most_rows]
        self._rows = np.array([*sizes, most_rows], np.float64)
        self._contexts = contexts
        self._seconds = [
            np.array([step_s(int(rows), context) for rows in self._rows]) for context in contexts
        ]

    def at(self, rows: Floats, context: Floats) -> Floats:
        """Seconds, of arrays of equal length."""
        near, far = (np.interp(rows, self._rows, seconds) for seconds in self._seconds)
        low, high = self._contexts
        found: Floats = near + (far - near) * (context - low) / max(high - low, 1.0)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sides:
    """Seconds of a token of every episode in flight, at several numbers of these.

    Attributes:
        decoding, reading: Of the engine: what is drawn, and what is said to it.
        serving: Of the environment.
        alone: An episode's own way, its waiting included.
        takes_turns: Engine and environment compute on the same devices.
    """

    decoding: Floats
    reading: Floats
    serving: Floats
    alone: Floats
    takes_turns: bool

    @property
    def policy(self) -> Floats:
        """The engine's."""
        return self.decoding + self.reading

    @property
    def both(self) -> Floats:
        """Of engine and environment."""
        if self.takes_turns:
            return self.policy + self.serving
        return np.maximum(self.policy, self.serving)

    @property
    def seconds(self) -> Floats:
        """The longest of all."""
        return np.maximum(self.both, self.alone)


def play(
    drawing: Estimate,
    engines: EngineBatch,
    *,
    pace: Pace,
    chunk_s: float,
    chunk_tokens: int,
    lengths: Lengths,
    episodes: Episodes,
    calls: CallSeconds,
    at_once: float,
    takes_turns: bool,
) -> PlayedEstimate:
    """See the module.

    Args:
        drawing: Of the rollout by its policy alone; its prompts enter as it says.
        engines: The episodes of a batch, each a sample, and what draws them.
        pace: Of one replica's decode steps.
        chunk_s: Of a pass in which `chunk_tokens` enter one replica.
        at_once: Calls that the environment serves at once, on all that it has.
        takes_turns: Policy and environment compute on the same devices.
    """
    flight = replace(engines, slots=GIVEN_PER_SLOT * engines.slots, given_per_slot=1)
    pieces, full = on_replicas(lengths, flight).pieces, full_engine(lengths, flight)
    # Behind the pieces of one batch, an engine with one episode and a full one: no steps of it.
    steps = pieces.steps * (pieces.total_steps / float(pieces.steps.sum()))
    steps = np.append(steps, (0.0, 0.0))
    batch, own = np.append(pieces.batch, (1.0, full.rows)), np.append(pieces.own, (full.own,) * 2)
    share = episodes.drawn_share(lengths)
    rows = np.minimum(batch, engines.slots)
    pace_s = pace.at(rows, engines.prompt_tokens + own)
    step, others_s = share * pace_s, episodes.turns * episodes.others / lengths.mean * pace_s
    work_s, late_s = _calls_of_tokens(own, episodes, calls, lengths.mean)
    sides = _Sides(
        decoding=batch / rows * step,
        reading=batch * (1 - share) * chunk_s / chunk_tokens,
        serving=batch * engines.replicas * work_s / at_once,
        alone=step + others_s + late_s,
        takes_turns=takes_turns,
    )
    drawn = dict(drawing.parts)
    entering = drawn.get("prefill", 0.0) + drawn.get(COMPUTED_AGAIN, 0.0)
    served_s = min(episodes.turns, episodes.most_turns) * calls.step_s + calls.reset_s
    environment_s = engines.samples * served_s / at_once
    thin = batch <= pieces.batch.max() / 8
    parts = {
        "decode": float((steps * sides.decoding).sum()),
        "tail of it": float((steps * sides.decoding)[thin].sum()),
        "prefill": entering + float((steps * sides.reading).sum()),
        "environment": environment_s,
        "waits": float((steps * np.maximum(0.0, sides.alone - sides.both)).sum()),
    }
    policy_s = float((steps * sides.policy).sum()) + entering
    played_s = float((steps * sides.seconds).sum()) + entering
    # Some calls come with no tokens of these pieces, but are served.
    least_s = environment_s + (policy_s if takes_turns else 0.0)
    total = max(played_s, least_s)
    one_s, full_s = sides.seconds[-2:].tolist()
    followed = full.steps * full_s + entering
    steady = min(total, followed)
    return PlayedEstimate(
        estimate=Estimate(
            seconds=total,
            source=drawing.source,
            parts=tuple((name, value) for name, value in parts.items() if value),
            notes=drawing.notes,
            clock=clock_of(pieces, (steps * sides.seconds)[:-2], entering / total),
            steady_s=steady,
            dense_s=min(steady, full.dense_s(followed, one_s=one_s, full_s=full_s)),
        ),
        policy_s=policy_s,
        environment_s=environment_s,
        bound=_bound(steps, sides) if played_s >= least_s else _busiest(sides),
    )


def _calls_of_tokens(
    own: Floats, episodes: Episodes, calls: CallSeconds, mean: float
) -> tuple[Floats, Floats]:
    """Seconds of the environment's work and of an episode's waiting that come with each token.

    Args:
        own: Tokens of the episodes in flight; the last two are of engines that know no end of them.
        mean: Tokens of an episode.
    """
    # Behind the tokens of most turns nobody is called any more.
    called = own <= episodes.most_turns * mean / episodes.turns
    called[-2:] = True
    work_s = episodes.turns * calls.step_s + calls.reset_s
    late_s = episodes.turns * (calls.step_s + calls.wait_s) + calls.reset_s + calls.wait_s
    each: Floats = called.astype(np.float64)
    return each * (work_s / mean), each * (late_s / mean)


def _busiest(sides: _Sides) -> str:
    """What decides where the environment's work does."""
    return "both in turns" if sides.takes_turns else "environment"


def _bound(steps: Floats, sides: _Sides) -> str:
    """What decides for most of the time."""
    if sides.takes_turns:
        ways = {_busiest(sides) if float(sides.serving.sum()) else "policy": sides.both}
    else:
        ways = {"policy": sides.policy, "environment": sides.serving}
    ways["each episode's own way"] = sides.alone
    longest = sides.seconds
    left = np.ones(len(steps), np.bool_)
    sums: dict[str, float] = {}
    for name, seconds in ways.items():
        here = left & (seconds >= longest)
        sums[name] = float((steps * longest)[here].sum())
        left &= ~here
    return max(sums, key=lambda name: sums[name])
