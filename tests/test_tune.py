"""Tuning one key: what passes the door, what wins, what is counted and stored, and what is left behind."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections import Counter
from pathlib import Path

import msgspec
import mutants
import pytest
import torch
import triton
from triton import knobs
from triton.runtime.errors import OutOfResources

import tunedqk
from tunedqk import accept, builder, launch, tune, validate
from tunedqk.accept import Door
from tunedqk.compile_pool import CompilePool
from tunedqk.config import KernelConfig, search_space, tuning_key
from tunedqk.device import interpreting, toolchain
from tunedqk.errors import CompilerCrashedError, NoAcceptedConfigError, TuningDeclinedError
from tunedqk.tensors import Tensors
from tunedqk.timing import Sample, rotation
from tunedqk.validate import Validator
from tunedqk.workload import BATCHES, TimedShape, Workload, plan

KEY = tuning_key(1, 16, "float32", 1)


@pytest.fixture
def few(device, monkeypatch):
    """Three candidates, three distinct programs: enough for every path, and quick on the interpreter."""
    configs = [KernelConfig(chunk, chunk, num_warps=4) for chunk in (64, 128, 256)]
    monkeypatch.setattr(tune, "candidates", lambda *_: list(configs))
    return configs


@pytest.fixture
def autotuned(monkeypatch):
    """What triton.autotune was asked for, and what went through its hooks, in order."""
    asked, events = [], []
    autotune = triton.autotune

    def spy(configs, key, *, prune_configs_by, do_bench, **options):
        asked.append((configs, key, options))
        prune = prune_configs_by["early_config_prune"]

        def spying_prune(*arguments, **named):
            passed = prune(*arguments, **named)
            events.append(("passed", list(passed)))
            return passed

        def spying_bench(*arguments, **named):
            times = do_bench(*arguments, **named)
            events.append(("timed", times))
            return times

        def decorate(kernel):
            asked[-1] = (*asked[-1], kernel)
            hooks = {"prune_configs_by": {"early_config_prune": spying_prune}, "do_bench": spying_bench}
            return autotune(configs, key, **hooks)(kernel)

        return decorate

    monkeypatch.setattr(triton, "autotune", spy)
    return asked, events


@pytest.fixture
def compiled_elsewhere(monkeypatch):
    """Candidates go the way of a GPU, through a pool of compiling processes; the test says what those do."""
    monkeypatch.setattr(builder, "interpreting", lambda: False)
    monkeypatch.setattr(builder, "target_of", lambda _: None)
    monkeypatch.setattr(builder, "is_built", lambda *_: False)
    monkeypatch.setattr(CompilePool, "start", lambda _: None)


@pytest.fixture
def ranked(few, monkeypatch):
    """The candidates' order after timing: as they are listed."""
    rank = {config: float(1 + place) for place, config in enumerate(few)}
    timings = tune.timings_of

    def ranked_timings(*arguments):
        return {
            config: msgspec.structs.replace(timing, worst_slowdown=rank[config])
            for config, timing in timings(*arguments).items()
        }

    monkeypatch.setattr(tune, "timings_of", ranked_timings)


def spoil(monkeypatch, *configs):
    """Make the binaries of these configs skip a position; of all configs if none is given."""
    build = mutants.builder(mutants.LAST_POSITION_SKIPPED, lambda _, config: not configs or config in configs)
    monkeypatch.setattr(accept, "build", build)


def hash_of(device, config, key=KEY):
    return accept.build(torch.device(device), tune.tuned_variant(key), config).hash


# --- One key ---


def test_a_winner_is_accepted_and_its_receipt_is_stored(device, make_door):
    door = make_door()
    entry = tune.tune(KEY, door)
    assert entry.key == KEY
    assert entry.config in search_space(KEY, interpreted=interpreting())
    assert entry.rejected == {}
    assert entry.toolchain == toolchain()
    assert entry.timing.worst_slowdown >= 1.0
    assert len(entry.timing.shapes) >= 1
    assert entry.timing.bytes > 0
    # Receipts are for what may be launched for a user: the winner alone. The entry is for the caller to store.
    receipts = {receipt.binary: receipt for receipt in door.db.receipts()}
    assert list(receipts) == [hash_of(device, entry.config)]
    assert receipts[hash_of(device, entry.config)].seq_lens == (KEY.seq_len,)
    assert door.db.entries() == []

    later = make_door()
    assert later.accept(tune.tuned_variant(KEY), entry.config, KEY.seq_len)
    assert later.validations == 0


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(tuning_key(1, 16, "bfloat16", 1), id="bf16"),
        pytest.param(tuning_key(1, 16, "float16", 2), id="fp16, 2 rows"),
    ],
)
def test_the_winner_of_16_bits_has_a_twin(device, make_door, few, key):
    door = make_door()
    entry = tune.tune(key, door)
    (receipt,) = door.db.receipts()
    assert receipt.binary == hash_of(device, entry.config, key)
    variant = tune.tuned_variant(key)._replace(out_dtype=torch.float32)
    assert receipt.twin == launch.build(torch.device(device), variant, entry.config).hash


