"""The oracle runner, and flowrl's formulas against numbers recorded from other libraries.

A small subset of the numbers lies in the repository; the whole set is read where it is there.
"""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from flowrl.errors import DataError
from tests.proofs.oracles import Case, Failed, NotOffered, Passed, judge, load, run
from tests.proofs.oracles.__main__ import main
from tests.proofs.oracles.runner import ADAPTERS

WHITEN: dict[str, Any] = {
    "family": "advantages",
    "name": "adv_norm__areal__tiny",
    "inputs": {"values": [[1, 3, 9]], "response_mask": [[1, 1, 0]]},
    "options": {"algorithm": "advantage_norm", "ddof": 0, "eps": 0.0},
    "expected": {"advantages": [[-1, 1, 0]]},
    "rtol": 1e-5,
    "atol": 1e-6,
    "compare": "all",
}


def case_of(**changes: Any) -> Case:
    return Case.from_json({**copy.deepcopy(WHITEN), **changes}, None, "here")


CLIPPED: dict[str, Any] = {
    "family": "policy_losses",
    "name": "decoupled__areal__tiny",
    "inputs": {
        "log_probs": [[-1.0, -1.0]],
        "old_log_probs": [[-2.0, -3.0]],
        "rollout_log_probs": [[-2.0, -2.0]],
        "advantages": [[-1.0, -1.0]],
        "response_mask": [[1, 1]],
    },
    "options": {
        "peer_options": {
            "eps_clip": 0.2,
            "c_clip": 2.0,
            "rejection": {"level": "token", "action": "mask", "metric": "kl_k2", "upper": 0.1},
        }
    },
    "expected": {"loss": 1.0, "metrics": {"dual_clip_frac": 0.5}},
    "rtol": 1e-9,
    "atol": 0.0,
    "compare": "all",
}
"""The dual clip acts at both tokens: exp(1) and exp(2) are above 2. The second one is masked."""

ONE_SIDED: dict[str, Any] = {
    **CLIPPED,
    "name": "decoupled_kl3__areal__tiny",
    "inputs": {
        "log_probs": [[-1.0, -1.0]],
        "old_log_probs": [[-1.0, -2.0]],
        "rollout_log_probs": [[-2.0, -1.0]],
        "advantages": [[-1.0, -1.0]],
        "response_mask": [[1, 1]],
    },
    "options": {
        "peer_options": {
            "eps_clip": 0.2,
            "rejection": {"level": "token", "action": "mask", "metric": "kl_k3", "upper": 0.5},
        }
    },
    "expected": {"loss": 0.5 * math.e, "metrics": {"clip_frac": 0.0}},
}
"""exp(b - p) - 1 - (b - p) is 1/e at the first token, whose weight is e, and e - 2 at the other."""

JUDGED_SAMPLES: dict[str, Any] = {
    **CLIPPED,
    "name": "decoupled_seq_kl1__areal__tiny",
    "inputs": {
        "log_probs": [[-1.0, -1.0], [-2.0, -1.0]],
        "old_log_probs": [[-1.0, -1.0], [-2.0, -1.0]],
        "rollout_log_probs": [[-2.0, -1.0], [-1.0, -1.0]],
        "advantages": [[-1.0, -1.0], [-1.0, -1.0]],
        "response_mask": [[1, 1], [1, 1]],
    },
    "options": {
        "peer_options": {
            "eps_clip": 0.2,
            "rejection": {
                "level": "sequence",
                "action": "mask",
                "metric": "kl_k1",
                "agg": "mean",
                "upper": 1.0,
                "lower": -0.2,
            },
        }
    },
    "expected": {"loss": (math.e + 1) / 4, "metrics": {"clip_frac": 0.0}},
}
"""The means of p - b are 1/2 and -1/2; the tokens of the first sample weigh e and 1."""

WHOLE_SAMPLES: dict[str, Any] = {
    **CLIPPED,
    "name": "gspo__trl__tiny",
    "inputs": {
        "log_probs": [[-1.0, -1.0, -1.0], [-1.0, 0.0, 0.0], [0.0, 0.0, 0.0]],
        "old_log_probs": [[-2.0, -2.0, -2.0], [-1.0, 0.0, 0.0], [0.0, 0.0, 0.0]],
        "advantages": [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [1.0, 1.0, 1.0]],
        "response_mask": [[1, 1, 1], [1, 0, 0], [0, 0, 0]],
    },
    "options": {
        "peer_options": {
            "loss_type": "grpo",
            "epsilon_low": 0.2,
            "epsilon_high": 0.2,
            "importance_sampling_level": "sequence",
        }
    },
    "expected": {
        "loss": -2.2 / 3,
        "metrics": {"clip_ratio/high_mean": 1 / 3, "clip_ratio/low_mean": 0.0},
    },
}
"""Of four tokens three are clipped, and of three samples, one of which is empty, one is."""

