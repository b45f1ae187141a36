"""`flowrl plan --routes`: every slice of a parameter on its way, as text and as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowrl.plan.routes import expand_plan_route
from tests.cli.command_line import ROOT, Run, runner

CONFIG = "configs/grpo_qwen25_7b.yaml"
NODE = ["--cluster", "configs/clusters/h100_1x8.yaml"]
MANY = ["--cluster", "configs/clusters/h100_128x8.yaml"]
MIXED = ["--cluster", "configs/clusters/h100_2x8_h20_4x8.yaml"]

# 64 hidden, 2 layers, 4 heads of 16, as many key heads.
SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 400,
    "tie_word_embeddings": False,
}

FOLLOWING = """\
import flowrl as fl

@fl.workflow
def following(prompts: fl.Prompts, actor: fl.Policy, verifier: fl.Reward, reference: fl.Policy,
              kl: float = 0.1):
    rollout = actor.generate(prompts)
    scores = verifier.score(rollout)
    actor.update(rollout, scores, reference=reference.logprobs(rollout), kl=fl.kl.k3(kl))
    reference.sync(actor, every=50)
"""


@pytest.fixture
def flowrl(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(ROOT)
    return runner(capsys, "plan")


@pytest.fixture
def job(tmp_path: Path) -> list[str]:
    """A small model, trained by 4 tensor ranks and drawn from by 2, on the same 8 devices."""
    shape = json.loads((ROOT / "configs/models/qwen2.5-0.5b.json").read_text()) | SHAPE
    path = tmp_path / "small.json"
    path.write_text(json.dumps(shape))
    words = [CONFIG, f"roles.actor.model={path}", "plan.kind=temporal"]
    for pin in ("rollout.tp=2", "rollout.devices=0-7", "actor.tp=4", "actor.devices=0-7"):
        words.append(f"plan.pins.{pin}")
    return [*words, "plan.pins.actor.update.pp=1", "plan.pins.actor.update.cp=1"]


def test_each_slice_is_a_line_and_the_totals_are_those_of_hand(flowrl: Run, job: list[str]):
    code, out, err = flowrl(*job, *NODE, "--routes", "*layers.1.self_attn.q_proj.weight")
    assert (code, err) == (0, "")
    head, words, *lines, total = out.splitlines()
    assert head.startswith("actor to actor.generate after actor.sync: slices from tp 4, dp 2 to ")
    assert words.split(":")[0] == "  parameter (its size) [slice of it]"
    # Each of 8 ranks needs 32 of 64 rows, which two trainer ranks have 16 of each.
    name = "model.layers.1.self_attn.q_proj.weight (64 x 64)"
    assert lines[:4] == [
        f"  {name} [0:16, 0:64]: cuda:0 [0:16, 0:64] -> cuda:0 [0:16, 0:64], 2,048 bytes, stays",
        f"  {name} [16:32, 0:64]: cuda:1 [0:16, 0:64] -> cuda:0 [16:32, 0:64], 2,048 bytes",
        f"  {name} [32:48, 0:64]: cuda:2 [0:16, 0:64] -> cuda:1 [0:16, 0:64], 2,048 bytes",
        f"  {name} [48:64, 0:64]: cuda:3 [0:16, 0:64] -> cuda:1 [16:32, 0:64], 2,048 bytes",
    ]
    # Quarter d % 4 is within half d % 2 for devices 0, 3, 4 and 7.
    assert [line.split("-> ")[1].split()[0] for line in lines if line.endswith("stays")] == [
        *("cuda:0", "cuda:3", "cuda:4", "cuda:7"),
    ]
    assert total == (
        "total: 16 transfers, 32,768 bytes; 4 of them, 8,192 bytes, stay on their own device"
    )


def test_json_is_a_list_of_transfers_that_bring_every_rank_its_half(flowrl: Run, job: list[str]):
    code, out, err = flowrl(*job, *NODE, "--routes", "*", "--json")
    assert (code, err) == (0, "")
    moves = json.loads(out)
    assert moves[0] == {
        "source": "actor",
        "node": "actor.generate",
        "after": "actor.sync",
        "every": 1,
        "parameter": "model.embed_tokens.weight",
        "size": [400, 64],
        "slice": [[0, 100], [0, 64]],
        "from": "cuda:0",
        "to": "cuda:0",
        "source_slice": [[0, 100], [0, 64]],
        "destination_slice": [[0, 100], [0, 64]],
        "elements": 6400,
        "bytes": 12800,
    }
    # Norms (two a layer and the last one) and nothing else are whole on both ranks of a replica.
    layer = 4 * 64 * 64 + 3 * 64 + 3 * 64 * 96
    norms = 2 * 2 * 64 + 64
    replica = 2 * 400 * 64 + 2 * layer + 2 * norms
    assert sum(move["elements"] for move in moves) == 4 * replica
    assert sum(move["bytes"] for move in moves) == 2 * 4 * replica
    # Rows of the vocabulary are padded to 448 for two ranks: 224 and 176 of them are rows.
    rows = Counter[str]()
    for move in moves:
        if move["parameter"] == "lm_head.weight":
            rows[move["to"]] += move["elements"] // 64
    assert rows == {f"cuda:{i}": (224, 176)[i % 2] for i in range(8)}
    text = flowrl(*job, *NODE, "--routes", "*")[1]
    assert text.count(" -> cuda:") == len(moves)
    stay = sum(move["from"] == move["to"] for move in moves)
    assert f"\ntotal: {len(moves)} transfers, " in text
    assert f"; {stay} of them, " in text


def test_an_edited_plan_has_its_own_slices(flowrl: Run, job: list[str], tmp_path: Path):
    path = tmp_path / "a.plan.json"
    assert flowrl(*job, *NODE, "-o", str(path))[0] == 0
    raw = json.loads(path.read_text())
    update = next(one for one in raw["operations"] if one["node"] == "actor.update")
    update["layout"] |= {"tp": 2, "dp": 4}
    raw["weight_routes"][0]["source_layout"] = update["layout"]
    raw["pins"] = []
    path.write_text(json.dumps(raw))
    words = [*job[:3], "--plan", str(path), "--routes", "*.0.*q_proj.weight"]
    code, out, err = flowrl(*words)
    assert (code, "actor.update: " in err) == (0, True)
    assert out.endswith(
        "total: 8 transfers, 32,768 bytes; 8 of them, 32,768 bytes, stay on their own device\n"
    )
    code, out, err = flowrl(str(path), "--routes", "*")
    assert (code, out) == (2, "")
    assert "this is a plan's file, and --routes needs a configuration" in err
    assert f"to fix: write flowrl plan CONFIG --plan {path}\n" in err


def test_kinds_of_schedules_and_of_machines_have_their_addresses(flowrl: Run):
    words = [CONFIG, "--routes", "model.norm.weight", "--json"]
    ahead = json.loads(flowrl(*words, *NODE, "plan.kind=asynchronous", "train.max_staleness=1")[1])
    assert ahead
    assert not {one["from"] for one in ahead} & {one["to"] for one in ahead}
    kinds = json.loads(flowrl(*words, *MIXED)[1])
    assert {one["from"].split("-")[0] for one in kinds} == {"h100"}
    assert {one["to"] for one in kinds} == {f"h20-{n}/cuda:{i}" for n in range(4) for i in range(8)}


def test_routes_of_several_uses_are_told_apart(flowrl: Run, job: list[str], tmp_path: Path):
    program = tmp_path / "following.py"
    program.write_text(FOLLOWING)
    words = [*job, f"workflow={program}", *NODE, "--routes", "model.norm.*"]
    code, out, _ = flowrl(*words)
    assert code == 0
    heads = [line.split(": slices")[0] for line in out.splitlines() if ": slices" in line]
    assert heads == [
        "actor to actor.generate after actor.sync",
        "actor to reference.logprobs after reference.sync every 50 steps",
    ]
    moves = json.loads(flowrl(*words, "--json")[1])
    assert {(one["node"], one["after"], one["every"]) for one in moves} == {
        ("actor.generate", "actor.sync", 1),
        ("reference.logprobs", "reference.sync", 50),
    }


def test_where_nothing_travels_that_is_said(flowrl: Run):
    words = ["configs/dpo.yaml", *NODE, "--routes", "*"]
    assert flowrl(*words) == (
        0,
        "no weights are transferred: all are used where they are trained\n",
        "",
    )
    assert flowrl(*words, "--json") == (0, "[]\n", "")


@pytest.mark.parametrize(
    ("names", "expected"),
    [("*layer.1.mlp*", "model.layers.*.mlp.gate_proj"), ("", "model.embed_tokens.weight")],
)
def test_a_pattern_without_a_match_gets_the_names_that_there_are(
    flowrl: Run, names: str, expected: str
):
    code, out, err = flowrl(CONFIG, *NODE, "--routes", names, "--json")
    assert (code, out) == (2, "")
    assert err.startswith("error: --routes: no transferred parameter has such a name\n")
    assert f"  found: {names!r}; expected: of actor: " in err
    assert expected in err
    assert "  to fix: take one of them; '*' is all" in err


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        (["configs/quickstart.yaml"], "a plan for one device (grpo)", "add --cluster F"),
        (
            ["configs/quickstart.yaml", "--cluster", "configs/clusters/laptop.yaml"],
            "transferred as a whole",
            "add --cluster FILE (configs/clusters has examples)",
        ),
        (
            [CONFIG, *MANY, "roles.actor.model=configs/models/deepseek-v3.json"],
            "the tensors of latent attention are not listed",
            "take the routes as rules",
        ),
    ],
)
def test_weights_without_slices_are_refused(flowrl: Run, words: list[str], said: str, hint: str):
    code, out, err = flowrl(*words, "--routes", "*")
    assert (code, out) == (2, "")
    assert said in err
    assert f"to fix: {hint}" in err


def test_a_written_plan_for_one_device_is_named(flowrl: Run, tmp_path: Path):
    path = str(tmp_path / "a.plan.json")
    assert flowrl("configs/quickstart.yaml", "-o", path)[0] == 0
    code, out, err = flowrl("configs/quickstart.yaml", "--plan", path, "--routes", "*")
    assert (code, out) == (2, "")
    assert "or --plan FILE of such a plan\n" in err


@pytest.mark.parametrize(
    "other",
    [
        ["--top", "2"],
        ["--explain"],
        ["--output", "p.json"],
    ],
)
def test_what_tells_something_else_does_not_go_with_it(flowrl: Run, other: list[str]):
    code, out, err = flowrl(CONFIG, *NODE, "--routes", "*", *other)
    assert (code, out) == (2, "")
    assert f"{other[0]}: --routes and {other[0]} do not go together" in err


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_transfers_are_printed_as_they_are_found(
    flowrl: Run, job: list[str], monkeypatch: pytest.MonkeyPatch, form: list[str]
):
    printed = []

    class Counted:
        """A standard output that counts what is written of transfers."""

        lines = 0

        def write(self, text: str) -> int:
            self.lines += "cuda:" in text
            return len(text)

        def flush(self) -> None: ...

    out = Counted()

    def watched(*given: Any, **named: Any) -> Iterator[object]:
        for move in expand_plan_route(*given, **named):
            yield move
            printed.append(out.lines)

    monkeypatch.setattr("flowrl.cli.routes.expand_plan_route", watched)
    monkeypatch.setattr("sys.stdout", out)
    flowrl(*job, *NODE, "--routes", "*norm*", *form)
    # Five norms on eight devices; each is written before the next is asked for.
    assert printed == list(range(1, 41))


@pytest.mark.parametrize("form", ["", "--json"])
def test_a_reader_that_has_enough_ends_it_quietly(form: str):
    command = f"{sys.executable} -m flowrl.cli plan {CONFIG} {' '.join(NODE)} --routes '*' {form}"
    script = f"set -o pipefail; {command} | head -n 3"
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert len(ended.stdout.splitlines()) == 3
