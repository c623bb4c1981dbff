"""Offsets beyond 2^31 elements: whether a binary computes any of them in int32. See validate.py for what comes of it.

Each trial spreads one dimension, of the inputs or of the output, so far that index * stride first exceeds 2^31 - 1 at
its last indices. In int32 such an offset o becomes o - 2^32. The spread tensors begin in the middle of one large block
of memory, so that this place lies in the block as well: a binary that reads there finds NaN, and one that writes there
leaves NaN where its result belongs. What is not touched is not written, so the block's size costs no time.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

import torch

from tunedqk.inputs import SCALE, Inputs, integer_inputs
from tunedqk.launch import ALIGNMENT, Binary, Variant, geometry

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

OFFSET_LIMIT = 2**31  # the first offset that the narrow integer does not hold; a power of two
# A dimension of which only the last of so many parts, and one, lies beyond the limit ends at limit * (1 + 1 / PARTS).
PARTS = 8
ROOM = 2**23  # elements, for what rounding strides adds up to, and for the rows at the end
MEMORY_SHARE = 0.5  # of what is available


def available_memory(device: torch.device) -> int:
    """Bytes that the driver has, and that torch's allocator holds without using them."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


class _Spread(NamedTuple):
    """A dimension, and the first of its indices that shall lie beyond the limit."""

    dim: int
    first: int


class _Case(NamedTuple):
    """What shows one product of an index and a stride. Tensors are compact; spread_q and the others say what is not."""

    name: str
    q: torch.Tensor
    k: torch.Tensor
    expected: torch.Tensor
    spread_q: _Spread | None
    spread_k: _Spread | None
    spread_out: _Spread


