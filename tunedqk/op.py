"""The call as an operator that torch knows: for torch.compile, gradients, DTensors. Others do not go through it."""

from __future__ import annotations

from typing import Any

import torch

from tunedqk import dense
from tunedqk.arguments import Sizes, check, check_config
from tunedqk.call import call_of
from tunedqk.compute import compute
from tunedqk.config import KernelConfig
from tunedqk.sharding import ensure_rule, is_distributed
from tunedqk.tensors import Tensors

NO_HINT = "-"


@torch.library.custom_op("tunedqk::qk_score", mutates_args=())
def _score(
    q: torch.Tensor,
    causal: int,
    k: torch.Tensor,
    seq_lens: torch.Tensor | None,
    seq_starts: torch.Tensor | None,
    block_table: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    scale: float,
    layout: str,
    fill: float | None,
    out_dtype: torch.dtype | None,
    config: str | None,
) -> torch.Tensor:
    """A new tensor of scores. config: as `_encoded`.

    causal is an int, and lies before all that may be None: DTensor remembers placements by what follows the first int,
    and only by the tensors before it, among which one that is not there leaves no trace. q is the first, since
    torch 2.11 looks there for the mesh.
    """
    tensors = Tensors(q, k, seq_lens, seq_starts, block_table, k_scale)
    with torch.no_grad():
        call = call_of(tensors, layout, bool(causal), fill, None, out_dtype, _decoded(config))
        return compute(tensors, scale, layout, fill, None, call)


@torch.library.custom_op("tunedqk::qk_score_out", mutates_args=("out",))
def _score_out(
    q: torch.Tensor,
    causal: int,
    k: torch.Tensor,
    seq_lens: torch.Tensor | None,
    seq_starts: torch.Tensor | None,
    block_table: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    out: torch.Tensor,
    scale: float,
    layout: str,
    fill: float | None,
    out_dtype: torch.dtype | None,
    config: str | None,
) -> None:
    """Scores in `out`."""
    tensors = Tensors(q, k, seq_lens, seq_starts, block_table, k_scale)
    with torch.no_grad():
        call = call_of(tensors, layout, bool(causal), fill, out, out_dtype, _decoded(config))
        compute(tensors, scale, layout, fill, out, call)


@_score.register_fake
def _(*arguments: Any) -> torch.Tensor:
    q, causal, *tensors, _, layout, _, out_dtype, _ = arguments
    sizes = check(Tensors(q, *tensors), layout, causal=bool(causal), out=None, out_dtype=out_dtype)
    scores: torch.Tensor = q.new_empty(sizes.out_shape, dtype=sizes.out_dtype)
    return scores


@_score_out.register_fake
def _(*arguments: Any) -> None:
    q, causal, *tensors, out, _, layout, _, out_dtype, _ = arguments
    check(Tensors(q, *tensors), layout, causal=bool(causal), out=out, out_dtype=out_dtype)


def _encoded(config: KernelConfig | None) -> str | None:
    """A config as an operator can take it; by means that torch.compile can follow."""
    check_config(config)
    if config is None:
        return None
    return (
        f"{config.CHUNK_SIZE} {config.TILE_SIZE} {config.num_warps} {config.num_stages} "
        f"{config.LOAD_HINT or NO_HINT} {config.STORE_HINT or NO_HINT}"
    )


def _decoded(config: str | None) -> KernelConfig | None:
    if config is None:
        return None
    *sizes, load, store = config.split()
    chunk, tile, warps, stages = map(int, sizes)
    load, store = (hint.replace(NO_HINT, "") for hint in (load, store))
    return KernelConfig(chunk, tile, warps, stages, load, store)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001
    q, causal, *tensors, ctx.scale, ctx.layout, _, _, _ = inputs
    ctx.causal = bool(causal)
    ctx.save_for_backward(q, *tensors)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Gradients of q and k, by torch operations in the wider of the two dtypes, rounded to q's at the end.

    So for DTensors it takes a torch whose DTensors can be multiplied as they are sharded; 2.11 cannot over heads.
    """
    tensors, layout, seq_len = Tensors(*ctx.saved_tensors), ctx.layout, grad.shape[-1]
    q, k = tensors.q, tensors.k
    sizes = check(tensors, layout, causal=ctx.causal, out=None, out_dtype=None)
    dtype = torch.promote_types(grad.dtype, q.dtype)
    seen = dense.visible(tensors, sizes, seq_len, causal=ctx.causal)  # [batch, q_len, seq_len]
    grad = (grad * ctx.scale).to(dtype)
    if seen is not None:
        grad = torch.where(seen[:, None] if q.dim() == 4 else seen, grad, 0)
    grad = _rows(grad, "HND", sizes)  # [batch, kv_heads, rows, seq_len]
    k_scale = dense.scales(tensors, sizes, seen, seq_len)
    factors = None if k_scale is None else k_scale.to(dtype).expand(sizes.batch, seq_len, sizes.kv_heads)[..., None]
    grad_q = grad_k = None
    if ctx.needs_input_grad[0]:
        keys = dense.keys(tensors, sizes, layout, seen, seq_len).to(dtype)
        keys = keys if factors is None else keys * factors
        if seen is not None:  # what is hidden may be NaN, and 0 * NaN would be one too
            keys = torch.where(seen.any(dim=1)[..., None, None], keys, 0)
        grad_q = _from_rows(grad @ keys.transpose(1, 2), layout, q).to(q.dtype)
    if ctx.needs_input_grad[2]:
        grad_k = (grad.transpose(2, 3) @ _rows(q.to(dtype), layout, sizes)).transpose(1, 2)
        grad_k = dense.to_pool(grad_k, tensors, sizes, seen).to(k.dtype)
        grad_k = grad_k if layout == "NHD" else grad_k.transpose(1, 2)
    return grad_q, None, grad_k, *[None] * (len(ctx.needs_input_grad) - 3)


def _rows(x: torch.Tensor, layout: str, sizes: Sizes) -> torch.Tensor:
    """What is [batch, q_heads, (q_len,) n], or with several queries and NHD [batch, q_len, q_heads, n], by KV head."""
    several = x.dim() == 4
    if several and layout == "NHD":
        x = x.transpose(1, 2)
    by_head: torch.Tensor = x.unflatten(1, (sizes.kv_heads, -1))
    return by_head.flatten(2, 3) if several else by_head


def _from_rows(x: torch.Tensor, layout: str, q: torch.Tensor) -> torch.Tensor:
    """The inverse, for what shall have q's form."""
    if q.dim() == 3:
        return x.flatten(1, 2)
    x = x.unflatten(2, (-1, q.shape[1 if layout == "NHD" else 2])).flatten(1, 2)
    return x if layout == "HND" else x.transpose(1, 2)


_score.register_autograd(_backward, setup_context=_save)


def apply(
    tensors: Tensors,
    scale: float,
    layout: str,
    causal: bool,
    fill: float | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    config: KernelConfig | None,
) -> torch.Tensor:
    """The call by an operator; torch.compile can follow this."""
    sharded = ensure_rule()
    q, *others = tensors
    if out is None:
        scores: torch.Tensor = _score(q, int(causal), *others, scale, layout, fill, out_dtype, _encoded(config))
        return scores
    if sharded and is_distributed(*tensors.given.values(), out):
        raise TypeError("out: expected None where a tensor of the call is a DTensor, got a tensor")
    _score_out(q, int(causal), *others, out, scale, layout, fill, out_dtype, _encoded(config))
    return out
