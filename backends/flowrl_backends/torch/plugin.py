"""The plug-in of the entry point `torch`; it imports heavy libraries only when a worker opens."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict

from flowrl.backend.plugin import NO_OPTIONS, BackendStatus, BasePlugin, Capabilities, Service
from flowrl.errors import BackendError

if TYPE_CHECKING:
    from flowrl.backend.protocols import GenerateBackend, PolicyContext, TrainBackend

_NEEDED = ("torch", "transformers", "safetensors")


class TorchOptions(BaseModel):
    """`roles.NAME.options` of a role that torch trains.

    Attributes:
        shard: What the ranks of a trainer divide among them, besides the batch: the state of the
            `optimizer` (ZeRO-1), the `gradients` too (ZeRO-2), or the parameters too, `full`
            (ZeRO-3).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    shard: Literal["optimizer", "gradients", "full"] = "full"


class TorchPlugin(BasePlugin):
    """Generation and training of Transformers models in one process.

    >>> from flowrl_backends.torch import plugin
    >>> plugin.name
    'torch'
    """

    name = "torch"
    options = TorchOptions
    capabilities = Capabilities(
        services=frozenset({Service.GENERATE, Service.TRAIN}),
        devices=frozenset({"cpu", "cuda", "npu"}),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        untrained_dtypes=frozenset({"float16"}),
        abort=True,
        resume=True,
        sleep=True,
        shares_weights=True,
        heads=frozenset({"lm", "value"}),
        grammars=frozenset({"regex", "json_schema"}),
        repeats_truncation=frozenset(
            {"top_p", "top_k", "min_p", "repetition_penalty", "min_tokens"}
        ),
        recompute=frozenset({"full"}),
        ranks=True,
        sampling=frozenset({"top_p", "top_k", "min_p", "repetition_penalty", "min_tokens", "stop"}),
        updates=frozenset({"average", "reset", "sum"}),
    )

    def check(self, options: Mapping[str, object] = NO_OPTIONS) -> BackendStatus:
        """Checks that torch, transformers and safetensors are installed; imports none of them."""
        missing = [name for name in _NEEDED if find_spec(name) is None]
        if missing:
            return BackendStatus(
                usable=False,
                problem=f"not installed: {', '.join(missing)}",
                hint="pip install 'flowrl[torch]'",
            )
        try:
            installed = version("torch")
        except PackageNotFoundError:
            installed = ""
        return BackendStatus(usable=True, version=installed)

    def open_generate(self, context: PolicyContext, shared: TrainBackend | None) -> GenerateBackend:
        """Opens an engine over the trainer's own module, or over a model loaded for it alone.

        Raises:
            BackendError: The model has a value head, `shared` is not this plug-in's trainer, or the
                architecture cannot be decoded from KV slots.
        """
        if context.head != "lm":
            raise BackendError(
                "a model with a value head cannot generate",
                where=f"roles.{context.role}",
                found=f"head {context.head}",
                expected="head lm",
            )
        import torch

        from flowrl_backends.torch.engine import TorchEngine

        if context.num_threads > 0:
            torch.set_num_threads(context.num_threads)
        if shared is None:
            from flowrl_backends.torch.model import load_model

            return TorchEngine(context, load_model(context), shares_weights=False)
        from flowrl_backends.torch.trainer import TorchTrainer

        if not isinstance(shared, TorchTrainer):
            raise BackendError(
                "the torch engine shares weights with the torch trainer only",
                where=f"roles.{context.role}.backend",
                found=type(shared).__name__,
                hint="use one backend for both, or give generation its own copy of the weights",
            )
        return TorchEngine(context, shared.model, shares_weights=True)

    def open_train(self, context: PolicyContext) -> TrainBackend:
        """Opens a trainer."""
        from flowrl_backends.torch.trainer import TorchTrainer

        options = self.options.model_validate(context.options)
        trainer: TrainBackend = TorchTrainer(context, shard=options.shard)
        return trainer
