"""Random programs: what a learner is taught, in words; and the graph that saying so makes."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

import flowrl as fl
from flowrl.graph import Graph
from flowrl.passes import Context
from flowrl.specs import GroupRelative, LossSpec, PolicyClip, Sampling

__all__ = ["Lesson", "contexts", "programs", "traced"]

DATA = {"prompts": fl.Prompts, "examples": fl.Examples, "pairs": fl.Pairs}
ROLES = {
    "actor": fl.Policy,
    "student": fl.Policy,
    "teacher": fl.Policy,
    "reference": fl.Policy,
    "twin": fl.Policy,
    "judge": fl.Reward,
    "scorer": fl.RewardModel,
    "critic": fl.Critic,
    "game": fl.Environment,
}
COPIES = {"twin": "reference"}


@dataclass(frozen=True)
class Lesson:
    """One set of samples and the updates on it.

    Attributes:
        samples: `examples` or `pairs` of the data, or what `generator` draws (the learner where
            it is None): a `rollout`, or `episodes`.
        replay: Whether it learns from samples of earlier steps; the loss then corrects for it.
        judged: `rewards` leaves the advantage to the config, `advantages` gives one a sample,
            `two rewards` of the sum of two, `tokens` one a token, `penalised tokens` with a KL
            penalty in the reward, `critic` those of a critic that learns too, `turns` of episodes,
            `children` by what the teacher makes of each sample, from which the teacher learns.
        loss: None takes the config's.
        old: Whether the program passes the old logprobs itself.
        kl: Coefficient of a penalty; None without one.
        references: Whose logprobs it is measured with; of several roles, the last one's.
        log: Whether the scores are logged.
        every: Steps between updates.
        joined: Whether the learner's update is a term of one sum with its update before.
        again: Whether the new version's logprobs of the same samples are logged after the update.
    """

    learner: str
    samples: str = "rollout"
    generator: str | None = None
    n: int | None = None
    temperature: float | None = None
    sampling: Sampling | None = None
    subset: str | None = None
    replay: bool = False
    judged: str = "rewards"
    std: str = "group"
    loss: str | None = None
    old: bool = False
    kl: float | None = None
    references: tuple[str, ...] = ("reference",)
    log: bool = False
    again: bool = False
    every: int = 1
    joined: bool = False


learners = st.sampled_from(["actor", "student"])
from_data = st.builds(
    Lesson,
    learner=learners,
    samples=st.sampled_from(["examples", "pairs"]),
    joined=st.booleans(),
)
on_rollouts = st.builds(
    Lesson,
    learner=learners,
    samples=st.sampled_from(["rollout", "rollout", "episodes"]),
    generator=st.sampled_from([None, None, None, "actor", "student", "teacher"]),
    n=st.sampled_from([None, 2, 5]),
    temperature=st.sampled_from([None, 0.5]),
    sampling=st.sampled_from([None, None, Sampling(top_p=0.5, max_tokens=3)]),
    subset=st.sampled_from([None, "filter", "top", "threshold", "pairs", "solutions"]),
    replay=st.booleans(),
    judged=st.sampled_from(
        [
            "rewards",
            "advantages",
            "two rewards",
            "tokens",
            "penalised tokens",
            "critic",
            "turns",
            "children",
        ]
    ),
    std=st.sampled_from(["group", "none"]),
    loss=st.sampled_from([None, "policy_clip", "cross_entropy", "old", "old", "decoupled"]),
    old=st.booleans(),
    kl=st.sampled_from([None, 0.0, 0.2]),
    references=st.sampled_from(
        [("reference",), ("teacher",), ("reference", "twin"), ("twin", "reference", "twin")]
    ),
    log=st.booleans(),
    again=st.booleans(),
    joined=st.booleans(),
    every=st.sampled_from([1, 1, 2]),
)
programs = st.lists(st.one_of(from_data, on_rollouts), min_size=1, max_size=3)
contexts = st.builds(
    Context,
    group_size=st.integers(2, 4),
    mini_batches=st.integers(1, 2),
    sampling=st.builds(Sampling, temperature=st.sampled_from([0.7, 1.0])),
    advantage=st.builds(GroupRelative, std=st.sampled_from(["group", "batch", "none"])),
    loss=st.builds(PolicyClip, clip_low=st.just(0.2), clip_high=st.sampled_from([0.2, 0.3])),
    truncated=st.just("ignore"),
    trust_rollout_logprobs=st.booleans(),
    shares_weights=st.just({"actor": True, "student": False}),
    copies=st.just(COPIES),
)

LOSSES: dict[str, LossSpec] = {
    "policy_clip": fl.loss.policy_clip(0.1),
    "cross_entropy": fl.loss.cross_entropy(),
    "old": fl.loss.policy_clip(0.1, anchor="old"),
    "decoupled": fl.loss.policy_clip(0.1, correction=fl.loss.truncate(2.0)),
}


def traced(lessons: list[Lesson], refresh: int | None = None) -> Graph:
    """The graph of a workflow that prepares all lessons, and then gives them in order.

    Args:
        refresh: Steps after which the reference takes over the weights of the first learner.
    """

    def program(**handles: Any) -> None:
        prepared = [(lesson, update) for lesson in lessons for update in _prepare(lesson, handles)]
        for joined in _joined(prepared):
            lesson, (role, batch, arguments) = joined[-1]
            if len(joined) > 1:
                terms = [0.5 * fl.term(samples, **given) for _, (_, samples, given) in joined]
                new = handles[role].update(fl.sum(*terms), every=lesson.every)
            else:
                new = handles[role].update(batch, **arguments, every=lesson.every)
            if lesson.again:
                pass_ = new.values if role == "critic" else new.logprobs
                fl.log(_name("again", handles), pass_(batch))
        # Weights that nothing uses are refused.
        asked = {node.role for node in handles["reference"]._tracer.nodes}
        if refresh is not None and "reference" in asked:
            handles["reference"].sync(handles[lessons[0].learner], every=refresh)

    # Data that a workflow does not use are refused.
    used = {"prompts" if _draws(lesson) else lesson.samples for lesson in lessons}
    kinds = {name: kind for name, kind in {**DATA, **ROLES}.items() if name in used | set(ROLES)}
    keyword = inspect.Parameter.KEYWORD_ONLY
    program.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, keyword, annotation=kind) for name, kind in kinds.items()]
    )
    program.__annotations__ = kinds
    return fl.workflow(program).trace()


Prepared = tuple[Lesson, tuple[str, Any, dict[str, Any]]]


def _joined(prepared: list[Prepared]) -> list[list[Prepared]]:
    """The updates, with those of one sum together."""
    groups: list[list[Prepared]] = []
    for lesson, update in prepared:
        policy = update[0] == lesson.learner
        if lesson.joined and policy and groups and groups[-1][-1][1][0] == update[0]:
            groups[-1].append((lesson, update))
        else:
            groups.append([(lesson, update)])
    return groups


def _draws(lesson: Lesson) -> bool:
    return lesson.samples in ("rollout", "episodes")


def _prepare(lesson: Lesson, handles: dict[str, Any]) -> list[tuple[str, Any, dict[str, Any]]]:
    """The updates of a lesson: role, samples and arguments."""
    learner = lesson.learner
    if lesson.samples == "examples":
        return [(learner, handles["examples"], {})]
    if lesson.samples == "pairs":
        return [_by_preference(learner, handles["pairs"], handles)]
    rollout, scores = _draw(lesson, handles)
    if lesson.log:
        fl.log(_name("score", handles), scores)
    if lesson.subset == "pairs":
        return [_by_preference(learner, fl.select.best_and_worst(rollout, scores), handles)]
    if lesson.subset == "solutions":
        fl.log(_name("seen", handles), scores)  # an output that nothing uses is refused
        solutions = fl.Examples.of(handles["prompts"])
        return [_by_preference(learner, fl.pair(preferred=solutions, other=rollout), handles)]
    if lesson.subset == "filter":
        rollout, scores = fl.filter.zero_variance(rollout, scores)
    elif lesson.subset == "top":
        rollout, scores = fl.select.top(rollout, scores, k=2)
    elif lesson.subset == "threshold":
        rollout, scores = fl.select.threshold(rollout, scores, at_least=0.5)
    if _replays(lesson):
        rollout, scores = fl.replay(rollout, scores, n=2)
    updates, arguments = _judge(lesson, rollout, scores, handles)
    if lesson.kl is not None:
        given = [handles[name].logprobs(rollout) for name in lesson.references]
        for number, logprobs in enumerate(given[:-1]):
            fl.log(_name(f"reference.{number}", handles), logprobs)
        arguments |= {"reference": given[-1], "kl": fl.kl.k3(lesson.kl)}
    if lesson.loss is not None:
        arguments["loss"] = LOSSES[lesson.loss]
    if lesson.old and lesson.loss in ("old", "decoupled"):
        arguments["old"] = handles[learner].logprobs(rollout)
    return [*updates, (learner, rollout, arguments)]


def _replays(lesson: Lesson) -> bool:
    return lesson.replay and lesson.loss in (None, "policy_clip", "decoupled")


def _name(name: str, handles: dict[str, Any]) -> str:
    """A name that no other lesson logs under."""
    return f"{name}.{len(handles['reference']._tracer.nodes)}"


def _by_preference(learner: str, pairs: Any, handles: dict[str, Any]) -> tuple[str, Any, Any]:
    reference = handles["reference"].logprobs(pairs)
    return learner, pairs, {"reference": reference, "loss": fl.loss.dpo(0.1)}


def _draw(lesson: Lesson, handles: dict[str, Any]) -> tuple[Any, Any]:
    options = {} if lesson.temperature is None else {"temperature": lesson.temperature}
    if lesson.sampling is not None:
        options = {"sampling": lesson.sampling}
    policy, prompts = handles[lesson.generator or lesson.learner], handles["prompts"]
    if lesson.samples == "episodes":
        game = handles["game"]
        return fl.interact(policy, game, prompts, n=lesson.n, max_turns=2, **options)
    rollout = policy.generate(prompts, n=lesson.n, **options)
    return rollout, handles["judge"].score(rollout)


def _judge(
    lesson: Lesson, rollout: Any, scores: Any, handles: dict[str, Any]
) -> tuple[list[tuple[str, Any, dict[str, Any]]], dict[str, Any]]:
    """Updates of other roles, and the weights of the learner's samples."""
    if lesson.loss == "cross_entropy":
        fl.log(_name("seen", handles), scores)  # an output that nothing uses is refused
        return [], {}
    match lesson.judged:
        case "rewards":
            return [], {"rewards": scores}
        case "two rewards":
            more = handles["scorer"].score(rollout)
            scores = fl.weighted_sum((scores, 1.0), (more, 0.5))
            return [], {"rewards": scores}
        case "tokens":
            return [], {"advantages": fl.advantage.reinforce_pp(scores, rollout)}
        case "penalised tokens":
            penalty = {"reference": handles[lesson.references[0]].logprobs(rollout), "kl": 0.1}
            return [], {"advantages": fl.advantage.reinforce_pp(scores, rollout, **penalty)}
        case "turns" if lesson.samples == "episodes":
            return [], {"advantages": fl.advantage.group_in_group(scores, rollout)}
        case "children" if (
            lesson.samples == "rollout"
            and lesson.subset in (None, "filter")
            and not _replays(lesson)
        ):
            fl.log(_name("seen", handles), scores)
            prompts = fl.prompts_of(rollout, template="{prompt}{response}?")
            critique = handles["teacher"].generate(prompts, n=lesson.n)
            scores = fl.mean_of_children(handles["judge"].score(critique))
            advantages = fl.advantage.group_relative(scores, std=lesson.std)
            back = {"advantages": fl.parent(advantages, of=critique)}
            return [("teacher", critique, back)], {"advantages": advantages}
        case "critic":
            values = handles["critic"].values(rollout)
            again = handles["critic"].values(rollout)
            advantages, returns = fl.advantage.gae(scores, values, rollout)
            update = ("critic", rollout, {"returns": returns, "values": again})
            return [update], {"advantages": advantages}
        case _:
            return [], {"advantages": fl.advantage.group_relative(scores, std=lesson.std)}
