"""Pretuning in a worker process: a crash or a hang costs the guilty candidate, and nobody else."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import mutants
import pytest
import torch
from conftest import ON_GPU

from tunedqk import accept, cli, exits, isolation, launch, pretune, tune, validate
from tunedqk.config import KernelConfig, tuning_key
from tunedqk.db import TuningDB
from tunedqk.device import identity_of
from tunedqk.errors import TunedQKError, WorkerError
from tunedqk.isolation import IsolatedPretuner
from tunedqk.score import qk_score

INNOCENT, GUILTY, OTHER = (KernelConfig(chunk, chunk, num_warps=4) for chunk in (64, 128, 32))
KEY = tuning_key(512, 16, "float32", 1)
NEXT_KEY = tuning_key(1024, 16, "float32", 1)
HANG = 30 if ON_GPU else 3  # seconds; on a GPU compiling takes some, and may have to share the machine
ONE_SHAPE = (
    "pretune", "--head-dims", "16", "--dtypes", "float32", "--rows", "1", "--seq-lens", "512", "--sequences", "8",
)  # fmt: skip


# --- What goes on in the worker. It imports this module, so these are functions of it. ---


class Deadly(launch.Binary):
    """A right binary that does something else when it is launched."""

    def __init__(self, binary, fault):
        super().__init__(binary.variant, binary.config)
        self.hash = binary.hash
        self.launch = lambda *_: fault()


def serve_faulty(arguments, *, at_launch=None, at_build=None, guilty=(GUILTY,), configs=(INNOCENT, GUILTY)):
    """Serve with candidates of which some are faulty."""

    def build(device, variant, config):
        if config in guilty and at_build is not None:
            at_build()
        binary = launch.build(device, variant, config)
        return Deadly(binary, at_launch) if config in guilty and at_launch is not None else binary

    accept.build = build
    serve_few(arguments, configs)


def serve_few(arguments, configs=(INNOCENT, GUILTY)):
    for module in (tune, pretune):
        module.candidates = lambda *_: list(configs)
    isolation.serve(*arguments)


def segfault():
    os.kill(os.getpid(), signal.SIGSEGV)


def hang():
    if "TUNEDQK_TEST_HANGS" in os.environ:
        Path(os.environ["TUNEDQK_TEST_HANGS"]).touch()
    time.sleep(600)


def kill_from_outside():
    """Once: the file says whether it was done."""
    done = Path(os.environ["TUNEDQK_TEST_DONE"])
    if not done.exists():
        done.touch()
        os.kill(os.getpid(), int(os.environ["TUNEDQK_TEST_SIGNAL"]))


def raise_bug():
    raise ZeroDivisionError("a bug of ours")


def _lost(_):
    return RuntimeError("an illegal memory access was encountered")


def poison():
    accept.Door._context_error = _lost
    raise RuntimeError("an illegal memory access was encountered\nand more")


def segfaulting(*arguments):
    serve_faulty(arguments, at_launch=segfault)


def aborting_compiler(*arguments):
    serve_faulty(arguments, at_build=os.abort, configs=(INNOCENT, GUILTY, OTHER))


def hanging(*arguments):
    serve_faulty(arguments, at_launch=hang)


def poisoned(*arguments):
    serve_faulty(arguments, at_launch=poison)


def two_segfaulting(*arguments):
    serve_faulty(arguments, at_launch=segfault, guilty=(GUILTY, OTHER), configs=(INNOCENT, GUILTY, OTHER))


def all_segfaulting(*arguments):
    serve_faulty(arguments, at_launch=segfault, guilty=(INNOCENT, GUILTY))


def killed_once(*arguments):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored
    if os.environ["TUNEDQK_TEST_WHEN"] == "build":
        serve_faulty(arguments, at_build=kill_from_outside)
    else:  # then it is alone in flight
        accept.Door._check = lambda *_: validate.Verdict(validate.CORRECT)
        accept.Door._check_length = _check_length_killed
        serve_few(arguments)


def _check_length_killed(self, binary, _):
    with self.launching(binary):
        if binary.config == GUILTY:
            kill_from_outside()
    return validate.Verdict(validate.CORRECT)


def buggy(*arguments):
    whole = pretune.tune

    def failing(key, *rest, **named):
        return raise_bug() if key == KEY else whole(key, *rest, **named)

    pretune.tune = failing
    serve_faulty(arguments)


def forgetful(*arguments):
    TuningDB.receipt = lambda *_: None
    segfaulting(*arguments)


def patient(*arguments):
    """Waits, with nothing in flight, as for another process that tunes."""
    whole = pretune.tune

    def late(*rest, **named):
        time.sleep(3)
        return whole(*rest, **named)

    pretune.tune = late
    serve_few(arguments)


def lost_before(*arguments):
    accept.Door._context_error = _lost
    serve_few(arguments)


def never_serving(*_):
    sys.exit(3)


def dying(*arguments):
    pretune.tune = lambda *_, **__: os._exit(3)
    serve_faulty(arguments)


def _is_guilty(_, config):
    return config == GUILTY


def accessing_illegally(*arguments):
    accept.build = mutants.builder(mutants.FAR_AWAY, _is_guilty)
    serve_few(arguments)


def looping(*arguments):
    accept.build = mutants.builder(mutants.ENDLESS, _is_guilty)
    serve_few(arguments)


def call_illegally(connection):
    """A user's process whose call crashes; tells what the call raises."""
    accept.build = mutants.builder(mutants.FAR_AWAY, _is_guilty)
    q, k = torch.ones(1, 1, 16, device="cuda"), torch.ones(1, 100, 1, 16, device="cuda")
    try:
        qk_score(q, k, config=GUILTY)
    except TunedQKError as error:
        connection.send((type(error).__name__, str(error)))
    os._exit(0)


