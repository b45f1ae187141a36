"""Warnings about what is legal but seldom meant, logged when a run is compiled."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from flowrl.cluster.cpu import read_cores
from flowrl.compiler.role_backends import RoleBackends
from flowrl.compiler.roles import StageRoles
from flowrl.compiler.sizes import SizedStage, compares_a_group, generates_before
from flowrl.config.check import least_prompt_tokens
from flowrl.config.load import LoadedConfig
from flowrl.config.rewards import ExactMatch, FormatMatch, Gsm8kMatch, NumericMatch
from flowrl.config.roles import FreshModel
from flowrl.cost.demand import phase_of
from flowrl.graph import Graph, Node, Op
from flowrl.graph.ir import called
from flowrl.passes import Context
from flowrl.passes.context import (
    changed_options,
    includes_truncation,
    neutral_options,
    sampling_node,
)
from flowrl.passes.settle_truncation import treats_as_untruncated
from flowrl.program.policy import MAX_OBSERVATION_TOKENS
from flowrl.specs import AdvantageSpec, CrossEntropy, LossSpec, Sampling
from flowrl.specs.maps import SoftOverlong
from flowrl.wording import counted, listing

__all__ = [
    "warn_of",
    "warn_of_run",
]


_log = logging.getLogger(__name__)


def warn_of(graph: Graph, context: Context) -> None:
    """Logs a warning for each thing in a lowered graph that is seldom meant."""
    if context.truncated == "ignore":
        _warn_of_truncation(graph, context)
    _warn_of_equal_scores(graph)
    _warn_of_other_policies(graph)
    _warn_of_imitating_itself(graph)


def _warn_of_truncation(graph: Graph, context: Context) -> None:
    """Where an update treats tokens as samples of another distribution than theirs."""
    for node in graph.of_op(Op.GENERATE):
        changed = changed_options(node)
        if changed and not includes_truncation(node) and treats_as_untruncated(graph, node):
            _log.warning(
                "%s samples with %s, and its update uses logprobs before that: the gradient is "
                "biased, which %s.truncated=ignore accepts. Without bias: %s",
                node.id,
                ", ".join(f"{name}={value}" for name, value in changed.items()),
                context.train_key,
                neutral_options(changed),
            )


def _warn_of_equal_scores(graph: Graph) -> None:
    """Where scores that are compared within a group can never differ."""
    for node in graph.of_op(Op.ADVANTAGE):
        spec = node.attr("spec")
        if not isinstance(spec, AdvantageSpec) or not compares_a_group(spec):
            continue
        for source in generates_before(graph, node):
            sampling = source.attr("sampling")
            if not isinstance(sampling, Sampling) or sampling.temperature != 0:
                continue
            _log.warning(
                "%s gives the same sample to all of a group (temperature=0), so %s has nothing to "
                "compare and every advantage is 0: nothing will be learnt",
                source.id,
                node.id,
            )


def _warn_of_other_policies(graph: Graph) -> None:
    """Where a policy gradient is over samples of a policy that is never the one that learns."""
    for node in graph.of_op(Op.UPDATE):
        loss, drawn = node.attr("loss"), sampling_node(graph, node)
        if drawn is None or drawn.role == node.role or not isinstance(loss, LossSpec):
            continue
        follows = any(
            graph.node(edge.src).role == node.role
            for sync in graph.of_op(Op.SYNC)
            if sync.role == drawn.role
            for edge in graph.in_edges(sync.id)
        )
        if follows or loss.corrects_behaviour or "advantages" not in loss.needs:
            continue
        _log.warning(
            "%s learns by policy gradient from samples that %s generated, and %s does not correct "
            "for the policy that produced them: the gradient is biased. fl.loss.policy_clip(0.2) "
            "corrects, and fl.loss.cross_entropy() imitates",
            node.id,
            drawn.role,
            called(loss),
        )


def _warn_of_imitating_itself(graph: Graph) -> None:
    """Where a policy imitates all of its own samples: in expectation the gradient is 0."""
    for node in graph.of_op(Op.UPDATE):
        edge, drawn = graph.feeding(node.id, "rollout"), sampling_node(graph, node)
        if edge is None or drawn is None or drawn.role != node.role:
            continue
        chosen = graph.node(edge.src).op in (Op.FILTER, Op.SELECT)
        if isinstance(node.attr("loss"), CrossEntropy) and not chosen:
            _log.warning(
                "%s imitates all that %s generates, good and bad alike: nothing will be learnt. "
                "fl.select.top chooses samples, and advantages weigh them",
                node.id,
                drawn.role,
            )


# Warnings of a run as a whole: roles, critics, lengths.


def warn_of_run(
    loaded: LoadedConfig,
    roles: Sequence[StageRoles],
    sized: Sequence[SizedStage],
    role_backends: RoleBackends,
) -> None:
    """Logs a warning for each thing in a run as a whole that is seldom meant."""
    graphs = [stage.lowered for stage in sized]
    for text in (
        *_roles_without_work(loaded, roles),
        *_critics_that_never_learn(loaded, graphs),
        *_penalties_out_of_reach(graphs),
        *_observations_without_room(loaded, sized),
        *_stops_that_decide_nothing(loaded),
        *_episodes_that_there_are_not(loaded, graphs),
        *_tokens_that_a_reader_lacks(graphs, role_backends),
        *_more_threads_than_cores(loaded),
    ):
        _log.warning("%s", text)


def _more_threads_than_cores(loaded: LoadedConfig) -> Iterator[str]:
    """Yields a warning of threads that would wait for each other on this machine."""
    threads, cores = loaded.config.runtime.num_threads, read_cores()
    if loaded.config.cluster == "auto" and threads > cores:
        yield (
            f"{loaded.where('runtime.num_threads')}: {threads} threads of each worker on "
            f"{counted(cores, 'core')} that this process may use, so that they wait for each other "
            f"and steps take many times as long; set runtime.num_threads={cores} or less"
        )


def _stops_that_decide_nothing(loaded: LoadedConfig) -> Iterator[str]:
    """Stops that the first check reaches: terms whose value is a share are never below 0."""
    shares = {term.name for term in loaded.config.rewards.terms if isinstance(term, _SHARES)}
    for name, prefix in loaded.stage_prefixes():
        stop = loaded.config.stage_config(name).stop
        if stop is None or stop.metric not in shares:
            continue
        where = loaded.where(f"{prefix}stop.at_least")
        if stop.at_least <= 0:
            yield (
                f"{where}: {stop.metric} is never below 0, so stage {name} stops at its first "
                f"check, after {counted(stop.check_every, 'step')}, whatever the model has learnt; "
                "set it to a share such as 0.4, or leave stop out"
            )


def _episodes_that_there_are_not(loaded: LoadedConfig, graphs: Sequence[Graph]) -> Iterator[str]:
    if any(graph.of_op(Op.INTERACT) for graph in graphs):
        return
    for key in ("plan.mean_turns", "plan.mean_observation_tokens"):
        # A written config has every key, null where nobody said anything.
        is_said = getattr(loaded.config.plan, key.rpartition(".")[2]) is not None
        if is_said and not loaded.is_taken_over(key):
            yield (
                f"{loaded.where(key)}: says something of episodes, and no workflow of this run "
                "has an environment (fl.interact); leave it out"
            )


def _tokens_that_a_reader_lacks(
    graphs: Sequence[Graph], role_backends: RoleBackends
) -> Iterator[str]:
    """Yields readers of samples whose embedding has fewer rows than the generating policy's."""
    pairs = {
        (str(node.role), str(generate.role)): node.id
        for graph in graphs
        for node in graph.nodes
        if node.op is not Op.GENERATE and node.role is not None and phase_of(node) is not None
        if (generate := sampling_node(graph, node)) is not None
    }
    for (reader, policy), node in pairs.items():
        mine, theirs = role_backends.vocabulary(reader), role_backends.vocabulary(policy)
        if mine.size < theirs.size:
            yield (
                f"{node} reads samples of {policy}, which can generate the token ids {mine.size} "
                f"to {theirs.size - 1} too ({theirs.origin}); {reader} has only {mine.size} tokens "
                f"({mine.origin}), and the run ends with an error where it meets such an id. To be "
                f"safe, save the model of {reader} again with an embedding of {theirs.size} rows"
            )


