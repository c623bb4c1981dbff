"""A checked call, carried out: by the kernel of its slot on a GPU, by torch operations on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tunedqk import dense, ready
from tunedqk.arguments import Sizes, check_programs
from tunedqk.call import Bound
from tunedqk.device import interpreting

if TYPE_CHECKING:
    from tunedqk.call import Call
    from tunedqk.tensors import Tensors


def compute(
    tensors: Tensors,
    scale: float,
    layout: str,
    fill: float | None,
    out: torch.Tensor | None,
    call: Call,
) -> torch.Tensor:
    """The scores in `out`, or in a new tensor. No gradient is recorded."""
    q = tensors[0]
    if out is None:
        # Half the host time of torch.empty.
        out = torch.empty_strided(call.out_shape, call.out_strides, dtype=call.sizes.out_dtype, device=q.device)
    else:
        call.check_memory(tensors, out)
    if not call.elements:
        return out
    if q.is_cuda or interpreting():
        _by_kernel(tensors, out, scale, fill, call)
    else:
        _by_torch(tensors, out, scale, fill, layout, call)
    return out


def _by_kernel(tensors: Tensors, out: torch.Tensor, scale: float, fill: float | None, call: Call) -> None:
    aligned = call.aligned(tensors)
    device, binary, grid = call.bound[aligned] or _bind(call, aligned=aligned)
    if device >= 0 and device != torch._C._cuda_getDevice():  # noqa: SLF001  the public way checks for CUDA
        with torch.cuda.device(device):
            binary.launch(tensors, out, scale, fill or 0.0, grid)
    else:
        binary.launch(tensors, out, scale, fill or 0.0, grid)


def _bind(call: Call, *, aligned: bool) -> Bound:
    """Find the call's binary, and remember it, so that the next call looks nothing up."""
    slot = call.slots[aligned]
    binary = ready.binaries.get(slot) or ready.make_ready(slot)
    grid = binary.grid(call.geometry)
    check_programs(grid.programs)
    bound = Bound(slot.device, binary, grid)
    if slot in ready.binaries:  # else it stands in during a capture
        call.bound[aligned] = bound
    return bound


def _by_torch(tensors: Tensors, out: torch.Tensor, scale: float, fill: float | None, layout: str, call: Call) -> None:
    """The same by torch operations, in float64 so that no global matmul precision setting applies."""
    sizes = call.sizes
    seq_len = min(sizes.seq_len, out.shape[-1])
    rest = None if fill is None else torch.tensor(fill, dtype=torch.float64).to(out.dtype)  # overflows to inf
    for b in range(sizes.batch):  # one request at a time: the float64 copy of a whole cache can be large
        request, one = _request(tensors, b, sizes), sizes._replace(batch=1)
        seen = dense.visible(request, one, seq_len, causal=call.causal)
        keys = dense.keys(request, one, layout, seen, seq_len)[0].double()  # [seq_len, kv_heads, head_dim]
        k_scale = dense.scales(request, one, seen, seq_len)
        if k_scale is not None:
            keys = keys * k_scale.double().expand(1, seq_len, sizes.kv_heads)[0, ..., None]
        q = request.q if request.q.dim() == 4 else request.q[:, :, None]
        if layout == "NHD" and request.q.dim() == 4:
            q = q.transpose(1, 2)
        rows = q[0].unflatten(0, (sizes.kv_heads, -1)).flatten(1, 2)  # [kv_heads, group * q_len, head_dim]
        scores = rows.double() @ keys.permute(1, 2, 0)
        scores = scores.mul_(scale).unflatten(1, (-1, sizes.q_len)).flatten(0, 1).to(out.dtype)
        written = out[b] if out.dim() == 4 else out[b, :, None]  # [q_heads, q_len, length]
        if seen is not None:
            scores = torch.where(seen, scores, written[..., :seq_len] if rest is None else rest)
        written[..., :seq_len] = scores
    if rest is not None:
        out[..., seq_len:] = rest


def _request(tensors: Tensors, b: int, sizes: Sizes) -> Tensors:
    """One request of a batch, as a batch of one."""
    one = slice(b, b + 1)
    k, k_scale = tensors.k, tensors.k_scale
    if not sizes.page_size:
        k = k[one]
        k_scale = k_scale[one] if k_scale is not None and k_scale.dim() == 3 else k_scale
    lens, starts, table = (None if x is None else x[one] for x in tensors[2:5])
    return type(tensors)(tensors.q[one], k, lens, starts, table, k_scale)
