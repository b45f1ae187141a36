"""What `flowrl plan` prints: a plan for people to read, on a terminal or as plain lines.

Both forms hold the same facts in the same order: where every role runs, the memory of each device
by phase against what it has, what happens in a step, how weights travel, and why.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from flowrl.cost.memory import MemoryPart, format_bytes
from flowrl.plan.local import engines_of
from flowrl.plan.names import device_names
from flowrl.plan.schema import (
    Alternative,
    DeviceSummary,
    Operation,
    Placement,
    PlacementPlan,
    PredictedMemory,
    Reason,
    StartUnit,
    Transport,
    WeightRoute,
)
from flowrl.plan.show.many import (
    NOT_HERE,
    many_lists,
    many_tables,
    memory_note,
    phase_names,
    plain_reasons,
    route_sentence,
    seconds_text,
)
from flowrl.wording import counted

if TYPE_CHECKING:
    from rich.console import Group


Rows = tuple[tuple[str, ...], ...]

_PHASES_ACROSS = 3

_PART_ORDER = (
    "parameters",
    "master weights",
    "optimizer",
    "gradients",
    "kv cache",
    "engine weights",
    "activations",
    "logits",
    "margin",
    "runtime",
)


def plan_text(plan: PlacementPlan, *, explain: bool = False) -> str:
    """The plan as plain lines; no escape codes, whatever the terminal.

    Args:
        explain: Tells every choice that was not made, also sizes that are merely impossible.
    """
    blocks = ["\n".join([*not_here(plan), f"plan of {plan.graph}"])]
    blocks += [_plain_list(title, lines) for title, lines in many_lists(plan)[:2] if lines]
    blocks += [_plain_block(title, rows) for title, rows in _tables(plan)]
    blocks += [_plain_list(title, lines) for title, lines in _lists(plan, explain)]
    return "\n\n".join(blocks) + "\n"


def plan_renderable(plan: PlacementPlan, *, explain: bool = False) -> Group:
    """The plan as a rich renderable; `explain` as for `plan_text`."""
    # Rich is for terminals; importing it takes longer than writing plain lines.
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    parts: list[Text | Table | Padding] = [Text(line, style="yellow") for line in not_here(plan)]
    parts.append(Text(f"plan of {plan.graph}", style="bold"))
    for title, lines in many_lists(plan)[:2]:
        parts += [Text(""), Text(title, style="bold")]
        parts += [Padding(Text(line), (0, 0, 0, 2)) for line in lines]
    for title, rows in _tables(plan):
        table = Table(title=Text(title, style="bold"), title_justify="left", box=None)
        for i, heading in enumerate(rows[0]):
            table.add_column(heading, justify="right" if _is_number(rows, i) else "left")
        for row in rows[1:]:
            table.add_row(*(Text(cell) for cell in row))
        parts += [Text(""), table]
    for title, lines in _lists(plan, explain):
        parts += [Text(""), Text(title, style="bold")]
        parts += [Padding(Text(line), (0, 0, 0, 2)) for line in lines]
    return Group(*parts)


def not_here(plan: PlacementPlan) -> list[str]:
    """Returns the notes that say what no backend here can run; they are shown first."""
    return [note for note in plan.notes if note.startswith(NOT_HERE)]


def step_sentences(plan: PlacementPlan) -> tuple[str, ...]:
    """What happens in a step, one sentence for each operation, switch and way of weights that no
    operation is for, in order."""
    sentences = []
    for operation in plan.operations:
        for switch in plan.residency:
            if switch.before == operation.node:
                verb = "offloads" if switch.action == "release" else "reloads"
                sentences.append(f"{switch.role} {verb} its {switch.what} on {switch.device}")
        sentences.append(_sentence(operation, plan))
        sentences += [
            f"{route.source} publishes its new weights to {route.node}"
            for route in plan.weight_routes
            if operation.op == "update" and route.after == operation.node and route.node is not None
        ]
    return tuple(sentences)


def _tables(plan: PlacementPlan) -> list[tuple[str, Rows]]:
    tables = [("roles", _role_rows(plan)), *many_tables(plan)]
    on: dict[str, list[PredictedMemory]] = {}
    for entry in plan.prediction.memory:
        on.setdefault(entry.device, []).append(entry)
    for device in plan.pool.devices:
        entries = on.get(device.address, [])
        phases = phase_names(entries, plan)
        # A few phases at a time, so that a table fits a terminal.
        for first in range(0, len(entries), _PHASES_ACROSS):
            some = entries[first : first + _PHASES_ACROSS]
            title = _memory_title(device, plan)
            if first:
                title = f"memory of {device.address}, phases from {first + 1} on"
            names = phases[first : first + _PHASES_ACROSS]
            tables.append((title, _memory_rows(some, names, device)))
    return tables


def _lists(plan: PlacementPlan, explain: bool) -> list[tuple[str, list[str]]]:
    numbered = [f"{i}. {sentence}" for i, sentence in enumerate(step_sentences(plan), start=1)]
    lists = [
        ("a step", numbered),
        ("weights", [route_line(route, plan) for route in plan.weight_routes]),
        *many_lists(plan)[2:],
        (
            "why",
            [line for reason in plain_reasons(plan, explain=explain) for line in _reason(reason)],
        ),
        ("alternatives", [_alternative(a) for a in plan.alternatives]),
        ("warnings", list(plan.pool.warnings)),
    ]
    return [(title, lines) for title, lines in lists if lines]


def _alternative(alternative: Alternative) -> str:
    time = ""
    if alternative.step_s is not None:
        time = f"{alternative.kind}, {seconds_text(alternative.step_s)}: "
    return f"{time}{alternative.summary}: {alternative.why_not}"


def _role_rows(plan: PlacementPlan) -> Rows:
    libraries = {one.role: _libraries(one, plan) for one in plan.placements}
    others = any(libraries[one.role] != one.backend for one in plan.placements)
    heading = "engine, trainer" if others else "backend"
    rows = [("role", heading, "devices", "process", "type", "details")]
    for placement in plan.placements:
        processes, models = placement.process, _models(placement, plan)
        # Of models over many devices their layouts say how many there are.
        if placement.replicas > 1 and not models:
            processes += f" x {placement.replicas}"
        processes += _engine_processes(placement, plan)
        rows.append(
            (
                placement.role,
                libraries[placement.role],
                device_names(placement.devices),
                processes,
                placement.dtype if placement.dtype != "none" else "-",
                "; ".join(filter(None, (*models, _details(placement, apart=bool(models))))) or "-",
            )
        )
    return tuple(rows)


def _libraries(placement: Placement, plan: PlacementPlan) -> str:
    """What the plan takes for the operations of a role, which may be more than its backend."""
    taken = [one.library for one in plan.operations if one.role == placement.role and one.library]
    return ", ".join(dict.fromkeys(taken)) or placement.backend


_PLAYS = {"generate": "engines", "update": "trainer"}
"""What does an operation of a model; that of others has their name."""


def _models(placement: Placement, plan: PlacementPlan) -> list[str]:
    """The engines and the trainer of a role over many devices, each with its layout."""
    if plan.schedule is None:
        return []
    found: dict[str, list[str]] = {}
    for one in plan.operations:
        if one.role == placement.role and one.seconds is not None and one.environment is None:
            told = found.setdefault(_PLAYS.get(one.op, one.op), [])
            slots = f", {one.slots:,} slots each" if one.op == "generate" else ""
            told.append(f"{one.layout.describe()}{slots}")
    return [f"{who}: {', and '.join(dict.fromkeys(told))}" for who, told in found.items()]


def _engine_processes(placement: Placement, plan: PlacementPlan) -> str:
    """Those that draw for a role beside its own process, on one machine."""
    number = 0 if plan.schedule is not None else engines_of(plan, placement.role).processes
    return f", {counted(number, 'engine process', 'engine processes')}" if number else ""


def _details(placement: Placement, *, apart: bool) -> str:
    """What there is to say of a role.

    Args:
        apart: Its engines and its trainer are told apart from it.
    """
    words = []
    if not apart and placement.layout.num_devices > 1:
        words.append(placement.layout.describe())
    if placement.head == "value":
        words.append("value head")
    if placement.trainable and not apart:
        words.append("trained")
    if placement.num_slots and not apart:
        words.append(_many(placement.num_slots, "slot"))
    if placement.copy_of:
        how = "begins as a copy" if placement.trainable else "frozen copy"
        words.append(f"{how} of {placement.copy_of}")
    if placement.shares_weights_with:
        words.append(f"reads the weights of {placement.shares_weights_with}")
    return ", ".join(words)


def _memory_title(device: DeviceSummary, plan: PlacementPlan) -> str:
    peak = plan.prediction.peak(device.address)
    total = peak.memory.total if peak else 0
    share = 100 * total / device.budget_bytes if device.budget_bytes else 0
    free, rest = " free", ""
    if _is_filled_partly(device):
        whole = 100 * device.budget_bytes / device.memory_bytes
        free, rest = "", f" (usable: {whole:.0f} % of {format_bytes(device.memory_bytes)})"
    return (
        f"memory of {device.address}{memory_note(peak.num_devices if peak else 1)} "
        f"({device.name}{_stages(device.address, plan)}): peak {format_bytes(total)} of "
        f"{format_bytes(device.budget_bytes)}{free}, {share:.1f} %{rest}"
    )


def _stages(address: str, plan: PlacementPlan) -> str:
    """Whose stages are not alike on the devices of a table, of which it has the fullest one."""
    staged = [one for one in plan.operations if address in one.devices and one.layout.pp > 1]
    if not staged:
        return ""
    *most, last = [one.node for one in staged]
    names = f"{', '.join(most)} and {last}" if most else last
    number = f"of {staged[0].layout.pp} stages" if not most else "stage of each"
    return f"; of {names} the fullest {number}"


def _is_filled_partly(device: DeviceSummary) -> bool:
    return device.type != "cpu" and device.budget_bytes < device.memory_bytes


def _memory_rows(
    entries: Sequence[PredictedMemory], names: Sequence[str], device: DeviceSummary
) -> Rows:
    """Each role's parts down, phases across."""
    found = dict.fromkeys(
        (part.role, part.name) for entry in entries for part in entry.memory.parts
    )
    roles = list(dict.fromkeys(role for role, _ in found if role))
    known = {name: i for i, name in enumerate(_PART_ORDER)}
    # What belongs to no role, the framework's own memory, comes last.
    ordered = sorted(
        found,
        key=lambda key: (
            roles.index(key[0]) if key[0] else len(roles),
            known.get(key[1], len(known)),
        ),
    )
    rows: list[tuple[str, ...]] = [("", *names)]
    for role, name in ordered:
        cells = (_sum(entry.memory.parts, role, name) for entry in entries)
        rows.append((f"{role} {name}" if role else name, *cells))
    totals = [entry.memory.total for entry in entries]
    rows.append(("total", *(format_bytes(total) for total in totals)))
    if device.budget_bytes:
        shares = (f"{100 * total / device.budget_bytes:.1f} %" for total in totals)
        of = "of usable memory" if _is_filled_partly(device) else "of free memory"
        rows.append((of, *shares))
    return tuple(rows)


