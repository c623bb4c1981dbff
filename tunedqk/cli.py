"""The command line: `tunedqk pretune | show | verify`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tunedqk import __version__, config
from tunedqk.errors import CrashedError, WorkerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from tunedqk.config import TuningKey
    from tunedqk.pretune import Outcome, Pretuner

PLAIN_WIDTH = 160  # columns where the output is no terminal


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    options = _parser().parse_args(arguments)
    command = {"pretune": _pretune, "show": _show, "verify": _verify}[options.command]
    try:
        return command(options)
    except KeyboardInterrupt:
        print("\nStopped. What was finished is saved; the same command goes on from there.", file=sys.stderr)
        return 130
    except (CrashedError, WorkerError) as error:
        print(f"tunedqk {options.command}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tunedqk", description="Attention scores from a kernel tuned once per GPU, validated before use."
    )
    parser.add_argument("--version", action="version", version=f"tunedqk {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    pretune = commands.add_parser(
        "pretune",
        help="tune keys ahead of time",
        description="Tune keys ahead of time and save the winners in this GPU's file. Finished keys are skipped. "
        "Without a GPU the same pipeline runs under Triton's interpreter, into a file of its own.",
        epilog="example: tunedqk pretune --head-dims 128 --dtypes bfloat16 --rows 1,4",
    )
    scope = pretune.add_mutually_exclusive_group()
    scope.add_argument("--quick", action="store_true", help="eight keys: bfloat16, head_dim 128, rows 1 and 4")
    scope.add_argument("--all", action="store_true", help="also more head_dims and rows, float8 keys and pages")
    pretune.add_argument("--head-dims", type=_numbers(1, config.MAX_HEAD_DIM), metavar="N,N", help="only these")
    pretune.add_argument("--seq-lens", type=_numbers(1, 2**31 - 1), metavar="N,N", help="only the buckets of these")
    pretune.add_argument("--rows", type=_numbers(1, 4096), metavar="N,N", help="only these (query rows per KV head)")
    pretune.add_argument(
        "--page-sizes", type=_numbers(0, config.MAX_PAGE_SIZE), metavar="N,N", help="only these (0: not paged)"
    )
    pretune.add_argument(
        "--sequences", type=_numbers(1, 2**31 - 1), metavar="N,N", help="only the buckets of these (batch x KV heads)"
    )
    pretune.add_argument("--dtypes", type=_dtypes, metavar="NAME,NAME", help="only these")
    pretune.add_argument("--dry-run", action="store_true", help="show the file, the keys and the number of configs")
    pretune.add_argument("--force", action="store_true", help="tune also what has a winner")
    pretune.add_argument("--out", type=Path, metavar="FOLDER", help="save there, and know only what is there")

    show = commands.add_parser(
        "show", help="list winners", description="List the winners in all files known here, or in the given ones.",
        epilog="example: tunedqk show",
    )  # fmt: skip
    show.add_argument("files", nargs="*", type=Path, help="JSON files")

    verify = commands.add_parser(
        "verify", help="validate every winner again",
        description="Validate every stored winner of this GPU again, good receipt or not. Exit status 1 if one fails.",
        epilog="example: tunedqk verify",
    )  # fmt: skip
    verify.add_argument("--out", type=Path, metavar="FOLDER", help="verify the file in this folder")
    return parser


def _numbers(low: int, high: int) -> argparse._ActionType:
    def parse(text: str) -> tuple[int, ...]:
        try:
            values = tuple(int(part) for part in text.split(","))
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected numbers like 64,128, got {text!r}") from None
        if not all(low <= value <= high for value in values):
            raise argparse.ArgumentTypeError(f"expected numbers from {low} to {high}, got {text!r}")
        return values

    return parse


def _dtypes(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in config.ELEMENT_SIZE]:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(config.ELEMENT_SIZE)}, got {unknown[0]!r}")
    return names


def _console() -> Console:
    from rich.console import Console

    if sys.stdout is None:  # closed by who started us
        return Console(quiet=True)
    return Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)


def _device_ready(console: Console) -> None:
    """Choose GPU or interpreter, which Triton reads when it is first imported."""
    import torch

    from tunedqk.device import interpreting

    if os.environ.get("TRITON_INTERPRET") is None and not torch.cuda.is_available():
        console.print(
            "No GPU here: running the pipeline under Triton's interpreter. Its times say nothing about a GPU."
        )
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available() and not interpreting():
        print("tunedqk: there is no GPU here, and TRITON_INTERPRET is set, but not to 1: unset it", file=sys.stderr)
        sys.exit(2)


def _keys(options: argparse.Namespace) -> list[TuningKey]:
    """The keys of the default, quick or whole grid, with what was chosen by hand in its place."""
    grids = (config.QUICK_GRID,) if options.quick else config.WHOLE_GRIDS if options.all else (config.DEFAULT_GRID,)
    chosen = {name: getattr(options, name) for name in config.Grid._fields if getattr(options, name)}
    return list(dict.fromkeys(key for grid in grids for key in grid._replace(**chosen).tuning_keys()))


def _pretune(options: argparse.Namespace) -> int:
    console = _console()
    _device_ready(console)
    from tunedqk import isolation, pretune
    from tunedqk.report import entries_table, summary

    resolver = pretune.resolver_for_folder(options.out)
    keys = _keys(options)
    todo = keys if options.force else pretune.missing(keys, resolver)
    console.print(
        f"{resolver.gpu.name}: {len(todo)} of {len(keys)} keys to tune, into {resolver.db.path}", soft_wrap=True
    )
    if options.dry_run:
        for key in todo:
            console.print(f"  {key}: {pretune.config_count([key], resolver)} configs")
        console.print(f"{pretune.config_count(todo, resolver)} configs in all. Nothing was tuned.")
        return 0
    pretuner = isolation.IsolatedPretuner(resolver, options.out, force=options.force)
    outcomes = _run_with_progress(console, pretuner, keys)
    tuned = [outcome.entry for outcome in outcomes if outcome.entry is not None and outcome.tuned]
    if tuned:
        console.print(entries_table(tuned, f"tuned on {resolver.gpu.name}"))
    console.print(summary(outcomes), soft_wrap=True)
    unsaved = sum(not outcome.saved for outcome in outcomes)
    if unsaved:
        print(f"tunedqk pretune: {unsaved} results could not be saved in {resolver.db.path}", file=sys.stderr)
    return 1 if unsaved or any(outcome.entry is None for outcome in outcomes) else 0


def _run_with_progress(console: Console, pretuner: Pretuner, keys: list[TuningKey]) -> list[Outcome]:
    """A bar with the time left on a terminal, a line per key elsewhere."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from tunedqk.report import outcome_line

    if not console.is_terminal:
        return pretuner.run(keys, lambda outcome: console.print(outcome_line(outcome), soft_wrap=True))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("tuning", total=len(keys))

        def report(outcome: Outcome) -> None:
            if outcome.entry is None:
                progress.console.print(outcome_line(outcome))
            progress.update(task, advance=1, description=str(outcome.key))

        return pretuner.run(keys, report)


