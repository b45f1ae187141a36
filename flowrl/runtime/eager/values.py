"""Values of handles in a program that runs line by line, and their `repr`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from flowrl.backend.batch import Mask
from flowrl.graph import DType, Field, Node, Unit
from flowrl.graph.signatures import PREFERRED, ROLLOUT_LOGPROBS, TOKENS
from flowrl.ids import NodeId
from flowrl.program.values import SamplesValue, shortened
from flowrl.runtime.driver.payloads import Payload
from flowrl.runtime.driver.sample_set import Array, SampleSet, StepBatch

__all__ = ["TextOf", "arrays_of", "arrays_text", "is_of_samples", "prompts_text", "samples_value"]


TextOf: TypeAlias = Callable[[NodeId, Payload], str]
"""The text of a sample's response, by where the sample comes from."""

_T = TypeVar("_T", bound=np.generic)

_DTYPES: dict[DType, type[np.generic]] = {
    DType.INT64: np.int64,
    DType.FLOAT32: np.float32,
    DType.BOOL: np.bool_,
}
_SHOWN = 8
"""Values of an array that `repr` shows."""


def is_of_samples(fields: Sequence[Field]) -> bool:
    """True if fields are those of samples, and not numbers on them."""
    return any(field.name == TOKENS.name for field in fields)


def samples_value(
    node: NodeId, samples: SampleSet, values: Mapping[tuple[NodeId, str], Array], text_of: TextOf
) -> SamplesValue:
    """Returns the samples of a set.

    Args:
        node: The node that made the set.
        values: Outputs of nodes, `[N]` and `[T]`.
    """
    sequences = samples.sequences
    # Arrays of the step itself are read-only: writing raises, and the run is unchanged.
    logprobs: Any
    preferred: Any
    logprobs, preferred = (values.get((node, f.name)) for f in (ROLLOUT_LOGPROBS, PREFERRED))
    return SamplesValue(
        samples=tuple(sequences.samples),
        groups=tuple(samples.groups),
        prompts=tuple(payload.item.prompt for payload in samples.payloads),
        texts=tuple(text_of(samples.origin, payload) for payload in samples.payloads),
        tokens=_read_only(sequences.tokens),
        offsets=_read_only(sequences.offsets),
        response_mask=_read_only(sequences.response_mask),
        lengths=_read_only(sequences.response_lengths),
        rollout_logprobs=None if logprobs is None else _read_only(logprobs),
        preferred=None if preferred is None else _read_only(preferred),
        turn=None if sequences.turn is None else _read_only(sequences.turn),
        token_reward=None if sequences.token_reward is None else _read_only(sequences.token_reward),
        state=None if sequences.state is None else _read_only(sequences.state),
    )


def arrays_of(node: Node, fields: Sequence[Field], batch: StepBatch) -> dict[str, Array]:
    """Returns the arrays of a node's fields; empty ones if it had no sample to work on."""
    found: dict[str, Array] = {}
    for field in fields:
        values = batch.values.get((node.id, field.name))
        if values is None:
            values = np.zeros(0, _DTYPES[field.dtype])
        found[field.name] = _read_only(values)
    return found


def _read_only(values: npt.NDArray[_T]) -> npt.NDArray[_T]:
    view = values.view()
    view.flags.writeable = False
    return view


def arrays_text(arrays: Mapping[str, Array], fields: Sequence[Field], mask: Mask | None) -> str:
    """Returns `score float32[16], mean 0.25: 0, 1, 0, ...`.

    Args:
        mask: bool `[T]`, of the response tokens; other tokens' values are not shown.
    """
    texts = []
    for field in fields:
        values = arrays[field.name]
        of_tokens = field.unit is Unit.TOKENS and mask is not None and len(mask) == len(values)
        seen = values[mask] if of_tokens else values
        text = f"{field.name} {values.dtype}[{len(values)}]"
        if len(seen):
            first = ", ".join(f"{value:.4g}" for value in seen[:_SHOWN].tolist())
            more = ", ..." if len(seen) > _SHOWN else ""
            at = " at response tokens" if of_tokens else ""
            text += f", mean{at} {float(seen.mean()):.4g}: {first}{more}"
        texts.append(text)
    return "; ".join(texts)


def prompts_text(texts: Sequence[str]) -> str:
    """Returns `4 prompts: '1+2=', ...`."""
    return f"{len(texts)} prompts: {shortened(texts[0])}{', ...' if len(texts) > 1 else ''}"
