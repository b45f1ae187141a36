"""Engines in processes of their own: order of what they are told, and every way they can end."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from flowrl.backend.protocols import Finished, GenerateRequest, Loaded, Progress
from flowrl.errors import BackendError, WorkerDied
from flowrl.ids import EngineId, SampleId
from flowrl.runtime.channels import Message
from flowrl.runtime.local import engine_worker
from flowrl.runtime.local.engine_process import EngineProcess
from flowrl.runtime.local.engine_worker import EngineServer, pack_requests, run_engine
from flowrl.runtime.spans import SPANS
from flowrl.specs import FinishReason, Sampling
from tests.policy_contexts import weights_of
from tests.runtime.scripted_engine import (
    BLOCK,
    DIE,
    FAIL,
    HANG,
    PLUGIN,
    RAISE,
    ScriptedEngine,
    context,
    weights,
)

DEADLINE_S = 60.0

pytestmark = pytest.mark.usefixtures("cold_starts")

Open = Callable[..., EngineProcess]


class LentModel:
    """A mailbox whose client has sent the opening message, and then nothing more."""

    def __init__(self, model: Path) -> None:
        self._messages = [[("open", PLUGIN, context(model), None, model, "actor.generate[0]")]]
        self._readable, writable = os.pipe()
        os.close(writable)
        self.lent = 0
        self.sent: list[tuple[Message, int]] = []

    def fileno(self) -> int:
        return self._readable

    def receive(self) -> list[Message] | None:
        return cast("list[Message]", self._messages.pop()) if self._messages else None

    def send(self, message: Message) -> None:
        self.sent.append((message, self.lent))

    @contextmanager
    def folder(self, shared: object) -> Iterator[Path]:
        self.lent += 1
        yield cast(Path, shared)
        self.lent -= 1


def test_an_engine_keeps_no_copy_of_its_model_s_files_once_it_is_open(tmp_path: Path):
    mailbox = LentModel(weights(tmp_path / "model", 1))
    run_engine(mailbox)
    assert mailbox.sent == [(("ready",), 0)]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens engines that are closed behind the test."""
    engines: list[EngineProcess] = []

    def open_engine(model: str = "model", **changes: object) -> EngineProcess:
        engine = EngineProcess(
            EngineId("actor.generate[0]"),
            PLUGIN,
            context(tmp_path / model),
            **changes,  # type: ignore[arg-type]
        )
        engines.append(engine)
        return engine

    yield open_engine
    for engine in engines:
        engine.close()


def request(sample: str, word: int = 1, *, tokens: int = 3, kept: tuple[int, ...] = ()):
    return GenerateRequest(
        sample=SampleId(sample),
        attempt=len(kept),
        prompt=np.array([word, 7], np.int64),
        response=np.array(kept, np.int64),
        sampling=Sampling(max_tokens=tokens),
        seed=5,
        shares_prompt=sample.rpartition("/")[0],
    )


def until(
    engine: EngineProcess, done: Callable[[list[Progress | Finished | Loaded]], bool]
) -> list[Progress | Finished | Loaded]:
    """All outputs up to those that `done` says yes to."""
    outputs: list[Progress | Finished | Loaded] = []
    end = time.monotonic() + DEADLINE_S
    while not done(outputs):
        assert time.monotonic() < end, outputs
        outputs += engine.poll(1.0)
    return outputs


def all_ends(outputs: list[Progress | Finished | Loaded]) -> list[Finished]:
    return [output for output in outputs if isinstance(output, Finished)]


def ends(outputs: list[Progress | Finished | Loaded]) -> dict[str, Finished]:
    return {output.sample: output for output in outputs if isinstance(output, Finished)}


def test_requests_end_with_all_that_an_engine_in_this_process_would_say(opened: Open):
    engine = opened()
    engine.submit([request("0/0/0"), request("0/0/1", tokens=2)])
    assert engine.num_slots == 4
    found = ends(until(engine, lambda outputs: len(ends(outputs)) == 2))
    assert found["0/0/0"].tokens.tolist() == [0, 0, 0]
    assert found["0/0/1"].tokens.tolist() == [0, 0]
    first = found["0/0/0"]
    assert (first.attempt, first.reason, first.versions) == (0, FinishReason.LENGTH, ((0, 3),))
    assert first.logprobs.dtype == np.float32
    assert first.logprobs.tolist() == [-0.5] * 3
    assert engine.busy_s > 0.0


