"""Rollouts that are collected together: one that answers the data's prompts, and its children.

    offer -> draft: sample ends -> its prompt is made, offered -> critique: sample ends -> ...

As soon as the generation of a sample ends, the prompt that is made of it is offered to the driver
of its children, while other samples of its rollout still run; no rollout waits for another. Prompts
of pairs are offered when all samples of a group have ended. Three cases wait until the parents'
batch is delivered: prompts that are made of what a filter keeps, since a verdict comes when scorers
answer, and no batch of an engine may depend on that; a rollout before which the plan moves models
on or off the device; and pairs of a group with spare samples, of which some are left out.

Each rollout has its own scheduler. A group of children answers one parent, and the batch of a step
has the children of all parents of the step. Where a filter has the parents' batch refilled, it is;
children are never refilled, since a parent has its children once. When all batches are there:

- children whose parent was dropped are dropped (`no_parent`);
- where a mean of children is taken for their parents, a parent without its whole group of children
  is dropped with its own group (`no_children`);
- so are groups that lack a counterpart in a rollout with which they are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from flowrl.data import PromptItem
from flowrl.graph import Op
from flowrl.ids import GroupId, NodeId, SampleId, sample_id
from flowrl.runtime.checkpoint.journal import RolloutJournal
from flowrl.runtime.driver.child_prompts import ChildPrompts
from flowrl.runtime.driver.collected_batch import CollectedBatch
from flowrl.runtime.driver.graph_parts import GraphParts, RolloutPart
from flowrl.runtime.driver.payloads import GroupRows, Payload
from flowrl.runtime.driver.rollout_driver import RolloutDriver
from flowrl.runtime.driver.rounds import one_round
from flowrl.runtime.driver.step_report import GeneratedRollout

NO_COUNTERPART = "no_counterpart"
"""Why samples are dropped whose prompt has none in a rollout that theirs is compared with."""
NO_PARENT = "no_parent"
"""Why samples are dropped whose parent was."""
NO_CHILDREN = "no_children"
"""Why a group is dropped of which a sample lacks the children that a mean is taken of."""

Members: TypeAlias = Sequence[tuple[SampleId, Payload]]
ParentOrder: TypeAlias = Callable[[GroupId], tuple[int, int]]
"""Gives the place of the sample that a group's prompt was made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRollout:
    """A rollout of the graph with its driver.

    Attributes:
        begin: Called before each collection (the plan's residency switches).
        switches: True if the plan has such switches, so that it cannot begin while others run.
        prompts: Makes its prompts of samples; None where it answers the data's.
        journal: The journal in which the driver notes events.
    """

    part: RolloutPart
    driver: RolloutDriver
    begin: Callable[[], None]
    switches: bool = False
    prompts: ChildPrompts | None = None
    journal: RolloutJournal | None = None

    @property
    def node(self) -> NodeId:
        """The `generate` or `interact`."""
        return self.part.node.id

    @property
    def waits(self) -> bool:
        """True if its prompts never are offered before the batch of their parents is there."""
        return self.switches or self.part.parents != self.part.parent


def rollout_trees(rollouts: Sequence[OpenRollout]) -> list[RolloutTree]:
    """Returns the rollouts by the rollout at the root, in their order."""
    members: dict[NodeId, list[OpenRollout]] = {}
    for rollout in rollouts:
        parent = rollout.part.parent
        tree = members[rollout.node] = [] if parent is None else members[parent]
        tree.append(rollout)
    return [RolloutTree(tree) for tree in {id(tree): tree for tree in members.values()}.values()]


