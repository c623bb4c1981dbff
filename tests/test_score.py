"""The public call against float64: shapes, strides, outputs, what may not leak, and where it runs.

Without a GPU and with TRITON_INTERPRET=0 the same tests go through torch operations; one test here starts them so.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import triton
from conftest import nothing_bound
from reference import DTYPES, assert_scores, config_for, make_inputs, name_of, poisoned, scores64, seed_case

from tunedqk import launch, ready, resolve, tune
from tunedqk.config import KernelConfig, tuning_key
from tunedqk.device import interpreting
from tunedqk.errors import CaptureError
from tunedqk.score import qk_score
from tunedqk.variant import ALIGNMENT, Variant

SELF_RUN = "TUNEDQK_TESTS_BY_TORCH" in os.environ

HEADS = [
    pytest.param(3, 3, id="mha"),
    pytest.param(4, 2, id="group 2"),
    pytest.param(6, 2, id="group 3"),
    pytest.param(8, 2, id="group 4"),
    pytest.param(16, 2, id="group 8"),
    pytest.param(16, 1, id="mqa 16"),
    pytest.param(40, 1, id="mqa 40"),
]
DTYPE_PARAMS = [pytest.param(dtype, id=name_of(dtype)) for dtype in DTYPES]
# (q_heads, kv_heads, dtype): the sums and the matrix units.
BOTH_WAYS = [pytest.param(4, 2, torch.float32, id="by sum"), pytest.param(8, 2, torch.bfloat16, id="by dot")]


def _config(q, k, layout="NHD"):
    group = q.shape[1] // k.shape[2 if layout == "NHD" else 1]
    return config_for(q.shape[-1], q.dtype, group)


def _assert_scored(q, k, *, scale=1.0, layout="NHD", **options):
    """Call, compare with float64, and return what the call returned."""
    config = options.pop("config", None) or _config(q, k, layout)
    got = qk_score(q, k, scale=scale, layout=layout, config=config, **options)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    seq_len = k.shape[1 if layout == "NHD" else 2]
    assert_scores(got[..., :seq_len], q, k, factor, layout)
    return got


# Shapes and dtypes.


@pytest.mark.parametrize(("q_heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("dtype", [pytest.param(t, id=name_of(t)) for t in (torch.float32, torch.bfloat16)])
def test_heads(dtype, q_heads, kv_heads, device):
    q, k = make_inputs(2, q_heads, kv_heads, 33, 16, dtype, device)
    got = _assert_scored(q, k)
    assert got.dtype == dtype
    assert got.is_contiguous()


@pytest.mark.parametrize(("q_heads", "kv_heads"), [pytest.param(3, 3, id="by sum"), pytest.param(8, 2, id="by dot")])
def test_fp16(q_heads, kv_heads, device):
    _assert_scored(*make_inputs(2, q_heads, kv_heads, 33, 16, torch.float16, device))


@pytest.mark.parametrize(("q_heads", "kv_heads"), HEADS)
def test_heads_are_told_apart(q_heads, kv_heads, device):
    """head // group, not head % kv_heads; and each batch element and position reads its own key."""
    kv_head = torch.arange(kv_heads, device=device)[None, None, :, None]
    batch = torch.arange(2, device=device)[:, None, None, None]
    pos = torch.arange(33, device=device)[None, :, None, None]
    k = (kv_head + 40 * pos + 1600 * batch).float().expand(-1, -1, -1, 16).contiguous()
    q = (torch.arange(q_heads, device=device) + 1)[None, :, None].float().expand(2, -1, 16).contiguous()
    got = qk_score(q, k, config=_config(q, k))
    group = q_heads // kv_heads
    for b, h, p in itertools.product(range(2), range(q_heads), (0, 17, 32)):
        assert got[b, h, p].item() == 16 * (h + 1) * (h // group + 40 * p + 1600 * b)


@pytest.mark.parametrize("layout", [pytest.param("NHD", id="NHD"), pytest.param("HND", id="HND")])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "dtype"),
    [*BOTH_WAYS, pytest.param(3, 3, torch.float16, id="mha")],
)
def test_layouts(q_heads, kv_heads, dtype, layout, device):
    # As many positions as KV heads: taking one for the other is no error, only wrong.
    for seq_len in (kv_heads, 33):
        _assert_scored(*make_inputs(2, q_heads, kv_heads, seq_len, 16, dtype, device, layout), layout=layout)


