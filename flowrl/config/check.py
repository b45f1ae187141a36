"""Checks that one key alone cannot make: what must divide, what must be named, what must exist.

All of them read the configuration and the file system only, so that a mistake ends a run before
any tensor library is imported. Roles, backends and data fields are checked by those who know them:
the program, the registry and the data reader.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from flowrl.config.load import LoadedConfig
from flowrl.config.nearest import listing, nearest, suggestion
from flowrl.config.problems import combine
from flowrl.config.schema import (
    ArithmeticData,
    CharTokenizer,
    DataConfig,
    EvalConfig,
    FormatMatch,
    FreshModel,
    JsonlData,
    PythonReward,
    SamplingConfig,
)
from flowrl.errors import ConfigError

__all__ = ["check_config"]

Problems = Iterator[ConfigError]

_OTHER_METRICS = {
    "length": "mean number of response tokens",
    "truncated": "share of responses that met max_tokens",
}
"""What an evaluation measures beside the reward's terms and their weighted sum, `score`."""


def check_config(loaded: LoadedConfig) -> None:
    """Checks a validated configuration as a whole.

    Raises:
        ConfigError: One error for all that is wrong: the first in full, the others by name.
    """
    problems = [problem for check in _CHECKS for problem in check(loaded)]
    if problems:
        raise combine(problems)


def _stages_are_named(loaded: LoadedConfig) -> Problems:
    config = loaded.config
    *earlier, last = config.stages
    for name in config.stage:
        key = f"stage.{name}"
        if name == last:
            yield ConfigError(
                f"{name!r} is the last stage, whose keys stand at the top",
                where=loaded.where(key),
                hint=f"write train, args, stop and workflow without {key} before them",
            )
        elif name not in earlier:
            yield ConfigError(
                f"no stage is called {name!r}",
                where=loaded.where(key),
                expected=f"one of {listing(earlier)}" if earlier else None,
                hint=suggestion(name, earlier) or f"add it to stages: {listing(config.stages)}",
            )


def _workflow_files_exist(loaded: LoadedConfig) -> Problems:
    for name, prefix in _stage_prefixes(loaded):
        workflow = loaded.config.stage_config(name).workflow
        if workflow is not None and ".py" in workflow:
            file = Path(workflow.rpartition(".py")[0] + ".py")
            yield from _missing_file(file, "workflow file", loaded.where(f"{prefix}workflow"))


