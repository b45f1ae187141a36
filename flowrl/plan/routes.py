"""Weight routes, written out: which slice of which parameter goes from which rank to which.

A plan keeps a rule, the two layouts of a route and the classes of parameters. `expand_route` turns
it into transfers when somebody needs them; a plan for a thousand devices would be millions of
lines otherwise. `flowrl plan CONFIG --routes GLOB` prints them.

    for transfer in expand_route(shape, source, destination):
        transfer.parameter, transfer.source, transfer.source_slice, ...

Every element that a destination rank holds comes from exactly one source rank. Among those that
have it, destinations are served in turn, and one that has it already is its own source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import cycle

from flowrl.cost.models import ModelShape
from flowrl.errors import PlanError
from flowrl.plan.options import ENGINES, TRAINERS
from flowrl.plan.parameters import Box, Holding, Parameter, parameters_of, part_of
from flowrl.plan.schema import Operation, PlacementPlan, WeightRoute


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A slice on its way.

    Attributes:
        source: Rank in the source's layout.
        source_slice: Within what the source rank holds.
        destination_slice: Within what the destination rank holds.
        box: Within the whole parameter.
    """

    parameter: str
    source: int
    destination: int
    source_slice: Box
    destination_slice: Box
    box: Box

    @property
    def elements(self) -> int:
        """Numbers that travel."""
        return _volume(self.box)


def expand_route(
    shape: ModelShape,
    source: Holding,
    destination: Holding,
    *,
    classes: tuple[str, ...] | None = None,
    names: str = "*",
    own: Mapping[int, int] | None = None,
) -> Iterator[Transfer]:
    """Every transfer of a route.

    Args:
        classes: Of parameters; None for all.
        names: A pattern, as of files, that parameters must match.
        own: The source rank on the device of a destination rank, where it has one: it keeps what
            it has. None where all devices differ.

    Raises:
        PlanError: the source does not hold all that the destination needs.
    """
    for parameter in route_parameters(shape, classes, names):
        held: dict[int, Box] = {}
        holders: dict[Box, list[int]] = {}
        for rank in range(source.layout.num_devices):
            box = part_of(parameter, rank, source, shape)
            if box is not None:
                held[rank] = box
                holders.setdefault(box, []).append(rank)
        senders = {box: cycle(ranks) for box, ranks in holders.items()}
        for rank in range(destination.layout.num_devices):
            wanted = part_of(parameter, rank, destination, shape)
            if wanted is not None:
                itself = None if own is None else own.get(rank)
                has = (itself, held[itself]) if itself is not None and itself in held else None
                yield from _gather(parameter, rank, wanted, senders, has)


def route_parameters(
    shape: ModelShape, classes: tuple[str, ...] | None = None, names: str = "*"
) -> Iterator[Parameter]:
    """The parameters of a route: of these classes (None for all), with names that match."""
    for parameter in parameters_of(shape):
        if (classes is None or parameter.kind in classes) and fnmatchcase(parameter.name, names):
            yield parameter


def expand_plan_route(
    plan: PlacementPlan, route: WeightRoute, shape: ModelShape, *, names: str = "*"
) -> Iterator[tuple[str, str, Transfer]]:
    """`(from address, to address, transfer)` of a plan's route over many devices.

    Args:
        names: A pattern that parameters must match: `*layers.0.*`.

    Raises:
        PlanError: a route that names no operation: it travels by other means than slices.
    """
    if route.node is None:
        raise PlanError(
            f"the weights of {route.source} are transferred as a whole ({route.transport}), not in "
            "slices",
            where=f"weight_routes: {route.source} to {route.destination}",
            hint="only routes in slices are written out",
        )
    update = next(one for one in plan.operations if one.role == route.source and one.op == "update")
    user = plan.operation(route.node)
    trains = {address: rank for rank, address in enumerate(update.devices)}
    transfers = expand_route(
        shape,
        holding_of(update),
        holding_of(user),
        classes=route.parameter_classes,
        names=names,
        own={
            rank: trains[address] for rank, address in enumerate(user.devices) if address in trains
        },
    )
    for transfer in transfers:
        yield update.devices[transfer.source], user.devices[transfer.destination], transfer


def holding_of(operation: Operation) -> Holding:
    """How an operation's devices hold its model."""
    library = {**TRAINERS, **ENGINES}.get(operation.library)
    return Holding(
        layout=operation.layout,
        shard="full" if operation.shard == "full" else "none",
        replicas_last=operation.op == "generate",
        vocabulary_step=64 if library is None else library.vocabulary_step,
    )


def _gather(
    parameter: Parameter,
    rank: int,
    wanted: Box,
    senders: Mapping[Box, Iterator[int]],
    has: tuple[int, Box] | None,
) -> Iterator[Transfer]:
    """The transfers that together bring one rank its part.

    Args:
        senders: Of each part, the source ranks that hold it, in turn and without an end.
        has: The source rank on the same device, and what it holds.
    """
    missing = _volume(wanted)
    # Layouts hold equal parts or such that have nothing in common.
    for box, sender in senders.items():
        common = _intersection(box, wanted)
        if common is None:
            continue
        source = has[0] if has is not None and has[1] == box else next(sender)
        missing -= _volume(common)
        yield Transfer(
            parameter=parameter.name,
            source=source,
            destination=rank,
            source_slice=_within(common, box),
            destination_slice=_within(common, wanted),
            box=common,
        )
    if missing:
        raise PlanError(
            f"{missing} elements of {parameter.name} are on no source device",
            found=f"rank {rank} needs {wanted}",
            where="weight_routes",
            expected="every element on some device of the source",
            hint="undo the edit of the layouts",
        )


def _intersection(one: Box, other: Box) -> Box | None:
    box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return None if any(begin >= end for begin, end in box) else box


def _within(box: Box, of: Box) -> Box:
    return tuple(
        (begin - base, end - base) for (begin, end), (base, _) in zip(box, of, strict=True)
    )


def _volume(box: Box) -> int:
    count = 1
    for begin, end in box:
        count *= end - begin
    return count
