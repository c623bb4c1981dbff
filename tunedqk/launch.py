"""Binaries, ready to launch."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.runtime import driver

from tunedqk.compiler import compile_program
from tunedqk.device import interpreting, start_triton, unload_after
from tunedqk.kernels.loop import qk_score_loop_kernel
from tunedqk.kernels.plain import read_kernel, read_write_kernel
from tunedqk.kernels.vectorized import qk_score_kernel
from tunedqk.variant import Geometry, Variant, program, shape_constexprs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from triton.backends.compiler import GPUTarget
    from triton.compiler import CompiledKernel

    from tunedqk.config import KernelConfig
    from tunedqk.tensors import Tensors

MAX_PROGRAMS = 2**31 - 1
# Where lengths differ, and only the device knows them: so many programs, each of which goes through every so manieth
# chunk of its request until that ends. On an H200, fewer leave multiprocessors idle, and more have nothing to do.
RAGGED_PROGRAMS = 2**14


def programs(variant: Variant, chunk_size: int, sizes: Geometry) -> int:
    """Programs of a launch; 0 when there is nothing to write."""
    return _programs(sizes, variant.group, variant.blocking.ROWS, chunk_size, RAGGED_PROGRAMS if variant.ragged else 0)


def _programs(sizes: Geometry, group: int, rows: int, chunk_size: int, most: int) -> int:
    """most: of them, about, where lengths differ, else 0."""
    batch, _, out_len, kv_heads, q_len = sizes[:5]
    chunks = -(-out_len // chunk_size)
    requests = batch * kv_heads * -(-group * q_len // rows)
    if most and requests:
        chunks = min(chunks, -(-most // requests))
    return requests * chunks


class Grid(NamedTuple):
    """Programs of a launch, 0 where there is nothing to write, and what they get besides tensors, scale and fill."""

    programs: int
    arguments: tuple[Any, ...]


class Binary:
    """The kernel for one variant and config, ready to launch. `hash` names it: what a receipt speaks of."""

    hash: str

    def __init__(self, variant: Variant, config: KernelConfig) -> None:
        self.variant = variant
        self.config = config
        self.constexprs = (*shape_constexprs(variant).values(), *config.meta().values())
        self._shape = (variant.group, variant.blocking.ROWS, config.CHUNK_SIZE)
        self._ragged = variant.ragged

    def grid(self, sizes: Geometry, most: int = RAGGED_PROGRAMS) -> Grid:
        """For launches on tensors of such sizes. most: about so many programs, where lengths differ."""
        return Grid(_programs(sizes, *self._shape, most if self._ragged else 0), (*sizes, *self.constexprs))

    def launch(self, tensors: Tensors, out: torch.Tensor, scale: float, fill: float, grid: Grid) -> None:
        """Launch on the current stream of the current device; the caller checked shapes, dtypes and alignment."""
        raise NotImplementedError


class CompiledBinary(Binary):
    """A binary on a GPU, launched without the argument work that Triton does for each `kernel[grid]` call."""

    def __init__(self, variant: Variant, config: KernelConfig) -> None:
        """Compile and load for the current device; raises what Triton raises."""
        super().__init__(variant, config)
        start_triton()
        self.kernel = compile_program(qk_score_kernel, program(variant, config))
        self.hash = self.kernel.hash
        self._run, self._fixed = _launcher(self.kernel)
        unload_after(self.kernel)

    def launch(self, tensors: Tensors, out: torch.Tensor, scale: float, fill: float, grid: Grid) -> None:
        """See Binary.launch."""
        programs, arguments = grid
        if not programs:
            return
        q, k, seq_lens, seq_starts, table, k_scale = tensors
        stream = torch._C._cuda_getCurrentRawStream(q.get_device())  # noqa: SLF001  the public way makes an object
        hooks = knobs.runtime
        self._run(
            programs, 1, 1, stream, *self._fixed, _used(hooks.launch_enter_hook), _used(hooks.launch_exit_hook),
            q.data_ptr(), k.data_ptr(), out.data_ptr(),
            None if seq_lens is None else seq_lens.data_ptr(), None if seq_starts is None else seq_starts.data_ptr(),
            None if table is None else table.data_ptr(), None if k_scale is None else k_scale.data_ptr(),
            scale, fill, *arguments,
        )  # fmt: skip


def _used(hook: Any) -> Any:
    """Nothing for a chain of hooks that has none, as most: the launcher would go into Python to find that out."""
    return hook if getattr(hook, "calls", True) else None


def _launcher(kernel: CompiledKernel) -> tuple[Callable[..., None], tuple[object, ...]]:
    """What launches a kernel, and its arguments between the stream and the hooks. Loads it: OutOfResources."""
    launcher: Any = kernel.run
    if isinstance(launcher, functools.partial):  # it could not be loaded before: Triton keeps the error in its place
        launcher()
    fixed = (kernel.packed_metadata, None)
    if triton.__version__.startswith("3.6.") and not (launcher.global_scratch_size or launcher.profile_scratch_size):
        # The C function itself: on an H200 the Python around it, for scratch memory, costs a call 1 us.
        cooperative, overlapping = launcher.launch_cooperative_grid, launcher.launch_pdl
        return launcher.launch, (kernel.function, cooperative, overlapping, None, None, *fixed)
    return launcher, (kernel.function, *fixed)


INTERPRETER_LOCK = threading.RLock()
"""Held while the interpreter runs a kernel: it keeps the program's id in one place for all threads."""
if hasattr(os, "register_at_fork"):  # a thread that holds it at a fork is not there in the child to let it go
    os.register_at_fork(after_in_child=INTERPRETER_LOCK._at_fork_reinit)  # type: ignore[attr-defined]  # noqa: SLF001


