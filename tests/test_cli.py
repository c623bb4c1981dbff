"""The command line, from arguments to files and exit status."""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys

import msgspec
import mutants
import pytest
import torch
from rich.console import Console

from tunedqk import accept, cli, isolation, pretune, tune, validate
from tunedqk.config import KernelConfig
from tunedqk.db import TuningDB
from tunedqk.device import identity_of
from tunedqk.errors import NoAcceptedConfigError, TuningDBWarning
from tunedqk.pretune import resolver_for_folder
from tunedqk.validate import Validator

ONE_SHAPE = ("--head-dims", "16", "--dtypes", "float32", "--rows", "1", "--sequences", "8")
TWO_KEYS = ("pretune", *ONE_SHAPE, "--seq-lens", "512,1000")


@pytest.fixture(autouse=True)
def few(cache_dir, monkeypatch):
    """Two candidates for every key, and a cache directory of its own."""
    configs = [KernelConfig(64, 64, num_warps=4), KernelConfig(128, 128, num_warps=4)]
    for module in (tune, pretune):
        monkeypatch.setattr(module, "candidates", lambda *_: list(configs))
    return configs


@pytest.fixture(autouse=True)
def _in_process(monkeypatch):
    """No worker process (see test_isolation), so that what is patched here counts."""
    monkeypatch.setattr(
        isolation, "IsolatedPretuner", lambda resolver, _, *, force: pretune.Pretuner(resolver, force=force)
    )


@pytest.fixture
def run(capsys):
    """Run a command: exit status and standard output."""

    def command(*arguments):
        status = cli.main([str(argument) for argument in arguments])
        return status, capsys.readouterr().out

    return command


def db_of(device, folder=None):
    place = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    return TuningDB(identity_of(place), folder, [])


def lengths(db):
    return [found.entry.key.seq_len for found in db.entries()]


def tuned_keys(monkeypatch):
    """The keys that are tuned from now on, with their incumbents."""
    seen, whole = [], tune.tune

    def spy(key, *arguments, incumbent=None, **named):
        seen.append((key.seq_len, incumbent))
        return whole(key, *arguments, incumbent=incumbent, **named)

    monkeypatch.setattr(pretune, "tune", spy)
    return seen


# --- pretune ---


def test_a_dry_run_says_what_would_happen_and_does_nothing(run, device, cache_dir):
    status, text = run(*TWO_KEYS, "--dry-run")
    assert status == 0
    assert f"2 of 2 keys to tune, into {db_of(device).path}" in text
    assert "head_dim 16, float32, rows 1, seq_len 1024, up to 16 sequences: 2 configs" in text
    assert "4 configs in all. Nothing was tuned." in text
    assert not cache_dir.exists()


def test_pretune_tunes_each_key_once(run, device, monkeypatch):
    tuned = tuned_keys(monkeypatch)
    status, text = run(*TWO_KEYS)
    assert status == 0
    assert lengths(db_of(device)) == [512, 1024]
    assert re.search(r"2 keys tuned in .*, 0 had a winner, 0 failed", text)
    # The same in a new process: winners with receipts, so nothing to tune or to validate.
    monkeypatch.setattr(Validator, "check", None)
    monkeypatch.setattr(Validator, "check_length", None)
    status, text = run(*TWO_KEYS)
    assert status == 0
    assert "0 of 2 keys to tune" in text
    assert "Nothing to do: all 2 keys have a winner with a receipt." in text
    assert [seq_len for seq_len, _ in tuned] == [512, 1024]


def test_a_stopped_run_keeps_what_is_finished_and_goes_on_there(run, device, monkeypatch, capsys):
    whole = tune.tune

    def stopped(key, *arguments, **named):
        if key.seq_len == 1024:
            raise KeyboardInterrupt
        return whole(key, *arguments, **named)

    monkeypatch.setattr(pretune, "tune", stopped)
    assert cli.main(list(TWO_KEYS)) == 130
    assert "Stopped. What was finished is saved" in capsys.readouterr().err
    assert lengths(db_of(device)) == [512]
    monkeypatch.setattr(pretune, "tune", whole)
    tuned = tuned_keys(monkeypatch)
    assert run(*TWO_KEYS)[0] == 0
    assert tuned == [(1024, None)]
    assert lengths(db_of(device)) == [512, 1024]


def test_force_tunes_again_against_the_incumbent(run, device, monkeypatch):
    run(*TWO_KEYS)
    winners = [found.entry.config for found in db_of(device).entries()]
    tuned = tuned_keys(monkeypatch)
    status, text = run(*TWO_KEYS, "--force")
    assert status == 0
    assert "2 of 2 keys to tune" in text
    assert tuned == [(512, winners[0]), (1024, winners[1])]