def test_an_engine_says_when_it_generated_loaded_and_waited(opened: Open, tmp_path: Path):
    SPANS.take()
    engine = opened()
    engine.wait_ready()
    engine.submit([request("0/0/0")])
    until(engine, lambda outputs: len(ends(outputs)) == 1)
    engine.load(weights_of(4, weights(tmp_path / "4", 44)))
    engine.submit([request("0/1/0")])
    until(engine, lambda outputs: len(ends(outputs)) == 1)
    spans = [span for span in SPANS.take() if span.worker == "actor.generate[0]"]
    assert {"generate", "load weights"} <= {span.operation for span in spans}
    assert {span.waits_for for span in spans if span.operation == "wait"} == {"requests"}
    assert all(a.end_s <= b.begin_s for a, b in pairwise(spans))


def test_what_is_sent_behind_new_weights_is_drawn_from_them(opened: Open, tmp_path: Path):
    engine = opened()
    engine.submit([request("0/0/0", HANG)])
    sent = weights_of(4, weights(tmp_path / "4", 44))
    engine.load(sent)
    engine.submit([request("0/1/0")])
    outputs = until(engine, lambda outputs: "0/1/0" in ends(outputs))
    assert [o for o in outputs if isinstance(o, Loaded)] == [
        Loaded(version=4, checksum=sent.checksum)
    ]
    engine.abort([SampleId("0/0/0"), SampleId("0/9/9")])
    found = ends(until(engine, lambda outputs: "0/0/0" in ends(outputs)))
    # The running one went on with the new weights, and says so.
    first = found["0/0/0"]
    assert first.reason is FinishReason.ABORT
    assert first.versions[-1][0] == 4
    assert first.tokens[-1] == 44


def test_a_request_goes_on_from_the_tokens_that_it_brings(opened: Open):
    engine = opened()
    engine.submit([request("0/0/0", tokens=5, kept=(1, 2, 3))])
    (end,) = ends(until(engine, lambda outputs: bool(ends(outputs)))).values()
    assert (end.attempt, len(end.tokens)) == (3, 2)


def test_a_sample_that_is_aborted_and_sent_again_in_one_breath_is_drawn(opened: Open):
    engine = opened()
    engine.submit([request("0/0/0", HANG)])
    until(engine, lambda outputs: len(outputs) > 0)
    engine.abort([SampleId("0/0/0")])
    engine.submit([request("0/0/0", tokens=8, kept=(1, 2))])
    outputs = until(engine, lambda outputs: any(end.attempt == 2 for end in all_ends(outputs)))
    assert [(end.attempt, end.reason) for end in all_ends(outputs)] == [
        (0, FinishReason.ABORT),
        (2, FinishReason.LENGTH),
    ]