def test_triton_autotune_runs_over_the_candidates(make_door, few, autotuned):
    asked, events = autotuned
    tune.tune(KEY, make_door())
    ((configs, key, options, kernel),) = asked
    assert kernel is launch.qk_score_kernel
    assert {"seq_len", "HEAD_DIM"} <= set(key)
    assert options == {}
    assert [config.kwargs for config in configs] == [config.meta() for config in few]
    assert [(config.num_warps, config.num_stages) for config in configs] == [(c.num_warps, c.num_stages) for c in few]
    # The door lets all through, and each is timed.
    (first, passed), *timed = events
    assert first == "passed"
    assert passed == configs
    assert [name for name, _ in timed] == ["timed"] * len(few)
    assert all(len(times) == 3 for _, times in timed)


def test_there_is_no_private_autotuner():
    for path in Path(tunedqk.__file__).parent.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        assert "triton.runtime.autotuner" not in source, path
        assert "class Autotuner" not in source, path
        for form in ("tl.view", "can_reorder"):
            assert form not in source, path


def test_candidates_are_validated_before_any_is_timed(make_door, few, monkeypatch):
    events = []
    screen = Door.screen

    class Timer(tune.ScreenTimer):
        def __call__(self, call):
            events.append("timed")
            return super().__call__(call)

    def spy(self, binary, *arguments):
        events.append(binary.config)
        return screen(self, binary, *arguments)

    monkeypatch.setattr(Door, "screen", spy)
    monkeypatch.setattr(tune, "ScreenTimer", Timer)
    tune.tune(KEY, make_door())
    # On a GPU the finalists are validated for ragged requests, too.
    assert events == [*few, "timed", "timed", "timed", *([] if interpreting() else few)]


def test_all_candidates_are_being_compiled_when_the_first_is_validated(make_door, few, monkeypatch):
    events = []
    submit, screen = builder.Builder.submit, Door.screen

    def spy_submit(self, variant, config):
        events.append(config)
        return submit(self, variant, config)

    def spy_screen(self, *arguments):
        events.append("screened")
        return screen(self, *arguments)

    monkeypatch.setattr(builder.Builder, "submit", spy_submit)
    monkeypatch.setattr(Door, "screen", spy_screen)
    tune.tune(KEY, make_door())
    assert events[:6] == [*few, "screened", "screened", "screened"]


# --- Candidates that are wrong ---


def test_a_wrong_candidate_is_counted_and_never_wins(device, make_door, few, monkeypatch, autotuned):
    _, events = autotuned
    spoil(monkeypatch, few[1])
    door = make_door()
    entry = tune.tune(KEY, door)
    assert entry.rejected == {"wrong result": 1}
    assert entry.config != few[1]
    (_, passed), *timed = events
    assert [config.kwargs for config in passed] == [few[0].meta(), few[2].meta()]
    assert len(timed) == 2
    receipts = {receipt.binary: receipt.verdict for receipt in door.db.receipts()}
    assert receipts == {hash_of(device, few[1]): "wrong result", hash_of(device, entry.config): "correct"}

    # Tuned again, by another process: the bad one is known and not tried.
    monkeypatch.setattr(mutants.binary_class(mutants.LAST_POSITION_SKIPPED), "launch", None)
    again = tune.tune(KEY, make_door(), incumbent=few[1])
    assert again.rejected == {"wrong result": 1}
    assert again.config != few[1]


def test_candidates_that_do_not_compile_are_counted(make_door, few, monkeypatch):
    def build(device, variant, config):
        if config == few[0]:
            raise OutOfResources(300000, 232448, "shared memory")
        if config == few[1]:
            raise RuntimeError("PassManager::run failed")
        return launch.build(device, variant, config)

    monkeypatch.setattr(accept, "build", build)
    entry = tune.tune(KEY, make_door())
    assert entry.config == few[2]
    assert entry.rejected == {"out of resources": 1, "did not compile": 1}


