"""
A `Rankscope` with hand-made views: shows every state of the pages without an exporter.

Run as a program it serves them all: `python tests/support/fake_rankscope.py [PORT]`.
"""

import asyncio
import dataclasses
import math
from collections.abc import Callable

from rankscope_server.domain.alert import AlertsView
from rankscope_server.domain.incident import IncidentCard, IncidentLife, IncidentView
from rankscope_server.domain.model import (
    ActedMark,
    AuditRow,
    DeploymentCard,
    DeploymentRole,
    DeviceView,
    EngineCard,
    EngineView,
    Evidence,
    ExchangeView,
    Finding,
    FindingKind,
    FixView,
    FleetView,
    HookView,
    HostLengths,
    QueueView,
    RankId,
    RankValue,
    RankView,
    RequestView,
    Series,
    Severity,
    State,
    Strip,
    StripCell,
    ToggleProgress,
)
from rankscope_server.domain.outlook import Forecast, Outlook
from rankscope_server.domain.ports import ToggleOutcome, TogglePlan

NOW = 1_780_000_000.0
ENGINES = {
    "baseline": "7c1d90e2b44f4be0",
    "canary": "a05f33c9d1e74812",
    "wedge": "e91b2c77aa3045d1",
    "dark": "51d07b6e0f2c4a98",
    "lost": "c3a8f0d2e6b14790",
    "steady": "0b9f4d7e21c84a36",
    "half": "44d1c7a90b3e4f52",
    "v2": "9e02b81d5f6a4c37",
    "v2-drift": "2f7c60ab19d84e01",
    "v2-failed": "d8813fe0427b4b6c",
}
INCIDENTS = {
    "wedge": "i-20260528-202421-91be",
    "baseline": "i-20260528-202600-7c1d",
    "dark": "i-20260528-202553-51d0",
    "canary": "i-20260528-202105-a05f",
    "steady": "i-20260528-184213-0b9f",
}
"""
Those that have a page in `fake_reports`, by deployment.
"""
MODEL = "meta-llama/Llama-3.3-70B-Instruct"
HOOKS = ("execute_model", "update_states", "guard", "collective", "sample")


def rank(pp: int, **changes: object) -> RankView:
    """
    A healthy rank of a two-stage pipeline, with changes.
    """
    plain = RankView(
        id=RankId(0, pp, 0),
        label=f"pp{pp}",
        key=f"7c1d90e2-{pp}",
        life="running",
        step=412,
        phase="done",
        in_flight_seconds=None,
        steps_per_second=24.6,
        drift_max=0,
        drifting=0,
        requests=8,
        masked=0,
        guard="broadcast",
        last_did=f"broadcast {'received' if pp == 0 else 'posted'} at step 412, done",
        hooks=tuple(HookView(name, "on", "") for name in HOOKS),
        fix_state="available",
        fix_reason="",
        faults=0,
        pid=4100 + pp,
        host="node-a",
    )
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def strip(
    until: int, decide: Callable[[int, int], str] = lambda pp, step: "broadcast", steps: int = 48, ranks: int = 2
) -> Strip:
    """
    Decisions of the last steps; `decide` gets rank and step.
    """
    numbers = tuple(range(until - steps + 1, until + 1))
    rows = []
    for pp in range(ranks):
        cells = []
        for step in numbers:
            said = [decide(other, step) for other in range(ranks)]
            differs = {"broadcast", "skip"} <= set(said)
            known = said[pp] != "missing"
            cells.append(
                StripCell(step, said[pp], 0 if known else None, 8 if known else None, 0 if known else None, differs)
            )
        rows.append((f"pp{pp}", tuple(cells)))
    return Strip(numbers, tuple(rows))


