"""How a published row says that a model is divided over devices.

Sizes go by `tp`, `pp`, `dp`, `cp`, `ep`, `fsdp` and a few other names; `fsdp` and `zero: 3` divide
parameters among data ranks, `zero: 0` nothing. Data ranks fill the devices where a row does not
name them. Ulysses ranks are context ranks; where `fsdp` counts all devices, they lie inside.
"""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.cost.layout import Layout
from flowrl.cost.role_memory import Shard
from flowrl.testing.published_rows import Row, Unusable
from flowrl.testing.published_words import as_number

__all__ = ["GivenLayout", "read_layout"]

_SIZES = {
    **{name: name for name in ("tp", "pp", "dp", "cp", "ep", "fsdp")},
    **dict.fromkeys(("tensor_parallel", "tensor_model_parallel", "tensor"), "tp"),
    **dict.fromkeys(("pipeline_parallel", "pipeline_model_parallel", "pipeline"), "pp"),
    **dict.fromkeys(("data_parallel", "replicas", "engines", "num_engines", "hsdp"), "dp"),
    **dict.fromkeys(("expert_parallel", "expert_model_parallel"), "ep"),
    **dict.fromkeys(("context_parallel", "ulysses", "ulysses_sp", "sequence_parallel"), "cp"),
    "ulysses_sequence_parallel": "cp",
    "fsdp2": "fsdp",
}
"""In lower case, without `_size`."""

_IGNORED = frozenset(
    {
        *("sp", "vpp", "vp", "virtual_pipeline_parallel", "virtual_pipeline_model_parallel"),
        *("etp", "expert_tensor_parallel", "num", "gpus", "num_gpus", "devices", "num_devices"),
        *("nodes", "num_nodes", "gpus_per_engine", "devices_per_replica"),
        *("micro_batch", "num_microbatches", "ga"),
    }
)
"""Numbers that say nothing of how many devices a model is divided over, or say it again."""

_STRATEGIES = ("strategy", "backend")

_ATTENTION_DP = ("dp_attention", "enable_dp_attention", "attention_dp")


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenLayout:
    """A layout as it was given.

    Attributes:
        named: Sizes that the row gives, by our names.
        notes: What was assumed or left out.
    """

    layout: Layout
    shard: Shard
    named: frozenset[str]
    notes: tuple[str, ...] = ()


def read_layout(key: str, given: Row, num: int | None) -> GivenLayout:
    """The layout under `key`.

    Args:
        num: Devices that it is for; None for as many as it names.

    Raises:
        Unusable: sizes that are none, or that do not come to the devices.
        PlanError: sizes that no layout has.
    """
    sizes, notes = _sizes(key, given)
    inner = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1)
    data = sizes.get("dp", 1) * sizes.get("fsdp", 1)
    fill = num is not None and num % inner == 0
    if num is not None and fill and inner * data != num:
        if sizes.get("fsdp") == num and "dp" not in sizes and inner > 1:
            data = num // inner
            notes.append(f"{key}: fsdp {num} counts all devices, so {data} data ranks")
        elif sizes.get("fsdp") == sizes.get("dp") == num // inner:
            data = num // inner
            notes.append(f"{key}: dp and fsdp taken for the same {data} ranks")
        elif "dp" not in sizes and num % (inner * data) == 0:
            data = num // inner
            notes.append(f"{key}: dp {data // sizes.get('fsdp', 1)} fills the devices")
    if num is not None and inner * data != num:
        raise Unusable(f"{key} is for {inner * data} devices, not for {num}")
    layout = Layout(
        tp=sizes.get("tp", 1),
        pp=sizes.get("pp", 1),
        cp=sizes.get("cp", 1),
        dp=data,
        ep=sizes.get("ep", 1),
    )
    return GivenLayout(
        layout=layout,
        shard=_shard(key, given, sizes, notes),
        named=frozenset(sizes),
        notes=tuple(notes),
    )


def _sizes(key: str, given: Row) -> tuple[dict[str, int], list[str]]:
    """Sizes of a layout by our names."""
    sizes: dict[str, int] = {}
    wrong, ignored = [], []
    for name, value in ((name, as_number(value)) for name, value in given.items()):
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        short = str(name).strip().lower().replace("-", "_").removesuffix("_size")
        known = _SIZES.get(short)
        if str(name) in _ATTENTION_DP:
            if value is None or value is False or (value == 1 and value is not True):
                continue
            wrong.append(f"{key}: attention by data ranks is not modelled")
        elif known is None:
            if _divides(value) and short not in (*_IGNORED, "zero", "zero_stage"):
                wrong.append(f"{key}.{name} is no known way to divide a model: {value!r}")
            elif value is not None:
                ignored.append(str(name))
        elif known == "fsdp" and (value is True or value == -1):
            sizes.setdefault("fsdp", 1)
        elif short == "sequence_parallel" and isinstance(value, bool):
            ignored.append(str(name))
        elif isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            sizes[known] = sizes.get(known, 1) * value
        elif value is not None and value is not False:
            wrong.append(f"{key}.{name} is no whole number above 0: {value!r}")
    if wrong:
        raise Unusable(*wrong)
    told = [name for name in ignored if name not in ("zero", "zero_stage", *_STRATEGIES)]
    return sizes, [f"{key}: {', '.join(told)} ignored"] if told else []


def _divides(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 1


def _shard(key: str, given: Row, sizes: dict[str, int], notes: list[str]) -> Shard:
    zero = as_number(given.get("zero", given.get("zero_stage")))
    words = " ".join(str(given.get(name, "")) for name in _STRATEGIES).lower()
    if "fsdp" in sizes or zero == 3 or (zero is None and ("fsdp" in words or "zero3" in words)):
        return "full"
    if zero == 0:
        return "none"
    if zero is None and key == "train_parallel":
        notes.append(f"{key}: optimizer divided among data ranks")
    elif zero not in (None, 1, 2):
        raise Unusable(f"{key}.zero is one of 0, 1, 2, 3: {zero!r}")
    return "optimizer"
