"""What docs/scheduling.md draws and lists is what the code has."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import get_args

from flowrl.compiler.scheduling import POLICY_KINDS
from flowrl.rollout import TERMINAL, TRANSITIONS, Action, ClosedReason, DropReason, Event
from flowrl.rollout.settings import SchedulerSettings
from tests.proofs.reference_model import INVARIANTS


def section(repository, title):
    text = (repository / "docs" / "scheduling.md").read_text()
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_drawn_states_are_the_table_of_transitions(repository):
    drawn = re.findall(r"^    (\S+) --> (\w+)", section(repository, "The states of a sample"), re.M)
    inner = {(before, after) for before, after in drawn if before != "[*]"}
    assert inner == {(str(before), str(after)) for before, after in TRANSITIONS}
    ends = re.findall(r"^    (\w+) --> \[\*\]", section(repository, "The states of a sample"), re.M)
    assert set(ends) == {str(state) for state in TERMINAL}


def test_every_event_and_every_action_is_told_of(repository):
    told = set(re.findall(r"`(\w+)`", section(repository, "In one page")))
    assert {kind.__name__ for kind in (*get_args(Event), *get_args(Action))} <= told


def test_every_reason_to_drop_and_to_close_is_told_of(repository):
    states = re.findall(r"^\| `(\w+)` \|", section(repository, "The states of a sample"), re.M)
    assert set(states) == {str(reason) for reason in DropReason}
    engines = re.findall(r"^\| `(\w+)`", section(repository, "Engines"), re.M)
    assert set(engines) == {str(reason) for reason in ClosedReason}


def test_every_setting_is_listed_with_its_default(repository):
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| ", section(repository, "Every setting"), re.M)
    defaults = SchedulerSettings(group_size=1)
    expected = {of.name: f"`{getattr(defaults, of.name)}`" for of in fields(SchedulerSettings)}
    del expected["group_size"]
    listed = dict(rows)
    assert listed.pop("group_size") == "required"
    listed.pop("SchedulerSettings", None)
    assert listed == expected


def test_the_invariants_are_numbered_alike_in_the_document_and_in_the_fuzzer(repository):
    numbers = re.findall(r"^(\d+)\. \*", section(repository, "Invariants"), re.M)
    assert [int(number) for number in numbers] == list(INVARIANTS)


def test_every_rule_of_a_config_is_listed_with_its_kinds_and_options(repository):
    rows = re.findall(r"^\| `(\w+)` \|(.*?)\|(.*)\|$", section(repository, "Policies"), re.M)
    assert {name for name, _, _ in rows} == set(POLICY_KINDS)
    for name, kinds, options in rows:
        if len(POLICY_KINDS[name]) > 1:
            assert {kind.kind for kind in POLICY_KINDS[name]} <= set(re.findall(r"`(\w+)`", kinds))
        if name != "admission":  # sizes of the stage are no options of it
            every = {of.name for kind in POLICY_KINDS[name] for of in fields(kind)} - {"shares"}
            assert set(re.findall(r"`(\w+)`", options)) == every
