"""The report of a step: its row of metrics.jsonl and its rows of samples.jsonl.

The numbers of a row are of the stage's main policy and of the rollout on which it is trained. Those
of other roles and rollouts have their name as a prefix: `critic/loss`,
`actor.generate.2/reward_mean`.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flowrl.backend.protocols import OptimizerStep
from flowrl.data import PromptItem, Tokenizer
from flowrl.graph import Node, Op, format_attr, results, score_source
from flowrl.graph.sample_sets import JOINS, SUBSETS, sample_edges
from flowrl.graph.signatures import SCORE, TOKEN_REWARD
from flowrl.graph.streaming import is_rule_score, scores_at_once
from flowrl.ids import GroupId, NodeId, RoleName, SampleId
from flowrl.observe.metric_names import CONSUMED_TOKENS
from flowrl.observe.rows import DRIVER_WORK, SampleRow, StepMetrics
from flowrl.runtime.driver.collected_batch import CollectedBatch
from flowrl.runtime.driver.filters import kept_groups
from flowrl.runtime.driver.graph_parts import GraphParts, RolloutPart, role_of
from flowrl.runtime.driver.payloads import Array, Payload, StepBatch
from flowrl.runtime.environments.transcript import CUT_LENGTH, CUT_OBSERVATION
from flowrl.specs import FilterSpec, FinishReason, Spec
from flowrl.specs.maps import Parse

UNNAMED_TOKENS = "unnamed_tokens"
"""The metric that counts sampled tokens that the tokenizer does not name."""

_FIRST_UPDATE = "mismatch/"
"""Metrics that mean something before the step's weights have changed, so of its first update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The report of one step: a row of metrics.jsonl and its rows of samples.jsonl."""

    metrics: StepMetrics
    samples: Sequence[SampleRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedRollout:
    """The samples of one rollout in a step.

    Attributes:
        items: Prompts offered, in order.
        version: Weights that it began with.
    """

    part: RolloutPart
    items: Sequence[PromptItem]
    collected: CollectedBatch
    version: int


def sample_ages(
    generated: Sequence[GeneratedRollout],
) -> dict[NodeId, dict[SampleId, int]]:
    """Returns the staleness of each delivered or filtered sample, in publications, by rollout.

    A sample is as old as the oldest weights that sampled one of its tokens, or one of those that
    its prompt was made of: a child as its parent, one that compares two samples as the older one.

    Args:
        generated: Parents before their children.
    """
    ages: dict[NodeId, dict[SampleId, int]] = {}
    for rollout in generated:
        part, above = rollout.part, ages.get(rollout.part.parent or NodeId(""), {})
        spec = None if part.prompts is None else part.prompts.attr("spec")
        if getattr(spec, "opponent", None):
            of_group: dict[str, int] = {}
            for sample, age in above.items():
                group = sample.rpartition("/")[0]
                of_group[group] = max(age, of_group.get(group, 0))
            above = {sample: of_group[sample.rpartition("/")[0]] for sample in above}
        ages[part.node.id] = {
            sample: max(
                rollout.version - min((v for v, _ in payload.versions), default=rollout.version),
                above.get(SampleId(payload.item.group), 0),
            )
            for sample, payload in _scored(rollout.collected)
        }
    return ages


def reported_score(parts: GraphParts, rollout: NodeId) -> Node | None:
    """Returns the node whose score is reported for a rollout.

    It is the one that an advantage reads, or else a filter or a selection, or else one that is a
    result of the workflow, or else the first of the program; None if nothing scores the rollout's
    samples.
    """
    readers = (*parts.graph.of_op(Op.ADVANTAGE), *parts.graph.of_op(Op.FILTER, Op.SELECT))
    for reader in readers:
        for argument in ("scores", "baseline"):
            source = score_source(parts.graph, reader.id, argument)
            if source is not None and parts.origin(source.id) == rollout:
                return source
    nodes = (*results(parts.graph), *parts.graph.of_op(Op.SCORE, Op.INTERACT))
    scores = [node for node in nodes if node.output(SCORE.name)]
    return next((node for node in scores if parts.origin(node.id) == rollout), None)


class StepReport:
    """Makes the rows of a stage's steps.

    Args:
        stage: Its name.
        parts: Its graph.
        policy: The role whose numbers the row has, if this stage updates it; otherwise it is the
            role that is updated last. A stage without updates has the numbers of its samples.
        tokenizers: The tokenizer of the generating policy, by rollout.

    Attributes:
        main: The rollout, or the source, that this role learns from; without one, the first.
    """

    def __init__(
        self,
        stage: str,
        parts: GraphParts,
        policy: RoleName | None,
        tokenizers: Mapping[NodeId, Tokenizer],
    ) -> None:
        self._stage = stage
        self._tokenizers = tokenizers
        self._parts = parts
        updates = self._updates = parts.graph.of_op(Op.UPDATE)
        trained = [role_of(node) for node in updates]
        self._role = policy if policy in trained or not trained else trained[-1]
        own = [node for node in updates if node.role == self._role] or results(parts.graph)
        rollouts = [part.node.id for part in parts.rollouts]
        roots = [root for node in own or parts.batch for root in sorted(parts.roots(node.id))]
        self.main = next((node for node in roots if node in rollouts), roots[-1])
        self._sources = {node.id for node in parts.sources}
        self._own_sets = tuple(dict.fromkeys(parts.made[node.id] for node in own))
        self._read_sets = {
            part.node.id: [
                made
                for node in updates or results(parts.graph)
                if part.node.id in parts.roots(made := parts.made[node.id])
                and parts.graph.node(parts.origin(made)).op is not Op.REPLAY
            ]
            for part in parts.rollouts
        }
        self._scored_later = {
            part.node.id: node
            for part in parts.rollouts
            if (node := reported_score(parts, part.node.id)) is not None
            and not scores_at_once(node)
        }
        self._coefficients: dict[NodeId, str] = {}
        for node in updates:
            prefix = self._prefix(role_of(node))
            taken = f"{prefix}kl_coefficient" in self._coefficients.values()
            name = f"{node.id}/kl_coefficient" if taken else f"{prefix}kl_coefficient"
            self._coefficients[node.id] = name

    def assign_scores(self, step: StepBatch, generated: Sequence[GeneratedRollout]) -> None:
        """Gives samples the score that a model or a map made, which came after their collection."""
        for rollout in generated:
            node = self._scored_later.get(rollout.part.node.id)
            if node is None:
                continue
            values = step.values.find(node.id, "score")
            if values is not None:
                payloads = step.sets[self._parts.made[node.id]].payloads
                for payload, score in zip(payloads, values.tolist(), strict=True):
                    payload.score = None if math.isnan(score) else score
                continue
            judging = next((f.id for f in rollout.part.filters if self._reads(f.id, node.id)), None)
            for _, payload in _scored(rollout.collected):
                payload.score = None if judging is None else payload.judged.get(judging)

    def _reads(self, judging: NodeId, node: NodeId) -> bool:
        source = score_source(self._parts.graph, judging)
        return source is not None and source.id == node

    def result(
        self, step: StepBatch, generated: Sequence[GeneratedRollout], started: float
    ) -> StepResult:
        """Returns the step's rows.

        Args:
            started: When it began, by the monotonic clock.
        """
        ends = {rollout.part.node.id: self._ends(step, rollout) for rollout in generated}
        metrics = StepMetrics(
            stage=self._stage,
            step=step.number,
            num_samples=self._num_samples(step, ends),
            wall_s=time.monotonic() - started,
            seconds=_seconds(step, generated),
        )
        metrics = self._with_samples(metrics, step, generated, ends)
        metrics = self._with_updates(metrics, step)
        rows = [
            row
            for rollout in generated
            for row in self._rows(step.number, rollout, ends[rollout.part.node.id])
        ]
        return StepResult(metrics=metrics, samples=rows)

    def _num_samples(self, step: StepBatch, ends: Mapping[NodeId, Sequence[_Ended]]) -> int:
        """Returns the samples of the role's updates; without updates, all that were consumed."""
        if self._updates:
            return sum(len(step.sets[s]) for s in self._own_sets if s in step.sets)
        of_data = sum(len(step.sets[source]) for source in self._sources)
        return of_data + sum(end == "consumed" for of in ends.values() for _, _, end, _ in of)

    # Samples

    def _ends(self, step: StepBatch, rollout: GeneratedRollout) -> list[_Ended]:
        """Returns every sample of a rollout and its end: consumed, then filtered, then dropped.

        A sample is consumed where an update reads a set that it is in; one of a rollout that no
        update reads (a baseline) where it was delivered.
        """
        part, collected = rollout.part, rollout.collected
        read = self._read_sets[part.node.id]
        delivered = [(s, p) for _, members in collected.groups for s, p in members]
        dropped = [(s, p, "dropped", reason) for s, p, reason in collected.dropped]
        if not part.whole and set(read) <= {part.kept}:
            consumed = [(s, p, "consumed", "") for s, p in delivered]
            filtered = [(s, p, "filtered", reason) for s, p, reason in collected.filtered]
            return [*consumed, *filtered, *dropped]
        # By the payload, as samples of two rollouts of the same prompts have the same ids.
        used = {id(p) for name in read if name in step.sets for p in step.sets[name].payloads}
        if not read:
            used = {id(payload) for _, payload in delivered}
        reasons = {sample: reason for sample, _, reason in collected.filtered}
        everything = [*delivered, *((s, p) for s, p, _ in collected.filtered)]
        removed = self._removed(step, part)
        consumed = [(s, p, "consumed", "") for s, p in everything if id(p) in used]
        filtered = [
            (s, p, "filtered", removed.get(id(p)) or reasons.get(s, ""))
            for s, p in everything
            if id(p) not in used
        ]
        return [*consumed, *filtered, *dropped]

    def _removed(self, step: StepBatch, part: RolloutPart) -> dict[int, str]:
        """Returns why a node of the batch part took samples out, by the `id` of their payload."""
        found: dict[int, str] = {}
        for node in self._parts.batch:
            if node.op not in (*SUBSETS, *JOINS):
                continue
            after = step.sets.get(node.id)
            for edge in sample_edges(self._parts.graph, node):
                before = step.sets.get(self._parts.made[edge.src])
                if (
                    before is None
                    or after is None
                    or part.node.id not in self._parts.roots(edge.src)
                ):
                    continue
                stays = set(map(id, after.payloads))
                for payload in before.payloads:
                    if id(payload) not in stays:
                        found.setdefault(id(payload), _reason(node))
        return found

    def _rows(
        self, number: int, rollout: GeneratedRollout, ends: Sequence[_Ended]
    ) -> Iterator[SampleRow]:
        tokenizer = self._tokenizers[rollout.part.node.id]
        rendered: dict[GroupId, str] = {}
        for sample, payload, end, reason in ends:
            item = payload.item
            if item.group not in rendered:
                rendered[item.group] = tokenizer.visible(payload.asked)
            yield SampleRow(
                stage=self._stage,
                step=number,
                rollout=rollout.part.node.id,
                sample=sample,
                prompt=rendered[item.group],
                response=payload.text + payload.last_words,
                answer=item.row.answer,
                score=payload.score,
                terms=payload.terms,
                num_tokens=payload.num_sampled,
                finish=payload.finish or "",
                versions=payload.sampled_versions,
                end=end,
                reason=reason,
            )

    def _with_samples(
        self,
        metrics: StepMetrics,
        step: StepBatch,
        generated: Sequence[GeneratedRollout],
        ends: Mapping[NodeId, Sequence[_Ended]],
    ) -> StepMetrics:
        """Adds rewards and lengths of all scored samples, filtered ones too."""
        extra = {**step.logged, **step.replayed}
        if step.skipped:
            extra["skipped_nodes"] = float(len(step.skipped))
        num_tokens, ages = 0, sample_ages(generated)
        for rollout in generated:
            node = rollout.part.node.id
            numbers = _sample_numbers([payload for _, payload in _scored(rollout.collected)])
            num_tokens += int(numbers.pop("num_tokens", 0))
            extra |= {
                name if node == self.main else f"{node}/{name}": number
                for name, number in (
                    *_staleness(ages[node], ends[node]).items(),
                    *self._counts(rollout).items(),
                )
            }
            if node == self.main:
                extra |= _consumed_numbers(ends[node])
                removed = {p.item.group for _, p, end, _ in ends[node] if end == "filtered"}
                stays = {p.item.group for _, p, end, _ in ends[node] if end == "consumed"}
                metrics = replace(
                    metrics,
                    version=rollout.version,
                    filtered_groups=len(removed - stays),
                    filtered_by=self._filtered_by(rollout.part, ends[node], removed - stays),
                    **numbers,  # type: ignore[arg-type]
                )
            else:
                extra |= {f"{node}/{name}": float(value) for name, value in numbers.items()}
            extra |= {
                name if node == self.main else f"{node}/{name}": number
                for name, number in self._rewards(step, rollout).items()
            }
        if self.main in self._sources and step.sets[self.main]:
            lengths = step.sets[self.main].sequences.response_lengths
            num_tokens = num_tokens or int(lengths.sum())
            metrics = replace(
                metrics, length_mean=float(lengths.mean()), length_max=int(lengths.max())
            )
        return replace(
            metrics,
            num_tokens=num_tokens,
            dropped_samples=sum(len(rollout.collected.dropped) for rollout in generated),
            extra=extra,
        )

    def _counts(self, rollout: GeneratedRollout) -> dict[str, float]:
        """Returns the counts of a rollout's samples that only some rollouts have."""
        payloads = [payload for _, payload in _scored(rollout.collected)]
        counts = {}
        cut = sum(_is_cut(payload) for payload in payloads)
        if cut:
            counts["cut_episodes"] = float(cut)
        tokenizer = self._tokenizers[rollout.part.node.id]
        if not tokenizer.names_all:
            strange = [
                tokenizer.without_token(p.tokens if p.mask is None else p.tokens[p.mask])
                for p in payloads
            ]
            counts[UNNAMED_TOKENS] = float(sum(np.count_nonzero(places) for places in strange))
        return counts

    def _filtered_by(
        self, part: RolloutPart, ends: Sequence[_Ended], groups: Collection[GroupId]
    ) -> dict[str, int]:
        """Returns the number of `groups` that each filter and selection removed, largest first."""
        removed: dict[GroupId, tuple[str, list[Payload]]] = {}
        for _, payload, end, reason in ends:
            if end == "filtered" and payload.item.group in groups:
                removed.setdefault(payload.item.group, (reason, []))[1].append(payload)
        counts = Counter(self._remover(part, *group) for group in removed.values())
        return {text: count for text, count in counts.most_common() if text}

    def _remover(self, part: RolloutPart, reason: str, payloads: Sequence[Payload]) -> str:
        """Returns the text of the filter that removed a group; of several of a kind the first."""
        nodes = [
            node
            for node in self._parts.graph.of_op(*SUBSETS)
            if part.node.id in self._parts.roots(node.id) and _reason(node) == reason
        ]
        for node in nodes[:-1]:
            spec = node.attr("spec")
            source = score_source(self._parts.graph, node.id)
            role = RoleName("") if source is None or source.role is None else source.role
            scores = [p.judged.get(node.id, p.scores.get(role, p.score)) for p in payloads]
            if (
                isinstance(spec, FilterSpec)
                and None not in scores
                and not kept_groups(spec, np.array(scores, np.float64), [len(scores)])[0]
            ):
                return format_attr(spec)
        return format_attr(nodes[-1].attr("spec")) if nodes else ""

    def _rewards(self, step: StepBatch, rollout: GeneratedRollout) -> dict[str, float]:
        """Returns mean, spread and failures of each reward term of a rollout, and all failures.

        A reward model is a term of its role's name; one that scores tokens or steps is the sum of
        its rewards.
        """
        values: dict[str, list[float]] = {}
        for _, payload in _scored(rollout.collected):
            for name, value in payload.terms.items():
                values.setdefault(name, []).append(value)
        for node in self._parts.graph.of_op(Op.SCORE):
            scores = self._scores_of(node, step)
            if is_rule_score(node) or scores is None or not len(scores):
                continue
            if self._parts.origin(node.id) == rollout.part.node.id:
                values.setdefault(role_of(node), scores.tolist())
        found = self._unparsed(step, rollout)
        for name in (CUT_OBSERVATION, CUT_LENGTH):  # no numbers of a reward, but marks of an end
            values.pop(name, None)
        ended = (payload for _, payload, _ in rollout.collected.dropped)
        given_a_score = (payload for _, payload in _scored(rollout.collected))
        failed = [payload for payload in (*ended, *given_a_score) if payload.failure]
        failures: Counter[str] = Counter()
        for payload in failed:
            _, _, term = payload.failed_term.partition("/")
            # Terms of one name are distinguished by their roles, as in `merged_terms`.
            failures[payload.failed_term if payload.failed_term in values else term] += 1
        if failed:
            found["failed_rewards"] = float(len(failed))
        for name in filter(None, dict.fromkeys((*values, *failures))):
            if name in values:
                found[f"terms/{name}/mean"] = float(np.mean(values[name]))
                found[f"terms/{name}/std"] = float(np.std(values[name]))
            found[f"terms/{name}/failures"] = float(failures[name])
        return found

    def _scores_of(self, node: Node, step: StepBatch) -> Array | None:
        """Returns `[N]`, scores of a node or sums of its rewards; None if it did not run."""
        rewards = step.values.find(node.id, TOKEN_REWARD.name)
        if rewards is None:
            return step.values.find(node.id, SCORE.name)
        starts = step.sets[self._parts.made[node.id]].sequences.offsets[:-1]
        return np.add.reduceat(np.asarray(rewards, np.float64), starts)

    def _unparsed(self, step: StepBatch, rollout: GeneratedRollout) -> dict[str, float]:
        """Returns the share of a rollout's responses in which a map found no number."""
        found: dict[str, float] = {}
        for node in self._parts.graph.of_op(Op.MAP):
            stated = step.values.find(node.id, "parsed")
            if stated is None or not len(stated) or not isinstance(node.attr("spec"), Parse):
                continue
            if self._parts.origin(node.id) == rollout.part.node.id:
                name = f"{node.id}/unparsed" if "unparsed" in found else "unparsed"
                found[name] = 1.0 - float(np.mean(stated.astype(np.float64)))
        return found

    # Updates

    def _prefix(self, role: RoleName) -> str:
        return "" if role == self._role else f"{role}/"

    def _with_updates(self, metrics: StepMetrics, step: StepBatch) -> StepMetrics:
        """Adds means over the step's updates; the learning rate is the last one."""
        extra = dict(metrics.extra)
        by_role: dict[RoleName, list[OptimizerStep]] = {}
        for node, updates in step.updates.items():
            by_role.setdefault(role_of(self._parts.graph.node(node)), []).extend(updates)
        for node, coefficient in step.kl_coefficients.items():
            extra[self._coefficients[node]] = coefficient
        for role, updates in by_role.items():
            if not updates:
                continue
            numbers = _update_numbers(updates)
            if role == self._role:
                own = {name: numbers.pop(name) for name in _OWN_FIELDS if name in numbers}
                skipped = sum(update.skipped for update in updates)
                metrics = replace(metrics, skipped_updates=skipped, **own)  # type: ignore[arg-type]
            elif any(update.skipped for update in updates):
                numbers["skipped_updates"] = float(sum(update.skipped for update in updates))
            extra |= {f"{self._prefix(role)}{name}": value for name, value in numbers.items()}
        return replace(metrics, extra=extra)


_Ended = tuple[SampleId, Payload, str, str]
"""A sample, its end, and the reason of that."""

_OWN_FIELDS = (
    "loss",
    "grad_norm",
    "learning_rate",
    "kl",
    "clip_fraction_low",
    "clip_fraction_high",
)
"""Numbers of updates that a row has a field of its own for."""


def _scored(collected: CollectedBatch) -> list[tuple[SampleId, Payload]]:
    """Returns delivered samples, then filtered ones."""
    kept = [row for _, members in collected.groups for row in members]
    return kept + [(sample, payload) for sample, payload, _ in collected.filtered]


def _reason(node: Node) -> str:
    """Returns the reason that a node gives the samples that it took out."""
    if node.op in (Op.PAIR, Op.WHERE):
        return "unpaired" if node.op is Op.PAIR else "where"
    spec = node.attr("spec")
    assert isinstance(spec, Spec)
    return spec.reason if isinstance(spec, FilterSpec) else spec.kind


def _is_cut(payload: Payload) -> bool:
    """True if an episode ended because its next observation did not fit."""
    return CUT_OBSERVATION in payload.terms or CUT_LENGTH in payload.terms


def _sample_numbers(payloads: Sequence[Payload]) -> dict[str, float | int]:
    """Rewards and lengths of samples; rewards only where they have any."""
    if not payloads:
        return {}
    # Spelled out for plain responses: there are hundreds a step.
    lengths = np.array([len(p.tokens) if p.mask is None else p.num_sampled for p in payloads])
    truncated = sum(payload.finish is FinishReason.LENGTH for payload in payloads)
    numbers: dict[str, float | int] = {
        "num_tokens": int(lengths.sum()),
        "length_mean": float(lengths.mean()),
        "length_max": int(lengths.max()),
        "truncated": truncated / len(payloads),
    }
    scores = np.array([p.score for p in payloads if p.score is not None], np.float64)
    if len(scores):
        numbers |= {"reward_mean": float(scores.mean()), "reward_std": float(scores.std())}
    return numbers


def _consumed_numbers(ends: Sequence[_Ended]) -> dict[str, float]:
    """Returns the prompt lengths and the tokens of consumed samples; empty without any."""
    payloads = [payload for _, payload, end, _ in ends if end == "consumed"]
    if not payloads:
        return {}
    prompts = np.array([len(payload.item.prompt_ids) for payload in payloads])
    return {
        "prompt_length/mean": float(prompts.mean()),
        "prompt_length/max": float(prompts.max()),
        CONSUMED_TOKENS: float(prompts.sum() + sum(len(payload.tokens) for payload in payloads)),
    }


def _staleness(of_samples: Mapping[SampleId, int], ends: Sequence[_Ended]) -> dict[str, float]:
    """Returns the largest and the mean staleness of consumed samples; empty without any."""
    ages = [
        of_samples[sample]
        for sample, payload, end, _ in ends
        if end == "consumed" and payload.versions
    ]
    if not ages:
        return {}
    return {"staleness/max": float(max(ages)), "staleness/mean": sum(ages) / len(ages)}


def _update_numbers(updates: Sequence[OptimizerStep]) -> dict[str, float]:
    """Means over updates, by name; of the mismatch those of the first update that has them."""
    named: dict[str, list[float]] = {}
    first: dict[str, float] = {}
    for update in updates:
        for name, value in update.metrics.items():
            if name.startswith(_FIRST_UPDATE):
                first.setdefault(name, value)
            else:
                named.setdefault(name, []).append(value)
    return {
        "loss": float(np.mean([update.loss for update in updates])),
        "grad_norm": float(np.mean([update.grad_norm for update in updates])),
        "learning_rate": updates[-1].learning_rate,
        **{name: float(np.mean(values)) for name, values in named.items()},
        **first,
    }


def _seconds(step: StepBatch, generated: Sequence[GeneratedRollout]) -> dict[str, float]:
    """Returns wall time by kind of work, of rollouts and of the batch part together."""
    if not generated:
        return step.seconds
    seconds = {
        "generate": sum(rollout.collected.seconds.generate for rollout in generated),
        "score": sum(rollout.collected.seconds.score_wait for rollout in generated),
    }
    for kind in DRIVER_WORK:
        seconds[kind] = sum(getattr(rollout.collected.seconds, kind) for rollout in generated)
    for kind, spent in step.seconds.items():
        seconds[kind] = seconds.get(kind, 0.0) + spent
    return seconds
