"""Logprobs of chosen tokens and entropies from logits, without a second copy of the logits.

Logprobs are of the model's distribution or of the sampler's; `SamplerTransform` repeats what the
sampler did to the logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

_CHUNK_ELEMENTS = 1 << 22
"""The number of logits per chunk, which bounds the temporary memory."""


def chosen_logprobs(
    logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns logprobs of chosen tokens under softmax(logits / temperature), and row entropies.

    ::

        logprob_u = x[rows_u, tokens_u] - log sum_v exp(x[rows_u, v])      x = logits / temperature
        entropy_k = -sum_v p_kv log p_kv                                   p = softmax(x)

    They are computed in float32 (float64 for float64 logits) in chunks of rows. The backward pass
    recomputes the probabilities from the logits and the saved log-sum-exp, so apart from the logits
    only their gradient is ever in memory as a whole, in the logits' dtype. A logit of -inf is a
    token of probability 0, which adds nothing to the entropy.

    Args:
        logits: `[K, V]`.
        rows: int64 `[U]`, the row of each choice.
        tokens: int64 `[U]`, the token of each choice; the pairs (row, token) are distinct.
        temperature: The divisor of the logits; 0 means greedy decoding, with the logprobs at 1.

    Returns:
        Logprobs `[U]` and entropies `[K]`, both with gradient; that of the entropies costs nothing
        if no loss reads them.
    """
    result: tuple[torch.Tensor, torch.Tensor] = _Chosen.apply(  # type: ignore[no-untyped-call]
        logits, rows, tokens, _scale(temperature)
    )
    return result


class _Chosen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kind = _kind(logits)
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
        for part in _parts(len(logits), logits):
            log_p = (logits[part].to(log_norm.dtype) * scale).sub_(log_norm[part, None])
            p = log_p.exp()
            factor = -row_grad[part, None]
            if slope is not None:
                factor = factor - slope[part, None] * (_finite(log_p) + entropy[part, None])
            result[part].copy_(p.mul_(factor))
        # Recomputed instead of added: in a 16-bit dtype the sum would cancel to 0 at p near 1.
        chosen = grad * scale - logprobs.exp() * row_grad[rows]
        if slope is not None:
            chosen -= slope[rows] * logprobs.exp() * (_finite(logprobs) + entropy[rows])
        result[rows, tokens] = chosen.to(result.dtype)
        return result, None, None, None


