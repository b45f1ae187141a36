"""Filling new rows: from the model, or from a running row that has the same prompt.

Members of a group share their prompt. For those that enter together, it is computed once. A member
that enters later, while another member runs, copies the prompt's keys from that member's row and
samples its first token from the prompt's logits. So a slot that becomes free in the middle of a
group costs no forward pass. After a change of the weights, nothing is shared.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flowrl.backend.batch import Ints
from flowrl.backend.protocols import GenerateRequest
from flowrl_backends.torch.admission import gather_prompts
from flowrl_backends.torch.attention import ModelDecoder
from flowrl_backends.torch.fused import FusedDecoder
from flowrl_backends.torch.rows import Run

_TOKENS = 8192
"""Padded tokens in one prefill call; bounds its activations."""
_KEPT_BYTES = 16 * 2**20
"""Of logits of prompts; the oldest go first."""


class Prefill:
    """Fills rows of a decoder's slots.

    The logits of a prompt's last token are kept with the row that holds its keys. Both are valid
    only together and for the weights that computed them, which `Run.filled` identifies.
    """

    def __init__(self, decoder: ModelDecoder | FusedDecoder, device: torch.device) -> None:
        self._decoder = decoder
        self._device = device
        self._weights = -1
        self._kept: OrderedDict[str, tuple[Ints, Tensor]] = OrderedDict()

    def forget(self) -> None:
        """Frees the kept logits."""
        self._kept.clear()

    def fill(self, runs: Sequence[Run], rows: range) -> Tensor:
        """Fills `rows`, the last of `runs`, from their prompts and kept responses.

        Returns:
            float32 `[len(rows), V]`.
        """
        if self._weights != self._decoder.weights_seen:
            self._weights = self._decoder.weights_seen
            self._kept.clear()
        slots = self._decoder.slots
        requests = [runs[row].request for row in rows]
        contexts, members = gather_prompts(requests)
        slots.reserve(rows.stop, max(len(context) for context in contexts))
        known: dict[int, tuple[int, Tensor]] = {}
        for index, group in enumerate(members):
            found = self._find(requests[group[0]], runs[: rows.start])
            if found is not None:
                known[index] = found
        order = sorted(
            (index for index in range(len(contexts)) if index not in known),
            key=lambda index: len(contexts[index]),
        )
        firsts = [rows.start + group[0] for group in members]
        logits = self._compute(order, contexts, firsts)
        for place, index in enumerate(order):
            self._keep(requests[members[index][0]], logits[place])
        for index, (row, of_prompt) in known.items():
            slots.copy_rows([row], [firsts[index]], len(contexts[index]))
            order.append(index)
            logits.append(of_prompt)
        sources = [rows.start + group[0] for group in members for _ in group[1:]]
        targets = [rows.start + member for group in members for member in group[1:]]
        shared = max((len(contexts[i]) for i, g in enumerate(members) if len(g) > 1), default=0)
        slots.copy_rows(sources, targets, shared)
        owner = [0] * len(rows)
        for place, index in enumerate(order):
            for member in members[index]:
                owner[member] = place
        for row in rows:
            runs[row].filled = self._weights
        return torch.stack([logits[place] for place in owner])

    def _compute(
        self, order: Sequence[int], contexts: Sequence[Ints], firsts: Sequence[int]
    ) -> list[Tensor]:
        """Runs the model over contexts, given by ascending length; `[V]` of each in that order."""
        logits: list[Tensor] = []
        batch: list[int] = []
        for place, index in enumerate(order):
            batch.append(index)
            following = order[place + 1] if place + 1 < len(order) else None
            if following is None or (len(batch) + 1) * len(contexts[following]) > _TOKENS:
                lengths = [len(contexts[i]) for i in batch]
                padded = np.zeros((len(batch), lengths[-1]), np.int64)
                for i, context in enumerate(batch):
                    padded[i, : lengths[i]] = contexts[context]
                filled = self._decoder.prefill(
                    torch.from_numpy(padded).to(self._device),
                    torch.tensor(lengths, device=self._device),
                    torch.tensor([firsts[i] for i in batch], device=self._device),
                )
                logits.extend(filled.unbind(0))
                batch = []
        return logits

    def _find(self, request: GenerateRequest, before: Sequence[Run]) -> tuple[int, Tensor] | None:
        """Returns a running row that begins with the request's prompt, and the prompt's logits."""
        key = request.shares_prompt
        if len(request.response) or not key or key not in self._kept:
            return None
        prompt, logits = self._kept[key]
        if not _equal(prompt, request.prompt):
            return None
        for row in range(len(before) - 1, -1, -1):
            run = before[row]
            same = run.filled == self._weights and run.request.shares_prompt == key
            if same and _equal(prompt, run.request.prompt):
                return row, logits
        return None

    def _keep(self, request: GenerateRequest, logits: Tensor) -> None:
        """Keeps a prompt's logits if other requests may share it."""
        if len(request.response) or not request.shares_prompt:
            return
        # A copy, so that a prompt does not hold the logits of all that were filled with it.
        self._kept[request.shares_prompt] = (request.prompt, logits.clone())
        self._kept.move_to_end(request.shares_prompt)
        while len(self._kept) > 1 and len(self._kept) * logits.nbytes > _KEPT_BYTES:
            self._kept.popitem(last=False)


def _equal(one: Ints, other: Ints) -> bool:
    return one is other or np.array_equal(one, other)
