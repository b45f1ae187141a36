"""Command lines that the parser refuses, and odd files: told in a few lines, with the way out."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import flowrl
from flowrl.cli import main

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "configs" / "grpo_qwen25_7b.yaml")
CLUSTER = str(ROOT / "configs" / "clusters" / "h100_8x8.yaml")
QUICK = str(ROOT / "configs" / "quickstart.yaml")


def told(capfd: pytest.CaptureFixture[str], *argv: str) -> str:
    """Standard error of a command line that is wrong."""
    with pytest.raises(SystemExit) as end:
        main(list(argv))
    out, err = capfd.readouterr()
    assert (end.value.code, out) == (2, ""), err
    assert "Traceback" not in err
    lines = [line for line in err.splitlines() if not line.startswith("warning: ")]
    assert lines[0].startswith("error: ")
    assert len(lines) <= 4
    assert any(line.startswith("  to fix: ") for line in lines), err
    return err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("plan", "expected: flowrl plan CONFIG [KEY=VALUE]... [OPTIONS]"),
        ("plna c.yaml", "did you mean 'plan'?"),
        ("c.yaml", "write the command first: `flowrl plan CONFIG`"),
        ("--sweep", "write the command first"),
        ("run c.yaml --cluster machines.yaml", "cluster=machines.yaml"),
        ("graph c.yaml --cluster machines.yaml", "cluster=machines.yaml"),
        ("run c.yaml --pin rollout.tp=2", "plan.pins.rollout.tp=2"),
        ("run c.yaml --steps 3", "train.steps=3"),
        ("run c.yaml --train.steps=3", "overrides have no dashes: train.steps=3"),
        ("why runs/a 0/0/0 --steps 3", "it belongs to `flowrl simulate`"),
        ("plan c.yaml --print-after fill", "it belongs to `flowrl graph`; leave it out here"),
        ("plan c.yaml --ouput x.json", "did you mean --output?"),
        ("plan c.yaml --cluster", "'--cluster' requires an argument"),
        ("plan c.yaml --json=3", "'--json' does not take a value"),
        ("simulate c.yaml --steps ten", "--steps: Input should be a valid integer"),
        ("size c.yaml --node-size 0", "--node-size: Input should be greater than or equal to 1"),
        ("plan c.yaml --sweep devices=8:64", "it belongs to `flowrl size`; leave it out here"),
        ("why runs/a 0/0/0 more", "unexpected extra argument(s) (more)"),
        ("why", "flowrl why RUN SAMPLE [OPTIONS]"),
    ],
)
def test_a_misused_command_line_is_told_what_to_write(capfd, words: str, said: str):
    assert said in told(capfd, *words.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([CLUSTER, CONFIG], "one configuration comes first"),
        ([CONFIG, CLUSTER], "cluster=FILE.yaml"),
        ([CONFIG, QUICK], f"`extends: {QUICK}`"),
        ([CONFIG, "mine.py"], "workflow=FILE.py"),
        ([CONFIG, "other.json"], "--plan FILE.json"),
        ([CONFIG, "=3"], "write the dotted key in front of `=`"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "run", "profile"])
def test_files_in_each_others_place_are_told_their_own(capfd, command: str, words, said: str):
    assert said in told(capfd, command, *words)


@pytest.mark.parametrize(
    ("pin", "parts"),
    [
        ("actor.offload=true", ["found: actor.offload=true", "none, optimizer, all, optimizer+a"]),
        ("actor.update.recompute=false", ["no such way of recompute", "none, selective, full"]),
        ("verifier.tp=1", ["verifier has nothing to pin", "rewards.workers"]),
        ("aktor.tp=1", ["nothing in the plan is called 'aktor'", "did you mean 'actor'?"]),
        ("actor.tp=0", ["tp is a whole number from 1 up\n"]),
        ("actor.tp=10000000000000", ["tp is a whole number from 1 up, of at most 12 digits\n"]),
        ("actor.devices=0-99999999999", ["there is no device 99999999999"]),
        ("actor.devices=0,0", ["a device is named twice"]),
    ],
)
def test_a_pin_that_cannot_be_says_what_it_takes(capfd, pin: str, parts: list[str]):
    text = told(capfd, "plan", CONFIG, "--cluster", CLUSTER, "--pin", pin)
    assert f"command line (plan.pins.{pin})" in text
    for part in parts:
        assert part in text


def test_what_the_command_line_changed_is_not_blamed_on_the_file(capfd):
    word = "stage.sft.train.steps=3"
    text = told(capfd, "plan", QUICK, "stages=[grpo]", word)
    assert text.startswith(f"error: command line ({word}): no stage is called 'sft'")
    text = told(capfd, "plan", QUICK, "roles.actor.model.num_heads=5")
    assert "(roles.actor.model) with roles.actor.model.num_heads=5 of the command line" in text
    text = told(capfd, "plan", QUICK, "roles.new.tokenizer={kind: char}")
    assert "error: command line (roles.new.tokenizer={kind: char}): 'alphabet' is missing" in text
    text = told(capfd, "plan", CONFIG, "--cluster", CLUSTER, "plan.environments.word.step_s=1")
    assert "command line (plan.environments.word.step_s=1): there is no role 'word'" in text
    # What the planner says of a role has the line that the configuration has it in.
    large = f"roles.actor.model={ROOT}/configs/models/deepseek-v3.json"
    text = told(capfd, "plan", CONFIG, f"cluster={ROOT}/configs/clusters/a100_1x8.yaml", large)
    assert f"grpo_qwen25_7b.yaml:11 (roles.actor) with {large} of the command line" in text


def test_files_that_nobody_meant_are_told(capfd, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    deep = "[" * 20_000 + "]" * 20_000
    Path("deep.yaml").write_text("a: " + deep)
    Path("deep.json").write_text(deep)
    Path("empty.yaml").write_text("")
    Path("empty.json").write_text("")
    Path("mine.py").write_text("import flowrl as fl\n")
    Path("date.plan.yaml").write_text("version: 3\nplacements: 2024-99-99\n")
    Path("huge.json").write_text('{"version": ' + "9" * 5000 + "}")
    Path("plan.yaml").write_text("version: 3\ngraph: grpo\nplacements: []\n")
    for config in ("deep.yaml", "deep.json", "empty.yaml", "empty.json", "huge.json", "mine.py"):
        told(capfd, "plan", config)
    for plan in ("date.plan.yaml", "none.plan.json"):
        told(capfd, "plan", plan)
    assert "did you mean date.plan.yaml?" in told(capfd, "plan", "dat.plan.yaml")
    assert "a plan that was written" in told(capfd, "run", "plan.yaml")
    model = f"roles.actor.model={ROOT}/configs/models/qwen2.5-7b.json"
    for cluster in ("deep.yaml", "empty.yaml", "mine.py", "."):
        told(capfd, "plan", CONFIG, model, "--cluster", cluster)
    for option in ("plan.profile", "roles.actor.model", "plan.lengths"):
        told(capfd, "plan", CONFIG, model, "--cluster", CLUSTER, f"{option}=deep.json")
    assert "not a cluster file" in told(capfd, "plan", CONFIG, model, "--cluster", "mine.py")


def test_a_misspelt_run_is_answered_with_the_nearest(capfd, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs/async").mkdir(parents=True)
    Path("runs/async/config.yaml").write_text("")
    assert "did you mean runs/async?" in told(capfd, "why", "runs/asnc", "0/0/0")
    assert "did you mean runs/async?" in told(capfd, "run", "--resume", "runs/asnc")
    assert "name one of the runs in runs: async" in told(capfd, "why", "runs", "0/0/0")
    text = told(capfd, "run", "--resume", "runs/async/config.yaml")
    assert "found: a file;" in text
    assert "did you mean runs/async?" in text


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("trian.steps=4", "did you mean 'train.steps'?"),
        ("eval.evry=4", "did you mean 'eval.every'?"),
        ("seed=4", "start a new run for anything else"),
        ("grpo.yaml", "leave grpo.yaml out"),
    ],
)
def test_a_resumed_run_says_which_keys_it_may_change(capfd, word: str, hint: str):
    text = told(capfd, "run", "--resume", "runs/any", word)
    assert f"command line ({word}): a resumed run keeps its configuration" in text
    assert f"to fix: {hint}" in text


PACKAGES = ("api.py", "cli", "cluster", "compiler", "config", "cost", "plan", "sim")
"""What the planner's commands are made of; `plan.search` is told of by those who call it."""


def test_every_error_of_the_planner_says_where_and_what_to_do():
    lacking = []
    for name in PACKAGES:
        top = Path(flowrl.__file__).parent / name
        for path in [top] if top.is_file() else sorted(top.rglob("*.py")):
            if not {"search", "templates"} & set(path.parts):
                lacking += list(_errors_that_say_too_little(path))
    assert lacking == []


def _errors_that_say_too_little(path: Path):
    placed_later = set()  # a `Refusal` of a value gets its key where the section is read
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args):
            continue
        if node.func.id == "Refusal":
            placed_later |= set(node.args)
        if node.func.id.endswith("Error") and hasattr(flowrl.errors, node.func.id):
            given = {keyword.arg for keyword in node.keywords}
            if not ({"hint"} if node in placed_later else {"where", "hint"}) <= given:
                yield f"{path}:{node.lineno}"
