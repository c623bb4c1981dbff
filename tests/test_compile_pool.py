"""Programs are compiled in other processes, for any target and without a GPU, and found again in this one."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from triton.backends.compiler import GPUTarget

from tunedqk import compile_pool
from tunedqk.compile_pool import CompilePool
from tunedqk.compiler import Program
from tunedqk.config import KernelConfig, search_space, tuning_key
from tunedqk.errors import CompilerCrashedError
from tunedqk.launch import program
from tunedqk.tune import tuned_variant

H200 = GPUTarget("cuda", 90, 32)
KEY = tuning_key(512, 16, "bfloat16", 1)
PROGRAM = program(tuned_variant(KEY), KernelConfig(64, 64, num_warps=4))

# What a process that tunes does afterwards, but for the GPU: the kernel's hash, and whether the cache held it.
COMPILE_HERE = """
import json, sys
import msgspec, torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from tunedqk import compiler
from tunedqk.kernels.vectorized import qk_score_kernel

hits = []
knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
driver.set_active(compiler._TargetDriver(GPUTarget("cuda", 90, 32)))
for line in sys.stdin:
    compiler.compile_program(qk_score_kernel, msgspec.json.decode(line, type=compiler.Program))
print(json.dumps(hits))
"""


@pytest.fixture
def pool(tmp_path, monkeypatch):
    """A pool whose processes compile (a GPU or not), into a cache of their own."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    pool = CompilePool(0)
    yield pool
    pool.close()


def encoded(*programs):
    import msgspec

    return b"\n".join(msgspec.json.encode(program) for program in programs)


def test_what_a_process_compiled_is_found_in_the_cache(pool):
    programs = [
        program(tuned_variant(key), search_space(key)[-1])
        for key in (KEY, tuning_key(512, 48, "float32", 16), tuning_key(512, 300, "float16", 4))
    ]
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda program: pool.compile(H200, program), programs)) == [True] * 3
    assert len(pool._idle) <= 2
    run = subprocess.run(
        [sys.executable, "-c", COMPILE_HERE], input=encoded(*programs), capture_output=True, check=False
    )
    assert run.returncode == 0, run.stderr.decode()
    assert json.loads(run.stdout) == [True, True, True]


def test_one_process_compiles_for_several_targets(pool, tmp_path):
    for target in (H200, GPUTarget("cuda", 80, 32), GPUTarget("hip", "gfx942", 64)):
        assert pool.compile(target, PROGRAM)
    assert len(pool._idle) == 1
    suffixes = {path.suffix for path in (tmp_path / "triton").rglob("*.*")}
    assert {".cubin", ".hsaco"} < suffixes


def test_a_program_that_does_not_compile_is_done_and_the_process_goes_on(pool):
    broken = Program("bf16", "bf16", True, {**PROGRAM.arguments, "TILE_SIZE": 48})  # no power of two
    assert pool.compile(H200, broken)
    assert pool.compile(H200, PROGRAM)
    assert len(pool._idle) == 1


def test_a_program_that_takes_the_process_down_is_told_apart(pool):
    assert pool.compile(H200, PROGRAM)
    (compiler,) = pool._idle
    os.kill(compiler._process.pid, signal.SIGKILL)
    with pytest.raises(CompilerCrashedError, match="exit status -9"):
        pool.compile(H200, PROGRAM)
    assert pool._idle == []
    assert pool.compile(H200, PROGRAM)  # by another process


@pytest.mark.parametrize(
    ("executable", "problem"),
    [
        pytest.param("/nonexistent/python", "No such file", id="no such program"),
        pytest.param(sys.executable, "exit status 3", id="one that ends at once"),
    ],
)
def test_without_processes_nothing_is_done_and_one_warning_says_so(monkeypatch, caplog, executable, problem):
    monkeypatch.setattr(sys, "executable", executable)
    monkeypatch.setattr(compile_pool, "_COMPILER", "raise SystemExit(3)")
    pool = CompilePool(2)
    with caplog.at_level(logging.WARNING):
        assert [pool.compile(H200, PROGRAM) for _ in range(3)] == [False] * 3
    (message,) = caplog.messages
    assert problem in message
    assert pool._idle == []


def test_close_ends_every_process():
    pool = CompilePool(2)
    processes = [compiler._process for compiler in pool._idle]
    pool.close()
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 2
