"""What is tuned: configs, the key under which a winner is stored, and the search space of a key.

Plain data; neither torch nor triton is imported here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import msgspec

MAX_HEAD_DIM = 576
MIN_BUCKET = 512
# Below this many query rows per KV head `tl.sum` beats `tl.dot` with its padded operand (see kernels/vectorized.py).
DOT_ROWS = 4

ELEMENT_SIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of one key element, by dtype name: the dtypes that the kernels take."""

LOAD_HINTS = ("", "evict_first")
STORE_HINTS = ("", "evict_last")


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n` (1 for `n` below 1)."""
    return 1 << max(n - 1, 0).bit_length()


class KernelConfig(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """One point of the search space. The field names are those of the kernel's meta-parameters and of `triton.Config`.

    CHUNK_SIZE: positions that one program scores. TILE_SIZE: positions it loads at a time; a program loops when its
    chunk holds several tiles, and only then does `num_stages` (the depth of the loop's pipeline) change anything.
    LOAD_HINT, STORE_HINT: L2 eviction policies of the keys' loads and of the scores' stores.
    """

    CHUNK_SIZE: int
    TILE_SIZE: int
    num_warps: int
    num_stages: int = 1
    LOAD_HINT: str = ""
    STORE_HINT: str = ""

    def __post_init__(self) -> None:
        for name, low, high in (("CHUNK_SIZE", 16, 65536), ("TILE_SIZE", 16, 1024), ("num_warps", 1, 32)):
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high or value & (value - 1):
                raise ValueError(f"{name}: expected a power of two from {low} to {high}, got {value!r}")
        if self.TILE_SIZE > self.CHUNK_SIZE:
            raise ValueError(f"TILE_SIZE: expected at most CHUNK_SIZE = {self.CHUNK_SIZE}, got {self.TILE_SIZE}")
        if type(self.num_stages) is not int or not 1 <= self.num_stages <= 8:
            raise ValueError(f"num_stages: expected 1 to 8, got {self.num_stages!r}")
        for name, allowed in (("LOAD_HINT", LOAD_HINTS), ("STORE_HINT", STORE_HINTS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: expected one of {allowed}, got {getattr(self, name)!r}")

    def meta(self) -> dict[str, int | str]:
        """The constexpr arguments of the vectorised kernel that this config fixes."""
        # A kernel parameter named num_stages would swallow the launch option, hence STAGES.
        return {
            "CHUNK_SIZE": self.CHUNK_SIZE,
            "TILE_SIZE": self.TILE_SIZE,
            "STAGES": self.num_stages,
            "LOAD_HINT": self.LOAD_HINT,
            "STORE_HINT": self.STORE_HINT,
        }

    def __str__(self) -> str:
        tile = f"/{self.TILE_SIZE}x{self.num_stages}" if self.TILE_SIZE < self.CHUNK_SIZE else ""
        hints = "".join(f" {hint}" for hint in (self.LOAD_HINT, self.STORE_HINT) if hint)
        return f"chunk {self.CHUNK_SIZE}{tile}, {self.num_warps} warps{hints}"


class TuningKey(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """What a winning config is stored under. Build it with `tuning_key`, which rounds the sizes.

    seq_len: a bucket, a power of two of at least 512. dtype: name of the keys' dtype. rows: query rows per KV head,
    a power of two. page_size: 0 for a cache that is not paged.
    """

    head_dim: int
    dtype: str
    rows: int
    seq_len: int
    page_size: int = 0

    def __str__(self) -> str:
        return f"head_dim {self.head_dim}, {self.dtype}, rows {self.rows}, seq_len {self.seq_len}"


def tuning_key(seq_len: int, head_dim: int, dtype: str, rows: int, page_size: int = 0) -> TuningKey:
    """The key of a call: the only place where sizes become buckets, for the tuner and for the call alike."""
    return TuningKey(
        head_dim=head_dim,
        dtype=dtype,
        rows=next_power_of_2(rows),
        seq_len=max(next_power_of_2(seq_len), MIN_BUCKET),
        page_size=page_size,
    )