_SHARES = (ExactMatch, NumericMatch, Gsm8kMatch, FormatMatch)


def _roles_without_work(loaded: LoadedConfig, stages: Sequence[StageRoles]) -> Iterator[str]:
    config = loaded.config
    # A role whose part an argument switches off has its place in the program all the same.
    used = {role.name for stage in stages for role in stage.workflow.roles}
    copied = {role.copy_of for name, role in config.roles.items() if name in used}
    for name in config.roles:
        if name not in used | copied and not loaded.is_taken_over(f"roles.{name}"):
            yield (
                f"{loaded.where(f'roles.{name}')}: no workflow of this run uses the role {name}; "
                f"they use {listing(sorted(used))}. `roles.{name}: null` takes it away"
            )


def _critics_that_never_learn(loaded: LoadedConfig, graphs: Sequence[Graph]) -> Iterator[str]:
    trained = {node.role for graph in graphs for node in graph.of_op(Op.UPDATE, Op.SYNC)}
    reported: set[str] = set()
    for graph in graphs:
        for node in graph.of_op(Op.VALUES):
            role = str(node.role)
            if node.role in trained or role in reported:
                continue
            reported.add(role)
            key = loaded.where(f"roles.{role}")
            yield (
                f"{_line(node)}: {node.id} reads the values of {role}, which no workflow of this "
                f"run updates ({key}), so that they stay what they were; a new head is random. "
                f"{role}.update(rollout, returns=returns, loss=fl.loss.value_clip(0.2)) teaches it"
            )


