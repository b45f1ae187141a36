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
"""When the file of each module that was run here was written, in ns: a notebook's process lives
longer than what a person has in the file."""


class _Source(SourceFileLoader):
    """Reads the source each time: bytecode on disk can be of an edit within the same second."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def run_file(path: Path, *, kind: str) -> ModuleType:
    """The module of a file that exists, run once for each time it is written.

    Its folder can be imported from, as for a script. What the file itself raises is not caught: its
    traceback is the user's.

    Args:
        kind: What the file is for, `reward`: files of different kinds are run apart.
    """
    file = path.resolve()
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    # A name that no import statement can hit, so that the file never shadows an installed module.
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
