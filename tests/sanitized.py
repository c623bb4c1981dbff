"""Launches kernels on tensors that end where their allocations end: run by test_sanitizer under compute-sanitizer.

With `faulty` as its argument it launches a kernel that reads keys past the end of the cache and stores none of what
it read: no result shows that fault.
"""

from __future__ import annotations

import sys

import torch
from mutants import BF16, E4M3, FP16, FP32, INT32, INT64, build_mutant, variant_of

from tunedqk import launch
from tunedqk.config import KernelConfig
from tunedqk.inputs import queries_of
from tunedqk.tensors import Tensors
from tunedqk.variant import geometry, strides_aligned

READ_PAST_THE_END = (("inside[:, None] & (offs_d", "(offs_d"),)
LENGTHS = (1, 100, 257)
BATCH, KV_HEADS = 2, 3
NO_BLOCK = 1 << 20  # where a table must not be read
CASES = [  # by sum and by dot, in one tile and in several, with a tail of head_dim, aligned or not
    (variant_of(FP32, head_dim=17, aligned=False), KernelConfig(64, 64, num_warps=4)),
    (variant_of(BF16, head_dim=128), KernelConfig(128, 128, num_warps=8, LOAD_HINT="evict_first")),
    (variant_of(BF16, FP32, head_dim=80, group=5), KernelConfig(128, 64, num_warps=4, num_stages=3)),
    (variant_of(FP16, head_dim=128, group=4), KernelConfig(64, 64, num_warps=4)),
    (variant_of(FP32, head_dim=300), KernelConfig(32, 32, num_warps=4)),
    (variant_of(BF16, head_dim=33, group=2, aligned=False), KernelConfig(128, 128, num_warps=4)),
    # Ragged, of several queries with lengths of their own, causal, and paged; where a tile takes several pages, too.
    (variant_of(FP32, head_dim=80, seq_lens=INT32, seq_starts=INT64, fill=False), KernelConfig(32, 32, num_warps=4)),
    (variant_of(FP32, head_dim=64, group=2, rows=8, seq_lens=INT64), KernelConfig(64, 64, num_warps=4)),
    (
        variant_of(BF16, FP32, head_dim=64, group=3, rows=16, seq_lens=INT32, causal=True),
        KernelConfig(128, 64, num_warps=4, num_stages=2),
    ),
    (variant_of(BF16, head_dim=80, seq_lens=INT32, block_table=INT64, page_size=16), KernelConfig(64, 64, num_warps=4)),
    (
        variant_of(
            BF16, head_dim=128, group=4, fp8=E4M3, k_scale="token", seq_lens=INT32, block_table=INT32, page_size=64
        ),
        KernelConfig(64, 64, num_warps=4),
    ),
]


def tensors_of(variant, seq_len):
    """A call's tensors. The last request sees all positions, and its pages are a pool's last."""
    queries = (max(queries_of(variant) - 1, 1),) if variant.several else ()  # so that rows of the last block are free
    q = torch.randn(BATCH, *queries, KV_HEADS * variant.group, variant.head_dim, device="cuda").to(variant.dtype)
    lens = torch.tensor([seq_len // 2, seq_len], device="cuda")
    starts = torch.tensor([0, seq_len // 3], device="cuda")
    table, shape = None, (BATCH, seq_len)
    if variant.page_size:
        blocks = -(-seq_len // variant.page_size)
        table = torch.arange(BATCH * blocks, device="cuda").view(BATCH, blocks)
        table[0, -(-(seq_len // 2) // variant.page_size) :] = NO_BLOCK
        table, shape = table.to(variant.block_table), (BATCH * blocks, variant.page_size)
    k = torch.randn(*shape, KV_HEADS, variant.head_dim, device="cuda").to(variant.k_dtype)
    k_scale = torch.rand(*shape, KV_HEADS, device="cuda") if variant.k_scale else None
    if variant.several and not variant.causal:
        lens = lens[:, None].repeat(1, *queries)
    return Tensors(
        q,
        k,
        lens.to(variant.seq_lens) if variant.seq_lens else None,
        starts.to(variant.seq_starts) if variant.seq_starts else None,
        table,
        k_scale,
    )


def main(faulty):
    for variant, config in CASES:
        if variant.fp8 == E4M3 and torch.cuda.get_device_capability() < (8, 9):
            continue
        binary = build_mutant(variant, config, READ_PAST_THE_END if faulty else ())
        if not faulty:
            binary = launch.build(torch.device("cuda"), variant, config)
        for seq_len in LENGTHS:
            tensors = tensors_of(variant, seq_len)
            rows = (BATCH, tensors.q.shape[-2], *tensors.q.shape[1:-2])
            out = torch.empty(*rows, seq_len + 7, dtype=variant.out_dtype, device="cuda")
            for length in (seq_len, seq_len + 7):
                view = out[..., :length]
                sizes = geometry(tensors, view, "NHD", fill_tail=variant.fill)
                assert strides_aligned(sizes, variant.dtype, variant.k_dtype) or not variant.aligned
                binary.launch(tensors, view, 1.0, 0.0, binary.grid(sizes))
            torch.cuda.synchronize()
    print("launched")


if __name__ == "__main__":
    main("faulty" in sys.argv[1:])
