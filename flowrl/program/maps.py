"""Maps in programs: `fl.map` for functions of one's own, `fl.weighted_sum`, `fl.shaping`.

@fl.map(reads=("score", "response_mask"), gives="score", per_sample=True)
def brief(batch, *, scale=0.01):
    return batch["score"] - scale * batch.lengths

scores = brief(verifier.score(rollout), rollout, scale=0.02)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from flowrl.errors import TraceError
from flowrl.graph.signatures import ADVANTAGE, SCORE, TOKEN_ADVANTAGE, map_outputs
from flowrl.graph.types import Field, Op, Unit
from flowrl.program.handles import Advantages, Handle, Mapped, Scores
from flowrl.program.operation import (
    check_handle,
    current_tracer,
    operation,
    refuse_argument,
)
from flowrl.program.source import user_line
from flowrl.program.tracer import Read
from flowrl.specs import MapSpec, Scalar
from flowrl.specs.maps import UserMap, WeightedSum, split_key

__all__ = [
    "OwnMap",
    "add_map",
    "log",
    "map_of",
    "weighted_sum",
]


class OwnMap(UserMap):
    """A map of the user's own, to be called inside a workflow."""

    def __call__(self, *handles: Handle, **options: Scalar) -> Scores | Advantages | Mapped:
        """Computes its fields of each step's batch.

        Args:
            handles: What it reads, in the order of its keys: `score` is the first that has a score,
                `score_2` the second.
            options: Of the function.

        Returns:
            Scores or advantages where it gives those, else something for `fl.log` and `extra=`.
        """
        return add_map(self.__name__, self.spec(**options), handles)


def map_of(
    *,
    reads: str | Iterable[str],
    gives: str | Iterable[str] = "score",
    per_sample: bool = False,
) -> Callable[[Callable[..., object]], OwnMap]:
    """`@fl.map(...)`: makes a map of a function `(batch, *, option=default, ...)`.

    The function computes with numpy, on the batch that `flowrl.algo.maps.MapBatch` describes.

    Args:
        reads: Keys of the fields that it reads: `score`, `score_2`, `response_mask`, ...
        gives: Fields: `score`, or `name/samples`, `name/tokens`, `name: dtype/unit`.
        per_sample: Whether what it gives of a sample depends on that sample alone; then it may
            come before a filter.
    """
    return OwnMap.mark(reads=reads, gives=gives, per_sample=per_sample)


@operation
def weighted_sum(*scores: tuple[Scores, float]) -> Scores:
    """The sum of several scores of the same samples, each times its weight.

    Args:
        scores: Pairs of scores and weight: `fl.weighted_sum((accuracy, 1.0), (style, 0.2))`.
    """
    name = "fl.weighted_sum"
    weights = []
    for pair in scores:
        number = pair[1] if isinstance(pair, tuple) and len(pair) == 2 else None
        plain = isinstance(number, int | float) and not isinstance(number, bool)
        if not plain or not math.isfinite(number):
            raise refuse_argument(
                name,
                "scores",
                pair,
                "pairs of scores and weight",
                f"write {name}((accuracy, 1.0), (style, 0.2))",
            )
        check_handle(pair[0], Scores, operation=name, argument="scores")
        weights.append(float(number))
    if not weights:
        raise refuse_argument(name, "scores", (), "at least one pair of scores and weight")
    given = add_map(name, WeightedSum.of(weights), [pair[0] for pair in scores])
    assert isinstance(given, Scores)
    return given


def add_map(name: str, spec: MapSpec, handles: Iterable[Handle]) -> Scores | Advantages | Mapped:
    """The node of a map; each edge carries the fields that the map reads of it.

    Raises:
        TraceError: a key that no argument has, or an argument of which nothing is read.
    """
    tracer = current_tracer(name)
    given = [check_handle(h, Handle, operation=name, argument="input") for h in handles]
    chosen: dict[int, list[Field]] = {}
    for key in spec.reads:
        field, place = split_key(key)
        having = [i for i, handle in enumerate(given) if field in _names(handle)]
        if place >= len(having):
            raise TraceError(
                f"{name} reads '{key}', which none of its arguments gives",
                where=str(user_line()),
                found="; ".join(f"{h.kind}: {', '.join(_names(h))}" for h in given) or "nothing",
                hint="pass what has it: scores, the rollout, logprobs, values",
            )
        source = given[having[place]]
        _check_unit(name, source, field)
        chosen.setdefault(having[place], []).extend(f for f in source.fields if f.name == field)
    unread = [given[i] for i in range(len(given)) if i not in chosen]
    if unread:
        raise TraceError(
            f"{name} reads nothing of {unread[0].kind} of '{unread[0].node}'",
            where=str(user_line()),
            expected=f"what has {', '.join(spec.reads)}",
            hint="give it a handle that has one of these",
        )
    reads = {
        "input" if i == 0 else f"input_{i + 1}": Read(given[i].node, tuple(chosen[i]))
        for i in range(len(given))
    }
    outputs = map_outputs(spec)
    node = tracer.add(Op.MAP, name="map", reads=reads, outputs=outputs, attrs={"spec": spec})
    kind = next((k for k, fields in _KINDS if outputs in fields), Mapped)
    return kind(tracer, node, outputs)


def _check_unit(name: str, handle: Handle, field: str) -> None:
    (read,) = (f for f in handle.fields if f.name == field)
    if read.unit not in (Unit.SAMPLES, Unit.TOKENS):
        raise TraceError(
            f"{name} reads '{field}' of {handle.kind}, which is one of {read.unit}",
            where=str(user_line()),
            expected="fields of samples or tokens",
            hint="a map computes with what was made of prompts: a rollout, scores",
        )


_KINDS: tuple[tuple[type[Scores] | type[Advantages], tuple[tuple[Field, ...], ...]], ...] = (
    (Scores, ((SCORE,),)),
    (Advantages, ((ADVANTAGE,), (TOKEN_ADVANTAGE,))),
)


def _names(handle: Handle) -> list[str]:
    return [field.name for field in handle.fields]


@operation
def log(name: str, value: Handle) -> None:
    """Shows the mean of a field with each step, and writes it to metrics.jsonl (`extra`).

    Args:
        name: What it is called there; letters, digits and `_./-`.
        value: Anything with one field of numbers: scores, advantages, logprobs, values. Of several
            fields (a rollout), the first that is no token or mask.
    """
    tracer = current_tracer("fl.log")
    plain = isinstance(name, str) and name and all(c.isalnum() or c in "_./-" for c in name)
    if not plain:
        raise refuse_argument("fl.log", "name", name, "a name of letters, digits and _./-")
    before = [n for n in tracer.nodes if n.op is Op.LOG and n.attr("name") == name]
    if before:
        raise TraceError(
            f"'{name}' is logged twice",
            where=str(user_line()),
            found=f"{before[0].source}",
            hint="each number of a step has a name of its own",
        )
    handle = check_handle(value, Handle, operation="fl.log", argument="value")
    numbers = [f for f in handle.fields if f.name not in ("tokens", "response_mask", "prompt")]
    if not numbers:
        raise refuse_argument("fl.log", "value", value, "something with a field of numbers")
    tracer.add(
        Op.LOG,
        name=f"log.{name}",
        reads={"value": Read(handle.node, tuple(numbers[:1]))},
        attrs={"name": name},
    )
