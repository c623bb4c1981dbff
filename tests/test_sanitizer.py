"""Reads out of bounds, which no result shows: the kernels under NVIDIA's compute-sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("sanitized.py")
ERRORS = 99  # compute-sanitizer's exit status when it found some


def sanitized(*arguments):
    """Run the script, in which every tensor is an allocation of its own."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        pytest.skip("compute-sanitizer is not installed")
    run = subprocess.run(
        [tool, "--tool", "memcheck", "--padding", "4096", "--error-exitcode", str(ERRORS), sys.executable, SCRIPT,
         *arguments],
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    text = run.stdout + run.stderr
    if "Device not supported" in text or "LibraryNotLoaded" in text:
        pytest.skip("compute-sanitizer does not work on this machine")
    return run.returncode, text


@pytest.mark.gpu
def test_nothing_is_read_out_of_bounds():
    status, text = sanitized()
    assert "launched" in text, text[-2000:]
    assert "ERROR SUMMARY: 0 errors" in text, text[-2000:]
    assert status == 0


@pytest.mark.gpu
def test_a_read_out_of_bounds_would_be_found():
    status, text = sanitized("faulty")
    assert status == ERRORS, text[-2000:]
    assert "Invalid __global__ read" in text
