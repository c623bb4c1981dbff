"""Each argument of a ragged, paged or quantised call that does not fit is named; nothing is launched or written."""

from __future__ import annotations

import pytest
import torch

from tunedqk import ready
from tunedqk.score import qk_score

E4M3 = torch.float8_e4m3fn


def good(device):
    """A paged call of 4 queries, with keys that are quantised, without fault."""
    return {
        "q": torch.randn(2, 4, 4, 16, device=device),
        "k": torch.randn(6, 8, 2, 16, device=device).to(E4M3),
        "seq_lens": torch.tensor([9, 3], device=device),
        "seq_starts": torch.tensor([1, 0], device=device),
        "block_table": torch.tensor([[0, 3], [5, 1]], device=device),
        "k_scale": torch.rand(6, 8, 2, device=device),
        "out": torch.full((2, 4, 4, 16), -7.25, device=device),
    }


CASES = {
    "65 queries": ({"q": torch.zeros(2, 65, 4, 16)}, ValueError, "q: expected q_len of at most 64"),
    "pages of 0": ({"k": torch.zeros(6, 0, 2, 16).to(E4M3)}, ValueError, "k: expected page_size from 1 to 256"),
    "pages of 257": ({"k": torch.zeros(6, 257, 2, 16).to(E4M3)}, ValueError, "k: expected page_size .*, got 257"),
    "k of another dtype": ({"k": torch.zeros(6, 8, 2, 16).half()}, TypeError, "k: expected q's dtype torch.float32 or"),
    "no seq_lens": ({"seq_lens": None}, ValueError, "seq_lens: expected a tensor, since block_table is"),
    "seq_lens a list": ({"seq_lens": [9, 3]}, TypeError, "seq_lens: expected a torch.Tensor, got list"),
    "seq_lens of 3": ({"seq_lens": torch.ones(3).int()}, ValueError, r"seq_lens: expected shape .*, got \[3\]"),
    "seq_lens a float": ({"seq_lens": torch.ones(2)}, TypeError, "seq_lens: expected dtype int32 or int64, got"),
    "seq_lens elsewhere": (
        {"seq_lens": torch.ones(2, dtype=torch.int32, device="meta")}, ValueError, "seq_lens: expected q's device",
    ),
    "seq_lens by query, causal": (
        {"seq_lens": torch.ones(2, 4).int(), "causal": True}, ValueError, r"seq_lens: expected shape \[2\] where",
    ),
    "seq_starts by query": (
        {"seq_starts": torch.ones(2, 4).int()}, ValueError, r"seq_starts: expected shape \[2\], got \[2, 4\]",
    ),
    "seq_starts of bytes": ({"seq_starts": torch.ones(2).byte()}, TypeError, "seq_starts: expected dtype int32 or"),
    "block_table of one dim": (
        {"block_table": torch.ones(2).int()}, ValueError, r"block_table: expected shape \[2, max_blocks\], got \[2\]",
    ),
    "block_table of 3 requests": ({"block_table": torch.ones(3, 2).int()}, ValueError, r"block_table: .* got \[3, 2\]"),
    "block_table of floats": ({"block_table": torch.ones(2, 2)}, TypeError, "block_table: expected dtype int32 or"),
    "block_table transposed": (
        {"block_table": torch.ones(3, 2).int().T}, ValueError, "block_table: expected a contiguous last dimension, got",
    ),
    "k_scale of half": ({"k_scale": torch.rand(2).half()}, TypeError, "k_scale: expected dtype float32, got"),
    "k_scale by batch": ({"k_scale": torch.rand(2, 9, 2)}, ValueError, r"k_scale: expected .*, got \[2, 9, 2\]"),
    "k_scale a string": ({"k_scale": "1"}, TypeError, "k_scale: expected a number or None, got str"),
    "k_scale of plain keys": (
        {"k": torch.zeros(6, 8, 2, 16)}, ValueError, "k_scale: expected None for keys that are not float8, got one",
    ),
    "k_scale with a gradient": (
        {"k_scale": torch.rand(2, requires_grad=True), "out": None}, ValueError, "k_scale: expected no gradient",
    ),
    "causal a number": ({"causal": 1}, TypeError, "causal: expected a bool, got int"),
    "out of one query": ({"out": torch.zeros(2, 4, 16)}, ValueError, r"out: expected shape \[2, 4, 4, any length\]"),
}  # fmt: skip


@pytest.mark.parametrize(("changed", "error", "message"), CASES.values(), ids=CASES)
def test_what_does_not_fit_is_named(device, changed, error, message):
    arguments = good(device)
    written = arguments["out"]
    for name, value in changed.items():
        movable = isinstance(value, torch.Tensor) and value.device.type == "cpu"
        arguments[name] = value.to(device) if movable else value
    bound = dict(ready.binaries)
    with pytest.raises(error, match=message):
        qk_score(**arguments)
    assert (written == -7.25).all()
    assert ready.binaries == bound


@pytest.mark.parametrize("name", ["seq_lens", "seq_starts", "block_table", "k_scale"])
def test_out_may_not_share_memory_with_what_is_read(device, name):
    arguments = good(device)
    shared = torch.zeros(4096, dtype=torch.uint8, device=device)
    tensor = arguments[name]
    view = shared[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    view.copy_(tensor)
    out = shared[: 4 * 512].view(torch.float32).view(2, 4, 4, 16)
    with pytest.raises(ValueError, match=f"out: expected memory of its own, got memory that overlaps {name}"):
        qk_score(**(arguments | {name: view, "out": out}))


def test_a_table_of_more_positions_than_an_int32_counts_is_named(device):
    table = torch.empty(2**28, dtype=torch.int32, device=device).expand(2, -1)
    message = r"block_table: expected max_blocks \* page_size of at most 2147483647, got 2147483648 in \[2, 268435456\]"
    with pytest.raises(ValueError, match=message):
        qk_score(**(good(device) | {"block_table": table}))


def test_a_gpu_without_e4m3_says_so(device, monkeypatch):
    from tunedqk import arguments as checks

    monkeypatch.setattr(checks, "supports", lambda *_: False)
    with pytest.raises(TypeError, match=r"k: expected .*, got torch.float8_e4m3fn \(e4m3 needs sm_89\)"):
        qk_score(**(good(device) | {"scale": 2.0, "out": None, "out_dtype": torch.float16}))