def _show(options: argparse.Namespace) -> int:
    from tunedqk.db import load_file, search_directories, user_directory
    from tunedqk.report import LEGEND, entries_table

    console = _console()
    status = 0
    folders = [user_directory(), *search_directories()]
    files = options.files or [path for folder in folders if folder.is_dir() for path in sorted(folder.glob("*.json"))]
    if not files:
        console.print(f"No file yet in {', '.join(map(str, folders))}: run tunedqk pretune.", soft_wrap=True)
    for path in files:
        try:
            content = load_file(path)
        except ValueError as error:
            print(f"tunedqk show: {error}", file=sys.stderr)
            status = 1
            continue
        correct = sum(receipt.correct for receipt in content.receipts)
        count = f"{len(content.entries)} winners, {correct} binaries proven, {len(content.receipts) - correct} rejected"
        console.print(entries_table(content.entries, f"{content.gpu.name} ({content.gpu.arch}): {count}\n{path}"))
    if files:
        console.print(LEGEND)
    return status


def _verify(options: argparse.Namespace) -> int:
    console = _console()
    _device_ready(console)
    from tunedqk.pretune import resolver_for_folder, verify

    resolver = resolver_for_folder(options.out)
    total = failed = 0
    for entry, error in verify(resolver):
        total += 1
        if error is not None:
            failed += 1
            console.print(f"{entry.key}: {error}", soft_wrap=True)
    if not total:
        print(f"tunedqk verify: no winners in {resolver.db.path}, so nothing was verified", file=sys.stderr)
        return 1
    console.print(
        f"{resolver.gpu.name}: {total - failed} of {total} winners are correct, "
        f"{resolver.door.validations} binaries validated again."
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
