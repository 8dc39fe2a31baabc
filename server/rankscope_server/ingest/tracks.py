"""
Everything that was polled, in memory: exporters, ranks, their steps.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from rankscope_exporter.contract import RankReport, RanksAnswer, RequestsAnswer, RequestTable, StepsFrame
from rankscope_server.domain.clock import Moment, NodeClock
from rankscope_server.domain.drift import device_drift
from rankscope_server.domain.facts import EngineFacts, ExporterFacts, RankFacts, rank_labels
from rankscope_server.domain.history import StepHistory
from rankscope_server.domain.model import RankId
from rankscope_server.ingest.seconds import SecondSeries

REPLACED_SECONDS = 900.0
"""
An engine that ended and was replaced stays in sight for this long.
"""

RATE_STEPS = 512


@dataclass(slots=True)
class RankTrack:
    """
    One rank: its last report, and its steps.
    """

    exporter: str
    report: RankReport
    first_seen: float
    life_since: float
    history: StepHistory = field(default_factory=StepHistory)
    seconds: SecondSeries = field(default_factory=SecondSeries)
    requests: RequestTable | None = None
    reported: float = 0.0
    """Monotonic second at which `report` arrived."""
    clock: NodeClock | None = None
    """Its node's clocks in the last answer that held its steps; None before the first."""
    device_samples: int = 0
    """How many samples of device-side lengths the rank had taken when the last one was put into the series."""

    @property
    def id(self) -> RankId:
        """Where it stands in its engine."""
        identity = self.report.identity
        return RankId(identity.dp_rank, identity.pp_rank, identity.tp_rank)

    def note_device(self, unix: float) -> None:
        """
        Put the report's sample of device-side lengths into the series, once; `unix` is the node's time of the report.
        """
        device = self.report.device
        if device is not None and device.age_seconds is not None and device.samples != self.device_samples:
            self.device_samples = device.samples
            self.seconds.note(int(unix - device.age_seconds), device_drift(device), device.rows)

    def rate(self, window_seconds: float = 5.0) -> float | None:
        """
        Steps per second over its last steps; None where too few are known.
        """
        records = self.history.tail(RATE_STEPS)
        if len(records) < 2:
            return None
        begun = records["begin_ns"].astype(np.int64)
        recent = begun[begun >= begun[-1] - int(window_seconds * 1e9)]
        span = float(recent[-1] - recent[0]) / 1e9
        return (len(recent) - 1) / span if len(recent) > 1 and span > 0 else None


@dataclass(slots=True)
class ExporterTrack:
    """
    One exporter of a deployment: how it answers, and the ranks that it speaks of.
    """

    deployment: str
    url: str
    token: bool
    since: float
    ranks: dict[str, RankTrack] = field(default_factory=dict)
    clock: NodeClock | None = None
    cursor: str = ""
    refetch: bool = False
    """Whether all that the rings hold is to be asked for again: a rank has got its name since."""
    answered: dict[str, float] = field(default_factory=dict)
    """Monotonic second of the last good answer, by path."""
    errors: dict[str, str] = field(default_factory=dict)
    """What is wrong now, by path."""
    control: bool | None = None
    unreadable: tuple[str, ...] = ()
    lost: int = 0
    """Steps that a ring no longer held when they were asked for."""

    def absorb_ranks(self, answer: RanksAnswer, now: Moment) -> None:
        """
        Take in a `/v1/ranks` answer: ranks that are new, ranks whose file is gone.
        """
        self.control = answer.control
        self.unreadable = tuple(f"{file.path}: {file.reason}" for file in answer.unreadable)
        self.clock = self.clock or NodeClock(answer.monotonic_ns, answer.unix, now.monotonic)
        reports = {report.key: report for report in answer.ranks}
        for key, report in reports.items():
            track = self.ranks.get(key)
            if track is None or track.report.identity != report.identity:
                track = self.ranks[key] = RankTrack(self.url, report, now.monotonic, now.monotonic)
                self.refetch = True
            else:
                if track.report.life is not report.life:
                    track.life_since = now.monotonic
                track.report = report
            track.reported = now.monotonic
            track.note_device(answer.unix)
        for key in [key for key in self.ranks if key not in reports]:
            del self.ranks[key]

    def absorb_steps(self, frame: StepsFrame, now: Moment) -> bool:
        """
        Take in a `/v1/steps` answer; whether `/v1/ranks` has more to say at once: who a rank is, or how its step failed.
        """
        header = frame.header
        clock = NodeClock(header.monotonic_ns, header.unix, now.monotonic)
        self.clock = clock
        self.cursor = header.cursor
        ask = False
        for head, records in zip(header.ranks, frame.records, strict=True):
            self.lost += max(0, head.lost)
            track = self.ranks.get(head.key)
            if track is None:
                ask = True
                continue
            if track.report.life is not head.life:
                track.report = track.report.model_copy(update={"life": head.life})
                track.life_since = now.monotonic
            track.clock = clock
            fresh = track.history.absorb(records)
            if len(fresh):
                ask = ask or bool(fresh["failed"].any())
                track.seconds.absorb(
                    fresh, clock.unix + (fresh["begin_ns"].astype(np.int64) - clock.monotonic_ns) / 1e9
                )
        return ask

    def absorb_requests(self, answer: RequestsAnswer) -> None:
        """
        Take in a `/v1/requests` answer.
        """
        tables = {table.key: table for table in answer.tables}
        for key, track in self.ranks.items():
            track.requests = tables.get(key)

    def facts(self) -> ExporterFacts:
        """
        The exporter as a value.
        """
        oldest = min(self.answered.get(path, -math.inf) for path in REQUIRED)
        return ExporterFacts(
            url=self.url,
            answered=None if oldest == -math.inf else oldest,
            error=next(iter(self.errors.values()), ""),
            control=self.control,
            token=self.token,
            since=self.since,
        )


