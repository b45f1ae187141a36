"""Reads the options of a training command in a shell script.

This is no shell. It knows variables (`$A`, `${A}`, `${A:-default}`), arrays (`ARGS=(...)`,
`${ARGS[@]}`) and integer arithmetic (`$((A * 2))`); conditions, loops and the output of commands
are not evaluated.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from flowrl.config.tree import Origin, Value
from flowrl.config.yaml_tree import read_yaml_value
from flowrl.errors import ConfigError

_ARITHMETIC = re.compile(r"\$\(\((.+?)\)\)(?!\))")
_VARIABLE = re.compile(r"\$\[([^\]]*)\]|\$\{(\w+)(?::?-([^{}]*))?\}|\$(\w+)")
_ARRAY = re.compile(r"\$\{(\w+)\[[@*]\]\}")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_OVERRIDE = re.compile(r"\+{0,2}(~?[A-Za-z_][\w@/-]*(?:\.[\w@/-]+)*)=(.*)", re.DOTALL)
_LAUNCHER = re.compile(r"(.*/)?train(_async)?\.py|(verl|recipe)\.[\w.]+|(.*/)?main_\w+\.py")
_SHELL_ONLY = re.compile(r"\d*[<>].*|\$[@*]|\$\{@.*\}")
"""Redirections, and the arguments of the script itself."""
_DEEPEST = 3
_LONGEST = 200
"""Characters of an arithmetic expression that is evaluated."""
_PUNCTUATION = "();&|\n"
# Parentheses of arithmetic, which would end a word.
_HIDDEN = str.maketrans("()", "\x01\x02")
_SHOWN = str.maketrans("\x01\x02", "()")

_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass
class _Shell:
    """What a script has set so far."""

    variables: dict[str, str] = field(default_factory=lambda: {"HOME": str(Path.home())})
    arrays: dict[str, list[str]] = field(default_factory=dict)

    def expand(self, text: str) -> str:
        """Replaces variables and arithmetic; a variable that the script does not set stays."""
        for _ in range(_DEEPEST):  # a default may have variables with defaults of their own
            text = _VARIABLE.sub(self._replacement, text)
        return text

    def _replacement(self, match: re.Match[str]) -> str:
        expression, braced, default, bare = match.groups()
        if expression is not None:
            if len(expression) > _LONGEST:
                return "$((...))"
            names = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", self._number, expression.translate(_SHOWN))
            try:
                return str(_calculated(ast.parse(names, mode="eval").body))
            except (ArithmeticError, SyntaxError, ValueError):
                return f"$(({expression.translate(_SHOWN)}))"
        unset = f"${braced or bare}" if default is None else default
        return self.variables.get(braced or bare, unset)

    def _number(self, match: re.Match[str]) -> str:
        return self.variables.get(match[1], match[0])


def _calculated(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return int(_OPERATORS[type(op)](_calculated(left), _calculated(right)))
    raise ValueError("no integer arithmetic")


def options_of(text: str, path: Path) -> dict[str, Value]:
    """Returns the options of the training commands of a script, in order.

    `key=value` has the key as written, without the signs of Hydra (`+key`); `--flag value` has the
    key `--flag`, and True for a flag without a value. An array that the script does not set has the
    key `${NAME[@]}`, and None.

    Raises:
        ConfigError: A quotation does not end.
    """
    shell = _Shell()
    options: dict[str, Value] = {}
    for statement in _statements(text, path, shell):
        options |= _options(statement, shell)
    return options


def _statements(text: str, path: Path, shell: _Shell) -> Iterator[list[str]]:
    """Yields the words of each command after its assignments, and fills `shell`."""
    text = re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    text = _ARITHMETIC.sub(
        lambda match: "$[" + "".join(match[1].split()).translate(_HIDDEN) + "]", text
    )
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_PUNCTUATION)
    lexer.whitespace, lexer.whitespace_split = " \t\r", True
    words: list[str] = []
    array: list[str] | None = None
    try:
        for token in lexer:
            ends = bool(token) and not token.strip(_PUNCTUATION)
            if array is not None:
                if ends and ")" in token:
                    shell.arrays[words.pop().rstrip("+=")], array = array, None
                elif not ends:
                    array += _with_arrays([token], shell)
            elif ends and token.startswith("(") and words and words[-1].endswith("="):
                name, adds = words[-1].rstrip("+="), words[-1].endswith("+=")
                array = [*shell.arrays.get(name, ())] if adds else []
                if ")" in token:  # empty, or nothing but comments
                    shell.arrays[words.pop().rstrip("+=")], array = array, None
            elif ends:
                yield _without_assignments(words, shell)
                words = []
            else:
                words.append(token)
    except ValueError as error:
        raise ConfigError(
            f"the script cannot be read: {error}",
            where=f"{path}:{lexer.lineno}",
            hint="close the quotation, or write the options into a file of their own",
        ) from None
    yield _without_assignments(words, shell)


def _without_assignments(words: list[str], shell: _Shell) -> list[str]:
    rest = words[1:] if words[:1] == ["export"] else words
    while rest and (match := _ASSIGNMENT.fullmatch(rest[0])):
        name, value = match.groups()
        if not value.endswith("$") and "`" not in value:  # the output of a command
            shell.variables[name] = shell.expand(value)
        rest = rest[1:]
    return rest


def _options(words: list[str], shell: _Shell) -> dict[str, Value]:
    launchers = [place for place, word in enumerate(words) if _LAUNCHER.fullmatch(word)]
    if launchers:
        words = words[launchers[-1] + 1 :]
    elif not (words and (words[0].startswith("--") or "." in words[0].partition("=")[0])):
        return {}
    options: dict[str, Value] = {}
    flag: str | None = None
    for word in _with_arrays(words, shell):
        if _SHELL_ONLY.fullmatch(word):
            continue
        override = _OVERRIDE.fullmatch(word)
        if word.startswith("--"):
            flag, equals, text = word.partition("=")
            options[flag] = _value(text, shell) if equals else True
        elif array := _ARRAY.fullmatch(word):
            options[array[0]] = None
        elif override and (flag is None or "." in override[1]):
            options[override[1]] = _value(override[2], shell)
        elif flag is not None:
            value, before = _value(word, shell), options[flag]
            earlier = before if isinstance(before, list) else [before]
            options[flag] = value if before is True else [*earlier, value]
    return options


def _with_arrays(words: list[str], shell: _Shell) -> Iterator[str]:
    for word in words:
        array = _ARRAY.fullmatch(word)
        if array is not None and array[1] in shell.arrays:
            yield from shell.arrays[array[1]]
        else:
            yield word


def _value(text: str, shell: _Shell) -> Value:
    return read_yaml_value(shell.expand(text), Origin()).plain
