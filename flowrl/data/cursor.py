"""Prompts as tokens, and the cursor that returns them epoch after epoch.

The order of an epoch depends on the run's seed and the epoch's number alone, so a cursor is two
numbers, and a resumed run goes on with the next prompt. With a curriculum (`flowrl.data.row_order`)
its state also has an estimate for each prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

from flowrl.backend.batch import Ints
from flowrl.config.data import CurriculumConfig, DataConfig
from flowrl.data.row_order import Curriculum, permutation
from flowrl.data.rows import BadRows, Row, RowNeeds, Rows
from flowrl.data.tokenizer import Tokenizer
from flowrl.errors import CheckpointError, DataError
from flowrl.ids import GroupId, group_id


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """A row's prompt as tokens; the row itself is read again when it is asked for.

    Attributes:
        index: The row's place in its source.
        prompt_ids: int64 `[P]`.
        digest: A hash of the row's index, answer, responses and tokens.
        read: Returns the row.
    """

    index: int
    prompt_ids: Ints
    digest: bytes
    read: Callable[[], Row]

    @classmethod
    def of(cls, row: Row, prompt_ids: Ints, read: Callable[[], Row] | None = None) -> Prompt:
        """Returns the prompt of a row.

        Args:
            read: Returns the row again; by default the row is kept.
        """
        return cls(
            index=row.index,
            prompt_ids=prompt_ids,
            digest=_digest(row, prompt_ids),
            read=(lambda: row) if read is None else read,
        )

    @property
    def row(self) -> Row:
        """The row, read from its file."""
        return self.read()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptItem:
    """A prompt in an epoch, which a group answers.

    Attributes:
        epoch: Counted from 0; with a curriculum, how often the prompt was taken before.
        index: The row's place in its source.
        group: `epoch/index`, or the id of the sample that the prompt was made of.
        prompt_ids: int64 `[P]`.
        source: The source of the mixture that it was taken from; empty without a mixture.
        num_continued: Tokens at the end of the prompt that begin the response: those before the cut
            of a response that is continued.
    """

    epoch: int
    index: int
    group: GroupId
    row: Row
    prompt_ids: Ints
    source: str = ""
    num_continued: int = 0

    @property
    def answers_sample(self) -> bool:
        """True if the prompt was made of a sample, whose id the group has."""
        return self.group.count("/") > 1

    @property
    def prompt(self) -> str:
        """Returns the prompt's text, without the chat template."""
        return self.row.prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """The prompts of a source.

    Attributes:
        num_too_long: Prompts over `data.max_prompt_tokens`, which `data.overlong` leaves out or
            cuts.
    """

    prompts: tuple[Prompt, ...]
    source: str
    num_too_long: int = 0

    def __len__(self) -> int:
        return len(self.prompts)

    def items(self, epoch: int = 0) -> list[PromptItem]:
        """Returns all prompts in the order of the source, as an evaluation takes them."""
        return [_item(epoch, prompt) for prompt in self.prompts]


def encoded_rows(
    rows: Iterable[Row],
    tokenizer: Tokenizer,
    data: DataConfig,
    *,
    bad: BadRows,
    needs: RowNeeds | None = None,
) -> Iterator[tuple[int, Row, Ints]]:
    """Yields the place of each row, the row and all tokens of its prompt.

    A row with a character that the tokenizer does not know, or with a response that has the end
    token in its text, is a bad row: it is left out and counted.

    Args:
        needs: The responses of a row that the tokenizer must know; by default none.

    Raises:
        DataError: The tokenizer cannot be used at all, or one bad row too many.
    """
    needs = RowNeeds(answer=False, solution=False) if needs is None else needs
    for place, row in enumerate(rows):
        try:
            ids = tokenizer.encode_prompt(
                row.messages or row.prompt,
                data.chat_template,
                tools=row.tools,
                args=data.chat_args,
                prefix=data.response_prefix,
            )
            for text in needs.responses_of(row):
                tokenizer.check_response(text)
        except DataError as reason:
            if reason.where is not None and not row.messages:
                raise  # it is of the tokenizer, and no row's
            bad.count(reason, row.where)
        else:
            yield place, row, ids


