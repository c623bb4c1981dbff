"""Offsets that a narrow integer does not hold: planted ones show where they should, and the block is taken once.

The whole runs under the interpreter as well, with 2^15 for the limit, and int16 for what wraps.
"""

from __future__ import annotations

import functools
import gc

import mutants
import pytest
import torch
from mutants import (
    BF16,
    E4M3,
    E5M2,
    FP16,
    FP32,
    INT32,
    INT64,
    OFFSETS,
    PAGED,
    SEVERAL,
    SMALL,
    build_mutant,
    offset_mutant,
    variant_of,
)

from tunedqk import launch, offsets, validate
from tunedqk.config import KernelConfig
from tunedqk.offsets import OffsetCheck
from tunedqk.validate import Validator, Verdict

# The interpreter's numpy reports the overflows that the faults are made of.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

PLENTY = 1 << 50


@pytest.fixture
def available(monkeypatch):
    """Sets the bytes that are available; returns a list that grows whenever somebody asks."""
    asked = []

    def set_to(free):
        monkeypatch.setattr(offsets, "MEMORY_SHARE", 0.5)  # whatever conftest.py makes of it
        monkeypatch.setattr(offsets, "available_memory", lambda device: asked.append(device) or free)
        return asked

    return set_to


@pytest.fixture
def limit_of_15_bits(monkeypatch, available):
    monkeypatch.setattr(offsets, "OFFSET_LIMIT", 2**15)
    monkeypatch.setattr(offsets, "PARTS", 2)
    monkeypatch.setattr(offsets, "ROOM", 2**14)
    available(PLENTY)


def shown(check, binary):
    """The trials whose results are wrong."""
    assert check.reserve(binary.variant.out_dtype) == ""
    return [name for name, wrong in check.trials(binary, 0) if wrong]


VARIANTS = [
    pytest.param(variant_of(), id="fp32"),
    pytest.param(variant_of(aligned=False, group=3), id="not aligned, 3 rows"),
    pytest.param(variant_of(BF16, FP32, group=2), id="bf16 to fp32, by dot"),
    pytest.param(variant_of(FP32, FP16), id="fp32 to fp16"),
    pytest.param(variant_of(FP16, head_dim=17, group=5, aligned=False), id="fp16, head_dim 17, not aligned"),
    pytest.param(variant_of(group=20), id="two blocks of rows"),
    pytest.param(variant_of(group=2, seq_lens=INT32, seq_starts=INT64), id="lengths and starts"),
    pytest.param(variant_of(BF16, group=3, seq_lens=INT64, fill=False), id="lengths, by dot, not filled"),
    pytest.param(variant_of(group=2, rows=8), id="4 queries"),
    pytest.param(variant_of(BF16, group=3, rows=16, causal=True), id="5 queries, causal, by dot"),
    pytest.param(variant_of(group=5, rows=32, seq_lens=INT32), id="6 queries of other lengths, two blocks of rows"),
    pytest.param(variant_of(seq_lens=INT32, block_table=INT32, page_size=1), id="pages of 1"),
    pytest.param(
        variant_of(BF16, group=2, seq_lens=INT32, block_table=INT64, page_size=2, aligned=False), id="pages of 2"
    ),
    pytest.param(
        variant_of(group=2, seq_lens=INT64, block_table=INT32, page_size=16, fp8=E4M3, k_scale="token"),
        id="pages of 16, e4m3 by token",
    ),
    pytest.param(variant_of(BF16, head_dim=32, group=4, fp8=E4M3, k_scale="head"), id="e4m3 by head, by dot"),
    pytest.param(variant_of(FP16, fp8=E5M2, k_scale="token"), id="e5m2 by token"),
]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.usefixtures("limit_of_15_bits")
def test_the_product_passes_the_limit(device, variant):
    target = torch.device(device)
    check = OffsetCheck(target, variant)
    for config in (SMALL, KernelConfig(64, 32, num_warps=4)):
        assert shown(check, launch.build(target, variant, config)) == []


@functools.cache
def check_that_a_copy_passes(device, variant):
    """A check in which the kernel, loaded as mutants are loaded, shows nothing."""
    check = OffsetCheck(torch.device(device), variant)
    assert shown(check, build_mutant(variant, SMALL)) == []
    return check


