"""Validation: planted faults get the verdict that fits, right binaries are accepted, receipts are kept."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import threading
from fractions import Fraction

import msgspec
import mutants
import pytest
import torch
from mutants import BF16, E4M3, E5M2, FP16, FP32, INT32, INT64, MUTANTS, SMALL, build_mutant, variant_of
from triton.errors import TritonError
from triton.runtime.errors import OutOfResources

from tunedqk import accept, launch, validate
from tunedqk.accept import float32_twin
from tunedqk.builder import Builder
from tunedqk.config import DEFAULT_GRID, KernelConfig, search_space, tuning_key
from tunedqk.device import interpreting
from tunedqk.errors import CrashedError, RejectedConfigError
from tunedqk.inputs import Case
from tunedqk.records import Receipt
from tunedqk.tensors import Tensors
from tunedqk.tune import candidates, tuned_variant
from tunedqk.validate import Validator, Verdict

pytestmark = [
    # The interpreter's numpy reports the overflows that some faults are made of.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:view is deprecated"),
]


_shared = {}


def shared_validator(device, variant):
    return _shared.setdefault((device, variant), Validator(torch.device(device), variant))


@pytest.fixture(autouse=True)
def _room_for_the_next():
    """Shared validators keep their inputs, but not what takes gigabytes."""
    yield
    for validator in _shared.values():
        validator.close()


@functools.cache
def copy_is_accepted(device, variant, config):
    """Loading a kernel as mutants are loaded must not be what gets them rejected."""
    return shared_validator(device, variant).check(build_mutant(variant, config)).correct


# --- Mutants ---


@pytest.mark.parametrize(
    "mutant", [pytest.param(m, id=m.name, marks=[pytest.mark.gpu] if m.gpu else []) for m in MUTANTS]
)
def test_a_planted_fault_is_rejected(mutant, device, monkeypatch, record_property):
    assert copy_is_accepted(device, mutant.variant, mutant.config)
    if mutant.far:
        monkeypatch.setattr(validate, "GUARD", 5001)
    # What a fault spoils on a GPU must not be shared.
    target = torch.device(device)
    validator = shared_validator(device, mutant.variant) if device == "cpu" else Validator(target, mutant.variant)
    verdict = validator.check(build_mutant(mutant.variant, mutant.config, mutant.edits))
    validator.close()
    if verdict.correct and "not checked" in verdict.what:
        pytest.skip(verdict.what)
    record_property("mutant", verdict.verdict)  # counted in conftest.py
    assert verdict.verdict in mutant.verdicts, verdict
    assert verdict.what.startswith("at ")


def test_mutants_follow_the_product():
    assert len(MUTANTS) >= 15
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    with pytest.raises(AssertionError, match="no longer contains"):
        mutants.mutated_source((("no such expression", ""),))


def test_a_fault_at_two_stages_is_right_at_one(device):
    (fault,) = (mutant for mutant in MUTANTS if mutant.name == "wrong at two stages")
    config = msgspec.structs.replace(fault.config, num_stages=1)
    assert shared_validator(device, fault.variant).check(build_mutant(fault.variant, config, fault.edits)).correct


# The seed's fault as measured on an H200: (head_dim, num_warps) where its form is wrong, at every chunk size.
WRONG_VIEWS = {(64, 1), (128, 1), (128, 2)}


@pytest.mark.parametrize("num_warps", [pytest.param(n, id=f"{n} warps") for n in (1, 2, 4, 8)])
@pytest.mark.parametrize("chunk", [16, 64, 256])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.gpu
def test_the_form_by_tl_view_is_rejected_where_it_permutes(device, head_dim, chunk, num_warps):
    variant = variant_of(head_dim=head_dim)
    binary = build_mutant(variant, KernelConfig(chunk, chunk, num_warps), mutants.TL_VIEW)
    verdict = shared_validator(device, variant).check(binary)
    expected = validate.WRONG_RESULT if (head_dim, num_warps) in WRONG_VIEWS else validate.CORRECT
    assert verdict.verdict == expected, verdict


@pytest.mark.skipif(not interpreting(), reason="what the form does on a GPU depends on the warps")
def test_the_form_by_tl_view_is_right_under_the_interpreter(device):
    variant = variant_of(head_dim=64)
    assert shared_validator(device, variant).check(build_mutant(variant, SMALL, mutants.TL_VIEW)).correct


@pytest.mark.gpu
def test_a_fault_in_long_caches_shows_at_the_length_of_the_bucket(device):
    variant = variant_of()
    validator = Validator(torch.device(device), variant)
    binary = build_mutant(variant, SMALL, mutants.CHUNKS_WRAP)
    assert validator.check_length(build_mutant(variant, SMALL), 512).correct
    assert validator.check_length(binary, 256).correct
    assert validator.check_length(binary, 512).verdict == validate.WRONG_RESULT


# --- Faults of a launch, whatever the kernel does ---


class Spoiled(launch.Binary):
    """A right binary whose output is spoiled by `spoil(number of the launch at this length, out, out before it)`."""

    def __init__(self, device, variant, spoil):
        super().__init__(variant, SMALL)
        self._binary = launch.build(torch.device(device), variant, SMALL)
        self._spoil = spoil
        self._launches = {}

    def launch(self, tensors, out, *arguments):
        before = out.clone()
        self._binary.launch(tensors, out, *arguments)
        number = self._launches[out.shape] = self._launches.get(out.shape, 0) + 1
        self._spoil(number, out, before)


def check_spoiled(device, spoil, variant=None):
    variant = variant or variant_of()
    return shared_validator(device, variant).check(Spoiled(device, variant, spoil))


def at_offset(out, offset):
    """The element of out's memory that lies `offset` after its first."""
    return out.as_strided((1,), (1,), out.storage_offset() + offset)


