"""Checks of sizes that the program and the configuration decide together.

`flowrl.config.check` has looked at the configuration alone. Here a size may also come from
the program (`generate(prompts, n=4)`), and the program decides what its sizes must be. Every
message names both numbers, where each comes from (a line of the program, of a file, or an
override) and the nearest values that would do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from flowrl.compiler.lowering import LoweredStage
from flowrl.compiler.role_backends import RoleBackends
from flowrl.config.check import least_prompt_tokens
from flowrl.config.load import LoadedConfig
from flowrl.config.problems import Problems
from flowrl.config.rewards import OverlongTerm
from flowrl.config.roles import FreshModel
from flowrl.errors import ConfigError, raise_all
from flowrl.graph import Graph, Node, Op, sample_sets
from flowrl.graph.sample_sets import answered_prompts, origin_of, parents_of, sample_edges
from flowrl.ids import NodeId
from flowrl.specs import AdvantageSpec, LossSpec, Sampling
from flowrl.specs.filters import SelectSpec, ZeroVariance
from flowrl.specs.prompts import PromptTemplate
from flowrl.wording import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class _Size:
    """A number, how it is written, and where.

    Attributes:
        key: Its key in the config; None where the program gives the number.
    """

    value: int
    written: str
    where: str
    key: str | None

    def become(self, value: int) -> str:
        """Returns the hint that makes it another number."""
        name = self.written.partition("=")[0]
        return f"set {self.key}={value}" if self.key else f"write {name}={value}"


def check_sizes(stages: Sequence[LoweredStage], role_backends: RoleBackends) -> None:
    """Checks the sizes of all stages.

    Raises:
        ConfigError: One error for all that is wrong: the first in full, the others by name.
    """
    of_stages = (check(stage, role_backends) for stage in stages for check in _CHECKS)
    of_rewards = _penalties_are_met(stages, role_backends.loaded)
    raise_all(chain(*of_stages, of_rewards))


def compares_a_group(spec: AdvantageSpec) -> bool:
    """True if a sample's advantage is 0 wherever all scores of its group are equal."""
    centred = getattr(spec, "mean", "group") in ("group", "group_others")
    return centred and getattr(spec, "singleton", "raw") == "zero"


def generates_before(graph: Graph, node: Node) -> Iterator[Node]:
    """Yields the generations of the samples whose scores a node reads.

    Those that their prompts are made of are others, and so are parents or children whose values
    were taken to these samples.
    """
    seen, waiting = {node.id}, [node.id]
    while waiting:
        at = graph.node(waiting.pop())
        for edge in graph.in_edges(at.id):
            # A baseline is of samples of its own, one a prompt by design.
            if edge.carried or edge.src in seen or edge.argument == "baseline":
                continue
            between = at.op in (Op.PARENT, Op.MEAN_OF_CHILDREN) and edge.argument == "input"
            if between or at.op is Op.PROMPTS_OF:
                continue
            seen.add(edge.src)
            waiting.append(edge.src)
    yield from (generate for generate in graph.of_op(Op.GENERATE) if generate.id in seen)


def _sets_of_groups(graph: Graph, node: Node) -> tuple[list[Node], Counter[NodeId | None]]:
    """Returns the sets whose samples a node's groups have, and how many answer the same prompts.

    Groups of `fl.concat` have the samples of all its sets that answer the prompt.
    """
    sets = sample_sets(graph)
    maker = origin_of(graph, graph.node(sets[node.id]))
    joined = sample_edges(graph, maker) if maker.op is Op.CONCAT else ()
    # Parts of one rollout do not meet: they are of different rows.
    parts = [origin_of(graph, graph.node(sets[edge.src])) for edge in joined] or [maker]
    parts = list({part.id: part for part in parts}.values())
    return parts, Counter(answered_prompts(graph, part) for part in parts)


def _alone_before(graph: Graph, node: Node) -> Iterator[Node]:
    """Yields the generations before a node whose samples have the groups to themselves."""
    parts, asked = _sets_of_groups(graph, node)
    meeting = {
        generate.id
        for part in parts
        if (prompts := answered_prompts(graph, part)) is not None and asked[prompts] > 1
        for generate in graph.generators_of(part)
    }
    yield from (each for each in generates_before(graph, node) if each.id not in meeting)


def _space(graph: Graph, generate: Node, role_backends: RoleBackends) -> tuple[int, int] | None:
    """Returns the tokens that a sample may have, and those of the shortest prompt.

    Prompts that are too long are left out, so only what all of them need is certain.

    Returns:
        None where the model of the role does not say how long its samples may be.
    """
    role = str(generate.role)
    limit = role_backends.longest(role)
    if limit is None:
        return None
    template = _template(graph, generate)
    if template is not None and not template.begins_with_prompt:
        return limit, 1
    is_fresh = isinstance(role_backends.roles[role_backends.source(role)].model, FreshModel)
    return limit, least_prompt_tokens(role_backends.loaded)[0] if is_fresh else 1


