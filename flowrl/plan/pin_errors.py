"""Pins that are refused for what they say, before anything is planned; and what would do instead.

The values nearest to what was asked are told where there is a plan with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from flowrl.errors import PlanError
from flowrl.plan.check.whole import number_ranges
from flowrl.plan.options import Pin

MOST_TRIES = 8
"""Values that are tried in the place of a pinned one, the nearest first."""

MOST_OFFERED = 2
"""Of those with which there is a plan, how many are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Near:
    """Values in the place of a pin's, the nearest first."""

    pin: Pin
    values: tuple[str, ...]

    def words(self, values: Sequence[str]) -> str:
        """`set actor.tp to 2 or 4`."""
        key = self.pin.setting or f"{self.pin.subject}.{self.pin.field}"
        return f"set {key} to {' or '.join(values)}"


class PinError(PlanError):
    """A pin says what cannot be.

    Attributes:
        near: What pins might say instead, one of them at a time.
    """

    near: tuple[Near, ...] = ()

    def offering(self, *near: Near) -> PinError:
        """The same, with what might be said."""
        self.near = near
        return self


def contradiction(
    pins: Sequence[Pin],
    why: str,
    hint: str = "take one of them out",
    near: Sequence[Near] = (),
) -> PinError:
    """Of pins that cannot all be kept; names them."""
    wheres = dict.fromkeys(pin.where for pin in pins)
    names = [str(pin) for pin in pins]
    error = PinError(
        f"{', '.join(names[:-1])} and {names[-1]} contradict each other: {why}",
        where=" and ".join(wheres),
        hint=hint,
    )
    return error.offering(*near)


def near_devices(wanted: Sequence[range], usable: Sequence[int]) -> Iterator[str]:
    """Devices that may be used, near those that were asked for: what is there of them, as many
    others, fewer, and more.

    Args:
        usable: Their numbers.
    """
    last = sorted(usable)
    there = [one for one in last if any(one in some for some in wanted)]
    asked = min(sum(len(some) for some in wanted), len(last))
    found = [there]
    for size in _fewer(asked):
        found.append(there[:size] if len(there) >= size else last[-size:])
    while 0 < asked < len(last):
        asked *= 2
        found.append(last[-asked:])
    yield from dict.fromkeys(number_ranges(some) for some in found if some)


def _fewer(number: int) -> Iterator[int]:
    """A number, three quarters, two thirds and a half of it, and so on."""
    while number:
        yield from (number, 3 * number // 4 or number, 2 * number // 3 or number)
        number //= 2


def with_nearest(
    error: PlanError,
    fits: Callable[[Pin, str], bool],
    shares: Sequence[Sequence[int]] = (),
) -> PlanError:
    """The error, told with the values with which there is a plan.

    Args:
        fits: Whether there is one with another value of a pin.
        shares: Devices that are tried by themselves: where no others do, those of pins may be some.
    """
    if not isinstance(error, PinError) or error.others:  # those have to be mended too
        return error
    ways = []
    for near in error.near:
        every = [near.values]
        if near.pin.field == "devices":
            every += [tuple(near_devices([range(max(one) + 1)], one)) for one in shares]
        for values in every:
            tried = (value for value in islice(values, MOST_TRIES) if fits(near.pin, value))
            if offered := list(islice(tried, MOST_OFFERED)):
                ways.append(near.words(offered))
                break
    error.hint = ", or ".join([*ways, *([error.hint] if error.hint else [])]) or None
    return error
