"""The checks of the public call: shapes, dtypes, devices, strides. TypeError or ValueError, before anything happens."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tunedqk.config import MAX_HEAD_DIM, KernelConfig
from tunedqk.launch import DTYPE_NAMES, MAX_PROGRAMS

LAYOUTS = ("NHD", "HND")
_SUPPORTED = ", ".join(DTYPE_NAMES.values())


class Sizes(NamedTuple):
    """What the checks found out about a call."""

    batch: int
    q_heads: int
    kv_heads: int
    seq_len: int
    head_dim: int
    out_dtype: torch.dtype


def check(
    q: torch.Tensor,
    k: torch.Tensor,
    layout: str,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> Sizes:
    """Check the tensors of a call, but for their addresses, and return their sizes."""
    if not isinstance(q, torch.Tensor) or not isinstance(k, torch.Tensor):
        name, value = ("q", q) if not isinstance(q, torch.Tensor) else ("k", k)
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {LAYOUTS}, got {layout!r}")
    if q.dim() != 3:
        raise ValueError(f"q: expected shape [batch, q_heads, head_dim], got {list(q.shape)}")
    if k.dim() != 4:
        form = "[batch, seq_len, kv_heads, head_dim]" if layout == "NHD" else "[batch, kv_heads, seq_len, head_dim]"
        raise ValueError(f"k: expected shape {form} for layout {layout}, got {list(k.shape)}")
    batch, q_heads, head_dim = q.shape
    k_batch, seq_len, kv_heads, k_head_dim = k.shape
    if layout == "HND":
        seq_len, kv_heads = kv_heads, seq_len
    if not (q.is_cuda or q.is_cpu):
        raise ValueError(f"q: expected a CUDA or CPU device, got {q.device}")
    if q.dtype not in DTYPE_NAMES:
        raise TypeError(f"q: expected dtype {_SUPPORTED}, got {q.dtype}")
    if k.dtype != q.dtype:
        raise TypeError(f"k: expected q's dtype {q.dtype}, got {k.dtype}")
    if k.device != q.device:
        raise ValueError(f"k: expected q's device {q.device}, got {k.device}")
    if k_batch != batch:
        raise ValueError(f"k: expected q's batch {batch}, got {k_batch} in shape {list(k.shape)}")
    if k_head_dim != head_dim:
        raise ValueError(f"k: expected q's head_dim {head_dim}, got {k_head_dim} in shape {list(k.shape)}")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"q: expected head_dim from 1 to {MAX_HEAD_DIM}, got {head_dim}")
    if q_heads and (not kv_heads or q_heads % kv_heads):
        raise ValueError(f"q: expected q_heads to be a multiple of kv_heads {kv_heads}, got {q_heads}")
    for name, tensor in (("q", q), ("k", k)):
        if tensor.stride(-1) != 1 and head_dim > 1:
            raise ValueError(f"{name}: expected a contiguous last dimension (stride 1), got strides {tensor.stride()}")
        if tensor.is_neg():
            raise ValueError(f"{name}: expected stored values (use resolve_neg()), got a lazily negated view")
    if out_dtype is not None and (not isinstance(out_dtype, torch.dtype) or out_dtype not in DTYPE_NAMES):
        raise TypeError(f"out_dtype: expected {_SUPPORTED}, got {out_dtype!r}")
    if out is not None:
        _check_out(q, k, out, out_dtype, (batch, q_heads, seq_len))
        out_dtype = out.dtype
    return Sizes(batch, q_heads, kv_heads, seq_len, head_dim, out_dtype or q.dtype)


def _check_out(
    q: torch.Tensor, k: torch.Tensor, out: torch.Tensor, out_dtype: torch.dtype | None, shape: tuple[int, int, int]
) -> None:
    batch, q_heads, seq_len = shape
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out: expected a torch.Tensor, got {type(out).__name__}")
    if out.dim() != 3 or out.shape[:2] != (batch, q_heads) or out.shape[2] < seq_len:
        expected = f"[{batch}, {q_heads}, at least {seq_len}]"
        raise ValueError(f"out: expected shape {expected}, got {list(out.shape)}")
    if out.dtype not in DTYPE_NAMES:
        raise TypeError(f"out: expected dtype {_SUPPORTED}, got {out.dtype}")
    if out_dtype is not None and out.dtype != out_dtype:
        raise ValueError(f"out: expected out_dtype {out_dtype}, got {out.dtype}")
    if out.device != q.device:
        raise ValueError(f"out: expected q's device {q.device}, got {out.device}")
    if out.is_neg():
        raise ValueError("out: expected a tensor that stores its values, got a lazily negated view")
    if torch.is_grad_enabled():
        for name, tensor in (("q", q), ("k", k), ("out", out)):
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
