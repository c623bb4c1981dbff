"""The tuning DB: one JSON file per GPU model, with the winning configs and the receipts of validated binaries.

The user's file is read and written; files on `TUNEDQK_DB_PATH` and the shipped ones are only read. Readers take no
lock, because a file is only ever replaced as a whole. Neither torch nor triton is imported here.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import os
import re
import secrets
import stat
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import filelock
import msgspec
import platformdirs

from .config import KernelConfig, TuningKey  # noqa: TC001  msgspec evaluates annotations
from .device import GpuIdentity, Toolchain  # noqa: TC001
from .errors import TuningDBWarning

SCHEMA: Literal[1] = 1
LOCK_TIMEOUT = 10.0  # seconds that a writer waits for the others


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One timed problem size. floor_share: time at the memory floor over measured time."""

    batch: int
    kv_heads: int
    median_us: float
    floor_share: float | None = None


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How fast a winner was. worst_slowdown: over `shapes`, against the best candidate of each; bytes: moved a call."""

    median_us: float
    p20_us: float
    p80_us: float
    bytes: int
    floor_share: float | None
    worst_slowdown: float
    shapes: tuple[Shape, ...] = ()

    def __post_init__(self) -> None:
        times = (self.median_us, self.p20_us, self.p80_us, self.worst_slowdown, *(s.median_us for s in self.shapes))
        # JSON would turn an inf into null, and the whole file could not be read again.
        if not all(map(math.isfinite, times)):
            raise ValueError(f"timing: expected finite numbers, got {times}")


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The winner of a key. rejected: how many candidates fell for which verdict; tuned_at: ISO 8601, UTC."""

    key: TuningKey
    config: KernelConfig
    timing: Timing
    rejected: dict[str, int]
    toolchain: Toolchain
    tuned_at: str


class Receipt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A binary's verdict on this GPU model. max_error: in units of the bound; validated_at: ISO 8601, UTC.

    seq_lens: the buckets compared at their own length. twin: hash of the binary that differs by its float32 output.
    """

    binary: str
    verdict: str
    max_error: float | None
    what: str
    seq_lens: tuple[int, ...]
    validated_at: str
    twin: str = ""

    @property
    def correct(self) -> bool:
        """Whether the binary may be launched."""
        return self.verdict == "correct"


class GpuFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The content of one file."""

    schema: Literal[1] = SCHEMA
    gpu: GpuIdentity
    entries: list[Entry] = []
    receipts: list[Receipt] = []


class _Header(msgspec.Struct):
    schema: int = SCHEMA


class Found(NamedTuple):
    """A winner, and the file that it belongs to."""

    entry: Entry
    path: Path


class _View(NamedTuple):
    entries: dict[TuningKey, Found]
    receipts: dict[str, Receipt]


class BadFileError(ValueError):
    """A file that cannot be used. spoiled: its content is at fault, so that the user's may be set aside."""

    def __init__(self, path: Path, reason: str, *, spoiled: bool) -> None:
        super().__init__(f"{path}: {reason}")
        self.spoiled = spoiled


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a file."""
    return msgspec.json.schema(GpuFile)


def file_name(gpu: GpuIdentity) -> str:
    """The name of a GPU model's file: readable, and another for every identity."""
    slug = re.sub(r"[^a-z0-9_]+", "-", f"{gpu.name} {gpu.arch}".lower())[:100].strip("-")
    digest = hashlib.sha256(msgspec.json.encode(gpu.identity)).hexdigest()[:8]
    return f"{slug}-{gpu.multiprocessors}-{digest}.json"


def user_directory() -> Path:
    """`TUNEDQK_CACHE_DIR`, else the platform's cache folder; without a home, a path below a device: never writable."""
    if given := os.environ.get("TUNEDQK_CACHE_DIR"):
        return Path(given).absolute()
    with contextlib.suppress(RuntimeError):
        folder = platformdirs.user_cache_path("tunedqk", appauthor=False)
        if folder.is_absolute():  # an unknown home stays "~", which would become a folder of that name
            return folder
    return Path(os.devnull, "tunedqk")


def shipped_directory() -> Path:
    """The DB that comes with the package: inside an installed one, beside it in a checkout."""
    package = Path(__file__).parent
    installed, checkout = package / "tuning_db", package.parent / "tuning_db"
    return installed if installed.is_dir() or not checkout.is_dir() else checkout


def search_directories() -> list[Path]:
    """The folders that are only read: those on `TUNEDQK_DB_PATH`, then the shipped one."""
    listed = os.environ.get("TUNEDQK_DB_PATH", "").split(os.pathsep)
    return [*(Path(folder) for folder in listed if folder), shipped_directory()]


