"""The promises of a `GenerateBackend`, each as a check that says what a broken one does to a run.

Each check takes an open engine that serves version 3 of the first model and leaves it so, or with
nothing running; it returns what it found in a few words, or raises `CheckFailed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np
from tokenizers import Tokenizer

from flowrl.backend.batch import Floats, Ints, KeptTokens
from flowrl.backend.plugin import Plugin
from flowrl.backend.protocols import Finished, FinishReason, GenerateRequest
from flowrl.errors import BackendError
from flowrl.ids import SampleId
from flowrl.testing.checked_engine import CheckedEngine, CheckFailed, Models
from flowrl.testing.reference_model import reference_of

FIRST, SECOND = 3, 4
"""The versions that the checks publish."""

_TRUNCATION = {"top_k": 4, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3}
"""The options of truncation that are checked, with their values."""

_BIASED = "importance ratios are wrong: the policy gradient is biased from the first step on"

_UNSEEDED = "a run that is resumed, or loses an engine, does not repeat its samples"

_NO_PROGRESS = (
    "no poll reported that two requests had tokens before they ended",
    "the scheduler cannot see which samples lag behind",
)


class NotDeclared(Exception):
    """The plug-in does not declare what a check is about."""


def _logprobs(at: CheckedEngine) -> str:
    worst = 0.0
    for temperature in (1.0, 0.7):
        requests = [at.request(i, temperature=temperature) for i in range(24)]
        ends = at.finish(requests)
        worst = max(worst, at.require_served(requests, ends, at.models.first, _BIASED))
    return f"48 samples at two temperatures, largest difference {worst:.1g}"


def _truncated(at: CheckedEngine) -> str:
    left_out = [name for name in _TRUNCATION if name not in at.capabilities.sampling]
    worst, number = 0.0, 100
    for name, value in _TRUNCATION.items():
        if name in left_out:
            continue
        # Of a penalty the likeliest token is known.
        greedy = {"temperature": 0.0} if name == "repetition_penalty" else {}
        requests = [at.request(number + i, **{name: value}, **greedy) for i in range(8)]
        number += 8
        ends = at.finish(requests)
        difference = at.require_served(
            requests,
            ends,
            at.models.first,
            f"logprobs are to be those before {name}; with those after it, importance ratios are "
            "wrong wherever a rollout is truncated",
        )
        worst = max(worst, difference)
        for request in requests:
            for place, logits, tokens in _steps(at, request, ends[request.sample]):
                if not _is_kept(name, value, logits, tokens, at.models.tolerance):
                    raise CheckFailed(
                        f"token {place} of {request.sample} is none that {name}={value} keeps",
                        "the sampling options of the workflow are not those of the rollout",
                    )
    found = f"{number - 100} samples, largest difference {worst:.1g}"
    return found + (f"; not declared: {', '.join(left_out)}" if left_out else "")


def _is_kept(name: str, value: float, logits: Floats, tokens: Ints, slack: float) -> bool:
    """True if an option lets the last token follow the others, up to `slack` in logits."""
    token = tokens[-1]
    likelier = logits > logits[token] + slack
    match name:
        case "top_k":
            return bool(likelier.sum() < value)
        case "top_p":
            odds = np.exp(logits - logits.max())
            return bool(odds[likelier].sum() / odds.sum() < value + slack)
        case "min_p":
            return bool(logits[token] > logits.max() + np.log(value) - slack)
    left = _penalised(logits, tokens[:-1], value)
    return bool(left[token] > left.max() - 10 * slack)


def _penalised(logits: Floats, tokens: Ints, penalty: float) -> Floats:
    """Returns the logits after `repetition_penalty`."""
    left, seen = logits.copy(), np.unique(tokens)
    left[seen] = np.where(left[seen] > 0, left[seen] / penalty, left[seen] * penalty)
    return left


def _steps(
    at: CheckedEngine, request: GenerateRequest, end: Finished
) -> Iterator[tuple[int, Floats, Ints]]:
    """Yields each place of an end, the logits before its token, and all tokens up to it."""
    tokens, start = np.concatenate([request.prompt, end.tokens]), len(request.prompt)
    logits = reference_of(at.models.first).logits(tokens)[start - 1 : -1].numpy()
    for place, row in enumerate(logits):
        yield place, row, tokens[: start + place + 1]


def _sampler(at: CheckedEngine) -> str:
    able = at.capabilities.repeats_truncation
    options = {name: value for name, value in _TRUNCATION.items() if name in able}
    if not options:
        raise NotDeclared("Capabilities.repeats_truncation has no truncation")
    requests = [at.request(i, logprobs="sampler", **options) for i in range(1100, 1108)]
    ends, worst = at.finish(requests), 0.0
    for request in requests:
        end = ends[request.sample]
        kept = end.kept or KeptTokens.everything(len(end.tokens))
        for place, logits, tokens in _steps(at, request, end):
            left = _penalised(logits, tokens[:-1], options.get("repetition_penalty", 1.0))
            ids = kept.select(np.array([place])).ids
            row = left[ids] if len(ids) else left
            expected = left[tokens[-1]] - row.max() - np.log(np.exp(row - row.max()).sum())
            worst = max(worst, abs(float(expected - end.logprobs[place])))
    if worst > at.models.tolerance:
        raise CheckFailed(
            f"logprobs of the sampler differ by up to {worst:.2g} from those over the tokens that "
            "it kept",
            "a trainer that repeats the truncation has others: importance ratios are wrong",
        )
    return f"8 samples under {', '.join(options)}, largest difference {worst:.1g}"


def _alone(at: CheckedEngine) -> str:
    requests = [at.request(i) for i in range(200, 208)]
    together = at.finish(requests)
    same, worst = 0, 0.0
    for request in reversed(requests):
        alone = at.finish([request])
        same += np.array_equal(alone[request.sample].tokens, together[request.sample].tokens)
        worst = max(worst, at.require_served([request], alone, at.models.first, _BIASED))
    exact = at.models.context.dtype == "float32"
    if at.capabilities.seeds and same < (len(requests) if exact else len(requests) // 2):
        raise CheckFailed(
            f"{len(requests) - same} of 8 samples have other tokens alone than in a batch",
            f"{_UNSEEDED}: seeds must depend on the request alone",
        )
    return f"{same} of 8 samples are the same alone and in a batch{_difference(at, worst)}"


def _greedy(at: CheckedEngine) -> str:
    requests = [at.request(i, temperature=0.0) for i in range(300, 308)]
    ends = at.finish(requests)
    for request in requests:
        for place, logits, tokens in _steps(at, request, ends[request.sample]):
            behind = float(logits.max() - logits[tokens[-1]])
            if behind > 10 * at.models.tolerance:
                raise CheckFailed(
                    f"token {place} of {request.sample} has a logit {behind:.2g} below the largest",
                    "evaluations and greedy baselines are not greedy",
                )
    worst = at.require_served(requests, ends, at.models.first, "logprobs are to be those at 1")
    return f"8 samples, largest difference {worst:.1g}"


def _resume(at: CheckedEngine) -> str:
    _require(at.capabilities.resume, "resume")
    requests = [at.request(i, min_tokens=16) for i in range(400, 408)]
    whole = at.finish(requests)
    parts = [
        replace(request, response=whole[request.sample].tokens[:7], attempt=1)
        for request in requests
        if len(whole[request.sample].tokens) > 7
    ]
    rest = at.finish(parts)
    worst = at.require_served(parts, rest, at.models.first, _BIASED)
    _same_whole(at, parts, whole, rest, "after 7 kept tokens")
    return f"{len(parts)} samples continued after 7 tokens{_difference(at, worst)}"


def _abort(at: CheckedEngine) -> str:
    _require(at.capabilities.abort, "abort")
    requests = [at.request(i, min_tokens=80, max_tokens=90) for i in range(500, 504)]
    whole = at.finish(requests)
    kept: dict[SampleId, int] = {}

    def stop(progress: Mapping[SampleId, int]) -> None:
        begun = [sample for sample, num_tokens in progress.items() if num_tokens > 0]
        if not kept and len(begun) > 1:
            kept.update({sample: progress[sample] for sample in begun[:2]})
            at.engine.abort([*kept, SampleId("9/9/9")])
            at.engine.abort([*kept])

    ends = at.finish(requests, during=stop)
    if not kept:
        raise CheckFailed(*_NO_PROGRESS)
    for sample, num_tokens in kept.items():
        end = ends[sample]
        if end.reason is not FinishReason.ABORT or len(end.tokens) < num_tokens:
            raise CheckFailed(
                f"{sample} ended with {end.reason.value} and {len(end.tokens)} tokens; abort and "
                f"at least the {num_tokens} reported ones were expected",
                "generated tokens are lost whenever weights are published or a batch is full",
            )
    if any(e.reason is FinishReason.ABORT for e in ends.values() if e.sample not in kept):
        raise CheckFailed("a request ended that nobody aborted", "samples start again for nothing")
    worst = at.require_served(requests, ends, at.models.first, _BIASED)
    found = f"2 of 4 aborted with {min(kept.values())} tokens or more"
    if not at.capabilities.resume:
        return f"{found}, largest difference {worst:.1g}"
    parts = [
        replace(request, response=ends[request.sample].tokens, attempt=1)
        for request in requests
        if request.sample in kept
    ]
    rest = at.finish(parts)
    worst = max(worst, at.require_served(parts, rest, at.models.first, _BIASED))
    _same_whole(at, parts, whole, rest, "after an abort")
    return f"{found}, and continued{_difference(at, worst)}"


def _stops(at: CheckedEngine) -> str:
    stops = at.models.context.stop_token_ids
    requests = [at.request(i, max_tokens=80) for i in range(600, 632)]
    ends = at.finish(requests)
    for end in ends.values():
        inside = np.isin(end.tokens, stops)
        ended = bool(len(inside)) and bool(inside[-1])
        if inside[:-1].any() or ended != (end.reason is FinishReason.STOP):
            raise CheckFailed(
                f"{end.sample} ended with {end.reason.value}, its stop tokens at positions "
                f"{np.flatnonzero(inside).tolist()} of {len(inside)}",
                "the response is to end with its stop token and contain no other: the end of a "
                "response is not learned otherwise",
            )
    stopped = sum(end.reason is FinishReason.STOP for end in ends.values())
    found = f"{stopped} of 32 samples ended with a stop token"
    if "min_tokens" not in at.capabilities.sampling:
        return f"{found}; not declared: min_tokens"
    held = [at.request(i, min_tokens=40, max_tokens=60) for i in range(632, 640)]
    for end in at.finish(held).values():
        if np.isin(end.tokens[:40], stops).any():
            raise CheckFailed(
                f"{end.sample} has a stop token before token 40 under min_tokens=40",
                "the sampling options of the workflow are not those of the rollout",
            )
    return found


def _stop_texts(at: CheckedEngine) -> str:
    if "stop" not in at.capabilities.sampling:
        raise NotDeclared("Capabilities.sampling has no stop")
    decode = Tokenizer.from_file(str(at.models.first / "tokenizer.json")).decode
    requests, num_ended = [at.request(i, temperature=0.0) for i in range(1200, 1216)], 0
    whole = at.finish(requests)
    for request in requests:
        tokens = whole[request.sample].tokens.tolist()
        pairs = [decode(tokens[place : place + 2]) for place in reversed(range(len(tokens) - 1))]
        stop = next((text for text in pairs if len(text) == 2 and text.isalnum()), None)
        if stop is None:
            continue
        sampling = replace(request.sampling, stop=stop)
        (end,) = at.finish([replace(request, sampling=sampling)]).values()
        right = next(n for n in range(1, len(tokens) + 1) if stop in decode(tokens[:n]))
        if end.reason is not FinishReason.STOP or end.tokens.tolist() != tokens[:right]:
            raise CheckFailed(
                f"{end.sample} ended with {end.reason.value} and {len(end.tokens)} tokens, where "
                f"{stop!r} is complete with token {right}",
                "what follows a stop text is trained on, or the text itself is not",
            )
        num_ended += 1
    return f"{num_ended} samples ended with a text of two tokens"


def _published(at: CheckedEngine) -> str:
    requests = [at.request(i, min_tokens=8) for i in range(700, 708)]
    at.finish(requests)  # so that their prompts are in a cache of prefixes
    at.load(SECOND, at.models.second)
    try:
        ends = at.finish(requests)
        for end in ends.values():
            if end.versions != ((SECOND, len(end.tokens)),):
                raise CheckFailed(
                    f"{end.sample} has versions {end.versions} after version {SECOND} was "
                    "published",
                    "the staleness of samples is counted wrong",
                )
        worst = at.require_served(
            requests,
            ends,
            at.models.second,
            "samples are generated by other weights than their version says: every weight sync "
            "makes the run more off-policy",
            instead={f"version {FIRST}": at.models.first},
        )
    finally:
        at.load(FIRST, at.models.first)
    at.require_served(requests, at.finish(requests), at.models.first, _BIASED)
    return f"8 samples of each version, largest difference {worst:.1g}"


def _published_in_flight(at: CheckedEngine) -> str:
    requests = [at.request(i, min_tokens=80, max_tokens=90) for i in range(800, 804)]
    published: dict[SampleId, int] = {}

    def publish(progress: Mapping[SampleId, int]) -> None:
        if not published and len(progress) > 1 and min(progress.values()) > 0:
            published.update(progress)
            at.load(SECOND, at.models.second)

    try:
        ends = at.finish(requests, during=publish)
        if not published:
            raise CheckFailed(*_NO_PROGRESS)
        worst = max(_across(at, request, ends[request.sample]) for request in requests)
        # New requests on prompts whose keys and values the old weights made.
        fresh = [at.request(i, min_tokens=8) for i in range(800, 804)]
        at.require_served(
            fresh,
            at.finish(fresh),
            at.models.second,
            "a cache of prefixes is to be keyed by the version of the weights: otherwise every "
            "group that shares a prompt with an older one is generated by a mixture of weights",
        )
    finally:
        at.load(FIRST, at.models.first)
    return f"4 samples across a publication, largest difference {worst:.1g}"


def _across(at: CheckedEngine, request: GenerateRequest, end: Finished) -> float:
    """Returns the difference of a sample that was generated by two versions.

    The keys and values of tokens before the publication may be those of either version.
    """
    spans = dict(end.versions)
    if set(spans) - {FIRST, SECOND} or [v for v, _ in end.versions] != sorted(spans):
        raise CheckFailed(
            f"{end.sample} has versions {end.versions}",
            "the staleness of samples is counted wrong",
        )
    old, prompt = spans.get(FIRST, 0), len(request.prompt)
    tokens = np.concatenate([request.prompt, end.tokens])
    first, second = reference_of(at.models.first), reference_of(at.models.second)
    before = first.logprobs(tokens[: prompt + old], prompt) - end.logprobs[:old]
    start = prompt + old
    if start == len(tokens):
        return float(np.abs(before).max(initial=0.0))
    after = [
        second.logprobs(tokens, start, older=first, kept=start - 1) - end.logprobs[old:],
        second.logprobs(tokens, start) - end.logprobs[old:],
    ]
    worst = max(
        float(np.abs(before).max(initial=0.0)), min(float(np.abs(each).max()) for each in after)
    )
    if worst > at.models.tolerance:
        raise CheckFailed(
            f"logprobs of {end.sample} with versions {end.versions} differ by up to {worst:.2g} "
            "from a forward pass with the weights of its versions",
            "samples in flight at a weight sync are trained with wrong logprobs, or their versions "
            "are wrong",
        )
    return worst


def _sleep(at: CheckedEngine) -> str:
    _require(at.capabilities.sleep, "sleep")
    requests = [at.request(i) for i in range(900, 904)]
    at.load(SECOND, at.models.second)  # not those that it was opened with
    try:
        before = at.finish(requests)
        at.engine.sleep()
        at.engine.wake()
        at.engine.wake()
        after = at.finish(requests)
        meaning = "the weights are not those from before the sleep"
        worst = at.require_served(requests, after, at.models.second, meaning)
    finally:
        at.load(FIRST, at.models.first)
    _same_whole(at, requests, before, after, "after sleep and wake")
    return f"4 samples before and after{_difference(at, worst)}"


def _bad_requests(at: CheckedEngine) -> str:
    limit = at.models.context.max_length
    good, bad = at.request(950), at.request(951)
    for what, prompt in (
        (f"of {limit + 1} tokens, where {limit} are the limit,", np.full(limit + 1, 20, np.int64)),
        ("without tokens", np.zeros(0, np.int64)),
        ("with a token outside the vocabulary", np.array([20, at.vocab_size], np.int64)),
    ):
        try:
            at.engine.submit([good, replace(bad, prompt=prompt)])
        except BackendError:
            continue
        raise CheckFailed(
            f"a prompt {what} was accepted",
            "the request fails later, at a place that names no sample, and may end the server",
        )
    # Nothing of the refused calls was accepted, so that their good request can be made again.
    at.finish([good])
    at.engine.abort([SampleId("9/9/9")])
    return "prompts too long, empty or of unknown tokens are refused, and what comes with them"


def check_tied(plugin: Plugin, models: Models) -> str:
    """Checks that weights with tied embeddings are loaded wherever they are used."""
    assert models.tied is not None
    own, changed = models.tied
    at = CheckedEngine(plugin, models, own)
    try:
        at.load(SECOND, changed)
        requests = [at.request(i) for i in range(1000, 1008)]
        worst = at.require_served(
            requests,
            at.finish(requests),
            changed,
            "a publication does not reach the output layer, which shares its weights with the "
            "embedding: the policy that generates is not the one that is trained",
            instead={"the weights before the publication": own},
        )
    finally:
        at.engine.close()
        at.engine.close()
    return f"8 samples, largest difference {worst:.1g}"


def _require(declared: bool, name: str) -> None:
    if not declared:
        raise NotDeclared(f"Capabilities.{name} is False")


def _same_whole(
    at: CheckedEngine,
    parts: list[GenerateRequest],
    whole: Mapping[SampleId, Finished],
    rest: Mapping[SampleId, Finished],
    when: str,
) -> None:
    """Requires the tokens of `whole`; without seeds, the caller compares logprobs alone."""
    for part in parts if at.capabilities.seeds else ():
        tokens = np.concatenate([part.response, rest[part.sample].tokens])
        if not np.array_equal(tokens, whole[part.sample].tokens):
            raise CheckFailed(
                f"{part.sample} has other tokens {when} than without",
                f"{_UNSEEDED}: sampling token t is to depend on (seed, t) alone",
            )


def _difference(at: CheckedEngine, worst: float) -> str:
    compared = "" if at.capabilities.seeds else "; seeds=False: logprobs were compared, not tokens"
    return f", largest difference {worst:.1g}{compared}"


ENGINE_CHECKS: dict[str, Callable[[CheckedEngine], str]] = {
    "logprobs": _logprobs,
    "truncated sampling": _truncated,
    "logprobs of the sampler": _sampler,
    "same tokens in any batch": _alone,
    "greedy": _greedy,
    "resume": _resume,
    "abort": _abort,
    "stop tokens": _stops,
    "stop texts": _stop_texts,
    "publication": _published,
    "publication in flight": _published_in_flight,
    "sleep and wake": _sleep,
    "bad requests": _bad_requests,
}
"""By what `flowrl backends check` calls them, in their order."""
