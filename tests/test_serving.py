"""What a server does before its first request, and what it can ask."""

from __future__ import annotations

import builtins
import io
import os
import random
import sys

import filelock
import pytest
import torch
import triton
from conftest import ON_GPU, nothing_bound
from reference import assert_scores, make_inputs

from tunedqk import accept, launch, ready, serving, tune
from tunedqk.accept import Door
from tunedqk.call import Slot
from tunedqk.config import KernelConfig, tuning_key
from tunedqk.db import TuningDB
from tunedqk.device import identity_of, interpreting, toolchain
from tunedqk.errors import CaptureError, MissingConfigError, RejectedConfigError
from tunedqk.records import Entry, Receipt, Timing
from tunedqk.resolve import resolver_for
from tunedqk.score import qk_score
from tunedqk.serving import explain, warmup
from tunedqk.validate import Validator
from tunedqk.variant import Variant

ONE = KernelConfig(64, 64, num_warps=4)
KEY = tuning_key(1, 16, "float32", 1)
needs_kernels = pytest.mark.skipif(
    not (torch.cuda.is_available() or interpreting()), reason="without a GPU or the interpreter torch computes"
)


@pytest.fixture(autouse=True)
def _fresh(cache_dir, monkeypatch):
    nothing_bound(monkeypatch)
    monkeypatch.setattr(tune, "candidates", lambda *_: [ONE, KernelConfig(128, 128, num_warps=4)])
    resolver_for.cache_clear()
    yield
    resolver_for.cache_clear()


def inputs(device, seq_len=40, dtype=torch.float32, group=1):
    return make_inputs(1, group, 1, seq_len, 16, dtype, device)


def place(device):
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")


def store(device, config=ONE, key=KEY):
    """A winner without a receipt."""
    entry = Entry(key, config, Timing(10.0, 9.0, 11.0, 1024, None, 1.0), {}, toolchain(), "2026-01-02T03:04:05Z")
    db = TuningDB(identity_of(place(device)))
    assert db.record(entries=[entry])
    return db


def shape(**changed):
    return {"head_dim": 16, "q_heads": 1, "kv_heads": 1, "max_seq_len": 1024, "dtype": torch.float32} | changed


# --- warmup ---


@needs_kernels
def test_after_warmup_a_call_does_nothing_but_launch(device, monkeypatch):
    explanations = warmup(**shape(), device=place(device))
    keys = [(explanation.key.seq_len, explanation.key.sequences) for explanation in explanations]
    assert keys == [(512, 8), (512, 64), (1024, 8), (1024, 64)]
    assert [(explanation.action, explanation.ready) for explanation in explanations] == [("launch", True)] * 4

    def forbidden(*_, **__):
        pytest.fail("called")

    for owner, name in (
        (tune, "tune"), (Door, "build"), (Door, "accept"), (launch, "build"), (TuningDB, "winners"),
        (TuningDB, "receipt"), (builtins, "open"), (io, "open"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, forbidden)
    for seq_len in (1, 511, 512, 513, 1024):
        q, k = inputs(device, seq_len)
        assert_scores(qk_score(q, k), q, k)
    for batch in (3, 16, 17):
        q, k = make_inputs(batch, 1, 1, 700, 16, torch.float32, device)
        assert_scores(qk_score(q, k), q, k)
    scores = qk_score(q, k.transpose(1, 2), layout="HND")
    assert_scores(scores, q, k)


class Watch:
    """What the interpreter of Python reports of files, imports, sockets and processes, while somebody watches."""

    def __init__(self):
        self.events = []
        self._on = False
        sys.addaudithook(self._hook)

    def _hook(self, event, arguments):
        if self._on and event.partition(".")[0] in {"open", "os", "fcntl", "import", "subprocess", "socket", "shutil"}:
            self.events.append((event, arguments))

    def __enter__(self):
        self._on = True

    def __exit__(self, *_):
        self._on = False


@pytest.fixture(scope="session")
def only_watch():
    """One for all tests, since an audit hook stays."""
    return Watch()


@pytest.fixture
def watch(only_watch, monkeypatch):
    only_watch.events = []
    for name in ("stat", "lstat", "access"):  # which report nothing
        whole = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, n=name, f=whole, **b: only_watch._hook(f"os.{n}", a) or f(*a, **b))
    return only_watch


