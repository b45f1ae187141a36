"""Shuffles and draws that stay the same for ever.

NumPy keeps the raw stream of a bit generator fixed across versions, and promises that for nothing
built on it (NEP 19), so a permutation is the order of raw random keys.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from flowrl.backend.batch import Ints

__all__ = ["permutation", "raw_stream"]


def raw_stream(*key: int | str) -> np.random.Philox:
    """The stream of random 64-bit numbers that `key` names; only its `random_raw` is for ever."""
    digest = blake2b(repr(key).encode(), digest_size=16).digest()
    return np.random.Philox(key=int.from_bytes(digest, "little"))


def permutation(num: int, *key: int | str) -> Ints:
    """int64 `[num]`, the numbers 0 to num - 1 in the random order that `key` names."""
    # Equal keys are about as likely as num^2 / 2^65; a stable sort keeps even those in order.
    return np.argsort(raw_stream(*key).random_raw(num), kind="stable").astype(np.int64)
