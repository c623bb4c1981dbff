"""Programs are compiled in other processes, for any target and without a GPU, and found again in this one."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from triton.backends.compiler import GPUTarget
from triton.runtime import cache

from tunedqk import compile_pool, device
from tunedqk.compile_pool import CompilePool
from tunedqk.config import KernelConfig, search_space, tuning_key
from tunedqk.errors import CompilerCrashedError
from tunedqk.tune import tuned_variant
from tunedqk.variant import program

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


# Their own way to compile is replaced: num_warps says what happens.
STAGED = """
import os, signal
from tunedqk import compiler
compile_program = compiler.compile_program
def staged(kernel, program):
    match program.arguments["num_warps"]:
        case 8: os.abort()
        case 16: os._exit(0)
        case 17: os._exit(1)
        case 18: os.kill(os.getpid(), signal.SIGKILL)
        case 19: raise KeyError("num_warps")
    return compile_program(kernel, program)
compiler.compile_program = staged
main(*descriptors)
"""


@pytest.fixture
def staged(pool, monkeypatch):
    monkeypatch.setattr(compile_pool, "_COMPILER", compile_pool._COMPILER.replace("main(*descriptors)", STAGED))
    return pool


@pytest.fixture(scope="module")
def lasting(tmp_path_factory):
    """A pool as `staged`, for the tests that leave it as good as they found it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.setattr(compile_pool, "_COMPILER", compile_pool._COMPILER.replace("main(*descriptors)", STAGED))
        pool = CompilePool(2)
        pool.start()
    yield pool
    pool.close()


def replace(program, **arguments):
    return msgspec.structs.replace(program, arguments=program.arguments | arguments)


def _children(process):
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def _alive(group):
    """Whether a process of the group goes on. Those that have ended are reaped by the system when it gets to it."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, of = path.read_text().rpartition(")")[2].split()[:3]
            if of == str(group) and state not in "ZX":
                return True
    return False


def _ends(group):
    deadline = time.monotonic() + 20
    while _alive(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not _alive(group)


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


def test_a_program_that_does_not_compile_is_done_and_the_process_goes_on(lasting):
    assert lasting.compile(H200, replace(PROGRAM, TILE_SIZE=48))  # no power of two
    assert lasting.compile(H200, PROGRAM)


@pytest.mark.parametrize(
    ("num_warps", "cause"), [pytest.param(8, "SIGABRT", id="abort"), pytest.param(17, "exit status 1", id="exit 1")]
)
def test_a_program_that_takes_the_process_down_is_told_apart(lasting, num_warps, cause):
    for _ in range(2):
        with pytest.raises(CompilerCrashedError, match=cause):
            lasting.compile(H200, replace(PROGRAM, num_warps=num_warps))
        assert lasting.compile(H200, PROGRAM)  # by its successor


def test_a_crash_is_blamed_on_no_other(lasting):
    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(lasting.compile, H200, replace(PROGRAM, num_warps=n)) for n in (8, 1, 8, 2, 1, 8, 2)]
    crashed = [isinstance(future.exception(), CompilerCrashedError) for future in futures]
    assert crashed == [True, False, True, False, False, True, False]


def test_an_exception_in_the_process_is_left_for_this_one_to_see(lasting):
    assert lasting.compile(H200, replace(PROGRAM, no_such_option=1))
    assert lasting.compile(H200, replace(PROGRAM, num_warps=19))
    assert lasting.compile(H200, PROGRAM)


def test_a_kill_from_outside_is_no_verdict(lasting):
    assert not lasting.compile(H200, replace(PROGRAM, num_warps=18))
    assert lasting.compile(H200, PROGRAM)


@pytest.mark.parametrize("end", [pytest.param(16, id="exit 0"), pytest.param(8, id="no more replacements")])
def test_a_process_that_has_no_successor_is_not_waited_for(staged, monkeypatch, end):
    limit = "compiler.MAX_REPLACEMENTS = 0\nmain(*descriptors)"
    monkeypatch.setattr(compile_pool, "_COMPILER", compile_pool._COMPILER.replace("main(*descriptors)", limit))
    assert not staged.compile(H200, replace(PROGRAM, num_warps=end))
    assert not staged.compile(H200, PROGRAM)


def test_a_process_that_died_idle_is_replaced_and_nothing_is_mixed_up(lasting):
    assert lasting.compile(H200, PROGRAM)
    for process in _children(lasting._parent.pid):
        os.kill(process, signal.SIGKILL)
    assert lasting.compile(H200, PROGRAM)
    with pytest.raises(CompilerCrashedError):
        lasting.compile(H200, replace(PROGRAM, num_warps=8))
    assert lasting.compile(H200, PROGRAM)


def test_an_interrupted_request_is_not_answered_to_the_next(staged, monkeypatch):
    answer = compile_pool._Connection._answer

    def interrupted(connection):
        if connection._number:
            raise KeyboardInterrupt
        return answer(connection)

    monkeypatch.setattr(compile_pool._Connection, "_answer", interrupted)
    for _ in range(2):  # both processes
        with pytest.raises(KeyboardInterrupt):
            staged.compile(H200, PROGRAM)
    monkeypatch.undo()
    with pytest.raises(CompilerCrashedError):
        staged.compile(H200, replace(PROGRAM, num_warps=8))


def test_crashes_are_seen_though_the_signal_of_dead_children_is_ignored(staged):
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        staged.start()
    finally:
        signal.signal(signal.SIGCHLD, before)
    with pytest.raises(CompilerCrashedError):
        staged.compile(H200, replace(PROGRAM, num_warps=8))


def test_the_search_path_goes_along_and_the_current_folder_does_not(pool, tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit(3)")
    (tmp_path / "ast.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [Path(folder) for folder in sys.path if folder])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # set too late for this process, and not for those
    assert pool.compile(H200, PROGRAM)
    assert list((tmp_path / "triton").rglob("*.cubin"))


def test_a_silent_process_is_not_waited_for_without_end(pool, monkeypatch):
    monkeypatch.setattr(compile_pool, "START_TIMEOUT", 0.5)
    monkeypatch.setattr(compile_pool, "_COMPILER", "import time; time.sleep(60)")
    assert not pool.compile(H200, PROGRAM)


def test_processes_that_are_all_gone_are_no_verdict(pool):
    assert pool.compile(H200, PROGRAM)
    os.killpg(pool._parent.pid, signal.SIGKILL)
    assert not pool.compile(H200, PROGRAM)
    assert not pool.compile(H200, PROGRAM)


def test_who_waits_for_a_process_that_is_killed_goes_on(staged):
    staged.start()
    assert all(connection.wait() for connection in staged._idle)
    with ThreadPoolExecutor(1) as threads:
        os.killpg(staged._parent.pid, signal.SIGSTOP)
        future = threads.submit(staged.compile, H200, PROGRAM)
        staged.kill()
        assert future.result(timeout=60) is False


@pytest.mark.parametrize(
    ("executable", "problem"),
    [
        pytest.param("/nonexistent/python", "No such file", id="no such program"),
        pytest.param(None, "not set", id="none"),
        pytest.param(sys.executable, "never began", id="one that ends at once"),
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
    assert _ends(group)
    # Others start when they are needed: what was closed is as new.
    assert pool.compile(H200, PROGRAM)
    assert _alive(pool._parent.pid)


def test_processes_end_with_the_one_that_started_them(tmp_path):
    start = "import sys, time; from tunedqk.compile_pool import CompilePool; pool = CompilePool(2); pool.start();"
    start += "print(pool._parent.pid, flush=True); assert all(c.wait() for c in pool._idle); print(flush=True)"
    start += "; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE, text=True) as process:
        group = int(process.stdout.readline())
        assert process.stdout.readline() == "\n"
        process.kill()
    assert _ends(group)


COMPILE_FOR_EVER = """
import sys
from triton.backends.compiler import GPUTarget
from tunedqk import compile_pool
from tunedqk.compiler import Program

