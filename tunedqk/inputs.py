"""The inputs that binaries are judged on, with the loop kernel's answers. See validate.py for what is made of them."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from tunedqk.arrangement import LIMITS, Numbers, arrange, memory
from tunedqk.kernels.loop import loop_scores
from tunedqk.tensors import Tensors
from tunedqk.variant import Variant

if TYPE_CHECKING:
    from collections.abc import Iterator

SCALE = 0.37  # not a power of two: a scale that is lost, or applied twice, shows
FILL = -7.25
FAMILIES = ("integers", "random", "one-hot", "cancelling")
SEED = 20260
# Programs that share a request where lengths differ, one launch after the other: each goes through every chunk, every
# other one, or a call's part of them.
AS_CALLED = 0
WALKERS = (1, 2, AS_CALLED)


class Case(NamedTuple):
    """A call to judge a binary on.

    expected, magnitude: fp32 [batch, q_heads, (q_len,) seq_len], what the loop kernel makes of it: magnitude is
    |scale * k_scale| * sum|q||k|, and -1 where a position is hidden. exact: bool, where the result must be equal to
    the bit. pristine: copies of the inputs' whole memory to compare with.
    """

    tensors: Tensors
    expected: torch.Tensor
    magnitude: torch.Tensor
    exact: torch.Tensor
    pristine: tuple[torch.Tensor, ...] = ()

    @property
    def seq_len(self) -> int:
        """Number of positions."""
        return self.expected.shape[-1]

    def changed(self) -> torch.Tensor:
        """Whether the memory of the inputs, or what surrounds them, is no longer what it was."""
        pairs = zip(self.tensors.given.values(), self.pristine, strict=True)
        return torch.stack([(memory(now) != before).any() for now, before in pairs]).any()


@dataclasses.dataclass
class Inputs:
    """Numbers that cases are made of. exact: bool [batch, q_heads, q_len, seq_len].

    plain: what the loop kernel makes of them where nothing is hidden, paged or scaled; else each case asks it anew.
    """

    variant: Variant
    numbers: Numbers
    exact: torch.Tensor
    plain: tuple[torch.Tensor, torch.Tensor] | None

    @property
    def seq_len(self) -> int:
        """Number of positions."""
        return self.numbers.k.shape[1]

    def case(self, seq_len: int, kv_heads: int | None = None, first: int = 0) -> Case:
        """A call on the first positions and KV heads, with NaN wherever no key or query lies.

        first: which of arrangement.LIMITS is the first request's. At odd lengths it has a query less, where its
        binaries take that: then a block of rows is not full.
        """
        variant, queries = self.variant, queries_of(self.variant)
        if variant.several and seq_len % 2 and 2 * (queries - 1) * variant.group > variant.rows:
            queries -= 1
        numbers = self.numbers.part(seq_len, kv_heads, queries)
        tensors = arrange(variant, numbers, first=first)
        heads = numbers.q.shape[2]
        exact = self._of_rows(self.exact[:, :heads, :queries, :seq_len])
        if self.plain is not None:
            expected, magnitude = (self._of_rows(x[:, :heads, :, :seq_len]) for x in self.plain)
        else:
            expected = torch.full(exact.shape, math.nan, dtype=torch.float32, device=exact.device)
            fill = FILL if variant.fill else None
            magnitude = loop_scores(tensors, expected, SCALE, causal=variant.causal, fill=fill)
        pristine = tuple(memory(x).clone() for x in tensors.given.values())
        return Case(tensors, expected, magnitude, exact, pristine)

    def _of_rows(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.variant.several else x[:, :, 0]


class Trial(NamedTuple):
    """A call, and a launch for each number of walkers."""

    case: Case
    walkers: tuple[int, ...]


def longest(variant: Variant, chunk: int) -> int:
    """The largest length around a chunk: some request sees a position in a third chunk, and on a second page. Odd."""
    beyond: int = max(2 * chunk, variant.page_size)
    return beyond + 3 + beyond % 2


def trials(judging: list[Inputs], chunk: int) -> Iterator[Trial]:
    """What a binary with such chunks is judged on, at lengths around its chunk."""
    variant, device = judging[0].variant, judging[0].numbers.k.device
    lengths = (longest(variant, chunk), chunk + 1, chunk, chunk - 1, 1)
    if device.type == "cuda":
        for seq_len in lengths:
            yield Trial(judging[0].case(seq_len), WALKERS)
        return
    # The interpreter takes tens of milliseconds a program, and runs one at a time: all heads twice, then one head, and
    # one request at a time, so that each of the limits has a length.
    for inputs, first, walkers in zip(judging, (0, 2), ((1, 2), (1,)), strict=True):
        yield Trial(inputs.case(lengths[0], first=first), walkers)
    one_head = functools.partial(judging[0].case, kv_heads=1)
    yield Trial(one_head(chunk + 1, first=3), (1,))
    yield Trial(one_head(chunk, first=1), (1, AS_CALLED))
    yield Trial(one_head(chunk - 1, first=5), (1,))
    yield Trial(one_head(1, first=1), (1, 2))
    if variant.ragged:
        yield Trial(one_head(chunk, first=4), (1,))


def judging_inputs(device: torch.device, variant: Variant, seq_len: int) -> list[Inputs]:
    """Every family of inputs, spread over batch elements and heads so that none looks like its neighbour.

    A GPU gets one large set. The interpreter, which takes milliseconds a program, gets two small ones.
    """
    if device.type == "cuda":
        batch = len(LIMITS) if variant.ragged else len(FAMILIES)
        return [_make(device, variant, seq_len, batch, kv_heads=3, families=FAMILIES)]
    return [
        _make(device, variant, seq_len, batch=1, kv_heads=2, families=pair) for pair in (FAMILIES[:2], FAMILIES[2:])
    ]


def long_inputs(device: torch.device, variant: Variant, seq_len: int) -> Inputs:
    """One batch element and KV head of random numbers, for a comparison at a bucket's length."""
    return _make(device, variant, seq_len, batch=1, kv_heads=1, families=("random",))


