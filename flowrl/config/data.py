"""Sections of data: sources of prompts, their selection, and their order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag, model_validator

from flowrl.config.section import Args, Float, Int, Refusal, Section
from flowrl.errors import ConfigError


class ArithmeticData(Section):
    """Sums of two numbers of `digits` digits (`23+45=` -> `068`), with a fixed split.

    All pairs of numbers are shuffled by a fixed seed; `held_out` of them are the eval split. In a
    pair of answers the rejected one is slightly wrong, and each sum has four pairs.
    """

    kind: Literal["arithmetic"]
    split: Literal["train", "eval"]
    digits: Int = Field(default=2, ge=1, le=3)
    held_out: Int = Field(default=1000, ge=1)


_VERL = {
    "prompt": "{prompt}",
    "answer": "reward_model.ground_truth",
    "solution": "{reward_model.ground_truth}",
}

PRESETS: Mapping[str, Mapping[str, object]] = {
    # openai/gsm8k: question, answer (the working, then "#### " and the number).
    "gsm8k": {"prompt": "{question}", "answer": "answer", "solution": "{answer}"},
    # agentica-org/DeepScaleR-Preview-Dataset, one JSON array: problem, answer, solution.
    "deepscaler": {"prompt": "{problem}", "answer": "answer", "solution": "{solution}"},
    # Hendrycks et al., and its copies: problem, level, type or subject, solution. The answer is in
    # the last \\boxed{} of the solution; MATH-500 alone has it in a column `answer`, too.
    "math": {"prompt": "{problem}", "answer": "solution", "solution": "{solution}"},
    # verl, docs/preparation/prepare_data.rst: data_source, prompt (messages), ability,
    # reward_model {style, ground_truth}, extra_info {split, index, ...}.
    # BytedTsinghua-SIA/DAPO-Math-17k has the same columns; the answer is a whole number as text.
    "verl_parquet": _VERL,
    "dapo_math_17k": _VERL,
    # TRL, docs/source/dataset_formats.md, "prompt-only" and "prompt-completion": prompt as text or
    # as messages; further columns go to rewards.
    "trl_prompt": {"prompt": "{prompt}", "answer": "answer", "solution": "{completion}"},
    "trl_conversational": {
        "prompt": "{prompt}",
        "answer": "answer",
        "solution": "{completion}",
        "tools": "tools",
    },
    # OpenAI's fine-tuning files: messages (system, user, assistant, tool), tools. The last answer
    # of the assistant is the solution.
    "openai_chat": {"prompt": "{messages}", "solution": "{messages}", "tools": "tools"},
    # Anthropic/hh-rlhf: chosen and rejected, each a whole conversation as one text.
    "hh_rlhf": {
        "prompt": "{chosen}",
        "solution": "{chosen}",
        "rejected": "{rejected}",
        "turns": {"user": "\n\nHuman:", "assistant": "\n\nAssistant:"},
    },
    # TRL, "preference": prompt, chosen, rejected as text or as messages; with an implicit prompt
    # chosen and rejected are whole conversations.
    "trl_preference": {"prompt": "{prompt}", "solution": "{chosen}", "rejected": "{rejected}"},
    "trl_preference_implicit": {
        "prompt": "{chosen}",
        "solution": "{chosen}",
        "rejected": "{rejected}",
    },
}
"""The values of keys for the columns of published data sets and of other libraries' formats."""

Format: TypeAlias = Literal["jsonl", "json", "csv", "parquet", "arrow"]
"""A file of JSON objects, one a line; of one JSON array; CSV; Parquet; an Arrow file or stream."""

if TYPE_CHECKING:
    Preset: TypeAlias = str
else:
    Preset = Literal[tuple(PRESETS)]


class ShotConfig(Section):
    """An example that a prompt begins with: a user's turn and the answer to it."""

    prompt: str = Field(min_length=1)
    response: str = Field(min_length=1)


class RowFields(Section):
    """How a row of a file becomes a prompt with its answer and responses.

    A field is named by its path: `reward_model.ground_truth`, `prompt.0.content`. A template that
    is one field alone takes what is in it, text or a conversation: a list of messages, each with
    `role` and `content`. Of a conversation that ends with an answer of the assistant, the prompt is
    what is before that answer, and a response is that answer.
    """

    preset: Preset | None = None
    format: Format | None = None
    prompt: str = "{prompt}"
    answer: str = "answer"
    solution: str = "{answer}"
    rejected: str = "{rejected}"
    system: str = ""
    few_shot: tuple[ShotConfig, ...] = ()
    tools: str = ""
    turns: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        return {**PRESETS.get(str(values.get("preset")), {}), **values}


