"""Rows of published runs in our words, whoever wrote them.

Keys go by many names, numbers come as text (`1.2e8` is text in YAML, and so is `13,975`), devices
as `8xH100` or `{gpu: H100, num_gpus: 8}`, an engine as its name. `in_our_words` makes one form of
all; it says what it passed over, what is given twice with different values, and what a row says
that the model of costs does not have: such a row must not count as if it had not said so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flowrl.testing.published_rows import Row

__all__ = ["Words", "as_bool", "as_number", "in_our_words"]

_NAMES = {
    "model": ("model_name", "base_model"),
    "devices": ("hardware", "cluster", "accelerators"),
    "num_sequences": ("sequences_per_step", "samples_per_step", "rollout_samples"),
    "prompts_per_step": (
        *("num_prompts", "num_prompts_per_step", "prompts", "rollout_batch_size"),
    ),
    "group_size": (
        *("samples_per_prompt", "num_generations", "rollout_n", "n_samples_per_prompt"),
        *("generations_per_prompt", "num_generations_per_prompt", "responses_per_prompt"),
        *("num_samples_per_prompt", "samples_per_group", "rollout.n", "n"),
    ),
    "mean_prompt_tokens": (
        *("prompt_tokens_mean", "mean_prompt_length", "prompt_length/mean", "mean_prompt_len"),
        *("avg_prompt_length", "avg_prompt_tokens", "avg_prompt_len", "mean_input_tokens"),
    ),
    "mean_response_tokens": (
        *("response_tokens_mean", "mean_response_length", "response_length/mean"),
        *("rollout/response_len/mean", "mean_generated_tokens", "avg_response_tokens"),
        *("avg_response_length", "mean_response_len", "avg_response_len", "mean_output_tokens"),
    ),
    "mean_total_tokens": (
        *("mean_sequence_tokens", "mean_tokens", "mean_sequence_length", "avg_sequence_length"),
        *("mean_seq_len", "avg_seq_len", "mean_tokens_per_sample"),
    ),
    "tokens_per_step": ("total_tokens", "total_tokens_per_step", "perf/total_num_tokens"),
    "max_context": ("context_length", "max_total_tokens", "max_sequence_tokens"),
    "max_prompt_tokens": ("max_prompt_length",),
    "max_response_tokens": ("max_response_length", "max_new_tokens", "rollout_max_response_len"),
    "mini_batches": ("num_minibatches", "num_mini_batches"),
    "train_batch_sequences": (),
    "micro_tokens": ("micro_batch_tokens", "max_tokens_per_micro_batch"),
    "logprob_micro_tokens": (),
    "logprob_passes": (),
    "recompute": ("activation_checkpointing", "recompute_granularity"),
    "offload": ("optimizer_offload", "offload_train"),
    "compiled": ("torch_compile", "use_torch_compile"),
    "engine": ("rollout_engine",),
    "train_parallel": ("training_parallel", "actor_parallel"),
    "rollout_parallel": ("generation_parallel", "inference_engine_parallel"),
    "train_devices": ("training_devices", "trainer_devices"),
    "rollout_devices": ("generation_devices", "inference_devices"),
    "staleness": (
        *("max_staleness", "staleness_threshold", "off_policy_steps", "max_off_policyness"),
        "max_head_offpolicyness",
    ),
    "asynchronous": ("is_async", "async", "async_training", "fully_async"),
    "schedule": ("policy", "on_off_policy"),
    "mode": (),
    "placement": ("deployment",),
    "colocated": ("collocated", "colocate"),
    "train_backend": ("trainer", "training_backend"),
}
"""What a key of a row may be called besides."""

_DEVICE_NAMES = {
    "type": ("gpu", "device", "name", "kind", "accelerator"),
    "num": ("count", "total", "num_gpus", "num_devices", "gpus", "num_npus", "npus"),
    "nodes": ("num_nodes", "nnodes"),
    "node_size": (
        *("per_node", "devices_per_node", "gpus_per_node", "n_gpus_per_node", "npus_per_node"),
    ),
    "rollout": (),
    "train": (),
}

_ENGINE_NAMES = {
    "name": ("backend",),
    "max_running_requests": ("max_num_seqs", "slots"),
    "mem_fraction_static": ("gpu_memory_utilization", "memory_share"),
}

_WORDS = frozenset(
    {"model", "engine", "schedule", "mode", "placement", "train_backend", "recompute"}
)
"""Keys of a row whose text is no number."""

_TOLD = frozenset(
    {
        *("name", "source", "url", "caution", "note", "notes", "comment", "complete", "missing"),
        *("from_figure", "measured", "framework", "version", "commit", "date", "algorithm"),
        *("model_shape", "dataset", "release", "param_offload"),
    }
)
"""Keys that say nothing that a prediction could take in, or that are read elsewhere."""

_INSTEAD = (
    {"mean_response_tokens", "mean_total_tokens", "tokens_per_step"},
    {"num_sequences", "prompts_per_step"},
)
"""Keys that stand for each other: where a run has one of them, its row's others do not hold."""

