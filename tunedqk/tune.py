"""Tuning a key: triton.autotune over the candidates that validated, then a closer look at the fastest.

Triton's Autotuner asks two hooks of ours. `early_config_prune` is the door: it compiles the candidates in parallel and
lets through those that agree with the loop kernel. `do_bench` times each of them briefly. What the Autotuner cannot do,
comparing in turns and over several batch sizes, follows from our own records.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
import triton

from tunedqk.accept import float32_twin, now
from tunedqk.builder import Builder
from tunedqk.choice import NONE_IS_RIGHT, Samples, first_that_holds, timings_of
from tunedqk.config import KernelConfig, TuningKey, fits_shared_memory, search_space
from tunedqk.device import interpreting, toolchain
from tunedqk.errors import NoAcceptedConfigError
from tunedqk.kernels.vectorized import qk_score_kernel
from tunedqk.launch import Binary, forget, programs
from tunedqk.records import Entry
from tunedqk.tensors import FP8_NAMES, TORCH_DTYPES
from tunedqk.timing import Sample, ScreenTimer, interleave
from tunedqk.variant import Variant, geometry, shape_constexprs, triton_config
from tunedqk.workload import BATCHES, TimedShape, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future

    from tunedqk.accept import Built, Door

FINALISTS = 6
ROUNDS = 5


def tuned_variant(key: TuningKey) -> Variant:
    """The variant that stands for a key when it is tuned: bfloat16 queries for float8 keys, int32 for a block table."""
    k_dtype = TORCH_DTYPES[key.dtype]
    fp8 = k_dtype if k_dtype in FP8_NAMES else None
    dtype = torch.bfloat16 if fp8 else k_dtype
    index = torch.int32 if key.page_size else None
    return Variant(
        key.head_dim, group=key.rows, dtype=dtype, out_dtype=dtype, aligned=True, fp8=fp8,
        seq_lens=index, block_table=index, page_size=key.page_size,
    )  # fmt: skip


def ragged_form(variant: Variant) -> Variant:
    """The variant of calls with the same key whose requests differ in length; the same where it is one already."""
    return variant if variant.ragged else variant._replace(seq_lens=torch.int32)


def candidates(key: TuningKey, device: torch.device) -> list[KernelConfig]:
    """The search space of a key, less what cannot fit this GPU's shared memory."""
    if interpreting():
        return search_space(key, interpreted=True)
    limit: int = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    return [config for config in search_space(key) if fits_shared_memory(config, key, limit)]


def is_candidate(config: KernelConfig, key: TuningKey, device: torch.device) -> bool:
    """Whether tuning would consider it today: a stored winner may be of another search space, or too large here."""
    return config in candidates(key, device)


def tune(
    key: TuningKey,
    door: Door,
    *,
    incumbent: KernelConfig | None = None,
    floor_us: Callable[[TimedShape], float] | None = None,
    configs: list[KernelConfig] | None = None,
) -> Entry:
    """Find the winner of a key on the door's device. Only receipts are stored; the entry is for the caller to store.

    incumbent: stays on a tie. floor_us: what a shape takes at the memory floor, for `floor_share`. configs: what to
    choose from, by default all candidates.
    NoAcceptedConfigError when no candidate is right; TuningDeclinedError when too little memory is free.
    """
    try:
        return _search(key, door, configs or candidates(key, door.device), incumbent, floor_us)
    finally:
        door.release()
        if door.device.type == "cuda" and not door.crashed:
            torch.cuda.empty_cache()


def _search(
    key: TuningKey,
    door: Door,
    configs: list[KernelConfig],
    incumbent: KernelConfig | None,
    floor_us: Callable[[TimedShape], float] | None,
) -> Entry:
    variant = tuned_variant(key)
    # The next length of a shape has the same binaries.
    forget(door.device, but=(variant, float32_twin(variant), ragged_form(variant)))
    # Compiling takes longest: it runs while tensors are made, and while what is ready is validated.
    with Builder(door, [(variant, config) for config in configs]) as builder:
        builds = {config: builder.submit(variant, config) for config in configs}
        workload = Workload(door.device, variant, key.seq_len, BATCHES[key.sequences])
        screening = _Screening(key, door, workload.screening, builds)
        screening.run()
        finalists, rejected = screening.fastest(incumbent), screening.rejected
        twins = {config: builder.submit(float32_twin(variant), config) for config in finalists}
        if interpreting():  # the screening is all there is: its times say nothing about a GPU
            samples, shapes = _screened(screening, finalists), workload.shapes
        else:
            ragged = _as_ragged(key, finalists, builder, door, rejected)
            shapes = [*workload.ragged_shapes(), *workload.shapes] if ragged else workload.shapes
            samples = _compare(finalists, ragged, shapes, door)
        timings = timings_of(key, samples, shapes, floor_us)
        winner = first_that_holds(key, variant, door, timings, twins, rejected, incumbent)
    return Entry(key, winner, timings[winner], dict(rejected), toolchain(), now())


