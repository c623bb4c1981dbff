"""The benchmark compares what gives the same scores."""

from __future__ import annotations

import peers
import pytest
import torch
from fixed import fixed_triton
from reference import assert_scores


def scores_of(call, q, k):
    """A peer's scores as [batch, q_heads, seq_len], whatever form it gives them in."""
    scores = call(q, k)
    scores = torch.stack(scores) if isinstance(scores, list) else scores
    if call is peers.multiply_and_sum:
        scores = scores.permute(0, 2, 3, 1)
    return scores.flatten(1, 2) if scores.ndim == 4 else scores


CALLS = (peers.bmm_per_request, peers.matmul_hnd, peers.einsum, peers.multiply_and_sum, fixed_triton)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter stores bfloat16 wrongly
@pytest.mark.parametrize(("group", "seq_len", "head_dim"), [(1, 70, 128), (4, 64, 80), (20, 65, 64)])
def test_peers_compute_the_same_scores(device, call, dtype, group, seq_len, head_dim):
    q = torch.randn(2, 2 * group, head_dim, device=device).to(dtype)
    k = torch.randn(2, seq_len, 2, head_dim, device=device).to(dtype)
    scores = scores_of(call, q, k)
    assert scores.dtype == dtype
    if call is peers.matmul_hnd:  # the same memory, as another layout
        k = k.view(2, 2, seq_len, head_dim).transpose(1, 2)
    assert_scores(scores, q, k)


def test_every_peer_of_the_benchmark_is_one_of_these():
    assert {getattr(call, "__wrapped__", call) for call in peers.PEERS.values()} == set(CALLS)
