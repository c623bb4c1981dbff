"""Callers that torch.matmul cannot serve without a copy of the cache: ragged, paged, quantised, several queries.

Each is measured in turns with the plain kernels that read as many bytes as the call has to, and that write as many,
too: into one output again and again, which then stays in L2, and into outputs that together are as large as L2.

And what calls are made for: the positions with the highest scores.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tunedqk.floor import compare_with_floors
from tunedqk.score import qk_score
from tunedqk.timing import Replay, interleave

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

KV_HEADS, HEAD_DIM = 8, 128
PASSES, ROUNDS = 4, 9


class Caller(NamedTuple):
    """One row of the table.

    lengths: the least and the most, uniform. capacity: positions that the cache, or the table, has room for.
    """

    name: str
    batch: int
    lengths: tuple[int, int]
    capacity: int
    group: int = 1
    q_len: int = 1
    k_dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype = torch.bfloat16
    page_size: int = 0
    fill: float | None = -math.inf
    causal: bool = False
    by_token: bool = False


def _callers(group: int) -> list[Caller]:
    full = functools.partial(Caller, batch=32, lengths=(8192, 8192), capacity=8192, group=group)
    uniform = functools.partial(Caller, batch=64, lengths=(1, 8192), capacity=8192, group=group)
    wide = functools.partial(Caller, batch=32, lengths=(2048, 8192), capacity=131072, group=group, page_size=16)
    fp8 = functools.partial(full, k_dtype=torch.float8_e4m3fn, lengths=(16384, 16384), capacity=16384)
    return [
        full("plain"),
        full("to float32 scores", out_dtype=torch.float32),
        uniform("lengths 1 to 8192, fill=None", fill=None),
        uniform("lengths 1 to 8192"),
        full("pages of 16", page_size=16),
        full("pages of 64", page_size=64),
        full("pages of 1", page_size=1),
        wide("table for 131072, lengths 2048 to 8192, fill=None", fill=None),
        wide("table for 131072, lengths 2048 to 8192"),
        fp8("float8_e4m3fn"),
        fp8("float8_e4m3fn, k_scale by token", by_token=True),
        fp8("float8_e4m3fn, pages of 16", page_size=16),
        full("float8_e5m2", k_dtype=torch.float8_e5m2, lengths=(16384, 16384), capacity=16384),
        full("4 queries", q_len=4),
        full("4 queries, causal, pages of 16", q_len=4, causal=True, page_size=16),
    ]


CALLERS = [caller for group in (1, 4) for caller in _callers(group)]


class Selection(NamedTuple):
    """Sparse attention's choice of positions: the `top` of each head after a softmax over its scores in float32."""

    batch: int
    seq_len: int
    group: int
    top: int = 256


SELECTIONS = [Selection(1, 32768, 1), Selection(8, 32768, 1), Selection(8, 32768, 4), Selection(32, 8192, 4)]


