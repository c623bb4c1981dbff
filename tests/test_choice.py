"""What wins, of times that are made up."""

from __future__ import annotations

import math
from collections import Counter
from concurrent.futures import Future

import pytest
import torch

from tunedqk import tune, validate
from tunedqk.choice import first_that_holds, timings_of
from tunedqk.config import KernelConfig, tuning_key
from tunedqk.errors import NoAcceptedConfigError, RejectedConfigError
from tunedqk.tensors import Tensors
from tunedqk.timing import Sample
from tunedqk.workload import TimedShape

KEY = tuning_key(1, 16, "float32", 1)
A, B, C = (KernelConfig(chunk, chunk, num_warps=4) for chunk in (64, 128, 256))
SHAPE = TimedShape(1, 8, [Tensors(torch.empty(4), torch.empty(64))], [torch.empty(4)])


class StubDoor:
    """Accepts all but some configs."""

    def __init__(self, *rejected):
        self.rejected = rejected
        self.asked = []

    def accept(self, _variant, config, _seq_len):
        self.asked.append(config)
        if config in self.rejected:
            raise RejectedConfigError("no", validate.WRONG_RESULT)


def samples_of(**medians):
    names = {"a": A, "b": B, "c": C}
    return {names[name]: [Sample(m, 0.9 * m, 1.1 * m) for m in values] for name, values in medians.items()}


def winner_of(samples, incumbent=None, door=None):
    shapes = [SHAPE] * len(next(iter(samples.values())))
    timings = timings_of(KEY, samples, shapes, None)
    twins = dict.fromkeys(timings, Future())
    next(iter(twins.values())).set_result(None)
    return first_that_holds(KEY, tune.tuned_variant(KEY), door or StubDoor(), timings, twins, Counter(), incumbent)


def test_the_least_worst_slowdown_wins():
    # a is fastest on one batch size, b on the other; c is never far off.
    assert winner_of(samples_of(a=[10.0, 130.0], b=[14.0, 100.0], c=[10.5, 105.0])) == C


@pytest.mark.parametrize(
    ("incumbent_time", "stays"),
    [
        pytest.param(10.0, True, id="as fast"),
        pytest.param(10.04, True, id="0.4 % slower"),
        pytest.param(10.1, False, id="1 % slower"),
    ],
)
def test_a_tie_goes_to_the_incumbent(incumbent_time, stays):
    samples = samples_of(a=[10.0], b=[incumbent_time], c=[12.0])
    assert winner_of(samples) == A
    assert winner_of(samples, incumbent=B) == (B if stays else A)
    assert winner_of(samples, incumbent=KernelConfig(16, 16, 1)) == A  # one that is not in the running


def test_the_next_best_wins_when_the_best_fails_its_validation():
    door = StubDoor(A)
    assert winner_of(samples_of(a=[10.0], b=[11.0], c=[12.0]), incumbent=A, door=door) == B
    assert door.asked == [A, B]


def test_no_finalist_that_holds_is_an_error():
    with pytest.raises(NoAcceptedConfigError, match="wrong result"):
        winner_of(samples_of(a=[10.0], b=[11.0]), door=StubDoor(A, B))


def test_timings_are_of_the_largest_shape_with_their_slowdown():
    timings = timings_of(KEY, samples_of(a=[10.0, 130.0], b=[20.0, 100.0]), [SHAPE, SHAPE], None)
    assert (timings[A].median_us, timings[A].p20_us, timings[A].p80_us) == (130.0, 117.0, 143.0)
    assert (timings[A].worst_slowdown, timings[B].worst_slowdown) == (1.3, 2.0)
    assert timings[A].bytes == SHAPE.bytes == 4 * (4 + 64 + 4)
    assert [shape.median_us for shape in timings[A].shapes] == [10.0, 130.0]


def test_timings_say_how_each_shape_was_timed():
    rotated = SHAPE._replace(tensors=SHAPE.tensors * 2, out=[torch.empty(4), torch.empty(4)])
    shapes = [SHAPE._replace(ragged=True), SHAPE._replace(out=SHAPE.out * 2), rotated]
    timed = timings_of(KEY, samples_of(a=[1.0, 2.0, 3.0]), shapes, None)[A].shapes
    assert [(shape.same_out, shape.ragged) for shape in timed] == [(True, True), (True, False), (False, False)]


def test_the_share_of_the_floor_is_none_without_a_floor():
    asked = []

    def floor_us(shape):
        asked.append(shape)
        return 8.0

    assert timings_of(KEY, samples_of(a=[10.0, 100.0]), [SHAPE, SHAPE], None)[A].floor_share is None
    largest = SHAPE._replace(batch=8)
    assert timings_of(KEY, samples_of(a=[10.0, 100.0]), [SHAPE, largest], floor_us)[A].floor_share == 0.08
    assert asked == [largest]


@pytest.mark.parametrize("time", [pytest.param(math.inf, id="inf"), pytest.param(math.nan, id="nan")])
def test_times_that_are_none_are_an_error_not_a_winner(time):
    # Triton's Autotuner lets the first config win.
    with pytest.raises(NoAcceptedConfigError, match="finite"):
        winner_of(samples_of(a=[time], b=[time]))


def test_who_has_no_time_loses():
    assert winner_of(samples_of(a=[10.0, math.inf], b=[30.0, 40.0])) == B
    assert winner_of(samples_of(a=[math.nan, 10.0], b=[30.0, 40.0], c=[31.0, 41.0])) == B
