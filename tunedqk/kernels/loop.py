"""The loop kernel: the same scores, as plainly as they can be written. The fast kernel is judged by this one.

    out[b, h, l] = scale * sum_d q[b, h, d] * k[b, l, h // group, d]

Each lane of a program owns one element of the output and adds up its products one by one, in fp32: no reduction over a
dimension, no second dimension, no layout that a compiler could get wrong.
"""

import torch
import triton
import triton.language as tl

from tunedqk.device import start_triton


@triton.jit(do_not_specialize=(
    "elements", "seq_len", "q_heads", "group", "stride_qb", "stride_qh", "stride_kb", "stride_kl", "stride_kh",
    "stride_ob", "stride_oh", "stride_ol",
))  # fmt: skip
def qk_score_loop_kernel(
    q_ptr, k_ptr, out_ptr, magnitude_ptr, scale,
    elements: tl.int64, seq_len: tl.int64, q_heads: tl.int64, group: tl.int64,
    stride_qb: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_kl: tl.int64, stride_kh: tl.int64,
    stride_ob: tl.int64, stride_oh: tl.int64, stride_ol: tl.int64,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK of the batch * q_heads * seq_len elements of the output, and of sum|q||k|, which is contiguous."""
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = element < elements
    pos = element % seq_len
    q_head = element // seq_len % q_heads
    batch = element // seq_len // q_heads

    q_ptrs = q_ptr + batch * stride_qb + q_head * stride_qh
    k_ptrs = k_ptr + batch * stride_kb + pos * stride_kl + q_head // group * stride_kh
    scores = tl.zeros([BLOCK], dtype=tl.float32)
    magnitudes = tl.zeros([BLOCK], dtype=tl.float32)
    for d in range(HEAD_DIM):
        q = tl.load(q_ptrs + d, mask=inside, other=0.0).to(tl.float32)
        k = tl.load(k_ptrs + d, mask=inside, other=0.0).to(tl.float32)
        scores += q * k
        magnitudes += tl.abs(q * k)
    out_ptrs = out_ptr + batch * stride_ob + q_head * stride_oh + pos * stride_ol
    tl.store(out_ptrs, (scores * scale).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(magnitude_ptr + element, magnitudes * tl.abs(scale), mask=inside)


def loop_scores(q: torch.Tensor, k: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Write the scores of q [batch, q_heads, head_dim] and k [batch, seq_len, kv_heads, head_dim] to out.

    out is [batch, q_heads, seq_len]; any strides, with a contiguous head_dim. Returns |scale| * sum|q||k|, the size
    of what was added up, as float32 of out's shape: what an error has to be measured by.
    """
    batch, q_heads, head_dim = q.shape
    _, seq_len, kv_heads, _ = k.shape
    if q.is_cuda:
        start_triton()
    elements = batch * q_heads * seq_len
    magnitude = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    # A program costs the interpreter milliseconds, however large it is.
    block = 128 if q.is_cuda else min(triton.next_power_of_2(elements), 1 << 16)
    qk_score_loop_kernel[(triton.cdiv(elements, block),)](
        q, k, out, magnitude, scale, elements, seq_len, q_heads, q_heads // kv_heads,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), k.stride(2), *out.stride(),
        HEAD_DIM=head_dim, BLOCK=block,
    )  # fmt: skip
    return magnitude
