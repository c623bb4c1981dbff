"""Pretuning in a process of its own, which may crash or hang: that costs the guilty candidate, and nobody else.

The worker says what it is about to build or to launch, and when that is over. So when it dies, or says nothing for
too long, it is known what was in flight, unless it was killed by somebody. That is tried again, config by config, each
as if it were the only candidate. Who does it again is guilty: the verdict is stored, another worker starts, and the key
is tuned once more.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from tunedqk.accept import Trial, Watcher, first_line
from tunedqk.builder import kept_compilers
from tunedqk.device import interpreting
from tunedqk.errors import CrashedError, WorkerError
from tunedqk.exits import cause, is_crash
from tunedqk.pretune import Outcome, Pretuner, resolver_for_folder
from tunedqk.validate import CRASHED, TIMED_OUT, Verdict

if TYPE_CHECKING:
    from tunedqk.config import KernelConfig, TuningKey
    from tunedqk.resolve import Resolver

logger = logging.getLogger(__name__)

PATIENCE = 120.0  # seconds that one build may take, or what is launched between two notes
INTERPRETER_PATIENCE = 3600.0  # there large shapes take minutes
SLICE = 1.0  # seconds
UNEXPLAINED_DEATHS = 2  # of the worker, after which a key is given up


class Ready(NamedTuple):
    """The worker's first words."""


class Request(NamedTuple):
    """Tune a key; with `only`, see instead whether the process survives that config."""

    key: TuningKey
    only: KernelConfig | None = None


class Note(NamedTuple):
    """The worker is about to try something, or has survived it."""

    trial: Trial
    begins: bool


class Survived(NamedTuple):
    """The answer to a probe."""


class Failed(NamedTuple):
    """The worker's traceback: an error that no candidate is to blame for."""

    why: str


class Death(NamedTuple):
    """The worker's end, as a verdict on the guilty; and what was in flight."""

    verdict: Verdict
    in_flight: tuple[Trial, ...] = ()


Condemned = list[tuple[Trial, Verdict]]


class _Reporter(Watcher):
    """Tells the parent."""

    convicts = True

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()  # builds begin and end in threads

    def send(self, message: object) -> None:
        with self._lock:
            self._connection.send(message)

    def begins(self, trial: Trial) -> None:
        """See Watcher."""
        self.send(Note(trial, begins=True))

    def ends(self, trial: Trial) -> None:
        """See Watcher."""
        self.send(Note(trial, begins=False))


def serve(connection: Connection, folder: Path | None, index: int | None, force: bool, condemned: Condemned) -> None:
    """What the worker does: answer requests about one GPU until nobody makes any."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the keyboard speaks to the parent, and the parent ends this process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    reporter = _Reporter(connection)
    try:
        if index is not None:
            torch.cuda.set_device(index)
        resolver = resolver_for_folder(folder)
        for trial, verdict in condemned:
            resolver.door.condemn(trial, verdict)
        resolver.door.watcher = reporter
        pretuner = Pretuner(resolver, force=force)
        with kept_compilers(resolver.door):
            reporter.send(Ready())
            while True:
                request: Request = connection.recv()
                if request.only is None:
                    reporter.send(pretuner.tune(request.key))
                else:
                    pretuner.probe(request.key, request.only)
                    reporter.send(Survived())
    except EOFError:  # nobody asks any more
        return
    except CrashedError as error:
        reporter.send(Death(Verdict(CRASHED, what=first_line(error.__cause__ or error))))
        os._exit(1)  # to clean up would need the context that is lost
    except BaseException:
        reporter.send(Failed(traceback.format_exc()))
        raise


def _end_with_parent() -> None:
    """Else a worker that hangs would outlive a parent that was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


