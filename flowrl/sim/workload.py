"""What a simulated run is given: prompts, how long their responses are, and what becomes of groups.

Group k is the same whenever and wherever it is drawn: it follows from the seed and its number, not
from the order of events. So two simulations that differ by a policy see the same samples.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from flowrl.cost.lengths import lognormal_before_cut
from flowrl.errors import DataError
from flowrl.files import read_json_lines
from flowrl.sim.lengths import Constant, Lengths, Listed, Lognormal, parse_lengths, read_lengths
from flowrl.wording import counted

_BLOCK = 256
"""Groups drawn with one generator: one for each would cost more than the drawing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDraw:
    """A prompt and what happens to its group.

    Attributes:
        prompt_tokens: Of the prompt.
        lengths: Response tokens of each member.
        filtered: Why its filter takes it out; None where it stays.
        distinct: Share of its response tokens, the last of each member left aside, that a trainer
            has to compute where it computes common beginnings once.
    """

    prompt_tokens: int
    lengths: tuple[int, ...]
    filtered: str | None = None
    distinct: float = 1.0


class Workload(Protocol):
    """Groups by number."""

    def group(self, number: int, size: int) -> GroupDraw:
        """The group of that number, with `size` members."""
        ...

    def __str__(self) -> str:
        """Where it comes from, for people."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLengths:
    """Tokens of prompts, drawn with equal chances."""

    values: tuple[int, ...]

    def draw(self, rng: np.random.Generator, num: int) -> list[int]:
        """So many."""
        chosen: list[int] = np.asarray(self.values)[rng.integers(0, len(self.values), num)].tolist()
        return chosen


class _Blocks:
    """Draws groups a block at a time and keeps the last two blocks."""

    def __init__(self, seed: int, prompts: PromptLengths, longest: int) -> None:
        self.seed = seed
        self.prompts = prompts
        self.longest = longest
        self._kept: dict[tuple[int, int], Sequence[GroupDraw]] = {}

    def group(self, number: int, size: int) -> GroupDraw:
        block, place = divmod(number, _BLOCK)
        found = self._kept.get((block, size))
        if found is None:
            while len(self._kept) > 3:
                del self._kept[next(iter(self._kept))]
            rng = np.random.default_rng([self.seed, block])
            found = self._kept[block, size] = self.draw(rng, size)
        return found[place]

    def draw(self, rng: np.random.Generator, size: int) -> Sequence[GroupDraw]:
        raise NotImplementedError


class Assumed(_Blocks):
    """Independent lengths of one distribution.

    Args:
        longest: Response tokens at most.
        filtered_share: Chance of a group to be filtered.
    """

    def __init__(
        self,
        lengths: Lengths,
        *,
        seed: int,
        prompts: PromptLengths,
        longest: int,
        filtered_share: float = 0.0,
    ) -> None:
        super().__init__(seed, prompts, longest)
        self._lengths = lengths
        self._filtered_share = filtered_share

    def draw(self, rng: np.random.Generator, size: int) -> Sequence[GroupDraw]:
        """A block of groups."""
        drawn = np.clip(self._lengths.draw(rng, _BLOCK * size), 1, self.longest)
        rows = drawn.reshape(_BLOCK, size).tolist()
        prompts = self.prompts.draw(rng, _BLOCK)
        filtered = (rng.random(_BLOCK) < self._filtered_share).tolist()
        return [
            GroupDraw(prompt_tokens=prompt, lengths=tuple(row), filtered="assumed" if out else None)
            for prompt, row, out in zip(prompts, rows, filtered, strict=True)
        ]

    def __str__(self) -> str:
        """As `--lengths` names them, and what they come to where the longest are cut."""
        text = str(self._lengths)
        match self._lengths:
            case Lognormal(mean=before, sigma=sigma):
                at = float(self.longest)
                mean = lognormal_before_cut(mean=before, sigma=sigma, maximum=at).mean
            case Constant(tokens=tokens):
                before, mean = float(tokens), float(min(tokens, self.longest))
            case Listed(values=values):
                before = statistics.fmean(values)
                mean = statistics.fmean(min(one, self.longest) for one in values)
            case _:
                return text
        if mean > 0.999 * before:
            return text
        left = f"{mean:,.{1 if mean < 100 else 0}f}"
        return f"{text}, which cut at {self.longest:,} is {left} on average"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedGroup:
    """A group as a run had it; the fields are those of `GroupDraw`."""

    lengths: tuple[int, ...]
    filtered: str | None
    distinct: float


class Recorded(_Blocks):
    """Groups of a run, each drawn with the same chance.

    A group of another size than the one asked for gives its members in turn, in random order.
    """

    def __init__(
        self,
        groups: Sequence[RecordedGroup],
        *,
        seed: int,
        prompts: PromptLengths,
        longest: int,
        source: str,
    ) -> None:
        super().__init__(seed, prompts, longest)
        self._groups = groups
        self._source = source

    def draw(self, rng: np.random.Generator, size: int) -> Sequence[GroupDraw]:
        """A block of groups."""
        chosen = [self._groups[i] for i in rng.integers(0, len(self._groups), _BLOCK).tolist()]
        prompts = self.prompts.draw(rng, _BLOCK)
        return [
            GroupDraw(
                prompt_tokens=prompt,
                lengths=tuple(min(n, self.longest) for n in _members(rng, group.lengths, size)),
                filtered=group.filtered,
                distinct=group.distinct,
            )
            for group, prompt in zip(chosen, prompts, strict=True)
        ]

    def __str__(self) -> str:
        return f"{self._source} ({counted(len(self._groups), 'group')})"


def _members(rng: np.random.Generator, lengths: Sequence[int], size: int) -> Sequence[int]:
    if len(lengths) == size:
        return lengths
    order = rng.permutation(len(lengths)).tolist()
    return [lengths[order[i % len(lengths)]] for i in range(size)]


def open_workload(
    text: str,
    *,
    stage: str,
    rollout: str,
    seed: int,
    prompts: PromptLengths,
    longest: int,
) -> Workload:
    """The workload that `--lengths` names; `flowrl.sim.lengths` says how.

    Args:
        stage: Whose samples are taken of a run's.
        rollout: The node whose samples they are.

    Raises:
        ConfigError, DataError: no distribution, no file, or no samples in it.
    """
    lengths = parse_lengths(text)
    if lengths is None:
        path = Path(text)
        if path.is_dir():
            path /= "samples.jsonl"
        if path.is_file() and path.name == "samples.jsonl":
            groups = read_recorded(path, stage=stage, rollout=rollout)
            source = f"{path.parent.name}/{path.name}" if path.parent.name else path.name
            return Recorded(groups, seed=seed, prompts=prompts, longest=longest, source=source)
        lengths = read_lengths(path)
    return Assumed(lengths, seed=seed, prompts=prompts, longest=longest)


def read_recorded(path: Path, *, stage: str, rollout: str) -> list[RecordedGroup]:
    """The whole groups of a run's samples.jsonl.

    Groups that lost a member are left out: how far its siblings got depends on when that was.

    Args:
        rollout: Only its samples; those of older files, which name none, count as everyone's.

    Raises:
        DataError: the file holds none of that stage.
    """
    members: dict[tuple[int, str], list[dict[str, object]]] = {}
    for row in read_json_lines(path):
        sampling_node = row.get("rollout") or rollout
        if row.get("stage") != stage or sampling_node != rollout:
            continue
        step, sample = row.get("step"), row.get("sample")
        if not isinstance(step, int) or not isinstance(sample, str):
            raise DataError(
                "a row of this log is damaged",
                where=str(path),
                found=repr(row)[:80],
                expected="step and sample of each row",
                hint="name another run, or a distribution: --lengths lognormal:mean=300,sigma=1",
            )
        members.setdefault((step, sample.rpartition("/")[0]), []).append(row)
    groups = [
        _recorded(rows)
        for rows in members.values()
        if all(row.get("end") in ("consumed", "filtered") for row in rows)
    ]
    if not groups:
        raise DataError(
            "the file has no samples to take lengths from",
            where=str(path),
            expected=f"samples of stage {stage!r} and rollout {rollout!r}",
            hint="log all samples of such a run (runtime.log_samples=0), or name a distribution",
        )
    return groups


def _recorded(rows: Sequence[dict[str, object]]) -> RecordedGroup:
    reasons = [str(row["reason"]) for row in rows if row.get("end") == "filtered"]
    lengths = tuple(max(1, n) for row in rows if isinstance(n := row.get("num_tokens"), int))
    # Text has no stop token; without one the last token is the last of the text, or some of it.
    texts = [
        text[:-1] if row.get("finish") == "length" else text
        for row in rows
        for text in [str(row.get("response", ""))]
    ]
    return RecordedGroup(
        lengths=lengths,
        filtered=reasons[0] if len(reasons) == len(rows) else None,
        distinct=_distinct_share(texts),
    )


def _distinct_share(texts: Sequence[str]) -> float:
    """Distinct beginnings of the texts over all of them; what a prefix tree of them would hold.

    >>> _distinct_share(["123", "124"])
    0.6666666666666666
    """
    total = sum(map(len, texts))
    ordered = sorted(texts)
    distinct, before = 0, ""
    for text in ordered:
        common = 0
        limit = min(len(before), len(text))
        while common < limit and before[common] == text[common]:
            common += 1
        distinct += len(text) - common
        before = text
    return distinct / total if total else 1.0
