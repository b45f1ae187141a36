"""Sizes of a task's layout that are impossible, those of one constraint together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flowrl.plan.check.whole import number_ranges
from flowrl.plan.schema import Rejection
from flowrl.plan.ways.candidates import Candidates
from flowrl.plan.ways.layouts import (
    FoundLayouts,
    LayoutRules,
    check_size,
    limit_words,
    possible_sizes,
    with_possible,
)
from flowrl.plan.ways.task_rules import layout_rules
from flowrl.plan.ways.tasks import TaskWork

_OF_SEVERAL = {"does": "do", "is": "are", "cuts": "cut", "has": "have"}
"""The first words of constraints, of several sizes."""


def impossible_sizes(task: TaskWork, made: Candidates, found: FoundLayouts) -> Iterator[Rejection]:
    """All that a constraint rules out: of `tp`, `pp` and `ep` every number that there might be, of
    the others those that are looked at.

    Args:
        found: The layouts of the task on its devices.
    """
    rules = layout_rules(task, made.request, made.group.node_size)
    refused = {one.choice: one for one in found.refused}
    for name, most in _largest(rules).items():
        if name not in rules.kinds or (name == "ep" and task.shape.experts is None):
            continue
        possible = possible_sizes(task.shape, rules, name)
        for size in range(2, most + 1):
            problems = check_size(task.shape, rules, name, size)
            if problems:
                told = with_possible(problems[0], size, possible)
                refused.setdefault(told.choice, told)
    groups: dict[tuple[str, str], list[Rejection]] = {}
    for one in refused.values():
        groups.setdefault((_name(one), one.constraint), []).append(one)
    order = {name: at for at, name in enumerate(("tp", "pp", "cp", "ep", "dp"))}
    for (name, _), alike in sorted(
        groups.items(), key=lambda group: (order[group[0][0]], min(map(_size, group[1])))
    ):
        sizes: Sequence[int] = sorted({layout.dp for layout in found.possible})
        if name != "dp":
            sizes = possible_sizes(task.shape, rules, name)
        yield _together(name, alike, sizes)


def _largest(rules: LayoutRules) -> dict[str, int]:
    return {"tp": 2 * rules.node_size, "pp": rules.max_pp, "ep": 2 * rules.node_size}


def _name(refused: Rejection) -> str:
    return refused.choice.partition("=")[0]


def _size(refused: Rejection) -> int:
    return int(refused.choice.partition("=")[2])


def _together(name: str, alike: Sequence[Rejection], possible: Sequence[int]) -> Rejection:
    """Sizes that one constraint rules out."""
    if len(alike) == 1:
        (one,) = alike
        numbers = ", ".join(filter(None, (one.found, limit_words(one))))
        words = f"{one.constraint} ({numbers})" if numbers else one.constraint
        return Rejection(choice=one.choice, constraint=words, nearest=one.nearest)
    verb, _, rest = alike[0].constraint.partition(" ")
    words = f"{_OF_SEVERAL.get(verb, verb)} {rest}".replace("is no multiple", "are no multiples")
    limit = limit_words(alike[0])
    return Rejection(
        choice=f"{name}={number_ranges(map(_size, alike)).replace(',', ', ')}",
        constraint=f"{words}{f' ({limit})' if limit else ''}; "
        f"possible {', '.join(map(str, possible))}",
    )