def fix(state: str = "available", **changes: object) -> FixView:
    """
    The trim fix where it can be toggled.
    """
    plain = FixView(
        state=state,
        desired=None,
        can_turn_on=state == "available",
        can_turn_off=state == "applied",
        refusal="",
        progress=None,
        last_actor=None,
        last_changed_unix=None,
    )
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def view(deployment: str, state: State, headline: str, **changes: object) -> EngineView:
    """
    An engine of a two-stage pipeline, with changes.
    """
    plain = EngineView(
        deployment=deployment,
        role=DeploymentRole.BASELINE,
        engine=ENGINES[deployment],
        model=MODEL,
        vllm_version="0.27.1",
        runner="V1",
        state=state,
        headline=headline,
        data_age_seconds=0.3,
        findings=(),
        ranks=(rank(0), rank(1)),
        strip=strip(412),
        requests=(),
        fix=fix(),
        audit=(),
    )
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def finding(kind: FindingKind, sentence: str, step: int | None, **changes: object) -> Finding:
    """
    A critical finding of both ranks.
    """
    plain = Finding(kind, Severity.CRITICAL, sentence, step, (RankId(0, 0, 0), RankId(0, 1, 0)), NOW - 40)
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def said(*words: str, requests: tuple[str, ...] = ()) -> Evidence:
    """
    What each rank said, in order, and the requests concerned.
    """
    return Evidence(tuple(RankValue(RankId(0, pp, 0), f"pp{pp}", value) for pp, value in enumerate(words)), requests)


def drifting() -> EngineView:
    """
    Drift grows on the first rank; the fix is there to be turned on.
    """
    requests = tuple(
        RequestView(
            f"cmpl-{0xA3F09C11D2 + 7919 * n:012x}-0",
            "pp0",
            61 + 9 * n,
            24 + 6 * n,
            37 - 4 * n,
            n == 0,
            None if n == 3 else 5 * n,
            371 + n,
        )
        for n in range(6)
    )
    return view(
        "baseline",
        State.DRIFTING,
        "Drift on pp0 is up to 37 tokens and grows; pp1 has none. No decision has differed yet.",
        findings=(
            finding(
                FindingKind.DRIFT,
                "pp0 believes up to 37 more output tokens than the scheduler, on 6 of 8 requests.",
                371,
                severity=Severity.WARNING,
                found_unix=NOW - 39.7,
                evidence=said(
                    "+37 tokens in 6 requests", "no drift", requests=tuple(row.request_id for row in requests[:3])
                ),
            ),
        ),
        ranks=(rank(0, drift_max=37, drifting=6, masked=1), rank(1)),
        requests=requests,
        forecast=Forecast(Outlook.IN_SIGHT, "1 of 8 requests masked, 0.4 new a second", 44.0, 168.0, "pp0"),
        incident=INCIDENTS["baseline"],
    )


def applied() -> EngineView:
    """
    The fix is on, acknowledged by every rank.
    """
    progress = ToggleProgress(True, 3, 396, 2, 2, (("pp0", "applied at step 396"), ("pp1", "applied at step 396")), 0)
    return view(
        "canary",
        State.HEALTHY,
        "Ranks agree; no drift.",
        role=DeploymentRole.CANARY,
        ranks=(rank(0, fix_state="applied", key="a05f-0"), rank(1, fix_state="applied", key="a05f-1")),
        fix=fix("applied", desired=True, progress=progress, last_actor="mira", last_changed_unix=NOW - 310),
        acted=(ActedMark(3, True, 396, NOW - 309),),
        audit=(
            AuditRow(
                NOW - 310,
                "mira",
                "canary",
                ENGINES["canary"],
                "turned the trim fix on",
                "generation 3, step 396",
                "applied at step 396 on pp0, pp1",
            ),
            AuditRow(
                NOW - 900,
                "mira",
                "canary",
                ENGINES["canary"],
                "turned the trim fix on",
                "generation 2",
                "refused: pp1 was not seen",
            ),
        ),
    )


