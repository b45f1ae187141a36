"""A file that is no YAML is refused with a hint: the bracket that stays open, or what to check."""

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
    "text",
    [
        "nodes:\n  - name: a\n   cores: 8\n",
        "actor:\n    slots: 1\n  seed: 3\n",
        "name: x\n  seed: 3\n",
        " name: x\nseed: 3\n",
        "devices:\n    - {name: H100, count: 8}\n   - {name: A100}\n",
        "prompt: Q: what?\n",
        "data:\n  prompt: {question} is: 3\n",
        "data:\n  prompt: {question}: {answer}\n",
        "data: [1]\nprompt: a: b\n",
    ],
)
def test_a_hint_names_quotes_and_the_column_of_keys(text: str, tmp_path: Path):
    hint = hint_of(text, tmp_path)
    assert "put text that holds braces or a colon in quotes" in hint
    assert "in the same column" in hint


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("name: x\nsteps: [1, 2\nseed: 3\n", 2),
        ("device: {name: H100,\nseed: 3\nnodes: 4\n", 1),
        ("name: 'x\nseed: 3\n", 1),
    ],
)
def test_what_is_opened_and_never_closed_is_named_by_its_line(text: str, line: int, tmp_path: Path):
    assert hint_of(text, tmp_path) == f"close the bracket or quote that line {line} opens"
