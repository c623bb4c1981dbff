"""The kernel of the report that this package grew from, corrected, as a careful person would write it: one config."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _fixed_kernel(
    q_ptr, k_ptr, out_ptr, seq_len, kv_heads,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, CHUNK_SIZE: tl.constexpr,
):  # fmt: skip
    """A chunk of contiguous keys: by sum for one query head a KV head, else by tl.dot with rows padded to 16."""
    b, head, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    pos = chunk * CHUNK_SIZE + tl.arange(0, CHUNK_SIZE)
    offs_d = tl.arange(0, BLOCK_D)
    inside, within_head = pos < seq_len, offs_d < HEAD_DIM
    k_ptrs = k_ptr + ((b * seq_len + pos[:, None]) * kv_heads + head) * HEAD_DIM + offs_d[None, :]
    k = tl.load(k_ptrs, mask=inside[:, None] & within_head[None, :], other=0.0)
    q_ptr += (b * kv_heads + head) * GROUP * HEAD_DIM
    out_ptr += (b * kv_heads + head) * GROUP * seq_len
    if GROUP == 1:
        q = tl.load(q_ptr + offs_d, mask=within_head, other=0.0)
        scores = tl.sum(k.to(tl.float32) * q.to(tl.float32)[None, :], axis=1)
        tl.store(out_ptr + pos, scores.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        rows = tl.arange(0, ROWS)
        mask = within_head[:, None] & (rows < GROUP)[None, :]
        q = tl.load(q_ptr + rows[None, :] * HEAD_DIM + offs_d[:, None], mask=mask, other=0.0)
        mask = inside[:, None] & (rows < GROUP)[None, :]
        scores = tl.dot(k, q, input_precision="ieee")
        tl.store(out_ptr + rows[None, :] * seq_len + pos[:, None], scores.to(out_ptr.dtype.element_ty), mask=mask)


def fixed_triton(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Scores of contiguous tensors: q [batch, q_heads, head_dim], k [batch, seq_len, kv_heads, head_dim]."""
    batch, seq_len, kv_heads, head_dim = k.shape
    group = q.shape[1] // kv_heads
    out = torch.empty(batch, q.shape[1], seq_len, dtype=q.dtype, device=q.device)
    _fixed_kernel[(batch, kv_heads, triton.cdiv(seq_len, 64))](
        q, k, out, seq_len, kv_heads, GROUP=group, HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim),
        ROWS=max(16, triton.next_power_of_2(group)), CHUNK_SIZE=64, num_warps=4,
    )  # fmt: skip
    return out
