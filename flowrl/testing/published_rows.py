"""What rows of published figures have in common: models, devices, and what a row lacks.

A row that cannot be predicted is no error: it says what it lacks (`Unusable`) and does not count.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

import yaml

from flowrl.cluster.hardware import Machine, abbreviated, catalogue, find_spec
from flowrl.config.nearest import listing
from flowrl.cost.models import Experts, ModelShape
from flowrl.errors import ConfigError, PlanError

__all__ = [
    "NODE_SIZE",
    "Row",
    "Unusable",
    "file_name",
    "is_positive",
    "machine_of",
    "median",
    "read_document",
    "rows_of",
    "shape_of",
    "share_below",
]

Row: TypeAlias = Mapping[str, Any]
"""As its file has it: rows come from other hands, and any key may be absent or wrong."""

NODE_SIZE = 8
"""Devices of a node where a row does not say; what all devices of the catalogue are sold in."""

_SYSTEMS = {
    "h100_sxm": "H100-SXM-80GB",
    "h200_sxm": "H200-SXM-141GB",
    "a100_sxm": "A100-SXM-80GB",
    "h20_sxm": "H20-96GB",
    "a100": "A100-SXM-80GB",
    "a100-80gb": "A100-SXM-80GB",
    "h100-80gb": "H100-SXM-80GB",
    "h100-sxm": "H100-SXM-80GB",
    "h100-sxm5": "H100-SXM-80GB",
    "h200-sxm": "H200-SXM-141GB",
    "h200-141gb": "H200-SXM-141GB",
    "b200_sxm": "B200-SXM-180GB",
    "b200-sxm": "B200-SXM-180GB",
    "h800-80gb": "H800-SXM-80GB",
    "a800-80gb": "A800-SXM-80GB",
    "gb200-nvl72": "GB200-186GB",
    "ascend-a3": "Ascend-A3-die",
    "atlas-a3-die": "Ascend-A3-die",
    "dgx-h100": "H100-SXM-80GB",
    "dgx-h200": "H200-SXM-141GB",
}
"""Devices by the names of AIConfigurator's database, and by others that people write."""


_DISTILLED = {
    "deepseek-r1-distill-qwen-": "qwen2.5-",
    "deepseek-r1-distill-llama-": "llama-3.1-",
}
"""Models that others were trained into, with their sizes."""

_SAME = {
    **dict.fromkeys(("deepseek-r1", "deepseek-v3.1", "deepseek-r1-671b"), "deepseek-v3"),
    "qwq-32b": "qwen2.5-32b",
    "llama-3-8b": "llama-3.1-8b",
    **dict.fromkeys(("llama-3-70b", "llama-3.3-70b"), "llama-3.1-70b"),
    **dict.fromkeys(("qwen3-30b3a", "qwen3-30b", "qwen3-coder-30b-a3b"), "qwen3-30b-a3b"),
    **{f"qwen2-{size}": f"qwen2.5-{size}" for size in ("0.5b", "1.5b", "7b", "72b")},
    **{
        f"qwen2.5-coder-{size}": f"qwen2.5-{size}"
        for size in ("0.5b", "1.5b", "3b", "7b", "14b", "32b")
    },
    "qwen3-235b": "qwen3-235b-a22b",
}
"""Models of the same shape, and short names."""


class Unusable(Exception):
    """A row cannot be predicted.

    Args:
        reasons: What it lacks, or what of it is unknown or contradicts itself.
    """

    def __init__(self, *reasons: str) -> None:
        self.reasons = reasons
        super().__init__("; ".join(reasons))


