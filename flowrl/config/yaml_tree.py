"""Reads YAML files as plain values that remember their lines.

Scalars are read as in YAML 1.2's core schema, because the 1.1 that PyYAML reads by default
surprises people in configs: there `1e-4` is text, `010` is 8, `1:30` is 90, `no` is false and
`2024-01-01` is a date. Here numbers are decimal, only `true` and `false` are truth values, and
digits after a leading zero (an alphabet, a number in a file name) stay text. A key must be text
and occur once in its mapping, and a file is one mapping.

The scanner is libyaml's. Scanners in Python (PyYAML's own, ruamel.yaml's) take tens of times
as long, and refuse a tab between a value and a comment, which YAML allows.

Positions are kept by dotted path: `rewards.terms.0.weight` is the first term's weight.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import yaml

from flowrl.errors import ConfigError
from flowrl.wording import counted, listing, nearest_file

__all__ = [
    "CONFIG",
    "YAML_SUFFIXES",
    "FileKind",
    "Places",
    "Tree",
    "Value",
    "read_yaml_file",
    "read_yaml_value",
]

YAML_SUFFIXES = (".yaml", ".yml")

Value: TypeAlias = "str | int | float | bool | list[Value] | dict[str, Value] | None"


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012  (PyYAML's own class attribute)


_NUMBER = list("-+.0123456789")
_DIGITS = r"(0|[1-9][0-9]{0,99})"
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", rf"[-+]?{_DIGITS}", _NUMBER),
    ("float", rf"[-+]?(\.[0-9]+|{_DIGITS}(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|nan)", _NUMBER),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^({_pattern})$"), _first
    )


_FastLoader: type[yaml.SafeLoader] | type[yaml.CSafeLoader] = _Loader
if hasattr(yaml, "CSafeLoader"):

    class _CLoader(yaml.CSafeLoader):
        yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    _FastLoader = _CLoader


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """The mapping of a file.

    Attributes:
        values: The mapping; nested mappings and lists are plain.
        lines: Line (from 1) of each value by dotted path; the line of its key where it has one.
    """

    values: dict[str, Value]
    lines: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileKind:
    """The kind of file that is expected, for messages.

    Attributes:
        noun: Name of the kind: `config`, `cluster file`.
        begins: Hint that shows the first keys of such a file.
        hint: Hint for a file of another kind.
        may_be_empty: True if an empty file is no mistake.
        folders: Folders of ready-made files of the kind.
    """

    noun: str
    begins: str
    hint: str
    may_be_empty: bool = False
    folders: tuple[Path, ...] = ()


CONFIG = FileKind(
    noun="config",
    begins="begin with `stages: [grpo]` and `data:`",
    hint="give the path of a YAML file",
    folders=(Path("configs"),),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The places of the keys of a file: `cluster.yaml:5 (nodes.0.cores)`.

    A missing key has the line of the nearest section above it.
    """

    path: Path
    lines: Mapping[str, int]

    def __call__(self, key: str) -> str:
        above = key
        while above and above not in self.lines:
            above = above.rpartition(".")[0]
        line = f":{self.lines[above]}" if above else ""
        return f"{self.path}{line} ({key})" if key else str(self.path)


def read_yaml_file(path: Path, kind: FileKind = CONFIG) -> Tree:
    """Reads the one mapping of a file.

    Args:
        path: The file.
        kind: The kind of file that is expected, for messages.

    Raises:
        ConfigError: The file is missing (with the nearest name in its folder), cannot be read, is
            not YAML (with the line), is empty or no mapping, or names a key twice.
    """
    node = _compose(_read(path, kind), str(path))
    if node is None:
        if kind.may_be_empty:
            return Tree(values={})
        raise ConfigError(
            "the file is empty",
            where=str(path),
            expected="a mapping of keys",
            hint=kind.begins,
        )
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(
            "the file is no mapping",
            where=f"{path}:{node.start_mark.line + 1}",
            found=_KINDS[type(node)],
            expected="`key: value` lines",
            hint=kind.begins,
        )
    lines: dict[str, int] = {}
    values = _Reader(str(path), lines).value(node, "")
    assert isinstance(values, dict)
    return Tree(values=values, lines=lines)


def read_yaml_value(text: str, where: str) -> Value:
    """Reads the value of an override: a single value, a `[list]` or a `{mapping: of them}`.

    Anything else is plain text, so that templates and free text need no second layer of quotes:
    `{question}`, `Q: what?`, `#1`.

    Raises:
        ConfigError: A list, mapping or quoted text that does not end; `where` names it.
    """
    try:
        node = _compose(text, where)
    except ConfigError:
        if text.lstrip()[:1] in ("[", "{", '"', "'"):
            raise
        return text
    if isinstance(node, yaml.CollectionNode) and node.flow_style:
        return text if _is_template(node) else _Reader(where, {}).value(node, "")
    if isinstance(node, yaml.ScalarNode) and (node.style or node.value == text.strip()):
        return _Reader(where, {}).value(node, "")
    return text


