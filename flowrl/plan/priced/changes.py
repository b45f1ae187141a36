"""What a plan's file says otherwise than its decisions have it, in lines for people."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

from flowrl.cost.memory import format_bytes
from flowrl.plan.check.file_lines import at_line
from flowrl.plan.many_form import EngineFlags
from flowrl.plan.names import device_names
from flowrl.plan.plan_fields import differences, texts_apart
from flowrl.plan.schema import Operation, PlacementPlan
from flowrl.plan.show.many import seconds_apart, seconds_text

_NEAR = 1e-4
"""Of a time or of bytes: what differs less is not told."""


def changes(old: PlacementPlan, new: PlacementPlan) -> Iterator[str]:
    """What a file says otherwise than its decisions have it, a line each.

    Times, memory and engines are told in words; every other field by its key. Of what is predicted
    no single number is told where a time or bytes that it follows from are.
    """
    if old is new:
        return
    told = list(_prices(old, new))
    yield from told
    for key, before, after in differences(old, new, _NEAR):
        if not any(one.search(key) for one in (_TOLD if told else _TOLD_ALWAYS)):
            follows, said = texts_apart(after, before, _NEAR)
            yield f"{key}: {follows} by the decisions of the plan, the file says {said}"


def is_changed(old: PlacementPlan, new: PlacementPlan) -> bool:
    """Whether a file says anything otherwise than its decisions have it."""
    return any(True for _ in changes(old, new))


_TOLD_ALWAYS = (re.compile(r"^operations\.\d+\.(seconds|steady_s|move_s|slots|micro_batch)$"),)
"""Fields that are told in words where they differ."""

_TOLD = (
    *_TOLD_ALWAYS,
    re.compile(r"^(prediction|engine_flags)\b"),
    re.compile(r"^operations\.\d+\.environment\."),
    re.compile(r"^weight_routes\.\d+\.seconds$"),
)
"""And those that follow from them."""


def _prices(old: PlacementPlan, new: PlacementPlan) -> Iterator[str]:
    now = {one.node: one for one in new.operations}
    for one in old.operations:
        if one.node not in now:
            continue
        yield from _decided(one, now[one.node])
        seconds, said = now[one.node].seconds, one.seconds
        if seconds is not None and not _alike(seconds, said):
            yield f"{one.node}: {_beside(seconds, said, 'by its layout')}"
        if not _alike(now[one.node].move_s, one.move_s):
            move = _beside(now[one.node].move_s, one.move_s, "to the host and back")
            yield f"{one.node}: {move}"
        use, before = now[one.node].environment, one.environment
        steady_s = now[one.node].steady_s
        if steady_s != one.steady_s and not (steady_s and _alike(steady_s, one.steady_s)):
            yield f"{one.node}: {_beside(steady_s, one.steady_s, 'from one batch to the next')}"
        if use is not None and before is not None and not _alike(use.seconds, before.seconds):
            yield f"{one.node}: {_beside(use.seconds, before.seconds, 'by its devices')}"
    yield from memory_changes(old, new)
    flags = {one.node: one for one in old.engine_flags}
    for engine in new.engine_flags:
        if flags.get(engine.node) != engine:
            yield f"{engine.node}: {_started(engine, flags.get(engine.node))}"
    sync_s, said_s = new.prediction.sync_s, old.prediction.sync_s
    if sync_s is not None and not _alike(sync_s, said_s):
        yield f"weight sync: {_beside(sync_s, said_s)}"
    yield from step_changes(old, new)


def step_changes(old: PlacementPlan, new: PlacementPlan) -> Iterator[str]:
    """What a step takes, where the file has it otherwise."""
    step, before_s = new.prediction.step_s, old.prediction.step_s
    if step is not None and not _alike(step, before_s):
        yield f"a step: {_beside(step, before_s)}"


def _started(engine: EngineFlags, said: EngineFlags | None) -> str:
    """How an engine is started, by those of its options that a file has otherwise."""
    if said is None or said.engine != engine.engine:
        other = "nothing" if said is None else f"{said.engine} {said.command()}"
        started = f"{engine.engine} {engine.command()}"
        return f"its engine is started with {started}, the file says {other}"
    now, before = dict(engine.flags), dict(said.flags)
    names = [name for name in dict.fromkeys((*now, *before)) if now.get(name) != before.get(name)]
    texts = [
        ", ".join(f"{name} {one[name]}".strip() if name in one else f"no {name}" for name in names)
        for one in (now, before)
    ]
    return f"its engine is started with {texts[0]}, the file says {texts[1]}"


def _decided(old: Operation, new: Operation) -> Iterator[str]:
    """Of decisions, those that others leave no room for."""
    if old.slots != new.slots:
        yield (
            f"{new.node}: {new.slots} samples at once, for a replica gets no more of a batch, the "
            f"file says {old.slots}"
        )
    if old.micro_batch != new.micro_batch:
        micro = f"samples of the longest in a micro-batch of {new.micro_tokens:,} tokens"
        told = f"{new.micro_batch} {micro}" if new.micro_tokens else "no micro-batches"
        yield f"{new.node}: {told}, the file says {old.micro_batch}"


def memory_changes(old: PlacementPlan, new: PlacementPlan) -> Iterator[str]:
    """What devices hold in each phase, where the file has it otherwise."""
    rows: dict[tuple[str, str, str], list[int]] = {}
    for one in old.prediction.memory:
        key = (one.device, one.active, str(one.memory.phase))
        rows.setdefault(key, []).append(one.memory.total)
    for entry in new.prediction.memory:
        phase, total = str(entry.memory.phase), entry.memory.total
        said = rows.get((entry.device, entry.active, phase), [])
        if not any(_alike(total, one) for one in said):
            on = device_names([entry.device])
            yield (
                f"{phase} of {entry.active}: {format_bytes(total)} on {on}, the file says "
                f"{' and '.join(map(format_bytes, said)) or 'nothing of it'}"
            )


def _alike(one: float, other: float | None) -> bool:
    return other is not None and math.isclose(one, other, rel_tol=_NEAR, abs_tol=1e-9)


def _beside(seconds: float | None, said: float | None, why: str = "") -> str:
    """A time and what the file says, in as many digits as tell them apart."""
    if seconds is None or said is None:
        texts = tuple("nothing" if one is None else seconds_text(one) for one in (seconds, said))
    else:
        texts = seconds_apart(seconds, said)
    return f"{texts[0]}{f' {why}' if why else ''}, the file says {texts[1]}"


def local_changes(given: PlacementPlan, plan: PlacementPlan, path: Path) -> Iterator[str]:
    """What a file for one device says otherwise than its decisions have it."""
    told = [one for one in differences(given, plan) if not one[0].startswith("prediction.")]
    # Ways of samples are as many as edges, and follow from what else is told.
    few = [one for one in told if not one[0].startswith("channels.")] or told
    for key, before, after in few:
        follows, said = texts_apart(after, before)
        yield f"{at_line(path, key)}: {follows} follows from the rest, the file says {said}"
    for line in (*memory_changes(given, plan), *step_changes(given, plan)):
        yield f"{path}: {line}"
