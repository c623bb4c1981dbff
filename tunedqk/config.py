"""What is tuned: configs, the key under which a winner is stored, and the search space of a key.

Plain data; neither torch nor triton is imported here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

MAX_HEAD_DIM = 576
MIN_BUCKET = 512
MAX_QUERIES = 64
# What stands in a key for up to MOST_OF_FEW sequences, as a single request has, and for more.
FEW_SEQUENCES, MANY_SEQUENCES = 8, 64
MOST_OF_FEW = 16
MAX_PAGE_SIZE = 256

ELEMENT_SIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""Bytes of one key element, by dtype name: the dtypes that the kernels take."""

LOAD_HINTS = ("", "evict_first")
STORE_HINTS = ("", "evict_last")
# What the memory floor's kernels try, and the pair that all candidates have. A cache is read once a step, so its lines
# go first, and the scores, which are written again or read next, stay: they need not go to memory at all. On an H200
# 537 MB of keys and 4 MB of scores in one tensor take 119.5 us with both hints, 125.5 with the first, 126.3 with none;
# where outputs rotate through all of L2, 125.2, 126.0 and 125.8.
STREAMING = ("evict_first", "evict_last")
HINTS = (("", ""), ("evict_first", ""), STREAMING)


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
    a power of two. page_size: 0 for a cache that is not paged. sequences: batch * kv_heads, as a bucket: 8 for up to
    16, 64 for more.
    """

    head_dim: int
    dtype: str
    rows: int
    seq_len: int
    page_size: int = 0
    sequences: int = FEW_SEQUENCES

    def __str__(self) -> str:
        pages = f", pages of {self.page_size}" if self.page_size else ""
        shape = f"head_dim {self.head_dim}, {self.dtype}, rows {self.rows}, seq_len {self.seq_len}{pages}"
        return f"{shape}, {self.load} sequences"

    @property
    def load(self) -> str:
        """The number of sequences that its own stands for, in words."""
        return f"{'up to' if self.sequences == FEW_SEQUENCES else 'more than'} {MOST_OF_FEW}"

    def neighbours(self) -> Iterator[TuningKey]:
        """Keys whose winner may serve: lengths at most a factor 4 away, closest first, of two the larger.

        Those of as many sequences come first: they have the same winner more often than this length has with others.
        """
        other = MANY_SEQUENCES if self.sequences == FEW_SEQUENCES else FEW_SEQUENCES
        lengths = (self.seq_len, self.seq_len * 2, self.seq_len // 2, self.seq_len * 4, self.seq_len // 4)
        for sequences, seq_len in itertools.product((self.sequences, other), lengths):
            if (seq_len, sequences) != (self.seq_len, self.sequences):
                yield msgspec.structs.replace(self, seq_len=seq_len, sequences=sequences)

    @property
    def command(self) -> str:
        """What to type to tune it ahead of time."""
        return (
            f"tunedqk pretune --head-dims {self.head_dim} --dtypes {self.dtype} --rows {self.rows} "
            f"--seq-lens {self.seq_len} --sequences {self.sequences}"
            + (f" --page-sizes {self.page_size}" if self.page_size else "")
        )


def bucket(seq_len: int) -> int:
    """The length that stands for `seq_len` in a key: a growing cache gets a new one each time it has doubled."""
    return max(MIN_BUCKET, next_power_of_2(seq_len))


def sequence_bucket(sequences: int) -> int:
    """The number that stands for `sequences`, batch * kv_heads, in a key.

    On an H200 the best config of 8 sequences takes up to 1.7 times as long as the best one with 64 and 512, and that
    one up to 1.9 times as long with 8 (both of float8 keys in pages).
    """
    return FEW_SEQUENCES if sequences <= MOST_OF_FEW else MANY_SEQUENCES


def tuning_key(
    seq_len: int, head_dim: int, dtype: str, rows: int, page_size: int = 0, sequences: int = FEW_SEQUENCES
) -> TuningKey:
    """The key of a call: the only place where sizes become buckets, for the tuner and for the call alike."""
    return TuningKey(
        head_dim=head_dim,
        dtype=dtype,
        rows=next_power_of_2(rows),
        seq_len=bucket(seq_len),
        page_size=page_size,
        sequences=sequence_bucket(sequences),
    )


class Blocking(NamedTuple):
    """How the kernel cuts head_dim and the query rows of a KV head; a function of the shape, not tuned.

    head_dim is covered by BLOCK_D elements and, where one power of two would waste too much, TAIL_D more. ROWS query
    rows are scored at a time: by `tl.dot`, or one after the other by `tl.sum`.
    """

    BLOCK_D: int
    TAIL_D: int
    ROWS: int
    dot: bool

    @property
    def elements(self) -> int:
        """Elements of one key as the kernel holds it, padding included."""
        return self.BLOCK_D + self.TAIL_D


def blocking(head_dim: int, dtype: str, group: int) -> Blocking:
    """The blocking for `group` query heads per KV head."""
    # On an H200 at head_dim 128, tl.sum over tl.dot: bf16 0.87 at 2 rows, 0.58 at 4; fp32, whose products may not go
    # through TF32 and so not through the matrix units, 1.8 at 4 rows, 1.1 at 8, 0.83 at 16.
    rows = next_power_of_2(group)
    dot = rows >= 2 if dtype != "float32" else rows >= 16 and head_dim <= 256
    block_d, tail_d = next_power_of_2(head_dim), 0
    if head_dim > 256 and block_d > head_dim:
        block_d //= 2
        tail_d = next_power_of_2(head_dim - block_d)
    if not dot:
        return Blocking(block_d, tail_d, ROWS=min(group, 16), dot=False)
    # 16 is the least that tl.dot takes on every target. Rows beyond the limit are further programs, which find the
    # keys in L2: fp32 would spill, and a long head_dim leaves no shared memory for more.
    limit = 16 if dtype == "float32" else 128 if head_dim <= 128 else 64 if head_dim <= 256 else 32
    rows = min(max(16, rows), limit)
    return Blocking(max(16, block_d), max(16, tail_d) if tail_d else 0, rows, dot=True)


def shared_memory_bytes(config: KernelConfig, blocks: Blocking, dtype: str) -> int:
    """Shared memory that the kernel needs at least, about: to skip candidates before compiling."""
    if not blocks.dot:
        return 0
    tiles = config.num_stages if config.TILE_SIZE < config.CHUNK_SIZE else 1
    return (blocks.ROWS + tiles * config.TILE_SIZE) * blocks.elements * ELEMENT_SIZE[dtype]


def _sum_space(element_bytes: int) -> Iterator[tuple[int, int, int, int]]:
    """(CHUNK_SIZE, TILE_SIZE, num_stages, num_warps) for `tl.sum`: one tile, about 64 to 256 bytes a thread."""
    # A loop over tiles gained nothing here, so num_stages would change nothing.
    smallest = min(max(next_power_of_2(4096 // element_bytes), 16), 128)
    least, most = min(64, smallest * element_bytes // 32), max(256, smallest * element_bytes // 128)
    for chunk in (smallest, 2 * smallest, 4 * smallest, 8 * smallest):
        if chunk > 2 * smallest and chunk * element_bytes > 32768:
            break
        for warps in (1, 2, 4, 8):
            if least <= chunk * element_bytes // (32 * warps) <= most:
                yield chunk, chunk, 1, warps


def _dot_space(dtype: str, head_dim: int) -> Iterator[tuple[int, int, int, int]]:
    """The same for `tl.dot`: one tile, or a pipelined loop over a few."""
    tile = 64 if head_dim <= 256 else 32
    if dtype == "float32":
        for chunk, warps in itertools.product((tile, 2 * tile, 4 * tile), (2, 4)):
            yield from ((chunk, tile, stages, warps) for stages in ((1,) if chunk == tile else (1, 2)))
        return
    yield from ((chunk, chunk, 1, warps) for chunk, warps in ((tile, 4), (2 * tile, 8)))
    if head_dim > 256:
        yield tile, tile, 1, 8  # a small GPU's shared memory has room for no other
    yield from ((2 * tile, tile, stages, 4) for stages in (2, 3))
    yield from ((4 * tile, tile, stages, 4) for stages in (3, 4))
    yield from ((4 * tile, 2 * tile, 2, warps) for warps in (4, 8))
    yield from ((8 * tile, 2 * tile, 3, warps) for warps in (4, 8))


def search_space(key: TuningKey, *, interpreted: bool = False) -> list[KernelConfig]:
    """The candidates for a key, at most 16; under the interpreter its distinct programs, at most 4.

    Warps, stages and hints are no part of the program that the interpreter runs.
    """
    blocks = blocking(key.head_dim, key.dtype, key.rows)
    size = ELEMENT_SIZE[key.dtype]
    points = list(_dot_space(key.dtype, key.head_dim) if blocks.dot else _sum_space(blocks.elements * size))
    if interpreted:
        programs = dict.fromkeys((chunk, tile) for chunk, tile, _, _ in points)
        return [KernelConfig(chunk, tile, num_warps=4) for chunk, tile in list(programs)[:4]]
    return [KernelConfig(chunk, tile, warps, stages, *STREAMING) for chunk, tile, stages, warps in points]


def fits_shared_memory(config: KernelConfig, key: TuningKey, limit: int) -> bool:
    """Whether the candidate can fit `limit` bytes of shared memory."""
    return shared_memory_bytes(config, blocking(key.head_dim, key.dtype, key.rows), key.dtype) <= limit


def default_config(key: TuningKey, *, interpreted: bool = False) -> KernelConfig:
    """A fair guess for a key that nothing is known about: it needs little shared memory and suits most shapes."""
    candidates = search_space(key, interpreted=interpreted)
    blocks = blocking(key.head_dim, key.dtype, key.rows)
    modest = [c for c in candidates if c.num_warps == 4 and c.TILE_SIZE == c.CHUNK_SIZE] or candidates
    return min(modest, key=lambda c: (abs(c.CHUNK_SIZE * blocks.elements - 8192), c))


class Grid(NamedTuple):
    """The values of each field of the keys to tune, the most useful first."""

    head_dims: tuple[int, ...] = (128, 64, 80, 96, 256)
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    rows: tuple[int, ...] = (1, 4, 8, 16)
    seq_lens: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
    page_sizes: tuple[int, ...] = (0,)
    sequences: tuple[int, ...] = (FEW_SEQUENCES, MANY_SEQUENCES)

    def tuning_keys(self) -> list[TuningKey]:
        """Its keys, in the order to tune them: those of a shape, which share its binaries, in a row."""
        keys = (
            tuning_key(seq_len, head_dim, dtype, row, page_size, sequences)
            for page_size, dtype, head_dim, row, seq_len, sequences in itertools.product(
                self.page_sizes, self.dtypes, self.head_dims, self.rows, self.seq_lens, self.sequences
            )
        )
        return list(dict.fromkeys(keys))


DEFAULT_GRID = Grid()
QUICK_GRID = Grid(head_dims=(128,), dtypes=("bfloat16",), rows=(1, 4), seq_lens=(4096, 32768))
# Several queries are more rows: 64 of them, of 4 query heads a KV head, are 256.
WHOLE_GRIDS = (
    Grid(head_dims=(128, 64, 80, 96, 256, 32, 48, 112, 160, 192, 512, 576), rows=(1, 4, 8, 16, 2, 32, 64, 128, 256)),
    Grid(head_dims=(128, 64, 256), dtypes=("float8_e4m3fn", "float8_e5m2"), page_sizes=(0, 16, 64, 1)),
    Grid(head_dims=(128, 64, 256), dtypes=("bfloat16", "float16"), page_sizes=(16, 64, 1)),
)
"""What `pretune --all` tunes: more shapes, then quantised keys, then pages."""
