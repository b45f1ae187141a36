"""Every row of the guide's table of algorithms is a program that compiles."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flowrl.compiler import lower
from flowrl.graph import Op
from flowrl.program.workflow import Workflow
from flowrl.specs import AdvantageSpec, LossSpec
from tests.docs.markdown import blocks_of

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "program-guide.md"
SECTION = "## The algorithms of the field"
ROW = re.compile(r"^\| ([^|]+) \| [^|]* \| `([^|`]+)` \| `([^|`]+)` \| [^|]+ \|$", re.M)


def _section() -> str:
    return GUIDE.read_text(encoding="utf-8").split(SECTION)[1].split("\n## ")[0]


def _program() -> str:
    """The program that every row changes: the first block of the section."""
    line = GUIDE.read_text(encoding="utf-8").split(SECTION)[0].count("\n") + 1
    return next(block.text for block in blocks_of(GUIDE) if block.line > line)


def _compiled(advantage: str, loss: str) -> tuple[AdvantageSpec, LossSpec]:
    text, changed = re.subn(
        r"advantages = .*", f"advantages = fl.advantage.{advantage}", _program()
    )
    assert changed == 1
    text, changed = re.subn(r"    loss = .*", f"    loss = fl.loss.{loss}", text)
    assert changed == 1
    names: dict[str, object] = {}
    exec(compile(text, "row.py", "exec"), names)  # noqa: S102  (documented code)
    workflow = names["algorithm"]
    assert isinstance(workflow, Workflow)
    graph = lower(workflow)
    (made,), (update,) = graph.of_op(Op.ADVANTAGE), graph.of_op(Op.UPDATE)
    spec, loss_spec = made.attr("spec"), update.attr("loss")
    assert isinstance(spec, AdvantageSpec)
    assert isinstance(loss_spec, LossSpec)
    return spec, loss_spec


ROWS = [row for row in ROW.findall(_section()) if row[0] != "algorithm"]


def test_the_table_holds_the_field():
    cells = [line for line in _section().splitlines() if line.startswith("|")]
    assert len(ROWS) == len(cells) - 2 >= 25
    assert len({name for name, _, _ in ROWS}) == len(ROWS)


@pytest.mark.parametrize(("advantage", "loss"), [row[1:] for row in ROWS], ids=[r[0] for r in ROWS])
def test_a_row_is_a_program(advantage, loss):
    _compiled(advantage, loss)


def test_no_two_rows_are_the_same_program():
    made = [_compiled(advantage, loss) for _, advantage, loss in ROWS]
    assert len(set(made)) == len(made)
