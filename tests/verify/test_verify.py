"""The verify plug-in: what each reward term gives, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from flowrl.backend.plugin import Plugin
from flowrl.backend.protocols import (
    ScoreBackend,
    ScoreContext,
    ScoreRequest,
    Service,
)
from flowrl.errors import BackendError, ConfigError, RewardError
from flowrl.ids import RoleName, SampleId
from flowrl.specs import FinishReason
from flowrl_backends.verify import plugin
from tests.policy_contexts import policy_context


def scorer(*terms: dict[str, object]) -> ScoreBackend:
    return plugin.open_score(ScoreContext(role=RoleName("verifier"), terms=terms))


def request(response: str, answer: str = "", **row: object) -> ScoreRequest:
    return ScoreRequest(
        sample=SampleId("0/4/2"),
        prompt="the prompt",
        response=response,
        answer=answer,
        row=row,
        finish=FinishReason.STOP,
        num_tokens=1,
    )


def value(term: dict[str, object], response: str, answer: str = "") -> float:
    return scorer(term).score(request(response, answer)).score


def user(tmp_path: Path, source: str) -> dict[str, object]:
    path = tmp_path / "rewards.py"
    path.write_text(source)
    return {"kind": "python", "function": f"{path}:f", "name": "score", "weight": 1.0}


def test_the_plugin_only_scores_and_is_always_usable():
    assert isinstance(plugin, Plugin)
    assert plugin.name == "verify"
    assert plugin.capabilities.services == {Service.SCORE}
    assert plugin.check().usable
    context = policy_context()
    for opening in (
        lambda: plugin.open_train(context),
        lambda: plugin.open_generate(context, None),
    ):
        with pytest.raises(BackendError, match=r"roles\.actor\.backend: backend 'verify' cannot"):
            opening()


def test_the_score_is_the_weighted_sum_and_the_terms_are_unweighted():
    terms = (
        {"kind": "gsm8k", "name": "accuracy", "weight": 1.0},
        {"kind": "format", "name": "format", "weight": 0.25, "pattern": r".*#### -?\d+"},
    )
    result = scorer(*terms).score(request("so\n#### 5", "4"))
    assert result.sample == "0/4/2"
    assert result.score == 0.25
    assert result.terms == {"accuracy": 0.0, "format": 1.0}


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [("068", "068", 1), (" 068\n", "068", 1), ("68", "068", 0), ("068 ", " 068", 1), ("", "0", 0)],
)
def test_exact_match_compares_stripped_text(response, answer, expected):
    assert value({"kind": "exact_match"}, response, answer) == expected


def test_numeric_match_takes_the_last_number_to_a_relative_tolerance():
    term = {"kind": "numeric_match", "tolerance": 0.01}
    assert value(term, "7, then 100.9", "100") == 1
    assert value(term, "101.1", "100") == 0
    assert value(term, "1e-9", "0") == 0
    assert value(term, "no idea", "100") == 0
    assert value(term, "the total is $1,250.00.", "steps <<1>>\n#### 1250") == 1


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        (r"\boxed{\frac{3}{2}}", r"\frac{1}{2}", 0),
        (r"\boxed{\frac{3}{2}}", "1.5", 1),
        ("3 1/2", "1 1/2", 0),
        ("3 1/2", "3.5", 1),
        ("x = - 5", "5", 0),
        ("x = - 5", "-5", 1),
        ("5-7", "7", 0),
        ("1.5.2", "2", 0),
    ],
)
def test_numeric_match_compares_whole_numbers_and_never_parts_of_them(response, answer, expected):
    assert value({"kind": "numeric_match"}, response, answer) == expected
    assert value({"kind": "gsm8k"}, f"#### {response}", answer) == expected


def test_gsm8k_wants_the_hashes_and_reads_the_last_of_them():
    term = {"kind": "gsm8k"}
    answer = "48+24 = <<48+24=72>>72\n#### 72"
    assert value(term, "#### 71\nno:\n#### 72 clips", answer) == 1
    assert value(term, "#### 72\n#### 71", answer) == 0
    assert value(term, "the answer is 72", answer) == 0
    assert value(term, "72 ####\n", answer) == 0
    assert value(term, "####\n72", answer) == 0
    assert value(term, "#### $72.00", "72") == 1


@pytest.mark.parametrize("kind", ["numeric_match", "gsm8k"])
@pytest.mark.parametrize("response", ["1", "nothing"])
@pytest.mark.parametrize("answer", ["blue", "1 or 2", "1.5.2", "1 + 1 = 2\n#### two"])
def test_an_answer_that_is_not_one_number_is_an_error_and_not_a_zero(kind, response, answer):
    with pytest.raises(RewardError, match="sample 0/4/2: the reference answer cannot be read as"):
        value({"kind": kind}, response, answer)


def test_gsm8k_agrees_with_the_intended_readings_of_the_reference_cases(reference_data: Path):
    path = reference_data / "oracles" / "math_verification.json"
    cases = [c for c in json.loads(path.read_text())["cases"] if c["name"].startswith("gsm_")]
    assert len(cases) > 10
    for case in cases:
        inputs, intended = case["inputs"], case["options"]["intended_correct"]
        # Without `####` there is no answer by definition; a percentage is debatable.
        if intended is None or "####" not in inputs["response"]:
            continue
        given_value = value({"kind": "gsm8k"}, inputs["response"], inputs["ground_truth"])
        assert given_value == intended, case["name"]


def test_format_matches_the_whole_response_and_the_dot_takes_newlines():
    term = {"kind": "format", "pattern": r"<think>.*</think>\n#### -?[0-9]+"}
    assert value(term, "<think>a\nb</think>\n#### -3") == 1
    assert value(term, "<think>a\nb</think>\n#### -3 ") == 0
    assert value(term, " <think></think>\n#### 3") == 0


@pytest.mark.parametrize(
    ("terms", "what"),
    [
        ((), "nothing to score with"),
        (({"kind": "format", "pattern": "("},), r"rewards\.terms\[0\]\.pattern: .*not a regular"),
        (({"kind": "exact"},), "no such reward term"),
        (({"kind": "gsm8k", "name": "a"}, {"kind": "exact_match", "name": "a"}), "one name"),
        (({"kind": "gsm8k", "weight": "1"},), "not a number"),
    ],
)
def test_impossible_terms_are_config_errors(terms, what):
    with pytest.raises(ConfigError, match=what):
        scorer(*terms)


@pytest.mark.parametrize(
    "signature",
    [
        "prompt, response, answer, row",
        "row, response",
        "*, answer",
        "response, /, row",
        "**all",
        "response, scale=2",
        "",
    ],
)
def test_a_user_function_gets_the_parameters_it_names(tmp_path, signature):
    names = [n for n in ("prompt", "response", "answer", "row") if n in signature]
    if signature == "**all":
        body = "assert list(all) == ['prompt', 'response', 'answer', 'row']"
    else:
        wanted = {"prompt": "the prompt", "response": "r", "answer": "a", "row": {"k": 1}}
        body = "; ".join(f"assert {n} == {wanted[n]!r}" for n in names) or "pass"
    term = user(tmp_path, f"def f({signature}):\n    {body}\n    return 3\n")
    assert scorer(term).score(request("r", "a", k=1)).score == 3.0


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("2", 2.0),
        ("-0.5", -0.5),
        ("True", 1.0),
        ("np.float32(0.5)", 0.5),
        ("np.array([2])", 2.0),
        ("np.bool_(True)", 1.0),
        ("fractions.Fraction(1, 4)", 0.25),
        ("decimal.Decimal('0.5')", 0.5),
    ],
)
def test_numbers_of_every_kind_are_scores(tmp_path, returned, expected):
    source = f"import decimal, fractions\nimport numpy as np\ndef f():\n    return {returned}\n"
    assert scorer(user(tmp_path, source)).score(request("r")).score == expected


@pytest.mark.parametrize(
    "returned",
    [
        "None",
        "'1.0'",
        "float('nan')",
        "float('inf')",
        "[1.0]",
        "1j",
        "10 ** 400",
        "np.array([1, 2])",
        "np.array(['x'])",
        "np.float64('nan')",
        "{'score': None}",
        "{'acc': 1.0}",
        "f",
    ],
)
def test_what_is_no_finite_number_is_an_error_with_the_sample(tmp_path, returned):
    source = f"import numpy as np\ndef f():\n    return {returned}\n"
    with pytest.raises(RewardError) as caught:
        scorer(user(tmp_path, source)).score(request("r"))
    assert str(caught.value).startswith("sample 0/4/2: reward ")
    assert "expected: a finite number" in str(caught.value)


def test_what_a_user_function_raises_is_not_wrapped(tmp_path):
    with pytest.raises(ZeroDivisionError):
        scorer(user(tmp_path, "def f():\n    return 1 / 0\n")).score(request("r"))


def test_a_parameter_that_is_not_offered_is_found_before_any_sample(tmp_path):
    with pytest.raises(RewardError) as caught:
        scorer(user(tmp_path, "def f(respons):\n    return 1\n"))
    assert "asks for 'respons'" in str(caught.value)
    assert "did you mean 'response'?" in str(caught.value)


def test_a_reward_file_imports_its_neighbours_and_keeps_its_dataclasses(tmp_path):
    (tmp_path / "neighbour_of_reward.py").write_text("SCORE = 4.0\n")
    source = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from neighbour_of_reward import SCORE\n"
        "@dataclass\nclass Box:\n    value: float\n"
        "def f():\n    return Box(SCORE).value\n"
    )
    assert scorer(user(tmp_path, source)).score(request("r")).score == 4.0


@pytest.mark.parametrize(
    ("function", "what"),
    [
        ("rewards.txt:f", "this is not a reference to a function"),
        ("rewards.py", "this is not a reference to a function"),
        ("absent.py:f", "no such reward file"),
        ("rewards.py:g", "has no function 'g'"),
    ],
)
def test_a_function_that_is_not_there_names_the_config_key(tmp_path, monkeypatch, function, what):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text("def f():\n    return 1\n")
    with pytest.raises(RewardError) as caught:
        scorer({"kind": "python", "function": function})
    assert str(caught.value).startswith(("rewards.terms[0].function: ",))
    assert what in str(caught.value)


def test_numpy_scores_cross_as_plain_floats(tmp_path):
    term = user(tmp_path, "import numpy as np\ndef f():\n    return np.float64(1.0)\n")
    result = scorer(term).score(request("r"))
    assert type(result.terms["score"]) is float
    assert not isinstance(result.score, np.floating)


def test_importing_the_plugin_imports_no_tensor_library():
    program = (
        "import sys; import flowrl_backends.verify;"
        "print(sorted({'torch', 'transformers', 'ray', 'pydantic'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert result.stdout.strip() == b"[]"


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("kind", ["gsm8k", "numeric_match"])
def test_the_worked_solutions_of_gsm8k_are_right_answers_to_themselves(split, kind):
    path = Path(__file__).parents[1] / "data" / f"gsm8k_{split}.jsonl"
    solutions = [json.loads(line)["answer"] for line in path.read_text().splitlines()]
    for solution, other in pairwise(solutions):
        assert value({"kind": kind}, solution, solution) == 1
        final = solution.rpartition("#### ")[2]
        if final != other.rpartition("#### ")[2]:
            assert value({"kind": kind}, other, final) == 0