class InterpretedBinary(Binary):
    """The kernel under Triton's interpreter. Its hash is that of the source and of what the program depends on."""

    def __init__(self, variant: Variant, config: KernelConfig) -> None:
        super().__init__(variant, config)
        program = (variant, config.CHUNK_SIZE, config.TILE_SIZE)
        self.hash = hashlib.sha256(f"{source_hash()} {program}".encode()).hexdigest()

    def launch(self, tensors: Tensors, out: torch.Tensor, scale: float, fill: float, grid: Grid) -> None:
        """See Binary.launch."""
        programs, arguments = grid
        if programs:
            import numpy as np  # which only the interpreter needs

            q, k, *others = tensors
            with INTERPRETER_LOCK, np.errstate(all="ignore"):  # a GPU does not warn of NaN and Inf either
                qk_score_kernel[(programs,)](q, k, out, *others, scale, fill, *arguments)


@functools.cache
def source_hash() -> str:
    """Hash of the fast kernel's modules as syntax trees: helpers and globals count, comments and folders do not."""
    import ast
    import inspect

    from tunedqk.kernels import float8, parts, vectorized

    trees = [ast.dump(ast.parse(inspect.getsource(module))) for module in (float8, parts, vectorized)]
    return hashlib.sha256("".join(trees).encode()).hexdigest()


_compiled: dict[tuple[int, Variant, KernelConfig], CompiledBinary] = {}  # but for what was forgotten
_compiling: dict[tuple[int, Variant, KernelConfig], threading.Lock] = {}


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def is_built(device: torch.device, variant: Variant, config: KernelConfig) -> bool:
    """Whether `build` has its result at hand."""
    return (_index(device), variant, config) in _compiled


def forget(device: torch.device, but: Collection[Variant] = ()) -> None:
    """Let go of a device's binaries, but for some variants. Asked for again, they come from Triton's cache on disk."""
    if interpreting():
        return
    index = _index(device)
    # A copy: another device's thread may be adding its own.
    unwanted = [wanted for wanted in list(_compiled) if wanted[0] == index and wanted[1] not in but]
    for wanted in unwanted:
        del _compiled[wanted]
    if unwanted:
        for kernel in (qk_score_kernel, qk_score_loop_kernel, read_kernel, read_write_kernel):
            with contextlib.suppress(AttributeError):
                kernel.device_caches.clear()  # where Triton, too, keeps all that was ever compiled


def target_of(device: torch.device) -> GPUTarget:
    """What Triton compiles for on a GPU."""
    with torch.cuda.device(device):
        return driver.active.get_current_target()


def build(device: torch.device, variant: Variant, config: KernelConfig) -> Binary:
    """The binary for a device, compiled once per process. Raises what Triton raises when it cannot be compiled."""
    if interpreting():
        return InterpretedBinary(variant, config)
    index = _index(device)
    wanted = (index, variant, config)
    with _compiling.setdefault(wanted, threading.Lock()):  # who comes second waits for the first, and finds its result
        if wanted not in _compiled:
            with torch.cuda.device(index):
                _compiled[wanted] = CompiledBinary(variant, config)
        return _compiled[wanted]
