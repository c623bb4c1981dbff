"""From plain numbers to the tensors of a call as a variant takes them: aligned or not, ragged, paged, scaled.

Whatever must not be read is NaN: what lies around keys and queries, positions that nobody sees, pages that no table
names. Memory is handled as integers, which copy NaN as it is and exist for every size of an element.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from tunedqk.tensors import Tensors
from tunedqk.variant import ALIGNMENT, Variant

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SPARE_BLOCKS = 2  # of a pool, which nobody uses
# A request's (length, start) by seq_len, in turn: also outside of the cache, by more than a chunk, and for the last two
# so that nothing is seen.
LIMITS: tuple[Callable[[int], tuple[int, int]], ...] = (
    lambda seq_len: (seq_len - 2, 1),
    lambda seq_len: (seq_len + 5, -2 * seq_len),
    lambda seq_len: (seq_len - 3, 2 * seq_len // 3),
    lambda seq_len: (seq_len // 2, 2),
    lambda seq_len: (-2, seq_len - 1),
    lambda seq_len: (seq_len, 3 * seq_len),
)


class Numbers(NamedTuple):
    """q [batch, q_len, q_heads, head_dim], k [batch, seq_len, kv_heads, head_dim], k_scale [batch, seq_len, kv_heads].

    A variant that is not paged, ragged or scaled takes q and k as they are.
    """

    q: torch.Tensor
    k: torch.Tensor
    k_scale: torch.Tensor

    def part(
        self, seq_len: int, kv_heads: int | None = None, queries: int | None = None, batch: int | None = None
    ) -> Numbers:
        """The first positions, KV heads, queries and requests."""
        heads = kv_heads or self.k.shape[2]
        group = self.q.shape[2] // self.k.shape[2]
        q, k, k_scale = (x[:batch] for x in self)
        return Numbers(q[:, :queries, : heads * group], k[:, :seq_len, :heads], k_scale[:, :seq_len, :heads])


def bits(x: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, in which NaNs compare."""
    return x.view(_INTEGERS[x.element_size()])


