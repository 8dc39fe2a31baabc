"""
Flight files as the commands open them: by name or by directory, each with what it is called.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from rankscope_exporter.commands.text import printable
from rankscope_exporter.contract import RankIdentity
from rankscope_exporter.flight import FlightError, FlightFile, list_flight_files


@dataclass(frozen=True, slots=True)
class RankFlight:
    """
    An open flight file, and whose it is; None where its identity is damaged.
    """

    flight: FlightFile
    identity: RankIdentity | None

    @property
    def engine(self) -> str:
        """Name of the engine, `unknown` where the identity is damaged."""
        return "unknown" if self.identity is None else printable(self.identity.engine)

    @property
    def rank(self) -> str:
        """`pp0-tp0`, with the data-parallel rank where there are several; the file's name where the identity is damaged."""
        if self.identity is None:
            return printable(self.flight.key)
        i = self.identity
        return f"dp{i.dp_rank}-" * (i.dp_size > 1) + f"pp{i.pp_rank}-tp{i.tp_rank}"


def open_rank(path: Path) -> RankFlight:
    """
    Open a flight file. A damaged identity does not hide the steps: it is None then.

    Raises:
        FlightError: it cannot be read.

    """
    flight = FlightFile(path)
    try:
        return RankFlight(flight, read_identity(flight))
    except BaseException:
        flight.close()
        raise


def read_identity(flight: FlightFile) -> RankIdentity | None:
    """
    Who the rank is; None where that is damaged.
    """
    try:
        return RankIdentity.model_validate(flight.identity())
    except (FlightError, ValidationError):
        return None


def find_files(places: Iterable[Path]) -> tuple[list[Path], list[str]]:
    """
    The files that are named, those in the directories that are named, and what is wrong with the rest. None comes twice.
    """
    found: dict[Path, None] = {}
    problems = []
    for place in places:
        if place.is_dir():
            inside = list(list_flight_files(place))
            found |= dict.fromkeys(inside)
            if not inside:
                problems.append(f"{place}: no flight files (*.flight) that can be seen in this directory")
        elif place.exists() or place.is_symlink():
            found[place] = None
        else:
            problems.append(f"{place}: no such file or directory")
    return list(found), problems
