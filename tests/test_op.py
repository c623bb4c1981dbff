"""The call as torch's operator: gradients against float64, torch.compile, autocast."""

from __future__ import annotations

import msgspec
import pytest
import torch
from reference import assert_scores, config_for, make_inputs, poisoned, scores64
from torch._dynamo.testing import CompileCounterWithBackend

from tunedqk import op
from tunedqk.score import qk_score

# torch 2.11 warns of itself when it imports its compiler.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
HEAD_DIM = 16


@pytest.fixture(autouse=True)
def _defaults(monkeypatch):
    """Nothing is tuned, and dynamo has compiled nothing."""
    monkeypatch.setenv("TUNEDQK_MODE", "cached")
    torch._dynamo.reset()


def inputs(device, dtype=FP32, group=2, seq_len=33, layout="NHD"):
    return make_inputs(2, 2 * group, 2, seq_len, HEAD_DIM, dtype, device, layout)


def leaves(*tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


def gradients64(q, k, grad, scale, layout):
    """Of the formula, by autograd in float64."""
    q64, k64 = leaves(q.double(), k.double())
    scores, _ = scores64(q64, k64, scale, layout)
    return torch.autograd.grad(scores, (q64, k64), grad.double())


def assert_close(got, expected, dtype):
    """Within one rounding to the dtype, and what some hundred float32 roundings may add to that."""
    assert got.dtype == dtype
    tolerance = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), expected, rtol=2 * tolerance, atol=30 * 2**-23 + tolerance / 2)


# --- Gradients ---


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [
        pytest.param(FP32, None, id="fp32"),
        pytest.param(FP16, None, id="fp16"),
        pytest.param(BF16, None, id="bf16"),
        pytest.param(BF16, FP32, id="bf16 to fp32"),
        pytest.param(FP32, FP16, id="fp32 to fp16"),
    ],
)
def test_gradients_are_those_of_the_formula(device, dtype, out_dtype, group, layout):
    q, k = leaves(*inputs(device, dtype, group, layout=layout))
    scores = qk_score(q, k, scale=None, layout=layout, out_dtype=out_dtype)
    assert_scores(scores.detach(), q.detach(), k.detach(), HEAD_DIM**-0.5, layout)
    grad = torch.randn_like(scores)
    scores.backward(grad)
    for got, expected in zip((q.grad, k.grad), gradients64(q, k, grad, HEAD_DIM**-0.5, layout), strict=True):
        assert_close(got, expected, dtype)


def other_calls(device, dtype=FP32):
    """Calls that are not plain: q, k (a function of what shall have a gradient), and the other arguments."""
    q, k = inputs(device, dtype)
    lens, starts = torch.tensor([33, 9], device=device), torch.tensor([2, 0], device=device)
    hidden = torch.arange(33, device=device)[None, :] >= lens[:, None]
    poisoned_k = k.masked_fill(hidden[..., None, None], torch.nan)
    several = torch.randn(2, 3, 4, HEAD_DIM, device=device, dtype=dtype)
    pool = torch.randn(12, 4, 2, HEAD_DIM, device=device, dtype=dtype)
    table = torch.tensor([[7, 3, 0, 11, 2, 9, 5, 1, 10], [4, 8, 6, 99, 99, 99, 99, 99, 99]], device=device)
    heads_first = {"layout": "HND", "causal": True, "seq_lens": lens}
    return {
        "ragged": (q, poisoned_k, {"seq_lens": lens, "seq_starts": starts}),
        "several": (several, k, {"seq_lens": torch.tensor([[33, 32, 7], [9, 0, 1]], device=device)}),
        "causal": (several, k, {"causal": True}),
        "heads first": (several.transpose(1, 2).contiguous(), poisoned_k.transpose(1, 2).contiguous(), heads_first),
        "paged": (q, pool, {"seq_lens": lens, "block_table": table}),
        "several, paged": (several, pool, {"seq_lens": lens, "block_table": table, "causal": True}),
    }


