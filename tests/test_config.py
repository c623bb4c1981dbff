"""Configs, keys and the search space: plain data, so every test here runs anywhere and at once."""

from __future__ import annotations

import itertools

import msgspec
import pytest
import torch

from tunedqk import config as config_module
from tunedqk.config import (
    DEFAULT_GRID,
    ELEMENT_SIZE,
    Grid,
    KernelConfig,
    TuningKey,
    blocking,
    default_config,
    fits_shared_memory,
    next_power_of_2,
    search_space,
    shared_memory_bytes,
    tuning_key,
)
from tunedqk.tensors import TORCH_DTYPES
from tunedqk.tune import tuned_variant
from tunedqk.variant import Variant

DTYPES = tuple(ELEMENT_SIZE)
SMALLEST_GPU = 99 * 1024  # bytes of shared memory that a block can have on sm_86 and sm_89
HEAD_DIMS = (1, 3, 16, 33, 64, 80, 96, 112, 128, 192, 256, 257, 288, 320, 512, 513, 576)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


def shapes_of(dtype):
    return [tuning_key(512, head_dim, dtype, rows) for head_dim, rows in itertools.product(HEAD_DIMS, ROWS)]


def is_power_of_2(n):
    return n > 0 and n & (n - 1) == 0


# --- KernelConfig ---

GOOD = {"CHUNK_SIZE": 128, "TILE_SIZE": 64, "num_warps": 4, "num_stages": 2, "LOAD_HINT": "evict_first"}
BAD = [
    pytest.param("CHUNK_SIZE", 100, "a power of two from 16 to 65536", id="chunk no power of two"),
    pytest.param("CHUNK_SIZE", 8, "a power of two from 16 to 65536", id="chunk too small"),
    pytest.param("CHUNK_SIZE", 131072, "a power of two from 16 to 65536", id="chunk too large"),
    pytest.param("CHUNK_SIZE", -128, "a power of two from 16 to 65536", id="chunk negative"),
    pytest.param("TILE_SIZE", 48, "a power of two from 16 to 1024", id="tile no power of two"),
    pytest.param("TILE_SIZE", 256, "at most CHUNK_SIZE = 128", id="tile larger than chunk"),
    pytest.param("num_warps", 0, "a power of two from 1 to 32", id="no warps"),
    pytest.param("num_warps", 3, "a power of two from 1 to 32", id="3 warps"),
    pytest.param("num_warps", 64, "a power of two from 1 to 32", id="64 warps"),
    pytest.param("num_stages", 0, "1 to 8", id="no stages"),
    pytest.param("num_stages", 9, "1 to 8", id="9 stages"),
    pytest.param("LOAD_HINT", "evict_last", "one of ('', 'evict_first')", id="load hint"),
    pytest.param("STORE_HINT", "evict_first", "one of ('', 'evict_last')", id="store hint"),
]


@pytest.mark.parametrize(("field", "value", "expected"), BAD)
def test_a_bad_config_is_refused_by_name_expected_and_got(field, value, expected):
    with pytest.raises(ValueError) as caught:
        KernelConfig(**{**GOOD, field: value})
    message = str(caught.value)
    assert message.startswith(f"{field}: expected {expected}, got {value!r}")


@pytest.mark.parametrize(("field", "value", "expected"), BAD)
def test_a_bad_config_in_a_file_is_refused_alike(field, value, expected):
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(msgspec.json.encode({**GOOD, field: value}), type=KernelConfig)
    assert f"{field}: expected {expected}, got {value!r}" in str(caught.value)


@pytest.mark.parametrize(
    "value", [pytest.param(4.0, id="float"), pytest.param("4", id="str"), pytest.param(True, id="bool")]
)
@pytest.mark.parametrize("field", ["CHUNK_SIZE", "TILE_SIZE", "num_warps", "num_stages"])
def test_a_number_is_an_int(field, value):
    with pytest.raises(ValueError, match=f"{field}: expected"):
        KernelConfig(**{**GOOD, field: value})


def test_a_config_survives_the_file():
    config = KernelConfig(**GOOD)
    assert msgspec.json.decode(msgspec.json.encode(config), type=KernelConfig) == config
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.json.decode(msgspec.json.encode({**GOOD, "num_ctas": 2}), type=KernelConfig)


def test_a_config_is_described_in_one_line():
    assert str(KernelConfig(64, 64, 8, LOAD_HINT="evict_first")) == "chunk 64, 8 warps evict_first"
    assert str(KernelConfig(128, 32, 4, 3)) == "chunk 128/32x3, 4 warps"


