"""The loop kernel: the same scores, as plainly as they can be written. The fast kernel is judged by this one.

    out[b, h, l] = scale * sum_d q[b, h, d] * k[b, l, h // group, d]        0 <= l < seq_len
    out[b, h, l] = fill                                               seq_len <= l < out_len

A program adds up one query head and BLOCK positions, one element of head_dim after the other, in fp32: no reduction, no
second dimension, no layout that a compiler could get wrong.
"""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=(
    "seq_len", "out_len", "q_heads", "group", "stride_qb", "stride_qh", "stride_kb", "stride_kl", "stride_kh",
    "stride_ob", "stride_oh", "stride_ol",
))  # fmt: skip
def qk_score_loop_kernel(
    q_ptr, k_ptr, out_ptr, scale, fill, seq_len: tl.int64, out_len: tl.int64, q_heads: tl.int32, group: tl.int32,
    stride_qb: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_kl: tl.int64, stride_kh: tl.int64,
    stride_ob: tl.int64, stride_oh: tl.int64, stride_ol: tl.int64,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK positions of one query head of one batch element; the grid is batch * q_heads * ceil(out_len / BLOCK)."""
    pid = tl.program_id(0).to(tl.int64)
    blocks = (out_len + BLOCK - 1) // BLOCK
    pos = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    q_head = pid // blocks % q_heads
    batch = pid // blocks // q_heads

    q_ptrs = q_ptr + batch * stride_qb + q_head * stride_qh
    k_ptrs = k_ptr + batch * stride_kb + q_head // group * stride_kh + pos * stride_kl
    scores = tl.zeros([BLOCK], dtype=tl.float32)
    for d in range(HEAD_DIM):
        q = tl.load(q_ptrs + d).to(tl.float32)
        k = tl.load(k_ptrs + d, mask=pos < seq_len, other=0.0).to(tl.float32)
        scores += q * k
    scores = tl.where(pos < seq_len, scores * scale, fill)
    out_ptrs = out_ptr + batch * stride_ob + q_head * stride_oh + pos * stride_ol
    tl.store(out_ptrs, scores.to(out_ptr.dtype.element_ty), mask=pos < out_len)


def loop_scores(q: torch.Tensor, k: torch.Tensor, out: torch.Tensor, scale: float = 1.0, fill: float = 0.0) -> None:
    """Write the scores of q [batch, q_heads, head_dim] and k [batch, seq_len, kv_heads, head_dim] to `out`.

    out is [batch, q_heads, out_len] with out_len >= seq_len; any strides with a contiguous head_dim.
    """
    batch, q_heads, head_dim = q.shape
    _, seq_len, kv_heads, _ = k.shape
    out_len = out.shape[2]
    # Few large programs suit the interpreter, many small ones a GPU.
    block = 64 if q.is_cuda else 1024
    qk_score_loop_kernel[(batch * q_heads * triton.cdiv(out_len, block),)](
        q, k, out, scale, fill, seq_len, out_len, q_heads, q_heads // kv_heads,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), k.stride(2), *out.stride(),
        HEAD_DIM=head_dim, BLOCK=block,
    )  # fmt: skip
