"""Decode-time attention scores of a KV cache: `qk_score`.

out[b, h, l] = scale * sum_d q[b, h, d] * k[b, l, h // group, d],    group = q_heads // kv_heads
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from tunedqk import op
from tunedqk.arguments import check_number
from tunedqk.call import call_of
from tunedqk.compute import compute
from tunedqk.launch import DTYPE_NAMES

if TYPE_CHECKING:
    from tunedqk.config import KernelConfig

__all__ = ["qk_score"]


def qk_score(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    scale: float | None = 1.0,
    layout: str = "NHD",
    fill: float | None = -math.inf,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: KernelConfig | None = None,
) -> torch.Tensor:
    """Scores of one query per request against every key of its cache, at the GPU's memory floor.

    Args:
        q: [batch, q_heads, head_dim]; float32, float16 or bfloat16; head_dim 1 to 576.
        k: [batch, seq_len, kv_heads, head_dim] (layout "NHD") or [batch, kv_heads, seq_len, head_dim] ("HND"), q's
            dtype; any strides with a contiguous last dimension. Query head h reads KV head h // (q_heads // kv_heads).
        scale: factor of the scores; None means head_dim ** -0.5, as in scaled dot product attention.
        layout: "NHD" (FlashAttention, vLLM) or "HND" (Hugging Face caches).
        fill: what the positions of a longer `out` past seq_len get; None leaves them untouched. The default, -inf,
            keeps them out of a softmax and a top-k.
        out: [batch, q_heads, L] with L >= seq_len, any strides; written and returned. It may not overlap q or k.
        out_dtype: dtype of the result; q's by default.
        config: use this config instead of the tuned one. It is validated like any other.

    Returns:
        [batch, q_heads, seq_len], or `out`. Sums are float32; the only rounding to the output's dtype is the last step.

    On a GPU the kernel's config comes from the tuning DB. Without a winner for the key, the first call tunes (seconds;
    see TUNEDQK_MODE). No binary is launched before it agreed with the loop kernel on this GPU model. On a CPU the
    result is computed by torch operations, or by the kernels under TRITON_INTERPRET=1.

    Without `out` there is a gradient for q and k. Under autocast q and k are cast as torch.matmul would. torch.compile
    sees one operator. DTensors sharded over batch, heads, or (k alone) positions give scores sharded likewise.

    Raises:
        TypeError, ValueError: an argument does not fit; nothing was launched or written.
        RejectedConfigError: `config` did not compile or did not agree with the loop kernel.
        MissingConfigError: no winner is stored and TUNEDQK_MODE is strict.
        NoAcceptedConfigError: no config at all agreed with the loop kernel.
        CaptureError: a CUDA graph is being captured and no accepted binary is ready for this call.
    """
    if torch._C._is_any_autocast_enabled() and out is None:  # noqa: SLF001  the public question is asked per device type
        q, k = _autocast(q, k)
    if torch.compiler.is_dynamo_compiling():  # the tensors are checked when the operator's result is worked out
        factor = q.shape[-1] ** -0.5 if scale is None else check_number("scale", scale)
        fill = None if fill is None else check_number("fill", fill)
        return op.apply(q, k, factor, layout, fill, out, out_dtype, config)
    call = call_of(q, k, layout, fill, out, out_dtype, config)
    factor = call.sizes.head_dim**-0.5 if scale is None else check_number("scale", scale)
    fill = None if fill is None else check_number("fill", fill)
    if call.by_operator:
        return op.apply(q, k, factor, layout, fill, out, out_dtype, config)
    return compute(q, k, factor, layout, fill, out, call)


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
