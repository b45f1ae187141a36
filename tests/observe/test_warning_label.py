"""Warnings have the same label in Python as on the command line."""

from __future__ import annotations

import subprocess
import sys

import pytest

WARNS = "import logging, flowrl; {}; logging.getLogger('flowrl.compiler').warning('%s is odd', 'x')"


@pytest.mark.parametrize(
    ("configures", "shown"),
    [
        ("pass", "warning: x is odd\n"),
        ("logging.basicConfig()", "WARNING:flowrl.compiler:x is odd\n"),
        ("logging.getLogger('flowrl').addHandler(logging.NullHandler())", ""),
    ],
)
def test_a_warning_has_its_label_unless_the_program_has_handlers_of_its_own(
    configures: str, shown: str
):
    command = [sys.executable, "-c", WARNS.format(configures)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert (ended.stdout, ended.stderr) == ("", shown)
