"""From a call to an accepted binary: the modes, misses, bad winners, fresh processes, threads."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import mutants
import pytest
import torch
import triton
from conftest import nothing_bound
from reference import assert_scores, make_inputs, poisoned
from test_db import MALFORMED, make_folder

from tunedqk import accept, cli, launch, ready, resolve, tune
from tunedqk.config import KernelConfig, default_config, tuning_key
from tunedqk.db import TuningDB, load_file
from tunedqk.device import identity_of, interpreting, toolchain
from tunedqk.errors import (
    MissingConfigError,
    NoAcceptedConfigError,
    RejectedConfigError,
    TuningDBWarning,
    TuningDeclinedError,
)
from tunedqk.records import Entry, Timing
from tunedqk.resolve import Mode, resolver_for
from tunedqk.score import qk_score
from tunedqk.serving import explain
from tunedqk.timing import Sample

KEY = tuning_key(1, 16, "float32", 1)
ODD = KernelConfig(32, 32, num_warps=2)  # tuning never finds it, but here it counts as a candidate
GONE = KernelConfig(16, 16, num_warps=1)  # in no search space
PROJECT = Path(resolve.__file__).parents[1]


@pytest.fixture
def _fresh(cache_dir):
    """As a process starts: nothing ready, no resolver, an empty user DB."""
    with pytest.MonkeyPatch.context() as patch:
        nothing_bound(patch)
        patch.setattr(resolve, "is_candidate", lambda config, *rest: config == ODD or tune.is_candidate(config, *rest))
        resolver_for.cache_clear()
        yield
    resolver_for.cache_clear()


pytestmark = pytest.mark.usefixtures("_fresh")


@pytest.fixture
def restart(monkeypatch):
    """Forget all that a process knows."""

    def forget():
        nothing_bound(monkeypatch)
        resolver_for.cache_clear()

    return forget


@pytest.fixture
def few(monkeypatch):
    """Two candidates, for quick tunings."""
    configs = [KernelConfig(chunk, chunk, num_warps=4) for chunk in (128, 256)]
    monkeypatch.setattr(tune, "candidates", lambda *_: list(configs))
    return configs


@pytest.fixture
def mode(monkeypatch):
    """Set TUNEDQK_MODE."""
    return lambda name: monkeypatch.setenv("TUNEDQK_MODE", name)


def target_of(device):
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")


def resolver_of(device):
    return resolver_for(target_of(device))


def call(device, seq_len=40, dtype=torch.float32, group=1, **options):
    """One call whose result is checked."""
    q, k = make_inputs(1, group, 1, seq_len, 16, dtype, device)
    scores = qk_score(q, k, **options)
    assert_scores(scores, q, k)
    return scores


def store(device, config, key=KEY):
    """A winner in the user DB, as another process would have left it; without a receipt."""
    entry = Entry(key, config, Timing(10.0, 9.0, 11.0, 1024, None, 1.0), {}, toolchain(), "2026-01-02T03:04:05Z")
    assert TuningDB(identity_of(target_of(device))).record(entries=[entry])


def winner(device, key=KEY):
    found = TuningDB(identity_of(target_of(device))).winners(key)
    return found[0].entry.config if found else None


def ready_configs():
    return [binary.config for binary in ready.binaries.values()]


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def forbidden(*_, **__):
    raise AssertionError("called")


# --- Mode tune ---


def test_the_first_call_tunes_once_and_says_so(device, few, caplog):
    call(device)
    assert resolver_of(device).tunings == 1
    (warning,) = warnings_of(caplog)
    assert str(KEY) in warning
    assert "pretune" in warning
    assert "TUNEDQK_MODE" in warning
    assert winner(device) in few
    assert ready_configs() == [winner(device)]

    call(device)
    call(device, seq_len=41)
    call(device, seq_len=500)
    assert resolver_of(device).tunings == 1
    assert len(warnings_of(caplog)) == 1


def test_the_warning_comes_before_the_tuning(device, few, caplog, monkeypatch):
    seen = []

    def spy(*arguments):
        seen.append(warnings_of(caplog))
        return tune.tune(*arguments)

    monkeypatch.setattr(resolve, "tune", spy)
    call(device)
    assert len(seen) == 1
    assert len(seen[0]) == 1


def test_a_later_process_neither_tunes_nor_validates(device, few, caplog, restart, monkeypatch):
    call(device)
    caplog.clear()
    restart()
    monkeypatch.setattr(resolve, "tune", forbidden)
    call(device)
    resolver = resolver_of(device)
    assert (resolver.tunings, resolver.door.validations) == (0, 0)
    assert warnings_of(caplog) == []


def test_another_variant_is_validated_but_not_tuned(device, few):
    call(device)
    resolver = resolver_of(device)
    before = resolver.door.validations
    call(device, out_dtype=torch.float16)
    assert resolver.tunings == 1
    # With its twin, whose fp32 output is that of the first call and was validated then.
    assert 1 <= resolver.door.validations - before <= 2
    assert len(set(ready_configs())) == 1


def test_groups_of_one_key_share_a_tuning(device, few):
    call(device, dtype=torch.bfloat16, group=3)
    call(device, dtype=torch.bfloat16, group=4)
    assert resolver_of(device).tunings == 1
    assert len(ready.binaries) == 2


def test_a_tuning_that_declines_falls_back(device, caplog, monkeypatch):
    def decline(*_):
        raise TuningDeclinedError("little memory")

    monkeypatch.setattr(resolve, "tune", decline)
    call(device)
    assert ready_configs() == [default_config(KEY, interpreted=interpreting())]
    assert winner(device) is None
    assert any("little memory" in warning for warning in warnings_of(caplog))


def test_memory_that_runs_out_while_tuning_falls_back(device, few, caplog, monkeypatch):
    # What is free when tuning starts may be gone when it allocates.
    def run_out(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(tune, "ScreenTimer", run_out)
    call(device)
    assert resolver_of(device).tunings == 0
    assert winner(device) is None
    assert any("not tuned" in warning for warning in warnings_of(caplog))


@pytest.mark.gpu
def test_little_free_memory_falls_back(device, caplog, monkeypatch):
    total = torch.cuda.mem_get_info()[1]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1 << 16, total))
    call(device)
    assert ready_configs() == [default_config(KEY)]
    assert any("not tuned" in warning for warning in warnings_of(caplog))


def test_a_tuning_lock_that_never_comes_falls_back(device, caplog, monkeypatch):
    monkeypatch.setattr(resolve, "TUNING_WAIT", 0.0)
    monkeypatch.setattr(resolve, "tune", forbidden)
    with TuningDB(identity_of(target_of(device))).tuning_lock(1.0) as acquired:
        assert acquired
        call(device)
    assert ready_configs() == [default_config(KEY, interpreted=interpreting())]
    assert any("another process" in warning for warning in warnings_of(caplog))


def test_what_another_process_tuned_meanwhile_is_used(device, monkeypatch):
    # The first look finds nothing; by the time the tuning lock comes, the other process is done.
    resolver = resolver_of(device)
    looks = []
    stored = resolver._stored

    def first_nothing(*arguments):
        looks.append(arguments)
        if len(looks) == 1:
            assert stored(*arguments) is None
            store(device, ODD)
            return None
        return stored(*arguments)

    monkeypatch.setattr(resolver, "_stored", first_nothing)
    monkeypatch.setattr(resolve, "tune", forbidden)
    call(device)
    assert ready_configs() == [ODD]
    assert resolver.tunings == 0


# --- Mode cached ---


def test_cached_never_tunes_and_uses_the_default(device, mode, caplog, monkeypatch):
    mode("cached")
    monkeypatch.setattr(resolve, "tune", forbidden)
    call(device)
    call(device, seq_len=41)
    assert ready_configs() == [default_config(KEY, interpreted=interpreting())]
    (warning,) = warnings_of(caplog)
    assert str(KEY) in warning
    assert "the default config" in warning
    assert "pretune" in warning
    assert winner(device) is None


@pytest.mark.parametrize("bucket", [1024, 2048])
def test_cached_uses_the_nearest_winner(device, mode, caplog, bucket):
    mode("cached")
    store(device, ODD, msgspec.structs.replace(KEY, seq_len=bucket))
    call(device)
    assert ready_configs() == [ODD]
    (warning,) = warnings_of(caplog)
    assert f"the winner of seq_len {bucket}" in warning


def test_a_batch_has_a_winner_of_its_own_or_that_of_a_request(device, mode, caplog, monkeypatch):
    mode("cached")
    few, many = (
        make_inputs(16, 1, 1, 40, 16, torch.float32, device),
        make_inputs(17, 1, 1, 40, 16, torch.float32, device),
    )
    store(device, ODD)
    for tensors in (few, many):
        assert_scores(qk_score(*tensors), *tensors)
    assert [(slot.sequences, binary.config) for slot, binary in ready.binaries.items()] == [(8, ODD), (64, ODD)]
    (warning,) = warnings_of(caplog)
    assert "the winner of seq_len 512, up to 16 sequences" in warning
    nothing_bound(monkeypatch)
    other = default_config(KEY, interpreted=interpreting())
    store(device, other, msgspec.structs.replace(KEY, sequences=64))
    resolver_of(device).db.reload()
    for tensors in (few, many):
        assert_scores(qk_score(*tensors), *tensors)
    assert ready_configs() == [ODD, other]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"seq_len": 4096}, id="8 times as long"),
        pytest.param({"seq_len": 1024, "head_dim": 32}, id="another head_dim"),
        pytest.param({"seq_len": 1024, "dtype": "bfloat16"}, id="another dtype"),
        pytest.param({"seq_len": 1024, "rows": 2}, id="other rows"),
    ],
)
def test_a_winner_of_another_kind_is_not_near(device, mode, other):
    mode("cached")
    store(device, ODD, msgspec.structs.replace(KEY, **other))
    call(device)
    assert ready_configs() == [default_config(KEY, interpreted=interpreting())]


def test_cached_takes_an_exact_winner_without_a_word(device, mode, caplog):
    mode("cached")
    store(device, ODD)
    call(device)
    assert ready_configs() == [ODD]
    assert warnings_of(caplog) == []
    assert resolver_of(device).door.validations == 1  # it came without a receipt


def test_cached_warns_once_for_a_key(device, mode, caplog):
    mode("cached")
    call(device)
    call(device, out_dtype=torch.float16)
    assert len(ready.binaries) == 2
    assert len(warnings_of(caplog)) == 1


# --- Mode strict ---


def test_strict_refuses_a_miss_before_anything_is_written(device, mode, monkeypatch):
    mode("strict")
    monkeypatch.setattr(resolve, "tune", forbidden)
    q, k = make_inputs(1, 1, 1, 40, 16, torch.float32, device)
    out = poisoned(1, 1, 48, dtype=torch.float32, device=device)
    with pytest.raises(MissingConfigError) as caught:
        qk_score(q, k, out=out)
    message = str(caught.value)
    for part in (str(KEY), "strict", "pretune", "TUNEDQK_MODE=tune"):
        assert part in message
    assert out.isnan().all()
    assert resolver_of(device).door.validations == 0


def test_strict_does_not_take_what_is_only_near(device, mode):
    mode("strict")
    store(device, ODD, msgspec.structs.replace(KEY, seq_len=1024))
    with pytest.raises(MissingConfigError):
        call(device)


def test_strict_takes_a_stored_winner(device, mode, caplog):
    mode("strict")
    store(device, ODD)
    call(device)
    assert ready_configs() == [ODD]
    assert warnings_of(caplog) == []


# --- What left the search space ---


@pytest.mark.parametrize("name", ["strict", "cached"])
def test_a_winner_whose_config_left_the_space_is_a_miss(device, mode, name, monkeypatch):
    mode(name)
    store(device, GONE)
    store(device, GONE, msgspec.structs.replace(KEY, seq_len=1024))
    monkeypatch.setattr(resolve, "tune", forbidden)
    if name == "strict":
        with pytest.raises(MissingConfigError):
            call(device)
    else:
        call(device)
        assert ready_configs() == [default_config(KEY, interpreted=interpreting())]


def test_a_winner_whose_config_left_the_space_is_tuned_once_more(device, few, caplog):
    store(device, GONE)
    call(device)
    call(device, seq_len=41)
    assert ready_configs()[0] in few
    assert winner(device) in few
    assert resolver_of(device).tunings == 1


@pytest.fixture
def shipped(device, cache_dir, tmp_path, monkeypatch):
    """Stores a winner in a file that is only read."""
    folder = tmp_path / "shipped"
    monkeypatch.setenv("TUNEDQK_DB_PATH", str(folder))

    def ship(config, key=KEY):
        with monkeypatch.context() as patch:
            patch.setenv("TUNEDQK_CACHE_DIR", str(folder))
            store(device, config, key)

    return ship


def test_a_winner_that_left_the_space_does_not_hide_a_good_one_in_another_file(device, mode, shipped):
    mode("strict")
    store(device, GONE)
    shipped(ODD)
    call(device)
    assert ready_configs() == [ODD]


def test_a_neighbour_that_left_the_space_does_not_hide_another(device, mode, shipped):
    mode("cached")
    store(device, GONE, msgspec.structs.replace(KEY, seq_len=1024))
    shipped(ODD, msgspec.structs.replace(KEY, seq_len=1024))
    call(device)
    assert ready_configs() == [ODD]


def test_a_rejected_winner_does_not_hide_a_good_one_in_another_file(device, mode, few, shipped, monkeypatch, caplog):
    mode("strict")
    bad, good = few[:2]
    store(device, bad)
    shipped(good)
    monkeypatch.setattr(accept, "build", mutants.builder(mutants.LAST_POSITION_SKIPPED, lambda _, c: c == bad))
    call(device)
    assert ready_configs() == [good]
    assert len(warnings_of(caplog)) == 1
    about = explain(*make_inputs(1, 1, 1, 40, 16, torch.float32, device))
    assert (about.config, about.action, about.receipt.correct) == (good, "launch", True)


@pytest.mark.gpu
def test_a_winner_that_does_not_fit_this_gpu_is_a_miss(device, mode, monkeypatch):
    mode("strict")
    key = tuning_key(1, 16, "bfloat16", 16)
    large = max(tune.candidates(key, target_of(device)), key=lambda config: config.TILE_SIZE * config.num_stages)
    store(device, large, key)
    assert resolver_of(device).winners(key)[0].entry.config == large
    monkeypatch.setattr(tune, "fits_shared_memory", lambda config, *_: config != large)
    with pytest.raises(MissingConfigError):
        call(device, dtype=torch.bfloat16, group=16)


def test_strict_finds_what_was_pretuned_since_it_looked(device, mode):
    mode("strict")
    with pytest.raises(MissingConfigError, match=re.escape(KEY.command)):
        call(device)
    store(device, ODD)
    call(device)
    assert ready_configs() == [ODD]


def test_the_command_of_a_key_tunes_that_key():
    options = cli._parser().parse_args(KEY.command.split()[1:])
    assert cli._keys(options) == [KEY]


def test_strict_can_be_cured_in_the_same_process(device, mode, few):
    mode("strict")
    with pytest.raises(MissingConfigError):
        call(device)
    mode("tune")
    call(device)
    mode("strict")
    call(device)


@pytest.mark.parametrize("name", ["Tune", "cache", " ", "1"])
def test_an_unknown_mode_is_refused(device, mode, name, monkeypatch):
    mode(name)
    monkeypatch.setattr(resolve, "tune", forbidden)
    with pytest.raises(ValueError, match="TUNEDQK_MODE: expected one of") as caught:
        call(device)
    assert repr(name) in str(caught.value)


def test_no_mode_is_tune(mode, monkeypatch):
    monkeypatch.delenv("TUNEDQK_MODE", raising=False)
    assert resolve.mode() is Mode.TUNE
    mode("")
    assert resolve.mode() is Mode.TUNE
    mode("cached")
    assert resolve.mode() is Mode.CACHED


# --- Winners and configs that are wrong ---


def spoil(monkeypatch, *configs):
    def is_faulty(_, config):
        return not configs or config in configs

    monkeypatch.setattr(accept, "build", mutants.builder(mutants.LAST_POSITION_SKIPPED, is_faulty))


def test_a_bad_winner_costs_one_retune_and_no_loop(device, few, caplog, restart, monkeypatch):
    store(device, few[0])
    spoil(monkeypatch, few[0])
    call(device)
    call(device, seq_len=41)
    assert resolver_of(device).tunings == 1
    assert winner(device) == few[1]
    messages = warnings_of(caplog)
    assert "was rejected" in messages[0]
    assert "wrong result" in messages[0]

    restart()
    caplog.clear()
    call(device)
    assert (resolver_of(device).tunings, resolver_of(device).door.validations) == (0, 0)
    assert warnings_of(caplog) == []


def test_a_bad_winner_is_a_miss_in_every_mode(device, mode, monkeypatch):
    store(device, ODD)
    spoil(monkeypatch, ODD)
    mode("strict")
    with pytest.raises(MissingConfigError):
        call(device)
    mode("cached")
    call(device)
    assert ready_configs() == [default_config(KEY, interpreted=interpreting())]


def test_a_bad_neighbour_gives_way_to_the_default(device, mode, monkeypatch):
    mode("cached")
    store(device, ODD, msgspec.structs.replace(KEY, seq_len=1024))
    spoil(monkeypatch, ODD)
    call(device)
    assert ready_configs() == [default_config(KEY, interpreted=interpreting())]


def test_nothing_right_is_an_error_and_nothing_is_written(device, mode, monkeypatch):
    mode("cached")
    spoil(monkeypatch)
    q, k = make_inputs(1, 1, 1, 40, 16, torch.float32, device)
    out = poisoned(1, 1, 40, dtype=torch.float32, device=device)
    with pytest.raises(NoAcceptedConfigError, match="agreed with the loop kernel"):
        qk_score(q, k, out=out)
    assert out.isnan().all()
    assert ready.binaries == {}


def test_a_given_config_passes_the_same_door(device, few, monkeypatch):
    monkeypatch.setattr(resolve, "tune", forbidden)
    call(device, config=ODD)
    call(device, config=ODD, seq_len=41)
    assert resolver_of(device).door.validations == 1
    spoil(monkeypatch, few[0])
    for _ in range(2):
        with pytest.raises(RejectedConfigError, match="wrong result"):
            call(device, config=few[0])
    assert resolver_of(device).door.validations == 2


@pytest.mark.parametrize("time", [pytest.param(math.inf, id="inf"), pytest.param(math.nan, id="nan")])
def test_times_that_are_none_are_an_error_and_nothing_is_stored(device, few, monkeypatch, time):
    """Triton's Autotuner lets the first config win."""
    none = Sample(time, time, time)
    monkeypatch.setattr(tune.ScreenTimer, "__call__", lambda *_: none)
    monkeypatch.setattr(
        tune, "_compare", lambda finalists, _, shapes, *__: {c: [none] * len(shapes) for c in finalists}
    )
    with pytest.raises(NoAcceptedConfigError, match="finite"):
        call(device)
    assert TuningDB(identity_of(target_of(device)), None, ()).entries() == []
    assert ready.binaries == {}


