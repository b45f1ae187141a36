"""Sizes that the program and the configuration decide together: what must suffice, fit and divide.

`flowrl.config.check` has looked at the configuration alone. Here a size may also come from
the program (`generate(prompts, n=4)`), and what a program does says what its sizes must be. Every
message names both numbers, where each comes from (a line of the program, of a file, or an
override) and the nearest values that would do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from flowrl.config.check import least_prompt_tokens
from flowrl.config.load import LoadedConfig
from flowrl.config.problems import Problems
from flowrl.config.rewards import OverlongTerm
from flowrl.config.roles import FreshModel
from flowrl.errors import ConfigError, combine
from flowrl.graph import Graph, Node, Op, sample_sets
from flowrl.specs import AdvantageSpec, LossSpec, Sampling, ZeroVariance
from flowrl.specs.filters import SelectSpec
from flowrl.wording import counted

__all__ = ["SizedStage", "check_sizes", "compares_a_group", "generates_before"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedStage:
    """A stage as far as its sizes need it.

    Attributes:
        name: Of the stage.
        prefix: What stands before its keys: nothing, or `stage.NAME.`.
        traced: What the program says; sizes that it leaves out are None there.
        lowered: With every size filled in.
        limits: Tokens of the longest sample that a role's model takes, where that is known.
    """

    name: str
    prefix: str
    traced: Graph
    lowered: Graph
    limits: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Size:
    """A number, how it is written, and where.

    Attributes:
        key: Of the config; None where the program says the number.
    """

    value: int
    written: str
    where: str
    key: str | None

    def become(self, value: int) -> str:
        """How to make it another number."""
        name = self.written.partition("=")[0]
        return f"set {self.key}={value}" if self.key else f"write {name}={value}"


def check_sizes(loaded: LoadedConfig, stages: Sequence[SizedStage]) -> None:
    """Checks the sizes of all stages.

    Raises:
        ConfigError: One error for all that is wrong: the first in full, the others by name.
    """
    problems = [
        problem for stage in stages for check in _CHECKS for problem in check(loaded, stage)
    ]
    problems += _penalties_are_met(loaded, stages)
    if problems:
        raise combine(problems)


def compares_a_group(spec: AdvantageSpec) -> bool:
    """Whether a sample's advantage is 0 wherever all scores of its group are equal."""
    centred = getattr(spec, "mean", "group") in ("group", "group_others")
    return centred and getattr(spec, "singleton", "raw") == "zero"


def _groups_suffice(loaded: LoadedConfig, stage: SizedStage) -> Problems:
    told: set[str] = set()
    for node in stage.lowered.nodes:
        reason = _needs_two(node)
        for generate in generates_before(stage.lowered, node) if reason else ():
            size = _size(loaded, stage, generate, "n", "train.group_size")
            # Several operations may want the same larger groups.
            if size is None or size.value > 1 or generate.id in told:
                continue
            told.add(generate.id)
            yield ConfigError(
                f"{node.id} {reason}, but {size.written} gives each prompt a group of one",
                where=" and ".join(filter(None, (size.where, _lines(node)))),
                expected="at least 2 samples a prompt",
                hint=size.become(2),
            )


def _selections_leave_some(loaded: LoadedConfig, stage: SizedStage) -> Problems:
    """A selection leaves fewer samples than there are, and enough for those who compare them."""
    graph = stage.lowered
    made = sample_sets(graph)
    for node in graph.nodes:
        reason, maker = _needs_two(node), graph.node(made[node.id])
        if node.op is not Op.SELECT and reason and _kept(maker) == 1:
            yield ConfigError(
                f"{node.id} {reason}, but {maker.id} keeps one sample of each group (k=1)",
                where=_lines(maker, node),
                expected="at least 2 samples a prompt",
                hint="write k=2, or learn the selected samples with loss=fl.loss.cross_entropy()",
            )
        kept = _kept(node)
        for generate in generates_before(graph, node) if kept else ():
            size = _size(loaded, stage, generate, "n", "train.group_size")
            if size is None or kept <= size.value:
                continue
            yield ConfigError(
                f"{node.id} keeps {kept} samples of each group, but {size.written} gives it "
                f"{size.value}",
                where=" and ".join(filter(None, (size.where, _lines(node)))),
                expected=f"k of at most {size.value}",
                hint=f"write k={size.value}, or {size.become(kept)}",
            )


