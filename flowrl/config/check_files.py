"""Checks that the files and folders of a configuration exist; the nearest name is the hint."""

from __future__ import annotations

import glob
import re
from pathlib import Path

from flowrl.config.data import FileData
from flowrl.config.load import LoadedConfig
from flowrl.config.problems import Problems
from flowrl.config.rewards import PythonReward
from flowrl.config.roles import ENVIRONMENTS
from flowrl.config.user_functions import environment_problems, reward_problems
from flowrl.entry_points import entries
from flowrl.errors import ConfigError
from flowrl.wording import listing, nearest, nearest_file

SHAPES = Path("configs/models")
"""The folder of a clone with the sizes of published models."""


def workflow_files_exist(loaded: LoadedConfig) -> Problems:
    """Checks the workflow files of stages."""
    for name, prefix in loaded.stage_prefixes():
        workflow = loaded.config.stage_config(name).workflow
        if workflow is not None and ".py" in workflow:
            file = Path(workflow.rpartition(".py")[0] + ".py")
            yield from _missing_file(file, "workflow file", loaded.where(f"{prefix}workflow"))


def data_files_exist(loaded: LoadedConfig) -> Problems:
    """Checks training and held-out data; a plan for other machines needs neither."""
    if loaded.config.cluster != "auto":
        return  # other machines are meant, even if the cluster file is missing
    for key, source in loaded.config.data_sources():
        if isinstance(source, str):
            yield from _missing_data(Path(source), key, key, loaded)
        elif isinstance(source, FileData):
            yield from _missing_data(source.path, key, f"{key}.path", loaded)


def _missing_data(path: Path, data_key: str, path_key: str, loaded: LoadedConfig) -> Problems:
    # Folders and patterns are opened by the reader of data, which knows what they may hold.
    if path.is_dir() or glob.has_magic(str(path)):
        return
    for problem in _missing_file(path, "data file", loaded.where(path_key)):
        # A similar file name is more help than the origin of the data set.
        hint = problem.hint or ""
        if loaded.config.data.origin and not hint.startswith("did you mean"):
            hint = f"{data_key} is {loaded.config.data.origin}; set {path_key}=FILE"
        elif re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and not path.suffix:
            hint = (
                f"to read a data set of the Hugging Face Hub, set {data_key}="
                f"'{{kind: hub, name: {path}, split: train}}'"
            )
        problem.hint = hint
        yield problem


def model_folders_exist(loaded: LoadedConfig) -> Problems:
    """Checks the models of roles: folders, or shapes in JSON files."""
    for name, role in loaded.config.roles.items():
        if not isinstance(role.model, str):
            continue
        where, folder = loaded.where(f"roles.{name}.model"), Path(role.model)
        if role.model.endswith(".json"):
            yield from _missing_file(folder, "model config", where, SHAPES)
            continue
        if not folder.is_dir():
            yield ConfigError(
                f"no such model folder: {role.model}",
                where=where,
                found="a file of that name" if folder.exists() else None,
                expected="a folder with config.json (to plan, that is enough), tokenizer files and "
                "safetensors",
                hint=_model_hint(role.model),
            )
        elif not (folder / "config.json").is_file():
            entries_in_it = sorted(path.name for path in folder.iterdir())
            inside = [path.parent for path in sorted(folder.glob("*/config.json"))]
            yield ConfigError(
                f"the folder {role.model} holds no config.json",
                where=where,
                found=f"{listing(entries_in_it[:8])} in it",
                expected="a Hugging Face model folder",
                hint=f"did you mean {inside[0]}?"
                if inside
                else "name a folder with config.json, or a config.json itself (FILE.json)",
            )


def _model_hint(model: str) -> str:
    folder = Path(model)
    siblings = sorted(path.parent.name for path in folder.parent.glob("*/config.json"))
    match = nearest(folder.name, siblings)
    if match is not None:
        return f"did you mean {folder.parent / match}?"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        shape = shape_of(folder.name)
        return (
            "flowrl downloads nothing by itself; to plan and simulate, its config.json is enough: "
            f"{f'name {shape}, or ' if shape else ''}"
            f"`hf download {model} config.json --local-dir {model}`; "
            f"to run, `hf download {model} --local-dir {model}` makes the folder"
        )
    return "give an existing folder, or the fields of a new model: model: {hidden_size: 64}"


