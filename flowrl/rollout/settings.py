"""What a scheduler is made from."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.errors import SchedulerError

__all__ = ["SchedulerSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """The rules of one stage.

    Attributes:
        group_size: Samples a group; a delivered group has exactly so many.
        max_staleness: Publications that a sample may be behind when it is consumed. 0 is
            synchronous: batches are then filled strictly in offer order.
        max_attempts: Attempts of a sample that may fail before it is dropped.
        judges_groups: Fully scored groups are judged (filtered or kept) before delivery.
        refill: A batch has exactly the asked number of kept groups. Otherwise filtered and
            dropped groups count towards it, and every offered group is answered in one batch.
    """

    group_size: int
    max_staleness: int = 0
    max_attempts: int = 3
    judges_groups: bool = False
    refill: bool = False

    def __post_init__(self) -> None:
        for name, least in (("group_size", 1), ("max_staleness", 0), ("max_attempts", 1)):
            value = getattr(self, name)
            if value < least:
                raise SchedulerError(
                    f"{name} is too small", found=str(value), expected=f"at least {least}"
                )
