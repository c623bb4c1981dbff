"""Processes that compile in parallel, and leave what they made in Triton's cache for this process to find."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from typing import TYPE_CHECKING

import msgspec

from tunedqk.compiler import DONE, READY, STARTED
from tunedqk.errors import CompilerCrashedError
from tunedqk.exits import cause, is_crash

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget

    from tunedqk.compiler import Program

logger = logging.getLogger(__name__)

# sys.path goes along because a notebook, a script's folder or a test runner may have changed it. Nothing that could be
# found in the current folder may be imported before.
_COMPILER = """
import sys
sys.path[:], *descriptors = eval(sys.argv[1])
from tunedqk.compiler import main
main(*descriptors)
"""
KILLED = "killed"
START_TIMEOUT = 60.0  # seconds until a process must be ready


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Connection:
    """The way to one compiling process, and to its successor when it has died."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._answers = end.makefile("rb")
        self._number = 0
        self._ready = False

    def wait(self) -> bool:
        """Wait until there is a process that is ready; false when none comes."""
        if not self._ready:
            self._end.settimeout(START_TIMEOUT)
            self._ready = self._answer() == READY
            self._end.settimeout(None)
        return self._ready

    def compile(self, target: GPUTarget, program: Program) -> int | None:
        """Have it compile a program: 0, or the exit status of the process that it took down; None when all are gone."""
        self._number += 1
        request = (self._number, (target.backend, target.arch, target.warp_size), program)
        with contextlib.suppress(OSError):  # the answers will tell
            self._end.sendall(msgspec.json.encode(request) + b"\n")
        # What belongs to an earlier request, that was interrupted, or to a process that died idle, is passed over.
        while (answer := self._answer()) != STARTED % self._number:
            if not answer:
                return None
        answer = self._answer()
        if answer == DONE % self._number:
            return 0
        return int(answer.split()[-1]) if answer else None

    def _answer(self) -> bytes:
        try:
            return self._answers.readline()
        except OSError:
            return b""

    def close(self) -> None:
        """Let go: the process ends."""
        self._answers.close()
        self._end.close()


class CompilePool:
    """`count` compiling processes; for as many threads, which wait for theirs. `close` ends them."""

    def __init__(self, count: int) -> None:
        self._lock = threading.Lock()
        self._count = count
        self._parent: subprocess.Popen[bytes] | None = None
        self._ours: list[socket.socket] = []  # the first is the lifeline: they all end with it
        self._idle: list[_Connection] = []
        self._problem: object = None  # why there are no processes
        _pools.add(self)

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

            def connect() -> socket.socket:
                our, their = socket.socketpair()
                descriptors.append(theirs.enter_context(their).fileno())
                self._ours.append(our)
                return our

            connect()
            self._idle += [_Connection(connect()) for _ in range(self._count)]
            self._parent = subprocess.Popen(  # noqa: S603  our own code
                [sys.executable, "-c", _COMPILER, repr([[str(folder) for folder in sys.path], *descriptors])],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # what fails there is tried again, and reported, here
                pass_fds=descriptors,
                env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
                start_new_session=True,  # an interrupt from the keyboard is not for them
            )

    def compile(self, target: GPUTarget, program: Program) -> bool:
        """Have a process compile, and wait. Compiling it here then takes milliseconds, or fails as it did there.

        CompilerCrashedError when the program takes the process down. False where there is none: nothing is done.
        """
        self.start()
        with self._lock:
            connection = self._idle.pop() if self._idle and self._problem is None else None
        if connection is None:
            return False
        try:
            status = connection.compile(target, program) if connection.wait() else None
        finally:
            with self._lock:
                self._idle.append(connection)
        if status is None:
            with self._lock:
                self._give_up("they have ended, or never began")
            return False
        if is_crash(status):
            raise CompilerCrashedError(f"the compiler crashed: {cause(status)}")
        return status == 0

    def kill(self) -> None:
        """End the processes, whatever they are at; who waits for one gets False."""
        with self._lock:
            self._problem = self._problem or KILLED
            if self._parent is not None and self._parent.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._parent.pid, signal.SIGKILL)  # they have nothing to save
                self._parent.wait()

    def close(self) -> None:
        """End the processes, and let go of the connections; nobody waits for one. Others start when they are needed."""
        self.kill()
        while self._idle:
            self._idle.pop().close()
        while self._ours:
            self._ours.pop().close()
        if self._problem == KILLED:
            self._parent = self._problem = None

    def abandon(self) -> None:
        """In a forked child: let go of its connections, with which the processes would outlive the parent."""
        self._problem = "forked"
        for ours in self._ours:
            if ours.fileno() >= 0:
                os.close(ours.detach())  # close would wait for who reads from it

    def _give_up(self, problem: object) -> None:
        if self._problem is None:
            self._problem = problem
            logger.warning("tunedqk: no other process compiles (%s); in this one it is slower", problem)


_pools: weakref.WeakSet[CompilePool] = weakref.WeakSet()


def _abandon_all() -> None:
    for pool in list(_pools):
        pool.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