def _case(
    name: str,
    inputs: Inputs,
    shape: tuple[int, int, int],
    spread_q: _Spread | None,
    spread_k: _Spread | None,
    spread_out: _Spread,
) -> _Case:
    """A case on the first of the inputs; shape: batch, KV heads, positions."""
    batch, kv_heads, seq_len = shape
    q_heads = kv_heads * (inputs.q.shape[1] // inputs.k.shape[2])
    q, k = inputs.q[:batch, :q_heads], inputs.k[:batch, :seq_len, :kv_heads]
    return _Case(name, q, k, inputs.reference[:batch, :q_heads, :seq_len], spread_q, spread_k, spread_out)


class OffsetCheck:
    """The trials for the binaries of one variant, whatever their output's dtype, and the block that they share."""

    def __init__(self, device: torch.device, variant: Variant) -> None:
        self.device = device
        self.variant = variant
        self._block = torch.empty(0, dtype=torch.uint8)
        self._available: int | None = None  # bytes, when the block was asked for
        # The batch's last KV head must be beyond the limit with all its query rows, however many those are.
        self._kv_heads = 2 if variant.group == 1 else PARTS + 1
        self._few: Inputs | None = None
        self._many: Inputs | None = None

    def close(self) -> None:
        """Give the block back to the driver; another trial takes it anew."""
        held = self._block.is_cuda
        self._block = torch.empty(0, dtype=torch.uint8)
        self._available = None
        if held:
            torch.cuda.empty_cache()

    def reserve(self, out_dtype: torch.dtype) -> str:
        """Take the block, unless that was tried before. Says why trials with such an output cannot be, or nothing."""
        itemsize = max(self.variant.dtype.itemsize, out_dtype.itemsize)
        elements = 2 * OFFSET_LIMIT + OFFSET_LIMIT // PARTS + ROOM
        if self._available is None:
            self._available = available_memory(self.device)
            # Large enough for a float32-output twin, too, if possible.
            self._allocate([elements * size for size in sorted({itemsize, 4}, reverse=True)], self._available)
        if self._block.numel() >= elements * itemsize:
            return ""
        need, available = (size / 2**30 for size in (elements * itemsize, self._available))
        return f"needs {need:.1f} GiB, and takes at most {MEMORY_SHARE:.0%} of the {available:.1f} GiB available"

    def _allocate(self, sizes: list[int], available: int) -> None:
        for size in sizes:
            if not self._block.numel() and size <= MEMORY_SHARE * available:
                with contextlib.suppress(torch.OutOfMemoryError):
                    self._block = torch.empty(size, dtype=torch.uint8, device=self.device)

    def trials(self, binary: Binary, capacity: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Launch on each; yields what was spread, and whether the result is wrong, on the device.

        `reserve` found nothing lacking. capacity: the largest chunk to come, so that all binaries share their inputs.
        """
        for case in self._cases(binary.config.CHUNK_SIZE, capacity):
            yield f"{case.name}, inputs", self._with_spread_inputs(binary, case)
            yield f"{case.name}, output", self._with_spread_output(binary, case)

    def _cases(self, chunk: int, capacity: int) -> Iterator[_Case]:
        if self._few is None:
            self._few = integer_inputs(self.device, self.variant, 1, batch=2, kv_heads=self._kv_heads)
        positions = (PARTS + 1) * chunk
        if self._many is None or self._many.seq_len < positions:
            longest = (PARTS + 1) * max(chunk, capacity)
            self._many = integer_inputs(self.device, self.variant, longest, batch=1, kv_heads=1)
        group, last_head, second = self.variant.group, self._kv_heads - 1, _Spread(0, 1)
        yield _case("batch", self._few, (2, 1, 1), second, second, second)
        q_head = _Spread(1, last_head * group)
        yield _case("heads", self._few, (1, self._kv_heads, 1), q_head, _Spread(2, last_head), q_head)
        if group > 1:  # where one program does not take them all, the last row is beyond the limit by two products
            last_row = _Spread(1, group - 1)
            yield _case("rows", self._few, (1, 1, 1), last_row, None, last_row)
        # Positions are counted from their chunk's start: the one product is all within a chunk, the other its start.
        # All chunks are full: then a binary may load what its masks leave out, and still read nothing that is not ours.
        for name, first, length in (("positions", chunk - 1, chunk), ("chunks", PARTS * chunk, positions)):
            yield _case(name, self._many, (1, 1, length), None, _Spread(1, first), _Spread(2, first))

    def _with_spread_inputs(self, binary: Binary, case: _Case) -> torch.Tensor:
        q, k = case.q, case.k
        if case.spread_q is not None:
            q = self._spread_copy(q, case.spread_q, gap=2 * q.stride(1))  # between the keys
        if case.spread_k is not None:
            k = self._spread_copy(k, case.spread_k)
        out = torch.empty(case.expected.shape, dtype=binary.variant.out_dtype, device=self.device)
        return _launch(binary, q, k, out, case.expected)

    def _with_spread_output(self, binary: Binary, case: _Case) -> torch.Tensor:
        out, _ = self._views(case.expected.shape, (1, 1, 1), binary.variant.out_dtype, case.spread_out)
        return _launch(binary, case.q, case.k, out, case.expected)

    def _spread_copy(self, x: torch.Tensor, spread: _Spread, gap: int = 0) -> torch.Tensor:
        """The same in the block, with NaN where it would be read if its offsets wrapped."""
        view, wrapped = self._views(x.shape, x.stride(), x.dtype, spread, gap)
        wrapped.fill_(torch.nan)
        return view.copy_(x)

    def _views(
        self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, spread: _Spread, gap: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A tensor in the block that begins `gap` elements after its middle; and the part beyond, where it wraps to."""
        dim, first = spread
        lanes = ALIGNMENT // dtype.itemsize
        odd = 0 if self.variant.aligned else 1
        start = OFFSET_LIMIT + gap + odd
        stride = -(-OFFSET_LIMIT // (first * lanes)) * lanes + odd
        spread_strides = [stride if d == dim else s for d, s in enumerate(strides)]
        beyond = [n - first if d == dim else n for d, n in enumerate(shape)]
        elements = self._block.view(dtype)
        view = elements.as_strided(shape, spread_strides, start)
        wrapped = elements.as_strided(beyond, spread_strides, start + first * stride - 2 * OFFSET_LIMIT)
        return view, wrapped


def _launch(
    binary: Binary, q: torch.Tensor, k: torch.Tensor, out: torch.Tensor, expected: torch.Tensor
) -> torch.Tensor:
    """Whether the result differs anywhere. It is exact, and never NaN."""
    out.fill_(torch.nan)
    binary.launch(q, k, out, SCALE, 0.0, geometry(q, k, out, "NHD", fill_tail=True))
    return (out.contiguous() != expected.to(out.dtype)).any()
