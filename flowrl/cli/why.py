"""`flowrl why`: one sample's story, from the journal of its run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from flowrl.errors import ConfigError
from flowrl.ids import SampleId
from flowrl.observe.rows import SampleRow
from flowrl.observe.run_folder import RunFolder
from flowrl.rollout.story import SampleStory, sample_story
from flowrl.runtime.journal_files import SampleFiles, rollout_journals
from flowrl.wording import counted

__all__ = ["run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What is known of a sample in one rollout.

    Attributes:
        story: None where the journal does not go back to it.
        row: Of samples.jsonl; None where no step has reported it.
    """

    stage: str
    rollout: str
    story: SampleStory | None
    row: SampleRow | None

    def __str__(self) -> str:
        lines = [f"{self.stage}, {self.rollout}"]
        if self.story is not None:
            lines += str(self.story).splitlines()
        else:
            lines.append("  the journal does not go back to it (runtime.journal_mb)")
        if self.row is not None:
            lines += _told_of_row(self.row)
        return "\n".join(lines)

    def to_json(self) -> dict[str, object]:
        """For scripts."""
        value: dict[str, object] = {"stage": self.stage, "rollout": self.rollout}
        if self.story is not None:
            value |= {
                "state": self.story.state,
                "spans": [list(span) for span in self.story.spans],
                "age": self.story.age,
                "moments": [
                    {"event": m.event_id, "at_s": m.at_s, "text": m.text}
                    for m in self.story.moments
                ],
            }
        if self.row is not None:
            value["row"] = self.row.to_json()
        return value


def _told_of_row(row: SampleRow) -> list[str]:
    reason = f" ({row.reason})" if row.reason else ""
    score = "" if row.score is None else f", score {row.score:g}"
    return [
        f"  step {row.step}: {row.end}{reason}; {counted(row.num_tokens, 'token')}{score}",
        f"  prompt {_excerpt(row.prompt)}",
        f"  response {_excerpt(row.response)}",
    ]


def run(folder: Path, sample: str, *, as_json: bool) -> None:
    """Prints the story of a sample in every rollout that has one of this name.

    Raises:
        CheckpointError: no run is there.
        ConfigError: it has no such sample; names the nearest ones.
    """
    opened = RunFolder.open(folder)
    journals = rollout_journals(folder)
    rows = {(r.stage, r.rollout): r for r in opened.samples() if r.sample == sample}
    told = _told(journals, rows, SampleId(sample))
    if not told:
        raise _unknown(folder, sample, journals)
    if as_json:
        print(json.dumps({"sample": sample, "told": [one.to_json() for one in told]}, indent=2))
    else:
        print("\n\n".join(map(str, told)))


def _told(
    journals: Sequence[SampleFiles], rows: Mapping[tuple[str, str], SampleRow], sample: SampleId
) -> list[_Told]:
    found = []
    for files in journals:
        journal = files.of_sample(sample)
        story = None if journal is None else sample_story(journal, sample)
        row = rows.get((files.stage, files.rollout))
        if story is not None and story.state is None:
            story = None
        if story is not None or row is not None:
            found.append(_Told(stage=files.stage, rollout=files.rollout, story=story, row=row))
    known = {(files.stage, files.rollout) for files in journals}
    found += [
        _Told(stage=stage, rollout=rollout, story=None, row=row)
        for (stage, rollout), row in rows.items()
        if (stage, rollout) not in known
    ]
    return found


def _unknown(folder: Path, sample: str, journals: Sequence[SampleFiles]) -> ConfigError:
    groups = {group: members for files in journals for group, members in files.groups().items()}
    group, _, member = sample.rpartition("/")
    if sample in groups:
        return ConfigError(
            "this is a group of samples",
            where=f"{folder}: sample {sample}",
            expected=f"one of its members, {sample}/0 to {sample}/{groups[sample] - 1}",
            found=sample,
            hint=f"flowrl why {folder} {sample}/0",
        )
    if group in groups:
        return ConfigError(
            f"the group {group} has no member {member}",
            where=f"{folder}: sample {sample}",
            expected=f"{group}/0 to {group}/{groups[group] - 1}",
            found=sample,
            hint=f"flowrl why {folder} {group}/0",
        )
    hint = (
        "only samples of steps are known, from a journal (runtime.journal_mb) or samples.jsonl; "
        "evaluations keep none"
    )
    if groups:
        nearest = ", ".join(f"{name}/0" for name in _nearest(group or sample, groups))
        hint = f"the nearest are {nearest}" if nearest else f"the first is {next(iter(groups))}/0"
    return ConfigError(
        "this run has drawn no such sample",
        where=f"{folder}: sample {sample}",
        expected="EPOCH/PROMPT/MEMBER, each counted from 0; samples.jsonl lists them",
        hint=hint,
    )


def _nearest(group: str, groups: Mapping[str, int]) -> list[str]:
    """Up to three groups: of prompts that lie nearest, or whose names are alike."""
    wanted = _numbers(group)
    if wanted is None:
        return get_close_matches(group, groups, n=3, cutoff=0.5)
    distances = {
        name: (abs(numbers[0] - wanted[0]), abs(numbers[1] - wanted[1]), numbers)
        for name in groups
        if (numbers := _numbers(name)) is not None
    }
    return sorted(distances, key=lambda name: distances[name])[:3]


def _numbers(group: str) -> tuple[int, int] | None:
    epoch, _, prompt = group.partition("/")
    if epoch.isdecimal() and prompt.isdecimal():
        return int(epoch), int(prompt)
    return None


def _excerpt(text: str, limit: int = 200) -> str:
    return repr(text if len(text) <= limit else text[:limit] + "...")
