"""A checked call, carried out: by the kernel of its slot on a GPU, by torch operations on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tunedqk import ready
from tunedqk.arguments import Sizes, check_programs
from tunedqk.device import interpreting
from tunedqk.launch import MAX_PROGRAMS

if TYPE_CHECKING:
    from tunedqk.call import Call


def compute(
    q: torch.Tensor,
    k: torch.Tensor,
    scale: float,
    layout: str,
    fill: float | None,
    out: torch.Tensor | None,
    call: Call,
) -> torch.Tensor:
    """The scores in `out`, or in a new tensor. No gradient is recorded."""
    if out is None:
        # Half the host time of torch.empty.
        out = torch.empty_strided(call.out_shape, call.out_strides, dtype=call.sizes.out_dtype, device=q.device)
    else:
        call.check_memory(q, k, out)
    if not call.elements:
        return out
    if q.is_cuda or interpreting():
        _by_kernel(q, k, out, scale, fill, call)
    else:
        _by_torch(q, k, out, scale, fill, layout, call.sizes)
    return out


def _by_kernel(
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


def _by_torch(
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
