"""Every combination of dtypes, cache, queries, heads and head_dim against float64; NaN and Inf where nobody looks."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from conftest import INTERPRETED, ON_GPU
from formula import HIDDEN_BLOCK, assert_call

from tunedqk import compute
from tunedqk.config import KernelConfig, default_config, tuning_key
from tunedqk.score import qk_score
from tunedqk.tensors import KEY_DTYPE_NAMES

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = [(FP32, FP32, ""), (FP16, FP16, ""), (BF16, BF16, ""), (BF16, E4M3, "token"), (FP16, E4M3, "head"),
          (FP16, E5M2, "token"), (BF16, E5M2, ""), (FP32, E4M3, "number")]  # fmt: skip
CACHES = ["plain", "ragged", "paged"]
QUERIES = [(1, False), (4, False), (4, True)]
HEADS = [(2, 2), (8, 2), (16, 1)]
HEAD_DIMS = [64, 80, 128]
ALL = list(itertools.product(DTYPES, CACHES, QUERIES, HEADS, HEAD_DIMS))
# Each value of each axis with each of the next one's; the interpreter takes long for all.
THIN = ALL[::17] if INTERPRETED else []
PAGE_SIZES = [1, 16, 64, 12, 256]
LENGTHS = [70, 1, 0]


def small_config(rows, head_dim, dtype):
    """A config that needs no tuning."""
    if INTERPRETED:
        return KernelConfig(32, 16, num_warps=4)
    return default_config(tuning_key(512, head_dim, KEY_DTYPE_NAMES[dtype], rows))


class Call:
    """One combination, with everything odd that it may have: strides, layouts, index dtypes; `number` varies them."""

    def __init__(self, number, device, dtypes, cache, queries, heads, head_dim):
        (dtype, k_dtype, scaled), (q_len, causal), (q_heads, kv_heads) = dtypes, queries, heads
        self.dtype, self.layout = dtype, "HND" if number % 2 else "NHD"
        index = torch.int64 if number % 3 else torch.int32
        batch, seq_len = len(LENGTHS), max(LENGTHS)
        q = torch.randn(batch, q_len, q_heads, head_dim, device=device).to(dtype)
        self.fill = (-math.inf, None, 0.5)[number % 3]
        self.options = {"causal": causal, "scale": 0.37, "layout": self.layout}
        length = seq_len
        if cache == "paged":
            page_size = PAGE_SIZES[number % len(PAGE_SIZES)]
            k, self.options["block_table"] = self._pool(page_size, kv_heads, head_dim, k_dtype, index, device)
            length = self.options["block_table"].shape[1] * page_size
        else:
            # A slice of something wider, as of a fused projection.
            odd = int(number % 5 == 4)  # not aligned
            k = torch.randn(batch, seq_len, kv_heads, head_dim + 16, device=device).to(k_dtype)[
                ..., odd : head_dim + odd
            ]
        if cache != "plain":
            lens = torch.tensor(LENGTHS, device=device, dtype=index)
            self.options["seq_lens"] = (
                lens
                if causal or q_len == 1
                else (lens[:, None] - torch.arange(q_len, device=device).to(index)).clamp(0)
            )
        if cache == "ragged" or (cache == "paged" and number % 4 == 0):
            self.options["seq_starts"] = torch.tensor([3, 0, 0], device=device, dtype=index)
        scales = {"token": (*k.shape[:2], kv_heads), "head": (kv_heads,)}
        if scaled in scales:
            self.options["k_scale"] = torch.rand(scales[scaled], device=device) + 0.5
        self.number = 1.5 if scaled == "number" else None
        self.q, self.k = q if q_len > 1 else q[:, 0], k
        if self.layout == "HND":
            self.k = k.transpose(1, 2)
            self.q = self.q.transpose(1, 2).contiguous() if q_len > 1 else self.q
        rows = (batch, q_heads, q_len) if q_len > 1 else (batch, q_heads)
        wide = torch.full((*rows, 2 * (length + 3)), 7.0, device=device, dtype=FP32 if number % 2 else dtype)
        self.out = wide[..., ::2]
        self.config = small_config(q_heads // kv_heads * q_len, head_dim, k_dtype)

    @staticmethod
    def _pool(page_size, kv_heads, head_dim, dtype, index, device):
        """Pages with other bytes between keys, in random order; the table is part of a wider one."""
        needed = [-(-length // page_size) for length in LENGTHS]
        width = max(needed) + 1
        pool = torch.randn(sum(needed) + 2, page_size + 1, kv_heads, head_dim, device=device).to(dtype)[:, 1:]
        table = torch.full((len(needed), width + 5), HIDDEN_BLOCK, dtype=index, device=device)
        order = torch.randperm(sum(needed) + 2)[: sum(needed)].to(device, index)
        for row, blocks in zip(table, order.split(needed), strict=True):
            row[: len(blocks)] = blocks
        return pool, table[:, :width]

    def check(self):
        """Score, and compare."""
        before = self.out.clone()
        scaled = {} if self.number is None else {"k_scale": self.number}
        got = qk_score(self.q, self.k, fill=self.fill, out=self.out, config=self.config, **self.options, **scaled)
        known = {} if self.number is None else {"k_scale": torch.tensor(self.number, device=self.q.device)}
        assert_call(got, before, self.q, self.k, fill=self.fill, **self.options, **known)


@pytest.mark.gpu
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_every_combination_on_a_gpu(device, dtypes, cache):
    for number, one in enumerate(ALL):
        if one[:2] == (dtypes, cache):
            Call(number, device, *one).check()


@pytest.mark.parametrize("one", THIN, ids=str)
def test_combinations_under_the_interpreter(device, one):
    Call(ALL.index(one), device, *one).check()


def test_every_combination_of_cpu_tensors(monkeypatch):
    monkeypatch.setattr(compute, "interpreting", lambda: False)
    for number, one in enumerate(ALL):
        Call(number, "cpu", *one).check()


@pytest.mark.parametrize("fill", [-3.0, None])
@pytest.mark.parametrize("lens", [0, 7, 20, 1000, -4, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("starts", [0, 16, 19, 20, 31, 32, 1000, -5, 2**40, 2**63 - 1, -(2**63)])
def test_lengths_and_starts_beyond_the_cache_write_nothing_beyond_out(device, starts, lens, fill):
    q, k = torch.randn(1, 1, 16, device=device), torch.randn(1, 20, 1, 16, device=device)
    around = torch.full((1, 1, 96), 7.0, device=device)
    out = around[..., 32:52]
    tensors = {"seq_lens": torch.tensor([lens], device=device), "seq_starts": torch.tensor([starts], device=device)}
    qk_score(q, k, out=out, fill=fill, config=KernelConfig(16, 16, num_warps=4), **tensors)
    assert (around[..., :32] == 7).all()
    assert (around[..., 52:] == 7).all()
    begin, end = max(starts, 0), min(lens, 20)
    hidden = torch.ones(20, dtype=torch.bool, device=device)
    hidden[begin : max(begin, end)] = False
    assert (out[..., hidden] == (7 if fill is None else fill)).all()
    whole = torch.einsum("d,ld->l", q[0, 0].double(), k[0, :, 0].double())
    torch.testing.assert_close(out[0, 0, ~hidden].double(), whole[~hidden], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("starts", [-(2**63), 0, 2**63 - 1])
@pytest.mark.parametrize("lens", [-(2**63), 20, 2**63 - 1])
def test_causal_queries_of_lengths_beyond_all_bounds(device, lens, starts):
    q, k = torch.randn(1, 3, 2, 16, device=device), torch.randn(1, 20, 1, 16, device=device)
    tensors = {"seq_lens": torch.tensor([lens], device=device), "seq_starts": torch.tensor([starts], device=device)}
    got = qk_score(q, k, causal=True, fill=-3.0, config=KernelConfig(16, 16, num_warps=4), **tensors)
    expected = qk_score(q, k, causal=True, fill=-3.0, config=KernelConfig(16, 16, num_warps=4))
    if lens < 0 or starts > 0:
        expected.fill_(-3.0)
    assert torch.equal(got, expected)


# --- What must not be read, and what is ---


def _poison(x, where, value):
    """Put the value where `where` says; float8 cannot be indexed by a mask."""
    x.copy_(torch.where(where, torch.tensor(value, device=x.device), x.float()).to(x.dtype))


HIDDEN_CALLS = [one for one in ALL if one[1] != "plain" and one[3] != (16, 1) and one[4] == 64]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("one", HIDDEN_CALLS if ON_GPU else HIDDEN_CALLS[::11], ids=str)
def test_what_is_hidden_is_not_read(device, one, value):
    call = Call(ALL.index(one), device, *one)
    k = call.k if call.layout == "NHD" else call.k.transpose(1, 2)
    lens = call.options["seq_lens"]
    lens = (lens if lens.dim() == 1 else lens.amax(dim=1)).tolist()
    starts = call.options.get("seq_starts", torch.zeros(3, dtype=torch.int64)).tolist()
    seen = torch.zeros(k.shape[:2], dtype=torch.bool, device=device)
    for b, (begin, end) in enumerate(zip(starts, lens, strict=True)):
        at = torch.arange(begin, max(begin, end), device=device)
        table = call.options.get("block_table")
        seen[(b, at) if table is None else (table[b].long()[at // k.shape[1]], at % k.shape[1])] = True
    _poison(k, ~seen[..., None, None], value)
    k_scale = call.options.get("k_scale")
    if k_scale is not None and k_scale.dim() == 3:
        _poison(k_scale, ~seen[..., None], value)
    call.check()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["q", "k", "k_scale"])
@pytest.mark.parametrize("one", HIDDEN_CALLS if ON_GPU else HIDDEN_CALLS[::11], ids=str)
def test_what_is_read_shows_where_it_is_read_and_nowhere_else(device, one, name, value):
    if INTERPRETED and name == "k" and one[0][1].itemsize == 1:
        pytest.skip("Triton's interpreter takes a float8 NaN for a number")
    call = Call(ALL.index(one), device, *one)
    k = call.k if call.layout == "NHD" else call.k.transpose(1, 2)
    table = call.options.get("block_table")
    at = (0, 5) if table is None else (int(table[0, 5 // k.shape[1]]), 5 % k.shape[1])
    if name == "q":
        call.q[0].view(-1)[70] = value
    elif name == "k":
        part = k[at[0], at[1], 1]
        _poison(part, torch.arange(64, device=device) == 9, value)
    elif call.options.get("k_scale") is None or call.options["k_scale"].dim() < 3:
        pytest.skip("has no scale by token")
    else:
        call.options["k_scale"][at[0], at[1], 1] = value
    call.check()