HEAD_DIM_SHAPES = ((torch.float32, 2, 2, None), (torch.bfloat16, 8, 2, torch.float32))


def _assert_head_dim(head_dim, device):
    """By sum in fp32, and by dot in bf16 with an output that hides no error."""
    for dtype, q_heads, kv_heads, out_dtype in HEAD_DIM_SHAPES:
        _assert_scored(*make_inputs(1, q_heads, kv_heads, 33, head_dim, dtype, device), out_dtype=out_dtype)


@pytest.mark.parametrize(
    "head_dim", [pytest.param(d, id=f"head_dim {d}") for d in (1, 3, 24, 80, 112, 192, 257, 320, 576)]
)
def test_head_dims(head_dim, device):
    _assert_head_dim(head_dim, device)


@pytest.mark.gpu
@pytest.mark.parametrize("first", [pytest.param(d, id=f"from head_dim {d}") for d in range(1, 577, 64)])
def test_every_head_dim(first, device):
    def compile_ahead(shape):
        head_dim, (dtype, q_heads, kv_heads, out_dtype) = shape
        q, k = make_inputs(1, q_heads, kv_heads, 2, head_dim, dtype, device)
        aligned = head_dim * q.element_size() % ALIGNMENT == 0
        variant = Variant(head_dim, q_heads // kv_heads, dtype, out_dtype or dtype, aligned)
        launch.build(torch.device("cuda", torch.cuda.current_device()), variant, _config(q, k))

    head_dims = range(first, first + 64)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_ahead, itertools.product(head_dims, HEAD_DIM_SHAPES)))
    for head_dim in head_dims:
        _assert_head_dim(head_dim, device)


@pytest.mark.parametrize(
    ("head_dim", "group", "dtype"),
    [
        pytest.param(257, 18, torch.float32, id="by sum"),  # 16 rows and 2
        pytest.param(257, 40, torch.bfloat16, id="by dot"),  # 32 rows and 8
    ],
)
def test_several_blocks_of_rows(head_dim, group, dtype, device):
    variant = Variant(head_dim, group, dtype, torch.float32, aligned=False)
    assert group > variant.blocking.ROWS >= group / 2
    _assert_scored(*make_inputs(2, group, 1, 19, head_dim, dtype, device), out_dtype=torch.float32)


@pytest.mark.parametrize("seq_len", [pytest.param(n, id=f"seq_len {n}") for n in (1, 63, 64, 65, 1000)])
@pytest.mark.parametrize(("q_heads", "kv_heads", "dtype"), BOTH_WAYS)
def test_lengths(q_heads, kv_heads, dtype, seq_len, device):
    batch = 5 if device == "cuda" else 1
    _assert_scored(*make_inputs(batch, q_heads, kv_heads, seq_len, 16, dtype, device))


@pytest.mark.parametrize(
    "config",
    [pytest.param(KernelConfig(c, t, 4, 2), id=f"chunk {c}, tile {t}") for c, t in ((16, 16), (128, 32))],
)
@pytest.mark.parametrize(("q_heads", "kv_heads", "dtype"), BOTH_WAYS)
def test_chunks_of_several_tiles(q_heads, kv_heads, dtype, config, device):
    q, k = make_inputs(1, q_heads, kv_heads, 193, 24, dtype, device)
    out = poisoned(1, q_heads, 210, dtype=dtype, device=device)
    _assert_scored(q, k, out=out, config=config)
    assert (out[..., 193:] == -math.inf).all()


