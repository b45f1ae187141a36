"""Reads oracle files, runs the adapter of each case, and compares.

The verdict on a case is one of three: passed, failed (with the first difference), or not offered
(with the reason). Families that have no adapter yet are counted apart, as *later*. What cannot be
read, a file or a case, fails by itself and does not keep the rest from being run.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from flowrl.errors import DataError
from tests.proofs.oracles.case import Case, Json, NotOffered, UnknownConvention
from tests.proofs.oracles.option_names import KNOWN_OPTIONS

__all__ = [
    "ADAPTERS",
    "LATER",
    "Failed",
    "Passed",
    "Tally",
    "Unread",
    "Verdict",
    "judge",
    "load",
    "run",
]

ADAPTERS: Mapping[str, str] = {
    family: f"tests.proofs.oracles.{family}"
    for family in (
        "advantages",
        "kl_estimators",
        "reward_shaping",
        "policy_losses",
        "loss_aggregation",
        "value_entropy_logprobs",
        "flops",
        "math_verification",
    )
}
"""Family to the module whose `compute` answers for it; imported when its first case is run."""

_log = logging.getLogger(__name__)

LATER = frozenset({"seq_balancing"})
"""Families whose subject flowrl does not have yet."""


@dataclass(frozen=True, slots=True)
class Passed:
    """Every number that was compared lies within the tolerance."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The first difference, or what the adapter raised."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unread:
    """A file, or a case of it, that cannot be read.

    Attributes:
        family: Of the case; `unread` of a file.
        name: `FILE`, or `FILE, case NUMBER`.
        reason: Why.
    """

    family: str
    name: str
    reason: str


Array: TypeAlias = npt.NDArray[np.float64]

Verdict: TypeAlias = Passed | Failed | NotOffered


@dataclass(slots=True)
class Tally:
    """Verdicts of one family.

    Attributes:
        passed: How many cases passed.
        failed: `(case, reason)` of those that did not.
        not_offered: `(case, reason)`.
        later: How many cases were not run.
    """

    passed: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)
    not_offered: list[tuple[str, str]] = field(default_factory=list)
    later: int = 0

    def add(self, name: str, verdict: Verdict) -> None:
        """Counts the verdict on a case."""
        match verdict:
            case Passed():
                self.passed += 1
            case Failed(reason):
                self.failed.append((name, reason))
            case NotOffered(reason):
                self.not_offered.append((name, reason))

    def __str__(self) -> str:
        if self.later:
            return f"later ({self.later} cases)"
        return (
            f"{self.passed} passed, {len(self.failed)} failed, {len(self.not_offered)} not offered"
        )


def load(paths: Iterable[Path]) -> list[Case | Unread]:
    """The cases of files, and of the `*.json` below folders in the order of their names.

    Raises:
        DataError: a path does not exist, or a folder has no such file.
    """
    return [case for path in paths for file in _files(path) for case in _read(file, path)]


def _files(path: Path) -> Sequence[Path]:
    if path.is_dir():
        found = sorted(path.rglob("*.json"))
        if not found:
            raise DataError("a folder holds no oracle files", where=str(path), expected="*.json")
        return found
    if not path.exists():
        raise DataError("no such file or folder of oracle cases", where=str(path))
    return [path]


