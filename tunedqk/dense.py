"""A call's cache as plain tensors: pages gathered, scales applied, and what each query sees. For torch operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tunedqk.arguments import Sizes
    from tunedqk.tensors import Tensors


def visible(tensors: Tensors, sizes: Sizes, seq_len: int, *, causal: bool) -> torch.Tensor | None:
    """Which of the first seq_len positions a query sees: bool [batch, q_len, seq_len]; None where it sees all."""
    lens, starts, q_len = tensors.seq_lens, tensors.seq_starts, sizes.q_len
    if lens is None and starts is None and not (causal and q_len > 1):
        return None
    positions = torch.arange(seq_len, device=tensors.q.device)
    ends = torch.full((sizes.batch, q_len), sizes.seq_len, device=tensors.q.device)
    if lens is not None:
        given = lens.long().clamp(min=0)
        ends = torch.minimum(ends, given if given.dim() == 2 else given[:, None])
    if causal:
        ends = ends - torch.arange(q_len - 1, -1, -1, device=ends.device)
    seen = positions < ends[..., None]
    return seen if starts is None else seen & (positions >= starts[:, None, None])


def to_pool(x: torch.Tensor, tensors: Tensors, sizes: Sizes, seen: torch.Tensor | None) -> torch.Tensor:
    """The sum of [batch, seq_len, ...] by the place in the pool that each position has; without a pool, x itself."""
    if tensors.block_table is None or seen is None:
        return x
    blocks = _pages(tensors.block_table, sizes, seen)
    room = x.new_zeros(sizes.batch, blocks.shape[1] * sizes.page_size, *x.shape[2:])
    room[:, : x.shape[1]] = x
    pool = x.new_zeros(tensors.k.shape[0], sizes.page_size, *x.shape[2:])
    if not pool.shape[0]:  # nobody sees anything of an empty pool
        return pool
    return pool.index_add(0, blocks.flatten(), room.unflatten(1, (-1, sizes.page_size)).flatten(0, 1))


def _pages(table: torch.Tensor, sizes: Sizes, seen: torch.Tensor) -> torch.Tensor:
    """Block numbers [batch, blocks] of the positions in `seen`; 0 for a page that nobody sees: its entry may be any."""
    blocks = -(-seen.shape[-1] // sizes.page_size)
    needed = torch.zeros(sizes.batch, blocks * sizes.page_size, dtype=torch.bool, device=seen.device)
    needed[:, : seen.shape[-1]] = seen.any(dim=1)
    return torch.where(needed.unflatten(1, (blocks, -1)).any(dim=2), table[:, :blocks].long(), 0)


def keys(tensors: Tensors, sizes: Sizes, layout: str, seen: torch.Tensor | None, seq_len: int) -> torch.Tensor:
    """The first seq_len keys of each request, as stored: NHD [batch, seq_len, kv_heads, head_dim]."""
    stored = tensors.k if layout == "NHD" else tensors.k.transpose(1, 2)
    return _of_requests(stored, tensors, sizes, seen, seq_len)


def scales(tensors: Tensors, sizes: Sizes, seen: torch.Tensor | None, seq_len: int) -> torch.Tensor | None:
    """What quantised keys are multiplied by: broadcasts to [batch, seq_len, kv_heads]; None for nothing."""
    scale = tensors.k_scale
    if scale is None or scale.dim() < 3:
        return scale
    return _of_requests(scale, tensors, sizes, seen, seq_len)


def _of_requests(
    stored: torch.Tensor, tensors: Tensors, sizes: Sizes, seen: torch.Tensor | None, seq_len: int
) -> torch.Tensor:
    """[batch, seq_len, ...] of what is stored per position, in a pool or not."""
    if tensors.block_table is None or seen is None:
        return stored[:, :seq_len]
    if not stored.shape[0]:  # nobody sees anything of an empty pool
        return stored.new_zeros(sizes.batch, seq_len, *stored.shape[2:])
    return stored[_pages(tensors.block_table, sizes, seen)].flatten(1, 2)[:, :seq_len]
