"""The loop kernel: the same scores, as plainly as they can be written. The fast kernel is judged by this one.

    out[b, h, i, l] = scale * k_scale * sum_d q[b, h, i, d] * k[b, l, h // group, d]    where query i of b sees l

Each lane of a program owns one element of the output and adds up its products one by one, in fp32: no reduction over a
dimension, no second dimension, no layout that a compiler could get wrong.
"""

import torch
import triton
import triton.language as tl

from tunedqk.device import start_triton
from tunedqk.tensors import Tensors


@triton.jit(do_not_specialize=(
    "elements", "seq_len", "q_len", "q_heads", "group", "page_size", "causal",
    "stride_qb", "stride_qi", "stride_qh", "stride_kb", "stride_kl", "stride_kh",
    "stride_ob", "stride_oh", "stride_oi", "stride_ol", "stride_lb", "stride_li", "stride_sb", "stride_tb",
    "stride_cb", "stride_cl", "stride_ch",
))  # fmt: skip
def qk_score_loop_kernel(
    q_ptr, k_ptr, out_ptr, magnitude_ptr, seq_lens_ptr, seq_starts_ptr, block_table_ptr, k_scale_ptr, scale, fill,
    elements: tl.int64, seq_len: tl.int64, q_len: tl.int64, q_heads: tl.int64, group: tl.int64,
    page_size: tl.int64, causal: tl.int64,
    stride_qb: tl.int64, stride_qi: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_kl: tl.int64, stride_kh: tl.int64,
    stride_ob: tl.int64, stride_oh: tl.int64, stride_oi: tl.int64, stride_ol: tl.int64,
    stride_lb: tl.int64, stride_li: tl.int64, stride_sb: tl.int64, stride_tb: tl.int64,
    stride_cb: tl.int64, stride_cl: tl.int64, stride_ch: tl.int64,
    HEAD_DIM: tl.constexpr, FILL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK of the batch * q_heads * q_len * seq_len elements of the output, and of the magnitudes, contiguous."""
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = element < elements
    pos = element % seq_len
    query = element // seq_len % q_len
    q_head = element // seq_len // q_len % q_heads
    batch = element // seq_len // q_len // q_heads

    end = seq_len + 0 * element
    if seq_lens_ptr is not None:
        length = tl.load(seq_lens_ptr + batch * stride_lb + query * stride_li, mask=inside, other=0)
        end = tl.minimum(end, tl.maximum(length, 0))
    end -= causal * (q_len - 1 - query)
    seen = inside & (pos < end)
    if seq_starts_ptr is not None:
        seen = seen & (pos >= tl.load(seq_starts_ptr + batch * stride_sb, mask=inside, other=0))

    place, row = batch, pos  # where the position lies: in the request's own cache, or on a page
    if block_table_ptr is not None:
        place = tl.load(block_table_ptr + batch * stride_tb + pos // page_size, mask=seen, other=0).to(tl.int64)
        row = pos % page_size
    kv_head = q_head // group
    q_ptrs = q_ptr + batch * stride_qb + query * stride_qi + q_head * stride_qh
    k_ptrs = k_ptr + place * stride_kb + row * stride_kl + kv_head * stride_kh
    scores = tl.zeros([BLOCK], dtype=tl.float32)
    magnitudes = tl.zeros([BLOCK], dtype=tl.float32)
    for d in range(HEAD_DIM):
        q = tl.load(q_ptrs + d, mask=seen, other=0.0).to(tl.float32)
        k = tl.load(k_ptrs + d, mask=seen, other=0.0).to(tl.float32)
        scores += q * k
        magnitudes += tl.abs(q * k)
    scores *= scale
    magnitudes *= tl.abs(scale)
    if k_scale_ptr is not None:
        k_scale = tl.load(k_scale_ptr + place * stride_cb + row * stride_cl + kv_head * stride_ch, mask=seen, other=0.0)
        scores *= k_scale
        magnitudes *= tl.abs(k_scale)
    out_ptrs = out_ptr + batch * stride_ob + q_head * stride_oh + query * stride_oi + pos * stride_ol
    if FILL:
        tl.store(out_ptrs, tl.where(seen, scores, fill).to(out_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(out_ptrs, scores.to(out_ptr.dtype.element_ty), mask=seen)
    tl.store(magnitude_ptr + element, tl.where(seen, magnitudes, -1.0), mask=inside)


def loop_scores(
    tensors: Tensors, out: torch.Tensor, scale: float = 1.0, *, causal: bool = False, fill: float | None = None
) -> torch.Tensor:
    """Write the scores of a call in layout NHD to out; see `qk_score` for the shapes.

    out has room for exactly seq_len positions, or for fewer; any strides. Returns |scale * k_scale| * sum|q||k|, the
    size of what was added up, as float32 of out's shape: what an error has to be measured by; -1 where it is hidden.
    """
    q, k, seq_lens, seq_starts, table, k_scale = tensors
    if q.dim() == 3:
        q, scores = q[:, None], out[:, :, None]
    else:
        scores = out
    _, q_len, q_heads, head_dim = q.shape
    if q.is_cuda:
        start_triton()
    elements, seq_len = out.numel(), out.shape[-1]
    magnitude = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    lens_strides = (0, 0) if seq_lens is None else (*seq_lens.stride(), 0)[:2]
    scale_strides = (0, 0, 0) if k_scale is None else (0, 0, 0, *k_scale.stride())[-3:]
    # A program costs the interpreter milliseconds, however large it is.
    block = 128 if q.is_cuda else min(triton.next_power_of_2(elements), 1 << 16)
    qk_score_loop_kernel[(triton.cdiv(elements, block),)](
        q, k, out, magnitude, seq_lens, seq_starts, table, k_scale, scale, 0.0 if fill is None else fill,
        elements, seq_len, q_len, q_heads, q_heads // k.shape[2], k.shape[1], int(causal),
        *q.stride()[:3], *k.stride()[:3], *scores.stride(), *lens_strides,
        0 if seq_starts is None else seq_starts.stride(0), 0 if table is None else table.stride(0), *scale_strides,
        HEAD_DIM=head_dim, FILL=fill is not None, BLOCK=block,
    )  # fmt: skip
    return magnitude