def _read(path: Path, given: Path) -> Iterator[Case | Unread]:
    """The cases of a file that was given, or found in a folder that was."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        yield Unread("unread", str(path), f"an oracle file cannot be read: {error}")
        return
    if not isinstance(content, dict) or not isinstance(content.get("cases"), list):
        if path != given:
            _log.warning("%s holds no oracle cases and is left out", path)
            return
        yield Unread("unread", str(path), 'no oracle cases: {"family": ..., "cases": []} expected')
        return
    family = content.get("family")
    for number, case in enumerate(content["cases"]):
        where = f"{path}, case {number}"
        try:
            yield Case.from_json(case, family, where)
        except DataError as error:
            said = " ".join(str(error).split())
            yield Unread(str(family or "unread"), where, said.removeprefix(f"{where}: "))


def run(cases: Iterable[Case | Unread]) -> dict[str, Tally]:
    """Verdicts by family, in the order in which families appear."""
    tallies: dict[str, Tally] = {}
    for case in cases:
        tally = tallies.setdefault(case.family, Tally())
        if case.family in LATER:
            tally.later += 1
        elif isinstance(case, Unread):
            tally.add(case.name, Failed(case.reason))
        else:
            tally.add(case.name, judge(case))
    return tallies


def judge(case: Case) -> Verdict:
    """Runs the adapter of one case and compares what it returns with what was recorded.

    A difference is no failure where the case has an option that its adapter does not know.
    """
    place = ADAPTERS.get(case.family)
    if place is None:
        return NotOffered(f"there is no family {case.family!r} here, but {', '.join(ADAPTERS)}")
    try:
        # An adapter that raises is a failed case, never the end of the run.
        got = import_module(place).compute(case)
    except UnknownConvention as error:
        return NotOffered(str(error))
    except Exception as error:
        verdict: Verdict = Failed(f"{type(error).__name__}: {error}")
    else:
        if isinstance(got, NotOffered):
            verdict = got
        elif case.compare == "exact_per_function":
            verdict = _compare_functions(case, got)
        else:
            verdict = _compare(case, got)
    strange = sorted(case.option_names() - KNOWN_OPTIONS[case.family])
    if strange and isinstance(verdict, Failed):
        return NotOffered(f"options not known here: {', '.join(strange)}")
    return verdict


def _compare(case: Case, got: Json) -> Verdict:
    compared, silent = 0, 0
    try:
        for path, have, want in _leaves("", got, case.expected):
            live = _compared(case, want)
            difference = _difference(path, have, want, live, case)
            if difference is not None:
                return Failed(difference)
            compared += 1
            silent += int((np.isfinite(have) & ~np.isfinite(want) & live).sum())
    except (TypeError, ValueError, LookupError) as error:
        return Failed(str(error))
    if silent:
        return NotOffered(f"the library returned NaN or inf at {silent} places; flowrl has numbers")
    return Passed() if compared else NotOffered("the case records no number")


def _compare_functions(case: Case, got: Mapping[str, Json]) -> Verdict:
    """Compares scores that must be exact; a recorded text such as `!ValueError` is an error.

    Functions that are not among the results are not offered here, and are not compared.
    """
    wanted = {**case.expected, "intended_correct": case.options.get("intended_correct")}
    different = [
        f"{name}: got {score}, want {wanted[name]}"
        for name, score in got.items()
        if wanted[name] is not None
        and (isinstance(score, str) != isinstance(wanted[name], str))
        | (not isinstance(score, str) and score != wanted[name])
    ]
    return Failed("; ".join(different)) if different else Passed()


def _leaves(path: str, got: Json, want: Json) -> Iterator[tuple[str, Array, Array]]:
    """The arrays of a result and of what was recorded, under their common path.

    `null` as a whole value says that nothing was recorded; within an array, not finite.

    Raises:
        LookupError: a result is missing.
        ValueError: the two do not have the same shape.
    """
    if want is None:
        return
    if isinstance(want, Mapping):
        for key, value in want.items():
            if value is None:
                continue
            if not isinstance(got, Mapping) or key not in got:
                raise LookupError(f"no result {path}{key}")
            yield from _leaves(f"{path}{key}.", got[key], value)
    elif isinstance(want, list) and _ragged(want):
        if len(got) != len(want):
            raise ValueError(f"{path[:-1]}: got {len(got)} rows, want {len(want)}")
        for number, (row, wanted) in enumerate(zip(got, want, strict=True)):
            yield from _leaves(f"{path[:-1]}[{number}].", row, wanted)
    else:
        have, recorded = np.asarray(got, np.float64), np.array(want, np.float64)
        if have.shape != recorded.shape:
            raise ValueError(f"{path[:-1]}: got shape {have.shape}, want {recorded.shape}")
        yield path[:-1], have, recorded


def _compared(case: Case, want: Array) -> npt.NDArray[np.bool_]:
    """Which numbers the case compares; the mask applies to results of its shape."""
    if case.compare == "response_mask" and case.mask.shape == want.shape:
        return case.mask > 0
    return np.ones(want.shape, np.bool_)


def _difference(
    path: str, got: Array, want: Array, live: npt.NDArray[np.bool_], case: Case
) -> str | None:
    """The first number that is not as wanted, in words; None where all are."""
    with np.errstate(invalid="ignore"):
        near = np.abs(got - want) <= case.atol + case.rtol * np.abs(want)
    near = near | ~np.isfinite(want) | ~live
    if near.all():
        return None
    worst = np.unravel_index(int(np.argmin(near)), near.shape)
    place = "".join(f"[{int(index)}]" for index in worst)
    return (
        f"{path}{place}: got {got[worst]:.9g}, want {want[worst]:.9g} "
        f"({int((~near).sum())} of {near.size} differ)"
    )


def _ragged(value: list[Json]) -> bool:
    """Whether nested lists do not form an array."""
    try:
        np.array(value, np.float64)
    except ValueError:
        return True
    return False
