"""The SGLang plug-in against answers that SGLang 0.5.23 gave (tests/data/sglang_0_5_23.json)."""

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
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel

from flowrl.backend.protocols import Finished, FinishReason, GenerateBackend, GenerateRequest
from flowrl.backend.registry import check_options, options_of
from flowrl.errors import BackendError, ConfigError
from flowrl.ids import SampleId
from flowrl.specs import Sampling
from flowrl_backends.sglang.plugin import plugin
from tests.policy_contexts import policy_context, weights_of
from tests.servers.fake_server import Answer, FakeServer, fake_server, json_answer, stream

DATA = Path(__file__).parent.parent / "data"
RECORDED = json.loads((DATA / "sglang_0_5_23.json").read_text())
# The last one is that of the model's own configuration.
STOPS = (5, 9, 258)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"vocab_size": 512, "eos_token_id": 258}')
    (folder / "model.safetensors").write_bytes(b"old")
    return folder


def answers(value: object) -> Callable[[Any], Answer]:
    return lambda _: json_answer(value)


@contextmanager
def serving(generate: Callable[[Any], Answer], **others: Any) -> Iterator[FakeServer]:
    with fake_server(
        ready=answers({}),
        server_info=answers(RECORDED["/server_info"]),
        generate=generate,
        abort_request=lambda _: Answer(whole=True),
        pause_generation=answers(RECORDED["/pause_generation"]),
        update_weights_from_disk=answers(RECORDED["/update_weights_from_disk"]),
        continue_generation=answers(RECORDED["/continue_generation"]),
        **others,
    ) as fake:
        yield fake


def recorded(name: str) -> Callable[[Any], Answer]:
    return lambda _: stream(*RECORDED[name])


def opened(model: Path, stops: tuple[int, ...] = STOPS, **options: object) -> GenerateBackend:
    context = policy_context(
        model, fresh=False, max_length=2000, stop_token_ids=stops, options=options
    )
    return plugin.open_generate(context, None)


def request(**sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        sample=SampleId("0/0/0"),
        attempt=2,
        prompt=np.arange(10, 20),
        response=np.array([30, 31]),
        sampling=Sampling(**{"max_tokens": 42, **sampling}),
        seed=7,
        shares_prompt="0/0",
    )


def end_of(engine: GenerateBackend, one: GenerateRequest) -> Finished:
    engine.submit([one])
    while True:
        for output in engine.poll(10.0):
            if isinstance(output, Finished):
                return output


def rows(name: str) -> list[list[Any]]:
    return [row for one in RECORDED[name] for row in one["meta_info"]["output_token_logprobs"]]


def test_a_stream_is_a_response_with_its_logprobs(model: Path) -> None:
    with serving(recorded("stop")) as fake, closing(opened(model, url=fake.url)) as engine:
        end = end_of(engine, request(temperature=0.5, top_p=0.9, top_k=4, min_p=0.1))
    assert (end.reason, end.attempt) == (FinishReason.STOP, 2)
    assert end.tokens.tolist() == [token for _, token, _ in rows("stop")]
    assert np.allclose(end.logprobs, [logprob for logprob, _, _ in rows("stop")])
    assert end.versions == ((0, len(end.tokens)),)
    (body,) = fake.bodies("/generate")
    assert body.pop("rid").startswith("flowrl-server-")
    assert body == {
        "input_ids": [*range(10, 20), 30, 31],
        "stream": True,
        "return_logprob": True,
        "logprob_start_len": -1,
        "sampling_params": {
            "max_new_tokens": 40,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 4,
            "min_p": 0.1,
            "stop_token_ids": [5, 9, 258],
            "ignore_eos": False,
        },
    }


def test_an_end_token_of_the_servers_own_model_is_an_error(model: Path) -> None:
    with serving(recorded("stop")) as fake, closing(opened(model, (5, 9), url=fake.url)) as engine:
        with pytest.raises(BackendError, match="at a token that is no stop token") as caught:
            end_of(engine, request())
        assert caught.value.found == "token 258"


def test_all_tokens_are_kept_where_no_option_cuts(model: Path) -> None:
    with serving(recorded("stop")) as fake, closing(opened(model, url=fake.url)) as engine:
        end_of(engine, request())
    sampling = fake.bodies("/generate")[0]["sampling_params"]
    assert (sampling["top_p"], sampling["top_k"], sampling["min_p"]) == (1.0, -1, 0.0)


def test_tokens_across_a_publication_have_their_versions(model: Path) -> None:
    with serving(recorded("across")) as fake, closing(opened(model, url=fake.url)) as engine:
        end = end_of(engine, request(max_tokens=122))
    spans = RECORDED["across"][-1]["meta_info"]["weight_versions"]
    assert end.versions == tuple((int(s["version"]), s["end"] - s["start"]) for s in spans)
    assert sum(count for _, count in end.versions) == len(end.tokens) == 120


