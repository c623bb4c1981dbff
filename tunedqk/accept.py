"""The door: a config becomes a binary that may be launched, by a receipt or by validation, or it is turned away."""

from __future__ import annotations

import contextlib
import datetime as dt
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import torch
from triton.errors import TritonError
from triton.runtime.errors import OutOfResources

from tunedqk import validate
from tunedqk.errors import CrashedError, RejectedConfigError
from tunedqk.launch import Binary, build, is_built
from tunedqk.records import Receipt
from tunedqk.validate import Validator, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tunedqk.compile_pool import CompilePool
    from tunedqk.config import KernelConfig
    from tunedqk.db import TuningDB
    from tunedqk.variant import Variant


def now() -> str:
    """The time for a record, in UTC and without fractions of a second."""
    return dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")


def float32_twin(variant: Variant) -> Variant:
    """The variant that differs by its float32 output."""
    return variant._replace(out_dtype=torch.float32)


class Built(NamedTuple):
    """A binary, or why there is none."""

    binary: Binary | None
    verdict: Verdict


class Trial(NamedTuple):
    """A config that is being built, or, with the hash of its binary, launched on tensors of our own."""

    variant: Variant
    config: KernelConfig
    binary: str = ""

    def __str__(self) -> str:
        return f"config ({self.config}) for {self.variant}"


class Watcher:
    """Is told what may take the process down, before it is tried and when that is over. This one does not care."""

    convicts = False  # whether it sees to it that who is to blame is not tried again

    def begins(self, trial: Trial) -> None:
        """Trials may overlap, and come from several threads."""

    def ends(self, trial: Trial) -> None:
        """It was survived."""