def _mini_batches_divide(loaded: LoadedConfig) -> Problems:
    for name, prefix in _stage_prefixes(loaded):
        train = loaded.config.stage_config(name).train
        prompts, parts = train.prompts_per_step, train.mini_batches
        if prompts % parts == 0:
            continue
        keys = (f"{prefix}train.prompts_per_step", f"{prefix}train.mini_batches")
        written = [key for key in keys if loaded.is_set(key)]
        multiples = [
            size for size in (prompts // parts * parts, -(-prompts // parts) * parts) if size
        ]
        yield ConfigError(
            f"{keys[0]}={prompts} is not a multiple of {keys[1]}={parts}",
            where=" and ".join(loaded.where(key) for key in written) or None,
            expected="mini-batches of equally many whole groups",
            hint=f"nearest: prompts_per_step {_either(multiples)}, "
            f"or mini_batches {_either(_nearest_divisors(prompts, parts))}",
        )


def _nearest_divisors(number: int, value: int) -> list[int]:
    """The largest divisor of `number` below `value`, and the smallest above it."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in divisors if d < value]
    above = [d for d in divisors if d > value]
    return below[-1:] + above[:1]


def _either(numbers: list[int]) -> str:
    return " or ".join(str(number) for number in numbers)


def _data_files_exist(loaded: LoadedConfig) -> Problems:
    data = loaded.config.data
    for key, source in (("data.train", data.train), ("data.eval", data.eval)):
        match source:
            case str():
                yield from _missing_data(Path(source), key, key, loaded)
            case JsonlData():
                yield from _missing_data(source.path, key, f"{key}.path", loaded)
            case _:
                pass


def _missing_data(path: Path, data_key: str, path_key: str, loaded: LoadedConfig) -> Problems:
    for problem in _missing_file(path, "data file", loaded.where(path_key)):
        # A near miss of a name is more help than where the data set comes from.
        if not loaded.config.data.origin or (problem.hint or "").startswith("did you mean"):
            yield problem
            continue
        yield ConfigError(
            problem.what,
            where=problem.where,
            hint=f"{data_key} is {loaded.config.data.origin}; set {path_key}=FILE.jsonl",
        )


def _roles_copy_roles(loaded: LoadedConfig) -> Problems:
    roles = loaded.config.roles
    for name, role in roles.items():
        key = f"roles.{name}.copy_of"
        if role.copy_of is None:
            continue
        if role.copy_of not in roles:
            others = [other for other in roles if other != name]
            yield ConfigError(
                f"no role is called {role.copy_of!r}",
                where=loaded.where(key),
                expected=f"one of {listing(others)}",
                hint=suggestion(role.copy_of, others),
            )
            continue
        if role.model is not None:
            yield ConfigError(
                f"{name} has a model of its own and is a copy of {role.copy_of}",
                where=loaded.where(key),
                hint=f"keep roles.{name}.model or copy_of; `null` unsets one",
            )
        source = roles[role.copy_of].copy_of
        if source is not None and source in roles and roles[source].copy_of is None:
            yield ConfigError(
                f"{name} is a copy of {role.copy_of}, which is itself a copy",
                where=loaded.where(key),
                hint=f"set {key}={source}",
            )
        chain = [name]
        while (target := roles[chain[-1]].copy_of) in roles and target not in chain:
            assert target is not None
            chain.append(target)
        # Each cycle is told once, at its first role by name.
        if target == name and name == min(chain):
            yield ConfigError(
                "roles are copies of each other in a circle",
                where=loaded.where(key),
                found=" -> ".join([*chain, name]),
                hint="give one of them a model",
            )


def _model_folders_exist(loaded: LoadedConfig) -> Problems:
    for name, role in loaded.config.roles.items():
        if not isinstance(role.model, str):
            continue
        where, folder = loaded.where(f"roles.{name}.model"), Path(role.model)
        if not folder.is_dir():
            yield ConfigError(
                f"no such model folder: {role.model}",
                where=where,
                found="a file of that name" if folder.exists() else None,
                expected="a folder with config.json, tokenizer files and safetensors",
                hint=_way_to_a_model(role.model),
            )
        elif not (folder / "config.json").is_file():
            held = sorted(path.name for path in folder.iterdir())
            inside = [path.parent for path in sorted(folder.glob("*/config.json"))]
            yield ConfigError(
                f"the folder {role.model} holds no config.json",
                where=where,
                found=f"{listing(held[:8])} in it",
                expected="a Hugging Face model folder",
                hint=f"did you mean {inside[0]}?" if inside else None,
            )


def _way_to_a_model(model: str) -> str:
    folder = Path(model)
    siblings = [path for path in _listed(folder.parent) if (path / "config.json").is_file()]
    match = nearest(folder.name, [path.name for path in siblings])
    if match is not None:
        return f"did you mean {folder.parent / match}?"
    if model.startswith("~"):
        return "give the path in full; `~` is expanded by shells only, at the start of a word"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        return (
            "flowrl downloads nothing by itself; "
            f"`hf download {model} --local-dir {model}` makes the folder"
        )
    return "give an existing folder, or the fields of a new model: model: {hidden_size: 64}"


def _rewards_are_whole(loaded: LoadedConfig) -> Problems:
    names: list[str] = []
    for index, term in enumerate(loaded.config.rewards.terms):
        key = f"rewards.terms.{index}"
        if term.name in names:
            yield ConfigError(
                f"two reward terms are called {term.name!r}",
                where=loaded.where(key),
                hint="give each its own `name`",
            )
        names.append(term.name)
        meaning = _OTHER_METRICS.get(term.name)
        if meaning is not None or (term.name == "score" and not _is_the_score(loaded)):
            yield ConfigError(
                f"a reward term is called {term.name!r}, which names another metric of evaluations",
                where=loaded.where(f"{key}.name"),
                found=f"{term.name}: {meaning or 'the weighted sum of all terms'}",
                hint="give the term a `name` of its own",
            )
        match term:
            case PythonReward():
                yield from _reward_function(term, loaded.where(f"{key}.function"))
            case FormatMatch():
                yield from _pattern(term, loaded.where(f"{key}.pattern"))
            case _:
                pass


def _rewards_end_before_a_stall(loaded: LoadedConfig) -> Problems:
    reward_s, stall_s = loaded.config.rewards.timeout_s, loaded.config.runtime.stall_timeout_s
    if reward_s < stall_s:
        return
    key = "rewards.timeout_s" if loaded.is_set("rewards.timeout_s") else "runtime.stall_timeout_s"
    yield ConfigError(
        f"a reward may take {reward_s:g} s (rewards.timeout_s), but the run stops when nothing "
        f"moves for {stall_s:g} s (runtime.stall_timeout_s)",
        where=loaded.where(key),
        expected="a longer runtime.stall_timeout_s",
        hint=f"set runtime.stall_timeout_s={2 * reward_s:g}",
    )


def _is_the_score(loaded: LoadedConfig) -> bool:
    """Whether the weighted sum of the terms is the one term itself."""
    terms = loaded.config.rewards.terms
    return len(terms) == 1 and terms[0].weight == 1


def _reward_function(term: PythonReward, where: str) -> Problems:
    file, colon, name = term.function.rpartition(":")
    if not colon or not file.endswith(".py") or not name.isidentifier():
        yield ConfigError(
            "function must be FILE.py:NAME",
            where=where,
            found=repr(term.function),
            hint="for example rewards/mine.py:score",
        )
    else:
        yield from _missing_file(Path(file), "reward file", where)


def _pattern(term: FormatMatch, where: str) -> Problems:
    try:
        re.compile(term.pattern)
    except re.error as error:
        yield ConfigError(
            f"pattern is no regular expression: {error}", where=where, found=repr(term.pattern)
        )


def _metrics_are_measured(loaded: LoadedConfig) -> Problems:
    config = loaded.config
    terms = config.rewards.terms
    # Without terms the metric comes from the scorer that plays the role, which is not known here.
    if not terms:
        return
    measured = sorted({term.name for term in terms} | {"score"})
    asked = []
    # The default is a name that runs without such a term need not know; a resolved config writes
    # it out, so that being written says nothing. Where it stops a stage it has to be measured.
    if config.eval.metric != EvalConfig().metric:
        asked.append(("eval.metric", config.eval.metric))
    for name, prefix in _stage_prefixes(loaded):
        stop = config.stage_config(name).stop
        if stop is not None:
            asked.append((f"{prefix}stop.metric", stop.metric))
    for key, metric in asked:
        if metric not in measured:
            yield ConfigError(
                f"{key} is {metric!r}, which no reward term measures",
                where=loaded.where(key),
                expected=f"one of {listing(measured)}",
                hint=suggestion(metric, measured) or f"set {key}={measured[0]}",
            )


def _stops_are_measured(loaded: LoadedConfig) -> Problems:
    config = loaded.config
    missing = [
        key
        for key, value in (("data.eval", config.data.eval), ("rewards.terms", config.rewards.terms))
        if not value
    ]
    for name, prefix in _stage_prefixes(loaded):
        if missing and config.stage_config(name).stop is not None:
            yield ConfigError(
                f"stage {name!r} is to stop at a held-out metric, which nothing measures",
                where=loaded.where(f"{prefix}stop"),
                found=f"no {' and no '.join(missing)}",
                hint=f"set {missing[0]}, or {prefix}stop=null",
            )


def _samples_fit(loaded: LoadedConfig) -> Problems:
    config = loaded.config
    prompt_tokens, prompt_key = _prompt_tokens(loaded)
    for name, role in config.roles.items():
        if not isinstance(role.model, FreshModel):
            continue
        length, length_key = role.model.max_length, f"roles.{name}.model.max_length"
        for stage, prefix in _stage_prefixes(loaded):
            key = f"{prefix}train.sampling.max_tokens"
            tokens = config.stage_config(stage).train.sampling.max_tokens
            # A default that nobody chose may be meant for no rollout at all (supervised stages);
            # the run looks again, once it has the prompts.
            if tokens == SamplingConfig().max_tokens or prompt_tokens + tokens <= length:
                continue
            yield ConfigError(
                f"prompts of {prompt_tokens} tokens ({prompt_key}) and responses of {tokens} "
                f"({key}) do not fit {length_key}={length}",
                where=loaded.where(key),
                hint=f"set {length_key}={prompt_tokens + tokens}, or fewer tokens",
            )


def _prompt_tokens(loaded: LoadedConfig) -> tuple[int, str]:
    """Tokens of the longest prompt as far as they are known, at least 1, and what says so."""
    data = loaded.config.data
    if data.max_prompt_tokens != DataConfig.model_fields["max_prompt_tokens"].default:
        return data.max_prompt_tokens, "data.max_prompt_tokens"
    if isinstance(data.train, ArithmeticData):
        return 2 * data.train.digits + 2, "two numbers, + and ="
    return 1, "at least"


def _alphabet_covers_sums(loaded: LoadedConfig) -> Problems:
    data = loaded.config.data
    if not isinstance(data.train, ArithmeticData) and not isinstance(data.eval, ArithmeticData):
        return
    for name, role in loaded.config.roles.items():
        if isinstance(role.tokenizer, CharTokenizer):
            missing = [c for c in "0123456789+=" if c not in role.tokenizer.alphabet]
            if missing:
                yield ConfigError(
                    f"the alphabet lacks characters of sums: {''.join(missing)}",
                    where=loaded.where(f"roles.{name}.tokenizer.alphabet"),
                    found=repr(role.tokenizer.alphabet),
                )


def _cluster_file_exists(loaded: LoadedConfig) -> Problems:
    cluster = loaded.config.cluster
    if cluster != "auto":
        yield from _missing_file(Path(cluster), "cluster file", loaded.where("cluster"))


def _stage_prefixes(loaded: LoadedConfig) -> Iterator[tuple[str, str]]:
    """Each stage and what stands before its keys."""
    *earlier, last = loaded.config.stages
    for name in earlier:
        yield name, f"stage.{name}."
    yield last, ""


def _missing_file(path: Path, what: str, where: str) -> Problems:
    if path.is_file():
        return
    if path.exists():
        kind = "a folder" if path.is_dir() else "no regular file (it is read more than once)"
        yield ConfigError(f"the {what} {path} is {kind}", where=where)
        return
    names = [entry.name for entry in _listed(path.parent)]
    match = nearest(path.name, names)
    hint = f"paths are relative to the current directory, {Path.cwd()}"
    yield ConfigError(
        f"no such {what}: {path}",
        where=where,
        hint=f"did you mean {path.parent / match}?" if match is not None else hint,
    )


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


_CHECKS: tuple[Callable[[LoadedConfig], Problems], ...] = (
    _stages_are_named,
    _workflow_files_exist,
    _mini_batches_divide,
    _data_files_exist,
    _roles_copy_roles,
    _model_folders_exist,
    _rewards_are_whole,
    _rewards_end_before_a_stall,
    _metrics_are_measured,
    _stops_are_measured,
    _samples_fit,
    _alphabet_covers_sums,
    _cluster_file_exists,
)
