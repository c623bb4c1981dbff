"""What a key is timed on: rotated inputs and outputs for several batch sizes, within what memory is free."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from tunedqk.config import FEW_SEQUENCES, MANY_SEQUENCES, MIN_BUCKET
from tunedqk.errors import TuningDeclinedError
from tunedqk.tensors import Tensors
from tunedqk.timing import Replay, rotation
from tunedqk.variant import Variant, geometry

if TYPE_CHECKING:
    from collections.abc import Callable

    from tunedqk.launch import Binary

KV_HEADS = 8
# By the sequences of a key: a single request; a small and a large batch, of which long buckets have room for one.
BATCHES = {FEW_SEQUENCES: (1,), MANY_SEQUENCES: (8, 64)}
MEMORY_LIMIT = 1 << 30  # bytes of keys, for all sets of a shape
MEMORY_SHARE = 0.4  # of what is free
MAX_SETS = 1024  # of a few KB each; a graph of more would take longer to make than the choice is worth
OUTPUT_SHARE = 0.1  # of what is free, for each shape's outputs
REPLAY_US = 400.0  # a replay is made about this long, so that its events' own cost vanishes
MAX_REPLAY_US = 1000.0
ASSUMED_BANDWIDTH = 3e6  # bytes a microsecond, to size a replay
LEAST_US = 2.0  # that a launch takes, however little it moves


def _about_us(moved: int) -> float:
    """Microseconds of a launch that moves so many bytes, about."""
    return max(moved / ASSUMED_BANDWIDTH, LEAST_US)


class TimedShape(NamedTuple):
    """One batch size of a key, with tensors for one launch after the other, in layout NHD.

    Keys rotate so that none is found in L2. Outputs rotate as well, through as much memory as L2 holds, or are all one
    (`same_out`): what is written again and again stays in L2 if it fits, and its bytes are never paid for. At 4 rows
    that makes a plain kernel 5 % faster, and it changes which config is the fastest. A decode loop that hands its
    scores from layer to layer in one tensor has the one, a loop that keeps them has the other.
    """

    batch: int
    kv_heads: int
    tensors: list[Tensors]
    out: list[torch.Tensor]
    ragged: bool = False

    @property
    def same_out(self) -> bool:
        """Whether every launch writes the same output."""
        return all(out is self.out[0] for out in self.out)

    @property
    def k(self) -> list[torch.Tensor]:
        """The keys of each launch."""
        return [tensors.k for tensors in self.tensors]

    @property
    def bytes(self) -> int:
        """Bytes that one launch has to move."""
        return sum(x.nbytes for x in self.tensors[0].given.values()) + self.out[0].nbytes

    @property
    def passes(self) -> int:
        """How often a replay goes through the sets."""
        return max(1, round(REPLAY_US / (_about_us(self.bytes) * len(self.tensors))))

    def launches(self, binary: Binary) -> list[Callable[[], None]]:
        """One launch of the binary per set."""

        def launch(tensors: Tensors, out: torch.Tensor) -> Callable[[], None]:
            grid = binary.grid(geometry(tensors, out, "NHD", fill_tail=True))
            return lambda: binary.launch(tensors, out, 1.0, 0.0, grid)

        return [launch(*arguments) for arguments in zip(self.tensors, self.out, strict=True)]

    def replay(self, binary: Binary) -> Replay:
        """The binary over all sets, as one graph."""
        return Replay(self.calls(binary))

    def calls(self, binary: Binary) -> list[Callable[[], None]]:
        """What a replay goes through: the launches, several times if there are few."""
        return self.launches(binary) * self.passes


def _fewer(batches: tuple[int, ...]) -> int:
    """The batch size that is timed where none of these fits."""
    return max(1, batches[0] // 2)


def plan(batches: tuple[int, ...], row: int, limit: int, room: int, l2_bytes: int) -> dict[int, int]:
    """How many sets of keys each batch size gets: enough to rotate through L2 four times, if they fit.

    row: bytes of a request's keys. limit: bytes of all sets of a batch size. Where no batch size fits, half the
    smallest is timed nevertheless; nothing where even that does not fit into the room that there is.
    """
    fitting = tuple(batch for batch in batches if batch * row <= min(limit, room)) or (_fewer(batches),)
    if fitting[0] * row > room:
        return {}
    most = max(min(limit, room), fitting[0] * row)
    return {batch: min(rotation(batch * row, l2_bytes), most // (batch * row), MAX_SETS) for batch in fitting}


class Workload:
    """The timed shapes of one variant at one bucket, small ones first; all are views of one pool of random keys."""

    def __init__(
        self,
        device: torch.device,
        variant: Variant,
        seq_len: int,
        batches: tuple[int, ...],
        limit: int = MEMORY_LIMIT,
        replay_us: float = MAX_REPLAY_US,
    ) -> None:
        """TuningDeclinedError when the batches do not fit into what is free: see `plan`.

        replay_us: outputs rotate through no more launches than fit in this. With few rows it takes longer to write as
        much as L2 holds, and to choose a config it is not worth it: there writes are 1 % of the bytes.
        """
        self.device = device
        self.variant = variant
        self._replay_us = replay_us
        self.seq_len, self.kv_heads = seq_len, KV_HEADS
        if device.type != "cuda":
            # Each program takes the interpreter milliseconds, and its times mean nothing: the pipeline is what counts.
            self.seq_len, self.kv_heads = min(seq_len, MIN_BUCKET), 1
        row = self.kv_heads * self.seq_len * variant.head_dim * variant.k_dtype.itemsize
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            room, l2 = int(free * MEMORY_SHARE), torch.cuda.get_device_properties(device).L2_cache_size
            sets = plan(batches, row, limit, room, l2)
            if not sets:
                raise TuningDeclinedError(
                    f"tuning needs {_fewer(batches) * row >> 20} MiB for keys; of {free >> 20} MiB free it takes "
                    f"{room >> 20}. `tunedqk pretune` does it ahead of time, while the GPU is idle"
                )
            # Outputs rotate through as much memory as the L2 cache holds, if there is that much.
            self._output_bytes = min(l2, int(free * OUTPUT_SHARE))
        else:
            sets = {1: 1}
            self._output_bytes = 0
        self._pool = torch.empty(
            max(batch * count for batch, count in sets.items()) * row // variant.k_dtype.itemsize,
            dtype=variant.k_dtype, device=device,
        )  # fmt: skip
        for part in self._pool.split(1 << 26):
            part.copy_(torch.randn(part.shape, dtype=variant.dtype, device=device))  # float8 has no normal_
        self.shapes = [shape for batch, count in sets.items() for shape in self._shapes(batch, count)]

    def _shapes(self, batch: int, sets: int) -> list[TimedShape]:
        """A batch size with one output, and with outputs that rotate if there are any."""
        variant = self.variant
        pages = (self.seq_len // variant.page_size, variant.page_size) if variant.page_size else (1, self.seq_len)
        shape = (batch * pages[0], pages[1], self.kv_heads, variant.head_dim)
        size = math.prod(shape)
        q_heads = self.kv_heads * variant.group
        keys = [self._pool[i * size : (i + 1) * size].view(shape) for i in range(sets)]
        out_bytes = batch * q_heads * self.seq_len * variant.out_dtype.itemsize
        most = self._replay_us / _about_us(keys[0].nbytes + out_bytes)
        outputs = [
            torch.empty(batch, q_heads, self.seq_len, dtype=variant.out_dtype, device=self.device)
            for _ in range(max(1, math.ceil(min(most, self._output_bytes / out_bytes))))
        ]
        launches = max(sets, len(outputs))
        lens = None
        if variant.seq_lens:
            lens = torch.full((batch,), self.seq_len, dtype=variant.seq_lens, device=self.device)
        tables = [self._table(batch, pages[0]) for _ in range(sets)]
        tensors = [
            Tensors(
                torch.randn(batch, q_heads, variant.head_dim, device=self.device).to(variant.dtype),
                keys[i % sets], seq_lens=lens, block_table=tables[i % sets],
            )
            for i in range(launches)
        ]  # fmt: skip
        rotated = TimedShape(batch, self.kv_heads, tensors, [outputs[i % len(outputs)] for i in range(launches)])
        return [rotated] if rotated.same_out else [rotated._replace(out=outputs[:1] * launches), rotated]

    def ragged_shapes(self) -> list[TimedShape]:
        """Each batch size with one output, and with lengths that are spread evenly up to the bucket's."""
        return [self._ragged(shape) for shape in self.shapes if shape.same_out]

    def _ragged(self, shape: TimedShape) -> TimedShape:
        steps = torch.arange(1, shape.batch + 1, dtype=torch.int32, device=self.device)
        lens = (steps * self.seq_len).div_(shape.batch, rounding_mode="floor")
        return shape._replace(tensors=[tensors._replace(seq_lens=lens) for tensors in shape.tensors], ragged=True)

    def _table(self, batch: int, blocks: int) -> torch.Tensor | None:
        """Blocks in random order, as in a pool that has been in use for a while."""
        if not self.variant.page_size:
            return None
        order = torch.randperm(batch * blocks, device=self.device)
        return order.to(self.variant.block_table).view(batch, blocks)

    @property
    def screening(self) -> TimedShape:
        """The shape that candidates are screened on: the largest.

        Of 40 keys on an H200, the six fastest there held the best over all shapes in 39; in one, of 4 rows at 65536,
        theirs is 4 % behind it.
        """
        return self.shapes[-1]
