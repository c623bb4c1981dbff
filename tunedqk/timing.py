"""Timing kernels on a GPU without flattering or punishing them.

A kernel is launched over input sets that together exceed the L2 cache several times, from one CUDA graph, so that
neither warm lines nor the host's launch time count. (Flushing L2 by writing to a buffer leaves dirty lines that the
next kernel pays for.) Competitors are replayed in turns, so that clocks and neighbours change for all of them alike,
and without a pause: on an idle GPU the start is stamped before the host has launched the graph. In its turn each is
replayed twice, and the second counts: it finds in L2 what it leaves there itself. On an H200 the first replay after
another kernel's took up to 3 % more or 5 % less than those that followed, depending on the hints of both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

SETTLE_SECONDS = 0.02


class Sample(NamedTuple):
    """Microseconds of one launch."""

    median: float
    p20: float
    p80: float


def summarise(times: Sequence[float]) -> Sample:
    """Median and 20th and 80th percentile."""
    ordered = sorted(times)
    last = len(ordered) - 1
    return Sample(statistics.median(ordered), ordered[round(0.2 * last)], ordered[round(0.8 * last)])


def rotation(bytes_per_set: int, l2_bytes: int) -> int:
    """How many input sets of this size exceed the L2 cache four times together."""
    return max(1, -(-4 * l2_bytes // max(bytes_per_set, 1)))


class Replay:
    """A CUDA graph of the given calls, one after the other; the first is run once before the capture."""

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        self.launches = len(calls)
        self.graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            calls[0]()  # loads the kernel, which a capture does not allow
            # What other threads of a server do meanwhile, such as allocating memory, must not spoil the capture.
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                for call in calls:
                    call()
        torch.cuda.current_stream().wait_stream(stream)

    def enqueue(self) -> Callable[[], float]:
        """Replay twice. What is returned waits for that, and gives the microseconds of a launch of the second."""
        self.graph.replay()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.graph.replay()
        end.record()

        def elapsed() -> float:
            end.synchronize()
            milliseconds: float = start.elapsed_time(end)
            return milliseconds * 1000.0 / self.launches

        return elapsed


def interleave(replays: Sequence[Replay], rounds: int) -> list[Sample]:
    """Time the graphs in turns: `rounds` times each, after a round that does not count."""
    # All are enqueued before the first is waited for. Were there a wait in each round, the first graph would seem up
    # to a third slower than it is: its clock would start on an idle GPU, before the host has launched it.
    taken = [[replay.enqueue() for replay in replays] for _ in range(1 + rounds)]
    return [summarise([elapsed() for elapsed in of_replay[1:]]) for of_replay in zip(*taken, strict=True)]


class ScreenTimer:
    """A short look at one candidate after the other: a few replays each. On a CPU, the wall time of a call."""

    def __init__(self, device: torch.device, runs: int = 3) -> None:
        self._device = device
        self._runs = runs
        self._settled = False

    def __call__(self, calls: Sequence[Callable[[], object]]) -> Sample:
        """Microseconds of a call."""
        if self._device.type != "cuda":
            start = time.perf_counter()
            calls[0]()
            return summarise([(time.perf_counter() - start) * 1e6])
        replay = Replay(calls)
        if not self._settled:
            self._settle(replay)
        (sample,) = interleave([replay], self._runs)
        return sample

    def _settle(self, replay: Replay) -> None:
        """Keep the GPU busy: one that was idle is slower for a while, which would be charged to the first candidate."""
        end = time.perf_counter() + SETTLE_SECONDS
        while time.perf_counter() < end:
            replay.enqueue()()
        self._settled = True
