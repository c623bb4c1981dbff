"""What users have today, and what a careful person writes: other ways to the same scores, for `benchmark.py`.

Each is a function of (q, k): q [batch, q_heads, head_dim], k [batch, seq_len, kv_heads, head_dim], contiguous. All give
scores of q's dtype, in whatever shape is natural for them, for batch * q_heads * seq_len values.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from fixed import fixed_triton

if TYPE_CHECKING:
    from collections.abc import Callable


def bmm_per_request(q: torch.Tensor, k: torch.Tensor) -> list[torch.Tensor]:
    """Scores of a [B, L, H, D] cache without copying it: one torch.bmm per request."""
    rows = q.unflatten(1, (k.shape[2], -1))
    return [torch.bmm(rows[b], k[b].permute(1, 2, 0)) for b in range(k.shape[0])]


def matmul_hnd(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Scores of a [B, H, L, D] cache: k's memory, read as that layout."""
    batch, seq_len, kv_heads, head_dim = k.shape
    return torch.matmul(q.unflatten(1, (kv_heads, -1)), k.view(batch, kv_heads, seq_len, head_dim).transpose(-1, -2))


def einsum(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """What one writes first. It copies the cache where batch > 1."""
    return torch.einsum("bhgd,blhd->bhgl", q.unflatten(1, (k.shape[2], -1)), k)


def multiply_and_sum(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The formula in torch, for torch.compile to fuse."""
    rows = q.unflatten(1, (k.shape[2], -1))
    scores: torch.Tensor = (rows[:, None].float() * k[:, :, :, None].float()).sum(-1)
    return scores.to(q.dtype)  # [B, L, H, G]


_compiled = functools.partial(torch.compile, dynamic=False, fullgraph=True)

PEERS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "bmm per request": bmm_per_request,
    "matmul": matmul_hnd,
    "einsum": einsum,
    # They are compiled at the first call of a shape.
    "compiled einsum": _compiled(einsum),
    "compiled sum": _compiled(multiply_and_sum),
    "fixed Triton": fixed_triton,
}