@pytest.mark.parametrize("head_dim", [pytest.param(d, id=f"head_dim {d}") for d in (16, 64, 128)])
def test_the_seeds_case_for_every_config(head_dim, device):
    key = tuning_key(60, head_dim, "float32", 1)
    target = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    configs = [config_for(head_dim, torch.float32, 1)]
    if device == "cuda" or interpreting():
        configs = tune.candidates(key, target)
    assert configs
    if device == "cuda":
        variant = Variant(head_dim, 1, torch.float32, torch.float32, aligned=True)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda config: launch.build(target, variant, config), configs))
    q, k, out, expected = seed_case(head_dim, device)
    for config in configs:
        out.fill_(math.nan)
        flat = _assert_scored(q, k, out=out.view(4, 8, -1), fill=0, config=config)
        assert flat.data_ptr() == out.data_ptr()
        assert torch.allclose(out, expected, atol=1e-5), str(config)


# Strides.


def _fused_qkv(dtype, device):
    qkv = torch.randn(2, 33, (4 + 2 + 2) * 16).to(device, dtype)
    return qkv[:, -1, : 4 * 16].unflatten(-1, (4, 16)), qkv[..., 4 * 16 : 6 * 16].unflatten(-1, (2, 16))


def _expanded_heads(dtype, device):
    q, k = make_inputs(2, 4, 1, 33, 16, dtype, device)
    return q, k.expand(-1, -1, 2, -1)


def _expanded_batch(dtype, device):
    _, k = make_inputs(1, 4, 2, 33, 16, dtype, device)
    return torch.randn(3, 4, 16).to(device, dtype), k.expand(3, -1, -1, -1)


def _expanded_query(dtype, device):
    q, k = make_inputs(2, 1, 2, 33, 16, dtype, device)
    return q.expand(-1, 4, -1), k


def _one_request(dtype, device):
    q, k = make_inputs(3, 4, 2, 33, 16, dtype, device)
    return q[1:2], k[1:2]


def _odd_strides_that_do_not_count(dtype, device):
    """Strides over a dimension of size one; nothing is misaligned by them."""
    q, k = make_inputs(1, 2, 1, 33, 16, dtype, device)
    q = q.as_strided(q.shape, (7, 16, 1))
    return q, k.as_strided(k.shape, (5, 16, 3, 1))


def _positions_first(dtype, device):
    q, k = make_inputs(2, 4, 2, 33, 16, dtype, device)
    return q, k.transpose(0, 1).contiguous().transpose(0, 1)


def _offset(dtype, device, elements_q, elements_k):
    q = torch.randn(2 * 4 * 16 + elements_q).to(device, dtype)[elements_q:].view(2, 4, 16)
    k = torch.randn(2 * 33 * 2 * 16 + elements_k).to(device, dtype)[elements_k:].view(2, 33, 2, 16)
    return q, k


def _misaligned_query(dtype, device):
    return _offset(dtype, device, 1, 0)


def _misaligned_keys(dtype, device):
    return _offset(dtype, device, 0, 3)


def _misaligned_rows(dtype, device):
    q, k = make_inputs(2, 4, 2, 33, 17, dtype, device)
    return q[..., :16], k[..., 1:]


def _misaligned_batch(dtype, device):
    q, k = make_inputs(2, 4, 2, 33, 16, dtype, device)
    flat = torch.zeros(2, 33 * 2 * 16 + 1, dtype=dtype, device=device)
    keys = flat[:, :-1].unflatten(1, (33, 2, 16))
    return q, keys.copy_(k)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=make.__name__.strip("_").replace("_", " "))
        for make in (
            _fused_qkv, _expanded_heads, _expanded_batch, _expanded_query, _one_request,
            _odd_strides_that_do_not_count, _positions_first, _misaligned_query, _misaligned_keys, _misaligned_rows,
            _misaligned_batch,
        )
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [pytest.param(t, id=name_of(t)) for t in (torch.float32, torch.bfloat16)])
def test_strides(dtype, make, device):
    q, k = make(dtype, device)
    _assert_scored(q, k)
    keys = k.transpose(1, 2)
    _assert_scored(q, keys, layout="HND")


# Outputs.


def _dense(view):
    return view


def _transposed(view):
    return view.permute(2, 0, 1).contiguous().permute(1, 2, 0)


def _every_third(view):
    return view.repeat_interleave(3, dim=-1)[..., ::3]


def _odd_rows(view):
    b, h, length = view.shape
    return torch.full((b, h, length + 3), math.nan, dtype=view.dtype, device=view.device)[..., 3:]


