"""What a rollout of episodes takes: a policy that draws turns, and an environment that answers.

Each side has its work, and an episode has its way through both:

    policy       decode steps of what is drawn + prefill of prompts and of what is said
    environment  (samples x (turns x step_s + reset_s)) / calls at once
    work         the larger one, and the smaller one's share of the first round before it
                 (both at once: an episode that waits for one leaves the other to others);
                 the sum of both where they take turns on the same devices
    path         the longest episode, alone: its tokens at the pace of one row, its calls behind
                 each other
    flight       samples / episodes in flight x a mean episode at the pace of a full batch

    seconds = max(work, path, flight)

A rollout's estimate (`Cost.rollout`) takes all tokens of a sample as drawn. Of an episode a share
is said by the environment: it enters as prefill, in passes of a full chunk, and what came before is
in the engine's cache (prefix caching of SGLang and vLLM). Episodes of an engine beyond its rows
wait for an answer or a row: two a row, as `flowrl.rollout` gives them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from flowrl.cost.lengths import Lengths, expected_maximum
from flowrl.cost.source import Estimate

__all__ = [
    "CallSeconds",
    "EnvironmentCost",
    "Episodes",
    "PlayedEstimate",
    "play",
]

IN_FLIGHT = 2
"""Episodes of an engine, for each row that it decodes at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSeconds:
    """What a call of an environment takes.

    Attributes:
        reset_s: Of the one that serves it, to begin an episode.
        step_s: Likewise, to answer a turn.
        wait_s: That each answer is late beside, while others are served.
        source: `given`, `measured`, or `unknown` where all are 0 because nobody said.
    """

    reset_s: float = 0.0
    step_s: float = 0.0
    wait_s: float = 0.0
    source: str = "given"


@runtime_checkable
class EnvironmentCost(Protocol):
    """A cost that knows environments too."""

    def environment(self, role: str) -> CallSeconds | None:
        """What a call of this role's environment takes; None where nobody measured it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """How episodes go.

    Attributes:
        turns: Of an episode, on average.
        most_turns: Of the longest.
        said: Tokens of an observation, on average; one comes before each turn.
    """

    turns: float
    most_turns: int
    said: float = 0.0

    def drawn_share(self, lengths: Lengths) -> float:
        """Of a sample's tokens, those that are drawn and not said."""
        return max(0.0, 1.0 - self.turns * self.said / lengths.mean)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedEstimate:
    """A rollout of episodes, with both sides.

    Attributes:
        estimate: All of it.
        policy_s: The engines' work.
        environment_s: The environment's work.
        bound: What the time is: `policy`, `environment`, `both in turns`, `the longest episode` or
            `episodes in flight`.
    """

    estimate: Estimate
    policy_s: float
    environment_s: float
    bound: str


def play(
    drawing: Estimate,
    *,
    row_s: Callable[[int], float],
    chunk_s: float,
    chunk_tokens: int,
    replicas: int,
    samples: int,
    slots: int,
    lengths: Lengths,
    episodes: Episodes,
    calls: CallSeconds,
    at_once: float,
    takes_turns: bool,
) -> PlayedEstimate:
    """See the module.

    Args:
        drawing: Of the rollout, with all its tokens drawn.
        row_s: Seconds of a decode step with so many rows.
        chunk_s: Of a pass in which `chunk_tokens` enter one replica.
        slots: Rows that one replica decodes at once.
        at_once: Calls that the environment serves at once, on all that it has.
        takes_turns: Policy and environment compute on the same devices.
    """
    share = episodes.drawn_share(lengths)
    entering = dict(drawing.parts).get("prefill", 0.0)
    decode_s = share * (drawing.seconds - entering)
    said_s = samples * episodes.turns * episodes.said / replicas / chunk_tokens * chunk_s
    policy_s = decode_s + entering + said_s
    serving = samples * (episodes.turns * calls.step_s + calls.reset_s)
    environment_s = serving / at_once if serving else 0.0

    flight = min(samples, IN_FLIGHT * slots * replicas)
    rounds = max(1.0, episodes.turns * samples / flight)
    less, more = sorted((policy_s, environment_s))
    work = less + more if takes_turns else more + less / rounds

    longest = expected_maximum(lengths, samples)
    most_turns = min(float(episodes.most_turns), episodes.turns * longest / lengths.mean)
    path = share * longest * row_s(1) + _calls_s(calls, most_turns)
    rows = max(1, min(slots, math.ceil(samples / replicas)))
    mean = share * lengths.mean * row_s(rows) + _calls_s(calls, episodes.turns)
    bounds = {
        _who(policy_s, environment_s, takes_turns): work,
        "the longest episode": path,
        "episodes in flight": samples / flight * mean,
    }
    bound = max(bounds, key=lambda name: bounds[name])
    seconds = bounds[bound]
    parts = {
        "decode": decode_s,
        "tail of it": share * dict(drawing.parts).get("tail of it", 0.0),
        "prefill": entering + said_s,
        "environment": environment_s,
        "waits": max(0.0, seconds - (less + more if takes_turns else more)),
    }
    estimate = Estimate(
        seconds=seconds,
        source=drawing.source,
        parts=tuple((name, value) for name, value in parts.items() if value),
        notes=drawing.notes,
    )
    return PlayedEstimate(
        estimate=estimate, policy_s=policy_s, environment_s=environment_s, bound=bound
    )


def _calls_s(calls: CallSeconds, turns: float) -> float:
    """Of one episode: its reset and a step behind each turn."""
    return calls.reset_s + turns * calls.step_s + (turns + 1) * calls.wait_s


def _who(policy_s: float, environment_s: float, takes_turns: bool) -> str:
    if takes_turns and policy_s and environment_s:
        return "both in turns"
    return "policy" if policy_s >= environment_s else "environment"