REGULARISED: dict[str, Any] = {
    "family": "policy_losses",
    "name": "kl__nemo__tiny",
    "inputs": {
        "log_probs": [[-1.0, -1.0], [-1.0, -1.0]],
        "old_log_probs": [[-1.0, -1.0], [-1.0, -1.0]],
        "rollout_log_probs": [[-1.0, -1.0], [-1.0, -1.0]],
        "ref_log_probs": [[-2.0, -9.0], [-4.0, -6.0]],
        "advantages": [[0.0, 0.0], [0.0, 0.0]],
        "response_mask": [[1, 0], [1, 1]],
        "sample_mask": [1, 1],
    },
    "options": {
        "peer_options": {
            "token_level_loss": False,
            "ratio_clip_min": 0.2,
            "ratio_clip_max": 0.2,
            "reference_policy_kl_penalty": 0.1,
            "reference_policy_kl_type": "k1",
        }
    },
    "expected": {"loss": 0.25, "metrics": {"kl_penalty": 2.5}},
    "rtol": 1e-9,
    "atol": 0.0,
    "compare": "all",
}
"""k1 is 1, and 3 and 5: means of samples are 1 and 4."""


def written(folder: Path, *cases: dict[str, Any], family: str | None = "advantages") -> Path:
    path = folder / "cases.json"
    path.write_text(json.dumps({"family": family, "cases": list(cases)}))
    return path


@pytest.mark.parametrize("family", ADAPTERS)
def test_formulas_equal_the_recorded_numbers_in_the_repository(
    family: str, repository: Path
) -> None:
    cases = load([repository / "tests/data/oracles_small.json"])
    chosen = [case for case in cases if case.family == family]
    tally = run(chosen)[family]
    assert tally.failed == []
    assert tally.passed >= 0.9 * len(chosen) > 0


def test_the_numbers_in_the_repository_name_their_source(repository: Path) -> None:
    for case in load([repository / "tests/data/oracles_small.json"]):
        assert isinstance(case, Case)
        assert {"repo", "commit", "file", "function"} <= set(case.source), case.name


def test_all_recorded_numbers_are_met_or_refused_with_a_reason(reference_data: Path) -> None:
    tallies = run(load([reference_data / "oracles"]))
    assert {name: tally.failed for name, tally in tallies.items() if tally.failed} == {}
    passed = sum(tally.passed for tally in tallies.values())
    refused = sum(len(tally.not_offered) for tally in tallies.values())
    assert passed > 600
    assert refused < 0.1 * (passed + refused)


def test_a_number_within_the_tolerance_passes_and_one_beyond_it_fails() -> None:
    near = {"advantages": [[-1.00001, 1, 0]]}
    assert judge(case_of(expected=near)) == Passed()
    verdict = judge(case_of(expected={"advantages": [[-1.1, 1, 0]]}))
    assert isinstance(verdict, Failed)
    assert verdict.reason == "advantages[0][0]: got -1, want -1.1 (1 of 3 differ)"


def test_padding_is_compared_only_where_the_case_says_all() -> None:
    garbage = {"advantages": [[-1, 1, 77]]}
    assert isinstance(judge(case_of(expected=garbage)), Failed)
    assert judge(case_of(expected=garbage, compare="response_mask")) == Passed()


def test_a_result_that_is_missing_or_of_another_shape_fails() -> None:
    missing = judge(case_of(expected={"advantages": [[-1, 1, 0]], "loss": 0.0}))
    assert missing == Failed("no result loss")
    shaped = judge(case_of(expected={"advantages": [-1, 1, 0]}))
    assert shaped == Failed("advantages: got shape (1, 3), want (3,)")


def test_an_adapter_that_raises_is_a_failed_case() -> None:
    verdict = judge(case_of(inputs={"values": [[1, 3, 9]]}))
    assert verdict == Failed("KeyError: 'response_mask'")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"family": "cooking"}, "there is no family 'cooking' here"),
        ({"options": {"algorithm": "unheard of"}}, "the algorithm 'unheard of'"),
        ({"options": {"algorithm": "gae", "masking": "wrap"}}, "the masking 'wrap'"),
        ({"options": {"algorithm": "reward_norm", "mean": "median"}}, "the mean 'median'"),
        ({"family": "kl_estimators", "options": {"kl_type": "k9"}}, "the kl_type 'k9'"),
        ({"family": "kl_estimators", "options": {}}, "the kl_type None"),
        ({"family": "policy_losses", "name": "gspo__tool__P1"}, "the library 'tool'"),
        (
            {"family": "policy_losses", "name": "x__verl__P1", "options": {"loss": "hyper"}},
            "the loss 'hyper' of verl",
        ),
    ],
)
def test_a_convention_that_nobody_here_knows_is_not_offered(
    changes: dict[str, Any], reason: str
) -> None:
    inputs = {**CLIPPED["inputs"], "values": [[1.0, 3.0]], "rewards": [0.0]}
    inputs |= {"ref_log_probs": [[0.0, 0.0]], "group_ids": [0]}
    verdict = judge(case_of(**{"inputs": inputs, **changes}))
    assert isinstance(verdict, NotOffered)
    assert verdict.reason.startswith(reason)