OUTPUTS = [
    pytest.param(make, id=make.__name__.strip("_").replace("_", " "))
    for make in (_dense, _transposed, _every_third, _odd_rows)
]


@pytest.mark.parametrize("make", OUTPUTS)
@pytest.mark.parametrize("fill", [pytest.param("default", id="default fill"), -1.0, math.nan, None])
@pytest.mark.parametrize(("q_heads", "kv_heads", "dtype"), BOTH_WAYS)
def test_longer_out(q_heads, kv_heads, dtype, fill, make, device):
    q, k = make_inputs(2, q_heads, kv_heads, 33, 16, dtype, device)
    out = make(torch.zeros(2, q_heads, 70, dtype=dtype, device=device))
    storage = torch.as_strided(out, (out.untyped_storage().nbytes() // out.element_size(),), (1,), 0)
    storage.fill_(-7.25)
    options = {} if fill == "default" else {"fill": fill}
    assert _assert_scored(q, k, out=out, **options) is out
    tail = out[..., 33:]
    if fill is None:
        assert (tail == -7.25).all()
    elif fill == "default":
        assert (tail == -math.inf).all()
    else:
        assert torch.equal(tail, torch.full_like(tail, fill)) or (math.isnan(fill) and tail.isnan().all())
    out.fill_(-7.25)
    assert (storage == -7.25).all(), "something beside out was written"


def test_untouched_tail_keeps_its_bits(device):
    q, k = make_inputs(1, 4, 2, 33, 16, torch.float32, device)
    out = torch.empty(1, 4, 70, device=device)
    bits = out.view(torch.int32).fill_(0x7FA5A5A5)  # a signalling NaN: any arithmetic would quieten it
    _assert_scored(q, k, out=out, fill=None)
    assert (bits[..., 33:] == 0x7FA5A5A5).all()


@pytest.mark.parametrize(
    ("fill", "dtype"), [pytest.param(-1e5, torch.float16, id="fp16"), pytest.param(1e39, torch.float32, id="fp32")]
)
def test_a_fill_beyond_the_dtype_becomes_inf(fill, dtype, device):
    q, k = make_inputs(1, 4, 2, 33, 16, dtype, device)
    out = poisoned(1, 4, 40, dtype=dtype, device=device)
    _assert_scored(q, k, out=out, fill=fill)
    assert (out[..., 33:] == math.copysign(math.inf, fill)).all()


@pytest.mark.parametrize("out_dtype", DTYPE_PARAMS)
@pytest.mark.parametrize("dtype", DTYPE_PARAMS)
def test_out_dtype(dtype, out_dtype, device):
    q, k = make_inputs(1, 8, 2, 33, 16, dtype, device)
    got = _assert_scored(q, k, out_dtype=out_dtype)
    assert got.dtype == out_dtype
    out = poisoned(1, 8, 40, dtype=out_dtype, device=device)
    _assert_scored(q, k, out=out, out_dtype=out_dtype)
    assert torch.equal(out[..., :33], got)


@pytest.mark.parametrize("scale", [None, 0.3, -2.5, 0.0, 2])
@pytest.mark.parametrize(("q_heads", "kv_heads", "dtype"), BOTH_WAYS)
def test_scale(q_heads, kv_heads, dtype, scale, device):
    _assert_scored(*make_inputs(1, q_heads, kv_heads, 33, 16, dtype, device), scale=scale, out_dtype=torch.float32)


def test_scores_beyond_fp16_become_inf_in_fp16_only(device):
    q = torch.full((1, 8, 16), 256.0, dtype=torch.float16, device=device)
    k = torch.full((1, 5, 2, 16), 256.0, dtype=torch.float16, device=device)
    assert (qk_score(q, k, config=_config(q, k)) == math.inf).all()
    assert (qk_score(q, k, config=_config(q, k), out_dtype=torch.float32) == 16 * 65536.0).all()
    assert (qk_score(q, k, config=_config(q, k), scale=2.0**-10) == 1024.0).all()


# What may not leak.


@pytest.mark.parametrize("hostile", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("layout", [pytest.param("NHD", id="NHD"), pytest.param("HND", id="HND")])
@pytest.mark.parametrize(("q_heads", "kv_heads", "dtype"), BOTH_WAYS)
def test_no_trace_of_what_lies_past_seq_len(q_heads, kv_heads, dtype, layout, hostile, device):
    q, cache = make_inputs(2, q_heads, kv_heads, 70, 16, dtype, device)
    clean = cache[:, :33].clone()
    cache[:, 33:] = hostile
    if layout == "HND":
        cache, clean = (x.transpose(1, 2).contiguous() for x in (cache, clean))
    k = cache[:, :33] if layout == "NHD" else cache[:, :, :33]
    out = poisoned(2, q_heads, 70, dtype=dtype, device=device)
    _assert_scored(q, k, layout=layout, out=out, fill=-1.0)
    assert (out[..., 33:] == -1.0).all()
    assert torch.equal(out[..., :33], qk_score(q, clean, layout=layout, config=_config(q, k, layout)))


def test_no_trace_of_what_lies_past_head_dim(device):
    q, k = make_inputs(2, 4, 2, 33, 24, torch.float32, device)
    wide_q, wide_k = (torch.full((*x.shape[:-1], 40), math.nan, device=device) for x in (q, k))
    wide_q[..., :24], wide_k[..., :24] = q, k
    _assert_scored(wide_q[..., :24], wide_k[..., :24])


@pytest.mark.parametrize("hostile", [math.nan, math.inf])
@pytest.mark.parametrize(("q_heads", "kv_heads", "dtype"), BOTH_WAYS)
def test_a_key_that_is_not_finite_shows_exactly_where_it_is_read(q_heads, kv_heads, dtype, hostile, device):
    q, k = make_inputs(2, q_heads, kv_heads, 33, 16, dtype, device)
    k[1, 20, 1, 3] = hostile
    got = _assert_scored(q, k)
    expected = torch.zeros(2, q_heads, 33, dtype=torch.bool, device=device)
    expected[1, q_heads // 2 :, 20] = True
    assert torch.equal(~got.isfinite(), expected)


@pytest.mark.parametrize(("q_heads", "kv_heads", "dtype"), BOTH_WAYS)
def test_a_query_that_is_nan_shows_in_its_head_only(q_heads, kv_heads, dtype, device):
    q, k = make_inputs(2, q_heads, kv_heads, 33, 16, dtype, device)
    q[0, 1, 5] = math.nan
    got = _assert_scored(q, k)
    assert got[0, 1].isnan().all()
    assert got.isnan().sum() == 33


# Empty sizes.


@pytest.mark.parametrize(
    ("q_shape", "k_shape"),
    [
        pytest.param((0, 4, 16), (0, 33, 2, 16), id="batch 0"),
        pytest.param((2, 4, 16), (2, 0, 2, 16), id="seq_len 0"),
        pytest.param((2, 0, 16), (2, 33, 0, 16), id="no heads"),
        pytest.param((0, 0, 16), (0, 0, 0, 16), id="nothing"),
    ],
)
def test_empty_sizes_give_an_empty_result(q_shape, k_shape, device):
    got = qk_score(torch.empty(q_shape, device=device), torch.empty(k_shape, device=device))
    assert got.shape == (*q_shape[:2], k_shape[1])
    out = torch.empty(*q_shape[:2], k_shape[1], device=device)
    assert qk_score(torch.empty(q_shape, device=device), torch.empty(k_shape, device=device), out=out) is out


def test_no_positions_and_an_out_to_fill(device):
    q, k = torch.randn(2, 4, 16, device=device), torch.empty(2, 0, 2, 16, device=device)
    config = config_for(16, torch.float32, 2)
    out = poisoned(2, 4, 40, dtype=torch.float32, device=device)
    assert qk_score(q, k, out=out, fill=None, config=config).isnan().all()
    assert (qk_score(q, k, out=out, config=config) == -math.inf).all()
    assert (qk_score(q, k, out=out, fill=0.5, config=config) == 0.5).all()


# Large sizes.


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("batch", "heads", "seq_len"),
    [
        pytest.param(1, 1, 65536 * 16 + 3, id="chunks"),
        pytest.param(70000, 1, 3, id="batch"),
        pytest.param(300, 256, 3, id="batch * heads"),
    ],
)
def test_more_than_65535(batch, heads, seq_len, device):
    q, k = make_inputs(batch, heads, heads, seq_len, 16, torch.float16, device)
    out = poisoned(batch, heads, seq_len, dtype=torch.float16, device=device)
    _assert_scored(q, k, out=out, config=KernelConfig(16, 16, num_warps=1))


@pytest.fixture
def far_apart(device, much_memory):
    """8 GiB of bf16. Views start in its middle: an offset that wraps gives wrong values, not a crash."""
    elements = 2**32 + 2**20
    free, _ = torch.cuda.mem_get_info()
    if free < 3 * elements:
        pytest.skip(f"needs {3 * elements / 2**30:.0f} GiB of free GPU memory, has {free / 2**30:.0f}")
    return torch.empty(elements, dtype=torch.bfloat16, device=device)


def _far(view, dim):
    """Dense strides, but the last of dimension `dim` lies just over 2^31 elements from its first."""
    strides = list(torch.empty(view.shape, device="meta").stride())
    step = 2**31 // (view.shape[dim] - 1)
    strides[dim] = step + 64 - step % 64  # aligned
    return tuple(strides)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [pytest.param(i, id=name) for i, name in enumerate(("batch", "positions", "heads"))])
@pytest.mark.parametrize("group", [pytest.param(1, id="by sum"), pytest.param(4, id="by dot")])
def test_keys_beyond_int32(group, dim, far_apart, device):
    q, k = make_inputs(3, 3 * group, 3, 3, 16, torch.bfloat16, device)
    far = far_apart.as_strided(k.shape, _far(k, dim), 2**31).copy_(k)
    _assert_scored(q, far)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [pytest.param(i, id=name) for i, name in enumerate(("batch", "heads", "positions"))])
@pytest.mark.parametrize(
    ("group", "dtype"), [pytest.param(4, torch.float32, id="by sum"), pytest.param(16, torch.bfloat16, id="by dot")]
)
def test_out_beyond_int32(group, dtype, dim, far_apart, device):
    q, k = make_inputs(3, group, 1, 3, 16, dtype, device)
    dense = torch.empty(3, group, 3, device="meta")
    out = far_apart.as_strided(dense.shape, _far(dense, dim), 2**31).fill_(math.nan)
    _assert_scored(q, k, out=out)


@pytest.mark.gpu
def test_a_cache_of_more_than_2_to_the_31_elements(far_apart, device):
    rows = 2**31 // (64 * 64) + 16
    k = far_apart[: rows * 64 * 64].view(1, rows, 64, 64)
    k[:, -16:] = torch.randn(1, 16, 64, 64).to(device)
    q = torch.randn(1, 64, 64).to(device, torch.bfloat16)
    got = qk_score(q, k, config=_config(q, k))
    assert_scores(got[..., -16:], q, k[:, -16:])


# Where and how it runs.


def test_no_config_in_cached_mode(cache_dir, device, monkeypatch, caplog):
    """The default config, validated, and one warning."""
    if SELF_RUN:
        pytest.skip("torch operations need no config")
    monkeypatch.setenv("TUNEDQK_MODE", "cached")
    nothing_bound(monkeypatch)
    monkeypatch.setattr(resolve, "resolver_for", resolve.resolver_for.__wrapped__)
    q, k = make_inputs(1, 4, 2, 33, 16, torch.float32, device)
    with caplog.at_level(logging.WARNING, "tunedqk"):
        for _ in range(2):
            assert_scores(qk_score(q, k), q, k)
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode, device):
    q, k = make_inputs(1, 4, 2, 33, 16, torch.float32, device)
    q.requires_grad_()
    k.requires_grad_()
    with mode():
        got = _assert_scored(q, k)
        assert not got.requires_grad
        # Tensors made in inference mode, too.
        _assert_scored(*make_inputs(1, 4, 2, 33, 16, torch.float32, device))