def read_file(path: Path, gpu: GpuIdentity | None = None) -> GpuFile | None:
    """The file at `path`, None where there is none. Raises BadFileError if it is unusable, or of another GPU model."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # to open a pipe would wait for its writer
            raise BadFileError(path, "not a regular file", spoiled=True)
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BadFileError(path, f"cannot be read ({error.strerror})", spoiled=False) from error
    try:
        schema = msgspec.json.decode(data, type=_Header).schema
        if schema > SCHEMA:
            raise BadFileError(path, f"schema {schema} is newer than {SCHEMA}, which is known here", spoiled=False)
        file = msgspec.json.decode(data, type=GpuFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadFileError(path, f"not a tuning DB file ({error})", spoiled=True) from error
    if gpu is not None and file.gpu.identity != gpu.identity:
        raise BadFileError(path, f"made on {file.gpu.identity}, not on {gpu.identity}", spoiled=True)
    return file


def load_file(path: Path) -> GpuFile:
    """The file of any GPU model, for tools. Raises ValueError with the path and the reason."""
    if (file := read_file(path)) is None:
        raise BadFileError(path, "no such file", spoiled=False)
    return file


def _write_file(path: Path, file: GpuFile) -> None:
    """Publish `file` as a whole. The caller holds the lock: any temporary file that lies there is a dead writer's."""
    for left_over in path.parent.glob(f"{path.name}.*.tmp"):
        left_over.unlink(missing_ok=True)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        # Unlike tempfile, open leaves the mode to the umask; "x" follows no planted link.
        with temporary.open("xb") as stream:
            stream.write(msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _renewed(old: Receipt, new: Receipt) -> Receipt:
    """The incoming one replaces; only correct ones unite their seq_lens."""
    if not (old.correct and new.correct):
        return new
    newer = max(new, old, key=lambda receipt: receipt.validated_at)
    return msgspec.structs.replace(newer, seq_lens=tuple(sorted({*old.seq_lens, *new.seq_lens})))


def _strictest(one: Receipt, other: Receipt) -> Receipt:
    """Between files, where neither renews the other: the bad one wins."""
    return _renewed(one, other) if one.correct else one


def _merged(file: GpuFile, results: Iterable[Entry | Receipt]) -> GpuFile:
    """`file` with newer results, sorted."""
    entries = {entry.key: entry for entry in file.entries}
    receipts: dict[str, Receipt] = {}
    for receipt in file.receipts:
        receipts[receipt.binary] = _strictest(receipts.get(receipt.binary, receipt), receipt)
    for result in results:
        if isinstance(result, Entry):
            entries[result.key] = result
        else:
            receipts[result.binary] = _renewed(receipts.get(result.binary, result), result)
    return GpuFile(
        gpu=file.gpu,
        entries=sorted(entries.values(), key=lambda entry: entry.key),
        receipts=sorted(receipts.values(), key=lambda receipt: receipt.binary),
    )


class TuningDB:
    """Winners and receipts of one GPU model, from the user's file, the other files and memory. Threads may share it.

    The first look-up reads the files, and the first one after `record` or `reload`. No trouble with a file raises:
    it warns once, and what was recorded is found all the same.
    """

    def __init__(self, gpu: GpuIdentity, directory: Path | None = None, others: Sequence[Path] | None = None) -> None:
        self.path = (user_directory() if directory is None else directory) / file_name(gpu)
        self._gpu = gpu
        self._others = others
        self._guard = threading.Lock()  # of what follows
        self._view: _View | None = None
        self._unsaved: list[Entry | Receipt] = []
        self._warned: set[str] = set()
        self._stuck = False

    def winner(self, key: TuningKey) -> Found | None:
        """The winner of exactly this key: the user's, else the first in the other files."""
        return self._look().entries.get(key)

    def nearest(self, key: TuningKey) -> Found | None:
        """The winner of the closest other bucket, at most a factor 4 away and else equal; of two, the larger's."""
        buckets = (key.seq_len * 2, key.seq_len // 2, key.seq_len * 4, key.seq_len // 4)
        found = (self.winner(msgspec.structs.replace(key, seq_len=bucket)) for bucket in buckets)
        return next(filter(None, found), None)

    def receipt(self, binary: str) -> Receipt | None:
        """The verdict on a binary: a bad one in any file before a correct one in another."""
        return self._look().receipts.get(binary)

    def entries(self) -> list[Found]:
        """The winners of all keys, sorted by key."""
        return sorted(self._look().entries.values(), key=lambda found: found.entry.key)

    def receipts(self) -> list[Receipt]:
        """The verdicts on all binaries, sorted by hash."""
        return sorted(self._look().receipts.values(), key=lambda receipt: receipt.binary)

    def record(self, entries: Iterable[Entry] = (), receipts: Iterable[Receipt] = ()) -> bool:
        """Remember results, and save them with any that could not be saved before. Returns whether all are on disk."""
        with self._guard:
            self._unsaved += [*entries, *receipts]
            self._view = None
        try:
            # After a vain wait only a try: a lock that never comes must not cost its timeout at every call.
            with self._locked(".lock", 0 if self._stuck else LOCK_TIMEOUT):
                self._save()
        except BadFileError as error:
            self._leave_alone(error)
            return False
        except OSError as error:
            self._stuck = True
            reason = "its lock is taken" if isinstance(error, filelock.Timeout) else error.strerror
            cure = "results stay in memory; TUNEDQK_CACHE_DIR names another folder"
            self._warn(f"{self.path}: cannot be written ({reason}); {cure}", topic="unsaved")
            return False
        self._stuck = False
        return True

    def reload(self) -> None:
        """Forget what was read from disk."""
        with self._guard:
            self._view = None

    @contextlib.contextmanager
    def tuning_lock(self, timeout: float) -> Iterator[bool]:
        """Held while this GPU model is tuned; yields whether it came in time.

        True also where no lock can be made: no results are shared there, so there is nothing to wait for.
        """
        with contextlib.ExitStack() as stack:
            acquired = True
            try:
                stack.enter_context(self._locked(".tuning.lock", timeout))
            except OSError as error:
                acquired = not isinstance(error, filelock.Timeout)
            yield acquired

    @contextlib.contextmanager
    def _locked(self, suffix: str, timeout: float) -> Iterator[None]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{self.path}{suffix}").acquire(timeout=timeout, poll_interval=0.01):
            yield

    def _save(self) -> None:
        """Merge what is unsaved into the user's file. The caller holds its lock; look-ups go on meanwhile."""
        with self._guard:
            unsaved = list(self._unsaved)
        if not unsaved:  # another thread saved ours with its own
            return
        _write_file(self.path, _merged(self._own_file(), unsaved))
        with self._guard:
            del self._unsaved[: len(unsaved)]
            self._view = None

    def _own_file(self) -> GpuFile:
        """The user's file; a spoiled one is set aside. The caller holds its lock: else a good one might be."""
        try:
            return read_file(self.path, self._gpu) or GpuFile(gpu=self._gpu)
        except BadFileError as error:
            if not error.spoiled:
                raise
            names = (self.path.with_name(f"{self.path.name}.bad-{n}") for n in itertools.count(1))
            aside = self.path.rename(next(name for name in names if not os.path.lexists(name)))
            self._warn(f"{error}; set aside as {aside.name}")
            return GpuFile(gpu=self._gpu)

    def _look(self) -> _View:
        with self._guard:
            if self._view is None:
                self._view = self._read()
            return self._view

    def _read(self) -> _View:
        """Every file, in order, with what is unsaved as part of the user's."""
        view = _View({}, {})
        folders = search_directories() if self._others is None else self._others
        for path in (self.path, *(folder / self.path.name for folder in folders)):
            file = self._read_or_warn(path)
            if path is self.path:
                file = _merged(file, self._unsaved)
            for entry in file.entries:
                view.entries.setdefault(entry.key, Found(entry, path))
            for receipt in file.receipts:
                view.receipts[receipt.binary] = _strictest(view.receipts.get(receipt.binary, receipt), receipt)
        return view

    def _read_or_warn(self, path: Path) -> GpuFile:
        try:
            return read_file(path, self._gpu) or GpuFile(gpu=self._gpu)
        except BadFileError as error:
            if path is self.path and error.spoiled:
                # Whoever holds the lock is a writer, and sets the file aside in our place.
                with contextlib.suppress(BadFileError, OSError), self._locked(".lock", 0):
                    return self._own_file()
            self._leave_alone(error)
            return GpuFile(gpu=self._gpu)

    def _leave_alone(self, error: BadFileError) -> None:
        self._warn(f"{error}; left alone and read as empty")

    def _warn(self, message: str, topic: str = "") -> None:
        """Warn once about a topic, which is the message itself unless named."""
        if (topic or message) not in self._warned:
            self._warned.add(topic or message)
            warnings.warn(message, TuningDBWarning, stacklevel=2)
