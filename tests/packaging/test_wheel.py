"""The wheel, built through the sdist and installed outside the source tree, is whole.

The clean environment sees the dependencies of the environment that runs the tests, through a
folder of links that leaves out whatever belongs to flowrl; so the three packages can come from
nowhere but the wheel, and nothing is downloaded.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGES = {
    "flowrl": "flowrl",
    "flowrl_graphs": "graphs/flowrl_graphs",
    "flowrl_backends": "backends/flowrl_backends",
}


PROGRAMS = "graphs/flowrl_graphs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """The two distributions, and an environment that holds the wheel."""

    sdist: Path
    wheel: Path
    environment: Path

    def python(self, code: str) -> str:
        """What `code` prints in the environment, away from the source tree.

        -I keeps PYTHONPATH and the current directory off `sys.path`.
        """
        return run(str(self.environment / "bin/python"), "-I", "-c", code, cwd=self.environment)

    def names_in_wheel(self) -> list[str]:
        with zipfile.ZipFile(self.wheel) as archive:
            return archive.namelist()

    def names_in_sdist(self) -> list[str]:
        with tarfile.open(self.sdist) as archive:
            return [name.partition("/")[2] for name in archive.getnames()]


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def link_dependencies(environment: Path) -> None:
    links = environment / "dependencies"
    links.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "flowrl" not in entry.name and entry.suffix != ".pth":
            (links / entry.name).symlink_to(entry)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(f"{links}\n")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Built:
    folder = tmp_path_factory.mktemp("packaging")
    # Without --sdist or --wheel, build makes the sdist first and the wheel from it alone.
    build = ["-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(repository)]
    run(sys.executable, *build, cwd=folder)
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    (wheel,) = (folder / "dist").glob("*.whl")
    environment = folder / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", str(environment), cwd=folder)
    python = str(environment / "bin/python")
    install = ["install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    run(sys.executable, "-m", "pip", "--python", python, *install, cwd=folder)
    link_dependencies(environment)
    return Built(sdist=sdist, wheel=wheel, environment=environment)


def test_the_three_packages_are_imported_from_the_wheel(built: Built) -> None:
    code = f"""
import importlib, json
modules = [importlib.import_module(name) for name in {list(PACKAGES)}]
print(json.dumps([module.__file__ for module in modules]))
"""
    files = json.loads(built.python(code))
    assert len(files) == 3
    for file in files:
        assert Path(file).is_relative_to(built.environment)


def test_each_package_says_that_it_is_typed(built: Built) -> None:
    names = built.names_in_wheel()
    for package in PACKAGES:
        assert f"{package}/py.typed" in names


def test_no_module_is_lost_and_nothing_else_is_packed(built: Built, repository: Path) -> None:
    expected = {
        f"{package}/{path.relative_to(repository / folder)}"
        for package, folder in PACKAGES.items()
        for path in (repository / folder).rglob("*.py")
    }
    packed = {name for name in built.names_in_wheel() if ".dist-info/" not in name}
    assert {name for name in packed if name.endswith(".py")} == expected
    assert {name.partition("/")[0] for name in packed} == set(PACKAGES)


def test_the_plugins_of_the_wheel_are_listed_and_load(built: Built) -> None:
    code = """
import json
from flowrl.backend.registry import available
print(json.dumps([(f.name, f.distribution, f.version, str(f.error)) for f in available()]))
"""
    assert json.loads(built.python(code)) == [
        ["environment", "flowrl", "0.1.0", "None"],
        ["sglang", "flowrl", "0.1.0", "None"],
        ["torch", "flowrl", "0.1.0", "None"],
        ["verify", "flowrl", "0.1.0", "None"],
        ["vllm", "flowrl", "0.1.0", "None"],
    ]


def test_the_workflows_of_the_wheel_are_listed_and_load(built: Built, repository: Path) -> None:
    code = """
from flowrl.entry_points import entries
for entry in entries("flowrl.graphs"):
    print(entry.name, entry.load().__class__.__name__)
"""
    programs = [path.stem for path in sorted((repository / PROGRAMS).glob("[!_]*.py"))]
    assert built.python(code).split("\n")[:-1] == [f"{name} Workflow" for name in programs]


def test_the_hardware_catalogue_comes_with_the_wheel(built: Built, repository: Path) -> None:
    code = """
from flowrl.cluster.hardware import _FOLDERS, catalogue
print(_FOLDERS[0].is_dir(), _FOLDERS[1].exists(), *catalogue())
"""
    packed, checkout, *devices = built.python(code).split()
    assert (packed, checkout) == ("True", "False")
    text = "".join(p.read_text() for p in (repository / "configs/hardware").glob("*.yaml"))
    assert len(devices) == text.count("bf16_tflops:") - text.count("measured: {bf16_tflops:")


def test_the_command_is_installed_and_runs_outside_the_source_tree(built: Built) -> None:
    command = str(built.environment / "bin/flowrl")
    assert "Usage" in run(command, "--help", cwd=built.environment)


def test_the_extras_are_declared(built: Built) -> None:
    code = """
from importlib.metadata import metadata
print(*metadata("flowrl").get_all("Provides-Extra"))
"""
    extras = set(built.python(code).split())
    engines = {"torch", "ray", "sglang", "vllm", "megatron", "npu"}
    data_and_scores = {"data", "math", "grammar", "tensorboard", "wandb", "prometheus"}
    assert extras == {*engines, *data_and_scores, "viz", "aiconfigurator", "dev"}


def test_the_core_asks_for_no_tensor_library(built: Built) -> None:
    code = """
from importlib.metadata import requires
print(*[r.split(">")[0] for r in requires("flowrl") if "extra ==" not in r])
"""
    required = set(built.python(code).split())
    assert "numpy" in required
    assert not required & {"torch", "transformers", "ray", "sglang", "vllm"}


def test_the_sdist_holds_what_a_person_needs_to_work_on_it(built: Built) -> None:
    names = set(built.names_in_sdist())
    for name in (
        "LICENSE",
        "Makefile",
        "README.md",
        "pyproject.toml",
        "requirements/lock.txt",
        "configs/quickstart.yaml",
        "tests/packaging/test_wheel.py",
    ):
        assert name in names
    assert not [name for name in names if name.startswith((".venv", "runs/", "build/"))]
