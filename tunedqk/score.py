"""Decode-time attention scores of a KV cache: `qk_score`.

out[b, h, l] = scale * sum_d q[b, h, d] * k[b, l, h // group, d],    group = q_heads // kv_heads
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from tunedqk import op
from tunedqk.arguments import check_number, check_quantised
from tunedqk.call import call_of
from tunedqk.compute import compute
from tunedqk.tensors import DTYPE_NAMES, Tensors

if TYPE_CHECKING:
    from tunedqk.config import KernelConfig

__all__ = ["qk_score"]


def qk_score(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    scale: float | None = 1.0,
    layout: str = "NHD",
    seq_lens: torch.Tensor | None = None,
    seq_starts: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    k_scale: torch.Tensor | float | None = None,
    causal: bool = False,
    fill: float | None = -math.inf,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: KernelConfig | None = None,
) -> torch.Tensor:
    """Scores of the queries of each request against every key of its cache, at the GPU's memory floor.

    Args:
        q: [batch, q_heads, head_dim] for one query per request; for up to 64, [batch, q_len, q_heads, head_dim]
            (layout "NHD") or [batch, q_heads, q_len, head_dim] ("HND"). float32, float16 or bfloat16; head_dim 1 to
            576.
        k: [batch, seq_len, kv_heads, head_dim] ("NHD") or [batch, kv_heads, seq_len, head_dim] ("HND"), of q's dtype,
            float8_e4m3fn (from sm_89) or float8_e5m2; any strides with a contiguous last dimension. Query head h reads
            KV head h // (q_heads // kv_heads).
        scale: factor of the scores; None means head_dim ** -0.5, as in scaled dot product attention.
        layout: "NHD" (FlashAttention, vLLM) or "HND" (Hugging Face caches).
        seq_lens: [batch] or [batch, q_len], int32 or int64: positions at or past it get `fill`, and what is stored
            there is not read. Its values stay on the device.
        seq_starts: [batch], int32 or int64: positions before it likewise (left padding, sliding windows).
        block_table: [batch, max_blocks], int32 or int64, rows of any stride: k is then a pool of pages,
            [num_blocks, page_size, kv_heads, head_dim] ("NHD") or [num_blocks, kv_heads, page_size, head_dim] ("HND"),
            page_size 1 to 256, and seq_len is max_blocks * page_size. Needs seq_lens. Entries of pages that no query
            sees are not read; one that is read has to be in range, which nothing checks.
        k_scale: what float8 keys are multiplied by: a number, or float32 of shape [], [kv_heads] or
            [batch, seq_len, kv_heads] (in a pool [num_blocks, page_size, kv_heads]), any strides.
        causal: query i of q_len sees positions below (seq_lens or seq_len) - q_len + i + 1; the rest gets `fill`.
        fill: what the positions get that a query does not see, and those of a longer `out` past seq_len; None leaves
            them untouched. The default, -inf, keeps them out of a softmax and a top-k.
        out: [batch, q_heads, L] or, for q with q_len, [batch, q_heads, q_len, L], any strides; L >= seq_len, or
            whatever covers seq_lens where there is a block_table. Written and returned. It may not overlap an input.
        out_dtype: dtype of the result; q's by default.
        config: use this config instead of the tuned one. It is validated like any other.

    Returns:
        [batch, q_heads, seq_len] or [batch, q_heads, q_len, seq_len], or `out`. Sums are float32; the only rounding to
        the output's dtype is the last step.

    On a GPU the kernel's config comes from the tuning DB. Without a winner for the key, the first call tunes (seconds;
    see TUNEDQK_MODE). No binary is launched before it agreed with the loop kernel on this GPU model. On a CPU the
    result is computed by torch operations, or by the kernels under TRITON_INTERPRET=1.

    Without `out` there is a gradient for q and k. Under autocast q and k are cast as torch.matmul would. torch.compile
    sees one operator. DTensors sharded over batch, heads, or (k alone, where nothing is hidden) positions give scores
    sharded likewise.

    Raises:
        TypeError, ValueError: an argument does not fit; nothing was launched or written.
        RejectedConfigError: `config` did not compile or did not agree with the loop kernel.
        MissingConfigError: no winner is stored and TUNEDQK_MODE is strict.
        NoAcceptedConfigError: no config at all agreed with the loop kernel.
        CaptureError: a CUDA graph is being captured and no accepted binary is ready for this call.
    """
    if torch._C._is_any_autocast_enabled() and out is None:  # noqa: SLF001  the public question is asked per device type
        q, k = _autocast(q, k)
    factor = None if scale is None else check_number("scale", scale)
    fill = None if fill is None else check_number("fill", fill)
    by_number = 1.0
    if k_scale is not None and not isinstance(k_scale, torch.Tensor):
        by_number = check_number("k_scale", k_scale)
        check_quantised(k)
        k_scale = None
    tensors = Tensors(q, k, seq_lens, seq_starts, block_table, k_scale)
    if torch.compiler.is_dynamo_compiling():  # the tensors are checked when the operator's result is worked out
        factor = (q.shape[-1] ** -0.5 if factor is None else factor) * by_number
        return op.apply(tensors, factor, layout, causal, fill, out, out_dtype, config)
    call = call_of(tensors, layout, causal, fill, out, out_dtype, config)
    factor = (call.sizes.head_dim**-0.5 if factor is None else factor) * by_number
    if call.by_operator:
        return op.apply(tensors, factor, layout, causal, fill, out, out_dtype, config)
    return compute(tensors, factor, layout, fill, out, call)


def _autocast(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What torch.matmul makes of them under autocast."""
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor)):
        return q, k  # the checks say what is wrong
    kind = q.device.type
    if not torch.is_autocast_enabled(kind):
        return q, k
    dtype = torch.get_autocast_dtype(kind)
    q, k = (x.to(dtype) if x.dtype in DTYPE_NAMES else x for x in (q, k))
    return q, k
