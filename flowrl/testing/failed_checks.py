"""The error that says which checks a loss or a map of the user's own fails."""

from __future__ import annotations

from collections.abc import Sequence

from flowrl.errors import TraceError
from flowrl.specs import LossSpec, MapSpec
from flowrl.specs.loss import OwnLoss
from flowrl.specs.maps import OwnMap
from flowrl.user_files import load_function
from flowrl.user_lines import definition_of


def failed_checks(spec: LossSpec | MapSpec, failures: Sequence[str]) -> TraceError:
    """All failures once each, in their order, at the line of the function."""
    kind = "loss" if isinstance(spec, LossSpec) else "map"
    where = None
    if isinstance(spec, OwnLoss | OwnMap):
        where = str(definition_of(load_function(spec.function)))
    each = list(dict.fromkeys(failures))
    many = f"{len(each)} check" + ("s" if len(each) > 1 else "")
    return TraceError(
        f"{kind} {spec} fails {many}", where=where, found="".join(f"\n  - {f}" for f in each)
    )
