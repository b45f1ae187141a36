"""Sums of two numbers as data: every sum once in a fixed order, and wrong answers for pairs."""

from __future__ import annotations

from hashlib import blake2b

from flowrl.backend.batch import Ints
from flowrl.config.data import ArithmeticData
from flowrl.data.row_order import permutation
from flowrl.data.rows import Row, RowNeeds, Rows, RowSequence, Split
from flowrl.errors import DataError

_TIMES = 4
"""Wrong answers to each sum: a reward model would memorise a single one."""

_MISTAKES = (1, 2, 9, 10, 11, 20)
"""The usual errors of wrong sums: a little in the last place, in the one before it, or in both."""


class _Sums(RowSequence):
    """Rows made on demand: three digits have a million pairs.

    For pairs of answers, all sums to train on come `_TIMES` times, each time with another wrong
    answer.
    """

    def __init__(self, digits: int, split: Split, sums: Ints, needs: RowNeeds) -> None:
        self._digits = digits
        self._split = split
        self._sums = sums
        self._pairs = needs.rejected

    def __len__(self) -> int:
        return len(self._sums) * (_TIMES if self._pairs and self._split == "train" else 1)

    def _row(self, index: int) -> Row:
        digits = self._digits
        time, place = divmod(index, len(self._sums))
        a, b = divmod(int(self._sums[place]), 10**digits)
        width = digits + 1
        answer = f"{a + b:0{width}d}"
        return Row(
            index=index,
            prompt=f"{a:0{digits}d}+{b:0{digits}d}=",
            answer=answer,
            solution=answer,
            rejected=f"{_wrong_sum(a, b, digits, time):0{width}d}" if self._pairs else None,
            fields={
                "a": a,
                "b": b,
                "answer": answer,
                "kind": "carry" if a % 10 + b % 10 > 9 else "plain",
            },
            where=f"arithmetic {self._split}:{index + 1}",
        )


def _wrong_sum(a: int, b: int, digits: int, time: int) -> int:
    """Returns a + b with a small error, always the same, with as many digits as a right sum.

    These are the mistakes of someone who nearly knows how to add, which a reward model must
    distinguish from right sums: mostly one of `_MISTAKES`, else anything up to 25. Sums of three
    digits are wrong by ten times that as often, sums of one digit by 9 at most.
    """
    digest = blake2b(f"{a}+{b}/{time}".encode(), digest_size=4).digest()
    common = digest[0] % 10 < 7
    error = _MISTAKES[digest[1] % len(_MISTAKES)] if common else 1 + digest[1] % 25
    if digits == 1:
        error = 1 + error % 9
    elif digits == 3 and digest[2] % 2:
        error *= 10
    if digest[3] % 2:
        error = -error
    # No error is above half of the range, so that one of the two lies in it.
    return a + b + error if 0 <= a + b + error < 2 * 10**digits else a + b - error


def arithmetic_rows(source: ArithmeticData, needs: RowNeeds) -> Rows:
    """Returns the sums of a source.

    Raises:
        DataError: The held-out sums leave none to train on.
    """
    num_pairs = 100**source.digits
    if source.held_out >= num_pairs:
        raise DataError(
            "the held-out sums leave none to train on",
            where=f"data.{source.split}.held_out",
            found=str(source.held_out),
            expected=f"fewer than the {num_pairs} sums of {source.digits}-digit numbers",
        )
    order = permutation(num_pairs, "arithmetic", source.digits)
    sums = order[: source.held_out] if source.split == "eval" else order[source.held_out :]
    return Rows(
        _Sums(source.digits, source.split, sums, needs),
        source=f"arithmetic {source.split}, {source.digits} digits",
    )
