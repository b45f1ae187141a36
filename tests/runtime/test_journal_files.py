"""The journal on disk: whole steps, bounded files, resumed runs, and one sample's part of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl.errors import SchedulerError
from flowrl.ids import EngineId, GroupId, NodeId, SampleId, group_id, sample_id
from flowrl.rollout.event_history import sample_history
from flowrl.rollout.events import (
    BatchAsked,
    EngineJoined,
    Event,
    PromptsOffered,
    Resumed,
    SampleEnd,
    SamplesFinished,
    SamplesScored,
    WeightsPublished,
)
from flowrl.rollout.journal import replay
from flowrl.rollout.scheduler import RolloutScheduler
from flowrl.rollout.settings import SchedulerSettings
from flowrl.rollout.states import State
from flowrl.runtime.checkpoint.journal import RolloutJournal, RolloutJournals, rollout_journals
from flowrl.specs import FinishReason

ENGINE = EngineId("actor.generate[0]")
NODE = NodeId("actor.generate")


class Steps:
    """A synchronous rollout of one group a step, with its journal."""

    def __init__(
        self, journal: RolloutJournal, scheduler: RolloutScheduler | None = None, done: int = 0
    ) -> None:
        self.journal = journal
        self.scheduler = scheduler or RolloutScheduler(SchedulerSettings(group_size=2))
        self.done = done
        journal.begin(self.scheduler)
        if scheduler is not None:
            self.step(Resumed(id=self.next))
        self.step(EngineJoined(id=self.next, engine=ENGINE, capacity=8))

    @property
    def next(self) -> int:
        return self.scheduler.last_event_id + 1

    def step(self, event: Event) -> None:
        self.journal.note(event)
        self.scheduler.step(event)

    def offered(self) -> GroupId:
        group = group_id(0, self.done)
        self.step(PromptsOffered(id=self.next, groups=(group,)))
        return group

    def whole(self) -> None:
        """One step of training."""
        group = self.offered()
        samples = [sample_id(group, member) for member in range(2)]
        version = self.scheduler.version
        ends = tuple(
            SampleEnd(
                sample=sample,
                attempt=0,
                reason=FinishReason.STOP,
                num_tokens=3,
                versions=((version, 3),),
            )
            for sample in samples
        )
        self.step(BatchAsked(id=self.next, batch=self.done, groups=1))
        self.step(SamplesFinished(id=self.next, engine=ENGINE, ends=ends))
        scores = tuple((sample, 1.0) for sample in samples)
        self.step(SamplesScored(id=self.next, scores=scores))
        self.step(WeightsPublished(id=self.next, version=version + 1))
        self.done += 1
        self.journal.flush()


def opened(folder: Path, max_bytes: int = 1 << 20) -> RolloutJournal:
    journal = RolloutJournals(folder=folder, max_bytes=max_bytes).open("grpo", NODE)
    assert journal is not None
    return journal


def state_of(folder: Path, sample: str) -> State | None:
    (files,) = rollout_journals(folder)
    journal = files.of_sample(SampleId(sample))
    return None if journal is None else sample_history(journal, SampleId(sample)).state


def test_a_step_is_written_when_it_is_over_and_not_before(tmp_path: Path):
    steps = Steps(opened(tmp_path))
    steps.whole()
    (path,) = (tmp_path / "journal" / "grpo" / "actor.generate").iterdir()
    before = path.read_bytes()
    steps.offered()
    assert path.read_bytes() == before
    steps.journal.close()
    assert len(path.read_bytes()) > len(before)  # what led to an end that came in a step


def test_what_is_read_replays_to_the_very_state(tmp_path: Path):
    steps = Steps(opened(tmp_path))
    for _ in range(5):
        steps.whole()
    (files,) = rollout_journals(tmp_path)
    assert (files.stage, files.rollout) == ("grpo", "actor.generate")
    journal = files.of_sample(SampleId("0/4/0"))
    assert journal is not None
    assert replay(journal).to_json() == steps.scheduler.to_json()


def test_files_are_bounded_and_each_stands_alone(tmp_path: Path):
    steps = Steps(opened(tmp_path, max_bytes=16 * 2000))
    for _ in range(200):
        steps.whole()
    steps.journal.close()
    (files,) = rollout_journals(tmp_path)
    sizes = [path.stat().st_size for path in files.files]
    assert len(sizes) <= 16
    assert max(sizes) < 8000
    assert state_of(tmp_path, "0/199/1") is State.CONSUMED
    assert state_of(tmp_path, "0/190/1") is State.CONSUMED
    assert state_of(tmp_path, "0/0/0") is None  # too long ago


def test_a_sample_whose_life_crosses_files_is_told_whole(tmp_path: Path):
    steps = Steps(opened(tmp_path))
    group = steps.offered()
    steps.journal.flush()
    steps.journal.begin(steps.scheduler)  # as a full file has it
    sample = sample_id(group, 0)
    end = SampleEnd(
        sample=sample, attempt=0, reason=FinishReason.STOP, num_tokens=1, versions=((0, 1),)
    )
    steps.step(SamplesFinished(id=steps.next, engine=ENGINE, ends=(end,)))
    steps.journal.close()
    (files,) = rollout_journals(tmp_path)
    assert len(files.files) == 2
    journal = files.of_sample(sample)
    assert journal is not None
    story = sample_history(journal, sample)
    assert story.state is State.SCORING
    assert story.moments[0].text == "offered"


def test_what_a_stopped_process_did_after_its_checkpoint_is_void(tmp_path: Path):
    steps = Steps(opened(tmp_path))
    steps.whole()
    checkpoint = steps.scheduler.to_json()
    steps.whole()  # lost: the next process makes another step of it
    steps.journal.close()
    again = Steps(opened(tmp_path), RolloutScheduler.from_json(checkpoint), done=1)
    again.whole()
    again.whole()
    (files,) = rollout_journals(tmp_path)
    journal = files.of_sample(SampleId("0/1/0"))
    assert journal is not None
    story = sample_history(journal, SampleId("0/1/0"))
    assert [moment.text for moment in story.moments].count("offered") == 1
    assert story.state is State.CONSUMED
    assert replay(journal).to_json() == again.scheduler.to_json()


def test_a_torn_last_line_is_left_out(tmp_path: Path):
    steps = Steps(opened(tmp_path))
    steps.whole()
    (files,) = rollout_journals(tmp_path)
    with files.files[0].open("a") as file:
        file.write('{"event": "PromptsOff')
    assert state_of(tmp_path, "0/0/0") is State.CONSUMED


def test_a_broken_line_is_named_by_its_file(tmp_path: Path):
    steps = Steps(opened(tmp_path))
    steps.whole()
    (files,) = rollout_journals(tmp_path)
    path = files.files[0]
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + "nonsense\n" + "".join(lines[1:]))
    with pytest.raises(SchedulerError) as caught:
        state_of(tmp_path, "0/0/0")
    assert f"{path}: line 2" in str(caught.value)


def test_groups_are_listed_with_their_members(tmp_path: Path):
    steps = Steps(opened(tmp_path, max_bytes=16 * 500))
    for _ in range(10):
        steps.whole()
    (files,) = rollout_journals(tmp_path)
    assert files.groups() == {f"0/{i}": 2 for i in range(10)}


def test_a_run_without_a_journal_has_none(tmp_path: Path):
    assert RolloutJournals(folder=tmp_path, max_bytes=0).open("grpo", NODE) is None
    assert rollout_journals(tmp_path) == []