def _penalties_out_of_reach(graphs: Sequence[Graph]) -> Iterator[str]:
    """Length penalties of a program that no response can meet in full."""
    for graph in graphs:
        for node in graph.of_op(Op.MAP):
            spec = node.attr("spec")
            if not isinstance(spec, SoftOverlong):
                continue
            limits = [
                sampling.max_tokens
                for generate in generates_before(graph, node)
                if generate.region is None
                and isinstance(sampling := generate.attr("sampling"), Sampling)
            ]
            if not limits or max(limits) >= spec.max_tokens:
                continue
            begins = spec.max_tokens - spec.buffer
            reach = (
                "it never begins"
                if max(limits) <= begins
                else f"it never exceeds {(max(limits) - begins) / spec.buffer:.3g} of its factor"
            )
            yield (
                f"{_line(node)}: {node.id} takes off its whole penalty at max_tokens="
                f"{spec.max_tokens}, but responses have at most {max(limits)} "
                f"(sampling.max_tokens), so that {reach}"
            )


def _observations_without_room(loaded: LoadedConfig, sized: Sequence[SizedStage]) -> Iterator[str]:
    for stage in sized:
        for episode in stage.lowered.of_op(Op.INTERACT):
            said = episode.attr("max_observation_tokens")
            for player in stage.lowered.of_op(Op.GENERATE):
                limit = stage.limits.get(str(player.role))
                if player.region != episode.region or limit is None:
                    continue
                own = loaded.config.roles[str(player.role)].model
                prompt = least_prompt_tokens(loaded)[0] if isinstance(own, FreshModel) else 1
                if said == MAX_OBSERVATION_TOKENS:
                    continue  # nobody may have chosen it: most games say far less
                if isinstance(said, int) and prompt + said >= limit:
                    yield (
                        f"{_line(episode)}: {episode.id} takes observations of up to "
                        f"max_observation_tokens={said} tokens, which behind a prompt of {prompt} "
                        f"leave no room for a turn in the {limit} tokens of {player.role}; longer "
                        "episodes are cut, and cut_episodes in metrics.jsonl counts them"
                    )


def _line(node: Node) -> str:
    return str(node.source or node.id)
