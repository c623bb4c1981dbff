"""The checks of the public call: shapes, dtypes, devices, strides. TypeError or ValueError, before anything happens."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tunedqk.config import MAX_HEAD_DIM, MAX_PAGE_SIZE, MAX_QUERIES, KernelConfig
from tunedqk.device import supports
from tunedqk.launch import MAX_PROGRAMS
from tunedqk.tensors import DTYPE_NAMES, FP8_NAMES, INDEX_DTYPES, Tensors

LAYOUTS = ("NHD", "HND")
MAX_POSITIONS = 2**31 - 1  # of a block table: the kernel finds pages in int32
_SUPPORTED = ", ".join(DTYPE_NAMES.values())
_Q_FORMS = {
    "NHD": "[batch, q_heads, head_dim] or [batch, q_len, q_heads, head_dim]",
    "HND": "[batch, q_heads, head_dim] or [batch, q_heads, q_len, head_dim]",
}
_K_FORMS = {
    ("NHD", False): "[batch, seq_len, kv_heads, head_dim]",
    ("HND", False): "[batch, kv_heads, seq_len, head_dim]",
    ("NHD", True): "[num_blocks, page_size, kv_heads, head_dim]",
    ("HND", True): "[num_blocks, kv_heads, page_size, head_dim]",
}


class Sizes(NamedTuple):
    """What the checks found out about a call.

    seq_len: positions that the cache has room for, per request. page_size: 0 for a cache that is not paged.
    out_shape: of a result that is not given, [batch, q_heads, seq_len] or [batch, q_heads, q_len, seq_len].
    """

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    seq_len: int
    head_dim: int
    page_size: int
    out_dtype: torch.dtype
    out_shape: tuple[int, ...]


def check(
    tensors: Tensors,
    layout: str,
    *,
    causal: bool,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> Sizes:
    """Check the tensors of a call, but for their addresses, and return their sizes."""
    for name, value in zip(tensors._fields, tensors, strict=True):
        if not isinstance(value, torch.Tensor) and (value is not None or name in ("q", "k")):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {LAYOUTS}, got {layout!r}")
    if not isinstance(causal, bool):
        raise TypeError(f"causal: expected a bool, got {type(causal).__name__}")
    sizes = _check_q_and_k(tensors, layout)
    for name, tensor in tensors.given.items():
        if tensor.device != tensors.q.device:
            raise ValueError(f"{name}: expected q's device {tensors.q.device}, got {tensor.device}")
        if tensor.is_neg():
            raise ValueError(f"{name}: expected stored values (use resolve_neg()), got a lazily negated view")
    _check_lengths(tensors, sizes, causal=causal)
    _check_scales(tensors, sizes)
    if out_dtype is not None and (not isinstance(out_dtype, torch.dtype) or out_dtype not in DTYPE_NAMES):
        raise TypeError(f"out_dtype: expected {_SUPPORTED}, got {out_dtype!r}")
    if out is not None:
        _check_out(tensors, out, out_dtype, sizes)
        out_dtype = out.dtype
    return sizes if out_dtype is None else sizes._replace(out_dtype=out_dtype)


def _check_q_and_k(tensors: Tensors, layout: str) -> Sizes:
    q, k, paged = tensors.q, tensors.k, tensors.block_table is not None
    _check_kinds(q, k, layout, paged=paged)
    batch, head_dim = q.shape[0], q.shape[-1]
    q_len, q_heads = (1, q.shape[1]) if q.dim() == 3 else q.shape[1:3] if layout == "NHD" else (q.shape[2], q.shape[1])
    k_batch, seq_len, kv_heads, k_head_dim = k.shape
    if layout == "HND":
        seq_len, kv_heads = kv_heads, seq_len
    page_size = 0
    if tensors.block_table is not None:
        page_size, seq_len = seq_len, _check_table(tensors.block_table, batch) * seq_len
        if not 1 <= page_size <= MAX_PAGE_SIZE:
            raise ValueError(f"k: expected page_size from 1 to {MAX_PAGE_SIZE}, got {page_size} in {list(k.shape)}")
        if seq_len > MAX_POSITIONS:
            raise ValueError(
                f"block_table: expected max_blocks * page_size of at most {MAX_POSITIONS}, got {seq_len} "
                f"in {list(tensors.block_table.shape)}"
            )
    elif k_batch != batch:
        raise ValueError(f"k: expected q's batch {batch}, got {k_batch} in shape {list(k.shape)}")
    if k_head_dim != head_dim:
        raise ValueError(f"k: expected q's head_dim {head_dim}, got {k_head_dim} in shape {list(k.shape)}")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"q: expected head_dim from 1 to {MAX_HEAD_DIM}, got {head_dim}")
    if q_len > MAX_QUERIES:
        raise ValueError(f"q: expected q_len of at most {MAX_QUERIES}, got {q_len} in shape {list(q.shape)}")
    if q_heads and (not kv_heads or q_heads % kv_heads):
        raise ValueError(f"q: expected q_heads to be a multiple of kv_heads {kv_heads}, got {q_heads}")
    for name, tensor in (("q", q), ("k", k)):
        if tensor.stride(-1) != 1 and head_dim > 1:
            raise ValueError(f"{name}: expected a contiguous last dimension (stride 1), got strides {tensor.stride()}")
    out_shape = (batch, q_heads, seq_len) if q.dim() == 3 else (batch, q_heads, q_len, seq_len)
    return Sizes(batch, q_heads, kv_heads, q_len, seq_len, head_dim, page_size, q.dtype, out_shape)


def _check_kinds(q: torch.Tensor, k: torch.Tensor, layout: str, *, paged: bool) -> None:
    """Dimensions, dtypes, devices of q and k."""
    if q.dim() not in (3, 4):
        raise ValueError(f"q: expected shape {_Q_FORMS[layout]} for layout {layout}, got {list(q.shape)}")
    if k.dim() != 4:
        raise ValueError(f"k: expected shape {_K_FORMS[layout, paged]} for layout {layout}, got {list(k.shape)}")
    if not (q.is_cuda or q.is_cpu):
        raise ValueError(f"q: expected a CUDA or CPU device, got {q.device}")
    if q.dtype not in DTYPE_NAMES:
        raise TypeError(f"q: expected dtype {_SUPPORTED}, got {q.dtype}")
    if k.dtype != q.dtype and k.dtype not in FP8_NAMES:
        raise TypeError(f"k: expected q's dtype {q.dtype} or {', '.join(FP8_NAMES.values())}, got {k.dtype}")
    if k.dtype in FP8_NAMES:
        if not supports(k.device, FP8_NAMES[k.dtype]):
            raise TypeError(f"k: expected a dtype that Triton can load on this GPU, got {k.dtype} (e4m3 needs sm_89)")
        if k.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"k: expected no gradient for {k.dtype}, got requires_grad")


def _check_index(name: str, x: torch.Tensor, shapes: tuple[tuple[int, ...], ...], form: str) -> None:
    if tuple(x.shape) not in shapes:
        raise ValueError(f"{name}: expected shape {form}, got {list(x.shape)}")
    if x.dtype not in INDEX_DTYPES:
        raise TypeError(f"{name}: expected dtype int32 or int64, got {x.dtype}")


def _check_table(table: torch.Tensor, batch: int) -> int:
    """The number of blocks that a request may have."""
    max_blocks: int = table.shape[-1] if table.dim() else 0
    _check_index("block_table", table, ((batch, max_blocks),), f"[{batch}, max_blocks]")
    if max_blocks > 1 and table.stride(1) != 1:
        raise ValueError(f"block_table: expected a contiguous last dimension, got strides {table.stride()}")
    return max_blocks


def _check_lengths(tensors: Tensors, sizes: Sizes, *, causal: bool) -> None:
    batch, q_len = sizes.batch, sizes.q_len
    lens, starts = tensors.seq_lens, tensors.seq_starts
    if lens is not None:
        _check_index("seq_lens", lens, ((batch,), (batch, q_len)), f"[{batch}] or [{batch}, {q_len}]")
        if causal and lens.dim() == 2:
            raise ValueError(f"seq_lens: expected shape [{batch}] where causal is True, got {list(lens.shape)}")
    elif tensors.block_table is not None:
        raise ValueError("seq_lens: expected a tensor, since block_table is given, got None")
    if starts is not None:
        _check_index("seq_starts", starts, ((batch,),), f"[{batch}]")


def _check_scales(tensors: Tensors, sizes: Sizes) -> None:
    scale, k = tensors.k_scale, tensors.k
    if scale is None:
        return
    check_quantised(k)
    if scale.dtype != torch.float32:
        raise TypeError(f"k_scale: expected dtype float32, got {scale.dtype}")
    if scale.requires_grad and torch.is_grad_enabled():
        raise ValueError("k_scale: expected no gradient, got requires_grad")
    heads = sizes.kv_heads
    by_token = (k.shape[0], sizes.page_size or sizes.seq_len, heads)
    if tuple(scale.shape) not in ((), (heads,), by_token):
        form = f"[] or [{heads}] or {list(by_token)}"
        raise ValueError(f"k_scale: expected a number or shape {form}, got {list(scale.shape)}")


def check_quantised(k: torch.Tensor) -> None:
    """Only float8 keys take a k_scale."""
    if isinstance(k, torch.Tensor) and k.dtype not in FP8_NAMES:
        raise ValueError(f"k_scale: expected None for keys that are not float8, got one for {k.dtype}")


def _check_out(tensors: Tensors, out: torch.Tensor, out_dtype: torch.dtype | None, sizes: Sizes) -> None:
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out: expected a torch.Tensor, got {type(out).__name__}")
    *rows, seq_len = sizes.out_shape
    least = 0 if sizes.page_size else seq_len  # a pool's table is often far wider than the requests are long
    if out.dim() != len(rows) + 1 or list(out.shape[:-1]) != rows or out.shape[-1] < least:
        expected = ", ".join(map(str, [*rows, "any length" if sizes.page_size else f"at least {seq_len}"]))
        raise ValueError(f"out: expected shape [{expected}], got {list(out.shape)}")
    if out.dtype not in DTYPE_NAMES:
        raise TypeError(f"out: expected dtype {_SUPPORTED}, got {out.dtype}")
    if out_dtype is not None and out.dtype != out_dtype:
        raise ValueError(f"out: expected out_dtype {out_dtype}, got {out.dtype}")
    if out.device != tensors.q.device:
        raise ValueError(f"out: expected q's device {tensors.q.device}, got {out.device}")
    if out.is_neg():
        raise ValueError("out: expected a tensor that stores its values, got a lazily negated view")
    if torch.is_grad_enabled():
        for name, tensor in (("q", tensors.q), ("k", tensors.k), ("out", out)):
            if tensor.requires_grad:
                raise ValueError(
                    f"{name}: expected no gradient where out is given (use torch.no_grad()), got requires_grad"
                )
    if not out.is_contiguous() and _overlaps_itself(out):
        raise ValueError(
            f"out: expected elements that do not overlap, got strides {out.stride()} for shape {list(out.shape)}"
        )


def extent(x: torch.Tensor) -> int:
    """How many bytes a tensor's elements reach over, gaps included; 0 without elements."""
    elements = x.numel()
    if elements and not x.is_contiguous():
        elements = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return elements * x.element_size()


def _overlaps_itself(x: torch.Tensor) -> bool:
    """Whether two index tuples may address one element: sorted by stride, each must step over what lies below it."""
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def check_number(name: str, value: object) -> float:
    """A real number, as a float."""
    if type(value) is float:  # as most are
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: expected a number or None, got {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}: expected a number that fits a float, got an int beyond its range") from None


def check_config(config: object) -> None:
    """A config, or None."""
    if config is not None and not isinstance(config, KernelConfig):
        raise TypeError(f"config: expected a KernelConfig or None, got {type(config).__name__}")


def check_programs(programs: int) -> None:
    """The grid must fit its one dimension."""
    if programs > MAX_PROGRAMS:
        raise ValueError(
            f"k: expected at most {MAX_PROGRAMS} chunks over batch and heads, got {programs}; split the batch"
        )