@pytest.fixture
def medium_precision():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("group", [pytest.param(1, id="by sum"), pytest.param(16, id="by dot")])
def test_fp32_whatever_torch_allows_its_matmul(group, medium_precision, device):
    """Integers whose products are exact in fp32, and in neither TF32 nor bf16."""
    q = torch.randint(2000, 4000, (1, 2 * group, 2)).float().to(device)
    k = torch.randint(-2000, 2000, (1, 33, 2, 2)).float().to(device)
    got = qk_score(q, k, config=_config(q, k))
    assert torch.equal(got.double(), scores64(q, k)[0])


@pytest.mark.skipif(SELF_RUN, reason="this is the run that the test starts")
def test_cpu_tensors_through_torch_operations():
    """This file again, where there is neither a GPU nor the interpreter."""
    hidden = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0", "TUNEDQK_TESTS_BY_TORCH": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")} | hidden
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "no GPU and no interpreter" in run.stdout
    assert " passed" in run.stdout


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_a_gpu_that_is_not_current():
    for device in ("cuda:1", "cuda:0"):
        got = _assert_scored(*make_inputs(2, 8, 2, 65, 16, torch.bfloat16, device))
        assert got.device == torch.device(device)
        assert torch.cuda.current_device() == 0


@pytest.mark.gpu
def test_on_a_stream_of_the_users(device):
    q, k = make_inputs(2, 8, 2, 4096, 64, torch.bfloat16, device)
    config = _config(q, k)
    qk_score(q, k, config=config)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late = k * 2
        got = qk_score(q, late, config=config)
    torch.cuda.current_stream().wait_stream(stream)
    assert_scores(got, q, k * 2)


