"""Filters, selections, the replay buffer and conditions on rows: what reaches an update.

Most operations of `fl.filter` and `fl.select`, and `fl.replay`, are made of these classes
(`flowrl.program.formulas.subset_of`): a field is an argument, and documented here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from flowrl.specs.base import Count, CountFromZero, Finite, FromZero, Scalar, Spec, Wrong, option


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterSpec(Spec):
    """The base of filters.

    Attributes:
        reason: The reason of a removal in the sample log.
    """

    family: ClassVar[str] = "filter"
    reason: ClassVar[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroVariance(FilterSpec):
    """Removes groups whose scores are all equal: their advantages are 0, they teach nothing.

    Attributes:
        tolerance: Groups whose measure is at most this are removed.
        measure: `spread` compares max - min; `std` the standard deviation.
        ddof: 1 for the sample standard deviation, 0 for the population's.
        singleton: `remove` or `keep` groups of one.
    """

    kind: ClassVar[str] = "zero_variance"
    reason: ClassVar[str] = "zero_variance"

    tolerance: FromZero = 1e-8
    measure: Literal["spread", "std"] = option("spread")
    ddof: int = option(1)
    singleton: Literal["remove", "keep"] = option("remove")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difficulty(FilterSpec):
    """Keeps groups whose mean score lies strictly between two bounds: low < mean < high.

    For scores of 0 and 1 the mean is the share of right answers, and the defaults remove prompts
    that were always or never solved. A mean that equals a bound is outside: `low=0.5, high=1.0`
    removes the groups that are always right too, and `high=1.1` keeps them.

    Attributes:
        low: Groups with a mean of at most this are removed.
        high: Groups with a mean of at least this are removed.
    """

    kind: ClassVar[str] = "difficulty"
    reason: ClassVar[str] = "difficulty"

    low: Finite = 0.0
    high: Finite = 1.0

    def conflicts(self) -> Iterator[Wrong]:
        """Yields a lower bound that is not below the upper one."""
        if not self.low < self.high:
            yield "low", self.low, f"a number below high={self.high:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectSpec(Spec):
    """The base of selections.

    Attributes:
        pairs: True if each group becomes a pair, the preferred sample first.
    """

    family: ClassVar[str] = "select"
    pairs: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Top(SelectSpec):
    """The `k` best samples of each group; of equal ones those that were sampled first."""

    kind: ClassVar[str] = "top"

    k: Count = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold(SelectSpec):
    """The samples that score at least `at_least`, whatever the others of their group do.

    Imitating them is rejection sampling (RAFT, ReST):

        good, _ = fl.select.threshold(rollout, scores, at_least=1.0)
        actor.update(good, loss=fl.loss.cross_entropy())

    A group without such a sample adds nothing, and a step without one makes no update.
    """

    kind: ClassVar[str] = "threshold"

    at_least: Finite


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed(SelectSpec):
    """Keeps the samples in whose response the map `parse` found a number."""

    kind: ClassVar[str] = "parsed"


@dataclass(frozen=True, slots=True, kw_only=True)
class BestAndWorst(SelectSpec):
    """Keeps a pair of each group, its best sample and then its worst, for preference losses.

    Groups whose scores differ by at most `tolerance` are removed, because neither sample of such a
    pair would be better.
    """

    kind: ClassVar[str] = "best_and_worst"
    pairs: ClassVar[bool] = True

    tolerance: FromZero = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomK(SelectSpec):
    """`k` random samples of each group, chosen by their ids: always the same ones.

    Attributes:
        k: Of each group; all of a smaller one.
        seed: Another seed chooses other samples.
    """

    kind: ClassVar[str] = "random"

    k: Count = 1
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns(SelectSpec):
    """Keeps of each episode the turns of one of its policies, in the response mask.

    The score of an episode is the sum of the rewards of these turns. Episodes in which that policy
    took no turn are left out.

    Attributes:
        policy: Place of the policy among those that take turns, from 0.
        of: Policies that take turns, in order.
    """

    kind: ClassVar[str] = "turns"

    policy: CountFromZero
    of: Count

    def conflicts(self) -> Iterator[Wrong]:
        """Yields a place that is none of theirs."""
        if self.policy >= self.of:
            yield "policy", self.policy, f"a number below of={self.of}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay(Spec):
    """Groups of earlier steps, with the scores and the rollout logprobs that they had then.

        hard, hard_scores = fl.filter.difficulty(rollout, scores)
        old, old_scores = fl.replay(hard, hard_scores, n=8)
        actor.update(old, advantages=fl.advantage.group_relative(old_scores))

    The filters and selections before it are the rule by which samples are held. The buffer is a
    part of the run's state: checkpoints hold it, and a resumed run replays what the stopped one
    would have.

    The groups of this step are held from the next step on. In the first step, or where all are too
    old, nothing is returned, and what works on the replayed samples is skipped.

    Samples come from older policies, so that an update on them needs a loss that corrects for the
    policy that sampled them; others are refused. RePO (Li et al., arXiv 2506.09340) updates on
    fresh and on replayed samples with the clipped ratio to that policy, with advantages of their
    own for each; ExGRPO (Zhan et al., arXiv 2510.02245) replays prompts that are neither always nor
    never solved. RePO chooses among earlier samples of the step's own prompts; here they are those
    of any prompt.

    Attributes:
        n: Groups that a step gets, as long as so many are held.
        capacity: Groups that are held; the oldest go first.
        max_age: Weight publications that a group may be behind when it is returned; older ones are
            forgotten.
        choose: `random` takes each held group with the same probability, without replacement;
            `newest` takes the last ones.
    """

    family: ClassVar[str] = "replay"
    kind: ClassVar[str] = "replay"

    n: Count
    capacity: Count = 512
    max_age: Count = 8
    choose: Literal["random", "newest"] = "random"

    def conflicts(self) -> Iterator[Wrong]:
        """Yields a buffer that is smaller than what a step takes."""
        if self.n > self.capacity:
            yield "n", self.n, f"at most capacity={self.capacity}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCondition(Spec):
    """True for rows of which a field has one of some values, or none of them.

    Attributes:
        field: The field, which may be inside others: `meta.topic`.
        values: The values, as a JSON list.
        excluded: True if the field must have none of the values.
    """

    family: ClassVar[str] = "where"
    kind: ClassVar[str] = "row"

    field: str
    values: str
    excluded: bool = option(False)

    @classmethod
    def of(cls, field: str, values: Iterable[Scalar], *, excluded: bool) -> Self:
        """Returns the condition with these values."""
        return cls(field=field, values=json.dumps(list(values)), excluded=excluded)

    @property
    def listed(self) -> tuple[Scalar, ...]:
        """The values."""
        return tuple(json.loads(self.values))

    @property
    def each(self) -> tuple[Self, ...]:
        """A condition for each of the values, which rows meet that have it."""
        return tuple(self.of(self.field, [value], excluded=False) for value in self.listed)

    @property
    def described(self) -> str:
        """The condition as a reader writes it: `kind='maths'`."""
        if len(self.listed) == 1:
            return f"{self.field}{'!=' if self.excluded else '='}{self.listed[0]!r}"
        among = ", ".join(map(repr, self.listed))
        return f"{self.field} {'not ' if self.excluded else ''}in [{among}]"

    def accepts(self, value: object) -> bool:
        """Returns True if a row with this value in the field is kept."""
        # True is no 1, and 1 no True.
        is_listed = any(
            value == each and isinstance(value, bool) == isinstance(each, bool)
            for each in self.listed
        )
        return is_listed != self.excluded

    def excludes(self, other: RowCondition) -> bool:
        """Returns True if no row meets both conditions, which are of one field."""
        if self.excluded or other.excluded:
            rest, named = (self, other) if self.excluded else (other, self)
            return not named.excluded and not any(map(rest.accepts, named.listed))
        return not any(map(self.accepts, other.listed))

    def conflicts(self) -> Iterator[Wrong]:
        """Yields a field without a name, and values that are none."""
        if not self.field.strip():
            yield "field", self.field, "the name of a field of the data rows"
        try:
            values = json.loads(self.values)
        except ValueError:
            values = None
        scalar = str | int | float | bool | None
        if (
            not isinstance(values, list)
            or not values
            or not all(isinstance(each, scalar) for each in values)
        ):
            yield "values", self.values, "a JSON list of strings, numbers, true, false or null"
