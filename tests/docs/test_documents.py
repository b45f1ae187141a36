"""Every command and every Python block of the README and of docs/ does what the text says."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tests.docs.markdown import Block, Command, blocks_of
from tests.docs.workplace import assert_shown, workplace

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
EXECUTED = ("console", "python")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_document_does_what_it_shows(document, tmp_path):
    """Blocks run from top to bottom in one folder, as a reader would type them."""
    blocks = blocks_of(document)
    with workplace(tmp_path, REPOSITORY) as place:
        for block, following in pairwise([*blocks, None]):
            if "not run" in block.directives or "made by" in block.directives:
                continue
            printed = place.run(block)
            if block.kind == "python" and following is not None and following.kind == "text":
                assert_shown(
                    Command(f"(python block at line {block.line})", following.text),
                    printed,
                    masked="numbers vary" in following.directives,
                )


def test_few_blocks_are_not_run_and_each_says_why():
    skipped = [
        (document.name, block.line, block.directives["not run"])
        for document in DOCUMENTS
        for block in blocks_of(document)
        if "not run" in block.directives
    ]
    assert all(len(reason) > 15 for _, _, reason in skipped)
    assert len(skipped) <= 8, skipped


def test_blocks_are_of_a_kind_that_is_executed_or_only_shows():
    kinds = {block.kind for document in DOCUMENTS for block in blocks_of(document)}
    assert kinds <= {*EXECUTED, "text", "yaml", "toml", "mermaid"}, kinds


def _made() -> list[tuple[str, Block]]:
    return [
        (document.name, block)
        for document in DOCUMENTS
        for block in blocks_of(document)
        if "made by" in block.directives
    ]


def test_pictures_are_what_their_commands_print(tmp_path):
    made = _made()
    assert made, "no document shows a picture"
    with workplace(tmp_path, REPOSITORY) as place:
        for name, block in made:
            command = block.directives["made by"]
            text = f"$ {command}\n{block.text}"
            place.run(Block("console", text, block.line))
            assert block.kind == "mermaid", (name, block.line)
