"""What devices and programs reach of what they could: every calibrated constant, and on what.

Six sets of rows calibrated them, and all others were held out (`benchmarks/results/
predict_published.md` shows the errors of both):

- K: kernels behind the decode and prefill steps of Qwen3-8B on one H100 (tp 1 to 8) in
  AIConfigurator 0.12.0 (NVIDIA, SGLang 0.5.14); the per-operator times that add up to the rows
  `h100_sxm, Qwen3-8B` of `engine_steps.json`.
- A: in the same way, of Qwen3-8B on A100 (SGLang 0.5.10).
- X: in the same way, of Qwen3-30B-A3B with experts divided over tensor ranks (`moe_ep` 1), and for
  `expert_skew` with whole experts on ranks.
- N: two steps on policy in the performance summaries of NeMo RL (`benchmarks/published/
  nemo_rl.yaml`), one constant each: of Qwen3-30B-A3B on 32 H100 in 0.4, of Qwen3-235B-A22B on 128
  in 0.7.
- W: seconds in which weights reached engines, of models with 9 to 1,000 billion parameters, by
  broadcast, point to point and in place (`benchmarks/published/weight_sync.yaml`).
- S: the stage times of `rlinf_1p5b_8xh100` in `stage_times.yaml` (Qwen2.5-1.5B, 8 H100).

S and N are few rows and many things happen in them: their constants are what was left when all
else was accounted for. W are many frameworks with two constants: half or twice as long is common.
No constant depends on a model, or on a row that is predicted.

Rates are shares of what a large matrix product or a copy reaches on the device, where the
catalogue has that measured; else of that share of the data sheet which the devices that have both
reach on average (H100, H200).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from flowrl.cluster.efficiencies import Efficiencies
from flowrl.cluster.hardware import DeviceSpec

UNMEASURED_FLOPS_SHARE = 0.80
UNMEASURED_BYTES_SHARE = 0.88
"""Of the data sheet, where nothing is measured: 798 and 790 of 989 TFLOP/s, 3.0 of 3.35 and 4.2 of
4.8 TB/s. An H20, whose products are slow beside all else of it, reaches more of them: 132 of 148,
and 84 with FlashAttention 2 (the catalogue has both)."""

MATMUL_FLOPS_SHARE = 0.93
MATMUL_S = 4.0e-6
"""A matrix product (K): `MATMUL_S + max(operations / rate, bytes / rate)`."""

ELEMENTWISE_S = 3.0e-6
"""A norm with its residual, an activation, an embedding (K): that, and its bytes at the rate of
matrix products."""

DECODE_ATTENTION_S = 12.0e-6
"""One layer's attention of one token a row over what it has cached (K)."""

PREFILL_ATTENTION_S = 52.0e-6
PREFILL_ATTENTION_FLOPS_SHARE = 0.75
"""One layer's attention over whole prompts (K): that, its operations, and the bytes of queries,
keys, values and outputs, one after the other."""

EXPERTS_S = 20.0e-6
EXPERT_FLOPS_SHARE = 0.80
EXPERT_BYTES_SHARE = 1.0
EXPERT_PASSES = 5
"""One layer's routed experts (X): that, the weights of the experts that are hit or the operations,
whichever takes longer, and so many times the bytes of each token for each of its experts (copies
in and out of the experts' order, and their sum)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What differs between generations of devices and of the kernels written for them.

    Attributes:
        start_scale: On all starts of kernels and collectives.
        matmul_bytes_share: Of the memory rate, for matrix products.
        decode_attention_bytes_share: For attention over the cache.
        trainer_attention_share: Of the rate of operations, for a trainer's attention.
    """

    start_scale: float
    matmul_bytes_share: float
    decode_attention_bytes_share: float
    trainer_attention_share: float


