"""The fast kernel with planted faults, and binaries of such kernels that the product's Validator and Door can judge.

A mutant is the source of the fast kernel's modules, as one module, with one expression replaced, so mutants follow the
product; an expression that no longer occurs is an error, not a mutant that silently equals the product.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import itertools
import re
import sys
import tempfile
import types
from pathlib import Path
from typing import NamedTuple

import torch

from tunedqk import launch, validate
from tunedqk.config import KernelConfig
from tunedqk.device import interpreting
from tunedqk.kernels import float8, parts, vectorized
from tunedqk.variant import Variant

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INT32, INT64 = torch.int32, torch.int64

_folder = tempfile.TemporaryDirectory(prefix="tunedqk-mutants-")  # removed with the process
_numbers = itertools.count()
_IMPORTS = re.compile(r"^from tunedqk\.kernels\.\w+ import (\([^)]*\))?.*\n", re.MULTILINE)


def mutated_source(edits):
    """The fast kernel's source with every occurrence of each old text replaced by the new one."""
    source = "\n\n".join(_IMPORTS.sub("", inspect.getsource(module)) for module in (float8, parts, vectorized))
    assert "from tunedqk" not in source
    for old, new in edits:
        assert old != new, f"{old!r} is no edit"
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
    ("inside[:, None] & (offs_d < form.HEAD_DIM)[None, :]", "_column(inside) & _row(offs_d < form.HEAD_DIM)"),
    ("base + offsets[:, None] + offs_d[None, :]", "base + _column(offsets) + _row(offs_d)"),
    ("q.to(tl.float32)[None, :]", "_row(q.to(tl.float32))"),
    ("@triton.jit\ndef load_keys(", f"{_VIEWS}@triton.jit\ndef load_keys("),
)

SMALL = KernelConfig(16, 16, num_warps=4)
LOOP = KernelConfig(32, 16, num_warps=4)
PIPELINED = KernelConfig(64, 16, num_warps=4, num_stages=2)


def variant_of(dtype=FP32, out_dtype=None, head_dim=16, group=1, *, aligned=True, **others):
    """A variant; the output has the queries' dtype unless it is given."""
    return Variant(head_dim, group, dtype, out_dtype or dtype, aligned, **others)


BY_SUM, BY_DOT = variant_of(group=2), variant_of(BF16, group=3)
TWO_BLOCKS = variant_of(group=20)
RAGGED = variant_of(group=2, seq_lens=INT32, seq_starts=INT32)
RAGGED_BY_DOT = variant_of(BF16, group=3, seq_lens=INT64, seq_starts=INT64)
UNFILLED, UNFILLED_BY_DOT = RAGGED._replace(fill=False), RAGGED_BY_DOT._replace(fill=False)
# Of several queries: rows that are no power of two, and at odd lengths a query less.
SEVERAL, SEVERAL_BY_DOT = variant_of(group=2, rows=8), variant_of(BF16, group=3, rows=16)
SQUARE = variant_of(group=2, rows=4)  # as many queries as heads
QUERY_LENGTHS, QUERY_LENGTHS_BY_DOT = SEVERAL._replace(seq_lens=INT32), SEVERAL_BY_DOT._replace(seq_lens=INT64)
CAUSAL, CAUSAL_BY_DOT = SEVERAL._replace(causal=True), SEVERAL_BY_DOT._replace(causal=True)
CAUSAL_BLOCKS = variant_of(group=5, rows=32, causal=True)
# Pages of several tiles, of parts of one, and of one and a half.
PAGED = variant_of(group=2, seq_lens=INT32, block_table=INT32, page_size=32)
PAGED_STARTS = PAGED._replace(seq_starts=INT32)
PAGED_BY_DOT = variant_of(BF16, group=3, seq_lens=INT64, block_table=INT64, page_size=32)
SMALL_PAGES = variant_of(BF16, group=3, seq_lens=INT64, block_table=INT64, page_size=2)
ODD_PAGES = PAGED._replace(page_size=24)
HEAD_SCALES = variant_of(group=2, fp8=E5M2, k_scale="head")
HEAD_SCALES_BY_DOT = variant_of(BF16, group=3, fp8=E4M3, k_scale="head")
TOKEN_SCALES = variant_of(group=2, fp8=E4M3, k_scale="token")
TOKEN_SCALES_BY_DOT = variant_of(BF16, group=3, fp8=E5M2, k_scale="token")
PAIRS = variant_of(BF16, FP32, head_dim=32, group=4, fp8=E4M3)
PAGED_SCALES = PAGED._replace(fp8=E4M3, k_scale="token")


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


def _mutants(name, old, new, variants, verdict=validate.WRONG_RESULT, **fields):
    """The same fault where tiles are scored by sum, and where they are by dot."""
    by_sum, by_dot = (_mutant(name, old, new, verdict, variant=variant, **fields) for variant in variants)
    return [by_sum, by_dot._replace(name=f"{name} by dot")]