class CountedLock:
    def __init__(self, lock, taken):
        self._lock = lock
        self._taken = taken

    def __enter__(self):
        self._taken.append(self._lock)
        return self._lock.__enter__()

    def __exit__(self, *error):
        return self._lock.__exit__(*error)


@pytest.fixture
def taken(device, monkeypatch):
    """The locks that were taken: of the resolver, its DB, a build, a file. (Not that of the interpreter's launches.)"""
    taken = []
    resolver = resolver_for(place(device))
    monkeypatch.setattr(resolver, "lock", CountedLock(resolver.lock, taken))
    monkeypatch.setattr(resolver.db, "_guard", CountedLock(resolver.db._guard, taken))
    for owner, name in ((filelock.BaseFileLock, "acquire"), (launch, "build")):
        whole = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, f=whole, **b: taken.append(f) or f(*a, **b))
    return taken


@needs_kernels
def test_warm_calls_open_no_file_and_take_no_lock(device, watch, taken):
    q, k = inputs(device)
    out = torch.zeros(1, 1, 40, device=device)
    with watch:
        qk_score(q, k)  # cold: what is watched is seen
    assert {"open", "os.stat", "os.rename"} <= {event for event, _ in watch.events}
    assert len(taken) > 3
    watch.events.clear()
    taken.clear()
    with watch:
        for i in range(10_000 if ON_GPU else 300):
            qk_score(q, k, out=out if i % 2 else None)
    assert watch.events == []
    assert taken == []
    assert_scores(out, q, k)


# Shapes that a server declares; `shifted`: what it passes lies at addresses that are no multiples of 16.
DECLARED = [
    ({"q_heads": 2, "kv_heads": 2}, {}),
    ({"q_heads": 4, "kv_heads": 2, "dtype": torch.bfloat16, "out_dtype": torch.float32}, {}),
    ({"q_heads": 6, "kv_heads": 2, "dtype": torch.bfloat16}, {}),
    ({"q_heads": 2, "kv_heads": 2, "head_dim": 17}, {}),
    ({"q_heads": 2, "kv_heads": 2, "dtype": torch.float16, "aligned": False}, {"shifted": True}),
]


def declared_inputs(chance, device, declared, shifted=False):
    """q and k of a random batch size, length and layout."""
    batch, seq_len = chance.choice((1, 2, 3, 5, 8) if ON_GPU else (1, 2)), chance.randint(1, declared["max_seq_len"])
    layout = chance.choice(("NHD", "HND"))
    q, k = make_inputs(
        batch,
        declared["q_heads"],
        declared["kv_heads"],
        seq_len,
        declared["head_dim"],
        declared["dtype"],
        device,
        layout,
    )
    if shifted:
        q, k = (torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape) for x in (q, k))
    return q, k, layout


def allocations():
    return torch.cuda.memory_stats()["allocation.all.allocated"] if ON_GPU else 0