def next_float(out):
    """One bit in one element, far below any tolerance."""
    out[0, 0, :1] = torch.nextafter(out[0, 0, :1], torch.tensor(torch.inf, device=out.device))


def no_spoil(*_):
    pass


def test_nothing_spoiled_is_accepted(device):
    assert check_spoiled(device, no_spoil).correct


def test_a_bit_that_differs_between_launches_is_rejected(device):
    verdict = check_spoiled(device, lambda number, out, _: next_float(out) if number > 1 else None)
    assert verdict.verdict == validate.NOT_DETERMINISTIC


def test_what_an_earlier_candidate_wrote_does_not_help_a_later_one(device):
    assert check_spoiled(device, no_spoil).correct

    class Idle(launch.Binary):
        def launch(self, *_):
            pass

    assert shared_validator(device, variant_of()).check(Idle(variant_of(), SMALL)).verdict == validate.WRONG_RESULT


@pytest.mark.parametrize("first", [pytest.param(True, id="first launch"), pytest.param(False, id="later launches")])
def test_half_an_output_is_rejected(device, first):
    # The sentinel is renewed before every launch, so that one launch cannot fill in for another.
    def spoil(number, out, before):
        if (number == 1) == first:
            half = out.shape[2] // 2
            out[..., half:] = before[..., half:]

    assert check_spoiled(device, spoil).verdict == validate.NOT_DETERMINISTIC


@pytest.mark.parametrize(
    "offset",
    [
        pytest.param(lambda _: -1, id="just before"),
        pytest.param(lambda _: -validate.GUARD, id="start of the guard before"),
        pytest.param(lambda out: out.shape[2] * out.stride(2), id="between rows"),
        pytest.param(lambda out: out.shape[0] * out.stride(0), id="start of the guard behind"),
        pytest.param(lambda out: out.shape[0] * out.stride(0) + validate.GUARD - 1, id="end of the guard behind"),
    ],
)
def test_one_element_written_out_of_bounds_is_rejected(device, offset):
    verdict = check_spoiled(device, lambda _, out, __: at_offset(out, offset(out)).zero_())
    assert verdict.verdict == validate.OUT_OF_BOUNDS


def test_an_element_written_between_positions_is_rejected(device):
    def spoil(_, out, __):
        if out.stride(2) > 1:  # so it is at odd lengths
            at_offset(out, 1).zero_()

    assert check_spoiled(device, spoil).verdict == validate.OUT_OF_BOUNDS


