"""What a tuning DB file holds: winners, receipts of validated binaries, and how they merge. No file is touched here."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from tunedqk.config import KernelConfig, TuningKey
from tunedqk.device import GpuIdentity, Toolchain

SCHEMA: Literal[1] = 1


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One timed problem size.

    same_out: whether every launch wrote the same output, which stays in L2 if it fits. ragged: whether the requests
    differed in length.
    """

    batch: int
    kv_heads: int
    median_us: float
    same_out: bool = False
    ragged: bool = False


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How fast a winner was at the last of `shapes`. worst_slowdown: over all of them, against the best of each.

    bytes: what a call has to move; floor_share: time at the read+write floor over the median.
    """

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


class NewerSchemaError(ValueError):
    """A file that a later version of the package wrote."""


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a file."""
    return msgspec.json.schema(GpuFile)


def encode(file: GpuFile) -> bytes:
    """The bytes of a file, for people to read as well."""
    return msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n"


def decode(data: bytes) -> GpuFile:
    """The content of a file's bytes. Raises ValueError with the reason, NewerSchemaError if they are not at fault."""
    try:
        schema = msgspec.json.decode(data, type=_Header).schema
        if schema > SCHEMA:
            raise NewerSchemaError(f"schema {schema} is newer than {SCHEMA}, which is known here")
        return msgspec.json.decode(data, type=GpuFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a tuning DB file ({error})") from error


def merged(file: GpuFile, results: Iterable[Entry | Receipt]) -> GpuFile:
    """`file` with newer results, sorted."""
    entries = {entry.key: entry for entry in file.entries}
    receipts: dict[str, Receipt] = {}
    for receipt in file.receipts:
        receipts[receipt.binary] = _strictest(receipts.get(receipt.binary, receipt), receipt)
    for result in results:
        if isinstance(result, Entry):
            entries[result.key] = result
        else:
            receipts[result.binary] = _strictest(receipts.get(result.binary, result), result)
    return GpuFile(
        gpu=file.gpu,
        entries=sorted(entries.values(), key=lambda entry: entry.key),
        receipts=sorted(receipts.values(), key=lambda receipt: receipt.binary),
    )


def _strictest(old: Receipt, new: Receipt) -> Receipt:
    """A bad one stays, and is never tried again: who found the same binary correct did not know of it, or was lucky.

    Correct ones unite their seq_lens.
    """
    if not old.correct:
        return old
    if not new.correct:
        return new
    newer = max(new, old, key=lambda receipt: receipt.validated_at)
    return msgspec.structs.replace(newer, seq_lens=tuple(sorted({*old.seq_lens, *new.seq_lens})))


class Found(NamedTuple):
    """A winner, and the file that it belongs to."""

    entry: Entry
    path: Path


class View(NamedTuple):
    """Several files as one: of a key the winners in the order of the files, of a binary the strictest receipt."""

    entries: dict[TuningKey, list[Found]]
    receipts: dict[str, Receipt]

    def add(self, file: GpuFile, path: Path) -> None:
        """Put a file behind those before it."""
        for entry in file.entries:
            self.entries.setdefault(entry.key, []).append(Found(entry, path))
        for receipt in file.receipts:
            self.receipts[receipt.binary] = _strictest(self.receipts.get(receipt.binary, receipt), receipt)