def _template(graph: Graph, generate: Node) -> PromptTemplate | None:
    """Returns the template of the prompts that a rollout answers; None for prompts of data."""
    prompts = answered_prompts(graph, generate)
    spec = None if prompts is None else graph.node(prompts).attr("spec")
    return spec if isinstance(spec, PromptTemplate) else None


def _places(*places: str | None) -> str:
    return " and ".join(dict.fromkeys(filter(None, places)))


def _line(node: Node) -> str:
    return f"{node.source} ({node.id})" if node.source is not None else ""


# Groups and pairs.


def _groups_suffice(stage: LoweredStage, role_backends: RoleBackends) -> Problems:
    reported: set[str] = set()
    for node in stage.graph.nodes:
        reason = _needs_two(node)
        for generate in _alone_before(stage.graph, node) if reason else ():
            size = _size(role_backends.loaded, stage, generate, "n", "train.group_size")
            # Several operations may want the same larger groups.
            if size is None or size.value > 1 or generate.id in reported:
                continue
            reported.add(generate.id)
            hint = size.become(2)
            if parents_of(stage.graph, generate) is not None:
                hint += (
                    "; or compare the parents with each other: fl.mean_of_children(scores), and "
                    "fl.parent(advantages, of=rollout) takes the result back"
                )
            yield ConfigError(
                f"{node.id} {reason}, but {size.written} gives each prompt a group of one",
                where=_places(size.where, _line(node)),
                expected="at least 2 samples a prompt",
                hint=hint,
            )


def _examples_meet_samples(stage: LoweredStage, role_backends: RoleBackends) -> Problems:
    """Checks that examples that are compared in groups answer the prompts of other samples."""
    graph = stage.graph
    for node in graph.nodes:
        reason = _needs_two(node)
        parts, asked = _sets_of_groups(graph, node) if reason else ([], Counter())
        for part in parts:
            prompts = answered_prompts(graph, part)
            if part.attr("data") != "examples" or (prompts is not None and asked[prompts] > 1):
                continue
            yield ConfigError(
                f"{node.id} {reason}, and no other samples answer the prompts of '{part.id}'",
                where=_places(_line(part), _line(node)),
                expected="several samples a prompt",
                hint="join them with a rollout of the same prompts: fl.Examples.of(prompts)",
            )


def _selections_leave_some(stage: LoweredStage, role_backends: RoleBackends) -> Problems:
    """Checks that a selection leaves fewer samples than there are, and enough to compare."""
    graph = stage.graph
    sets = sample_sets(graph)
    for node in graph.nodes:
        reason, maker = _needs_two(node), graph.node(sets[node.id])
        if maker.op is Op.REPLAY and (replayed := graph.feeding(maker.id, "rollout")) is not None:
            maker = graph.node(sets[replayed.src])
        if node.op is not Op.SELECT and reason and _kept(maker) == 1:
            yield ConfigError(
                f"{node.id} {reason}, but {maker.id} keeps one sample of each group (k=1)",
                where=_places(_line(maker), _line(node)),
                expected="at least 2 samples a prompt",
                hint="write k=2, or learn the selected samples with loss=fl.loss.cross_entropy()",
            )
        kept = _kept(node)
        for generate in _alone_before(graph, node) if kept else ():
            size = _size(role_backends.loaded, stage, generate, "n", "train.group_size")
            if size is None or kept <= size.value:
                continue
            yield ConfigError(
                f"{node.id} keeps {kept} samples of each group, but {size.written} gives it "
                f"{size.value}",
                where=_places(size.where, _line(node)),
                expected=f"k of at most {size.value}",
                hint=f"write k={size.value}, or {size.become(kept)}",
            )


def _kept(node: Node) -> int:
    """Returns the samples of each group that a selection keeps; 0 for other nodes and pairs."""
    kept = getattr(node.attr("spec"), "k", 0) if node.op is Op.SELECT else 0
    return kept if isinstance(kept, int) else 0


def _needs_two(node: Node) -> str | None:
    """Returns what a node does that a group of one is too small for."""
    match node.attr("spec"):
        case AdvantageSpec() as spec if compares_a_group(spec):
            return "compares the samples of a group, and a lone one gets the advantage 0"
        case ZeroVariance(singleton="remove"):
            return "removes groups whose scores do not differ"
        case SelectSpec(pairs=True):
            return "makes a pair of each group"
        case _:
            return None


def _pairs_stay_whole(stage: LoweredStage, role_backends: RoleBackends) -> Problems:
    loaded = role_backends.loaded
    key = f"{stage.prefix}train.micro_batch"
    size = stage.config.train.micro_batch
    for node in stage.graph.of_op(Op.UPDATE):
        loss = node.attr("loss")
        if not isinstance(loss, LossSpec) or not loss.pairs or size % 2 == 0:
            continue
        nearest = [str(even) for even in (size - 1, size + 1) if even]
        yield ConfigError(
            f"{node.id} compares the two samples of a pair ({loss.kind}), and {key}={size} would "
            "separate a pair",
            where=_places(loaded.where_all(key), str(node.source or "")) or None,
            found=loaded.defaults_among(key),
            expected="an even number of samples in a micro-batch",
            hint=f"nearest: {key}={' or '.join(nearest)}",
        )


