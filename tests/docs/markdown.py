"""Fenced blocks of a Markdown document, with the comments that say how a test treats them.

A comment directly above a block holds one directive a line:

    <!-- file: NAME -->         the block is the file NAME, and nothing more
    <!-- run with: WORDS -->    WORDS are added to each `flowrl run` and `flowrl simulate`
    <!-- numbers vary -->       shown and real output are compared with every number masked
    <!-- not run: REASON -->    the block is not executed, for a reason that readers may see
    <!-- made by: COMMAND -->   the block is what COMMAND prints
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Block", "Command", "blocks_of", "commands_of", "links_of"]

_FENCE = re.compile(r"^```(\S*)\s*$")
_DIRECTIVE = re.compile(r"^<!-- (file|run with|numbers vary|not run|made by)(?:: (.+?))? -->$")
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        kind: The word after the fence: `console`, `python`, `yaml` ...
        text: What is between the fences.
        line: Of its first line in the document.
        directives: Of the comments above it.
    """

    kind: str
    text: str
    line: int
    directives: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Command:
    """A line of a console block that begins with `$`, and the output shown below it."""

    text: str
    shown: str


def blocks_of(document: Path) -> list[Block]:
    """Every fenced block of a document, in order."""
    found: list[Block] = []
    directives: dict[str, str] = {}
    opened: tuple[str, int] | None = None
    lines: list[str] = []
    for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), 1):
        if opened is not None:
            if line == "```":
                kind, first = opened
                text = "".join(f"{text}\n" for text in lines)
                found.append(Block(kind, text, first, directives))
                opened, directives, lines = None, {}, []
            else:
                lines.append(line)
        elif fence := _FENCE.match(line):
            opened = (fence[1], number + 1)
        elif directive := _DIRECTIVE.match(line):
            directives[directive[1]] = directive[2] or ""
        elif line.startswith("<!--"):
            raise ValueError(f"{document.name}:{number}: unknown directive {line}")
        elif line.strip() and directives:
            raise ValueError(f"{document.name}:{number}: a directive without a block below it")
    if opened is not None:
        raise ValueError(f"{document.name}: a block is never closed")
    return found


def commands_of(block: Block) -> list[Command]:
    """The commands of a console block; `\\` at the end of a line joins it with the next."""
    commands: list[Command] = []
    text, shown, joins = "", [], False
    for line in block.text.splitlines():
        if joins:
            text += line.strip()
        elif line.startswith("$ "):
            if text:
                commands.append(Command(text, "\n".join(shown)))
            text, shown = line[2:], []
        elif text:
            shown.append(line)
        else:
            raise ValueError(f"line {block.line}: output before the first command")
        joins = text.endswith("\\") and not shown
        if joins:
            text = text[:-1]
    commands.append(Command(text, "\n".join(shown)))
    return commands


def links_of(document: Path) -> list[str]:
    """Targets of the links outside of fenced blocks."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.M | re.S)
    return _LINK.findall(text)
