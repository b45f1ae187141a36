"""Every mistake that a user can make ends with exit code 2 and says what, where and what to do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml

from flowrl.cli import main
from tests.cli.in_one_process import Ended, run_all
from tests.runtime.tiny_runs import tiny_config, write_config

HEAD = """\
import flowrl as fl

@fl.workflow
def mine(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
    rollout = actor.generate(prompts)
    scores = verifier.score(rollout)
"""
"""The next line is the seventh."""

PROGRAMS = {
    "condition": "    if scores:\n        actor.update(rollout, scores)\n",
    "comparison": "    if scores > 0.5:\n        actor.update(rollout, scores)\n",
    "number": "    best = float(scores)\n    actor.update(rollout, scores)\n",
    "arithmetic": "    actor.update(rollout, scores * 2)\n",
    "loop": "    for score in scores:\n        pass\n    actor.update(rollout, scores)\n",
    "field": "    actor.update(rollout, scores.rewards)\n",
    "handle": "    actor.update(rollout, advantages=prompts)\n",
    "idle": "    fl.advantage.group_relative(scores)\n",
}

BIG = ["roles.actor.model.hidden_size=65536", "roles.actor.model.num_layers=80"]

# Command lines by name, with what the message must hold; `tiny.yaml` is a config that is right.
STATIC: dict[str, tuple[list[str], list[str]]] = {
    "unknown key": (
        ["run", "tiny.yaml", "train.stepz=3"],
        ["train.stepz=3", "unknown key 'stepz'", "did you mean 'steps'?"],
    ),
    "unknown key in the file": (
        ["run", "unknown.yaml"],
        ["unknown.yaml:2", "unknown key 'sede'", "did you mean 'seed'?"],
    ),
    "unknown section": (["run", "tiny.yaml", "trian.steps=3"], ["'trian'", "'train'"]),
    "wrong type": (
        ["run", "tiny.yaml", "train.steps=many"],
        ["train.steps=many", "whole number", "'many'"],
    ),
    "wrong type in the file": (["run", "type.yaml"], ["type.yaml:2", "number", "true"]),
    "no YAML": (["run", "broken.yaml"], ["broken.yaml:2: not YAML"]),
    "missing config": (["run", "tini.yaml"], ["tini.yaml", "did you mean tiny.yaml?"]),
    "no config": (["run"], ["needs a config file", "--resume RUN"]),
    "override for a config": (["run", "train.steps=3"], ["needs a config file", "train.steps=3"]),
    "no override": (["run", "tiny.yaml", "train.steps"], ["'train.steps'", "key=value"]),
    "missing data": (
        ["run", "tiny.yaml", "data.train=nothing.jsonl"],
        ["data.train=nothing.jsonl", "no such data file"],
    ),
    "missing workflow file": (
        ["run", "tiny.yaml", "workflow=nothing.py"],
        ["no such workflow file: nothing.py"],
    ),
    "missing workflow": (["run", "tiny.yaml", "workflow=grop"], ["'grop'", "'grpo'"]),
    "missing graph file": (["graph", "nothing.py"], ["no file nothing.py"]),
    "missing cluster": (["plan", "tiny.yaml", "cluster=no.yaml"], ["no such cluster file"]),
    "missing model folder": (
        ["run", "tiny.yaml", "roles.actor.model=models/none"],
        ["roles.actor.model=models/none", "no such model folder: models/none"],
    ),
    "no model in the folder": (
        ["run", "tiny.yaml", "roles.actor.model=empty"],
        ["the folder empty holds no config.json"],
    ),
    "missing backend": (
        ["run", "tiny.yaml", "roles.actor.backend=torhc"],
        ["roles.actor.backend=torhc", "'torhc'", "did you mean 'torch'?"],
    ),
    "missing role": (
        ["run", "tiny.yaml", "workflow=role.py"],
        ["role.py:6", "a role 'judge'", "roles.judge.backend"],
    ),
    "sizes that do not divide": (
        ["run", "tiny.yaml", "train.prompts_per_step=30", "train.mini_batches=4"],
        ["train.prompts_per_step=30", "train.mini_batches=4", "28 or 32", "3 or 5"],
    ),
    "stop that nothing measures": (
        ["run", "tiny.yaml", "stop={metric: digits, at_least: 0.5}"],
        ["'digits'", "did you mean 'digit'?"],
    ),
    "too little memory": (
        ["run", "tiny.yaml", *BIG],
        ["does not fit on", "TiB", "parameters", "optimizer"],
    ),
    "too little memory on a described machine": (
        ["plan", "large.yaml", "cluster=cluster.yaml"],
        ["card", "GiB", "parameters"],
    ),
    "resume of nothing": (["run", "--resume", "runs/none"], ["runs/none", "no run folder"]),
    "changes of nothing": (["run", "tiny.yaml", "--accept-changes"], ["--resume RUN"]),
    "resume of another folder": (["run", "--resume", "empty"], ["empty", "no run folder"]),
    "output folder": (["graph", "grpo", "-o", "no/graph.txt"], ["--output", "no folder no"]),
    "output form": (["plan", "tiny.yaml", "-o", "plan.txt"], ["plan.txt", ".json or .yaml"]),
    "graph form": (["graph", "grpo", "--format", "picture"], ["picture", "tree"]),
    "unknown pass to look at": (
        ["graph", "grpo", "--print-after", "insert_sync"],
        ["--print-after: no pass is called 'insert_sync'", "did you mean 'insert_weight_sync'?"],
    ),
    "unknown pass to leave out": (
        ["graph", "grpo", "--disable-pass", "fill_default"],
        ["--disable-pass: no pass is called 'fill_default'", "did you mean 'fill_defaults'?"],
    ),
    "after a pass as JSON": (
        ["graph", "grpo", "--print-after", "fill_defaults", "--json"],
        ["--print-after gives text, and no json"],
    ),
    "graph overrides": (["graph", "grpo", "seed=3"], ["CONFIG.yaml workflow=grpo seed=3"]),
    "handle as a condition": (["graph", "condition.py"], ["condition.py:7", "fl.filter"]),
    "handle in a comparison": (["graph", "comparison.py"], ["comparison.py:7", "fl.filter"]),
    "handle as a number": (["run", "tiny.yaml", "workflow=number.py"], ["number.py:7", "number"]),
    "handle in arithmetic": (["graph", "arithmetic.py"], ["arithmetic.py:7", "arithmetic"]),
    "handle in a loop": (["graph", "loop.py"], ["loop.py:7"]),
    "missing field": (["graph", "field.py"], ["field.py:7", "'rewards'", "fields"]),
    "wrong handle": (["graph", "handle.py"], ["handle.py:7", "advantages", "fl.Advantages"]),
    "no update": (["graph", "idle.py"], ["idle.py:7", "nothing uses what advantage makes"]),
}


def write_files(folder: Path) -> None:
    write_config(folder, args={})
    (folder / "unknown.yaml").write_text("extends: tiny.yaml\nsede: 3\n")
    (folder / "type.yaml").write_text("extends: tiny.yaml\nseed: true\n")
    (folder / "broken.yaml").write_text("seed: [1\n")
    large = {"hidden_size": 4096, "num_layers": 32, "num_heads": 32, "intermediate_size": 16384}
    (folder / "large.yaml").write_text(
        yaml.safe_dump({"extends": "tiny.yaml", "roles": {"actor": {"model": large}}})
    )
    (folder / "cluster.yaml").write_text(
        dedent(
            """\
            nodes:
              - name: here
                memory_gib: 16
                cores: 8
                devices: [{type: cuda, name: card, memory_gib: 16}]
            """
        )
    )
    (folder / "empty").mkdir()
    for name, body in PROGRAMS.items():
        (folder / f"{name}.py").write_text(HEAD + body)
    judged = HEAD.replace("verifier", "judge") + "    actor.update(rollout, scores)\n"
    (folder / "role.py").write_text(judged)


@pytest.fixture(scope="module")
def static(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    folder = tmp_path_factory.mktemp("mistakes")
    write_files(folder)
    return run_all({name: argv for name, (argv, _) in STATIC.items()}, folder)


@pytest.mark.parametrize("name", STATIC)
def test_a_static_mistake_is_told_before_torch_is_imported(static: dict[str, Ended], name: str):
    ended = static[name]
    assert ended.code == 2, ended.err
    assert ended.out == ""
    assert 1 <= len(ended.error_lines) <= 4, ended.err
    assert ended.err.startswith("error: ")
    for part in STATIC[name][1]:
        assert part in ended.err
    assert not ended.heavy


RAISING = """\
import flowrl as fl

def share(number):
    return 1 / number

@fl.workflow
def mine(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward):
    rollout = actor.generate(prompts)
    scores = verifier.score(rollout)
    share(0)
    actor.update(rollout, scores)
"""


def test_a_workflow_file_that_raises_names_the_users_own_lines_and_no_traceback(tmp_path: Path):
    write_config(tmp_path, args={})
    (tmp_path / "raises.py").write_text(RAISING)
    (tmp_path / "imports.py").write_text("import flowrl as fl\nimport no_such_module\n")
    (tmp_path / "syntax.py").write_text("import flowrl as fl\ndef mine(:\n")
    ended = run_all(
        {
            "raises": ["run", "tiny.yaml", "workflow=raises.py"],
            "imports": ["graph", "imports.py"],
            "syntax": ["graph", "syntax.py"],
        },
        tmp_path,
    )
    assert {result.code for result in ended.values()} == {2}
    for result in ended.values():
        assert "Traceback" not in result.err
        assert result.err.startswith("error: ")
        assert result.error_lines[-1].startswith("  to fix: ")
        assert len(result.error_lines) == 3
    assert ended["raises"].error_lines[0] == (
        "error: raises.py:4: workflow 'mine' raised ZeroDivisionError: division by zero"
    )
    assert "`return 1 / number`, called from raises.py:10 (in mine)" in ended["raises"].err
    assert ended["imports"].err.startswith("error: imports.py:2: importing imports.py raised Mod")
    assert "No module named 'no_such_module'" in ended["imports"].err
    assert (
        "syntax.py:2: importing syntax.py raised SyntaxError: invalid syntax" in ended["syntax"].err
    )
    assert "found: def mine(:" in ended["syntax"].err


# Mistakes that only data and rewards show

REWARDS = """\
import time

def raises(response):
    return {"known": 1.0}[response]

def hangs(response):
    while True:
        time.sleep(0.01)

def nan(response):
    return float("nan")

def picky(response):
    if response.startswith("1"):
        raise ValueError("no ones")
    return float(response[:1].isdigit())
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config of one stage and rewards that misbehave; the working folder."""
    config: dict[str, Any] = tiny_config(tmp_path / "runs")
    config |= {"stages": ["grpo"], "stage": {}, "args": {}}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def python_reward(name: str) -> str:
    return f"rewards.terms=[{{kind: python, name: digit, function: 'rewards.py:{name}'}}]"


def flowrl(capfd: pytest.CaptureFixture[str], *argv: str) -> Ended:
    with pytest.raises(SystemExit) as end:
        main(list(argv))
    out, err = capfd.readouterr()
    assert isinstance(end.value.code, int)
    return Ended(code=end.value.code, out=out, err=err)


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ("raises", r"raised KeyError: .*\(rewards\.py:4 in raises\)"),
        ("hangs", r"took longer than rewards\.timeout_s=0\.2 s \(rewards\.py:8 in hangs\)"),
        ("nan", r"gave no score: .*nan"),
    ],
)
def test_a_reward_that_fails_stops_the_run_and_names_the_sample(
    mine: Path, capfd: pytest.CaptureFixture[str], reward: str, said: str
):
    ended = flowrl(capfd, "run", "tiny.yaml", python_reward(reward), "rewards.timeout_s=0.2")
    assert ended.code == 2
    assert len(ended.error_lines) <= 4
    # It fails in the evaluation before the first step, whose samples `flowrl why` does not know.
    where = r"evaluation at step 0 of grpo, sample 0/\d+/0"
    assert re.match(rf"error: {where}: the reward of this sample {said}", ended.err)
    assert re.search(r"prompt '\d\d\+\d\d=', response '", ended.err)
    assert "rewards.max_failures" in ended.err
    assert not (mine / "runs" / "tiny" / "summary.json").exists()
    asked = flowrl(capfd, "why", "runs/tiny", "0/0/0")
    assert asked.code == 2
    assert "evaluations keep none" in asked.err


def test_a_reward_that_is_not_in_its_file_is_missed_before_torch_is_imported(mine: Path):
    command = ["run", "tiny.yaml", python_reward("nothing")]
    ended = run_all({"missing": command}, mine)["missing"]
    assert ended.code == 2
    assert "rewards.py has no function 'nothing'" in ended.err
    assert not ended.heavy


def test_a_run_that_a_reward_stopped_goes_on_once_it_is_mended(
    mine: Path, capfd: pytest.CaptureFixture[str]
):
    stopped = flowrl(capfd, "run", "tiny.yaml", python_reward("picky"), "data.eval=null")
    assert stopped.code == 2
    assert "go on with: flowrl run --resume" in stopped.out
    (mine / "rewards.py").write_text(REWARDS.replace('raise ValueError("no ones")', "return 0.5"))
    refused = flowrl(capfd, "run", "--resume", "runs/tiny")
    assert refused.code == 2
    assert "rewards.py was" in refused.err
    assert "--accept-changes" in refused.err
    resumed = flowrl(capfd, "run", "--resume", "runs/tiny", "--accept-changes")
    assert resumed.code == 0, resumed.err
    assert resumed.out.splitlines()[-1] == "held-out digit: not measured"


def test_failed_rewards_up_to_the_limit_are_dropped_and_the_run_goes_on(
    mine: Path, capfd: pytest.CaptureFixture[str]
):
    ended = flowrl(capfd, "run", "tiny.yaml", python_reward("picky"), "rewards.max_failures=1000")
    assert ended.code == 0, ended.err
    log = (mine / "runs/tiny/samples.jsonl").read_text()
    rows = [json.loads(line) for line in log.splitlines()]
    failed = [row for row in rows if row["response"].startswith("1")]
    assert failed
    assert {(row["end"], row["score"]) for row in failed} == {("dropped", None)}
    # Of two in a group, the one that is scored later is gone with the group already.
    reasons: dict[str, list[str]] = {}
    for row in failed:
        group, _, _ = row["sample"].rpartition("/")
        reasons.setdefault(group, []).append(row["reason"])
    assert all(any("no ones" in one for one in told) for told in reasons.values())
    others = {one for told in reasons.values() for one in told if "no ones" not in one}
    assert others <= {"incomplete_group"}
    # Whoever was in a group with one of them is not trained on either: groups are whole or gone.
    assert len(rows) == 4 * 8 * 4
    summary = json.loads((mine / "runs/tiny/summary.json").read_text())
    assert summary["samples"]["dropped"] == sum(row["end"] == "dropped" for row in rows)


def test_the_limit_of_failed_rewards_holds_over_the_whole_run(
    mine: Path, capfd: pytest.CaptureFixture[str]
):
    ended = flowrl(capfd, "run", "tiny.yaml", python_reward("nan"), "rewards.max_failures=3")
    assert ended.code == 2
    assert "at most 3 failed rewards" in ended.err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "12+13="', "rows.jsonl:2: not JSON"),
        ('{"answer": "12"}', "rows.jsonl:2: the row has no field 'prompt'"),
        ('{"prompt": "12x13=", "answer": "1"}', "rows.jsonl:2: the text has characters that"),
    ],
)
def test_an_unreadable_row_is_named_by_file_and_line(
    mine: Path, capfd: pytest.CaptureFixture[str], line: str, said: str
):
    good = '{"prompt": "10+10=", "answer": "020"}'
    (mine / "rows.jsonl").write_text(f"{good}\n{line}\n{good}\n")
    ended = flowrl(capfd, "run", "tiny.yaml", "data.train=rows.jsonl")
    assert ended.code == 2
    assert said in ended.err
    assert len(ended.error_lines) <= 4
    assert not (mine / "runs").exists()


def test_a_reward_file_that_cannot_be_run_is_told_before_there_is_a_run_folder(
    mine: Path, capfd: pytest.CaptureFixture[str]
):
    (mine / "rewards.py").write_text("import nothing_of_that_name\n\ndef half(row): return 0.5\n")
    ended = flowrl(capfd, "run", "tiny.yaml", python_reward("half"))
    assert ended.code == 2
    assert "rewards.py:1 in <module>: the reward cannot be loaded" in ended.err
    assert "No module named 'nothing_of_that_name'" in ended.err
    assert not (mine / "runs").exists()


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("raise ValueError('broken')", "{}", "ValueError: broken (game.py:1"),
        ("import json", "{sise: 3}", "did you mean 'size'?"),
    ],
)
def test_an_environment_that_cannot_be_opened_is_told_before_there_is_a_run_folder(
    mine: Path, capfd: pytest.CaptureFixture[str], text: str, options: str, said: str
):
    (mine / "game.py").write_text(
        f"{text}\n\nclass Game:\n    def __init__(self, size=2): ...\n"
        "    def reset(self, row): ...\n    def step(self, text): ...\n"
    )
    (mine / "plays.py").write_text(
        "import flowrl as fl\n\n\n@fl.workflow\n"
        "def plays(prompts: fl.Prompts, *, actor: fl.Policy, game: fl.Environment):\n"
        "    rollout, scores = fl.interact(actor, game, prompts, max_turns=2,"
        " max_observation_tokens=4)\n"
        "    actor.update(rollout, scores)\n"
    )
    game = f"{{backend: environment, environment: 'game.py:Game', options: {options}}}"
    ended = flowrl(capfd, "run", "tiny.yaml", "workflow=plays.py", f"roles.game={game}")
    assert ended.code == 2, ended.err
    assert said in ended.err
    assert not (mine / "runs").exists()


def test_unreadable_rows_up_to_the_limit_are_counted_and_shown(
    mine: Path, capfd: pytest.CaptureFixture[str]
):
    good = "".join(f'{{"prompt": "{n}+10=", "answer": "0{n + 10}"}}\n' for n in range(10, 30))
    (mine / "rows.jsonl").write_text(good + "no JSON\n")
    ended = flowrl(
        capfd, "run", "tiny.yaml", "data.train=rows.jsonl", "data.max_bad_rows=1", "train.steps=1"
    )
    assert ended.code == 0, ended.err
    assert re.search(r"warning: .*rows\.jsonl: 1 bad rows left out .*:21", ended.out)
