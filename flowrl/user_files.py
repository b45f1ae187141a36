"""The user's Python files: references to functions in them, and the modules that they become.

    def my_loss(logprobs, batch, *, beta=0.1): ...     # in mine.py, below the working folder

    reference_of(my_loss, kind="loss")       # "mine.py:my_loss"
    load_function("mine.py:my_loss")         # that function

A reference is `FILE.py:NAME`, with a path relative to the working folder if the file is below it,
or `module:NAME` of a module that an import statement finds. A module that is already loaded is
never run a second time: a function of the running script or notebook is found in `__main__`. Any
other file is run under a module name of its own, once after each change of the file.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import linecache
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from flowrl.errors import ConfigError, FlowError, TraceError
from flowrl.user_lines import definition_of, explained, user_line
from flowrl.wording import listing, nearest_file, suggestion

COPIES = "FLOWRL_FILES"
"""The environment variable of workers that names a folder with copies of the user's files."""

_OWN_MODULE = "flowrl_own_"

_MARKED: dict[tuple[str, str], FunctionType] = {}
"""Decorated functions by module and name. The module holds the decorator's result under the name,
so that the function cannot be found through the module."""

_LOADED: dict[Path, tuple[int, ModuleType]] = {}
"""Files that were run here: the file's modification time in ns, and its module."""


def reference_of(function: object, *, kind: str) -> str:
    """Returns the reference by which `load_function` finds a function.

    Args:
        function: A function at the top level of a module.
        kind: The purpose of the function, for messages: `loss`.

    Raises:
        TraceError: It is a lambda, a method, a function inside another one, or not a function.
    """
    if not isinstance(function, FunctionType):
        problem, where, found = "must be a function, not a method", str(user_line()), repr(function)
    elif (unsupported := _unsupported_kind(function)) is not None:
        problem = f"cannot be {unsupported}: a plan names it, and workers import it"
        where, found = str(definition_of(function)), function.__qualname__
    else:
        _MARKED[function.__module__, function.__name__] = function
        return f"{_place_of(sys.modules[function.__module__])}:{function.__name__}"
    raise TraceError(
        f"an own {kind} {problem}",
        where=where,
        found=found,
        hint=f"write it as `def my_{kind}(...)` at the top level of a module",
    )


def _unsupported_kind(function: FunctionType) -> str | None:
    if function.__name__ == "<lambda>":
        return "a lambda"
    if "<locals>" in function.__qualname__:
        return "a function inside another one"
    if "." in function.__qualname__:
        return "a method"
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        return "an async function or a generator"
    if function.__module__ not in sys.modules:
        return "a function of a module that is not loaded"
    return None


def _place_of(module: ModuleType) -> str:
    """Returns `FILE.py` or the module's name."""
    name = _import_name(module)
    file = _file_of(module)
    if file is None or file.suffix != ".py":
        return name
    working = Path.cwd().resolve()
    below = file.is_relative_to(working)
    if ("." in name or not below) and _is_found_by_name(name, file):
        return name
    return (file.relative_to(working) if below else file).as_posix()


def _import_name(module: ModuleType) -> str:
    """Returns the module's name; for a script started with `python -m`, the name given there."""
    spec = getattr(module, "__spec__", None)
    main = module.__name__ in ("__main__", "__mp_main__")
    return str(spec.name) if main and spec is not None else module.__name__


def _file_of(module: object) -> Path | None:
    # Not getattr: a lazy module may import half a library on any attribute access.
    file = getattr(module, "__dict__", {}).get("__file__")
    return Path(file).resolve() if isinstance(file, str) else None


def _is_found_by_name(name: str, file: Path) -> bool:
    """Returns True if `import name` would load that file."""
    parent = name.rpartition(".")[0]
    path = getattr(sys.modules.get(parent), "__path__", None)
    if parent and path is None:
        return False
    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
    specs = (finder.find_spec(name, path) for finder in finders)
    spec = next((each for each in specs if each is not None), None)
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() == file


def load_function(reference: str) -> Callable[..., Any]:
    """Returns the function of a reference, made by `reference_of` or written as `FILE.py:NAME`.

    Raises:
        TraceError: The file, module or function does not exist, or the file raises an error when it
            is run; that error is the cause.
    """
    place, _, name = reference.rpartition(":")
    if not place or not name.isidentifier():
        raise TraceError(
            "this is not a reference to a function",
            found=repr(reference),
            expected="FILE.py:NAME or module:NAME",
        )
    if place.endswith(".py"):
        file = Path(place)
        module = _running(file.expanduser().resolve()) or import_file(file, error=TraceError)
    else:
        module = _by_name(place)
    value = vars(module).get(name)
    if isinstance(value, FunctionType):
        return value
    marked = _MARKED.get((module.__name__, name))
    if marked is not None:
        return marked
    own = [key for key, each in vars(module).items() if isinstance(each, FunctionType)]
    hint = suggestion(name, own)
    if place == "__main__":
        hint = "a function of a notebook exists only in its own process; put it in a file"
    raise TraceError(
        f"{place} has no function '{name}'",
        found="functions " + ", ".join(own) if own else "no functions",
        hint=hint,
    )


