"""`flowrl samples`: the samples of a run that a step, a text or the lowest scores choose."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from pathlib import Path

from flowrl.cli.why import excerpt, row_lines
from flowrl.errors import ConfigError
from flowrl.files import encode_json
from flowrl.observe.rows import SampleRow
from flowrl.observe.run_folder import RunFolder
from flowrl.wording import counted

_MAX_PRINTED = 20


def run(
    folder: Path, *, step: int | None, worst: int | None, contains: str | None, as_json: bool
) -> None:
    """Prints the chosen samples, in the order of the run; the worst ones by their score.

    Args:
        step: A step, of whichever stages have samples at it.
        worst: The number of samples with the lowest scores; ones without a score are left out.
        contains: Text of the prompt, the response or the answer.
        as_json: True for all chosen samples as a JSON list; otherwise 20 are printed at most.
            Without any choice they are those of the last step.

    Raises:
        CheckpointError: The folder has no run.
        ConfigError: The run has no sample, or none of this step.
    """
    opened = RunFolder.open(folder)
    if step is not None or (worst is None and contains is None):
        rows = _of_step(opened, step)
    else:
        rows = opened.samples()
    if contains is not None:
        rows = (
            row
            for row in rows
            if any(contains in t for t in (row.prompt, row.response, row.answer))
        )
    if worst is not None:
        scored = (row for row in rows if row.score is not None)
        rows = iter(heapq.nsmallest(worst, scored, key=_score))
    chosen = list(rows)
    if as_json:
        print(encode_json([row.to_json() for row in chosen]), end="")
        return
    if not chosen:
        print("no sample is like this")
    for row in chosen[:_MAX_PRINTED]:
        print("\n".join(_lines(row)))
    if len(chosen) > _MAX_PRINTED:
        print(
            f"{counted(len(chosen) - _MAX_PRINTED, 'sample')} more: choose with --step, --worst "
            "and --contains, or print all with --json"
        )


def _score(row: SampleRow) -> float:
    assert row.score is not None
    return row.score


def _of_step(opened: RunFolder, step: int | None) -> Iterator[SampleRow]:
    """Yields the samples of a step of any stage, or of the last step of the run.

    Raises:
        ConfigError: There are none.
    """
    places = opened.sample_steps()
    if not places:
        raise ConfigError(
            "this run has no samples",
            where=str(opened.path / "samples.jsonl"),
            found="no rows",
            hint="a step with a rollout logs its samples when it ends; other stages have none",
        )
    chosen = places[-1:] if step is None else [place for place in places if place[1] == step]
    if not chosen:
        raise ConfigError(
            f"no sample of step {step} is logged",
            where=f"--step {step}",
            expected=f"a step from 1 to {max(last for _, last in places)}",
            hint=f"`flowrl samples {opened.path}` shows the last step",
        )
    return opened.samples_at(chosen)


def _lines(row: SampleRow) -> list[str]:
    lines = [f"{row.sample}  {row.stage}, {row.rollout}", *row_lines(row)]
    if row.answer:
        lines.append(f"  answer {excerpt(row.answer)}")
    if row.terms:
        terms = ", ".join(f"{name} {value:g}" for name, value in row.terms.items())
        lines.append(f"  rewards {terms}")
    return lines
