from __future__ import annotations

import contextlib
import errno
import io
import json
import multiprocessing
import os
import random
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import platformdirs
import pytest

from tunedqk import db
from tunedqk.config import KernelConfig, TuningKey
from tunedqk.db import TuningDB
from tunedqk.device import INTERPRETER, GpuIdentity, Toolchain
from tunedqk.errors import TuningDBWarning
from tunedqk.records import Entry, GpuFile, Receipt, Shape, Timing, json_schema

GPU = GpuIdentity(name="Test GPU", arch="sm_90", multiprocessors=132, memory_gib=139.8)
OTHER_GPU = GpuIdentity(name="Test GPU", arch="sm_90", multiprocessors=66, memory_gib=69.9)


def make_key(seq_len=1024, head_dim=128, **fields):
    return TuningKey(**{"head_dim": head_dim, "dtype": "bfloat16", "rows": 1, "seq_len": seq_len, **fields})


def make_entry(key=None, chunk=64, median_us=12.5, **fields):
    timing = Timing(median_us, 12.4, 12.7, 541065216, 0.99, 1.01, (Shape(1, 8, median_us), Shape(8, 8, 90.0)))
    config = KernelConfig(CHUNK_SIZE=chunk, TILE_SIZE=16, num_warps=4)
    values = {"rejected": {"wrong result": 2}, "tuned_at": "2026-01-02T03:04:05Z", **fields}
    return Entry(key or make_key(), config, timing, toolchain=Toolchain("3.6.0", "2.11.0", "0.1.0"), **values)


def make_receipt(binary="ffaf", verdict="correct", seq_lens=(512,), day=1, **fields):
    values = {"max_error": 0.31, "what": "vectorized", "validated_at": f"2026-01-{day:02}T00:00:00Z", **fields}
    return Receipt(binary=binary, verdict=verdict, seq_lens=seq_lens, **values)


def make_db(folder, *others, gpu=GPU):
    return TuningDB(gpu, folder, others)


def good_bytes(gpu=GPU):
    return msgspec.json.encode(GpuFile(gpu=gpu, entries=[make_entry()], receipts=[make_receipt()]))


def changed(**fields):
    return json.dumps({**json.loads(good_bytes()), **fields}).encode()


def changed_entry(part, **fields):
    content = json.loads(good_bytes())
    content["entries"][0][part].update(fields)
    return json.dumps(content).encode()


@contextlib.contextmanager
def one_warning(match):
    with pytest.warns(TuningDBWarning, match=match) as caught:
        yield
    assert [warning.category for warning in caught] == [TuningDBWarning]


def run_together(count, target, folder, times):
    """`count` processes that begin at once, forked from a Python that is quick to start: it has no torch."""
    code = f"import sys, test_db as t; sys.exit(any(t.fork({count}, t.{target.__name__}, int(sys.argv[2]))))"
    parent = start_python(code, folder, times)
    parent.communicate(timeout=60)
    assert parent.returncode == 0


