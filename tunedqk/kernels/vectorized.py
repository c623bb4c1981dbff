"""The fast kernel: decode-time attention scores of a KV cache.

    out[b, h, l] = scale * sum_d q[b, h, d] * k[b, l, h // GROUP, d]        0 <= l < seq_len
    out[b, h, l] = fill                                               seq_len <= l < out_len

One program scores CHUNK_SIZE positions for ROWS query heads that share a KV head, so keys are read once. The grid has
one dimension, (batch, chunk, block of rows, KV head) with the KV head fastest: the second and third dimension of a grid
end at 65535, and in a [batch, seq_len, heads, head_dim] cache neighbours then read neighbouring bytes.

Products are exact in fp32, sums are fp32, and the only rounding to the output's dtype is the store. Shapes change by
`x[:, None]` alone: a reshape that is free to reorder elements is the fault that this package grew from.
"""

import triton
import triton.language as tl


@triton.jit
def _split_program_id(pid, kv_heads, ROW_BLOCKS: tl.constexpr, chunks):
    """Program id -> (batch, chunk, block of rows, KV head), each int64 and ready to meet a stride."""
    # Divided as int32, which is fast; the host checks that the grid fits.
    head = pid % kv_heads
    pid = pid // kv_heads
    row_block = pid % ROW_BLOCKS
    pid = pid // ROW_BLOCKS
    return (pid // chunks).to(tl.int64), (pid % chunks).to(tl.int64), row_block.to(tl.int64), head.to(tl.int64)


@triton.jit
def _visible_stride(stride, element_ty: tl.constexpr, ALIGNED: tl.constexpr):
    """The stride itself; with ALIGNED in a form that shows the compiler that it is a multiple of 16 bytes.

    Without that, each 16-byte load becomes eight scalar ones. Specialising on the value would show it too, but would
    compile again as a cache grows.
    """
    if ALIGNED:
        lanes: tl.constexpr = 128 // element_ty.primitive_bitwidth
        stride = stride // lanes * lanes
    return stride


@triton.jit
def _load_keys(k_base, stride_kl, pos, left, offs_d, HEAD_DIM: tl.constexpr, LOAD_HINT: tl.constexpr):
    """A tile of keys. What lies at or past `left`, or past the head, is not read."""
    mask = (pos < left)[:, None] & (offs_d < HEAD_DIM)[None, :]
    ptrs = k_base + pos.to(tl.int64)[:, None] * stride_kl + offs_d[None, :]
    return tl.load(ptrs, mask=mask, other=0.0, eviction_policy=LOAD_HINT)  # [TILE_SIZE, len(offs_d)]


@triton.jit
def _load_query_columns(q_base, stride_qh, rows, rows_left, offs_d, HEAD_DIM: tl.constexpr):
    mask = (offs_d < HEAD_DIM)[:, None] & (rows < rows_left)[None, :]
    return tl.load(q_base + offs_d[:, None] + rows[None, :] * stride_qh, mask=mask, other=0.0)  # [len(offs_d), ROWS]


@triton.jit
def _dot_with_row(keys, q_base, offs_d, HEAD_DIM: tl.constexpr):
    q = tl.load(q_base + offs_d, mask=offs_d < HEAD_DIM, other=0.0)
    # Converted before the product: a 16-bit tl.sum rounds each product, and adds them up in 16 bits.
    return tl.sum(keys.to(tl.float32) * q.to(tl.float32)[None, :], axis=1)  # [TILE_SIZE]


@triton.jit
def _to_output(scores, fill, valid, element_ty: tl.constexpr, ROUND_BY_HAND: tl.constexpr):
    """Scores where `valid`, else fill, rounded once to the output's dtype."""
    scores = tl.where(valid, scores, fill)
    if ROUND_BY_HAND:
        # The interpreter truncates fp32 to bf16. Round to nearest even on the bits, so that nothing is left to cut.
        bits = scores.to(tl.int32, bitcast=True)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
        scores = tl.where(scores == scores, nearest, scores)  # noqa: PLR0124  a NaN stays one
    return scores.to(element_ty)


# Tiles are functions of their own: Triton visits the body of a loop twice, but a function that it calls once.
@triton.jit
def _score_tile_by_sum(
    q_base, k_base, out_base, scale, fill, pos, left, out_left, rows_left, stride_qh, stride_kl, stride_oh, stride_ol,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr, ROWS: tl.constexpr,
    ROUND_BY_HAND: tl.constexpr, LOAD_HINT: tl.constexpr, STORE_HINT: tl.constexpr,
):  # fmt: skip
    """One multiply-and-sum over head_dim per query row, on a tile of keys that stays in registers."""
    offs_d = tl.arange(0, BLOCK_D)
    keys = _load_keys(k_base, stride_kl, pos, left, offs_d, HEAD_DIM, LOAD_HINT)
    if TAIL_D:
        tail_d = BLOCK_D + tl.arange(0, TAIL_D)
        tail_keys = _load_keys(k_base, stride_kl, pos, left, tail_d, HEAD_DIM, LOAD_HINT)
    for row in tl.static_range(ROWS):
        q_row = q_base + tl.minimum(row, rows_left - 1) * stride_qh
        scores = _dot_with_row(keys, q_row, offs_d, HEAD_DIM)
        if TAIL_D:
            scores += _dot_with_row(tail_keys, q_row, tail_d, HEAD_DIM)
        scores = _to_output(scores * scale, fill, pos < left, out_base.dtype.element_ty, ROUND_BY_HAND)
        ptrs = out_base + row * stride_oh + pos.to(tl.int64) * stride_ol
        mask = (pos < out_left) & (row < rows_left)
        tl.store(ptrs, scores, mask=mask, eviction_policy=STORE_HINT)


@triton.jit
def _score_tile_by_dot(
    q, tail_q, k_base, out_base, scale, fill, pos, left, out_left, rows_left, stride_kl, stride_oh, stride_ol,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr, ROWS: tl.constexpr,
    ROUND_BY_HAND: tl.constexpr, LOAD_HINT: tl.constexpr, STORE_HINT: tl.constexpr,
):  # fmt: skip
    """All query rows at once on the matrix units: keys are the M operand, the rows are columns."""
    keys = _load_keys(k_base, stride_kl, pos, left, tl.arange(0, BLOCK_D), HEAD_DIM, LOAD_HINT)
    # "ieee": an fp32 product never goes through TF32.
    scores = tl.dot(keys.to(q.dtype), q, input_precision="ieee")  # [TILE_SIZE, ROWS]
    if TAIL_D:
        tail_keys = _load_keys(k_base, stride_kl, pos, left, BLOCK_D + tl.arange(0, TAIL_D), HEAD_DIM, LOAD_HINT)
        scores = tl.dot(tail_keys.to(q.dtype), tail_q, scores, input_precision="ieee")
    valid = (pos < left)[:, None]
    scores = _to_output(scores * scale, fill, valid, out_base.dtype.element_ty, ROUND_BY_HAND)
    rows = tl.arange(0, ROWS).to(tl.int64)
    ptrs = out_base + rows[None, :] * stride_oh + pos.to(tl.int64)[:, None] * stride_ol
    mask = (pos < out_left)[:, None] & (rows < rows_left)[None, :]
    tl.store(ptrs, scores, mask=mask, eviction_policy=STORE_HINT)


# Whatever grows with the cache, or differs between callers, is neither specialised on its value nor on its alignment:
# a step of the decode loop never compiles. The two aligned-or-not binaries are told apart by ALIGNED.
UNSPECIALISED = (
    "seq_len", "out_len", "kv_heads", "stride_qb", "stride_qh", "stride_kb", "stride_kl", "stride_kh",
    "stride_ob", "stride_oh", "stride_ol",
)  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALISED, do_not_specialize_on_alignment=("out_ptr",))
def qk_score_kernel(
    q_ptr, k_ptr, out_ptr, scale, fill, seq_len: tl.int64, out_len: tl.int64, kv_heads: tl.int32,
    stride_qb: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_kl: tl.int64, stride_kh: tl.int64,
    stride_ob: tl.int64, stride_oh: tl.int64, stride_ol: tl.int64,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TAIL_D: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    DOT_DTYPE: tl.constexpr, ALIGNED: tl.constexpr, ROUND_BY_HAND: tl.constexpr,
    CHUNK_SIZE: tl.constexpr, TILE_SIZE: tl.constexpr, STAGES: tl.constexpr,
    LOAD_HINT: tl.constexpr, STORE_HINT: tl.constexpr,
):  # fmt: skip
    """Scores of one chunk. `launch.py` says what each argument is, and how large the grid must be."""
    ROW_BLOCKS: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    chunks = ((out_len + CHUNK_SIZE - 1) // CHUNK_SIZE).to(tl.int32)
    batch, chunk, row_block, kv_head = _split_program_id(tl.program_id(0), kv_heads, ROW_BLOCKS, chunks)

    # From here on positions count from the chunk's start and are int32.
    start = chunk * CHUNK_SIZE
    left = tl.maximum(tl.minimum(seq_len - start, CHUNK_SIZE), 0).to(tl.int32)  # positions with a key
    out_left = tl.minimum(out_len - start, CHUNK_SIZE).to(tl.int32)  # positions to write
    rows_left = GROUP - row_block * ROWS
    q_head = kv_head * GROUP + row_block * ROWS

    element_ty: tl.constexpr = k_ptr.dtype.element_ty
    stride_qh = _visible_stride(stride_qh, element_ty, ALIGNED)
    stride_kl = _visible_stride(stride_kl, element_ty, ALIGNED)
    q_base = q_ptr + batch * _visible_stride(stride_qb, element_ty, ALIGNED) + q_head * stride_qh
    k_base = k_ptr + batch * _visible_stride(stride_kb, element_ty, ALIGNED) + start * stride_kl
    k_base += kv_head * _visible_stride(stride_kh, element_ty, ALIGNED)
    out_base = out_ptr + batch * stride_ob + q_head * stride_oh + start * stride_ol
    if DOT_DTYPE is None:
        for tile in tl.range(0, CHUNK_SIZE, TILE_SIZE, num_stages=STAGES):
            _score_tile_by_sum(
                q_base, k_base, out_base, scale, fill, tile + tl.arange(0, TILE_SIZE), left, out_left, rows_left,
                stride_qh, stride_kl, stride_oh, stride_ol,
                HEAD_DIM, BLOCK_D, TAIL_D, ROWS, ROUND_BY_HAND, LOAD_HINT, STORE_HINT,
            )  # fmt: skip
    else:
        rows = tl.arange(0, ROWS).to(tl.int64)
        q = _load_query_columns(q_base, stride_qh, rows, rows_left, tl.arange(0, BLOCK_D), HEAD_DIM).to(DOT_DTYPE)
        tail_q = q
        if TAIL_D:
            tail_d = BLOCK_D + tl.arange(0, TAIL_D)
            tail_q = _load_query_columns(q_base, stride_qh, rows, rows_left, tail_d, HEAD_DIM).to(DOT_DTYPE)
        for tile in tl.range(0, CHUNK_SIZE, TILE_SIZE, num_stages=STAGES):
            _score_tile_by_dot(
                q, tail_q, k_base, out_base, scale, fill, tile + tl.arange(0, TILE_SIZE), left, out_left, rows_left,
                stride_kl, stride_oh, stride_ol,
                HEAD_DIM, BLOCK_D, TAIL_D, ROWS, ROUND_BY_HAND, LOAD_HINT, STORE_HINT,
            )  # fmt: skip
