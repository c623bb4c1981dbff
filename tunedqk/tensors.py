"""The tensors that a call reads, and the dtypes that they may have."""

from __future__ import annotations

from typing import NamedTuple

import torch

DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in (torch.float32, torch.float16, torch.bfloat16)}
"""Names of the dtypes of queries, scores, and of keys that are not quantised."""

FP8_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)}
"""Names of the dtypes of quantised keys."""

KEY_DTYPE_NAMES = DTYPE_NAMES | FP8_NAMES
TORCH_DTYPES = {name: dtype for dtype, name in KEY_DTYPE_NAMES.items()}
INDEX_DTYPES = (torch.int32, torch.int64)


class Tensors(NamedTuple):
    """What a call reads; `qk_score` says which shapes these may have. k_scale: here a tensor or nothing."""

    q: torch.Tensor
    k: torch.Tensor
    seq_lens: torch.Tensor | None = None
    seq_starts: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None

    @property
    def given(self) -> dict[str, torch.Tensor]:
        """Those that there are, by the name of their argument."""
        return {name: x for name, x in zip(self._fields, self, strict=True) if x is not None}

    def repeated(self, batch: int) -> Tensors:
        """The first request, so many times, in the same memory."""
        per_request = {"q", "seq_lens", "seq_starts", "block_table"}
        if self.block_table is None:
            per_request |= {"k", "k_scale"} if self.k_scale is not None and self.k_scale.dim() == 3 else {"k"}
        return self._replace(**{
            name: x[:1].expand(batch, *x.shape[1:]) for name, x in self.given.items() if name in per_request
        })  # fmt: skip