@needs_kernels
def test_calls_of_declared_shapes_compile_validate_open_and_allocate_nothing(device, monkeypatch, watch):
    if not ON_GPU:
        monkeypatch.setenv("TUNEDQK_MODE", "cached")  # tuning ten keys takes the interpreter long
    cases = [(shape(max_seq_len=4096 if ON_GPU else 600) | changed, how) for changed, how in DECLARED]
    for declared, _ in cases:
        warmup(**declared, device=place(device))
    for owner, name in (
        (tune, "tune"), (Door, "build"), (Validator, "check"), (Validator, "check_length"), (launch, "build"),
        (ready, "make_ready"), (TuningDB, "_look"), (filelock.BaseFileLock, "acquire"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, lambda *_, name=name, **__: pytest.fail(name))
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **_: pytest.fail("compiled"))
    chance = random.Random(0)  # noqa: S311
    for i in range(1000 if ON_GPU else 10):
        declared, how = cases[i % len(cases)]
        q, k, layout = declared_inputs(chance, device, declared, **how)
        wanted = {"layout": layout, "out_dtype": declared.get("out_dtype")}
        before = allocations()
        with watch:
            scores = qk_score(q, k, **wanted)
        between = allocations()
        with watch:
            qk_score(q, k, out=scores, **wanted)
        assert (between - before, allocations() - between) == ((1, 0) if ON_GPU else (0, 0))
        assert_scores(scores, q, k, layout=layout)
    assert watch.events == []


@needs_kernels
def test_warmup_is_for_a_variant(device):
    warmup(**shape(q_heads=4, kv_heads=2, dtype=torch.float16, out_dtype=torch.float32), device=place(device))
    variants = {slot.variant for slot in ready.binaries}
    assert variants == {Variant(16, 2, torch.float16, torch.float32, aligned=True)}
    warmup(**shape(aligned=False, max_seq_len=1), device=place(device))
    warmup(**shape(head_dim=17, max_seq_len=1), device=place(device))  # rows of 68 bytes
    alone = [slot.variant for slot in ready.binaries if slot.variant.group == 1]
    assert [(variant.head_dim, variant.aligned) for variant in alone] == [(16, False)] * 2 + [(17, False)] * 2


def test_a_capture_takes_the_binary_of_the_nearest_key(monkeypatch):
    variant = Variant(16, 1, torch.float32, torch.float32, aligned=True)
    own = KernelConfig(64, 64, num_warps=4)

    def slot(seq_len, sequences, config=None, of=variant):
        return Slot(0, of, seq_len, sequences, config)

    known = [
        slot(512, 8), slot(4096, 64), slot(1024, 64, own), slot(512, 64), slot(2048, 8, of=variant._replace(group=2)),
    ]  # fmt: skip
    monkeypatch.setattr(ready, "binaries", {one: one for one in known})
    assert ready._ready_for_capture(slot(1024, 64)) == slot(1024, 64, own)
    assert ready._ready_for_capture(slot(2048, 64)) in (slot(4096, 64), slot(1024, 64, own))
    assert ready._ready_for_capture(slot(4096, 8)) == slot(512, 8)
    assert ready._ready_for_capture(slot(8192, 64)) == slot(4096, 64)
    assert ready._ready_for_capture(slot(512, 8, own)) == slot(1024, 64, own)
    with pytest.raises(CaptureError):
        ready._ready_for_capture(slot(512, 8, of=variant._replace(group=4)))


@pytest.mark.parametrize(("kv_heads", "sequences"), [(1, [8, 64]), (16, [8, 64]), (17, [64]), (32, [64])])
def test_warmup_is_for_any_batch_that_these_heads_allow(monkeypatch, kv_heads, sequences):
    monkeypatch.setattr(serving, "interpreting", lambda: False)
    explanations = warmup(**shape(q_heads=kv_heads, kv_heads=kv_heads, max_seq_len=1), device="cpu")
    assert [explanation.key.sequences for explanation in explanations] == sequences


