"""Tuning ahead of time: which keys are missing, tuning them one by one, and what came of it."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, NamedTuple

import torch

from tunedqk.accept import float32_twin
from tunedqk.builder import Builder, kept_compilers
from tunedqk.db import TuningDB
from tunedqk.device import identity_of, interpreting
from tunedqk.errors import NoAcceptedConfigError, RejectedConfigError, TuningDeclinedError
from tunedqk.floor import read_write_floor_us
from tunedqk.resolve import Resolver
from tunedqk.tune import candidates, tune, tuned_variant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from tunedqk.config import KernelConfig, TuningKey
    from tunedqk.records import Entry
    from tunedqk.workload import TimedShape

LOCK_TIMEOUT = 600.0  # seconds for another process to finish a key; late is better than never: then both just tune


class Outcome(NamedTuple):
    """What became of one key.

    entry: its winner, if it has one; tuned: now, not before; error: why it has none; saved: whether it is on disk.
    """

    key: TuningKey
    entry: Entry | None
    tuned: bool
    seconds: float
    error: str = ""
    saved: bool = True


def current_device() -> torch.device:
    """The device to tune: the current GPU, or the interpreter's CPU."""
    return torch.device("cpu") if interpreting() else torch.device("cuda", torch.cuda.current_device())


def resolver_for_folder(folder: Path | None) -> Resolver:
    """What tunes the current device: into the user's file, or into the one in a folder, which then is all it knows."""
    device = current_device()
    return Resolver(device, TuningDB(identity_of(device), folder, others=[]) if folder else None)


def missing(keys: Iterable[TuningKey], resolver: Resolver) -> list[TuningKey]:
    """The keys that have no stored winner."""
    return [key for key in keys if not resolver.winners(key)]


def config_count(keys: Iterable[TuningKey], resolver: Resolver) -> int:
    """How many configs tuning these keys goes through."""
    return sum(len(candidates(key, resolver.device)) for key in keys)


class Pretuner:
    """Tunes keys on one device. Each result is saved at once, so that a run that was stopped goes on where it was."""

    def __init__(self, resolver: Resolver, *, force: bool = False) -> None:
        """force: tune again what has a winner; the old one stays unless it is beaten."""
        self.resolver = resolver
        self.force = force
        self._floors: dict[tuple[int, int], float] = {}

    def run(self, keys: Iterable[TuningKey], report: Callable[[Outcome], None]) -> list[Outcome]:
        """Bring every key to a winner with a receipt, and report each when it is done."""
        outcomes = []
        with kept_compilers(self.resolver.door):
            for key in keys:
                outcome = self.tune(key)
                report(outcome)
                outcomes.append(outcome)
        return outcomes

    def tune(self, key: TuningKey) -> Outcome:
        """Bring one key to a winner with a receipt."""
        db = self.resolver.db
        start = time.perf_counter()
        try:
            entry = self._finished(key)
            if entry is not None:
                return Outcome(key, entry, tuned=False, seconds=time.perf_counter() - start)
            with db.tuning_lock(LOCK_TIMEOUT):
                db.reload()  # another process may have tuned the key meanwhile
                entry = self._finished(key)
                if entry is not None:
                    return Outcome(key, entry, tuned=False, seconds=time.perf_counter() - start)
                incumbent = next((found.entry.config for found in self.resolver.winners(key)), None)
                floor_us = None if interpreting() else self._floor_us
                entry = tune(key, self.resolver.door, incumbent=incumbent, floor_us=floor_us)
                saved = db.record(entries=[entry])
        except (NoAcceptedConfigError, TuningDeclinedError, torch.OutOfMemoryError) as error:
            return Outcome(key, None, tuned=False, seconds=time.perf_counter() - start, error=str(error))
        return Outcome(key, entry, tuned=True, seconds=time.perf_counter() - start, saved=saved)

    def probe(self, key: TuningKey, config: KernelConfig) -> None:
        """Do with one candidate what tuning does with it, for nothing but to see whether the process survives that."""
        declined = contextlib.suppress(NoAcceptedConfigError, TuningDeclinedError, torch.OutOfMemoryError)
        with declined, self.resolver.db.tuning_lock(LOCK_TIMEOUT):
            tune(key, self.resolver.door, configs=[config])

    def _finished(self, key: TuningKey) -> Entry | None:
        """The first stored winner that is accepted here; validates where a receipt is from another toolchain."""
        if self.force:
            return None
        try:
            for found in self.resolver.winners(key):
                with contextlib.suppress(RejectedConfigError):
                    self.resolver.door.accept(tuned_variant(key), found.entry.config, key.seq_len)
                    return found.entry
        finally:
            self.resolver.door.release()
        return None

    def _floor_us(self, shape: TimedShape) -> float:
        """Microseconds at the read+write floor; shapes that move the same bytes share it."""
        moved = (shape.k[0].nbytes, shape.out[0].nbytes)
        if moved not in self._floors:
            self._floors[moved] = read_write_floor_us(shape.k, shape.out, passes=shape.passes, rounds=3)
        return self._floors[moved]


def verify(resolver: Resolver) -> Iterator[tuple[Entry, RejectedConfigError | None]]:
    """Validate every stored winner again unless its receipt is bad; yields each, with the error if it failed."""
    door = resolver.door
    # In every file, as a call uses the first that is accepted.
    found = [one.entry for first in resolver.db.entries() for one in resolver.winners(first.entry.key)]
    entries = list({(entry.key, entry.config): entry for entry in found}.values())
    variants = {entry.key: tuned_variant(entry.key) for entry in entries}
    # Winners of several keys share binaries.
    wanted = dict.fromkeys(
        (variant, entry.config)
        for entry in entries
        for variant in (variants[entry.key], float32_twin(variants[entry.key]))
    )
    with Builder(door, wanted) as builder:
        builds = {one: builder.submit(*one) for one in wanted}
        for entry in entries:
            variant = variants[entry.key]
            for one in (variant, float32_twin(variant)):  # else the door would compile it here as well
                builds[one, entry.config].result()
            error = None
            try:
                door.accept(variant, entry.config, entry.key.seq_len, again=True)
            except RejectedConfigError as rejected:
                error = rejected
            yield entry, error
    door.release()
