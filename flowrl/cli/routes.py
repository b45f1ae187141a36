"""`flowrl plan CONFIG --routes GLOB`: the transfers of parameters' slices between devices.

Transfers are printed as they are found: a thousand devices have millions of them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowrl.cost.activations import DTYPE_BYTES
from flowrl.cost.memory import format_bytes
from flowrl.errors import ConfigError
from flowrl.plan.routes import Transfer, expand_plan_route, route_parameters
from flowrl.wording import listing

if TYPE_CHECKING:
    from flowrl.cli.plan import PlanOptions
    from flowrl.compiler import CompiledStage
    from flowrl.plan.parameters import Box, Parameter
    from flowrl.plan.schema import PlacementPlan, WeightRoute

HEAD = "  parameter (its size) [slice of it]: from [slice there] -> to [slice there], bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """A route with its parameters and transfers.

    Attributes:
        parameters: The parameters that match, by name.
        width: Bytes of an element, in the type that the destination holds.
        transfers: `(from address, to address, transfer)`; empty where weights are read in place.
    """

    route: WeightRoute
    parameters: Mapping[str, Parameter]
    width: int
    transfers: Iterator[tuple[str, str, Transfer]]


def print_routes(stage: CompiledStage, names: str, options: PlanOptions) -> None:
    """Prints every transfer of a stage's plan.

    Args:
        names: A pattern that parameters must match.

    Raises:
        ConfigError: Weights are transferred as a whole, or the pattern matches no parameter.
        PlanError: The tensors of the model are not known.
    """
    if stage.plan.schedule is None:
        raise _whole_weights(stage.plan)
    written = [_written(stage, route, names) for route in stage.plan.weight_routes]
    if written and not any(route.parameters for route in written):
        raise _no_match(stage, names)
    if options.json:
        _print_json(written)
    else:
        _print_text(written, stage.plan)


def _written(stage: CompiledStage, route: WeightRoute, names: str) -> _Written:
    # The planner's model: the configuration's, or that of the copied role.
    shape = stage.context.costs[route.source].shape
    plan = stage.plan
    user = next(placed for placed in plan.placements if placed.role == route.destination)
    parameters = route_parameters(shape, route.parameter_classes, names)
    return _Written(
        route=route,
        parameters={parameter.name: parameter for parameter in parameters},
        width=DTYPE_BYTES[user.dtype],
        transfers=iter(())
        if route.node is None
        else expand_plan_route(plan, route, shape, names=names),
    )


def _print_text(written: Sequence[_Written], plan: PlacementPlan) -> None:
    from flowrl.plan.show.plan import route_line

    if not written:
        print("no weights are transferred: all are used where they are trained")
        return
    count = stay = nbytes = stay_bytes = 0
    for item in written:
        if not item.parameters:
            continue
        print(route_line(item.route, plan))
        if item.route.node is None:
            continue
        print(HEAD)
        for source, destination, transfer in item.transfers:
            size = transfer.elements * item.width
            itself = source == destination
            count, nbytes = count + 1, nbytes + size
            stay, stay_bytes = stay + itself, stay_bytes + itself * size
            whole = " x ".join(map(str, item.parameters[transfer.parameter].size))
            sys.stdout.write(
                f"  {transfer.parameter} ({whole}) {_slice(transfer.box)}: "
                f"{source} {_slice(transfer.source_slice)} -> "
                f"{destination} {_slice(transfer.destination_slice)}, {size:,} bytes"
                + (", stays\n" if itself else "\n")
            )
    print(
        f"total: {count:,} {'transfer' if count == 1 else 'transfers'}, {_bytes(nbytes)}; "
        f"{stay:,} of them, {_bytes(stay_bytes)}, stay on their own device"
    )


def _print_json(written: Sequence[_Written]) -> None:
    """Prints a list with an object a line, without keeping it."""
    lead = "["
    for item in written:
        for source, destination, transfer in item.transfers:
            plain = {
                "source": item.route.source,
                "node": item.route.node,
                "after": item.route.after,
                "every": item.route.every,
                "parameter": transfer.parameter,
                "size": item.parameters[transfer.parameter].size,
                "slice": transfer.box,
                "from": source,
                "to": destination,
                "source_slice": transfer.source_slice,
                "destination_slice": transfer.destination_slice,
                "elements": transfer.elements,
                "bytes": transfer.elements * item.width,
            }
            sys.stdout.write(f"{lead}\n{json.dumps(plain)}")
            lead = ","
    sys.stdout.write("[]\n" if lead == "[" else "\n]\n")


def _slice(box: Box) -> str:
    return "[" + ", ".join(f"{begin}:{end}" for begin, end in box) + "]"


def _bytes(number: int) -> str:
    return f"{number:,} bytes" + (f" ({format_bytes(number)})" if number >= 1 << 20 else "")


def _whole_weights(plan: PlacementPlan) -> ConfigError:
    """Returns the error for a plan for one device, which has no slices."""
    return ConfigError(
        "weights of this plan are transferred as a whole, so there are no slices to list",
        where="--routes",
        found=f"a plan for one device ({plan.graph})",
        expected="a plan over several devices",
        hint="add --cluster FILE (configs/clusters has examples), or --plan FILE of such a plan",
    )


def _no_match(stage: CompiledStage, names: str) -> ConfigError:
    """Returns the error for a pattern that no parameter of a route matches."""
    routes = stage.plan.weight_routes
    there = [
        parameter.name
        for route in routes
        for parameter in route_parameters(
            stage.context.costs[route.source].shape, route.parameter_classes
        )
    ]
    return ConfigError(
        "no transferred parameter has such a name",
        where="--routes",
        found=repr(names),
        expected=f"of {', '.join(dict.fromkeys(route.source for route in routes))}: "
        f"{listing(dict.fromkeys(map(_any_number, there)))}",
        hint="take one of them; '*' is all, '*layers.0.*' is a layer",
    )


def _any_number(name: str) -> str:
    """Returns a name with a `*` for the number of its layer, and of its expert."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