def encode_prompts(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    data: DataConfig,
    *,
    needs: RowNeeds | None = None,
) -> PromptSet:
    """Tokenises every prompt once; bad rows are added to those of `rows` (see `encoded_rows`).

    Raises:
        DataError: One bad row too many, with its file and line; a prompt that is too long, if
            `data.overlong` refuses it; or no prompt that fits.
    """
    prompts: list[Prompt] = []
    too_long: list[tuple[int, str]] = []
    most = data.max_prompt_tokens
    bad = rows.bad if isinstance(rows, Rows) else BadRows()
    for place, row, ids in encoded_rows(rows, tokenizer, data, needs=needs, bad=bad):
        if len(ids) > most:
            too_long.append((len(ids), row.where))
            if data.overlong == "refuse":
                raise DataError(
                    "the prompt is too long",
                    where=row.where,
                    found=f"{len(ids)} tokens",
                    expected=f"at most {most} (data.max_prompt_tokens; data.overlong is refuse)",
                    hint=f"set data.max_prompt_tokens={len(ids)} or more, or data.overlong to "
                    "filter or cut_left; `flowrl data check` counts such prompts",
                )
            if data.overlong == "filter":
                continue
            ids = ids[-most:]
        prompts.append(Prompt.of(row, ids, partial(rows.__getitem__, place)))
    if not prompts:
        places = [where for _, where in too_long] or [problem.where for problem in bad.problems]
        raise DataError(
            "no prompt is short enough" if too_long else "there are no prompts",
            where=places[0] if places else None,
            found=f"the shortest has {min(too_long)[0]}" if too_long else None,
            expected=f"at most {most} tokens (data.max_prompt_tokens)",
        )
    source = rows.source if isinstance(rows, Rows) else "rows"
    return PromptSet(prompts=tuple(prompts), source=source, num_too_long=len(too_long))


