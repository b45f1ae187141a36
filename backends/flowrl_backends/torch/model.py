"""Loads a Transformers model for training and generation: a language model, or a value head.

Models come from Transformers, from a local folder, in safetensors, and without code from the
folder. A value head is Transformers' token classification with one label, so exported folders open
anywhere. Its folder may be that of a language model, whose body is used, or of a reward model.

Transformers takes seconds to import, so it is imported when the first model is loaded.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from flowrl.backend.protocols import PolicyContext
from flowrl.errors import BackendError
from flowrl_backends.torch.packed_forward import ATTENTION, register_attention, value_head

if TYPE_CHECKING:
    from transformers import PreTrainedModel


DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_log = logging.getLogger(f"flowrl.{__name__}")  # below the logger whose warnings people see

_HEAD_STREAM = 0x68656164
"""Sets a new head's random stream apart from that of a new body with the same seed."""

_HEADS = ("score", "classifier")
"""What Transformers' classifiers call the linear map that they end in."""

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
)


def load_model(context: PolicyContext) -> PreTrainedModel:
    """Loads the model of `context`, in eval mode (no dropout), on its device and in its dtype.

    With `context.fresh` the weights are initialised from `context.seed`, in float32 on the CPU, so
    that every device begins with the same numbers. The process's random state does not change. A
    value head that the folder does not have is initialised in the same way, like the other weights
    of the architecture, with bias 0.

    Raises:
        BackendError: The folder, config or weights are missing or unreadable, the device does not
            exist, the architecture needs code that Transformers does not include, or it computes
            samples of `context.max_length` tokens differently from shorter ones.
    """
    _check_folder(context)
    if context.dtype not in DTYPES:
        raise BackendError(
            "unknown parameter type",
            where=f"roles.{context.role}",
            found=context.dtype,
            expected=" ".join(DTYPES),
        )
    register_attention()
    with _explained(context), quiet_transformers(reports=context.head == "lm"):
        model = _fresh(context) if context.fresh else _pretrained(context)
        model.eval()
        model.requires_grad_(context.trainable)
        for tensor in (*model.parameters(), *model.buffers()):
            move_tensor(tensor, torch.device(context.device))
    return model


def move_tensor(tensor: torch.Tensor, device: torch.device) -> None:
    """Moves a parameter or buffer to `device`; the Python object stays the same.

    `Module.to` keeps the object only where torch takes the two devices' tensors for compatible, as
    it does CPU's and CUDA's. Elsewhere (NPU) it makes new parameters: tied weights come apart, and
    an optimizer or engine that holds the old ones goes on with those.
    """
    moved = tensor.detach().to(device)
    if moved.device == tensor.device:
        return
    if torch._has_compatible_shallow_copy_type(tensor, moved):
        tensor.data = moved
    elif isinstance(tensor, torch.nn.Parameter):
        torch.utils.swap_tensors(  # type: ignore[no-untyped-call]
            tensor, torch.nn.Parameter(moved, tensor.requires_grad)
        )
    else:
        torch.utils.swap_tensors(tensor, moved)  # type: ignore[no-untyped-call]


def tokenizer_files(folder: Path) -> list[Path]:
    """Returns the tokenizer's files in a Hugging Face folder, without code and weights."""
    return [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]


def _check_folder(context: PolicyContext) -> None:
    folder = context.model
    if not folder.is_dir():
        raise BackendError(
            f"no model folder {folder}", where=f"roles.{context.role}.model",
            hint="name a folder with config.json, tokenizer files and *.safetensors",
        )  # fmt: skip
    if not (folder / "config.json").is_file():
        raise BackendError(
            f"{folder} has no config.json", where=f"roles.{context.role}.model",
            hint="name a Hugging Face model folder",
        )  # fmt: skip
    if context.fresh or any(folder.glob("*.safetensors")):
        return
    pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
    raise BackendError(
        f"{folder} has no *.safetensors weights",
        where=f"roles.{context.role}.model",
        found="pickled weights (*.bin, *.pt), which are never loaded" if pickled else None,
        hint="save the model with save_pretrained(..., safe_serialization=True)"
        if pickled
        else "copy the weights into the folder",
    )


def _attention_of(kind: Any, config: Any) -> str:
    """Ours where the architecture takes any function; eager where it needs more than SDPA does.

    Capped scores and attention sinks are of the second sort.
    """
    if not kind._supports_sdpa or getattr(config, "attn_logit_softcapping", None):
        return "eager"
    return ATTENTION if kind._supports_attention_backend else "sdpa"


def _config(context: PolicyContext) -> Any:
    from transformers import AutoConfig

    from flowrl_backends.torch.selfcheck import check_lengths

    config = AutoConfig.from_pretrained(
        context.model, local_files_only=True, trust_remote_code=False
    )
    check_lengths(config, context)
    if context.head == "value":
        config.num_labels = 1
        # Also for whoever trains the exported folder with other software.
        config.classifier_dropout = 0.0
    return config


