"""Decode-time attention scores of a KV cache: `qk_score`.

out[b, h, l] = scale * sum_d q[b, h, d] * k[b, l, h // group, d],    group = q_heads // kv_heads
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from tunedqk import ready
from tunedqk.arguments import Sizes, check_number, check_programs
from tunedqk.call import Call, call_of
from tunedqk.device import interpreting
from tunedqk.launch import MAX_PROGRAMS

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
    result is computed by torch operations, or by the kernels under TRITON_INTERPRET=1. There is no gradient.

    Raises:
        TypeError, ValueError: an argument does not fit; nothing was launched or written.
        RejectedConfigError: `config` did not compile or did not agree with the loop kernel.
        MissingConfigError: no winner is stored and TUNEDQK_MODE is strict.
        NoAcceptedConfigError: no config at all agreed with the loop kernel.
        CaptureError: a CUDA graph is being captured and no accepted binary is ready for this call.
    """
    call = call_of(q, k, layout, fill, out, out_dtype, config)
    factor = call.sizes.head_dim**-0.5 if scale is None else check_number("scale", scale)
    fill = None if fill is None else check_number("fill", fill)
    if out is None:
        # Half the host time of torch.empty.
        out = torch.empty_strided(call.out_shape, call.out_strides, dtype=call.sizes.out_dtype, device=q.device)
    else:
        call.check_memory(q, k, out)
    if not call.elements:
        return out
    if q.is_cuda or interpreting():
        _score_by_kernel(q, k, out, factor, fill, call)
    else:
        _score_by_torch(q, k, out, factor, fill, layout, call.sizes)
    return out


def _score_by_kernel(
    q: torch.Tensor, k: torch.Tensor, out: torch.Tensor, scale: float, fill: float | None, call: Call
) -> None:
    slot = call.slot(q, k)
    binary = ready.binaries.get(slot)
    if binary is None:
        binary = ready.make_ready(slot, call.sizes.seq_len)
    if call.elements > MAX_PROGRAMS:
        check_programs(binary.programs(call.sizes.batch, call.geometry))
    if q.is_cuda and slot.device != torch.cuda.current_device():
        with torch.cuda.device(slot.device):
            binary.launch(q, k, out, scale, fill or 0.0, call.geometry)
    else:
        binary.launch(q, k, out, scale, fill or 0.0, call.geometry)


def _score_by_torch(
    q: torch.Tensor, k: torch.Tensor, out: torch.Tensor, scale: float, fill: float | None, layout: str, sizes: Sizes
) -> None:
    """The same by torch operations, in float64 so that no global matmul precision setting applies."""
    keys = k if layout == "HND" else k.transpose(1, 2)  # [batch, kv_heads, seq_len, head_dim]
    rows = q.unflatten(1, (sizes.kv_heads, -1))  # [batch, kv_heads, group, head_dim]
    for b in range(sizes.batch):  # one request at a time: the float64 copy of a whole cache can be large
        scores = rows[b].double() @ keys[b].double().transpose(1, 2)  # [kv_heads, group, seq_len]
        out[b, :, : sizes.seq_len] = scores.mul_(scale).flatten(0, 1).to(out.dtype)
    if fill is not None:
        out[:, :, sizes.seq_len :] = torch.tensor(fill, dtype=torch.float64).to(out.dtype)  # overflows to inf
