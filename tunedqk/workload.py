"""What a key is timed on: rotated inputs and outputs for several batch sizes, within what memory is free."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from tunedqk.config import MIN_BUCKET
from tunedqk.errors import TuningDeclinedError
from tunedqk.launch import Binary, Variant, geometry
from tunedqk.timing import Replay, rotation

if TYPE_CHECKING:
    from collections.abc import Callable

KV_HEADS = 8
# batch * kv_heads of a single request, of small and of large batches; which of them fit depends on the bucket.
BATCHES = (1, 8, 64)
MEMORY_LIMIT = 1 << 30  # bytes of keys, for all sets of a shape
MEMORY_SHARE = 0.4  # of what is free
OUTPUT_SHARE = 0.1  # of what is free, for each shape's outputs
REPLAY_US = 400.0  # a replay is made about this long, so that its events' own cost vanishes
MAX_REPLAY_US = 1000.0
ASSUMED_BANDWIDTH = 3e6  # bytes a microsecond, to size a replay


class TimedShape(NamedTuple):
    """One batch size of a key, with tensors for one launch after the other: k NHD [batch, seq_len, kv_heads, head_dim].

    Keys rotate so that none is found in L2. Outputs rotate as well: one that is written again and again would stay in
    L2, and its bytes would never be paid for (at 4 rows that makes a plain kernel 8 % faster than memory allows).
    """

    batch: int
    kv_heads: int
    q: list[torch.Tensor]
    k: list[torch.Tensor]
    out: list[torch.Tensor]

    @property
    def bytes(self) -> int:
        """Bytes that one launch has to move."""
        return sum(sets[0].numel() * sets[0].element_size() for sets in (self.q, self.k, self.out))

    @property
    def passes(self) -> int:
        """How often a replay goes through the sets."""
        return max(1, round(REPLAY_US * ASSUMED_BANDWIDTH / (self.bytes * len(self.k))))

    def launches(self, binary: Binary) -> list[Callable[[], None]]:
        """One launch of the binary per set."""

        def launch(q: torch.Tensor, k: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
            sizes = geometry(q, k, out, "NHD", fill_tail=True)
            return lambda: binary.launch(q, k, out, 1.0, 0.0, sizes)

        return [launch(*tensors) for tensors in zip(self.q, self.k, self.out, strict=True)]

    def replay(self, binary: Binary) -> Replay:
        """The binary over all sets, as one graph."""
        return Replay(self.launches(binary) * self.passes)


class Workload:
    """The timed shapes of one variant at one bucket; all of them are views of one pool of random keys."""

    def __init__(
        self,
        device: torch.device,
        variant: Variant,
        seq_len: int,
        batches: tuple[int, ...] = BATCHES,
        limit: int = MEMORY_LIMIT,
        replay_us: float = MAX_REPLAY_US,
    ) -> None:
        """Batches that do not fit are left out; TuningDeclinedError when not even the smallest fits what is free.

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
        row = self.kv_heads * self.seq_len * variant.head_dim * variant.dtype.itemsize
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            limit = min(limit, int(free * MEMORY_SHARE))
            batches = tuple(batch for batch in batches if batch * row <= limit)
            if not batches:
                raise TuningDeclinedError(
                    f"tuning needs {row >> 20} MiB for keys; of {free >> 20} MiB free it takes {limit >> 20}. "
                    "`tunedqk pretune` does it ahead of time, while the GPU is idle"
                )
            sets = {batch: min(rotation(batch * row, device), limit // (batch * row)) for batch in batches}
            # Outputs rotate through as much memory as the L2 cache holds, if there is that much.
            self._output_bytes = min(torch.cuda.get_device_properties(device).L2_cache_size, int(free * OUTPUT_SHARE))
        else:
            batches = batches[:1]
            self._output_bytes = 0
            sets = dict.fromkeys(batches, 1)
        self._pool = torch.empty(
            max(batch * count for batch, count in sets.items()) * row // variant.dtype.itemsize,
            dtype=variant.dtype, device=device,
        )  # fmt: skip
        self._pool.normal_()
        self.shapes = [self._shape(batch, sets[batch]) for batch in batches]

    def _shape(self, batch: int, sets: int) -> TimedShape:
        shape = (batch, self.seq_len, self.kv_heads, self.variant.head_dim)
        size = math.prod(shape)
        q_heads = self.kv_heads * self.variant.group
        keys = [self._pool[i * size : (i + 1) * size].view(shape) for i in range(sets)]
        out_bytes = batch * q_heads * self.seq_len * self.variant.out_dtype.itemsize
        key_bytes = size * self.variant.dtype.itemsize
        most = self._replay_us * ASSUMED_BANDWIDTH / (key_bytes + out_bytes)
        outputs = [
            torch.empty(batch, q_heads, self.seq_len, dtype=self.variant.out_dtype, device=self.device)
            for _ in range(max(1, math.ceil(min(most, self._output_bytes / out_bytes))))
        ]
        launches = max(sets, len(outputs))
        return TimedShape(
            batch,
            self.kv_heads,
            q=[self._random(batch, q_heads, self.variant.head_dim) for _ in range(launches)],
            k=[keys[i % sets] for i in range(launches)],
            out=[outputs[i % len(outputs)] for i in range(launches)],
        )

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float32, device=self.device).to(self.variant.dtype)

    @property
    def screening(self) -> TimedShape:
        """The shape that candidates are screened on: the middle one."""
        return self.shapes[len(self.shapes) // 2]
