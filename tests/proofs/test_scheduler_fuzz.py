"""The fuzzer of the scheduler finds what is wrong: rules that are switched off, one at a time."""

from __future__ import annotations

import random

import pytest

from flowrl.rollout import batches, lifecycle
from flowrl.rollout.admission import AdmissionQueue
from flowrl.rollout.batches import ByDeadline, OfferOrder
from flowrl.rollout.fleet import Fleet
from flowrl.rollout.lifecycle import Lifecycle
from flowrl.rollout.machine import TRANSITIONS
from flowrl.rollout.placement import Placement
from flowrl.rollout.scheduler import RolloutScheduler
from flowrl.rollout.settings import SchedulerSettings
from flowrl.rollout.state import SchedulerState, Timers, write_state
from flowrl.rollout.states import DropReason, State
from tests.proofs.reference_model import ReferenceModel, Violation
from tests.proofs.scheduler_episodes import draw_episode, play, without_validator
from tests.proofs.scheduler_fuzz import Tally, fuzz, main
from tests.proofs.scheduler_shrink import shrink

# Rules switched off. Each takes the place of a method, or of a function of a module.


def without_fencing(self, engine, sample, attempt):
    record = self._machine.samples.get(sample)
    return record if record is not None and record.state is State.RUNNING else None


def without_an_abort_of_what_is_dropped(self, member, reason):
    self._machine.move(member, State.DROPPED, reason)
    self._drops.append(lifecycle.Drop(sample=member.id, reason=reason))


def without_telling_of_drops(self, member, reason):
    if member.engine is not None and member.engine.id in self._placement.engines:
        self.abort(member, reason)
    self._machine.move(member, State.DROPPED, reason)


def one_version_too_lenient(self):
    return self.horizon - self.settings.max_staleness - 1


def without_aging(self, reason):
    self.state.horizon = self.state.next_horizon()
    self.state.expect_next()


def complete_one_member_early(self, sample):
    self._machine.move(sample, State.READY)
    group = sample.group
    group.num_ready += 1
    if group.num_ready == max(1, self._settings.group_size - 1):
        self._complete(group)


def with_its_spare_members(self, group):
    if self._settings.judges_groups:
        group.phase = lifecycle.GroupPhase.JUDGING
        self.judges.append(group)
    else:
        self.keep(group)


def drop_only_the_one(self, group, reasons):
    for member in group.members:
        if member.id in reasons:
            group.num_ready -= member.state is State.READY
            self._end(member, reasons[member.id])
    group.members = [member for member in group.members if member.id not in reasons]
    if not group.members:
        self._end_group(group, lifecycle.GroupPhase.DROPPED)


def one_group_too_few(self, num_groups):
    return (self._kept if self._refill else len(self._front)) >= max(1, num_groups - 1)


def wait_for_one_more(self, num_groups):
    return len(self._ready) + (0 if self._refill else len(self._dead)) > num_groups


def never_wait(self, num_groups):
    return len(self._ready) + (0 if self._refill else len(self._dead)) >= num_groups


def always_in_order(settings):
    return OfferOrder(settings.refill)


def ask_again_and_again(self, sample, reason):
    sample.aborting = reason
    self._aborts.setdefault(sample.engine.id, []).append(sample.id)


def forget_half_of_the_tokens(first, second):
    return second


def never_a_wake(self):
    return None


def not_let_out(self, name):
    self._state.health[name].until_s = None


def with_old_weights(self):
    for engine in self._placement.engines.values():
        engine.version = self._machine.version


def without_looking_for_silence(self):
    return


def forget_what_failed(self):
    obj = write_state(self.state)
    for health in obj["health"].values():
        health.update(failed=[], quarantines=0, on_trial=False)
    return obj


def one_group_more(self, version, horizon, served, num_dead):
    budget = self._settings.budget
    capacity = budget.capacity(version, self._settings.max_staleness, horizon, served)
    return capacity + budget.groups - self.admitted - num_dead


def never_ask(self, room):
    return {}


def without_scores_after_a_crash(self, event):
    self._fleet.forget_all(event.at_s)
    self._admission.forget_requests()


def ask_for_no_second_score(self, sample):
    sample.reward_failures += 1
    if sample.reward_failures >= self._settings.retries.rewards:
        self.drop(sample, DropReason.REWARD_FAILED)


def leave_the_freed_engines_closed(self, waiting):
    return


def keep_the_slot(self, sample):
    sample.engine = None
    sample.aborting = ""


MUTATIONS = [
    (Lifecycle, "attempt", without_fencing),
    (Lifecycle, "_end", without_an_abort_of_what_is_dropped),
    (Lifecycle, "_end", without_telling_of_drops),
    (SchedulerState, "oldest", property(one_version_too_lenient)),
    (RolloutScheduler, "_drop_stale", without_aging),
    (Lifecycle, "score", complete_one_member_early),
    (Lifecycle, "_complete", with_its_spare_members),
    (Lifecycle, "drop_members", drop_only_the_one),
    (OfferOrder, "complete", one_group_too_few),
    (ByDeadline, "complete", wait_for_one_more),
    (ByDeadline, "complete", never_wait),
    (batches, "open_pool", always_in_order),
    (Lifecycle, "abort", ask_again_and_again),
    (lifecycle, "joined", forget_half_of_the_tokens),
    (Timers, "wake", never_a_wake),
    (Fleet, "_release", not_let_out),
    (Fleet, "publish", with_old_weights),
    (Fleet, "watch_stalls", without_looking_for_silence),
    # Ten seconds pass until an episode meets it.
    pytest.param(Fleet, "unpack", leave_the_freed_engines_closed, marks=pytest.mark.slow),
    (RolloutScheduler, "to_json", forget_what_failed),
    (AdmissionQueue, "num_admissible", one_group_more),
    (AdmissionQueue, "wanted_by_budget", never_ask),
    (Lifecycle, "fail_reward", ask_for_no_second_score),
    (Placement, "release", keep_the_slot),
]


