"""How many rows of an engine have their prompt in common, and so what each holds of it.

The scheduler gives a group to one engine as long as that has room (`PromptAffinity`), so what
engines are given at first are whole groups. Later ones are handed out as samples end, each to the
engine that has room then, which is any of R: the g samples of a group are then on

    R (1 - (1 - 1 / R)^g)                                                     engines on average

(the classical occupancy problem: Feller 1968, An Introduction to Probability Theory I, chapter
IV.2). Each of these computes the prompt and holds it as long as one of its part of the group runs.
With s samples in a part and k rows, such parts come every s samples and stay until the last of them
has ended, so by Little's law (Little 1961) a row holds

    prompt (E[longest of s] / (s E[L]) + (s - 1) / (s k))                                 tokens

the second term for the time in which the samples of a part start. With equal lengths that is
prompt ((k - 1) / s + 1) / k: k neighbours of a line lie in (k - 1) / s + 1 groups.
"""

from __future__ import annotations

import math

from flowrl.cost.lengths import Lengths, expected_maximum


def shared_by(*, replicas: int, samples: float, group_size: int, at_first: float) -> float:
    """Samples of a group on one engine, on average over all parts of groups.

    Args:
        samples: Of each replica.
        at_first: Of these, those that are given before the first ends.
    """
    group = min(float(group_size), max(1.0, samples))
    whole = min(1.0, at_first / samples)
    parts = replicas * (1.0 - math.pow(1.0 - 1.0 / replicas, group))
    return group / (whole + (1 - whole) * parts)


def held_tokens(lengths: Lengths, *, prompt_tokens: float, shared: float, rows: int) -> float:
    """What each row holds of its prompt.

    Args:
        shared: See `shared_by`.
        rows: That run at once.
    """
    stays = expected_maximum(lengths, shared) / lengths.mean
    return prompt_tokens * min(1.0, (stays + (shared - 1) / rows) / shared)
