"""Rows of published runs, read into what a prediction needs; each assumption is a note.

A row names `model`, `devices: {type, num}`, `num_sequences` (or `prompts_per_step`), `group_size`,
`mean_prompt_tokens`, `mean_response_tokens` (or `tokens_per_step` or `mean_total_tokens`, of which
the prompt is taken away), `max_context` (or `max_prompt_tokens` and `max_response_tokens`),
`train_parallel` and `rollout_parallel` (`tp`, `pp`, `dp`, `cp`, `ep`, `fsdp`, `zero`), and what was
`measured`, of one run or of several by name. A run of several may give any of these keys anew.
`flowrl.testing.published_words` has the other names that keys go by.

Rollout and training on devices of their own: `rollout_devices` and `train_devices` (a number, or
`{type, num}`), or `devices: {type, num, rollout, train}`, or layouts that fill them together.
A run is asynchronous where `asynchronous`, `staleness` or `schedule` says so, or its name does.
`offload: false` says that a trainer's state stays where it shares its devices with a rollout;
`compiled: true` that the modules of a trainer that divides everything are fused.

What a row lacks or contradicts is collected, so that all of it is told at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast, get_args

from flowrl.cluster.hardware import Machine
from flowrl.cost.activations import Recompute
from flowrl.cost.layout import Layout
from flowrl.cost.lengths import ConstantLengths, Lengths, LognormalLengths
from flowrl.cost.models import ModelShape
from flowrl.cost.role_memory import Shard, kv_capacity
from flowrl.cost.sharding import stage_parameters
from flowrl.errors import FlowError
from flowrl.testing.published_layout import read_layout
from flowrl.testing.published_rows import (
    NODE_SIZE,
    Row,
    Unusable,
    file_name,
    is_positive,
    machine_of,
    shape_of,
)
from flowrl.testing.published_words import Words, as_bool, in_our_words

__all__ = ["SIGMA", "Job", "Pool", "is_asynchronous", "read_job"]

SIGMA = 1.0
"""Of the logarithm of response lengths: no row publishes it."""

CACHE_SHARE = 0.85
"""Of a device's memory, for an engine's weights and cache, where a row does not say."""

DEFAULT_SLOTS = 256
"""Samples that an engine decodes at once, where a row says neither how many nor which engine."""

VLLM_SLOTS, SGLANG_SLOTS = 1024, 2048
"""Likewise, where it names the engine, by that engine's own default: of vLLM on devices of at least
70 GiB that are no A100, `DEFAULT_SLOTS` on others (`EngineArgs.get_batch_defaults`); of SGLang at
least so many (`max_running_requests` of its memory pool). What the cache holds bounds both."""

MICRO_TOKENS = 4096
"""Tokens of a micro-batch, at least, where a row gives the context alone."""

MOST = 10_000_000
"""Of anything that is counted; more is a slip, and beyond what lengths can be drawn for."""

_ASYNCHRONOUS = {"off", "async", "asynchronous", "overlap", "overlapped"}
_APART = {"disaggregated", "disaggregate", "separate", "separated", "apart"}

_EAGER = ("fsdp", "deepspeed", "dtensor", "transformers", "trl")
"""In a trainer's name, for those that train the modules of transformers as they stand."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Devices of one kind, and how a role is divided over them."""

    machine: Machine
    num: int
    layout: Layout
    shard: Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run, understood.

    Attributes:
        apart: Rollout and training have devices of their own.
        staleness: How many publications old samples may be; 0 on policy.
        samples: Of a step, all groups together.
        slots: Samples that one engine decodes at once.
        kv_tokens: Tokens whose keys and values one engine holds.
        micro_tokens: Of a packed micro-batch on one replica; `logprob_micro_tokens` likewise.
        logprob_passes: Forward passes over the batch in a step, beside the update's.
        offload: The trainer's weights and optimizer are on the host during rollouts.
        eager: The trainer's modules are those of transformers, an operation a kernel.
        notes: What was assumed because the row does not say.
    """

    shape: ModelShape
    train: Pool
    rollout: Pool
    apart: bool
    staleness: int
    samples: int
    group_size: int
    prompt_tokens: float
    lengths: Lengths
    slots: int
    kv_tokens: int
    recompute: Recompute
    mini_batches: int
    micro_tokens: int
    logprob_micro_tokens: int
    logprob_passes: int
    offload: bool
    eager: bool
    notes: tuple[str, ...]

    @property
    def num_devices(self) -> int:
        """Of all pools."""
        return self.train.num + (self.rollout.num if self.apart else 0)


def is_asynchronous(name: str) -> bool:
    """Whether a run's name says so.

    >>> is_asynchronous("one_step_off"), is_asynchronous("offload")
    (True, False)
    """
    return bool(_ASYNCHRONOUS & set(re.split(r"[^a-z]+", name.lower())))


def read_job(row: Row, given: Row, run: str, models: Path) -> Job:
    """A run of a row.

    Args:
        given: What the run says besides what was measured; it holds before what its row says.

    Raises:
        Unusable: with all that it lacks.
    """
    return _Reader(in_our_words(row, given)).job(run, models)


class _Reader:
    """Reads a row and collects what it lacks."""

    def __init__(self, words: Words) -> None:
        self._row = words.row
        self._missing = list(words.refused)
        self._notes = list(words.notes)

    def job(self, run: str, models: Path) -> Job:
        """See `read_job`."""
        pools = self._pools(run)
        group = self._whole(self._row, "group_size") or 1
        samples = self._samples(group)
        prompt, response = self._means(samples)
        context, longest = self._longest(prompt)
        shape = self._try(
            lambda: shape_of(self._row.get("model"), self._row.get("model_shape"), models)
        )
        lengths = None if self._missing else self._try(lambda: _lengths(response, longest))
        slots = self._slots(pools[1].machine if pools else None)
        share = self._cache_share()
        recompute, mini_batches = self._recompute(), self._mini_batches(samples)
        micro = self._micro_tokens(context)
        logprob_micro = self._whole(self._row, "logprob_micro_tokens", absent=micro) or micro
        passes = self._passes()
        offload = self._offload(apart=pools is not None and pools[2])
        if shape is not None and pools is not None:
            for key, pool in zip(("train_parallel", "rollout_parallel"), pools[:2], strict=True):
                self._missing += [f"{key}: {why}" for why in _undivided(shape, pool.layout)]
        if self._missing or not (shape and pools and lengths):
            raise Unusable(*self._missing)
        train, rollout, apart = pools
        model = str(self._row["model"])
        if file_name(model) != model.lower():
            self._notes.append(f"{model}: sizes of {file_name(model)}")
        return Job(
            shape=shape,
            train=train,
            rollout=rollout,
            apart=apart,
            staleness=self._staleness(run),
            samples=samples,
            group_size=group,
            prompt_tokens=prompt,
            lengths=lengths,
            slots=slots,
            kv_tokens=_kv_tokens(shape, rollout, share),
            recompute=recompute,
            mini_batches=mini_batches,
            micro_tokens=micro,
            logprob_micro_tokens=logprob_micro,
            logprob_passes=passes,
            offload=offload,
            eager=self._eager(train),
            notes=tuple(self._notes),
        )

    # Devices and layouts.

    def _pools(self, run: str) -> tuple[Pool, Pool, bool] | None:
        """Of training and of rollout, and whether they are apart."""
        devices = self._devices()
        total = self._count(devices) if devices else 0
        rollout = self._own(devices, "rollout_devices", "rollout")
        train = self._own(devices, "train_devices", "train")
        if rollout and train and total and rollout[1] + train[1] != total:
            self._missing.append(
                f"rollout_devices and train_devices are {rollout[1] + train[1]}, not {total}"
            )
            return None
        if total and bool(rollout) != bool(train):
            rest = total - (rollout or train or ("", 0))[1]
            if rest < 1:
                self._missing.append("no devices are left for the other pool")
                return None
            rollout, train = rollout or (None, rest), train or (None, rest)
        together = None if rollout and train else self._together(total)
        if together is not None:
            rollout, train = (None, together[0]), (None, together[1])
        if self._asynchronous(run) and not (rollout and train):
            self._missing.append(
                "rollout_devices and train_devices are missing: stages of this run overlap over "
                "steps"
            )
        elif self._said_apart() and not (rollout and train):
            self._missing.append(
                "rollout_devices and train_devices are missing: each has devices of its own"
            )
        first = self._pool("train_parallel", devices, train, total)
        second = self._pool("rollout_parallel", devices, rollout, total)
        if first is None or second is None:
            return None
        return first, second, bool(rollout and train)

    def _devices(self) -> Row:
        """The section of all devices; pools with kinds and numbers of their own need none."""
        own = [self._row.get(key) for key in ("rollout_devices", "train_devices")]
        if self._row.get("devices") is None and all(isinstance(pool, Mapping) for pool in own):
            return {}
        return self._section("devices")

    def _together(self, total: int) -> tuple[int, int] | None:
        """Devices of rollout and of training where the layouts fill all of them together."""
        sizes = []
        for key in ("rollout_parallel", "train_parallel"):
            given = self._row.get(key)
            try:
                found = read_layout(key, given if isinstance(given, Mapping) else {}, None)
            except Unusable:
                return None
            if "dp" not in found.named and "fsdp" not in found.named:
                return None
            sizes.append(found.layout.num_devices)
        if sum(sizes) != total or total in sizes:
            return None
        self._notes.append(f"rollout and training taken to be apart, on {sizes[0]} and {sizes[1]}")
        return sizes[0], sizes[1]

    def _own(self, devices: Row, key: str, short: str) -> tuple[str | None, int] | None:
        """Type, where it has one of its own, and number of a pool."""
        found = self._row.get(key)
        if found is None:
            found = devices.get(short)
        if found is None:
            return None
        if isinstance(found, Mapping):
            name = found.get("type")
            return (str(name) if name is not None else None, self._count(found, key))
        if isinstance(found, int) and not isinstance(found, bool) and found > 0:
            return None, found
        self._missing.append(f"{key} is no whole number above 0: {found!r}")
        return None

    def _count(self, devices: Row, name: str = "devices") -> int:
        num = devices.get("num")
        nodes, size = devices.get("nodes"), devices.get("node_size")
        if num is None and is_positive(nodes):
            if not is_positive(size):
                self._notes.append(f"{name}: {NODE_SIZE} devices a node")
            return int(nodes * (size if is_positive(size) else NODE_SIZE))
        if isinstance(num, int) and not isinstance(num, bool) and num > 0:
            return num
        if num is None:
            self._missing.append(f"{name}.num is missing")
        else:
            self._missing.append(f"{name}.num is no whole number above 0: {num!r}")
        return 0

    def _pool(
        self, key: str, devices: Row, own: tuple[str | None, int] | None, total: int
    ) -> Pool | None:
        given = self._section(key)
        if key == "train_parallel" and given:
            given = {"strategy": self._row.get("train_backend"), **given}
        name = own[0] if own and own[0] is not None else devices.get("type")
        if name is None:
            if devices and "devices.type is missing" not in self._missing:
                self._missing.append("devices.type is missing")
            return None
        machine = self._try(lambda: machine_of(name, node_size=devices.get("node_size")), once=True)
        num = own[1] if own else total
        if not given or not num:
            return None
        found = self._try(lambda: read_layout(key, given, num))
        if found is None or machine is None:
            return None
        self._notes.extend(found.notes)
        taken = f"{name} taken for {machine.spec.name}"
        if str(name) != machine.spec.name and taken not in self._notes:
            self._notes.append(taken)
        return Pool(machine=machine, num=num, layout=found.layout, shard=found.shard)

    def _asynchronous(self, run: str) -> bool:
        row = self._row
        said = as_bool(row.get("asynchronous"))
        if said is None and row.get("asynchronous") is not None:
            self._missing.append(f"asynchronous is true or false: {row['asynchronous']!r}")
        if said is None and row.get("staleness") is not None:
            return bool(row["staleness"])
        return is_asynchronous(self._schedule(run)) if said is None else said

    def _said_apart(self) -> bool:
        """Whether words say that rollout and training have devices of their own."""
        words = " ".join(str(self._row.get(key, "")) for key in ("placement", "mode", "schedule"))
        apart = not _APART.isdisjoint(re.split(r"[^a-z]+", words.lower()))
        return apart or as_bool(self._row.get("colocated")) is False

    def _schedule(self, run: str) -> str:
        """What says in words how stages follow each other."""
        return str(self._row.get("schedule") or self._row.get("mode") or run)

    def _staleness(self, run: str) -> int:
        """Publications that samples may be old; in words `one_step_off` or `8-step off`."""
        if not self._asynchronous(run):
            return 0
        found = self._row.get("staleness")
        if is_positive(found):
            return max(1, math.ceil(found))
        if steps := re.search(r"(\d+)[\W_]*(?:step)?s?[\W_]*off", self._schedule(run).lower()):
            return max(1, int(steps[1]))
        if "one" not in self._schedule(run).lower():
            self._notes.append("staleness taken for 1")
        return 1

    # The batch and its lengths.

    def _samples(self, group: int) -> int:
        row = self._row
        if row.get("num_sequences") is None and row.get("prompts_per_step"):
            return (self._whole(row, "prompts_per_step") or 1) * group
        samples = self._whole(row, "num_sequences") or 1
        prompts = self._whole(row, "prompts_per_step", absent=None)
        if prompts is not None and row.get("group_size") and prompts * group != samples:
            self._missing.append(
                f"num_sequences {samples} is not {prompts} prompts_per_step of {group} samples"
            )
        return samples

    def _means(self, samples: int) -> tuple[float, float]:
        """Mean tokens of a prompt and of a response."""
        row = self._row
        prompt = self._number(row, "mean_prompt_tokens")
        if row.get("mean_response_tokens") is not None:
            response = self._number(row, "mean_response_tokens")
            self._compare_totals(samples, prompt + response)
            return prompt, response
        if row.get("mean_total_tokens") is not None:
            mean, said = self._number(row, "mean_total_tokens"), "mean_total_tokens"
        elif row.get("tokens_per_step") is not None:
            mean, said = self._number(row, "tokens_per_step") / samples, "tokens_per_step"
        else:
            return prompt, self._number(row, "mean_response_tokens")
        if not self._missing and mean <= prompt:
            self._missing.append(f"{said} leaves no room for responses: {mean:g} tokens a sequence")
            return prompt, 1.0
        self._notes.append(f"{said}: mean responses of {mean - prompt:.0f} tokens beside prompts")
        return prompt, mean - prompt

    def _compare_totals(self, samples: int, mean: float) -> None:
        """Says where a total beside mean lengths is another one, which is not taken then."""
        for key, ours in (("mean_total_tokens", mean), ("tokens_per_step", samples * mean)):
            told = self._row.get(key)
            if is_positive(told) and not 0.9 <= told / ours <= 1.1:
                self._notes.append(f"{key} {told:g} not taken: mean lengths make {ours:.6g}")

    def _longest(self, prompt: float) -> tuple[int, float]:
        """Tokens of the longest sample, and of the longest response."""
        row = self._row
        response = self._whole(row, "max_response_tokens", absent=None)
        if row.get("max_context") is not None:
            context = int(self._number(row, "max_context"))
            room = context - prompt
            return context, room if response is None else min(room, response)
        if response is not None:
            longest = self._whole(row, "max_prompt_tokens", absent=None)
            if longest is None:
                longest = math.ceil(prompt)
                self._notes.append(f"longest prompt taken for the mean one, {longest} tokens")
            return response + longest, response
        self._missing.append("max_context is missing")
        return 1, 1.0

    # The engine and the trainer.

    def _engine(self) -> Row:
        engine = self._row.get("engine")
        return engine if isinstance(engine, Mapping) else {}

    def _slots(self, machine: Machine | None) -> int:
        found = self._whole(self._engine(), "max_running_requests", absent=None)
        if found is None:
            found = self._usual_slots(machine)
            self._notes.append(f"engine.max_running_requests taken for {found}")
        return found

    def _usual_slots(self, machine: Machine | None) -> int:
        engine = self._row.get("engine")
        name = str(engine.get("name") if isinstance(engine, Mapping) else engine).lower()
        if "sglang" in name:
            return SGLANG_SLOTS
        if "vllm" in name and machine is not None:
            spec = machine.spec
            large = spec.memory_bytes >= 70 * 2**30 and not spec.name.startswith("A100")
            return VLLM_SLOTS if large else DEFAULT_SLOTS
        return DEFAULT_SLOTS

    def _cache_share(self) -> float:
        """Of the device's memory, for weights and cache."""
        share = self._engine().get("mem_fraction_static")
        if is_positive(share) and share <= 1:
            return float(share)
        if share is not None:
            self._missing.append(f"engine: share of the memory is none above 0: {share!r}")
        self._notes.append(f"engines give {CACHE_SHARE:.0%} of the memory to weights and cache")
        return CACHE_SHARE

    def _recompute(self) -> Recompute:
        found = self._row.get("recompute")
        if found is None:
            self._notes.append("recompute taken for full")
            return "full"
        if (flag := as_bool(found)) is not None:
            return "full" if flag else "none"
        for known in get_args(Recompute):
            if str(found).lower() == known:
                return cast(Recompute, known)
        self._missing.append(f"recompute is one of {', '.join(get_args(Recompute))}: {found!r}")
        return "full"

    def _offload(self, *, apart: bool) -> bool:
        """Whether a trainer's state leaves its devices for the rollout; on devices of its own it
        never does."""
        found = self._row.get("offload")
        if found is None:
            if not apart:
                self._notes.append("offload: the trainer's state to the host and back each step")
            return not apart
        if (flag := as_bool(found)) is not None:
            return flag and not apart
        self._missing.append(f"offload is true or false: {found!r}")
        return False

    def _eager(self, train: Pool) -> bool:
        """Trainers that divide everything among data ranks, and those that are known for modules of
        transformers, if nobody says that they compile or are Megatron's."""
        named = str(self._row.get("train_backend")).lower()
        eager = train.shard == "full" or any(name in named for name in _EAGER)
        said = as_bool(self._row.get("compiled"))
        if "megatron" in named or not eager or said:
            return False
        if said is None:
            self._notes.append("train_parallel: modules of transformers, not compiled")
        return True

    def _mini_batches(self, samples: int) -> int:
        row = self._row
        if row.get("train_batch_sequences") is not None:
            return max(1, round(samples / self._number(row, "train_batch_sequences")))
        return self._assumed("mini_batches", 1, "one optimizer step")

    def _passes(self) -> int:
        """Of logprobs; none where those of the rollout are taken."""
        if self._row.get("logprob_passes") in (0, False):
            return 0
        return self._assumed("logprob_passes", 1, "one pass, or as many as were measured")

    def _micro_tokens(self, context: int) -> int:
        found = self._whole(self._row, "micro_tokens", absent=None)
        if found is not None:
            return found
        taken = max(MICRO_TOKENS, context)
        self._notes.append(f"micro-batches packed to {taken} tokens")
        return taken

    # Values.

    def _assumed(self, key: str, absent: int, note: str) -> int:
        found = self._whole(self._row, key, absent=None)
        if found is None:
            self._notes.append(f"{key}: {note}")
        return found or absent

    def _whole(self, row: Row, key: str, absent: int | None = 0) -> int | None:
        """A whole number above 0; missing where there is none and `absent` is 0."""
        value = row.get(key)
        if value is None:
            if absent == 0:
                self._missing.append(f"{key} is missing")
            return absent
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self._missing.append(f"{key} is no whole number above 0: {value!r}")
            return absent
        if value > MOST:
            self._missing.append(f"{key} is above {MOST:,}: {value}")
            return absent
        return value

    def _section(self, key: str) -> Row:
        found = self._row.get(key)
        if isinstance(found, Mapping) and found:
            return found
        odd = found is not None and not isinstance(found, Mapping)
        self._missing.append(f"{key} is no object: {found!r}" if odd else f"{key} is missing")
        return {}

    def _number(self, row: Row, key: str) -> float:
        value = row.get(key)
        if is_positive(value):
            return float(value)
        if value is None:
            self._missing.append(f"{key} is missing")
        else:
            self._missing.append(f"{key} is no number above 0: {value!r}")
        return 1.0

    def _try(self, make: Callable[[], T], *, once: bool = False) -> T | None:
        try:
            return make()
        except Unusable as why:
            reasons = list(why.reasons)
        except FlowError as error:
            reasons = [" ".join(str(error).split())]
        self._missing.extend(r for r in reasons if not once or r not in self._missing)
        return None


