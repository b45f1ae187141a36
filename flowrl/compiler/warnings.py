"""Warnings about what is legal but seldom meant, logged when a run is compiled."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from flowrl.cluster.cpu import read_cores
from flowrl.compiler.lowering import LoweredStage
from flowrl.compiler.role_backends import RoleBackends
from flowrl.compiler.sizes import compares_a_group, generates_before
from flowrl.cost.demand import phase_of
from flowrl.errors import ConfigError
from flowrl.graph import Node, Op
from flowrl.graph.ir import called
from flowrl.graph.sample_sets import sampling_node
from flowrl.graph.sample_trees import evaluated_role
from flowrl.passes.settle_truncation import (
    changed_options,
    includes_truncation,
    neutral_options,
    treats_as_untruncated,
)
from flowrl.specs import AdvantageSpec, CrossEntropy, LossSpec, Sampling
from flowrl.specs.maps import SoftOverlong
from flowrl.wording import counted, listing, suggestion

_log = logging.getLogger(__name__)

_Stages: TypeAlias = Sequence[LoweredStage]


def warn(stages: _Stages, role_backends: RoleBackends) -> None:
    """Logs a warning for each thing in a run that is seldom meant."""
    for check in _CHECKS:
        for text in check(stages, role_backends):
            _log.warning("%s", text)


def _nodes(stages: _Stages, *ops: Op) -> Iterator[tuple[LoweredStage, Node]]:
    return ((stage, node) for stage in stages for node in stage.graph.of_op(*ops))


def _line(node: Node) -> str:
    return str(node.source or node.id)


def _truncation(stages: _Stages, _: RoleBackends) -> Iterator[str]:
    """Yields updates that treat tokens as samples of another distribution than theirs."""
    for stage, node in _nodes(stages, Op.GENERATE):
        changed = changed_options(node)
        if not changed or stage.context.truncated != "ignore" or includes_truncation(node):
            continue
        if treats_as_untruncated(stage.graph, node):
            options = ", ".join(f"{name}={value}" for name, value in changed.items())
            yield (
                f"{node.id} samples with {options}, and its update uses logprobs before that: the "
                f"gradient is biased, which {stage.context.train_key}.truncated=ignore accepts. "
                f"Without bias: {neutral_options(changed)}"
            )


def _equal_scores(stages: _Stages, _: RoleBackends) -> Iterator[str]:
    """Yields advantages that compare scores within a group where these can never differ."""
    for stage, node in _nodes(stages, Op.ADVANTAGE):
        spec = node.attr("spec")
        if not isinstance(spec, AdvantageSpec) or not compares_a_group(spec):
            continue
        for generate in generates_before(stage.graph, node):
            sampling = generate.attr("sampling")
            if isinstance(sampling, Sampling) and sampling.temperature == 0:
                yield (
                    f"{generate.id} gives the same sample to all of a group (temperature=0), so "
                    f"{node.id} has nothing to compare and every advantage is 0: nothing will be "
                    "learnt"
                )


def _other_policies(stages: _Stages, _: RoleBackends) -> Iterator[str]:
    """Yields policy gradients over samples of a policy that is never the one that learns."""
    for stage, node in _nodes(stages, Op.UPDATE):
        graph, loss = stage.graph, node.attr("loss")
        generate = sampling_node(graph, node)
        if generate is None or generate.role == node.role or not isinstance(loss, LossSpec):
            continue
        follows = any(
            graph.node(edge.src).role == node.role
            for sync in graph.of_op(Op.SYNC)
            if sync.role == generate.role
            for edge in graph.in_edges(sync.id)
        )
        if not follows and not loss.corrects_behaviour and "advantages" in loss.needs:
            yield (
                f"{node.id} learns by policy gradient from samples that {generate.role} generated, "
                f"and {called(loss)} does not correct for the policy that produced them: the "
                "gradient is biased. fl.loss.policy_clip(0.2) corrects, and "
                "fl.loss.cross_entropy() imitates"
            )


def _imitating_itself(stages: _Stages, _: RoleBackends) -> Iterator[str]:
    """Yields policies that imitate all of their own samples: the expected gradient is 0."""
    for stage, node in _nodes(stages, Op.UPDATE):
        edge = stage.graph.feeding(node.id, "rollout")
        generate = sampling_node(stage.graph, node)
        if edge is None or generate is None or generate.role != node.role:
            continue
        chosen = stage.graph.node(edge.src).op in (Op.FILTER, Op.SELECT, Op.REPLAY)
        if isinstance(node.attr("loss"), CrossEntropy) and not chosen:
            yield (
                f"{node.id} imitates all that {generate.role} generates, good and bad alike: "
                "nothing will be learnt. fl.select.top chooses samples, and advantages weigh them"
            )


def _roles_without_work(stages: _Stages, role_backends: RoleBackends) -> Iterator[str]:
    loaded, roles = role_backends.loaded, role_backends.roles
    # A role whose part an argument switches off has its place in the program all the same.
    used = {role.name for stage in stages for role in stage.workflow.roles}
    copied = {role.copy_of for name, role in roles.items() if name in used}
    interpolated = {key.split(".")[1] for key in loaded.interpolated if key.startswith("roles.")}
    for name in roles:
        if name in used | copied | interpolated or loaded.is_taken_over(f"roles.{name}"):
            continue
        where, meant = loaded.where(f"roles.{name}"), suggestion(name, used)
        if meant is not None and loaded.is_changed(f"roles.{name}"):
            raise ConfigError(
                f"no workflow of this run uses the role {name}",
                where=where,
                expected=listing(sorted(used)),
                hint=meant,
            )
        yield (
            f"{where}: no workflow of this run uses the role {name}; they use "
            f"{listing(sorted(used))}. `roles.{name}: null` in the file takes it away"
        )


def _held_out_data_without_a_policy(stages: _Stages, role_backends: RoleBackends) -> Iterator[str]:
    """Yields held-out data of a run that trains no policy, which is not measured."""
    loaded = role_backends.loaded
    if evaluated_role([stage.graph for stage in stages]) is not None:
        return
    if loaded.is_set("data.eval") and not loaded.is_taken_over("data.eval"):
        yield (
            f"{loaded.where('data.eval')}: held-out prompts are answered by the policy that a run "
            "trains, and this one trains none, so that they are not measured. Give them as "
            "data.train to generate and score them, or measure a model with `flowrl eval`"
        )


def _critics_that_never_learn(stages: _Stages, role_backends: RoleBackends) -> Iterator[str]:
    trained = {node.role for _, node in _nodes(stages, Op.UPDATE, Op.SYNC)}
    critics = {str(node.role): node for _, node in reversed([*_nodes(stages, Op.VALUES)])}
    for role, node in critics.items():
        if role not in trained:
            yield (
                f"{_line(node)}: {node.id} reads the values of {role}, which no workflow of this "
                f"run updates ({role_backends.loaded.where(f'roles.{role}')}), so that they stay "
                f"what they were; a new head is random. {role}.update(rollout, returns=returns, "
                "loss=fl.loss.value_clip(0.2)) teaches it"
            )


def _updates_that_wait(stages: _Stages, _: RoleBackends) -> Iterator[str]:
    """Yields updates that a stage never makes, and stages that use no samples of some steps."""
    for stage in stages:
        updates = [(node, node.attr("every")) for node in stage.graph.of_op(Op.UPDATE)]
        steps = stage.config.train.steps
        for node, interval in updates:
            if isinstance(interval, int) and interval > steps:
                yield (
                    f"{_line(node)}: {node.id} is made every {interval} steps, and the stage "
                    f"{stage.name} has {counted(steps, 'step')}, so that it is never made"
                )
        if updates and all(isinstance(interval, int) for _, interval in updates):
            names = listing([node.id for node, _ in updates])
            yield (
                f"{_line(updates[0][0])}: no update is made in step 1 of the stage {stage.name}, "
                f"and nothing is learnt from the samples of such steps: {names} are made every 2 "
                "or more steps. train.prompts_per_step gives an update more samples"
            )


def _penalties_out_of_reach(stages: _Stages, _: RoleBackends) -> Iterator[str]:
    """Yields length penalties of a program that no response can meet in full."""
    for stage, node in _nodes(stages, Op.MAP):
        spec = node.attr("spec")
        if not isinstance(spec, SoftOverlong):
            continue
        limits = [
            sampling.max_tokens
            for generate in generates_before(stage.graph, node)
            if generate.region is None
            and isinstance(sampling := generate.attr("sampling"), Sampling)
        ]
        if limits and max(limits) < spec.max_tokens:
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


def _tokens_that_a_reader_lacks(stages: _Stages, role_backends: RoleBackends) -> Iterator[str]:
    """Yields readers of samples whose embedding has fewer rows than the generating policy's."""
    pairs = {
        (str(node.role), str(generate.role)): node.id
        for stage, node in _nodes(stages, *Op)
        if node.op is not Op.GENERATE and node.role is not None and phase_of(node) is not None
        if (generate := sampling_node(stage.graph, node)) is not None
    }
    for (reader, policy), node_id in pairs.items():
        mine, theirs = role_backends.vocabulary(reader), role_backends.vocabulary(policy)
        if mine.size < theirs.size:
            yield (
                f"{node_id} reads samples of {policy}, which can generate the token ids "
                f"{mine.size} to {theirs.size - 1} too ({theirs.origin}); {reader} has only "
                f"{mine.size} tokens ({mine.origin}), and the run ends with an error where it "
                f"meets such an id. To be safe, save the model of {reader} again with an embedding "
                f"of {theirs.size} rows"
            )


def _more_threads_than_cores(_: _Stages, role_backends: RoleBackends) -> Iterator[str]:
    """Yields a warning of threads that would wait for each other on this machine."""
    loaded = role_backends.loaded
    threads, cores = loaded.config.runtime.num_threads, read_cores()
    if loaded.config.cluster == "auto" and threads > cores:
        yield (
            f"{loaded.where('runtime.num_threads')}: {threads} threads of each worker on "
            f"{counted(cores, 'core')} that this process may use, so that they wait for each other "
            f"and steps take many times as long; set runtime.num_threads={cores} or less"
        )


_CHECKS: tuple[Callable[[_Stages, RoleBackends], Iterator[str]], ...] = (
    _truncation,
    _equal_scores,
    _other_policies,
    _imitating_itself,
    _roles_without_work,
    _held_out_data_without_a_policy,
    _critics_that_never_learn,
    _updates_that_wait,
    _penalties_out_of_reach,
    _tokens_that_a_reader_lacks,
    _more_threads_than_cores,
)
