"""The texts and colours that all drawings share."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flowrl.cost import format_bytes
from flowrl.graph import Edge, Graph, Level, Node, Op
from flowrl.graph.signatures import SIGNATURES
from flowrl.specs import KL, Scalar, Spec
from flowrl.specs.advantage import OwnAdvantage
from flowrl.specs.attributes import NodeCost
from flowrl.specs.loss import OwnLoss
from flowrl.specs.maps import OwnMap, WeightedSum
from flowrl.wording import counted


class RoleColour(NamedTuple):
    """The colour of a role: its name in a terminal, and its fill and border in pictures."""

    terminal: str
    fill: str
    border: str


# Hues of Okabe and Ito, lightened for fills: people with colour-blindness can distinguish them.
ROLE_COLOURS: tuple[RoleColour, ...] = (
    RoleColour("cyan", "#d6ebf7", "#0072b2"),
    RoleColour("yellow", "#fbeccb", "#b87d00"),
    RoleColour("green", "#d3efe6", "#009e73"),
    RoleColour("magenta", "#f5e1ec", "#a6507e"),
    RoleColour("red", "#f9dfcc", "#d55e00"),
    RoleColour("blue", "#dfe3f5", "#44549c"),
)

# Fields that are shown even if they have their default.
_ALWAYS = {
    "sampling": ("temperature", "max_tokens"),
    "policy_clip": ("clip_low", "clip_high"),
    "group_relative": ("std",),
}
_PER = {
    "prompts": "per prompt",
    "groups": "per group",
    "samples": "per sample",
    "tokens": "per token",
    "roles": "",
}


def role_colours(graph: Graph) -> dict[str, RoleColour]:
    """Returns a colour for each role, in order of first use."""
    return {role: ROLE_COLOURS[i % len(ROLE_COLOURS)] for i, role in enumerate(graph.roles)}


def _short_scalar(value: Scalar) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str) and not value.isprintable():
        return json.dumps(value)[1:-1]  # on one line
    return str(value)


def short_spec(spec: Spec) -> str:
    """Returns a specification with its main fields and those that differ from their default."""
    match spec:
        case KL():
            shown = [f"{spec.coefficient:g}", *_changed(spec, without=("estimator", "coefficient"))]
            return f"{spec.estimator}({', '.join(shown)})"
        case OwnMap() | OwnAdvantage() | OwnLoss():
            return _own(spec)
        case WeightedSum():
            return f"weighted sum, weights {', '.join(f'{each:g}' for each in spec.factors)}"
        case _:
            changed = _changed(spec)
            return f"{spec.kind}({', '.join(changed)})" if changed else spec.kind


def _changed(spec: Spec, *, without: tuple[str, ...] = ()) -> list[str]:
    """Returns `name=value` of the main fields and those that differ from their default."""
    return [
        f"{name}={_short_scalar(value)}"
        for name, value, field in spec.items()
        if name not in without and (value != field.default or name in _ALWAYS.get(spec.kind, ()))
    ]


def _own(spec: OwnMap | OwnAdvantage | OwnLoss) -> str:
    """Returns `own.py:brief(scale=0.5)`, and the meaning of its declaration.

    The fields that it reads are on edges.
    """
    options = ", ".join(f"{name}={_short_scalar(value)}" for name, value in spec.options)
    parts = [f"{spec.function}({options})" if options else spec.function]
    match spec:
        case OwnMap():
            parts += [
                f"gives {name} {_PER[unit]}" for name, _, unit in spec.gives if name != "score"
            ]
            parts += ["each sample by itself"] if spec.per_sample else []
        case OwnAdvantage():
            parts += ["one a token"] if spec.per_token else []
            parts += ["with a critic's returns"] if spec.gives_returns else []
        case OwnLoss():
            parts += [spec.aggregation] if spec.aggregation != "token-mean" else []
            parts += ["corrects for the behaviour policy"] if spec.corrects_behaviour else []
    return ", ".join(parts)


def regions(graph: Graph) -> dict[str, tuple[Node, ...]]:
    """Returns the nodes that exchange data in a cycle, by region."""
    members: dict[str, tuple[Node, ...]] = {}
    for node in graph.nodes:
        if node.region is not None:
            members[node.region] = (*members.get(node.region, ()), node)
    return members


def node_groups(nodes: Sequence[Node]) -> Iterator[tuple[str | None, tuple[Node, ...]]]:
    """Yields each region with its nodes in the place of the first one, and every other node."""
    done = set()
    for node in nodes:
        if node.region is None:
            yield None, (node,)
        elif node.region not in done:
            done.add(node.region)
            yield node.region, tuple(each for each in nodes if each.region == node.region)


def region_title(region: str, nodes: tuple[Node, ...]) -> str:
    """Returns `interact: game and actor, turn by turn`."""
    return f"{region}: {' and '.join(str(node.role) for node in nodes)}, turn by turn"


def node_notes(graph: Graph, node: Node) -> tuple[str, ...]:
    """Returns the attributes of a node, in a few words each."""
    if node.op is Op.SOURCE:
        data = node.attr("data")
        return (f"{data} of their rows" if node.inputs else f"a step's {data}", *_place_notes(node))
    if node.op is Op.SYNC:
        return (*_sync_notes(graph, node), *_place_notes(node))
    notes: list[str] = []
    open_ = []
    for name, value in node.attrs:
        rule = SIGNATURES[node.op].attr(name)
        if value is None:
            # A value that lowering fills; other nulls mean "none" and are not shown.
            if graph.level is Level.TRACED and rule is not None and rule.filled is not None:
                open_.append(name)
        elif isinstance(value, KL) and value.coefficient == 0:
            continue  # no penalty
        elif isinstance(value, NodeCost) or (rule is not None and rule.since is Level.PLACED):
            continue  # the tree shows costs on a line of their own; places come last
        elif isinstance(value, Spec):
            named = name in ("loss", "kl")
            notes.append(f"{name}={short_spec(value)}" if named else short_spec(value))
        elif node.op is not Op.LOG:  # its id has the name
            notes.append(_plain(graph, node, name, value))
    if "rewards" in node.inputs:
        open_.insert(0, "advantage")
    if open_:
        notes.append(f"{' and '.join(open_)} from the config")
    return (*notes, *_place_notes(node))


def _plain(graph: Graph, node: Node, name: str, value: Scalar) -> str:
    """Returns an attribute in words, if its name alone would say little."""
    match name, value:
        case "behaviour_logprobs", _:
            return f"behaviour logprobs are {value}"
        case "old_logprobs", "own":
            return "old logprobs are of its own forward pass, the first of the step"
        case "old_logprobs", "forward":
            edge = graph.feeding(node.id, "old")
            return f"old logprobs are of {edge.src}" if edge is not None else "old logprobs"
        case "old_logprobs", _:
            return f"old logprobs are {value}, which the config trusts"
        case "by", _:
            return f"by a {value}"
        case "sum", _:
            return f"a term of {value}"
        case "every", _:
            return f"every {value} steps"
        case "per", _:
            return f"each {value}"
        case "separator", str():
            return f"steps end with {json.dumps(value)}"
        case _:
            return f"{name}={_short_scalar(value)}"


def _sync_notes(graph: Graph, node: Node) -> tuple[str, ...]:
    edge = graph.feeding(node.id, "weights")
    source = None if edge is None else graph.node(edge.src).role
    if source is not None and source != node.role:
        decay = node.attr("decay")
        notes = [f"takes over the weights of {source}"]
        if isinstance(decay, float):
            notes = [f"averages weights: {decay:g} own + {1 - decay:g} {source}"]
        if node.attr("reset_optimizer"):
            notes.append(f"resets the optimizer of {source}")
    else:
        # A plan may move weights that could be read in place: to processes, to other layouts.
        placed = node.attr("transport")
        in_place = node.attr("in_place") if placed is None else placed == "in_place"
        notes = ["in place" if in_place else "weights are moved"]
    every = node.attr("every")
    if isinstance(every, int) and every > 1:
        notes.append(f"every {every} steps")
    return tuple(notes)


def _place_notes(node: Node) -> tuple[str, ...]:
    """Returns the decisions of a plan in one note: `on cpu:0 in main, starts on the batch`."""
    start, devices = node.attr("start"), node.attr("devices")
    if start is None:
        return ()
    notes = []
    if devices is not None:
        notes.append(f"on {devices} in {node.attr('process')}")
    replicas, chunk, rows = (node.attr(name) for name in ("replicas", "chunk", "micro_batch"))
    if isinstance(replicas, int) and replicas > 1:
        notes[-1] += f" x {replicas}"
    samples, each = node.attr("samples"), node.attr("samples_per_replica")
    if isinstance(samples, int) and samples:
        many = "" if replicas == 1 else f", {each:,} a replica"
        notes.append(f"{samples:,} samples a step{many}")
    on = {"step": "with the step", "batch": "on the batch"}.get(str(start), f"on each {start}")
    notes.append(f"starts {on}")
    if isinstance(chunk, int) and chunk > 1:
        notes.append(f"{chunk:,} at once")
    packed = node.attr("micro_tokens")
    if isinstance(packed, int):
        notes.append(f"in micro-batches of {packed:,} tokens")
    elif isinstance(rows, int):
        notes.append(f"{counted(rows, 'row')} at once")
    if node.attr("transport") not in (None, "in_place"):
        notes.append(f"by {node.attr('transport')}")
    return (", ".join(notes),)


def cost_note(node: Node) -> str | None:
    """Returns a model's cost: `at most 1.2 TFLOP, output 3.0 MiB, activations 41 MiB`."""
    cost = node.attr("cost")
    if not isinstance(cost, NodeCost) or not cost.flops:
        return None
    sizes = {
        "output": cost.output_bytes,
        "activations": cost.activation_bytes,
        "KV cache": cost.kv_bytes,
    }
    notes = [f"{name} {format_bytes(nbytes)}" for name, nbytes in sizes.items() if nbytes]
    return ", ".join([f"at most {_operations(cost.flops)}", *notes])


def _operations(flops: int) -> str:
    for unit, size in (("EFLOP", 1e18), ("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9)):
        if flops >= size:
            value = flops / size
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"
    return f"{flops / 1e6:.1f} MFLOP"


def edge_fields(graph: Graph, edge: Edge) -> tuple[tuple[str, ...], str]:
    """Returns the fields of an edge, and the unit that they have in common (`per token`)."""
    source = graph.node(edge.src)
    units = [str(f.unit) for name in edge.fields if (f := source.output(name)) is not None]
    same = len(set(units)) == 1
    return edge.fields, _PER[units[0]] if same else ""


def read_text(graph: Graph, edge: Edge) -> str:
    """Returns `← rollout: tokens per token, from actor.generate`, of the node at its end."""
    names, per = edge_fields(graph, edge)
    inner = graph.is_inner(edge)
    text = f"{'⇄' if inner else '←'} {edge.argument}: {', '.join(names)}"
    if per:
        text += f" {per}"
    text += f", {'turn by turn with' if inner else 'from'} {edge.src}"
    return text + " of the step before" if edge.carried else text
