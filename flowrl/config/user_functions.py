"""Checks the definitions of a user's file by its text; nothing of it is run.

So every command reports a misspelt name, a wrong parameter or a syntax error in milliseconds,
without importing what the file imports. What only an execution shows (a failing import, a name that
a call defines) is left to the code that opens the file.
"""

from __future__ import annotations

import ast
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from flowrl.errors import ConfigError
from flowrl.wording import listing, one_of_them, suggestion

__all__ = [
    "ENVIRONMENT_OFFERS",
    "REWARD_OFFERS",
    "Parameters",
    "environment_parameters",
    "environment_problems",
    "reward_parameters",
    "reward_problems",
]

REWARD_OFFERS = ("prompt", "response", "answer", "row")
"""Parameters that a reward function may have."""

ENVIRONMENT_OFFERS = {
    "reset": ("row", "seed", "prompt", "answer", "sample"),
    "step": ("text", "turn", "finish", "tokens"),
}
"""Parameters that the methods of an environment may have."""

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The parameters of a user's function.

    Attributes:
        required: Parameters without a default.
        optional: Parameters with a default.
        takes_all: True if the function has `**kwargs`.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...]
    takes_all: bool

    def asks_for(self, name: str) -> bool:
        """True if the function receives the value of that name."""
        return self.takes_all or name in self.required or name in self.optional


def reward_problems(target: str, where: str) -> Iterator[ConfigError]:
    """Yields the problems of the reward function `FILE.py:NAME`."""
    path, _, name = target.rpartition(":")
    definition = yield from _definition_in_file(target, "reward", "function", where)
    if isinstance(definition, ast.AsyncFunctionDef):
        yield ConfigError(
            f"reward {name!r} is an async function",
            where=where,
            found=f"{path}:{definition.lineno}",
            hint="make it an ordinary function; it may call asyncio.run itself",
        )
    elif isinstance(definition, ast.FunctionDef) and not definition.decorator_list:
        yield from _not_offered(f"reward {target}", _parameters(definition), REWARD_OFFERS, where)


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
            parameters = _parameters(methods[method], bound=True)
            yield from _not_offered(f"{target}.{method}", parameters, offered, where)


def reward_parameters(target: str) -> Parameters | None:
    """Returns the parameters of a reward function; None where its text does not show them."""
    own = _definition_of(target)
    return _parameters(own) if isinstance(own, Function) and not own.decorator_list else None


def environment_parameters(target: str, method: str) -> Parameters | None:
    """Returns the parameters of an environment's method; None where its text hides them."""
    definition = _definition_of(target)
    own = _methods(definition).get(method) if isinstance(definition, ast.ClassDef) else None
    return None if own is None or own.decorator_list else _parameters(own, bound=True)


def _definition_in_file(
    target: str, kind: str, what: str, where: str
) -> Generator[ConfigError, None, ast.stmt | None]:
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
    definition = _definition(module, name)
    if definition is None and _shows_its_names(module):
        defined = [s.name for s in module.body if isinstance(s, Function | ast.ClassDef)]
        own = [each for each in defined if not each.startswith("_")]
        several = "classes" if what == "class" else f"{what}s"
        yield ConfigError(
            f"{path} has no {what} {name!r}",
            where=where,
            found=f"{several} {listing(own)}" if own else "a file that defines none",
            hint=suggestion(name, own) or "write FILE.py:NAME with a name that it defines",
        )
    return definition


def _definition_of(target: str) -> ast.stmt | None:
    path, _, name = target.rpartition(":")
    with suppress(OSError, SyntaxError, ValueError):
        return _definition(ast.parse(Path(path).read_bytes()), name)
    return None


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields statements that bind names of the module, also inside `if`, `try` and `with`."""
    for statement in body:
        yield statement
        for name in ("body", "orelse", "finalbody"):
            if not isinstance(statement, Function | ast.ClassDef):
                yield from _statements(getattr(statement, name, []))
        for handler in getattr(statement, "handlers", []):
            yield from _statements(handler.body)


def _bound(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [statement.name]
        case ast.Import() | ast.ImportFrom():
            return [a.asname or a.name.partition(".")[0] for a in statement.names]
        case _:
            inner = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
            return [node.id for node in inner if isinstance(node.ctx, ast.Store)]


def _definition(module: ast.Module, name: str) -> ast.stmt | None:
    """Returns the last statement that binds a name."""
    statements = [s for s in _statements(module.body) if name in _bound(s)]
    return statements[-1] if statements else None


def _shows_its_names(module: ast.Module) -> bool:
    """True if the text of the module shows all names that it defines."""
    for node in ast.walk(module):
        match node:
            case ast.ImportFrom(names=[ast.alias(name="*")]):
                return False
            case ast.Call(func=ast.Name(id="globals" | "setattr" | "exec")):
                return False
            case _:
                pass
    return True


def _methods(made: ast.ClassDef) -> dict[str, Function]:
    return {s.name: s for s in _statements(made.body) if isinstance(s, Function)}


def _parameters(function: Function, *, bound: bool = False) -> Parameters:
    """Returns the parameters; with `bound` the first one is the object and left out."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    required = [a.arg for a in positional[:first_default]]
    optional = [a.arg for a in positional[first_default:]]
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        (required if default is None else optional).append(argument.arg)
    return Parameters(
        required=tuple(required[1:] if bound else required),
        optional=tuple(optional),
        takes_all=arguments.kwarg is not None,
    )


def _not_offered(
    who: str, parameters: Parameters, offered: tuple[str, ...], where: str
) -> Iterator[ConfigError]:
    for name in parameters.required:
        if name not in offered:
            yield ConfigError(
                f"{who} asks for {name!r}, which is not offered",
                where=where,
                expected=f"parameters of {listing(offered)}, or with a default",
                hint=one_of_them(name, offered),
            )
            return
