"""The whole call in float64, request by request, as plainly as can be; and how far from it a result may be."""

from __future__ import annotations

import math

import torch
from reference import gamma

HIDDEN_BLOCK = 1 << 29  # what a table holds where nothing may be read: no pool has so many blocks


def scores_of(q, k, length, *, scale=1.0, layout="NHD", causal=False, **tensors):
    """Scores, |scale * k_scale| * sum|q||k|, and whether it is seen: [batch, q_heads, q_len, length]."""
    seq_lens, seq_starts, table, k_scale = (
        tensors.get(name) for name in ("seq_lens", "seq_starts", "block_table", "k_scale")
    )
    if layout == "HND":
        k = k.transpose(1, 2)
        q = q.transpose(1, 2) if q.dim() == 4 else q
    q = q.double()[:, None] if q.dim() == 3 else q.double()
    batch, q_len, q_heads, _ = q.shape
    _, rows, kv_heads, _ = k.shape
    head = torch.arange(q_heads, device=q.device) // (q_heads // kv_heads)
    by_token = k_scale is not None and k_scale.dim() == 3
    scores = torch.zeros(batch, q_heads, q_len, length, dtype=torch.float64, device=q.device)
    magnitude, seen = torch.zeros_like(scores), torch.zeros_like(scores, dtype=torch.bool)
    for b in range(batch):
        room = rows if table is None else table.shape[1] * rows
        for i in range(q_len):
            end = room if seq_lens is None else int(seq_lens[b] if seq_lens.dim() == 1 else seq_lens[b, i])
            end -= (q_len - 1 - i) * causal
            begin = 0 if seq_starts is None else int(seq_starts[b])
            if end <= begin:
                continue
            at = torch.arange(begin, end, device=q.device)
            place = (b, at) if table is None else (table[b].long()[at // rows], at % rows)
            keys = k[place].double()[:, head]  # [positions, q_heads, head_dim]
            factor = torch.ones((), dtype=torch.float64, device=q.device) * scale
            if k_scale is not None:
                factor = factor * (
                    k_scale[place].double().T[head] if by_token else k_scale.double().expand(kv_heads)[head, None]
                )
            scores[b, :, i, begin:end] = torch.einsum("hd,lhd->hl", q[b, i], keys) * factor
            magnitude[b, :, i, begin:end] = torch.einsum("hd,lhd->hl", q[b, i].abs(), keys.abs()) * factor.abs()
            seen[b, :, i, begin:end] = True
    return scores, magnitude, seen


def assert_call(got, before, q, k, *, fill=-math.inf, **arguments):
    """Seen scores within the bound and rounded once; hidden ones are the fill or, for None, what was there before.

    Where the inputs are not finite, NaN and Inf must be exactly where they belong.
    """
    expected, magnitude, seen = scores_of(q, k, got.shape[-1], **arguments)
    shaped = got if got.dim() == 4 else got[:, :, None]
    before = before if before.dim() == 4 else before[:, :, None]
    bound = 2 * gamma(q.shape[-1] + 2 + (arguments.get("k_scale") is not None)) * magnitude
    low, high = (expected - bound).to(got.dtype), (expected + bound).to(got.dtype)
    same = (shaped == expected.to(got.dtype)) | (shaped.isnan() & expected.isnan())
    right = torch.where(magnitude.isfinite(), (low <= shaped) & (shaped <= high), same)
    untouched = (shaped == before) | (shaped.isnan() & before.isnan())
    right = torch.where(seen, right, untouched if fill is None else shaped == fill)
    assert right.all(), f"{(~right).sum().item()} wrong, the first at {(~right).nonzero()[0].tolist()}"
