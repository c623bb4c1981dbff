#!/usr/bin/env python3
"""Measure tunedqk on this GPU, side by side with the memory floor and with torch, in one run.

Share of the memory floor, and time of the peers over ours (graph replay over rotated inputs and outputs, competitors in
turns); the same floor for callers that torch cannot serve; how much of score -> softmax -> top-k is the score; the time
to tune one key cold against triton.autotune over the same candidates; and the host's time for a call against
torch.matmul. Everything is also written as JSON, row by row, so that a run that is stopped leaves what it had.

    python scripts/benchmark.py --out benchmark.json
"""

from __future__ import annotations

import argparse
import datetime as dt
import functools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import triton
from callers import CALLERS, SELECTIONS, measure_caller, measure_selection
from peers import PEERS
from rich.console import Console
from rich.table import Table

from tunedqk.accept import Door
from tunedqk.config import MANY_SEQUENCES, TuningKey, tuning_key
from tunedqk.db import TuningDB
from tunedqk.device import gpu_identity, toolchain
from tunedqk.floor import compare_with_floors
from tunedqk.kernels.vectorized import qk_score_kernel
from tunedqk.launch import programs
from tunedqk.score import qk_score
from tunedqk.tensors import TORCH_DTYPES
from tunedqk.timing import Replay, summarise
from tunedqk.tune import candidates, tune, tuned_variant
from tunedqk.variant import Variant, geometry, shape_constexprs, triton_config
from tunedqk.workload import BATCHES, Workload

if TYPE_CHECKING:
    from collections.abc import Callable

KV_HEADS = 8
# dtype, head_dim, rows, batch, seq_len; K is batch * seq_len * 8 heads * head_dim
SHAPES = (
    # 2 GB and less: dtypes, head_dims, rows.
    ("bfloat16", 128, 1, 8, 16384),
    ("bfloat16", 128, 1, 32, 8192),
    ("bfloat16", 128, 1, 64, 8192),
    ("bfloat16", 128, 4, 16, 8192),
    ("bfloat16", 128, 4, 32, 8192),
    ("bfloat16", 128, 4, 8, 32768),
    ("bfloat16", 128, 4, 64, 8001),
    ("bfloat16", 128, 8, 16, 8192),
    ("bfloat16", 128, 8, 32, 8192),
    ("bfloat16", 128, 8, 64, 8001),
    ("bfloat16", 128, 16, 32, 8192),
    ("bfloat16", 64, 1, 64, 8192),
    ("bfloat16", 64, 4, 64, 8192),
    ("bfloat16", 80, 1, 64, 8192),
    ("bfloat16", 96, 1, 64, 8192),
    ("bfloat16", 256, 1, 16, 8192),
    ("bfloat16", 256, 8, 16, 8192),
    ("float16", 128, 1, 32, 8192),
    ("float16", 128, 4, 32, 8192),
    ("float32", 128, 1, 16, 8192),
    ("float32", 128, 4, 16, 8192),
    ("float32", 128, 8, 16, 8192),
    ("float32", 64, 1, 32, 8192),
    # One shape at all lengths, up to 2 GB, and 8 GB.
    *(("bfloat16", 128, 1, 8, seq_len) for seq_len in (64, 512, 1024, 2048, 4096, 8192, 8193, 32768, 65536, 131072)),
    ("bfloat16", 128, 1, 64, 65536),
    # A single request: 2 to 67 MB.
    *(("bfloat16", 128, 1, 1, seq_len) for seq_len in (64, 1024, 2048, 4096, 16384)),
    *(("bfloat16", 128, 4, 1, seq_len) for seq_len in (1024, 4096, 16384, 32768)),
    # Many query heads on each KV head.
    ("bfloat16", 128, 64, 32, 8192),
    ("bfloat16", 128, 128, 32, 8192),
)
ROUNDS = 9
TUNED_KEY = tuning_key(4096, 128, "bfloat16", 1, sequences=MANY_SEQUENCES)
HOST_CALLS = 2000


