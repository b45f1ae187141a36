"""Files of the user's own, run by their path: rewards and environments."""

from __future__ import annotations

import importlib.util
import linecache
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

__all__ = ["run_file"]

_WRITTEN: dict[str, int] = {}
"""The modification time in ns of each module's file when it was run: a notebook's process can
outlive several versions of a file."""


class _Source(SourceFileLoader):
    """A loader that reads the source each time: cached bytecode can be older than the source if
    both were written within the same second."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def run_file(path: Path, *, kind: str) -> ModuleType:
    """Runs an existing file, once after each change, and returns its module.

    Modules in its folder can be imported, as for a script. Errors of the file itself are not
    caught: their traceback is the user's.

    Args:
        path: The file.
        kind: The purpose of the file, such as `reward`; a file is run once for each kind.
    """
    file = path.resolve()
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    # A name that no import statement can have, so that the file never shadows another module.
    name, written = f"flowrl {kind} {file}", file.stat().st_mtime_ns
    if name in sys.modules and _WRITTEN.get(name) == written:
        return sys.modules[name]
    linecache.checkcache(str(file))
    spec = importlib.util.spec_from_file_location(name, file, loader=_Source(name, str(file)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickling look a class's module up by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    _WRITTEN[name] = written
    return module
