"""Parts of the fast kernel: where things lie, what a query sees, how keys are loaded and scores written.

Shapes change by `x[:, None]` alone: a reshape that is free to reorder elements is the fault that this package grew
from.
"""

from typing import NamedTuple

import triton
import triton.language as tl

# Positions that are filled at a time where there is nothing to score: many, as each costs next to nothing.
FILL_SIZE = tl.constexpr(1024)
# Values of K_SCALE: 0 for none.
SCALE_BY_HEAD = tl.constexpr(1)
SCALE_BY_TOKEN = tl.constexpr(2)


class Form(NamedTuple):
    """What a program is compiled for. Passed on, never assigned: Triton makes tensors of what is assigned."""

    HEAD_DIM: tl.constexpr
    BLOCK_D: tl.constexpr
    TAIL_D: tl.constexpr
    GROUP: tl.constexpr
    ROWS: tl.constexpr
    DOT_DTYPE: tl.constexpr
    ROUND_BY_HAND: tl.constexpr
    SEVERAL: tl.constexpr
    RAGGED: tl.constexpr
    CAUSAL: tl.constexpr
    FILL: tl.constexpr
    PAGE_SIZE: tl.constexpr
    K_SCALE: tl.constexpr
    PAIRS: tl.constexpr
    CHUNK_SIZE: tl.constexpr
    TILE_SIZE: tl.constexpr
    STAGES: tl.constexpr
    LOAD_HINT: tl.constexpr
    STORE_HINT: tl.constexpr


class Query(NamedTuple):
    """The query rows of a KV head: all heads of the first query, then those of the next.

    first: of the program's rows; count: of all.
    """

    base: tl.tensor
    stride_h: tl.tensor
    stride_i: tl.tensor
    first: tl.tensor
    count: tl.tensor


class Cache(NamedTuple):
    """What is stored for each position: one request's, or a pool's pages and the request's row of the block table."""

    base: tl.tensor
    stride_b: tl.tensor
    stride_l: tl.tensor
    table: tl.tensor | None


class Lengths(NamedTuple):
    """Where what a query sees ends. base: of the request's seq_lens, or None."""

    base: tl.tensor
    stride_i: tl.tensor
    seq_len: tl.tensor
    q_len: tl.tensor


class Output(NamedTuple):
    """The scores of a KV head, and what hidden positions get."""

    base: tl.tensor
    stride_h: tl.tensor
    stride_i: tl.tensor
    stride_l: tl.tensor
    fill: tl.tensor


class Chunk(NamedTuple):
    """Positions of a program. From first to left some query sees them; up to out_left they are written.

    Those three, and all positions that are compared with them, count from the start, and are int32.
    """

    start: tl.tensor
    first: tl.tensor
    left: tl.tensor
    out_left: tl.tensor