def test_a_changed_input_is_the_verdict_although_results_differ_too(device):
    class Overwriting(Spoiled):
        def launch(self, tensors, *arguments):
            super().launch(tensors, *arguments)
            tensors.k[0, 0, 0, 0] += 1

    verdict = shared_validator(device, variant_of()).check(Overwriting(device, variant_of(), no_spoil))
    assert verdict.verdict == validate.INPUT_CHANGED
    assert check_spoiled(device, no_spoil).correct  # which is judged on other inputs


# --- The bound ---


@pytest.mark.parametrize("n", [1, 18, 130, 578])
def test_gamma_is_the_bound_of_n_roundings(n):
    unit = Fraction(1, 2**24)
    assert validate.gamma(n) == pytest.approx(float(n * unit / (1 - n * unit)), rel=1e-12)


def compared(device, dtype, got_of):
    """Whether results made from (reference, bound) count as wrong, and their error in bounds."""
    validator = Validator(torch.device(device), variant_of(out_dtype=dtype))
    reference = torch.randn(1, 1, 512).to(device)
    magnitude = 8 * reference.abs()
    case = Case(Tensors(reference, reference), reference, magnitude, torch.zeros_like(reference, dtype=torch.bool))
    bound = 2 * validate.gamma(validator.variant.head_dim + 2) * magnitude
    wrong, error = validator._compare(got_of(reference, bound), case)
    return wrong.item(), error.item()


@pytest.mark.parametrize("sign", [-1, 1])
def test_fp32_may_be_off_by_the_bound_and_no_more(device, sign):
    wrong, error = compared(device, FP32, lambda reference, bound: reference + sign * 0.9 * bound)
    assert not wrong
    assert error == pytest.approx(0.9, rel=0.1)
    wrong, error = compared(device, FP32, lambda reference, bound: reference + sign * 1.1 * bound)
    assert wrong
    assert error > 1


@pytest.mark.parametrize("dtype", [pytest.param(FP16, id="fp16"), pytest.param(BF16, id="bf16")])
def test_16_bits_may_be_off_by_one_rounding_and_no_more(device, dtype):
    wrong, error = compared(device, dtype, lambda reference, _: reference.to(dtype))
    assert (wrong, error) == (False, 0.0)
    # Two steps of the format from the nearest.
    wrong, error = compared(device, dtype, lambda reference, _: (reference.to(dtype).view(torch.int16) + 2).view(dtype))
    assert wrong
    assert error > 1


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_one_result_that_is_no_number_is_wrong(device, value):
    def spoiled(reference, _):
        return torch.where(torch.arange(reference.shape[2], device=device) == 77, value, reference)

    assert compared(device, FP32, spoiled)[0]


# --- Right binaries ---

KEYS = [
    pytest.param(tuning_key(1, 16, "float32", 1), id="fp32"),
    pytest.param(tuning_key(1, 16, "float16", 1), id="fp16"),
    pytest.param(tuning_key(1, 17, "bfloat16", 1), id="bf16, head_dim 17"),
    pytest.param(tuning_key(1, 16, "bfloat16", 4), id="bf16, 4 rows"),
    pytest.param(tuning_key(1, 260, "float32", 1), id="fp32, head_dim 260"),
    pytest.param(tuning_key(1, 16, "float8_e4m3fn", 4, page_size=16), id="e4m3, 4 rows, pages of 16"),
]


