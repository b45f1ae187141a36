"""Seeds of everything random in a run, derived from the run's seed and logical names alone.

Nothing depends on the wall clock, on arrival order or on how many numbers were generated before, so
a sample has the same tokens in a resumed run, on another engine and in another batch.
"""

from __future__ import annotations

from hashlib import blake2b

__all__ = ["derive_seed"]


def derive_seed(seed: int, *names: str) -> int:
    """Returns a 63-bit seed for `names`, e.g. `derive_seed(0, "rollout", "grpo", "0/17/3")`."""
    text = "\x1f".join((str(seed), *names))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
