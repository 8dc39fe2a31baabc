"""
`rankscope-exporter tail`: the steps of live ranks, one line each, as they end.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rankscope_exporter.commands.columns import COLUMNS
from rankscope_exporter.commands.facts import step_facts
from rankscope_exporter.commands.follow import Ended, Event, Follower, LifeChanged, Look, Lost, Standing, told_at_start
from rankscope_exporter.commands.ranks import RankFlight, open_rank
from rankscope_exporter.commands.text import UNKNOWN, cell, clock_text, printable, says_something
from rankscope_exporter.contract.words import RankLife
from rankscope_exporter.flight import FlightError, list_flight_files
from rankscope_exporter.namespaces import PROC, is_foreign, read_pid_namespace
from rankscope_exporter.serve.process import read_life

TOLD = (
    "role",
    "requests",
    "masked",
    "drift",
    "drifting",
    "width",
    "posted",
    "queue",
    "new",
    "finished",
    "generation",
    "ms",
)
"""
Titles of the columns of `dump` that a line has, where they say something.
"""
LIVES = {
    RankLife.RUNNING: "its process runs",
    RankLife.STOPPED: "its process is stopped by a signal; `kill -CONT PID` continues it",
    RankLife.GONE: "its process is gone",
    RankLife.UNKNOWN: "whether its process lives cannot be seen from here: it is in another process namespace",
}


@dataclass(slots=True)
class Followed:
    """
    A file that is followed; `inode` tells it from a later one of the same name.
    """

    rank: RankFlight
    follower: Follower
    inode: tuple[int, int]


class Tail:
    """
    Follows the flight files that `paths` gives, of one engine if that is given. Close it afterwards.
    """

    def __init__(
        self,
        paths: Callable[[], Iterator[Path]],
        *,
        engine: str | None = None,
        from_start: bool = False,
        proc: Path = PROC,
    ) -> None:
        self._paths = paths
        self._engine = engine
        self._from_start = from_start
        self._proc = proc
        self._namespace = read_pid_namespace(proc)
        self._files: dict[Path, Followed] = {}
        self._told: set[tuple[Path, str]] = set()

    @property
    def following(self) -> int:
        """How many files are followed."""
        return len(self._files)

    def close(self) -> None:
        """
        Close all files.
        """
        for file in self._files.values():
            file.rank.flight.close()
        self._files = {}

    def look(self, now: float) -> list[str]:
        """
        The lines that there are to tell at `now` (seconds, of a clock that only goes forward), in the order of their steps.
        """
        told: list[tuple[int, str]] = []
        problems: list[str] = []
        paths = list(self._paths())
        for path in [path for path in self._files if path not in paths]:
            problems.append(f"{self._name(self._files[path].rank)}: its flight file was removed")
            self._files.pop(path).rank.flight.close()
        for path in paths:
            try:
                if (file := self._file(path)) is not None:
                    told += self._look(file, now)
            except FlightError as error:  # noqa: PERF203  one bad file must not hide the others
                if (path, str(error)) not in self._told:
                    self._told.add((path, str(error)))
                    problems.append(str(error))
        # Files met from now on are those of new processes, whose first steps nobody has seen.
        self._from_start = True
        return [*(text for _, text in sorted(told, key=lambda item: item[0])), *map(printable, problems)]

    def _file(self, path: Path) -> Followed | None:
        known = self._files.get(path)
        try:
            status = os.lstat(path)
        except OSError as error:
            msg = f"{path.name}: {error.strerror}"
            raise FlightError(msg) from error
        inode = status.st_dev, status.st_ino
        if known is not None:
            if known.inode == inode:
                return known
            self._files.pop(path).rank.flight.close()
        rank = open_rank(path)
        if self._engine is not None and rank.engine != self._engine:
            rank.flight.close()
            return None
        last_step = rank.flight.step()
        told = told_at_start(rank.flight.records(), last_step, from_start=self._from_start)
        self._files[path] = Followed(rank, Follower(told), inode)
        return self._files[path]

    def _look(self, file: Followed, now: float) -> Iterator[tuple[int, str]]:
        flight, follower = file.rank.flight, file.follower
        life = self._life(file.rank)
        last_step = flight.step()
        look = Look(last_step, flight.records(after=follower.told), life, now)
        key = 0
        for event in follower.look(look):
            if isinstance(event, (Ended, Standing)):
                key = max(key, int(event.record["begin_ns"]))
            yield key, event_line(self._name(file.rank), file.rank, event)

    def _life(self, rank: RankFlight) -> RankLife:
        if rank.identity is not None and is_foreign(rank.identity.pid_namespace, self._namespace):
            return RankLife.UNKNOWN
        return read_life(rank.flight.pid, rank.flight.process_start_ticks, self._proc)

    def _name(self, rank: RankFlight) -> str:
        engines = {file.rank.engine for file in self._files.values()}
        return rank.rank if len(engines) < 2 else f"{rank.engine} {rank.rank}"


def event_line(name: str, rank: RankFlight, event: Event) -> str:
    """
    An event of the rank called `name` as one line: time of day at which its step began, rank, what happened.
    """
    flight = rank.flight
    if isinstance(event, (Ended, Standing)):
        facts = step_facts(event.record)
        begin = clock_text(flight.wall_time(int(event.record["begin_ns"])))
        phase = f"{facts['phase']}, failed" if facts["failed"] else facts["phase"]
        if isinstance(event, Standing):
            return f"{begin}  {name}  step {facts['step']}  in flight, {phase}, and has not moved for at least {event.seconds:.1f} s"
        if phase != "done" and not facts["failed"]:
            phase = f"{phase}, never done"
        values = [(column.title, column.value(facts)) for column in COLUMNS if column.title in TOLD]
        said = [f"{title} {cell(value)}" for title, value in values if says_something([value])]
        return "  ".join([begin, name, f"step {facts['step']}", str(phase), cell(facts["guard"]), *said])
    blank = UNKNOWN.ljust(len("00:00:00.000"))
    if isinstance(event, Lost):
        steps = f"step {event.first} was" if event.first == event.last else f"steps {event.first} to {event.last} were"
        return f"{blank}  {name}  {steps} lost: overwritten, or damaged, between two looks"
    assert isinstance(event, LifeChanged)
    return f"{blank}  {name}  {LIVES[event.life].replace('PID', str(flight.pid))}; last step {event.step}"


def engines_in(directory: Path) -> list[str]:
    """
    Names of the engines whose flight files lie in `directory`, sorted.
    """
    engines = set()
    for path in list_flight_files(directory):
        try:
            rank = open_rank(path)
        except FlightError:
            continue
        engines.add(rank.engine)
        rank.flight.close()
    return sorted(engines)


def find_engine(wanted: str, engines: list[str]) -> str | None:
    """
    The engine of that name, or the only one whose name begins so; None if there is none, or several.
    """
    if wanted in engines:
        return wanted
    begins = [engine for engine in engines if engine.startswith(wanted)]
    return begins[0] if len(begins) == 1 else None


def tail(
    target: str | None,
    directory: Path,
    *,
    from_start: bool,
    interval: float,
    out: TextIO,
    complain: Callable[[str], None],
    wait: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """
    Follow a file, an engine, or all ranks of `directory`, until `wait` is interrupted; the exit code.
    """
    engine = None
    if target is not None and (target.endswith(".flight") or os.sep in target or os.path.lexists(target)):
        file = Path(target)
        if file.is_dir():
            complain(f"{target}: is a directory; follow the ranks in it with --flight-dir {target}")
            return 2
        try:
            open_rank(file).flight.close()
        except FlightError as error:
            complain(printable(str(error)))
            return 1

        def paths() -> Iterator[Path]:
            return iter([file] if os.path.lexists(file) else [])
    else:
        if target is not None:
            engines = engines_in(directory)
            engine = find_engine(target, engines)
            if engine is None:
                known = ", ".join(engines) or "none"
                complain(
                    f"{printable(target)}: no file of that name, and not one engine in {directory} that is called so; engines there: {known}"
                )
                return 1

        def paths() -> Iterator[Path]:
            return list_flight_files(directory)

    following = Tail(paths, engine=engine, from_start=from_start)
    try:
        lines = following.look(clock())
        if not following.following:
            complain(f"no rank to follow in {directory} yet; waiting (Ctrl-C ends)")
        while True:
            out.writelines(line + "\n" for line in lines)
            out.flush()
            wait(interval)
            lines = following.look(clock())
    except KeyboardInterrupt:
        return 0
    finally:
        following.close()
