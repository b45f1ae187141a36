"""`flowrl size`: the fewest devices, sweeps, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowrl.cli.size import numbers_of
from flowrl.plan import PlacementPlan
from tests.cli.command_line import ROOT, Run, runner

CONFIG = "configs/grpo_qwen25_7b.yaml"
SMALL = ["train.prompts_per_step=64", "train.sampling.max_tokens=1024"]
SMALL += ["plan.mean_response_tokens=300", "roles.actor.num_slots=64"]
CLUSTER = ["--cluster", "configs/clusters/h100_1x8.yaml"]
H100 = ["--device", "H100-SXM-80GB"]


@pytest.fixture
def size(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(ROOT)
    return runner(capsys, "size")


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(capsys, "plan")


def test_the_fewest_devices_and_what_more_of_them_give(size: Run):
    code, out, _ = size(CONFIG, *SMALL, "--device", "A100-SXM-80GB", "--json")
    assert code == 0
    least = json.loads(out)["devices"]
    words = ["--device", "a100-sxm-80gb", "--sweep", f"devices={least},{8 * least}"]
    code, out, _ = size(CONFIG, *SMALL, *words)
    assert code == 0
    rows = [line.split() for line in out.splitlines()[2:-1]]
    assert [row[0] for row in rows] == [str(least), str(8 * least)]
    code, out, _ = size(CONFIG, *SMALL, *CLUSTER, "--sweep", "devices=4:16", "--json")
    assert [one["devices"] for one in json.loads(out)] == [4, 8, 16]


NODE_OF = """\
nodes:
  - name: h100
    memory_gib: {host}
    cores: 64
    devices:
      - {{name: H100-SXM-80GB, count: 8, memory_gib: {device}}}