def fork(count, target, *arguments):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(count)
    workers = [context.Process(target=target, args=(i, barrier, Path(sys.argv[1]), *arguments)) for i in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return [worker.exitcode for worker in workers]


def start_python(code, *arguments):
    """A process that can import this module."""
    paths = [str(Path(__file__).parent), str(Path(db.__file__).parents[1])]
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def held_lock(request, tmp_path):
    """Another process holds a lock of the GPU's file; the value lets it go."""
    code = """
import sys, filelock
with filelock.FileLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""
    process = start_python(code, f"{make_db(tmp_path).path}{request.param}")
    assert process.stdout.readline() == "held\n"
    yield process.communicate
    if process.poll() is None:
        process.communicate()


def test_what_is_recorded_is_found_by_another_process_of_the_same_gpu(tmp_path):
    entry, receipt = make_entry(), make_receipt(twin="abcd")
    writer, reader = make_db(tmp_path), make_db(tmp_path)
    assert writer.record(iter([entry]), iter([receipt]))
    for each in (writer, reader):
        assert each.winners(entry.key) == [(entry, each.path)]
        assert each.receipt("ffaf") == receipt
        assert [found.entry for found in each.entries()] == [entry]
        assert each.receipts() == [receipt]
    assert not reader.winners(make_key(2048))
    assert reader.receipt("0000") is None
    assert not make_db(tmp_path, gpu=OTHER_GPU).winners(entry.key)
    assert make_db(tmp_path, gpu=msgspec.structs.replace(GPU, memory_gib=80.0)).winners(entry.key)


def test_no_folder_is_made_by_looking(tmp_path):
    assert not make_db(tmp_path / "cache", tmp_path / "other").winners(make_key())
    assert make_db(tmp_path / "cache").record()
    assert list((tmp_path / "cache").glob("*.json")) == []
    assert not (tmp_path / "other").exists()


def test_the_file_is_sorted_indented_and_the_same_whatever_the_order(tmp_path):
    keys = [make_key(seq_len, head_dim) for head_dim in (64, 128) for seq_len in (512, 1024, 4096)]
    entries, receipts = [make_entry(key) for key in keys], [make_receipt(binary) for binary in ("00", "7f", "ff")]
    one, other = make_db(tmp_path / "one"), make_db(tmp_path / "other")
    assert one.record(entries, receipts)
    for entry in reversed(entries):
        assert other.record([entry])
    assert other.record(receipts=reversed(receipts))
    assert one.path.read_bytes() == other.path.read_bytes()
    file = db.load_file(one.path)
    assert (file.schema, file.gpu, file.entries, file.receipts) == (1, GPU, entries, receipts)
    assert [found.entry for found in one.entries()] == entries
    text = one.path.read_text("utf-8")
    assert text.endswith("}\n")
    assert len(text.splitlines()) > 100


def test_times_that_json_cannot_hold_are_refused():
    for time_us in (float("inf"), float("nan")):
        with pytest.raises(ValueError, match="finite"):
            make_entry(median_us=time_us)


def test_json_schema_describes_every_struct():
    schema = json_schema()
    assert {"GpuFile", "Entry", "Receipt", "Timing", "Shape", "TuningKey", "KernelConfig"} <= schema["$defs"].keys()
    assert schema["$defs"]["Entry"]["additionalProperties"] is False
    assert schema["$defs"]["GpuFile"]["properties"]["schema"]["enum"] == [1]
    assert json.dumps(schema)


@pytest.mark.parametrize("module", ["torch", "triton"])
def test_import_leaves_torch_and_triton_out(module):
    process = start_python("import sys, tunedqk.db; print(sys.argv[1] in sys.modules)", module)
    assert process.communicate()[0] == "False\n"


# Names


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("NVIDIA/AMD GPU", id="slash"),
        pytest.param("../../etc/passwd", id="dots"),
        pytest.param("GPU\\0:*?\n", id="reserved"),
        pytest.param("グラフィック", id="not-ascii"),
        pytest.param("", id="empty"),
        pytest.param("x" * 1000, id="long"),
    ],
)
def test_any_gpu_name_gives_a_file_in_the_folder(tmp_path, name):
    gpu = msgspec.structs.replace(GPU, name=name)
    written = make_db(tmp_path, gpu=gpu)
    assert written.record([make_entry()])
    assert written.path.parent == tmp_path
    assert list(tmp_path.glob("*.json")) == [written.path]
    assert written.path.name.isascii()
    assert make_db(tmp_path, gpu=gpu).winners(make_key())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param({"name": "A/B"}, {"name": "A B"}, id="sanitised-alike"),
        pytest.param({"name": "A40"}, {"name": "a40"}, id="case"),
        pytest.param({"name": "A40"}, {"name": "A4000"}, id="prefix"),
        pytest.param({"name": "x" * 200 + "1"}, {"name": "x" * 200 + "2"}, id="cut-alike"),
        pytest.param({"name": "A sm_90"}, {"name": "A", "arch": "sm_90 sm_90"}, id="shifted"),
        pytest.param({"arch": "sm_90"}, {"arch": "sm_100"}, id="arch"),
        pytest.param({"multiprocessors": 132}, {"multiprocessors": 16}, id="mig-slice"),
    ],
)
def test_two_identities_never_share_a_file_name(one, other):
    names = [db.file_name(msgspec.structs.replace(GPU, **fields)) for fields in (one, other)]
    assert names[0].lower() != names[1].lower()


def test_file_names_are_readable_and_leave_memory_out():
    assert db.file_name(GPU).startswith("test-gpu-sm_90-132-")
    assert db.file_name(GPU) == db.file_name(msgspec.structs.replace(GPU, memory_gib=1.0))
    assert "interpreter" in db.file_name(INTERPRETER)


# Folders


def test_the_cache_directory_is_absolute_and_the_variable_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TUNEDQK_CACHE_DIR", "mine")
    assert db.user_directory() == tmp_path / "mine"
    assert TuningDB(GPU).path == tmp_path / "mine" / db.file_name(GPU)
    monkeypatch.delenv("TUNEDQK_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert "tunedqk" in db.user_directory().parts


def test_the_shipped_folder_is_inside_the_package_or_beside_it(tmp_path, monkeypatch):
    assert db.shipped_directory() == Path(db.__file__).parents[1] / "tuning_db"
    package = tmp_path / "tunedqk"
    monkeypatch.setattr(db, "__file__", str(package / "db.py"))
    assert db.shipped_directory() == package / "tuning_db"
    (tmp_path / "tuning_db").mkdir()
    assert db.shipped_directory() == tmp_path / "tuning_db"
    (package / "tuning_db").mkdir(parents=True)
    assert db.shipped_directory() == package / "tuning_db"


def test_files_are_searched_in_order(tmp_path, monkeypatch):
    folders = [tmp_path / name for name in ("user", "first", "second", "shipped")]
    for i, folder in enumerate(folders):
        make_db(folder).record([make_entry(make_key(512 << j), chunk=16 << i) for j in range(i + 1)])
    monkeypatch.setenv("TUNEDQK_CACHE_DIR", str(folders[0]))
    monkeypatch.setenv("TUNEDQK_DB_PATH", os.pathsep.join(["", str(folders[1]), str(folders[2])]))
    monkeypatch.setattr(db, "shipped_directory", lambda: folders[3])
    assert db.search_directories() == folders[1:]
    found = TuningDB(GPU).entries()
    assert [each.entry.config.CHUNK_SIZE for each in found] == [16, 32, 64, 128]
    assert [each.path.parent for each in found] == folders


def test_files_are_read_at_the_first_look_up_and_then_no_more(tmp_path, monkeypatch):
    make_db(tmp_path / "user").record([make_entry()])
    make_db(tmp_path / "other").record([make_entry(make_key(4096))], [make_receipt()])

    def refuse(*arguments, **keywords):
        pytest.fail(f"file access: {arguments}")

    def without_files(function, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr("builtins.open", refuse)
            patch.setattr("io.open", refuse)
            for name in ("open", "stat", "scandir", "replace", "mkdir"):
                patch.setattr(os, name, refuse)
            return function(*arguments)

    reader = without_files(make_db, tmp_path / "user", tmp_path / "other")
    assert reader.winners(make_key())
    assert without_files(reader.winners, make_key())[0].entry == make_entry()
    assert not without_files(reader.winners, make_key(512))
    assert without_files(reader.nearest, make_key(512))[0].entry == make_entry()
    assert without_files(reader.receipt, "ffaf") == make_receipt()
    assert len(without_files(reader.entries)) == 2
    assert without_files(reader.receipts) == [make_receipt()]

    make_db(tmp_path / "user").record([make_entry(make_key(512))])
    assert not reader.winners(make_key(512))
    reader.reload()
    assert reader.winners(make_key(512))


# Look-up


@pytest.mark.parametrize(
    ("stored", "wanted", "expected"),
    [
        pytest.param([1024, 4096], 2048, [4096, 1024], id="tie-to-the-larger"),
        pytest.param([512, 4096], 1024, [512, 4096], id="smaller-ratio"),
        pytest.param([512, 8192], 2048, [8192, 512], id="tie-at-four"),
        pytest.param([512], 2048, [512], id="four-below"),
        pytest.param([512, 16384], 4096, [16384], id="eight-below-is-too-far"),
        pytest.param([512], 4096, [], id="too-far"),
        pytest.param([1024], 1024, [], id="not-itself"),
    ],
)
def test_nearest_bucket(tmp_path, stored, wanted, expected):
    filled = make_db(tmp_path)
    filled.record([make_entry(make_key(seq_len)) for seq_len in stored])
    assert [found.entry.key.seq_len for found in filled.nearest(make_key(wanted))] == expected


@pytest.mark.parametrize("sequences", [8, 64])
def test_the_nearest_are_of_as_many_sequences(tmp_path, sequences):
    filled = make_db(tmp_path)
    filled.record([make_entry(make_key(seq_len, sequences=n)) for seq_len in (512, 1024, 2048) for n in (8, 64)])
    found = [one.entry.key for one in filled.nearest(make_key(1024, sequences=sequences))]
    other = 72 - sequences
    assert [(key.seq_len, key.sequences) for key in found] == [
        (2048, sequences), (512, sequences), (1024, other), (2048, other), (512, other),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [{"head_dim": 64}, {"dtype": "float16"}, {"rows": 2}, {"page_size": 16}],
    ids=lambda fields: next(iter(fields)),
)
def test_nearest_differs_in_nothing_else(tmp_path, fields):
    filled = make_db(tmp_path)
    filled.record([make_entry(make_key(1024, **fields))])
    assert filled.nearest(make_key(2048)) == []


def test_the_winners_of_every_file_are_found_in_order(tmp_path):
    for name, chunk in (("user", 64), ("other", 128)):
        make_db(tmp_path / name).record([make_entry(chunk=chunk), make_entry(make_key(512), chunk=chunk)])
    both = make_db(tmp_path / "user", tmp_path / "other")
    assert [found.entry.config.CHUNK_SIZE for found in both.winners(make_key())] == [64, 128]
    assert [found.entry.config.CHUNK_SIZE for found in both.nearest(make_key(2048))] == [64, 128, 64, 128]
    assert [found.path.parent.name for found in both.entries()] == ["user", "user"]


@pytest.mark.parametrize("bad_one", ["user", "other"])
def test_a_bad_receipt_in_one_file_beats_a_correct_one_in_another(tmp_path, bad_one):
    for name in ("user", "other"):
        verdict = "wrong result" if name == bad_one else "correct"
        make_db(tmp_path / name).record(receipts=[make_receipt(verdict=verdict)])
    both = make_db(tmp_path / "user", tmp_path / "other")
    assert both.receipt("ffaf").verdict == "wrong result"
    assert [receipt.correct for receipt in both.receipts()] == [False]


def test_a_bad_receipt_twice_in_one_file_beats_the_correct_one(tmp_path):
    receipts = [make_receipt(), make_receipt(verdict="crashed"), make_receipt()]
    make_db(tmp_path).path.write_bytes(msgspec.json.encode(GpuFile(gpu=GPU, receipts=receipts)))
    assert make_db(tmp_path).receipt("ffaf").verdict == "crashed"
    make_db(tmp_path).record([make_entry()])
    assert make_db(tmp_path).receipt("ffaf").verdict == "crashed"


def test_correct_receipts_of_several_files_unite_their_seq_lens(tmp_path):
    make_db(tmp_path / "user").record(receipts=[make_receipt(seq_lens=(4096, 512))])
    make_db(tmp_path / "other").record(receipts=[make_receipt(seq_lens=(1024, 512))])
    assert make_db(tmp_path / "user", tmp_path / "other").receipt("ffaf").seq_lens == (512, 1024, 4096)


# Merging


def test_an_incoming_entry_replaces_that_of_its_key(tmp_path):
    make_db(tmp_path).record([make_entry(chunk=64), make_entry(make_key(512), chunk=64)])
    make_db(tmp_path).record([make_entry(chunk=128)])
    assert [found.entry.config.CHUNK_SIZE for found in make_db(tmp_path).entries()] == [64, 128]


def test_a_later_result_of_another_process_is_not_undone(tmp_path):
    early, late = make_db(tmp_path), make_db(tmp_path)
    early.record([make_entry(chunk=64)])
    late.record([make_entry(chunk=128)])
    early.record([make_entry(make_key(512))])
    for each in (early, late, make_db(tmp_path)):
        assert each.winners(make_key())[0].entry.config.CHUNK_SIZE == 128


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        pytest.param(
            make_receipt(seq_lens=(512, 2048), day=1, max_error=0.1),
            make_receipt(seq_lens=(1024,), day=2, max_error=0.2),
            make_receipt(seq_lens=(512, 1024, 2048), day=2, max_error=0.2),
            id="united",
        ),
        pytest.param(
            make_receipt(seq_lens=(512,), day=2, max_error=0.1),
            make_receipt(seq_lens=(1024,), day=1, max_error=0.2),
            make_receipt(seq_lens=(512, 1024), day=2, max_error=0.1),
            id="united-late",
        ),
        pytest.param(
            make_receipt(), make_receipt(verdict="crashed"), make_receipt(verdict="crashed"), id="correct-to-bad"
        ),
        pytest.param(
            make_receipt(verdict="crashed"),
            make_receipt(seq_lens=(1024,)),
            make_receipt(verdict="crashed"),
            id="bad-stays-bad",
        ),
        pytest.param(
            make_receipt(verdict="crashed"),
            make_receipt(verdict="timed out", max_error=None),
            make_receipt(verdict="crashed"),
            id="first-bad-one-stays",
        ),
    ],
)
def test_receipts_of_one_binary(tmp_path, old, new, expected):
    writer = make_db(tmp_path)
    writer.record(receipts=[old])
    assert writer.receipt("ffaf") == old
    writer.record(receipts=[new])
    assert writer.receipt("ffaf") == expected
    assert db.load_file(writer.path).receipts == [expected]


# Files that cannot be used


MALFORMED = [
    pytest.param(b"", id="empty"),
    pytest.param(good_bytes()[:-40], id="truncated"),
    pytest.param(good_bytes() * 2, id="doubled"),
    pytest.param(good_bytes().replace(b"Test GPU", b"Test \xff\xfe"), id="not-utf-8"),
    pytest.param(good_bytes().decode().encode("utf-16"), id="utf-16"),
    pytest.param(b"[]", id="list"),
    pytest.param(b"null", id="null"),
    pytest.param(b"{}", id="no-gpu"),
    pytest.param(b'{"a":' + b"[" * 100_000, id="deeply-nested"),
    pytest.param(changed(schema=0), id="schema-0"),
    pytest.param(changed(schema="1"), id="schema-text"),
    pytest.param(changed(entries={}), id="entries-object"),
    pytest.param(changed(surprise=1), id="unknown-field"),
    pytest.param(changed_entry("config", CHUNK_SIZE=63), id="impossible-config"),
    pytest.param(changed_entry("key", rows="4"), id="rows-text"),
    pytest.param(changed_entry("timing", median_us=None), id="time-null"),
    pytest.param(good_bytes(OTHER_GPU), id="another-gpu"),
]


@pytest.mark.parametrize("first", ["look-up", "record"])
@pytest.mark.parametrize("content", MALFORMED)
def test_a_malformed_file_is_set_aside_with_one_warning(tmp_path, content, first):
    used = make_db(tmp_path)
    used.path.write_bytes(content)
    with one_warning(re.escape(str(used.path)) + ".* set aside as"):
        if first == "look-up":
            assert not used.winners(make_key())
        assert used.record([make_entry(make_key(512))])
        assert not used.winners(make_key())
        assert used.receipt("ffaf") is None
    assert used.path.with_name(f"{used.path.name}.bad-1").read_bytes() == content
    assert [entry.key for entry in db.load_file(used.path).entries] == [make_key(512)]


@pytest.mark.parametrize("content", MALFORMED)
def test_a_malformed_file_elsewhere_is_ignored_and_left_alone(tmp_path, content):
    make_db(tmp_path / "last").record([make_entry()])
    other = tmp_path / "other" / db.file_name(GPU)
    other.parent.mkdir()
    other.write_bytes(content)
    reader = make_db(tmp_path / "user", other.parent, tmp_path / "last")
    with one_warning(re.escape(str(other))):
        assert reader.winners(make_key())[0].entry == make_entry()
        reader.reload()
        assert reader.winners(make_key())
    assert list(other.parent.iterdir()) == [other]
    assert other.read_bytes() == content


@pytest.mark.parametrize("content", [content for content in MALFORMED if content.id != "another-gpu"])
def test_tools_are_told_what_is_wrong_with_a_file(tmp_path, content):
    path = tmp_path / "any.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"any\.json: ."):
        db.load_file(path)


def test_tools_read_the_file_of_any_gpu_and_need_one(tmp_path):
    (tmp_path / "any.json").write_bytes(good_bytes(OTHER_GPU))
    assert db.load_file(tmp_path / "any.json").gpu == OTHER_GPU
    with pytest.raises(ValueError, match=r"none\.json: no such file"):
        db.load_file(tmp_path / "none.json")


def make_folder(path):
    path.mkdir()
    (path / "something").touch()


@pytest.mark.parametrize("make", [pytest.param(make_folder, id="directory"), pytest.param(os.mkfifo, id="pipe")])
def test_what_is_no_file_is_set_aside(tmp_path, make):
    used = make_db(tmp_path)
    make(used.path)
    with one_warning("not a regular file"):
        assert not used.winners(make_key())
        assert used.record([make_entry()])
    assert used.path.with_name(f"{used.path.name}.bad-1").exists()
    assert make_db(tmp_path).winners(make_key())


def test_an_earlier_bad_file_is_kept(tmp_path):
    for content in (b"first", b"second"):
        used = make_db(tmp_path)
        used.path.write_bytes(content)
        with one_warning("set aside as"):
            used.winners(make_key())
    kept = [used.path.with_name(f"{used.path.name}.bad-{n}").read_bytes() for n in (1, 2)]
    assert kept == [b"first", b"second"]


def test_a_bad_file_that_a_writer_has_just_replaced_is_not_renamed(tmp_path, monkeypatch):
    reader = make_db(tmp_path)
    reader.path.write_bytes(b"")
    locked = TuningDB._locked

    def late(self, *arguments):
        reader.path.write_bytes(good_bytes())
        return locked(self, *arguments)

    monkeypatch.setattr(TuningDB, "_locked", late)
    assert reader.winners(make_key())
    assert list(tmp_path.glob("*.bad-*")) == []


@pytest.mark.parametrize("first", ["look-up", "record"])
def test_a_newer_schema_is_read_as_empty_and_never_overwritten(tmp_path, first):
    used = make_db(tmp_path)
    content = changed(schema=2, entries={"another": "form"})
    used.path.write_bytes(content)
    with one_warning("schema 2 is newer"):
        if first == "look-up":
            assert not used.winners(make_key())
            assert list(tmp_path.iterdir()) == [used.path]
        assert not used.record([make_entry()], [make_receipt()])
        assert not used.record([make_entry(make_key(512))])
        assert used.winners(make_key())[0].entry == make_entry()
        assert used.winners(make_key(512))
        assert used.receipt("ffaf")
    assert used.path.read_bytes() == content
    assert list(tmp_path.glob("*.bad-*")) == []


def test_a_file_that_may_not_be_read_is_left_alone(tmp_path, monkeypatch):
    used = make_db(tmp_path)
    used.path.write_bytes(good_bytes())

    path_open = Path.open

    def refuse(path, mode="r"):
        if path == used.path:
            raise PermissionError(errno.EACCES, "Permission denied")
        return path_open(path, mode)

    with one_warning("Permission denied"), monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        assert not used.winners(make_key())
        assert not used.record([make_entry(make_key(512))])
        assert used.winners(make_key(512))
    assert used.path.read_bytes() == good_bytes()


# Where nothing can be written


def fill_disk(monkeypatch, folder):
    def fail(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)


def fill_disk_while_writing(monkeypatch, folder):
    """The first half of the file fits."""

    class Stream(io.FileIO):
        def write(self, data):
            super().write(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")

    def open_file(path, mode="r", **keywords):
        return Stream(path, "x") if mode == "xb" else open(path, mode, **keywords)  # noqa: PTH123  it is Path.open

    monkeypatch.setattr(Path, "open", open_file)


def refuse_replace(monkeypatch, folder):
    def fail(path, target):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "replace", fail)


def refuse_new_files(monkeypatch, folder):
    def open_file(path, mode="r", **keywords):
        if mode == "xb":
            raise PermissionError(errno.EACCES, "Permission denied")
        return open(path, mode, **keywords)  # noqa: PTH123  Path.open is what this stands for

    monkeypatch.setattr(Path, "open", open_file)


def lock_is_foreign(monkeypatch, folder):
    Path(folder, f"{db.file_name(GPU)}.lock").unlink(missing_ok=True)
    Path(folder, f"{db.file_name(GPU)}.lock").mkdir()


def refuse_the_lock(monkeypatch, folder):
    """As root may open everything: what another user's lock answers."""
    whole = os.open

    def open_file(path, *arguments, **keywords):
        if str(path).endswith(".lock"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return whole(path, *arguments, **keywords)

    monkeypatch.setattr(os, "open", open_file)


PREVENTIONS = [
    fill_disk, fill_disk_while_writing, refuse_replace, refuse_new_files, lock_is_foreign, refuse_the_lock,
]  # fmt: skip


@pytest.mark.parametrize("prevent", PREVENTIONS)
def test_what_cannot_be_written_stays_in_memory_with_one_warning(tmp_path, monkeypatch, prevent):
    used = make_db(tmp_path)
    used.record([make_entry(make_key(512))])
    before = used.path.read_bytes()
    with one_warning("cannot be written"), monkeypatch.context() as patch:
        prevent(patch, tmp_path)
        assert not used.record([make_entry()], [make_receipt(seq_lens=(512,))])
        assert not used.record(receipts=[make_receipt(seq_lens=(1024,))])
        used.reload()
        assert used.winners(make_key())[0].entry == make_entry()
        assert used.winners(make_key(512))
        assert used.receipt("ffaf").seq_lens == (512, 1024)
    assert used.path.read_bytes() == before
    assert list(tmp_path.glob("*.tmp")) == []


def test_what_could_not_be_saved_is_saved_by_the_next_record(tmp_path, monkeypatch):
    used = make_db(tmp_path)
    with one_warning("cannot be written"), monkeypatch.context() as patch:
        fill_disk(patch, tmp_path)
        assert not used.record([make_entry()], [make_receipt()])
    assert used.record([make_entry(make_key(512))])
    file = db.load_file(used.path)
    assert [entry.key.seq_len for entry in file.entries] == [512, 1024]
    assert file.receipts == [make_receipt()]


@pytest.mark.parametrize("folder", ["file", "file/below"])
def test_a_folder_that_cannot_be_made(tmp_path, folder):
    (tmp_path / "file").touch()
    used = make_db(tmp_path / folder)
    with one_warning("cannot be written"):
        assert not used.record([make_entry()])
        assert used.winners(make_key())
    with used.tuning_lock(60) as acquired:
        assert acquired


def no_home(*arguments, **keywords):
    raise RuntimeError("could not determine the home directory")


@pytest.mark.parametrize(
    "cache_path",
    [pytest.param(no_home, id="error"), pytest.param(lambda *_, **__: Path("~/.cache/tunedqk"), id="unexpanded")],
)
def test_without_a_home_everything_stays_in_memory(tmp_path, monkeypatch, cache_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TUNEDQK_CACHE_DIR")
    monkeypatch.setattr(platformdirs, "user_cache_path", cache_path)
    used = TuningDB(GPU, others=[])
    assert not used.winners(make_key())
    with one_warning("TUNEDQK_CACHE_DIR"):
        assert not used.record([make_entry()])
        assert not used.record(receipts=[make_receipt()])
    assert used.winners(make_key())
    assert used.receipt("ffaf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="umask is POSIX")
@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077, 0o002], ids=oct)
def test_the_umask_is_respected(tmp_path, umask):
    before = os.umask(umask)
    try:
        make_db(tmp_path / "cache").record([make_entry()])
    finally:
        os.umask(before)
    assert stat.S_IMODE(make_db(tmp_path / "cache").path.stat().st_mode) == 0o666 & ~umask
    for path in (tmp_path / "cache", *(tmp_path / "cache").iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) & umask == 0, path


# What others may have planted


def as_if_owned(monkeypatch, path, owner, folder_owner, user):
    """As if this user read a file of that owner in a folder of that one."""
    stat_of, fstat = Path.stat, os.fstat
    inode = path.stat().st_ino

    def owned(found, uid):
        return os.stat_result((*found[:4], uid, *found[5:10]))

    def fake(self, **named):
        found = stat_of(self, **named)
        return owned(found, folder_owner) if self == path.parent else found

    def fake_of_open(descriptor):  # what was read, whatever has taken its place since
        found = fstat(descriptor)
        return owned(found, owner) if found.st_ino == inode else found

    monkeypatch.setattr(Path, "stat", fake)
    monkeypatch.setattr(os, "fstat", fake_of_open)
    monkeypatch.setattr(os, "geteuid", lambda: user)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no user ids here")
@pytest.mark.parametrize(
    ("owner", "folder_owner", "believed"),
    [
        pytest.param(1001, 1002, True, id="own file in a shared folder"),
        pytest.param(0, 1002, True, id="root's"),
        pytest.param(1002, 1002, True, id="of the folder's owner"),
        pytest.param(1003, 1002, False, id="of somebody else"),
        pytest.param(1003, 1001, False, id="of somebody else in our folder"),
        pytest.param(1003, 0, False, id="of somebody else in root's folder"),
    ],
)
@pytest.mark.parametrize("where", ["user", "others"])
def test_a_planted_receipt_does_not_count(tmp_path, monkeypatch, owner, folder_owner, believed, where):
    entry, receipt, bad = make_entry(), make_receipt(), make_receipt(binary="bad", verdict="crashed")
    path = make_db(tmp_path / "shared").path
    assert make_db(tmp_path / "shared").record([entry], [receipt, bad])
    as_if_owned(monkeypatch, path, owner, folder_owner, user=1001)
    used = make_db(tmp_path / "shared") if where == "user" else make_db(tmp_path / "own", path.parent)
    with contextlib.nullcontext() if believed else one_warning("its receipts do not count"):
        assert used.winners(entry.key)[0].entry == entry  # which is validated
        assert used.receipt(receipt.binary) == (receipt if believed else None)
        assert used.receipt("bad") == (bad if believed else None)  # else a stranger could refuse us every config
        # Nor does it begin to count when it is saved under our name.
        assert used.record(receipts=[make_receipt(binary="aaaa")])
    monkeypatch.undo()
    assert (make_db(tmp_path / "shared").receipt(receipt.binary) is not None) == (believed or where == "others")


def test_a_file_whose_folder_is_gone_is_planted(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1001)
    assert db._is_planted(tmp_path / "gone" / "file.json", owner=1003)


# Locks


@pytest.mark.parametrize("held_lock", [".lock"], indirect=True)
def test_a_lock_that_never_comes_costs_one_bounded_wait(tmp_path, monkeypatch, held_lock):
    used = make_db(tmp_path)
    used.path.write_bytes(good_bytes())
    monkeypatch.setattr(db, "LOCK_TIMEOUT", 0.2)
    start = time.monotonic()
    assert used.winners(make_key())
    with one_warning("its lock is taken"):
        assert not used.record([make_entry(make_key(512))])
        monkeypatch.setattr(db, "LOCK_TIMEOUT", 100)
        assert not used.record([make_entry(make_key(2048))])
    assert make_db(tmp_path).winners(make_key())
    assert time.monotonic() - start < 10
    assert used.path.read_bytes() == good_bytes()
    held_lock()
    assert used.record()
    assert [found.entry.key.seq_len for found in make_db(tmp_path).entries()] == [512, 1024, 2048]


@pytest.mark.parametrize("held_lock", [".lock"], indirect=True)
def test_a_bad_file_is_read_as_empty_while_a_writer_holds_the_lock(tmp_path, held_lock):
    reader = make_db(tmp_path)
    reader.path.write_bytes(b"")
    with one_warning("left alone and read as empty"):
        assert not reader.winners(make_key())
    assert reader.path.read_bytes() == b""


@pytest.mark.parametrize("held_lock", [".tuning.lock"], indirect=True)
def test_one_process_tunes_at_a_time(tmp_path, held_lock):
    waiting = make_db(tmp_path)
    with waiting.tuning_lock(0.1) as acquired:
        assert not acquired
    assert waiting.record([make_entry()])
    with make_db(tmp_path, gpu=OTHER_GPU).tuning_lock(0.1) as acquired:
        assert acquired
    held_lock()
    with waiting.tuning_lock(10) as acquired:
        assert acquired


def test_the_tuning_lock_is_released_by_an_error_and_excludes_threads(tmp_path):
    with pytest.raises(KeyError), make_db(tmp_path).tuning_lock(1):
        raise KeyError
    with make_db(tmp_path).tuning_lock(1) as one, make_db(tmp_path).tuning_lock(0) as other:
        assert one
        assert not other


def test_threads_share_a_db(tmp_path):
    shared = make_db(tmp_path)
    failures = []

    def work(i):
        for j in range(5):
            key = make_key(512 << j, 16 * (i + 1))
            saved = shared.record([make_entry(key)], [make_receipt(seq_lens=(512 << j,)), make_receipt(f"{i}-{j}")])
            if not (saved and shared.winners(key) and shared.receipt(f"{i}-{j}")):
                failures.append(key)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    file = db.load_file(shared.path)
    assert len(file.entries) == 40
    assert len(file.receipts) == 41
    assert make_db(tmp_path).receipt("ffaf").seq_lens == (512, 1024, 2048, 4096, 8192)


def tune_same_key(worker, barrier, folder, rounds):
    for n in range(rounds):
        mine = make_db(folder / str(n))
        barrier.wait(60)
        found = mine.winners(make_key())
        assert not found or found[0].entry.key == make_key()
        assert mine.record([make_entry(chunk=16 << worker)], [make_receipt(str(worker))])
        assert mine.winners(make_key())


@pytest.mark.parametrize("rounds", [15, pytest.param(50, marks=pytest.mark.stress)])
def test_eight_processes_with_one_cold_key(tmp_path, rounds):
    run_together(8, tune_same_key, tmp_path, rounds)
    for n in range(rounds):
        file = db.load_file(make_db(tmp_path / str(n)).path)
        assert [entry.key for entry in file.entries] == [make_key()]
        assert [receipt.binary for receipt in file.receipts] == list("01234567")


def write_own_keys(worker, barrier, folder, keys):
    mine = make_db(folder)
    barrier.wait(60)
    for n in range(keys):
        assert mine.record([make_entry(make_key(512, 1 + worker * keys + n))])


@pytest.mark.parametrize("keys", [10, pytest.param(20, marks=pytest.mark.stress)])
def test_sixteen_writers_lose_no_update(tmp_path, keys):
    run_together(16, write_own_keys, tmp_path, keys)
    found = [found.entry.key.head_dim for found in make_db(tmp_path).entries()]
    assert found == list(range(1, 16 * keys + 1))


def write_until_killed(worker, barrier, folder):
    mine = make_db(folder)
    first = os.getpid() * 1000
    for n in range(first, first + 1000):
        if mine.record([make_entry(make_key(512, n))]):
            print(f"{n}\n", end="", flush=True)  # in one piece


@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.stress)])
def test_killed_writers_lose_nothing_that_was_reported_saved(tmp_path, kills):
    batches = f"import test_db\nfor _ in range({kills // 4}): test_db.fork(4, test_db.write_until_killed)"
    parent = start_python(batches, tmp_path)
    moments = random.Random(0)  # noqa: S311
    saved, killed = set(), set()
    for _ in range(kills // 4):
        writers = set()
        while len(writers) < 4:
            saved.add(n := int(parent.stdout.readline()))
            writers |= {n // 1000} - killed
        for writer in writers:
            time.sleep(moments.uniform(0, 0.02))
            os.kill(writer, signal.SIGKILL)
        killed |= writers
        assert saved <= {entry.key.head_dim for entry in db.load_file(make_db(tmp_path).path).entries}
    saved.update(map(int, parent.communicate(timeout=60)[0].split()))
    assert make_db(tmp_path).record([make_entry(make_key(1024))])
    assert saved < {found.entry.key.head_dim for found in make_db(tmp_path).entries()}


def test_the_temporary_file_of_a_dead_writer_is_removed(tmp_path):
    used = make_db(tmp_path)
    other = make_db(tmp_path, gpu=OTHER_GPU).path
    left_over, foreign = (path.with_name(f"{path.name}.00000000.tmp") for path in (used.path, other))
    left_over.touch()
    foreign.touch()
    assert used.record([make_entry()])
    assert list(tmp_path.glob("*.tmp")) == [foreign]