def patch(monkeypatch, owner, name, replacement):
    if owner is batches:
        # It was imported by name.
        monkeypatch.setattr("flowrl.rollout.state.open_pool", replacement)
    else:
        monkeypatch.setattr(owner, name, replacement)


@pytest.mark.parametrize(
    ("owner", "name", "replacement"), MUTATIONS, ids=lambda m: getattr(m, "__name__", "")
)
def test_a_rule_that_is_switched_off_is_noticed_by_the_reference_model_alone(
    monkeypatch, owner, name, replacement
):
    patch(monkeypatch, owner, name, replacement)
    found = fuzz(1, 40_000, 250, Tally(), validate=False, shrinks=False)
    assert found is not None


@pytest.mark.parametrize(
    ("owner", "name", "replacement"),
    [
        (Lifecycle, "attempt", without_fencing),
        (SchedulerState, "oldest", property(one_version_too_lenient)),
        (Lifecycle, "set_first_version", lambda self, sample, version: None),
        (Placement, "release", keep_the_slot),
    ],
    ids=["fencing", "age", "dates", "slots"],
)
def test_a_rule_that_is_switched_off_is_noticed_with_the_validator(
    monkeypatch, owner, name, replacement
):
    patch(monkeypatch, owner, name, replacement)
    assert fuzz(1, 40_000, 250, Tally(), shrinks=False) is not None


def test_a_transition_that_loses_its_effect_is_noticed(monkeypatch):
    monkeypatch.setitem(TRANSITIONS, (State.PARTIAL, State.QUEUED), None)
    assert fuzz(1, 40_000, 250, Tally(), validate=False, shrinks=False) is not None


def test_asking_nothing_again_after_a_crash_is_noticed(monkeypatch):
    handlers = dict(RolloutScheduler._HANDLERS)
    resumed = next(kind for kind in handlers if kind.__name__ == "Resumed")
    monkeypatch.setitem(RolloutScheduler._HANDLERS, resumed, without_scores_after_a_crash)
    assert fuzz(1, 40_000, 250, Tally(), validate=False, shrinks=False) is not None


def first_failure(size=250):
    for number in range(400):
        episode = without_validator(draw_episode(random.Random(f"9/{number}"), size))
        error = play(episode)[1]
        if error is not None:
            return episode, error
    raise AssertionError("nothing breaks")


def test_a_story_is_shortened_to_what_it_needs(monkeypatch):
    monkeypatch.setattr(Lifecycle, "attempt", without_fencing)
    episode, error = first_failure()
    short = shrink(episode, error)
    assert len(short.script) <= 8 < len(episode.script)
    again = play(short)[1]
    assert isinstance(again, Violation)
    assert again.invariant == error.invariant
    # Nothing can be left out any more.
    for number in range(len(short.script)):
        script = short.script[:number] + short.script[number + 1 :]
        shorter = type(short)(
            settings=short.settings, rules=short.rules, script=script, end=short.end
        )
        found = play(shorter)[1]
        assert not isinstance(found, Violation) or found.invariant != error.invariant


def test_shortening_gives_settings_their_defaults(monkeypatch):
    monkeypatch.setattr(Lifecycle, "attempt", without_fencing)
    episode, error = first_failure()
    short = shrink(episode, error)
    plain = SchedulerSettings(group_size=1)
    assert (
        sum(getattr(short.settings, name) != getattr(plain, name) for name in plain.to_json()) <= 2
    )


def test_a_violation_names_its_invariant():
    reference = ReferenceModel(settings=SchedulerSettings(group_size=1), max_tokens=3)
    reference.check(3, True, "fine")
    with pytest.raises(Violation, match=r"^\[3: age\] too old$") as caught:
        reference.check(3, False, "too old")
    assert caught.value.invariant == 3
    assert reference.checked == {3: 2}


def test_the_command_ends_with_0_when_nothing_breaks(capsys):
    assert main(["--seed", "5", "--events", "800", "--size", "100"]) == 0
    shown = capsys.readouterr().out
    lines = dict(line.rsplit(None, 1) for line in shown.splitlines())
    assert lines["violations"] == "0"
    assert int(lines["events"].replace(",", "")) >= 800
    assert {"faults tried", "restarts from written state", "checks of invariants"} <= set(lines)


def test_what_is_played_does_not_depend_on_the_number_of_processes(monkeypatch, capsys):
    monkeypatch.setattr("tests.proofs.scheduler_fuzz.PIECE", 400)
    shown = []
    for jobs in ("1", "2"):
        assert (
            main(["--events", "1000", "--size", "60", "--jobs", jobs, "--without-validator"]) == 0
        )
        lines = capsys.readouterr().out.splitlines()
        shown.append([line for line in lines if not line.startswith("seconds")])
    assert shown[0] == shown[1]
    events = int(shown[0][0].rsplit(None, 1)[1].replace(",", ""))
    assert events >= 1000


def test_the_command_ends_with_1_and_says_how_to_see_it_again(monkeypatch, capsys):
    monkeypatch.setitem(TRANSITIONS, (State.PARTIAL, State.QUEUED), None)
    assert main(["--seed", "5", "--events", "20000"]) == 1
    shown = capsys.readouterr().out
    assert "VIOLATION in episode" in shown
    again = shown.rsplit("again: ", 1)[1].split()
    assert main(again) == 1
