"""Which groups may start: all that are offered, or no more than can be consumed in time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flowrl.rollout.policies.checks import require_at_least
from flowrl.specs.base import Spec, option

__all__ = ["AdmissionPolicy", "AdmitAll", "AgeBudget"]


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
    alive instead of all that were ever submitted, so that filtered and failed groups make room.

    With it the scheduler asks for prompts by itself (`NeedPrompts`), and a batch that is asked for
    without a version is for the first version that still lacks one: it may be asked for while the
    batch before it is being trained on.

    Attributes:
        groups: Groups of a batch (n above).
        batches_per_version: Batches between two publications (b above).
        slack: Groups fewer in flight than the bound allows. With 0 and a > 0 no straggler can be
            overtaken: whatever is passed over today must be taken tomorrow. At most a b n.
        queue: Groups to hold ready beside those admitted, so that a freed slot need not wait for
            the caller to offer more.
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