def test_out_is_another_folder_that_knows_nothing_else(run, device, tmp_path, cache_dir, monkeypatch):
    run(*TWO_KEYS)
    before = db_of(device).path.read_bytes()
    tuned = tuned_keys(monkeypatch)
    assert run(*TWO_KEYS, "--out", tmp_path / "elsewhere")[0] == 0
    assert [seq_len for seq_len, _ in tuned] == [512, 1024]
    assert lengths(db_of(device, tmp_path / "elsewhere")) == [512, 1024]
    assert db_of(device).path.read_bytes() == before


def test_a_key_that_fails_is_told_and_the_others_go_on(run, device, monkeypatch):
    whole = tune.tune

    def failing(key, *arguments, **named):
        if key.seq_len == 512:
            raise NoAcceptedConfigError("no candidate agreed with the loop kernel")
        return whole(key, *arguments, **named)

    monkeypatch.setattr(pretune, "tune", failing)
    status, text = run(*TWO_KEYS)
    assert status == 1
    assert "no candidate agreed with the loop kernel" in text
    assert "1 failed" in text
    assert lengths(db_of(device)) == [1024]


def test_a_winner_that_is_rejected_is_tuned_again(run, device, few, monkeypatch):
    run(*TWO_KEYS)
    db = db_of(device)
    entry = db.entries()[0].entry
    receipts = [msgspec.structs.replace(receipt, verdict="wrong result", seq_lens=()) for receipt in db.receipts()]
    assert db.record(receipts=[receipt for receipt in receipts if f"{entry.config}" in receipt.what])
    tuned = tuned_keys(monkeypatch)
    status, _ = run(*TWO_KEYS)
    assert status == 0
    assert [seq_len for seq_len, _ in tuned][:1] == [512]
    assert db_of(device).entries()[0].entry.config != entry.config


def test_two_runs_at_once_tune_a_key_once(cache_dir, device):
    code = (
        "import sys; from tunedqk import cli, isolation, pretune, tune; from tunedqk.config import KernelConfig;"
        "few = lambda *_: [KernelConfig(c, c, num_warps=4) for c in (64, 128)];"
        "tune.candidates = pretune.candidates = few;"
        "isolation.IsolatedPretuner = lambda resolver, _, force: pretune.Pretuner(resolver, force=force);"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, *TWO_KEYS]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    texts = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    counts = [re.search(r"(\d+) keys? tuned in .*, (\d+) had a winner", text) for text in texts]
    tuned = sum(int(match[1]) for match in counts if match)
    assert tuned == 2, texts
    assert lengths(db_of(device)) == [512, 1024]


def test_a_terminal_gets_a_bar_with_the_time_left(device, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(cli, "_console", lambda: Console(file=screen, force_terminal=True, width=120))
    assert cli.main(list(TWO_KEYS)) == 0
    text = screen.getvalue()
    assert "2/2" in text
    assert "0:00:00" in text


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        pytest.param((), 1080, id="default"),
        pytest.param(("--quick",), 8, id="quick"),
        pytest.param(("--all",), 2 * (12 * 3 * 9 * 9 + 3 * 2 * 4 * 9 * (4 + 3)), id="all"),
        pytest.param(("--page-sizes", "0,16"), 2160, id="pages too"),
        pytest.param(("--quick", "--rows", "8"), 4, id="quick, rows by hand"),
        pytest.param(("--quick", "--sequences", "1,8"), 4, id="quick, single requests alone"),
        pytest.param(("--head-dims", "64,64", "--seq-lens", "600,1000,1024"), 24, id="one bucket, no key twice"),
    ],
)
def test_the_keys_of_a_run(chosen, expected):
    assert len(cli._keys(cli._parser().parse_args(["pretune", *chosen]))) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(("pretune", "--head-dims", "577"), "expected numbers from 1 to 576", id="head_dim 577"),
        pytest.param(("pretune", "--rows", "four"), "expected numbers like 64,128, got 'four'", id="no number"),
        pytest.param(("pretune", "--dtypes", "float64"), "got 'float64'", id="float64"),
        pytest.param(("pretune", "--quick", "--all"), "not allowed with", id="quick and all"),
        pytest.param((), "required", id="no command"),
    ],
)
def test_bad_arguments_are_named(capsys, arguments, message, cache_dir):
    with pytest.raises(SystemExit) as stopped:
        cli.main(list(arguments))
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not cache_dir.exists()


# --- show and verify ---


def test_show_lists_the_winners_of_every_file(run, device, tmp_path):
    run(*TWO_KEYS)
    path = db_of(device).path
    status, text = run("show", path)
    assert status == 0
    assert "2 winners" in text
    assert str(path) in text.replace("\n", "")
    rows = [line.strip("│ ").split("│") for line in text.splitlines() if "float32" in line]
    keys = [[cell.strip() for cell in row[:6]] for row in rows]
    assert keys == [["16", "float32", "1", "-", seq_len, "up to 16"] for seq_len in ("512", "1024")]
    assert run("show")[0] == 0  # with what is shipped