def integer_inputs(device: torch.device, variant: Variant, seq_len: int, batch: int, kv_heads: int) -> Inputs:
    """Inputs whose results must equal the loop kernel's to the bit, in every output dtype."""
    return _make(device, variant, seq_len, batch, kv_heads, families=("integers",))


def queries_of(variant: Variant) -> int:
    """The most queries that the variant's binaries take."""
    return variant.rows // variant.group if variant.several else 1


def _make(
    device: torch.device, variant: Variant, seq_len: int, batch: int, kv_heads: int, families: tuple[str, ...]
) -> Inputs:
    group, head_dim, q_len = variant.group, variant.head_dim, queries_of(variant)
    generator = torch.Generator(device).manual_seed(SEED)
    q = torch.empty(batch, q_len, kv_heads * group, head_dim, dtype=variant.dtype, device=device)
    k = torch.empty(batch, seq_len, kv_heads, head_dim, dtype=variant.k_dtype, device=device)
    k_scale = torch.rand(batch, seq_len, kv_heads, generator=generator, device=device) + 0.5
    exact = torch.zeros(batch, kv_heads * group, q_len, seq_len, dtype=torch.bool, device=device)
    for b in range(batch):
        for h in range(kv_heads):
            family = families[(b + h) % len(families)]
            heads = slice(h * group, (h + 1) * group)
            q_part, k_part = _FAMILY[family](generator, variant, seq_len)  # [rows, head_dim], [seq_len, head_dim]
            q[b, :, heads] = q_part.view(q_len, group, head_dim).to(variant.dtype)
            k[b, :, h] = k_part.to(variant.k_dtype)
            exact[b, heads] = family != "random"
    plain = None
    if variant == Variant(*variant[:5]):  # nothing but the sizes and dtypes of q, k and out
        scores = torch.empty(exact.shape, dtype=torch.float32, device=device)
        plain = scores, loop_scores(Tensors(q, k), scores, SCALE)
    return Inputs(variant, Numbers(q, k, k_scale), exact, plain)