@pytest.mark.parametrize("key", KEYS)
def test_every_config_of_the_product_is_accepted(device, key):
    target, variant = torch.device(device), tuned_variant(key)
    validator = Validator(target, variant)
    configs = candidates(key, target)
    assert configs
    validator.prepare(key.seq_len, capacity=max(config.CHUNK_SIZE for config in configs))
    for config in configs:
        binary = launch.build(target, variant, config)
        for verdict in (validator.check(binary), validator.check_length(binary, key.seq_len)):
            assert verdict.correct, (config, verdict)
            assert (verdict.max_error or 0.0) <= 1


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(variant_of(aligned=False), id="not aligned"),
        pytest.param(variant_of(BF16, group=5, aligned=False), id="not aligned, by dot"),
        pytest.param(variant_of(BF16, FP32), id="bf16 to fp32"),
        pytest.param(variant_of(FP16, BF16), id="fp16 to bf16"),
        pytest.param(variant_of(FP32, FP16), id="fp32 to fp16"),
        pytest.param(variant_of(FP16, FP32, head_dim=1), id="head_dim 1"),
        pytest.param(variant_of(group=5), id="5 rows by sum"),
        pytest.param(variant_of(BF16, head_dim=288, group=2), id="head_dim 288 by dot"),
        pytest.param(variant_of(group=16), id="fp32 by dot"),
        pytest.param(variant_of(head_dim=260, seq_starts=INT64, fill=False), id="starts, head_dim 260, not filled"),
        pytest.param(
            variant_of(BF16, rows=4, seq_lens=INT64, seq_starts=INT32, fill=False),
            id="lengths of 4 queries, starts, not filled",
        ),
        pytest.param(
            variant_of(FP16, FP32, group=3, rows=8, seq_lens=INT32, causal=True, aligned=False),
            id="causal, lengths, not aligned",
        ),
        pytest.param(variant_of(group=5, rows=16, seq_starts=INT32, causal=True), id="causal, starts"),
        pytest.param(variant_of(FP32, FP16, seq_lens=INT64, block_table=INT64, page_size=1), id="pages of 1"),
        pytest.param(
            variant_of(FP16, group=2, seq_lens=INT32, seq_starts=INT32, block_table=INT32, page_size=2, fill=False),
            id="pages of 2, starts, not filled",
        ),
        pytest.param(variant_of(seq_lens=INT32, block_table=INT64, page_size=256), id="pages of 256"),
        pytest.param(
            variant_of(
                BF16, FP32, 32, 2, fp8=E4M3, k_scale="token", rows=8, seq_lens=INT32, block_table=INT32, page_size=16,
                causal=True,
            ),
            id="pages of 16, causal, e4m3 by token",
        ),
        pytest.param(
            variant_of(FP16, group=2, fp8=E5M2, k_scale="head", seq_lens=INT32, aligned=False),
            id="lengths, e5m2 by head, not aligned",
        ),
        pytest.param(variant_of(group=2, fp8=E4M3, rows=4), id="e4m3, 2 queries"),
    ],
)  # fmt: skip
def test_every_variant_is_accepted(device, variant):
    target = torch.device(device)
    verdict = Validator(target, variant).check(launch.build(target, variant, SMALL))
    assert verdict.correct, verdict
    assert verdict.max_error <= 1


SHAPES = list(itertools.product(DEFAULT_GRID.head_dims, DEFAULT_GRID.dtypes, DEFAULT_GRID.rows))


def test_the_buckets_of_a_shape_share_their_binaries():
    for shape in SHAPES:
        keys = [tuning_key(seq_len, *shape) for seq_len in DEFAULT_GRID.seq_lens]
        assert len({tuple(search_space(key)) for key in keys}) == 1
        assert len({tuned_variant(key) for key in keys}) == 1


@pytest.mark.gpu
@pytest.mark.stress
@pytest.mark.parametrize("dtype", DEFAULT_GRID.dtypes)
def test_every_binary_of_the_default_grid_is_accepted(device, make_door, capsys, dtype):
    target, seq_len = torch.device(device), 4096
    keys = [tuning_key(seq_len, *shape) for shape in SHAPES if shape[1] == dtype]
    wanted = {key: candidates(key, target) for key in keys}
    every = [(tuned_variant(key), config) for key, configs in wanted.items() for config in configs]
    judged, rejected, without = 0, [], 0
    with Builder(make_door(), every) as builder:
        builds = {
            (key, variant, config): builder.submit(variant, config)
            for key, configs in wanted.items()
            for variant in dict.fromkeys((tuned_variant(key), float32_twin(tuned_variant(key))))
            for config in configs
        }
        for key, configs in wanted.items():
            validator = Validator(target, tuned_variant(key))
            validator.prepare(seq_len, capacity=max(config.CHUNK_SIZE for config in configs))
            for (_, variant, config), build in ((b, builds[b]) for b in builds if b[0] == key):
                binary, verdict = build.result()
                if binary is not None:
                    verdict = validator.check(binary)
                    without += "not checked" in verdict.what
                if verdict.correct:
                    verdict = validator.check_length(binary, seq_len)
                judged += 1
                if not verdict.correct:
                    rejected.append(f"{variant}; {config}: {verdict}")
            validator.close()
    with capsys.disabled():
        offsets = f" ({without} without a check of offsets)" if without else ""
        print(f"\n{dtype}: {judged} binaries of {len(keys)} shapes: {judged - len(rejected)} accepted{offsets}")
    assert not rejected, "\n".join(rejected)