def test_progress_of_running_requests_is_told(opened: Open):
    engine = opened()
    engine.submit([request("0/0/0", HANG)])
    outputs = until(engine, lambda outputs: len(outputs) >= 2)
    counts = [output.num_tokens for output in outputs if isinstance(output, Progress)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


def test_a_poll_of_an_idle_engine_returns_at_once(opened: Open):
    engine = opened()
    engine.wait_ready()
    assert engine.poll(DEADLINE_S) == []


@pytest.mark.parametrize(
    ("word", "how"),
    [(DIE, "exit code 3"), (RAISE, "RuntimeError: out of luck")],
)
def test_an_engine_that_dies_says_how(opened: Open, word: int, how: str):
    engine = opened()
    engine.submit([request("0/0/0", word)])
    with pytest.raises(WorkerDied, match=how) as caught:
        until(engine, lambda outputs: False)
    assert "actor.generate[0]" in str(caught.value)


def test_an_engine_that_is_killed_is_noticed_also_when_it_is_idle(opened: Open):
    engine = opened()
    engine.wait_ready()
    os.kill(engine._channel.process.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="SIGKILL"):
        until(engine, lambda outputs: False)


def test_nobody_waits_for_an_engine_that_died_before_it_was_ready(
    opened: Open, monkeypatch: pytest.MonkeyPatch
):
    engine = opened()
    os.kill(engine._channel.process.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="SIGKILL"):
        until(engine, lambda outputs: False)

    def hear(timeout_s: float) -> bool:
        pytest.fail("nothing is heard of it any more")

    monkeypatch.setattr(engine, "_exchange", hear)
    with pytest.raises(WorkerDied, match="SIGKILL"):
        engine.wait_ready()


def test_what_is_sent_to_an_engine_that_is_dead_is_lost_and_nothing_else(
    opened: Open, tmp_path: Path
):
    # Weights are published whenever the trainer has some: perhaps before the engine is replaced.
    engine = opened()
    engine.wait_ready()
    os.kill(engine._channel.process.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="SIGKILL"):
        until(engine, lambda outputs: False)
    engine.load(weights_of(2, weights(tmp_path / "2", 22)))
    engine.submit([request("0/0/0")])
    engine.abort([SampleId("0/0/0")])
    with pytest.raises(WorkerDied, match="SIGKILL"):
        engine.poll(0.0)


@pytest.mark.parametrize("wait", ["wait_ready", "poll"])
def test_an_engine_that_dies_behind_a_child_with_its_socket_is_noticed(opened: Open, wait: str):
    engine = opened()
    engine.submit([request("0/0/0", HANG)])
    # Another process keeps the other end open, so the stream never ends.
    kept = socket.socketpair()
    channel = engine._channel
    channel._selector.unregister(channel._sock)
    channel._sock.close()
    channel._sock = kept[0]
    channel._selector.register(kept[0], selectors.EVENT_READ)
    kept[0].setblocking(False)
    os.kill(engine._channel.process.pid, signal.SIGKILL)
    waits = {"wait_ready": engine.wait_ready, "poll": lambda: until(engine, lambda outputs: False)}
    with kept[1], pytest.raises(WorkerDied, match="SIGKILL"):
        waits[wait]()


def test_an_error_of_flowrl_s_own_comes_through_with_its_way_out(opened: Open):
    engine = opened()
    engine.submit([request("0/0/0", FAIL)])
    with pytest.raises(BackendError, match="not to its liking") as caught:
        until(engine, lambda outputs: False)
    assert not isinstance(caught.value, WorkerDied)
    assert caught.value.hint == "ask nicely"


@pytest.mark.parametrize(
    ("model", "message"), [("missing", "no such model"), ("broken", "library does not like it")]
)
def test_a_model_that_cannot_be_opened_is_told(opened: Open, model: str, message: str):
    engine = opened(model)
    with pytest.raises(BackendError, match=message):
        engine.wait_ready()


def test_an_engine_that_says_nothing_is_given_up(opened: Open):
    engine = opened(silence_s=0.5)
    engine.wait_ready()
    engine.submit([request("0/0/0", BLOCK)])
    with pytest.raises(WorkerDied, match=r"silent for 0\.5 s, half of .*, with 1 requests"):
        until(engine, lambda outputs: False)


def test_an_engine_whose_requests_do_not_go_on_sends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Stuck(ScriptedEngine):
        def poll(self, timeout_s: float) -> Sequence[Progress | Finished | Loaded]:
            return [Progress(sample=SampleId("0/0/0"), attempt=0, num_tokens=2)]

    monkeypatch.setattr(engine_worker, "_PROGRESS_S", -1.0)
    mailbox = LentModel(weights(tmp_path, 1))
    server = EngineServer(mailbox, Stuck(context(tmp_path)), "actor.generate[0]")
    server.handle(("submit", pack_requests([request("0/0/0")])))
    for _ in range(3):
        server.poll()
    ((message, _),) = mailbox.sent
    assert message[3] == (("0/0/0", 0, 2),)


def test_an_engine_that_is_not_ready_in_time_is_given_up(opened: Open):
    engine = opened(start_timeout_s=0.0)
    with pytest.raises(WorkerDied, match=r"not ready after runtime\.start_timeout_s=0 seconds"):
        engine.wait_ready()


def test_weights_in_place_cannot_be_published_to_it(opened: Open):
    with pytest.raises(BackendError, match="in place"):
        opened().load(weights_of(1))


def test_a_closed_engine_is_gone_and_takes_nothing(opened: Open):
    engine = opened()
    engine.submit([request("0/0/0", HANG)])
    until(engine, lambda outputs: len(outputs) > 0)
    engine.close()
    engine.close()
    assert engine._channel.process.returncode == 0
    with pytest.raises(BackendError, match="closed"):
        engine.submit([request("0/0/1")])