def _rows(variant: Variant) -> int:
    return variant.group * queries_of(variant)


def _integers(
    generator: torch.Generator, low: torch.Tensor | int, high: torch.Tensor | int, shape: tuple[int, ...]
) -> torch.Tensor:
    """Random integers in [low, high] with a random sign; low and high may differ by column."""
    device = generator.device
    unit = torch.rand(shape, generator=generator, device=device, dtype=torch.float64)
    sign = torch.randint(0, 2, shape, generator=generator, device=device) * 2 - 1
    return torch.floor(low + unit * (high - low + 1)) * sign


# Integers up to here are all that the significand of a float8 holds, implicit bit included.
_LARGEST_FP8 = {torch.float8_e4m3fn: 15, torch.float8_e5m2: 7}


def _largest(variant: Variant) -> tuple[int, int]:
    """Of q and of k: integers up to here keep any sum of head_dim products below 2^24; bf16 holds no more than 255.

    float32 queries have 13 bits beside float8 keys, so that TF32, which keeps 11, would show.
    """
    largest = min(255, math.isqrt(2**23 // variant.head_dim))
    of_k = min(largest, _LARGEST_FP8.get(variant.k_dtype, largest))
    if variant.fp8 and variant.dtype == torch.float32:
        return min(8191, 2**23 // (variant.head_dim * of_k)), of_k
    return largest, of_k


def _integer_family(generator: torch.Generator, variant: Variant, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Products of 14 bits and more: rounded to fp16, bf16 or TF32 they change, in fp32 they and their sums do not."""
    q_shape, k_shape = (_rows(variant), variant.head_dim), (seq_len, variant.head_dim)
    if variant.k_dtype != torch.float32:
        q, k = (
            _integers(generator, largest // 2, largest, shape)
            for largest, shape in zip(_largest(variant), (q_shape, k_shape), strict=True)
        )
        return q, k
    # TF32 keeps 11 bits of an operand: on even columns q has 13 and k has 2, on odd ones the reverse.
    even = torch.arange(variant.head_dim, device=generator.device) % 2 == 0
    low, high = torch.where(even, 4097, 1), torch.where(even, 8191, 2)
    swapped_low, swapped_high = torch.where(even, 1, 4097), torch.where(even, 2, 8191)
    return _integers(generator, low, high, q_shape), _integers(generator, swapped_low, swapped_high, k_shape)


def _random_family(generator: torch.Generator, variant: Variant, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Anything, and now and then a key that is not finite: it shows in that position's scores, and in no other.

    Not for the interpreter's float8, whose NaN is a number there, and another one by way of fp16.
    """
    shapes = ((_rows(variant), variant.head_dim), (seq_len, variant.head_dim))
    q, k = (torch.randn(shape, generator=generator, device=generator.device) for shape in shapes)
    not_finite = () if variant.fp8 and k.device.type == "cpu" else ((5, math.nan), (9, math.inf))
    for first, value in not_finite:
        positions = torch.arange(first, seq_len, 13, device=k.device)
        k[positions, positions % variant.head_dim] = value
    return q, k


def _one_hot_family(generator: torch.Generator, variant: Variant, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Query row r picks one column, and every key element tells its position and column: permutations show."""
    device = generator.device
    rows = torch.arange(_rows(variant), device=device)
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
    largest, largest_key = _largest(variant)
    q = torch.zeros(_rows(variant), variant.head_dim, dtype=torch.float64, device=device)
    k = torch.zeros(seq_len, variant.head_dim, dtype=torch.float64, device=device)
    threes = (variant.head_dim - 1) // 3
    if threes:
        a = _integers(generator, largest // 2 + 1, largest, (_rows(variant), threes)).abs()
        b = _integers(generator, 1, largest // 2, (_rows(variant), threes)).abs()
        x = _integers(generator, largest_key // 2, largest_key, (seq_len, threes))
        if variant.k_dtype == torch.float16:
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