def test_show_of_a_spoiled_file_is_an_error_and_changes_nothing(capsys, tmp_path):
    spoiled = tmp_path / "file.json"
    spoiled.write_text("{")
    assert cli.main(["show", str(spoiled)]) == 1
    assert "file.json" in capsys.readouterr().err
    assert spoiled.read_text() == "{"


def test_verify_validates_though_there_are_receipts(run, monkeypatch, tmp_path):
    out = ("--out", tmp_path / "out")  # and not what is shipped, too
    run(*TWO_KEYS, *out)
    status, text = run("verify", *out)
    assert status == 0
    assert "2 of 2 winners are correct" in text
    assert re.search(r"[1-9]\d* binaries validated again", text)
    build = mutants.builder(mutants.LAST_POSITION_SKIPPED, lambda *_: True)
    monkeypatch.setattr(accept, "build", build)
    status, text = run("verify", *out)
    assert status == 1
    assert "0 of 2 winners are correct" in text
    assert "wrong result" in text


def test_what_was_pretuned_is_found_by_a_process_that_never_tunes(run, device, cache_dir):
    run("pretune", *ONE_SHAPE, "--seq-lens", "512")
    code = f"""
import warnings, logging, torch
warnings.simplefilter("error")
logging.basicConfig(level=logging.WARNING, format="said %(message)s")
from tunedqk import explain, qk_score, tune
from tunedqk.config import KernelConfig
tune.candidates = lambda *_: [KernelConfig(c, c, num_warps=4) for c in (64, 128)]
q, k = torch.randn(1, 1, 16, device={device!r}), torch.randn(1, 300, 1, 16, device={device!r})
qk_score(q, k)
about = explain(q, k)
print(about.origin, about.action, about.receipt.verdict, about.ready)
"""
    process = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TUNEDQK_MODE": "cached"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-1] == "the stored winner launch correct True"
    assert "said" not in process.stderr


def test_results_that_cannot_be_saved_are_told(run, capsys, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TUNEDQK_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(TuningDBWarning, match="cannot be written"):
        status = cli.main(list(TWO_KEYS))
    assert status == 1
    assert "2 results could not be saved in" in capsys.readouterr().err


def test_verify_is_of_the_winners_that_calls_use(run, tmp_path, monkeypatch):
    run("pretune", *ONE_SHAPE, "--seq-lens", "512", "--out", tmp_path / "shipped")
    (found,) = resolver_for_folder(tmp_path / "shipped").db.entries()
    gone = msgspec.structs.replace(found.entry, config=KernelConfig(16, 16, num_warps=4))
    monkeypatch.setenv("TUNEDQK_DB_PATH", str(tmp_path / "shipped"))
    monkeypatch.setattr("tunedqk.db.shipped_directory", lambda: tmp_path / "none")
    resolver = resolver_for_folder(None)
    assert resolver.db.record(entries=[gone])
    assert [(entry.config, error) for entry, error in pretune.verify(resolver)] == [(found.entry.config, None)]


def test_verify_does_not_launch_what_is_known_to_crash(run, tmp_path, monkeypatch):
    out = ("--out", tmp_path / "out")
    run("pretune", *ONE_SHAPE, "--seq-lens", "512", *out)
    db = resolver_for_folder(tmp_path / "out").db
    crashed = [msgspec.structs.replace(r, verdict=validate.CRASHED, what="SIGSEGV") for r in db.receipts()]
    assert db.record(receipts=crashed)
    monkeypatch.setattr(validate.Validator, "check", None)
    status, text = run("verify", *out)
    assert status == 1
    assert "0 of 1 winners are correct, 0 binaries validated again" in text
    assert "SIGSEGV" in text


@pytest.mark.skipif(os.name != "posix", reason="there is no sh")
def test_without_a_place_for_its_output_a_command_works(cache_dir):
    command = [sys.executable, "-m", "tunedqk.cli", "show"]
    process = subprocess.run(
        ["/bin/sh", "-c", 'exec "$@" >&-', "sh", *command], capture_output=True, text=True, check=False
    )
    assert (process.returncode, process.stderr) == (0, "")


@pytest.mark.skipif(os.name != "posix", reason="there is no sh")
def test_a_reader_that_has_seen_enough_is_no_traceback(cache_dir):
    script = f"{shlex.quote(sys.executable)} -m tunedqk.cli show | head -c0"
    process = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=False)
    assert process.stderr == ""


def test_nothing_to_verify_is_an_error(capsys, tmp_path):
    assert cli.main(["verify", "--out", str(tmp_path / "mistyped")]) == 1
    assert "nothing was verified" in capsys.readouterr().err
    assert not (tmp_path / "mistyped").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["pretune", "verify"])
def test_neither_gpu_nor_interpreter_is_told(capsys, monkeypatch, command):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(SystemExit) as stopped:
        cli.main([command])
    assert stopped.value.code == 2
    assert "no GPU here, and TRITON_INTERPRET is set" in capsys.readouterr().err
