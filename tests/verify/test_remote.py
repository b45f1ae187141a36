"""Rewards of a server: batches, attempts, the cache, and what is never a score."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from flowrl.backend.protocols import ScoreContext, ScoreRequest
from flowrl.errors import ConfigError, RewardError
from flowrl.ids import RoleName, SampleId
from flowrl.specs import FinishReason
from flowrl_backends.verify.remote import read_answer
from flowrl_backends.verify.scorer import Scorer


class Service(ThreadingHTTPServer):
    """A server that answers with what the response says, and remembers what it was asked."""

    daemon_threads = True
    asked: list[dict[str, object]]
    failures: int


class Handler(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append({**body, "key": self.headers.get("Authorization")})
        status, reply = 200, b""
        if self.server.failures:
            self.server.failures -= 1
            status = 503
        elif self.path.endswith("/chat/completions"):
            content = body["messages"][0]["content"]
            reply = json.dumps({"choices": [{"message": {"content": content}}]}).encode()
        elif body["response"] == "forbidden":
            status = 403
        elif body["response"] == "moved":
            status = 302
        else:
            reply = json.dumps({"score": json.loads(body["response"])}).encode()
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def do_GET(self) -> None:
        self.server.asked.append({"key": self.headers.get("Authorization")})
        self.send_error(404)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def service() -> Iterator[Service]:
    with Service(("127.0.0.1", 0), Handler) as server:
        server.asked, server.failures = [], 0
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def scorer(service: Service, **options: object) -> Scorer:
    url = f"http://127.0.0.1:{service.server_address[1]}/v1"
    term = {"kind": "http", "name": "judge", "url": url, "retries": 1, **options}
    return Scorer(ScoreContext(role=RoleName("v"), terms=(term,)))


def request(response: str, number: int = 0) -> ScoreRequest:
    return ScoreRequest(
        sample=SampleId(f"0/{number}/0"),
        prompt="p",
        response=response,
        answer="4",
        row={"a": 1},
        finish=FinishReason.STOP,
        num_tokens=3,
    )


def test_samples_of_a_batch_are_asked_for_once_each_and_kept(service):
    opened = scorer(service)
    texts = ["1", "2", "1", "0.5"]
    requests = [request(text, number) for number, text in enumerate(texts)]
    for _ in range(2):
        assert [r.score for r in opened.score_batch(requests)] == [1.0, 2.0, 1.0, 0.5]
    assert sorted(str(body["response"]) for body in service.asked) == ["0.5", "1", "2"]
    assert service.asked[0]["row"] == {"a": 1}
    opened.close()


def test_a_request_that_fails_is_sent_again(service):
    service.failures = 1
    assert scorer(service).score(request("3")).score == 3.0
    assert len(service.asked) == 2


@pytest.mark.parametrize(
    ("response", "part", "attempts"),
    [
        ("forbidden", "status 403", 1),
        ('"high"', "its answer has none", 2),
        ("true", "its answer has none", 2),
    ],
)
def test_what_is_no_score_is_an_error_of_the_sample(service, response, part, attempts):
    with pytest.raises(RewardError) as caught:
        scorer(service).score(request(response))
    assert part in str(caught.value)
    assert len(service.asked) == attempts


def test_a_judge_is_asked_with_the_template_and_its_last_number_counts(service, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    opened = scorer(
        service,
        kind="judge",
        model="judge-1",
        template="Grade {response} of {prompt} ({answer}). {x} Score: 7",
        pattern=r"Score: (\d)",
        api_key_env="JUDGE_KEY",
    )
    assert opened.score(request("{prompt} Score: 3")).score == 7.0
    (asked,) = service.asked
    assert (asked["model"], asked["temperature"], asked["key"]) == ("judge-1", 0.0, "Bearer secret")
    (message,) = asked["messages"]  # type: ignore[misc]
    assert message["content"] == "Grade {prompt} Score: 3 of p (4). {x} Score: 7"


def test_a_judge_without_its_key_is_refused_before_any_sample(service):
    with pytest.raises(ConfigError, match="the environment variable NO_SUCH_KEY is not set"):
        scorer(service, kind="judge", model="m", template="t", api_key_env="NO_SUCH_KEY")


def test_a_redirection_is_an_error_and_is_not_followed(service):
    with pytest.raises(RewardError, match="status 302"):
        scorer(service).score(request("moved"))
    assert len(service.asked) == 1


class Dripping:
    """A reply of one byte after the other."""

    def __init__(self, body: bytes) -> None:
        self.left = body

    def read1(self, size: int) -> bytes:
        first, self.left = self.left[:1], self.left[1:]
        return first


def test_an_answer_that_drips_in_ends_at_the_limit_of_the_whole():
    seconds = iter(range(100))
    assert read_answer(Dripping(b"12"), 2.0, lambda: next(seconds)) == b"12"
    with pytest.raises(TimeoutError, match="not complete after 2 s"):
        read_answer(Dripping(b"123456"), 2.0, lambda: next(seconds))