def shape_of(name: str) -> Path | None:
    """Returns the file of `configs/models` with the sizes of a published model; None without one.

    Args:
        name: Name of the model, such as `Qwen2.5-7B-Instruct`.
    """
    stems = sorted(path.stem for path in SHAPES.glob("*.json"))
    prefixes = [stem for stem in stems if f"{name.lower()}-".startswith(f"{stem}-")]
    return SHAPES / f"{max(prefixes, key=len)}.json" if prefixes else None


def reward_files_exist(loaded: LoadedConfig) -> Problems:
    """Checks the user functions of reward terms."""
    terms = {"rewards.terms": loaded.config.rewards.terms}
    terms |= {f"roles.{name}.terms": role.terms or () for name, role in loaded.config.roles.items()}
    for key, own in terms.items():
        for index, term in enumerate(own):
            if isinstance(term, PythonReward):
                written = "use" if loaded.is_set(f"{key}.{index}.use") else "function"
                where = loaded.where(f"{key}.{index}.{written}")
                missing = list(_missing_function(term.function, written, "reward", where))
                yield from missing or reward_problems(term.function, where)


def environment_files_exist(loaded: LoadedConfig) -> Problems:
    """Checks the user functions of environment roles; only an import can check `module:NAME`."""
    for name, role in loaded.config.roles.items():
        target, where = role.environment, loaded.where(f"roles.{name}.environment")
        if target is not None and (".py:" in target or not _MODULE.fullmatch(target)):
            missing = list(_missing_function(target, "environment", "environment", where))
            if missing and (names := [entry.name for entry in entries(ENVIRONMENTS)]):
                missing[0].expected = f"FILE.py:NAME, or one of {listing(names)}"
            yield from missing or environment_problems(target, where)


_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def _missing_function(target: str, key: str, noun: str, where: str) -> Problems:
    """Checks that `target` has the form `FILE.py:NAME`, and that the file exists."""
    file, colon, name = target.rpartition(":")
    if colon and file.endswith(".py") and name.isidentifier():
        yield from _missing_file(Path(file), f"{noun} file", where)
    else:
        yield ConfigError(
            f"{key} must be FILE.py:NAME",
            where=where,
            found=repr(target),
            hint=f"for example {noun}s/mine.py:NAME",
        )


def names_ray(cluster: str) -> bool:
    """True if the key `cluster` names a running Ray cluster: `ray`, or `ray:ADDRESS`."""
    return cluster == "ray" or cluster.startswith("ray:")


def cluster_file_exists(loaded: LoadedConfig) -> Problems:
    """Checks the file of a cluster that is neither this machine nor Ray's."""
    cluster = loaded.config.cluster
    if cluster != "auto" and not names_ray(cluster):
        where = loaded.where("cluster")
        yield from _missing_file(Path(cluster), "cluster file", where, Path("configs/clusters"))


def _missing_file(path: Path, what: str, where: str, *ready_made: Path) -> Problems:
    """Yields the problem of a missing file; `ready_made` are folders of others of its kind."""
    if path.is_file():
        return
    if path.exists():
        yield ConfigError(
            f"the {what} {path} is no regular file",
            where=where,
            hint="name the file itself",
        )
        return
    near = nearest_file(path, ("",), *ready_made)
    files = sorted(path.parent.glob("*")) if path.suffix and near is None else []
    same_kind = [file.name for file in files if file.suffix == path.suffix]
    yield ConfigError(
        f"no such {what}: {path}",
        where=where,
        expected=f"a {what}; {path.parent} holds {listing(same_kind)}" if same_kind else None,
        hint=near or f"paths are relative to the current directory, {Path.cwd()}",
    )
