"""The client of engines' HTTP servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from flowrl.errors import BackendError
from flowrl_backends.servers.http import HttpClient
from tests.servers.fake_server import Answer, fake_server, json_answer


def client(url: str, key: str = "") -> HttpClient:
    return HttpClient(url, key)


def always(answer: Answer) -> Callable[[Any], Answer]:
    return lambda _: answer


async def lines_of(http: HttpClient, path: str) -> list[bytes]:
    return [line async for line in http.lines(path, {})]


def test_a_posted_object_is_answered_with_json() -> None:
    with fake_server(load=lambda body: json_answer({"loaded": body["version"]})) as fake:
        http = client(fake.url, "secret")
        assert asyncio.run(http.post("/load", {"version": 3}, timeout_s=10)) == {"loaded": 3}
    assert "Authorization: Bearer secret\r\n" in fake.headers
    assert "Connection: close\r\n" in fake.headers


def test_an_empty_answer_is_none() -> None:
    with fake_server(abort=always(Answer(whole=True)), info=always(Answer())) as fake:
        http = client(fake.url)
        assert asyncio.run(http.post("/abort", {}, timeout_s=10)) is None
        assert asyncio.run(http.get("/info", timeout_s=10)) is None
    assert "Authorization" not in fake.headers


def test_lines_are_put_together_from_chunks() -> None:
    with fake_server(stream=always(Answer(chunks=[b"one\n\ntw", b"o\nthr", b"ee\n"]))) as fake:
        assert asyncio.run(lines_of(client(fake.url), "/stream")) == [b"one", b"two", b"three"]


def test_lines_come_before_the_answer_ends() -> None:
    async def first_line(http: HttpClient) -> bytes:
        async for line in http.lines("/stream", {}):
            return line
        raise AssertionError

    with fake_server(stream=always(Answer(chunks=[b"one\n", None, b"two\n"]))) as fake:
        assert asyncio.run(first_line(client(fake.url))) == b"one"


def test_another_status_is_an_error_with_the_text_of_the_answer() -> None:
    with fake_server(load=always(json_answer("no such folder", 400))) as fake:
        http = client(fake.url)
        with pytest.raises(BackendError, match="/load was answered with status 400") as caught:
            asyncio.run(http.post("/load", {}, timeout_s=10))
        assert (caught.value.where, caught.value.found) == (fake.url, '"no such folder"')
        with pytest.raises(BackendError, match="status 404"):
            asyncio.run(lines_of(http, "/other"))
        assert asyncio.run(http.status("/other", timeout_s=10)) == 404


def test_an_answer_that_breaks_off_is_an_oserror() -> None:
    with fake_server(stream=always(Answer(chunks=[b"one\n"], cut=True))) as fake:
        with pytest.raises(ConnectionResetError, match="ended its answer to /stream"):
            asyncio.run(lines_of(client(fake.url), "/stream"))
        url = fake.url
    with pytest.raises(OSError):
        asyncio.run(client(url).get("/stream", timeout_s=10))


def test_no_answer_in_time_is_an_oserror() -> None:
    with fake_server(load=always(Answer(chunks=[None]))) as fake, pytest.raises(TimeoutError):
        asyncio.run(client(fake.url).post("/load", {}, timeout_s=0.01))