@triton.jit
def split_program_id(pid, kv_heads, row_blocks, chunks):
    """Program id -> (batch, chunk, block of rows, KV head), each int64 and ready to meet a stride."""
    # Divided as int32, which is fast; the host checks that the grid fits.
    head = pid % kv_heads
    pid = pid // kv_heads
    row_block = pid % row_blocks
    pid = pid // row_blocks
    return (pid // chunks).to(tl.int64), (pid % chunks).to(tl.int64), row_block.to(tl.int64), head.to(tl.int64)


@triton.jit
def visible_stride(stride, element_ty: tl.constexpr, ALIGNED: tl.constexpr):
    """The stride itself; with ALIGNED in a form that shows the compiler that it is a multiple of 16 bytes.

    Without that, each 16-byte load becomes eight scalar ones. Specialising on the value would show it too, but would
    compile again as a cache grows.
    """
    if ALIGNED:
        lanes: tl.constexpr = 128 // element_ty.primitive_bitwidth
        stride = stride // lanes * lanes
    return stride


@triton.jit
def row_offsets(rows, stride_h, stride_i, form):
    """Offsets of query rows from the first one of their KV head."""
    return rows % form.GROUP * stride_h + rows // form.GROUP * stride_i if form.SEVERAL else rows * stride_h


@triton.jit
def ends_of(lengths, queries, form):
    """Where what these queries see ends: at their seq_lens; with CAUSAL, before what the later ones have added."""
    ends = lengths.seq_len
    if form.SEVERAL:
        ends += queries * 0
    if lengths.base is not None:
        given = tl.load(lengths.base + queries * lengths.stride_i).to(tl.int64)
        ends = tl.minimum(tl.maximum(given, 0), ends)
    if form.CAUSAL:
        ends -= lengths.q_len - 1 - queries
    return ends


@triton.jit
def within(position, start, form):
    """A position, counted from the chunk's start; the chunk's nearest end where it lies outside. int32."""
    return tl.minimum(tl.maximum(position - start, 0), form.CHUNK_SIZE).to(tl.int32)


@triton.jit
def readable(pos, chunk, form):
    """Positions that some query of the program sees."""
    inside = pos < chunk.left
    if form.RAGGED:
        inside = inside & (pos >= chunk.first)
    return inside


@triton.jit
def position_offsets(cache, tile, chunk, inside, form):
    """Offsets of a tile's positions from the base: the chunk's start, the request's where ragged, or the pool's."""
    in_tile = tl.arange(0, form.TILE_SIZE)
    if form.PAGE_SIZE:
        # Entries of pages that nobody sees may be anything.
        position = chunk.start.to(tl.int32) + tile
        if form.PAGE_SIZE % form.TILE_SIZE == 0:  # all in one page
            seen = (tile < chunk.left) & (tile + form.TILE_SIZE > chunk.first)
            block = tl.load(cache.table + position // form.PAGE_SIZE, mask=seen, other=0).to(tl.int64)
            in_page = position % form.PAGE_SIZE + in_tile
        else:
            position += in_tile
            block = tl.load(cache.table + position // form.PAGE_SIZE, mask=inside, other=0).to(tl.int64)
            in_page = position % form.PAGE_SIZE
        offsets = block * cache.stride_b + in_page.to(tl.int64) * cache.stride_l
    else:
        position = (tile + in_tile).to(tl.int64)
        # Not ragged, it is in the base. Ragged, that would be hoisted out of the loop over chunks, into registers.
        if form.RAGGED:
            position += chunk.start
        offsets = position * cache.stride_l
    return offsets


@triton.jit
def load_keys(base, offsets, inside, offs_d, form):
    """A tile of keys. What nobody sees, or lies past the head, is not read."""
    mask = inside[:, None] & (offs_d < form.HEAD_DIM)[None, :]
    ptrs = base + offsets[:, None] + offs_d[None, :]
    return tl.load(ptrs, mask=mask, other=0.0, eviction_policy=form.LOAD_HINT)  # [TILE_SIZE, len(offs_d)]


@triton.jit
def load_key_pairs(base, offsets, inside, form):
    """As load_keys, for the whole of a head of float8 keys: two of them as an int16."""
    offs_pair = tl.arange(0, form.BLOCK_D // 2)
    mask = inside[:, None] & (offs_pair < form.HEAD_DIM // 2)[None, :]
    rows = (base + offsets[:, None]).to(tl.pointer_type(tl.int16), bitcast=True)
    return tl.load(rows + offs_pair[None, :], mask=mask, other=0, eviction_policy=form.LOAD_HINT)


@triton.jit
def load_query_columns(query, offs_d, form):
    """The program's query rows as columns, for tl.dot."""
    rows = query.first + tl.arange(0, form.ROWS)
    mask = (offs_d < form.HEAD_DIM)[:, None] & (rows < query.count)[None, :]
    offsets = row_offsets(rows, query.stride_h, query.stride_i, form)
    columns = tl.load(query.base + offs_d[:, None] + offsets[None, :], mask=mask, other=0.0)
    return columns.to(form.DOT_DTYPE)  # [len(offs_d), ROWS]


@triton.jit
def dot_with_row(keys, q_base, offs_d, form):
    """The products of a tile of keys and one query row, summed."""
    q = tl.load(q_base + offs_d, mask=offs_d < form.HEAD_DIM, other=0.0)
    # Converted before the product: a 16-bit tl.sum rounds each product, and adds them up in 16 bits.
    return tl.sum(keys.to(tl.float32) * q.to(tl.float32)[None, :], axis=1)  # [TILE_SIZE]


@triton.jit
def load_token_scales(k_scales, tile, chunk, inside, form):
    """What the scores of a tile's positions are multiplied by, since their keys are quantised."""
    offsets = position_offsets(k_scales, tile, chunk, inside, form)
    return tl.load(k_scales.base + offsets, mask=inside, other=0.0)  # [TILE_SIZE]


@triton.jit
def fill_range(query, out, begin, end, index, walkers, form):
    """Write the fill to positions from begin to end of the program's rows: every walkers-th block of them."""
    nothing = tl.zeros([FILL_SIZE], dtype=tl.float32)
    values = to_output(nothing, out.fill, nothing > 0, out.base.dtype.element_ty, form.ROUND_BY_HAND)
    rows = tl.minimum(query.count - query.first, form.ROWS).to(tl.int32)
    begin += index.to(tl.int64) * FILL_SIZE
    while begin < end:
        positions = begin + tl.arange(0, FILL_SIZE)
        for row in range(rows):
            row_base = out.base + row_offsets(query.first + row, out.stride_h, out.stride_i, form)
            tl.store(row_base + positions * out.stride_l, values, mask=positions < end)
        begin += walkers.to(tl.int64) * FILL_SIZE


@triton.jit
def to_output(scores, fill, valid, element_ty: tl.constexpr, ROUND_BY_HAND: tl.constexpr):
    """Scores where `valid`, else fill, rounded once to the output's dtype."""
    scores = tl.where(valid, scores, fill)
    if ROUND_BY_HAND:
        # The interpreter truncates fp32 to bf16. Round to nearest even on the bits, so that nothing is left to cut.
        bits = scores.to(tl.int32, bitcast=True)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
        scores = tl.where(scores == scores, nearest, scores)  # noqa: PLR0124  a NaN stays one
    return scores.to(element_ty)
