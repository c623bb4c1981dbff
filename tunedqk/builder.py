"""Building the candidates of a key in parallel, for a door."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from triton import knobs

from tunedqk.accept import Built, Trial
from tunedqk.compile_pool import CompilePool, processors
from tunedqk.device import interpreting
from tunedqk.errors import CompilerCrashedError
from tunedqk.launch import is_built, target_of
from tunedqk.validate import DID_NOT_COMPILE, Verdict
from tunedqk.variant import Variant, program

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from typing_extensions import Self

    from tunedqk.accept import Door
    from tunedqk.config import KernelConfig


class Builder:
    """Builds binaries for a door; processes compile them, as many at a time as there are processors."""

    def __init__(self, door: Door, wanted: Collection[tuple[Variant, KernelConfig]]) -> None:
        """wanted: what will be submitted first, for the processes to start at once if any of it is to be compiled.

        The door's compilers are used where it has some, and left to the next builder.
        """
        self._door = door
        self._lock = threading.Lock()
        self._closing = False
        workers = min(processors(), max(len(wanted), 1))
        self._threads = ThreadPoolExecutor(workers)
        self._compilers: CompilePool | None = None
        if not interpreting() and not knobs.compilation.always_compile:  # else Triton's cache is not looked at
            self._compilers = door.compilers or CompilePool(workers)
            if not all(is_built(door.device, *one) for one in wanted):
                self._compilers.start()  # before the target is asked for: that can take a third of a second
            try:
                self._target = target_of(door.device)
            except BaseException:
                self.close()
                raise

    def submit(self, variant: Variant, config: KernelConfig) -> Future[Built]:
        """Start to build."""
        return self._threads.submit(self._build, variant, config)

    def _build(self, variant: Variant, config: KernelConfig) -> Built:
        if self._compilers is None or is_built(self._door.device, variant, config):
            return self._door.build(variant, config)
        compiled = False
        try:
            with self._door.building(variant, config):
                compiled = self._compilers.compile(self._target, program(variant, config))
        except CompilerCrashedError as error:
            self._door.condemn(Trial(variant, config), Verdict(DID_NOT_COMPILE, what=str(error)))
        if self._closing:
            return Built(None, Verdict(DID_NOT_COMPILE, what="nobody waits for it any more"))
        # One at a time, since that is quick, and each would make what Triton makes once in a process.
        with self._lock if compiled else contextlib.nullcontext():
            return self._door.build(variant, config)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(interrupted=kind is not None)

    def close(self, *, interrupted: bool = False) -> None:
        """Stop, and leave what is not yet built. interrupted: do not wait for what the door's compilers are at."""
        self._closing = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        ending = self._compilers if interrupted or self._compilers is not self._door.compilers else None
        if ending is not None:
            ending.kill()
        self._threads.shutdown()
        if ending is not None:
            ending.close()


@contextlib.contextmanager
def kept_compilers(door: Door) -> Iterator[None]:
    """Let all builders within share their processes: to start some takes longer than to compile."""
    door.compilers = CompilePool(processors())
    try:
        yield
    finally:
        door.compilers.close()
        door.compilers = None