@pytest.mark.parametrize(
    ("batch", "kv_heads", "group", "sequences"),
    [(1, 8, 4, 8), (2, 8, 1, 8), (3, 8, 1, 64), (16, 1, 8, 8), (17, 1, 1, 64), (1, 17, 1, 64)],
)
@pytest.mark.parametrize("form", ["NHD", "HND", "paged"])
def test_sequences_are_requests_times_kv_heads(device, batch, kv_heads, group, sequences, form):
    q, k = make_inputs(batch, kv_heads * group, kv_heads, 40, 16, torch.float32, device)
    if form == "NHD":
        key = explain(q, k).key
    elif form == "HND":
        key = explain(q, k.transpose(1, 2), layout="HND").key
    else:  # the pool's blocks are not requests
        pool = torch.zeros(100, 16, kv_heads, 16, device=device)
        table = torch.zeros(batch, 3, dtype=torch.int32, device=device)
        key = explain(q, pool, block_table=table, seq_lens=torch.zeros(batch, dtype=torch.int32, device=device)).key
    assert key.sequences == sequences


@needs_kernels
def test_warmup_in_strict_mode_says_what_is_missing(device, monkeypatch):
    monkeypatch.setenv("TUNEDQK_MODE", "strict")
    store(device)
    with pytest.raises(MissingConfigError, match="seq_len 512, more than 16 sequences"):
        warmup(**shape(), device=place(device))
    assert [(slot.seq_len, slot.sequences) for slot in ready.binaries] == [(512, 8)]


@needs_kernels
def test_warmup_twice_does_nothing(device, monkeypatch):
    first = warmup(**shape(), device=place(device))
    monkeypatch.setattr(ready, "make_ready", None)
    assert warmup(**shape(), device=place(device)) == first


def test_where_torch_computes_there_is_nothing_to_warm_up(monkeypatch):
    monkeypatch.setattr(serving, "interpreting", lambda: False)
    assert [explanation.action for explanation in warmup(**shape(), device="cpu")] == ["torch"] * 4
    assert ready.binaries == {}


BAD = [
    pytest.param({"head_dim": 577}, ValueError, "head_dim: expected from 1 to 576, got 577", id="head_dim 577"),
    pytest.param({"head_dim": 0}, ValueError, "head_dim: expected from 1 to 576, got 0", id="head_dim 0"),
    pytest.param({"max_seq_len": 0}, ValueError, "max_seq_len: expected from 1 .*, got 0", id="max_seq_len 0"),
    pytest.param({"max_seq_len": 1e6}, TypeError, "max_seq_len: expected an int, got float", id="a float"),
    pytest.param({"q_heads": True}, TypeError, "q_heads: expected an int, got bool", id="a bool"),
    pytest.param({"q_heads": 3, "kv_heads": 2}, ValueError, "multiple of kv_heads 2, got 3", id="3 heads over 2"),
    pytest.param({"dtype": "float32"}, TypeError, "dtype: expected a torch.dtype, got str", id="dtype a name"),
    pytest.param({"dtype": torch.float64}, TypeError, "got torch.float64", id="float64"),
    pytest.param({"out_dtype": torch.int32}, TypeError, "out_dtype: expected", id="out_dtype int32"),
    pytest.param({"max_seq_len": 2**70}, ValueError, "max_seq_len: expected from 1", id="2**70 positions"),
    pytest.param({"q_heads": 2**63}, ValueError, "q_heads: expected from 1 to 2147483647", id="2**63 heads"),
    pytest.param({"head_dim": 10**14}, ValueError, "head_dim: expected from 1 to 576", id="head_dim 10**14"),
    pytest.param({"aligned": "no"}, TypeError, "aligned: expected a bool or None, got str", id="aligned a string"),
    pytest.param({"device": "meta"}, ValueError, "device: expected a CUDA or CPU device, got meta", id="meta"),
]


@pytest.mark.parametrize(("changed", "error", "message"), BAD)
def test_warmup_of_what_cannot_be_called(changed, error, message):
    with pytest.raises(error, match=message):
        warmup(**shape(**changed))
    assert ready.binaries == {}


# --- explain ---