def measure_shape(dtype: str, head_dim: int, rows: int, batch: int, seq_len: int) -> dict[str, Any]:
    """One row of the first table."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch_dtype = TORCH_DTYPES[dtype]
    variant = Variant(head_dim, rows, torch_dtype, torch_dtype, aligned=True)
    shape = Workload(device, variant, seq_len, (batch,), limit=10 << 30, replay_us=math.inf).shapes[-1]
    sets = [(tensors.q, tensors.k, out) for tensors, out in zip(shape.tensors, shape.out, strict=True)]
    ours = [functools.partial(qk_score, q, k, out=out) for q, k, out in sets]
    ours[0]()  # find the config before the capture
    torch.compiler.reset()  # it would refuse a ninth shape
    replays = {"tunedqk": Replay(ours * shape.passes)}
    for name, peer in PEERS.items():
        # The same number of launches for all, so that neither side finds more of its inputs in L2.
        replays[name] = Replay([functools.partial(peer, q, k) for q, k, _ in sets] * shape.passes)
    times, floors = compare_with_floors(list(replays.values()), shape.k, shape.out, passes=shape.passes, rounds=ROUNDS)
    samples = dict(zip(replays, times, strict=True))
    our = samples["tunedqk"]
    return {
        "dtype": dtype, "head_dim": head_dim, "rows": rows, "batch": batch, "kv_heads": KV_HEADS, "seq_len": seq_len,
        "key_bytes": shape.k[0].nbytes, "us": our.median, "p20_us": our.p20, "p80_us": our.p80,
        "read_floor_us": floors.read, "read_write_floor_us": floors.read_write,
        "of_read": floors.read / our.median, "of_read_write": floors.read_write / our.median,
        "peers": {name: samples[name]._asdict() for name in PEERS},
    }  # fmt: skip


def measure_tuning() -> dict[str, Any]:
    """Seconds to tune one key cold, each side in a process of its own with empty caches."""
    seconds = {}
    for side in ("ours", "triton"):
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | {"TRITON_CACHE_DIR": f"{folder}/triton", "TUNEDQK_CACHE_DIR": f"{folder}/db"}
            command = [sys.executable, __file__, "--tune-one", side]
            result = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)  # noqa: S603
            seconds[side] = json.loads(result.stdout)
    return {"key": str(TUNED_KEY), **seconds, "ratio": seconds["ours"]["seconds"] / seconds["triton"]["seconds"]}


def tune_one(side: str, key: TuningKey) -> dict[str, Any]:
    """Tune one key in this process, by tunedqk or by triton.autotune alone over the same candidates."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.zeros(1, device=device)
    configs = candidates(key, device)
    start = time.perf_counter()
    if side == "ours":
        with tempfile.TemporaryDirectory() as folder:
            entry = tune(key, Door(device, TuningDB(gpu_identity(device.index), Path(folder), others=[])))
        config = str(entry.config)
    else:
        variant = tuned_variant(key)
        shape = Workload(device, variant, key.seq_len, BATCHES[key.sequences]).screening
        tensors, out = shape.tensors[0], shape.out[0]
        q, k, *others = tensors
        tuned = triton.autotune([triton_config(c) for c in configs], key=["seq_len", "HEAD_DIM"])(qk_score_kernel)
        sizes = geometry(tensors, out, "NHD", fill_tail=True)

        def grid(meta: dict[str, Any]) -> tuple[int]:
            return (programs(variant, meta["CHUNK_SIZE"], sizes),)

        tuned[grid](q, k, out, *others, 1.0, 0.0, *sizes, **shape_constexprs(variant))
        torch.cuda.synchronize()
        config = str(tuned.best_config)
    return {"seconds": time.perf_counter() - start, "candidates": len(configs), "config": config}