OUT_LEFT = "tl.minimum(out_len - start, form.CHUNK_SIZE)"
PRODUCT = "keys.to(tl.float32) * q.to(tl.float32)[None, :]"
DOT = 'tl.dot(to_operand(tile_keys, columns.dtype), columns, input_precision="ieee")'
KEY_POSITION = "position * cache.stride_l"
TILE_POSITION = "position = (tile + in_tile).to(tl.int64)"
LOADED_KEYS = "return tl.load(ptrs, mask=mask, other=0.0, eviction_policy=form.LOAD_HINT)"
SUM_MASK = "mask = (pos < chunk.out_left) & (query.first + row < query.count)"
DOT_MASK = "mask = (pos < chunk.out_left)[:, None] & (rows < query.count)[None, :]"
SUM_SCALED = "\n        scores *= scale\n"
DOT_SCALED = "\n    scores *= scale\n"
SUM_SEVERAL = "if form.SEVERAL and form.RAGGED:\n            valid ="
DOT_SEVERAL = "if form.SEVERAL and form.RAGGED:\n        valid ="
SUM_HIDDEN = "if not form.FILL:\n            mask ="
DOT_HIDDEN = "if not form.FILL:\n        mask ="
READ_ROW = "tl.minimum(query.first + row, query.count - 1)"
Q_ROW = "row_offsets(read_row, query.stride_h, query.stride_i, form)"
Q_COLUMN = "row_offsets(rows, query.stride_h, query.stride_i, form)"
OUT_ROW = "row_offsets(query.first + row, out.stride_h, out.stride_i, form)"
FILLED_ROW = f"for row in range(rows):\n            row_base = out.base + {OUT_ROW}"
OUT_COLUMN = "row_offsets(rows, out.stride_h, out.stride_i, form)"
OUT_BASE = "out_base = out_ptr + b"
LENGTH = "tl.load(lengths.base + queries * lengths.stride_i).to(tl.int64)"
GIVEN = "tl.maximum(given, 0)"
BEGIN = "tl.maximum(tl.load(seq_starts_ptr + b * stride_sb).to(tl.int64), 0)"
LATER_QUERIES = "lengths.q_len - 1 - queries"
OWN_END = "ends_of(lengths, read_row // form.GROUP, form)"
OWN_ENDS = "ends_of(lengths, own // form.GROUP, form)"
CHUNKS = "chunks = (out_len + form.CHUNK_SIZE - 1) // form.CHUNK_SIZE"
LAST = "(end + form.CHUNK_SIZE - 1) // form.CHUNK_SIZE"
FIRST = "begin // form.CHUNK_SIZE"
FILLED_TO_START = "tl.minimum(first.to(tl.int64) * form.CHUNK_SIZE, out_len)"
FILLED_ROWS = "tl.minimum(query.count - query.first, form.ROWS)"
PAGE = "tl.load(cache.table + position // form.PAGE_SIZE, mask=inside, other=0)"
PAGE_OF_TILE = "tl.load(cache.table + position // form.PAGE_SIZE, mask=seen, other=0)"
PLACE = "in_page = position % form.PAGE_SIZE"
PAGE_PLACE = "in_page.to(tl.int64) * cache.stride_l"
ONE_PAGE = "if form.PAGE_SIZE % form.TILE_SIZE == 0:"
LOADED_SCALES = "tl.load(k_scales.base + offsets, mask=inside, other=0.0)"
FP16_PRODUCTS = ((PRODUCT, f"({PRODUCT}).to(tl.float16).to(tl.float32)"),)
BF16_PRODUCTS = ((PRODUCT, f"({PRODUCT}).to(tl.bfloat16).to(tl.float32)"),)
# Nanoseconds, of which the lowest bits always are 0.
CLOCK = "((tl.extra.cuda.globaltimer() >> 10) & 7)"

START = "    head_scale, k_scales = None, None\n"
OTHERS_PLACE = "out_ptr + b // 8 * stride_ob + kv_head * GROUP * stride_oh + index * CHUNK_SIZE * stride_ol"

LAST_POSITION_SKIPPED = ((SUM_MASK, SUM_MASK.replace("out_left", "out_left - 1")),)

