"""Compiling the fast kernel: here, or in processes that do nothing else.

Python's global lock lets 16 threads compile not three times as fast as one; processes have a lock each, and meet in
Triton's cache on disk. They are forked from one that imports no torch, starts no thread and sees no GPU.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import types
from typing import TYPE_CHECKING

import msgspec
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from tunedqk.device import hash_triton
from tunedqk.kernels.vectorized import UNSPECIALISED, qk_score_kernel

if TYPE_CHECKING:
    from collections.abc import Iterable

    from triton.compiler import CompiledKernel
    from triton.runtime import JITFunction

READY = b"ready\n"
STARTED = b"%d started\n"
DONE = b"%d done\n"
DIED = b"died %d\n"
MAX_REPLACEMENTS = 100

Target = tuple[str, int | str, int]
"""Backend, architecture and warp size: a GPUTarget."""


class Program(msgspec.Struct, frozen=True):
    """What a binary is compiled from. Dtypes go by Triton's names (`bf16`), so that it can be sent to a process.

    pointers: dtypes of the kernel's tensors, in order, or None for one that is not there. aligned: whether q, k and
    their strides are multiples of 16 bytes. arguments: constexprs and launch options.
    """

    pointers: tuple[str | None, ...]
    aligned: bool
    arguments: dict[str, int | bool | str | None]


class _Pointer:
    """Stands for a tensor when compiling: a dtype, and an address that is a multiple of 16 or is not."""

    def __init__(self, dtype: str, *, aligned: bool) -> None:
        self.dtype = tl.dtype(dtype)
        self._address = 0 if aligned else 1

    def data_ptr(self) -> int:
        return self._address


def compile_program(kernel: JITFunction, program: Program) -> CompiledKernel:
    """Compile the fast kernel (or a copy) for the current device, or take what Triton's cache holds.

    Raises what Triton raises.
    """
    hash_triton()
    pointers = [dtype and _Pointer(dtype, aligned=program.aligned) for dtype in program.pointers]
    scale, fill = 1.0, 0.0
    dot_dtype = program.arguments["DOT_DTYPE"]
    arguments = {**program.arguments, "DOT_DTYPE": dot_dtype and tl.dtype(dot_dtype)}
    return kernel.warmup(*pointers, scale, fill, *(1 for _ in UNSPECIALISED), grid=(1,), **arguments)


class _TargetDriver:
    """Stands for Triton's driver where nothing is launched: it knows what to compile for, and touches no GPU."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> GPUTarget:
        return self._target  # Triton keeps a cache for each device; here it has to be one for each target

    def get_current_stream(self, _: GPUTarget) -> int:
        return 0


def _prepare() -> None:
    """What takes long and is the same for every program, so that forked processes need not repeat it."""
    # Triton looks for `torch.Tensor` when it sees a pointer; importing torch for that would take seconds.
    torch = types.ModuleType("torch")
    torch.Tensor = type("Tensor", (), {})  # type: ignore[attr-defined]
    sys.modules["torch"] = torch
    hash_triton()


def _serve(connection: socket.socket) -> None:
    """Compile what comes over a connection until it ends: in each line a number, a target and a program, as JSON.

    Answers READY to begin with, `N started` and `N done`. What fails is also done: who asked will try it again, see it
    fail, and report it.
    """
    connection.sendall(READY)
    for line in connection.makefile("rb"):
        number, target, program = msgspec.json.decode(line, type=tuple[int, Target, Program])
        connection.sendall(STARTED % number)
        driver.set_active(_TargetDriver(GPUTarget(*target)))
        with contextlib.suppress(Exception):
            compile_program(qk_score_kernel, program)
        connection.sendall(DONE % number)


def _fork(connection: socket.socket, others: Iterable[socket.socket]) -> int:
    """Start a process that serves one connection; its id."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            for other in others:
                if other is not connection:
                    other.close()  # else it would not end when this process is gone
            _serve(connection)
            status = 0
        finally:
            os._exit(status)
    return process


def _watch(lifeline: int, connections: Iterable[socket.socket]) -> None:
    """Start a process that kills this session when a socket ends: a compilation does not see that nobody waits."""
    if os.fork() == 0:
        try:
            for connection in connections:
                connection.close()
            os.read(lifeline, 1)
        finally:
            os.killpg(0, signal.SIGKILL)


def main(lifeline: int, *descriptors: int) -> None:
    """Serve each of these sockets by a forked process, and by another when a program has taken it down.

    Between them the socket says `died STATUS`, with a minus for a signal. Ends when all connections have ended, and
    whatever is being compiled when the lifeline does, a socket whose other end is with who asks. Leads its session.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored signals are inherited, and this one would hide the dead
    connections = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    _watch(lifeline, connections)
    _prepare()
    serving = {_fork(connection, connections): connection for connection in connections}
    replacements = 0
    while serving:
        process, status = os.wait()
        connection = serving.pop(process, None)
        if connection is None:  # the one that watches
            continue
        if status and replacements < MAX_REPLACEMENTS:
            replacements += 1
            with contextlib.suppress(OSError):  # nobody asks any more, or nothing more can be started
                connection.sendall(DIED % os.waitstatus_to_exitcode(status))
                serving[_fork(connection, connections)] = connection
                continue
        connection.close()
        connections.remove(connection)
