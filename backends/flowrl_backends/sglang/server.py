"""An SGLang server, started or connected to, over its HTTP interface.

Facts of SGLang 0.5.23 that this module rests on:

- With `--incremental-streaming-output` each streamed answer has only new logprobs; only the end of
  a request that never ran repeats earlier tokens, so `completion_tokens` decides what is new.
- Logprobs are of the temperature-scaled logits before top-k, top-p and min-p; those of greedy
  tokens are at temperature 1.
- A token outside the vocabulary ends the whole server, so requests are checked before.
- Running requests go on across new weights after `/pause_generation`. In the mode `in_place` the
  token that is being computed is counted as one of the new weights, and their keys and values of
  old weights are found by later requests. The mode `retract` waits for that token, and lets the
  cache be flushed: keys and values are computed again with the new weights.
- Seeds are honoured only in its deterministic mode, so that requests have none.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from flowrl.backend.protocols import FinishReason, GenerateRequest
from flowrl.errors import BackendError
from flowrl_backends.servers.engine import Piece
from flowrl_backends.servers.library import LibraryServer

__all__ = ["SglangServer"]

_STREAM_INTERVAL = 16
# What a server needs beyond the longest sample.
_MARGIN = 8
_CPU_FLAGS = (
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    "--disable-cuda-graph",
)


class SglangServer(LibraryServer):
    """See `flowrl_backends.servers.engine.Server`."""

    library = "SGLang"
    module = "sglang.launch_server"
    ready_path = "/ready"
    series = "0.5."

    def flags(self, model: Path) -> list[str]:
        """See `LibraryServer`."""
        context = self.context
        length = context.max_length + _MARGIN
        device, _, number = context.device.partition(":")
        flags = {
            "--model-path": str(model),
            "--host": "127.0.0.1",
            "--port": self.port,
            "--device": device,
            "--base-gpu-id": number or "0",
            "--tp-size": str(context.layout.get("tp", 1)),
            "--pp-size": str(context.layout.get("pp", 1)),
            "--dtype": context.dtype,
            "--weight-version": "0",
            "--context-length": str(length),
            "--max-running-requests": str(context.num_slots),
            "--max-total-tokens": str(context.kv_tokens or context.num_slots * length),
            "--stream-interval": str(_STREAM_INTERVAL),
            "--grammar-backend": "none",
            # Engines of one role must not sample alike, and seeds do not repeat a run anyway.
            "--random-seed": str(secrets.randbits(31)),
            "--log-level": "warning",
        }
        return [
            *(word for flag in flags.items() for word in flag),
            *("--skip-tokenizer-init", "--incremental-streaming-output"),
            *(_CPU_FLAGS if device == "cpu" else ()),
        ]

    def environment(self) -> dict[str, str]:
        """See `LibraryServer`."""
        threads = self.context.num_threads
        return {
            # The context length is that of a sample and a little more than the model's own.
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
            **({"SGLANG_USE_CPU_ENGINE": "1"} if self.context.device == "cpu" else {}),
            **({"OMP_NUM_THREADS": str(threads)} if threads else {}),
        }

    async def version(self) -> str:
        """See `LibraryServer`."""
        info = await self.http.get("/server_info", timeout_s=self.options.start_timeout_s)
        if not info.get("incremental_streaming_output"):
            raise BackendError(
                "the SGLang server streams all tokens again and again",
                where=self.http.url,
                expected="a server that was started with --incremental-streaming-output",
            )
        return str(info.get("version", ""))

    async def generate(self, request: GenerateRequest, name: str) -> AsyncIterator[Piece]:
        """Streams a request; see `Server`."""
        sampling, stops = request.sampling, self.context.stop_token_ids
        body = {
            "rid": name,
            "input_ids": [*request.prompt.tolist(), *request.response.tolist()],
            "stream": True,
            "return_logprob": True,
            "logprob_start_len": -1,
            "sampling_params": {
                "max_new_tokens": sampling.max_tokens - len(request.response),
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "min_p": sampling.min_p,
                "stop_token_ids": list(stops),
                "ignore_eos": not stops,
            },
        }
        num_tokens = 0
        async for line in self.http.lines("/generate", body):
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            answer = json.loads(data)
            if "error" in answer:
                raise BackendError(
                    "the SGLang server refused a request",
                    where=self.http.url,
                    found=str(answer["error"].get("message", answer["error"])),
                )
            yield _piece(answer["meta_info"], num_tokens)
            num_tokens = answer["meta_info"]["completion_tokens"]
        raise ConnectionResetError("the SGLang server ended an answer before its end")

    async def abort(self, name: str) -> None:
        """Aborts a request; the server ignores one that it has not admitted."""
        await self.control("/abort_request", {"rid": name})

    async def load(self, folder: Path, version: int) -> None:
        """Loads a folder between two decode steps; running requests go on with it."""
        await self.control("/pause_generation", {"mode": "retract"})
        try:
            await self.control(
                "/update_weights_from_disk",
                {
                    "model_path": str(folder),
                    "weight_version": str(version),
                    "flush_cache": True,
                    "keep_pause": True,
                },
            )
        finally:
            await self.control("/continue_generation", {})


def _piece(meta: dict[str, Any], num_before: int) -> Piece:
    """Returns what is new in an answer.

    Raises:
        BackendError: The server ended the request with an error.
    """
    num_new = meta["completion_tokens"] - num_before
    rows = meta["output_token_logprobs"]
    rows = rows[len(rows) - num_new :]
    end = meta["finish_reason"]
    if end is not None and (end.get("status_code") or 0) >= 400:
        raise BackendError("the SGLang server failed a request", found=str(end.get("message")))
    spans = meta.get("weight_versions", ()) if end is not None else ()
    return Piece(
        tokens=[token for _, token, *_ in rows],
        logprobs=[logprob for logprob, *_ in rows],
        reason=None if end is None else FinishReason(end["type"]),
        versions=tuple((int(one["version"]), one["end"] - one["start"]) for one in spans),
    )
