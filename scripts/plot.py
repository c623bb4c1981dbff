#!/usr/bin/env python3
"""Draw what `benchmark.py --out` wrote: share of the floor by size, time over each peer, time by seq_len.

python scripts/plot.py benchmark.json --out benchmark.svg
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, StrMethodFormatter

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = {"bfloat16": "o", "float16": "s", "float32": "^"}
# Text stays text, and the same results give the same file.
mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "tunedqk", "axes.spines.top": False})
mpl.rcParams.update({"axes.spines.right": False, "legend.frameon": False, "font.size": 9})


def plot_share_of_floor(axes: Axes, shapes: list[dict[str, Any]]) -> None:
    """One point for each shape, coloured by query rows per KV head."""
    colours = {rows: f"C{i}" for i, rows in enumerate(sorted({shape["rows"] for shape in shapes}))}
    groups: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for shape in shapes:
        groups[shape["rows"], shape["dtype"]].append(shape)
    for (rows, dtype), group in sorted(groups.items()):
        axes.plot(
            [shape["key_bytes"] / 1e6 for shape in group], [shape["of_read_write"] for shape in group],
            linestyle="", marker=MARKERS.get(dtype, "x"), color=colours[rows], label=f"{dtype}, {rows}",
        )  # fmt: skip
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set(xscale="log", xlabel="K in MB", title="Share of the read and write floor")
    axes.set_ylim(bottom=min(0.5, *(shape["of_read_write"] for shape in shapes)))
    axes.legend(title="dtype, rows", fontsize=7)


def plot_peers(axes: Axes, shapes: list[dict[str, Any]]) -> None:
    """Each peer's time over ours, one dot for each shape, and the geometric mean."""
    names = list(shapes[0]["peers"])
    for i, name in enumerate(names):
        ratios = [shape["peers"][name]["median"] / shape["us"] for shape in shapes]
        mean = statistics.geometric_mean(ratios)
        axes.plot(ratios, [i] * len(ratios), linestyle="", marker="|", markersize=10, color=f"C{i}")
        axes.plot([mean], [i], marker="o", color=f"C{i}")
        axes.annotate(f"{mean:.2f}", (mean, i), textcoords="offset points", xytext=(0, 9), ha="center")
    axes.axvline(1.0, color="grey", linewidth=0.8)
    axes.set(xscale="log", xlabel="their time over tunedqk's; dot: geometric mean", title="Peers")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.minorticks_off()
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()


def plot_by_length(axes: Axes, shapes: list[dict[str, Any]]) -> None:
    """Time by seq_len of what was measured at most lengths: the same dtype, head_dim, rows and batch."""
    series: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for shape in shapes:
        series[tuple(shape[name] for name in ("dtype", "head_dim", "rows", "batch"))].append(shape)
    (dtype, head_dim, rows, batch), longest = max(series.items(), key=lambda item: len(item[1]))
    longest.sort(key=lambda shape: shape["seq_len"])
    lengths = [shape["seq_len"] for shape in longest]
    axes.plot(lengths, [shape["us"] for shape in longest], marker="o", color="black", label="tunedqk")
    axes.plot(lengths, [shape["read_write_floor_us"] for shape in longest], "--", color="grey", label="floor")
    for i, name in enumerate(longest[0]["peers"]):
        axes.plot(lengths, [shape["peers"][name]["median"] for shape in longest], color=f"C{i}", label=name)
    axes.set(xscale="log", yscale="log", xlabel="seq_len", ylabel="microseconds")
    axes.set_title(f"{dtype}, head_dim {head_dim}, {rows} rows, batch {batch}")
    axes.legend(fontsize=7)


def draw(results: dict[str, Any]) -> Figure:
    """All three, side by side."""
    figure = Figure(figsize=(14, 4.2), layout="constrained")
    for axes, plot in zip(figure.subplots(1, 3), (plot_share_of_floor, plot_peers, plot_by_length), strict=True):
        plot(axes, results["shapes"])
    figure.suptitle(f"{results['gpu']['name']}, Triton {results['toolchain']['triton']}, {results['date']}")
    return figure


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="what `benchmark.py --out` wrote")
    parser.add_argument("--out", type=Path, default=Path("benchmark.svg"), help="the picture: .svg, .png or .pdf")
    options = parser.parse_args()
    try:
        results = json.loads(options.results.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        print(f"{options.results}: {exc}", file=sys.stderr)
        return 1
    if not results.get("shapes"):
        print(f"{options.results}: no shapes were measured, so there is nothing to draw", file=sys.stderr)
        return 1
    if not all("peers" in shape for shape in results["shapes"]):
        print(f"{options.results}: made by an older benchmark.py, without peers; run it again", file=sys.stderr)
        return 1
    draw(results).savefig(options.out, metadata={"Date": None} if options.out.suffix == ".svg" else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
