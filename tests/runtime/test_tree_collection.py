"""A tree of rollouts over engines in memory: when children begin, what they answer, who is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import flowrl as fl
from flowrl.backend.protocols import Finished, GenerateRequest, Progress, ScoreRequest
from flowrl.errors import DataError, WorkerDied
from flowrl.graph import Op
from flowrl.ids import GroupId, NodeId, SampleId
from flowrl.rollout import RolloutScheduler, SchedulerSettings
from flowrl.rollout.admission import OfferedGroups
from flowrl.rollout.policies import Retries
from flowrl.runtime.driver.child_prompts import ChildPrompts
from flowrl.runtime.driver.collected_batch import CollectedBatch, FailureBudget
from flowrl.runtime.driver.graph_parts import GraphParts
from flowrl.runtime.driver.payloads import Payload
from flowrl.runtime.driver.rollout_tree import (
    OpenRollout,
    RolloutTree,
    drop_incomplete,
    rollout_trees,
)
from flowrl.runtime.driver.sharing import SharedWorkers
from flowrl.runtime.driver.step_report import GeneratedRollout
from flowrl.specs import FinishReason
from tests.runtime.node_world import lowered
from tests.runtime.test_rollouts import (
    EOS,
    VERIFIER,
    Engine,
    Scoring,
    World,
    by_member,
    driver_of,
    prompts,
)


@fl.workflow
def tree(prompts: fl.Prompts, actor: fl.Policy, critic: fl.Policy, verifier: fl.Reward):
    draft = actor.generate(prompts, n=2)
    critique = critic.generate(fl.prompts_of(draft, template="{prompt}{response}C{answer}:"), n=2)
    scores = fl.mean_of_children(verifier.score(critique))
    actor.update(draft, scores)
    critic.update(critique, advantages=fl.parent(fl.advantage.leave_one_out(scores), of=critique))


PARTS = GraphParts(lowered(tree))
DRAFT, CRITIQUE = PARTS.rollouts


class Letters:
    """A tokenizer: characters as their codes, with 1 in front of a prompt."""

    def encode(self, text: str) -> np.ndarray:
        return np.array([ord(c) for c in text], np.int64)

    def encode_prompt(self, text: str, chat: str) -> np.ndarray:
        assert chat == "never"
        return np.concatenate([[1], self.encode(text)])


def made(template: str) -> ChildPrompts:
    (node,) = PARTS.graph.of_op(Op.PROMPTS_OF)
    spec = replace(node.attr("spec"), text=template)  # type: ignore[arg-type, type-var]
    return ChildPrompts(node.with_attrs(spec=spec), Letters())  # type: ignore[arg-type]


def answered(finish: FinishReason = FinishReason.STOP) -> Payload:
    (item,) = prompts(1, first=7)
    return Payload(item=item, tokens=np.array([20, 21, EOS]), finish=finish)


# Prompts


def test_a_childs_prompt_has_the_tokens_of_its_parent_without_the_stop_token():
    item = made("{prompt}{response}C{answer}:").item(SampleId("0/7/1"), answered())
    assert item.prompt_ids.tolist() == [7, 20, 21, *map(ord, "Canswer 7:")]
    assert item.group == "0/7/1"
    assert item.row.answer == "answer 7"
    cut = made("{prompt}{response}").item(SampleId("0/7/1"), answered(FinishReason.LENGTH))
    assert cut.prompt_ids.tolist() == [7, 20, 21, EOS]


def test_a_text_at_the_beginning_is_the_beginning_of_a_prompt():
    item = made("Q{row.index} {response}").item(SampleId("0/7/1"), answered())
    assert item.prompt_ids.tolist() == [1, *map(ord, "Q7 "), 20, 21]
    assert made("{response}!").item(SampleId("0/7/1"), answered()).prompt_ids[0] == 1


def test_the_longest_prompt_that_a_row_can_have_is_known_before_a_sample():
    row = answered().item.row
    assert made("{prompt}{response}C{answer}:").longest(row, 5, 8) == 5 + 8 + 10
    with pytest.raises(DataError, match="'level'"):
        made("{response}{row.level}").longest(row, 5, 8)


# Collecting


def in_a_tree(
    world: World, drafts: Engine, critiques: Engine, rule: Any = by_member, **shared: Any
) -> RolloutTree:
    workers = SharedWorkers() if shared else None

    def opened(part: Any, engine: Any) -> OpenRollout:
        settings = SchedulerSettings(group_size=2, retries=Retries(rewards=2))
        scheduler = RolloutScheduler(settings, validate=True)
        if workers is not None:
            engine = workers.engine(engine, part.node.id)
        driver = driver_of(world, engine, rule, scheduler=scheduler, failures=FailureBudget(100))
        of_samples = made("{prompt}{response}C{answer}:") if part is CRITIQUE else None
        return OpenRollout(part=part, driver=driver, begin=lambda: None, prompts=of_samples)

    (found,) = rollout_trees([opened(DRAFT, drafts), opened(CRITIQUE, critiques)])
    return found


def test_a_samples_end_admits_its_children_while_others_of_its_group_run():
    world = World()
    drafts = Engine(world, ["0/1/0", "0/0/1", "0/1/1", "0/0/0"])
    critiques = Engine(world)
    draft, critique = in_a_tree(world, drafts, critiques).collect(1, prompts(2))
    log = world.log
    for parent in ("0/1/0", "0/0/1", "0/1/1"):
        began = log.index(f"submit {parent}/0")
        assert log.index(f"stop {parent}") < began < log.index("stop 0/0/0")
    # Batches do not depend on the order of ends.
    assert [group for group, _ in draft.collected.groups] == ["0/0", "0/1"]
    parents = ["0/0/0", "0/0/1", "0/1/0", "0/1/1"]
    assert [group for group, _ in critique.collected.groups] == parents
    assert [item.group for item in critique.items] == parents


def test_children_are_scored_with_their_response_and_the_row_of_the_data():
    world = World()
    found = in_a_tree(world, Engine(world), Engine(world))
    found.collect(1, prompts(1))
    scoring = found.rollouts[1].driver._scorers[VERIFIER]
    assert isinstance(scoring, Scoring)
    request = scoring.requests["0/0/1/1"]
    assert (request.answer, request.row, request.response) == ("answer 0", {"index": 0}, "11 11")


def test_a_reward_that_is_tried_again_makes_no_child_twice():
    world = World()
    tried: set[str] = set()

    def once(request: ScoreRequest) -> float | str:
        if request.sample == "0/0/0" and request.sample not in tried:
            tried.add(request.sample)
            return "not yet"
        return by_member(request)

    _, critique = in_a_tree(world, Engine(world), Engine(world), once).collect(1, prompts(1))
    assert tried
    assert [group for group, _ in critique.collected.groups] == ["0/0/0", "0/0/1"]


def test_a_step_whose_drafts_all_fail_has_an_empty_batch_of_children():
    world = World()

    def never(request: ScoreRequest) -> str:
        return "no"

    draft, critique = in_a_tree(world, Engine(world), Engine(world), never).collect(1, prompts(1))
    drop_incomplete([draft, critique], [])
    assert draft.collected.groups == critique.collected.groups == []
    assert len(draft.collected.dropped) == 2
    began = {line.split()[1] for line in world.log if line.startswith("submit 0/0/0/")}
    assert {sample for sample, _, _ in critique.collected.dropped} >= began


# Who is left


def collected(part: Any, groups: Sequence[str]) -> GeneratedRollout:
    rows = []
    for group in groups:
        (item,) = prompts(1)
        item = replace(item, group=GroupId(group))
        members = [(SampleId(f"{group}/{i}"), Payload(item=item)) for i in (0, 1)]
        rows.append((GroupId(group), members))
    items = [members[0][1].item for _, members in rows]
    return GeneratedRollout(
        part=part, items=items, collected=CollectedBatch(groups=rows), version=0
    )


def left(generated: GeneratedRollout) -> tuple[list[str], dict[str, str]]:
    dropped = {sample: reason for sample, _, reason in generated.collected.dropped}
    return [group for group, _ in generated.collected.groups], dropped


def test_a_group_without_all_its_children_goes_with_the_children_of_its_other_samples():
    draft = collected(DRAFT, ["0/0", "0/1"])
    critique = collected(CRITIQUE, ["0/0/0", "0/0/1", "0/1/1", "0/2/0"])
    drop_incomplete([draft, critique], [])
    assert left(draft) == (["0/0"], {"0/1/0": "no_children", "0/1/1": "no_children"})
    assert left(critique) == (
        ["0/0/0", "0/0/1"],
        dict.fromkeys(("0/2/0/0", "0/2/0/1", "0/1/1/0", "0/1/1/1"), "no_parent"),
    )


def test_where_no_mean_is_taken_parents_need_no_children():
    draft = collected(DRAFT, ["0/0", "0/1"])
    critique = collected(replace(CRITIQUE, completes=False), ["0/0/0"])
    drop_incomplete([draft, critique], [])
    assert left(draft) == (["0/0", "0/1"], {})
    assert left(critique) == (["0/0/0"], {})


# Ids and shared engines


def test_groups_of_children_are_remembered_apart_from_those_of_prompts():
    offered = OfferedGroups()
    for group in ("0/3", "0/3/1", "0/3/1/0", "1/3/1"):
        assert offered.add(GroupId(group))
        assert not offered.add(GroupId(group))
    assert GroupId("0/3/0") not in offered
    again = OfferedGroups.from_json(offered.to_json())
    assert all(GroupId(group) in again for group in ("0/3", "0/3/1", "0/3/1/0", "1/3/1"))
    assert GroupId("1/3") not in again


def test_rollouts_that_share_an_engine_see_their_own_samples():
    world = World()
    engine = Engine(world, slots=8)
    draft, critique = in_a_tree(world, engine, engine, shared=True).collect(1, prompts(2))
    assert len(draft.collected.groups) == 2
    assert len(critique.collected.groups) == 4
    assert engine.requests == {}
    assert f"submit {CRITIQUE.node.id}:0/0/0/1" in world.log


class Breaking(Engine):
    """Breaks at its third poll, and loses what it has."""

    restarts = polls = 0

    def poll(self, timeout_s: float) -> list[Progress | Finished]:
        self.polls += 1
        if self.polls == 3:
            raise WorkerDied("the process died")
        return super().poll(timeout_s)

    def restart(self) -> None:
        self.restarts += 1
        self.requests.clear()


def test_an_engine_that_breaks_under_one_rollout_breaks_under_all_and_is_restarted_once():
    world = World()
    engine = Breaking(world, slots=8)
    draft, critique = in_a_tree(world, engine, engine, shared=True).collect(1, prompts(2))
    assert engine.restarts == 1
    assert len(draft.collected.groups) == 2
    assert len(critique.collected.groups) == 4


def test_a_view_submits_nothing_to_an_engine_that_lost_its_samples():
    shared = SharedWorkers()
    engine = Breaking(World())
    engine.polls = 2
    first, second = (shared.engine(engine, NodeId(name)) for name in ("a", "b"))
    with pytest.raises(WorkerDied, match="the process died"):
        first.poll(0.0)
    requests: Sequence[GenerateRequest] = ()
    with pytest.raises(WorkerDied, match="another rollout"):
        second.submit(requests)
