"""The loop kernel, by which the fast one is judged, against float64."""

from __future__ import annotations

import pytest
import torch
from reference import DTYPES, assert_scores, gamma, make_inputs, name_of, poisoned, scores64, seed_case

from tunedqk.kernels.loop import loop_scores
from tunedqk.tensors import Tensors

HEAD_DIMS = (1, 16, 80, 576)


def _assert_loop_scores(q, k, scale, out=None):
    batch, q_heads, _ = q.shape
    if out is None:
        out = poisoned(batch, q_heads, k.shape[1], dtype=torch.float32, device=q.device)
    magnitude = loop_scores(Tensors(q, k), out, scale=scale)
    assert_scores(out, q, k, scale)
    _, expected = scores64(q, k, scale)
    assert magnitude.dtype == torch.float32
    assert ((magnitude - expected).abs() <= gamma(q.shape[-1] + 2) * expected).all()


@pytest.mark.parametrize("head_dim", [pytest.param(d, id=f"head_dim {d}") for d in HEAD_DIMS])
@pytest.mark.parametrize("dtype", [pytest.param(t, id=name_of(t)) for t in DTYPES])
def test_gqa_agrees_with_float64(dtype, head_dim, device):
    _assert_loop_scores(*make_inputs(2, 6, 3, 37, head_dim, dtype, device), scale=-0.37)


@pytest.mark.parametrize("kv_heads", [pytest.param(6, id="mha"), pytest.param(1, id="mqa")])
def test_other_groups_agree_with_float64(kv_heads, device):
    _assert_loop_scores(*make_inputs(3, 6, kv_heads, 65, 24, torch.float32, device), scale=1.0)


@pytest.mark.parametrize("dtype", [pytest.param(t, id=name_of(t)) for t in DTYPES])
def test_strides(dtype, device):
    fused = torch.randn(2, 33, 4 * 16 + 2 * 16 + 1).to(device, dtype)
    q = fused[:, -1, : 4 * 16].unflatten(-1, (4, 16))
    k = fused[..., 4 * 16 : -1].unflatten(-1, (2, 16))
    assert not q.is_contiguous()
    assert not k.is_contiguous()
    out = poisoned(33, 2, 4, dtype=torch.float32, device=device).permute(1, 2, 0)
    _assert_loop_scores(q, k, 0.37, out)


def test_expanded_heads(device):
    q, k = make_inputs(2, 6, 1, 33, 16, torch.float32, device)
    _assert_loop_scores(q, k.expand(-1, -1, 3, -1), scale=1.0)


@pytest.mark.parametrize("head_dim", [pytest.param(d, id=f"head_dim {d}") for d in (16, 64, 128)])
def test_the_seeds_case(head_dim, device):
    q, k, out, expected = seed_case(head_dim, device)
    scores = out.fill_(0.0).view(4, 8, -1)[..., :60]
    loop_scores(Tensors(q, k), scores)
    assert_scores(scores, q, k)
    assert torch.allclose(out, expected, atol=1e-5)