MUTANTS = [
    # Something is left out.
    _mutant("last chunk skipped", OUT_LEFT, f"tl.where(start + form.CHUNK_SIZE >= out_len, 0, {OUT_LEFT})"),
    Mutant("last position skipped", LAST_POSITION_SKIPPED),
    _mutant("last position skipped by dot", DOT_MASK, DOT_MASK.replace("out_left", "out_left - 1"), variant=BY_DOT),
    _mutant("second tile skipped", "tl.range(0, form.CHUNK_SIZE,", "tl.range(0, form.TILE_SIZE,", config=LOOP),
    _mutant("last row skipped", SUM_MASK, SUM_MASK.replace("count", "count - 1")),
    _mutant("last column skipped", "(offs_d < form.HEAD_DIM)[None, :]", "(offs_d < form.HEAD_DIM - 1)[None, :]"),
    _mutant("tail columns skipped", "if form.TAIL_D:\n            scores +=", "if False:\n            scores +=",
            variant=variant_of(head_dim=260)),
    _mutant("head_dim unmasked", "(offs_d < form.HEAD_DIM)[None, :]", "(offs_d >= 0)[None, :]",
            variant=variant_of(head_dim=13)),
    _mutant("scale lost", SUM_SCALED, "\n"),
    _mutant("scale lost by dot", DOT_SCALED, "\n", variant=BY_DOT),
    _mutant("scale twice", SUM_SCALED, SUM_SCALED.replace("scale\n", "scale * scale\n")),
    # Something else is scored.
    *_mutants("one position too many", "pos < chunk.left", "pos <= chunk.left", (BY_SUM, BY_DOT)),
    _mutant("head modulo kv_heads", "k_ptr + kv_head *", "k_ptr + kv_head * GROUP % kv_heads *"),
    _mutant("first head of all", "k_ptr + kv_head *", "k_ptr + 0 *"),
    _mutant("heads in turn", "+ kv_head * GROUP * stride_qh\n", "+ kv_head * stride_qh\n"),
    _mutant("first batch element of all", "b * stride_kb", "0 * stride_kb", gpu=True),
    _mutant("rows swapped", READ_ROW, READ_ROW.replace("row,", "row ^ 1,")),
    _mutant("rows swapped by dot", Q_COLUMN, Q_COLUMN.replace("rows,", "rows ^ 1,"), variant=variant_of(BF16, group=2)),
    _mutant("positions swapped", TILE_POSITION, TILE_POSITION.replace(
            "(tile + in_tile)", "tl.where((tile + in_tile | 1) < chunk.left, tile + in_tile ^ 1, tile + in_tile)")),
    _mutant("chunks of a ragged request read the first", "position += chunk.start", "position += 0", variant=RAGGED),
    _mutant("columns swapped", "q_base + offs_d,", "q_base + (offs_d ^ 1),"),
    _mutant("tail columns from the start", "tail_d = form.BLOCK_D + tl.arange", "tail_d = tl.arange",
            variant=variant_of(head_dim=260)),
    _mutant("strides rounded down", "    if ALIGNED:", "    if True:", variant=variant_of(aligned=False)),
    _mutant("wrong at two stages", DOT_SCALED,
            DOT_SCALED.replace("scale\n", "scale if form.STAGES == 1 else 2 * scale\n"),
            variant=BY_DOT, config=PIPELINED),
    _mutant("program ids wrap", "tl.program_id(0)", "(tl.program_id(0) % 4096)", gpu=True),
    _mutant("first block of rows for all", "row_block * ROWS, count", "row_block * 0, count", variant=TWO_BLOCKS),
    _mutant("rows of q from the first block", "rows = query.first + tl.arange(0, form.ROWS)\n    mask = (offs_d",
            "rows = tl.arange(0, form.ROWS)\n    mask = (offs_d", variant=TWO_BLOCKS),
    # Precision.
    Mutant("fp32 products in fp16", FP16_PRODUCTS, variant=variant_of(FP32)),
    Mutant("fp16 products in fp16", FP16_PRODUCTS, variant=variant_of(FP16)),
    Mutant("bf16 products in fp16, out bf16", FP16_PRODUCTS, variant=variant_of(BF16)),
    Mutant("bf16 products in bf16, out bf16", BF16_PRODUCTS, variant=variant_of(BF16)),
    Mutant("bf16 products in bf16, out fp32", BF16_PRODUCTS, variant=variant_of(BF16, FP32)),
    _mutant("bf16 sum in fp16", f"tl.sum({PRODUCT}, axis=1)",
            f"tl.sum(({PRODUCT}).to(tl.float16), axis=1).to(tl.float32)", variant=variant_of(BF16)),
    _mutant("bf16 scores in bf16 before scale", DOT, f"{DOT}.to(tl.bfloat16).to(tl.float32)", variant=BY_DOT),
    # What is not finite.
    _mutant("NaN taken for 0", PRODUCT, f"tl.where({PRODUCT} == {PRODUCT}, {PRODUCT}, 0.0)"),
    _mutant("NaN taken for 0 by dot", DOT, DOT.replace("tile_keys,", "tl.where(tile_keys == tile_keys, tile_keys, 0),"),
            variant=variant_of(FP16, group=3)),
    _mutant("Inf taken for a number", PRODUCT, f"tl.minimum({PRODUCT}, 3e38)", variant=variant_of(BF16, FP32)),
    _mutant("keys in fp8", PRODUCT, PRODUCT.replace("keys.", "keys.to(tl.float8e5)."), variant=variant_of(BF16)),
    _mutant("fp16 products saturate", PRODUCT, f"tl.minimum(tl.maximum({PRODUCT}, -65504.0), 65504.0)",
            variant=variant_of(FP16)),
    # Within any tolerance, but not where every sum is exact.
    _mutant("last bit off", SUM_SCALED, SUM_SCALED.replace("scale\n", "scale * (1 + 1e-7)\n")),
    _mutant("rounded twice", "scores.to(element_ty)", "scores.to(tl.float16).to(element_ty)", variant=variant_of(FP32)),
    _mutant("fp16 by way of bf16", "scores.to(element_ty)", "scores.to(tl.bfloat16).to(tl.float32).to(element_ty)",
            variant=variant_of(FP16)),
    _mutant("TF32", 'input_precision="ieee"', 'input_precision="tf32"', variant=variant_of(group=16), gpu=True),
    # The fill, and what is written where.
    _mutant("fill missing", "tl.where(valid, scores, fill)", "scores"),
    _mutant("fill zero", "tl.where(valid, scores, fill)", "tl.where(valid, scores, 0.0)"),
    _mutant("tail not written", OUT_LEFT, "tl.minimum(end - start, form.CHUNK_SIZE)"),
    _mutant("store mask missing", SUM_MASK, SUM_MASK.replace("chunk.out_left", "(1 << 20)"), validate.OUT_OF_BOUNDS),
    _mutant("store mask missing by dot", DOT_MASK, DOT_MASK.replace("chunk.out_left", "(1 << 20)"),
            validate.OUT_OF_BOUNDS, variant=BY_DOT),
    _mutant("one written too many", SUM_MASK, SUM_MASK.replace("pos <", "pos <="), validate.OUT_OF_BOUNDS),
    _mutant("one row written too many", DOT_MASK, DOT_MASK.replace("rows <", "rows <="), validate.OUT_OF_BOUNDS,
            variant=BY_DOT, far=True),
    _mutant("written before out", OUT_BASE, "out_base = out_ptr - 1 + b", validate.OUT_OF_BOUNDS),
    # Inputs.
    _mutant("keys overwritten", LOADED_KEYS, "keys = tl.load(ptrs, mask=mask, other=0.0)\n"
            "    tl.store(ptrs, -keys, mask=mask)\n    return keys", validate.INPUT_CHANGED),
    _mutant("written behind a query", "    # Converted before",
            "    tl.store(q_base + form.HEAD_DIM, 0.0)\n    # Before", validate.INPUT_CHANGED),
    # Lengths and starts.
    *_mutants("lengths ignored", "if lengths.base is not None:", "if False:", (RAGGED, RAGGED_BY_DOT)),
    *_mutants("one position past the length", LENGTH, f"{LENGTH} + 1", (RAGGED, RAGGED_BY_DOT)),
    *_mutants("one position short of the length", LENGTH, f"{LENGTH} - 1", (UNFILLED, UNFILLED_BY_DOT)),
    _mutant("length of the first request", "b * stride_lb", "0 * stride_lb", variant=RAGGED, gpu=True),
    _mutant("lengths next to each other", "b * stride_lb", "b", variant=RAGGED, gpu=True),
    # What lies behind the keys may have changed meanwhile.
    _mutant("end not counted from the chunk", "within(end, start, form)", "within(end, 0, form)",
            validate.NOT_DETERMINISTIC, variant=RAGGED, race=True),
    _mutant("last position of a chunk hidden", "0), form.CHUNK_SIZE).to", "0), form.CHUNK_SIZE - 1).to",
            variant=RAGGED),
    _mutant("starts ignored", "if seq_starts_ptr is not None:", "if False:", variant=RAGGED),
    _mutant("what lies before the start is scored", "if form.RAGGED:\n        inside =", "if False:\n        inside =",
            variant=RAGGED),
    *_mutants("one position before the start", BEGIN, f"{BEGIN} - 1", (RAGGED, RAGGED_BY_DOT)),
    *_mutants("one position behind the start", BEGIN, f"{BEGIN} + 1", (UNFILLED, UNFILLED_BY_DOT)),
    _mutant("start of the first request", "b * stride_sb", "0 * stride_sb", variant=RAGGED, gpu=True),
    _mutant("start not counted from the chunk", "within(begin, start, form)", "within(begin, 0, form)",
            variant=RAGGED),
    # Several queries.
    _mutant("query and head of a row swapped", Q_ROW, "row_offsets(read_row, query.stride_i, query.stride_h, form)",
            variant=SQUARE),
    _mutant("first query for all", "rows // form.GROUP * stride_i", "rows * 0", variant=SEVERAL),
    _mutant("first query for all by dot", Q_COLUMN, Q_COLUMN.replace("rows,", "rows % form.GROUP,"),
            variant=SEVERAL_BY_DOT),
    *_mutants("last row of several queries skipped", "q_len * GROUP if", "q_len * GROUP - 1 if",
              (SEVERAL, SEVERAL_BY_DOT)),
    *_mutants("rows of a query too many written", "q_len * GROUP if", "(q_len + 1) * GROUP if",
              (SEVERAL, SEVERAL_BY_DOT), validate.OUT_OF_BOUNDS, far=True),
    *_mutants("length of the first query", "queries * lengths.stride_i", "queries * 0",
              (QUERY_LENGTHS, QUERY_LENGTHS_BY_DOT)),
    _mutant("lengths of queries next to each other", "queries * lengths.stride_i", "queries", variant=QUERY_LENGTHS),
    *_mutants("causal ignored", "if form.CAUSAL:", "if False:", (CAUSAL, CAUSAL_BY_DOT)),
    *_mutants("causal one too few", LATER_QUERIES, "lengths.q_len - queries", (CAUSAL, CAUSAL_BY_DOT)),
    *_mutants("causal one too many", LATER_QUERIES, "lengths.q_len - 2 - queries", (CAUSAL, CAUSAL_BY_DOT)),
    _mutant("causal in reverse", LATER_QUERIES, "queries", variant=CAUSAL),
    _mutant("causal as if no row were free", LATER_QUERIES, LATER_QUERIES.replace(
            "lengths.q_len", "form.ROWS // form.GROUP"), variant=CAUSAL),
    _mutant("end of another query", OWN_END, OWN_END.replace("//", "%"), variant=CAUSAL),
    _mutant("end of another query by dot", OWN_ENDS, OWN_ENDS.replace("//", "%"), variant=CAUSAL_BY_DOT),
    _mutant("end of the first block's queries", "own = tl.minimum(query.first + tl", "own = tl.minimum(tl",
            variant=CAUSAL_BLOCKS),
    _mutant("all queries see what one does", SUM_SEVERAL, "if False:\n            valid =", variant=CAUSAL),
    _mutant("all queries see what one does by dot", DOT_SEVERAL, "if False:\n        valid =", variant=CAUSAL_BY_DOT),
    *_mutants("only what all queries see", "tl.max(ends, axis=0)", "tl.min(ends, axis=0)", (CAUSAL, CAUSAL_BY_DOT)),
    _mutant("ends not counted from the chunk", "within(ends, start, form)", "within(ends, 0, form)",
            variant=CAUSAL_BY_DOT),
    # What is hidden, and chunks in which nothing is seen.
    _mutant("hidden positions not filled", SUM_HIDDEN, "if True:\n            mask =", variant=RAGGED),
    _mutant("hidden positions not filled by dot", DOT_HIDDEN, "if True:\n        mask =", variant=RAGGED_BY_DOT),
    _mutant("hidden positions written", SUM_HIDDEN, "if False:\n            mask =", validate.OUT_OF_BOUNDS,
            variant=UNFILLED),
    _mutant("hidden positions written by dot", DOT_HIDDEN, "if False:\n        mask =", validate.OUT_OF_BOUNDS,
            variant=UNFILLED_BY_DOT),
    *_mutants("hidden chunks not filled", "if form.FILL:", "if False:", (RAGGED, RAGGED_BY_DOT)),
    *_mutants("last row of hidden chunks not filled", FILLED_ROWS, f"({FILLED_ROWS} - 1)", (RAGGED, RAGGED_BY_DOT)),
    _mutant("row too many of hidden chunks filled", FILLED_ROWS, f"({FILLED_ROWS} + 1)", validate.OUT_OF_BOUNDS,
            variant=RAGGED, far=True),
    _mutant("one filled too many", "mask=positions < end", "mask=positions <= end", validate.OUT_OF_BOUNDS,
            variant=RAGGED),
    _mutant("last position not filled", "mask=positions < end", "mask=positions < end - 1", variant=RAGGED),
    _mutant("last chunk of a request passed over", LAST, "end // form.CHUNK_SIZE", variant=UNFILLED),
    _mutant("first chunk of a request passed over", FIRST, "(begin + form.CHUNK_SIZE - 1) // form.CHUNK_SIZE",
            variant=UNFILLED),
    _mutant("last chunk of the output passed over", CHUNKS, "chunks = out_len // form.CHUNK_SIZE", variant=RAGGED),
    # Lengths and starts that lie outside of the cache, and chunks that lie before the start.
    _mutant("length beyond the cache", f"tl.minimum({GIVEN}, ends)", GIVEN, variant=RAGGED),
    _mutant("start before the cache", BEGIN, BEGIN.removeprefix("tl.maximum(").removesuffix(", 0)"),
            validate.OUT_OF_BOUNDS, variant=RAGGED),
    *_mutants("filled beyond out, to the start", FILLED_TO_START, FILLED_TO_START.replace("_len", "_len + 99"),
              (RAGGED, RAGGED_BY_DOT), validate.OUT_OF_BOUNDS),
    *_mutants("chunks before the start not filled", FILLED_TO_START, "0", (RAGGED, RAGGED_BY_DOT)),
    *_mutants("chunks before the start counted twice", "scored = first + index", "scored = 2 * first + index",
              (UNFILLED, UNFILLED_BY_DOT)),
    # How many chunks a program goes through is not the same at each launch.
    _mutant("programs begin two chunks apart", "scored = first + index", "scored = first + 2 * index",
            validate.NOT_DETERMINISTIC, variant=UNFILLED, race=True),
    _mutant("filled from every other block on", "begin += index.to(tl.int64)", "begin += index.to(tl.int64) * 2",
            validate.NOT_DETERMINISTIC, variant=RAGGED, race=True),
    _mutant("every other block not filled", "begin += walkers.to(tl.int64)", "begin += walkers.to(tl.int64) * 2",
            validate.NOT_DETERMINISTIC, variant=RAGGED, race=True),
    _mutant("every other chunk passed over", "scored += walkers", "scored += walkers + 1", validate.NOT_DETERMINISTIC,
            variant=UNFILLED, race=True),
    _mutant("blocks of rows walk for others", "(batch * kv_heads * row_blocks)", "(batch * kv_heads)",
            variant=TWO_BLOCKS._replace(seq_lens=INT32), gpu=True),
    # Pages.
    _mutant("table of the first request", "b * stride_tb", "0 * stride_tb", variant=PAGED, gpu=True),
    _mutant("first block for all", "block * cache.stride_b", "0 * cache.stride_b", variant=PAGED),
    _mutant("table not read", PAGE_OF_TILE, "(position // form.PAGE_SIZE)", variant=PAGED),
    _mutant("table not read, small pages", PAGE, "(position // form.PAGE_SIZE)", variant=SMALL_PAGES),
    _mutant("next page", PAGE, PAGE.replace("PAGE_SIZE,", "PAGE_SIZE + 1,"), variant=SMALL_PAGES),
    *_mutants("pages twice as large in the table", PAGE_OF_TILE, PAGE_OF_TILE.replace("// ", "// 2 // "),
              (PAGED, PAGED_BY_DOT)),
    _mutant("second page of many chunks", PAGE_OF_TILE, PAGE_OF_TILE.replace("position //", "0 * position //"),
            variant=PAGED._replace(page_size=256)),
    _mutant("pages one behind the other", PAGE, f"({PAGE.replace('position //', '0 * position //')}"
            " + position // form.PAGE_SIZE)", variant=SMALL_PAGES),
    _mutant("table from the chunk's start", "chunk.start.to(tl.int32) + tile", "tile", variant=PAGED),
    _mutant("place of a tile in half a page", PLACE, f"{PLACE} % (form.PAGE_SIZE // 2)", variant=PAGED),
    _mutant("place in half a page", PLACE, f"{PLACE} % (form.PAGE_SIZE // 2)", variant=SMALL_PAGES),
    _mutant("place in a page of another size", PLACE, "in_page = position % 16", variant=ODD_PAGES),
    _mutant("one page, since it is larger than a tile", ONE_PAGE, ONE_PAGE.replace(" % ", " >= ").replace(" == 0", ""),
            variant=ODD_PAGES, config=LOOP),
    # What lies behind the pool may have changed meanwhile.
    _mutant("one page, however small", ONE_PAGE, "if True:", validate.NOT_DETERMINISTIC, variant=SMALL_PAGES,
            race=True),
    _mutant("page not looked up for the end of a request", "(tile < chunk.left)",
            "(tile + form.TILE_SIZE < chunk.left)", variant=PAGED),
    _mutant("page not looked up for the start of a request", "(tile + form.TILE_SIZE > chunk.first)",
            "(tile >= chunk.first)", variant=PAGED_STARTS),
    # Quantised keys.
    _mutant("k_scale by head lost", "            scores *= head_scale\n", "            pass\n", variant=HEAD_SCALES),
    _mutant("k_scale by head lost by dot", "\n        scores *= head_scale\n", "\n        pass\n",
            variant=HEAD_SCALES_BY_DOT),
    *_mutants("k_scale by head twice", "scores *= head_scale", "scores *= head_scale * head_scale",
              (HEAD_SCALES, HEAD_SCALES_BY_DOT)),
    _mutant("k_scale of the first head", "tl.load(k_scale_ptr + kv_head * stride_ch)", "tl.load(k_scale_ptr)",
            variant=HEAD_SCALES),
    _mutant("k_scale by token lost", "scores *= token_scales", "scores *= 1.0", variant=TOKEN_SCALES),
    _mutant("k_scale by token lost by dot", "scores *= load_token_scales", "load_token_scales",
            variant=TOKEN_SCALES_BY_DOT),
    _mutant("k_scale by token twice", "scores *= token_scales", "scores *= token_scales * token_scales",
            variant=TOKEN_SCALES),
    *_mutants("k_scale in bf16", LOADED_SCALES, f"{LOADED_SCALES}.to(tl.bfloat16).to(tl.float32)",
              (TOKEN_SCALES, TOKEN_SCALES_BY_DOT)),
    _mutant("k_scale of the first head, by token", "token_base = k_scale_ptr + kv_head * stride_ch",
            "token_base = k_scale_ptr + 0 * stride_ch", variant=TOKEN_SCALES),
    _mutant("k_scale of the first request", "b * stride_cb", "0 * stride_cb", variant=TOKEN_SCALES, gpu=True),
    *_mutants("k_scale of the next token", LOADED_SCALES,
              LOADED_SCALES.replace("offsets", "offsets + k_scales.stride_l"),
              (TOKEN_SCALES, TOKEN_SCALES_BY_DOT)),
    _mutant("k_scale of the first chunk", "k_scales.base + start * k_scales.stride_l", "k_scales.base",
            variant=TOKEN_SCALES),
    _mutant("k_scale of the keys' block", "Cache(token_base, stride_cb,", "Cache(token_base, stride_kb,",
            validate.NOT_DETERMINISTIC, variant=PAGED_SCALES, race=True),
    _mutant("e4m3 keys as e5m2", PRODUCT, PRODUCT.replace("keys.", "keys.to(tl.float8e5, bitcast=True)."),
            variant=TOKEN_SCALES),
    _mutant("e4m3 keys as integers", DOT, DOT.replace("tile_keys,", "tile_keys.to(tl.int8, bitcast=True),"),
            variant=HEAD_SCALES_BY_DOT),
    _mutant("queries in fp8", PRODUCT, PRODUCT.replace("q.", "q.to(keys.dtype)."), variant=TOKEN_SCALES),
    _mutant("queries in fp8 by dot", "return columns.to(form.DOT_DTYPE)",
            "return columns.to(tl.float8e5).to(form.DOT_DTYPE)", variant=TOKEN_SCALES_BY_DOT),
    Mutant("products of fp8 in bf16", BF16_PRODUCTS, variant=TOKEN_SCALES),
    _mutant("strides of queries rounded as those of fp8 keys", "visible_stride(stride_qh, q_ptr.",
            "visible_stride(stride_qh, k_ptr.", variant=HEAD_SCALES_BY_DOT),
    _mutant("pairs of keys swapped", "even, odd = unpack", "odd, even = unpack", variant=PAIRS, gpu=True),
    _mutant("second of each pair lost", "tl.dot(odd, tail_columns, tl.dot(even, columns))", "tl.dot(even, columns)",
            variant=PAIRS, gpu=True),
    _mutant("last pair of a key skipped", "(offs_pair < form.HEAD_DIM // 2)", "(offs_pair < form.HEAD_DIM // 2 - 1)",
            variant=PAIRS, gpu=True),
    _mutant("pairs of keys twice as large", "0x7b807b80", "0x7c007c00", variant=PAIRS, gpu=True),
    _mutant("sign of the second of each pair lost", "lop3.b32 x, $2, 0x80008000,", "lop3.b32 x, $2, 0,",
            variant=PAIRS, gpu=True),
    # Races.
    _mutant("last bit by the clock", DOT_SCALED, DOT_SCALED.replace("scale\n", f"scale * (1 + {CLOCK} * 1e-7)\n"),
            validate.NOT_DETERMINISTIC, variant=variant_of(BF16, FP32, group=3), gpu=True),
    _mutant("scores by the clock", SUM_SCALED, f"\n        scores = (scores + {CLOCK}) * scale\n",
            validate.NOT_DETERMINISTIC, gpu=True),
    _mutant("KV heads race for one place", "+ kv_head * GROUP * stride_oh", "+ row_block * ROWS * stride_oh",
            validate.NOT_DETERMINISTIC, gpu=True, race=True),
    # Right wherever the batch element that is cleared has yet to be written.
    _mutant("another program's output cleared", START, f"    tl.store({OTHERS_PLACE}, 0.0)\n{START}",
            validate.NOT_DETERMINISTIC, gpu=True, race=True),
]  # fmt: skip


