"""`flowrl score FILE --reward NAME`: scores a file of completions; shows where two rewards differ.

The file has a row for each completion, in any format that data may have; samples.jsonl of a run is
one. Rewards run in scorer processes, under the limits that they have in a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from flowrl.backend.protocols import ScoreContext, ScoreRequest, ScoreResult
from flowrl.config.check_files import reward_files_exist
from flowrl.config.load import load_config
from flowrl.data.formats import open_data_file
from flowrl.data.templates import field_text
from flowrl.errors import DataError, raise_all
from flowrl.files import encode_json
from flowrl.ids import RoleName, SampleId
from flowrl.runtime.scoring.pool import ScoreFailure, ScoringPool
from flowrl.specs import FinishReason
from flowrl.wording import counted, listing

_RESPONSES = ("response", "completion", "output")
_PROMPTS = ("prompt", "question")
_ANSWERS = ("answer", "ground_truth", "solution", "label")
_EXCERPT = 60
_WAIT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """Names of the fields of a file, which may be nested; None for the usual names."""

    response: str | None = None
    answer: str | None = None
    prompt: str | None = None


_Completion: TypeAlias = tuple[str, ScoreRequest]
"""A place for messages, and what is scored."""
_Scores: TypeAlias = Mapping[SampleId, ScoreResult | ScoreFailure]


def run(
    path: Path,
    reward: str,
    compare: str | None,
    fields: Fields,
    *,
    timeout_s: float,
    num: int,
    as_json: bool,
) -> None:
    """Prints scores, and the completions on which two rewards differ.

    Args:
        path: A file of completions.
        reward: A rule's name, `FILE.py:NAME`, or a term of a configuration in braces.
        compare: Another one.
        fields: The fields that are read.
        timeout_s: Seconds that a completion's score may take.
        num: Number of different completions that are shown.
        as_json: Prints every completion as JSON.

    Raises:
        ConfigError, DataError, RewardError: The reward or the file cannot be used.
    """
    completions = _completions(path, fields)
    scores: dict[str, _Scores] = {
        name: _scores(name, completions, timeout_s=timeout_s)
        for name in (reward, compare)
        if name is not None
    }
    if as_json:
        rows = [
            {"where": where, **{name: _as_json(by[request.sample]) for name, by in scores.items()}}
            for where, request in completions
        ]
        report = {"file": str(path), "rewards": list(scores), "completions": rows}
        print(encode_json(report), end="")
        return
    print(f"{path}: {counted(len(completions), 'completion')}")
    for name, by_sample in scores.items():
        print(f"  {name}: {_summary(list(by_sample.values()))}")
    if compare is not None:
        _print_differences(completions, scores, num)


def _completions(path: Path, fields: Fields) -> list[_Completion]:
    """Returns the completions of a file, each with its place."""
    try:
        file = open_data_file(path)
        records = list(file.scan())
    except OSError as reason:
        raise DataError(
            f"the file cannot be read: {reason.strerror}",
            where=str(path),
            hint="name a file of completions that may be read",
        ) from None
    completions = []
    for record in records:
        where = file.where(record.number)
        try:
            if isinstance(record.fields, DataError):
                raise record.fields
            request = _request(record.number, record.fields, fields, where)
        except DataError as error:
            error.where = where
            raise
        completions.append((where, request))
    if not completions:
        raise DataError("the file has no completion", where=str(path), hint="name a file with rows")
    return completions


def _request(number: int, row: Mapping[str, object], fields: Fields, where: str) -> ScoreRequest:
    response = _field(row, fields.response, _RESPONSES, "--response")
    if response is None:
        raise DataError(
            "the row has no completion",
            where=where,
            found=f"fields {listing(row)}",
            expected=f"one of {listing(_RESPONSES)}",
            hint="--response FIELD names another one, which may be nested: "
            "--response choices.0.text",
        )
    tokens = row.get("num_tokens")
    return ScoreRequest(
        sample=SampleId(str(number)),
        prompt=_field(row, fields.prompt, _PROMPTS, "--prompt") or "",
        response=response,
        answer=_field(row, fields.answer, _ANSWERS, "--answer") or "",
        row=row,
        finish=FinishReason.LENGTH if row.get("finish") == "length" else FinishReason.STOP,
        num_tokens=tokens if isinstance(tokens, int) else len(response.split()),
    )


def _field(
    row: Mapping[str, object], given: str | None, usual: Sequence[str], option: str
) -> str | None:
    """Returns the text of the given field, or of the first usual one; None if the row has none."""
    name = given or next((name for name in usual if name in row), None)
    if name is None or (not given and isinstance(row[name], list | dict)):
        return None
    return field_text(row, name, key=option)


def _scores(reward: str, completions: Sequence[_Completion], *, timeout_s: float) -> _Scores:
    written = reward if reward.startswith("{") else f"{{use: {encode_json(reward)}}}"
    base = {"stages": ["grpo"], "data": {"train": "none"}}
    loaded = load_config(None, [f"rewards.terms=[{written}]"], base=base)
    raise_all(reward_files_exist(loaded))
    terms = tuple(term.model_dump(mode="json") for term in loaded.config.rewards.terms)
    context = ScoreContext(role=RoleName("score"), terms=terms)
    results: dict[SampleId, ScoreResult | ScoreFailure] = {}
    with ScoringPool("verify", context, timeout_s=timeout_s) as pool:
        pool.submit([request for _, request in completions])
        while len(results) < len(completions):  # the pool ends each sample at its limit
            pool.wait(_WAIT_S)
            results |= {result.sample: result for result in pool.poll()}
    return results


def _as_json(result: ScoreResult | ScoreFailure) -> object:
    return {"failure": result.message} if isinstance(result, ScoreFailure) else result.score


def _summary(results: Sequence[ScoreResult | ScoreFailure]) -> str:
    scores = [result.score for result in results if isinstance(result, ScoreResult)]
    failures = [result for result in results if isinstance(result, ScoreFailure)]
    text = "no score"
    if scores:
        text = f"mean {sum(scores) / len(scores):.4g} of {counted(len(scores), 'score')}"
    if failures:
        text += f", {counted(len(failures), 'failure')}; the first {failures[0].message}"
    return text


def _print_differences(
    completions: Sequence[_Completion], scores: Mapping[str, _Scores], num: int
) -> None:
    different: list[str] = []
    for where, request in completions:
        results = {name: by_sample[request.sample] for name, by_sample in scores.items()}
        first, *others = map(_as_json, results.values())
        failed = [isinstance(result, ScoreFailure) for result in results.values()]
        if not all(failed) and any(other != first for other in others):
            values = ", ".join(f"{name} {_shown(result)}" for name, result in results.items())
            end = f"response ends {request.response[-_EXCERPT:]!r}, answer {request.answer!r}"
            different.append(f"{where}: {values}\n  {end}")
    print(f"  they differ on {len(different)} of {counted(len(completions), 'completion')}")
    print("".join(f"{text}\n" for text in different[:num]), end="")
    if len(different) > num:
        print(f"and {len(different) - num} more; --num {len(different)} shows all")


def _shown(result: ScoreResult | ScoreFailure) -> str:
    return "failed" if isinstance(result, ScoreFailure) else f"{result.score:g}"
