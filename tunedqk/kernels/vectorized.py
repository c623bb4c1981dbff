"""The fast kernel: decode-time attention scores of a KV cache.

    out[b, h, i, l] = scale * k_scale * sum_d q[b, h, i, d] * k[b, l, h // GROUP, d]    where query i of b sees l
    out[b, h, i, l] = fill                                                              elsewhere, up to out_len

One program scores CHUNK_SIZE positions for ROWS query rows that share a KV head, so keys are read once: the rows of a
KV head are its GROUP query heads, for each of the q_len queries. The grid has one dimension, (batch, chunk, block of
rows, KV head) with the KV head fastest: the second and third dimension of a grid end at 65535, and in a [batch,
seq_len, heads, head_dim] cache neighbours then read neighbouring bytes. Where lengths differ, which the host does not
know, a program goes through several chunks, and stops where its request ends.

Products are exact in fp32, sums are fp32, and the only rounding to the output's dtype is the store.
"""

import triton
import triton.language as tl

from tunedqk.kernels.float8 import to_operand, unpack_e4m3
from tunedqk.kernels.parts import (
    SCALE_BY_HEAD,
    SCALE_BY_TOKEN,
    Cache,
    Chunk,
    Form,
    Lengths,
    Output,
    Query,
    dot_with_row,
    ends_of,
    fill_range,
    load_key_pairs,
    load_keys,
    load_query_columns,
    load_token_scales,
    position_offsets,
    readable,
    row_offsets,
    split_program_id,
    to_output,
    visible_stride,
    within,
)  # fmt: skip


