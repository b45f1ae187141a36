"""References to the user's own functions, which graphs, plans and configs hold in their place.

    def my_loss(logprobs, batch): ...        # in mine.py, below the working folder

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
import traceback
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from flowrl.errors import FlowError, TraceError
from flowrl.wording import nearest_file, suggestion

__all__ = [
    "NO_DEBUGGER",
    "caller",
    "definition_of",
    "line_of",
    "load_function",
    "reference_of",
]

NO_DEBUGGER = (
    "BdbQuit: a breakpoint has no terminal to stop at here, or the debugger was left; "
    "executor=eager stops at breakpoints"
)
"""The message for a debugger without a terminal; rewards, environments and maps share it."""

_FLOWRL = str(Path(__file__).parent.parent) + os.sep
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
        raise TraceError(
            f"an own {kind} must be a function, not a method",
            where=caller(),
            found=repr(function),
            hint=f"write `def my_{kind}(...)` at the top level of a module",
        )
    wrong = _unsupported_kind(function)
    if wrong is not None:
        raise TraceError(
            f"an own {kind} cannot be {wrong}: a plan names it, and workers import it",
            where=definition_of(function),
            found=function.__qualname__,
            hint=f"write it as `def my_{kind}(...)` at the top level of a module",
        )
    place = _place_of(function, kind)
    _MARKED[function.__module__, function.__name__] = function
    return f"{place}:{function.__name__}"


def _unsupported_kind(function: FunctionType) -> str | None:
    if function.__name__ == "<lambda>":
        return "a lambda"
    if "<locals>" in function.__qualname__:
        return "a function inside another one"
    if "." in function.__qualname__:
        return "a method"
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        return "an async function or a generator"
    return None


def _place_of(function: FunctionType, kind: str) -> str:
    """Returns `FILE.py` or the module's name."""
    module = sys.modules.get(function.__module__)
    if module is None:
        raise TraceError(
            f"an own {kind} must belong to a module that is loaded",
            where=definition_of(function),
            found=f"module {function.__module__!r}",
            hint="put it in a file of its own, and import that",
        )
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
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path) if hasattr(finder, "find_spec") else None
        if spec is not None:
            return spec.origin is not None and Path(spec.origin).resolve() == file
    return False


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
    module = _by_file(Path(place)) if place.endswith(".py") else _by_name(place)
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
    try:
        return importlib.import_module(name)
    except FlowError:
        raise
    except (Exception, SystemExit) as error:
        raise _raised(f"importing {name}", error) from error


def _by_file(path: Path) -> ModuleType:
    file = path.expanduser().resolve()
    running = _running(file)
    if running is not None:
        return running
    try:
        written = file.stat().st_mtime_ns
    except OSError:
        raise TraceError(
            f"no file {path}",
            hint=nearest_file(path, (".py",)) or f"paths are relative to {Path.cwd()}",
        ) from None
    known = _LOADED.get(file)
    if known is not None and known[0] == written:
        return known[1]
    module = _run(file)
    _LOADED[file] = written, module
    return module


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
        return self.source_to_code(self.get_data(self.path), self.path)


def _run(file: Path) -> ModuleType:
    digest = hashlib.sha256(str(file).encode()).hexdigest()[:8]
    name = f"{_OWN_MODULE}{file.stem}_{digest}"
    for key in [key for key in _MARKED if key[0] == name]:
        del _MARKED[key]
    linecache.checkcache(str(file))
    loader = _Source(name, str(file))
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # files of the same folder can be imported by name
    sys.modules[name] = module  # dataclasses look a class's module up by name
    try:
        loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, FlowError | KeyboardInterrupt):
            raise
        raise _raised(f"running {file}", error) from error
    return module


def _raised(what: str, error: BaseException) -> TraceError:
    """Returns the error of the user's own code, with its line."""
    text = str(error).strip().splitlines()
    return TraceError(
        f"{what} raised {type(error).__name__}: {text[0] if text else ''}".rstrip(": "),
        where=line_of(error),
    )


def line_of(error: BaseException, default: str | None = None) -> str | None:
    """Returns `file:line` of the deepest line of an error's traceback in the user's code."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not _is_installed(f.filename)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else default


def _is_installed(filename: str) -> bool:
    library = str(Path(os.__file__).parent)
    return "site-packages" in filename or filename.startswith((_FLOWRL, library, "<frozen"))


def definition_of(function: Callable[..., Any]) -> str:
    """Returns `file:line` of a function's `def`, below its decorators."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return repr(function)
    first = code.co_firstlineno
    for line in range(first, first + 20):
        if linecache.getline(code.co_filename, line).lstrip().startswith(("def ", "async def ")):
            return f"{code.co_filename}:{line}"
    return f"{code.co_filename}:{first}"


def caller() -> str:
    """Returns `file:line` of the nearest line of the call stack outside flowrl."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_FLOWRL) and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
