"""The inputs that binaries are judged on, with the loop kernel's answers. See validate.py for what is made of them."""

from __future__ import annotations

import dataclasses
import math

import torch

from tunedqk.kernels.loop import loop_scores
from tunedqk.launch import ALIGNMENT, Variant

SCALE = 0.37  # not a power of two: a scale that is lost, or applied twice, shows
FAMILIES = ("integers", "random", "one-hot", "cancelling")
SEED = 20260


@dataclasses.dataclass
class Inputs:
    """q [batch, q_heads, head_dim], k [batch, seq_len, kv_heads, head_dim], and what the loop kernel makes of them.

    reference, magnitude: fp32 [batch, q_heads, seq_len]; magnitude is |scale| * sum|q||k|. exact: bool, where the
    result must equal the reference to the bit. pristine: copies of q's and k's whole memory to compare with.
    """

    q: torch.Tensor
    k: torch.Tensor
    reference: torch.Tensor
    magnitude: torch.Tensor
    exact: torch.Tensor
    scale: float = SCALE
    pristine: tuple[torch.Tensor, ...] = ()

    @property
    def seq_len(self) -> int:
        """Number of positions."""
        return self.k.shape[1]

    def copy_of(self, seq_len: int, kv_heads: int | None = None) -> Inputs:
        """The first positions, and KV heads, in memory of their own, with NaN wherever no key or query lies."""
        kv_heads = kv_heads or self.k.shape[2]
        q_heads = kv_heads * (self.q.shape[1] // self.k.shape[2])
        q, k = _surrounded_copy(self.q[:, :q_heads]), _surrounded_copy(self.k[:, :, :kv_heads])
        k[:, seq_len:] = math.nan
        pristine = (_memory(q).clone(), _memory(k).clone())
        reference, magnitude, exact = (x[:, :q_heads, :seq_len] for x in (self.reference, self.magnitude, self.exact))
        return Inputs(q, k[:, :seq_len], reference, magnitude, exact, self.scale, pristine)

    def changed(self) -> torch.Tensor:
        """Whether q's or k's memory, or what surrounds it, is no longer what it was."""
        pairs = zip((self.q, self.k), self.pristine, strict=True)
        return torch.stack([(_memory(now) != before).any() for now, before in pairs]).any()


def _memory(x: torch.Tensor) -> torch.Tensor:
    """All of the storage behind a tensor, as integers."""
    whole = torch.as_strided(x, (x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return whole.view(torch.int32 if x.element_size() == 4 else torch.int16)


def _surrounded(shape: torch.Size, like: torch.Tensor) -> torch.Tensor:
    """A tensor with NaN before, behind and between its rows, and the alignment of `like`."""
    *outer, heads, _ = shape
    row = like.stride(-2)
    padded = torch.full(
        (math.prod(outer) * (heads + 1) * row + 2 * ALIGNMENT,), math.nan, dtype=like.dtype, device=like.device
    )
    strides = [(heads + 1) * row * math.prod(outer[i + 1 :]) for i in range(len(outer))]
    return padded.as_strided(shape, (*strides, row, 1), like.storage_offset())


def _surrounded_copy(x: torch.Tensor) -> torch.Tensor:
    return _surrounded(x.shape, x).copy_(x)


def _template(shape: tuple[int, ...], variant: Variant, device: torch.device) -> torch.Tensor:
    """An empty tensor whose rows are aligned, or all misaligned, as the variant's binaries expect."""
    lanes = ALIGNMENT // variant.dtype.itemsize
    row = -(-(variant.head_dim + 1) // lanes) * lanes
    offset = 0
    if not variant.aligned:
        row, offset = row + 1, 1
    like = torch.empty(1, dtype=variant.dtype, device=device).as_strided((0, 0), (row, 1), offset)
    return _surrounded(torch.Size(shape), like)


def judging_inputs(device: torch.device, variant: Variant, seq_len: int) -> list[Inputs]:
    """Every family of inputs, spread over batch elements and heads so that none looks like its neighbour.

    A GPU gets one large set. The interpreter, which takes milliseconds a program, gets two small ones.
    """
    if device.type == "cuda":
        return [_make(device, variant, seq_len, batch=4, kv_heads=3, families=FAMILIES)]
    return [
        _make(device, variant, seq_len, batch=1, kv_heads=2, families=pair) for pair in (FAMILIES[:2], FAMILIES[2:])
    ]


def long_inputs(device: torch.device, variant: Variant, seq_len: int) -> Inputs:
    """One batch element and KV head of random numbers, for a comparison at a bucket's length."""
    return _make(device, variant, seq_len, batch=1, kv_heads=1, families=("random",))


def integer_inputs(device: torch.device, variant: Variant, seq_len: int, batch: int, kv_heads: int) -> Inputs:
    """Inputs whose results must equal the reference to the bit, in every output dtype."""
    return _make(device, variant, seq_len, batch, kv_heads, families=("integers",))


def _make(
    device: torch.device, variant: Variant, seq_len: int, batch: int, kv_heads: int, families: tuple[str, ...]
) -> Inputs:
    group, head_dim = variant.group, variant.head_dim
    generator = torch.Generator(device).manual_seed(SEED)
    q = _template((batch, kv_heads * group, head_dim), variant, device)
    k = _template((batch, seq_len, kv_heads, head_dim), variant, device)
    exact = torch.zeros(batch, kv_heads * group, seq_len, dtype=torch.bool, device=device)
    for b in range(batch):
        for h in range(kv_heads):
            family = families[(b + h) % len(families)]
            rows = slice(h * group, (h + 1) * group)
            q_part, k_part = _FAMILY[family](generator, variant, seq_len)
            q[b, rows], k[b, :, h] = q_part.to(variant.dtype), k_part.to(variant.dtype)
            exact[b, rows] = family != "random"
    reference = torch.empty(exact.shape, dtype=torch.float32, device=device)
    magnitude = loop_scores(q, k, reference, scale=SCALE)
    return Inputs(q, k, reference, magnitude, exact)


def _integers(
    generator: torch.Generator, low: torch.Tensor | int, high: torch.Tensor | int, shape: tuple[int, ...]
) -> torch.Tensor:
    """Random integers in [low, high] with a random sign; low and high may differ by column."""
    device = generator.device
    unit = torch.rand(shape, generator=generator, device=device, dtype=torch.float64)
    sign = torch.randint(0, 2, shape, generator=generator, device=device) * 2 - 1
    return torch.floor(low + unit * (high - low + 1)) * sign


def _largest(variant: Variant) -> int:
    """Integers up to here keep any sum of head_dim products of two of them below 2^24; bf16 holds no more than 255."""
    return min(255, math.isqrt(2**23 // variant.head_dim))


def _integer_family(generator: torch.Generator, variant: Variant, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Products of 14 bits and more: rounded to fp16, bf16 or TF32 they change, in fp32 they and their sums do not."""
    q_shape, k_shape = (variant.group, variant.head_dim), (seq_len, variant.head_dim)
    if variant.dtype != torch.float32:
        largest = _largest(variant)
        q, k = (_integers(generator, largest // 2, largest, shape) for shape in (q_shape, k_shape))
        return q, k
    # TF32 keeps 11 bits of an operand: on even columns q has 13 and k has 2, on odd ones the reverse.
    even = torch.arange(variant.head_dim, device=generator.device) % 2 == 0
    low, high = torch.where(even, 4097, 1), torch.where(even, 8191, 2)
    swapped_low, swapped_high = torch.where(even, 1, 4097), torch.where(even, 2, 8191)
    return _integers(generator, low, high, q_shape), _integers(generator, swapped_low, swapped_high, k_shape)


def _random_family(generator: torch.Generator, variant: Variant, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    shapes = ((variant.group, variant.head_dim), (seq_len, variant.head_dim))
    q, k = (torch.randn(shape, generator=generator, device=generator.device) for shape in shapes)
    return q, k


def _one_hot_family(generator: torch.Generator, variant: Variant, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Query row r picks one column, and every key element tells its position and column: permutations show."""
    device = generator.device
    rows = torch.arange(variant.group, device=device)
    columns = torch.arange(variant.head_dim, device=device)
    q = (columns[None, :] == (rows * 7 + 3)[:, None] % variant.head_dim).float()
    positions = torch.arange(seq_len, device=device)
    return q, ((positions[:, None] * 31 + columns[None, :] * 17) % 251 - 125).float()


def _cancelling_family(generator: torch.Generator, variant: Variant, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Large products that cancel in threes, x*a - x*b - x*(a-b), and leave a small number that tells the position.

    For fp16 the first three exceed 65504, the largest fp16. The result is exact in every output dtype, so that a
    product that was rounded cannot hide under the rounding of a 16-bit output.
    """
    device = generator.device
    largest = _largest(variant)
    q = torch.zeros(variant.group, variant.head_dim, dtype=torch.float64, device=device)
    k = torch.zeros(seq_len, variant.head_dim, dtype=torch.float64, device=device)
    threes = (variant.head_dim - 1) // 3
    if threes:
        a = _integers(generator, largest // 2 + 1, largest, (variant.group, threes)).abs()
        b = _integers(generator, 1, largest // 2, (variant.group, threes)).abs()
        x = _integers(generator, largest // 2, largest, (seq_len, threes))
        if variant.dtype == torch.float16:
            a[:, 0], b[:, 0], x[:, 0] = 303, 17, 301
        q[:, : 3 * threes] = torch.stack((a, -b, b - a), dim=-1).flatten(1)
        k[:, : 3 * threes] = x.repeat_interleave(3, dim=1)
    q[:, -1] = 1
    k[:, -1] = torch.arange(seq_len, device=device) % 251 - 125
    return q, k


_FAMILY = {
    "integers": _integer_family,
    "random": _random_family,
    "one-hot": _one_hot_family,
    "cancelling": _cancelling_family,
}