REQUIRED = ("/v1/steps", "/v1/ranks")
"""
The answers that must be fresh for an exporter to count as reached.
"""


class Fleet:
    """
    All deployments and what is known of them. One event loop owns it.
    """

    def __init__(self) -> None:
        self.exporters: dict[str, ExporterTrack] = {}

    def add(self, exporter: ExporterTrack) -> None:
        """
        Watch one more exporter.
        """
        self.exporters[exporter.url] = exporter

    def of(self, deployment: str) -> list[ExporterTrack]:
        """
        The exporters of a deployment.
        """
        return [exporter for exporter in self.exporters.values() if exporter.deployment == deployment]

    def engines(self, deployment: str) -> list[EngineFacts]:
        """
        The engines of a deployment, newest first; those long replaced are left out.
        """
        tracks: dict[str, dict[RankId, tuple[ExporterTrack, RankTrack]]] = {}
        for exporter in self.of(deployment):
            for track in exporter.ranks.values():
                ranks = tracks.setdefault(track.report.identity.engine, {})
                known = ranks.get(track.id)
                # The file of an earlier process at the same place: the newest counts.
                if known is None or known[1].report.started_unix < track.report.started_unix:
                    ranks[track.id] = (exporter, track)
        started = {
            engine: min(track.report.started_unix for _, track in ranks.values()) for engine, ranks in tracks.items()
        }
        engines: list[EngineFacts] = []
        for engine in sorted(tracks, key=lambda name: (-started[name], name)):
            facts = self._facts(deployment, engine, tracks[engine], replaced=False)
            if facts.ended and any(_takes_place_of(newer, facts) for newer in engines):
                if min(rank.quiet_seconds for rank in facts.ranks) > REPLACED_SECONDS:
                    continue
                facts = self._facts(deployment, engine, tracks[engine], replaced=True)
            engines.append(facts)
        return engines

    def _facts(
        self, deployment: str, engine: str, tracks: dict[RankId, tuple[ExporterTrack, RankTrack]], *, replaced: bool
    ) -> EngineFacts:
        ids = sorted(tracks, key=lambda rank: (rank.dp_rank, rank.pp_rank, rank.tp_rank))
        labels = rank_labels(ids)
        ranks = tuple(_rank_facts(rank, label, *tracks[rank]) for rank, label in zip(ids, labels, strict=True))
        speaking = {rank.exporter for rank in ranks}
        exporters = tuple(exporter.facts() for exporter in self.of(deployment) if exporter.url in speaking)
        return EngineFacts(deployment, engine, ranks, exporters, replaced)

    def tracks(self, deployment: str, engine: str) -> Iterator[RankTrack]:
        """
        The tracks of an engine, in the order of its ranks.
        """
        found = [
            t for exporter in self.of(deployment) for t in exporter.ranks.values() if t.report.identity.engine == engine
        ]
        yield from sorted(found, key=lambda track: (track.id.dp_rank, track.id.pp_rank, track.id.tp_rank))

    def sparkline(self, engines: Sequence[EngineFacts], now: Moment, seconds: int = 60) -> tuple[float | None, ...]:
        """
        Largest drift over all ranks of `engines`, for each of the last seconds.
        """
        last = int(now.unix) - 1  # the second that is under way is not whole yet
        wanted = np.arange(last - seconds + 1, last + 1, dtype=np.int64)
        rows = [
            track.seconds.drift(wanted) for engine in engines for track in self.tracks(engine.deployment, engine.engine)
        ]
        if not rows:
            return (None,) * seconds
        stacked = np.stack(rows)
        known = ~np.isnan(stacked)
        largest = np.where(known, stacked, -np.inf).max(axis=0)
        return tuple(
            float(max(value, 0.0)) if any_known else None
            for value, any_known in zip(largest, np.asarray(known.any(axis=0)), strict=True)
        )


def _rank_facts(rank: RankId, label: str, exporter: ExporterTrack, track: RankTrack) -> RankFacts:
    # An exporter that comes back without a rank, as after a restart of the node, does not say that the rank stood still.
    clock = track.clock or exporter.clock
    assert clock is not None
    return RankFacts(
        id=rank,
        label=label,
        report=track.report,
        history=track.history,
        clock=clock,
        exporter=exporter.url,
        first_seen=track.first_seen,
        life_since=track.life_since,
        requests=track.requests,
        reported=track.reported,
    )


def _takes_place_of(newer: EngineFacts, ended: EngineFacts) -> bool:
    """
    Whether a newer engine came up where an ended one had run: a rank of it began on the same node after the last step there.
    """
    last: dict[str, float] = {}
    for rank in ended.ranks:
        host = rank.report.identity.host
        last[host] = max(last.get(host, -math.inf), rank.active_until, rank.started)
    return any(rank.started > last.get(rank.report.identity.host, math.inf) for rank in newer.ranks)
