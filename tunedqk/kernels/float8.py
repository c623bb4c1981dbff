"""Keys to the 16 bits that tl.dot takes; float8_e4m3fn without what that costs where each byte is an element.

Those are loaded as pairs, 16 bits each: so they reach the operands of the matrix units as 16-bit keys do, and the
even and the odd columns of a tile are multiplied with those of the queries. On an H200, GQA 4, of the read floor:
0.62 with a byte an element, 0.66 with pairs that Triton converts, 0.87 as here (one experiment; a call reaches 0.76).
"""

import triton
import triton.language as tl

# Both halves of a register at once. The magnitude is shifted to where the wider format has its exponent and mantissa,
# which divides by a power of two that the multiplication takes back; so subnormals come out right. What is larger than
# the largest number is NaN: where it is, -1 is added, bit by bit, which is NaN as well.
_ASM = """{{
    .reg .b32 x, t, nan, largest, factor;
    mov.b32 largest, {largest};
    mov.b32 factor, {factor};
    and.b32 t, $2, 0x7f007f00;
    shr.u32 t, t, {shift};
    lop3.b32 x, $2, 0x80008000, t, 0xea;
    set.gt.u32.{type}x2 nan, t, largest;
    fma.rn.{type}x2 $1, x, factor, nan;
    shl.b32 x, $2, 8;
    and.b32 t, x, 0x7f007f00;
    shr.u32 t, t, {shift};
    lop3.b32 x, x, 0x80008000, t, 0xea;
    set.gt.u32.{type}x2 nan, t, largest;
    fma.rn.{type}x2 $0, x, factor, nan;
}}"""
_TO_BF16 = tl.constexpr(_ASM.format(type="bf16", shift=4, largest="0x07e007e0", factor="0x7b807b80"))  # 2^120
_TO_FP16 = tl.constexpr(_ASM.format(type="f16", shift=1, largest="0x3f003f00", factor="0x5c005c00"))  # 2^8


@triton.jit
def to_operand(keys, dtype: tl.constexpr):
    """Keys in the dtype of tl.dot's operands."""
    if keys.dtype == tl.float8e5:
        keys = keys.to(tl.float16)  # on the direct way to bf16, Triton 3.6 makes numbers of Inf and NaN
    return keys.to(dtype)


@triton.jit
def unpack_e4m3(pairs, dtype: tl.constexpr):
    """The first and the second of each pair (int16) of float8_e4m3fn, as bf16 or fp16. Needs sm_90."""
    if dtype == tl.bfloat16:
        first, second = tl.inline_asm_elementwise(
            _TO_BF16, "=r,=r,r", [pairs], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        first, second = tl.inline_asm_elementwise(
            _TO_FP16, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    return first, second