def measure_caller(caller: Caller) -> dict[str, Any]:
    """One row: microseconds, and shares of the floors over the bytes of the positions that a request has."""
    device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator().manual_seed(0)
    low, high = caller.lengths
    lengths = torch.randint(low, high + 1, (caller.batch,), generator=generator)
    ragged = low < high or caller.page_size > 0
    lens = lengths.to(device, torch.int32) if ragged else None
    q = torch.randn(caller.batch, caller.q_len, caller.group * KV_HEADS, HEAD_DIM, device=device).bfloat16()
    q = q[:, 0] if caller.q_len == 1 else q
    k, table = _cache(caller, lengths, device)
    k_scale = torch.rand(k.shape[:3], device=device) if caller.by_token else None
    rows = (caller.group * KV_HEADS,) if caller.q_len == 1 else (caller.group * KV_HEADS, caller.q_len)
    valid = int(lengths.sum())
    read = valid * KV_HEADS * HEAD_DIM * k.element_size()
    written = (valid if caller.fill is None else caller.batch * caller.capacity) * math.prod(rows)
    written *= caller.out_dtype.itemsize
    outputs = [
        torch.empty(caller.batch, *rows, caller.capacity, dtype=caller.out_dtype, device=device)
        for _ in range(max(1, math.ceil(torch.cuda.get_device_properties(device).L2_cache_size / written)))
    ]
    calls = [
        functools.partial(
            qk_score, q, k, seq_lens=lens, block_table=table, k_scale=k_scale, causal=caller.causal, fill=caller.fill,
            out=out,
        )
        for out in outputs
    ]  # fmt: skip
    calls[0]()  # finds the config: a capture could not
    # Of the cache's own memory, as far as it reaches.
    source = k.view(-1).view(torch.uint8)[: read // 16 * 16].view(torch.float32)
    sinks = [torch.empty(written // 4, dtype=torch.float32, device=device) for _ in outputs]
    same = _times(calls[:1], source, sinks[:1])
    return {
        "caller": caller.name, "rows": caller.group * caller.q_len, "key_bytes": read, "out_bytes": written,
        "same_out": same, "rotated_out": _times(calls, source, sinks) if len(outputs) > 1 else same,
    }  # fmt: skip


def _times(calls: Sequence[Callable[[], object]], source: torch.Tensor, sinks: list[torch.Tensor]) -> dict[str, Any]:
    """Microseconds of a call, one for each output, and shares of the floors."""
    passes = max(1, PASSES // len(calls))
    (ours,), floors = compare_with_floors(
        [Replay([*calls] * passes)], [source] * len(calls), sinks, passes=passes, rounds=ROUNDS
    )
    return {
        "outputs": len(calls), "us": ours.median, "p20_us": ours.p20, "p80_us": ours.p80,
        "read_floor_us": floors.read, "read_write_floor_us": floors.read_write,
        "of_read": floors.read / ours.median, "of_read_write": floors.read_write / ours.median,
    }  # fmt: skip


def _cache(caller: Caller, lengths: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys, and for a paged cache a pool whose blocks lie in random order, with the table that names them."""
    if not caller.page_size:
        return _random((caller.batch, caller.capacity, KV_HEADS, HEAD_DIM), caller.k_dtype, device), None
    needed = -(-lengths // caller.page_size)
    count = int(needed.sum())
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    table = torch.zeros(caller.batch, -(-caller.capacity // caller.page_size), dtype=torch.int32)
    for row, own in zip(table, order.split(needed.tolist()), strict=True):
        row[: len(own)] = own
    return _random((count, caller.page_size, KV_HEADS, HEAD_DIM), caller.k_dtype, device), table.to(device)


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    k = torch.empty(shape, dtype=dtype, device=device)
    for part in k.view(-1).split(1 << 26):
        part.copy_(torch.randn(part.shape, dtype=torch.bfloat16, device=device))
    return k


def measure_selection(selection: Selection) -> dict[str, Any]:
    """Microseconds of score -> softmax -> top-k, and of the score alone, in turns."""
    batch, seq_len, group, top = selection
    q = torch.randn(batch, group * KV_HEADS, HEAD_DIM, device="cuda").bfloat16()
    k = _random((batch, seq_len, KV_HEADS, HEAD_DIM), torch.bfloat16, q.device)
    scores = torch.empty(batch, group * KV_HEADS, seq_len, dtype=torch.float32, device=q.device)

    def score() -> torch.Tensor:
        return qk_score(q, k, scale=None, out=scores)

    def select() -> object:
        return score().softmax(dim=-1).topk(top)

    score()  # finds the config: a capture could not
    alone, whole = interleave([Replay([score] * PASSES), Replay([select] * PASSES)], ROUNDS)
    return {
        **selection._asdict(), "rows": group, "score_us": alone.median, "score_p20_us": alone.p20,
        "score_p80_us": alone.p80, "us": whole.median, "p20_us": whole.p20, "p80_us": whole.p80,
        "share": alone.median / whole.median,
    }  # fmt: skip