class _Worker:
    """The process and the way to it."""

    def __init__(self, arguments: tuple[object, ...], serve: Callable[..., None], patience: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._patience = patience
        self._connection, theirs = context.Pipe()
        with theirs:  # once the process has its copy, its end is the end of the connection
            self._process = context.Process(target=serve, args=(theirs, *arguments), daemon=True)
            self._process.start()
        try:
            first = self._connection.recv()
        except (EOFError, OSError):
            first = Failed(cause(self._status()))
        if not isinstance(first, Ready):
            self.end()
            raise WorkerError(
                f"the process that pretunes could not start: {first.why.strip().splitlines()[-1]}. (A script that "
                'calls tunedqk.cli.main has to do so under `if __name__ == "__main__":`, as that process imports it.)'
            )

    def _status(self) -> int:
        """How the process ended."""
        self._process.join()
        return self._process.exitcode or 0

    def ask(self, request: Request) -> Outcome | Survived | Failed | Death:
        """Its answer, or how it came to an end."""
        in_flight: list[Trial] = []
        try:
            self._connection.send(request)
            while True:
                # Only a candidate may take too long: the worker may also be waiting for another one that tunes.
                if in_flight and not self._speaks():
                    return Death(Verdict(TIMED_OUT, what=f"no end after {self._patience:g} s"), tuple(in_flight))
                message: Note | Outcome | Survived | Failed | Death = self._connection.recv()
                if isinstance(message, Death):  # of its GPU context, which nothing loses that is still being built
                    return message._replace(in_flight=tuple(trial for trial in in_flight if trial.binary))
                if not isinstance(message, Note):
                    return message
                (in_flight.append if message.begins else in_flight.remove)(message.trial)
        except (EOFError, OSError):
            status = self._status()
            return Death(Verdict(CRASHED, what=cause(status)), tuple(in_flight) if is_crash(status) else ())

    def _speaks(self) -> bool:
        """Wait for a word as long as a candidate may take; time in which this process was stopped does not count."""
        return any(wait([self._connection], SLICE) for _ in range(math.ceil(self._patience / SLICE)))

    def end(self) -> None:
        """Kill it: what it could save is saved."""
        self._process.kill()
        self._process.join()
        self._connection.close()


class IsolatedPretuner(Pretuner):
    """A Pretuner whose work is done by a worker process. `run` ends the process; one that died has a successor."""

    def __init__(
        self,
        resolver: Resolver,
        folder: Path | None = None,
        *,
        force: bool = False,
        serve: Callable[[Connection, Path | None, int | None, bool, Condemned], None] = serve,
        patience: float | None = None,
    ) -> None:
        """folder: of the resolver's file, as for `resolver_for_folder`. serve: what the worker does."""
        super().__init__(resolver, force=force)
        self._folder = folder
        self._serve = serve
        self._patience = patience or (INTERPRETER_PATIENCE if interpreting() else PATIENCE)
        self._condemned: Condemned = []
        self._worker: _Worker | None = None

    def run(self, keys: Iterable[TuningKey], report: Callable[[Outcome], None]) -> list[Outcome]:
        """See Pretuner.run."""
        try:
            return super().run(keys, report)
        finally:
            self._end_worker()
            self.resolver.db.reload()  # the worker wrote it

    def tune(self, key: TuningKey) -> Outcome:
        """See Pretuner.tune."""
        start = time.perf_counter()
        unexplained = 0
        while True:
            answer = self._ask(Request(key))
            if isinstance(answer, Outcome):
                if answer.entry is not None and not answer.saved:  # it would be lost with the worker
                    answer = answer._replace(saved=self.resolver.db.record(entries=[answer.entry]))
                return answer._replace(seconds=time.perf_counter() - start)
            if isinstance(answer, Failed):
                logger.error("tunedqk: pretuning %s failed:\n%s", key, answer.why)
                why = answer.why.strip().splitlines()[-1]
            elif isinstance(answer, Death):
                if self._convict(key, answer):
                    continue
                why = f"the worker process ended ({answer.verdict.what}), and no candidate alone is to blame"
                unexplained += 1
                if unexplained < UNEXPLAINED_DEATHS:
                    continue
            return Outcome(key, None, tuned=False, seconds=time.perf_counter() - start, error=why)

    def _convict(self, key: TuningKey, death: Death) -> bool:
        """See to it that who took the worker down is never tried again. False if that is nobody new."""
        verdict, in_flight = self._repeated(key, death)
        launched = tuple(trial for trial in in_flight if trial.binary)
        condemned = {trial for trial, _ in self._condemned}
        guilty = [trial for trial in launched or in_flight if trial not in condemned]
        for trial in guilty:
            logger.warning("tunedqk: %s: %s (%s)", trial, verdict.verdict, verdict.what)
            self._condemned.append((trial, verdict))
            self.resolver.door.condemn(trial, verdict)
        return bool(guilty)

    def _repeated(self, key: TuningKey, death: Death) -> Death:
        """The death by the first suspect that alone does it again: once may be chance, and the verdict is for good."""
        # What was being launched is the likelier.
        suspects = dict.fromkeys(trial.config for trial in sorted(death.in_flight, key=lambda trial: not trial.binary))
        for config in suspects:
            answer = self._ask(Request(key, only=config))
            if isinstance(answer, Death) and answer.in_flight:
                return answer
        return death._replace(in_flight=())

    def _ask(self, request: Request) -> Outcome | Survived | Failed | Death:
        """Ask the worker, which is started if there is none."""
        if self._worker is None:
            arguments = (self._folder, self.resolver.device.index, self.force, self._condemned)
            self._worker = _Worker(arguments, self._serve, self._patience)
        answer = self._worker.ask(request)
        if isinstance(answer, Failed | Death):
            self._end_worker()
        return answer

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.end()
            self._worker = None
