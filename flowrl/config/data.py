"""Sections of data: sources of prompts, their selection, and their order."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag, model_validator

from flowrl.config.section import Float, Int, Refusal, Section
from flowrl.errors import ConfigError

__all__ = [
    "ArithmeticData",
    "CurriculumConfig",
    "DataConfig",
    "DataSource",
    "DifficultyConfig",
    "JsonlData",
]


class ArithmeticData(Section):
    """Sums of two numbers of `digits` digits (`23+45=` -> `068`), with a fixed split.

    All pairs of numbers are shuffled by a fixed seed; `held_out` of them are the eval split. In a
    pair of answers the rejected one is slightly wrong, and each sum has four pairs.
    """

    kind: Literal["arithmetic"]
    split: Literal["train", "eval"]
    digits: Int = Field(default=2, ge=1, le=3)
    held_out: Int = Field(default=1000, ge=1)


class JsonlData(Section):
    """Rows of a JSON lines file.

    Attributes:
        prompt: Template of the prompt; `{field}` is replaced by a field of the row.
        answer: Field that holds the reference answer.
        solution: Template of the response that supervised stages learn from, and of the preferred
            one of a pair.
        rejected: Template of the other response of a pair; only stages that learn from pairs read
            it.
        max_rows: Number of rows that are read; 0 reads all.
    """

    kind: Literal["jsonl"]
    path: Path
    prompt: str = "{prompt}"
    answer: str = "answer"
    solution: str = "{answer}"
    rejected: str = "{rejected}"
    max_rows: Int = Field(default=0, ge=0)


def _data_kind(value: object) -> str:
    if isinstance(value, ArithmeticData | JsonlData):
        return value.kind
    return str(value.get("kind")) if isinstance(value, dict) else "path"


DataSource: TypeAlias = Annotated[
    Annotated[str, Tag("path")]
    | Annotated[ArithmeticData, Tag("arithmetic")]
    | Annotated[JsonlData, Tag("jsonl")],
    Discriminator(_data_kind),
]


class DifficultyConfig(Section):
    """Keeps training rows whose solve rate, measured beforehand, lies in a range.

    Attributes:
        field: Field of the row that holds the solve rate.
        low: Lowest rate that is kept.
        high: Highest rate that is kept.
    """

    field: str = "solve_rate"
    low: Float = 0.0
    high: Float = 1.0

    @model_validator(mode="after")
    def _is_a_band(self) -> DifficultyConfig:
        if self.low > self.high:
            raise ValueError(f"low={self.low:g} is above high={self.high:g}; no row lies between")
        return self


class CurriculumConfig(Section):
    """Prefers prompts by their solve rate, as the run estimates it.

    `flowrl.data.row_order` explains the schemes, with their papers, and what an epoch is with
    them. A curriculum applies to stages that generate; others have no scores.

    Attributes:
        prefer: `learnability` weighs a prompt by p (1 - p), `unsolved` by 1 - p; p is its estimated
            solve rate.
        low: Prompts with a lower estimate are left to `explore`.
        high: Prompts with a higher estimate are left to `explore`.
        explore: Share of prompts that are taken in the order of an ordinary epoch, so that every
            prompt is seen again and its estimate is corrected.
        smoothing: Share of a new observation in the estimate (an exponential average).
        prior: Estimate before any observation.
        unsolved_score: Mean score of a group that counts as the solve rate 0.
        solved_score: Mean score that counts as 1; between the two scores the rate is linear, and
            beyond them it is clipped.
    """

    kind: Literal["solve_rate"]
    prefer: Literal["learnability", "unsolved"] = "learnability"
    low: Float = Field(default=0.0, ge=0, le=1)
    high: Float = Field(default=1.0, ge=0, le=1)
    explore: Float = Field(default=0.25, ge=0, le=1)
    smoothing: Float = Field(default=0.5, gt=0, le=1)
    prior: Float = Field(default=0.5, ge=0, le=1)
    unsolved_score: Float = 0.0
    solved_score: Float = 1.0

    @model_validator(mode="after")
    def _is_a_band_and_a_scale(self) -> CurriculumConfig:
        if self.low > self.high:
            raise ValueError(f"low={self.low:g} is above high={self.high:g}; no rate lies between")
        if not self.low <= self.prior <= self.high and not self.explore:
            raise ValueError(
                f"prior={self.prior:g} lies outside low={self.low:g} to high={self.high:g}, so "
                "that without explore no prompt would ever be preferred"
            )
        if self.unsolved_score >= self.solved_score:
            raise ValueError(
                f"unsolved_score={self.unsolved_score:g} is not below "
                f"solved_score={self.solved_score:g}"
            )
        return self


class DataConfig(Section):
    """Training and held-out data, and how prompts are selected.

    `train` and `eval` are a path to a JSON lines file, or a mapping with `kind`. The templates of
    this section apply to plain paths.

    Attributes:
        rejected: Template of the response that a pair does not prefer, as in kind jsonl.
        origin: Origin of the files, for people; shown when a file is missing.
        max_bad_rows: Number of unreadable rows that are skipped before the run stops.
        chat_template: Wraps the prompt as a user's turn with the model's own chat template;
            `auto` does so if the tokenizer has one.
        difficulty: Selects training rows by a solve rate that they carry.
        curriculum: Prefers prompts by the solve rate that the run estimates; without it every
            epoch is a permutation.
        source: Field of the training rows that names the source of each, for stages whose
            `train.policies.fairness` gives sources shares.
    """

    train: DataSource
    eval: DataSource | None = None
    prompt: str = "{prompt}"
    answer: str = "answer"
    solution: str = "{answer}"
    rejected: str = "{rejected}"
    origin: str = ""
    max_prompt_tokens: Int = Field(default=512, ge=1, le=1 << 24)
    max_bad_rows: Int = Field(default=0, ge=0)
    chat_template: Literal["auto", "never", "always"] = "auto"
    difficulty: DifficultyConfig | None = None
    curriculum: CurriculumConfig | None = None
    source: str | None = None

    @model_validator(mode="after")
    def _sums_have_no_difficulty(self) -> DataConfig:
        if self.difficulty is not None and isinstance(self.train, ArithmeticData):
            raise Refusal(
                ConfigError(
                    "data.difficulty reads a field of rows, and built-in sums carry no solve rate",
                    where="difficulty",
                    found="data.train of kind arithmetic",
                    hint="leave data.difficulty out, or write the rows into a file with the field "
                    f"{self.difficulty.field!r}",
                )
            )
        return self
