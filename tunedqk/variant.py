"""What a call compiles into its binary, and what it passes when it is launched: variants, sizes and strides."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tunedqk.compiler import Program
from tunedqk.config import Blocking, KernelConfig, TuningKey, blocking, tuning_key
from tunedqk.device import interpreting
from tunedqk.kernels.parts import SCALE_BY_HEAD, SCALE_BY_TOKEN
from tunedqk.tensors import KEY_DTYPE_NAMES, Tensors

ALIGNMENT = 16  # bytes, of the widest load

_TL_DTYPE = {
    torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16,
    torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5,
    torch.int32: tl.int32, torch.int64: tl.int64,
}  # fmt: skip
_K_SCALE = {"": 0, "head": SCALE_BY_HEAD.value, "token": SCALE_BY_TOKEN.value}


class Variant(NamedTuple):
    """What a call compiles into its binary, besides the config.

    dtype: of q; fp8: that of quantised keys, else None, as keys have q's. rows: for several queries, the query rows
    that share a KV head, rounded up to a power of two; 0 for one query. seq_lens, seq_starts, block_table: their
    dtypes, or None. fill: whether hidden positions are written; True where none are. k_scale: "", "head" or "token".
    """

    head_dim: int
    group: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    aligned: bool
    fp8: torch.dtype | None = None
    rows: int = 0
    seq_lens: torch.dtype | None = None
    seq_starts: torch.dtype | None = None
    block_table: torch.dtype | None = None
    page_size: int = 0
    k_scale: str = ""
    causal: bool = False
    fill: bool = True

    @property
    def k_dtype(self) -> torch.dtype:
        """The keys' dtype."""
        return self.fp8 or self.dtype

    @property
    def query_rows(self) -> int:
        """Query rows that share a KV head, rounded up where they belong to several queries."""
        return self.rows or self.group

    @property
    def ragged(self) -> bool:
        """Whether requests, or queries, may see different positions."""
        return self.causal or self.seq_lens is not None or self.seq_starts is not None

    @property
    def several(self) -> bool:
        """Whether there are several queries."""
        return self.rows > 0

    @property
    def blocking(self) -> Blocking:
        """How the kernel cuts this shape."""
        return blocking(self.head_dim, KEY_DTYPE_NAMES[self.dtype], self.query_rows)

    def key(self, seq_len: int, sequences: int) -> TuningKey:
        """The key that this variant's winner is stored under."""
        dtype = KEY_DTYPE_NAMES[self.k_dtype]
        return tuning_key(seq_len, self.head_dim, dtype, self.query_rows, self.page_size, sequences)

    def __str__(self) -> str:
        keys = f" with {KEY_DTYPE_NAMES[self.fp8]} keys" if self.fp8 else ""
        names = f"{KEY_DTYPE_NAMES[self.dtype]}{keys} to {KEY_DTYPE_NAMES[self.out_dtype]}"
        parts = [f"head_dim {self.head_dim}", f"group {self.group}"]
        parts += [f"{self.rows} rows of several queries"] if self.rows else []
        parts += [names, f"{'' if self.aligned else 'not '}aligned"]
        parts += [f"pages of {self.page_size}"] if self.page_size else []
        for name in ("seq_lens", "seq_starts", "block_table"):
            dtype = getattr(self, name)
            parts += [f"{name} {str(dtype).removeprefix('torch.')}"] if dtype else []
        parts += [f"k_scale by {self.k_scale}"] if self.k_scale else []
        parts += ["causal"] if self.causal else []
        return ", ".join(parts + ([] if self.fill else ["not filled"]))


class Geometry(NamedTuple):
    """Sizes and strides (in elements) of one call, in the order in which the kernel takes them.

    A stride over a dimension of size one is 0: it addresses nothing, and must not spoil the alignment. qi, oi: over
    queries; lb, li: of seq_lens; sb: of seq_starts; tb: of block_table; cb, cl, ch: of k_scale. In a paged cache kb
    and cb are over blocks, and kl and cl within one.
    """

    batch: int
    seq_len: int
    out_len: int
    kv_heads: int
    q_len: int
    stride_qb: int
    stride_qh: int
    stride_qi: int
    stride_kb: int
    stride_kl: int
    stride_kh: int
    stride_ob: int
    stride_oh: int
    stride_oi: int
    stride_ol: int
    stride_lb: int = 0
    stride_li: int = 0
    stride_sb: int = 0
    stride_tb: int = 0
    stride_cb: int = 0
    stride_cl: int = 0
    stride_ch: int = 0


