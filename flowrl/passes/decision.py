"""What a pass decided that a person may want to question; the compiler puts it into the plan."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Decision"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A choice of a pass.

    Attributes:
        subject: What was decided about: `actor.update.old_logprobs`.
        choice: How.
        why: Why so.
        rejected: Other choices, each with the reason against it.
    """

    subject: str
    choice: str
    why: str
    rejected: tuple[tuple[str, str], ...] = ()
