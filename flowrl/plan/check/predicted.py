"""What a plan predicts, beside its own decisions: a hand may have changed one and not the other.

Proven of a plan's file that is read alone. With its configuration nothing here is asked: there all
that follows from decisions is made anew (`flowrl.plan.priced.anew`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from flowrl.cost.memory import format_bytes
from flowrl.errors import PlanError
from flowrl.graph.ir import Op
from flowrl.plan.check.follows import check_follows
from flowrl.plan.check.local import check_local
from flowrl.plan.check.numbers import PRICE_ANEW
from flowrl.plan.many_form import EngineFlags, ScheduleStep
from flowrl.plan.names import cache_words, way_words
from flowrl.plan.schema import Operation, PlacementPlan

_NEAR = 1e-6
"""Of a time, what sums in another order may differ by."""

_LAYOUT_FLAGS = {
    "--tp-size": "tp",
    "--tensor-parallel-size": "tp",
    "--pp-size": "pp",
    "--pipeline-parallel-size": "pp",
    "--ep-size": "ep",
}
_OPERATION_FLAGS = {
    "--max-running-requests": "slots",
    "--max-num-seqs": "slots",
    "--max-total-tokens": "kv_tokens",
}
_OF_A_SERVER = {"--tp-size", "--max-running-requests"}
"""Of all replicas of a server together, where its experts are divided over several."""
_REPLICAS = {"sglang": "--dp-size", "vllm": "--data-parallel-size"}
"""How many these are, by engine; 1 where it is left out."""
_LENGTH_FLAGS = ("--context-length", "--max-model-len")


def check_predicted(plan: PlacementPlan, where: str) -> None:
    """Memory within the devices; times, engines and reasons as the operations say.

    Raises:
        PlanError: something is not; names its key.
    """
    _check_memory(plan, where)
    if plan.schedule is None:
        check_local(plan, where)
        return
    for i, operation in enumerate(plan.operations):
        if operation.seconds is not None and operation.environment is None:
            _check_sizes(plan, operation, f"{where}: operations.{i}")
    operations = {one.node: (i, one) for i, one in enumerate(plan.operations)}
    for i, flags in enumerate(plan.engine_flags):
        number, operation = operations[flags.node]
        _check_flags(plan, flags, operation, f"{where}: engine_flags.{i}.flags", number)
    _check_times(plan, where)
    _check_timeline(plan, plan.schedule, where)
    _check_reasons(plan, where)
    check_follows(plan, plan.schedule, where)


def _check_memory(plan: PlacementPlan, where: str) -> None:
    for i, device in enumerate(plan.pool.devices):
        if device.budget_bytes > device.memory_bytes:
            raise PlanError(
                f"a plan may fill more of {device.address} than it has",
                where=f"{where}: pool.devices.{i}.budget_bytes",
                found=format_bytes(device.budget_bytes),
                expected=f"at most {format_bytes(device.memory_bytes)} (memory_bytes of it)",
                hint=PRICE_ANEW,
            )
    budgets = {device.address: device.budget_bytes for device in plan.pool.devices}
    for i, entry in enumerate(plan.prediction.memory):
        memory = entry.memory
        if memory.total > budgets[entry.device]:
            raise PlanError(
                f"{entry.device} holds more than it may, in {memory.phase} of {entry.active}",
                where=f"{where}: prediction.memory.{i}.memory.parts",
                found=f"{format_bytes(memory.total)}: {memory.describe()}",
                expected=f"at most {format_bytes(budgets[entry.device])} (budget_bytes of it)",
                hint=PRICE_ANEW,
            )


def _check_sizes(plan: PlacementPlan, operation: Operation, where: str) -> None:
    """Micro-batches and caches hold the longest sample, and an engine decodes one at least."""
    longest = plan.sizes.max_length
    least = {"slots": 1, "kv_tokens": longest}
    if operation.op not in (Op.GENERATE, Op.INTERACT):
        least = {"micro_tokens": longest}
    for key, amount in least.items():
        if getattr(operation, key) < amount:
            raise PlanError(
                f"{operation.node} cannot have this",
                where=f"{where}.{key}",
                found=f"{key} {getattr(operation, key):,}",
                expected=f"at least {amount:,}"
                + (", the tokens of the longest sample" if key != "slots" else ""),
                hint="write what is expected, or undo the edit",
            )


def _check_flags(
    plan: PlacementPlan, flags: EngineFlags, operation: Operation, where: str, number: int
) -> None:
    """How engines are started, beside the operation that they are for."""
    given = dict(flags.flags)
    together = operation.layout.server_replicas
    for name, key in _LAYOUT_FLAGS.items():
        if name in given:
            of = f"operations.{number}.layout.{key}"
            size = getattr(operation.layout, key) * (together if name in _OF_A_SERVER else 1)
            _check_flag(name, given[name], size, of, where)
    if flags.engine in _REPLICAS:
        name, of = _REPLICAS[flags.engine], f"operations.{number}.layout.ep"
        _check_flag(name, given.get(name, "1"), together, of, where)
    for name, key in _OPERATION_FLAGS.items():
        if name in given:
            amount = getattr(operation, key) * (together if name in _OF_A_SERVER else 1)
            _check_flag(name, given[name], amount, f"operations.{number}.{key}", where)
    for name in _LENGTH_FLAGS:
        if name in given:
            _check_flag(name, given[name], plan.sizes.max_length, "sizes.max_length", where)
    if operation.role is not None and "--dtype" in given:
        dtype = plan.placement(operation.role).dtype
        _check_flag("--dtype", given["--dtype"], dtype, f"dtype of role {operation.role}", where)


def _check_flag(name: str, found: str, expected: object, of: str, where: str) -> None:
    if found != str(expected):
        raise PlanError(
            "the flags of an engine do not follow from its operation",
            where=where,
            found=f"{name} {found}",
            expected=f"{name} {expected} ({of})",
            hint=PRICE_ANEW,
        )


def _check_times(plan: PlacementPlan, where: str) -> None:
    """Seconds of operations and of routes, beside those that the prediction is made of."""
    numbers = {one.node: i for i, one in enumerate(plan.operations)}
    for i, source in enumerate(plan.prediction.confidence):
        operation = plan.operation(source.node)
        seconds, key = operation.seconds, "seconds"
        if operation.environment is not None:
            seconds, key = operation.environment.seconds, "environment.seconds"
        if seconds is not None and not _near(seconds, source.seconds):
            raise PlanError(
                f"{source.node} takes another time than is predicted of it",
                where=f"{where}: operations.{numbers[source.node]}.{key}",
                found=f"{seconds:g} s",
                expected=f"{source.seconds:g} s (prediction.confidence.{i}.seconds)",
                hint=PRICE_ANEW,
            )
    for i, operation in enumerate(plan.operations):
        rows = max(1, operation.micro_tokens // plan.sizes.max_length)
        if operation.micro_tokens and operation.micro_batch != rows:
            raise PlanError(
                f"{operation.node} has other micro-batches in tokens than in samples",
                where=f"{where}: operations.{i}.micro_tokens",
                found=f"micro_tokens {operation.micro_tokens}, micro_batch {operation.micro_batch}",
                expected=f"micro_batch {rows}, of {plan.sizes.max_length} tokens each",
                hint=PRICE_ANEW,
            )
        if None not in (operation.steady_s, operation.seconds) and (
            (operation.steady_s or 0.0) > (operation.seconds or 0.0) * (1 + _NEAR)
        ):
            raise PlanError(
                f"batches of {operation.node} follow each other in more time than one takes",
                where=f"{where}: operations.{i}.steady_s",
                found=f"{operation.steady_s:g} s",
                expected=f"at most {operation.seconds:g} s (operations.{i}.seconds)",
                hint=PRICE_ANEW,
            )
    sync_s = sum(route.seconds or 0.0 for route in plan.weight_routes)
    said = plan.prediction.sync_s
    if said is not None and not _near(said, sync_s):
        raise PlanError(
            "the time of weight sync is not the one of the weight routes",
            where=f"{where}: prediction.sync_s",
            found=f"{said:g} s",
            expected=f"{sync_s:g} s, the sum of weight_routes",
            hint=PRICE_ANEW,
        )


def _check_timeline(plan: PlacementPlan, schedule: ScheduleStep, where: str) -> None:
    """Bars are as long as operations take, and the step ends with the last of them."""
    timeline, step_s = plan.prediction.timeline, plan.prediction.step_s
    if not timeline or step_s is None:
        return
    stretched = frozenset(_stretched(schedule, inside=False))
    for i, span in enumerate(timeline):
        operation = next((one for one in plan.operations if one.node == span.node), None)
        if operation is None or operation.seconds is None:
            continue
        took, least = span.end_s - span.begin_s, operation.seconds / operation.every
        is_short = took < least and not _near(took, least, step_s)
        if is_short or (span.node not in stretched and not _near(took, least, step_s)):
            raise PlanError(
                f"{span.node} takes another time in the timeline than it says itself",
                where=f"{where}: prediction.timeline.{i}",
                found=f"{span.begin_s:g} to {span.end_s:g} s, {took:g} s",
                expected=f"{least:g} s",
                hint=PRICE_ANEW,
            )
    end_s = max(span.end_s for span in timeline)
    if schedule.kind != "asynchronous" and not _near(end_s, step_s):
        raise PlanError(
            "the step takes another time than its timeline",
            where=f"{where}: prediction.step_s",
            found=f"{step_s:g} s",
            expected=f"{end_s:g} s, where the last span of prediction.timeline ends",
            hint=PRICE_ANEW,
        )


def _stretched(step: ScheduleStep, *, inside: bool) -> Iterator[str]:
    """Operations that may wait between pieces: those beside which others work, and those that take
    turns in what feeds them."""
    if step.node is not None and inside:
        yield step.node
    for i, part in enumerate(step.parts):
        waits = i == 1 or (step.chunks > 1 and part.kind == "temporal")
        yield from _stretched(part, inside=inside or (step.kind == "spatial" and waits))


def _check_reasons(plan: PlacementPlan, where: str) -> None:
    """What is told of an operation's layout and cache is what it has."""
    for i, reason in enumerate(plan.reasons):
        for number, one in enumerate(plan.operations):
            told = {one.node: way_words(one.layout, one.recompute, one.offload)}
            if one.kv_tokens:
                told[f"{one.node} kv cache"] = cache_words(one.kv_tokens, one.slots)
            is_placed = one.seconds is not None and one.environment is None
            if is_placed and told.get(reason.subject, reason.choice) != reason.choice:
                raise PlanError(
                    f"{reason.subject} is not what the plan gives reasons for",
                    where=f"{where}: operations.{number}",
                    found=told[reason.subject],
                    expected=f"{reason.choice} (reasons.{i}.choice)",
                    hint=PRICE_ANEW,
                )


def _near(one: float, other: float, scale: float = 0.0) -> bool:
    """Args: scale: Of what both are differences of."""
    return math.isclose(one, other, rel_tol=_NEAR, abs_tol=_NEAR * scale + 1e-9)
