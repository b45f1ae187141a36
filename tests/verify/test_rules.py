"""Rules without an answer's mathematics: choices, tags, patterns, JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowrl.backend.protocols import ScoreContext, ScoreRequest
from flowrl.errors import ConfigError, RewardError
from flowrl.ids import RoleName, SampleId
from flowrl.specs import FinishReason
from flowrl_backends.verify.scorer import Scorer


def value(term: dict[str, object], response: str, answer: str = "") -> float:
    request = ScoreRequest(
        sample=SampleId("0/4/2"),
        prompt="p",
        response=response,
        answer=answer,
        row={},
        finish=FinishReason.STOP,
        num_tokens=1,
    )
    return Scorer(ScoreContext(role=RoleName("v"), terms=(term,))).score(request).score


@pytest.mark.parametrize(
    ("response", "chosen"),
    [
        ("Answer: (C)", "C"),
        ("The answer is b.", "B"),
        (r"\boxed{\text{(D)}}", "D"),
        ("A is wrong. The correct option is (C).", "C"),
        ("C) the cat", "C"),
        ("I cannot tell", None),
    ],
)
def test_a_choice_is_the_letter_of_the_final_answer(response, chosen):
    for letter in "ABCD":
        assert value({"kind": "choice"}, response, letter) == (letter == chosen)


def test_a_reference_answer_that_is_no_choice_is_an_error():
    with pytest.raises(RewardError, match="the reference answer is not a choice"):
        value({"kind": "choice"}, "A", "seven")


def test_gsm8k_is_flexible_only_without_hashes():
    term = {"kind": "gsm8k", "flexible": True}
    assert value(term, "so it is 18.", "18") == 1
    assert value(term, "#### 17\nor 18", "18") == 0
    assert value({"kind": "gsm8k"}, "so it is 18.", "18") == 0


def test_a_pattern_captures_the_answer_with_its_last_match():
    term = {"kind": "regex", "pattern": r"<a>(.*?)</a>"}
    assert value(term, "<a>1</a> <a> 2 </a>", "2") == 1
    assert value(term, "<a>2</a> <a>1</a>", "2") == 0
    assert value(term, "2", "2") == 0
    assert value({"kind": "regex", "pattern": r"\d+"}, "1 then 2", "2") == 1


def test_tags_are_there_once_in_order_and_nothing_else_is():
    term = {"kind": "tags"}
    assert value(term, "<think>a\nb</think>\n<answer>2</answer>\n") == 1
    assert value(term, "<think>a</think> so <answer>2</answer>") == 0
    assert value(term, "<think>a<think></think><answer>2</answer>") == 0
    assert value(term, "<answer>2</answer><think>a</think>") == 0
    assert value({"kind": "tags", "tags": ["plan"]}, "<plan>x</plan>") == 1


def test_json_is_read_from_the_last_block_and_checked_by_a_schema(tmp_path: Path):
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"type": "object", "required": ["a"]}))
    term = {"kind": "json_schema", "schema_file": str(schema)}
    assert value(term, 'Here:\n```json\n{"a": 1}\n```\n') == 1
    assert value(term, '{"b": 1}') == 0
    assert value(term, "no json") == 0
    assert value({"kind": "json_schema"}, "[1]") == 1
    schema.write_text('{"type": 3}')
    with pytest.raises(ConfigError, match=r"schema_file: the file is not a JSON schema"):
        value(term, "{}")
