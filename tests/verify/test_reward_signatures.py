"""Reward functions as other libraries have them: recognised by their parameters, run unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl.backend.protocols import ScoreContext, ScoreRequest
from flowrl.config.reward_signatures import Parameters, signature_of
from flowrl.errors import RewardError
from flowrl.ids import RoleName, SampleId
from flowrl.specs import FinishReason
from flowrl_backends.verify.scorer import Scorer

ROW = {
    "question": "2 + 2?",
    "solution": "4",
    "data_source": "sums",
    "extra_info": {"index": 7},
    "prompt": [{"role": "user", "content": "2 + 2?"}],
}


def scorer(tmp_path: Path, source: str, **options: object) -> Scorer:
    path = tmp_path / "rewards.py"
    path.write_text(source)
    term = {"kind": "python", "function": f"{path}:f", "name": "f", **options}
    return Scorer(ScoreContext(role=RoleName("verifier"), terms=(term,)))


def request(response: str, **row: object) -> ScoreRequest:
    return ScoreRequest(
        sample=SampleId("0/4/2"),
        prompt="the prompt",
        response=response,
        answer="4",
        row={**ROW, **row},
        finish=FinishReason.STOP,
        num_tokens=2,
        tokens=(11, 12),
    )


@pytest.mark.parametrize(
    ("source", "library"),
    [
        ("def f(response, answer): return float(response == answer)", "flowrl"),
        ("async def f(response, answer): return float(response == answer)", "flowrl"),
        (
            "def f(responses, answers): return [r == a for r, a in zip(responses, answers)]",
            "flowrl",
        ),
        (
            "def f(data_source, solution_str, ground_truth, extra_info=None):\n"
            "    assert data_source == 'sums' and extra_info['index'] == 7\n"
            "    return {'score': float(solution_str == ground_truth), 'acc': True}",
            "verl",
        ),
        (
            "def f(data_sources, solution_strs, ground_truths, extra_infos):\n"
            "    return [float(s == t) for s, t in zip(solution_strs, ground_truths)]",
            "verl",
        ),
        (
            "def f(prompts, completions, completion_ids, solution, **kwargs):\n"
            "    assert prompts[0] == kwargs['extra_info'][0] or prompts[0][0]['role'] == 'user'\n"
            "    assert completion_ids == [[11, 12]] * len(completions)\n"
            "    texts = [completion[0]['content'] for completion in completions]\n"
            "    return [float(t == s) for t, s in zip(texts, solution)]",
            "TRL",
        ),
        (
            "async def f(completions, solution, **kwargs):\n"
            "    texts = [completion[0]['content'] for completion in completions]\n"
            "    return [float(t == s) for t, s in zip(texts, solution)]",
            "TRL",
        ),
    ],
)
def test_a_function_of_each_form_runs_for_one_sample_and_for_several(tmp_path, source, library):
    opened = scorer(tmp_path, source)
    assert opened.score(request("4")).score == 1.0
    assert [r.score for r in opened.score_batch([request("5"), request("4")])] == [0.0, 1.0]


def test_completions_of_trl_are_text_where_the_rows_prompt_is_and_as_the_term_says(tmp_path):
    source = "def f(completions, **kwargs): return [float(type(c) is str) for c in completions]"
    assert scorer(tmp_path, source).score(request("4", prompt="2 + 2?")).score == 1.0
    assert scorer(tmp_path, source).score(request("4")).score == 0.0
    assert scorer(tmp_path, source, chat=False).score(request("4")).score == 1.0
    chat = "def f(completions, **kwargs): return [len(c[0]['content']) for c in completions]"
    with pytest.raises(RewardError, match="set chat: true in its term"):
        scorer(tmp_path, chat).score(request("4", prompt="2 + 2?"))
    assert scorer(tmp_path, chat, chat=True).score(request("4", prompt="2 + 2?")).score == 1.0


def test_a_sample_to_which_no_term_applies_is_an_error_and_one_term_may_be_left_out(tmp_path):
    source = "def f(completions, **kwargs): return [None for c in completions]"
    with pytest.raises(RewardError, match="no reward term applies to this sample"):
        scorer(tmp_path, source).score(request("4"))
    path = tmp_path / "rewards.py"
    terms = (
        {"kind": "python", "function": f"{path}:f", "name": "f"},
        {"kind": "exact_match", "name": "accuracy"},
    )
    result = Scorer(ScoreContext(role=RoleName("v"), terms=terms)).score(request("4"))
    assert (result.score, result.terms) == (1.0, {"accuracy": 1.0})


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("def f(completions, solutions, **kwargs): return [1.0]", "did you mean 'solution'?"),
        ("def f(completions, **kwargs): return [1.0, 2.0]", "a list of 1 numbers"),
        ("def f(completions, **kwargs): return 1.0", "a list of 1 numbers"),
        ("def f(completions, **kwargs): return ['1']", "a finite number"),
    ],
)
def test_what_a_function_of_lists_does_wrong_is_reported(tmp_path, source, part):
    with pytest.raises(RewardError) as caught:
        scorer(tmp_path, source).score(request("4"))
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("required", "optional", "library", "batched"),
    [
        ((), (), "flowrl", False),
        (("prompts",), (), "TRL", True),
        (("prompts", "responses"), (), "flowrl", True),
        ((), ("solution_str",), "verl", False),
        (("completions", "answer", "prompt"), (), "TRL", True),
    ],
)
def test_the_form_with_most_of_the_parameters_is_meant(required, optional, library, batched):
    form = signature_of(Parameters(required=required, optional=optional, takes_all=False))
    assert (form.library, form.is_batched) == (library, batched)