def _is_template(node: yaml.CollectionNode) -> bool:
    """True for keys without values, such as `{question}`; a written null is a value."""
    if not isinstance(node, yaml.MappingNode) or not node.value:
        return False
    return all(isinstance(v, yaml.ScalarNode) and not (v.value or v.style) for _, v in node.value)


_KINDS: dict[type[yaml.Node], str] = {
    yaml.MappingNode: "a mapping",
    yaml.SequenceNode: "a list",
    yaml.ScalarNode: "a single value",
}


def _read(path: Path, kind: FileKind) -> str:
    if path.suffix == ".py":
        raise ConfigError(
            f"this is a Python file, not a {kind.noun}",
            where=str(path),
            hint=f"name a config and give it the workflow: CONFIG.yaml workflow={path}"
            if kind is CONFIG
            else kind.hint,
        )
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        folder = path.parent
        names = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
        configs = [name for name in names if name.endswith(YAML_SUFFIXES)]
        raise ConfigError(
            "no such file" if folder.is_dir() else f"no such file, and no folder {folder}",
            where=str(path),
            expected=f"a {kind.noun}; {folder} holds {listing(configs)}" if configs else None,
            hint=nearest_file(path, YAML_SUFFIXES, *kind.folders) or kind.hint,
        ) from None
    except IsADirectoryError:
        inside = sorted(p.name for p in path.iterdir() if p.suffix in YAML_SUFFIXES)
        raise ConfigError(
            "this is a folder, not a YAML file",
            where=str(path),
            found=f"{listing(inside)} in it" if inside else None,
            hint=_folder_hint(path, inside) or kind.hint,
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            "the file is not UTF-8 text",
            where=str(path),
            found=f"byte {error.object[error.start]:#04x} at {error.start}",
            hint=f"save it as UTF-8, or {kind.hint}",
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot read: {error.strerror}",
            where=str(path),
            hint="give a file that may be read (`ls -l` shows whose it is)",
        ) from None


def _folder_hint(folder: Path, configs: list[str]) -> str | None:
    if (folder / "config.yaml").is_file():
        return (
            f"its configuration is {folder / 'config.yaml'}; "
            f"to go on with this run: flowrl run --resume {folder}"
        )
    return f"name a file, such as {folder / configs[0]}" if configs else None


