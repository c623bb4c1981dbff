"""Processes that compile in parallel, and leave what they made in Triton's cache for this process to find."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import msgspec

from tunedqk.compiler import DONE, FAILED, READY
from tunedqk.errors import CompilerCrashedError

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget

    from tunedqk.compiler import Program

logger = logging.getLogger(__name__)

# sys.path goes along because a notebook, a script's folder or a test runner may have changed it.
_COMPILER = """
import json, sys
sys.path[:], descriptors = json.loads(sys.argv[1])
from tunedqk.compiler import main
main(descriptors)
"""


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Connection:
    """The way to one compiling process, and to its successor when it has crashed."""

    def __init__(self, end: socket.socket) -> None:
        self._file = end.makefile("rwb")
        self._ready = False

    def _answer(self) -> bytes:
        try:
            return self._file.readline()
        except ConnectionError:
            return b""

    def wait(self) -> bool:
        """Wait until there is a process that is ready; false when none comes."""
        self._ready = self._ready or self._answer() == READY
        return self._ready

    def compile(self, target: GPUTarget, program: Program) -> bytes:
        """Have it compile a program: DONE, FAILED, or the signal that ended it, if that is known."""
        request = ((target.backend, target.arch, target.warp_size), program)
        with contextlib.suppress(ConnectionError):  # the answer will tell
            self._file.write(msgspec.json.encode(request) + b"\n")
            self._file.flush()
        answer = self._answer()
        self._ready = answer == DONE
        return answer

    def close(self) -> None:
        """Let go: the process ends."""
        with contextlib.suppress(ConnectionError):
            self._file.close()


class CompilePool:
    """`count` compiling processes; for as many threads, which wait for theirs. `close` ends them."""

    def __init__(self, count: int) -> None:
        self._lock = threading.Lock()
        self._count = count
        self._parent: subprocess.Popen[bytes] | None = None
        self._idle: list[_Connection] = []
        self._problem: object = None  # why there are no processes

    def start(self) -> None:
        """Start the processes, if that has not been done, and do not wait for them."""
        with self._lock:
            if self._parent is None and self._problem is None:
                try:
                    self._start()
                except (OSError, ValueError) as error:  # ValueError: a system on which processes do not fork
                    self._give_up(error)

    def _start(self) -> None:
        if not sys.executable:
            raise OSError("sys.executable is not set")
        with contextlib.ExitStack() as theirs:
            descriptors = []
            for _ in range(self._count):
                our, their = socket.socketpair()
                theirs.enter_context(their)
                descriptors.append(their.fileno())
                with our:  # the connection's file keeps it open
                    self._idle.append(_Connection(our))
            arguments = json.dumps([[str(folder) for folder in sys.path], descriptors])
            self._parent = subprocess.Popen(  # noqa: S603  our own code
                [sys.executable, "-c", _COMPILER, arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # what fails there is tried again, and reported, here
                pass_fds=descriptors,
                start_new_session=True,  # an interrupt from the keyboard is not for them
            )

    def compile(self, target: GPUTarget, program: Program) -> bool:
        """Have a process compile, and wait. Compiling it here then takes milliseconds, or fails as it did there.

        CompilerCrashedError when the program takes the process down. False where none can be started: nothing is done.
        """
        self.start()
        with self._lock:
            connection = self._idle.pop() if self._idle and self._problem is None else None
        if connection is None:
            return False
        try:
            if not connection.wait():
                self._give_up("the first of them ended at once")
                return False
            answer = connection.compile(target, program)
        finally:
            with self._lock:
                self._idle.append(connection)
        if answer not in {DONE, FAILED}:
            raise CompilerCrashedError(f"the compiler crashed: {answer.decode().strip() or 'its process is gone'}")
        return True

    def close(self) -> None:
        """End the processes; nothing is being compiled."""
        while self._idle:
            self._idle.pop().close()
        if self._parent is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._parent.pid, signal.SIGKILL)  # they have nothing to save
            self._parent.wait()

    def _give_up(self, problem: object) -> None:
        if self._problem is None:
            self._problem = problem
            logger.warning("tunedqk: no other process compiles (%s); in this one it is slower", problem)
