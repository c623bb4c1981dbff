"""Processes that make a cold call: fresh ones, or forked from one that has imported all it needs."""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import multiprocessing
import os
import pwd
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import torch
from reference import assert_scores, make_inputs

import tunedqk
from tunedqk import config, db, pretune, ready, tune, validate
from tunedqk.config import KernelConfig, tuning_key
from tunedqk.device import identity_of
from tunedqk.resolve import resolver_for
from tunedqk.score import qk_score

CONFIGS = [KernelConfig(chunk, chunk, num_warps=4) for chunk in (128, 256)]
CANDIDATES = tune.candidates
LIBC = ctypes.CDLL(None)
PATIENCE = 120.0  # seconds after which a process counts as hung


# --- In these processes ---


def prepare():
    """Before anything is forked, and without touching a GPU: few candidates, one thread for torch, late imports."""
    import filelock  # noqa: F401
    import triton.experimental.gluon  # noqa: F401

    for module in (tune, pretune):
        module.candidates = lambda *_: list(CONFIGS)
    torch.set_num_threads(1)  # whoever forks after OpenMP started threads waits for ever


def place(device):
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")


class Messages(logging.Handler):
    """The tuning warnings of this process."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []
        logging.getLogger("tunedqk").addHandler(self)

    def emit(self, record):
        self.texts.append(record.getMessage())


def call(device, seq_len=40):
    """One call whose result is checked."""
    q, k = make_inputs(1, 1, 1, seq_len, 16, torch.float32, device)
    assert_scores(qk_score(q, k), q, k)


def answer(device, seq_len=40, times=1):
    """Call, and say what that took: tunings, "tuning now" messages, TuningDBWarnings, seconds."""
    messages, start = Messages(), time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            call(device, seq_len)
    return {
        "tunings": resolver_for(place(device)).tunings,
        "said": sum("tuning now" in text for text in messages.texts),
        "warned": [str(w.message) for w in caught if issubclass(w.category, tunedqk.errors.TuningDBWarning)],
        "seconds": time.monotonic() - start,
    }


def change_environment(changed):
    for name, value in changed.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def no_user(_):
    raise KeyError("no such user")


def full(_):
    raise OSError(28, "No space left on device")


def prevent(what):
    """Break what a process needs to write."""
    if what == "disk":
        os.fsync = full
    elif what == "user":  # the id of a container that is in no passwd
        pwd.getpwuid = no_user


MOMENTS = {
    "validating": (validate.Validator, "check"),
    "timing": (tune.ScreenTimer, "__call__"),
    "saving": (os, "fsync"),
}


def stop_at(moment, reached):
    """Say that this moment is reached, once something was done there, and wait to be killed."""
    owner, name = MOMENTS[moment]
    whole = getattr(owner, name)

    def stopped(*arguments):
        result = whole(*arguments)
        reached()
        time.sleep(PATIENCE)
        return result

    setattr(owner, name, stopped)


def fresh_one(device):
    """A process of its own, which waits for a line before it calls."""
    prepare()
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(answer(device)), flush=True)


# --- In the process that forks ---


def _forked(work, barrier, results):
    barrier.wait(PATIENCE)
    results.put(work())


def fork(works, patience=PATIENCE):
    """Run each in a process of its own, all at once: what they return, and how they ended (None: hung)."""
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(len(works)), context.SimpleQueue()
    processes = [context.Process(target=_forked, args=(work, barrier, results)) for work in works]
    for process in processes:
        process.start()
    end, exits = time.monotonic() + patience, []
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
        exits.append(process.exitcode)
        if process.exitcode is None:
            process.kill()
            process.join()
    return {"exits": exits, "answers": [results.get() for code in exits if code == 0]}


def apart(device, work, arguments):
    """Do one of the following in a forked process, which may call before it forks; how it ended, if it failed."""
    done = fork([lambda: globals()[work](device, **arguments)], 2 * PATIENCE)
    return done["answers"][0] if done["answers"] else done


def cold_round(device, environment, count=1, seq_len=40, times=1, what=None):
    """`count` forked processes, which call at once."""

    def work():
        change_environment(environment)
        prevent(what)
        return answer(device, seq_len, times)

    return fork([work] * count)


def killed(device, environment, moment):
    """A forked process that is killed in the middle of tuning."""
    receiving, sending = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = os.fork()
    if process == 0:
        try:
            change_environment(environment)
            stop_at(moment, lambda: sending.send(True))
            call(device)
        finally:
            os._exit(1)
    reached = receiving.poll(PATIENCE)
    os.kill(process, signal.SIGKILL)
    return {"reached": reached, "status": os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])}


def warm_round(device, environment, seq_lens):
    """Make a call here (no GPU allows that), and then fork processes that repeat it and make one that is cold."""
    change_environment(environment)
    call(device)
    inherited = resolver_for(place(device)).tunings

    def work(seq_len):
        return lambda: answer(device, seq_len) | {"bound": len(ready.binaries)}

    return {"inherited": inherited, **fork([work(seq_len) for seq_len in seq_lens])}


def fork_while_tuning(device, environment, seq_len):
    """Another thread tunes while processes are forked; it is let go on when they are done."""
    change_environment(environment)
    call(device)
    reached, go_on = threading.Event(), threading.Event()
    timed = tune.ScreenTimer.__call__

    def stopped(*arguments):
        if threading.current_thread() is thread:
            reached.set()
            go_on.wait(PATIENCE)
        return timed(*arguments)

    tune.ScreenTimer.__call__ = stopped
    thread = threading.Thread(target=call, args=(device, 600))
    thread.start()
    assert reached.wait(PATIENCE)
    threading.Timer(1.0, go_on.set).start()
    done = fork([lambda: answer(device, seq_len)])
    thread.join()
    return done


def _resident():
    """MiB of memory that this process holds, less what its allocator keeps of what was freed: that comes and goes."""
    gc.collect()
    if hasattr(LIBC, "malloc_trim"):  # glibc's
        LIBC.malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def memory(device, environment, keys, start, real=False, patience=PATIENCE):
    """Tune so many keys in a forked process: its memory after the first `start` of them, and after all.

    real: those of the default grid that differ in more than seq_len, with all candidates. Else quick ones with large
    inputs.
    """

    def work():
        change_environment(environment)
        tuned = [tuning_key(512, head_dim, "float32", 1) for head_dim in range(17, 17 + keys)]
        if real:
            tune.candidates = pretune.candidates = CANDIDATES
            tuned = [key for key in config.DEFAULT_GRID.tuning_keys() if key.seq_len == 512][:keys]
        else:
            CONFIGS[:] = [KernelConfig(chunk, 1024, num_warps=4) for chunk in (1024, 2048)]
        resolver, held = resolver_for(place(device)), []
        for key in tuned:
            (outcome,) = pretune.Pretuner(resolver, force=real).run([key], lambda _: None)
            assert outcome.tuned, outcome.error
            held.append(_resident())
        return [held[start - 1], held[-1]]

    return fork([work], patience)


def serve(device):
    """Do what the lines of the input ask for, and answer each by a line."""
    prepare()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        print(json.dumps(globals()[name](device, **arguments)), flush=True)


# --- In the tests ---


def start(code, *arguments, **environment):
    """A fresh Python that can import this module."""
    paths = [str(Path(__file__).parent), str(Path(db.__file__).parents[1])]
    return subprocess.Popen(
        [sys.executable, "-c", f"import sys, cold; {code}", *arguments],
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


class Nursery:
    """A process that has imported everything and called nothing, and forks others."""

    def __init__(self, device, **environment):
        self._process = start("cold.serve(sys.argv[1])", device, **environment)

    def ask(self, name, **arguments):
        self._process.stdin.write(json.dumps([name, arguments]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self):
        self._process.stdin.close()
        assert self._process.wait(PATIENCE) == 0
        self._process.stdout.close()


def own_db(device, folder):
    """The DB in a folder, as the next process would read it."""
    return db.TuningDB(identity_of(place(device)), Path(folder), ())
