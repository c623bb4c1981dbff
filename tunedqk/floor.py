"""The memory floor: what the fastest of a family of plain kernels needs to move the bytes of a call.

Two floors: reading the keys, and reading them and writing as many bytes as the scores take. The family varies block
size, warps and L2 hints.
"""

from __future__ import annotations

import functools
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton

from tunedqk.config import HINTS, next_power_of_2
from tunedqk.kernels.plain import read_kernel, read_write_kernel
from tunedqk.timing import Replay, Sample, interleave

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCKS = (2048, 4096, 8192)  # 4-byte words: 8 to 32 KiB a program
WARPS = (4, 8)


class _Member(NamedTuple):
    """One plain kernel with its meta-parameters."""

    kernel: Any  # a triton.JITFunction
    block: int
    warps: int
    hints: tuple[str, str]

    def arguments(self, source: torch.Tensor, out: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any], int]:
        """Positional arguments, meta-parameters and programs for one set."""
        programs = triton.cdiv(source.numel(), self.block)
        meta: dict[str, Any] = {"BLOCK": self.block, "LOAD_HINT": self.hints[0], "num_warps": self.warps}
        if self.kernel is read_kernel:
            return (source, out, source.numel()), meta, programs
        share = triton.cdiv(out.numel(), programs)
        meta |= {"OUT_BLOCK": next_power_of_2(share), "STORE_HINT": self.hints[1]}
        return (source, out, source.numel(), out.numel(), share), meta, programs

    def compile(self, source: torch.Tensor, out: torch.Tensor) -> None:
        args, meta, _ = self.arguments(source, out)
        with torch.cuda.device(source.device):
            self.kernel.warmup(*args, grid=(1,), **meta)

    def launch(self, source: torch.Tensor, out: torch.Tensor) -> None:
        args, meta, programs = self.arguments(source, out)
        self.kernel[(programs,)](*args, **meta)


class Floors(NamedTuple):
    """Microseconds of the fastest plain kernel that reads as much, and of the one that writes as much, too."""

    read: float
    read_write: float


def compare_with_floors(
    replays: Sequence[Replay],
    sources: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    *,
    passes: int = 1,
    rounds: int = 5,
) -> tuple[list[Sample], Floors]:
    """Time graphs and both floors in turns, so that clocks and neighbours are the same for all of them.

    sources, outputs: contiguous tensors of a multiple of 4 bytes, one of each per launch; a replay of a floor goes
    through all of them `passes` times.
    """
    unwritten = torch.empty(1, dtype=torch.float32, device=sources[0].device)
    reads = _replays(read_kernel, sources, [unwritten] * len(sources), passes)
    both = _replays(read_write_kernel, sources, outputs, passes)
    samples = interleave([*replays, *reads, *both], rounds)
    ours, floors = samples[: len(replays)], [sample.median for sample in samples[len(replays) :]]
    return ours, Floors(min(floors[: len(reads)]), min(floors[len(reads) :]))


def read_write_floor_us(
    sources: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], *, passes: int = 1, rounds: int = 5
) -> float:
    """Microseconds in which the fastest plain kernel reads a source and writes an output.

    sources, outputs, passes: as for `compare_with_floors`.
    """
    replays = _replays(read_write_kernel, sources, outputs, passes)
    return min(sample.median for sample in interleave(replays, rounds))


def _words(x: torch.Tensor) -> torch.Tensor:
    return x.flatten().view(torch.float32)


def _replays(
    kernel: Any, sources: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], passes: int
) -> list[Replay]:
    """One graph for each member of a family."""
    pairs = [(_words(source), _words(out)) for source, out in zip(sources, outputs, strict=True)]
    members = [
        _Member(kernel, block, warps, hints)
        for block, warps, hints in itertools.product(BLOCKS, WARPS, HINTS)
        if not (kernel is read_kernel and hints[1])
    ]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda member: member.compile(*pairs[0]), members))
    return [Replay([functools.partial(member.launch, *pair) for pair in pairs] * passes) for member in members]
