"""The fast kernel with planted faults, and binaries of such kernels that the product's Validator and Door can judge.

A mutant is the source of `kernels/vectorized.py` with one expression replaced, so mutants follow the product; an
expression that no longer occurs is an error, not a mutant that silently equals the product.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import itertools
import sys
import tempfile
import types
from pathlib import Path
from typing import NamedTuple

import torch

from tunedqk import launch, validate
from tunedqk.config import KernelConfig
from tunedqk.device import interpreting
from tunedqk.kernels import vectorized
from tunedqk.launch import Variant

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16

_folder = tempfile.TemporaryDirectory(prefix="tunedqk-mutants-")  # removed with the process
_numbers = itertools.count()


def mutated_source(edits):
    """The fast kernel's source with every occurrence of each old text replaced by the new one."""
    source = inspect.getsource(vectorized)
    for old, new in edits:
        assert old in source, f"the fast kernel no longer contains {old!r}"
        source = source.replace(old, new)
    return source


@functools.cache
def kernel_of(edits=()):
    """The kernel of the mutated source, from a module of its own; without edits an unchanged copy."""
    name = f"tunedqk_mutant_{next(_numbers)}"
    path = Path(_folder.name, f"{name}.py")
    path.write_text(mutated_source(edits), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where inspect and triton look the source up
    spec.loader.exec_module(module)
    return module.qk_score_kernel


def _with_kernel(method, kernel):
    """A method of launch.py, over globals that hold another kernel: safe where others build binaries meanwhile."""
    namespace = {**vars(launch), "qk_score_kernel": kernel}
    return types.FunctionType(method.__code__, namespace, method.__name__, method.__defaults__, method.__closure__)


@functools.cache
def binary_class(edits):
    """The class of a mutant's binaries."""
    base = launch.InterpretedBinary if interpreting() else launch.CompiledBinary
    methods = {name: _with_kernel(vars(base)[name], kernel_of(edits)) for name in ("__init__", "launch")}
    return type("MutantBinary", (base,), methods)


def build_mutant(variant, config, edits=()):
    """The binary of a mutated kernel: compiled on a GPU, else interpreted; without edits, of an unchanged copy."""
    binary = binary_class(edits)(variant, config)
    if interpreting():  # there a hash covers the product's source alone
        binary.hash = hashlib.sha256(f"{binary.hash} {edits}".encode()).hexdigest()
    return binary


def builder(edits, is_faulty):
    """A stand-in for `launch.build` that builds a mutant where is_faulty(variant, config)."""

    def build(device, variant, config):
        if is_faulty(variant, config):
            return build_mutant(variant, config, edits)
        return launch.build(device, variant, config)

    return build


# The seed's form: q as (1, D), positions as (C, 1), columns as (1, D), each by a view that may reorder elements.
_VIEWS = """@triton.jit
def _column(x):
    return tl.view(x, (x.shape[0], 1))


@triton.jit
def _row(x):
    return tl.view(x, (1, x.shape[0]))


"""
TL_VIEW = (
    ("(pos < left)[:, None] & (offs_d < HEAD_DIM)[None, :]", "_column(pos < left) & _row(offs_d < HEAD_DIM)"),
    (
        "k_base + pos.to(tl.int64)[:, None] * stride_kl + offs_d[None, :]",
        "k_base + _column(pos.to(tl.int64)) * stride_kl + _row(offs_d)",
    ),
    ("q.to(tl.float32)[None, :]", "_row(q.to(tl.float32))"),
    ("@triton.jit\ndef _load_keys(", f"{_VIEWS}@triton.jit\ndef _load_keys("),
)

SMALL = KernelConfig(16, 16, num_warps=4)
LOOP = KernelConfig(32, 16, num_warps=4)
PIPELINED = KernelConfig(64, 16, num_warps=4, num_stages=2)


def variant_of(dtype=FP32, out_dtype=None, head_dim=16, group=1, *, aligned=True):
    """A variant; the output has the keys' dtype unless it is given."""
    return Variant(head_dim, group, dtype, out_dtype or dtype, aligned)


BY_SUM, BY_DOT = variant_of(group=2), variant_of(BF16, group=3)


class Mutant(NamedTuple):
    """A fault: edits of the source, the verdict that fits, and what it is shown on.

    gpu: only a GPU can show it. far: it writes to where, on a CPU, somebody else's memory would be. race: chance may
    give the same wrong result at each launch, so that the verdict is WRONG_RESULT.
    """

    name: str
    edits: tuple[tuple[str, str], ...]
    verdict: str = validate.WRONG_RESULT
    variant: Variant = BY_SUM
    config: KernelConfig = SMALL
    gpu: bool = False
    far: bool = False
    race: bool = False

    @property
    def verdicts(self):
        """Those that fit."""
        return {self.verdict, validate.WRONG_RESULT} if self.race else {self.verdict}


def _mutant(name, old, new, verdict=validate.WRONG_RESULT, **fields):
    return Mutant(name, ((old, new),), verdict, **fields)


OUT_LEFT = "tl.minimum(out_len - start, CHUNK_SIZE)"
PRODUCT = "keys.to(tl.float32) * q.to(tl.float32)[None, :]"
DOT = 'tl.dot(keys.to(q.dtype), q, input_precision="ieee")'
KEY_PTRS = "k_base + pos.to(tl.int64)[:, None] * stride_kl"
LOADED_KEYS = "return tl.load(ptrs, mask=mask, other=0.0, eviction_policy=LOAD_HINT)"
SUM_MASK = "mask = (pos < out_left) & (row < rows_left)"
DOT_MASK = "mask = (pos < out_left)[:, None] & (rows < rows_left)[None, :]"
SUM_SCORES = "_to_output(scores * scale, fill, pos < left,"
DOT_SCORES = "_to_output(scores * scale, fill, valid,"
TILE_BY_DOT = "q, tail_q, k_base, out_base, scale, fill, tile"
Q_ROW = "tl.minimum(row, rows_left - 1) * stride_qh"
OUT_BASE = "out_base = out_ptr + batch"
FP16_PRODUCTS = ((PRODUCT, f"({PRODUCT}).to(tl.float16).to(tl.float32)"),)
BF16_PRODUCTS = ((PRODUCT, f"({PRODUCT}).to(tl.bfloat16).to(tl.float32)"),)
# Nanoseconds, of which the lowest bits always are 0.
CLOCK = "((tl.extra.cuda.globaltimer() >> 10) & 7)"

BRANCH = "    if DOT_DTYPE is None:\n        for"
OTHERS_PLACE = "out_ptr + batch // 8 * stride_ob + q_head * stride_oh + start * stride_ol"

LAST_POSITION_SKIPPED = ((SUM_MASK, SUM_MASK.replace("out_left", "out_left - 1")),)

MUTANTS = [
    # Something is left out.
    _mutant("last chunk skipped", OUT_LEFT, f"tl.where(chunk == chunks - 1, 0, {OUT_LEFT})"),
    Mutant("last position skipped", LAST_POSITION_SKIPPED),
    _mutant("last position skipped by dot", DOT_MASK, DOT_MASK.replace("out_left", "out_left - 1"), variant=BY_DOT),
    _mutant("second tile skipped", "tl.range(0, CHUNK_SIZE,", "tl.range(0, TILE_SIZE,", config=LOOP),
    _mutant("last row skipped", SUM_MASK, SUM_MASK.replace("rows_left", "rows_left - 1")),
    _mutant("last column skipped", "(offs_d < HEAD_DIM)[None, :]", "(offs_d < HEAD_DIM - 1)[None, :]"),
    _mutant("tail columns skipped", "if TAIL_D:\n            scores +=", "if False:\n            scores +=",
            variant=variant_of(head_dim=260)),
    _mutant("head_dim unmasked", "(offs_d < HEAD_DIM)[None, :]", "(offs_d >= 0)[None, :]",
            variant=variant_of(head_dim=13)),
    _mutant("scale lost", SUM_SCORES, SUM_SCORES.replace(" * scale", "")),
    _mutant("scale lost by dot", DOT_SCORES, DOT_SCORES.replace(" * scale", ""), variant=BY_DOT),
    _mutant("scale twice", SUM_SCORES, SUM_SCORES.replace(" * scale", " * scale * scale")),
    # Something else is scored.
    _mutant("one position too many", "pos < left", "pos <= left"),
    _mutant("one position too many by dot", "(pos < left)[:, None]", "(pos <= left)[:, None]", variant=BY_DOT),
    _mutant("head modulo kv_heads", "k_base += kv_head *", "k_base += q_head % kv_heads *"),
    _mutant("first head of all", "k_base += kv_head *", "k_base += 0 *"),
    _mutant("heads in turn", "+ q_head * stride_qh\n", "+ kv_head * stride_qh\n"),
    _mutant("first batch element of all", "k_ptr + batch *", "k_ptr + 0 *", gpu=True),
    _mutant("rows swapped", Q_ROW, Q_ROW.replace("row,", "row ^ 1,")),
    _mutant("rows swapped by dot", "rows[None, :] * stride_qh", "(rows ^ 1)[None, :] * stride_qh",
            variant=variant_of(BF16, group=2)),
    _mutant("positions swapped", KEY_PTRS, KEY_PTRS.replace("pos.to", "tl.where((pos | 1) < left, pos ^ 1, pos).to")),
    _mutant("columns swapped", "q_base + offs_d,", "q_base + (offs_d ^ 1),"),
    _mutant("tail columns from the start", "tail_d = BLOCK_D + tl.arange", "tail_d = tl.arange",
            variant=variant_of(head_dim=260)),
    _mutant("strides rounded down", "    if ALIGNED:", "    if True:", variant=variant_of(aligned=False)),
    _mutant("wrong at two stages", TILE_BY_DOT, TILE_BY_DOT.replace("scale", "scale if STAGES == 1 else 2 * scale"),
            variant=BY_DOT, config=PIPELINED),
    _mutant("program ids wrap", "tl.program_id(0)", "(tl.program_id(0) % 4096)", gpu=True),
    # Precision.
    Mutant("fp32 products in fp16", FP16_PRODUCTS, variant=variant_of(FP32)),
    Mutant("fp16 products in fp16", FP16_PRODUCTS, variant=variant_of(FP16)),
    Mutant("bf16 products in fp16, out bf16", FP16_PRODUCTS, variant=variant_of(BF16)),
    Mutant("bf16 products in bf16, out bf16", BF16_PRODUCTS, variant=variant_of(BF16)),
    Mutant("bf16 products in bf16, out fp32", BF16_PRODUCTS, variant=variant_of(BF16, FP32)),
    _mutant("bf16 sum in fp16", f"tl.sum({PRODUCT}, axis=1)",
            f"tl.sum(({PRODUCT}).to(tl.float16), axis=1).to(tl.float32)", variant=variant_of(BF16)),
    _mutant("bf16 scores in bf16 before scale", DOT, f"{DOT}.to(tl.bfloat16).to(tl.float32)", variant=BY_DOT),
    _mutant("keys in fp8", PRODUCT, PRODUCT.replace("keys.", "keys.to(tl.float8e5)."), variant=variant_of(BF16)),
    _mutant("fp16 products saturate", PRODUCT, f"tl.minimum(tl.maximum({PRODUCT}, -65504.0), 65504.0)",
            variant=variant_of(FP16)),
    # Within any tolerance, but not where every sum is exact.
    _mutant("last bit off", SUM_SCORES, SUM_SCORES.replace("scale,", "scale * (1 + 1e-7),")),
    _mutant("rounded twice", "scores.to(element_ty)", "scores.to(tl.float16).to(element_ty)", variant=variant_of(FP32)),
    _mutant("fp16 by way of bf16", "scores.to(element_ty)", "scores.to(tl.bfloat16).to(tl.float32).to(element_ty)",
            variant=variant_of(FP16)),
    _mutant("TF32", 'input_precision="ieee"', 'input_precision="tf32"', variant=variant_of(group=16), gpu=True),
    # The fill, and what is written where.
    _mutant("fill missing", "tl.where(valid, scores, fill)", "scores"),
    _mutant("fill zero", "tl.where(valid, scores, fill)", "tl.where(valid, scores, 0.0)"),
    _mutant("tail not written", OUT_LEFT, "tl.minimum(seq_len - start, CHUNK_SIZE)"),
    _mutant("store mask missing", SUM_MASK, SUM_MASK.replace("out_left", "(1 << 20)"), validate.OUT_OF_BOUNDS),
    _mutant("store mask missing by dot", DOT_MASK, DOT_MASK.replace("out_left", "(1 << 20)"), validate.OUT_OF_BOUNDS,
            variant=BY_DOT),
    _mutant("one written too many", SUM_MASK, SUM_MASK.replace("pos <", "pos <="), validate.OUT_OF_BOUNDS),
    _mutant("one row written too many", DOT_MASK, DOT_MASK.replace("rows <", "rows <="), validate.OUT_OF_BOUNDS,
            variant=BY_DOT, far=True),
    _mutant("written before out", OUT_BASE, "out_base = out_ptr - 1 + batch", validate.OUT_OF_BOUNDS),
    # Inputs.
    _mutant("keys overwritten", LOADED_KEYS, "keys = tl.load(ptrs, mask=mask, other=0.0)\n"
            "    tl.store(ptrs, -keys, mask=mask)\n    return keys", validate.INPUT_CHANGED),
    _mutant("written behind a query", "    # Converted before", "    tl.store(q_base + HEAD_DIM, 0.0)\n    # Before",
            validate.INPUT_CHANGED),
    # Races.
    _mutant("last bit by the clock", DOT_SCORES, DOT_SCORES.replace("* scale", f"* scale * (1 + {CLOCK} * 1e-7)"),
            validate.NOT_DETERMINISTIC, variant=variant_of(BF16, FP32, group=3), gpu=True),
    _mutant("scores by the clock", SUM_SCORES, SUM_SCORES.replace("scores *", f"(scores + {CLOCK}) *"),
            validate.NOT_DETERMINISTIC, gpu=True),
    _mutant("KV heads race for one place", "+ q_head * stride_oh", "+ row_block * ROWS * stride_oh",
            validate.NOT_DETERMINISTIC, gpu=True, race=True),
    # Right wherever the batch element that is cleared has yet to be written.
    _mutant("another program's output cleared", BRANCH, f"    tl.store({OTHERS_PLACE}, 0.0)\n{BRANCH}",
            validate.NOT_DETERMINISTIC, gpu=True, race=True),
]  # fmt: skip


class Offset(NamedTuple):
    """A product of an index and a stride in the kernel, and which trials of offsets.py it shows in alone."""

    name: str
    product: str
    places: tuple[str, ...]
    variant: Variant = BY_SUM


OFFSETS = [
    Offset("position of a key", "pos.to(tl.int64)[:, None] * stride_kl", ("positions, inputs",)),
    Offset("position of a key by dot", "pos.to(tl.int64)[:, None] * stride_kl", ("positions, inputs",), BY_DOT),
    Offset("position in out", "pos.to(tl.int64) * stride_ol", ("positions, output",)),
    Offset("position in out by dot", "pos.to(tl.int64)[:, None] * stride_ol", ("positions, output",), BY_DOT),
    Offset("chunk's keys", "start * stride_kl", ("chunks, inputs",)),
    Offset("chunk in out", "start * stride_ol", ("chunks, output",)),
    Offset("row of q", Q_ROW, ("rows, inputs",)),
    Offset("row of q by dot", "rows[None, :] * stride_qh", ("rows, inputs",), BY_DOT),
    Offset("row of out", "row * stride_oh", ("rows, output",)),
    Offset("row of out by dot", "rows[None, :] * stride_oh", ("rows, output",), BY_DOT),
    Offset("head of q", "q_head * stride_qh", ("heads, inputs",)),
    Offset("head of k", "kv_head * _visible_stride(stride_kh, element_ty, ALIGNED)", ("heads, inputs",)),
    Offset("head of out", "q_head * stride_oh", ("heads, output",)),
    Offset("batch of q", "batch * _visible_stride(stride_qb, element_ty, ALIGNED)", ("batch, inputs",)),
    Offset("batch of k", "batch * _visible_stride(stride_kb, element_ty, ALIGNED)", ("batch, inputs",)),
    Offset("batch of out", "batch * stride_ob", ("batch, output",)),
    Offset("strides of q and k", "stride // lanes * lanes", ("batch, inputs", "rows, inputs")),
    Offset("strides of q and k, one row", "stride // lanes * lanes", ("batch, inputs", "heads, inputs"), variant_of()),
]


def offset_mutant(offset, bits):
    """The kernel with that product in integers of so many bits."""
    narrow = f"({offset.product}).to(tl.int{bits})"
    return _mutant(f"{offset.name} in int{bits}", offset.product, narrow, variant=offset.variant, gpu=True)


MUTANTS += [offset_mutant(offset, 32) for offset in OFFSETS]

# Right at the lengths around a chunk; wrong where a cache has more than 16 chunks.
CHUNKS_WRAP = (("start = chunk * CHUNK_SIZE", "start = chunk % 16 * CHUNK_SIZE"),)

# No mutants to judge: these take the process down.
FAR_AWAY = ((OUT_BASE, OUT_BASE.replace("batch", "(1 << 44) + batch")),)
START = "    start = chunk * CHUNK_SIZE\n"
FOR_EVER = "    while tl.atomic_add(out_ptr.to(tl.pointer_type(tl.int32)), 0) != 123456789:\n        scale += 1\n"
ENDLESS = ((START, f"{FOR_EVER}{START}"),)