def _sum(parts: Iterable[MemoryPart], role: str, name: str) -> str:
    nbytes = sum(part.nbytes for part in parts if (part.role, part.name) == (role, name))
    return format_bytes(nbytes) if nbytes else "-"


def _sentence(operation: Operation, plan: PlacementPlan) -> str:
    prompts, samples = plan.sizes.prompts_per_step, operation.num_samples
    where = f" on {device_names(operation.devices)}" if operation.devices else ""
    who = operation.role or operation.node
    match operation.op:
        case "source" if samples > prompts:
            return f"{who} are read: {prompts:,}, {samples:,} samples"
        case "source":
            return f"{who} are read: {prompts:,}"
        case "interact":
            return (
                f"{who} runs {prompts:,} prompts x {samples // prompts:,} episodes "
                f"of at most {operation.max_turns} turns{where}"
            )
        case "generate" if operation.region is not None:
            return (
                f"{who} generates its turns in {operation.chunk:,} slots, "
                f"at most {operation.max_tokens:,} tokens an episode{where}"
            )
        case "generate":
            return (
                f"{who} generates {prompts:,} prompts x {_many(samples // prompts, 'sample')} "
                f"of at most {operation.max_tokens:,} tokens in {operation.chunk:,} slots"
                f"{_processes(operation)}{where}"
            )
        case "score" if operation.start is StartUnit.BATCH:
            return f"{who} scores {samples:,} samples{where}"
        case "score":
            processes = "process" if operation.replicas == 1 else "processes"
            return (
                f"{who} scores each sample as it arrives, "
                f"in {operation.replicas} {processes}{where}"
            )
        case "logprobs" | "values":
            return f"{who} computes {operation.op} of {samples:,} samples{where}"
        case "filter" if operation.start is StartUnit.GROUP:
            return f"{operation.node} checks each group as soon as it is complete"
        case "filter" | "select":
            return f"{operation.node} checks the groups of the batch"
        case "where":
            return (
                f"{operation.node} takes the rows that meet its condition; how many is known with "
                "the data, and the plan counts all of them"
            )
        case "pair" | "concat":
            verb = "pairs" if operation.op == "pair" else "joins"
            return f"{operation.node} {verb} sets of samples: at most {samples:,}"
        case "replay":
            return (
                f"{operation.node} holds the groups of the batch in the driver's memory, which the "
                f"plan does not count, and returns at most {_many(samples, 'earlier sample')}"
            )
        case "map" if operation.start is StartUnit.SAMPLE:
            return f"{operation.node} is computed for each sample as it is scored"
        case "advantage" | "map":
            return f"{operation.node} is computed over the batch"
        case "prompts_of":
            return f"{operation.node} makes prompts of {_many(samples, 'sample')}"
        case "parent":
            return f"{operation.node} gives each sample the value of its parent"
        case "mean_of_children":
            return f"{operation.node} gives each sample the mean of its children"
        case "update":
            return _update(operation, plan) + where
        case "sync":
            return _published(operation, plan)
        case "log":
            return f"{operation.node} is written down"
        case other:
            return f"{operation.node} ({other}){where}"


