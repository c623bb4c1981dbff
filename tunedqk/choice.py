"""What wins: of configs timed on several shapes, the one that is right and nowhere much slower than the best."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from tunedqk.config import KernelConfig
from tunedqk.errors import NoAcceptedConfigError, RejectedConfigError
from tunedqk.records import Shape, Timing
from tunedqk.timing import Sample

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable
    from concurrent.futures import Future

    from tunedqk.accept import Built, Door
    from tunedqk.config import TuningKey
    from tunedqk.variant import Variant
    from tunedqk.workload import TimedShape

TIE = 1.005  # within this of the best, the incumbent stays
NONE_IS_RIGHT = (
    "{}: no {} agreed with the loop kernel ({}; the first: {}). No winner is stored. Report this, and try another "
    "release of Triton"
)

Samples = dict[KernelConfig, list[Sample]]  # one sample per shape


def timings_of(
    key: TuningKey, samples: Samples, shapes: list[TimedShape], floor_us: Callable[[TimedShape], float] | None
) -> dict[KernelConfig, Timing]:
    """Each config's record: the times of the largest shape, and the worst slowdown over all of them.

    A time that is no number is none. If nobody has one it is an error: triton.autotune would let the first config win.
    """
    samples = {config: times for config, times in samples.items() if all(map(math.isfinite, itertools.chain(*times)))}
    if not samples:
        raise NoAcceptedConfigError(f"{key}: no time that was measured is finite, so nothing wins: is the GPU well?")
    bests = [min(sample.median for sample in of_shape) for of_shape in zip(*samples.values(), strict=True)]
    floor = floor_us(shapes[-1]) if floor_us else None
    timings = {}
    for config, of_config in samples.items():
        largest = of_config[-1]
        slowdowns = [sample.median / best if best else 1.0 for sample, best in zip(of_config, bests, strict=True)]
        timings[config] = Timing(
            median_us=round(largest.median, 3),
            p20_us=round(largest.p20, 3),
            p80_us=round(largest.p80, 3),
            bytes=shapes[-1].bytes,
            floor_share=None if floor is None else round(floor / largest.median, 4),
            worst_slowdown=round(max(slowdowns), 4),
            shapes=tuple(
                Shape(shape.batch, shape.kv_heads, round(sample.median, 3), shape.same_out, shape.ragged)
                for shape, sample in zip(shapes, of_config, strict=True)
            ),
        )
    return timings


def first_that_holds(
    key: TuningKey,
    variant: Variant,
    door: Door,
    timings: dict[KernelConfig, Timing],
    twins: dict[KernelConfig, Future[Built]],
    rejected: Counter[str],
    incumbent: KernelConfig | None,
) -> KernelConfig:
    """The config with the least worst slowdown whose validation is complete; ties go to the incumbent."""
    order = sorted(timings, key=lambda config: timings[config].worst_slowdown)
    if incumbent in timings and timings[incumbent].worst_slowdown <= timings[order[0]].worst_slowdown * TIE:
        order.remove(incumbent)
        order.insert(0, incumbent)
    first = ""
    for config in order:
        twins[config].result()  # the door would not know that it is being compiled, and compile it here
        try:
            door.accept(variant, config, key.seq_len)
        except RejectedConfigError as error:
            rejected[error.verdict] += 1
            first = first or str(error)
        else:
            return config
    raise NoAcceptedConfigError(NONE_IS_RIGHT.format(key, "finalist with float32 output", dict(rejected), first))