@needs_kernels
def test_an_explanation_launches_tunes_and_stores_nothing(device, monkeypatch, cache_dir):
    for name in ("accept", "screen", "prepare"):
        monkeypatch.setattr(Door, name, lambda *_: pytest.fail("validated"))
    for binary in (launch.CompiledBinary, launch.InterpretedBinary):
        monkeypatch.setattr(binary, "launch", lambda *_: pytest.fail("launched"))
    answer = explain(*inputs(device))
    assert (answer.action, answer.origin, answer.config, answer.receipt) == ("tune", "nowhere", None, None)
    assert answer.key == KEY
    assert not list(cache_dir.rglob("*.json"))
    assert ready.binaries == {}


@needs_kernels
def test_a_winner_is_explained_with_its_file_and_receipt(device, monkeypatch):
    db = store(device)
    q, k = inputs(device)
    before = explain(q, k)
    assert (before.action, before.origin, before.config) == ("validate", "the stored winner", ONE)
    assert (before.path, before.receipt, before.ready) == (str(db.path), None, False)
    assert "receipt: none" in str(before)
    qk_score(q, k)
    after = explain(q, k)
    assert (after.action, after.ready, after.entry.config) == ("launch", True, ONE)
    assert after.receipt.correct
    text = str(after)
    for part in (str(KEY), "launch", str(ONE), str(db.path), "Triton", "receipt: correct"):
        assert part in text
    # Another process finds the receipt; the next bucket lacks one comparison.
    nothing_bound(monkeypatch)
    resolver_for.cache_clear()
    assert (explain(q, k).action, explain(q, k).ready) == ("launch", False)
    store(device, key=tuning_key(1000, 16, "float32", 1))
    resolver_for.cache_clear()
    assert explain(*inputs(device, 1000)).action == "validate"


@needs_kernels
@pytest.mark.parametrize(
    ("mode", "action", "origin"),
    [
        pytest.param("tune", "tune", "the stored winner", id="tune"),
        pytest.param("cached", "validate", "the default config", id="cached"),
        pytest.param("strict", "raise", "the stored winner", id="strict"),
    ],
)
def test_a_rejected_winner_is_explained_by_mode(device, monkeypatch, mode, action, origin):
    monkeypatch.setenv("TUNEDQK_MODE", mode)
    db = store(device)
    variant = tune.tuned_variant(KEY)
    receipt = Receipt(
        accept.build(place(device), variant, ONE).hash, "wrong result", None, "", (), "2026-01-01T00:00:00Z"
    )
    assert db.record(receipts=[receipt])
    answer = explain(*inputs(device))
    assert (answer.action, answer.origin) == (action, origin)
    assert (answer.receipt == receipt) == (mode != "cached")


@needs_kernels
def test_a_given_config_is_explained(device):
    q, k = inputs(device)
    odd = KernelConfig(32, 32, num_warps=2)
    assert (explain(q, k, config=odd).action, explain(q, k, config=odd).origin) == ("validate", "config=")
    qk_score(q, k, config=odd)
    answer = explain(q, k, config=odd)
    assert (answer.action, answer.ready, answer.config, answer.path) == ("launch", True, odd, None)
    assert explain(q, k).action == "tune"


@needs_kernels
def test_a_given_config_that_was_rejected_is_explained(device, monkeypatch):
    q, k = inputs(device)
    monkeypatch.setattr(accept, "build", lambda *_: (_ for _ in ()).throw(RuntimeError("PassManager::run failed")))
    answer = explain(q, k, config=ONE)
    assert (answer.action, answer.config, answer.receipt) == ("raise", ONE, None)
    with pytest.raises(RejectedConfigError):
        qk_score(q, k, config=ONE)


@needs_kernels
def test_what_is_bound_is_explained_though_another_winner_was_stored_since(device):
    store(device)
    q, k = inputs(device)
    qk_score(q, k)
    store(device, KernelConfig(128, 128, num_warps=4))
    resolver_for.cache_clear()
    answer = explain(q, k)
    assert (answer.action, answer.config, answer.origin, answer.path) == ("launch", ONE, "chosen earlier", None)
    assert answer.receipt.correct


