"""The plug-in protocols: what an engine, a trainer and a scorer must offer.

A plug-in is found by the entry point group `flowrl.backends`; the entry point names a `Plugin`
whose module imports nothing heavy. `Plugin.check` says whether it can be used here, and the
`open_*` methods import the real library and make workers.

Invariants, which the tests of a plug-in should prove (docs/backend-guide.md says how):

- Tokens of a sample depend on its prompt, its sampling options, its seed and the weights, never on
  which other samples share the batch (up to the rounding of the device's arithmetic) or on time.
- `abort` is idempotent; an aborted request ends with `FinishReason.ABORT` and the tokens it had.
- A request ends exactly once. Nothing is reported for a request after its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from flowrl.backend.batch import Floats, Ints, KeptTokens, SequenceBatch, TrainBatch
from flowrl.backend.plugin import BackendStatus, BasePlugin, Capabilities, Head, Service
from flowrl.backend.weights import Loaded, Weights, WeightsKind
from flowrl.ids import RoleName, SampleId
from flowrl.specs import KL, AdamW, FinishReason, LossSpec, Sampling
from flowrl.specs.grammar import Grammar

__all__ = [
    "BackendStatus",
    "BasePlugin",
    "Capabilities",
    "FinishReason",
    "Finished",
    "GenerateBackend",
    "GenerateRequest",
    "Head",
    "Loaded",
    "OptimizerStep",
    "PolicyContext",
    "Progress",
    "Rank",
    "ScoreBackend",
    "ScoreContext",
    "ScoreRequest",
    "ScoreResult",
    "Service",
    "TrainBackend",
    "UpdateSpec",
    "Weights",
    "WeightsKind",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A trainer's place among the processes that train a model together.

    Every rank gets the same calls with the same arguments, whole batches among them, and works on
    its share. Rank 0 returns the result, as a single trainer would, and writes all files.

    Attributes:
        number: From 0.
        size: The number of ranks.
        rendezvous: A file that is not there yet, by which the ranks find each other.
        timeout_s: Seconds after which a rank that waits for another one is to fail.
    """

    number: int
    size: int
    rendezvous: Path
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyContext:
    """The inputs from which a policy worker is opened.

    Attributes:
        role: The role that it serves; for messages.
        model: A Hugging Face model folder. `config.json` and the tokenizer files always exist.
        fresh: No weights in the folder: initialise them from `seed`.
        device: `cpu`, `cuda:0`, `npu:0`.
        dtype: Parameter type: `float32`, `bfloat16`, `float16`.
        seed: Of everything random in the worker.
        num_slots: Samples decoded at once.
        max_length: Tokens of the longest sample, prompt and response together.
        trainable: Whether an optimizer will be needed.
        stop_token_ids: Tokens that end a response (they are part of it).
        num_threads: CPU threads for arithmetic; 0 leaves the library's default.
        head: What the model ends in. A `value` head gives one number a position (critics, reward
            models); where the folder has none, as that of a causal language model, the body is
            taken from it and the head is made fresh from `seed`.
        options: The values of `roles.<role>.options`, which the plug-in's `options` accepts; those
            of `engine_options` for an engine beside the trainer of another plug-in.
        engine_options: Those of that engine, which it gets as its `options`.
        devices: The addresses in the plan of all devices of the worker; empty outside of runs.
        layout: The size of each parallel dimension that divides the model over them (`tp`, `pp`,
            `dp`, `cp`, `ep`); those that are left out are 1.
        kv_tokens: Tokens that the KV cache of an engine is to hold; 0 where only `num_slots` and
            `max_length` limit it.
        rank: The place of this worker among the ranks that train the model; None for all of it.
        replica: The number of an engine among those of its role on this machine: 0 for the one in
            the trainer's process, from 1 on for those in processes of their own.
    """

    role: RoleName
    model: Path
    fresh: bool
    device: str
    dtype: str
    seed: int
    num_slots: int
    max_length: int
    trainable: bool
    stop_token_ids: tuple[int, ...]
    num_threads: int = 1
    head: Head = "lm"
    options: Mapping[str, object] = field(default_factory=dict)
    engine_options: Mapping[str, object] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    layout: Mapping[str, int] = field(default_factory=dict)
    kv_tokens: int = 0
    rank: Rank | None = None
    replica: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One attempt at one sample.

    Attributes:
        attempt: Counted from 0; with the sample it names the request.
        prompt: int64 `[P]` prompt tokens.
        response: int64 `[R]` response tokens kept from an aborted attempt, to go on from.
        sampling: `max_tokens` and `min_tokens` count `response` too.
        seed: Of this sample's random stream. Sampling response token t depends on `(seed, t)`
            alone, so a sample that continues on another engine gets the same tokens.
        shares_prompt: Requests with equal keys have equal prompts (a group); a hint for reuse.
        grammar: What is held to by the response tokens from `grammar_from` on; None by nothing. One
            that ends with a stop token is of the grammar, another is the beginning of one. Logprobs
            are those before it, as before all that changes the distribution.
        grammar_from: Response tokens before the constrained text, such as earlier turns; texts of
            `sampling.stops` are looked for after them too.
    """

    sample: SampleId
    attempt: int
    prompt: Ints
    response: Ints
    sampling: Sampling
    seed: int
    shares_prompt: str
    grammar: Grammar | None = None
    grammar_from: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a running request: `num_tokens` response tokens, kept ones included."""

    sample: SampleId
    attempt: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The end of a request.

    Attributes:
        tokens: int64 `[R]` response tokens of this attempt (without those it was given).
        logprobs: float32 `[R]`, of the temperature-scaled logits before any truncation; where the
            sampling says `logprobs="sampler"`, of the distribution that the tokens were sampled
            from.
        versions: `((version, count), ...)`, the weights that produced the tokens, in order.
        kept: `[R]`, what top-k, top-p and min-p kept; set exactly where
            `Sampling.reports_kept`, even without a token.
    """

    sample: SampleId
    attempt: int
    reason: FinishReason
    tokens: Ints
    logprobs: Floats
    versions: tuple[tuple[int, int], ...]
    kept: KeptTokens | None = None


@runtime_checkable
class GenerateBackend(Protocol):
    """An inference engine: requests in, tokens out, each sample on its own.

    Lifecycle: `submit` at any time; `poll` drives an in-process engine or collects from a remote
    one; `load` gives it new weights; `close` ends it.
    """

    @property
    def num_slots(self) -> int:
        """Requests decoded at once; further ones wait inside the engine."""
        ...

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Adds requests; returns at once."""
        ...

    def abort(self, samples: Sequence[SampleId]) -> None:
        """Ends requests with the tokens they have; unknown samples are ignored."""
        ...

    def poll(self, timeout_s: float) -> Sequence[Progress | Finished | Loaded]:
        """Returns the reports since the last call.

        Returns a few decode steps after a request ended, or after a bounded number of them, or
        after `timeout_s` seconds; at once when there are no requests and no weights to load.
        An engine in a process of its own for which neither an end nor a higher
        `Progress.num_tokens` is reported for half of `runtime.stall_timeout_s` is restarted.
        """
        ...

    def load(self, weights: Weights) -> None:
        """Serves these weights from now on; may return before they are loaded.

        Requests submitted later are sampled from them. `poll` reports each version as `Loaded`, in
        the order of the calls, with the checksum of what was loaded.
        """
        ...

    def sleep(self) -> None:
        """Gives device memory of caches back; no request may be running."""
        ...

    def wake(self) -> None:
        """Takes the memory again; idempotent."""
        ...

    def close(self) -> None:
        """Frees everything; idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSpec:
    """The division of a batch into optimizer updates.

    Attributes:
        loss: What is minimised.
        kl: Added to it, or None.
        temperature: Of the rollout; logprobs are taken from logits divided by it.
        mini_batches: Row numbers of the batch for each update, in order.
        micro_batch: Samples in one forward pass at most.
        max_tokens: Of the rollout, for the `constant` aggregation.
        old_policy: Where the loss's `old_logprobs` come from: `given` in the batch, or the update's
            `own` forward pass, detached. The latter is for a single mini-batch whose update is the
            first of the step: its weights are still those that the step began with.
        recompute: Activations that the backward pass computes again instead of keeping them: of
            `Capabilities.recompute`, or `none`. Gradients are the same.
        weight: The factor of the loss and the KL term in a sum of several; 1 outside of sums.
    """

    loss: LossSpec
    kl: KL | None
    temperature: float
    mini_batches: tuple[tuple[int, ...], ...]
    micro_batch: int
    max_tokens: int
    old_policy: Literal["given", "own"] = "given"
    recompute: str = "none"
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """The results of one optimizer update; means are over the mini-batch's response tokens.

    Attributes:
        grad_norm: Before clipping.
        metrics: Further numbers of the loss by name (`clip_fraction_high`, `ratio_max`, `kl`, ...).
        num_tokens: Response tokens of the mini-batch.
        skipped: The gradient was not finite and the update was not made.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    num_tokens: int
    skipped: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class TrainBackend(Protocol):
    """A trainer: holds a model's parameters and its optimizer.

    The model ends in what `PolicyContext.head` says: `logprobs`, `distributions` and `squares` need
    the head `lm`; `values`, `scores` and `token_scores` the head `value`. What the model does not
    have, or the plug-in does not offer, raises a `BackendError`.

    Logprobs, distributions, squares and entropies are those of the model at a temperature. Where
    the batch has a `sampler`, they are those of its distribution: penalty and forbidden stop tokens
    are repeated from the tokens before, and of the rest only `kept` tokens have a probability.
    """

    def begin(self, optimizer: AdamW, num_updates: int) -> None:
        """Starts a stage: a new optimizer; `num_updates` is the length of its schedule."""
        ...

    def logprobs(self, batch: SequenceBatch, temperature: float) -> Floats:
        """float32 `[T]`, logprob of each response token, 0 at prompt tokens; no gradient."""
        ...

    def distributions(self, batch: SequenceBatch, temperature: float) -> Floats:
        """float32 `[R, V]`, logprobs of the whole vocabulary at each response token, in order.

        For `kl.full`; 4 bytes times R times V, so for small batches and vocabularies.
        """
        ...

    def squares(self, batch: SequenceBatch, temperature: float) -> Floats:
        """float32 `[T]`, sum over the vocabulary of squared probabilities, 0 off the responses.

        The probabilities are those that predict each response token.
        For `advantage.optimal_token_baseline`.
        """
        ...

    def values(self, batch: SequenceBatch) -> Floats:
        """float32 `[T]`, a critic's value of the state before each response token; no gradient.

        That state is the prefix that the token follows, so it is the head's number at the position
        that predicts the token. 0 off the response mask.
        """
        ...

    def scores(self, batch: SequenceBatch) -> Floats:
        """float32 `[N]`, the head's number at each sample's last token; no gradient.

        The last token is that of the whole sample, whatever the response mask says.
        """
        ...

    def token_scores(self, batch: SequenceBatch) -> Floats:
        """float32 `[T]`, the head's number at each response token, 0 at others; no gradient.

        It is that of the state after the token, so at a sample's last token it is its score.
        """
        ...

    def update(self, batch: TrainBatch, spec: UpdateSpec) -> list[OptimizerStep]:
        """One optimizer update a mini-batch, in order.

        Of a batch that has `behaviour_logprobs`, the metrics of each step hold those of
        `flowrl.algo.kl`, between the logprobs of the update's own forward pass and these.
        """
        ...

    def update_sum(
        self, terms: Sequence[tuple[TrainBatch, UpdateSpec]]
    ) -> list[list[OptimizerStep]]:
        """One optimizer update for the k-th mini-batches of all terms together, in order.

        The gradient is the sum of the terms' own, each times its `UpdateSpec.weight`. All terms
        have as many mini-batches. For a trainer whose `Capabilities.updates` has `sum`.

        Returns:
            For each update the results of the terms: loss and metrics of each by itself, without
            its weight; gradient norm, rate and `skipped` of the whole.
        """
        ...

    def export(self, folder: Path) -> None:
        """Writes a Hugging Face folder (safetensors, config, tokenizer files) into `folder`."""
        ...

    def load(self, folder: Path, decay: float = 0.0) -> None:
        """Takes the weights of a folder that `export` wrote (same model), in place.

        An engine that shares the parameters sees them at once. Optimizer and schedule go on.

        Args:
            decay: Above 0, the new weights are `decay * own + (1 - decay) * those of the folder`,
                computed and kept in float32 (`Capabilities.updates`: `average`).
        """
        ...

    def reset_optimizer(self) -> None:
        """Forgets the optimizer's moments, as before its first update; the schedule goes on.

        For a trainer whose `Capabilities.updates` has `reset`.
        """
        ...

    def save(self, folder: Path) -> None:
        """Writes parameters, optimizer and random state into `folder`: safetensors and JSON."""
        ...

    def restore(self, folder: Path) -> None:
        """Reads what `save` wrote; the next update is bit-identical to the one never stopped."""
        ...

    def offload(self) -> None:
        """Moves parameters and optimizer off the device; idempotent."""
        ...

    def reload(self) -> None:
        """Moves them back; idempotent."""
        ...

    def close(self) -> None:
        """Frees everything; idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreContext:
    """The inputs from which a scorer is opened: the reward terms of the config, as JSON values.

    Attributes:
        key: Where the config holds the terms, for messages.
        options: The values of `roles.<role>.options`, which the plug-in's `options` accepts.
    """

    role: RoleName
    terms: tuple[Mapping[str, object], ...]
    key: str = "rewards.terms"
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """One finished sample, as text.

    Attributes:
        prompt: Text that the response answers.
        response: Decoded response tokens, without the stop token.
        answer: The reference answer of the data row.
        row: Every field of the data row, for the user's own functions.
        finish: How the response ended.
        num_tokens: Response tokens.
        tokens: Ids of the response tokens, the stop token included.
    """

    sample: SampleId
    prompt: str
    response: str
    answer: str
    row: Mapping[str, object]
    finish: FinishReason
    num_tokens: int
    tokens: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreResult:
    """A sample's score, the weighted sum of its terms, and each term's unweighted value.

    A term that does not apply to a sample is absent, and counts nothing in the score.
    """

    sample: SampleId
    score: float
    terms: Mapping[str, float]


@runtime_checkable
class NamesTerms(Protocol):
    """A scorer that says which term it computes, so that a failed reward counts as that term's.

    Attributes:
        on_term: Called with a term's name before it is computed, and with "" after the last one.
    """

    on_term: Callable[[str], None]


@runtime_checkable
class ScoresBatches(Protocol):
    """A scorer for which several samples together are less work than one after the other.

    Attributes:
        batch_size: Samples that it takes at once; 1 if it has no use for several.
    """

    batch_size: int

    def score_batch(self, requests: Sequence[ScoreRequest]) -> Sequence[ScoreResult]:
        """The samples' scores, in order. If it raises, each sample is scored by itself."""
        ...


@runtime_checkable
class ScoreBackend(Protocol):
    """A scorer. It runs in its own process, under the time limit of the caller."""

    def score(self, request: ScoreRequest) -> ScoreResult:
        """The sample's score; may raise, which is reported as a `RewardError` with the sample."""
        ...

    def close(self) -> None:
        """Frees everything; idempotent."""
        ...
