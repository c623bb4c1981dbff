"""The fast kernel compiles for GPUs that are not here, and to what it should: in a process without the interpreter."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter

import pytest

TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
SHARED_MEMORY = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}
# (head_dim, dtype, group)
SHAPES = {
    "head_dim 128 bf16 rows 1": (128, "bfloat16", 1),
    "head_dim 128 bf16 rows 8": (128, "bfloat16", 8),
    "head_dim 576 bf16 rows 16": (576, "bfloat16", 16),
    "head_dim 80 fp32 rows 1": (80, "float32", 1),
}

COMPILER = r"""
import json, sys
from concurrent.futures import ThreadPoolExecutor

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tunedqk.config import KernelConfig, fits_shared_memory, search_space, tuning_key
from tunedqk.kernels.vectorized import UNSPECIALISED, qk_score_kernel
from tunedqk.tensors import TORCH_DTYPES
from tunedqk.variant import Variant, shape_constexprs

TYPES = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16"}
SCALARS = {"scale": "fp32", "fill": "fp32", "kv_heads": "i32"}


def compile_one(target, variant, dtype, config):
    constexprs = shape_constexprs(variant) | config.meta()
    signature = {}
    for name in qk_score_kernel.arg_names:
        if name in constexprs:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = TYPES[dtype]
        else:
            signature[name] = SCALARS.get(name, "i64")
    assert set(constexprs) == {n for n, t in signature.items() if t == "constexpr"}
    assert set(UNSPECIALISED) < set(signature)
    # As a launch has it: aligned q and k, an output of any alignment.
    attrs = {(i,): [["tt.divisibility", 16]] for i in range(2)} if variant.aligned else {}
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    source = ASTSource(qk_score_kernel, signature, constexprs, attrs)
    return triton.compile(source, target=GPUTarget(*target), options=options)


def run(job):
    head_dim, dtype, group = job["shape"]
    key = tuning_key(4096, head_dim, dtype, group)
    variant = Variant(head_dim, group, TORCH_DTYPES[dtype], TORCH_DTYPES[dtype], job.get("aligned", True))
    configs = [KernelConfig(**config) for config in job.get("configs", [])]
    if not configs:
        space = [config for config in search_space(key) if fits_shared_memory(config, key, job["limit"])]
        configs = [min(space), max(space)]
    results = []
    for config in configs:
        kernel = compile_one(job["target"], variant, dtype, config)
        binary = kernel.asm["hsaco" if job["target"][0] == "hip" else "cubin"]
        texts = {name: kernel.asm[name] for name in job.get("texts", [])}
        results.append({"config": str(config), "bytes": len(binary), "shared": kernel.metadata.shared, "texts": texts})
    return results


jobs = json.load(sys.stdin)
with ThreadPoolExecutor(2) as pool:
    print(json.dumps(dict(zip(jobs, pool.map(run, jobs.values()), strict=True))))
"""

ONE_TILE = {"CHUNK_SIZE": 64, "TILE_SIZE": 64, "num_warps": 4}
LOOPS = [{"CHUNK_SIZE": 256, "TILE_SIZE": 64, "num_warps": 4, "num_stages": stages} for stages in (2, 4)]


def _jobs():
    jobs = {
        f"{shape} {target}": {"shape": SHAPES[shape], "target": TARGETS[target], "limit": SHARED_MEMORY[target]}
        for shape in SHAPES
        for target in TARGETS
    }
    sm_90 = {"target": TARGETS["sm_90"], "texts": ["ptx", "ttgir"]}
    jobs["fp32 dot"] = sm_90 | {"shape": (64, "float32", 16), "configs": [ONE_TILE]}
    jobs["fp32 dot sm_80"] = jobs["fp32 dot"] | {"target": TARGETS["sm_80"]}
    jobs["mha"] = sm_90 | {"shape": (128, "bfloat16", 1), "configs": [ONE_TILE]}
    jobs["mha misaligned"] = jobs["mha"] | {"aligned": False}
    jobs["loop"] = sm_90 | {"shape": (128, "bfloat16", 8), "configs": LOOPS}
    return jobs


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What came of each job: config, size, shared memory and texts of each of its binaries."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton-cache"))
    run = subprocess.run(
        [sys.executable, "-c", COMPILER],
        input=json.dumps(_jobs()),
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_corners_of_the_space_compile(shape, target, compiled):
    binaries = compiled[f"{shape} {target}"]
    assert len({binary["config"] for binary in binaries}) == 2
    for binary in binaries:
        assert binary["bytes"] > 0
        assert binary["shared"] <= SHARED_MEMORY[target], binary["config"]


@pytest.mark.parametrize("job", ["fp32 dot", "fp32 dot sm_80"])
def test_fp32_never_goes_through_tf32(job, compiled):
    (binary,) = compiled[job]
    assert "tt.dot" in binary["texts"]["ttgir"]
    assert "tf32" not in binary["texts"]["ptx"]
    assert "fma.rn.f32" in binary["texts"]["ptx"]


def _loads(binary):
    """How often each width of load occurs; v4.b32 is 16 bytes."""
    return Counter(re.findall(r"ld\.global\S*?\.((?:v\d\.)?b\d+)", binary["texts"]["ptx"]))


def test_aligned_keys_are_loaded_16_bytes_at_a_time(compiled):
    (aligned,), (misaligned,) = compiled["mha"], compiled["mha misaligned"]
    threads, key_bytes = 32 * ONE_TILE["num_warps"], ONE_TILE["TILE_SIZE"] * 128 * 2
    assert _loads(aligned).pop("v4.b32") == key_bytes // threads // 16
    assert _loads(aligned).total() == key_bytes // threads // 16 + 1, "besides the keys, one load of the query"
    assert "v4.b32" not in _loads(misaligned)


def test_num_stages_acts(compiled):
    """More stages, more tiles in shared memory at once."""
    two, four = compiled["loop"]
    tile = 64 * 128 * 2
    assert two["shared"] + 2 * tile <= four["shared"] + tile // 2
    for name in ("ptx", "ttgir"):
        assert two["texts"][name] != four["texts"][name]
    waits = [set(re.findall(r"cp\.async\.wait_group\s+(\S+);", binary["texts"]["ptx"])) for binary in (two, four)]
    assert all(waits)
    assert waits[0] != waits[1]
