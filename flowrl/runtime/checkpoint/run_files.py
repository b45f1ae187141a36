"""The user's files that a run reads, and whether they are still what the run began with.

    inputs.json of a run folder:
    {"rewards.terms.score.function": {"mine.py": {"nbytes": 210, "sha256": "..."}}, ...}

A file is listed under the config key that names it, by its path from the folder that the key names,
so that a run folder, or a whole project, can be moved. These are read:

- reward, environment and workflow files, and files of own losses, advantages and maps, each with
  the user's modules that they import, as far as their text shows;
- data files;
- model folders: configs, tokenizer, chat template and weights; of a new model, the files that the
  run has made.

Contents are hashed; of large weights the header and evenly spaced blocks. What a function opens
when it is called, and installed packages, are not seen.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import flowrl
from flowrl.compiler import CompiledStage
from flowrl.config.data import FileData, HubData
from flowrl.config.rewards import PythonReward
from flowrl.config.schema import RunConfig
from flowrl.data.sources import files_of_path, files_of_source
from flowrl.errors import CheckpointError, DataError
from flowrl.files import sha256_file, write_json_atomic
from flowrl.runtime.driver.graph_parts import RoleUse
from flowrl.specs import Spec

INPUTS = "inputs.json"

_OF_A_MODEL = ("*.json", "*.jinja", "*.txt", "*.model", "*.safetensors")
_BLOCK = 64 << 10
_BLOCKS = 64
_SMALL = 16 << 20
"""Bytes up to which weights are read whole."""
_MAX_HEADER = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFingerprint:
    """The size and checksum of a file.

    Attributes:
        nbytes: Its size.
        sha256: Checksum of its content; of large weights, of their header and sampled blocks.
    """

    nbytes: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.nbytes:,} bytes, sha256 {self.sha256[:12]}"


Marks: TypeAlias = Mapping[str, Mapping[str, FileFingerprint]]
"""By config key, then by the path of the file."""


def fingerprint_of(path: Path) -> FileFingerprint:
    """Reads a file, or of large weights (`.safetensors`) the header and sampled blocks."""
    nbytes = path.stat().st_size
    if path.suffix != ".safetensors" or nbytes <= _SMALL:
        return FileFingerprint(nbytes=nbytes, sha256=sha256_file(path))
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        length = stream.read(8)
        digest.update(length)
        digest.update(stream.read(min(int.from_bytes(length, "little"), _MAX_HEADER)))
        for block in range(_BLOCKS):
            stream.seek((nbytes - _BLOCK) * block // (_BLOCKS - 1))
            digest.update(stream.read(_BLOCK))
    return FileFingerprint(nbytes=nbytes, sha256=digest.hexdigest())


class InputFiles:
    """The files that a run reads, as its configuration and its stages name them.

        new run:      write (after the folders of new models are made)
        resumed run:  refuse_changes -> write, where changes are accepted

    Args:
        folder: Folder of the run.
    """

    def __init__(self, config: RunConfig, stages: Sequence[CompiledStage], folder: Path) -> None:
        self._folder = folder
        self._bases: dict[str, Path] = {}
        self._files: dict[str, list[Path]] = {}
        for key, data in _data_files(config):
            self._add(key, data[0].parent, data)
        for key, file in (*_role_files(config, stages), *_program_files(stages, workflows=True)):
            self._add(key, file.parent, [file, *imported_files(file)])
        use = RoleUse(config, [stage.graph for stage in stages])
        for role in (role for role in use.models if use.source_of(role) is None):
            model = config.roles[role].model
            base = Path(model) if isinstance(model, str) else folder / "models" / role
            files = (path for pattern in _OF_A_MODEL for path in base.glob(pattern))
            self._add(f"roles.{role}.model", base, files)

    def write(self) -> None:
        """Writes down what the files are now."""
        marks = {
            key: {name: {"nbytes": mark.nbytes, "sha256": mark.sha256} for name, mark in of.items()}
            for key, of in self._marks().items()
        }
        write_json_atomic(self._folder / INPUTS, marks)

    def changes(self) -> list[str] | None:
        """Returns the differences from the recorded files, a sentence each; None without a record.

        Raises:
            CheckpointError: the record cannot be read.
        """
        began = self._written()
        if began is None:
            return None
        now = self._marks()
        changed: dict[str, list[str]] = {}
        for key in (*began, *(key for key in now if key not in began)):
            old, new = began.get(key, {}), now.get(key, {})
            for name in (*old, *(name for name in new if name not in old)):
                was, is_now = old.get(name), new.get(name)
                if was != is_now:
                    path = self._bases.get(key, Path()) / name
                    what = f"{_shown(path)} was {was or 'not there'}; is {is_now or 'not there'}"
                    changed.setdefault(what, []).append(key)
        return [f"{what} ({', '.join(keys)})" for what, keys in changed.items()]

    def refuse_changes(self, changes: Sequence[str]) -> None:
        """Refuses to go on with other files than the run began with.

        Raises:
            CheckpointError: there are changes; each is named.
        """
        if not changes:
            return
        raise CheckpointError(
            "this run began with other files than there are now",
            where=str(self._folder),
            found="; ".join(changes),
            hint="put the files back as they were, start a new run, or go on with them as they are "
            "(--accept-changes; in Python accept_changes=True)",
        )

    # Inside

    def _add(self, key: str, base: Path, files: Iterable[Path]) -> None:
        self._bases.setdefault(key, base)
        known = self._files.setdefault(key, [])
        known += [file for file in sorted(files) if file.is_file() and file not in known]

    def _marks(self) -> Marks:
        read = {file: fingerprint_of(file) for files in self._files.values() for file in files}
        return {
            key: {os.path.relpath(file, self._bases[key]): read[file] for file in files}
            for key, files in self._files.items()
        }

    def _written(self) -> Marks | None:
        path = self._folder / INPUTS
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            return {
                str(key): {
                    str(name): FileFingerprint(
                        nbytes=int(mark["nbytes"]), sha256=str(mark["sha256"])
                    )
                    for name, mark in of.items()
                }
                for key, of in found.items()
            }
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(
                "what the run began with cannot be read",
                where=str(path),
                found=f"{type(error).__name__}: {error}",
                hint="put the file back; without it, the run's files are not compared",
            ) from error


def _shown(path: Path) -> str:
    """Returns a path from the working folder, if it is below it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _data_files(config: RunConfig) -> Iterator[tuple[str, list[Path]]]:
    for section, source in config.data_sources():
        key = f"{section}.path" if isinstance(source, FileData) else section
        try:
            if isinstance(source, str):
                yield key, files_of_path(Path(source), key=key)
            elif isinstance(source, FileData | HubData):
                yield key, files_of_source(source, key=key)
        except DataError:  # a missing file is reported with all other changes
            if isinstance(source, HubData):
                raise
            yield key, [source.path if isinstance(source, FileData) else Path(str(source))]