def _kept(node: Node) -> int:
    """Samples of each group that a selection keeps; 0 for other nodes, and for pairs."""
    kept = getattr(node.attr("spec"), "k", 0) if node.op is Op.SELECT else 0
    return kept if isinstance(kept, int) else 0


def _lines(*nodes: Node) -> str:
    return " and ".join(f"{node.source} ({node.id})" for node in nodes if node.source is not None)


def _needs_two(node: Node) -> str | None:
    """What a node does that a group of one is too small for."""
    match node.attr("spec"):
        case AdvantageSpec() as spec if compares_a_group(spec):
            return "compares the samples of a group, and a lone one gets the advantage 0"
        case ZeroVariance(singleton="remove"):
            return "removes groups whose scores do not differ"
        case SelectSpec(pairs=True):
            return "makes a pair of each group"
        case _:
            return None


def generates_before(graph: Graph, node: Node) -> Iterator[Node]:
    """The generations whose samples a node reads the scores of."""
    seen, waiting = {node.id}, [node.id]
    while waiting:
        for edge in graph.in_edges(waiting.pop()):
            # A baseline is of samples of its own, one a prompt by design.
            if edge.carried or edge.src in seen or edge.argument == "baseline":
                continue
            seen.add(edge.src)
            waiting.append(edge.src)
    for found in graph.of_op(Op.GENERATE):
        if found.id in seen:
            yield found


def _pairs_stay_whole(loaded: LoadedConfig, stage: SizedStage) -> Problems:
    key = f"{stage.prefix}train.micro_batch"
    size = loaded.config.stage_config(stage.name).train.micro_batch
    for node in stage.lowered.of_op(Op.UPDATE):
        loss = node.attr("loss")
        if not isinstance(loss, LossSpec) or not loss.pairs or size % 2 == 0:
            continue
        nearest = [str(even) for even in (size - 1, size + 1) if even]
        lines = [line for line in (loaded.where_all(key), str(node.source or "")) if line]
        yield ConfigError(
            f"{node.id} compares the two samples of a pair ({loss.kind}), and {key}={size} would "
            "separate a pair",
            where=" and ".join(lines) or None,
            found=loaded.defaults_among(key),
            expected="an even number of samples in a micro-batch",
            hint=f"nearest: {key}={' or '.join(nearest)}",
        )


def _responses_may_stop(loaded: LoadedConfig, stage: SizedStage) -> Problems:
    for node in stage.lowered.of_op(Op.GENERATE):
        least = _size(loaded, stage, node, "min_tokens")
        most = _size(loaded, stage, node, "max_tokens")
        if least is None or most is None or least.value <= most.value:
            continue
        if least.key and most.key:
            continue  # told with the configuration
        yield ConfigError(
            f"{node.id} has {least.written} above {most.written}, so that no response could stop",
            where=" and ".join(dict.fromkeys((least.where, most.where))),
            hint=f"{least.become(most.value)}, or {most.become(least.value)}",
        )


def _responses_fit(loaded: LoadedConfig, stage: SizedStage) -> Problems:
    for node in stage.lowered.of_op(Op.GENERATE):
        limit = stage.limits.get(str(node.role))
        most = _size(loaded, stage, node, "max_tokens")
        if limit is None or most is None:
            continue
        # Prompts that are too long are left out, so only what all of them need is certain.
        prompt = 1
        if isinstance(loaded.config.roles[str(node.role)].model, FreshModel):
            prompt = least_prompt_tokens(loaded)[0]
        if prompt + most.value <= limit:
            continue
        key = f"roles.{node.role}.model"
        hint = f"{most.become(limit - prompt)}" if limit > prompt else "a longer model is needed"
        yield ConfigError(
            f"{node.id} draws responses of {most.written}, which with prompts of "
            f"{counted(prompt, 'token')} or more do not fit the model of role {str(node.role)!r}",
            where=" and ".join(dict.fromkeys((most.where, loaded.where(key)))),
            expected=f"at most {limit} tokens, prompt and response together",
            hint=hint,
        )


