"""What the README shows works as it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from reference import assert_scores, scores64

README = Path(__file__).parents[1] / "README.md"


@pytest.fixture
def shown(cache_dir, monkeypatch):
    """The variables that are left when all of its Python has run."""
    monkeypatch.setenv("TUNEDQK_MODE", "cached")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # without a GPU by torch operations, as for its reader
    torch.manual_seed(3)
    names = {}
    for code in re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL):
        exec(code, names)  # noqa: S102
    return names


def test_the_selection_is_that_of_float64(shown):
    q, keys, kv_heads = shown["q"], shown["keys"], shown["kv_heads"]
    assert_scores(shown["scores"], q, keys)
    exact, _ = scores64(q, keys)
    expected = exact.unflatten(1, (kv_heads, -1)).amax(dim=2).topk(64).indices
    assert torch.equal(shown["selected"].sort().values, expected.sort().values)
    for b, h, n in ((0, 0, 0), (1, 7, 63), (0, 3, 10)):
        assert torch.equal(shown["chosen"][b, n, h], keys[b, shown["selected"][b, h, n], h])


def test_the_padded_result_is_float32_with_zeros_past_the_end(shown):
    padded, seq_len = shown["padded"].flatten(2), shown["seq_len"]
    assert_scores(padded[..., :seq_len], shown["q"], shown["k_nhd"][:, :seq_len])
    assert not padded[..., seq_len:].any()