def wedged() -> EngineView:
    """
    The first rank skipped what the last one waits for.
    """

    def decide(pp: int, step: int) -> str:
        if step < 72:
            return "broadcast"
        return ("skip" if pp == 0 else "broadcast") if step == 72 else ("none" if pp == 0 and step == 73 else "missing")

    return view(
        "wedge",
        State.WEDGED,
        "Wedged at step 72: pp1 waits in a broadcast that pp0 skipped.",
        data_age_seconds=0.4,
        findings=(
            finding(
                FindingKind.WEDGED,
                "No rank has advanced for 94 s while a step is in flight.",
                72,
                evidence=said("in step 73, state updated, for 94 s", "in step 72, decided, for 94 s"),
            ),
            finding(
                FindingKind.GUARD_DISAGREEMENT,
                "At step 72 pp0 decided to skip, pp1 to broadcast.",
                72,
                found_unix=NOW - 39.6,
                evidence=said(
                    "skips the collective, all 8 requests masked",
                    "broadcasts, none of 8 requests masked",
                    requests=("cmpl-00a3f09c11d2-0", "cmpl-00a3f09c30c1-0"),
                ),
            ),
            finding(
                FindingKind.MASK_DISAGREEMENT,
                "At step 66 a request was masked on pp0 and not on pp1: its output is wrong from there.",
                66,
                evidence=said("1 of 8 requests masked", "none of 8 requests masked", requests=("cmpl-00a3f09c11d2-0",)),
            ),
            finding(
                FindingKind.DRIFT,
                "pp0 believed up to 22 more output tokens than the scheduler.",
                31,
                severity=Severity.WARNING,
                open=False,
            ),
        ),
        ranks=(
            rank(
                0,
                key="e91b-0",
                step=73,
                phase="state updated",
                in_flight_seconds=94.2,
                steps_per_second=0.0,
                drift_max=22,
                drifting=8,
                masked=8,
                guard="none",
                last_did="skipped the collective at step 72 (all 8 requests masked), then began step 73",
            ),
            rank(
                1,
                key="e91b-1",
                step=72,
                phase="decided",
                in_flight_seconds=94.6,
                steps_per_second=0.0,
                last_did="broadcast posted at step 72 and never left: waiting for pp0",
            ),
        ),
        strip=strip(73, decide),
        fix=fix(
            can_turn_on=False,
            refusal="The engine is wedged: the fix does not revive it. Restart vLLM, then turn the fix on.",
        ),
        incident=INCIDENTS["wedge"],
    )


def blind() -> EngineView:
    """
    Old data, hooks off, code that is not known.
    """
    hooks = (
        *(HookView(name, "on", "") for name in HOOKS[:2]),
        HookView("guard", "absent", "no function of this name in the runner's module"),
        HookView("collective", "off", "probe failed: the broadcast is not where it was"),
        HookView("sample", "removed", "raised 32 times: AttributeError"),
    )
    unseen = {
        "drift_max": None,
        "drifting": None,
        "masked": None,
        "requests": None,
        "steps_per_second": None,
        "guard": "none",
        "fix_state": "unknown code",
        "fix_reason": "The trim is not in the form that the fix knows; nothing is touched.",
        "hooks": hooks,
    }
    return view(
        "dark",
        State.BLIND,
        "Not seen for 47 s: the exporter at http://10.0.4.17:9610 does not answer.",
        role=DeploymentRole.NONE,
        vllm_version="0.33.0",
        data_age_seconds=47.0,
        findings=(
            finding(
                FindingKind.BLIND,
                "The exporter at http://10.0.4.17:9610 does not answer: connection refused. Start it, or correct the address.",
                None,
                severity=Severity.WARNING,
            ),
            finding(
                FindingKind.BLIND,
                "3 of 5 hooks of pp0 are off: drift and guard decisions are not seen.",
                None,
                severity=Severity.WARNING,
            ),
        ),
        ranks=(rank(0, key="51d0-0", **unseen), rank(1, key="51d0-1", **unseen, faults=32)),
        strip=strip(412, lambda pp, step: "missing" if step > 405 else "broadcast"),
        fix=fix(
            "unknown code",
            refusal="The loaded code is not what the fix knows. Report the vLLM version with the output of `rankscope-exporter doctor`.",
        ),
        unknown_code=(
            "pp0 and pp1 run code that Rankscope does not know: two gated trims where one was expected. The trim fix is off and "
            "cannot be turned on here. Still observed: steps and batches. Not observed: request-state lengths and drift, guard "
            "decisions and masked requests. Run rankscope-exporter doctor beside vLLM and report what it prints."
        ),
        incident=INCIDENTS["dark"],
    )


