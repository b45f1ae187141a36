"""`flowrl score FILE --reward NAME`: scores a file of completions; shows where two rewards differ.

The file has a row for each completion, in any format that data may have; samples.jsonl of a run is
one. Rewards run in scorer processes, under the limits that they have in a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowrl.backend.protocols import ScoreContext, ScoreRequest, ScoreResult
from flowrl.config.check_files import reward_files_exist
from flowrl.config.load import load_config
from flowrl.data.formats import open_data_file
from flowrl.data.templates import field_text
from flowrl.errors import ConfigError, DataError, combine
from flowrl.files import encode_json
from flowrl.ids import RoleName, SampleId
from flowrl.runtime.scoring.pool import ScoreFailure, ScoringPool
from flowrl.specs import FinishReason
from flowrl.wording import counted, listing

__all__ = ["Fields", "run"]

_RESPONSES = ("response", "completion", "output")
_ANSWERS = ("answer", "ground_truth", "solution", "label")
_EXCERPT = 60
_WAIT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """Names of the fields of a file, which may be nested; None for the usual names."""

    response: str | None = None
    answer: str | None = None
    prompt: str | None = None


@dataclass(frozen=True, slots=True)
class _Completion:
    where: str
    request: ScoreRequest


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
    names = [reward, *([compare] if compare is not None else [])]
    scores = [_scores(name, completions, timeout_s=timeout_s) for name in names]
    if as_json:
        rows = [
            {
                "where": completion.where,
                **{
                    name: _as_json(found[completion.request.sample])
                    for name, found in zip(names, scores, strict=True)
                },
            }
            for completion in completions
        ]
        print(encode_json({"file": str(path), "rewards": names, "completions": rows}))
        return
    print(f"{path}: {counted(len(completions), 'completion')}")
    for name, found in zip(names, scores, strict=True):
        print(f"  {name}: {_summary(list(found.values()))}")
    if compare is not None:
        _print_differences(completions, names, scores, num)


def _completions(path: Path, fields: Fields) -> list[_Completion]:
    try:
        file = open_data_file(path)
        records = list(file.scan())
    except OSError as reason:
        raise DataError(f"the file cannot be read: {reason}", where=str(path)) from None
    completions = []
    for record in records:
        where = file.where(record.number)
        row = record.fields
        if isinstance(row, DataError):
            row.where = where
            raise row
        try:
            response = _field(row, fields.response, _RESPONSES, "--response")
            answer = _field(row, fields.answer, _ANSWERS, "--answer", required=False)
            prompt = _field(row, fields.prompt, ("prompt", "question"), "--prompt", required=False)
        except DataError as error:
            error.where = where
            raise
        tokens = row.get("num_tokens")
        request = ScoreRequest(
            sample=SampleId(str(record.number)),
            prompt=prompt,
            response=response,
            answer=answer,
            row=row,
            finish=FinishReason.LENGTH if row.get("finish") == "length" else FinishReason.STOP,
            num_tokens=tokens if isinstance(tokens, int) else len(response.split()),
        )
        completions.append(_Completion(where, request))
    return completions


def _field(
    row: Mapping[str, object],
    given: str | None,
    usual: Sequence[str],
    option: str,
    *,
    required: bool = True,
) -> str:
    name = given or next((name for name in usual if name in row), None)
    if name is not None and (given or not isinstance(row[name], list | dict)):
        return field_text(row, name, key=option)
    if not required:
        return ""
    raise DataError(
        "the row has no completion",
        found=f"fields {listing(row)}",
        expected=f"one of {listing(usual)}",
        hint=f"{option} FIELD names another one, which may be nested: {option} choices.0.text",
    )


def _scores(
    reward: str, completions: Sequence[_Completion], *, timeout_s: float
) -> dict[str, ScoreResult | ScoreFailure]:
    written = reward if reward.startswith("{") else f"{{use: {encode_json(reward)}}}"
    base = {"stages": ["grpo"], "data": {"train": "none"}}
    loaded = load_config(None, [f"rewards.terms=[{written}]"], base=base)
    problems: list[ConfigError] = list(reward_files_exist(loaded))
    if problems:
        raise combine(problems)
    terms = tuple(term.model_dump(mode="json") for term in loaded.config.rewards.terms)
    context = ScoreContext(role=RoleName("score"), terms=terms)
    found: dict[str, ScoreResult | ScoreFailure] = {}
    with ScoringPool("verify", context, timeout_s=timeout_s) as pool:
        pool.submit([completion.request for completion in completions])
        while len(found) < len(completions):
            pool.wait(_WAIT_S)
            found |= {result.sample: result for result in pool.poll()}
    return found


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
    completions: Sequence[_Completion],
    names: Sequence[str],
    scores: Sequence[Mapping[str, ScoreResult | ScoreFailure]],
    num: int,
) -> None:
    first, second = scores
    different = [
        completion
        for completion in completions
        if _as_json(first[completion.request.sample]) != _as_json(second[completion.request.sample])
    ]
    print(f"  they differ on {len(different)} of {counted(len(completions), 'completion')}")
    for completion in different[:num]:
        request = completion.request
        values = ", ".join(
            f"{name} {_shown(found[request.sample])}"
            for name, found in zip(names, scores, strict=True)
        )
        print(f"{completion.where}: {values}")
        print(f"  response ends {request.response[-_EXCERPT:]!r}, answer {request.answer!r}")
    if len(different) > num:
        print(f"and {len(different) - num} more; --num {len(different)} shows all")


def _shown(result: ScoreResult | ScoreFailure) -> str:
    return "failed" if isinstance(result, ScoreFailure) else f"{result.score:g}"
