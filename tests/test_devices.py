"""GPUs of different kinds in one process: nothing that was found out on one is believed of another."""

from __future__ import annotations

import functools
import gc
from types import SimpleNamespace

import msgspec
import pytest
import torch
from conftest import ON_GPU, nothing_bound
from reference import assert_scores, make_inputs

from tunedqk import db, launch, ready, resolve, tune
from tunedqk import device as device_module
from tunedqk.call import Slot
from tunedqk.config import KernelConfig, default_config, tuning_key
from tunedqk.db import TuningDB
from tunedqk.device import GpuIdentity, gpu_identity, identity_of, interpreting, toolchain
from tunedqk.errors import TuningDBWarning
from tunedqk.records import Entry, GpuFile, Receipt, Timing
from tunedqk.resolve import Resolver, resolver_for
from tunedqk.score import qk_score
from tunedqk.serving import explain
from tunedqk.variant import Variant

A40 = GpuIdentity(name="NVIDIA A40", arch="sm_86", multiprocessors=84, memory_gib=44.4)
A4000 = GpuIdentity(name="NVIDIA RTX A4000", arch="sm_86", multiprocessors=48, memory_gib=15.7)
SLICE = msgspec.structs.replace(A40, multiprocessors=14, memory_gib=7.2)
KINDS = [pytest.param(A4000, id="another model"), pytest.param(SLICE, id="a slice of it")]

VARIANT = Variant(16, 1, torch.float32, torch.float32, aligned=True)
KEY = tuning_key(40, 16, "float32", 1)
FEW = [KernelConfig(chunk, chunk, num_warps=4) for chunk in (64, 128)]
ODD = FEW[0]  # a candidate, and not the default


@pytest.fixture(autouse=True)
def _fresh(cache_dir, monkeypatch):
    nothing_bound(monkeypatch)
    monkeypatch.setattr(tune, "candidates", lambda *_: list(FEW))
    resolver_for.cache_clear()
    yield
    resolver_for.cache_clear()


@pytest.fixture
def resolver_on(device, monkeypatch):
    """Makes the resolver of a GPU of some kind, which this one pretends to be."""

    def make(identity):
        with monkeypatch.context() as patch:
            patch.setattr(resolve, "identity_of", lambda _: identity)
            return Resolver(torch.device(device))

    return make


def test_binaries_of_another_device_are_not_forgotten(monkeypatch):
    monkeypatch.setattr(launch, "interpreting", lambda: False)
    mine, other = ((index, VARIANT, ODD) for index in (0, 1))
    monkeypatch.setattr(launch, "_compiled", {mine: None, other: None})
    launch.forget(torch.device("cuda", 1))
    assert list(launch._compiled) == [mine]


def test_what_is_held_by_several_is_unloaded_once(monkeypatch):
    class Kernel:
        module = 7

    unloaded = []
    monkeypatch.setattr(device_module, "_unload", lambda *arguments: unloaded.append(arguments))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    kernel = Kernel()
    for _ in range(2):
        device_module.unload_after(kernel)
    assert unloaded == []
    del kernel
    gc.collect()
    assert unloaded == [(1, 7)]


@pytest.mark.gpu
def test_what_nobody_holds_is_unloaded_and_nothing_else(monkeypatch):
    unloaded = []
    monkeypatch.setattr(device_module, "_unload", lambda _, module: unloaded.append(module))
    place, (one, other) = torch.device("cuda", 0), (VARIANT._replace(head_dim=d) for d in (23, 29))
    held, dropped = launch.build(place, one, ODD), launch.build(place, other, ODD).kernel.module
    launch.forget(place)
    gc.collect()
    assert dropped in unloaded
    assert held.kernel.module not in unloaded


def store(identity, config, key=KEY):
    entry = Entry(key, config, Timing(10.0, 9.0, 11.0, 1024, None, 1.0), {}, toolchain(), "2026-01-02T03:04:05Z")
    assert TuningDB(identity).record(entries=[entry])
    return entry


def file_of(resolver):
    return db.load_file(resolver.db.path)


@pytest.mark.parametrize("other", KINDS)
def test_each_kind_is_tuned_and_validated_for_itself(resolver_on, other):
    resolvers = [resolver_on(identity) for identity in (A40, other)]
    for resolver in resolvers:
        binary = resolver.resolve(VARIANT, KEY)
        assert resolver.tunings == 1
        # On a GPU each has a form for ragged requests, too.
        assert resolver.door.validations == len(FEW) * (1 if interpreting() else 2)
        assert binary.config == resolver.db.winners(KEY)[0].entry.config
    files = [file_of(resolver) for resolver in resolvers]
    assert [file.gpu for file in files] == [A40, other]
    assert resolvers[0].db.path != resolvers[1].db.path
    for file in files:
        assert [entry.key for entry in file.entries] == [KEY]
        assert len(file.receipts) == 1


@pytest.mark.parametrize("mode", ["strict", "cached"])
@pytest.mark.parametrize("other", KINDS)
def test_a_winner_of_one_kind_is_none_on_another(resolver_on, monkeypatch, other, mode):
    monkeypatch.setenv("TUNEDQK_MODE", mode)
    store(A40, ODD)
    store(A40, ODD, msgspec.structs.replace(KEY, seq_len=1024))
    assert resolver_on(A40).resolve(VARIANT, KEY).config == ODD
    assert default_config(KEY, interpreted=interpreting()) != ODD
    if mode == "strict":
        with pytest.raises(resolve.MissingConfigError):
            resolver_on(other).resolve(VARIANT, KEY)
    else:
        assert resolver_on(other).resolve(VARIANT, KEY).config != ODD


