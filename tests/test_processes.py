"""Several processes and one cache folder: cold at once, killed while they tune, forked, or with nowhere to write."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import cold
import filelock
import msgspec
import pytest
from conftest import ON_GPU
from test_compile_pool import PROGRAM

from tunedqk import db, launch
from tunedqk.kernels import vectorized

COUNT = 8


@pytest.fixture(scope="module")
def nursery(device, tmp_path_factory):
    """Forks processes as cold as fresh ones, without their three seconds of imports."""
    # Triton's own cache needs a place even where there is no home.
    started = cold.Nursery(device, TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton")))
    yield started
    started.close()


def environment(folder, **others):
    return {"TUNEDQK_CACHE_DIR": str(folder), **others}


def assert_tuned_once(answers, device, folder, keys=1):
    """All of them were right, one of them tuned each key, nobody was warned about a file, and the file is whole."""
    assert sum(answer["tunings"] for answer in answers) == keys
    assert sum(answer["said"] for answer in answers) == keys
    assert [answer["warned"] for answer in answers] == [[]] * len(answers)
    assert_whole(device, folder, keys)


def assert_whole(device, folder, keys=1):
    path = cold.own_db(device, folder).path
    assert len(db.load_file(path).entries) == keys
    assert all(receipt.correct for receipt in db.load_file(path).receipts)
    assert [each.name for each in folder.iterdir() if not each.name.endswith(".lock")] == [path.name]
    for suffix in (".lock", ".tuning.lock"):
        with filelock.FileLock(f"{path}{suffix}", timeout=0):
            pass


# --- Cold at once ---


@pytest.mark.parametrize("count", [3, pytest.param(COUNT, marks=pytest.mark.stress)])
def test_fresh_processes_with_one_cold_key_tune_once(device, tmp_path, count):
    folder = tmp_path / "cache"
    # Triton's cache is cold as well.
    fresh = {"TUNEDQK_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    processes = [cold.start("cold.fresh_one(sys.argv[1])", device, **fresh) for _ in range(count)]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * count
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    texts = [process.communicate(timeout=cold.PATIENCE)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * count
    assert_tuned_once([json.loads(text) for text in texts], device, folder)


@pytest.mark.parametrize("rounds", [5, pytest.param(50, marks=pytest.mark.stress)])
def test_forked_processes_with_one_cold_key_tune_once(nursery, device, tmp_path, rounds):
    for n in range(rounds):
        folder = tmp_path / str(n)
        done = nursery.ask("cold_round", environment=environment(folder), count=COUNT)
        assert done["exits"] == [0] * COUNT
        assert_tuned_once(done["answers"], device, folder)


# --- Forked from a process that has called ---


@pytest.fixture
def called(nursery):
    """Asks a process that is for one test, and may call before it forks."""
    if ON_GPU:
        pytest.skip("CUDA cannot be used in a process that was forked from one that used it")
    return lambda work, **arguments: nursery.ask("apart", work=work, arguments=arguments)


def test_forks_of_a_process_that_has_called_repeat_it_and_tune_another_key_once(called, device, tmp_path):
    lengths = [40, 41] + [600] * 4
    done = called("warm_round", environment=environment(tmp_path / "cache"), seq_lens=lengths)
    assert done["exits"] == [0] * len(lengths)
    assert done["inherited"] == 1
    answers = done["answers"]
    assert sorted(answer["bound"] for answer in answers) == [1, 1, 2, 2, 2, 2]
    assert sum(answer["tunings"] for answer in answers) == sum(answer["said"] for answer in answers) == 1
    assert_whole(device, tmp_path / "cache", keys=2)


@pytest.mark.parametrize("seq_len", [pytest.param(40, id="warm"), pytest.param(1500, id="cold")])
def test_a_fork_while_another_thread_tunes_does_not_hang(called, tmp_path, seq_len):
    done = called("fork_while_tuning", environment=environment(tmp_path), seq_len=seq_len)
    assert done["exits"] == [0]


# --- Killed ---


@pytest.mark.parametrize("moment", list(cold.MOMENTS))
def test_a_process_killed_while_it_tunes_stops_nobody(nursery, device, tmp_path, moment):
    folder = tmp_path / "cache"
    done = nursery.ask("killed", environment=environment(folder), moment=moment)
    assert done == {"reached": True, "status": -9}
    done = nursery.ask("cold_round", environment=environment(folder))
    (answer,) = done["answers"]
    assert answer["seconds"] < (60 if ON_GPU else 15)
    assert_tuned_once([answer], device, folder)


# --- Nowhere to write ---


def foreign_lock(device, folder):
    """The lock is a folder: as one of another user's, it cannot be opened for writing, whoever this is."""
    cold.own_db(device, folder).path.with_suffix(".json.lock").mkdir(parents=True)
    return environment(folder)