def lost() -> EngineView:
    """
    A rank was killed while its peer waits.
    """
    return view(
        "lost",
        State.RANK_LOST,
        "pp0 is gone (pid 4100) and pp1 waits for it at step 118.",
        findings=(
            finding(
                FindingKind.RANK_LOST,
                "The process of pp0 ended while pp1 waits at step 118.",
                118,
                ranks=(RankId(0, 0, 0),),
            ),
        ),
        ranks=(
            rank(
                0,
                key="c3a8-0",
                life="gone",
                step=118,
                phase="scheduled",
                steps_per_second=0.0,
                last_did="entered step 118 and was gone before its state was updated",
            ),
            rank(
                1,
                key="c3a8-1",
                step=118,
                phase="decided",
                in_flight_seconds=12.9,
                steps_per_second=0.0,
                last_did="broadcast posted at step 118 and never left: waiting for pp0",
            ),
        ),
        strip=strip(118, lambda pp, step: "missing" if pp == 0 and step == 118 else "broadcast"),
        fix=fix(can_turn_on=False, refusal="pp0 is gone: every rank has to be there. Restart vLLM first."),
    )


def healthy() -> EngineView:
    """
    Nothing to see.
    """
    return view(
        "steady",
        State.HEALTHY,
        "Ranks agree; no drift.",
        role=DeploymentRole.NONE,
        runner="V1",
        ranks=(rank(0, key="0b9f-0"), rank(1, key="0b9f-1")),
    )


def half_fixed() -> EngineView:
    """
    One rank has the trim fix and the other does not.
    """
    sentence = (
        "the trim fix is on at pp0 and not at pp1 (pp1 could not act: decorated): turn it on or off again for all ranks"
    )
    return view(
        "half",
        State.MITIGATION_MIXED,
        sentence,
        findings=(finding(FindingKind.MITIGATION_MIXED, sentence, 402),),
        ranks=(rank(0, key="44d1-0", fix_state="applied"), rank(1, key="44d1-1")),
        fix=fix("mixed", can_turn_on=True, can_turn_off=True),
        forecast=Forecast(Outlook.NOT_IN_SIGHT, "no request drifts on pp1"),
    )


def v2_rank(pp: int, **changes: object) -> RankView:
    """
    A healthy rank with the V2 model runner, eagle3 and three draft tokens.
    """
    v2: dict[str, object] = {
        "drift_max": None,
        "drifting": None,
        "fix_state": "not applicable",
        "host_lengths": HostLengths(4816, 911, 0),
        "exchange": ExchangeView(412, 4, 3, 1233, 1233 if pp else None),
        "queue": None if pp else QueueView(2, 1, 7),
        "hooks": tuple(
            HookView(name, "on", "")
            for name in ("execute_model", "update_requests", "PPHandler.receive", "PPHandler.broadcast")
        ),
    }
    return rank(pp, **(v2 | changes))


def v2_view(deployment: str, state: State, headline: str, **changes: object) -> EngineView:
    """
    An engine with the V2 model runner.
    """
    v2: dict[str, object] = {
        "runner": "V2",
        "vllm_version": "0.32.0",
        "ranks": tuple(v2_rank(pp, key=f"{ENGINES[deployment][:4]}-{pp}") for pp in (0, 1)),
        "fix": fix("not applicable", refusal="not applicable on V2: it keeps no output tokens to trim"),
        "requests_unknown": "Not known on V2: request lengths are on the device, and are sampled only all together.",
    }
    return view(deployment, state, headline, **(v2 | changes))


UNSAMPLED = (
    "Drift is unknown here: the V2 model runner keeps request lengths on the device, and no sample of them has come. "
    "Set RANKSCOPE_DEVICE_LENGTHS_STEPS in vLLM's environment, say to 200, to have them sampled once in so many steps."
)


def v2_healthy() -> EngineView:
    """
    V2, whose ranks agree; device-side lengths are not sampled.
    """
    return v2_view("v2", State.HEALTHY, "pp0 and pp1 agree up to step 412", drift_unknown=UNSAMPLED)


