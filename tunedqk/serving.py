"""For servers: everything ready before the first request, and what a call would use."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import torch

from tunedqk import ready
from tunedqk.arguments import check, check_number, check_quantised
from tunedqk.call import Slot, call_of, variant_of
from tunedqk.config import (
    MANY_SEQUENCES,
    MAX_HEAD_DIM,
    MAX_PAGE_SIZE,
    MAX_QUERIES,
    MIN_BUCKET,
    KernelConfig,
    TuningKey,
    bucket,
    sequence_bucket,
)
from tunedqk.device import interpreting
from tunedqk.records import Entry, Receipt
from tunedqk.resolve import Mode, mode, resolver_for
from tunedqk.tensors import Tensors
from tunedqk.variant import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tunedqk.records import Found
    from tunedqk.resolve import Resolver


MAX_SIZE = 2**31 - 1


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What a call would use, and do first; as a string, in words.

    action: "launch"; "validate", "tune" (each once, and then launch); "raise"; "torch" for torch
    operations on a CPU; "nothing" where there is no score to write.
    origin: where the config comes from. path, entry: the file of a stored winner, and what it says. receipt: the
    verdict on the binary, if there is one. ready: whether this process has bound the binary already.
    """

    key: TuningKey
    variant: str
    action: str
    origin: str = "nowhere"
    config: KernelConfig | None = None
    path: str | None = None
    entry: Entry | None = None
    receipt: Receipt | None = None
    ready: bool = False

    def __str__(self) -> str:
        lines = [f"{self.key} ({self.variant}): {self.action}"]
        if self.config is not None:
            lines.append(f"  config: {self.config} ({self.origin}{f', {self.path}' if self.path else ''})")
        if self.entry is not None:
            toolchain = self.entry.toolchain
            lines.append(f"  tuned at {self.entry.tuned_at}, Triton {toolchain.triton}, torch {toolchain.torch}")
        if self.receipt is not None:
            error = "" if self.receipt.max_error is None else f", error {self.receipt.max_error} of what is allowed"
            lines.append(f"  receipt: {self.receipt.verdict}{error}, {self.receipt.validated_at}")
        elif self.config is not None:
            lines.append("  receipt: none")
        return "\n".join(lines)


def explain(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    scale: float | None = 1.0,
    layout: str = "NHD",
    seq_lens: torch.Tensor | None = None,
    seq_starts: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    k_scale: torch.Tensor | float | None = None,
    causal: bool = False,
    fill: float | None = -math.inf,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: KernelConfig | None = None,
) -> Explanation:
    """Say what `qk_score` with these arguments would use: which config, from which file, with which receipt.

    The binary may be compiled, since a receipt goes by its hash. Nothing is launched, tuned or stored. TypeError and
    ValueError as for `qk_score`.
    """
    for name, number in (("scale", scale), ("fill", fill)):
        if number is not None:
            check_number(name, number)
    if k_scale is not None and not isinstance(k_scale, torch.Tensor):
        check_number("k_scale", k_scale)
        check_quantised(k)
        k_scale = None
    tensors = Tensors(q, k, seq_lens, seq_starts, block_table, k_scale)
    call = call_of(tensors, layout, causal, fill, out, out_dtype, config)
    if out is not None:
        call.check_memory(tensors, out)
    slot = call.slot(tensors)
    if not call.elements:
        return Explanation(key=slot.key, variant=str(slot.variant), action="nothing")
    return _explain(slot)


def warmup(
    *,
    head_dim: int,
    q_heads: int,
    kv_heads: int,
    max_seq_len: int,
    dtype: torch.dtype = torch.bfloat16,
    k_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    q_len: int = 1,
    page_size: int = 0,
    seq_lens: torch.dtype | None = None,
    seq_starts: torch.dtype | None = None,
    block_table: torch.dtype | None = None,
    k_scale: str | None = None,
    causal: bool = False,
    fill: bool = True,
    aligned: bool | None = None,
    device: torch.device | str | int | None = None,
) -> list[Explanation]:
    """Make ready what calls of one shape need: for every seq_len up to `max_seq_len`, any batch size, either layout.

    After it such a call compiles, validates and tunes nothing and opens no file, also inside a CUDA graph capture.

    Args:
        head_dim: elements of a query or key, 1 to 576.
        q_heads: query heads of the model, or of this rank.
        kv_heads: KV heads; q_heads is a multiple.
        max_seq_len: the longest cache, in positions: of a paged one, what out, or else the block table, has room for.
        dtype: of q, and of keys that are not quantised: float32, float16 or bfloat16.
        k_dtype: of float8 keys; dtype by default.
        out_dtype: of the scores; dtype by default.
        q_len: queries per request. What is ready for one number serves all that round up to the same power of two,
            times the query heads of a KV head; one query is a case of its own.
        page_size: of a paged cache; needs seq_lens and block_table.
        seq_lens: dtype, int32 or int64, of what calls pass by this name; None for nothing.
        seq_starts: likewise.
        block_table: likewise.
        k_scale: "head" for a tensor of shape [] or [kv_heads], "token" for one by token; None for a number or nothing.
        causal: as calls pass it.
        fill: whether calls fill what is hidden: False for fill=None.
        aligned: whether addresses and strides of q and k are multiples of 16 bytes. By default what they are in
            contiguous tensors; a server that also passes others warms up for both.
        device: the current CUDA device by default.

    Returns:
        One explanation for each seq_len bucket: with up to 16 kv_heads two, for few sequences and for many.

    What is missing is tuned, or replaced, or an error, as TUNEDQK_MODE says. Raises what `qk_score` raises.
    """
    mode()  # an unknown one is an error now, and not in the first request that misses
    _check_size("head_dim", head_dim, MAX_HEAD_DIM)
    for name, value in (("q_heads", q_heads), ("kv_heads", kv_heads), ("max_seq_len", max_seq_len)):
        _check_size(name, value)
    _check_size("q_len", q_len, MAX_QUERIES)
    _check_size("page_size", page_size, MAX_PAGE_SIZE, least=0)
    for name, flag in (("aligned", aligned), ("fill", fill)):
        if not isinstance(flag, bool) and (flag is not None or name == "fill"):
            raise TypeError(f"{name}: expected a bool{' or None' * (name == 'aligned')}, got {type(flag).__name__}")
    if (page_size > 0) != (block_table is not None):
        raise ValueError(f"page_size: expected one with block_table, and none without, got {page_size}")
    index = _index(device)
    tensors = _stand_ins(
        (1, q_len, q_heads, head_dim), (1, page_size or 1, kv_heads, head_dim),
        {"dtype": dtype, "k_dtype": k_dtype or dtype},
        {"seq_lens": seq_lens, "seq_starts": seq_starts, "block_table": block_table}, k_scale,
        torch.device("cpu" if index < 0 else f"cuda:{index}"),
    )  # fmt: skip
    sizes = check(tensors, "NHD", causal=causal, out=None, out_dtype=out_dtype)
    if aligned is None:
        aligned = head_dim * min(dtype.itemsize, tensors.k.element_size()) % ALIGNMENT == 0
    variant = variant_of(tensors, sizes, causal=causal, fill=fill, aligned=aligned)
    numbers = dict.fromkeys((sequence_bucket(kv_heads), MANY_SEQUENCES))  # of a single request, of a large batch
    slots = []
    length = MIN_BUCKET
    while length <= bucket(max_seq_len):
        slots += [Slot(index, variant, length, sequences, None) for sequences in numbers]
        length *= 2
    if index >= 0 or interpreting():
        for slot in slots:
            if slot not in ready.binaries:
                ready.make_ready(slot)
    return [_explain(slot) for slot in slots]


