"""Bad input is a TypeError or ValueError that names argument, expected and got; nothing is launched or written."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import nothing_bound
from reference import assert_scores, config_for

from tunedqk import compute, launch, ready
from tunedqk.config import KernelConfig
from tunedqk.score import qk_score

CONFIG = config_for(16, torch.float32, 2)


def good_call(device):
    """A call without fault: batch 2, 4 query heads, 2 KV heads, 5 positions, head_dim 16, an out of length 7."""
    return SimpleNamespace(
        q=torch.randn(2, 4, 16, device=device),
        k=torch.randn(2, 5, 2, 16, device=device),
        out=torch.full((2, 4, 7), -7.25, device=device),
        config=CONFIG,
    )


def _set(**changes):
    """A case that replaces arguments: by a value, or by what a function makes of the good call."""

    def change(call):
        made = {name: value(call) if callable(value) else value for name, value in changes.items()}
        vars(call).update(made)

    return change


def _in_one_buffer(call, name, shift):
    """Put `name` and out into one storage, out `shift` elements behind the start of the other."""
    tensor = getattr(call, name)
    buffer = torch.zeros(tensor.numel() + shift + call.out.numel() + 16, device=tensor.device)
    setattr(call, name, buffer[: tensor.numel()].view(tensor.shape).copy_(tensor))
    call.out = buffer[shift : shift + call.out.numel()].view(call.out.shape)


def _out_over_start_of_q(call):
    buffer = torch.zeros(300, device=call.q.device)
    call.out = buffer[: call.out.numel()].view(call.out.shape)
    call.q = buffer[call.out.numel() - 1 :][: call.q.numel()].view(call.q.shape)


def _case(name, error, expected, got, change):
    return pytest.param(change, error, expected, got, id=name)


def _no_gradient(x):
    return x.clone().requires_grad_()


CASES = [
    # Not tensors at all.
    _case("q a list", TypeError, "q: expected a torch.Tensor", "list", _set(q=[[1.0]])),
    _case("q None", TypeError, "q: expected a torch.Tensor", "NoneType", _set(q=None)),
    _case("q a numpy array", TypeError, "q: expected a torch.Tensor", "ndarray", _set(q=np.zeros((2, 4, 16)))),
    _case("k a float", TypeError, "k: expected a torch.Tensor", "float", _set(k=1.0)),
    _case("out a list", TypeError, "out: expected a torch.Tensor", "list", _set(out=[])),
    # Shapes.
    _case("q of two dims", ValueError, "q: expected shape", "[4, 16]", _set(q=lambda c: c.q[0])),
    _case("q of five dims", ValueError, "q: expected shape", "[1, 2, 1, 4, 16]", _set(q=lambda c: c.q[None, :, None])),
    _case("k of three dims", ValueError, "k: expected shape", "[5, 2, 16]", _set(k=lambda c: c.k[0])),
    _case("k of five dims", ValueError, "k: expected shape", "[1, 2, 5, 2, 16]", _set(k=lambda c: c.k[None])),
    _case("batches that differ", ValueError, "k: expected q's batch 2", "got 1", _set(k=lambda c: c.k[:1])),
    _case("head_dims that differ", ValueError, "k: expected q's head_dim 16", "got 8", _set(k=lambda c: c.k[..., :8])),
    _case("head_dim 0", ValueError, "q: expected head_dim from 1 to 576", "got 0",
          _set(q=lambda c: c.q[..., :0], k=lambda c: c.k[..., :0])),
    _case("head_dim 577", ValueError, "q: expected head_dim from 1 to 576", "got 577",
          _set(q=lambda c: c.q.new_zeros(2, 4, 577), k=lambda c: c.k.new_zeros(2, 5, 2, 577))),
    _case("q_heads no multiple", ValueError, "multiple of kv_heads 2", "got 3", _set(q=lambda c: c.q[:, :3], out=None)),
    _case("fewer q_heads than kv_heads", ValueError, "multiple of kv_heads 2", "got 1",
          _set(q=lambda c: c.q[:, :1], out=None)),
    _case("no kv_heads", ValueError, "multiple of kv_heads 0", "got 4", _set(k=lambda c: c.k[:, :, :0])),
    _case("the other layout", ValueError, "multiple of kv_heads 5", "got 4", _set(layout="HND", out=None)),
    # dtypes.
    _case("float64", TypeError, "q: expected dtype float32, float16, bfloat16", "torch.float64",
          _set(q=lambda c: c.q.double(), k=lambda c: c.k.double())),
    _case("int32", TypeError, "q: expected dtype", "torch.int32", _set(q=lambda c: c.q.int(), k=lambda c: c.k.int())),
    _case("bool", TypeError, "q: expected dtype", "torch.bool", _set(q=lambda c: c.q.bool(), k=lambda c: c.k.bool())),
    _case("complex64", TypeError, "q: expected dtype", "torch.complex64",
          _set(q=lambda c: c.q.cfloat(), k=lambda c: c.k.cfloat())),
    _case("mixed dtypes", TypeError, "k: expected q's dtype torch.float32", "torch.float16",
          _set(k=lambda c: c.k.half())),
    _case("mixed 16-bit dtypes", TypeError, "k: expected q's dtype torch.bfloat16", "torch.float16",
          _set(q=lambda c: c.q.bfloat16(), k=lambda c: c.k.half())),
    _case("int8 keys", TypeError, "k: expected q's dtype", "torch.int8", _set(k=lambda c: c.k.to(torch.int8))),
    _case("out of int32", TypeError, "out: expected dtype", "torch.int32", _set(out=lambda c: c.out.int())),
    _case("out of float64", TypeError, "out: expected dtype", "torch.float64", _set(out=lambda c: c.out.double())),
    _case("out_dtype float64", TypeError, "out_dtype: expected float32", "torch.float64",
          _set(out=None, out_dtype=torch.float64)),
    _case("out_dtype a string", TypeError, "out_dtype: expected float32", "float32",
          _set(out=None, out_dtype="float32")),
    _case("out_dtype a list", TypeError, "out_dtype: expected float32", "[]", _set(out=None, out_dtype=[])),
    _case("out_dtype that disagrees", ValueError, "out: expected out_dtype torch.float16", "torch.float32",
          _set(out_dtype=torch.float16)),
    # Devices.
    _case("k elsewhere", ValueError, "k: expected q's device", "meta", _set(k=lambda c: c.k.to("meta"))),
    _case("q elsewhere", ValueError, "q: expected a CUDA or CPU device", "meta", _set(q=lambda c: c.q.to("meta"))),
    _case("out elsewhere", ValueError, "out: expected q's device", "meta", _set(out=lambda c: c.out.to("meta"))),
    _case("all on no device", ValueError, "q: expected a CUDA or CPU device", "meta",
          _set(q=lambda c: c.q.to("meta"), k=lambda c: c.k.to("meta"), out=None)),
    # Strides.
    _case("every second of q", ValueError, "q: expected a contiguous last dimension", "(256, 64, 2)",
          _set(q=lambda c: c.q.new_zeros(2, 4, 64)[..., ::2], k=lambda c: c.k.new_zeros(2, 5, 2, 32))),
    _case("k transposed", ValueError, "k: expected a contiguous last dimension", "(160, 32, 1, 2)",
          _set(k=lambda c: c.k.transpose(2, 3).contiguous().transpose(2, 3))),
    _case("k expanded", ValueError, "k: expected a contiguous last dimension", "(10, 2, 1, 0)",
          _set(k=lambda c: c.k[..., :1].contiguous().expand(-1, -1, -1, 16))),
    # out.
    _case("out too short", ValueError, "out: expected shape [2, 4, at least 5]", "[2, 4, 4]",
          _set(out=lambda c: c.out[..., :4])),
    _case("out of two dims", ValueError, "out: expected shape [2, 4, at least 5]", "[4, 7]",
          _set(out=lambda c: c.out[0])),
    _case("out of four dims", ValueError, "out: expected shape [2, 4, at least 5]", "[2, 4, 1, 7]",
          _set(out=lambda c: c.out[:, :, None])),
    _case("out of another batch", ValueError, "out: expected shape [2, 4, at least 5]", "[1, 4, 7]",
          _set(out=lambda c: c.out[:1])),
    _case("out of other heads", ValueError, "out: expected shape [2, 4, at least 5]", "[2, 3, 7]",
          _set(out=lambda c: c.out[:, :3])),
    _case("out expanded", ValueError, "out: expected elements that do not overlap", "(7, 0, 1)",
          _set(out=lambda c: c.out[:, :1].contiguous().expand(-1, 4, -1))),
    _case("out's rows overlap", ValueError, "out: expected elements that do not overlap", "(28, 6, 1)",
          _set(out=lambda c: c.out.as_strided((2, 4, 7), (28, 6, 1)))),
    _case("out over all of k", ValueError, "out: expected memory of its own", "overlaps k",
          lambda call: _in_one_buffer(call, "k", 0)),
    _case("out over k's end", ValueError, "out: expected memory of its own", "overlaps k",
          lambda call: _in_one_buffer(call, "k", call.k.numel() - 1)),
    _case("out over q's end", ValueError, "out: expected memory of its own", "overlaps q",
          lambda call: _in_one_buffer(call, "q", call.q.numel() - 1)),
    _case("out over q's start", ValueError, "out: expected memory of its own", "overlaps q", _out_over_start_of_q),
    # Gradients.
    _case("q needs a gradient", ValueError, "q: expected no gradient where out is given", "requires_grad",
          _set(q=lambda c: _no_gradient(c.q))),
    _case("k needs a gradient", ValueError, "k: expected no gradient where out is given", "requires_grad",
          _set(k=lambda c: _no_gradient(c.k))),
    _case("out needs a gradient", ValueError, "out: expected no gradient where out is given", "requires_grad",
          _set(out=lambda c: _no_gradient(c.out))),
    # The rest.
    _case("layout in lower case", ValueError, "layout: expected one of ('NHD', 'HND')", "'nhd'", _set(layout="nhd")),
    _case("layout None", ValueError, "layout: expected one of", "None", _set(layout=None)),
    _case("layout a list", ValueError, "layout: expected one of", "['NHD']", _set(layout=["NHD"])),
    _case("scale a string", TypeError, "scale: expected a number or None", "str", _set(scale="0.3")),
    _case("scale a tensor", TypeError, "scale: expected a number or None", "Tensor", _set(scale=torch.tensor(0.3))),
    _case("scale a bool", TypeError, "scale: expected a number or None", "bool", _set(scale=True)),
    _case("scale complex", TypeError, "scale: expected a number or None", "complex", _set(scale=1j)),
    _case("scale beyond a float", ValueError, "scale: expected", "got", _set(scale=10**400)),
    _case("fill a string", TypeError, "fill: expected a number or None", "str", _set(fill="-inf")),
    _case("fill a tensor", TypeError, "fill: expected a number or None", "Tensor", _set(fill=torch.tensor(0.0))),
    _case("fill a bool", TypeError, "fill: expected a number or None", "bool", _set(fill=False)),
    _case("config a dict", TypeError, "config: expected a KernelConfig or None", "dict",
          _set(config={"CHUNK_SIZE": 64, "TILE_SIZE": 64, "num_warps": 4})),
    _case("config a string", TypeError, "config: expected a KernelConfig or None", "str", _set(config="chunk 64")),
    _case("config a class", TypeError, "config: expected a KernelConfig or None", "got ",
          _set(config=lambda _: KernelConfig)),
]  # fmt: skip


@pytest.fixture
def nothing_runs(monkeypatch):
    """Whatever would find, launch or replace a kernel fails the test."""

    def fail(*_, **__):
        pytest.fail("something was launched")

    for owner, name in (
        (ready, "make_ready"), (compute, "_by_torch"), (launch.CompiledBinary, "launch"),
        (launch.InterpretedBinary, "launch"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, fail)
    nothing_bound(monkeypatch)


def _memory(tensor):
    """A copy of all of the storage behind a tensor."""
    return tensor.untyped_storage().clone()


def _tensors(call):
    return [x for x in vars(call).values() if isinstance(x, torch.Tensor) and x.device.type != "meta"]


@pytest.mark.parametrize(("change", "error", "expected", "got"), CASES)
def test_bad_input(change, error, expected, got, device, nothing_runs):
    call = good_call(device)
    poisoned = call.out
    change(call)
    tensors = [poisoned, *_tensors(call)]
    before = [_memory(x) for x in tensors]
    with pytest.raises(error) as caught:
        qk_score(**vars(call))
    message = str(caught.value)
    assert type(caught.value) is error, "a subclass says something else"
    assert re.match(r"(q|k|out|layout|scale|fill|config|out_dtype): expected .+, got .+", message), message
    assert expected in message
    assert got in message.rpartition("expected ")[2], message
    for tensor, was in zip(tensors, before, strict=True):
        assert bytes(_memory(tensor).cpu()) == bytes(was.cpu())


@pytest.mark.skipif(torch.cuda.is_available() and not compute.interpreting(), reason="numpy arrays are CPU memory")
def test_overlap_without_a_common_storage(nothing_runs):
    """Two tensors over one array: each believes that it has a storage of its own."""
    call = good_call("cpu")
    array = np.zeros(call.k.numel() + 100, dtype=np.float32)
    call.k = torch.from_numpy(array)[: call.k.numel()].view(call.k.shape)
    call.out = torch.from_numpy(array[call.k.numel() - 8 :])[: call.out.numel()].view(call.out.shape)
    with pytest.raises(ValueError, match=r"^out: expected memory of its own, got memory that overlaps k"):
        qk_score(**vars(call))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"nonsense": 1}, id="an unknown argument"),
        pytest.param({"q": None, "k": None, "positional": True}, id="options by position"),
    ],
)
def test_options_are_keywords(options, device, nothing_runs):
    call = good_call(device)
    with pytest.raises(TypeError):
        qk_score(call.q, call.k, 1.0) if "positional" in options else qk_score(call.q, call.k, **options)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_set(), id="as it is"),
        pytest.param(lambda call: _in_one_buffer(call, "k", call.k.numel()), id="out right behind k"),
        pytest.param(lambda call: _in_one_buffer(call, "q", call.q.numel()), id="out right behind q"),
        pytest.param(_set(q=lambda c: c.k[:, 2].repeat_interleave(2, dim=1)), id="q made from k"),
        pytest.param(_set(q=lambda c: c.k.view(2, 10, 16)[:, :4]), id="q is a part of k"),
        pytest.param(_set(out=lambda c: c.out.permute(2, 1, 0).contiguous().permute(2, 1, 0)), id="out transposed"),
        pytest.param(_set(out=lambda c: c.out[..., :5]), id="out just long enough"),
        pytest.param(_set(out_dtype=torch.float32), id="out_dtype as out's"),
        pytest.param(_set(scale=np.float64(0.5)), id="scale a numpy float"),
    ],
)
def test_good_input_is_not_refused(change, device):
    call = good_call(device)
    change(call)
    q, k = call.q.clone(), call.k.clone()
    got = qk_score(**vars(call))
    assert_scores(got[..., :5], q, k, vars(call).get("scale", 1.0))
    assert torch.equal(call.q, q)
    assert torch.equal(call.k, k)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CHUNK_SIZE", 48), ("CHUNK_SIZE", 8), ("CHUNK_SIZE", 2**17), ("CHUNK_SIZE", 64.0), ("CHUNK_SIZE", "64"),
        ("CHUNK_SIZE", True), ("TILE_SIZE", 24), ("TILE_SIZE", 128), ("TILE_SIZE", None), ("num_warps", 0),
        ("num_warps", 3), ("num_warps", 64), ("num_stages", 0), ("num_stages", 9), ("num_stages", 1.0),
        ("LOAD_HINT", "evict_last"), ("LOAD_HINT", None), ("STORE_HINT", "evict_first"),
    ],
)  # fmt: skip
def test_bad_config(name, value):
    good = {"CHUNK_SIZE": 64, "TILE_SIZE": 64, "num_warps": 4, "num_stages": 2}
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: expected .+, got .+"):
        KernelConfig(**{**good, name: value})
