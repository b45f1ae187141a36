"""Functions of the user's own by name: references, and back."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from flowrl.errors import TraceError
from flowrl.specs import loss
from flowrl.user_files import load_function, reference_of
from tests.algo import own_functions

LOSS = """
import flowrl.specs.loss as loss

runs = globals().get("runs", 0) + 1

@loss.own()
def mine(logprobs, batch, *, beta={beta}):
    return -beta * logprobs

def plain(logprobs, batch):
    return logprobs
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder; what is loaded from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def write(file: Path, beta: float, written: int) -> None:
    file.write_text(LOSS.format(beta=beta))
    os.utime(file, ns=(written, written))


def test_a_function_of_an_importable_module_is_named_by_its_module() -> None:
    assert reference_of(own_functions.plain, kind="loss") == "tests.algo.own_functions:plain"
    assert load_function("tests.algo.own_functions:plain") is own_functions.plain
    assert own_functions.clipped.function == "tests.algo.own_functions:clipped"


def test_a_marked_function_is_found_under_what_its_decorator_left() -> None:
    found = load_function("tests.algo.own_functions:clipped")
    assert found.__doc__ == "PPO's objective once more."
    assert found is not own_functions.clipped
    assert load_function("tests.algo.own_functions:brief") is own_functions.brief.__wrapped__


def test_a_file_is_found_by_its_path_and_run_once(folder: Path) -> None:
    write(folder / "mine.py", 0.5, 1_000_000_000)
    found = load_function("mine.py:mine")
    assert found(2.0, None) == -1.0
    assert load_function(f"{folder}/mine.py:mine") is found
    module = sys.modules[found.__module__]
    assert module.runs == 1
    assert module.mine.function == "mine.py:mine"
    assert load_function("mine.py:plain") is module.plain


def test_a_file_that_was_written_again_is_run_again(folder: Path) -> None:
    # Same second, same size: bytecode on disk would not notice.
    write(folder / "mine.py", 0.5, 1_000_000_000)
    assert load_function("mine.py:mine")(2.0, None) == -1.0
    write(folder / "mine.py", 1.5, 1_000_000_001)
    assert load_function("mine.py:mine")(2.0, None) == -3.0


def test_a_module_that_is_loaded_already_is_not_run_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder / "loaded_already.py", 0.5, 1_000_000_000)
    monkeypatch.syspath_prepend(str(folder))
    import loaded_already  # type: ignore[import-not-found]

    # Below the working folder a file is named by its path, whatever else could import it.
    assert loaded_already.mine.function == "loaded_already.py:mine"
    found = load_function("loaded_already.py:mine")
    assert found.__module__ == "loaded_already"
    assert loaded_already.runs == 1


def test_a_file_elsewhere_is_named_by_its_whole_path(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "mine.py"
    write(elsewhere, 0.5, 1_000_000_000)
    found = load_function(f"{elsewhere}:mine")
    assert sys.modules[found.__module__].mine.function == f"{elsewhere.resolve()}:mine"


def test_a_function_of_the_running_script_is_found_in_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "print('run')\n"
        "from flowrl.user_files import load_function, reference_of\n"
        "def mine(x): return x\n"
        "reference = reference_of(mine, kind='loss')\n"
        "assert load_function(reference) is mine\n"
        "print(reference)\n"
    )
    command = [sys.executable, "script.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["run", "script.py:mine"]


def test_a_function_without_a_file_belongs_to_the_running_process(tmp_path: Path) -> None:
    code = (
        "from flowrl.user_files import load_function, reference_of\n"
        "def mine(x): return x\n"
        "reference = reference_of(mine, kind='loss')\n"
        "assert load_function(reference) is mine\n"
        "print(reference)\n"
        "load_function('__main__:other')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["__main__:mine"]
    assert "put it in a file" in done.stderr


class Holder:
    def method(self, logprobs: object, batch: object) -> object:
        return logprobs


def closure() -> object:
    def inner(logprobs: object, batch: object) -> object:
        return logprobs

    return inner


async def waiting(logprobs: object, batch: object) -> object:
    return logprobs


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda logprobs, batch: logprobs, "cannot be a lambda"),
        (closure(), "cannot be a function inside another one"),
        (Holder.method, "cannot be a method"),
        (Holder().method, "must be a function"),
        (partial(closure), "must be a function"),
        (Holder, "must be a function"),
        (waiting, "cannot be an async function"),
        (3, "must be a function"),
    ],
)
def test_what_no_plan_can_name_is_refused_with_its_line(function: object, message: str) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        loss.own()(function)  # type: ignore[arg-type]
    assert caught.value.where is not None
    file, _, line = caught.value.where.rpartition(":")
    assert file == "tests/algo/test_user_functions.py"
    assert int(line) > 0
    assert "top level of a module" in str(caught.value)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("mine", "not a reference to a function"),
        ("mine.py:", "not a reference to a function"),
        ("absent.py:mine", "no file absent.py"),
        ("no_such_module_anywhere:mine", "importing no_such_module_anywhere raised"),
        ("tests.algo.own_functions:clippd", "has no function 'clippd'"),
    ],
)
def test_what_leads_to_no_function_says_so(reference: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        load_function(reference)


def test_a_misspelt_file_or_function_gets_the_nearest_name(folder: Path) -> None:
    write(folder / "losses.py", 0.5, 1_000_000_000)
    with pytest.raises(TraceError, match=r"did you mean .*losses\.py"):
        load_function("loses.py:mine")
    with pytest.raises(TraceError, match="did you mean 'plain'"):
        load_function("losses.py:plian")


def test_what_a_file_raises_is_told_with_its_line_and_run_again_next_time(folder: Path) -> None:
    file = folder / "broken.py"
    file.write_text("x = 1\ny = x / 0\n")
    for _ in range(2):
        with pytest.raises(TraceError, match="ZeroDivisionError") as caught:
            load_function("broken.py:mine")
        assert caught.value.where == "broken.py:2"
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    file.write_text("raise SystemExit(3)")
    with pytest.raises(TraceError, match="SystemExit"):
        load_function("broken.py:mine")
    file.write_text("def mine(x:\n")
    with pytest.raises(TraceError, match="SyntaxError"):
        load_function("broken.py:mine")
