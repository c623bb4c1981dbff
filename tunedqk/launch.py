"""From a call's tensors to a launched kernel: sizes and strides of a call, the variants, binaries ready to launch."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver

from tunedqk.compiler import Program, compile_program
from tunedqk.config import Blocking, KernelConfig, TuningKey, blocking, tuning_key
from tunedqk.device import interpreting, start_triton, unload_after
from tunedqk.kernels.loop import qk_score_loop_kernel
from tunedqk.kernels.plain import read_kernel, read_write_kernel
from tunedqk.kernels.vectorized import qk_score_kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from triton.backends.compiler import GPUTarget
    from triton.compiler import CompiledKernel

MAX_PROGRAMS = 2**31 - 1
ALIGNMENT = 16  # bytes, of the widest load

_TL_DTYPE = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in _TL_DTYPE}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class Variant(NamedTuple):
    """What a call compiles into its binary, besides the config."""

    head_dim: int
    group: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    aligned: bool

    @property
    def blocking(self) -> Blocking:
        """How the kernel cuts this shape."""
        return blocking(self.head_dim, DTYPE_NAMES[self.dtype], self.group)

    @property
    def row_blocks(self) -> int:
        """Programs that share a KV head and a chunk, because its query rows are too many for one."""
        return -(-self.group // self.blocking.ROWS)

    def key(self, seq_len: int) -> TuningKey:
        """The key that this variant's winner is stored under."""
        return tuning_key(seq_len, self.head_dim, DTYPE_NAMES[self.dtype], self.group)

    def __str__(self) -> str:
        names = f"{DTYPE_NAMES[self.dtype]} to {DTYPE_NAMES[self.out_dtype]}"
        return f"head_dim {self.head_dim}, group {self.group}, {names}, {'' if self.aligned else 'not '}aligned"


class Geometry(NamedTuple):
    """Sizes and strides (in elements) of one call, in the order in which the kernel takes them.

    A stride over a dimension of size one is 0: it addresses nothing, and must not spoil the alignment.
    """

    seq_len: int
    out_len: int
    kv_heads: int
    stride_qb: int
    stride_qh: int
    stride_kb: int
    stride_kl: int
    stride_kh: int
    stride_ob: int
    stride_oh: int
    stride_ol: int


def geometry(q: torch.Tensor, k: torch.Tensor, out: torch.Tensor, layout: str, *, fill_tail: bool) -> Geometry:
    """Sizes and strides of a call whose arguments were checked. Without `fill_tail`, out ends at seq_len."""
    batch, q_heads, _ = q.shape
    stride_qb, stride_qh, _ = q.stride()
    if layout == "NHD":
        _, seq_len, kv_heads, _ = k.shape
        stride_kb, stride_kl, stride_kh, _ = k.stride()
    else:
        _, kv_heads, seq_len, _ = k.shape
        stride_kb, stride_kh, stride_kl, _ = k.stride()
    stride_ob, stride_oh, stride_ol = out.stride()
    if batch == 1:
        stride_qb = stride_kb = 0
    if q_heads == 1:
        stride_qh = 0
    if kv_heads == 1:
        stride_kh = 0
    if seq_len == 1:
        stride_kl = 0
    return Geometry(
        seq_len, out.shape[2] if fill_tail else seq_len, kv_heads,
        stride_qb, stride_qh, stride_kb, stride_kl, stride_kh, stride_ob, stride_oh, stride_ol,
    )  # fmt: skip


def strides_aligned(sizes: Geometry, element_size: int) -> bool:
    """Whether rows of keys and queries lie at multiples of 16 bytes from the first. Output strides do not matter."""
    _, _, _, qb, qh, kb, kl, kh, _, _, _ = sizes
    return (qb | qh | kb | kl | kh) * element_size % ALIGNMENT == 0


def triton_config(config: KernelConfig) -> triton.Config:
    """The config as triton.autotune takes it."""
    return triton.Config(config.meta(), num_warps=config.num_warps, num_stages=config.num_stages)


def shape_constexprs(variant: Variant) -> dict[str, Any]:
    """The kernel's constexpr arguments that the config does not fix, in order."""
    blocks = variant.blocking
    dot_dtype = None
    if blocks.dot:
        # The interpreter's tl.dot multiplies the bit patterns of bf16.
        dot_dtype = tl.float32 if interpreting() else _TL_DTYPE[variant.dtype]
    return {
        "HEAD_DIM": variant.head_dim,
        "BLOCK_D": blocks.BLOCK_D,
        "TAIL_D": blocks.TAIL_D,
        "GROUP": variant.group,
        "ROWS": blocks.ROWS,
        "DOT_DTYPE": dot_dtype,
        "ALIGNED": variant.aligned,
        "ROUND_BY_HAND": interpreting() and variant.out_dtype == torch.bfloat16,
    }


def program(variant: Variant, config: KernelConfig) -> Program:
    """What the compiler needs for a binary."""
    constexprs = shape_constexprs(variant)
    if constexprs["DOT_DTYPE"] is not None:
        constexprs["DOT_DTYPE"] = constexprs["DOT_DTYPE"].name
    return Program(
        dtype=_TL_DTYPE[variant.dtype].name,
        out_dtype=_TL_DTYPE[variant.out_dtype].name,
        aligned=variant.aligned,
        # In the Autotuner's own words: Triton's memory of compiled kernels goes by their text.
        arguments={**constexprs, **triton_config(config).all_kwargs()},
    )


class Binary:
    """The kernel for one variant and config, ready to launch. `hash` names it: what a receipt speaks of."""

    hash: str

    def __init__(self, variant: Variant, config: KernelConfig) -> None:
        self.variant = variant
        self.config = config
        self.constexprs = (*shape_constexprs(variant).values(), *config.meta().values())
        self._row_blocks = variant.row_blocks
        self._chunk_size = config.CHUNK_SIZE

    def programs(self, batch: int, sizes: Geometry) -> int:
        """Programs of a launch; 0 when there is nothing to write."""
        return batch * sizes.kv_heads * self._row_blocks * -(-sizes.out_len // self._chunk_size)

    def launch(
        self, q: torch.Tensor, k: torch.Tensor, out: torch.Tensor, scale: float, fill: float, sizes: Geometry
    ) -> None:
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

    def launch(
        self, q: torch.Tensor, k: torch.Tensor, out: torch.Tensor, scale: float, fill: float, sizes: Geometry
    ) -> None:
        """See Binary.launch."""
        programs = self.programs(q.shape[0], sizes)
        if not programs:
            return
        stream = torch._C._cuda_getCurrentRawStream(q.device.index)  # noqa: SLF001  the public way makes an object
        hooks = knobs.runtime
        self._run(
            programs, 1, 1, stream, *self._fixed, hooks.launch_enter_hook, hooks.launch_exit_hook,
            q.data_ptr(), k.data_ptr(), out.data_ptr(), scale, fill, *sizes, *self.constexprs,
        )  # fmt: skip


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

    def launch(
        self, q: torch.Tensor, k: torch.Tensor, out: torch.Tensor, scale: float, fill: float, sizes: Geometry
    ) -> None:
        """See Binary.launch."""
        programs = self.programs(q.shape[0], sizes)
        if programs:
            with INTERPRETER_LOCK:
                qk_score_kernel[(programs,)](q, k, out, scale, fill, *sizes, *self.constexprs)


@functools.cache
def source_hash() -> str:
    """Hash of the fast kernel's module as a syntax tree: helpers and globals count, comments and folders do not."""
    import ast
    import inspect

    from tunedqk.kernels import vectorized

    tree = ast.parse(inspect.getsource(vectorized))
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


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
