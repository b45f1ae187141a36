"""Rewards, environments and trackers of packages of their own are found by their names."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl.backend.protocols import FinishReason, ScoreContext, ScoreRequest
from flowrl.cli import plugin as command
from flowrl.config.check import check_config
from flowrl.config.load import LoadedConfig, load_config
from flowrl.errors import ConfigError
from flowrl.ids import RoleName, SampleId
from flowrl_backends.verify import plugin

MODULE = """
from typing import Literal

from flowrl.config.rewards import Term


class Brevity(Term):
    kind: Literal["brevity"]
    name: str = "brevity"
    limit: int = 10

    def open(self):
        return lambda request: max(0.0, 1 - request.num_tokens / self.limit)


class Misnamed(Term):
    kind: Literal["another"]


class Coin:
    def reset(self, row): return ""
    def step(self, text): ...


def open_tracker(context): ...
"""

ENTRY_POINTS = """
[flowrl.rewards]
brevity = added_kinds:Brevity
misnamed = added_kinds:Misnamed
absent = no_such_module:Term
numeric_match = added_kinds:Brevity

[flowrl.environments]
coin = added_kinds:Coin

[flowrl.trackers]
board = added_kinds:open_tracker
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with additions of each kind."""
    (tmp_path / "added_kinds.py").write_text(MODULE)
    folder = tmp_path / "added-2.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: added\nVersion: 2.0\n")
    (folder / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)


def loaded(*overrides: str) -> LoadedConfig:
    return load_config(Path("configs/quickstart.yaml"), list(overrides))


def test_a_reward_kind_of_a_package_is_read_written_and_scored():
    config = loaded("rewards.terms=[{use: exact_match}, {use: brevity, limit: 20}]").config
    written = config.model_dump(mode="json")
    assert type(config).model_validate(written) == config
    assert written["rewards"]["terms"][1]["limit"] == 20
    terms = tuple(written["rewards"]["terms"])
    opened = plugin.open_score(ScoreContext(role=RoleName("v"), terms=terms))
    request = ScoreRequest(
        sample=SampleId("0/0/0"),
        prompt="",
        response="a",
        answer="b",
        row={},
        finish=FinishReason.STOP,
        num_tokens=5,
    )
    assert opened.score(request).terms == {"accuracy": 0.0, "brevity": 0.75}


def test_an_item_of_a_list_of_terms_goes_by_the_name_that_its_kind_has():
    terms = "rewards.terms=[{use: brevity}]"
    (term,) = loaded(terms, "rewards.terms.brevity.limit=30").config.rewards.terms
    assert term.limit == 30  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("term", "message"),
    [
        ("{use: brevity, limit: x}", r"limit must be a whole number\n"),
        ("{use: brevity, limt: 3}", r"unknown key 'limt'.*\n.*limit, name, (.|\n)*mean 'limit'"),
        ("{use: brevty}", r"has no kind 'brevty'\n(.|\n)*did you mean 'brevity'"),
        ("{use: absent}", r"'absent' cannot be imported\n.*added 2\.0: ModuleNotFoundError"),
        ("{use: misnamed}", r"'misnamed' is no reward kind\n.*added 2\.0: added_kinds:Misnamed"),
        (
            "{use: numeric_match}",
            r"two reward kinds are called 'numeric_match'\n"
            r".*flowrl's own, and added_kinds:Brevity of added 2\.0\n",
        ),
    ],
)
def test_a_mistake_in_the_term_of_a_package_is_told_with_its_line(term: str, message: str):
    with pytest.raises(ConfigError, match=rf"command line \(rewards.terms=.*{message}"):
        loaded(f"rewards.terms=[{term}]")


def test_an_environment_of_a_package_is_found_by_its_name():
    roles = "roles.game={backend: environment, environment: %s}"
    game = loaded(roles % "coin").config.roles["game"]
    assert game.environment == "added_kinds:Coin"
    with pytest.raises(ConfigError, match=r"environment must be FILE\.py:NAME") as caught:
        check_config(loaded(roles % "cion"))
    assert caught.value.expected == "FILE.py:NAME, or one of coin"
    assert str(caught.value.where).startswith("command line (roles.game=")


def test_a_tracker_that_no_package_has_is_told_before_a_run_begins():
    check_config(loaded("tracking.to=[board]"))
    with pytest.raises(ConfigError, match="no tracker is called 'bored'") as caught:
        check_config(loaded("tracking.to=[bored]"))
    assert caught.value.where == "command line (tracking.to=[bored])"
    assert caught.value.hint == "did you mean 'board'?"
    check_config(loaded("tracking.to=[bored]"), other_machines=True)


def test_the_list_has_all_additions_and_what_is_wrong_with_them(
    capsys: pytest.CaptureFixture[str],
):
    command.run_list(as_json=False)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in (
        "reward brevity added 2.0",
        "environment coin added 2.0",
        "tracker board added 2.0",
    ):
        assert line in lines
    assert any(line.startswith("reward gsm8k flowrl") for line in lines)
    broken = lines[lines.index("reward absent added 2.0") + 1]
    assert broken.startswith("unusable: 'absent' cannot be imported: ModuleNotFoundError")
