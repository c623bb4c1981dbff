"""Serving a cache that is ragged, paged or quantised, step by step: nothing compiles, the host waits for nothing."""

from __future__ import annotations

import math
import random

import pytest
import torch
import triton
from conftest import ON_GPU, nothing_bound
from test_serving import needs_kernels, place

from tunedqk import launch, ready, tune, warmup
from tunedqk.accept import Door
from tunedqk.kernels.loop import loop_scores
from tunedqk.resolve import resolver_for
from tunedqk.score import qk_score
from tunedqk.tensors import Tensors
from tunedqk.validate import Validator

HEADS, HEAD_DIM, PAGE_SIZE, ROOM = 2, 16, 4, 64
SHAPE = {"head_dim": HEAD_DIM, "q_heads": 2 * HEADS, "kv_heads": HEADS, "dtype": torch.float32, "max_seq_len": ROOM}
PAGED = {"seq_lens": torch.int32, "block_table": torch.int64, "page_size": PAGE_SIZE}
DECLARED = {
    "ragged": {"seq_lens": torch.int32, "seq_starts": torch.int32},
    "paged": PAGED,
    "paged, not filled": PAGED | {"fill": False},
    "paged, 3 or 4 queries": PAGED | {"q_len": 4, "causal": True},
    "quantised": {"dtype": torch.float16, "k_dtype": torch.float8_e5m2, "k_scale": "token"},
}


@pytest.fixture(autouse=True)
def _fresh(cache_dir, monkeypatch):
    nothing_bound(monkeypatch)
    resolver_for.cache_clear()
    yield
    resolver_for.cache_clear()


def step(chance, declared, device, batch=None):
    """The arguments of a step: another batch, other lengths, blocks and numbers of queries than the step before."""
    batch = batch or chance.randint(1, 3)
    q_len = chance.choice((3, 4)) if "q_len" in declared else 1
    dtype = declared.get("dtype", torch.float32)
    q = torch.randn(batch, q_len, 2 * HEADS, HEAD_DIM, device=device).to(dtype)
    k = torch.randn(batch, chance.randint(1, ROOM), HEADS, HEAD_DIM, device=device)
    options = {"causal": declared.get("causal", False), "fill": None if declared.get("fill") is False else -math.inf}
    if "block_table" in declared:
        blocks = batch * ROOM // PAGE_SIZE
        k = torch.randn(blocks, PAGE_SIZE, HEADS, HEAD_DIM, device=device)
        options["block_table"] = torch.randperm(blocks).view(batch, -1).to(device, declared["block_table"])
    if "seq_lens" in declared:
        most = ROOM if "block_table" in declared else k.shape[1]
        options["seq_lens"] = torch.randint(most + 1, (batch,), dtype=declared["seq_lens"]).to(device)
    if "seq_starts" in declared:
        options["seq_starts"] = torch.randint(3, (batch,), dtype=declared["seq_starts"]).to(device)
    if "k_scale" in declared:
        options["k_scale"] = torch.rand(k.shape[:3], device=device)
    k = k.to(declared.get("k_dtype", dtype))
    return (q if q_len > 1 else q[:, 0]), k, options


def expected(q, k, out, options):
    """What the loop kernel makes of it."""
    tensors = Tensors(q, k, *(options.get(name) for name in Tensors._fields[2:]))
    wanted = torch.full_like(out, math.nan)
    loop_scores(tensors, wanted, causal=options["causal"], fill=options["fill"])
    return wanted


@needs_kernels
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_steps_compile_validate_and_wait_for_nothing(device, monkeypatch):
    monkeypatch.setenv("TUNEDQK_MODE", "cached")
    for declared in DECLARED.values():
        warmup(**(SHAPE | declared), device=place(device))
    for owner, name in (
        (tune, "tune"),
        (Door, "build"),
        (Validator, "check"),
        (launch, "build"),
        (ready, "make_ready"),
    ):
        monkeypatch.setattr(owner, name, lambda *_, name=name, **__: pytest.fail(name))
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **_: pytest.fail("compiled"))
    chance = random.Random(1)  # noqa: S311
    for i in range(200 if ON_GPU else 15):
        declared = list(DECLARED.values())[i % len(DECLARED)]
        q, k, options = step(chance, declared, device)
        length = ROOM if "block_table" in options else k.shape[1]
        rows = (q.shape[0], 2 * HEADS, *([q.shape[1]] if q.dim() == 4 else []))
        out = torch.full((*rows, length), math.nan, dtype=q.dtype, device=device)
        if ON_GPU:
            torch.cuda.set_sync_debug_mode("error")
        try:
            qk_score(q, k, out=out, **options)
        finally:
            if ON_GPU:
                torch.cuda.set_sync_debug_mode("default")
        with monkeypatch.context() as allowed:
            allowed.setattr(triton.knobs.runtime, "jit_post_compile_hook", None)  # the loop kernel's own
            torch.testing.assert_close(out, expected(q, k, out, options), equal_nan=True, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in DECLARED if "paged" in name or name == "ragged"])
def test_lengths_and_tables_change_between_the_replays_of_a_graph(device, monkeypatch, name):
    monkeypatch.setenv("TUNEDQK_MODE", "cached")
    declared = DECLARED[name]
    warmup(**(SHAPE | declared))
    chance = random.Random(2)  # noqa: S311
    q, k, options = step(chance, declared, device, batch=3)
    queries = (q.shape[1],) if q.dim() == 4 else ()
    length = ROOM if "block_table" in options else k.shape[1]
    out = torch.full((3, 2 * HEADS, *queries, length), math.nan, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q.mul_(1)  # torch warns of an empty graph
        qk_score(q, k, out=out, **options)
    for _ in range(5):
        for argument, other in options.items():
            if argument == "block_table":
                other.copy_(other.flatten()[torch.randperm(other.numel(), device=device)].view_as(other))
            elif isinstance(other, torch.Tensor):
                other.copy_(torch.randint(length + 1, other.shape))
        out.fill_(math.nan)
        graph.replay()
        torch.testing.assert_close(out, expected(q, k, out, options), equal_nan=True, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"q_len": 65}, ValueError, "q_len: expected from 1 to 64, got 65"),
        ({"page_size": 257}, ValueError, "page_size: expected from 0 to 256, got 257"),
        ({"page_size": 16}, ValueError, "page_size: expected one with block_table, and none without, got 16"),
        (PAGED | {"seq_lens": None}, ValueError, "seq_lens: expected a tensor, since block_table is given"),
        ({"seq_lens": torch.float32}, TypeError, "seq_lens: expected dtype int32 or int64, got torch.float32"),
        ({"seq_starts": 4}, TypeError, "seq_starts: expected a torch.dtype, got int"),
        ({"k_dtype": torch.float16}, TypeError, "k: expected q's dtype"),
        ({"k_scale": "block"}, ValueError, "k_scale: expected 'head', 'token' or None, got 'block'"),
        ({"k_scale": "head"}, ValueError, "k_scale: expected None for keys that are not float8"),
        ({"causal": 1}, TypeError, "causal: expected a bool, got int"),
        ({"fill": None}, TypeError, "fill: expected a bool, got NoneType"),
    ],
)
def test_warmup_of_what_cannot_be_called(changed, error, message):
    with pytest.raises(error, match=message):
        warmup(**(SHAPE | changed))
