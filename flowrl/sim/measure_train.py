"""Measures training and the passes over whole batches, through `TrainBackend` alone.

Batches look like those of a step: groups of real prompts with random responses. They differ in
rows, in length and in how far the members of a group begin alike, so that a line through their
times says what a row, a token and a distinct token cost (`flowrl.sim.costs`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flowrl.backend.batch import Floats, Ints, SequenceBatch, TrainBatch
from flowrl.backend.protocols import TrainBackend, UpdateSpec
from flowrl.graph import Node, Op
from flowrl.ids import SampleId
from flowrl.sim.costs import LinearCost
from flowrl.sim.fit import fit_line
from flowrl.sim.measure import Timer, after_other_work, repeated
from flowrl.sim.measure_beside import OpenBusy, measure_beside
from flowrl.sim.profile import OpProfile
from flowrl.sim.sharing import Beside
from flowrl.specs import KL, LossSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainQuestion:
    """What a trainer is asked.

    Attributes:
        node: The operation of the graph.
        prompts: Tokens of real prompts.
        group_size: Samples of a prompt.
        max_rows: Rows of one call in a step: of a mini-batch, for an update.
        micro_batch: Rows of one pass.
        recompute: Of an update's backward pass.
        max_tokens: Of the longest response.
        vocab_size: Tokens below it can be drawn.
        temperature: Of the rollout.
        budget_s: Seconds to spend, roughly.
        busy: Has a thread of this process work meanwhile; None where nobody is to know.
    """

    node: Node
    prompts: Sequence[Ints]
    group_size: int
    max_rows: int
    micro_batch: int
    max_tokens: int
    vocab_size: int
    temperature: float
    budget_s: float
    timer: Timer
    recompute: str = "none"
    busy: OpenBusy | None = None


def measure_op(train: TrainBackend, question: TrainQuestion, role: str) -> OpProfile:
    """Measures one operation; an update changes the weights, so measure updates last."""
    started = question.timer()
    features: list[list[float]] = []
    seconds: list[float] = []
    longest: Callable[[], object] | None = None
    alone_s = 0.0
    for rows, tokens, alike in _shapes(question):
        if len(seconds) > 2 and question.timer() - started > question.budget_s:
            break
        batch = _sequences(question, rows, tokens, alike)
        call = _call(train, question, batch)
        spent = repeated(lambda call=call: after_other_work(question.timer, call))  # type: ignore[misc]
        if spent == 0.0:
            continue
        distinct = _distinct(batch, question.group_size)
        passes = math.ceil(rows / question.micro_batch)
        features.append([1.0, passes, rows, len(batch.tokens), distinct])
        seconds.append(spent)
        if spent < alone_s:
            continue
        longest, alone_s = call, spent
    (call_s, pass_s, row_s, token_s, distinct_s), error = fit_line(features, seconds)
    cost = LinearCost(
        call_s=call_s, pass_s=pass_s, row_s=row_s, token_s=token_s, distinct_s=distinct_s
    )
    beside: Beside | None = Beside()
    if longest is not None and question.busy is not None:
        beside = measure_beside(longest, alone_s, question.busy)
    return OpProfile(
        role=role,
        op=str(question.node.op),
        cost=cost,
        fit=error,
        beside=beside or Beside(),
        beside_told=beside is not None,
    )


def _shapes(question: TrainQuestion) -> list[tuple[int, int, float]]:
    """(rows, response tokens, share of them that the members of a group have in common).

    Up to twice the rows of a call: a profile is to hold for larger steps, too.
    """
    size = question.group_size
    most = max(size, question.max_rows // size * size)
    one = max(size, min(question.micro_batch, most) // size * size)
    half = max(size, most // 2 // size * size)
    long, short = question.max_tokens, max(1, question.max_tokens // 3)
    shapes = [
        (one, short, 0.0),
        (one, long, 0.0),
        (size, long, 0.0),
        (one, long, 0.7),
        (most, long, 0.7),
        (most, long, 1.0),
        (one, long, 1.0),
        (most, short, 0.0),
        (half, long, 0.3),
        (most, long, 0.4),
        (2 * most, long, 0.4),
        (2 * most, short, 0.0),
        (most, long, 0.0),
    ]
    return list(dict.fromkeys(shapes))


def _sequences(question: TrainQuestion, rows: int, tokens: int, alike: float) -> SequenceBatch:
    """Random responses of up to `tokens` tokens, their mean three quarters of that."""
    draw = np.random.default_rng([rows, tokens, int(alike * 100)])
    pieces: list[Ints] = []
    mask, lengths = [], []
    pairs = _comes_in_pairs(question.node)
    for group in range(rows // question.group_size):
        prompt = question.prompts[group % len(question.prompts)]
        common = draw.integers(0, question.vocab_size, tokens)
        for _ in range(question.group_size):
            length = tokens if pairs else int(draw.integers(max(1, tokens // 2), tokens + 1))
            response = draw.integers(0, question.vocab_size, length)
            begin = int(alike * length)
            response[:begin] = common[:begin]
            pieces += [prompt, response]
            mask += [np.zeros(len(prompt), np.bool_), np.ones(length, np.bool_)]
            lengths.append(len(prompt) + length)
    return SequenceBatch(
        samples=tuple(SampleId(f"0/{i // question.group_size}/{i}") for i in range(rows)),
        tokens=np.concatenate(pieces).astype(np.int64),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        response_mask=np.concatenate(mask),
        groups=np.repeat(np.arange(rows // question.group_size), question.group_size),
    )


def _distinct(batch: SequenceBatch, group_size: int) -> float:
    """Tokens of a prefix tree of each group: every common beginning once.

    The last token of a row is left out, for it is nobody's input.
    """
    total = 0
    for first in range(0, len(batch), group_size):
        members = sorted(
            tuple(batch.tokens[batch.offsets[i] : batch.offsets[i + 1] - 1].tolist())
            for i in range(first, min(first + group_size, len(batch)))
        )
        before: tuple[int, ...] = ()
        for tokens in members:
            common = 0
            limit = min(len(before), len(tokens))
            while common < limit and before[common] == tokens[common]:
                common += 1
            total += len(tokens) - common
            before = tokens
    return float(total)


def _comes_in_pairs(node: Node) -> bool:
    loss = node.attr("loss")
    return isinstance(loss, LossSpec) and loss.pairs


def _call(
    train: TrainBackend, question: TrainQuestion, batch: SequenceBatch
) -> Callable[[], object]:
    match question.node.op:
        case Op.LOGPROBS:
            return lambda: train.logprobs(batch, question.temperature)
        case Op.VALUES:
            return lambda: train.values(batch)
        case Op.SCORE:
            scores = train.scores if question.node.attr("per") is None else train.token_scores
            return lambda: scores(batch)
        case _:
            made, spec = _train_batch(train, question, batch), _update_spec(question, batch)
            return lambda: train.update(made, spec)


def _update_spec(question: TrainQuestion, batch: SequenceBatch) -> UpdateSpec:
    loss, kl = question.node.attr("loss"), question.node.attr("kl")
    assert isinstance(loss, LossSpec)
    assert kl is None or isinstance(kl, KL)
    return UpdateSpec(
        loss=loss,
        kl=kl,
        temperature=question.temperature,
        mini_batches=(tuple(range(len(batch))),),
        micro_batch=question.micro_batch,
        recompute=question.recompute,
        max_tokens=question.max_tokens,
        old_policy="own" if question.node.attr("old_logprobs") == "own" else "given",
    )


def _train_batch(train: TrainBackend, question: TrainQuestion, batch: SequenceBatch) -> TrainBatch:
    """Every field that the loss may read; no advantage is 0, or its sample could be left out."""
    loss = question.node.attr("loss")
    assert isinstance(loss, LossSpec)
    draw = np.random.default_rng(0)

    def numbers() -> Floats:
        values = draw.choice([-1.0, 1.0], len(batch.tokens))
        return np.where(batch.response_mask, values, 0.0).astype(np.float32)

    made = TrainBatch(
        sequences=batch,
        advantages=np.repeat(draw.choice([-1.0, 1.0], len(batch)), batch.lengths).astype(np.float32)
        * batch.response_mask,
        returns=numbers(),
        old_values=numbers(),
        preferred=np.arange(len(batch)) % 2 == 0 if loss.pairs else None,
        extra={name: numbers() for name in loss.extra_fields},
    )
    if loss.predicts != "logprobs":
        return made
    drawn = train.logprobs(batch, question.temperature)
    kl = question.node.attr("kl")
    whole = isinstance(kl, KL) and kl.estimator == "full"
    return replace(
        made,
        behaviour_logprobs=drawn,
        old_logprobs=drawn,
        reference_logprobs=drawn,
        reference_distributions=(
            train.distributions(batch, question.temperature) if whole else None
        ),
    )
