"""Checks that one key alone cannot make: what must divide, what must be named, what must exist.

All of them read the configuration and the file system only, so that a mistake ends a run before
any tensor library is imported. Roles, backends and data fields are checked by those who know them:
the program, the registry and the data reader.
"""

from __future__ import annotations

from collections.abc import Callable

from flowrl.config import check_files, check_rewards, check_sizes
from flowrl.config.load import LoadedConfig
from flowrl.config.nearest import listing, one_of_them, suggestion
from flowrl.config.problems import Problems
from flowrl.config.schema import ArithmeticData, CharTokenizer
from flowrl.errors import ConfigError, combine

__all__ = ["check_config"]


def check_config(loaded: LoadedConfig, *, elsewhere: bool = False) -> None:
    """Checks a validated configuration as a whole.

    Args:
        elsewhere: It is for other machines, and so are its data.

    Raises:
        ConfigError: One error for all that is wrong: the first in full, the others by name.
    """
    left_out = (check_files.data_files_exist,) if elsewhere else ()
    checks = [check for check in _CHECKS if check not in left_out]
    problems = [problem for check in checks for problem in check(loaded)]
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
        key = f"roles.{name}.copy_of"
        if role.copy_of is None:
            continue
        if role.copy_of not in roles:
            others = [other for other in roles if other != name]
            yield ConfigError(
                f"no role is called {role.copy_of!r}",
                where=loaded.where(key),
                expected=f"one of {listing(others)}",
                hint=one_of_them(role.copy_of, others),
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
                    hint=f"add {''.join(missing)} to it, or take other data than built-in sums",
                )


def _environments_are_whole(loaded: LoadedConfig) -> Problems:
    for name, role in loaded.config.roles.items():
        if role.environment is None and role.options:
            yield ConfigError(
                f"{name} has options, but no environment that they are for",
                where=loaded.where(f"roles.{name}.options"),
                found=listing(role.options),
                hint=f"set roles.{name}.environment=FILE.py:NAME, or leave the options out",
            )
        if role.environment is None:
            continue
        of_models = {
            "model": role.model,
            "copy_of": role.copy_of,
            "tokenizer": role.tokenizer,
            "optimizer": role.optimizer,
        }
        for key, value in of_models.items():
            if value is not None:
                yield ConfigError(
                    f"{name} is an environment, which has no {key}",
                    where=loaded.where(f"roles.{name}.{key}"),
                    hint=f"leave out roles.{name}.{key} or roles.{name}.environment",
                )


def _sums_have_no_difficulty(loaded: LoadedConfig) -> Problems:
    data = loaded.config.data
    if data.difficulty is not None and isinstance(data.train, ArithmeticData):
        yield ConfigError(
            "data.difficulty reads a field of rows, and built-in sums carry no solve rate",
            where=loaded.where("data.difficulty"),
            found="data.train of kind arithmetic",
            hint="leave data.difficulty out, or write the rows into a file with the field "
            f"{data.difficulty.field!r}",
        )


_CHECKS: tuple[Callable[[LoadedConfig], Problems], ...] = (
    _stages_are_named,
    check_files.workflow_files_exist,
    check_sizes.mini_batches_divide,
    check_sizes.stops_are_allowed,
    # Before data, which a plan for other machines does without.
    check_files.cluster_file_exists,
    check_files.data_files_exist,
    _sums_have_no_difficulty,
    _roles_copy_roles,
    check_files.model_folders_exist,
    check_files.environment_files_exist,
    _environments_are_whole,
    check_rewards.terms_are_whole,
    check_rewards.calls_end_before_a_stall,
    check_rewards.metrics_are_measured,
    check_rewards.stops_are_measured,
    check_sizes.samples_fit,
    _alphabet_covers_sums,
)
