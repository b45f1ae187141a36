"""The reader of documents and the comparison of outputs: what they accept and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.markdown import Block, Command, blocks_of, commands_of
from tests.docs.workplace import assert_shown


def write(folder: Path, text: str) -> Path:
    path = folder / "page.md"
    path.write_text(text)
    return path


def test_directives_belong_to_the_block_below_them(tmp_path):
    text = "<!-- run with: train.steps=2 -->\n<!-- numbers vary -->\n```console\n$ a\nb\n```\n"
    [block] = blocks_of(write(tmp_path, text))
    assert block.directives == {"run with": "train.steps=2", "numbers vary": ""}
    assert commands_of(block) == [Command("a", "b")]


@pytest.mark.parametrize(
    "text",
    [
        "<!-- not runn: because -->\n",
        "<!-- numbers vary -->\nwords\n```console\n$ a\n```\n",
        "```console\n$ a\n",
    ],
    ids=["misspelt", "apart", "open"],
)
def test_a_page_that_would_be_tested_wrongly_is_refused(tmp_path, text):
    with pytest.raises(ValueError):
        blocks_of(write(tmp_path, text))


def test_a_command_goes_on_after_a_backslash():
    block = Block("console", "$ a \\\n    b\nout\n$ c\n", 1)
    assert commands_of(block) == [Command("a b", "out"), Command("c", "")]


@pytest.mark.parametrize(
    ("shown", "real"),
    [
        ("a\nb", "a\nb"),
        ("a\n...\nd", "a\nb\nc\nd"),
        ("a\n...", "a\nb"),
        ("...\nd", "a\nd"),
        ("took ... s", "took 3 s"),
    ],
)
def test_equal_outputs_pass(shown, real):
    assert_shown(Command("x", shown), real)


@pytest.mark.parametrize(
    ("shown", "real"),
    [("a\nb", "a"), ("a", "a\nb"), ("a\n...\nd", "a\nb\nc"), ("took 3 s", "took 4 s")],
)
def test_different_outputs_fail(shown, real):
    with pytest.raises(AssertionError):
        assert_shown(Command("x", shown), real)


def test_masked_outputs_differ_in_numbers_only():
    shown = Command("x", "sft 1/600  loss 2.83  tokens/s update 9.1k\n...\naccuracy 0.94")
    assert_shown(shown, "sft 1/2  loss 2.5  tokens/s update 870\nx\naccuracy 0.00", masked=True)
    with pytest.raises(AssertionError):
        assert_shown(shown, "sft 1/2  lost 2.5  tokens/s update 870\naccuracy 0", masked=True)
    with pytest.raises(AssertionError):
        assert_shown(shown, "accuracy 0.00\nsft 1/2  loss 2.5  tokens/s update 870", masked=True)