def _by_name(name: str) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    main = sys.modules["__main__"]
    if _import_name(main) == name:
        return main
    with _explaining(f"importing {name}"):
        return importlib.import_module(name)
    raise AssertionError


def import_file(
    path: Path, *, where: str | None = None, error: type[FlowError] = ConfigError
) -> ModuleType:
    """Imports a Python file by its path; its siblings can be imported by their names.

    The same file is imported once, so that its functions share its globals.

    Args:
        path: The file, relative to the current folder.
        where: The config key or argument that names it, for messages.
        error: The class of the error where there is no such file.

    Raises:
        FlowError: There is no such file.
        TraceError: The file raises; `user_frames` holds its traceback.
    """
    full = path.expanduser().resolve()
    if not source_of(full).is_file():
        folder = "" if full.parent.is_dir() else f", and no folder {path.parent}"
        raise error(
            f"no file {path}{folder}",
            where=where,
            hint=nearest_file(path, (".py",))
            or f"paths are relative to the current directory, {Path.cwd()}",
        )
    with _explaining(f"importing {path}", str(path)):
        return run_file(full)
    raise AssertionError


@contextmanager
def _explaining(subject: str, otherwise: str | None = None) -> Iterator[None]:
    """Raises errors of the user's own code as errors at the user's line."""
    try:
        yield
    except (FlowError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise explained(subject, error, otherwise=otherwise) from error


def _running(file: Path) -> ModuleType | None:
    """Returns the module of a file if it is already loaded; the running script comes first."""
    for module in (sys.modules["__main__"], *sys.modules.values()):
        own = getattr(module, "__dict__", {})
        shown = own.get("__file__")
        if not isinstance(shown, str) or not shown.endswith(file.name):
            continue
        # Files that were run here are looked up by their modification time.
        here = str(own.get("__name__")).startswith(_OWN_MODULE)
        if not here and _file_of(module) == file:
            return module
    return None


class _Source(SourceFileLoader):
    """A loader that reads the source each time: cached bytecode can be older than the source if
    both were written within the same second."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(source_of(Path(self.path)).read_bytes(), self.path)


def source_of(file: Path) -> Path:
    """Returns where the content of the user's file is: on a node that a run has sent it, its copy.

    Args:
        file: An absolute path. The copies are below the folder that `COPIES` names, by this path.
    """
    folder = os.environ.get(COPIES)
    copy = file if folder is None else Path(folder, *file.parts[1:])
    return copy if copy.is_file() else file


def callable_in(
    place: str, name: str, kind: tuple[str, str, str], error: type[FlowError], where: str
) -> Callable[..., Any]:
    """Returns what a plug-in calls of the user's: a function, or a class.

    Args:
        place: A file `FILE.py`, or the name of a module.
        kind: Its kind and its noun, singular and plural, for messages: `reward`, `function`,
            `functions`.
        error: The error for a file or a name that does not exist; errors of the file itself are
            not caught.
        where: The config key, for messages.
    """
    path, (kind_of_file, noun, nouns) = Path(place), kind
    if not place.endswith(".py"):
        module = importlib.import_module(place)
    elif source_of(path.resolve()).is_file():
        module = run_file(path)
    else:
        raise error(
            f"no such {kind_of_file} file",
            where=where,
            found=place,
            hint=f"paths are relative to the working folder, {Path.cwd()}",
        )
    value = getattr(module, name, None)
    if callable(value):
        function: Callable[..., Any] = value
        return function
    own = [n for n, each in vars(module).items() if callable(each) and not n.startswith("_")]
    raise error(
        f"{place} has no {noun} {name!r}",
        where=where,
        found=f"{nouns} {listing(own)}",
        hint=suggestion(name, own) or "write FILE.py:NAME with a name that it defines",
    )


def run_file(path: Path) -> ModuleType:
    """Runs an existing file, once after each change, and returns its module.

    Modules in its folder can be imported, as for a script. Errors of the file itself are not
    caught.
    """
    file = path.resolve()
    source = source_of(file)
    written = source.stat().st_mtime_ns
    known = _LOADED.get(file)
    if known is not None and known[0] == written:
        return known[1]
    digest = hashlib.sha256(str(file).encode()).hexdigest()[:8]
    name = f"{_OWN_MODULE}{file.stem}_{digest}"
    for key in [key for key in _MARKED if key[0] == name]:
        del _MARKED[key]
    linecache.checkcache(str(file))
    loader = _Source(name, str(file))
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    if str(source.parent) not in sys.path:
        sys.path.append(str(source.parent))
    sys.modules[name] = module  # dataclasses and pickling look a class's module up by name
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    _LOADED[file] = written, module
    return module
