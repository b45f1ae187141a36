"""The user's inputs of a run: data, model folders, rewards, environments, shares of prompt sources.

All of it is opened before the run has a folder, so that a mistake in it leaves nothing behind:

    open -> settle (folders of new models become the run's) -> close

Shares of prompt sources are the weights of a mixture, or part of a stage's configuration:

    data:
      source: topic                     # a field of every training row
    train:
      policies:
        fairness: {kind: weighted_shares, math: 3, code: 1}
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from operator import attrgetter
from pathlib import Path

from flowrl.compiler import CompiledStage, sampling_of
from flowrl.compiler.reward_terms import row_needs
from flowrl.config.data import MixtureData
from flowrl.config.schema import RunConfig
from flowrl.data import PromptMixture, PromptSet, Row, source_field
from flowrl.errors import ConfigError, DataError
from flowrl.files import folder_atomically
from flowrl.graph import Op
from flowrl.graph.sample_sets import sampling_node
from flowrl.ids import NodeId, RoleName
from flowrl.rollout.policies.prompts import WeightedShares
from flowrl.runtime.driver.child_prompts import ChildPrompts, LongestPrompt, require_known
from flowrl.runtime.driver.graph_parts import GraphParts, RoleUse, RolloutPart, role_of
from flowrl.runtime.driver.texts import row_value
from flowrl.runtime.executor import Executor, executor_of
from flowrl.runtime.setup.evaluation import evaluated_rollout
from flowrl.runtime.setup.prepared_inputs import (
    PreparedInputs,
    prepare_inputs,
    require_children_fit,
    require_context_length,
)
from flowrl.runtime.setup.rollouts import (
    open_environment,
    sampling_of_rollout,
    settings_of,
    train_key,
)
from flowrl.runtime.setup.scorers import OpenScorers
from flowrl.specs import RowCondition
from flowrl.wording import listing


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptShares:
    """The shares of the prompt sources of one stage.

    Attributes:
        weights: Share by source.
        source_of: The source of a row.
        where: The config key.
    """

    weights: Mapping[str, float]
    source_of: Callable[[Row], str]
    where: str


def shares_of(
    config: RunConfig, stage: CompiledStage, *, generates: bool = True
) -> PromptShares | None:
    """Returns the shares of the prompts of a stage; None if it has none.

    They are those of `train.policies.fairness`, or else the weights of a mixture (`data.train`).

    Args:
        generates: The prompts are for a rollout; only then the scheduler's policies apply.

    Raises:
        ConfigError: there are shares, and rows do not name their source.
    """
    parts = GraphParts(stage.graph).rollouts if generates else ()
    fairness = settings_of(config, stage, parts[0]).fairness if parts else None
    mixture = config.data.train if isinstance(config.data.train, MixtureData) else None
    if isinstance(fairness, WeightedShares):
        weights, where = dict(fairness.shares), f"{train_key(config, stage)}.policies.fairness"
    elif mixture is not None and mixture.weights:
        weights, where = mixture.weights, "data.train.weights"
    else:
        return None
    if config.data.source is not None:
        source_of = source_field(config.data.source)
    elif mixture is not None:
        source_of = attrgetter("source")
    else:
        raise ConfigError(
            "sources have shares, but rows do not name their source",
            where="data.source",
            expected=f"the field of a row that names its source, for {where}",
        )
    return PromptShares(weights=weights, source_of=source_of, where=where)


def _require_sources(config: RunConfig, stage: CompiledStage, prompts: PromptSet) -> None:
    """Checks that the data has the sources that shares are of, and no others.

    Raises:
        ConfigError: it has not; with the names.
    """
    shares = shares_of(config, stage)
    if shares is not None:
        PromptMixture(prompts, 0, shares.weights, shares.source_of, where=shares.where)


class RunInputs:
    """Opened once a run; see the module.

    Args:
        models: The folder of new models of a resumed run. Without it they are made in a temporary
            folder, and `settle` moves them.
        executor: Opens the workers; by default that of the configuration.

    Attributes:
        config: The configuration, with steps in place of epochs.
        stages: The compiled stages, also with steps in place of epochs.
        executor: Opens the workers of the run.
        scorers: Open.
        prepared_inputs: Data and models.
    """

    def __init__(
        self,
        config: RunConfig,
        stages: Sequence[CompiledStage],
        models: Path | None = None,
        executor: Executor | None = None,
    ) -> None:
        self.config = config
        self.stages = stages
        self._graphs = [stage.graph for stage in stages]
        self._use = RoleUse(config, self._graphs)
        self._stack = ExitStack()
        with ExitStack() as stack:  # of what is open where something fails
            placed = [placement for stage in stages for placement in stage.plan.placements]
            workers = {p.role: p.replicas for p in placed if p.head == "none"}
            self.executor = executor_of(config) if executor is None else executor
            stack.callback(self.executor.close)
            self.executor.reserve(config, stages)
            self.scorers = OpenScorers(config, self._graphs, self.executor, workers)
            stack.callback(self.scorers.close)
            self.scorers.open()
            self._try_environments()
            if models is None:
                models = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flowrl-")))
            self.prepared_inputs = self._prepared_inputs(models)
            self._require_values_of_splits()
            self._require_known_separators()
            self._require_context_length()
            self._count_steps()
            for stage in stages:
                _require_sources(config, stage, self.prepared_inputs.train)
            self._stack = stack.pop_all()

    def settle(self, folder: Path) -> None:
        """Moves folders of new models into `folder`, where they are not there already."""
        models = {}
        for role, model in self.prepared_inputs.models.items():
            target = folder / role
            if model.fresh and model.folder != target:
                target.parent.mkdir(parents=True, exist_ok=True)
                with folder_atomically(target) as made:
                    shutil.copytree(model.folder, made, dirs_exist_ok=True)
                model = replace(model, folder=target)
            models[role] = model
        self.prepared_inputs = replace(self.prepared_inputs, models=models)

    def close(self) -> None:
        """Ends the scorers, and removes what was not settled; idempotent."""
        self._stack.close()

    # Inside

    def _prepared_inputs(self, models: Path) -> PreparedInputs:
        use = self._use
        sources = [node for graph in self._graphs for node in graph.of_op(Op.SOURCE)]
        return prepare_inputs(
            self.config,
            models,
            roles=[role for role in use.models if use.source_of(role) is None],
            policy=use.owner(use.reader),
            supervised=any(node.attr("data") == "examples" for node in sources),
            needs=row_needs(self.config, self._graphs, "train"),
            held_out_needs=row_needs(self.config, self._graphs, "eval"),
            max_length=self.max_length,
        )

    def _count_steps(self) -> None:
        """Replaces epochs by the number of steps that take so many prompts."""
        prepared = self.prepared_inputs
        steps: dict[str, int] = {}
        for stage in self.stages:
            train = stage.config.train
            if train.epochs is not None:
                sources = [node for node in stage.graph.of_op(Op.SOURCE) if not node.inputs]
                sizes = [len(prepared.of_source(stage.graph, node)) for node in sources]
                steps[stage.name] = math.ceil(train.epochs * max(sizes) / train.prompts_per_step)
        self.config = self.config.with_steps(steps)
        self.stages = [
            replace(stage, config=self.config.stage_config(stage.name)) for stage in self.stages
        ]

    @property
    def max_length(self) -> int:
        """Tokens of the longest sample of any stage."""
        return max(stage.plan.sizes.max_length for stage in self.stages)

    def _require_values_of_splits(self) -> None:
        """Checks that a part of the data has rows, and notes values of it that no row has.

        The rest of the data, `none_of`, may be empty.

        Raises:
            DataError: no row has a value that `fl.where` asks for, or one lacks the field.
        """
        train = self.prepared_inputs.train
        for node in (node for graph in self._graphs for node in graph.of_op(Op.WHERE)):
            spec, where = node.attr("spec"), str(node.source or node.id)
            assert isinstance(spec, RowCondition)
            missing = () if spec.excluded else spec.each
            found: dict[str, None] = {}
            for prompt in train.prompts:
                if not missing:
                    break
                value = row_value(prompt.row, spec.field, reader=where)
                missing = tuple(each for each in missing if not each.accepts(value))
                found[repr(value)] = None
            if not missing:
                continue
            error = DataError(
                f"no row has {' or '.join(each.described for each in missing)}",
                where=where,
                found=f"{listing(islice(found, 8))}{', ...' if len(found) > 8 else ''} in "
                f"{spec.field!r} of {train.source}",
                hint="compare with a value that rows have, or give the rows this one; a role of a "
                "list has the name that `bind` gives it",
            )
            if missing == spec.each:
                raise error
            notes = (*self.prepared_inputs.notes, f"{where}: {error.what}, found {error.found}")
            self.prepared_inputs = replace(self.prepared_inputs, notes=notes)

    def _require_known_separators(self) -> None:
        """Checks that responses can have the separators of the steps that models score."""
        nodes = [(graph, node) for graph in self._graphs for node in graph.of_op(Op.SCORE)]
        for graph, node in nodes:
            separator, generate = node.attr("separator"), sampling_node(graph, node)
            if isinstance(separator, str):
                role = self._use.owner(role_of(generate) if generate else self._use.reader)
                require_known(
                    self.prepared_inputs.models[role].tokenizer,
                    separator,
                    "the separator has",
                    'end steps with characters that it knows, or score per="token"',
                    str(node.source or node.id),
                )

    def _require_context_length(self) -> None:
        """Checks that every response that may be generated fits after its prompt."""
        prompts = self.prepared_inputs.train.prompts
        for graph in self._graphs:
            longest: dict[NodeId, list[LongestPrompt]] = {}
            for part in GraphParts(graph).rollouts:  # parents before their children
                max_tokens = sampling_of_rollout(part).max_tokens
                if part.parent is None:
                    require_context_length(prompts, max_tokens, self.max_length)
                    bounds = [LongestPrompt(asked=len(prompt.prompt_ids)) for prompt in prompts]
                else:
                    bounds = self._bounds_of_children(part, longest[part.parent])
                    lengths = [bound.asked + bound.continued for bound in bounds]
                    require_children_fit(part, prompts, lengths, max_tokens, self.max_length)
                longest[part.node.id] = [replace(bound, sampled=max_tokens) for bound in bounds]
        if self.scorers.pools and self._use.policy is not None:
            all_parts = list(map(GraphParts, self._graphs))
            evaluated = evaluated_rollout(self._use.policy, all_parts)
            sampling = (
                sampling_of(self.stages[-1].config)
                if evaluated is None
                else sampling_of_rollout(evaluated[1])
            )
            for items in self.prepared_inputs.held_out.values():
                require_context_length(items, sampling.max_tokens, self.max_length)

    def _bounds_of_children(
        self, part: RolloutPart, parents: Sequence[LongestPrompt]
    ) -> list[LongestPrompt]:
        """Returns the bounds of prompts that are made of samples, for each data row.

        Args:
            parents: Bounds of the parents, by row.

        Raises:
            DataError: a row lacks a field of the template, or a text cannot be encoded.
        """
        assert part.prompts is not None
        owner = self._use.owner(role_of(part.generate_node))
        made = ChildPrompts(part.prompts, self.prepared_inputs.models[owner].tokenizer)
        made.require_known_template()
        bounds = []
        for prompt, bound in zip(self.prepared_inputs.train.prompts, parents, strict=True):
            try:
                bounds.append(made.longest(prompt.row, bound))
            except DataError as error:
                error.where = f"{part.prompts.source}, {prompt.row.where}"
                raise
        return bounds

    def _try_environments(self) -> None:
        """Opens each environment once and closes it again: rollouts open their own."""
        used = {role for graph in self._graphs for role in graph.roles}
        for name in sorted(used & set(self.config.roles)):
            if self.config.roles[name].environment is not None:
                open_environment(self.executor, self.config, RoleName(name)).close()
