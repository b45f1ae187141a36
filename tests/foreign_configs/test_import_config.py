"""Configurations of other frameworks: each key is listed once, and the result is planned."""

from __future__ import annotations

import importlib
import inspect
import json
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl import api
from flowrl.cli import main
from flowrl.config.load import load_config
from flowrl.config.yaml_tree import read_yaml_file
from flowrl.errors import ConfigError
from flowrl.foreign_configs import import_config
from flowrl.foreign_configs.command_line import options_of
from flowrl.foreign_configs.rules import ARGUMENTS, ESTIMATORS
from flowrl.foreign_configs.translate import Imported, Status

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "tests" / "data" / "foreign_configs"
CLUSTERS = {
    "verl_grpo.sh": "h100_8x8",
    "slime_grpo.sh": "h100_8x8",
    "mindspeed_rl_grpo.yaml": "ascend_a2_1x8",
    "mindrlhf_grpo.yaml": "ascend_a2_1x8",
}


@pytest.fixture(autouse=True)
def _in_the_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


PIECES = [
    *("A=", "A+=", "(", ")", "$((", "))", "${", "}", "[@]", "$A", "--a", "--b=", "x.y=", ":-", "'"),
    *('"', "\\", "\n", " ", ";", "#", "`", "[", "{", ": ", "1", "/", "*", "%", "train.py"),
]


def imported(tmp_path: Path, text: str, suffix: str = ".sh") -> Imported:
    path = tmp_path / f"job{suffix}"
    path.write_text(text, encoding="utf-8")
    return import_config(path)


def verl(tmp_path: Path, *overrides: str) -> Imported:
    words = ("data.train_files=d.parquet", "actor_rollout_ref.model.path=m", *overrides)
    return imported(tmp_path, f"python3 -m verl.trainer.main_ppo {' '.join(words)}")


def became(result: Imported, key: str) -> tuple[Status, dict[str, object]]:
    (entry,) = (entry for entry in result.entries if entry.key == key)
    return entry.outcome.status, dict(entry.outcome.writes)


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_result_of_an_example_compiles_and_is_planned(name):
    config = import_config(EXAMPLES / name).config
    cluster = f"cluster=configs/clusters/{CLUSTERS[name]}.yaml"
    compiled = api.compile(None, load_config(None, [cluster], base=config))
    assert compiled.plan.schedule is not None


def test_the_result_of_a_yaml_of_verl_is_traced():
    graphs = api.trace(load_config(None, base=import_config(EXAMPLES / "verl_ppo.yaml").config))
    assert "critic.update" in [node.id for node in graphs["ppo"].nodes]


@pytest.mark.parametrize("name", [path.name for path in sorted(EXAMPLES.glob("*.yaml"))])
def test_each_key_of_a_yaml_example_is_listed_once_in_its_order(name):
    leaves = [
        key
        for key, node in read_yaml_file(EXAMPLES / name).below()
        if not node.entries and not any(part.isdigit() for part in key.split("."))
    ]
    listed = [entry.key for entry in import_config(EXAMPLES / name).entries if not entry.is_default]
    assert listed == [key for key in leaves if not key.startswith("defaults.")]


@pytest.mark.parametrize(
    ("name", "num", "unknown"),
    [
        ("verl_grpo.sh", 40, ["trainer.my_own_switch"]),
        ("slime_grpo.sh", 46, []),
        ("mindspeed_rl_grpo.yaml", 73, ["rl_config.a_key_of_a_fork"]),
    ],
)
def test_each_key_of_an_example_is_listed_once(name, num, unknown):
    entries = [entry for entry in import_config(EXAMPLES / name).entries if not entry.is_default]
    assert len(entries) == num == len({entry.key for entry in entries})
    assert [entry.key for entry in entries if entry.outcome.status is Status.UNKNOWN] == unknown
    assert all(entry.outcome.note for entry in entries if entry.outcome.status is Status.LEFT_OUT)


