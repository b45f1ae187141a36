"""Which groups were ever offered, in one bit each, so that none is consumed twice in a long run."""

from __future__ import annotations

from flowrl.errors import SchedulerError
from flowrl.ids import GroupId

__all__ = ["OfferedGroups"]


class OfferedGroups:
    """A set of group ids that only grows: a bitmap of prompts for each epoch."""

    __slots__ = ("_epochs",)

    def __init__(self) -> None:
        self._epochs: dict[int, bytearray] = {}

    def add(self, group: GroupId) -> bool:
        """Remembers the group; False if it was there already.

        Raises:
            SchedulerError: the id is not `epoch/prompt`.
        """
        epoch, prompt = self._parse(group)
        bits = self._epochs.setdefault(epoch, bytearray())
        byte, mask = prompt >> 3, 1 << (prompt & 7)
        if byte >= len(bits):
            # Doubling keeps the cost of growing constant for each prompt.
            bits.extend(bytes(max(byte + 1 - len(bits), len(bits))))
        if bits[byte] & mask:
            return False
        bits[byte] |= mask
        return True

    def __contains__(self, group: GroupId) -> bool:
        epoch, prompt = self._parse(group)
        bits = self._epochs.get(epoch, b"")
        return prompt >> 3 < len(bits) and bool(bits[prompt >> 3] & (1 << (prompt & 7)))

    @staticmethod
    def _parse(group: GroupId) -> tuple[int, int]:
        epoch, _, prompt = group.partition("/")
        if not (epoch.isdecimal() and prompt.isdecimal()):
            raise SchedulerError(
                "a group id has the wrong form",
                found=repr(group),
                expected="'epoch/prompt', both counted from 0",
            )
        return int(epoch), int(prompt)

    def to_json(self) -> dict[str, str]:
        """For each epoch its bitmap in hexadecimal: bit `p & 7` of byte `p >> 3` is prompt p.

        Written at every step boundary, so it costs one call an epoch and no look at each prompt.
        """
        return {
            str(epoch): bits.rstrip(b"\0").hex() for epoch, bits in sorted(self._epochs.items())
        }

    @classmethod
    def from_json(cls, value: dict[str, str]) -> OfferedGroups:
        """The set that `to_json` wrote.

        Raises:
            ValueError: not such a description.
        """
        offered = cls()
        offered._epochs = {int(epoch): bytearray.fromhex(bits) for epoch, bits in value.items()}
        return offered
