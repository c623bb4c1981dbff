"""The tuning DB: one JSON file per GPU model, with the winning configs and the receipts of validated binaries.

The user's file is read and written; files on `TUNEDQK_DB_PATH` and the shipped ones are only read. Readers take no
lock, because a file is only ever replaced as a whole. Neither torch nor triton is imported here.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import re
import stat
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tunedqk.errors import TuningDBWarning
from tunedqk.records import GpuFile, NewerSchemaError, View, decode, encode, merged

if TYPE_CHECKING:
    from tunedqk.config import TuningKey
    from tunedqk.device import GpuIdentity
    from tunedqk.records import Entry, Found, Receipt

LOCK_TIMEOUT = 10.0  # seconds that a writer waits for the others


class BadFileError(ValueError):
    """A file that cannot be used. spoiled: its content is at fault, so that the user's may be set aside."""

    def __init__(self, path: Path, reason: str, *, spoiled: bool) -> None:
        super().__init__(f"{path}: {reason}")
        self.spoiled = spoiled


def file_name(gpu: GpuIdentity) -> str:
    """The name of a GPU model's file: readable, and another for every identity."""
    slug = re.sub(r"[^a-z0-9_]+", "-", f"{gpu.name} {gpu.arch}".lower())[:100].strip("-")
    digest = hashlib.sha256(msgspec.json.encode(gpu.identity)).hexdigest()[:8]
    return f"{slug}-{gpu.multiprocessors}-{digest}.json"


def user_directory() -> Path:
    """`TUNEDQK_CACHE_DIR`, else the platform's cache folder; without a home, a path below a device: never writable."""
    if given := os.environ.get("TUNEDQK_CACHE_DIR"):
        return Path(given).absolute()
    import platformdirs  # slow to import, and of no use where the variable is set

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


