"""Plain kernels that only move bytes: the memory floor that the fast kernel is measured against."""

import triton
import triton.language as tl


@triton.jit
def read_kernel(src_ptr, out_ptr, elements, BLOCK: tl.constexpr, LOAD_HINT: tl.constexpr):
    """Read every element. The store, which no data reaches, keeps the loads alive."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(src_ptr + offs, mask=offs < elements, other=0.0, eviction_policy=LOAD_HINT)
    largest = tl.max(x, axis=0)
    if largest > 3.0e38:
        tl.store(out_ptr, largest)


@triton.jit(do_not_specialize=("out_elements", "share"))
def read_write_kernel(
    src_ptr, out_ptr, elements, out_elements, share, BLOCK: tl.constexpr, OUT_BLOCK: tl.constexpr,
    LOAD_HINT: tl.constexpr, STORE_HINT: tl.constexpr,
):  # fmt: skip
    """Read every element, and write `share` contiguous output elements a program, after its reads."""
    pid = tl.program_id(0).to(tl.int64)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(src_ptr + offs, mask=offs < elements, other=0.0, eviction_policy=LOAD_HINT)
    largest = tl.max(x, axis=0)
    within = tl.arange(0, OUT_BLOCK)
    out_offs = pid * share + within
    mask = (within < share) & (out_offs < out_elements)
    value = (largest + within).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_offs, value, mask=mask, eviction_policy=STORE_HINT)
