"""Environments of real inference servers, which `make test-engines` makes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

WITHOUT_KERNELS = Path(__file__).parent / "without_kernels"


@pytest.fixture(scope="session")
def sglang_options() -> dict[str, object]:
    """Options of the plug-in `sglang` for a server on this machine's CPU."""
    python = os.environ.get("FLOWRL_SGLANG_PYTHON", "")
    if not python:
        pytest.skip("FLOWRL_SGLANG_PYTHON names no Python with SGLang; `make test-engines` does")
    return {"python": python, "env": {"PYTHONPATH": str(WITHOUT_KERNELS)}}


@pytest.fixture(scope="session")
def vllm_options() -> dict[str, object]:
    """Options of the plug-in `vllm` for a server on this machine's CPU."""
    python = os.environ.get("FLOWRL_VLLM_PYTHON", "")
    if not python:
        pytest.skip("FLOWRL_VLLM_PYTHON names no Python with vLLM 0.32 for CPUs")
    return {"python": python}
