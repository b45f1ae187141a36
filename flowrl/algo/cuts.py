"""Cuts of responses, from which other samples continue. numpy only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flowrl.specs.cut import CutLeastLikely, CutSpec, most_before


def prefix_length(spec: CutSpec, logprobs: npt.NDArray[np.float32]) -> int:
    """Returns how many tokens of a response are before its cut: at most R - 1.

    - `at`: min(tokens, R - 1).
    - `share`: min(floor(share R), R - 1).
    - `least_likely`: the position of the token with the `rank`-th smallest logprob, the first one
      among equals; of a response with fewer tokens that of its most likely one. TreeRL (Hou et al.,
      2025, arXiv 2506.11902) branches where tokens are the most uncertain.

    Args:
        spec: The cut.
        logprobs: float32 `[R]`, of the sampled tokens.
    """
    if isinstance(spec, CutLeastLikely) and len(logprobs):
        order = np.argsort(logprobs, kind="stable")
        return int(order[min(spec.rank, len(logprobs)) - 1])
    return most_before(spec, len(logprobs))
