"""Processes that compile in parallel, and leave what they made in Triton's cache for this process to find."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from typing import IO, TYPE_CHECKING, cast

import msgspec

from tunedqk.compiler import DONE, READY
from tunedqk.errors import CompilerCrashedError

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget

    from tunedqk.compiler import Program

logger = logging.getLogger(__name__)

# sys.path goes along because a notebook, a script's folder or a test runner may have changed it.
_COMPILER = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from tunedqk.compiler import main; main()"


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Compiler:
    """One process. OSError when it cannot be started."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(  # noqa: S603  our own code
            [sys.executable, "-c", _COMPILER, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what fails there is tried again, and reported, here
            start_new_session=True,  # an interrupt from the keyboard is not for it
        )
        self._requests = cast("IO[bytes]", self._process.stdin)
        self._answers = cast("IO[bytes]", self._process.stdout)
        self._ready = False

    def wait(self) -> bool:
        """Wait until it is ready; false when it ended instead."""
        self._ready = self._ready or self._answers.readline() == READY
        return self._ready

    def compile(self, target: GPUTarget, program: Program) -> bool:
        """Have it compile a program; false when that took it down."""
        request = ((target.backend, target.arch, target.warp_size), program)
        try:
            self._requests.write(msgspec.json.encode(request) + b"\n")
            self._requests.flush()
        except BrokenPipeError:
            return False
        return self._answers.readline() == DONE

    def status(self) -> int:
        """Exit status of a process that no longer answers, negative for a signal."""
        self._process.communicate()
        return self._process.returncode

    def end(self) -> None:
        """End it; it has nothing to save."""
        self._process.kill()
        self._process.communicate()


class CompilePool:
    """As many processes as threads call `compile` at a time, `start` of them at once; `close` ends them."""

    def __init__(self, start: int) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Compiler] = []
        self._problem: object = None  # why no process can be started
        for _ in range(start):
            self._start()

    def compile(self, target: GPUTarget, program: Program) -> bool:
        """Have a process compile, and wait. Compiling it here then takes milliseconds, or fails as it did there.

        CompilerCrashedError when the program takes the process down. False where none can be started: nothing is done.
        """
        while compiler := self._take():
            if not compiler.wait():
                self._give_up(f"exit status {compiler.status()}")
            elif compiler.compile(target, program):
                with self._lock:
                    self._idle.append(compiler)
                return True
            else:
                raise CompilerCrashedError(f"the compiler's process ended with exit status {compiler.status()}")
        return False

    def close(self) -> None:
        """End the processes; nothing is being compiled."""
        while self._idle:
            self._idle.pop().end()

    def _take(self) -> _Compiler | None:
        with self._lock:
            if not self._idle and self._problem is None:
                self._start()
            return self._idle.pop() if self._idle else None

    def _start(self) -> None:
        try:
            self._idle.append(_Compiler())
        except OSError as error:
            self._give_up(error)

    def _give_up(self, problem: object) -> None:
        if self._problem is None:
            self._problem = problem
            logger.warning("tunedqk: no other process compiles (%s); in this one it is slower", problem)
