"""Checks every row of a source: what cannot be read, what is empty, too long or there twice."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from flowrl.backend.batch import Ints
from flowrl.config.data import DataConfig
from flowrl.data.cursor import encoded_rows
from flowrl.data.rows import BadRows, RowNeeds, RowProblem, Rows
from flowrl.data.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFinding:
    """Rows with the same mistake.

    Attributes:
        kind: `unreadable`, `empty`, `unusable`, `too long` (the prompt), `too long response` or
            `duplicate`.
        what: The mistake in words, from the first of the rows.
        places: The place of each row, with what is particular to it.
    """

    kind: str
    what: str
    places: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowReport:
    """The result of a check.

    Attributes:
        source: The file, or what else the rows are from.
        num_read: All rows.
        num_usable: Rows that a run takes, duplicates among them.
        num_bad: Rows that cannot be used, which `data.max_bad_rows` bounds.
        num_out_of_band: Rows that `data.difficulty` leaves out.
        findings: The mistakes, most rows first.
        prompt_tokens: int64 `[num_usable]`, sorted: tokens of each prompt, before a cut.
    """

    source: str
    num_read: int
    num_usable: int
    num_bad: int
    num_out_of_band: int
    findings: tuple[RowFinding, ...]
    prompt_tokens: Ints


def every_bad_row() -> BadRows:
    """Returns a list of bad rows that no number of them fills."""
    return BadRows(sys.maxsize)


def check_rows(
    rows: Rows,
    tokenizer: Tokenizer,
    data: DataConfig,
    needs: RowNeeds,
    max_length: int | None = None,
) -> RowReport:
    """Encodes every prompt and reports what is wrong with rows.

    Args:
        rows: Read with `every_bad_row`, so that one bad row does not hide the next.
        max_length: Tokens of the longest sample, for stages that learn from responses of the rows:
            prompt and response are counted together.
    """
    unfit: list[str] = []
    lengths: list[int] = []
    first_at: dict[bytes, str] = {}
    too_long: list[str] = []
    twice: list[str] = []
    no_answer: list[str] = []
    for _, row, ids in encoded_rows(rows, tokenizer, data, bad=rows.bad, needs=needs):
        if len(ids) > data.max_prompt_tokens:
            too_long.append(f"{row.where} ({len(ids)} tokens)")
            if data.overlong == "filter":
                continue
        lengths.append(len(ids))
        if max_length is not None:
            texts = [row.solution] if row.rejected is None else [row.solution, row.rejected]
            whole = len(ids) + max(len(tokenizer.encode_response(text)) for text in texts)
            if whole > max_length:
                unfit.append(f"{row.where} ({whole} tokens)")
        if needs.answer and not row.answer.strip():
            no_answer.append(row.where)
        key = blake2b(ids.tobytes(), digest_size=12).digest()
        first = first_at.setdefault(key, row.where)
        if first is not row.where:
            twice.append(f"{row.where} (as {first})")
    limit = f"longer than {data.max_prompt_tokens} tokens ({data.overlong})"
    findings = [
        *_kinds_of(rows.problems),
        RowFinding(kind="empty", what="the answer is empty", places=tuple(no_answer)),
        RowFinding(kind="too long", what=limit, places=tuple(too_long)),
        RowFinding(
            kind="too long response",
            what=f"prompt and response longer than {max_length} tokens (data.max_prompt_tokens and "
            "train.sampling.max_tokens together, or the model's max_length); stages that learn "
            "from responses of the data leave them out",
            places=tuple(unfit),
        ),
        RowFinding(kind="duplicate", what="the same prompt", places=tuple(twice)),
    ]
    findings.sort(key=lambda finding: -len(finding.places))
    return RowReport(
        source=rows.source,
        num_read=rows.num_read,
        num_usable=len(lengths),
        num_bad=len(rows.problems),
        num_out_of_band=rows.num_out_of_band,
        findings=tuple(finding for finding in findings if finding.places),
        prompt_tokens=np.sort(np.array(lengths, np.int64)),
    )


def _kinds_of(problems: Iterable[RowProblem]) -> list[RowFinding]:
    """Groups bad rows by their mistake, whatever the numbers in its words."""
    groups: dict[tuple[str, str], list[RowProblem]] = {}
    for problem in problems:
        kind = "empty" if "empty" in problem.what else "unusable"
        kind = "unreadable" if problem.is_unreadable else kind
        groups.setdefault((kind, re.sub(r"\d+", "#", problem.what)), []).append(problem)
    return [
        RowFinding(
            kind=kind, what=group[0].reason, places=tuple(problem.where for problem in group)
        )
        for (kind, _), group in groups.items()
    ]
