"""The benchmark's picture shows what was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import plot
import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


def shape(seq_len, rows, share, **peers):
    return {
        "dtype": "bfloat16", "head_dim": 128, "rows": rows, "batch": 8, "seq_len": seq_len,
        "key_bytes": 8 * seq_len * 2048, "us": 10.0, "read_write_floor_us": 10.0 * share, "of_read_write": share,
        "peers": {name: {"median": median} for name, median in peers.items()},
    }  # fmt: skip


RESULTS = {
    "gpu": {"name": "a GPU"}, "toolchain": {"triton": "3.6.0"}, "date": "2000-01-01",
    "shapes": [
        shape(8192, 1, 0.9, bmm=20.0, matmul=10.0), shape(512, 1, 0.8, bmm=80.0, matmul=5.0),
        shape(512, 4, 0.7, bmm=10.0, matmul=10.0),
    ],
}  # fmt: skip


def test_every_shape_and_peer_is_drawn_where_it_belongs():
    floor, peers, by_length = plot.draw(RESULTS).axes
    drawn = [sorted(zip(*line.get_data(), strict=True)) for line in floor.lines]
    assert [(8 * 512 * 2048 / 1e6, 0.8), (8 * 8192 * 2048 / 1e6, 0.9)] in drawn
    assert [(8 * 512 * 2048 / 1e6, 0.7)] in drawn
    assert [text.get_text() for text in peers.texts] == [f"{(2 * 8 * 1) ** (1 / 3):.2f}", f"{0.5 ** (1 / 3):.2f}"]
    lines = {line.get_label(): [list(data) for data in line.get_data()] for line in by_length.lines}
    assert lines["bmm"] == [[512, 8192], [80.0, 20.0]]
    assert lines["floor"] == [[512, 8192], [8.0, 9.0]]


def run(*arguments):
    command = [sys.executable, str(SCRIPTS / "plot.py"), *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_the_script_writes_the_same_picture_again(tmp_path):
    results = tmp_path / "results.json"
    results.write_text(json.dumps(RESULTS))
    pictures = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for picture in pictures:
        assert run(results, "--out", picture).returncode == 0
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
    assert "a GPU" in pictures[0].read_text()


@pytest.mark.parametrize("text", [None, "{", '{"shapes": []}', '{"shapes": [{"us": 1}]}'])
def test_the_script_says_what_it_cannot_draw(tmp_path, text):
    results = tmp_path / "results.json"
    if text is not None:
        results.write_text(text)
    result = run(results, "--out", tmp_path / "a.svg")
    assert result.returncode == 1
    assert str(results) in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "a.svg").exists()
