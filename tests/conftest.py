"""Without a GPU the tests run under Triton's interpreter, with one on it. The user's cache is never touched."""

from __future__ import annotations

import gc
import os
import random
from collections import Counter

import pytest
import torch
from filelock import FileLock

# Triton reads the variable while it is imported: after torch, before triton. An explicit choice is respected.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton

from tunedqk import call, offsets, ready
from tunedqk import device as device_module
from tunedqk.accept import Door
from tunedqk.db import TuningDB

INTERPRETED = device_module.interpreting()
ON_GPU = torch.cuda.is_available() and not INTERPRETED
MEMORY_SHARE = offsets.MEMORY_SHARE


def nothing_bound(patch):
    """As in a new process: no call has found its binary."""
    patch.setattr(ready, "binaries", {})
    patch.setattr(call, "_calls", {})


def pytest_configure(config):
    # More threads only fight each other on small machines.
    torch.set_num_threads(min(2, torch.get_num_threads()))


def pytest_report_header(config):
    if ON_GPU:
        mode = f"GPU, {torch.cuda.get_device_name()}"
    elif INTERPRETED:
        mode = "Triton's interpreter (TRITON_INTERPRET)"
    else:
        mode = "no GPU and no interpreter: tests that launch a kernel fail"
    return f"tunedqk: {mode}; torch {torch.__version__}, triton {triton.__version__}"


def pytest_collection_modifyitems(items):
    if ON_GPU:
        return
    reason = "needs a GPU, but TRITON_INTERPRET is set" if torch.cuda.is_available() else "needs a GPU"
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter):
    """How many planted faults this run has shown to the validator, and what it said."""
    stats = terminalreporter.stats
    reports = [report for outcome in ("passed", "failed", "skipped") for report in stats.get(outcome, [])]
    properties = [item for report in reports for item in getattr(report, "user_properties", [])]
    verdicts = Counter(verdict for name, verdict in properties if name == "mutant")
    if verdicts:
        rejected = verdicts.total() - verdicts["correct"]
        counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common() if verdict != "correct")
        terminalreporter.write_line(f"{verdicts.total()} mutants: {rejected} rejected ({counts})")


@pytest.fixture(scope="session", autouse=True)
def _own_environment(tmp_path_factory):
    """One cache directory for all tests of a process, so that a binary is validated once; no setting of the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNEDQK_CACHE_DIR", str(tmp_path_factory.mktemp("tunedqk-cache")))
        patch.delenv("TUNEDQK_DB_PATH", raising=False)
        patch.delenv("TUNEDQK_MODE", raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def _memory_for_everybody():
    """Workers of pytest-xdist share a GPU, on which each would take 17 GiB to check offsets."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offsets, "MEMORY_SHARE", MEMORY_SHARE / workers)
        yield


@pytest.fixture
def much_memory(tmp_path_factory):
    """For tests that are about those offsets: one worker at a time may take what one process alone would."""
    with (
        FileLock(tmp_path_factory.getbasetemp().parent / "much-memory.lock"),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(offsets, "MEMORY_SHARE", MEMORY_SHARE)
        yield
        gc.collect()
        if ON_GPU:
            torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _fixed_seeds():
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def cache_dir(tmp_path, monkeypatch):
    """An empty cache directory for one test."""
    path = tmp_path / "cache"
    monkeypatch.setenv("TUNEDQK_CACHE_DIR", str(path))
    return path


@pytest.fixture(scope="session")
def device():
    """Where tensors go: the GPU, or the CPU under the interpreter."""
    return "cuda" if ON_GPU else "cpu"


@pytest.fixture
def make_door(device, tmp_path):
    """Makes doors that share a DB, each as a process of its own would."""

    def make():
        target = torch.device(device)
        return Door(target, TuningDB(device_module.identity_of(target), tmp_path, ()))

    return make