def _strides(x: torch.Tensor) -> list[int]:
    return [stride if size > 1 else 0 for size, stride in zip(x.shape, x.stride(), strict=True)]


def geometry(tensors: Tensors, out: torch.Tensor, layout: str, *, fill_tail: bool) -> Geometry:
    """Sizes and strides of a call whose arguments were checked. Without `fill_tail`, out ends at seq_len."""
    q, k, seq_lens, seq_starts, table, k_scale = tensors
    heads_first = layout == "HND"
    q_len, (stride_qb, stride_qh) = 1, _strides(q)[:2]
    stride_ob, stride_oh, *queries, stride_ol = _strides(out)
    stride_qi = stride_oi = 0
    if q.dim() == 4:
        q_len, (stride_oi,) = q.shape[2 if heads_first else 1], queries
        stride_qi = _strides(q)[2]
        if not heads_first:
            stride_qh, stride_qi = stride_qi, stride_qh
    stride_kb, stride_kl, stride_kh, _ = _strides(k)
    seq_len, kv_heads = k.shape[1:3]
    if heads_first:
        seq_len, kv_heads, stride_kl, stride_kh = kv_heads, seq_len, stride_kh, stride_kl
    if table is not None:
        seq_len = min(table.shape[1] * seq_len, out.shape[-1])
    stride_lb, stride_li = (*(_strides(seq_lens) if seq_lens is not None else ()), 0, 0)[:2]
    stride_cb, stride_cl, stride_ch = (0, 0, 0, *(_strides(k_scale) if k_scale is not None else ()))[-3:]
    return Geometry(
        q.shape[0], seq_len, out.shape[-1] if fill_tail else seq_len, kv_heads, q_len,
        stride_qb, stride_qh, stride_qi, stride_kb, stride_kl, stride_kh, stride_ob, stride_oh, stride_oi, stride_ol,
        stride_lb, stride_li,
        0 if seq_starts is None else _strides(seq_starts)[0],
        0 if table is None else _strides(table)[0],
        stride_cb, stride_cl, stride_ch,
    )  # fmt: skip


def strides_aligned(sizes: Geometry, dtype: torch.dtype, k_dtype: torch.dtype) -> bool:
    """Whether rows of keys and queries lie at multiples of 16 bytes from the first. Output strides do not matter."""
    of_q = (sizes.stride_qb | sizes.stride_qh | sizes.stride_qi) * dtype.itemsize
    of_k = (sizes.stride_kb | sizes.stride_kl | sizes.stride_kh) * k_dtype.itemsize
    return (of_q | of_k) % ALIGNMENT == 0


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
        "SEVERAL": variant.several,
        "RAGGED": variant.ragged,
        "CAUSAL": variant.causal,
        "FILL": variant.fill,
        "PAGE_SIZE": variant.page_size,
        "K_SCALE": _K_SCALE[variant.k_scale],
        "PAIRS": (
            variant.fp8 == torch.float8_e4m3fn
            and blocks.dot
            and dot_dtype != tl.float32
            and variant.aligned
            and variant.head_dim % 2 == 0
            and blocks.BLOCK_D >= 32
            and not blocks.TAIL_D
        ),
    }


def triton_config(config: KernelConfig) -> triton.Config:
    """The config as triton.autotune takes it."""
    return triton.Config(config.meta(), num_warps=config.num_warps, num_stages=config.num_stages)


def program(variant: Variant, config: KernelConfig) -> Program:
    """What the compiler needs for a binary."""
    constexprs = shape_constexprs(variant)
    if constexprs["DOT_DTYPE"] is not None:
        constexprs["DOT_DTYPE"] = constexprs["DOT_DTYPE"].name
    pointers = (
        variant.dtype, variant.k_dtype, variant.out_dtype, variant.seq_lens, variant.seq_starts, variant.block_table,
        torch.float32 if variant.k_scale else None,
    )  # fmt: skip
    return Program(
        pointers=tuple(None if dtype is None else _TL_DTYPE[dtype].name for dtype in pointers),
        aligned=variant.aligned,
        # In the Autotuner's own words: Triton's memory of compiled kernels goes by their text.
        arguments={**constexprs, **triton_config(config).all_kwargs()},
    )
