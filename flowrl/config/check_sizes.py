"""Checks of sizes that the configuration alone decides; the compiler checks those of the program.

Every message names both numbers, where each comes from, and the nearest values that would do.
"""

from __future__ import annotations

from flowrl.config.load import LoadedConfig
from flowrl.config.problems import Problems
from flowrl.config.schema import ArithmeticData, DataConfig, FreshModel, SamplingConfig
from flowrl.errors import ConfigError

__all__ = [
    "least_prompt_tokens",
    "mini_batches_divide",
    "samples_fit",
    "stops_are_allowed",
]


def mini_batches_divide(loaded: LoadedConfig) -> Problems:
    """Every mini-batch holds equally many whole groups (or examples, or pairs)."""
    for name, prefix in loaded.stage_prefixes():
        train = loaded.config.stage_config(name).train
        prompts, parts = train.prompts_per_step, train.mini_batches
        if prompts % parts == 0:
            continue
        prompts_key, parts_key = f"{prefix}train.prompts_per_step", f"{prefix}train.mini_batches"
        multiples = [
            size for size in (prompts // parts * parts, -(-prompts // parts) * parts) if size
        ]
        yield ConfigError(
            f"{prompts_key}={prompts} is not a multiple of {parts_key}={parts}",
            where=loaded.where_all(prompts_key, parts_key),
            found=loaded.defaults_among(prompts_key, parts_key),
            expected="mini-batches of equally many whole groups",
            hint=f"nearest: prompts_per_step {_either(multiples)}, "
            f"or mini_batches {_either(_nearest_divisors(prompts, parts))}",
        )


def _nearest_divisors(number: int, value: int) -> list[int]:
    """The largest divisor of `number` below `value`, and the smallest above it."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in divisors if d < value]
    above = [d for d in divisors if d > value]
    return below[-1:] + above[:1]


def _either(numbers: list[int]) -> str:
    return " or ".join(str(number) for number in numbers)


def stops_are_allowed(loaded: LoadedConfig) -> Problems:
    """A response may end before it must."""
    for name, prefix in loaded.stage_prefixes():
        sampling = loaded.config.stage_config(name).train.sampling
        if sampling.min_tokens <= sampling.max_tokens:
            continue
        keys = tuple(f"{prefix}train.sampling.{key}" for key in ("min_tokens", "max_tokens"))
        yield ConfigError(
            f"{keys[0]}={sampling.min_tokens} is above {keys[1]}={sampling.max_tokens}, so that no "
            "response could ever stop",
            where=loaded.where_all(*keys),
            found=loaded.defaults_among(*keys),
            hint=f"nearest: min_tokens {sampling.max_tokens}, or max_tokens {sampling.min_tokens}",
        )


def samples_fit(loaded: LoadedConfig) -> Problems:
    """A prompt and its response fit a new model's longest sample."""
    config = loaded.config
    prompt_tokens, prompt_key = least_prompt_tokens(loaded)
    for name, role in config.roles.items():
        if not isinstance(role.model, FreshModel):
            continue
        length, length_key = role.model.max_length, f"roles.{name}.model.max_length"
        for stage, prefix in loaded.stage_prefixes():
            key = f"{prefix}train.sampling.max_tokens"
            tokens = config.stage_config(stage).train.sampling.max_tokens
            # A default that nobody chose may be meant for no rollout at all (supervised stages);
            # the compiler looks again, once it has the program.
            if tokens == SamplingConfig().max_tokens or prompt_tokens + tokens <= length:
                continue
            yield ConfigError(
                f"prompts of {prompt_tokens} tokens ({prompt_key}) and responses of {tokens} "
                f"({key}) do not fit {length_key}={length}",
                where=loaded.where(key),
                hint=f"set {length_key}={prompt_tokens + tokens}, or fewer tokens",
            )


def least_prompt_tokens(loaded: LoadedConfig) -> tuple[int, str]:
    """Tokens of the longest prompt as far as they are known, at least 1, and what says so."""
    data = loaded.config.data
    if data.max_prompt_tokens != DataConfig.model_fields["max_prompt_tokens"].default:
        return data.max_prompt_tokens, "data.max_prompt_tokens"
    if isinstance(data.train, ArithmeticData):
        return 2 * data.train.digits + 2, "two numbers, + and ="
    return 1, "at least"
