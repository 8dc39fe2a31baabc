"""
An answer of NCCL's RAS port, whatever format it came in, and what is wrong with one that cannot be used.

Formats that are known: the text of NCCL 2.24 and 2.25 (one count per rank, over all types), the text of 2.26 and later
(counts by type), and the JSON of 2.28.7 and later, up to 2.32. The user guide of NCCL describes both under "RAS".
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from rankscope_exporter.collectors.nccl import Communicator

MAX_RANKS = 1024
"""
Ranks that are shown one by one; of the others only what their communicator says.
"""
MAX_COMMUNICATORS = 256
MAX_TYPES = 16
"""
Types of collectives per rank; NCCL has eight.
"""
MAX_QUOTED = 80

VERSION = re.compile(r"[0-9]{1,4}\.[0-9]{1,4}\.[0-9]{1,4}[0-9A-Za-z.+_-]{0,32}")
HOST = re.compile(r"[0-9A-Za-z.:%_-]{0,64}")
TYPE = re.compile(r"[A-Za-z][0-9A-Za-z]{0,31}")

RESULTS = {
    1: "unhandled cuda error", 2: "system error", 3: "internal error", 4: "invalid argument", 5: "invalid usage", 6: "remote process error",
}  # fmt: skip
"""
Results of NCCL that are errors, by number; 0 is success and 7 is work in progress.
"""
OTHER_RESULT = "unexpected error"
NO_ERROR = frozenset({0, 7})


class RasError(Exception):
    """
    A question to the RAS port that brought nothing; `reason` is one of a few fixed words, the message has the details.
    """

    def __init__(self, reason: str, detail: str, nccl_version: str = "") -> None:
        super().__init__(detail)
        self.reason = reason
        self.nccl_version = nccl_version


class UnknownFormatError(RasError):
    """
    An answer that is not in a format that is known here: nothing of it is used.
    """

    def __init__(self, detail: str, nccl_version: str = "") -> None:
        super().__init__("unknown format", detail, nccl_version)


class CutShortError(RasError):
    """
    An answer that ends before its end.
    """

    def __init__(self, detail: str, nccl_version: str = "") -> None:
        super().__init__("cut short", detail, nccl_version)


@dataclass(frozen=True, slots=True)
class Answer:
    """
    One answer.
    """

    nccl_version: str
    format: str
    """json or text."""
    summary: Mapping[tuple[str, str], int]
    """Number of communicators by status and errors."""
    communicators: tuple[Communicator, ...] = ()
    """Those that the answer names, each id once."""
    processes: frozenset[tuple[str, int]] = field(default_factory=frozenset)
    """Host and pid of the processes that it names: an answer about one of them is about the same job."""
    left_out: int = 0
    """Ranks that are not shown one by one because there are too many."""


def quoted(text: str) -> str:
    """
    Foreign text for a message: short, and without anything that a terminal would obey.
    """
    return ascii(text[:MAX_QUOTED]) + ("..." if len(text) > MAX_QUOTED else "")


def result_name(number: int) -> str:
    """
    Name of a result of NCCL.
    """
    return RESULTS.get(number, OTHER_RESULT)