def _lengths(mean: float, longest: float) -> Lengths:
    if longest <= 1:
        raise Unusable("the longest response has no room beside the prompt")
    if mean >= longest:
        if mean > longest * 1.001:
            raise Unusable(
                f"the mean response of {mean:g} tokens is above the longest, {longest:g}"
            )
        return ConstantLengths(tokens=longest)
    return LognormalLengths(mean=mean, sigma=SIGMA, maximum=longest)


def _kv_tokens(shape: ModelShape, rollout: Pool, share: float) -> int:
    layout = rollout.layout
    stages = stage_parameters(shape, layout.tp, layout.pp, layout.ep)
    weights = 2 * max(stage.total for stage in stages)
    free = int(rollout.machine.spec.memory_bytes * share) - weights
    if free <= 0:
        gib = weights / 2**30
        raise Unusable(
            f"rollout_parallel leaves no room for a cache: {gib:.1f} GiB of weights a device"
        )
    return kv_capacity(shape, layout, free_bytes=free)


def _undivided(shape: ModelShape, layout: Layout) -> Iterator[str]:
    """Why a layout cannot have a model."""
    if layout.pp > shape.num_layers:
        yield f"pp {layout.pp} is more than the {shape.num_layers} layers"
    if shape.num_heads % layout.tp:
        yield f"tp {layout.tp} does not divide {shape.num_heads} attention heads"
    if shape.experts is not None and shape.experts.num_experts % layout.ep:
        yield f"ep {layout.ep} does not divide {shape.experts.num_experts} experts"
