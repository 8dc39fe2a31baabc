"""
The node as the exporter process sees it: every rank whose flight file lies in one directory.
"""

import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rankscope_exporter import __version__
from rankscope_exporter.collectors.reading import RankReading, read_rank
from rankscope_exporter.contract import (
    RankLife,
    RankReport,
    RanksAnswer,
    RequestsAnswer,
    StepsFrame,
    Unreadable,
)
from rankscope_exporter.flight import FlightError, FlightFile
from rankscope_exporter.flight.reporting import request_table
from rankscope_exporter.namespaces import PROC, is_foreign, read_pid_namespace
from rankscope_exporter.retention import remove_expired
from rankscope_exporter.serve.files import FlightFiles, OpenFile
from rankscope_exporter.serve.process import read_life
from rankscope_exporter.serve.steps import RankSteps, assemble

logger = logging.getLogger("rankscope.exporter")


@dataclass(frozen=True, slots=True)
class Clock:
    """
    The two clocks of a node: wall clock in seconds, monotonic clock in nanoseconds (that of the step records).
    """

    unix: Callable[[], float] = time.time
    monotonic_ns: Callable[[], int] = time.monotonic_ns


@dataclass(frozen=True, slots=True)
class NodeReading:
    """
    All ranks of the node at one moment, and the files that cannot be read.
    """

    ranks: list[RankReading] = field(default_factory=list)
    unreadable: list[Unreadable] = field(default_factory=list)


class Node:
    """
    Reads the flight files of one directory. Not safe for threads: one event loop owns it.
    """

    def __init__(self, directory: Path, clock: Clock, *, name: str | None = None, proc: Path = PROC) -> None:
        self.directory = directory
        self.clock = clock
        self.name = socket.gethostname() if name is None else name
        self._files = FlightFiles(directory)
        self._proc = proc
        self._namespace = read_pid_namespace(proc)
        self._told: set[tuple[str, str]] = set()
        self._foreign: set[str] = set()
        self._tables_told: set[str] = set()

    def close(self) -> None:
        """
        Close all flight files.
        """
        self._files.close()

    def read(self) -> NodeReading:
        """
        Read every rank.
        """
        scan = self._files.scan()
        unix, monotonic_ns = self.clock.unix(), self.clock.monotonic_ns()
        answer = NodeReading(unreadable=list(scan.unreadable))
        for file in scan.files:
            try:
                answer.ranks.append(
                    read_rank(file.flight, file.memo, self._life(file), monotonic_ns=monotonic_ns, unix=unix)
                )
            except (FlightError, ValueError) as error:  # noqa: PERF203  # one bad file must not hide the others
                answer.unreadable.append(Unreadable(path=str(file.flight.path), reason=str(error)))
        self._tell(answer.unreadable)
        self._tell_foreign({rank.key for rank in answer.ranks if rank.life is RankLife.UNKNOWN})
        return answer

    def _life(self, file: OpenFile) -> RankLife:
        if is_foreign(file.identity.pid_namespace, self._namespace):
            return RankLife.UNKNOWN
        return read_life(file.flight.pid, file.flight.process_start_ticks, self._proc)

    def _tell_foreign(self, keys: set[str]) -> None:
        """
        Log once of each rank whose process cannot be seen from here.
        """
        for key in sorted(keys - self._foreign):
            logger.warning(
                "%s: whether its process lives is unknown, as it has another process namespace than this exporter; let them share one "
                '(Kubernetes: shareProcessNamespace: true; Compose: pid: "service:vllm")',
                key,
            )
        self._foreign = keys

    def _tell_table(self, key: str, reason: str) -> None:
        """
        Log each request table that cannot be read once. Its rank is left out of the answer: unknown is not 0.
        """
        if key not in self._tables_told:
            self._tables_told.add(key)
            logger.warning("no answer about requests: %s", reason)

    def _tell(self, unreadable: list[Unreadable]) -> None:
        """
        Log each unreadable file once for each reason.
        """
        now = {(file.path, file.reason) for file in unreadable}
        for path, reason in sorted(now - self._told):
            logger.warning("unreadable %s: %s", path, reason)
        self._told = now

    def ranks(self, *, control: bool) -> RanksAnswer:
        """
        The answer of `/v1/ranks`; `control` says whether control is on.
        """
        reading = self.read()
        return RanksAnswer(
            node=self.name,
            exporter_version=__version__,
            monotonic_ns=self.clock.monotonic_ns(),
            unix=self.clock.unix(),
            flight_dir=str(self.directory),
            control=control,
            ranks=[rank_report(rank) for rank in reading.ranks],
            unreadable=reading.unreadable,
        )

    def requests(self, engine: str | None = None) -> RequestsAnswer:
        """
        The requests that drift, rank by rank; of one engine if that is given.
        """
        tables = []
        files = self._files.scan().files
        self._tables_told &= {file.flight.key for file in files}
        for file in files:
            identity = file.identity
            if engine is not None and identity.engine != engine:
                continue
            try:
                tables.append(request_table(file.flight, identity))
            except FlightError as error:
                self._tell_table(file.flight.key, str(error))
        return RequestsAnswer(tables=tables)

    def steps(self, cursor: str | None) -> StepsFrame:
        """
        The step records after `cursor`, or all that the rings hold.

        Raises:
            CursorError: the cursor is not one of ours.

        """
        ranks = [RankSteps(file.flight, file.identity, self._life(file)) for file in self._files.scan().files]
        return assemble(ranks, cursor, node=self.name, monotonic_ns=self.clock.monotonic_ns(), unix=self.clock.unix())

    def write_control(self, keys: list[str], word: int) -> None:
        """
        Write a control word for the ranks of `keys`: for all of them, or, if one file cannot be opened, for none.

        Raises:
            FlightError: a file cannot be opened for writing.

        """
        paths = {file.flight.key: file.flight.path for file in self._files.scan().files}
        opened: list[FlightFile] = []
        try:
            for key in keys:
                if key not in paths:
                    msg = f"{key}: its flight file is gone"
                    raise FlightError(msg)
                opened.append(FlightFile(paths[key], writable=True))
            for file in opened:
                file.request_control(word)
        finally:
            for file in opened:
                file.close()

    def remove_expired(self, retention_seconds: float) -> list[Path]:
        """
        Remove the files of processes that are gone for longer than the retention time; those that were removed.
        """
        removed = remove_expired(self.directory, retention_seconds, now=self.clock.unix)
        for path in removed:
            logger.info("removed %s: its process is gone for longer than %g s", path, retention_seconds)
        return removed


def rank_report(rank: RankReading) -> RankReport:
    """
    A rank in the words of the contract.
    """
    return RankReport(
        key=rank.key,
        identity=rank.identity,
        life=rank.life,
        hooks=list(rank.hooks),
        mitigations=list(rank.mitigations),
        control=rank.control,
        step=rank.step,
        phase=rank.phase,
        in_flight_seconds=rank.in_flight_seconds,
        last_activity_seconds=rank.last_activity_seconds,
        faults=rank.faults,
        detail=rank.detail,
        failure=rank.failure if rank.failed else None,
        device=rank.device if rank.device is not None and rank.device.samples else None,
        started_unix=rank.created_unix,
    )
