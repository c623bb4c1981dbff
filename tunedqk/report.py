"""Tables for people, from a tuning DB or from a pretune run."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tunedqk.pretune import Outcome
    from tunedqk.records import Entry


LEGEND = (
    "config: chunk CHUNK_SIZE, or CHUNK_SIZE/TILE_SIZE x num_stages where a program loops; warps; cache hints. "
    "The time is for `batch` requests with that many KV heads each. "
    "The floor is itself measured, so that a kernel can beat it."
)


def entries_table(entries: Iterable[Entry], title: str) -> Table:
    """One line per winner: key, config, median of the largest shape, share of the memory floor, rejected candidates."""
    table = Table(title=title, title_justify="left")
    for column in ("head_dim", "dtype", "rows", "page", "seq_len", "sequences"):
        table.add_column(column, justify="right")
    table.add_column("config")
    for column in ("batch x KV heads", "median us", "of floor", "rejected"):
        table.add_column(column, justify="right")
    for entry in entries:
        key, timing = entry.key, entry.timing
        shape = f"{timing.shapes[-1].batch} x {timing.shapes[-1].kv_heads}" if timing.shapes else "-"
        table.add_row(
            str(key.head_dim), key.dtype, str(key.rows), str(key.page_size or "-"), str(key.seq_len),
            key.load, str(entry.config),
            shape, f"{timing.median_us:.1f}", share(timing.floor_share), verdicts(entry.rejected) or "-",
        )  # fmt: skip
    return table


def share(value: float | None) -> str:
    """A share as a percentage, or a dash where none was measured."""
    return "-" if value is None else f"{value:.1%}"


def verdicts(rejected: dict[str, int]) -> str:
    """Rejected candidates by verdict."""
    return ", ".join(f"{count} {verdict}" for verdict, count in sorted(rejected.items()))


def outcome_line(outcome: Outcome) -> str:
    """One line about one key."""
    if outcome.entry is None:
        return f"{outcome.key}: FAILED: {outcome.error}"
    if not outcome.tuned:
        return f"{outcome.key}: has a winner already ({outcome.entry.config})"
    timing = outcome.entry.timing
    times = f"{timing.median_us:.1f} us" + (f", {share(timing.floor_share)} of floor" if timing.floor_share else "")
    return f"{outcome.key}: {outcome.entry.config}, {times} ({outcome.seconds:.1f} s)"


def summary(outcomes: list[Outcome]) -> str:
    """How many keys were tuned, had been, or failed, and what was rejected on the way."""
    tuned = [outcome for outcome in outcomes if outcome.tuned]
    failed = [outcome for outcome in outcomes if outcome.entry is None]
    rejected: Counter[str] = Counter()
    for outcome in tuned:
        rejected.update(outcome.entry.rejected if outcome.entry else {})
    if not tuned and not failed:
        return f"Nothing to do: all {len(outcomes)} keys have a winner with a receipt."
    kept = len(outcomes) - len(tuned) - len(failed)
    text = (
        f"{len(tuned)} keys tuned in {sum(o.seconds for o in tuned):.0f} s, {kept} had a winner, {len(failed)} failed."
    )
    return text + (f" Rejected candidates: {verdicts(rejected)}." if rejected else " No candidate was rejected.")