# --- Here ---


def in_environment(environment, work, *arguments):
    """A forked process begins with the environment of the one it was forked from."""
    os.environ.clear()
    os.environ.update(environment)
    work(*arguments)


class Forking:
    """The context of `multiprocessing` whose processes are forked from one that has imported this module."""

    Pipe = staticmethod(multiprocessing.Pipe)

    def __init__(self):
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
            multiprocessing.forkserver.ensure_running()

    def Process(self, target, args, daemon=None):  # noqa: N802
        args = (dict(os.environ), target, *args)
        return self._context.Process(target=in_environment, args=args, daemon=daemon)


@pytest.fixture(scope="module")
def context():
    """Starts processes: without seconds of imports in each, but for a GPU, which that process cannot leave alone."""
    if ON_GPU:
        yield multiprocessing.get_context("spawn")
    else:
        yield Forking()
        multiprocessing.forkserver._forkserver._stop()


@pytest.fixture
def forked(context, monkeypatch):
    """The product's worker is such a process; in other tests it is a fresh one, as it is for users."""
    monkeypatch.setattr(multiprocessing, "get_context", {"spawn": context}.__getitem__)


@pytest.fixture(autouse=True)
def _few(cache_dir, monkeypatch):
    for module in (tune, pretune):
        monkeypatch.setattr(module, "candidates", lambda *_: [INNOCENT, GUILTY, OTHER])


@pytest.fixture
def pretuned(tmp_path, forked):
    """Pretune keys by a worker: outcomes, and what its file says then."""

    def run(worker, *keys, patience=60.0):
        folder = tmp_path / "out"
        pretuner = IsolatedPretuner(pretune.resolver_for_folder(folder), folder, serve=worker, patience=patience)
        outcomes = pretuner.run(keys or (KEY,), lambda _: None)
        assert multiprocessing.active_children() == []
        return outcomes, TuningDB(identity_of(pretune.current_device()), folder, [])

    return run


def verdicts(db):
    """By the chunk size that the receipt names."""
    return {int(receipt.what.split("chunk ")[1].split(",")[0]): receipt.verdict for receipt in db.receipts()}