# --- The door ---


def forbidden(*_, **__):
    raise AssertionError("called")


def is_small(_, config):
    return config == SMALL


def test_a_binary_is_validated_once_on_a_gpu_model(device, make_door, monkeypatch):
    first = make_door()
    binary = first.accept(variant_of(), SMALL, 512)
    assert first.validations == 1
    (receipt,) = first.db.receipts()
    assert (receipt.binary, receipt.verdict, receipt.seq_lens, receipt.twin) == (binary.hash, "correct", (512,), "")
    assert receipt.max_error <= 1
    first.accept(variant_of(), SMALL, 512)
    assert first.validations == 1

    monkeypatch.setattr(Validator, "check", forbidden)
    monkeypatch.setattr(Validator, "check_length", forbidden)
    second = make_door()
    assert second.accept(variant_of(), SMALL, 512).hash == binary.hash
    assert second.validations == 0
    assert second.db.receipts() == [receipt]


def test_a_receipt_is_for_one_binary(make_door):
    door = make_door()
    hashes = {
        door.accept(variant, config, 512).hash
        for variant in (variant_of(), variant_of(aligned=False))
        for config in (SMALL, KernelConfig(32, 32, 4))
    }
    assert {receipt.binary for receipt in door.db.receipts()} == hashes
    assert len(hashes) == 4


def test_another_bucket_costs_one_comparison(make_door, monkeypatch):
    make_door().accept(variant_of(), SMALL, 512)
    lengths = []
    check_length = Validator.check_length

    def spy(self, binary, seq_len):
        lengths.append(seq_len)
        return check_length(self, binary, seq_len)

    monkeypatch.setattr(Validator, "check_length", spy)
    door = make_door()
    door.accept(variant_of(), SMALL, 1024)
    door.accept(variant_of(), SMALL, 512)
    assert (door.validations, lengths) == (0, [1024])
    (receipt,) = door.db.receipts()
    assert receipt.seq_lens == (512, 1024)
    make_door().accept(variant_of(), SMALL, 1024)
    assert lengths == [1024]


def test_a_bad_receipt_is_never_tried_again(make_door, monkeypatch):
    monkeypatch.setattr(accept, "build", mutants.builder(mutants.LAST_POSITION_SKIPPED, is_small))
    door = make_door()
    with pytest.raises(RejectedConfigError, match="wrong result") as first:
        door.accept(variant_of(), SMALL, 512)
    assert first.value.verdict == validate.WRONG_RESULT
    (receipt,) = door.db.receipts()
    assert (receipt.verdict, receipt.seq_lens) == (validate.WRONG_RESULT, ())

    monkeypatch.setattr(mutants.binary_class(mutants.LAST_POSITION_SKIPPED), "launch", forbidden)
    for again in (door, make_door()):
        validations = again.validations
        with pytest.raises(RejectedConfigError, match=r"chunk 16.*head_dim 16.*wrong result") as caught:
            again.accept(variant_of(), SMALL, 1024)
        assert caught.value.verdict == validate.WRONG_RESULT
        assert again.screen(again.build(variant_of(), SMALL).binary, 512).verdict == validate.WRONG_RESULT
        assert again.validations == validations
    assert make_door().accept(variant_of(), KernelConfig(32, 32, 4), 512)


def test_a_receipt_of_16_bits_names_its_fp32_twin(device, make_door):
    door = make_door()
    door.accept(variant_of(BF16), SMALL, 512)
    twin = launch.build(torch.device(device), variant_of(BF16, FP32), SMALL)
    assert [receipt.twin for receipt in door.db.receipts()] == [twin.hash]
    assert door.validations == 2


