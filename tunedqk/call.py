"""What follows from a call's arguments but for addresses: worked out once, since the layers of a model share it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from tunedqk.arguments import Sizes, check, check_config, extent
from tunedqk.config import KernelConfig, TuningKey, bucket, next_power_of_2, sequence_bucket
from tunedqk.device import interpreting
from tunedqk.variant import ALIGNMENT, Geometry, Variant, geometry, strides_aligned

if TYPE_CHECKING:
    from collections.abc import Hashable

    from tunedqk.launch import Binary, Grid
    from tunedqk.tensors import Tensors

# Each step of a decode loop is another seq_len; what is older than this many is not asked for again.
MAX_CALLS = 1024

_PLAIN = {torch.Tensor, torch.nn.Parameter, type(None)}


class Slot(NamedTuple):
    """What calls must share to launch the same binary. device: its index, -1 for the CPU.

    seq_len, sequences: as in the key.
    """

    device: int
    variant: Variant
    seq_len: int
    sequences: int
    config: KernelConfig | None

    @property
    def key(self) -> TuningKey:
        """The key that the winner is stored under."""
        return self.variant.key(self.seq_len, self.sequences)

    @property
    def place(self) -> torch.device:
        """Where its binary runs."""
        return torch.device("cpu") if self.device < 0 or interpreting() else torch.device("cuda", self.device)


class Bound(NamedTuple):
    """What a warm call launches, and where: a device's index, -1 for the CPU."""

    device: int
    binary: Binary
    grid: Grid


class Call(NamedTuple):
    """A call whose arguments were checked.

    slots: by whether the addresses are aligned; bound: likewise, what they launch, once that is known; extents: bytes
    of out, and place and bytes of each tensor that has any; by_operator: whether torch has to see an operator, since a
    gradient is wanted, or a tensor is of a kind that has its own ways with operators.
    """

    sizes: Sizes
    causal: bool
    out_shape: torch.Size
    out_strides: tuple[int, ...]
    elements: int  # of out
    geometry: Geometry
    slots: tuple[Slot, Slot]
    extents: tuple[int, tuple[tuple[int, int], ...]]
    by_operator: bool
    bound: list[Bound | None]

    def aligned(self, tensors: Tensors) -> bool:
        """Whether these tensors' addresses are aligned: the place of what fits them in slots and bound."""
        return not (tensors[0].data_ptr() | tensors[1].data_ptr()) % ALIGNMENT

    def slot(self, tensors: Tensors) -> Slot:
        """The slot for these tensors' addresses."""
        return self.slots[self.aligned(tensors)]

    def check_memory(self, tensors: Tensors, out: torch.Tensor) -> None:
        """ValueError when out may share bytes with an input. Interleaved views that never meet count as sharing."""
        out_bytes, given = self.extents
        start = out.data_ptr()
        end = start + out_bytes
        for place, size in given:
            other = tensors[place].data_ptr()  # type: ignore[union-attr]
            if start < other + size and other < end:
                name = tensors._fields[place]
                raise ValueError(f"out: expected memory of its own, got memory that overlaps {name}")


_calls: dict[Hashable, Call] = {}


def _traits(x: torch.Tensor) -> tuple[Hashable, ...]:
    # Also its type: DTensors, fake tensors, and what only looks like a tensor, may share all else with one.
    return x.shape, x.stride(), x.dtype, x.device, x.is_neg(), type(x)


def call_of(
    tensors: Tensors,
    layout: str,
    causal: bool,
    fill: float | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    config: KernelConfig | None,
) -> Call:
    """Check a call's arguments, but for scale and fill; TypeError or ValueError says which does not fit."""
    q, k, seq_lens, seq_starts, table, k_scale = tensors
    # In most calls there are none of these: they must not cost those anything.
    others = () if seq_lens is seq_starts is table is k_scale is None else tensors[2:]
    try:
        needs_grad = torch.is_grad_enabled() and (
            q.requires_grad or k.requires_grad or (out is not None and out.requires_grad)
        )
        traits: tuple[Hashable, ...] = (
            # _traits(q), _traits(k), written out: that is a third of a microsecond less.
            q.shape, q.stride(), q.dtype, q.device, q.is_neg(), type(q),
            k.shape, k.stride(), k.dtype, k.device, k.is_neg(), type(k),
            None if out is None else _traits(out), layout, causal, fill is None, out_dtype, config, needs_grad,
        )  # fmt: skip
        if others:
            traits += tuple(x if x is None else (*_traits(x), x.requires_grad) for x in others)
        known = _calls.get(traits)
    except (AttributeError, TypeError, RuntimeError):  # no or odd tensors, or what does not hash: the checks say it
        traits, known, needs_grad = (), None, False
    if known is not None:
        return known
    sizes = check(tensors, layout, causal=causal, out=out, out_dtype=out_dtype)
    check_config(config)
    by_operator = needs_grad or not {type(x) for x in (*tensors, out)} <= _PLAIN
    call = _work_out(tensors, layout, causal, fill, out, sizes, config, by_operator=by_operator)
    if traits:
        if len(_calls) >= MAX_CALLS:
            _calls.clear()
        _calls[traits] = call
    return call


def _work_out(
    tensors: Tensors,
    layout: str,
    causal: bool,
    fill: float | None,
    out: torch.Tensor | None,
    sizes: Sizes,
    config: KernelConfig | None,
    *,
    by_operator: bool,
) -> Call:
    q, k = tensors[:2]
    if out is None:
        out = torch.empty(sizes.out_shape, dtype=sizes.out_dtype, device="meta")
    places = geometry(tensors, out, layout, fill_tail=fill is not None)
    index = (q.device.index or 0) if q.is_cuda else -1
    fits = strides_aligned(places, q.dtype, k.dtype)
    unaligned, aligned = (
        Slot(index, variant, bucket(places.seq_len), sequence_bucket(places.batch * places.kv_heads), config)
        for variant in (
            variant_of(tensors, sizes, causal=causal, fill=fill is not None, aligned=addresses and fits)
            for addresses in (False, True)
        )
    )
    given = [(place, extent(x)) for place, x in enumerate(tensors) if x is not None]
    extents = extent(out), tuple((place, size) for place, size in given if size and out.numel())
    return Call(
        sizes,
        causal,
        out.shape,
        out.stride(),
        out.numel(),
        places,
        (unaligned, aligned),
        extents,
        by_operator,
        [None, None],
    )


def variant_of(tensors: Tensors, sizes: Sizes, *, causal: bool, fill: bool, aligned: bool) -> Variant:
    """The variant of a call whose arguments were checked."""
    q, k, seq_lens, seq_starts, table, k_scale = tensors
    group = sizes.q_heads // sizes.kv_heads if sizes.kv_heads else 0
    causal = causal and sizes.q_len > 1
    return Variant(
        sizes.head_dim, group, q.dtype, sizes.out_dtype, aligned,
        fp8=None if k.dtype == q.dtype else k.dtype,
        rows=next_power_of_2(group * sizes.q_len) if sizes.q_len > 1 else 0,
        seq_lens=None if seq_lens is None else seq_lens.dtype,
        seq_starts=None if seq_starts is None else seq_starts.dtype,
        block_table=None if table is None else table.dtype,
        page_size=sizes.page_size,
        k_scale="" if k_scale is None else "token" if k_scale.dim() == 3 else "head",
        causal=causal,
        fill=fill or not (causal or seq_lens is not None or seq_starts is not None),
    )  # fmt: skip
