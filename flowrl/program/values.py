"""Values of handles: what `Handle.value` is where a program runs with `executor=eager`.

Arrays are numpy's. Those of tokens are flat, as everywhere in flowrl: `[T]` over prompts and
responses of all samples, end to end; `SamplesValue.split` cuts one into the samples' responses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from flowrl.wording import excerpt

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Array: TypeAlias = "npt.NDArray[Any]"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleValue:
    """One sample of `SamplesValue`, which describes its fields; those of tokens are `[t]`.

    The id `sample` has the epoch, the row of the data and the member of the group.
    """

    sample: str
    prompt: str
    text: str
    tokens: npt.NDArray[np.int64]
    response_mask: npt.NDArray[np.bool_]
    rollout_logprobs: npt.NDArray[np.float32] | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplesValue:
    """N samples of T tokens in all; of whole groups, the members of a group side by side.

    Attributes:
        samples: N ids.
        groups: N ids, the prompt that each sample answers.
        prompts: N texts, without the chat template.
        texts: N decoded responses; of an episode, all that was said.
        tokens: int64 `[T]`, prompt and response of each sample, end to end.
        offsets: int64 `[N + 1]`; sample i is `tokens[offsets[i]:offsets[i + 1]]`.
        response_mask: bool `[T]`, true where the policy produced the token.
        lengths: int64 `[N]`, response tokens of each sample.
        rollout_logprobs: float32 `[T]`, of the policy that sampled the tokens, 0 off the mask; None
            for samples that no policy generated.
        preferred: bool `[N]` of pairs: the sample that is preferred; None for other samples.
        turn: int64 `[T]` of episodes: the turn of each response token, -1 at other tokens.
        token_reward: float32 `[T]` of episodes: the reward given at a token.
        state: int64 `[T]` of episodes: equal where the environment's states are equal.
    """

    samples: tuple[str, ...]
    groups: tuple[str, ...]
    prompts: tuple[str, ...]
    texts: tuple[str, ...]
    tokens: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    response_mask: npt.NDArray[np.bool_]
    lengths: npt.NDArray[np.int64]
    rollout_logprobs: npt.NDArray[np.float32] | None = None
    preferred: npt.NDArray[np.bool_] | None = None
    turn: npt.NDArray[np.int64] | None = None
    token_reward: npt.NDArray[np.float32] | None = None
    state: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> SampleValue:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        i = index % len(self)
        place = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
        logprobs = self.rollout_logprobs
        return SampleValue(
            sample=self.samples[i],
            prompt=self.prompts[i],
            text=self.texts[i],
            tokens=self.tokens[place],
            response_mask=self.response_mask[place],
            rollout_logprobs=None if logprobs is None else logprobs[place],
        )

    def __iter__(self) -> Iterator[SampleValue]:
        return (self[i] for i in range(len(self)))

    def split(self, values: Array) -> list[Array]:
        """Values of tokens as N arrays: those at the response tokens of each sample.

        Args:
            values: `[T]`, such as `logprobs.value` of these samples.

        Raises:
            ValueError: values of other samples.
        """
        if len(values) != len(self.tokens):
            raise ValueError(
                f"these samples have {len(self.tokens)} tokens, and there are {len(values)} values"
            )
        return [
            values[start:end][self.response_mask[start:end]]
            for start, end in zip(self.offsets[:-1], self.offsets[1:], strict=True)
        ]

    def __repr__(self) -> str:
        return f"<SamplesValue: {samples_summary(self)}>"


def samples_summary(value: SamplesValue) -> str:
    """`16 samples of 4 prompts, 96 response tokens (mean 6.0, max 6): '1+2=' -> '03'`."""
    if not len(value):
        return "no samples"
    lengths = value.lengths
    first = f"{shortened(value.prompts[0])} -> {shortened(value.texts[0])}"
    more = ", ..." if len(value) > 1 else ""
    return (
        f"{len(value)} samples of {len(dict.fromkeys(value.groups))} prompts, "
        f"{int(lengths.sum())} response tokens (mean {float(lengths.mean()):.1f}, "
        f"max {int(lengths.max())}): {first}{more}"
    )


def shortened(text: str) -> str:
    """The text as a literal, cut where it is long."""
    return repr(excerpt(text, 40))