def sampler_logprobs(
    logits: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    temperature: float,
    transform: SamplerTransform,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns logprobs of R tokens under the sampler's distribution, and its entropies.

    ::

        y_u       = transform(logits[rows_u] / temperature)
        logprob_u = y_u[tokens_u] - log sum_v exp(y_uv)
        entropy_u = -sum_v p_uv log p_uv                    p_u = softmax(y_u)

    They are computed like `chosen_logprobs`, with rows `[R]` that ascend, and in chunks of tokens:
    each token has its own distribution, even if several follow one prefix, because the kept tokens
    may differ. Gradients flow to the logits only; the kept tokens are constant. Both results are
    `[R]`, and the transformation is that of these tokens, in their order.
    """
    result: tuple[torch.Tensor, torch.Tensor] = _OfSampler.apply(  # type: ignore[no-untyped-call]
        logits, rows, tokens, _scale(temperature), transform
    )
    return result


def sampler_logits(
    logits: torch.Tensor, rows: torch.Tensor, temperature: float, transform: SamplerTransform
) -> torch.Tensor:
    """Returns float32 (float64 for float64) `[R, V]`, the logits in `sampler_logprobs`' softmax.

    They are computed without chunks, so this is for small vocabularies.
    """
    chosen = logits.index_select(0, rows).to(_kind(logits))
    return transform.apply(chosen * _scale(temperature), slice(0, len(rows)))


def squared_probabilities(
    logits: torch.Tensor,
    temperature: float,
    rows: torch.Tensor | None = None,
    transform: SamplerTransform | None = None,
) -> torch.Tensor:
    """Returns the sum over the vocabulary of p^2, in float32 (float64 for float64), in chunks.

    ::

        sum_v p_v^2 = exp(log sum_v exp(2 y_v) - 2 log sum_v exp(y_v))

    with y = logits / temperature, or its transformation by a sampler. The result has no gradient.

    Args:
        logits: `[K, V]`.
        temperature: The divisor of the logits, as in `chosen_logprobs`.
        rows: int64 `[R]`, the row of each token; None for one number for each of the K rows.
        transform: The sampler's transformation for these R tokens, in their order.
    """
    scale = _scale(temperature)
    count = len(logits) if rows is None else len(rows)
    result = torch.empty(count, dtype=_kind(logits), device=logits.device)
    for part in _parts(count, logits):
        y = (logits[part] if rows is None else logits[rows[part]]).to(result.dtype) * scale
        if transform is not None:
            y = transform.apply(y, part)
        result[part] = ((2 * y).logsumexp(-1) - 2 * y.logsumexp(-1)).exp()
    return result


class _OfSampler(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        scale: float,
        transform: SamplerTransform,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = torch.empty(len(rows), dtype=_kind(logits), device=logits.device)
        entropy = torch.empty_like(logprobs)
        for part in _parts(len(rows), logits):
            x = logits[rows[part]].to(logprobs.dtype)
            y = transform.apply(x * scale, part)
            logprobs[part], entropy[part] = _logprobs_and_entropies(y, tokens[part])
        ctx.save_for_backward(logits, rows, tokens)
        ctx.scale, ctx.transform = scale, transform
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor, entropy_grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        logits, rows, tokens = ctx.saved_tensors
        result = torch.zeros_like(logits)
        for part in _parts(len(rows), logits):
            x = logits[rows[part]].to(grad.dtype).requires_grad_()
            with torch.enable_grad():
                y = ctx.transform.apply(x * ctx.scale, part)
                outputs = _logprobs_and_entropies(y, tokens[part])
            (x_grad,) = torch.autograd.grad(outputs, x, (grad[part], entropy_grad[part]))
            # Rows ascend, so that tokens of one row are summed here, before 16 bits round them.
            row, place = torch.unique_consecutive(rows[part], return_inverse=True)
            summed = x_grad.new_zeros(len(row), x_grad.shape[1]).index_add_(0, place, x_grad)
            result[row] += summed.to(result.dtype)
        return result, None, None, None, None


def _logprobs_and_entropies(
    y: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = y.log_softmax(-1)
    chosen = log_p.gather(-1, tokens[:, None]).squeeze(-1)
    return chosen, -torch.linalg.vecdot(log_p.exp(), _finite(log_p))


def full(logits: torch.Tensor, other_logits: torch.Tensor) -> torch.Tensor:
    """Returns the exact KL(policy || other) of the whole distributions of next tokens.

    ::

        KL = sum over v of p(v) (log p(v) - log q(v))

    Logits are `[R, V]`, both at the rollout's temperature, and the result is `[R]`. Tokens whose
    probability under the policy is 0 (logit -inf) add nothing.
    """
    p, q = logits.log_softmax(-1), other_logits.log_softmax(-1)
    # Where p is 0, the gap is replaced and not its product with p, whose gradient would be NaN.
    gap = torch.where(p == -torch.inf, 0.0, p - q)
    return (p.exp() * gap).sum(-1)


def full_in_chunks(
    logits: torch.Tensor, other_logprobs: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Returns `full` of logits / temperature, in float32 and in chunks of rows.

    The other policy's logprobs `[K, V]` are at the same temperature. The backward pass recomputes
    each chunk, so apart from the arguments only the gradient of the logits is ever in memory as a
    whole.
    """
    scale = _scale(temperature)

    def divergence(part: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return full(part.to(_kind(logits)) * scale, other)

    size = _chunk(logits)
    parts = zip(torch.split(logits, size), torch.split(other_logprobs, size), strict=True)
    return torch.cat(
        [
            checkpoint(divergence, part, other, use_reentrant=False, preserve_rng_state=False)
            for part, other in parts
        ]
    )


def _scale(temperature: float) -> float:
    """Returns the factor of logits; 1 for the temperature 0 of greedy decoding."""
    return 1.0 / temperature if temperature > 0 else 1.0


def _kind(logits: torch.Tensor) -> torch.dtype:
    """Returns the dtype of the arithmetic."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _parts(count: int, logits: torch.Tensor) -> list[slice]:
    size = _chunk(logits)
    return [slice(begin, min(begin + size, count)) for begin in range(0, count, size)]


def _finite(x: torch.Tensor) -> torch.Tensor:
    """Replaces -inf by the smallest finite number, so that 0 times it is 0."""
    return x.clamp(min=torch.finfo(x.dtype).min)


def _chunk(logits: torch.Tensor) -> int:
    return max(1, _CHUNK_ELEMENTS // logits.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplerTransform:
    """The sampler's transformation of the temperature-scaled logits x of R tokens.

    In the sampler's order, for each token u and each v of the vocabulary::

        x[v] <- x[v] / penalty    if v occurs before u, and x[v] > 0
        x[v] <- x[v] * penalty    if v occurs before u, and x[v] <= 0
        x[v] <- -inf              if v is a stop token, and u is too early for one
        x[v] <- -inf              if v is not among the kept tokens of u

    The kept tokens are constants, not a function of x. So the transformation is differentiable
    (except at x = 0 under a penalty), and the same on both sides of an importance ratio.

    Attributes:
        penalty: The repetition penalty; 1 changes nothing.
        first: int `[S, V]`, with a penalty: the first position of each token in each of S samples;
            a large number if it does not occur.
        sample: int64 `[R]`, the sample of each token, from 0 to S - 1.
        place: int `[R]`, the position of each token in its sample.
        stops: int64 `[n]`, stop tokens; None if none was forbidden.
        early: bool `[R]`, true at tokens where stop tokens were forbidden.
        kept_ids: int64 `[K]`, the kept tokens of each of the R tokens, concatenated; None if no
            token was excluded.
        kept_counts: int64 `[R]`, the number of kept tokens; 0 if all were kept.
        kept_offsets: R + 1 numbers, the beginning of each token's part of `kept_ids`.
    """

    penalty: float = 1.0
    first: torch.Tensor | None = None
    sample: torch.Tensor | None = None
    place: torch.Tensor | None = None
    stops: torch.Tensor | None = None
    early: torch.Tensor | None = None
    kept_ids: torch.Tensor | None = None
    kept_counts: torch.Tensor | None = None
    kept_offsets: tuple[int, ...] = ()

    def seen(self, part: slice) -> torch.Tensor:
        """Returns bool `[n, V]`, true at the tokens that occur before each token of `part`."""
        assert self.first is not None
        assert self.sample is not None
        assert self.place is not None
        return self.first[self.sample[part]] < self.place[part, None]

    def apply(self, x: torch.Tensor, part: slice) -> torch.Tensor:
        """Returns the transformed logits `[n, V]` of the tokens `part`; differentiable.

        Args:
            x: float `[n, V]`, their logits at the rollout's temperature.
            part: The tokens, a part of the R tokens.
        """
        if self.penalty != 1.0:
            inverse = torch.tensor(1.0 / self.penalty, dtype=x.dtype, device=x.device)
            factor = torch.where(x > 0, inverse, self.penalty)
            x = torch.where(self.seen(part), x * factor, x)
        if self.stops is not None:
            assert self.early is not None
            forbidden = torch.zeros(x.shape[1], dtype=torch.bool, device=x.device)
            forbidden[self.stops] = True
            x = x.masked_fill(self.early[part, None] & forbidden, -torch.inf)
        return x if self.kept_ids is None else x.masked_fill(~self._kept(x, part), -torch.inf)

    def _kept(self, x: torch.Tensor, part: slice) -> torch.Tensor:
        assert self.kept_ids is not None
        assert self.kept_counts is not None
        counts = self.kept_counts[part]
        kept = (counts == 0)[:, None].expand(x.shape).clone()
        begin, end = self.kept_offsets[part.start], self.kept_offsets[part.start + len(x)]
        row = torch.repeat_interleave(counts)
        kept[row, self.kept_ids[begin:end]] = True
        return kept
