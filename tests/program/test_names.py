"""Names that flowrl lacks are answered with the public ones that were meant."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import flowrl as fl
from flowrl.synonyms import SYNONYMS


def refusal(program) -> fl.TraceError:
    with pytest.raises(fl.TraceError) as caught:
        fl.workflow(program).trace()
    return caught.value


def resolved(dotted: str) -> object:
    """`fl.loss.dpo`, looked up."""
    value: object = fl
    for name in dotted.split(".")[1:]:
        value = getattr(value, name)
    return value


def test_a_name_of_a_paper_is_answered_with_a_public_spelling_and_no_class():
    def program(prompts: fl.Prompts, actor: fl.Policy, reward: fl.Reward):
        rollout = actor.generate(prompts)
        actor.update(rollout, reward.score(rollout), loss=fl.loss.ppo(0.2))

    error = refusal(program)
    assert error.what == "fl.loss has no 'ppo'"
    assert error.hint == "write fl.loss.policy_clip(0.2)"
    assert "PolicyLoss" not in str(error)
    assert "policy_clip" in error.expected


@pytest.mark.parametrize(
    ("module", "name", "hint"),
    [
        ("loss", "tis", "write fl.loss.truncate(2.0), as correction= of a loss"),
        ("loss", "polcy_clip", "did you mean 'policy_clip'?"),
        ("advantage", "grpo", "write fl.advantage.group_relative(scores)"),
        ("advantage", "RLOO", "write fl.advantage.leave_one_out(scores)"),
        ("kl", "low_var_kl", "write fl.kl.k3(...)"),
        ("filter", "dynamic_sampling", "write fl.filter.zero_variance(rollout, scores)"),
        ("select", "pairs", "write fl.select.best_and_worst(rollout, scores)"),
        (
            "select",
            "rejection_sampling",
            "write fl.select.threshold(rollout, scores, at_least=...)",
        ),
        ("shaping", "overlong", "write fl.shaping.soft_overlong(...)"),
        ("grammar", "json", "write fl.grammar.json_schema(...)"),
    ],
)
def test_every_family_knows_what_others_call_its_functions(module, name, hint):
    with pytest.raises(AttributeError) as caught:
        getattr(getattr(fl, module), name)
    assert str(caught.value) == f"fl.{module} has no '{name}': {hint}"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Actor", "write fl.Policy"),
        ("ReferencePolicy", "write fl.Policy"),
        ("reward_fn", "write fl.Reward"),
        ("Polcy", "did you mean 'Policy'?"),
        ("generate", "write actor.generate(prompts), an operation of a role"),
    ],
)
def test_roles_and_operations_are_found_under_the_fields_names(name, hint):
    with pytest.raises(AttributeError, match=re.escape(f"fl has no '{name}': {hint}")):
        getattr(fl, name)


def test_an_annotation_under_another_name_is_answered_at_the_workflow():
    def program(prompts: fl.Prompts, actor: fl.Actor, reward: fl.Reward):
        actor.update(actor.generate(prompts))

    error = refusal(program)
    assert error.found == "AttributeError: fl has no 'Actor': write fl.Policy"


def test_a_file_that_names_what_is_not_there_is_answered_at_its_line(tmp_path: Path):
    file = tmp_path / "wrong.py"
    file.write_text("import flowrl as fl\n\nLOSS = fl.loss.grpo(0.2)\n")
    with pytest.raises(fl.TraceError) as caught:
        fl.load_workflow(str(file))
    assert caught.value.where == f"{file}:3"
    assert "fl.loss has no 'grpo': write fl.loss.policy_clip(0.2)" in caught.value.what


def test_everything_that_is_suggested_is_there():
    missing = []
    for module, others in SYNONYMS.items():
        for text, called in others.items() if module.startswith("fl") else ():
            # A public name needs no other one. (`fl.data` may be there, as a loaded submodule.)
            assert not {*called.split()} & {*resolved(module).__all__}
            for dotted in re.findall(r"\bfl(?:\.\w+)+", text):
                try:
                    resolved(dotted)
                except AttributeError:
                    missing.append(dotted)
    assert missing == []


def test_python_says_so_outside_of_programs_too():
    code = "import flowrl as fl; fl.loss.ppo(0.2)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith("AttributeError: fl.loss has no 'ppo': write fl.loss.policy_clip(0.2)")


def test_probing_for_protocols_costs_no_message():
    with pytest.raises(AttributeError, match="has no attribute '__wrapped__'"):
        fl.loss.__wrapped__  # noqa: B018