CURRENT = Generation(
    start_scale=1.0,
    matmul_bytes_share=0.93,
    decode_attention_bytes_share=1.0,
    trainer_attention_share=0.42,
)
"""Hopper (K), and devices of which neither name nor description says a generation: plans have a
note of these. Trainers have FlashAttention 2, which reaches up to 335 TFLOP/s there, forward and
backward (Dao 2023, arXiv 2307.08691, section 4.1); engines have its successor."""

EARLIER = Generation(
    start_scale=1.8,
    matmul_bytes_share=0.87,
    decode_attention_bytes_share=0.58,
    trainer_attention_share=0.82,
)
"""Ampere (A), whose attention kernels are those of FlashAttention 2: 73 % of the data sheet's rate
forward and 63 % backward (the same paper). Taken for Ascend too, whose few rows are slower."""

ASSUMED: Efficiencies = "hopper"
"""Whose are taken of devices that tell no generation."""

_GENERATIONS: Mapping[Efficiencies, Generation] = {"ampere": EARLIER, "hopper": CURRENT}

EXPERT_SKEW_POWER = 0.65
EXPERT_SKEW_MOST = 4.0
"""See `expert_skew` (X)."""

ALL_REDUCE_BASE_S = 2.0e-6
ALL_REDUCE_RANK_S = 0.2e-6
LINK_SHARE = 0.70
"""Collectives inside a node (K): base and rank time, and the volume of a ring at that share of the
link."""

NETWORK_LATENCY_S = 35.0e-6
NETWORK_SHARE = 0.80
"""Between nodes: the start for each doubling of them (N: the engines of Qwen3-235B-A22B lie across
two nodes; an all-reduce of a few bytes between two GPUs of two nodes takes about 20 us, nccl-tests
issue 150, and the host of such an engine is in this figure too); the share of the link is a common
figure of NCCL on 400 Gb/s links, not calibrated."""

ENGINE_HOST_S = 4.0e-3
"""What an engine's host adds to a decode step (S): scheduling, sampling, logprobs, detokenising.
Published kernel times leave it out."""

PREFILL_CHUNK_TOKENS = 8192
"""Of a pass in which prompts enter: the default of SGLang on such devices, and of vLLM."""

TRAINER_SHARE = 0.52
"""What the kernels of a trainer's passes take of its time, but for attention (S, both stages of the
trainer together): the rest are unfused elementwise work, gaps between launches, padding and uneven
micro-batches. Of pure pretraining on H100, published runs of 1 to 70 billion parameters reach 0.65
to 0.8 (MosaicML, llm-foundry's training benchmarks, bfloat16). Of an H100: see `_trainer_share`."""

TRAINER_BALANCE = 266.0
"""Operations that an H100 reaches for each byte that it reaches: 798 TFLOP/s and 3.0 TB/s."""

TRAINER_EXPERTS_S = 1.5e-3
"""A layer's routed experts in a trainer's pass (N: the 30B), before `TRAINER_SHARE`: the host finds
out how many tokens each expert gets, orders them, and starts products and exchanges of their
sizes."""

LOGIT_PASSES = 3
"""Times that a trainer reads or writes float32 logits of a token in one pass; not calibrated: the
cast, the sum of softmax, the pick."""

HOST_LINK_SHARE = 0.80
"""Of the link to host memory, from pinned memory; not calibrated."""

SAVE_BYTES_PER_S = 2.41 * 2**30
RESTORE_BYTES_PER_S = 5.32 * 2**30
"""To the host and back, of what a trainer of other frameworks holds on devices that it shares with
engines; for their published steps, not for plans of ours, whose copies are pinned. From no run:
measured of torch_memory_saver, which slime uses, on a link that reaches 24 GiB/s from pinned memory
(its issue 111). NeMo RL says of its own copies that a logprob pass without them saves 9 s with
Qwen3-235B-A22B and 12 s with Qwen3-30B-A3B (pull request 1404); on 128 and 32 devices, as its
recipes have it, these rates give 12 and 6 s for the optimizer."""

