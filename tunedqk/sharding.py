"""The operator on DTensors: which placements of q and k give a sharded result without communication."""

from __future__ import annotations

import functools
import itertools
import math
import sys
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    Ways = list[tuple[Sequence[Placement], Sequence[Placement | None]]]


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
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    @register_sharding(torch.ops.tunedqk.qk_score.default)  # type: ignore[untyped-decorator]
    def rule(_: torch.Tensor, k: torch.Tensor, scale: float, layout: str, *others: object) -> Ways:
        """How scores, q and k may lie on one dimension of the mesh; DTensor takes what moves the fewest bytes."""
        heads, positions = (2, 1) if layout == "NHD" else (1, 2)
        rest = [None] * len((scale, layout, *others))
        ways: Ways = [
            ([Replicate()], [Replicate(), Replicate(), *rest]),
            ([Shard(0)], [Shard(0), Shard(0), *rest]),
            ([Shard(2)], [Replicate(), Shard(positions), *rest]),
        ]
        kv_heads = k.shape[heads]
        if kv_heads == 1:
            ways.append(([Shard(1)], [Shard(1), Replicate(), *rest]))
        elif _splits_evenly(kv_heads, k.mesh):  # type: ignore[attr-defined]
            ways.append(([Shard(1)], [Shard(1), Shard(heads), *rest]))
        return ways


def _splits_evenly(count: int, mesh: DeviceMesh) -> bool:
    """Whether each process gets as many KV heads as the others, whichever dimensions of the mesh they lie on.

    Else the query heads of some would not go with their KV heads. DTensor itself shards nothing over more processes
    than it has elements.
    """
    subsets = itertools.chain.from_iterable(
        itertools.combinations(mesh.shape, length) for length in range(1, mesh.ndim + 1)
    )
    return all(count % parts == 0 for parts in map(math.prod, subsets) if parts <= count)
