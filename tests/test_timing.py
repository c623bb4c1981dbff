"""What a time is made of, with graphs that only keep a record."""

from __future__ import annotations

from tunedqk.timing import Sample, interleave, summarise


class Record:
    """Stands for a Replay: notes when it is enqueued and waited for, and takes what it is told."""

    def __init__(self, name, times, events):
        self.name, self.times, self.events = name, iter(times), events

    def prepare(self):
        self.events.append(f"prepare {self.name}")

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
    assert interleave(replays, rounds=3, warmup=1) == [Sample(2.0, 1.0, 3.0), Sample(10.0, 10.0, 40.0)]
    # Each finds in L2 what it left there itself, not what the other did.
    assert events[:16] == ["prepare a", "enqueue a", "prepare b", "enqueue b"] * 4


def test_the_gpu_never_idles_between_graphs():
    """A wait in between would add the launch of the next graph to its time."""
    events = []
    interleave([Record("a", [1.0] * 6, events), Record("b", [1.0] * 6, events)], rounds=5)
    kinds = [event.split()[0] for event in events]
    assert kinds == ["prepare", "enqueue"] * 12 + ["wait"] * 10


def test_a_sample_is_a_median_between_percentiles():
    assert summarise([5.0]) == Sample(5.0, 5.0, 5.0)
    assert summarise([6.0, 1.0, 4.0, 2.0, 5.0, 3.0]) == Sample(3.5, 2.0, 5.0)