@pytest.mark.parametrize(
    ("worker", "patience", "verdict", "why"),
    [
        pytest.param(segfaulting, 60, validate.CRASHED, "SIGSEGV", id="segfault"),
        pytest.param(hanging, HANG, validate.TIMED_OUT, f"no end after {HANG} s", id="hang"),
        pytest.param(poisoned, 60, validate.CRASHED, "an illegal memory access was encountered", id="context lost"),
    ],
)
def test_the_guilty_candidate_alone_pays(pretuned, caplog, worker, patience, verdict, why):
    (outcome,), db = pretuned(worker, patience=patience)
    assert outcome.tuned, outcome
    assert outcome.entry.config == INNOCENT
    assert outcome.entry.rejected == {verdict: 1}
    assert verdicts(db) == {INNOCENT.CHUNK_SIZE: "correct", GUILTY.CHUNK_SIZE: verdict}
    (receipt,) = (receipt for receipt in db.receipts() if not receipt.correct)
    assert receipt.what.endswith(why)
    (record,) = caplog.records
    assert f"config ({GUILTY})" in record.message
    assert f"{verdict} ({why})" in record.message


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("worker", "patience", "verdict", "why"),
    [
        pytest.param(accessing_illegally, 60, validate.CRASHED, "illegal memory access", id="illegal access"),
        pytest.param(looping, HANG, validate.TIMED_OUT, f"no end after {HANG} s", id="endless loop"),
    ],
)
def test_a_kernel_that_kills_its_context_costs_itself_alone(pretuned, caplog, worker, patience, verdict, why):
    (outcome,), db = pretuned(worker, patience=patience)
    assert outcome.tuned, outcome
    assert outcome.entry.rejected == {verdict: 1}
    assert verdicts(db) == {INNOCENT.CHUNK_SIZE: "correct", GUILTY.CHUNK_SIZE: verdict}
    assert why in next(receipt.what for receipt in db.receipts() if not receipt.correct)
    assert len(caplog.records) == 1


@pytest.mark.gpu
def test_a_users_process_that_crashes_says_so_and_the_next_does_not_try_again(cache_dir):
    answers = []
    for _ in range(2):
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=call_illegally, args=(theirs,))
        process.start()
        assert ours.poll(120)
        answers.append(ours.recv())
        process.join()
    (first, why), (second, _) = answers
    assert (first, second) == ("CrashedError", "RejectedConfigError")
    assert f"config ({GUILTY}) for head_dim 16" in why
    assert "illegal memory access" in why
    assert "This process can use the GPU no more" in why


