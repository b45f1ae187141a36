"""`flowrl simulate` and `flowrl profile` as people use them."""

from __future__ import annotations

import functools
import html
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flowrl.cli import main
from flowrl.observe.trace import read_spans
from flowrl.sim.profile import load_profile
from flowrl.sim.trace import Trace
from tests.runtime.tiny_runs import tiny_config, write_config
from tests.sim.quick_profiles import quick_profiles

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path, runtime={"runs": "runs"})
    return tmp_path


def flowrl(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    return int(str(end.value.code))


def told(capsys, *arguments: str) -> dict:
    assert flowrl("simulate", "tiny.yaml", "--json", *arguments) == 0
    out = capsys.readouterr().out
    return json.loads(out) | {"text": out}


def test_a_config_is_simulated_without_a_profile_and_says_so(place, capsys):
    assert flowrl("simulate", "tiny.yaml", "--steps", "5") == 0
    out, err = capsys.readouterr()
    assert out.startswith("simulation of grpo: 5 steps, 1 engine, seed 7\n")
    assert "step time: " in out
    assert "samples: 160 = 160 consumed" in out
    assert "trace: runs/tiny.trace.json" in out
    assert "step times are assumed" in err
    assert "as plans assume, half of the longest on average" in err
    assert "at most 6)" in err
    assert {"generate", "update"} <= {
        span.operation for span in read_spans(place / "runs" / "tiny.trace.json")
    }


def test_equal_seeds_print_equal_json(place, capsys):
    words = ["--lengths", "lognormal:mean=3,sigma=1", "--steps", "6"]
    first, again = told(capsys, *words), told(capsys, *words)
    other = told(capsys, *words, "seed=8")
    assert first["text"] == again["text"]
    assert first["steps"] != other["steps"]
    assert first["samples"]["admitted"] == 6 * 32


def test_lengths_faults_and_engines_are_taken_from_the_command_line(place, capsys):
    (place / "lengths.jsonl").write_text("2\n2\n")
    (place / "faults.yaml").write_text(
        "script: [{at_s: 0.001, engine: 2, kind: lost, for_s: 0.01}]\n"
    )
    words = ["--lengths", "lengths.jsonl", "--engines", "3", "--faults", "faults.yaml"]
    report = told(capsys, *words, "--trace", "here.json")
    assert report["num_engines"] == 3
    assert report["planned"] is None  # the plan has another number
    assert report["engines"]["lost"] == 1
    assert report["workload"] == "lengths.jsonl (2 lengths)"
    assert {step["num_tokens"] for step in report["steps"]} == {64}
    assert (place / "here.json").is_file()
    assert not (place / "runs").exists()


def test_a_stage_but_the_last_can_be_named(place, capsys):
    assert told(capsys, "--stage", "sft")["stage"] == "sft"


def test_the_last_steps_are_drawn_as_a_page_below_the_printed_result(place, capsys):
    assert flowrl("simulate", "tiny.yaml", "--steps", "5", "-o", "sim.html") == 0
    out, err = capsys.readouterr()
    assert "written to sim.html: simulation, as html" in err
    page = (place / "sim.html").read_text()
    result, _ = out.split("trace: ")
    assert f"<pre>{result}</pre>" in html.unescape(page)
    assert "<h1>simulation of tiny, grpo</h1>" in page
    assert "<h2>steps 3 to 5</h2>" in page
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", page)
    calls = dict(zip(cells[1::5], cells[4::5], strict=True))
    assert calls["update"] == "5"
    report = told(capsys, "--steps", "5", "-o", "again.html")
    assert len(report["steps"]) == 5  # standard output is nothing but JSON
    assert (place / "again.html").read_text() == page


def test_of_a_trace_that_is_cut_the_page_draws_the_steps_that_are_whole(place, capsys, monkeypatch):
    monkeypatch.setattr("flowrl.sim.trace.Trace", functools.partial(Trace, limit=100))
    report = told(capsys, "--steps", "5", "-o", "sim.html", "--trace", "cut.json")
    end_s = max(span.end_s for span in read_spans(place / "cut.json"))
    whole = [s["step"] for s in report["steps"] if s["begin_s"] + s["wall_s"] <= end_s]
    assert 1 < len(whole) < 5
    assert f"to {whole[-1]}</h2>" in (place / "sim.html").read_text()


HERE = sorted(path for path in CONFIGS.glob("*.yaml") if "qwen25" not in path.stem)
"""Configs for this machine; those of large models are planned for clusters."""


@pytest.mark.parametrize("config", HERE, ids=lambda path: path.stem)
def test_every_config_is_simulated_and_its_samples_add_up(config, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(CONFIGS.parent)
    faults = tmp_path / "faults.yaml"
    faults.write_text("samples: {fail_share: 0.01}\nrewards: {fail_share: 0.01}\n")
    words = [str(config), "--steps", "2", "--json", f"runtime.runs={tmp_path}"]
    if config.stem == "gsm8k_tiny":  # a simulation reads no data, but the files must be there
        words += [f"data.{key}=tests/data/gsm8k_test.jsonl" for key in ("train", "eval")]
    words += ["--lengths", "lognormal:mean=2,sigma=1", "--faults", str(faults)]
    told = []
    for _ in range(2):
        assert flowrl("simulate", *words) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]
    report = json.loads(told[0])
    assert [step["step"] for step in report["steps"]] == [1, 2]
    assert report["step_s"]["median"] > 0
    ends = {end: number for end, number in report["samples"].items() if end != "admitted"}
    assert sum(ends.values()) == report["samples"]["admitted"]
    if report["num_engines"]:
        assert sum(report["ages"].values()) > 0
        assert report["samples"]["consumed"] > 0
    spans = read_spans(tmp_path / f"{config.stem}.trace.json")
    assert "update" in {span.operation for span in spans}


def test_the_replicas_of_a_plan_are_the_engines(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(CONFIGS.parent)
    words = ["configs/grpo_qwen25_7b.yaml", "cluster=configs/clusters/h100_8x8.yaml"]
    words += ["data.train=tests/data/gsm8k_test.jsonl", f"runtime.runs={tmp_path}", "--steps", "1"]
    words += ["--lengths", "constant:64"]
    assert flowrl("plan", *words[:3], "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert flowrl("simulate", *words, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    [placed] = [p for p in plan["placements"] if p["role"] == "actor"]
    assert report["num_engines"] == placed["replicas"] > 1
    assert flowrl("simulate", *words) == 0
    out = capsys.readouterr().out
    assert " to h100-7/cuda:" in out
    made_for = "lognormal:mean=2504.62,sigma=0.8"
    assert f": the plan is for lengths {made_for}, simulated were constant:64\n" in out
    assert report["planned"]["difference"] is None
    assert flowrl("simulate", *words[:-1], made_for, "--json") == 0
    assert json.loads(capsys.readouterr().out)["planned"]["difference"] is not None


def test_a_plan_for_this_machine_stands_beside_its_own_lengths_only(place, capsys):
    assert told(capsys)["planned"]["not_compared"] is None
    named = told(capsys, "plan.mean_response_tokens=2", "plan.sigma=0", "--lengths", "constant:2")
    assert named["planned"]["not_compared"] is None
    other = told(capsys, "plan.mean_response_tokens=2", "plan.sigma=0", "--lengths", "constant:6")
    assert other["planned"]["not_compared"] == (
        "the plan is for lengths constant:2, simulated were constant:6"
    )


BIG = ["configs/grpo_qwen25_7b.yaml", "train.prompts_per_step=128", "--steps", "2"]
MIXED = ["--cluster", "configs/clusters/h100_2x8_h20_4x8.yaml"]


def test_a_cluster_is_planned_for_and_that_plan_is_simulated(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(CONFIGS.parent)
    words = [*BIG, *MIXED, f"runtime.runs={tmp_path}"]
    assert flowrl("simulate", *words) == 0
    out = capsys.readouterr().out
    assert "32 devices" in out
    assert "h100-[0-1]/cuda:[0-7]" in out
    assert "\nthe plan predicts " in out
    assert "\nit predicts that " in out
    assert out.count(" % of device time is idle") == 2
    assert flowrl("simulate", *words, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert sum(device["num_devices"] for device in report["devices"]) == 48
    planned = report["planned"]
    difference = report["step_s"]["mean"] / planned["step_s"] - 1
    assert planned["simulated_s"] == pytest.approx(report["step_s"]["mean"])
    assert planned["difference"] == pytest.approx(difference, abs=1e-6)
    assert report["idle_share"] == pytest.approx(planned["idle_share"], abs=0.05)
    traced = json.loads((tmp_path / "grpo_qwen25_7b.trace.json").read_text())
    named = {event["args"]["name"] for event in traced if event["ph"] == "M"}
    assert "h100-[0-1]/cuda:[0-7]" in named


def test_a_pin_changes_the_plan_that_is_simulated(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(CONFIGS.parent)
    words = [*BIG, "--cluster", "configs/clusters/h100_1x8.yaml", f"runtime.runs={tmp_path}"]
    numbers = []
    for pins in ([], ["--pin", "rollout.tp=4"]):
        assert flowrl("simulate", *words, *pins, "--json") == 0
        numbers.append(json.loads(capsys.readouterr().out)["num_engines"])
    assert numbers[0] > numbers[1] == 2


def test_a_written_plan_is_simulated_by_its_decisions_whatever_times_it_says(
    capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(CONFIGS.parent)
    written = tmp_path / "mixed.plan.json"
    words = [*BIG[:2], *MIXED]
    assert flowrl("plan", *words, "--output", str(written)) == 0
    simulate = ["simulate", *BIG, "--plan", str(written), "--json", f"runtime.runs={tmp_path}"]
    assert flowrl(*simulate) == 0
    first = json.loads(capsys.readouterr().out)
    assert flowrl("simulate", *BIG, *MIXED, "--json", f"runtime.runs={tmp_path}") == 0
    assert json.loads(capsys.readouterr().out) == first
    plan = json.loads(written.read_text())
    for operation in plan["operations"]:
        if operation["node"] == "actor.update":
            operation["seconds"] *= 2
    written.write_text(json.dumps(plan))
    assert flowrl("plan", str(written)) == 2
    assert re.search(r"mixed\.plan\.json:\d+ \(operations\.\d\.seconds\)", capsys.readouterr().err)
    assert flowrl(*simulate) == 0
    said = capsys.readouterr()
    again = json.loads(said.out)
    # A stream's step is told apart in kinds of arrivals by the planner only.
    assert again.pop("planned")["step_s"] == pytest.approx(first.pop("planned")["step_s"], rel=0.1)
    assert again == first
    assert re.search(r"actor\.update: [\d.]+ s by its layout, the file says [\d.]+ s", said.err)
    for operation in plan["operations"]:
        if operation["node"] == "actor.generate":
            operation["kv_tokens"] *= 100
    written.write_text(json.dumps(plan, indent=2))
    assert flowrl(*simulate) == 2
    said = capsys.readouterr()
    assert re.search(r"mixed\.plan\.json:\d+ \(operations\.\d\): actor\.generate does", said.err)
    assert "take at most " in said.err
    assert flowrl(*simulate, "train.prompts_per_step=64") == 2
    assert "the plan was made for other sizes" in capsys.readouterr().err
    assert flowrl("simulate", "configs/ppo_qwen25_7b.yaml", "--plan", str(written)) == 2
    said = capsys.readouterr().err
    assert re.search(r"mixed\.plan\.json:\d+ \(graph\): the plan is of no stage of this run", said)
    assert "a plan of 'grpo'; expected: a plan of 'ppo', the stage of this run" in said
    assert flowrl("simulate", str(written)) == 2
    assert f"flowrl simulate CONFIG --plan {written}" in capsys.readouterr().err
    assert flowrl(*simulate, *MIXED) == 2
    assert "--plan and --cluster do not go together" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_a_run_s_folder_is_answered_with_its_configuration(command, place, capsys):
    (place / "ran").mkdir()
    (place / "ran" / "config.yaml").touch()
    assert flowrl(command, "ran") == 2
    assert "a config; ran holds config.yaml" in capsys.readouterr().err


def test_a_written_plan_for_this_machine_is_simulated_too(place, capsys):
    assert flowrl("plan", "tiny.yaml", "--output", "tiny.plan.json") == 0
    assert told(capsys)["steps"] == told(capsys, "--plan", "tiny.plan.json")["steps"]


def test_a_stage_of_examples_has_rows_a_second(place, capsys):
    assert flowrl("simulate", "tiny.yaml", "--stage", "sft") == 0
    out = capsys.readouterr().out
    assert " rows/s\n" in out
    assert " engine" not in out.splitlines()[0]
    assert "samples" not in out
    report = told(capsys, "--stage", "sft")
    assert report["rows_per_s"] == pytest.approx(
        sum(step["num_rows"] for step in report["steps"]) / report["sim_s"]
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "0"], "--steps: Input should be greater than or equal to 1"),
        (["--engines", "0"], "--engines: Input should be greater than or equal to 1"),
        (["--stage", "ppo"], "has no stage 'ppo'"),
        (["--lengths", "normal:3"], "no such file, and no distribution of lengths either"),
        (["--lengths", "constant:x"], "lengths"),
        (["--faults", "nothing.yaml"], "nothing.yaml: no such file"),
        (["--profile", "nothing.json"], "--profile nothing.json: the profile cannot be read"),
        (["--trace", "tiny.yaml/trace.json"], "the trace cannot be written"),
        (["--against", "runs"], "this is no run folder"),
        (["-o", "sim.svg"], "expected: a name that ends in .html"),
        (["-o", "sim"], "to fix: --output sim.html"),
        (["-o", "nowhere/sim.html"], "mkdir -p nowhere"),
    ],
)
def test_mistakes_end_with_2_and_say_what_to_do(place, capsys, words, said):
    assert flowrl("simulate", "tiny.yaml", *words) == 2
    assert said in capsys.readouterr().err


def test_simulating_imports_no_tensor_library(place):
    program = (
        "import sys; from flowrl.cli import main\n"
        "try: main(['simulate', 'tiny.yaml', '--steps', '2'])\n"
        "except SystemExit as end: assert not end.code\n"
        "print(sorted({'torch', 'transformers', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=place, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_a_profile_is_of_this_machine_and_of_models_that_have_weights(place, capsys):
    cluster = f"cluster={CONFIGS / 'clusters' / 'h100_1x8.yaml'}"
    assert flowrl("profile", "tiny.yaml", cluster) == 2
    err = capsys.readouterr().err
    assert "on devices that are not here" in err
    assert "measuring" not in err
    # The data of a described machine is read here, and its key is told with its place.
    laptop = f"cluster={CONFIGS / 'clusters' / 'laptop.yaml'}"
    assert flowrl("profile", "tiny.yaml", laptop, "data.train=none.jsonl") == 2
    assert "(data.train=none.jsonl): no such data file" in capsys.readouterr().err


def test_a_profile_is_measured_and_then_used(place, capsys):
    with quick_profiles():
        assert flowrl("profile", "tiny.yaml", "roles.spare={copy_of: actor}") == 0
    out, err = capsys.readouterr()
    # The short runs of a profile are of configs that nobody wrote.
    assert err.count("uses the role spare") == 1
    assert "profile of tiny" in out
    assert out.endswith("written to runs/tiny.profile.json\n")
    assert "measuring: actor: update" in err
    profile = load_profile(place / "runs" / "tiny.profile.json")
    assert {engine.role for engine in profile.engines} == {"actor"}
    assert {(op.role, op.op) for op in profile.ops} == {
        ("actor", "export"),
        ("actor", "logprobs"),
        ("actor", "sync"),
        ("actor", "update"),
        ("reference", "logprobs"),
    }
    assert all(point.seconds > 0 for point in profile.engines[0].decode)
    assert profile.engines[0].load_folder_s > 0
    # Where a larger batch happened to take no longer than a smaller one, all of it is a step's.
    assert profile.host.step_s + profile.host.sample_s > 0
    assert set(profile.prompts) == {6}
    report = told(capsys)
    times = ", ".join(("runs/tiny.profile.json", *profile.doubts))  # such as of a busy machine
    assert report["times"] == times
    assert report["seconds"]["host"] > 0
    # A plan is chosen by the steps behind the first two of such a simulation.
    walls = [step["wall_s"] for step in told(capsys, "--steps", "8")["steps"]]
    assert flowrl("plan", "tiny.yaml", "--json") == 0
    step_s = json.loads(capsys.readouterr().out)["prediction"]["step_s"]
    assert sum(walls[2:]) / 6 == pytest.approx(step_s, rel=1e-3)
    # A run of a config that was profiled ends with the prediction, and can be asked for it later.
    assert flowrl("run", "tiny.yaml", "eval.every=0") == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].startswith("held-out ")
    assert (
        "grpo, by runs/tiny.profile.json, predicted for the samples that the run generated\n" in err
    )
    assert re.search(
        r"\(the plan's [\d.]+ m?s a step were for lengths \S+ and no filtered group, before "
        r"there were any\)\nmedians",
        err,
    )
    # A profile that the configuration names is taken by all commands.
    named = ["name=other", "plan.profile=runs/tiny.profile.json"]
    assert told(capsys, *named)["times"] == times
    assert flowrl("run", "tiny.yaml", *named) == 0
    assert "grpo, by runs/tiny.profile.json, predicted for" in capsys.readouterr().err
    assert flowrl("simulate", "tiny.yaml", "--against", "runs/tiny") == 0
    out = capsys.readouterr().out
    assert "lengths  tiny/samples.jsonl (32 groups)" in out
    assert "\ncompared with runs/tiny\nmedians" in out
    words = ["--against", "runs/tiny", "--lengths"]
    assert flowrl("simulate", "tiny.yaml", *words, "constant:6") == 0
    out = capsys.readouterr().out
    assert "\ncompared with runs/tiny, predicted for lengths constant:6\nmedians" in out
    assert "simulated were constant:6" in out
    assert flowrl("simulate", "tiny.yaml", *words, "runs/tiny/samples.jsonl") == 0
    assert "\ncompared with runs/tiny\nmedians" in capsys.readouterr().out
    assert flowrl("simulate", "tiny.yaml", "--against", "runs/tiny", "--stage", "sft") == 0
    # Another model than the one that was measured is no longer the profile's.
    config = tiny_config(place / "runs")
    config["roles"]["actor"]["model"]["hidden_size"] = 32
    (place / "other.yaml").write_text(yaml.safe_dump(config))
    assert flowrl("simulate", "other.yaml") == 2
    assert "the profile is of another model for role 'actor'" in capsys.readouterr().err
    assert flowrl("run", "other.yaml") == 0
    assert (
        "no prediction to compare with: the profile is of another model" in capsys.readouterr().err
    )