# --- Files that cannot be used ---


def write(path, content):
    path.parent.mkdir(parents=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content(path)


# That of another GPU is one of test_devices.
SPOILED = [*(case for case in MALFORMED if case.id != "another-gpu"), pytest.param(make_folder, id="directory")]


@pytest.mark.parametrize("content", SPOILED)
def test_a_spoiled_file_costs_one_warning_and_no_score(device, mode, content):
    mode("cached")  # tuning makes no difference to the file
    path = TuningDB(identity_of(target_of(device))).path
    write(path, content)
    with pytest.warns(TuningDBWarning, match="set aside as") as caught:
        call(device)
    assert len(caught) == 1
    assert len(list(path.parent.glob("*.bad-1"))) == 1
    (receipt,) = load_file(path).receipts
    assert receipt.correct


# --- Fresh processes ---

PROCESS = """
import json, sys
import torch
from tunedqk import qk_score, tune
from tunedqk.config import KernelConfig
from tunedqk.resolve import resolver_for
from tunedqk.validate import Validator

checks = []
check = Validator.check
Validator.check = lambda self, *arguments: checks.append(1) or check(self, *arguments)
tune.candidates = lambda *_: [KernelConfig(chunk, chunk, num_warps=4) for chunk in (128, 256)]
torch.set_num_threads(1)
device, *lengths = sys.argv[1:]
index = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
for dtype, heads in ((torch.float32, 1), (torch.bfloat16, 2)):
    for seq_len in map(int, lengths):
        q = torch.ones(1, heads, 16, dtype=dtype, device=device)
        k = torch.ones(1, seq_len, 1, 16, dtype=dtype, device=device)
        assert (qk_score(q, k) == 16).all()
resolver = resolver_for(index)
print(json.dumps({"tunings": resolver.tunings, "validations": resolver.door.validations, "checks": len(checks)}))
"""


def run_process(device, mode, *lengths):
    search_path = os.pathsep.join(filter(None, (str(PROJECT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "TUNEDQK_MODE": mode, "PYTHONPATH": search_path, "PYTHONWARNINGS": "ignore"}
    arguments = [sys.executable, "-c", PROCESS, device, *map(str, lengths)]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_tuned_in_one_process_nothing_is_left_to_do_in_the_next(device):
    first = run_process(device, "tune", 40, 600)
    assert first["tunings"] == 4
    assert first["checks"] == first["validations"] > 0
    assert run_process(device, "strict", 33, 512, 1000) == {"tunings": 0, "validations": 0, "checks": 0}


# --- A cache that grows ---

SWEEPS = [
    pytest.param((1, 2, 15, 63, 64, 65, 511, 512, 513, 600, 1000, 1024), 2, id="some lengths"),
    pytest.param(range(1, 4097), 4, id="1 to 4096", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("lengths", "buckets"), SWEEPS)
def test_a_growing_cache_is_tuned_per_bucket_and_compiled_at_its_first_step(device, monkeypatch, lengths, buckets):
    compiled, built, resolved = [], [], []
    init, resolver = launch.Binary.__init__, resolver_of(device)
    resolve_, build = resolver.resolve, accept.build

    def spy_init(self, *arguments):
        init(self, *arguments)
        if isinstance(self, launch.CompiledBinary | launch.InterpretedBinary):
            built.append((self.variant, self.config))

    def spy_resolve(*arguments):
        resolved.append(arguments)
        return resolve_(*arguments)

    if interpreting():
        monkeypatch.setattr(tune, "candidates", lambda *_: [KernelConfig(c, c, num_warps=4) for c in (256, 512)])
        made = {}  # the interpreter's binaries are not kept, since they cost nothing
        monkeypatch.setattr(accept, "build", lambda *a: made.get(a) or made.setdefault(a, build(*a)))
    monkeypatch.setattr(launch.Binary, "__init__", spy_init)
    monkeypatch.setattr(resolver, "resolve", spy_resolve)
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **_: compiled.append(1))

    heads, head_dim = 2, 16
    q = torch.randn(1, heads, head_dim).to(device)
    keys = torch.randn(4096 * heads * head_dim).to(device)
    counts = {}  # by bucket: what had been compiled and built after its first step
    for seq_len in lengths:
        k = keys[: seq_len * heads * head_dim]
        # In one layout the head's stride grows with the cache.
        out = qk_score(q, k.view(1, heads, seq_len, head_dim), layout="HND")
        if seq_len % 97 == 1 or len(lengths) < 100:
            assert_scores(out, q, k.view(1, heads, seq_len, head_dim), layout="HND")
        now = (len(compiled), len(built))
        assert counts.setdefault(tuning_key(seq_len, head_dim, "float32", 1).seq_len, now) == now
    assert resolver.tunings <= buckets
    assert len(resolved) == buckets
    # What is kept ready has the buckets of the keys.
    assert sorted(slot.seq_len for slot in ready.binaries) == sorted(counts)
    # Nothing is built twice, and only the first bucket's tuning builds what calls like these launch: another may have
    # other finalists, and builds those for ragged requests, too.
    assert len(set(built)) == len(built)
    first_compiled, first_built = next(iter(counts.values()))
    later = built[first_built:]
    assert len(compiled) - first_compiled == len(later)
    assert all(variant.ragged for variant, _ in later)
    assert later == [] or not interpreting()


# --- Threads ---


@pytest.fixture
def _one_launch_at_a_time(monkeypatch):
    """Triton's interpreter keeps the program id in a global. A GPU needs no such thing."""
    if interpreting():
        lock = threading.Lock()
        launch_ = launch.InterpretedBinary.launch

        def locked(*arguments):
            with lock:
                launch_(*arguments)

        monkeypatch.setattr(launch.InterpretedBinary, "launch", locked)


@pytest.mark.parametrize(
    "groups",
    [
        pytest.param((1,), id="one key"),
        # Under the interpreter a launch of one key would disturb the tuning of the other.
        pytest.param((1, 4), id="two keys", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.usefixtures("_one_launch_at_a_time")
def test_cold_threads_tune_once(device, few, groups, monkeypatch):
    cases = [make_inputs(1, groups[i % len(groups)], 1, 40 + i, 16, torch.bfloat16, device) for i in range(8)]
    barrier = threading.Barrier(len(cases))
    resolver, resolved = resolver_of(device), []
    resolve_ = resolver.resolve

    def spy(*arguments):
        resolved.append(arguments)
        return resolve_(*arguments)

    monkeypatch.setattr(resolver, "resolve", spy)

    def cold(case):
        barrier.wait(60)
        return qk_score(*case)

    with ThreadPoolExecutor(len(cases)) as pool:
        results = list(pool.map(cold, cases))
    for (q, k), scores in zip(cases, results, strict=True):
        assert_scores(scores, q, k)
    assert resolver.tunings == len(resolved) == len(ready.binaries) == len(groups)


@pytest.mark.usefixtures("_one_launch_at_a_time")
def test_a_tuning_that_fails_in_one_thread_does_not_stop_the_others(device, few, monkeypatch):
    failures = [RuntimeError("planted")]

    def flaky(*arguments):
        if failures:
            raise failures.pop()
        return tune.tune(*arguments)

    monkeypatch.setattr(resolve, "tune", flaky)
    with pytest.raises(RuntimeError, match="planted"):
        call(device)
    with ThreadPoolExecutor(4) as pool:
        done = [pool.submit(call, device, 40) for _ in range(4)]
        assert all(future.result().shape == (1, 1, 40) for future in done)
    assert resolver_of(device).tunings == 1
