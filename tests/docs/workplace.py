"""Where the blocks of one document run: a folder with the repository's configs and programs.

A workflow that a Python block defines is compiled, so that every program of a document is one.
Commands of `flowrl` run in this process, through the same `main` that the script calls, so that
torch is imported once for all of them. Other commands run in a shell.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flowrl.cli import main
from flowrl.compiler import lower
from flowrl.program.workflow import Workflow
from tests.docs.markdown import Block, Command, commands_of
from tests.sim.quick_profiles import quick_profiles

__all__ = ["Workplace", "assert_shown", "workplace"]

_NUMBER = re.compile(r"\d[\d,]*(\.\d+)?%?")
_UNITS = re.compile(r"# ?(B|KiB|MiB|GiB|TiB|ms|s|m|h|k|M)\b")

# What `pip install FOLDER` does, offline and for this document alone.
_INSTALL = (
    "python -m pip install --quiet --disable-pip-version-check --no-index --no-deps "
    "--no-build-isolation --upgrade --target site"
)


@dataclass
class Workplace:
    """A folder, and what the document's Python blocks have defined so far."""

    folder: Path
    names: dict[str, object]

    def run(self, block: Block) -> str:
        """Executes a block of any kind; returns what a Python block printed."""
        if "file" in block.directives:
            path = self.folder / block.directives["file"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif block.kind == "python":
            return self._python(block)
        elif block.kind == "console":
            for command in commands_of(block):
                self._command(command, block)
        return ""

    def _python(self, block: Block) -> str:
        # A real file, because error messages and graphs name the lines of a workflow.
        path = self.folder / f"lines_{block.line}.py"
        path.write_text(block.text)
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(block.text, path.name, "exec"), self.names)  # noqa: S102  (documented code)
        for value in [*self.names.values()]:
            if isinstance(value, Workflow) and value.source.file == path.name:
                lower(value)
        return output.getvalue()

    def _command(self, command: Command, block: Block) -> None:
        words = shlex.split(command.text, comments=True)
        if words[0] == "flowrl":
            if words[1:2] in (["run"], ["simulate"]):
                words += shlex.split(block.directives.get("run with", ""))
            code, real = _flowrl(words[1:])
        elif words[:2] == ["pip", "install"]:
            code, real = _shell(f"{_INSTALL} {' '.join(words[2:])}")
            self.forget_modules()
        else:
            code, real = _shell(command.text)
        assert code == _expected_code(command), f"$ {command.text}\nended with {code}:\n{real}"
        if command.shown:
            shortened = "run with" in block.directives
            masked = shortened or "numbers vary" in block.directives
            assert_shown(command, real, masked=masked)

    def forget_modules(self) -> None:
        """Has packages in `site` imported anew, as a new process would."""
        importlib.invalidate_caches()
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", "")).startswith(str(self.folder)):
                del sys.modules[name]


def _flowrl(arguments: list[str]) -> tuple[int, str]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            main(arguments)
        except SystemExit as end:
            return int(str(end.code)), output.getvalue()
    raise AssertionError("main() returned; it ends the process")


def _shell(text: str) -> tuple[int, str]:
    """Runs a command with this interpreter's scripts first on the path."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    result = subprocess.run(
        ["bash", "-c", text],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        env={**os.environ, "PATH": path},
    )
    return result.returncode, result.stdout


def _expected_code(command: Command) -> int:
    told = re.search(r"^(internal )?error: ", command.shown, flags=re.M)
    if told is None:
        return 0
    return 1 if told[1] else 2


def assert_shown(command: Command, real: str, *, masked: bool = False) -> None:
    """Compares output as a document shows it with the real one.

    `...` on a line of its own stands for any number of lines, elsewhere for any text. With `masked`
    numbers and their units are equal to any others, and the shown lines must occur in order.
    """
    shown, found = command.shown.strip("\n"), real.strip("\n")
    if masked:
        _assert_in_order(command, found)
        return
    lines = [re.escape(line).replace(r"\.\.\.", ".*") for line in shown.splitlines()]
    pattern = "\n".join(lines)
    pattern = re.sub(r"(^|\n)\.\*(?=\n|$)", lambda match: rf"{match[1]}(?:.*\n?)*?", pattern)
    pattern = pattern.replace("(?:.*\\n?)*?\n", "(?:.*\\n)*?")
    found = "\n".join(line.rstrip() for line in found.splitlines())
    assert re.fullmatch(pattern, found), (
        f"$ {command.text}\nthe document shows\n{shown}\nbut it prints\n{found}"
    )


def _assert_in_order(command: Command, real: str) -> None:
    rest = iter([_mask(line) for line in real.splitlines()])
    for line in command.shown.splitlines():
        if line.strip() in ("...", ""):
            continue
        wanted = re.escape(_mask(line)).replace(r"\.\.\.", ".*")
        assert any(re.fullmatch(wanted, found) for found in rest), (
            f"$ {command.text}\nthe document shows\n{line}\nbut it prints\n{real}"
        )


def _mask(line: str) -> str:
    masked = _UNITS.sub("#", _NUMBER.sub("#", line))
    return re.sub(r"(# ?)+", "#", re.sub(r" +", " ", masked)).strip()


@contextmanager
def workplace(folder: Path, repository: Path) -> Iterator[Workplace]:
    """Sets up `folder` and makes it the current one; packages installed in `folder/site` are found.

    `data/gsm8k` holds a small excerpt of the real data set; the recorded numbers of other libraries
    are where the repository has them.
    """
    for name in ("configs", "examples", "graphs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(repository / name, folder / name, ignore=ignored)
    data = folder / "data" / "gsm8k"
    data.mkdir(parents=True)
    for split in ("train", "test"):
        shutil.copy(repository / "tests" / "data" / f"gsm8k_{split}.jsonl", data / f"{split}.jsonl")
    (folder / "tests" / "data").mkdir(parents=True)
    recorded = Path("tests", "data", "oracles_small.json")
    shutil.copy(repository / recorded, folder / recorded)
    site = str(folder / "site")
    paths, environment = list(sys.path), dict(os.environ)
    place = Workplace(folder, {"__name__": "document"})
    sys.path.insert(0, site)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [site, environment.get("PYTHONPATH")]))
    os.environ["COLUMNS"] = "100"
    try:
        with contextlib.chdir(folder), quick_profiles():
            yield place
    finally:
        sys.path[:] = paths
        os.environ.clear()
        os.environ.update(environment)
        place.forget_modules()
