"""What one call leaves behind for the next with the same shapes: nothing that depends on addresses, modes or luck."""

from __future__ import annotations

import pytest
import torch
from reference import assert_scores, config_for, make_inputs

from tunedqk import call, ready
from tunedqk.score import qk_score
from tunedqk.tensors import Tensors


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch):
    monkeypatch.setattr(call, "_calls", {})


def of(q, k, out=None, **arguments):
    named = {"layout": "NHD", "fill": None, "out_dtype": None, "config": None} | arguments
    return call.call_of(Tensors(q, k), causal=False, out=out, **named)


def tensors(seq_len=8, dtype=torch.float32):
    return torch.ones(2, 4, 16, dtype=dtype), torch.ones(2, seq_len, 2, 16, dtype=dtype)


def test_the_same_shapes_are_worked_out_once(monkeypatch):
    first = of(*tensors())
    monkeypatch.setattr(call, "check", None)
    assert of(*tensors()) is first


def others():
    q, k = tensors()
    out = torch.empty(2, 4, 8)
    yield "dtype", (tensors(dtype=torch.float16), {})
    yield "seq_len", (tensors(9), {})
    yield "strides of q", ((torch.ones(2, 8, 16)[:, ::2], k), {})
    yield "strides of k", ((q, torch.ones(2, 16, 2, 16)[:, ::2]), {})
    yield "layout", ((q, k), {"layout": "HND"})
    yield "fill", ((q, k), {"fill": 0.0})
    yield "out_dtype", ((q, k), {"out_dtype": torch.float16})
    yield "out", ((q, k, out), {})


@pytest.mark.parametrize(("arguments", "named"), [pytest.param(*case, id=name) for name, case in others()])
def test_what_differs_is_worked_out_anew(arguments, named):
    first = of(*tensors())
    if named.get("layout") == "HND":
        arguments = (arguments[0], torch.ones(2, 2, 8, 16))
        same_shape = of(arguments[0], arguments[1].transpose(1, 2))
        assert of(*arguments, **named) is not same_shape
    assert of(*arguments, **named) is not first
    assert of(*arguments, **named) is of(*arguments, **named)


def test_out_and_its_strides_count():
    q, k = tensors()
    fits = of(q, k, torch.empty(2, 4, 8))
    assert of(q, k, torch.empty(2, 4, 9)) is not fits
    assert of(q, k, torch.empty(2, 4, 16)[..., ::2]) is not fits
    assert of(q, k, torch.empty(2, 4, 8, dtype=torch.float16)) is not fits


def test_alignment_is_of_the_addresses_at_hand():
    memory = torch.ones(2 * 4 * 16 + 1)
    aligned, shifted = memory[:-1].view(2, 4, 16), memory[1:].view(2, 4, 16)
    _, k = tensors()
    known = of(aligned, k)
    assert of(shifted, k) is known
    assert known.slot(Tensors(aligned, k)).variant.aligned
    assert not known.slot(Tensors(shifted, k)).variant.aligned
    uneven = torch.ones(2, 8, 2, 17)[..., :16]
    assert not of(aligned, uneven).slot(Tensors(aligned, uneven)).variant.aligned


def test_memory_is_compared_anew():
    memory = torch.ones(2 * 8 * 2 * 16 + 2 * 4 * 8)
    q, _ = tensors()
    k, out = memory[: 2 * 8 * 2 * 16].view(2, 8, 2, 16), memory[2 * 8 * 2 * 16 :].view(2, 4, 8)
    scores = qk_score(q, k, out=out)
    assert scores is out
    overlapping = memory[2 * 8 * 2 * 16 - 1 : -1].view(2, 4, 8)
    with pytest.raises(ValueError, match="out: expected memory of its own, got memory that overlaps k"):
        qk_score(q, k, out=overlapping)
    assert qk_score(q, k, out=out) is out
    assert len(call._calls) == 1


def test_a_gradient_is_noticed_though_the_shapes_are_known():
    q, k = tensors()
    qk_score(q, k)
    wanting = q.clone().requires_grad_()
    assert qk_score(wanting, k).requires_grad
    with torch.no_grad():
        assert not qk_score(wanting, k).requires_grad
    assert qk_score(wanting, k).requires_grad
    assert not qk_score(q, k).requires_grad


def test_a_lazily_negated_view_is_refused_though_the_shapes_are_known():
    q, k = tensors()
    qk_score(q, k)
    for arguments in ((torch._neg_view(q), k), (q, torch._neg_view(k)), (q, k, torch._neg_view(torch.empty(2, 4, 8)))):
        with pytest.raises(ValueError, match="lazily negated"):
            of(*arguments)


class Lookalike:
    """Everything of a tensor but the type."""

    def __init__(self, tensor):
        self._tensor = tensor

    def __getattr__(self, name):
        return getattr(self._tensor, name)


@pytest.mark.parametrize("name", ["q", "k", "out"])
def test_what_only_looks_like_a_tensor_is_refused_though_the_shapes_are_known(name):
    arguments = dict(zip(("q", "k"), tensors(), strict=True)) | {"out": torch.empty(2, 4, 8)}
    of(**arguments)
    with pytest.raises(TypeError, match=f"{name}: expected a torch.Tensor, got Lookalike"):
        of(**arguments | {name: Lookalike(arguments[name])})


def test_calls_are_not_remembered_without_end(monkeypatch):
    monkeypatch.setattr(call, "MAX_CALLS", 4)
    for seq_len in range(1, 20):
        of(*tensors(seq_len))
        assert len(call._calls) <= 4
    assert of(*tensors(19)) is of(*tensors(19))


def test_a_refused_call_leaves_nothing():
    q, k = tensors()
    for bad in ({"layout": ["NHD"]}, {"config": {}}, {"out_dtype": [torch.float32]}):
        with pytest.raises((TypeError, ValueError), match=next(iter(bad))):
            of(q, k, **bad)
    with pytest.raises(ValueError, match="batch"):
        of(q[:1], k)
    assert call._calls == {}


def test_only_what_is_ready_is_bound(device, monkeypatch):
    """What stands in during a capture serves that call alone; what a warm call launches, it does not look up."""
    monkeypatch.setattr(ready, "binaries", {})
    q, k = make_inputs(1, 2, 1, 20, 16, torch.float32, device)
    config = config_for(16, torch.float32, 2)
    make_ready = ready.make_ready

    def stand_in(slot):
        binary = make_ready(slot)
        del ready.binaries[slot]
        return binary

    monkeypatch.setattr(ready, "make_ready", stand_in)
    assert_scores(qk_score(q, k, config=config), q, k)
    (known,) = call._calls.values()
    assert known.bound == [None, None]
    monkeypatch.setattr(ready, "make_ready", make_ready)
    assert_scores(qk_score(q, k, config=config), q, k)
    assert [one is not None for one in known.bound] == [False, True]
    monkeypatch.setattr(ready, "make_ready", None)
    monkeypatch.setattr(ready, "binaries", None)
    assert_scores(qk_score(q, k, config=config), q, k)