ENDLESS = "import time; from tunedqk import compiler; compiler.compile_program = lambda *_: (open({!r}, 'w'), "
ENDLESS += "time.sleep(600)); main(*descriptors)"
compile_pool._COMPILER = compile_pool._COMPILER.replace("main(*descriptors)", ENDLESS.format(sys.argv[1]))
pool = compile_pool.CompilePool(2)
pool.start()
print(pool._parent.pid, flush=True)
pool.compile(GPUTarget("cuda", 90, 32), Program(("bf16", "bf16", "bf16"), True, {}))
"""


def _compiling_for_ever(code, began):
    """A process that waits for a compilation, which has begun, and the group that compiles."""
    process = subprocess.Popen([sys.executable, "-c", code, str(began)], stdout=subprocess.PIPE, text=True)
    group = int(process.stdout.readline())
    deadline = time.monotonic() + 60
    while not began.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert began.exists()
    return process, group


def test_a_compilation_without_end_ends_with_the_process_that_waits_for_it(tmp_path):
    process, group = _compiling_for_ever(COMPILE_FOR_EVER, tmp_path / "began")
    with process:
        process.kill()
    assert _ends(group)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_of_the_process_that_waits_does_not_keep_a_compilation_alive(tmp_path):
    fork = "pool.start()\nif os.fork() == 0:\n    time.sleep(120)\n    os._exit(0)"
    code = "import os, time\n" + COMPILE_FOR_EVER.replace("pool.start()", fork)
    process, group = _compiling_for_ever(code, tmp_path / "began")
    with process:
        (sleeper,) = set(_children(process.pid)) - {group}
        process.kill()
        process.stdout.close()
        ended = _ends(group)
        os.kill(sleeper, signal.SIGKILL)
    assert ended


def test_threads_that_begin_together_hash_triton_once(monkeypatch):
    runs = []

    @functools.lru_cache
    def slow():
        runs.append(time.sleep(0.05))

    monkeypatch.setattr(cache, "triton_key", slow)
    with ThreadPoolExecutor(4) as threads:
        for _ in range(4):
            threads.submit(device.hash_triton)
    assert len(runs) == 1
    monkeypatch.delattr(cache, "triton_key")  # a release without it
    device.hash_triton()