def test_sizes_of_updates_become_their_number_by_the_unit_of_each_framework():
    results = {name: import_config(EXAMPLES / name) for name in CLUSTERS}
    sizes = {
        "verl_grpo.sh": ("actor_rollout_ref.actor.ppo_mini_batch_size", 512 // 128),
        "slime_grpo.sh": ("--global-batch-size", 64 * 8 // 256),
        "mindspeed_rl_grpo.yaml": ("rl_config.mini_batch_size", 64 * 8 // 128),
        # 16 prompts x 8 samples in updates of 2 x 2 samples; an update takes at least one prompt.
        "mindrlhf_grpo.yaml": ("rl_config.batch_size", 16),
    }
    for name, (key, updates) in sizes.items():
        expected = (Status.CHANGED, {"train.mini_batches": updates})
        assert became(results[name], key) == expected, name
    warmup = became(results["verl_grpo.sh"], "actor_rollout_ref.actor.optim.lr_warmup_steps")
    assert warmup == (Status.CHANGED, {"train.optimizer.warmup_updates": 10 * 4})
    rate = became(results["mindrlhf_grpo.yaml"], "actor_config.lr_schedule.min_lr")
    assert rate == (Status.CHANGED, {"train.optimizer.final_fraction": 2e-4})


def test_updates_that_do_not_divide_the_prompts_become_fewer_and_the_note_says_so(tmp_path):
    size = "actor_rollout_ref.actor.ppo_mini_batch_size"
    result = verl(tmp_path, "data.train_batch_size=100", f"{size}=33")
    assert became(result, size)[1] == {"train.mini_batches": 2}
    (entry,) = (entry for entry in result.entries if entry.key == size)
    assert "3 updates do not divide 100 prompts" in entry.outcome.note


def test_defaults_of_the_framework_are_written_and_listed_as_such(tmp_path):
    result = verl(tmp_path)
    defaults = [entry for entry in result.entries if entry.is_default]
    assert result.config["stages"] == ["ppo"]
    assert became(result, "algorithm.lam") == (Status.MAPPED, {"args.lam": 1.0})
    assert {"algorithm.adv_estimator", "critic.cliprange_value"} <= {e.key for e in defaults}


def test_the_first_rule_that_writes_a_key_has_it_and_the_other_says_so(tmp_path):
    actor = "actor_rollout_ref.actor"
    grpo = "algorithm.adv_estimator=grpo"
    result = verl(tmp_path, grpo, f"{actor}.clip_ratio=0.1", f"{actor}.clip_ratio_high=0.3")
    assert became(result, f"{actor}.clip_ratio") == (Status.MAPPED, {"args.clip_low": 0.1})
    (entry,) = (entry for entry in result.entries if entry.key == f"{actor}.clip_ratio")
    assert entry.outcome.note == f"args.clip_high comes from {actor}.clip_ratio_high"
    overridden = verl(tmp_path, "data.filter_overlong_prompts=True", "data.truncation=left")
    assert became(overridden, "data.truncation") == (Status.LEFT_OUT, {})


def test_a_penalty_moves_to_where_the_workflow_has_it(tmp_path):
    in_reward = ("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.01")
    ppo = verl(tmp_path, *in_reward)
    grpo = verl(tmp_path, *in_reward, "algorithm.adv_estimator=grpo")
    assert became(ppo, "algorithm.kl_ctrl.kl_coef") == (Status.MAPPED, {"args.kl": 0.01})
    assert became(grpo, "algorithm.kl_ctrl.kl_coef") == (Status.CHANGED, {"args.kl": 0.01})
    assert grpo.config["roles"]["reference"] == {"copy_of": "actor"}
    off = verl(tmp_path, "algorithm.kl_ctrl.kl_coef=0.01")
    assert became(off, "algorithm.kl_ctrl.kl_coef") == (Status.LEFT_OUT, {})


@pytest.mark.parametrize("estimator", ["grpo", "gae", "rloo", "remax", "reinforce_plus_plus"])
def test_each_estimator_of_verl_makes_a_config_that_is_traced(tmp_path, estimator):
    name = "actor_rollout_ref.model.path=Qwen2.5-7B"
    samples = "actor_rollout_ref.rollout.n=4"
    result = verl(tmp_path, f"algorithm.adv_estimator={estimator}", samples, name)
    assert Counter(entry.outcome.status for entry in result.entries)[Status.UNKNOWN] == 0
    graphs = api.trace(load_config(None, base=result.config))
    assert list(graphs) == [ESTIMATORS[estimator][0]]


def test_the_form_of_a_penalty_is_that_of_the_workflow(tmp_path):
    for workflow, form, status in (
        ("grpo", "low_var_kl", Status.MAPPED),
        ("grpo", "kl", Status.LEFT_OUT),
        ("gae", "kl", Status.MAPPED),
    ):
        result = verl(
            tmp_path, f"algorithm.adv_estimator={workflow}", f"algorithm.kl_penalty={form}"
        )
        assert became(result, "algorithm.kl_penalty") == (status, {})


def test_an_estimator_without_a_workflow_is_listed_as_changed(tmp_path):
    status, writes = became(
        verl(tmp_path, "algorithm.adv_estimator=opo"), "algorithm.adv_estimator"
    )
    assert (status, writes) == (Status.CHANGED, {"stages": ["grpo"]})


@pytest.mark.parametrize("workflow", ARGUMENTS)
def test_arguments_of_workflows_are_those_of_their_programs(workflow):
    program = getattr(importlib.import_module(f"flowrl_graphs.{workflow}"), workflow)
    parameters = inspect.signature(program.function).parameters
    assert {name for names in ARGUMENTS[workflow].values() for name in names} <= set(parameters)


def test_a_script_has_variables_arrays_arithmetic_and_commands_around_the_training(tmp_path):
    text = """
    # don't stop here
    DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
    steps=$(( (1024 + 2) * 3 )); MODEL=${MODEL:-"${ROOT:-m}"}
    ENV="{
      \\"env_vars\\": {\\"A\\": \\"1\\"}
    }"
    ARGS=(
       --hf-checkpoint $MODEL   # a comment
       #--load elsewhere
    )
    ARGS=(${ARGS[@]} --use-tensorboard)
    NONE=()
    ARGS+=(--prompt-data "d e.jsonl" --num-rollout $steps)
    if [ "$DIR" ]; then ray start --head --num-gpus 8; fi
    ray job submit --address=x -- python3 train.py --rollout-batch-size 4 \\
       ${ARGS[@]} ${NONE[@]} --rollout-num-gpus $GPUS --colocate --lr-decay-style linear 2>&1 "$@"
    pkill -9 python --not-a-key
    """
    values = {entry.key: entry.value for entry in imported(tmp_path, text).entries}
    own = {key: value for key, value in values.items() if not key.startswith("--d")}
    assert own | values == values
    assert values["--num-rollout"] == (1024 + 2) * 3
    assert values["--prompt-data"] == "d e.jsonl"
    assert values["--hf-checkpoint"] == "m"
    assert values["--rollout-num-gpus"] == "$GPUS"
    assert values["--colocate"] is values["--use-tensorboard"] is True
    assert values["--lr-decay-style"] == "linear"
    assert not {"--not-a-key", "--load", "--head", "--address"} & set(values)


@settings(max_examples=40)
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=6), max_size=30).map("".join))
def test_any_text_has_options_or_is_refused(text):
    with suppress(ConfigError):
        options_of(f"python train.py {text}", Path("any.sh"))


