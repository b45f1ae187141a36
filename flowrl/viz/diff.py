"""The differences of two graphs, node by node, for people to read.

    - reference.logprobs = logprobs by reference

    actor.update
      - attr loss = loss:policy_clip(clip_low=0.2, clip_high=0.2, aggregation="token-mean")
      + attr loss = loss:policy_clip(clip_low=0.2, clip_high=0.28, aggregation="token-mean")

Nodes are matched by id, which is made of roles, operations and order and not of the names of
variables: two programs of the same meaning have no difference. Lines are those of the canonical
text. A node of both graphs is shown by its head and the lines that differ, any other node as a
whole. Costs are omitted if only one of the graphs has them.
"""

from __future__ import annotations

import difflib

from flowrl.graph import Graph, Node, format_graph


def render_diff(before: Graph, after: Graph) -> str:
    """Returns the differences below the names and levels of the graphs, or `no difference`."""
    if _has_costs(before) != _has_costs(after):
        before, after = _without_costs(before), _without_costs(after)
    old, new = _blocks(before), _blocks(after)
    blocks = []
    for node_id in _in_order(before, after):
        block = _changes(node_id, old.get(node_id, []), new.get(node_id, []))
        if block:
            blocks.append("\n".join(block))
    moved = _moved(before, after)
    if moved:
        blocks.append("order of nodes\n  - " + ", ".join(moved[0]) + "\n  + " + ", ".join(moved[1]))
    head = f"{_title(before)} -> {_title(after)}: "
    if not blocks:
        return head + "no difference\n"
    return head + _summary(old, new) + "\n\n" + "\n\n".join(blocks) + "\n"


def _has_costs(graph: Graph) -> bool:
    return any(node.attr("cost") is not None for node in graph.nodes)


def _without_costs(graph: Graph) -> Graph:
    return graph.with_nodes(node.without_attrs("cost") for node in graph.nodes)


def _title(graph: Graph) -> str:
    return f"{graph.name} ({graph.level})"


def _blocks(graph: Graph) -> dict[str, list[str]]:
    """Returns the lines of each node in the canonical text."""
    texts = format_graph(graph).rstrip("\n").split("\n\n")[1:]
    return {node.id: text.split("\n") for node, text in zip(graph.nodes, texts, strict=True)}


def _summary(old: dict[str, list[str]], new: dict[str, list[str]]) -> str:
    removed, added = len(old.keys() - new.keys()), len(new.keys() - old.keys())
    changed = sum(old[node_id] != new[node_id] for node_id in old.keys() & new.keys())
    counts = {"added": added, "removed": removed, "changed": changed}
    shown = [f"{number} {word}" for word, number in counts.items() if number]
    return ", ".join(shown) or "the same nodes in another order"


def _in_order(before: Graph, after: Graph) -> list[str]:
    """Returns the ids of `after`, and each removed id behind the one that it followed."""
    ids: list[str] = [node.id for node in after.nodes]
    previous: Node | None = None
    for node in before.nodes:
        if node.id not in ids:
            ids.insert(0 if previous is None else ids.index(previous.id) + 1, node.id)
        previous = node
    return ids


def _changes(node_id: str, old: list[str], new: list[str]) -> list[str]:
    if old == new:
        return []
    if not old:
        return [f"+ {line}" for line in new]
    if not new:
        return [f"- {line}" for line in old]
    lines = [node_id]
    if old[0] != new[0]:
        lines += [f"  - {old[0]}", f"  + {new[0]}"]
    hunks = list(difflib.unified_diff(old[1:], new[1:], n=0, lineterm=""))[2:]
    lines += [f"  {line[0]} {line[1:].strip()}" for line in hunks if not line.startswith("@@")]
    return lines


def _moved(before: Graph, after: Graph) -> tuple[list[str], list[str]] | None:
    """Returns the common nodes in either order; None if the two orders are the same."""
    ids = {node.id for node in before.nodes} & {node.id for node in after.nodes}
    old: list[str] = [node.id for node in before.nodes if node.id in ids]
    new: list[str] = [node.id for node in after.nodes if node.id in ids]
    return None if old == new else (old, new)
