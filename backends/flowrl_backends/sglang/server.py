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

import asyncio
import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from flowrl.backend.protocols import FinishReason, GenerateRequest, PolicyContext
from flowrl.errors import BackendError
from flowrl_backends.servers.engine import Piece
from flowrl_backends.servers.http import HttpClient
from flowrl_backends.servers.process import ServerProcess, free_port
from flowrl_backends.sglang.plugin import SglangOptions

__all__ = ["SERIES", "SglangServer"]

SERIES = "0.5."
"""The versions that the plug-in is written for begin so."""

_STREAM_INTERVAL = 16
_PROBE_S = 0.2
# What a server needs beyond the longest sample.
_MARGIN = 8
_CPU_FLAGS = (
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    "--disable-cuda-graph",
)


class SglangServer:
    """See `flowrl_backends.servers.engine.Server`."""

    def __init__(self, context: PolicyContext, options: SglangOptions) -> None:
        self._context, self._options = context, options
        self._process: ServerProcess | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        key = os.environ.get(options.api_key_env, "") if options.url else secrets.token_hex(16)
        self._key = key
        self._http = HttpClient(options.url or f"http://127.0.0.1:{free_port()}", key)

    async def start(self, model: Path) -> None:
        """Starts a server of a model folder, or connects to one, and waits until it is ready.

        Raises:
            BackendError: It ended, was not ready in time, or cannot be used.
        """
        if not self._options.url:
            self._scratch = tempfile.TemporaryDirectory(prefix="flowrl-sglang-")
            folder = Path(self._scratch.name)  # of mode 700
            # The key is in no command line, which other users can see.
            (folder / "server.yaml").write_text(f"api-key: {self._key}\n")
            self._process = ServerProcess(
                self._command(model, folder / "server.yaml"),
                self._environment(),
                folder / "server.log",
            )
        await self._wait_until_ready()
        info = await self._http.get("/server_info", timeout_s=self._options.start_timeout_s)
        self._require_usable(info)
        if self._options.url and not self._context.fresh:
            await self.load(self._context.model, 0)

    def _command(self, model: Path, config: Path) -> list[str]:
        context = self._context
        length = context.max_length + _MARGIN
        device, _, number = context.device.partition(":")
        flags = {
            "--model-path": str(model),
            "--host": "127.0.0.1",
            "--port": self._http.url.rpartition(":")[2],
            "--config": str(config),
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
            *(self._options.python or sys.executable, "-m", "sglang.launch_server"),
            *(word for flag in flags.items() for word in flag),
            *("--skip-tokenizer-init", "--incremental-streaming-output"),
            *(_CPU_FLAGS if device == "cpu" else ()),
            *self._options.flags,
        ]

    def _environment(self) -> dict[str, str]:
        threads = self._context.num_threads
        return {
            "HF_HUB_OFFLINE": "1",
            # The context length is that of a sample and a little more than the model's own.
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
            **({"SGLANG_USE_CPU_ENGINE": "1"} if self._context.device == "cpu" else {}),
            **({"OMP_NUM_THREADS": str(threads)} if threads else {}),
            **self._options.env,
        }

    async def _wait_until_ready(self) -> None:
        limit_s = self._options.start_timeout_s
        deadline = time.monotonic() + limit_s
        found = ""
        while time.monotonic() < deadline:
            try:
                status = await self._http.status("/ready", timeout_s=limit_s)
            except OSError as reason:
                found = f"{type(reason).__name__}: {reason}"
            else:
                if status == 200:
                    return
                found = f"/ready was answered with status {status}"
            if self._process is not None and self._process.has_ended:
                raise BackendError(
                    "the SGLang server ended while it started",
                    where=f"roles.{self._context.role}",
                    found=self._process.last_words(),
                    hint="the server's own message says why; docs/engines.md has the known limits",
                )
            await asyncio.sleep(_PROBE_S)
        raise BackendError(
            f"the SGLang server was not ready after {limit_s:g} s",
            where=f"roles.{self._context.role}",
            found=self.last_words() or found,
            hint="raise start_timeout_s in the engine's options",
        )

    def _require_usable(self, info: dict[str, Any]) -> None:
        found = str(info.get("version", ""))
        if not found.startswith(SERIES):
            raise BackendError(
                "the sglang plug-in is written for another version of SGLang",
                where=self._http.url,
                found=f"version {found}",
                expected=f"{SERIES}x",
            )
        if not info.get("incremental_streaming_output"):
            raise BackendError(
                "the SGLang server streams all tokens again and again",
                where=self._http.url,
                expected="a server that was started with --incremental-streaming-output",
            )

    async def generate(self, request: GenerateRequest, name: str) -> AsyncIterator[Piece]:
        """Streams a request; see `Server`."""
        sampling, stops = request.sampling, self._context.stop_token_ids
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
        async for line in self._http.lines("/generate", body):
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            answer = json.loads(data)
            if "error" in answer:
                raise BackendError(
                    "the SGLang server refused a request",
                    where=self._http.url,
                    found=str(answer["error"].get("message", answer["error"])),
                )
            yield _piece(answer["meta_info"], num_tokens)
            num_tokens = answer["meta_info"]["completion_tokens"]
        raise ConnectionResetError("the SGLang server ended an answer before its end")

    async def abort(self, name: str) -> None:
        """Aborts a request; the server ignores one that it has not admitted."""
        await self._control("/abort_request", {"rid": name})

    async def load(self, folder: Path, version: int) -> None:
        """Loads a folder between two decode steps; running requests go on with it."""
        await self._control("/pause_generation", {"mode": "retract"})
        try:
            await self._control(
                "/update_weights_from_disk",
                {
                    "model_path": str(folder),
                    "weight_version": str(version),
                    "flush_cache": True,
                    "keep_pause": True,
                },
            )
        finally:
            await self._control("/continue_generation", {})

    async def _control(self, path: str, body: dict[str, object]) -> Any:
        return await self._http.post(path, body, timeout_s=self._options.start_timeout_s)

    def last_words(self) -> str:
        """Returns the end of the output of a server that was started."""
        return "" if self._process is None else self._process.last_words()

    async def stop(self) -> None:
        """Ends a server that was started."""
        if self._process is not None:
            await self._process.stop()
        if self._scratch is not None:
            self._scratch.cleanup()


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
