"""The operator on DTensors: which placements of q and k give a sharded result without communication."""

from __future__ import annotations

import functools
import itertools
import math
import sys
from typing import TYPE_CHECKING, Any

import torch

from tunedqk.tensors import Tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    _Way = tuple[Sequence[Placement], Sequence[Placement | None]]
    Ways = list[_Way]


def ensure_rule() -> bool:
    """Tell DTensor the rule, if this process uses DTensor: nobody else has to import it. Returns whether it does."""
    uses = "torch.distributed.tensor" in sys.modules
    if uses:
        _register()
    return uses


# So that dynamo does it when it compiles a call. torch.compiler.assume_constant_result says the same, but it imports
# dynamo, which takes a second.
ensure_rule._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001


def is_distributed(*tensors: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor; for those who use DTensor."""
    from torch.distributed.tensor import DTensor

    return any(isinstance(tensor, DTensor) for tensor in tensors)


@functools.cache
def _register() -> None:
    from torch.distributed.tensor.experimental import register_sharding

    @register_sharding(torch.ops.tunedqk.qk_score.default)  # type: ignore[untyped-decorator]
    def rule(*arguments: Any) -> Ways:
        """How a call's tensors may lie on one dimension of the mesh; DTensor takes what moves the fewest bytes."""
        q, causal, *others, _, layout, _, _, _ = arguments
        tensors = Tensors(q, *others)
        kv_heads = tensors.k.shape[2 if layout == "NHD" else 1]
        ways = [_replicated(tensors), _by_batch(tensors)]
        if kv_heads == 1 or _splits_evenly(kv_heads, tensors.k.mesh):  # type: ignore[attr-defined]
            ways.append(_by_heads(tensors, layout, kv_heads))
        # Where lengths, or the last query's position, tell what is hidden, a part of the positions would not know.
        if not causal and tensors.seq_lens is tensors.seq_starts is None:
            ways.append(_by_positions(tensors, layout))
        rest = [None] * (len(arguments) - len(tensors) - 1)
        return [(scores, [placed[0], None, *placed[1:], *rest]) for scores, placed in ways]


def _placed(tensors: Tensors, dims: dict[str, int | None]) -> list[Placement | None]:
    """Placements of all tensors: sharded over the given dimension, else replicated; None for what is not there."""
    from torch.distributed.tensor import Replicate, Shard

    def place(name: str) -> Placement:
        dim = dims.get(name)
        return Replicate() if dim is None else Shard(dim)

    return [place(name) if x is not None else None for name, x in zip(tensors._fields, tensors, strict=True)]


def _replicated(tensors: Tensors) -> _Way:
    from torch.distributed.tensor import Replicate

    return [Replicate()], _placed(tensors, {})


def _by_batch(tensors: Tensors) -> _Way:
    """Each process has some requests; a pool is what they share."""
    from torch.distributed.tensor import Shard

    per_request: dict[str, int | None] = {"q": 0, "seq_lens": 0, "seq_starts": 0, "block_table": 0}
    if tensors.block_table is None:
        per_request |= {"k": 0, "k_scale": 0 if _by_token(tensors) else None}
    return [Shard(0)], _placed(tensors, per_request)


def _by_heads(tensors: Tensors, layout: str, kv_heads: int) -> _Way:
    from torch.distributed.tensor import Shard

    dims: dict[str, int | None] = {"q": 2 if tensors.q.ndim == 4 and layout == "NHD" else 1}
    if kv_heads > 1:
        dims["k"] = 2 if layout == "NHD" else 1
        if tensors.k_scale is not None and tensors.k_scale.ndim:
            dims["k_scale"] = tensors.k_scale.ndim - 1
    return [Shard(1)], _placed(tensors, dims)


def _by_positions(tensors: Tensors, layout: str) -> _Way:
    from torch.distributed.tensor import Shard

    dims: dict[str, int | None] = {"k": 1 if layout == "NHD" else 2, "k_scale": 1 if _by_token(tensors) else None}
    return [Shard(tensors.q.ndim - 1)], _placed(tensors, dims)


def _by_token(tensors: Tensors) -> bool:
    return tensors.k_scale is not None and tensors.k_scale.ndim == 3


def _splits_evenly(count: int, mesh: DeviceMesh) -> bool:
    """Whether each process gets as many KV heads as the others, whichever dimensions of the mesh they lie on.

    Else the query heads of some would not go with their KV heads. DTensor itself shards nothing over more processes
    than it has elements.
    """
    subsets = itertools.chain.from_iterable(
        itertools.combinations(mesh.shape, length) for length in range(1, mesh.ndim + 1)
    )
    return all(count % parts == 0 for parts in map(math.prod, subsets) if parts <= count)