def is_positive(value: object) -> TypeGuard[int | float]:
    """Whether it is a number above 0, and a finite one."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value <= sys.float_info.max  # type: ignore[operator]


def machine_of(name: object, *, node_size: object = None) -> Machine:
    """A machine of devices of the catalogue.

    Raises:
        Unusable: the catalogue has no such device.
    """
    spec = find_spec(_SYSTEMS.get(str(name).lower(), str(name)))
    if spec is None and len(meant := abbreviated(str(name))) == 1:
        (spec,) = meant
    if spec is None or not isinstance(name, str):
        raise Unusable(f"no such device in the catalogue: {name!r} (known: {listing(catalogue())})")
    size = node_size if isinstance(node_size, int) and node_size > 0 else NODE_SIZE
    return Machine(spec=spec, node_size=size)


def shape_of(name: object, given: object, models: Path) -> ModelShape:
    """A model by its file in a folder of configs, or by sizes that come with the rows.

    Args:
        given: Sizes as `model_shapes` of a file of engine steps has them, or a `config.json`; None
            without.
        models: A folder of `NAME.json`, in lower case.

    Raises:
        Unusable: neither is there, or they cannot be read.
    """
    if not isinstance(name, str) or not name:
        raise Unusable("model is missing")
    path = models / f"{file_name(name)}.json"
    if path.is_file():
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
            return ModelShape.from_hf_config(config, where=str(path))
        except (ValueError, PlanError) as error:
            raise Unusable(f"{path.name} cannot be read: {error}") from error
    if isinstance(given, Mapping) and "hidden_size" in given:
        try:
            return ModelShape.from_hf_config(dict(given), where=name)
        except (TypeError, PlanError) as error:
            raise Unusable(f"the config of {name!r}: {' '.join(str(error).split())}") from error
    if isinstance(given, Mapping):
        return _given_shape(name, given)
    raise Unusable(f"unknown model {name!r}: no {path.name} in {models.name}, and no sizes given")


def file_name(name: str) -> str:
    """Of the model whose sizes one has, tuned or not.

    >>> file_name("meta-llama/Meta-Llama-3.1-8B-Instruct")
    'llama-3.1-8b'
    >>> file_name("Qwen/Qwen3-30B-A3B-Instruct-2507")
    'qwen3-30b-a3b'
    """
    short = name.rsplit("/", 1)[-1].lower().replace("_", "-").removeprefix("meta-")
    for prefix, family in _DISTILLED.items():
        if short.startswith(prefix):
            return family + short.removeprefix(prefix)
    for word in ("-instruct", "-base", "-chat", "-math", "-thinking"):
        short = short.replace(word, "")
    short = re.sub(r"-(\d{4})$", "", short)  # of a release, as -2507
    return _SAME.get(short, short)


_SIZES = ("vocab", "hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim")


def _given_shape(name: str, given: Row) -> ModelShape:
    sizes = (*_SIZES, *(("num_experts", "experts_per_token") if given.get("num_experts") else ()))
    wrong = [
        f"the sizes of {name!r}: {key} is no whole number above 0: {given[key]!r}"
        for key in sizes
        if key in given and not (isinstance(given[key], int) and is_positive(given[key]))
    ]
    if wrong:
        raise Unusable(*wrong)
    try:
        experts = None
        if given.get("num_experts"):
            experts = Experts(
                num_experts=given["num_experts"],
                num_active=given["experts_per_token"],
                expert_size=given["intermediate"],
            )
        return ModelShape(
            family=name,
            vocab_size=given["vocab"],
            hidden_size=given["hidden"],
            intermediate_size=given["intermediate"],
            num_layers=given["layers"],
            num_heads=given["heads"],
            num_kv_heads=given["kv_heads"],
            head_dim=given["head_dim"],
            tied=bool(given["tied_embeddings"]),
            experts=experts,
        )
    except KeyError as error:
        raise Unusable(f"the sizes of {name!r} lack {error.args[0]!r}") from error


def median(values: list[float]) -> float:
    """Of at least one value, the middle one, or the mean of the middle two."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def share_below(values: list[float], share: float) -> float:
    """Of at least one value, the smallest that so many do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, -(-int(share * 100) * len(ordered) // 100) - 1))]


def rows_of(document: Row) -> list[object]:
    """Entries under `rows`, a list or an object by name: with what `defaults` says for all of them,
    and with the sizes that `model_shapes` has of their models."""
    given = document.get("rows")
    rows: list[object] = list(given) if isinstance(given, list) else []
    if isinstance(given, Mapping):
        rows = [
            {"name": name, **row} if isinstance(row, Mapping) else row
            for name, row in given.items()
        ]
    defaults, shapes = document.get("defaults"), document.get("model_shapes")
    defaults = defaults if isinstance(defaults, Mapping) else {}
    shapes = shapes if isinstance(shapes, Mapping) else {}
    found: list[object] = []
    for row in rows:
        if not isinstance(row, Mapping):
            found.append(row)
            continue
        whole = {**defaults, **row}
        model = whole.get("model")
        if isinstance(model, str) and model in shapes:
            whole.setdefault("model_shape", shapes[model])
        found.append(whole)
    return found


def read_document(path: Path) -> Mapping[str, Any]:
    """A YAML or JSON file with an object at its top, or with its rows alone.

    Raises:
        ConfigError: it is none.
    """
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"the file cannot be read: {error}", where=str(path)) from error
    if isinstance(found, list) and any(isinstance(row, Mapping) for row in found):
        return {"rows": found}
    if not isinstance(found, Mapping):
        raise ConfigError("not an object", where=str(path), found=type(found).__name__)
    return found
