"""Ids as distinct types, so that a type checker notices a group passed as a sample.

A sample is one answer to one prompt in one epoch. Its id is readable on purpose, because it appears
in logs and messages: `0/17/3` is epoch 0, prompt 17, member 3. Where a prompt is made of a sample
(`fl.prompts_of`), the samples that answer it are a group with that sample's id: `0/17/3/1` is
member 1 of the children of `0/17/3`.
"""

from __future__ import annotations

from typing import NewType

RoleName = NewType("RoleName", str)
"""A role of a workflow: the name of its parameter, and the key under `roles` in the config."""

NodeId = NewType("NodeId", str)
"""A node of a graph, unique in it: `actor.generate`, `advantage`, `actor.update`."""

EngineId = NewType("EngineId", str)
"""A replica of a generating role: `actor.generate[0]`."""

GroupId = NewType("GroupId", str)
"""A prompt in an epoch, `epoch/prompt`; or a prompt made of a sample, with the sample's id."""

SampleId = NewType("SampleId", str)
"""A member of a group: `epoch/prompt/member`, or of a sample's children `sample/member`."""


def engine_id(role: str, number: int) -> EngineId:
    """Returns the id of an engine of a role (counted from 0)."""
    return EngineId(f"{role}.generate[{number}]")


def engine_number(engine: EngineId) -> int:
    """Returns the number of an engine among those of its role."""
    return int(engine.rpartition("[")[2].removesuffix("]"))


def group_id(epoch: int, prompt: int) -> GroupId:
    """Returns the id of the group that answers `prompt` in `epoch` (both counted from 0)."""
    return GroupId(f"{epoch}/{prompt}")


def sample_id(group: GroupId, member: int) -> SampleId:
    """Returns the id of a group's `member` (counted from 0)."""
    return SampleId(f"{group}/{member}")