def _stand_ins(
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    dtypes: dict[str, torch.dtype],
    indices: dict[str, torch.dtype | None],
    k_scale: str | None,
    device: torch.device,
) -> Tensors:
    """The smallest tensors of a call, for the checks: of one element's memory each."""
    for name, dtype in (dtypes | indices).items():
        if not isinstance(dtype, torch.dtype) and (dtype is not None or name in dtypes):
            raise TypeError(f"{name}: expected a torch.dtype, got {type(dtype).__name__}")
    if k_scale not in (None, "head", "token"):
        raise ValueError(f"k_scale: expected 'head', 'token' or None, got {k_scale!r}")
    row_of_q, row_of_k = (torch.empty(q_shape[-1], dtype=dtype, device=device) for dtype in dtypes.values())
    lens, starts, table = (
        None if dtype is None else torch.empty(shape, dtype=dtype, device=device)
        for dtype, shape in zip(indices.values(), ((1,), (1,), (1, 1)), strict=True)
    )
    scale = None
    if k_scale is not None:
        scale = torch.empty(k_shape[2] if k_scale == "head" else k_shape[:3], device=device)
    return Tensors(row_of_q.expand(q_shape), row_of_k.expand(k_shape), lens, starts, table, scale)


def _check_size(name: str, value: object, most: int = MAX_SIZE, least: int = 1) -> None:
    if type(value) is not int:
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if not least <= value <= most:
        raise ValueError(f"{name}: expected from {least} to {most}, got {value}")


def _index(device: torch.device | str | int | None) -> int:
    """The index of a CUDA device, -1 for the CPU."""
    if device is None:
        return torch.cuda.current_device() if torch.cuda.is_available() and not interpreting() else -1
    place = torch.device(device)
    if place.type == "cuda":
        return torch.cuda.current_device() if place.index is None else place.index
    if place.type != "cpu":
        raise ValueError(f"device: expected a CUDA or CPU device, got {place}")
    return -1


def _explain(slot: Slot) -> Explanation:
    key = slot.key
    about = Explanation(key=key, variant=str(slot.variant), action="torch")
    if slot.device < 0 and not interpreting():
        return about
    resolver = resolver_for(slot.place)
    bound = ready.binaries.get(slot)
    with resolver.lock:
        for origin, config, found in _choices(resolver, slot, key):
            if bound is not None and config != bound.config:
                continue
            binary = bound or resolver.door.build(slot.variant, config).binary
            receipt = None if binary is None else resolver.db.receipt(binary.hash)
            about = msgspec.structs.replace(
                about, origin=origin, config=config, receipt=receipt, ready=bound is not None,
                path=found and str(found.path), entry=found and found.entry,
            )  # fmt: skip
            if binary is not None and (receipt is None or receipt.correct):
                known = bound is not None or (receipt is not None and key.seq_len in receipt.seq_lens)
                return msgspec.structs.replace(about, action="launch" if known else "validate")
        if bound is not None:  # what it was chosen for is no longer stored
            return msgspec.structs.replace(
                about, action="launch", origin="chosen earlier", config=bound.config, ready=True,
                receipt=resolver.db.receipt(bound.hash), path=None, entry=None,
            )  # fmt: skip
    tunes = slot.config is None and mode() is Mode.TUNE
    return msgspec.structs.replace(about, action="tune" if tunes else "raise")


def _choices(resolver: Resolver, slot: Slot, key: TuningKey) -> Iterator[tuple[str, KernelConfig, Found | None]]:
    """The configs that a call would try, in order, before it tunes or gives up."""
    if slot.config is not None:
        yield "config=", slot.config, None
        return
    for found in resolver.winners(key):
        yield "the stored winner", found.entry.config, found
    if mode() is Mode.CACHED:
        for origin, config in resolver.guesses(key):
            yield origin, config, None
