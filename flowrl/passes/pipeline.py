"""The passes in order, and the runner that lowers a traced graph.

Each pass is a pure function `(Graph, Context) -> Graph` ; running it twice changes
nothing more. The runner verifies the graph before the first and after each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TypeAlias

from flowrl.errors import ConfigError
from flowrl.graph import Graph, Level, format_graph, problems, verify
from flowrl.passes.annotate_cost import annotate_cost
from flowrl.passes.context import Context
from flowrl.passes.insert_weight_sync import insert_weight_sync
from flowrl.passes.logprobs import bind_behaviour_logprobs, insert_old_logprobs
from flowrl.passes.settle_truncation import settle_truncation
from flowrl.passes.simplify import drop_dead_nodes, drop_zero_kl, fill_defaults, merge_logprobs
from flowrl.wording import listing, one_of_them

Pass: TypeAlias = Callable[[Graph, Context], Graph]

PASSES: tuple[Pass, ...] = (
    drop_zero_kl,
    fill_defaults,
    merge_logprobs,
    insert_old_logprobs,
    bind_behaviour_logprobs,
    settle_truncation,
    drop_dead_nodes,
    insert_weight_sync,
    annotate_cost,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRecord:
    """The effect of one pass; `before` and `after` are the same graph where it changed nothing."""

    name: str
    before: Graph
    after: Graph
    seconds: float


def pass_names() -> tuple[str, ...]:
    """Returns the names of all passes, in order."""
    return tuple(p.__name__ for p in PASSES)


def run_passes(
    graph: Graph,
    context: Context,
    *,
    print_after: Collection[str] = (),
    disable: Collection[str] = (),
    observer: Callable[[PassRecord], None] | None = None,
    write: Callable[[str], object] = print,
) -> Graph:
    """Lowers a traced graph.

    Args:
        print_after: Passes after which the graph is written, in its canonical text form.
        disable: Passes that are left out. Where the result then misses something that a lowered
            graph has, it stays `traced`.
        observer: Called after each pass with its name, the graphs before and after, and the time.
        write: Takes what `print_after` asks for.

    Raises:
        ConfigError: a name that is no pass, or a graph wanted after one that is left out.
        GraphError: the graph, or what a pass made of it, breaks its specification.
    """
    asked = {"--disable-pass": disable, "--print-after": print_after}
    for option, name in ((option, name) for option, names in asked.items() for name in names):
        if name not in pass_names():
            raise ConfigError(
                f"no pass is called '{name}'",
                where=option,
                expected=f"one of {listing(pass_names())}",
                hint=one_of_them(name, pass_names()),
            )
    for name in print_after:
        if name in disable:
            raise ConfigError(
                f"there is no graph after pass '{name}', which is left out",
                where=f"--print-after {name}",
                found=f"--disable-pass {name}",
                hint=f"do not disable {name}, or print after another pass",
            )
    verify(graph)
    for run in PASSES:
        if run.__name__ in disable:
            continue
        before, start = graph, time.perf_counter()
        graph = verify(run(before, context))
        if observer is not None:
            seconds = time.perf_counter() - start
            observer(PassRecord(name=run.__name__, before=before, after=graph, seconds=seconds))
        if run.__name__ in print_after:
            write(f"# after {run.__name__}\n\n{format_graph(graph)}")
    lowered = replace(graph, level=Level.LOWERED)
    if disable and any(True for _ in problems(lowered)):
        return graph
    return verify(lowered)