@pytest.mark.parametrize("other", KINDS)
@pytest.mark.parametrize("verdict", ["correct", "wrong result"])
def test_a_receipt_of_one_kind_is_none_on_another(resolver_on, verdict, other):
    """Neither a good one, which would let a binary in unseen, nor a bad one, which would keep a right one out."""
    first, second = resolver_on(A40), resolver_on(other)
    name = first.door.build(VARIANT, ODD).binary.hash
    receipt = Receipt(name, verdict, None, "", (512,) if verdict == "correct" else (), "2026-01-02T03:04:05Z")
    assert first.db.record(receipts=[receipt])
    if verdict == "correct":
        assert first.resolve(VARIANT, KEY, ODD).hash == name
    else:
        with pytest.raises(resolve.RejectedConfigError):
            first.resolve(VARIANT, KEY, ODD)
    assert first.door.validations == 0
    assert second.resolve(VARIANT, KEY, ODD).hash == name
    assert second.door.validations == 1
    assert file_of(first).receipts == [receipt]


def test_a_file_of_another_kind_under_our_name_is_set_aside(resolver_on):
    used = resolver_on(A40)
    used.db.path.parent.mkdir(parents=True)
    content = GpuFile(gpu=SLICE, entries=[store(SLICE, ODD)])
    used.db.path.write_bytes(msgspec.json.encode(content))
    with pytest.warns(TuningDBWarning, match="made on") as caught:
        assert used.resolve(VARIANT, KEY).config in FEW
    assert len(caught) == 1
    assert used.tunings == 1
    assert file_of(used).gpu == A40


def test_the_size_of_the_memory_is_no_identity(resolver_on):
    larger = msgspec.structs.replace(A40, memory_gib=88.8)
    first, second = resolver_on(A40), resolver_on(larger)
    assert first.db.path == second.db.path
    config = first.resolve(VARIANT, KEY).config
    assert second.resolve(VARIANT, KEY).config == config
    assert (second.tunings, second.door.validations) == (0, 0)


def test_slots_of_two_gpus_are_bound_by_their_own_resolvers(device, monkeypatch):
    if ON_GPU:
        pytest.skip("devices by index are faked on the CPU")
    kinds = {0: A40, 1: A4000}
    places = {index: torch.device("cpu", index) for index in kinds}
    monkeypatch.setattr(Slot, "place", property(lambda slot: places[slot.device]))
    monkeypatch.setattr(resolve, "identity_of", lambda place: kinds[place.index])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for index in (1, 0, 1):
        monkeypatch.setattr(tune, "candidates", lambda *_, index=index: [FEW[index]])
        slot = Slot(index, VARIANT, KEY.seq_len, KEY.sequences, None)
        ready.make_ready(slot)
    assert {slot.device: binary.config for slot, binary in ready.binaries.items()} == {0: FEW[0], 1: FEW[1]}
    for index, kind in kinds.items():
        resolver = resolver_for(places[index])
        assert (resolver.gpu, resolver.tunings) == (kind, 1)
        assert [entry.config for entry in file_of(resolver).entries] == [FEW[index]]
        assert file_of(resolver).gpu == kind


def test_the_identity_is_what_the_driver_says_of_each_index(monkeypatch):
    def properties(index):
        return SimpleNamespace(
            name="NVIDIA H200", major=9, minor=0, gcnArchName="", total_memory=(index + 1) * 2**30,
            multi_processor_count=132 if index % 2 else 16,
        )  # fmt: skip

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(device_module, "gpu_identity", functools.cache(gpu_identity.__wrapped__))
    monkeypatch.setattr(device_module, "interpreting", lambda: False)
    sliced, whole, other_slice = (identity_of(torch.device("cuda", index)) for index in range(3))
    assert (sliced.name, sliced.arch, sliced.multiprocessors) == ("NVIDIA H200", "sm_90", 16)
    assert (sliced.memory_gib, whole.memory_gib) == (1.0, 2.0)
    assert sliced.identity != whole.identity
    assert sliced.identity == other_slice.identity
    assert db.file_name(sliced) == db.file_name(other_slice) != db.file_name(whole)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_call_on_a_gpu_that_is_not_current_tunes_and_explains_that_one(device):
    torch.cuda.set_device(0)
    q, k = make_inputs(2, 4, 2, 700, 16, torch.bfloat16, "cuda:1")
    assert explain(q, k).action == "tune"
    scores = qk_score(q, k)
    assert_scores(scores, q, k)
    assert (scores.device, torch.cuda.current_device()) == (torch.device("cuda:1"), 0)
    answer = explain(q, k)
    own = TuningDB(identity_of(torch.device("cuda:1")))
    assert (answer.action, answer.ready, answer.path) == ("launch", True, str(own.path))
    assert answer.receipt == own.receipt(answer.receipt.binary)
    assert answer.receipt.correct
    assert [slot.device for slot in ready.binaries] == [1]
    # The same model needs no second tuning, but its own binary.
    q, k = q.to("cuda:0"), k.to("cuda:0")
    assert_scores(qk_score(q, k), q, k)
    same = identity_of(torch.device("cuda:0")) == identity_of(torch.device("cuda:1"))
    assert resolver_for(torch.device("cuda:0")).tunings == (0 if same else 1)
    assert sorted(slot.device for slot in ready.binaries) == [0, 1]
