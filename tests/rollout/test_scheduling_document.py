"""The states, events, policies and invariants of docs/scheduling.md are those of the code."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import get_args

from flowrl.compiler.scheduling import POLICY_KINDS
from flowrl.rollout.actions import Action
from flowrl.rollout.events import Event
from flowrl.rollout.machine import TRANSITIONS
from flowrl.rollout.settings import SchedulerSettings
from flowrl.rollout.states import TERMINAL, ClosedReason, DropReason
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
    told = set(re.findall(r"`(\w+)`", section(repository, "Events and actions")))
    assert {kind.__name__ for kind in (*get_args(Event), *get_args(Action))} <= told


def test_every_reason_to_drop_and_to_close_is_told_of(repository):
    states = re.findall(r"^\| `(\w+)` \|", section(repository, "The states of a sample"), re.M)
    assert set(states) == {str(reason) for reason in DropReason}
    engines = re.findall(r"^\| `(\w+)`", section(repository, "Engines"), re.M)
    assert set(engines) == {str(reason) for reason in ClosedReason}


def test_the_invariants_are_numbered_alike_in_the_document_and_in_the_fuzzer(repository):
    numbers = re.findall(r"^(\d+)\. \*", section(repository, "Invariants"), re.M)
    assert [int(number) for number in numbers] == list(INVARIANTS)


def test_every_rule_of_a_config_is_listed_with_its_default_kinds_and_options(repository):
    rows = re.findall(
        r"^\| `(\w+)` \| `(.*?)` \|(.*?)\|(.*)\|$", section(repository, "Policies"), re.M
    )
    assert {name for name, *_ in rows} == set(POLICY_KINDS)
    defaults = SchedulerSettings(group_size=1)
    for name, default, kinds, options in rows:
        assert default == str(getattr(defaults, "refill_by" if name == "refill" else name))
        listed = {default.split("(")[0], *re.findall(r"`(\w+)`", kinds)}
        assert {kind.kind for kind in POLICY_KINDS[name]} <= listed
        if name != "admission":  # sizes of the stage are no options of it
            every = {of.name for kind in POLICY_KINDS[name] for of in fields(kind)} - {"shares"}
            assert set(re.findall(r"`(\w+)`", options)) == every


def test_every_other_setting_is_named_with_its_default(repository):
    text = section(repository, "Policies")
    policies = {"refill_by" if name == "refill" else name for name in POLICY_KINDS}
    defaults = SchedulerSettings(group_size=1)
    for setting in fields(SchedulerSettings):
        if setting.name == "group_size":
            assert "`group_size`" in text
        elif setting.name == "refill" or setting.name not in policies:
            assert f"`{setting.name}` ({str(getattr(defaults, setting.name)).lower()})" in text