def v2_drifting() -> EngineView:
    """
    V2, with device-side lengths beyond what the scheduler allows.
    """
    sampled = DeviceView(
        step=400, age_seconds=12.4, every=200, rows=8, excess_rows=2, total_excess=5, computed_excess=5
    )
    clean = dataclasses.replace(sampled, excess_rows=0, total_excess=-1, computed_excess=0)
    sentence = (
        "pp0 holds up to 5 tokens more on its device than the scheduler allows in 2 of 8 requests, as sampled at step 400, "
        "since step 200; pp1 agrees with the scheduler"
    )
    return v2_view(
        "v2-drift",
        State.DRIFTING,
        sentence,
        findings=(finding(FindingKind.DRIFT, sentence, 200, severity=Severity.WARNING),),
        ranks=(
            v2_rank(0, key="2f7c-0", drift_max=5, drifting=2, device=sampled),
            v2_rank(1, key="2f7c-1", drift_max=0, drifting=0, device=clean),
        ),
        forecast=Forecast(Outlook.UNKNOWN, "on V2 request lengths are on the device"),
    )


def v2_failed() -> EngineView:
    """
    V2, a step of whose last rank an error of vLLM ended.
    """
    sentence = "pp1 failed in step 34, in sample_tokens after the state was updated: AssertionError; its peers wait"
    return v2_view(
        "v2-failed",
        State.RANK_LOST,
        sentence,
        findings=(finding(FindingKind.RANK_LOST, sentence, 34, ranks=(RankId(0, 1, 0),)),),
        ranks=(
            v2_rank(
                0,
                key="d881-0",
                step=34,
                phase="decided",
                in_flight_seconds=8.2,
                steps_per_second=0.0,
                last_did="waits for the broadcast of step 34",
            ),
            v2_rank(
                1,
                key="d881-1",
                step=34,
                phase="state updated, then failed",
                steps_per_second=0.0,
                failed=True,
                guard="none",
                last_did="failed in step 34, in sample_tokens after the state was updated: AssertionError",
            ),
        ),
        strip=strip(34, lambda pp, step: "none" if pp and step == 34 else "broadcast", steps=34),
        drift_unknown=UNSAMPLED,
    )


ALL_VIEWS = (drifting, applied, wedged, blind, lost, healthy, half_fixed, v2_healthy, v2_drifting, v2_failed)


def card(
    engine: EngineView, sparkline: tuple[float | None, ...] | None = None, problems: tuple[str, ...] = ()
) -> DeploymentCard:
    """
    The card of a deployment with this one engine.
    """
    peak = max((r.drift_max or 0 for r in engine.ranks), default=0)
    if engine.drift_unknown:
        sparkline = (None,) * 120
    values = (
        tuple(round(peak * i / 119 * (0.85 + 0.15 * math.sin(i / 5)), 1) for i in range(120))
        if sparkline is None
        else sparkline
    )
    return DeploymentCard(
        name=engine.deployment,
        role=engine.role,
        model=engine.model,
        vllm_version=engine.vllm_version,
        runner=engine.runner,
        state=engine.state,
        headline=engine.headline,
        data_age_seconds=engine.data_age_seconds,
        engines=(
            EngineCard(
                engine.engine,
                engine.state,
                tuple((r.label, r.drift_max) for r in engine.ranks),
                engine.ranks[0].steps_per_second if engine.ranks else None,
                engine.headline,
                engine.fix.state,
                forecast=engine.forecast,
                incident=engine.incident,
            ),
        ),
        sparkline=values,
        fix_state=engine.fix.state,
        problems=problems,
        unknown_code=engine.unknown_code,
    )