def test_an_unknown_option_excuses_a_difference_and_a_known_one_does_not() -> None:
    strange = {**WHITEN["options"], "peer_options": {"sharpen": True}}
    wrong = {"advantages": [[-2, 2, 0]]}
    assert judge(case_of(options=strange)) == Passed()
    verdict = judge(case_of(options=strange, expected=wrong))
    assert verdict == NotOffered("options not known here: sharpen")
    described = {**WHITEN["options"], "whiten": True}
    assert isinstance(judge(case_of(options=described, expected=wrong)), Failed)


@pytest.mark.parametrize(
    "case",
    [CLIPPED, ONE_SIDED, JUDGED_SAMPLES, WHOLE_SAMPLES, REGULARISED],
    ids=["areal", "areal-kl", "areal-samples", "trl", "nemo"],
)
def test_metrics_count_what_the_library_counts(case: dict[str, Any]) -> None:
    assert judge(Case.from_json(case, None, "here")) == Passed()


def test_a_library_that_returned_no_number_where_flowrl_has_one_is_not_a_pass() -> None:
    verdict = judge(case_of(expected={"advantages": [[None, 1, 0]]}))
    assert isinstance(verdict, NotOffered)
    # Nor is it a failure, but another number in the same case that differs is one.
    assert isinstance(judge(case_of(expected={"advantages": [[None, 2, 0]]})), Failed)
    # A value that was not recorded at all is skipped.
    assert judge(case_of(expected={"advantages": [[-1, 1, 0]], "loss": None})) == Passed()
    assert isinstance(judge(case_of(expected={"advantages": None})), NotOffered)


def test_scores_of_functions_are_exact_and_one_that_raises_must_raise() -> None:
    row = {
        "family": "math_verification",
        "name": "row",
        "inputs": {"response": "Answer: 42", "ground_truth": "42"},
        "options": {"intended_correct": True},
        "expected": {"verl_math_dapo": 1.0, "nemo_dapo": 1.0, "of_nobody": 3.0},
        "rtol": 0.0,
        "atol": 0.0,
        "compare": "exact_per_function",
    }
    assert judge(Case.from_json(row, None, "here")) == Passed()
    for name, score in (("nemo_dapo", 0.0), ("slime_math_dapo", "!ValueError")):
        changed = {**row, "expected": {name: score}}
        verdict = judge(Case.from_json(changed, None, "here"))
        assert verdict == Failed(f"{name}: got 1.0, want {score}")
    wrong = {**row, "options": {"intended_correct": False}}
    assert isinstance(judge(Case.from_json(wrong, None, "here")), Failed)


def test_the_command_ends_with_the_counts_and_fails_exactly_when_a_case_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(written(tmp_path, WHITEN))]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "advantages: 1 passed, 0 failed, 0 not offered",
        "1 passed, 0 failed, 0 not offered",
    ]
    wrong = {**WHITEN, "name": "wrong", "expected": {"advantages": [[0, 0, 0]]}}
    written(tmp_path, WHITEN, wrong)
    assert main([str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("failed: advantages: wrong: advantages[0][0]: got -1, want 0")
    assert lines[-1] == "1 passed, 1 failed, 0 not offered"


def test_families_without_an_adapter_yet_are_named_and_not_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    balance = {**WHITEN, "family": "seq_balancing", "compare": "upper_bound"}
    assert main([str(written(tmp_path, balance))]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "seq_balancing: later (1 cases)",
        "0 passed, 0 failed, 0 not offered",
    ]


def test_a_path_without_files_is_an_error_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "absent.json")]) == 2
    assert "absent.json" in capsys.readouterr().err
    with pytest.raises(DataError, match="holds no oracle files"):
        load([tmp_path])


def test_what_cannot_be_read_fails_and_the_rest_is_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd: list[Any] = [{"name": "x"}, "no case", {**WHITEN, "compare": "by eye"}]
    odd += [{**WHITEN, "inputs": None}, {**WHITEN, "rtol": "small"}]
    (tmp_path / "broken.json").write_text('{"family": "advantages", ')
    written(tmp_path, WHITEN, *odd)
    assert main([str(tmp_path)]) == 1
    *_, advantages, counts = capsys.readouterr().out.splitlines()
    assert counts == "1 passed, 6 failed, 0 not offered"
    assert advantages == "advantages: 1 passed, 5 failed, 0 not offered"


def test_a_file_without_cases_is_left_out_of_a_folder_and_fails_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, WHITEN)
    other = tmp_path / "list.json"
    other.write_text("[]")
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 passed, 0 failed, 0 not offered"
    assert main([str(other)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "0 passed, 1 failed, 0 not offered"