# Tiles are functions of their own: Triton visits the body of a loop twice, but a function that it calls once.
@triton.jit
def _score_tile_by_sum(query, keys, k_scales, scale, head_scale, lengths, out, tile, chunk, form):
    """One multiply-and-sum over head_dim per query row, on a tile of keys that stays in registers."""
    pos = tile + tl.arange(0, form.TILE_SIZE)
    inside = readable(pos, chunk, form)
    offsets = position_offsets(keys, tile, chunk, inside, form)
    offs_d = tl.arange(0, form.BLOCK_D)
    tile_keys = load_keys(keys.base, offsets, inside, offs_d, form)
    if form.TAIL_D:
        tail_d = form.BLOCK_D + tl.arange(0, form.TAIL_D)
        tail_keys = load_keys(keys.base, offsets, inside, tail_d, form)
    if form.K_SCALE == SCALE_BY_TOKEN:
        token_scales = load_token_scales(k_scales, tile, chunk, inside, form)
    for row in tl.static_range(form.ROWS):
        read_row = tl.minimum(query.first + row, query.count - 1)
        q_row = query.base + row_offsets(read_row, query.stride_h, query.stride_i, form)
        scores = dot_with_row(tile_keys, q_row, offs_d, form)
        if form.TAIL_D:
            scores += dot_with_row(tail_keys, q_row, tail_d, form)
        scores *= scale
        if head_scale is not None:
            scores *= head_scale
        if form.K_SCALE == SCALE_BY_TOKEN:
            scores *= token_scales
        valid = inside
        if form.SEVERAL and form.RAGGED:
            valid = inside & (pos < within(ends_of(lengths, read_row // form.GROUP, form), chunk.start, form))
        scores = to_output(scores, out.fill, valid, out.base.dtype.element_ty, form.ROUND_BY_HAND)
        row_base = out.base + row_offsets(query.first + row, out.stride_h, out.stride_i, form)
        mask = (pos < chunk.out_left) & (query.first + row < query.count)
        if not form.FILL:
            mask = mask & valid
        tl.store(row_base + pos.to(tl.int64) * out.stride_l, scores, mask=mask, eviction_policy=form.STORE_HINT)


@triton.jit
def _score_tile_by_dot(
    query, columns, tail_columns, keys, k_scales, scale, head_scale, ends, out, tile, chunk, form
):  # fmt: skip
    """All query rows at once on the matrix units: keys are the M operand, the rows are columns."""
    pos = tile + tl.arange(0, form.TILE_SIZE)
    inside = readable(pos, chunk, form)
    offsets = position_offsets(keys, tile, chunk, inside, form)
    if form.PAIRS:
        even, odd = unpack_e4m3(load_key_pairs(keys.base, offsets, inside, form), form.DOT_DTYPE)
        scores = tl.dot(odd, tail_columns, tl.dot(even, columns))  # [TILE_SIZE, ROWS]
    else:
        tile_keys = load_keys(keys.base, offsets, inside, tl.arange(0, form.BLOCK_D), form)
        # "ieee": an fp32 product never goes through TF32.
        scores = tl.dot(to_operand(tile_keys, columns.dtype), columns, input_precision="ieee")
    if form.TAIL_D:
        tail_keys = load_keys(keys.base, offsets, inside, form.BLOCK_D + tl.arange(0, form.TAIL_D), form)
        scores = tl.dot(to_operand(tail_keys, columns.dtype), tail_columns, scores, input_precision="ieee")
    scores *= scale
    if head_scale is not None:
        scores *= head_scale
    if form.K_SCALE == SCALE_BY_TOKEN:
        scores *= load_token_scales(k_scales, tile, chunk, inside, form)[:, None]
    valid = inside[:, None]
    if form.SEVERAL and form.RAGGED:
        valid = valid & (pos[:, None] < ends[None, :])
    scores = to_output(scores, out.fill, valid, out.base.dtype.element_ty, form.ROUND_BY_HAND)
    rows = query.first + tl.arange(0, form.ROWS)
    ptrs = out.base + row_offsets(rows, out.stride_h, out.stride_i, form)[None, :]
    mask = (pos < chunk.out_left)[:, None] & (rows < query.count)[None, :]
    if not form.FILL:
        mask = mask & valid
    tl.store(ptrs + pos.to(tl.int64)[:, None] * out.stride_l, scores, mask=mask, eviction_policy=form.STORE_HINT)


@triton.jit
def _score_chunk(
    query, columns, tail_columns, keys, k_scales, scale, head_scale, lengths, out, index, begin, end, ends, out_len,
    form,
):  # fmt: skip
    """A chunk, tile by tile."""
    start = index * form.CHUNK_SIZE
    out_left = tl.minimum(out_len - start, form.CHUNK_SIZE).to(tl.int32)
    chunk = Chunk(start, within(begin, start, form), within(end, start, form), out_left)
    out = Output(out.base + start * out.stride_l, out.stride_h, out.stride_i, out.stride_l, out.fill)
    if not form.PAGE_SIZE and not form.RAGGED:
        keys = Cache(keys.base + start * keys.stride_l, None, keys.stride_l, None)
        if form.K_SCALE == SCALE_BY_TOKEN:
            k_scales = Cache(k_scales.base + start * k_scales.stride_l, None, k_scales.stride_l, None)
    if form.DOT_DTYPE is None:
        for tile in tl.range(0, form.CHUNK_SIZE, form.TILE_SIZE, num_stages=form.STAGES):
            _score_tile_by_sum(query, keys, k_scales, scale, head_scale, lengths, out, tile, chunk, form)
    else:
        if form.SEVERAL and form.RAGGED:
            ends = within(ends, start, form)
        for tile in tl.range(0, form.CHUNK_SIZE, form.TILE_SIZE, num_stages=form.STAGES):
            _score_tile_by_dot(
                query, columns, tail_columns, keys, k_scales, scale, head_scale, ends, out, tile, chunk, form
            )


@triton.jit
def _score_request(query, keys, k_scales, scale, head_scale, lengths, out, index, walkers, begin, out_len, form):
    """One chunk of a request, or every walkers-th from the index on."""
    columns, tail_columns = None, None
    if form.PAIRS:
        even = 2 * tl.arange(0, form.BLOCK_D // 2)
        columns, tail_columns = load_query_columns(query, even, form), load_query_columns(query, even + 1, form)
    elif form.DOT_DTYPE is not None:
        columns = load_query_columns(query, tl.arange(0, form.BLOCK_D), form)
        if form.TAIL_D:
            tail_columns = load_query_columns(query, form.BLOCK_D + tl.arange(0, form.TAIL_D), form)
    if form.RAGGED:
        ends = ends_of(lengths, 0, form)
        end = ends
        if form.SEVERAL:
            own = tl.minimum(query.first + tl.arange(0, form.ROWS), query.count - 1)
            ends = ends_of(lengths, own // form.GROUP, form)
            end = tl.max(ends, axis=0)
        # Only chunks in which some query sees something are scored.
        index = index.to(tl.int32)
        chunks = (out_len + form.CHUNK_SIZE - 1) // form.CHUNK_SIZE
        first = tl.minimum(begin // form.CHUNK_SIZE, chunks).to(tl.int32)
        last = tl.minimum((end + form.CHUNK_SIZE - 1) // form.CHUNK_SIZE, chunks).to(tl.int32)
        last = tl.maximum(last, first)  # end may be negative, too
        if form.FILL:  # first, so that the loop over chunks need not keep what this takes in registers
            # Whole chunks, of which the last may reach beyond out.
            fill_range(query, out, 0, tl.minimum(first.to(tl.int64) * form.CHUNK_SIZE, out_len), index, walkers, form)
            fill_range(query, out, last.to(tl.int64) * form.CHUNK_SIZE, out_len, index, walkers, form)
        scored = first + index
        while scored < last:
            _score_chunk(
                query, columns, tail_columns, keys, k_scales, scale, head_scale, lengths, out, scored.to(tl.int64),
                begin, end, ends, out_len, form,
            )  # fmt: skip
            scored += walkers
    else:
        _score_chunk(
            query, columns, tail_columns, keys, k_scales, scale, head_scale, None, out, index,
            0, lengths.seq_len, None, out_len, form,
        )  # fmt: skip


# Whatever grows with the cache, or differs between callers, is neither specialised on its value nor on its alignment:
# a step of the decode loop never compiles. The two aligned-or-not binaries are told apart by ALIGNED.
UNSPECIALISED = (
    "batch", "seq_len", "out_len", "kv_heads", "q_len", "stride_qb", "stride_qh", "stride_qi",
    "stride_kb", "stride_kl", "stride_kh", "stride_ob", "stride_oh", "stride_oi", "stride_ol",
    "stride_lb", "stride_li", "stride_sb", "stride_tb", "stride_cb", "stride_cl", "stride_ch",
)  # fmt: skip
UNALIGNED = ("out_ptr", "seq_lens_ptr", "seq_starts_ptr", "block_table_ptr", "k_scale_ptr")


@triton.jit(do_not_specialize=UNSPECIALISED, do_not_specialize_on_alignment=UNALIGNED)
def qk_score_kernel(
    q_ptr, k_ptr, out_ptr, seq_lens_ptr, seq_starts_ptr, block_table_ptr, k_scale_ptr, scale, fill,
    batch: tl.int32, seq_len: tl.int64, out_len: tl.int64, kv_heads: tl.int32, q_len: tl.int32,
    stride_qb: tl.int64, stride_qh: tl.int64, stride_qi: tl.int64,
    stride_kb: tl.int64, stride_kl: tl.int64, stride_kh: tl.int64,
    stride_ob: tl.int64, stride_oh: tl.int64, stride_oi: tl.int64, stride_ol: tl.int64,
    stride_lb: tl.int64, stride_li: tl.int64, stride_sb: tl.int64, stride_tb: tl.int64,
    stride_cb: tl.int64, stride_cl: tl.int64, stride_ch: tl.int64,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    DOT_DTYPE: tl.constexpr, ALIGNED: tl.constexpr, ROUND_BY_HAND: tl.constexpr, SEVERAL: tl.constexpr,
    RAGGED: tl.constexpr, CAUSAL: tl.constexpr, FILL: tl.constexpr, PAGE_SIZE: tl.constexpr, K_SCALE: tl.constexpr,
    PAIRS: tl.constexpr, CHUNK_SIZE: tl.constexpr, TILE_SIZE: tl.constexpr, STAGES: tl.constexpr,
    LOAD_HINT: tl.constexpr, STORE_HINT: tl.constexpr,
):  # fmt: skip
    """Scores of one chunk, or of several. `variant.py` says what each argument is, `launch.py` how large the grid."""
    count = q_len * GROUP if SEVERAL else GROUP
    row_blocks = (count + ROWS - 1) // ROWS
    walkers = ((out_len + CHUNK_SIZE - 1) // CHUNK_SIZE).to(tl.int32)  # programs that share a request
    if RAGGED:
        walkers = tl.num_programs(0) // (batch * kv_heads * row_blocks)
    b, index, row_block, kv_head = split_program_id(tl.program_id(0), kv_heads, row_blocks, walkers)

    stride_qh = visible_stride(stride_qh, q_ptr.dtype.element_ty, ALIGNED)
    stride_qi = visible_stride(stride_qi, q_ptr.dtype.element_ty, ALIGNED)
    q_base = q_ptr + b * visible_stride(stride_qb, q_ptr.dtype.element_ty, ALIGNED) + kv_head * GROUP * stride_qh
    out_base = out_ptr + b * stride_ob + kv_head * GROUP * stride_oh

    stride_kb = visible_stride(stride_kb, k_ptr.dtype.element_ty, ALIGNED)
    stride_kl = visible_stride(stride_kl, k_ptr.dtype.element_ty, ALIGNED)
    k_base = k_ptr + kv_head * visible_stride(stride_kh, k_ptr.dtype.element_ty, ALIGNED)
    lens, begin, table = seq_lens_ptr, 0, block_table_ptr
    if PAGE_SIZE:
        table += b * stride_tb
    else:
        k_base += b * stride_kb
    if lens is not None:
        lens += b * stride_lb
    if seq_starts_ptr is not None:
        begin = tl.maximum(tl.load(seq_starts_ptr + b * stride_sb).to(tl.int64), 0)
    head_scale, k_scales = None, None
    if K_SCALE == SCALE_BY_HEAD:
        head_scale = tl.load(k_scale_ptr + kv_head * stride_ch)
    if K_SCALE == SCALE_BY_TOKEN:
        token_base = k_scale_ptr + kv_head * stride_ch
        if not PAGE_SIZE:
            token_base += b * stride_cb
        k_scales = Cache(token_base, stride_cb, stride_cl, table)
    _score_request(
        Query(q_base, stride_qh, stride_qi, row_block * ROWS, count), Cache(k_base, stride_kb, stride_kl, table),
        k_scales,
        scale, head_scale, Lengths(lens, stride_li, seq_len, q_len),
        Output(out_base, stride_oh, stride_oi, stride_ol, fill), index, walkers, begin, out_len,
        Form(
            HEAD_DIM, BLOCK_D, TAIL_D, GROUP, ROWS, DOT_DTYPE, ROUND_BY_HAND, SEVERAL, RAGGED, CAUSAL, FILL, PAGE_SIZE,
            K_SCALE, PAIRS and tl.target_info.cuda_capability_geq(9, 0), CHUNK_SIZE, TILE_SIZE, STAGES,
            LOAD_HINT, STORE_HINT,
        ),
    )  # fmt: skip