@pytest.mark.parametrize(
    "out_dtype", [pytest.param(torch.bfloat16, id="itself"), pytest.param(torch.float32, id="twin")]
)
@pytest.mark.usefixtures("compiled_elsewhere", "ranked")
def test_a_candidate_that_crashes_the_compiler_is_counted_and_not_built_here(make_door, few, monkeypatch, out_dtype):
    key = tuning_key(1, 16, "bfloat16", 1)

    def compile_elsewhere(_, __, asked):
        wanted = asked.pointers[2] == {torch.bfloat16: "bf16", torch.float32: "fp32"}[out_dtype]
        if wanted and asked.arguments["CHUNK_SIZE"] in {config.CHUNK_SIZE for config in few[:2]}:
            raise CompilerCrashedError("the compiler crashed: SIGSEGV")
        return True

    def build(device, variant, config):
        assert variant.out_dtype != out_dtype or config == few[2]
        return launch.build(device, variant, config)

    monkeypatch.setattr(CompilePool, "compile", compile_elsewhere)
    monkeypatch.setattr(accept, "build", build)
    entry = tune.tune(key, make_door())
    assert entry.config == few[2]
    assert entry.rejected == {"did not compile": 2}


@pytest.mark.usefixtures("compiled_elsewhere", "few")
def test_what_is_not_built_when_tuning_ends_is_left(make_door, monkeypatch):
    started, going_on = threading.Event(), threading.Event()
    killed = []

    def compile_elsewhere(*_):
        started.set()
        assert going_on.wait(60)
        return False

    def kill(_):
        killed.append(True)
        going_on.set()

    def interrupted(*_):
        assert started.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(CompilePool, "compile", compile_elsewhere)
    monkeypatch.setattr(CompilePool, "kill", kill)
    monkeypatch.setattr(accept, "build", lambda *_: pytest.fail("built though nobody waits"))
    monkeypatch.setattr(tune, "Workload", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tune.tune(KEY, make_door())
    assert killed


@pytest.mark.usefixtures("compiled_elsewhere", "few")
def test_builders_share_the_processes_that_are_kept(make_door, monkeypatch):
    pools, ended = [], []
    monkeypatch.setattr(CompilePool, "compile", lambda pool, *_: pools.append(pool) or True)
    monkeypatch.setattr(CompilePool, "close", lambda pool: ended.append(pool) or None)
    door = make_door()
    with builder.kept_compilers(door):
        kept = door.compilers
        for _ in range(2):
            tune.tune(KEY, door)
        assert set(pools) == {kept}
        assert ended == []
    assert ended == [kept]
    tune.tune(KEY, door)
    assert len(set(pools)) == 2
    assert ended == [kept, pools[-1]]


@pytest.mark.usefixtures("compiled_elsewhere", "few")
def test_an_interrupt_does_not_wait_for_processes_that_are_kept(make_door, monkeypatch):
    ended = []
    monkeypatch.setattr(CompilePool, "compile", lambda *_: True)
    monkeypatch.setattr(CompilePool, "close", lambda pool: ended.append(pool) or None)
    monkeypatch.setattr(tune, "Workload", lambda *_: 1 / 0)
    door = make_door()
    with builder.kept_compilers(door):
        with pytest.raises(ZeroDivisionError):
            tune.tune(KEY, door)
        assert ended == [door.compilers]


@pytest.mark.usefixtures("compiled_elsewhere", "few")
def test_a_builder_that_finds_no_target_leaves_no_process(make_door, monkeypatch):
    closed = []
    monkeypatch.setattr(CompilePool, "close", lambda _: closed.append(True))
    monkeypatch.setattr(builder, "target_of", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tune.tune(KEY, make_door())
    assert closed == [True]


@pytest.mark.gpu
def test_candidates_are_compiled_by_other_processes(make_door, tmp_path, monkeypatch, caplog):
    key = tuning_key(1, 24, "float16", 1)  # no other test compiles it
    compiled = Counter()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(
        knobs.compilation, "listener", lambda *, src, cache_hit, **_: compiled.update([(src.name, cache_hit)])
    )
    tune.tune(key, make_door())
    assert compiled["qk_score_kernel", True] >= len(search_space(key)), caplog.text
    assert compiled["qk_score_kernel", False] == 0


def test_all_wrong_is_an_error_and_all_verdicts_are_stored(device, make_door, few, monkeypatch):
    spoil(monkeypatch)
    door = make_door()
    with pytest.raises(NoAcceptedConfigError, match=r"head_dim 16.*'wrong result': 3"):
        tune.tune(KEY, door)
    stored = make_door().db
    assert {receipt.binary: receipt.verdict for receipt in stored.receipts()} == {
        hash_of(device, config): "wrong result" for config in few
    }
    assert stored.entries() == []
    # Known by now: no validation runs.
    later = make_door()
    with pytest.raises(NoAcceptedConfigError):
        tune.tune(KEY, later)
    assert later.validations == 0


@pytest.mark.parametrize("right", [pytest.param(True, id="right"), pytest.param(False, id="wrong")])
def test_an_only_candidate_passes_the_door_too(make_door, monkeypatch, right):
    # triton.autotune launches an only config unseen.
    only = KernelConfig(64, 64, num_warps=4)
    monkeypatch.setattr(tune, "candidates", lambda *_: [only])
    if right:
        assert tune.tune(KEY, make_door()).config == only
        return
    spoil(monkeypatch, only)
    with pytest.raises(NoAcceptedConfigError):
        tune.tune(KEY, make_door())


def test_an_only_survivor_is_tuned(make_door, few, monkeypatch):
    spoil(monkeypatch, *few[:2])
    entry = tune.tune(KEY, make_door())
    assert entry.config == few[2]
    assert entry.rejected == {"wrong result": 2}


@pytest.mark.usefixtures("ranked")
def test_a_winner_whose_fp32_twin_is_wrong_gives_way(make_door, few, monkeypatch):
    key = tuning_key(1, 16, "bfloat16", 1)

    def is_wrong(variant, config):
        return variant.out_dtype == torch.float32 and config in few[:2]

    monkeypatch.setattr(accept, "build", mutants.builder(mutants.BF16_PRODUCTS, is_wrong))
    door = make_door()
    entry = tune.tune(key, door)
    assert entry.config == few[2]
    assert entry.rejected == {"wrong result": 2}
    assert sorted(receipt.verdict for receipt in door.db.receipts()) == ["correct", "wrong result", "wrong result"]


def test_the_search_stops_when_no_finalist_has_a_right_twin(make_door, few, monkeypatch):
    key = tuning_key(1, 16, "bfloat16", 1)
    build = mutants.builder(mutants.BF16_PRODUCTS, lambda variant, _: variant.out_dtype == torch.float32)
    monkeypatch.setattr(accept, "build", build)
    with pytest.raises(NoAcceptedConfigError, match="'wrong result': 3"):
        tune.tune(key, make_door())


# --- Finalists ---

A, B, C = (KernelConfig(chunk, chunk, num_warps=4) for chunk in (64, 128, 256))
SHAPE = TimedShape(1, 8, [Tensors(torch.empty(4), torch.empty(64))], [torch.empty(4)])


def test_the_incumbent_is_a_finalist_however_slow_its_screening(device, make_door, monkeypatch):
    monkeypatch.setattr(tune, "FINALISTS", 1)
    screening = tune._Screening(KEY, make_door(), SHAPE, {})
    for config, median in ((A, 10.0), (B, 11.0), (C, 30.0)):
        screening.accepted[config] = launch.build(torch.device(device), tune.tuned_variant(KEY), config)
        screening.samples[config] = Sample(median, median, median)
    assert list(screening.fastest(None)) == [A]
    assert list(screening.fastest(C)) == [A, C]
    assert list(screening.fastest(A)) == [A]
    del screening.samples[C]  # never timed, so it might be the fastest
    assert list(screening.fastest(None)) == [C]


def test_finalists_have_to_be_right_for_ragged_requests_too(device, make_door, monkeypatch):
    door, rejected = make_door(), tune.Counter()
    variant = tune.tuned_variant(KEY)
    finalists = {config: launch.build(torch.device(device), variant, config) for config in (A, B)}
    screen = Door.screen

    def strict(self, binary, seq_len):
        verdict = screen(self, binary, seq_len)
        return verdict._replace(verdict=validate.WRONG_RESULT) if binary.config == A else verdict

    monkeypatch.setattr(Door, "screen", strict)
    with builder.Builder(door, []) as own:
        ragged = tune._as_ragged(KEY, finalists, own, door, rejected)
        assert {config: binary.variant for config, binary in ragged.items()} == {
            B: variant._replace(seq_lens=torch.int32)
        }
        assert rejected == {validate.WRONG_RESULT: 1}
        # The other calls shall have a winner nevertheless.
        assert tune._as_ragged(KEY, {A: finalists[A]}, own, door, rejected) == {}
        # Where all calls are ragged, the candidates were.
        paged = tuning_key(1, 16, "float32", 1, page_size=16)
        assert tune._as_ragged(paged, {}, own, door, rejected) == {}
    door.release()


def test_a_key_is_timed_at_as_many_sequences_as_it_stands_for(make_door, few, monkeypatch):
    asked = []

    class Spy(Workload):
        def __init__(self, device, variant, seq_len, batches):
            asked.append((seq_len, batches))
            super().__init__(device, variant, seq_len, batches)

    monkeypatch.setattr(tune, "Workload", Spy)
    for sequences in (8, 64):
        tune.tune(msgspec.structs.replace(KEY, sequences=sequences), make_door())
    assert asked == [(512, (1,)), (512, (8, 64))]


def test_each_candidate_has_its_own_time(make_door, few, monkeypatch):
    """The fastest by the clock is the first finalist, whichever it is."""
    timed, calls = [], TimedShape.calls

    def spy(self, binary):
        timed.append(binary.config)
        return calls(self, binary)

    monkeypatch.setattr(TimedShape, "calls", spy)
    monkeypatch.setattr(tune.ScreenTimer, "__call__", lambda *_: Sample(*[float(len(timed))] * 3))
    screened = []
    monkeypatch.setattr(tune._Screening, "fastest", lambda self, _: screened.append(self.samples) or self.accepted)
    tune.tune(KEY, make_door())
    assert timed[: len(few)] == few
    assert {config: sample.median for config, sample in screened[0].items()} == dict(zip(few, (1, 2, 3), strict=True))


L2 = 50 << 20
MIB = 1 << 20


@pytest.mark.parametrize(
    ("batches", "row", "limit", "room", "expected"),
    [
        pytest.param((1,), 16 * MIB, 1024 * MIB, 8192 * MIB, {1: 13}, id="one request: four times L2"),
        pytest.param((1,), 16 * MIB, 64 * MIB, 8192 * MIB, {1: 4}, id="as many sets as fit"),
        pytest.param((8, 64), 16 * MIB, 1024 * MIB, 8192 * MIB, {8: 2, 64: 1}, id="both batches"),
        pytest.param((8, 64), 16 * MIB, 512 * MIB, 8192 * MIB, {8: 2}, id="the larger does not fit"),
        pytest.param((8, 64), 16 * MIB, 1024 * MIB, 130 * MIB, {8: 1}, id="into what is free"),
        pytest.param((8, 64), 512 * MIB, 1024 * MIB, 8192 * MIB, {4: 1}, id="none fits: half the smallest"),
        pytest.param((8, 64), 512 * MIB, 1024 * MIB, 2047 * MIB, {}, id="not even that"),
        pytest.param((1,), 16 * MIB, 1024 * MIB, 15 * MIB, {}, id="not even one request"),
        pytest.param((1,), 2048 * MIB, 1024 * MIB, 8192 * MIB, {1: 1}, id="one request beyond the limit"),
        pytest.param((1,), 8192, 1024 * MIB, 8192 * MIB, {1: 1024}, id="sets of a few KB"),
    ],
)
def test_a_plan_of_what_is_timed(batches, row, limit, room, expected):
    assert plan(batches, row, limit, room, L2) == expected


def test_ragged_shapes_have_spread_lengths_and_else_the_same_tensors(device):
    variant = tune.tuned_variant(KEY)
    work = Workload(torch.device(device), variant, 512, BATCHES[64])
    same = [shape for shape in work.shapes if shape.same_out]
    for shape, ragged in zip(same, work.ragged_shapes(), strict=True):
        assert ragged.ragged
        assert not shape.ragged
        assert ragged.out is shape.out
        for tensors, plain in zip(ragged.tensors, shape.tensors, strict=True):
            assert tensors.seq_lens.tolist() == [512 * (b + 1) // shape.batch for b in range(shape.batch)]
            assert all(x is y for x, y in zip(tensors._replace(seq_lens=None), plain, strict=True))
    three = work._ragged(same[0]._replace(batch=3)).tensors[0].seq_lens  # on a CPU there is one request alone
    assert (three.tolist(), three.dtype) == ([170, 341, 512], tune.ragged_form(variant).seq_lens)


def test_who_is_slow_for_ragged_requests_does_not_win(make_door, few, monkeypatch):
    """The way that a GPU goes, with made-up times: the best elsewhere takes twice as long there."""
    monkeypatch.setattr(tune, "interpreting", lambda: False)
    monkeypatch.setattr(tune.ScreenTimer, "__call__", lambda *_: Sample(1.0, 1.0, 1.0))
    monkeypatch.setattr(TimedShape, "replay", lambda shape, binary: (shape, binary))

    def interleave(replays, _):
        assert [binary.config for _, binary in replays] == few
        assert {binary.variant.ragged for _, binary in replays} == {replays[0][0].ragged}
        times = (20.0, 11.0, 12.0) if replays[0][0].ragged else (10.0, 11.0, 12.0)
        return [Sample(time, time, time) for time in times]

    monkeypatch.setattr(tune, "interleave", interleave)
    entry = tune.tune(KEY, make_door())
    assert entry.config == few[1]
    times = dict.fromkeys((shape.ragged, shape.median_us) for shape in entry.timing.shapes)
    assert list(times) == [(True, 11.0), (False, 11.0)]
    assert entry.timing.worst_slowdown == 1.1
    # Were none of them right there, the others would decide.
    monkeypatch.setattr(tune, "_as_ragged", lambda *_: {})
    entry = tune.tune(KEY, make_door())
    assert entry.config == few[0]
    assert {shape.ragged for shape in entry.timing.shapes} == {False}


def test_only_who_is_right_for_ragged_shapes_is_compared(monkeypatch):
    timed = []

    class Shape:
        def __init__(self, ragged):
            self.ragged = ragged

        def replay(self, binary):
            timed.append(binary)
            return binary

    class Door:
        def launching(self, *_):
            return contextlib.nullcontext()

    monkeypatch.setattr(tune, "interleave", lambda replays, _: [Sample(1.0, 1.0, 1.0)] * len(replays))
    samples = tune._compare({A: "a", B: "b"}, {B: "ragged b"}, [Shape(True), Shape(False)], Door())
    assert timed == ["ragged b", "b"]
    assert samples == {B: [Sample(1.0, 1.0, 1.0)] * 2}
    timed.clear()
    tune._compare({A: "a", B: "b"}, {}, [Shape(False)], Door())
    assert timed == ["a", "b"]


def test_an_incumbent_stays_through_a_whole_tuning(make_door, few, monkeypatch):
    same = Sample(10.0, 10.0, 10.0)
    monkeypatch.setattr(tune.ScreenTimer, "__call__", lambda *_: same)
    monkeypatch.setattr(
        tune, "_compare", lambda finalists, _, shapes, *__: {c: [same] * len(shapes) for c in finalists}
    )
    assert tune.tune(KEY, make_door(), incumbent=few[2]).config == few[2]
    assert tune.tune(KEY, make_door(), incumbent=few[0]).config == few[0]


def test_an_entry_has_the_share_of_the_floor(make_door, few):
    assert tune.tune(KEY, make_door()).timing.floor_share is None
    assert tune.tune(KEY, make_door(), floor_us=lambda _: 1.0).timing.floor_share is not None


# --- Memory ---


class Cut(Exception):  # noqa: N818  not an error of anybody's
    pass


def interrupted(*_):
    raise Cut


# name, what to break, with what, and what comes out.
ENDINGS = [
    pytest.param(None, None, None, id="a winner"),
    pytest.param(accept, "build", NoAcceptedConfigError, id="no accepted config"),
    pytest.param(Validator, "check", Cut, id="an error while validating"),
    pytest.param(tune.ScreenTimer, "__call__", Cut, id="an error while timing"),
    pytest.param(tune, "timings_of", Cut, id="an error after timing"),
]


@pytest.mark.parametrize(("owner", "name", "error"), ENDINGS)
def test_tuning_leaves_no_memory_behind(device, make_door, few, monkeypatch, owner, name, error):
    if device == "cuda":
        tune.tune(KEY, make_door())  # what torch and triton keep for themselves
    left = []

    class SpiedWorkload(Workload):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            left.append(weakref.ref(self._pool))
            tensors = [x for shape in self.shapes for given in shape.tensors for x in given.given.values()]
            left.extend(weakref.ref(x) for x in (*tensors, *[out for shape in self.shapes for out in shape.out]))

    class SpiedValidator(Validator):
        def check(self, *arguments):
            verdict = super().check(*arguments)
            left.extend(weakref.ref(inputs.numbers.k) for inputs in self._judging)
            return verdict

    monkeypatch.setattr(tune, "Workload", SpiedWorkload)
    monkeypatch.setattr(accept, "Validator", SpiedValidator)
    if error is NoAcceptedConfigError:
        spoil(monkeypatch)
    elif error is not None:
        monkeypatch.setattr(SpiedValidator if owner is Validator else owner, name, interrupted)
    door = make_door()
    gc.collect()
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    try:
        tune.tune(KEY, door)
    except (Cut, NoAcceptedConfigError) as caught:
        assert type(caught) is error  # noqa: PT017  pytest.raises would keep the traceback, and the tensors in it
    else:
        assert error is None
    gc.collect()
    assert left
    assert not [reference for reference in left if reference() is not None]
    assert door._validator is None
    if device == "cuda":
        assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu
def test_tuning_declines_when_little_memory_is_free(make_door, monkeypatch):
    key = tuning_key(8192, 128, "bfloat16", 1)  # 16 MiB of keys at batch 1
    total = torch.cuda.mem_get_info()[1]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (32 << 20, total))
    before = torch.cuda.memory_allocated()
    with pytest.raises(TuningDeclinedError, match=r"16 MiB.*32 MiB"):
        tune.tune(key, make_door())
    assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("sequences", "free", "batches"),
    [
        pytest.param(8, 48 << 20, [1], id="a request, 48 MiB free"),
        pytest.param(8, 16 << 30, [1], id="a request, 16 GiB free"),
        pytest.param(64, 200 << 20, [4], id="a batch, 200 MiB free"),
        pytest.param(64, 400 << 20, [8], id="a batch, 400 MiB free"),
        pytest.param(64, 16 << 30, [8, 64], id="a batch, 16 GiB free"),
    ],
)
def test_the_workload_shrinks_to_what_is_free(device, monkeypatch, sequences, free, batches):
    key = tuning_key(8192, 128, "bfloat16", 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free, free))
    before = torch.cuda.memory_allocated()
    work = Workload(torch.device(device), tune.tuned_variant(key), key.seq_len, BATCHES[sequences])
    assert sorted({shape.batch for shape in work.shapes}) == batches
    assert torch.cuda.memory_allocated() - before <= free