def measure_host() -> dict[str, Any]:
    """Host microseconds a call, at a size that the GPU finishes faster than the host can launch."""
    q = torch.randn(1, 8, 128, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(1, 64, 8, 128, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(1, 8, 64, device="cuda", dtype=torch.bfloat16)
    calls: dict[str, Callable[[], object]] = {
        "qk_score": lambda: qk_score(q, k),
        "qk_score, out given": lambda: qk_score(q, k, out=out),
        "torch.matmul": lambda: torch.matmul(k.transpose(1, 2), q.unsqueeze(-1)),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            for _ in range(50):
                call()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(HOST_CALLS):
                call()
            times[name].append((time.perf_counter() - start) * 1e6 / HOST_CALLS)
    medians = {name: summarise(values).median for name, values in times.items()}
    return {"host_us": medians, "ratio": medians["qk_score"] / medians["torch.matmul"]}


# What is measured for each part of the results: rows of a table, or one thing.
PARTS: dict[str, list[Callable[[], dict[str, Any]]]] = {
    "shapes": [functools.partial(measure_shape, *shape) for shape in SHAPES],
    "callers": [functools.partial(measure_caller, one) for one in CALLERS],
    "selections": [functools.partial(measure_selection, one) for one in SELECTIONS],
    "tuning": [measure_tuning],
    "host": [measure_host],
}


def show(console: Console, results: dict[str, Any]) -> None:
    """The tables."""
    table = Table(title=f"{results['gpu']['name']}, {results['toolchain']}", title_justify="left")
    for name in ("K", "shape", "us", "of read", "of read+write", *PEERS):
        table.add_column(name, justify="right")
    for row in results["shapes"]:
        shape = f"{row['dtype']} d{row['head_dim']} rows {row['rows']} batch {row['batch']} len {row['seq_len']}"
        shares = (f"{row[name]:.3f}" for name in ("of_read", "of_read_write"))
        ratios = (f"{times['median'] / row['us']:.2f}" for times in row["peers"].values())
        table.add_row(f"{row['key_bytes'] / 1e6:.0f} MB", shape, f"{row['us']:.1f}", *shares, *ratios)
    if results["shapes"]:
        console.print(table)
    callers = Table(title="callers that torch.matmul cannot serve: one output, or several", title_justify="left")
    for name in ("caller", "rows", "K", "us", "of read", "of read+write", "us", "of read", "of read+write"):
        callers.add_column(name, justify="left" if name == "caller" else "right", no_wrap=True)
    for row in results["callers"]:
        cells = [
            cell
            for times in (row["same_out"], row["rotated_out"])
            for cell in (f"{times['us']:.1f}", f"{times['of_read']:.3f}", f"{times['of_read_write']:.3f}")
        ]
        callers.add_row(row["caller"], str(row["rows"]), f"{row['key_bytes'] / 1e6:.0f} MB", *cells)
    if results["callers"]:
        console.print(callers)
    for row in results["selections"]:
        console.print(
            f"score -> softmax -> top-{row['top']} of batch {row['batch']}, len {row['seq_len']}, rows {row['rows']}: "
            f"{row['us']:.1f} us, of which the score {row['score_us']:.1f} us: {row['share']:.0%}"
        )
    if tuning := results.get("tuning"):
        ours, theirs = (f"{tuning[side]['seconds']:.2f} s" for side in ("ours", "triton"))
        console.print(f"tuning {tuning['key']} cold: {ours}, triton.autotune {theirs}: {tuning['ratio']:.3f}")
    if host := results.get("host"):
        times = ", ".join(f"{name} {us:.1f} us" for name, us in host["host_us"].items())
        console.print(f"host time of a call: {times}: {host['ratio']:.2f} of torch.matmul")


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results there as JSON")
    parser.add_argument("--only", choices=PARTS, help="run one of the parts")
    parser.add_argument("--tune-one", choices=("ours", "triton"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmark.py needs a GPU: nothing was measured.", file=sys.stderr)
        return 1
    if options.tune_one:
        print(json.dumps(tune_one(options.tune_one, TUNED_KEY)))
        return 0
    results: dict[str, Any] = {
        "gpu": msgspec.to_builtins(gpu_identity(torch.cuda.current_device())),
        "toolchain": msgspec.to_builtins(toolchain()),
        "date": dt.datetime.now(dt.timezone.utc).date().isoformat(),
        "shapes": [], "callers": [], "selections": [],
    }  # fmt: skip
    for part, measurements in PARTS.items():
        if options.only in {None, part}:
            for measure in measurements:
                row = measure()
                if isinstance(results.get(part), list):
                    results[part].append(row)
                else:
                    results[part] = row
                if options.out:
                    options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    show(Console(width=140), results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