# Lengths.


def _responses_may_stop(stage: LoweredStage, role_backends: RoleBackends) -> Problems:
    for node in stage.graph.of_op(Op.GENERATE):
        least = _size(role_backends.loaded, stage, node, "min_tokens")
        most = _size(role_backends.loaded, stage, node, "max_tokens")
        if least is None or most is None or least.value <= most.value:
            continue
        if least.key and most.key:
            continue  # the check of the configuration reports it
        yield ConfigError(
            f"{node.id} has {least.written} above {most.written}, so that no response could stop",
            where=_places(least.where, most.where),
            hint=f"{least.become(most.value)}, or {most.become(least.value)}",
        )


def _responses_fit(stage: LoweredStage, role_backends: RoleBackends) -> Problems:
    for node in stage.graph.of_op(Op.GENERATE):
        space = _space(stage.graph, node, role_backends)
        most = _size(role_backends.loaded, stage, node, "max_tokens")
        if space is None or most is None:
            continue
        limit, prompt = space
        if prompt + most.value > limit:
            yield ConfigError(
                f"{node.id} generates responses of {most.written}, which with prompts of "
                f"{counted(prompt, 'token')} or more do not fit the model of role "
                f"{str(node.role)!r}",
                where=_places(most.where, role_backends.loaded.where(f"roles.{node.role}.model")),
                expected=f"at most {limit} tokens, prompt and response together",
                hint=most.become(limit - prompt) if limit > prompt else "a longer model is needed",
            )


def _episodes_fit(stage: LoweredStage, role_backends: RoleBackends) -> Problems:
    """Checks that an episode of all its turns fits, with a token for each and one in between."""
    for episode in stage.graph.of_op(Op.INTERACT):
        turns = episode.attr("max_turns")
        for generate in stage.graph.of_op(Op.GENERATE):
            space = _space(stage.graph, generate, role_backends)
            if generate.region != episode.region or space is None or not isinstance(turns, int):
                continue
            limit, prompt = space
            if prompt + 2 * turns - 1 <= limit:
                continue
            key = f"roles.{generate.role}.model"
            most = (limit - prompt + 1) // 2
            yield ConfigError(
                f"{episode.id} has up to max_turns={turns}, which with prompts of "
                f"{counted(prompt, 'token')} or more cannot fit the model of role "
                f"{str(generate.role)!r}",
                where=_places(_line(episode), role_backends.loaded.where(key)),
                found=f"{prompt + 2 * turns - 1} tokens where each turn and each observation is "
                "one token",
                expected=f"at most {limit} tokens, the whole episode together",
                hint=f"write max_turns={most}" if most else "a longer model is needed",
            )


_CHECKS: tuple[Callable[[LoweredStage, RoleBackends], Problems], ...] = (
    _groups_suffice,
    _examples_meet_samples,
    _selections_leave_some,
    _pairs_stay_whole,
    _responses_may_stop,
    _responses_fit,
    _episodes_fit,
)


def _penalties_are_met(stages: Sequence[LoweredStage], loaded: LoadedConfig) -> Problems:
    """Checks that every length penalty begins at a length that a response can have."""
    longest: dict[str, _Size] = {}
    for stage in stages:
        for generate in stage.graph.of_op(Op.GENERATE):
            most = _size(loaded, stage, generate, "max_tokens")
            for score in stage.graph.of_op(Op.SCORE):
                role = str(score.role)
                if most is not None and (role not in longest or longest[role].value < most.value):
                    longest[role] = most
    for role, most in longest.items():
        terms, terms_key = loaded.config.terms_of(role)
        for index, term in enumerate(terms):
            if not isinstance(term, OverlongTerm):
                continue
            begins = term.max_tokens - term.buffer
            if begins >= most.value:
                key = f"{terms_key}.{index}"
                yield ConfigError(
                    f"the penalty {term.name!r} begins above {begins} tokens (max_tokens="
                    f"{term.max_tokens} - buffer={term.buffer}), and responses have at most "
                    f"{most.written}",
                    where=f"{loaded.where(key)} and {most.where}",
                    hint=f"set {key}.max_tokens={most.value} with a buffer, or fewer",
                )


def _size(
    loaded: LoadedConfig, stage: LoweredStage, node: Node, name: str, key: str | None = None
) -> _Size | None:
    """Returns a size of a generation: `n`, or an option of its sampling; None if it has none."""
    value = node.attr("n") if name == "n" else getattr(node.attr("sampling"), name, None)
    if not isinstance(value, int):
        return None
    said = next((said for said in stage.traced.nodes if said.id == node.id), node)
    if said.attr(name) is not None or (name != "n" and isinstance(said.attr("sampling"), Sampling)):
        where = _line(said) or str(said.id)
        return _Size(value=value, written=f"{name}={value}", where=where, key=None)
    key = f"{stage.prefix}{key or f'train.sampling.{name}'}"
    where = loaded.where(key) if loaded.is_set(key) else f"{key} at its default"
    return _Size(value=value, written=f"{key}={value}", where=where, key=key)
