"""`fl.log`: numbers of a step that a person wants to see."""

from __future__ import annotations

from flowrl.errors import TraceError
from flowrl.graph.types import Op
from flowrl.program.handles import Handle
from flowrl.program.operation import check_handle, current_tracer, operation, refuse_argument
from flowrl.program.source import user_line
from flowrl.program.tracer import Read

__all__ = ["log"]


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
