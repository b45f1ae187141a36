"""The engine over a server that a test scripts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl.backend.protocols import (
    Finished,
    FinishReason,
    GenerateRequest,
    Loaded,
    Progress,
    Weights,
    WeightsKind,
)
from flowrl.backend.weights import checksum_of
from flowrl.errors import BackendError, WorkerDied
from flowrl.ids import SampleId
from flowrl.specs import Sampling
from flowrl_backends.servers.engine import Piece, ServerEngine
from tests.policy_contexts import policy_context, weights_of

STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT
END = 2


def piece(*tokens: int, reason: FinishReason | None = None, versions: Any = None) -> Piece:
    spans = ((0, len(tokens)),) if reason and versions is None else versions or ()
    return Piece(
        tokens=list(tokens), logprobs=[-float(t) for t in tokens], reason=reason, versions=spans
    )


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@dataclass
class ScriptedServer:
    """Plays one script a request, in order; an event of a script is waited for."""

    scripts: list[Sequence[Any]] = field(default_factory=list)
    asked: list[tuple[GenerateRequest, str]] = field(default_factory=list)
    calls: list[Any] = field(default_factory=list)
    loading: list[asyncio.Event] = field(default_factory=list)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self, model: Path) -> None:
        self.calls.append(("start", names_in(model)))

    async def generate(self, request: GenerateRequest, name: str) -> AsyncIterator[Piece]:
        self.asked.append((request, name))
        for step in self.scripts.pop(0):
            if isinstance(step, asyncio.Event):
                await step.wait()
            elif isinstance(step, Exception):
                raise step
            else:
                yield step

    async def abort(self, name: str) -> None:
        self.calls.append(("abort", name))
        self.aborted.set()

    async def load(self, folder: Path, version: int) -> None:
        if self.loading:
            await self.loading.pop(0).wait()
        self.calls.append(("load", version, names_in(folder)))

    def last_words(self) -> str:
        return "out of memory"

    async def stop(self) -> None:
        self.calls.append("stop")


class Opened:
    """An engine with its server."""

    def __init__(self, model: Path, scripts: Sequence[Sequence[Any]] = (), **options: Any) -> None:
        (model / "config.json").write_text(json.dumps({"vocab_size": 50}))
        (model / "model.safetensors").write_bytes(b"old")
        silence_s = options.pop("silence_s", 60.0)
        context = policy_context(
            model, **{"fresh": False, "max_length": 20, "stop_token_ids": (END,), **options}
        )
        self.server = ScriptedServer(list(scripts))
        self.engine = ServerEngine(context, self.server, silence_s=silence_s)

    def set(self, event: asyncio.Event) -> None:
        self.engine._loop.call_soon_threadsafe(event.set)

    def poll(self) -> Sequence[Progress | Finished | Loaded]:
        """What the next poll that reports something reports."""
        for _ in range(100):
            if outputs := self.engine.poll(10.0):
                return outputs
        raise AssertionError("nothing was reported")

    def reports(self, number: int) -> list[Any]:
        """So many ends and loaded weights."""
        found: list[Any] = []
        while len(found) < number:
            found += [one for one in self.poll() if not isinstance(one, Progress)]
        assert len(found) == number
        return found

    def end(self) -> Finished:
        (end,) = self.reports(1)
        return end


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Any]:
    engines: list[ServerEngine] = []

    def new(*scripts: Sequence[Any], **options: Any) -> Opened:
        model = tmp_path / "model"
        model.mkdir()
        one = Opened(model, scripts, **options)
        engines.append(one.engine)
        return one

    yield new
    for engine in engines:
        engine.close()


def request(number: int = 0, response: Sequence[int] = (), **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        sample=SampleId(f"0/{number}/0"),
        attempt=0,
        prompt=np.array([10, 11], np.int64),
        response=np.array(response, np.int64),
        sampling=Sampling(**{"max_tokens": 8, **sampling}),
        seed=1,
        shares_prompt="0/0",
    )


def test_a_request_ends_with_all_that_was_streamed(opened) -> None:
    one = opened([piece(5), piece(6, END, reason=STOP, versions=((0, 2), (1, 1)))])
    one.engine.submit([request()])
    end = one.end()
    assert end.reason is STOP
    assert (end.tokens.tolist(), end.logprobs.tolist()) == ([5, 6, END], [-5, -6, -END])
    assert (end.tokens.dtype, end.logprobs.dtype) == (np.int64, np.float32)
    assert end.versions == ((0, 2), (1, 1))
    assert one.engine.poll(10.0) == []  # at once: nothing is left


def test_progress_is_reported_before_the_end(opened) -> None:
    gate = asyncio.Event()
    one = opened([piece(5, 6), gate, piece(7, reason=LENGTH)])
    one.engine.submit([request(response=[3], max_tokens=4)])
    assert one.poll() == [Progress(sample=SampleId("0/0/0"), attempt=0, num_tokens=3)]
    one.set(gate)
    one.end()


def test_a_response_that_is_already_whole_ends_at_once(opened) -> None:
    one = opened()
    one.engine.submit([request(response=[5, 6], max_tokens=2)])
    end = one.end()
    assert (end.reason, len(end.tokens), end.versions) == (LENGTH, 0, ())


def test_abort_keeps_tokens_and_is_repeated_until_the_end(opened) -> None:
    one = opened([piece(5)], [piece(9, reason=LENGTH)])
    one.server.scripts[0] = [piece(5), one.server.aborted, piece(6, reason=ABORT, versions=())]
    one.engine.submit([request(0)])
    one.poll()
    one.engine.abort([SampleId("0/0/0"), SampleId("9/9/9")])
    one.engine.abort([SampleId("0/0/0")])
    end = one.end()
    assert (end.reason, end.tokens.tolist()) == (ABORT, [5, 6])
    assert one.server.calls[1] == ("abort", one.server.asked[0][1])
    one.engine.abort([SampleId("0/0/0")])
    one.engine.submit([request(1, max_tokens=1)])
    assert one.end().reason is LENGTH


def test_requests_wait_for_the_weights_before_them(opened, tmp_path: Path) -> None:
    one = opened([piece(5, reason=LENGTH, versions=((1, 1),))])
    gate = asyncio.Event()
    one.server.loading = [gate]
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "model.safetensors").write_bytes(b"new")
    sent = weights_of(1, weights)
    one.engine.load(sent)
    one.engine.submit([request(max_tokens=1)])
    assert one.engine.poll(0.0) == []
    assert one.server.asked == []
    one.set(gate)
    loaded, end = one.reports(2)
    assert loaded == Loaded(version=1, checksum=sent.checksum)
    assert end.versions == ((1, 1),)
    assert one.server.calls[-1] == ("load", 1, ["model.safetensors"])


def test_weights_are_reported_by_the_next_end(opened, tmp_path: Path) -> None:
    gate = asyncio.Event()
    one = opened([piece(5, reason=LENGTH)])
    one.server.loading = [gate]
    one.engine.submit([request(max_tokens=1)])
    one.engine.load(weights_of(1, tmp_path / "model"))
    while not one.engine._outputs:  # until the end is there, without the weights
        assert not any(isinstance(output, Finished) for output in one.engine.poll(0.0))
    assert one.engine.poll(0.0) == []
    one.set(gate)
    assert [type(output) for output in one.poll()] == [Finished, Loaded]


def test_weights_without_a_folder_are_written_into_one(opened) -> None:
    one = opened()
    buckets = [np.frombuffer(b"first", np.uint8), np.frombuffer(b"second", np.uint8)]
    one.engine.load(Weights(version=4, kind=WeightsKind.RAY_OBJECTS, handle=buckets))
    assert one.poll() == [Loaded(version=4, checksum=checksum_of(buckets))]
    files = ["config.json", "model-00000.safetensors", "model-00001.safetensors"]
    assert one.server.calls[-1] == ("load", 4, files)


def test_a_fresh_model_is_served_from_the_first_weights(opened, tmp_path: Path) -> None:
    one = opened(fresh=True)
    assert one.server.calls == []
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "other.safetensors").write_bytes(b"new")
    one.engine.load(weights_of(0, weights))
    one.engine.load(weights_of(1, weights))
    one.reports(2)
    names = ["config.json", "other.safetensors"]
    assert [call for call in one.server.calls if call[0] == "start"] == [("start", names)]
    assert [call[1] for call in one.server.calls if call[0] == "load"] == [0, 1]


@pytest.mark.parametrize(
    ("step", "found"),
    [(ConnectionResetError("reset"), "out of memory"), (piece(5), "out of memory")],
    ids=["connection", "no end"],
)
def test_a_server_that_is_gone_is_a_dead_worker(opened, step, found) -> None:
    one = opened([step])
    one.engine.submit([request()])
    with pytest.raises(WorkerDied) as caught:
        one.end()
    assert caught.value.found == found


def test_a_silent_server_is_a_dead_worker(opened) -> None:
    one = opened([asyncio.Event()], silence_s=1e-9)
    one.engine.submit([request()])
    with pytest.raises(WorkerDied, match="a server with 1 requests has sent nothing"):
        one.engine.poll(0.001)


def test_a_silent_server_may_load_weights(opened, tmp_path: Path) -> None:
    gate = asyncio.Event()
    one = opened([piece(5, reason=LENGTH)], silence_s=1e-9)
    one.server.loading = [gate]
    one.engine.load(weights_of(1, tmp_path / "model"))
    one.engine.submit([request(max_tokens=1)])
    assert one.engine.poll(0.001) == []
    one.set(gate)
    one.poll()


@pytest.mark.parametrize(
    ("last", "message"),
    [
        (piece(5, reason=STOP), "ended a response at a token that is no stop token"),
        (piece(5, reason=LENGTH), "has no place for a whole response"),
    ],
)
def test_a_response_that_ends_wrongly_is_an_error(opened, last, message) -> None:
    one = opened([last])
    one.engine.submit([request()])
    with pytest.raises(BackendError, match=message):
        one.end()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request(1, max_tokens=19), "do not fit into a slot"),
        (replace(request(1), prompt=np.array([50])), "outside the model's vocabulary"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_with_all_others(opened, bad, message) -> None:
    one = opened()
    with pytest.raises(BackendError, match=message):
        one.engine.submit([request(0), bad])
    assert one.engine.poll(10.0) == []
    assert one.server.asked == []


def test_close_ends_the_server_and_what_runs(opened) -> None:
    one = opened([asyncio.Event()])
    one.engine.submit([request()])
    one.engine.close()
    one.engine.close()
    assert one.server.calls[-1] == "stop"
    assert not one.engine._thread.is_alive()
    assert not one.engine._scratch.exists()