@pytest.mark.gpu
def test_outputs_are_one_and_rotate_through_the_l2_cache(device):
    variant = tune.tuned_variant(tuning_key(8192, 128, "bfloat16", 4))
    same, rotated = Workload(torch.device(device), variant, 8192, (8,)).shapes
    assert (same.same_out, rotated.same_out) == (True, False)
    assert len({out.data_ptr() for out in same.out}) == 1
    outputs = {out.data_ptr(): out.nbytes for out in rotated.out}
    assert sum(outputs.values()) >= torch.cuda.get_device_properties(device).L2_cache_size
    # Else they are timed on the same keys, as often.
    assert [x.data_ptr() for x in same.k] == [x.data_ptr() for x in rotated.k]
    assert len(same.launches(launch.build(torch.device(device), variant, A))) == len(rotated.out)


@pytest.mark.gpu
@pytest.mark.parametrize("seq_len", [512, 2048])
def test_a_small_shape_is_launched_no_more_often_than_its_keys_need(device, seq_len):
    variant = tune.tuned_variant(tuning_key(seq_len, 64, "bfloat16", 1))
    for shape in Workload(torch.device(device), variant, seq_len, (1,)).shapes:
        binary = launch.build(torch.device(device), variant, A)
        keys = rotation(shape.k[0].nbytes, torch.cuda.get_device_properties(device).L2_cache_size)
        assert len(shape.calls(binary)) <= max(keys, 500)


@pytest.mark.gpu
def test_candidates_fit_the_shared_memory_of_this_gpu(device):
    key = tuning_key(8192, 576, "bfloat16", 16)
    limit = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    assert 1 <= len(tune.candidates(key, torch.device(device))) <= len(search_space(key))
    for config in tune.candidates(key, torch.device(device)):
        assert tune.fits_shared_memory(config, key, limit)
