"""Shuffles that stay the same for ever.

NumPy keeps the raw stream of a bit generator fixed across versions, and promises that for nothing
built on it (NEP 19), so a permutation is the order of raw random keys.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from flowrl.backend.batch import Ints

__all__ = ["permutation"]


def permutation(num: int, *key: int | str) -> Ints:
    """int64 `[num]`, the numbers 0 to num - 1 in the random order that `key` names."""
    digest = blake2b(repr(key).encode(), digest_size=16).digest()
    stream = np.random.Philox(key=int.from_bytes(digest, "little"))
    # Equal keys are about as likely as num^2 / 2^65; a stable sort keeps even those in order.
    return np.argsort(stream.random_raw(num), kind="stable").astype(np.int64)
