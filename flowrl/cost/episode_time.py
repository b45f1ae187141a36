"""What a rollout of episodes takes: a policy that draws turns, and an environment that answers.

All episodes in flight go on together, a token of each at a time, as in `flowrl.cost.occupancy`: an
engine has two of them for each row that it decodes at once (`flowrl.rollout` gives it so many), and
those that wait for an answer or a row leave theirs to others. While b are in flight on each of R
replicas with `slots` rows, r = min(b, slots), a token of each takes the longest of

    policy       b / r decode steps with r rows, for the share of tokens that is drawn,
                 and the prefill of what is said
    environment  b R w / at_once, with w = (turns step_s + reset_s) / tokens of an episode: so many
                 seconds of calls come with each token
    an episode   one decode step, for what is drawn, and (turns (step_s + wait_s) + reset_s +
                 wait_s) / tokens of waiting for its own answers

and where policy and environment take turns on the same devices, the sum of the first two in the
place of both. An episode longer than `most_turns` of mean length has longer turns and no more
calls. Where batches follow each other without a gap, as many episodes as may be in flight are so
all the time (`flowrl.cost.steady`), and calls come with all of their tokens. Prompts enter once,
before. What came before a turn is in the engine's cache (prefix caching of SGLang and vLLM).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from flowrl.backend.slots import GIVEN_PER_SLOT
from flowrl.cost.arrivals import clock_of
from flowrl.cost.episodes import CallSeconds, Episodes
from flowrl.cost.lengths import Lengths
from flowrl.cost.occupancy import occupancy_of_batch
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


class _BatchOf(TypedDict):
    """A batch of samples on engines, as `occupancy_of_batch` has it."""

    replicas: int
    samples: int
    group_size: int
    prompt_tokens: float
    slots: int
    kv_tokens: int


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


def play(
    drawing: Estimate,
    *,
    pace: Pace,
    chunk_s: float,
    chunk_tokens: int,
    replicas: int,
    samples: int,
    group_size: int,
    prompt_tokens: float,
    slots: int,
    kv_tokens: int,
    lengths: Lengths,
    episodes: Episodes,
    calls: CallSeconds,
    at_once: float,
    takes_turns: bool,
) -> PlayedEstimate:
    """See the module.

    Args:
        drawing: Of the rollout by its policy alone; its prompts enter as it says.
        pace: Of one replica's decode steps.
        chunk_s: Of a pass in which `chunk_tokens` enter one replica.
        slots: Rows that one replica decodes at once.
        kv_tokens: Tokens whose keys and values one replica holds.
        at_once: Calls that the environment serves at once, on all that it has.
        takes_turns: Policy and environment compute on the same devices.
    """
    batch_of = _BatchOf(
        replicas=replicas,
        samples=samples,
        group_size=group_size,
        prompt_tokens=prompt_tokens,
        slots=GIVEN_PER_SLOT * slots,
        kv_tokens=kv_tokens,
    )
    pieces, full = occupancy_of_batch(lengths, **batch_of), full_engine(lengths, **batch_of)
    mean, share = lengths.mean, episodes.drawn_share(lengths)
    # Behind the pieces of one batch, an engine with one episode and a full one: no steps of it.
    steps = pieces.steps * (pieces.total_steps / float(pieces.steps.sum()))
    steps = np.append(steps, (0.0, 0.0))
    batch, own = np.append(pieces.batch, (1.0, full.rows)), np.append(pieces.own, (full.own,) * 2)
    rows = np.minimum(batch, slots)
    step = share * pace.at(rows, prompt_tokens + own)
    reading = batch * (1 - share) * chunk_s / chunk_tokens
    decoding = batch / rows * step
    # Behind the tokens of most turns nobody is called any more.
    called = own <= episodes.most_turns * mean / episodes.turns
    called[-2:] = True
    work = (episodes.turns * calls.step_s + calls.reset_s) / mean
    serving = called * batch * replicas * work / at_once
    late = episodes.turns * (calls.step_s + calls.wait_s) + calls.reset_s + calls.wait_s
    alone = step + called * late / mean
    policy = decoding + reading
    sides = policy + serving if takes_turns else np.maximum(policy, serving)
    seconds = np.maximum(sides, alone)

    entering = dict(drawing.parts).get("prefill", 0.0)
    policy_s = float((steps * policy).sum()) + entering
    environment_s = samples * mean * work / at_once
    waits = float((steps * np.maximum(0.0, alone - sides)).sum())
    thin = batch <= pieces.batch.max() / 8
    parts = {
        "decode": float((steps * decoding).sum()),
        "tail of it": float((steps * decoding)[thin].sum()),
        "prefill": entering + float((steps * reading).sum()),
        "environment": environment_s,
        "waits": waits,
    }
    total = float((steps * seconds).sum()) + entering
    one_s, full_s = seconds[-2:].tolist()
    followed = full.steps * full_s + entering
    steady = min(total, followed)
    return PlayedEstimate(
        estimate=Estimate(
            seconds=total,
            source=drawing.source,
            parts=tuple((name, value) for name, value in parts.items() if value),
            notes=drawing.notes,
            clock=clock_of(pieces, (steps * seconds)[:-2], entering / total),
            steady_s=steady,
            dense_s=min(steady, full.dense_s(followed, one_s=one_s, full_s=full_s)),
        ),
        policy_s=policy_s,
        environment_s=environment_s,
        bound=_bound(steps, policy, serving, alone, takes_turns=takes_turns),
    )


def _bound(
    steps: Floats, policy: Floats, serving: Floats, alone: Floats, *, takes_turns: bool
) -> str:
    """What decides for most of the time."""
    if takes_turns:
        both = policy + serving
        name = "both in turns" if float(serving.sum()) else "policy"
        sides = {name: both, "each episode's own way": alone}
    else:
        sides = {"policy": policy, "environment": serving, "each episode's own way": alone}
    longest = np.max(np.array(list(sides.values())), axis=0)
    left = np.ones(len(steps), np.bool_)
    sums: dict[str, float] = {}
    for name, seconds in sides.items():
        here = left & (seconds >= longest)
        sums[name] = float((steps * longest)[here].sum())
        left &= ~here
    return max(sums, key=lambda name: sums[name])