class FileData(RowFields):
    """Rows of files.

    Attributes:
        path: A file, a folder of files or of a saved `datasets.Dataset`, or a pattern such as
            `data/train-*.parquet`.
        max_rows: Number of rows that are read; 0 reads all.
    """

    kind: Literal["file", "jsonl"]
    path: Path
    max_rows: Int = Field(default=0, ge=0)


class HubData(RowFields):
    """Rows of a data set on the Hugging Face Hub, from the Parquet files that the Hub keeps of it.

    Attributes:
        name: Its name, such as `openai/gsm8k`.
        subset: Its subset (configuration).
        max_rows: Number of rows that are read; 0 reads all.
    """

    kind: Literal["hub"]
    name: str
    subset: str = "default"
    split: str = "train"
    revision: str = "refs/convert/parquet"
    max_rows: Int = Field(default=0, ge=0)


def _data_kind(value: object) -> str:
    if isinstance(value, ArithmeticData | FileData | HubData | MixtureData):
        return value.kind
    return str(value.get("kind")) if isinstance(value, dict) else "path"


class MixtureData(Section):
    """Several sources of prompts.

    Attributes:
        sources: The sources, by name.
        weights: The share of each source in the prompts that are taken; without weights each row is
            taken once an epoch. A source with a large share and few rows is seen more often.
    """

    kind: Literal["mixture"]
    sources: dict[str, OneSource] = Field(min_length=1)
    weights: dict[str, Annotated[Float, Field(gt=0)]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _weights_are_of_sources(self) -> MixtureData:
        if self.weights and self.weights.keys() != self.sources.keys():
            raise ValueError(
                f"weights are of {', '.join(self.weights)}, and sources are "
                f"{', '.join(self.sources)}; give each source a weight"
            )
        return self


_Path: TypeAlias = Annotated[str, Tag("path")]
_Arithmetic: TypeAlias = Annotated[ArithmeticData, Tag("arithmetic")]
_File: TypeAlias = Annotated[FileData, Tag("file")] | Annotated[FileData, Tag("jsonl")]
_Hub: TypeAlias = Annotated[HubData, Tag("hub")]

OneSource: TypeAlias = Annotated[_Path | _Arithmetic | _File | _Hub, Discriminator(_data_kind)]

DataSource: TypeAlias = Annotated[
    _Path | _Arithmetic | _File | _Hub | Annotated[MixtureData, Tag("mixture")],
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


class DataConfig(RowFields):
    """Training and held-out data, and how prompts are selected.

    `train` and `eval` are a path, as that of kind `file`, or a mapping with `kind`. The keys of
    this section about rows (`prompt`, `answer`, ...) apply to plain paths.
    """

    train: DataSource
    eval: OneSource | None = None
    origin: str = ""
    max_prompt_tokens: Int = Field(default=512, ge=1, le=1 << 24)
    overlong: Literal["filter", "cut_left", "refuse"] = "filter"
    max_bad_rows: Int = Field(default=0, ge=0)
    chat_template: Literal["auto", "never", "always"] = "auto"
    chat_args: Args = Field(default_factory=dict)
    response_prefix: str = ""
    difficulty: DifficultyConfig | None = None
    curriculum: CurriculumConfig | None = None
    source: str | None = None

    @model_validator(mode="after")
    def _sums_have_no_difficulty(self) -> DataConfig:
        sums = [
            key
            for key, source in single_sources("data.train", self.train)
            if isinstance(source, ArithmeticData)
        ]
        if self.difficulty is not None and sums:
            raise Refusal(
                ConfigError(
                    "data.difficulty reads a field of rows, and built-in sums carry no solve rate",
                    where="difficulty",
                    found=f"{sums[0]} of kind arithmetic",
                    hint="leave data.difficulty out, or write the rows into a file with the field "
                    f"{self.difficulty.field!r}",
                )
            )
        return self


def single_sources(key: str, source: DataSource | None) -> Iterator[tuple[str, OneSource]]:
    """Yields a source with its dotted key, those of a mixture one by one."""
    if isinstance(source, MixtureData):
        for name, part in source.sources.items():
            yield f"{key}.sources.{name}", part
    elif source is not None:
        yield key, source