@pytest.mark.parametrize("offset", OFFSETS, ids=lambda offset: offset.name)
@pytest.mark.usefixtures("limit_of_15_bits")
def test_an_offset_of_16_bits_shows_in_its_trial_alone(device, offset):
    check = check_that_a_copy_passes(device, offset.variant)
    assert shown(check, build_mutant(offset.variant, SMALL, offset_mutant(offset, 16).edits)) == list(offset.places)


@pytest.mark.usefixtures("limit_of_15_bits")
def test_what_an_earlier_binary_wrote_does_not_help_a_later_one(device):
    class Idle(launch.Binary):
        def launch(self, *_):
            pass

    variant = variant_of(group=2)
    check = OffsetCheck(torch.device(device), variant)
    assert check.reserve(FP32) == ""
    for case in check._cases(SMALL.CHUNK_SIZE, 0):
        assert not check._with_spread_output(build_mutant(variant, SMALL), case)
        assert check._with_spread_output(Idle(variant, SMALL), case)


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(variant_of(group=2), id="one query"),
        pytest.param(SEVERAL, id="several queries"),
        pytest.param(PAGED._replace(page_size=2), id="pages"),
    ],
)
@pytest.mark.usefixtures("limit_of_15_bits")
def test_what_wraps_stays_in_the_block(device, monkeypatch, variant):
    """Addresses are where the block is, before the limit and beyond; what is read there by mistake is NaN."""
    check = OffsetCheck(torch.device(device), variant)
    assert check.reserve(FP32) == ""
    views = []
    inner = check._views

    def spy(*arguments):
        views.append(inner(*arguments))
        return views[-1]

    monkeypatch.setattr(check, "_views", spy)
    block = check._block.view(FP32).fill_(1)
    for name, _ in check.trials(launch.build(torch.device(device), check.variant, SMALL), 0):
        for view, wrapped in views:
            start, middle = wrapped.storage_offset(), view.storage_offset()
            assert middle >= offsets.OFFSET_LIMIT
            assert 0 <= start < offsets.OFFSET_LIMIT
            last = middle + sum((n - 1) * stride for n, stride in zip(view.shape, view.stride(), strict=True))
            assert last - middle >= offsets.OFFSET_LIMIT
            assert last < block.numel()
            assert wrapped.isnan().all() or name.endswith("output")
        views.clear()


def test_the_block_is_asked_for_once(device, available, monkeypatch):
    asked = available(PLENTY)
    monkeypatch.setattr(offsets, "OFFSET_LIMIT", 2**20)
    check = OffsetCheck(torch.device(device), variant_of(BF16))
    blocks = set()
    for _ in range(1000):
        assert check.reserve(BF16) == check.reserve(FP32) == ""
        blocks.add(check._block.data_ptr())
    assert (len(asked), len(blocks)) == (1, 1)
    check.close()
    assert check._block.numel() == 0
    assert check.reserve(FP32) == ""
    assert len(asked) == 2


def test_without_the_memory_offsets_are_not_checked(device, available):
    asked = available(10 << 30)
    check = OffsetCheck(torch.device(device), variant_of())
    for _ in range(1000):
        assert check.reserve(FP32) == "needs 17.0 GiB, and takes at most 50% of the 10.0 GiB available"
    assert len(asked) == 1
    assert check._block.numel() == 0


def test_a_float32_output_takes_twice_the_memory(device, available, monkeypatch):
    monkeypatch.setattr(offsets, "OFFSET_LIMIT", 2**20)
    elements = 2**21 + 2**17 + offsets.ROOM
    available(3 * 2 * elements)
    check = OffsetCheck(torch.device(device), variant_of(BF16))
    assert check.reserve(BF16) == ""
    assert check.reserve(FP32).startswith("needs 0.0 GiB")
    assert check._block.numel() == 2 * elements


def test_what_the_allocator_holds_unused_is_available(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 20)
    assert offsets.available_memory(torch.device("cuda", 0)) == 130


def test_an_allocation_that_fails_is_no_error(device, available, monkeypatch):
    available(PLENTY)
    check = OffsetCheck(torch.device(device), variant_of())

    def empty(*_, **__):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "empty", empty)
    assert check.reserve(FP32).startswith("needs 17.0 GiB")


def test_the_interpreter_checks_no_offsets(device, monkeypatch):
    if device == "cuda":
        pytest.skip("on a GPU they are checked")
    monkeypatch.setattr(OffsetCheck, "reserve", None)
    verdict = Validator(torch.device(device), variant_of()).check(build_mutant(variant_of(), SMALL))
    assert (verdict.verdict, verdict.what) == (validate.CORRECT, "")


