"""
`rankscope replay`: the server's own detection over saved flight files.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from rankscope_server.domain.clock import NodeClock
from rankscope_server.replay.document import document
from rankscope_server.replay.errors import ReplayError
from rankscope_server.replay.run import Replayed, exit_code
from rankscope_server.replay.run import replay as replay_places
from rankscope_server.replay.steps import extract_step, step_lines
from rankscope_server.replay.text import engine_lines, printable
from rankscope_server.replay.trace import trace_replayed
from rankscope_server.replay.until import parse_until

PROGRESS_SECONDS = 0.5
"""
Time between two lines of progress; a replay that takes no longer shows none.
"""


def replay(
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="Flight files, directories of them, archives made by `rankscope-exporter copy`, captures of incidents."
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
    until: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="How far to go: a time (2026-12-01T14:03:00Z, or seconds since 1970), or +30 for 30 s after the last record. "
            "It tells what a copy does not: that the ranks did nothing more until then.",
        ),
    ] = None,
    step: Annotated[int | None, typer.Option(min=1, help="Also print this step as all ranks recorded it.")] = None,
    perfetto: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a trace that ui.perfetto.dev opens.")
    ] = None,
) -> None:
    """
    Run the server's detection over saved flight files, as it would have run while they were written.

    Ends with 0 if nothing was found, 1 if something was, 2 if nothing could be looked at.
    """
    try:
        end = None if until is None else parse_until(until)
    except ReplayError as error:
        _fail(str(error))
    progress = _Progress()
    with tempfile.TemporaryDirectory(prefix="rankscope-replay-") as scratch:
        replayed = replay_places(paths, Path(scratch), clock=_read_clock, until=end, progress=progress.show)
    progress.clear()
    if perfetto is not None and replayed.engines:
        _write_trace(perfetto, replayed)
    for problem in replayed.problems:
        _complain(f"left out: {problem}" if replayed.engines else problem)
    if not replayed.engines:
        raise typer.Exit(2)
    if as_json:
        _print_document(replayed, step)
    else:
        _print_text(replayed, step)
    raise typer.Exit(exit_code(replayed))


def _print_document(replayed: Replayed, step: int | None) -> None:
    steps = [] if step is None else [(step, extract_step(played.engine, step)) for played, _ in replayed.engines]
    typer.echo(json.dumps(document(replayed.engines, replayed.problems, steps), indent=2))


def _print_text(replayed: Replayed, step: int | None) -> None:
    for number, (played, verdict) in enumerate(replayed.engines):
        if number:
            typer.echo()
        for line in engine_lines(played, verdict):
            typer.echo(line)
        if step is not None:
            typer.echo()
            for line in step_lines(played.engine, step, extract_step(played.engine, step)):
                typer.echo(line)


def _write_trace(path: Path, replayed: Replayed) -> None:
    try:
        path.write_bytes(trace_replayed(replayed.engines))
    except OSError as error:
        _fail(f"{path}: {error.strerror}; name another file with --perfetto")


def _read_clock() -> NodeClock:
    return NodeClock(time.monotonic_ns(), time.time(), time.monotonic())


def _complain(message: str) -> None:
    print(f"rankscope replay: {printable(message)}", file=sys.stderr)  # noqa: T201  this is the interface


def _fail(message: str) -> NoReturn:
    _complain(message)
    raise typer.Exit(2)


class _Progress:
    """
    How far a long replay has come, on standard error if that is a terminal.
    """

    def __init__(self) -> None:
        self._shows = sys.stderr.isatty()
        self._next = time.monotonic() + PROGRESS_SECONDS
        self._shown = False

    def show(self, engine: str, done: float) -> None:
        """
        Told at each look.
        """
        if self._shows and time.monotonic() >= self._next:
            self._next = time.monotonic() + PROGRESS_SECONDS
            self._shown = True
            self._write(f"\r\033[Kreplaying {printable(engine)}: {done:.0%}")

    def clear(self) -> None:
        """
        Take the line away.
        """
        if self._shown:
            self._write("\r\033[K")

    @staticmethod
    def _write(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
