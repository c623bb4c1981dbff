"""The one float64 reference of the tests, how far from it a result may be, and makers of inputs."""

from __future__ import annotations

import math

import torch

from tunedqk.config import KernelConfig, default_config, tuning_key
from tunedqk.device import interpreting

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def gamma(n):
    """Relative error of n fp32 roundings in a row, u = 2^-24 (Higham, 3.1)."""
    return n * 2.0**-24 / (1 - n * 2.0**-24)


def scores64(q, k, scale=1.0, layout="NHD"):
    """Scores and |scale| * sum|q||k| in float64, both [batch, q_heads, seq_len]; head h reads KV head h // group."""
    keys = k if layout == "NHD" else k.transpose(1, 2)  # [batch, seq_len, kv_heads, head_dim]
    kv_head = torch.arange(q.shape[1], device=q.device) // (q.shape[1] // keys.shape[2])
    keys = keys.double()[:, :, kv_head]
    scores = torch.einsum("bhd,blhd->bhl", q.double(), keys) * scale
    return scores, torch.einsum("bhd,blhd->bhl", q.double().abs(), keys.abs()) * abs(scale)


def assert_scores(got, q, k, scale=1.0, layout="NHD"):
    """Within 2 * gamma(head_dim + 2) * magnitude of float64, and then rounded once to the output's dtype.

    Where the inputs are not finite, NaN and Inf must be exactly where they belong.
    """
    expected, magnitude = scores64(q, k, scale, layout)
    assert got.shape == expected.shape
    bound = 2 * gamma(q.shape[-1] + 2) * magnitude
    low, high = (expected - bound).to(got.dtype), (expected + bound).to(got.dtype)  # rounding keeps the order
    same = (got == expected.to(got.dtype)) | (got.isnan() & expected.isnan())
    right = torch.where(magnitude.isfinite(), (low <= got) & (got <= high), same)
    if not right.all():
        b, h, pos = (~right).nonzero()[0].tolist()
        value, least, most = (x[b, h, pos].item() for x in (got, low, high))
        raise AssertionError(
            f"{(~right).sum().item()} of {right.numel()} scores are wrong, the first at batch {b}, head {h}, "
            f"position {pos}: {value!r} is not in [{least!r}, {most!r}]"
        )


def make_inputs(batch, q_heads, kv_heads, seq_len, head_dim, dtype, device, layout="NHD"):
    """Random q and k, the same numbers on every device."""
    q = torch.randn(batch, q_heads, head_dim).to(device, dtype)
    k = torch.randn(batch, seq_len, kv_heads, head_dim).to(device, dtype)
    return q, k if layout == "NHD" else k.transpose(1, 2).contiguous()


def poisoned(*shape, dtype, device):
    """An output that shows what was not written."""
    return torch.full(shape, math.nan, dtype=dtype, device=device)


def config_for(head_dim, dtype, group, seq_len=512):
    """A config that suits the shape without tuning; under the interpreter a small one, for several chunks."""
    if interpreting():
        return KernelConfig(32, 32, num_warps=4)
    return default_config(tuning_key(seq_len, head_dim, name_of(dtype), group))


def seed_case(head_dim, device):
    """The case of the report that the project grew from: q, k, its padded output, and what torch makes of it."""
    q, k = make_inputs(4, 8, 8, 60, head_dim, torch.float32, device)
    out = poisoned(4, 8, 1, 64, dtype=torch.float32, device=device)
    expected = torch.matmul(k.transpose(1, 2), q[..., None])[..., 0]  # [batch, heads, seq_len]
    return q, k, out, torch.nn.functional.pad(expected, (0, 4)).view(4, 8, 1, 64)
