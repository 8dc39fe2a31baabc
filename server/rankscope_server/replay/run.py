"""
From places to verdicts: what the command does, without a terminal.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from rankscope_server.domain.clock import NodeClock
from rankscope_server.replay.engines import group_engines
from rankscope_server.replay.errors import ReplayError
from rankscope_server.replay.places import find_saved
from rankscope_server.replay.playing import Played, play
from rankscope_server.replay.saved import SavedRank, read_saved
from rankscope_server.replay.taken import Taken, taken_by_capture, taken_by_name, taken_live
from rankscope_server.replay.until import Until
from rankscope_server.replay.verdict import Verdict, assess_played

ReadClock = Callable[[], NodeClock]
"""
The clocks of this machine, now: those of a live flight file.
"""
Progress = Callable[[str, float], None]
"""
Told which engine is being looked at, and how much of it (0 to 1) is done.
"""


@dataclass(frozen=True, slots=True)
class Replayed:
    """
    Everything that came of some places: verdicts on the engines, and what was wrong with the rest.
    """

    engines: tuple[tuple[Played, Verdict], ...]
    problems: tuple[str, ...]

    @property
    def found(self) -> bool:
        """Whether anything was found on an engine."""
        return any(played.found for played, _ in self.engines)


def replay(
    places: Iterable[Path],
    scratch: Path,
    *,
    clock: ReadClock,
    until: Until | None = None,
    progress: Progress = lambda _name, _done: None,
) -> Replayed:
    """
    Replay the flight files at `places`, with what lies in archives unpacked into the empty directory `scratch`.
    """
    found = find_saved(places, scratch)
    problems = list(found.problems)
    saved: list[tuple[SavedRank, Taken]] = []
    for file in found.files:
        try:
            rank = read_saved(file)
        except ReplayError as error:
            problems.append(str(error))
            continue
        saved.append((rank, _taken(rank, clock())))
    engines: list[tuple[Played, Verdict]] = []
    for engine in group_engines(saved):

        def told(done: float, name: str = engine.name) -> None:
            progress(name, done)

        end = None if until is None else until.of(engine)
        played = play(engine, until_unix=end, progress=told)
        engines.append((played, assess_played(played, until_given=end is not None)))
    return Replayed(tuple(engines), tuple(problems))


def _taken(rank: SavedRank, now: NodeClock) -> Taken:
    """
    Up to when a file speaks, by the best word that there is.
    """
    return taken_by_capture(rank) or taken_by_name(rank) or taken_live(rank, now) or Taken()


def exit_code(replayed: Replayed) -> int:
    """
    0: nothing found, 1: something found, 2: nothing could be looked at.
    """
    if not replayed.engines:
        return 2
    return int(replayed.found)