BETWEEN_S = 4.0
"""Of a step in which rollout and training overlap, beside its stages; for published steps of other
frameworks. From no row: NeMo RL says of a step of 66.6 s that 1.4 went to drawing from its buffer,
2.4 to preparing logprobs and training and 0.2 to data (pull request 1052). It is the least of what
is published: in veRL's table of Qwen2.5-Math-7B one step off, on 16 H20, 30 and 40 s are in no
stage (docs/advance/one_step_off.md). On shared devices copies of a trainer's state stand for it."""

SYNC_BUCKET_BYTES = 512 << 20
SYNC_BUCKET_S = 10.0e-3
"""Weights travel in buckets, each with host work of its own; not calibrated."""

SYNC_TENSOR_S = 0.40e-3
SYNC_TENSOR_APART_S = 0.15e-3
"""Each tensor of the checkpoint is gathered, named and loaded by itself (W, medians): in place, and
to engines on devices of their own, whose ranks are sent their parts. It is most of the time where a
layer has a hundred experts: a matrix of theirs is a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What kernels of each class reach on one device, in operations and bytes a second.

    Attributes:
        start_scale: On the starts of kernels.
        trainer_share: What kernels take of a trainer's passes, but for attention.
    """

    flops: float
    nbytes: float
    start_scale: float
    decode_attention_bytes: float
    prefill_attention_flops: float
    trainer_attention_flops: float
    trainer_share: float
    expert_flops: float
    expert_bytes: float


def generation(spec: DeviceSpec) -> Generation:
    """What the device's description says, else by its name (`flowrl.cluster.efficiencies`)."""
    return _GENERATIONS[spec.generation or ASSUMED]


@lru_cache(maxsize=64)
def rates(spec: DeviceSpec) -> Rates:
    """Of a device; a core of a CPU counts as one."""
    flops = spec.measured_flops or spec.flops * UNMEASURED_FLOPS_SHARE
    nbytes = spec.measured_memory_bytes_per_s or spec.memory_bytes_per_s * UNMEASURED_BYTES_SHARE
    kind = generation(spec)
    return Rates(
        flops=flops * MATMUL_FLOPS_SHARE,
        nbytes=nbytes * kind.matmul_bytes_share,
        start_scale=kind.start_scale,
        decode_attention_bytes=nbytes * kind.decode_attention_bytes_share,
        prefill_attention_flops=flops * PREFILL_ATTENTION_FLOPS_SHARE,
        trainer_attention_flops=spec.measured_attention_flops
        or flops
        * (PREFILL_ATTENTION_FLOPS_SHARE if spec.type == "cpu" else kind.trainer_attention_share),
        trainer_share=TRAINER_SHARE if spec.type == "cpu" else _trainer_share(flops / nbytes),
        expert_flops=flops * EXPERT_FLOPS_SHARE,
        expert_bytes=nbytes * EXPERT_BYTES_SHARE,
    )


def _trainer_share(balance: float) -> float:
    """Of a device that reaches so many operations for each byte.

    What kernels leave of a trainer's time is memory traffic and gaps, which take as long where
    products are slower: `1 / (1 + rest)`, with the rest of an H100, `1 / TRAINER_SHARE - 1` of the
    products' time, less by as much as the balance is. The same training takes 2.3 times as long on
    an A100 as on an H100, though its products take 3.2 times as long (llm-foundry's benchmarks: MFU
    60 and 64 % where it is 42 and 46 % on H100). No constant is calibrated for it.
    """
    return 1.0 / (1.0 + (1.0 / TRAINER_SHARE - 1.0) * balance / TRAINER_BALANCE)


def expert_skew(ep: int) -> float:
    """How much more the fullest of `ep` ranks with whole experts has to do than the mean one (X).

    `ep^0.65`, at most 4: choices of experts follow a power law in those rows. Trainers balance
    their experts, so a trainer's passes leave it out.
    """
    return min(math.pow(ep, EXPERT_SKEW_POWER), EXPERT_SKEW_MOST)
