"""The cold path: which config a call uses, and the accepted binary for it."""

from __future__ import annotations

import enum
import functools
import logging
import os
import threading
from typing import TYPE_CHECKING

import torch

from tunedqk.accept import Door
from tunedqk.config import KernelConfig, TuningKey, default_config
from tunedqk.db import TuningDB
from tunedqk.device import identity_of, interpreting
from tunedqk.errors import MissingConfigError, NoAcceptedConfigError, RejectedConfigError, TuningDeclinedError
from tunedqk.launch import INTERPRETER_LOCK
from tunedqk.tune import is_candidate, tune

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tunedqk.launch import Binary
    from tunedqk.records import Found
    from tunedqk.variant import Variant

logger = logging.getLogger(__name__)

TUNING_WAIT = 300.0  # seconds to wait for another process that tunes on this GPU


class Mode(enum.Enum):
    """What a call does about a key without a winner."""

    TUNE = "tune"
    CACHED = "cached"
    STRICT = "strict"


def mode() -> Mode:
    """The mode that TUNEDQK_MODE sets; tune if it sets none."""
    name = os.environ.get("TUNEDQK_MODE") or Mode.TUNE.value
    try:
        return Mode(name)
    except ValueError:
        raise ValueError(f"TUNEDQK_MODE: expected one of {[m.value for m in Mode]}, got {name!r}") from None


class Resolver:
    """Finds configs and binaries for one device. Its methods are for one thread at a time: see `lock`."""

    def __init__(self, device: torch.device, db: TuningDB | None = None) -> None:
        self.device = device
        self.gpu = identity_of(device)
        self.db = db or TuningDB(self.gpu)
        self.door = Door(device, self.db)
        self.lock = INTERPRETER_LOCK if interpreting() else threading.RLock()
        self._warned: set[object] = set()
        self.tunings = 0

    def resolve(self, variant: Variant, key: TuningKey, config: KernelConfig | None = None) -> Binary:
        """The accepted binary for a variant under one of its keys; with `config`, that one or RejectedConfigError."""
        try:
            if config is not None:
                return self._given(variant, config, key)
            stored = self._stored(key, variant)
            if stored is None and mode() is Mode.STRICT:
                self.db.reload()  # for somebody who has just pretuned
                stored = self._stored(key, variant)
            if stored is not None:
                return stored
            if mode() is Mode.STRICT:
                raise MissingConfigError(
                    f"no accepted winner is stored for {key}, in {self.db.path} or a file that is only read, and "
                    f"TUNEDQK_MODE is strict: run `{key.command}`, or allow TUNEDQK_MODE=tune"
                )
            if mode() is Mode.TUNE:
                tuned = self._tuned(key, variant)
                if tuned is not None:
                    return tuned
            return self._fallback(key, variant)
        finally:
            self.door.release()

    def _given(self, variant: Variant, config: KernelConfig, key: TuningKey) -> Binary:
        try:
            return self.door.accept(variant, config, key.seq_len)
        except RejectedConfigError as error:
            raise RejectedConfigError(
                f"{error}. Give another config, or none: then a tuned one is used", error.verdict
            ) from error

    def winners(self, key: TuningKey) -> list[Found]:
        """The stored winners of a key, file by file. One that is no candidate of today's is none: it left the space."""
        return [found for found in self.db.winners(key) if is_candidate(found.entry.config, key, self.device)]

    def _stored(self, key: TuningKey, variant: Variant) -> Binary | None:
        """The binary of the first stored winner that passes validation."""
        for found in self.winners(key):
            try:
                return self.door.accept(variant, found.entry.config, key.seq_len)
            except RejectedConfigError as error:
                if (key, found.entry.config) not in self._warned:
                    self._warned.add((key, found.entry.config))
                    logger.warning("tunedqk: the stored winner of %s in %s was rejected: %s", key, found.path, error)
        return None

    def _tuned(self, key: TuningKey, variant: Variant) -> Binary | None:
        """Tune, or take what another process has tuned meanwhile. None when that cannot be done now."""
        with self.db.tuning_lock(TUNING_WAIT) as acquired:
            if not acquired:
                logger.warning("tunedqk: another process has been tuning for %.0f s; going on without", TUNING_WAIT)
                return None
            self.db.reload()
            stored = self._stored(key, variant)
            if stored is not None:
                return stored
            logger.warning(
                "tunedqk: no winner is stored for %s on %s: tuning now, once. "
                "`%s` does this ahead of time; TUNEDQK_MODE=cached never does it.",
                key, self.gpu.name, key.command,
            )  # fmt: skip
            try:
                entry = tune(key, self.door)
            except (TuningDeclinedError, torch.OutOfMemoryError) as error:
                logger.warning("tunedqk: %s is not tuned: %s", key, error)
                return None
            self.tunings += 1
            self.db.record(entries=[entry])
        return self.door.accept(variant, entry.config, key.seq_len)

    def _fallback(self, key: TuningKey, variant: Variant) -> Binary:
        """The nearest stored winner, else the default config, whichever validates first."""
        rejection: RejectedConfigError | None = None
        for origin, config in self.guesses(key):
            try:
                binary = self.door.accept(variant, config, key.seq_len)
            except RejectedConfigError as error:
                rejection = error
                continue
            if key not in self._warned:  # once for all variants of calls with this key
                self._warned.add(key)
                logger.warning(
                    "tunedqk: no winner is stored for %s on %s: using %s (%s). `%s` finds the best.",
                    key, self.gpu.name, origin, config, key.command,
                )  # fmt: skip
            return binary
        raise NoAcceptedConfigError(
            f"{key}: no config that is at hand agreed with the loop kernel. `{key.command}` tries all candidates"
        ) from rejection

    def guesses(self, key: TuningKey) -> Iterator[tuple[str, KernelConfig]]:
        """Configs for a key that nothing is stored for, with where each comes from."""
        for entry, _ in self.db.nearest(key):
            if is_candidate(entry.config, key, self.device):
                yield f"the winner of seq_len {entry.key.seq_len}, {entry.key.load} sequences", entry.config
        yield "the default config", default_config(key, interpreted=interpreting())


@functools.cache
def resolver_for(device: torch.device) -> Resolver:
    """The process's resolver for a device (with an index, unless it is the CPU under the interpreter)."""
    return Resolver(device)


if hasattr(os, "register_at_fork"):  # a thread that holds a lock at a fork is not there in the child to let it go
    os.register_at_fork(after_in_child=resolver_for.cache_clear)
