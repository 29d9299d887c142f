"""Tests of Triton kernels run where they can: compiled on a GPU, else interpreted on the CPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch


@pytest.fixture(scope="session")
def triton_device() -> torch.device:
    """Where the kernels run. Tests that ask for it are skipped without Triton."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed; its wheels are for Linux")
    from triton import knobs

    if knobs.runtime.interpret:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("Triton has been told not to interpret (TRITON_INTERPRET), and there is no GPU")
    return torch.device("cuda")
