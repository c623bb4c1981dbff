"""Offsets beyond 2^31 elements: whether a binary computes any of them in int32. See validate.py for what comes of it.

Each trial spreads one dimension, of the inputs or of the output, so far that index * stride first exceeds 2^31 - 1 at
its last indices. In int32 such an offset o becomes o - 2^32. The spread tensors begin in the middle of one large block
of memory, so that this place lies in the block as well: a binary that reads there finds NaN, and one that writes there
leaves NaN where its result belongs. What is not touched is not written, so the block's size costs no time.
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from tunedqk.arrangement import arrange
from tunedqk.inputs import SCALE, Inputs, integer_inputs, queries_of
from tunedqk.kernels.loop import loop_scores
from tunedqk.variant import ALIGNMENT, Variant, geometry

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tunedqk.launch import Binary
    from tunedqk.tensors import Tensors

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
    """What shows one product of an index and a stride. Tensors are compact; spread_q and the others say what is not.

    expected: of an output that goes on behind the last key, where the variant fills. An input that has nothing to
    spread is not tried.
    """

    name: str
    tensors: Tensors
    expected: torch.Tensor
    spread_q: _Spread | None
    spread_k: _Spread | None
    spread_out: _Spread


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
        self._made: dict[tuple[str, int], _Case] = {}

    def close(self) -> None:
        """Give the block back to the driver; another trial takes it anew."""
        held = self._block.is_cuda
        self._block = torch.empty(0, dtype=torch.uint8)
        self._available = None
        if held:
            torch.cuda.empty_cache()

    def reserve(self, out_dtype: torch.dtype) -> str:
        """Take the block, unless that was tried before. Says why trials with such an output cannot be, or nothing."""
        itemsize = max(self.variant.dtype.itemsize, self.variant.k_dtype.itemsize, out_dtype.itemsize)
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
            if case.spread_q is not None or case.spread_k is not None:
                yield f"{case.name}, inputs", self._with_spread_inputs(binary, case)
            yield f"{case.name}, output", self._with_spread_output(binary, case)

    def _cases(self, chunk: int, capacity: int) -> Iterator[_Case]:
        if self._few is None:
            self._few = integer_inputs(self.device, self.variant, 1, batch=2, kv_heads=self._kv_heads)
        page_size = self.variant.page_size
        positions, of_a_page = (PARTS + 1) * chunk, -(-page_size // chunk) * chunk
        if self._many is None or self._many.seq_len < max(positions, of_a_page):
            longest = max((PARTS + 1) * max(chunk, capacity), page_size + chunk)
            self._many = integer_inputs(self.device, self.variant, longest, batch=1, kv_heads=1)
            self._made.clear()
        group, heads, q_len, second = self.variant.group, self._kv_heads, queries_of(self.variant), _Spread(0, 1)
        # Where chunks are filled without being scored, that has offsets of its own.
        few = functools.partial(self._case, self._few, tail=chunk if self.variant.ragged and self.variant.fill else 0)
        many = functools.partial(self._case, self._many)
        yield few("batch", (2, 1, 1), second, second, second)
        q_head = _Spread(1, (heads - 1) * group)
        of_q = q_head._replace(dim=2 if self.variant.several else 1)
        yield few("heads", (1, heads, 1), of_q, _Spread(2, heads - 1), q_head)
        if group > 1:  # where one program does not take them all, the last row is beyond the limit by two products
            last_row = _Spread(1, group - 1)
            yield few("rows", (1, 1, 1), last_row._replace(dim=of_q.dim), None, last_row)
        if self.variant.several:
            yield few("queries", (1, 1, 1), _Spread(1, q_len - 1), None, _Spread(2, q_len - 1))
        # Positions are counted from their chunk's start: the one product is all within a chunk, the other its start.
        # All chunks are full: then a binary may load what its masks leave out, and still read nothing that is not ours.
        last = 3 if self.variant.several else 2
        for name, first, length in (("positions", chunk - 1, chunk), ("chunks", PARTS * chunk, positions)):
            of_k = _Spread(0 if page_size else 1, first)
            yield many(name, (1, 1, length), None, of_k, _Spread(last, first))
        if page_size > 1:
            in_page = _Spread(1, page_size - 1)
            yield many("places in a page", (1, 1, of_a_page), None, in_page, _Spread(last, of_a_page - 1))
        if few.keywords["tail"]:
            yield few("filled", (1, 1, 1), None, None, _Spread(last, chunk))

    def _case(
        self,
        inputs: Inputs,
        name: str,
        shape: tuple[int, int, int],
        spread_q: _Spread | None,
        spread_k: _Spread | None,
        spread_out: _Spread,
        tail: int = 0,
    ) -> _Case:
        """A case on the first of the inputs; shape: batch, KV heads, positions; tail: of the output, to be filled."""
        variant, (batch, kv_heads, seq_len) = self.variant, shape
        wanted = (name, seq_len + tail)
        if wanted in self._made:
            return self._made[wanted]
        tensors = arrange(variant, inputs.numbers.part(seq_len, kv_heads, batch=batch), full=True)
        rows = (batch, kv_heads * variant.group, *([queries_of(variant)] if variant.several else []))
        expected = torch.full((*rows, seq_len + tail), torch.nan, dtype=torch.float32, device=self.device)
        scored, fill = expected[..., :seq_len], 0.0 if variant.fill else None
        loop_scores(tensors, scored, SCALE, causal=variant.causal, fill=fill)
        expected[..., seq_len:] = 0.0
        if variant.page_size and spread_k is not None and spread_k.dim == 0:
            spread_k = _Spread(0, tensors.k.shape[0] - 1)  # the block that the first position is in
        self._made[wanted] = _Case(name, tensors, expected, spread_q, spread_k, spread_out)
        return self._made[wanted]

    def _with_spread_inputs(self, binary: Binary, case: _Case) -> torch.Tensor:
        q, k = case.tensors[:2]
        if case.spread_q is not None:
            extent = sum((size - 1) * stride for size, stride in zip(k.shape, k.stride(), strict=True))
            q = self._spread_copy(q, case.spread_q, gap=(extent // ALIGNMENT + 1) * ALIGNMENT)  # between the keys
        if case.spread_k is not None:
            k = self._spread_copy(k, case.spread_k)
        out = torch.empty(case.expected.shape, dtype=binary.variant.out_dtype, device=self.device)
        return _launch(binary, case.tensors._replace(q=q, k=k), out, case.expected)

    def _with_spread_output(self, binary: Binary, case: _Case) -> torch.Tensor:
        shape = case.expected.shape
        within = [1 if dim == case.spread_out.dim else size for dim, size in enumerate(shape)]
        strides = [math.prod(within[dim + 1 :]) for dim in range(len(shape))]
        out, _ = self._views(shape, strides, binary.variant.out_dtype, case.spread_out)
        return _launch(binary, case.tensors, out, case.expected)

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


def _launch(binary: Binary, tensors: Tensors, out: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Whether the result differs anywhere. It is exact, and NaN only where a position is hidden and not filled."""
    out.fill_(torch.nan)
    sizes = geometry(tensors, out, "NHD", fill_tail=binary.variant.fill)
    binary.launch(tensors, out, SCALE, 0.0, binary.grid(sizes))
    expected = expected.to(out.dtype)
    return ((out.contiguous() != expected) & ~(expected.isnan() & out.isnan())).any()