def memory(x: torch.Tensor) -> torch.Tensor:
    """All of the storage behind a tensor, as integers."""
    return bits(torch.as_strided(x, (x.untyped_storage().nbytes() // x.element_size(),), (1,), 0))


def _nan(dtype: torch.dtype) -> int:
    nan = torch.tensor(math.nan).to(dtype)
    return int(bits(nan).item())


def _full_of_nan(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(shape, _nan(dtype), dtype=_INTEGERS[dtype.itemsize], device=device).view(dtype)


def surrounded(shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, aligned: bool) -> torch.Tensor:
    """A tensor [..., heads, head_dim] with NaN in it, before, behind and between its rows.

    Its rows are multiples of 16 bytes apart, as it is from its storage's beginning; unaligned, all are one element off.
    """
    *outer, heads, head_dim = shape
    lanes, offset = ALIGNMENT // dtype.itemsize, 0
    row = -(-(head_dim + 1) // lanes) * lanes
    if not aligned:
        row, offset = row + 1, 1
    whole = _full_of_nan((math.prod(outer) * (heads + 1) * row + 2 * ALIGNMENT,), dtype, device)
    strides = [(heads + 1) * row * math.prod(outer[i + 1 :]) for i in range(len(outer))]
    return whole.as_strided(tuple(shape), (*strides, row, 1), offset)


def surrounded_copy(x: torch.Tensor, *, aligned: bool) -> torch.Tensor:
    """The same in memory of its own, between NaN."""
    copy = surrounded(x.shape, x.dtype, x.device, aligned=aligned)
    bits(copy).copy_(bits(x))
    return copy


def arrange(variant: Variant, numbers: Numbers, *, first: int = 0, full: bool = False) -> Tensors:
    """The tensors of a call, in memory of their own.

    first: which of LIMITS is the first request's; the next one has the next. full: instead every request, and query,
    sees all positions, and a pool's blocks are used from the last one on.
    """
    q, k, k_scale = numbers
    q = surrounded_copy(q if variant.several else q[:, 0], aligned=variant.aligned)
    if variant == Variant(*variant[:5]):  # nothing is hidden, paged or scaled
        return Tensors(q, surrounded_copy(k, aligned=variant.aligned))
    lens, starts, seen = _limits(variant, numbers, first, full=full)
    table, shape, places = None, tuple(k.shape[:2]), None
    if variant.page_size:
        table, places = _pages(variant, seen, full=full)
        shape = (table.shape[0] * table.shape[1] + SPARE_BLOCKS, variant.page_size)
    stored = surrounded((*shape, *k.shape[2:]), k.dtype, k.device, aligned=variant.aligned)
    by_token = _full_of_nan((*shape, k.shape[2]), torch.float32, k.device)
    for own, of_requests in ((stored, k), (by_token, k_scale)):
        where = seen if places is None else (places[0][seen], places[1][seen])
        bits(own)[where] = bits(of_requests)[seen]
    return Tensors(
        q, stored, _strided(lens, variant.seq_lens), _strided(starts, variant.seq_starts), table,
        {"": None, "head": k_scale[0, 0].clone(), "token": by_token}[variant.k_scale],
    )  # fmt: skip


def _limits(
    variant: Variant, numbers: Numbers, first: int, *, full: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lengths [batch] or [batch, q_len], starts [batch], and the positions that some query sees [batch, seq_len]."""
    (batch, q_len), seq_len, device = numbers.q.shape[:2], numbers.k.shape[1], numbers.k.device
    limits = [(seq_len, 0) if full else LIMITS[(first + b) % len(LIMITS)](seq_len) for b in range(batch)]
    lens, starts = torch.tensor(limits, device=device).T
    if variant.page_size:  # the last page has room for more positions, which a longer output would show
        lens = lens.clamp(max=seq_len)
    positions = torch.arange(seq_len, device=device)
    ends = lens if variant.seq_lens else torch.full_like(lens, seq_len)
    seen = positions < ends[:, None]
    if variant.seq_starts:
        seen &= positions >= starts[:, None]
    if variant.several and not variant.causal and not full:
        lens = lens[:, None] - torch.arange(q_len, device=device)
    return lens, starts, seen


def _strided(x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor | None:
    """The same with other numbers between its elements; None where the variant takes none."""
    if dtype is None:
        return None
    wide = torch.full((*x.shape, 2), 1, dtype=dtype, device=x.device)
    wide[..., 0] = x
    return wide[..., 0]


def _pages(
    variant: Variant, seen: torch.Tensor, *, full: bool
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """A table [batch, blocks] of blocks all over the pool, and each position's block and place in it.

    No block lies right behind its predecessor. The table is part of a wider one. Entries of pages that nobody sees name
    a block that nobody uses.
    """
    batch, seq_len = seen.shape
    page_size, device = variant.page_size, seen.device
    blocks = -(-seq_len // page_size)
    count = batch * blocks + SPARE_BLOCKS
    # As far apart as the golden ratio puts them; the step is coprime to the count, and not 1.
    step = next(n for n in range(max(2, round(0.618 * count)), count) if math.gcd(n, count) == 1)
    steps = torch.arange(count, device=device)
    order = count - 1 - steps if full else (steps * step + 1) % count
    of_request = order[: batch * blocks].view(batch, blocks)
    whole = torch.zeros(batch, blocks * page_size, dtype=torch.bool, device=device)
    whole[:, :seq_len] = seen
    used = whole.view(batch, blocks, page_size).any(dim=2)
    table = order[-1:].to(variant.block_table).expand(batch, blocks + 3).contiguous()
    table[:, :blocks] = torch.where(used, of_request, order[-1])
    positions = torch.arange(seq_len, device=device)
    return table[:, :blocks], (of_request[:, positions // page_size], (positions % page_size).expand(batch, seq_len))
