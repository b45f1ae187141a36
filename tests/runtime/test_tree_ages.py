"""Ages and ends of samples in trees of rollouts that run ahead of the trainer, over any tree."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from flowrl.backend.protocols import ScoreRequest
from flowrl.data import PromptItem
from flowrl.graph import Node
from flowrl.ids import GroupId, NodeId, SampleId
from flowrl.rollout.policies.engines import AbortRunning, FinishRunning, KeepRunning
from flowrl.rollout.policies.prompts import AdmitAll, AgeBudget
from flowrl.rollout.scheduler import RolloutScheduler
from flowrl.rollout.settings import SchedulerSettings
from flowrl.runtime.driver.collected_batch import FailureBudget
from flowrl.runtime.driver.payloads import Payload
from flowrl.runtime.driver.rollout_tree import OpenRollout, drop_incomplete
from flowrl.runtime.driver.sources import PromptSupply
from flowrl.runtime.driver.step_report import GeneratedRollout
from flowrl.runtime.driver.streaming_driver import StreamingDriver
from flowrl.runtime.driver.streaming_tree import StreamingTree, checked_ages
from flowrl.specs import Sampling
from tests.policy_contexts import weights_of
from tests.runtime.scripted_engine import weights
from tests.runtime.test_rollouts import VERIFIER, Scoring, Words, World
from tests.runtime.test_streaming_driver import PART, WAKE, Fleet, Prompts

N = 2  # prompts of a step


class Questions:
    """Makes a prompt of each sample, whose answer has one of these lengths."""

    reads_groups = False

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths
        self._made = 0

    def items(self, rows: Sequence[tuple[SampleId, Payload]]) -> list[PromptItem]:
        return [self._item(sample, payload) for sample, payload in rows]

    def _item(self, sample: SampleId, payload: Payload) -> PromptItem:
        self._made += 1
        length = self._lengths[self._made % len(self._lengths)]
        return replace(
            payload.item, group=GroupId(sample), prompt_ids=np.array([1, length], np.int64)
        )


class Tree:
    """Rollouts of a tree, each with its engines, and a trainer that is played by a test."""

    def __init__(self, folder: Path, parents: Sequence[int], draw: Any, staleness: int) -> None:
        self.world, self.folder, self.version = World(), folder, 0
        self._draw, self._failing = draw, draw(st.integers(3, 40))
        self.fleets: list[Fleet] = []
        nodes = [replace(PART.node, id=NodeId(f"rollout.{i}")) for i in range(len(parents) + 1)]
        rollouts = [self._rollout(nodes[0], None, staleness)]
        for node, parent in zip(nodes[1:], parents, strict=True):
            rollouts.append(self._rollout(node, nodes[parent].id, staleness))
        self.drivers = {rollout.node: rollout.driver for rollout in rollouts}
        self.limits = dict.fromkeys(self.drivers, staleness)
        self.ends: dict[NodeId, Counter[SampleId]] = {node: Counter() for node in self.drivers}
        self.tree = StreamingTree(
            rollouts,
            self.fleets,  # type: ignore[arg-type]
            stall_timeout_s=5.0,
            clock=self.world.clock,
        )

    def _rollout(self, node: Node, parent: NodeId | None, staleness: int) -> OpenRollout:
        draw = self._draw
        lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))
        fleet = Fleet(self.folder, draw(st.integers(1, 2)), draw(st.integers(1, 6)), node.id)
        self.fleets.append(fleet)
        rules = SchedulerSettings(
            group_size=draw(st.integers(1, 3)),
            max_staleness=staleness,
            publication=draw(st.sampled_from([KeepRunning(), AbortRunning(), FinishRunning()])),
            admission=AdmitAll() if parent else AgeBudget(groups=N),
            named=parent is not None,
        )
        supply = PromptSupply(take=Prompts(lengths).take, limit=1000)
        driver = StreamingDriver(
            fleet=fleet,  # type: ignore[arg-type]
            supply=None if parent else supply,
            batch_groups=N,
            scheduler=RolloutScheduler(rules, validate=True),
            engines=fleet.engines,
            scorers={VERIFIER: Scoring(self.world, self._score)},
            reported=VERIFIER,
            tokenizer=Words(),
            sampling=Sampling(max_tokens=50),
            group_size=rules.group_size,
            seed_of=lambda sample: 7,
            judge=None,
            failures=FailureBudget(10_000),
            beat=lambda: None,
            stop=lambda: False,
            stall_timeout_s=5.0,
            clock=self.world.clock,
        )
        part = replace(
            PART, node=node, parent=parent, parents=parent, completes=draw(st.booleans())
        )
        return OpenRollout(
            part=part,
            driver=driver,
            begin=lambda: None,
            prompts=Questions(lengths) if parent else None,  # type: ignore[arg-type]
        )

    def _score(self, request: ScoreRequest) -> float | str:
        number = sum(map(ord, request.sample))
        return "no luck" if number % self._failing == 0 else float(number % 2)

    def collect(self, batch: int) -> list[GeneratedRollout]:
        self.tree.ask(batch, {})
        for _ in range(3000):
            if self.tree.is_delivered(batch):
                generated = self.tree.take(batch)
                drop_incomplete(generated, [])
                self._count(generated)
                return generated
            self.tree.round(WAKE)
        raise AssertionError(self.tree.describe())

    def _count(self, generated: Sequence[GeneratedRollout]) -> None:
        for rollout in generated:
            ends, collected = self.ends[rollout.part.node.id], rollout.collected
            ends.update(sample for _, members in collected.groups for sample, _ in members)
            ends.update(sample for sample, _, _ in (*collected.dropped, *collected.filtered))

    def publish(self) -> None:
        self.version += 1
        folder = weights(self.folder / str(self.version), self.version)
        for fleet in self.fleets:
            self.tree.load(fleet, weights_of(self.version, folder))  # type: ignore[arg-type]


def check_ages(generated: Sequence[GeneratedRollout], version: int, staleness: int) -> None:
    """No consumed sample is too old, whichever of its ancestors is the oldest."""
    oldest: dict[tuple[NodeId, str], int] = {}
    for rollout in generated:
        node, parent = rollout.part.node.id, rollout.part.parent
        for group, members in rollout.collected.groups:
            for sample, payload in members:
                first = min(v for v, _ in payload.versions)
                if parent is not None:
                    # The parent of what is consumed is, in the same step.
                    first = min(first, oldest[parent, group])
                oldest[node, sample] = first
                assert version - first <= staleness


def check_ends(tree: Tree) -> None:
    """Every sample that was offered has one end, or is still there."""
    for node, driver in tree.drivers.items():
        counts, ends = driver.scheduler.counts, tree.ends[node]
        assert set(ends.values()) <= {1}
        assert counts.conserved
        unreported = {sample for sample, _, _ in driver.unused().dropped}
        live = set(driver.store.all())
        assert not unreported & ends.keys()
        assert not live & ends.keys()
        assert counts.live == len(live)
        assert counts.admitted == len(ends) + len(live) + len(unreported)


@given(data=st.data())
@settings(max_examples=12, deadline=None, phases=[Phase.generate])
def test_no_sample_is_too_old_whatever_its_tree_and_each_has_one_end(data: st.DataObject):
    draw = data.draw
    number = draw(st.integers(0, 3))
    parents = [draw(st.integers(0, place)) for place in range(number)]
    staleness = draw(st.integers(1, 3))
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder), parents, draw, staleness)
        for step in range(1, 7):
            generated = tree.collect(step)
            check_ages(generated, tree.version, staleness)
            assert max(checked_ages(generated, tree.limits), default=0) <= staleness
            for _ in range(draw(st.integers(0, 8))):
                tree.tree.round(WAKE)
            tree.publish()
            check_ends(tree)
