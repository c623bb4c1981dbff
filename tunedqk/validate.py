"""One binary against the loop kernel -> a verdict. The only home of tolerances.

With fp32 output a result may be off by 2 * gamma(head_dim + 2) * |scale| * sum|q||k|, where gamma(n) = n u / (1 - n u)
and u = 2^-24: twice what n rounded additions and multiplications can cost (Higham, Accuracy and Stability of Numerical
Algorithms, 3.1); a k_scale is one multiplication more. A 16-bit output adds its own one rounding. Where inputs are
integers whose products and partial sums are all exact in fp32, and in nothing shorter, the result must be equal to the
bit.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from tunedqk.arrangement import bits
from tunedqk.config import KernelConfig
from tunedqk.inputs import AS_CALLED, FILL, SCALE, Case, Inputs, Trial, judging_inputs, long_inputs, longest, trials
from tunedqk.kernels.parts import FILL_SIZE
from tunedqk.launch import RAGGED_PROGRAMS, Binary
from tunedqk.offsets import OffsetCheck
from tunedqk.variant import Variant, geometry

if TYPE_CHECKING:
    from collections.abc import Sequence

CORRECT = "correct"
WRONG_RESULT = "wrong result"
OUT_OF_BOUNDS = "wrote out of bounds"
NOT_DETERMINISTIC = "not deterministic"
INPUT_CHANGED = "input changed"
DID_NOT_COMPILE = "did not compile"
OUT_OF_RESOURCES = "out of resources"
CRASHED = "crashed"
TIMED_OUT = "timed out"
# A race also gives wrong results; the first of these that applies says most.
_SEVERITY = (OUT_OF_BOUNDS, INPUT_CHANGED, NOT_DETERMINISTIC, WRONG_RESULT)

GUARD = 37  # elements before and behind the output; odd, so that nothing about the output is aligned
FAR_OFFSETS = "offsets beyond 2**31"
# Programs per multiprocessor that no GPU holds at once.
RESIDENT_PROGRAMS = 33


class Verdict(NamedTuple):
    """verdict is "correct" or the fault; max_error is in units of the bound; `what` says where it showed."""

    verdict: str
    max_error: float | None = None
    what: str = ""

    @property
    def correct(self) -> bool:
        """Whether the binary may be launched."""
        return self.verdict == CORRECT


class _Finding(NamedTuple):
    verdict: str
    where: str
    failed: torch.Tensor  # bool, on the device


class _Output:
    """A guarded output: everything in `flat` that is not in `view` must keep its sentinel."""

    SENTINEL = 0x7FA5  # a NaN in every 16-bit format, and no result in any

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, step: int = 1) -> None:
        *outer, length = shape
        row = (length + 5) * step
        self.flat = torch.empty(2 * GUARD + math.prod(outer) * row, dtype=dtype, device=device)
        strides = [row * math.prod(outer[i + 1 :]) for i in range(len(outer))]
        self.view = self.flat.as_strided(tuple(shape), (*strides, step), GUARD)
        self.refill()

    def refill(self) -> None:
        bits(self.flat).fill_(self.SENTINEL)

    def touched(self, where: torch.Tensor) -> torch.Tensor:
        """Whether any of these elements of the view was written; where: bool, broadcasts to it."""
        return ((bits(self.view) != self.SENTINEL) & where).any()

    def touched_outside(self) -> torch.Tensor:
        """Whether anything around the view was written. Destroys the view."""
        bits(self.view).fill_(self.SENTINEL)
        return (bits(self.flat) != self.SENTINEL).any()


class _Nothing(Binary):
    """Launches nothing, and is found out."""

    def launch(self, *_: object) -> None:
        """See Binary.launch."""


def gamma(n: int) -> float:
    """Relative error of n fp32 roundings in a row."""
    return n * 2.0**-24 / (1 - n * 2.0**-24)


class Validator:
    """Judges the binaries of one shape and dtype; owns the inputs and the loop kernel's answers that they share."""

    def __init__(self, device: torch.device, variant: Variant) -> None:
        self.device = device
        self.variant = variant
        self._on_gpu = device.type == "cuda"
        self._capacity = 0
        self._judging: list[Inputs] = []
        self._trials: dict[int, list[Trial]] = {}  # by chunk
        self._long: Case | None = None
        self._offsets = OffsetCheck(device, variant)

    def close(self) -> None:
        """Give back to the driver the gigabytes that offsets are checked in; another check would take them again."""
        self._offsets.close()

    def judges(self, variant: Variant) -> bool:
        """Whether this validator's inputs are made for that variant; the output's dtype does not matter."""
        return variant._replace(out_dtype=self.variant.out_dtype) == self.variant

    def prepare(self, seq_len: int, capacity: int) -> None:
        """Make on a GPU what binaries with chunks of up to `capacity` are judged on, at their lengths and at seq_len.

        Else that happens when it is needed: the interpreter has no compiler to wait for meanwhile.
        """
        self._capacity = capacity
        if self._on_gpu:
            self._prepare_chunks(capacity)
            self._prepare_length(seq_len)
            # Has torch load the kernels that it judges with: 0.1 s in a process that has not used them.
            self._check_around(_Nothing(self.variant, KernelConfig(capacity, min(capacity, 64), num_warps=4)), [])

    def _prepare_chunks(self, chunk: int) -> None:
        if not self._judging or self._judging[0].seq_len < longest(self.variant, chunk):
            most = longest(self.variant, max(chunk, self._capacity))
            self._judging = judging_inputs(self.device, self.variant, most)
        if chunk not in self._trials:
            self._trials[chunk] = list(trials(self._judging, chunk))

    def _prepare_length(self, seq_len: int) -> Case:
        if self._long is None or self._long.seq_len != seq_len:
            self._long = None  # before the next one is made: they can be large
            self._long = long_inputs(self.device, self.variant, seq_len).case(seq_len)
        return self._long

    def _forget_what_was_spoiled(self, verdict: Verdict) -> None:
        """What a wrong binary has written to, no other is judged on."""
        if not verdict.correct:
            self._trials.clear()
            self._long = None

    def check(self, binary: Binary) -> Verdict:
        """The whole list. A correct verdict's `what` names what was left out."""
        errors: list[torch.Tensor] = []
        verdict = self._check_around(binary, errors)
        self._forget_what_was_spoiled(verdict)
        if not (self._on_gpu and verdict.correct):
            return verdict
        # After that wait, for what follows is safe only where masks hold: with strides of gigabytes, one position too
        # many is memory of somebody else's.
        return self._check_offsets(binary, verdict, errors)

    def _check_around(self, binary: Binary, errors: list[torch.Tensor]) -> Verdict:
        """At lengths around the binary's chunk; errors: gets those of the results, in units of the bound."""
        chunk = binary.config.CHUNK_SIZE
        self._prepare_chunks(chunk)
        findings: list[_Finding] = []
        for case, walkers in self._trials[chunk]:
            self._launch_and_judge(binary, case, findings, errors, walkers)
        if self._on_gpu:
            findings.append(self._large_grid(binary, self._trials[chunk][1].case))
        return _conclude(findings, errors)

    def _check_offsets(self, binary: Binary, so_far: Verdict, errors: list[torch.Tensor]) -> Verdict:
        """Offsets that no int32 holds, if there is the memory for it; errors: those that go into the verdict."""
        lacking = self._offsets.reserve(binary.variant.out_dtype)
        if lacking:
            return so_far._replace(what=f"{FAR_OFFSETS} not checked: {lacking}")
        shown = self._offsets.trials(binary, self._capacity)
        return _conclude([_Finding(WRONG_RESULT, f"{FAR_OFFSETS} ({name})", wrong) for name, wrong in shown], errors)

    def check_length(self, binary: Binary, seq_len: int) -> Verdict:
        """One comparison at the length of a bucket. The interpreter, which would take minutes, skips it."""
        if not self._on_gpu:
            return Verdict(CORRECT)
        findings: list[_Finding] = []
        errors: list[torch.Tensor] = []
        self._launch_and_judge(binary, self._prepare_length(seq_len), findings, errors, (AS_CALLED,))
        verdict = _conclude(findings, errors)
        self._forget_what_was_spoiled(verdict)
        return verdict

    def _launch_and_judge(
        self,
        binary: Binary,
        case: Case,
        findings: list[_Finding],
        errors: list[torch.Tensor],
        walkers: tuple[int, ...],
    ) -> None:
        """Launch on one length; odd lengths get a tail, and positions two elements apart."""
        seq_len, filled = case.seq_len, binary.variant.fill
        tail = self._tail(binary, seq_len)
        shape = (*case.expected.shape[:-1], seq_len + tail)
        out = _Output(shape, binary.variant.out_dtype, self.device, step=1 + seq_len % 2)
        sizes = geometry(case.tensors, out.view, "NHD", fill_tail=filled)
        where = f"seq_len {seq_len}"
        first: torch.Tensor | None = None
        for count in walkers:
            out.refill()
            most = RAGGED_PROGRAMS if count == AS_CALLED else count * binary.grid(sizes, 1).programs
            binary.launch(case.tensors, out.view, SCALE, FILL, binary.grid(sizes, most))
            if first is None:
                first = out.flat.clone() if len(walkers) > 1 else out.flat
            else:
                findings.append(_Finding(NOT_DETERMINISTIC, where, (bits(first) != bits(out.flat)).any()))
        wrong, error = self._compare(out.view[..., :seq_len], case)
        if filled:
            wrong |= (out.view[..., seq_len:] != FILL).any()
        else:
            hidden = torch.ones(shape, dtype=torch.bool, device=self.device)
            hidden[..., :seq_len] = case.magnitude < 0
            findings.append(_Finding(OUT_OF_BOUNDS, f"{where}, a hidden position", out.touched(hidden)))
        findings.append(_Finding(WRONG_RESULT, where, wrong))
        errors.append(error)
        findings.append(_Finding(OUT_OF_BOUNDS, where, out.touched_outside()))
        findings.append(_Finding(INPUT_CHANGED, where, case.changed()))

    @staticmethod
    def _tail(binary: Binary, seq_len: int) -> int:
        """Positions of an output beyond the last key. Where only filling is left, two programs get a block each."""
        if seq_len == 1 and binary.variant.ragged:
            return binary.config.CHUNK_SIZE + int(FILL_SIZE.value) + 3
        return 3 * (seq_len % 2)

    def _compare(self, got: torch.Tensor, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether a result differs by more than its bound; the largest error in units of the bound."""
        expected, hidden = case.expected, case.magnitude < 0
        roundings = self.variant.head_dim + 2 + bool(self.variant.k_scale)
        bound = 2 * gamma(roundings) * case.magnitude
        error = (got.float() - expected).abs()
        allowed = bound
        if got.dtype != torch.float32:
            info = torch.finfo(got.dtype)
            allowed = bound + (expected.abs() + bound) * (info.eps / 2) + info.smallest_normal * info.eps / 2
        exact = (got == expected.to(got.dtype)) | (got.isnan() & expected.isnan())
        if not self.variant.fill:  # whether they were touched is another question
            exact |= hidden
        # Written so that a NaN fails, and what is not finite must be equal.
        right = exact | ((error <= allowed) & (allowed < math.inf) & ~(case.exact | hidden))
        return ~right.all(), torch.where(exact, 0.0, error / allowed).amax()

    def _large_grid(self, binary: Binary, case: Case) -> _Finding:
        """More programs than the GPU holds at once, over one request's tensors, which all batch elements share."""

        def launch(batch: int) -> tuple[_Output, int]:
            tensors = case.tensors.repeated(batch)
            out = _Output((batch, *case.expected.shape[1:]), binary.variant.out_dtype, self.device)
            sizes = geometry(tensors, out.view, "NHD", fill_tail=binary.variant.fill)
            grid = binary.grid(sizes)
            binary.launch(tensors, out.view, SCALE, FILL, grid)
            return out, grid.programs

        expected, programs = launch(1)
        held = RESIDENT_PROGRAMS * torch.cuda.get_device_properties(self.device).multi_processor_count
        batch = math.ceil(held / programs)
        out, _ = launch(batch)
        return _Finding(WRONG_RESULT, f"batch {batch}", (bits(out.view) != bits(expected.view)).any())


def _conclude(findings: list[_Finding], errors: list[torch.Tensor]) -> Verdict:
    """One verdict from findings, with one wait for the device."""
    numbers = torch.stack([f.failed.float() for f in findings] + [e.float() for e in errors]).tolist()
    failed = [finding for finding, number in zip(findings, numbers, strict=False) if number]
    max_error = max(numbers[len(findings) :])
    max_error = None if math.isnan(max_error) or math.isinf(max_error) else round(max_error, 4)
    for verdict in _SEVERITY:
        places = [finding.where for finding in failed if finding.verdict == verdict]
        if places:
            return Verdict(verdict, max_error, f"at {places[0]}")
    return Verdict(CORRECT, max_error)