OTHER_CALLS = ["ragged", "several", "causal", "heads first", "paged", "several, paged"]


def plain_formula(q, k, layout="NHD", seq_lens=None, seq_starts=None, block_table=None, *, causal=False):
    """Float64 scores by operations that autograd knows, zero where hidden; what is hidden is cut off first."""
    if layout == "HND":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    rows = q[:, None] if q.dim() == 3 else q  # [batch, q_len, q_heads, head_dim]
    scores = []
    for b, queries in enumerate(rows):
        if block_table is None:
            keys = k[b]
        else:
            keys = k[block_table[b, : -(-int(seq_lens[b].max()) // k.shape[1])].tolist()].flatten(0, 1)
        length = k.shape[1] if block_table is None else block_table.shape[1] * k.shape[1]
        for i, query in enumerate(queries):
            end = length if seq_lens is None else int(seq_lens[b] if seq_lens.dim() == 1 else seq_lens[b, i])
            end -= (len(queries) - 1 - i) * causal
            begin = 0 if seq_starts is None else int(seq_starts[b])
            seen = keys[begin : max(end, begin)].repeat_interleave(query.shape[0] // keys.shape[1], dim=1)
            scored = torch.einsum("hd,lhd->hl", query, seen)
            scores.append(torch.nn.functional.pad(scored, (begin, length - begin - scored.shape[1])))
    scores = torch.stack(scores).unflatten(0, rows.shape[:2]).transpose(1, 2)
    return scores[:, :, 0] if q.dim() == 3 else scores


@pytest.mark.parametrize("kind", OTHER_CALLS)
def test_gradients_of_other_calls_are_those_of_the_formula(device, kind):
    q, k, options = other_calls(device)[kind]
    wanting = leaves(q, k)
    scores = qk_score(*wanting, scale=None, fill=0.0, **options)
    grad = torch.randn_like(scores)
    scores.backward(grad)
    exact = leaves(q.double(), k.double())
    formula = plain_formula(*exact, **options) * HEAD_DIM**-0.5
    torch.testing.assert_close(scores.double(), formula, rtol=1e-5, atol=1e-5)
    expected = torch.autograd.grad(formula, exact, grad.double())
    for got, right in zip((x.grad for x in wanting), expected, strict=True):
        assert_close(got, right, FP32)


def test_gradients_of_the_queries_of_quantised_keys(device):
    q, k = inputs(device)
    quantised, k_scale = k.to(torch.float8_e5m2), torch.rand(2, 33, 2, device=device)
    (wanting,) = leaves(q)
    scores = qk_score(wanting, quantised, k_scale=k_scale)
    grad = torch.randn_like(scores)
    scores.backward(grad)
    right, _ = gradients64(q, quantised.double() * k_scale.double()[..., None], grad, 1.0, "NHD")
    assert_close(wanting.grad, right, FP32)


@pytest.mark.parametrize("kind", OTHER_CALLS)
def test_other_calls_are_compiled_whole(device, kind):
    q, k, options = other_calls(device)[kind]
    compiled = torch.compile(lambda q, k, **rest: qk_score(q, k, **rest).exp(), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, **options), qk_score(q, k, **options).exp())


def test_a_step_of_a_ragged_cache_compiles_nothing(device):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(qk_score, fullgraph=True, dynamic=True, backend=counter)
    q, k = inputs(device, seq_len=48)
    frames = []
    for length in range(30, 36):
        lens = torch.tensor([length, 9], device=device)
        assert torch.equal(compiled(q, k, seq_lens=lens), qk_score(q, k, seq_lens=lens))
        frames.append(counter.frame_count)
    assert frames == frames[:1] * 6


@pytest.mark.parametrize("wanted", ["q", "k"])
def test_only_what_needs_a_gradient_gets_one(device, wanted):
    q, k = inputs(device)
    tensors = {"q": q, "k": k}
    tensors[wanted].requires_grad_()
    scores = qk_score(q, k)
    grad = torch.randn_like(scores)
    scores.backward(grad)
    expected = dict(zip("qk", gradients64(q, k, grad, 1.0, "NHD"), strict=True))
    assert_close(tensors[wanted].grad, expected[wanted], FP32)
    assert tensors["k" if wanted == "q" else "q"].grad is None


def test_a_slice_of_a_cache_passes_its_gradient_on(device):
    q, cache = inputs(device, seq_len=64)
    cache.requires_grad_()
    qk_score(q, cache[:, 3:36]).sum().backward()
    assert cache.grad[:, 3:36].abs().min() > 0
    assert cache.grad[:, :3].abs().max() == cache.grad[:, 36:].abs().max() == 0


def test_the_gradient_has_one_too(device):
    q, k = leaves(*(x[:1] for x in inputs(device, seq_len=3)))

    def slope(function, *tensors):
        scores = function(*tensors)
        first = torch.autograd.grad((scores**3).sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum((x**2).sum() for x in first), tensors)

    got = slope(qk_score, q, k)
    expected = slope(
        lambda q, k: scores64(q, k)[0], q.detach().double().requires_grad_(), k.detach().double().requires_grad_()
    )
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4 * other.abs().max().item())


def test_a_given_config_has_a_gradient(device):
    q, k = leaves(*inputs(device))
    qk_score(q, k, config=config_for(HEAD_DIM, FP32, 2)).sum().backward()
    assert q.grad is not None


def test_nothing_to_score_has_a_gradient(device):
    q, k = leaves(*inputs(device, seq_len=0))
    qk_score(q, k).sum().backward()
    assert q.grad.abs().max() == 0
    assert k.grad.shape == k.shape


def test_without_a_gradient_no_operator_is_called(device, monkeypatch):
    for name in ("apply", "_score", "_score_out"):
        monkeypatch.setattr(op, name, None)
    q, k = inputs(device)
    assert not qk_score(q, k).requires_grad
    wanting = q.clone().requires_grad_()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            scores = qk_score(wanting, k)
            assert not scores.requires_grad
            assert_scores(scores, q, k)


# --- torch.compile ---


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_compiled_equals_eager_over_two_buckets_without_compiling_again(device, layout):
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def attend(q, k):
        return qk_score(q, k, scale=None, layout=layout).softmax(-1)

    q, k = inputs(device, BF16, seq_len=800, layout=layout)  # always a slice: it is not contiguous
    for seq_len in (33, 34, 512, 600, 700):
        keys = k[:, :seq_len] if layout == "NHD" else k[:, :, :seq_len]
        assert torch.equal(attend(q, keys), qk_score(q, keys, scale=None, layout=layout).softmax(-1))
    assert counter.frame_count == 1


def test_compiled_writes_out(device):
    compiled = torch.compile(
        lambda q, k, out: qk_score(q, k, out=out, fill=2).mul(3), fullgraph=True, backend="aot_eager"
    )
    q, k = inputs(device)
    out, expected = (poisoned(2, 4, 40, dtype=FP32, device=device) for _ in range(2))
    assert torch.equal(compiled(q, k, out), qk_score(q, k, out=expected, fill=2) * 3)
    assert torch.equal(out, expected)


def test_compiled_has_the_gradient(device):
    compiled = torch.compile(lambda q, k: qk_score(q, k).tanh(), fullgraph=True, backend="aot_eager")
    eager, other = leaves(*inputs(device)), leaves(*inputs(device))
    for one, two in zip(eager, other, strict=True):
        two.data.copy_(one.data)
    qk_score(*eager).tanh().sum().backward()
    compiled(*other).sum().backward()
    for one, two in zip(eager, other, strict=True):
        torch.testing.assert_close(two.grad, one.grad)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch captures an empty one to begin with
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_inductor_and_its_graphs_compile_the_call(device, mode):
    compiled = torch.compile(lambda q, k: qk_score(q * 2, k).softmax(-1), fullgraph=True, mode=mode)
    q, k = inputs(device, BF16, seq_len=600)
    for _ in range(4):  # a graph is recorded at the second
        q = torch.randn_like(q)
        torch.testing.assert_close(compiled(q, k), qk_score(q * 2, k).softmax(-1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda q, k: (q, k[..., :8]), "k: expected q's head_dim 16, got 8", id="head_dim"),
        pytest.param(
            lambda q, k: (q, k.half()),
            "k: expected q's dtype torch.float32 or float8_e4m3fn, float8_e5m2, got torch.float16",
            id="dtype",
        ),
    ],
)
def test_bad_input_is_named_when_compiled(device, change, message):
    compiled = torch.compile(qk_score, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=message.replace(".", r"\.")):
        compiled(*change(*inputs(device)))


@pytest.mark.parametrize("hints", [("", ""), ("evict_first", "")])
def test_a_given_config_is_used_when_compiled(device, monkeypatch, hints):
    config = msgspec.structs.replace(config_for(HEAD_DIM, FP32, 2), LOAD_HINT=hints[0], STORE_HINT=hints[1])
    used = []
    whole = op.call_of
    monkeypatch.setattr(op, "call_of", lambda *arguments: used.append(arguments[-1]) or whole(*arguments))
    q, k = inputs(device)
    compiled = torch.compile(lambda q, k: qk_score(q, k, config=config), fullgraph=True, backend="aot_eager")
    assert_scores(compiled(q, k), q, k)
    assert used == [config]


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch 2.14 warns of its own check
@pytest.mark.parametrize("needs_grad", [False, True])
def test_torch_finds_no_fault_with_the_operators(device, needs_grad):
    q, k = inputs(device)
    if needs_grad:
        q, k = leaves(q, k)
    torch.library.opcheck(
        torch.ops.tunedqk.qk_score.default, (q, 0, k, None, None, None, None, 0.5, "NHD", None, FP16, None)
    )
    if not needs_grad:
        out = torch.zeros(2, 4, 40, device=device)
        torch.library.opcheck(
            torch.ops.tunedqk.qk_score_out.default, (q, 0, k, None, None, None, None, out, 0.5, "NHD", None, None, None)
        )


# --- Autocast ---


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("q_dtype", "k_dtype"), [(FP32, FP32), (FP32, BF16), (FP16, FP32)])
def test_autocast_does_what_it_does_to_a_matmul(device, dtype, q_dtype, k_dtype):
    q, k = inputs(device)
    q, k = q.to(q_dtype), k.to(k_dtype)
    with torch.autocast(device, dtype=dtype):
        scores = qk_score(q, k)
        assert scores.dtype == torch.matmul(q.unsqueeze(2), k.transpose(1, 2).mT[:, :1]).dtype == dtype
        assert qk_score(q, k, out_dtype=FP32).dtype == FP32
    assert_scores(scores, q.to(dtype), k.to(dtype))


def test_autocast_leaves_an_out_alone(device):
    q, k = inputs(device)
    out = poisoned(2, 4, 33, dtype=FP32, device=device)
    with torch.autocast(device, dtype=BF16):
        qk_score(q, k, out=out)
    assert_scores(out, q, k)  # in float32


def test_autocast_passes_gradients_through(device):
    q, k = leaves(*inputs(device))
    with torch.autocast(device, dtype=BF16):
        qk_score(q, k).float().sum().backward()
    assert (q.grad.dtype, k.grad.dtype) == (FP32, FP32)


def test_outside_autocast_dtypes_must_agree(device):
    q, k = inputs(device)
    other = "cpu" if device == "cuda" else "cuda"
    with torch.autocast(other, dtype=BF16, enabled=other == "cpu"), pytest.raises(TypeError, match="k: expected"):
        qk_score(q, k.bfloat16())