@pytest.mark.gpu
def test_the_worker_sees_the_gpu_that_was_chosen_by_its_uuid(cache_dir):
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    command = [sys.executable, "-m", "tunedqk.cli", *ONE_SHAPE]
    process = subprocess.run(
        command, env=os.environ | {"CUDA_VISIBLE_DEVICES": f"GPU-{uuid}"}, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    assert TuningDB(identity_of(pretune.current_device()), None, []).winners(KEY)


def test_it_is_not_tried_again(pretuned, caplog):
    pretuned(segfaulting)
    caplog.clear()
    (outcome,), db = pretuned(segfaulting, NEXT_KEY)
    assert outcome.entry.rejected == {validate.CRASHED: 1}
    assert caplog.records == []  # no worker died
    assert len(db.entries()) == 2


def test_several_in_flight_are_tried_one_by_one(pretuned, caplog):
    # All three are being built when the process aborts; which has no hash yet, so there is no receipt.
    outcomes, db = pretuned(aborting_compiler, KEY, NEXT_KEY)
    assert [outcome.entry.rejected for outcome in outcomes] == [{validate.CRASHED: 1}] * 2
    assert {outcome.entry.config for outcome in outcomes} <= {INNOCENT, OTHER}
    assert GUILTY.CHUNK_SIZE not in verdicts(db)
    assert [f"config ({GUILTY})" in record.message for record in caplog.records] == [True]


def test_two_guilty_ones_are_both_found(pretuned, caplog):
    (outcome,), db = pretuned(two_segfaulting)
    assert outcome.entry.config == INNOCENT
    assert verdicts(db) == {INNOCENT.CHUNK_SIZE: "correct", GUILTY.CHUNK_SIZE: "crashed", OTHER.CHUNK_SIZE: "crashed"}
    assert len(caplog.records) == 2


def test_when_all_crash_the_key_fails_and_nothing_wins(pretuned):
    (outcome,), db = pretuned(all_segfaulting)
    assert outcome.entry is None
    assert "no candidate agreed" in outcome.error
    assert db.entries() == []
    assert set(verdicts(db).values()) == {"crashed"}


@pytest.mark.parametrize(
    ("name", "when"),
    [("SIGKILL", "build"), ("SIGHUP", "launch"), ("SIGABRT", "launch"), ("SIGINT", "launch")],
)
def test_who_is_killed_from_outside_is_not_guilty(pretuned, caplog, tmp_path, monkeypatch, name, when):
    # SIGABRT may be the config's doing, which does not do it again; SIGINT, from the keyboard, is for the parent.
    asked = []
    ask = IsolatedPretuner._ask

    def record(self, request):
        answer = ask(self, request)
        asked.append((type(answer).__name__, request.only))
        return answer

    monkeypatch.setattr(IsolatedPretuner, "_ask", record)
    monkeypatch.setenv("TUNEDQK_TEST_DONE", str(tmp_path / "done"))
    monkeypatch.setenv("TUNEDQK_TEST_SIGNAL", str(int(getattr(signal, name))))
    monkeypatch.setenv("TUNEDQK_TEST_WHEN", when)
    (outcome,), db = pretuned(killed_once)
    assert (tmp_path / "done").exists()
    died = [("Death", None), ("Outcome", None)]
    expected = {"SIGINT": died[1:], "SIGABRT": [died[0], ("Survived", GUILTY), died[1]]}
    assert asked == expected.get(name, died)
    assert outcome.tuned
    assert outcome.entry.rejected == {}
    assert set(verdicts(db).values()) == {"correct"}
    assert caplog.records == []


@pytest.mark.parametrize(
    ("status", "crash", "cause"),
    [
        (-signal.SIGKILL, False, "SIGKILL"), (-signal.SIGTERM, False, "SIGTERM"), (-signal.SIGUSR1, False, "SIGUSR1"),
        (-signal.SIGSEGV, True, "SIGSEGV"), (-signal.SIGBUS, True, "SIGBUS"), (3, True, "exit status 3"),
        (0, False, "exit status 0"),
    ],
)  # fmt: skip
def test_a_crash_is_what_a_process_does_to_itself(status, crash, cause):
    assert (exits.is_crash(status), exits.cause(status)) == (crash, cause)


def test_an_error_of_ours_fails_its_key_and_the_others_go_on(pretuned, caplog):
    (failed, tuned), db = pretuned(buggy, KEY, NEXT_KEY)
    assert failed.entry is None
    assert failed.error == "ZeroDivisionError: a bug of ours"
    assert "raise_bug" in caplog.text  # the traceback
    assert tuned.tuned
    assert [found.entry.key for found in db.entries()] == [NEXT_KEY]


def test_a_worker_that_never_comes_is_an_error(pretuned):
    with pytest.raises(WorkerError, match=r"could not start: exit status 3\. .*__main__"):
        pretuned(never_serving)
    assert multiprocessing.active_children() == []


def test_an_unguarded_script_is_told_so(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"from tunedqk import cli\nprint('status', cli.main({list(ONE_SHAPE)!r}))\n")
    process = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=120)
    assert process.stdout.splitlines()[-1] == "status 1"
    assert "has to do so under `if __name__" in process.stderr


def test_a_worker_that_dies_for_no_reason_fails_its_key(pretuned):
    (outcome,), db = pretuned(dying)
    assert outcome.error == "the worker process ended (exit status 3), and no candidate alone is to blame"
    assert db.entries() == []


def test_where_nothing_can_be_saved_it_is_still_not_tried_again(pretuned, tmp_path, caplog):
    (tmp_path / "out").touch()  # no folder: nothing can be written
    pretuner = IsolatedPretuner(pretune.resolver_for_folder(tmp_path / "out"), tmp_path / "out", serve=segfaulting)
    with pytest.warns(match="cannot be written|left alone"):
        (outcome,) = pretuner.run([KEY], lambda _: None)
    assert outcome.entry.config == INNOCENT
    assert not outcome.saved
    assert [found.entry for found in pretuner.resolver.db.winners(KEY)] == [outcome.entry]  # here at least it is kept
    assert len([record for record in caplog.records if "SIGSEGV" in record.message]) == 1


def test_what_it_condemned_is_not_tried_again_though_no_receipt_can_be_read(pretuned, caplog):
    (outcome,), _ = pretuned(forgetful)
    assert outcome.entry.rejected == {validate.CRASHED: 1}
    assert len(caplog.records) == 1


@pytest.mark.skipif(ON_GPU, reason="there building takes longer than this patience")
def test_the_worker_may_wait_for_others_as_long_as_it_takes(pretuned):
    (outcome,), _ = pretuned(patient, patience=2)
    assert outcome.entry.rejected == {}


