"""Policies on engines: start order, routing, weight publications, repacking and quarantine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flowrl.errors import SchedulerError
from flowrl.rollout.policies.limits import require_at_least
from flowrl.specs.base import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderPolicy(Spec):
    """Base of orders. Samples that come back always go before fresh ones, in either order."""

    family: ClassVar[str] = "order"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstOffered(OrderPolicy):
    """Samples start in the order in which they were offered or returned."""

    kind: ClassVar[str] = "first_offered"


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestFirst(OrderPolicy):
    """The sample with the most tokens still to go first, as far as they can be predicted.

    Longest-first list scheduling ends within 4/3 - 1/(3K) of the best makespan on K slots where
    lengths are known (Graham, 1969); any order ends within 2 - 1/K. So the gain is what the tail
    of a step costs, and a wrong prediction costs no more than a wrong order.

    Lengths are learned online. The prediction for a sample of prompt p is

        (shrinkage * prior + n * mean) / (shrinkage + n)

    with n and mean over the samples of p that finished, siblings and earlier epochs alike, and the
    prior the caller's `expected_tokens`, or else the mean of all samples. What still goes is the
    prediction less the tokens that are kept.

    Two rules keep it from starving anything. In an asynchronous run the members of a group that has
    begun, and so ages, go before those of groups that have not, older weights first. And a group is
    overtaken only by groups that were admitted in the same `window`.

    Attributes:
        shrinkage: Samples that the prior counts for.
        memory: n is at most so many, so that old lengths are forgotten as the policy changes.
        prompts: Prompts to remember; the one longest not seen is forgotten first.
        probe: Of a prompt that nothing is known about, one member goes before all that is known,
            so that its siblings are predicted from it.
        window: Groups among which lengths decide; groups are counted in the order of admission, and
            each `window` of them comes before the next.
    """

    kind: ClassVar[str] = "longest_first"

    shrinkage: float = 1.0
    memory: int = 16
    prompts: int = 100_000
    probe: bool = True
    window: int = 4096

    def __post_init__(self) -> None:
        require_at_least(self, 0.01, "shrinkage")
        require_at_least(self, 1, "memory", "prompts", "window")


# Which engine with free slots gets the next sample.


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingPolicy(Spec):
    """Base of routing policies. A sample that failed on an engine prefers any other, once."""

    family: ClassVar[str] = "routing"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptAffinity(RoutingPolicy):
    """Prefers the engine of the group's previous member, which holds the prompt's KV cache.

    When that engine has no free slot, the least loaded one is taken.
    """

    kind: ClassVar[str] = "prompt_affinity"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastLoaded(RoutingPolicy):
    """The engine with the least held / capacity; of several, the one that joined first."""

    kind: ClassVar[str] = "least_loaded"


# What becomes of running samples when new weights are published.


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationPolicy(Spec):
    """Base of publication policies.

    Attributes:
        empties: Whether an engine is emptied before it takes the new weights. It then gets no
            sample from the publication until the caller reports `EngineUpdated`, which
            `UpdateEngine` asks for once nothing runs there.
        aborts: Whether it is emptied by aborts.
    """

    family: ClassVar[str] = "publication"
    empties: ClassVar[bool]
    aborts: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepRunning(PublicationPolicy):
    """Running samples continue; their version spans record where the weights changed.

    The caller updates the engines before it reports the publication.
    """

    kind: ClassVar[str] = "keep"
    empties: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRunning(PublicationPolicy):
    """Running samples are aborted and continue on an engine that has the new weights."""

    kind: ClassVar[str] = "abort"
    empties: ClassVar[bool] = True
    aborts: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishRunning(PublicationPolicy):
    """Running samples finish; each engine loads the new weights when it is empty."""

    kind: ClassVar[str] = "finish"
    empties: ClassVar[bool] = True


# Whether the tail of a step is moved onto fewer engines.


@dataclass(frozen=True, slots=True, kw_only=True)
class RepackPolicy(Spec):
    """Base of repacking policies."""

    family: ClassVar[str] = "repack"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRepack(RepackPolicy):
    """Samples stay where they are."""

    kind: ClassVar[str] = "no_repack"


@dataclass(frozen=True, slots=True, kw_only=True)
class RepackTail(RepackPolicy):
    """When nothing is queued and few samples run, they are gathered on the fewest engines.

    As soon as the running samples fit on at most `share` of the engines that run any, the others'
    samples are aborted with their tokens kept and go on there, and the freed engines are paused:
    the caller may give their devices to the trainer. They continue when samples wait that the
    others have no free slot for. Each repacking at least divides the number of engines by 1/share,
    so over a tail a sample moves at most log(engines) / log(1/share) times.

    Attributes:
        share: Of the engines in use, at most 0.5 or so: below 1.
    """

    kind: ClassVar[str] = "repack_tail"

    share: float = 0.5

    def __post_init__(self) -> None:
        require_at_least(self, 0, "share")
        if self.share >= 1:
            raise SchedulerError(
                "share is out of range",
                where=f"{self.family} policy {self.kind}",
                found=repr(self.share),
                expected="a share below 1, or samples would be moved for nothing",
            )


# What becomes of an engine that fails again and again.


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantinePolicy(Spec):
    """Base of quarantine policies."""

    family: ClassVar[str] = "quarantine"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoQuarantine(QuarantinePolicy):
    """An engine gets samples as long as it exists; each sample's retries bound the damage."""

    kind: ClassVar[str] = "no_quarantine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine(QuarantinePolicy):
    """After `failures` in a row it is closed for a while, then tried with one sample at a time.

    An engine that fails at once is always the least loaded one, and would otherwise swallow the
    whole queue. In a row means: without a finished sample in between. Failures of one sample count
    once, so that a sample which breaks every engine closes none of them; the loss of the engine
    counts as one, also when it joins again under its name.

    Its running samples are aborted with their tokens kept. After the first quarantine the engine is
    on trial: one finished sample opens it fully, one failure closes it again, for `growth` times as
    long.

    Attributes:
        failures: Different samples failed in a row.
        seconds: Of the first quarantine.
        growth: Factor from one quarantine to the next.
        most_seconds: The longest one.
    """

    kind: ClassVar[str] = "quarantine"

    failures: int = 3
    seconds: float = 30.0
    growth: float = 2.0
    most_seconds: float = 600.0

    def __post_init__(self) -> None:
        require_at_least(self, 1, "failures", "growth")
        require_at_least(self, 1e-3, "seconds")
        require_at_least(self, self.seconds, "most_seconds")

    def duration_s(self, before: int) -> float:
        """Seconds of a quarantine that follows `before` others without a success in between."""
        return min(self.most_seconds, self.seconds * self.growth ** min(before, 64))
