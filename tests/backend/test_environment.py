"""The examples in the documentation of environments do what they say."""

from __future__ import annotations

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "name",
    [
        "flowrl.backend.environment",
        "flowrl_backends.environment.arithmetic",
        "flowrl_backends.environment.step",
        "flowrl_backends.environment.threads",
        "flowrl_backends.environment.tools",
    ],
)
def test_examples_run(name: str):
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0
    assert results.failed == 0
