"""`code`: runs a response's program against unit tests in `flowrl_backends.verify.sandbox`.

The program is the last block of code of the response, or all of it without one. Tests are a field
of the data row, in one of three forms:

    text                                   Python that raises where the program is wrong (asserts)
    a list of such texts                   each is run by itself
    {"inputs": [...], "outputs": [...]}    standard input, and the output that must follow; also as
                                           a text of JSON

The value is 1 if every test passes, else 0; with `partial`, the share of tests that pass.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from flowrl.backend.protocols import ScoreRequest
from flowrl.data.templates import field_value
from flowrl.errors import ConfigError, DataError, RewardError
from flowrl_backends.verify import sandbox
from flowrl_backends.verify.options import TermOptions

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


class CodeTests:
    """A rule that runs programs.

    Raises:
        ConfigError: The machine has no sandbox: the message says what is missing.
    """

    def __init__(self, options: TermOptions) -> None:
        self._field = options.text("tests", "tests")
        self._is_partial = options.truth("partial", False)
        self._seconds = options.number("test_s", 4.0)
        self._nbytes = int(options.number("memory_gb", 1.0) * 1e9)
        passes, reason = self._run("pass", "", to_end=True)
        if not passes:
            raise ConfigError(
                f"programs cannot be run in a sandbox here: {reason}",
                where=f"{options.where}.kind",
                hint="Linux 5.13 with Landlock and user namespaces is needed; a container may "
                "forbid them",
            )

    def __call__(self, request: ScoreRequest) -> float:
        """Returns the share of passed tests, or whether all passed."""
        blocks = _BLOCK.findall(request.response)
        program = blocks[-1] if blocks else request.response
        passed = []
        for code, given, output in self._tests(request):
            succeeded, printed = self._run(f"{program}\n\n{code}", given, to_end=output is None)
            passed.append(succeeded and (output is None or _same(printed, output)))
            if not passed[-1] and not self._is_partial:
                return 0.0
        return sum(passed) / len(passed)

    def _tests(self, request: ScoreRequest) -> Iterator[tuple[str, str, str | None]]:
        """Yields code that follows the program, its standard input, and its expected output."""
        try:
            tests = field_value(request.row, self._field, key="tests")
        except DataError:
            tests = None
        if isinstance(tests, str):
            with suppress(ValueError):
                tests = json.loads(tests)
        if isinstance(tests, str):
            tests = [tests]
        if isinstance(tests, list) and tests and all(isinstance(test, str) for test in tests):
            yield from ((test, "", None) for test in tests)
        elif (
            isinstance(tests, Mapping)
            and isinstance(inputs := tests.get("inputs"), list)
            and isinstance(outputs := tests.get("outputs"), list)
            and len(inputs) == len(outputs) > 0
        ):
            for given, output in zip(inputs, outputs, strict=True):
                yield "", str(given), str(output)
        else:
            raise RewardError(
                f"the row has no tests in its field {self._field!r}",
                where=f"sample {request.sample}",
                found=repr(tests)[:60],
                expected="Python, a list of it, or {inputs: [...], outputs: [...]}",
            )

    def _run(self, program: str, given: str, *, to_end: bool) -> tuple[bool, str]:
        """Returns whether a program ended well, and its output, or its error.

        Args:
            program: Its text.
            given: Its standard input.
            to_end: It must come to the end of its text, and not exit before.
        """
        mark = secrets.token_hex(16)
        with (
            tempfile.TemporaryDirectory(prefix="flowrl-code-") as folder,
            # Files, whose size is limited, and no pipes.
            tempfile.TemporaryFile() as output,
            tempfile.TemporaryFile() as errors,
            tempfile.TemporaryFile() as standard_input,
        ):
            standard_input.write(given.encode(errors="replace"))
            standard_input.seek(0)
            file = Path(folder) / "program.py"
            file.write_text(program, encoding="utf-8", errors="replace")
            limits = (str(max(1, round(self._seconds))), str(self._nbytes), mark)
            with subprocess.Popen(
                [sys.executable, "-I", sandbox.__file__, folder, str(file), *limits],
                stdin=standard_input,
                stdout=output,
                stderr=errors,
                env={"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder},
                start_new_session=True,
            ) as process:
                try:
                    process.wait(timeout=self._seconds)
                except subprocess.TimeoutExpired:
                    return False, "its time is over"
                finally:
                    # Whatever it has started, too, and also where this scorer is interrupted.
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
            output.seek(0)
            errors.seek(0)
            printed, error = (f.read().decode(errors="replace") for f in (output, errors))
        if process.returncode == 0 and (error.endswith(mark) or not to_end):
            return True, printed
        return False, error.strip()[-300:]


def _same(printed: str, expected: str) -> bool:
    """True if two outputs have the same lines, without white space at their ends."""
    first, second = (
        [line.rstrip() for line in text.rstrip().splitlines()] for text in (printed, expected)
    )
    return first == second