def _admitted(
    key: TuningKey,
    variant: Variant,
    builds: dict[KernelConfig, Future[Built]],
    door: Door,
    rejected: Counter[str],
) -> tuple[dict[KernelConfig, Binary], str]:
    """The door: the binaries that are right, each validated as soon as it is compiled, and what the first fault was."""
    # Made while the first are being compiled.
    door.prepare(variant, key.seq_len, capacity=max(config.CHUNK_SIZE for config in builds))
    accepted, first = {}, ""
    for config, build in builds.items():
        binary, compiled = build.result()
        verdict = compiled if binary is None else door.screen(binary, key.seq_len)
        if binary is not None and verdict.correct:
            accepted[config] = binary
        else:
            rejected[verdict.verdict] += 1
            first = first or f"config ({config}): {verdict.what}"
    return accepted, first


class _Screening:
    """One run of triton.autotune over a key's candidates, with the door and a clock as its hooks."""

    def __init__(
        self, key: TuningKey, door: Door, shape: TimedShape, builds: dict[KernelConfig, Future[Built]]
    ) -> None:
        self.key = key
        self.door = door
        self.builds = builds
        self.shape = shape
        self.variant = tuned_variant(key)
        self.accepted: dict[KernelConfig, Binary] = {}
        self.samples: dict[KernelConfig, Sample] = {}
        self.rejected: Counter[str] = Counter()
        self._timer = ScreenTimer(door.device)

    def run(self) -> None:
        """Fill accepted, samples and rejected."""
        by_triton_config = {triton_config(config): config for config in self.builds}

        def early_config_prune(pruned: Iterable[triton.Config], *_: Any, **__: Any) -> list[triton.Config]:
            ours = {by_triton_config[config]: config for config in pruned}
            self._admit()
            return [ours[config] for config in self.accepted]

        def do_bench(*_: Any, **__: Any) -> list[float]:
            # Called for one config after the other, in the order that the door returned. The call that Triton passes
            # is the same launch, by way of its own launcher, on the same few tensors each time.
            config, binary = list(self.accepted.items())[len(self.samples)]
            with self.door.launching(binary):
                self.samples[config] = self._timer(self.shape.calls(binary))
            return list(self.samples[config])

        if len(self.builds) == 1:  # triton.autotune would launch an only config unseen
            self._admit()
            return
        tuned = triton.autotune(
            configs=list(by_triton_config),
            key=["seq_len", "HEAD_DIM"],
            prune_configs_by={"early_config_prune": early_config_prune},
            do_bench=do_bench,
        )(qk_score_kernel)
        tensors, out = self.shape.tensors[0], self.shape.out[0]
        q, k, *others = tensors
        sizes = geometry(tensors, out, "NHD", fill_tail=True)

        def grid(meta: dict[str, Any]) -> tuple[int]:
            return (programs(self.variant, meta["CHUNK_SIZE"], sizes),)

        tuned[grid](q, k, out, *others, 1.0, 0.0, *sizes, **shape_constexprs(self.variant))

    def _admit(self) -> None:
        self.accepted, first = _admitted(self.key, self.variant, self.builds, self.door, self.rejected)
        if not self.accepted:
            raise NoAcceptedConfigError(NONE_IS_RIGHT.format(self.key, "candidate", dict(self.rejected), first))

    def fastest(self, incumbent: KernelConfig | None) -> dict[KernelConfig, Binary]:
        """The finalists: the fastest of the screening, and the incumbent. A config that was not timed goes first."""
        ranked = sorted(
            self.accepted, key=lambda config: self.samples[config].median if config in self.samples else 0.0
        )
        chosen = ranked[:FINALISTS] + [config for config in ranked[FINALISTS:] if config == incumbent]
        return {config: self.accepted[config] for config in chosen}


def _as_ragged(
    key: TuningKey, finalists: dict[KernelConfig, Binary], builder: Builder, door: Door, rejected: Counter[str]
) -> dict[KernelConfig, Binary]:
    """Binaries of the finalists for requests that differ in length; none for a key whose calls all do.

    The loop over chunks takes registers, so that a config that is among the fastest without it can lose a tenth.
    None, too, where not one is right: the other calls shall have a winner nevertheless.
    """
    form = ragged_form(tuned_variant(key))
    if form == tuned_variant(key):
        return {}
    builds = {config: builder.submit(form, config) for config in finalists}
    return _admitted(key, form, builds, door, rejected)[0]


def _compare(
    finalists: dict[KernelConfig, Binary],
    ragged: dict[KernelConfig, Binary],
    shapes: list[TimedShape],
    door: Door,
) -> Samples:
    """Time the finalists in turns, on each shape. One that is not right for ragged shapes is none, if there are any."""
    configs = [config for config in finalists if not ragged or config in ragged]
    samples: Samples = {config: [] for config in configs}
    with door.launching(*finalists.values(), *ragged.values()):
        for shape in shapes:
            binaries = ragged if shape.ragged else finalists
            replays = [shape.replay(binaries[config]) for config in configs]
            for config, sample in zip(configs, interleave(replays, ROUNDS), strict=True):
                samples[config].append(sample)
    return samples


def _screened(screening: _Screening, finalists: Iterable[KernelConfig]) -> Samples:
    unknown = Sample(0.0, 0.0, 0.0)
    return {config: [screening.samples.get(config, unknown)] for config in finalists}
