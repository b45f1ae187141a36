"""Reads YAML as values that remember their lines.

Scalars are read as in YAML 1.2's core schema, because the 1.1 that PyYAML reads by default
surprises people in configs: there `1e-4` is text, `010` is 8, `1:30` is 90, `no` is false and
`2024-01-01` is a date. Here numbers are decimal, only `true` and `false` are truth values, and
digits after a leading zero (an alphabet, a number in a file name) stay text. A key must be text
and occur once in its mapping, and a file is one mapping.

The scanner is libyaml's. Scanners in Python (PyYAML's own, ruamel.yaml's) take tens of times
as long, and refuse a tab between a value and a comment, which YAML allows.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml
from yaml.constructor import SafeConstructor

from flowrl.config.tree import Node, Origin, Scalar
from flowrl.errors import ConfigError
from flowrl.wording import listing, nearest_file

YAML_SUFFIXES = (".yaml", ".yml")


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012  (PyYAML's own class attribute)


class _FastLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


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


def read_yaml_file(path: Path, kind: FileKind = CONFIG) -> Node:
    """Reads the one mapping of a file.

    Args:
        path: The file.
        kind: The kind of file that is expected, for messages.

    Raises:
        ConfigError: The file is missing (with the nearest name in its folder), cannot be read, is
            not YAML (with the line), is empty or no mapping, or names a key twice.
    """
    root = _compose(read_text(path, kind), str(path))
    if root is None and kind.may_be_empty:
        return Node({}, Origin(path))
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(
            "the file is empty" if root is None else "the file is no mapping",
            where=str(path) if root is None else f"{path}:{root.start_mark.line + 1}",
            found=None if root is None else _KINDS[type(root)],
            expected="`key: value` lines",
            hint=kind.begins,
        )
    return _node(root, Origin(path))


def read_yaml_value(text: str, origin: Origin) -> Node:
    """Reads the value of an override: a single value, a `[list]` or a `{mapping: of them}`.

    Anything else is plain text, so that templates and free text need no second layer of quotes:
    `{question}`, `Q: what?`, `#1`.

    Raises:
        ConfigError: A list, mapping or quoted text that does not end.
    """
    try:
        node = _compose(text, str(origin))
    except ConfigError:
        if text.lstrip()[:1] in ("[", "{", '"', "'"):
            raise
        node = None
    match node:
        case yaml.CollectionNode():
            is_value = node.flow_style and not _is_template(node)
        case yaml.ScalarNode():
            is_value = node.style or node.value == text.strip()
        case _:
            is_value = False
    return _node(node, origin) if node is not None and is_value else Node(text, origin)


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


def read_text(path: Path, kind: FileKind) -> str:
    """Returns the text of a file.

    Raises:
        ConfigError: The file is missing or cannot be read; the message has the nearest name.
    """
    where, folder = str(path), path.parent
    if path.suffix == ".py":
        is_config = f"name a config and give it the workflow: CONFIG.yaml workflow={path}"
        raise ConfigError(
            f"this is a Python file, not a {kind.noun}",
            where=where,
            hint=is_config if kind is CONFIG else kind.hint,
        )
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            "the file is not UTF-8 text",
            where=where,
            found=f"byte {error.object[error.start]:#04x} at {error.start}",
            hint=f"save it as UTF-8, or {kind.hint}",
        ) from None
    except OSError as error:
        what = f"cannot read: {error.strerror}"
        if isinstance(error, FileNotFoundError):
            what = "no such file" if folder.is_dir() else f"no such file, and no folder {folder}"
        shown = path if path.is_dir() else folder
        names = sorted(file.name for file in shown.glob("*") if file.suffix in YAML_SUFFIXES)
        raise ConfigError(
            "this is a folder, not a YAML file" if path.is_dir() else what,
            where=where,
            expected=f"a {kind.noun}; {shown} holds {listing(names)}" if names else None,
            hint=nearest_file(path, YAML_SUFFIXES, *kind.folders) or kind.hint,
        ) from None


def _compose(text: str, name: str) -> yaml.Node | None:
    try:
        try:
            return yaml.compose(text, Loader=_FastLoader)
        except (yaml.YAMLError, UnicodeEncodeError):
            # The parser in Python says more of what is wrong, and where.
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
            hint=_syntax_hint(line, error),
        ) from None


_DEEPEST = 100
"""Limit of mappings and lists inside each other; a config has about six levels."""


def _too_deep(where: str) -> ConfigError:
    return ConfigError(
        "not YAML that can be read: brackets or indentation without end",
        where=where,
        expected=f"at most {_DEEPEST} mappings and lists inside of each other",
        hint="look for a bracket that is written again and again, or an alias inside its anchor",
    )


def _syntax_hint(line: str, error: yaml.MarkedYAMLError) -> str:
    if "\t" in line:
        return "indent with spaces, not tabs"
    if error.context_mark is not None and (error.context or "").endswith(_ENCLOSED):
        return f"close the bracket or quote that line {error.context_mark.line + 1} opens"
    return (
        "put text that holds braces or a colon in quotes, and begin keys that belong together, or "
        "entries of a list, in the same column"
    )


_ENCLOSED = ("flow mapping", "flow sequence", "quoted scalar")
"""The contexts of the parser's errors that a bracket or a quote begins."""


def _node(node: yaml.Node, origin: Origin, depth: int = 0) -> Node:
    """Converts a node of YAML.

    Args:
        node: The node.
        origin: The override, or the file, without a line.
        depth: Number of mappings and lists around it.
    """
    here = _at(node, origin)
    if depth >= _DEEPEST:
        raise _too_deep(str(here))
    if isinstance(node, yaml.SequenceNode):
        return Node([_node(item, origin, depth + 1) for item in node.value], here)
    if not isinstance(node, yaml.MappingNode):
        return Node(_scalar(node, here), here)
    entries: dict[str, Node] = {}
    for key_node, value_node in node.value:
        place = _at(key_node, origin)
        key = _key(key_node, place)
        if key in entries:
            raise ConfigError(
                f"the key {key!r} is written twice in one mapping",
                where=str(place),
                found=f"first at {entries[key].origin}",
                hint="keep one of them",
            )
        entries[key] = _node(value_node, origin, depth + 1)
        entries[key].origin = place
    return Node(entries, here)


def _at(node: yaml.Node, origin: Origin) -> Origin:
    return origin if origin.file is None else Origin(origin.file, node.start_mark.line + 1)


def _key(node: yaml.Node, place: Origin) -> str:
    if not isinstance(node, yaml.ScalarNode):
        key, shown = None, _KINDS[type(node)]
    else:
        key, shown = _scalar(node, place), node.value
        if key == "<<" and not node.style:
            raise ConfigError(
                "merge keys are not read",
                where=str(place),
                hint="`extends: FILE.yaml` at the top takes over another file's keys",
            )
    if isinstance(key, str):
        return key
    raise ConfigError(
        "a key must be text",
        where=str(place),
        found=shown,
        hint="write `key: value`, with one word, or text in quotes, for the key",
    )


def _scalar(node: yaml.Node, place: Origin) -> Scalar:
    with suppress(yaml.YAMLError, ValueError):
        value = SafeConstructor().construct_object(node)
        if value is None or isinstance(value, str | int | float):
            return value
    raise ConfigError(
        f"the tag {node.tag} is not read",
        where=str(place),
        expected="plain values",
        hint="leave the tag out",
    )