class FakeRankscope:
    """
    Shows what it was given. Any thread may change it.
    """

    def __init__(self, engines: tuple[EngineView, ...] = (), now: float = NOW) -> None:
        self.now = now
        self.engines: dict[tuple[str, str], EngineView] = {}
        self.cards: dict[str, DeploymentCard] = {}
        self.rows: list[AuditRow] = []
        self.reports: dict[str, IncidentView] = {}
        self.captures: dict[tuple[str, int], bytes] = {}
        self.alerting = AlertsView((), (), ())
        self.drift = Series()
        self.refusal = ""
        self.unsent: tuple[str, ...] = ()
        self.toggles: list[tuple[str, str | None, bool, str]] = []
        self.closing = False
        self.version = 1
        for engine in engines:
            self.show(engine)

    def show(self, engine: EngineView, shown: DeploymentCard | None = None) -> None:
        """
        Put an engine and its card in place.
        """
        gaps = tuple(None if i > 72 else 0.0 for i in range(120)) if engine.state is State.BLIND else None
        problems = (
            (
                "http://10.0.4.17:9610 does not answer: connection refused. Start the exporter there, or correct the address.",
            )
            if engine.state is State.BLIND
            else ()
        )
        self.engines[engine.deployment, engine.engine] = engine
        self.cards[engine.deployment] = shown or card(engine, gaps, problems)
        self.version += 1

    def forget(self, engine: EngineView) -> None:
        """
        The engine is gone for good.
        """
        del self.engines[engine.deployment, engine.engine], self.cards[engine.deployment]
        self.version += 1

    def draw(self, series: Series, now: float | None = None) -> None:
        """
        Put a series in place.
        """
        self.drift = series
        self.now = now if now is not None else (series.times_unix[-1] if series.times_unix else self.now)
        self.version += 1

    async def wait_newer(self, version: int, timeout_seconds: float) -> int:
        """
        Looks every 20 ms: changes come from the test's thread.
        """
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        while self.version <= version and not self.closing and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        return self.version

    def fleet(self) -> FleetView:
        """
        What was put in place.
        """
        return FleetView(self.now, tuple(self.cards.values()))

    def engine(self, deployment: str, engine: str) -> EngineView | None:
        """
        What was put in place.
        """
        return self.engines.get((deployment, engine))

    async def series(
        self, deployment: str, engine: str, since_unix: float, until_unix: float, max_points: int
    ) -> Series:
        """
        What was put in place, on every engine whose drift can be known.
        """
        shown = self.engines.get((deployment, engine))
        return Series() if shown is None or shown.drift_unknown else self.drift

    async def audit(self, limit: int, deployment: str | None = None) -> tuple[AuditRow, ...]:
        """
        What was put in place.
        """
        return tuple(self.rows[:limit])

    def report(self, incident: IncidentView) -> None:
        """
        Put an incident in place.
        """
        self.reports[incident.card.id] = incident
        self.version += 1

    def alert(self, alerting: AlertsView) -> None:
        """
        Put the alerts in place.
        """
        self.alerting = alerting
        self.version += 1

    async def incidents(self, limit: int, deployment: str | None = None) -> tuple[IncidentCard, ...]:
        """
        What was put in place, in the order of the port.
        """
        cards = [view.card for view in self.reports.values() if deployment in (None, view.card.deployment)]
        return tuple(sorted(cards, key=lambda card: (card.life is IncidentLife.CLOSED, -card.opened_unix))[:limit])

    async def incident(self, incident: str) -> IncidentView | None:
        """
        What was put in place.
        """
        return self.reports.get(incident)

    async def capture(self, incident: str, number: int) -> bytes | None:
        """
        What was put in place.
        """
        return self.captures.get((incident, number))

    async def alerts(self) -> AlertsView:
        """
        What was put in place.
        """
        return self.alerting

    def plan_toggle(self, deployment: str, engine: str | None, *, desired: bool) -> TogglePlan | None:
        """
        A plan that holds for every rank.
        """
        found = [
            shown
            for (name, identity), shown in self.engines.items()
            if name == deployment and engine in (None, identity)
        ]
        if not found:
            return None
        refusal = self.refusal or next(
            (
                shown.fix.refusal
                for shown in found
                if not (shown.fix.can_turn_on if desired else shown.fix.can_turn_off)
            ),
            "",
        )
        return TogglePlan(
            deployment=deployment,
            desired=desired,
            engines=tuple(shown.engine for shown in found),
            ranks=tuple(r.label for shown in found for r in shown.ranks),
            effective_step=432,
            timing="Every rank acts at about step 432, within a second.",
            changes="Each pipeline rank trims the draft tokens that were not accepted; drift ends at that step."
            if desired
            else "Ranks but the last keep draft tokens that were not accepted, as stock vLLM does: drift begins again.",
            limits=("It does not repair output that is already wrong.", "It does not revive a wedged engine."),
            refusal=refusal,
        )

    async def toggle(self, deployment: str, engine: str | None, *, desired: bool, actor: str) -> ToggleOutcome:
        """
        Accepts unless `refusal` is set; ranks then wait for step 432.
        """
        self.toggles.append((deployment, engine, desired, actor))
        if self.refusal:
            return ToggleOutcome(False, self.refusal, None, None)
        for (name, identity), shown in list(self.engines.items()):
            if name == deployment and engine in (None, identity):
                progress = ToggleProgress(
                    desired,
                    4,
                    432,
                    0,
                    len(shown.ranks),
                    tuple((r.label, "pending, acts at step 432") for r in shown.ranks),
                    None,
                )
                self.show(
                    dataclasses.replace(
                        shown,
                        fix=dataclasses.replace(
                            shown.fix,
                            desired=desired,
                            progress=progress,
                            can_turn_on=False,
                            can_turn_off=False,
                            refusal="A toggle is on its way; wait until every rank has acted.",
                            last_actor=actor,
                            last_changed_unix=self.now,
                        ),
                    )
                )
        return ToggleOutcome(True, "Sent to 2 ranks; they act at step 432.", 4, 432, self.unsent)

    def acknowledge(self, deployment: str, engine: str, acted: int) -> None:
        """
        So many ranks have acted on the last toggle.
        """
        shown = self.engines[deployment, engine]
        progress = shown.fix.progress
        assert progress is not None
        done = acted == progress.ranks
        word = "applied" if progress.desired else "taken back"
        per_rank = tuple(
            (label, f"{word} at step 432" if index < acted else "pending, acts at step 432")
            for index, (label, _) in enumerate(progress.per_rank)
        )
        changed = dataclasses.replace(
            progress, acknowledged=acted, per_rank=per_rank, applied_step_spread=0 if done else None
        )
        state = ("applied" if progress.desired else "available") if done else shown.fix.state
        self.show(
            dataclasses.replace(
                shown,
                fix=dataclasses.replace(
                    shown.fix,
                    progress=changed,
                    state=state,
                    can_turn_on=done and state == "available",
                    can_turn_off=done and state == "applied",
                    refusal="" if done else shown.fix.refusal,
                ),
            )
        )


