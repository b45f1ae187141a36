"""Checks the definitions of a user's file by its text; nothing of it is run.

So every command reports a misspelt name, a wrong parameter or a syntax error in milliseconds,
without importing what the file imports. What only an execution shows (a failing import, a name that
a call defines) is left to the code that opens the file.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from flowrl.config.reward_signatures import (
    Parameters,
    missing_parameter,
    shown_signatures,
    signature_of,
)
from flowrl.errors import ConfigError
from flowrl.wording import listing, suggestion

ENVIRONMENT_OFFERS = {
    "reset": ("row", "seed", "prompt", "answer", "sample"),
    "step": ("text", "turn", "finish", "tokens"),
}
"""Parameters that the methods of an environment may have."""

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


def reward_problems(target: str, where: str) -> Iterator[ConfigError]:
    """Yields the problems of the reward function `FILE.py:NAME`."""
    definition = yield from _definition_in_file(target, "reward", "function", where)
    if isinstance(definition, Function) and not definition.decorator_list:
        parameters = _parameters(definition)
        name = missing_parameter(parameters, signature := signature_of(parameters))
        if name is not None:
            offered = shown_signatures()
            yield _not_offered(f"reward {target}", name, offered, signature.offers, where)


def environment_problems(target: str, where: str) -> Iterator[ConfigError]:
    """Yields the problems of the environment `FILE.py:NAME`."""
    path = target.rpartition(":")[0]
    definition = yield from _definition_in_file(target, "environment", "class", where)
    if not isinstance(definition, ast.ClassDef) or definition.decorator_list:
        return
    methods = _methods(definition)
    for method, offered in ENVIRONMENT_OFFERS.items():
        if method not in methods:
            if not definition.bases and not definition.keywords and "__getattr__" not in methods:
                yield ConfigError(
                    f"{target} has no {method}()",
                    where=where,
                    found=f"{path}:{definition.lineno}",
                    hint=f"write `async def {method}(self, {', '.join(offered[:2])})`",
                )
        elif not methods[method].decorator_list:
            needed = _parameters(methods[method], bound=True).required
            name = next((name for name in needed if name not in offered), None)
            if name is not None:
                who = f"{target}.{method}"
                yield _not_offered(who, name, listing(offered), offered, where)


def reward_reference(function: object) -> str:
    """Returns `FILE.py:NAME` of a reward function.

    Raises:
        ConfigError: It is not at the top level of a Python file.
    """
    name = getattr(function, "__name__", "")
    file = inspect.getsourcefile(function) if inspect.isfunction(function) else None
    if (
        file is None
        or not file.endswith(".py")
        or not Path(file).is_file()
        or getattr(function, "__qualname__", "") != name
        or not name.isidentifier()
    ):
        raise ConfigError(
            "a reward must be a function at the top level of a Python file, which scorer processes "
            "run",
            where="rewards",
            found=repr(function),
            hint="write it as `def my_reward(response, answer)` into a file, and pass it or name "
            "it FILE.py:my_reward",
        )
    return f"{file}:{name}"


def with_reward_references(config: Mapping[str, object]) -> Mapping[str, object]:
    """Returns the values of a configuration with references to the functions of reward terms."""
    rewards = config.get("rewards")
    terms = rewards.get("terms") if isinstance(rewards, Mapping) else None
    if not isinstance(rewards, Mapping) or not isinstance(terms, list | tuple):
        return config
    named = [
        {**term, "use": reward_reference(term["use"])}
        if isinstance(term, Mapping) and callable(term.get("use"))
        else term
        for term in terms
    ]
    return {**config, "rewards": {**rewards, "terms": named}}


def reward_reads_answer(target: str) -> bool:
    """True if a reward function receives the reference answer, or its text does not show it."""
    definition = _definition_of(target)
    if not isinstance(definition, Function) or definition.decorator_list:
        return True
    parameters = _parameters(definition)
    signature = signature_of(parameters)
    return bool(signature.answer) and parameters.asks_for(signature.answer)


def environment_parameters(target: str, method: str) -> Parameters | None:
    """Returns the parameters of an environment's method; None where its text hides them."""
    definition = _definition_of(target)
    own = _methods(definition).get(method) if isinstance(definition, ast.ClassDef) else None
    return None if own is None or own.decorator_list else _parameters(own, bound=True)


def _definition_in_file(
    target: str, kind: str, what: str, where: str
) -> Generator[ConfigError, None, ast.AST | None]:
    """Yields the problem of finding the definition of a target, and returns the definition."""
    path, _, name = target.rpartition(":")
    try:
        module = ast.parse(Path(path).read_bytes(), filename=path)
    except SyntaxError as reason:
        line = f"{path}:{reason.lineno}" if reason.lineno else path
        text = (reason.text or "").strip()
        yield ConfigError(
            f"the {kind} file is no Python: {reason.msg} ({line})",
            where=where,
            found=repr(text) if text else None,
            hint=f"correct the file at {line}",
        )
        return None
    except (OSError, ValueError) as reason:
        yield ConfigError(
            f"the {kind} file cannot be read: {reason}",
            where=where,
            hint="give a Python file that may be read",
        )
        return None
    definition = dict(_bindings(module)).get(name)
    imports_all = any(
        isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in ast.walk(module)
    )
    if definition is None and not imports_all:
        defined = [s.name for s in module.body if isinstance(s, Function | ast.ClassDef)]
        own = [each for each in defined if not each.startswith("_")]
        yield ConfigError(
            f"{path} has no {what} {name!r}",
            where=where,
            found=f"definitions of {listing(own)}" if own else "a file that defines none",
            hint=suggestion(name, own) or "write FILE.py:NAME with a name that it defines",
        )
    return definition


def _definition_of(target: str) -> ast.AST | None:
    path, _, name = target.rpartition(":")
    with suppress(OSError, SyntaxError, ValueError):
        return dict(_bindings(ast.parse(Path(path).read_bytes()))).get(name)
    return None


def _bindings(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yields the names that a module or a class binds, also inside `if`, `try` and `with`."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield child.name, child
            case ast.alias():
                yield child.asname or child.name.partition(".")[0], child
            case ast.Name(ctx=ast.Store()):
                yield child.id, child
            case _:
                yield from _bindings(child)


def _methods(made: ast.ClassDef) -> dict[str, Function]:
    return {name: node for name, node in _bindings(made) if isinstance(node, Function)}


def _parameters(function: Function, *, bound: bool = False) -> Parameters:
    """Returns the parameters; with `bound` the first one is the object and left out."""
    arguments = function.args
    positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    first_default = len(positional) - len(arguments.defaults)
    by_name = list(zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True))
    return Parameters(
        required=(*positional[bound:first_default], *(a.arg for a, value in by_name if not value)),
        optional=(*positional[first_default:], *(a.arg for a, value in by_name if value)),
        takes_all=arguments.kwarg is not None,
    )


def _not_offered(
    who: str, name: str, expected: str, offered: tuple[str, ...], where: str
) -> ConfigError:
    return ConfigError(
        f"{who} asks for {name!r}, which is not offered",
        where=where,
        expected=f"parameters of {expected}, or with a default",
        hint=suggestion(name, offered) or "rename the parameter, or give it a default",
    )