_NOT_MODELLED = {
    **dict.fromkeys(("lora", "lora_rank", "peft"), "adapters"),
    **dict.fromkeys(("critic", "critic_parallel", "critic_model", "value_model"), "a critic"),
    **dict.fromkeys(
        ("optimizer_cpu_offload", "cpu_offload", "offload_optimizer"), "an optimizer on the host"
    ),
    **dict.fromkeys(
        ("speculative", "speculative_decoding", "draft_tokens", "draft_model"), "drafted tokens"
    ),
    **dict.fromkeys(("enforce_eager", "disable_cuda_graph"), "an engine without graphs of kernels"),
    **dict.fromkeys(("multi_turn", "tools"), "turns of an environment"),
    **dict.fromkeys(("partial_rollout", "partial_rollouts"), "responses continued in a later step"),
}
_REPEATED = {
    **dict.fromkeys(
        ("ppo_epochs", "num_epochs", "update_epochs"), "several passes of training over a batch"
    ),
    **dict.fromkeys(("turns", "num_turns", "max_turns"), "turns of an environment"),
}
_PRECISIONS = (
    *("precision", "dtype", "rollout_precision", "train_precision", "rollout_dtype"),
    *("train_dtype", "quantization", "kv_cache_dtype"),
)
_HALF = ("bf16", "bfloat16", "fp16", "float16", "half", "auto", "none")
"""Two bytes, which take the same time whichever they are."""

_SECTIONS = ("engine", "train_parallel", "rollout_parallel")

_KNOWN = frozenset(
    {
        *(other for key, others in _NAMES.items() for other in (key, *others)),
        *(*_NOT_MODELLED, *_REPEATED, *_PRECISIONS, *_TOLD),
    }
)
_OFF = ("", "0", "none", "null", "false", "no", "off", "disabled")
_NUMBER = re.compile(r"(\d{1,3}([,_]\d{3})+|\d+)(\.\d*)?(e[+-]?\d+)?", re.IGNORECASE)
_TIMES = re.compile(
    r"(\d+)(?:\s*[x×*]\s*|\s+)(\S.*?)(?:\s+(?:GPU|NPU)s?)?|(\S.*?)\s+[x×*]\s*(\d+)", re.IGNORECASE
)


