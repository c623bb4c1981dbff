"""The memory floor: what the fastest of a family of plain kernels needs to move the bytes of a call.

Two floors: reading the keys, and reading them and writing as many bytes as the scores take. The family varies block
size, warps and L2 hints.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import triton

from tunedqk.config import next_power_of_2
from tunedqk.kernels.plain import read_kernel, read_write_kernel
from tunedqk.timing import Replay, interleave

BLOCKS = (2048, 4096, 8192)  # 4-byte words: 8 to 32 KiB a program
WARPS = (4, 8)
HINTS = (("", ""), ("evict_first", ""), ("evict_first", "evict_last"))


class Floor(NamedTuple):
    """Microseconds of the fastest plain kernel of each kind."""

    read_us: float
    read_write_us: float


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


def measure_floor(
    sources: list[torch.Tensor], outputs: list[torch.Tensor], *, passes: int = 1, rounds: int = 5
) -> Floor:
    """Time the plain kernels in turns, each over all sets, `passes` times a replay.

    sources, outputs: contiguous tensors of a multiple of 4 bytes, one of each per set.
    """
    sets = [
        (source.flatten().view(torch.float32), out.flatten().view(torch.float32))
        for source, out in zip(sources, outputs, strict=True)
    ]
    members = [
        _Member(kernel, block, warps, hints)
        for kernel, block, warps, hints in itertools.product((read_kernel, read_write_kernel), BLOCKS, WARPS, HINTS)
        if not (kernel is read_kernel and hints[1])
    ]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda member: member.compile(*sets[0]), members))
    replays = [
        Replay([lambda m=member, pair=pair: m.launch(*pair) for pair in sets] * passes)  # type: ignore[misc]
        for member in members
    ]
    medians = [sample.median for sample in interleave(replays, rounds)]

    def best(kernel: Any) -> float:
        return min(median for member, median in zip(members, medians, strict=True) if member.kernel is kernel)

    return Floor(best(read_kernel), best(read_write_kernel))