def _model_class(context: PolicyContext, config: Any) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING

    if context.head == "lm":
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if type(config) not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        raise BackendError(
            "Transformers has no value head (token classification) for this architecture",
            where=f"roles.{context.role}.model",
            found=f"{config.model_type} in {context.model}",
            hint="take a critic or reward model of another family, such as Qwen or Llama",
        )
    return MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING[type(config)]


def _pretrained(context: PolicyContext) -> Any:
    config = _config(context)
    kind = _model_class(context, config)
    # Tensors that the folder lacks are initialised, before they are refused or drawn anew below.
    with torch.random.fork_rng(devices=[]):
        model, report = kind.from_pretrained(
            context.model,
            config=config,
            dtype=DTYPES[context.dtype],
            attn_implementation=_attention_of(kind, config),
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    missing = set(report["missing_keys"])
    if context.head == "value":
        unused = set(report["unexpected_keys"])
        missing -= _complete_head(model, missing, unused, context)
        _report_unused(unused, model, context)
    if missing:
        names = sorted(missing)
        raise BackendError(
            f"the weights in {context.model} lack {len(names)} tensors of the model",
            where=f"roles.{context.role}.model",
            found=", ".join(names[:3]) + (" ..." if len(names) > 3 else ""),
            hint="copy all weight files, or check that config.json belongs to them",
        )
    return model


def _complete_head(
    model: Any, missing: set[str], unused: set[str], context: PolicyContext
) -> set[str]:
    """Creates the tensors of the head that a folder lacks, and returns their names.

    A folder of a language model has no head, one of a sequence classifier has no bias, and may call
    its head otherwise than a token classifier of the same architecture does.
    """
    head = value_head(model)
    (prefix,) = (name for name, module in model.named_children() if module is head)
    made = missing & {f"{prefix}.weight", f"{prefix}.bias"}
    other = next((name for name in _HEADS if f"{name}.weight" in unused), None)
    with torch.no_grad():
        if f"{prefix}.weight" in made and other is not None:
            head.weight.copy_(_head_of(context, f"{other}.weight", head.weight.shape))
        elif f"{prefix}.weight" in made:
            draw = torch.Generator().manual_seed(context.seed ^ _HEAD_STREAM)
            spread = float(getattr(model.config, "initializer_range", 0.02))
            head.weight.copy_(torch.randn(head.weight.shape, generator=draw) * spread)
            _log.info("role %s: %s has no value head; a new one", context.role, context.model)
        if f"{prefix}.bias" in made:
            head.bias.zero_()
    return made


def _head_of(context: PolicyContext, name: str, shape: torch.Size) -> torch.Tensor:
    """Returns a tensor of the folder.

    Raises:
        BackendError: It has another shape, as the head computes several numbers.
    """
    for path in sorted(context.model.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            if name not in file.keys():  # noqa: SIM118, an object that is no mapping
                continue
            tensor: torch.Tensor = file.get_tensor(name)
            if tensor.shape == shape:
                return tensor
            raise BackendError(
                "the model's head gives several numbers a position",
                where=f"roles.{context.role}.model",
                found=f"{name} of shape {list(tensor.shape)} in {context.model}",
                expected=f"shape {list(shape)}",
            )
    raise AssertionError(f"{name} is in no file of {context.model}")


def _report_unused(names: Iterable[str], model: Any, context: PolicyContext) -> None:
    """Warns of tensors of the body that the model does not have; ignores other heads."""
    body = f"{model.base_model_prefix}."
    unused = sorted(name for name in names if name.startswith(body))
    if unused:
        _log.warning(
            "role %s: %d tensors in %s are not of this model and are not used: %s",
            context.role,
            len(unused),
            context.model,
            ", ".join(unused[:3]),
        )


def _fresh(context: PolicyContext) -> Any:
    config = _config(context)
    kind = _model_class(context, config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(context.seed)
        model = kind._from_config(
            config, attn_implementation=_attention_of(kind, config), dtype=torch.float32
        )
    # Buffers (rotary frequencies) stay in float32, as from_pretrained leaves them.
    dtype = DTYPES[context.dtype]
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model


@contextlib.contextmanager
def quiet_transformers(*, reports: bool = True) -> Iterator[None]:
    """Disables Transformers' progress bars, as the run has its own display.

    Args:
        reports: True to keep warnings of tensors that only the folder or only the model has.
    """
    from transformers.utils import logging as library

    shown, level = library.is_progress_bar_enabled(), library.get_verbosity()
    library.disable_progress_bar()
    if not reports:
        library.set_verbosity_error()
    try:
        yield
    finally:
        library.set_verbosity(level)
        if shown:
            library.enable_progress_bar()


@contextlib.contextmanager
def _explained(context: PolicyContext) -> Iterator[None]:
    """Converts the libraries' errors while loading to a `BackendError` that names the folder."""
    try:
        yield
    except BackendError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as err:
        text = str(err).strip().splitlines() or [type(err).__name__]
        raise BackendError(
            f"the model in {context.model} cannot be loaded on {context.device}",
            where=f"roles.{context.role}",
            found=f"{type(err).__name__}: {text[0][:200]}",
        ) from err
