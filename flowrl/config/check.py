"""Checks across keys: sizes that must divide, names and metrics that must exist, limits that clash.

All checks read the configuration and the file system only, so that a mistake ends a run before any
tensor library is imported. Roles, backends and data fields are checked by the program, the registry
and the data reader; the compiler checks the sizes of the program. A message about sizes names both
numbers, where each comes from, and the nearest values that fit.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from flowrl.config import check_files
from flowrl.config.data import ArithmeticData, DataConfig, RowFields
from flowrl.config.load import LoadedConfig
from flowrl.config.problems import Problems
from flowrl.config.roles import CharTokenizer, FreshModel
from flowrl.config.schema import (
    PAIR_ACCURACY,
    REWARD_MARGIN,
    TRACKERS,
    EvalConfig,
    SamplingConfig,
)
from flowrl.entry_points import find_entry
from flowrl.errors import ConfigError, raise_all
from flowrl.wording import listing, one_of_them, suggestion


def check_config(loaded: LoadedConfig, *, other_machines: bool = False) -> None:
    """Checks a validated configuration as a whole.

    Args:
        loaded: The configuration.
        other_machines: True if it is for other machines, which also have its data.

    Raises:
        ConfigError: One error for all that is wrong: the first in full, the others by name.
    """
    left_out = (check_files.data_files_exist, _trackers_exist) if other_machines else ()
    checks = [check for check in _CHECKS if check not in left_out]
    raise_all(problem for check in checks for problem in check(loaded))


def _stages_are_named(loaded: LoadedConfig) -> Problems:
    config = loaded.config
    *earlier, last = config.stages
    for name in config.stage:
        key = f"stage.{name}"
        if name == last:
            yield ConfigError(
                f"{name!r} is the last stage, whose keys are at the top",
                where=loaded.where_within(key),
                hint=f"write train, args, stop and workflow without {key} before them",
            )
        elif name not in earlier:
            yield ConfigError(
                f"no stage is called {name!r}",
                where=loaded.where_within(key),
                found=f"stages: {listing(config.stages)} ({loaded.where('stages')})",
                expected=f"one of {listing(earlier)}" if earlier else None,
                hint=suggestion(name, earlier)
                or f"add it to stages, or leave the keys of {key} out",
            )


def _roles_copy_roles(loaded: LoadedConfig) -> Problems:
    roles = loaded.config.roles
    for name, role in roles.items():
        where, source = loaded.where(f"roles.{name}.copy_of"), role.copy_of
        if source is None:
            continue
        if source not in roles:
            candidates = [other for other in roles if other != name]
            yield ConfigError(
                f"no role is called {source!r}",
                where=where,
                expected=f"one of {listing(candidates)}",
                hint=one_of_them(source, candidates),
            )
        elif role.model is not None:
            yield ConfigError(
                f"{name} has a model of its own and is a copy of {source}",
                where=where,
                hint=f"keep roles.{name}.model or copy_of; `null` unsets one",
            )
        elif (first := roles[source].copy_of) is not None:
            yield ConfigError(
                f"{name} is a copy of {source}, which is itself a copy",
                where=where,
                found=f"{name} -> {source} -> {first}",
                expected="a role with a model of its own",
                hint=f"copy {first}, or give {source} a model",
            )


def _alphabet_covers_sums(loaded: LoadedConfig) -> Problems:
    if not any(isinstance(part, ArithmeticData) for _, part in loaded.config.data_sources()):
        return
    for name, role in loaded.config.roles.items():
        if isinstance(role.tokenizer, CharTokenizer):
            missing = [c for c in "0123456789+=" if c not in role.tokenizer.alphabet]
            if missing:
                yield ConfigError(
                    f"the alphabet lacks characters of sums: {''.join(missing)}",
                    where=loaded.where(f"roles.{name}.tokenizer.alphabet"),
                    found=repr(role.tokenizer.alphabet),
                    hint=f"add {''.join(missing)} to it, or take other data than built-in sums",
                )


def _keys_of_rows_are_read(loaded: LoadedConfig) -> Problems:
    """Checks that keys of rows at the top of `data` have a source that reads them."""
    data = loaded.config.data
    if any(isinstance(part, str) for _, part in loaded.config.data_sources()):
        return
    for name, field in RowFields.model_fields.items():
        key, value = f"data.{name}", getattr(data, name)
        if loaded.is_set(key) and value != field.get_default(call_default_factory=True):
            yield ConfigError(
                f"no data reads {key}: it is for sources that are plain paths",
                where=loaded.where(key),
                found=f"{value!r} next to data.train of kind {getattr(data.train, 'kind', 'path')}",
                hint=f"leave {key} out, or write data.train.{name}={value!r} in its place",
            )


def _mini_batches_divide(loaded: LoadedConfig) -> Problems:
    """Checks that mini-batches hold equally many whole groups (or examples, or pairs)."""
    for name, prefix in loaded.stage_prefixes():
        train = loaded.config.stage_config(name).train
        prompts, parts = train.prompts_per_step, train.mini_batches
        if prompts % parts == 0:
            continue
        prompts_key, parts_key = f"{prefix}train.prompts_per_step", f"{prefix}train.mini_batches"
        below = prompts - prompts % parts
        multiples = [size for size in (below, below + parts) if size]
        divisors = [part for part in range(1, prompts + 1) if prompts % part == 0]
        fewer = [part for part in divisors if part < parts][-1:]
        more = [part for part in divisors if part > parts][:1]
        yield ConfigError(
            f"{prompts_key}={prompts} is not a multiple of {parts_key}={parts}",
            where=loaded.where_all(prompts_key, parts_key),
            found=loaded.defaults_among(prompts_key, parts_key),
            expected="mini-batches of equally many whole groups",
            hint=f"nearest: prompts_per_step {' or '.join(map(str, multiples))}, "
            f"or mini_batches {' or '.join(map(str, fewer + more))}",
        )


def _steps_or_epochs(loaded: LoadedConfig) -> Problems:
    """Checks that no stage has both a number of steps and one of epochs.

    Epochs on the command line replace the steps of a file, and those of a file the steps of one
    that it extends.
    """
    for name, prefix in loaded.stage_prefixes():
        steps, epochs = f"{prefix}train.steps", f"{prefix}train.epochs"
        if loaded.config.stage_config(name).train.epochs is None or not loaded.is_set(steps):
            continue
        is_later = loaded.is_taken_over(steps) and not loaded.is_taken_over(epochs)
        if loaded.is_changed(steps) or not (loaded.is_changed(epochs) or is_later):
            yield ConfigError(
                f"stage {name!r} has both steps and epochs",
                where=loaded.where_all(steps, epochs),
                expected="one of them",
                hint=f"leave one out; {epochs}=null takes the steps",
            )


def _samples_fit(loaded: LoadedConfig) -> Problems:
    """Checks that a prompt and its response fit the longest sample of a new model."""
    config = loaded.config
    prompt_tokens, prompt_key = least_prompt_tokens(loaded)
    for name, role in config.roles.items():
        if not isinstance(role.model, FreshModel):
            continue
        length, length_key = role.model.max_length, f"roles.{name}.model.max_length"
        for stage, prefix in loaded.stage_prefixes():
            key = f"{prefix}train.sampling.max_tokens"
            tokens = config.stage_config(stage).train.sampling.max_tokens
            # A default that nobody chose may be meant for no rollout at all (supervised stages);
            # the compiler looks again, once it has the program.
            if tokens == SamplingConfig().max_tokens or prompt_tokens + tokens <= length:
                continue
            yield ConfigError(
                f"prompts of {prompt_tokens} tokens ({prompt_key}) and responses of {tokens} "
                f"({key}) do not fit {length_key}={length}",
                where=loaded.where(key),
                hint=f"set {length_key}={prompt_tokens + tokens}, or fewer tokens",
            )


def least_prompt_tokens(loaded: LoadedConfig) -> tuple[int, str]:
    """Returns the tokens of the longest prompt, as far as known (at least 1), and their source."""
    data = loaded.config.data
    if data.max_prompt_tokens != DataConfig.model_fields["max_prompt_tokens"].default:
        return data.max_prompt_tokens, "data.max_prompt_tokens"
    if isinstance(data.train, ArithmeticData):
        return 2 * data.train.digits + 2, "two numbers, + and ="
    return 1, "at least"


def _calls_end_before_a_stall(loaded: LoadedConfig) -> Problems:
    """Checks that a call ends by its own limit before the run counts as stalled."""
    config, stall_s = loaded.config, loaded.config.runtime.stall_timeout_s
    limits = [("a reward", "rewards.timeout_s", config.rewards.timeout_s)]
    for name, role in config.roles.items():
        if role.environment is not None:
            limits.append(("an environment", f"roles.{name}.timeout_s", role.timeout_s))
    for who, limit_key, limit_s in limits:
        if limit_s < stall_s:
            continue
        key = limit_key if loaded.is_set(limit_key) else "runtime.stall_timeout_s"
        yield ConfigError(
            f"{who} may take {limit_s:g} s ({limit_key}), but the run stops when nothing "
            f"moves for {stall_s:g} s (runtime.stall_timeout_s)",
            where=loaded.where(key),
            expected="a longer runtime.stall_timeout_s",
            hint=f"set runtime.stall_timeout_s={2 * limit_s:g}",
        )


def _metrics_are_measured(loaded: LoadedConfig) -> Problems:
    """Checks the metrics that evaluations show and that stages stop at."""
    config = loaded.config
    terms = config.rewards.terms
    # Without terms the metric comes from the backend of the reward role, which is not known here.
    if not terms:
        return
    measured = sorted({term.name for term in terms} | {"score"})
    in_sets = [f"{name}/{metric}" for name in config.eval.sets for metric in measured]
    asked = {"eval.metric": config.eval.metric}
    for name, prefix in loaded.stage_prefixes():
        if (stop := config.stage_config(name).stop) is not None:
            asked[f"{prefix}stop.metric"] = stop.metric
    # A run without a term of the default's name is no mistake, even where the default is written
    # out, as in a resolved config. A metric that stops a stage must be measured.
    is_default = config.eval.metric == EvalConfig().metric
    for key, metric in asked.items():
        known = [*measured, *in_sets] if key == "eval.metric" else measured
        # pass@k of a term is there if all its values are 0 or 1, which shows when it is measured.
        term = re.sub(r"pass@\d+/", "", metric)
        of_pairs = metric in (PAIR_ACCURACY, REWARD_MARGIN)  # which workflows decide
        if term not in known and not of_pairs and not (key == "eval.metric" and is_default):
            yield ConfigError(
                f"{key} is {metric!r}, which no reward term measures",
                where=loaded.where(key),
                expected=f"one of {listing(known)}",
                hint=suggestion(metric, known) or f"set {key}={known[0]}",
            )


def _greedy_samples_differ(loaded: LoadedConfig) -> Problems:
    """Checks that a held-out set with several samples of a prompt does not decode greedily."""
    section = loaded.config.eval
    asked = [("eval", section.samples, section.temperature)]
    for name, own in section.sets.items():
        samples = section.samples if own.samples is None else own.samples
        temperature = section.temperature if own.temperature is None else own.temperature
        asked.append((f"eval.sets.{name}", samples, temperature))
    for key, samples, temperature in asked:
        if samples > 1 and temperature == 0:
            yield ConfigError(
                f"{key} takes several samples of each prompt with greedy decoding, which are equal",
                where=loaded.where(f"{key}.samples"),
                found=f"{samples} samples, temperature 0",
                hint=f"set {key}.samples=1, or {key}.temperature above 0",
            )


def _stops_are_measured(loaded: LoadedConfig) -> Problems:
    """Checks that stages which stop at a metric have held-out data and terms that score it."""
    config = loaded.config
    needed = {"data.eval": config.data.eval, "rewards.terms": config.rewards.terms}
    missing = [key for key, value in needed.items() if not value]
    for name, prefix in loaded.stage_prefixes():
        if missing and config.stage_config(name).stop is not None:
            yield ConfigError(
                f"stage {name!r} is to stop at a held-out metric, which nothing measures",
                where=loaded.where(f"{prefix}stop"),
                found=f"no {' and no '.join(missing)}",
                hint=f"set {missing[0]}, or {prefix}stop=null",
            )


def _trackers_exist(loaded: LoadedConfig) -> Problems:
    for name in loaded.config.tracking.to:
        try:
            find_entry(TRACKERS, name, kind="tracker", error=ConfigError)
        except ConfigError as problem:
            problem.where = loaded.where("tracking.to")
            yield problem


_CHECKS: tuple[Callable[[LoadedConfig], Problems], ...] = (
    _stages_are_named,
    check_files.workflow_files_exist,
    _mini_batches_divide,
    _steps_or_epochs,
    # Before data, which a plan for other machines does without.
    check_files.cluster_file_exists,
    check_files.data_files_exist,
    _keys_of_rows_are_read,
    _roles_copy_roles,
    check_files.model_folders_exist,
    check_files.environment_files_exist,
    check_files.reward_files_exist,
    _calls_end_before_a_stall,
    _metrics_are_measured,
    _greedy_samples_differ,
    _stops_are_measured,
    _samples_fit,
    _alphabet_covers_sums,
    _trackers_exist,
)
