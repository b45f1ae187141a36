"""The inputs of a run that are prepared before its first step: rows, model folders, tokenizers.

All mistakes in data are found here, before a worker starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from flowrl.backend.batch import Ints
from flowrl.config.data import DataConfig
from flowrl.config.schema import RunConfig
from flowrl.data import (
    Prompt,
    PromptItem,
    PromptSet,
    RowNeeds,
    Rows,
    Tokenizer,
    encode_prompts,
    load_rows,
    prepare_model_folder,
)
from flowrl.errors import ConfigError, DataError
from flowrl.graph import Graph, Node, Op
from flowrl.ids import RoleName
from flowrl.runtime.driver.graph_parts import RolloutPart
from flowrl.wording import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleModel:
    """A role's model on disk; `fresh` folders hold no weights yet."""

    folder: Path
    fresh: bool
    tokenizer: Tokenizer


class RowResponses:
    """The tokens of the responses that come with data rows, by row index.

    A supervised stage learns from one response a row, a preference stage from a pair, the preferred
    one first; the responses of a row are the samples of its group.

    Args:
        pairs: Takes the rejected response of each row too.

    Raises:
        DataError: A row without a rejected response, or a response that the tokenizer cannot take,
            with the row's file and line.
    """

    def __init__(self, prompts: PromptSet, tokenizer: Tokenizer, *, pairs: bool) -> None:
        self.pairs = pairs
        self._tokens: dict[int, tuple[Ints, ...]] = {}
        for prompt in prompts.prompts:
            row = prompt.row
            texts = [row.solution]
            if pairs:
                if row.rejected is None:
                    raise DataError(
                        "the row has no rejected response, and a stage learns from pairs",
                        where=row.where,
                        hint="set data.rejected to a template of the row's fields",
                    )
                texts.append(row.rejected)
            self._tokens[row.index] = tuple(_encode(prompt, text, tokenizer) for text in texts)

    def of(self, item: PromptItem) -> tuple[Ints, ...]:
        """Returns the responses of an item's row, each int64 `[R]` with the end token."""
        return self._tokens[item.index]

    def longest(self, prompt: Prompt) -> int:
        """Tokens of the longest response to a prompt."""
        return max(map(len, self._tokens[prompt.index]))