def growing_series(now: float, seconds: int = 600, labels: tuple[str, ...] = ("pp0", "pp1")) -> Series:
    """
    Drift that grows on the first rank.
    """
    times = [float(int(now) - seconds + i) for i in range(seconds)]
    first: list[float | None] = [float(max(0, round(i / seconds * 37 + 3 * math.sin(i / 9)))) for i in range(seconds)]
    return Series(times, list(labels), [first, *([0.0] * seconds for _ in labels[1:])])


def main() -> None:
    """
    Serve every state.
    """
    import sys
    import time
    from pathlib import Path

    import uvicorn
    from fake_reports import fill
    from fastapi import FastAPI, Request, Response

    from rankscope_server.web import install

    root = Path(__file__).parents[2]
    fake = FakeRankscope(tuple(make() for make in ALL_VIEWS), now=time.time())
    fake.draw(growing_series(time.time()))
    fill(fake)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url="/api/v1/openapi.json")

    @app.middleware("http")
    async def csp(request: Request, call_next):  # type: ignore[no-untyped-def]
        response: Response = await call_next(request)
        response.headers["Content-Security-Policy"] = CSP
        return response

    install(app, fake, templates_dir=root / "templates", static_dir=root / "server/rankscope_server/static")
    uvicorn.run(
        app, port=int(sys.argv[1]) if len(sys.argv) > 1 else 8701, log_level="warning", timeout_graceful_shutdown=1
    )


CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; font-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)

if __name__ == "__main__":
    main()