PLACES = [
    pytest.param(lambda *_: environment("/proc/tunedqk"), None, id="a folder that cannot be made"),
    pytest.param(
        lambda *_: environment("", HOME="/proc/nobody", XDG_CACHE_HOME=None), None, id="a home that cannot be written"
    ),
    pytest.param(lambda *_: environment("", HOME=None, XDG_CACHE_HOME=None), "user", id="no home, and no such user"),
    pytest.param(foreign_lock, None, id="a lock that cannot be opened"),
    pytest.param(lambda _, folder: environment(folder), "disk", id="a full disk"),
]


@pytest.mark.parametrize(("place", "what"), PLACES)
def test_where_nothing_can_be_written_a_process_tunes_in_memory(nursery, device, tmp_path, place, what):
    done = nursery.ask("cold_round", environment=place(device, tmp_path), what=what, times=3)
    (answer,) = done["answers"]
    assert (answer["tunings"], answer["said"]) == (1, 1)
    (warning,) = answer["warned"]
    assert "cannot be written" in warning
    assert not list(tmp_path.glob("*.json")) + list(tmp_path.glob("*.tmp"))
    assert not Path("~").exists()


# --- The names of binaries ---

# Compiles without torch and without a GPU, and prints the hash that a receipt goes by.
COMPILED = """
import sys, msgspec
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from tunedqk import compiler
compiler._prepare()
driver.set_active(compiler._TargetDriver(GPUTarget("cuda", 90, 32)))
program = msgspec.json.decode(sys.argv[1], type=compiler.Program)
print(compiler.__file__, compiler.compile_program(compiler.qk_score_kernel, program).hash)
"""
INTERPRETED = "from tunedqk import launch; print(launch.__file__, launch.source_hash())"


def with_factor(source, value):
    """A helper that uses a global."""
    defined = source.replace("import triton\n", f"import triton\nFACTOR = triton.language.constexpr({value})\n", 1)
    return defined.replace("return tl.sum(", "return FACTOR * tl.sum(", 1)


EDITS = {
    "nothing": lambda source: source,
    "a comment behind": lambda source: source + "# A comment.\n",
    "a helper": lambda source: with_factor(source, 1.0),
    "a global": lambda source: with_factor(source, 2.0),
}


def name_in_copy(folder, code, edit, seed):
    """What is printed in a copy of the package, with edited parts of the kernel and another seed of Python's hashes."""
    copy = folder / str(seed) / "tunedqk"
    shutil.copytree(Path(db.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    kernel = copy / "kernels" / "parts.py"
    kernel.write_text(EDITS[edit](kernel.read_text()))
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    others = {"PYTHONPATH": str(copy.parent), "PYTHONHASHSEED": str(seed), "TRITON_CACHE_DIR": str(folder / "triton")}
    run = subprocess.run(
        [sys.executable, "-c", code, msgspec.json.encode(PROGRAM)],
        env=clean | others, cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    file, name = run.stdout.split()
    assert Path(file).parent == copy
    return name


def test_the_name_of_a_compiled_binary_goes_by_helpers_and_globals_not_by_folders_or_seeds(tmp_path):
    edits = ["nothing", "nothing", "a comment behind", "a helper", "a global"]
    names = [name_in_copy(tmp_path, COMPILED, edit, seed) for seed, edit in enumerate(edits, 1)]
    assert names[0] == names[1] == names[2]
    assert len({names[0], *names[3:]}) == 3


def test_the_name_of_an_interpreted_binary_goes_by_helpers_and_globals_not_by_folders_or_seeds(tmp_path, monkeypatch):
    assert name_in_copy(tmp_path, INTERPRETED, "a comment behind", 7) == launch.source_hash()
    source, names = inspect.getsource(vectorized), set()
    for edit in EDITS.values():
        monkeypatch.setattr(inspect, "getsource", lambda _, edit=edit: edit(source))
        names.add(launch.source_hash.__wrapped__())
    assert len(names) == len(EDITS) - 1


# --- Memory ---


def test_the_memory_of_a_process_that_tunes_many_keys_stays_flat(nursery, tmp_path):
    if ON_GPU:
        pytest.skip("the next test is for a GPU")
    done = nursery.ask("memory", environment=environment(tmp_path), keys=7, start=3)
    ((early, late),) = done["answers"]
    assert late - early < 8  # MiB; the inputs that each of the four keys is judged on take more than three


@pytest.mark.gpu
@pytest.mark.stress
def test_the_memory_of_a_process_that_tunes_the_default_grid_stays_flat(nursery, tmp_path):
    done = nursery.ask("memory", environment=environment(tmp_path), keys=40, start=10, real=True, patience=550)
    ((early, late),) = done["answers"]
    assert late - early < 100, f"{early:.0f} MiB after 10 keys, {late:.0f} MiB after 40"