def test_a_fault_that_only_the_fp32_twin_shows_rejects_the_binary(make_door, monkeypatch):
    def is_twin(variant, _):
        return variant.out_dtype == FP32

    monkeypatch.setattr(accept, "build", mutants.builder(mutants.BF16_PRODUCTS, is_twin))
    door = make_door()
    with pytest.raises(RejectedConfigError, match="twin") as caught:
        door.accept(variant_of(BF16), SMALL, 512)
    assert caught.value.verdict == validate.WRONG_RESULT
    assert not any(receipt.correct for receipt in door.db.receipts())


def test_a_fault_at_the_length_of_the_bucket_rejects_the_binary(make_door, monkeypatch):
    make_door().accept(variant_of(), SMALL, 512)
    monkeypatch.setattr(Validator, "check_length", lambda *_: Verdict(validate.WRONG_RESULT, None, "at seq_len 1024"))
    door = make_door()
    with pytest.raises(RejectedConfigError, match="1024"):
        door.accept(variant_of(), SMALL, 1024)
    (receipt,) = make_door().db.receipts()
    assert receipt.verdict == validate.WRONG_RESULT
    assert receipt.max_error is None  # as of a NaN: no number says how wrong it is


def test_a_candidate_that_was_only_screened_gets_no_good_receipt(make_door):
    door = make_door()
    assert door.screen(door.build(variant_of(BF16), SMALL).binary, 512).correct
    assert door.db.receipts() == []
    assert door.validations == 1


def test_a_screened_candidate_is_compared_at_another_bucket_too(make_door, monkeypatch):
    make_door().accept(variant_of(), SMALL, 512)
    monkeypatch.setattr(Validator, "check", forbidden)
    monkeypatch.setattr(Validator, "check_length", lambda *_: Verdict(validate.WRONG_RESULT, None, "at seq_len 1024"))
    door = make_door()
    binary = door.build(variant_of(), SMALL).binary
    assert door.screen(binary, 512).correct
    assert door.screen(binary, 1024).verdict == validate.WRONG_RESULT


def test_validated_again_only_a_good_receipt_is_put_to_the_test(make_door, monkeypatch):
    door = make_door()
    binary = door.accept(variant_of(), SMALL, 512)
    door = make_door()
    assert door.accept(variant_of(), SMALL, 512, again=True).hash == binary.hash
    assert door.validations == 1
    make_door().db.record(receipts=[Receipt(binary.hash, validate.CRASHED, None, "SIGSEGV", (), accept.now())])
    monkeypatch.setattr(Validator, "check", forbidden)
    with pytest.raises(RejectedConfigError, match="SIGSEGV"):
        make_door().accept(variant_of(), SMALL, 512, again=True)


def test_a_context_lost_to_somebody_else_is_held_against_no_binary(make_door, monkeypatch):
    make_door().accept(variant_of(), SMALL, 512)
    door = make_door()
    monkeypatch.setattr(accept.Door, "_context_error", lambda _: RuntimeError("an illegal memory access"))
    monkeypatch.setattr(Validator, "check", forbidden)
    monkeypatch.setattr(Validator, "check_length", forbidden)
    for config in (SMALL, KernelConfig(32, 32, 4)):
        with pytest.raises(CrashedError, match=r"illegal memory access.*lost its context"):
            door.accept(variant_of(), config, 1024)
    assert [receipt.correct for receipt in make_door().db.receipts()] == [True]


def test_what_is_built_after_the_context_was_lost_is_not_called_uncompilable(make_door, monkeypatch):
    def build(*_):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(accept, "build", build)
    monkeypatch.setattr(accept.Door, "_context_error", lambda _: RuntimeError("an illegal memory access"))
    with pytest.raises(CrashedError):
        make_door().build(variant_of(), SMALL)


