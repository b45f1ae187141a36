"""The public surface, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import flowrl as fl

HEAVY = ("torch", "transformers", "ray", "numpy", "networkx", "pydantic", "rich", "omegaconf")


def test_importing_flowrl_imports_nothing_heavy():
    code = f"import sys, flowrl; print([m for m in {HEAVY} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_every_public_name_is_there():
    assert len(set(fl.__all__)) == len(fl.__all__)
    missing = [name for name in fl.__all__ if name != "__version__" and not hasattr(fl, name)]
    assert missing == []
    assert set(fl.__all__) <= set(dir(fl))


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(fl, "no_such_name")
