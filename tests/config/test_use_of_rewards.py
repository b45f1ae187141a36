"""`use` of a reward term: a rule's name, or a function of the user's; `kind` means the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl.config.check import check_config
from flowrl.config.load import LoadedConfig, load_config
from flowrl.config.rewards import Gsm8kMatch, PythonReward
from flowrl.errors import ConfigError

BASE = {"stages": ["grpo"], "data": {"train": "rows.jsonl"}}


def loaded(*terms: str, **overrides: str) -> LoadedConfig:
    return load_config(
        None, [f"rewards.terms=[{', '.join(terms)}]", *overrides.values()], base=BASE
    )


def test_use_names_a_rule_or_a_function_which_names_its_term():
    config = loaded("{use: gsm8k, flexible: true}", "{use: 'mine.py:close', timeout_s: 2}").config
    rule, function = config.rewards.terms
    assert isinstance(rule, Gsm8kMatch)
    assert rule.flexible
    assert isinstance(function, PythonReward)
    assert (function.name, function.function, function.timeout_s) == ("close", "mine.py:close", 2.0)
    written = "{kind: python, function: 'mine.py:close', name: close, timeout_s: 2}"
    assert loaded(written).config.rewards.terms == (function,)


def test_an_override_finds_a_term_by_the_name_of_its_function():
    config = loaded("{use: 'mine.py:close'}", later="rewards.terms.close.weight=3").config
    assert config.rewards.terms[0].weight == 3.0  # type: ignore[union-attr]
    changed = loaded("{use: 'mine.py:close'}", later="rewards.terms.0.use=gsm8k").config
    assert isinstance(changed.rewards.terms[0], Gsm8kMatch)


@pytest.mark.parametrize(
    ("term", "part"),
    [
        ("{use: gsm9k}", "did you mean 'gsm8k'?"),
        ("{use: gsm9k}", "; {use: FILE.py:NAME} takes a function of yours"),
        ("{weight: 2}", "...}; {use: FILE.py:NAME} takes a function of yours"),
        ("{use: verl_math_dap}", "did you mean 'verl_math_dapo'?"),
        ("{use: gsm8k, tolerance: 1}", "tolerance"),
        ("{use: 'mine.py:close', timeout_s: 0}", "timeout_s"),
    ],
)
def test_what_use_cannot_name_is_refused_with_what_it_can(term, part):
    with pytest.raises(ConfigError) as caught:
        loaded(term)
    assert part in str(caught.value)


def test_a_missing_function_is_reported_at_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def closed(response): return 1\n")
    with pytest.raises(ConfigError) as caught:
        check_config(loaded("{use: 'mine.py:close'}"))
    assert "mine.py has no function 'close'" in str(caught.value)
    assert "rewards.terms=" in str(caught.value)
