"""A tree of rollouts over engines in memory: when children begin, what they answer, who is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

import flowrl as fl
from flowrl.backend.protocols import Finished, GenerateRequest, Loaded, Progress, ScoreRequest
from flowrl.data import PromptItem
from flowrl.errors import DataError, WorkerDied
from flowrl.graph import Op
from flowrl.ids import EngineId, GroupId, NodeId, SampleId
from flowrl.rollout.admission import OfferedGroups
from flowrl.rollout.policies.limits import Retries
from flowrl.rollout.policies.prompts import OverSampling
from flowrl.rollout.scheduler import RolloutScheduler
from flowrl.rollout.settings import SchedulerSettings
from flowrl.runtime.driver.child_prompts import ChildPrompts, LongestPrompt
from flowrl.runtime.driver.collected_batch import CollectedBatch, FailureBudget, score_request
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
from flowrl.specs import FinishReason, PromptsSpec
from flowrl.specs.prompts import PromptTemplate
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

    alphabet_key = "roles.actor.tokenizer.alphabet"

    def unknown(self, text: str) -> list[str]:
        return sorted(set(text) & {"~"})

    def encode(self, text: str) -> np.ndarray:
        return np.array([ord(c) for c in text], np.int64)

    def encode_prompt(self, text: str, chat: str) -> np.ndarray:
        assert chat == "never"
        return np.concatenate([[1], self.encode(text)])

    def without_end(self, tokens: np.ndarray) -> np.ndarray:
        return tokens[:-1] if tokens[-1] == EOS else tokens


def made(rule: str | PromptsSpec) -> ChildPrompts:
    (node,) = PARTS.graph.of_op(Op.PROMPTS_OF)
    spec = PromptTemplate(text=rule) if isinstance(rule, str) else rule
    return ChildPrompts(node.with_attrs(spec=spec), Letters())  # type: ignore[arg-type]


def of_one(rule: str | PromptsSpec, payload: Payload) -> PromptItem:
    (item,) = made(rule).items([(SampleId("0/7/1"), payload)])
    return item


PAIRS = PromptTemplate(text="{response}+{opponent}", opponent=1)


def answered(last: int = EOS, finish: FinishReason = FinishReason.STOP) -> Payload:
    (item,) = prompts(1, first=7)
    return Payload(item=item, tokens=np.array([20, 21, last]), finish=finish)


# Prompts


def test_a_childs_prompt_has_the_tokens_of_its_parent_without_the_stop_token():
    item = of_one("{prompt}{response}C{answer}:", answered())
    assert item.prompt_ids.tolist() == [7, 20, 21, *map(ord, "Canswer 7:")]
    assert item.group == "0/7/1"
    assert item.row.answer == "answer 7"
    cut = of_one("{prompt}{response}", answered(22, FinishReason.LENGTH))
    assert cut.prompt_ids.tolist() == [7, 20, 21, 22]


def test_a_text_at_the_beginning_is_the_beginning_of_a_prompt():
    item = of_one("Q{row.index} {response}", answered())
    assert item.prompt_ids.tolist() == [1, *map(ord, "Q7 "), 20, 21]
    assert of_one("{response}!", answered()).prompt_ids[0] == 1


def test_the_longest_prompt_that_a_row_can_have_is_known_before_a_sample():
    row, parent = answered().item.row, LongestPrompt(asked=5, continued=3, sampled=8)
    templates = {
        "{prompt}{response}C{answer}:": 5 + 11 + 10,
        "{response}": 1 + 11,
        PAIRS: 1 + 11 + 1 + 11,
    }
    for template, length in templates.items():
        assert made(template).longest(row, parent) == LongestPrompt(asked=length)
    cuts = {fl.cut.at(2): 2, fl.cut.at(20): 7, fl.cut.share(0.5): 4, fl.cut.least_likely(): 7}
    for cut, before in cuts.items():
        longest = made(cut).longest(row, parent)
        assert (longest.asked, longest.continued) == (5, 3 + before)
    with pytest.raises(DataError, match="'level'"):
        made("{response}{row.level}").longest(row, parent)


def test_strange_characters_in_a_field_of_a_row_are_not_a_matter_of_bad_rows():
    row = replace(answered().item.row, answer="~7")
    with pytest.raises(DataError, match=r"a field of the row .* characters") as caught:
        made("{response}{answer}").longest(row, LongestPrompt(asked=1))
    assert caught.value.found == "'~'"
    hint = "add them to roles.actor.tokenizer.alphabet, or take the row out of the data"
    assert str(caught.value.hint).startswith(hint)


def test_a_pair_is_a_sample_with_another_of_its_group_the_first_following_the_last():
    rows = []
    for first in (7, 8):
        (item,) = prompts(1, first=first)
        for member in range(3):
            payload = Payload(item=item, tokens=np.array([20 + member, EOS]))
            payload.finish = FinishReason.STOP
            rows.append((SampleId(f"{item.group}/{member}"), payload))
    items = made(replace(PAIRS, opponent=2)).items(rows)
    texts = [[1, 20, 43, 22], [1, 21, 43, 20], [1, 22, 43, 21]]
    assert [item.prompt_ids.tolist() for item in items] == texts * 2
    assert [item.group for item in items] == [sample for sample, _ in rows]


def test_a_cut_leaves_the_beginning_of_a_response_as_part_of_the_prompt_and_of_the_response():
    trunk = replace(answered(), logprobs=np.array([-1.0, -2.0, -0.5], np.float32))
    item = of_one(fl.cut.least_likely(), trunk)
    assert item.prompt_ids.tolist() == [7, 20]
    branch = Payload(item=item, tokens=np.array([31, 32, EOS]), finish=FinishReason.STOP)
    assert (branch.asked.tolist(), branch.response.tolist()) == ([7], [20, 31, 32, EOS])
    twig = of_one(fl.cut.at(1), replace(branch, logprobs=np.zeros(3, np.float32)))
    assert (twig.prompt_ids.tolist(), twig.num_continued) == ([7, 20, 31], 2)
    whole = of_one("{prompt}{response}!", branch)
    assert (whole.prompt_ids.tolist(), whole.num_continued) == ([7, 20, 31, 32, ord("!")], 0)
    request = score_request(SampleId("0/7/1/0"), branch)
    assert (list(request.tokens), request.num_tokens) == ([20, 31, 32, EOS], 4)
    assert of_one(fl.cut.at(5), Payload(item=trunk.item)).num_continued == 0


# Collecting


def in_a_tree(
    world: World,
    drafts: Engine,
    critiques: Engine,
    rule: Any = by_member,
    *,
    shared: bool = False,
    template: str | PromptsSpec = "{prompt}{response}C{answer}:",
    **options: Any,
) -> RolloutTree:
    workers = SharedWorkers() if shared else None

    def opened(part: Any, engine: Any) -> OpenRollout:
        own = options if part is DRAFT else {}
        settings = SchedulerSettings(group_size=2, retries=Retries(rewards=2), **own)
        scheduler = RolloutScheduler(settings, validate=True)
        name = EngineId(part.node.id if workers is None else "actor[0]")
        if workers is not None:
            engine = workers.engine(engine, part.node.id)
        driver = driver_of(
            world,
            engine,
            rule,
            engines={name: engine},
            scheduler=scheduler,
            failures=FailureBudget(100),
        )
        of_samples = made(template) if part is CRITIQUE else None
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


def test_the_last_end_of_a_group_admits_its_pairs_while_other_groups_run():
    world = World()
    drafts = Engine(world, ["0/1/0", "0/0/1", "0/1/1", "0/0/0"])
    found = in_a_tree(world, drafts, Engine(world), template=PAIRS)
    draft, critique = found.collect(1, prompts(2))
    log = world.log
    for parent in ("0/1/0", "0/1/1"):
        began = log.index(f"submit {parent}/0")
        assert log.index("stop 0/1/1") < began < log.index("stop 0/0/0")
    assert min(log.index(f"submit 0/0/{i}/0") for i in (0, 1)) > log.index("stop 0/0/0")
    assert [group for group, _ in draft.collected.groups] == ["0/0", "0/1"]
    assert len(critique.collected.groups) == 4


def test_pairs_are_made_of_the_samples_that_a_group_with_spare_ones_keeps():
    world = World()
    found = in_a_tree(
        *(world, Engine(world), Engine(world)),
        template=PAIRS,
        over_sampling=OverSampling(members=1),
    )
    draft, critique = found.collect(1, prompts(2))
    kept = [sample for _, members in draft.collected.groups for sample, _ in members]
    assert len(kept) == 4
    assert [group for group, _ in critique.collected.groups] == kept


@pytest.mark.parametrize(("slots", "waits"), [(64, True), (2, False)])
def test_an_engine_with_free_slots_waits_while_another_of_this_process_may_fill_them(slots, waits):
    world = World()
    in_a_tree(world, Engine(world), Engine(world, slots=slots)).collect(1, prompts(2))
    ends = [line.split()[1] for line in world.log if line.startswith("stop ")]
    drafts = [end.count("/") == 2 for end in ends]
    assert (drafts == sorted(drafts, reverse=True)) is waits


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

    restarts = polls = ends = 0

    def poll(self, timeout_s: float) -> Sequence[Progress | Finished | Loaded]:
        self.polls += 1
        if self.polls == 3:
            raise WorkerDied("the process died")
        return super().poll(timeout_s)

    def restart(self) -> None:
        self.restarts += 1
        self.requests.clear()

    def end(self) -> None:
        self.ends += 1


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


def test_an_engine_that_one_rollout_gives_up_is_closed_until_another_one_restarts_it():
    shared = SharedWorkers()
    engine = Breaking(World())
    first, second = (cast(Any, shared.engine(engine, NodeId(name))) for name in ("a", "b"))
    first.end()
    assert engine.ends == 0  # it works
    engine.polls = 2
    with pytest.raises(WorkerDied):
        first.poll(0.0)
    first.end()
    assert engine.ends == 1
    second.restart()
    first.end()
    assert (engine.restarts, engine.ends) == (1, 1)
