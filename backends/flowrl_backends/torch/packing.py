"""Micro-batches without padding and without repeated prefixes.

Samples of a group share their prompt, and often the first response tokens too. In a causal model a
position depends on its prefix alone, so equal prefixes need to be computed once. `pack` turns the
rows of a micro-batch into the *prefix tree* of each group: every distinct prefix is one node, and
the model runs over the list of nodes as if it were a single long sequence. Only attention sees the
rows again: node vectors are gathered into blocks of rows of similar length, and each node takes its
output from one of the rows that hold it (all of them hold the same numbers). Gradients flow back
through the gather as a sum, which is the gradient of the padded computation exactly.

A row's last response token and the tokens after it are no input of any prediction and are omitted.

This module uses numpy on the CPU; `Packed` documents the index arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flowrl.backend.batch import Ints, SequenceBatch
from flowrl.errors import BackendError

_BLOCK_COST = 128
"""What one more attention block costs, in slots: it weighs padding against kernel calls."""


@dataclass(frozen=True, slots=True)
class Block:
    """The rows whose attention is computed together: `rows * length` slots of `Packed.gather`."""

    rows: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """One forward pass: N nodes, S slots, K predicting nodes, U distinct targets, R targets.

    Attributes:
        tokens: int64 `[N]`, input token of each node.
        positions: int64 `[N]`, its position in its sample.
        blocks: How the slots are cut into attention blocks.
        gather: int64 `[S]`, node of each slot; slots of padding hold node 0 and are never read.
        owner: int64 `[N]`, the slot that gives a node its attention output.
        predicting: int64 `[K]`, nodes whose logits are needed, ascending.
        target_row: int64 `[U]`, index into `predicting` of each distinct target.
        target_token: int64 `[U]`, token of each distinct target.
        target_of: int64 `[R]`, distinct target of each response token.
        source: int64 `[R]`, place of each response token in the batch's per-token arrays.
        sample: int64 `[R]`, batch row of each response token.
    """

    tokens: Ints
    positions: Ints
    blocks: tuple[Block, ...]
    gather: Ints
    owner: Ints
    predicting: Ints
    target_row: Ints
    target_token: Ints
    target_of: Ints
    source: Ints
    sample: Ints


def micro_batches(
    batch: SequenceBatch, rows: Sequence[int] | Ints, limit: int, *, max_tokens: int | None = None
) -> list[Ints]:
    """Splits `rows` of `batch` into micro-batches of at most `limit` rows.

    Groups are kept whole if they fit, and groups of similar length are put together; the order
    depends on lengths and row numbers alone.

    Args:
        max_tokens: The maximum number of tokens of a micro-batch; a single row may have more.
    """
    chosen = np.asarray(rows, np.int64)
    if not len(chosen):
        return []
    _, number = np.unique(batch.groups[chosen], return_inverse=True)
    longest = np.zeros(number.max() + 1, np.int64)
    np.maximum.at(longest, number, batch.lengths[chosen])
    order = np.lexsort((chosen, number, longest[number]))
    chosen, number = chosen[order], number[order]
    costs = batch.lengths[chosen]
    pieces: list[Ints] = []
    begin = spent = 0
    boundary = 0  # where the current group begins
    for i in range(len(chosen)):
        if i and number[i] != number[i - 1]:
            boundary = i
        cost = int(costs[i])
        while i > begin and (i - begin >= limit or (max_tokens and spent + cost > max_tokens)):
            end = boundary if boundary > begin else i
            pieces.append(chosen[begin:end])
            begin = end
            spent = int(costs[begin:i].sum())
        spent += cost
    pieces.append(chosen[begin:])
    return pieces


def pack(batch: SequenceBatch, rows: Ints, *, share_prefixes: bool = True) -> Packed:
    """Packs `rows` of `batch` into one forward pass.

    Raises:
        BackendError: A response token is the first of its sample, so nothing predicts it.
    """
    num_rows = len(rows)
    starts, lengths = batch.offsets[rows], batch.lengths[rows]
    width = int(lengths.max(initial=1))
    column = np.arange(width)
    valid = column < lengths[:, None]
    places = np.where(valid, starts[:, None] + column, 0)
    tokens = np.where(valid, batch.tokens[places], -1)
    answers = batch.response_mask[places] & valid
    if answers[:, 0].any():
        bad = batch.samples[int(rows[int(np.argmax(answers[:, 0]))])]
        raise BackendError(
            "the first token of a sample is marked as a response; nothing predicts it",
            where=f"sample {bad}",
            hint="give the sample a prompt of at least one token",
        )
    last = np.where(answers.any(1), width - 1 - np.argmax(answers[:, ::-1], 1), 0)
    valid &= column <= last[:, None]
    tokens = np.where(valid, tokens, -1)

    # Rows of a group in lexicographic order: a prefix that a row shares with any earlier row, it
    # shares with the row just before it.
    groups = batch.groups[rows] if share_prefixes else np.arange(num_rows)
    order = np.lexsort((*tokens.T[::-1], groups))
    tokens, valid, answers, places = tokens[order], valid[order], answers[order], places[order]
    shared = np.zeros_like(valid)
    same = (tokens[1:] == tokens[:-1]) & valid[1:] & valid[:-1]
    same &= (groups[order][1:] == groups[order][:-1])[:, None]
    shared[1:] = np.logical_and.accumulate(same, axis=1)
    first = valid & ~shared
    label = np.where(first, np.arange(first.size).reshape(first.shape), -1)
    node = np.maximum.accumulate(label, axis=0)

    inputs = valid & (column < last[order][:, None])
    return _index(tokens, valid & answers, inputs, node, places, rows[order])


def _index(
    tokens: Ints,
    answers: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
    inputs: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
    node: Ints,
    places: Ints,
    rows: Ints,
) -> Packed:
    """Computes the index arrays of the forward pass from the tree's labels `[rows, width]`.

    A label in `node` is the flat place of the node's first occurrence.
    """
    width = tokens.shape[1]
    labels = np.unique(node[inputs])
    dense = np.zeros(node.size, np.int64)
    dense[labels] = np.arange(len(labels))

    lengths = inputs.sum(1)
    needed = _leaf_rows(inputs, node, lengths)
    by_length = needed[np.argsort(lengths[needed], kind="stable")]
    cuts = _cut(lengths[by_length])
    blocks: list[Block] = []
    gathers: list[Ints] = []
    owners = np.zeros(len(labels), np.int64)
    slot = 0
    for begin, end in itertools.pairwise(cuts):
        part = by_length[begin:end]
        length = int(lengths[part].max())
        live = inputs[part, :length]
        index = np.where(live, dense[node[part, :length]], 0)
        owners[index[live]] = slot + np.flatnonzero(live)
        blocks.append(Block(len(part), length))
        gathers.append(index.ravel())
        slot += index.size

    row, place = np.nonzero(answers)
    targets, target_of = np.unique(node[row, place], return_inverse=True)
    # The label is a flat place, so its row and column are those of the first occurrence.
    parents = dense[node[targets // width, targets % width - 1]]
    predicting, target_row = np.unique(parents, return_inverse=True)
    return Packed(
        tokens=tokens.ravel()[labels],
        positions=labels % width,
        blocks=tuple(blocks),
        gather=np.concatenate(gathers) if gathers else np.zeros(0, np.int64),
        owner=owners,
        predicting=predicting,
        target_row=target_row.astype(np.int64),
        target_token=tokens.ravel()[targets],
        target_of=target_of.astype(np.int64),
        source=places[row, place],
        sample=rows[row],
    )


def _leaf_rows(
    inputs: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], node: Ints, lengths: Ints
) -> Ints:
    """Returns one row for each leaf of the tree of inputs; together they hold every input node.

    Other rows, repeated answers above all, need no attention of their own.
    """
    rows = np.flatnonzero(lengths)
    ends, first = np.unique(node[rows, lengths[rows] - 1], return_index=True)
    inner = node[:, :-1][inputs[:, 1:]]
    found: Ints = rows[first[~np.isin(ends, inner)]]
    return found


def _cut(lengths: Ints) -> list[int]:
    """Returns the cuts of rows of ascending `lengths` into blocks with the least padding cost.

    Dynamic programming over the places where the length changes: a block costs its rows times its
    longest row, and `_BLOCK_COST`.
    """
    ends = [0, *(np.flatnonzero(np.diff(lengths)) + 1).tolist(), len(lengths)]
    places = np.asarray(ends, np.int64)
    cost = np.zeros(len(ends))
    back = [0] * len(ends)
    for j in range(1, len(ends)):
        options = cost[:j] + (places[j] - places[:j]) * lengths[places[j] - 1]
        back[j] = int(np.argmin(options))
        cost[j] = options[back[j]] + _BLOCK_COST
    cuts, j = [len(lengths)], len(ends) - 1
    while j > 0:
        j = back[j]
        cuts.append(ends[j])
    return cuts[::-1]
