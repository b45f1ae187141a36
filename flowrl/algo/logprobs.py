"""Logprobs of chosen tokens and entropies from logits, without a second copy of the logits."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["chosen_logprobs"]

_CHUNK_ELEMENTS = 1 << 22
"""Logits converted to the arithmetic type at once; bounds the temporary memory."""


def chosen_logprobs(
    logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of chosen tokens under softmax(logits / temperature), and each row's entropy.

    ::

        logprob_u = x[rows_u, tokens_u] - log sum_v exp(x[rows_u, v])      x = logits / temperature
        entropy_k = -sum_v p_kv log p_kv                                   p = softmax(x)

    Computed in float32 (float64 for float64 logits) in chunks of rows. Backward recomputes the
    probabilities from the logits and the saved log-sum-exp, so beside the logits only their
    gradient is ever held in full, in the logits' own type.

    Args:
        logits: `[K, V]`.
        rows: int64 `[U]`, row of each choice.
        tokens: int64 `[U]`, token of each choice; the pairs (row, token) are distinct.
        temperature: Divides the logits; 0 means greedy decoding, whose logprobs are those at 1.

    A logit of -inf is a token of probability 0, which adds nothing to the entropy.

    Returns:
        Logprobs `[U]` and entropies `[K]`, both with gradient; that of the entropies costs nothing
        where no loss reads them.
    """
    scale = 1.0 / temperature if temperature > 0 else 1.0
    result: tuple[torch.Tensor, torch.Tensor] = _Chosen.apply(  # type: ignore[no-untyped-call]
        logits, rows, tokens, scale
    )
    return result


class _Chosen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kind = torch.float64 if logits.dtype == torch.float64 else torch.float32
        norms, entropies = [], []
        for part in torch.split(logits, _chunk(logits)):
            x = part.to(kind) * scale
            norm = x.logsumexp(-1)
            mean = torch.linalg.vecdot((x - norm[:, None]).exp(), _finite(x))
            norms.append(norm)
            entropies.append(norm - mean)
        log_norm = torch.cat(norms)
        logprobs = logits[rows, tokens].to(kind) * scale - log_norm[rows]
        entropy = torch.cat(entropies)
        ctx.save_for_backward(logits, rows, tokens, log_norm, logprobs, entropy)
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor | None, entropy_grad: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        logits, rows, tokens, log_norm, logprobs, entropy = ctx.saved_tensors
        scale: float = ctx.scale
        if grad is None:
            grad = torch.zeros_like(logprobs)
        # d logprob_u / d x[k, v] = [k = rows_u] * ([v = tokens_u] - p_kv); summed over u it is a
        # softmax times a number for each row, and a correction at the chosen places.
        row_grad = torch.zeros_like(log_norm).index_add_(0, rows, grad) * scale
        # d entropy_k / d x[k, v] = -p_kv * (log p_kv + entropy_k)
        slope = None if entropy_grad is None else entropy_grad * scale
        result = torch.empty_like(logits)
        size = _chunk(logits)
        for begin in range(0, len(logits), size):
            part = slice(begin, begin + size)
            log_p = (logits[part].to(log_norm.dtype) * scale).sub_(log_norm[part, None])
            p = log_p.exp()
            factor = -row_grad[part, None]
            if slope is not None:
                factor = factor - slope[part, None] * (_finite(log_p) + entropy[part, None])
            result[part].copy_(p.mul_(factor))
        # Computed anew and not added: in a 16-bit type the sum would cancel to nothing at p near 1.
        chosen = grad * scale - logprobs.exp() * row_grad[rows]
        if slope is not None:
            chosen -= slope[rows] * logprobs.exp() * (_finite(logprobs) + entropy[rows])
        result[rows, tokens] = chosen.to(result.dtype)
        return result, None, None, None


def _finite(x: torch.Tensor) -> torch.Tensor:
    """-inf becomes the smallest number, so that 0 times it is 0."""
    return x.clamp(min=torch.finfo(x.dtype).min)


def _chunk(logits: torch.Tensor) -> int:
    return max(1, _CHUNK_ELEMENTS // logits.shape[1])
