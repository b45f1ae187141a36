"""`flowrl plan` for clusters: every option on the configs that come along."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from flowrl.cli import main
from flowrl.cli.files import machine_words
from flowrl.plan import PlacementPlan, load_plan
from flowrl.plan.explain.top import top_lines
from flowrl.plan.schema import Alternative
from tests.cli.command_line import ROOT, Run, runner
from tests.cli.in_one_process import run_all

CONFIG = "configs/grpo_qwen25_7b.yaml"
SMALL = ["train.prompts_per_step=64", "train.sampling.max_tokens=1024"]
SMALL += ["plan.mean_response_tokens=300", "roles.actor.num_slots=64"]
NODE = ["--cluster", "configs/clusters/h100_1x8.yaml"]


@pytest.fixture
def flowrl(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(ROOT)
    return runner(capsys, "plan")


@pytest.fixture
def diff(capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(capsys, "diff")


def test_a_plan_for_a_cluster_says_what_a_step_takes_and_imports_no_tensor_library(flowrl: Run):
    ended = run_all({"plan": ["plan", CONFIG, *SMALL, *NODE]}, ROOT)["plan"]
    assert (ended.code, ended.err, list(ended.heavy)) == (0, "", [])
    for part in (
        "a step takes",
        "schedule",
        "predicted from analytic",
        "engines",
        "cannot run here",
    ):
        assert part in ended.out
    assert "not tp=3" not in ended.out
    _, explained, _ = flowrl(CONFIG, *SMALL, *NODE, "--explain")
    assert "not tp=3, 5-6, 8-13, 15-16: do not divide 28 query heads; possible 1, 2, 4" in explained


@pytest.mark.parametrize(
    ("config", "cluster", "tasks"),
    [
        ("ppo_qwen25_7b", "h100_8x8", 5),
        ("gsm8k_qwen25_7b_npu", "ascend_a2_1x8", 3),
        ("grpo_qwen25_32b", "a100_8x8", 3),
    ],
)
def test_the_configs_of_large_jobs_have_plans(flowrl: Run, config: str, cluster: str, tasks: int):
    code, out, err = flowrl(
        f"configs/{config}.yaml", "--cluster", f"configs/clusters/{cluster}.yaml", "--json"
    )
    assert (code, err) == (0, "")
    plan = PlacementPlan.from_json(out)
    timed = [operation for operation in plan.operations if operation.seconds is not None]
    assert len(timed) == tasks
    for entry in plan.prediction.memory:
        assert entry.memory.total <= plan.pool.device(entry.device).budget_bytes


def test_the_best_plans_are_listed_in_order(flowrl: Run):
    code, out, _ = flowrl(CONFIG, *SMALL, *NODE, "--top", "4")
    assert code == 0
    *here, _, _, _, _ = lines = out.splitlines()
    assert here
    assert all(line.startswith("cannot run here: backend torch ") for line in here)
    assert [line.partition(".")[0] for line in lines[len(here) :]] == ["1", "2", "3", "4"]


@pytest.mark.parametrize("more", [[], ["--explain"]])
def test_a_plan_that_cannot_run_here_says_so_before_all_else(flowrl: Run, more: list[str]):
    lines = flowrl(CONFIG, *SMALL, *NODE, *more)[1].splitlines()
    first = lines.index("plan of grpo")
    assert first > 0
    assert all(line.startswith("cannot run here: backend torch ") for line in lines[:first])
    assert "sglang for actor.generate" in lines[0]
    assert not any("cannot run here" in line for line in lines[first:])


def test_a_plan_for_one_device_that_is_not_here_says_so_too(
    flowrl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    here = flowrl("configs/quickstart.yaml")[1]
    assert "cannot run here" not in here
    monkeypatch.setattr("flowrl.cluster.discover.discover", lambda: [("cpu:0", None, None)])
    cluster = tmp_path / "other.yaml"
    card = "{name: card, type: cuda, memory_gib: 24}"
    cluster.write_text(f"nodes: [{{name: other, cores: 8, memory_gib: 64, devices: [{card}]}}]")
    code, out, err = flowrl("configs/quickstart.yaml", f"cluster={cluster}")
    assert (code, err) == (0, "")
    first, second, *_ = out.splitlines()
    assert first.startswith("cannot run here: the plan places role 'actor' on devices that are not")
    assert second == "plan of sft"
    listed = flowrl("configs/quickstart.yaml", f"cluster={cluster}", "--top", "1")[1]
    assert listed.startswith(first)
    file = tmp_path / "plan.json"
    assert flowrl("configs/quickstart.yaml", f"cluster={cluster}", "-o", str(file))[0] == 0
    by_file = flowrl("configs/quickstart.yaml", f"cluster={cluster}", "--plan", str(file))[1]
    assert by_file.startswith(f"{first}\nplan of grpo")
    assert flowrl("configs/quickstart.yaml", f"cluster={cluster}", "--json")[1].startswith("{")


def test_the_table_of_roles_names_the_engine_and_the_trainer_of_the_plan(flowrl: Run):
    out = flowrl(CONFIG, *SMALL, *NODE)[1]
    heading, actor, reference, verifier = out.split("\nroles\n")[1].splitlines()[:4]
    assert heading.split()[:3] == ["role", "engine,", "trainer"]
    assert actor.split()[:3] == ["actor", "sglang,", "megatron"]
    assert reference.split()[:2] == ["reference", "megatron"]
    assert verifier.split()[:2] == ["verifier", "verify"]
    local = flowrl("configs/quickstart.yaml")[1].split("\nroles\n")[1].splitlines()
    assert local[0].split()[:2] == ["role", "backend"]
    assert local[1].split()[:2] == ["actor", "torch"]


def alternative(kind: str, step_s: float, device_s: float) -> Alternative:
    return Alternative(summary=kind, step_s=step_s, why_not="other", kind=kind, device_s=device_s)


@pytest.mark.parametrize(
    ("by_time", "order"),
    [(True, ["fast", "temporal", "slow"]), (False, ["slow", "temporal", "fast"])],
)
def test_plans_are_listed_in_the_order_of_what_is_compared(
    flowrl: Run, tmp_path: Path, by_time: bool, order: list[str]
):
    path = tmp_path / "a.plan.json"
    assert flowrl(CONFIG, *SMALL, *NODE, "-o", str(path))[0] == 0
    plan = load_plan(path)
    step_s, device_s = plan.prediction.step_s, plan.prediction.device_s
    assert step_s is not None
    assert device_s is not None
    others = [
        alternative("fast", 0.9 * step_s, 1.2 * device_s),
        alternative("slow", 1.1 * step_s, 0.8 * device_s),
    ]
    listed = replace(plan, kind="temporal", alternatives=tuple(others))
    lines = top_lines(listed, 3, by_time=by_time)
    assert [line.split(",")[0] for line in lines] == [
        f"{number}. {kind}" for number, kind in enumerate(order, start=1)
    ]
    assert [line.endswith(": the plan") for line in lines] == [False, True, False]
    assert all("device-seconds per sample" in line for line in lines) is not by_time


def test_a_list_that_is_shorter_than_asked_for_says_why(flowrl: Run, tmp_path: Path):
    path = str(tmp_path / "a.plan.json")
    code, out, err = flowrl(CONFIG, *SMALL, *NODE, "plan.alternatives=2", "-o", path)
    assert (code, out) == (0, "")
    assert err.startswith(f"written to {path}: plan of grpo, temporal on 8 devices, ")
    last = flowrl(path, "--top", "9")[1].splitlines()[-1]
    found = 1 + len(load_plan(Path(path)).alternatives)
    assert last == f"only {found} are in the file: flowrl plan CONFIG --top 9 looks for more"
    assert "only" not in flowrl(path, "--top", str(found))[1]
    devices = ["--pin", "rollout.devices=0-7", "--pin", "actor.devices=0-7"]
    layouts = ["--pin", "rollout.tp=4", "--pin", "actor.tp=4", "--pin", "actor.dp=2"]
    reference = ["--pin", "reference.dp=8"]
    pins = [*devices, *layouts, *reference]
    printed = flowrl(CONFIG, *SMALL, *NODE, *pins, "--top", "40")[1].splitlines()
    lines = [line for line in printed if not line.startswith("cannot run here")]
    number = len(lines) - 1
    assert lines[number].startswith(f"only {number} differ: of the best schedules that pins leave")
    lines = flowrl("configs/quickstart.yaml", "roles.actor.num_engines=1", "--top", "9")[1]
    assert lines.endswith("only 3 differ: no other way to generate fits here and is allowed\n")


def test_plans_are_written_read_and_compared(flowrl: Run, diff: Run, tmp_path: Path):
    best, other = str(tmp_path / "a.plan.json"), str(tmp_path / "b.plan.yaml")
    assert flowrl(CONFIG, *SMALL, *NODE, "-o", best)[0] == 0
    assert flowrl(CONFIG, *SMALL, *NODE, "--pin", "rollout.tp=1", "-o", other)[0] == 0
    pins = load_plan(Path(other)).pins
    assert [(pin.subject, pin.field, pin.value) for pin in pins] == [("rollout", "tp", "1")]
    code, out, _ = diff(best, other)
    assert code == 0
    assert "pinned: - -> rollout.tp=1" in out
    assert diff(best, best)[1] == "the plans are equal\n"
    assert json.loads(diff(best, other, "--json")[1]) == out.splitlines()
    assert "plan of grpo" in flowrl(best)[1]


def test_an_edited_plan_is_evaluated_and_written_with_what_follows_from_it(
    flowrl: Run, diff: Run, tmp_path: Path
):
    best, edited = tmp_path / "best.plan.json", tmp_path / "edited.plan.json"
    job = [CONFIG, *SMALL]
    assert flowrl(*job, *NODE, "-o", str(best))[0] == 0
    assert flowrl(*job, "--plan", str(best), "--json")[1:] == (best.read_text(), "")
    raw = json.loads(best.read_text())
    update = next(one for one in raw["operations"] if one["node"] == "actor.update")
    update["recompute"] = {"none": "full", "selective": "full", "full": "none"}[update["recompute"]]
    edited.write_text(json.dumps(raw))
    assert flowrl(str(edited))[0] == 2

    anew = tmp_path / "anew.plan.yaml"
    code, _, err = flowrl(*job, "--plan", str(edited), "-o", str(anew))
    assert code == 0
    assert f"warning: {edited}: actor.update: " in err
    assert flowrl(str(anew))[0] == 0
    first, new = load_plan(best), load_plan(anew)
    assert new.operation("actor.update").recompute == update["recompute"]
    assert first.prediction.step_s is not None
    assert new.prediction.step_s is not None
    assert abs(new.prediction.step_s / first.prediction.step_s - 1) > 0.001
    schedule = next(one for one in new.reasons if one.subject == "schedule")
    assert schedule.why.startswith("the plan's file decides so; a step takes ")
    assert [one.step_s for one in new.alternatives] == [one.step_s for one in first.alternatives]
    assert all(one.why_not.endswith(" what the file decides") for one in new.alternatives)
    code, out, _ = diff(str(anew), str(best))
    assert code == 0
    assert f"actor.update recompute: {update['recompute']} -> " in out
    code, _, err = flowrl(str(best), "--plan", str(edited))
    assert (code, f"flowrl plan CONFIG --plan {best}" in err) == (2, True)
    assert (
        "--plan and --pin do not go together"
        in flowrl(*job, "--plan", str(edited), "--pin", "rollout.tp=2")[2]
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*NODE, "plan.sigma=20"], "sigma must be"),
        (["--cluster", "h100_1x8"], "did you mean configs/clusters/h100_1x8.yaml?"),
        ([*NODE, "roles.actor.model=qwen2.5-7b"], "no such model folder"),
        (
            [*NODE, "roles.actor.model=qwen2.5-7b.json"],
            "did you mean configs/models/qwen2.5-7b.json?",
        ),
        ([*NODE, "--pin", "rollout"], "a pin says a number or devices"),
        ([*NODE, "--pin", "rollout.tp=2", "--pin", "rollout.tp=4"], "contradict each other"),
        ([*NODE, "--pin", "rollout.tp=8"], "set tp to 2 or 4, or leave"),
        ([*NODE, "--top", "0"], "--top: Input should be greater than or equal to 1"),
        ([*NODE, "--top", "60"], "alternatives must be at most 50"),
        (["--plan", "gone.yaml"], "the plan cannot be read"),
        (["--cluster", "configs/clusters/gone.yaml"], "no such cluster file"),
        ([*NODE, "plan.mean_response_tokens=4000"], "longer than the longest"),
        ([*NODE, "plan.lengths=gone.jsonl"], "lengths cannot be read"),
        ([*NODE, "plan.pins.rollout=2"], "a pin says a number or devices"),
        (["roles.actor.model=configs/models/gone.json"], "no such model config"),
    ],
)
def test_mistakes_end_with_2_and_say_what_to_do(flowrl: Run, words: list[str], said: str):
    code, _, err = flowrl(CONFIG, *SMALL, *words)
    assert code == 2
    assert said in err


def test_a_mistyped_cluster_is_the_only_mistake_and_gets_no_name_unlike_it(flowrl: Run):
    _, _, err = flowrl(CONFIG, *SMALL, "--cluster", "configs/clusters/nope.yaml")
    assert "data.train" not in err
    assert "did you mean" not in err
    assert "configs/clusters holds a100_1x8.yaml" in err
    _, _, err = flowrl(CONFIG, *SMALL, "--cluster", "configs/clusters/h100_8x9.yml")
    assert "did you mean configs/clusters/h100_8x8.yaml?" in err


def test_a_plan_is_known_by_what_is_in_it_whatever_its_name(flowrl: Run, diff: Run, tmp_path: Path):
    path = tmp_path / "mine.yaml"
    assert flowrl("configs/quickstart.yaml", "-o", str(path))[0] == 0
    code, out, err = flowrl(str(path), "--json")
    assert (code, err) == (0, "")
    assert PlacementPlan.from_json(out) == load_plan(path)
    assert diff(str(path), str(path))[1] == "the plans are equal\n"
    assert "is a plan's file" in flowrl(str(path), "train.steps=3")[2]
    path.write_text(path.read_text().replace("version: ", "version: 9"))
    assert "not a plan of this format" in flowrl(str(path))[2]
    path.write_text("# no placements\ntrain: {steps: many}\n")
    assert "train.steps" in flowrl(str(path))[2]
    path.write_text("placements: [\n")
    assert "not YAML" in flowrl(str(path))[2]


@pytest.mark.parametrize("one", [["--json"], ["--output", "p.json"]])
def test_a_plan_that_is_written_has_every_reason_without_explain(flowrl: Run, one: list[str]):
    code, out, err = flowrl(CONFIG, *NODE, *one, "--explain")
    assert (code, out) == (2, "")
    assert f"--explain: {one[0]} and --explain do not go together" in err


def test_what_would_not_change_a_written_plan_is_refused(flowrl: Run, tmp_path: Path):
    path = str(tmp_path / "a.plan.json")
    assert flowrl("configs/quickstart.yaml", "-o", path)[0] == 0
    for words in (NODE, ["--pin", "rollout.tp=2"], ["train.steps=3"]):
        code, out, err = flowrl(path, *words)
        assert (code, out) == (2, "")
        assert f"{path}: this is a plan's file, and {words[0]} needs a configuration" in err
    assert flowrl(path, "--explain")[0] == flowrl(path, "--top", "1")[0] == 0


def test_lengths_come_from_a_file_a_config_or_an_assumption_that_is_told(
    flowrl: Run, tmp_path: Path
):
    lengths = tmp_path / "lengths.jsonl"
    lengths.write_text('{"num_tokens": 10}\n{"num_tokens": 20}\n')
    _, short, _ = flowrl(CONFIG, *SMALL, *NODE, f"plan.lengths={lengths}", "--json")
    _, longer, _ = flowrl(CONFIG, *SMALL, *NODE, "--json")
    words = ["plan.mean_response_tokens=null", "plan.sigma=null", "plan.mean_prompt_tokens=null"]
    _, assumed, _ = flowrl(CONFIG, *SMALL, *NODE, *words, "--json")
    steps = [PlacementPlan.from_json(out).prediction.step_s for out in (short, longer, assumed)]
    assert steps[0] is not None
    assert steps[1] is not None
    assert steps[0] < steps[1]
    notes = "\n".join(PlacementPlan.from_json(assumed).notes)
    assert "assumed: responses of 512 tokens on average" in notes
    assert "assumed: prompts of 512 tokens on average" in notes
    assert "assumed: responses" not in "\n".join(PlacementPlan.from_json(longer).notes)


def test_a_shape_without_weights_is_planned_and_not_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(ROOT)
    model = json.loads((ROOT / "configs/models/qwen2.5-0.5b.json").read_text())
    model |= {"num_hidden_layers": 1, "hidden_size": 14, "intermediate_size": 8, "vocab_size": 400}
    shape = tmp_path / "tiny.json"
    shape.write_text(json.dumps(model))
    words = ["data.train=tests/data/gsm8k_test.jsonl", f"roles.actor.model={shape}"]
    words += [
        "data.max_prompt_tokens=16",
        "train.sampling.max_tokens=16",
        "train.prompts_per_step=4",
    ]
    words += [
        "plan.mean_prompt_tokens=8",
        "plan.mean_response_tokens=8",
        "data.prompt='{question}'",
    ]
    with pytest.raises(SystemExit) as ended:
        main(["run", CONFIG, *words, f"runtime.runs={tmp_path}"])
    assert ended.value.code == 2
    assert "has the shape of a model, and no weights to run" in capsys.readouterr().err


def test_a_cluster_file_that_is_missing_is_what_is_told_first(flowrl: Run):
    code, _, said = flowrl(CONFIG, "--cluster", "nope.yaml")
    assert code == 2
    assert said.splitlines()[0].endswith("no such cluster file: nope.yaml")


def test_a_ray_address_keeps_its_slashes():
    assert machine_words("ray://head:10001", ()) == ["cluster=ray://head:10001"]


def test_lengths_come_from_the_folder_of_a_run_too(flowrl: Run, tmp_path: Path):
    (tmp_path / "samples.jsonl").write_text('{"num_tokens": 100}\n')
    words = [CONFIG, *SMALL, *NODE, "--json"]
    of_file = flowrl(*words, f"plan.lengths={tmp_path / 'samples.jsonl'}")
    assert of_file[0] == 0
    assert flowrl(*words, f"plan.lengths={tmp_path}") == of_file
    (tmp_path / "empty").mkdir()
    code, _, err = flowrl(*words, f"plan.lengths={tmp_path / 'empty'}")
    assert code == 2
    assert "lengths cannot be read: No such file or directory\n" in err
    assert f"found: {tmp_path / 'empty' / 'samples.jsonl'}" in err


def test_a_kind_is_of_the_stages_that_draw_and_of_the_last(flowrl: Run):
    words = [CONFIG, *SMALL, *NODE, "stages=[sft, grpo]", "plan.kind=asynchronous"]
    code, out, _ = flowrl(*words, "train.max_staleness=1")
    assert code == 0
    warm, drawn = out.split("plan of grpo")
    assert "schedule: temporal: actor.update on 8" in warm
    assert "schedule: asynchronous: " in drawn
    code, _, err = flowrl(*words)
    assert code == 2
    assert "no sample may be generated ahead of the trainer" in err
    assert "to fix: set train.max_staleness to 1 or more, or ask for another kind" in err


def test_a_plan_notes_samples_that_a_step_does_not_learn_from_and_that_it_leaves_out(flowrl: Run):
    words = ["train.refill=true", "train.policies.over_sampling.members=2"]
    note = "assumed: only samples that a step learns from are generated (train.refill and "
    assert note + "train.policies.over_sampling may" in flowrl(CONFIG, *SMALL, *NODE, *words)[1]
    assert "that a step learns from" not in flowrl(CONFIG, *SMALL, *NODE)[1]


def test_a_profile_that_is_not_there_is_told_with_the_word_that_names_it(flowrl: Run):
    code, _, err = flowrl(CONFIG, *SMALL, *NODE, "plan.profile=none.json")
    assert code == 2
    assert "command line (plan.profile=none.json): the profile cannot be read: No such file" in err
    assert "  found: none.json\n" in err


def test_sizes_that_a_library_does_not_split_are_refused_in_a_sentence(flowrl: Run):
    code, _, err = flowrl(CONFIG, *SMALL, *NODE, "plan.trainer=fsdp", "--pin", "actor.tp=2")
    assert code == 2
    assert (
        "actor.update cannot run so: tp=2 splits what the library does not (it has cp, dp, fsdp)\n"
    ) in err


def test_the_nearest_size_in_a_plan_is_among_those_that_are_offered_for_a_pin(flowrl: Run):
    # 40 heads: 10 and 20 divide them, and do not fit a node of 8.
    words = [CONFIG, *SMALL, *NODE, "roles.actor.model=configs/models/qwen2.5-14b.json"]
    told = flowrl(*words, "--explain")[1]
    assert "tp=3, 6-7, 9, 11-16: do not divide 40 query heads; possible 1, 2, 4, 8\n" in told
    err = flowrl(*words, "--pin", "rollout.tp=16")[2]
    assert "tp=16 does not divide 40 query heads\n" in err
    assert "to fix: set tp to 4 or 8, or leave rollout.tp=16 out\n" in err


def test_a_mistyped_environment_is_told_with_the_roles_that_there_are(flowrl: Run):
    config = "configs/agent_qwen25_7b.yaml"
    code, _, err = flowrl(config, *NODE, "plan.environments.worlds.step_s=1")
    assert code == 2
    assert "(plan.environments.worlds.step_s=1): there is no role 'worlds'\n" in err
    assert "expected: one of world\n" in err
    assert "did you mean 'world'?" in err
    code, _, err = flowrl(
        config, *NODE, "plan.environments.world=null", "plan.environments.world.device=cpu"
    )
    assert "'step_s' is missing in plan.environments.world\n" in err


def test_pins_without_which_the_hosts_hold_a_job_are_to_be_left_out_before_all_else(flowrl: Run):
    words = ["configs/grpo_qwen25_32b.yaml", "--cluster", "configs/clusters/a100_1x8.yaml"]
    pins = ["reference.devices=5-6", "rollout.devices=1-3"]
    code, _, err = flowrl(*words, *[word for pin in pins for word in ("--pin", pin)])
    assert code == 2
    assert "puts more into the memory of their hosts than these have\n" in err
    assert f"to fix: leave {pins[0]} or {pins[1]} out, or take hosts with " in err
    for pin in pins:
        assert flowrl(*words, "--pin", pin)[0] == 0
