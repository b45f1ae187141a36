"""Policies on prompts: admission, over-sampling, refill after filters, and shares of sources."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from flowrl.errors import SchedulerError
from flowrl.rollout.policies.limits import require_at_least
from flowrl.specs.base import USER_OPTIONS, Spec, option


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionPolicy(Spec):
    """Base of admission policies."""

    family: ClassVar[str] = "admission"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmitAll(AdmissionPolicy):
    """A group may start as soon as it is offered; how much is offered is the caller's business."""

    kind: ClassVar[str] = "admit_all"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgeBudget(AdmissionPolicy):
    """A group may start only if some batch can still take it before it is too old.

    A group that starts at version v can be consumed up to version v + a, where a is the bound on a
    sample's age. If the next batch is for version w, and one version is trained on b batches of n
    groups each, of which c are already delivered for w, then the batches that such a group can
    still reach take

        ((v + a + 1 - w) b - c) n

    groups. So many may be admitted and not yet consumed, less `slack`; the rest waits in the
    queue, where nothing ages. This holds for each sample, not on average. It is the bound of AReaL
    (arXiv:2505.24298, equation 3: floor((N - 1) / B) <= i + eta), counted over groups that are
    alive instead of all that were ever submitted, so that filtered and failed groups free their
    place.

    With it the scheduler asks for prompts by itself (`NeedPrompts`), and a batch that is asked for
    without a version is for the first version that still lacks one: it may be asked for while the
    batch before it is being trained on.

    Attributes:
        groups: Groups of a batch (n above).
        batches_per_version: Batches between two publications (b above).
        slack: Groups fewer in flight than the bound allows. With 0 and a > 0 no straggler can be
            overtaken: whatever is passed over today must be taken tomorrow. At most a b n.
        queue: Groups to hold ready in addition to those admitted, so that a freed slot does not
            wait for the caller to offer more.
    """

    kind: ClassVar[str] = "age_budget"

    groups: int
    batches_per_version: int = option(1)
    slack: int = option(0)
    queue: int = option(0)

    def __post_init__(self) -> None:
        require_at_least(self, 1, "groups", "batches_per_version")
        require_at_least(self, 0, "slack", "queue")

    def next_version(self, version: int, served: tuple[int, int]) -> int:
        """The version that the next batch is for.

        Args:
            version: The latest publication.
            served: `(version, batches)` of the latest delivery: its version, and how many batches
                were delivered for it.
        """
        last, batches = served
        return max(version, last + (batches >= self.batches_per_version))

    def capacity(self, version: int, staleness: int, horizon: int, served: tuple[int, int]) -> int:
        """Groups that may be admitted and not consumed at once; see the class.

        Args:
            horizon: The version that the next batch is for (w above).
        """
        if version + staleness < horizon:
            return 0
        last, batches = served
        reachable = (version + staleness + 1 - horizon) * self.batches_per_version
        if horizon == last:
            reachable -= batches
        return max(0, reachable * self.groups - self.slack)


# Spare samples: more members than a group needs, more prompts than a batch needs.


@dataclass(frozen=True, slots=True, kw_only=True)
class OverSampling(Spec):
    """Redundant members and prompts, which cut the tail of a step at the cost of some tokens.

    A group then begins with `group_size + members` members and is complete as soon as
    `group_size` of them are scored; the others are aborted and end as DROPPED(redundant). A member
    that fails for good costs nothing as long as enough others are left.

    With `prompts`, so many groups more than a batch needs are in flight, and a batch takes the
    groups that are ready first, whatever the order of offers. Those left over stay for the next
    batch where the bound on age lets them; otherwise they end as redundant, too.

    Both make what is trained on depend on who finishes first, which favours short answers; without
    them a synchronous run does not depend on it.

    Attributes:
        members: Redundant members of each group.
        prompts: Redundant groups in flight; needs admission by age budget, and refill.
    """

    family: ClassVar[str] = "over_sampling"
    kind: ClassVar[str] = "over_sampling"

    members: int = 0
    prompts: int = 0

    def __post_init__(self) -> None:
        require_at_least(self, 0, "members", "prompts")


# How many prompts to ask for when filtered groups leave a batch short (dynamic sampling).