class PromptCursor:
    """Returns prompts; every epoch is a new permutation of all of them.

    A batch may cross the border of two epochs, so no prompt is ever skipped. The same prompt may
    then be twice in a batch, in two groups.

    With a curriculum only a share of the prompts comes in that order; the others are sampled
    by their estimated solve rates, which `observe` updates.

    >>> cursor = PromptCursor(prompts, seed=0)      # doctest: +SKIP
    >>> batch = cursor.take(64)                     # doctest: +SKIP
    >>> again = PromptCursor.from_json(cursor.to_json(), prompts)  # doctest: +SKIP
    """

    def __init__(
        self,
        prompts: PromptSet,
        seed: int,
        *,
        epoch: int = 0,
        position: int = 0,
        curriculum: CurriculumConfig | None = None,
    ) -> None:
        self._prompts = prompts.prompts
        self._source = prompts.source
        self._seed = seed
        self._epoch = epoch
        self._position = position
        self._order = self._order_of(epoch)
        self._fingerprint: str | None = None
        self._curriculum: Curriculum | None = None
        self._places: dict[int, int] = {}
        if curriculum is not None:
            self._curriculum = Curriculum(curriculum, len(self._prompts), seed)
            self._places = {prompt.index: i for i, prompt in enumerate(self._prompts)}

    def take(self, num: int) -> list[PromptItem]:
        """Returns the next `num` prompts."""
        if self._curriculum is not None:
            places = self._curriculum.choose(num, lambda: self._following()[1])
            return [_item(self._curriculum.visit(i), self._prompts[i]) for i in places]
        return [
            _item(epoch, self._prompts[i]) for epoch, i in (self._following() for _ in range(num))
        ]

    def observe(self, index: int, mean_score: float) -> None:
        """Updates the curriculum by the mean score of a group; without one it does nothing.

        It is called between steps for each group whose samples were scored, filtered groups too, in
        an order that a resumed run repeats.

        Args:
            index: `PromptItem.index`, the row's place in its source.
            mean_score: Mean of the group's scores.
        """
        if not math.isfinite(mean_score):
            raise ValueError(f"prompt {index} has the mean score {mean_score}")
        if self._curriculum is not None:
            self._curriculum.observe(self._places[index], mean_score)

    def solve_rate(self, index: int) -> float | None:
        """Returns the estimate of a row's solve rate; None without a curriculum."""
        return None if self._curriculum is None else self._curriculum.rate(self._places[index])

    def to_json(self) -> dict[str, object]:
        """Returns the position of the cursor and the fingerprint of its data."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self._prompts)
        state: dict[str, object] = {
            "seed": self._seed,
            "epoch": self._epoch,
            "position": self._position,
            "num_prompts": len(self._prompts),
            "fingerprint": self._fingerprint,
        }
        if self._curriculum is not None:
            state["curriculum"] = self._curriculum.to_json()
        return state

    @classmethod
    def from_json(
        cls,
        value: Mapping[str, object],
        prompts: PromptSet,
        curriculum: CurriculumConfig | None = None,
    ) -> PromptCursor:
        """Returns the cursor that `to_json` described.

        Args:
            value: Without `fingerprint`, other data is accepted too: where its number of prompts
                differs, a new epoch begins.

        Raises:
            CheckpointError: The data is not the same any more, or one of the two cursors has a
                curriculum and the other has not.
        """
        seed, epoch, position = (_number(value, key) for key in ("seed", "epoch", "position"))
        is_any_data = "fingerprint" not in value
        same_number = value.get("num_prompts") == len(prompts)
        if is_any_data and not same_number:
            if curriculum is not None:
                raise CheckpointError(
                    "a curriculum cannot go on with another number of prompts",
                    where=prompts.source,
                    found=f"{len(prompts)} prompts",
                    expected=f"{value.get('num_prompts')} prompts",
                    hint="put as many rows into the data file as it had, or start a new run",
                )
            epoch, position = epoch + 1, 0
        cursor = cls(prompts, seed, epoch=epoch, position=position, curriculum=curriculum)
        estimates = value.get("curriculum")
        if (estimates is None) != (curriculum is None):
            raise CheckpointError(
                "the order of prompts is another than when the checkpoint was written",
                where="data.curriculum",
                found="none" if curriculum is None else curriculum.kind,
                expected="none" if estimates is None else "a curriculum",
                hint="set data.curriculum as it was, or start a new run",
            )
        # Of other prompts nothing is taken up; the fingerprint below says so.
        if cursor._curriculum is not None and isinstance(estimates, Mapping) and same_number:
            cursor._curriculum.restore(estimates)
        now = cursor.to_json()
        if not is_any_data and now != dict(value):
            raise CheckpointError(
                "the training data changed since the checkpoint was written",
                where=prompts.source,
                found=f"{now['num_prompts']} prompts, fingerprint {now['fingerprint']}",
                expected=f"{value.get('num_prompts')} prompts, fingerprint "
                f"{value.get('fingerprint')}",
                hint="restore the data file and its templates, start a new run, or go on with "
                "other data (--accept-changes; in Python accept_changes=True)",
            )
        return cursor

    def _following(self) -> tuple[int, int]:
        """Returns the epoch and the place of the next prompt in the order of epochs."""
        following = self._epoch, self._order[self._position]
        self._position += 1
        if self._position == len(self._prompts):
            self._epoch += 1
            self._position = 0
            self._order = self._order_of(self._epoch)
        return following

    def _order_of(self, epoch: int) -> Sequence[int]:
        order: list[int] = permutation(len(self._prompts), self._seed, epoch).tolist()
        return order


def _item(epoch: int, prompt: Prompt) -> PromptItem:
    return PromptItem(
        epoch=epoch,
        index=prompt.index,
        group=group_id(epoch, prompt.index),
        row=prompt.row,
        prompt_ids=prompt.prompt_ids,
    )


def fingerprint(prompts: Sequence[Prompt | PromptItem]) -> str:
    """Returns a hash of the places, tokens, answers and responses of prompts."""
    digest = blake2b(digest_size=8)
    for prompt in prompts:
        digest.update(
            prompt.digest if isinstance(prompt, Prompt) else _digest(prompt.row, prompt.prompt_ids)
        )
    return digest.hexdigest()


def _digest(row: Row, prompt_ids: Ints) -> bytes:
    rejected = () if row.rejected is None else (row.rejected,)
    digest = blake2b(repr((row.index, row.answer, row.solution, *rejected)).encode(), digest_size=8)
    digest.update(prompt_ids.tobytes())
    return digest.digest()


def _number(value: Mapping[str, object], key: str) -> int:
    number = value.get(key)
    if not isinstance(number, int):
        raise CheckpointError("the data cursor of the checkpoint is broken", where=key)
    return number