"""


@pytest.mark.parametrize(
    ("host", "device", "on_8", "least"), [(2048, 80, 0, 1), (64, 80, 0, 3), (2048, 8, 2, 32)]
)
def test_the_fewest_devices_are_those_of_the_file_with_its_memory_and_its_hosts(
    size: Run, plan: Run, tmp_path: Path, host: int, device: int, on_8: int, least: int
):
    file = tmp_path / "nodes.yaml"
    file.write_text(NODE_OF.format(host=host, device=device))
    code, out, _ = size(CONFIG, *SMALL, "--cluster", str(file), "--json")
    assert (code, json.loads(out)["devices"]) == (0, least)
    assert plan(CONFIG, *SMALL, "--cluster", str(file))[0] == on_8
    words = ["--cluster", str(file), "--sweep", f"devices={least},{2 * least}", "--json"]
    rows = json.loads(size(CONFIG, *SMALL, *words)[1])
    assert rows[0] == json.loads(out)


def test_hosts_that_do_not_hold_the_fastest_plan_hold_another(size: Run, plan: Run, tmp_path: Path):
    file = tmp_path / "nodes.yaml"
    file.write_text(NODE_OF.format(host=512, device=79.25))
    words = ["configs/grpo_qwen25_32b.yaml", "--cluster", str(file), "--json"]
    code, out, err = plan(*words)
    assert (code, err) == (0, "")
    least = json.loads(size(*words)[1])
    assert least["devices"] == 8
    # The plan takes plainer ways where they cost next to nothing, and prices each sync anew.
    assert PlacementPlan.from_json(out).prediction.step_s == pytest.approx(
        least["step_s"], rel=0.05
    )


def test_what_a_number_of_devices_gives_does_not_depend_on_the_others(size: Run):
    def rows(numbers: str) -> list[object]:
        words = [*H100, "--sweep", f"devices={numbers}", "--json"]
        code, out, _ = size(CONFIG, *SMALL, *words)
        assert code == 0
        return list(json.loads(out))

    assert rows("3,6,16") == rows("3") + rows("6") + rows("16")


@pytest.mark.parametrize(("node_size", "least"), [("3", 1), ("7", 1), ("100", 3)])
def test_the_fewest_devices_are_found_in_nodes_that_do_not_divide_64(
    size: Run, node_size: str, least: int
):
    words = [*H100, "--node-size", node_size, "--json"]
    code, out, err = size(CONFIG, *SMALL, *words)
    assert (code, err) == (0, "")
    assert json.loads(out)["devices"] == least


def test_sizes_are_told_for_each_kind_of_device_of_a_cluster(size: Run):
    cluster = "configs/clusters/h100_2x8_h20_4x8.yaml"
    code, printed, _ = size(CONFIG, "--cluster", cluster, "--json")
    assert code == 0
    found = json.loads(printed)
    assert list(found) == ["H100-SXM-80GB", "H20-96GB"]
    assert found["H100-SXM-80GB"]["step_s"] < found["H20-96GB"]["step_s"]


@pytest.mark.parametrize("numbers", ["100000000", "1:100000000", "8,100000000"])
def test_pools_that_no_search_ends_on_are_refused(size: Run, numbers: str):
    words = (*H100, "--node-size", "1", "--sweep", f"devices={numbers}")
    code, _, said = size(CONFIG, *words)
    assert code == 2
    assert "so many are not planned for" in said
    assert "up to 16384 devices" in said


def test_large_pools_are_told_of_while_they_are_planned_for(size: Run):
    words = (*H100, "--sweep", "devices=64,1024")
    code, printed, said = size(CONFIG, *words)
    assert code == 0
    assert said == "planning for 1024 devices ...\n"
    assert "planning for" not in printed


def test_sizes_say_which_hosts_they_assume(size: Run):
    said = "hosts of 2.0 TiB and 192 cores for 4 devices are assumed; --cluster FILE says others\n"
    words = [CONFIG, *SMALL, *H100, "--node-size", "4"]
    assert said in size(*words)[1]
    assert "of stage " not in size(*words)[1]
    several = size(*words, "stages=[sft, grpo]")[1]
    assert several.endswith("of stage grpo, the last of sft -> grpo\n")
    assert said in size(*words, "--sweep", "devices=4:8")[1]


def test_a_cluster_beside_a_device_is_not_ignored(size: Run, mixed: str):
    words = ["--cluster", mixed, *H100]
    for asked in ([], ["--sweep", "devices=8"]):
        code, out, err = size(CONFIG, *words, *asked)
        assert (code, out) == (2, "")
        assert "--device and --cluster do not go together" in err


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("devices=8:48", [8, 16, 32, 48]),
        ("devices=8:64", [8, 16, 32, 64]),
        ("devices=4:20", [4, 8, 16]),
        ("devices=8,24,64", [8, 24, 64]),
    ],
)
def test_a_sweep_ends_with_the_last_number_where_that_is_whole_nodes(text: str, numbers: list[int]):
    assert numbers_of(text, 8) == numbers


@pytest.fixture
def mixed(tmp_path: Path) -> str:
    """A cluster with devices that nothing is known of but their memory."""
    path = tmp_path / "mixed.yaml"
    path.write_text(
        "nodes:\n"
        "  - {name: a, memory_gib: 1024, cores: 96, devices: [{name: H100-SXM-80GB, count: 8}]}\n"
        "  - name: b\n"
        "    count: 2\n"
        "    memory_gib: 256\n    cores: 64\n"
        "    devices: [{type: cuda, name: a GPU, memory_gib: 48, count: 4}]\n"
    )
    return str(path)


def test_devices_without_rates_are_told_to_be_left_idle(size: Run, plan: Run, mixed: str):
    code, out, _ = plan(CONFIG, *SMALL, "--cluster", mixed)
    assert code == 0
    assert (
        "  8 x a GPU (b-[0-1]/cuda:[0-3]): left idle, for no time is known of them, which takes "
        "tflops, memory_tb_per_s, host_gb_per_s and links (nvlink, hccs or pcie, "
        "and network) in the cluster file\n"
    ) in out
    code, out, err = size(CONFIG, *SMALL, "--cluster", mixed)
    assert code == 0
    assert f"warning: --cluster {mixed}: a GPU is left out, because its times are unknown" in err
    # 0.8 of 1 TiB for 8 devices
    assert "  hosts as the cluster has them: each device may fill 102 GiB of one\n" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "command line: `flowrl size` needs to know which devices are counted"),
        (
            [*H100, "--node-size", "1000000000"],
            "--node-size: Input should be less than or equal to 1024",
        ),
        ([*CLUSTER, "--node-size", "4"], "--node-size belongs to --device"),
        (["--device", "CPU"], "`flowrl size` counts accelerators, and a CPU is none"),
        (["--device", "cpu", "--sweep", "devices=8"], "counts accelerators, and a CPU is none"),
        (["--cluster", "configs/clusters/laptop.yaml"], "counts accelerators"),
        (["--device", "H1000"], "no such device in the hardware catalogue"),
        ([*CLUSTER, "--sweep", "devices=8:4"], "not a range of numbers of devices"),
        ([*CLUSTER, "--sweep", "devices=8,12"], "12 devices are no whole nodes of 8"),
        ([*CLUSTER, "--pin", "rollout"], "a pin says a number or devices"),
    ],
)
def test_mistakes_end_with_2_and_say_what_to_do(size: Run, words: list[str], said: str):
    code, out, err = size(CONFIG, *SMALL, *words)
    assert (code, out) == (2, "")
    assert said in err


def test_a_plan_has_no_sizes(size: Run, plan: Run, tmp_path: Path):
    path = str(tmp_path / "a.plan.json")
    assert plan(str(ROOT / "configs/quickstart.yaml"), "-o", path)[0] == 0
    code, out, err = size(path, *H100)
    assert (code, out) == (2, "")
    assert f"{path}: this is a plan's file, and `flowrl size` needs a configuration" in err
    assert f"flowrl plan {path}" in err
