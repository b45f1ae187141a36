"""The order in which rows are taken: shuffles that never change, and a curriculum by solve rate.

NumPy keeps the raw stream of a bit generator fixed across versions, and promises that for nothing
built on it (NEP 19), so a permutation is the order of raw random keys.

The curriculum samples prompts by how often they were solved so far in this run. For each prompt it
keeps an estimate p of its solve rate: an exponential average of the mean scores of its groups,
which begins at `prior`::

    p <- p + smoothing (rate of the group - p)

Prompts are sampled with a weight that follows from p (`prefer`):

- `learnability`: p (1 - p), the variance of a score of 0 or 1. Prompts that are always or never
  solved have no weight; those solved half the time weigh most. (Rutherford et al., "No Regrets:
  Investigating and Improving Regret Approximations for Curriculum Discovery", arXiv 2408.15099; for
  language models Foster et al., "Learning to Reason at the Frontier of Learnability", arXiv
  2502.12272. They measure p by rollouts made for it and keep the prompts where it is best; here p
  comes from training, and is a weight.)
- `unsolved`: 1 - p, so that a run returns to prompts at which it fails. (Kimi k1.5, arXiv
  2501.12599, section 2.3.4, "prioritized sampling".)

`low` and `high` give prompts outside the band the weight 0.

A share `explore` of the prompts is taken in the order of ordinary epochs, where every prompt comes
once; the others are sampled by weight, without repetition within a batch. The `epoch` of an item
then counts how often its prompt was taken before, so that no two groups of a run have one id. Where
fewer prompts have a weight than are needed, the order of the epoch gives the rest.

The seed, the prompts taken and the scores observed decide everything; weights are whole numbers of
2^-20, so that no rounding of a library changes the sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from hashlib import blake2b

import numpy as np

from flowrl.backend.batch import Ints
from flowrl.config.data import CurriculumConfig
from flowrl.errors import CheckpointError


def raw_stream(*key: int | str) -> np.random.Philox:
    """Returns the random stream that `key` names; only its `random_raw` never changes."""
    digest = blake2b(repr(key).encode(), digest_size=16).digest()
    return np.random.Philox(key=int.from_bytes(digest, "little"))


def permutation(num: int, *key: int | str) -> Ints:
    """Returns int64 `[num]`, the numbers 0 to num - 1 in the random order that `key` names."""
    # Equal keys are about as likely as num^2 / 2^65; a stable sort keeps even those in order.
    return np.argsort(raw_stream(*key).random_raw(num), kind="stable").astype(np.int64)


_WEIGHT_ONE = 1 << 20


class Curriculum:
    """The estimated solve rates of a cursor's prompts, by their place in its prompt set.

    >>> curriculum = Curriculum(CurriculumConfig(kind="solve_rate", explore=0), 3, seed=0)
    >>> curriculum.choose(3, following=lambda: 0)
    [2, 1, 0]
    >>> curriculum.observe(1, 1.0)
    >>> curriculum.rate(1)
    0.75
    """

    def __init__(self, config: CurriculumConfig, num_prompts: int, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._taken = 0
        self._visits = np.zeros(num_prompts, np.int64)
        self._rates = np.full(num_prompts, config.prior, np.float64)

    def rate(self, place: int) -> float:
        """Returns the estimated solve rate of a prompt."""
        return float(self._rates[place])

    def choose(self, num: int, following: Callable[[], int]) -> list[int]:
        """Returns the places of the next `num` prompts, in the order of the batch.

        Args:
            following: The next place in the order of ordinary epochs.
        """
        start, explore = self._taken, self._config.explore
        # Over many small batches the share is right too.
        num_explored = math.floor((start + num) * explore) - math.floor(start * explore)
        places = [following() for _ in range(num_explored)]
        places += self._sample(num - num_explored, set(places))
        places += [following() for _ in range(num - len(places))]
        self._taken += num
        # Mini-batches take prompts in order; none shall hold the explored ones alone.
        return [places[i] for i in permutation(num, self._seed, "curriculum order", start)]

    def visit(self, place: int) -> int:
        """Returns how often the prompt was taken before, and counts this time."""
        before = int(self._visits[place])
        self._visits[place] += 1
        return before

    def observe(self, place: int, mean_score: float) -> None:
        """Updates the estimate of a prompt by the mean score of a group."""
        low, high = self._config.unsolved_score, self._config.solved_score
        solved = min(max((mean_score - low) / (high - low), 0.0), 1.0)
        self._rates[place] += self._config.smoothing * (solved - self._rates[place])

    def _sample(self, num: int, excluded: Collection[int]) -> list[int]:
        """Returns at most `num` different places by weight, without the excluded ones."""
        p, band = self._rates, self._config
        weight = 1.0 - p if band.prefer == "unsolved" else p * (1.0 - p)
        inside = (band.low <= p) & (p <= band.high)
        weights = (np.where(inside, weight, 0.0) * _WEIGHT_ONE).astype(np.int64)
        weights[list(excluded)] = 0
        ends = np.cumsum(weights)
        stream = raw_stream(self._seed, "curriculum", self._taken)
        sampled: list[int] = []
        while len(sampled) < num and int(ends[-1]):
            point = int(stream.random_raw()) * int(ends[-1]) >> 64
            place = int(np.searchsorted(ends, point, side="right"))
            if not weights[place]:
                # Sampled before: its share of the line is taken out, and another is sampled.
                ends = np.cumsum(weights)
                continue
            weights[place] = 0
            sampled.append(place)
        return sampled

    def to_json(self) -> dict[str, object]:
        """Returns what was taken and observed, without prompts that were never taken."""
        places = np.flatnonzero(self._visits)
        return {
            "taken": self._taken,
            "places": places.tolist(),
            "visits": self._visits[places].tolist(),
            "rates": self._rates[places].tolist(),
        }

    def restore(self, value: Mapping[str, object]) -> None:
        """Restores what `to_json` wrote.

        Raises:
            CheckpointError: It is no such description.
        """
        try:
            taken = value["taken"]
            places = np.array(value["places"], np.int64)
            visits = np.array(value["visits"], np.int64)
            rates = np.array(value["rates"], np.float64)
            self._visits[places], self._rates[places] = visits, rates
        except (KeyError, TypeError, ValueError, IndexError) as reason:
            raise _broken(str(reason)) from reason
        if not isinstance(taken, int) or not np.all((rates >= 0) & (rates <= 1)):
            raise _broken("a number is out of bounds")
        self._taken = taken


def _broken(found: str) -> CheckpointError:
    return CheckpointError(
        "the curriculum of the checkpoint is broken", where="cursor.curriculum", found=found
    )
