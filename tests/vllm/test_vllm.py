"""The vLLM plug-in against answers that vLLM 0.32.0 gave (tests/data/vllm_0_32_0.json)."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from flowrl.backend.protocols import Finished, FinishReason, GenerateBackend, GenerateRequest
from flowrl.errors import BackendError, WorkerDied
from flowrl.ids import SampleId
from flowrl.specs import Sampling
from flowrl_backends.vllm.plugin import plugin
from flowrl_backends.vllm.untied import link_untied
from tests.policy_contexts import policy_context, weights_of
from tests.servers.fake_server import Answer, FakeServer, fake_server, json_answer, stream

DATA = Path(__file__).parent.parent / "data"
RECORDED = json.loads((DATA / "vllm_0_32_0.json").read_text())
GENERATE, ABORT = "/inference/v1/generate", "/inference/v1/abort_requests"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"vocab_size": 256, "tie_word_embeddings": false}')
    (folder / "model.safetensors").write_bytes(b"old")
    return folder


@contextmanager
def serving(generate: Callable[[Any], Answer]) -> Iterator[FakeServer]:
    with fake_server() as fake:
        for path in ("/version", "/pause?mode=keep", "/collective_rpc", "/resume"):
            fake.script[path] = lambda _, answer=RECORDED[path]: json_answer(answer)
        fake.script["/update_weight_version"] = lambda _: json_answer({"success": True})
        fake.script["/health"] = fake.script[ABORT] = lambda _: Answer(whole=True)
        fake.script[GENERATE] = generate
        yield fake


def recorded(name: str) -> Callable[[Any], Answer]:
    return lambda _: stream(*RECORDED[name])


def opened(model: Path, **options: object) -> GenerateBackend:
    context = policy_context(
        model, fresh=False, max_length=600, stop_token_ids=(5, 9), options=options
    )
    return plugin.open_generate(context, None)


def request(**sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        sample=SampleId("0/0/0"),
        attempt=2,
        prompt=np.arange(10, 20),
        response=np.array([30, 31]),
        sampling=Sampling(**{"max_tokens": 92, **sampling}),
        seed=7,
        shares_prompt="0/0",
    )


def outputs_of(engine: GenerateBackend) -> Iterator[object]:
    while True:
        yield from engine.poll(10.0)


def end_of(engine: GenerateBackend, one: GenerateRequest) -> Finished:
    engine.submit([one])
    return next(output for output in outputs_of(engine) if isinstance(output, Finished))


def choices(name: str) -> list[dict[str, Any]]:
    return [choice for answer in RECORDED[name] for choice in answer["choices"]]


def tokens(name: str) -> list[int]:
    return [token for choice in choices(name) for token in choice["token_ids"]]


def test_a_stream_is_a_response_with_its_logprobs(model: Path) -> None:
    with serving(recorded("stop")) as fake, closing(opened(model, url=fake.url)) as engine:
        end = end_of(engine, request(temperature=0.5))
    assert (end.reason, end.attempt) == (FinishReason.STOP, 2)
    assert end.tokens.tolist() == tokens("stop")
    rows = [row for choice in choices("stop") for row in choice["logprobs"]["content"]]
    assert np.allclose(end.logprobs, [row["logprob"] for row in rows])
    assert end.versions == ((0, 36),)
    (body,) = fake.bodies(GENERATE)
    assert body.pop("request_id").startswith("flowrl-server-")
    assert body == {
        "model": "policy",
        "token_ids": [*range(10, 20), 30, 31],
        "stream": True,
        "cache_salt": "weights-1",
        "sampling_params": {
            "max_tokens": 90,
            "temperature": 0.5,
            "stop_token_ids": [5, 9],
            "ignore_eos": True,
            "logprobs": 0,
            "detokenize": False,
        },
    }


def test_tokens_across_a_publication_have_their_versions(model: Path) -> None:
    with serving(recorded("across")) as fake, closing(opened(model, url=fake.url)) as engine:
        end = end_of(engine, request(max_tokens=72))
    assert end.reason is FinishReason.LENGTH
    assert end.versions == ((0, 37), (20, 33))


def test_an_aborted_request_keeps_its_tokens(model: Path) -> None:
    asked = threading.Event()

    def generate(_: Any) -> Answer:
        asked.set()
        return stream(*RECORDED["aborted"][:-1], None, RECORDED["aborted"][-1])

    with serving(generate) as fake, closing(opened(model, url=fake.url)) as engine:
        fake.script[ABORT] = lambda _: fake.go() or Answer(whole=True)
        engine.submit([request(max_tokens=402)])
        asked.wait()
        engine.abort([SampleId("0/0/0")])
        end = next(output for output in outputs_of(engine) if isinstance(output, Finished))
    assert end.reason is FinishReason.ABORT
    assert end.tokens.tolist() == tokens("aborted")
    (generated,) = fake.bodies(GENERATE)
    names = fake.bodies(ABORT)[0]["request_ids"]
    assert names == [f"generate-tokens-{generated['request_id']}"]


def test_a_refused_request_is_an_error_with_the_message_of_the_server(model: Path) -> None:
    with serving(recorded("error")) as fake, closing(opened(model, url=fake.url)) as engine:
        with pytest.raises(BackendError, match="refused a request") as caught:
            end_of(engine, request())
        assert "longer than the maximum model length of 608" in str(caught.value.found)


def test_an_error_of_the_server_itself_is_a_death(model: Path) -> None:
    with serving(recorded("dead")) as fake, closing(opened(model, url=fake.url)) as engine:
        with pytest.raises(WorkerDied) as caught:
            end_of(engine, request())
        assert "EngineCore encountered an issue" in str(caught.value.found)


def test_weights_are_loaded_between_steps_and_later_requests_use_no_older_keys(
    model: Path,
) -> None:
    with serving(recorded("stop")) as fake, closing(opened(model, url=fake.url)) as engine:
        fake.asked.clear()
        engine.load(weights_of(7, model))
        next(outputs_of(engine))
        loading = list(fake.asked)
        end_of(engine, request())
    call = {"method": "reload_weights", "kwargs": {"weights_path": str(model)}}
    assert loading == [
        ("/pause?mode=keep", {}),
        ("/collective_rpc", call),
        ("/update_weight_version", {"new_version": "7"}),
        ("/resume", {}),
    ]
    assert fake.bodies(GENERATE)[0]["cache_salt"] == "weights-2"


def test_a_server_that_loads_nothing_goes_on_and_raises(model: Path) -> None:
    with serving(recorded("stop")) as fake, closing(opened(model, url=fake.url)) as engine:
        fake.script["/collective_rpc"] = lambda _: json_answer({"detail": "no such folder"}, 500)
        engine.load(weights_of(7, model))
        with pytest.raises(BackendError, match="status 500") as caught:
            next(outputs_of(engine))
        assert "no such folder" in str(caught.value.found)
        assert fake.asked[-1] == ("/resume", {})


def test_a_server_of_another_version_is_refused(model: Path) -> None:
    with serving(recorded("stop")) as fake:
        fake.script["/version"] = lambda _: json_answer({"version": "0.11.0"})
        with pytest.raises(BackendError, match="another version of vLLM"):
            opened(model, url=fake.url)


def test_a_model_with_tied_embeddings_is_served_with_a_head_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "tied"
    folder.mkdir()
    (folder / "config.json").write_text('{"tie_word_embeddings": true, "vocab_size": 3}')
    embeddings = torch.arange(6.0).reshape(3, 2)
    held = {"a.weight": torch.ones(4), "model.embed_tokens.weight": embeddings}
    save_file(held, folder / "model.safetensors")
    served = tmp_path / "served"
    served.mkdir()
    link_untied(served, folder)
    head = load_file(served / "lm_head.safetensors")
    assert list(head) == ["lm_head.weight"]
    assert torch.equal(head["lm_head.weight"], embeddings)
    assert sorted(path.name for path in served.iterdir()) == [
        "lm_head.safetensors",
        "model.safetensors",
    ]
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]


SERVER = """#!{python}
import http.server, json, pathlib, sys
flags = dict(zip(sys.argv[3:], sys.argv[4:]))
pathlib.Path({seen!r}).write_text(json.dumps(sys.argv[1:]))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{{"version": "0.32.0"}}')
    do_POST = do_GET
