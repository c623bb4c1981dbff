"""Which GPU, and which toolchain, this is. torch and triton are imported on use, not with the module."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec

import tunedqk

if TYPE_CHECKING:
    import torch
    from triton.compiler import CompiledKernel

INTERPRETER_ARCH = "interpreter"


class GpuIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A GPU model, as far as tuning and validation depend on it.

    arch: `sm_90`, `gfx942`, or `interpreter`. multiprocessors tells a slice of a GPU (MIG) from the whole.
    memory_gib is information for people, not identity.
    """

    name: str
    arch: str
    multiprocessors: int
    memory_gib: float = 0.0

    @property
    def identity(self) -> tuple[str, str, int]:
        """What two GPUs must share to share winners and receipts."""
        return self.name, self.arch, self.multiprocessors

    @property
    def interpreted(self) -> bool:
        """Whether this is Triton's interpreter rather than a GPU."""
        return self.arch == INTERPRETER_ARCH


class Toolchain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The versions that a result was made with."""

    triton: str
    torch: str
    tunedqk: str


def interpreting() -> bool:
    """Whether Triton runs its kernels in the interpreter: TRITON_INTERPRET, as Triton itself reads it."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in {"1", "true", "on", "yes", "y"}


_hashing = threading.Lock()
_starting = threading.Lock()


def hash_triton() -> None:
    """Have Triton hash itself (0.4 s), as it does when a process compiles its first kernel, and then remembers.

    Threads that compile at the same time would otherwise all do it.
    """
    from triton.runtime import cache

    if hasattr(cache, "triton_key"):
        with _hashing:
            cache.triton_key()


def start_triton() -> None:
    """Have Triton hash itself, and meanwhile load its driver: on a new machine that compiles C code first (0.4 s)."""
    with _starting:
        _start_triton()


@functools.cache
def _start_triton() -> None:
    from triton.runtime import driver

    with ThreadPoolExecutor(1) as thread:
        loaded = thread.submit(lambda: driver.active.utils)
        hash_triton()
        loaded.result()


_unloaded_later: weakref.WeakSet[CompiledKernel] = weakref.WeakSet()


def unload_after(kernel: CompiledKernel) -> None:
    """Have the driver unload what the current GPU has loaded of a kernel, as soon as nobody holds the kernel any more.

    Triton never does: each of the hundreds that tuning goes through would keep host memory until the process ends.
    """
    import torch

    if torch.version.cuda and kernel not in _unloaded_later:  # Triton gives the same one to whoever asks again
        _unloaded_later.add(kernel)
        weakref.finalize(kernel, _unload, torch.cuda.current_device(), kernel.module).atexit = False


def _unload(index: int, module: int) -> None:
    import torch

    with contextlib.suppress(RuntimeError), torch.cuda.device(index):  # the context may be lost
        ctypes.CDLL("libcuda.so.1").cuModuleUnload(ctypes.c_void_p(module))


@functools.cache
def toolchain() -> Toolchain:
    """The installed versions."""
    import torch
    import triton

    return Toolchain(triton.__version__, str(torch.__version__).split("+")[0], tunedqk.__version__)


@functools.cache
def gpu_identity(index: int) -> GpuIdentity:
    """The identity of the GPU with this torch device index."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    nvidia = f"sm_{properties.major}{properties.minor}"
    arch = properties.gcnArchName.split(":")[0] if torch.version.hip else nvidia
    return GpuIdentity(
        name=properties.name,
        arch=arch,
        multiprocessors=properties.multi_processor_count,
        memory_gib=round(properties.total_memory / 2**30, 1),
    )


_TRITON_FP8 = {"float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5"}


def supports(device: torch.device, fp8: str) -> bool:
    """Whether kernels on this device can load a float8 dtype, by torch's name."""
    import torch

    if device.type != "cuda" or interpreting() or not torch.cuda.is_available():
        return True
    return _TRITON_FP8[fp8] in _fp8_formats(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _fp8_formats(index: int) -> tuple[str, ...]:
    import torch
    from triton.compiler import make_backend
    from triton.runtime import driver

    with torch.cuda.device(index):
        target = driver.active.get_current_target()
    formats: tuple[str, ...] = make_backend(target).parse_options({}).supported_fp8_dtypes
    return formats


INTERPRETER = GpuIdentity(name="Triton interpreter", arch=INTERPRETER_ARCH, multiprocessors=1)


def identity_of(device: torch.device) -> GpuIdentity:
    """The identity that results on `device` are stored under."""
    if interpreting():
        return INTERPRETER
    import torch

    return gpu_identity(torch.cuda.current_device() if device.index is None else device.index)