def test_a_value_that_the_file_does_not_set_is_noted(tmp_path):
    (entry,) = (
        entry
        for entry in verl(tmp_path, "trainer.experiment_name=$RUN_NAME").entries
        if entry.key == "trainer.experiment_name"
    )
    assert "does not set" in entry.outcome.note


@pytest.mark.parametrize(
    ("text", "suffix", "said"),
    [
        ("stages: [grpo]", ".yaml", "no configuration of verl or slime"),
        ("echo hello", ".sh", "no key of a training"),
        ("python train.py --hf-checkpoint 'm", ".sh", "No closing quotation"),
        ("python train.py --hf-checkpoint m --global-batch-size 8", ".sh", "has no number"),
    ],
)
def test_a_file_that_cannot_be_imported_is_refused(tmp_path, text, suffix, said):
    with pytest.raises(ConfigError, match=said):
        imported(tmp_path, text, suffix)


def test_another_framework_than_the_named_one_is_refused():
    with pytest.raises(ConfigError, match="no configuration of slime"):
        import_config(EXAMPLES / "verl_grpo.sh", "slime")


def test_the_command_prints_the_config_and_lists_the_keys(capfd, tmp_path):
    output = tmp_path / "config.yaml"
    file = str(EXAMPLES / "mindspeed_rl_grpo.yaml")
    for words in (["-o", str(output)], []):
        with pytest.raises(SystemExit) as end:
            main(["import-config", file, *words])
        assert not end.value.code
    out, err = capfd.readouterr()
    assert out == output.read_text(encoding="utf-8")
    assert load_config(output).config.train.mini_batches == 4
    assert "73 keys of MindSpeed-RL: 34 mapped, 6 changed in meaning" in err
    assert err.splitlines().count("unknown:") == 2


def test_the_command_prints_json(capfd):
    with pytest.raises(SystemExit):
        main(["import-config", str(EXAMPLES / "verl_ppo.yaml"), "--json"])
    out, err = capfd.readouterr()
    told = json.loads(out)
    assert (told["framework"], err) == ("verl", "")
    assert {"key", "value", "status", "writes", "note", "is_default"} == set(told["keys"][0])
    assert told["config"]["stages"] == ["ppo"]
