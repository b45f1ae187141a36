"""Programs against unit tests: what passes, and what the sandbox stops."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl.backend.protocols import ScoreRequest
from flowrl.errors import ConfigError, RewardError
from flowrl.ids import SampleId
from flowrl.specs import FinishReason
from flowrl_backends.verify.code_tests import CodeTests
from flowrl_backends.verify.options import TermOptions

DOUBLE = "Here:\n```python\ndef double(x):\n    return 2 * x\n```\nDone."


def rule(**options: object) -> CodeTests:
    try:
        return CodeTests(TermOptions(options, "rewards.terms[0]"))
    except ConfigError as error:
        pytest.skip(str(error))


def request(response: str, tests: object) -> ScoreRequest:
    return ScoreRequest(
        sample=SampleId("0/0/0"),
        prompt="p",
        response=response,
        answer="",
        row={"tests": tests},
        finish=FinishReason.STOP,
        num_tokens=3,
    )


def test_a_program_passes_its_tests_all_or_in_part():
    tests = ["assert double(2) == 4", "assert double(2) == 5"]
    assert rule()(request(DOUBLE, tests[0])) == 1.0
    assert rule()(request(DOUBLE, tests)) == 0.0
    assert rule(partial=True)(request(DOUBLE, tests)) == 0.5


def test_standard_input_and_output_are_compared_line_by_line():
    program = "```python\nprint(int(input()) + 1)\nimport sys\nsys.exit(0)\n```"
    tests = '{"inputs": ["1\\n", "2\\n"], "outputs": ["2\\n", "4"]}'
    assert rule(partial=True)(request(program, tests)) == 0.5


def test_a_row_without_tests_is_an_error():
    with pytest.raises(RewardError, match="the row has no tests in its field 'tests'"):
        rule()(request(DOUBLE, None))


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "while True: pass",
        "x = bytearray(3 * 10**9)",
        "while True: print('x' * 10**6)",
        "import socket; socket.create_connection(('127.0.0.1', 22), 1)",
        "import socket; socket.socket().bind(('127.0.0.1', 0)); raise OSError",
        "def f(:",
        "import os; os.kill(os.getppid(), 9)",
    ],
)
def test_what_does_not_come_to_its_end_within_its_limits_fails(program):
    assert rule(test_s=1.0)(request(program, "pass")) == 0.0


def test_nothing_outside_of_its_folder_is_written_or_removed(tmp_path: Path):
    kept = tmp_path / "kept"
    kept.write_text("kept")
    run = rule()
    for attack in (
        f"open({str(kept)!r}, 'w')",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        f"import os; os.remove({str(kept)!r})",
        f"import os; os.mkdir({str(tmp_path / 'new')!r})",
        f"import os; os.truncate({str(kept)!r}, 0)",
        f"import os; open('mine', 'w').close(); os.rename('mine', {str(tmp_path / 'new')!r})",
    ):
        assert run(request(attack, "pass")) == 0.0
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert kept.read_text() == "kept"
    assert run(request("open('own', 'w').write('x')", "assert open('own').read() == 'x'")) == 1.0