@pytest.mark.gpu
def test_a_captured_graph_replays(device):
    q, k = make_inputs(2, 8, 2, 100, 64, torch.bfloat16, device)
    out = poisoned(2, 8, 120, dtype=torch.bfloat16, device=device)
    config = _config(q, k)
    qk_score(q, k, out=out, config=config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        qk_score(q, k, out=out, config=config)
    for _ in range(2):
        k.copy_(torch.randn(k.shape))
        out.fill_(math.nan)
        graph.replay()
        assert_scores(out[..., :100], q, k)
        assert (out[..., 100:] == -math.inf).all()


@pytest.mark.gpu
def test_a_cold_capture_is_refused_and_can_be_retried(device, monkeypatch):
    nothing_bound(monkeypatch)
    q, k = make_inputs(2, 8, 2, 100, 72, torch.bfloat16, device)
    out = poisoned(2, 8, 100, dtype=torch.bfloat16, device=device)
    config = _config(q, k)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        q.mul_(1)  # torch warns of an empty graph
        with pytest.raises(CaptureError, match="head_dim 72"):
            qk_score(q, k, out=out, config=config)
    assert out.isnan().all()
    _assert_scored(q, k, out=out, config=config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        qk_score(q, k, out=out, config=config)
    out.fill_(math.nan)
    graph.replay()
    assert_scores(out, q, k)


@pytest.mark.gpu
def test_launch_hooks_of_triton_are_called(device):
    """Those of a profiler, such as Proton: added after the binary was bound, and taken away again."""
    q, k = make_inputs(2, 8, 2, 100, 64, torch.bfloat16, device)
    config = _config(q, k)
    qk_score(q, k, config=config)
    seen = []
    hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    enter, leave = (lambda _: seen.append("enter")), (lambda _: seen.append("exit"))
    for hook, call in zip(hooks, (enter, leave), strict=True):
        hook.add(call)
    try:
        _assert_scored(q, k, config=config)
    finally:
        for hook, call in zip(hooks, (enter, leave), strict=True):
            hook.remove(call)
    qk_score(q, k, config=config)
    assert seen == ["enter", "exit"]


@pytest.mark.gpu
def test_a_capture_takes_any_accepted_binary_of_the_variant(device, monkeypatch):
    """No config is asked for, and only one for another bucket is ready."""
    nothing_bound(monkeypatch)
    q, k = make_inputs(2, 8, 2, 600, 64, torch.bfloat16, device)
    qk_score(q, k[:, :100], config=_config(q, k))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = qk_score(q, k)
    graph.replay()
    assert_scores(got, q, k)
    assert len(ready.binaries) == 1
    qk_score(q, k)  # finds its own
    assert len(ready.binaries) == 2
