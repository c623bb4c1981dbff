"""What follows from a call's arguments but for addresses: worked out once, since the layers of a model share it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from tunedqk.arguments import Sizes, check, check_config, extent
from tunedqk.config import KernelConfig, bucket
from tunedqk.device import interpreting
from tunedqk.launch import ALIGNMENT, Geometry, Variant, geometry, strides_aligned

if TYPE_CHECKING:
    from collections.abc import Hashable

# Each step of a decode loop is another seq_len; what is older than this many is not asked for again.
MAX_CALLS = 1024

_PLAIN = {torch.Tensor, torch.nn.Parameter, type(None)}


class Slot(NamedTuple):
    """What calls must share to launch the same binary. device: its index, -1 for the CPU."""

    device: int
    variant: Variant
    bucket: int
    config: KernelConfig | None

    @property
    def place(self) -> torch.device:
        """Where its binary runs."""
        return torch.device("cpu") if self.device < 0 or interpreting() else torch.device("cuda", self.device)


class Call(NamedTuple):
    """A call whose arguments were checked.

    slots: by whether the addresses are aligned; extents: bytes of q, k, out; by_operator: whether torch has to see an
    operator, since a gradient is wanted, or a tensor is of a kind that has its own ways with operators.
    """

    sizes: Sizes
    out_shape: torch.Size
    out_strides: tuple[int, ...]
    elements: int  # of out
    geometry: Geometry
    slots: tuple[Slot, Slot]
    extents: tuple[int, int, int]
    by_operator: bool

    def slot(self, q: torch.Tensor, k: torch.Tensor) -> Slot:
        """The slot for these tensors' addresses."""
        return self.slots[not (q.data_ptr() | k.data_ptr()) % ALIGNMENT]

    def check_memory(self, q: torch.Tensor, k: torch.Tensor, out: torch.Tensor) -> None:
        """ValueError when out may share bytes with q or k. Interleaved views that never meet count as sharing."""
        q_bytes, k_bytes, out_bytes = self.extents
        start = out.data_ptr()
        for name, tensor, size in (("q", q, q_bytes), ("k", k, k_bytes)):
            other = tensor.data_ptr()
            if size and out_bytes and start < other + size and other < start + out_bytes:
                raise ValueError(f"out: expected memory of its own, got memory that overlaps {name}")


_calls: dict[Hashable, Call] = {}


def _traits(x: torch.Tensor) -> tuple[Hashable, ...]:
    return x.shape, x.stride(), x.dtype, x.device, x.is_neg()


def call_of(
    q: torch.Tensor,
    k: torch.Tensor,
    layout: str,
    fill: float | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    config: KernelConfig | None,
) -> Call:
    """Check a call's arguments, but for scale and fill; TypeError or ValueError says which does not fit."""
    try:
        needs_grad = torch.is_grad_enabled() and (
            q.requires_grad or k.requires_grad or (out is not None and out.requires_grad)
        )
        traits = (
            *_traits(q), *_traits(k), None if out is None else _traits(out),
            layout, fill is None, out_dtype, config, needs_grad,
            # DTensors, fake tensors, and what only looks like a tensor, may have all traits of one.
            type(q), type(k), type(out),
        )  # fmt: skip
        known = _calls.get(traits)
    except (AttributeError, TypeError, RuntimeError):  # no or odd tensors, or what does not hash: the checks say it
        traits, known, needs_grad = None, None, False
    if known is not None:
        return known
    sizes = check(q, k, layout, out, out_dtype)
    check_config(config)
    by_operator = needs_grad or not {type(q), type(k), type(out)} <= _PLAIN
    call = _work_out(q, k, layout, fill, out, sizes, config, by_operator=by_operator)
    if traits is not None:
        if len(_calls) >= MAX_CALLS:
            _calls.clear()
        _calls[traits] = call
    return call


def _work_out(
    q: torch.Tensor,
    k: torch.Tensor,
    layout: str,
    fill: float | None,
    out: torch.Tensor | None,
    sizes: Sizes,
    config: KernelConfig | None,
    *,
    by_operator: bool,
) -> Call:
    if out is None:
        out = torch.empty((sizes.batch, sizes.q_heads, sizes.seq_len), dtype=sizes.out_dtype, device="meta")
    places = geometry(q, k, out, layout, fill_tail=fill is not None)
    index = (q.device.index or 0) if q.is_cuda else -1
    group = sizes.q_heads // sizes.kv_heads if sizes.kv_heads else 0
    fits = strides_aligned(places, q.element_size())
    unaligned, aligned = (
        Slot(
            index,
            Variant(sizes.head_dim, group, q.dtype, sizes.out_dtype, addresses and fits),
            bucket(sizes.seq_len),
            config,
        )
        for addresses in (False, True)
    )
    extents = (extent(q), extent(k), extent(out))
    return Call(sizes, out.shape, out.stride(), out.numel(), places, (unaligned, aligned), extents, by_operator)
