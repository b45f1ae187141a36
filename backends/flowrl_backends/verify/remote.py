"""Rewards of a server: `http`, a service that scores, and `judge`, a language model that is asked.

    http    POST URL {"prompt", "response", "answer", "row"}  ->  a number, or {"score": number}
    judge   POST URL/chat/completions of the OpenAI interface; the score is the last match of
            `pattern` in the answer, its first group

Samples of a batch are sent at once, `concurrency` of them. A request that fails by the network, by
a status of 429 or from 500 on, or without a usable answer is sent again `retries` times, after
0.25, 0.5, 1 ... seconds. Equal requests are answered from a cache. What has no answer then is an
error of the sample, and never a score.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
import urllib.error
import urllib.request
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from flowrl.backend.protocols import ScoreRequest
from flowrl.errors import ConfigError, RewardError
from flowrl_backends.verify.options import TermOptions

_FIRST_PAUSE_S = 0.25
_MAX_ANSWER = 1 << 22


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirections, which would send the key to another server, and a request no body."""

    def redirect_request(self, *args: object) -> None:
        """Returns no other request, so that the status is an error."""


_OPENER = urllib.request.build_opener(_NoRedirects)


class HttpReward:
    """A rule that a service computes.

    Attributes:
        batch_size: Samples that are sent at once.
    """

    def __init__(self, options: TermOptions) -> None:
        self._url = options.text("url")
        if not self._url.startswith(("http://", "https://")):
            raise ConfigError(
                "this is no address of a server",
                where=f"{options.where}.url",
                found=repr(self._url),
                expected="http://HOST:PORT/PATH or https://...",
            )
        self.batch_size = options.whole("concurrency", 16)
        self._retries = options.whole("retries", 2)
        self._request_s = options.number("request_s", 30.0)
        self._cache_size = options.whole("cache", 10_000)
        self._cache: OrderedDict[bytes, float] = OrderedDict()
        self._headers = {"Content-Type": "application/json"}
        self._threads = ThreadPoolExecutor(self.batch_size)

    def __call__(self, request: ScoreRequest) -> float:
        """Returns the score of a sample."""
        return self.score_batch([request])[0]

    def score_batch(self, requests: Sequence[ScoreRequest]) -> list[float]:
        """Returns the scores of samples, which are asked for at once."""
        bodies = [json.dumps(self._body(request), default=str).encode() for request in requests]
        missing = [body for body in dict.fromkeys(bodies) if body not in self._cache]
        answers = dict(zip(missing, self._threads.map(self._answer, missing), strict=True))
        for body, answer in answers.items():
            if isinstance(answer, float):
                self._cache[body] = answer
        scores = []
        for request, body in zip(requests, bodies, strict=True):
            answer = answers[body] if body in answers else self._cache[body]
            if isinstance(answer, str):
                raise RewardError(
                    f"{self._url} gave no score: {answer}", where=f"sample {request.sample}"
                )
            scores.append(answer)
        while len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)
        return scores

    def close(self) -> None:
        """Ends the threads, which may still wait for answers."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _body(self, request: ScoreRequest) -> Mapping[str, object]:
        return {
            "prompt": request.prompt,
            "response": request.response,
            "answer": request.answer,
            "row": dict(request.row),
        }

    def _score(self, answer: object) -> float | None:
        """Returns the score in an answer; None if it has none."""
        value = answer.get("score") if isinstance(answer, dict) else answer
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return float(value) if math.isfinite(value) else None

    def _address(self) -> str:
        return self._url

    def _answer(self, body: bytes) -> float | str:
        """Returns the score of a request, or why there is none."""
        reason = ""
        for attempt in range(self._retries + 1):
            if attempt:
                time.sleep(_FIRST_PAUSE_S * 2 ** (attempt - 1))
            message = urllib.request.Request(self._address(), data=body, headers=self._headers)
            try:
                with _OPENER.open(message, timeout=self._request_s) as reply:
                    text = read_answer(reply, self._request_s)
                score = self._score(json.loads(text))
                if score is not None:
                    return score
                reason = f"its answer has none: {text[:200].decode(errors='replace')!r}"
            except urllib.error.HTTPError as error:
                reason = f"status {error.code} {error.reason}"
                if error.code < 500 and error.code != 429:
                    return reason
            except (OSError, ValueError) as error:
                reason = f"{type(error).__name__}: {error}"
        return f"{reason} (asked {self._retries + 1} times)"


class _Reply(Protocol):
    def read1(self, size: int) -> bytes: ...


def read_answer(
    reply: _Reply, limit_s: float, clock: Callable[[], float] = time.monotonic
) -> bytes:
    """Returns the body of a reply, cut at the longest answer that is read.

    Args:
        limit_s: Seconds for the whole body; the limit of the connection counts from byte to byte.
        clock: Returns seconds that only grow.

    Raises:
        TimeoutError: The body took longer.
    """
    started, answer = clock(), bytearray()
    while len(answer) < _MAX_ANSWER and (part := reply.read1(_MAX_ANSWER - len(answer))):
        answer += part
        if clock() - started > limit_s:
            raise TimeoutError(f"the answer was not complete after {limit_s:g} s")
    return bytes(answer)


class JudgeReward(HttpReward):
    """A rule that a language model judges."""

    def __init__(self, options: TermOptions) -> None:
        super().__init__(options)
        self._model = options.text("model")
        self._template = options.text("template")
        self._max_tokens = options.whole("max_tokens", 512)
        self._pattern = re.compile(options.text("pattern", r"(-?\d+(?:\.\d+)?)"))
        variable = options.text("api_key_env", "")
        if variable:
            if variable not in os.environ:
                raise ConfigError(
                    f"the environment variable {variable} is not set",
                    where=f"{options.where}.api_key_env",
                    hint="export it before the run",
                )
            self._headers["Authorization"] = f"Bearer {os.environ[variable]}"

    def _address(self) -> str:
        return f"{self._url.rstrip('/')}/chat/completions"

    def _body(self, request: ScoreRequest) -> Mapping[str, object]:
        text = self._template
        values = {"prompt": request.prompt, "response": request.response, "answer": request.answer}
        # In one pass: a response may contain braces of its own.
        text = re.sub(r"\{(prompt|response|answer)\}", lambda m: values[m[1]], text)
        return {
            "model": self._model,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0.0,
            "max_tokens": self._max_tokens,
        }

    def _score(self, answer: object) -> float | None:
        try:
            text = answer["choices"][0]["message"]["content"]  # type: ignore[index]
            found = list(self._pattern.finditer(text))
            return super()._score(float(found[-1][min(1, self._pattern.groups)]))
        except (KeyError, IndexError, TypeError, ValueError):
            return None
