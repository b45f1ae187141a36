"""The options that SGLang and vLLM servers are started with.

One server is one replica, or, where experts are divided over the devices of several, these together
(`Layout.server_replicas`). In SGLang `--ep-size` divides `--tp-size`, which counts all devices of a
stage then; attention is divided over those of a replica (`--enable-dp-attention`), and
`--max-running-requests` is shared out among replicas. In vLLM experts are divided over all devices
of a stage, and every other number is that of a replica.

Names are those of `python -m sglang.launch_server` (SGLang, docs "Server Arguments") and of
`vllm serve` (vLLM, docs "Engine Arguments"). Their memory fractions mean different things: SGLang's
`--mem-fraction-static` is of weights and KV cache alone, vLLM's `--gpu-memory-utilization` of all
that the engine takes.
"""

from __future__ import annotations

import math

from flowrl.cost.memory import PhaseMemory
from flowrl.plan.many_form import EngineFlags
from flowrl.plan.ways.candidate import Candidate
from flowrl.plan.ways.tasks import TaskWork

_STATIC = ("parameters", "kv cache")


def engine_flags(
    task: TaskWork,
    candidate: Candidate,
    memory: PhaseMemory,
    *,
    memory_bytes: int,
    max_length: int,
    dtype: str,
    sleeps: bool,
) -> EngineFlags | None:
    """The flags of an engine's task; None where no such server runs it.

    Args:
        memory: Of a device while the engine works.
        memory_bytes: Of the device, all of it.
        sleeps: Others work on its devices, or on some of them, between rollouts.
    """
    layout = candidate.layout
    together = layout.server_replicas
    static = sum(part.nbytes for part in memory.parts if part.name in _STATIC)
    match task.library.name:
        case "sglang":
            flags = [("--tp-size", str(layout.tp * together))]
            if layout.pp > 1:
                flags.append(("--pp-size", str(layout.pp)))
            if together > 1:
                flags += [("--dp-size", str(together)), ("--enable-dp-attention", "")]
            if layout.ep > 1:
                flags.append(("--ep-size", str(layout.ep)))
            flags += [
                ("--dtype", dtype),
                ("--context-length", str(max_length)),
                ("--max-running-requests", str(candidate.slots * together)),
                ("--max-total-tokens", str(candidate.kv_tokens)),
                ("--mem-fraction-static", _fraction(static, memory_bytes)),
            ]
            if sleeps:
                flags.append(("--enable-memory-saver", ""))
        case "vllm":
            flags = [("--tensor-parallel-size", str(layout.tp))]
            if layout.pp > 1:
                flags.append(("--pipeline-parallel-size", str(layout.pp)))
            if together > 1:
                flags.append(("--data-parallel-size", str(together)))
            if layout.ep > 1:
                flags.append(("--enable-expert-parallel", ""))
            flags += [
                ("--dtype", dtype),
                ("--max-model-len", str(max_length)),
                ("--max-num-seqs", str(candidate.slots)),
                ("--gpu-memory-utilization", _fraction(memory.total, memory_bytes)),
            ]
            if sleeps:
                flags.append(("--enable-sleep-mode", ""))
        case _:
            return None
    return EngineFlags(node=task.id, engine=task.library.name, flags=tuple(flags))


def _fraction(nbytes: int, of: int) -> str:
    """Upwards to the second digit: less would not hold what the plan counts on."""
    return f"{min(0.99, math.ceil(100 * nbytes / of) / 100):.2f}"