class Offset(NamedTuple):
    """A product of an index and a stride in the kernel, and which trials of offsets.py it shows in alone.

    within: a longer text that has it, where others have it as well.
    """

    name: str
    product: str
    places: tuple[str, ...]
    variant: Variant = BY_SUM
    within: str = ""

    def edit(self, bits):
        """The product in integers of so many bits."""
        within = self.within or self.product
        return within, within.replace(self.product, f"({self.product}).to(tl.int{bits})")


BLOCKS = ("batch, inputs", "positions, inputs", "chunks, inputs")

OFFSETS = [
    Offset("position of a key", KEY_POSITION, ("positions, inputs",)),
    Offset("position of a key by dot", KEY_POSITION, ("positions, inputs",), BY_DOT),
    Offset("position of a ragged key", KEY_POSITION, ("positions, inputs", "chunks, inputs"), RAGGED),
    Offset("position of a ragged key by dot", KEY_POSITION, ("positions, inputs", "chunks, inputs"), RAGGED_BY_DOT),
    Offset("position in out", "pos.to(tl.int64) * out.stride_l", ("positions, output",)),
    Offset("position in out by dot", "pos.to(tl.int64)[:, None] * out.stride_l", ("positions, output",), BY_DOT),
    Offset("chunk's keys", "start * keys.stride_l", ("chunks, inputs",)),
    Offset("chunk in out", "start * out.stride_l", ("chunks, output",)),
    Offset("row of q", Q_ROW, ("rows, inputs",)),
    Offset("row of q by dot", Q_COLUMN, ("rows, inputs",), BY_DOT),
    Offset("row of out", OUT_ROW, ("rows, output",)),
    Offset("row of out by dot", OUT_COLUMN, ("rows, output",), BY_DOT),
    Offset("head of q", "kv_head * GROUP * stride_qh", ("heads, inputs",)),
    Offset("head of k", "kv_head * visible_stride(stride_kh, k_ptr.dtype.element_ty, ALIGNED)", ("heads, inputs",)),
    Offset("head of out", "kv_head * GROUP * stride_oh", ("heads, output",)),
    Offset("batch of q", "b * visible_stride(stride_qb, q_ptr.dtype.element_ty, ALIGNED)", ("batch, inputs",)),
    Offset("batch of k", "b * stride_kb", ("batch, inputs",)),
    Offset("batch of out", "b * stride_ob", ("batch, output",)),
    Offset("strides of q and k", "stride // lanes * lanes", ("batch, inputs", "rows, inputs")),
    Offset("strides of q and k, one row", "stride // lanes * lanes", ("batch, inputs", "heads, inputs"), variant_of()),
    Offset("row of q, several queries", Q_ROW, ("rows, inputs", "queries, inputs"), SEVERAL),
    Offset("row of q, several queries by dot", Q_COLUMN, ("rows, inputs", "queries, inputs"), SEVERAL_BY_DOT),
    Offset("row of out, several queries", OUT_ROW, ("rows, output", "queries, output"), SEVERAL),
    Offset("row of out, several queries by dot", OUT_COLUMN, ("rows, output", "queries, output"), SEVERAL_BY_DOT),
    Offset("head of a row", "rows % form.GROUP * stride_h", ("rows, inputs", "rows, output"), SEVERAL),
    Offset("head of a row by dot", "rows % form.GROUP * stride_h", ("rows, inputs", "rows, output"), SEVERAL_BY_DOT),
    Offset("query of a row", "rows // form.GROUP * stride_i", ("queries, inputs", "queries, output"), SEVERAL),
    Offset("query of a row by dot", "rows // form.GROUP * stride_i", ("queries, inputs", "queries, output"),
           SEVERAL_BY_DOT),
    Offset("block of a page", "block * cache.stride_b", BLOCKS, PAGED),
    Offset("block of a small page", "block * cache.stride_b", BLOCKS, SMALL_PAGES),
    Offset("place in a page", PAGE_PLACE, ("places in a page, inputs",), PAGED._replace(page_size=16)),
    Offset("place in a page of several chunks", PAGE_PLACE, ("places in a page, inputs",), PAGED),
    Offset("filled position", "positions * out.stride_l", ("filled, output",), RAGGED),
    Offset("filled position by dot", "positions * out.stride_l", ("filled, output",), RAGGED_BY_DOT),
    Offset("filled row", OUT_ROW, ("rows, output",), RAGGED, within=FILLED_ROW),
    Offset("filled row of several queries", OUT_ROW, ("rows, output", "queries, output"), CAUSAL, within=FILLED_ROW),
    Offset("place in a small page", PAGE_PLACE, ("places in a page, inputs",), SMALL_PAGES),
    Offset("head of k, float8", "kv_head * visible_stride(stride_kh, k_ptr.dtype.element_ty, ALIGNED)",
           ("heads, inputs",), TOKEN_SCALES),
    Offset("position of a float8 key", KEY_POSITION, ("positions, inputs",), TOKEN_SCALES),
]  # fmt: skip


def offset_mutant(offset, bits):
    """The kernel with that product in integers of so many bits."""
    return _mutant(f"{offset.name} in int{bits}", *offset.edit(bits), variant=offset.variant, gpu=True)


MUTANTS += [offset_mutant(offset, 32) for offset in OFFSETS]

# Right at the lengths around a chunk; wrong where a cache has more than 16 chunks.
CHUNKS_WRAP = (("start = index * form.CHUNK_SIZE", "start = index % 16 * form.CHUNK_SIZE"),)

# No mutants to judge: these take the process down.
FAR_AWAY = ((OUT_BASE, OUT_BASE.replace("+ b", "+ (1 << 44) + b")),)
FOR_EVER = "    while tl.atomic_add(out_ptr.to(tl.pointer_type(tl.int32)), 0) != 123456789:\n        scale += 1\n"
ENDLESS = ((START, f"{FOR_EVER}{START}"),)