def _listen(connection, patience):
    worker = object.__new__(isolation._Worker)
    worker._connection, worker._patience = connection, patience
    connection.send("listening")
    heard = worker._speaks()
    connection.send(heard)


def test_the_time_in_which_the_parent_is_stopped_does_not_count(context):
    ours, theirs = multiprocessing.Pipe()
    process = context.Process(target=_listen, args=(theirs, 2))
    process.start()
    assert ours.recv() == "listening"
    time.sleep(0.2)  # until it does
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(2.5)
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(0.5)
    ours.send("a word")
    assert ours.recv() is True
    process.join()


def test_a_context_that_was_lost_before_is_nobodys_fault(pretuned):
    (outcome,), db = pretuned(lost_before)
    assert "no candidate alone is to blame" in outcome.error
    assert "an illegal memory access was encountered" in outcome.error
    assert db.receipts() == []


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A pretuner whose worker gives these answers, and survives whatever else it is asked; a list of that."""
    pretuner = IsolatedPretuner(pretune.resolver_for_folder(tmp_path))
    answers, asked = {}, []

    def ask(request):
        asked.append(request.only)
        return answers.get(request.only, isolation.Survived())

    monkeypatch.setattr(pretuner, "_ask", ask)
    return pretuner, answers, asked


def death(*in_flight):
    return isolation.Death(validate.Verdict(validate.CRASHED, what="SIGSEGV"), in_flight)


VARIANT = tune.tuned_variant(KEY)
BUILDING, LAUNCHING = accept.Trial(VARIANT, INNOCENT), accept.Trial(VARIANT, GUILTY, "abc")


def test_what_was_being_launched_is_suspected_first(alone):
    pretuner, _, asked = alone
    assert not pretuner._convict(KEY, death(BUILDING, LAUNCHING))
    assert asked == [GUILTY, INNOCENT]


def test_who_does_not_do_it_again_is_not_guilty(alone):
    pretuner, _, asked = alone
    assert not pretuner._convict(KEY, death(LAUNCHING))
    assert asked == [GUILTY]
    assert pretuner.resolver.db.receipts() == []


def test_a_death_for_no_reason_does_not_end_the_search(alone):
    pretuner, answers, asked = alone
    answers |= {GUILTY: death(), INNOCENT: death(BUILDING)}
    assert pretuner._convict(KEY, death(BUILDING, LAUNCHING))
    assert asked == [GUILTY, INNOCENT]
    assert [trial for trial, _ in pretuner._condemned] == [BUILDING]


def test_a_launched_binary_is_condemned_and_its_twin_in_the_compiler_is_not(alone):
    pretuner, answers, _ = alone
    answers[GUILTY] = death(accept.Trial(accept.float32_twin(VARIANT), GUILTY), LAUNCHING)
    assert pretuner._convict(KEY, death(LAUNCHING))
    assert [trial for trial, _ in pretuner._condemned] == [LAUNCHING]
    assert not pretuner._convict(KEY, death(LAUNCHING))  # in vain, and not without end


def test_a_lost_context_is_not_the_doing_of_what_is_being_built():
    worker = object.__new__(isolation._Worker)
    worker._connection, theirs = multiprocessing.Pipe()
    worker._patience = 10
    for message in (isolation.Note(BUILDING, begins=True), isolation.Note(LAUNCHING, begins=True), death()):
        theirs.send(message)
    assert worker.ask(isolation.Request(KEY)).in_flight == (LAUNCHING,)


def test_a_probe_waits_for_others_that_tune(tmp_path, monkeypatch):
    resolver = pretune.resolver_for_folder(tmp_path)
    held = []

    def spy(*_, **named):
        with TuningDB(resolver.gpu, tmp_path, []).tuning_lock(0) as free:
            held.append((not free, named["configs"]))

    monkeypatch.setattr(pretune, "tune", spy)
    pretune.Pretuner(resolver).probe(KEY, GUILTY)
    assert held == [(True, [GUILTY])]


def test_what_the_worker_could_not_save_the_parent_may(tmp_path, forked):
    pretuner = IsolatedPretuner(pretune.resolver_for_folder(tmp_path), tmp_path, serve=not_saving)
    (outcome,) = pretuner.run([KEY], lambda _: None)
    assert outcome.saved
    assert [found.entry for found in TuningDB(pretuner.resolver.gpu, tmp_path, []).winners(KEY)] == [outcome.entry]


def not_saving(*arguments):
    TuningDB.record = lambda *_, **__: False
    serve_few(arguments)


def test_what_the_worker_found_is_seen_here(tmp_path, forked):
    pretuner = IsolatedPretuner(pretune.resolver_for_folder(tmp_path), tmp_path, serve=serve_all)
    assert pretuner.resolver.db.winners(KEY) == ()
    pretuner.run([KEY], lambda _: None)
    assert len(pretuner.resolver.db.winners(KEY)) == 1


def serve_all(*arguments):
    serve_few(arguments)


def test_by_force_it_tunes_what_has_a_winner(tmp_path, forked):
    for force, tuned in ((False, True), (False, False), (True, True)):
        pretuner = IsolatedPretuner(pretune.resolver_for_folder(tmp_path), tmp_path, force=force, serve=serve_all)
        assert [outcome.tuned for outcome in pretuner.run([KEY], lambda _: None)] == [tuned]


def test_threads_tell_one_after_the_other():
    ours, theirs = multiprocessing.Pipe()
    reporter = isolation._Reporter(theirs)
    long = "x" * 100_000  # sent in two parts
    threads = [threading.Thread(target=lambda: [reporter.send(long) for _ in range(30)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert all(ours.recv() == long for _ in range(240))


def test_the_worker_tunes_the_device_of_its_parent(tmp_path, monkeypatch):
    pretuner = IsolatedPretuner(pretune.resolver_for_folder(tmp_path), tmp_path)
    pretuner.resolver.device = torch.device("cuda", 1)
    started = []

    class Worker:
        def __init__(self, arguments, *_):
            started.append(arguments)
            raise WorkerError

    monkeypatch.setattr(isolation, "_Worker", Worker)
    with pytest.raises(WorkerError):
        pretuner.tune(KEY)
    assert started == [(tmp_path, 1, False, [])]

    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    ours, theirs = multiprocessing.Pipe()
    thread = threading.Thread(target=isolation.serve, args=(theirs, *started[0]))
    thread.start()
    assert ours.recv() == isolation.Ready()
    ours.close()
    thread.join()
    assert chosen == [1]


def test_stopping_ends_the_worker(forked):
    def stop(_):
        raise KeyboardInterrupt

    pretuner = IsolatedPretuner(pretune.resolver_for_folder(None), serve=segfaulting)
    with pytest.raises(KeyboardInterrupt):
        pretuner.run([KEY], stop)
    assert multiprocessing.active_children() == []


def _run_and_tell(connection):
    """A parent, which is killed while its worker hangs; that one is not forked, as it is not for users."""

    def tell():
        while not Path(os.environ["TUNEDQK_TEST_HANGS"]).exists():
            time.sleep(0.05)
        connection.send(multiprocessing.active_children()[0].pid)

    threading.Thread(target=tell, daemon=True).start()
    IsolatedPretuner(pretune.resolver_for_folder(None), serve=hanging).run([KEY], print)


def test_a_worker_that_hangs_ends_with_its_parent(context, tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEDQK_TEST_HANGS", str(tmp_path / "hangs"))
    ours, theirs = multiprocessing.Pipe()
    parent = context.Process(target=_run_and_tell, args=(theirs,))  # not daemonic: it has a child
    parent.start()
    assert ours.poll(60)
    worker = ours.recv()
    parent.kill()
    parent.join()
    deadline = time.monotonic() + 30
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(worker, 0)
            time.sleep(0.05)
        os.kill(worker, signal.SIGKILL)
        pytest.fail("the worker lives on")


def test_the_command_line_pretunes_in_a_worker(monkeypatch, capsys):
    pids = []
    start = isolation._Worker.__init__

    def spy(self, *arguments):
        start(self, *arguments)
        pids.append(self._process.pid)

    monkeypatch.setattr(isolation._Worker, "__init__", spy)
    monkeypatch.setattr(isolation.IsolatedPretuner.__init__, "__kwdefaults__",
                        {**isolation.IsolatedPretuner.__init__.__kwdefaults__, "serve": segfaulting})  # fmt: skip
    assert cli.main(list(ONE_SHAPE)) == 0
    assert len(pids) == 3  # that in which it died, that in which it did so again, that which went on
    assert os.getpid() not in pids
    assert "Rejected candidates: 1 crashed." in capsys.readouterr().out
