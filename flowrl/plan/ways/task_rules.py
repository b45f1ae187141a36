"""What a task allows of layouts, and asks of one replica at once."""

from __future__ import annotations

from flowrl.cost.layout import Layout
from flowrl.cost.memory import Workload
from flowrl.plan.request import PlanRequest
from flowrl.plan.ways.layouts import LayoutRules
from flowrl.plan.ways.tasks import TaskWork


def layout_rules(task: TaskWork, request: PlanRequest, node_size: int) -> LayoutRules:
    """What a task and its library allow."""
    library = task.library
    rows = task.even_rows if task.updates else None if task.generates else task.samples
    rows_of, sizes = "a step", sorted({one.rows for one in task.updated if one.rows})
    if task.updates:
        alike = " and ".join(map(str, sizes))
        most = f" (the most that divides those of {alike})" if rows not in sizes else ""
        rows_of = f"an update{most}"
    return LayoutRules(
        kinds=library.kinds,
        node_size=node_size,
        rows=rows,
        rows_of=rows_of,
        samples=task.samples,
        max_length=request.max_length,
        kv_copies=library.kv_copies,
        vocabulary_step=library.vocabulary_step,
        cp_splits_heads=library.cp_splits_heads,
        cuts_experts=library.cuts_experts,
    )


def task_workload(task: TaskWork, layout: Layout, request: PlanRequest, dtype: str) -> Workload:
    """What one replica is asked to do at once."""
    slots = task_slots(task, layout, request.max_staleness) if task.generates else 0
    return Workload(
        num_slots=slots,
        max_length=request.max_length,
        max_prompt_tokens=request.max_prompt_tokens,
        max_response_tokens=request.max_response_tokens,
        micro_batch=1,
        num_samples=max(1, task.rows or task.samples),
        dtype=dtype,
        trainable=task.updates,
        shares_weights=False,
    )


def task_slots(task: TaskWork, layout: Layout, staleness: int) -> int:
    """Samples that one replica decodes at once: of what is drawn ahead, several batches'."""
    samples = task.samples * (1 + staleness)
    return max(1, min(task.slots, -(-samples // layout.dp)))


def parameter_form(task: TaskWork, layout: Layout) -> str:
    """Returns how parameters lie on devices: replicas count only where they divide them."""
    sizes = f"tp {layout.tp} pp {layout.pp} ep {layout.ep}"
    if task.library.shard == "full":
        sizes += f" of {layout.shards}"
    return f"{task.library.name} {sizes}"