def test_num_stages_is_no_argument_of_the_kernel():
    # A kernel argument of that name would swallow the launch option.
    meta = KernelConfig(**GOOD).meta()
    assert "num_stages" not in meta
    assert meta["STAGES"] == 2


# --- Keys ---


@pytest.mark.parametrize(
    ("seq_len", "bucket"),
    [(1, 512), (511, 512), (512, 512), (513, 1024), (1024, 1024), (1025, 2048), (131072, 131072), (131073, 262144)],
)
def test_seq_len_is_rounded_up_to_its_bucket(seq_len, bucket):
    assert tuning_key(seq_len, 128, "bfloat16", 1).seq_len == bucket


@pytest.mark.parametrize(
    ("group", "rows"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 16), (71, 128), (128, 128)]
)
def test_rows_are_rounded_up(group, rows):
    assert tuning_key(512, 128, "bfloat16", group).rows == rows


def test_head_dim_dtype_and_page_size_are_exact():
    key = tuning_key(700, 80, "float16", 3, page_size=48)
    assert key == TuningKey(head_dim=80, dtype="float16", rows=4, seq_len=1024, page_size=48)


@pytest.mark.parametrize(("sequences", "bucket"), [(1, 8), (8, 8), (16, 8), (17, 64), (64, 64), (4096, 64)])
def test_sequences_are_few_or_many(sequences, bucket):
    assert tuning_key(512, 128, "bfloat16", 1, sequences=sequences).sequences == bucket


def test_a_key_names_all_that_it_is_made_of():
    key = tuning_key(512, 80, "float16", 4, page_size=16, sequences=64)
    assert str(key) == "head_dim 80, float16, rows 4, seq_len 512, pages of 16, more than 16 sequences"
    assert key.command.split()[2:] == [
        "--head-dims", "80", "--dtypes", "float16", "--rows", "4", "--seq-lens", "512", "--sequences", "64",
        "--page-sizes", "16",
    ]  # fmt: skip


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 5, 1023, 1024, 1025])
def test_next_power_of_2(n):
    power = next_power_of_2(n)
    assert is_power_of_2(power)
    assert power // 2 < max(n, 1) <= power


@pytest.mark.parametrize("sequences", [1, 16, 17, 1000])
@pytest.mark.parametrize("seq_len", [1, 512, 513, 5000])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_call_and_the_tuner_have_one_key(dtype, aligned, group, seq_len, sequences):
    torch_dtype = TORCH_DTYPES[dtype]
    variant = Variant(96, group, torch_dtype, torch.float32, aligned)
    key = variant.key(seq_len, sequences)
    assert key == tuning_key(seq_len, 96, dtype, group, sequences=sequences)
    assert tuned_variant(key).key(key.seq_len, key.sequences) == key


def test_only_one_place_builds_keys(monkeypatch):
    from tunedqk import variant

    assert variant.tuning_key is config_module.tuning_key
    monkeypatch.setattr(variant, "tuning_key", lambda *arguments: arguments)
    assert Variant(96, 3, torch.float16, torch.float16, aligned=True).key(700, 9) == (700, 96, "float16", 3, 0, 9)