def _processes(operation: Operation) -> str:
    """Of engines that are not in their role's process."""
    if not operation.process:
        return ""
    number = operation.replicas
    words = f" each, in {number} processes" if number > 1 else ", in a process of its own"
    if operation.cores:
        numbers = ", ".join(map(str, operation.cores))
        words += f" bound to core{'s' * (number > 1)} {numbers}"
    return words


def _many(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _update(operation: Operation, plan: PlacementPlan) -> str:
    number = plan.sizes.mini_batches
    updates = "1 optimizer update" if number == 1 else f"{number} optimizer updates"
    at_once = f"at most {_many(operation.micro_batch, 'row')} at once"
    if operation.micro_tokens:
        at_once = f"in micro-batches of {operation.micro_tokens:,} tokens"
    who = f"{operation.role} makes {updates}{_every(operation.every)}"
    return f"{who} from {operation.num_samples:,} samples, {at_once}"


def _published(operation: Operation, plan: PlacementPlan) -> str:
    route = next((r for r in plan.weight_routes if r.after == operation.node), None)
    if route is None or route.source == route.destination:
        return f"{operation.role} publishes its new weights"
    return f"{operation.role} takes over the weights of {route.source}{_every(route.every)}"


def _every(steps: int) -> str:
    return "" if steps == 1 else f" every {steps} steps"


def route_line(route: WeightRoute, plan: PlacementPlan) -> str:
    """How a role's weights get to who uses them."""
    classes = ", ".join(route.parameter_classes)
    if route.transport is Transport.IN_PLACE:
        how = "the engine reads the trainer's parameters in place; nothing is copied"
    elif route.node is not None:
        how = f"{route_sentence(route, plan)} ({classes})"
        return f"{route.source} to {route.node} after {route.after}{_every(route.every)}: {how}"
    else:
        how = f"through a {route.transport} ({classes})"
    same = route.source == route.destination
    who = route.source if same else f"{route.source} -> {route.destination}"
    return f"{who} after {route.after}{_every(route.every)}: {how}"


def _reason(reason: Reason) -> list[str]:
    lines = [f"{reason.subject}: {reason.choice}, because: {reason.why}"]
    for item in reason.rejected:
        numbers = f" ({item.found} of {item.limit})" if item.found and item.limit else ""
        nearest = f"; nearest {item.nearest}" if item.nearest else ""
        lines.append(f"  not {item.choice}: {item.constraint}{numbers}{nearest}")
    return lines


def _is_number(rows: Rows, column: int) -> bool:
    cells = [row[column] for row in rows[1:]]
    return column > 0 and all(cell == "-" or cell[:1].isdigit() for cell in cells)


def _plain_block(title: str, rows: Rows) -> str:
    columns = range(len(rows[0]))
    widths = [max(len(row[i]) for row in rows) for i in columns]
    right = [_is_number(rows, i) for i in columns]
    lines = [title]
    for row in rows:
        cells = [
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, right, strict=True)
        ]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def _plain_list(title: str, lines: Sequence[str]) -> str:
    return "\n".join([title, *(f"  {line}" for line in lines)])