def _episodes_fit(loaded: LoadedConfig, stage: SizedStage) -> Problems:
    """An episode of all its turns, a token each and a token said between two, fits the model."""
    graph = stage.lowered
    for episode in graph.of_op(Op.INTERACT):
        turns = episode.attr("max_turns")
        for player in graph.of_op(Op.GENERATE):
            limit = stage.limits.get(str(player.role))
            if player.region != episode.region or limit is None or not isinstance(turns, int):
                continue
            prompt = 1
            if isinstance(loaded.config.roles[str(player.role)].model, FreshModel):
                prompt = least_prompt_tokens(loaded)[0]
            if prompt + 2 * turns - 1 <= limit:
                continue
            key = f"roles.{player.role}.model"
            most = (limit - prompt + 1) // 2
            hint = f"write max_turns={most}" if most else "a longer model is needed"
            yield ConfigError(
                f"{episode.id} has up to max_turns={turns}, which with prompts of "
                f"{counted(prompt, 'token')} or more cannot fit the model of role "
                f"{str(player.role)!r}",
                where=" and ".join(filter(None, (_lines(episode), loaded.where(key)))),
                found=f"{prompt + 2 * turns - 1} tokens where each turn and each observation is "
                "one token",
                expected=f"at most {limit} tokens, the whole episode together",
                hint=hint,
            )


_CHECKS = (
    _groups_suffice,
    _selections_leave_some,
    _pairs_stay_whole,
    _responses_may_stop,
    _responses_fit,
    _episodes_fit,
)


def _penalties_are_met(loaded: LoadedConfig, stages: Sequence[SizedStage]) -> Problems:
    """Every length penalty begins at a length that a response can have."""
    longest: dict[str, _Size] = {}
    for stage in stages:
        for generate in stage.lowered.of_op(Op.GENERATE):
            most = _size(loaded, stage, generate, "max_tokens")
            for score in stage.lowered.of_op(Op.SCORE):
                role = str(score.role)
                if most is not None and (role not in longest or longest[role].value < most.value):
                    longest[role] = most
    told = set()
    for role, most in longest.items():
        terms, terms_key = loaded.config.terms_of(role)
        for index, term in enumerate(terms):
            key = f"{terms_key}.{index}"
            if not isinstance(term, OverlongTerm) or key in told:
                continue
            begins = term.max_tokens - term.buffer
            if begins < most.value:
                continue
            told.add(key)
            yield ConfigError(
                f"the penalty {term.name!r} begins above {begins} tokens (max_tokens="
                f"{term.max_tokens} - buffer={term.buffer}), and responses have at most "
                f"{most.written}",
                where=f"{loaded.where(key)} and {most.where}",
                hint=f"set {key}.max_tokens={most.value} with a buffer, or fewer",
            )


def _size(
    loaded: LoadedConfig, stage: SizedStage, node: Node, name: str, key: str | None = None
) -> _Size | None:
    """A size of a generation: `n`, or an option of its sampling; None where it has none."""
    sampling = node.attr("sampling")
    value = node.attr("n") if name == "n" else getattr(sampling, name, None)
    if not isinstance(value, int):
        return None
    said = next((said for said in stage.traced.nodes if said.id == node.id), node)
    own = said.attr("sampling")
    in_program = said.attr(name) is not None or (name != "n" and isinstance(own, Sampling))
    if in_program:
        where = f"{said.source} ({said.id})" if said.source is not None else str(said.id)
        return _Size(value=value, written=f"{name}={value}", where=where, key=None)
    key = f"{stage.prefix}{key or f'train.sampling.{name}'}"
    where = loaded.where(key) if loaded.is_set(key) else f"{key} at its default"
    return _Size(value=value, written=f"{key}={value}", where=where, key=key)