# --- Blocking ---


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocking_covers_every_shape(dtype):
    for head_dim, group in itertools.product(range(1, 577), range(1, 131)):
        blocks = blocking(head_dim, dtype, group)
        case = (head_dim, group, blocks)
        assert head_dim <= blocks.BLOCK_D + blocks.TAIL_D, case
        assert is_power_of_2(blocks.BLOCK_D), case
        assert blocks.TAIL_D == 0 or is_power_of_2(blocks.TAIL_D), case
        # The tail starts inside the head, and no padding is larger than what it pads.
        assert blocks.TAIL_D == 0 or head_dim > blocks.BLOCK_D, case
        assert blocks.elements < 2 * max(head_dim, 16), case
        assert blocks.ROWS >= 1, case
        if blocks.dot:
            assert is_power_of_2(blocks.ROWS), case
            assert min(blocks.ROWS, blocks.BLOCK_D, blocks.TAIL_D or 16) >= 16, case  # the least that tl.dot takes
        else:
            assert group >= blocks.ROWS, case
        programs = -(-group // blocks.ROWS)
        assert (programs - 1) * blocks.ROWS < group <= programs * blocks.ROWS, case


@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_of_one_key_have_one_search_space(dtype):
    # The kernels of two calls that share an entry may differ in the number of rows, never in how they work.
    for head_dim, group in itertools.product(HEAD_DIMS, range(1, 131)):
        tuned = tuned_variant(tuning_key(512, head_dim, dtype, group)).blocking
        blocks = blocking(head_dim, dtype, group)
        assert blocks._replace(ROWS=0) == tuned._replace(ROWS=0), (head_dim, group)
        assert blocks.ROWS <= tuned.ROWS, (head_dim, group)


# --- The search space ---


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_search_space_is_small_and_without_duplicates(dtype):
    for key in shapes_of(dtype):
        space = search_space(key)
        assert 2 <= len(space) <= 16, key
        assert len(set(space)) == len(space), key
        # Stages of a loop that is none would change nothing.
        assert {config.num_stages for config in space if config.TILE_SIZE == config.CHUNK_SIZE} == {1}, key
        # fp32 rows beyond 512 elements fill the registers with one chunk of 16.
        assert len({config.CHUNK_SIZE for config in space}) > 1 or key.head_dim > 512, key
        assert {(config.LOAD_HINT, config.STORE_HINT) for config in space} == {("evict_first", "evict_last")}, key


def test_the_search_space_varies_what_the_issue_names():
    key = tuning_key(4096, 128, "bfloat16", 8)
    for field in ("CHUNK_SIZE", "num_warps", "num_stages"):
        assert len({getattr(config, field) for config in search_space(key)}) > 1, field


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_interpreter_has_one_candidate_for_each_program(dtype):
    for key in shapes_of(dtype):
        programs = [(config.CHUNK_SIZE, config.TILE_SIZE) for config in search_space(key, interpreted=True)]
        assert 1 <= len(programs) <= 4, key
        assert len(set(programs)) == len(programs), key
        assert set(programs) <= {(config.CHUNK_SIZE, config.TILE_SIZE) for config in search_space(key)}, key


@pytest.mark.parametrize("interpreted", [pytest.param(False, id="gpu"), pytest.param(True, id="interpreter")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_default_config_is_in_the_space_and_fits_small_gpus(dtype, interpreted):
    for key in shapes_of(dtype):
        default = default_config(key, interpreted=interpreted)
        assert default in search_space(key, interpreted=interpreted), key
        assert fits_shared_memory(default, key, SMALLEST_GPU), key


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_candidates_fit_small_gpus(dtype):
    for key in shapes_of(dtype):
        assert sum(fits_shared_memory(config, key, SMALLEST_GPU) for config in search_space(key)) >= 2, key


def test_the_search_space_does_not_depend_on_seq_len():
    spaces = {tuple(search_space(tuning_key(seq_len, 128, "bfloat16", 4))) for seq_len in (1, 512, 4096, 131072)}
    assert len(spaces) == 1


def test_shared_memory_counts_the_pipeline():
    key = tuning_key(512, 128, "bfloat16", 8)
    blocks = blocking(128, "bfloat16", 8)
    assert blocks.dot
    tile = 64 * 128 * 2
    sizes = [shared_memory_bytes(KernelConfig(256, 64, 4, stages), blocks, "bfloat16") for stages in (1, 2, 4)]
    assert [size - sizes[0] for size in sizes] == [0, tile, 3 * tile]
    assert fits_shared_memory(KernelConfig(256, 64, 4, 4), key, sizes[2])
    assert not fits_shared_memory(KernelConfig(256, 64, 4, 4), key, sizes[2] - 1)
    assert shared_memory_bytes(KernelConfig(256, 256, 4), blocking(128, "bfloat16", 1), "bfloat16") == 0


# --- The default grid ---


def test_the_default_grid_is_that_of_the_design():
    keys = DEFAULT_GRID.tuning_keys()
    assert len(keys) == len(set(keys)) == 5 * 3 * 4 * 9 * 2
    assert {key.head_dim for key in keys} == {64, 80, 96, 128, 256}
    assert {key.rows for key in keys} == {1, 4, 8, 16}
    assert {key.seq_len for key in keys} == {512 << step for step in range(9)}
    assert (keys[0].dtype, keys[0].head_dim, keys[0].rows) == ("bfloat16", 128, 1)


def test_a_grid_has_each_key_once():
    assert Grid((64,), ("float32",), (3, 4), (1, 512, 513), sequences=(1, 17, 64)).tuning_keys() == [
        tuning_key(seq_len, 64, "float32", 4, sequences=sequences) for seq_len in (512, 1024) for sequences in (8, 64)
    ]
