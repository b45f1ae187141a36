"""Sampling: one function from logits, options and uniform numbers to tokens and logprobs.

The order of the transformations is that of Transformers: repetition penalty, forbidden tokens,
temperature, top-k, top-p over the tokens that top-k kept, min-p. Logprobs are those of the
temperature-scaled logits before all the others, or after all of them (temperature 1 for greedy rows
in both cases), by `flowrl.specs.Sampling.logprobs`.

A token is the inverse of the cumulative distribution in the order of token ids at the sample's own
uniform number, so rows are independent of each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.specs import Sampling

_BLOCK = 64
"""Tokens summed at once by `inverse_cdf`; a whole row's running sum costs more than the softmax."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptions:
    """Sampling options of n rows; None where no row uses the option.

    Attributes:
        temperature: float32 `[n, 1]`; 1 for greedy rows.
        greedy: bool `[n]`, true for rows that take the likeliest token.
        all_greedy: True if every row is greedy.
        top_k: int64 `[n, 1]`; the size of the vocabulary if all tokens are kept.
        top_k_max: The largest of the above that is not the whole vocabulary.
        top_p: float32 `[n, 1]`.
        min_p: float32 `[n, 1]`.
        penalty: float32 `[n, 1]`.
        min_tokens: int64 `[n]`.
        of_sampler: bool `[n]`, true for rows whose logprobs are those of the sampler's
            distribution; None if no row both requests them and truncates.
        all_of_sampler: True if all rows are of that kind.
        reports_kept: True if a row reports the kept tokens.
    """

    temperature: Tensor | None = None
    greedy: Tensor | None = None
    all_greedy: bool = False
    top_k: Tensor | None = None
    top_k_max: int = 0
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    penalty: Tensor | None = None
    min_tokens: Tensor | None = None
    of_sampler: Tensor | None = None
    all_of_sampler: bool = False
    reports_kept: bool = False

    @property
    def truncates(self) -> bool:
        """True if a row samples from another distribution than the temperature-scaled one."""
        return any(
            option is not None
            for option in (self.top_k, self.top_p, self.min_p, self.penalty, self.min_tokens)
        )


def row_options(
    rows: Sequence[Sampling],
    vocab_size: int,
    device: torch.device | str = "cpu",
    *,
    count: int | None = None,
) -> RowOptions:
    """Returns the options of a batch.

    Args:
        rows: The options of each sample; or a single one for all, with their number as `count`.
    """
    if not rows:
        return RowOptions()
    n = len(rows) if count is None else count

    def column(values: list[float], neutral: float) -> Tensor | None:
        if all(value == neutral for value in values):
            return None
        full = values if len(values) == n else values * n
        return torch.tensor(full, dtype=torch.float32, device=device)[:, None]

    def integers(values: list[int], neutral: int) -> Tensor | None:
        if all(value == neutral for value in values):
            return None
        full = values if len(values) == n else values * n
        return torch.tensor(full, dtype=torch.int64, device=device)

    def truths(values: list[bool]) -> Tensor | None:
        if not any(values):
            return None
        return torch.tensor(values if len(values) == n else values * n, device=device)

    greedy = [row.temperature == 0.0 for row in rows]
    of_sampler = [row.logprobs == "sampler" and row.truncates for row in rows]
    top_k = [min(row.top_k, vocab_size) if row.top_k > 0 else vocab_size for row in rows]
    top_k_rows = integers(top_k, vocab_size)
    return RowOptions(
        temperature=column([row.temperature or 1.0 for row in rows], 1.0),
        greedy=truths(greedy),
        all_greedy=all(greedy),
        top_k=None if top_k_rows is None else top_k_rows[:, None],
        top_k_max=max((k for k in top_k if k < vocab_size), default=0),
        top_p=column([row.top_p for row in rows], 1.0),
        min_p=column([row.min_p for row in rows], 0.0),
        penalty=column([row.repetition_penalty for row in rows], 1.0),
        min_tokens=integers([row.min_tokens for row in rows], 0),
        of_sampler=truths(of_sampler),
        all_of_sampler=all(of_sampler),
        reports_kept=any(row.reports_kept for row in rows),
    )