@pytest.mark.parametrize("name", ["aborted", "aborted in the queue"])
def test_an_aborted_request_keeps_its_tokens(model: Path, name: str) -> None:
    asked = threading.Event()

    def generate(_: Any) -> Answer:
        asked.set()
        return stream(*RECORDED[name][:-1], None, RECORDED[name][-1])

    with serving(generate) as fake, closing(opened(model, url=fake.url)) as engine:
        fake.script["/abort_request"] = lambda _: fake.go() or Answer(whole=True)
        engine.submit([request(max_tokens=1200)])
        asked.wait()
        engine.abort([SampleId("0/0/0")])
        end = next(one for one in iter_outputs(engine) if isinstance(one, Finished))
    assert end.reason is FinishReason.ABORT
    assert end.tokens.tolist() == [token for _, token, _ in rows(name)]
    (generated,) = fake.bodies("/generate")
    assert fake.bodies("/abort_request")[0] == {"rid": generated["rid"]}


def iter_outputs(engine: GenerateBackend) -> Iterator[object]:
    while True:
        yield from engine.poll(10.0)


def test_the_end_of_a_request_that_never_ran_repeats_no_tokens(model: Path) -> None:
    # One that was taken back from its place and aborted: its end has all logprobs again.
    before, last = RECORDED["stop"][0], RECORDED["aborted in the queue"][-1]
    known = before["meta_info"]["output_token_logprobs"]
    meta = last["meta_info"] | {"completion_tokens": len(known), "output_token_logprobs": known}

    def generate(_: Any) -> Answer:
        return stream(before, None, last | {"meta_info": meta})

    with serving(generate) as fake, closing(opened(model, url=fake.url)) as engine:
        fake.script["/abort_request"] = lambda _: fake.go() or Answer(whole=True)
        engine.submit([request()])
        next(iter_outputs(engine))  # progress
        engine.abort([SampleId("0/0/0")])
        end = next(one for one in iter_outputs(engine) if isinstance(one, Finished))
    assert len(end.tokens) == len(end.logprobs) == len(known)


