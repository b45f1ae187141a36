"""What a run needs before its first step: data rows, model folders, tokenizers.

Everything that can be wrong with data is found here, before a worker starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flowrl.backend.batch import Ints
from flowrl.config.schema import RunConfig
from flowrl.data import (
    Prompt,
    PromptItem,
    PromptSet,
    Rows,
    Tokenizer,
    encode_prompts,
    load_rows,
    prepare_model_folder,
)
from flowrl.errors import ConfigError, DataError
from flowrl.ids import RoleName

__all__ = ["Materials", "RoleModel", "Solutions", "prepare_materials", "require_room"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleModel:
    """A role's model on disk; `fresh` folders hold no weights yet."""

    folder: Path
    fresh: bool
    tokenizer: Tokenizer


class Solutions:
    """The tokens of the responses that supervised stages learn from, by row index."""

    def __init__(self, prompts: PromptSet, tokenizer: Tokenizer) -> None:
        self._tokens: dict[int, Ints] = {}
        for prompt in prompts.prompts:
            try:
                self._tokens[prompt.row.index] = tokenizer.encode_response(prompt.row.solution)
            except DataError as error:
                raise DataError(
                    error.what,
                    where=prompt.row.where,
                    found=error.found,
                    expected=error.expected,
                    hint=error.hint,
                ) from error

    def of(self, item: PromptItem) -> Ints:
        """int64 `[R]`, the solution of an item's row and the end token."""
        return self._tokens[item.index]


@dataclass(frozen=True, slots=True, kw_only=True)
class Materials:
    """Data and models of a run.

    Attributes:
        train: Prompts to train on.
        examples: Those of `train` whose solution fits the model too; what supervised stages take.
        solutions: Their responses; None where no stage is supervised.
        held_out: Prompts to evaluate on, in the order of the source; empty without `data.eval`.
        models: By role.
        notes: What was left out of the data, for people.
    """

    train: PromptSet
    examples: PromptSet
    solutions: Solutions | None
    held_out: tuple[PromptItem, ...]
    models: Mapping[RoleName, RoleModel]
    notes: tuple[str, ...]


def prepare_materials(
    config: RunConfig,
    folder: Path,
    *,
    roles: Iterable[RoleName],
    policy: RoleName,
    supervised: bool,
    max_length: int,
) -> Materials:
    """Reads data and makes the model folders of `roles`.

    Args:
        folder: Where folders of new models are made (`folder/ROLE`).
        roles: Roles that have a model of their own.
        policy: The role whose tokenizer the prompts are for; one of `roles`.
        supervised: Whether a stage learns from solutions.
        max_length: Tokens of the longest sample that workers can hold.

    Raises:
        DataError, ConfigError: a row, a file or a model folder cannot be used.
    """
    rows = load_rows(config.data.train, config.data, split="train")
    models = {role: _role_model(config, folder, role, rows) for role in roles}
    tokenizer = models[policy].tokenizer
    notes = [f"{rows.source}: {_problems(rows)}"] if rows.problems else []

    def encode(source: Rows) -> PromptSet:
        prompts = encode_prompts(
            source,
            tokenizer,
            max_prompt_tokens=config.data.max_prompt_tokens,
            chat_template=config.data.chat_template,
        )
        if prompts.too_long:
            notes.append(
                f"{source.source}: {len(prompts.too_long)} prompts left out, longer than "
                f"{config.data.max_prompt_tokens} tokens (data.max_prompt_tokens)"
            )
        return prompts

    train = encode(rows)
    examples, solutions = train, None
    if supervised:
        solutions = Solutions(train, tokenizer)
        examples = _fitting(train, solutions, max_length, notes)
    held_out: tuple[PromptItem, ...] = ()
    if config.data.eval is not None:
        eval_rows = load_rows(config.data.eval, config.data, split="eval")
        if eval_rows.problems:
            notes.append(f"{eval_rows.source}: {_problems(eval_rows)}")
        held_out = tuple(encode(eval_rows).items())
    return Materials(
        train=train,
        examples=examples,
        solutions=solutions,
        held_out=held_out,
        models=models,
        notes=tuple(notes),
    )


def require_room(prompts: Iterable[Prompt | PromptItem], max_tokens: int, max_length: int) -> None:
    """Whether a response of `max_tokens` fits behind every prompt.

    Raises:
        ConfigError: not behind the longest; names it, and the sizes that would do.
    """
    longest = max(prompts, key=lambda prompt: len(prompt.prompt_ids), default=None)
    if longest is None or len(longest.prompt_ids) + max_tokens <= max_length:
        return
    num_prompt = len(longest.prompt_ids)
    ways = [f"raise the model's max_length to {num_prompt + max_tokens}"]
    if num_prompt < max_length:
        ways.append(f"set train.sampling.max_tokens={max_length - num_prompt}")
    if max_tokens < max_length:
        ways.append(f"leave long prompts out (data.max_prompt_tokens={max_length - max_tokens})")
    raise ConfigError(
        "prompt and response do not fit the model",
        where=longest.row.where,
        found=f"{num_prompt} prompt tokens + max_tokens={max_tokens} = {num_prompt + max_tokens}",
        expected=f"at most {max_length} tokens",
        hint=", or ".join(ways),
    )


def _role_model(config: RunConfig, folder: Path, role: RoleName, rows: Rows) -> RoleModel:
    role_config = config.roles[role]
    path = prepare_model_folder(role_config, folder / role, rows, name=role)
    return RoleModel(
        folder=path,
        fresh=not isinstance(role_config.model, str),
        tokenizer=Tokenizer.load(path),
    )


def _fitting(
    prompts: PromptSet, solutions: Solutions, max_length: int, notes: list[str]
) -> PromptSet:
    lengths = np.array(
        [
            len(p.prompt_ids) + len(solutions.of(i))
            for p, i in zip(prompts.prompts, prompts.items(), strict=True)
        ]
    )
    fits = lengths <= max_length
    if not fits.any():
        raise DataError(
            "no example is short enough for the model",
            where=prompts.source,
            found=f"the shortest has {lengths.min()} tokens, prompt and solution together",
            expected=f"at most {max_length} tokens",
            hint="raise the model's max_length and train.sampling.max_tokens",
        )
    if not fits.all():
        notes.append(
            f"{prompts.source}: {int((~fits).sum())} examples left out, prompt and solution longer "
            f"than {max_length} tokens"
        )
    kept = tuple(p for p, fit in zip(prompts.prompts, fits, strict=True) if fit)
    return PromptSet(prompts=kept, too_long=prompts.too_long, source=prompts.source)


def _problems(rows: Rows) -> str:
    shown = "; ".join(f"{p.where}: {p.reason}" for p in rows.problems[:3])
    return f"{len(rows.problems)} unreadable rows left out ({shown})"
