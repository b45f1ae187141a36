"""A vLLM server, started or connected to, over its HTTP interface.

Facts of vLLM 0.32.0 that this module rests on:

- `/inference/v1/generate` (`--enable-scale-out`) takes token ids and streams new token ids with
  their logprobs; its end names the spans of tokens by the version of the weights.
- `processed_logprobs` are of the temperature-scaled logits after top-k, top-p and min-p, and
  `raw_logprobs` are at temperature 1. So truncation is not offered, and the former are asked for.
- A request is aborted by the name `generate-tokens-NAME`; another one is ignored.
- Weights are loaded by `/collective_rpc` while requests are kept (`/pause`, mode `keep`). Their
  keys and values stay those of the older weights; later requests have another `cache_salt`.
- `reload_weights` leaves the head of a model with tied embeddings as it was. So the server's model
  is not tied: its folder has the embeddings a second time, as `lm_head.weight`.
- A token outside the vocabulary ends the whole server, so requests are checked before.
- The paths that pause, load and resume ask for no key (`VLLM_SERVER_DEV_MODE`): whoever can reach
  the port can call them.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from flowrl.backend.protocols import FinishReason, GenerateRequest
from flowrl.errors import BackendError
from flowrl_backends.servers.engine import Piece
from flowrl_backends.servers.library import LibraryServer
from flowrl_backends.vllm.untied import add_head, is_tied, link_untied

__all__ = ["VllmServer"]

_MODEL = "policy"
_STREAM_INTERVAL = 16
# What a server needs beyond the longest sample.
_MARGIN = 8
# Tokens of a block of keys and values.
_BLOCK = {"cpu": 128, "cuda": 16}
# The number of blocks decides; without a space (GiB), nearly all memory must be free.
_CPU_ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}


class VllmServer(LibraryServer):
    """See `flowrl_backends.servers.engine.Server`."""

    library = "vLLM"
    # `vllm serve` of the CPU build does not find its own version.
    module = "vllm.entrypoints.openai.api_server"
    ready_path = "/health"
    series = "0.32."
    _publication = 0
    _tied = False

    async def start(self, model: Path) -> None:
        """See `LibraryServer`."""
        self._tied = is_tied(model)
        if self._tied and not self.options.url:
            add_head(model)
        await super().start(model)
        if not self.options.url:
            await self.control("/update_weight_version", {"new_version": "0"})

    def flags(self, model: Path) -> list[str]:
        """See `LibraryServer`."""
        context = self.context
        length = context.max_length + _MARGIN
        device, _, _ = context.device.partition(":")
        block = _BLOCK[device]
        kv_tokens = context.kv_tokens or context.num_slots * length
        flags = {
            "--model": str(model),
            "--served-model-name": _MODEL,
            "--host": "127.0.0.1",
            "--port": self.port,
            "--tensor-parallel-size": str(context.layout.get("tp", 1)),
            "--pipeline-parallel-size": str(context.layout.get("pp", 1)),
            "--dtype": context.dtype,
            "--max-model-len": str(length),
            "--max-num-seqs": str(context.num_slots),
            "--block-size": str(block),
            # One block is vLLM's own, and each sample has one that is not full.
            "--num-gpu-blocks-override": str(kv_tokens // block + context.num_slots + 1),
            "--stream-interval": str(_STREAM_INTERVAL),
            "--logprobs-mode": "processed_logprobs",
            # Options of sampling are those of requests alone.
            "--generation-config": "vllm",
            # Engines of one role must not sample alike, and seeds do not repeat a run anyway.
            "--seed": str(secrets.randbits(31)),
        }
        return [
            *(word for flag in flags.items() for word in flag),
            *("--skip-tokenizer-init", "--enable-scale-out", "--no-enable-log-requests"),
            "--disable-uvicorn-access-log",
            *(("--enforce-eager",) if device == "cpu" else ()),
        ]

    def environment(self) -> dict[str, str]:
        """See `LibraryServer`."""
        device, _, number = self.context.device.partition(":")
        threads = self.context.num_threads
        return {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            # The context length is that of a sample and a little more than the model's own.
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
            **(_CPU_ENVIRONMENT if device == "cpu" else {}),
            **({"CUDA_VISIBLE_DEVICES": number} if number else {}),
            **({"OMP_NUM_THREADS": str(threads)} if threads else {}),
        }

    async def version(self) -> str:
        """See `LibraryServer`."""
        info = await self.http.get("/version", timeout_s=self.options.start_timeout_s)
        return str(info.get("version", ""))

    async def generate(self, request: GenerateRequest, name: str) -> AsyncIterator[Piece]:
        """Streams a request; see `Server`."""
        sampling = request.sampling
        body = {
            "model": _MODEL,
            "request_id": name,
            "token_ids": [*request.prompt.tolist(), *request.response.tolist()],
            "stream": True,
            "cache_salt": f"weights-{self._publication}",
            "sampling_params": {
                "max_tokens": sampling.max_tokens - len(request.response),
                "temperature": sampling.temperature,
                "stop_token_ids": list(self.context.stop_token_ids),
                "ignore_eos": True,
                "logprobs": 0,
                "detokenize": False,
            },
        }
        async for line in self.http.lines("/inference/v1/generate", body):
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            answer = json.loads(data)
            if "error" in answer:
                message = str(answer["error"]["message"])
                # Of the server, not of the request: its processes that compute are dead.
                if answer["error"]["code"] >= 500:
                    raise ConnectionResetError(message)
                raise BackendError(
                    "the vLLM server refused a request", where=self.http.url, found=message
                )
            for choice in answer["choices"]:
                yield _piece(choice)
        raise ConnectionResetError("the vLLM server ended an answer before its end")

    async def abort(self, name: str) -> None:
        """Aborts a request; the server ignores one that it does not know."""
        await self.control(
            "/inference/v1/abort_requests", {"request_ids": [f"generate-tokens-{name}"]}
        )

    async def load(self, folder: Path, version: int) -> None:
        """Loads a folder between two decode steps; running requests go on with it."""
        if not self._tied:
            await self._load(folder, version)
            return
        with tempfile.TemporaryDirectory(prefix="flowrl-untied-") as name:
            served = Path(name)
            await asyncio.to_thread(link_untied, served, folder)
            await self._load(served, version)

    async def _load(self, folder: Path, version: int) -> None:
        await self.control("/pause?mode=keep", {})
        try:
            await self.control(
                "/collective_rpc",
                {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}},
            )
            await self.control("/update_weight_version", {"new_version": str(version)})
            self._publication += 1
        finally:
            await self.control("/resume", {})


def _piece(choice: dict[str, Any]) -> Piece:
    reason = choice["finish_reason"]
    rows = (choice["logprobs"] or {}).get("content") or ()
    return Piece(
        tokens=choice["token_ids"] or [],
        logprobs=[row["logprob"] for row in rows],
        reason=None if reason is None else FinishReason(reason),
        versions=tuple(
            (int(span["version"]), span["end"] - span["start"])
            for span in choice["weight_versions"] or ()
        ),
    )