@pytest.mark.parametrize(
    ("name", "stop", "num_tokens", "versions"),
    [
        ("aborted", "0.t263.t32", 3, ((0, 3),)),
        ("across", ("none", "436.t248."), 16, ((0, 14), (4, 2))),
    ],
)
def test_a_response_ends_with_the_token_that_completes_a_stop_text(
    model: Path, name: str, stop: Any, num_tokens: int, versions: Any
) -> None:
    words = {f"t{token}.": token for token in range(512)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t0."))
    tokenizer.decoder = ByteLevel()
    tokenizer.save(str(model / "tokenizer.json"))

    def generate(_: Any) -> Answer:
        return stream(*RECORDED[name][:2], None, *RECORDED[name][2:])

    with serving(generate) as fake, closing(opened(model, url=fake.url)) as engine:
        fake.script["/abort_request"] = lambda _: fake.go() or Answer(whole=True)
        end = end_of(engine, request(max_tokens=1200, stop=stop))
    assert end.reason is FinishReason.STOP
    assert end.tokens.tolist() == [token for _, token, _ in rows(name)][:num_tokens]
    assert len(end.logprobs) == num_tokens
    assert end.versions == versions
    (generated,) = fake.bodies("/generate")
    assert fake.bodies("/abort_request")[0] == {"rid": generated["rid"]}
    assert "stop" not in generated["sampling_params"]


def test_a_refused_request_is_an_error_with_the_message_of_the_server(model: Path) -> None:
    with serving(recorded("error")) as fake, closing(opened(model, url=fake.url)) as engine:
        with pytest.raises(BackendError, match="refused a request") as caught:
            end_of(engine, request())
        assert "longer than the model's context length" in str(caught.value.found)


def test_weights_are_loaded_between_steps_and_the_cache_is_flushed(model: Path) -> None:
    with serving(recorded("stop")) as fake, closing(opened(model, url=fake.url)) as engine:
        fake.asked.clear()
        engine.load(weights_of(7, model))
        next(iter_outputs(engine))
    assert fake.asked == [
        ("/pause_generation", {"mode": "retract"}),
        (
            "/update_weights_from_disk",
            {
                "model_path": str(model),
                "weight_version": "7",
                "flush_cache": True,
                "keep_pause": True,
            },
        ),
        ("/continue_generation", {}),
    ]


def test_a_server_that_loads_nothing_goes_on_and_raises(model: Path) -> None:
    with serving(recorded("stop")) as fake, closing(opened(model, url=fake.url)) as engine:
        refusal = json_answer({"success": False, "message": "no such folder"}, 400)
        fake.script["/update_weights_from_disk"] = lambda _: refusal
        engine.load(weights_of(7, model))
        with pytest.raises(BackendError, match="status 400") as caught:
            next(iter_outputs(engine))
        assert "no such folder" in str(caught.value.found)
        assert fake.asked[-1] == ("/continue_generation", {})


def test_a_running_server_serves_the_roles_own_model_first(model: Path) -> None:
    with serving(recorded("stop")) as fake, closing(opened(model, url=fake.url)):
        (body,) = fake.bodies("/update_weights_from_disk")
    assert (body["model_path"], body["weight_version"]) == (str(model), "0")


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"version": "0.4.9"}, "another version of SGLang"),
        ({"incremental_streaming_output": False}, "streams all tokens again"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused(model: Path, info: Any, message: str) -> None:
    with serving(recorded("stop")) as fake:
        fake.script["/server_info"] = answers(RECORDED["/server_info"] | info)
        with pytest.raises(BackendError, match=message):
            opened(model, url=fake.url)


def test_the_key_of_a_running_server_is_in_a_variable(model: Path, monkeypatch) -> None:
    monkeypatch.setenv("SERVER_KEY", "secret")
    with serving(recorded("stop")) as fake:
        opened(model, url=fake.url, api_key_env="SERVER_KEY").close()
    assert "Authorization: Bearer secret" in fake.headers


# Starting a server


SERVER = """#!{python}
import http.server, json, pathlib, sys
flags = dict(zip(sys.argv[3:], sys.argv[4:]))
pathlib.Path({seen!r}).write_text(json.dumps(sys.argv[1:]))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({info}).encode())
http.server.HTTPServer(("127.0.0.1", int(flags["--port"])), Handler).serve_forever()
"""


def interpreter(tmp_path: Path, text: str) -> str:
    path = tmp_path / "python"
    path.write_text(text)
    path.chmod(0o700)
    return str(path)


def test_a_server_is_started_with_the_flags_of_the_context(model: Path, tmp_path: Path) -> None:
    seen = tmp_path / "seen.json"
    info = RECORDED["/server_info"]
    python = interpreter(tmp_path, SERVER.format(python=sys.executable, seen=str(seen), info=info))
    context = policy_context(
        model,
        fresh=False,
        num_slots=8,
        max_length=100,
        stop_token_ids=(5,),
        options={"python": python, "flags": ["--page-size", "4"]},
    )
    plugin.open_generate(context, None).close()
    words = json.loads(seen.read_text())
    assert words[:2] == ["-m", "sglang.launch_server"]
    flags = dict(pairwise(words))
    assert (flags["--device"], flags["--dtype"]) == ("cpu", "float32")
    assert (flags["--context-length"], flags["--max-running-requests"]) == ("108", "8")
    assert (flags["--max-total-tokens"], flags["--host"]) == ("864", "127.0.0.1")
    assert words[-2:] == ["--page-size", "4"]
    assert "--incremental-streaming-output" in words
    assert not Path(flags["--model-path"]).exists()  # it ended with the engine
    assert not Path(flags["--config"]).exists()
    assert "api-key" not in " ".join(words)


def test_a_server_that_does_not_start_is_an_error_with_its_last_words(
    model: Path, tmp_path: Path
) -> None:
    python = interpreter(tmp_path, "#!/bin/sh\necho 'No module named sglang'; exit 1\n")
    with pytest.raises(BackendError, match="ended while it started") as caught:
        opened(model, python=python)
    assert caught.value.found == "No module named sglang"


def test_a_server_that_is_not_ready_in_time_is_an_error(model: Path, tmp_path: Path) -> None:
    python = interpreter(tmp_path, "#!/bin/sh\nexec sleep 600\n")
    with pytest.raises(BackendError, match=r"not ready after 0\.01 s"):
        opened(model, python=python, start_timeout_s=0.01)


def test_an_interpreter_that_is_not_there_is_reported_before_anything_starts() -> None:
    status = plugin.check({"python": "/nowhere/python"})
    assert (status.usable, status.problem) == (False, "there is no interpreter /nowhere/python")
    assert plugin.check({"python": sys.executable}).usable


def test_a_role_without_an_environment_of_sglang_is_refused(model: Path) -> None:
    with pytest.raises(BackendError, match="SGLang is not installed here"):
        opened(model)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"url": "http://127.0.0.1:1", "python": "python"}, "python, flags and env"),
        ({"api_key_env": "KEY"}, "api_key_env is for a server at url"),
        ({"url": "127.0.0.1:1"}, "url"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: Any, found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        check_options("sglang", options_of(plugin), options, at="options", where=str)
