"""Scripts and RayJobs of `flowrl launch`; none of them is submitted to Slurm or Kubernetes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from flowrl.cli import launch as module
from flowrl.cli.launch import Needs, hosts_script, ray_job, slurm_script
from flowrl.errors import FlowError
from flowrl.runtime import ray_pool
from tests.cli.command_line import ROOT, Run, runner

EXPECTED = Path(__file__).parent / "launch"
BIN = Path("/opt/flow rl/bin")
ODD = Needs(
    name="9 My run's $(name)",
    words=["my configs/a$b.yaml", "name=it's `new`", "executor=ray"],
    folder=Path("/data/o'brien & co"),
    num_nodes=3,
    num_cpus=12,
    accelerators=8,
    kind="cuda",
)
PLAIN = Needs(
    name="quickstart",
    words=["configs/quickstart.yaml", "executor=ray"],
    folder=Path("/work"),
    num_nodes=1,
    num_cpus=2,
)
TEXTS = {
    "slurm.sh": slurm_script(ODD, BIN),
    "hosts.sh": hosts_script(ODD, ["first", "me@second", "10.0.0.3"], BIN),
    "rayjob.yaml": ray_job(ODD, "registry/flowrl:1", "work"),
}


@pytest.fixture
def launch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(ROOT)
    return runner(capsys, "launch")


@pytest.mark.parametrize("name", TEXTS)
def test_texts_are_those_that_were_looked_at(name: str) -> None:
    assert TEXTS[name] == (EXPECTED / name).read_text()


@pytest.mark.parametrize("name", ["slurm.sh", "hosts.sh"])
def test_scripts_are_bash(name: str) -> None:
    subprocess.run(["bash", "-n", "-c", TEXTS[name]], check=True)


@pytest.mark.parametrize("text", [*TEXTS.values()], ids=[*TEXTS])
def test_words_and_folders_with_odd_characters_arrive_as_they_are(text: str) -> None:
    if text.startswith("apiVersion"):
        command = yaml.safe_load(text)["spec"]["entrypoint"]
    else:
        lines = [line for line in text.splitlines() if line.startswith(("cd ", "[ $# -gt 0 ]"))]
        command = "\n".join([*lines, 'exec flowrl run "$@"'])
    shown = """cd() { printf '%s\\0' "${@: -1}"; }; exec() { shift 2; printf '%s\\0' "$@"; }"""
    script = f"{shown}\n{command}"
    done = subprocess.run(["bash", "-euc", script], check=True, capture_output=True, text=True)
    assert done.stdout.split("\0")[:-1] == [str(ODD.folder), *ODD.words]


@pytest.mark.parametrize("needs", [ODD, PLAIN], ids=["several nodes", "one node"])
def test_a_ray_job_has_the_fields_of_kuberay(needs: Needs) -> None:
    job = yaml.safe_load(ray_job(needs, "registry/flowrl:1", "work"))
    schema = json.loads((EXPECTED / "rayjob.schema.json").read_text())
    Draft202012Validator.check_schema(schema)
    Draft202012Validator(schema).validate(job)
    assert job["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    workers = job["spec"]["rayClusterSpec"].get("workerGroupSpecs", [])
    assert [group["replicas"] for group in workers] == [2] * (needs is ODD)


def test_npus_are_asked_for_by_their_own_names() -> None:
    npus = Needs(
        name="n", words=[], folder=Path("/"), num_nodes=1, num_cpus=1, accelerators=16, kind="npu"
    )
    assert "#SBATCH --gres=npu:16\n" in slurm_script(npus, BIN)
    pod = yaml.safe_load(ray_job(npus, "i", "c"))["spec"]["rayClusterSpec"]["headGroupSpec"]
    (container,) = pod["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"cpu": 1, "huawei.com/Ascend910": 16}


def test_a_plan_of_one_device_needs_a_node_with_places_for_its_engines(
    launch: Run, tmp_path: Path
) -> None:
    file = tmp_path / "run.sh"
    code, out, err = launch(
        "configs/quickstart.yaml", "roles.actor.num_engines=3", "--slurm", "-o", str(file)
    )
    assert (code, out) == (0, "")
    # The trainer, three engines and a scorer.
    assert err == f"the plan needs 1 node, 5 CPUs each; to submit it, {SBATCH} {file}\n"
    text = file.read_text()
    assert "#SBATCH --cpus-per-task=5\n" in text
    words = "configs/quickstart.yaml roles.actor.num_engines=3 executor=ray cluster=auto"
    assert f"set -- {words}\n" in text


SBATCH = "sbatch --partition=NAME --time=TIME"


def test_a_plan_over_many_devices_needs_its_nodes_and_says_that_nothing_runs_it(
    launch: Run,
) -> None:
    code, out, err = launch(
        "configs/grpo_qwen25_7b.yaml", "--cluster", "configs/clusters/h100_8x8.yaml", "--slurm"
    )
    assert code == 0
    assert "#SBATCH --nodes=8\n" in out
    assert "#SBATCH --gpus-per-node=8\n" in out
    assert "warning: the executor does not run plans over many devices" in err
    assert "8 nodes, 9 CPUs each, 8 GPUs each" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "0 of --slurm, --hosts FILE and --kuberay"),
        (["--slurm", "--kuberay"], "2 of --slurm"),
        (["--kuberay"], "--kuberay needs --image and --claim"),
        (["--slurm", "--claim", "c"], "--kuberay is not there, which alone takes --claim"),
        (["--hosts", "none"], "the file of hosts cannot be read"),
        (["--slurm", "-o", "none/run.sh"], "no folder none"),
        (["--slurm", "train.stepss=1"], "train.stepss"),
    ],
)
def test_wrong_options_are_refused(launch: Run, words: list[str], said: str) -> None:
    code, out, err = launch("configs/quickstart.yaml", *words)
    assert (code, out) == (2, "")
    assert said in err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a\n\n-oProxyCommand=x\n", ":3: this line names no host"),
        ("a\nb # the second\na\n", ":3: this line names no host, or one that is named before"),
        ("# none\n", "the file names no host"),
    ],
)
def test_a_file_of_hosts_is_refused_with_its_line(
    launch: Run, tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)
    code, _, err = launch("configs/quickstart.yaml", "--hosts", str(file))
    assert code == 2
    assert said in err


def test_fewer_hosts_than_nodes_are_refused() -> None:
    with pytest.raises(FlowError, match="the plan needs more machines") as caught:
        hosts_script(ODD, ["a", "b"], BIN)
    assert (caught.value.found, caught.value.expected) == ("2 hosts", "at least 3")


def test_scripts_wait_until_all_nodes_have_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    node = {"Alive": True}
    answers = iter([FlowError("nothing listens"), [node], [node, {"Alive": False}], [node, node]])

    def ask(address: str) -> object:
        assert address == "10.0.0.1:6379"
        answer = next(answers)
        if isinstance(answer, FlowError):
            raise answer
        return answer

    monkeypatch.setattr(ray_pool, "ask_ray", ask)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    module._wait("10.0.0.1:6379", 2)
    assert next(answers, None) is None


def test_a_script_says_how_many_nodes_joined_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_pool, "ask_ray", lambda address: [{"Alive": True}])
    monkeypatch.setattr(module, "_JOIN_S", 0.0)
    with pytest.raises(FlowError, match="not all nodes have joined") as caught:
        module._wait("a:1", 2)
    assert (caught.value.found, caught.value.expected) == ("1", "2")