class RolloutTree:
    """See the module.

    Args:
        rollouts: In the graph's order: parents before their children.

    Attributes:
        scale: Called between two looks: has engines join and leave; returns how much moved.
    """

    def __init__(self, rollouts: Sequence[OpenRollout]) -> None:
        self.rollouts = tuple(rollouts)
        self.scale: Callable[[], int] = lambda: 0
        self._items: dict[NodeId, list[PromptItem]] = {}  # made of samples since the last batch

    @property
    def root(self) -> OpenRollout:
        """The rollout that answers the data's prompts."""
        return self.rollouts[0]

    def describe(self) -> str:
        """Returns who waits for whom, in one line."""
        if len(self.rollouts) == 1:
            return self.root.driver.describe()
        return "; ".join(f"{r.node}: {r.driver.describe()}" for r in self.rollouts)

    def collect(self, number: int, items: Sequence[PromptItem]) -> list[GeneratedRollout]:
        """Collects the batches of a step.

        Args:
            items: Prompts of the data.

        Raises:
            FlowError, KeyboardInterrupt: what `RolloutDriver.collect` raises.
        """
        started = time.monotonic()
        self.begin()
        generated: dict[NodeId, GeneratedRollout] = {}
        for rollout in self.rollouts:
            rollout.driver.begin()
        for rollout in self.rollouts:
            version = rollout.driver.scheduler.version
            rollout.begin()
            if rollout.part.parent is None:
                rollout.driver.offer(items)
                collected = self._collect(rollout, number, len(items))
                offered: Sequence[PromptItem] = (*items, *collected.further)
            else:
                parents = generated[rollout.part.parent]
                if self.waits(rollout):
                    self._admit_of(rollout, parents)
                collected = self._collect(rollout, number, len(self._items[rollout.node]))
                order = order_of_parents(parents.items)
                sort_groups(collected, order)
                offered = self.offered_to(rollout, order)
            generated[rollout.node] = GeneratedRollout(
                part=rollout.part, items=offered, collected=collected, version=version
            )
        seconds = [result.collected.seconds for result in generated.values()]
        spent = sum(s.generate + s.score_wait + s.assemble + s.dispatch for s in seconds)
        seconds[0].collect = max(0.0, time.monotonic() - started - spent)
        return list(generated.values())

    def begin(self) -> None:
        """Begins a step, in which the ends of samples admit their children."""
        self._items = {rollout.node: [] for rollout in self.rollouts}
        self._connect()

    def generated_with(self, rollout: OpenRollout) -> list[OpenRollout]:
        """Returns a rollout and those whose prompts are offered while it is generated."""
        found = [rollout]
        for other in self.rollouts:
            if other.part.parent in [r.node for r in found] and not self.waits(other):
                found.append(other)
        return found

    def offered_to(self, rollout: OpenRollout, order: ParentOrder) -> list[PromptItem]:
        """Returns the prompts made of samples that a rollout was offered in this step."""
        return sorted(self._items[rollout.node], key=lambda item: order(item.group))

    def _connect(self) -> None:
        """Has the ends of samples admit their children."""
        for rollout in self.rollouts:
            children = [r for r in self.children_of(rollout) if not self.waits(r)]
            rollout.driver.on_generated = (
                partial(self._admit_to, rollout, children) if children else None
            )

    def children_of(self, rollout: OpenRollout) -> list[OpenRollout]:
        """Returns the rollouts whose prompts are made of a rollout's samples."""
        return [other for other in self.rollouts if other.part.parent == rollout.node]

    def _collect(self, rollout: OpenRollout, number: int, groups: int) -> CollectedBatch:
        """Collects a rollout whose prompts are all there, while those after it go on."""
        driver = rollout.driver
        if not groups:
            return CollectedBatch(version=driver.scheduler.version)
        driver.request(number, groups)
        together = [other.driver for other in self.rollouts]
        driver.run(lambda: driver.has_settled(number), lambda: self.scale() + one_round(together))
        return driver.take(number)

    def waits(self, rollout: OpenRollout) -> bool:
        """True if its prompts are offered when the batch of their parents is there; see above."""
        if rollout.prompts is None or not rollout.prompts.reads_groups:
            return rollout.waits
        (parents,) = (r for r in self.rollouts if r.node == rollout.part.parent)
        settings = parents.driver.scheduler.settings
        return rollout.waits or settings.num_members > settings.group_size

    def _admit_to(
        self, parents: OpenRollout, children: Sequence[OpenRollout], rows: Members
    ) -> None:
        pairs = {c.node for c in children if c.prompts is not None and c.prompts.reads_groups}
        whole = self._whole(parents, rows) if pairs else ()
        for child in children:
            self._admit(child, whole if child.node in pairs else rows)

    def _whole(self, parents: OpenRollout, rows: Members) -> Members:
        """Returns the members of the groups of which these samples were the last to end."""
        whole: list[tuple[SampleId, Payload]] = []
        size, store = parents.driver.scheduler.settings.group_size, parents.driver.store
        for group in dict.fromkeys(payload.item.group for _, payload in rows):
            names = [sample_id(group, member) for member in range(size)]
            members = [(name, store.get(name)) for name in names]
            ended = [(name, each) for name, each in members if each is not None and each.has_ended]
            whole += ended if len(ended) == size else []
        return whole

    def _admit_of(self, child: OpenRollout, parents: GeneratedRollout) -> None:
        """Offers the prompts that are made of a batch that is there."""
        groups = _parents(child.part, parents)
        self._admit(child, [row for _, members in groups for row in members])

    def _admit(self, child: OpenRollout, rows: Members) -> None:
        """Offers the prompts that are made of samples; once, however often rewards are tried."""
        offered = child.driver.was_offered
        fresh = [(sample, p) for sample, p in rows if not offered(GroupId(sample))]
        assert child.prompts is not None
        items = child.prompts.items(fresh)
        self._items.setdefault(child.node, []).extend(items)
        child.driver.offer(items)


