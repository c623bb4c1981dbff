"""Launches kernels on tensors that end where their allocations end: run by test_sanitizer under compute-sanitizer.

With `faulty` as its argument it launches a kernel that reads keys past the end of the cache and stores none of what
it read: no result shows that fault.
"""

from __future__ import annotations

import sys

import torch
from mutants import BF16, FP16, FP32, build_mutant, variant_of

from tunedqk import launch
from tunedqk.config import KernelConfig
from tunedqk.launch import geometry

READ_PAST_THE_END = (("(pos < left)[:, None] & (offs_d", "(offs_d"),)
LENGTHS = (1, 100, 257)
CASES = [  # by sum and by dot, in one tile and in several, with a tail of head_dim, aligned or not
    (variant_of(FP32, head_dim=17), KernelConfig(64, 64, num_warps=4)),
    (variant_of(BF16, head_dim=128), KernelConfig(128, 128, num_warps=8, LOAD_HINT="evict_first")),
    (variant_of(BF16, FP32, head_dim=80, group=5), KernelConfig(128, 64, num_warps=4, num_stages=3)),
    (variant_of(FP16, head_dim=128, group=4), KernelConfig(64, 64, num_warps=4)),
    (variant_of(FP32, head_dim=300), KernelConfig(32, 32, num_warps=4)),
    (variant_of(BF16, head_dim=33, group=2, aligned=False), KernelConfig(128, 128, num_warps=4)),
]


def main(faulty):
    for variant, config in CASES:
        binary = build_mutant(variant, config, READ_PAST_THE_END if faulty else ())
        if not faulty:
            binary = launch.build(torch.device("cuda"), variant, config)
        for seq_len in LENGTHS:
            q = torch.randn(2, 3 * variant.group, variant.head_dim, device="cuda").to(variant.dtype)
            k = torch.randn(2, seq_len, 3, variant.head_dim, device="cuda").to(variant.dtype)
            out = torch.empty(2, 3 * variant.group, seq_len + 7, dtype=variant.out_dtype, device="cuda")
            for length in (seq_len, seq_len + 7):
                view = out[..., :length]
                binary.launch(q, k, view, 1.0, 0.0, geometry(q, k, view, "NHD", fill_tail=True))
            torch.cuda.synchronize()
    print("launched")


if __name__ == "__main__":
    main("faulty" in sys.argv[1:])
