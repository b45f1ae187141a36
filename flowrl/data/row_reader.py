"""Reads the rows of a configuration's sources: fields of files become prompts with their answers.

Every row is read and checked once, in the order of the files. What stays in memory of a row is its
place in its file; it is read again when it is taken, so that data may be larger than memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence

from flowrl.algo.numbers import answer_number
from flowrl.config.data import (
    ArithmeticData,
    DataConfig,
    DataSource,
    DifficultyConfig,
    FileData,
    HubData,
    MixtureData,
    RowFields,
)
from flowrl.data.arithmetic import arithmetic_rows
from flowrl.data.conversations import (
    Message,
    answer_of,
    before_answer,
    conversation_of,
    message_text,
    tools_of,
)
from flowrl.data.formats import open_data_file
from flowrl.data.row_file import DataFile, Fields
from flowrl.data.rows import BadRows, MixedRows, Row, RowNeeds, Rows, RowSequence, Split
from flowrl.data.sources import files_of_source
from flowrl.data.templates import Template, field_number, field_text, field_value
from flowrl.errors import DataError
from flowrl.wording import excerpt


def load_rows(
    source: DataSource,
    data: DataConfig,
    *,
    split: Split,
    needs: RowNeeds | None = None,
    key: str = "",
    bad: BadRows | None = None,
    most: int = 0,
) -> Rows:
    """Reads `data.train` or `data.eval`.

    An answer or a solution that is not needed is empty where the row has none. A held-out row is
    taken whatever its difficulty, so that what is measured does not depend on what is trained on.

    Args:
        source: A path (the keys of `data` apply), or a mapping with its own keys.
        split: Which of the two is read.
        needs: The fields that rows must have; a row without them is bad, and so is a pair of equal
            responses. By default an answer, and a solution for training.
        key: The config key of the source; by default that of the split.
        bad: Where bad rows are counted; by default up to `data.max_bad_rows` of this source.
        most: Number of usable rows that are read of each file source; 0 reads all.

    Raises:
        ConfigError: A template that cannot be parsed.
        DataError: No such file, no usable row, or more bad rows than `data.max_bad_rows`.
    """
    needs = RowNeeds(solution=split == "train") if needs is None else needs
    key = key or f"data.{split}"
    bad = BadRows(data.max_bad_rows) if bad is None else bad
    if isinstance(source, ArithmeticData):
        return arithmetic_rows(source, needs)
    if isinstance(source, MixtureData):
        parts = {
            name: load_rows(
                part,
                data,
                split=split,
                needs=needs,
                key=f"{key}.sources.{name}",
                bad=bad,
                most=most,
            )
            for name, part in source.sources.items()
        }
        return Rows(
            MixedRows(parts),
            source=", ".join(rows.source for rows in parts.values()),
            bad=bad,
            num_out_of_band=sum(rows.num_out_of_band for rows in parts.values()),
        )
    files = files_of_source(source, key=key)
    fields: RowFields = data if isinstance(source, str) else source
    keys = "data" if isinstance(source, str) else key
    max_rows = 0 if isinstance(source, str) else source.max_rows
    path = source.path if isinstance(source, FileData) else source
    name = source.name if isinstance(source, HubData) else str(path)
    builder = RowBuilder(fields, keys, split, needs)
    band = _Band(data.difficulty) if data.difficulty and split == "train" else None
    wanted = fields.format
    if wanted is None and isinstance(fields, FileData) and fields.kind == "jsonl":
        wanted = "jsonl"
    try:
        opened = [open_data_file(file, wanted) for file in files]
        return _read(opened, builder, band, bad, name=name, key=key, max_rows=max_rows, most=most)
    except OSError as reason:
        reported = f"{reason.filename}: {reason.strerror}"
        raise DataError("cannot be read", where=key, found=reported) from reason


def _read(
    files: Sequence[DataFile],
    builder: RowBuilder,
    band: _Band | None,
    bad: BadRows,
    *,
    name: str,
    key: str,
    max_rows: int,
    most: int,
) -> Rows:
    rows = _StoredRows(files, builder)
    num_read, first_bad = 0, len(bad.problems)
    for number, file in enumerate(files):
        for record in file.scan():
            if (max_rows and num_read >= max_rows) or (most and len(rows) >= most):
                break
            where = file.where(record.number)
            try:
                if isinstance(record.fields, DataError):
                    raise record.fields
                if band is None or band.holds(record.fields):
                    builder.row(record.fields, num_read, where)
                    rows.append(number, record.place, record.number, num_read)
            except DataError as problem:
                bad.count(problem, where, is_unreadable=problem is record.fields)
            num_read += 1
    out_of_band = 0 if band is None else band.num_outside
    if not rows and band is not None and out_of_band:
        raise band.nothing_left(name)
    if not rows:
        first = bad.problems[first_bad] if num_read else None
        otherwise = "correct the rows of the file" if first else f"point {key} at a file with rows"
        raise DataError(
            "the data file has no usable row" if num_read else "the data file is empty",
            where=name if first is None else first.where,
            found=None if first is None else first.reason,
            expected="rows with the fields that the configuration reads",
            hint=(first and first.hint) or otherwise,
        )
    return Rows(rows, source=name, bad=bad, num_out_of_band=out_of_band, num_read=num_read)


class _StoredRows(RowSequence):
    """Rows that are read again from their files when they are asked for."""

    def __init__(self, files: Sequence[DataFile], builder: RowBuilder) -> None:
        self._files = files
        self._builder = builder
        # Of each row: its file, its place there, its line for messages, its index in the source.
        self._stored = array("q")

    def append(self, file: int, place: int, number: int, index: int) -> None:
        self._stored.extend((file, place, number, index))

    def __len__(self) -> int:
        return len(self._stored) // 4

    def __iter__(self) -> Iterator[Row]:
        """Yields all rows in one pass over the files, which is faster than one by one."""
        stored = (self._stored[i : i + 4] for i in range(0, len(self._stored), 4))
        wanted = next(stored, None)
        for number, file in enumerate(self._files):
            for record in file.scan():
                if wanted is None or wanted[0] != number:
                    break
                if record.place == wanted[1] and not isinstance(record.fields, DataError):
                    yield self._builder.row(record.fields, wanted[3], file.where(wanted[2]))
                    wanted = next(stored, None)

    def _row(self, chosen: int) -> Row:
        number, place, line, index = self._stored[4 * chosen : 4 * chosen + 4]
        file = self._files[number]
        return self._builder.row(file.read(place), index, file.where(line))


class RowBuilder:
    """Makes rows of the fields that were read.

    Args:
        source: The keys that say how.
        keys: The section that they are in, for messages: `data`, `data.eval`.
    """

    def __init__(self, source: RowFields, keys: str, split: Split, needs: RowNeeds) -> None:
        self._source = source
        self._needs = needs
        self._keys = keys
        self._needs_pairs = split == "train"  # held-out rows may be pairs
        self._rejected = self._template("rejected") if needs.rejected else None
        self._prompt = self._template("prompt")
        self._solution = self._template("solution") if source.solution or needs.solution else None
        self._before: list[Message] = []
        for shot in source.few_shot:
            self._before += [
                {"role": "user", "content": shot.prompt},
                {"role": "assistant", "content": shot.response},
            ]

    def _template(self, name: str) -> Template:
        return Template.parse(getattr(self._source, name), key=f"{self._keys}.{name}")

    def row(self, fields: Fields, index: int, where: str) -> Row:
        """Returns the row of some fields.

        Raises:
            DataError: They lack one that is needed, or make no row; `where` is left to the caller.
        """
        prompt, messages = self._prompt_of(fields)
        answer = self._answer(fields)
        solution = self._response(self._solution, fields, needed=self._needs.solution)
        rejected: str | None = None
        if self._rejected is not None:
            rejected = self._response(self._rejected, fields, needed=self._needs_pairs) or None
            if self._needs_pairs or rejected is not None:
                self._check_pair(fields, solution, rejected or "")
        for name in self._needs.fields:
            field_value(fields, name, key=f"a map (row.{name})")
        return Row(
            index=index,
            prompt=prompt,
            messages=messages,
            tools=self._tools(fields),
            answer=answer,
            solution=solution,
            rejected=rejected,
            fields=fields,
            where=where,
        )

    def _conversation(self, template: Template, fields: Fields) -> list[Message] | None:
        value = template.value(fields)
        return conversation_of(value, self._source.turns, key=template.key)

    def _prompt_of(self, fields: Fields) -> tuple[str, tuple[Message, ...]]:
        own = self._conversation(self._prompt, fields)
        messages = [] if own is None else before_answer(own)
        if own is not None and not messages:
            raise DataError("the conversation has nothing before the assistant's answer")
        text = message_text(messages[-1]) if messages else self._prompt.render(fields)
        if not text.strip():
            raise DataError("the prompt is empty", found=repr(text))
        if own is None and not self._before and not self._source.system:
            return text, ()
        messages = messages or [{"role": "user", "content": text}]
        system: list[Message] = []
        if messages[0]["role"] == "system":
            system, messages = messages[:1], messages[1:]
        elif self._source.system:
            system = [{"role": "system", "content": self._source.system}]
        return text, (*system, *self._before, *messages)

    def _tools(self, fields: Fields) -> tuple[object, ...]:
        name = self._source.tools
        if not name:
            return ()
        try:
            value = field_value(fields, name, key=f"{self._keys}.tools")
        except DataError:
            return ()  # the row has none
        return tools_of(value, key=f"{self._keys}.tools")

    def _answer(self, fields: Fields) -> str:
        name, key = self._source.answer, f"{self._keys}.answer"
        try:
            answer = field_text(fields, name, key=key) if name else ""
        except DataError:
            if self._needs.answer:
                raise
            answer = ""
        if self._needs.number and answer_number(answer) is None:
            raise DataError(
                f"field {name!r}, which {key} reads, cannot be read as one number, "
                "which a reward compares with",
                found=excerpt(repr(answer)),
                hint="write one number, such as 12, -3/4 or 2.5e3, score with exact_match, or "
                "raise data.max_bad_rows to leave such rows out",
            )
        return answer

    def _response(self, template: Template | None, fields: Fields, *, needed: bool) -> str:
        if template is None:
            return ""
        try:
            messages = self._conversation(template, fields)
            if messages is None:
                return template.render(fields)
            return answer_of(messages, key=template.key)
        except DataError:
            if needed:
                raise
            return ""

    def _check_pair(self, fields: Fields, preferred: str, rejected: str) -> None:
        for name, text in (("preferred", preferred), ("rejected", rejected)):
            if not text.strip():
                raise DataError(f"the {name} response of the pair is empty", found=repr(text))
        if preferred == rejected:
            raise DataError(
                "the preferred and the rejected response are the same",
                found=excerpt(repr(rejected)),
                hint="a pair says which of two is better; leave the row out",
            )
        assert self._solution is not None and self._rejected is not None  # noqa: PT018
        chosen, refused = (self._conversation(t, fields) for t in (self._solution, self._rejected))
        if chosen and refused and before_answer(chosen) != before_answer(refused):
            raise DataError(
                "the two responses of the pair answer different conversations",
                hint="a pair has one prompt; leave the row out",
            )


class _Band:
    """The rows that `data.difficulty` keeps: low <= their solve rate <= high."""

    def __init__(self, difficulty: DifficultyConfig) -> None:
        self._difficulty = difficulty
        self._outside: list[float] = []

    @property
    def num_outside(self) -> int:
        return len(self._outside)

    def holds(self, fields: Mapping[str, object]) -> bool:
        rate = field_number(fields, self._difficulty.field, key="data.difficulty.field")
        if self._difficulty.low <= rate <= self._difficulty.high:
            return True
        self._outside.append(rate)
        return False

    def nothing_left(self, source: str) -> DataError:
        band = self._difficulty
        return DataError(
            f"data.difficulty leaves none of the {len(self._outside)} rows",
            where=source,
            found=f"{band.field} from {min(self._outside):g} to {max(self._outside):g}",
            expected=f"from {band.low:g} to {band.high:g} (data.difficulty.low and high)",
            hint="widen the band",
        )
