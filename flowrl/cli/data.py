"""`flowrl data show` and `flowrl data check`: rows as the model reads them, and their mistakes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import numpy as np

from flowrl.backend.batch import Ints
from flowrl.compiler.reward_terms import row_needs
from flowrl.config.data import DataSource
from flowrl.config.load import load_config, locating
from flowrl.config.roles import BpeTokenizer
from flowrl.data import (
    RowNeeds,
    Rows,
    Tokenizer,
    encoded_rows,
    load_rows,
    prepare_model_folder,
)
from flowrl.data.row_check import RowReport, check_rows, every_bad_row
from flowrl.data.rows import Row
from flowrl.errors import ConfigError, DataError
from flowrl.files import encode_json
from flowrl.runtime.driver.graph_parts import RoleUse
from flowrl.wording import counted, excerpt, listing, one_of_them

_SHOWN_PLACES = 5
_SHOWN_VALUE = 100


class _Data:
    """The data of a configuration, and the tokenizer of the model that reads them.

    Args:
        most: Number of usable rows of a split that are needed; 0 reads all.
    """

    def __init__(self, path: Path, overrides: Sequence[str], most: int = 0) -> None:
        from flowrl import api

        self._loaded = load_config(path, overrides)
        self._most = most
        self.config = self._loaded.config
        self._graphs = list(api.trace(self._loaded).values())
        self._use = RoleUse(self.config, self._graphs)

    @property
    def sources(self) -> dict[str, tuple[str, DataSource]]:
        """The sources with their keys: `train`, `eval`, and the sets of `eval.sets` by name."""
        data = self.config.data
        own = {
            name: (f"eval.sets.{name}.data", held_out.data)
            for name, held_out in self.config.eval.sets.items()
        }
        found = {"train": ("data.train", data.train), "eval": ("data.eval", data.eval), **own}
        return {name: (key, source) for name, (key, source) in found.items() if source is not None}

    def needs(self, name: str) -> RowNeeds:
        return row_needs(self.config, self._graphs, "train" if name == "train" else "eval")

    def rows(self, name: str) -> Rows:
        """Reads a source, with every bad row."""
        key, source = self.sources[name]
        with locating(self._loaded):
            return load_rows(
                source,
                self.config.data,
                split="train" if name == "train" else "eval",
                needs=self.needs(name),
                key=key,
                bad=every_bad_row(),
                most=self._most,
            )

    def max_length(self, name: str) -> int | None:
        """Returns the tokens of the longest sample, where a stage learns from the responses."""
        from flowrl import api

        needs = self.needs(name)
        if not needs.solution and not needs.rejected:
            return None
        _, request, _ = api.ask_for_plan(self._loaded)
        return request.max_length

    def tokenizer(self) -> Tokenizer:
        """Returns the tokenizer of the model's folder; that of a new model learns from all rows."""
        name = self._use.owner(self._use.reader)
        role, data = self.config.roles[name], self.config.data
        lessons: Iterable[Row] = ()
        with locating(self._loaded), tempfile.TemporaryDirectory(prefix="flowrl-") as folder:
            if isinstance(role.tokenizer, BpeTokenizer) and not isinstance(role.model, str):
                lessons = load_rows(
                    data.train, data, split="train", needs=self.needs("train"), bad=every_bad_row()
                )
            model = prepare_model_folder(role, Path(folder) / "model", lessons, name=name)
            is_new = not isinstance(role.model, str)
            alphabet_key = f"roles.{name}.tokenizer.alphabet" if is_new else ""
            return Tokenizer.load(model, alphabet_key=alphabet_key)


def show(
    path: Path, overrides: Sequence[str], *, split: str, skip: int, num: int, as_json: bool
) -> None:
    """Prints rows with the prompts that the model reads and what rewards get.

    Raises:
        ConfigError, DataError: The configuration, its data or its model cannot be used.
    """
    data = _Data(path, overrides, most=skip + num)
    if split not in data.sources:
        raise ConfigError(
            "the configuration has no such data",
            where=f"--split {split}",
            expected=f"one of {listing(data.sources)}",
            hint=one_of_them(split, list(data.sources)),
        )
    rows, needs = data.rows(split), data.needs(split)
    tokenizer, config = data.tokenizer(), data.config.data
    taken = islice(rows, skip, skip + num)
    shown = [
        (row, ids, ", too long" if len(ids) > config.max_prompt_tokens else "")
        for _, row, ids in encoded_rows(taken, tokenizer, config, bad=rows.bad, needs=needs)
    ]
    if as_json:
        problems = [{"where": p.where, "reason": p.reason} for p in rows.problems]
        values = [_row_json(*each, tokenizer, needs) for each in shown]
        print(encode_json({"rows": values, "problems": problems}), end="")
        return
    if not shown and rows.problems:
        first = rows.problems[0]
        raise DataError(
            "no row that can be used is among those",
            where=first.where,
            found=first.reason,
            hint="`flowrl data check` counts the rows by their mistakes",
        )
    print("\n\n".join(_row_text(*each, tokenizer, needs) for each in shown))
    for problem in rows.problems[:_SHOWN_PLACES]:
        print(f"\n{problem.where}: {problem.reason}")