def draw(
    logits: Tensor,
    options: RowOptions,
    uniform: Tensor,
    *,
    seen: Tensor | None = None,
    forbidden: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Samples a token for each row.

    Args:
        logits: float32 `[n, V]`.
        uniform: float32 `[n]` in [0, 1), multiples of 2**-24.
        seen: bool `[n, V]`, tokens of prompt and response; needed with a penalty.
        forbidden: bool `[n, V]`, tokens that must not be sampled (stop tokens that are too early,
            tokens that a grammar does not allow), or None.

    Returns:
        int64 `[n]` tokens, float32 `[n]` logprobs, and bool `[n, V]`, the kept tokens; None if no
        row reports them.
    """
    scaled = logits if options.temperature is None else logits / options.temperature
    plain = options.greedy is None and not options.truncates and not options.reports_kept
    if plain and forbidden is None:
        probs = torch.softmax(scaled, -1)
        tokens = inverse_cdf(probs, uniform)
        return tokens, probs.gather(-1, tokens[:, None]).squeeze(-1).log(), None
    allowed = scaled
    if options.penalty is not None:
        assert seen is not None
        penalised = torch.where(allowed > 0, allowed / options.penalty, allowed * options.penalty)
        allowed = torch.where(seen, penalised, allowed)
    if forbidden is not None:
        allowed = allowed.masked_fill(forbidden, -torch.inf)
    left = allowed
    if not options.all_greedy or options.of_sampler is not None:
        left = truncate(allowed, options)
    if options.all_greedy:
        tokens = allowed.argmax(-1)
    else:
        tokens = inverse_cdf(torch.softmax(left, -1), uniform)
        if options.greedy is not None:
            tokens = torch.where(options.greedy, allowed.argmax(-1), tokens)
    logprobs = _logprobs(left if options.all_of_sampler else scaled, tokens)
    if options.of_sampler is not None and not options.all_of_sampler:
        logprobs = torch.where(options.of_sampler, _logprobs(left, tokens), logprobs)
    return tokens, logprobs, left > -torch.inf if options.reports_kept else None


def _logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Returns float32 `[n]`, log-softmax of `logits` `[n, V]` at `tokens`."""
    return logits.gather(-1, tokens[:, None]).squeeze(-1) - torch.logsumexp(logits, -1)


def truncate(logits: Tensor, options: RowOptions) -> Tensor:
    """Returns `logits` `[n, V]` with -inf for tokens outside top-k, top-p and min-p.

    Ties at the k-th largest logit are kept; of equal logits at the edge of top-p the lower token
    ids are kept.
    """
    kept = logits
    if options.top_p is None and options.top_k is not None:
        largest = kept.topk(options.top_k_max, -1).values
        edge = largest.gather(-1, (options.top_k - 1).clamp(max=options.top_k_max - 1))
        whole = options.top_k >= logits.shape[-1]
        kept = kept.masked_fill((kept < edge) & ~whole, -torch.inf)
    elif options.top_p is not None:
        ordered, order = kept.sort(dim=-1, descending=True, stable=True)
        if options.top_k is not None:
            ordered = ordered.masked_fill(
                ordered < ordered.gather(-1, options.top_k - 1), -torch.inf
            )
        probs = torch.softmax(ordered, -1)
        before = probs.cumsum(-1) - probs
        drop = (before >= options.top_p) & (options.top_p < 1.0)
        drop[:, 0] = False
        ordered = ordered.masked_fill(drop, -torch.inf)
        kept = torch.empty_like(kept).scatter_(-1, order, ordered)
    if options.min_p is not None:
        # p / p_max >= min_p, in logarithms: exact whatever the truncation before it left.
        floor = kept.amax(-1, keepdim=True) + options.min_p.log()
        kept = kept.masked_fill(kept < floor, -torch.inf)
    return kept


def inverse_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """Returns the token at which the cumulative distribution passes `uniform`.

    It is the first token i with `p_0 + ... + p_i > u * (p_0 + ... + p_{V-1})`; its probability is
    never 0. With u a multiple of 2**-24 below 1, `u * total` rounds below `total` in float32 (the
    product is at least half a unit in the last place below it, and more unless it is exact), so the
    search always ends inside the row.

    Rows that are not finite give an arbitrary token of the vocabulary; its logprob is not finite
    either, and the engine refuses it.

    Large vocabularies are searched in two levels, blocks of 64 tokens first. The sum inside a block
    can round to less than the block's share, so the second search is limited to the block's last
    token of non-zero probability.

    Args:
        probs: float32 `[n, V]`, each row sums to about 1.
        uniform: float32 `[n]`.

    Returns:
        int64 `[n]`.
    """
    tokens = _search(probs, uniform[:, None])
    if probs.device.type == "cpu":
        return tokens
    # A parallel running sum rounds differently at each place and may rise where nothing is added.
    drawn = probs.gather(-1, tokens[:, None]).squeeze(-1)
    return torch.where(drawn > 0, tokens, probs.argmax(-1))


def _search(probs: Tensor, u: Tensor) -> Tensor:
    n, vocab_size = probs.shape
    if vocab_size <= 4 * _BLOCK:
        total = probs.cumsum(-1)
        place = torch.searchsorted(total, u * total[:, -1:], right=True)
        return place.squeeze(-1).clamp_(max=vocab_size - 1)
    padding = -vocab_size % _BLOCK
    padded = torch.nn.functional.pad(probs, (0, padding)) if padding else probs
    blocks = padded.view(n, -1, _BLOCK)
    shares = blocks.sum(-1).cumsum(-1)
    target = u * shares[:, -1:]
    block = torch.searchsorted(shares, target, right=True).clamp_(max=blocks.shape[1] - 1)
    before = torch.where(block > 0, shares.gather(-1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks.gather(1, block[:, :, None].expand(n, 1, _BLOCK)).squeeze(1).cumsum(-1)
    place = torch.searchsorted(inside, target - before, right=True)
    # argmax gives the first place that reaches the sum: the last token of non-zero probability.
    place = torch.minimum(place, inside.argmax(-1, keepdim=True))
    return (block * _BLOCK + place).squeeze(-1).clamp_(max=vocab_size - 1)
