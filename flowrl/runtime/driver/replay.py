"""The samples that `fl.replay` holds: groups of earlier steps, with the scores that they had.

    a step:    draw(this step's groups) -> earlier groups
    its end:   commit()                    from now on this step's groups are held too

Until its commit a step has changed nothing, so that a step that is given up is made again with the
same groups. Which groups are chosen follows from the seed, the step and what is held.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np

from flowrl.data import PromptItem
from flowrl.errors import CheckpointError
from flowrl.ids import GroupId, SampleId
from flowrl.runtime.checkpoint.unused_samples import UnusedSamples, read_unused, write_unused
from flowrl.runtime.driver.payloads import Payload, SampleSet
from flowrl.specs import Replay

REPLAYED = "replayed-samples"
"""The folder of a checkpoint that holds them, one folder a replay node; no role has this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldGroup:
    """A group that is held.

    Attributes:
        members: Its samples, in member order.
        scores: The score of each when it was sampled.
        version: The oldest weights that sampled one of its tokens.
    """

    group: GroupId
    members: tuple[tuple[SampleId, Payload], ...]
    scores: tuple[float, ...]
    version: int


def held_groups(samples: SampleSet, scores: Sequence[float], version: int) -> list[HeldGroup]:
    """Returns the groups of a set, in order.

    Args:
        scores: One a sample.
        version: Weights that the policy has now, for a group without a token.
    """
    rows = zip(samples.groups, samples.samples, samples.payloads, scores, strict=True)
    return [
        HeldGroup(
            group=group,
            members=tuple((sample, payload) for _, sample, payload, _ in members),
            scores=tuple(score for *_, score in members),
            version=min((v for _, _, p, _ in members for v, _ in p.versions), default=version),
        )
        for group, members in (
            (group, list(together)) for group, together in groupby(rows, key=itemgetter(0))
        )
    ]


class ReplayBuffer:
    """See the module.

    Args:
        seed_of: Returns the seed of a step's choice.

    Attributes:
        held: The groups at the last step boundary, oldest first.
    """

    def __init__(self, spec: Replay, seed_of: Callable[[int], int]) -> None:
        self._spec = spec
        self._seed_of = seed_of
        self.held: tuple[HeldGroup, ...] = ()
        self._next: tuple[HeldGroup, ...] | None = None

    def draw(self, step: int, version: int, fresh: Sequence[HeldGroup]) -> list[HeldGroup]:
        """Returns earlier groups, oldest first, and takes up `fresh` ones at the next commit.

        Args:
            version: Weights that the policy has now.
        """
        young = [group for group in self.held if version - group.version <= self._spec.max_age]
        self._next = (*young, *fresh)[-self._spec.capacity :]
        if self._spec.choose == "newest":
            return young[-self._spec.n :]
        random = np.random.default_rng(self._seed_of(step))
        num = min(self._spec.n, len(young))
        return [young[place] for place in sorted(random.choice(len(young), num, replace=False))]

    def commit(self) -> None:
        """Ends a step."""
        if self._next is not None:
            self.held, self._next = self._next, None

    # Checkpoints

    def state(self) -> list[object]:
        """Returns what `restore` takes: JSON; `save` writes tokens and logprobs."""
        return [
            {
                "group": held.group,
                "samples": [sample for sample, _ in held.members],
                "scores": [score.hex() for score in held.scores],
                "version": held.version,
            }
            for held in self.held
        ]

    def save(self, folder: Path) -> None:
        """Writes the samples that are held into a folder, which is made."""
        write_unused(folder, UnusedSamples(payloads=self._payloads()))

    def _payloads(self) -> dict[SampleId, Payload]:
        return {sample: payload for held in self.held for sample, payload in held.members}

    def restore(
        self, state: object, folder: Path, item_of: Callable[[GroupId], PromptItem]
    ) -> None:
        """Takes up what `state` and `save` gave.

        Args:
            item_of: The prompt of a group.

        Raises:
            CheckpointError: a part is missing, or is not what it should be.
        """
        payloads = read_unused(folder, item_of).payloads
        try:
            assert isinstance(state, list)
            self.held = tuple(_read(row, payloads) for row in state)
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                "the replayed samples of this checkpoint cannot be read",
                where=str(folder),
                found=f"{type(error).__name__}: {error}",
            ) from error


def _read(row: Mapping[str, object], payloads: Mapping[SampleId, Payload]) -> HeldGroup:
    samples, scores, version = row["samples"], row["scores"], row["version"]
    assert isinstance(samples, list)
    assert isinstance(scores, list)
    assert isinstance(version, int)
    return HeldGroup(
        group=GroupId(str(row["group"])),
        members=tuple((SampleId(name), payloads[SampleId(name)]) for name in samples),
        scores=tuple(map(float.fromhex, scores)),
        version=version,
    )
