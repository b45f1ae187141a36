"""The random stream of a sample: a counter-based hash instead of a generator with state.

The random number of response token `t` is a pure function of the sample's seed and `t`, so it does
not depend on the other samples in the batch, on their arrival, or on the point at which the sample
continues after an abort.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_GOLDEN_INT = 0x9E3779B97F4A7C15
_GOLDEN = np.uint64(_GOLDEN_INT)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK = 0xFFFFFFFFFFFFFFFF


def uniforms(seeds: Sequence[int], first: Sequence[int], count: int) -> npt.NDArray[np.float32]:
    """Returns random numbers for `count` consecutive tokens of each sample.

    `u(seed, t) = (mix(mix(seed + g) + (t + 1) g) >> 40) / 2**24`, where `mix` is the finaliser of
    SplitMix64 and `g` its increment (Steele, Lea and Flood, Fast Splittable Pseudorandom Number
    Generators, 2014, figure 17, with Stafford's mix 13). The seed is mixed first so that the
    streams of neighbouring seeds are not shifted copies of each other. 24 bits are what a float32
    holds exactly; `u < 1` always.

    Args:
        seeds: The seed of each sample, taken modulo 2**64.
        first: The token index t of each sample's first number.
        count: The number of tokens.

    Returns:
        float32 `[len(seeds), count]` in [0, 1).
    """
    keys = _mix(np.array([(seed + _GOLDEN_INT) & _MASK for seed in seeds], dtype=np.uint64))
    places = np.arange(1, count + 1, dtype=np.uint64)
    counters = np.add(np.asarray(first, np.uint64)[:, None], places, dtype=np.uint64)
    steps = np.multiply(counters, _GOLDEN, dtype=np.uint64)
    bits = _mix(np.add(keys[:, None], steps, dtype=np.uint64))
    return ((bits >> np.uint64(40)).astype(np.float32)) * np.float32(2.0**-24)


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))