def _read_file(path: Path) -> tuple[GpuFile, int] | None:
    """The file at `path` and its owner's id, None where there is none. Raises BadFileError if it is unusable."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # to open a pipe would wait for its writer
            raise BadFileError(path, "not a regular file", spoiled=True)
        with path.open("rb") as stream:
            data, owner = stream.read(), os.fstat(stream.fileno()).st_uid
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BadFileError(path, f"cannot be read ({error.strerror})", spoiled=False) from error
    try:
        return decode(data), owner
    except ValueError as error:
        raise BadFileError(path, str(error), spoiled=not isinstance(error, NewerSchemaError)) from error


def load_file(path: Path) -> GpuFile:
    """The file of any GPU model, for tools. Raises ValueError with the path and the reason."""
    if (found := _read_file(path)) is None:
        raise BadFileError(path, "no such file", spoiled=False)
    return found[0]


def _write_file(path: Path, file: GpuFile) -> None:
    """Publish `file` as a whole. The caller holds the lock: any temporary file that lies there is a dead writer's."""
    for left_over in path.parent.glob(f"{path.name}.*.tmp"):
        left_over.unlink(missing_ok=True)
    temporary = path.with_name(f"{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        # Unlike tempfile, open leaves the mode to the umask; "x" follows no planted link.
        with temporary.open("xb") as stream:
            stream.write(encode(file))
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _levels_to_caller() -> int:
    """The `stacklevel` for which a warning names the line that called this package."""
    frame, level = sys._getframe(1), 1  # noqa: SLF001  as warnings itself does
    while frame.f_back is not None and Path(frame.f_code.co_filename).parent == Path(__file__).parent:
        frame, level = frame.f_back, level + 1
    return level


def _is_planted(path: Path, owner: int) -> bool:
    """Whether a file is somebody's who is neither this user, nor root, nor the owner of its folder."""
    if not hasattr(os, "geteuid") or owner in {os.geteuid(), 0}:
        return False
    try:
        return owner != path.parent.stat().st_uid
    except OSError:  # gone meanwhile
        return True


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
        self._view: View | None = None
        self._unsaved: list[Entry | Receipt] = []
        self._warned: set[str] = set()
        self._stuck = False

    def winners(self, key: TuningKey) -> Sequence[Found]:
        """The winners of exactly this key: the user's, then those of the other files."""
        return self._look().entries.get(key, ())

    def nearest(self, key: TuningKey) -> list[Found]:
        """The winners of the neighbours of a key, the nearest first."""
        return [found for neighbour in key.neighbours() for found in self.winners(neighbour)]

    def receipt(self, binary: str) -> Receipt | None:
        """The verdict on a binary: a bad one in any file before a correct one in another."""
        return self._look().receipts.get(binary)

    def entries(self) -> list[Found]:
        """The first winner of each key, sorted by key."""
        return sorted((first for first, *_ in self._look().entries.values()), key=lambda found: found.entry.key)

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
            cure = "results stay in memory; TUNEDQK_CACHE_DIR names another folder"
            self._warn(f"{self.path}: cannot be written ({error.strerror}); {cure}", topic="unsaved")
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
                acquired = not isinstance(error, BlockingIOError)
            yield acquired

    @contextlib.contextmanager
    def _locked(self, suffix: str, timeout: float) -> Iterator[None]:
        """Hold a lock of the user's file. BlockingIOError if it is taken for too long, OSError if there can be none."""
        import filelock  # slow to import, and look-ups take no lock

        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            held = filelock.FileLock(f"{self.path}{suffix}").acquire(timeout=timeout, poll_interval=0.01)
        except filelock.Timeout as error:
            raise BlockingIOError(errno.EAGAIN, "its lock is taken") from error
        with held:
            yield

    def _save(self) -> None:
        """Merge what is unsaved into the user's file. The caller holds its lock; look-ups go on meanwhile."""
        with self._guard:
            unsaved = list(self._unsaved)
        if not unsaved:  # another thread saved ours with its own
            return
        _write_file(self.path, merged(self._own_file(), unsaved))
        with self._guard:
            del self._unsaved[: len(unsaved)]
            self._view = None

    def _own_file(self) -> GpuFile:
        """The user's file; a spoiled one is set aside. The caller holds its lock: else a good one might be."""
        try:
            return self._read_file(self.path)
        except BadFileError as error:
            if not error.spoiled:
                raise
            names = (self.path.with_name(f"{self.path.name}.bad-{n}") for n in itertools.count(1))
            aside = self.path.rename(next(name for name in names if not os.path.lexists(name)))
            self._warn(f"{error}; set aside as {aside.name}")
            return GpuFile(gpu=self._gpu)

    def _look(self) -> View:
        with self._guard:
            if self._view is None:
                self._view = self._read()
            return self._view

    def _read(self) -> View:
        """Every file, in order, with what is unsaved as part of the user's."""
        view = View({}, {})
        folders = search_directories() if self._others is None else self._others
        for path in (self.path, *(folder / self.path.name for folder in folders)):
            file = self._read_or_warn(path)
            if path is self.path:
                file = merged(file, self._unsaved)
            view.add(file, path)
        return view

    def _read_or_warn(self, path: Path) -> GpuFile:
        try:
            return self._read_file(path)
        except BadFileError as error:
            if path is self.path and error.spoiled:
                # Whoever holds the lock is a writer, and sets the file aside in our place.
                with contextlib.suppress(BadFileError, OSError), self._locked(".lock", 0):
                    return self._own_file()
            self._leave_alone(error)
            return GpuFile(gpu=self._gpu)

    def _read_file(self, path: Path) -> GpuFile:
        """A file's content; without its receipts if it was planted, so that whatever it names is validated."""
        file, owner = _read_file(path) or (GpuFile(gpu=self._gpu), 0)
        if file.gpu.identity != self._gpu.identity:
            raise BadFileError(path, f"made on {file.gpu.identity}, not on {self._gpu.identity}", spoiled=True)
        if file.receipts and _is_planted(path, owner):
            self._warn(f"{path}: its owner is neither you nor the owner of its folder; its receipts do not count")
            file = msgspec.structs.replace(file, receipts=[])
        return file

    def _leave_alone(self, error: BadFileError) -> None:
        self._warn(f"{error}; left alone and read as empty")

    def _warn(self, message: str, topic: str = "") -> None:
        """Warn once about a topic, which is the message itself unless named."""
        if (topic or message) not in self._warned:
            self._warned.add(topic or message)
            warnings.warn(message, TuningDBWarning, stacklevel=_levels_to_caller())