@dataclass(frozen=True, slots=True, kw_only=True)
class RefillPolicy(Spec):
    """Base of refill policies; they matter only where `refill` is on."""

    family: ClassVar[str] = "refill"

    @property
    def fading(self) -> float:
        """The factor by which the counts of earlier rounds decay for each group of the next."""
        return 0.0

    def ask(self, missing: int, kept: float, settled: float) -> int:
        """Groups to ask for.

        Args:
            missing: Groups that a waiting batch lacks; positive.
            kept: Groups that got READY so far, recent ones counted most.
            settled: The same of all groups that got READY or were filtered or dropped.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class AskMissing(RefillPolicy):
    """Asks for as many as are missing, again and again if these are filtered too."""

    kind: ClassVar[str] = "ask_missing"

    def ask(self, missing: int, kept: float, settled: float) -> int:
        return missing


@dataclass(frozen=True, slots=True, kw_only=True)
class AskByKeepRate(RefillPolicy):
    """So many that, at the share kept so far, enough will be left: ceil(missing / share).

    The share is `(prior weight + kept) / (weight + settled)`, where kept and settled count recent
    groups: the counts of earlier rounds are multiplied by `1 - 1/memory` for each group of the next
    round. Saves rounds of asking, each as long as the longest of its samples; what is too many
    stays for the next batch, or ages.

    Attributes:
        prior: Share to begin with.
        weight: Groups that the prior counts for.
        memory: Groups after which what was seen counts 1/e.
        most: Never ask for more than so many times what is missing.
    """

    kind: ClassVar[str] = "ask_by_keep_rate"

    prior: float = 0.5
    weight: float = 8.0
    memory: float = 256.0
    most: float = 4.0

    def __post_init__(self) -> None:
        require_at_least(self, 1, "memory", "most")
        require_at_least(self, 1e-3, "prior", "weight")
        if self.prior > 1:
            raise SchedulerError(
                "prior is out of range",
                where=f"{self.family} policy {self.kind}",
                found=repr(self.prior),
                expected="a share between 0.001 and 1",
            )

    @property
    def fading(self) -> float:
        return 1 - 1 / self.memory

    def ask(self, missing: int, kept: float, settled: float) -> int:
        share = (self.prior * self.weight + kept) / (self.weight + settled)
        return math.ceil(missing * min(self.most, 1 / share))


# How several sources of prompts share the engines.


@dataclass(frozen=True, slots=True, kw_only=True)
class FairnessPolicy(Spec):
    """Base of fairness policies."""

    family: ClassVar[str] = "fairness"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstCome(FairnessPolicy):
    """All sources share one queue, in the order of offers."""

    kind: ClassVar[str] = "first_come"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedShares(FairnessPolicy):
    """While several sources have samples waiting, starts are shared out by weight.

    Stride scheduling (Waldspurger and Weihl, 1995): each source has a pass, the source with the
    least one is next, and its pass rises by 1/weight for each sample started. After m starts a
    source with share w has had m w of them, within one group. A source that comes back from having
    nothing to start has no claim on what it missed. Whole groups are started one after the other,
    so that members still share their prompt's cache.

    With admission by age budget it is admissions that are shared out, and `NeedPrompts` names the
    source to offer from.

    Attributes:
        shares: Pairs of source and weight; written as if each were an option of its own.
        other: Weight of a source that is not named.
    """

    kind: ClassVar[str] = "weighted_shares"

    shares: tuple[tuple[str, float], ...] = field(default=(), metadata=USER_OPTIONS)
    other: float = 1.0

    def __post_init__(self) -> None:
        require_at_least(self, 1e-6, "other")
        names = [name for name, _ in self.shares]
        taken = sorted({name for name in names if names.count(name) > 1 or name in _RESERVED})
        wrong = [f"{name}={weight!r}" for name, weight in self.shares if not weight >= 1e-6]
        if taken or wrong:
            raise SchedulerError(
                "the shares of sources are wrong",
                where=f"{self.family} policy {self.kind}",
                found=", ".join([*taken, *wrong]),
                expected="each source once with a positive weight, none called "
                + " or ".join(_RESERVED),
            )

    def weight(self, source: str) -> float:
        """The share of a source, relative to others."""
        return next((weight for name, weight in self.shares if name == source), self.other)


_RESERVED = ("kind", "other", "shares")
