"""Checks of requests and sharing of prompts before a request takes a slot. numpy only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flowrl.backend.batch import Ints
from flowrl.backend.protocols import GenerateRequest, PolicyContext
from flowrl.errors import BackendError
from flowrl.specs import FinishReason


def check_request(request: GenerateRequest, context: PolicyContext, vocab_size: int) -> None:
    """Refuses a request that the engine cannot decode.

    Raises:
        BackendError: The request is invalid; with the sample and the numbers that do not fit.
    """
    where = f"sample {request.sample}"
    num_prompt, max_tokens = len(request.prompt), request.sampling.max_tokens
    if num_prompt == 0:
        raise BackendError("the prompt is empty", where=where, expected="at least one token")
    if max_tokens < 1:
        raise BackendError(
            "max_tokens allows no response token", where=where, found=f"max_tokens={max_tokens}"
        )
    if num_prompt + max_tokens > context.max_length:
        raise BackendError(
            "prompt and response do not fit into a slot",
            where=where,
            found=f"{num_prompt} prompt tokens + max_tokens={max_tokens} "
            f"= {num_prompt + max_tokens}",
            expected=f"at most {context.max_length} tokens",
            hint=f"raise the maximum length of role {context.role}, lower max_tokens, or filter "
            "long prompts",
        )
    sampling = request.sampling
    if request.grammar is not None and (sampling.min_tokens or sampling.logprobs == "sampler"):
        raise BackendError(
            "a grammar cannot be combined with min_tokens or logprobs of the sampler",
            where=where,
            found=f"min_tokens={sampling.min_tokens}, logprobs={sampling.logprobs}",
            expected="min_tokens=0, logprobs=model",
        )
    for part in (request.prompt, request.response):
        if len(part) and (int(part.min()) < 0 or int(part.max()) >= vocab_size):
            raise BackendError(
                "a token id is outside the model's vocabulary",
                where=where,
                found=f"ids {int(part.min())} to {int(part.max())}",
                expected=f"0 to {vocab_size - 1}",
                hint="use the tokenizer of the model's own folder",
            )


def check_stops(context: PolicyContext, vocab_size: int) -> None:
    """Refuses stop tokens outside the model's vocabulary; -1 would be its last token.

    Raises:
        BackendError: A stop token is outside the vocabulary; with the id.
    """
    for token in context.stop_token_ids:
        if not 0 <= token < vocab_size:
            raise BackendError(
                "a stop token is outside the model's vocabulary",
                where=f"roles.{context.role}",
                found=f"id {token}",
                expected=f"0 to {vocab_size - 1}",
                hint="fix eos_token_id in generation_config.json or config.json",
            )


def same_context(one: GenerateRequest, other: GenerateRequest) -> bool:
    """Returns True if both have the same prompt and options, and `other` has no response."""
    same = other.prompt is one.prompt and other.sampling is one.sampling
    return same and other.grammar is one.grammar and not len(other.response)


def takes_no_token(request: GenerateRequest, stop_token_ids: Sequence[int]) -> FinishReason | None:
    """Returns the finish reason of a resumed request whose kept response is complete; else None."""
    if not len(request.response):
        return None
    if int(request.response[-1]) in stop_token_ids:
        return FinishReason.STOP
    if len(request.response) >= request.sampling.max_tokens:
        return FinishReason.LENGTH
    return None


def gather_prompts(requests: Sequence[GenerateRequest]) -> tuple[list[Ints], list[list[int]]]:
    """Returns the distinct contexts of `requests`, and the requests with each.

    Requests share a context if they share a prompt and have no response yet. The key is a hint:
    equal keys with different prompts give different contexts.

    Returns:
        int64 contexts (prompt and response), and for each the indices of its requests, ascending.
    """
    contexts: list[Ints] = []
    members: list[list[int]] = []
    known: dict[str, tuple[int, Ints]] = {}
    for i, request in enumerate(requests):
        if not len(request.response) and request.shares_prompt:
            shared = known.get(request.shares_prompt)
            if shared is not None:
                place, prompt = shared
                if prompt is request.prompt or np.array_equal(prompt, request.prompt):
                    members[place].append(i)
                    continue
            known[request.shares_prompt] = (len(contexts), request.prompt)
        contexts.append(np.concatenate([request.prompt, request.response]).astype(np.int64))
        members.append([i])
    return contexts, members