def order_of_parents(parents: Sequence[PromptItem]) -> ParentOrder:
    """Returns the order of groups by their parents, whichever of these ended first.

    So what is learned depends on no order of ends.

    Args:
        parents: The prompts that the parents answered.
    """
    places = {item.group: place for place, item in enumerate(parents)}

    def place_of(group: GroupId) -> tuple[int, int]:
        of_parent, _, member = group.rpartition("/")
        return places[GroupId(of_parent)], int(member)

    return place_of


def sort_groups(collected: CollectedBatch, order: ParentOrder) -> None:
    """Puts the groups of a batch in the order of their parents."""
    collected.groups.sort(key=lambda row: order(row[0]))
    collected.filtered.sort(key=lambda row: order(row[1].item.group))


# What is left when all batches are there.


def drop_incomplete(
    generated: Sequence[GeneratedRollout], joined: Sequence[Collection[NodeId]]
) -> None:
    """Drops groups that lack what they are learned with; see the module.

    Args:
        generated: Rollouts, with the parents of each.
        joined: Rollouts whose groups are compared with each other.
    """
    by_node = {result.part.node.id: result for result in generated}
    dropped = True
    while dropped:
        dropped = False
        for reason, result, gone in _incomplete(by_node, joined):
            if gone:
                _drop(result.collected, gone, reason)
                dropped = True


def _incomplete(
    by_node: Mapping[NodeId, GeneratedRollout], joined: Sequence[Collection[NodeId]]
) -> Iterator[tuple[str, GeneratedRollout, set[GroupId]]]:
    """Yields the groups of a rollout that lack something, and the reason to drop them."""
    for nodes in joined:
        together = [by_node[node] for node in nodes if node in by_node]
        if not together:
            continue  # line by line, others may be there already
        alive = set.intersection(*(set(members_of(result.collected)) for result in together))
        for result in together:
            yield NO_COUNTERPART, result, set(members_of(result.collected)) - alive
    for result in by_node.values():
        parents = by_node.get(result.part.parent) if result.part.parent is not None else None
        if parents is None:
            continue
        samples = {
            sample: group for group, rows in _parents(result.part, parents) for sample, _ in rows
        }
        own = set(members_of(result.collected))
        yield NO_PARENT, result, {group for group in own if SampleId(group) not in samples}
        if result.part.completes:
            lacking = {group for sample, group in samples.items() if GroupId(sample) not in own}
            yield NO_CHILDREN, parents, lacking


def _parents(part: RolloutPart, parents: GeneratedRollout) -> list[GroupRows]:
    """Returns the groups of the samples that a rollout's prompts are made of, in offer order."""
    members = dict(parents.collected.groups)
    if part.parents == part.parent:  # of all, those that its filters removed too
        members = members_of(parents.collected)
    return [(item.group, members[item.group]) for item in parents.items if item.group in members]


def _drop(collected: CollectedBatch, gone: Collection[GroupId], reason: str) -> None:
    for group, members in collected.groups:
        if group in gone:
            collected.dropped += [(sample, payload, reason) for sample, payload in members]
    collected.dropped += [(s, p, reason) for s, p, _ in collected.filtered if p.item.group in gone]
    filtered = [row for row in collected.filtered if row[1].item.group not in gone]
    collected.num_filtered_groups = len({payload.item.group for _, payload, _ in filtered})
    collected.filtered = filtered
    collected.groups = [row for row in collected.groups if row[0] not in gone]


def joined_rollouts(parts: GraphParts) -> list[set[NodeId]]:
    """Returns the sets of rollouts whose groups a node combines: a baseline, or a map of both."""
    together: list[set[NodeId]] = []
    for node in parts.batch:
        reads = parts.graph.in_edges(node.id)
        origins = {parts.origin(edge.src) for edge in reads if not edge.carried}
        if len(origins) < 2 or node.op not in (Op.ADVANTAGE, Op.MAP):
            continue
        for other in [other for other in together if other & origins]:
            together.remove(other)
            origins |= other
        together.append(origins)
    return together


def members_of(collected: CollectedBatch) -> dict[GroupId, Members]:
    """Returns the members of delivered and of filtered groups."""
    filtered: dict[GroupId, list[tuple[SampleId, Payload]]] = {}
    for sample, payload, _ in collected.filtered:
        filtered.setdefault(payload.item.group, []).append((sample, payload))
    return {**dict(collected.groups), **filtered}