http.server.HTTPServer(("127.0.0.1", int(flags["--port"])), Handler).serve_forever()
"""


def test_a_server_is_started_with_the_flags_of_the_context(model: Path, tmp_path: Path) -> None:
    seen, python = tmp_path / "seen.json", tmp_path / "python"
    python.write_text(SERVER.format(python=sys.executable, seen=str(seen)))
    python.chmod(0o700)
    context = policy_context(
        model, fresh=False, num_slots=8, max_length=100, options={"python": str(python)}
    )
    plugin.open_generate(context, None).close()
    words = json.loads(seen.read_text())
    assert words[:2] == ["-m", "vllm.entrypoints.openai.api_server"]
    flags = dict(pairwise(words))
    assert (flags["--max-model-len"], flags["--max-num-seqs"]) == ("108", "8")
    # 864 tokens in blocks of 128, one block that is not full for each sample, and vLLM's own.
    assert (flags["--block-size"], flags["--num-gpu-blocks-override"]) == ("128", "15")
    assert (flags["--dtype"], flags["--host"]) == ("float32", "127.0.0.1")
    assert "--enable-scale-out" in words
    assert "api-key" not in " ".join(words)


def test_a_role_without_an_environment_of_vllm_is_refused(model: Path) -> None:
    with pytest.raises(BackendError, match="vLLM is not installed here"):
        opened(model)
