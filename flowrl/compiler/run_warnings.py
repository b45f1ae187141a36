"""What is legal in a run as a whole, and yet seldom meant: roles, critics, lengths.

`flowrl.compiler.warnings` looks at one graph alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from flowrl.cluster.cpu import read_cores
from flowrl.compiler.players import Players
from flowrl.compiler.roles import StageRoles
from flowrl.compiler.sizes import SizedStage, generates_before
from flowrl.config.check_sizes import least_prompt_tokens
from flowrl.config.load import LoadedConfig
from flowrl.config.nearest import listing
from flowrl.config.rewards import ExactMatch, FormatMatch, Gsm8kMatch, NumericMatch
from flowrl.config.schema import FreshModel
from flowrl.cost.demand import phase_of
from flowrl.graph import Graph, Node, Op
from flowrl.passes.context import sampling_node
from flowrl.program.interact import MAX_OBSERVATION_TOKENS
from flowrl.specs import Sampling
from flowrl.specs.shaping import SoftOverlong
from flowrl.wording import counted

__all__ = ["warn_of_run"]

_log = logging.getLogger(__name__)


def warn_of_run(
    loaded: LoadedConfig,
    roles: Sequence[StageRoles],
    sized: Sequence[SizedStage],
    players: Players,
) -> None:
    """Logs a warning for each such thing."""
    graphs = [stage.lowered for stage in sized]
    for text in (
        *_roles_without_work(loaded, roles),
        *_critics_that_never_learn(loaded, graphs),
        *_penalties_out_of_reach(graphs),
        *_observations_without_room(loaded, sized),
        *_stops_that_decide_nothing(loaded),
        *_episodes_that_there_are_not(loaded, graphs),
        *_tokens_that_a_reader_lacks(graphs, players),
        *_more_threads_than_cores(loaded),
    ):
        _log.warning("%s", text)


def _more_threads_than_cores(loaded: LoadedConfig) -> Iterator[str]:
    """Threads that would wait for each other; a plan for other machines says nothing of these."""
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


def _tokens_that_a_reader_lacks(graphs: Sequence[Graph], players: Players) -> Iterator[str]:
    """Readers of samples whose embedding has fewer rows than that of the policy that draws them."""
    pairs = {
        (str(node.role), str(generate.role)): node.id
        for graph in graphs
        for node in graph.nodes
        if node.op is not Op.GENERATE and node.role is not None and phase_of(node) is not None
        if (generate := sampling_node(graph, node)) is not None
    }
    for (reader, policy), node in pairs.items():
        mine, theirs = players.vocabulary(reader), players.vocabulary(policy)
        if mine.size < theirs.size:
            yield (
                f"{node} reads samples of {policy}, which can draw the token ids {mine.size} to "
                f"{theirs.size - 1} too ({theirs.origin}); {reader} has only {mine.size} tokens "
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
    told: set[str] = set()
    for graph in graphs:
        for node in graph.of_op(Op.VALUES):
            role = str(node.role)
            if node.role in trained or role in told:
                continue
            told.add(role)
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