def _encode(prompt: Prompt, text: str, tokenizer: Tokenizer) -> Ints:
    try:
        return tokenizer.encode_response(text)
    except DataError as error:
        raise DataError(
            error.what,
            where=prompt.row.where,
            found=error.found,
            expected=error.expected,
            hint=error.hint,
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedInputs:
    """Data and models of a run.

    Attributes:
        train: Prompts to train on.
        examples: Prompts of `train` whose solution fits the model too, for supervised stages.
        solutions: Their responses; None where no stage is supervised.
        pair_prompts: Prompts of `train` whose two responses fit the model, for stages that train on
            pairs.
        pairs: Their responses; None where no stage learns from pairs.
        held_out: Prompts to evaluate on, in the order of their source, by the name of the set;
            `data.eval` has the empty name and comes first.
        held_out_pairs: Prompts of `data.eval` with two responses that fit the model.
        held_out_responses: Their responses; None where there are no such prompts.
        models: Models by role.
        notes: Notes on rows that were left out.
    """

    train: PromptSet
    examples: PromptSet
    solutions: RowResponses | None
    pair_prompts: PromptSet
    pairs: RowResponses | None
    held_out: Mapping[str, tuple[PromptItem, ...]]
    held_out_pairs: tuple[PromptItem, ...]
    held_out_responses: RowResponses | None
    models: Mapping[RoleName, RoleModel]
    notes: tuple[str, ...]

    def of_source(self, graph: Graph, node: Node) -> PromptSet:
        """Returns the rows of a source node: those whose responses fit, where these are read."""
        readers = [graph.node(edge.dst) for edge in graph.edges if edge.src == node.id]
        read = {n.attr("data") for n in (node, *readers) if n.op is Op.SOURCE} - {"prompts"}
        sets = {"examples": self.examples, "pairs": self.pair_prompts}
        if len(read) < 2:
            return sets[str(read.pop())] if read else self.train
        fitting = [{prompt.index for prompt in sets[str(kind)].prompts} for kind in read]
        kept = tuple(p for p in self.train.prompts if all(p.index in fits for fits in fitting))
        return replace(self.train, prompts=kept)


def prepare_inputs(
    config: RunConfig,
    folder: Path,
    *,
    roles: Iterable[RoleName],
    policy: RoleName,
    supervised: bool,
    needs: RowNeeds,
    held_out_needs: RowNeeds | None = None,
    max_length: int,
) -> PreparedInputs:
    """Reads data and makes the model folders of `roles`.

    Args:
        folder: The folder for new models (`folder/ROLE`).
        roles: Roles that have a model of their own.
        policy: The role whose tokenizer the prompts are for; one of `roles`.
        supervised: A stage trains on solutions.
        needs: Fields of training rows that are read; with `rejected` a stage trains on pairs.
        held_out_needs: Fields of held-out rows that are read; by default their answers.
        max_length: Tokens of the longest sample that workers can hold.

    Raises:
        DataError, ConfigError: a row, a file or a model folder cannot be used.
    """
    rows = load_rows(config.data.train, config.data, split="train", needs=needs)
    models = {role: _role_model(config, folder, role, rows) for role in roles}
    tokenizer = models[policy].tokenizer
    notes: list[str] = []
    if rows.num_out_of_band and (band := config.data.difficulty) is not None:
        notes.append(
            f"{rows.source}: {rows.num_out_of_band} rows left out, {band.field} outside "
            f"{band.low:g} to {band.high:g} (data.difficulty)"
        )
    train = _encoded(rows, tokenizer, config.data, needs, notes)
    examples, solutions = train, None
    if supervised:
        solutions = RowResponses(train, tokenizer, pairs=False)
        examples = _fitting(train, solutions, max_length, notes)
    pair_prompts, pairs = train, None
    if needs.rejected:
        pairs = RowResponses(train, tokenizer, pairs=True)
        pair_prompts = _fitting(train, pairs, max_length, notes)
    read = RowNeeds(solution=False) if held_out_needs is None else held_out_needs
    held_out: dict[str, tuple[PromptItem, ...]] = {}
    held_out_pairs: tuple[PromptItem, ...] = ()
    held_out_responses: RowResponses | None = None
    if config.data.eval is not None:
        held_out_rows = load_rows(config.data.eval, config.data, split="eval", needs=read)
        prompts = _encoded(held_out_rows, tokenizer, config.data, read, notes)
        held_out[""] = tuple(prompts.items())
        two = tuple(prompt for prompt in prompts.prompts if prompt.row.rejected is not None)
        if two:
            prompts = replace(prompts, prompts=two)
            held_out_responses = RowResponses(prompts, tokenizer, pairs=True)
            fitting = _fitting(prompts, held_out_responses, max_length, notes)
            held_out_pairs = tuple(fitting.items())
    for name, own in config.eval.sets.items():
        if own.data is None:
            held_out[name] = held_out.get("", ())
            continue
        key = f"eval.sets.{name}.data"
        held_out_rows = load_rows(own.data, config.data, split="eval", needs=read, key=key)
        held_out[name] = tuple(_encoded(held_out_rows, tokenizer, config.data, read, notes).items())
    return PreparedInputs(
        train=train,
        examples=examples,
        solutions=solutions,
        pair_prompts=pair_prompts,
        pairs=pairs,
        held_out=held_out,
        held_out_pairs=held_out_pairs,
        held_out_responses=held_out_responses,
        models=models,
        notes=tuple(notes),
    )


def _encoded(
    rows: Rows, tokenizer: Tokenizer, data: DataConfig, needs: RowNeeds, notes: list[str]
) -> PromptSet:
    """Encodes the prompts of rows; adds to `notes` which are left out."""
    prompts = encode_prompts(rows, tokenizer, data, needs=needs)
    if rows.problems:
        notes.append(f"{rows.source}: {_problems(rows)}")
    if prompts.num_too_long:
        done = "left out" if data.overlong == "filter" else "cut at the left"
        notes.append(
            f"{rows.source}: {prompts.num_too_long} prompts {done}, longer than "
            f"{data.max_prompt_tokens} tokens (data.max_prompt_tokens)"
        )
    twice = [
        (prompt.row.where, bos)
        for prompt in prompts.prompts
        if tokenizer.num_bos(prompt.prompt_ids) > 1
        and (bos := tokenizer.repeats_bos(prompt.row.prompt, prompt.prompt_ids))
    ]
    if twice:
        where, bos = twice[0]
        notes.append(
            f"{rows.source}: {counted(len(twice), 'prompt')} with {bos!r} in front of the text get "
            f"another one from the tokenizer (the first is {where}); take {bos!r} out of "
            "data.prompt or of the rows"
        )
    return prompts


def require_context_length(
    prompts: Iterable[Prompt | PromptItem], max_tokens: int, max_length: int
) -> None:
    """Checks that a response of `max_tokens` fits after every prompt.

    Raises:
        ConfigError: it does not fit after the longest; names it, and the sizes that would do.
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


def require_children_fit(
    part: RolloutPart,
    prompts: Sequence[Prompt],
    lengths: Sequence[int],
    max_tokens: int,
    max_length: int,
) -> None:
    """Checks that a response fits after every prompt that is made of a sample.

    Args:
        part: The rollout that answers these prompts.
        prompts: The prompts of the data.
        lengths: Tokens that the prompt made for each of them has at most.
        max_tokens: Tokens of a response.

    Raises:
        ConfigError: it does not fit after the longest.
    """
    num_prompt, place = max(zip(lengths, range(len(lengths)), strict=True), default=(0, 0))
    if num_prompt + max_tokens <= max_length:
        return
    assert part.prompts is not None
    raise ConfigError(
        f"{part.node.id} answers prompts made of samples, which with its responses do not fit the "
        "model",
        where=f"{part.prompts.source}, {prompts[place].row.where}",
        found=f"{num_prompt} tokens of the template with the longest sample + max_tokens="
        f"{max_tokens} = {num_prompt + max_tokens}",
        expected=f"at most {max_length} tokens",
        hint=f"raise the model's max_length to {num_prompt + max_tokens}, give the rollouts a "
        "smaller max_tokens, or leave long prompts out (data.max_prompt_tokens)",
    )


def _role_model(config: RunConfig, folder: Path, role: RoleName, rows: Rows) -> RoleModel:
    role_config = config.roles[role]
    path = prepare_model_folder(role_config, folder / role, rows, name=role)
    fresh = not isinstance(role_config.model, str)
    key = f"roles.{role}.tokenizer.alphabet" if fresh else ""
    return RoleModel(folder=path, fresh=fresh, tokenizer=Tokenizer.load(path, alphabet_key=key))


def _fitting(
    prompts: PromptSet, responses: RowResponses, max_length: int, notes: list[str]
) -> PromptSet:
    """Returns the prompts whose responses fit after them; notes how many do not."""
    what, both = (
        ("pair", "prompt and the longer response")
        if responses.pairs
        else ("example", "prompt and solution")
    )
    lengths = np.array([len(p.prompt_ids) + responses.longest(p) for p in prompts.prompts])
    fits = lengths <= max_length
    if not fits.any():
        raise DataError(
            f"no {what} is short enough for the model",
            where=prompts.source,
            found=f"the shortest has {lengths.min()} tokens, {both} together",
            expected=f"at most {max_length} tokens",
            hint="raise the model's max_length and train.sampling.max_tokens",
        )
    if not fits.all():
        notes.append(
            f"{prompts.source}: {int((~fits).sum())} {what}s left out, {both} longer than "
            f"{max_length} tokens"
        )
    kept = tuple(p for p, fit in zip(prompts.prompts, fits, strict=True) if fit)
    return replace(prompts, prompts=kept)


def _problems(rows: Rows) -> str:
    shown = "; ".join(f"{p.where}: {p.reason}" for p in rows.problems[:3])
    return f"{len(rows.problems)} bad rows left out ({shown})"
