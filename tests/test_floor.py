"""Which floor is which, of times that are made up."""

from __future__ import annotations

import torch

from tunedqk import floor
from tunedqk.kernels.plain import read_kernel
from tunedqk.timing import Sample


def test_floors_are_the_fastest_of_each_family_in_one_interleaving(monkeypatch):
    asked = []

    def replays(kernel, sources, outputs, passes):
        asked.append((kernel is read_kernel, len(sources), len(outputs), passes))
        return [11.0, 10.0, 12.0] if kernel is read_kernel else [22.0, 21.0]

    def interleave(graphs, rounds):
        assert rounds == 7
        return [Sample(graph, graph, graph) for graph in graphs]

    monkeypatch.setattr(floor, "_replays", replays)
    monkeypatch.setattr(floor, "interleave", interleave)
    keys, scores = [torch.empty(4)] * 2, [torch.empty(1)] * 2
    ours, floors = floor.compare_with_floors([30.0, 5.0], keys, scores, passes=3, rounds=7)
    assert [sample.median for sample in ours] == [30.0, 5.0]
    assert floors == (10.0, 21.0)
    assert floor.read_write_floor_us(keys, scores, passes=3, rounds=7) == 21.0
    assert asked == [(True, 2, 2, 3), (False, 2, 2, 3), (False, 2, 2, 3)]
