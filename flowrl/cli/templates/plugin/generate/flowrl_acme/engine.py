"""Generates with Transformers, without a cache. Put your library into `_logits` and `load`."""

from types import SimpleNamespace

import numpy as np
import safetensors.torch
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from flowrl.backend.protocols import Finished, FinishReason, Loaded, Progress
from flowrl.backend.weights import checksum_of
from flowrl.errors import BackendError


class AcmeEngine:
    def __init__(self, context):
        self.num_slots, self._context, self._version = context.num_slots, context, 0
        self._running, self._events = {}, []  # by sample, in order; what poll returns next
        config = AutoConfig.from_pretrained(context.model)
        fresh = AutoModelForCausalLM.from_config(config) if context.fresh else None
        self._model = (fresh or AutoModelForCausalLM.from_pretrained(context.model)).eval()

    def submit(self, requests):
        for request in requests:
            known = all(0 <= token < self._model.config.vocab_size for token in request.prompt)
            if not known or not 0 < len(request.prompt) < self._context.max_length:
                raise BackendError("the prompt cannot be used", where=f"sample {request.sample}")
        for r in requests:
            self._running[r.sample] = SimpleNamespace(
                request=r, tokens=[], logprobs=[], versions={}
            )

    def abort(self, samples):
        for sample in self._running.keys() & set(samples):
            self._end(self._running[sample], FinishReason.ABORT)

    def poll(self, timeout_s):
        running = [*self._running.values()][: self.num_slots]
        for each, logits in zip(running, self._logits(running) if running else [], strict=True):
            self._sample(each, logits)
        events, self._events = self._events, []
        return events + [
            Progress(
                sample=each.request.sample,
                attempt=each.request.attempt,
                num_tokens=len(each.request.response) + len(each.tokens),
            )
            for each in self._running.values()
        ]

    def _logits(self, running):
        """Returns the logits `[V]` after each sequence: after its last token before padding."""
        parts = [(each.request.prompt, each.request.response, each.tokens) for each in running]
        rows = [torch.from_numpy(np.concatenate(part).astype(np.int64)) for part in parts]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        with torch.no_grad():
            logits = self._model(input_ids=ids, use_cache=False).logits
        return [logits[number, len(row) - 1] for number, row in enumerate(rows)]

    def _sample(self, each, logits):
        request, sampling = each.request, each.request.sampling
        position = len(request.response) + len(each.tokens)
        logprobs = (logits.double() / (sampling.temperature or 1.0)).log_softmax(-1)
        left = logprobs.clone()  # sampled from; the token's logprob is the one before
        if sampling.top_k:
            left[left < left.topk(sampling.top_k).values[-1]] = -torch.inf
        if sampling.temperature:  # token t depends on (seed, t) alone
            random = np.random.default_rng((request.seed, position))
            left += torch.from_numpy(random.gumbel(size=len(left)))
        token = int(left.argmax())
        each.tokens.append(token)
        each.logprobs.append(float(logprobs[token]))
        each.versions[self._version] = each.versions.get(self._version, 0) + 1
        if token in self._context.stop_token_ids:
            self._end(each, FinishReason.STOP)
        elif position + 1 == sampling.max_tokens:
            self._end(each, FinishReason.LENGTH)

    def _end(self, each, reason):
        del self._running[each.request.sample]
        end = Finished(
            sample=each.request.sample,
            attempt=each.request.attempt,
            reason=reason,
            tokens=np.array(each.tokens, np.int64),
            logprobs=np.array(each.logprobs, np.float32),
            versions=tuple(each.versions.items()),
        )
        self._events.append(end)

    def load(self, weights):
        for bucket in weights.handle:  # the bytes of a safetensors file each
            self._model.load_state_dict(safetensors.torch.load(bucket.tobytes()), strict=False)
        self._version, checksum = weights.version, checksum_of(weights.handle)
        self._events.append(Loaded(version=weights.version, checksum=checksum))

    def close(self): ...

    sleep = wake = close  # not declared