def test_where_torch_computes_that_is_the_explanation(monkeypatch):
    monkeypatch.setattr(serving, "interpreting", lambda: False)
    answer = explain(*inputs("cpu"))
    assert (answer.action, answer.config) == ("torch", None)
    assert str(answer).endswith(": torch")


def test_an_empty_result_is_explained(device, monkeypatch):
    monkeypatch.setenv("TUNEDQK_MODE", "strict")
    q, k = inputs(device)
    assert explain(q, k[:, :0]).action == "nothing"
    assert qk_score(q, k[:, :0]).shape == (1, 1, 0)


def test_explain_refuses_what_qk_score_refuses(device):
    q, k = inputs(device)
    with pytest.raises(TypeError, match="k: expected q's dtype"):
        explain(q, k.half())
    with pytest.raises(ValueError, match="layout"):
        explain(q, k, layout="BHLD")
    with pytest.raises(TypeError, match="fill: expected a number"):
        explain(q, k, fill="x")
    with pytest.raises(TypeError, match="scale: expected a number"):
        explain(q, k, scale="x")
    with pytest.raises(ValueError, match="memory that overlaps q"):
        explain(q, k[:, :16], out=q)


# --- In a CUDA graph ---


def captured(q, k, out):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q.mul_(1)  # torch warns of an empty graph
        qk_score(q, k, out=out)
    return graph


def assert_replays(graph, q, k, out):
    """With other inputs each time."""
    for _ in range(3):
        q.copy_(torch.randn(q.shape))
        k.copy_(torch.randn(k.shape))
        out.fill_(torch.nan)
        graph.replay()
        assert_scores(out, q, k)


@pytest.mark.gpu
def test_a_capture_after_warmup_replays_right(device):
    warmup(**shape(max_seq_len=512))
    q, k = inputs(device)
    out = torch.zeros(1, 1, 40, device=device)
    assert_replays(captured(q, k, out), q, k, out)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["tune", "cached"])
def test_a_cold_capture_is_refused_and_the_same_succeeds_after_a_plain_call(device, monkeypatch, mode):
    monkeypatch.setenv("TUNEDQK_MODE", mode)
    q, k = inputs(device)
    out = torch.full((1, 1, 40), torch.nan, device=device)
    for _ in range(2):
        with pytest.raises(CaptureError, match="head_dim 16"):
            captured(q, k, out)
    assert out.isnan().all()
    assert ready.binaries == {}
    assert not torch.cuda.is_current_stream_capturing()
    qk_score(q, k, out=out)
    assert_scores(out, q, k)
    assert resolver_for(place(device)).tunings == (mode == "tune")
    assert_replays(captured(q, k, out), q, k, out)


@pytest.mark.gpu
def test_a_capture_of_another_bucket_launches_what_has_a_receipt(device, monkeypatch):
    warmup(**shape(max_seq_len=512))
    resolver = resolver_for(place(device))
    before = (resolver.tunings, resolver.door.validations)
    launched, launch_ = [], launch.CompiledBinary.launch

    def spy(self, *arguments):
        launched.append(self.hash)
        launch_(self, *arguments)

    monkeypatch.setattr(launch.CompiledBinary, "launch", spy)
    q, k = inputs(device, 3000)
    out = torch.zeros(1, 1, 3000, device=device)
    graph = captured(q, k, out)
    (name,) = launched
    assert TuningDB(identity_of(place(device))).receipt(name).correct
    assert (resolver.tunings, resolver.door.validations) == before
    assert [slot.seq_len for slot in ready.binaries] == [512, 512]  # for few sequences, and for many
    assert_replays(graph, q, k, out)
    qk_score(q, k)  # which is no capture, gets what is best for it
    assert sorted(slot.seq_len for slot in ready.binaries) == [512, 512, 4096]


def test_serving_is_public():
    import tunedqk

    assert tunedqk.warmup is serving.warmup
    assert tunedqk.explain is serving.explain
