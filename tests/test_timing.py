"""What a time is made of, with graphs that only keep a record."""

from __future__ import annotations

import torch

from tunedqk.timing import Replay, Sample, interleave, summarise


class Record:
    """Stands for a Replay: notes when it is enqueued and waited for, and takes what it is told."""

    def __init__(self, name, times, events):
        self.name, self.times, self.events = name, iter(times), events

    def enqueue(self):
        self.events.append(f"enqueue {self.name}")
        time = next(self.times)

        def elapsed():
            self.events.append(f"wait {self.name}")
            return time

        return elapsed


def test_graphs_are_timed_in_turns_after_a_warmup():
    events = []
    replays = [Record("a", [9.0, 1.0, 3.0, 2.0], events), Record("b", [99.0, 10.0, 10.0, 40.0], events)]
    assert interleave(replays, rounds=3) == [Sample(2.0, 1.0, 3.0), Sample(10.0, 10.0, 40.0)]
    assert events[:8] == ["enqueue a", "enqueue b"] * 4


def test_a_replay_is_timed_when_l2_holds_what_it_left_there_itself(monkeypatch):
    events = []

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self):
            events.append("stamp")

        def synchronize(self):
            events.append("wait")

        def elapsed_time(self, _):
            return 0.006

    class Graph:
        def replay(self):
            events.append("replay")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    replay = Replay.__new__(Replay)  # a graph is captured on a GPU alone
    replay.graph, replay.launches = Graph(), 3
    elapsed = replay.enqueue()
    assert events == ["replay", "stamp", "replay", "stamp"]
    assert elapsed() == 2.0
    assert events[4:] == ["wait"]


def test_the_gpu_never_idles_between_graphs():
    """A wait in between would add the launch of the next graph to its time."""
    events = []
    interleave([Record("a", [1.0] * 6, events), Record("b", [1.0] * 6, events)], rounds=5)
    kinds = [event.split()[0] for event in events]
    assert kinds == ["enqueue"] * 12 + ["wait"] * 10


def test_a_sample_is_a_median_between_percentiles():
    assert summarise([5.0]) == Sample(5.0, 5.0, 5.0)
    assert summarise([6.0, 1.0, 4.0, 2.0, 5.0, 3.0]) == Sample(3.5, 2.0, 5.0)