@pytest.mark.parametrize(
    ("says", "lost"),
    [
        pytest.param("operation not permitted when stream is capturing", False, id="a capture elsewhere"),
        pytest.param("an illegal memory access was encountered", True, id="lost"),
        pytest.param("", False, id="fine"),
    ],
)
def test_a_context_that_may_not_be_waited_for_is_not_yet_lost(make_door, monkeypatch, says, lost):
    def synchronize(_):
        if says:
            raise RuntimeError(says)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    door = make_door()
    door.device = torch.device("cuda", 0)
    assert (door._context_error() is not None) is lost
    with pytest.raises(CrashedError, match=says) if lost else contextlib.nullcontext():
        door._require_context()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    door._require_context()  # it is asked for each time anew
    assert not door.crashed


@pytest.mark.gpu
def test_a_capture_in_another_thread_is_no_lost_context(make_door):
    captures, go_on = threading.Event(), threading.Event()

    def capture():
        with contextlib.suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
            captures.set()
            go_on.wait(60)

    torch.cuda.synchronize()
    thread = threading.Thread(target=capture)
    thread.start()
    assert captures.wait(60)
    error = make_door()._context_error()
    go_on.set()
    thread.join()
    assert error is None
    assert make_door().accept(variant_of(), SMALL, 512)


def test_a_twin_that_cannot_be_built_now_is_no_verdict_for_good(make_door, monkeypatch):
    def build(device, variant, config):
        if variant.out_dtype == FP32:
            raise RuntimeError("Triton Error [CUDA]: out of memory")
        return launch.build(device, variant, config)

    door = make_door()
    with monkeypatch.context() as patch:
        patch.setattr(accept, "build", build)
        for _ in range(2):
            with pytest.raises(RejectedConfigError, match="twin: Triton Error"):
                door.accept(variant_of(BF16), SMALL, 512)
    assert door.validations == 1
    assert door.db.receipts() == []
    assert make_door().accept(variant_of(BF16), SMALL, 512)


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        pytest.param(OutOfResources(300000, 232448, "shared memory"), validate.OUT_OF_RESOURCES, id="out of resources"),
        pytest.param(TritonError("no such layout"), validate.DID_NOT_COMPILE, id="Triton refuses"),
        pytest.param(RuntimeError("PassManager::run failed\nand more"), validate.DID_NOT_COMPILE, id="a pass fails"),
    ],
)
def test_what_does_not_compile_is_a_verdict(make_door, monkeypatch, error, verdict):
    def build(*_):
        raise error

    monkeypatch.setattr(accept, "build", build)
    door = make_door()
    built = door.build(variant_of(), SMALL)
    assert built.binary is None
    assert built.verdict.verdict == verdict
    assert built.verdict.what
    assert "\n" not in built.verdict.what
    with pytest.raises(RejectedConfigError, match=verdict) as caught:
        door.accept(variant_of(), SMALL, 512)
    assert caught.value.verdict == verdict


def test_a_rejection_comes_whole_from_another_process():
    error = copy.copy(RejectedConfigError("config: wrong result", "wrong result"))  # made as unpickling makes it
    assert (str(error), error.verdict) == ("config: wrong result", "wrong result")


@pytest.mark.gpu
def test_what_a_validation_needs_is_compiled_at_the_same_time(make_door, monkeypatch):
    built = []

    def spy(*arguments):
        built.append((arguments[1], threading.current_thread() is threading.main_thread()))
        return launch.build(*arguments)

    monkeypatch.setattr(accept, "build", spy)
    monkeypatch.setattr(launch, "_compiled", {})  # as in a fresh process
    variant = variant_of(BF16, head_dim=48)
    make_door().accept(variant, SMALL, 512)
    assert {(variant, False), (float32_twin(variant), False)} <= set(built)
    # With a receipt nothing is to be validated, so nothing else to be compiled.
    monkeypatch.setattr(launch, "_compiled", {})
    built.clear()
    make_door().accept(variant, SMALL, 512)
    assert built == [(variant, True)]


@pytest.mark.gpu
def test_a_config_beyond_the_shared_memory_is_a_verdict(make_door):
    config = KernelConfig(1024, 128, num_warps=8, num_stages=8)
    for _ in range(2):  # Triton remembers what it could not load, too
        with pytest.raises(RejectedConfigError) as caught:
            make_door().accept(variant_of(BF16, head_dim=512, group=16), config, 1024)
        assert caught.value.verdict == validate.OUT_OF_RESOURCES
