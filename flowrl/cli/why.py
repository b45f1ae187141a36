"""`flowrl why`: the history of a sample, from the journal of its run."""

from __future__ import annotations

import heapq
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowrl.errors import ConfigError
from flowrl.ids import SampleId
from flowrl.observe.rows import SampleRow
from flowrl.observe.run_folder import RunFolder
from flowrl.rollout.event_history import SampleHistory, sample_history
from flowrl.runtime.checkpoint.journal import SampleFiles, rollout_journals
from flowrl.wording import counted

_SAMPLE = re.compile(r"(\d+/\d+(?:/\d+)*?)(?:/(\d+))?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RolloutHistory:
    """The history of a sample in one rollout.

    Attributes:
        history: Its events; None where the journal does not have them.
        missing: Why there is no history, where there is none.
        row: Its row of samples.jsonl; None where no step has reported it.
    """

    stage: str
    rollout: str
    history: SampleHistory | None
    missing: str
    row: SampleRow | None

    def __str__(self) -> str:
        lines = [f"{self.stage}, {self.rollout}"]
        if self.history is not None:
            lines += str(self.history).splitlines()
        elif self.row is not None:
            lines.append(f"sample {self.row.sample}: {self.row.end}{_by_weights(self.row)}")
        if self.row is not None:
            lines += row_lines(self.row)
        if self.history is None:
            lines.append(f"  when and where it ran is not known: {self.missing}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, object]:
        """Returns the JSON form, for scripts."""
        value: dict[str, object] = {"stage": self.stage, "rollout": self.rollout}
        if self.history is not None:
            value |= {
                "state": self.history.state,
                "spans": [list(span) for span in self.history.spans],
                "age": self.history.age,
                "moments": [
                    {"event": m.event_id, "at_s": m.at_s, "text": m.text}
                    for m in self.history.moments
                ],
            }
        else:
            value["missing"] = self.missing
        if self.row is not None:
            value["row"] = self.row.to_json()
        return value


def _by_weights(row: SampleRow) -> str:
    parts = ", ".join(f"{count} by version {version}" for version, count in row.versions)
    return f"; tokens: {parts}" if parts else ""


def row_lines(row: SampleRow) -> list[str]:
    """Returns the end, the prompt and the response of a sample, a line each."""
    return [
        f"  {_end_of(row)}; {counted(row.num_tokens, 'token')}{_score_of(row)}",
        f"  prompt {excerpt(row.prompt, 2000)}",
        f"  response {excerpt(row.response)}",
    ]


def _end_of(row: SampleRow) -> str:
    return f"step {row.step}: {row.end}" + (f" ({row.reason})" if row.reason else "")


def _score_of(row: SampleRow) -> str:
    return "" if row.score is None else f", score {row.score:g}"


def run(folder: Path, sample: str, *, as_json: bool) -> None:
    """Prints the history of a sample in every rollout that has one of this name.

    A group, `EPOCH/PROMPT`, has a line for each of its samples.

    Raises:
        CheckpointError: The folder has no run.
        ConfigError: The run has no such sample, or the name is no sample's; the error has the
            nearest ones.
    """
    opened = RunFolder.open(folder)
    asked = _SAMPLE.fullmatch(sample)
    if asked is None:
        raise ConfigError(
            "this names no sample",
            where=f"{folder}: sample {sample}",
            expected="EPOCH/PROMPT/MEMBER, each counted from 0, such as 0/17/3; "
            "or EPOCH/PROMPT for a whole group",
            hint="the lines of samples.jsonl name them",
        )
    group, member = asked.groups()
    if member is None:
        _print_group(opened, group, as_json=as_json)
        return
    journals = rollout_journals(folder)
    rows = {(r.stage, r.rollout): r for r in opened.samples_of(group, member)}
    histories = _histories(journals, rows, SampleId(sample))
    if not histories:
        raise _unknown(opened, group, member, journals)
    if as_json:
        print(
            json.dumps(
                {"sample": sample, "told": [history.to_json() for history in histories]}, indent=2
            )
        )
    else:
        print("\n\n".join(map(str, histories)))


def _print_group(opened: RunFolder, group: str, *, as_json: bool) -> None:
    rollouts: dict[tuple[str, str], list[SampleRow]] = {}
    for row in opened.samples_of(group):
        rollouts.setdefault((row.stage, row.rollout), []).append(row)
    if not rollouts:
        raise _unknown(opened, group, None, rollout_journals(opened.path))
    if as_json:
        rows_by_rollout = [
            {"stage": stage, "rollout": rollout, "rows": [row.to_json() for row in rows]}
            for (stage, rollout), rows in rollouts.items()
        ]
        print(json.dumps({"group": group, "told": rows_by_rollout}, indent=2))
        return
    for (stage, rollout), rows in rollouts.items():
        print(f"{stage}, {rollout}")
        logged = counted(len(rows), "logged sample")
        print(f"group {group}: {logged} of prompt {excerpt(rows[0].prompt)}")
        for row in sorted(rows, key=lambda row: int(row.sample.rpartition("/")[2])):
            print(
                f"  {row.sample}  {_end_of(row)}{_score_of(row)}{_by_weights(row)}; "
                f"response {excerpt(row.response, 60)}"
            )
    print(f"history of one: flowrl why {shlex.quote(str(opened.path))} {rows[0].sample}")


def _histories(
    journals: Sequence[SampleFiles],
    rows: Mapping[tuple[str, str], SampleRow],
    sample: SampleId,
) -> list[_RolloutHistory]:
    """Returns the history of a sample in each rollout that has its events or its row."""
    files_of = {(files.stage, files.rollout): files for files in journals}
    found = []
    for stage, rollout in dict.fromkeys((*files_of, *rows)):
        files, row = files_of.get((stage, rollout)), rows.get((stage, rollout))
        missing = "this rollout has no journal (runtime.journal_mb=0 writes none)"
        history = None
        if files is not None:
            missing = "the journal does not go back to it (runtime.journal_mb limits its size)"
            journal = files.of_sample(sample)
            history = None if journal is None else sample_history(journal, sample)
        if history is not None and history.state is None:
            history = None
        if history is not None or row is not None:
            found.append(
                _RolloutHistory(
                    stage=stage, rollout=rollout, history=history, missing=missing, row=row
                )
            )
    return found


def _unknown(
    opened: RunFolder, group: str, member: str | None, journals: Sequence[SampleFiles]
) -> ConfigError:
    offered = {name: members for files in journals for name, members in files.groups().items()}
    members = [int(row.sample.rpartition("/")[2]) for row in opened.samples_of(group)]
    last = max([offered.get(group, 0) - 1, *members])
    is_known = last >= 0
    what = "this run has no such sample" if member else "this run has no such group"
    if is_known:
        what = f"the group {group} has no member {member}"
    if is_known and member is None:
        what = "no step has reported this group yet"
    nearest = [] if is_known else _nearest(group, opened.groups() | offered.keys())
    suffix = "" if member is None else "/0"
    return ConfigError(
        what,
        where=f"{opened.path}: sample {group}" + ("" if member is None else f"/{member}"),
        expected=f"{group}/0 to {group}/{last}" if is_known else "EPOCH/PROMPT/MEMBER, from 0",
        hint=f"the nearest are {', '.join(name + suffix for name in nearest)}"
        if nearest
        else "known are the samples of steps that the journal (runtime.journal_mb) and "
        "samples.jsonl (runtime.log_samples) hold; evaluations keep none",
    )


def _nearest(group: str, groups: Iterable[str]) -> list[str]:
    """Returns up to three groups whose epoch, and then whose prompt, is nearest.

    Groups of children, whose ids are samples', are near to other such groups.
    """
    wanted = _numbers(group)

    def distance(name: str) -> tuple[int, int, int, int]:
        epoch, prompt, *members = _numbers(name)
        deeper = abs(len(members) - len(wanted[2:]))
        return deeper, abs(epoch - wanted[0]), abs(prompt - wanted[1]), prompt

    return heapq.nsmallest(3, groups, key=distance)


def _numbers(group: str) -> tuple[int, ...]:
    return tuple(map(int, group.split("/")))


def excerpt(text: str, limit: int = 200) -> str:
    """Returns the begin of a text in quotes, on one line and without control characters."""
    return repr(text if len(text) <= limit else text[:limit] + "...")