class Door:
    """Validates binaries on one device, and keeps their receipts in its tuning DB."""

    def __init__(self, device: torch.device, db: TuningDB) -> None:
        self.device = device
        self.db = db
        self.watcher = Watcher()
        self.compilers: CompilePool | None = None  # that outlive a builder; see kept_compilers
        self.validations = 0
        self.crashed = False  # whether the GPU's context is lost
        self._validator: Validator | None = None
        self._checked: dict[str, Verdict] = {}  # what this process found out, by binary
        self._refused: dict[tuple[Variant, KernelConfig], Verdict] = {}

    def release(self) -> None:
        """Free the inputs that binaries were judged on."""
        if self._validator is not None and not self.crashed:
            self._validator.close()
        self._validator = None

    def condemn(self, trial: Trial, verdict: Verdict) -> None:
        """Never try this again: it took a process down. Where it was only being built, that holds for this process."""
        self._refused[trial.variant, trial.config] = verdict
        if trial.binary:
            self._record(trial, verdict, ())

    @contextlib.contextmanager
    def building(self, variant: Variant, config: KernelConfig) -> Iterator[None]:
        """Around what compiles a config or loads its binary."""
        trial = Trial(variant, config)
        self.watcher.begins(trial)
        try:
            yield
        finally:
            self.watcher.ends(trial)

    @contextlib.contextmanager
    def launching(self, *binaries: Binary) -> Iterator[None]:
        """Around what launches binaries on tensors of our own, up to the wait for their results.

        CrashedError when that costs the process its GPU context; an only binary then gets its receipt, too. It is
        also raised, and nothing is launched, where the context was lost before.
        """
        self._require_context()
        trials = [_trial_of(binary) for binary in binaries]
        for trial in trials:
            self.watcher.begins(trial)
        try:
            yield
        except RuntimeError as error:
            self.crashed = self._context_error() is not None
            if not self.crashed:
                raise
            if len(trials) == 1 and not self.watcher.convicts:
                self.condemn(trials[0], Verdict(validate.CRASHED, what=first_line(error)))
            names = "; ".join(map(str, trials))
            raise CrashedError(
                f"{names}: {first_line(error)}. This process can use the GPU no more. Start another: `tunedqk "
                "pretune` tries each candidate in a process that may crash, and stores which one it was"
            ) from error
        finally:
            if not self.crashed:
                for trial in trials:
                    self.watcher.ends(trial)

    def _context_error(self) -> RuntimeError | None:
        """Why the GPU can no longer be used, if so. All that runs on it is waited for: what fails later is to blame."""
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError as error:
                if "captur" not in str(error):  # nor may one wait while another thread captures a graph
                    return error
        return None

    def _require_context(self) -> None:
        error = self._context_error()
        self.crashed = error is not None
        if error is not None:
            raise CrashedError(
                f"this process cannot use the GPU ({first_line(error)}): it has lost its context, to a kernel that "
                "is not tunedqk's or was named before. Start another (CUDA_LAUNCH_BLOCKING=1 shows which kernel it is)"
            ) from error

    def build(self, variant: Variant, config: KernelConfig) -> Built:
        """Compile and load. What the compiler refuses is a verdict, not an error."""
        if (variant, config) in self._refused:
            return Built(None, self._refused[variant, config])
        with self.building(variant, config):
            try:
                return Built(build(self.device, variant, config), Verdict(validate.CORRECT))
            except OutOfResources as error:
                return Built(None, Verdict(validate.OUT_OF_RESOURCES, what=first_line(error)))
            except (TritonError, RuntimeError) as error:  # RuntimeError: a failed compiler pass
                self._require_context()
                return Built(None, Verdict(validate.DID_NOT_COMPILE, what=first_line(error)))

    def accept(self, variant: Variant, config: KernelConfig, seq_len: int, *, again: bool = False) -> Binary:
        """The binary for launching at lengths of the bucket `seq_len`; RejectedConfigError if it fails validation.

        A receipt that covers the bucket suffices. Otherwise the whole list is checked, once; a 16-bit output also
        has its float32-output twin checked, since an error can hide under the rounding of 16 bits; and one comparison
        is made at the bucket's own length. What comes out becomes a receipt. again: a good receipt does not suffice.
        """
        self._work_ahead(variant, config, seq_len)
        binary, verdict = self.build(variant, config)
        if binary is not None:
            receipt = self.db.receipt(binary.hash)
            if receipt is not None and not receipt.correct:
                verdict = _verdict_of(receipt)
            elif again or receipt is None or seq_len not in receipt.seq_lens:
                verdict = self._validate(binary, None if again else receipt, seq_len)
            if verdict.correct:
                return binary
        raise RejectedConfigError(
            f"config ({config}) for {variant}: {verdict.verdict}: {verdict.what}", verdict.verdict
        )

    def _work_ahead(self, variant: Variant, config: KernelConfig, seq_len: int) -> None:
        """Compile a binary that will have to be validated at the same time as what that takes.

        Three kernels of some 0.2 s each; a process that has compiled none yet needs as much again to begin.
        """
        if self.device.type != "cuda" or is_built(self.device, variant, config):
            return
        about = _about(variant, config)  # a receipt about it, if perhaps from another toolchain: then just look
        if any(receipt.what.startswith(about) for receipt in self.db.receipts()):
            return
        with ThreadPoolExecutor() as threads:
            for ahead in {variant, float32_twin(variant)}:
                threads.submit(self.build, ahead, config)
            self.prepare(variant, seq_len, config.CHUNK_SIZE)

    def prepare(self, variant: Variant, seq_len: int, capacity: int) -> None:
        """Make what the candidates of a key are judged on. capacity: their largest chunk, so that they can share it."""
        self._validator_for(variant).prepare(seq_len, capacity)

    def screen(self, binary: Binary, seq_len: int) -> Verdict:
        """As accept, but without the twin, for a candidate that may never be launched for a user: no good receipt."""
        receipt = self.db.receipt(binary.hash)
        if receipt is not None and not receipt.correct:
            return _verdict_of(receipt)
        verdict = Verdict(validate.CORRECT)
        if receipt is None:
            verdict = self._check(binary)
        if verdict.correct and (receipt is None or seq_len not in receipt.seq_lens):
            verdict = self._check_length(binary, seq_len)
        if not verdict.correct:
            self._record(_trial_of(binary), verdict, ())
        return verdict

    def _validate(self, binary: Binary, receipt: Receipt | None, seq_len: int) -> Verdict:
        twin = ""
        if receipt is not None:
            left_out = receipt.what.removeprefix(_about(binary.variant, binary.config)).removeprefix("; ")
            verdict, twin = Verdict(validate.CORRECT, receipt.max_error, left_out), receipt.twin
        else:
            verdict = self._check(binary)
            if verdict.correct and binary.variant.out_dtype != torch.float32:
                verdict, twin = self._check_twin(binary)
                if not twin:  # there is none, so nothing is known of this binary that the next process has to believe
                    self._refused[binary.variant, binary.config] = verdict
                    return verdict
        if verdict.correct:
            at_length = self._check_length(binary, seq_len)
            if at_length.correct:
                worst = max(verdict.max_error or 0.0, at_length.max_error or 0.0)
                at_length = at_length._replace(max_error=worst, what=verdict.what)
            verdict = at_length
        self._record(_trial_of(binary), verdict, (seq_len,), twin)
        return verdict

    def _check_twin(self, binary: Binary) -> tuple[Verdict, str]:
        twin, verdict = self.build(float32_twin(binary.variant), binary.config)
        if twin is None:
            return verdict._replace(what=f"float32-output twin: {verdict.what}"), ""
        receipt = self.db.receipt(twin.hash)
        verdict = self._check(twin) if receipt is None or receipt.correct else _verdict_of(receipt)
        if verdict.what:
            verdict = verdict._replace(what=f"float32-output twin: {verdict.what}")
        return verdict, twin.hash

    def _check(self, binary: Binary) -> Verdict:
        if binary.hash not in self._checked:
            self.validations += 1
            with self.launching(binary):
                self._checked[binary.hash] = self._validator_for(binary.variant).check(binary)
        return self._checked[binary.hash]

    def _check_length(self, binary: Binary, seq_len: int) -> Verdict:
        with self.launching(binary):
            return self._validator_for(binary.variant).check_length(binary, seq_len)

    def _validator_for(self, variant: Variant) -> Validator:
        if self._validator is None or not self._validator.judges(variant):
            self.release()
            self._validator = Validator(self.device, variant)
        return self._validator

    def _record(self, trial: Trial, verdict: Verdict, seq_lens: tuple[int, ...], twin: str = "") -> None:
        receipt = Receipt(
            binary=trial.binary,
            verdict=verdict.verdict,
            max_error=verdict.max_error,
            what=_about(trial.variant, trial.config) + (f"; {verdict.what}" if verdict.what else ""),
            seq_lens=seq_lens if verdict.correct else (),
            validated_at=now(),
            twin=twin,
        )
        self.db.record(receipts=[receipt])


def _trial_of(binary: Binary) -> Trial:
    return Trial(binary.variant, binary.config, binary.hash)


def _about(variant: Variant, config: KernelConfig) -> str:
    """How a receipt tells people what it is about."""
    return f"{variant}; {config}"


def _verdict_of(receipt: Receipt) -> Verdict:
    return Verdict(receipt.verdict, receipt.max_error, receipt.what)


def first_line(error: BaseException) -> str:
    """What an error says, as far as a receipt repeats it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