UNCHECKED = "offsets beyond 2**31 not checked: too little memory"


@pytest.mark.parametrize("dtype", [pytest.param(FP32, id="fp32"), pytest.param(BF16, id="bf16, by its twin")])
def test_a_receipt_says_what_was_not_checked(make_door, monkeypatch, dtype):
    def check(self, binary):
        return Verdict(validate.CORRECT, 0.5, UNCHECKED if binary.variant.out_dtype == FP32 else "")

    monkeypatch.setattr(Validator, "check", check)
    for seq_len in (512, 1024):  # the second covers one more bucket by the first one's check
        make_door().accept(variant_of(dtype), SMALL, seq_len)
        (receipt,) = make_door().db.receipts()
        assert receipt.correct
        assert receipt.seq_lens[-1] == seq_len
        assert receipt.what.count(UNCHECKED) == 1


# --- The real limit ---


@pytest.fixture
def _enough_memory(much_memory):
    need = 1.05 * 4 * (2 * offsets.OFFSET_LIMIT + offsets.OFFSET_LIMIT // offsets.PARTS + offsets.ROOM)
    if offsets.available_memory(torch.device("cuda")) * offsets.MEMORY_SHARE < need:
        pytest.skip("too little memory is free")


@pytest.mark.gpu
@pytest.mark.usefixtures("_enough_memory")
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_product_passes_2_to_31(device, variant):
    target = torch.device(device)
    validator = Validator(target, variant)
    for config in (SMALL, KernelConfig(128, 64, num_warps=4)):
        verdict = validator.check(launch.build(target, variant, config))
        assert (verdict.verdict, verdict.what) == (validate.CORRECT, "")
    validator.close()


@pytest.mark.gpu
@pytest.mark.usefixtures("_enough_memory")
@pytest.mark.parametrize("offset", OFFSETS, ids=lambda offset: offset.name)
def test_an_offset_of_32_bits_shows_in_its_trial_alone(device, offset):
    check = OffsetCheck(torch.device(device), offset.variant)
    assert shown(check, build_mutant(offset.variant, SMALL, offset_mutant(offset, 32).edits)) == list(offset.places)


@pytest.mark.gpu
@pytest.mark.usefixtures("_enough_memory")
def test_the_verdict_names_the_offset(device):
    fault = offset_mutant(OFFSETS[0], 32)
    validator = Validator(torch.device(device), fault.variant)
    verdict = validator.check(build_mutant(fault.variant, SMALL, fault.edits))
    assert verdict.verdict == validate.WRONG_RESULT
    assert verdict.what == "at offsets beyond 2**31 (positions, inputs)"
    assert verdict.max_error <= 1  # of what was found right before
    validator.close()


@pytest.mark.gpu
def test_a_wrong_binary_is_not_launched_in_the_block(device, monkeypatch):
    monkeypatch.setattr(OffsetCheck, "reserve", None)
    validator = Validator(torch.device(device), variant_of())
    verdict = validator.check(build_mutant(variant_of(), SMALL, mutants.LAST_POSITION_SKIPPED))
    assert verdict.verdict == validate.WRONG_RESULT


@pytest.mark.gpu
def test_little_free_memory_is_no_fault(device, monkeypatch):
    total = torch.cuda.mem_get_info()[1]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (9 << 30, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", torch.cuda.memory_allocated)
    validator = Validator(torch.device(device), variant_of())
    verdict = validator.check(launch.build(torch.device(device), variant_of(), SMALL))
    assert verdict.correct
    assert verdict.what.startswith("offsets beyond 2**31 not checked: needs 17.0 GiB")


@pytest.mark.gpu
@pytest.mark.usefixtures("_enough_memory")
def test_candidates_share_the_block_and_it_is_given_back(device):
    target = torch.device(device)
    validator = Validator(target, variant_of())
    binary = launch.build(target, variant_of(), SMALL)
    assert validator.check(binary).correct
    block = validator._offsets._block
    pointer, size = block.data_ptr(), block.numel()
    del block
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(10):
        assert validator.check(binary).correct
        assert validator._offsets._block.data_ptr() == pointer
    assert torch.cuda.max_memory_allocated() - before < size // 10
    gc.collect()  # so that only what is held counts
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    validator.close()
    assert reserved - torch.cuda.memory_reserved() >= size
