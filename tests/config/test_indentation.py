"""What is said of a file that is no YAML is what is wrong: where a line begins, or its text."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl.config.yaml_tree import read_yaml_file
from flowrl.errors import ConfigError


def hint_of(text: str, tmp_path: Path) -> str:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_yaml_file(path)
    assert caught.value.hint is not None
    return caught.value.hint


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nodes:\n  - name: a\n   cores: 8\n", "line 3 begins after 3 spaces, line 2 after 4,"),
        ("nodes:\n  - name: a\n     cores: 8\n", "line 3 begins after 5 spaces, line 2 after 4,"),
        ("nodes:\n- name: a\n cores: 8\n", "line 3 begins after 1 space, line 2 after 2, and keys"),
        (
            "actor:\n  slots: 1\n\n  # more\n   seed: 3\n",
            "line 5 begins after 3 spaces, line 2 aft",
        ),
        ("actor:\n    slots: 1\n  seed: 3\n", "line 3 begins after 2 spaces, line 2 after 4, and"),
        ("name: x\n  seed: 3\n", "line 2 begins after 2 spaces, line 1 after 0, and keys that"),
        (" name: x\nseed: 3\n", "line 2 begins after 0 spaces, line 1 after 1, and keys that"),
        (
            "devices:\n    - {name: H100, count: 8}\n   - {name: A100}\n",
            "line 3 begins after 3 spaces, line 2 after 4, and entries of a list that belong",
        ),
    ],
)
def test_a_line_that_begins_in_the_wrong_place_is_told_to_be_moved(
    text: str, said: str, tmp_path: Path
):
    hint = hint_of(text, tmp_path)
    assert hint.startswith("correct the indentation: ")
    assert said in hint
    assert "quotes" not in hint


@pytest.mark.parametrize(
    "text",
    [
        "prompt: Q: what?\n",
        "data:\n  prompt: {question} is: 3\n",
        "data:\n  prompt: {question}: {answer}\n",
        "data: [1]\nprompt: a: b\n",
    ],
)
def test_text_that_reads_as_keys_is_told_to_be_put_in_quotes(text: str, tmp_path: Path):
    assert hint_of(text, tmp_path) == "put text that holds braces or a colon in quotes"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: x\nsteps: [1, 2\nseed: 3\n", "close the bracket that line 2 opens"),
        ("device: {name: H100,\nseed: 3\nnodes: 4\n", "close the bracket that line 1 opens"),
        ("name: 'x\nseed: 3\n", "close the quote that line 1 opens"),
    ],
)
def test_what_is_opened_and_never_closed_is_told_by_its_line(text: str, said: str, tmp_path: Path):
    assert hint_of(text, tmp_path) == said