def _compose(text: str, name: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=_FastLoader)
    except RecursionError:
        raise _too_deep(name) from None
    except (yaml.YAMLError, UnicodeEncodeError):
        pass
    # The parser in Python says more of what is wrong, and where.
    try:
        return yaml.compose(text, Loader=_Loader)
    except RecursionError:
        raise _too_deep(name) from None
    except yaml.reader.ReaderError as error:
        raise ConfigError(
            "not YAML: a character that text cannot hold",
            where=name,
            found=repr(text[error.position : error.position + 1]),
            hint="write it as an escape in double quotes, or leave it out",
        ) from None
    except yaml.MarkedYAMLError as error:
        mark, lines = error.problem_mark or error.context_mark, text.splitlines()
        line = lines[mark.line] if mark is not None and mark.line < len(lines) else ""
        raise ConfigError(
            f"not YAML: {error.problem or error.context}",
            where=f"{name}:{mark.line + 1}" if mark is not None and "\n" in text else name,
            found=repr(line.strip()) if line else None,
            hint=_syntax_hint(line, error, lines),
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(
            f"not YAML: {str(error).splitlines()[0]}",
            where=name,
            hint="write `key: value` lines, nested by spaces",
        ) from None


_DEEPEST = 100
"""Limit of mappings and lists inside each other; a config has about six levels."""


def _too_deep(where: str) -> ConfigError:
    return ConfigError(
        "not YAML that can be read: brackets or indentation without end",
        where=where,
        expected=f"at most {_DEEPEST} mappings and lists inside of each other",
        hint="look for a bracket that is written again and again",
    )


def _syntax_hint(line: str, error: yaml.MarkedYAMLError, lines: Sequence[str]) -> str:
    mark, problem, begun = error.problem_mark, error.problem or "", error.context_mark
    if "\t" in line:
        return "indent with spaces, not tabs"
    if begun is not None and mark is not None and begun.line < mark.line:
        opened = "bracket" if "flow" in (error.context or "") else "quote"
        if opened == "bracket" or "quoted scalar" in (error.context or ""):
            return f"close the {opened} that line {begun.line + 1} opens"
    if mark is not None and _is_indented_wrongly(line, mark.column, problem):
        return _indentation_hint(lines[: mark.line], line, mark.line + 1)
    if "{" in line or ": " in line:
        return "put text that holds braces or a colon in quotes"
    return "look at this line and the one before it: brackets, quotes and spaces at the start"


def _is_indented_wrongly(line: str, column: int, problem: str) -> bool:
    """True if a line is wrong by where it begins, and not by what it contains."""
    before = line[:column]
    if "mapping values are not allowed" in problem:
        # The first colon of a line is a mistake only below a value that is one text already.
        return re.fullmatch(r"\s*(- +)*[\w.\"'-]+ *", before) is not None
    expects = ("expected <block end>", "expected '<document start>'")
    return problem.startswith(expects) and not before.strip()


def _indentation_hint(above: Sequence[str], line: str, number: int) -> str:
    written = [
        (place, text)
        for place, text in enumerate(above, start=1)
        if text.strip() and not text.lstrip().startswith("#")
    ]
    if not written:
        return f"indent line {number} as the keys that it belongs to"
    place, last = written[-1]
    is_entry = line.lstrip().startswith("-")
    # The keys of a list's entry begin after its dash.
    leading = " " if is_entry else " -"
    own, other = (len(text) - len(text.lstrip(leading)) for text in (line, last))
    what = "entries of a list" if is_entry else "keys"
    return (
        f"mend the indentation: line {number} begins after {counted(own, 'space')}, line {place} "
        f"after {other}, and {what} that belong together begin at the same place"
    )


class _Reader:
    """Converts nodes to values, and adds their lines to `lines`."""

    def __init__(self, name: str, lines: dict[str, int]) -> None:
        self.name = name
        self.lines = lines
        self.open: list[yaml.Node] = []

    def value(self, node: yaml.Node, path: str) -> Value:
        if node in self.open:
            raise ConfigError(
                "an anchor refers to itself",
                where=self._at(node),
                hint="write the value out where the alias (`*NAME`) stands",
            )
        self.lines.setdefault(path, node.start_mark.line + 1)
        if len(self.open) >= _DEEPEST:
            raise _too_deep(self._at(node))
        self.open.append(node)
        try:
            match node:
                case yaml.MappingNode():
                    return self._mapping(node, path)
                case yaml.SequenceNode():
                    return [
                        self.value(item, _join(path, str(index)))
                        for index, item in enumerate(node.value)
                    ]
                case _:
                    return self._scalar(node)
        finally:
            self.open.pop()

    def _mapping(self, node: yaml.MappingNode, path: str) -> dict[str, Value]:
        values: dict[str, Value] = {}
        first: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node)
            if key in values:
                raise ConfigError(
                    f"the key {key!r} stands twice in one mapping",
                    where=self._at(key_node),
                    found=f"first in line {first[key]}",
                    hint="keep one of them",
                )
            first[key] = key_node.start_mark.line + 1
            self.lines[_join(path, key)] = first[key]
            values[key] = self.value(value_node, _join(path, key))
        return values

    def _key(self, node: yaml.Node) -> str:
        if isinstance(node, yaml.ScalarNode):
            if node.value == "<<" and not node.style:
                raise ConfigError(
                    "merge keys are not read",
                    where=self._at(node),
                    hint="`extends: FILE.yaml` at the top takes over another file's keys",
                )
            key = self._scalar(node)
            if isinstance(key, str):
                return key
        found = node.value if isinstance(node, yaml.ScalarNode) else _KINDS[type(node)]
        raise ConfigError(
            "a key must be text",
            where=self._at(node),
            found=str(found),
            hint="put it in quotes"
            if isinstance(node, yaml.ScalarNode)
            else "write `key: value`, with one word for the key",
        )

    def _scalar(self, node: yaml.Node) -> str | int | float | bool | None:
        match node.tag.removeprefix("tag:yaml.org,2002:"):
            case "null":
                return None
            case "bool":
                return str(node.value).lower() == "true"
            case "int":
                return int(node.value)
            case "float":
                return float(node.value.replace(".inf", "inf").replace(".nan", "nan"))
            case "str":
                return str(node.value)
            case _:
                raise ConfigError(
                    f"the tag {node.tag} is not read",
                    where=self._at(node),
                    expected="plain values",
                    hint="leave the tag out",
                )

    def _at(self, node: yaml.Node) -> str:
        return f"{self.name}:{node.start_mark.line + 1}"


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
