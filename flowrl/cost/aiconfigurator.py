"""`AIConfiguratorCost`: engine steps from NVIDIA's database of measured kernels, where it has them.

The package is optional (`pip install 'flowrl[aiconfigurator]'`, a pinned `aiconfigurator-core`,
CPU only, 119 MB). It needs no accelerator: an engine is compiled from a model's sizes, a system and
a layout in 20 ms, and a step is then a look-up of less than a millisecond.

It answers `decode_step` and `prefill` for the systems of `SYSTEMS`, for models that come with the
package or are named in `names`, in bfloat16. Everything else the other cost answers, and the
estimate's notes say why. Its times are of kernels: the engine's host is added here.

Models are recognised by their sizes, for a `ModelShape` carries no name: the package brings the
`config.json` of every model that it knows.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

from flowrl.cluster.hardware import DeviceSpec, Machine, catalogue
from flowrl.cost import efficiency
from flowrl.cost.layout import Layout
from flowrl.cost.models import ModelShape
from flowrl.cost.partial import PartialCost
from flowrl.cost.source import Cost, Estimate
from flowrl.errors import BackendError, PlanError

PACKAGE = "aiconfigurator_core"

SYSTEMS: Mapping[str, str] = {
    "A100-SXM-80GB": "a100_sxm",
    "H100-SXM-80GB": "h100_sxm",
    "H200-SXM-141GB": "h200_sxm",
}
"""Systems of the database, by the name of the device in the catalogue."""

_PRECISION = {
    "gemm_quant_mode": "bfloat16",
    "moe_quant_mode": "bfloat16",
    "kvcache_quant_mode": "bfloat16",
    "fmha_quant_mode": "bfloat16",
}


class EngineHandle(Protocol):
    """A compiled engine of the package: milliseconds of one step."""

    def predict_decode_latency(self, bs: int, isl: int) -> float:
        """Of `bs` rows with `isl` tokens each."""
        ...

    def predict_prefill_latency(self, bs: int, isl: int) -> float:
        """Of `bs` prompts of `isl` tokens."""
        ...


Compile = Callable[..., EngineHandle]
"""`EngineHandle.compile(model, system, backend, **options)` of the package."""


class AIConfiguratorCost(PartialCost):
    """See the module.

    Args:
        fallback: Answers what the database does not have.
        names: The package's names of models by their shapes; None for those that it brings.
        backend: The engine whose kernels were measured: `sglang`, `vllm` or `trtllm`.
        compile_engine: Of the package; None imports it.

    Raises:
        BackendError: the package is not installed, or is not the one that this was written for.
    """

    def __init__(
        self,
        fallback: Cost,
        *,
        names: Mapping[ModelShape, str] | None = None,
        backend: str = "sglang",
        host_s: float = efficiency.ENGINE_HOST_S,
        compile_engine: Compile | None = None,
    ) -> None:
        super().__init__(fallback)
        self._compile = _import_compile() if compile_engine is None else compile_engine
        self._names = packaged_models() if names is None else dict(names)
        self._backend = backend
        self._host_s = host_s
        self._engines: dict[tuple[str, str, Layout], EngineHandle | str] = {}

    def decode_step(
        self, shape: ModelShape, layout: Layout, machine: Machine, *, batch: int, context: float
    ) -> Estimate:
        """See `Cost`."""
        found = self._ask(
            shape,
            layout,
            machine,
            lambda engine: engine.predict_decode_latency(batch, max(1, round(context))),
        )
        if isinstance(found, float):
            return self._estimate("decode", found)
        return _noted(
            super().decode_step(shape, layout, machine, batch=batch, context=context), found
        )

    def prefill(
        self, shape: ModelShape, layout: Layout, machine: Machine, *, rows: int, tokens: int
    ) -> Estimate:
        """See `Cost`."""
        found = self._ask(
            shape,
            layout,
            machine,
            lambda engine: engine.predict_prefill_latency(rows, tokens),
        )
        if isinstance(found, float):
            return self._estimate("prefill", found)
        return _noted(super().prefill(shape, layout, machine, rows=rows, tokens=tokens), found)

    def _estimate(self, what: str, milliseconds: float) -> Estimate:
        parts = {what: milliseconds / 1e3, "host": self._host_s}
        return Estimate.of_parts(parts, source="aiconfigurator")

    def _ask(
        self,
        shape: ModelShape,
        layout: Layout,
        machine: Machine,
        question: Callable[[EngineHandle], float],
    ) -> float | str:
        """Milliseconds, or why there are none."""
        engine = self._engine(shape, layout, machine)
        if isinstance(engine, str):
            return engine
        try:
            return float(question(engine))
        # The package raises errors of its own and of its compiled part for points it lacks.
        except Exception as error:
            return f"AIConfigurator has no such point: {_first_line(error)}"

    def _engine(self, shape: ModelShape, layout: Layout, machine: Machine) -> EngineHandle | str:
        system = SYSTEMS.get(machine.spec.name)
        if system is None:
            return f"AIConfigurator has no {machine.spec.name}"
        if _other_rates(machine.spec):
            return (
                f"AIConfigurator has no {machine.spec.name} with other rates than the catalogue's"
            )
        model = self._names.get(shape)
        if model is None:
            return f"AIConfigurator has no model of these sizes ({shape.family})"
        if layout.cp > 1 or layout.ep > layout.tp:
            return f"AIConfigurator is not asked for {layout.describe()}"
        replica = Layout(tp=layout.tp, pp=layout.pp, ep=layout.ep)
        key = (model, system, replica)
        if key not in self._engines:
            self._engines[key] = self._compiled(model, system, replica, shape)
        return self._engines[key]

    def _compiled(
        self, model: str, system: str, replica: Layout, shape: ModelShape
    ) -> EngineHandle | str:
        options: dict[str, Any] = {
            "backend_version": "current",
            "tp_size": replica.tp,
            "pp_size": replica.pp,
            **_PRECISION,
        }
        if shape.experts is not None:
            options["moe_tp_size"] = replica.tp // replica.ep
            options["moe_ep_size"] = replica.ep
        try:
            return self._compile(model, system, self._backend, **options)
        # As above: what a version cannot build it says in its own words.
        except Exception as error:
            return f"AIConfigurator cannot build {model} on {system}: {_first_line(error)}"


def packaged_models() -> dict[ModelShape, str]:
    """Models that the package brings, by shape; those of families that flowrl does not know not.

    Raises:
        BackendError: the package is not installed.
    """
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise _not_installed()
    models: dict[ModelShape, str] = {}
    folder = Path(found.origin).parent / "model_configs"
    # Quantised variants of a model have its sizes and longer names.
    for path in sorted(folder.glob("*_config.json"), key=lambda path: (len(path.name), path.name)):
        if path.name.endswith("_hf_quant_config.json"):
            continue
        config = json.loads(path.read_text(encoding="utf-8"))
        try:
            shape = ModelShape.from_hf_config(config, where=path.name, allow_quantised=True)
        except PlanError:
            continue
        models.setdefault(shape, path.name.removesuffix("_config.json").replace("--", "/"))
    return models


def _import_compile() -> Compile:
    try:
        module = importlib.import_module(f"{PACKAGE}.sdk.engine")
    except ImportError as error:
        raise _not_installed() from error
    compile_engine = getattr(getattr(module, "EngineHandle", None), "compile", None)
    if compile_engine is None:
        raise BackendError(
            "this aiconfigurator-core is not the one that flowrl was written for",
            where=f"{PACKAGE}.sdk.engine",
            found="no EngineHandle.compile",
            hint="pip install 'flowrl[aiconfigurator]'",
        )
    return cast("Compile", compile_engine)


def _not_installed() -> BackendError:
    return BackendError(
        "AIConfigurator is not installed",
        where="plan.engine_times",
        found=f"no package {PACKAGE}",
        hint="pip install 'flowrl[aiconfigurator]', or set plan.engine_times=analytic",
    )


def _other_rates(spec: DeviceSpec) -> bool:
    """Whether a description of machines gives a device rates that were not measured on it."""
    known = catalogue()[spec.name]
    return (spec.flops, spec.memory_bytes_per_s) != (known.flops, known.memory_bytes_per_s)


def _noted(estimate: Estimate, note: str) -> Estimate:
    return replace(estimate, notes=(*estimate.notes, note))


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:160]