def _responses(row: Row, needs: RowNeeds) -> dict[str, str]:
    responses = {"solution": row.solution if needs.solution else None, "rejected": row.rejected}
    return {name: text for name, text in responses.items() if text is not None}


def _row_json(
    row: Row, ids: Ints, too_long: str, tokenizer: Tokenizer, needs: RowNeeds
) -> dict[str, object]:
    value: dict[str, object] = {
        "where": row.where,
        "prompt": tokenizer.visible(ids),
        "num_tokens": len(ids),
        "tokens": ids.tolist(),
        "too_long": bool(too_long),
    }
    for name, text in _responses(row, needs).items():
        value[name] = text
        value[f"num_{name}_tokens"] = len(tokenizer.encode_response(text))
    return value | {"reward": {"prompt": row.prompt, "answer": row.answer, "row": row.fields}}


def _row_text(row: Row, ids: Ints, too_long: str, tokenizer: Tokenizer, needs: RowNeeds) -> str:
    lines = [f"{row.where}: a prompt of {counted(len(ids), 'token')}{too_long}"]
    lines += [f"  | {line}" for line in tokenizer.visible(ids).split("\n")]
    for name, text in _responses(row, needs).items():
        tokens = counted(len(tokenizer.encode_response(text)), "token")
        lines.append(f"  {name} of {tokens} with the end token: {_value(text)}")
    lines.append("  a reward gets")
    lines += [f"    prompt: {_value(row.prompt)}", f"    answer: {_value(row.answer)}"]
    lines += [f"    row[{name!r}]: {_value(value)}" for name, value in row.fields.items()]
    return "\n".join(lines)


def _value(value: object) -> str:
    return excerpt(repr(value), _SHOWN_VALUE)


def check(path: Path, overrides: Sequence[str], *, as_json: bool) -> int:
    """Checks all rows of both splits and prints what is wrong with them.

    Returns:
        The exit code: 2 where a run would refuse the data.

    Raises:
        ConfigError, DataError: The configuration, its data or its model cannot be used.
    """
    data = _Data(path, overrides)
    config, tokenizer = data.config.data, data.tokenizer()
    reports = {
        key: check_rows(data.rows(name), tokenizer, config, data.needs(name), data.max_length(name))
        for name, (key, _) in data.sources.items()
    }
    refused = {
        key: reason
        for key, report in reports.items()
        if (reason := _refusal(report, config.max_bad_rows, config.overlong))
    }
    if as_json:
        print(encode_json({s: _report_json(r, refused.get(s)) for s, r in reports.items()}), end="")
    else:
        print("\n".join(_report_text(s, r, refused.get(s)) for s, r in reports.items()))
    return 2 if refused else 0


def _refusal(report: RowReport, most_bad: int, overlong: str) -> str | None:
    if report.num_bad > most_bad:
        return f"{counted(report.num_bad, 'bad row')}, at most {most_bad} (data.max_bad_rows)"
    if not report.num_usable:
        return "no row is usable"
    if overlong == "refuse" and any(f.kind == "too long" for f in report.findings):
        return "prompts are too long (data.overlong is refuse)"
    return None


def _report_json(report: RowReport, refused: str | None) -> dict[str, object]:
    lengths = report.prompt_tokens
    return {
        **{k: v for k, v in asdict(report).items() if k != "prompt_tokens"},
        "prompt_tokens": None
        if not len(lengths)
        else {
            "min": int(lengths[0]),
            "mean": float(lengths.mean()),
            "p50": float(np.median(lengths)),
            "p95": float(np.quantile(lengths, 0.95)),
            "max": int(lengths[-1]),
        },
        "refused": refused,
    }


def _report_text(key: str, report: RowReport, refused: str | None) -> str:
    lines = [
        f"{key}: {report.source}: {counted(report.num_read, 'row')}, {report.num_usable} usable"
    ]
    if report.num_out_of_band:
        lines.append(f"  {report.num_out_of_band} outside data.difficulty")
    for finding in report.findings:
        more = len(finding.places) - _SHOWN_PLACES
        places = ", ".join(finding.places[:_SHOWN_PLACES]) + (
            f" and {more} more" if more > 0 else ""
        )
        lines.append(f"  {len(finding.places)} {finding.kind}: {finding.what}")
        lines.append(f"    {places}")
    lengths = report.prompt_tokens
    if len(lengths):
        p95 = int(np.quantile(lengths, 0.95))
        lines.append(
            f"  prompt tokens: {lengths[0]} to {lengths[-1]}, mean {lengths.mean():.1f}, p95 {p95}"
        )
    lines.append(f"  a run refuses this: {refused}" if refused else "  a run takes this")
    return "\n".join(lines)
