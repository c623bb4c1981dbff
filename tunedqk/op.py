"""The call as an operator that torch knows: for torch.compile, gradients, DTensors. Others do not go through it."""

from __future__ import annotations

from typing import Any

import torch

from tunedqk.arguments import check, check_config
from tunedqk.call import call_of
from tunedqk.compute import compute
from tunedqk.config import KernelConfig
from tunedqk.sharding import ensure_rule, is_distributed

NO_HINT = "-"


@torch.library.custom_op("tunedqk::qk_score", mutates_args=())
def _score(
    q: torch.Tensor, k: torch.Tensor, scale: float, layout: str, out_dtype: torch.dtype | None, config: str | None
) -> torch.Tensor:
    """A new tensor of scores. config: as `_encoded`."""
    with torch.no_grad():
        call = call_of(q, k, layout, None, None, out_dtype, _decoded(config))
        return compute(q, k, scale, layout, None, None, call)


@torch.library.custom_op("tunedqk::qk_score_out", mutates_args=("out",))
def _score_out(
    q: torch.Tensor,
    k: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    layout: str,
    fill: float | None,
    out_dtype: torch.dtype | None,
    config: str | None,
) -> None:
    """Scores in `out`."""
    with torch.no_grad():
        call = call_of(q, k, layout, fill, out, out_dtype, _decoded(config))
        compute(q, k, scale, layout, fill, out, call)


@_score.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    scale: float,  # noqa: ARG001
    layout: str,
    out_dtype: torch.dtype | None,
    config: str | None,  # noqa: ARG001
) -> torch.Tensor:
    sizes = check(q, k, layout, None, out_dtype)
    return q.new_empty((sizes.batch, sizes.q_heads, sizes.seq_len), dtype=sizes.out_dtype)


@_score_out.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    out: torch.Tensor,
    scale: float,  # noqa: ARG001
    layout: str,
    fill: float | None,  # noqa: ARG001
    out_dtype: torch.dtype | None,
    config: str | None,  # noqa: ARG001
) -> None:
    check(q, k, layout, out, out_dtype)


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
    q, k, ctx.scale, ctx.layout, _, _ = inputs
    ctx.save_for_backward(q, k)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Gradients of q and k, by torch operations in the wider of the two dtypes, rounded to q's at the end.

    So for DTensors it takes a torch whose DTensors can be multiplied as they are sharded; 2.11 cannot over heads.
    """
    q, k = ctx.saved_tensors
    dtype = torch.promote_types(grad.dtype, q.dtype)
    keys = (k.transpose(1, 2) if ctx.layout == "NHD" else k).to(dtype)  # [batch, kv_heads, seq_len, head_dim]
    kv_heads = keys.shape[1]
    grad = (grad * ctx.scale).to(dtype).unflatten(1, (kv_heads, -1))  # [batch, kv_heads, group, seq_len]
    grad_q = grad_k = None
    if ctx.needs_input_grad[0]:
        grad_q = (grad @ keys).flatten(1, 2).to(q.dtype)
    if ctx.needs_input_grad[1]:
        rows = q.to(dtype).unflatten(1, (kv_heads, -1))  # [batch, kv_heads, group, head_dim]
        grad_k = (grad.transpose(2, 3) @ rows).to(k.dtype)
        if ctx.layout == "NHD":
            grad_k = grad_k.transpose(1, 2)
    return grad_q, grad_k, None, None, None, None


_score.register_autograd(_backward, setup_context=_save)


def apply(
    q: torch.Tensor,
    k: torch.Tensor,
    scale: float,
    layout: str,
    fill: float | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    config: KernelConfig | None,
) -> torch.Tensor:
    """The call by an operator; torch.compile can follow this."""
    sharded = ensure_rule()
    if out is None:
        scores: torch.Tensor = _score(q, k, scale, layout, out_dtype, _encoded(config))
        return scores
    if sharded and is_distributed(q, k, out):
        raise TypeError("out: expected None where q, k or out is a DTensor, got a tensor")
    _score_out(q, k, out, scale, layout, fill, out_dtype, _encoded(config))
    return out