_SIZE = re.compile(r"(?<![a-z])(v?pp|etp|tp|dp|cp|ep|sp|fsdp|ulysses)[\s=:]*(\d+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """A row in our words.

    Attributes:
        notes: What was passed over.
        refused: Why it cannot be predicted.
    """

    row: dict[str, object]
    notes: tuple[str, ...]
    refused: tuple[str, ...]


def as_number(value: object) -> object:
    """The number that a text writes; anything else as it is.

    >>> as_number("13,975"), as_number("1.2e8"), as_number("14k")
    (13975, 120000000, '14k')
    """
    if not isinstance(value, str) or not _NUMBER.fullmatch(value.strip()):
        return value
    number = float(value.replace(",", "").replace("_", ""))
    return int(number) if number.is_integer() else number


def as_bool(value: object) -> bool | None:
    """What a flag says, written in any way; None for what is no flag.

    >>> as_bool("no"), as_bool(1), as_bool("partly")
    (False, True, None)
    """
    text = str(value).strip().lower()
    if text in ("true", "yes", "on", "1"):
        return True
    return False if value is not None and text in _OFF[1:] else None


def in_our_words(row: Row, run: Row) -> Words:
    """A row with one of its runs, whose keys hold before those of the row."""
    reader = _Translator()
    common = reader.names(row, _NAMES, "")
    own = reader.names(run, _NAMES, "")
    for names in _INSTEAD:
        if names & own.keys():
            common = {key: value for key, value in common.items() if key not in names}
    found = {**common, **own}
    for key in ("devices", "rollout_devices", "train_devices"):
        if key in found:
            found[key] = reader.devices(found[key], key)
    engine = found.get("engine")
    if isinstance(engine, str):
        found["engine"] = {"name": engine}
    elif isinstance(engine, Mapping):
        found["engine"] = reader.section(engine, _ENGINE_NAMES, "engine")
    for key in _NAMES.keys() - _WORDS:
        if key in found:
            found[key] = as_number(found[key])
    for key in ("train_parallel", "rollout_parallel"):
        found.update({key: written} if (written := _layout(found.get(key))) else {})
    if isinstance(found.get("model"), Mapping):
        found["model"] = found["model"].get("name")  # type: ignore[attr-defined]
    unknown = [str(key) for key in (*row, *run) if _plain(key) not in _KNOWN]
    if unknown:
        reader.notes.append(f"ignored: {', '.join(unknown)}")
    reader.refused.extend(_not_modelled(found))
    return Words(row=found, notes=tuple(reader.notes), refused=tuple(reader.refused))


class _Translator:
    """Finds keys by any of their names, and collects what it could not place."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.refused: list[str] = []

    def names(
        self, given: Row, names: Mapping[str, tuple[str, ...]], where: str
    ) -> dict[str, object]:
        """With our names for keys that have one; the others as they are, in lower case."""
        ours = {other: key for key, others in names.items() for other in (key, *others)}
        found: dict[str, object] = {}
        for key, value in given.items():
            name = ours.get(_plain(key), _plain(key))
            before = found.get(name)
            if before is not None and value is not None and as_number(before) != as_number(value):
                self.refused.append(f"{where}{name} is given twice: {before!r} and {value!r}")
            if value is not None or name not in found:
                found[name] = value
        return found

    def section(
        self, given: Row, names: Mapping[str, tuple[str, ...]], where: str
    ) -> dict[str, object]:
        """Of a row, with numbers for text."""
        found = self.names(given, names, f"{where}.")
        unknown = [key for key in found if key not in names and key not in _KNOWN]
        if unknown:
            self.notes.append(f"{where}: {', '.join(unknown)} ignored")
        return {key: as_number(value) for key, value in found.items()}

    def devices(self, given: object, where: str) -> object:
        """As a section; a number of a pool stays one."""
        if isinstance(given, str) and (found := _TIMES.fullmatch(given.strip())):
            num, kind, other_kind, other_num = found.groups()
            return {"type": (kind or other_kind).strip(), "num": int(num or other_num)}
        if isinstance(given, Mapping):
            return self.section(given, _DEVICE_NAMES, where)
        whole = isinstance(given, int) and not isinstance(given, bool)
        return {"num": given} if whole and where == "devices" else given


def _layout(given: object) -> dict[str, int] | None:
    """Sizes that a text writes one after the other; None where it writes anything else.

    >>> _layout("tp4pp2"), _layout("TP=2, DP=4"), _layout("sp4fsdp8"), _layout("fsdp")
    ({'tp': 4, 'pp': 2}, {'tp': 2, 'dp': 4}, {'fsdp': 8, 'ulysses': 4}, None)
    """
    if not isinstance(given, str):
        return None
    parts = _SIZE.findall(given)
    if not parts or _SIZE.sub("", given).strip(" ,;/x*-+_"):
        return None
    sizes = {name.lower(): int(size) for name, size in parts}
    if "fsdp" in sizes and "sp" in sizes:
        sizes["ulysses"] = sizes.pop("sp")
    return sizes


def _plain(key: object) -> str:
    return str(key).strip().lower().replace("-", "_")


def _not_modelled(row: Row) -> Iterator[str]:
    """What the row says, in any of its sections, that no part of a prediction takes in."""
    for where in ("", *_SECTIONS):
        part = row.get(where) if where else row
        if not isinstance(part, Mapping):
            continue
        given = {_plain(key): value for key, value in part.items() if value is not None}
        prefix = f"{where}." if where else ""
        for key, value in given.items():
            told = f"{prefix}{key} is {value!r}"
            if key in _NOT_MODELLED and value not in ({}, []) and str(value).lower() not in _OFF:
                yield f"{_NOT_MODELLED[key]}: not modelled ({told})"
            elif key in _REPEATED and as_number(value) != 1:
                yield f"{_REPEATED[key]}: not modelled ({told})"
            elif key in _PRECISIONS and str(value).lower() not in _HALF:
                yield f"only bfloat16 is modelled: {told}"
    if str(row.get("algorithm")).lower() == "ppo" and row.get("critic") is None:
        yield "a critic: not modelled (algorithm is ppo)"
