"""Programs are compiled in other processes, for any target and without a GPU, and found again in this one."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from triton.backends.compiler import GPUTarget

from tunedqk import compile_pool
from tunedqk.compile_pool import CompilePool
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
    pool = CompilePool(2)
    yield pool
    pool.close()


CRASHING = """
from tunedqk import compiler
compile_program = compiler.compile_program
def crashing(kernel, program):
    import os
    if program.arguments["num_warps"] == 8:
        os.abort()
    return compile_program(kernel, program)
compiler.compile_program = crashing
main(descriptors)
"""


def replace(program, **arguments):
    return msgspec.structs.replace(program, arguments=program.arguments | arguments)


def _alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def encoded(*programs):
    return b"\n".join(msgspec.json.encode(program) for program in programs)


def test_what_a_process_compiled_is_found_in_the_cache(pool):
    programs = [
        program(tuned_variant(key), search_space(key)[-1])
        for key in (KEY, tuning_key(512, 48, "float32", 16), tuning_key(512, 300, "float16", 4))
    ]
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda program: pool.compile(H200, program), programs)) == [True] * 3
    run = subprocess.run(
        [sys.executable, "-c", COMPILE_HERE], input=encoded(*programs), capture_output=True, check=False
    )
    assert run.returncode == 0, run.stderr.decode()
    assert json.loads(run.stdout) == [True, True, True]


def test_one_process_compiles_for_several_targets(pool, tmp_path):
    for target in (H200, GPUTarget("cuda", 80, 32), GPUTarget("hip", "gfx942", 64)):
        assert pool.compile(target, PROGRAM)
    suffixes = {path.suffix for path in (tmp_path / "triton").rglob("*.*")}
    assert {".cubin", ".hsaco"} < suffixes


def test_a_program_that_does_not_compile_is_done_and_the_process_goes_on(pool):
    assert pool.compile(H200, replace(PROGRAM, TILE_SIZE=48))  # no power of two
    assert pool.compile(H200, PROGRAM)


def test_a_program_that_takes_the_process_down_is_told_apart(pool, monkeypatch):
    # The processes' own kernel is replaced by one that no compiler survives, once.
    monkeypatch.setattr(compile_pool, "_COMPILER", compile_pool._COMPILER.replace("main(descriptors)", CRASHING))
    with pytest.raises(CompilerCrashedError, match="SIGABRT"):
        pool.compile(H200, replace(PROGRAM, num_warps=8))
    assert pool.compile(H200, PROGRAM)  # by its successor
    with pytest.raises(CompilerCrashedError, match="SIGABRT"):
        pool.compile(H200, replace(PROGRAM, num_warps=8))


def test_an_exception_in_the_process_is_left_for_this_one_to_see(pool, monkeypatch):
    assert pool.compile(H200, replace(PROGRAM, no_such_option=1))
    assert pool.compile(H200, PROGRAM)


def test_processes_that_are_killed_are_told_apart(pool):
    assert pool.compile(H200, PROGRAM)
    os.killpg(pool._parent.pid, signal.SIGKILL)
    with pytest.raises(CompilerCrashedError, match="gone"):
        pool.compile(H200, PROGRAM)
    assert not pool.compile(H200, PROGRAM)


@pytest.mark.parametrize(
    ("executable", "problem"),
    [
        pytest.param("/nonexistent/python", "No such file", id="no such program"),
        pytest.param(sys.executable, "ended at once", id="one that ends at once"),
    ],
)
def test_without_processes_nothing_is_done_and_one_warning_says_so(pool, monkeypatch, caplog, executable, problem):
    monkeypatch.setattr(sys, "executable", executable)
    monkeypatch.setattr(compile_pool, "_COMPILER", "raise SystemExit(3)")
    with caplog.at_level(logging.WARNING):
        assert [pool.compile(H200, PROGRAM) for _ in range(3)] == [False] * 3
    (message,) = caplog.messages
    assert problem in message


def test_close_ends_every_process(pool):
    assert pool.compile(H200, PROGRAM)
    group = pool._parent.pid
    pool.close()
    deadline = time.monotonic() + 20
    while _alive(group) and time.monotonic() < deadline:  # orphans are reaped by the system when it gets to it
        time.sleep(0.05)
    assert not _alive(group)


def test_processes_end_with_the_one_that_started_them(tmp_path):
    start = "import sys, time; from tunedqk.compile_pool import CompilePool; pool = CompilePool(2); pool.start();"
    start += "print(pool._parent.pid, flush=True); assert all(c.wait() for c in pool._idle); print(flush=True)"
    start += "; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE, text=True) as process:
        group = int(process.stdout.readline())
        assert process.stdout.readline() == "\n"
        process.kill()
    deadline = time.monotonic() + 20
    while _alive(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(group)