def _role_files(config: RunConfig, stages: Sequence[CompiledStage]) -> Iterator[tuple[str, Path]]:
    """Lists files of rewards and environments that a stage uses, and of rewards of evaluations."""
    used = sorted({role for stage in stages for role in stage.graph.roles})
    terms = [(config.rewards.terms, "rewards.terms")]
    terms += [config.terms_of(role) for role in used]
    for own, key in terms:
        for term in own:
            if isinstance(term, PythonReward):
                yield f"{key}.{term.name}.function", Path(term.function.rpartition(":")[0])
    for role in used:
        environment = config.roles[role].environment if role in config.roles else None
        if environment is not None and (file := _file_of(environment)) is not None:
            yield f"roles.{role}.environment", file


def _program_files(
    stages: Sequence[CompiledStage], *, workflows: bool
) -> Iterator[tuple[str, Path]]:
    """Lists files of the user's own losses, advantages and maps, and of workflows if asked for."""
    for stage in stages:
        found = [Path(stage.workflow.source.file)] if workflows else []
        for node in stage.graph.nodes:
            specs = [value for _, value in node.attrs if isinstance(value, Spec)]
            references = [getattr(spec, "function", None) for spec in specs]
            found += [file for r in references if isinstance(r, str) and (file := _file_of(r))]
        for file in found:
            if _is_user_module(file):
                yield "workflow" if stage is stages[-1] else f"stage.{stage.name}.workflow", file


def worker_files(config: RunConfig, stages: Sequence[CompiledStage]) -> list[Path]:
    """Returns the user's Python files that workers run, with what they import, as absolute paths.

    These are files of rewards, environments, losses, advantages and maps. inputs.json has their
    checksums.
    """
    named = (*_role_files(config, stages), *_program_files(stages, workflows=False))
    files = [each for _, file in named for each in (file, *imported_files(file))]
    return sorted({file.resolve() for file in files if file.is_file()})


def _file_of(reference: str) -> Path | None:
    """Returns the file of `FILE.py:NAME` or `module:NAME`; None if it is not the user's."""
    place, _, _ = reference.rpartition(":")
    if place.endswith(".py"):
        return Path(place).expanduser()
    file: str | None = None
    if place in sys.modules:
        file = getattr(sys.modules[place], "__file__", None)
    elif place:
        try:
            spec = importlib.util.find_spec(place)
        except (ImportError, ValueError):  # opening the file raises the error that it is missing
            return None
        file = None if spec is None else spec.origin
    return Path(file) if file is not None and _is_user_module(Path(file)) else None


def imported_files(file: Path) -> list[Path]:
    """Returns the user's modules that a Python file imports, transitively, from its text alone.

    They are searched in the folder of the importing file and in the working folder.
    """
    found: dict[Path, None] = {}
    waiting = [file]
    while waiting:
        for path in _imports(waiting.pop()):
            if path not in found and path.resolve() != file.resolve():
                found[path] = None
                waiting.append(path)
    return sorted(found)


def _imports(file: Path) -> Iterator[Path]:
    try:
        module = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # running the file raises the error
    for node in ast.walk(module):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield from _modules((file.parent, Path()), alias.name.split("."))
            case ast.ImportFrom(module=name, names=names, level=level):
                roots = (file.parent, Path()) if not level else (_up(file.parent, level - 1),)
                before = name.split(".") if name else []
                for alias in names:
                    yield from _modules(roots, [*before, alias.name])


def _up(folder: Path, levels: int) -> Path:
    for _ in range(levels):
        folder = folder / ".."
    return folder


def _modules(roots: Sequence[Path], names: Sequence[str]) -> Iterator[Path]:
    """Yields the files of a dotted name below the first root that has it."""
    for root in roots:
        below = [root.joinpath(*names[: number + 1]) for number in range(len(names))]
        candidates = [file for at in below for file in (at.with_suffix(".py"), at / "__init__.py")]
        existing = [file for file in candidates if file.is_file() and _is_user_module(file)]
        if existing:
            yield from (Path(os.path.normpath(file)) for file in existing)
            return


def _is_user_module(file: Path) -> bool:
    full = file.resolve()
    installed = {"site-packages", "dist-packages"} & set(full.parts)
    return not installed and not full.is_relative_to(Path(flowrl.__file__).parent)
